"""Each topic of a log as a table of Delta Lake or Iceberg, exactly once (docs/tables.md).

The log is read in its order, piece by piece, up to the flushed offset. Each piece becomes one commit of
each table that has rows of it; then the end of the piece is noted in the folder:

    DEST/_pyengine_tables.json   store and topics, and the offset below which all tables are complete
    each table                   the offset below which it is complete

After a kill between two commits the next run reads the piece again and skips the tables that have it. A hold in
config/log-holds keeps the cleaner, for a bounded time, from deleting messages that are not in the tables yet.

Delta Lake is written by delta-rs, Apache Iceberg by pyiceberg. One commit of a table has both the rows and the new
offset, so that a kill at any moment leaves both or neither. The files that a commit refers to are durable before it:
delta-rs and pyiceberg do not sync what they write, so this module writes data files, and the files of Iceberg's
metadata, itself. The commit is a row of SQLite (Iceberg), which syncs it, or a file (Delta). Such a file, and a
checkpoint too, is synced before another file relies on it; one that a power cut tore is removed.

    Delta     the transaction (txn) of the application `pyengine:STORE` has the offset as its version
    Iceberg   the table's property pyengine.offset; the snapshot's summary has it too
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

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

from pyengine.errors import CorruptionError, EngineError, ExitCode, UsageError, command, did_you_mean
from pyengine.formats.constants import TRANSACTION_DISCARD_TOPIC
from pyengine.formats.paths import segment_start
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.ipc.live_reader import LiveStoreReader, flushed_end, log_held, lost_end, open_store
from pyengine.native.failpoint import failpoint
from pyengine.native.scan import RowFilter, walk
from pyengine.results import ReadLevel
from pyengine.storage.arrow import LogScanner
from pyengine.storage.arrow import schema as scan_schema
from pyengine.storage.backup_files import locked_folder, store_identity
from pyengine.storage.config_table import BROKERS_TOPICS, DEFAULT_TOPIC
from pyengine.storage.durable_writes import make_folders, sync_file, sync_folder, write_config
from pyengine.storage.log_holds import HOLD_MS_MAX, RenewedHold, remove_log_hold
from pyengine.storage.store_reader import find_topics

STATE = "_pyengine_tables.json"
PIECE_BYTES = 64 << 20
HOUR_MS = 3_600_000
HOLD_MS_MIN = 600_000  # of the hold, while a run renews it
START_TIMEOUT_S = 60.0  # for a killed engine to come up again, while `follow` waits
_FOR_MESSAGES = {DEFAULT_TOPIC, "BenchmarkTest"}  # the broker's own topics that applications put to
_BEFORE_BYTES = 4096

Format = Literal["delta", "iceberg"]


class MissedMessagesError(EngineError):
    """Messages were deleted before they were in the tables."""


@dataclass(frozen=True, slots=True)
class TablesState:
    """The state of a folder of tables: its store and topics, and `offset`, below which the tables are complete.

    `before`: CRC-32 of the last bytes of the log below `offset`, by which a log that was truncated and has other records since
    is noticed; None if those bytes were deleted.
    """

    to: str
    store: str
    topics: str | None
    offset: int
    before: int | None = None


@dataclass(frozen=True, slots=True)
class TablesReport:
    """The messages by topic and the commits that a run added, and the offset that the tables have reached."""

    store: str
    dest: str
    to: str
    offset: int
    commits: int
    missed_bytes: int
    messages: dict[str, int]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        total = sum(self.messages.values())
        return f"{total:,} messages of {len(self.messages)} topics are in {self.dest}, in {self.commits} commits"

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        return {**asdict(self), "exit_code": int(self.exit_code), "sentence": self.sentence}


def write_tables(
    root: Path, dest: Path, to: Format, *, topics: str | None = None, follow: bool = False, interval_s: float = 10.0,
    hold_hours: float = 24.0, allow_loss: bool = False, allow_missing: bool = False, over: threading.Event | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None, piece_bytes: int = PIECE_BYTES,
    settings: Mapping[str, object] | None = None,
) -> TablesReport:
    """Add the new messages of the store at `root` to the tables in `dest`: each message exactly once, whatever is killed.

    `topics` is a regular expression for whole names; the default is all topics except RocketMQ's internal ones. UsageError if
    it matches no topic of the store and `dest` is empty, unless `allow_missing`. With `follow` the call continues until `over`
    is set, with one commit per `interval_s` at most. The log is held until `hold_hours` after the last commit.
    UsageError if the folder or a table is of another origin, or was begun with other topics; MissedMessagesError for messages
    that were deleted before they were read, unless `allow_loss`; CorruptionError at damage.
    """
    started_s = time.monotonic()
    if not 0 <= hold_hours * HOUR_MS <= HOLD_MS_MAX:
        raise UsageError(f"a log hold of {hold_hours:g} hours: give 0 to {HOLD_MS_MAX // HOUR_MS}")
    try:
        pattern = None if topics is None else re.compile(topics)
    except re.error as error:
        raise UsageError(f"topic pattern {topics!r}: {error}") from None
    dest = dest.absolute()
    make_folders(dest)
    with locked_folder(dest), open_store(root, **(settings or {})) as store:
        wanted = TablesState(to, store_identity(root), topics, 0)
        state = _continued(dest, wanted)
        if state is None and pattern is not None and not allow_missing:
            _require_match(store, pattern)
        if not allow_loss:
            _require_end(store)
        hold_ms = max(round(hold_hours * HOUR_MS), HOLD_MS_MIN, round(3000 * interval_s) if follow else 0)
        name = f"tables-{zlib.crc32(str(dest).encode()):08x}"
        hold = RenewedHold(root, name, f"tables in {dest}", min(hold_ms, HOLD_MS_MAX))
        if not hold.is_written and store.is_live:
            raise EngineError(f"this user may not write the hold in {root}/config/log-holds that keeps the cleaner from what is not "
                              "in the tables yet")
        if store.is_live:
            with log_held(root):  # waits until deletions that began before our hold are over
                pass
        filling = _Filling(store, dest, hold, pattern, piece_bytes)
        try:
            try:
                filling.begin(state, wanted, allow_loss=allow_loss)
            except BaseException:  # restore the hold of the last run, which does not need the whole log
                if state is None:
                    remove_log_hold(root, name)
                elif hold.is_written:
                    hold.move(state.offset)
                raise
            filling.advance(filling.flushed(), progress)
            if follow:
                filling.follow(over or threading.Event(), interval_s, progress)
        finally:
            if not hold_hours:
                remove_log_hold(root, name)
    return TablesReport(str(root), str(dest), to, filling.offset, filling.commits, filling.missed_bytes, filling.messages,
                        time.monotonic() - started_s)


def _continued(dest: Path, wanted: TablesState) -> TablesState | None:
    """Return the state of the folder, None for an empty one; UsageError if it was begun with other arguments."""
    try:
        state = TablesState(**json.loads(read_small_file(dest / STATE)))
        if not isinstance(state.offset, int) or state.offset < 0 or not isinstance(state.before, int | None):
            raise ValueError("no offset")
    except FileNotFoundError:
        others = [path.name for path in sorted(dest.iterdir()) if path.name != f"{STATE}.tmp"]
        if others:
            raise UsageError(f"{dest} holds {others[0]} and no {STATE}: give an empty folder") from None
        return None
    except PARSE_ERRORS as error:
        raise UsageError(f"{dest / STATE} is not readable ({error}): give another folder") from None
    if replace(state, offset=0, before=None) != wanted:
        raise UsageError(
            f"{dest} was begun as {state.to} from store {state.store}, topics {state.topics or 'all'}: this is {wanted.to}, store "
            f"{wanted.store}, topics {wanted.topics or 'all'}; continue with the same, or give another folder")
    return state


def _require_match(store: LiveStoreReader, pattern: re.Pattern[str]) -> None:
    """Raise UsageError if the pattern matches no topic of the store, unless the store has no topic at all."""
    known = find_topics(store, lambda topics: any(map(pattern.fullmatch, topics)))
    if known and not any(map(pattern.fullmatch, known)):
        raise UsageError(f"topic pattern {pattern.pattern!r} matches none of the {len(known)} topics of {store.root}"
                         f"{did_you_mean(pattern.pattern, known)}: with --allow-missing the tables are begun without it")


def _require_end(store: LiveStoreReader) -> None:
    """CorruptionError for a store at rest whose log ends before what it had synced."""
    synced = lost_end(store)
    if synced is not None:
        raise CorruptionError(f"the log of {store.root} ends at {store.max_physical_offset(ReadLevel.COMMITTED)}, but everything up to "
                              f"{synced} had been synced: {command('check', store.root)} says what to do; with --allow-loss the tables get "
                              "what is there")


class _Filling:
    """One run; the folder is locked. It counts what the run has added."""

    def __init__(self, store: LiveStoreReader, dest: Path, hold: RenewedHold, pattern: re.Pattern[str] | None, piece_bytes: int) -> None:
        self._store = store
        self._dest = dest
        self._hold = hold
        self._pattern = pattern
        self._piece_bytes = piece_bytes
        self._segment_bytes = store.geometry.mapped_file_size_commit_log_bytes
        self._scanner = LogScanner(("topic", *COLUMNS), row_filter=RowFilter(queued_only=True))
        self.commits = 0
        self.missed_bytes = 0
        self.messages: dict[str, int] = {}

    def begin(self, state: TablesState | None, wanted: TablesState, *, allow_loss: bool) -> None:
        """Decide where to continue, and note it."""
        first = max(0, self._store.min_physical_offset)
        if state is None:
            state = replace(wanted, offset=first)
        elif state.offset < first:
            if not allow_loss:
                raise self._missed(state.offset, first)
            self.missed_bytes = first - state.offset
            state = replace(state, offset=first)
        elif state.offset > self.flushed() or state.before is not None and self._crc_before(state.offset) not in (None, state.before):
            raise CorruptionError(
                f"the log of {self._store.root} is not the one that {self._dest} was filled from up to {state.offset}: it was cut below "
                "that (recover --accept-loss, or a slave that follows another master); fill a new folder")
        self._note(state)
        # After the note, since this may create files, which belong to the state of the folder then.
        self._sink = (DeltaTables if wanted.to == "delta" else IcebergTables)(self._dest, wanted.store)

    @property
    def offset(self) -> int:
        """The offset below which the tables are complete."""
        return self._state.offset

    def advance(self, end: int, progress: Callable[[int, int | None], None]) -> None:
        """Fill the tables up to `end`, below which the log is durable."""
        begin = self.offset
        while self.offset < end:
            boundary = self._piece(self.offset, end)
            if boundary == self.offset:  # only a part of the next record is durable
                break
            self._note(replace(self._state, offset=boundary))
            progress(boundary - begin, end - begin)
        self._hold.renew()

    def follow(self, over: threading.Event, interval_s: float, progress: Callable[[int, int | None], None]) -> None:
        """Advance once per interval until `over` is set; raise an error if the flushed offset is unknown for START_TIMEOUT_S."""
        known_at_s = time.monotonic()
        while not over.wait(interval_s):
            try:
                end = self.flushed()
            except UsageError:  # an engine is starting
                if time.monotonic() > known_at_s + START_TIMEOUT_S + interval_s:
                    raise
                continue
            known_at_s = time.monotonic()
            self.advance(end, progress)

    def _note(self, state: TablesState) -> None:
        self._state = replace(state, before=self._crc_before(state.offset))
        write_config(self._dest / STATE, json.dumps(asdict(self._state)).encode() + b"\n", keep_backup=False)
        failpoint("tables_noted")
        self._hold.move(self._state.offset)

    def flushed(self) -> int:
        """Wait until the log that is committed now is flushed, and return the flushed offset."""
        try:
            return flushed_end(self._store)
        except UsageError as error:
            raise UsageError(f"tables are filled with what is durable only: {error}") from None

    def _piece(self, at: int, end: int) -> int:
        """Add the records from `at` on to their tables; return the offset of the next one."""
        base = segment_start(at, self._segment_bytes)
        view = self._store.commit_log.view(base)
        if view is None:
            raise self._missed(at, max(at, self._store.min_physical_offset))
        limit = min(base + self._segment_bytes, end)
        stop = min(limit, at + self._piece_bytes)
        found = walk(view, base, at, stop, check_crc=True, limit=limit)
        boundary = base + self._segment_bytes if found.reason == "blank" else found.end_offset
        batches = list(self._scanner.scan(view, base, at, min(stop, found.end_offset), limit)) if found.messages else []
        if self._store.min_physical_offset > base:
            raise self._missed(at, self._store.min_physical_offset)
        if found.reason not in ("blank", "range_end", "overrun"):
            raise CorruptionError(f"the log is damaged at {found.end_offset}: {found.reason.replace('_', ' ')}; the tables have what comes "
                                  f"before {at}; `pyengine check` says what to do")
        for topic, rows in _by_topic(batches):
            is_wanted = not is_internal(topic) if self._pattern is None else self._pattern.fullmatch(topic)
            if not is_wanted:
                continue
            begin = max(at, self._sink.offset(topic))  # a run that was killed may have added a part of the piece to this table
            if begin > at:
                rows = rows.filter(pc.greater_equal(rows["physicalOffset"], begin))
            if rows.num_rows:
                self._sink.append(topic, rows, begin, boundary)
                self.commits += 1
                self.messages[topic] = self.messages.get(topic, 0) + rows.num_rows
                self._hold.renew()
        return boundary

    def _crc_before(self, offset: int) -> int | None:
        """Return the CRC-32 of the last bytes below `offset`; None if they were deleted."""
        if not offset or offset <= self._store.min_physical_offset:
            return None
        base = segment_start(offset - 1, self._segment_bytes)
        view = self._store.commit_log.view(base)
        return None if view is None else zlib.crc32(view[max(0, offset - base - _BEFORE_BYTES) : offset - base])

    def _missed(self, offset: int, first: int) -> MissedMessagesError:
        return MissedMessagesError(
            f"the log of {self._store.root} begins at {first}, and the tables in {self._dest} have it up to {offset}: the messages in "
            "between were deleted before they were read; run it again with --allow-loss to go on without them")


def is_internal(topic: str) -> bool:
    """Whether a topic is internal: its messages are delivered to other topics later, or are the broker's own records."""
    return topic in BROKERS_TOPICS - _FOR_MESSAGES or topic == TRANSACTION_DISCARD_TOPIC or topic.startswith("RMQ_SYS_")


