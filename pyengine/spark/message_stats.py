"""Counts messages from the log in the workers: by queue, topic, hour or day.

    from pyengine.spark import stats
    stats(spark, store, by="hour").orderBy("topic", "hour").show()

Only sums leave the workers: each task returns a row for each group, and the driver adds them up. The option `view=queue`
counts messages and bytes of queues in milliseconds; this module reads the log, so it also has times, and messages in no queue.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow

from pyengine.errors import UsageError
from pyengine.spark.jobs import collect_from_workers, given_options, planned_parts, watched
from pyengine.spark.options import ReadOptions, read_options
from pyengine.spark.partitions import Part
from pyengine.spark.schema import Column
from pyengine.spark.task_reader import RowCounts, arrow_schema, reader_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

By = Literal["queue", "topic", "hour", "day"]


class Figure(NamedTuple):
    """A column of the result, under its name in native.scan."""

    name: str
    type: str
    aggregate: str  # of partial results; the name is Arrow's and Spark's
    meaning: str


FIGURES = (
    Figure("messages", "BIGINT", "sum", "How many messages."),
    Figure("bodyBytes", "BIGINT", "sum", "Bytes of their bodies as stored."),
    Figure("bytes", "BIGINT", "sum", "Bytes of their records."),
    Figure("largest", "INT", "max", "Bytes of the longest record."),
    Figure("delayed", "BIGINT", "sum",
           "With a delay level: stored twice, first under `SCHEDULE_TOPIC_XXXX`."),
    Figure("transactional", "BIGINT", "sum", "Prepared, committed or rolled back."),
    Figure("compressed", "BIGINT", "sum", "With a compressed body."),
    Figure("retried", "BIGINT", "sum", "Delivered again at least once."),
    Figure("firstOffset", "BIGINT", "min", "Only by queue: the first message's number."),
    Figure("lastOffset", "BIGINT", "max", "Only by queue: the last message's number."),
    Figure("firstTimestamp", "TIMESTAMP", "min", "The earliest store time."),
    Figure("lastTimestamp", "TIMESTAMP", "max", "The latest store time."),
)
_ONLY_BY_QUEUE = ("firstOffset", "lastOffset")
# by -> (column, type, interval in microseconds)
_SECOND_KEY: dict[str, tuple[str, str, int] | None] = {
    "queue": ("partition", "INT", 0),
    "topic": None,
    "hour": ("hour", "TIMESTAMP", 3_600_000_000),
    "day": ("day", "TIMESTAMP", 86_400_000_000),
}
BY = tuple(_SECOND_KEY)
_GROUPS_HELD = 20_000


@dataclass(frozen=True, slots=True)
class StatsRow:
    """One row of `collect_stats`. Times are ms; `time_ms` is the start of an hour or day in UTC."""

    topic: str
    queue_id: int | None        # by queue
    time_ms: int | None         # by hour and day
    messages: int
    body_bytes: int
    bytes: int
    largest: int
    delayed: int
    transactional: int
    compressed: int
    retried: int
    first_offset: int | None    # by queue
    last_offset: int | None
    first_timestamp_ms: int
    last_timestamp_ms: int


def stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None, *, by: By = "queue",
          **options: object) -> DataFrame:
    """Return one row for each queue, topic, or topic and hour or day (UTC, of the store time): the columns in docs/spark.md.

    It counts at once, in the workers. `options` are those of reading: with `topics` it counts what consumers see, otherwise every
    record; `verifyCRC=True` checks every body.
    """
    return spark.createDataFrame(count_messages(spark, store, topics, by, options))


def collect_stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None, *,
                  by: By = "queue", progress: Callable[[int, int], None] | None = None, **options: object) -> list[StatsRow]:
    """Return the rows of `stats` as a sorted list. `progress` gets (bytes done, all bytes)."""
    table = with_milliseconds(count_messages(spark, store, topics, by, options, progress))
    second = _SECOND_KEY[by]
    found = [StatsRow(
        topic=row["topic"], queue_id=row.get("partition"), time_ms=row.get("hour", row.get("day")),
        messages=row["messages"], body_bytes=row["bodyBytes"], bytes=row["bytes"], largest=row["largest"],
        delayed=row["delayed"], transactional=row["transactional"], compressed=row["compressed"], retried=row["retried"],
        first_offset=row.get("firstOffset"), last_offset=row.get("lastOffset"),
        first_timestamp_ms=row["firstTimestamp"], last_timestamp_ms=row["lastTimestamp"],
    ) for row in table.to_pylist()]
    return sorted(found, key=lambda row: (row.topic, 0 if second is None else row.queue_id or row.time_ms or 0))


def count_messages(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None, by: By, options: dict[str, object],
            progress: Callable[[int, int], None] | None = None) -> pyarrow.Table:
    """Return the rows of `stats`, in no order."""
    if by not in _SECOND_KEY:
        raise UsageError(f"statistics by {by!r}: choose one of {', '.join(BY)}")
    given = given_options(store, topics, options)
    read = read_options(given)
    parts = planned_parts(spark, read, given, 1)
    with watched(spark, sum(part.log_bytes for part in parts), progress):
        sums = collect_from_workers(spark, functools.partial(_count, read, by), parts)
    second, figures = _SECOND_KEY[by], _figures(by)
    columns = [("topic", "STRING"), *([] if second is None else [second[:2]]), *((figure.name, figure.type) for figure in figures)]
    schema = arrow_schema([Column(name, kind, "", False, "") for name, kind in columns])
    return _merged(sums, by).rename_columns(schema.names).cast(schema) if sums else schema.empty_table()


def with_milliseconds(table: pyarrow.Table) -> pyarrow.Table:
    """Return the table with its times as numbers, in ms."""
    for at, field in enumerate(table.schema):
        if pyarrow.types.is_timestamp(field.type):
            us = table.column(at).cast(pyarrow.int64()).to_numpy()
            table = table.set_column(at, field.name, pyarrow.array(us // 1000, pyarrow.int64()))
    return table


def _figures(by: By) -> list[Figure]:
    return [figure for figure in FIGURES if by == "queue" or figure.name not in _ONLY_BY_QUEUE]


def _keys(by: By) -> list[str]:
    """Return the names in native.scan of the key's columns."""
    second = _SECOND_KEY[by]
    return ["topic", *([] if second is None else ["step" if second[2] else "queueId"])]


