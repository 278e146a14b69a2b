"""Consume queues: 20 bytes per message of a queue (section 8), units of the extension (section 9), light queues (section 8.6).

Entry k is at byte 20 k of the queue, across its files. The properties INNER_MULTI_DISPATCH and INNER_MULTI_QUEUE_OFFSET
name the further queues of a record.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

from pyengine.arguments import INT64_MAX, INT64_MIN
from pyengine.errors import FormatError
from pyengine.formats import constants
from pyengine.formats.record import Message

ENTRY = struct.Struct(">qiq")


class ConsumeQueueEntry(NamedTuple):
    """Where one message of a queue lies in the commit log."""

    physical_offset: int
    size_bytes: int
    tags_code: int


FILLER = ConsumeQueueEntry(0, constants.CQ_FILLER_SIZE, 0)
FILLER_BYTES = ENTRY.pack(*FILLER)


def unpack_entry(buffer: constants.Readable, at: int = 0) -> ConsumeQueueEntry:
    """Return the entry at byte `at`; FormatError if there are fewer than 20 bytes."""
    try:
        return ConsumeQueueEntry._make(ENTRY.unpack_from(buffer, at))
    except struct.error as error:
        raise FormatError(f"no whole queue entry at byte {at}: {error}") from error


def is_filler(entry: tuple[int, int, int]) -> bool:
    """Return whether this is a filler entry, as in front of a queue that does not start at 0 (section 8.3)."""
    return entry[0] == 0 and entry[1] == constants.CQ_FILLER_SIZE


def is_live(entry: tuple[int, int, int]) -> bool:
    """Return whether recovery takes this as an entry: filler counts, zeros end the data."""
    return entry[0] >= 0 and entry[1] > 0


def is_ext_address(tags_code: int) -> bool:
    """Return whether the tags code is an address in the consume queue extension (section 9)."""
    return tags_code <= constants.CQ_EXT_ADDRESS_MAX


_UNIT_HEAD = struct.Struct(">hqqh")


class ConsumeQueueExtUnit(NamedTuple):
    """The data of one queue entry in the extension."""

    size_bytes: int
    tags_code: int
    store_timestamp_ms: int
    filter_bit_map: bytes


def decode_ext_address(tags_code: int) -> int:
    """Return the byte offset in the extension that a tags code names; FormatError if it names none."""
    if not is_ext_address(tags_code):
        raise FormatError(f"tags code {tags_code} is not an extension address")
    return tags_code - INT64_MIN


def unpack_ext_unit(buffer: constants.Readable, at: int = 0) -> ConsumeQueueExtUnit | None:
    """Return the unit at byte `at`, or None at the end of the file's data; FormatError if its sizes disagree."""
    if at + 2 > len(buffer):
        return None
    size_bytes = int.from_bytes(buffer[at : at + 2], "big", signed=True)
    if size_bytes < 1:
        return None
    if size_bytes < constants.CQ_EXT_UNIT_BYTES_MIN or at + size_bytes > len(buffer):
        raise FormatError(f"an extension unit of {size_bytes} bytes at byte {at} does not fit")
    _, tags_code, store_timestamp_ms, bit_map_bytes = _UNIT_HEAD.unpack_from(buffer, at)
    start = at + constants.CQ_EXT_UNIT_BYTES_MIN
    if bit_map_bytes < 0 or constants.CQ_EXT_UNIT_BYTES_MIN + bit_map_bytes > size_bytes:
        raise FormatError(f"the filter bit map of the extension unit at byte {at} does not fit")
    return ConsumeQueueExtUnit(size_bytes, tags_code, store_timestamp_ms, bytes(buffer[start : start + bit_map_bytes]))


NOT_QUEUED = (constants.SYS_FLAG_TRANSACTION_PREPARED, constants.SYS_FLAG_TRANSACTION_ROLLBACK)
_OFFSETS = f"{constants.PROPERTY_INNER_MULTI_QUEUE_OFFSET}\x01".encode()


class FurtherPlace(NamedTuple):
    """A record's entry in a further queue; `number` is the position of its name, empty names included."""

    number: int
    topic: str
    queue_id: int
    queue_offset: int


def further_places(message: Message) -> list[FurtherPlace]:
    """Return the further entries of a record, in its order.

    As in RocketMQ, there are none if the numbers of names and offsets differ, and an empty name or a wrong offset is skipped.
    """
    names = _pieces(message.properties.get(constants.PROPERTY_INNER_MULTI_DISPATCH))
    offsets = _pieces(message.properties.get(constants.PROPERTY_INNER_MULTI_QUEUE_OFFSET))
    if len(names) != len(offsets) or message.transaction_type in NOT_QUEUED:
        return []
    return [FurtherPlace(number, name, constants.LMQ_QUEUE_ID if name.startswith(constants.LMQ_PREFIX) else message.queue_id, int(offset))
            for number, (name, offset) in enumerate(zip(names, offsets)) if name and _is_offset(offset)]


def further_offset(message: Message, topic: str, queue_id: int) -> int | None:
    """Return the queue offset of the record's further entry in this queue, None if it has none.

    If the record names the queue twice, the first offset counts: RocketMQ then makes one entry and skips an offset. A
    RocketMQ whose settings do not enable light queues puts their entries under the record's own queue id.
    """
    return next((place.queue_offset for place in further_places(message)
                 if place.topic == topic and queue_id in (place.queue_id, message.queue_id)), None)


def belongs_to(message: Message, topic: str, queue_id: int) -> bool:
    """Return whether the record has an entry in this queue, its own or a further one."""
    is_own = message.topic == topic and message.queue_id == queue_id
    return is_own or further_offset(message, topic, queue_id) is not None


def with_further_offsets(raw_properties: bytes, offsets: Mapping[int, int]) -> bytes:
    """Return the property bytes with new offsets of the further entries, given by the number of the entry."""
    pieces = raw_properties.split(constants.PROPERTY_SEPARATOR.encode())
    comma = constants.MULTI_DISPATCH_SEPARATOR.encode()
    for at, piece in enumerate(pieces):
        if piece.startswith(_OFFSETS):
            texts = piece[len(_OFFSETS) :].split(comma)
            pieces[at] = _OFFSETS + comma.join(
                b"%d" % offsets[number] if number in offsets else text for number, text in enumerate(texts))
    return constants.PROPERTY_SEPARATOR.encode().join(pieces)


def _pieces(text: str | None) -> list[str]:
    """Split as Java does: without empty pieces at the end."""
    pieces = (text or "").split(constants.MULTI_DISPATCH_SEPARATOR)
    while pieces and not pieces[-1]:
        pieces.pop()
    return pieces


def _is_offset(number: str) -> bool:
    return number.isascii() and number.isdigit() and len(number) <= 19 and int(number) <= INT64_MAX
