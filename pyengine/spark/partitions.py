"""What one task reads: a byte range of the log, or slices of queues; and how a read is cut into them.

The task of a LogRange reads the records that *begin* in it and finds the first by itself
(pyengine.spark.range_reader), so nobody has to walk the log to plan a read. The task of a
QueuePart reads the records that queue entries name. Either looks at nothing at or above
`limit` (the end of the log when the read was planned) and needs the files only, on
whatever host it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition


@dataclass(frozen=True)
class LogRange(InputPartition):
    """The records that begin in [start, end). All offsets are physical; at `stop` nobody goes on."""

    start: int
    end: int
    stop: int
    limit: int
    segment_bytes: int

    @property
    def log_bytes(self) -> int:
        """How much of the log it is."""
        return self.end - self.start

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(segment's start, first byte, end) for each segment that the range touches."""
        first = self.start
        while first < self.end:
            segment = first - first % self.segment_bytes
            end = min(self.end, segment + self.segment_bytes)
            yield segment, first, end
            first = end


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """The messages [first, end) of one queue, and about how many bytes of the log they are."""

    topic: str
    queue_id: int
    first: int
    end: int
    log_bytes: int


@dataclass(frozen=True)
class QueuePart(InputPartition):
    """The messages of these slices; `queue_file_bytes` is the size of the queues' files."""

    slices: tuple[QueueSlice, ...]
    limit: int
    segment_bytes: int
    queue_file_bytes: int

    @property
    def log_bytes(self) -> int:
        """About how much of the log it is."""
        return sum(one.log_bytes for one in self.slices)


def cut(start: int, stop: int, limit: int, segment_bytes: int, max_partition_bytes: int, min_partitions: int) -> list[LogRange]:
    """[start, stop) in ranges of at most `max_partition_bytes`, at least `min_partitions` if there are bytes enough.

    A range holds whole segments, or lies inside one: most ranges then begin where a record
    surely does. An empty list for an empty read.
    """
    if start >= stop:
        return []
    wanted = partition_bytes(stop - start, max_partition_bytes, min_partitions)
    bounds = []
    at = start
    while at < stop:
        bounds.append(at)
        segment_end = at - at % segment_bytes + segment_bytes
        if wanted >= segment_bytes:
            at = segment_end + (wanted - (segment_end - at)) // segment_bytes * segment_bytes
        else:
            pieces = -(-segment_bytes // wanted)
            step = -(-segment_bytes // pieces)
            at = min(segment_end, at - at % segment_bytes + ((at % segment_bytes) // step + 1) * step)
    bounds.append(stop)
    return [LogRange(a, min(b, stop), stop, limit, segment_bytes) for a, b in itertools.pairwise(bounds)]


def partition_bytes(total_bytes: int, max_partition_bytes: int, min_partitions: int) -> int:
    """How many bytes of the log a partition should have."""
    share = total_bytes // min_partitions if min_partitions > 1 else max_partition_bytes
    return max(1, min(max_partition_bytes, share))
