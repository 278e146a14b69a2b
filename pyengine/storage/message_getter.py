"""RocketMQ's getMessage on one queue, its subscriptions (FilterAPI, DefaultMessageFilter), and the statistics of a reader.

Readers map the store read-only and do not report to the engine, so the figures of StoreStatsService's gets are
those of one reader in one process.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyengine import arguments
from pyengine._front import read_queue, read_records, use_message
from pyengine.arguments import INT64_MAX
from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import belongs_to
from pyengine.formats.paths import segment_name
from pyengine.formats.record import I64, Message, decode_host, java_trim, string_hash
from pyengine.formats.sql_filter import SqlFilter
from pyengine.results import GetRecords, GetResult, GetStatus
from pyengine.storage.consume_queue import ConsumeQueue, QueueEntries
from pyengine.storage.mapped_file import MappedFileQueue

use_message(Message, decode_host)  # read_queue returns Messages whose fields are decoded at their first use
SUB_ALL = "*"
TAG_SEPARATOR = "||"
_LOG = logging.getLogger("pyengine.storage.message_getter")
SHORT_CHARS = 2048  # of a condition, which takes 400 KB at most
_SQL_CHARACTERS = re.compile(r"""[\s=<>()'"]""", re.ASCII)


class TagFilter(NamedTuple):
    """The wanted tags and their 32-bit hashes. The hash in the queue entry is compared first, then the text of the tag."""

    tags: frozenset[str]
    codes: bytes


@functools.lru_cache(maxsize=8)  # a MB each at most
def filter_by_tags(tags: tuple[str, ...]) -> TagFilter:
    """Return the filter for messages with one of these different tags."""
    return TagFilter(frozenset(tags), struct.pack(f"={len(tags)}i", *map(string_hash, tags)))


def parse_subscription(text: str | None) -> TagFilter | None:
    """Parse `a || b`; None, empty or `*` means no filter. UsageError if a tag is empty, or the text is SQL."""
    if text is None or arguments.text(text, "tags") in ("", SUB_ALL):
        return None
    return _tag_filter(text)


@functools.lru_cache(maxsize=8)  # a MB each at most
def _tag_filter(text: str) -> TagFilter:
    tags = frozenset(java_trim(piece) for piece in text.split(TAG_SEPARATOR))
    if "" in tags:
        raise UsageError(f"no tag in a part of {text!r}: write tags like 'a || b', or '*' for all")
    if len(tags) == 1 and re.search(r"[,|]", text):
        _LOG.warning("%r is one tag: write several tags like 'a || b'", text)
    if any(map(_SQL_CHARACTERS.search, tags)):
        raise UsageError(f"{text!r} is not a list of tags: write tags like 'a || b'; an SQL92 condition, also one on TAGS, goes into sql")
    return filter_by_tags(tuple(tags))


_short_condition = functools.lru_cache(maxsize=64)(SqlFilter)
_long_condition = functools.lru_cache(maxsize=8)(SqlFilter)  # 3 MB each at most


def parse_condition(sql: str | None, *, ignores_rest: bool = False) -> SqlFilter | None:
    """Parse an SQL92 condition, as SqlFilter does; None for None or an empty text. UsageError says where the text is wrong."""
    if sql is None or not arguments.text(sql, "sql").strip():
        return None
    return (_short_condition if len(sql) <= SHORT_CHARS else _long_condition)(sql, ignores_rest=ignores_rest)


class Wanted(NamedTuple):
    """The filter of a get: messages that have one of the tags and meet the condition."""

    tags: TagFilter | None = None
    condition: SqlFilter | None = None

    @classmethod
    def of(cls, tags: str | None, sql: str | None) -> Wanted:
        """Make it from a subscription and an SQL92 condition, each None for all messages. UsageError for a wrong one."""
        return cls(parse_subscription(tags), parse_condition(sql))

    @property
    def number(self) -> int:
        """Return a number of 32 bits, not 0, that another filter has only by chance."""
        tags = sorted(self.tags.tags) if self.tags is not None else None
        return zlib.crc32(repr((tags, self.condition and self.condition.text.strip())).encode()) or 1


@dataclass(frozen=True, slots=True)
class GetFigures:
    """Totals since the reader was opened; StoreStatsService's names in comments."""

    found: int = 0                 # getMessageTimesTotalFound
    missed: int = 0                # getMessageTimesTotalMiss
    transferred_messages: int = 0  # getMessageTransferedMsgCount
    transferred_bytes: int = 0
    entire_time_max_ms: float = 0.0  # getMessageEntireTimeMax


class GetStatistics:
    """The counters of one reader: `figures`, which each count replaces. Threads may share it."""

    def __init__(self) -> None:
        self._lock = arguments.inherited_lock()  # a signal handler in a thread that has it may read
        self.figures = GetFigures()

    def count(self, result: GetResult | GetRecords, took_ns: int) -> None:
        """Count one get_message or get_records by its result."""
        found = result.status is GetStatus.FOUND
        if isinstance(result, GetRecords):
            messages, size_bytes = result.message_count, len(result.records)
        else:
            messages, size_bytes = len(result.messages), sum(message.size_bytes for message in result.messages)
        with self._lock:
            was = self.figures
            self.figures = GetFigures(
                was.found + found, was.missed + (not found), was.transferred_messages + messages,
                was.transferred_bytes + size_bytes, max(was.entire_time_max_ms, took_ns / 1e6))


NEAR_BYTES_MAX = 1 << 30  # before the log's end; records() reads only there, so that it does not wait for a disk
ENTRIES_WALKED_MIN = 800  # least number of entries that one call may filter (16,000 bytes of entries)


class _Outside(NamedTuple):
    """An offset at which a queue has no entry."""

    status: GetStatus
    next_offset: int


TransferLimits = tuple[int, int, int, int]  # bytes and messages of one answer from memory, the same from disk


class MessageGetter:
    """Gets of one store: the log, and the transfer limits. With `passes_gaps` missing segments are stepped over as in RocketMQ."""

    def __init__(self, commit_log: MappedFileQueue, config: EngineConfig, passes_gaps: bool = True) -> None:
        self._log = commit_log
        self._passes_gaps = passes_gaps
        physical_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._in_memory_bytes = physical_memory_bytes * config.access_message_in_memory_max_ratio // 100
        self._near_bytes = min(NEAR_BYTES_MAX, self._in_memory_bytes)
        self.transfer_limits = (
            config.max_transfer_bytes_on_message_in_memory_bytes,
            config.max_transfer_count_on_message_in_memory,
            config.max_transfer_bytes_on_message_in_disk_bytes,
            config.max_transfer_count_on_message_in_disk,
        )

    def get(self, entries: QueueEntries, offset: int, messages_max: int, wanted: Wanted,
            transfer_limits: TransferLimits | None = None) -> GetResult:
        """Get messages of a queue. `transfer_limits`: by default, those of the settings."""
        _, _, min_offset, max_offset = entries
        bounds = _bounds(entries, offset)
        if isinstance(bounds, _Outside):
            return GetResult(bounds.status, [], bounds.next_offset, min_offset, max_offset)
        status, messages, numbers, walked = read_queue(
            *self._arguments(entries, bounds, offset, messages_max, wanted.tags, transfer_limits or self.transfer_limits))
        status = GetStatus(status)
        if messages and messages[0].physical_offset < (log_min := self._log.min_offset):
            # The segment was deleted during the read: its file was unlinked first, then emptied.
            messages, numbers = _filtered(messages, numbers, lambda message: message.physical_offset >= log_min)
            status = GetStatus.FOUND if messages else GetStatus.MESSAGE_WAS_REMOVING
        if messages and (condition := wanted.condition):
            messages, numbers = _filtered(messages, numbers, lambda message: condition.matches(message.properties))
            status = GetStatus.FOUND if messages else GetStatus.NO_MATCHED_MESSAGE
        return GetResult(status, messages, offset + walked, min_offset, max_offset, numbers)

    def records(self, entries: QueueEntries, offset: int, messages_max: int, tag_filter: TagFilter | None,
                near_bytes: int | None) -> GetRecords | None:
        """Like get(), without a condition, with the records as they are in the log; None if the caller must use get().

        The caller must if the first message is farther than `near_bytes` from the log's end (None: what is assumed to be in memory,
        NEAR_BYTES_MAX at most), or was deleted during the read.
        """
        _, limit, min_offset, max_offset = entries
        bounds = _bounds(entries, offset)
        if isinstance(bounds, _Outside):
            return GetRecords(bounds.status, b"", 0, bounds.next_offset, min_offset, max_offset)
        if limit - I64.unpack_from(bounds[0], bounds[1])[0] > (self._near_bytes if near_bytes is None else near_bytes):
            return None
        status, records, count, walked, first_offset = read_records(
            *self._arguments(entries, bounds, offset, messages_max, tag_filter, self.transfer_limits))
        if count and first_offset < self._log.min_offset:
            return None
        return GetRecords(GetStatus(status), records, count, offset + walked, min_offset, max_offset)

    def _arguments(
        self, entries: QueueEntries, span: tuple[mmap.mmap, int, int], offset: int, messages_max: int, tag_filter: TagFilter | None,
        transfer_limits: TransferLimits,
    ) -> tuple[Any, ...]:
        """Return the arguments for read_queue and read_records."""
        view, first, end = span
        end = min(end, first + CQ_ENTRY_BYTES * max(ENTRIES_WALKED_MIN, messages_max))
        tags, codes = (None, b"") if tag_filter is None else tag_filter
        queue, limits = entries.queue, (entries.limit, self._in_memory_bytes, *transfer_limits)
        return (view, first, end, offset, messages_max, queue.topic, queue.queue_id, limits, codes, tags,
                functools.partial(self._segment, entries.limit), functools.partial(_tags_code, queue), belongs_to)

    def _segment(self, limit: int, physical_offset: int) -> tuple[int, int, mmap.mmap | None]:
        """Return (start, end, bytes) of the segment that contains the offset; bytes are None if it was deleted.

        CorruptionError for a gap: one below `limit` when older ones exist, or none at all, is not deleted, but in a folder not read here.
        """
        size_bytes = self._log.size_bytes
        start = physical_offset - physical_offset % size_bytes
        view = self._log.view(start) if self._log.start_of(physical_offset) is not None else None
        if view is None and not self._passes_gaps and self._log.min_offset <= physical_offset < limit:
            raise CorruptionError(f"the log's segment {segment_name(start)} is in none of the folders that are read here: is a disk not "
                                  "mounted, or has store_path_commit_log changed since this reader was opened?")
        return start, min(start + size_bytes, INT64_MAX), view


def _bounds(entries: QueueEntries, offset: int) -> tuple[mmap.mmap, int, int] | _Outside:
    """Return where in a file the queue's entries from the offset on are, or the result if there is no entry."""
    queue, _, min_offset, max_offset = entries
    if offset < min_offset:
        return _Outside(GetStatus.OFFSET_TOO_SMALL, min_offset)
    if offset == max_offset:
        return _Outside(GetStatus.OFFSET_OVERFLOW_ONE, offset)
    if offset > max_offset:
        return _Outside(GetStatus.OFFSET_OVERFLOW_BADLY, max_offset)
    return queue.span(offset, max_offset) or _Outside(GetStatus.OFFSET_FOUND_NULL, queue.next_file_offset(offset))


def _filtered(messages: list[Message], numbers: list[int], keep: Callable[[Message], bool]) -> tuple[list[Message], list[int]]:
    pairs = [pair for pair in zip(messages, numbers, strict=True) if keep(pair[0])]
    return [message for message, _ in pairs], [number for _, number in pairs]


def _tags_code(queue: ConsumeQueue, address: int) -> int | None:
    """Return the tags code of the extension's unit at this address; None if it does not exist."""
    unit = queue.ext_unit(address)
    return None if unit is None else unit.tags_code
