"""Writes into files that exist and removal of files, durable when they return, with this project's errors.

Lengths never change. A large file is deleted in two steps: its name first, its blocks after that, a piece at a
time. A reader may have the file mapped. It is never shortened, which would kill that reader by SIGBUS: a hole
is punched instead, and the reader sees zeros there. A reader that copies from a mapping looks afterwards
whether the file still has its name (MESSAGE_WAS_REMOVING). Killed in between: the name is gone for good, and
the kernel frees the rest with the last descriptor and mapping. A folder is synced after each name, oldest
first, so that a power cut never leaves a gap between files.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyengine.errors import DiskError, FlushError, disk_error, disk_errors
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import check_written, punch, start_writing
from pyengine.storage.new_file import sync_folder

MANY_FILES = 32  # to be synced: one sync of their file system costs less than one of each

_REWRITE_BYTES = 1 << 20  # at a time
_BLOCK_BYTES = 4096  # what a write past the page cache begins at and is a multiple of


def write_at(path: Path, content: bytes | memoryview, position: int) -> None:
    """Write bytes to their place in a file, durable. Raises DiskFullError, DiskError or FlushError."""
    descriptor = open_file(path, os.O_WRONLY)
    try:
        pwrite_all(descriptor, content, position, path)
        failpoint("bytes_written")
        sync_descriptor(descriptor, path)
        failpoint("bytes_durable")
    finally:
        os.close(descriptor)


def rewrite(path: Path, start: int, end: int) -> None:
    """Write the bytes [start, end) of a file over themselves and sync it, so that they are on the disk when this returns.

    For bytes that an earlier sync may have failed on: their pages count as clean, and a sync alone would leave
    them out. Then the same once more past the page cache: ext4 takes the blocks of a failed write for written ones,
    and puts there what is written again, but their extent stays marked unwritten, and after a reboot it reads as
    zeros. A write past the page cache drops the pages first, so it comes last: on a disk that still fails they are
    the only copy.
    The file's time stays, since segments and queue files are looked up and deleted by it.
    """
    descriptor = open_file(path, os.O_RDWR)
    try:
        status = os.fstat(descriptor)
        at, end = start - start % _BLOCK_BYTES, min(end + -end % _BLOCK_BYTES, status.st_size)
        pieces = [(place, min(_REWRITE_BYTES, end - place)) for place in range(at, end, _REWRITE_BYTES)]
        with mmap.mmap(-1, _REWRITE_BYTES) as memory, memoryview(memory) as buffer:  # aligned, as direct writes ask for
            for place, count in pieces:
                with buffer[:count] as piece:
                    _read_piece(descriptor, piece, place, path)
                    pwrite_all(descriptor, piece, place, path)
            sync_descriptor(descriptor, path)
            failpoint("bytes_rewritten")
            _write_directly(descriptor, pieces, buffer, path)
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def _write_directly(descriptor: int, pieces: Sequence[tuple[int, int]], buffer: memoryview, path: Path) -> None:
    """Whole blocks past the page cache, where the file system can do that."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # tmpfs and others have no such writes
        return
    try:
        for place, count in pieces:
            count -= count % _BLOCK_BYTES
            if not count:
                continue
            with buffer[:count] as piece:
                _read_piece(descriptor, piece, place, path)
                try:
                    done = os.pwrite(direct, piece, place)
                except OSError as error:
                    pwrite_all(descriptor, piece, place, path)  # the pages are gone
                    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # larger blocks than ours
                        return
                    raise FlushError(f"cannot write {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
                if done != count:
                    pwrite_all(descriptor, piece, place, path)
                    raise FlushError(f"cannot write {path}: {done} of {count} bytes were written", path=str(path))
    finally:
        os.close(direct)


def _read_piece(descriptor: int, piece: memoryview, place: int, path: Path) -> None:
    with disk_errors("read", path):
        count = os.preadv(descriptor, [piece], place)
    if count != len(piece):
        raise DiskError(f"cannot read {path}: it has {count} of {len(piece)} bytes at {place}", path=str(path))


def sync_file(path: Path, *, is_synced: bool = False) -> None:
    """fsync one file, or raise FlushError: final, never retried. `is_synced`: by a sync of its file system, only ask."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        if is_synced:
            check_written(descriptor, str(path))
        else:
            sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def start_writeback(paths: Sequence[Path]) -> Iterator[None]:
    """Inside the block the kernel begins to write what is dirty in these files, so that sync_file waits less later.

    Not a sync: nothing is durable by it, and an error of the disk is left for the sync to tell.
    Where no thread is to be had nothing begins early.
    """
    thread = threading.Thread(target=_start_writing, args=(paths,), name="begin-writing", daemon=True)
    is_begun = True
    try:
        thread.start()
    except RuntimeError:  # a limit on processes
        is_begun = False
    try:
        yield
    finally:
        if is_begun:
            thread.join()


def _start_writing(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                start_writing(descriptor)
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
    with disk_errors("open", path):
        return os.open(path, flags)


def pwrite_all(descriptor: int, content: bytes | memoryview, position: int, path: Path) -> None:
    """Write all of it, or raise DiskFullError or DiskError. Not synced."""
    rest = memoryview(content)
    with disk_errors("write", path):
        while rest:
            written = os.pwrite(descriptor, rest, position)
            position += written
            rest = rest[written:]


STEP_BYTES = 64 << 20
PAUSE_S_MIN = 0.005
SHARE = 4  # the pause after a step is this many times as long as the step: the disk is left to others


def unlink_durably(path: Path) -> int:
    """Take the file's name away, durable; a descriptor that keeps its blocks, -1 if it had to go at once.

    Raises DiskError, the file being untouched, where the folder cannot be written. A file
    that is not there is as good as deleted.
    """
    descriptor = -1
    with contextlib.suppress(OSError):  # no right or no descriptor free: then without pacing
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise disk_error(error, "delete", path) from error
    failpoint("removal_unlinked")
    try:
        sync_folder(path.parent)
    except DiskError:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    failpoint("removal_durable")
    return descriptor


def give_back(descriptor: int, *, step_bytes: int = STEP_BYTES, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Free the blocks of a nameless file step by step and close it; after each step the seconds to pause are yielded.

    Where the file system cannot punch holes everything goes with the descriptor.
    """
    try:
        if descriptor < 0:
            return
        size_bytes = os.fstat(descriptor).st_size
        for at in range(0, size_bytes, step_bytes):
            began_s = clock()
            code = punch(descriptor, at, step_bytes)
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if code:
                raise DiskError(f"cannot free the blocks of a deleted file: {os.strerror(code)}", errno=code)
            failpoint("removal_step_done")
            if at + step_bytes < size_bytes:
                yield max(PAUSE_S_MIN, SHARE * (clock() - began_s))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
