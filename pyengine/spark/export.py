"""Exporting the log as Parquet: the workers write the files, the driver only counts them.

An export is a whole folder, or, `incremental`, a folder that each run takes up to the
log's end. `_pyengine_export.json` in it holds the offset up to which it is exported, and which
rows and columns it has: a run that chose others would leave a hole behind that offset, so it is
refused. Files of a killed run beyond the offset are removed by the next run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
from pyarrow import parquet

from pyengine.errors import UsageError
from pyengine.spark.jobs import Part, batches_of, given_options, run_in_workers, watched
from pyengine.spark.options import ReadOptions, local_path, read_options, scheme_of
from pyengine.spark.partitions import LogRange
from pyengine.spark.plan import plan
from pyengine.spark.schema import Column, chosen_columns, find_column
from pyengine.spark.task_reader import arrow_schema

if TYPE_CHECKING:
    import numpy
    from pyspark.sql import SparkSession

SUCCESS = "_SUCCESS"
STATE = "_pyengine_export.json"
COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "none")
_SUMMARY_SCHEMA = "file STRING, messages BIGINT, bytes BIGINT"
ROW_GROUP_BYTES = 64 << 20
OPEN_FILES_MAX = 128
# Columns whose values repeat; a dictionary of bodies or offsets would only be thrown away.
_DICTIONARY = ["topic", "tags", "bornHost", "storeHost", "partition", "queueId", "flag", "sysFlag", "reconsumeTimes",
               "preparedTransactionOffset", "timestampType"]
# What Spark writes as %XX in the name of a folder key=value; beyond ASCII it escapes nothing.
_ESCAPED = {*map(chr, range(32)), *"\"#%'*/:=?\\{[]^\x7f"}
_PART = re.compile(r"\.?part-(\d+)(-\d+)?\.parquet(\..*)?")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What this run wrote: files in `dest`, messages, and bytes of those files."""

    dest: str
    files: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExportState:
    """An incremental export: what it holds, and up to which physical offset; None before its first run has ended.

    `selection` is what selection_of gives.
    """

    selection: dict[str, str]
    end: int | None = None


def export_parquet(
    spark: SparkSession,
    store: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    topics: Iterable[str] | None = None,
    *,
    compression: str = "snappy",
    overwrite: bool = False,
    partitioned: bool = False,
    incremental: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **options: object,
) -> ExportResult:
    """Write the log, or some topics of it, as Parquet files into the folder `dest`.

    The workers write the files; each appears under its name when it is whole, and
    `_SUCCESS` comes last, so a folder without it is an export that did not finish. A
    task that runs twice writes the same file twice. `dest` must be on a file system
    that all workers share.

    `partitioned` makes folders topic=.../date=YYYY-MM-DD (of the store time, UTC), as
    Spark and others read them: the folder then gives the topic. `incremental` continues
    where the last run into `dest` ended, and begins a new folder; a run that was
    killed is repeated by the next. `progress` is called with (bytes of the log done, all
    of them) now and then. UsageError for a folder that holds something else, unless
    `overwrite`, for a `dest` that is no path, and for an incremental export that chooses other
    rows or columns than before.
    """
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}: choose one of {', '.join(COMPRESSIONS)}")
    given = given_options(store, topics, options)
    target = _folder(os.fspath(dest))
    read = read_options(given)
    columns = chosen_columns(read)
    if partitioned:
        columns = [column for column in columns if column.name.lower() != "topic"]
        if not columns:
            raise UsageError("a partitioned export gives the topic by its folders: name other columns too")
    if incremental:
        state = _continued(target, read, columns, partitioned)
        given["access"] = "scan"  # its state holds an offset of the log
        if state.end is not None:
            given["startingPhysicalOffset"] = str(state.end)
        read = read_options(given)
    parts = plan(read)
    if incremental:
        _go_on(target, state, overwrite)
    else:
        _clear(target, overwrite)
    (target / SUCCESS).unlink(missing_ok=True)
    work = _PartWriter(read, columns, str(target), compression, uuid.uuid4().hex, partitioned, incremental)
    try:
        with watched(spark, sum(part.log_bytes for part in parts), progress):
            written = [(row.file, row.messages, row.bytes) for row in run_in_workers(spark, work, parts, _SUMMARY_SCHEMA).collect()]
    except BaseException:
        for unfinished in target.rglob(".part-*"):
            unfinished.unlink(missing_ok=True)
        raise
    if not written and not partitioned and not any(target.glob("part-*")):
        written = [_empty(columns, target, compression)]
    if incremental:
        ends = [part.stop for part in parts if isinstance(part, LogRange)]
        _write_state(target, replace(state, end=max(ends, default=state.end)))
    (target / SUCCESS).touch()
    return ExportResult(str(target), len(written), sum(messages for _, messages, _ in written), sum(size for *_, size in written))


def _folder(dest: str) -> Path:
    """`dest` as a path. UsageError for a URI: the workers write files."""
    if scheme_of(dest) not in ("", "file"):
        raise UsageError(f"{dest} is no path: an export writes into a folder that all workers see under one path; write it there and "
                         "copy it, or mount the place")
    return Path(local_path(dest))


