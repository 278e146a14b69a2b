"""The machine's own limits: what a put would cost without an engine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path


def sync_rate(folder: Path, size_bytes: int, seconds: float) -> float:
    """pwrite + fdatasync of `size_bytes` at a time into an allocated file, per second."""
    body = bytes(size_bytes)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, 64 << 20)
        os.fsync(descriptor)
        done, at, began = 0, 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            os.pwrite(descriptor, body, at)
            os.fdatasync(descriptor)
            at = (at + size_bytes) % ((64 << 20) - size_bytes)
            done += 1
        return done / (time.perf_counter() - began)


def copy_rate(folder: Path, size_bytes: int) -> float:
    """Bytes per second of copying into a fresh, allocated, mapped file: the least a mapped append costs."""
    import mmap

    piece = bytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        mapping = mmap.mmap(file.fileno(), size_bytes)
        began = time.perf_counter()
        for at in range(0, size_bytes, len(piece)):
            mapping[at:at + len(piece)] = piece
        rate = size_bytes / (time.perf_counter() - began)
        mapping.close()
        return rate
