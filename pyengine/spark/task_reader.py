"""Reads the part of a task: its records of the log, filtered, as Arrow batches. It runs in Spark's Python workers, on the store's files
alone.

The first record of a range that begins inside a segment must be searched for (its lengths agree, it has its own offset, and a record
or the end follows), unless another read ended there, and a body can imitate that. So the task of the range *before* knows from its walk
where the next record begins, and compares it with what the next task will find. If they differ the query fails; where damage is skipped
that task reads on up to there.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy
import pyarrow as pa
from pyarrow import compute

from pyengine.arguments import INT64_MAX, INT64_MIN
from pyengine.errors import CorruptionError, FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from pyengine.formats.paths import log_folders, segment_name
from pyengine.formats.small_file import opened
from pyengine.formats.sql_filter import SqlFilter
from pyengine.native.scan import ChooseQueue, ColumnScanner, RawBatch, RowFilter, TallyScanner, choose_queues
from pyengine.spark.file_access import (
    LOG,
    QUEUES,
    FetchedSegment,
    FileTree,
    open_tree,
    windows,
)
from pyengine.spark.options import MESSAGES, Queue, ReadOptions
from pyengine.spark.partitions import REMEDY, DataLossError, LogRange, Part, QueuePart, QueueSlice, queue_chooser, time_bounds
from pyengine.spark.schema import HEADERS_TYPE, TIMESTAMP_TYPE, Column
from pyengine.storage.arrow import WRONG_BODY, Refiner, allocate, to_array
from pyengine.storage.commit_log import LogRun, SegmentBytes, next_record, runs_of
from pyengine.storage.config import LOG_PATHS, config_path, named_log_folders, read_file
from pyengine.storage.mapped_file import map_read_only
from pyengine.storage.queue_entries import ENTRY, READ_ENTRIES, WrongEntry, runs_of_segments, without_record, wrong_entries

log = logging.getLogger(__name__)
_TYPES = {
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    HEADERS_TYPE: pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
}


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the schema that Spark's `to_arrow_schema(schema, "UTC")` makes of these columns."""
    return pa.schema([pa.field(column.name, _TYPES[column.type], nullable=True) for column in columns])


class SkippedRange(NamedTuple):
    """A skipped range of the log, and the reason (of native.scan)."""

    offset: int
    length: int
    reason: str


class RowCounts(NamedTuple):
    """How to count rows instead of returning them: see native.scan.TallyScanner."""

    columns: tuple[str, ...]
    by: Literal["queue", "topic"] | int


