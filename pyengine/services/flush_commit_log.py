"""CommitLog's services: commit the pool's buffers to the segment files, and flush the log, by the store's flush mode.

FlushRealTimeService, for the asynchronous modes, syncs everything that is dirty once in an interval, or when it lies in many
segments. Wake-ups before the interval has passed are ignored, as with RocketMQ's flushCommitLogTimed.

GroupCommitService, for sync mode, syncs as soon as a record is appended, and again until none is left. A waiting put watches
`flushed` itself, so that a round is one fdatasync and one broadcast. The rounds of both are in C (csrc/group_commit.cdef.h).

CommitRealTimeService, with a pool, writes the new bytes of its buffers to the files with pwrite and then moves `committed`
(MappedFile.commit, TransientStorePool). RocketMQ waits for four pages or 200 ms; here a put on an idle store is committed, and so
visible to readers, at once, and under load pieces grow to PIECE_BYTES or to the puts of a millisecond. C runs the common round
(csrc/pool_commit.cdef.h); the code here handles what that call returns for: the next segment, errors, buffers to free. A full disk is
not a failure: `committed` waits, the service tries again each half second, and while its errno is in shared memory the writer refuses
puts that find no free buffer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyengine.errors import DiskError, DiskFullError, FlushError, InvariantError
from pyengine.formats.small_file import TRANSIENT_ERRNOS
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import SharedObject
from pyengine.native import control as native
from pyengine.native import flush, scan, waiting
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import PoolCommitLoop, monotonic_ns, raise_disk_error
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.config import EngineConfig
from pyengine.storage.durable_writes import open_file, rewrite
from pyengine.storage.mapped_file import mapped, renew_zeros
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine.native.waiting import Latch

RECHECK_S = 0.02
ROUND_NS = 100_000_000        # of group commits in one work()
IDLE_ROUND_NS = 1_000_000_000  # of waiting for the first
RECHECK_NS = 5_000_000
WRITE_AGAIN_BYTES = 16 << 20  # between two heartbeats
PIECE_BYTES = 1 << 20
UNFLUSHED_SEGMENTS_MAX = 16  # of a timed flush; the limit of descriptors has room for so many (WRITER_DESCRIPTORS)
COMMIT_ROUND_NS = 50_000_000  # one work() lasts at most about this long
IDLE_PAUSE_S = 1.0
STREAM = waiting.Stream(gather_ns=1_000_000, quiet_ns=3_000_000)
RETRY_NS = 500_000_000  # after a write to a full disk
NO_SEGMENT = -1


class FlushService(Service):
    """The common base of both flush services: the descriptors of unflushed segments, and the right to move `flushed`."""

    KIND = native.FLUSHER

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._segments = UnflushedSegments(context.store)
        self.incarnation = native.load(self._control.flusher, "incarnation") + 1
        self._group = flush.GroupCommit(
            self._control, self._memory.latch(native.FLUSHER).semaphore, self.incarnation, self._memory.counters, self._recorder)
        self._follow()
        # The kernel reports a failed write-back once to each open file, so one that a dead flusher was told of is not reported to this
        # one's descriptors. This flusher may move `flushed` after the writer has synced its own, which are older, without an error; a
        # writer that found unflushed bytes when it began writes them again before (services/put_message.py).
        native.store(self._control.flusher, "incarnation", self.incarnation)
        failpoint("flusher_taken_over")
        self._memory.wake(native.WRITER)

    def _follow(self) -> None:
        """Open the segments that may have unflushed bytes, close those that are flushed."""
        ready_end = max(native.load(self._control.allocator, "ready_end"), native.load_position(self._control.committed))
        try:
            self._segments.follow(native.load_position(self._control.flushed), ready_end)
        except DiskError as error:
            self._freeze_if_read_only(error)
        self._group.use(self._segments.descriptors)

    @property
    def _is_verified(self) -> bool:
        """Whether the writer has synced its own descriptors, without an error, for this incarnation."""
        return native.load(self._control.writer, "verified_flusher") == self.incarnation

    def flush(self) -> bool:
        """Sync [flushed, committed) and move `flushed`; False if there was nothing to sync, no writer has vouched yet, or it failed."""
        flushed, target = native.load_position(self._control.flushed), native.load_position(self._control.committed)
        if target <= flushed or self._is_frozen or not self._is_verified:
            return False
        self._follow()
        try:
            return self._group.once()
        except OSError:
            self._freeze_after_sync()
            return False

    def _freeze_after_sync(self) -> None:
        error_number, base = self._group.failure
        path = self._segments.path(base)
        self._freeze(FlushError(f"fdatasync {path}", errno=error_number, path=path))

    def drain(self) -> bool:
        """Flush to the end; give up if the store is frozen or no writer has synced its descriptors for this incarnation."""
        return self.flush()

    def close(self) -> None:
        self._segments.close()


class FlushRealTimeService(FlushService):
    """Timed flushing of the commit log."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.take_settings(context.config)

    def take_settings(self, config: EngineConfig) -> None:
        """Take the flush interval; the next flush is due at once."""
        self._interval_ns = config.flush_interval_commit_log_ms * 1_000_000
        self._due_ns = 0

    def work(self) -> bool:
        """Flush everything if a flush is due, or so many segments wait that writer and flusher would run out of descriptors."""
        self._follow()
        unflushed = native.load_position(self._control.committed) - native.load_position(self._control.flushed)
        if (monotonic_ns() >= self._due_ns or unflushed >= UNFLUSHED_SEGMENTS_MAX * self._segments.segment_bytes) and self.flush():
            self._due_ns = monotonic_ns() + self._interval_ns
        return False

    def pause_s(self) -> float:
        if self._is_frozen or native.load_position(self._control.committed) <= native.load_position(self._control.flushed):
            return self._interval_ns / 1e9
        if not self._is_verified:
            return RECHECK_S
        return max(0.0, min(self._interval_ns, self._due_ns - monotonic_ns()) / 1e9)


