"""Bytes that recovery writes: all of them, however few the kernel takes at a time, and synced."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from pyengine.errors import FlushError
from pyengine.storage import durable_writes


def test_short_writes_go_on_where_they_ended_and_a_sync_comes_last(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    pwrite, fsync, synced = os.pwrite, os.fsync, []
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, position: pwrite(descriptor, content[:7], position))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_bytes()), fsync(descriptor)))
    durable_writes.write_at(path, b"x" * 50, 20)
    assert synced == [bytes(20) + b"x" * 50 + bytes(30)]


def test_a_rewrite_leaves_the_bytes_the_length_and_the_time_of_a_file(tmp_path, monkeypatch):
    """Whole blocks go past the page cache too, where that can be; the rest of a file that ends within a block does not."""
    monkeypatch.setattr(durable_writes, "_REWRITE_BYTES", 8192)
    content = os.urandom(30_001)
    for name, start, end in (("whole", 0, 30_001), ("part", 5_000, 21_000), ("nothing", 7_000, 7_000)):
        path = tmp_path / name
        path.write_bytes(content)
        os.utime(path, ns=(1, 2))
        durable_writes.rewrite(path, start, end)
        assert path.read_bytes() == content and path.stat().st_mtime_ns == 2


@pytest.mark.parametrize("done", [None, 4096], ids=["refused", "short"])
def test_a_rewrite_that_the_disk_refuses_leaves_the_bytes_in_the_page_cache(tmp_path, monkeypatch, done):
    """A write past the page cache drops the pages first, and they may be the only copy."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    pwrite, refused, writer = os.pwrite, [], os.open(path, os.O_WRONLY)

    def fails_once(descriptor, content, position):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            if done:
                pwrite(writer, bytes(8192), 0)  # what a dropped page reads as
                return done
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(descriptor, content, position)

    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("no writes past the page cache here")
    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(FlushError):
        durable_writes.rewrite(path, 0, 8192)
    os.close(writer)
    assert refused == [0]
    assert path.read_bytes() == b"x" * 8192
