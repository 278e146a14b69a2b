"""Workers of a task library on a store: real processes, what their tasks noted, and what their group has not acknowledged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import pyengine
from crash.replicas import free_port
from fix_cli import environment
from fix_client import age_leaving, housekeep
from pyengine import testing
from pyengine.client.handler import SESSION_TIMEOUT_S
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
        self.command = [sys.executable, "-m", *command]
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> str:
        """What the workers have written so far."""
        return (self.folder / "log").read_text()

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the library's own command, the leader of a process group of its own, with these arguments more."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([*self.command, *more], cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
                                       env=environment(STORE=str(self.store), TOPIC=self.topic))
        self.started.append(process)
        return process

    def notes(self) -> list[Note]:
        """Return what the tasks have noted, in its order."""
        lines = (self.folder / "notes").read_text().rpartition("\n")[0].splitlines() if (self.folder / "notes").exists() else []
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
        groups = self.groups()
        return sum(one.lag for one in groups) if groups else -1

    def wait_until_shared(self, members: int) -> set[int]:
        """Wait until this many processes hold the topic's queues; return their pids."""
        def holders() -> set[int]:
            return {pid for one in self.groups() for pid in one.holders.values()}

        eventually(lambda: len(holders()) == members, f"{members} members have queues", 60)
        return holders()

    def groups(self) -> list[pyengine.GroupState]:
        return pyengine.ConsumerGroups(self.store).groups(topic=self.topic)

    def kill(self) -> None:
        """Kill every process that was started, with its children."""
        for process in self.started:
            kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """kill -9 for a process and its children, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(scaled_timeout_s(30))


def children(process: subprocess.Popen[bytes]) -> set[int]:
    """The pids of a process's children."""
    return {one.pid for one in psutil.Process(process.pid).children(recursive=True)}


# ---- scenes, for a library whose tasks are `work(name)` and `held(name)` --------------
# held(name) notes NAME-begun, waits for the file NAME-go, and notes NAME. send_all(rig, task, [(name,), ...]) sends.

SendAll = Callable[[Rig, str, list[tuple[object, ...]]], None]
Take = Callable[[], tuple[str, Callable[[], object]] | None]
"""Take the next task: its text, and what ends it; None if none comes soon."""
POISONED = 77


def assert_two_workers_run_each_task_once(workers: Rig, send_all: SendAll) -> None:
    """Two workers of a new topic share its tasks."""
    send_all(workers, "work", [(f"warm-{n}",) for n in range(8)])
    workers.noted(*(f"warm-{n}" for n in range(8)))
    pids = workers.wait_until_shared(2)
    names = [f"shared-{n}" for n in range(200)]
    send_all(workers, "work", [(name,) for name in names])
    found = workers.noted(*names)
    assert set(Counter(each.what for each in found).values()) == {1} and {each.pid for each in found} == pids
    workers.wait_until_acknowledged()
    assert {each.topic: each.config for each in pyengine.Topics(workers.store).list()}[workers.topic].write_queue_nums == 4


def assert_kill_9_loses_no_task(own: Rig, send_all: SendAll, after_victim: Callable[[int, set[str]], None]) -> tuple[int, list[Note]]:
    """Kill one of two workers under load, then all of them, and start again: each task is run, and none that is stored as done twice.

    `after_victim` gets the pid of the killed worker and the tasks that had begun; it waits for what the library does then. Returns
    that pid, and the notes up to the second kill.
    """
    process = own.start()
    before = [f"before-{n}" for n in range(100)]
    send_all(own, "work", [(name,) for name in before])
    own.noted(*before)
    own.wait_until_acknowledged()
    own.wait_until_shared(2)
    held = [f"held-{n}" for n in range(3)]
    send_all(own, "held", [(name,) for name in held])
    begun = {each.what: each.pid for each in own.noted(*(f"{name}-begun" for name in held))}
    names = [f"load-{n}" for n in range(1500)]
    send_all(own, "work", [(name,) for name in names])
    eventually(lambda: own.lag() <= 1500 + 3 - 300, "what is done in the queue without a held task is stored")
    victim = begun["held-0-begun"]
    os.kill(victim, signal.SIGKILL)
    after_victim(victim, set(begun))
    kill_group(process)
    killed = own.notes()
    for name in held:
        (own.folder / f"{name}-go").touch()
    own.start()
    runs = Counter(each.what for each in own.noted(*before, *names, *held))
    own.wait_until_acknowledged()
    assert {runs[name] for name in before} == {1}
    return victim, killed


