"""A cut that was decided happens as a whole, however often its process is killed; what it removes is in quarantine."""

from __future__ import annotations

import json

import pytest

from dying import run_and_die_at
from pyengine.errors import CorruptionError, ExitCode
from pyengine.storage import durable_file
from pyengine.storage.check.check import check
from pyengine.storage.check.report import Severity
from pyengine.storage.checkpoint import CUT, Cut, read_cut, read_watermark
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery import log as repaired_log
from pyengine.storage.recovery.quarantine import PlannedPiece
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState

WHY = "the master has other records"
SYSTEM_CALLS = ("open", "pwrite", "write", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "rename", "link",
                "unlink", "mkdir", "rmdir", "utime")


def recovered(store):
    return recover(MessageStore(store.root, store.geometry))


def whole_store(build_store, name, count=40):
    """A store in which everything is durable, with queues and index."""
    store = build_store(count, flushed=0, name=name)
    recovered(store)
    assert read_watermark(store.root).watermark.flushed == store.end
    return store


def kept_bytes(store):
    """{physical offset: bytes} of what went to quarantine, zeros at the end left out; each piece has its note."""
    kept = {}
    for note in sorted((store.root / "quarantine").glob("*.json")):
        said = json.loads(note.read_bytes())
        assert said["reason"] == WHY
        content = note.with_suffix("").read_bytes().rstrip(b"\0")
        assert said["physical_offset"] not in kept, "kept twice"
        kept[said["physical_offset"]] = content
    return kept


def log_bytes(store, start, end):
    return b"".join(store.read(at, min(end, at - at % store.size_bytes + store.size_bytes))
                    for at in [start, *range(start - start % store.size_bytes + store.size_bytes, end, store.size_bytes)])


@pytest.mark.parametrize("number", [3, 11, 20, 38, 39])
def test_the_log_ends_at_the_boundary_and_everything_follows(build_store, number):
    store = whole_store(build_store, "cut")
    at = store.records[number].start
    gone = {start: log_bytes(store, start, stop).rstrip(b"\0") for start, stop in pieces(store, at)}
    CUT.write(store.root, Cut(at, store.end, WHY))
    report = recovered(store)
    assert (report.state, report.end_offset, report.exit_code) == (RecoveryState.RECOVERED, at, ExitCode.REPAIRED)
    assert report.queue_ends == store.queue_ends(at)
    assert read_watermark(store.root).watermark.flushed == at
    assert kept_bytes(store) == gone
    assert WHY in " ".join(report.notes) and str(at) in " ".join(report.notes)
    assert read_cut(store.root) is None and recovered(store).changed is False
    # The rest is what it would be had the others never been written, but for file times and names.
    other = build_store(40, flushed=0, name="never")
    cut_by_hand(other, at)
    recovered(other)
    ours, never = store.tree("quarantine", "config"), other.tree("quarantine", "config")
    assert ours.keys() == never.keys()
    assert {name: content for name, content in ours.items() if name.startswith(("commitlog", "consumequeue"))} == {
        name: content for name, content in never.items() if name.startswith(("commitlog", "consumequeue"))}


def test_segments_go_newest_first_and_the_note_is_gone_for_good_at_last(build_store, monkeypatch):
    """RocketMQ, started in between, meets no gap; and no power cut brings the note back, which would cut what was put since."""
    store = whole_store(build_store, "cut")
    CUT.write(store.root, Cut(store.records[3].start, store.end, WHY))
    done = []
    keep, sync_folder = PlannedPiece.keep, durable_file.sync_folder
    monkeypatch.setattr(PlannedPiece, "keep", lambda one: (done.append(one.source.name), keep(one)) if one.digest is None else keep(one))
    monkeypatch.setattr(durable_file, "sync_folder", lambda path: (done.append((path, CUT.path(store.root).exists())), sync_folder(path)))
    clear = repaired_log.clear_file_from
    monkeypatch.setattr(repaired_log, "clear_file_from", lambda *of: (done.append(read_cut(store.root).kept), clear(*of)))
    recovered(store)
    names = [name for name in done if isinstance(name, str)]
    assert len(names) > 1 and names == sorted(names, reverse=True)
    config = CUT.path(store.root).parent
    assert done[-3:] == [True, (config, False), (config, False)]  # half cleared it is never copied again; this note goes, then the marker


