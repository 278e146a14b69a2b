"""RocketMQ's getMessage on one queue, its subscriptions (FilterAPI, DefaultMessageFilter), and what one reader has read.

Readers map the store read-only and tell the engine nothing, so the figures of StoreStatsService's gets are
those of one reader in one process; no process adds them up. A consumer group's progress shows in its stored
offsets.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from typing import NamedTuple

from pyengine import arguments
from pyengine.engine_config import EngineConfig
from pyengine.errors import FormatError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_FILLER_SIZE
from pyengine.formats.consume_queue import ENTRY, belongs_to, is_ext_address
from pyengine.formats.properties import string_hash
from pyengine.formats.record import Message, decode_record
from pyengine.results import GetResult, GetStatus
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.mapped_file import MappedFileQueue

SUB_ALL = "*"
TAG_SEPARATOR = "||"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """The wanted tags and their hashes. The hash is looked at first, in the queue entry; then the text."""

    tags: frozenset[str]
    codes: frozenset[int]

    def matches_code(self, tags_code: int | None) -> bool:
        """By the queue entry's code, of which 32 bits count; None (unknown) matches."""
        return tags_code is None or _to_int(tags_code) in self.codes

    def matches_text(self, tags: str | None) -> bool:
        return tags in self.tags


def parse_subscription(text: str | None) -> TagFilter | None:
    """`a || b`: those tags; None, empty or `*`: no filter. UsageError when one side of a bar is empty."""
    if text is None or arguments.text(text, "tags") in ("", SUB_ALL):
        return None
    tags = frozenset(piece.strip() for piece in text.split(TAG_SEPARATOR))
    if "" in tags:
        raise UsageError(f"no tag in a part of {text!r}: write tags like 'a || b', or '*' for all")
    return TagFilter(tags, frozenset(map(string_hash, tags)))


def _to_int(value: int) -> int:
    """Java's narrowing of a long to an int."""
    value &= 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x80000000 else value


@dataclass(frozen=True, slots=True)
class GetFigures:
    """Totals since the reader was opened; StoreStatsService's names in comments."""

    found: int = 0                 # getMessageTimesTotalFound
    missed: int = 0                # getMessageTimesTotalMiss
    transferred_messages: int = 0  # getMessageTransferedMsgCount
    transferred_bytes: int = 0
    entire_time_max_ms: float = 0.0  # getMessageEntireTimeMax


