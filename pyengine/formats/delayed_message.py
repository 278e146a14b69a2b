"""Delayed messages: the table of levels, and what a message becomes when it is due (section 8.2).

A queue entry of a delayed message holds the delivery time instead of a tag hash. On delivery (ScheduleMessageService.messageTimeup) the
message gets its real topic and queue and the prepared offset 0; the store does not wait for the disk. The property text is encoded again
in the order of the broker's map. It still holds DELAY, REAL_TOPIC and REAL_QID, which have a meaning only in SCHEDULE_TOPIC_XXXX.

A message with a delivery time of its own (`deliver_at`) waits in one delay level after another until that time. Its REAL_TOPIC is
TIMER_TOPIC; properties of pyengine name its real topic, queue and time. So a RocketMQ broker that runs on the store does not deliver it
early: the broker moves it to TIMER_TOPIC, where pyengine's scheduler finds it later.

Its name is where its first record is and when that was stored (DelayedId). Each later record has that in a property, which has the
same length in the first one, so that a message which can be put can also be moved.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyengine.arguments import INT32_MAX, INT64_MAX
from pyengine.errors import ConfigError, FormatError
from pyengine.formats.constants import (
    MULTI_DISPATCH_NAMES,
    PROPERTY_DELAY,
    PROPERTY_DELIVER_AT,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_SEPARATOR,
    PROPERTY_TIMED_FIRST,
    PROPERTY_TIMED_QUEUE_ID,
    PROPERTY_TIMED_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANSACTION_DISCARD_TOPIC,
    TRANSACTION_HALF_TOPIC,
    TRANSACTION_OP_TOPIC,
)
from pyengine.formats.record import Message, encode_properties, hash_map_order
from pyengine.settings import UNITS

DEFAULT_MESSAGE_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
UNKNOWN_LEVEL_DELAY_MS = 1000  # ScheduleMessageService.computeDeliverTimestamp
DELIVER_AT_DAYS_MAX = 40
# As RocketMQ 5 looks at them: the first one counts. Property -> (its unit in ms, whether it counts from now on).
TIMER_PROPERTIES = {PROPERTY_TIMER_DELAY_SEC: (1000, True), PROPERTY_TIMER_DELAY_MS: (1, True), PROPERTY_TIMER_DELIVER_MS: (1, False)}
_JAVA_LONG = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
LATE_MS_MAX = 1000  # how late a message with a delivery time of its own may be, if a level fits
_NO_TARGETS = frozenset(("", TIMER_TOPIC, SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC, TRANSACTION_OP_TOPIC, TRANSACTION_DISCARD_TOPIC))
_OF_LEVEL = {PROPERTY_DELAY, PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID}
OF_TIMED = (PROPERTY_DELIVER_AT, PROPERTY_TIMED_TOPIC, PROPERTY_TIMED_QUEUE_ID, PROPERTY_TIMED_FIRST)
_FIRST = re.compile(r"([0-9]{19})-([0-9]{13})", re.ASCII)
_TIME_DIGITS_MAX = 19
_QUEUE_DIGITS_MAX = 10
_DELAY_DAYS_MAX = 1_000_000  # so that a delivery time fits into a queue entry


@functools.lru_cache(maxsize=8)
def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delays of level 1, 2, ... in ms from RocketMQ's notation `1s 5s 1m`; ConfigError names the piece that is wrong."""
    levels = []
    for piece in text.split():
        number, unit_ms = piece[:-1], UNITS["ms"].get(piece[-1], 0)
        if not (unit_ms and number.isascii() and number.isdecimal() and len(number) < 16
                and int(number) * unit_ms <= _DELAY_DAYS_MAX * UNITS["ms"]["d"]):
            raise ConfigError(f"message_delay_level: {piece!r} is not a delay: give numbers with s, m, h or d, as in '1s 5m', of "
                              f"{_DELAY_DAYS_MAX:,} days at most")
        levels.append(int(number) * unit_ms)
    if not levels:
        raise ConfigError("message_delay_level is empty: give at least one delay, as in '1s 5m'")
    return tuple(levels)


