"""What every task of a read does, whichever way it finds its records: filters, segments, Arrow batches.

Runs in Spark's Python workers, on the store's files alone.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from pyengine.errors import CorruptionError
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.native.columns import ChooseQueue, ColumnScanner, RawBatch
from pyengine.spark.file_tree import LOG, FileTree, open_tree
from pyengine.spark.headers import header_column
from pyengine.spark.options import INT64_MAX, INT64_MIN, ReadOptions
from pyengine.spark.partitions import LogRange, QueuePart
from pyengine.spark.plan import REMEDY, DataLossError
from pyengine.spark.schema import HEADERS_TYPE, TIMESTAMP_TYPE, Column
from pyengine.spark.segment_bytes import FetchedSegment, MappedSegment, Segment
from pyengine.spark.selection import Selection
from pyengine.storage.arrow import RowFilter, allocate, to_array
from pyengine.storage.segment_files import map_read_only

log = logging.getLogger(__name__)
_TYPES = {
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    HEADERS_TYPE: pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
}


def arrow_schema(columns: list[Column]) -> pa.Schema:
    """What Spark's `to_arrow_schema(schema, "UTC")` makes of these columns."""
    return pa.schema([pa.field(column.name, _TYPES[column.type], nullable=True) for column in columns])


def read_partition(
    options: ReadOptions, selection: Selection, columns: list[Column], part: LogRange | QueuePart, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of one partition; `schema` is arrow_schema(columns) or differs from it in names' case and nullability.

    Raises CorruptionError for damage (unless it is to be skipped) and for a file of
    another length, DataLossError for a segment that was deleted (unless that is allowed).
    """
    return reader_of(options, selection, columns, part).batches(part, schema)


def reader_of(options: ReadOptions, selection: Selection, columns: list[Column], part: LogRange | QueuePart) -> TaskReader:
    """The reader of such parts."""
    if isinstance(part, LogRange):
        from pyengine.spark.range_reader import RangeReader as Reader
    else:
        from pyengine.spark.queue_part_reader import QueuePartReader as Reader
    return Reader(options, selection, columns)


class Skipped(NamedTuple):
    """Bytes of the log that were passed over, and why (a reason of native.scan)."""

    offset: int
    length: int
    reason: str


class TaskReader:
    """The common part; `batches(part, schema)` is each reader's own."""

    def __init__(self, options: ReadOptions, selection: Selection, columns: list[Column]) -> None:
        self.options = options
        self.selection = selection
        self.paths = StorePaths(options.path)
        self._columns = columns
        self._scanned = list(dict.fromkeys(column.scanned for column in columns if column.scanned))
        self._place = {name: at for at, name in enumerate(self._scanned)}
        self.skipped: list[Skipped] = []
        self._tree: FileTree | None = open_tree(options.path, options.file_system) if options.is_remote else None

    def skip(self, offset: int, length: int, reason: str) -> None:
        """Note damage that `onCorrupt=skip` passes over, and tell it on the worker's stderr."""
        self.skipped.append(Skipped(offset, length, reason))
        log.warning("%s: skipped %d bytes at %d: %s", self.options.path, length, offset, sentence(reason))

    def scanner(self, choose_queue: ChooseQueue | None) -> ColumnScanner:
        """A scanner of the columns that are needed, with the selection's filter and this choice of queues."""
        chosen = self.selection
        row_filter = RowFilter(
            choose_queue=choose_queue,
            tags=chosen.tags or None,
            queued_only=chosen.queued_only,
            start_ms=INT64_MIN if chosen.start_ms is None else chosen.start_ms,
            end_ms=INT64_MAX if chosen.end_ms is None else chosen.end_ms,
        )
        return ColumnScanner(
            self._scanned,
            row_filter=None if row_filter == RowFilter() else row_filter,
            batch_rows=self.options.batch_rows,
            batch_bytes=self.options.batch_bytes,
            verify_crc=self.options.verify_crc,
            allocate=allocate,
        )

    def open_segment(self, segment: int, segment_bytes: int) -> mmap.mmap | None:
        """The segment's bytes, None if it is gone and that is allowed."""
        try:
            view = map_read_only(self.paths.commit_log_segment(segment))
        except FileNotFoundError:
            self.lost(segment)
            return None
        if len(view) != segment_bytes:
            raise self._of_another_length(segment, len(view), segment_bytes)
        return view

    def open_bytes(self, segment: int, segment_bytes: int) -> Segment | None:
        """The segment to read some ranges of, mapped or fetched; None if it is gone and that is allowed."""
        if self._tree is None:
            view = self.open_segment(segment, segment_bytes)
            return None if view is None else MappedSegment(view, segment)
        try:
            file = self._tree.open(f"{LOG}/{segment_name(segment)}")
        except FileNotFoundError:
            self.lost(segment)
            return None
        if file.size() != segment_bytes:
            raise self._of_another_length(segment, file.size(), segment_bytes)
        return FetchedSegment(file, segment)

    def is_gone(self, segment: int) -> bool:
        """Whether the segment was deleted: then its pages may have been given back while they were read."""
        if self._tree is not None:  # what was fetched is ours
            return False
        try:
            return os.stat(self.paths.commit_log_segment(segment)).st_nlink == 0
        except FileNotFoundError:
            return True

    def lost(self, segment: int) -> None:
        """DataLossError, unless what is gone is to be left out."""
        if self.options.fail_on_data_loss:
            raise DataLossError(f"{self.segment_path(segment)} was deleted after the query was planned; {REMEDY}")

    def segment_path(self, segment: int) -> str:
        """Where it is, for a person."""
        if self._tree is not None:
            return f"{self.options.path}/{LOG}/{segment_name(segment)}"
        return str(self.paths.commit_log_segment(segment))

    def _of_another_length(self, segment: int, found: int, wanted: int) -> CorruptionError:
        return CorruptionError(f"{self.segment_path(segment)} has {found} bytes here, not {wanted}: is this a replica that lags, "
                               "or another store?")

    def to_batch(self, raw: RawBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The scanned columns as those that were asked for."""
        arrays = [to_array(column, raw.rows) for column in raw.columns]
        chosen = []
        for column in self._columns:
            if not column.scanned:
                array = pa.repeat(pa.scalar(TIMESTAMP_TYPE, pa.int32()), raw.rows)
            else:
                array = arrays[self._place[column.scanned]]
            wanted = _TYPES[column.type]
            if column.type == HEADERS_TYPE:
                array = header_column(array, wanted)
            chosen.append(array if array.type == wanted else array.view(wanted))
        return pa.RecordBatch.from_arrays(chosen, schema=schema)


def sentence(reason: str) -> str:
    """A reason of native.scan as words."""
    return reason.replace("_", " ")
