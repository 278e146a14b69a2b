"""A power cut after *kill, recover*: what a recovery has kept, and told, is there after the next cut too.

The store is made in the page cache, as a killed engine leaves it: durable up to its watermark, above it nothing was synced.
Then it is recovered, goes on by one record, and the power is cut at any moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.power_cut import build_shim, explore, read_journal, shim_environment
from fix_golden import usual
from fix_log import SMALL
from pyengine.formats.paths import segment_name
from pyengine.storage.check.check import check
from pyengine.storage.check.report import Severity
from pyengine.storage.checkpoint import create_abort_file
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState
from waiting import scaled_timeout_s

STATES = 60
STATES_LONG = 2000
RECORDS = 40
TESTS = Path(__file__).parents[1]

# argv: store, acks, pattern (a folder with the store's files), a JSON document of `case`.
CHILD = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from fix_log import SMALL, UUID
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.storage import durable_writes
from pyengine.storage.message_store import MessageStore
from pyengine.storage.checkpoint import Cut, CUT
from pyengine.storage.recovery.recover import recover
from pyengine.storage.checkpoint import DurableWatermark, WATERMARK
root, acks, pattern, case = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), Path(sys.argv[3]), json.loads(sys.argv[4])
size = SMALL.mapped_file_size_commit_log_bytes

def write(path, at, data, sync):
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.pwrite(descriptor, data, at)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)

def log(start, end, data, sync):
    while start < end:
        base = start - start % size
        stop = min(end, base + size)
        write(root / "commitlog" / segment_name(base), start - base, data[:stop - start], sync)
        data, start = data[stop - start:], stop

durable_writes.make_folders(root / "commitlog")
whole = b"".join(path.read_bytes() for path in sorted((pattern / "commitlog").iterdir()))
durable, end, further = case["durable"], case["end"], case["further"]
log(0, len(whole), whole[:durable] + bytes(len(whole) - durable), True)
durable_writes.sync_folder(root / "commitlog")
WATERMARK.write(root, DurableWatermark(UUID, 1, durable))
(root / "abort").touch()
durable_writes.sync_folder(root)
# From here on what the engine writes is in the page cache; only new names are durable.
log(durable, end, whole[durable:end], False)
for path in sorted(pattern.rglob("*")):
    if path.is_file() and path.relative_to(pattern).parts[0] in case["derived"]:
        target = root / path.relative_to(pattern)
        os.close(durable_writes.create_file(target.parent, target.name, path.stat().st_size))
        write(target, 0, path.read_bytes(), False)
if case["cut"]:
    CUT.write(root, Cut(case["cut"], end, "a test", False))
report = recover(MessageStore(root, SMALL))
assert report.end_offset == (case["cut"] or end), report
os.write(acks, b"%d\\n" % report.end_offset)
(root / "abort").touch()
durable_writes.sync_folder(root)
log(report.end_offset, further, whole[report.end_offset:further], True)
WATERMARK.write(root, DurableWatermark(UUID, 1, further))
os.write(acks, b"%d\\n" % further)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("derived", [(), pytest.param(("consumequeue", "index"), marks=pytest.mark.ci)], ids=["log", "log-and-queues"])
@pytest.mark.parametrize("cut", usual([False, True], [False], pytest.mark.ci), ids=["killed", "cut"])
def test_records_kept_by_a_recovery_survive_every_power_cut(shim, build_store, tmp_path, seed, request, cut, derived):
    store = build_store(RECORDS)
    create_abort_file(store.root)
    recover(MessageStore(store.root, SMALL))
    records = store.records
    case = {"durable": records[20].end, "end": records[-2].end, "derived": derived, "cut": records[30].end if cut else 0,
            "further": records[31 if cut else -1].end}
    root, acks, journal = tmp_path / "all" / "store", tmp_path / "acks", tmp_path / "journal"
    root.parent.mkdir()
    acks.touch()
    environ = os.environ | shim_environment(shim, journal, root.parent, acks) | {"PYTHONPATH": os.pathsep.join(
        [str(TESTS.parent), str(TESTS)])}
    subprocess.run([sys.executable, "-c", CHILD, root, acks, store.root, json.dumps(case)], env=environ, check=True,
                   timeout=scaled_timeout_s(120))

    def judge(tree: Path, lines: list[bytes]) -> str | None:
        if not lines:  # the engine's own cut, before anything was told of the recovery
            return None
        told = int(lines[-1])
        report = recover(MessageStore(tree, SMALL))
        if report.state is not RecoveryState.RECOVERED or report.end_offset not in (told, case["further"]):
            return f"{told} was told, the next recovery says {report.state} {report.end_offset}"
        if dict(report.queue_ends) != store.queue_ends(report.end_offset):
            return f"queues end at {report.queue_ends}"
        found = check(MessageStore(tree, SMALL))
        bad = [str(one) for one in found.findings if one.severity is Severity.ERROR]
        for record in store.records:
            if record.end <= told:
                with open(tree / "commitlog" / segment_name(record.start - record.start % store.size_bytes), "rb") as file:
                    if os.pread(file.fileno(), len(record.data), record.start % store.size_bytes) != record.data:
                        bad.append(f"the record at {record.start} is not what it was")
        return "; ".join(bad) or None

    states = STATES_LONG if request.config.run_long else STATES
    outcome = explore(read_journal(journal), root, judge, states=states, seed=seed, scratch=tmp_path / "scratch")
    assert (outcome.bad, outcome.acknowledged) == ([], 2)
