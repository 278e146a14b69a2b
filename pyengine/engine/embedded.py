"""Run an engine from Python: embed it, start and stop it, or connect to it.

    with pyengine.Engine(path, flush_disk_type="SYNC_FLUSH") as engine:   # workers as children, orderly stop at exit
        with engine.connect() as producer: ...
    with pyengine.connect(path) as producer: ...                          # to an engine that runs already

An engine is always a separate supervisor process and its workers. An embedded engine stops in
order when the process that embeds it ends, even if that process is killed or has forked
children: the supervisor watches it by a pidfd, and by a pipe whose other end only that process
has, so that the supervisor also notices an exec.
"""

from __future__ import annotations

import contextlib
import json
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
from typing import TYPE_CHECKING, Any

from pyengine.client.producer import connect as connect
from pyengine.engine import log_file
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
from pyengine.formats.small_file import keep_standard_descriptors, open_regular
from pyengine.ipc.control_block import EngineMemory, read_run_settings, require_same_settings
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.store_lock import kind_holder, living_kinds, name_processes, read_holder, require_startable
from pyengine.native import control as native
from pyengine.storage.commit_log import list_complete_log
from pyengine.storage.config import check_keywords, load_config, set_arguments
from pyengine.storage.file_system import HeldStore, refuse_shared
from pyengine.storage.message_store import require_space

if TYPE_CHECKING:
    from pyengine.client.producer import Producer
    from pyengine.engine_config import EngineConfig
    from pyengine.ipc.live_reader import LiveStoreReader

START_TIMEOUT_S = 3600.0  # recovery of a large store may take long; a dead supervisor is noticed at once
STOP_TIMEOUT_S = 60.0
_ERRORS = {ExitCode.USAGE: UsageError, ExitCode.CORRUPTION: CorruptionError, ExitCode.BUSY: StoreBusyError,
           ExitCode.DEGRADED: DegradedError}

Progress = Callable[[int, int], None]
_embedded: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in _embedded:
        engine._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Engine:
    """An engine that runs inside a `with` block, or between start() and stop(), as child processes.

    `path` is the store, which is created if it does not exist; `settings` are its settings (docs/configuration.md).
    `state` is "stopped", "running" or "degraded" (read-only), and `reason` says why it is degraded. The engine stops in order
    when the process that embeds it ends, even if that is killed. ConfigError for an unknown setting or value; start() raises
    StoreBusyError when another engine or a broker has the store open, CorruptionError when the store is too damaged to open,
    DiskFullError when the disk has no space for the first messages of a new store.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: object) -> None:
        check_keywords(Engine, settings)
        self.path = _absolute(path)
        self._settings = {name: _as_text(value) for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._store: HeldStore | None = None
        self.state = "stopped"
        self.reason = ""

    def start(self, progress: Progress | None = None) -> Engine:
        """Create or recover the store and start its workers; returns when it takes puts.

        `progress` is called with (bytes of the log done, all bytes) while the store is recovered.
        """
        if self._process is not None:
            raise UsageError(f"the engine on {self.path} is started already")
        _check_new_start(self.path, self._settings)
        embedder = os.pidfd_open(os.getpid())
        try:
            process, reading = _spawn_supervisor(self.path, self._settings, stdin=subprocess.PIPE, embedder=embedder)
        finally:
            os.close(embedder)
        self._process = process
        _embedded.add(self)
        try:
            ready = _wait_until_ready(process, reading, START_TIMEOUT_S, progress)
        except BaseException:
            self._process = None
            _request_stop(process)
            process.wait()
            raise
        with contextlib.suppress(OSError):  # the folder was moved or removed just now: stop() says so too
            self._store = HeldStore(self.path)
            self._store.watch()
        self.state, self.reason = str(ready["state"]), str(ready["reason"])
        return self

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop in order: flush everything, remove `abort`. EngineError if the engine does not stop, or not in order, in time.

        An engine that was too slow continues to stop; another call waits for it. EngineError too for an engine that has ended
        because its store was moved, removed or replaced; the text says where the store is.
        """
        process = self._process
        if process is None:
            return
        _request_stop(process)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _still_stopping(self.path, process.pid, timeout_s) from None
        self._process, self.state = None, "stopped"
        store, self._store = self._store, None
        try:
            if code not in (ExitCode.OK, ExitCode.DEGRADED):
                loss = store.loss() if store else None
                raise EngineError(f"the engine on {self.path} " + (f"has ended: {loss.sentence}" if loss else
                                  f"could not stop in order (exit code {code}): {_last_log_lines(self.path)}; the next start recovers it"))
        finally:
            if store is not None:
                store.close()

    def connect(self, **options: Any) -> Producer:
        """Return a producer that is connected to this engine; options as for pyengine.connect."""
        return connect(self.path, **options)

    def open_store(self) -> LiveStoreReader:
        """Return a reader of this engine's store, as pyengine.open_store does."""
        from pyengine.ipc.live_reader import open_store

        return open_store(self.path)

    def _forked(self) -> None:
        """In a forked child, give up the parent's engine. While the child had the pipe open, the parent's exec would go unnoticed."""
        if self._process is not None:
            _close_stdin(self._process)
            self._process.returncode = 0  # the supervisor is not a child of this process, which cannot wait for it
            self._process, self._store, self.state = None, None, "stopped"

    @property
    def pid(self) -> int | None:
        """The process id of the supervisor, None while stopped."""
        return self._process.pid if self._process else None

    def __repr__(self) -> str:
        return f"Engine({str(self.path)!r}, {self.state}{f', pid {self.pid}' if self.pid else ''})"

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stop()
        else:
            with contextlib.suppress(EngineError):  # the error that is being raised says more
                self.stop()