DEFAULT_DELAYS_MS = parse_delay_levels(DEFAULT_MESSAGE_DELAY_LEVEL)


def wait_level(left_ms: int, delays_ms: Sequence[int]) -> int:
    """Return the delay level in which a message waits that is due in `left_ms`.

    It is the shortest level that is not early and at most LATE_MS_MAX late; else the longest that is early; else the
    shortest of all.
    """
    levels = [(delay_ms, level) for level, delay_ms in enumerate(delays_ms, start=1)]
    reaching = [each for each in levels if left_ms <= each[0] <= left_ms + LATE_MS_MAX]
    shorter = [each for each in levels if each[0] <= left_ms]
    return (min(reaching) if reaching else max(shorter) if shorter else min(levels))[1]


def timer_time_ms(properties: Mapping[str, str], now_ms: int) -> int | None:
    """Return when a message is delivered that a client of RocketMQ 5 sends with these properties; None for at once.

    A message that such a broker has delivered already names the time, and does not wait again. FormatError says why RocketMQ 5, or
    this engine, refuses the message. RocketMQ 5: HookUtils.transformTimerMessage.
    """
    name = next((name for name in TIMER_PROPERTIES if name in properties), None)
    if name is None or PROPERTY_TIMER_OUT_MS in properties:
        return None
    if PROPERTY_TIMER_DEL_UNIQKEY in properties:
        raise FormatError(f"{PROPERTY_TIMER_DEL_UNIQKEY}: a delayed message cannot be taken back here")
    unit_ms, is_from_now = TIMER_PROPERTIES[name]
    if not _JAVA_LONG.fullmatch(properties[name]):
        raise FormatError(f"{name} is {properties[name][:32]!r}: give a whole number")
    time_ms = int(properties[name]) * unit_ms + (now_ms if is_from_now else 0)
    if time_ms > now_ms + DELIVER_AT_DAYS_MAX * UNITS["ms"]["d"]:
        raise FormatError(f"{name} is {properties[name]}: more than {DELIVER_AT_DAYS_MAX} days ahead")
    return time_ms if time_ms > now_ms else None


class DelayedId(NamedTuple):
    """The name of a delayed message: the physical offset and the store time of its first record."""

    physical_offset: int
    store_timestamp_ms: int

    @classmethod
    def of(cls, message: Message) -> DelayedId:
        """Return the name of the message that this record is one of."""
        found = _FIRST.fullmatch(message.properties.get(PROPERTY_TIMED_FIRST, ""))
        named = cls(0, 0) if found is None else cls(int(found[1]), int(found[2]))
        return named if any(named) else cls(message.physical_offset, message.store_timestamp_ms)

    @property
    def text(self) -> str:
        """The property of its records; with zeros in the first one, which does not know its place when it is put."""
        return f"{self.physical_offset:019d}-{self.store_timestamp_ms:013d}"


class DelayMark(NamedTuple):
    """The mark that cancels a delayed message: its name, and the record that was waiting then.

    `due_ms` is its own delivery time, 0 if it has none: then only the record in the queue of `level` at `queue_offset` delivers it.
    """

    physical_offset: int
    store_timestamp_ms: int
    level: int
    queue_offset: int
    due_ms: int

    @classmethod
    def of(cls, message: Message) -> DelayMark | str:
        """Return the mark of the message that this record is one of, or a sentence why it cannot be cancelled."""
        if message.topic != SCHEDULE_TOPIC:
            return f"it is no delayed message, it is in {message.topic}"
        due_ms = 0
        if message.properties.get(PROPERTY_REAL_TOPIC) == TIMER_TOPIC:
            due_ms = max(1, _number(message.properties.get(PROPERTY_DELIVER_AT, ""), _TIME_DIGITS_MAX, INT64_MAX) or 0)
            if not _FIRST.fullmatch(message.properties.get(PROPERTY_TIMED_FIRST, "")):
                return f"it has no {PROPERTY_TIMED_FIRST}: an earlier version has put it"
        return cls(*DelayedId.of(message), message.queue_id + 1, message.queue_offset, due_ms)

    @classmethod
    def from_fields(cls, fields: Any) -> DelayMark:
        """Return the mark with these fields; one of PARSE_ERRORS for others."""
        mark = cls(**fields)
        for number in mark:
            if type(number) is not int or not 0 <= number <= INT64_MAX:
                raise ValueError(fields)
        return mark

    @property
    def id(self) -> DelayedId:
        return DelayedId(self.physical_offset, self.store_timestamp_ms)


