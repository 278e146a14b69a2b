"""Run a check in a forked child: a crash, an exception or a hang becomes a sentence."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

ANSWER_CHARS_MAX = 8000


class Unjudged(str):
    """What is told of a check that came to no answer: it raised, crashed or hung."""


class InChild:
    """The same check, called in a child: none can end the caller.

    A child serves `calls` of them, so that what costs a fork and its first imports is paid once; nothing of one call
    reaches the next only where that is 1. With more the arguments are pickled, and close() ends the last child.
    """

    def __init__(self, check: Callable[..., str | None], timeout_s: float = 30.0, calls: int = 1) -> None:
        self.check = check
        self.timeout_s = timeout_s
        self.calls = calls
        self.left = 0
        self.pid = 0
        self.line: Connection | None = None

    def __call__(self, *arguments: object) -> str | None:
        """None, or what was wrong; Unjudged where that is the check itself."""
        if self.line is None:
            self.fork()
        self.left -= 1
        try:
            self.line.send(arguments)
            if not self.line.poll(self.timeout_s):
                os.kill(self.pid, signal.SIGKILL)
                self.close()
                return Unjudged(f"no answer within {self.timeout_s:g} s")
            answer = self.line.recv()
        except (EOFError, ConnectionError):
            status = self.close()
            return Unjudged(f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"ended with status {status}")
        if self.left == 0:
            self.close()
        return answer

    def close(self) -> int:
        """Ends the child, if there is one; its status."""
        if self.line is None:
            return 0
        self.line.close()
        self.line = None
        return os.waitpid(self.pid, 0)[1]

    def fork(self) -> None:
        self.line, its = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.line.close()
            try:
                self.serve(its)
            finally:
                os._exit(0)
        its.close()
        self.left = self.calls

    def serve(self, line: Connection) -> None:
        for _ in range(self.calls):
            try:
                arguments = line.recv()
            except EOFError:
                return
            try:
                answer = self.check(*arguments)
                answer = answer[-ANSWER_CHARS_MAX:] if answer else None
            except BaseException:
                answer = Unjudged(traceback.format_exc()[-ANSWER_CHARS_MAX:])
            line.send(answer)
