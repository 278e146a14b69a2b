"""Records for tests: bytes of the commit log from the few fields that a test is about."""

from __future__ import annotations

from typing import Any

from pyengine.formats.record import Message, encode_message


def encode_record(*, topic: str, body: bytes, properties: str = "", queue_id: int = 0, queue_offset: int = 0,
                  physical_offset: int = 0, **fields: Any) -> bytes:
    """The bytes of a record; `properties` is the raw property text, `fields` are others of Message."""
    return encode_message(Message(topic, body, queue_id, queue_offset, physical_offset, 0, properties, **fields))
