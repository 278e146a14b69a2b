"""Whether a store has what a read asks for: topics, queues, offsets, and the log up to where it is known to have ended.

Asked by the driver when a read is planned or a stream is opened. A name that is wrong by one
letter, or an end that is gone, must not look like a store with fewer messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy

from pyengine.errors import CorruptionError, StoreBusyError, StoreRefusedError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES, LMQ_PREFIX
from pyengine.formats.consume_queue import further_offset, is_filler, is_live
from pyengine.formats.paths import StorePaths
from pyengine.native.scan import RowFilter
from pyengine.results import ReadLevel
from pyengine.spark.file_access import QUEUES, find_record, walk_piece
from pyengine.spark.options import INT64_MAX, ReadOptions
from pyengine.spark.partitions import EVERY_OFFSET, REMEDY, DataLossError, Queue, offset_bounds
from pyengine.spark.queue_entries import ENTRY, slice_bytes
from pyengine.spark.remote_store import RemoteStore, consumer_groups, look_ahead, segment_of
from pyengine.storage.arrow import LogScanner
from pyengine.storage.checkpoint import WatermarkReading, abort_file_exists, read_checkpoint, read_watermark
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consume_queue import ConsumeQueue, QueueEnd
from pyengine.storage.read_level import StoreUse, store_use

if TYPE_CHECKING:
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.native.scan import ChooseQueue, QueueBounds

log = logging.getLogger(__name__)
_NAMED_MAX = 5

# -- names --------------------------------------------------------------------------


def require_names(options: ReadOptions, store: LiveStoreReader | RemoteStore, use: Literal["batch", "stream", "view"] = "batch") -> None:
    """UsageError for chosen topics and queues that do not exist, also for those whose offsets or times are given, unless
    `allowMissing` is given.

    And for light queues, except in a view of queues: they name messages of other topics. A pattern leaves them out, unless it
    matches nothing else.

    A topic exists that has a queue, stands in config/topics.json, or has messages in the log that are in no queue yet.
    A pattern must match one, except in a stream, which waits for it, and in a store that has none. Over a file
    system a store without queues is not asked: its log alone was copied.
    """
    bounded = _bounded_queues(options) if use == "batch" else []  # a stream looks when it begins, not when it goes on
    if not (options.subscribe or options.subscribe_pattern or options.assign or bounded):
        return
    pattern = None if options.subscribe_pattern is None else re.compile(options.subscribe_pattern)
    names = _Names(store, pattern)
    if use != "view":
        names.refuse_light_queues([*(options.subscribe or options.assign or ()), *(topic for topic, _ in bounded)])
    if options.allow_missing:
        return
    names.require_topics([topic for topic, _ in bounded], options.where)
    names.require_queues(bounded, options.where)
    if pattern is not None:
        if use != "stream":
            names.require_match(options.where)
        return
    names.require_topics(options.subscribe or tuple(options.assign or ()), options.where)
    names.require_queues([(topic, queue_id) for topic, ids in (options.assign or {}).items() for queue_id in ids], options.where)


def _bounded_queues(options: ReadOptions) -> list[Queue]:
    """The queues whose offsets or times are given."""
    bounds = options.starting_offsets, options.ending_offsets, options.starting_timestamps, options.ending_timestamps
    return sorted({(topic, queue_id) for by_topic in bounds for topic, queues in (by_topic or {}).items() for queue_id in queues})


def require_group(options: ReadOptions, store: LiveStoreReader | RemoteStore, group: str) -> None:
    """UsageError for a consumer group that the store does not know, unless `allowMissing` is given: it would lag by everything."""
    known = set() if options.allow_missing else consumer_groups(store)
    if not options.allow_missing and group not in known:
        near = get_close_matches(group, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"{options.where} knows no consumer group {group!r}{hint}: it has committed no offset and is not in "
                         "subscriptionGroup.json; allowMissing=true shows every message as lag")


class _Names:
    """What there is in one store by name."""

    def __init__(self, store: LiveStoreReader | RemoteStore, pattern: re.Pattern[str] | None) -> None:
        self._store = store
        self._pattern = pattern
        self._configured = TopicConfigs(store.root).read().rows
        self._folders = _queue_folders(store)
        self._all = self._folders | self._configured.keys()

    def refuse_light_queues(self, topics: Collection[str]) -> None:
        matched = [] if self._pattern is None else [topic for topic in self._all if self._pattern.fullmatch(topic)]
        light = sorted(topic for topic in topics if topic.startswith(LMQ_PREFIX))
        if matched and all(topic.startswith(LMQ_PREFIX) for topic in matched):
            light.append(min(matched))
        if light:
            raise UsageError(f"{light[0]} is a light queue: its messages are rows of their own topics, whose property "
                             "INNER_MULTI_DISPATCH names their light queues; format(\"pyengine-queue\") with view=entries lists "
                             "where they are")

    def require_match(self, path: str) -> None:
        pattern = self._pattern
        assert pattern is not None
        if any(map(pattern.fullmatch, self._all)):
            return
        found = list(itertools.islice(self._in_log(lambda topic, _: pattern.fullmatch(topic) is not None), 1))
        if not found and self._all and self._can_tell():
            raise UsageError(f"subscribePattern {pattern.pattern!r} matches none of the {len(self._all)} topics of {path}: "
                             "allowMissing=true reads what there is")

    def require_topics(self, topics: Collection[str], path: str) -> None:
        missing = {topic for topic in topics if topic not in self._all}
        if missing:
            missing -= {topic for topic, _ in self._in_log(lambda topic, _: topic in missing, len(missing))}
        if missing and self._can_tell():
            first = min(missing)
            near = get_close_matches(first, self._all, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"{path} has no topic {_listed(map(repr, sorted(missing)))}{hint}: allowMissing=true reads what there is")

    def require_queues(self, queues: Collection[Queue], path: str) -> None:
        missing = {queue for queue in queues if not self._has_queue(*queue)}
        if missing:
            missing -= set(self._in_log(lambda topic, queue_id: (topic, queue_id) in missing, len(missing)))
        if missing and self._can_tell():
            named = _listed(f"{topic}/{queue_id}" for topic, queue_id in sorted(missing))
            raise UsageError(f"{path} has no queue {named}: allowMissing=true reads what there is")

    def _has_queue(self, topic: str, queue_id: int) -> bool:
        config = self._configured.get(topic)
        if config is not None and queue_id < max(config.read_queue_nums, config.write_queue_nums):
            return True
        return topic in self._folders and str(queue_id) in _queue_folders(self._store, topic)

    def _can_tell(self) -> bool:
        """Whether names are known: of a copied log alone they are not."""
        return not isinstance(self._store, RemoteStore) or bool(self._folders)

    def _in_log(self, is_wanted: Callable[[str, int], bool], most: int = 1) -> Iterator[Queue]:
        """Up to `most` wanted queues, each once, of records that may be in no queue yet; damage is passed over."""
        reader = self._store
        if isinstance(reader, RemoteStore):
            return
        begin, end = _undispatched(reader, bool(self._folders))
        found: set[Queue] = set()

        def choose(topic: str, queue_id: int) -> QueueBounds | None:
            return EVERY_OFFSET if is_wanted(topic, queue_id) else None

        scanner = LogScanner(["topic", "queueId"], row_filter=RowFilter(choose_queue=choose), on_corrupt="skip")
        size_bytes = reader.commit_log.size_bytes
        for segment in list(reader.commit_log.starts()):
            first, limit = max(begin, segment), min(end, segment + size_bytes)
            view = reader.commit_log.view(segment) if first < limit else None
            for batch in scanner.scan(view, segment, first, limit) if view is not None else ():
                new = set(zip(*(column.to_pylist() for column in batch.columns))) - found
                found |= new
                yield from new
                if len(found) >= most:
                    return


def _queue_folders(store: LiveStoreReader | RemoteStore, topic: str = "") -> set[str]:
    """The names of the topics that have queues, or of one topic's queues."""
    if isinstance(store, RemoteStore):
        return store.queue_folders(topic)
    try:
        return set(os.listdir(StorePaths(store.root).consume_queue / topic))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _undispatched(reader: LiveStoreReader, has_queues: bool) -> tuple[int, int]:
    """[begin, end) of the log where records may be that are in no queue: all of it where that cannot be told."""
    end = max(0, reader.max_physical_offset(ReadLevel.COMMITTED))
    if reader.is_live:
        return max(0, reader.dispatched_offset(ReadLevel.COMMITTED)), end
    is_whole = has_queues and store_use(reader.root) is StoreUse.CLOSED and not abort_file_exists(reader.root)
    return (end if is_whole else 0), end


