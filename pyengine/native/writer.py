"""The writer's pass (csrc/writer.cdef.h): drain rings, append records, commit, answer.

Also its queue table, in shared memory: the next queue offset of each (topic, queue id) (csrc/queue_table.cdef.h).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import DiskFullError
from pyengine.native.control import SharedStruct

if TYPE_CHECKING:
    from pyengine._native import Array, CData, ms_control, ms_queue_table, ms_segment, ms_session

RUN_TIME: int = lib.MS_RUN_TIME
RUN_SEGMENT: int = lib.MS_RUN_SEGMENT
RUN_ROLLED: int = lib.MS_RUN_ROLLED
RUN_SESSIONS: int = lib.MS_RUN_SESSIONS
RUN_SIDE: int = lib.MS_RUN_SIDE
RUN_QUEUES: int = lib.MS_RUN_QUEUES
RUN_FLUSHER: int = lib.MS_RUN_FLUSHER
RUN_FAILED: int = lib.MS_RUN_FAILED
RUN_CUT_SHORT: int = lib.MS_RUN_CUT_SHORT

GATHER_BYTES_MIN: int = lib.MS_GATHER_BYTES_MIN
SCRATCH_BYTES_MIN = 2 * 1024 * 1024
STAGE_BYTES = 8 * 1024 * 1024  # at least; more if the largest record needs it, so that no record is written in pieces
RECORD_ALLOWANCE_BYTES: int = lib.MS_RECORD_ALLOWANCE_BYTES
PAGE_BYTES = mmap.PAGESIZE

REFUSED_OFFSET: int = lib.MS_REFUSED_OFFSET
REFUSED_RAW: int = lib.MS_REFUSED_RAW

_new_without_pages = ffi.new_allocator(should_clear_after_alloc=False)  # not touched until it is used

# What each refusal (MS_REFUSED_*) says to the user: the cause, and what to change.
REFUSALS: dict[int, str] = {
    lib.MS_REFUSED_NO: "",
    lib.MS_REFUSED_TOPIC_LENGTH: "the topic must have 1 to 127 bytes in UTF-8: shorten it",
    lib.MS_REFUSED_TOPIC_BYTES: "the topic must be UTF-8 without '/', without the bytes 0, 1 and 2, and not '.' or '..'",
    lib.MS_REFUSED_PROPERTIES_LENGTH: "the property text must have at most 32767 bytes: store less in properties",
    lib.MS_REFUSED_PROPERTIES_BYTES: "the property text must be UTF-8 without the byte 0",
    lib.MS_REFUSED_BODY_LENGTH: "the body is larger than max_message_size_bytes: split it or raise the setting",
    lib.MS_REFUSED_SEGMENT: "no segment of the commit log can hold the record: split it, or make the store with a larger "
    "mapped_file_size_commit_log_bytes",
    lib.MS_REFUSED_STOPPING: "the engine is stopping: put again after the next start",
    lib.MS_REFUSED_LOST: "the store's folder was moved, removed or replaced while the engine ran, so the engine ends: start it where "
    "the store is now, and connect there",
    lib.MS_REFUSED_READ_ONLY: "the store is read-only; `pyengine status` names the cause",
    lib.MS_REFUSED_DISK_FULL: "the disk is too full: free space, or delete old messages with `pyengine clean`; puts are "
                              "accepted again by themselves (`pyengine status` has the numbers)",
    lib.MS_REFUSED_UNWRITABLE: "a folder of the store cannot be written: mount it read-write or give the right back; puts are "
                               "accepted again by themselves (`pyengine status` names it)",
    lib.MS_REFUSED_SLAVE: "this store is a slave: put to its master",
    lib.MS_REFUSED_FENCED: "a master of a higher term has taken this store's place, or one of the same term goes on: put to that one, and "
    "start this store as its slave (`pyengine status` has the terms)",
    lib.MS_REFUSED_OFFSET: "raw records must begin where the log ends",
    lib.MS_REFUSED_RAW: "raw bytes must be whole records of their place, and come from the replicator of a slave",
    lib.MS_REFUSED_NO_SEGMENT: "no new segment is ready (the disk has no space for the log, or the allocator is down): "
    "`pyengine status` names the cause. Puts are accepted again by themselves",
    lib.MS_REFUSED_BATCH: "a batch must not be a transaction message and its members must be well formed",
    lib.MS_REFUSED_QUEUE_ID: "the queue id must not be negative",
    lib.MS_REFUSED_QUEUES_FULL: "the table of queues could not be made larger; `pyengine status` names the cause",
    lib.MS_REFUSED_TOO_MANY_SEGMENTS: "put_many spans more segments than can be ready at once: split it",
    lib.MS_REFUSED_SIDE: "the side object of a large entry was missing or not as announced: put again",
    lib.MS_REFUSED_MALFORMED: "the producer's ring held an entry that contradicts itself: its session was closed",
    lib.MS_REFUSED_TOO_LARGE: "put_many makes records of more than 256 MiB in sum (each has topic and properties): split it",
    lib.MS_REFUSED_LIGHT_QUEUE_NAME: "a name in INNER_MULTI_DISPATCH is not a topic's name, is there twice, is the message's "
    "own queue, is one of more than 64, or begins with %LMQ% in a store without enable_lmq; or the message is delayed or one of a "
    "transaction",
    lib.MS_REFUSED_LIGHT_QUEUE_PLACE: "several messages cannot have INNER_MULTI_QUEUE_OFFSET, which is the store's own: leave it out, or "
    "put them singly",
    lib.MS_REFUSED_LIGHT_QUEUES_FULL: "there are as many light queues as max_lmq_consume_queue_num allows",
    lib.MS_REFUSED_SEQUENCE: "the producer's ring held an entry out of sequence: its session was closed",
}
queue_table_bytes = lib.ms_queue_table_bytes  # return the size of a queue table of `slots` (a power of two)
format_queue_table = lib.ms_queue_table_format  # make zeroed memory an empty queue table
rolled_back = lib.ms_writer_rolled_back  # close the dead pass, after its bytes are zeroed


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that the writer has open: memory to store into (mapping or pool buffer), a descriptor to write to, or both."""

    base: int
    memory: Array[int] | None  # None: the writer writes to the descriptor only
    fd: int  # -1: the writer stores into the memory only