def _scanned(by: By) -> list[str]:
    """Return the names in native.scan of the columns of partial results: the keys, then the figures."""
    return [*_keys(by), *(figure.name for figure in _figures(by))]


def _count(options: ReadOptions, by: By, number: int, part: Part) -> Iterator[pyarrow.RecordBatch]:
    """Yield one part's row for each key in it."""
    second = _SECOND_KEY[by]
    step: Literal["queue", "topic"] | int = "topic" if second is None else second[2] or "queue"
    reader = reader_of(options, [], part, RowCounts(tuple(_scanned(by)), step))
    sums: list[pyarrow.RecordBatch] = []
    for batch in reader.batches(part, pyarrow.schema([])):
        sums.append(batch)
        if sum(map(len, sums)) > _GROUPS_HELD:  # a store may have very many queues
            sums = _merged(sums, by).to_batches()
    if sums:
        yield from _merged(sums, by).combine_chunks().to_batches()


def _merged(sums: list[pyarrow.RecordBatch], by: By) -> pyarrow.Table:
    """Merge partial results into one row for each key."""
    keys = _keys(by)
    found = pyarrow.Table.from_batches(sums).group_by(keys).aggregate([(figure.name, figure.aggregate) for figure in _figures(by)])
    return found.select([*keys, *(f"{figure.name}_{figure.aggregate}" for figure in _figures(by))]).rename_columns(_scanned(by))
