"""Workers of tests, forked by one process that has loaded them all: the start of an interpreter is most of the CPU of many tests.

Run as a program this is that process. It ends with the process of the tests, by the end of its socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

REQUEST_BYTES_MAX = 1 << 17
DESCRIPTORS_MAX = 8
ABOVE_ALL = 100  # of the numbers that a process asks for
# Read when a worker begins, or by Spark alone, whose sessions leave some behind; what else differs needs a new interpreter.
OF_A_TEST = ("PYENGINE_", "PYTEST_", "SPARK_", "PYSPARK_", "JAVA_HOME")


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OF_A_TEST)}


# As it is before any test: the one that is the first to fork something may have changed it for itself.
ENVIRONMENT = _lasting(os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)})


def start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | ForkedProcess:
    """A process with this command line, its stderr in a pipe; forked where the words are PYTHON -P -m WORKER ARGUMENT..."""
    if list(words[:3]) != [sys.executable, "-P", "-m"] or not suits(environment):
        return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    said, stderr = os.pipe()
    try:
        return fork(words, environment, {2: stderr}, stderr=os.fdopen(said))
    finally:
        os.close(stderr)


def suits(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment may be forked: it is the server's but for what is read when a worker begins."""
    return "LD_PRELOAD" not in environment and _lasting(environment) == _server().environment


def fork(words: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], *, leads_session: bool = False,
         stdin: IO[bytes] | None = None, stderr: IO[str] | None = None) -> ForkedProcess:
    """A process with this command line that has each of `descriptors` (number there: number here); stdin, stderr: our ends."""
    status, exited = os.pipe()
    try:
        pid = _server().fork([list(words), dict(environment), list(descriptors), leads_session], [*descriptors.values(), exited])
    finally:
        os.close(exited)
    return ForkedProcess(words, pid, stdin, stderr, status)


class ForkedProcess:
    """As subprocess.Popen: a child of the process that forked it, which tells its exit code."""

    def __init__(self, args: Sequence[str], pid: int, stdin: IO[bytes] | None, stderr: IO[str] | None, status_fd: int) -> None:
        self.args, self.pid, self.stdin, self.stderr, self.status_fd = args, pid, stdin, stderr, status_fd
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self.status_fd, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self.status_fd, 16))
        return self.returncode

    def __del__(self) -> None:
        os.close(self.status_fd)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.stderr.read() if self.stderr else ""

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and its parent has waited for it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Server:
    """The tests' end."""

    def __init__(self) -> None:
        self.environment = ENVIRONMENT
        self.lock = threading.Lock()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-P", __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                             env=self.environment, stdin=subprocess.DEVNULL)

    def fork(self, request: list[Any], descriptors: Sequence[int]) -> int:
        with self.lock:
            socket.send_fds(self.channel, [json.dumps(request).encode()], descriptors)
            return int(self.channel.recv(16))


@functools.cache
def _server() -> Server:
    return Server()


# ---- in the process that forks --------------------------------------------------


def _serve(channel: socket.socket) -> None:
    from pyengine.engine.kinds import KINDS

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this
    for kind in KINDS:
        importlib.import_module(kind.module)
    gc.freeze()
    with selectors.DefaultSelector() as waited:
        waited.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in waited.select():
                if key.fileobj is not channel:
                    pid, exited = key.data
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(BrokenPipeError):  # an engine that outlives the object of its start
                        os.write(exited, str(code).encode())
                    os.close(exited)
                    waited.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                request, received, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
                if not request:
                    return
                *given, exited = received
                if (pid := os.fork()) == 0:
                    _become(*json.loads(request), given)
                for descriptor in given:
                    os.close(descriptor)
                waited.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, exited))
                channel.send(str(pid).encode())


def _become(words: list[str], environment: dict[str, str], numbers: list[int], leads_session: bool, given: list[int]) -> NoReturn:
    """Return what `words` would be in a new interpreter, as pyengine.engine.fork_server has it."""
    from pyengine.engine.fork_server import end_with
    from pyengine.native import failpoints, waiting

    if leads_session:
        os.setsid()
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE_ALL) for descriptor in given]
    for number, descriptor in zip(numbers, given, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in numbers:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    waiting.show_command(words, environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv, sys.argv = words, words[3:]

    def main() -> int:
        failpoints.read_environment()
        return int(importlib.import_module(words[3]).main())

    end_with(main)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