class GroupCommitService(FlushService):
    """Flushing of the commit log on each wake-up. work() itself sleeps on the latch."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        waiting.schedule(waiting.INTERACTIVE)

    def share_cpu(self) -> None:
        """Run on the writer's CPU from now on."""
        self._group.follow_writer()

    def work(self) -> bool:
        """Wait for a put, for up to IDLE_ROUND_NS, then run group commits for ROUND_NS."""
        self._follow()
        idle_ns = IDLE_ROUND_NS if self._is_verified or self._is_frozen else RECHECK_NS
        outcome = self._group.run(monotonic_ns() + idle_ns, ROUND_NS)
        if outcome == flush.GROUP_FAILED:
            self._freeze_after_sync()
        return outcome == flush.GROUP_SEGMENT


class UnflushedSegments:
    """Descriptors of the segments of [flushed, ready_end), by start offset.

    A segment is opened as soon as it is ready, before the writer writes to it, and kept open until all of it is
    flushed: the kernel reports a failed write-back once to each open file, and maybe never to a descriptor that
    was opened after the failure.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.segment_bytes = store.segment_bytes
        self.descriptors: dict[int, int] = {}

    def path(self, start: int) -> str:
        return str(self._store.commit_log_segment(start))

    def follow(self, flushed: int, ready_end: int) -> None:
        """Open the segments that have become ready, close those that are flushed. Cheap when nothing has changed."""
        for start in [start for start in self.descriptors if start + self.segment_bytes <= flushed]:
            os.close(self.descriptors.pop(start))
        for start in range(flushed - flushed % self.segment_bytes, ready_end, self.segment_bytes):
            if start not in self.descriptors:
                self.descriptors[start] = open_file(self.path(start), os.O_RDWR | os.O_CLOEXEC)

    def write_again(self, start: int, end: int, heartbeat: Callable[[], None]) -> None:
        """Rewrite the records of [start, end) in place, durably, and read them back. No process may write to the log meanwhile.

        This repairs bytes whose sync may have failed before these descriptors were opened, and the zeros after them. DiskFullError
        when the disk is full, another DiskError when the records could not be written or are damaged.
        """
        while start < end:
            base = start - start % self.segment_bytes
            stop = min(end, base + self.segment_bytes)
            path = self._store.commit_log_segment(base)
            for at in range(start - base, stop - base, WRITE_AGAIN_BYTES):
                rewrite(path, at, min(at + WRITE_AGAIN_BYTES, stop - base))
                heartbeat()
            with mapped(path) as view:
                walked = scan.walk(view, base, start, stop)
            if walked.reason not in ("range_end", "blank"):
                raise DiskError(f"{path} was whole up to {stop} and is not beyond {walked.end_offset} ({walked.reason})",
                                errno=errno.EIO, path=str(path))
            start = stop
        for base in self.descriptors:
            if base + self.segment_bytes > end:
                renew_zeros(self._store.commit_log_segment(base), max(end - base, 0))

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()


class TransientStorePool:
    """The pool's buffers in shared memory: the segment that each holds, and their mappings in this process."""

    def __init__(self, memory: EngineMemory, *, writable: bool) -> None:
        self._memory = memory
        self._writable = writable
        self._mapped = memory.open_pool(writable=writable)

    def find(self, base: int) -> int | None:
        """Return the number of the buffer that holds the segment at `base` (NO_SEGMENT: of a free buffer); None if there is none."""
        for number in range(self._memory.identity.pool_buffers):
            if native.load(self._memory.control.pool[number], "segment_base") == base:
                return number
        return None

    def buffer(self, number: int) -> SharedObject:
        """Return the buffer, which stays mapped until close()."""
        if number not in self._mapped:
            self._mapped[number] = self._memory.folder.attach(shared_objects.pool_name(number), writable=self._writable)
        return self._mapped[number]

    def close(self) -> None:
        """Unmap all buffers."""
        while self._mapped:
            self._mapped.popitem()[1].close()


