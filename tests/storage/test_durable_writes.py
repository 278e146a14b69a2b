"""Bytes that recovery writes: all of them, however few the kernel takes at a time, and synced."""

from __future__ import annotations

import os

from pyengine.storage import durable_writes


def test_short_writes_go_on_where_they_ended_and_a_sync_comes_last(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    pwrite, fsync, synced = os.pwrite, os.fsync, []
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, position: pwrite(descriptor, content[:7], position))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_bytes()), fsync(descriptor)))
    durable_writes.write_at(path, b"x" * 50, 20)
    assert synced == [bytes(20) + b"x" * 50 + bytes(30)]
