"""Holds on segments, across processes: RocketMQ's ReferenceResource (hold, release) as locks of the kernel.

    reader    holds = SegmentHolds(folder); holds.hold(segment) ... holds.release(segment)
    cleaner   cleaning.holders(end) -> pids of the processes that hold a segment below `end`

A hold on the segment that starts at S is a shared lock on byte 1 + S of the cleaner's shared object, which readers open
read-only; it ends with its process. While a reader holds a segment, the cleaner does not delete it, but waits at most
destroy_mapped_file_interval_forcibly_ms. It refuses new holds on a segment that it is about to delete: it stores
`removing_end`, then tries to lock the bytes exclusively; a reader locks, then loads `removing_end`, so one of them sees the
other. Short reads need no hold: after they have copied the bytes they check that the log's minimum offset is not beyond them.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from pyengine.arguments import Closing, after_fork, inherited_lock
from pyengine.errors import EngineError
from pyengine.ipc import shared_objects
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.native import cleaning as native
from pyengine.native.control import load
from pyengine.storage.ofd_lock import EXCLUSIVE, SHARED, find_lock, locks_on, try_lock, unlock

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning

CLEAN_BYTE, HOLDS_BYTE = 0, 1  # of the object: one `pyengine clean` at a time; the hold on the segment that starts at 0
UNSEEN = 0  # for the pid of a holder in another container


def create_cleaning(folder: SharedFolder) -> None:
    """Create the shared object; the supervisor calls it before it publishes the control block."""
    with folder.create(shared_objects.CLEANING, native.CLEANING_BYTES) as shared:
        native.format_cleaning(native.view(shared.memory))


class Cleaning(Closing):
    """The cleaner's shared object as one process has it mapped; `block` is its `struct ms_cleaning *`."""

    def __init__(self, folder: SharedFolder, *, writable: bool = True) -> None:
        """Raises EngineUnavailableError when the object does not exist, has another layout, or belongs to another user."""
        self.block: ms_cleaning
        self.shared, self.block = folder.open_checked(shared_objects.CLEANING, native.view, native.check, writable=writable)

    def lock(self, byte: int, kind: int = EXCLUSIVE, length: int = 1) -> bool:
        """Lock bytes of the object, until unlock() or the end of the process; False while another process has a lock there."""
        return try_lock(self.shared.descriptor, byte, "the cleaner's shared object", kind, length)

    def holders(self, end: int) -> list[int]:
        """Return the pids of the processes that hold a segment below `end`. For the cleaner: it sees each hold that is not refused."""
        descriptor = self.shared.descriptor
        while not self.lock(HOLDS_BYTE, length=end):
            found = [pid for segment, pid in self.held() if segment < end]
            if found or find_lock(descriptor, HOLDS_BYTE, end):  # else they have been given back meanwhile
                return found or [UNSEEN]
        unlock(descriptor, HOLDS_BYTE, end)
        return []

    def held(self) -> list[tuple[int, int]]:
        """Return (segment, pid) of every hold; if none of their processes is visible here, of one, with the pid UNSEEN."""
        descriptor = self.shared.descriptor
        first = find_lock(descriptor, HOLDS_BYTE, 0)
        found = {(lock.start - HOLDS_BYTE, lock.pid) for lock in (locks_on(os.fstat(descriptor)) if first else ())
                 if lock.start >= HOLDS_BYTE and lock.kind == SHARED}
        return sorted(found) or ([(first.start - HOLDS_BYTE, UNSEEN)] if first else [])

    def close(self) -> None:
        self.block = None  # type: ignore[assignment]  # a use after close() must raise, not read address 0
        self.shared.close()


class SegmentHolds:
    """The holds of this process. Threads may share it; nested holds on one segment are one lock."""

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._cleaning: Cleaning | None = None
        self._lock = inherited_lock()  # a signal handler in a thread that has it may hold and release
        self._counts: Counter[int] = Counter()
        after_fork(self)

    def hold(self, segment: int) -> bool:
        """Hold the segment that starts at `segment`; False when it is being deleted, or this user may not open the object."""
        with self._lock:
            try:
                cleaning = self._cleaning = self._cleaning or Cleaning(self._folder, writable=False)
            except EngineError:
                return False
            self._counts[segment] += 1  # first: a signal handler that releases the segment must not unlock it for this call
            is_first = self._counts[segment] == 1
            if cleaning.lock(HOLDS_BYTE + segment, SHARED) and not (is_first and segment < load(cleaning.block, "removing_end")):
                return True
            self.release(segment)
            return False

    def release(self, segment: int) -> None:
        """Release one hold; does nothing if this process does not hold the segment."""
        with self._lock:
            self._counts[segment] -= 1
            if self._counts[segment] <= 0:
                del self._counts[segment]
                if self._cleaning is not None:
                    unlock(self._cleaning.shared.descriptor, HOLDS_BYTE + segment, 1)

    def close_if_unused(self) -> bool:
        """Close it unless a segment is held, or a thread holds or releases one now, which may wait for the caller; whether it did."""
        try:  # around it, since an exception of a signal handler may follow it at once
            if not self._lock.acquire(blocking=False):
                return False
            if not self._counts:
                self.close()
            return not self._counts
        finally:
            try:  # not suppress(), at whose begin such an exception may come
                self._lock.release()
            except RuntimeError:  # it was not acquired
                pass

    def close(self) -> None:
        """Release all holds."""
        with self._lock:
            self._counts.clear()
            cleaning, self._cleaning = self._cleaning, None  # before an exception of a signal handler
            if cleaning is not None:
                cleaning.close()

    def _forked(self) -> None:
        """Close the child's copies, which would keep the parent's locks after its end."""
        self.close()
