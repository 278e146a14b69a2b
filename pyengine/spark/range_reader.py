"""One partition's rows as Arrow batches: runs in Spark's Python workers, on the store's files alone.

A range that begins inside a segment begins at no known record: the first one is looked
for (lengths add up, the record names its own offset, a record or the end follows). A
body could be made to look so. Hence the task that reads the range *before* compares: it
knows by walking where the next record really begins, and what the next task will find.
If they differ the query fails, so no row is ever invented or left out in silence.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pyengine.errors import CorruptionError
from pyengine.formats.paths import StorePaths
from pyengine.native.columns import EVERY_OFFSET, ChooseQueue, ColumnScanner
from pyengine.native.scan import classify, sync
from pyengine.spark.options import INT64_MAX, ReadOptions
from pyengine.spark.partitions import LogRange
from pyengine.spark.plan import REMEDY, DataLossError, Selection
from pyengine.spark.schema import TIMESTAMP_TYPE, Column
from pyengine.storage.arrow import RowFilter, allocate, to_array
from pyengine.storage.segment_files import map_read_only

_TYPES = {
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
}
ADVICE = "with maxPartitionBytes of at least a segment's size no task looks for its first record"


def arrow_schema(columns: list[Column]) -> pa.Schema:
    """What Spark's `to_arrow_schema(schema, "UTC")` makes of these columns."""
    return pa.schema([pa.field(column.name, _TYPES[column.type], nullable=True) for column in columns])


def row_filter(selection: Selection) -> RowFilter | None:
    """The scan's filter for these rows, None for all rows."""
    if selection == Selection():
        return None
    return RowFilter(
        choose_queue=_chooser(selection),
        tags=selection.tags or None,
        queued_only=selection.queued_only,
        start_ms=EVERY_OFFSET[0] if selection.start_ms is None else selection.start_ms,
        end_ms=INT64_MAX if selection.end_ms is None else selection.end_ms,
    )


def _chooser(selection: Selection) -> ChooseQueue | None:
    """What the scan asks once for each queue that it meets."""
    topics = frozenset(selection.topics)
    pattern = re.compile(selection.topic_pattern) if selection.topic_pattern else None
    offsets = {(topic, queue_id): (first, end) for topic, queue_id, first, end in selection.offsets}
    if not topics and pattern is None and selection.queues is None and not offsets:
        return None

    def choose(topic: str, queue_id: int) -> tuple[int, int] | None:
        if topics and topic not in topics or pattern is not None and not pattern.fullmatch(topic):
            return None
        if selection.queues is not None and (topic, queue_id) not in selection.queues:
            return None
        return offsets.get((topic, queue_id), EVERY_OFFSET)

    return choose


class RangeReader:
    """Reads partitions of one read, one after the other."""

    def __init__(self, options: ReadOptions, selection: Selection, columns: list[Column]) -> None:
        self._options = options
        self._columns = columns
        self._paths = StorePaths(options.path)
        scanned = list(dict.fromkeys(column.scanned for column in columns if column.scanned))
        self._place = {name: at for at, name in enumerate(scanned)}
        self._scanner = ColumnScanner(
            scanned,
            row_filter=row_filter(selection),
            batch_rows=options.batch_rows,
            batch_bytes=options.batch_bytes,
            verify_crc=options.verify_crc,
            allocate=allocate,
        )

    def batches(self, part: LogRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of the records that begin in the range, in the log's order.

        Raises CorruptionError for damage (unless it is to be skipped) and for a file of
        another length, DataLossError for a segment that was deleted (unless that is allowed).
        """
        for segment, first, end in part.pieces():
            path = self._paths.commit_log_segment(segment)
            view = self._open(path, part.segment_bytes)
            if view is None:
                continue
            for raw in self._scan(view, segment, first, end, part):
                if _is_gone(path):  # its pages may have been given back while they were read
                    self._lost(path)
                    break
                yield self._to_batch(raw, schema)

    def _open(self, path: Path, segment_bytes: int) -> mmap.mmap | None:
        try:
            view = map_read_only(path)
        except FileNotFoundError:
            self._lost(path)
            return None
        if len(view) != segment_bytes:
            raise CorruptionError(
                f"{path} has {len(view)} bytes here, not {segment_bytes}: is this a replica that lags, or another store?"
            )
        return view

    def _lost(self, path: Path) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(f"{path} was deleted after the query was planned; {REMEDY}")

    def _scan(self, view: mmap.mmap, segment: int, first: int, end: int, part: LogRange) -> Iterator:
        """The raw batches of one piece."""
        segment_end = segment + part.segment_bytes
        limit = min(part.limit, segment_end)
        scanner = self._scanner
        position = _begin(view, segment, first, end, limit)
        while position is not None and position < end:
            yield from scanner.scan(view, segment, position, end, limit)
            position, reason = scanner.position, scanner.reason
            if reason == "range_end":
                if end == part.end and end < min(part.stop, segment_end):
                    self._check_border(view, segment, end, position, limit)
                return
            if reason == "blank" or (reason == "overrun" and limit < segment_end):
                return  # what reaches beyond the limit is not there yet
            path = self._paths.commit_log_segment(segment)
            if _is_gone(path):
                return self._lost(path)
            if self._options.on_corrupt == "fail":
                raise CorruptionError(f"the log is damaged at {position}: {reason.replace('_', ' ')} ({path})")
            position = sync(view, segment, position + 1, end, limit=limit) if position + 1 < end else None

    def _check_border(self, view: mmap.mmap, segment: int, border: int, following: int, limit: int) -> None:
        """The task that begins at `border` must find the record at `following`, which this walk has reached."""
        if self._options.on_corrupt == "skip":
            return
        label = classify(view, following - segment, limit - following, following, check_crc=False)
        if label in ("range_end", "blank") or (label == "overrun" and limit < segment + len(view)):
            expected = None
        elif label == "message":
            expected = following
        else:
            raise CorruptionError(f"the log is damaged at {following}: {label.replace('_', ' ')}")
        found = _begin(view, segment, border, min(following + 1, limit), limit)
        if found == expected:
            return
        if found is None:
            raise CorruptionError(f"the log is damaged behind the record at {following}")
        raise CorruptionError(f"the body that stands at {found} looks like a record of its own: {ADVICE}")

    def _to_batch(self, raw, schema: pa.Schema) -> pa.RecordBatch:
        arrays = [to_array(column, raw.rows) for column in raw.columns]
        chosen = []
        for column in self._columns:
            if not column.scanned:
                array = pa.repeat(pa.scalar(TIMESTAMP_TYPE, pa.int32()), raw.rows)
            else:
                array = arrays[self._place[column.scanned]]
            wanted = _TYPES[column.type]
            chosen.append(array if array.type == wanted else array.view(wanted))
        return pa.RecordBatch.from_arrays(chosen, schema=schema)


def _begin(view: mmap.mmap, segment: int, first: int, end: int, limit: int) -> int | None:
    """Where the first record of a range begins, None if none does in [first, end)."""
    end = min(end, limit)
    if first >= end:
        return None
    return first if first == segment else sync(view, segment, first, end, limit=limit)


def _is_gone(path: Path) -> bool:
    try:
        return os.stat(path).st_nlink == 0
    except FileNotFoundError:
        return True
