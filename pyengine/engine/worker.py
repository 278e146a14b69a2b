"""The common part of every worker process: attach, report ready, run rounds, end in order.

A worker does not create shared objects or recover the store. It waits (bounded) for the store's
owner, a living supervisor whose control block is published. Then it holds its bytes of the store's lock
(ipc/store_lock.py). Before that it writes to no shared memory, so a worker that starts on the remains of a
dead engine changes nothing.

SIGHUP and SIGUSR1 are ignored: the supervisor reads the settings again, and each worker takes the live ones when a sequence in
the control block has risen; a worker reopens a log that was renamed by itself (log_file.py).
SIGTERM and SIGINT set a flag: the worker finishes what was published before it, and exits 0.
It also ends when its control block is retired, because another engine took over, and when the
names of the shared memory were removed, since no process can attach any more, or the store's folder
was moved, removed or replaced. The supervisor stops the engine in that case; if the supervisor is
dead, each worker ends by itself after the kinds whose work it finishes. A worker survives SIGKILL at any instruction: the next incarnation
continues from the positions in shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pyengine.engine.kinds import KINDS, WorkerExit, begin_process, raise_descriptors
from pyengine.engine.log_file import LogFile, log_event, notify, pause_before_restart, watchdog_interval_s
from pyengine.errors import DiskError, EngineError, EngineUnavailableError, StoreBusyError, command, os_error_sentence
from pyengine.events import Event
from pyengine.formats.paths import set_log_folders
from pyengine.ipc.control_block import EngineMemory, read_run_settings
from pyengine.ipc.heartbeat import Heartbeat, is_alive, process_start_ms
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder, removed_names
from pyengine.ipc.store_lock import StoreLock, living_kinds
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.native.flush import monotonic_ns
from pyengine.native.recorder import BLOCKED_PHASE, THRESHOLD_NS, count_resumes
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.engine_id import ID_NAME
from pyengine.storage.file_system import HeldStore
from pyengine.storage.message_store import MessageStore

OWNER_WAIT_S = 30.0
POLL_INTERVAL_S = 0.02
LATE_POLL_INTERVAL_S = 0.2  # after the first second: under a service manager a worker waits as long as the store is refused
NAMES_CHECK_INTERVAL_S = 1.0  # interval of the check that the store's folder and the names in shared memory are in their places
WORKER_FILES = 32    # that a worker which serves connections has open without any
PAUSE_S_MAX = 5.0    # longest sleep of a worker, whatever its interval: it must check the names and record a heartbeat
# Errors whose cause may be gone at the next try.
TRANSIENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
# A worker attaches while the engine stops, too: the supervisor starts a worker that died once more, so that it finishes.
SERVING_STATES = (native.STATE_RUNNING, native.STATE_READ_ONLY, native.STATE_STOPPING)


class BootFailedError(EngineError):
    """The worker cannot come up, and an immediate restart would not help."""


class Worker:
    """One worker process attached to its engine.

    `context` is for its service; a loop must read `stopping` in every round.
    """

    def __init__(self, kind: int, store: HeldStore, memory: EngineMemory, lock: StoreLock) -> None:
        self._settings_seq = waiting.load_sequence(memory.control.settings_seq)
        self.config = read_run_settings(memory.folder)  # may fail, and attach() tries again with another store: watch() comes after it
        set_log_folders(store.root, self.config.store_path_commit_log, self.config.read_only_commit_log_store_paths)
        lock.hold_log()
        store.watch(ID_NAME)
        self.kind = kind
        self.store = store
        self.root = root = store.root
        self.memory = memory
        self.lock = lock
        self.latch = memory.latch(kind)
        count_resumes()
        self.recorder = memory.recorder_of(kind)
        self.context = ServiceContext(memory, MessageStore(root, self.config.geometry), self.config,
                                      self.report, self.heartbeat, self.recorder)
        self.control_line = Heartbeat(memory.control.workers[kind])
        self.incarnation = self.control_line.begin(os.getpid(), process_start_ms(os.getpid()) or 0)
        native.store(memory.control.workers[kind], "settings_seq", self._settings_seq)
        self._stop_requested = False
        self.on_signal: Callable[[], None] = lambda: None  # called by the handler of a signal to stop, to wake a loop that sleeps
        self._blocked_reason = native.read_blocked_reason(memory.blocked_reasons, kind)
        self._blocked_ns = 0   # when it was blocked first, 0: not blocked, or unknown
        self._blocked_errno = 0
        self._watchdog_s = watchdog_interval_s()
        self._watchdog_due_s = 0.0
        self._names_due_s = 0.0
        self._log = LogFile(root)
        self._is_lost = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop_requested = True
        self.on_signal()

    @property
    def stopping(self) -> bool:
        """Whether to finish and end: a signal came, the names were removed, or another engine took over the store."""
        return self._stop_requested or self.memory.retired

    def ready(self) -> None:
        """Tell the supervisor, and systemd if it started this worker, that the worker is ready."""
        self.control_line.state(native.WORKER_READY)
        self.memory.wake(native.SUPERVISOR)
        self.set_blocked_reason("")
        notify("READY=1")

    def set_blocked_reason(self, text: str, error_number: int = 0) -> None:
        """Set the blocked reason that `status` and the recorder show, and its errno; "" when the worker is no longer blocked."""
        if text == self._blocked_reason:
            return
        self._blocked_reason = text
        native.write_blocked_reason(self.memory.blocked_reasons, self.kind, text)
        now_ns = monotonic_ns()
        if text and not self._blocked_ns:
            self._blocked_ns, self._blocked_errno = now_ns, error_number
            self.recorder.note("blocked", now_ns, 0, error_number=error_number)
            self.recorder.set_phase(BLOCKED_PHASE, now_ns)
        elif not text and self._blocked_ns:
            self.recorder.note("blocked", self._blocked_ns, now_ns - self._blocked_ns, error_number=self._blocked_errno)
            self.recorder.set_phase(None)
            self._blocked_ns = 0

    def limit_connections(self, each: int, own: int) -> None:
        """Raise the limit of open files for gateway_connections_max of `each` and `own` others; if it stays too low, lower the setting."""
        wanted = self.config.gateway_connections_max
        files = raise_descriptors(wanted * each + own)
        fitting = max(1, (files - min(own, WORKER_FILES + files // 4)) // each)
        if fitting < wanted:
            self.config = replace(self.config, gateway_connections_max=fitting)
            self.report(Event.CONNECTIONS_FEWER, f"at most {fitting} and not {wanted} (gateway_connections_max), since this process may "
                                                 f"have {files} files open")

    def report(self, event: Event, text: str) -> None:
        log_event(self.kind, self.root, event, text)

    def take_settings(self, service: Service) -> None:
        """Give the run settings to the service if they have changed since the last call."""
        number = waiting.load_sequence(self.memory.control.settings_seq)
        if number != self._settings_seq:
            try:
                service.take_settings(read_run_settings(self.memory.folder))
            except EngineUnavailableError:  # the name of the settings was removed: the engine is about to stop
                return
            self._settings_seq = number
            native.store(self.memory.control.workers[self.kind], "settings_seq", number)

    def heartbeat(self, *, worked: bool = False) -> None:
        """Record a heartbeat; call it once a round, so that the heartbeat means progress."""
        self.control_line.record_heartbeat(worked=worked)
        self._log.tick()
        self._check_names()
        if self._watchdog_s is not None:
            now_s = time.monotonic()
            if now_s >= self._watchdog_due_s:
                self._watchdog_due_s = now_s + self._watchdog_s
                notify("WATCHDOG=1")

    def _check_names(self) -> None:
        """End in order if the supervisor is dead and no successor can attach to this engine, since names were removed."""
        now_s = time.monotonic()
        if now_s < self._names_due_s or self._stop_requested:
            return
        self._names_due_s = now_s + NAMES_CHECK_INTERVAL_S
        if not self._is_lost:
            line = self.memory.control.workers[native.SUPERVISOR]
            try:
                if is_alive(native.load(line, "pid"), native.load(line, "start_time_ms")):  # far cheaper than checking the names
                    return
                loss, missing = self.store.loss(), self.memory.missing_names()
            except OSError as error:
                if error.errno not in TRANSIENT_ERRNOS:
                    raise
                return  # it lacks descriptors, say, and cannot look now
            if not loss and not missing:
                return
            self._is_lost = True
            # As the supervisor would if it lived.
            native.refuse_puts(self.memory.control, native.REFUSE_STOPPING | (native.REFUSE_LOST if loss else 0))
            self.report(Event.STORE_LOST if loss else Event.NAMES_REMOVED,
                        f"no supervisor runs, and {loss.sentence if loss else removed_names(missing)}, so that none can take over: "
                        "finishing what is published, then ending")
        rank = next(kind.stop_rank for kind in KINDS if kind.number == self.kind)
        if not any(self.lock.kind_taken(kind.number) for kind in KINDS if kind.stop_rank < rank):
            self._stop_requested = True

    def run(self, service: Service) -> None:
        """Run the waiting loop (native/waiting.py) until the worker must stop: arm, check again, sleep. Then drain.

        While there is work the latch stays unarmed, so that other processes need not wake this one.
        """
        armed = False
        while not self.stopping:
            self.take_settings(service)
            began_ns = monotonic_ns()
            self.recorder.check_stopped(began_ns)
            worked = service.work()
            if service.records_rounds and (took_ns := monotonic_ns() - began_ns) >= THRESHOLD_NS:
                self.recorder.note("round", began_ns, took_ns)
            if worked:
                if service.never_idle:
                    self.publish_blocked_reason(service)
                if armed:
                    self.latch.disarm()
                    armed = False
                self.heartbeat(worked=True)
                continue
            self.publish_blocked_reason(service)
            self.heartbeat()
            if not armed:
                self.latch.arm()
                armed = True  # and check once more: a wake-up before arming was not posted
                continue
            if service.wait(self.latch, min(service.pause_s(), PAUSE_S_MAX)):
                self.heartbeat(worked=True)
            armed = False
        self.control_line.state(native.WORKER_STOPPING)
        notify("STOPPING=1")
        self.recorder.check_stopped(monotonic_ns())
        while not self.memory.retired and service.drain():
            self.heartbeat(worked=True)
        self.publish_blocked_reason(service)

    def publish_blocked_reason(self, service: Service) -> None:
        self.set_blocked_reason(service.blocked_reason, service.blocked_errno)

    def close(self, *, failed: bool = False) -> None:
        """Note in the control block that this worker ends, and release the lock."""
        self.control_line.state(native.WORKER_FAILED if failed else native.WORKER_ABSENT)
        self.memory.wake(native.SUPERVISOR)
        if self._is_lost and not any(self.lock.kind_taken(kind.number) for kind in KINDS if kind.number != self.kind):
            self.memory.retire()  # the last worker tells producers to detach: no next engine finds the memory that they have mapped
        self.recorder.close()
        self.memory.close()
        self.lock.close()


def attach(kind: int, root: Path, wait_s: float, descriptor: int = -1) -> Worker:
    """Wait for the store's owner and attach as its only worker of this kind.

    `descriptor`: the store's folder, which the supervisor holds open; without one the folder at `root` is opened.
    EngineUnavailableError after `wait_s`, or at once if that folder was removed, says what was missing; StoreBusyError: another
    worker of this kind runs.
    """
    began_s = time.monotonic()
    while True:
        try:
            return _attach_now(kind, root, descriptor)
        except EngineUnavailableError as error:
            if descriptor >= 0 and os.fstat(descriptor).st_nlink == 0:
                raise EngineUnavailableError(f"{root} was removed") from None
            if time.monotonic() - began_s >= wait_s:
                raise EngineUnavailableError(f"waited {wait_s:g} s for the owner of {root}: {error}") from None
        time.sleep(POLL_INTERVAL_S if time.monotonic() - began_s < 1 else LATE_POLL_INTERVAL_S)


def _attach_now(kind: int, root: Path, descriptor: int) -> Worker:
    with contextlib.ExitStack() as on_error:
        try:
            store = HeldStore(root, descriptor)
        except (FileNotFoundError, NotADirectoryError):
            raise EngineUnavailableError("there is no such folder") from None
        if descriptor < 0:
            on_error.callback(store.close)
        root = store.root
        folder = find_folder(root)
        with EngineMemory.attach(folder, writable=False) as seen:
            _check_owner(root, seen)
            lock = StoreLock(root)
            on_error.callback(lock.close)
            if not lock.share():
                raise EngineUnavailableError("the store is being recovered, or open in a RocketMQ broker")
            _check_owner(root, seen)
            lock.take_kind(kind)
            memory = EngineMemory.attach(folder)
            on_error.callback(memory.close)
            worker = Worker(kind, store, memory.open_latches(), lock)
        on_error.pop_all()
        return worker


def _check_owner(root: Path, memory: EngineMemory) -> None:
    """Check that the control block belongs to a living supervisor: otherwise a dead engine's block looks the same."""
    line = memory.control.workers[native.SUPERVISOR]
    if memory.retired or memory.state not in SERVING_STATES:
        raise EngineUnavailableError("the engine is not running yet, or not any more")
    if native.SUPERVISOR not in living_kinds(root, 1):
        raise EngineUnavailableError(f"no supervisor is running: start it with {command('start', root)}")
    if not is_alive(native.load(line, "pid"), native.load(line, "start_time_ms")):
        raise EngineUnavailableError("the shared memory belongs to a dead engine; its successor is not ready yet")


