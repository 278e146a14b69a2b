"""Asking the running engine's cleaner to clean now, and waiting for its answer (`pyengine clean`).

One asks at a time, under a lock on the shared object that the kernel takes back from the
dead. A request that its asker did not wait for is done all the same.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable

from pyengine.errors import DiskError, EngineError, EngineUnavailableError, StoreBusyError
from pyengine.ipc.cleaning import Cleaning
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.services.retention.clean_rules import Request
from pyengine.services.retention.clean_stopped import Cleaned

POLL_STEP_S = 0.02
_FLOCK = "hhqqi0q"  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_COUNTERS = ("removed_segments", "removed_bytes", "removed_queue_files", "removed_index_files")


def ask_to_clean(memory: EngineMemory, request: Request, timeout_s: float,
                 progress: Callable[[int, int | None], None] = lambda done, total: None) -> Cleaned:
    """What the cleaner deleted. StoreBusyError: another request is under way; EngineUnavailableError: the engine
    went away; DiskError: it could not delete; EngineError after `timeout_s`, the cleaner goes on."""
    with Cleaning(memory.folder) as cleaning:
        _lock(cleaning.shared.descriptor)
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


def _wait(memory: EngineMemory, block, number: int, deadline_s: float, tell: Callable[[], None]) -> None:
    while native.load(block, "answered") < number:
        tell()
        if memory.retired:
            raise EngineUnavailableError("the engine stopped before it had cleaned; ask again after the next start")
        if native.load(memory.control.state, "frozen"):
            raise EngineError("the store is frozen after a failed sync: nothing is deleted until it has been recovered")
        if time.monotonic() >= deadline_s:
            raise EngineError("the cleaner has not finished yet and goes on by itself; `pyengine status` shows the minimum")
        time.sleep(POLL_STEP_S)


def _lock(descriptor: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except OSError:
        raise StoreBusyError("another `pyengine clean` is waiting for the cleaner") from None
