"""Messages and bytes by topic (csrc/topic_stats.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyengine._native import ffi, lib
from pyengine.native.layout_error import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_topic_stats

LAYOUT_VERSION: int = lib.MS_TOPIC_STATS_LAYOUT_VERSION


class TopicCount(NamedTuple):
    """What came to one topic since the engine's start."""

    messages: int
    size_bytes: int


def topic_stats_bytes(slots: int) -> int:
    """Size of a table of `slots` (a power of two); three quarters of them are used."""
    return lib.ms_topic_stats_bytes(slots)


def view(memory: Buffer) -> ms_topic_stats:
    """`struct ms_topic_stats *` over a mapping that the caller keeps alive, not yet checked."""
    return ffi.cast("struct ms_topic_stats *", ffi.from_buffer(memory))


def format_topic_stats(stats: ms_topic_stats, slots: int) -> None:
    """Make zeroed memory an empty table; others can attach from here on."""
    lib.ms_topic_stats_format(stats, slots)


def check(stats: ms_topic_stats, mapped_bytes: int) -> None:
    """EngineUnavailableError, naming what is wrong, unless this is a whole table of our layout."""
    raise_layout_error("the statistics by topic", lib.ms_topic_stats_check(stats, mapped_bytes))


def topic_counts(stats: ms_topic_stats) -> dict[str, TopicCount]:
    """By topic, in no order; topics without messages are left out."""
    found = {}
    for number in range(stats.slots):
        slot = stats.slot[number]
        length = lib.ms_load_u32(ffi.addressof(slot, "topic_bytes"))
        if length and slot.messages:
            found[bytes(ffi.buffer(slot.topic, length)).decode("utf-8", "replace")] = TopicCount(slot.messages, slot.bytes)
    return found


def other_topics(stats: ms_topic_stats) -> TopicCount:
    """What came to the topics that found no room in the table."""
    return TopicCount(stats.others.messages, stats.others.bytes)
