"""Which queue offset belongs to a time (ConsumeQueue.getOffsetInQueueByTime)."""

from __future__ import annotations

from bisect import bisect_left

from pyengine.formats.constants import CQ_ENTRY_BYTES, MESSAGE_BYTES_MIN
from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.record import I32, I64, SYS_FLAG_AT, store_timestamp_at
from pyengine.storage.queue_reader import QueueReader
from pyengine.storage.segment_files import SegmentFolder


def offset_by_time(
    queue: QueueReader, commit_log: SegmentFolder, timestamp_ms: int, min_offset: int, max_offset: int, *,
    as_rocketmq: bool = False,
) -> int:
    """The entry whose message was stored nearest to `timestamp_ms`, the older one on a tie.

    The file comes first, by modification time; then its entries are halved. 0 when no
    file has entries, or a message on the way cannot be read. A file that was modified before its own messages
    were stored (the wall clock was set back, the store's never is) is no guide: then the messages' times
    choose the file. `as_rocketmq`: RocketMQ's choice, whatever the file times are.
    """
    start = _file_by_time(queue, timestamp_ms, max_offset)
    if start is not None and not as_rocketmq:
        first_ms = _stored_ms(queue, commit_log, max(start, min_offset * CQ_ENTRY_BYTES))
        modified_ms = queue.files.modified_ms(start)
        if modified_ms is not None and first_ms > modified_ms:
            start = _file_by_messages(queue, commit_log, timestamp_ms, min_offset, max_offset)
    view = None if start is None else queue.files.view(start)
    if start is None or view is None:
        return 0
    log_min_offset = commit_log.min_offset
    low = max(0, min_offset * CQ_ENTRY_BYTES - start)
    high = min(queue.files.size_bytes, max_offset * CQ_ENTRY_BYTES - start) - CQ_ENTRY_BYTES
    left = right = -CQ_ENTRY_BYTES  # positions; negative: none
    left_ms = right_ms = None
    while high >= low:
        middle = (low + high) // (2 * CQ_ENTRY_BYTES) * CQ_ENTRY_BYTES
        physical_offset, size_bytes, _ = ENTRY.unpack_from(view, middle)
        if physical_offset < log_min_offset:
            low = middle + CQ_ENTRY_BYTES
            left = middle
            continue
        store_ms = store_timestamp_ms(commit_log, physical_offset, size_bytes)
        if store_ms < 0:
            return 0
        if store_ms == timestamp_ms:
            return (start + middle) // CQ_ENTRY_BYTES
        if store_ms > timestamp_ms:
            high = middle - CQ_ENTRY_BYTES
            right, right_ms = middle, store_ms
        else:
            low = middle + CQ_ENTRY_BYTES
            left, left_ms = middle, store_ms
    if left_ms is None:
        chosen = right
    elif right_ms is None:
        chosen = left
    else:
        chosen = right if timestamp_ms - left_ms > right_ms - timestamp_ms else left
    return max(0, start + chosen) // CQ_ENTRY_BYTES


def _file_by_time(queue: QueueReader, timestamp_ms: int, max_offset: int) -> int | None:
    """The first file modified at or after the time, else the last (MappedFileQueue.getMappedFileByTime)."""
    chosen = None
    for start in queue.files.starts():
        if start >= max_offset * CQ_ENTRY_BYTES:
            break
        modified_ms = queue.files.modified_ms(start)
        if modified_ms is None:
            continue
        chosen = start
        if modified_ms >= timestamp_ms:
            break
    return chosen


def _file_by_messages(
    queue: QueueReader, commit_log: SegmentFolder, timestamp_ms: int, min_offset: int, max_offset: int
) -> int | None:
    """The first file whose last message was stored at or after the time, else the last."""
    size_bytes, first, end = queue.files.size_bytes, min_offset * CQ_ENTRY_BYTES, max_offset * CQ_ENTRY_BYTES
    starts = [start for start in queue.files.starts() if start < end and start + size_bytes > first]
    at = bisect_left(starts, timestamp_ms, key=lambda start: _stored_ms(
        queue, commit_log, min(start + size_bytes, end) - CQ_ENTRY_BYTES))
    return starts[min(at, len(starts) - 1)] if starts else None


def _stored_ms(queue: QueueReader, commit_log: SegmentFolder, byte: int) -> int:
    """Store time of the message that the entry at this byte of the queue names, -1 when that cannot be told."""
    start = queue.files.start_of(byte)
    view = None if start is None else queue.files.view(start)
    if start is None or view is None:
        return -1
    physical_offset, size_bytes, _ = ENTRY.unpack_from(view, byte - start)
    return -1 if physical_offset < commit_log.min_offset else store_timestamp_ms(commit_log, physical_offset, size_bytes)


def store_timestamp_ms(commit_log: SegmentFolder, physical_offset: int, size_bytes: int) -> int:
    """CommitLog.pickupStoreTimestamp: the record's store time, -1 when the record is not there."""
    start = commit_log.start_of(physical_offset)
    view = None if start is None else commit_log.view(start)
    if start is None or view is None or physical_offset - start + max(size_bytes, MESSAGE_BYTES_MIN) > len(view):
        return -1
    at = physical_offset - start
    (sys_flag,) = I32.unpack_from(view, at + SYS_FLAG_AT)
    return I64.unpack_from(view, at + store_timestamp_at(sys_flag))[0]
