"""The rows of one byte range of the log.

A range that begins inside a segment begins at no known record: the first one is looked
for (lengths add up, the record names its own offset, a record or the end follows). A
body could be made to look so. Hence the task that reads the range *before* compares: it
knows by walking where the next record really begins, and what the next task will find.
If they differ the query fails, so no row is ever invented or left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from pyengine.errors import CorruptionError
from pyengine.native.columns import RawBatch
from pyengine.spark.partitions import LogRange
from pyengine.spark.segment_bytes import Segment, find_record, first_window, judge, more, next_window
from pyengine.spark.selection import queue_chooser
from pyengine.spark.task_reader import TaskReader, sentence

ADVICE = "with maxPartitionBytes of at least a segment's size no task looks for its first record"


class RangeReader(TaskReader):
    """Reads ranges of one read, one after the other."""

    def batches(self, part: LogRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of the records that begin in the range, in the log's order."""
        self._scanner = self.scanner(queue_chooser(self.selection))
        for start, first, end in part.pieces():
            segment = self.open_bytes(start, part.segment_bytes)
            if segment is None:
                continue
            try:
                for raw in self._scan(segment, start, first, end, part):
                    if self.is_gone(start):
                        self.lost(start)
                        break
                    yield self.to_batch(raw, schema)
            finally:
                segment.close()

    def _scan(self, segment: Segment, start: int, first: int, end: int, part: LogRange) -> Iterator[RawBatch]:
        """The raw batches of one piece."""
        segment_end = start + part.segment_bytes
        limit = min(part.limit, segment_end)
        scanner = self._scanner
        position = _begin(segment, start, first, end, limit)
        upto = end if position is None else first_window(position, end)
        while position is not None and position < end:
            have = segment.fill(position, upto, limit)
            yield from scanner.scan(segment.view, segment.base, position, min(end, have), have)
            position, reason = scanner.position, scanner.reason
            if more(segment, position, have, reason, limit) and position < end:
                upto = next_window(position, have, end)
                continue
            if reason == "range_end":
                if end == part.end and end < min(part.stop, segment_end):
                    self._check_border(segment, end, position, limit, segment_end)
                return
            if reason == "blank" or (reason == "overrun" and limit < segment_end):
                return  # what reaches beyond the limit is not there yet
            if self.is_gone(start):
                return self.lost(start)
            if self.options.on_corrupt == "fail":
                raise CorruptionError(f"the log is damaged at {position}: {sentence(reason)} ({self.segment_path(start)})")
            following = find_record(segment, position + 1, end, limit) if position + 1 < end else None
            self.skip(position, (end if following is None else following) - position, reason)
            position = following
            upto = end if position is None else first_window(position, end)

    def _check_border(self, segment: Segment, border: int, following: int, limit: int, segment_end: int) -> None:
        """The task that begins at `border` must find the record at `following`, which this walk has reached."""
        if self.options.on_corrupt == "skip":
            return
        label = judge(segment, following, limit)
        if label in ("range_end", "blank") or (label == "overrun" and limit < segment_end):
            expected = None
        elif label == "message":
            expected = following
        else:
            raise CorruptionError(f"the log is damaged at {following}: {sentence(label)}")
        found = find_record(segment, border, min(following + 1, limit), limit)
        if found == expected:
            return
        if found is None:
            raise CorruptionError(f"the log is damaged behind the record at {following}")
        raise CorruptionError(f"the body that stands at {found} looks like a record of its own: {ADVICE}")


def _begin(segment: Segment, start: int, first: int, end: int, limit: int) -> int | None:
    """Where the first record of a range begins, None if none does in [first, end)."""
    end = min(end, limit)
    if first >= end:
        return None
    return first if first == start else find_record(segment, first, end, limit)
