"""The offsets of a stream, and the parts between two of them.

A stream of the whole log has one physical offset, {"physicalOffset": N}. A record begins at N, or will: so
each micro-batch is a range of whole records, given by two numbers, and reads the same rows when it is repeated.

The offset of a stream of chosen topics has the next message of each queue, {"orders": {"0": 210}}. The stream reads only messages
in the consume queues. It reads a queue that appears while it runs from its first message, number 0; if that was deleted, it is
lost to the stream.

Beside these, Spark's checkpoint has a mark of the log below them, {"": {"end": N, "sample": "..."}}: other messages under the same
offsets must not be taken for those that were read. No topic has an empty name. A checkpoint of version 0.2.0 has no mark. That of the
first batch's end also has its `begin`, since Spark stores no initial offset.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from pyengine.arguments import INT64_MAX
from pyengine.errors import UsageError
from pyengine.native.scan import ColumnScanner, RowFilter
from pyengine.spark.options import EARLIEST, LATEST, Queue, ReadOptions, flat
from pyengine.spark.partitions import (
    REMEDY,
    DataLossError,
    LogRange,
    QueuePart,
    QueueSlice,
    cut,
    partition_bytes,
    queue_chooser,
    without_light_queues,
)
from pyengine.spark.plan import grouped, require_messages_of_times, starting_time_ms, stored_ms
from pyengine.spark.presence import end_of_entry, queue_begin, queue_end
from pyengine.spark.remote_store import OpenStore, RemoteStore, log_sample, prefetch_queue_ends, segments_of
from pyengine.storage.arrow import allocate, to_array
from pyengine.storage.commit_log import LogRun, record_or_limit, refuse_damage, runs_of
from pyengine.storage.queue_entries import queue_entries, slice_bytes

if TYPE_CHECKING:
    import pyarrow

    from pyengine.storage.consume_queue import ConsumeQueue

Offset = dict[str, Any]  # as JSON has it
QueueNumbers = dict[Queue, int]  # queue -> the next message's number
NAME = "physicalOffset"
MARK = ""
_COUNT_ROWS = 1 << 14


def is_of_log(offset: Offset) -> bool:
    """Return whether it is an offset of a stream of the whole log."""
    return isinstance(offset.get(NAME), int)


def without_mark(offset: Offset) -> Offset:
    """Return an offset of a checkpoint as the stream computes with it."""
    return {name: value for name, value in offset.items() if name != MARK}


class StreamOffsets(ABC):
    """One stream's offsets in the current state of the store; one thread uses it."""

    def __init__(self, options: ReadOptions, reader: OpenStore) -> None:
        self._options = options
        self._reader = reader

    def available(self) -> Offset:
        """Return the current end of the stream."""
        if isinstance(self._reader, RemoteStore):
            self._reader.refresh()
        return self._end_now()

    @abstractmethod
    def initial(self) -> Offset:
        """Return where a new stream begins."""

    @abstractmethod
    def _end_now(self) -> Offset:
        """Return the end of the stream in the store's state at the last refresh."""

    @abstractmethod
    def is_beyond(self, start: Offset, target: Offset) -> bool:
        """Return whether the stream has read more of any queue than `target`."""

    @abstractmethod
    def bounded(self, start: Offset, target: Offset, most_messages: int | None, most_bytes: int | None) -> Offset:
        """Return the end of a batch from `start` on: `target`, or where a limit is reached; it has one message at least."""

    @abstractmethod
    def has_waiting(self, start: Offset, target: Offset, least: int) -> bool:
        """Return whether there are at least `least` messages between the two."""

    @abstractmethod
    def parts(self, start: Offset, end: Offset) -> Sequence[LogRange | QueuePart]:
        """Return the parts of one batch, which do not depend on the current end of the level."""

    def marked(self, offset: Offset, start: Offset | None = None) -> Offset:
        """Return the offset with the mark of the log below it. `start`: where the batch began that ends there."""
        before: int | None = None if start is None else start.get(MARK, {}).get("end")
        end = self._end_of_read(without_mark(start or {}), offset, before)
        sample = log_sample(self._reader, end)
        return offset if sample is None else {**offset, MARK: {"end": end, "sample": sample.text}}

    def require_log(self, offset: Offset) -> None:
        """UsageError if the log below an offset of the checkpoint is not the one that the stream has read."""
        mark = offset.get(MARK)
        if mark is None:
            return
        log, end = self._reader.commit_log, mark["end"]
        sample = log_sample(self._reader, end)
        is_deleted = (end - 1) // log.size_bytes * log.size_bytes < log.min_offset
        if not (is_deleted if sample is None else sample.is_of(mark["sample"])):
            raise UsageError(f"the log of {self._options.where} is not the one that the stream has read up to {end}: the store was made "
                             "anew, or its log was cut below that (recover --accept-loss, or a slave that follows another master): "
                             "begin with a new checkpoint; or it is a slave or a copy that is not as far: let it catch up")

    @abstractmethod
    def _end_of_read(self, start: Offset, end: Offset, before: int | None) -> int:
        """Return the offset in the log below which what was read up to `end` is; `before` is that of `start`, None if unknown."""

    def _lost(self, sentence: str) -> None:
        """Raise DataLossError, unless lost data is to be skipped."""
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{sentence}; {REMEDY}")


