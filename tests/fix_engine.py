"""Whole engines on stores of the test: started in the background, killed, stopped, swept."""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest

import forked
import pyengine
from fix_golden import usual
from pyengine.client.producer import connect
from pyengine.engine import embedded, log_file
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.engine.kinds import child_environment, kinds_for, without_systemd
from pyengine.errors import EngineError
from pyengine.ipc import sessions
from pyengine.ipc.control_block import MODE_NUMBERS, EngineMemory
from pyengine.ipc.heartbeat import is_stopped
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder, session_name
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native import session as native_session
from pyengine.results import PutStatus
from pyengine.storage.config import set_arguments
from waiting import eventually

MODES = {
    "async": {},
    "sync": {"flush_disk_type": "SYNC_FLUSH"},
    "pool": {"transient_store_pool_enable": "true", "transient_store_pool_size": "3"},
}
EACH_MODE = usual(MODES, ("pool",))  # the mode with the most processes, the others with --long
# The workers of an engine without slaves and gateway, by mode.
WORKERS = {mode: {kind.name for kind in kinds_for(MODE_NUMBERS[mode], False)} for mode in MODES}
SMALL = {"mapped_file_size_commit_log_bytes": 1 << 20, "mapped_file_size_consume_queue_bytes": 6000,
         "max_hash_slot_num": 1000, "max_index_num": 4000,
         "os_page_cache_busy_timeout_ms": 60_000}  # a writer that a loaded machine keeps off its processor refuses no put of a test


class RunningEngine:
    """One store, and the engine that runs on it."""

    def __init__(self, root: Path, settings: dict[str, object]) -> None:
        self.root = root
        self.settings = settings
        self.semaphores: set[int] = set()

    def start(self, **settings: object) -> dict[str, object]:
        outcome = start_engine(self.root, {**self.settings, **settings}, timeout_s=60)
        with self.memory() as memory:
            self.semaphores.add(memory.identity.sysv_semaphore_id)
        return outcome

    def stop(self) -> bool:
        return stop_engine(self.root, timeout_s=60)

    def fail(self, reason: str) -> None:
        """Freeze it as its flusher does, and let no process of it write to a file any more, its log neither."""
        with self.memory(writable=True) as memory:
            native.freeze(memory.control, native.FLUSHER, 30, reason)
        for pid in self.pids().values():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def memory(self, *, writable: bool = False) -> EngineMemory:
        return EngineMemory.of(self.root, writable=writable)

    def pid(self, kind: str) -> int:
        """Process of a living worker (or the supervisor)."""
        with self.memory() as memory:
            return native.load(memory.control.workers[KIND_NAMES.index(kind)], "pid")

    def pids(self) -> dict[str, int]:
        return {KIND_NAMES[kind]: self.pid(KIND_NAMES[kind]) for kind in living_kinds(self.root)}

    def incarnation(self, kind: str) -> int:
        with self.memory() as memory:
            return native.load(memory.control.workers[KIND_NAMES.index(kind)], "incarnation")

    def positions(self) -> dict[str, int]:
        with self.memory() as memory:
            return {name: native.load_position(getattr(memory.control, name))
                    for name in ("wrote", "committed", "flushed", "reput_from")}

    def kill(self, kind: str, number: int = signal.SIGKILL) -> int:
        """Signal one process; its pid."""
        pid = self.pid(kind)
        os.kill(pid, number)
        return pid

    def suspend(self, kind: str) -> int:
        """Send SIGSTOP and wait until the process is stopped; return its pid."""
        pid = self.kill(kind, signal.SIGSTOP)
        eventually(lambda: is_stopped(pid), f"{kind} has stopped")
        return pid

    def wait_back(self, kind: str, incarnation: int) -> None:
        """Wait until a worker is up again in a later incarnation."""
        index = KIND_NAMES.index(kind)
        with self.memory() as memory:
            line = memory.control.workers[index]
            eventually(lambda: native.load(line, "incarnation") > incarnation
                       and native.load(line, "state") == native.WORKER_READY, f"{kind} is back")

    def kill_all(self) -> None:
        """SIGKILL everything. The supervisor is stopped first, so that it restarts no worker, and killed last: a worker
        that a test has stopped would run again when its parent dies (the kernel continues orphaned process groups)."""
        pids = self.pids()
        if "supervisor" in pids:
            os.kill(pids["supervisor"], signal.SIGSTOP)
        for kind in sorted(pids, key=lambda kind: kind == "supervisor"):
            os.kill(pids[kind], signal.SIGKILL)
        self.wait_gone()

    def wait_noted(self) -> None:
        """Wait until everything is durable, dispatched, and in queues that are durable too."""
        wait_noted(self.root)

    def wait_gone(self) -> None:
        """Wait until no process holds any lock on the store."""
        eventually(lambda: not living_kinds(self.root), "all processes are gone")

    def log(self) -> str:
        return (self.root / "engine.log").read_text()

    def sweep(self) -> None:
        """Kill what still runs and remove every shared object."""
        if not self.root.exists():
            return
        try:
            folder = find_folder(self.root)
        except EngineError:
            return
        if living_kinds(self.root):
            self.kill_all()
        for semaphore in self.semaphores:
            sessions.remove_attach_count(semaphore)
        folder.sweep()


