"""Open file description locks on bytes of a file: they belong to one open() and end with its last descriptor.

POSIX record locks vanish as soon as any descriptor of the file is closed in the process, so none are used. The kernel
frees these when a process dies, kill -9 included.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import NamedTuple

from pyengine.errors import disk_error

EXCLUSIVE, SHARED, UNLOCKED = fcntl.F_WRLCK, fcntl.F_RDLCK, fcntl.F_UNLCK
OFD_PID = -1  # what the kernel says of a lock that belongs to no process; 0: the process is in another container
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class ByteLock(NamedTuple):
    """A lock on `length` bytes from `start` on, 0: to the end; EXCLUSIVE or SHARED."""

    kind: int
    start: int
    length: int
    pid: int


def try_lock(descriptor: int, byte: int, path: object, kind: int = EXCLUSIVE) -> bool:
    """Lock one byte, or change the lock on it; False while another open() holds it. DiskError without such locks."""
    try:
        _call(descriptor, fcntl.F_OFD_SETLK, kind, byte, 1)
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


def _call(descriptor: int, command: int, kind: int, start: int, length: int) -> bytes:
    return fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
