"""Recovery of our own stores: damage above and below the watermark, every cut, every flipped byte, every interruption."""

from __future__ import annotations

import errno
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from dying import run_and_die_at
from fix_failpoints import Interrupted, at_failpoints, interrupted_at
from fix_golden import usual
from fix_log import SMALL
from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, DiskError, DiskFullError, ExitCode, FlushError, NotAStoreError, StoreRefusedError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import Checkpoint
from pyengine.storage import durable_writes, mapped_file
from pyengine.storage.check.check import check
from pyengine.storage.check.report import Severity
from pyengine.storage.checkpoint import (
    WATERMARK,
    DurableWatermark,
    RecoveryPath,
    abort_file_exists,
    create_abort_file,
    note_sync_failure,
    read_checkpoint,
    read_sync_failure,
    read_watermark,
    write_checkpoint,
)
from pyengine.storage.engine_id import ensure_engine_id, renew_copied_id
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery import derived
from pyengine.storage.recovery import log as repaired_log
from pyengine.storage.recovery.quarantine import PlannedPiece
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState

ORDINARY = {ExitCode.OK, ExitCode.REPAIRED}


def recovered(store, **named):
    return recover(MessageStore(store.root, store.geometry), **named)


def assert_ends_at(store, report, end):
    """The log ends at `end` with nothing behind it, and the queues fit."""
    assert report.end_offset == end
    assert report.state is RecoveryState.RECOVERED
    for path in sorted((store.root / "commitlog").iterdir()):
        start = int(path.name)
        content = path.read_bytes()
        assert len(content) == store.size_bytes
        assert start <= end
        if start + store.size_bytes > end:
            assert content[end - start:].rstrip(b"\0") == b""
    assert dict(report.queue_ends) == store.queue_ends(end)
    assert not abort_file_exists(store.root)
    assert not (store.root / "config" / "recovery").exists()


