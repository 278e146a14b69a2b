"""Bulk work inside Spark's Python workers: each task reads its byte range and returns a summary.

Rows do not enter the JVM, which is several times faster than a DataFrame that is written out again. Options are those of
`spark.read.format("pyengine")`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import pyarrow

from pyengine.errors import UsageError
from pyengine.spark.options import ReadOptions, read_options
from pyengine.spark.partitions import Part
from pyengine.spark.plan import plan
from pyengine.spark.schema import Column, chosen_columns
from pyengine.spark.task_reader import RowCounts, SkippedRange, arrow_schema, reader_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Task = TypeVar("Task")  # the input of one task
Found = TypeVar("Found")  # its result

PART_BYTES_MAX = 1 << 30
_POLL_INTERVAL_S = 0.2
_INTERRUPT = "spark.job.interruptOnCancel"  # after a failure the other tasks end too, as in SQL


def skipped_ranges(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None,
                   **options: object) -> DataFrame:
    """Return what a read with `onCorrupt=skip` leaves out: physicalOffset, bytes, reason."""
    given = given_options(store, topics, options) | {"columns": "physicalOffset", "onCorrupt": "skip"}
    read = read_options(given)
    found = collect_from_workers(spark, functools.partial(_skipped, read, chosen_columns(read)), plan(read))
    offsets, lengths, reasons = zip(*found) if found else ((), (), ())
    return spark.createDataFrame(pyarrow.table({"physicalOffset": pyarrow.array(offsets, pyarrow.int64()), "bytes": pyarrow.array(
        lengths, pyarrow.int64()), "reason": pyarrow.array(reasons, pyarrow.string())}))


def collect_from_workers(spark: SparkSession, work: Callable[[int, Task], Iterator[Found]], parts: Sequence[Task]) -> list[Found]:
    """Return what `work(number, part)` yields for each part, one task each, in the parts' order; both are pickled.

    It is a job of one stage without an SQL plan, for which the JVM would need longer than a worker for a GB. A task gets only its
    own part. The results are in the driver's memory, within `spark.driver.maxResultSize`; the session must have a JVM.
    """
    if not parts:
        return []

    def task(one: tuple[int, bytes]) -> Iterator[Found]:
        return work(one[0], pickle.loads(zlib.decompress(one[1])))

    numbered = [(number, zlib.compress(pickle.dumps(part, pickle.HIGHEST_PROTOCOL), 1)) for number, part in enumerate(parts)]
    context = spark.sparkContext
    before = context.getLocalProperty(_INTERRUPT)
    context.setLocalProperty(_INTERRUPT, "true")
    try:
        return context.parallelize(numbered, len(numbered)).flatMap(task).collect()
    finally:
        context.setLocalProperty(_INTERRUPT, "false" if before is None else before)


@contextlib.contextmanager
def watched(spark: SparkSession, total_bytes: int, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Pass the finished share of the running stage's tasks to `progress`, as bytes."""
    if progress is None:
        yield
        return
    over = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def watch() -> None:
        furthest = 0
        while not over.wait(_POLL_INTERVAL_S):
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            for stage in filter(None, stages):
                furthest = max(furthest, total_bytes * stage.numCompletedTasks // stage.numTasks)
                progress(furthest, total_bytes)

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def given_options(store: str | os.PathLike[str], topics: Iterable[str] | None, options: dict[str, object]) -> dict[str, str]:
    """Return the options as texts; those that are None are not given. `topics` is a text for `subscribe`, or has names."""
    given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items() if value is not None}
    given["path"] = os.fspath(store)
    if topics is not None:
        listed = [] if isinstance(topics, str) else [*topics]
        for name in listed:
            if "," in name or name != name.strip():
                raise UsageError(f"topics names {name!r}: subscribe, which gets it, divides names at commas and strips spaces; give the "
                                 "topic with its queues in assign")
        given["subscribe"] = topics if isinstance(topics, str) else ",".join(listed)
    return given


def planned_parts(spark: SparkSession, options: ReadOptions, given: Mapping[str, str], parts_a_core: int) -> list[Part]:
    """Return the parts of a job over `options`, made from `given`: larger than a read's, unless it has maxPartitionBytes.

    Spark needs as long to begin a task as C for some hundred MB; but each core gets `parts_a_core` if there are enough.
    """
    if "maxpartitionbytes" in map(str.lower, given):
        return plan(options)
    return plan(options, PART_BYTES_MAX, parts_a_core * spark.sparkContext.defaultParallelism)


def _skipped(options: ReadOptions, columns: list[Column], number: int, part: Part) -> Iterator[SkippedRange]:
    """Yield one part's damaged ranges."""
    reader = reader_of(options, columns, part)
    for _ in reader.batches(part, arrow_schema(columns)):
        pass
    yield from reader.skipped


# -- statistics -------------------------------------------------------------------

By = Literal["queue", "topic", "hour", "day"]


@dataclass(frozen=True, slots=True)
class Figure(Column):
    """A column of the result, under its name in native.scan."""

    aggregate: str = "sum"  # of partial results; the name is Arrow's and Spark's


FIGURES = (
    Figure("messages", "BIGINT", "How many messages."),
    Figure("bodyBytes", "BIGINT", "Bytes of their bodies as stored."),
    Figure("bytes", "BIGINT", "Bytes of their records."),
    Figure("largest", "INT", "Bytes of the longest record.", aggregate="max"),
    Figure("delayed", "BIGINT", "With a delay level: stored twice, first under `SCHEDULE_TOPIC_XXXX`."),
    Figure("transactional", "BIGINT", "Prepared, committed or rolled back."),
    Figure("compressed", "BIGINT", "With a compressed body."),
    Figure("retried", "BIGINT", "Delivered again at least once."),
    Figure("firstOffset", "BIGINT", "Only by queue: the first message's number.", aggregate="min"),
    Figure("lastOffset", "BIGINT", "Only by queue: the last message's number.", aggregate="max"),
    Figure("firstTimestamp", "TIMESTAMP", "The earliest store time.", aggregate="min"),
    Figure("lastTimestamp", "TIMESTAMP", "The latest store time.", aggregate="max"),
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
    """One row of `collect_stats`; `time_ms`: where the hour or day begins."""

    topic: str  # the key, then FIGURES in their order
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
    """Return one row for each queue, topic, or topic and hour or day (UTC store time), as in docs/spark.md.

    It counts at once; `verifyCRC=True` checks every body.
    """
    return spark.createDataFrame(count_messages(spark, store, topics, by, options))


def collect_stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None, *,
                  by: By = "queue", progress: Callable[[int, int], None] | None = None, **options: object) -> list[StatsRow]:
    """As stats(), but a sorted list."""
    table = with_milliseconds(count_messages(spark, store, topics, by, options, progress))
    second = _SECOND_KEY[by]
    found = [StatsRow(row["topic"], row.get("partition"), row.get("hour", row.get("day")), *(row.get(figure.name) for figure in FIGURES))
             for row in table.to_pylist()]
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
    second = _SECOND_KEY[by]
    keys = [("topic", "STRING"), *([] if second is None else [second[:2]])]
    schema = arrow_schema([*(Column(name, kind, "") for name, kind in keys), *_figures(by)])
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
