"""Run a check in a forked child: a crash, an exception or a hang becomes a sentence."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

ANSWER_BYTES_MAX = 8000


def in_child(check: Callable[..., str | None], patience_s: float = 30.0) -> Callable[..., str | None]:
    """The same check; nothing of one call reaches the next, and none can end the caller."""

    def run(*arguments: object) -> str | None:
        ours, its = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                try:
                    answer = check(*arguments) or ""
                except BaseException:
                    answer = traceback.format_exc()
                os.write(its, answer.encode()[-ANSWER_BYTES_MAX:])
            finally:
                os._exit(0)
        os.close(its)
        try:
            answer, ended = _read_all(ours, time.monotonic() + patience_s)
        finally:
            os.close(ours)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not ended:
            return f"no answer within {patience_s:g} s"
        if os.WIFSIGNALED(status):
            return f"ended by signal {os.WTERMSIG(status)}"
        return answer.decode(errors="replace") or None

    return run


def _read_all(descriptor: int, deadline_s: float) -> tuple[bytes, bool]:
    answer = b""
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return answer, False
        piece = os.read(descriptor, 65536)
        if not piece:
            return answer, True
        answer += piece