def test_a_killed_store_keeps_every_record_and_gets_queues_index_checkpoint(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    report = recovered(store)
    assert (report.path, report.exit_code) == (RecoveryPath.ABNORMAL, ExitCode.OK)
    assert_ends_at(store, report, store.end)
    assert report.messages == 40
    assert read_checkpoint(store.root).physic_msg_timestamp_ms == store.records[-1].store_timestamp_ms
    assert read_checkpoint(store.root).logics_msg_timestamp_ms == store.records[-1].store_timestamp_ms
    assert read_watermark(store.root).watermark.flushed == store.end
    assert not (store.root / "quarantine").exists()


def mapped_segments(store) -> list[str]:
    """Segments that this process has mapped; one that was deleted ends in "(deleted)"."""
    folder = str(store.root / "commitlog")
    return [line.partition(folder)[2] for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]


def test_walked_segments_stay_mapped_for_dispatch_and_deleted_ones_do_not(build_store):
    """A mapping holds the room of a deleted file, and on a full disk dispatch needs it."""
    store = build_store(40, flushed=build_store(40, name="same").end)
    create_abort_file(store.root)
    seen = {}
    with at_failpoints(lambda name: seen.update({name: mapped_segments(store)})):
        recovered(store)
    assert seen["recovery_marked"] and seen["recovery_dispatched"]
    assert not any("deleted" in name for names in seen.values() for name in names)
    assert mapped_segments(store) == []


def test_a_segment_is_not_mapped_while_it_is_written_over_itself(build_store, monkeypatch):
    """It is read again from the disk afterwards."""
    store = build_store(40, flushed=0)
    create_abort_file(store.root)
    seen = []

    def rewrite(path, start, end):
        seen.append(mapped_segments(store))
        durable_writes.rewrite(path, start, end)

    monkeypatch.setattr(repaired_log, "rewrite", rewrite)
    recovered(store)
    assert seen and not any(seen)


def test_a_segment_whose_sync_may_have_failed_is_rewritten_before_it_goes_to_quarantine(build_store, monkeypatch):
    store = build_store(60, flushed=0)
    hole, rewritten = store.records[6], []
    store.poke(hole.start, bytes(len(hole.data)))
    create_abort_file(store.root)
    monkeypatch.setattr(repaired_log, "rewrite", lambda path, *piece: (rewritten.append(path.name), durable_writes.rewrite(path, *piece)))
    moved = {piece.path.name.removeprefix("commitlog-") for piece in recovered(store).quarantined if not piece.physical_offset % 4096}
    assert len(moved) > 1 and moved <= set(rewritten)


def test_durable_bytes_of_segments_that_go_to_quarantine_are_not_rewritten(build_store, monkeypatch):
    """After an accepted loss at old damage they may be nearly all of a large log."""
    store, rewritten = build_store(60), []
    durable = store.records[45].end
    store.mark(durable)
    store.flip(store.records[6].start + 90)
    create_abort_file(store.root)
    monkeypatch.setattr(repaired_log, "rewrite", lambda path, start, end: (
        rewritten.append((int(path.name) + start, int(path.name) + end)), durable_writes.rewrite(path, start, end)))
    assert len(recovered(store, accept_loss=True).quarantined) > 3
    assert min(start for start, end in rewritten if start < end) == durable and max(end for _, end in rewritten) >= store.end


@pytest.mark.parametrize("is_all_flushed", [False, True], ids=["behind what is in doubt", "behind what is durable"])
def test_zeros_that_find_no_room_for_new_pages_are_freed(build_store, monkeypatch, is_all_flushed):
    """The writer's last sync may have failed on zeros alone."""
    store = build_store(40, flushed=0)
    if is_all_flushed:
        store.mark(store.end)
    create_abort_file(store.root)
    freed = []

    def find_no_room(path, start):
        raise DiskFullError("full", errno=errno.ENOSPC)

    monkeypatch.setattr(repaired_log, "renew_zeros", find_no_room)
    monkeypatch.setattr(repaired_log, "free_end", lambda path, start: freed.append(int(path.name) + start))
    report = recovered(store)
    assert_ends_at(store, report, store.end)
    assert freed == [store.end]


def test_a_second_recovery_writes_nothing(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    recovered(store)
    before = store.tree()
    times = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    report = recovered(store)
    assert (report.path, report.changed, report.exit_code) == (RecoveryPath.NORMAL, False, ExitCode.OK)
    assert store.tree() == before
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == times


def test_every_place_where_the_log_may_be_cut_short(build_store, request, rng):
    """A power cut leaves zeros from any byte on: the log ends behind the last whole record, and is never degraded."""
    step = 1 if request.config.run_long else 31
    whole = build_store(12, name="whole")
    durable = whole.records[5].end
    around_ends = {cut for record in whole.records[6:] for cut in (record.start, record.start + 1, record.end - 1)}
    for cut in sorted({*range(durable + rng.randrange(step), whole.end, step), *around_ends}):
        store = build_store(12, flushed=durable, name=f"cut-{cut}")
        store.poke(cut, bytes(store.end - cut) if store.segment(cut) == store.segment(store.end)
                   else bytes(store.size_bytes - cut % store.size_bytes))
        create_abort_file(store.root)
        report = recovered(store)
        assert_ends_at(store, report, max(store.boundary_before(cut), durable))
        assert report.exit_code in ORDINARY
        second = recovered(store)
        assert (second.changed, second.end_offset) == (False, report.end_offset)


def test_every_flipped_byte_above_the_watermark_costs_no_more_than_its_record_and_what_follows(build_store, request, rng):
    step = 1 if request.config.run_long else 23
    whole = build_store(12, name="whole")
    durable = whole.records[8].end
    for at in range(durable + rng.randrange(step), whole.end, step):
        store = build_store(12, flushed=durable, name=f"flip-{at}")
        store.flip(at, rng.randrange(8))
        create_abort_file(store.root)
        report = recovered(store)
        spoiled_from = max(store.boundary_before(at), durable)
        assert report.end_offset in (store.end, spoiled_from), at
        assert report.state is RecoveryState.RECOVERED
        if report.end_offset == spoiled_from:
            assert_ends_at(store, report, spoiled_from)
        # A flipped queue offset, say, is covered by no checksum: it is dispatched as it is, each time with the same result.
        settled = store.tree("checkpoint")
        assert recovered(store).end_offset == report.end_offset
        assert store.tree("checkpoint") == settled, at


def test_every_flipped_body_byte_below_the_watermark_degrades_and_changes_nothing(build_store, request):
    step = 1 if request.config.run_long else 5
    store = build_store(12, flushed=None)
    store.mark(store.end)
    for is_abnormal in (False, True):
        if is_abnormal:
            create_abort_file(store.root)
        record = store.records[9]
        body_end = record.data.index(b"topic-") - 1
        for at in range(record.start + 88, record.start + body_end, step):
            store.flip(at)
            before = store.tree()
            report = recovered(store)
            assert (report.state, report.exit_code) == (RecoveryState.DEGRADED, ExitCode.CORRUPTION)
            assert (report.damage_offset, report.stop_reason) == (record.start, "bad_crc")
            assert str(record.start) in report.sentence
            assert store.tree() == before
            store.flip(at)


def test_zeros_below_the_watermark_are_damage_too(build_store):
    store = build_store(12)
    store.mark(store.end)
    store.poke(store.records[-1].start, bytes(len(store.records[-1].data)))
    before = store.tree()
    report = recovered(store)
    assert (report.exit_code, report.damage_offset, report.stop_reason) == (
        ExitCode.CORRUPTION, store.records[-1].start, "zeroes")
    assert store.tree() == before


def test_a_missing_segment_below_the_watermark_is_damage(build_store):
    store = build_store(40, spare=False)
    store.mark(store.end)
    create_abort_file(store.root)
    store.segment(4096).unlink()
    before = store.tree()
    report = recovered(store)
    assert (report.exit_code, report.damage_offset, report.stop_reason) == (ExitCode.CORRUPTION, 4096, "missing_segment")
    assert store.tree() == before


def test_a_missing_segment_long_before_the_end_is_damage_after_an_orderly_stop_too(build_store):
    """It lies before what is read again after an orderly stop: the names alone tell."""
    store = build_store(100, spare=False)
    store.mark(store.end)
    recovered(store)
    assert store.end > 5 * store.size_bytes
    store.segment(4096).unlink()
    before = store.tree()
    report = recovered(store)
    assert (report.exit_code, report.damage_offset, report.stop_reason) == (ExitCode.CORRUPTION, 4096, "missing_segment")
    assert store.tree() == before


def test_all_segments_missing_below_the_watermark_is_damage(build_store):
    store = build_store(5, spare=False)
    store.mark(store.end)
    store.segment(0).unlink()
    report = recovered(store)
    assert (report.exit_code, report.damage_offset) == (ExitCode.CORRUPTION, 0)


def test_accepted_loss_cuts_there_keeps_the_rest_in_quarantine_and_lowers_the_watermark(build_store):
    store = build_store(40)
    store.mark(store.end)
    create_abort_file(store.root)
    record = store.records[10]
    assert record.end < 4096
    store.flip(record.start + 90)
    lost = store.read(record.start, 4096)
    later = store.segment(4096).read_bytes()
    report = recovered(store, accept_loss=True)
    assert report.exit_code is ExitCode.REPAIRED
    assert_ends_at(store, report, record.start)
    assert read_watermark(store.root).watermark.flushed == record.start
    kept = {piece.physical_offset: piece.path.read_bytes() for piece in report.quarantined}
    assert kept[record.start] == lost.rstrip(b"\0")
    assert kept[4096] == later
    assert recovered(store).changed is False


def test_after_an_orderly_stop_no_more_is_read_than_from_the_segment_of_the_watermark(build_store):
    """Another program may have put much since: what is before that segment is not read, so damage there refuses nothing."""
    store = build_store(120, flushed=0)
    assert store.end > 6 * store.size_bytes
    recovered(store)
    durable = next(record.start for record in store.records if record.start > 3 * store.size_bytes)
    watermark = read_watermark(store.root).watermark
    WATERMARK.write(store.root, watermark.moved_to(durable))
    store.flip(store.records[0].start + 90)
    report = recovered(store)
    assert (report.state, report.scan_from, report.end_offset) == (RecoveryState.RECOVERED, 3 * store.size_bytes, store.end)


def test_whole_records_after_a_hole_go_to_quarantine(build_store):
    store = build_store(12, flushed=0)
    hole, behind = store.records[6], store.records[7]
    store.poke(hole.start, bytes(len(hole.data)))
    create_abort_file(store.root)
    report = recovered(store)
    assert report.exit_code is ExitCode.REPAIRED
    assert_ends_at(store, report, hole.start)
    (piece,) = report.quarantined
    assert piece.path.read_bytes()[len(hole.data):][: len(behind.data)] == behind.data


def test_segments_beyond_a_hole_go_newest_first_and_the_abort_file_last(build_store, monkeypatch):
    """After a kill in between there is no gap, after a power cut no spare segment; without the abort file all is trusted."""
    store = build_store(60, flushed=0)
    hole = store.records[6]
    store.poke(hole.start, bytes(len(hole.data)))
    create_abort_file(store.root)
    done, log = [], StorePaths(store.root).commit_log
    keep, sync_folder = PlannedPiece.keep, repaired_log.sync_folder
    monkeypatch.setattr(PlannedPiece, "keep", lambda one: (done.append(one.source.name), keep(one)) if one.digest is None else keep(one))
    monkeypatch.setattr(repaired_log, "sync_folder", lambda path: (done.append((path, len(os.listdir(log)))), sync_folder(path)))
    monkeypatch.setattr("pyengine.storage.recovery.recover.write_checkpoint", lambda root, *more: (
        done.append(abort_file_exists(root)), write_checkpoint(root, *more)))
    before = len(os.listdir(log))
    recovered(store)
    names = [name for name in done if isinstance(name, str)]
    assert len(names) > 1 and names == sorted(names, reverse=True)
    assert (log, before - 1) in done and done[-1] is True  # the spare one went first, for good


def test_one_torn_put_is_an_ordinary_tail(build_store):
    store = build_store(12)
    last = store.records[-1]
    store.poke(last.start + len(last.data) // 2, bytes(len(last.data) - len(last.data) // 2))
    create_abort_file(store.root)
    report = recovered(store)
    assert (report.exit_code, report.quarantined, report.cut_bytes > 0) == (ExitCode.OK, (), True)
    assert_ends_at(store, report, last.start)


@pytest.mark.parametrize("damage", ["nul in topic", "nul in properties", "no utf-8", "another offset"])
def test_above_the_watermark_a_record_with_spoiled_text_or_place_is_not_whole(build_store, damage):
    """The CRC covers the body only; RocketMQ would serve these. Below the watermark they were synced as they are."""
    changes = {"nul in topic": (b"topic-", 0, b"\0"), "nul in properties": (b"KEYS", 0, b"\0"),
               "no utf-8": (b"TAGS", 1, b"\xff")}
    store = build_store(12, flushed=0)
    last = store.records[-1]
    if damage == "another offset":
        store.poke(last.start + 28, (last.start + 1).to_bytes(8, "big"))
    else:
        text, shift, data = changes[damage]
        store.poke(last.start + last.data.rindex(text) + shift, data)
    create_abort_file(store.root)
    report = recovered(store)
    assert_ends_at(store, report, last.start)
    assert report.exit_code in ORDINARY


def test_the_blank_that_closes_our_last_segment_is_not_cut(build_store):
    store = build_store(40, spare=False)
    start, blank = store.records[-1].start, store.blanks[-1]
    assert start >= blank
    store.segment(start).unlink()
    store.records = [record for record in store.records if record.end <= blank]
    store.mark(blank + store.size_bytes - blank % store.size_bytes)
    create_abort_file(store.root)
    report = recovered(store)
    assert (report.state, report.end_offset) == (RecoveryState.RECOVERED,
                                                 store.segment(start).name and int(store.segment(start).name))
    assert report.exit_code is ExitCode.OK
    assert recovered(store).changed is False


def test_a_damaged_watermark_counts_as_absent_and_is_reported(build_store):
    store = build_store(12)
    (store.root / "config" / "watermark").write_bytes(b"{}")
    report = recovered(store)
    assert report.watermark is None
    assert "watermark" in report.notes[0]
    assert report.exit_code is ExitCode.OK


def test_a_file_of_wrong_length_is_refused_and_nothing_changes(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    path = store.segment(4096)
    path.write_bytes(path.read_bytes()[:1000])
    before = store.tree()
    with pytest.raises(StoreRefusedError, match=path.name):
        recovered(store)
    assert store.tree() == before


def test_a_foreign_file_among_queue_files_is_refused_and_nothing_changes(build_store):
    store = build_store(12)
    recovered(store)
    create_abort_file(store.root)
    (store.root / "consumequeue" / "topic-0" / "0" / "x.tmp").write_bytes(b"x")
    before = store.tree()
    with pytest.raises(StoreRefusedError, match="x.tmp"):
        recovered(store)
    assert store.tree() == before


@pytest.mark.parametrize("place", ["consumequeue/topic-0/0", "consumequeue/topic-0", "consumequeue", "index"])
def test_a_file_in_the_place_of_a_folder_is_refused_and_nothing_changes(build_store, place):
    store = build_store(12)
    create_abort_file(store.root)
    path = store.root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = store.tree()
    with pytest.raises(StoreRefusedError, match=f"{place} is (not a folder, .*|a file where a folder belongs;) move it away"):
        recovered(store)
    assert store.tree() == before
    path.unlink()
    assert_ends_at(store, recovered(store), store.end)


@pytest.mark.parametrize("place", ["commitlog", "consumequeue", "index"])
def test_a_folder_on_a_disk_that_is_not_mounted_is_refused_and_nothing_changes(build_store, place):
    """The log of a copied store counted as empty, and its queues went to quarantine."""
    original = build_store(12)
    recovered(original)
    WATERMARK.write(original.root, DurableWatermark(str(ensure_engine_id(original.root).uuid), 1, original.end))
    store = replace(original, root=original.root.with_name("copy"))
    shutil.copytree(original.root, store.root)
    elsewhere = store.root.with_name("elsewhere")
    (store.root / place).rename(elsewhere)
    (store.root / place).symlink_to("not mounted")
    before = store.tree()
    with pytest.raises(StoreRefusedError, match=f"{place} is a link to not mounted, which does not exist; mount its disk"):
        recovered(store)
    assert store.tree() == before
    (store.root / place).unlink()
    (store.root / place).symlink_to(elsewhere)
    assert_ends_at(store, recovered(store), store.end)


def test_foreign_files_in_places_that_no_message_needs_do_not_stop_recovery(build_store):
    store = build_store(12)
    create_abort_file(store.root)
    for place in ("notes.txt", "topic-0/notes.txt", "topic-0/77"):
        path = store.root / "consumequeue" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert_ends_at(store, recovered(store), store.end)


def test_a_file_found_late_in_a_queues_place_is_refused_until_it_is_removed(builder):
    """Where dispatch has to begin is seen only while dispatching: another queue is gone, whose messages lie farther back."""
    for number in range(60):
        builder.put("early" if number < 3 else f"topic-{number % 2}", bytes(100), dispatch=number < 59)
    root, geometry, options = builder.root, builder.geometry, EngineConfig(message_index_enable=False)
    recover(MessageStore(root, geometry), options=options)
    create_abort_file(root)
    for gone in ("early", "topic-1"):
        shutil.rmtree(root / "consumequeue" / gone)
    (root / "consumequeue" / "early").write_text("mine")
    with pytest.raises(StoreRefusedError, match="recover again then"):
        recover(MessageStore(root, geometry), options=options)
    (root / "consumequeue" / "early").unlink()
    assert recover(MessageStore(root, geometry), options=options).state is RecoveryState.RECOVERED
    assert check(MessageStore(root, geometry), options=EngineConfig(message_index_enable=False)).findings == []


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotAStoreError):
        recover(MessageStore(tmp_path, SMALL))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_queue_that_lacks_an_entry_and_knows_later_ones_is_made_again(build_store, monkeypatch):
    """The entries of its first file moved up by one: a hole at the end of that, and no entry before it leads further."""
    store = build_store(100)
    recovered(store)
    path = StorePaths(store.root).queue_folder("topic-1", 0) / ("0" * 20)
    assert path.with_name(f"{400:020d}").exists()
    entries = path.read_bytes()
    path.write_bytes(entries[:40] + entries[60:] + bytes(20))
    rounds = []

    class Counted(derived.Dispatcher):
        def __init__(self, *of, **named):
            rounds.append(None)
            assert len(rounds) < 5, f"no end of it: {rounds}"
            super().__init__(*of, **named)

        def dispatch(self, view, base_offset, start, end):
            rounds[-1] = start if rounds[-1] is None else rounds[-1]
            return super().dispatch(view, base_offset, start, end)

    monkeypatch.setattr(derived, "Dispatcher", Counted)
    report = recovered(store)
    assert (report.end_offset, report.exit_code) == (store.end, ExitCode.REPAIRED)
    assert [piece.reason for piece in report.quarantined] == ["queue 0 of topic-1 lacked entries in the middle, and was rebuilt"]
    assert rounds == [rounds[0], 0] and path.read_bytes() == entries
    assert [finding for finding in check(MessageStore(store.root, store.geometry)).findings if finding.severity != "info"] == []


def test_lost_queues_and_index_are_made_again_from_the_whole_log(build_store):
    for is_abnormal in (False, True):
        store = build_store(60, name=f"store-{is_abnormal}")
        recovered(store)
        whole = store.tree()
        shutil.rmtree(store.root / "consumequeue")
        shutil.rmtree(store.root / "index")
        if is_abnormal:
            create_abort_file(store.root)
        report = recovered(store)
        assert_ends_at(store, report, store.end)
        assert store.tree() == whole


def test_entries_after_a_hole_in_a_queue_come_back(build_store):
    store = build_store(60)
    recovered(store)
    whole = store.tree()
    queue = store.root / "consumequeue" / "topic-0" / "0" / f"{0:020d}"
    content = bytearray(queue.read_bytes())
    content[60:100] = bytes(40)
    queue.write_bytes(content)
    report = recovered(store)
    assert report.changed
    assert_ends_at(store, report, store.end)
    assert store.tree() == whole


def test_entries_that_a_power_cut_lost_come_back_and_those_of_lost_records_go(build_store, rng):
    """Nothing of a queue is known to be synced but what the checkpoint speaks of; RocketMQ looks at three files."""
    store = build_store(400, flushed=0, body_bytes=60)
    recovered(store)
    store.mark(0)
    whole = store.tree()
    for trial in range(5):
        lost = rng.choice((0.02, 0.5, 1.0))
        synced, end = rng.randrange(200), store.records[rng.randrange(200, 400)].end
        for name, content in whole.items():
            content, start = bytearray(content), int(Path(name).name) if name.startswith(("commitlog/", "consumequeue/")) else 0
            if name.startswith("commitlog/"):
                content[max(0, end - start):] = bytes(len(content[max(0, end - start):]))
            elif name.startswith("consumequeue/"):
                for at in range(0, len(content), 20):
                    if int.from_bytes(content[at : at + 8], "big") > store.records[synced].start and rng.random() < lost:
                        content[at : at + 20] = bytes(20)
            elif name.startswith("index/"):
                continue
            (store.root / name).parent.mkdir(parents=True, exist_ok=True)
            (store.root / name).write_bytes(content)
        synced_ms = store.records[synced].store_timestamp_ms
        write_checkpoint(store.root, Checkpoint(synced_ms, synced_ms, 0))
        create_abort_file(store.root)
        assert_ends_at(store, recovered(store), end)
        assert [str(one) for one in check(MessageStore(store.root, store.geometry)).findings if one.severity is Severity.ERROR] == [], trial


def test_progress_ends_at_its_total(build_store):
    store = build_store(60)
    create_abort_file(store.root)
    seen = []
    recovered(store, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert all(done <= total for done, total in seen)


def kept_in_quarantine(store):
    """The quarantined files, without the notes, which contain the time."""
    return sorted(path.read_bytes() for path in (store.root / "quarantine").glob("*") if path.suffix != ".json")


@pytest.mark.parametrize("is_copied", [True, False], ids=["copy", "move"])
def test_without_room_for_quarantine_the_log_stays_as_it_was(build_store, monkeypatch, is_copied):
    store = build_store(40, flushed=0, spare=False)
    hole = store.records[6]
    store.poke(hole.start, bytes(len(hole.data)))
    create_abort_file(store.root)
    before = store.tree()

    keep = PlannedPiece.keep

    def full(piece):
        if (piece.digest is not None) == is_copied:
            raise DiskFullError("injected", errno=28)
        keep(piece)

    with monkeypatch.context() as patch:
        patch.setattr(PlannedPiece, "keep", full)
        with pytest.raises(DiskFullError):
            recovered(store)
    after = store.tree("quarantine")
    assert after.pop("config/recovery")
    assert after == before
    assert recovered(store).exit_code is ExitCode.REPAIRED


def damage_hole(store):
    record = store.records[len(store.records) - 4]
    store.poke(record.start, bytes(len(record.data)))


def damage_early_hole(store):
    """Far enough back for segments behind it to go; RocketMQ's abnormal path would not read there."""
    record = store.records[6]
    store.poke(record.start, bytes(len(record.data)))
    store.mark(record.start)


def damage_torn(store):
    store.poke(store.records[-1].start + 40, bytes(len(store.records[-1].data) - 40))


def damage_lost_queues(store):
    shutil.rmtree(store.root / "consumequeue")


DAMAGES = ((True, damage_hole), (True, damage_early_hole), (True, damage_torn), (True, damage_lost_queues),
           (False, damage_hole), (False, damage_lost_queues))


@pytest.mark.parametrize(("ours", "damage", "is_abnormal"), usual(
    [(ours, damage, is_abnormal) for ours, damage in DAMAGES for is_abnormal in (False, True)],
    [(True, damage_torn, True), (True, damage_lost_queues, False)], pytest.mark.ci))
def test_interrupted_at_any_step_it_comes_to_the_same_store(build_store, damage, is_abnormal, ours):
    def damaged(name):
        store = build_store(60, ours=ours, flushed=0, name=name)
        recovered(store)
        if ours:
            store.mark(store.records[5].end)
        if is_abnormal:
            create_abort_file(store.root)
        damage(store)
        return store

    straight = damaged("straight")
    expected = recovered(straight)
    names: list[str] = []
    for number in range(100):
        store = damaged(f"interrupted-{number}")
        try:
            with interrupted_at(number) as names:
                recovered(store)
        except Interrupted:
            report = recovered(store)
            assert report.end_offset == expected.end_offset, names
            assert store.tree("quarantine") == straight.tree("quarantine"), names
            assert kept_in_quarantine(store) == kept_in_quarantine(straight), names
            assert recovered(store).changed is False
            continue
        assert number >= 4, names
        return
    pytest.fail(f"recovery never ended: {names}")


def test_interrupted_before_its_marker_a_recovery_reads_no_earlier_the_next_time(build_store):
    """RocketMQ reads the last three segments, and one of zeros counts: without it old damage before them would end the log."""
    store = build_store(80, ours=False)
    fourth_last = sorted((store.root / "commitlog").iterdir())[-4].name
    store.flip(next(record.start for record in store.records if record.start > int(fourth_last)) + 90)
    with patch.object(derived, "write_marker", side_effect=Interrupted), pytest.raises(Interrupted):
        recovered(store)
    report = recovered(store)
    assert (report.end_offset, report.quarantined) == (store.end, ())
    assert recovered(store).changed is False


@pytest.mark.parametrize("is_full", [True, False])
def test_a_spare_segment_goes_before_any_copy_and_before_a_marker_that_has_no_room(build_store, monkeypatch, is_full):
    """The disk may have room that a quota does not give, or holes that its file system cannot punch."""
    store, write_marker = build_store(60, flushed=0), derived.write_marker
    store.flip(store.records[-3].start + 90)
    create_abort_file(store.root)
    log = StorePaths(store.root).commit_log
    *others, spare = sorted(os.listdir(log))
    seen: dict[str, bool] = {}

    def write(root, marker):
        if is_full and (log / spare).exists():
            raise DiskFullError("full", errno=errno.EDQUOT)
        write_marker(root, marker)

    monkeypatch.setattr(derived, "write_marker", write)
    with at_failpoints(lambda name: seen.setdefault(name, (log / spare).exists())):
        report = recovered(store)
    assert (report.end_offset, len(report.quarantined)) == (store.records[-3].start, 1)
    assert (seen["recovery_marked"], seen["quarantine_copied"]) == (not is_full, False)
    assert sorted(os.listdir(log)) == others


SYSTEM_CALLS = ("open", "pwrite", "write", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "rename", "link",
                "unlink", "mkdir", "rmdir", "utime")


def test_killed_at_any_system_call_it_comes_to_the_same_store(build_store, request, rng):
    def damaged(name):
        store = build_store(40, flushed=0, name=name)
        recovered(store)
        store.mark(store.records[5].end)
        create_abort_file(store.root)
        damage_early_hole(store)
        return store

    straight = damaged("straight")
    expected = recovered(straight)
    assert expected.exit_code is ExitCode.REPAIRED
    step = 0
    while True:
        store = damaged(f"killed-{step}")
        if run_and_die_at(step, lambda: recovered(store), SYSTEM_CALLS):
            break
        report = recovered(store)
        assert report.end_offset == expected.end_offset, f"killed at system call {step}"
        assert store.tree("quarantine") == straight.tree("quarantine"), f"killed at system call {step}"
        assert kept_in_quarantine(store) == kept_in_quarantine(straight), f"killed at system call {step}"
        step += 1 if request.config.run_long else rng.randrange(1, 10)
    assert step > 30


def is_interrupted(store, name, time=1):
    """Interrupt a recovery when it comes to the step `name` for this time, if it does."""
    def stop(reached):
        seen.append(reached)
        if seen.count(name) == time:
            raise Interrupted(name)

    seen = []
    try:
        with at_failpoints(stop):
            recovered(store)
    except Interrupted:
        return True
    return False


def test_pages_of_a_remade_queue_that_a_power_cut_loses_before_their_sync_come_back(build_store):
    """They are in files that are older than those that every recovery reads."""
    store = build_store(400)
    recovered(store)
    whole = store.tree()
    create_abort_file(store.root)
    queue = StorePaths(store.root).queue_folder("topic-0", 0)
    shutil.rmtree(queue)
    assert is_interrupted(store, "recovery_dispatched")
    files = sorted(queue.iterdir())
    assert len(files) >= 6
    files[1].write_bytes(bytes(files[1].stat().st_size))
    assert_ends_at(store, recovered(store), store.end)
    assert store.tree() == whole


@pytest.mark.parametrize("kind", ["torn", "unknown"])
def test_a_tail_of_several_pages_that_is_cleared_in_part_is_kept_as_if_it_were_whole(build_store, kind):
    def damaged(name):
        store = build_store(10, flushed=0, geometry=replace(SMALL, mapped_file_size_commit_log_bytes=1 << 18), body_bytes=40_000, name=name)
        create_abort_file(store.root)
        if kind == "torn":
            store.poke(store.end - 100, bytes(100))
        else:
            store.flip(store.records[-3].start + 90)
        return store

    straight = damaged("straight")
    expected, number = recovered(straight), 1
    while is_interrupted(store := damaged(f"interrupted-{number}"), "zeros_page_written", number):
        assert recovered(store).end_offset == expected.end_offset, number
        assert kept_in_quarantine(store) == kept_in_quarantine(straight), number
        assert store.tree("quarantine") == straight.tree("quarantine"), number
        number += 1
    assert number > 3


@pytest.mark.parametrize("kind", ["beyond", "senseless", "newest removed", "all removed"])
def test_pages_of_a_remade_index_file_that_a_power_cut_loses_before_their_sync_come_back(build_store, kind):
    """The page with its header is on the disk. Its time is that of a file which the checkpoint knew to be synced."""
    def damaged(name):
        store = build_store(95, name=name)
        recovered(store)
        store.mark(0)
        files = sorted((store.root / "index").iterdir())
        assert len(files) == 3
        if kind == "beyond":  # after an orderly stop
            store.poke(store.records[70].start, bytes(len(store.records[70].data)))
            return store
        create_abort_file(store.root)
        if kind == "senseless":
            with open(files[1], "r+b") as file:
                file.seek(36)
                file.write(b"\x7f")
        else:
            for path in files[kind == "newest removed":]:
                path.unlink()
        return store

    straight, store = damaged("straight"), damaged("interrupted")
    expected = recovered(straight)
    assert is_interrupted(store, "recovery_dispatched")
    remade = sorted((store.root / "index").iterdir())[1]
    remade.write_bytes(remade.read_bytes()[:40].ljust(remade.stat().st_size, b"\0"))
    assert_ends_at(store, recovered(store), expected.end_offset)
    assert store.tree("quarantine") == straight.tree("quarantine")


def test_dispatch_goes_around_a_record_that_names_another_place(build_store):
    """RocketMQ never compares it, so its recovery keeps such a record; it gets no queue entry here."""
    store = build_store(20, ours=False)
    odd = store.records[7]
    store.poke(odd.start + 28, (odd.start + 1).to_bytes(8, "big"))
    report = recovered(store)
    assert report.end_offset == store.end
    assert f"between {odd.start} and {odd.end}" in report.notes[0]
    assert sum(report.queue_ends.values()) == 19


def test_lost_queues_do_not_hide_damage_that_only_their_rebuilding_would_meet(build_store):
    """After a clean stop only the newest segments are read again; to make the queues again all of them are."""
    store = build_store(100)
    store.mark(store.end)
    recovered(store)
    store.flip(store.records[1].start + 90)
    assert recovered(store).state is RecoveryState.RECOVERED  # not read: `check` finds it
    shutil.rmtree(store.root / "consumequeue")
    before = store.tree()
    report = recovered(store)
    assert (report.exit_code, report.damage_offset) == (ExitCode.CORRUPTION, store.records[1].start)
    assert store.tree() == before


def test_a_queue_that_ends_before_the_segment_where_reading_begins_gets_its_entries(build_store):
    """RocketMQ would dispatch from that segment on and put later entries in the place of the lost ones."""
    for is_abnormal in (False, True):
        store = build_store(100, name=f"store-{is_abnormal}")
        recovered(store)
        whole = store.tree()
        folder = store.root / "consumequeue" / "topic-1" / "0"
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
        first = folder / f"{0:020d}"
        first.write_bytes(first.read_bytes()[:60].ljust(400, b"\0"))
        if is_abnormal:
            create_abort_file(store.root)
        else:
            shutil.rmtree(store.root / "consumequeue" / "topic-0")
            shutil.rmtree(store.root / "consumequeue" / "topic-1" / "1")
        report = recovered(store)
        assert dict(report.queue_ends) == store.queue_ends(store.end)
        assert store.tree() == whole


@pytest.mark.parametrize("kind", ["short", "senseless", "beyond"])
def test_an_index_file_that_cannot_be_believed_is_made_again(build_store, kind):
    store = build_store(100)
    recovered(store)
    whole = store.tree()
    assert sum(name.startswith("index/") for name in whole) >= 3
    path = sorted((store.root / "index").iterdir())[1]
    content = bytearray(path.read_bytes())
    if kind == "short":
        content = content[:-20]
    elif kind == "senseless":
        content[36:40] = b"\x7f\xff\xff\xff"
    else:
        content[24:32] = (1 << 40).to_bytes(8, "big")
    path.write_bytes(content)
    report = recovered(store)
    assert report.index_files_removed == sum(name.startswith("index/") for name in whole) - 1
    assert store.tree() == whole


def test_without_any_log_its_queues_and_index_are_kept_in_quarantine(build_store):
    store = build_store(20, ours=False)
    recovered(store)
    shutil.rmtree(store.root / "commitlog")
    queue = (store.root / "consumequeue" / "topic-0" / "0" / f"{0:020d}").read_bytes()
    before = store.tree()
    with pytest.raises(CorruptionError, match="20 queue entries name messages .*--accept-loss"):
        recovered(store)
    assert store.tree() == before
    report = recovered(store, accept_loss=True)
    assert (report.exit_code, report.end_offset, dict(report.queue_ends)) == (ExitCode.REPAIRED, 0, {})
    assert (store.root / "quarantine" / "derived-consumequeue" / "topic-0" / "0" / f"{0:020d}").read_bytes() == queue
    assert recovered(store).changed is False


def test_a_sync_that_failed_is_noted_and_the_next_recovery_writes_what_it_was_to_sync(build_store):
    store = build_store(40)
    store.mark(store.records[10].start)
    create_abort_file(store.root)
    written = []
    with patch("pyengine.storage.durable_writes.os.fsync", side_effect=OSError(5, "Input/output error")):
        with pytest.raises(FlushError):
            recovered(store)
    assert read_sync_failure(store.root).is_of_this_boot
    real = durable_writes.pwrite_all
    with patch.object(durable_writes, "pwrite_all", lambda descriptor, content, position, path:
                      (written.append((path.name, position, len(content))), real(descriptor, content, position, path))):
        report = recovered(store)
    assert_ends_at(store, report, store.end)
    places = {int(name) + position + at for name, position, size in written if name.isdigit() for at in range(size)}
    assert set(range(store.records[10].start, store.end)) <= places
    assert read_sync_failure(store.root) is None and "a sync had failed" in report.notes[0]


def written_by_recovery(store, options: EngineConfig, module) -> dict[str, set[int]]:
    """Recover the store, and return which bytes of each of its files `module` writes meanwhile."""
    written, real = {}, module.pwrite_all

    def noted(descriptor, content, position, path):
        written.setdefault(str(Path(path).relative_to(store.root)), set()).update(range(position, position + len(content)))
        real(descriptor, content, position, path)

    with patch.object(module, "pwrite_all", noted):
        recovered(store, options=options)
    return written


def test_after_a_failed_sync_queue_entries_are_written_again_although_they_are_right_in_memory(build_store):
    """A reader's mapping keeps pages in memory that never reached the disk."""
    store, options = build_store(400, flushed=0), EngineConfig(enable_consume_queue_ext=True)
    recovered(store, options=options)
    write_checkpoint(store.root, Checkpoint())
    note_sync_failure(store.root, 0, "a queue", "Input/output error")
    whole, written = store.tree(), written_by_recovery(store, options, durable_writes)
    queues = {name: len(content.rstrip(b"\0")) for name, content in whole.items() if name.startswith("consumequeue")}
    assert len(queues) > 12 and any(name.startswith("consumequeue_ext/") for name in queues)
    assert [name for name, end in queues.items() if not set(range(end)) <= written.get(name, set())] == []
    tree = store.tree()
    assert {name: tree[name] for name in queues} == {name: whole[name] for name in queues}


@pytest.mark.parametrize("has_failed", usual([True, False], [True], pytest.mark.ci))
def test_after_a_failed_sync_the_zeros_after_each_queue_are_written_again(build_store, has_failed):
    """A recovery that cleared entries there may have failed to sync them: the disk has them still, and a reboot would bring them back."""
    store, options = build_store(400), EngineConfig(enable_consume_queue_ext=True)
    recovered(store, options=options)
    if has_failed:
        note_sync_failure(store.root, store.end, "a queue", "Input/output error")
    whole, written = store.tree(), written_by_recovery(store, options, mapped_file)
    ends = {name: len(content.rstrip(b"\0")) for name, content in whole.items() if name.startswith("consumequeue")}
    ends = {name: end for name, end in ends.items() if 0 < end < len(whole[name]) - 32}  # an entry may end in zeros
    again = [name for name, end in ends.items()
             if set(range(end + 32, min(len(whole[name]), end + -end % 4096))) <= written.get(name, set())]
    assert len(ends) >= 8 and again == (list(ends) if has_failed else [])
    tree = store.tree()
    assert {name: tree[name] for name in ends} == {name: whole[name] for name in ends}


def test_after_a_failed_sync_segments_that_are_not_written_again_are_read_from_the_disk(build_store, monkeypatch):
    """The next engine vouches for them: what their pages hold may not be on the disk."""
    store = build_store(120, ours=False)
    note_sync_failure(store.root, 0, "", "its engine has seen a sync fail")
    segments, dropped = sorted(StorePaths(store.root).commit_log.iterdir()), []
    write_checkpoint(store.root, Checkpoint(1 << 50, 1 << 50, 1 << 50))  # the reading begins at the last segment
    monkeypatch.setattr(repaired_log.os, "posix_fadvise", lambda descriptor, at, size, advice:
                        dropped.append((os.readlink(f"/proc/self/fd/{descriptor}"), at, size, advice)))
    scan_from = recovered(store).scan_from
    below = [path for path in segments if int(path.name) + SMALL.mapped_file_size_commit_log_bytes <= scan_from]
    assert below and dropped == [(str(path), 0, 0, os.POSIX_FADV_DONTNEED) for path in below]


def test_a_stopped_store_in_which_a_sync_failed_is_written_again(build_store):
    """Its watermark is not proof of what follows, nor is a checkpoint of the queues."""
    store = build_store(40)
    note_sync_failure(store.root, store.records[10].start, "a segment", "Input/output error")
    report = recovered(store)
    assert (report.path, report.changed) == (RecoveryPath.ABNORMAL, True)
    assert_ends_at(store, report, store.end)
    assert read_sync_failure(store.root) is None


def test_a_log_that_changes_while_it_is_written_again_is_no_recovered_one(build_store):
    store = build_store(40)
    create_abort_file(store.root)

    def lose(path, start, end):
        if int(path.name) + end == store.end:
            store.flip(store.records[-1].start + 4)

    with patch("pyengine.storage.recovery.log.rewrite", lose), pytest.raises(DiskError, match="recover again"):
        recovered(store)
    assert abort_file_exists(store.root)


BODY_AT = 88


def vouched_from(store, start: int, flushed: int | None = None) -> None:
    WATERMARK.write(store.root, DurableWatermark("6f1c7b0e-0000-4000-8000-000000000001", 1,
                                                 store.end if flushed is None else flushed, start))


@pytest.mark.parametrize("kind", ["bit", "lengths", "zeros"])
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("number", [0, 3, 20])
def test_damage_that_was_there_before_this_engine_ends_nothing(build_store, number, aborted, kind):
    store = build_store(40)
    record, first = store.records[number], store.records[21].start
    assert record.end <= first
    if kind == "bit":
        store.flip(record.start + BODY_AT)
    else:
        store.poke(record.start, b"\xff" * 8 if kind == "lengths" else bytes(record.end - record.start))
    vouched_from(store, first)
    if aborted:
        create_abort_file(store.root)
    report = recovered(store)
    assert report.state is RecoveryState.RECOVERED and report.end_offset == store.end and not report.quarantined
    assert read_watermark(store.root).watermark.verified_from == first
    kept = {(one.topic, one.queue_id) for one in store.records[21:]}
    assert all(report.queue_ends[key] == store.queue_ends(store.end)[key] for key in kept)
    assert recovered(store).changed is False


@pytest.mark.parametrize("number", [21, 30])
def test_damage_in_what_is_vouched_for_is_refused_all_the_same(build_store, number):
    store = build_store(40)
    store.flip(store.records[number].start + BODY_AT)
    vouched_from(store, store.records[21].start)
    assert recovered(store).state is RecoveryState.DEGRADED
    accepted = recovered(store, accept_loss=True)
    assert accepted.end_offset == store.records[number].start
    mark = read_watermark(store.root).watermark
    assert (mark.verified_from, mark.flushed) == (store.records[21].start, store.records[number].start)


def test_the_check_says_whose_damage_it_is(build_store):
    store = build_store(40)
    recovered(store)
    vouched_from(store, store.records[21].start)
    store.flip(store.records[3].start + BODY_AT)
    found = {one.kind: one for one in check(MessageStore(store.root, store.geometry)).findings}
    assert "from before this engine" in found["damaged before"].text and "below watermark" not in found
    vouched_from(store, 0)
    assert "below watermark" in {one.kind for one in check(MessageStore(store.root, store.geometry)).findings}


def recovered_with_syncs(store, monkeypatch) -> tuple[set[Path], set[Path]]:
    """Recover it, and return what was synced one by one, and what with its file system."""
    synced, synced_whole, fsync, sync_file_system = set(), set(), os.fsync, repaired_log.sync_file_system

    def noted(descriptor):
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_whole(folder):
        synced_whole.update(folder.rglob("*"))
        return sync_file_system(folder)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(repaired_log, "sync_file_system", noted_whole)
    monkeypatch.setattr(derived, "sync_file_system", noted_whole)
    recovered(store)
    return synced, synced_whole


@pytest.mark.parametrize("aborted", [True, False])
def test_names_that_another_program_made_are_synced_before_they_are_vouched_for(build_store, monkeypatch, aborted):
    """RocketMQ syncs no folder: a power cut soon after it was taken over could take a whole queue with its folder."""
    store = build_store(40)
    recovered(store)
    (store.root / "config" / "watermark").unlink()
    if aborted:
        create_abort_file(store.root)
    synced, _ = recovered_with_syncs(store, monkeypatch)
    made = [store.root, *(Path(folder) for name in ("commitlog", "consumequeue", "index") for folder, _, _ in os.walk(store.root / name))]
    assert set(made) <= synced and len(made) > 5


def test_everything_in_a_copied_store_is_synced_once(build_store, monkeypatch):
    """`cp` syncs nothing; the copy of a store that was stopped in order needs no dispatch, so that nothing else writes to its index.

    A sync of the file system tells of no error, so that only config/ is left to it.
    """
    store = build_store(60)
    recovered(store)
    WATERMARK.write(store.root, DurableWatermark(str(ensure_engine_id(store.root).uuid), 1, store.end))
    (store.root / "config" / "topics.json").write_text("{}")
    copy = replace(store, root=shutil.copytree(store.root, store.root.with_name("copy")))
    renew_copied_id(copy.root)
    synced, synced_whole = recovered_with_syncs(copy, monkeypatch)
    assert read_checkpoint(copy.root).index_msg_timestamp_ms
    assert not [path for path in (copy.root, *copy.root.rglob("*")) if path not in synced and path.parent.name != "config"
                and path.name not in ("checkpoint", "config")]
    assert set((copy.root / "config").iterdir()) <= synced | synced_whole
    again, whole_again = recovered_with_syncs(copy, monkeypatch)
    assert not again & set((copy.root / "index").rglob("*")) and not whole_again


def test_a_copied_segment_that_ends_anywhere_in_a_record_is_no_damage(build_store, tmp_path):
    """Six bytes of a record's head, or a part of its offset, look like nothing; no whole record is behind them all the same."""
    store = build_store(40, flushed=0)
    recovered(store)
    WATERMARK.write(store.root, DurableWatermark(str(ensure_engine_id(store.root).uuid), 1, store.end))
    record = next(each for each in store.records if each.start > store.size_bytes + 500)
    at = record.start % store.size_bytes
    for kept in (*range(1, 40), 90, len(record.data) - 1):
        copy = tmp_path / f"copy-{kept}"
        shutil.copytree(store.root, copy)
        renew_copied_id(copy)
        segment = copy / "commitlog" / store.segment(record.start).name
        content = segment.read_bytes()[: at + kept]
        segment.write_bytes(content.ljust(store.size_bytes, b"\0"))
        report = recover(MessageStore(copy, store.geometry))
        assert (report.state, report.end_offset, report.is_copy) == (RecoveryState.RECOVERED, record.start, True), kept
        assert not [one for one in check(MessageStore(copy, store.geometry)).findings if one.severity is Severity.ERROR]


class Unreadable(io.FileIO):
    """A file on a disk that cannot read it; the system names no file then."""

    def read(self, *_: object) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("module", ["recovery.derived", "index_file", "recovery.quarantine"])
def test_a_file_that_the_disk_cannot_read_is_named(build_store, monkeypatch, module):
    store = build_store(40)
    recovered(store)
    create_abort_file(store.root)
    place = {"recovery.derived": "consumequeue", "index_file": "index", "recovery.quarantine": "commitlog"}[module]
    if module == "recovery.quarantine":
        with open(store.segment(store.end), "r+b") as log:
            log.seek(store.end % 4096)
            log.write(b"random bytes")
    monkeypatch.setattr(f"pyengine.storage.{module}.open", lambda path, *_, **__: Unreadable(path), raising=False)
    with pytest.raises(DiskError, match=f"cannot read .*/{place}/.*: Input/output error"):
        recovered(store)
