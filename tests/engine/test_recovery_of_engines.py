"""Recovery of a real engine's store after kill -9 of every process: what was acknowledged is there, and checked."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal

import pytest

import pyengine
from damage import flip
from fix_cli import run
from fix_engine import EACH_MODE
from fix_golden import usual
from fix_owner import eventually
from pyengine.cli.engine_status import engine_status
from pyengine.errors import ExitCode
from pyengine.ipc.crashed_engine_memory import rebuild_offline, recover_offline
from pyengine.ipc.live_reader import check_now
from pyengine.ipc.shared_objects import find_folder
from pyengine.results import PutStatus
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.config import load_config
from pyengine.storage.engine_id import ID_NAME
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.report import RecoveryState


def put_and_list(engine, path, count):
    """Acknowledged puts, and the list of them that `check --acked` reads."""
    with pyengine.connect(engine.root) as producer, open(path, "a") as acked:
        for number in range(count):
            body = b"%d " % number * (number % 50 + 1)
            result = producer.put(f"T{number % 3}", body, queue_id=number % 2, keys=f"k{number}")
            assert result.status is PutStatus.PUT_OK
            acked.write(json.dumps({
                "topic": f"T{number % 3}", "queue_id": number % 2, "queue_offset": result.queue_offset,
                "physical_offset": result.physical_offset, "body_sha256": hashlib.sha256(body).hexdigest()}) + "\n")


def recovered_and_checked(engine, acked, count):
    config = load_config(engine.root, {})
    report = recover_offline(engine.root, config)
    assert report.exit_code is ExitCode.OK, report.sentence
    found = check(MessageStore(engine.root, config.geometry), acked=acked)
    # A crash leaves the allocator's files whole, so nothing at all is to be found.
    assert list(found.findings) == []
    assert (found.acked, found.acked_missing, found.messages, found.index_keys) == (count, 0, count, count)
    return report


@pytest.mark.parametrize("mode", EACH_MODE)
def test_with_shared_memory_queues_and_index_stay_and_the_pool_is_drained(make_engine, tmp_path, mode):
    engine = make_engine(mode)
    engine.start()
    if mode == "pool":
        engine.kill("committer", signal.SIGSTOP)
    put_and_list(engine, tmp_path / "acked", 300)
    engine.kill_all()
    report = recovered_and_checked(engine, tmp_path / "acked", 300)
    assert report.shared_state == "used"
    assert (report.drained_bytes > 0) == (mode == "pool")
    assert report.index_files_removed == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_without_shared_memory_the_files_alone_are_enough(make_engine, tmp_path, mode):
    engine = make_engine(mode)
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    eventually(lambda: engine.positions()["reput_from"] == engine.positions()["wrote"], "all of it is in the index")
    engine.kill_all()
    find_folder(engine.root).sweep()
    report = recovered_and_checked(engine, tmp_path / "acked", 300)
    assert report.shared_state == "none"
    assert report.index_files_removed == 1


@pytest.mark.parametrize("is_opened_since", [False, True])
def test_after_a_kill_the_log_is_ordered_by_time_unless_another_program_has_opened_the_store(make_engine, is_opened_since):
    engine = make_engine("async")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many("T", [b"x"] * 10).ok
        eventually(lambda: (found := read_watermark(engine.root).watermark) and found.flushed, "there is a watermark")
        engine.suspend("checkpointer")
        noted = read_watermark(engine.root).watermark
        assert producer.put_many("T", [b"y"] * 10).ok and noted.ordered_from == 0
    engine.kill_all()
    if is_opened_since:
        (engine.root / "lock").write_bytes(b"lock")  # as RocketMQ when it starts
    engine.start()
    mark = read_watermark(engine.root).watermark
    assert mark.flushed > noted.flushed and mark.ordered_from == (mark.flushed if is_opened_since else 0)


def copy_while_it_runs(engine, to) -> int:
    """The log as it is now, then everything else after more was put; the end of the log that was copied."""
    shutil.copytree(engine.root / "commitlog", to / "commitlog")
    with pyengine.open_store(engine.root) as store:
        copied_end = store.max_physical_offset("committed")
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many("later", [b"x" * 1000] * 200).ok
    eventually(lambda: (found := read_watermark(engine.root).watermark) and found.flushed > copied_end, "the watermark moves on")
    for path in engine.root.iterdir():
        if path.is_dir() and path.name != "commitlog":
            shutil.copytree(path, to / path.name)
        elif path.is_file():
            shutil.copy2(path, to)
    return copied_end


@pytest.mark.parametrize("mode", usual(["async", "sync"], ["async"], pytest.mark.ci))
def test_a_copy_that_was_taken_while_the_engine_ran_starts_and_says_where_its_log_ends(make_engine, tmp_path, mode):
    engine, copy = make_engine(mode), make_engine(mode, "copy")
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    end = copy_while_it_runs(engine, copy.root)
    named = read_watermark(copy.root).watermark.flushed
    said = f"its log ends at {end}, and the watermark that came with it names {named}"
    before = engine_status(copy.root, {})
    assert said in before["reason"] and before["positions"]["flushed"] == end
    found = check_now(copy.root, load_config(copy.root, {}), tmp_path / "acked")
    assert (found.exit_code, found.acked_missing) == (ExitCode.OK, 0) and any(said in one.text for one in found.findings)
    ready = copy.start()
    assert ready["state"] == "running" and said in ready["recovery"]
    assert said in engine_status(copy.root, {})["reason"] and not engine_status(copy.root, {})["read_only"]
    assert copy.positions()["wrote"] == end
    copy.stop()
    found = check(MessageStore(copy.root, load_config(copy.root, {}).geometry), acked=tmp_path / "acked")
    assert (found.findings, found.acked_missing, found.messages) == ([], 0, 300)
    assert copy.start()["state"] == "running" and engine_status(copy.root, {})["reason"] == "", "it is said once"
    copy.stop()
    assert read_watermark(engine.root).watermark.uuid != read_watermark(copy.root).watermark.uuid
    engine.stop()


def test_recover_and_rebuild_make_a_copy_a_store_of_its_own_too(make_engine, tmp_path):
    engine = make_engine("sync")
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    end = copy_while_it_runs(engine, tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "again")
    config = load_config(tmp_path / "copy", {})
    first, second = recover_offline(tmp_path / "copy", config), recover_offline(tmp_path / "copy", config)
    assert (first.state, first.end_offset, first.is_copy) == (RecoveryState.RECOVERED, end, True)
    assert "This is a copy" in first.sentence and "copy" not in second.sentence
    assert rebuild_offline(tmp_path / "again", config).state is RecoveryState.RECOVERED
    engine.stop()


def test_a_copy_that_was_damaged_later_is_degraded_as_its_original_would_be(make_engine, tmp_path):
    engine = make_engine("sync")
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    engine.stop()
    shutil.copytree(engine.root, tmp_path / "copy")
    segment = tmp_path / "copy" / "commitlog" / ("0" * 20)
    flip(segment, segment.read_bytes().index(b"30 30 30"))
    report = recover_offline(tmp_path / "copy", load_config(tmp_path / "copy", {}))
    assert report.state is RecoveryState.DEGRADED and report.watermark == read_watermark(engine.root).watermark.flushed


def copy_with_a_hole(engine, to, segment_bytes: int) -> tuple[int, int]:
    """As `cp -a` copies a log that is being written: its front, then, after more was put, the rest; then config/.

    With small segments the rest is further segments. Returns (where the copied log is whole to, the copied watermark).
    """
    log = engine.root / "commitlog"
    with pyengine.connect(engine.root) as producer, pyengine.open_store(engine.root) as store:
        (to / "commitlog").mkdir(parents=True)
        end = store.max_physical_offset("committed")
        border = end + 100_000 - end % 4096  # what cp has read when more is put: the messages, and zeros after them
        start = end - end % segment_bytes
        for path in sorted(log.iterdir()):
            if int(path.name) < start:
                shutil.copy2(path, to / "commitlog")
        with open(log / f"{start:020d}", "rb") as source, open(to / "commitlog" / f"{start:020d}", "wb") as target:
            target.write(source.read(border - start))
            assert producer.put_many("later", [b"x" * 1000] * 400).ok
            source.seek(target.tell())
            target.write(source.read())
        for path in sorted(log.iterdir()):
            if int(path.name) > start:
                shutil.copy2(path, to / "commitlog")
    eventually(lambda: (found := read_watermark(engine.root).watermark) and found.flushed > border, "the watermark moves on")
    for path in engine.root.iterdir():
        if path.is_dir() and path.name != "commitlog":
            shutil.copytree(path, to / path.name)
        elif path.is_file():
            shutil.copy2(path, to)
    return end, read_watermark(to).watermark.flushed


@pytest.mark.parametrize("mode", usual(["async", "sync"], ["async"], pytest.mark.ci))
def test_a_copy_with_a_hole_is_said_to_be_a_copy_by_every_command_and_goes_on_with_one(make_engine, tmp_path, mode):
    engine, copy = make_engine(mode), make_engine(mode, "copy")
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    end, named = copy_with_a_hole(engine, copy.root, 1 << 20)
    engine.stop()
    said = f"This is a copy: its log ends at {end}, and the watermark that came with it names {named}: it was copied while its engine wrote"
    lost = re.compile(r"`recover --accept-loss` puts ([0-9,]+) bytes after the end into quarantine")

    status = run("status", copy.root, "--json").document
    assert said in status["reason"] and lost.search(status["reason"]) and status["positions"]["wrote"] == end
    assert status["positions"]["flushed"] <= end
    found = run("check", copy.root, "--json")
    assert found.code == ExitCode.CORRUPTION
    row, = (one for one in found.document["findings"] if said in one["text"])
    assert lost.search(row["text"]) and row["severity"] == "error" and "--accept-loss" in found.stdout
    dry, refused = run("recover", copy.root, "--dry-run"), run("recover", copy.root)
    assert dry.code == refused.code == ExitCode.CORRUPTION
    started = run("start", copy.root)
    assert started.code == ExitCode.DEGRADED
    for text in (dry, refused, started):
        assert said in text.stdout + text.stderr and lost.search(text.stdout + text.stderr), text
    status = run("status", copy.root, "--json").document
    assert said in status["reason"] and lost.search(status["reason"]) and status["read_only"]
    assert status["positions"]["flushed"] == 0, "no engine has synced the copy"
    assert run("stop", copy.root).code != ExitCode.USAGE
    texts = (row["text"], status["reason"], *(ran.stdout + ran.stderr for ran in (dry, refused, started)))
    counts = {lost.search(text)[1] for text in texts}
    assert len(counts) == 1, "all say the same"

    accepted = run("recover", copy.root, "--accept-loss", "--json")
    assert accepted.code == ExitCode.REPAIRED
    assert accepted.document["end_offset"] == end and f"{accepted.document['stranded_bytes']:,}" in counts
    assert sum(piece["size_bytes"] for piece in accepted.document["quarantined"]) == accepted.document["stranded_bytes"]
    assert copy.start()["state"] == "running" and copy.positions()["wrote"] == end
    copy.stop()
    report = check(MessageStore(copy.root, load_config(copy.root, {}).geometry), acked=tmp_path / "acked")
    assert (report.findings, report.acked_missing, report.messages) == ([], 0, 300)


def test_segments_that_were_copied_later_go_to_quarantine_and_every_command_says_so(make_engine, tmp_path):
    engine, copy = (make_engine("async", name, mapped_file_size_commit_log_bytes=64 << 10) for name in ("store", "copy"))
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    end, named = copy_with_a_hole(engine, copy.root, 64 << 10)
    engine.stop()
    stranded = sum(path.stat().st_size for path in (copy.root / "commitlog").iterdir() if int(path.name) > end and any(path.read_bytes()))
    said = (f"This is a copy: its log ends at {end}, and the watermark that came with it names {named}; the {named - end:,} bytes between "
            f"were not copied whole; {stranded:,} bytes after the end go to quarantine")
    found = run("check", copy.root, "--json")
    assert said in run("status", copy.root, "--json").document["reason"] and any(said in one["text"] for one in found.document["findings"])
    assert said in run("recover", copy.root, "--dry-run").stdout
    started = run("start", copy.root)
    assert started.code == ExitCode.OK and said in started.stdout
    assert said in run("status", copy.root, "--json").document["reason"] and copy.positions()["wrote"] == end
    copy.stop()
    report = check(MessageStore(copy.root, load_config(copy.root, {}).geometry), acked=tmp_path / "acked")
    assert (report.findings, report.acked_missing, report.messages) == ([], 0, 300)


def test_a_store_whose_device_has_another_number_is_no_copy(make_engine, tmp_path):
    engine = make_engine("sync")
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    engine.stop()
    path = engine.root / ID_NAME
    document = json.loads(path.read_bytes())
    with open(path, "r+b") as file:  # the inode stays, as it does over a remount
        file.write(json.dumps(document | {"device": document["device"] + 1}).encode().ljust(len(path.read_bytes())))
    segments = sorted((engine.root / "commitlog").iterdir())
    with open(segments[0], "r+b") as file:
        file.seek(2000)
        file.write(bytes(len(segments[0].read_bytes()) - 2000))
    report = recover_offline(engine.root, load_config(engine.root, {}))
    assert (report.state, report.is_copy) == (RecoveryState.DEGRADED, False)
