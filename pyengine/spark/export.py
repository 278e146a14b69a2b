"""Exports the log as Parquet: the workers write the files, the driver only counts them.

An export is a whole folder, or with `incremental` a folder that each run extends to the log's end; it begins at the offset in
`_pyengine_export.json`, and removes files of a killed run beyond it.

A file is written under a name that readers ignore, then renamed (an object store copies it). The state file is replaced atomically
after all files that it counts; on a local file system these and their folders are synced first. While a run lasts,
`_pyengine_export.run` names it: tasks of a failed or killed run that still live no longer see their name there and remove their files.
A folder of this host is locked for a run; in another one a run ends without a state when it no longer sees its name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, cast

import pyarrow
from pyarrow import parquet

from pyengine.errors import DiskError, EngineError, UsageError, disk_errors
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.spark.file_access import FileMark, FileTree, open_tree, reach_tree
from pyengine.spark.jobs import collect_from_workers, given_options, planned_parts, watched
from pyengine.spark.options import AUTO, ReadOptions, destination, read_options, scheme_of, shown
from pyengine.spark.partitions import LogRange, Part, QueuePart
from pyengine.spark.remote_store import LogSample, log_sample, open_for_reading
from pyengine.spark.schema import Column, chosen_columns, find_column
from pyengine.spark.task_reader import arrow_schema, read_partition
from pyengine.storage.backup_files import LOCK_NAME, locked_folder
from pyengine.storage.durable_writes import DirectFile, make_folders, start_writeback, sync_file, sync_folder
from pyengine.storage.file_system import refuse_inside, refuse_path_of_others

if TYPE_CHECKING:
    import numpy
    from pyarrow import NativeFile
    from pyspark.sql import SparkSession

SUCCESS = "_SUCCESS"
STATE = "_pyengine_export.json"
RUN = "_pyengine_export.run"
COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "none")
ROW_GROUP_BYTES = 24 << 20  # with pages and compression a task needs three times this memory
# Arrow checks after so many rows whether a page is full; with more, pages of large bodies would be far too large.
PAGE_BYTES, WRITE_ROWS_MAX = 1 << 20, 1024
OPEN_FILES_MAX, OPEN_OBJECTS_MAX = 128, 16  # an object's stream holds some 10 MB
_OBJECT_STORES = ("s3", "gcs", "abfs")
# Columns with repeated values; a dictionary of bodies or offsets would be useless.
_DICTIONARY = ["topic", "tags", "bornHost", "storeHost", "partition", "queueId", "flag", "sysFlag", "reconsumeTimes",
               "preparedTransactionOffset", "timestampType"]
_BODIES = ("value", "body")  # without statistics: the writer would keep the smallest and the largest body
# What Spark writes as %XX in the name of a folder key=value; it escapes nothing beyond ASCII.
_ESCAPED = {*map(chr, range(32)), *"\"#%'*/:=?\\{[]^\x7f"}
_PART = re.compile(r"\.?part-(\d+)(-\d+)?\.parquet(\..*)?")


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a run wrote."""

    dest: str
    files: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExportState:
    """The state of an incremental export: its selection and its end in the log (None before its first run has ended).

    `selection` comes from selection_of. `sample` is that of the log up to `end`, in `segment`; "" if an older version wrote the
    state. Newer versions do not use `run`.
    """

    selection: dict[str, str]
    end: int | None = None
    run: str = ""
    segment: int | None = None
    sample: str = ""


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
    dest_file_system: str = AUTO,
    progress: Callable[[int, int], None] | None = None,
    **options: object,
) -> ExportResult:
    """Write the log, or some topics, as Parquet files into `dest`, from the workers.

    Arguments: docs/spark.md. UsageError for a folder with other content unless `overwrite`, or another selection than the last
    incremental run's.
    """
    if compression not in COMPRESSIONS:
        raise UsageError(f"compression {compression!r}: choose one of {', '.join(COMPRESSIONS)}")
    given = given_options(store, topics, options)
    dest = os.fspath(dest) if dest_file_system != AUTO else destination(os.fspath(dest))
    read = read_options(given)
    if not scheme_of(dest) and dest_file_system == AUTO:
        refuse_inside(read.path, dest)
    columns = chosen_columns(read)
    if partitioned:
        columns = [column for column in columns if column.name.lower() != "topic"]
        if not columns:
            raise UsageError("a partitioned export gives the topic by its folders: name other columns too")
    target = Target.reached(dest, dest_file_system)
    if target.is_file():
        raise UsageError(f"{target.where} is a file; give a folder for the Parquet files")
    noted, state, run = target.read(STATE), None, uuid.uuid4().hex
    if incremental:
        state = _continued(target, noted, read, columns, partitioned, overwrite)
        given["access"] = "scan"  # its state holds an offset of the log
        if state.end is not None:
            given["startingPhysicalOffset"] = str(state.end)
        read = read_options(given)
    parts = planned_parts(spark, read, given, 2)
    if incremental and parts and read.ends_between_records:  # where the last run ended, or the log begins
        parts[0] = replace(cast("LogRange", parts[0]), begins_record=True)
    begin = 0 if state is None else state.end or 0
    if state is not None:
        _require_log(target, state, read)
    with target.locked():
        if target.read(STATE) != noted:
            raise EngineError(f"another export has written into {target.where} meanwhile: run this one again")
        if state is None or overwrite or noted is None:
            _clear(target, overwrite)
        if state is not None:
            _write_state(target, state)
        target.write(RUN, run.encode())
        if state is not None:  # of a killed run, whose tasks can see now that another one has begun
            target.remove(name for name, number, _ in target.parts() if number is None or number >= begin)
        target.remove([SUCCESS])
        work = _PartWriter(read, columns, dest, dest_file_system, compression, run, partitioned, incremental)
        try:
            with watched(spark, sum(part.log_bytes for part in parts), progress):
                written = collect_from_workers(spark, work, parts)
        except BaseException:
            with contextlib.suppress(EngineError):
                target.end_run(run)  # first: a task that creates a file now sees it, one that has created a file before is seen
            with contextlib.suppress(DiskError):
                target.remove(name for name, number, _ in target.parts() if number is None and f".{run}." in name)
            raise
        target.require_run(run)
        _settle(target, written, begin)
        if not written and not partitioned and state is None:
            written = [_empty(columns, target, compression, run)]
        target.sync_folders(name for name, *_ in written)
        if state is not None:
            ends = [part.stop for part in parts if isinstance(part, LogRange)]
            state = _with_sample(replace(state, end=max(ends, default=state.end)), read, parts)
        target.require_run(run)  # else another one, elsewhere, has removed these files, which no state may count
        if state is not None:
            _write_state(target, state)
        target.write(SUCCESS, b"")
        target.end_run(run)
    return ExportResult(target.where, len(written), sum(messages for _, messages, _ in written), sum(size for *_, size in written))


