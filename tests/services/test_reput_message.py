"""Dispatch behind the writer: order of publishing, restarts at any place, derived data that cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pyengine.errors import DiskFullError
from pyengine.formats.paths import StorePaths
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.live_reader import open_store as open_live_store
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.services import reput_message
from pyengine.services.reput_message import ReputMessageService
from pyengine.services.schedule_message import DispatchedWatermark
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.store_reader import StoreReader
from ready_store import SEGMENT, store_with_writer
from reported import Reported
from waiting import eventually, scaled_timeout_s


def reput_from(owner):
    return native.load_position(owner.control.reput_from)


def derived_files(root):
    """Content of every queue and index file; index names are wall-clock, so only their order counts."""
    paths = StorePaths(root)
    queues = {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths.consume_queue.rglob("0*"))
              if path.is_file()}
    return queues, [path.read_bytes() for path in sorted(paths.index.iterdir())]


def service_of(owner, reported=None):
    return ReputMessageService(owner.context(report=Reported() if reported is None else reported))


def test_committed_messages_become_visible_and_wake_consumers(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    service = service_of(owner)
    seen = waiting.load_sequence(owner.control.arrival_seq)
    writer.put(b"hello", topic="orders", queue_id=3, properties="KEYS\x01k1")
    with EngineMemory.attach(owner.folder, writable=False) as consumer:
        assert service.work()
        assert waiting.wait_for_sequence(consumer.control.arrival_seq, seen, 0)
    assert reput_from(owner) == writer.end
    with StoreReader(owner.root) as store:
        [message] = store.get_message("orders", 3, 0).messages
        assert message.body == b"hello"
        assert [found.body for found in store.query_message("orders", "k1")] == [b"hello"]
    assert not service.work()
    service.close()


@pytest.mark.timeout(60)
def test_woken_for_something_else_than_records_it_lets_its_worker_look(make_owner):
    owner, _ = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    service = service_of(owner)
    latch = owner.memory.latch(native.REPUTTER)
    latch.arm()
    owner.memory.wake(native.REPUTTER)
    assert not service.wait(latch, 3600)
    service.close()


def read_ahead_of(path):
    """Whether the kernel reads ahead in this process's mappings of the file."""
    maps = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return ["rr" not in text.partition("VmFlags:")[2].partition("\n")[0].split() for text in maps]


def test_the_log_is_read_ahead_only_far_behind_the_writer(make_owner, monkeypatch):
    """Close behind it the kernel would make pages of zeros where the writer is about to write."""
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    segment = StorePaths(owner.root).commit_log / f"{0:020}"
    others = len(read_ahead_of(segment))
    service = service_of(owner)
    for near_bytes, reads_ahead in ((64, True), (reput_message.NEAR_BYTES, False), (64, True)):
        monkeypatch.setattr(reput_message, "NEAR_BYTES", near_bytes)
        writer.put(b"x" * 100)
        assert service.work()
        flags = read_ahead_of(segment)
        assert len(flags) == others + 1 and (False in flags) != reads_ahead
    service.close()


def test_records_beyond_committed_are_not_dispatched(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    service = service_of(owner)
    ends = []
    for body in (b"first", b"second", b"third"):
        writer.put(body)
        ends.append(writer.end)
    for committed, dispatched in (
        (ends[0] - 5, 0),        # half a record is waited for
        (ends[0], ends[0]),      # Python makes the queue; the rest is C's alone
        (ends[2] - 5, ends[1]),  # half a record after a whole one
    ):
        native.store_position(owner.control.committed, committed)
        service.work()
        assert reput_from(owner) == dispatched
    native.store_position(owner.control.committed, ends[2])
    eventually(lambda: service.work() or reput_from(owner) == ends[2], "the rest")
    service.close()


def test_small_batches_over_many_segments_give_the_same_as_one_go(make_owner, monkeypatch):
    files = []
    for batch_bytes in (4 << 20, 300):
        monkeypatch.setattr(reput_message, "BATCH_BYTES", batch_bytes)
        owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, segments=6, name=f"store-{batch_bytes}")
        for number in range(300):
            writer.put(b"x" * (number * 37 % 1500), topic=f"T{number % 3}", queue_id=number % 2,
                       properties=f"KEYS\x01k{number % 50}")
        assert writer.end > 3 * SEGMENT
        service = service_of(owner)
        while service.work():
            pass
        assert reput_from(owner) == writer.end
        service.close()
        files.append(derived_files(owner.root))
    assert files[0] == files[1]


