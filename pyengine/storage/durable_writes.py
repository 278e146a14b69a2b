"""Writes into files that exist, durable when they return, with this project's errors. Lengths never change."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pyengine.errors import DiskError, DiskFullError, FlushError


def write_at(path: Path, content: bytes | memoryview, position: int) -> None:
    """Write bytes to their place in a file, durable. Raises DiskFullError, DiskError or FlushError."""
    descriptor = open_file(path, os.O_WRONLY)
    try:
        pwrite_all(descriptor, content, position, path)
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync one file, or raise FlushError: final, never retried."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """fsync, or raise FlushError: final, never retried."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise FlushError(f"fsync of {path} failed: {error.strerror}", errno=error.errno or 0, path=str(path)) from error


def open_file(path: Path, flags: int) -> int:
    """A descriptor, or DiskError."""
    try:
        return os.open(path, flags)
    except OSError as error:
        raise DiskError(f"cannot open {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error


def pwrite_all(descriptor: int, content: bytes | memoryview, position: int, path: Path) -> None:
    """Write all of it, or raise DiskFullError or DiskError. Not synced."""
    rest = memoryview(content)
    try:
        while rest:
            written = os.pwrite(descriptor, rest, position)
            position += written
            rest = rest[written:]
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError
        raise kind(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
