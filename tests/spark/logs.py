"""Small stores made record by record, and reads of them without Spark: planned and read as its tasks would."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import types

from pyengine.formats.paths import StorePaths, segment_name
from pyengine.formats.record import encode_blank
from pyengine.spark.options import read_options
from pyengine.spark.partitions import LogRange
from pyengine.spark.plan import plan
from pyengine.spark.queue_view import plan_view, view_rows
from pyengine.spark.schema import chosen_columns, view_columns, view_options
from pyengine.spark.stream import LogStreamReader
from pyengine.spark.task_reader import arrow_schema, read_partition
from record_bytes import encode_record

SEGMENT_BYTES = 4096


def write_log(root: Path, records: Iterable[dict], segment_bytes: int = SEGMENT_BYTES) -> list[int]:
    """A store of these records (arguments of encode_record; `body` may be made from the offset); their offsets."""
    folder = StorePaths(root).commit_log
    folder.mkdir(parents=True, exist_ok=True)
    segments, offsets = [bytearray()], []
    for fields in records:
        for _ in range(2):
            offset = (len(segments) - 1) * segment_bytes + len(segments[-1])
            body = fields["body"](offset) if callable(fields["body"]) else fields["body"]
            record = encode_record(**{**fields, "body": body, "physical_offset": offset})
            left = segment_bytes - len(segments[-1])
            if len(record) + 8 <= left:
                break
            segments[-1] += encode_blank(left)
            segments.append(bytearray())
        segments[-1] += record
        offsets.append(offset)
    for number, data in enumerate(segments):
        (folder / segment_name(number * segment_bytes)).write_bytes(data.ljust(segment_bytes, b"\0"))
    return offsets


# Golden stores whose queues name messages that RocketMQ cannot read any more: the log has lost its end, or is damaged there.
LOST_END = {"abnormal-cqahead"}
DAMAGED_END = {"widetopic"}


def allowing(recipe: str) -> dict[str, object]:
    """Return what it takes to read this golden store up to where RocketMQ ends its log."""
    return {"failOnDataLoss": False} if recipe in LOST_END else {}


def end_of(root: Path) -> int:
    """Return where the log ends."""
    ranges = plan(read_options({"path": str(root), "failOnDataLoss": "false"}))
    return ranges[-1].limit if ranges else 0


def batches(root: Path, ranges: list[LogRange] | None = None, **given: object) -> Iterator[pa.RecordBatch]:
    """The batches of a read; `ranges` instead of those that are planned."""
    options = read_options({"path": str(root), **{name: str(value) for name, value in given.items()}})
    columns = chosen_columns(options)
    schema = arrow_schema(columns)
    for part in plan(options) if ranges is None else ranges:
        for batch in read_partition(options, columns, part, schema):
            batch.validate(full=True)
            assert batch.schema.equals(schema)
            yield batch


def rows(root: Path, ranges: list[LogRange] | None = None, **given: object) -> list[tuple]:
    """The rows of a read, in the order of its partitions."""
    return [row for batch in batches(root, ranges, **given) for row in zip(*(c.to_pylist() for c in batch.columns))]


# -- streams -------------------------------------------------------------------------


def stream_reader(root: Path | str, **given: object) -> LogStreamReader:
    """A stream as Spark has it planned; from the earliest, in micro-batches of seven messages, if nothing else is said."""
    options = {"path": str(root), "startingOffsets": "earliest", "maxOffsetsPerTrigger": "7",
               **{name: str(value) for name, value in given.items()}}
    kinds = {"STRING": types.StringType, "BINARY": types.BinaryType, "INT": types.IntegerType, "BIGINT": types.LongType,
             "TIMESTAMP": types.TimestampType}
    columns = chosen_columns(read_options(options, "stream"))
    schema = types.StructType([types.StructField(column.name, kinds[column.type]()) for column in columns])
    return LogStreamReader(schema, options)


def to_the_end(reader: LogStreamReader, start: dict) -> tuple[list[tuple], dict]:
    """The rows of the micro-batches from `start` on, read as Spark's tasks read them, and the offset after them."""
    found: list[tuple] = []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        for part in reader.partitions(start, end):
            for batch in pickle.loads(pickle.dumps(reader)).read(part):
                found += zip(*(column.to_pylist() for column in batch.columns))
        start = end
    return found, start


def streamed(root: Path | str, **given: object) -> list[tuple]:
    """The rows of a new stream, up to where the store ends now."""
    reader = stream_reader(root, **given)
    try:
        return to_the_end(reader, reader.initialOffset())[0]
    finally:
        reader.stop()


# -- queue views ---------------------------------------------------------------------


def view_of(root: Path | str, view: str, **given: object) -> list[tuple]:
    """The rows of a view of queues, sorted."""
    options = view_options({"path": str(root), "view": view, **{name: str(value) for name, value in given.items()}})
    schema = arrow_schema(view_columns(options))
    return sorted(row for part in plan_view(options) for batch in view_rows(options, part, schema)
                  for row in zip(*(column.to_pylist() for column in batch.columns)))