def has_no_queues(store: LiveStoreReader | RemoteStore) -> bool:
    """Whether it is the copy of a log alone."""
    return isinstance(store, RemoteStore) and not store.queue_files()


def _listed(names: Iterator[str]) -> str:
    shown = list(itertools.islice(names, _NAMED_MAX))
    more = sum(1 for _ in names)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# -- offsets ------------------------------------------------------------------------


def require_offsets(options: ReadOptions, reader: LiveStoreReader | RemoteStore) -> None:
    """Offsets given as numbers must lie in their queues, unless losses are allowed."""
    if not options.fail_on_data_loss:
        return
    bounds = offset_bounds(options)
    if bounds and has_no_queues(reader):
        raise UsageError(f"the copy of the log at {options.where} has no queues ({QUEUES}), so it cannot be checked whether they hold the "
                         "offsets that are asked for: copy them too, set failOnDataLoss=false to read what there is, or choose times "
                         "or physical offsets")
    for (topic, queue_id), (first, end) in bounds.items():
        low, high = reader.queue_range(topic, queue_id, options.read_level)
        if end < first:
            raise UsageError(f"queue {topic}/{queue_id}: the starting offset {first} is after the ending offset {end}")
        for name, offset in (("startingOffsets", first), ("endingOffsets", end)):
            if offset not in EVERY_OFFSET and not low <= offset <= high:
                raise DataLossError(f"{name} {offset}: queue {topic}/{queue_id} holds offsets {low} to {high}; {REMEDY}")


