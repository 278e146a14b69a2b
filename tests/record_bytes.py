"""Records for tests: bytes of the commit log from the few fields that a test is about; and what bytes are, by Python alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from pyengine.formats.constants import BLANK_MAGIC, CQ_EXT_UNIT_BYTES_MIN, MESSAGE_MAGIC, TOPIC_BYTES_MAX, Readable
from pyengine.formats.record import (
    BEGIN,
    BODY_CRC_AT,
    HEAD_BY_FLAGS,
    I16,
    I32,
    I64,
    PHYSICAL_OFFSET_AT,
    SYS_FLAG_AT,
    V6_FLAGS,
    CaseLabel,
    Message,
    WalkResult,
    body_crc,
    decode_record,
    encode_message,
    total_size,
)


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
    """Return what native.scan.walk gives."""
    offset, times_ms = start, []
    while (label := classify(view, offset - base_offset, end - offset, offset, **checks)) is CaseLabel.MESSAGE:
        message = decode_record(view, offset - base_offset)
        times_ms.append(message.store_timestamp_ms)
        offset += message.size_bytes
    first_ms, last_ms = (times_ms[0], times_ms[-1]) if times_ms else (-1, -1)
    return WalkResult(offset, str(label), len(times_ms) + (label is CaseLabel.BLANK), len(times_ms), first_ms, last_ms)


def computed_size(buffer: Readable, at: int, room: int) -> int | None:
    """Return the total size that follows from the record's own length fields, or None if one is not a valid length.

    It reads at most `room` bytes from `at` on, and ignores the total-size field.
    """
    if room < SYS_FLAG_AT + 4:
        return None
    (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
    head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
    if head_bytes > room:
        return None
    body_bytes: int = I32.unpack_from(buffer, at + head_bytes - 4)[0]
    topic_length_at = head_bytes + body_bytes
    if body_bytes < 0 or topic_length_at >= room:
        return None
    topic_bytes = buffer[at + topic_length_at]
    properties_length_at = topic_length_at + 1 + topic_bytes
    if topic_bytes > TOPIC_BYTES_MAX or properties_length_at + 2 > room:
        return None
    properties_bytes: int = I16.unpack_from(buffer, at + properties_length_at)[0]
    return None if properties_bytes < 0 else properties_length_at + 2 + properties_bytes


def classify(
    buffer: Readable, at: int, room: int, physical_offset: int | None = None, *, check_crc: bool = True, strict: bool = False
) -> CaseLabel:
    """Return what the bytes at `at` are, of which it reads `room` at most; `at + room` must lie inside the buffer.

    `physical_offset` is the offset of that byte in the whole log (None: not checked). `strict` also checks the text, for
    bytes of which a power cut may have lost pages. No content raises an exception. As in RocketMQ, an empty body has no CRC.
    """
    if room < BEGIN.size:
        return CaseLabel.RANGE_END
    size_bytes, magic = BEGIN.unpack_from(buffer, at)
    if magic == BLANK_MAGIC:
        return CaseLabel.BLANK
    if magic != MESSAGE_MAGIC:
        return CaseLabel.FOREIGN if magic or size_bytes else CaseLabel.ZEROES
    if size_bytes > room:
        return CaseLabel.OVERRUN
    if size_bytes != computed_size(buffer, at, max(size_bytes, 0)):
        return CaseLabel.TORN
    if physical_offset is not None and I64.unpack_from(buffer, at + PHYSICAL_OFFSET_AT)[0] != physical_offset:
        return CaseLabel.OFFSET_MISMATCH
    if check_crc or strict:
        (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
        body_at = at + HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
        (body_bytes,) = I32.unpack_from(buffer, body_at - 4)
        topic_at = body_at + body_bytes + 1
        topic_end = topic_at + buffer[topic_at - 1]
        if check_crc and body_bytes and body_crc(buffer[body_at : topic_at - 1]) != I32.unpack_from(buffer, at + BODY_CRC_AT)[0]:
            return CaseLabel.BAD_CRC
        if strict and not (_is_clean(buffer[topic_at:topic_end]) and _is_clean(buffer[topic_end + 2 : at + size_bytes])):
            return CaseLabel.BAD_TEXT
    return CaseLabel.MESSAGE


def _is_clean(data: Readable) -> bool:
    try:
        return "\0" not in str(data, "utf-8")
    except UnicodeDecodeError:
        return False


def iter_records(view: Readable, base_offset: int, start: int, end: int) -> Iterator[Message | int]:
    """Yield the messages of [start, end), then the total size of a blank that ends them; stop at damage."""
    offset = start
    while (label := classify(view, offset - base_offset, end - offset, check_crc=False)) is CaseLabel.MESSAGE:
        message = decode_record(view, offset - base_offset)
        yield message
        offset += message.size_bytes
    if label is CaseLabel.BLANK:
        yield total_size(view, offset - base_offset)
