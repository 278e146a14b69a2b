"""Recovery with shared memory that outlived every process: the commit slot decides, pool bytes are drained."""

from __future__ import annotations

import shutil
from unittest.mock import patch

import pytest

from fix_failpoints import Interrupted, at_failpoints, interrupted_at
from pyengine.errors import ExitCode
from pyengine.formats.index_file import IndexEntry, IndexLayout, unpack_entry, unpack_header
from pyengine.native.dispatch import progress_at
from pyengine.storage.checkpoint import RecoveryPath, SharedState, create_abort_file, note_sync_failure, read_watermark
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery import derived
from pyengine.storage.recovery.recover import recover


class Pool:
    """The pool of a store that was written through it: files up to `committed`, buffers up to `slot_end`."""

    def __init__(self, store, committed_record: int, slot_record: int) -> None:
        self.store = store
        self.committed = store.records[committed_record].end
        self.slot_end = store.records[slot_record].end
        size = store.size_bytes
        self.expected = {path.name: path.read_bytes() for path in (store.root / "commitlog").iterdir()}
        self.buffers = []
        for path in sorted((store.root / "commitlog").iterdir()):
            base = int(path.name)
            content = bytearray(path.read_bytes())
            keep = max(0, min(size, self.committed - base))
            path.write_bytes(bytes(content[:keep]).ljust(size, b"\0"))
            if base < self.slot_end and base + size > self.committed:
                stale = slice(max(0, self.slot_end - base), size)
                content[stale] = b"\xee" * len(content[stale])  # what an earlier segment left in the buffer
                self.buffers.append((base, memoryview(content)))
        store.mark(store.records[2].end)
        create_abort_file(store.root)

    def state(self, **changes) -> SharedState:
        fields = {"slot_end": self.slot_end, "committed": self.committed, "pool_buffers": self.buffers}
        return SharedState(**(fields | changes))


def recovered(store, shared, **named):
    return recover(MessageStore(store.root, store.geometry), shared=shared, **named)


def log_of(store):
    return {path.name: path.read_bytes() for path in (store.root / "commitlog").iterdir()}


def assert_log_is(store, end):
    """Byte for byte what was put, zeros behind `end`, nothing else."""
    for record in store.records:
        if record.end <= end:
            assert store.read(record.start, record.end) == record.data
    for name, content in log_of(store).items():
        if int(name) + store.size_bytes > end:
            assert content[max(0, end - int(name)):].strip(b"\0") == b""


