"""The writer's service beside the native pass: after a dead writer, with hostile producers, and with the pool."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from types import SimpleNamespace

import pytest

from fix_golden import usual
from fix_owner import woken_asleep
from fix_parts import MODES
from pyengine._native import ffi, lib
from pyengine.errors import DiskError, DiskFullError, FlushError
from pyengine.formats.paths import StorePaths
from pyengine.ipc import shared_objects
from pyengine.ipc.session_client import open_session
from pyengine.native import control as native
from pyengine.native import flush, session
from pyengine.native.writer import GATHER_BYTES_MIN, Segment, view_queue_table
from pyengine.results import PutStatus
from pyengine.services import flush_commit_log, put_message
from pyengine.services.put_message import WAKES, PutMessageService
from reported import Reported
from waiting import eventually

RUBBISH = b"\xa5"
OF_SECOND_SEGMENT = 1000
HOUR_NS = 3_600_000_000_000


def service_of(parts, **settings) -> PutMessageService:
    return PutMessageService(parts.owner.context(**settings))


def test_a_pool_that_cannot_be_locked_is_warned_of_once(make_parts, monkeypatch):
    parts = make_parts(mode=native.MODE_POOL, pool_buffers=3)
    parts.kill(native.WRITER)
    monkeypatch.setattr(flush, "lock_memory", lambda base, length: errno.ENOMEM)
    reported = Reported()
    service_of(parts, report=reported).close()
    assert len(reported) == 1 and "memlock" in reported[0] and f"{3 * parts.owner.memory.identity.segment_bytes:,}" in reported[0]


class DeadPass:
    """What a writer leaves that died inside a pass which had reached the next segment, the first time and once more."""

    def __init__(self, parts) -> None:
        self.parts = parts
        self.control = parts.control
        self.size = parts.owner.memory.identity.segment_bytes
        self.wrote = native.load_position(self.control.wrote)
        self.end = self.size + OF_SECOND_SEGMENT
        self.stack = contextlib.ExitStack()
        self.objects = {}
        if parts.owner.memory.identity.mode == native.MODE_POOL:
            native.store(self.control.pool[1], "segment_base", self.size)
            for number in (0, 1):
                self.objects[number * self.size] = self.attach(shared_objects.pool_name(number)).memory
        self.table = view_queue_table(self.attach(shared_objects.queues_name(1)).memory)
        self.slot = self.table.slot[lib.ms_queue_table_find(self.table, b"T", 1, 0, 0)]

    def attach(self, name: str):
        shared = self.parts.owner.folder.attach(name)
        self.stack.callback(shared.close)
        return shared

    def die(self) -> None:
        number = native.load_position(self.control.slot_pass) + 1
        self.control.undo.old_offset[0] = self.slot.next_offset
        self.control.undo.table_slot[0] = lib.ms_queue_table_find(self.table, b"T", 1, 0, 0)
        self.control.undo.count = 1
        setattr(self.control.undo, "pass", number)
        self.slot.next_offset += 9
        setattr(self.slot, "pass", number)
        native.store(self.control.writer, "intent_end", self.end)
        native.store(self.control.writer, "intended_pass", number)
        self.content(RUBBISH)

    def content(self, write: bytes = b"") -> bytes:
        """The bytes of the pass; with `write` they are all that."""
        found = b""
        for base, start, end in ((0, self.wrote, self.size), (self.size, 0, OF_SECOND_SEGMENT)):
            if self.objects:
                if write:
                    self.objects[base][start:end] = write * (end - start)
                found += bytes(self.objects[base][start:end])
                continue
            with open(StorePaths(self.parts.owner.root).commit_log_segment(base), "r+b") as file:
                if write:
                    os.pwrite(file.fileno(), write * (end - start), start)
                found += os.pread(file.fileno(), end - start, start)
        return found

    def is_forgotten(self, next_offset: int) -> bool:
        undo = self.control.undo
        return (self.content() == bytes(self.end - self.wrote) and self.slot.next_offset == next_offset
                and (getattr(self.slot, "pass"), getattr(undo, "pass"), undo.count) == (0, 0, 0)
                and native.load_position(self.control.wrote) == native.load(self.control.writer, "intent_end") == self.wrote)

    def close(self) -> None:
        del self.slot, self.table
        self.objects.clear()
        self.stack.close()


@pytest.mark.parametrize("mode", usual(MODES, ["sync"], pytest.mark.ci))
def test_a_dead_writers_pass_is_undone_before_anything_is_appended(make_parts, mode):
    """Also where the next writer dies in the same pass."""
    parts = make_parts(**MODES[mode])
    with parts.producer() as producer:
        for _ in range(3):
            assert producer.put("T", b"x" * 100).status is PutStatus.PUT_OK
    eventually(lambda: native.load(parts.control.allocator, "ready_end") >= 2 * 65536, "two segments")
    eventually(lambda: native.load_position(parts.control.committed) == native.load_position(parts.control.wrote), "committed")
    for kind in parts.workers:
        parts.kill(kind)
    dead = DeadPass(parts)
    try:
        for _ in range(2):
            dead.die()
            service_of(parts).close()
            assert dead.is_forgotten(3)
    finally:
        dead.close()


@pytest.mark.parametrize("mode", usual(MODES, ["pool"], pytest.mark.ci))
def test_puts_are_taken_up_to_the_reserved_end_and_again_once_there_is_more(make_parts, mode):
    parts = make_parts(**MODES[mode])
    allocator = parts.control.allocator
    with parts.producer() as producer:
        assert producer.put("T", b"").ok
        eventually(lambda: native.load(allocator, "reserved_end") == 2 * 65536, "two steps")
        parts.kill(native.ALLOCATOR)
        native.store(allocator, "error_number", errno.ENOSPC)  # as it said before it died
        while (result := producer.put("T", b"x" * 1000)).ok:
            pass
        assert result.status is PutStatus.CREATE_MAPEDFILE_FAILED
        assert 0 <= 2 * 65536 - native.load_position(parts.control.wrote) < 1200
        parts.start(native.ALLOCATOR)
        eventually(lambda: producer.put("T", b"x" * 1000).ok, "the next allocator reserves more")
        assert native.load(allocator, "error_number") == 0


@pytest.mark.parametrize("mode", usual(MODES, ["pool"], pytest.mark.ci))
def test_the_allocator_is_woken_when_less_than_a_step_is_reserved_ahead(make_parts, mode):
    """In sync and pool mode none but the writer wakes it."""
    parts = make_parts(**MODES[mode])
    latch = parts.owner.memory.latch(native.ALLOCATOR)
    with parts.producer() as producer:
        eventually(lambda: native.load(parts.control.allocator, "reserved_end") == 65536, "a step")
        parts.kill(native.ALLOCATOR)
        latch.arm()
        assert producer.put("T", b"x").ok and latch.wait(30)
        native.store(parts.control.allocator, "error_number", errno.ENOSPC)
        latch.arm()
        assert producer.put("T", b"x").ok and not latch.wait(0), "it tries again by itself"


def test_a_pass_that_a_dead_writer_committed_is_announced(make_parts):
    parts = make_parts()
    for kind in parts.workers:
        parts.kill(kind)
    memory = parts.owner.memory
    for kind in WAKES:
        memory.latch(kind).arm()
    service_of(parts).close()
    assert {kind: memory.latch(kind).wait(0) for kind in WAKES} == dict.fromkeys(WAKES, True)


def test_the_session_of_a_producer_that_breaks_the_protocol_is_freed(make_parts):
    parts = make_parts()
    opened = open_session(parts.owner.root)
    row = parts.control.sessions[opened.slot]
    ring = ffi.cast("uint8_t *", opened.session) + session.session_bytes(4096) - 4096
    ffi.cast("uint32_t *", ring)[0] = 12  # no entry has such a length
    lib.ms_store_i64(ffi.cast("int64_t *", ffi.addressof(opened.session, "tail")), 64)
    parts.owner.memory.wake(native.WRITER)
    eventually(lambda: native.load(row, "state") == native.SESSION_FREE, "its place is free for another producer")
    assert native.load(row, "bad_entry")
    opened.close()


def test_a_side_object_that_was_cut_short_is_refused_whole(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        os.kill(parts.workers[native.WRITER].pid, signal.SIGSTOP)
        try:
            future = producer.put_async("T", b"x" * 60_000)
            (side,) = parts.owner.folder.path.glob("side-*")
            os.truncate(side, side.stat().st_size - 1)
        finally:
            os.kill(parts.workers[native.WRITER].pid, signal.SIGCONT)
        assert future.result(30).status is PutStatus.UNKNOWN_ERROR
        assert producer.put("T", b"y").physical_offset == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_flusher_is_vouched_for_once_each_unflushed_segment_is_synced(make_parts, monkeypatch, fails):
    """By the writer's own descriptors, which are older than what was written; an error there is the end of the store."""
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 25).ok
    control = parts.control
    eventually(lambda: native.load(control.allocator, "ready_end") == 3 * 65536, "the segment after the next one")
    eventually(lambda: native.load_position(control.flushed) == native.load_position(control.wrote), "all is flushed")
    for kind in parts.workers:
        parts.kill(kind)
    native.store_position(control.flushed, 0)
    beats = []
    service = service_of(parts, heartbeat=lambda **_: beats.append(len(synced)))
    native.store_position(control.flushed, native.load_position(control.wrote))
    synced, verified = [], lambda: native.load(control.writer, "verified_flusher")

    def fdatasync(descriptor, path=None):
        assert verified() != incarnation
        synced.append(os.path.basename(path))
        assert os.path.samestat(os.fstat(descriptor), os.stat(path))
        if fails and len(synced) == 2:
            raise FlushError("gone", errno=errno.EIO, path=path)

    monkeypatch.setattr(flush, "fdatasync", fdatasync)
    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    service.work()
    names = [f"{number * 65536:020d}" for number in range(3)]
    assert synced == (names[:2] if fails else names)
    assert {1, 2, 3}.issubset(beats) or fails, "a slow disk makes no stuck writer"
    assert (verified() == incarnation, native.load(control.state, "frozen") != 0) == (not fails, fails)
    service.work()
    assert synced == (names[:2] if fails else names), "once"
    assert service.drained
    service.close()


