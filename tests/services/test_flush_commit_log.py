"""Flushing: `flushed` covers only what was synced, a new flusher waits for its writer, the first failure is final."""

from __future__ import annotations

import errno
import os

import pytest

from fix_writer import PlainWriter
from pyengine.errors import DiskError
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.services.allocate_mapped_file import AllocateMappedFileService
from pyengine.services.flush_commit_log import UNFLUSHED_SEGMENTS_MAX, FlushRealTimeService, GroupCommitService
from pyengine.storage.config import EngineConfig
from waiting import eventually

SEGMENT = 65536
EVERY_TIME = EngineConfig(flush_interval_commit_log_ms=1)


def rig(make_owner, mode, segments=4):
    """Return an owner and a writer; segments are ready."""
    owner = make_owner(mode=mode, segment_bytes=SEGMENT, pool_buffers=0)
    owner.position(0)
    owner.publish()
    native.store(owner.control.writer, "wanted_end", segments * SEGMENT)
    allocator = AllocateMappedFileService(owner.context(EngineConfig()))
    while native.load(owner.control.allocator, "ready_end") < segments * SEGMENT:
        assert allocator.work()
    allocator.close()
    return owner, PlainWriter(owner)


def flushed(owner):
    return native.load_position(owner.control.flushed)


@pytest.fixture(params=["timed", "group"])
def flusher(request, make_owner):
    mode = native.MODE_SYNC if request.param == "group" else native.MODE_MAPPED
    owner, writer = rig(make_owner, mode)
    kind = GroupCommitService if request.param == "group" else FlushRealTimeService
    service = kind(owner.context(EVERY_TIME))
    yield owner, writer, service
    service.close()


def open_segments(service) -> dict[int, int]:
    """The descriptors of the segments that a flusher has open, by their start."""
    return service._segments.descriptors


def go_until(service, condition, what):
    def step():
        service.work()
        return condition()
    eventually(step, what)


def test_flushed_does_not_move_until_the_writer_has_vouched_for_this_flusher(flusher):
    owner, writer, service = flusher
    writer.put(b"x" * 100)
    native.store(owner.control.writer, "verified_flusher", service.incarnation - 1)
    for _ in range(3):
        assert not service.work()
    assert not service.drain()
    assert flushed(owner) == 0
    assert service.incarnation == native.load(owner.control.flusher, "incarnation") == 1
    writer.vouch()
    go_until(service, lambda: flushed(owner) == writer.end, "flushed after the writer vouched")


def test_a_flush_takes_everything_over_segments(flusher):
    owner, writer, service = flusher
    writer.vouch()
    for _ in range(70):
        writer.put(b"x" * 2000)
    assert writer.end > 2 * SEGMENT
    go_until(service, lambda: flushed(owner) == writer.end, "everything flushed")
    assert native.load(owner.control.flusher, "syncs") >= 3
    assert native.load(owner.control.flusher, "sync_ns_max") > 0


def test_draining_reaches_the_end_and_then_ends(flusher):
    owner, writer, service = flusher
    writer.vouch()
    writer.put(b"x" * 2000)
    while service.drain():
        pass
    assert flushed(owner) == writer.end
    assert not service.drain()


def test_the_first_failed_sync_freezes_the_store_for_good(flusher):
    """A pipe in place of the segment's descriptor makes fdatasync fail for real."""
    owner, writer, service = flusher
    writer.vouch()
    writer.put(b"x")
    end = writer.end
    go_until(service, lambda: flushed(owner) == end, "the first flush")
    writer.put(b"y")
    reading, writing = os.pipe()
    descriptors = open_segments(service)
    good, descriptors[0] = descriptors[0], writing
    before = native.load(owner.control.flush_seq, "value")
    try:
        go_until(service, lambda: native.load(owner.control.state, "frozen") == 2, "frozen")
        assert native.load(owner.control.flush_seq, "value") > before, "those who wait for durability are woken"
    finally:
        descriptors[0] = good
        os.close(reading)
        os.close(writing)
    assert native.load(owner.control.state, "state") == native.STATE_READ_ONLY
    assert owner.control.state.frozen_kind == native.FLUSHER
    assert owner.control.state.frozen_errno == errno.EINVAL
    assert "00000000000000000000" in native.reason(owner.control) and f"durable up to {end}" in native.reason(owner.control)
    for _ in range(3):
        service.work()
    assert not service.drain()
    assert flushed(owner) == end, "not retried, although the descriptor is good again"


def test_a_disk_that_became_read_only_freezes_the_store_and_ends_no_flusher(flusher, monkeypatch):
    owner, writer, service = flusher
    writer.vouch()

    really_open, read_only = os.open, ["commitlog"]

    def refuse(path, flags, *more, **named):
        if flags & os.O_RDWR and any(name in str(path) for name in read_only):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    native.store(owner.control.allocator, "ready_end", 5 * SEGMENT)
    with pytest.raises(DiskError):  # of the log's folder alone, which may be writable again
        service.work()
    assert native.load(owner.control.state, "frozen") == 0
    read_only.append("lock")
    service.work()
    assert native.load(owner.control.state, "frozen") == 2 and owner.control.state.frozen_errno == errno.EROFS
    service.work()
    assert not service.drain()
    type(service)(owner.context(EVERY_TIME)).close()


