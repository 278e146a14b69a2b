"""Offset message ids: store host bytes and physical offset as upper-case hex (section 5)."""

from __future__ import annotations

import struct

from pyengine.errors import FormatError
from pyengine.formats.hosts import HOST_V4_BYTES, HOST_V6_BYTES, decode_host, encode_host

_OFFSET = struct.Struct(">q")


def encode_message_id(store_host: str, physical_offset: int) -> str:
    """32 (IPv4) or 56 (IPv6) upper-case hex characters."""
    return (encode_host(store_host) + _OFFSET.pack(physical_offset)).hex().upper()


def decode_message_id(msg_id: str) -> tuple[str, int]:
    """(store host, physical offset); FormatError when the text is no offset id."""
    try:
        data = bytes.fromhex(msg_id)
    except ValueError as error:
        raise FormatError(f"{msg_id!r} is no message id: it must be hexadecimal") from error
    host_bytes = len(data) - _OFFSET.size
    if len(msg_id) != 2 * len(data) or host_bytes not in (HOST_V4_BYTES, HOST_V6_BYTES):
        raise FormatError(f"{msg_id!r} is no message id: it must have 32 or 56 characters")
    (physical_offset,) = _OFFSET.unpack_from(data, host_bytes)
    if physical_offset < 0:
        raise FormatError(f"{msg_id!r} is no message id: its offset {physical_offset} is negative")
    return decode_host(data[:host_bytes]), physical_offset
