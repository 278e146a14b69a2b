"""Each topic of a log as a table of Delta Lake or Iceberg, exactly once (docs/tables.md).

The log is read in its order, piece by piece, up to the flushed offset. Each piece becomes one commit of
each table that has rows of it; then the end of the piece is noted in the folder:

    DEST/_pyengine_tables.json   store and topics, and the offset below which the tables are complete
    each table                   the offset below which it is complete (pyengine.client.table_formats)

After a kill between two commits the next run reads the piece again and skips the tables that have it. A table that cannot
be written does not stop the others: the note has its topic, and from where on the next run has to read for it again. A hold in
config/log-holds keeps the cleaner, for a bounded time, from deleting messages that are not in the tables yet.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyengine import arguments
from pyengine.errors import (
    CorruptionError,
    DiskFullError,
    EngineError,
    ExitCode,
    UsageError,
    command,
    did_you_mean,
    disk_error,
    require_extra,
)
from pyengine.formats.paths import segment_start
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.ipc.live_reader import LiveStoreReader, flushed_end, log_held, lost_end, open_store
from pyengine.native.failpoints import failpoint
from pyengine.native.scan import walk
from pyengine.results import ReadLevel
from pyengine.storage.backup_files import LOCK_NAME, locked_folder, store_identity
from pyengine.storage.config_table import FORBIDDEN_TOPICS
from pyengine.storage.durable_writes import make_folders, write_config
from pyengine.storage.file_system import refuse_inside, refuse_path_of_others
from pyengine.storage.log_holds import HOLD_MS_MAX, RenewedHold, remove_log_hold
from pyengine.storage.recovery.report import Findings
from pyengine.storage.store_reader import IS_LIGHT, find_topics

if TYPE_CHECKING:
    from pyengine.client.table_formats import TopicTables

log = logging.getLogger(__name__)
STATE = "_pyengine_tables.json"
PIECE_BYTES = 64 << 20
HOUR_MS = 3_600_000
HOLD_MS_MIN = 600_000  # of the hold, while a run renews it
START_TIMEOUT_S = 60.0  # for a killed engine to come up again, while `follow` waits
RETRY_INTERVAL_S = 600.0  # after which `follow` tries the tables again that could not be written
INTERVAL_S_MAX = 1e6
_BEFORE_BYTES = 4096
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # errors that no topic causes, and that end the run
# What the libraries read in a path as part of a URI, or refuse. Iceberg's metadata hold the folder as a URI, for all that read them.
_UNUSABLE = {"delta": re.compile(r"[%\\\x00-\x1f\x7f]"), "iceberg": re.compile(r"[#?%\\\x00-\x1f\x7f]")}

Format = Literal["delta", "iceberg"]


class MissedMessagesError(EngineError):
    """Messages were deleted before they were in the tables."""


class TopicsFailedError(EngineError):
    """Some topics' tables could not be written; `report` says which."""

    def __init__(self, report: TablesReport) -> None:
        super().__init__(report.sentence)
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.report,), vars(self)


