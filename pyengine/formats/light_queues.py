"""The further queues of a record: INNER_MULTI_DISPATCH and INNER_MULTI_QUEUE_OFFSET (section 8.6)."""

from __future__ import annotations

from pyengine.formats.constants import (
    MULTI_DISPATCH_SEPARATOR,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_SEPARATOR,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from pyengine.formats.message import Message

LIGHT_QUEUE_PREFIX = "%LMQ%"
_QUEUE_OFFSET_MAX = 2**63 - 1
_NOT_QUEUED = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)


def further_places(message: Message) -> list[tuple[str, int, int]]:
    """(topic, queue id, queue offset) of each further entry of a record, in its order; empty without any.

    None at all where names and offsets are not equally many, as in RocketMQ; a pair that
    names nothing is passed over.
    """
    names = _pieces(message.properties.get(PROPERTY_INNER_MULTI_DISPATCH))
    numbers = _pieces(message.properties.get(PROPERTY_INNER_MULTI_QUEUE_OFFSET))
    if len(names) != len(numbers) or message.transaction_type in _NOT_QUEUED:
        return []
    return [(name, 0 if name.startswith(LIGHT_QUEUE_PREFIX) else message.queue_id, int(number))
            for name, number in zip(names, numbers) if name and _is_offset(number)]


def belongs_to(message: Message, topic: str, queue_id: int) -> bool:
    """Whether the record has a place in this queue: its own, or a further one."""
    if message.topic == topic and message.queue_id == queue_id:
        return True
    return any(place[:2] == (topic, queue_id) for place in further_places(message))


def with_further_offsets(raw_properties: str, offsets: list[int]) -> str:
    """The property text with other offsets of the further places."""
    name = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01"
    numbers = MULTI_DISPATCH_SEPARATOR.join(map(str, offsets))
    return PROPERTY_SEPARATOR.join(
        name + numbers if piece.startswith(name) else piece for piece in raw_properties.split(PROPERTY_SEPARATOR))


def _pieces(text: str | None) -> list[str]:
    """As Java's split counts them: empty ones at the end are none."""
    pieces = (text or "").split(MULTI_DISPATCH_SEPARATOR)
    while pieces and not pieces[-1]:
        pieces.pop()
    return pieces


def _is_offset(number: str) -> bool:
    return number.isascii() and number.isdigit() and len(number) <= 19 and int(number) <= _QUEUE_OFFSET_MAX
