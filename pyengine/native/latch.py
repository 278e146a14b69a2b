"""A wake-up that other processes leave for the one process that waits (csrc/latch.cdef.h).

The waiter's loop, in this order and no other:

    latch.arm()              # 1 forget old wake-ups
    if work_to_do():         # 2 look *after* arming
        latch.disarm(); do_it(); continue
    latch.wait(interval_s)   # 3 sleep; a wake-up since 1 ends it at once

The waker publishes its position first and calls wakeup() second.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError

if TYPE_CHECKING:
    from pyengine._native import ms_latch


class Latch:
    """One worker's latch: a shared flag and the named semaphore `name` (which must exist).

    Where the flag is mapped read-only (`writable` False), wakeup() is all that may be called.
    """

    def __init__(self, latch: ms_latch, name: str, *, writable: bool = True) -> None:
        why = ffi.new("int *")
        semaphore = lib.ms_latch_open(name.encode(), why)
        if semaphore == ffi.NULL:
            raise EngineUnavailableError(f"semaphore {name}: {os.strerror(why[0])}")
        self.latch = latch
        self.semaphore = semaphore
        self.name = name
        self._wakeup = lib.ms_latch_wakeup if writable else lib.ms_latch_wakeup_unmarked

    def wakeup(self) -> None:
        """Wake the owner, unless it is awake or somebody else does it already."""
        self._wakeup(self.latch, self.semaphore)

    def arm(self) -> None:
        """Forget old wake-ups; from here on a wake-up ends the next wait."""
        lib.ms_latch_arm(self.latch, self.semaphore)

    def disarm(self) -> None:
        """Mark the owner awake: wake-ups are spared until the next arm."""
        lib.ms_latch_disarm(self.latch)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken (True), or until the timeout or a signal (False). Always timed."""
        return lib.ms_latch_wait(self.latch, self.semaphore, int(timeout_s * 1e9)) == 1

    def close(self) -> None:
        """Close the semaphore; the shared flag stays."""
        if self.semaphore:
            lib.ms_latch_close(self.semaphore)
            self.semaphore = ffi.NULL


