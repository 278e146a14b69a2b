"""Consume-queue entries: 20 bytes per message of a queue (section 8).

Entry k stands at byte 20 k of the queue, whatever the files are cut into.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_ADDRESS_MAX, CQ_FILLER_SIZE

ENTRY = struct.Struct(">qiq")


class ConsumeQueueEntry(NamedTuple):
    """Where one message of a queue lies in the commit log."""

    physical_offset: int
    size_bytes: int
    tags_code: int


FILLER = ConsumeQueueEntry(0, CQ_FILLER_SIZE, 0)
FILLER_BYTES = ENTRY.pack(*FILLER)


def pack_entry(physical_offset: int, size_bytes: int, tags_code: int) -> bytes:
    """The entry's 20 bytes; struct.error when a value does not fit its field."""
    return ENTRY.pack(physical_offset, size_bytes, tags_code)


def unpack_entry(buffer, at: int = 0) -> ConsumeQueueEntry:
    """The entry at byte `at`; FormatError when fewer than 20 bytes are there."""
    try:
        return ConsumeQueueEntry._make(ENTRY.unpack_from(buffer, at))
    except struct.error as error:
        raise FormatError(f"no whole queue entry at byte {at}: {error}") from error


def iter_entries(buffer) -> Iterator[ConsumeQueueEntry]:
    """All entries of a buffer whose length is a multiple of 20 bytes."""
    return map(ConsumeQueueEntry._make, ENTRY.iter_unpack(buffer))


def is_filler(entry: tuple[int, int, int]) -> bool:
    """True for a pre-blank entry, which stands in front of a queue that does not start at 0 (section 8.3)."""
    return entry[0] == 0 and entry[1] == CQ_FILLER_SIZE


def is_live(entry: tuple[int, int, int]) -> bool:
    """True for what recovery takes as an entry: filler counts, zeros end the data."""
    return entry[0] >= 0 and entry[1] > 0


def is_ext_address(tags_code: int) -> bool:
    """True when the tags code is an address in the consume-queue extension (section 9)."""
    return tags_code <= CQ_EXT_ADDRESS_MAX


def round_up_to_entries(size_bytes: int) -> int:
    """A queue file size as RocketMQ uses it: rounded up to whole entries."""
    return -(-size_bytes // CQ_ENTRY_BYTES) * CQ_ENTRY_BYTES
