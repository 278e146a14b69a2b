"""Statistics of messages from the log itself, counted in the workers: by queue, topic, hour or day.

    from pyengine.spark import stats
    stats(spark, store, by="hour").orderBy("topic", "hour").show()

Only sums leave the workers. `format("pyengine-queue")` counts messages and bytes of queues
in milliseconds; this reads the log, so it also has times, and what is in no queue.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow
from pyarrow import compute

from pyengine.errors import UsageError
from pyengine.formats.constants import PROPERTY_DELAY, SYS_FLAG_COMPRESSED, SYS_FLAG_TRANSACTION_MASK
from pyengine.spark.jobs import Part, batches_of, given_options, run_in_workers, watched
from pyengine.spark.options import ReadOptions, read_options
from pyengine.spark.plan import plan
from pyengine.spark.schema import Column, chosen_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

By = Literal["queue", "topic", "hour", "day"]


class Figure(NamedTuple):
    """A column of the result: how it comes from a batch's columns, and from partial results."""

    name: str
    type: str
    column: str     # of the rows
    of_rows: str    # an aggregation of Arrow
    of_sums: str    # also the name of Spark's
    meaning: str


FIGURES = (
    Figure("messages", "BIGINT", "size", "count", "sum", "How many."),
    Figure("bodyBytes", "BIGINT", "bodySize", "sum", "sum", "Bytes of their bodies as stored."),
    Figure("bytes", "BIGINT", "size", "sum", "sum", "Bytes of their records."),
    Figure("largest", "INT", "size", "max", "max", "Bytes of the longest record."),
    Figure("delayed", "BIGINT", "delayed", "sum", "sum",
           "Sent with a delay level: each is stored under `SCHEDULE_TOPIC_XXXX`, and again under its own topic once delivered."),
    Figure("transactional", "BIGINT", "transactional", "sum", "sum", "Prepared, committed or rolled back."),
    Figure("compressed", "BIGINT", "compressed", "sum", "sum", "With a compressed body."),
    Figure("retried", "BIGINT", "retried", "sum", "sum", "Delivered again by a broker at least once."),
    Figure("firstOffset", "BIGINT", "offset", "min", "min", "Only by queue: the first message's number."),
    Figure("lastOffset", "BIGINT", "offset", "max", "max", "Only by queue: the last one's."),
    Figure("firstTimestamp", "TIMESTAMP", "timestamp", "min", "min", "The earliest store time."),
    Figure("lastTimestamp", "TIMESTAMP", "timestamp", "max", "max", "The latest."),
)
_ONLY_BY_QUEUE = ("firstOffset", "lastOffset")
# by -> (column, type, microseconds of a step of time)
_SECOND_KEY: dict[str, tuple[str, str, int] | None] = {
    "queue": ("partition", "INT", 0),
    "topic": None,
    "hour": ("hour", "TIMESTAMP", 3_600_000_000),
    "day": ("day", "TIMESTAMP", 86_400_000_000),
}
BY = tuple(_SECOND_KEY)
_DELAY = f"property.{PROPERTY_DELAY}"
_SCANNED = ("topic", "partition", "offset", "timestamp", "bodySize", "size", "sysFlag", "reconsumeTimes", _DELAY)
_SUMS_HELD = 64


@dataclass(frozen=True, slots=True)
class StatsRow:
    """One row of `collect_stats`. Times are milliseconds, hours and days (`time_ms`: their beginning) UTC's."""

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
    """One row for each queue, or each topic, or each topic and hour or day (UTC) of the store time, with FIGURES.

    Keys are `topic` and `partition`, `hour` or `day`; messages are counted in the workers.
    Options are those of `spark.read.format("pyengine")`: with `topics` only what consumers
    see of them is counted, otherwise every record. With `verifyCRC=True` every body
    is checked on the way, and damage fails the query (`onCorrupt="skip"` leaves it out).
    """
    return planned_stats(spark, store, topics, by, options)[0]


