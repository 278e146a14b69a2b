"""The cleaner's rounds (DefaultMessageStore.cleanFilesPeriodically), requests by hand, and the probe of the disk (docs/cleaning.md).

A round consists of small steps with pauses in between, so that deletion does not use all of the disk's time, the worker records a
heartbeat, and a stop can interrupt it at any step. In a frozen store nothing is deleted: recovery must find the files as they were.

DiskSpaceProbe is DefaultMessageStore.isSpaceFull. It runs in a thread of its own, since in RocketMQ a mass deletion blocks it just when
it is needed. Each second it measures the file systems of log and queues, without a write, and sets or clears two bits of
`refuse_puts`. After a crash the bits stay as they are until the next cleaner's first check.

`clean_stopped` cleans a store that no process has open, with the same rules and steps; `request_cleaning` sends a request to the
cleaner of a running engine. One process at a time does so, under a lock on the shared object that the kernel releases when its owner
dies. A request is executed even if its sender does not wait.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi
from pyengine.errors import DegradedError, DiskError, EngineError, EngineUnavailableError, StoreBusyError
from pyengine.events import Event
from pyengine.ipc.cleaning import CLEAN_BYTE, Cleaning
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.services.clean_files import (
    NOTHING,
    CleanCommitLogService,
    CleanConsumeQueueService,
    CleanRequest,
    Decision,
    decide,
    hour,
    refusal,
)
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import DiskUse, measure
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning

PAUSE_S_MAX = 1.0  # the worker records a heartbeat at least this often
PROBE_INTERVAL_S = 1.0
_OWN_REFUSALS = native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE


class CleanResourceService(Service):
    """The cleaner worker's service: rounds of `steps`, None between two.

    The next round is due at `due_ns`, its next step at `resume_ns`.
    """

    KIND = native.CLEANER
    records_rounds = True

    def __init__(self, context: ServiceContext, shared: Cleaning, measure: Callable[[], Sequence[DiskUse]]) -> None:
        """`measure` returns the disk use of log and queues."""
        super().__init__(context)
        self._cleaning = shared.block
        self._measure = measure
        self._config = config = context.config
        self._interval_ns = config.clean_resource_interval_ms * 1_000_000
        self._log = CleanCommitLogService(self._control, shared.block, context.store, config, shared.holders, context.report)
        self._queues = CleanConsumeQueueService(shared.block, context.store, config)
        self.steps: Generator[float, None, None] | None = None
        self.due_ns = monotonic_ns() + self._interval_ns
        self.resume_ns = 0

    def take_settings(self, config: EngineConfig) -> None:
        """Take the rules and the pauses; the next round begins at once."""
        self._config = config
        self._interval_ns = config.clean_resource_interval_ms * 1_000_000
        self._log.take_settings(config)
        self._queues.take_settings(config)
        self.due_ns = monotonic_ns()

    def work(self) -> bool:
        """Run one step, if it is due."""
        now_ns = monotonic_ns()
        if self._is_frozen:
            self._drop_round()
            self.due_ns = now_ns + self._interval_ns
            return False
        if self.steps is None:
            if now_ns < self.due_ns and not self._is_requested():
                return False
            self.steps = self._round()
        elif now_ns < self.resume_ns:
            return False
        try:
            pause_s = next(self.steps)
        except StopIteration:
            self._end_round("")
            return False
        except DiskError as error:
            self._end_round(str(error))
            return False
        self.resume_ns = monotonic_ns() + round(pause_s * 1e9)
        return pause_s <= 0

    def _end_round(self, why: str) -> None:
        self.steps = None
        self.due_ns = monotonic_ns() + self._interval_ns
        if why:
            self._count_error()
            self._blocked.set(why, f"old files cannot be deleted: {why}; trying again each {self._interval_ns / 1e9:g} s")
        else:
            self._blocked.clear("old files can be deleted again")

    def _round(self) -> Generator[float, None, None]:
        asked, request = self._request()
        try:
            yield from self._log.steps(lambda: self._decide(request))
            yield from self._queues.steps(self._log.publish_min())
        except DiskError as error:
            self._answer(asked, error.errno or errno.EIO)
            raise
        self._answer(asked, 0)

    def _answer(self, asked: int, error_number: int) -> None:
        line = self._cleaning
        native.increment(line, "rounds")
        if asked:
            native.store(line, "answer_errno", error_number)
            native.store(line, "answered", asked)

    def _decide(self, request: CleanRequest | None) -> Decision:
        if self._is_frozen:
            return NOTHING
        return decide(self._config, self._measure(), hour(), request, self._log.log_bytes())

    def _is_requested(self) -> bool:
        return native.load(self._cleaning, "asked") == native.load(self._cleaning, "answered") + 1

    def _request(self) -> tuple[int, CleanRequest | None]:
        """Return (number, request); (0, None) if there is none. An invalid request is answered without a deletion."""
        if not self._is_requested():
            return 0, None
        asked = native.load(self._cleaning, "asked")
        reserved_ms, percent = native.load(self._cleaning, "asked_reserved_ms"), native.load(self._cleaning, "asked_used_percent")
        if reserved_ms < -1 or not 0 <= percent <= 100:
            return asked, CleanRequest(used_percent=100)
        return asked, CleanRequest(None if reserved_ms < 0 else reserved_ms, percent)

    def pause_s(self) -> float:
        """Return the time until the next step or round; a request by hand wakes the cleaner earlier."""
        until_ns = self.due_ns if self.steps is None else self.resume_ns
        return min(PAUSE_S_MAX, max(0.0, (until_ns - monotonic_ns()) / 1e9))

    def close(self) -> None:  # a stop does not wait for a deletion, since a file without a name is freed with its descriptor
        self._drop_round()

    def _drop_round(self) -> None:
        if self.steps is not None:
            self.steps.close()
            self.steps = None


class DiskSpaceProbe:
    """Measures the disks, publishes the result, and refuses puts or accepts them again; from start() on in a thread of its own."""

    def __init__(self, context: ServiceContext, shared: ms_cleaning, measure: Callable[[], Sequence[DiskUse]],
                 interval_s: float = PROBE_INTERVAL_S) -> None:
        """`shared`: the `struct ms_cleaning *`; `measure` returns the use of the log's and the queues' file system."""
        self._control = context.memory.control
        self._cleaning = shared
        self._config = context.config
        self._measure = measure
        self._report = context.report
        self._refusing = 0
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk space", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.check()
            self._stopped.wait(self._interval_s)

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def take_settings(self, config: EngineConfig) -> None:
        """Take the limits, from the next check on; called by another thread than check()."""
        self._config = config

    def check(self) -> bool:
        """Check the disks once; return whether puts are accepted."""
        uses = self._measure()
        line = self._cleaning
        log, queues = uses[0], uses[-1]
        native.store(line, "usable_bytes", log.usable_bytes)
        native.store(line, "used_percent", log.used_percent)
        native.store(line, "queue_used_percent", queues.used_percent)
        bits, why = refusal(self._config, uses)
        if bits:
            native_cleaning.set_reason(line, why)
        native.refuse_puts(self._control, bits)
        native.refuse_puts(self._control, _OWN_REFUSALS & ~bits, on=False)
        if not bits:
            native_cleaning.set_reason(line, "")
        if bits != self._refusing:
            self._refusing = bits
            if bits:
                self._report(Event.PUTS_REFUSED, f"puts are refused: {why}")
            else:
                self._report(Event.PUTS_TAKEN, "there is room again: puts are taken")
        return not bits


POLL_INTERVAL_S = 0.02
_COUNTERS = ("removed_segments", "removed_bytes", "removed_queue_files", "removed_index_files")  # the first fields of Cleaned


class Cleaned(NamedTuple):
    """The files that a clean-up has deleted, and the new start of the log."""

    segments: int
    bytes: int
    queue_files: int
    index_files: int
    min_offset: int


def clean_stopped(store: MessageStore, config: EngineConfig, log_end: int, request: CleanRequest,
                  progress: Callable[[int, int | None], None] = lambda done, total: None) -> Cleaned:
    """Execute a request by hand completely. After a DiskError the next call does the rest."""
    control, shared = ffi.new("struct ms_control *"), native_cleaning.private()
    for position in (control.wrote, control.committed, control.flushed, control.reput_from):
        native.store_position(position, log_end)
    for slot in control.slots:
        slot.wrote = log_end
    native.store(control.workers[native.CHECKPOINTER], "position", log_end)
    log = CleanCommitLogService(control, shared, store, config, lambda end: [])
    queues = CleanConsumeQueueService(shared, store, config)
    for pause_s in log.steps(lambda: decide(config, [measure_log(store.root), measure(store.consume_queue)], hour(), request)):
        progress(native.load(shared, "removed_bytes"), None)
        time.sleep(pause_s)
    for pause_s in queues.steps(log.publish_min()):
        time.sleep(pause_s)
    return Cleaned._make([*(native.load(shared, name) for name in _COUNTERS), native.load_position(control.min_offset)])


def request_cleaning(memory: EngineMemory, request: CleanRequest, timeout_s: float,
                 progress: Callable[[int, int | None], None] = lambda done, total: None) -> Cleaned:
    """Send a request to the cleaner and return what it has deleted.

    StoreBusyError: another request is being executed; EngineUnavailableError: the engine has stopped; DegradedError; DiskError: a
    deletion failed; EngineError: not complete within `timeout_s`, and the cleaner continues.
    """
    with Cleaning(memory.folder) as cleaning:
        if not cleaning.lock(CLEAN_BYTE):
            raise StoreBusyError("another `pyengine clean` is waiting for the cleaner")
        block = cleaning.block
        deadline_s = time.monotonic() + timeout_s
        _wait(memory, block, native.load(block, "asked"), deadline_s, lambda: None)  # of a sender that died
        before = {name: native.load(block, name) for name in _COUNTERS}
        native.store(block, "asked_reserved_ms", -1 if request.reserved_ms is None else request.reserved_ms)
        native.store(block, "asked_used_percent", request.used_percent)
        number = native.load(block, "answered") + 1
        native.store(block, "asked", number)
        memory.wake(native.CLEANER)
        _wait(memory, block, number, deadline_s,
              lambda: progress(native.load(block, "removed_bytes") - before["removed_bytes"], None))
        failed = native.load(block, "answer_errno")
        if failed:
            raise DiskError(f"old files cannot be deleted: {os.strerror(failed)}; engine.log says which", errno=failed)
        after = (native.load(block, name) - before[name] for name in _COUNTERS)
        return Cleaned._make([*after, native.load_position(memory.control.min_offset)])


def _wait(memory: EngineMemory, block: ms_cleaning, number: int, deadline_s: float, tell: Callable[[], None]) -> None:
    while native.load(block, "answered") < number:
        tell()
        if memory.retired:
            raise EngineUnavailableError("the engine stopped before it had cleaned; ask again after the next start")
        if native.load(memory.control.state, "frozen"):
            raise EngineError("the store is frozen after a failed sync: nothing is deleted until it has been recovered")
        if memory.state == native.STATE_DEGRADED:
            raise DegradedError(f"the engine is degraded and has no cleaner: {native.reason(memory.control)}")
        if time.monotonic() >= deadline_s:
            raise EngineError("the cleaner has not finished within the timeout and continues; `pyengine status` shows the minimum")
        time.sleep(POLL_INTERVAL_S)
