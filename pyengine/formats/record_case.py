"""What a position of the commit log holds: one table, one row for every state.

    label            likely cause
    message          a whole record
    blank            the filler that closes a segment
    zeroes           never written: the normal end of the log
    range_end        fewer than 8 bytes are left: no header fits
    foreign          random bytes, or a record of which only the second half was written
    overrun          a size that exceeds the available bytes: garbage, or a short range
    torn             lengths that do not add up: a crash inside a write
    offset_mismatch  a whole record with another offset: stale bytes
    bad_crc          the body differs from what was written
    bad_text         topic or properties hold NULs or are not UTF-8: a page that was lost

RocketMQ knows message and blank and stops at everything else
(CommitLog.checkMessageAndReturnSize); it looks neither at the text nor at the
record's own offset. The C walker gives the same labels as its reasons.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyengine.errors import UsageError
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
    computed_size,
    decode_record,
    total_size,
)


class CaseLabel(enum.StrEnum):
    """The rows of RECORD_CASES."""

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


class Decision(enum.Enum):
    """What a walk over the log does next."""

    KEEP = "keep"
    NEXT_FILE = "next_file"
    STOP = "stop"


class Magic(enum.Enum):
    """The second word of the record."""

    MISSING = "missing"  # fewer than 8 bytes are left
    ZERO = "zero"
    MESSAGE = "message"
    BLANK = "blank"
    OTHER = "other"


class Size(enum.Enum):
    """Whether the total-size field agrees with the available bytes and with the record's own lengths."""

    FITS = "fits"
    TOO_BIG = "too_big"
    DISAGREES = "disagrees"


class Place(enum.Enum):
    """Whether the record's physical-offset field agrees with its position; OWN if the position is unknown."""

    OWN = "own"
    OTHER = "other"


class Crc(enum.Enum):
    """Whether the body has its CRC; GOOD if not checked or if the body is empty, as in RocketMQ."""

    GOOD = "good"
    BAD = "bad"


