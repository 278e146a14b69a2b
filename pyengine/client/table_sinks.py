"""Tables of a folder that rows of the log go into: Delta Lake by delta-rs, Apache Iceberg by pyiceberg.

Rows and the offset of the log that a table has reached are one commit of it, so a process that is killed anywhere leaves
both or neither. What a commit names is durable before: delta-rs and pyiceberg do not sync what they write, so data files
are written here, and so is what Iceberg's metadata consists of. The commit itself is a row of SQLite (Iceberg), which
syncs it, or a file (Delta), which is synced before anything else relies on it, a checkpoint too; one that a power cut tore is
removed.

    Delta     the transaction (txn) of the application `pyengine:STORE` has the offset as its version
    Iceberg   the table's property pyengine.offset; the snapshot's summary has it too
"""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any, Protocol

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
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BinaryType, DateType, IntegerType, LongType, NestedField, StringType, TimestamptzType

from pyengine.errors import UsageError
from pyengine.native.failpoint import failpoint
from pyengine.storage.arrow import schema as scan_schema
from pyengine.storage.durable_writes import sync_file
from pyengine.storage.new_file import make_folders, sync_folder

COLUMNS = (
    "queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bornTimestamp", "tags", "keys", "uniqKey", "properties", "body",
    "flag", "sysFlag", "reconsumeTimes", "preparedTransactionOffset", "bornHost", "storeHost", "msgId",
)
DATE = "date"  # of storeTimestamp, UTC: what the tables are partitioned by
SCHEMA = pa.schema([*scan_schema(COLUMNS), pa.field(DATE, pa.date32())])
NAMESPACE = "topics"
CATALOG = "catalog.db"
STORE, TOPIC, OFFSET = "pyengine.store", "pyengine.topic", "pyengine.offset"
CHECKPOINT_EACH = 100  # commits of a Delta table, as delta-rs itself would
_ONLY_COMMIT = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)  # else it would do both before our sync
_DATA_FILE = re.compile(r"part-(\d{20})-\d{20}\.parquet")
_ICEBERG_TYPES = {"int32": IntegerType(), "int64": LongType(), "timestamp[us, tz=UTC]": TimestamptzType(), "string": StringType(),
                  "binary": BinaryType(), "date32[day]": DateType()}


class TableSink(Protocol):
    """The tables of one folder, one for each topic."""

    def offset(self, topic: str) -> int:
        """The log below it is in the topic's table; 0 without a table. UsageError for a table that is not ours."""

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        """One commit: rows of SCHEMA, of the log's bytes [start, end), and `end` as the table's offset."""