def collect_stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None, *,
                  by: By = "queue", progress: Callable[[int, int], None] | None = None, **options: object) -> list[StatsRow]:
    """What `stats` gives, collected, in the order of its keys.

    `progress` is called with (bytes of the log done, all of them) now and then.
    """
    from pyspark.sql import functions as f

    frame, log_bytes = planned_stats(spark, store, topics, by, options)
    times = [name for name, kind in frame.dtypes if kind == "timestamp"]
    frame = frame.withColumns({name: f.unix_millis(name) for name in times})
    with watched(spark, log_bytes, progress):
        rows = [row.asDict() for row in frame.collect()]
    second = _SECOND_KEY[by]
    found = [StatsRow(
        topic=row["topic"], queue_id=row.get("partition"), time_ms=row.get("hour", row.get("day")),
        messages=row["messages"], body_bytes=row["bodyBytes"], bytes=row["bytes"], largest=row["largest"],
        delayed=row["delayed"], transactional=row["transactional"], compressed=row["compressed"], retried=row["retried"],
        first_offset=row.get("firstOffset"), last_offset=row.get("lastOffset"),
        first_timestamp_ms=row["firstTimestamp"], last_timestamp_ms=row["lastTimestamp"],
    ) for row in rows]
    return sorted(found, key=lambda row: (row.topic, 0 if second is None else row.queue_id or row.time_ms or 0))


def planned_stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None, by: By,
             options: dict[str, object]) -> tuple[DataFrame, int]:
    """The result of `stats` and how many bytes of the log it is counted from."""
    from pyspark.sql import functions as f

    if by not in _SECOND_KEY:
        raise UsageError(f"statistics by {by!r}: choose one of {', '.join(BY)}")
    read = read_options(given_options(store, topics, options) | {"columns": ",".join(_SCANNED)})
    parts = plan(read)
    second = _SECOND_KEY[by]
    keys = ["topic"] if second is None else ["topic", second[0]]
    figures = _figures(by)
    types = ["topic STRING", *([] if second is None else [f"{second[0]} {second[1]}"]),
             *(f"{figure.name} {figure.type}" for figure in figures)]
    work = functools.partial(_count, read, chosen_columns(read), by)
    sums = run_in_workers(spark, work, parts, ", ".join(types))
    put_together = [getattr(f, figure.of_sums)(figure.name).cast(figure.type).alias(figure.name) for figure in figures]
    return sums.groupBy(*keys).agg(*put_together), sum(part.log_bytes for part in parts)


def _figures(by: By) -> list[Figure]:
    return [figure for figure in FIGURES if by == "queue" or figure.name not in _ONLY_BY_QUEUE]


def _count(options: ReadOptions, columns: list[Column], by: By, number: int, part: Part) -> Iterator[pyarrow.RecordBatch]:
    """One part's row for each key in it."""
    figures, second = _figures(by), _SECOND_KEY[by]
    keys = ["topic"] if second is None else ["topic", second[0]]
    of_rows = [(figure.name, figure.column, figure.of_rows) for figure in figures]
    of_sums = [(figure.name, figure.name, figure.of_sums) for figure in figures]
    _, batches = batches_of(options, columns, part)
    sums: list[pyarrow.Table] = []
    for batch in batches:
        sums.append(_sums_of(_prepared(batch, second), keys, of_rows))
        if len(sums) == _SUMS_HELD:  # a store may have very many queues
            sums = [_sums_of(pyarrow.concat_tables(sums), keys, of_sums)]
    if sums:
        yield from _sums_of(pyarrow.concat_tables(sums), keys, of_sums).combine_chunks().to_batches()


def _prepared(batch: pyarrow.RecordBatch, second: tuple[str, str, int] | None) -> pyarrow.Table:
    """A batch with the columns that are counted, each as a number, and the step of time that a row falls into."""
    table = pyarrow.Table.from_batches([batch])
    sys_flag = table["sysFlag"]
    counted = {
        "delayed": compute.is_valid(table[_DELAY]),
        "transactional": compute.not_equal(compute.bit_wise_and(sys_flag, SYS_FLAG_TRANSACTION_MASK), 0),
        "compressed": compute.not_equal(compute.bit_wise_and(sys_flag, SYS_FLAG_COMPRESSED), 0),
        "retried": compute.greater(table["reconsumeTimes"], 0),
    }
    for name, column in counted.items():
        table = table.append_column(name, compute.cast(column, pyarrow.int64()))
    if second is not None and second[2]:
        name, _, step_us = second
        times = table["timestamp"].combine_chunks()
        begins = times.cast(pyarrow.int64()).to_numpy() // step_us * step_us
        table = table.append_column(name, pyarrow.array(begins, pyarrow.int64()).cast(times.type))
    return table


def _sums_of(table: pyarrow.Table, keys: list[str], wanted: list[tuple[str, str, str]]) -> pyarrow.Table:
    """One row for each key: (result's name, column, how) each, in their order."""
    found = table.group_by(keys).aggregate([(column, how) for _, column, how in wanted])
    return pyarrow.table({**{key: found[key] for key in keys},
                          **{name: found[f"{column}_{how}"] for name, column, how in wanted}})
