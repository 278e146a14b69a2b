"""Open file description locks on bytes of a file: they belong to one open() and end with its last descriptor.

POSIX record locks are not used, since a process loses them when it closes any descriptor of the file. The kernel
releases these locks when the process dies, also after kill -9.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, disk_error
from pyengine.formats.small_file import opened

EXCLUSIVE, SHARED, UNLOCKED = fcntl.F_WRLCK, fcntl.F_RDLCK, fcntl.F_UNLCK
OFD_PID = -1  # the kernel's l_pid for a lock that does not belong to a process; 0: the process is in another container
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class ByteLock(NamedTuple):
    """A lock on `length` bytes from `start` on, 0: to the end; EXCLUSIVE or SHARED."""

    kind: int
    start: int
    length: int
    pid: int


def try_lock(descriptor: int, byte: int, path: object, kind: int = EXCLUSIVE, length: int = 1) -> bool:
    """Lock one byte, or change the lock on it; False while another open() has a lock there.

    `length`: number of bytes, 0: to the end. DiskError if the file system has no such locks.
    """
    try:
        _call(descriptor, fcntl.F_OFD_SETLK, kind, byte, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise disk_error(error, "lock", path, ": the file system must support locks") from error
    return True


def wait_lock(descriptor: int, byte: int, path: object) -> None:
    """Lock one byte exclusively as soon as no other open() has a lock there; block until then. DiskError as try_lock()."""
    try:
        _call(descriptor, fcntl.F_OFD_SETLKW, EXCLUSIVE, byte, 1)
    except OSError as error:
        raise disk_error(error, "lock", path) from error


def unlock(descriptor: int, start: int = 0, length: int = 0) -> None:
    """Release the locks of this open() on these bytes, by default on all."""
    _call(descriptor, fcntl.F_OFD_SETLK, UNLOCKED, start, length)


def find_lock(descriptor: int, start: int, length: int = 1) -> ByteLock | None:
    """Return a lock of another open() that prevents an exclusive one on these bytes; None if there is none. Raises OSError."""
    kind, _, at, count, pid = _FLOCK.unpack(_call(descriptor, fcntl.F_OFD_GETLK, EXCLUSIVE, start, length))
    return None if kind == UNLOCKED else ByteLock(kind, at, count, pid)


def locks_on(file: os.stat_result) -> Iterator[ByteLock]:
    """Yield the locks on a file, with the pids of their processes, from the entries of /proc that this user may read."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), file):
                        yield from _locks_of(int(pid), descriptor)


def _locks_of(pid: int, descriptor: str) -> Iterator[ByteLock]:
    """Read lines of fdinfo such as `lock: 1: OFDLCK ADVISORY WRITE -1 fe:00:4711 16 16`."""
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("lock:"):
            *_, kind, _, _, start, end = line.split()
            yield ByteLock(EXCLUSIVE if kind == "WRITE" else SHARED, int(start), 0 if end == "EOF" else int(end) - int(start) + 1, pid)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file still has this name. Call it after locking: a lock on a removed file does not exclude new processes."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_unlocked(path: Path) -> bool:
    """Remove a file unless a process has locked a byte of it; False if one has, the file does not exist, or is another user's.

    A process that locks such a file must call is_at() afterwards, and open the file again if it was removed.
    """
    with (contextlib.suppress(OSError, DiskError),
          opened(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor):
        if try_lock(descriptor, 0, path, length=0) and is_at(descriptor, path):
            os.unlink(path)
            return True
    return False


def _call(descriptor: int, command: int, kind: int, start: int, length: int) -> bytes:
    return fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
