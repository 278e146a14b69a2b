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
    if not (queue_text.isascii() and queue_text.isdigit() and int(queue_text) <= _INT32_MAX):
        return f"{PROPERTY_REAL_QUEUE_ID} {queue_text!r} is no queue"
    return Delivery(topic, int(queue_text), encode_properties({name: properties[name] for name in hash_map_order(properties)}))
