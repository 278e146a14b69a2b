"""The option `view`: consume queues as rows, one for each queue, for each entry, or for each queue and consumer group.

`queue` and `groups` count, and read the records of each queue's first and last entry; `entries` lists entries, and
compares each with the head of its record. They run in Spark's workers on the store's files; the plan of the read has the end of
each queue.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pyarrow
from pyspark.sql.datasource import InputPartition

from pyengine.arguments import EVERY_OFFSET
from pyengine.errors import CorruptionError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.spark.file_access import windows
from pyengine.spark.options import ReadOptions
from pyengine.spark.partitions import REMEDY, DataLossError, QueueSlice, queue_chooser
from pyengine.spark.plan import grouped
from pyengine.spark.presence import QueueExtents, require_end, require_entries, require_group, require_names
from pyengine.spark.remote_store import TaskStore, consumer_offsets, open_for_reading, open_in_task, segment_of
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.queue_entries import EntryCheck, WrongEntry, queue_entries, runs_of_segments, without_record

log = logging.getLogger(__name__)
ENTRIES_PER_PART = 4 << 20
QUEUES_PER_PART = 5_000


@dataclass(frozen=True)
class QueueRows(InputPartition):
    """Parts of queues; no message beyond the physical offset `limit` exists."""

    queues: tuple[QueueSlice, ...]
    limit: int


class _Examiner:
    """Checks the entries of one part: wrong ones are an error, or left out, as the options say."""

    def __init__(self, options: ReadOptions, reader: TaskStore, limit: int) -> None:
        self._options, self._reader, self._limit = options, reader, limit
        self._check = EntryCheck()
        self._queue: ConsumeQueue | None = None
        self._newest_segment = -1  # that an entry of this queue has named

    def entries(self, queue: ConsumeQueue, first: int, end: int) -> Iterator[tuple[int, numpy.ndarray]]:
        """Do as queue_entries; DataLossError if a file of the queue is missing."""
        expected = first
        for number, entries in queue_entries(queue, first, end):
            self._require(queue, expected, number)
            yield number, entries
            expected = number + len(entries)
        self._require(queue, expected, end)

    def right(self, queue: ConsumeQueue, number: int, entries: numpy.ndarray) -> numpy.ndarray:
        """Return which of the entries agree with their records; call it in the order of the queue."""
        is_right = numpy.ones(len(entries), dtype=bool)
        if queue is not self._queue:
            self._queue, self._newest_segment = queue, -1
        for start, begin, end in runs_of_segments(entries, self._reader.commit_log.size_bytes):
            for wrong in self._wrong(start, queue, number + begin, entries[begin:end]):
                if self._options.on_corrupt == "fail":
                    raise CorruptionError(f"{wrong.sentence}: onCorrupt=skip leaves it out")
                log.warning("%s: left out: %s", self._options.where, wrong.sentence)
                is_right[begin + wrong.at] = False
        return is_right

    def _wrong(self, start: int, queue: ConsumeQueue, number: int, entries: numpy.ndarray) -> Iterator[WrongEntry]:
        """Yield the wrong ones of entries for records of the segment at `start`; the first has this number in its queue.

        Entries of a segment that was deleted since the plan are not checked. If an earlier entry names an existing later segment, a
        missing segment means damage."""
        commit_log, key = self._reader.commit_log, (queue.topic, queue.queue_id)
        segment = segment_of(self._reader, start) if 0 <= start < self._limit else None
        if segment is None:
            if not 0 <= start < commit_log.min_offset or self._newest_segment >= commit_log.min_offset:
                why = f"beyond the log's end at {self._limit}" if start >= self._limit else "where the log has no segment"
                yield from without_record(key, number, entries, why)
            return
        self._newest_segment = max(self._newest_segment, start)
        with contextlib.closing(segment):
            for begin, end, limit in windows(segment, entries, min(self._limit, start + commit_log.size_bytes)):
                for wrong in self._check.wrong(segment.view, segment.base, key, number + begin, entries[begin:end], limit):
                    if start < commit_log.min_offset:
                        return  # deleted while it was read
                    yield wrong._replace(at=begin + wrong.at)

    def require_files(self, queue: ConsumeQueue, first: int, end: int) -> None:
        """Raise DataLossError if a file between the two entries is missing."""
        for number in range(first, end, queue.entries_per_file):
            start = number - number % queue.entries_per_file
            if queue.files.start_of(start * CQ_ENTRY_BYTES) is None:
                self._require(queue, max(first, start), min(end, start + queue.entries_per_file))

    def _require(self, queue: ConsumeQueue, first: int, end: int) -> None:
        if first < end and self._options.fail_on_data_loss:
            raise DataLossError(
                f"entries {first} to {end - 1} of queue {queue.topic}/{queue.queue_id} were deleted with their file; {REMEDY}")


def plan_view(options: ReadOptions) -> list[QueueRows]:
    """Return the read's partitions: every chosen queue up to the current end of the level."""
    choose = queue_chooser(options)
    with open_for_reading(options) as reader:
        require_names(options, reader, use="view")
        if options.group is not None:
            require_group(options, reader, options.group)
        extents = QueueExtents(options, reader, choose or (lambda topic, queue_id: EVERY_OFFSET))
        require_end(options, reader, extents)
        limit = max(0, reader.dispatched_offset(options.read_level))
        require_entries(options, reader, extents, limit)
        found = [QueueSlice(queue.topic, queue.queue_id, first, high, high - first) for queue, first, high, *_ in extents.bounds(limit)]
    if options.view != "entries":
        step = max(1, min(QUEUES_PER_PART, -(-len(found) // options.min_partitions)))
        return [QueueRows(tuple(found[at : at + step]), limit) for at in range(0, len(found), step)]
    found = [one for one in found if one.first < one.end]
    entries = sum(one.log_bytes for one in found)  # an entry counts as a byte here
    return [QueueRows(tuple(group), limit) for group in grouped(found, min(ENTRIES_PER_PART, -(-entries // options.min_partitions)))]


def view_rows(options: ReadOptions, part: QueueRows, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of one partition in `schema`."""
    with open_in_task(options) as reader:
        yield from (_list if options.view == "entries" else _count)(options, reader, part, schema)


def _count(options: ReadOptions, reader: TaskStore, part: QueueRows, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    examiner = _Examiner(options, reader, part.limit)
    committed = consumer_offsets(reader).groups() if options.group or options.view == "groups" else {}
    rows: dict[str, list[Any]] = {name: [] for name in options.columns}
    for one in part.queues:
        topic, queue_id, first, end = one.topic, one.queue_id, one.first, one.end
        queue = reader._queue(topic, queue_id)
        if queue is None:  # deleted since the read was planned
            continue
        ends = [queue.entry(number, end) if first < end else None for number in (first, end - 1)]
        for number in sorted({first, end - 1}) if first < end else ():
            for at, entries in examiner.entries(queue, number, number + 1):
                examiner.right(queue, at, entries)
        examiner.require_files(queue, first, end)
        values: dict[str, Any] = {
            "topic": topic, "partition": queue_id, "minOffset": first, "maxOffset": end, "messages": end - first,
            "firstPhysicalOffset": ends[0] and ends[0].physical_offset,
            "lastPhysicalOffset": ends[1] and ends[1].physical_offset,
        }
        if "bytes" in rows:
            values["bytes"] = sum(int(entries["size"].sum(dtype="int64")) for _, entries in examiner.entries(queue, first, end))
        is_of_all = options.view == "groups" and options.group is None
        for group in sorted(name for of, name in committed if of == topic) if is_of_all else [options.group]:
            offset = committed.get((topic, group or ""), {}).get(queue_id)
            lag = None if group is None else max(0, end - max(first, offset or 0))
            for name, column in rows.items():
                column.append((values | {"group": group, "committedOffset": offset, "lag": lag})[name])
    if rows[options.columns[0]]:
        arrays = [pyarrow.array(rows[name], field.type) for name, field in zip(options.columns, schema, strict=True)]
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _list(options: ReadOptions, reader: TaskStore, part: QueueRows, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    examiner = _Examiner(options, reader, part.limit)
    for one in part.queues:
        queue = reader._queue(one.topic, one.queue_id)
        if queue is None:
            continue
        for number, found in examiner.entries(queue, one.first, one.end):
            is_right = examiner.right(queue, number, found)
            entries, offsets = found[is_right], numpy.arange(number, number + len(found), dtype=numpy.int64)[is_right]
            made: dict[str, Callable[[], Any]] = {
                "topic": lambda: pyarrow.repeat(pyarrow.scalar(one.topic, pyarrow.string()), len(entries)),
                "partition": lambda: numpy.full(len(entries), one.queue_id, numpy.int32),
                "offset": lambda: offsets,
                "physicalOffset": lambda: entries["physicalOffset"].astype(numpy.int64),
                "size": lambda: entries["size"].astype(numpy.int32),
                "tagsCode": lambda: entries["tagsCode"].astype(numpy.int64),
            }
            arrays = [pyarrow.array(made[name](), field.type) for name, field in zip(options.columns, schema, strict=True)]
            yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