# -- where queues begin and end -----------------------------------------------------

_BLOCK_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 12
_VOID = bytes(_BLOCK_BYTES + _AHEAD_BYTES)


class QueueLooks:
    """Where the queues of one plan begin and end: each is looked at once, and its last file is opened once."""

    def __init__(self, options: ReadOptions, store: LiveStoreReader | RemoteStore, choose: ChooseQueue | None = None) -> None:
        """`choose`: the queues of which more than the end is wanted."""
        self._options, self._store, self._choose = options, store, choose
        self._seen: dict[Queue, tuple[int, QueueEnd, int]] = {}  # first entry, end, bytes of the log between them

    @functools.cached_property
    def _queues(self) -> dict[Queue, ConsumeQueue]:
        return {(topic, queue_id): queue for topic, ids in self._store.topics().items() for queue_id in ids
                if (queue := self._store.queue(topic, queue_id)) is not None}

    def ends(self) -> Iterator[tuple[Queue, QueueEnd]]:
        """Where the entries of every queue end, whatever they name; a queue that holds anything else is left out."""
        if isinstance(self._store, RemoteStore):
            look_ahead(self._store, filter(_is_usable, self._queues.values()), INT64_MAX)
        for key, queue in self._queues.items():
            with contextlib.suppress(StoreRefusedError):  # what such a queue holds is nothing to compare with
                end = self._end(key, queue)
                if end is not None:
                    yield key, end

    def _end(self, key: Queue, queue: ConsumeQueue) -> QueueEnd | None:
        is_chosen = self._choose is not None and self._choose(*key) is not None
        high = queue_end(self._options, self._store, queue, INT64_MAX) if is_chosen else queue.max_offset(INT64_MAX)
        entry = queue.entry(high - 1, high) if high else None
        if entry is None or is_filler(entry) or not is_live(entry):
            return None
        end = QueueEnd(high, entry.physical_offset + entry.size_bytes)
        if is_chosen:
            first = queue_begin(self._store, queue, high)
            self._seen[key] = first, end, slice_bytes(queue, first, high, high)
        return end

    def chosen(self) -> list[ConsumeQueue]:
        """The queues that are chosen."""
        assert self._choose is not None
        return [queue for key, queue in self._queues.items() if self._choose(*key)]

    def bounds(self, queues: Iterable[ConsumeQueue], limit: int) -> Iterator[tuple[ConsumeQueue, int, int]]:
        """Each queue with its entries [begin, end): the messages that are in the log below `limit`, by queue_begin and queue_end."""
        queues = list(queues)
        look_ahead(self._store, [queue for queue in queues if not self._is_known(queue, limit)], limit)
        for queue in queues:
            if self._is_known(queue, limit):
                first, (high, _), _ = self._seen[queue.topic, queue.queue_id]
            else:
                high = queue_end(self._options, self._store, queue, limit)
                first = queue_begin(self._store, queue, high)
            yield queue, first, high

    def slice_bytes(self, queue: ConsumeQueue, first: int, end: int, high: int, limit: int) -> int:
        """As queue_entries.slice_bytes, by what was seen of the whole queue where that is known."""
        if not self._is_known(queue, limit):
            return slice_bytes(queue, first, end, high)
        begin, (known_high, _), size_bytes = self._seen[queue.topic, queue.queue_id]
        return size_bytes * (end - first) // (known_high - begin)

    def _is_known(self, queue: ConsumeQueue, limit: int) -> bool:
        seen = self._seen.get((queue.topic, queue.queue_id))
        return seen is not None and seen[1].max_physical <= limit


