"""Holds on segments, across processes: RocketMQ's ReferenceResource (hold, release) in shared memory.

    reader    holds = SegmentHolds(folder); holds.hold(segment) ... holds.release(segment)
    cleaner   holders(cleaning, end) -> pids of living processes that hold a segment below `end`

While a reader holds a segment, the cleaner does not delete it, but waits at most
destroy_mapped_file_interval_forcibly_ms. It refuses new holds on a segment that it is about
to delete. It clears the hold of a reader that died, which it recognizes by pid and start
time. Short reads need no hold: after they have copied the bytes they check that the log's
minimum offset is not beyond them.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyengine.errors import EngineError, EngineUnavailableError, OtherLayoutError
from pyengine.ipc import shared_objects
from pyengine.ipc.heartbeat import process_start_ms
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.native import cleaning as native

if TYPE_CHECKING:
    from pyengine._native import ms_cleaning


def create_cleaning(folder: SharedFolder, epoch: int, name: str = shared_objects.CLEANING) -> None:
    """Create the shared object; the supervisor calls it before it publishes the control block."""
    with folder.create(name, native.CLEANING_BYTES) as shared:
        native.format_cleaning(native.view(shared.memory), epoch)


def open_or_replace(folder: SharedFolder, epoch: int) -> Cleaning:
    """Open the object for the cleaner; one that a reader has truncated or written over is replaced, without its holds.

    EngineUnavailableError if it has no name any more, or the layout of another version.
    """
    try:
        return Cleaning(folder)
    except EngineUnavailableError as error:
        if isinstance(error, OtherLayoutError) or shared_objects.CLEANING not in folder.names():
            raise
    new = f"{shared_objects.CLEANING}.new"
    folder.unlink(new)
    create_cleaning(folder, epoch, new)
    os.rename(folder.path / new, folder.path / shared_objects.CLEANING)
    return Cleaning(folder)


class Cleaning:
    """The cleaner's shared object as one process has it mapped; `block` is its `struct ms_cleaning *`."""

    def __init__(self, folder: SharedFolder) -> None:
        """Raises EngineUnavailableError when the object does not exist, has another layout, or belongs to another user."""
        self.shared, self.block = folder.open_checked(shared_objects.CLEANING, native.view, native.check)

    def close(self) -> None:
        self.block = None  # type: ignore[assignment]  # a use after close() must raise, not read address 0
        self.shared.close()

    def __enter__(self) -> Cleaning:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SegmentHolds:
    """The holds of this process. Threads may share it; nested holds on one segment take one slot."""

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._cleaning = Cleaning(folder)
        self._lock = threading.RLock()  # a signal handler in a thread that has it may hold and release
        self._pid = 0
        self._owner = 0
        self._slots: dict[int, list[int]] = {}  # segment -> [slot, count]

    def hold(self, segment: int) -> bool:
        """Hold the segment that starts at `segment`; False when it is being deleted or no slot is free."""
        with self._lock:
            self._become_this_process()
            held = self._slots.get(segment)
            if held is not None:
                held[1] += 1
                return True
            if not self._is_whole() and not self._reopen():
                return False
            slot = native.take(self._cleaning.block, self._owner, segment)
            if slot in (-errno.ENOENT, -errno.EAGAIN):
                return False
            held = self._slots.setdefault(segment, [slot, 0])
            held[1] += 1
            if held[0] != slot:  # of a signal handler, meanwhile
                native.release(self._cleaning.block, slot, self._owner)
            return True

    def release(self, segment: int) -> None:
        """Release one hold; does nothing if this process does not hold the segment."""
        with self._lock:
            self._become_this_process()
            held = self._slots.get(segment)
            if held is None:
                return
            held[1] -= 1
            if held[1] == 0:
                del self._slots[segment]
                if self._is_whole():
                    native.release(self._cleaning.block, held[0], self._owner)

    def close(self) -> None:
        """Release all holds."""
        with self._lock:
            if self._pid == os.getpid() and self._is_whole():
                for slot, _ in self._slots.values():
                    native.release(self._cleaning.block, slot, self._owner)
            self._slots.clear()
            self._cleaning.close()

    def _is_whole(self) -> bool:
        """Whether no other reader has truncated the object: a look at a page that is gone would end this process."""
        return os.fstat(self._cleaning.shared.descriptor).st_size >= native.CLEANING_BYTES

    def _reopen(self) -> bool:
        """Open the object with which the cleaner has replaced a truncated one; False if there is none."""
        try:
            replacement = Cleaning(self._folder)
        except EngineError:
            return False
        self._cleaning.close()
        self._cleaning, self._slots = replacement, {}
        return True

    def _become_this_process(self) -> None:
        """In a forked child forget the holds, which belong to the parent."""
        pid = os.getpid()
        if self._pid != pid:
            self._pid, self._owner = pid, native.owner_mark(pid, process_start_ms(pid) or 0)
            self._slots = {}


def holders(block: ms_cleaning, end: int) -> list[int]:
    """Return the pids of living processes that hold a segment below `end`; clear the holds of dead processes."""
    found = []
    lives = functools.cache(_lives)
    for slot, mark in _owned(block, end):
        if lives(mark):
            found.append(native.owner_of(mark)[0])
        else:
            native.reap(block, slot, mark)
    return found


def reap_dead(block: ms_cleaning) -> int:
    """Clear all holds of dead processes; return their number."""
    return sum(native.reap(block, slot, mark) for slot, mark in _owned(block, -1) if not _lives(mark))


def held_segments(block: ms_cleaning) -> list[tuple[int, int]]:
    """Return (segment, pid) of every hold, for `status`."""
    return sorted((block.holds[slot].segment, native.owner_of(mark)[0]) for slot, mark in _owned(block, 1 << 62))


def _owned(block: ms_cleaning, end: int) -> Iterator[tuple[int, int]]:
    """Yield (slot, owner's mark) of the holds below `end`; -1: of all slots that have an owner. A mark of 0 was released meanwhile."""
    slot = native.find(block, 0, end)
    while slot >= 0:
        yield slot, block.holds[slot].owner
        slot = native.find(block, slot + 1, end)


def _lives(mark: int) -> bool:
    pid, start_low = native.owner_of(mark)
    start_ms = process_start_ms(pid) if pid else None
    return start_ms is not None and start_ms & 0xFFFFFFFF == start_low
