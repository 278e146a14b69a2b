"""Read a store: by queue, offset, message id, key and time. It needs no engine and does not write.

    with pyengine.open_store(path) as store:
        result = store.get_message("orders", 0, offset=0, tags="paid || sent")
        for message in result.messages: ...

A reader maps the store's files read-only in its own process, while other processes may use them,
and reads only below the limit of a `Watermark`. Messages that are deleted during a read are left out.
Threads may share a reader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypedDict, Unpack

from pyengine import arguments
from pyengine.arguments import INT32_MAX, INT64_MAX, INT64_MIN
from pyengine.engine_config import EngineSettings
from pyengine.errors import CorruptionError, StoreRefusedError, UsageError, did_you_mean, disk_error, disk_errors, require_extra
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.formats.consume_queue import belongs_to
from pyengine.formats.paths import StorePaths, is_queue_id_name
from pyengine.formats.record import Message, decode_message_id, html_table
from pyengine.formats.small_file import keep_standard_descriptors
from pyengine.results import GetRecords, GetResult, GetStatus, Level, ReadLevel
from pyengine.storage.checkpoint import abort_file_exists, read_watermark
from pyengine.storage.commit_log import CommitLog, message_below, missing_part
from pyengine.storage.config import existing_store, load_config
from pyengine.storage.config_table import QUEUE_NUMS_MAX, TopicConfigs
from pyengine.storage.consume_queue import ConsumeQueue, QueueEntries, log_range, offset_by_time
from pyengine.storage.index_file import RAW_HITS_MAX, IndexService, KeyQuery, query_raw, query_verified
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, folder_names, is_plain_file
from pyengine.storage.message_getter import GetFigures, GetStatistics, MessageGetter, TagFilter, Wanted
from pyengine.storage.read_level import FilesWatermark, StoreUse, Watermark, store_use

if TYPE_CHECKING:
    import pyarrow

    from pyengine.engine_config import EngineConfig, Geometry
    from pyengine.formats.constants import Readable
    from pyengine.native.scan import ChooseQueue
    from pyengine.storage.arrow import LogScanner
    from pyengine.storage.queue_entries import NamedRecords

FETCH_BYTES_MAX = 4 << 20


class ScanChoice(TypedDict, total=False):
    """Rows that meet all of these."""

    queues: Sequence[int] | None
    tags: str | None
    """`a || b`."""
    sql: str | None
    """A condition (docs/consumers.md)."""
    since: datetime | int | None
    """Stored then or later: a datetime with a zone, or ms since 1970."""
    until: datetime | int | None
    """Stored before."""
    from_offsets: Mapping[str, Mapping[int, int]] | None
    """Where queues start: `{"orders": {0: 23}}`."""
    decompress: bool
    """Bodies, of 12 MiB at most, as their producers had them."""
    allow_missing: bool
    """An unknown topic or queue is no error."""


class _Chosen(NamedTuple):
    """The arguments of a scan that choose rows, checked."""

    topics: tuple[str, ...] | None
    queues: list[int] | None
    first_offsets: dict[tuple[str, int], int]
    wanted: Wanted
    since_ms: int
    until_ms: int
    decompress: bool
    allow_missing: bool

    @classmethod
    def of(cls, topics: tuple[str, ...] | None, choice: ScanChoice) -> Self:
        """Check the arguments; TypeError and UsageError for wrong ones."""
        queues, since, until = choice.get("queues"), choice.get("since"), choice.get("until")
        first_offsets = _first_offsets(choice.get("from_offsets") or {}, topics or ())
        for name in ("queues", "from_offsets"):
            if choice.get(name) is not None and topics is None:
                raise UsageError(f"{name} chooses among the queues of topics: name the topics too")
        since_ms = INT64_MIN if since is None else arguments.moment_ms(since, "since")
        until_ms = INT64_MAX if until is None else arguments.moment_ms(until, "until")
        if since_ms > until_ms:
            raise UsageError(f"since ({since_ms} ms) is after until ({until_ms} ms): no message can be stored between them")
        return cls(topics, None if queues is None else arguments.queue_ids(queues), first_offsets,
                   Wanted.of(choice.get("tags"), choice.get("sql")), since_ms, until_ms,
                   arguments.truth(choice.get("decompress", False), "decompress"),
                   arguments.truth(choice.get("allow_missing", False), "allow_missing"))

    def narrowed(self, narrowing: Narrowing) -> tuple[tuple[str, ...] | None, int, int]:
        """Return (tags, start, end of the store times) of the rows that are chosen and that the narrowing does not exclude."""
        tags = None if self.wanted.tags is None else frozenset(self.wanted.tags.tags)
        if tags is None or narrowing.tags is None:
            tags = narrowing.tags if tags is None else tags
        else:
            tags &= narrowing.tags
        since_ms, until_ms = narrowing.since_ms, narrowing.until_ms
        return (None if tags is None else tuple(sorted(tags)), self.since_ms if since_ms is None else max(since_ms, self.since_ms),
                self.until_ms if until_ms is None else min(until_ms, self.until_ms))


class Narrowing(NamedTuple):
    """What a reader of rows knows of those that it wants, beside a ScanChoice: it filters the rows itself, so others are no error."""

    begin: int = 0  # the part [begin, end) of the log; both are ends of records
    end: int = INT64_MAX
    choose: ChooseQueue | None = None
    tags: frozenset[str] | None = None
    since_ms: int | None = None
    until_ms: int | None = None


def _names(names: Iterable[str] | None, what: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    return tuple(arguments.text(name, what.removesuffix("s")) for name in arguments.several(names, what, "a sequence of str"))


def _first_offsets(offsets: Mapping[str, Mapping[int, int]], topics: Collection[str]) -> dict[tuple[str, int], int]:
    found = {}
    for topic, queues in arguments.mapping(offsets, "from_offsets").items():
        if arguments.text(topic, "a topic of from_offsets") not in topics:
            raise UsageError(f"from_offsets names {topic!r}, which is not among topics{did_you_mean(topic, topics)}")
        for queue_id, offset in arguments.mapping(queues, f"from_offsets[{topic!r}]").items():
            arguments.queue_ids([queue_id])
            if not 0 <= arguments.integer(offset, "an offset of from_offsets") <= INT64_MAX:
                raise UsageError(f"from_offsets[{topic!r}][{queue_id}] is {offset}: give an offset of the queue, 0 or more")
            found[topic, int(queue_id)] = int(offset)
    return found


class StoreReader(arguments.AsyncBlock, arguments.Closing):
    """Reads a store by queue, offset, message id, key and time. A context manager; threads may share it."""

    _passes_gaps = True

    def __init__(
        self, root: str | os.PathLike[str], *, watermark: Watermark | None = None, config: EngineConfig | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self.root = Path(root).absolute()  # it stays the same store when the program changes its directory
        keep_standard_descriptors()
        existing_store(self.root)
        self.config: EngineConfig = config or load_config(self.root, settings)
        self.geometry: Geometry = self.config.geometry
        self._paths = StorePaths(self.root)
        # Texts, not Paths: a store has thousands of queues, and making a Path costs more than listing a folder.
        self._consume_queue, self._consume_queue_ext = str(self._paths.consume_queue), str(self._paths.consume_queue_ext)
        self._cache = MappingCache()
        self.commit_log = CommitLog(self.root, self.geometry.mapped_file_size_commit_log_bytes, self._cache)
        self._watermark = watermark or FilesWatermark(self.root, self.commit_log)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._with_files: set[str] = set()  # folders of queues that had files
        self.index = IndexService(self._paths.index, self.geometry.index_layout)
        self._use_settings(self.config)
        self._gets = GetStatistics()
        self._is_open = True

    def _use_settings(self, config: EngineConfig) -> None:
        """Get with the limits of these settings from now on."""
        self.config = config
        self.getter = MessageGetter(self.commit_log, config, self._passes_gaps)

    @property
    def name(self) -> Path:
        """The path of the store, for people."""
        return self.root

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.name)!r}{'' if self._is_open else ', closed'})"

    def _repr_html_(self) -> str | None:
        if not self._is_open:
            return None
        rows = ((topic, number, *self.queue_range(topic, number)) for topic, numbers in self.topics().items() for number in numbers)
        return html_table(repr(self), ("topic", "queue", "first", "end"), rows)

    @property
    def default_level(self) -> ReadLevel:
        """`flushed` in sync mode, else `committed`."""
        return ReadLevel.FLUSHED if self.config.flush_disk_type == "SYNC_FLUSH" else ReadLevel.COMMITTED

    @property
    def min_physical_offset(self) -> int:
        """-1 for an empty log."""
        self._require_open()
        return self.commit_log.min_offset

    def max_physical_offset(self, level: Level | None = None) -> int:
        """Return the log's end at this level."""
        self._require_open()
        return self._watermark.limit(self._level(level))

    def topics(self) -> dict[str, list[int]]:
        """Return topic -> ids of its queues."""
        return self._topics()

    def _topics(self, is_wanted: Callable[[str], object] = bool) -> dict[str, list[int]]:
        """Return the same of the topics that are wanted; the folders of the others are not listed."""
        self._require_open()
        found = ((topic, self._queue_ids(topic)) for topic in folder_names(self._consume_queue) if is_wanted(topic))
        return {topic: ids for topic, ids in found if ids}

    def queue_ids(self, topic: str) -> list[int]:
        """Return the ids of the topic's queues."""
        self._require_open()
        is_topic = arguments.is_folder_name(arguments.text(topic, "topic")) and _is_folder(os.path.join(self._consume_queue, topic))
        return self._queue_ids(topic) if is_topic else []

    def queue_range(self, topic: str, queue_id: int, level: Level | None = None) -> tuple[int, int]:
        """Return (first offset, offset after the last)."""
        entries = self._entries(topic, queue_id, level)
        return (0, 0) if entries is None else (entries.min_offset, entries.max_offset)

    def queue_end(self, topic: str, queue_id: int) -> int:
        """Return the offset after the queue's last entry, at any level."""
        queue = self._queue(topic, queue_id)
        return 0 if queue is None else queue.max_offset(self.max_physical_offset(ReadLevel.WRITTEN))

    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        tags: str | None = None,
        level: Level | None = None,
        sql: str | None = None,
    ) -> GetResult:
        """Return messages of one queue from `offset` on. RocketMQ: getMessage.

        Up to `max_messages` of one queue file, within the transfer limits (32, or 256 KiB). Continue at `next_begin_offset`,
        whatever the status.
        """
        if arguments.integer(max_messages, "max_messages") < 1:
            raise UsageError(f"max_messages is {max_messages}; ask for at least one")
        return self._fetch(topic, queue_id, offset, min(max_messages, INT32_MAX), Wanted.of(tags, sql), level)

    def _get_records(self, topic: str, queue_id: int, offset: int, max_messages: int, tag_filter: TagFilter | None,
                    level: Level | None, near_bytes: int | None) -> GetRecords | None:
        """Like get_message(), with the records as they are in the log, for a gateway; None if the caller must use get_message().

        That is so if the messages are more than `near_bytes` before the log's end (None: what is assumed to be in memory,
        NEAR_BYTES_MAX at most), so that they may have to be read from the disk, or if they were deleted just now.
        """
        began_ns = time.perf_counter_ns()
        entries = self._entries(topic, queue_id, level)
        if entries is None:
            result: GetRecords | None = GetRecords(GetStatus.NO_MESSAGE_IN_QUEUE)
        else:
            result = self.getter.records(entries, offset, min(max_messages, INT32_MAX), tag_filter, near_bytes)
        if result is not None:
            self._gets.count(result, time.perf_counter_ns() - began_ns)
        return result

    def _fetch(self, topic: str, queue_id: int, offset: int, max_messages: int, wanted: Wanted, level: Level | None,
              bytes_max: int | None = None) -> GetResult:
        """Like get_message(), for a Consumer. `bytes_max`: bound the result by this and `max_messages`, not by the transfer limits."""
        began_ns = time.perf_counter_ns()
        arguments.integer(offset, "offset")
        limits = None if bytes_max is None else (bytes_max, max_messages, bytes_max, max_messages)
        entries = self._entries(topic, queue_id, level)
        result = (GetResult(GetStatus.NO_MESSAGE_IN_QUEUE) if entries is None
                  else self.getter.get(entries, offset, max_messages, wanted, limits))
        self._gets.count(result, time.perf_counter_ns() - began_ns)
        return result

    @property
    def gets(self) -> GetFigures:
        """Of get_message()."""
        return self._gets.figures

    def message_at(self, physical_offset: int, level: Level | None = None) -> Message | None:
        """Return the message that starts at this byte."""
        self._require_open()
        return self._message_below(arguments.integer(physical_offset, "physical_offset"), self._watermark.limit(self._level(level)))

    def message(self, msg_id: str, level: Level | None = None) -> Message | None:
        """Return the message with this id. FormatError."""
        _, physical_offset = decode_message_id(arguments.text(msg_id, "msg_id"))
        message = self.message_at(physical_offset, level)
        return message if message is not None and message.msg_id == msg_id.upper() else None

    def query_message(
        self,
        topic: str,
        key: str,
        begin_ms: int = 0,
        end_ms: int | None = None,
        max_messages: int = RAW_HITS_MAX,
        verify_key: bool = True,
        level: Level | None = None,
        bytes_max: int | None = None,
    ) -> list[Message]:
        """Return messages with `key` (a word of KEYS, or the UNIQ_KEY) by the index, oldest first.

        At most the newest `max_messages`, up to the one that reaches `bytes_max`, with store times from `begin_ms` to `end_ms`.
        `verify_key=False` gives RocketMQ's hits: at most 64, also of other keys, doubled.
        """
        if arguments.integer(max_messages, "max_messages") < 1:
            raise UsageError(f"max_messages is {max_messages}; ask for at least one")
        arguments.text(topic, "topic")
        arguments.text(key, "key")
        arguments.integer(begin_ms, "begin_ms")
        arguments.integer(0 if end_ms is None else end_ms, "end_ms")
        query = KeyQuery(topic, key, max_messages, begin_ms, INT64_MAX if end_ms is None else end_ms)
        if verify_key:
            return self._query(query, level, bytes_max)
        limit = self._queue_limit(level)
        return query_raw(self.index, lambda offset: self._message_below(offset, limit), query)

    def _query(self, query: KeyQuery, level: Level | None, bytes_max: int | None) -> list[Message]:
        limit = self._queue_limit(level)
        return query_verified(self.index, lambda offset: self._message_below(offset, limit), query, bytes_max)

    def offset_by_time(
        self, topic: str, queue_id: int, timestamp_ms: int, level: Level | None = None
    ) -> int:
        """Return the offset with the nearest store time, the older on a tie. RocketMQ: getOffsetInQueueByTime."""
        arguments.integer(timestamp_ms, "timestamp_ms")
        entries = self._entries(topic, queue_id, level)
        return 0 if entries is None else offset_by_time(entries, self.commit_log, timestamp_ms)

    def scan(
        self,
        topics: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        level: Level | None = None,
        **choice: Unpack[ScanChoice],
    ) -> Iterator[pyarrow.RecordBatch]:
        """Return the log as Arrow record batches, in order; needs pyarrow.

        Without `topics` all records; with them what consumers see (docs/arrow.md). UsageError for unknown columns and topics;
        CorruptionError.
        """
        return self._rows("scan", _names(topics, "topics"), _names(columns, "columns"), level, choice)

    def _scan_narrowed(self, topics: Sequence[str] | None, columns: Sequence[str] | None, level: Level | None, choice: ScanChoice,
                      narrowing: Narrowing) -> Iterator[pyarrow.RecordBatch]:
        """Do as scan(), for a dataset: rows that the narrowing excludes may be left out, those outside of its part of the log are."""
        return self._rows("scan", _names(topics, "topics"), _names(columns, "columns"), level, choice, narrowing)

    def to_arrow(
        self,
        topics: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        level: Level | None = None,
        **choice: Unpack[ScanChoice],
    ) -> pyarrow.RecordBatchReader:
        """Return the batches of `scan` as one Arrow stream, read once."""
        names = _names(columns, "columns")
        batches = self._rows("to_arrow", _names(topics, "topics"), names, level, choice)
        from pyengine.storage.arrow import stream

        return stream(names, batches)

    def _named_rows(self, columns: tuple[str, ...] | None, decompress: bool) -> Callable[[Sequence[tuple[int, bytes]]], pyarrow.Table]:
        """Return a function from (physical offset, entry of a consume queue) of messages to a table of their rows, in this order.

        It leaves out messages of deleted segments; CorruptionError for damage. One thread at a time may call it.
        """
        require_extra("pyarrow", name="arrow")
        from pyarrow import Table

        from pyengine.storage.arrow import LogScanner

        scanner = LogScanner(columns, decompress=decompress)
        size_bytes = self.commit_log.size_bytes

        def batches(start: int, entries: bytes) -> Iterator[pyarrow.RecordBatch]:
            view = self.commit_log.view(start)
            if view is not None:
                yield from self._while_there(start, scanner.gather(view, start, entries, start + len(view)))

        def rows(places: Sequence[tuple[int, bytes]]) -> pyarrow.Table:
            by_segment = groupby(places, key=lambda place: place[0] - place[0] % size_bytes)
            found = (batches(start, b"".join(entry for _, entry in group)) for start, group in by_segment)
            return Table.from_batches(chain.from_iterable(found), scanner.schema)

        return rows

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the reader of one queue's entries, None for a queue that does not exist."""
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            return queue
        if not arguments.is_folder_name(arguments.text(topic, "topic")) or arguments.integer(queue_id, "queue_id") < 0:
            return None
        place = topic, str(queue_id)
        folder = os.path.join(self._consume_queue, *place)
        if not _is_folder(folder):
            return None
        return self._queues.setdefault(
            (topic, queue_id),
            ConsumeQueue(
                topic,
                queue_id,
                MappedFileQueue(folder, self.geometry.mapped_file_size_consume_queue_bytes, self._cache),
                MappedFileQueue(os.path.join(self._consume_queue_ext, *place),
                                self.geometry.mapped_file_size_consume_queue_ext_bytes, self._cache),
            ),
        )

    def _message_below(self, physical_offset: int, limit: int) -> Message | None:
        """Return the message that starts at this byte and ends at or below `limit`, None if none does."""
        return message_below(self.commit_log, physical_offset, limit)

    def close(self) -> None:
        """Release all files."""
        self._is_open = False
        self._queues.clear()
        self.index.close()
        self._cache.clear()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def _rows(self, call: str, topics: tuple[str, ...] | None, columns: tuple[str, ...] | None, level: Level | None,
              choice: ScanChoice, narrowing: Narrowing | None = None) -> Iterator[pyarrow.RecordBatch]:
        self._require_open()
        narrowing = narrowing or Narrowing()
        limit = min(self._watermark.limit(self._level(level)), narrowing.end)
        arguments.known_keywords(call, choice, ("topics", "columns", "level", *ScanChoice.__annotations__))
        chosen = _Chosen.of(topics, choice)
        if missing := self._missing_part():
            raise CorruptionError(missing)
        require_extra("pyarrow", name="arrow")
        from pyengine.native.scan import RowFilter, choose_both, choose_topics
        from pyengine.storage.arrow import LogScanner

        choose, begin = narrowing.choose, narrowing.begin
        if chosen.topics is not None:
            self._check_names(chosen.topics, chosen)
            if {(topic, queue_id) for topic in chosen.topics for queue_id in chosen.queues or ()} == chosen.first_offsets.keys():
                start, _ = log_range(self, {queue: (first, INT64_MAX) for queue, first in chosen.first_offsets.items()}, limit)
                begin = max(begin, start)
            choose = choose_both(choose_topics(chosen.topics, chosen.queues, chosen.first_offsets), choose)
        tags, since_ms, until_ms = chosen.narrowed(narrowing)
        row_filter = RowFilter(choose, tags, since_ms, until_ms, queued_only=chosen.topics is not None)
        scanner = LogScanner(columns, row_filter=None if row_filter == RowFilter() else row_filter, condition=chosen.wanted.condition,
                             decompress=chosen.decompress)
        segments = [start for start in self._segments_between(since_ms, until_ms, limit) if start + self.commit_log.size_bytes > begin]
        named = None
        if chosen.topics and choose is not None:
            named = self._find_named(chosen, choose, segments, begin, limit, self._queue_limit(level))
        return self._scan(scanner, begin, limit, segments, named)

    def _missing_part(self) -> str:
        """Return a sentence about a part of the log that seems to be on a disk that is not mounted; "" if there is none."""
        log = self.commit_log
        if not log.has_several_folders:  # the common case needs no look at each segment
            return ""
        segments = [MappedFile(Path(log.path(start)), start) for start in log.starts()]
        use = store_use(self.root)
        return missing_part(self.root, segments, log.size_bytes, is_running=use is not StoreUse.CLOSED, is_noted=use is not StoreUse.OTHER)

    def _find_named(self, chosen: _Chosen, choose: ChooseQueue, segments: Sequence[int], begin: int, limit: int, dispatched: int
                    ) -> NamedRecords | None:
        """Return where consume queues replace a scan of the chosen topics; None if that would not be faster, or may lack messages."""
        if not segments or not self._is_dispatched() or find_spec("numpy") is None:
            return None
        from pyengine.storage.queue_entries import LogPart, find_named, newest_bytes

        keys = [(topic, queue_id) for topic in chosen.topics or () for queue_id in self.queue_ids(topic) if choose(topic, queue_id)]
        queues = {queue: chosen.first_offsets.get(key, 0) for key in keys
                  if (queue := self._queue(*key)) is not None and queue.max_offset(INT64_MAX)}
        with_entries = {(queue.topic, queue.queue_id) for queue in queues}
        if {topic for topic, _ in with_entries} != set(chosen.topics or ()):
            return None  # the queues may be lost
        part = LogPart(max(begin, segments[0]), min(limit, segments[-1] + self.commit_log.size_bytes), dispatched, limit,
                       self.commit_log.min_offset, self.commit_log.size_bytes)
        return find_named(self, queues, part, newest_bytes(TopicConfigs(self.root).read().rows, with_entries, choose))

    def _is_dispatched(self) -> bool:
        """Whether every message below the limit of queues is in its queue, unless that is damaged."""
        return store_use(self.root) is StoreUse.CLOSED and not abort_file_exists(self.root)

    def _scan(self, scanner: LogScanner, begin: int, limit: int, segments: Sequence[int], named: NamedRecords | None
              ) -> Iterator[pyarrow.RecordBatch]:
        for start in segments:
            with self._hold(start):
                yield from self._scan_segment(scanner, start, max(start, begin), limit, named)

    def _segments_between(self, since_ms: int, until_ms: int, limit: int) -> list[int]:
        """Return the segments below `limit`, without those whose neighbours show that all their messages were stored at other times.

        Only where no store time is lower than one before it: a segment of a broker whose clock was set back is in any case among them.
        """
        starts = [start for start in self.commit_log.starts() if start < limit]
        watermark = read_watermark(self.root).watermark if (since_ms, until_ms) != (INT64_MIN, INT64_MAX) else None
        if watermark is None:
            return starts
        ordered = range(max(watermark.verified_from, watermark.ordered_from), watermark.flushed)
        firsts = {start: self._message_below(start, limit) for start in starts if start in ordered}
        begins_ms = {start: first.store_timestamp_ms for start, first in firsts.items() if first is not None}
        return [start for start, following in zip(starts, [*starts[1:], -1])
                if start not in begins_ms or begins_ms[start] < until_ms and begins_ms.get(following, INT64_MAX) >= since_ms]

    def _scan_segment(self, scanner: LogScanner, start: int, first: int, limit: int, named: NamedRecords | None
                      ) -> Iterator[pyarrow.RecordBatch]:
        view = self.commit_log.view(start)
        if view is not None:
            yield from self._while_there(start, _batches(scanner, view, start, first, min(limit, start + len(view)), named))

    def _while_there(self, start: int, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the batches of a segment until it is deleted, after which damage is none."""
        try:
            for batch in batches:
                if start < self.commit_log.min_offset:
                    return  # deleted during the copy: its blocks may have been freed
                yield batch
        except CorruptionError:
            if start >= self.commit_log.min_offset:
                raise

    def _hold(self, segment: int) -> contextlib.AbstractContextManager[bool]:
        """Keep a segment from being deleted during a read, if an engine runs that can hold it."""
        return contextlib.nullcontext(False)

    def _check_names(self, topics: Collection[str], chosen: _Chosen) -> None:
        """Raise UsageError for chosen topics and queues that the store has not, unless they may be missing."""
        if light := sorted(topic for topic in topics if topic.startswith(LMQ_PREFIX) or not chosen.allow_missing and self._is_light(topic)):
            raise UsageError(f"{light[0]} {IS_LIGHT}")
        if chosen.allow_missing:
            return
        known = find_topics(self, set(topics).issubset, topics)
        if missing := sorted(set(topics) - known):
            raise UsageError(f"{self.name} has no topic {', '.join(map(repr, missing))}{did_you_mean(missing[0], known)}: "
                             "allow_missing=True reads what there is")
        self._check_queues(topics, chosen)

    def _is_light(self, topic: str) -> bool:
        """Whether a topic's queues have no messages of their own, as far as their first and last ones tell."""
        queues = (self._queue(topic, queue_id) for queue_id in self.queue_ids(topic))
        return topic.startswith(LMQ_PREFIX) or has_others(
            topic, queues, self._message_below, self.commit_log.min_offset, self._watermark.limit(ReadLevel.COMMITTED))

    def _check_queues(self, topics: Collection[str], chosen: _Chosen) -> None:
        """Raise UsageError for a queue id that none of the topics has, and for a first offset of a queue that the store has not."""
        wanted = {f"{queue_id} of the chosen topics": {(topic, queue_id) for topic in topics} for queue_id in chosen.queues or ()}
        wanted |= {f"{topic}/{queue_id}": {(topic, queue_id)} for topic, queue_id in chosen.first_offsets}
        known = find_queues(self, lambda known: not any(map(known.isdisjoint, wanted.values())), topics)
        for name, queues in wanted.items():
            if known.isdisjoint(queues):
                there = sorted({queue_id for topic, queue_id in known if any(topic == one for one, _ in queues)})
                raise UsageError(f"{self.name} has no queue {name}, only {', '.join(map(str, there))}: "
                                 "allow_missing=True reads what there is")

    def _queue_ids(self, topic: str) -> list[int]:
        folder = os.path.join(self._consume_queue, topic)
        return sorted(int(name) for name in folder_names(folder) if is_queue_id_name(name) and self._has_files(os.path.join(folder, name)))

    def _has_files(self, folder: str) -> bool:
        if folder in self._with_files:  # a group's members ask at each change; the last file goes with its folder
            return True
        with disk_errors("list", folder), contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:  # deleted meanwhile
            if any(is_plain_file(entry) for entry in entries):
                self._with_files.add(folder)
                return True
        return False

    def _entries(self, topic: str, queue_id: int, level: Level | None) -> QueueEntries | None:
        """Return the queue's entries for this level; None for a queue that does not exist or has none."""
        limit = self._queue_limit(level)
        queue = self._queue(topic, queue_id)
        return None if queue is None else queue.entries(self.commit_log.min_offset, limit)

    def _queue_limit(self, level: Level | None) -> int:
        self._require_open()
        return self._watermark.queue_limit(self._level(level))

    def _level(self, level: Level | None) -> ReadLevel:
        return self.default_level if level is None else ReadLevel.of(level)

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"this reader of {self.root} is closed: open the store again")


