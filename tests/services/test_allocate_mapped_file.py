"""Segments and their blocks are ready ahead of the writer; a full disk is reported and waited for; a stop removes unused segments."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from fix_owner import Owner
from fix_small_disk import fill, resize
from fix_writer import PlainWriter
from pyengine.engine_config import Geometry
from pyengine.errors import DiskFullError
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.native import control as native
from pyengine.native.flush import FOLIO_BYTES_MAX
from pyengine.native.writer import GATHER_BYTES_MIN
from pyengine.services import allocate_mapped_file
from pyengine.services.allocate_mapped_file import AllocateMappedFileService, PageWarmer
from pyengine.storage.commit_log import reserve_ahead_bytes, reserve_step_bytes
from pyengine.storage.config import EngineConfig
from pyengine.storage.durable_writes import create_file
from pyengine.storage.file_system import derived_room_bytes, free_bytes
from pyengine.storage.index_file import first_bytes
from pyengine.storage.message_store import MessageStore
from reported import Reported
from waiting import eventually

SEGMENT = 65536


def ready_end(owner):
    return native.load(owner.control.allocator, "ready_end")


def reserved_end(owner):
    return native.load(owner.control.allocator, "reserved_end")


def allocated_bytes(owner, start):
    return os.stat(StorePaths(owner.root).commit_log_segment(start)).st_blocks * 512


def error_number(owner):
    return native.load(owner.control.allocator, "error_number")


def segments(owner):
    folder = StorePaths(owner.root).commit_log
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def allocator(make_owner):
    owner = make_owner(mode=native.MODE_SYNC)
    owner.position(0)
    owner.publish()
    reported = Reported()
    service = AllocateMappedFileService(owner.context(EngineConfig(), report=reported))
    yield owner, service, reported
    service.close()


def settle(service):
    for _ in range(1000):
        if not service.work():
            return
    pytest.fail("the allocator does not come to rest")


def test_one_segment_to_write_and_one_after_it(allocator):
    owner, service, reported = allocator
    latch = owner.memory.latch(native.WRITER)
    latch.arm()
    settle(service)
    assert segments(owner) == [segment_name(0), segment_name(SEGMENT)]
    assert ready_end(owner) == 2 * SEGMENT
    assert latch.wait(10), "the writer is woken"
    assert [os.stat(StorePaths(owner.root).commit_log / name).st_size for name in segments(owner)] == [SEGMENT, SEGMENT]
    assert [allocated_bytes(owner, start) for start in (0, SEGMENT)] == [SEGMENT, 0] and reserved_end(owner) == SEGMENT
    native.store_position(owner.control.wrote, 1)
    settle(service)
    assert allocated_bytes(owner, SEGMENT) == SEGMENT and reserved_end(owner) == 2 * SEGMENT
    native.store_position(owner.control.wrote, SEGMENT)
    settle(service)
    assert ready_end(owner) == 3 * SEGMENT and allocated_bytes(owner, 2 * SEGMENT) == 0
    assert reported == []


@pytest.mark.parametrize("begin", [0, 5000])
@pytest.mark.parametrize("size", [64 << 20, 40 << 20])
def test_blocks_follow_the_writer(make_owner, size, begin):
    """At first between one and two steps are reserved ahead of it, later half of the log; a segment has its length before that."""
    owner = make_owner(mode=native.MODE_SYNC, segment_bytes=size)
    owner.position(begin, ready_end=0)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    step, page = reserve_step_bytes(size), 4096
    settle(service)
    assert allocated_bytes(owner, size) == 0
    for wrote in range(begin, 2 * size, 5 << 20):
        native.store_position(owner.control.wrote, wrote)
        settle(service)
        ahead = reserve_ahead_bytes(size, wrote)
        assert ahead // 2 <= reserved_end(owner) - wrote <= ahead and reserved_end(owner) % size % step == 0
        for start in range(0, ready_end(owner), size):
            first = begin - begin % page if start == 0 else 0
            assert allocated_bytes(owner, start) == min(max(0, reserved_end(owner) - start), size) - first
    service.close()


def test_in_a_large_log_the_blocks_of_the_next_file_are_reserved_not_those_of_the_one_that_is_written(make_owner):
    size = 8 << 20
    owner = make_owner("large", mode=native.MODE_SYNC, segment_bytes=size)
    owner.position(3 * size + 1000, ready_end=3 * size)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    for wrote, end in ((3 * size + 1000, 4 * size), (3 * size + size // 2 - 1, 4 * size), (3 * size + size // 2 + 1, 5 * size)):
        native.store_position(owner.control.wrote, wrote)
        settle(service)
        assert reserved_end(owner) == end
    service.close()


@pytest.mark.root
def test_a_step_for_which_the_disk_has_no_room_is_made_smaller(make_small_disk):
    disk = make_small_disk("48m")
    owner = Owner(disk / "store", mode=native.MODE_SYNC, segment_bytes=64 << 20)
    try:
        owner.position(0)
        owner.publish()
        service = AllocateMappedFileService(owner.context(EngineConfig(message_index_enable=False)))
        settle(service)
        assert reserved_end(owner) == 32 << 20 and not service.blocked_reason
        native.store_position(owner.control.wrote, 30 << 20)
        native.store_position(owner.control.reput_from, 30 << 20)
        settle(service)
        assert (40 << 20) <= reserved_end(owner) < 48 << 20 and reserved_end(owner) % FOLIO_BYTES_MAX == 0
        assert error_number(owner) == errno.ENOSPC and "for its queues and index" in service.blocked_reason
        service.close()
    finally:
        owner.close()


def test_a_segment_of_another_length_is_not_made_longer(allocator):
    owner, service, reported = allocator
    settle(service)
    path = StorePaths(owner.root).commit_log_segment(SEGMENT)
    os.truncate(path, 1000)
    native.store_position(owner.control.wrote, 1)
    settle(service)
    assert reserved_end(owner) == SEGMENT and path.stat().st_size == 1000 and "has 1000 bytes" in reported[0]


def test_as_many_as_the_writer_wants(allocator):
    owner, service, _ = allocator
    native.store(owner.control.writer, "wanted_end", 5 * SEGMENT + 1)
    settle(service)
    assert ready_end(owner) == 6 * SEGMENT and len(segments(owner)) == 6
    assert reserved_end(owner) == 6 * SEGMENT and allocated_bytes(owner, 5 * SEGMENT) == SEGMENT


def test_a_segment_that_a_dead_allocator_made_is_taken_over(allocator):
    owner, service, _ = allocator
    path = StorePaths(owner.root).commit_log_segment(0)
    path.parent.mkdir(exist_ok=True)
    os.close(create_file(path.parent, path.name, SEGMENT, allocate="none"))
    assert ready_end(owner) == 0
    settle(service)
    assert ready_end(owner) == 2 * SEGMENT


def test_a_foreign_file_in_the_way_is_reported_and_not_used(allocator):
    owner, service, reported = allocator
    StorePaths(owner.root).commit_log.mkdir()
    (StorePaths(owner.root).commit_log / segment_name(0)).write_bytes(b"short")
    assert not service.work()
    assert error_number(owner) == errno.EIO and ready_end(owner) == 0
    assert "has 5 bytes" in reported[0]


def test_a_full_disk_is_reported_tried_again_and_got_over(allocator, monkeypatch):
    owner, service, reported = allocator
    settle(service)
    full = True
    real = allocate_mapped_file.create_file

    def create(folder, name, size_bytes, **how):
        if full:
            raise DiskFullError("no room", errno=errno.ENOSPC, path=name)
        return real(folder, name, size_bytes, **how)

    monkeypatch.setattr(allocate_mapped_file, "create_file", create)
    monkeypatch.setattr(allocate_mapped_file, "RETRY_NS", 1_000_000)
    native.store(owner.control.writer, "wanted_end", 3 * SEGMENT)
    latch = owner.memory.latch(native.WRITER)
    latch.arm()
    settle(service)
    assert error_number(owner) == errno.ENOSPC and ready_end(owner) == reserved_end(owner) == 2 * SEGMENT
    assert latch.wait(10), "the writer is woken, to answer CREATE_MAPEDFILE_FAILED"
    assert 0 < service.pause_s() <= 0.5
    eventually(lambda: service.work() or native.load(owner.worker(native.ALLOCATOR), "error_count") >= 3, "tried again")
    assert len(reported) == 1, "said once, not each time"
    full = False
    eventually(lambda: not service.work() and ready_end(owner) == 3 * SEGMENT, "made at last")
    assert error_number(owner) == 0
    assert reported[1] == "the log has space again"


def test_unused_segments_go_at_an_orderly_stop_and_used_ones_stay(allocator):
    owner, service, _ = allocator
    native.store(owner.control.writer, "wanted_end", 5 * SEGMENT)
    settle(service)
    writer = PlainWriter(owner)
    while writer.end <= SEGMENT:
        writer.put(b"x" * 3000)
    before = segments(owner)
    assert not service.drain()
    assert segments(owner) == before, "a writer may live: it has the next segment open"
    native.store(owner.control.state, "refuse_puts", native.REFUSE_STOPPING)
    assert not service.drain()
    assert segments(owner) == [segment_name(0), segment_name(SEGMENT)]
    assert ready_end(owner) == reserved_end(owner) == 2 * SEGMENT


def test_a_writer_that_starts_while_unused_segments_go_has_none_of_them_open(make_parts, monkeypatch):
    """As one does whose supervisor was killed in a stop: what it put there would be lost."""
    parts = make_parts()
    for kind in (native.WRITER, native.ALLOCATOR):
        parts.kill(kind)
    service = AllocateMappedFileService(parts.owner.context())
    settle(service)
    unused = segments(parts.owner)

    def start_it_after_the_look(*_: object) -> list[int]:
        parts.start(native.WRITER)
        return []

    monkeypatch.setattr(allocate_mapped_file, "living_kinds", start_it_after_the_look)
    native.refuse_puts(parts.control, native.REFUSE_STOPPING)
    assert unused and not service.drain() and segments(parts.owner) == []
    opened = [os.readlink(file) for file in Path(f"/proc/{parts.workers[native.WRITER].pid}/fd").iterdir()]
    assert opened and not [name for name in opened if "commitlog/" in name]  # the folder itself is locked
    service.close()


def test_a_living_writer_keeps_the_segments_ahead_at_a_stop(make_parts):
    parts = make_parts()
    parts.kill(native.ALLOCATOR)
    service = AllocateMappedFileService(parts.owner.context())
    settle(service)
    before = segments(parts.owner), ready_end(parts.owner)
    native.refuse_puts(parts.control, native.REFUSE_STOPPING)
    assert not service.drain() and (segments(parts.owner), ready_end(parts.owner)) == before
    service.close()


def test_a_stop_keeps_segments_that_an_unfinished_pass_may_have_written(allocator):
    owner, service, _ = allocator
    settle(service)
    native.store(owner.control.writer, "intent_end", SEGMENT + 10)
    service.drain()
    assert segments(owner) == [segment_name(0), segment_name(SEGMENT)]


def test_the_one_segment_of_an_empty_log_that_begins_later_stays_at_stop(make_owner):
    """Nothing else says where it begins, and its watermark would tell of a loss."""
    owner = make_owner("slave", pool_buffers=0)
    owner.position(3 * SEGMENT)
    native.store_position(owner.control.min_offset, 3 * SEGMENT)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    settle(service)
    native.store(owner.control.state, "refuse_puts", native.REFUSE_STOPPING)
    assert not service.drain()
    assert segments(owner) == [segment_name(3 * SEGMENT)]
    service.close()


def test_a_frozen_store_is_left_as_it_is(allocator):
    owner, service, _ = allocator
    settle(service)
    native.freeze(owner.control, native.FLUSHER, errno.EIO, "tried")
    native.store(owner.control.writer, "wanted_end", 5 * SEGMENT)
    native.store(owner.control.allocator, "error_number", errno.ENOSPC)
    assert not service.work() and service.pause_s() == 1.0, "it does not wait for a moment to try again"
    service.drain()
    assert len(segments(owner)) == 2


def test_pages_are_brought_in_ahead_and_only_in_mapped_mode(make_owner):
    for mode, populated in ((native.MODE_MAPPED, SEGMENT), (native.MODE_SYNC, 0), (native.MODE_POOL, 0)):
        owner = make_owner(f"store-{mode}", mode=mode, pool_buffers=0)
        owner.position(0)
        owner.publish()
        service = AllocateMappedFileService(owner.context(EngineConfig()))
        settle(service)
        assert native.load(owner.control.allocator, "populated_end") == populated
        service.close()
        successor = AllocateMappedFileService(owner.context(EngineConfig()))
        assert not successor.work(), "nothing is populated twice"
        successor.close()


@pytest.mark.parametrize("whole", [False, True])
def test_warming_changes_no_byte_and_follows_the_writer(tmp_path, whole):
    size = 32 << 20
    paths = StorePaths(tmp_path)
    paths.commit_log.mkdir()
    for start in range(0, 4 * size, size):
        with open(paths.commit_log_segment(start), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    with open(paths.commit_log_segment(0), "r+b") as file:
        file.write(b"a record")
    warmer = PageWarmer(MessageStore(tmp_path, Geometry(size)), whole=whole)
    ready = 3 * size
    while warmer.advance(0, ready):
        pass
    assert warmer.populated_end == 2 * size
    assert not warmer.advance(1000, ready), "a few bytes are no reason to go on"
    while warmer.advance(20 << 20, ready):
        pass
    assert warmer.populated_end == (84 << 20)
    assert not warmer.advance(2 * size + (16 << 20), ready), "less than a step is missing"
    while warmer.advance(2 * size + (20 << 20), 4 * size):
        pass
    assert warmer.populated_end == 4 * size
    mapped = set(re.findall(re.escape(str(paths.commit_log)) + r"/(\d+)", Path("/proc/self/maps").read_text()))
    assert mapped == {segment_name(2 * size), segment_name(3 * size)}, "no more are kept in memory"
    warmer.close()
    content = paths.commit_log_segment(0).read_bytes()
    assert content[:8] == b"a record" and not any(content[8:])


def test_a_memlock_limit_that_is_too_low_is_warned_of_once(make_owner, monkeypatch):
    monkeypatch.setattr(allocate_mapped_file, "lock_memory", lambda base, length: errno.ENOMEM)
    owner = make_owner(mode=native.MODE_MAPPED)
    owner.position(0)
    owner.publish()
    reported = Reported()
    service = AllocateMappedFileService(owner.context(EngineConfig(warm_mapped_file_enable=True), report=reported))
    native.store(owner.control.writer, "wanted_end", 4 * SEGMENT)
    eventually(lambda: not service.work(), "all is made and warmed")
    assert ready_end(owner) == 4 * SEGMENT
    assert len(reported) == 1 and "memlock" in reported[0] and f"{3 * SEGMENT:,}" in reported[0]
    service.close()


def test_the_worker_serves_a_writer_and_its_successor_takes_over(make_owner):
    owner = make_owner(mode=native.MODE_MAPPED)
    owner.position(0)
    owner.publish()
    first = owner.spawn("pyengine.workers.allocator")
    eventually(lambda: ready_end(owner) == 2 * SEGMENT, "two segments")
    first.kill()
    first.wait()
    owner.spawn("pyengine.workers.allocator")
    owner.wait_ready(native.ALLOCATOR, incarnation=2)
    native.store(owner.control.writer, "wanted_end", 4 * SEGMENT)
    owner.memory.wake(native.ALLOCATOR)
    eventually(lambda: ready_end(owner) == 4 * SEGMENT, "four segments")


@pytest.mark.root
def test_a_really_full_disk_and_room_again(make_small_disk, monkeypatch):
    disk = make_small_disk("600k")
    owner = Owner(disk / "store", mode=native.MODE_SYNC)
    try:
        owner.position(0)
        owner.publish()
        monkeypatch.setattr(allocate_mapped_file, "RETRY_NS", 100_000_000)
        service = AllocateMappedFileService(owner.context(EngineConfig(message_index_enable=False)))
        native.store(owner.control.writer, "wanted_end", 50 * SEGMENT)
        eventually(lambda: not service.work() and error_number(owner) == errno.ENOSPC, "the disk is full")
        assert 0 < reserved_end(owner) < 50 * SEGMENT
        eventually(lambda: not service.work() and ready_end(owner) == 50 * SEGMENT, "lengths take no room")
        resize(disk, "8m")
        eventually(lambda: not service.work() and reserved_end(owner) == 50 * SEGMENT, "room again")
        assert error_number(owner) == 0
        service.close()
    finally:
        owner.close()


def test_a_failure_is_over_when_its_step_is_no_longer_due(make_owner, monkeypatch):
    """The cleaner has deleted the older half of the log, so that fewer blocks are wanted ahead of the writer."""
    size, reported = 256 << 20, Reported()
    owner = make_owner("shrinking", mode=native.MODE_SYNC, segment_bytes=size)
    owner.position(3 * size + (200 << 20), ready_end=3 * size)
    native.store(owner.control.allocator, "reserved_end", 4 * size)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig(), report=reported))

    def refuse(descriptor, offset, length, path):
        raise DiskFullError("no room", errno=errno.ENOSPC, path=path)

    monkeypatch.setattr(allocate_mapped_file, "allocate", refuse)
    settle(service)
    assert error_number(owner) == errno.ENOSPC and reserved_end(owner) == 4 * size
    native.store_position(owner.control.min_offset, 3 * size)
    settle(service)
    assert error_number(owner) == 0 and not service.blocked_reason and service.pause_s() == 1.0
    assert reported[1:] == ["the log has space again"]
    service.close()


def test_a_failure_of_a_dead_allocator_is_not_its_successors(allocator):
    owner, service, reported = allocator
    settle(service)
    native.store(owner.control.allocator, "error_number", errno.ENOSPC)
    successor = AllocateMappedFileService(owner.context(EngineConfig(), report=reported))
    settle(successor)
    assert error_number(owner) == 0 and successor.pause_s() == 1.0
    successor.close()


@pytest.mark.root
def test_room_is_left_for_the_first_index_file(make_small_disk):
    """What is acknowledged could not be dispatched else, and no stop would be in order."""
    disk = make_small_disk("64m")
    owner = Owner(disk / "store", mode=native.MODE_SYNC, segment_bytes=64 << 20)
    try:
        owner.position(0)
        owner.publish()
        config = EngineConfig()
        service = AllocateMappedFileService(owner.context(config))
        native.store(owner.control.writer, "wanted_end", 64 << 20)
        settle(service)
        assert service.blocked_reason and reserved_end(owner) > 0
        folder = owner.context(config).store.index
        os.close(create_file(folder, "20260101000000000", config.geometry.index_layout.size_bytes,
                             allocate=first_bytes(config.geometry.index_layout)))
        before = reserved_end(owner)
        native.store_position(owner.control.reput_from, before)
        eventually(lambda: (service.work(), reserved_end(owner) > before)[1], "the rest is the log's")
        service.close()
    finally:
        owner.close()


@pytest.mark.root
def test_room_is_left_for_queues_and_index(make_small_disk):
    disk = make_small_disk("1m")
    owner = Owner(disk / "store", mode=native.MODE_SYNC)
    try:
        owner.position(0)
        owner.publish()
        reported = Reported()
        service = AllocateMappedFileService(owner.context(EngineConfig(message_index_enable=False), report=reported))
        native.store(owner.control.writer, "wanted_end", 50 * SEGMENT)
        eventually(lambda: not service.work() and error_number(owner) == errno.ENOSPC, "the disk counts as full")
        reached = reserved_end(owner)
        assert free_bytes(disk) >= derived_room_bytes(reached) > SEGMENT
        assert "for its queues and index" in reported[0]
        fill(disk / "ballast")
        native.store(owner.control.allocator, "reserved_end", 0)  # as for the next engine: what is allocated needs no room
        eventually(lambda: not service.work() and reserved_end(owner) == reached, "all of it is reserved again")
        service.close()
    finally:
        owner.close()


def test_a_disk_that_cannot_be_measured_is_reported_and_tried_again(allocator, monkeypatch):
    owner, service, reported = allocator

    def refuse(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(allocate_mapped_file, "RETRY_NS", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", refuse)
        settle(service)
    assert error_number(owner) == errno.EIO and "Input/output error" in reported[0] and reserved_end(owner) == 0
    settle(service)
    assert reserved_end(owner) == SEGMENT and not service.blocked_reason


def test_a_segment_that_cannot_be_mapped_is_only_not_populated(make_owner, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    owner = make_owner(mode=native.MODE_MAPPED)
    owner.position(0)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    monkeypatch.setattr(allocate_mapped_file.mmap, "mmap", refuse)
    native.store(owner.control.writer, "wanted_end", 4 * SEGMENT)
    eventually(lambda: not service.work(), "all is made")
    assert ready_end(owner) == 4 * SEGMENT and not service.blocked_reason
    service.close()


def test_no_page_is_brought_in_where_the_disk_copies_on_write(tmp_path, monkeypatch):
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / segment_name(0)).write_bytes(bytes(SEGMENT))
    monkeypatch.setattr(allocate_mapped_file, "copies_on_write", lambda descriptor: True)
    monkeypatch.setattr(allocate_mapped_file.mmap, "mmap", lambda *arguments: pytest.fail("pages that are brought in take room"))
    warmer = PageWarmer(MessageStore(tmp_path, Geometry(SEGMENT)), whole=True)
    assert not warmer.advance(0, SEGMENT) and warmer.populated_end == SEGMENT
    warmer.close()


def test_no_page_is_brought_in_ahead_of_large_passes(make_owner, monkeypatch):
    owner = make_owner(mode=native.MODE_MAPPED, segment_bytes=128 << 20)
    owner.position(0)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    now_ns, wrote = 10**12, 0
    monkeypatch.setattr(allocate_mapped_file, "monotonic_ns", lambda: now_ns)

    def populated_after(passes: int, pass_bytes: int, pause_ns: int) -> int:
        """How far beyond the log's end, once so many passes came and it has rested."""
        nonlocal wrote, now_ns
        wrote += passes * pass_bytes
        native.store_position(owner.control.wrote, wrote)
        native.store_position(owner.control.slot_pass, native.load_position(owner.control.slot_pass) + passes)
        service.work()
        now_ns += pause_ns
        settle(service)
        return max(0, native.load(owner.control.allocator, "populated_end") - wrote)

    settle(service)
    window = allocate_mapped_file.WINDOW_BYTES
    assert populated_after(10, GATHER_BYTES_MIN - 1, 0) == window - 10 * (GATHER_BYTES_MIN - 1), "a window, each of whose steps is large"
    assert populated_after(5000, GATHER_BYTES_MIN, 0) == 0, "the writer writes"
    assert populated_after(5, GATHER_BYTES_MIN, allocate_mapped_file.BUSY_NS) == allocate_mapped_file.PIECE_BYTES, "it is over for now"
    assert populated_after(5, 1000, 0) == min(window, reserved_end(owner) - wrote) > window // 2, "it is over"
    service.close()


def test_a_slow_stream_is_looked_at_less_often_than_a_fast_one(make_owner, monkeypatch):
    owner = make_owner(mode=native.MODE_MAPPED, segment_bytes=64 << 20)
    owner.position(0)
    owner.publish()
    service = AllocateMappedFileService(owner.context(EngineConfig()))
    now_ns, wrote, pauses = 10**12, 0, {}
    monkeypatch.setattr(allocate_mapped_file, "monotonic_ns", lambda: now_ns)
    for bytes_a_pause in (0, 100, 8 << 20):
        for _ in range(3):
            now_ns += 20_000_000 if bytes_a_pause else 200_000_000
            wrote += bytes_a_pause
            native.store_position(owner.control.wrote, wrote)
            settle(service)
            pauses[bytes_a_pause] = service.pause_s()
    service.close()
    assert pauses[8 << 20] < pauses[100] < pauses[0] == allocate_mapped_file.IDLE_PAUSE_S