def _by_topic(batches: list[pa.RecordBatch]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (topic, its rows in the order of the log, with the columns of the tables)."""
    if not batches:
        return
    table = pa.Table.from_batches(batches)
    table = table.take(pc.sort_indices(table, sort_keys=[("topic", "ascending"), ("physicalOffset", "ascending")]))
    table = table.append_column(DATE, pc.cast(table["storeTimestamp"], pa.date32()))
    at = 0
    for one in pc.value_counts(table["topic"]).to_pylist():
        yield one["values"], table.slice(at, one["counts"]).select(SCHEMA.names)
        at += one["counts"]


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
_ONLY_COMMIT = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)  # delta-rs would do both before our sync
_DATA_FILE = re.compile(r"part-(\d{20})-\d{20}\.parquet")
_ICEBERG_TYPES = {"int32": IntegerType(), "int64": LongType(), "timestamp[us, tz=UTC]": TimestamptzType(), "string": StringType(),
                  "binary": BinaryType(), "date32[day]": DateType()}


def table_name(topic: str) -> str:
    """Return the table's name and folder: the topic, with `_XX` for each byte that is not a letter, digit, `_` or `-`."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), topic)


def _require_ours(place: str, properties: dict[str, Any], store: str, topic: str) -> None:
    theirs = properties.get(STORE), properties.get(TOPIC)
    if theirs != (store, topic):
        whose = "was not made by `pyengine tables`" if None in theirs else f"is filled from topic {theirs[1]} of store {theirs[0]}"
        raise UsageError(f"{place} {whose}: nothing is added to it; give another folder")


class DeltaTables:
    """Delta tables DEST/NAME, one for each topic, filled from `store`."""

    def __init__(self, dest: Path, store: str) -> None:
        self._dest = dest
        self._store = store
        self._application = f"pyengine:{store}"
        self._open: dict[str, deltalake.DeltaTable] = {}

    def offset(self, topic: str) -> int:
        """Return the offset below which the topic's table is complete; 0 without a table. UsageError for another program's table."""
        table = self._table(topic)
        return 0 if table is None else table.transaction_version(self._application) or 0

    def append(self, topic: str, rows: pa.Table, start: int, end: int) -> None:
        """Make one commit: rows of SCHEMA, of the log's bytes [start, end), and `end` as the table's offset."""
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


def _sync_commit(folder: Path) -> None:
    """Make the newest commit durable, with its name."""
    log = folder / "_delta_log"
    sync_file(max(_commits(log)))
    for path in (log, folder, folder.parent):
        sync_folder(path)


def _commits(log: Path) -> list[Path]:
    return list(log.glob("[0-9]" * 20 + ".json"))


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
    """Iceberg tables in the catalog DEST/catalog.db (SQLite), namespace `topics`; the methods do as those of DeltaTables."""

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
