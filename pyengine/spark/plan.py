"""Plans a read, once, in the driver: the log's end now, and which bytes and rows are wanted.

Only the plan asks a running engine, for the end of the log at the chosen level. Tasks need only the files.

A scan reads every record's header; the consume queues of chosen topics name exactly their records. But queues are written after the
log and can be lost. So the plan uses queues only up to the offset that dispatch is known to have reached (a running engine's counter;
everything, after an orderly stop), scans the rest, and does not use them after a crash.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyengine.arguments import EVERY_OFFSET
from pyengine.errors import UsageError
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.spark.options import ReadOptions, flat
from pyengine.spark.partitions import (
    REMEDY,
    DataLossError,
    LogRange,
    QueuePart,
    QueueSlice,
    cut,
    offset_bounds,
    partition_bytes,
    queue_chooser,
    without_light_queues,
)
from pyengine.spark.presence import (
    QueueExtents,
    missing_entries,
    require_entries,
    require_names,
    require_offsets,
    why_not_dispatched,
    with_lost_end,
)
from pyengine.spark.remote_store import OpenStore, RemoteStore, open_for_reading
from pyengine.storage.consume_queue import log_range
from pyengine.storage.queue_entries import LOG_BYTES_MIN, SHARE_MAX

if TYPE_CHECKING:
    from pyengine.native.scan import ChooseQueue
    from pyengine.storage.consume_queue import ConsumeQueue

log = logging.getLogger(__name__)
QUEUES_MAX, REMOTE_QUEUES_MAX = 10_000, 500  # a remote queue needs some requests before its share is known


def end_now(options: ReadOptions) -> int:
    """Return the current end of the read's level. Errors as of plan()."""
    with open_for_reading(options) as reader:
        return reader.max_physical_offset(options.read_level)


