"""`pyengine clean`: delete by hand, in this process or by the running engine's cleaner.

`clean_stopped` cleans a store that no process has open, with the same rules and steps as the cleaner's.
`ask_to_clean` asks the cleaner of a running engine and waits for its answer. One process asks at a
time, under a lock on the shared object that the kernel releases when its owner dies. A request whose
asker did not wait is done all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine._native import ffi
from pyengine.errors import DiskError, EngineError, EngineUnavailableError, StoreBusyError
from pyengine.ipc.cleaning import Cleaning
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.services.retention.clean_files import CleanCommitLogService, CleanConsumeQueueService, CleanedStore, CleaningClock
from pyengine.services.retention.clean_rules import CleanRules, Request, decide
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import measure
from pyengine.storage.message_store import MessageStore
from pyengine.storage.ofd_lock import try_lock

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning

POLL_INTERVAL_S = 0.02
_COUNTERS = ("removed_segments", "removed_bytes", "removed_queue_files", "removed_index_files")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a clean-up deleted, and where the log begins since."""

    segments: int
    bytes: int
    queue_files: int
    index_files: int
    min_offset: int


def clean_stopped(store: MessageStore, config: EngineConfig, log_end: int, request: Request,
                  progress: Callable[[int, int | None], None] = lambda done, total: None,
                  clock: CleaningClock | None = None) -> Cleaned:
    """Do what was asked by hand, all of it. Raises DiskError; then the rest is for the next time."""
    clock = clock or CleaningClock()
    control, shared = ffi.new("struct ms_control *"), native_cleaning.private()
    for position in (control.wrote, control.committed, control.flushed, control.reput_from):
        native.store_position(position, log_end)
    for slot in control.slots:
        slot.wrote = log_end
    native.store(control.workers[native.CHECKPOINTER], "position", log_end)
    rules = CleanRules.of(config)
    cleaned = CleanedStore(control, shared, store, config, clock)
    log, queues = CleanCommitLogService(cleaned), CleanConsumeQueueService(cleaned)
    for pause_s in log.steps(lambda: decide(rules, [measure_log(store.root), measure(store.consume_queue)], clock.hour(), request)):
        progress(native.load(shared, "removed_bytes"), None)
        time.sleep(pause_s)
    for pause_s in queues.steps(log.publish_min()):
        time.sleep(pause_s)
    return Cleaned(native.load(shared, "removed_segments"), native.load(shared, "removed_bytes"),
                   native.load(shared, "removed_queue_files"), native.load(shared, "removed_index_files"),
                   native.load_position(control.min_offset))


def ask_to_clean(memory: EngineMemory, request: Request, timeout_s: float,
                 progress: Callable[[int, int | None], None] = lambda done, total: None) -> Cleaned:
    """What the cleaner deleted. StoreBusyError: another request is under way; EngineUnavailableError: the engine
    stopped; DiskError: it could not delete; EngineError after `timeout_s`, the cleaner continues."""
    with Cleaning(memory.folder) as cleaning:
        if not try_lock(cleaning.shared.descriptor, 0, "the cleaner's shared object"):
            raise StoreBusyError("another `pyengine clean` is waiting for the cleaner")
        block = cleaning.block
        deadline_s = time.monotonic() + timeout_s
        _wait(memory, block, native.load(block, "asked"), deadline_s, lambda: None)  # of an asker that died
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
        after = {name: native.load(block, name) - before[name] for name in _COUNTERS}
        return Cleaned(after["removed_segments"], after["removed_bytes"], after["removed_queue_files"],
                       after["removed_index_files"], native.load_position(memory.control.min_offset))


def _wait(memory: EngineMemory, block: ms_cleaning, number: int, deadline_s: float, tell: Callable[[], None]) -> None:
    while native.load(block, "answered") < number:
        tell()
        if memory.retired:
            raise EngineUnavailableError("the engine stopped before it had cleaned; ask again after the next start")
        if native.load(memory.control.state, "frozen"):
            raise EngineError("the store is frozen after a failed sync: nothing is deleted until it has been recovered")
        if time.monotonic() >= deadline_s:
            raise EngineError("the cleaner has not finished within the timeout and continues; `pyengine status` shows the minimum")
        time.sleep(POLL_INTERVAL_S)
