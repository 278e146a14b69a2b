"""A walk over the records of one segment, record by record: the oracle of the C walker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pyengine.errors import UsageError
from pyengine.formats.message import Message, decode_record, total_size
from pyengine.formats.record_case import CaseLabel, Decision, classify


class WalkResult(NamedTuple):
    """Where a walk ended, and what it passed.

    `end_offset` is the whole-log offset of the first byte that is not part of a passed
    record: for a blank the blank's own start. `reason` is why it went no further.
    `records` counts the blank, `messages` does not. Store times are -1 without messages.
    """

    end_offset: int
    reason: str
    records: int
    messages: int
    first_store_timestamp_ms: int
    last_store_timestamp_ms: int


def walk(
    view, base_offset: int, start: int, end: int, *, check_crc: bool = True, strict: bool = False
) -> WalkResult:
    """Walk the records in [start, end), whole-log offsets inside the segment that `view` holds from `base_offset` on.

    Raises UsageError when the range does not lie inside the segment.
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


def iter_records(view, base_offset: int, start: int, end: int) -> Iterator[Message | int]:
    """The messages of [start, end), then, if a blank closes them, its total size as a number. Stops at damage."""
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
