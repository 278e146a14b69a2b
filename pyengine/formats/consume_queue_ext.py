"""Units of the consume-queue extension (section 9)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_EXT_UNIT_BYTES_MIN
from pyengine.formats.consume_queue import is_ext_address

_HEAD = struct.Struct(">hqqh")
_ADDRESS_BASE = -(1 << 63)


class ConsumeQueueExtUnit(NamedTuple):
    """What the extension holds for one queue entry."""

    size_bytes: int
    tags_code: int
    store_timestamp_ms: int
    filter_bit_map: bytes


def decode_ext_address(tags_code: int) -> int:
    """The byte offset in the extension that a queue entry's tags code names; FormatError if it names none."""
    if not is_ext_address(tags_code):
        raise FormatError(f"tags code {tags_code} is no extension address")
    return tags_code - _ADDRESS_BASE


def encode_ext_address(offset: int) -> int:
    """The tags code that names a byte offset of the extension."""
    return offset + _ADDRESS_BASE


def pack_ext_unit(tags_code: int, store_timestamp_ms: int, filter_bit_map: bytes = b"") -> bytes:
    """The unit's bytes; struct.error when the bit map is too long for them."""
    size_bytes = CQ_EXT_UNIT_BYTES_MIN + len(filter_bit_map)
    return _HEAD.pack(size_bytes, tags_code, store_timestamp_ms, len(filter_bit_map)) + filter_bit_map


def unpack_ext_unit(buffer, at: int = 0) -> ConsumeQueueExtUnit | None:
    """The unit at byte `at`, or None where the file's data ends; FormatError when its sizes disagree."""
    if at + 2 > len(buffer):
        return None
    size_bytes = int.from_bytes(buffer[at : at + 2], "big", signed=True)
    if size_bytes < 1:
        return None
    if size_bytes < CQ_EXT_UNIT_BYTES_MIN or at + size_bytes > len(buffer):
        raise FormatError(f"an extension unit of {size_bytes} bytes at byte {at} does not fit")
    _, tags_code, store_timestamp_ms, bit_map_bytes = _HEAD.unpack_from(buffer, at)
    start = at + CQ_EXT_UNIT_BYTES_MIN
    if bit_map_bytes < 0 or CQ_EXT_UNIT_BYTES_MIN + bit_map_bytes > size_bytes:
        raise FormatError(f"the filter bit map of the extension unit at byte {at} does not fit")
    return ConsumeQueueExtUnit(size_bytes, tags_code, store_timestamp_ms, bytes(buffer[start : start + bit_map_bytes]))