_QUEUES: SharedStruct[ms_queue_table] = SharedStruct("the table of queues", "struct ms_queue_table", lib.ms_queue_table_check)
view_queue_table, check_queue_table = _QUEUES.view, _QUEUES.check


def set_queue_offset(table: ms_queue_table, topic: str, queue_id: int, next_offset: int) -> None:
    """Set a queue's next offset outside any pass (at start)."""
    name = topic.encode()
    if lib.ms_queue_table_set(table, name, len(name), queue_id, next_offset):
        raise DiskFullError(f"the queue table of {table.slots} slots is full")


def get_queue_offset(table: ms_queue_table, topic: str, queue_id: int) -> int | None:
    """Return the next offset of a queue, None if the queue table does not have it."""
    name = topic.encode()
    slot = lib.ms_queue_table_find(table, name, len(name), queue_id, 0)
    return None if slot < 0 else table.slot[slot].next_offset


def copy_queue_table(to: ms_queue_table, source: ms_queue_table) -> None:
    """Copy all queues of `source` into the empty, larger table `to`."""
    if lib.ms_queue_table_copy(to, source):
        raise DiskFullError(f"the queue table of {to.slots} slots is full")


def roll_back(control: ms_control, queues: ms_queue_table) -> bool:
    """Undo the changes of a dead writer's uncommitted pass in the queue table; idempotent.

    Return whether there was such a pass: then zero [wrote, intent_end) before you append, and call rolled_back().
    """
    return bool(lib.ms_writer_roll_back(control, queues))


