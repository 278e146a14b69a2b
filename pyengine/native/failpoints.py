"""Failpoints: named steps at which a process kills or stops itself when told to (csrc/failpoint.cdef.h).

PYENGINE_FAILPOINT says what is armed:

    name:nth:kill           this process is killed when it reaches the step for the nth time (SIGKILL)
    name:nth:stop           ... is stopped (SIGSTOP); it continues with SIGCONT
    name@kind:nth:kill      only a process of that kind: a worker kind, `supervisor`, or a command of pyengine
    /path                   a file of FILE_BYTES that the processes share: it strikes one of them, once,
                            and a test can arm it again while they run (`Board`)

Steps in C are in a build made with PYENGINE_BUILD_FAILPOINTS=1 only.

scripts/crash/steps.py lists the steps.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine._native import ms_failpoint

VARIABLE = "PYENGINE_FAILPOINT"
FILE_BYTES = 4096
_MAGIC = b"pyengine failpoint\n"  # the last bytes of the file
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_is_used = False
_references: list[object] = []


def failpoint(name: str) -> None:
    """Kill or stop this process if the step `name` is armed for it."""
    if _is_used:
        lib.ms_failpoint_reach(name.encode())


class Board:
    """One failpoint in a file that processes share; they find the file by PYENGINE_FAILPOINT=path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the file if it does not exist; UsageError for an existing file with other content, which stays as it is."""
        self.path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == 0:
                os.pwrite(descriptor, _MAGIC, FILE_BYTES - len(_MAGIC))  # gives it its size too, also while another process does so
            elif status.st_size != FILE_BYTES or os.pread(descriptor, len(_MAGIC), FILE_BYTES - len(_MAGIC)) != _MAGIC:
                raise UsageError(f"{path} is not a file of a failpoint: name one that is not there")
            self._mapping = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._point = ffi.cast("struct ms_failpoint *", ffi.from_buffer(self._mapping))

    def arm(self, name: str, nth: int = 1, action: str = "kill", process: str = "") -> None:
        """Arm the failpoint: the nth time that a process of that kind reaches the step, it is killed or stopped."""
        self.disarm()
        _fill(self._point, name, nth, action, process)

    def disarm(self) -> None:
        """Disarm the failpoint."""
        lib.ms_store_u32(ffi.addressof(self._point, "state"), lib.MS_FAILPOINT_IDLE)

    @property
    def is_armed(self) -> bool:
        """Return whether the failpoint is armed and has struck no process yet."""
        return lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_ARMED

    @property
    def struck_pid(self) -> int:
        """Return the process that was struck since the failpoint was armed, 0 if none was."""
        struck = lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_STRUCK
        return self._point.pid if struck else 0

    def use(self, process: str) -> None:
        """Attach this process to the board, as one of the kind `process`."""
        _use(self._point, process, self)


def has_steps_in_c() -> bool:
    """Return whether this build has the steps in C: PYENGINE_BUILD_FAILPOINTS=1."""
    return bool(lib.ms_failpoint_built())


def _use(point: ms_failpoint, process: str, keep: object) -> None:
    global _is_used
    _references.append((point, keep))
    lib.ms_failpoint_use(point, process.encode()[:31])
    _is_used = True


def _fill(point: ms_failpoint, name: str, nth: int, action: str, process: str) -> None:
    if action not in _ACTIONS or nth < 1:
        raise UsageError(f"no failpoint {name}:{nth}:{action}: passings count from 1, and the last word is kill or stop")
    point.nth, point.hits, point.pid, point.signal = nth, 0, 0, _ACTIONS[action]
    ffi.memmove(point.name, name.encode().ljust(64, b"\0"), 64)
    ffi.memmove(point.process, process.encode()[:31].ljust(32, b"\0"), 32)
    lib.ms_store_u32(ffi.addressof(point, "state"), lib.MS_FAILPOINT_ARMED)


def own_kind() -> str:
    """Return this process's kind: `writer` of `-m pyengine.workers.writer`, `recover` of `-m pyengine recover`."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-m" not in words:
        return ""
    module, *rest = words[words.index("-m") + 1:] or [""]
    if module == "pyengine":
        return next((word for word in rest if not word.startswith("-")), "")
    return module.rpartition(".")[2]


def read_environment() -> None:
    """Arm what PYENGINE_FAILPOINT says; called at a process's start, and after a fork into another kind."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    if text.startswith("/"):
        Board(text).use(own_kind())
        return
    try:
        where, nth, action = text.split(":")
        name, _, process = where.partition("@")
        point = ffi.new("struct ms_failpoint *")
        _fill(point, name, int(nth), action, process)
    except ValueError:
        raise UsageError(f"{VARIABLE}={text}: write name:nth:kill, name:nth:stop, name@kind:nth:kill or the path of a "
                         "file") from None
    _use(point, own_kind(), point)


read_environment()
