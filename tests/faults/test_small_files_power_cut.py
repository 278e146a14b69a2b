"""Power cuts while the engine's small files are replaced and old segments are deleted.

Of a file what a write has returned for is there, or what the next write was about; of a log that is deleted from its
beginning no segment is missing in the middle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.power_cut import build_shim, explore, read_journal, shim_environment
from fix_golden import usual
from pyengine.formats.paths import segment_name
from pyengine.storage.checkpoint import read_checkpoint, read_watermark
from pyengine.storage.consumer_offset import CANCELS_NAME, DelayOffsets, delay_marks
from pyengine.storage.engine_id import read_epoch
from waiting import scaled_timeout_s

STEPS = 20
SEGMENT_BYTES = 4096
TOGETHER = 4  # new files of a step
# argv: store, acks, what is written, what is forgotten.
WRITER = """
import os, sys
from pathlib import Path
from pyengine.formats.small_file import Checkpoint
from pyengine.formats.paths import segment_name
from pyengine.storage.engine_id import raise_epoch
from pyengine.storage import checkpoint as store_checkpoint, durable_writes
from pyengine.formats.delayed_message import DelayMark
from pyengine.storage import consumer_offset, durable_file
from pyengine.storage.consumer_offset import DelayCancels, DelayOffsets
from pyengine.storage.checkpoint import DurableWatermark, WATERMARK
root, acks, what, forgets = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), sys.argv[3], sys.argv[4]
for folder in (root / "config", root / "commitlog"):
    durable_writes.make_folders(folder)
if forgets == "sync":
    durable_writes.sync_descriptor = durable_file.sync_descriptor = lambda *_, **__: None
    store_checkpoint.os.fdatasync = lambda *_: None
if forgets == "file system":
    durable_writes.sync_file_system = lambda *_: True
if forgets == "folder":
    durable_writes.sync_folder = durable_file.sync_folder = lambda *_: None
log = root / "commitlog"
if what == "removal":
    for number in range(%(steps)d + 1):
        os.close(durable_writes.create_file(log, segment_name(number * %(size)d), %(size)d))
offsets = DelayOffsets(root)
consumer_offset.CANCELS_SHORTEN_BYTES = 1000
cancels, scheduler = DelayCancels(root), DelayCancels(root)
for number in range(1, %(steps)d + 1):
    if what == "delay offsets":
        offsets.write({1: number, 2: 2 * number})
    elif what == "cancels":
        scheduler.take(2, number, 0)
        scheduler.shorten(0, None)
        assert cancels.cancel(DelayMark(number, 1, 1, number, 0))
    elif what == "checkpoint":
        store_checkpoint.write_checkpoint(root, Checkpoint(number, number, number))
    elif what == "watermark":
        WATERMARK.write(root, DurableWatermark("x", 1, number))
    elif what == "epoch":
        raise_epoch(root)
    elif what == "new files":
        queues = [root / "consumequeue" / ("topic-%%d" %% (number * %(together)d + more)) / "0" for more in range(%(together)d)]
        made = durable_writes.create_files([str(queue / segment_name(0)) for queue in queues], %(size)d, allocate=512)
        assert made is not None
        for descriptor in made:
            os.close(descriptor)
    else:
        os.close(durable_writes.unlink_durably(log / segment_name((number - 1) * %(size)d)))
    os.write(acks, b"%%d\\n" %% number)
