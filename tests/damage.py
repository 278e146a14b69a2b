"""Damage to files, as disks and hands do it."""

from __future__ import annotations

import os
from pathlib import Path


def flip(path: Path, at: int, bits: int = 0xFF) -> None:
    """Turn over bits of the byte at `at`, in place."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ bits]), at)
    finally:
        os.close(descriptor)
