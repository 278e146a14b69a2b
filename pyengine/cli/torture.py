"""Kills an engine repeatedly under load and checks the store, for `pyengine prove` and scripts/crash.

EngineWatch observes an engine from outside. Functions kill, stop and wait for processes. KillRounds runs the rounds of one
store, at whose end `check_acked` looks for every acknowledged message.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pyengine.arguments import Closing
from pyengine.engine.embedded import deferred, start_engine, stop_engine
from pyengine.errors import EngineError, StoreBusyError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.heartbeat import state_of as state_of
from pyengine.ipc.live_reader import check_now
from pyengine.ipc.sessions import remove_attach_count
from pyengine.ipc.shared_objects import KIND_NAMES, find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.check.report import Severity
from pyengine.storage.config import load_config

T = TypeVar("T")

TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.002
COMMAND_TIMEOUT_S = 120.0
BUSY_TIMEOUT_S = 5.0  # a worker that a dead supervisor was just starting holds its lock no longer
MOMENT_S_MAX = 0.06   # from "acknowledgements move" to the next strike
FINDINGS_MAX = 5


class HangError(Exception):
    """An expected event has not happened in time."""


def wait_for(what: str, condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """Wait for the condition's first true value and return it; after the timeout HangError names `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise HangError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_INTERVAL_S)
    return value


class EngineWatch(Closing):
    """Reads the control block of the engine that runs at `store`."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.memory = EngineMemory.of(store)

    def close(self) -> None:
        self.memory.close()

    def pid(self, kind: str) -> int:
        return native.load(self.memory.control.workers[KIND_NAMES.index(kind)], "pid")

    def pids(self) -> dict[str, int]:
        """Return the living processes by kind."""
        found = {name: self.pid(name) for name in KIND_NAMES}
        return {name: pid for name, pid in found.items() if pid and state_of(pid) not in ("", "Z")}


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process inside the block, and resume it afterwards unless it was killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(f"process {pid} is stopped", lambda: state_of(pid) in ("T", "D", ""))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill_all(watch: EngineWatch, others: Sequence[int] = (), rng: random.Random | None = None) -> int:
    """Kill every process of the engine, and `others` (its producers), by kind or shuffled; return how many.

    The supervisor, which would restart the others, is stopped meanwhile and killed last. If it died first, the kernel would
    resume stopped processes of its group, and with ignored hangups (nohup) a stopped committer would empty the pool.
    """
    supervisor = watch.pid("supervisor")
    with stopped(supervisor):
        victims = [*(pid for pid in watch.pids().values() if pid != supervisor), *others]
        if rng is not None:
            rng.shuffle(victims)
        for pid in (*victims, supervisor):
            kill(pid)
    for pid in processes_of(watch.store, b"pyengine.workers."):  # one that was being started has published no pid yet
        kill(pid)
    return len(victims) + 1


def kill(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """Send SIGKILL, and wait until all threads of the process are gone or it is a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], timeout_s)[0]:
            raise HangError(f"process {pid} does not die within {timeout_s:g} s")
    finally:
        os.close(descriptor)


def kill_engine(store: Path) -> None:
    """Kill every process of the engine, supervisor first, also before the control block is published."""
    for module in (b"pyengine.workers.supervisor", b"pyengine.workers."):
        for pid in processes_of(store, module):
            kill(pid)
    with contextlib.suppress(EngineError), EngineWatch(store) as watch:
        for pid in watch.pids().values():
            kill(pid)


def remove_memory(store: Path) -> None:
    """Remove what a killed engine has outside its store: shared memory, semaphores, the producer count."""
    with contextlib.suppress(EngineError):
        folder = find_folder(store)
        with contextlib.suppress(EngineError), EngineMemory.attach(folder, writable=False) as memory:
            remove_attach_count(memory.identity.sysv_semaphore_id)
        folder.sweep()


def processes_of(store: Path, module: bytes) -> list[int]:
    """Return the processes with the command line `python -m MODULE... STORE ...`; `module` is a prefix of the name."""
    found = []
    paths = {os.fsencode(store), os.fsencode(store.resolve())}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"-m" in words[:-1] and words[words.index(b"-m") + 1].startswith(module) and not paths.isdisjoint(words):
                found.append(int(path.name))
    return found


