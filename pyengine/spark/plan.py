"""Planning a read, once, in the driver: where the log ends now, which bytes and rows are wanted.

Only here is a running engine asked anything: how far the log may be read. What the plan
holds travels to the tasks, which need the files alone. Of a store on another file system
the files tell that, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pyengine.errors import CorruptionError, UsageError
from pyengine.results import ReadLevel
from pyengine.spark.options import ReadOptions
from pyengine.spark.partitions import LogRange, QueuePart, cut
from pyengine.spark.selection import EVERY_OFFSET, offset_bounds
from pyengine.spark.starting_times import require_messages_of_times

if TYPE_CHECKING:
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.spark.remote_store import RemoteStore
    from pyengine.storage.store_reader import StoreReader

REMEDY = "set failOnDataLoss=false to read what there is"


class DataLossError(CorruptionError):
    """Something that was asked for is not there any more; failOnDataLoss=false reads what there is."""


def plan(options: ReadOptions) -> list[LogRange | QueuePart]:
    """The read's partitions; empty when there is nothing to read.

    Raises DataLossError, NotAStoreError, StoreRefusedError, and UsageError for a level
    that cannot be told.
    """
    if options.is_remote:
        from pyengine.spark.file_tree import open_tree
        from pyengine.spark.remote_store import RemoteStore

        with RemoteStore(open_tree(options.path, options.file_system), options.sizes) as store:
            return _plan(options, store)
    from pyengine.ipc.live_reader import open_store

    with open_store(options.path, **options.sizes) as reader:
        return _plan(options, reader)


def _plan(options: ReadOptions, reader: LiveStoreReader | RemoteStore) -> list[LogRange | QueuePart]:
    from pyengine.spark.queue_plan import plan_queues

    limit = reader.max_physical_offset(options.read_level)
    starts = reader.commit_log.starts()
    segment_bytes = reader.commit_log.size_bytes
    log_end = starts[-1] + segment_bytes if starts else 0
    if limit > log_end:
        raise CorruptionError(f"the log of {options.path} ends at {log_end}, below the level {options.read_level.value} at {limit}: "
                              "segments are missing")
    limit = _with_lost_end(options, reader, limit, log_end)
    if not starts:
        return []
    gaps = [a + segment_bytes for a, b in itertools.pairwise(starts) if b != a + segment_bytes]
    if gaps and options.fail_on_data_loss:
        raise DataLossError(f"the log of {options.path} has a gap at {gaps[0]}: a segment is missing between others; {REMEDY}")
    start, stop = _physical_bounds(options, starts[0], limit)
    require_messages_of_times(options, reader, limit)
    if not options.is_remote:
        _check_offsets(options, reader)
        parts = plan_queues(options, reader, start, stop, limit)
        if parts is not None:
            return parts
        start, stop = _narrowed(options, reader, start, stop, limit)
    return cut(start, stop, limit, segment_bytes, options.max_partition_bytes, options.min_partitions)


def _with_lost_end(options: ReadOptions, reader: LiveStoreReader | RemoteStore, limit: int, log_end: int) -> int:
    """The limit. Of a store at rest it was found by reading, and ends at damage too: CorruptionError where its engine
    had synced more, unless damage is to be skipped; then what is there of that is read."""
    from pyengine.storage.watermark import read_watermark

    if options.read_level is ReadLevel.REPLICATED or not options.is_remote and reader.is_live:
        return limit
    reading = reader.durable_watermark() if options.is_remote else read_watermark(options.path)
    durable = reading.watermark
    if durable is None or reading.is_copied or durable.flushed <= limit:
        return limit
    if not options.is_remote and durable.flushed <= reader.max_physical_offset(options.read_level):
        return limit  # an engine has written on, and has ended, since the limit was taken
    if options.on_corrupt == "fail":
        raise CorruptionError(f"the log of {options.path} ends at {limit}, but everything up to {durable.flushed} had been synced: "
                              "its end is missing or damaged there (`pyengine check` tells more); onCorrupt=skip reads what there is")
    return min(durable.flushed, log_end)


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


def _check_offsets(options: ReadOptions, reader: StoreReader) -> None:
    """Offsets given as numbers must lie in their queues."""
    if not options.fail_on_data_loss:
        return
    for (topic, queue_id), (first, end) in offset_bounds(options).items():
        low, high = reader.queue_range(topic, queue_id, options.read_level)
        if end < first:
            raise UsageError(f"queue {topic}/{queue_id}: the starting offset {first} lies behind the ending offset {end}")
        for name, offset in (("startingOffsets", first), ("endingOffsets", end)):
            if offset not in EVERY_OFFSET and not low <= offset <= high:
                raise DataLossError(f"{name} {offset}: queue {topic}/{queue_id} holds offsets {low} to {high}; {REMEDY}")


def _narrowed(options: ReadOptions, reader: StoreReader, start: int, stop: int, limit: int) -> tuple[int, int]:
    """The bounds, moved together where the queues' own entries tell that nothing wanted lies outside.

    Only for assigned queues with offsets as numbers: then each bound is a message that is
    looked at. Entries can be missing after a crash, so nothing is inferred from them otherwise.
    """
    if not options.assign:
        return start, stop
    bounds = offset_bounds(options)
    queues = [(topic, queue_id) for topic, ids in options.assign.items() for queue_id in ids]
    firsts = [_place(reader, queue, bounds.get(queue, EVERY_OFFSET)[0], limit) for queue in queues]
    if all(place is not None for place in firsts):
        start = max(start, min(place[0] for place in firsts if place))
    ends = [bounds.get(queue, EVERY_OFFSET)[1] for queue in queues]
    lasts = [_place(reader, queue, end - 1, limit) for queue, end in zip(queues, ends)]
    if all(place is not None for place in lasts):
        stop = min(stop, max(place[1] for place in lasts if place))
    return start, max(start, stop)


def _place(reader: StoreReader, queue: tuple[str, int], offset: int, limit: int) -> tuple[int, int] | None:
    """[start, end) in the log of a queue's message, None unless its entry and its record agree."""
    topic, queue_id = queue
    entries = reader.queue(topic, queue_id)
    entry = entries.entry(offset, entries.max_offset(limit)) if entries is not None else None
    message = reader.message_below(entry.physical_offset, limit) if entry is not None else None
    if message is None or (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, offset):
        return None
    return message.physical_offset, message.physical_offset + message.size_bytes
