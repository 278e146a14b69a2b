"""What a delayed message becomes when its time has come (ScheduleMessageService.messageTimeup).

Body, flag, sysFlag, born time, hosts and reconsume times are kept. Topic and queue are
the real ones again, the prepared offset is 0, the store does not wait for the disk. The
property text is made anew from what a reader understands of it, in the order of the
broker's map, and still holds DELAY, REAL_TOPIC and REAL_QID: only SCHEDULE_TOPIC_XXXX
interprets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyengine.formats.constants import (
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SCHEDULE_TOPIC,
    TRANSACTION_HALF_TOPIC,
)
from pyengine.formats.java_hash import hash_map_order
from pyengine.formats.message import Message
from pyengine.formats.properties import encode_properties

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
