"""The input of each task of a read: which bytes or queue entries to read, and which rows are wanted.

The task of a LogRange reads the records that *begin* in it and finds the first one itself (pyengine.spark.task_reader), so the
planning need not walk the log. The task of a QueuePart reads the records of queue entries. Both read nothing at or above `limit`
(the log's end when the read was planned), and need only the files, on any host.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from pyengine.arguments import EVERY_OFFSET, INT64_MAX
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.spark.options import EARLIEST, LATEST, PARTS_MAX, Queue, QueueOffsets, ReadOptions, flat

if TYPE_CHECKING:
    from pyengine.native.scan import ChooseQueue

REMEDY = "set failOnDataLoss=false to read what there is"


class DataLossError(CorruptionError):
    """Requested data does not exist any more; failOnDataLoss=false reads what there is."""


@dataclass(frozen=True)
class LogRange(InputPartition):
    """The records that begin in [start, end), physical offsets; no task of this read continues at `stop`.

    `begins_record`: one is known to begin at `start`, or will.
    """

    start: int
    end: int
    stop: int
    limit: int
    segment_bytes: int
    begins_record: bool = False

    @property
    def log_bytes(self) -> int:
        """The bytes of the log in it."""
        return self.end - self.start

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (segment's start, first byte, end) for each segment of the range."""
        first = self.start
        while first < self.end:
            segment = first - first % self.segment_bytes
            end = min(self.end, segment + self.segment_bytes)
            yield segment, first, end
            first = end


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """The messages [first, end) of one queue, and their approximate bytes in the log."""

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
        """The approximate bytes of the log in it."""
        return sum(one.log_bytes for one in self.slices)


Part = LogRange | QueuePart


def cut(start: int, stop: int, limit: int, segment_bytes: int, wanted: int, *, begins_record: bool = False) -> list[LogRange]:
    """Divide [start, stop) into ranges of at most `wanted` bytes; an empty read has no range.

    A range has whole segments, or is inside one, so that most ranges begin at a known record. `begins_record`: one begins at `start`.
    """
    if start >= stop:
        return []
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
    return [LogRange(a, min(b, stop), stop, limit, segment_bytes, begins_record and a == start) for a, b in itertools.pairwise(bounds)]


def partition_bytes(total_bytes: int, max_partition_bytes: int, min_partitions: int) -> int:
    """Return the size of a partition in bytes of the log; UsageError if maxPartitionBytes makes more than a driver can hold."""
    if total_bytes > max_partition_bytes * PARTS_MAX:
        raise UsageError(f"option maxPartitionBytes = {max_partition_bytes} makes more than {PARTS_MAX:,} partitions of "
                         f"{total_bytes:,} bytes: give {-(-total_bytes // PARTS_MAX)} at least")
    share = total_bytes // min_partitions if min_partitions > 1 else max_partition_bytes
    return max(1, min(max_partition_bytes, share))


# -- rows -------------------------------------------------------------------------


def offset_bounds(options: ReadOptions) -> dict[Queue, tuple[int, int]]:
    """Return queue -> [first offset, end) for queues with bounds in the options; a missing bound is that of EVERY_OFFSET."""
    return _bounds(options.starting_offsets, options.ending_offsets)


def time_bounds(options: ReadOptions) -> dict[Queue, tuple[int, int]]:
    """Return queue -> [start, end) of its store times in ms for queues with times of their own."""
    return _bounds(options.starting_timestamps, options.ending_timestamps)


def queue_chooser(options: ReadOptions, *, with_offsets: bool = True) -> ChooseQueue | None:
    """Return a function from a queue to its wanted offsets (and store times, if bounded), None for no rows.

    Return None if all rows of all queues are wanted. Without offsets the rows are those of a stream at any position.
    """
    from pyengine.native.scan import choose_queues  # here, since Spark imports this module to find the format

    topics = frozenset(options.subscribe)
    pattern = re.compile(options.subscribe_pattern) if options.subscribe_pattern else None
    offsets, times = (offset_bounds(options), time_bounds(options)) if with_offsets else ({}, {})
    if not options.has_topics and not offsets and not times:
        return None

    def are_wanted(topic: str, queue_id: int) -> bool:
        if topics and topic not in topics or pattern is not None and not pattern.fullmatch(topic):
            return False
        return not options.assign or queue_id in options.assign.get(topic, ())

    return choose_queues(are_wanted, offsets, times)


def without_light_queues(choose: ChooseQueue) -> ChooseQueue:
    """Return the same choice without light queues, whose entries name records of other topics."""
    return lambda topic, queue_id: None if topic.startswith(LMQ_PREFIX) else choose(topic, queue_id)


def _bounds(starts: QueueOffsets | None, ends: QueueOffsets | None) -> dict[Queue, tuple[int, int]]:
    """Return [start, end) of the queues that either argument bounds."""
    found: dict[Queue, tuple[int, int]] = {}
    for queue, start in flat(starts).items():
        if start != EARLIEST:
            found[queue] = start, INT64_MAX
    for queue, end in flat(ends).items():
        if end != LATEST:
            found[queue] = found.get(queue, EVERY_OFFSET)[0], end
    return found
