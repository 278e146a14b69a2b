"""Checks that a store has what a read requests: topics, queues, offsets, and the log up to its last known end.

The driver calls it when it plans a read or opens a stream. A name with one wrong letter, or a lost end of the log, must not look
like a store with fewer messages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy

from pyengine.arguments import EVERY_OFFSET, INT64_MAX
from pyengine.errors import CorruptionError, StoreBusyError, StoreRefusedError, UsageError, command, did_you_mean
from pyengine.formats.constants import CQ_ENTRY_BYTES, LMQ_PREFIX
from pyengine.formats.consume_queue import further_offset, is_filler, is_live
from pyengine.formats.paths import StorePaths, is_queue_id_name
from pyengine.native.scan import ColumnScanner, RowFilter
from pyengine.results import ReadLevel
from pyengine.spark.file_access import FETCH_BYTES, QUEUES
from pyengine.spark.options import Queue, ReadOptions, flat
from pyengine.spark.partitions import REMEDY, DataLossError, offset_bounds
from pyengine.spark.remote_store import OpenStore, RemoteStore, consumer_groups, prefetch_queue_ends, segments_of
from pyengine.storage.arrow import allocate, to_array
from pyengine.storage.checkpoint import abort_file_exists, read_checkpoint, read_watermark
from pyengine.storage.commit_log import LogRun, next_record, runs_of
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consume_queue import ConsumeQueue, QueueEnd
from pyengine.storage.queue_entries import ENTRY, following_entries, newest_bytes, queue_entries, slice_bytes
from pyengine.storage.read_level import StoreUse, store_use
from pyengine.storage.store_reader import IS_LIGHT, has_others

if TYPE_CHECKING:
    from pyengine.formats.record import Message
    from pyengine.native.scan import ChooseQueue, QueueBounds

DISPATCH_WAIT_S, DISPATCH_POLL_INTERVAL_S = 2.0, 0.005

log = logging.getLogger(__name__)

# -- names --------------------------------------------------------------------------


def require_names(options: ReadOptions, store: OpenStore, use: Literal["batch", "stream", "view"] = "batch") -> None:
    """Raise UsageError for the first chosen topic or queue, or one with given offsets or times, that does not exist.

    `allowMissing` permits them. Light queues, and topics that are queues of others' messages, are an error too, except in a view of
    queues; a pattern skips them unless it matches nothing else.

    A topic exists if it has a queue or is in config/topics.json. A pattern must match one, except in a stream, which waits for it, and
    in a store without topics. A store without queues on another file system is not checked, because only its log was copied.
    """
    bounds = options.starting_offsets, options.ending_offsets, options.starting_timestamps, options.ending_timestamps
    # A stream checks them when it begins, not when it continues.
    bounded = sorted(set().union(*map(flat, bounds))) if use == "batch" else []
    assigned = [(topic, queue_id) for topic, ids in (options.assign or {}).items() for queue_id in ids]
    named: list[tuple[str, int | None]] = [*bounded, *((topic, None) for topic in options.subscribe), *assigned]
    pattern = options.subscribe_pattern
    if not named and pattern is None:
        return
    if store.is_live and (pattern is not None or not all(_has_queue(store, *name) for name in named)):
        _await_dispatch(store)
    configured, folders = TopicConfigs(store.root).read().rows, _queue_folders(store)
    known = folders | configured.keys()
    matched = [] if pattern is None else [topic for topic in known if re.fullmatch(pattern, topic)]
    light = [] if use == "view" else [topic for topic, _ in named if _is_light(options, store, topic)]
    if matched and use != "view" and all(_is_light(options, store, topic) for topic in matched):
        light.append(min(matched))
    if light:
        raise UsageError(f"{light[0]} {IS_LIGHT}; view=entries lists where they are")
    if options.allow_missing or isinstance(store, RemoteStore) and not folders:
        return
    for topic, queue_id in named:
        if topic not in known:
            raise UsageError(f"{options.where} has no topic {topic!r}{did_you_mean(topic, known)}: allowMissing=true reads what there is")
        config = configured.get(topic)
        is_configured = queue_id is None or config is not None and queue_id < max(config.read_queue_nums, config.write_queue_nums)
        if not is_configured and not _has_queue(store, topic, queue_id):
            raise UsageError(f"{options.where} has no queue {topic}/{queue_id}: allowMissing=true reads what there is")
    if pattern is not None and use != "stream" and known and not matched:
        raise UsageError(f"subscribePattern {pattern!r} matches none of the {len(known)} topics of {options.where}: "
                         "allowMissing=true reads what there is")


def _await_dispatch(store: OpenStore) -> None:
    """Wait, DISPATCH_WAIT_S at most, until the engine has dispatched what was put before: a first message's topic has no queue earlier."""
    wanted, until_s = store.max_physical_offset(ReadLevel.COMMITTED), time.monotonic() + DISPATCH_WAIT_S
    while store.dispatched_offset(ReadLevel.COMMITTED) < wanted and time.monotonic() < until_s:
        time.sleep(DISPATCH_POLL_INTERVAL_S)


