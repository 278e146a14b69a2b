"""Records for tests: bytes of the commit log from the few fields that a test is about, and a walk over them in Python."""

from __future__ import annotations

import struct
from typing import Any

from pyengine.formats.constants import CQ_EXT_UNIT_BYTES_MIN
from pyengine.formats.record import Message, decode_record, encode_message
from pyengine.formats.record_case import CaseLabel, WalkResult, classify


def encode_record(*, topic: str, body: bytes, properties: str = "", queue_id: int = 0, queue_offset: int = 0,
                  physical_offset: int = 0, **fields: Any) -> bytes:
    """The bytes of a record; `properties` is the raw property text, `fields` are others of Message."""
    return encode_message(Message(topic, body, queue_id, queue_offset, physical_offset, 0, properties, **fields))


def encode_ext_address(offset: int) -> int:
    """The tags code that names a byte offset of the queue's extension."""
    return offset - (1 << 63)


def pack_ext_unit(tags_code: int, store_timestamp_ms: int, filter_bit_map: bytes = b"") -> bytes:
    """The bytes of the extension's unit."""
    size_bytes = CQ_EXT_UNIT_BYTES_MIN + len(filter_bit_map)
    return struct.pack(">hqqh", size_bytes, tags_code, store_timestamp_ms, len(filter_bit_map)) + filter_bit_map


def walk_in_python(view: bytes | bytearray, base_offset: int, start: int, end: int, **checks: bool) -> WalkResult:
    """Return what native.scan.walk gives, by formats.record_case."""
    offset, times_ms = start, []
    while (label := classify(view, offset - base_offset, end - offset, offset, **checks)) is CaseLabel.MESSAGE:
        message = decode_record(view, offset - base_offset)
        times_ms.append(message.store_timestamp_ms)
        offset += message.size_bytes
    first_ms, last_ms = (times_ms[0], times_ms[-1]) if times_ms else (-1, -1)
    return WalkResult(offset, str(label), len(times_ms) + (label is CaseLabel.BLANK), len(times_ms), first_ms, last_ms)
