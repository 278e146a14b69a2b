"""Who may run on a store, tried with separate open file descriptions and real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys

import pytest

from pyengine.engine.embedded import supervisor_pid
from pyengine.errors import DiskError, NotAStoreError, StoreBusyError
from pyengine.ipc import store_lock
from pyengine.ipc.store_lock import (
    StoreLock,
    kill_workers,
    kind_holder,
    living_kinds,
    lock_modified_ns,
    open_lock,
    read_holder,
)
from waiting import scaled_timeout_s

# RocketMQ's way: an exclusive POSIX record lock on byte 0, then the four letters.
ROCKETMQ = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
try:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    print("refused", flush=True)
    sys.exit(0)
os.pwrite(descriptor, b"lock", 0)
print("locked", flush=True)
sys.stdin.read()
"""
# A worker that holds the store shared and the flusher's byte until killed.
WORKER = """
import sys
from pyengine.ipc.store_lock import StoreLock
lock = StoreLock(sys.argv[1])
assert lock.share()
lock.take_kind(3)
print("holding", flush=True)
sys.stdin.read()
"""


def run(script, argument):
    child = subprocess.Popen([sys.executable, "-c", script, str(argument)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().strip()


def end(child):
    child.stdin.close()
    child.wait(timeout=scaled_timeout_s(30))
    child.stdout.close()


def rocketmq_says(root):
    child, said = run(ROCKETMQ, root / "lock")
    end(child)
    return said


def test_a_first_owner_gets_the_store_and_writes_the_four_letters(root):
    with StoreLock(root, create=True) as lock:
        assert lock.own()
        assert (root / "lock").read_bytes() == b"lock"
        assert read_holder(root).kind == "owner"
        assert lock.share()
        assert read_holder(root).kind == "engine"
    assert read_holder(root).kind == "none"


def test_the_file_is_not_rewritten_by_us_but_is_by_rocketmq(root):
    with StoreLock(root, create=True) as lock:
        lock.own()
    left = lock_modified_ns(root)
    os.utime(root / "lock", ns=(left - 10**9, left - 10**9))
    with StoreLock(root) as lock:
        lock.own()
    assert lock_modified_ns(root) == left - 10**9
    assert rocketmq_says(root) == "locked"
    assert lock_modified_ns(root) != left - 10**9


def test_a_store_that_was_never_started_has_no_lock(tmp_path):
    with pytest.raises(NotAStoreError, match="lock"):
        StoreLock(tmp_path / "nothing")
    assert read_holder(tmp_path / "nothing").kind == "none"
    assert living_kinds(tmp_path / "nothing") == []
    assert lock_modified_ns(tmp_path / "nothing") == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
@pytest.mark.parametrize("look", [living_kinds, read_holder, open_lock, lock_modified_ns])
def test_a_lock_that_cannot_be_looked_at_is_not_taken_for_one_that_is_not_there(root, monkeypatch, look, number):
    def fails(path):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.ipc.store_lock.open_regular", fails)
        patch.setattr("pyengine.ipc.store_lock.os.stat", fails)
        with pytest.raises(DiskError, match="it is unknown whether an engine runs" if look is not lock_modified_ns else "lock"):
            look(root)


@pytest.mark.parametrize("shared", [False, True])
def test_a_second_supervisor_is_refused_in_every_phase_of_the_first(root, shared):
    with StoreLock(root, create=True) as first, StoreLock(root) as second:
        first.own()
        if shared:
            first.share()
        with pytest.raises(StoreBusyError, match="in use by another engine"):
            second.own()
        first.close()
        assert second.own()


def test_a_process_that_recovers_a_store_is_not_taken_for_its_supervisor(root):
    with StoreLock(root, create=True) as lock:
        lock.own()
        assert kind_holder(root, 0) == os.getpid() and kind_holder(root, 3) is None
        assert supervisor_pid(root) is None


def test_a_supervisor_that_was_refused_keeps_no_lock(root, monkeypatch):
    """Also while its object lives: the next one gets the store as soon as what was in the way is gone."""
    StoreLock(root, create=True).close()
    in_the_way = os.open(root / "lock", os.O_RDWR)
    fcntl.fcntl(in_the_way, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    monkeypatch.setattr(store_lock, "WORKER_CHECKS_MAX", 1)
    with StoreLock(root) as refused, StoreLock(root) as later:
        with pytest.raises(StoreBusyError, match="not a worker"):
            refused.own()
        os.close(in_the_way)
        assert later.own()


def test_no_process_shares_a_store_that_is_being_recovered(root):
    with StoreLock(root, create=True) as owner, StoreLock(root) as worker:
        owner.own()
        assert not worker.share()
        owner.share()
        assert worker.share()


def test_living_workers_of_a_dead_supervisor_are_adopted(root):
    with StoreLock(root, create=True) as first:
        first.own()
        first.share()
        worker, said = run(WORKER, root)
        assert said == "holding"
        assert living_kinds(root) == [0, 3]
    try:
        assert living_kinds(root) == [3]
        with StoreLock(root) as successor, StoreLock(root) as third:
            assert not successor.own()
            assert successor.kind_taken(3) and not successor.kind_taken(1)
            with pytest.raises(StoreBusyError):
                third.own()
    finally:
        end(worker)


def test_the_last_worker_that_ends_while_a_successor_looks_for_it_leaves_it_the_store(root, monkeypatch):
    """All were killed a moment before: the last one's locks last a little longer than its process."""
    with StoreLock(root, create=True) as successor, StoreLock(root) as dying:
        assert dying.share()
        monkeypatch.setattr("pyengine.ipc.store_lock.time.sleep", lambda seconds: dying.close())
        assert successor.own()
        assert read_holder(root).kind == "owner" and (root / "lock").read_bytes() == b"lock"


def test_two_workers_of_a_kind_cannot_run_and_a_killed_one_frees_its_byte(root):
    with StoreLock(root, create=True) as owner:
        owner.own()
        owner.share()
        worker, _ = run(WORKER, root)
        with StoreLock(root) as twin:
            assert twin.share()
            with pytest.raises(StoreBusyError, match="of this kind"):
                twin.take_kind(3)
            twin.take_kind(4)
            worker.send_signal(signal.SIGKILL)
            worker.wait(timeout=scaled_timeout_s(30))
            twin.take_kind(3)
        end(worker)


def test_a_worker_is_the_only_one_of_its_kind_too_where_the_disk_became_read_only(root, monkeypatch):
    really_open = os.open

    def refuse_to_write(path, flags, *more, **named):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, *more, **named)

    with StoreLock(root, create=True) as owner, StoreLock(root) as older:
        owner.own()
        owner.share()
        monkeypatch.setattr(os, "open", refuse_to_write)
        with StoreLock(root) as worker:
            assert worker.share()
            worker.take_kind(3)
            assert owner.kind_taken(3) and 3 in living_kinds(root) and kind_holder(root, 3) == os.getpid()
            with StoreLock(root) as twin:
                for other in (older, twin):
                    with pytest.raises(StoreBusyError, match="of this kind"):
                        other.take_kind(3)
        older.take_kind(3)
        with StoreLock(root) as late, pytest.raises(StoreBusyError, match="of this kind"):
            late.take_kind(3)


def test_workers_whose_pids_are_unknown_are_killed_by_their_locks(root):
    with StoreLock(root, create=True) as owner:
        owner.own()
        owner.share()
        worker, _ = run(WORKER, root)
        kill_workers(root)
        assert worker.wait(timeout=scaled_timeout_s(30)) == -signal.SIGKILL and not owner.kind_taken(3)
        end(worker)


def test_rocketmq_is_refused_until_our_last_process_is_gone(root):
    with StoreLock(root, create=True) as owner:
        owner.own()
        assert rocketmq_says(root) == "refused", "while recovering"
        owner.share()
        worker, _ = run(WORKER, root)
        assert rocketmq_says(root) == "refused", "while running"
    assert rocketmq_says(root) == "refused", "while one worker lives"
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=scaled_timeout_s(30))
    end(worker)
    assert rocketmq_says(root) == "locked"


def test_we_are_refused_while_rocketmq_runs_and_told_its_pid(root):
    (root / "lock").touch()
    broker, said = run(ROCKETMQ, root / "lock")
    assert said == "locked"
    try:
        assert (read_holder(root).kind, read_holder(root).pid) == ("foreign", broker.pid)
        with StoreLock(root) as lock:
            with pytest.raises(StoreBusyError, match=str(broker.pid)):
                lock.own()
            assert not lock.share()
            with StoreLock(root) as other, pytest.raises(StoreBusyError, match=str(broker.pid)):
                other.own()  # the first one's attempt left no lock behind
    finally:
        end(broker)


def test_closing_another_descriptor_of_the_file_drops_nothing(root):
    with StoreLock(root, create=True) as lock:
        lock.own()
        lock.share()
        (root / "lock").read_bytes()  # would free a POSIX record lock
        assert rocketmq_says(root) == "refused"


def test_a_copied_lock_file_is_not_locked(root, tmp_path):
    with StoreLock(root, create=True) as lock:
        lock.own()
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        with StoreLock(copy) as other:
            assert other.own()
