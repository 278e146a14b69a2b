"""The further queues of a record: INNER_MULTI_DISPATCH and INNER_MULTI_QUEUE_OFFSET (section 8.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyengine.formats.constants import (
    LMQ_PREFIX,
    LMQ_QUEUE_ID,
    MULTI_DISPATCH_SEPARATOR,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    PROPERTY_SEPARATOR,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from pyengine.formats.message import Message

NOT_QUEUED = (SYS_FLAG_TRANSACTION_PREPARED, SYS_FLAG_TRANSACTION_ROLLBACK)
_QUEUE_OFFSET_MAX = 2**63 - 1
_OFFSETS = f"{PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()


class FurtherPlace(NamedTuple):
    """`number`: which of the names it is, those that name nothing counted."""

    number: int
    topic: str
    queue_id: int
    queue_offset: int


def further_places(message: Message) -> list[FurtherPlace]:
    """The further entries of a record, in its order; empty without any.

    None at all where names and offsets are not equally many, as in RocketMQ; a pair that
    names nothing is passed over.
    """
    names = _pieces(message.properties.get(PROPERTY_INNER_MULTI_DISPATCH))
    offsets = _pieces(message.properties.get(PROPERTY_INNER_MULTI_QUEUE_OFFSET))
    if len(names) != len(offsets) or message.transaction_type in NOT_QUEUED:
        return []
    return [FurtherPlace(number, name, LMQ_QUEUE_ID if name.startswith(LMQ_PREFIX) else message.queue_id, int(offset))
            for number, (name, offset) in enumerate(zip(names, offsets)) if name and _is_offset(offset)]


def further_offset(message: Message, topic: str, queue_id: int) -> int | None:
    """The number of the record's further place in this queue, None without one.

    The first of them where it names the queue twice: RocketMQ makes one entry then, and passes over a number. It puts
    a light queue's entry under the record's own queue id where its settings do not know light queues.
    """
    return next((place.queue_offset for place in further_places(message)
                 if place.topic == topic and queue_id in (place.queue_id, message.queue_id)), None)


def belongs_to(message: Message, topic: str, queue_id: int) -> bool:
    """Whether the record has a place in this queue: its own, or a further one."""
    is_own = message.topic == topic and message.queue_id == queue_id
    return is_own or further_offset(message, topic, queue_id) is not None


def with_further_offsets(raw_properties: bytes, offsets: Mapping[int, int]) -> bytes:
    """The property bytes, untouched but for the offsets of the further places: by the number of the place."""
    separator = PROPERTY_SEPARATOR.encode()
    return separator.join(_with_offsets(piece, offsets) if piece.startswith(_OFFSETS) else piece
                          for piece in raw_properties.split(separator))


def _with_offsets(piece: bytes, offsets: Mapping[int, int]) -> bytes:
    separator = MULTI_DISPATCH_SEPARATOR.encode()
    texts = piece[len(_OFFSETS) :].split(separator)
    return _OFFSETS + separator.join(b"%d" % offsets[number] if number in offsets else text for number, text in enumerate(texts))


def _pieces(text: str | None) -> list[str]:
    """As Java's split counts them: empty ones at the end are none."""
    pieces = (text or "").split(MULTI_DISPATCH_SEPARATOR)
    while pieces and not pieces[-1]:
        pieces.pop()
    return pieces


def _is_offset(number: str) -> bool:
    return number.isascii() and number.isdigit() and len(number) <= 19 and int(number) <= _QUEUE_OFFSET_MAX