def _batches(scanner: LogScanner, view: Readable, start: int, first: int, end: int, named: NamedRecords | None
             ) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of [first, end) in the segment at `start`: by a scan, and by queue entries where these are right."""
    low, high = (end, end) if named is None else (min(max(first, bound), end) for bound in (named.begin, named.end))
    entries = None if named is None or low == high else named.entries(view, start, end)
    if entries is None:
        low = high = end
    yield from scanner.scan(view, start, first, low, end)
    if entries is not None:
        yield from scanner.gather(view, start, entries, end)
        yield from scanner.scan(view, start, high, end)


IS_LIGHT = ("is a light queue: its messages are rows of their own topics, whose property INNER_MULTI_DISPATCH names their light "
            "queues")


def has_others(topic: str, queues: Iterable[ConsumeQueue | None], message_below: Callable[[int, int], Message | None], log_min_offset: int,
               limit: int) -> bool:
    """Return whether the newest and the oldest message below `limit` of each queue of the topic that has one are other topics'
    (INNER_MULTI_DISPATCH)."""
    has_any = False
    with contextlib.suppress(StoreRefusedError):  # the read itself reports it
        for queue in filter(None, queues):
            high = queue.max_offset(limit)
            for is_newest in (True, False) if high else ():
                entry = queue.entry(high - 1 if is_newest else queue.min_offset(log_min_offset, high), high)
                message = None if entry is None else message_below(entry.physical_offset, limit)
                if message is not None and (message.topic == topic or not belongs_to(message, topic, queue.queue_id)):
                    return False
                has_any = has_any or message is not None
        return has_any
    return False


def find_topics(reader: StoreReader, are_enough: Callable[[set[str]], bool], first: Iterable[str] = ()) -> set[str]:
    """Return the store's topics: those of `first` and all others with queues, then those in config/topics.json, then those in the log,
    until they are enough."""
    return {topic for topic, _ in find_queues(reader, lambda known: are_enough({topic for topic, _ in known}), first)}


def find_queues(reader: StoreReader, are_enough: Callable[[set[tuple[str, int]]], bool], first: Iterable[str] = ()
                ) -> set[tuple[str, int]]:
    """Return the store's queues: those with files, of the topics `first` and then of all, then those in config/topics.json, then those
    in the log, until they are enough."""
    known = {(topic, queue_id) for topic in first for queue_id in reader.queue_ids(topic)}
    if not are_enough(known):
        known.update((topic, queue_id) for topic, ids in reader.topics().items() for queue_id in ids)
    if are_enough(known):
        return known
    for topic, row in TopicConfigs(reader.root).read().rows.items():
        known.update((topic, queue_id) for queue_id in range(min(max(row.read_queue_nums, row.write_queue_nums, 1), QUEUE_NUMS_MAX)))
    if not are_enough(known):  # the newest messages may have a queue without a file
        from pyarrow import Table

        with contextlib.suppress(CorruptionError):  # the read itself reports damage
            for batch in reader.scan(columns=["topic", "queueId"], level=ReadLevel.COMMITTED):
                queues = Table.from_batches([batch]).group_by(["topic", "queueId"]).aggregate([])
                known.update(zip(queues["topic"].to_pylist(), queues["queueId"].to_pylist()))
    return known


def _is_folder(path: str) -> bool:
    """Whether it is a folder. DiskError if this process may not know it: a queue that cannot be read is not an absent one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise disk_error(error, "read", path) from error