def _continued(target: Path, read: ReadOptions, columns: list[Column], partitioned: bool) -> ExportState:
    """The state from which an incremental export goes on; nothing is changed. UsageError for another selection than its."""
    bounds = (read.starting_offsets, read.ending_offsets, read.starting_timestamp_ms, read.ending_timestamp_ms,
              read.starting_timestamps, read.ending_timestamps, read.starting_physical_offset, read.ending_physical_offset)
    if any(bound is not None for bound in bounds):
        raise UsageError("an incremental export goes on where the last one ended: give no offsets and times")
    wanted = ExportState(selection_of(read, columns, partitioned))
    state = _read_state(target, wanted) if (target / STATE).exists() else wanted
    if state.end is None:  # none of its files counts
        return wanted
    names = [name for name in (*wanted.selection, *state.selection) if state.selection.get(name, "") != wanted.selection.get(name, "")]
    if names:
        differences = "; ".join(f"{name} was {state.selection.get(name, '')!r}, is {wanted.selection.get(name, '')!r}"
                                for name in dict.fromkeys(names))
        raise UsageError(f"{target} was begun with another selection: {differences}; go on with the same, or give another folder")
    return state


def _go_on(target: Path, state: ExportState, overwrite: bool) -> None:
    """Begin the folder, or clear it of what a killed run left."""
    if not (target / STATE).exists():
        _clear(target, overwrite)
    if state.end is None:
        _write_state(target, state)
    for path in target.rglob("*part-*"):
        found = _PART.fullmatch(path.name)
        if found and (path.name.startswith(".") or state.end is None or int(found[1]) >= state.end):
            path.unlink()


def selection_of(read: ReadOptions, columns: list[Column], partitioned: bool) -> dict[str, str]:
    """What decides which rows and columns an export holds, as text; "" for an option that is not given."""
    return {
        "subscribe": ",".join(sorted(read.subscribe)),
        "subscribePattern": read.subscribe_pattern or "",
        "assign": "" if read.assign is None else json.dumps({topic: list(read.assign[topic]) for topic in sorted(read.assign)}),
        "tags": " || ".join(read.tags),
        "sql": read.sql or "",
        "readLevel": read.read_level.value,
        "onCorrupt": read.on_corrupt,
        "verifyCRC": str(read.verify_crc).lower(),
        "decompress": str(read.decompress).lower(),
        "columns": ",".join(column.name for column in columns),
        "partitioned": str(partitioned).lower(),
    }


def _read_state(target: Path, wanted: ExportState) -> ExportState:
    """The state in the folder. UsageError for one that cannot be understood, or does not tell the whole selection."""
    path = target / STATE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if "selection" not in document and {"columns", "topics", "partitioned"} <= document.keys():  # of version 0.2
            raise UsageError(
                f"{path} is of a version that noted columns and topics only, so it cannot be told whether the export was begun with the "
                f"same selection: give another folder; or, if every run had the options of this one, write into it "
                f"{json.dumps(asdict(replace(wanted, end=document.get('end'))))}")
        state = ExportState(**document)
        if not isinstance(state.selection, dict) or not isinstance(state.end, int | None):
            raise TypeError("it holds other types")
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no state of an export ({error}): give another folder") from None
    return state


def _write_state(target: Path, state: ExportState) -> None:
    unfinished = target / f".{STATE}"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(state)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(target / STATE)


def _clear(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; give a folder for the Parquet files")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UsageError(f"{target} is not empty: give another folder, or allow it to be replaced")
        foreign = [path.relative_to(target) for path in sorted(target.rglob("*")) if not _is_ours(path)]
        if foreign:
            raise UsageError(f"{target} holds {foreign[0]}, which no export wrote: give another folder")
        shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)


def _is_ours(path: Path) -> bool:
    if path.is_dir():
        return path.name.startswith(("topic=", "date="))
    return path.name in (SUCCESS, STATE, f".{STATE}") or _PART.fullmatch(path.name) is not None


@dataclass(frozen=True, slots=True)
class _PartWriter:
    """What each task of an export does; `run` is in the names of its unfinished files."""

    options: ReadOptions
    columns: list[Column]
    target: str
    compression: str
    run: str
    partitioned: bool
    incremental: bool

    def __call__(self, number: int, part: Part) -> Iterator[pyarrow.RecordBatch]:
        """One part into its files; a row for each. No file without rows."""
        scanned = list(self.columns)
        if self.partitioned:
            scanned += [find_column(name) for name in ("topic", "timestamp") if name not in [column.name for column in self.columns]]
        name = f"part-{number:05d}"
        if self.incremental:
            assert isinstance(part, LogRange)
            name = f"part-{part.start:020d}"
        files = PartFiles(self.target, name, arrow_schema(self.columns), self.compression, self.run, partitioned=self.partitioned)
        written = write_groups(files, batches_of(self.options, scanned, part)[1])
        if written:
            paths, messages, sizes = zip(*written)
            yield pyarrow.RecordBatch.from_arrays(
                [pyarrow.array(paths), pyarrow.array(messages, pyarrow.int64()), pyarrow.array(sizes, pyarrow.int64())],
                ["file", "messages", "bytes"])