def test_a_new_flusher_over_a_frozen_store_does_nothing(make_owner):
    owner, writer = rig(make_owner, native.MODE_MAPPED)
    writer.put(b"x")
    native.freeze(owner.control, native.COMMITTER, errno.EIO, "tried")
    service = FlushRealTimeService(owner.context(EVERY_TIME))
    writer.vouch()
    service.work()
    assert not service.drain() and flushed(owner) == 0
    service.take_settings(EngineConfig(flush_interval_commit_log_ms=86_400_000))
    service.work()
    assert service.pause_s() == 86_400
    service.close()


def test_a_new_flusher_of_a_frozen_store_in_sync_mode_sleeps_though_no_writer_vouches_for_it(make_owner):
    owner, writer = rig(make_owner, native.MODE_SYNC)
    writer.put(b"x")
    native.freeze(owner.control, native.WRITER, errno.EIO, "tried")
    service = GroupCommitService(owner.context(EVERY_TIME))
    began_ns = monotonic_ns()
    assert not service.work() and monotonic_ns() - began_ns >= 500_000_000
    service.close()


def test_timed_flushing_waits_for_its_interval(make_owner):
    owner, writer = rig(make_owner, native.MODE_MAPPED)
    service = FlushRealTimeService(owner.context(EngineConfig(flush_interval_commit_log_ms=86_400_000)))
    writer.vouch()
    writer.put(b"x")
    service.work()
    end = writer.end
    assert flushed(owner) == end, "the first flush is due at once"
    writer.put(b"y")
    service.work()
    assert flushed(owner) == end
    assert 86_000 < service.pause_s() <= 86_400
    service.take_settings(EngineConfig(flush_interval_commit_log_ms=50))
    service.work()
    assert flushed(owner) == writer.end and service.pause_s() <= 0.05, "a changed interval counts at once"
    service.close()


def test_a_timed_flush_comes_early_before_unflushed_segments_take_all_descriptors(make_owner):
    owner, writer = rig(make_owner, native.MODE_MAPPED, segments=UNFLUSHED_SEGMENTS_MAX + 2)
    service = FlushRealTimeService(owner.context(EngineConfig(flush_interval_commit_log_ms=86_400_000)))
    writer.vouch()
    writer.put(b"x")
    service.work()
    first = flushed(owner)
    while writer.end - first < UNFLUSHED_SEGMENTS_MAX * SEGMENT:
        assert not service.work() and flushed(owner) == first
        writer.put(b"x" * 60_000)
    service.work()
    assert flushed(owner) == writer.end
    service.work()
    assert len(open_segments(service)) < 5
    service.close()


def test_segments_are_open_before_they_are_written_and_closed_when_they_are_flushed(make_owner):
    owner, writer = rig(make_owner, native.MODE_MAPPED, segments=3)
    service = FlushRealTimeService(owner.context(EVERY_TIME))
    writer.vouch()
    assert sorted(open_segments(service)) == [0, SEGMENT, 2 * SEGMENT]
    while writer.end <= SEGMENT:
        writer.put(b"x" * 3000)
    go_until(service, lambda: flushed(owner) == writer.end, "flushed into the second segment")
    service.work()
    assert sorted(open_segments(service)) == [SEGMENT, 2 * SEGMENT]
    service.close()


def test_group_commit_sleeps_on_its_latch_and_is_woken_by_a_put(make_owner):
    owner, writer = rig(make_owner, native.MODE_SYNC)
    child = owner.spawn("pyengine.workers.flusher")
    owner.wait_ready(native.FLUSHER)
    writer.vouch()
    for number in range(20):
        writer.put(b"x" * 10)
        eventually(lambda: flushed(owner) == writer.end, f"put {number} flushed")
    assert child.poll() is None
    began_ns = native.load(owner.worker(native.FLUSHER), "heartbeat_ns")
    eventually(lambda: native.load(owner.worker(native.FLUSHER), "heartbeat_ns") > began_ns, "heartbeat of an idle flusher")
    assert began_ns <= monotonic_ns()


@pytest.mark.parametrize("mode", [native.MODE_MAPPED, native.MODE_SYNC])
def test_a_killed_flusher_is_succeeded_where_it_stood(make_owner, mode):
    owner, writer = rig(make_owner, mode)
    owner.use_settings(flush_interval_commit_log_ms=5)
    first = owner.spawn("pyengine.workers.flusher")
    owner.wait_ready(native.FLUSHER)
    writer.vouch()
    writer.put(b"x" * 100)
    eventually(lambda: flushed(owner) == writer.end, "flushed by the first")
    end = writer.end
    first.kill()
    first.wait()
    writer.put(b"y" * 100)
    owner.spawn("pyengine.workers.flusher")
    owner.wait_ready(native.FLUSHER, incarnation=2)
    eventually(lambda: native.load(owner.control.flusher, "incarnation") == 2, "a second incarnation")
    assert flushed(owner) == end, "the writer has not vouched for it"
    writer.vouch()
    eventually(lambda: flushed(owner) == writer.end, "flushed by the second")
