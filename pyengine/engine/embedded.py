"""Run an engine from Python: embed it, start and stop it, or connect to it.

An engine is always a separate supervisor process and its workers. An embedded engine stops in
order when the process that embeds it ends, even if that process is killed or has forked
children: the supervisor watches it by a pidfd, and by a pipe whose other end only that process
has, so that the supervisor also notices an exec. An engine that processes share belongs to none of them:
locks say which processes use it (SharingLock), and its supervisor waits for the end of the last one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Unpack

from pyengine import arguments
from pyengine.client.producer import ConnectOptions, Producer
from pyengine.client.producer import connect as connect
from pyengine.engine import log_file
from pyengine.engine.kinds import child_environment, restart_pause_s, without_systemd
from pyengine.engine_config import EngineConfig, EngineSettings
from pyengine.errors import (
    CorruptionError,
    DegradedError,
    EngineError,
    EngineUnavailableError,
    ExitCode,
    StoreBusyError,
    UsageError,
    command,
)
from pyengine.formats.small_file import closed_on_error, keep_standard_descriptors, opened
from pyengine.ipc.control_block import EngineMemory, read_run_settings, require_same_settings, restart_differences
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import (
    SharingLock,
    how_to_use,
    kind_holder,
    living_kinds,
    name_processes,
    read_holder,
    require_startable,
    sentence_if_unseen,
)
from pyengine.native import control as native
from pyengine.storage.checkpoint import abort_file_exists
from pyengine.storage.commit_log import list_complete_log
from pyengine.storage.config import check_keywords, config_path, load_config, set_arguments
from pyengine.storage.engine_id import read_epoch
from pyengine.storage.file_system import HeldStore, refuse_shared
from pyengine.storage.message_store import require_space

START_TIMEOUT_S = 3600.0  # recovery of a large store may take long; a dead supervisor is noticed at once
STOP_TIMEOUT_S = 60.0
FOUND_TIMEOUT_S = 1.0  # for a supervisor that lives: one that is just ending has its lock for longer than a command line
POLL_INTERVAL_S = 0.02
STARTS_MAX = 3  # of one process, if the supervisor is killed while it starts
LOOK_INTERVAL_S = 1.0  # at which a process looks whether the engine that it shares has crashed
_ERRORS = {ExitCode.USAGE: UsageError, ExitCode.CORRUPTION: CorruptionError, ExitCode.BUSY: StoreBusyError,
           ExitCode.DEGRADED: DegradedError}

Progress = Callable[[int, int], None]
_LOG = logging.getLogger("pyengine.engine")


class Engine(arguments.AsyncBlock):
    """An engine of child processes, inside a `with` block or between start() and stop().

    It creates a store if there is none, and stops in order when its process ends, even if killed.

    `shared=True`: several processes share it (docs/processes.md). One that another program has started is used and not stopped.

    start(): StoreBusyError if another engine, a broker, or processes with other settings have the store; CorruptionError;
    DiskFullError without space for the first messages.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False, **settings: Unpack[EngineSettings]) -> None:
        check_keywords(Engine, settings)
        self.path = _absolute(path)
        self._settings = {name: _as_text(value) for name, value in settings.items()}
        self._shared = _SharedEngine(self.path, self._settings) if shared else None
        if self._shared:
            weakref.finalize(self, _drop, self._shared).atexit = False
        self._process: subprocess.Popen[bytes] | None = None
        self._store: HeldStore | None = None
        self._seen = "stopped", ""

    def start(self, progress: Progress | None = None) -> Engine:
        """Create or recover the store; returns when it takes puts."""
        if self._process is not None or self._shared and self._shared.is_joined:
            raise UsageError(f"the engine on {self.path} is started already")
        if self._shared:
            self._shared.join(progress)
            _leave_dropped(self.path)
            arguments.after_fork(self._shared)
            self._look()
            return self
        _check_new_start(self.path, self._settings)
        _refuse_second(self.path)
        with opened(os.pidfd_open(os.getpid())) as embedder:
            process, reading = spawn_supervisor(self.path, self._settings, stdin=subprocess.PIPE, embedder=embedder)
        self._process = process
        arguments.after_fork(self)
        try:
            _wait_until_ready(self.path, process, reading, START_TIMEOUT_S, progress)
        except BaseException:
            self._process = None
            _request_stop(process)
            process.wait()
            raise
        self._store = _watched_store(self.path)
        self._look()
        return self

    @property
    def state(self) -> str:
        """"stopped", "running" or "degraded" (read-only)."""
        return self._look()[0]

    @property
    def reason(self) -> str:
        """Why it is degraded or cannot be started again."""
        return self._look()[1]

    def _look(self) -> tuple[str, str]:
        with contextlib.suppress(EngineError):  # no file can be opened, for example: it is as it was seen last
            self._seen = self._shared.look() if self._shared else self._is_up and _find_state(self.path) or ("stopped", "")
        return self._seen

    @property
    def _is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop in order; a shared engine only if no other process uses it.

        EngineError if it does not stop in time, or its store was moved, removed or replaced.
        """
        if self._shared and self._shared.is_joined:
            _leave_dropped(self.path)
            self._shared.leave(timeout_s)
        process = self._process
        if process is None:
            return
        with _told(self.path) as why:
            _request_stop(process)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise _still_stopping(self.path, process.pid, timeout_s) from None
            self._process = None
            store, self._store = self._store, None
            with contextlib.nullcontext() if store is None else contextlib.closing(store):
                if code not in (ExitCode.OK, ExitCode.DEGRADED):
                    loss = store.loss() if store else None
                    if not loss and (living := living_kinds(self.path)) and native.SUPERVISOR not in living:
                        _stop(self.path, None, timeout_s)
                        raise EngineError(f"the supervisor of {self.path} ended before its workers (exit code {code}), which have been "
                                          "stopped in order")
                    raise EngineError(f"the engine on {self.path} " + (f"has ended: {loss.sentence}" if loss else
                                      f"could not stop in order (exit code {code}): {why()}; the next start recovers it"))

    def connect(self, **options: Unpack[ConnectOptions]) -> Producer:
        """Return as pyengine.connect, at once: EngineUnavailableError while this Engine is stopped, unless another one runs."""
        if self._shared and self._shared.is_joined:
            self._shared.keep()
        elif not self._is_up and not living_kinds(self.path):
            how = "start() it, or connect inside its `with` block" if self._process is None else "it has ended: stop() it, then start()"
            raise EngineUnavailableError(f"the engine on {self.path} is stopped: {how}")
        producer = connect(self.path, **options)
        if self._shared:
            producer._kept = self  # it may be all that a program keeps
        return producer

    def open_store(self) -> LiveStoreReader:
        """Return as pyengine.open_store."""
        return open_store(self.path)

    def _forked(self) -> None:
        """In a forked child, give up the parent's engine. While the child had the pipe open, the parent's exec would go unnoticed."""
        if self._process is not None:
            _close_stdin(self._process)
            self._process.returncode = 0  # the supervisor is not a child of this process, which cannot wait for it
            self._process, self._store = None, None

    @property
    def pid(self) -> int | None:
        """Of the supervisor, None while stopped."""
        if self._shared:
            return supervisor_pid(self.path) if self._shared.is_joined else None
        return self._process.pid if self._process and self._is_up else None

    def __repr__(self) -> str:
        pid = None
        with contextlib.suppress(EngineError):
            pid = self.pid
        return f"Engine({str(self.path)!r}, {self.state}{f', pid {pid}' if pid else ''})"

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stop()
        else:
            with contextlib.suppress(EngineError):  # the error that is being raised says more
                self.stop()

    async def __aenter__(self) -> Engine:
        import asyncio  # as of arguments.running_loop()

        loop, came = arguments.event_loop(), list[str]()  # in this order; an append is one step for all threads

        def start() -> None:
            self.start()
            came.append("start")
            if came[0] == "end":  # its caller has gone meanwhile
                self.stop()

        started = arguments.own_thread(start)
        try:
            await asyncio.wrap_future(started, loop=loop)
        except BaseException:  # cancelled, for example: the thread goes on
            came.append("end")
            if came[0] == "start":
                await arguments.in_thread(self.stop)
            elif not started.done():
                loop.run_in_executor(None, started.exception)  # asyncio.run() waits for the thread
            raise
        return self


class _StartEndedError(EngineError):
    """A supervisor has ended without a word while it started."""


def _find_state(root: Path) -> tuple[str, str] | None:
    """Return state and reason of the engine that runs; None while none does, or while one starts or stops."""
    if native.SUPERVISOR not in living_kinds(root, 1) or read_holder(root).kind != "engine":
        return None
    try:
        with EngineMemory.of(root) as memory:
            if memory.retired or memory.identity.epoch != read_epoch(root):
                return None
            states = {native.STATE_RUNNING: "running", native.STATE_READ_ONLY: "degraded", native.STATE_DEGRADED: "degraded"}
            state = states.get(memory.state)
            return (state, native.reason(memory.control)) if state else None
    except EngineUnavailableError:
        return None


class _SharedEngine:
    """An engine that several processes share, as one of them uses it: it starts one if none runs, also after a crash."""

    def __init__(self, root: Path, settings: Mapping[str, str]) -> None:
        self._root = root
        self._settings = settings
        self._lock = SharingLock(root)
        self._store: HeldStore | None = None
        self._ends_with_users = False
        self._ended_starts = 0
        self._reason = ""  # why it cannot be started again
        self.is_joined = False
        self._forked()

    def _forked(self) -> None:
        """Forget what a forked child does not have: the thread that looks after the engine. Its copy of the lock's descriptor stays."""
        self._leaving = threading.Event()
        self._keeper: threading.Thread | None = None
        self._keeper_lock = threading.Lock()

    def join(self, progress: Progress | None) -> None:
        """Use the engine from now on, and start it if none runs. Raises as Engine.start()."""
        keep_standard_descriptors()
        config = load_config(self._root, self._settings)
        if native.SUPERVISOR not in living_kinds(self._root, 1):
            _check_new_start(self._root, self._settings)
        try:
            self._wait_for_engine(progress)
            with EngineMemory.of(self._root) as memory:
                clauses = restart_differences(config, read_run_settings(memory.folder))
            if clauses:
                raise StoreBusyError(f"the engine on {self._root} is shared and runs with other settings: {'; '.join(clauses)}: give all "
                                     f"processes the same, for example in {config_path(self._root)}")
        except BaseException:
            self._lock.leave()
            raise
        self._store = _watched_store(self._root)
        self._reason, self.is_joined = "", True
        self.keep()

    def _wait_for_engine(self, progress: Progress | None) -> None:
        deadline_s, seen_by_s = time.monotonic() + START_TIMEOUT_S, time.monotonic() + LOOK_INTERVAL_S
        is_user = False
        while True:
            is_user = is_user or self._lock.enter()  # not while the last engine stops
            if is_user and _find_state(self._root) is not None:
                self._ends_with_users = self._lock.is_watched
                return
            if is_user:
                self._start_if_none(progress)
            if time.monotonic() > seen_by_s:
                self._require_seen()
            if time.monotonic() > deadline_s:
                raise EngineError(f"the engine on {self._root} is not ready after {START_TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)

    def _require_seen(self) -> None:
        """Raise EngineUnavailableError if the engine that lives runs where this process cannot see it: waiting does not help then."""
        if native.SUPERVISOR not in living_kinds(self._root, 1) or kind_holder(self._root, native.SUPERVISOR) is not None:
            return
        living = living_kinds(self._root)
        if native.SUPERVISOR in living and (why := sentence_if_unseen(self._root, find_folder(self._root), living)):
            raise EngineUnavailableError(f"the engine on {self._root} cannot be shared: {why}")

    def _start_if_none(self, progress: Progress | None = None) -> None:
        """Start the engine, unless a supervisor lives, or another process is starting one."""
        if native.SUPERVISOR in living_kinds(self._root, 1):
            return
        with self._lock.starting() as is_starter:
            if not is_starter or native.SUPERVISOR in living_kinds(self._root, 1):
                return
            process, reading = spawn_supervisor(self._root, self._settings, stdin=subprocess.DEVNULL, options=("--shared",))
            try:
                _wait_until_ready(self._root, process, reading, START_TIMEOUT_S, progress)
            except _StartEndedError:  # killed, like any process of the engine: start it again
                self._ended_starts += 1
                if self._ended_starts >= STARTS_MAX:
                    self._ended_starts = 0
                    raise EngineError(f"the supervisor of {self._root} was killed while it started, {STARTS_MAX} times") from None
            except StoreBusyError:
                if native.SUPERVISOR not in living_kinds(self._root, 1):  # it is not `pyengine start` that came first
                    raise
            else:
                self._ended_starts = 0
            finally:
                process.wait()  # the process that forked the supervisor

    def look(self) -> tuple[str, str]:
        """Return state and reason of the engine as it is now, ("stopped", ...) before join() and after leave()."""
        found = _find_state(self._root) if self.is_joined else None
        return found or ("stopped", self._reason)

    def keep(self) -> None:
        """Look after the engine from a thread of this process; the thread of the process that forked this one is not here."""
        with self._keeper_lock:
            if self._keeper is None and self.is_joined:
                self._keeper = threading.Thread(target=self._keep, args=(self._leaving,), name="pyengine-sharing", daemon=True)
                self._keeper.start()

    def _keep(self, leaving: threading.Event) -> None:
        """Start an engine that has crashed. It looks twice: `pyengine start --take-over` replaces a supervisor meanwhile."""
        absent = failures = 0
        while not leaving.wait(max(LOOK_INTERVAL_S, restart_pause_s(failures))):
            try:
                if native.SUPERVISOR in living_kinds(self._root, 1):
                    absent, self._ends_with_users = 0, self._lock.is_watched
                    continue
                absent += 1
                if absent > 1 and self._has_crashed():
                    self._start_if_none()
                    absent = 0
                failures, self._reason = 0, ""
            except (EngineError, OSError) as error:
                failures, self._reason = failures + 1, str(error)
                _LOG.warning("the engine that is shared cannot be started again: %s", error)

    def _has_crashed(self) -> bool:
        """Whether the engine has ended without being asked to: then the processes that share it start it again."""
        if not self._ends_with_users or self._store is None or self._store.loss():
            return False
        try:
            with EngineMemory.of(self._root) as memory:
                return not native.load(memory.control.state, "refuse_puts") & native.REFUSE_STOPPING
        except EngineUnavailableError:
            return bool(living_kinds(self._root)) or abort_file_exists(self._root)

    def leave(self, timeout_s: float) -> None:
        """Use the engine no more. If no process does then, it stops: wait for its end. Raises as Engine.stop()."""
        deadline_s = time.monotonic() + timeout_s
        self._leaving.set()
        if self._keeper is not None:
            self._keeper.join(timeout_s)
        store = self._store
        with contextlib.nullcontext() if store is None else contextlib.closing(store), _told(self._root) as why:
            try:
                living = living_kinds(self._root)
                if native.SUPERVISOR in living:
                    self._ends_with_users = self._lock.is_watched
                elif living and self._has_crashed():
                    self._start_if_none()  # a supervisor that adopts the living workers, and stops them
            finally:
                self._lock.leave()
                self.is_joined, self._store = False, None
                self._forked()
            self._wait_for_end(deadline_s, timeout_s, store, why)

    def _wait_for_end(self, deadline_s: float, timeout_s: float, store: HeldStore | None, why: Callable[[], str]) -> None:
        """Wait until the engine has stopped, or another process uses it."""
        if not self._ends_with_users:
            return
        while not (is_used := self._lock.has_users) and native.SUPERVISOR in living_kinds(self._root, 1):
            if time.monotonic() > deadline_s:
                raise _still_stopping(self._root, supervisor_pid(self._root) or 0, timeout_s)
            time.sleep(POLL_INTERVAL_S)
        loss = store.loss() if store is not None else None
        is_unclean = abort_file_exists(self._root)
        if is_used or self._lock.has_users:  # the others may have left meanwhile, and wait for the end themselves
            return
        if loss:
            raise EngineError(f"the engine on {self._root} has ended: {loss.sentence}")
        if is_unclean:
            raise EngineError(f"the engine on {self._root} did not stop in order: {why()}; the next start recovers it")


_dropped: set[_SharedEngine] = set()  # used until this process ends, or starts or stops another Engine on the same store


def _drop(shared: _SharedEngine) -> None:
    if shared.is_joined:
        _dropped.add(shared)


def _leave_dropped(root: Path) -> None:
    """Leave what this process dropped without stop(), as a cell of a notebook does that runs again. Another Engine uses it still."""
    for each in _dropped.copy():
        if os.path.realpath(each._root) == os.path.realpath(root):
            with contextlib.suppress(KeyError, EngineError, OSError):  # another thread leaves it, or it has ended
                _dropped.remove(each)
                each.leave(STOP_TIMEOUT_S)


def _watched_store(root: Path) -> HeldStore | None:
    """Hold the store's folder, to know what happens to it; None if it was moved or removed just now: stop() says so too."""
    with contextlib.suppress(OSError):
        store = HeldStore(root)
        store.watch()
        return store
    return None


def start_engine(root: str | os.PathLike[str], settings: Mapping[str, object] | None = None, *,
                 progress: Progress | None = None, timeout_s: float = START_TIMEOUT_S,
                 on_wait: Callable[[str], None] | None = None) -> dict[str, object]:
    """Start an engine in the background, wait until it is ready and return its report; it outlives this process.

    `on_wait` is told for which master a new slave waits, and why.

    The report: {"pid", "state": "running" | "degraded", "mode", "reason", "adopted", "recovery", "seconds"};
    adopted: the new supervisor took over the living workers of a dead one. The engine's log is STORE/engine.log.
    Raises StoreBusyError, CorruptionError, UsageError, EngineError. Ctrl-C before the engine is
    ready stops it in order and waits for its end (a second Ctrl-C ends the wait).
    """
    root = _absolute(root)
    texts = {name: _as_text(value) for name, value in (settings or {}).items()}
    _check_new_start(root, texts)
    _refuse_second(root)
    process = None
    try:
        with deferred(signal.SIGINT):  # a process of unknown pid could not be stopped
            process, reading = spawn_supervisor(root, texts, stdin=subprocess.DEVNULL)
        return _wait_until_ready(root, process, reading, timeout_s, progress, on_wait)
    except KeyboardInterrupt:
        if process is not None:
            process.terminate()
            process.wait()
        raise


def stop_engine(root: str | os.PathLike[str], timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Stop the engine on `root` in order and wait for its end; False if none was running.

    If its supervisor is dead, a new one adopts the living workers and stops them. EngineError if a process of
    the engine still runs, or if the engine did not stop clean.
    """
    root = Path(root).absolute()
    if not living_kinds(root):
        lock = root / "lock"
        if lock.exists() and not os.access(lock, os.R_OK):
            raise EngineUnavailableError(f"{lock} cannot be read, so it is not known whether an engine runs: permission denied")
        return False
    found_by_s = time.monotonic() + FOUND_TIMEOUT_S
    while (pid := supervisor_pid(root)) is None and native.SUPERVISOR in living_kinds(root, 1):
        if time.monotonic() > found_by_s:
            raise EngineUnavailableError(f"the supervisor of {root} cannot be found: it is starting or runs as another user or in another "
                                         "pid namespace")
        time.sleep(POLL_INTERVAL_S)
    _stop(root, pid, timeout_s)
    return True


def _stop(root: Path, pid: int | None, timeout_s: float) -> None:
    """Stop the engine of this supervisor; None: that of workers without one, and no supervisor that has come since."""
    with _told(root) as why:
        if pid is not None:
            _signal_supervisor(root, pid, signal.SIGTERM, timeout_s)
        elif living_kinds(root):
            process, reading = spawn_supervisor(root, {}, stdin=subprocess.DEVNULL, options=("--stop",))
            os.close(reading)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise _still_stopping(root, process.pid, timeout_s) from None
        if living := living_kinds(root):
            raise EngineError(f"the engine on {root} is not stopped: {name_processes(root, living)} live on: {why()}")
        if (root / "abort").exists():
            raise EngineError(f"the engine on {root} stopped, but not clean: {why()}; the next start recovers it")


def end_supervisor(root: Path, asked: EngineConfig) -> None:
    """Kill the supervisor that runs on `root`, if there is one; its workers continue until a supervisor with `asked` adopts them.

    Raises before the kill if they could not be adopted: OtherLayoutError if this version of pyengine could not attach to them,
    StoreBusyError if they run with other settings.
    """
    if (pid := supervisor_pid(root)) is not None:
        with EngineMemory.of(root) as memory:
            memory.check_layouts()
            require_same_settings(root, asked, read_run_settings(memory.folder))
        _signal_supervisor(root, pid, signal.SIGKILL, STOP_TIMEOUT_S)


def _signal_supervisor(root: Path, pid: int, number: int, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with opened(pidfd), selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        try:
            signal.pidfd_send_signal(pidfd, number)
        except PermissionError:
            raise EngineUnavailableError(f"the engine on {root} runs as another user: stop it as that user or as root") from None
        if not selector.select(timeout_s):
            raise _still_stopping(root, pid, timeout_s)


def _still_stopping(root: Path, pid: int, timeout_s: float) -> EngineError:
    return EngineError(f"the engine on {root} (pid {pid}) is still stopping after {timeout_s:g} s; {command('status', root)} and "
                       f"{root / log_file.NAME} tell what it waits for; alive: {name_processes(root, living_kinds(root))}")


def supervisor_pid(root: str | os.PathLike[str]) -> int | None:
    """Return the process id of the supervisor that runs, or starts, on `root`; None if there is none.

    The id comes from shared memory, or from the holder of the supervisor's lock if it is not there.
    """
    if native.SUPERVISOR not in living_kinds(root, 1):
        return None
    with contextlib.suppress(EngineUnavailableError), EngineMemory.of(root) as memory:
        line = memory.control.workers[native.SUPERVISOR]
        pid = native.load(line, "pid")
        if is_alive(pid, native.load(line, "start_time_ms")):
            return pid
    holder = kind_holder(root, native.SUPERVISOR)
    return holder if holder is not None and _is_supervisor(holder) else None


def _is_supervisor(pid: int) -> bool:
    """Whether the process is a supervisor: `pyengine recover`, for example, holds the same lock."""
    try:
        return b"pyengine.workers.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _absolute(root: str | os.PathLike[str]) -> Path:
    """Return an absolute path that leads through no folder which it leaves again (`..`): that one may be removed."""
    path = arguments.local_path(root).absolute()
    return path.resolve() if ".." in path.parts else path


def _check_new_start(root: Path, settings: Mapping[str, str]) -> None:
    """Check, before a process is started, whatever can be checked here: the caller gets that error directly."""
    from pyengine.engine.bring_up import prepare_root, require_descriptors

    _interpreter(root)  # or a UsageError
    keep_standard_descriptors()
    refuse_shared(root)
    require_descriptors()
    require_startable(root)
    config = load_config(root, settings)
    require_space(root, config)
    prepare_root(root)
    if read_holder(root).kind == "none":
        list_complete_log(root, config.mapped_file_size_commit_log_bytes)


def _refuse_second(root: Path) -> None:
    if native.SUPERVISOR in living_kinds(root, 1):
        raise StoreBusyError(f"an engine is running on {root} already: {how_to_use(root)}")


def _request_stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the supervisor to stop, by SIGTERM too: a child that C code forked may still have the pipe to its stdin open."""
    process.terminate()
    _close_stdin(process)


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _interpreter(root: Path) -> str:
    """Return the Python that runs a supervisor; UsageError in a program that is its own: it would start itself, again and again."""
    paths = (sys.executable, os.path.realpath(sys.executable)) if sys.executable else ()
    names = " ".join(map(os.path.basename, paths)).lower()
    if getattr(sys, "frozen", False) or "py" not in names or "uwsgi" in names:
        raise UsageError(f"this program cannot start an engine, since {sys.executable or 'sys.executable'} is no Python: start it with "
                         f"{command('start', root)}, and use pyengine.connect()")
    return sys.executable


def spawn_supervisor(root: Path, settings: Mapping[str, str], *, stdin: int, embedder: int | None = None,
                     options: tuple[str, ...] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """Start a supervisor: (process, descriptor on which it reports). `embedder`: pidfd of the process that it must not outlive."""
    keep_standard_descriptors()
    interpreter = _interpreter(root)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    kept: tuple[int, ...] = (writing,)
    if embedder is not None:
        kept, options = (writing, embedder), (*options, "--embedder-fd", str(embedder))
    with closed_on_error(reading), opened(writing), log_file.open_log(root) as log:
        try:
            process = subprocess.Popen(
                [interpreter, "-P", "-m", "pyengine.workers.supervisor", str(root), "--report-fd", str(writing), *options,
                 *set_arguments(settings)],
                stdin=stdin, stdout=log, stderr=log, pass_fds=kept, env=without_systemd(child_environment()), start_new_session=True,
                cwd="/")  # the directory of its starter, perhaps on another disk, must not stay in use
        except OSError as error:
            raise EngineError(f"the engine on {root} was not started: {interpreter} cannot be run: {error.strerror}") from None
    return process, reading


@contextlib.contextmanager
def deferred(*numbers: signal.Signals) -> Iterator[None]:
    """Defer these signals to the end of the block. Only the main thread handles signals, so that elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(came[-1])


def _wait_until_ready(root: Path, process: subprocess.Popen[bytes], reading: int, timeout_s: float, progress: Progress | None,
                      on_wait: Callable[[str], None] | None = None) -> dict[str, object]:
    """Read the supervisor's report until it is ready; return that document, or raise the error that it reports."""
    deadline_s = time.monotonic() + timeout_s
    pending = b""
    with os.fdopen(reading, "rb", buffering=0) as report, selectors.DefaultSelector() as selector:
        selector.register(report, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise EngineError(f"the engine is not ready after {timeout_s:g} s (pid {process.pid} is still starting)")
            data = report.read(65536)
            if not data:
                code, last = process.wait(), "".join(log_file.last_lines(root, 1))  # where it has left its reason
                raise _StartEndedError(f"the supervisor ended while starting (exit code {code}); {root / log_file.NAME} "
                                       + (f"ends with: {last}" if last else "says nothing"))
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                document = json.loads(line)
                if "progress" in document and progress is not None:
                    progress(*document["progress"])
                elif "waits" in document and on_wait is not None:
                    on_wait(document["waits"])
                elif "error" in document:
                    process.wait()
                    raise _ERRORS.get(document["exit_code"], EngineError)(document["error"])
                elif "ready" in document:
                    return dict(document["ready"])


@contextlib.contextmanager
def _told(root: Path) -> Iterator[Callable[[], str]]:
    """Yield a function that returns what an engine that stops has said of it: lines of its log, otherwise the reason in its memory."""
    since, memory = 0, None  # the whole log, if it has ended before
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(EngineError):
            since = log_file.length(root) if read_holder(root).kind == "engine" else 0
            memory = stack.enter_context(EngineMemory.of(root))

        def told() -> str:
            lines = [line.partition("] ")[2] or line for line in log_file.last_lines(root, 3, since)]
            return " | ".join(lines) or (native.reason(memory.control) if memory is not None else "") or "no log"

        yield told


def _as_text(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