def _empty(columns: list[Column], target: Path, compression: str) -> tuple[str, int, int]:
    """A file without rows, so that the folder can be read."""
    path = target / "part-00000.parquet"
    parquet.write_table(arrow_schema(columns).empty_table(), path, compression=compression)
    return path.name, 0, path.stat().st_size


# -- the files of one task ---------------------------------------------------------


class PartFiles:
    """The files of one part: `<name>.parquet` in `target`, or in topic=.../date=... of it.

    `schema` is of the columns that the files hold. At most OPEN_FILES_MAX are open, so a
    part with more topics and days leaves several files in a folder.
    """

    def __init__(self, target: str, name: str, schema: pyarrow.Schema, compression: str, run: str, *, partitioned: bool) -> None:
        self._target = Path(target)
        self._name = name
        self._schema = schema
        self._compression = compression
        self._mark = f"{run}.{uuid.uuid4().hex[:8]}"
        self._partitioned = partitioned
        self._open: dict[str, tuple[Path, parquet.ParquetWriter]] = {}
        self._rows: dict[str, int] = {}      # file -> rows, by its path below target
        self._unfinished: dict[str, Path] = {}
        self._opened: dict[str, int] = {}    # folder -> files so far

    def add(self, table: pyarrow.Table) -> None:
        """Rows to write; partitioned, the table has the columns topic and timestamp also where files have not."""
        for folder, rows in self._split(table):
            if rows.num_rows:
                file, writer = self._writer(folder)
                writer.write_table(rows.select(self._schema.names), row_group_size=rows.num_rows)
                self._rows[file] += rows.num_rows

    def finish(self) -> list[tuple[str, int, int]]:
        """Give all files their names: (path below target, rows, bytes) of each."""
        self._close()
        found = []
        for file, unfinished in self._unfinished.items():
            unfinished.rename(self._target / file)
            found.append((file, self._rows[file], (self._target / file).stat().st_size))
        return found

    def abandon(self) -> None:
        """Remove all files that were begun."""
        with contextlib.suppress(Exception):
            self._close()
        for unfinished in self._unfinished.values():
            unfinished.unlink(missing_ok=True)

    def _close(self) -> None:
        while self._open:
            _, (_, writer) = self._open.popitem()
            writer.close()

    def _writer(self, folder: str) -> tuple[str, parquet.ParquetWriter]:
        if folder in self._open:
            path, writer = self._open[folder]
            return str(path), writer
        if len(self._open) == OPEN_FILES_MAX:
            self._close()
        number = self._opened.get(folder, 0)
        self._opened[folder] = number + 1
        name = f"{self._name}{f'-{number}' if number else ''}.parquet"
        place = self._target / folder
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f".{name}.{self._mark}"
        file = str(Path(folder, name))
        writer = parquet.ParquetWriter(unfinished, self._schema, compression=self._compression, use_dictionary=_DICTIONARY)
        self._unfinished[file], self._rows[file], self._open[folder] = unfinished, 0, (Path(file), writer)
        return file, writer

    def _split(self, table: pyarrow.Table) -> Iterator[tuple[str, pyarrow.Table]]:
        """(folder, rows in their order) of a table."""
        if not self._partitioned:
            yield "", table
            return
        topics = table["topic"].combine_chunks().dictionary_encode()
        days = table["timestamp"].combine_chunks().cast(pyarrow.date32())
        day_numbers = days.cast(pyarrow.int32()).to_numpy().astype("int64")
        keys = topics.indices.to_numpy().astype("int64") << 32 | day_numbers & 0xFFFFFFFF
        order = keys.argsort(kind="stable")
        table, keys = table.take(pyarrow.array(order)), keys[order]
        for begin, end in _runs(keys):
            first = int(order[begin])
            folder = f"topic={escaped(topics[first].as_py())}/date={days[first].as_py().isoformat()}"
            yield folder, table.slice(begin, end - begin)


def write_groups(files: PartFiles, batches: Iterator[pyarrow.RecordBatch]) -> list[tuple[str, int, int]]:
    """All batches into the files, in row groups of about ROW_GROUP_BYTES; what `finish` gives. Nothing stays if it fails."""
    try:
        for group in _groups(batches, ROW_GROUP_BYTES):
            files.add(pyarrow.Table.from_batches(group))
        return files.finish()
    except BaseException:
        files.abandon()
        raise


def escaped(value: str) -> str:
    """A value in the name of a folder key=value, as Spark writes and reads it."""
    return "".join(f"%{ord(mark):02X}" if mark in _ESCAPED else mark for mark in value) or "__HIVE_DEFAULT_PARTITION__"


def _runs(keys: numpy.ndarray) -> Iterator[tuple[int, int]]:
    """[begin, end) of equal neighbours."""
    borders = [0, *((keys[1:] != keys[:-1]).nonzero()[0] + 1).tolist(), len(keys)]
    return itertools.pairwise(borders)


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
