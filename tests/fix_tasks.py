"""Workers of a task library on a store: real processes, what their tasks noted, and what their group has not acknowledged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import pyengine
from fix_cli import environment
from pyengine import testing
from waiting import eventually, scaled_timeout_s

NOTES = """
import os

def note(what):
    with open("notes", "ab", buffering=0) as notes:
        notes.write(f"{what} {os.getpid()} {time.time()}\\n".encode())

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Note:
    """One line that a task has written: what, in which process, and when."""

    what: str
    pid: int
    time_s: float


class Rig:
    """A folder with `tasks.py`, and worker processes that run in it until the end of the test."""

    def __init__(self, folder: Path, store: Path, topic: str, command: list[str]) -> None:
        self.folder, self.store, self.topic = folder, store, topic
        self._command = [sys.executable, "-m", *command]
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> str:
        """What the workers have written so far."""
        return (self.folder / "log").read_text()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the library's own command, the leader of a process group of its own."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(self._command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                                       env=environment(STORE=str(self.store), TOPIC=self.topic))
        self._started.append(process)
        return process

    def notes(self) -> list[Note]:
        """Return what the tasks have noted, in its order."""
        lines = (self.folder / "notes").read_text().splitlines() if (self.folder / "notes").exists() else []
        return [Note(what, int(pid), float(time_s)) for what, pid, time_s in map(str.split, lines)]

    def noted(self, *wanted: object) -> list[Note]:
        """Return the notes of these tasks, once each has one."""
        names = {str(each) for each in wanted}
        try:
            eventually(lambda: names <= {each.what for each in self.notes()}, "every task was run", 60)
        except AssertionError:
            pytest.fail(f"not run: {sorted(names - {each.what for each in self.notes()})[:20]}\n{self.log[-6000:]}")
        return [each for each in self.notes() if each.what in names]

    def wait_until_acknowledged(self) -> None:
        """Wait until the group has stored that it is done with every message of the topic."""
        eventually(lambda: self.lag() == 0, f"the group of {self.topic} has no lag", 60)

    def lag(self) -> int:
        """Return how many messages the group has not stored as done; -1 before its first offset."""
        groups = self._groups()
        return sum(one.lag for one in groups) if groups else -1

    def wait_until_shared(self, members: int) -> set[int]:
        """Wait until this many processes hold the topic's queues; return their pids."""
        def holders() -> set[int]:
            return {pid for one in self._groups() for pid in one.holders.values()}

        eventually(lambda: len(holders()) == members, f"{members} members have queues", 60)
        return holders()

    def _groups(self) -> list[pyengine.GroupState]:
        return pyengine.ConsumerGroups(self.store).groups(topic=self.topic)

    def kill(self) -> None:
        """Kill every process that was started, with its children."""
        for process in self._started:
            kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """kill -9 for a process and its children, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(scaled_timeout_s(30))


def children(process: subprocess.Popen[bytes]) -> set[int]:
    """The pids of a process's children."""
    return {one.pid for one in psutil.Process(process.pid).children(recursive=True)}


@contextlib.contextmanager
def rig(folder: Path, store: Path, topic: str, tasks: str, command: list[str]) -> Iterator[Rig]:
    """A Rig in `folder` with this `tasks.py`; its workers are killed at the end."""
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text("import time\n" + NOTES + tasks)
    made = Rig(folder, store, topic, command)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def task_store() -> Iterator[Path]:
    """The store of an engine that the tests of a module share."""
    with testing.ephemeral_store() as engine:
        yield engine.path