def pieces(store, at):
    """The ranges of the segments from `at` to the end."""
    while at < store.end:
        stop = min(store.end, at - at % store.size_bytes + store.size_bytes)
        yield at, stop
        at = stop


def cut_by_hand(store, at):
    for path in sorted((store.root / "commitlog").iterdir()):
        start = int(path.name)
        if start >= at:
            path.unlink()
        elif start + store.size_bytes > at:
            store.poke(at, bytes(start + store.size_bytes - at))


def test_a_cut_at_the_start_of_a_segment_takes_the_segment_away(build_store):
    store = whole_store(build_store, "cut")
    at = 2 * store.size_bytes
    CUT.write(store.root, Cut(at, store.end, WHY))
    report = recovered(store)
    assert report.end_offset == at and not store.segment(at).exists()
    assert report.queue_ends == store.queue_ends(at)


def test_killed_at_any_system_call_the_next_recovery_comes_to_the_same_store(build_store, request, rng):
    def about_to_be_cut(name):
        store = whole_store(build_store, name)
        CUT.write(store.root, Cut(store.records[7].start, store.end, WHY))
        return store

    straight = about_to_be_cut("straight")
    expected = recovered(straight)
    step = 0
    while True:
        store = about_to_be_cut(f"killed-{step}")
        if run_and_die_at(step, lambda: recovered(store), SYSTEM_CALLS):
            break
        report = recovered(store)
        assert (report.state, report.end_offset) == (RecoveryState.RECOVERED, expected.end_offset), f"killed at {step}"
        assert store.tree("quarantine") == straight.tree("quarantine"), f"killed at system call {step}"
        assert kept_bytes(store) == kept_bytes(straight), f"killed at system call {step}"
        step += 1 if request.config.run_long else rng.randrange(3, 14)
    assert step > 30


def test_killed_while_the_note_is_written_the_store_is_the_old_one_or_the_cut_one(build_store):
    step = 0
    while True:
        store = whole_store(build_store, f"killed-{step}", 12)
        at = store.records[5].start
        done = run_and_die_at(step, lambda: CUT.write(store.root, Cut(at, store.end, WHY)), SYSTEM_CALLS)
        assert recovered(store).end_offset in ({at} if done else {at, store.end})
        if done:
            break
        step += 1
    assert step > 2


def test_a_cut_that_is_not_finished_is_found_by_check(build_store):
    store = whole_store(build_store, "begun", 12)
    CUT.write(store.root, Cut(store.records[5].start, store.end, WHY))
    (finding,) = check(MessageStore(store.root, store.geometry)).findings
    assert finding.file == "config/cut" and "run `recover`" in finding.text
    recovered(store)
    assert not check(MessageStore(store.root, store.geometry)).findings


def test_a_folder_in_the_notes_place_is_found_by_check(build_store):
    store = whole_store(build_store, "folder", 12)
    CUT.path(store.root).mkdir()
    (finding,) = check(MessageStore(store.root, store.geometry)).findings
    assert finding.severity is Severity.ERROR and "cannot read config/cut: Is a directory" in finding.text


def test_a_damaged_note_of_a_cut_is_refused_and_changes_nothing(build_store):
    store = whole_store(build_store, "damaged")
    CUT.write(store.root, Cut(store.records[5].start, store.end, WHY))
    content = CUT.path(store.root).read_bytes()
    CUT.path(store.root).write_bytes(content.replace(b'"at": ', b'"at": 1'))
    before = store.tree()
    with pytest.raises(CorruptionError, match="cut of the log was in progress"):
        recovered(store)
    store.flip(store.records[5].start + 90)  # of which check asks whether recover would accept it
    report = check(MessageStore(store.root, store.geometry))
    (finding,) = (one for one in report.findings if one.file == "config/cut")
    assert finding.severity is Severity.ERROR and "Remove the file" in finding.text and len(report.findings) > 1
    store.flip(store.records[5].start + 90)
    assert store.tree() == before
