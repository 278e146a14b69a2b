"""Whether a process lives, which build of pyengine it runs, and the heartbeat of workers.

A process is identified by pid and start time, since the kernel reuses pids. The start time is the
kernel's, counted from boot, so that a step of the wall clock does not change it.
"""

from __future__ import annotations

import functools
import hashlib
import os
from typing import TYPE_CHECKING

import pyengine
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns

if TYPE_CHECKING:
    from pyengine._native import ms_worker

NOT_OF_WORKERS = {"__pycache__", "cli", "spark"}  # packages that no worker loads
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_STATE, _START_TICKS = 0, 19  # fields 3 and 22 of proc(5)
_ENDED = (b"Z", b"X", b"x")


def process_start_ms(pid: int) -> int | None:
    """Return the start time of the process, in ms since boot (steps of 10 ms); None if it has ended or is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in _ENDED else int(fields[_START_TICKS]) * 1000 // TICKS_A_SECOND


def is_alive(pid: int, start_ms: int) -> bool:
    """Whether the process with this pid and start time lives; False for a zombie and for a later process with the same pid."""
    return pid > 0 and process_start_ms(pid) == start_ms


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) has stopped the process; False for one that a debugger has stopped."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """Return the process state letter (R, S, D, T, Z); empty if the process does not exist."""
    fields = _stat(pid)
    return "" if fields is None else fields[_STATE].decode()


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat (proc(5)) from the state on; None for a process that has ended or is hidden.

    It does not use psutil: each process of an engine calls this at its start, and the import of psutil takes 10 ms.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        return os.read(descriptor, 4096).rpartition(b")")[2].split()
    except ProcessLookupError:  # it has ended since the open
        return None
    finally:
        os.close(descriptor)


@functools.cache
def build_id() -> str:
    """Return the id of the code that this process runs: 16 hexadecimal digits, a digest of pyengine's files at the first call.

    Two builds of one version have different ids; the same files in another folder have the same id. It takes some 10 ms.
    """
    top = os.path.dirname(pyengine.__file__)
    digest = hashlib.blake2b(digest_size=8)
    for folder, folders, names in os.walk(top, followlinks=True):
        folders[:] = sorted(set(folders) - NOT_OF_WORKERS)
        for name in sorted(names):
            if name.endswith((".py", ".so")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    text = file.read()
                digest.update(f"{path[len(top) + 1:]}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


class Heartbeat:
    """A worker's own line in the control block: its process, its state and its heartbeat."""

    def __init__(self, worker: ms_worker) -> None:
        """`worker`: this worker's `struct ms_worker`, which no other process writes."""
        self._worker = worker
        self._passes = worker.passes
        self._store_heartbeat_ns = native.storer(worker, "heartbeat_ns")
        self._store_passes = native.storer(worker, "passes")

    def begin(self, pid: int, start_ms: int) -> int:
        """Take over the line from the last process; return the number of this incarnation, 1 for the first."""
        incarnation = native.load(self._worker, "incarnation") + 1
        native.store(self._worker, "start_time_ms", start_ms)
        failpoint("worker_line_begun")
        native.store(self._worker, "error_count", 0)
        native.store(self._worker, "build_id", int(build_id(), 16))
        native.store(self._worker, "state", native.WORKER_STARTING)
        native.store(self._worker, "incarnation", incarnation)
        failpoint("worker_line_counted")
        self.record_heartbeat()  # before the pid, by which the supervisor sees a worker: one without a heartbeat would be stuck
        native.store(self._worker, "pid", pid)
        return incarnation

    def record_heartbeat(self, *, worked: bool = False) -> None:
        """Record the time of this round; `worked` counts it as a round with work."""
        self._store_heartbeat_ns(monotonic_ns())
        if worked:
            self._passes += 1
            self._store_passes(self._passes)

    def state(self, state: int) -> None:
        """Set the state, one of the WORKER_ numbers."""
        native.store(self._worker, "state", state)