class Writer:
    """Appends to a store's log; one thread of the writer process uses it.

    `semaphores` maps a worker kind to its latch semaphore: of the workers to wake in this mode.
    All views must outlive the object. `gather_bytes_min`: passes of at least so many bytes are written to the descriptor, not
    stored into memory, if segments have both; 0: none.
    """

    def __init__(self, control: ms_control, queues: ms_queue_table, semaphores: Mapping[int, CData], spin_us: int,
                 zero_ahead_bytes: int = 0, gather_bytes_min: int = 0) -> None:
        writer = self.pointer = ffi.new("struct ms_writer *")
        writer.control = control
        writer.queues = queues
        for kind, semaphore in semaphores.items():
            writer.semaphores[kind] = semaphore
        writer.mode = control.identity.mode
        writer.segment_bytes = control.identity.segment_bytes
        writer.max_message_bytes = control.identity.max_message_bytes
        writer.spin_us = spin_us
        writer.current.base = -1
        self._scratch: Array[int] | None = None
        self._grow_scratch(SCRATCH_BYTES_MIN)
        self._stage: Array[int] | None = None
        if writer.mode == lib.MS_MODE_SYNC:
            self._zeros = ffi.new("uint8_t[]", max(1, zero_ahead_bytes))
            writer.zeros = self._zeros
            writer.zero_ahead_bytes = zero_ahead_bytes
        if gather_bytes_min:
            self._need_stage()
            writer.gather_bytes_min = gather_bytes_min

    def share_cpu(self) -> None:
        """Keep this thread on one CPU for a second at a time, so that the flusher can share it (csrc/cpu.cdef.h)."""
        lib.ms_affinity_begin(ffi.addressof(self.pointer, "affinity"))

    def _need_stage(self) -> None:
        """Allocate the buffer that gathers a pass for a segment without memory."""
        if self._stage is None:
            writer = self.pointer
            record_bytes_max = min(writer.max_message_bytes + RECORD_ALLOWANCE_BYTES, writer.segment_bytes)
            writer.stage_bytes_max = max(STAGE_BYTES, record_bytes_max)
            self._stage = _new_without_pages("uint8_t[]", writer.stage_bytes_max + PAGE_BYTES)
            writer.stage = self._stage

    def _grow_scratch(self, size: int) -> None:
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = ffi.new("uint8_t[]", size)
            self.pointer.scratch = self._scratch
            self.pointer.scratch_bytes = size
            self.pointer.side_loaded = 0  # the side object was in the old buffer: C requests it again

    def enable_multi_dispatch(self, *, lmq: bool, lmq_max: int) -> None:
        """Assign queue offsets in the queues of INNER_MULTI_DISPATCH; with `lmq` in at most `lmq_max` light queues."""
        light = self.pointer.light
        light.enabled, light.lmq, light.lmq_max, light.lmq_count = 1, lmq, lmq_max, -1

    def open(self) -> None:
        """Read position, heads and counters from the committed slot."""
        lib.ms_writer_open(self.pointer)
        self.pointer.light.lmq_count = -1  # -1: C counts them again

    @property
    def position(self) -> int:
        """The physical offset of the next record."""
        return self.pointer.position

    @property
    def current(self) -> Segment | None:
        """The segment that is being written, None before the first."""
        return _segment(self.pointer.current)

    def set_current(self, segment: Segment) -> None:
        """Set the segment that holds the write position, at start."""
        self._fill(self.pointer.current, segment)

    def add_ahead(self, segment: Segment) -> None:
        """Attach the segment after the last attached one."""
        self._fill(self.pointer.ahead[self.pointer.ahead_count], segment)
        self.pointer.ahead_count += 1

    def _fill(self, struct: ms_segment, segment: Segment) -> None:
        if segment.memory is None:
            self._need_stage()
        struct.base = segment.base
        struct.memory = segment.memory if segment.memory is not None else ffi.NULL
        struct.fd = segment.fd

    def detach_segments(self) -> None:
        """Detach all segments, to roll a pass back that may have reached another segment."""
        self.pointer.current.base = -1
        self.pointer.ahead_count = self.pointer.rolled = 0

    @property
    def ahead_count(self) -> int:
        return self.pointer.ahead_count

    @property
    def next_base(self) -> int:
        """The physical offset at which the next segment to attach begins."""
        writer = self.pointer
        if writer.ahead_count:
            return writer.ahead[writer.ahead_count - 1].base + writer.segment_bytes
        if writer.current.base >= 0:
            return writer.current.base + writer.segment_bytes
        return writer.position - writer.position % writer.segment_bytes

    def take_finished(self) -> list[Segment]:
        """Return the segments that the writer has finished since the last call."""
        writer = self.pointer
        done = [segment for i in range(writer.rolled) if (segment := _segment(writer.finished[i]))]
        writer.rolled = 0
        return done

    def attach_session(self, slot: int, session: ms_session, generation: int, ring_bytes: int) -> None:
        """Serve a session (a view that the caller keeps); its head comes from the committed slot."""
        self._grow_scratch(ring_bytes // 2)
        lib.ms_writer_attach_session(self.pointer, slot, session, generation, ring_bytes)

    def detach_session(self, slot: int) -> None:
        lib.ms_writer_detach_session(self.pointer, slot)

    def session_drained(self, slot: int) -> bool:
        """Return whether everything published in the session is executed, or a bad entry has closed it."""
        return bool(lib.ms_writer_session_drained(self.pointer, slot))

    def load_side(self, data: bytes) -> None:
        """Provide the side object that RUN_SIDE requested."""
        self._grow_scratch(len(data))
        ffi.memmove(self.pointer.scratch, data, len(data))
        self.pointer.side_loaded = self.pointer.side_sequence

    def use_table(self, queues: ms_queue_table) -> None:
        """Use a larger queue table, into which the old one was copied."""
        lib.ms_writer_use_table(self.pointer, queues)

    def run(self, deadline_ns: int) -> int:
        """Run passes until the deadline or until Python must act; return RUN_*."""
        return lib.ms_writer_run(self.pointer, deadline_ns)


def _segment(struct: ms_segment) -> Segment | None:
    if struct.base < 0:
        return None
    return Segment(struct.base, struct.memory, struct.fd)
