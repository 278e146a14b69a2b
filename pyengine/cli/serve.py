"""`pyengine serve`: runs the engine of a store and its gateway as the main process of a container, process 1 or not.

It starts the supervisor, and the metrics endpoint if requested. It reaps every process that ends, forwards signals, and
restarts a killed supervisor, which adopts the living workers. When the supervisor exits by itself (an orderly stop, a
refusal), this process exits with the same code. It opens no file of the store.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.config import broker_conf_option, with_broker_conf
from pyengine.cli.metrics import PORT, address_option
from pyengine.cli.output import json_option, set_option, store_argument
from pyengine.cli.plan import shared_memory_bytes
from pyengine.engine.kinds import child_environment
from pyengine.engine.log_file import log_line
from pyengine.errors import EngineUnavailableError, ExitCode, os_error_sentence
from pyengine.ipc.shared_objects import find_folder
from pyengine.native import waiting
from pyengine.settings import join_address
from pyengine.storage.config import STORE_SIGNS, EngineConfig, load_config, set_arguments
from pyengine.storage.file_system import file_system_of, free_bytes

TICK_S = 0.5
RESTART_PAUSE_S = 1.0
KILLED_MAX = 5             # kills of the supervisor within KILLED_WITHIN_S: then serve exits
KILLED_WITHIN_S = 60.0
SESSIONS_WANTED = 16       # producers for which shared memory must have room, in addition to the pool
QUEUES_WANTED = 1000
_TRANSIENT_ERRNOS = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}  # of posix_spawn(), which is tried again
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


@click.command()
@store_argument
@set_option
@json_option
@address_option("--metrics", default=None, help=f"Serve metrics and health checks at this address, as in 0.0.0.0:{PORT}.")
@broker_conf_option
def serve(
    store: Path, settings: dict[str, str], as_json: bool, metrics: tuple[str, int] | None, broker_conf: Path | None,
) -> int:
    """Run an engine with its gateway in the foreground. It is a container's main process.

    It logs on stderr (docs/containers.md). The gateway serves RocketMQ clients at 127.0.0.1:9876, unless
    gateway_enable=false.

    \b
    Examples:
      pyengine serve /data --metrics 0.0.0.0:9464 --set flush_disk_type=SYNC_FLUSH
    """
    settings, notes = with_broker_conf(broker_conf, store, settings)
    config = load_config(store, settings)
    if "gateway_enable" not in config.origins:  # clients outside of the container cannot use shared memory
        settings = {**settings, "gateway_enable": "true"}
        config = load_config(store, settings)
    directory, of_memory = shm_directory(store, config)
    notes += of_memory
    if as_json:
        output.write_json({"store": str(store), "shm_directory": directory, "notes": notes})
        sys.stdout.flush()
    for note in notes:
        write_line(f"note: {note}")
    chosen = {**settings, "shm_directory": directory}
    return Init(store.absolute(), chosen, "" if metrics is None else join_address(*metrics)).run()


def write_line(text: str) -> None:
    """Print one line on stderr, in the format of the engine's log."""
    print(log_line("serve", output.printable(text)), file=sys.stderr, flush=True)


# ---- shared memory ----------------------------------------------------------------------


