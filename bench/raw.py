"""The machine's own limits: what a put would cost without an engine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def warm_memory(size_bytes: int) -> float:
    """Touch and give back that much memory (at most half of what is free); us per page.

    In a virtual machine a page that was never touched, or that the host has taken back, costs ten
    times one that was: a benchmark that fills page cache measures the host otherwise.
    """
    import mmap

    import psutil

    size_bytes = min(size_bytes, psutil.virtual_memory().available // 2)
    pages = size_bytes // mmap.PAGESIZE
    began = time.perf_counter()
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(_MADV_POPULATE_WRITE)
    return (time.perf_counter() - began) * 1e6 / pages


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


def write_rate(folder: Path, size_bytes: int) -> float:
    """Bytes per second of writing into a fresh, allocated file, and one fdatasync at the end."""
    piece = bytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        began = time.perf_counter()
        for at in range(0, size_bytes, len(piece)):
            os.pwrite(file.fileno(), piece, at)
        os.fdatasync(file.fileno())
        return size_bytes / (time.perf_counter() - began)
