"""Failpoints: named steps at which a process kills or stops itself when told to (csrc/failpoint.cdef.h).

PYENGINE_FAILPOINT says what is armed:

    name:nth:kill           this process is killed when it reaches the step for the nth time (SIGKILL)
    name:nth:stop           ... is stopped (SIGSTOP); it continues with SIGCONT
    name@kind:nth:kill      only a process of that kind: a worker kind, `supervisor`, or a command of pyengine
    /path                   a file that the processes share, in which scripts/crash/board.py arms one: it strikes one of them, once

Steps in C are in a build made with PYENGINE_BUILD_FAILPOINTS=1 only.

scripts/crash/steps.py lists the steps.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine._native import ms_failpoint

VARIABLE = "PYENGINE_FAILPOINT"
FILE_BYTES = 4096  # of a shared one
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_is_used = False
_references: list[object] = []


def failpoint(name: str) -> None:
    """Kill or stop this process if the step `name` is armed for it."""
    if _is_used:
        lib.ms_failpoint_reach(name.encode())


def use(point: ms_failpoint, process: str, keep: object) -> None:
    """Let `point`, which lives while `keep` does, strike this process, which is of the kind `process`."""
    global _is_used
    _references.append((point, keep))
    lib.ms_failpoint_use(point, process.encode()[:31])
    _is_used = True


def arm(point: ms_failpoint, name: str, nth: int, action: str, process: str) -> None:
    """Let `point` kill or stop a process of that kind ("": any) the nth time that one reaches the step."""
    if action not in _ACTIONS or nth < 1:
        raise UsageError(f"no failpoint {name}:{nth}:{action}: passings count from 1, and the last word is kill or stop")
    point.nth, point.hits, point.pid, point.signal = nth, 0, 0, _ACTIONS[action]
    ffi.memmove(point.name, name.encode().ljust(64, b"\0"), 64)
    ffi.memmove(point.process, process.encode()[:31].ljust(32, b"\0"), 32)
    lib.ms_store_u32(ffi.addressof(point, "state"), lib.MS_FAILPOINT_ARMED)


def own_kind() -> str:
    """Return this process's kind: `writer` of `-m pyengine.workers.writer`, `recover` of `-m pyengine recover`."""
    if "-m" not in sys.orig_argv:
        return ""
    module, *rest = sys.orig_argv[sys.orig_argv.index("-m") + 1:] or [""]
    if module == "pyengine":
        return next((word for word in rest if not word.startswith("-")), "")
    return module.rpartition(".")[2]


def read_environment() -> None:
    """Arm what PYENGINE_FAILPOINT says; called at a process's start, and after a fork into another kind."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    try:
        if text.startswith("/"):
            with open(text, "r+b") as file:
                memory = mmap.mmap(file.fileno(), FILE_BYTES)
            point = ffi.cast("struct ms_failpoint *", ffi.from_buffer(memory))
        else:
            memory = None
            where, nth, action = text.split(":")
            name, _, process = where.partition("@")
            point = ffi.new("struct ms_failpoint *")
            arm(point, name, int(nth), action, process)
    except (ValueError, OSError):
        raise UsageError(f"{VARIABLE}={text}: write name:nth:kill, name:nth:stop, name@kind:nth:kill or the path of a "
                         "file") from None
    use(point, own_kind(), memory)


read_environment()