def queue_begin(store: LiveStoreReader | RemoteStore, queue: ConsumeQueue, high: int) -> int:
    """The first entry whose message is in the log; what is no entry at all and comes before it belongs to it, for a task to judge."""
    first = queue.min_offset(store.min_physical_offset, high) if high else 0
    while (entry := queue.entry(first - 1, first)) is not None and (entry.physical_offset < 0 or entry.size_bytes <= 0) and any(entry):
        first -= 1
    return first


def queue_end(options: ReadOptions, store: LiveStoreReader | RemoteStore, queue: ConsumeQueue, limit: int, *, waits: bool = False) -> int:
    """The entry after the queue's last below `limit`: where entries follow that cannot be told from damage, after those.

    So damage that looks like a queue's end is left to the tasks, which hold each entry against its record. DataLossError, or a
    note in the log where losses are allowed, for an entry that leads beyond the end of a log that was stopped in order;
    with `waits` such entries of a remote store are those of a log that is still being copied.
    """
    high = queue.max_offset(limit)
    at, tries = high, 0
    while (found := _following(queue, at)) is not None:
        number, entries = found
        offsets, sizes = (entries[name].astype(numpy.int64) for name in ("physicalOffset", "size"))
        inside = numpy.flatnonzero((offsets >= 0) & (sizes > 0) & (offsets <= limit - sizes))
        if inside.size:
            at, tries = number + int(inside[-1]) + 1, 0
            high = at
            continue
        place = int(numpy.flatnonzero(entries != numpy.zeros(1, ENTRY))[0])
        number, offset, size = number + place, int(offsets[place]), int(sizes[place])
        end = store.max_physical_offset(ReadLevel.COMMITTED)
        if _is_message(store.message_below(offset, end), queue, number, size):
            break  # beyond the limit
        if tries == 0:  # another process may just have been writing it
            tries, at = 1, number
            continue
        if offset < 0 or size <= 0 or offset + size <= end or store.is_live:
            at, tries = number + 1, 0
            high = at
            continue
        is_torn_off = abort_file_exists(store.root)  # by a crash, and it had not been synced
        if not is_torn_off and not (waits and isinstance(store, RemoteStore)):
            said = f"entry {number} of queue {queue.topic}/{queue.queue_id} names a message at {offset} of {size} bytes, but the log of " \
                   f"{options.where} ends at {end}"
            if options.fail_on_data_loss and options.on_corrupt == "fail":
                raise DataLossError(f"{said}; {REMEDY}")
            log.warning("%s: it and what follows it in the queue is left out", said)
        break
    return high


