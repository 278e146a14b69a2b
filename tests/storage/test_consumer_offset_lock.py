"""One writer at a time: a dead one makes room at once, one that hangs is passed over and can do no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fix_cli import environment
from pyengine.ipc.heartbeat import is_stopped
from pyengine.storage.consumer_offset import LockTakenOverError, OffsetLock
from waiting import eventually, scaled_timeout_s

# Stops itself, by SIGSTOP, at the system call named, in the middle of replacing the file.
STOPS = """
import os, signal, sys
from pathlib import Path
from pyengine.storage.consumer_offset import LockTakenOverError, OffsetLock
folder, where = Path(sys.argv[1]), sys.argv[2]
real = getattr(os, where)
def stop_once(*arguments, **named):
    setattr(os, where, real)
    os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments, **named)
try:
    with OffsetLock(folder / "file", folder / "consumers").held() as writer:
        setattr(os, where, stop_once)
        writer.replace(b"of the stopped one", keep_as="bak")
    print("written")
except LockTakenOverError:
    print("passed over")
"""


def lock_of(folder, **options) -> OffsetLock:
    return OffsetLock(folder / "file", folder / "consumers", **options)


def test_a_replaced_file_keeps_the_one_before(tmp_path):
    for content in (b"one", b"two"):
        with lock_of(tmp_path).held() as writer:
            writer.replace(content, keep_as="bak")
    assert (tmp_path / "file").read_bytes() == b"two" and (tmp_path / "file.bak").read_bytes() == b"one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["consumers", "file", "file.bak"]


@pytest.mark.parametrize("where", ["open", "pwrite", "fsync", "link", "rename", "unlink"])
def test_a_writer_that_is_stopped_anywhere_is_passed_over_and_cannot_undo_the_next(tmp_path, where):
    (tmp_path / "file").write_bytes(b"old")
    stopped = subprocess.Popen([sys.executable, "-c", STOPS, str(tmp_path), where], env=environment(),
                               stdout=subprocess.PIPE)
    try:
        eventually(lambda: is_stopped(stopped.pid), "the writer has stopped itself")
        with lock_of(tmp_path, timeout_s=0.2).held() as writer:
            found = (tmp_path / "file").read_bytes()
            writer.replace(b"of the next", keep_as="bak")
        os.kill(stopped.pid, signal.SIGCONT)
        said = stopped.communicate(timeout=scaled_timeout_s(60))[0].decode().strip()
    finally:
        stopped.kill()
        stopped.wait()
    assert (tmp_path / "file").read_bytes() == b"of the next"
    assert said == ("passed over" if found == b"old" else "written")
    with lock_of(tmp_path).held():
        assert sorted(path.name for path in tmp_path.iterdir()) == ["consumers", "file", "file.bak"]


def test_a_dead_writer_makes_room_at_once(tmp_path):
    child = os.fork()
    if child == 0:
        with lock_of(tmp_path).held():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with lock_of(tmp_path, timeout_s=1e9).held() as writer:
        writer.replace(b"after it", keep_as="bak")


def test_a_replaced_writer_changes_nothing(tmp_path):
    with lock_of(tmp_path).held() as slow:
        with lock_of(tmp_path, timeout_s=0.05).held() as fast:
            fast.replace(b"fast", keep_as="bak")
        with pytest.raises(LockTakenOverError):
            slow.replace(b"slow", keep_as="bak")
    assert (tmp_path / "file").read_bytes() == b"fast"


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\xff" * 4096, bytes(range(16))])
def test_a_lock_file_locks_with_any_content(tmp_path, content):
    (tmp_path / "consumers").mkdir()
    (tmp_path / "consumers" / "lock").write_bytes(content)
    with lock_of(tmp_path).held() as first:
        first.replace(b"1", keep_as="bak")
        with lock_of(tmp_path, timeout_s=0.05).held() as second:
            second.replace(b"2", keep_as="bak")
        with pytest.raises(LockTakenOverError):
            first.check()


def test_a_removed_lock_file_is_made_again(tmp_path):
    with lock_of(tmp_path).held():
        (tmp_path / "consumers" / "lock").unlink()
    with lock_of(tmp_path).held() as writer:
        writer.replace(b"1", keep_as="bak")


def test_a_waiting_process_calls_its_while_waiting_function(tmp_path):
    heard = []
    with lock_of(tmp_path).held():
        with lock_of(tmp_path, timeout_s=0.05, while_waiting=lambda: heard.append(1)).held():
            assert heard


def test_a_child_forked_by_the_writer_does_not_keep_the_lock(tmp_path):
    with lock_of(tmp_path).held():
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        waits = []
        with lock_of(tmp_path, while_waiting=lambda: waits.append(1)).held() as writer:
            writer.replace(b"next", keep_as="bak")
        assert waits == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