def plan(options: ReadOptions, most_bytes: int = 0, least: int = 1, *, end: int | None = None) -> list[LogRange | QueuePart]:
    """Return the read's partitions; none if there is nothing to read. Those of the log may have up to `most_bytes`, more than
    maxPartitionBytes, while there are `least` of them. `end`: an earlier end of the level, beyond which nothing is read.

    DataLossError, NotAStoreError, StoreRefusedError; UsageError for a level that cannot be known.
    """
    choose = queue_chooser(options)
    own = None if choose is None or options.access == "scan" else without_light_queues(choose)
    with open_for_reading(options) as reader:
        extents = QueueExtents(options, reader, own)
        bounds = _bounds(options, reader, extents, end)
        require_names(options, reader)
        if bounds is None:
            return []
        start, stop, limit = bounds
        require_messages_of_times(options, reader, limit)
        require_offsets(options, reader, min(limit, reader.dispatched_offset(options.read_level)))
        parts = plan_queues(options, reader, start, stop, limit, extents)
        if parts is not None:
            return parts
        start, stop = _narrowed(options, reader, start, stop, limit)
        segment_bytes, share = reader.commit_log.size_bytes, -(-(stop - start) // least)
        if share > segment_bytes:
            share += -share % segment_bytes
        wanted = max(options.max_partition_bytes, min(most_bytes, share))
        return [*cut(start, stop, limit, segment_bytes, partition_bytes(stop - start, wanted, options.min_partitions))]


def _bounds(options: ReadOptions, store: OpenStore, extents: QueueExtents, end: int | None) -> tuple[int, int, int] | None:
    """Return physical offsets: [start, stop) of the read and the limit of the log; None for a log without segments."""
    limit = store.max_physical_offset(options.read_level)
    require_disks(options, store)
    starts = store.commit_log.starts()
    segment_bytes = store.commit_log.size_bytes
    log_end = starts[-1] + segment_bytes if starts else 0
    if limit > log_end:
        if options.fail_on_data_loss:
            raise DataLossError(f"the log of {options.where} ends at {log_end}, below the level {options.read_level.value} at {limit}: "
                                f"segments are missing; {REMEDY}")
        limit = log_end
    limit = with_lost_end(options, store, limit if end is None else min(limit, end), extents)
    if not starts:
        return None
    require_no_gap(options, store)
    if end is not None and 0 < end < starts[0] and options.fail_on_data_loss:
        raise DataLossError(f"the log of {options.where} begins at {starts[0]} now, beyond its end at load(), {end}: load() it again; "
                            f"{REMEDY}")
    return *_physical_bounds(options, starts[0], limit), limit


def require_disks(options: ReadOptions, store: OpenStore) -> None:
    """Raise DataLossError if a part of the log seems to be on a disk that is not mounted, unless losses are allowed."""
    if options.fail_on_data_loss and (missing := store._missing_part()):
        raise DataLossError(f"{missing}; {REMEDY}")


def require_no_gap(options: ReadOptions, store: OpenStore) -> None:
    """Raise DataLossError if a segment is missing between others, unless losses are allowed."""
    size_bytes = store.commit_log.size_bytes
    gaps = [a + size_bytes for a, b in itertools.pairwise(store.commit_log.starts()) if b != a + size_bytes]
    if gaps and options.fail_on_data_loss:
        raise DataLossError(f"the log of {options.where} has a gap at {gaps[0]}: a segment is missing between others; {REMEDY}")


def _physical_bounds(options: ReadOptions, log_start: int, limit: int) -> tuple[int, int]:
    start, stop = options.starting_physical_offset, options.ending_physical_offset
    if options.fail_on_data_loss:
        if start is not None and start < log_start:
            raise DataLossError(f"startingPhysicalOffset {start}: the log begins at {log_start} now; {REMEDY}")
        if start is not None and start > limit:
            raise DataLossError(f"startingPhysicalOffset {start}: the log ends at {limit} ({options.read_level.value}); {REMEDY}")
        if stop is not None and stop > limit:
            raise DataLossError(f"endingPhysicalOffset {stop}: the log ends at {limit} ({options.read_level.value}); {REMEDY}")
    return max(log_start, start or 0), limit if stop is None else min(limit, stop)


def _narrowed(options: ReadOptions, reader: OpenStore, start: int, stop: int, limit: int) -> tuple[int, int]:
    """Return the bounds, narrowed if queue entries show that no wanted message is outside.

    This is only for assigned queues with offsets as numbers, whose bounds are messages that it checks. Otherwise entries can be
    missing after a crash and prove nothing.
    """
    if not options.assign:
        return start, stop
    bounds = offset_bounds(options)
    assigned = {(topic, queue_id): bounds.get((topic, queue_id), EVERY_OFFSET) for topic, ids in options.assign.items() for queue_id in ids}
    low, high = log_range(reader, assigned, limit)
    start, stop = max(start, low), min(stop, high)
    return start, max(start, stop)


# -- queues that start at a time ----------------------------------------------------


def starting_time_ms(options: ReadOptions, topic: str, queue_id: int) -> int | None:
    """Return the time at which this queue starts; None without a time."""
    if options.starting_timestamp_ms is not None:
        return options.starting_timestamp_ms
    return (options.starting_timestamps or {}).get(topic, {}).get(queue_id)


def require_messages_of_times(options: ReadOptions, reader: OpenStore, limit: int) -> None:
    """With the strategy `error`, raise UsageError for a queue whose newest message below `limit` is older than its starting time."""
    if options.starting_timestamp_strategy != "error":
        return
    choose = queue_chooser(options, with_offsets=False)
    chosen = {(topic, queue_id) for topic, ids in reader.topics().items() if not topic.startswith(LMQ_PREFIX)
              for queue_id in ids if choose is None or choose(topic, queue_id)}
    for topic, queue_id in sorted(chosen | flat(options.starting_timestamps).keys()):
        wanted_ms = starting_time_ms(options, topic, queue_id)
        queue = reader._queue(topic, queue_id)
        high = 0 if queue is None else queue.max_offset(limit)
        if wanted_ms is not None and (queue is None or stored_ms(reader, queue, high - 1, high, limit) < wanted_ms):
            raise UsageError(f"queue {topic}/{queue_id} has no message that was stored at {wanted_ms} or later: "
                             "startingOffsetsByTimestampStrategy=latest reads what comes later")


def stored_ms(reader: OpenStore, queue: ConsumeQueue, number: int, high: int, limit: int) -> int:
    """Return when the message of an entry below `high` was stored; -1 without one below `limit`."""
    entry = queue.entry(number, high) if number >= 0 else None
    message = reader._message_below(entry.physical_offset, limit) if entry is not None else None
    return -1 if message is None else message.store_timestamp_ms


# -- reading through the queues -----------------------------------------------------


def plan_queues(
    options: ReadOptions, reader: OpenStore, start: int, stop: int, limit: int, extents: QueueExtents
) -> list[LogRange | QueuePart] | None:
    """Return the parts of a read through queues, None to scan; UsageError if `access=queue` is not possible."""
    if options.access == "scan" or options.access == "auto" and stop - start < LOG_BYTES_MIN:
        return None
    why_not, dispatched = why_no_queues(options, reader, limit)
    if why_not:
        if options.access == "queue":
            raise UsageError(f"access=queue: {why_not}")
        return None
    queues = extents.chosen()
    if options.access == "auto" and len(queues) > (REMOTE_QUEUES_MAX if isinstance(reader, RemoteStore) else QUEUES_MAX):
        return None
    slices = list(_slices(queue_chooser(options), extents, dispatched))
    wanted_bytes = sum(one.log_bytes for one in slices)
    if options.access == "auto" and wanted_bytes > SHARE_MAX * (stop - start):
        return None
    if options.access == "queue":
        require_entries(options, reader, extents, dispatched, can_scan=True)
    elif missing := missing_entries(reader, extents, dispatched):
        log.warning("%s: consume queues lack messages (%s), so the log is read", options.where, missing)
        return None
    start = max(start, dispatched)
    most = partition_bytes(wanted_bytes + stop - start, options.max_partition_bytes, options.min_partitions)
    segment_bytes, file_bytes = reader.commit_log.size_bytes, reader.geometry.mapped_file_size_consume_queue_bytes
    parts: list[LogRange | QueuePart] = [
        QueuePart(tuple(group), limit, segment_bytes, file_bytes) for group in grouped(slices, most)
    ]
    return parts + cut(start, stop, limit, segment_bytes, most, begins_record=reader.is_live and options.ends_between_records)


def why_no_queues(options: ReadOptions, reader: OpenStore, limit: int) -> tuple[str, int]:
    """Return why queues cannot be used, or "", and the offset below which every message is in its queue."""
    if not options.has_topics:
        return "choose topics by subscribe, subscribePattern or assign", 0
    if options.starting_physical_offset is not None or options.ending_physical_offset is not None:
        return "physical offsets are bounds of a scan", 0
    return why_not_dispatched(reader), max(0, min(limit, reader.dispatched_offset(options.read_level)))


def _slices(choose: ChooseQueue | None, extents: QueueExtents, dispatched: int) -> Iterator[QueueSlice]:
    for queue, first, high, _, log_bytes in extents.bounds(dispatched):
        wanted = choose(queue.topic, queue.queue_id) if choose else None
        begin, end = (max(wanted[0], first), min(wanted[1], high)) if wanted else (0, 0)
        if begin < end:
            yield QueueSlice(queue.topic, queue.queue_id, begin, end, log_bytes * (end - begin) // (high - first))


def grouped(slices: list[QueueSlice], most_bytes: int) -> Iterator[list[QueueSlice]]:
    """Yield groups of slices of about `most_bytes`; divide large slices."""
    group: list[QueueSlice] = []
    held = 0
    for whole in slices:
        mean = max(1, whole.log_bytes // (whole.end - whole.first))
        first = whole.first
        while first < whole.end:
            end = min(whole.end, first + max(1, (most_bytes - held) // mean))
            group.append(QueueSlice(whole.topic, whole.queue_id, first, end, (end - first) * mean))
            held += (end - first) * mean
            first = end
            if held + mean > most_bytes:
                yield group
                group, held = [], 0
    if group:
        yield group