@pytest.mark.timeout(60)
def test_a_wake_up_while_the_engine_stops_returns_to_the_worker(make_parts, monkeypatch):
    """The signal to end may have come before it slept."""
    parts = make_parts()
    parts.kill(native.WRITER)
    service = service_of(parts)
    service.work()  # the flusher's request, unless the writer before it has served it
    monkeypatch.setattr(put_message, "RUN_NS", HOUR_NS)
    monkeypatch.setattr(put_message, "IDLE_RUN_NS", HOUR_NS)
    native.refuse_puts(parts.control, native.REFUSE_STOPPING)
    with woken_asleep(parts.owner.memory, native.WRITER):
        assert not service.work()
    service.close()


@pytest.mark.parametrize("mode", usual(MODES, ["pool"], pytest.mark.ci))
def test_a_new_writer_rewrites_the_bytes_an_older_sync_may_have_failed_on(make_parts, monkeypatch, mode):
    """Those it found unflushed, before it vouches for the next flusher, once, not before the committer has written all it has."""
    parts = make_parts(**MODES[mode])
    control, written = parts.control, []
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 25).ok
    end = native.load_position(control.wrote)
    eventually(lambda: native.load_position(control.committed) == end, "all is in the files")
    for kind in parts.workers:
        parts.kill(kind)
    native.store_position(control.flushed, 0)
    log = parts.log()
    service = service_of(parts)
    monkeypatch.setattr(flush_commit_log, "rewrite", lambda path, start, end: written.append((path.name, start, end)))
    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    if mode == "pool":
        native.store_position(control.committed, 4000)
        service.work()
        assert not written and native.load(control.writer, "verified_flusher") < incarnation
        native.store_position(control.committed, end)
    service.work()
    assert written == [(f"{0:020d}", 0, 65536), (f"{65536:020d}", 0, end - 65536)]
    assert native.load(control.writer, "verified_flusher") == incarnation and not native.load(control.state, "frozen")
    native.store(control.flusher, "incarnation", incarnation + 1)
    service.work()
    assert len(written) == 2 and native.load(control.writer, "verified_flusher") == incarnation + 1
    service.close()
    assert parts.log() == log