def require_group(options: ReadOptions, store: OpenStore, group: str) -> None:
    """Raise UsageError for an unknown consumer group, unless `allowMissing` is given: all messages would be its lag."""
    known = set() if options.allow_missing else consumer_groups(store)
    if not options.allow_missing and group not in known:
        raise UsageError(f"{options.where} knows no consumer group {group!r}{did_you_mean(group, known)}: it has committed no offset "
                         "and is not in subscriptionGroup.json; allowMissing=true shows every message as lag")


def _queue_folders(store: OpenStore, topic: str = "") -> set[str]:
    """Return the names of the topics that have queues, or of one topic's queues."""
    if isinstance(store, RemoteStore):
        return store.queue_folders(topic)
    try:
        return set(os.listdir(StorePaths(store.root).consume_queue / topic))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _is_light(options: ReadOptions, store: OpenStore, topic: str) -> bool:
    queues = (store._queue(topic, int(name)) for name in sorted(_queue_folders(store, topic)) if is_queue_id_name(name))
    return topic.startswith(LMQ_PREFIX) or not options.allow_missing and has_others(
        topic, queues, store._message_below, store.commit_log.min_offset, store.max_physical_offset(ReadLevel.COMMITTED))


def _has_queue(store: OpenStore, topic: str, queue_id: int | None) -> bool:
    """Return whether the topic has this queue, or any."""
    folders = _queue_folders(store, topic)
    return bool(folders) if queue_id is None else str(queue_id) in folders


def has_no_queues(store: OpenStore) -> bool:
    """Return whether it is a copy of the log alone."""
    return isinstance(store, RemoteStore) and not store.queue_files()


# -- offsets ------------------------------------------------------------------------


def require_offsets(options: ReadOptions, reader: OpenStore, limit: int) -> None:
    """Check that offsets given as numbers are in their queues, below `limit` of the log, unless losses are allowed."""
    if not options.fail_on_data_loss:
        return
    bounds = offset_bounds(options)
    if bounds and has_no_queues(reader):
        raise UsageError(f"the copy of the log at {options.where} has no queues ({QUEUES}), so it cannot be checked whether they hold the "
                         "requested offsets: copy them too, set failOnDataLoss=false to read what there is, or choose times "
                         "or physical offsets")
    for (topic, queue_id), (first, end) in bounds.items():
        queue = reader._queue(topic, queue_id)
        entries = None if queue is None else queue.entries(reader.min_physical_offset, limit)
        low, high = (0, 0) if entries is None else (entries.min_offset, entries.max_offset)
        if end < first:
            raise UsageError(f"queue {topic}/{queue_id}: the starting offset {first} is after the ending offset {end}")
        for name, offset in (("startingOffsets", first), ("endingOffsets", end)):
            if offset not in EVERY_OFFSET and not low <= offset <= high:
                raise DataLossError(f"{name} {offset}: queue {topic}/{queue_id} holds offsets {low} to {high}; {REMEDY}")