def _is_message(message: Message | None, queue: ConsumeQueue, number: int, size_bytes: int) -> bool:
    """Whether it is what an entry of this number and size names."""
    if message is None or message.size_bytes != size_bytes:
        return False
    is_own = (message.topic, message.queue_id, message.queue_offset) == (queue.topic, queue.queue_id, number)
    return is_own or further_offset(message, queue.topic, queue.queue_id) == number


def _following(queue: ConsumeQueue, at: int) -> tuple[int, numpy.ndarray] | None:
    """(number of the first, entries) of the next entries at or after `at` that are not all zeros, by a look at the block after it
    and at the first one of each later file; None without any."""
    for start in queue.files.starts():
        number = max(at, start // CQ_ENTRY_BYTES)
        position = number * CQ_ENTRY_BYTES - start
        view = queue.files.view(start) if position < queue.files.size_bytes else None
        if view is None:
            continue
        end = min(queue.files.size_bytes, (position + _AHEAD_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES + _BLOCK_BYTES)
        data = view[position : end - (end - position) % CQ_ENTRY_BYTES]
        if data != _VOID[: len(data)]:
            return number, numpy.frombuffer(data, ENTRY)
    return None


# -- the log's end ------------------------------------------------------------------


def with_lost_end(
    options: ReadOptions, store: LiveStoreReader | RemoteStore, watermark: Callable[[], WatermarkReading], limit: int, log_end: int,
    looks: QueueLooks | None = None,
) -> int:
    """The limit of the read. Of a store at rest it was found by reading, and ends at damage too.

    Where more had been there (its engine's watermark says so; without one the consume queues, or the checkpoint of a store
    that was stopped in order), that is DataLossError; CorruptionError where records follow the damage. With
    failOnDataLoss=false the limit stands where nothing follows; with onCorrupt=skip what is there beyond is read.
    """
    if options.read_level is ReadLevel.REPLICATED or store.is_live:
        return limit
    reading = watermark()
    durable = reading.watermark
    if durable is None or reading.is_copied:
        lost = _lost_by_queues(store, options.where, looks or QueueLooks(options, store)) or _lost_by_checkpoint(store, options.where)
    elif durable.flushed <= limit or durable.flushed <= store.max_physical_offset(options.read_level):
        return limit  # an engine may have written on, and have ended, since the limit was taken
    else:
        lost = Lost(limit, durable.flushed, f"the log of {options.where} ends at {limit}, but everything up to {durable.flushed} had been "
                                            "synced")
    return limit if lost is None else _end_of_what_is_left(options, store, lost, limit, log_end)


def require_end(options: ReadOptions, reader: LiveStoreReader | RemoteStore, looks: QueueLooks | None = None) -> None:
    """As with_lost_end, for a stream that begins or goes on; nothing where the level cannot be told now."""
    with contextlib.suppress(StoreBusyError, UsageError):
        limit, starts = max(0, reader.max_physical_offset(options.read_level)), reader.commit_log.starts()
        log_end = starts[-1] + reader.commit_log.size_bytes if starts else 0
        with_lost_end(options, reader, functools.partial(read_watermark, reader.root), limit, log_end, looks)


class Lost(NamedTuple):
    """Bytes [begin, end) of the log that had been there; how that is known, as a sentence. INT64_MAX: to the last segment's end."""

    begin: int
    end: int
    sentence: str


def _lost_by_queues(store: LiveStoreReader | RemoteStore, path: str, looks: QueueLooks) -> Lost | None:
    """What consume queues name beyond the log's end."""
    end = store.max_physical_offset(ReadLevel.COMMITTED)
    beyond: dict[Queue, QueueEnd] = {}
    for key, found in looks.ends():
        if found.max_physical > end:
            beyond[key] = found
    furthest = max((found.max_physical for found in beyond.values()), default=end)
    if furthest <= end or furthest <= store.max_physical_offset(ReadLevel.COMMITTED):
        return None  # a broker may have written on since the end was taken
    synced_ms = read_checkpoint(store.root).physic_msg_timestamp_ms
    if abort_file_exists(store.root) and 0 < synced_ms <= _last_store_timestamp_ms(store, end):
        return None  # what a crash has torn off and had not been synced: RocketMQ's recovery ends the log there too
    firsts = {key: queue.max_offset(end) for key in sorted(beyond) if (queue := store.queue(*key)) is not None}
    missing = {key: beyond[key].next_offset - first for key, first in firsts.items()}
    named = _listed(f"{topic}/{queue_id} from offset {first} on ({missing[topic, queue_id]:,})"
                    for (topic, queue_id), first in firsts.items())
    return Lost(end, furthest, f"the log of {path} ends at {end}, but consume queues name {sum(missing.values()):,} messages between there "
                               f"and {furthest}: {named}")


def _is_usable(queue: ConsumeQueue) -> bool:
    with contextlib.suppress(StoreRefusedError):
        return bool(queue.files.starts())
    return False


def _lost_by_checkpoint(store: LiveStoreReader | RemoteStore, path: str) -> Lost | None:
    """Whether a store that was stopped in order had synced messages that are newer than its last one."""
    if abort_file_exists(store.root) or store_use(store.root) is not StoreUse.CLOSED:
        return None  # with a pool RocketMQ's checkpoint counts what was in memory only
    checkpoint = read_checkpoint(store.root)
    synced_ms = max(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms)
    end = store.max_physical_offset(ReadLevel.COMMITTED)
    last_ms = _last_store_timestamp_ms(store, end) if synced_ms > 0 else synced_ms
    if last_ms >= synced_ms:
        return None
    return Lost(end, INT64_MAX, f"the log of {path} ends at {end} with a message that was stored at {last_ms}, but messages up to "
                                f"{synced_ms} had been synced (checkpoint)")


def _last_store_timestamp_ms(store: LiveStoreReader | RemoteStore, end: int) -> int:
    """When the last message below the log's end was stored; 0 for a log without messages."""
    if isinstance(store, RemoteStore) and store.last_store_timestamp_ms >= 0:
        return store.last_store_timestamp_ms
    for start in reversed(store.commit_log.starts()):
        segment = segment_of(store, start) if start < end else None
        if segment is not None:
            try:
                limit = min(end, start + store.commit_log.size_bytes)
                found = walk_piece(segment, start, limit, limit=limit, check_crc=False)
            finally:
                segment.close()
            if found.messages:
                return found.last_store_timestamp_ms
    return 0


def _end_of_what_is_left(options: ReadOptions, store: LiveStoreReader | RemoteStore, lost: Lost, limit: int, log_end: int) -> int:
    """`limit`, or further to read on behind the damage there; an error unless the options allow that."""
    end = min(lost.end, log_end)
    if options.on_corrupt == "skip":
        return max(limit, end)
    following = _next_record(store, lost.begin + 1, end)
    if following is not None:
        raise CorruptionError(f"{lost.sentence}; it is damaged there, and goes on at {following} (`pyengine check` says more): "
                              "onCorrupt=skip reads what there is")
    if options.fail_on_data_loss:
        raise DataLossError(f"{lost.sentence}; its end is missing (`pyengine check` says more): {REMEDY}")
    return limit


def _next_record(store: LiveStoreReader | RemoteStore, begin: int, end: int) -> int | None:
    """The first whole record that begins in [begin, end)."""
    size_bytes = store.commit_log.size_bytes
    for start in list(store.commit_log.starts()):
        first, limit = max(begin, start), min(end, start + size_bytes)
        if first >= limit:
            continue
        segment = segment_of(store, start)
        if segment is None:
            continue
        try:
            found = find_record(segment, first, limit, limit)
        finally:
            segment.close()
        if found is not None:
            return found
    return None
