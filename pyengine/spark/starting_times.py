"""Queues that start at a time, and `startingOffsetsByTimestampStrategy=error`: each must have a message of that time or later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine.errors import UsageError
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.spark.options import ReadOptions
from pyengine.spark.selection import queue_chooser, select

if TYPE_CHECKING:
    from pyengine.storage.store_reader import StoreReader

REMEDY = "startingOffsetsByTimestampStrategy=latest reads what comes later"


def starting_time_ms(options: ReadOptions, topic: str, queue_id: int) -> int | None:
    """When this queue starts; None without a time."""
    if options.starting_timestamp_ms is not None:
        return options.starting_timestamp_ms
    return ((options.starting_timestamps or {}).get(topic) or {}).get(queue_id)


def require_messages_of_times(options: ReadOptions, reader: StoreReader, limit: int) -> None:
    """UsageError for a chosen queue whose newest message below `limit` is older than its starting time, under `error`."""
    if options.starting_timestamp_strategy != "error":
        return
    if options.is_remote:
        raise UsageError("option startingOffsetsByTimestampStrategy = error looks into the queues, and over a file system only "
                         "the log is read: give the store's directory")
    choose = queue_chooser(select(options, with_offsets=False))
    chosen = {(topic, queue_id) for topic, ids in reader.topics().items() if not topic.startswith(LMQ_PREFIX)
              for queue_id in ids if choose is None or choose(topic, queue_id)}
    named = {(topic, queue_id) for topic, times in (options.starting_timestamps or {}).items() for queue_id in times}
    for topic, queue_id in sorted(chosen | named):
        wanted_ms = starting_time_ms(options, topic, queue_id)
        newest_ms = _newest_ms(reader, topic, queue_id, limit)
        if wanted_ms is not None and (newest_ms is None or newest_ms < wanted_ms):
            raise UsageError(f"queue {topic}/{queue_id} has no message that was stored at {wanted_ms} or later: {REMEDY}")


def _newest_ms(reader: StoreReader, topic: str, queue_id: int, limit: int) -> int | None:
    queue = reader.queue(topic, queue_id)
    if queue is None:
        return None
    high = queue.max_offset(limit)
    entry = queue.entry(high - 1, high) if high else None
    message = reader.message_below(entry.physical_offset, limit) if entry is not None else None
    return None if message is None else message.store_timestamp_ms