def shm_directory(store: Path, config: EngineConfig, others: Sequence[str] | None = None) -> tuple[str, list[str]]:
    """Choose the folder of this engine's shared memory; return it and notes for the user.

    A setting wins, then the folder with the remains of an engine of this store. Otherwise it is /dev/shm, or, if that has less
    free than an engine with SESSIONS_WANTED and QUEUES_WANTED takes, one of `others` (writable tmpfs) with more room.
    """
    notes = []
    if config.pool_enabled:
        notes.append("what is acknowledged in the pool and not committed yet is in shared memory, which ends with the container; "
                     "an orderly stop commits it (docs/containers.md)")
    at = config.shm_directory
    if "shm_directory" in config.origins:
        return at, notes
    try:
        left = find_folder(store).path
        if left.exists():
            return str(left.parent), notes
    except EngineUnavailableError:
        pass
    wanted, here = shared_memory_bytes(config, SESSIONS_WANTED, QUEUES_WANTED), _free_bytes(at)
    if here >= wanted:
        return at, notes
    if others is None:
        others = ("/run", os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp")
    usable = [other for other in others if other and file_system_of(other) == "tmpfs" and os.access(other, os.W_OK | os.X_OK)]
    best = max(usable, key=_free_bytes, default=at)
    message = f"{at} has {output.size_text(here)} free, and this engine wants {output.size_text(wanted)}"
    if _free_bytes(best) > here:
        return best, [f"{message}: shared memory is in {best}", *notes]
    return at, [f"{message}: give the container more (--shm-size), smaller rings (session_ring_bytes), or a tmpfs as shm_directory; "
                "producers beyond that are refused", *notes]


def _free_bytes(folder: str) -> int:
    """Return the free bytes of a folder's file system; 0 if the folder does not exist."""
    try:
        return free_bytes(folder)
    except OSError:
        return 0


# ---- processes --------------------------------------------------------------------------


@dataclass
class _Process:
    words: Sequence[str]                     # the command line after the interpreter
    pid: int = 0                             # 0: it does not run
    due_s: float = 0.0                       # when to start it
    has_run: bool = False


class Init:
    """Runs the processes of the container until the engine has ended."""

    def __init__(self, store: Path, settings: Mapping[str, str], metrics: str = "") -> None:
        """`metrics`: HOST:PORT, or "" for no endpoint."""
        self._store = store
        self._environment = child_environment()
        self._code = int(ExitCode.OK)
        self._stopping = False
        self._killed_s: deque[float] = deque(maxlen=KILLED_MAX)  # the times at which the supervisor was killed
        self._supervisor = _Process(("-P", "-m", "pyengine.workers.supervisor", str(store), *set_arguments(settings)))
        self._metrics = _Process(("-P", "-m", "pyengine", "metrics", str(store), "--listen", metrics)) if metrics else None

    def run(self) -> int:
        """Run until the engine has ended and every process is reaped; return the engine's exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # sigtimedwait() receives them, one at a time
        for number in (signal.SIGHUP, signal.SIGUSR1):  # children inherit this, so they do not end by them before they install handlers
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, the kernel reaps
        if os.getpid() != 1:
            waiting.adopt_orphans()  # this process reaps workers whose supervisor was killed
        self._start(self._supervisor)
        while self._supervisor.pid or self._supervisor.due_s:
            self._start_what_is_due()
            found = signal.sigtimedwait(_SIGNALS, TICK_S)
            if found is not None:
                self._handle_signal(signal.Signals(found.si_signo))
            self._reap()
        self._stop_metrics()
        return self._code

    def _start(self, what: _Process) -> None:
        what.due_s = 0.0
        words = [*what.words, *(["--stop"] if self._stopping else [])]  # a supervisor that only stops living workers
        try:
            what.pid = os.posix_spawn(sys.executable, [sys.executable, *words], self._environment, setsigmask=[])
        except OSError as error:
            is_given_up = what is self._supervisor and error.errno not in _TRANSIENT_ERRNOS
            write_line(f"cannot start {words[2]}: {os_error_sentence(error)}; {'given up' if is_given_up else 'trying again'}")
            if is_given_up:
                self._code = int(ExitCode.FAILED)
            else:
                what.due_s = time.monotonic() + RESTART_PAUSE_S
        else:
            what.has_run = True

    def _start_what_is_due(self) -> None:
        now_s = time.monotonic()
        if not self._supervisor.pid and self._supervisor.due_s <= now_s:
            self._start(self._supervisor)
        metrics = self._metrics
        if metrics is None or metrics.pid or metrics.due_s > now_s or self._stopping:
            return
        if any((self._store / sign).exists() for sign in STORE_SIGNS):  # no metrics before the store exists
            self._start(metrics)

    def _handle_signal(self, number: signal.Signals) -> None:
        supervisor = self._supervisor
        if number in (signal.SIGTERM, signal.SIGINT):
            if not self._stopping:
                write_line(f"{number.name}: the engine is stopped in order")
            self._stopping = True
            # A supervisor that was just killed is restarted at once, with --stop, since its workers still run.
            supervisor.due_s = min(supervisor.due_s, time.monotonic()) if supervisor.has_run else 0.0
        if number is not signal.SIGCHLD and supervisor.pid:
            os.kill(supervisor.pid, signal.SIGTERM if number == signal.SIGINT else number)

    def _reap(self) -> None:
        """Reap every ended process, a child or an adopted orphan."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._supervisor.pid:
                self._supervisor.pid = 0
                self._handle_supervisor_end(status)
            elif self._metrics is not None and pid == self._metrics.pid:
                self._metrics.pid = 0
                self._metrics.due_s = time.monotonic() + RESTART_PAUSE_S
                if not self._stopping:
                    write_line(f"the metrics endpoint has ended ({_ended(status)}) and is started again")

    def _handle_supervisor_end(self, status: int) -> None:
        """Handle the supervisor's end: exit with it, or restart it if it was killed."""
        if os.WIFEXITED(status):
            self._code = os.WEXITSTATUS(status)
            return
        now_s = time.monotonic()
        killed = self._killed_s
        killed.append(now_s)
        if len(killed) == KILLED_MAX and now_s - killed[0] < KILLED_WITHIN_S:
            write_line(f"the supervisor was killed {KILLED_MAX} times within {KILLED_WITHIN_S:g} s, the last time by {_ended(status)}: "
                       "given up")
            self._code = int(ExitCode.FAILED)
            return
        write_line(f"the supervisor was killed by {_ended(status)} and is started again: it adopts the living workers")
        self._supervisor.due_s = now_s + (0.001 if self._stopping else RESTART_PAUSE_S)

    def _stop_metrics(self) -> None:
        self._stopping = True
        metrics = self._metrics
        if metrics is not None and metrics.pid:
            os.kill(metrics.pid, signal.SIGTERM)
            while metrics.pid:
                signal.sigtimedwait({signal.SIGCHLD}, TICK_S)
                self._reap()


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"
