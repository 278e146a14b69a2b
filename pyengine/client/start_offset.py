"""Where a group starts in a queue: at its first message, behind its last, at a time, or at an offset."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine.storage.store_reader import StoreReader


@dataclass(frozen=True, slots=True)
class AtOffset:
    """The same offset in every queue; a plain number is a time."""

    offset: int


Start = Literal["first", "last"] | int | datetime | AtOffset


def check_start(start: Start) -> Start:
    """`start` itself; UsageError for what is none."""
    if start in ("first", "last") or (type(start) is int and start >= 0) or isinstance(start, AtOffset):
        return start
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise UsageError(f"{start.isoformat()} has no time zone: give one, for example datetime.UTC")
        return start
    raise UsageError(f"{start!r} is no place to start: give 'first', 'last', a time in ms or a datetime")


def start_offset(reader: StoreReader, topic: str, queue_id: int, start: Start) -> int:
    """The first offset to read, within the queue. At a time: that of the first message stored then or later, the
    end if there is none."""
    low, high = reader.queue_range(topic, queue_id)
    if start == "first":
        return low
    if start == "last":
        return high
    if isinstance(start, AtOffset):
        return min(max(start.offset, low), high)
    return first_at_or_after(reader, topic, queue_id, _ms(start))


def first_at_or_after(reader: StoreReader, topic: str, queue_id: int, timestamp_ms: int) -> int:
    """Offset of the queue's first message with a store time of `timestamp_ms` or later; its end if there is none.

    RocketMQ's own look-up gives the nearest message, and any one among several of the
    same millisecond: a reader that starts there may leave some out.
    """
    low, high = reader.queue_range(topic, queue_id)
    while low < high:
        middle = (low + high) // 2
        found = reader.get_message(topic, queue_id, middle, 1).messages
        if found and found[0].store_timestamp_ms >= timestamp_ms:
            high = middle
        else:  # older, or just removed, which the oldest are
            low = middle + 1
    return low


def _ms(start: int | datetime) -> int:
    return int(start.timestamp() * 1000) if isinstance(start, datetime) else start
