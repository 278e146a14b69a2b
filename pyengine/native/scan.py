"""Walks through the records of a segment, and their columns in Arrow's layout (csrc/scan, record, columns, tally .cdef.h).

A `view` is any object with the buffer protocol (an mmap, a memoryview, bytes) whose first byte is at the physical
offset `base_offset`. Offsets are physical, of the whole commit log. A walk reads nothing outside the given range,
whatever the bytes say, and returns damage as a reason, never as an exception.

A `ColumnScanner` turns the records of a range, or those that consume-queue entries name, into batches of buffers; a
`TallyScanner` counts them in groups. This module does not import Arrow: `allocate` makes the buffers, and
pyengine.storage.arrow makes Arrow arrays of them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

from pyengine._native import ffi, lib
from pyengine.arguments import EVERY_OFFSET, INT64_MAX, INT64_MIN
from pyengine.errors import UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record import WalkResult

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, CData, ms_column, ms_queue_keys, ms_selection, ms_text

# By MS_CASE_*; the labels are those of formats.record.
REASONS = (
    "message",
    "range_end",
    "zeroes",
    "blank",
    "foreign",
    "overrun",
    "torn",
    "offset_mismatch",
    "bad_crc",
    "bad_text",
)
_BLANK = lib.MS_CASE_BLANK


class Checks(TypedDict, total=False):
    """What is checked of a record in addition to its lengths."""

    check_crc: bool
    """Whether the body fits its CRC; True unless said otherwise."""
    check_offset: bool
    """Whether the record names its own offset; True unless said otherwise."""
    strict: bool
    """Whether topic and properties are UTF-8 without NUL, for bytes of which a power cut may have lost pages."""


def walk(view: Buffer, base_offset: int, start: int, end: int, *, limit: int | None = None, **checks: Unpack[Checks]) -> WalkResult:
    """Walk the records that begin in [start, end), in the segment that `view` holds.

    The walk reads nothing at or above `limit` (default: `end`); a record that extends beyond it is an `overrun`. If a
    blank ends the walk, `end_offset` is the blank's start. UsageError if the range does not lie inside the view.
    """
    limit = end if limit is None else limit
    data = bounded(view, base_offset, start, end, limit)
    result = ffi.new("struct ms_walk *")
    lib.ms_scan_walk(data, base_offset, start, end, limit, _checks(**checks), result)
    blanks = 1 if result.reason == _BLANK else 0
    return WalkResult(
        result.end_offset,
        REASONS[result.reason],
        result.messages + blanks,
        result.messages,
        result.first_store_timestamp_ms,
        result.last_store_timestamp_ms,
    )


def sync(
    view: Buffer, base_offset: int, from_: int, end: int, *, limit: int | None = None, certain: bool = False
) -> int | None:
    """Return the first record that begins in [from_, end), or None; read nothing at or above `limit` (default: `end`).

    A record is recognized by its lengths, by its own offset, and by what follows it. A body that imitates a record at
    exactly its own offset can deceive this. `certain` walks from the segment's beginning instead: nothing deceives that,
    but it reads every header before `from_`.
    """
    limit = end if limit is None else limit
    data = bounded(view, base_offset, from_, end, limit)
    if certain:
        reached = ffi.new("struct ms_walk *")
        lib.ms_scan_walk(data, base_offset, base_offset, from_, limit, 0, reached)
        if reached.reason != lib.MS_CASE_RANGE_END or reached.end_offset < from_:
            return None
        found = reached.end_offset
        room = limit - found
        whole = lib.ms_record_classify(data + (found - base_offset), room, 0, 0) == lib.MS_CASE_MESSAGE
        return found if found < end and whole else None
    found = lib.ms_scan_sync(data, base_offset, from_, end, limit)
    return None if found < 0 else found


def classify(
    view: Buffer, at: int, room: int, physical_offset: int | None = None, *, check_crc: bool = True, strict: bool = False
) -> str:
    """Return the one of REASONS for the bytes at `at` in the view, of which it reads `room` at most."""
    data = ffi.from_buffer("uint8_t[]", view)
    if at < 0 or room < 0 or at + room > len(data):
        raise UsageError(f"[{at}, {at + room}) does not lie in {len(data)} bytes")
    checks = _checks(check_crc, physical_offset is not None, strict)
    return REASONS[lib.ms_record_classify(data + at, room, physical_offset or 0, checks)]


def _checks(check_crc: bool = True, check_offset: bool = True, strict: bool = False) -> int:
    return check_crc * lib.MS_CHECK_CRC | strict * lib.MS_CHECK_TEXT | check_offset * lib.MS_CHECK_OFFSET


class EntryRun(NamedTuple):
    """Consecutive entries of one queue, as bytes; the first has the queue offset `first`."""

    topic: str
    queue_id: int
    first: int
    data: Buffer


def count_matching_entries(
    view: Buffer, base_offset: int, limit: int, entries: EntryRun, *, after: int, check_tags: bool, check_offset: bool = False
) -> int:
    """Count the first of `entries` that each name a record of this queue and queue offset in [base_offset, limit), each beyond the one
    before and `after`."""
    log = bounded(view, base_offset, base_offset, limit)
    name = entries.topic.encode("utf-8")
    data = ffi.from_buffer("uint8_t[]", entries.data)
    return lib.ms_check_entries(
        log, base_offset, limit, name, len(name), entries.queue_id, entries.first, data, len(data) // CQ_ENTRY_BYTES,
        after, check_tags, check_offset)


def broken_chain(file: Buffer, layout: IndexLayout, count: int, *, may_grow: bool) -> int:
    """Return 0, or the first entry below `count` with a wrong chain, or -1 - slot for a wrong slot.

    `may_grow`: an engine puts further entries, to which slots move on.
    """
    data = ffi.from_buffer("uint8_t[]", file)
    if len(data) != layout.size_bytes or not 1 <= count <= layout.max_index_num:
        raise UsageError(f"{count} entries of an index file of {len(data)} bytes do not fit {layout}")
    heads = ffi.new("int32_t[]", layout.max_hash_slot_num)
    return lib.ms_check_chains(data, layout.max_hash_slot_num, count, layout.max_index_num if may_grow else count, heads)


def first_orphan_key(view: Buffer, base_offset: int, limit: int, file: Buffer, layout: IndexLayout, first: int, end: int) -> int:
    """Return the first entry in [first, end) of an index file that is not a key of a record in [base_offset, limit), or `end`."""
    log = bounded(view, base_offset, base_offset, limit)
    data = ffi.from_buffer("uint8_t[]", file)
    if not 0 <= first <= end <= layout.max_index_num or len(data) != layout.size_bytes:
        raise UsageError(f"entries [{first}, {end}) are not all in an index file of {len(data)} bytes")
    return lib.ms_check_keys(log, base_offset, limit, data + layout.entry_at(0), first, end)


def count_keys(view: Buffer, base_offset: int, start: int, end: int) -> int:
    """Count the index keys of the records of [start, end)."""
    return lib.ms_check_count_keys(bounded(view, base_offset, start, end), base_offset, start, end)


def bounded(view: Buffer, base_offset: int, start: int, end: int, limit: int | None = None) -> Array[int]:
    """Return a pointer to the view's bytes, which releases them as a context manager; UsageError if the range is outside."""
    data = ffi.from_buffer("uint8_t[]", view)
    if not base_offset <= start <= end <= (end if limit is None else limit) <= base_offset + len(data):
        with_limit = "" if limit is None else f" with limit {limit}"
        raise UsageError(f"[{start}, {end}){with_limit} does not lie in the segment at {base_offset} of {len(data)} bytes")
    return data


