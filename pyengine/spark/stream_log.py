"""A stream of the whole log: its offset is one physical offset, {"physicalOffset": N}.

N is always where a record begins, or will: so each micro-batch is a range of whole
records, known by two numbers, and reads the same rows when it is read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyengine.errors import CorruptionError
from pyengine.native.columns import RowFilter
from pyengine.native.scan import sync, walk
from pyengine.spark.options import ReadOptions
from pyengine.spark.partitions import LogRange, cut
from pyengine.spark.plan import REMEDY, DataLossError

if TYPE_CHECKING:
    import pyarrow

    from pyengine.ipc.live_reader import LiveStoreReader

Offset = dict[str, int]
NAME = "physicalOffset"
_COUNT_ROWS = 1 << 14


class LogStream:
    """Offsets and parts of the stream. Not for several threads."""

    def __init__(self, options: ReadOptions, reader: LiveStoreReader) -> None:
        self._options = options
        self._reader = reader
        self._log = reader.commit_log
        self._counted = (0, 0, 0)  # messages from the first offset to the second, and how many

    def initial(self) -> Offset:
        """Where a new stream begins."""
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

    def available(self) -> Offset:
        """Where the stream ends now."""
        return {NAME: self._end()}

    def is_behind(self, start: Offset, target: Offset) -> bool:
        """Whether the log ends before the place that the stream has come to."""
        return start[NAME] > target[NAME]

    def bounded(self, start: Offset, target: Offset, most_messages: int | None, most_bytes: int | None) -> Offset:
        """The end of a batch from `start` on: at `target`, or where one of the bounds is reached; never without progress."""
        begin, end = start[NAME], target[NAME]
        if begin > end:
            self._require(f"the log ends at {end} ({self._options.read_level.value}), the stream had come to {begin}: "
                          "what it had read is gone")
            return {NAME: end}
        begin = self._kept(begin)
        if most_bytes is not None and end - begin > most_bytes:
            end = self._behind(begin, begin + most_bytes, end)
        if most_messages is not None and begin < end:
            end = self._count(begin, end, most_messages)
        return {NAME: end}

    def has_waiting(self, start: Offset, target: Offset, least: int) -> bool:
        """Whether at least so many messages lie between the two. Asked again from the same start, it goes on where it had come to."""
        begin, end = max(start[NAME], self._log.min_offset), target[NAME]
        first, reached, waiting = self._counted
        if first != begin or not begin <= reached <= end:
            reached, waiting = begin, 0
        if waiting >= least:
            return True
        for batch in self._records(reached, end, batch_rows=min(least, _COUNT_ROWS)) if reached < end else ():
            waiting += batch.num_rows
            if waiting >= least:
                return True
        self._counted = begin, max(begin, end), waiting
        return False

    def parts(self, start: Offset, end: Offset) -> list[LogRange]:
        """The ranges of one batch."""
        options = self._options
        first, stop = self._kept(start[NAME]), end[NAME]
        return cut(first, stop, stop, self._log.size_bytes, options.max_partition_bytes, options.min_partitions)

    def _end(self) -> int:
        end = self._reader.max_physical_offset(self._options.read_level)
        return max(end, 0)

    def _kept(self, begin: int) -> int:
        """`begin`, or the log's first byte where older ones are deleted and that is allowed."""
        first = self._log.min_offset
        if begin >= first:
            return begin
        self._require(f"the log begins at {first} now, the stream had come to {begin}")
        return first

    def _require(self, sentence: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{sentence}; {REMEDY}")

    def _record_at(self, offset: int, first: int, end: int) -> int:
        """`offset` as a record's beginning: the first one at or behind it."""
        if not first <= offset <= end:
            self._require(f"startingPhysicalOffset {offset}: the log reaches from {first} to {end}")
        offset = min(max(offset, first), end)
        segment = offset - offset % self._log.size_bytes
        return offset if offset in (segment, end) else self._behind(segment, offset, end)

    def _behind(self, known: int, wanted: int, end: int) -> int:
        """Behind the records that begin in [known, wanted), at most `end`; a record begins at `known`. Moves on by one at least."""
        size_bytes = self._log.size_bytes
        segment = wanted - wanted % size_bytes
        position = max(known, segment)  # a segment's first byte begins a record
        wanted = max(wanted, position + 1 if position == known else position)
        if position >= wanted:
            return min(position, end)
        segment_end = segment + size_bytes
        view = self._log.view(segment)
        if view is None:
            return min(segment_end, end)
        while position < wanted:
            limit = min(end, segment_end)
            found = walk(view, segment, position, min(wanted, limit), check_crc=False, limit=limit)
            position = found.end_offset
            if found.reason == "range_end":
                return min(position, end)
            if found.reason == "blank":
                return min(segment_end, end)
            position = self._past_damage(view, segment, position, limit, found.reason)
        return min(position, end)

    def _count(self, begin: int, end: int, most: int) -> int:
        """Behind the `most` records from `begin` on."""
        left = most
        for batch in self._records(begin, end, batch_rows=min(most + 1, _COUNT_ROWS)):
            if batch.num_rows > left:
                return batch.column(0)[left].as_py()
            left -= batch.num_rows
        return end

    def _past_damage(self, view, segment: int, position: int, limit: int, reason: str) -> int:
        if self._options.on_corrupt == "fail":
            raise CorruptionError(f"the log is damaged at {position}: {reason.replace('_', ' ')}")
        following = sync(view, segment, position + 1, limit, limit=limit) if position + 1 < limit else None
        return limit if following is None else following

    def _by_time(self, timestamp_ms: int, end: int) -> int:
        """The first record stored at that time or later; the log's end when there is none."""
        begin = max(0, self._log.min_offset)
        for segment in self._log.starts():
            first_ms = self._first_time(segment, end)
            if first_ms is None or first_ms >= timestamp_ms:
                break
            begin = segment  # nothing before it can be meant
        found = next(self._records(begin, end, batch_rows=1, row_filter=RowFilter(start_ms=timestamp_ms)), None)
        return end if found is None else found.column(0)[0].as_py()

    def _records(self, begin: int, end: int, **settings: Any) -> Iterator[pyarrow.RecordBatch]:
        """physicalOffset of the records that begin in [begin, end), as LogScanner gives it; a record begins at `begin`."""
        from pyengine.storage.arrow import LogScanner

        scanner = LogScanner([NAME], on_corrupt=self._options.on_corrupt, **settings)
        size_bytes = self._log.size_bytes
        for segment in list(self._log.starts()):
            first, limit = max(begin, segment), min(end, segment + size_bytes)
            view = self._log.view(segment) if first < limit else None
            if view is not None:
                yield from scanner.scan(view, segment, first, limit)

    def _first_time(self, segment: int, end: int) -> int | None:
        if segment >= end:
            return None
        view = self._log.view(segment)
        if view is None:
            return None
        found = walk(view, segment, segment, segment + 1, check_crc=False, limit=min(end, segment + self._log.size_bytes))
        return found.first_store_timestamp_ms if found.messages else None
