"""CommitLog.CommitRealTimeService: pool buffers into the files (MappedFile.commit, TransientStorePool).

The writer fills a buffer in shared memory for each segment; this service moves what is
written into the segment's file with pwrite and then moves `committed`. RocketMQ waits for
four pages or 200 ms; here a put on an idle store is committed at once, so that it is
visible at once, and under load pieces grow to PIECE_BYTES or a millisecond's worth. The common round, from the wake-up to
the next sleep, is one call of C (csrc/pool_commit.cdef.h); here is what it returns for: segments, errors, buffers.

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

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyengine.errors import DiskError, DiskFullError, InvariantError, disk_errors
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import SharedObject
from pyengine.native import control as native
from pyengine.native import pool_commit, waiting
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import monotonic_ns, raise_disk_error
from pyengine.native.pool_commit import PoolCommitLoop
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.config import EngineConfig

if TYPE_CHECKING:
    from pyengine.native.waiting import Latch

PIECE_BYTES = 1 << 20
ROUND_NS = 50_000_000  # one work() lasts at most about this long
IDLE_PAUSE_S = 1.0
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
        memory = self._memory
        self.take_settings(context.config)
        self._pool = TransientStorePool(memory, writable=False)
        self._descriptor = -1
        self._path = ""
        self._loop = PoolCommitLoop(
            self._control, memory.latch(native.COMMITTER), memory.latch(native.REPUTTER),
            memory.latch(native.REPLICATOR) if memory.identity.replicates else None,
            segment_bytes=self._segment_bytes, piece_bytes=PIECE_BYTES, nap_ns=NAP_NS, quiet_ns=QUIET_NS,
            recorder=self._recorder)
        self._freed_to = 0
        native.store(self._line, "error_number", 0)
        self._retry_ns = 0
        self._free_full_buffers()
        self._wake_followers()  # a committer that was killed after it had moved `committed` woke no worker
        waiting.sleep_precisely()

    def take_settings(self, config: EngineConfig) -> None:
        """The longest pause between two commits."""
        self._pause_s = max(IDLE_PAUSE_S, config.commit_interval_commit_log_ms / 1000)

    def work(self) -> bool:
        """Commit what is written, in a stream in pieces that are worth it."""
        return self._run(monotonic_ns() + ROUND_NS)

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep, and commit what comes meanwhile."""
        if self._retry_ns or self._is_frozen:
            return super().wait(latch, timeout_s)
        return self._run(monotonic_ns() + int(timeout_s * 1e9), may_sleep=True)

    def _run(self, until_ns: int, *, may_sleep: bool = False) -> bool:
        """Rounds in C, and what they return for; whether `committed` moved."""
        if self._is_frozen or monotonic_ns() < self._retry_ns:
            return False
        before = self._loop.committed
        try:
            why = self._loop.run(until_ns, may_sleep=may_sleep)
            if why == pool_commit.SEGMENT:
                self._free_full_buffers()
                if native.load_position(self._control.wrote) > self._loop.committed:
                    self._open()
                    why = self._loop.run(until_ns)
            if why == pool_commit.FAILED:
                raise_disk_error(-self._loop.error_number, "write", self._path)
        except DiskFullError as error:
            self._wait_for_room(error)
            return False
        except DiskError as error:
            self._freeze(error)
            return False
        committed = self._loop.committed
        if why == pool_commit.BROKEN:
            raise InvariantError(f"the pool buffer of segment {committed - committed % self._segment_bytes}: {self._loop.reason} at "
                                 f"{committed}, below wrote = {native.load_position(self._control.wrote)}")
        if committed >= self._freed_to + self._segment_bytes:
            self._free_full_buffers()
        if committed == before:
            return False
        if self.blocked_reason:
            self._blocked.clear()
            self._retry_ns = 0
            native.store(self._line, "error_number", 0)
        return True

    def _wake_followers(self) -> None:
        self._memory.wake(native.REPUTTER)
        if self._memory.identity.replicates:
            self._memory.wake(native.REPLICATOR)

    def _wait_for_room(self, error: DiskFullError) -> None:
        self._blocked.set(f"cannot commit what is in the pool: {error}; trying again each {RETRY_NS / 1e9:g} s: free space",
                          error_number=error.errno or 0)
        native.store(self._line, "error_number", error.errno)
        self._count_error()
        self._retry_ns = monotonic_ns() + RETRY_NS
        failpoint("pool_without_room")
        self._memory.wake(native.WRITER)

    def _open(self) -> None:
        """Give the loop the buffer and the file of the segment that `committed` is in."""
        committed = self._loop.committed
        base = committed - committed % self._segment_bytes
        number = self._pool.find(base)
        if number is None:
            raise InvariantError(f"no pool buffer holds the segment {base}, but "
                                 f"{committed}..{native.load_position(self._control.wrote)} is written")
        self._close_segment()
        self._path = str(self._store.commit_log_segment(base))
        with disk_errors("open", self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        self._loop.use_segment(self._pool.buffer(number).memory, base, self._descriptor)

    def _close_segment(self) -> None:
        self._loop.use_segment(None)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _free_full_buffers(self) -> None:
        """Free the buffers of segments that are committed to the end; a predecessor may have left one."""
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
        if self.blocked_reason:
            return max(0.01, (self._retry_ns - monotonic_ns()) / 1e9)
        return self._pause_s

    def drain(self) -> bool:
        """Commit to the end. The writer is gone by now."""
        return self._run(monotonic_ns())

    def close(self) -> None:
        self._close_segment()
        self._pool.close()