def text_at(at: Array[int], length: int) -> str:
    """Decode text of the log from a copy: CPython reads the bytes twice, and a file that changed meanwhile would damage the text."""
    return bytes(ffi.buffer(at, length)).decode("utf-8", "replace") if length else ""


BATCH_ROWS = 10_000
BATCH_BYTES = 4 << 20
BATCH_ROWS_MAX = 1 << 20
BATCH_BYTES_MAX = 256 << 20  # offsets are 32 bits, and repaired text may be three times as long
PROPERTY_PREFIX = "property."

# Every column but property.<NAME>, in the order in which a full scan gives them, with its type.
_COLUMNS = {
    "topic": (lib.MS_COLUMN_TOPIC, "string"),
    "queueId": (lib.MS_COLUMN_QUEUE_ID, "int32"),
    "queueOffset": (lib.MS_COLUMN_QUEUE_OFFSET, "int64"),
    "physicalOffset": (lib.MS_COLUMN_PHYSICAL_OFFSET, "int64"),
    "storeTimestamp": (lib.MS_COLUMN_STORE_TIMESTAMP, "timestamp"),
    "bornTimestamp": (lib.MS_COLUMN_BORN_TIMESTAMP, "timestamp"),
    "tags": (lib.MS_COLUMN_PROPERTY, "string"),
    "keys": (lib.MS_COLUMN_PROPERTY, "string"),
    "uniqKey": (lib.MS_COLUMN_PROPERTY, "string"),
    "properties": (lib.MS_COLUMN_PROPERTIES, "string"),
    "body": (lib.MS_COLUMN_BODY, "binary"),
    "bodySize": (lib.MS_COLUMN_BODY_SIZE, "int32"),
    "size": (lib.MS_COLUMN_SIZE, "int32"),
    "bodyCRC": (lib.MS_COLUMN_BODY_CRC, "int32"),
    "flag": (lib.MS_COLUMN_FLAG, "int32"),
    "sysFlag": (lib.MS_COLUMN_SYS_FLAG, "int32"),
    "reconsumeTimes": (lib.MS_COLUMN_RECONSUME_TIMES, "int32"),
    "preparedTransactionOffset": (lib.MS_COLUMN_PREPARED_OFFSET, "int64"),
    "bornHost": (lib.MS_COLUMN_BORN_HOST, "string"),
    "storeHost": (lib.MS_COLUMN_STORE_HOST, "string"),
    "msgId": (lib.MS_COLUMN_MSG_ID, "string"),
}
_PROPERTY = lib.MS_COLUMN_PROPERTY, "string"
_PROPERTIES = {"tags": "TAGS", "keys": "KEYS", "uniqKey": "UNIQ_KEY"}
COLUMNS = tuple(_COLUMNS)
_new_raw = ffi.new_allocator(should_clear_after_alloc=False)