def _continued(target: Target, noted: bytes | None, read: ReadOptions, columns: list[Column], partitioned: bool, overwrite: bool
               ) -> ExportState:
    """Return the state from which an incremental export continues, or begins with `overwrite`; UsageError for another selection."""
    bounds = (read.starting_offsets, read.ending_offsets, read.starting_timestamp_ms, read.ending_timestamp_ms,
              read.starting_timestamps, read.ending_timestamps, read.starting_physical_offset, read.ending_physical_offset)
    if any(bound is not None for bound in bounds):
        raise UsageError("an incremental export continues where the last one ended: give no offsets and times")
    wanted = ExportState(selection_of(read, columns, partitioned))
    state = wanted if overwrite else _read_state(target, noted, wanted) or wanted
    if state.end is None:  # none of its files is counted
        return wanted
    names = [name for name in (*wanted.selection, *state.selection) if state.selection.get(name, "") != wanted.selection.get(name, "")]
    if names:
        differences = "; ".join(f"{name} was {state.selection.get(name, '')!r}, is {wanted.selection.get(name, '')!r}"
                                for name in dict.fromkeys(names))
        raise UsageError(f"{target.where} was begun with another selection: {differences}; continue with the same, or give another folder")
    return state


def _require_log(target: Target, state: ExportState, read: ReadOptions) -> None:
    """Raise UsageError if the store has another log than the export, up to the export's end."""
    sample = None if state.segment is None or state.end is None else _sample(read, state.end)
    if sample is not None and not sample.is_of(state.sample):  # None: it is deleted by now
        raise UsageError(f"{target.where} was begun with another log: in {read.where} the segment at {state.segment} has other messages "
                         f"up to {state.end}; export this store into another folder")