class TaskReader(ABC):
    """Reads parts of one read, one after the other."""

    def __init__(self, options: ReadOptions, columns: list[Column], tally: RowCounts | None = None) -> None:
        self.options = options
        asked = {name: options.sizes[name] for name in LOG_PATHS if name in options.sizes}
        self._folders = (named_log_folders(options.path, read_file(config_path(options.path)) | asked) if asked
                         else log_folders(options.path))
        self._tally = tally
        self._columns = columns
        chosen = {name.lower() for name in options.read_columns}
        self._is_read = [column.name.lower() in chosen or "*" in chosen for column in columns]
        bodies = [at for at, column in enumerate(columns) if column.scanned == "body" and self._is_read[at] and options.decompress]
        self._refiner = Refiner(None if options.sql is None else SqlFilter(options.sql), bodies, self._note_body)
        named = [column.scanned for column, is_read in zip(columns, self._is_read) if column.scanned and is_read]
        self._scanned = list(dict.fromkeys([*named, *self._refiner.needs]))
        self._place = {name: at for at, name in enumerate(self._scanned)}
        self.skipped: list[SkippedRange] = []
        self._tree: FileTree | None = open_tree(options.path, options.file_system) if options.is_remote else None

    @abstractmethod
    def batches(self, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one part, in the order of its records; with a tally, groups of them, perhaps repeated."""

    def skip(self, offset: int, length: int, reason: str) -> None:
        """Note damage that `onCorrupt=skip` skips, and log it on the worker's stderr."""
        self.skipped.append(SkippedRange(offset, length, reason))
        log.warning("%s: skipped %d bytes at %d: %s", self.options.where, length, offset, sentence(reason))

    def scanner(self, choose_queue: ChooseQueue | None) -> ColumnScanner:
        """Return a scanner of the needed columns, with the options' filter and this choice of queues."""
        start_ms, end_ms = self.options.starting_timestamp_ms, self.options.ending_timestamp_ms
        row_filter = RowFilter(
            choose_queue=choose_queue,
            tags=self.options.tags or None,
            queued_only=self.options.is_queue_view,
            start_ms=INT64_MIN if start_ms is None else start_ms,
            end_ms=INT64_MAX if end_ms is None else end_ms,
        )
        only = None if row_filter == RowFilter() else row_filter
        if self._tally is not None:
            return TallyScanner(self._tally.columns, self._tally.by, matches=None if self.options.sql is None else self._refiner.meets,
                                row_filter=only, batch_rows=self.options.batch_rows, verify_crc=self.options.verify_crc,
                                allocate=allocate)
        return ColumnScanner(
            self._scanned,
            row_filter=only,
            batch_rows=self.options.batch_rows,
            batch_bytes=self.options.batch_bytes,
            verify_crc=self.options.verify_crc,
            allocate=allocate,
        )

    def open_bytes(self, segment: int, segment_bytes: int) -> SegmentBytes | None:
        """Open the segment, mapped or fetched; None if it was deleted and that is allowed."""
        found: SegmentBytes
        try:
            if self._tree is None:
                view = map_read_only(self._folders.segment(segment_name(segment)))
                found, length = SegmentBytes(view, segment), len(view)
            else:
                file = self._tree.open(f"{LOG}/{segment_name(segment)}")
                found, length = FetchedSegment(file, segment), file.size()
        except FileNotFoundError:
            self.lost(segment)
            return None
        if length != segment_bytes:
            raise CorruptionError(f"{self.segment_path(segment)} has {length} bytes here, not {segment_bytes}: is this a replica that "
                                  "lags, or another store?")
        return found

    def is_gone(self, segment: int) -> bool:
        """Return whether the segment was deleted, so that its blocks may have been freed while they were read."""
        if self._tree is not None:  # fetched bytes stay
            return False
        try:
            return os.stat(self._folders.segment(segment_name(segment))).st_nlink == 0
        except FileNotFoundError:
            return True

    def lost(self, segment: int) -> None:
        """Raise DataLossError, unless lost data is to be skipped."""
        if self.options.fail_on_data_loss:
            raise DataLossError(f"{self.segment_path(segment)} was deleted after the query was planned; {REMEDY}")

    def segment_path(self, segment: int) -> str:
        """Return the segment's path, for messages."""
        if self._tree is not None:
            return f"{self.options.where}/{LOG}/{segment_name(segment)}"
        return str(self._folders.segment(segment_name(segment)))

    def to_batches(self, raw: RawBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Convert scanned columns to the requested ones, of the rows that meet the condition: one batch, or several if decompressed
        bodies make it large."""
        arrays = [to_array(column, raw.rows) for column in raw.columns]
        if self._tally is not None:
            yield pa.RecordBatch.from_arrays(arrays, list(self._tally.columns))
            return
        chosen = []
        for column, is_read in zip(self._columns, self._is_read):
            if not is_read:
                chosen.append(pa.nulls(raw.rows, _TYPES[column.type]))
                continue
            if not column.scanned:
                array = pa.repeat(pa.scalar(TIMESTAMP_TYPE, pa.int32()), raw.rows)
            else:
                array = arrays[self._place[column.scanned]]
            wanted = _TYPES[column.type]
            if column.type == HEADERS_TYPE:
                array = header_column(array, wanted)
            chosen.append(array if array.type == wanted else array.view(wanted))
        batch = pa.RecordBatch.from_arrays(chosen, schema=schema)
        yield from self._refiner.refine(batch, {name: arrays[self._place[name]] for name in self._refiner.needs})

    def _note_body(self, offset: int, size_bytes: int, error: FormatError) -> None:
        """Raise CorruptionError for a body that cannot be decompressed, unless it is to be skipped."""
        if self.options.on_corrupt == "fail":
            raise CorruptionError(f"the body of the message at {offset} cannot be decompressed: {error} with decompress=false")
        self.skip(offset, size_bytes, WRONG_BODY)


def sentence(reason: str) -> str:
    """Return a reason of native.scan as words."""
    return reason.replace("_", " ")


def header_column(properties: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return name and value of each property in the order of the text, repeated names too; null for a message without any.

    `properties`: the texts as stored. As in RocketMQ, a piece without a separator, name or value is ignored.
    """
    pieces = compute.split_pattern(properties, PROPERTY_SEPARATOR)
    flat = pieces.flatten()
    separator_at = compute.find_substring(flat, NAME_VALUE_SEPARATOR).to_numpy(zero_copy_only=False)
    lengths = compute.binary_length(flat).to_numpy(zero_copy_only=False)
    is_property = (separator_at > 0) & (separator_at + 1 < lengths)
    pairs = compute.split_pattern(flat.filter(pa.array(is_property)), NAME_VALUE_SEPARATOR, max_splits=1).flatten()
    places = numpy.arange(0, len(pairs), 2)
    names, values = pairs.take(pa.array(places)), pairs.take(pa.array(places + 1)).cast(pa.binary())
    offsets = numpy.concatenate(([0], numpy.cumsum(is_property)))[pieces.offsets.to_numpy()].astype(numpy.int32)
    has_none = offsets[1:] == offsets[:-1]
    structs = pa.StructArray.from_arrays([names, values], fields=list(wanted.value_type))
    return pa.ListArray.from_arrays(pa.array(offsets), structs, type=wanted, mask=pa.array(has_none))


# -- byte ranges -------------------------------------------------------------------


class RangeReader(TaskReader):
    """Reads the records that begin in a range."""

    def batches(self, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, LogRange)
        self._scanner = self.scanner(queue_chooser(self.options))
        for start, first, end in part.pieces():
            segment = self.open_bytes(start, part.segment_bytes)
            if segment is None:
                continue
            try:
                for raw in self._scan(segment, start, first, end, part):
                    yield from self.to_batches(raw, schema)
            finally:
                segment.close()

    def _scan(self, segment: SegmentBytes, start: int, first: int, end: int, part: LogRange) -> Iterator[RawBatch]:
        """Yield the raw batches of one piece; check is_gone after each read, since a deleted segment reads as zeros."""
        segment_end = start + part.segment_bytes
        limit = min(part.limit, segment_end)
        may_end_inside = limit < segment_end and not self.options.ends_between_records  # a record that is not complete yet
        on_damage = next_record if self.options.on_corrupt == "skip" else None
        is_known = first == start or first == part.start and part.begins_record
        position = first if is_known and first < limit else segment.find_record(first, end, limit)
        if on_damage is not None and position is not None and end == part.end < min(part.stop, segment_end):
            found = segment.find_record(end, limit, limit)  # by the tasks that follow: what is before is read here
            end = min(part.stop, limit if found is None else found)
        sure = -1
        for piece in runs_of(segment, end if position is None else position, end, limit, on_damage):
            if isinstance(piece, LogRun):
                for raw in piece.scan(self._scanner):
                    if self.is_gone(start):
                        return self.lost(start)
                    sure = self._scanner.position
                    yield raw
                position = piece.reached
                if piece.reason == "overrun" and may_end_inside:
                    piece.reason = "range_end"
                elif (piece.reason == "range_end" and end == part.end and end < min(part.stop, segment_end)
                        and self.options.on_corrupt == "fail"):
                    wrong = _wrong_boundary(segment, end, position, limit, may_end_inside)
                    if self.is_gone(start):
                        return self.lost(start)
                    if wrong is not None:
                        raise CorruptionError(wrong)
                continue
            if self.is_gone(start):
                return self.lost(start)
            if on_damage is None:
                raise CorruptionError(f"the log is damaged at {piece.start}: {sentence(piece.reason)} ({self.segment_path(start)})")
            self.skip(piece.start, piece.end - piece.start, piece.reason)
        if position != sure and self.is_gone(start):
            self.lost(start)


def _wrong_boundary(segment: SegmentBytes, boundary: int, following: int, limit: int, may_end_inside: bool) -> str | None:
    """Return what is wrong if the task that begins at `boundary` will not find the record at `following`, which this walk reached."""
    label = segment.label(following, limit)
    if label in ("range_end", "blank") or (label == "overrun" and may_end_inside):
        expected = None
    elif label == "message":
        expected = following
    else:
        return f"the log is damaged at {following}: {sentence(label)}"
    found = segment.find_record(boundary, min(following + 1, limit), limit)
    if found == expected:
        return None
    if found is None:
        return f"the log is damaged after the record at {following}"
    return (f"the body at {found} looks like a record of its own: "
            "with maxPartitionBytes of at least a segment's size no task looks for its first record")


# -- queue entries -----------------------------------------------------------------


class _Run(NamedTuple):
    """Entries of a queue for records of one segment; the first has this number."""

    segment: int
    number: int
    entries: numpy.ndarray


class QueuePartReader(TaskReader):
    """Reads slices of queues."""

    def __init__(self, options: ReadOptions, columns: list[Column], tally: RowCounts | None = None) -> None:
        super().__init__(options, columns, tally)
        self._times = time_bounds(options)
        self._queue: Queue = "", -1  # of the last slice
        self._newest_segment = -1  # that an entry of this queue has named

    def batches(self, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, QueuePart)
        for one in part.slices:
            queue = one.topic, one.queue_id
            scanner = self.scanner(choose_queues(lambda *found, queue=queue: found == queue, {queue: (one.first, one.end)}, self._times))
            for segment, run, is_right, limit in self.checked(one, part):
                for raw in self._gather(scanner, one, segment, run.segment, run.entries[is_right], limit):
                    yield from self.to_batches(raw, schema)

    def checked(self, one: QueueSlice, part: QueuePart) -> Iterator[tuple[SegmentBytes, _Run, numpy.ndarray, int]]:
        """Yield the slice's entries by segment: the segment, whose `view` has their records up to a limit, the entries, which of them
        agree with their records, and that limit."""
        if self._queue != (one.topic, one.queue_id):
            self._queue, self._newest_segment = (one.topic, one.queue_id), -1
        for number, entries in self.entries(one, part.queue_file_bytes):
            for start, begin, end in runs_of_segments(entries, part.segment_bytes):
                run = _Run(start, number + begin, entries[begin:end])
                segment = self._open_named(part, run)
                if segment is None:
                    continue
                with contextlib.closing(segment):
                    for first, stop, limit in windows(segment, run.entries, min(part.limit, start + part.segment_bytes)):
                        near = _Run(start, run.number + first, run.entries[first:stop])
                        is_right = self._right(segment, near, limit)
                        if is_right is None:
                            break
                        yield segment, near, is_right, limit

    def entries(self, one: QueueSlice, file_bytes: int) -> Iterator[tuple[int, numpy.ndarray]]:
        """Yield (number of the first, entries) of the slice, in blocks within one file."""
        per_file = file_bytes // CQ_ENTRY_BYTES
        at = one.first
        while at < one.end:
            start = at - at % per_file
            count = min(one.end - at, start + per_file - at, READ_ENTRIES)
            data = self.entry_bytes(one, start * CQ_ENTRY_BYTES, (at - start) * CQ_ENTRY_BYTES, count * CQ_ENTRY_BYTES)
            if data is None:
                at = start + per_file
                continue
            yield at, numpy.frombuffer(data, ENTRY)
            at += count

    def entry_bytes(self, one: QueueSlice, start: int, position: int, length: int) -> bytes | None:
        """Return bytes of the queue's file that begins at `start`; None if it was deleted and that is allowed."""
        file_name = f"{QUEUES}/{one.topic}/{one.queue_id}/{segment_name(start)}"
        path = f"{self.options.where}/{file_name}"
        try:
            if self._tree is not None:
                with self._tree.open(file_name) as file:
                    data: bytes = file.read_at(length, position)
            else:
                with opened(os.open(f"{self.options.path}/{file_name}", os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                    data = os.pread(descriptor, length, position)
        except FileNotFoundError:
            if self.options.fail_on_data_loss:
                raise DataLossError(f"{path} was deleted after the query was planned; {REMEDY}") from None
            return None
        if len(data) != length:
            raise CorruptionError(f"{path} is shorter than the other files of its kind: is this a replica that lags, or another store?")
        return data

    def _open_named(self, part: QueuePart, run: _Run) -> SegmentBytes | None:
        """Open the segment that the entries name; None if it was deleted or the entries are wrong, and that is allowed.

        The oldest segments are deleted first. So if an earlier entry names an existing later segment, a missing segment means damage.
        """
        if not 0 <= run.segment < part.limit:
            why = f"beyond the log's end at {part.limit}" if run.segment >= 0 else "which is not an offset of the log"
        elif run.segment >= self._newest_segment or self._is_there(run.segment) or self.is_gone(self._newest_segment):
            self._newest_segment = max(self._newest_segment, run.segment)
            return self.open_bytes(run.segment, part.segment_bytes)
        else:
            why = "where the log has no segment, after one in a newer segment"
        for found in without_record(self._queue, run.number, run.entries, why):
            self._note(found)
        return None

    def _is_there(self, segment: int) -> bool:
        if self._tree is None:
            return not self.is_gone(segment)
        try:
            self._tree.open(f"{LOG}/{segment_name(segment)}").close()
        except FileNotFoundError:
            return False
        return True

    def _note(self, found: WrongEntry) -> None:
        """Raise CorruptionError for a wrong entry, unless it is to be skipped."""
        if self.options.on_corrupt == "fail":
            remedy = "access=scan reads the log itself" if self.options.view == MESSAGES else "onCorrupt=skip leaves it out"
            raise CorruptionError(f"{found.sentence}: {remedy}")
        self.skip(found.physical_offset, found.size_bytes, found.reason)

    def _right(self, segment: SegmentBytes, run: _Run, limit: int) -> numpy.ndarray | None:
        """Return which of the entries agree with their records; None if the segment was deleted and that is allowed."""
        is_right = numpy.ones(len(run.entries), dtype=bool)
        for found in wrong_entries(segment.view, segment.base, self._queue, run.number, run.entries, limit):
            if self.is_gone(run.segment):
                self.lost(run.segment)
                return None
            self._note(found)
            is_right[found.at] = False
        return is_right

    def _gather(self, scanner: ColumnScanner, one: QueueSlice, segment: SegmentBytes, start: int, entries: numpy.ndarray, limit: int
                ) -> Iterator[RawBatch]:
        rest = memoryview(entries.tobytes())
        while rest:
            for raw in scanner.gather(segment.view, segment.base, rest, limit):
                if self.is_gone(start):
                    return self.lost(start)
                yield raw
            if scanner.reason == "range_end":
                break
            if self.is_gone(start):
                return self.lost(start)
            if self.options.on_corrupt == "fail":
                raise CorruptionError(f"queue {one.topic}/{one.queue_id} names a message at {scanner.position}, "
                                      f"but there it is {sentence(scanner.reason)}: access=scan reads the log itself")
            at = CQ_ENTRY_BYTES * scanner.gathered
            self.skip(scanner.position, int(numpy.frombuffer(rest, ENTRY, 1, at)["size"][0]), scanner.reason)
            rest = rest[at + CQ_ENTRY_BYTES :]


# -- parts -------------------------------------------------------------------------


def read_partition(options: ReadOptions, columns: list[Column], part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one partition; `schema` is arrow_schema(columns), except for the case of names and nullability.

    CorruptionError for damage (unless it is to be skipped) and for a file of another length, DataLossError for a deleted segment
    (unless that is allowed).
    """
    return reader_of(options, columns, part).batches(part, schema)


def reader_of(options: ReadOptions, columns: list[Column], part: Part, tally: RowCounts | None = None) -> TaskReader:
    """Return the reader of such parts."""
    return (RangeReader if isinstance(part, LogRange) else QueuePartReader)(options, columns, tally)
