"""Queues and index against the log (csrc/store_check.cdef.h). A view holds one segment from `base_offset` on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexLayout

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array


def count_matching_entries(
    view: Buffer, base_offset: int, limit: int, topic: str, queue_id: int, first_queue_offset: int, entries: Buffer,
    *, after: int, check_tags: bool,
) -> int:
    """How many of `entries` (whole ones, as bytes) in a row point to their own record in [base_offset, limit)."""
    log = _log(view, base_offset, base_offset, limit)
    name = topic.encode("utf-8")
    data = ffi.from_buffer("uint8_t[]", entries)
    return lib.ms_check_entries(
        log, base_offset, limit, name, len(name), queue_id, first_queue_offset, data, len(data) // CQ_ENTRY_BYTES,
        after, check_tags,
    )


def broken_chain(file: Buffer, layout: IndexLayout, count: int) -> int:
    """0, or the first entry below `count` that is not chained as it must be, or -1 - slot."""
    data = ffi.from_buffer("uint8_t[]", file)
    if len(data) != layout.size_bytes or not 1 <= count <= layout.max_index_num:
        raise UsageError(f"{count} entries of an index file of {len(data)} bytes do not fit {layout}")
    heads = ffi.new("int32_t[]", layout.max_hash_slot_num)
    return lib.ms_check_chains(data, layout.max_hash_slot_num, count, heads)


def first_orphan_key(view: Buffer, base_offset: int, limit: int, file: Buffer, layout: IndexLayout, first: int, end: int) -> int:
    """The first entry of [first, end) of an index file that no record of [base_offset, limit) has a key for, or `end`."""
    log = _log(view, base_offset, base_offset, limit)
    data = ffi.from_buffer("uint8_t[]", file)
    if not 0 <= first <= end <= layout.max_index_num or len(data) != layout.size_bytes:
        raise UsageError(f"entries [{first}, {end}) are not all in an index file of {len(data)} bytes")
    return lib.ms_check_keys(log, base_offset, limit, data + layout.entry_at(0), first, end)


def count_keys(view: Buffer, base_offset: int, start: int, end: int) -> int:
    """How many keys the records of [start, end) have for the index."""
    return lib.ms_check_count_keys(_log(view, base_offset, start, end), base_offset, start, end)


def _log(view: Buffer, base_offset: int, start: int, end: int) -> Array[int]:
    data = ffi.from_buffer("uint8_t[]", view)
    if not base_offset <= start <= end <= base_offset + len(data):
        raise UsageError(f"[{start}, {end}) does not lie in the segment at {base_offset} of {len(data)} bytes")
    return data