def check_acked(store: Path, acked: Path) -> tuple[int, int, str]:
    """Check a store as `pyengine check --acked` does; return how many messages of the list it looked for, how many are missing, and
    what the check finds, "" for no error."""
    report = check_now(store, load_config(store), acked)
    errors = [finding.text for finding in report.findings if finding.severity is Severity.ERROR][:FINDINGS_MAX]
    return report.acked, report.acked_missing, f"pyengine check finds: {'; '.join(errors)}" if report.exit_code else ""


class KillRounds:
    """Runs rounds on one store under load, each of which kills something.

    A subclass makes and ends the producers, counts acknowledgements, kills (`strike`), and checks the store (`check_store`).
    `failures` are sentences; without any the run passed.
    """

    def __init__(self, store: Path, settings: Mapping[str, object], rng: random.Random) -> None:
        self.store = store
        self.settings = dict(settings)
        self.rng = rng
        self.ack_timeout_s = TIMEOUT_S
        self.moment_s_max = MOMENT_S_MAX

    def run_rounds(self, should_continue: Callable[[], bool]) -> float:
        """Run rounds while `should_continue` returns true and none has failed, then stop the engine and check; return the seconds.

        An exception counts as a failure; no process of the run remains.
        """
        began_s = time.monotonic()
        try:
            self._run_rounds(should_continue)
        except HangError as error:
            self.failures.append(f"HANG: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it was, the run has not held, and its summary says so
            self.failures.append(as_failure(error))
        finally:
            with deferred(signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C would leave processes and their memory
                self.clean_up()
        return round(time.monotonic() - began_s, 1)

    def _run_rounds(self, should_continue: Callable[[], bool]) -> None:
        self.start_engine()
        while should_continue():
            self.make_producers()
            self.wait_for_acks()
            time.sleep(self.rng.uniform(0, self.moment_s_max))
            self.strike()
            self.end_round()
            if self.failures:
                return
        self.make_producers()
        self.wait_for_acks()
        self.settle()
        self.stop_engine()
        self.check_store(final=True)

    # -- what a subclass has

    @property
    def failures(self) -> list[str]:
        """The list of sentences to which these rounds add."""
        raise NotImplementedError

    def make_producers(self) -> None:
        """Start producers until the wanted number runs."""
        raise NotImplementedError

    def end_producers(self) -> None:
        """Stop the producers in order."""
        raise NotImplementedError

    def acked_count(self) -> int:
        """Return a number that grows with each acknowledgement."""
        raise NotImplementedError

    def strike(self) -> None:
        """Kill or disturb the engine; afterwards it runs again."""
        raise NotImplementedError

    def check_store(self, *, final: bool = False) -> None:
        """Check the stopped store."""
        raise NotImplementedError

    def end_round(self) -> None:
        """Called after each strike."""

    def settle(self) -> None:
        """Stop the producers, before the orderly stop."""
        self.end_producers()

    # -- the engine

    def start_engine(self) -> dict[str, Any]:
        return start_engine(self.store, self.settings, timeout_s=COMMAND_TIMEOUT_S)

    def stop_engine(self) -> None:
        """Stop the engine in order."""
        stop_engine(self.store)

    def start_successor(self, start: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
        """Start a supervisor after a dead one, whose last worker may still hold the lock for a moment."""
        start = start or self.start_engine
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return start()
            except StoreBusyError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def wait_for_acks(self) -> None:
        """Wait for new acknowledgements; HangError if none arrive."""
        before = self.acked_count()
        wait_for("acknowledgements move", lambda: self.acked_count() > before, self.ack_timeout_s)

    def clean_up(self) -> None:
        """Kill the living processes of this run and remove its shared memory; the store stays as it is."""
        try:
            self.kill_remaining()
            remove_memory(self.store)
        except Exception as error:  # noqa: BLE001 - the run is over, and this is one more thing that did not hold
            self.failures.append(f"not all of it could be ended: {as_failure(error)}")

    def kill_remaining(self) -> None:
        """Kill the engine's processes; HangError if one of them keeps the store's lock."""
        kill_engine(self.store)
        wait_for("the store has no owner", lambda: not living_kinds(self.store))


def as_failure(error: Exception) -> str:
    """Return a line for the summary; print the traceback on stderr, except for an EngineError, which explains itself."""
    if not isinstance(error, EngineError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"
