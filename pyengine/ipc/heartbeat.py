"""Who is alive: pid and start time together, since pids come back.

The start time is counted from boot, so a step of the wall clock does not make the living
look like strangers. psutil gives it on the wall clock; both its readings are taken
against the same boot time and subtracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import current_cpu, monotonic_ns

if TYPE_CHECKING:
    from pyengine._native import ms_worker


def process_start_ms(pid: int) -> int | None:
    """When the process started, in ms since boot (steps of 10 ms), or None if it is gone or a zombie."""
    import psutil

    while True:
        before_s = psutil.boot_time()
        try:
            process = psutil.Process(pid)
            started_s = process.create_time()
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.Error:
            return None
        if psutil.boot_time() == before_s:  # else the wall clock was stepped in between
            return int(round((started_s - before_s) * 100) * 10)


def is_alive(pid: int, start_ms: int) -> bool:
    """Whether this very process lives; a zombie does not, nor does another one with its pid."""
    return pid > 0 and process_start_ms(pid) == start_ms


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) has stopped the process; one that a debugger holds is not."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class Heartbeat:
    """One worker's own line in the control block: who it is and that it makes progress."""

    def __init__(self, worker: ms_worker) -> None:
        """`worker`: this worker's `struct ms_worker`, which no other process writes."""
        self._worker = worker
        self._passes = worker.passes
        self._store_heartbeat_ns = native.storer(worker, "heartbeat_ns")
        self._store_passes = native.storer(worker, "passes")
        self._store_cpu = native.storer(worker, "cpu")

    def begin(self, pid: int, start_ms: int) -> int:
        """Take the line over; the number of this incarnation, 1 for the first."""
        incarnation = native.load(self._worker, "incarnation") + 1
        native.store(self._worker, "start_time_ms", start_ms)
        failpoint("worker_line_begun")
        native.store(self._worker, "error_count", 0)
        native.store(self._worker, "state", native.WORKER_STARTING)
        native.store(self._worker, "incarnation", incarnation)
        failpoint("worker_line_counted")
        native.store(self._worker, "pid", pid)
        self.beat()
        return incarnation

    def beat(self, *, worked: bool = False) -> None:
        """Say "I am going round"; `worked` counts the round as one with work."""
        self._store_heartbeat_ns(monotonic_ns())
        if worked:
            self._passes += 1
            self._store_passes(self._passes)
            self._store_cpu(current_cpu())

    def state(self, state: int) -> None:
        """One of the WORKER_ states."""
        native.store(self._worker, "state", state)

    def error(self) -> None:
        """Count one error that the worker survived."""
        native.store(self._worker, "error_count", native.load(self._worker, "error_count") + 1)
