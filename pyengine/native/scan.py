"""Walks through the records of a segment (csrc/scan.cdef.h, csrc/record.cdef.h).

A `view` is any object with the buffer protocol whose first byte is at the
physical offset `base_offset`: an mmap, a memoryview, bytes. Offsets are
physical: of the whole commit log. Nothing outside the given range is looked at,
whatever the bytes say, and damage is an answer, never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record_case import WalkResult

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array

__all__ = [
    "REASONS", "QueueEntries", "WalkResult", "body_crc", "bounded", "broken_chain", "classify", "count_keys", "count_matching_entries",
    "first_orphan_key", "sync", "walk",
]

# By MS_CASE_*; the labels are those of formats.record_case.
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


def walk(
    view: Buffer,
    base_offset: int,
    start: int,
    end: int,
    *,
    check_crc: bool = True,
    strict: bool = False,
    check_offset: bool = True,
    limit: int | None = None,
) -> WalkResult:
    """Walk the records that begin in [start, end), in the segment that `view` holds.

    Nothing at or above `limit` (default: `end`) is looked at; a record that reaches
    beyond it is an `overrun`. For a blank the end is the blank's own start. `strict` also
    judges topic and properties (UTF-8 without NUL), as for bytes that a power cut may have thinned out. `check_offset`: a record
    that names another offset than its own is an `offset_mismatch`. Raises UsageError
    when the range does not lie inside the view.
    """
    data, limit = _bounded(view, base_offset, start, end, limit)
    checks = (
        (lib.MS_CHECK_CRC if check_crc else 0)
        | (lib.MS_CHECK_TEXT if strict else 0)
        | (lib.MS_CHECK_OFFSET if check_offset else 0)
    )
    result = ffi.new("struct ms_walk *")
    lib.ms_scan_walk(data, base_offset, start, end, limit, checks, result)
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
    """The first record that begins in [from_, end), or None; reads nothing at or above `limit` (default: `end`).

    The record is known by its lengths, by naming its own offset, and by what follows
    it. A body that was made to look like a record at the very offset it got deceives
    this; `certain` walks from the segment's beginning instead, which nothing deceives,
    at the cost of reading every header before `from_`.
    """
    data, limit = _bounded(view, base_offset, from_, end, limit)
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
    """The one of REASONS that fits byte `at` of the view, of which `room` bytes may be looked at."""
    data = ffi.from_buffer("uint8_t[]", view)
    if at < 0 or room < 0 or at + room > len(data):
        raise UsageError(f"[{at}, {at + room}) does not lie in {len(data)} bytes")
    checks = (
        (lib.MS_CHECK_CRC if check_crc else 0)
        | (lib.MS_CHECK_TEXT if strict else 0)
        | (0 if physical_offset is None else lib.MS_CHECK_OFFSET)
    )
    return REASONS[lib.ms_record_classify(data + at, room, physical_offset or 0, checks)]


def body_crc(body: Buffer) -> int:
    """CRC-32 of a body without the sign bit; 0 for an empty one."""
    data = ffi.from_buffer("uint8_t[]", body)
    return lib.ms_record_body_crc(data, len(data))


def _bounded(view: Buffer, base_offset: int, start: int, end: int, limit: int | None) -> tuple[Array[int], int]:
    data = ffi.from_buffer("uint8_t[]", view)
    limit = end if limit is None else limit
    if not base_offset <= start <= end <= limit <= base_offset + len(data):
        raise UsageError(
            f"[{start}, {end}) with limit {limit} does not lie in the segment at {base_offset} of {len(data)} bytes"
        )
    return data, limit


class QueueEntries(NamedTuple):
    """Whole entries of one queue in a row, as bytes; the first has the queue offset `first`."""

    topic: str
    queue_id: int
    first: int
    data: Buffer


def count_matching_entries(
    view: Buffer, base_offset: int, limit: int, entries: QueueEntries, *, after: int, check_tags: bool
) -> int:
    """How many of `entries` in a row point to their own record in [base_offset, limit)."""
    log = bounded(view, base_offset, base_offset, limit)
    name = entries.topic.encode("utf-8")
    data = ffi.from_buffer("uint8_t[]", entries.data)
    return lib.ms_check_entries(
        log, base_offset, limit, name, len(name), entries.queue_id, entries.first, data, len(data) // CQ_ENTRY_BYTES,
        after, check_tags)


def broken_chain(file: Buffer, layout: IndexLayout, count: int) -> int:
    """0, or the first entry below `count` that is not chained as it must be, or -1 - slot."""
    data = ffi.from_buffer("uint8_t[]", file)
    if len(data) != layout.size_bytes or not 1 <= count <= layout.max_index_num:
        raise UsageError(f"{count} entries of an index file of {len(data)} bytes do not fit {layout}")
    heads = ffi.new("int32_t[]", layout.max_hash_slot_num)
    return lib.ms_check_chains(data, layout.max_hash_slot_num, count, heads)


def first_orphan_key(view: Buffer, base_offset: int, limit: int, file: Buffer, layout: IndexLayout, first: int, end: int) -> int:
    """The first entry of [first, end) of an index file that no record of [base_offset, limit) has a key for, or `end`."""
    log = bounded(view, base_offset, base_offset, limit)
    data = ffi.from_buffer("uint8_t[]", file)
    if not 0 <= first <= end <= layout.max_index_num or len(data) != layout.size_bytes:
        raise UsageError(f"entries [{first}, {end}) are not all in an index file of {len(data)} bytes")
    return lib.ms_check_keys(log, base_offset, limit, data + layout.entry_at(0), first, end)


def count_keys(view: Buffer, base_offset: int, start: int, end: int) -> int:
    """How many keys the records of [start, end) have for the index."""
    return lib.ms_check_count_keys(bounded(view, base_offset, start, end), base_offset, start, end)


def bounded(view: Buffer, base_offset: int, start: int, end: int) -> Array[int]:
    """A pointer to the view's bytes (as a context manager it releases them).

    UsageError when [start, end) does not lie in it.
    """
    data = ffi.from_buffer("uint8_t[]", view)
    if not base_offset <= start <= end <= base_offset + len(data):
        raise UsageError(f"[{start}, {end}) does not lie in the segment at {base_offset} of {len(data)} bytes")
    return data
