"""CommitLog.CommitRealTimeService: pool buffers into the files (MappedFile.commit, TransientStorePool).

The writer fills a buffer in shared memory for each segment; this service moves what is
written into the segment's file with pwrite and then moves `committed`. RocketMQ waits for
four pages or 200 ms; here a put on an idle store is committed at once, so that it is
visible at once, and under load pieces grow to PIECE_BYTES or a millisecond's worth.

`committed` is always a record boundary: pieces are cut where the native walk says. Of the
blank record that closes a segment only its header is written: the filler after it is
stale bytes of the buffer's last segment, and the file holds zeros there.

A disk without room is no failure: `committed` waits, it is tried again each half second, and
the errno in shared memory has the writer refuse what finds no free buffer.

A buffer is free again once its segment is committed to the end. After a crash of this
process the next one starts at `committed`: bytes between were maybe written already, and
are written again the same.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from pyengine._native import ffi
from pyengine.errors import DiskError, DiskFullError, InvariantError, disk_errors
from pyengine.formats.constants import BLANK_HEADER_BYTES
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import SharedObject
from pyengine.native import control as native
from pyengine.native import scan, waiting
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import monotonic_ns, pwrite_all
from pyengine.native.waiting import StreamDetector
from pyengine.services.service import Service, ServiceContext

PIECE_BYTES = 1 << 20
SMALL_BYTES = 64 << 10
NAP_NS = 1_000_000    # in a stream of puts, what comes within this time is committed together
QUIET_NS = 3_000_000  # the stream is over after so long without one
RETRY_NS = 500_000_000  # after a write that found no room
NO_SEGMENT = -1


class TransientStorePool:
    """The pool's buffers in shared memory: which of them holds which segment, and their mappings in this process."""

    def __init__(self, memory: EngineMemory, *, writable: bool) -> None:
        self._memory = memory
        self._writable = writable
        self._mapped = memory.open_pool(writable=writable)

    def find(self, base: int) -> int | None:
        """The number of the buffer that holds the segment at `base`, for NO_SEGMENT of a free one; None if there is none."""
        for number in range(self._memory.identity.pool_buffers):
            if native.load(self._memory.control.pool[number], "segment_base") == base:
                return number
        return None

    def buffer(self, number: int) -> SharedObject:
        """The buffer, mapped until close()."""
        if number not in self._mapped:
            self._mapped[number] = self._memory.folder.attach(shared_objects.pool_name(number), writable=self._writable)
        return self._mapped[number]

    def close(self, unmap: Callable[[SharedObject], None] = SharedObject.close) -> None:
        """Unmap all of them."""
        while self._mapped:
            unmap(self._mapped.popitem()[1])


class CommitRealTimeService(Service):
    """Moves `committed` up to `wrote`, through the files."""

    KIND = native.COMMITTER

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._interval_s = context.config.commit_interval_commit_log_ms / 1000
        self._pool = TransientStorePool(self._memory, writable=False)
        self._base = NO_SEGMENT
        self._descriptor = -1
        self._path = ""
        self._stream = StreamDetector(NAP_NS, QUIET_NS)
        self._committed = native.load_position(self._control.committed)
        native.store(self._line, "error_number", 0)
        self._retry_ns = 0
        self._free_full_buffers()
        self._wake_followers()  # a committer that was killed after it had moved `committed` woke no worker
        waiting.sleep_precisely()

    def work(self) -> bool:
        """Commit one piece, unless it is so small that waiting a moment for more is better."""
        if self._is_frozen or monotonic_ns() < self._retry_ns:
            return False
        wrote = native.load_position(self._control.wrote)
        if wrote - self._committed < SMALL_BYTES and self._stream.is_busy or wrote <= self._committed:
            if not self._stream.wait_for_next(self._control.wrote, self._committed):
                return False
            wrote = native.load_position(self._control.wrote)
        done = self._commit(wrote)
        self._stream.worked(monotonic_ns())
        return done

    def _commit(self, wrote: int) -> bool:
        """Commit one piece; False when there is no room for it, or the store froze over it."""
        start = self._committed
        base = start - start % self._segment_bytes
        number = self._pool.find(base)
        if number is None:
            raise InvariantError(f"no pool buffer holds the segment {base}, but {start}..{wrote} is written")
        view = self._pool.buffer(number).memory
        limit = min(wrote, base + self._segment_bytes)
        walked = scan.walk(view, base, start, min(limit, start + PIECE_BYTES), limit=limit, check_crc=False)
        end = walked.end_offset
        try:
            if end > start:
                self._write(view, base, start, end)
                failpoint("pool_piece_written")
            if walked.reason == "blank":
                self._write(view, base, end, end + BLANK_HEADER_BYTES)
                failpoint("pool_blank_written")
                end = base + self._segment_bytes
        except DiskFullError as error:
            self._wait_for_room(error)
            return False
        except DiskError as error:
            self._freeze(error)
            return False
        if end <= start:
            raise InvariantError(f"pool buffer {number}: {walked.reason} at {start}, below wrote = {wrote}")
        if self.blocked_reason:
            self._blocked.clear()
            native.store(self._line, "error_number", 0)
        native.store_position(self._control.committed, end)
        failpoint("pool_committed")
        self._committed = end
        self._wake_followers()
        if end % self._segment_bytes == 0:
            self._free_full_buffers()
        return True

    def _wake_followers(self) -> None:
        self._memory.wake(native.REPUTTER)
        if self._memory.identity.replicates:
            self._memory.wake(native.REPLICATOR)

    def _wait_for_room(self, error: DiskFullError) -> None:
        self._blocked.set(f"cannot commit what is in the pool: {error}; trying again each {RETRY_NS / 1e9:g} s: free space")
        native.store(self._line, "error_number", error.errno)
        self._count_error()
        self._retry_ns = monotonic_ns() + RETRY_NS
        failpoint("pool_without_room")
        self._memory.wake(native.WRITER)

    def _write(self, view: mmap.mmap, base: int, start: int, end: int) -> None:
        if self._base != base:
            self._open(base)
        data = ffi.from_buffer("uint8_t[]", view)
        pwrite_all(self._descriptor, data + (start - base), start - base, self._path, length=end - start)

    def _open(self, base: int) -> None:
        self._close_segment()
        self._path = str(self._store.commit_log_segment(base))
        with disk_errors("open", self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self._base = base

    def _close_segment(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._base = NO_SEGMENT

    def _free_full_buffers(self) -> None:
        """Free the buffers of segments that are committed to the end; a predecessor may have left one."""
        freed = False
        for number in range(self._memory.identity.pool_buffers):
            base = native.load(self._control.pool[number], "segment_base")
            if base >= 0 and base + self._segment_bytes <= self._committed:
                native.compare_and_swap(self._control.pool[number], "segment_base", base, NO_SEGMENT)
                failpoint("pool_buffer_freed")
                freed = True
        if freed:
            self._memory.wake(native.WRITER)

    def pause_s(self) -> float:
        if self.blocked_reason:
            return max(0.01, (self._retry_ns - monotonic_ns()) / 1e9)
        return self._interval_s

    def drain(self) -> bool:
        """Commit to the end. The writer is gone by now."""
        wrote = native.load_position(self._control.wrote)
        if self._is_frozen or wrote <= self._committed:
            return False
        return self._commit(wrote)

    def close(self) -> None:
        self._close_segment()
        self._pool.close()