def _arguments(kind: int, what: str) -> argparse.Namespace:
    """Parse STORE [--wait S] of this process; `what` is the description in --help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m pyengine.workers.{KIND_NAMES[kind]}", description=what,
        epilog="SIGTERM: finish what is published, exit 0; SIGHUP, SIGUSR1: nothing (the supervisor reads settings again). "
               "The store's supervisor must run (pyengine start, or python -m pyengine.workers.supervisor STORE --no-children).")
    parser.add_argument("store", type=Path, metavar="STORE", help="root directory of the store")
    parser.add_argument("--set", action="append", help=argparse.SUPPRESS)  # of an earlier version's supervisor: without effect
    parser.add_argument("--wait", type=float, default=OWNER_WAIT_S, metavar="S",
                        help="how long to wait for the owner (%(default)s)")
    parser.add_argument("--store-fd", type=int, default=-1, metavar="FD", help="descriptor of that directory, from the supervisor")
    return parser.parse_args()


def main(kind: int, what: str, make_service: Callable[[Worker], Service]) -> Callable[[], int]:
    """Return the main of a worker: it runs from start to end, with the arguments of its process, and returns the exit code."""
    return run(kind, what, lambda worker: _serve(worker, make_service))


def run(kind: int, what: str, serve: Callable[[Worker], None]) -> Callable[[], int]:
    """Like main(), for a worker with its own loop: serve(worker) calls ready() and heartbeat(), and reads `stopping`."""
    def run_worker() -> int:
        begin_process()
        faulthandler.enable()  # a worker that is aborted for an old heartbeat (SIGABRT) prints a stack trace
        for number in (signal.SIGHUP, signal.SIGUSR1):  # the supervisor reads the settings; each worker checks its log by itself
            signal.signal(number, signal.SIG_IGN)
        began_s = time.monotonic()
        code = _run(kind, what, serve)
        if code == WorkerExit.TEMPFAIL:
            pause_before_restart(time.monotonic() - began_s)
        return code

    return run_worker


def _run(kind: int, what: str, serve: Callable[[Worker], None]) -> int:
    arguments = _arguments(kind, what)
    try:
        if arguments.store_fd >= 0:
            os.set_inheritable(arguments.store_fd, False)
        worker = attach(kind, arguments.store, arguments.wait, arguments.store_fd)
    except StoreBusyError as error:
        log_event(kind, arguments.store, Event.START_FAILED, str(error))
        return WorkerExit.ALREADY_RUNNING
    except (EngineError, OSError) as error:
        if not may_pass(error) and not isinstance(error, EngineError):
            raise
        why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
        log_event(kind, arguments.store, Event.START_FAILED, f"cannot start: {why}")
        notify(f"STATUS=cannot start: {' '.join(why.split())}")
        return WorkerExit.TEMPFAIL if may_pass(error) else WorkerExit.BOOT_FAILED
    served = False
    try:
        try:
            serve(worker)
        except AttributeError as error:
            if "cffi library" in str(error):
                raise BootFailedError(f"{error}: the C module was built from other sources: install pyengine again") from error
            raise
        served = True
    except BootFailedError as error:
        worker.set_blocked_reason(f"cannot start: {error}")
        worker.report(Event.START_FAILED, f"cannot start: {error}")
        notify(f"STATUS=cannot start: {' '.join(str(error).split())}")
        return WorkerExit.TEMPFAIL if may_pass(error) else WorkerExit.BOOT_FAILED
    except Exception as error:
        why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
        worker.set_blocked_reason(f"it ended and is started again: {why}")
        if not may_pass(error):
            raise
        worker.report(Event.WORKER_FAILED, why)
        return WorkerExit.TEMPFAIL
    finally:
        worker.close(failed=not served)
    return WorkerExit.CLEAN


def may_pass(error: BaseException) -> bool:
    """Whether the cause of an error may be gone at the next try: no disk space, descriptor or memory, a read-only disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (OSError, DiskError)) and cause.errno in TRANSIENT_ERRNOS:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _serve(worker: Worker, make_service: Callable[[Worker], Service]) -> None:
    try:
        service = make_service(worker)
    except EngineError as error:
        raise BootFailedError(str(error)) from error
    try:
        worker.ready()
        worker.run(service)
    finally:
        service.close()
