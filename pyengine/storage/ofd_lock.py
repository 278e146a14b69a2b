"""Open file description locks on bytes of a file: they belong to one open() and end with its last descriptor.

POSIX record locks vanish as soon as any descriptor of the file is closed in the process, so none are used. The kernel
frees these when a process dies, kill -9 included.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, disk_error

EXCLUSIVE, SHARED, UNLOCKED = fcntl.F_WRLCK, fcntl.F_RDLCK, fcntl.F_UNLCK
OFD_PID = -1  # what the kernel says of a lock that belongs to no process; 0: the process is in another container
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class ByteLock(NamedTuple):
    """A lock on `length` bytes from `start` on, 0: to the end; EXCLUSIVE or SHARED."""

    kind: int
    start: int
    length: int
    pid: int


def try_lock(descriptor: int, byte: int, path: object, kind: int = EXCLUSIVE, length: int = 1) -> bool:
    """Lock one byte (`length` from there on, 0: to the end), or change the lock on it; False while another open() holds one there.
    DiskError without such locks."""
    try:
        _call(descriptor, fcntl.F_OFD_SETLK, kind, byte, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise disk_error(error, "lock", path, ": the file system must support locks") from error
    return True


def unlock(descriptor: int, start: int = 0, length: int = 0) -> None:
    """Release the locks of this open() on these bytes; without a range all of them."""
    _call(descriptor, fcntl.F_OFD_SETLK, UNLOCKED, start, length)


def find_lock(descriptor: int, start: int, length: int = 1) -> ByteLock | None:
    """One lock of another open() that refuses an exclusive one on these bytes, None without one. Raises OSError."""
    kind, _, at, count, pid = _FLOCK.unpack(_call(descriptor, fcntl.F_OFD_GETLK, EXCLUSIVE, start, length))
    return None if kind == UNLOCKED else ByteLock(kind, at, count, pid)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name. Asked after a lock is taken: a lock on a removed file excludes no new process."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_unlocked(path: Path) -> bool:
    """Remove a file of which no process has locked a byte; False where one has, there is no such file, or it is another user's.

    What locks such a file asks is_at() afterwards, and opens the file again if it is not there any more.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError, DiskError):
            if try_lock(descriptor, 0, path, length=0) and is_at(descriptor, path):
                os.unlink(path)
                return True
        return False
    finally:
        os.close(descriptor)


def _call(descriptor: int, command: int, kind: int, start: int, length: int) -> bytes:
    return fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