def column_kind(name: str) -> str:
    """Return a column's type: int32, int64, timestamp (microseconds, UTC), string or binary; UsageError if unknown."""
    return _column(name)[1]


def _column(name: str) -> tuple[int, str]:
    found = _COLUMNS.get(name) or (_PROPERTY if _is_property(name) else None)
    if found is None:
        raise UsageError(f"unknown column {name!r}: known are {', '.join(COLUMNS)} and {PROPERTY_PREFIX}NAME")
    return found


class ColumnBuffer(NamedTuple):
    """Memory of at least the requested length: the object that owns it, and its address."""

    owner: object
    address: int


class ColumnData(NamedTuple):
    """One column of a batch. Numbers: `data` alone. Texts: `offsets` (rows + 1 times 32 bits) and `data`;
    `validity` bits only where something is null."""

    name: str
    kind: str
    null_count: int
    validity: ColumnBuffer | None
    offsets: ColumnBuffer | None
    data: ColumnBuffer


class RawBatch(NamedTuple):
    """Columns of some rows."""

    rows: int
    columns: list[ColumnData]


# [first queue offset, end) of the wanted rows of a queue, or these and [start, end) of their store times in ms.
QueueBounds = tuple[int, int] | tuple[int, int, int, int]
ChooseQueue = Callable[[str, int], QueueBounds | None]  # (topic, queue id) -> which rows, None for none


@dataclass(frozen=True, slots=True)
class RowFilter:
    """The conditions on wanted rows; a row must meet all of them.

    The scan calls `choose_queue` once for each queue that it meets (invalid UTF-8 in a topic becomes replacement
    characters). `tags`: the property TAGS is one of them. Store times: start_ms <= time < end_ms. `queued_only` leaves out
    prepared and rolled back messages, which are in no queue.
    """

    choose_queue: ChooseQueue | None = None
    tags: tuple[str, ...] | None = None
    start_ms: int = INT64_MIN
    end_ms: int = INT64_MAX
    queued_only: bool = False