@pytest.mark.parametrize("error", [DiskFullError("full", errno=errno.ENOSPC), DiskError("no descriptor", errno=errno.EMFILE)])
def test_a_passing_disk_error_delays_the_rewrite_and_is_reported(make_parts, monkeypatch, error):
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 5).ok
    control = parts.control
    for kind in parts.workers:
        parts.kill(kind)
    native.store_position(control.flushed, 0)
    service = service_of(parts)

    def fail(path, start, end):
        raise error

    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    with monkeypatch.context() as patched:
        patched.setattr(flush_commit_log, "rewrite", fail)
        service.work()
        assert str(error) in service.blocked_reason and service.blocked_errno == error.errno
        assert native.load(control.writer, "verified_flusher") < incarnation
    service.work()
    assert native.load(control.writer, "verified_flusher") == incarnation
    assert not service.blocked_reason and not native.load(control.state, "frozen")
    service.close()


def test_no_bytes_are_rewritten_that_the_old_flusher_has_synced_since_the_writer_began(make_parts, monkeypatch):
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 5).ok
    control = parts.control
    for kind in parts.workers:
        parts.kill(kind)
    native.store_position(control.flushed, 0)
    service = service_of(parts)
    native.store_position(control.flushed, native.load_position(control.wrote))
    monkeypatch.setattr(flush_commit_log, "rewrite", lambda *_: pytest.fail("written again"))
    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    service.work()
    assert native.load(control.writer, "verified_flusher") == incarnation
    service.close()