class LogStream(StreamOffsets):
    """A stream of the whole log."""

    def __init__(self, options: ReadOptions, reader: OpenStore) -> None:
        super().__init__(options, reader)
        self._log = reader.commit_log
        self._on_damage = refuse_damage if options.on_corrupt == "fail" else record_or_limit
        self._counted = (0, 0, 0)  # messages from the first offset to the second, and how many

    def initial(self) -> Offset:
        options, end = self._options, self._end()
        first = max(0, self._log.min_offset)
        point = options.starting_point
        if options.starting_timestamp_ms is not None:
            return {NAME: self._by_time(options.starting_timestamp_ms, end)}
        if point is not None and point.word == "time":
            return {NAME: self._by_time(time.time_ns() // 1_000_000 - point.number, end)}
        asked = options.starting_physical_offset
        if asked is not None:
            return {NAME: self._record_at(asked, first, end)}
        return {NAME: first if point is not None and point.word == "earliest" else end}

    def _end_now(self) -> Offset:
        return {NAME: self._end()}

    def _end_of_read(self, start: Offset, end: Offset, before: int | None) -> int:
        return int(end[NAME])

    def is_beyond(self, start: Offset, target: Offset) -> bool:
        return int(start[NAME]) > int(target[NAME])

    def bounded(self, start: Offset, target: Offset, most_messages: int | None, most_bytes: int | None) -> Offset:
        begin, end = start[NAME], target[NAME]
        if begin > end:
            self._lost(f"the log ends at {end} ({self._options.read_level.value}), the stream had read up to {begin}: "
                       "what it had read is gone")
            return {NAME: end}
        begin = self._skip_deleted(begin)
        if most_bytes is not None and end - begin > most_bytes:
            end = self._end_after(begin, begin + most_bytes, end)
        if most_messages is not None and begin < end:
            end = self._count(begin, end, most_messages)
        return {NAME: end}

    def has_waiting(self, start: Offset, target: Offset, least: int) -> bool:
        """Do as the base; a repeated call with the same start continues the last count."""
        begin, end = max(start[NAME], self._log.min_offset), target[NAME]
        first, reached, waiting = self._counted
        if first != begin or not begin <= reached <= end:
            reached, waiting = begin, 0
        if waiting >= least:
            return True
        for offsets in self._records(reached, end, batch_rows=min(least, _COUNT_ROWS)) if reached < end else ():
            waiting += len(offsets)
            if waiting >= least:
                return True
        self._counted = begin, max(begin, end), waiting
        return False

    def parts(self, start: Offset, end: Offset) -> list[LogRange]:
        options = self._options
        first, stop = self._skip_deleted(start[NAME]), end[NAME]
        wanted = partition_bytes(stop - first, options.max_partition_bytes, options.min_partitions)
        return cut(first, stop, stop, self._log.size_bytes, wanted, begins_record=options.ends_between_records)

    def _end(self) -> int:
        end = self._reader.max_physical_offset(self._options.read_level)
        return max(end, 0)

    def _skip_deleted(self, begin: int) -> int:
        """Return `begin`, or the log's first byte if older ones are deleted and that is allowed."""
        first = self._log.min_offset
        if begin >= first:
            return begin
        self._lost(f"the log begins at {first} now, the stream had read up to {begin}")
        return first

    def _record_at(self, offset: int, first: int, end: int) -> int:
        """Return where the first record at or after `offset` begins."""
        if not first <= offset <= end:
            self._lost(f"startingPhysicalOffset {offset}: the log reaches from {first} to {end}")
        offset = min(max(offset, first), end)
        segment = offset - offset % self._log.size_bytes
        return offset if offset in (segment, end) else self._end_after(segment, offset, end)

    def _end_after(self, known: int, wanted: int, end: int) -> int:
        """Return the end of the records that begin in [known, wanted), at most `end`, and one at least; `known` begins a record."""
        size_bytes = self._log.size_bytes
        segment = wanted - wanted % size_bytes
        position = max(known, segment)  # a segment's first byte begins a record
        wanted = max(wanted, position + 1 if position == known else position)
        if position >= wanted:
            return min(position, end)
        segment_end = segment + size_bytes
        view = self._log.segment_at(segment)
        if view is None:
            return min(segment_end, end)
        with contextlib.closing(view):
            limit = min(end, segment_end)
            for piece in runs_of(view, position, min(wanted, limit), limit, self._on_damage):
                position = piece.end
                if isinstance(piece, LogRun):
                    position = segment_end if piece.walk(check_crc=False).reason == "blank" else piece.reached
        return min(position, end)

    def _count(self, begin: int, end: int, most: int) -> int:
        """Return the end of the next `most` records from `begin` on."""
        left = most
        for offsets in self._records(begin, end, batch_rows=min(most + 1, _COUNT_ROWS)):
            if len(offsets) > left:
                return int(offsets[left].as_py())
            left -= len(offsets)
        return end

    def _by_time(self, timestamp_ms: int, end: int) -> int:
        """Return the first record stored at that time or later; the log's end if there is none."""
        begin = max(0, self._log.min_offset)
        for segment in self._log.starts():
            first_ms = self._first_time(segment, end)
            if first_ms is None or first_ms >= timestamp_ms:
                break
            begin = segment  # all records before it are older, while store times ascend
        found = next(self._records(begin, end, batch_rows=1, row_filter=RowFilter(start_ms=timestamp_ms)), None)
        return end if found is None else int(found[0].as_py())

    def _records(self, begin: int, end: int, **settings: Any) -> Iterator[pyarrow.Array]:
        """Yield the offsets of the records that begin in [begin, end), a batch at a time; `begin` begins a record."""
        scanner = ColumnScanner([NAME], allocate=allocate, **settings)
        for segment, position, limit in segments_of(self._reader, begin, end):
            for piece in runs_of(segment, position, limit, limit, self._on_damage):
                for raw in piece.scan(scanner) if isinstance(piece, LogRun) else ():
                    yield to_array(raw.columns[0], raw.rows)

    def _first_time(self, start: int, end: int) -> int | None:
        for segment, _, limit in segments_of(self._reader, start, min(end, start + self._log.size_bytes)):
            found = segment.walk(start, start + 1, limit=limit, check_crc=False)
            return found.first_store_timestamp_ms if found.messages else None
        return None


class QueueStream(StreamOffsets):
    """A stream of chosen topics."""

    def __init__(self, options: ReadOptions, reader: OpenStore) -> None:
        super().__init__(options, reader)
        # Offsets only set the start, so they do not select rows.
        choose = queue_chooser(options, with_offsets=False)
        assert choose is not None, "topics are chosen"
        self._choose = without_light_queues(choose)
        self._has_begun = False
        self._gone: set[Queue] = set()
        self._last_limit = 0

    def initial(self) -> Offset:
        limit = self._limit()
        require_messages_of_times(self._options, self._reader, limit)
        begin: QueueNumbers = {}
        for key, queue in self._prefetched_queues(limit):
            high = self._end_of(queue, limit)
            begin[key] = self._first(key, queue, queue_begin(self._reader, queue, high), high)
        for name, named in (("startingOffsets", self._options.starting_offsets),
                            ("startingOffsetsByTimestamp", self._options.starting_timestamps)):
            for key in sorted(flat(named).keys() - begin.keys()):
                self._lost(f"{name} names queue {key[0]}/{key[1]}, which does not exist")
        return _as_json(begin)

    def _end_now(self) -> Offset:
        limit = self._limit()
        found = _as_json({key: self._end_of(queue, limit) for key, queue in self._prefetched_queues(limit)})
        self._has_begun = True
        return found

    def _end_of_read(self, start: Offset, end: Offset, before: int | None) -> int:
        begins, found = {} if before is None else _from_json(start), before or 0
        for key, last in _from_json(end).items():
            queue = self._reader._queue(*key) if last != begins.get(key, 0) else None
            end_of_last = -1 if queue is None else end_of_entry(queue, last)
            if end_of_last <= self._last_limit:  # else it is damaged
                found = max(found, end_of_last)
        return found

    def is_beyond(self, start: Offset, target: Offset) -> bool:
        ends = _from_json(target)
        return any(begin > ends.get(key, 0) for key, begin in self._awaited(start).items())

    def bounded(self, start: Offset, target: Offset, most_messages: int | None, most_bytes: int | None) -> Offset:
        """Do as the base. A limit is divided among the queues by their waiting messages, and each queue with messages gives at least
        one: so no queue starves, and a batch may exceed the limit.
        """
        begins, ends = _from_json(start), _from_json(target)
        spans: dict[Queue, tuple[ConsumeQueue, int, int]] = {}
        for key, begin in self._awaited(start).items():
            if begin and key not in ends:
                self._lost(f"queue {key[0]}/{key[1]} is gone, the stream had read up to {begin}")
                self._gone.add(key)
        for key, end in ends.items():
            queue = self._reader._queue(*key)
            if queue is None:
                continue
            begin = self._begin(key, queue, begins.get(key), end)
            if begin > end:
                self._lost(f"queue {key[0]}/{key[1]} ends at {end}, the stream had read up to {begin}: what it had read is gone")
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

    def require_log(self, offset: Offset) -> None:
        """Do as the base; DataLossError too for a queue that was made anew: the last message that was read of it is beyond the mark."""
        super().require_log(offset)
        end = offset.get(MARK, {}).get("end")
        for key, begin in self._awaited(without_mark(offset)).items() if end is not None else ():
            queue = self._reader._queue(*key)
            entry = queue.entry(begin - 1, begin) if queue is not None and begin else None
            if entry is None or entry.physical_offset < end:
                continue
            message = self._reader._message_below(entry.physical_offset, INT64_MAX)  # none for a wrong entry
            if message is not None and (message.size_bytes, message.topic, message.queue_id, message.queue_offset) == (
                    entry.size_bytes, *key, begin - 1):
                self._lost(f"queue {key[0]}/{key[1]} was deleted and made anew since the stream had read up to {begin}: begin with a new "
                           f"checkpoint, or give up its first {begin} messages")

    def has_waiting(self, start: Offset, target: Offset, least: int) -> bool:
        begins, waiting = _from_json(start), 0
        for key, end in _from_json(target).items():
            queue = self._reader._queue(*key)
            begin = begins.get(key)
            waiting += max(0, end - (queue_begin(self._reader, queue, end) if begin is None and queue is not None else begin or 0))
        return waiting >= least

    def parts(self, start: Offset, end: Offset) -> list[QueuePart]:
        options, reader = self._options, self._reader
        begins, segments = _from_json(start), reader.commit_log.starts()
        limit = segments[-1] + reader.commit_log.size_bytes if segments else 0  # not from the last entry, which may be damaged
        slices = []
        for key, last in sorted(_from_json(end).items()):
            queue = reader._queue(*key)
            if queue is None:
                if begins.get(key, 0) < last:
                    self._lost(f"queue {key[0]}/{key[1]} is gone")
                continue
            first = self._begin(key, queue, begins.get(key), last)
            if first < last:
                slices.append(QueueSlice(*key, first, last, slice_bytes(queue, first, last, last)))
        most = partition_bytes(sum(one.log_bytes for one in slices), options.max_partition_bytes, options.min_partitions)
        file_bytes = reader.geometry.mapped_file_size_consume_queue_bytes
        return [QueuePart(tuple(group), limit, reader.commit_log.size_bytes, file_bytes) for group in grouped(slices, most)]

    def _awaited(self, start: Offset) -> QueueNumbers:
        """Return the chosen queues of an offset, without those for which it was waited in vain."""
        return {key: begin for key, begin in _from_json(start).items() if key not in self._gone and self._choose(*key) is not None}

    def _limit(self) -> int:
        self._last_limit = max(0, self._reader.dispatched_offset(self._options.read_level))
        return self._last_limit

    def _prefetched_queues(self, limit: int) -> list[tuple[Queue, ConsumeQueue]]:
        found = [((topic, queue_id), queue) for topic, queue_ids in self._reader.topics().items() for queue_id in queue_ids
                 if self._choose(topic, queue_id) and (queue := self._reader._queue(topic, queue_id)) is not None]
        prefetch_queue_ends(self._reader, [queue for _, queue in found], limit)
        return found

    def _end_of(self, queue: ConsumeQueue, limit: int) -> int:
        return queue_end(self._options, self._reader, queue, limit, waits=self._has_begun)

    def _begin(self, key: Queue, queue: ConsumeQueue, begin: int | None, high: int) -> int:
        """Return where a queue continues, a new one at 0; skip deleted messages if that is allowed."""
        low = queue_begin(self._reader, queue, high)
        if begin is None and low:
            self._lost(f"queue {key[0]}/{key[1]} is new to the stream and begins at {low}, not at 0: its first messages were deleted")
        elif begin is not None and begin < low:
            self._lost(f"queue {key[0]}/{key[1]} begins at {low} now, the stream had read up to {begin}")
        return max(begin or 0, low)

    def _first(self, key: Queue, queue: ConsumeQueue, low: int, high: int) -> int:
        options, point = self._options, self._options.starting_point
        time_ms = starting_time_ms(options, *key)
        if time_ms is not None:
            return self._by_time(queue, low, high, time_ms)
        if options.starting_timestamps:  # of other queues
            return low
        if options.starting_offsets:
            offset = options.starting_offsets.get(key[0], {}).get(key[1], EARLIEST)
            if offset in (EARLIEST, LATEST):
                return low if offset == EARLIEST else high
            if not low <= offset <= high:
                self._lost(f"startingOffsets {offset}: queue {key[0]}/{key[1]} holds offsets {low} to {high}")
            return min(max(offset, low), high)
        if point is None or point.word == "latest":
            return high
        if point.word == "last":
            return max(low, high - point.number)
        if point.word == "time":
            return self._by_time(queue, low, high, time.time_ns() // 1_000_000 - point.number)
        return low

    def _by_time(self, queue: ConsumeQueue, low: int, high: int, timestamp_ms: int) -> int:
        """Return the queue's first message stored at that time or later; its end if there is none."""
        limit = self._limit()
        return low + bisect_left(range(low, high), timestamp_ms, key=lambda number: stored_ms(self._reader, queue, number, high, limit))


def _share(bound: int, mine: int, all_of_it: int) -> int:
    """Return a queue's part of a limit, from 1 to its own number."""
    return mine if all_of_it <= bound else max(1, min(mine, bound * mine // all_of_it))


def _by_bytes(queue: ConsumeQueue, begin: int, end: int, most_bytes: int) -> int:
    """Return the end of the messages from `begin` on that have `most_bytes` of log together, and one at least."""
    at, left = begin, most_bytes
    for number, entries in queue_entries(queue, begin, end):
        if number != at:
            break
        sums = numpy.cumsum(entries["size"], dtype=numpy.int64)
        fits = int(numpy.searchsorted(sums, left, "right"))
        at += fits
        if fits < len(entries):
            break
        left -= int(sums[-1])
    return max(at, begin + 1)


def _as_json(offsets: QueueNumbers) -> Offset:
    found: Offset = {}
    for (topic, queue_id), offset in sorted(offsets.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found


def _from_json(offset: Offset) -> QueueNumbers:
    return {(topic, int(queue_id)): number for topic, queues in offset.items() for queue_id, number in queues.items()}