""" % {"steps": STEPS, "size": SEGMENT_BYTES, "together": TOGETHER}


def number_in(read: Callable[[Path], int]) -> Callable[[Path, list[bytes]], str | None]:
    def check(tree: Path, acks: list[bytes]) -> str | None:
        count, found = int(acks[-1]) if acks else 0, read(tree)
        return None if found in (count, count + 1) else f"it says {found} after {count} were written"

    return check


def delayed(tree: Path) -> int:
    table, said = DelayOffsets(tree).read()
    assert not said and table.get(2, 0) == 2 * table.get(1, 0), said
    return table.get(1, 0)


def watermarked(tree: Path) -> int:
    reading = read_watermark(tree)
    assert not reading.damage, reading.damage
    return reading.watermark.flushed if reading.watermark else 0


def checkpointed(tree: Path) -> int:
    times = read_checkpoint(tree)
    assert times.physic_msg_timestamp_ms == times.logics_msg_timestamp_ms == times.index_msg_timestamp_ms
    return times.physic_msg_timestamp_ms


def removal(tree: Path, acks: list[bytes]) -> str | None:
    """Only after everything was made: what is there reaches from some segment to the last, without a gap."""
    if not acks:
        return None
    there = sorted(path.name for path in (tree / "commitlog").iterdir())
    wanted = [segment_name(number * SEGMENT_BYTES) for number in range(STEPS + 1 - len(there), STEPS + 1)]
    if there != wanted:
        return f"a gap: {there}"
    gone = int(acks[-1])
    return None if STEPS + 1 - len(there) in (gone, gone + 1) else f"{STEPS + 1 - len(there)} are gone, {gone} were deleted for good"


def cancelled(tree: Path, acks: list[bytes]) -> str | None:
    path = tree / "config" / CANCELS_NAME
    content = path.read_bytes() if path.exists() else b""
    there = {json.loads(line.rpartition(b" ")[0])["physical_offset"] for line in delay_marks(content).splitlines() if line}
    lost = {*range(1, int(acks[-1]) + 1 if acks else 1)} - there
    return f"lost: {sorted(lost)}" if lost else None


def new_files(tree: Path, acks: list[bytes]) -> str | None:
    """All those of the steps that are over; of no other a part."""
    there = [path for path in (tree / "consumequeue").rglob("*") if path.is_file()]
    if any(path.stat().st_size != SEGMENT_BYTES for path in there):
        return "a file has a name and not its length"
    found, wanted = {path.parts[-3] for path in there}, TOGETHER * (int(acks[-1]) if acks else 0)
    lost = {f"topic-{TOGETHER + number}" for number in range(wanted)} - found
    return f"lost: {sorted(lost)}" if lost else None


CHECKS = {"delay offsets": number_in(delayed), "checkpoint": number_in(checkpointed), "watermark": number_in(watermarked),
          "epoch": number_in(read_epoch), "cancels": cancelled, "removal": removal, "new files": new_files}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


def run(shim: Path, folder: Path, what: str, forgets: str):
    root, acks, journal = folder / "all" / "store", folder / "acks", folder / "journal"
    root.parent.mkdir()
    acks.touch()
    environ = os.environ | shim_environment(shim, journal, root.parent, acks)
    subprocess.run([sys.executable, "-c", WRITER, str(root), str(acks), what, forgets], env=environ, check=True,
                   timeout=scaled_timeout_s(120))
    return root, read_journal(journal)


def judged(check):
    """A complaint of an assertion is one of the check's."""
    def run_check(tree: Path, acks: list[bytes]) -> str | None:
        try:
            return check(tree, acks)
        except (AssertionError, OSError) as error:
            return str(error) or "an assertion"

    return run_check


@pytest.mark.parametrize("what", usual(CHECKS, ["delay offsets", "watermark", "cancels", "removal"], pytest.mark.ci))
def test_written_small_files_survive_every_power_cut(shim, tmp_path, seed, what):
    root, records = run(shim, tmp_path, what, "nothing")
    outcome = explore(records, root, judged(CHECKS[what]), states=100, seed=seed, scratch=tmp_path / "scratch")
    assert (outcome.bad, outcome.acknowledged) == ([], STEPS)


@pytest.mark.parametrize("what, forgets", [
    ("cancels", "sync"), ("removal", "folder"), ("new files", "file system"),
    *usual([("delay offsets", "sync"), ("checkpoint", "sync"), ("watermark", "folder")], [], pytest.mark.ci)])
def test_a_careless_writer_is_caught(shim, tmp_path, seed, what, forgets):
    root, records = run(shim, tmp_path, what, forgets)
    assert explore(records, root, judged(CHECKS[what]), states=200, seed=seed, scratch=tmp_path / "scratch", stop_at=1).bad