# -- where queues begin and end -----------------------------------------------------


class QueueExtent(NamedTuple):
    """A queue, its entries [first, high), the physical end of the last one's message, -1 if that entry is wrong, and about how many
    bytes of the log they are."""

    queue: ConsumeQueue
    first: int
    high: int
    max_physical: int
    log_bytes: int


class QueueExtents:
    """The starts and ends of one plan's queues."""

    def __init__(self, options: ReadOptions, store: OpenStore, choose: ChooseQueue | None = None) -> None:
        """`choose`: the queues of which more than the end is wanted."""
        self._options, self._store, self.choose = options, store, choose
        self._bounds: dict[int, list[QueueExtent]] = {}

    @functools.cached_property
    def queues(self) -> dict[Queue, ConsumeQueue]:
        """All queues of the store."""
        return {(topic, queue_id): queue for topic, ids in self._store.topics().items() for queue_id in ids
                if (queue := self._store._queue(topic, queue_id)) is not None}

    def ends(self) -> Iterator[tuple[Queue, QueueEnd]]:
        """Yield the end of every queue's entries; leave out a queue with other content, and one that ends with a wrong entry or filler."""
        if isinstance(self._store, RemoteStore):
            prefetch_queue_ends(self._store, self.queues.values(), INT64_MAX)
        for key, queue in self.queues.items():
            with contextlib.suppress(StoreRefusedError):
                is_chosen = self.choose is not None and self.choose(*key) is not None  # where its end is behind damage counts too
                high = queue_end(self._options, self._store, queue, INT64_MAX) if is_chosen else queue.max_offset(INT64_MAX)
                if (end := end_of_entry(queue, high)) >= 0:
                    yield key, QueueEnd(high, end)

    def chosen(self) -> list[ConsumeQueue]:
        """Return the chosen queues."""
        assert self.choose is not None
        return [queue for key, queue in self.queues.items() if self.choose(*key)]

    def bounds(self, limit: int) -> list[QueueExtent]:
        """Return each chosen queue with the entries of messages in the log below `limit`, by queue_begin and queue_end."""
        if limit not in self._bounds:
            queues = self.chosen()
            prefetch_queue_ends(self._store, queues, limit)
            self._bounds[limit] = [self._extent(queue, limit) for queue in queues]
        return self._bounds[limit]

    def _extent(self, queue: ConsumeQueue, limit: int) -> QueueExtent:
        high = queue_end(self._options, self._store, queue, limit)
        first = queue_begin(self._store, queue, high)
        return QueueExtent(queue, first, high, end_of_entry(queue, high), slice_bytes(queue, first, high, high))

    def names(self, offset: int) -> bool:
        """Return whether an entry of any queue in the store names this physical offset; light queues, whose entries name messages of
        other topics, are not read."""
        for queue in self.queues.values():
            if queue.topic.startswith(LMQ_PREFIX):
                continue
            with contextlib.suppress(StoreRefusedError):
                starts = queue.files.starts()
                end = (starts[-1] + queue.files.size_bytes) // CQ_ENTRY_BYTES if starts else 0
                for _, entries in queue_entries(queue, starts[0] // CQ_ENTRY_BYTES if starts else 0, end):
                    if ((entries["physicalOffset"] == offset) & (entries["size"] > 0)).any():
                        return True
        return False


def end_of_entry(queue: ConsumeQueue, high: int) -> int:
    """Return the physical end of the message of the entry before `high`; -1 without one, and for a wrong one or filler."""
    entry = queue.entry(high - 1, high)
    return entry.physical_offset + entry.size_bytes if entry is not None and is_live(entry) and not is_filler(entry) else -1


def queue_begin(store: OpenStore, queue: ConsumeQueue, high: int) -> int:
    """Return the first entry with a message in the log; wrong entries directly before it are included, for a task to check."""
    first = queue.min_offset(store.min_physical_offset, high) if high else 0
    while (entry := queue.entry(first - 1, first)) is not None and (entry.physical_offset < 0 or entry.size_bytes <= 0) and any(entry):
        first -= 1
    return first


def queue_end(options: ReadOptions, store: OpenStore, queue: ConsumeQueue, limit: int, *, waits: bool = False) -> int:
    """Return the number after the queue's last entry below `limit`, including following entries that may be damaged.

    So damage that looks like a queue's end is left to the tasks, which compare each entry with its record. DataLossError, or a log
    line if losses are allowed, for an entry beyond the end of a log that was stopped in order; with `waits` a remote store may have
    such entries while its log is still being copied.
    """
    high = queue.max_offset(limit)
    at, tries = high, 0
    while (found := following_entries(queue, at)) is not None:
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
        if _is_message(store._message_below(offset, end), queue, number, size):
            break  # beyond the limit
        if tries == 0:  # another process may just be writing it
            tries, at = 1, number
            continue
        if offset < 0 or size <= 0 or offset + size <= end or store.is_live:
            at, tries = number + 1, 0
            high = at
            continue
        is_torn_off = abort_file_exists(store.root)  # lost in a crash, because it was not synced
        if not is_torn_off and not (waits and isinstance(store, RemoteStore)):
            said = f"entry {number} of queue {queue.topic}/{queue.queue_id} names a message at {offset} of {size} bytes, but the log of " \
                   f"{options.where} ends at {end}"
            if options.fail_on_data_loss and options.on_corrupt == "fail":
                raise DataLossError(f"{said}; {REMEDY}")
            log.warning("%s: it and what follows it in the queue is left out", said)
        break
    return high


def _is_message(message: Message | None, queue: ConsumeQueue, number: int, size_bytes: int) -> bool:
    """Return whether it is the message of an entry with this number and size."""
    if message is None or message.size_bytes != size_bytes:
        return False
    is_own = (message.topic, message.queue_id, message.queue_offset) == (queue.topic, queue.queue_id, number)
    return is_own or further_offset(message, queue.topic, queue.queue_id) == number


# -- what queues lack ----------------------------------------------------------------

_PLACES = ("topic", "queueId", "queueOffset", "physicalOffset")


def why_not_dispatched(store: OpenStore) -> str:
    """Return why it is unknown which messages are in their queues; "" if all below the store's dispatched_offset are."""
    if store.is_live:
        return ""
    if has_no_queues(store):
        return "the copy of the log has no queues"
    if store_use(store.root) is not StoreUse.CLOSED:
        return "another program has the store open, and it cannot be known which messages are in its queues already"
    if abort_file_exists(store.root):
        return "the store was not stopped in order (it has a file abort), so its queues may lack messages: recover it first"
    return ""


def require_entries(options: ReadOptions, store: OpenStore, extents: QueueExtents, limit: int, *, can_scan: bool = False) -> None:
    """Raise DataLossError for missing_entries, unless losses are allowed. `can_scan`: access=scan reads the same rows."""
    missing = missing_entries(store, extents, limit) if options.fail_on_data_loss else ""
    if missing:
        scan = ", access=scan reads the log itself" if can_scan else ""
        where = "STORE" if options.is_remote else store.root
        raise DataLossError(f"consume queues of {options.where} lack messages that the log has: {missing}: "
                            f"{command('rebuild', where, '--queues')} makes them again (stop the engine before){scan}; {REMEDY}")


def missing_entries(store: OpenStore, extents: QueueExtents, limit: int) -> str:
    """Return the first messages below `limit`, where all are dispatched, that a chosen queue's files lack, as text.

    "" also if it is unknown which messages are in their queues.
    """
    choose = extents.choose
    if choose is None or why_not_dispatched(store):
        return ""
    found = {(one.queue.topic, one.queue.queue_id): one for one in extents.bounds(limit) if one.high > 0}
    for record in itertools.chain(_lost_before(store, choose, found, limit), _lost_after(store, choose, found, limit)):
        if not extents.names(record.physical_offset):  # else damage has changed the record's queue or offset, as its own entry shows
            topic, queue_id = record.queue
            extent = found.get(record.queue)
            if extent is not None and record.number < extent.first:
                return f"{topic}/{queue_id} before offset {extent.first}"
            return f"{topic}/{queue_id} from offset {record.number} on"
    return ""


def _lost_before(store: OpenStore, choose: ChooseQueue, found: Mapping[Queue, QueueExtent], limit: int) -> Iterator[_Record]:
    """Yield the messages before a queue that begins at a file's boundary, if the file before it is lost.

    Reads the log up to the message of the queue's first entry.
    """
    begins: dict[Queue, tuple[int, int]] = {}  # the queue offset of the first entry, and the physical offset of its message
    for key, (queue, first, high, *_) in found.items():
        if 0 < first < high and first % queue.entries_per_file == 0 and queue.files.start_of((first - 1) * CQ_ENTRY_BYTES) is None:
            entry = queue.entry(first, high)
            begins[key] = first, entry.physical_offset if entry is not None else 0

    def before(topic: str, queue_id: int) -> QueueBounds | None:
        wanted, begin = choose(topic, queue_id), begins.get((topic, queue_id))
        return None if wanted is None or begin is None else (wanted[0], min(wanted[1], begin[0]))

    end = min(limit, max((at for _, at in begins.values()), default=0))
    for record in _records(store, max(0, store.min_physical_offset), end, before):
        if record.physical_offset < begins[record.queue][1]:
            yield record


def _lost_after(store: OpenStore, choose: ChooseQueue, found: Mapping[Queue, QueueExtent], limit: int) -> Iterator[_Record]:
    """Yield the messages after the queues' last entries.

    Reads the log from the last entry's message on if a queue ends at a file's boundary, and always its newest_bytes; FETCH_BYTES over
    a file system. A topic without a folder that topics.json does not name was deleted.
    """
    configured = TopicConfigs(store.root).read().rows
    topics = configured.keys() | _queue_folders(store) if configured else None
    least = newest_bytes(configured, found, choose)
    begins = [limit - (FETCH_BYTES if isinstance(store, RemoteStore) else least)]
    begins += [one.max_physical for one in found.values() if one.max_physical > 0 and one.high % one.queue.entries_per_file == 0]

    def after(topic: str, queue_id: int) -> QueueBounds | None:
        wanted, end = choose(topic, queue_id) if topics is None or topic in topics else None, found.get((topic, queue_id))
        return None if wanted is None else (wanted[0] if end is None else max(wanted[0], end.high), wanted[1])

    for record in _records(store, max(0, store.min_physical_offset, min(begins)), limit, after):
        if record.queue not in found or record.physical_offset >= found[record.queue].max_physical:
            yield record


class _Record(NamedTuple):
    """A record's place in the log, and its own queue and queue offset."""

    queue: Queue
    number: int
    physical_offset: int


def _records(store: OpenStore, begin: int, end: int, choose: ChooseQueue) -> Iterator[_Record]:
    """Yield the wanted records that begin in [begin, end) and belong into queues; skip damage."""
    scanner = ColumnScanner(_PLACES, row_filter=RowFilter(choose_queue=choose, queued_only=True), allocate=allocate)
    for segment, first, limit in segments_of(store, begin, end):
        position = first if first % store.commit_log.size_bytes == 0 else segment.find_record(first, limit, limit)
        for piece in runs_of(segment, limit if position is None else position, limit, limit, next_record):
            for raw in piece.scan(scanner) if isinstance(piece, LogRun) else ():
                for topic, queue_id, *numbers in zip(*(to_array(column, raw.rows).to_pylist() for column in raw.columns)):
                    yield _Record((topic, queue_id), *numbers)


# -- the log's end ------------------------------------------------------------------


def with_lost_end(options: ReadOptions, store: OpenStore, limit: int, extents: QueueExtents | None = None) -> int:
    """Return the limit of the read. For a stopped store it was found by reading, so damage can end it too early.

    If the log had been longer (by its engine's watermark; without one by the consume queues, or by the checkpoint of a store that
    was stopped in order), raise DataLossError, or CorruptionError if records follow the damage. With failOnDataLoss=false keep the
    limit if nothing follows; with onCorrupt=skip read what follows.
    """
    if options.read_level is ReadLevel.REPLICATED or store.is_live:
        return limit
    reading = read_watermark(store.root)
    durable = reading.watermark
    if durable is None or reading.is_copied:
        lost = _lost_by_queues(store, options.where, extents or QueueExtents(options, store)) or _lost_by_checkpoint(store, options.where)
    elif durable.flushed <= limit or durable.flushed <= store.max_physical_offset(options.read_level):
        return limit  # an engine may have written more, and ended, since the limit was read
    else:
        lost = Lost(limit, durable.flushed, f"the log of {options.where} ends at {limit}, but everything up to {durable.flushed} had been "
                                            "synced")
    return limit if lost is None else _end_after_damage(options, store, lost, limit)


def require_end(options: ReadOptions, reader: OpenStore, extents: QueueExtents | None = None) -> None:
    """Do the checks of with_lost_end for a stream that begins or continues, if the level is known now."""
    with contextlib.suppress(StoreBusyError, UsageError):
        with_lost_end(options, reader, max(0, reader.max_physical_offset(options.read_level)), extents)


class Lost(NamedTuple):
    """A lost range [begin, end) of the log, and a sentence with the proof; end INT64_MAX: to the last segment's end."""

    begin: int
    end: int
    sentence: str


def _lost_by_queues(store: OpenStore, path: str, extents: QueueExtents) -> Lost | None:
    """Return what consume queues name beyond the log's end."""
    end = store.max_physical_offset(ReadLevel.COMMITTED)
    furthest, queue = max(((found.max_physical, key) for key, found in extents.ends()), default=(end, ("", 0)))
    if furthest <= end or furthest <= store.max_physical_offset(ReadLevel.COMMITTED):
        return None  # a broker may have written more since the end was read
    synced_ms = read_checkpoint(store.root).physic_msg_timestamp_ms
    if abort_file_exists(store.root) and 0 < synced_ms <= _last_store_timestamp_ms(store, end):
        return None  # lost in a crash because it was not synced: RocketMQ's recovery ends the log there too
    return Lost(end, furthest, f"the log of {path} ends at {end}, but consume queues name messages up to {furthest}: "
                               f"{queue[0]}/{queue[1]} from offset {extents.queues[queue].max_offset(end)} on")


def _lost_by_checkpoint(store: OpenStore, path: str) -> Lost | None:
    """Return whether a store that was stopped in order had synced messages that are newer than its last one."""
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


def _last_store_timestamp_ms(store: OpenStore, end: int) -> int:
    """Return the store time of the last message below the log's end; 0 without messages."""
    if isinstance(store, RemoteStore) and store.last_store_timestamp_ms >= 0:
        return store.last_store_timestamp_ms
    for start in reversed(store.commit_log.starts()):
        for segment, first, limit in segments_of(store, start, min(end, start + store.commit_log.size_bytes)):
            found = segment.walk(first, limit, limit=limit, check_crc=False)
            if found.messages:
                return found.last_store_timestamp_ms
    return 0


def _end_after_damage(options: ReadOptions, store: OpenStore, lost: Lost, limit: int) -> int:
    """Return `limit`, or a later end to continue after damage; an error unless the options allow that."""
    starts = store.commit_log.starts()
    end = min(lost.end, starts[-1] + store.commit_log.size_bytes if starts else 0)
    if options.on_corrupt == "skip":
        return max(limit, end)
    records = (segment.find_record(first, limit, limit) for segment, first, limit in segments_of(store, lost.begin + 1, end))
    following = next((record for record in records if record is not None), None)
    if following is not None:
        raise CorruptionError(f"{lost.sentence}; it is damaged there, and continues at {following} (`pyengine check` says more): "
                              "onCorrupt=skip reads what there is")
    if options.fail_on_data_loss:
        raise DataLossError(f"{lost.sentence}; its end is missing (`pyengine check` says more): {REMEDY}")
    return limit
