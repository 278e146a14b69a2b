"""The tables of Delta Lake and of Iceberg that pyengine.client.tables fills: rows, names, and durable commits.

Delta Lake is written by delta-rs, Apache Iceberg by pyiceberg. One commit of a table has both the rows and the new
offset, so that a kill at any moment leaves both or neither. The files that a commit refers to are durable before it:
delta-rs and pyiceberg do not sync what they write, so this module writes data files, and the files of Iceberg's
metadata, itself. The commit is a row of SQLite (Iceberg), which syncs it, or a file (Delta). Such a file, and a
checkpoint too, is synced before another file relies on it; one that a power cut tore is removed.

    Delta     the transaction (txn) of the application `pyengine:STORE` has the offset as its version
    Iceberg   the table's property pyengine.offset; the snapshot's summary has it too

A commit costs about the same however many came before it: Delta has a checkpoint each so many commits, Iceberg merges its
manifests and forgets old snapshots.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction
from pyarrow import parquet
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties
from pyiceberg.table import Transaction as IcebergTransaction
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestamptzType,
)

from pyengine.errors import FormatError, UsageError
from pyengine.native.failpoints import failpoint
from pyengine.native.scan import RowFilter
from pyengine.storage.arrow import LogScanner, content_of
from pyengine.storage.arrow import schema as scan_schema
from pyengine.storage.durable_writes import make_folders, sync_file, sync_folder

COLUMNS = (
    "queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bornTimestamp", "tags", "keys", "uniqKey", "properties", "body",
    "flag", "sysFlag", "reconsumeTimes", "preparedTransactionOffset", "bornHost", "storeHost", "msgId",
)
DATE = "date"  # the date of storeTimestamp, UTC, by which the tables are partitioned
SCHEMA = pa.schema([*scan_schema(COLUMNS), pa.field(DATE, pa.date32())])
NAMESPACE = "topics"
CATALOG = "catalog.db"
STORE, TOPIC, OFFSET = "pyengine.store", "pyengine.topic", "pyengine.offset"
CHECKPOINT_EACH = 100  # number of commits of a Delta table, as in delta-rs
# A commit lists the log's files several times: with those of a day, one each ten seconds, it would take half a second.
DELTA_SETTINGS = {"delta.logRetentionDuration": "interval 1 hours"}
NAME_LENGTH_MAX = 255  # of a folder, and of a table in the catalog
_ONLY_COMMIT = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)  # delta-rs would do both before our sync
_DATA_FILE = re.compile(r"part-(\d{20})-\d{20}\.parquet")
_ICEBERG_TYPES = {"int32": IntegerType(), "int64": LongType(), "timestamp[us, tz=UTC]": TimestamptzType(), "string": StringType(),
                  "binary": BinaryType(), "date32[day]": DateType(), "double": DoubleType(), "bool": BooleanType()}
# Iceberg's own settings, which bound what a commit reads and writes; a table that has one of them keeps it.
ICEBERG_SETTINGS = {
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true", TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "20",
    TableProperties.MANIFEST_MERGE_ENABLED: "true", TableProperties.MANIFEST_MIN_MERGE_COUNT: "50",
    TableProperties.MANIFEST_TARGET_SIZE_BYTES: str(1 << 20),
    TableProperties.MIN_SNAPSHOTS_TO_KEEP: "50", TableProperties.MAX_SNAPSHOT_AGE_MS: "0"}
_OpenTable = TypeVar("_OpenTable")


class TopicRows:
    """Reads ranges of segments into the rows of each topic, as its consumers see them."""

    def __init__(self) -> None:
        self._scanner = LogScanner(("topic", *COLUMNS), row_filter=RowFilter(queued_only=True))

    def read(self, view: Any, base_offset: int, start: int, end: int, limit: int) -> list[tuple[str, pa.Table]]:
        """Return (topic, its rows in the order of the log, with the columns of the tables) of the records that begin in [start, end)."""
        return list(_by_topic(list(self._scanner.scan(view, base_offset, start, end, limit))))


def _by_topic(batches: list[pa.RecordBatch]) -> Iterator[tuple[str, pa.Table]]:
    if not batches:
        return
    table = pa.Table.from_batches(batches)
    table = table.take(pc.sort_indices(table, sort_keys=[("topic", "ascending"), ("physicalOffset", "ascending")]))
    table = table.append_column(DATE, pc.cast(table["storeTimestamp"], pa.date32()))
    at = 0
    for one in pc.value_counts(table["topic"]).to_pylist():
        yield one["values"], table.slice(at, one["counts"]).select(SCHEMA.names)
        at += one["counts"]


JSON_TYPES = {"string": pa.string(), "int": pa.int32(), "long": pa.int64(), "double": pa.float64(), "boolean": pa.bool_(),
              "timestamp": pa.timestamp("us", tz="UTC"), "date": pa.date32(), "json": pa.string()}
EXTRA, REASON = "_extra", "reason"
CONTENT_BYTES_MAX = 80 << 20  # of the decompressed bodies of a piece, unless it is one record
BAD = "/bad"  # after a topic, which has no `/`: the table of its bad rows


class JsonColumns:
    """Columns from bodies that are JSON objects: of `types`, by name, each one of JSON_TYPES; the rest of an object is in `_extra`.

    A row whose body is no such object, or has a value of another type, is a bad row. Its table has the body, and the reason.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        own = [field for field in SCHEMA if field.name not in ("body", DATE)]
        self._schema = pa.schema([*own, *(pa.field(name, JSON_TYPES[kind]) for name, kind in types.items()), pa.field(EXTRA, pa.string()),
                                  SCHEMA.field(DATE)])
        stored = [field for field in SCHEMA if field.name != DATE]
        self._bad_schema = pa.schema([*stored, pa.field(REASON, pa.string()), SCHEMA.field(DATE)])

    def divided(self, rows_of_topics: Iterable[tuple[str, pa.Table]]) -> list[tuple[str, pa.Table]]:
        """Return (topic, its good rows), then (the topic with BAD, its bad rows), unless there are none, of each topic of a piece."""
        return [divided for topic, rows in rows_of_topics for divided in self._divided(topic, rows)]

    def _divided(self, topic: str, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        values: dict[str, list[Any]] = {name: [] for name in (*self._types, EXTRA)}
        reasons: list[str | None] = []
        for body, flag in zip(rows["body"].to_pylist(), rows["sysFlag"].to_pylist()):
            try:
                found = self._values(content_of(body, flag))
            except (ValueError, RecursionError, FormatError) as error:
                reasons.append(str(error))
                continue
            reasons.append(None)
            for name, value in found.items():
                values[name].append(value)
        why = pa.array(reasons, pa.string())
        good, bad = rows.filter(why.is_null()), rows.filter(why.is_valid())
        if good.num_rows:
            made = {name: pa.chunked_array([pa.array(column, self._schema.field(name).type)]) for name, column in values.items()}
            yield topic, pa.table([made.get(name) or good[name] for name in self._schema.names], schema=self._schema)
        if bad.num_rows:
            yield topic + BAD, pa.table([why.drop_null() if name == REASON else bad[name] for name in self._bad_schema.names],
                                        schema=self._bad_schema)

    def _values(self, text: bytes) -> dict[str, Any]:
        """Return the values of the columns; ValueError or RecursionError for a bad row."""
        try:
            found = json.loads(text, parse_constant=_no_constant)
        except UnicodeDecodeError:
            raise ValueError("the body is no text in UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("the body is JSON, but no object")
        values = {name: _json_value(name, kind, found.pop(name, None)) for name, kind in self._types.items()}
        return {**values, EXTRA: _json_text(found) if found else None}


def _no_constant(name: str) -> None:
    raise ValueError(f"the body is no JSON: it has {name}")


def _json_text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)  # a number as 1e999 is read as infinity, which JSON has no name for
    return text if text.isprintable() else json.dumps(value)  # half of a surrogate pair is no text in UTF-8


def _json_value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a column of this type; ValueError for another one."""
    if value is None:
        return None
    if kind == "json":
        return _json_text(value)
    try:
        if kind == "string" and isinstance(value, str):
            return value.encode().decode()
        if kind == "boolean" and isinstance(value, bool):
            return value
        if kind in ("int", "long") and type(value) is int and -1 << (bits := 31 if kind == "int" else 63) <= value < 1 << bits:
            return value
        if kind == "double" and type(value) in (int, float) and math.isfinite(float(value)):
            return float(value)
        if kind == "date" and isinstance(value, str):
            return date.fromisoformat(value)
        if kind == "timestamp" and isinstance(value, str) and (time_of := datetime.fromisoformat(value)).tzinfo is not None:
            return time_of.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is {json.dumps(value)[:100]}, not a {kind}" + (" with a time zone" if kind == "timestamp" else ""))


def content_end(rows_of_topics: Iterable[tuple[str, pa.Table]], end: int) -> int:
    """Return where a piece up to `end` has to end so that its bodies, decompressed, have CONTENT_BYTES_MAX at most, or are one."""
    content_bytes = 0
    bodies = (zip(*(rows[name].to_pylist() for name in ("physicalOffset", "body", "sysFlag"))) for _, rows in rows_of_topics)
    for offset, body, flag in heapq.merge(*bodies):
        with suppress(FormatError):  # a bad row
            content_bytes += (size := len(content_of(body, flag)))
            if content_bytes > max(size, CONTENT_BYTES_MAX):
                return int(offset)
    return end


def rows_between(rows: pa.Table, start: int, end: int) -> pa.Table:
    """Return the rows that begin in [start, end) of the log."""
    offsets = rows["physicalOffset"]
    return rows.filter(pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end)))


def table_name(topic: str) -> str:
    """Return the table's name and folder: the topic, with `_xx` for each byte that is not a letter, digit, `_` or `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), topic)


def distinct_name(topic: str) -> str:
    """Return the name of a topic whose table_name is too long, or is that of another topic's table: its beginning, and a hash."""
    return f"{table_name(topic)[:200]}_{hashlib.sha256(topic.encode()).hexdigest()[:12]}"


class TopicTables(ABC, Generic[_OpenTable]):
    """The tables in the folder `dest`, one for each topic of `store`."""

    def __init__(self, dest: Path, store: str) -> None:
        self._dest = dest
        self._store = store
        self._open: dict[str, tuple[str, _OpenTable | None]] = {}  # topic -> name of its table, and the table if it exists

    @abstractmethod
    def offset(self, topic: str) -> int:
        """Return the offset below which the topic's table is complete; 0 without a table. UsageError for another program's table."""

    @abstractmethod
    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        """Make one commit: rows of the log's bytes [start, end), and `end` as the table's offset. It adds columns that the table lacks."""

    def forget(self, topic: str) -> None:
        """Read the topic's table again at its next use, because a commit has failed."""
        self._open.pop(topic, None)

    @abstractmethod
    def _load(self, name: str) -> _OpenTable | None:
        """Return the table of this name, None if there is none."""

    @abstractmethod
    def _properties(self, table: _OpenTable) -> Mapping[str, Any]:
        """Return what the table was created with, STORE and TOPIC among it."""

    def _table(self, topic: str) -> tuple[str, _OpenTable | None]:
        """Return the name of the topic's table, and the table if it exists; UsageError for one that another program made."""
        if topic not in self._open:
            self._open[topic] = self._find(topic)
        return self._open[topic]

    def _find(self, topic: str) -> tuple[str, _OpenTable | None]:
        plain, distinct = table_name(topic.removesuffix(BAD)) + ("_bad" if topic.endswith(BAD) else ""), distinct_name(topic)
        for name in (distinct, plain):
            table = self._load(name) if len(name) <= NAME_LENGTH_MAX else None
            if table is None:
                continue
            properties = self._properties(table)
            theirs = properties.get(STORE), properties.get(TOPIC)
            if theirs == (self._store, topic):
                return name, table
            if name == plain and theirs[0] == self._store:  # of another topic
                return distinct, None
            whose = "was not made by `pyengine tables`" if None in theirs else f"is filled from topic {theirs[1]} of store {theirs[0]}"
            raise UsageError(f"table {name} in {self._dest} {whose}: nothing is added to it; give another folder")
        return plain if len(plain) <= NAME_LENGTH_MAX else distinct, None


class DeltaTables(TopicTables[deltalake.DeltaTable]):
    """Delta tables DEST/NAME."""

    def __init__(self, dest: Path, store: str) -> None:
        super().__init__(dest, store)
        self._application = f"pyengine:{store}"

    def offset(self, topic: str) -> int:
        _, table = self._table(topic)
        return 0 if table is None else table.transaction_version(self._application) or 0

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        name, table = self._table(topic)
        folder = self._dest / name
        if table is None:
            table = deltalake.DeltaTable.create(
                folder, rows.schema, partition_by=[DATE], configuration={STORE: self._store, TOPIC: topic, **DELTA_SETTINGS},
                raise_if_key_not_exists=False, post_commithook_properties=_ONLY_COMMIT)
            _sync_commits(table, folder, -1)
            self._open[topic] = name, table
        names = {field.name for field in table.schema().fields}
        if lacking := [field for field in rows.schema if field.name not in names]:
            before = table.version()
            table.alter.add_columns(list(deltalake.Schema.from_arrow(pa.schema(lacking)).fields), post_commithook_properties=_ONLY_COMMIT)
            _sync_commits(table, folder, before)
        actions: list[AddAction | RemoveAction] = [
            self._write(folder, rows, day, start, end) for day in pc.unique(rows[DATE]).to_pylist()]
        failpoint("table_data_durable")
        before = table.version()
        table.create_write_transaction(
            actions, "append", table.schema(), [DATE],
            commit_properties=CommitProperties(app_transactions=[Transaction(self._application, end)], custom_metadata={OFFSET: str(end)}),
            post_commithook_properties=_ONLY_COMMIT)
        _sync_commits(table, folder, before)
        failpoint("table_committed")
        if table.version() // CHECKPOINT_EACH > before // CHECKPOINT_EACH:
            _checkpoint(table, folder / "_delta_log")
            self._open[topic] = name, deltalake.DeltaTable(folder)  # an open table becomes slower with each commit since the checkpoint

    def _load(self, name: str) -> deltalake.DeltaTable | None:
        folder = self._dest / name
        _remove_torn(folder / "_delta_log")
        if not deltalake.DeltaTable.is_deltatable(str(folder)):
            return None
        table = deltalake.DeltaTable(folder)
        configuration = self._properties(table)
        if configuration.get(STORE) == self._store:
            self._remove_uncommitted(folder, table.transaction_version(self._application) or 0)
            before, lacking = table.version(), {key: value for key, value in DELTA_SETTINGS.items() if key not in configuration}
            if lacking:
                table.alter.set_table_properties(lacking, raise_if_not_exists=False, post_commithook_properties=_ONLY_COMMIT)
                _sync_commits(table, folder, before)
        return table

    def _properties(self, table: deltalake.DeltaTable) -> Mapping[str, Any]:
        return table.metadata().configuration

    def _write(self, folder: Path, rows: pa.Table, day: Any, start: int, end: int) -> AddAction:
        """Write a data file, durably. Its name has the range of the log that it comes from."""
        part = rows.filter(pc.equal(rows[DATE], day)).drop_columns([DATE])
        name = f"{DATE}={day.isoformat()}/part-{start:020d}-{end:020d}.parquet"
        path = folder / name
        make_folders(path.parent)
        parquet.write_table(part, path, compression="snappy")
        sync_file(path)
        sync_folder(path.parent)
        found = path.stat()
        stats = {"numRecords": part.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
        for column in ("queueOffset", "physicalOffset"):
            bounds = pc.min_max(part[column]).as_py()
            stats["minValues"][column], stats["maxValues"][column], stats["nullCount"][column] = bounds["min"], bounds["max"], 0
        return AddAction(name, found.st_size, {DATE: day.isoformat()}, found.st_mtime_ns // 1_000_000, True, json.dumps(stats))

    @staticmethod
    def _remove_uncommitted(folder: Path, offset: int) -> None:
        """Remove the files of a run that was killed before its commit."""
        for path in folder.glob(f"{DATE}=*/part-*.parquet"):
            found = _DATA_FILE.fullmatch(path.name)
            if found and int(found[1]) >= offset:
                path.unlink()


def _sync_commits(table: deltalake.DeltaTable, folder: Path, before: int) -> None:
    """Make the commits after that version durable, with their names."""
    log = folder / "_delta_log"
    table.update_incremental()
    for version in range(before + 1, table.version() + 1):
        sync_file(log / f"{version:020d}.json")
    for path in (log, folder, folder.parent):
        sync_folder(path)


def _checkpoint(table: deltalake.DeltaTable, log: Path) -> None:
    """Write a checkpoint, which replaces the commits before it; then delete commits and checkpoints that readers do not need."""
    table.create_checkpoint()
    for path in (max(log.glob("*.checkpoint*.parquet")), log / "_last_checkpoint"):
        sync_file(path)
    sync_folder(log)
    table.cleanup_metadata()


def _remove_torn(log: Path) -> None:
    """Remove a commit or a checkpoint that a power cut tore. It was not synced, so no other file relies on it.

    The commits that a checkpoint replaces are deleted only after it is durable.
    """
    torn = []
    if commits := list(log.glob("[0-9]" * 20 + ".json")):
        try:
            for line in max(commits).read_text().splitlines() or [""]:
                json.loads(line)
        except (ValueError, RecursionError):
            torn.append(max(commits))
    if checkpoints := list(log.glob("*.checkpoint*.parquet")):
        try:
            parquet.read_table(max(checkpoints))
        except (pa.ArrowException, OSError):
            torn += [max(checkpoints), log / "_last_checkpoint"]
    try:
        json.loads((log / "_last_checkpoint").read_text())
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError):
        torn.append(log / "_last_checkpoint")
    for path in torn:
        path.unlink(missing_ok=True)
    if torn:
        sync_folder(log)


class IcebergTables(TopicTables[Table]):
    """Iceberg tables in the catalog DEST/catalog.db (SQLite), namespace `topics`."""

    def __init__(self, dest: Path, store: str) -> None:
        super().__init__(dest, store)
        self._catalog = SqlCatalog("pyengine", uri=f"sqlite:///{dest / CATALOG}", warehouse=f"file://{dest}",
                                   **{"py-io-impl": f"{__name__}.{DurableFiles.__name__}"})
        self._catalog.create_namespace_if_not_exists(NAMESPACE)

    def offset(self, topic: str) -> int:
        _, table = self._table(topic)
        return 0 if table is None else int(table.properties.get(OFFSET, 0))

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        name, found = self._table(topic)
        table = found or self._create(topic, name, rows.schema)
        lacking_fields = [field for field in rows.schema if field.name not in table.schema().column_names]
        if lacking_fields:
            with table.update_schema() as update:
                for field in lacking_fields:
                    update.add_column(field.name, _ICEBERG_TYPES[str(field.type)])
        with table.transaction() as commit:
            commit.append(rows, snapshot_properties={OFFSET: str(end)})
            lacking = {name: value for name, value in ICEBERG_SETTINGS.items() if name not in table.properties}
            commit.set_properties({**lacking, OFFSET: str(end)})
            _expire_snapshots(commit)
            failpoint("table_metadata_due")
        failpoint("table_catalog_committed")
        self._open[topic] = name, table

    def _load(self, name: str) -> Table | None:
        try:
            return self._catalog.load_table((NAMESPACE, name))
        except NoSuchTableError:
            return None

    def _properties(self, table: Table) -> Mapping[str, Any]:
        return table.properties

    def _create(self, topic: str, name: str, columns: pa.Schema) -> Table:
        fields = [NestedField(number, field.name, _ICEBERG_TYPES[str(field.type)], required=False)
                  for number, field in enumerate(columns, 1)]
        spec = PartitionSpec(PartitionField(source_id=len(fields), field_id=1000, transform=IdentityTransform(), name=DATE))
        return self._catalog.create_table((NAMESPACE, name), Schema(*fields), partition_spec=spec,
                                          properties={STORE: self._store, TOPIC: topic, **ICEBERG_SETTINGS})


def _expire_snapshots(commit: IcebergTransaction) -> None:
    """Forget the snapshots that the table's settings do not keep, once they are half as many as those that these keep."""
    metadata = commit.table_metadata
    keep = int(metadata.properties.get(TableProperties.MIN_SNAPSHOTS_TO_KEEP, TableProperties.MIN_SNAPSHOTS_TO_KEEP_DEFAULT))
    age_ms = int(metadata.properties.get(TableProperties.MAX_SNAPSHOT_AGE_MS, TableProperties.MAX_SNAPSHOT_AGE_MS_DEFAULT))
    named = {reference.snapshot_id for reference in metadata.refs.values()}
    oldest_ms = time.time_ns() // 1_000_000 - age_ms
    by_age = sorted(metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms)
    expired = [snapshot.snapshot_id for snapshot in by_age[:-keep or None]
               if snapshot.timestamp_ms < oldest_ms and snapshot.snapshot_id not in named]
    if len(expired) > keep // 2:
        ExpireSnapshots(commit).by_ids(expired).commit()


class _SyncedFile(io.FileIO):
    """A file that is durable, with its name, once it is closed."""

    def close(self) -> None:
        if not self.closed:
            os.fsync(self.fileno())
            super().close()
            sync_folder(Path(str(self.name)).parent)


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> pa.PythonFile:
        make_folders(Path(self._path).parent)
        return pa.PythonFile(_SyncedFile(self._path, "wb" if overwrite else "xb"), mode="w")


class DurableFiles(PyArrowFileIO):
    """pyiceberg's files on this host, each durable before the catalog names it."""

    def new_output(self, location: str) -> _DurableFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        return _DurableFile(location, path, self.fs_by_scheme(scheme, netloc))
