"""CommitLog.putMessage under its lock, as a process of its own: the part of the writer that is not in C.

The pass itself (drain rings, append, commit, answer) is csrc/writer.c. This module gives the pass its segments, sessions, side objects
and larger queue tables, syncs the log's descriptors for a new flusher, and rolls back the pass of a dead writer: the commit slot says
which pass was committed, and the queue offsets that a later one changed are restored and its bytes zeroed. New records of equal size
would otherwise end where old ones begin, and recovery would read the old ones as valid.

In async mode the writer stores the records of a small pass into mapped segments, and gathers those of a large one
(GATHER_BYTES_MIN) and writes them, as in sync mode. It writes all passes if the file system copies on write
(storage/file_system.py), or after a store into a mapping has raised a bus error since the engine started. A write to a full
disk is not a failure: the writer rolls the pass back in the same way, refuses puts, and tries each half second
to write zeros at the position of the next record, until that succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time

from pyengine._native import ffi
from pyengine.errors import DiskError, DiskFullError, EngineUnavailableError, InvariantError, disk_errors
from pyengine.events import Event
from pyengine.formats.small_file import TRANSIENT_ERRNOS, opened
from pyengine.ipc import shared_objects
from pyengine.ipc.shared_objects import SharedObject
from pyengine.native import control as native
from pyengine.native import flush, session, store_stats, waiting
from pyengine.native import writer as pass_
from pyengine.native.failpoints import failpoint
from pyengine.native.writer import Segment, Writer, copy_queue_table
from pyengine.services.flush_commit_log import NO_SEGMENT, TransientStorePool, UnflushedSegments
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.checkpoint import note_sync_failure
from pyengine.storage.commit_log import reserve_step_bytes
from pyengine.storage.file_system import copies_on_write

RUN_NS = 100_000_000        # housekeeping at least this often
IDLE_RUN_NS = 500_000_000   # ... if no pass was made for IDLE_NS and no housekeeping is due
IDLE_NS = 1_000_000_000
SEGMENT_WAIT_S = 5.0        # the wait for a mapped file in RocketMQ (AllocateMappedFileService)
QUEUE_TABLE_WAIT_S = 5.0
QUEUE_TABLE_GROW_AT = 0.6   # ask for a larger table well before the native limit of 3/4
POLL_INTERVAL_S = 0.05
ROOM_RETRY_NS = 500_000_000
ROOM_PROBE_BYTES = 65536
WAKES = (native.COMMITTER, native.FLUSHER, native.REPUTTER)


class PutMessageService(Service):
    """The only appender of the store. It sleeps inside work()."""

    KIND = native.WRITER
    never_idle = True

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        memory, config = context.memory, context.config
        self._warned = False
        self._identity = memory.identity
        self._latch = memory.latch(native.WRITER)
        self._unflushed = UnflushedSegments(context.store)
        self._mappings: dict[int, mmap.mmap] = {}       # async mapped: by segment base
        self._pool = TransientStorePool(memory, writable=True)
        self._locked: set[int] = set()
        self._sessions: dict[int, SharedObject] = {}    # by slot
        self._detaching: set[int] = set()
        self._room_retry_ns = 0
        self._worked_ns = 0  # when a pass was made last
        self._to_roll_back = False  # a pass that met a full disk is not rolled back yet
        self._requests = {  # what a pass returns for
            pass_.RUN_SEGMENT: self._wait_for_segments, pass_.RUN_ROLLED: self._after_roll,
            pass_.RUN_SESSIONS: self._follow_sessions, pass_.RUN_SIDE: self._load_side_entry,
            pass_.RUN_QUEUES: self._wait_for_table, pass_.RUN_FLUSHER: self._sync_for_new_flusher,
            pass_.RUN_FAILED: self._roll_back_failed, pass_.RUN_CUT_SHORT: self._roll_back_cut_short}
        self._follow()
        slot = self._control.slots[native.load_position(self._control.slot_pass) & 1]
        self._doubtful_end = slot.wrote  # a sync of the bytes below may have failed before the descriptors were opened
        if native.load(self._control.flusher, "incarnation") != native.load(self._control.writer, "verified_flusher"):
            self._doubtful_end += 1  # one of zeros after them, too: the sync that the dead writer made for a new flusher
        self._generation = slot.queue_table_generation or 1
        self._table_object, self._table = memory.open_queue_table(self._generation)
        self._roll_back_dead_pass()
        semaphores = {kind: memory.latch(kind).semaphore for kind in (native.ALLOCATOR, *WAKES)}
        if self._identity.replicates and self._identity.role != native.SLAVE and self._identity.mode != native.MODE_POOL:
            semaphores[native.REPLICATOR] = memory.latch(native.REPLICATOR).semaphore
        self._writer = Writer(self._control, self._table, semaphores, self._identity.spin_writer_us,
                              config.zero_ahead_bytes,
                              gather_bytes_min=pass_.GATHER_BYTES_MIN if self._identity.mode == native.MODE_MAPPED else 0)
        self._writer.pointer.reserve_step_bytes = reserve_step_bytes(self._segment_bytes)
        store_stats.count_puts(self._writer.pointer, memory.counters)
        self._recorder.let_writer_record(self._writer.pointer)
        if config.enable_multi_dispatch:
            self._writer.enable_multi_dispatch(lmq=config.enable_lmq, lmq_max=config.max_lmq_consume_queue_num)
        self._writer.open()
        waiting.schedule(waiting.INTERACTIVE)
        self._attach_segments_at_start()
        self._latch.hear_rings()
        session.install_guard(ffi.addressof(self._control.writer, "bus_errors"))
        self._follow_sessions()
        for kind in WAKES:  # a writer that was killed after its commit point may not have woken them
            memory.wake(kind)

    # ---- start ------------------------------------------------------------------

    def _roll_back_dead_pass(self) -> None:
        if pass_.roll_back(self._control, self._table):
            failpoint("dead_pass_put_back")
            wrote, _ = native.committed_slot(self._control)
            intent_end = native.load(self._control.writer, "intent_end")
            start = wrote
            while start < intent_end:
                base = start - start % self._segment_bytes
                end = min(intent_end, base + self._segment_bytes)
                self._zero(base, start, end)
                self._heartbeat()
                start = end
            failpoint("dead_pass_zeroed")
        pass_.rolled_back(self._control)

    def _zero(self, base: int, start: int, end: int) -> None:
        if self._identity.mode == native.MODE_POOL:
            number = self._pool.find(base)
            if number is None:
                return  # the dead writer had not taken a buffer for this segment
            view = ffi.from_buffer("uint8_t[]", self._buffer(number).memory, require_writable=True)
            ffi.memmove(view + (start - base), bytes(end - start), end - start)
            return
        flush.zero_range(self._unflushed.descriptors[base], start - base, end - start, self._unflushed.path(base))

    def _attach_segments_at_start(self) -> None:
        if self._is_frozen:
            return  # no put is taken, and a disk that became read-only opens no segment
        position = self._writer.position
        base = position - position % self._segment_bytes
        if position > base:
            segment = self._segment(base)
            if segment is None:
                raise InvariantError(f"no pool buffer could be had for the segment {base} that is being written")
            self._writer.set_current(segment)
        self._attach_ahead(1)

    # ---- segments ---------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._unflushed.follow(native.load_position(self._control.flushed), native.load(self._control.allocator, "ready_end"))
        except DiskError as error:
            if native.load(self._control.writer, "intent_end") > native.committed_slot(self._control)[0]:
                raise  # records of a pass that is not committed cannot be cleared, so that their puts must not be refused
            self._freeze_if_read_only(error)

    def _segment(self, base: int) -> Segment | None:
        """Return the segment at `base`, whose file is ready; None when no pool buffer is free for it, or the disk became read-only."""
        if base not in self._unflushed.descriptors:
            self._follow()
        descriptor = self._unflushed.descriptors.get(base)
        if descriptor is None:
            return None
        if self._identity.mode == native.MODE_SYNC or self._identity.mode == native.MODE_MAPPED and (
                native.load(self._control.writer, "bus_errors") or copies_on_write(descriptor)):
            return Segment(base, None, descriptor)
        if self._identity.mode == native.MODE_POOL:
            number = self._pool.find(base)
            if number is None and (number := self._pool.find(NO_SEGMENT)) is not None:
                native.compare_and_swap(self._control.pool[number], "segment_base", NO_SEGMENT, base)
                failpoint("pool_buffer_taken")
            if number is None:
                return None
            memory = ffi.from_buffer("uint8_t[]", self._buffer(number).memory, require_writable=True)
            return Segment(base, ffi.cast("uint8_t *", memory), -1)
        mapping = self._mappings.get(base)
        if mapping is None:
            try:
                with disk_errors("map", self._unflushed.path(base)):
                    mapping = self._mappings[base] = mmap.mmap(descriptor, self._segment_bytes)
            except DiskError as error:
                self._freeze_if_read_only(error)
                return None
        return Segment(base, ffi.cast("uint8_t *", ffi.from_buffer(mapping)), descriptor)

    def _buffer(self, number: int) -> SharedObject:
        shared = self._pool.buffer(number)
        if number not in self._locked:
            self._locked.add(number)
            # The buffer is locked so that a put never faults; if the limit forbids that, puts are slower.
            if flush.lock_memory(ffi.from_buffer("uint8_t[]", shared.memory), shared.size_bytes) and not self._warned:
                self._warned = True
                self._report(Event.MEMORY_NOT_LOCKED,
                             "the pool cannot be locked in memory, puts may wait for a page: raise the memlock limit to "
                             f"{self._identity.pool_buffers * self._segment_bytes:,} bytes (ulimit -l, LimitMEMLOCK=)")
        return shared

    def _attach_ahead(self, count: int) -> bool:
        """Give the pass up to `count` segments ahead that are ready; True when it has all of them."""
        while self._writer.ahead_count < count:
            base = self._writer.next_base
            if native.load(self._control.allocator, "ready_end") < base + self._segment_bytes:
                return False
            segment = self._segment(base)
            if segment is None:
                return False
            self._writer.add_ahead(segment)
        return True

    def _wait_for_segments(self) -> None:
        """RUN_SEGMENT: wait for the segments and blocks that the current entry needs; refuse it if they are not ready in time."""
        needed, wanted_end = self._writer.pointer.segments_needed, self._writer.pointer.wanted_end
        if wanted_end > native.load(self._control.writer, "wanted_end"):
            native.store(self._control.writer, "wanted_end", wanted_end)
        failpoint("segment_wanted")
        self._memory.wake(native.ALLOCATOR)
        waited_for_pool = False
        deadline_s = time.monotonic() + SEGMENT_WAIT_S
        while True:
            self._latch.arm()
            short = native.load(self._control.allocator, "reserved_end") < wanted_end
            if self._attach_ahead(needed) and not short:
                self._latch.disarm()
                break
            failing = native.load(self._control.allocator if short else self._control.workers[native.COMMITTER], "error_number")
            if failing or self._is_frozen or time.monotonic() >= deadline_s:
                self._latch.disarm()
                self._writer.pointer.refuse_segment = 1
                break
            waited_for_pool |= not short
            self._heartbeat()
            self._latch.wait(POLL_INTERVAL_S)
        self._writer.pointer.waited_for_pool = waited_for_pool
        if waited_for_pool:
            native.increment(self._control.writer, "pool_waits")

    def _after_roll(self) -> None:
        """RUN_ROLLED: unmap the segments that are full, and attach the next one if it is ready."""
        for segment in self._writer.take_finished():
            self._unmap(segment.base)
        self._follow()
        failpoint("segment_rolled")
        self._memory.wake(native.ALLOCATOR)
        self._attach_ahead(1)

    def _unmap(self, base: int) -> None:
        mapping = self._mappings.pop(base, None)
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a cffi view still refers to it; it is unmapped with the view
                mapping.close()

    # ---- sessions ---------------------------------------------------------------

    def _follow_sessions(self) -> None:
        """RUN_SESSIONS: attach the open sessions, drain and free the dead ones."""
        self._writer.pointer.session_seq_seen = native.load(self._control.session_seq, "value")
        for slot in range(self._identity.sessions_max):
            state = native.load(self._control.sessions[slot], "state")
            if state != native.SESSION_FREE and slot not in self._sessions:
                self._attach_session(slot)
            if state == native.SESSION_DEAD:
                self._detaching.add(slot)
        self._free_dead_sessions()

    def _attach_session(self, slot: int) -> None:
        row = self._control.sessions[slot]
        generation = native.load(row, "generation")
        ring_bytes = native.load(row, "ring_bytes")
        try:
            shared = self._memory.folder.attach(shared_objects.session_name(self._identity.epoch, slot, generation))
        except (EngineUnavailableError, ValueError):  # ValueError: its producer truncated it just now
            self._end_session(slot)
            return
        if shared.size_bytes < session.session_bytes(ring_bytes):
            shared.close()
            self._end_session(slot)
            return
        shared.close_descriptor()  # a writer has a descriptor for each producer, as bring_up.py counts on
        self._sessions[slot] = shared
        view = session.view(shared.memory)
        session.guard(slot, view, shared.size_bytes)
        self._writer.attach_session(slot, view, generation, ring_bytes)
        failpoint("session_attached")

    def _end_session(self, slot: int) -> None:
        """End a session whose shared object is unusable, as if its producer had died."""
        native.compare_and_swap(self._control.sessions[slot], "state", native.SESSION_OPEN, native.SESSION_DEAD)
        self._detaching.add(slot)

    def _free_dead_sessions(self) -> None:
        for slot in tuple(self._detaching):
            if slot in self._sessions:
                if not self._writer.session_drained(slot):
                    continue
                self._detach_session(slot)
            generation = native.load(self._control.sessions[slot], "generation")
            failpoint("session_detached")
            self._memory.folder.unlink(shared_objects.session_name(self._identity.epoch, slot, generation))
            failpoint("session_unlinked")
            native.compare_and_swap(self._control.sessions[slot], "state", native.SESSION_DEAD, native.SESSION_FREE)
            self._detaching.discard(slot)

    def _detach_session(self, slot: int) -> None:
        self._writer.detach_session(slot)
        session.unguard(slot)
        self._sessions.pop(slot).close()

    def _load_side_entry(self) -> None:
        """RUN_SIDE: load an entry that is too large for its ring. It is read, not mapped: its producer might truncate the file."""
        wanted = self._writer.pointer
        generation = native.load(self._control.sessions[wanted.side_slot], "generation")
        name = shared_objects.side_name(self._identity.epoch, wanted.side_slot, generation, wanted.side_sequence)
        path, data = self._memory.folder.path / name, b""
        with contextlib.suppress(OSError), opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                data = os.pread(descriptor, wanted.side_bytes, 0)
        if len(data) == wanted.side_bytes:
            self._writer.load_side(data)
        else:
            wanted.side_failed = 1

    # ---- queue table ------------------------------------------------------------

    def _ask_for_table(self) -> None:
        if native.load(self._control.writer, "queue_table_wanted") <= self._table.slots:
            native.store(self._control.writer, "queue_table_wanted", self._table.slots * 2)
            failpoint("table_wanted")
            self._memory.wake(native.SUPERVISOR)

    def _adopt_table(self) -> bool:
        """Switch to the table that the supervisor offers, if there is a newer one."""
        offered = native.load(self._control.state, "queue_table_generation_offered")
        if offered <= self._generation:
            return False
        shared, table = self._memory.open_queue_table(offered)
        copy_queue_table(table, self._table)
        failpoint("table_copied")
        self._writer.use_table(table)
        failpoint("table_used")
        old_name, old = shared_objects.queues_name(self._generation), self._table_object
        self._generation, self._table_object, self._table = offered, shared, table
        self._memory.folder.unlink(old_name)
        old.close()
        return True

    def _wait_for_table(self) -> None:
        """RUN_QUEUES: the queue table is full; refuse the entry if the supervisor offers no larger one in time."""
        self._ask_for_table()
        deadline_s = time.monotonic() + QUEUE_TABLE_WAIT_S
        while not self._adopt_table():
            if time.monotonic() >= deadline_s:
                self._writer.pointer.queues_refused = 1
                return
            self._latch.arm()
            self._heartbeat()
            self._latch.wait(POLL_INTERVAL_S)

    # ---- durability -------------------------------------------------------------

    def _sync_for_new_flusher(self) -> None:
        """RUN_FLUSHER: sync this writer's descriptors, so that a new flusher may move `flushed`.

        The kernel may have reported a failed write-back to the dead flusher's descriptors, and does not report it to new
        ones. This writer's are older than the bytes that it has written itself, so that one fdatasync of each without an error
        is enough. The bytes that it found unflushed when it began, and the zeros after them, it rewrites first.
        """
        incarnation = native.load(self._control.flusher, "incarnation")
        try:
            if not self._is_doubt_rewritten():
                self._latch.arm()
                self._heartbeat()
                self._latch.wait(POLL_INTERVAL_S)
                return  # the next run returns RUN_FLUSHER again at once
            for start in sorted(self._unflushed.descriptors):
                flush.fdatasync(self._unflushed.descriptors[start], self._unflushed.path(start))
                self._heartbeat()
        except DiskError as error:
            self._freeze(error)
            return
        failpoint("flusher_vouched")
        native.store(self._control.writer, "verified_flusher", incarnation)
        failpoint("flusher_verified")
        self._memory.wake(native.FLUSHER)

    def _is_doubt_rewritten(self) -> bool:
        """Rewrite what was unflushed when this writer began, if it still is; False: not possible yet.

        It is not possible yet while the committer has bytes to write, since no other process may write there, or while
        disk space, a descriptor or memory is lacking.
        """
        flushed, committed = native.load_position(self._control.flushed), native.load_position(self._control.committed)
        if flushed >= self._doubtful_end:
            return True
        if committed < native.load_position(self._control.wrote):
            return False
        failpoint("unseen_sync_found")
        try:
            self._unflushed.write_again(flushed, committed, self._heartbeat)
        except DiskError as error:
            if not isinstance(error, DiskFullError) and error.errno not in TRANSIENT_ERRNOS:
                raise
            self._blocked.set(f"cannot rewrite the bytes that a dead flusher may not have synced: {error}; puts wait, trying again each "
                              f"{POLL_INTERVAL_S:g} s: free what is lacking", error_number=error.errno or 0)
            return False
        self._blocked.clear()
        self._doubtful_end = 0
        return True

    def _roll_back_failed(self) -> None:
        """RUN_FAILED: the disk failed during the pass; roll it back. The store is frozen, so that later puts are refused."""
        if not self._is_frozen:
            self._wait_for_room()
            return
        note_sync_failure(self._store.root, native.load_position(self._control.flushed), "the log", native.reason(self._control))
        with contextlib.suppress(DiskError):  # what the disk does not let clear, recovery may keep
            self._roll_back_dead_pass()
        pass_.rolled_back(self._control)
        self._writer.open()
        for kind in (native.SUPERVISOR, *WAKES, native.CHECKPOINTER):
            self._memory.wake(kind)

    def _roll_back_cut_short(self) -> None:
        """RUN_CUT_SHORT: a producer truncated its session's file during the pass. Roll the pass back and end that session."""
        failpoint("pass_cut_short")
        self._to_roll_back = True
        self._roll_back_without_room()
        if self._to_roll_back:  # the disk is full: the zeros could not be written
            self._writer.pointer.error_number = errno.ENOSPC
            self._wait_for_room()
        else:
            self._housekeeping()

    # ---- full disk --------------------------------------------------------------

    def _wait_for_room(self) -> None:
        """RUN_FAILED because the disk is full: refuse puts until a write succeeds again."""
        number = self._writer.pointer.error_number
        self._blocked.set(f"cannot write the commit log: {os.strerror(number)}; puts are refused, trying again each "
                         f"{ROOM_RETRY_NS / 1e9:g} s: free space", error_number=number)
        native.store(self._control.writer, "pass_started_ms", 0)
        failpoint("pass_without_room")
        self._writer.pointer.no_room = 1
        self._room_retry_ns = flush.monotonic_ns() + ROOM_RETRY_NS
        self._to_roll_back = True
        self._roll_back_without_room()

    def _roll_back_without_room(self) -> None:
        """Roll back the pass as the next writer would after a crash. If the zeros do not fit on the disk, a later call does it."""
        try:
            self._roll_back_dead_pass()
        except DiskFullError:
            return
        self._to_roll_back = False
        self._writer.open()
        self._writer.detach_segments()
        self._attach_segments_at_start()

    def _has_room(self) -> bool:
        """Whether the pass may run: False until the last one is rolled back. Each ROOM_RETRY_NS it tries whether the disk has space."""
        if self._to_roll_back:
            self._roll_back_without_room()
        if self._to_roll_back or flush.monotonic_ns() < self._room_retry_ns:
            return not self._to_roll_back
        segment = self._writer.current
        try:
            if segment is not None and segment.fd >= 0:
                at = self._writer.position - segment.base
                reserved_bytes = native.load(self._control.allocator, "reserved_end") - self._writer.position
                probe = bytes(min(ROOM_PROBE_BYTES, self._segment_bytes - at, max(0, reserved_bytes)))
                flush.pwrite_all(segment.fd, probe, at, self._unflushed.path(segment.base))
        except DiskFullError:
            self._room_retry_ns = flush.monotonic_ns() + ROOM_RETRY_NS
            return True
        self._writer.pointer.no_room = 0
        self._blocked.clear()
        return True

    # ---- the round --------------------------------------------------------------

    def work(self) -> bool:
        """Run passes for up to RUN_NS (idle: IDLE_RUN_NS), then handle the pass's request; return whether entries were executed."""
        if self._writer.pointer.no_room and not self._has_room():
            self._latch.arm()
            self._latch.wait(POLL_INTERVAL_S)
            return False
        before = native.load_position(self._control.slot_pass)
        now_ns = flush.monotonic_ns()
        is_idle = now_ns - self._worked_ns >= IDLE_NS and self._writer.ahead_count > 0 and not self._detaching
        why = self._writer.run(now_ns + (IDLE_RUN_NS if is_idle else RUN_NS))
        self._requests.get(why, self._housekeeping)()
        if native.load_position(self._control.slot_pass) == before:
            return False
        self._worked_ns = flush.monotonic_ns()
        return True

    def _housekeeping(self) -> None:
        self._follow()
        for slot in self._sessions:
            if session.is_broken(slot):
                self._end_session(slot)
        if self._detaching:
            self._free_dead_sessions()
        if self._writer.ahead_count == 0:
            self._attach_ahead(1)
        if self._table.used > self._table.slots * QUEUE_TABLE_GROW_AT and not self._adopt_table():
            self._ask_for_table()

    def share_cpu(self) -> None:
        """In sync mode, stay on a CPU that the flusher can share."""
        if self._identity.mode == native.MODE_SYNC:
            self._writer.share_cpu()

    @property
    def drained(self) -> bool:
        """Whether all entries published in all sessions are executed, and no new flusher waits for this writer's sync."""
        is_verified = native.load(self._control.flusher, "incarnation") == native.load(self._control.writer, "verified_flusher")
        return (is_verified or self._is_frozen) and all(self._writer.session_drained(slot) for slot in self._sessions)

    def close(self) -> None:
        """Unmap everything; positions and slots remain for the next writer."""
        for slot in tuple(self._sessions):
            self._detach_session(slot)
        for base in tuple(self._mappings):
            self._unmap(base)
        self._pool.close()
        self._unflushed.close()
        self._table_object.close()
