"""A stream of chosen topics: its offset says for each queue which message comes next, {"orders": {"0": 210}}.

Only what the consume queues name is read. A queue that appears while the stream runs is
read from its first message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy

from pyengine.formats.constants import CQ_ENTRY_BYTES, LMQ_PREFIX
from pyengine.formats.consume_queue import ENTRY
from pyengine.spark.options import EARLIEST, LATEST, ReadOptions
from pyengine.spark.partitions import QueuePart, QueueSlice, partition_bytes
from pyengine.spark.plan import REMEDY, DataLossError
from pyengine.spark.queue_plan import grouped, slice_bytes
from pyengine.spark.selection import queue_chooser, select
from pyengine.spark.starting_times import require_messages_of_times, starting_time_ms

if TYPE_CHECKING:
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.queue_reader import QueueReader

Offset = dict[str, dict[str, int]]  # as JSON has it
Offsets = dict[tuple[str, int], int]


class QueueStream:
    """Offsets and parts of the stream. Not for several threads."""

    def __init__(self, options: ReadOptions, reader: LiveStoreReader) -> None:
        self._options = options
        self._reader = reader
        # Offsets bound the beginning only, so they do not choose rows.
        self._choose = queue_chooser(select(options, with_offsets=False))

    def initial(self) -> Offset:
        """Where a new stream begins: every queue that there is now."""
        limit = self._limit()
        require_messages_of_times(self._options, self._reader, limit)
        begin: Offsets = {}
        for key, queue in self._queues():
            high = queue.max_offset(limit)
            begin[key] = self._first(key, queue, self._low(queue, high), high)
        for key in self._named():
            if key not in begin:
                self._require(f"startingOffsets names queue {key[0]}/{key[1]}, which does not exist")
        return _as_json(begin)

    def available(self) -> Offset:
        """Where each queue ends now."""
        limit = self._limit()
        return _as_json({key: queue.max_offset(limit) for key, queue in self._queues()})

    def is_behind(self, start: Offset, target: Offset) -> bool:
        """Whether some queue ends before the place that the stream has come to."""
        ends = _from_json(target)
        return any(begin > ends.get(key, 0) for key, begin in _from_json(start).items())

    def bounded(self, start: Offset, target: Offset, most_messages: int | None, most_bytes: int | None) -> Offset:
        """The ends of a batch from `start` on: at `target`, or where one of the bounds is reached.

        A bound is shared among the queues by what waits in each, and a queue with news
        gives at least one message: so no queue starves, and the bounds are soft.
        """
        begins, ends = _from_json(start), _from_json(target)
        spans: dict[tuple[str, int], tuple[QueueReader, int, int]] = {}
        for key, end in ends.items():
            queue = self._reader.queue(*key)
            if queue is None:
                continue
            begin = self._begin(key, queue, begins.get(key), end)
            if begin > end:
                self._require(f"queue {key[0]}/{key[1]} ends at {end}, the stream had come to {begin}: what it had read is gone")
            elif begin < end:
                spans[key] = queue, begin, end
        if most_messages is not None:
            waiting = sum(end - begin for _, begin, end in spans.values())
            for key, (queue, begin, end) in spans.items():
                spans[key] = queue, begin, begin + _share(most_messages, end - begin, waiting)
        if most_bytes is not None:
            sizes = {key: slice_bytes(queue, begin, end, end) for key, (queue, begin, end) in spans.items()}
            waiting = sum(sizes.values())
            if waiting > most_bytes:
                for key, (queue, begin, end) in spans.items():
                    spans[key] = queue, begin, _by_bytes(queue, begin, end, _share(most_bytes, sizes[key], waiting))
        return _as_json({**ends, **{key: begins[key] for key in begins if key not in ends},
                         **{key: end for key, (_, _, end) in spans.items()}})

    def has_waiting(self, start: Offset, target: Offset, least: int) -> bool:
        """Whether at least so many messages lie between the two."""
        begins, waiting = _from_json(start), 0
        for key, end in _from_json(target).items():
            queue = self._reader.queue(*key)
            begin = begins.get(key)
            waiting += max(0, end - (self._low(queue, end) if begin is None and queue is not None else begin or 0))
        return waiting >= least

    def parts(self, start: Offset, end: Offset) -> list[QueuePart]:
        """The slices of one batch, put together to tasks. They do not depend on how far the level is now."""
        options, reader = self._options, self._reader
        begins, limit = _from_json(start), 0
        slices = []
        for key, last in sorted(_from_json(end).items()):
            queue = reader.queue(*key)
            if queue is None:
                if begins.get(key, 0) < last:
                    self._require(f"queue {key[0]}/{key[1]} is gone")
                continue
            first = self._begin(key, queue, begins.get(key), last)
            if first < last:
                entry = queue.entry(last - 1, last)
                limit = max(limit, entry.physical_offset + entry.size_bytes if entry else 0)
                slices.append(QueueSlice(*key, first, last, slice_bytes(queue, first, last, last)))
        most = partition_bytes(sum(one.log_bytes for one in slices), options.max_partition_bytes, options.min_partitions)
        file_bytes = reader.geometry.mapped_file_size_consume_queue_bytes
        return [QueuePart(tuple(group), limit, reader.commit_log.size_bytes, file_bytes) for group in grouped(slices, most)]

    def _limit(self) -> int:
        return max(0, self._reader.dispatched_offset(self._options.read_level))

    def _queues(self) -> Iterator[tuple[tuple[str, int], QueueReader]]:
        for topic, queue_ids in self._reader.topics().items():
            if topic.startswith(LMQ_PREFIX):  # its entries name records of other topics
                continue
            for queue_id in queue_ids:
                queue = self._reader.queue(topic, queue_id) if self._choose(topic, queue_id) else None
                if queue is not None:
                    yield (topic, queue_id), queue

    def _low(self, queue: QueueReader, high: int) -> int:
        return queue.min_offset(self._reader.min_physical_offset, high) if high else 0

    def _begin(self, key: tuple[str, int], queue: QueueReader, begin: int | None, high: int) -> int:
        """Where a queue goes on: its first message for a new one; what is deleted is passed over if that is allowed."""
        low = self._low(queue, high)
        if begin is None:
            return low
        if begin < low:
            self._require(f"queue {key[0]}/{key[1]} begins at {low} now, the stream had come to {begin}")
        return max(begin, low)

    def _require(self, sentence: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{sentence}; {REMEDY}")

    def _named(self) -> Offsets:
        named = self._options.starting_offsets or {}
        return {(topic, queue_id): offset for topic, queues in named.items() for queue_id, offset in queues.items()}

    def _first(self, key: tuple[str, int], queue: QueueReader, low: int, high: int) -> int:
        options, point = self._options, self._options.starting_point
        time_ms = starting_time_ms(options, *key)
        if time_ms is not None:
            return self._by_time(queue, low, high, time_ms)
        if options.starting_timestamps:  # of other queues
            return low
        if options.starting_offsets:
            offset = self._named().get(key, EARLIEST)
            if offset in (EARLIEST, LATEST):
                return low if offset == EARLIEST else high
            if not low <= offset <= high:
                self._require(f"startingOffsets {offset}: queue {key[0]}/{key[1]} holds offsets {low} to {high}")
            return min(max(offset, low), high)
        if point is None or point.word == "latest":
            return high
        if point.word == "last":
            return max(low, high - point.number)
        if point.word == "time":
            return self._by_time(queue, low, high, time.time_ns() // 1_000_000 - point.number)
        return low

    def _by_time(self, queue: QueueReader, low: int, high: int, timestamp_ms: int) -> int:
        """The queue's first message stored at that time or later; its end when there is none."""
        first, behind, limit = low, high, self._limit()
        while first < behind:
            middle = (first + behind) // 2
            entry = queue.entry(middle, high)
            message = self._reader.message_below(entry.physical_offset, limit) if entry is not None else None
            if message is None or message.store_timestamp_ms < timestamp_ms:
                first = middle + 1
            else:
                behind = middle
        return first