@dataclass(frozen=True, slots=True)
class TablesState:
    """The state of a folder of tables: its store and topics, and `offset`, below which the tables are complete.

    `before`: CRC-32 of the last bytes of the log below `offset`, by which a log that was truncated and has other records since
    is noticed; None if those bytes were deleted. `failed`: topics whose tables could not be written, and the offset from which on
    they lack messages. `json`: the columns that are made of JSON bodies, and their types.
    """

    to: str
    store: str
    topics: str | None
    offset: int
    before: int | None = None
    failed: dict[str, int] = field(default_factory=dict)
    json: dict[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> TablesState:
        """Read what content() has written; FileNotFoundError, or one of PARSE_ERRORS for other bytes."""
        state = cls(**json.loads(read_small_file(path)))
        if not isinstance(state.before, int | None) or not isinstance(state.json, dict | None) or not all(
                isinstance(offset, int) and offset >= 0 for offset in (state.offset, *state.failed.values())):
            raise ValueError("no offset")
        return state

    def content(self) -> bytes:
        """Return the bytes of the file; without failed topics and JSON those of version 0.2.0."""
        fields = asdict(self)
        for name in ("failed", "json"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class TablesReport(Findings):
    """What a run added; `failed`: why a topic's table lacks messages."""

    store: str
    dest: str
    to: str
    offset: int
    commits: int
    missed_bytes: int
    messages: dict[str, int]
    failed: dict[str, str]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.FAILED if self.failed else ExitCode.OK

    @property
    def sentence(self) -> str:
        total = sum(self.messages.values())
        done = f"{total:,} messages of {len(self.messages)} topics are in {self.dest}, in {self.commits} commits"
        if not self.failed:
            return done
        topic, why = min(self.failed.items())
        others = f", and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
        return f"{done}; the tables of {len(self.failed)} topics could not be written: {topic!r} ({why}){others}; the next run tries again"


def write_tables(
    store: str | os.PathLike[str], dest: str | os.PathLike[str], to: Format, *, topics: str | None = None, follow: bool = False,
    interval_s: float = 10.0, hold_hours: float = 24.0, allow_loss: bool = False, allow_missing: bool = False,
    over: threading.Event | None = None, progress: Callable[[int, int | None], None] = lambda done, total: None,
    piece_bytes: int = PIECE_BYTES, json: Mapping[str, str] | None = None, settings: Mapping[str, Any] | None = None,
) -> TablesReport:
    """Add a store's new messages to Delta Lake or Iceberg tables in `dest`, each exactly once (docs/tables.md).

    `topics` is a regular expression. With `follow` it continues until `over` is set. TopicsFailedError; UsageError for a folder of
    another origin; MissedMessagesError without `allow_loss`; CorruptionError.
    """
    started_s = time.monotonic()
    pattern = _checked(to, topics, hold_hours, interval_s, piece_bytes)
    columns = None if json is None else _json_columns(json)
    root, folder = arguments.local_path(store), _usable(arguments.local_path(dest, "DEST"), to)
    refuse_inside(root, folder)
    refuse_path_of_others(folder)
    make_folders(folder, is_given=False)
    with locked_folder(folder), open_store(root, **(settings or {})) as reader:
        wanted = TablesState(to, store_identity(root), topics, 0, json=columns)
        state = _continued(folder, wanted)
        if state is None and pattern is not None and not allow_missing:
            _require_match(reader, pattern)
        if not allow_loss:
            _require_whole(reader)
        hold_ms = max(round(hold_hours * HOUR_MS), HOLD_MS_MIN, round(3000 * interval_s) if follow else 0)
        name = f"tables-{zlib.crc32(os.fsencode(folder)):08x}"
        hold = RenewedHold(reader.root, name, f"tables in {folder}", min(hold_ms, HOLD_MS_MAX))
        if not hold.is_written and reader.is_live:
            raise EngineError(f"this user may not write the hold in {root}/config/log-holds that keeps the cleaner from what is not "
                              "in the tables yet")
        if reader.is_live:
            with log_held(reader.root):  # waits until deletions that began before our hold are over
                pass
        filling = _Filling(reader, folder, hold, pattern, piece_bytes, columns)
        try:
            try:
                filling.begin(state, wanted, allow_loss=allow_loss)
            except BaseException:  # restore the hold of the last run, which does not need the whole log
                if state is None:
                    remove_log_hold(reader.root, name)
                elif hold.is_written:
                    hold.move(min([state.offset, *state.failed.values()]))
                raise
            filling.advance(filling.flushed(), progress)
            if follow:
                filling.follow(over or threading.Event(), interval_s, progress)
        finally:
            if not hold_hours:
                remove_log_hold(reader.root, name)
    report = TablesReport(str(root), str(folder), to, filling.offset, filling.commits, filling.missed_bytes, filling.messages,
                          filling.failures, time.monotonic() - started_s)
    if report.failed:
        raise TopicsFailedError(report)
    return report


def _checked(to: str, topics: str | None, hold_hours: float, interval_s: float, piece_bytes: int) -> re.Pattern[str] | None:
    """Return the pattern of topics; UsageError for a wrong argument, or without the libraries."""
    require_extra("pyarrow", "deltalake", "pyiceberg", "sqlalchemy", name="tables")
    if to not in get_args(Format):
        raise UsageError(f"tables of the format {to!r}: give {' or '.join(get_args(Format))}")
    if not arguments.number(hold_hours, "hold_hours") * HOUR_MS <= HOLD_MS_MAX:
        raise UsageError(f"a log hold of {hold_hours:g} hours: give 0 to {HOLD_MS_MAX // HOUR_MS}")
    if not arguments.number(interval_s, "interval_s") <= INTERVAL_S_MAX:
        raise UsageError(f"interval_s is {interval_s:g}: give at most {INTERVAL_S_MAX:,.0f}")
    if arguments.integer(piece_bytes, "piece_bytes") < 1:
        raise UsageError(f"piece_bytes is {piece_bytes}: give 1 or more")
    try:
        return None if topics is None else re.compile(arguments.text(topics, "topics"))
    except re.error as error:
        raise UsageError(f"topic pattern {topics!r}: {error}") from None


def _json_columns(types: Mapping[str, str]) -> dict[str, str]:
    """Return the columns from JSON; UsageError for a wrong type, or a name that another column has."""
    from pyengine.client.table_formats import EXTRA, JSON_TYPES, SCHEMA

    taken = {name.lower() for name in (*SCHEMA.names, EXTRA)}
    for name, kind in arguments.mapping(types, "json").items():
        if arguments.text(name, "a column of json").lower() in taken or not re.fullmatch(r"\w+", name):
            raise UsageError(f"the column {name!r} of json: give a name of letters, digits and _ that no other column of the table has, in "
                             "small or large letters; a field that is not named is in _extra")
        if kind not in JSON_TYPES:
            raise UsageError(f"the column {name!r} of json is a {kind!r}{did_you_mean(str(kind), JSON_TYPES)}: give one of "
                             f"{', '.join(JSON_TYPES)}")
        taken.add(name.lower())
    return dict(types)


def _usable(dest: Path, to: Format) -> Path:
    """Return the absolute path of a folder that the format's library can write to; UsageError for another one."""
    folder = dest.resolve() if ".." in dest.parts else dest.absolute()
    try:
        text = os.fsencode(folder).decode()
    except UnicodeDecodeError:
        raise UsageError(f"DEST {str(folder)!r} is not text in UTF-8, which tables need: give a folder of another name") from None
    if found := _UNUSABLE[to].search(text):
        raise UsageError(f"DEST {text!r} has the character {found[0]!r}, which the libraries do not read as a part of a path: give a "
                         "folder of another name")
    return folder


def _continued(dest: Path, wanted: TablesState) -> TablesState | None:
    """Return the state of the folder, None for an empty one; UsageError if it was begun with other arguments."""
    try:
        state = TablesState.read(dest / STATE)
    except FileNotFoundError:
        others = [path.name for path in sorted(dest.iterdir()) if path.name not in (f"{STATE}.tmp", LOCK_NAME)]
        if others:
            raise UsageError(f"{dest} holds {others[0]} and no {STATE}: give an empty folder") from None
        return None
    except PARSE_ERRORS as error:
        raise UsageError(f"{dest / STATE} is not readable ({error}): give another folder") from None
    now = wanted.json or {}
    changed = [f"{name} ({kind}, now {now.get(name, 'missing')})" for name, kind in (state.json or {}).items() if now.get(name) != kind]
    if (state.json is None) != (wanted.json is None) or changed:
        what = f"with json columns {', '.join(changed)}" if changed else f"{'without' if state.json is None else 'with'} json"
        raise UsageError(f"{dest} was begun {what}: continue with the same, to which columns may be added, or give another folder")
    if replace(state, offset=0, before=None, failed={}, json=wanted.json) != wanted:
        raise UsageError(
            f"{dest} was begun as {state.to} from store {state.store}, topics {state.topics or 'all'}: this is {wanted.to}, store "
            f"{wanted.store}, topics {wanted.topics or 'all'}; continue with the same, or give another folder")
    return state


def _require_match(store: LiveStoreReader, pattern: re.Pattern[str]) -> None:
    """Raise UsageError if the pattern matches no topic of the store but light queues, unless the store has no topic at all."""
    known = find_topics(store, lambda topics: any(map(pattern.fullmatch, topics)))
    matched = list(filter(pattern.fullmatch, known))
    if matched and all(map(store._is_light, matched)):
        raise UsageError(f"{min(matched)} {IS_LIGHT}")
    if known and not matched:
        raise UsageError(f"topic pattern {pattern.pattern!r} matches none of the {len(known)} topics of {store.root}"
                         f"{did_you_mean(pattern.pattern, known)}: with --allow-missing the tables are begun without it")


def _require_whole(store: LiveStoreReader) -> None:
    """CorruptionError for a disk that is not mounted, and for a store at rest whose log ends before what it had synced."""
    if missing := store._missing_part():
        raise CorruptionError(f"{missing}; with --allow-loss the tables get what is there")
    synced = lost_end(store)
    if synced is not None:
        raise CorruptionError(f"the log of {store.root} ends at {store.max_physical_offset(ReadLevel.COMMITTED)}, but everything up to "
                              f"{synced} had been synced: {command('check', store.root)} says what to do; with --allow-loss the tables get "
                              "what is there")


class _Filling:
    """One run; the folder is locked. It counts what the run has added."""

    def __init__(self, store: LiveStoreReader, dest: Path, hold: RenewedHold, pattern: re.Pattern[str] | None, piece_bytes: int,
                 json_columns: Mapping[str, str] | None) -> None:
        from pyengine.client.table_formats import JsonColumns, TopicRows

        self._store = store
        self._dest = dest
        self._hold = hold
        self._pattern = pattern
        self._piece_bytes = piece_bytes
        self._segment_bytes = store.geometry.mapped_file_size_commit_log_bytes
        self._rows = TopicRows()
        self._json = None if json_columns is None else JsonColumns(json_columns)
        self._retried_s = time.monotonic()
        self.commits = 0
        self.missed_bytes = 0
        self.messages: dict[str, int] = {}
        self.failures: dict[str, str] = {}

    def begin(self, state: TablesState | None, wanted: TablesState, *, allow_loss: bool) -> None:
        """Decide where to continue, note it, and add what the tables of failed topics lack."""
        from pyengine.client.table_formats import DeltaTables, IcebergTables

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
        if allow_loss:
            state = replace(state, failed={topic: max(first, offset) for topic, offset in state.failed.items()})
        state = replace(state, json=wanted.json)
        self._note(state)
        # After the note, since this may create files, which belong to the state of the folder then.
        self._sink: TopicTables[Any] = (DeltaTables if wanted.to == "delta" else IcebergTables)(self._dest, wanted.store)
        self._retry()

    @property
    def offset(self) -> int:
        return self._state.offset

    def advance(self, end: int, progress: Callable[[int, int | None], None]) -> None:
        """Fill the tables up to `end`, which is between two records and below which the log is durable."""
        begin = self.offset
        while self.offset < end:
            boundary, rows = self._read(self.offset, end)
            failed = dict(self._state.failed)
            for topic, its in rows:
                if topic not in failed and not self._add(topic, its, self.offset, boundary):
                    failed[topic] = self.offset
            self._note(replace(self._state, offset=boundary, failed=failed))
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
            if self.failures and known_at_s > self._retried_s + RETRY_INTERVAL_S:
                self._retry()
            self.advance(end, progress)

    def _note(self, state: TablesState) -> None:
        self._state = replace(state, before=self._crc_before(state.offset))
        write_config(self._dest / STATE, self._state.content(), keep_backup=False)
        failpoint("tables_noted")
        self._hold.move(min([self._state.offset, *self._state.failed.values()]))

    def flushed(self) -> int:
        """Wait until the log that is committed now is flushed, and return the flushed offset."""
        try:
            return flushed_end(self._store)
        except UsageError as error:
            raise UsageError(f"tables are filled with what is durable only: {error}") from None

    def _read(self, at: int, end: int) -> tuple[int, list[tuple[str, Any]]]:
        """Read a piece of the log from `at` on: return the offset of the next record, and the rows of each wanted topic's tables."""
        from pyengine.client.table_formats import content_end, rows_between

        base = segment_start(at, self._segment_bytes)
        view = self._store.commit_log.view(base)
        if view is None:
            raise self._missed(at, max(at, self._store.min_physical_offset))
        limit = min(base + self._segment_bytes, end)
        stop = min(limit, at + self._piece_bytes)
        found = walk(view, base, at, stop, check_crc=True, limit=limit)
        boundary = base + self._segment_bytes if found.reason == "blank" else found.end_offset
        rows = self._rows.read(view, base, at, min(stop, found.end_offset), limit) if found.messages else []
        if self._store.min_physical_offset > base:
            raise self._missed(at, self._store.min_physical_offset)
        if found.reason not in ("blank", "range_end") or boundary == at:
            raise CorruptionError(f"the log is damaged at {found.end_offset}: {found.reason.replace('_', ' ')}; the tables have what comes "
                                  f"before {at}; `pyengine check` says what to do")
        wanted = [(topic, its) for topic, its in rows
                  if (not is_internal(topic) if self._pattern is None else self._pattern.fullmatch(topic))]
        if self._json is not None:
            boundary = content_end(wanted, boundary)
            wanted = self._json.divided((topic, rows_between(its, at, boundary)) for topic, its in wanted)
        return boundary, wanted

    def _add(self, topic: str, rows: Any, start: int, end: int) -> bool:
        """Commit a topic's rows of the log's bytes [start, end) that its table lacks; False if that failed, with the reason noted."""
        from pyengine.client.table_formats import rows_between

        try:
            begin = max(start, self._sink.offset(topic))  # a run that was killed may have added a part of the piece to this table
            if begin > start:
                rows = rows_between(rows, begin, end)
            if rows.num_rows:
                self._sink.append(topic, rows, begin, end)
                self.commits += 1
                self.messages[topic] = self.messages.get(topic, 0) + rows.num_rows
                self._hold.renew()
        except DiskFullError:
            raise
        except Exception as error:  # whatever a library raises for one table
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise disk_error(error, "write a table in", self._dest) from error
            self._sink.forget(topic)
            self._fail(topic, str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}")
            return False
        return True

    def _retry(self) -> None:
        """Read again what the tables of failed topics lack, and add it."""
        self._retried_s = time.monotonic()
        failed = dict(self._state.failed)
        first = max(0, self._store.min_physical_offset)
        for topic in [topic for topic, offset in failed.items() if offset < first]:
            self._fail(topic, str(self._missed(failed[topic], first)))
        trying = {topic for topic, offset in failed.items() if offset >= first}
        at = min((failed[topic] for topic in trying), default=self.offset)
        while trying and at < self.offset:
            try:
                boundary, rows = self._read(at, self.offset)
            except (CorruptionError, MissedMessagesError) as error:
                for topic in trying:
                    self._fail(topic, str(error))
                return
            for topic, its in rows:
                if topic in trying and not self._add(topic, its, at, boundary):
                    trying.remove(topic)
                    failed[topic] = max(failed[topic], at)
            at = boundary
        for topic in trying:
            del failed[topic]
            self.failures.pop(topic, None)
        if failed != self._state.failed:
            self._note(replace(self._state, failed=failed))

    def _fail(self, topic: str, why: str) -> None:
        if self.failures.get(topic) != why:
            log.error("the table of topic %r cannot be written: %s", topic, why)
        self.failures[topic] = why

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
    return topic in FORBIDDEN_TOPICS or topic.startswith("RMQ_SYS_")


