"""Delayed messages: the table of levels, and what a message becomes when it is due (section 8.2).

A queue entry of a delayed message holds the delivery time instead of a tag hash. On delivery
(ScheduleMessageService.messageTimeup) body, flag, sysFlag, born time, hosts and reconsume times are
kept. Topic and queue are the real ones again, the prepared offset is 0, the store does not wait for
the disk. The property text is made anew from what a reader understands of it, in the order of the
broker's map, and still holds DELAY, REAL_TOPIC and REAL_QID: only SCHEDULE_TOPIC_XXXX interprets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.errors import ConfigError
from pyengine.formats.constants import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC, SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC
from pyengine.formats.properties import encode_properties, hash_map_order
from pyengine.formats.record import Message

DEFAULT_MESSAGE_DELAY_LEVEL = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
UNKNOWN_LEVEL_DELAY_MS = 1000  # ScheduleMessageService.computeDeliverTimestamp
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_delay_levels(text: str) -> dict[int, int]:
    """Level, counted from 1 -> delay in ms. ConfigError names the piece that is wrong."""
    levels: dict[int, int] = {}
    for level, piece in enumerate(text.split(" "), start=1):
        unit_ms = _UNIT_MS.get(piece[-1:])
        if unit_ms is None or not piece[:-1].isascii() or not piece[:-1].isdigit():
            raise ConfigError(f"message_delay_level: {piece!r} is no delay; write a number and s, m, h or d: 30s")
        levels[level] = int(piece[:-1]) * unit_ms
    return levels


_INT32_MAX = 0x7FFFFFFF
_QUEUE_DIGITS_MAX = 10


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a delayed message goes, and its new property text."""

    topic: str
    queue_id: int
    properties_text: str


def delivery_of(message: Message) -> Delivery | str:
    """Its delivery, or a sentence why it can never have one."""
    properties = message.properties
    topic = properties.get(PROPERTY_REAL_TOPIC)
    queue_text = properties.get(PROPERTY_REAL_QUEUE_ID, "")
    if not topic:
        return f"it names no {PROPERTY_REAL_TOPIC}"
    if topic in (TRANSACTION_HALF_TOPIC, SCHEDULE_TOPIC):
        return f"{topic} takes no delayed messages"
    queue_id = _queue_id(queue_text)
    if queue_id is None:
        return f"{PROPERTY_REAL_QUEUE_ID} {queue_text[:32]!r} is no queue"
    return Delivery(topic, queue_id, encode_properties({name: properties[name] for name in hash_map_order(properties)}))


def _queue_id(text: str) -> int | None:
    """The queue that a text of any length names; int() itself refuses very long ones with an error."""
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return int(digits) if len(digits) <= _QUEUE_DIGITS_MAX and int(digits) <= _INT32_MAX else None
