"""The supervisor's workers: start them, watch them by pidfd, restart those that die, stop them in order.

A worker that dies is replaced without recovery of the store: at once the first time,
after growing pauses if it keeps dying. The replacement starts only after the pidfd of the
dead worker has fired and its lock byte is free. When a worker cannot come up, which it
says by its exit code, the supervisor halts the engine. A worker that lives but makes no
progress gets SIGABRT, so that it prints a stack trace, and then SIGKILL.

Adopted workers of another build of pyengine are restarted one by one once all are ready: an upgrade without a stop.

The supervisor's fork server (fork_server.py) forks the workers; without a fork server they are started by exec.

Workers that a dead supervisor started are adopted: they are watched in the same way, but
their exit code stays unknown. The supervisor resumes a worker that a signal has stopped
(SIGSTOP) when it adopts it and when it waits for it to finish: no other process does.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyengine.engine.fork_server import ForkedWorker, ForkServer
from pyengine.engine.kinds import HEALTHY_AFTER_S, Kind, WorkerExit, child_environment, restart_pause_s, without_systemd
from pyengine.events import Event, Report
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.heartbeat import build_id, is_alive, is_stopped
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.storage.file_system import HeldStore

BOOT_FAILURES_MAX = 5     # in a row, by a worker that had come up before
ABORT_TIMEOUT_S = 5.0    # from SIGABRT to SIGKILL
LOCK_POLL_INTERVAL_S = 0.01
POLL_INTERVAL_S = 0.02   # poll interval while a worker comes up, records a heartbeat or finishes
SPAWN_RETRY_S = 1.0
RENEW_TIMEOUT_S = 5.0    # for a worker of another build to finish; then it is killed, since under load it might never finish
ALIVE_TIMEOUT_S = 5.0    # for a worker to complete one round when an orderly stop begins
HALTED_TIMEOUT_S = 5.0   # for a worker that is coming up while the engine halts
NEVER_S = float("inf")


@dataclass
class _Child:
    kind: Kind
    process: subprocess.Popen[bytes] | ForkedWorker | None = None  # None: adopted
    pid: int = 0                             # 0: not running
    pidfd: int = -1
    started_s: float = 0.0
    due_s: float = NEVER_S                   # when to start it again
    crashes: int = 0
    boot_failures: int = 0
    was_ready: bool = False
    aborted_s: float = NEVER_S
    heard_s: float = -NEVER_S                # from when on its silence counts: it was stopped before, or everything was
    exit_code: int | None = None


class Children:
    def __init__(self, memory: EngineMemory, lock: StoreLock, selector: selectors.BaseSelector, kinds: Sequence[Kind],
                 store: HeldStore, fork_server: ForkServer | None, report: Report,
                 died: Callable[[int], None] = lambda kind: None) -> None:
        """`report` is called with each sentence for the log, `died` with the kind of each worker that died and is restarted.

        Workers are started by exec if there is no `fork_server`, or it fails.
        """
        self._memory = memory
        self._lock = lock
        self._selector = selector
        self._store = store
        self._fork_server = fork_server
        self._report = report
        self._note_death = died
        self._children = {kind.number: _Child(kind) for kind in kinds}
        self._restarting = True
        self.may_start = True  # False: no new process can attach to this engine, or find its log
        self._to_renew: list[_Child] = []
        self._renewing: _Child | None = None
        self._renew_by_s = NEVER_S
        self._seen_s = time.monotonic()
        self.no_session = ""  # set by the supervisor: why no producer can attach
        # A supervisor that died may have left a text.
        self.down_reason = self._published_reason = native.read_blocked_reason(memory.blocked_reasons, native.SUPERVISOR)
        self.halted = ""  # why the engine cannot run; "": it can

    # ---- start ------------------------------------------------------------------

    def start(self) -> None:
        """Adopt the workers that live, and start the others."""
        for child in self._children.values():
            if not self._adopt(child):
                self._start(child)

    def _adopt(self, child: _Child) -> bool:
        line = self._memory.control.workers[child.kind.number]
        pid = native.load(line, "pid")
        try:
            if not self._lock.kind_taken(child.kind.number) or not is_alive(pid, native.load(line, "start_time_ms")):
                return False
        except OSError as error:  # for example no free descriptor
            self._set_down_reason(f"the {child.kind.name} (pid {pid}) cannot be watched: {error.strerror}")
            return False
        child.process = None
        if not self._watch(child, pid):
            return False
        self._resume(child)
        return True

    def renew(self) -> None:
        """Let tick() restart, one by one in the order of KINDS, the workers that run another build than this process.

        Puts wait while the writer is restarted, as after its death; nothing is lost or recovered.
        """
        self._to_renew = list(self._children.values())

    def _renew_next(self, now_s: float) -> None:
        child = self._renewing
        if child is not None:
            if now_s >= self._renew_by_s:
                self._signal(child, signal.SIGKILL)
                self._renew_by_s = NEVER_S
            return
        while self._to_renew and self._restarting and self.all_ready:
            child = self._to_renew.pop(0)
            if native.load(self._memory.control.workers[child.kind.number], "build_id") in (0, int(build_id(), 16)):
                continue
            self._renewing, self._renew_by_s = child, now_s + RENEW_TIMEOUT_S
            self._report(Event.WORKER_RENEWED, f"the {child.kind.name} (pid {child.pid}) runs another build of pyengine: it is restarted")
            self._signal(child, signal.SIGTERM)
            self._memory.wake(child.kind.number)
            return

    def _resume(self, child: _Child) -> None:
        try:
            stopped = is_stopped(child.pid)
        except OSError:  # for example no free descriptor
            return
        if stopped:
            self._report(Event.WORKER_STOPPED, f"the {child.kind.name} (pid {child.pid}) was stopped by a signal; it is resumed (SIGCONT)")
            child.heard_s = time.monotonic()
            self._signal(child, signal.SIGCONT)

    def _watch(self, child: _Child, pid: int) -> bool:
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._on_exit(child))
        except ProcessLookupError:
            return False
        except OSError as error:
            if pidfd >= 0:
                os.close(pidfd)
            self._set_down_reason(f"the {child.kind.name} (pid {pid}) cannot be watched: {error.strerror}")
            return False
        child.pidfd, child.pid, child.started_s, child.due_s = pidfd, pid, time.monotonic(), NEVER_S
        child.aborted_s, child.exit_code = NEVER_S, None
        return True

    def _spawn(self, kind: Kind) -> subprocess.Popen[bytes] | ForkedWorker:
        """Start a worker of this kind; OSError when the system cannot create a process at this moment."""
        words = [sys.executable, "-P", "-m", kind.module, str(self._store.name), "--store-fd", str(self._store.descriptor)]
        forked = self._fork_server.start_worker(words) if self._fork_server else None
        return forked or subprocess.Popen(words, stdin=subprocess.DEVNULL, env=without_systemd(child_environment()), process_group=0,
                                          pass_fds=(self._store.descriptor,))

    def _start(self, child: _Child) -> None:
        if self._lock.kind_taken(child.kind.number):  # a thread of the dead worker still exists, or another worker of this kind runs
            if not self._adopt(child):
                child.due_s = time.monotonic() + LOCK_POLL_INTERVAL_S
            return
        if not self.may_start:
            return
        try:
            child.process = self._spawn(child.kind)
        except OSError as error:  # no memory or too many processes for the moment
            text = f"the {child.kind.name} could not be started: {error}; trying again in {SPAWN_RETRY_S:g} s"
            self._report(Event.WORKER_NOT_STARTED, text)
            self._set_down_reason(text)
            child.due_s = time.monotonic() + SPAWN_RETRY_S
            return
        if not self._watch(child, child.process.pid):  # its end could not be noticed
            child.process.kill()
            child.process.wait()
            child.due_s = time.monotonic() + SPAWN_RETRY_S

    # ---- watch ------------------------------------------------------------------

    def _on_exit(self, child: _Child) -> None:
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        code = child.process.wait() if child.process else None
        lived_s = time.monotonic() - child.started_s
        pid, child.pid, child.pidfd, child.exit_code = child.pid, 0, -1, code
        if code == WorkerExit.ALREADY_RUNNING and self._adopt(child):
            return
        name = child.kind.name
        if is_renewed := child is self._renewing:
            self._renewing = None
        if not self._restarting:
            if code:
                self._report(Event.WORKER_ENDED, f"{name} (pid {pid}) ended with {_why(code)}")
            return
        if is_renewed:
            self._note_death(child.kind.number)
            self._start(child)
            return
        if code in (WorkerExit.BOOT_FAILED, WorkerExit.USAGE) or code == WorkerExit.TEMPFAIL and not child.was_ready:
            child.boot_failures += 1
            if not child.was_ready or child.boot_failures >= BOOT_FAILURES_MAX:
                why = self._why_not_started(child, pid)
                self.halted = self.halted or f"the {name} cannot start: {why or 'its message is in the log above'}"
                return
        else:
            child.boot_failures = 0
        child.crashes = 1 if lived_s >= HEALTHY_AFTER_S else child.crashes + 1
        pause_s = restart_pause_s(child.crashes)
        child.due_s = time.monotonic() + pause_s
        line = self._memory.control.workers[child.kind.number]
        native.store(line, "restarts", native.load(line, "restarts") + 1)
        text = f"{name} (pid {pid}) ended with {_why(code)}; starting it again" + (f" in {pause_s:g} s" if pause_s else "")
        self._report(Event.WORKER_ENDED, text)
        self._set_down_reason(text)
        self._note_death(child.kind.number)
        if not pause_s:
            self._start(child)

    def _why_not_started(self, child: _Child, pid: int) -> str:
        """Return the reason that process `pid` gave; "" if it ended before it attached: the text is an older process's then."""
        if native.load(self._memory.control.workers[child.kind.number], "pid") != pid:
            return ""
        return native.read_blocked_reason(self._memory.blocked_reasons, child.kind.number).removeprefix("cannot start: ")

    def _set_down_reason(self, text: str) -> None:
        """Show in `status` why a worker is down: a worker that could not attach cannot write its own reason."""
        self.down_reason = text
        self._publish_down_reason()

    def _publish_down_reason(self) -> None:
        text = self.down_reason or self.no_session
        if text != self._published_reason:
            self._published_reason = text
            native.write_blocked_reason(self._memory.blocked_reasons, native.SUPERVISOR, text)

    def tick(self) -> None:
        """Start the workers that are due, and kill those whose heartbeat is too old."""
        if self._fork_server:
            self._fork_server.tick()
        if self.down_reason and self.all_ready:
            self.down_reason = ""
        self._publish_down_reason()
        now_s = time.monotonic()
        pause_s, self._seen_s = now_s - self._seen_s, now_s
        for child in self._children.values():
            if pause_s >= ABORT_TIMEOUT_S:  # of this process; that of a container stops the workers too
                child.heard_s = min(now_s, self._heard_s(child) + pause_s)
            if child.due_s <= now_s and self._restarting:
                child.due_s = NEVER_S
                self._start(child)
            elif child.pid:
                self._check_heartbeat(child, now_s)
        self._renew_next(now_s)

    def _check_heartbeat(self, child: _Child, now_s: float) -> None:
        line = self._memory.control.workers[child.kind.number]
        if native.load(line, "pid") != child.pid:
            return  # it has not attached yet
        if native.load(line, "state") == native.WORKER_READY:
            child.was_ready = True
        heartbeat_age_s = now_s - self._heard_s(child)
        if heartbeat_age_s < child.kind.heartbeat_timeout_s:
            child.aborted_s = NEVER_S
        elif child.aborted_s == NEVER_S:
            child.aborted_s = now_s
            self._report(Event.WORKER_STUCK,
                      f"{child.kind.name} (pid {child.pid}) has made no progress for {heartbeat_age_s:.0f} s: aborting it")
            self._signal(child, signal.SIGABRT)
        elif now_s >= child.aborted_s + ABORT_TIMEOUT_S:
            self._signal(child, signal.SIGKILL)

    def _heard_s(self, child: _Child) -> float:
        return max(native.load(self._memory.control.workers[child.kind.number], "heartbeat_ns") / 1e9, child.heard_s)

    def next_due_s(self) -> float:
        """Return the time, by time.monotonic(), at which tick() must be called next."""
        return min([self._renew_by_s if self._renewing else NEVER_S, *(child.due_s for child in self._children.values())])

    @property
    def all_ready(self) -> bool:
        """Whether every worker is running and has reported itself ready."""
        return all(self._is_ready(child) for child in self._children.values())

    def _is_ready(self, child: _Child) -> bool:
        line = self._memory.control.workers[child.kind.number]
        return bool(child.pid) and native.load(line, "pid") == child.pid and native.load(line, "state") == native.WORKER_READY

    def not_ready(self) -> list[str]:
        return [child.kind.name for child in self._children.values() if not self._is_ready(child)]

    # ---- stop -------------------------------------------------------------------

    def stop(self, pump: Callable[[float], None], deadline_s: float) -> list[str]:
        """Stop all in the order of stop_rank, each after it has finished what the ones before it published.

        `pump(seconds)` serves the selector for at most that long. A worker that is down is started
        before the first one is stopped, since a new flusher needs the writer to vouch for it. A worker
        that dies while it stops is started once more to finish. Returns sentences about what went
        wrong; every worker has ended by then, killed if it had to be.
        """
        self._restarting = False
        problems: list[str] = []
        if not self.halted and self.may_start:
            self._start_missing(pump, deadline_s)
        for child in sorted(self._children.values(), key=lambda child: child.kind.stop_rank):
            problem = self._stop_one(child, pump, deadline_s)
            if problem:
                problems.append(problem)
        self.kill()
        return problems

    def _start_missing(self, pump: Callable[[float], None], deadline_s: float) -> None:
        """Start every worker that is down, and wait until each is ready and has beaten since.

        The heartbeat is needed because a worker that was killed looks ready until its pidfd has fired.
        """
        asked_ns, alive_by_s = monotonic_ns(), time.monotonic() + ALIVE_TIMEOUT_S
        started: set[int] = set()
        while (now_s := time.monotonic()) < deadline_s:
            waits = False
            for child in self._children.values():
                if not child.pid and child.kind.number not in started:
                    started.add(child.kind.number)
                    self._start(child)
                self._resume(child)
                line = self._memory.control.workers[child.kind.number]
                is_silent = now_s < alive_by_s and native.load(line, "heartbeat_ns") < asked_ns
                if is_silent:
                    self._memory.wake(child.kind.number)  # the wake-up makes it run a round, with a heartbeat
                waits = waits or bool(child.pid) and (is_silent or not self._is_ready(child))
            if not waits:
                return
            pump(POLL_INTERVAL_S)

    def _stop_one(self, child: _Child, pump: Callable[[float], None], deadline_s: float) -> str:
        for _ in range(2):
            if not child.pid and not self.may_start:
                return f"the {child.kind.name} is dead, and none can be started in its place"
            if not child.pid:
                self._start(child)
            in_vain = bool(self.halted) or not self.may_start
            up_by_s = min(deadline_s, time.monotonic() + HALTED_TIMEOUT_S) if in_vain else deadline_s
            while child.pid and not self._is_ready(child) and time.monotonic() < up_by_s:
                self._resume(child)
                pump(POLL_INTERVAL_S)
            if self._is_ready(child):
                self._signal(child, signal.SIGTERM)
            elif child.pid and in_vain:
                return f"the {child.kind.name} did not come up"
            while child.pid and time.monotonic() < deadline_s:
                self._resume(child)
                self._memory.wake(child.kind.number)  # each time: a loop in C may arm its latch after the signal without checking for it
                pump(POLL_INTERVAL_S)
            if child.pid:
                return f"the {child.kind.name} did not finish in time"
            state = native.load(self._memory.control.workers[child.kind.number], "state")
            if child.exit_code == WorkerExit.CLEAN or child.exit_code is None and state == native.WORKER_ABSENT:
                return ""
        return f"the {child.kind.name} ended with {_why(child.exit_code)}"

    def kill(self) -> None:
        """Send SIGKILL to the workers that still run, and wait for their end."""
        self._restarting = False
        for child in self._children.values():
            if child.pid:
                self._signal(child, signal.SIGKILL)
        for child in self._children.values():
            if child.pid:
                with selectors.PollSelector() as selector:  # which needs no descriptor, in case none is free
                    selector.register(child.pidfd, selectors.EVENT_READ)
                    selector.select()
                self._on_exit(child)

    def _signal(self, child: _Child, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: its pidfd fires
            signal.pidfd_send_signal(child.pidfd, number)

    def forget(self) -> None:
        """Stop watching the workers, which continue to run."""
        for child in self._children.values():
            if child.pidfd >= 0:
                self._selector.unregister(child.pidfd)
                os.close(child.pidfd)
                child.pidfd, child.pid = -1, 0


def _why(code: int | None) -> str:
    if code is None:
        return "an unknown code"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
