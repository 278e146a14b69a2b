"""Bulk work inside Spark's Python workers: each task reads its byte range and returns a summary.

Rows never cross into the JVM, which is several times faster than a DataFrame that is
written out again. Options are those of `spark.read.format("pyengine")`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.errors import UsageError
from pyengine.spark.options import ReadOptions, read_options
from pyengine.spark.partitions import LogRange, QueuePart
from pyengine.spark.plan import plan
from pyengine.spark.schema import Column, chosen_columns
from pyengine.spark.selection import select

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

Part = LogRange | QueuePart
Work = Callable[[int, Part], "Iterator[pyarrow.RecordBatch]"]

SUCCESS = "_SUCCESS"
COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "none")
ROW_GROUP_BYTES = 64 << 20
STATS_SCHEMA = (
    "topic STRING, partition INT, messages BIGINT, bodyBytes BIGINT, bytes BIGINT, "
    "firstOffset BIGINT, lastOffset BIGINT, firstTimestamp TIMESTAMP, lastTimestamp TIMESTAMP"
)
_LOOK_S = 0.2
_STATS_COLUMNS = ("topic", "partition", "offset", "timestamp", "bodySize", "size")
_SUMMARY_SCHEMA = "file STRING, messages BIGINT, bytes BIGINT"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export wrote: files in `dest`, messages, and bytes of those files."""

    dest: str
    files: int
    messages: int
    bytes: int


def export_parquet(
    spark: SparkSession,
    store: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    topics: Iterable[str] | None = None,
    *,
    compression: str = "snappy",
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: object,
) -> ExportResult:
    """Write the log, or some topics of it, as Parquet files into the folder `dest`.

    The workers write the files; each appears under its name when it is whole, and
    `_SUCCESS` comes last, so a folder without it is an export that did not finish. A
    task that runs twice writes the same file twice. `dest` must be on a file system
    that all workers share. `progress` is told (bytes of the log done, all of them) now and then.
    UsageError for a folder that holds something, unless `overwrite`.
    """
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}: choose one of {', '.join(COMPRESSIONS)}")
    given = _given(store, topics, options)
    read = read_options(given)
    columns = chosen_columns(read)
    target = Path(dest).absolute()
    parts = plan(read)
    _clear(target, overwrite)
    work = functools.partial(_write_file, read, columns, str(target), compression, uuid.uuid4().hex)
    try:
        with _watched(spark, sum(part.log_bytes for part in parts), progress):
            rows = run_in_workers(spark, work, parts, _SUMMARY_SCHEMA).collect()
    except BaseException:
        for unfinished in target.glob(".part-*"):
            unfinished.unlink(missing_ok=True)
        raise
    written = [row for row in rows if row.messages]
    if not written:
        _write_empty(columns, target / "part-00000.parquet", compression)
    (target / SUCCESS).touch()
    return ExportResult(str(target), max(1, len(written)), sum(r.messages for r in written), sum(r.bytes for r in written))


def stats(spark: SparkSession, store: str | os.PathLike[str], topics: Iterable[str] | None = None, **options: object) -> DataFrame:
    """One row for each queue: messages, bytes, first and last offset and time, counted in the workers.

    With `verifyCRC="true"` every body is checked on the way, and damage fails the query.
    """
    from pyspark.sql import functions as f

    given = _given(store, topics, options) | {"columns": ",".join(_STATS_COLUMNS)}
    read = read_options(given)
    parts = run_in_workers(spark, functools.partial(_count, read, chosen_columns(read)), plan(read), STATS_SCHEMA)
    return parts.groupBy("topic", "partition").agg(
        f.sum("messages").alias("messages"),
        f.sum("bodyBytes").alias("bodyBytes"),
        f.sum("bytes").alias("bytes"),
        f.min("firstOffset").alias("firstOffset"),
        f.max("lastOffset").alias("lastOffset"),
        f.min("firstTimestamp").alias("firstTimestamp"),
        f.max("lastTimestamp").alias("lastTimestamp"),
    )


def run_in_workers(spark: SparkSession, work: Work, parts: list[Part], schema: str) -> DataFrame:
    """A DataFrame of what `work(number, part)` yields for each part, one task each; `work` is pickled."""

    def task(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number, parts[number])

    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(task, schema)


