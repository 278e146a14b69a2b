"""The loop that dispatches log records into consume queues and the index file (csrc/dispatch.cdef.h).

This module also wraps what the loop fills, a table of queues and one mapped index file, and the reputter's rounds: wait,
dispatch, publish, wake the consumers (csrc/consume_queue, index_file, reput .cdef.h). C never allocates: Python owns the
memory of a table and enlarges it between calls. pyengine.storage decides which files exist.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.arguments import INT64_MAX
from pyengine.errors import InvariantError
from pyengine.formats.index_file import IndexHeader, IndexLayout, unpack_entry, unpack_header
from pyengine.native.flush import FOLIO_BYTES_MAX, LoopSegment, checked
from pyengine.native.scan import REASONS, QueueKeys, bounded, grown, text_at

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import (
        Array,
        CData,
        ms_control,
        ms_ext_queue,
        ms_ext_set,
        ms_index_progress,
        ms_position,
        ms_queue,
        ms_queue_set,
        ms_store_stats,
        ms_topic_stats,
    )
    from pyengine.native.waiting import Latch, Stream

RANGE_END = lib.MS_CASE_RANGE_END
BLANK = lib.MS_CASE_BLANK
NEEDS_QUEUE = lib.MS_DISPATCH_NEEDS_QUEUE
NEEDS_FILE = lib.MS_DISPATCH_NEEDS_FILE
NEEDS_INDEX = lib.MS_DISPATCH_NEEDS_INDEX
FAILED = lib.MS_DISPATCH_FAILED
NEEDS_EXT = lib.MS_DISPATCH_NEEDS_EXT

_TOUCHED_PLACES = 1024


class DispatchLoop:
    """Owns one `struct ms_dispatch` and what it points to.

    `struct` is the state of the C loop: `reached`, `wanted_*`, counters. `delays_ms` holds the delay of level 1, 2, ...
    """

    def __init__(
        self, queue_file_bytes: int, delays_ms: Sequence[int], progress: ms_index_progress, *, index_enabled: bool, multi_dispatch: bool,
        topic_stats: ms_topic_stats | None = None,
    ) -> None:
        self.struct = ffi.new("struct ms_dispatch *")
        self._delays = ffi.new("int64_t[]", list(delays_ms) or 1)
        self._progress = progress
        self._index: IndexFile | None = None
        self.struct.delays_ms = self._delays
        self.struct.delay_levels = len(delays_ms)
        self.struct.progress = progress
        self.struct.index_enabled = index_enabled
        self.struct.multi_dispatch = multi_dispatch
        self.struct.indexed_offset = -1
        self.struct.last_store_timestamp_ms = -1
        self._queues_struct = ffi.addressof(self.struct, "queues")
        self._queues_struct.topic_stats = topic_stats if topic_stats is not None else ffi.NULL
        self.queues = QueueSet(self._queues_struct, queue_file_bytes)

    def run(self, data: Array[int], base_offset: int, start: int, end: int) -> int:
        """Dispatch from `start` on; return RANGE_END, BLANK, another MS_CASE_*, or NEEDS_*: what the caller must provide."""
        return lib.ms_dispatch_run(self.struct, data, base_offset, start, end)

    def wanted_topic(self) -> bytes:
        return bytes(ffi.buffer(self.struct.wanted_topic, self.struct.wanted_topic_bytes))

    def use_index(self, index: IndexFile | None) -> None:
        """Set the index file that takes the next keys."""
        self._index = index
        if index is None:
            self.struct.index.base = ffi.NULL
        else:
            self.struct.index = index.struct[0]


class TouchedQueue(NamedTuple):
    """The entries that a range of the log has in one queue; `further` counts the records of other queues among them, once each.

    `newest_ms` is the store time of the last record that `count` has.
    """

    topic: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name, which is not used
    further: int = 0
    newest_ms: int = 0


class Touched(NamedTuple):
    """`reached` is the first byte after the last whole record, `reason` says what follows it (see native.scan);
    the store time is that of the last record, -1 if there is none."""

    queues: list[TouchedQueue]
    reached: int
    reason: str
    last_store_timestamp_ms: int


def touched_queues(
    view: Buffer, base_offset: int, start: int, end: int, *, multi_dispatch: bool = False, apart: bool = False
) -> Touched:
    """Return the queues in which the whole records of [start, end) have entries, in the order of their first records.

    `multi_dispatch` includes the queues of INNER_MULTI_DISPATCH, as if the records were their own. With `apart` they
    count in `further` only, and a queue without records of its own has no offsets (-1). `view` holds one segment from
    `base_offset` on; UsageError if the range does not lie in it.
    """
    data = bounded(view, base_offset, start, end)
    reached = ffi.new("int64_t *", start)
    last_ms = ffi.new("int64_t *", -1)
    place_count = _TOUCHED_PLACES
    how = lib.MS_TOUCHED_APART if apart else lib.MS_TOUCHED_ALL if multi_dispatch else lib.MS_TOUCHED_OWN
    while True:
        places = ffi.new("struct ms_touched_queue[]", place_count)
        reason = lib.ms_dispatch_touched(
            places, place_count, how, data, base_offset, start, end, reached, last_ms
        )
        if reason != -errno.ENOSPC:
            break
        place_count *= 4
        last_ms[0] = -1
    queues = [
        TouchedQueue(
            text_at(place.topic, place.topic_bytes),
            place.queue_id,
            place.min_queue_offset,
            place.max_queue_offset,
            place.count,
            place.further,
            place.newest_ms,
        )
        for place in sorted((places[number] for number in range(place_count) if places[number].topic),
                            key=lambda place: int(ffi.cast("uintptr_t", place.topic)))
    ]
    return Touched(queues, reached[0], REASONS[reason], last_ms[0])


CHUNKS = 4096  # queues for which one batch gathers entries before it writes: 5 MiB, of which used pages alone take memory
_new_raw = ffi.new_allocator(should_clear_after_alloc=False)


class QueueSet:
    """A table of queues by topic and id, over a `struct ms_queue_set` that the caller keeps alive."""

    def __init__(self, struct: ms_queue_set, file_bytes: int) -> None:
        self._set = struct
        struct.file_bytes = file_bytes
        self._chunks = _new_raw("struct ms_queue_chunk[]", CHUNKS)
        struct.chunks = self._chunks
        struct.chunk_count = CHUNKS
        self._ext: ms_ext_set | None = None
        self._keys = QueueKeys(ffi.addressof(struct, "keys"))
        self._make_room()

    def use_ext(self, file_bytes: int) -> None:
        """Write extension units for new entries, into files of `file_bytes` (csrc/consume_queue.cdef.h)."""
        ext = self._ext = ffi.new("struct ms_ext_set *")
        self._ext_runs = ffi.new("struct ms_ext_run[]", CHUNKS)
        ext.runs = self._ext_runs
        ext.file_bytes = file_bytes
        self._ext_queues: ms_ext_queue | None = None
        self._make_ext_room(ext)
        self._set.ext = ext

    def ext(self, number: int) -> ms_ext_queue:
        """Return the `struct ms_ext_queue` of a queue number, after use_ext(); it is valid until the next add()."""
        return self._set.ext.queues[number]

    def _make_ext_room(self, ext: ms_ext_set) -> None:
        before, capacity = 0 if self._ext_queues is None else len(self._ext_queues), self._set.keys.capacity
        self._ext_queues = ext.queues = fresh = grown("struct ms_ext_queue", ext.queues, before, capacity)
        for number in range(before, capacity):
            fresh[number].fd, fresh[number].end, fresh[number].allocated_bytes = -1, -1, -1

    def __len__(self) -> int:
        return self._set.keys.count

    def add(self, topic: bytes, queue_id: int) -> int:
        """Add a queue, which has no file yet and begins at queue offset 0; return its number."""
        while (number := lib.ms_queue_add(self._set, topic, len(topic), queue_id)) == -errno.ENOSPC:
            self._make_room()
        return number

    def __getitem__(self, number: int) -> ms_queue:
        """Return the `struct ms_queue` of a queue number; it is valid until the next add()."""
        return self._set.queues[number]

    def topic(self, number: int) -> bytes:
        keys = self._set.keys
        return bytes(ffi.buffer(keys.topics + keys.key[number].topic_at, keys.key[number].topic_bytes))

    def open_queues(self) -> Iterator[int]:
        """Yield the numbers of the queues that have an open file."""
        for number in range(len(self)):
            if self._set.queues[number].fd >= 0:
                yield number

    def _make_room(self) -> None:
        self._queues = self._set.queues = grown("struct ms_queue", self._set.queues, len(self), self._keys.grow())
        if self._ext is not None:
            self._make_ext_room(self._ext)


WINDOW_BYTES: int = lib.MS_QUEUE_WINDOW_BYTES  # a queue file's blocks are allocated in steps of this size


def live_entries(entries: Buffer, below: int = INT64_MAX) -> int:
    """Count the entries at the front of these bytes, up to the first that is empty or names an offset at or above `below`."""
    view = ffi.from_buffer(entries)
    count: int = lib.ms_queue_live_entries(view, len(view) // lib.MS_QUEUE_ENTRY_BYTES, below)
    return count


def check_layout(file_bytes: int) -> None:
    """Raise InvariantError unless queue files of this size hold whole entries."""
    if file_bytes < lib.MS_QUEUE_ENTRY_BYTES or file_bytes % lib.MS_QUEUE_ENTRY_BYTES:
        raise InvariantError(f"queue files of {file_bytes} bytes do not hold whole entries")


PROGRESS_BYTES = lib.MS_INDEX_PROGRESS_BYTES
ALL_KEYS = 1 << 62  # more than any record has


_WRITE_INDEX = "write an index file"
INDEX_WINDOW_BYTES = 2 * FOLIO_BYTES_MAX  # an index file's blocks for entries are allocated in steps of this size


class IndexFile:
    """One index file over a writable mapping of its whole length.

    Call release() before you close the mapping; it also closes `descriptor`, by which blocks are allocated. With `is_written`
    changes are written to it instead of stored into the mapping, so that a full disk raises DiskFullError.
    """

    def __init__(self, mapping: Buffer, number: int, layout: IndexLayout, descriptor: int, *, is_written: bool = False) -> None:
        memory = ffi.from_buffer("uint8_t[]", mapping, require_writable=True)
        if len(memory) != layout.size_bytes or layout.max_hash_slot_num < 1 or layout.max_index_num < 1:
            raise InvariantError(f"an index file of {len(memory)} bytes does not have the layout {layout}")
        self._memory = memory
        self._bytes = memoryview(ffi.buffer(memory))
        self._layout = layout
        self._descriptor = descriptor
        self.struct = ffi.new(
            "struct ms_index_file *",
            {"base": memory, "number": number, "slots": layout.max_hash_slot_num, "entries": layout.max_index_num,
             "is_written": is_written, "fd": descriptor, "window_bytes": INDEX_WINDOW_BYTES},
        )

    def header(self) -> IndexHeader:
        """Return the header; its index count is 1 to the number of entries, whatever the file says."""
        return unpack_header(self._bytes)._replace(index_count=lib.ms_index_count(self.struct))

    def allocate(self) -> None:
        """Allocate blocks for the slots and entries to which the next key is put; DiskFullError. Puts allocate further windows."""
        checked(lib.ms_index_allocate(self.struct, min(lib.ms_index_count(self.struct), self.struct.entries - 1)), _WRITE_INDEX)

    def inherit(self, predecessor: IndexHeader) -> None:
        """Set the begin and the end of this empty file to the end of its full predecessor."""
        checked(lib.ms_index_inherit(self.struct, predecessor.end_timestamp_ms, predecessor.end_physical_offset), _WRITE_INDEX)

    def roll_back(self, progress: ms_index_progress) -> bool:
        """Undo the unfinished put that `progress` records, if it is a put into this file."""
        return bool(checked(lib.ms_index_roll_back(self.struct, progress), _WRITE_INDEX))

    def newest_offset(self) -> int:
        """Return the physical offset in the newest entry, -1 if there are no entries."""
        return next(self._offsets(), -1)

    def count_tail(self, physical_offset: int) -> int:
        """Count the entries at the end of the file that are keys of the record at `physical_offset`."""
        return sum(1 for _ in takewhile(lambda offset: offset == physical_offset, self._offsets()))

    def _offsets(self) -> Iterator[int]:
        """Yield the physical offset in each entry, the newest first."""
        for number in range(lib.ms_index_count(self.struct) - 1, 0, -1):
            yield unpack_entry(self._bytes, self._layout.entry_at(number)).physical_offset

    def release(self) -> None:
        """Release the mapping."""
        self.struct.base = ffi.NULL
        ffi.release(self._memory)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def progress_at(memory: Buffer | CData | None) -> ms_index_progress:
    """Return the progress area at a cffi pointer, or in a writable buffer, which the caller keeps alive; a new one for None."""
    if memory is None:
        return ffi.new("struct ms_index_progress *")
    if not isinstance(memory, ffi.CData):
        area = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
        if len(area) < PROGRESS_BYTES:
            raise InvariantError(f"an index progress area has {PROGRESS_BYTES} bytes, not {len(area)}")
        memory = area
    return ffi.cast("struct ms_index_progress *", memory)


SEGMENT: int = lib.MS_REPUT_SEGMENT
DECIDE: int = lib.MS_REPUT_DECIDE


class ReputLoop:
    """Owns one `struct ms_reput`; what it points to must outlive it."""

    def __init__(self, control: ms_control, dispatch: DispatchLoop, stats: ms_store_stats, latch: Latch, *, batch_bytes: int,
                 stream: Stream, allocator: Latch | None = None) -> None:
        """Dispatch from the published `reput_from` up to `committed`.

        `allocator`: the latch of an allocator that populates pages ahead of the writer."""
        self._loop = ffi.new("struct ms_reput *")
        self._references = dispatch, latch, allocator
        self._segment = LoopSegment(self._loop)
        self._loop.control = control
        self._loop.dispatch = dispatch.struct
        dispatch.struct.arrivals = ffi.addressof(control, "arrivals")
        self._loop.stats = ffi.addressof(stats, "dispatch")
        self._loop.semaphore = latch.semaphore
        self._loop.allocator_semaphore = allocator.semaphore if allocator is not None else ffi.NULL
        self._loop.segment_bytes = control.identity.segment_bytes
        self._loop.batch_bytes = batch_bytes
        self._loop.reput_from = self._loop.warmed_from = lib.ms_load_i64(ffi.addressof(control.reput_from, "value"))
        self._loop.base = self._loop.incomplete_end = self._loop.woken_up_to = -1
        self._loop.lag_is_known = not control.identity.replay_clock
        self.use_limit(control.committed)
        lib.ms_stream_begin(ffi.addressof(self._loop, "stream"), *stream)

    @property
    def reput_from(self) -> int:
        """The offset below which everything is dispatched and published."""
        return self._loop.reput_from

    def use_limit(self, limit: ms_position) -> None:
        """Dispatch nothing at or above this position."""
        self._loop.limit = ffi.addressof(limit)

    def use_segment(self, view: Buffer | None, base: int) -> None:
        """Set the mapping of the whole segment that begins at `base`; with None the caller may unmap the previous one."""
        self._segment.use(view, base)

    def run(self, until_ns: int, *, may_sleep: bool = False) -> int:
        """Dispatch until CLOCK_MONOTONIC `until_ns`; return what the caller must provide, SEGMENT or DECIDE, or another number.

        With `may_sleep` wait on the armed latch when nothing is left to dispatch.
        """
        return lib.ms_reput_run(self._loop, until_ns, may_sleep)

    def publish(self, reached: int, lag_bytes: int) -> None:
        """Move `reput_from` to `reached`, below which everything is dispatched, and wake the consumers."""
        lib.ms_reput_publish(self._loop, reached, lag_bytes)