class CommitRealTimeService(Service):
    """Writes the pool's bytes to the files, and moves `committed` up to `wrote`."""

    KIND = native.COMMITTER

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        memory = self._memory
        self.take_settings(context.config)
        self._pool = TransientStorePool(memory, writable=False)
        self._descriptor = -1
        self._path = ""
        self._loop = PoolCommitLoop(
            self._control, memory.latch(native.COMMITTER), memory.latch(native.REPUTTER),
            memory.latch(native.REPLICATOR) if memory.identity.replicates else None,
            piece_bytes=PIECE_BYTES, stream=STREAM, recorder=self._recorder)
        self._freed_to = 0
        native.store(self._line, "error_number", 0)
        self._retry_ns = 0
        self._free_full_buffers()
        memory.wake(native.REPUTTER)  # a committer that was killed after it moved `committed` may not have woken them
        if memory.identity.replicates:
            memory.wake(native.REPLICATOR)
        waiting.sleep_precisely()

    def take_settings(self, config: EngineConfig) -> None:
        """Take the longest pause between two commits."""
        self._pause_s = max(IDLE_PAUSE_S, config.commit_interval_commit_log_ms / 1000)

    def work(self) -> bool:
        """Commit what the writer has written; in a stream of puts, in larger pieces."""
        return self._run(monotonic_ns() + COMMIT_ROUND_NS)

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep, and commit the puts that arrive meanwhile."""
        if self._retry_ns or self._is_frozen:
            return super().wait(latch, timeout_s)
        return self._run(monotonic_ns() + int(timeout_s * 1e9), may_sleep=True)

    def _run(self, until_ns: int, *, may_sleep: bool = False) -> bool:
        """Run rounds in C and handle what they return for; return whether `committed` moved."""
        if self._is_frozen or monotonic_ns() < self._retry_ns:
            return False
        before = self._loop.committed
        try:
            why = self._loop.run(until_ns, may_sleep=may_sleep)
            if why == flush.SEGMENT:
                self._free_full_buffers()
                if native.load_position(self._control.wrote) > self._loop.committed:
                    self._open()
                    why = self._loop.run(until_ns)
            if why == flush.FAILED:
                raise_disk_error(-self._loop.error_number, "write", self._path)
        except DiskFullError as error:
            self._wait_for_room(error, "free space")
            return False
        except DiskError as error:
            if error.errno in TRANSIENT_ERRNOS:  # the file could not be opened: nothing was written, so nothing is lost
                self._wait_for_room(error, "raise the limits of the machine")
            else:
                self._freeze(error)
            return False
        committed = self._loop.committed
        if why == flush.BROKEN:
            raise InvariantError(f"the pool buffer of segment {committed - committed % self._segment_bytes}: {self._loop.reason} at "
                                 f"{committed}, below wrote = {native.load_position(self._control.wrote)}")
        if committed >= self._freed_to + self._segment_bytes:
            self._free_full_buffers()
        if committed == before:
            return False
        if self._blocked.text:
            self._blocked.clear()
            self._retry_ns = 0
            native.store(self._line, "error_number", 0)
        return True

    def _wait_for_room(self, error: DiskError, remedy: str) -> None:
        self._blocked.set(f"cannot commit what is in the pool: {error}; trying again each {RETRY_NS / 1e9:g} s: {remedy}",
                          error_number=error.errno or 0)
        native.store(self._line, "error_number", error.errno)
        self._count_error()
        self._retry_ns = monotonic_ns() + RETRY_NS
        failpoint("pool_without_room")
        self._memory.wake(native.WRITER)

    def _open(self) -> None:
        """Give the C loop the buffer and the file of the segment that `committed` is in."""
        committed = self._loop.committed
        base = committed - committed % self._segment_bytes
        number = self._pool.find(base)
        if number is None:
            raise InvariantError(f"no pool buffer holds the segment {base}, but "
                                 f"{committed}..{native.load_position(self._control.wrote)} is written")
        self._close_segment()
        self._path = str(self._store.commit_log_segment(base))
        self._descriptor = open_file(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self._loop.use_segment(self._pool.buffer(number).memory, base, self._descriptor)

    def _close_segment(self) -> None:
        self._loop.use_segment(None)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _free_full_buffers(self) -> None:
        """Free the buffers of segments that are committed to the end, also those that a dead committer did not free."""
        freed, committed = False, self._loop.committed
        for number in range(self._memory.identity.pool_buffers):
            base = native.load(self._control.pool[number], "segment_base")
            if base >= 0 and base + self._segment_bytes <= committed:
                native.compare_and_swap(self._control.pool[number], "segment_base", base, NO_SEGMENT)
                failpoint("pool_buffer_freed")
                freed = True
        self._freed_to = committed - committed % self._segment_bytes
        if freed:
            self._memory.wake(native.WRITER)

    def pause_s(self) -> float:
        if self._blocked.text and not self._is_frozen:
            return max(0.01, (self._retry_ns - monotonic_ns()) / 1e9)
        return self._pause_s

    def drain(self) -> bool:
        """Commit to the end. The writer has ended by now."""
        return self._run(monotonic_ns())

    def close(self) -> None:
        self._close_segment()
        self._pool.close()