def choose_queues(are_wanted: Callable[[str, int], bool], offsets: Mapping[tuple[str, int], tuple[int, int]],
                  times: Mapping[tuple[str, int], tuple[int, int]]) -> ChooseQueue:
    """Return a `choose_queue` for the wanted queues: all of their rows, or those in the queue's [start, end) of offsets and of times."""

    def choose(topic: str, queue_id: int) -> QueueBounds | None:
        if not are_wanted(topic, queue_id):
            return None
        queue = topic, queue_id
        bounds = offsets.get(queue, EVERY_OFFSET)
        return (*bounds, *times[queue]) if queue in times else bounds

    return choose


def choose_topics(topics: Iterable[str], queue_ids: Iterable[int] | None = None,
                  first_offsets: Mapping[tuple[str, int], int] | None = None) -> ChooseQueue:
    """Return a `choose_queue` for the queues of these topics, with all or the given ids, each from its first offset on if it has one."""
    wanted = frozenset(topics)
    ids = None if queue_ids is None else frozenset(queue_ids)
    offsets = {queue: (first, INT64_MAX) for queue, first in (first_offsets or {}).items()}
    return choose_queues(lambda topic, queue_id: topic in wanted and (ids is None or queue_id in ids), offsets, {})


def choose_both(one: ChooseQueue, other: ChooseQueue | None) -> ChooseQueue:
    """Return a `choose_queue` for the rows that both choose; neither bounds store times."""
    if other is None:
        return one

    def choose(topic: str, queue_id: int) -> QueueBounds | None:
        first, second = one(topic, queue_id), other(topic, queue_id)
        return None if first is None or second is None else (max(first[0], second[0]), min(first[1], second[1]))

    return choose