def _share(bound: int, mine: int, all_of_it: int) -> int:
    """My part of a bound, at least 1 and at most what is mine."""
    return mine if all_of_it <= bound else max(1, min(mine, bound * mine // all_of_it))


def _by_bytes(queue: QueueReader, begin: int, end: int, most_bytes: int) -> int:
    """Behind the messages from `begin` on that are `most_bytes` of log together; one at least."""
    at, left = begin, most_bytes
    while at < end:
        span = queue.span(at, end)
        if span is None:
            return max(at, begin + 1)
        view, position, behind = span
        count = min(end - at, (behind - position) // ENTRY.size)
        sizes = numpy.frombuffer(view, _ENTRY, count, position)["size"]
        sums = numpy.cumsum(sizes, dtype=numpy.int64)
        fits = int(numpy.searchsorted(sums, left, "right"))
        if fits < count:
            return max(at + fits, begin + 1)
        left -= int(sums[-1])
        at += count
    return end


_ENTRY = numpy.dtype([("offset", ">i8"), ("size", ">i4"), ("tags", ">i8")])
assert _ENTRY.itemsize == CQ_ENTRY_BYTES


def _as_json(offsets: Offsets) -> Offset:
    found: Offset = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found


def _from_json(offset: Offset) -> Offsets:
    return {(topic, int(queue_id)): number for topic, queues in offset.items() for queue_id, number in queues.items()}
