"""IndexFile: a header, hash slots, and chained entries (section 10)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import INDEX_ENTRY_BYTES, INDEX_HEADER_BYTES, INDEX_SLOT_BYTES, Readable

HEADER = struct.Struct(">qqqqii")
SLOT = struct.Struct(">i")
ENTRY = struct.Struct(">iqii")


class IndexHeader(NamedTuple):
    """The first 40 bytes.

    `index_count` is the number of the next free entry. It starts at 1 because entry 0 is never used. A file without keys
    holds 0 on disk, which is decoded as 1.
    """

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_physical_offset: int = 0
    end_physical_offset: int = 0
    hash_slot_count: int = 0
    index_count: int = 1


class IndexEntry(NamedTuple):
    """One key of one message; `previous` is the previous entry of the same slot, 0 at the chain's end."""

    key_hash: int
    physical_offset: int
    time_diff_s: int
    previous: int


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """Computes positions in an index file with so many slots and entries (entry 0 included)."""

    max_hash_slot_num: int
    max_index_num: int

    @property
    def size_bytes(self) -> int:
        return INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * self.max_hash_slot_num + INDEX_ENTRY_BYTES * self.max_index_num

    def slot_of(self, key_hash: int) -> int:
        return key_hash % self.max_hash_slot_num

    def slot_at(self, slot: int) -> int:
        """Return the byte position of a slot."""
        return INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * slot

    def entry_at(self, number: int) -> int:
        """Return the byte position of an entry."""
        return INDEX_HEADER_BYTES + INDEX_SLOT_BYTES * self.max_hash_slot_num + INDEX_ENTRY_BYTES * number

    def is_full(self, index_count: int) -> bool:
        return index_count >= self.max_index_num


def unpack_header(buffer: Readable, at: int = 0) -> IndexHeader:
    """Return the header, with an index count of 0 or less as 1; FormatError if there are fewer than 40 bytes."""
    try:
        values = HEADER.unpack_from(buffer, at)
    except struct.error as error:
        raise FormatError(f"no whole index header: {error}") from error
    return IndexHeader._make((*values[:5], max(values[5], 1)))


def unpack_entry(buffer: Readable, at: int = 0) -> IndexEntry:
    """Return the entry at byte `at`; FormatError if there are fewer than 20 bytes."""
    try:
        return IndexEntry._make(ENTRY.unpack_from(buffer, at))
    except struct.error as error:
        raise FormatError(f"no whole index entry at byte {at}: {error}") from error


def unpack_slot(buffer: Readable, at: int, index_count: int) -> int:
    """Return the newest entry of the slot at byte `at`; 0 if the stored number is out of range."""
    try:
        (number,) = SLOT.unpack_from(buffer, at)
    except struct.error as error:
        raise FormatError(f"no whole index slot at byte {at}: {error}") from error
    return number if 0 < number <= index_count else 0