def start_engine(root: str | os.PathLike[str], settings: Mapping[str, object] | None = None, *,
                 progress: Progress | None = None, timeout_s: float = START_TIMEOUT_S) -> dict[str, object]:
    """Start an engine in the background, wait until it is ready and return its report; it outlives this process.

    The report: {"pid", "state": "running" | "degraded", "mode", "reason", "adopted", "recovery", "seconds"};
    adopted: the new supervisor took over the living workers of a dead one. The engine's log is STORE/engine.log.
    Raises StoreBusyError, CorruptionError, UsageError, EngineError. Ctrl-C before the engine is
    ready stops it in order and waits for its end (a second Ctrl-C ends the wait).
    """
    root = _absolute(root)
    texts = {name: _as_text(value) for name, value in (settings or {}).items()}
    _check_new_start(root, texts)
    process = None
    try:
        with deferred(signal.SIGINT):  # a process of unknown pid could not be stopped
            process, reading = _spawn_supervisor(root, texts, stdin=subprocess.DEVNULL)
        return {"pid": process.pid} | _wait_until_ready(process, reading, timeout_s, progress)
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
    if native.SUPERVISOR in living_kinds(root):
        pid = supervisor_pid(root)
        if pid is None:
            raise EngineUnavailableError(f"the supervisor of {root} cannot be found: it is starting or runs as another user")
        _signal_supervisor(root, pid, signal.SIGTERM, timeout_s)
    else:
        process, reading = _spawn_supervisor(root, {}, stdin=subprocess.DEVNULL, options=("--stop",))
        os.close(reading)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise _still_stopping(root, process.pid, timeout_s) from None
    if living := living_kinds(root):
        raise EngineError(f"the engine on {root} is not stopped: {name_processes(root, living)} live on: {_last_log_lines(root)}")
    if (root / "abort").exists():
        raise EngineError(f"the engine on {root} stopped, but not clean: {_last_log_lines(root)}; the next start recovers it")
    return True


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
    """Send a signal to the supervisor and wait for its end."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            signal.pidfd_send_signal(pidfd, number)
            if not selector.select(timeout_s):
                raise _still_stopping(root, pid, timeout_s)
    except PermissionError:
        raise EngineUnavailableError(f"the engine on {root} runs as another user: stop it as that user or as root") from None
    finally:
        os.close(pidfd)


def _still_stopping(root: Path, pid: int, timeout_s: float) -> EngineError:
    return EngineError(f"the engine on {root} (pid {pid}) is still stopping after {timeout_s:g} s; {root / log_file.NAME} tells what it "
                       f"waits for; alive: {name_processes(root, living_kinds(root))}")


def supervisor_pid(root: str | os.PathLike[str]) -> int | None:
    """Return the process id of the supervisor that runs, or starts, on `root`; None if there is none.

    The id comes from shared memory, or from the holder of the supervisor's lock if it is not there.
    """
    if native.SUPERVISOR not in living_kinds(root, 1):
        return None
    try:
        with EngineMemory.of(root) as memory:
            line = memory.control.workers[native.SUPERVISOR]
            pid, start_ms = native.load(line, "pid"), native.load(line, "start_time_ms")
        if is_alive(pid, start_ms):
            return pid
    except EngineUnavailableError:
        pass
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
    path = Path(root).absolute()
    return path.resolve() if ".." in path.parts else path


def _check_new_start(root: Path, settings: Mapping[str, str]) -> None:
    """Check, before a process is started, whatever can be checked here: the caller gets that error directly."""
    from pyengine.engine.bring_up import prepare_root, require_descriptors

    keep_standard_descriptors()
    refuse_shared(root)
    require_descriptors()
    require_startable(root)
    config = load_config(root, settings)
    require_space(root, config)
    prepare_root(root)
    if read_holder(root).kind == "none":
        list_complete_log(root, config.mapped_file_size_commit_log_bytes)
    if native.SUPERVISOR in living_kinds(root, 1):
        raise StoreBusyError(f"an engine is running on {root} already: any process uses it by pyengine.connect() and pyengine.consume(); "
                             f"{command('stop', root)} stops it")


def _request_stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the supervisor to stop, by SIGTERM too: a child that C code forked may still have the pipe to its stdin open."""
    process.terminate()
    _close_stdin(process)


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _spawn_supervisor(root: Path, settings: Mapping[str, str], *, stdin: int, embedder: int | None = None,
                      options: tuple[str, ...] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """Start a supervisor: (process, descriptor on which it reports). `embedder`: pidfd of the process that it must not outlive."""
    from pyengine.engine.kinds import child_environment, without_systemd

    keep_standard_descriptors()
    reading, writing = os.pipe2(os.O_CLOEXEC)
    kept: tuple[int, ...] = (writing,)
    if embedder is not None:
        kept, options = (writing, embedder), (*options, "--embedder-fd", str(embedder))
    try:
        with log_file.open_log(root) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(root), "--report-fd", str(writing), *options,
                 *set_arguments(settings)],
                stdin=stdin, stdout=log, stderr=log, pass_fds=kept, env=without_systemd(child_environment()), start_new_session=True,
                cwd="/")  # the directory of its starter, perhaps on another disk, must not stay in use
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
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


def _wait_until_ready(process: subprocess.Popen[bytes], reading: int, timeout_s: float,
                      progress: Progress | None) -> dict[str, object]:
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
                raise EngineError(f"the supervisor ended while starting (exit code {process.wait()})")
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                document = json.loads(line)
                if "progress" in document and progress is not None:
                    progress(*document["progress"])
                elif "error" in document:
                    process.wait()
                    raise _ERRORS.get(document["exit_code"], EngineError)(document["error"])
                elif "ready" in document:
                    return dict(document["ready"])


def _last_log_lines(root: Path) -> str:
    """Return the last lines of the engine's log, for an error message."""
    try:
        with open(open_regular(root / log_file.NAME), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 1000))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()[-3:]
    except OSError:
        return "no log"
    return " | ".join(line.partition("] ")[2] or line for line in lines)


def _as_text(value: object) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
