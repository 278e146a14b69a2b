"""Pool bytes reach the files, record by record and without the buffer's stale filler."""

from __future__ import annotations

import errno
import os

import pytest

from fix_writer import PlainWriter
from pyengine.errors import InvariantError
from pyengine.formats.paths import StorePaths
from pyengine.ipc import shared_objects
from pyengine.native import control as native
from pyengine.native.scan import walk
from pyengine.services import flush_commit_log
from pyengine.services.allocate_mapped_file import AllocateMappedFileService
from pyengine.services.flush_commit_log import CommitRealTimeService
from pyengine.storage.config import EngineConfig
from waiting import eventually, scaled_timeout_s

SEGMENT = 65536


def committed(owner):
    return native.load_position(owner.control.committed)


@pytest.fixture
def rig(make_owner):
    owner = make_owner(mode=native.MODE_POOL, pool_buffers=3, replicates=1)
    for number in range(3):
        with owner.folder.create(shared_objects.pool_name(number), SEGMENT) as made:
            made.memory[:] = b"\xee" * SEGMENT  # stale bytes of an earlier segment
        owner.control.pool[number].segment_base = -1
    owner.position(0)
    owner.publish()
    native.store(owner.control.writer, "wanted_end", 6 * SEGMENT)
    allocator = AllocateMappedFileService(owner.context(EngineConfig()))
    while allocator.work():
        pass
    writer = PlainWriter(owner)
    service = CommitRealTimeService(owner.context(EngineConfig()))
    yield owner, writer, service
    service.close()
    writer.close()


def test_a_put_on_an_idle_store_is_committed_in_one_round(rig):
    owner, writer, service = rig
    latches = [owner.memory.latch(kind) for kind in (native.REPUTTER, native.REPLICATOR)]
    for latch in latches:
        latch.arm()
    writer.put(b"hello")
    assert service.work()
    assert committed(owner) == writer.end
    assert writer.on_disk() == bytes(writer.log)
    assert all(latch.wait(10) for latch in latches), "reputter and replicator are woken"
    assert not service.work()


@pytest.mark.timeout(60)
def test_woken_for_something_else_than_bytes_it_lets_its_worker_look(rig):
    owner, _, service = rig
    latch = owner.memory.latch(native.COMMITTER)
    latch.arm()
    owner.memory.wake(native.COMMITTER)
    assert not service.wait(latch, 3600)


def test_over_rolls_the_file_holds_records_and_zeros_never_stale_filler(rig):
    owner, writer, service = rig
    for number in range(160):
        writer.put(b"x" * (500 + number * 7))
        while service.work():
            pass
    assert writer.end > 2 * SEGMENT
    assert committed(owner) == writer.end
    assert writer.on_disk() == bytes(writer.log)
    view = StorePaths(owner.root).commit_log_segment(0).read_bytes()
    assert walk(view, 0, 0, SEGMENT).reason == "blank"
    assert b"\xee" not in view


def test_buffers_come_back_when_their_segment_is_committed_and_the_writer_is_woken(rig):
    owner, writer, service = rig
    latch = owner.memory.latch(native.WRITER)
    latch.arm()
    while writer.end <= SEGMENT:
        writer.put(b"x" * 3000)
    bases = sorted(native.load(owner.control.pool[number], "segment_base") for number in range(3))
    assert bases == [-1, 0, SEGMENT]
    while service.work():
        pass
    bases = sorted(native.load(owner.control.pool[number], "segment_base") for number in range(3))
    assert bases == [-1, -1, SEGMENT]
    assert latch.wait(10)


def test_committed_is_always_a_record_boundary(rig, monkeypatch):
    owner, writer, service = rig
    service.close()
    monkeypatch.setattr(flush_commit_log, "PIECE_BYTES", 1000)
    service = CommitRealTimeService(owner.context(EngineConfig()))
    boundaries = set()
    for number in range(100):
        writer.put(b"x" * (number * 13 % 900))
        boundaries.add(writer.end)
    seen = []
    while service.drain():  # one piece
        seen.append(committed(owner))
    service.close()
    assert len(seen) > 20 and seen == sorted(set(seen))
    assert set(seen) <= boundaries | set(range(0, writer.end, SEGMENT))
    assert writer.on_disk() == bytes(writer.log)


def test_a_new_committer_writes_again_the_bytes_a_dead_one_wrote_and_did_not_publish(rig):
    owner, writer, service = rig
    for _ in range(30):
        writer.put(b"x" * 300)
    service.work()
    service.close()
    for _ in range(30):
        writer.put(b"y" * 300)
    with open(StorePaths(owner.root).commit_log_segment(0), "r+b") as file:  # it was killed before it moved `committed`
        file.seek(committed(owner))
        file.write(writer.log[committed(owner):writer.end - 10])
    successor = CommitRealTimeService(owner.context(EngineConfig()))
    while successor.work():
        pass
    assert committed(owner) == writer.end and writer.on_disk() == bytes(writer.log)
    successor.close()


def test_a_successor_frees_the_buffer_that_a_dead_committer_did_not_get_to(rig):
    owner, writer, service = rig
    service.close()
    owner.control.pool[1].segment_base = 0
    native.store_position(owner.control.committed, SEGMENT)
    native.store_position(owner.control.wrote, SEGMENT)
    CommitRealTimeService(owner.context(EngineConfig())).close()
    assert native.load(owner.control.pool[1], "segment_base") == -1