class GetStatistics:
    """The counters of one reader. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = GetFigures()

    def count(self, result: GetResult, took_ns: int) -> None:
        """One get_message and its answer."""
        found = result.status is GetStatus.FOUND
        size_bytes = sum(message.size_bytes for message in result.messages)
        with self._lock:
            was = self._figures
            self._figures = GetFigures(
                was.found + found, was.missed + (not found), was.transferred_messages + len(result.messages),
                was.transferred_bytes + size_bytes, max(was.entire_time_max_ms, took_ns / 1e6))

    @property
    def figures(self) -> GetFigures:
        """All of them at one moment."""
        return self._figures


ENTRIES_WALKED_MIN = 800  # a filter may reject as many in one call (16,000 bytes of entries)


class MessageGetter:
    """Gets of one store: the log, and the transfer limits."""

    def __init__(self, commit_log: MappedFileQueue, config: EngineConfig) -> None:
        self._log = commit_log
        physical_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._in_memory_bytes = physical_memory_bytes * config.access_message_in_memory_max_ratio // 100
        self._limits_in_memory = (
            config.max_transfer_bytes_on_message_in_memory_bytes,
            config.max_transfer_count_on_message_in_memory,
        )
        self._limits_on_disk = (
            config.max_transfer_bytes_on_message_in_disk_bytes,
            config.max_transfer_count_on_message_in_disk,
        )

    def get(
        self,
        queue: ConsumeQueue,
        offset: int,
        messages_max: int,
        tag_filter: TagFilter | None,
        limit: int,
        min_offset: int,
        max_offset: int,
    ) -> GetResult:
        """The answer for a queue that reaches from `min_offset` to `max_offset` > 0, of a log that ends at `limit`."""
        if offset < min_offset:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, [], min_offset, min_offset, max_offset)
        if offset == max_offset:
            return GetResult(GetStatus.OFFSET_OVERFLOW_ONE, [], offset, min_offset, max_offset)
        if offset > max_offset:
            return GetResult(GetStatus.OFFSET_OVERFLOW_BADLY, [], max_offset, min_offset, max_offset)
        span = queue.span(offset, max_offset)
        if span is None:
            next_offset = queue.next_file_offset(offset)
            return GetResult(GetStatus.OFFSET_FOUND_NULL, [], next_offset, min_offset, max_offset)
        status, messages, numbers, walked = self._walk(queue, span, messages_max, tag_filter, limit)
        if messages and messages[0].physical_offset < (log_min := self._log.min_offset):
            # Deleted while it was read: the file was unlinked first, then emptied.
            kept = [pair for pair in zip(messages, numbers) if pair[0].physical_offset >= log_min]
            messages, numbers = [message for message, _ in kept], [number for _, number in kept]
            status = GetStatus.FOUND if messages else GetStatus.MESSAGE_WAS_REMOVING
        return GetResult(status, messages, offset + walked, min_offset, max_offset, [offset + number for number in numbers])

    def _walk(
        self, queue: ConsumeQueue, span: tuple[mmap.mmap, int, int], messages_max: int, tag_filter: TagFilter | None, limit: int
    ) -> tuple[GetStatus, list[Message], list[int], int]:
        """(status, messages, the entry of each, entries walked over)."""
        view, first, end = span
        end = min(end, first + CQ_ENTRY_BYTES * max(ENTRIES_WALKED_MIN, messages_max))
        status = GetStatus.NO_MATCHED_MESSAGE
        messages: list[Message] = []
        numbers: list[int] = []
        total_bytes = 0
        skip_below = -1
        segment = _NO_SEGMENT
        at = first
        for at in range(first, end, CQ_ENTRY_BYTES):
            physical_offset, size_bytes, tags_code = ENTRY.unpack_from(view, at)
            if physical_offset < skip_below:
                continue
            if messages:
                bytes_max, count_max = (
                    self._limits_on_disk if limit - physical_offset > self._in_memory_bytes else self._limits_in_memory
                )
                if (
                    len(messages) >= messages_max
                    or len(messages) >= count_max
                    or total_bytes + size_bytes > bytes_max
                ):
                    break
            if tag_filter is not None and not tag_filter.matches_code(_tags_code(queue, tags_code)):
                if not messages:
                    status = GetStatus.NO_MATCHED_MESSAGE
                continue
            if not segment.start <= physical_offset < segment.end:
                segment = self._segment(physical_offset)
            message = _message(queue, segment, physical_offset, size_bytes)
            if message is None:
                if not messages:
                    status = GetStatus.MESSAGE_WAS_REMOVING
                if segment.view is None and size_bytes != CQ_FILLER_SIZE:
                    skip_below = segment.end  # the whole file is gone: its other messages need no look
                continue
            if tag_filter is not None and not tag_filter.matches_text(message.tags):
                if not messages:
                    status = GetStatus.NO_MATCHED_MESSAGE
                continue
            messages.append(message)
            numbers.append((at - first) // CQ_ENTRY_BYTES)
            total_bytes += size_bytes
            status = GetStatus.FOUND
            skip_below = -1
        else:
            at = end
        return status, messages, numbers, (at - first) // CQ_ENTRY_BYTES

    def _segment(self, physical_offset: int) -> _Segment:
        """The segment that holds the offset; without a view when it is gone."""
        size_bytes = self._log.size_bytes
        start = physical_offset - physical_offset % size_bytes
        view = self._log.view(start) if self._log.start_of(physical_offset) is not None else None
        return _Segment(start, start + size_bytes, view)


class _Segment(NamedTuple):
    start: int
    end: int
    view: mmap.mmap | None


_NO_SEGMENT = _Segment(0, 0, None)


def _message(queue: ConsumeQueue, segment: _Segment, physical_offset: int, size_bytes: int) -> Message | None:
    """The record of an entry; None when it is gone, emptied, not what the entry says, or another queue's."""
    if segment.view is None:
        return None
    try:
        message = decode_record(segment.view, physical_offset - segment.start)
    except FormatError:
        return None
    is_it = (message.physical_offset == physical_offset and message.size_bytes == size_bytes
             and belongs_to(message, queue.topic, queue.queue_id))
    return message if is_it else None


def _tags_code(queue: ConsumeQueue, tags_code: int) -> int | None:
    """The entry's tags code, looked up in the extension if it names a unit there; None when it is unknown."""
    if not is_ext_address(tags_code):
        return tags_code
    unit = queue.ext_unit(tags_code)
    return None if unit is None else unit.tags_code