def assert_sigterm_lets_tasks_end(own: Rig, send_all: SendAll, stopping: str) -> None:
    """Tasks that run when the workers are told to stop (their log says `stopping`) end and are acknowledged; none is run again."""
    process = own.start()
    send_all(own, "held", [("long",), ("longer",)])
    own.noted("long-begun", "longer-begun")
    process.send_signal(signal.SIGTERM)
    eventually(lambda: stopping in own.log, "the workers wait for their tasks")
    for name in ("long", "longer"):
        (own.folder / f"{name}-go").touch()
    assert process.wait(scaled_timeout_s(60)) == 0, own.log
    own.wait_until_acknowledged()
    send_all(own, "work", [("later",)])
    own.start()
    own.noted("later")
    assert Counter(each.what for each in own.notes()) == {"long-begun": 1, "longer-begun": 1, "long": 1, "longer": 1, "later": 1}, own.log


def assert_a_worker_that_ends_leaves_its_other_queues(own: Rig, send_all: SendAll, fetched: tuple[str, int], stopping: str,
                                                      *one_process: str) -> None:
    """A worker that waits for its last task has no other queue any more, and gives back what it has fetched and not begun.

    Its log says a text of each message that it has fetched, in `fetched` with how many of nine it fetches, and `stopping`.
    """
    leaving = own.start(*one_process)
    send_all(own, "held", [("long",)])
    own.noted("long-begun")
    names = [f"{when}-{n}" for when in ("before", "after") for n in range(8)]
    send_all(own, "work", [(name,) for name in names[:8]])
    eventually(lambda: own.log.count(fetched[0]) == fetched[1], "it has fetched what it does", 30)
    leaving.send_signal(signal.SIGTERM)
    eventually(lambda: stopping in own.log, "the worker waits for its task", 30)
    send_all(own, "work", [(name,) for name in names[8:]])
    own.start()
    try:
        eventually(lambda: sum(queue.lag > 0 for one in own.groups() for queue in one.queues.values()) == 1,
                   "all is done but in the queue of the running task", 30)
    except AssertionError:
        pytest.fail(f"{own.groups()}\n{own.log[-6000:]}")
    (own.folder / "long-go").touch()
    assert leaving.wait(scaled_timeout_s(60)) == 0, own.log
    own.noted("long", *names)
    own.wait_until_acknowledged()
    assert set(Counter(each.what for each in own.notes()).values()) == {1}, own.log


def assert_only_a_task_that_kills_is_a_dead_letter(own: Rig, send_all: SendAll, group: str, taking: Callable[[], Take]) -> None:
    """One process after another takes tasks, four at once, and ends all of them, or dies if the one named poison is among them."""
    send_all(own, "work", [(name,) for name in ("one", "poison", "two", "three", "four", "five")])
    for _ in range(24):
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(int(scaled_timeout_s(60)))
                take = taking()
                while own.lag():
                    taken = [task for _ in range(4) if (task := take()) is not None]
                    if any("poison" in text for text, _ in taken):
                        os._exit(POISONED)
                    for _, end in taken:
                        end()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != POISONED:
            break
    assert status == 0
    letters = [letter.body for letter in pyengine.DeadLetters(own.store).messages(group) if letter.topic == own.topic]
    assert len(letters) == 1 and b"poison" in letters[0]


def assert_a_task_and_its_retry_are_sent_once_without_a_slave(folder: Path, topic: str, tasks: str, command: list[str],
                                                              send_all: SendAll) -> None:
    """Each put of a master that waits for slaves raises PutNotDurableError while there is none, although the log has the task.

    `failing(name, 1)` of `tasks` notes its name, and fails the first time.
    """
    store = folder / "store"
    with (pyengine.Engine(store, broker_role="SYNC_MASTER", ha_listen_port=free_port(), **testing.SMALL_FILES),
          rig(folder / "rig", store, topic, tasks, command) as own):
        send_all(own, "failing", [("once", 1)])
        own.start()
        eventually(lambda: len(own.notes()) == 2, "it was run again", 60)
        own.wait_until_acknowledged()
        with pyengine.open_store(store) as found:
            assert sum(found.queue_end(topic, queue_id) for queue_id in range(4)) == 2
            assert found.queue_end(f"%DLQ%{topic}", 0) == 0
        assert len(own.notes()) == 2


def assert_a_joining_member_waits_for(member: pyengine.Consumer, store: Path) -> None:
    """Another member gets no queue of one that has a running task in each of its queues, none of which has ended so far."""
    with pyengine.consume(store, member.topic, group=member.group, auto_commit=False) as joining:
        housekeep(member)
        age_leaving(member, 2 * SESSION_TIMEOUT_S)
        housekeep(member)
        housekeep(joining)
        assert joining.assignment == []


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
