"""Zeros behind the data are found, and what was only allocated is never read."""

from __future__ import annotations

import errno
import os

import pytest

from pyengine.storage import file_zeros
from pyengine.storage.file_zeros import clear_file_from, used_end

ALLOCATED_BYTES = 64 << 20


def allocated_file(path, content: bytes):
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, ALLOCATED_BYTES)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def test_blocks_that_nobody_wrote_to_are_not_read(tmp_path, monkeypatch):
    """Reading brings in what follows, which then counts as data: looked up first, that does not matter."""
    path = allocated_file(tmp_path / "segment", b"used" * 1000)
    read = []
    real = os.preadv
    monkeypatch.setattr(file_zeros.os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    assert used_end(path) == 4000
    assert sum(read) <= 4 << 20


def test_the_end_is_the_last_byte_that_is_not_zero(tmp_path):
    path = allocated_file(tmp_path / "segment", b"")
    assert used_end(path) == 0
    assert used_end(path, 5) == 5
    with open(path, "r+b") as file:
        for at in (10, 3 << 20, (5 << 20) - 1):
            file.seek(at)
            file.write(b"x")
            file.flush()
            assert used_end(path) == at + 1
            assert used_end(path, at + 1) == at + 1


def test_clearing_writes_zeros_where_there_were_none_and_keeps_the_file_time(tmp_path):
    path = allocated_file(tmp_path / "segment", b"keep" + b"x" * (3 << 20))
    os.utime(path, ns=(1, 2))
    assert clear_file_from(path, 4) == 3 << 20
    assert path.read_bytes() == b"keep" + bytes(ALLOCATED_BYTES - 4)
    assert os.stat(path).st_mtime_ns == 2
    assert clear_file_from(path, 4) == 0


def test_what_was_cleared_is_synced(tmp_path, monkeypatch):
    path = allocated_file(tmp_path / "segment", b"keep" + b"x" * 100)
    synced = []
    monkeypatch.setattr(file_zeros, "sync_descriptor", lambda descriptor, path: synced.append(path.read_bytes()[:104]))
    clear_file_from(path, 4)
    assert synced == [b"keep" + bytes(100)]


@pytest.mark.parametrize("which", [os.SEEK_DATA, os.SEEK_HOLE])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_tell_holes_has_all_of_it_read(tmp_path, monkeypatch, which, number):
    path = tmp_path / "f"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
        os.pwrite(file.fileno(), b"x", 5000)
        os.pwrite(file.fileno(), b"y", 2 << 20)
    real = os.lseek

    def lseek(descriptor: int, position: int, whence: int) -> int:
        if whence == which:
            raise OSError(number, os.strerror(number))
        return real(descriptor, position, whence)

    monkeypatch.setattr(os, "lseek", lseek)
    assert (used_end(path), used_end(path, 5001), used_end(path, (2 << 20) + 1)) == ((2 << 20) + 1,) * 3
    assert clear_file_from(path, 5001) == (2 << 20) + 1 - 5001
    assert path.read_bytes() == bytes(5000) + b"x" + bytes((3 << 20) - 5001)
