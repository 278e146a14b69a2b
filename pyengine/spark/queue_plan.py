"""Reading chosen topics through their consume queues: when that is right, and its partitions.

A scan looks at every record's header, so a topic that is a hundredth of a large log costs
a hundred times its size. Its queues name exactly its records. But queues are made after
the log, and lost more easily: so they are read only up to where dispatch is known to
have come (a running engine's counter; everything, after an orderly stop), what lies
behind is scanned, and after a crash they are not believed at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyengine.errors import UsageError
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.spark.options import ReadOptions
from pyengine.spark.partitions import LogRange, QueuePart, QueueSlice, cut, partition_bytes
from pyengine.spark.selection import queue_chooser, select
from pyengine.storage.abort_file import abort_file_exists
from pyengine.storage.read_level import StoreUse, store_use

if TYPE_CHECKING:
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.queue_reader import QueueReader

# `auto` scans what is small, and what is mostly wanted: sequential reading is the faster then.
LOG_BYTES_MIN = 256 << 20
SHARE_MAX = 0.3
QUEUES_MAX = 10_000
SAMPLES = 16


def plan_queues(
    options: ReadOptions, reader: LiveStoreReader, start: int, stop: int, limit: int
) -> list[LogRange | QueuePart] | None:
    """The parts of a read through queues, None to scan. UsageError when `access=queue` is not possible."""
    if options.access == "scan" or options.access == "auto" and stop - start < LOG_BYTES_MIN:
        return None
    obstacle, dispatched = _obstacle(options, reader, limit)
    if obstacle:
        if options.access == "queue":
            raise UsageError(f"access=queue: {obstacle}")
        return None
    slices = list(_slices(options, reader, dispatched))
    wanted_bytes = sum(one.log_bytes for one in slices)
    if options.access == "auto" and (len(slices) > QUEUES_MAX or wanted_bytes > SHARE_MAX * (stop - start)):
        return None
    most = partition_bytes(wanted_bytes, options.max_partition_bytes, options.min_partitions)
    segment_bytes, file_bytes = reader.commit_log.size_bytes, reader.geometry.mapped_file_size_consume_queue_bytes
    parts: list[LogRange | QueuePart] = [
        QueuePart(tuple(group), limit, segment_bytes, file_bytes) for group in grouped(slices, most)
    ]
    return parts + cut(max(start, dispatched), stop, limit, segment_bytes, options.max_partition_bytes, 1)


def _obstacle(options: ReadOptions, reader: LiveStoreReader, limit: int) -> tuple[str, int]:
    """(why queues cannot be used, or "", and below which offset every message is in its queue)."""
    if not (options.subscribe or options.subscribe_pattern or options.assign):
        return "choose topics by subscribe, subscribePattern or assign", 0
    if options.starting_physical_offset is not None or options.ending_physical_offset is not None:
        return "physical offsets are bounds of a scan", 0
    if reader.is_live:
        return "", min(limit, reader.dispatched_offset(options.read_level))
    if store_use(options.path) is not StoreUse.NOBODY:
        return "another program has the store open, and how far its queues have come cannot be told", 0
    if abort_file_exists(options.path):
        return "the store was not stopped in order, so its queues may lack messages: recover it first", 0
    return "", limit


def _slices(options: ReadOptions, reader: LiveStoreReader, dispatched: int) -> Iterator[QueueSlice]:
    choose = queue_chooser(select(options))
    for topic, queue_ids in reader.topics().items():
        if topic.startswith(LMQ_PREFIX):  # its entries name records of other topics
            continue
        for queue_id in queue_ids:
            wanted = choose(topic, queue_id) if choose else None
            queue = reader.queue(topic, queue_id) if wanted else None
            if wanted is None or queue is None:
                continue
            high = queue.max_offset(dispatched)
            first = max(wanted[0], queue.min_offset(reader.min_physical_offset, high))
            end = min(wanted[1], high)
            if first < end:
                yield QueueSlice(topic, queue_id, first, end, slice_bytes(queue, first, end, high))


def slice_bytes(queue: QueueReader, first: int, end: int, high: int) -> int:
    """About how many bytes of the log these messages are: by some of them."""
    step = max(1, (end - first) // SAMPLES)
    sizes = [entry.size_bytes for at in range(first, end, step) if (entry := queue.entry(at, high))]
    return (end - first) * sum(sizes) // max(1, len(sizes))


def grouped(slices: list[QueueSlice], most_bytes: int) -> Iterator[list[QueueSlice]]:
    """Slices put together, and large ones cut, so that each group is about `most_bytes`."""
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
