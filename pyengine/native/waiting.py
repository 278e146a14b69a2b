"""How a process waits, gets a CPU and looks to the kernel (csrc/latch, sequence, nap, calibrate, cpu, process .cdef.h).

A latch wakes the one process that waits on it. The waiter's loop, in this order and no other:

    latch.arm()              # 1 forget old wake-ups
    if work_to_do():         # 2 look *after* arming
        latch.disarm(); do_it(); continue
    latch.wait(interval_s)   # 3 sleep; a wake-up since 1 ends it at once

The waker publishes its position first and calls wakeup() second. A sequence is a number that many processes
sleep on until it moves:

    seen = load_sequence(sequence)            # before looking
    if not there_yet():
        wait_for_sequence(sequence, seen, timeout_s)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError

if TYPE_CHECKING:
    from pyengine._native import ms_latch, ms_sequence


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
        """Wake the owner, unless it is awake or another process wakes it already."""
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


def load_sequence(sequence: ms_sequence) -> int:
    """The number now; take it before looking at what it announces."""
    return lib.ms_sequence_load(ffi.addressof(sequence))


def raise_sequence(sequence: ms_sequence) -> None:
    """Say "look again" to all sleepers, after publishing."""
    lib.ms_sequence_raise(ffi.addressof(sequence))


def wait_for_sequence(sequence: ms_sequence, seen: int, timeout_s: float) -> bool:
    """Sleep until the number differs from `seen` (True) or until the timeout or a signal (False)."""
    return lib.ms_sequence_wait(ffi.addressof(sequence), seen, max(0, int(timeout_s * 1e9))) == 1


def sleep_precisely() -> None:
    """Let this process's sleeps end when asked, not up to 50 us later."""
    lib.ms_nap_precisely()


def schedule_interactive() -> None:
    """Woken, interrupt who runs in long slices: for a process that does little each time and that others wait for."""
    lib.ms_cpu_schedule(lib.MS_CPU_INTERACTIVE)


def schedule_batch() -> None:
    """Woken, take an idle CPU at once, but wait for one rather than interrupt a putting producer or the writer."""
    lib.ms_cpu_schedule(lib.MS_CPU_BATCH)


ROUNDS = 60
PERCENT = 90
SPIN_US_MIN = 60
SPIN_US_MAX = 150


def wake_up_us(rounds: int = ROUNDS, percent: int = PERCENT) -> float:
    """Time that `percent` of the wake-ups of a sleeper stay below, in us. OSError if it cannot be measured."""
    answer = lib.ms_calibrate_wake_ns(rounds, percent)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer / 1000


def spin_us(setting: int, processes: int = 2) -> tuple[int, int]:
    """(writer's, producers') spin for the setting: as given, or measured for -1 (auto).

    Auto: longer than a wake-up takes, since a shorter spin is the worst choice of all;
    0 where there are fewer CPUs than `processes`, those that a put passes through: a spinner only keeps the others from
    running.
    """
    if setting >= 0:
        return setting, setting
    if len(os.sched_getaffinity(0)) < processes:
        return 0, 0
    try:
        wake_us = wake_up_us()
    except OSError:
        wake_us = SPIN_US_MIN
    producer = round(min(SPIN_US_MAX, max(SPIN_US_MIN, 1.2 * wake_us)))
    return round(min(SPIN_US_MAX, 1.25 * producer)), producer


def show_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these as this process's command line and environment in /proc, as if it had been started with them.

    OSError where the kernel does not let a process do that; then nothing has changed.
    """
    shown = _row(words)
    surrounding = _row(f"{name}={value}" for name, value in environment.items())
    _check(lib.ms_process_show_command(shown, len(shown), surrounding, len(surrounding)))


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends. OSError where that is refused."""
    _check(lib.ms_process_adopt_orphans())


def end_with_parent() -> None:
    """Be killed when the thread that forked this process ends. OSError where that is refused."""
    _check(lib.ms_process_end_with_parent())


def _row(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _check(code: int) -> None:
    if code:
        raise OSError(-code, os.strerror(-code))