def test_the_slot_ends_the_log_before_records_that_no_producer_was_told_of(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    end = store.records[25].end
    report = recovered(store, SharedState(end, end))
    assert (report.end_offset, report.shared_state, report.exit_code) == (end, "used", ExitCode.OK)
    assert_log_is(store, end)
    assert dict(report.queue_ends) == store.queue_ends(end)
    assert read_watermark(store.root).watermark.flushed == end
    assert not (store.root / "quarantine").exists()


def test_a_slot_at_the_start_of_a_segment_ends_the_log_there(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    report = recovered(store, SharedState(8192, 8192))
    assert (report.end_offset, report.shared_state) == (8192, "used")
    assert_log_is(store, 8192)


@pytest.mark.parametrize(("slot_end", "why"), [(1 << 20, "before its position 1048576"), (1000, "before its position 1000")])
def test_a_slot_that_the_files_do_not_reach_is_discarded_wholly(build_store, slot_end, why):
    """Files that end earlier are a power cut or an exchange; a place inside a record is no position at all."""
    store = build_store(40)
    create_abort_file(store.root)
    report = recovered(store, SharedState(slot_end, slot_end))
    assert report.end_offset == store.end
    assert report.shared_state.startswith("discarded: ")
    assert why in report.shared_state


def test_shared_memory_of_another_store_is_ignored(build_store):
    store = build_store(40)
    create_abort_file(store.root)
    report = recovered(store, SharedState(store.records[9].end, 0, mismatch="the UUID differs"))
    assert (report.end_offset, report.shared_state) == (store.end, "discarded: the UUID differs")


@pytest.mark.parametrize(("changes", "ordered_from"), [
    ({}, 0), ({"ordered_from": 30}, 30), ({"ordered_from": 1 << 20}, None), ({"slot_end": 1 << 20}, None),
    ({"mismatch": "another program has opened the store since"}, None)])
def test_what_the_dead_writer_is_known_to_have_written_stays_ordered_by_time(build_store, changes, ordered_from):
    """Otherwise each unclean stop made readers by time read the whole log. None: unknown."""
    store = build_store(40, flushed=0)
    store.mark(store.records[10].end)
    create_abort_file(store.root)
    recovered(store, SharedState(**{"slot_end": store.end, "committed": store.end, **changes}))
    mark = read_watermark(store.root).watermark
    assert (mark.flushed, mark.ordered_from) == (store.end, store.end if ordered_from is None else ordered_from)


def test_a_failed_sync_counts_although_another_program_has_opened_the_store_since(build_store):
    store = build_store(40)
    store.mark(store.records[10].end)
    shared = SharedState(store.end, store.end, mismatch="another program has opened the store since", flushed=store.end, sync_failed=True)
    with patch("pyengine.storage.recovery.recover.note_sync_failure", wraps=note_sync_failure) as noted:
        report = recovered(store, shared)
    assert (report.end_offset, report.path, report.changed) == (store.end, RecoveryPath.ABNORMAL, True)
    assert "a sync had failed" in report.notes[0]
    assert [call.args[1] for call in noted.call_args_list] == [store.records[10].end], "that memory's `flushed` does not count"


def test_a_valid_slot_does_not_hide_damage_below_the_watermark(build_store):
    store = build_store(40)
    store.mark(store.end)
    create_abort_file(store.root)
    store.flip(store.records[30].start + 90)
    before = store.tree()
    report = recovered(store, SharedState(store.end, store.end))
    assert (report.exit_code, report.damage_offset) == (ExitCode.CORRUPTION, store.records[30].start)
    assert store.tree() == before


@pytest.mark.parametrize(("committed", "slot"), [(5, 12), (5, 39), (30, 39), (12, 13), (20, 20)])
def test_pool_bytes_are_drained_over_segments_and_blanks(build_store, committed, slot):
    store = build_store(40)
    pool = Pool(store, committed, slot)
    report = recovered(store, pool.state())
    assert (report.end_offset, report.shared_state, report.exit_code) == (pool.slot_end, "used", ExitCode.OK)
    assert (report.drained_bytes > 0) == (slot > committed)
    assert_log_is(store, pool.slot_end)
    for blank in store.blanks:
        if blank < pool.slot_end:
            start = blank - blank % store.size_bytes
            assert log_of(store)[f"{start:020d}"] == pool.expected[f"{start:020d}"]  # filler of the buffer is left out
    assert dict(report.queue_ends) == store.queue_ends(pool.slot_end)
    assert recovered(store, None).changed is False


def test_a_segment_that_the_pool_is_ahead_of_is_made(build_store):
    store = build_store(40)
    pool = Pool(store, 5, 39)
    for path in sorted((store.root / "commitlog").iterdir())[1:]:
        path.unlink()
    report = recovered(store, pool.state())
    assert (report.end_offset, report.exit_code) == (store.end, ExitCode.OK)
    assert_log_is(store, store.end)


def test_pool_bytes_after_a_roll_are_drained_before_the_first_watermark_was_written(build_store):
    store = build_store(40, spare=False)
    pool = Pool(store, 5, 39)
    (store.root / "config" / "watermark").unlink()
    for path in sorted((store.root / "commitlog").iterdir())[1:]:
        path.unlink()
    store.segment(0).write_bytes(pool.expected[f"{0:020d}"])  # committed up to the roll and no further
    report = recovered(store, pool.state(committed=4096, pool_buffers=pool.buffers[1:]))
    assert (report.end_offset, report.shared_state) == (store.end, "used")
    assert_log_is(store, store.end)


def test_bytes_that_a_killed_committer_left_are_written_over(build_store):
    store = build_store(40)
    pool = Pool(store, 5, 12)
    store.poke(pool.committed, b"\xab" * 700)
    report = recovered(store, pool.state())
    assert report.end_offset == pool.slot_end
    assert_log_is(store, pool.slot_end)


def test_damaged_pool_bytes_end_the_log_there_and_go_to_quarantine(build_store):
    store = build_store(40)
    pool = Pool(store, 5, 39)
    damaged = store.records[8]
    base, buffer = pool.buffers[0]
    buffer[damaged.start - base + 90] ^= 1
    report = recovered(store, pool.state())
    assert (report.end_offset, report.exit_code) == (damaged.start, ExitCode.REPAIRED)
    assert_log_is(store, damaged.start)
    first = next(piece for piece in report.quarantined if piece.physical_offset == damaged.start)
    assert first.path.read_bytes() == bytes(buffer[damaged.start - base:])
    assert {piece.physical_offset for piece in report.quarantined} == {damaged.start, *[b for b, _ in pool.buffers[1:]]}


def pool_pieces(store) -> dict[int, bytes]:
    return {int(path.name.split("-")[1]): path.read_bytes() for path in (store.root / "quarantine").glob("pool-*[0-9]")}


def test_files_that_end_before_committed_discard_the_slot_and_the_pool_goes_to_quarantine(build_store):
    """Its buffers still have the bytes that the files have lost."""
    store = build_store(40)
    pool = Pool(store, 12, 39)
    lost = store.records[10]
    store.poke(lost.start, bytes(pool.committed - lost.start))
    for _ in "once", "after a kill before the memory was discarded":
        report = recovered(store, pool.state())
        assert report.end_offset == lost.start
        assert "before its position" in report.shared_state
        assert report.drained_bytes == 0 and report.exit_code is ExitCode.REPAIRED
        assert pool_pieces(store) == {max(lost.start, base): bytes(buffer[max(lost.start - base, 0):pool.slot_end - base])
                                      for base, buffer in pool.buffers}


def test_a_pool_beyond_a_loss_that_is_accepted_goes_to_quarantine(build_store):
    store = build_store(40)
    recovered(store, None)
    pool = Pool(store, 38, 39)
    shutil.rmtree(store.root / "consumequeue")  # so that the log is read from its start, and the damage is found
    store.flip(store.records[1].start + 90)
    assert recovered(store, pool.state()).exit_code is ExitCode.CORRUPTION
    report = recovered(store, pool.state(), accept_loss=True)
    assert (report.end_offset, report.exit_code) == (store.records[1].start, ExitCode.REPAIRED)
    ((base, buffer),) = pool.buffers
    assert pool_pieces(store) == {base: bytes(buffer[:pool.slot_end - base])}


def test_a_drain_that_is_interrupted_anywhere_comes_to_the_same_store(build_store):
    straight = build_store(40, name="straight")
    pool = Pool(straight, 5, 38)
    recovered(straight, pool.state())
    for number in range(100):
        store = build_store(40, name=f"interrupted-{number}")
        pool = Pool(store, 5, 38)
        try:
            with interrupted_at(number) as seen:
                recovered(store, pool.state())
        except Interrupted:
            recovered(store, pool.state())
            assert store.tree() == straight.tree(), seen
            continue
        assert seen.count("recovery_drained") == len(pool.buffers)
        return
    pytest.fail("recovery never ended")


# -- queues and index that the dead reputter had made ------------------------------


def test_recovery_dispatches_only_records_after_the_dispatched_end(build_store):
    store = build_store(60)
    recovered(store, None)
    whole = store.tree()
    index = sorted((store.root / "index").iterdir())
    numbers = [path.stat().st_ino for path in index]
    create_abort_file(store.root)
    shared = SharedState(store.end, store.end, reput_from=store.records[40].end, index_progress=bytes(256))
    report = recovered(store, shared)
    assert (report.dispatched_bytes, report.index_files_removed) == (store.end - store.records[40].end, 0)
    assert [path.stat().st_ino for path in sorted((store.root / "index").iterdir())] == numbers
    assert store.tree() == whole


def test_queue_entries_that_a_dead_reputter_wrote_are_synced(build_store, monkeypatch):
    store = build_store(60)
    recovered(store, None)
    create_abort_file(store.root)
    synced = []
    sync = derived.sync_queue
    monkeypatch.setattr(derived, "sync_queue", lambda queue, start, **named: (
        synced.append((queue.topic, queue.queue_id, start)), sync(queue, start, **named)))
    report = recovered(store, SharedState(store.end, store.end, reput_from=store.end, index_progress=bytes(256)))
    assert report.dispatched_bytes == 0
    assert {(topic, queue_id) for topic, queue_id, _ in synced} == set(store.queue_ends(store.end))
    assert all(start < store.end for _, _, start in synced)


def cut_newest_put_short(store) -> tuple[int, IndexEntry, bytes]:
    """Leave the newest put into the index as a kill between slot and count does: its number, its entry, and the undo."""
    path = sorted((store.root / "index").iterdir())[-1]
    layout = IndexLayout(store.geometry.max_hash_slot_num, store.geometry.max_index_num)
    content = bytearray(path.read_bytes())
    number = unpack_header(content).index_count - 1
    entry, earlier = (unpack_entry(content, layout.entry_at(at)) for at in (number, number - 1))
    assert earlier.physical_offset < entry.physical_offset
    content[36:40] = number.to_bytes(4, "big")
    path.write_bytes(content)
    content[24:32] = earlier.physical_offset.to_bytes(8, "big")
    memory = bytearray(256)
    progress = progress_at(memory)
    progress.putting, progress.file_number, progress.physical_offset = 1, int(path.name), entry.physical_offset
    progress.slot, progress.old_head, progress.entry = layout.slot_of(entry.key_hash), entry.previous, number
    for at in range(40):
        progress.old_header[at] = content[at]
    return number, entry, bytes(memory)


def test_a_put_into_the_index_that_was_cut_short_is_undone(build_store):
    """The undo is a copy: the newest entry is taken back and put again."""
    store = build_store(30)
    recovered(store, None)
    whole = store.tree()
    number, entry, undo = cut_newest_put_short(store)
    create_abort_file(store.root)
    shared = SharedState(store.end, store.end, reput_from=entry.physical_offset, index_progress=undo)
    report = recovered(store, shared)
    assert report.index_files_removed == 0
    index = sorted((store.root / "index").iterdir())[-1].read_bytes()
    assert unpack_header(index).index_count == number + 1
    layout = IndexLayout(store.geometry.max_hash_slot_num, store.geometry.max_index_num)
    assert unpack_entry(index, layout.entry_at(number)) == entry
    assert {name: data for name, data in store.tree().items() if not name.startswith("index/")} == {
        name: data for name, data in whole.items() if not name.startswith("index/")}


def test_an_undo_that_a_recovery_has_followed_is_not_followed_by_the_next_one(build_store):
    """The first is over, and was killed before the memory of the dead engine was given up."""
    store = build_store(30)
    log, dispatched_to = log_of(store), store.records[20].end
    recovered(store, SharedState(dispatched_to, dispatched_to))
    for name, content in log.items():
        (store.root / "commitlog" / name).write_bytes(content)
    _, entry, undo = cut_newest_put_short(store)
    create_abort_file(store.root)
    shared = SharedState(store.end, store.end, reput_from=entry.physical_offset, index_progress=undo)
    assert recovered(store, shared).index_files_removed == 0
    once = store.tree()
    assert recovered(store, shared).shared_state == "used"
    assert store.tree() == once


def test_after_an_interrupted_recovery_the_index_is_made_again(build_store):
    """What that recovery put is not in the undo that shared memory holds."""
    store = build_store(60)
    recovered(store, None)
    whole = store.tree()
    create_abort_file(store.root)
    shared = SharedState(store.end, store.end, reput_from=store.records[40].end, index_progress=bytes(256))

    def stop(name):
        if name == "recovery_dispatched":
            raise Interrupted(name)

    with pytest.raises(Interrupted), at_failpoints(stop):
        recovered(store, shared)
    report = recovered(store, shared)
    assert report.index_files_removed > 0
    assert store.tree() == whole