def test_zeros_that_a_dead_writers_own_sync_may_have_failed_on_get_new_pages(make_parts, monkeypatch):
    """It died while it synced for a new flusher: zeros stored ahead were not on the disk, though all records were flushed."""
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 5).ok
    control, renewed = parts.control, []
    for kind in parts.workers:
        parts.kill(kind)
    end = native.load_position(control.wrote)
    native.store_position(control.flushed, end)
    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    service = service_of(parts)
    monkeypatch.setattr(flush_commit_log, "renew_zeros", lambda path, start: renewed.append((path.name, start)))
    service.work()
    assert renewed[0] == (f"{0:020d}", end)
    assert native.load(control.writer, "verified_flusher") == incarnation
    service.close()


def test_a_damaged_record_that_would_be_written_again_freezes_the_store(make_parts):
    """The page cache had lost the record before the flusher died."""
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put_many("T", [b"x" * 3000] * 5).ok
    control = parts.control
    for kind in parts.workers:
        parts.kill(kind)
    native.store_position(control.flushed, 0)
    with open(StorePaths(parts.owner.root).commit_log_segment(0), "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    service = service_of(parts)
    incarnation = native.load(control.flusher, "incarnation") + 1
    native.store(control.flusher, "incarnation", incarnation)
    service.work()
    assert native.load(control.state, "frozen") == 2 and native.load(control.writer, "verified_flusher") < incarnation
    assert f"{0:020d}" in native.reason(control)
    service.close()


@pytest.mark.parametrize("mode, size_bytes", [("sync", 100), ("async", GATHER_BYTES_MIN)])
def test_a_pass_without_room_is_taken_back_once_its_bytes_can_be_cleared_and_then_puts_are_refused(
        make_parts, monkeypatch, mode, size_bytes):
    parts = make_parts(**MODES[mode])
    with parts.producer() as producer:
        assert producer.put("T", b"before").ok
        wrote = native.load_position(parts.control.wrote)
        parts.kill(native.WRITER)
        refused = producer.put_async("T", b"x" * size_bytes)
        service = service_of(parts)
        full = os.open("/dev/full", os.O_RDWR)
        current = service._writer.current
        service._writer.set_current(Segment(0, current.memory, full))
        really_clear, room = flush.zero_range, False

        def clear(*arguments):
            if not room:
                raise DiskFullError("no room", errno=errno.ENOSPC)
            return really_clear(*arguments)

        monkeypatch.setattr(flush, "zero_range", clear)
        for _ in range(3):
            service.work()
            assert not refused.done() and native.load_position(parts.control.wrote) == wrote
            assert native.load(parts.control.writer, "intent_end") > wrote, "a successor would clear them"
        assert native.load(parts.control.state, "frozen") == 0 and "No space left" in service.blocked_reason
        room = True
        service.work()
        assert refused.result(10).status is PutStatus.SERVICE_NOT_AVAILABLE
        eventually(lambda: service.work() or service.blocked_reason == "", "the disk takes bytes again")
        future = producer.put_async("T", b"after")
        eventually(lambda: (service.work(), native.load_position(parts.control.wrote) > wrote)[-1], "it is written")
        assert future.result(10).physical_offset == wrote
        os.close(full)
        service.close()


def test_refused_records_of_a_pass_that_a_failing_disk_ends_are_cleared(make_parts):
    """The next start would keep them otherwise."""
    parts = make_parts(mode=native.MODE_SYNC)
    with parts.producer() as producer:
        assert producer.put("T", b"before").ok
        wrote = native.load_position(parts.control.wrote)
        parts.kill(native.WRITER)
        refused = producer.put_async("T", b"x" * 8000)
        service = service_of(parts)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (wrote + 9000, limits[1]))  # the record is written, the zeros after it are not
        try:
            service.work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.strerror(errno.EFBIG) in native.reason(parts.control)
        eventually(lambda: service.work() or refused.done(), "it is answered")
        assert refused.result().status is PutStatus.SERVICE_NOT_AVAILABLE
        assert not any(parts.log()[wrote:])
        service.close()


