"""A member of a consumer group as a process of its own, for tests that stop and kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from fix_cli import environment
from waiting import scaled_timeout_s

MEMBER = """
import os, signal, sys
import pyengine
root, log, topic, group, timeout_s, commit_s = sys.argv[1:7]
asked_to_stop = []
signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(1))
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with pyengine.consume(root, topic, group=group, from_="first", session_timeout_s=float(timeout_s),
                      commit_interval_s=float(commit_s)) as consumer:
    os.write(out, b"up\\n")
    while not asked_to_stop:
        for message in consumer.pull(7, timeout_s=0.1):
            os.write(out, b"%d %d %s\\n" % (message.queue_id, message.queue_offset, message.body))
        if sys.argv[7:]:
            print(*consumer.assignment, flush=True)
"""


class Member:
    """One process; `log` has a line for each message it was given: queue id, offset, body."""

    def __init__(self, root: Path, log: Path, *, topic: str = "orders", group: str = "billing", timeout_s: float = 30.0,
                 commit_s: float = 0.05) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(root), str(log), topic, group, str(timeout_s), str(commit_s)],
            env=environment(), stdout=subprocess.DEVNULL)

    @property
    def is_up(self) -> bool:
        assert self.process.poll() is None, "the member has ended"
        return self.log.exists() and self.log.read_bytes().startswith(b"up\n")

    def seen(self) -> list[tuple[int, int, bytes]]:
        """(queue id, offset, body) of every message it was given, in order; a line cut by its death is left out."""
        if not self.log.exists():
            return []
        lines = [line.split(b" ", 2) for line in self.log.read_bytes().split(b"\n")[:-1] if line != b"up"]
        return [(int(queue_id), int(offset), body) for queue_id, offset, body in lines]

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask it to end in order; its exit code."""
        self.send(signal.SIGTERM)
        return self.process.wait(timeout=scaled_timeout_s(60))

    def sweep(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