class ColumnScanner:
    """Makes batches of the given columns; one scan at a time, since it keeps the selected rows in its own memory."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        row_filter: RowFilter | None = None,
        batch_rows: int = BATCH_ROWS,
        batch_bytes: int = BATCH_BYTES,
        verify_crc: bool = False,
        allocate: Callable[[int], ColumnBuffer],
    ) -> None:
        if not 1 <= batch_rows <= BATCH_ROWS_MAX or not 1 <= batch_bytes <= BATCH_BYTES_MAX:
            raise UsageError(
                f"a batch may have 1 to {BATCH_ROWS_MAX} rows and 1 to {BATCH_BYTES_MAX} bytes,"
                f" not {batch_rows} and {batch_bytes}"
            )
        self.columns = tuple(columns)
        self._batch_rows = batch_rows
        self._allocate = allocate
        self._filter = None if row_filter is None else _Filter(row_filter)
        self._rows = _new_raw("struct ms_record[]", batch_rows)
        distinct = sorted(dict.fromkeys(self.columns), key=lambda name: _property_name(name) is None)  # properties first
        self._structs = ffi.new("struct ms_column[]", max(1, len(distinct)))
        self._struct_of = {name: self._structs[at] for at, name in enumerate(distinct)}
        self._references = [self._describe(name, column) for name, column in self._struct_of.items()]
        self._selection = ffi.new("struct ms_selection *", {
            "filter": ffi.NULL if self._filter is None else self._filter.struct, "rows": self._rows, "rows_max": batch_rows,
            "bytes_max": batch_bytes, "count_bodies": "body" in self.columns, "checks": lib.MS_CHECK_CRC if verify_crc else 0})
        self.reason = "range_end"

    @property
    def position(self) -> int:
        """The offset at which the last scan stopped: its end, or the record that `reason` is about."""
        return self._selection.position

    def scan(self, view: Buffer, base_offset: int, start: int, end: int, limit: int | None = None) -> Iterator[RawBatch]:
        """Yield the records that begin in [start, end), in the segment that `view` holds from `base_offset` on.

        `start` must be the beginning of a record (see native.scan.sync). The scan reads nothing at or above `limit` (default:
        `end`). Afterwards `reason` says why it stopped: `range_end`, `blank`, or what is wrong at `position` (see
        native.scan.REASONS). UsageError if the range does not lie in the view.
        """
        limit = end if limit is None else limit
        data = bounded(view, base_offset, start, end, limit)
        selection = self._selection
        selection.position = start
        more = True
        while more:
            more = self._needs_repeat(lib.ms_columns_select(selection, data, base_offset, end, limit))
            if selection.count:
                yield RawBatch(selection.count, self._fill(selection.count))

    def gather(self, view: Buffer, base_offset: int, entries: Buffer, limit: int | None = None) -> Iterator[RawBatch]:
        """Yield the records that consume-queue `entries` (20 bytes each) name, in their order; all lie in this segment.

        Each entry must name a whole record of its size and with its own offset. At the first one that does not, the scan
        stops: `reason` says what is wrong at `position`, `gathered` counts the entries before. It skips filler.
        """
        data = ffi.from_buffer("uint8_t[]", view)
        source = ffi.from_buffer("uint8_t[]", entries)
        limit = base_offset + len(data) if limit is None else limit
        if len(source) % lib.MS_QUEUE_ENTRY_BYTES or not base_offset <= limit <= base_offset + len(data):
            raise UsageError(f"{len(source)} bytes of entries, or the limit {limit}, do not fit this segment")
        count = len(source) // lib.MS_QUEUE_ENTRY_BYTES
        selection = self._selection
        self.gathered = 0
        more = True
        while more:
            code = lib.ms_columns_gather(selection, data, base_offset, limit,
                                         source + self.gathered * lib.MS_QUEUE_ENTRY_BYTES, count - self.gathered)
            self.gathered += selection.entries_read
            more = self._needs_repeat(code)
            if selection.count:
                yield RawBatch(selection.count, self._fill(selection.count))

    def _needs_repeat(self, code: int) -> bool:
        """Return whether the caller must repeat the call for the rest."""
        if code == lib.MS_COLUMNS_FULL:
            return True
        if code == lib.MS_COLUMNS_NEEDS_QUEUE and self._filter is not None:
            self._filter.ask_queue(self._selection)
            return True
        self.reason = REASONS[code]
        return False

    def _describe(self, name: str, column: ms_column) -> object:
        """Write the column's kind and name into its struct; return the owners of the memory that it points to."""
        column.kind = _column(name)[0]
        wanted = _property_name(name)
        if wanted is None:
            return None
        text = ffi.from_buffer("uint8_t[]", wanted.encode())
        column.name.at, column.name.bytes = text, len(text)
        column.texts = texts = _new_raw("struct ms_text[]", self._batch_rows)
        return text, texts

    def _fill(self, rows: int) -> list[ColumnData]:
        lib.ms_columns_measure(self._rows, rows, self._structs, len(self._struct_of))
        filled = {name: self._room(name, column, rows) for name, column in self._struct_of.items()}
        lib.ms_columns_fill(self._rows, rows, self._structs, len(self._struct_of))
        return [filled[name] for name in self.columns]

    def _room(self, name: str, column: ms_column, rows: int) -> ColumnData:
        """Allocate memory for a measured column."""
        kind = column_kind(name)
        data = self._allocate(column.bytes)
        column.data = ffi.cast("void *", data.address)
        if kind not in ("string", "binary"):
            return ColumnData(name, kind, 0, None, None, data)
        offsets = self._allocate(4 * (rows + 1))
        column.offsets = ffi.cast("int32_t *", offsets.address)
        validity = self._allocate((rows + 7) // 8) if column.nulls else None
        column.validity = ffi.NULL if validity is None else ffi.cast("uint8_t *", validity.address)
        return ColumnData(name, kind, column.nulls, validity, offsets, data)


TALLY_COLUMNS = {
    "messages": (lib.MS_TALLY_MESSAGES, "int64"),
    "bodyBytes": (lib.MS_TALLY_BODY_BYTES, "int64"),
    "bytes": (lib.MS_TALLY_BYTES, "int64"),
    "largest": (lib.MS_TALLY_LARGEST, "int32"),
    "delayed": (lib.MS_TALLY_DELAYED, "int64"),
    "transactional": (lib.MS_TALLY_TRANSACTIONAL, "int64"),
    "compressed": (lib.MS_TALLY_COMPRESSED, "int64"),
    "retried": (lib.MS_TALLY_RETRIED, "int64"),
    "firstOffset": (lib.MS_TALLY_FIRST_OFFSET, "int64"),
    "lastOffset": (lib.MS_TALLY_LAST_OFFSET, "int64"),
    "firstTimestamp": (lib.MS_TALLY_FIRST_TIMESTAMP, "timestamp"),
    "lastTimestamp": (lib.MS_TALLY_LAST_TIMESTAMP, "timestamp"),
    "queueId": (lib.MS_TALLY_QUEUE, "int32"),
    "step": (lib.MS_TALLY_STEP, "timestamp"),
}
_TALLY_ROWS = 1024  # selected at a time: so few that the records are still in the processor's cache when they are counted
_TALLY_GROUPS = 8 * _TALLY_ROWS
_QUEUES_FIRST = 64
_TOPIC_BYTES = 64  # room per queue; more is made when names are longer


class TallyScanner(ColumnScanner):
    """Counts rows by topic and queue, by topic, or by topic and interval of the store time: one row for each group.

    A scan yields each group once, unless there are more than some thousands. Columns are `topic` and those of
    TALLY_COLUMNS. `matches` gets the property text of each row and returns whether the row counts.
    """

    def __init__(self, columns: Sequence[str], by: Literal["queue", "topic"] | int, *, matches: Callable[[str], bool] | None = None,
                 row_filter: RowFilter | None = None, batch_rows: int = BATCH_ROWS, verify_crc: bool = False,
                 allocate: Callable[[int], ColumnBuffer]) -> None:
        """If `by` is a number, it is the interval of the store time in microseconds."""
        super().__init__((), row_filter=row_filter, batch_rows=min(batch_rows, _TALLY_ROWS), verify_crc=verify_crc, allocate=allocate)
        self._wanted = tuple(columns)
        self._matches = matches
        self._kept_memory = (_new_raw("struct ms_tally_group[]", _TALLY_GROUPS), _new_raw("int32_t[]", 2 * _TALLY_GROUPS))
        self._tally = ffi.new("struct ms_tally *")
        self._tally.groups, self._tally.places = self._kept_memory
        self._tally.group_capacity, self._tally.place_mask = _TALLY_GROUPS, 2 * _TALLY_GROUPS - 1
        if isinstance(by, int):
            self._tally.by, self._tally.step_us = lib.MS_TALLY_BY_STEP, by
        else:
            self._tally.by = lib.MS_TALLY_BY_QUEUE if by == "queue" else lib.MS_TALLY_BY_TOPIC
        lib.ms_tally_clear(self._tally)

    def scan(self, view: Buffer, base_offset: int, start: int, end: int, limit: int | None = None) -> Iterator[RawBatch]:
        """Yield the groups of the records that begin in [start, end), as ColumnScanner.scan does records."""
        return self._counted(super().scan(view, base_offset, start, end, limit))

    def gather(self, view: Buffer, base_offset: int, entries: Buffer, limit: int | None = None) -> Iterator[RawBatch]:
        """Yield the groups of the records that consume-queue `entries` name, as ColumnScanner.gather does records."""
        return self._counted(super().gather(view, base_offset, entries, limit))

    def _counted(self, selected: Iterator[RawBatch]) -> Iterator[RawBatch]:
        for _ in selected:
            if self._tally.group_count > _TALLY_GROUPS - _TALLY_ROWS:
                yield self._groups()
        if self._tally.group_count:
            yield self._groups()

    def _fill(self, rows: int) -> list[ColumnData]:
        keep = ffi.NULL
        if self._matches is not None:
            keep = ffi.new("uint8_t[]", [self._matches(text_at(self._rows[row].properties, self._rows[row].properties_bytes))
                                         for row in range(rows)])
        counted = lib.ms_tally_add(self._tally, self._rows, rows, keep)
        assert counted == rows, "there is room for as many groups as rows are selected"
        return []

    def _groups(self) -> RawBatch:
        """Return all groups, and clear them."""
        count = self._tally.group_count
        columns = []
        for name in self._wanted:
            if name == "topic":
                texts = _new_raw("struct ms_text[]", count)
                lib.ms_tally_topics(self._tally, texts)
                topics = ffi.new("struct ms_column *", {"kind": lib.MS_COLUMN_GIVEN, "texts": texts})
                lib.ms_columns_measure(ffi.NULL, count, topics, 1)
                columns.append(self._room(name, topics, count))
                lib.ms_columns_fill(ffi.NULL, count, topics, 1)
            else:
                number, kind = TALLY_COLUMNS[name]
                length = count * (4 if kind == "int32" else 8)
                data = self._allocate(length)
                lib.ms_tally_numbers(self._tally, number, ffi.cast("void *", data.address))
                columns.append(ColumnData(name, kind, 0, None, None, data))
        lib.ms_tally_clear(self._tally)
        return RawBatch(count, columns)


class _Filter:
    """A `struct ms_row_filter` and its tables, which grow as queues are met."""

    def __init__(self, wanted: RowFilter) -> None:
        self._choose = wanted.choose_queue
        self.struct = ffi.new("struct ms_row_filter *")
        self.struct.by_queue = wanted.choose_queue is not None
        self.struct.by_tag = wanted.tags is not None
        self.struct.queued_only = wanted.queued_only
        self.struct.start_ms = wanted.start_ms
        self.struct.end_ms = wanted.end_ms
        self._tags, self._references = _texts(list(wanted.tags or ()))
        self.struct.tags = self._tags
        self.struct.tag_count = len(wanted.tags or ())
        self._keys = QueueKeys(ffi.addressof(self.struct, "keys"))
        self._make_room()

    def ask_queue(self, selection: ms_selection) -> None:
        """Ask `choose_queue` about the queue at which the scan stopped."""
        topic, queue_id = selection.unknown_topic, selection.unknown_queue_id
        length = selection.unknown_topic_bytes
        first, end, *times = (self._choose and self._choose(text_at(topic, length), queue_id)) or (0, 0)
        while (number := lib.ms_queue_keys_add(self._keys.struct, topic, length, queue_id)) == -errno.ENOSPC:
            self._make_room()
        queue = self.struct.queues[number]
        queue.first_offset, queue.end_offset = first, end
        queue.start_ms, queue.end_ms = times or (INT64_MIN, INT64_MAX)

    def _make_room(self) -> None:
        count, capacity = self._keys.struct.count, self._keys.grow()
        self._queues = self.struct.queues = grown("struct ms_filter_queue", self.struct.queues, count, capacity)


class QueueKeys:
    """The tables of a `struct ms_queue_keys` that the caller keeps alive (csrc/queue_keys.cdef.h)."""

    def __init__(self, struct: ms_queue_keys) -> None:
        self.struct = struct

    def grow(self) -> int:
        """Double the room for queues, none at first; return for how many there is room now."""
        keys = self.struct
        queues, topics_bytes = 2 * keys.capacity or _QUEUES_FIRST, 2 * keys.topics_capacity or _QUEUES_FIRST * _TOPIC_BYTES
        self._key = keys.key = grown("struct ms_queue_key", keys.key, keys.count, queues)
        self._topics = keys.topics = grown("uint8_t", keys.topics, keys.topics_bytes, topics_bytes)
        self._buckets = keys.buckets = ffi.new("int32_t[]", 2 * queues)
        keys.capacity, keys.topics_capacity, keys.bucket_mask = queues, topics_bytes, 2 * queues - 1
        lib.ms_queue_keys_rehash(keys)
        return queues


def grown(kind: str, old: CData, used: int, capacity: int) -> Any:
    """Return a new array of the C type `kind` that begins with the first `used` elements of `old`."""
    fresh = ffi.new(f"{kind}[]", capacity)
    ffi.memmove(fresh, old, used * ffi.sizeof(kind))
    return fresh


def _is_property(column: str) -> bool:
    """Return whether the column is property.<NAME> with a valid property name."""
    name = column[len(PROPERTY_PREFIX) :] if column.startswith(PROPERTY_PREFIX) else ""
    return bool(name) and not any(mark in name for mark in "\x00\x01\x02")


def _property_name(column: str) -> str | None:
    """Return the property of a column property.<NAME>, None for other columns."""
    if column.startswith(PROPERTY_PREFIX):
        return column[len(PROPERTY_PREFIX) :]
    return _PROPERTIES.get(column)


def _texts(values: list[str]) -> tuple[ms_text, list[Array[int]]]:
    """Return a `struct ms_text[]` of these texts, and the objects that own its bytes."""
    kept = [ffi.from_buffer("uint8_t[]", value.encode()) for value in values]
    array = ffi.new("struct ms_text[]", max(1, len(values)))
    for at, data in enumerate(kept):
        array[at].at, array[at].bytes = data, len(data)
    return array, kept
