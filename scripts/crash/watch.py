"""CrashWatch observes an engine from outside, for the crash scripts: its positions, and whether a worker is in the middle of something."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

from pyengine.cli.torture import EngineWatch
from pyengine.native import control as native

# futex, restart_syscall, the two sleeps and epoll's waits: the system calls in which a worker waits for work.
WAITING_SYSCALLS = {"x86_64": (202, 219, 35, 230, 232, 281), "aarch64": (98, 128, 101, 115, 22)}.get(platform.machine(), ())


@dataclass(frozen=True)
class CounterValues:
    """The counters at one moment."""

    intent_end: int
    slot_end: int
    wrote: int
    committed: int
    flushed: int
    reput_from: int
    min_offset: int


class CrashWatch(EngineWatch):
    """An EngineWatch that also sees how far the engine is."""

    @property
    def epoch(self) -> int:
        return self.memory.identity.epoch

    def positions(self) -> CounterValues:
        control = self.memory.control
        slot_end, _ = native.committed_slot(control)
        return CounterValues(
            intent_end=native.load(control.writer, "intent_end"),
            slot_end=slot_end,
            wrote=native.load(control.wrote, "value"),
            committed=native.load(control.committed, "value"),
            flushed=native.load(control.flushed, "value"),
            reput_from=native.load(control.reput_from, "value"),
            min_offset=native.load(control.min_offset, "value"),
        )

    @property
    def is_linked(self) -> bool:
        """Return whether this slave follows its master."""
        return bool(native.load(self.memory.control.replicator, "linked"))

    def await_work(self, kind: str, pid: int, timeout_s: float) -> None:
        """Return when the worker has begun some work, a good moment to stop it, or after the timeout; poll without sleeping."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if kind == "writer":
                if native.load(self.memory.control.writer, "pass_started_ms"):
                    return
            elif self.is_mid_operation(kind, pid):
                return

    def is_mid_operation(self, kind: str, pid: int) -> bool:
        """Return whether the worker, which is stopped, has begun work that it has not finished."""
        now = self.positions()
        if kind == "writer":  # it has given out queue offsets too, which its successor must take back
            return now.intent_end > now.slot_end and native.load(self.memory.control.undo, "count") > 0
        has_work = {
            "committer": now.committed < now.wrote,
            "flusher": now.flushed < now.committed,
            "reputter": now.reput_from < now.committed,
        }
        return has_work.get(kind, True) and not waits_for_work(pid)


def waits_for_work(pid: int) -> bool:
    """Return whether a process, running or stopped, is in a system call in which a worker sleeps."""
    try:
        return int(Path(f"/proc/{pid}/syscall").read_text().split()[0]) in WAITING_SYSCALLS
    except (OSError, ValueError):  # gone, or on a CPU right now
        return False