def table_name(topic: str) -> str:
    """The table's name and folder: the topic, with `_XX` for each byte that is no letter, digit, `_` or `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), topic)


def open_sink(to: str, dest: Path, store: str) -> TableSink:
    """The tables in `dest` that are filled from `store`."""
    return DeltaTables(dest, store) if to == "delta" else IcebergTables(dest, store)


def _require_ours(place: str, properties: dict[str, Any], store: str, topic: str) -> None:
    theirs = properties.get(STORE), properties.get(TOPIC)
    if theirs != (store, topic):
        whose = "was not made by `pyengine tables`" if None in theirs else f"is filled from topic {theirs[1]} of store {theirs[0]}"
        raise UsageError(f"{place} {whose}: nothing is added to it; give another folder")


class DeltaTables:
    """Delta tables DEST/NAME."""

    def __init__(self, dest: Path, store: str) -> None:
        self._dest = dest
        self._store = store
        self._application = f"pyengine:{store}"
        self._open: dict[str, deltalake.DeltaTable] = {}

    def offset(self, topic: str) -> int:
        table = self._table(topic)
        return 0 if table is None else table.transaction_version(self._application) or 0

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        table, folder = self._table(topic), self._folder(topic)
        if table is None:
            table = deltalake.DeltaTable.create(
                folder, SCHEMA, partition_by=[DATE], configuration={STORE: self._store, TOPIC: topic}, raise_if_key_not_exists=False,
                post_commithook_properties=_ONLY_COMMIT)
            _sync_commit(folder)
            self._open[topic] = table
        actions: list[AddAction | RemoveAction] = [
            self._write(folder, rows, day, start, end) for day in pc.unique(rows[DATE]).to_pylist()]
        failpoint("table_data_durable")
        table.create_write_transaction(
            actions, "append", SCHEMA, [DATE],
            commit_properties=CommitProperties(app_transactions=[Transaction(self._application, end)], custom_metadata={OFFSET: str(end)}),
            post_commithook_properties=_ONLY_COMMIT)
        _sync_commit(folder)
        failpoint("table_committed")
        table.update_incremental()
        if table.version() % CHECKPOINT_EACH == 0:
            _checkpoint(table, folder / "_delta_log")

    def _folder(self, topic: str) -> Path:
        return self._dest / table_name(topic)

    def _table(self, topic: str) -> deltalake.DeltaTable | None:
        if topic not in self._open:
            folder = self._folder(topic)
            _remove_torn(folder / "_delta_log")
            if not deltalake.DeltaTable.is_deltatable(str(folder)):
                return None
            table = deltalake.DeltaTable(folder)
            _require_ours(str(folder), table.metadata().configuration, self._store, topic)
            self._open[topic] = table
            self._remove_uncommitted(folder, table.transaction_version(self._application) or 0)
        return self._open[topic]

    def _write(self, folder: Path, rows: pa.Table, day: Any, start: int, end: int) -> AddAction:
        """A data file, durable. Its name tells of which bytes of the log it is."""
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
        """Files of a run that was killed before its commit."""
        for path in folder.glob(f"{DATE}=*/part-*.parquet"):
            found = _DATA_FILE.fullmatch(path.name)
            if found and int(found[1]) >= offset:
                path.unlink()


def _sync_commit(folder: Path) -> None:
    """Make the newest commit durable, with its name."""
    log = folder / "_delta_log"
    sync_file(max(_commits(log)))
    for path in (log, folder, folder.parent):
        sync_folder(path)


def _commits(log: Path) -> list[Path]:
    return list(log.glob("[0-9]" * 20 + ".json"))


def _checkpoint(table: deltalake.DeltaTable, log: Path) -> None:
    """What the commits up to now amount to, in one file; then commits and checkpoints that readers need no more are deleted."""
    table.create_checkpoint()
    for path in (max(log.glob("*.checkpoint*.parquet")), log / "_last_checkpoint"):
        sync_file(path)
    sync_folder(log)
    table.cleanup_metadata()


def _remove_torn(log: Path) -> None:
    """What a power cut left a part of: nothing relied on it yet, for it was not synced.

    A commit may be torn, or a checkpoint; the commits that one stands for are deleted only once it is durable.
    """
    torn = []
    if commits := _commits(log):
        try:
            for line in max(commits).read_text().splitlines() or [""]:
                json.loads(line)
        except ValueError:
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
    except ValueError:
        torn.append(log / "_last_checkpoint")
    for path in torn:
        path.unlink(missing_ok=True)
    if torn:
        sync_folder(log)


class IcebergTables:
    """Iceberg tables in the catalog DEST/catalog.db (SQLite), namespace `topics`."""

    def __init__(self, dest: Path, store: str) -> None:
        self._store = store
        self._catalog = SqlCatalog("pyengine", uri=f"sqlite:///{dest / CATALOG}", warehouse=f"file://{dest}",
                                   **{"py-io-impl": f"{__name__}.{DurableFiles.__name__}"})
        self._catalog.create_namespace_if_not_exists(NAMESPACE)
        self._open: dict[str, Table] = {}

    def offset(self, topic: str) -> int:
        table = self._table(topic)
        return 0 if table is None else int(table.properties.get(OFFSET, 0))

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        table = self._table(topic) or self._create(topic)
        with table.transaction() as commit:
            commit.append(rows, snapshot_properties={OFFSET: str(end)})
            commit.set_properties({OFFSET: str(end)})
            failpoint("table_metadata_due")
        failpoint("table_catalog_committed")
        self._open[topic] = table

    def _table(self, topic: str) -> Table | None:
        if topic not in self._open:
            try:
                table = self._catalog.load_table((NAMESPACE, table_name(topic)))
            except NoSuchTableError:
                return None
            _require_ours(f"table {NAMESPACE}.{table_name(topic)}", table.properties, self._store, topic)
            self._open[topic] = table
        return self._open[topic]

    def _create(self, topic: str) -> Table:
        fields = [NestedField(number, field.name, _ICEBERG_TYPES[str(field.type)], required=False)
                  for number, field in enumerate(SCHEMA, 1)]
        spec = PartitionSpec(PartitionField(source_id=len(fields), field_id=1000, transform=IdentityTransform(), name=DATE))
        properties = {
            STORE: self._store, TOPIC: topic, "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "20"}
        return self._catalog.create_table((NAMESPACE, table_name(topic)), Schema(*fields), partition_spec=spec, properties=properties)


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