def test_a_record_longer_than_a_batch_passes(make_owner, monkeypatch):
    monkeypatch.setattr(reput_message, "BATCH_BYTES", 100)
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    writer.put(b"x" * 5000)
    service = service_of(owner)
    service.work()
    assert reput_from(owner) == writer.end
    service.close()


def test_a_successor_dispatches_again_from_reput_from_without_changes(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    for number in range(100):
        writer.put(b"x" * 300, queue_id=number % 4, properties=f"KEYS\x01k{number}")
    service = service_of(owner)
    while service.work():
        pass
    service.close()
    before = derived_files(owner.root)
    native.store_position(owner.control.reput_from, 0)  # the worst a killed reputter can leave: nothing published
    service = service_of(owner)
    while service.work():
        pass
    service.close()
    assert reput_from(owner) == writer.end
    assert derived_files(owner.root) == before


def test_a_full_disk_stops_dispatch_says_so_once_and_is_got_over(make_owner, monkeypatch):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    reported = Reported()
    service = service_of(owner, reported)
    monkeypatch.setattr(reput_message, "RETRY_NS", 1_000_000)
    full = True
    real = Dispatcher.dispatch

    def dispatch(*arguments):
        if full:
            raise DiskFullError("no room for the queue", errno=errno.ENOSPC)
        return real(*arguments)

    monkeypatch.setattr(Dispatcher, "dispatch", dispatch)
    writer.put(b"x")
    assert not service.work()
    assert 0 < service.pause_s() <= 0.01
    errors = owner.control.workers[native.REPUTTER]
    eventually(lambda: service.work() or native.load(errors, "error_count") >= 3, "tried again")
    assert len(reported) == 1 and "no room" in reported[0]
    assert reput_from(owner) == 0
    full = False
    eventually(lambda: service.work(), "dispatched at last")
    assert reput_from(owner) == writer.end and reported[1] == "dispatching works again"
    service.close()


def test_rubbish_below_committed_is_reported_and_not_passed_over(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    reported = Reported()
    service = service_of(owner, reported)
    writer.put(b"good")
    good = writer.end
    writer.write(b"\xff" * 100, 100)
    writer.publish()
    service.work()
    assert reput_from(owner) == good
    eventually(lambda: service.work() or reported, "said")
    assert f"at {good} cannot be dispatched" in reported[0]
    service.close()


def test_confirm_bounds_dispatch_where_the_engine_says_so(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, dispatch_at=1)
    service = service_of(owner)
    writer.put(b"x")
    assert not service.work()
    native.store_position(owner.control.confirm, writer.end)
    assert service.work() and reput_from(owner) == writer.end
    service.close()


def test_at_a_stop_queues_are_written_beyond_confirm_and_no_reader_sees_it(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, dispatch_at=1, replicates=1)
    service = service_of(owner)
    writer.put(b"confirmed")
    confirm = writer.end
    writer.put(b"not yet")
    native.store_position(owner.control.confirm, confirm + 1)
    assert service.work() and reput_from(owner) == confirm, "half a record is not confirmed"
    while service.drain():
        pass
    assert reput_from(owner) == writer.end
    with open_live_store(owner.root) as store:
        assert store.queue_range("T", 0) == (0, 1)
        assert DispatchedWatermark(owner.memory).queue_limit(store.default_level) == confirm + 1
        native.store_position(owner.control.confirm, writer.end)
        assert store.queue_range("T", 0) == (0, 2)
    service.close()


def test_a_log_that_ends_inside_a_blank_is_waited_for_without_a_word(make_owner):
    """A slave of RocketMQ ends anywhere, and so does `confirm`."""
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    reported = Reported()
    service = service_of(owner, reported)
    while writer.end < SEGMENT:
        blank, rolled_to = writer.end, writer.put(b"x" * 7000)
    assert rolled_to == SEGMENT
    for end in (blank, blank + 1, blank + 4, blank + 7, blank + 8, blank + 9, blank + 500, SEGMENT - 1):
        native.store_position(owner.control.committed, end)
        while service.work():
            pass
        assert reput_from(owner) == blank, end
    assert reported == [] and not service.blocked_reason
    assert native.load(owner.control.workers[native.REPUTTER], "error_count") == 0
    native.store_position(owner.control.committed, writer.end)
    eventually(lambda: service.work() or reput_from(owner) == writer.end, "the rest")
    service.close()


def test_messages_dispatched_beyond_confirm_at_a_stop_wake_consumers_once_confirmed(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, dispatch_at=1, replicates=1)
    ends = [writer.put(bytes([number])) and writer.end for number in range(3)]
    ends[0] = ends[1] - (ends[2] - ends[1])
    service = service_of(owner)
    while service.drain():  # of this worker alone: the engine goes on
        pass
    service.close()
    assert reput_from(owner) == ends[2]
    successor = service_of(owner)
    assert not successor.work()
    for end in ends:
        seen = waiting.load_sequence(owner.control.arrival_seq)
        native.store_position(owner.control.confirm, end)
        assert not successor.work()
        assert waiting.load_sequence(owner.control.arrival_seq) != seen
        seen = waiting.load_sequence(owner.control.arrival_seq)
        assert not successor.work()
        assert waiting.load_sequence(owner.control.arrival_seq) == seen, "once"
    successor.close()


@pytest.mark.parametrize("rounds", [6])
def test_killed_again_and_again_the_queues_and_the_index_come_out_whole(make_owner, rng, rounds):
    def fill(writer, count):
        for number in range(count):
            writer.put(b"x" * (number * 31 % 700), topic=f"T{number % 3}", properties=f"KEYS\x01k{number % 40} l{number}")

    calm, calm_writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, segments=8, name="calm")
    fill(calm_writer, 150 * rounds)
    service = service_of(calm)
    while service.work():
        pass
    service.close()

    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, segments=8, name="stormy")
    fill(writer, 150 * rounds)
    written = writer.end
    native.store_position(owner.control.committed, 0)
    steps = sorted(rng.sample(sorted(written * number // 40 for number in range(1, 40)), rounds))
    for incarnation, step in enumerate([*steps, written], 1):
        child = owner.spawn("pyengine.workers.reputter")
        owner.wait_ready(native.REPUTTER, incarnation)
        before = reput_from(owner)
        native.store_position(owner.control.committed, step)
        owner.memory.wake(native.REPUTTER)
        eventually(lambda before=before, step=step: reput_from(owner) > before or before >= step, "it moves")
        if step < written:
            child.kill()
            child.wait()
    eventually(lambda: reput_from(owner) == written, "the last one reaches the end")
    child.terminate()
    assert child.wait(timeout=scaled_timeout_s(30)) == 0
    assert derived_files(owner.root) == derived_files(calm.root)


def test_an_index_that_cannot_be_listed_is_reported_and_tried_again(make_owner, monkeypatch):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    reported = Reported()
    service = service_of(owner, reported)

    def full(path):
        raise OSError(errno.ENFILE, "Too many open files in system", str(path))

    writer.put(b"x", properties="KEYS\x01k1")
    monkeypatch.setattr("os.scandir", full)
    monkeypatch.setattr(reput_message, "RETRY_NS", 1)
    assert not service.work() and "Too many open files in system" in service.blocked_reason
    monkeypatch.undo()
    eventually(service.work, "dispatched")
    assert reput_from(owner) == writer.end and not service.blocked_reason
    service.close()


def test_a_foreign_file_in_a_queue_is_reported_until_it_is_moved_away(make_owner, monkeypatch):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    service = service_of(owner)
    monkeypatch.setattr(reput_message, "RETRY_NS", 1)
    foreign = StorePaths(owner.root).queue_folder("T", 0) / "notes.txt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("x")
    writer.put(b"x")
    assert not service.work() and f"{foreign} does not belong there" in service.blocked_reason
    foreign.unlink()
    eventually(service.work, "dispatched")
    assert reput_from(owner) == writer.end and not service.blocked_reason
    service.close()
