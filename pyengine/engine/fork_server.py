"""Fork server: a process beside the supervisor that has loaded the modules of all its workers and forks them.

Why: a new interpreter takes some 150 ms of CPU until a worker is ready, most of it for imports; a forked one takes 10 ms, and
shares that memory.

The supervisor forks its fork server before it takes a lock, opens shared memory or starts a thread, and the fork server
closes every descriptor except stdin, stdout, stderr, one socket and the store's folder: so it holds no lock or file of the
store. The supervisor
sends a request over that socket, together with one end of a socket pair, the gate. The fork server forks twice: the worker's
parent ends at once, so that the worker becomes a child of the supervisor, which adopts orphans and waits for it as for any
child. The worker sends its pid through the gate and runs only after the supervisor has answered; if the gate is closed, the
worker ends. So the supervisor knows every worker that runs, whichever of these processes is killed or stopped meanwhile.

The fork server ends with the supervisor: its socket is closed then, and the kernel sends it SIGKILL. When the fork server is
dead, does not answer in time, or cannot work in this environment, the supervisor starts workers by exec. Under systemd, with
--no-children, there is none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from pyengine.engine.kinds import Kind, child_environment, without_systemd
from pyengine.engine.log_file import LogFile
from pyengine.ipc.heartbeat import build_id
from pyengine.native import failpoints, waiting
from pyengine.storage.file_system import HeldStore

LOAD_TIMEOUT_S = 30.0   # for a fork server's first worker: it may still be loading modules
ANSWER_TIMEOUT_S = 5.0  # for each later worker; after that the worker is started by exec
REQUEST_BYTES_MAX = 65536
REPARENT_POLL_INTERVAL_S = 0.0002
_GO = b"go"
_LOADED_LATER = ("tomllib",)  # modules that all workers import inside functions


class ForkedWorker:
    """A child of this process that a fork server made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """Wait for its end and return its exit code as subprocess gives it; None if that is unknown."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None


class ForkServer:
    """The supervisor's side: starts the fork server, and asks it for workers."""

    def __init__(self, store: HeldStore, kinds: Iterable[Kind]) -> None:
        """Fork one for workers of these kinds. This process must have one thread, and hold no lock or shared memory of the store."""
        self._pid = 0  # 0: no fork server runs
        self._group = 0  # its process group, which may have children of this process after its end too
        self._channel: socket.socket
        self._timeout_s = LOAD_TIMEOUT_S
        if _suits_this_interpreter():
            with contextlib.suppress(OSError):  # no memory or too many processes for the moment
                self._fork(store, kinds)

    def _fork(self, store: HeldStore, kinds: Iterable[Kind]) -> None:
        waiting.adopt_orphans()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            _flush()
            gc.freeze()  # later collections do not write to the objects that exist now, so that their pages stay shared
            pid = os.fork()
            if pid == 0:
                end_with(lambda: _serve(store, kinds, theirs))
        with contextlib.suppress(OSError):  # the child does the same: whichever comes first
            os.setpgid(pid, pid)
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._pid, self._group, self._channel = pid, pid, ours

    def start_worker(self, words: Sequence[str]) -> ForkedWorker | None:
        """Fork the worker of the command line PYTHON -P -m MODULE ARGUMENT...; None: the caller must start it by exec."""
        self.tick()
        request = json.dumps(list(words)).encode()
        if self._pid == 0 or len(request) > REQUEST_BYTES_MAX:
            return None
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with gate:
            try:
                with theirs:
                    socket.send_fds(self._channel, [request], [theirs.fileno()])
                gate.settimeout(self._timeout_s)
                pid = int(gate.recv(32))
                self._timeout_s = ANSWER_TIMEOUT_S
            except (OSError, ValueError):  # it is dead, stopped or cannot fork; a worker that starts later finds the gate closed
                self._end()
                return None
            with contextlib.suppress(OSError):  # if the worker is dead by now, its pidfd says so
                os.setpgid(pid, pid)
                gate.send(_GO)
        return ForkedWorker(pid)

    def tick(self) -> None:
        """Reap the fork server, and the processes between it and workers, that have ended."""
        try:
            while self._group and (ended := os.waitpid(-self._group, os.WNOHANG)[0]):
                if ended == self._pid:
                    self._forget()
        except ChildProcessError:
            self._group = 0

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._forget()

    def _forget(self) -> None:
        self._pid = 0
        self._channel.close()

    def close(self) -> None:
        """End the fork server; the workers continue."""
        if self._pid:
            self._end()


def _suits_this_interpreter() -> bool:
    """Whether a forked worker behaves like one started by exec.

    It does not under LD_PRELOAD, since a preloaded library may read the command line when it is loaded; nor without -P,
    since the module path then depends on the current directory, as a worker's does not.
    """
    return "LD_PRELOAD" not in os.environ and bool(sys.flags.safe_path)


# ---- in the fork server ---------------------------------------------------------


def _serve(store: HeldStore, kinds: Iterable[Kind], channel: socket.socket) -> int:
    """Fork the workers that the supervisor asks for, until the supervisor has ended."""
    signal.set_wakeup_fd(-1)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (channel.fileno(), store.descriptor):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)  # Ctrl-C is for the supervisor
    waiting.end_with_parent()  # in case this process is stopped when the supervisor ends; else the end of the channel ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    environment = without_systemd(child_environment())
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    waiting.show_command([sys.executable, "-P", "-m", __name__, str(store.name)], environment)
    gc.disable()
    for kind in kinds:
        importlib.import_module(kind.module)
    for name in _LOADED_LATER:
        importlib.import_module(name)
    build_id()  # cached now: of the modules loaded here, even if another build is installed later
    log = LogFile(store.root)
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 1)
        if not request:
            return 0
        log.check()  # a worker inherits the stderr of this process
        with socket.socket(fileno=descriptors[0]) as gate:
            _fork_worker(json.loads(request), channel, gate)


def _fork_worker(words: list[str], channel: socket.socket, gate: socket.socket) -> None:
    """Fork the worker through a process that ends at once, so that the worker becomes a child of the supervisor."""
    try:
        between = os.fork()
    except OSError:
        return  # the gate is closed, which tells the supervisor
    if between:
        os.waitpid(between, 0)
        return
    try:
        between = os.getpid()
        if os.fork() == 0:
            end_with(lambda: _run_worker(words, between, channel, gate))
    finally:
        os._exit(0)


# ---- in a worker ----------------------------------------------------------------


def _run_worker(words: list[str], between: int, channel: socket.socket, gate: socket.socket) -> int:
    """Run the worker of that command line once the supervisor has its pid; return its exit code."""
    channel.close()
    waiting.show_command(words, os.environ)
    while os.getppid() == between:
        time.sleep(REPARENT_POLL_INTERVAL_S)
    try:
        gate.send(str(os.getpid()).encode())
        if gate.recv(len(_GO)) != _GO:
            return 0
    except OSError:
        return 0
    gate.close()
    gc.enable()
    module = importlib.import_module(words[3])
    sys.orig_argv, sys.argv = words, [str(module.__file__), *words[4:]]
    failpoints.read_environment()
    return int(module.main())


def end_with(run: Callable[[], int]) -> NoReturn:
    """End this forked process with the exit code of `run`, or of the exception it raised; never returns."""
    code = 1
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk, a closed stream, none at all
            stream.flush()