def timed_properties(properties_text: str, topic: str, queue_id: int, deliver_at_ms: int) -> str:
    """Return the property text of a message that waits for its own delivery time."""
    own = {PROPERTY_DELIVER_AT: str(deliver_at_ms), PROPERTY_TIMED_TOPIC: topic, PROPERTY_TIMED_QUEUE_ID: str(queue_id),
           PROPERTY_TIMED_FIRST: DelayedId(0, 0).text}
    added = encode_properties(own)
    return f"{properties_text}{PROPERTY_SEPARATOR}{added}" if properties_text else added


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a delayed message goes: topic, queue, new property text, and the delay level if it must wait again."""

    topic: str
    queue_id: int
    properties_text: str
    delay_level: int = 0


def delivery_of(message: Message, now_ms: int = 0, delays_ms: Sequence[int] = ()) -> Delivery | str:
    """Return the message's delivery, or a sentence why it can never be delivered.

    From `now_ms` and the delays of the levels follows whether a message with a time of its own must wait again.
    """
    properties = message.properties
    topic = properties.get(PROPERTY_REAL_TOPIC)
    queue_text = properties.get(PROPERTY_REAL_QUEUE_ID, "")
    if not topic:
        return f"it names no {PROPERTY_REAL_TOPIC}"
    if topic == TIMER_TOPIC:
        return _timed_delivery(message, now_ms, delays_ms)
    if topic in (TRANSACTION_HALF_TOPIC, SCHEDULE_TOPIC):
        return f"{topic} takes no delayed messages"
    queue_id = _queue_id(queue_text)
    if queue_id is None:
        return f"{PROPERTY_REAL_QUEUE_ID} {queue_text[:32]!r} is not a queue"
    return Delivery(topic, queue_id, encode_properties({
        name: properties[name] for name in hash_map_order(properties) if name not in MULTI_DISPATCH_NAMES}))


def _timed_delivery(message: Message, now_ms: int, delays_ms: Sequence[int]) -> Delivery | str:
    properties = message.properties
    topic = properties.get(PROPERTY_TIMED_TOPIC, "")
    queue_id = _queue_id(properties.get(PROPERTY_TIMED_QUEUE_ID, ""))
    deliver_at_ms = _number(properties.get(PROPERTY_DELIVER_AT, ""), _TIME_DIGITS_MAX, INT64_MAX)
    if topic in _NO_TARGETS or queue_id is None or deliver_at_ms is None:
        return f"it does not say which topic, which queue and when ({PROPERTY_DELIVER_AT})"
    rest = {name: properties[name] for name in hash_map_order(properties) if name not in _OF_LEVEL | MULTI_DISPATCH_NAMES}
    if deliver_at_ms > now_ms:
        if PROPERTY_TIMED_FIRST in rest:  # of an earlier version it may have no room for it
            rest[PROPERTY_TIMED_FIRST] = DelayedId.of(message).text
        return Delivery(TIMER_TOPIC, 0, encode_properties(rest), wait_level(deliver_at_ms - now_ms, delays_ms))
    for name in OF_TIMED:
        rest.pop(name, None)
    return Delivery(topic, queue_id, encode_properties(rest))


def _queue_id(text: str) -> int | None:
    return _number(text, _QUEUE_DIGITS_MAX, INT32_MAX)


def _number(text: str, digits_max: int, most: int) -> int | None:
    """Return the number in a text of any length; int() raises an error for very long ones."""
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= digits_max and int(digits) <= most else None