@pytest.fixture
def make_read_only(monkeypatch):
    """make_read_only(): from now on this process can open no segment for writing."""
    really_open = os.open

    def refuse_to_write(path, flags, *more, **named):
        if flags & (os.O_RDWR | os.O_WRONLY) and ("commitlog" in str(path) or str(path).endswith("/lock")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, *more, **named)

    return lambda: monkeypatch.setattr(os, "open", refuse_to_write)


@pytest.mark.parametrize("mode", usual(MODES, ["pool"], pytest.mark.ci))
@pytest.mark.parametrize("size_bytes", [1, GATHER_BYTES_MIN])
def test_a_new_writer_on_a_disk_that_became_read_only_refuses_what_was_not_taken(make_parts, make_read_only, mode, size_bytes):
    parts = make_parts(**MODES[mode])
    with parts.producer() as producer:
        assert producer.put("T", b"before").ok
        parts.kill(native.WRITER)
        wrote = native.load_position(parts.control.wrote)
        waiting = producer.put_async("T", b"x" * size_bytes)
        make_read_only()
        service = service_of(parts)
        for future in (waiting, producer.put_async("T", b"later")):
            eventually(lambda future=future: service.work() or future.done(), "it is answered")
            assert future.result().status is PutStatus.SERVICE_NOT_AVAILABLE and "read-only" in future.result().reason
        assert parts.control.state.frozen_errno == errno.EROFS and native.load_position(parts.control.wrote) == wrote
        service.close()


def test_no_writer_refuses_a_put_whose_records_a_read_only_disk_may_keep(make_parts, make_read_only, monkeypatch):
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put("T", b"x" * 100).ok
        eventually(lambda: native.load(parts.control.allocator, "ready_end") >= 2 * 65536, "two segments")
        next_offset = 1
        for kind in parts.workers:
            parts.kill(kind)
        dead = DeadPass(parts)
        dead.die()
        make_read_only()
        with pytest.raises(DiskError, match=os.strerror(errno.EROFS)):
            service_of(parts)
        assert native.load(parts.control.state, "frozen") == 0
        monkeypatch.undo()
        service_of(parts).close()
        assert dead.is_forgotten(next_offset)
        dead.close()


def test_a_segment_that_a_read_only_disk_does_not_map_ends_no_writer(make_parts, make_read_only, monkeypatch):
    parts = make_parts()
    with parts.producer() as producer:
        parts.kill(native.WRITER)
        service = service_of(parts)

        def refuse(*arguments):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(put_message, "mmap", SimpleNamespace(mmap=refuse))
        make_read_only()
        while native.load(parts.control.state, "frozen") == 0:
            future = producer.put_async("T", b"x" * 20000)
            eventually(lambda future=future: service.work() or future.done(), "it is answered")
        refused = producer.put_async("T", b"x")
        eventually(lambda: service.work() or refused.done(), "it is answered")
        assert refused.result().status is PutStatus.SERVICE_NOT_AVAILABLE
        service.close()