@contextlib.contextmanager
def _watched(spark: SparkSession, total_bytes: int, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Tell `progress` how many of the running stage's tasks are done, as their share of the bytes."""
    if progress is None:
        yield
        return
    over = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
            for stage in filter(None, stages):
                progress(total_bytes * stage.numCompletedTasks // stage.numTasks, total_bytes)

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _given(store: str | os.PathLike[str], topics: Iterable[str] | None, options: dict[str, object]) -> dict[str, str]:
    given = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    given["path"] = os.fspath(store)
    if topics is not None:
        given["subscribe"] = ",".join([topics] if isinstance(topics, str) else topics)
    return given


def _clear(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give a folder for the Parquet files")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UsageError(f"{target} is not empty: give another folder, or allow it to be replaced")
        foreign = [entry.name for entry in target.iterdir() if not _is_ours(entry)]
        if foreign:
            raise UsageError(f"{target} holds {foreign[0]}, which no export wrote: give another folder")
        shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)


def _is_ours(entry: Path) -> bool:
    return entry.name == SUCCESS or (entry.name.startswith(("part-", ".part-")) and ".parquet" in entry.name)


def _batches(options: ReadOptions, columns: list[Column], part: Part) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    from pyengine.spark.task_reader import arrow_schema, read_partition

    schema = arrow_schema(columns)
    return schema, read_partition(options, select(options), columns, part, schema)


def _write_file(
    options: ReadOptions, columns: list[Column], target: str, compression: str, run: str, number: int, part: Part
) -> Iterator[pyarrow.RecordBatch]:
    """One part into one Parquet file, in row groups of about ROW_GROUP_BYTES; no file without rows."""
    import pyarrow
    from pyarrow import parquet

    name = f"part-{number:05d}.parquet"
    unfinished = Path(target, f".{name}.{run}.{uuid.uuid4().hex[:8]}")
    schema, batches = _batches(options, columns, part)
    messages, writer = 0, None
    try:
        for group in _groups(batches, ROW_GROUP_BYTES):
            if writer is None:
                writer = parquet.ParquetWriter(unfinished, schema, compression=compression, use_dictionary=_DICTIONARY)
            table = pyarrow.Table.from_batches(group, schema)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            messages += table.num_rows
        if writer is not None:
            writer.close()
            unfinished.rename(Path(target, name))
    except BaseException:
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    written = Path(target, name).stat().st_size if messages else 0
    yield _row(_SUMMARY_FIELDS, name, messages, written)


# Columns whose values repeat; a dictionary of bodies or offsets would only be thrown away.
_DICTIONARY = ["topic", "tags", "bornHost", "storeHost", "partition", "queueId", "flag", "sysFlag", "reconsumeTimes",
               "preparedTransactionOffset", "timestampType"]
_SUMMARY_FIELDS = (("file", "string"), ("messages", "int64"), ("bytes", "int64"))


def _groups(batches: Iterator[pyarrow.RecordBatch], most_bytes: int) -> Iterator[list[pyarrow.RecordBatch]]:
    group: list[pyarrow.RecordBatch] = []
    held = 0
    for batch in batches:
        group.append(batch)
        held += batch.nbytes
        if held >= most_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group


def _row(fields: Iterable[tuple[str, str]], *values: Any) -> pyarrow.RecordBatch:
    import pyarrow

    named = list(fields)
    arrays = [pyarrow.array([value], pyarrow.type_for_alias(kind)) for (_, kind), value in zip(named, values)]
    return pyarrow.RecordBatch.from_arrays(arrays, [name for name, _ in named])


def _write_empty(columns: list[Column], path: Path, compression: str) -> None:
    from pyarrow import parquet

    from pyengine.spark.task_reader import arrow_schema

    parquet.write_table(arrow_schema(columns).empty_table(), path, compression=compression)


def _count(options: ReadOptions, columns: list[Column], number: int, part: Part) -> Iterator[pyarrow.RecordBatch]:
    """One part's row for each queue in it."""
    import pyarrow

    _, batches = _batches(options, columns, part)
    sums: list[pyarrow.Table] = []
    for batch in batches:
        sums.append(_sums_of(pyarrow.Table.from_batches([batch]), _OF_ROWS))
        if len(sums) == _SUMS_HELD:  # a store may have very many queues
            sums = [_sums_of(pyarrow.concat_tables(sums), _OF_SUMS)]
    if sums:
        found = _sums_of(pyarrow.concat_tables(sums), _OF_SUMS)
        yield from found.select(_STATS_NAMES).combine_chunks().to_batches()


# result's name, column of the rows, how they are put together, how partial results are
_STATS = (
    ("messages", "size", "count", "sum"),
    ("bodyBytes", "bodySize", "sum", "sum"),
    ("bytes", "size", "sum", "sum"),
    ("firstOffset", "offset", "min", "min"),
    ("lastOffset", "offset", "max", "max"),
    ("firstTimestamp", "timestamp", "min", "min"),
    ("lastTimestamp", "timestamp", "max", "max"),
)
_STATS_KEYS = ("topic", "partition")
_STATS_NAMES = [*_STATS_KEYS, *(name for name, *_ in _STATS)]
_OF_ROWS = tuple((name, column, how) for name, column, how, _ in _STATS)
_OF_SUMS = tuple((name, name, how) for name, _, _, how in _STATS)
_SUMS_HELD = 64


def _sums_of(table: pyarrow.Table, wanted: tuple[tuple[str, str, str], ...]) -> pyarrow.Table:
    """One row for each queue: (result's name, column, how) each."""
    found = table.group_by(list(_STATS_KEYS)).aggregate([(column, how) for _, column, how in wanted])
    names = {f"{column}_{how}": name for name, column, how in wanted}
    return found.rename_columns([names.get(name, name) for name in found.column_names])