def _with_sample(state: ExportState, read: ReadOptions, parts: Sequence[LogRange | QueuePart]) -> ExportState:
    sample = _sample(read, state.end) if parts and state.end else None
    if sample is None or not state.end:
        return state
    return replace(state, segment=(state.end - 1) // parts[0].segment_bytes * parts[0].segment_bytes, sample=sample.text)


def _sample(read: ReadOptions, end: int) -> LogSample | None:
    with open_for_reading(read) as store:
        return log_sample(store, end)


def _settle(target: Target, written: list[tuple[str, int, int]], begin: int) -> None:
    """Check that the files of the folder from the number `begin` on are those of this run; remove others, which a task of a killed run
    may have finished meanwhile."""
    found = {name: mark.size for name, number, mark in target.parts() if number is None or number >= begin}
    for name, _, size in written:
        if found.pop(name, None) != size:
            raise EngineError(f"{target.where}/{name} is not what this run wrote: another run has written into the folder; run it again")
    target.remove(found)


def selection_of(read: ReadOptions, columns: list[Column], partitioned: bool) -> dict[str, str]:
    """Return as text the options that determine rows and columns of an export; "" for one that is not given."""
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


def _read_state(target: Target, content: bytes | None, wanted: ExportState) -> ExportState | None:
    """Return the state with this content, None without one; UsageError if it is wrong, or does not have the whole selection."""
    path = f"{target.where}/{STATE}"
    if content is None:
        return None
    try:
        document = json.loads(content.decode())
        if "selection" not in document and {"columns", "topics", "partitioned"} <= document.keys():  # of version 0.2
            raise UsageError(
                f"{path} is of a version that stored columns and topics only, so it is unknown whether the export was begun with the "
                f"same selection: give another folder; or, if every run had the options of this one, write into it "
                f"{json.dumps(asdict(replace(wanted, end=document.get('end'))))}")
        state = ExportState(**document)
        if not isinstance(state.selection, dict) or not all(isinstance(one, int | None) for one in (state.end, state.segment)):
            raise TypeError("it holds other types")
    except PARSE_ERRORS as error:
        raise UsageError(f"{path} is no state of an export ({error}): give another folder") from None
    return state


def _write_state(target: Target, state: ExportState) -> None:
    target.write(STATE, json.dumps(asdict(state)).encode())


def _clear(target: Target, overwrite: bool) -> None:
    names = target.entries()
    if names:
        if not overwrite:
            raise UsageError(f"{target.where} is not empty: give another folder, or overwrite it (--overwrite, overwrite=True)")
        foreign = [name for name in sorted(names) if not _is_ours(posixpath.basename(name), names[name] is None)]
        if foreign:
            raise UsageError(f"{target.where} holds {foreign[0]}, which no export wrote: give another folder")
        target.remove([RUN, STATE])  # first: a killed run's task that creates a file later sees that it is over, and no run goes on
        target.empty()


def _is_ours(name: str, is_folder: bool) -> bool:
    if is_folder:
        return name.startswith(("topic=", "date="))
    return name.removeprefix(".") in (SUCCESS, STATE, RUN) or _PART.fullmatch(name) is not None


# -- the folder --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """The folder of an export; names are relative to it, with slashes. It raises DiskError."""

    tree: FileTree
    where: str

    @classmethod
    def opened(cls, path: str, file_system: str) -> Target:
        """Open the folder in a task."""
        return cls(open_tree(path, file_system), shown(path))

    @classmethod
    def reached(cls, path: str, file_system: str) -> Target:
        """Open the folder in the driver; UsageError if its file system does not answer, DiskError if root must not write there."""
        target = cls(reach_tree(path, file_system), shown(path))
        if target.is_local:
            refuse_path_of_others(target.tree.root)
        return target

    @property
    def is_object_store(self) -> bool:
        """Whether it is an object store, without folders and with atomic replacement of objects."""
        return self.tree.system.type_name in _OBJECT_STORES

    @property
    def is_local(self) -> bool:
        """Whether it is on this host, so that it can be synced."""
        return bool(self.tree.system.type_name == "local")

    def is_file(self) -> bool:
        from pyarrow.fs import FileType

        with disk_errors("look at", self.where):
            return bool(self.tree.system.get_file_info(self.tree.root).type == FileType.File)

    def entries(self) -> dict[str, FileMark | None]:
        """Return all names below it but the lock's, with None for folders."""
        with disk_errors("list", self.where):
            found = self.tree.entries("", recursive=True)
        found.pop(LOCK_NAME, None)
        return found

    def parts(self) -> Iterator[tuple[str, int | None, FileMark]]:
        """Yield (name, number, mark) of the files of exports; the number is None for an unfinished file."""
        for name, mark in self.entries().items():
            found = _PART.fullmatch(posixpath.basename(name))
            if found and mark is not None:
                yield name, None if found[0].startswith(".") else int(found[1]), mark

    def read(self, name: str) -> bytes | None:
        """Return a small file's bytes, None if it does not exist."""
        with disk_errors("read", f"{self.where}/{name}"):
            return self.tree.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a file directly in the folder, atomically, and durably on this host."""
        unfinished = name if self.is_object_store else f".{name}"
        with disk_errors("write", f"{self.where}/{name}"):
            with self.tree.system.open_output_stream(self._at(unfinished)) as stream:
                stream.write(content)
            if self.is_local:
                sync_file(Path(self._at(unfinished)))
            if unfinished != name:
                self.tree.system.move(self._at(unfinished), self._at(name))
        self.sync_folders([name])

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Make the folder, and inside the block have it locked on this host; StoreBusyError if another export has."""
        self.make("")
        return locked_folder(Path(self.tree.root)) if self.is_local else contextlib.nullcontext()

    def require_run(self, run: str) -> None:
        """Raise EngineError unless RUN names this run."""
        if self.read(RUN) != run.encode():
            raise EngineError(f"this export into {self.where} has failed or another has begun: its files are removed")

    def end_run(self, run: str) -> None:
        """Remove RUN; EngineError if it does not name this run."""
        self.require_run(run)
        self.remove([RUN])

    def make(self, folder: str) -> None:
        """Create the folder with its parents; in an object store, which has none, only test that it can be written to."""
        if self.is_local and not folder:
            make_folders(Path(self._at("")), is_given=False)
        elif not self.is_object_store:
            with disk_errors("make", f"{self.where}/{folder}"):
                self.tree.system.create_dir(self._at(folder), recursive=True)
        elif not folder:
            self.write(f".{SUCCESS}", b"")
            self.remove([f".{SUCCESS}"])

    def open(self, name: str, *, is_direct: bool = False) -> NativeFile | DirectFile:
        """Create a file to write to; with `is_direct` bypass the page cache where the file system and the process can."""
        if is_direct and self.is_local:
            with contextlib.suppress(DiskError):  # if no file can be created at all, the next line raises
                return DirectFile(Path(self._at(name)))
        return self.tree.system.open_output_stream(self._at(name))

    def move(self, name: str, to: str) -> int:
        """Rename a file, replacing an existing one; return its length. On this host its bytes are durable before; see sync_folders."""
        with disk_errors("write", f"{self.where}/{to}"):
            if self.is_local:
                sync_file(Path(self._at(name)))
            self.tree.system.move(self._at(name), self._at(to))
            size: int = self.tree.system.get_file_info(self._at(to)).size
        return size

    def start_writeback(self, names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Start writeback of these files on this host inside the block, so that `move` waits less."""
        return start_writeback([Path(self._at(name)) for name in names]) if self.is_local else contextlib.nullcontext()

    def remove(self, names: Iterable[str]) -> None:
        """Delete files; ignore those that do not exist."""
        removed = []
        for name in names:
            with disk_errors("delete", f"{self.where}/{name}"), contextlib.suppress(FileNotFoundError):
                self.tree.system.delete_file(self._at(name))
                removed.append(name)
        self.sync_folders(removed)

    def sync_folders(self, names: Iterable[str]) -> None:
        """Make the names of these files durable on this host: sync the folders above them."""
        if self.is_local:
            for folder in sorted({str(folder) for name in names for folder in PurePosixPath(name).parents}):
                sync_folder(Path(self._at(folder)))

    def empty(self) -> None:
        """Delete the content of the folder but the lock."""
        with disk_errors("delete", self.where):
            if not self.is_local:
                self.tree.system.delete_dir_contents(self.tree.root, missing_dir_ok=True)
                return
            for path in Path(self.tree.root).iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK_NAME:
                    path.unlink()

    def _at(self, name: str) -> str:
        return f"{self.tree.root}/{name}" if name else self.tree.root


@dataclass(frozen=True, slots=True)
class _PartWriter:
    """Writes the files of a task; `run` is part of the names of unfinished files."""

    options: ReadOptions
    columns: list[Column]
    dest: str
    file_system: str
    compression: str
    run: str
    partitioned: bool
    incremental: bool

    def __call__(self, number: int, part: Part) -> Iterator[tuple[str, int, int]]:
        """Write one part; yield (name, messages, bytes) of each file. A part without rows has no file."""
        scanned = list(self.columns)
        if self.partitioned:
            scanned += [find_column(name) for name in ("topic", "timestamp") if name not in [column.name for column in self.columns]]
        name = f"part-{number:05d}"
        if self.incremental:
            assert isinstance(part, LogRange)
            name = f"part-{part.start:020d}"
        target = Target.opened(self.dest, self.file_system)
        files = PartFiles(target, name, arrow_schema(self.columns), self.compression, self.run, partitioned=self.partitioned)
        yield from write_groups(files, read_partition(self.options, scanned, part, arrow_schema(scanned)))


def _empty(columns: list[Column], target: Target, compression: str, run: str) -> tuple[str, int, int]:
    """Write a file without rows, so that the folder can be read."""
    files = PartFiles(target, "part-00000", arrow_schema(columns), compression, run, partitioned=False)
    files.begin("")
    return files.finish()[0]


# -- the files of one task ---------------------------------------------------------


class _OpenFile(NamedTuple):
    """An open file: its path below the target, and its writer and stream."""

    name: str
    sink: NativeFile | DirectFile
    writer: parquet.ParquetWriter


class PartFiles:
    """Writes the files of one part: `<name>.parquet` in `target`, or in its folders topic=.../date=...

    `schema` has the columns of the files. At most OPEN_FILES_MAX are open, so a part with more topics and days has several files
    in a folder. The files are those of the run `run`: EngineError once `RUN` names another or none, since nobody would remove them.
    """

    def __init__(self, target: Target, name: str, schema: pyarrow.Schema, compression: str, run: str, *, partitioned: bool) -> None:
        self._target = target
        self._name = name
        self._schema = schema
        self._compression = compression
        self._run = run
        self._mark = f"{run}.{uuid.uuid4().hex[:8]}"
        self._partitioned = partitioned
        self._open_max = OPEN_OBJECTS_MAX if target.is_object_store else OPEN_FILES_MAX
        self._open: dict[str, _OpenFile] = {}  # folder -> its file
        self._rows: dict[str, int] = {}        # file -> rows, by its path below target
        self._unfinished: dict[str, str] = {}
        self._opened: dict[str, int] = {}      # folder -> files so far
        self._held: dict[str, list[pyarrow.RecordBatch]] = {}  # folder -> rows of its next row group
        self._held_bytes = 0
        self._writeback = contextlib.ExitStack()

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Add rows. A row group has at most ROW_GROUP_BYTES of all folders together, or one batch. If partitioned, the batch has the
        columns topic and timestamp even if the files have not."""
        if self._held_bytes + batch.nbytes > ROW_GROUP_BYTES:
            self._write()
        self._held_bytes += batch.nbytes
        for folder, rows in self._split(batch):
            self._held.setdefault(folder, []).append(rows)

    def finish(self) -> list[tuple[str, int, int]]:
        """Complete and rename all files; return (path below target, rows, bytes) of each."""
        self._write()
        self._writeback.close()
        self._close()
        self._target.require_run(self._run)
        return [(file, self._rows[file], self._target.move(unfinished, file)) for file, unfinished in self._unfinished.items()]

    def abandon(self) -> None:
        """Remove all unfinished files."""
        self._writeback.close()
        with contextlib.suppress(Exception):
            self._close()
        with contextlib.suppress(DiskError):
            self._target.remove(self._unfinished.values())

    def begin(self, folder: str, row_bytes: int = 1) -> _OpenFile:
        """Return the open file of a folder; without one, open a new file for rows of about `row_bytes`."""
        if folder in self._open:
            return self._open[folder]
        if len(self._open) == self._open_max:
            self._close()
        number = self._opened.get(folder, 0)
        self._opened[folder] = number + 1
        name = f"{self._name}{f'-{number}' if number else ''}.parquet"
        file, unfinished = posixpath.join(folder, name), posixpath.join(folder, f".{name}.{self._mark}")
        self._target.make(folder)
        self._unfinished[file], self._rows[file] = unfinished, 0
        with disk_errors("write", f"{self._target.where}/{unfinished}"):
            sink = self._target.open(unfinished, is_direct=not self._partitioned)
        writer = parquet.ParquetWriter(sink, self._schema, compression=self._compression, use_dictionary=_DICTIONARY,
                                       write_batch_size=max(1, min(WRITE_ROWS_MAX, PAGE_BYTES // row_bytes)),
                                       write_statistics=[name for name in self._schema.names if name not in _BODIES])
        self._open[folder] = _OpenFile(file, sink, writer)
        self._target.require_run(self._run)  # now that the file exists: see export_parquet
        return self._open[folder]

    def _write(self) -> None:
        """Write the held rows as row groups, and start their writeback."""
        self._writeback.close()
        written = []
        for folder in sorted(self._held):
            rows = pyarrow.Table.from_batches(self._held.pop(folder)).select(self._schema.names)
            opened = self.begin(folder, max(1, rows.nbytes // rows.num_rows))
            opened.writer.write_table(rows, row_group_size=rows.num_rows)
            self._rows[opened.name] += rows.num_rows
            if not isinstance(opened.sink, DirectFile):
                written.append(self._unfinished[opened.name])
        self._held_bytes = 0
        if written:
            self._writeback.enter_context(self._target.start_writeback(written))

    def _close(self) -> None:
        while self._open:
            _, opened = self._open.popitem()
            try:
                opened.writer.close()
            finally:
                opened.sink.close()

    def _split(self, batch: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
        """Yield (folder, its rows in order) of a batch; a batch for one folder is not copied."""
        if batch.num_rows == 0:
            return
        if not self._partitioned:
            yield "", batch
            return
        topics = batch.column("topic").dictionary_encode()
        days = batch.column("timestamp").cast(pyarrow.date32())
        day_numbers = days.cast(pyarrow.int32()).to_numpy().astype("int64")
        keys = topics.indices.to_numpy().astype("int64") << 32 | day_numbers & 0xFFFFFFFF
        order = keys.argsort(kind="stable")
        for begin, end in _runs(keys[order]):
            first = int(order[begin])
            folder = f"topic={escaped(topics[first].as_py())}/date={days[first].as_py().isoformat()}"
            yield folder, batch if end - begin == len(order) else batch.take(pyarrow.array(order[begin:end]))


def write_groups(files: PartFiles, batches: Iterator[pyarrow.RecordBatch]) -> list[tuple[str, int, int]]:
    """Write all batches; return finish(). If that fails, no file remains."""
    try:
        for batch in batches:
            files.add(batch)
        return files.finish()
    except BaseException:
        files.abandon()
        raise


def escaped(value: str) -> str:
    """Escape a value for the name of a folder key=value, as Spark does."""
    return "".join(f"%{ord(mark):02X}" if mark in _ESCAPED else mark for mark in value) or "__HIVE_DEFAULT_PARTITION__"


def _runs(keys: numpy.ndarray) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of runs of equal keys."""
    boundaries = [0, *((keys[1:] != keys[:-1]).nonzero()[0] + 1).tolist(), len(keys)]
    return itertools.pairwise(boundaries)