def put_numbers(engine, first, count, queue_id=0):
    """Acknowledged puts of `first`, `first` + 1 ...; the bodies."""
    bodies = [b"%06d" % number for number in range(first, first + count)]
    with connect(engine.root) as producer:
        for body in bodies:
            result = producer.put("T", body, queue_id=queue_id, keys=body.decode())
            assert result.status is PutStatus.PUT_OK, result
    return bodies


def stored(engine, queue_id=0):
    """Bodies of the queue, in order; queue offsets must be gap-free."""
    found = []
    with open_store(engine.root) as store:
        while messages := store.get_message("T", queue_id, len(found), level="committed").messages:
            assert [message.queue_offset for message in messages] == list(range(len(found), len(found) + len(messages)))
            found += [message.body for message in messages]
    return found


def tail_of_ring(engine, pid):
    """How many bytes a process has submitted by its session, 0 without one."""
    with engine.memory() as memory:
        for slot in range(memory.identity.sessions_max):
            line = memory.control.sessions[slot]
            if native.load(line, "state") == native.SESSION_OPEN and native.load(line, "pid") == pid:
                name = session_name(memory.identity.epoch, slot, native.load(line, "generation"))
                with memory.folder.attach(name, writable=False) as shared:
                    session = native_session.view(shared.memory)
                    tail = native.load(session, "tail")
                    del session
                    return tail
    return 0


def wait_noted(root: Path) -> None:
    """Wait until everything put into a running engine is durable, dispatched, and in queues that are durable too."""
    with EngineMemory.of(root) as memory:
        control = memory.control
        end = native.committed_slot(control)[0]
        eventually(lambda: min(native.load_position(control.flushed), native.load_position(control.reput_from),
                               native.load(control.workers[native.CHECKPOINTER], "position")) >= end, "all is noted")


# Folders and files that start engines to test something else than how they start.
FORKED_IN = ("cli/", "client/", "gateway/", "interop/", "ipc/", "spark/", *(f"test_{name}.py" for name in (
    "celery", "dramatiq", "replication", "rights", "taskiq")), *(f"engine/test_{name}.py" for name in (
    "cleaner", "hostile_producer", "log_paths", "lost_names", "recovery_of_engines", "replaced_engine", "scheduler", "scribbled_memory",
    "slave", "statistics", "storm")))


@pytest.fixture(autouse=True, scope="module")
def forked_supervisors(request):
    """Supervisors are forked too (forked.py): to start an interpreter and load all workers is most of a start's CPU."""
    if not str(request.path.relative_to(Path(__file__).parent)).startswith(FORKED_IN):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "spawn_supervisor", functools.partial(_fork_supervisor, embedded.spawn_supervisor))
        yield


def _fork_supervisor(by_exec, root, settings, *, stdin, embedder=None, options=()):
    environment = without_systemd(child_environment())
    if not forked.suits(environment):
        return by_exec(root, settings, stdin=stdin, embedder=embedder, options=options)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    theirs, ours = (os.open(os.devnull, os.O_RDONLY), None) if stdin == subprocess.DEVNULL else os.pipe2(os.O_CLOEXEC)
    words = [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(root), "--report-fd", "10", *options]
    try:
        with log_file.open_log(root) as log:
            descriptors = {0: theirs, 1: log.fileno(), 2: log.fileno(), 10: writing}
            if embedder is not None:
                descriptors[11] = embedder
                words += ["--embedder-fd", "11"]
            process = forked.fork([*words, *set_arguments(settings)], environment, descriptors, leads_session=True,
                                  stdin=ours and os.fdopen(ours, "wb"))
    finally:
        os.close(theirs)
        os.close(writing)
    return process, reading


@pytest.fixture
def make_engine(tmp_path):
    """make_engine(mode="async", **settings) -> RunningEngine, not started; swept at the end."""
    engines: list[RunningEngine] = []

    def make(mode: str = "async", name: str = "store", **settings: object) -> RunningEngine:
        engines.append(RunningEngine(tmp_path / name, {**SMALL, **MODES[mode], **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.sweep()


@pytest.fixture(scope="module")
def undelayed(tmp_path_factory):
    """A running engine whose delay levels are over at once, for the tests of a module: each has a topic and a group of its own."""
    with pyengine.Engine(tmp_path_factory.mktemp("undelayed") / "store", message_delay_level=" ".join(["0s"] * 18), **SMALL) as engine:
        yield engine


@pytest.fixture
def names(request):
    """(topic, group) of this test."""
    word = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
    if len(word) > 60:  # a topic's name is short; what was cut tells the forms of a test apart
        word = f"{word[:51]}-{crc32(word.encode()):08x}"
    return f"T-{word}", f"G-{word}"
