"""Deleting a large file so that nobody notices: its name first, its blocks afterwards, a piece at a time.

A reader may have the file mapped. It is never shortened, which would kill that reader by
SIGBUS: a hole is punched instead, and the reader sees zeros there. Whoever copies from a
mapping looks afterwards whether the file still has its name (MESSAGE_WAS_REMOVING).

Killed in between: the name is gone for good, and the kernel frees the rest with the last
descriptor and mapping. A folder is synced after each name, oldest first, so that a power
cut never leaves a gap between files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyengine.errors import DiskError, disk_error
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import punch
from pyengine.storage.new_file import sync_folder

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
