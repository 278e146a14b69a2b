"""Workers of tests, forked by one process that has loaded them all: the start of an interpreter is most of the CPU of many tests.

Run as a program this is that process. It ends with the process of the tests, by the end of its socket.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

REQUEST_BYTES_MAX = 1 << 17
OF_A_TEST = ("PYENGINE_", "PYTEST_CURRENT_TEST")  # read when a worker begins; what else differs needs a new interpreter


def start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | ForkedProcess:
    """A process with this command line, its stderr in a pipe; forked where the words are PYTHON -P -m WORKER ARGUMENT..."""
    if list(words[:3]) == [sys.executable, "-P", "-m"] and "LD_PRELOAD" not in environment:
        server = _server()
        if _lasting(environment) == server.environment:
            return server.fork(words, environment)
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)


class ForkedProcess:
    """As subprocess.Popen: a child of the process that forked it, which tells its exit code."""

    def __init__(self, args: Sequence[str], pid: int, stderr: io.TextIOWrapper, status_fd: int) -> None:
        self.args, self.pid, self.stderr, self._status_fd = args, pid, stderr, status_fd
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status_fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(os.read(self._status_fd, 16))
            os.close(self._status_fd)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        self.wait(timeout)
        return None, self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Server:
    """The tests' end."""

    def __init__(self) -> None:
        self.environment = _lasting(os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)})
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-P", __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                             env=self.environment, stdin=subprocess.DEVNULL)

    def fork(self, words: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        said, stderr = os.pipe()
        status, exited = os.pipe()
        socket.send_fds(self._channel, [json.dumps([list(words), dict(environment)]).encode()], [stderr, exited])
        os.close(stderr)
        os.close(exited)
        return ForkedProcess(words, int(self._channel.recv(16)), os.fdopen(said), status)


@functools.cache
def _server() -> Server:
    return Server()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OF_A_TEST)}


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
                    os.write(exited, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                    os.close(exited)
                    waited.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                request, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES_MAX, 2)
                if not request:
                    return
                stderr, exited = descriptors
                if (pid := os.fork()) == 0:
                    _become(*json.loads(request), stderr)
                os.close(stderr)
                waited.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, exited))
                channel.send(str(pid).encode())


def _become(words: list[str], environment: dict[str, str], stderr: int) -> NoReturn:
    """What `words` would be in a new interpreter, as pyengine.engine.fork_server has it."""
    from pyengine.engine.fork_server import _end_with
    from pyengine.native import failpoint, waiting

    os.dup2(stderr, 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    waiting.show_command(words, environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv, sys.argv = words, words[3:]

    def main() -> int:
        failpoint.read_environment()
        return int(importlib.import_module(words[3]).main())

    _end_with(main)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