class Text(enum.Enum):
    """Whether topic and properties are valid text; CLEAN if not checked."""

    CLEAN = "clean"
    DIRTY = "dirty"


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; None stands for any value."""

    label: CaseLabel
    magic: Magic
    size: Size | None
    place: Place | None
    crc: Crc | None
    text: Text | None
    decision: Decision

    def matches(self, magic: Magic, size: Size, place: Place, crc: Crc, text: Text) -> bool:
        return (
            self.magic is magic
            and self.size in (None, size)
            and self.place in (None, place)
            and self.crc in (None, crc)
            and self.text in (None, text)
        )


_ANY = None
RECORD_CASES = (
    #    label                       magic          size            place        crc       text        decision
    Case(CaseLabel.MESSAGE,          Magic.MESSAGE, Size.FITS,      Place.OWN,   Crc.GOOD, Text.CLEAN, Decision.KEEP),
    Case(CaseLabel.BLANK,            Magic.BLANK,   _ANY,           _ANY,        _ANY,     _ANY,       Decision.NEXT_FILE),
    Case(CaseLabel.ZEROES,           Magic.ZERO,    _ANY,           _ANY,        _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.RANGE_END,        Magic.MISSING, _ANY,           _ANY,        _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.FOREIGN,          Magic.OTHER,   _ANY,           _ANY,        _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.OVERRUN,          Magic.MESSAGE, Size.TOO_BIG,   _ANY,        _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.TORN,             Magic.MESSAGE, Size.DISAGREES, _ANY,        _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.OFFSET_MISMATCH,  Magic.MESSAGE, Size.FITS,      Place.OTHER, _ANY,     _ANY,       Decision.STOP),
    Case(CaseLabel.BAD_CRC,          Magic.MESSAGE, Size.FITS,      Place.OWN,   Crc.BAD,  _ANY,       Decision.STOP),
    Case(CaseLabel.BAD_TEXT,         Magic.MESSAGE, Size.FITS,      Place.OWN,   Crc.GOOD, Text.DIRTY, Decision.STOP),
)


def classify(
    buffer: Readable, at: int, room: int, physical_offset: int | None = None, *, check_crc: bool = True, strict: bool = False
) -> Case:
    """Return the one row of RECORD_CASES for the bytes at `at`, of which it reads `room` at most.

    `physical_offset` is the offset of that byte in the whole log (None: not checked). `strict` also checks the text, for
    bytes of which a power cut may have lost pages. No content raises an exception; `at + room` must lie inside the buffer.
    """
    return find_case(*_state(buffer, at, room, physical_offset, check_crc, strict))


def find_case(magic: Magic, size: Size, place: Place, crc: Crc, text: Text) -> Case:
    """Return the row for a state; a test proves that exactly one row matches each state."""
    return next(case for case in RECORD_CASES if case.matches(magic, size, place, crc, text))


def _state(
    buffer: Readable, at: int, room: int, physical_offset: int | None, check_crc: bool, strict: bool
) -> tuple[Magic, Size, Place, Crc, Text]:
    magic, size, place, crc, text = Magic.MISSING, Size.DISAGREES, Place.OWN, Crc.GOOD, Text.CLEAN
    if room < BEGIN.size:
        return magic, size, place, crc, text
    size_bytes, magic_number = BEGIN.unpack_from(buffer, at)
    magic = _MAGIC_BY_NUMBER.get(magic_number, Magic.OTHER)
    if magic is Magic.ZERO and size_bytes != 0:
        magic = Magic.OTHER
    if magic is not Magic.MESSAGE:
        return magic, size, place, crc, text
    if size_bytes > room:
        return magic, Size.TOO_BIG, place, crc, text
    if size_bytes != computed_size(buffer, at, min(room, max(size_bytes, 0))):
        return magic, size, place, crc, text
    size = Size.FITS
    if physical_offset is not None and I64.unpack_from(buffer, at + PHYSICAL_OFFSET_AT)[0] != physical_offset:
        place = Place.OTHER
    (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
    body_at = at + HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
    (body_bytes,) = I32.unpack_from(buffer, body_at - 4)
    topic_at = body_at + body_bytes + 1
    if check_crc and body_bytes > 0:
        (stored_crc,) = I32.unpack_from(buffer, at + BODY_CRC_AT)
        if zlib.crc32(buffer[body_at : topic_at - 1]) & 0x7FFFFFFF != stored_crc:
            crc = Crc.BAD
    if strict:
        topic_end = topic_at + buffer[topic_at - 1]
        if not (_is_clean(buffer[topic_at:topic_end]) and _is_clean(buffer[topic_end + 2 : at + size_bytes])):
            text = Text.DIRTY
    return magic, size, place, crc, text


_MAGIC_BY_NUMBER = {0: Magic.ZERO, MESSAGE_MAGIC: Magic.MESSAGE, BLANK_MAGIC: Magic.BLANK}


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


def walk(
    view: Readable, base_offset: int, start: int, end: int, *, check_crc: bool = True, strict: bool = False
) -> WalkResult:
    """Walk the records in [start, end), physical offsets in the segment that `view` holds from `base_offset` on.

    UsageError if the range does not lie inside the segment.
    """
    if not base_offset <= start <= end <= base_offset + len(view):
        raise UsageError(f"[{start}, {end}) does not lie in the segment at {base_offset} of {len(view)} bytes")
    offset, messages, first_ms, last_ms = start, 0, -1, -1
    while True:
        case = classify(view, offset - base_offset, end - offset, offset, check_crc=check_crc, strict=strict)
        if case.decision is not Decision.KEEP:
            blanks = 1 if case.label is CaseLabel.BLANK else 0
            return WalkResult(offset, str(case.label), messages + blanks, messages, first_ms, last_ms)
        message = decode_record(view, offset - base_offset)
        last_ms = message.store_timestamp_ms
        first_ms = last_ms if messages == 0 else first_ms
        messages += 1
        offset += message.size_bytes


def iter_records(view: Readable, base_offset: int, start: int, end: int) -> Iterator[Message | int]:
    """Yield the messages of [start, end), then the total size of a blank that ends them; stop at damage."""
    offset = start
    while True:
        case = classify(view, offset - base_offset, end - offset, None, check_crc=False)
        if case.decision is Decision.NEXT_FILE:
            yield total_size(view, offset - base_offset)
        if case.decision is not Decision.KEEP:
            return
        message = decode_record(view, offset - base_offset)
        yield message
        offset += message.size_bytes