def test_a_successor_wakes_those_that_a_dead_committer_did_not_get_to(rig):
    owner, writer, service = rig
    latches = [owner.memory.latch(kind) for kind in (native.REPUTTER, native.REPLICATOR)]
    for latch in latches:
        latch.arm()
    CommitRealTimeService(owner.context(EngineConfig())).close()
    assert all(latch.wait(10) for latch in latches)


def test_a_failed_write_freezes_the_store(rig, monkeypatch):
    owner, writer, service = rig
    really_open = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode, **at: really_open(
        path, os.O_RDONLY if "commitlog" in str(path) else flags, *mode, **at))
    writer.put(b"x")
    assert not service.work()  # EBADF
    assert native.load(owner.control.state, "frozen") == 2
    assert (owner.control.state.frozen_kind, owner.control.state.frozen_errno) == (native.COMMITTER, errno.EBADF)
    assert committed(owner) == 0
    assert not service.work() and not service.drain()
    assert committed(owner) == 0


def test_a_disk_without_room_is_waited_for(rig, monkeypatch):
    owner, writer, service = rig
    latch = owner.memory.latch(native.WRITER)
    monkeypatch.setattr(flush_commit_log, "RETRY_NS", 0)
    really_open, opened = os.open, []

    def open_and_note(path, flags, *mode, **at):
        descriptor = really_open(path, flags, *mode, **at)
        if "commitlog" in str(path):
            opened.append((descriptor, path, flags))
        return descriptor

    monkeypatch.setattr(os, "open", open_and_note)
    writer.put(b"x" * 100)
    assert service.work()
    before, ((descriptor, path, flags),) = committed(owner), opened

    def lead_to(path):
        """From now on the descriptor of the segment is one of this file."""
        made = really_open(path, flags)
        os.dup2(made, descriptor, inheritable=False)
        os.close(made)

    lead_to("/dev/full")
    for number in range(40):
        writer.put(b"y" * 3000)
    latch.arm()
    assert not service.work() and not service.work() and not service.drain()
    assert committed(owner) == before and native.load(owner.control.state, "frozen") == 0
    assert native.load(owner.worker(native.COMMITTER), "error_number") == errno.ENOSPC and "No space left" in service.blocked_reason
    assert latch.wait(10), "the writer learns of it: it refuses what finds no buffer"
    lead_to(path)
    while service.work():
        pass
    assert committed(owner) == writer.end and writer.on_disk() == bytes(writer.log)
    assert native.load(owner.worker(native.COMMITTER), "error_number") == 0 and service.blocked_reason == ""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_segment_that_cannot_be_opened_now_is_opened_later_and_freezes_nothing(rig, monkeypatch, number):
    owner, writer, service = rig
    monkeypatch.setattr(flush_commit_log, "RETRY_NS", 0)
    writer.put(b"x" * 100)
    really_open = os.open

    def refuse(path, flags, *mode, **at):
        if "commitlog" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return really_open(path, flags, *mode, **at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert not service.work() and not service.work()
    assert native.load(owner.control.state, "frozen") == 0 and os.strerror(number) in service.blocked_reason
    assert service.work() and committed(owner) == writer.end and service.blocked_reason == ""


def test_it_sleeps_in_a_frozen_store_though_its_segment_could_not_be_opened(rig, monkeypatch):
    owner, writer, service = rig
    monkeypatch.setattr(flush_commit_log, "RETRY_NS", 0)
    writer.put(b"x" * 100)

    def refuse(path, *flags, **at):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert not service.work() and service.pause_s() < 1
    native.freeze(owner.control, native.FLUSHER, errno.EIO, "gone")
    assert not service.work() and service.pause_s() >= 1


def test_rubbish_in_a_buffer_is_a_broken_promise_not_a_record(rig):
    owner, writer, service = rig
    writer.put(b"x" * 100)
    writer.put(b"y" * 100)
    service.work()
    end = committed(owner)
    writer.buffer(0)[end:end + 8] = b"\xff" * 8
    native.store_position(owner.control.wrote, end + 200)
    with pytest.raises(InvariantError, match=f"at {end}"):
        service.work()
    assert committed(owner) == end


def test_written_bytes_without_a_buffer_are_a_broken_promise(rig):
    owner, writer, service = rig
    native.store_position(owner.control.wrote, 200)
    with pytest.raises(InvariantError, match="no pool buffer"):
        service.work()


def test_draining_commits_to_the_end(rig):
    owner, writer, service = rig
    for _ in range(70):
        writer.put(b"x" * 2000)
    while service.drain():
        pass
    assert committed(owner) == writer.end and writer.on_disk() == bytes(writer.log)


def test_the_worker_commits_and_its_successor_continues(rig):
    owner, writer, service = rig
    first = owner.spawn("pyengine.workers.committer")
    owner.wait_ready(native.COMMITTER)
    writer.put(b"x")
    eventually(lambda: committed(owner) == writer.end, "committed")
    first.kill()
    first.wait()
    while writer.end <= SEGMENT:
        writer.put(b"y" * 3000)
    owner.spawn("pyengine.workers.committer")
    eventually(lambda: committed(owner) == writer.end, "committed by the successor")
    assert writer.on_disk() == bytes(writer.log)


def test_without_a_pool_there_is_no_committer(make_owner):
    owner = make_owner(mode=native.MODE_SYNC)
    owner.publish()
    child = owner.spawn("pyengine.workers.committer")
    assert child.wait(timeout=scaled_timeout_s(30)) == 70
    assert "nothing to commit" in child.stderr.read()


def test_a_changed_interval_is_the_next_pause(rig):
    _, _, service = rig
    service.take_settings(EngineConfig(commit_interval_commit_log_ms=86_400_000))
    assert service.pause_s() == 86_400
