"""What a position of the commit log holds; the checks, in this order (csrc/record.c has the same).

    range_end        fewer than 8 bytes are left: no header fits
    zeroes           never written: the normal end of the log
    blank            the filler that closes a segment
    foreign          random bytes, or a record of which only the second half was written
    overrun          a size that exceeds the available bytes: garbage, or a short range
    torn             lengths that do not add up: a crash inside a write
    offset_mismatch  a whole record with another offset: stale bytes
    bad_crc          the body differs from what was written
    bad_text         topic or properties hold NULs or are not UTF-8: a page that was lost
    message          everything else: a whole record

RocketMQ knows message and blank and stops at everything else (CommitLog.checkMessageAndReturnSize); it looks
neither at the text nor at the record's own offset.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from pyengine.formats.constants import BLANK_MAGIC, MESSAGE_MAGIC, Readable
from pyengine.formats.record import (
    BEGIN,
    BODY_CRC_AT,
    HEAD_BY_FLAGS,
    I32,
    I64,
    PHYSICAL_OFFSET_AT,
    SYS_FLAG_AT,
    V6_FLAGS,
    Message,
    body_crc,
    computed_size,
    decode_record,
    total_size,
)


class CaseLabel(enum.StrEnum):
    """The labels above."""

    MESSAGE = "message"
    BLANK = "blank"
    ZEROES = "zeroes"
    RANGE_END = "range_end"
    FOREIGN = "foreign"
    OVERRUN = "overrun"
    TORN = "torn"
    OFFSET_MISMATCH = "offset_mismatch"
    BAD_CRC = "bad_crc"
    BAD_TEXT = "bad_text"


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


class WalkResult(NamedTuple):
    """The result of a walk: where it stopped and why, and what it has counted.

    `end_offset` is the physical offset of the first byte after the walked records; a blank is not part of them. `reason`
    is why it stopped. `records` counts the blank, `messages` does not. Store times are -1 without messages.
    """

    end_offset: int
    reason: str
    records: int
    messages: int
    first_store_timestamp_ms: int
    last_store_timestamp_ms: int


def iter_records(view: Readable, base_offset: int, start: int, end: int) -> Iterator[Message | int]:
    """Yield the messages of [start, end), then the total size of a blank that ends them; stop at damage."""
    offset = start
    while (label := classify(view, offset - base_offset, end - offset, check_crc=False)) is CaseLabel.MESSAGE:
        message = decode_record(view, offset - base_offset)
        yield message
        offset += message.size_bytes
    if label is CaseLabel.BLANK:
        yield total_size(view, offset - base_offset)
