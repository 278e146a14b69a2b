"""CommitLog.FlushRealTimeService: in the asynchronous modes, sync what is dirty once in an interval.

RocketMQ's flushes four pages or more each 500 ms, everything only each 10 s. Here every
flush takes everything, so `flushed` lags at most the interval plus one sync. Wake-ups
are ignored while nothing is due, as with flushCommitLogTimed.
"""

from __future__ import annotations

import os

from pyengine.config import EngineConfig
from pyengine.errors import FlushError
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native import scan, store_stats
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import fdatasync, monotonic_ns
from pyengine.services.freeze import freeze
from pyengine.services.unflushed_segments import UnflushedSegments
from pyengine.storage.segment_files import map_read_only

RECHECK_S = 0.02


def take_over(memory: EngineMemory) -> int:
    """Become the flusher: a new incarnation, for which the writer must first sync its own descriptors clean.

    The kernel tells each open file of a failed write-back once: what a dead flusher was
    told, this one never hears. The writer's descriptors are the oldest ones.
    """
    lines = memory.control.flusher
    incarnation = native.load(lines, "incarnation") + 1
    native.store(lines, "incarnation", incarnation)
    failpoint("flusher_taken_over")
    memory.wake(native.WRITER)
    return incarnation


def last_store_time(memory: EngineMemory, root: str | os.PathLike[str], start: int, target: int) -> int:
    """Store time of the last record below `target`, as far as it can be told; never one ahead of it.

    Both are record boundaries. Where the commit slot speaks of this very target it
    knows; otherwise the records from `start` on are walked.
    """
    wrote, slot_time_ms = native.committed_slot(memory.control)
    if wrote == target:
        return slot_time_ms
    _, time_ms = native.flush_pair(memory.control)
    size = memory.identity.segment_bytes
    segments = UnflushedSegments(root, size)
    while start < target:
        base = start - start % size
        end = min(target, base + size)
        mapping = map_read_only(segments.path(base))
        walked = scan.walk(mapping, base, start, end, check_crc=False)
        if walked.messages:
            time_ms = max(time_ms, walked.last_store_timestamp_ms)
        if walked.reason not in ("range_end", "blank"):
            break
        start = end
    return time_ms


class FlushRealTimeService:
    """Timed flushing of the commit log."""

    def __init__(self, memory: EngineMemory, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._memory = memory
        self._root = root
        self._control = memory.control
        self._interval_ns = config.flush_interval_commit_log_ms * 1_000_000
        self._segments = UnflushedSegments(root, memory.identity.segment_bytes)
        self._due_ns = 0
        self._flushed = native.load_position(self._control.flushed)
        self._segments.follow(self._flushed, self._ready_end())
        self.incarnation = take_over(memory)

    def _ready_end(self) -> int:
        return native.load(self._control.allocator, "ready_end")

    def _may_flush(self) -> bool:
        return (native.load(self._control.state, "frozen") == 0
                and native.load(self._control.writer, "verified_flusher") == self.incarnation)

    def work(self) -> bool:
        """Flush everything if it is due."""
        self._segments.follow(self._flushed, self._ready_end())
        if monotonic_ns() >= self._due_ns and self.flush():
            self._due_ns = monotonic_ns() + self._interval_ns
        return False

    def flush(self) -> bool:
        """Sync [flushed, committed) and publish it; whether there was something and it could be done."""
        target = native.load_position(self._control.committed)
        if target <= self._flushed or not self._may_flush():
            return False
        self._segments.follow(self._flushed, max(target, self._ready_end()))
        time_ms = last_store_time(self._memory, self._root, self._flushed, target)
        lines = self._control.flusher
        for start in self._segments.between(self._flushed, target):
            failpoint("timed_sync_begins")
            began_ns = monotonic_ns()
            try:
                fdatasync(self._segments.descriptors[start], self._segments.path(start))
            except FlushError as error:
                freeze(self._memory, self._root, native.FLUSHER, error)
                return False
            took_ns = monotonic_ns() - began_ns
            store_stats.add_sync(self._memory.counters, took_ns)
            native.store(lines, "syncs", native.load(lines, "syncs") + 1)
            native.store(lines, "sync_ns_total", native.load(lines, "sync_ns_total") + took_ns)
            native.store(lines, "sync_ns_max", max(native.load(lines, "sync_ns_max"), took_ns))
        failpoint("timed_synced")
        native.publish_flushed(self._control, target, time_ms)
        failpoint("timed_published")
        self._flushed = target
        return True

    def pause_s(self) -> float:
        if native.load_position(self._control.committed) <= self._flushed:
            return self._interval_ns / 1e9
        if native.load(self._control.writer, "verified_flusher") != self.incarnation:
            return RECHECK_S
        return max(0.0, min(self._interval_ns, self._due_ns - monotonic_ns()) / 1e9)

    def drain(self) -> bool:
        """Flush to the end; gives up where the store is frozen or no writer vouches for this incarnation."""
        return self.flush()

    def close(self) -> None:
        self._segments.close()
