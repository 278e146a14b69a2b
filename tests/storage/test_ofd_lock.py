"""Locks on single bytes: refused between opens of a file, changed by their owner, released one by one or all together."""

from __future__ import annotations

import os

import pytest

from pyengine.errors import DiskError
from pyengine.storage.ofd_lock import EXCLUSIVE, OFD_PID, SHARED, ByteLock, find_lock, is_at, remove_unlocked, try_lock, unlock


@pytest.fixture
def two(tmp_path):
    """Two opens of one file."""
    path = tmp_path / "lock"
    path.touch()
    opened = [os.open(path, os.O_RDWR) for _ in range(2)]
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def test_an_exclusive_lock_refuses_others_on_its_byte_alone(two):
    one, other = two
    assert try_lock(one, 5, "lock") and try_lock(one, 7, "lock")
    assert not try_lock(other, 5, "lock") and not try_lock(other, 5, "lock", SHARED)
    assert try_lock(other, 6, "lock")
    assert find_lock(other, 0, 7) == ByteLock(EXCLUSIVE, 5, 1, OFD_PID)
    assert find_lock(one, 5) is None
    unlock(one, 5, 1)
    assert find_lock(other, 0, 7) is None and find_lock(other, 7) is not None
    unlock(one)
    assert find_lock(other, 0, 0) is None


def test_shared_locks_exist_side_by_side_and_are_changed_in_place(two):
    one, other = two
    assert try_lock(one, 0, "lock", SHARED) and try_lock(other, 0, "lock", SHARED)
    assert not try_lock(one, 0, "lock")
    assert find_lock(one, 0) == ByteLock(SHARED, 0, 1, OFD_PID)
    unlock(other)
    assert try_lock(one, 0, "lock")


def test_a_file_that_cannot_be_locked_says_why(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(DiskError, match=r"cannot lock .*lock: Bad file descriptor: the file system must support locks"):
            try_lock(descriptor, 0, path)
    finally:
        os.close(descriptor)


def test_a_file_goes_once_no_byte_of_it_is_locked(tmp_path, two):
    path, (one, other) = tmp_path / "lock", two
    assert try_lock(one, 1 << 60, path) and not remove_unlocked(path) and is_at(one, path)
    unlock(one)
    assert remove_unlocked(path) and not path.exists() and not is_at(other, path)
    assert not remove_unlocked(path)
    path.touch()  # another file of that name
    assert not is_at(one, path) and try_lock(one, 0, path)
    assert remove_unlocked(path)
    path.symlink_to(tmp_path)
    assert not remove_unlocked(path) and path.is_symlink()
