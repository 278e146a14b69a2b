"""Messages by key, through the index: as RocketMQ answers, and with the key's text verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pyengine.formats.properties import index_keys
from pyengine.formats.record import Message
from pyengine.storage.index_reader import IndexReader

MessageAt = Callable[[int], Message | None]

RAW_HITS_MAX = 64  # maxMsgsNumBatch
_ROUNDS = 3


class RawHits(NamedTuple):
    """What DefaultMessageStore.queryMessage gives: messages by offset, one for each entry; had the index any at all?"""

    messages: list[Message]
    has_entries: bool


def query_verified(
    index: IndexReader, message_at: MessageAt, topic: str, key: str, begin_ms: int, end_ms: int, messages_max: int
) -> list[Message]:
    """The newest messages of `topic` that carry `key`, each once, oldest first."""
    found: dict[int, Message] = {}

    def accept(offset: int) -> bool:
        if offset in found:
            return False
        message = message_at(offset)
        if message is None or message.topic != topic or key not in index_keys(message.properties):
            return False
        found[offset] = message
        return True

    index.select_offsets(topic, key, messages_max, begin_ms, end_ms, accept)
    return [found[offset] for offset in sorted(found)]


def query_raw(
    index: IndexReader, message_at: MessageAt, topic: str, key: str, begin_ms: int, end_ms: int, messages_max: int
) -> RawHits:
    """RocketMQ's own answer: at most 64 hits by hash, of other keys with the same hash too, doubles kept.

    When none of the entries leads to a message that is still there it asks again, up to
    three times, for those before the oldest one.
    """
    has_entries = False
    for _ in range(_ROUNDS):
        offsets = sorted(index.select_offsets(topic, key, min(messages_max, RAW_HITS_MAX), begin_ms, end_ms))
        if not offsets:
            break
        has_entries = True
        messages = [message for offset in offsets if (message := message_at(offset)) is not None]
        if messages:
            return RawHits(messages, True)
        if end_ms < begin_ms:
            break
    return RawHits([], has_entries)
