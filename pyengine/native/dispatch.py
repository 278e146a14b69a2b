"""The loop that feeds consume queues and index, and the look at what a range of the log feeds (csrc/dispatch.cdef.h)."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.native.consume_queue import QueueSet
from pyengine.native.index_file import IndexFile
from pyengine.native.scan import REASONS, bounded

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, ms_index_progress, ms_topic_stats

RANGE_END = lib.MS_CASE_RANGE_END
BLANK = lib.MS_CASE_BLANK
NEEDS_QUEUE = lib.MS_DISPATCH_NEEDS_QUEUE
NEEDS_FILE = lib.MS_DISPATCH_NEEDS_FILE
NEEDS_INDEX = lib.MS_DISPATCH_NEEDS_INDEX
FAILED = lib.MS_DISPATCH_FAILED
NEEDS_EXT = lib.MS_DISPATCH_NEEDS_EXT

_TOUCHED_PLACES = 1024


class DispatchLoop:
    """One `struct ms_dispatch` and what it points to.

    `struct` is the C side's state: `reached`, `wanted_*`, counters. `delays_ms` holds
    the delay of level 1, 2, ...
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
        """Go on from `start`; RANGE_END, BLANK, another MS_CASE_*, or what is missing. `data` is a cffi pointer."""
        return lib.ms_dispatch_run(self.struct, data, base_offset, start, end)

    def wanted_topic(self) -> bytes:
        return bytes(ffi.buffer(self.struct.wanted_topic, self.struct.wanted_topic_bytes))

    def use_index(self, index: IndexFile | None) -> None:
        """The index file that takes the next keys."""
        self._index = index
        if index is None:
            self.struct.index.base = ffi.NULL
        else:
            self.struct.index = index.struct[0]


class TouchedQueue(NamedTuple):
    """What a range of the log put into one queue; `further`: records of other queues that have an entry here, each once."""

    topic: str
    queue_id: int
    min_queue_offset: int
    max_queue_offset: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name, which is not used
    further: int = 0


class Touched(NamedTuple):
    """`reached` is the first byte that is no part of a whole record, `reason` why (see native.scan);
    the store time is that of the last record, -1 without any."""

    queues: list[TouchedQueue]
    reached: int
    reason: str
    last_store_timestamp_ms: int


def touched_queues(
    view: Buffer, base_offset: int, start: int, end: int, *, multi_dispatch: bool = False, apart: bool = False
) -> Touched:
    """The queues that the whole records of [start, end) have entries in, in no order. Stateless, writes nothing.

    `multi_dispatch`: those of INNER_MULTI_DISPATCH too, as if the records were their own; `apart`: these only as
    `further`, and a queue without own records has no offsets (-1).
    `view` holds one segment from `base_offset` on. Raises UsageError when the range does not lie in it.
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
            str(ffi.buffer(place.topic, place.topic_bytes), "utf-8", "replace"),
            place.queue_id,
            place.min_queue_offset,
            place.max_queue_offset,
            place.count,
            place.further,
        )
        for place in (places[number] for number in range(place_count))
        if place.topic
    ]
    return Touched(queues, reached[0], REASONS[reason], last_ms[0])
