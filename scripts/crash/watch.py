"""The engine seen from outside: pids, positions, and whether a stopped worker was in the middle of something."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder
from pyengine.native import control as native

TIMEOUT_S = 30.0
STEP_S = 0.002
# futex, restart_syscall and the two sleeps: where a worker stands that waits for work.
WAITING_SYSCALLS = {"x86_64": (202, 219, 35, 230), "aarch64": (98, 128, 101, 115)}.get(platform.machine(), ())


class HangError(Exception):
    """Something did not come about in time."""


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> object:
    """The condition's first true value; HangError names what was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise HangError(f"{what}: not within {timeout_s:g} s")
        time.sleep(STEP_S)
    return value


def kind_number(name: str) -> int:
    return {text: number for number, text in enumerate(KIND_NAMES)}[name]


@dataclass(frozen=True)
class Positions:
    """The counters at one moment."""

    intent_end: int
    slot_end: int
    wrote: int
    committed: int
    flushed: int
    reput_from: int
    min_offset: int


class EngineWatch:
    """Looks into the control block of the engine that runs at `store`; changes nothing."""

    def __init__(self, store: Path) -> None:
        self._memory = EngineMemory.attach(find_folder(store), writable=False)

    def __enter__(self) -> EngineWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._memory.close()

    @property
    def epoch(self) -> int:
        return self._memory.identity.epoch

    def pid(self, kind: str) -> int:
        return native.load(self._memory.control.workers[kind_number(kind)], "pid")

    def pids(self) -> dict[str, int]:
        """The living ones, by kind."""
        found = {name: self.pid(name) for name in KIND_NAMES}
        return {name: pid for name, pid in found.items() if pid and state_of(pid) not in ("", "Z")}

    def positions(self) -> Positions:
        control = self._memory.control
        slot_end, _ = native.committed_slot(control)
        return Positions(
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
        """Of a slave: whether it follows its master."""
        return bool(native.load(self._memory.control.replicator, "linked"))

    def await_work(self, kind: str, pid: int, timeout_s: float) -> None:
        """Looks, without a pause, until the worker has begun something; a moment to stop it. Or until patience ends."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if kind == "writer":
                if native.load(self._memory.control.writer, "pass_started_ms"):
                    return
            elif self.in_the_middle(kind, pid):
                return

    def in_the_middle(self, kind: str, pid: int) -> bool:
        """Whether the worker, stopped as it is now, has begun something that it has not finished."""
        now = self.positions()
        if kind == "writer":  # it has given out queue offsets too, which its successor must take back
            return now.intent_end > now.slot_end and native.load(self._memory.control.undo, "count") > 0
        behind = {
            "committer": now.committed < now.wrote,
            "flusher": now.flushed < now.committed,
            "reputter": now.reput_from < now.committed,
        }
        return behind.get(kind, True) and not waits_for_work(pid)


def state_of(pid: int) -> str:
    """The process state letter (R, S, D, T, Z); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def waits_for_work(pid: int) -> bool:
    """Whether a process, running or stopped, stands where a worker sleeps."""
    try:
        return int(Path(f"/proc/{pid}/syscall").read_text().split()[0]) in WAITING_SYSCALLS
    except (OSError, ValueError):  # gone, or on a CPU right now
        return False


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still meanwhile; it goes on afterwards unless it was killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(f"process {pid} stands still", lambda: state_of(pid) in ("T", "D", ""))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill_all(watch: EngineWatch, others: Sequence[int] = (), rng: random.Random | None = None) -> int:
    """Kill every process of the engine, and `others` (its producers), in the order of kinds or shuffled; how many.

    The supervisor, which would start the others again, is held meanwhile and dies last. Not first: the kernel lets
    stopped processes go on when what they belong to loses its parent, and where hangups are ignored (nohup) a held
    committer would then empty the pool.
    """
    supervisor = watch.pid("supervisor")
    with stopped(supervisor):
        victims = [*(pid for pid in watch.pids().values() if pid != supervisor), *others]
        if rng is not None:
            rng.shuffle(victims)
        for pid in (*victims, supervisor):
            kill(pid)
    return len(victims) + 1


def kill(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """SIGKILL, and wait until the whole process, its last thread included, is gone or a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise HangError(f"process {pid} does not die within {timeout_s:g} s")
    finally:
        os.close(descriptor)
