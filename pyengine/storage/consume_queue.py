"""ConsumeQueue: read one queue's entries from its files, and open the files for the process that appends.

A queue file has its full length at once, but its blocks are allocated in 64 KiB windows ahead of the entries, so that
many queues do not need space for many full files.

An extension ends at the end of the unit with the highest address that an entry of the queue points to
(ConsumeQueueExt.truncateByMaxAddress). A process that was killed before it wrote the entry may have written units after
that: they are cleared, so that RocketMQ's walk from unit to unit at its start does not find them.
"""

from __future__ import annotations

import functools
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyengine.errors import FormatError, StoreRefusedError, disk_error, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_UNIT_BYTES_MIN, CQ_FILLER_SIZE, MESSAGE_BYTES_MIN
from pyengine.formats.consume_queue import (
    ENTRY,
    FILLER_BYTES,
    ConsumeQueueEntry,
    ConsumeQueueExtUnit,
    decode_ext_address,
    is_ext_address,
    is_filler,
    is_live,
    unpack_ext_unit,
)
from pyengine.formats.paths import segment_name
from pyengine.formats.record import store_timestamp_ms
from pyengine.formats.small_file import closed_on_error, opened
from pyengine.native.dispatch import WINDOW_BYTES
from pyengine.native.flush import pwrite_all
from pyengine.storage.durable_writes import create_file, open_file, sync_folder
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, clear_file_from, list_segments, used_end

if TYPE_CHECKING:
    from pyengine.formats.record import Message


class ConsumeQueue:
    """A reader of the queue `topic`-`queue_id`. Offsets are entry numbers; positions are bytes of one file.

    Filler may come first, then entries in the order of their physical offsets, then zeros,
    so that every bound is found by binary search. Entries whose messages end beyond a limit do not
    exist for the reader. A damaged entry is not taken for a bound: the entry next to it is checked too.
    """

    def __init__(self, topic: str, queue_id: int, files: MappedFileQueue, ext: MappedFileQueue) -> None:
        """`files` and `ext` follow the folders of the queue and of its extension."""
        self.topic = topic
        self.queue_id = queue_id
        self.files = files
        self.entries_per_file = files.size_bytes // CQ_ENTRY_BYTES
        self._max_hint = (-1, 1)  # (file, entries in it) of the last max_offset()
        self._ext = ext

    def max_offset(self, limit: int) -> int:
        """Return the offset after the last entry whose message ends at or below `limit`; 0 for an empty queue."""

        def is_outside(entry: tuple[int, int, int]) -> bool:
            offset, size_bytes, _ = entry
            if size_bytes == CQ_FILLER_SIZE and offset == 0:
                return False
            return size_bytes <= 0 or offset < 0 or offset + size_bytes > limit

        def is_end(view: mmap.mmap, number: int) -> bool:
            data = view[number * CQ_ENTRY_BYTES : (number + 2) * CQ_ENTRY_BYTES]
            entry = ENTRY.unpack_from(data)
            if not is_outside(entry):
                return False
            return entry == _VOID or len(data) < 2 * CQ_ENTRY_BYTES or is_outside(ENTRY.unpack_from(data, CQ_ENTRY_BYTES))

        for start in reversed(self.files.starts()):
            view = self.files.view(start)
            if view is None or is_end(view, 0):
                continue
            count = self._max_hint[1] if self._max_hint[0] == start else 1
            if is_end(view, count - 1):
                count = 1  # the limit is lower than last time, or entries were truncated
            if count < self.entries_per_file and not is_end(view, count):
                count = self._first(count + 1, self.entries_per_file, functools.partial(is_end, view))
            self._max_hint = (start, count)
            return start // CQ_ENTRY_BYTES + count
        return 0

    def min_offset(self, log_min_offset: int, max_offset: int) -> int:
        """Return the first entry, after filler, whose message is still in the log; `max_offset` if all are deleted."""

        def is_there(view: mmap.mmap, number: int) -> bool:
            offset, size_bytes, _ = _entry_of(view, number)
            return offset >= log_min_offset and not (offset == 0 and size_bytes == CQ_FILLER_SIZE)

        def begins(view: mmap.mmap, number: int) -> bool:
            return is_there(view, number) or is_there(view, number - 1)

        for start in self.files.starts():
            view = self.files.view(start)
            first = start // CQ_ENTRY_BYTES
            count = min(self.entries_per_file, max_offset - first)
            if view is None or count <= 0:
                continue
            at = 0 if is_there(view, 0) else self._first(1, count, functools.partial(begins, view))
            if at < count:
                return first + at
        return max_offset

    def entries(self, log_min_offset: int, limit: int) -> QueueEntries | None:
        """Return the entries whose messages are in the log from `log_min_offset` to `limit`; None if all messages end beyond it."""
        max_offset = self.max_offset(limit)
        return QueueEntries(self, limit, self.min_offset(log_min_offset, max_offset), max_offset) if max_offset else None

    def min_offset_at_load(self, log_min_offset: int, max_offset: int) -> int:
        """Return the minimum that RocketMQ reports after loading (ConsumeQueue.correctMinOffset).

        RocketMQ reads the first file only, and reports 0 if none of its entries has a message in
        the log; if the log starts at 0, filler counts as an entry.
        """
        starts = self.files.starts()
        view = self.files.view(starts[0]) if starts else None
        if view is None:
            return 0
        first = starts[0] // CQ_ENTRY_BYTES
        count = max(0, min(self.entries_per_file, max_offset - first))
        at = self._first(0, count, lambda number: _entry_of(view, number)[0] >= log_min_offset)
        return first + at if at < count else 0

    def span(self, offset: int, max_offset: int) -> tuple[mmap.mmap, int, int] | None:
        """Return (file, position of entry `offset`, position after the file's last readable entry); None without the file."""
        start = self.files.start_of(offset * CQ_ENTRY_BYTES)
        view = None if start is None else self.files.view(start)
        if start is None or view is None:
            return None
        return view, offset * CQ_ENTRY_BYTES - start, min(self.files.size_bytes, max_offset * CQ_ENTRY_BYTES - start)

    def next_file_offset(self, offset: int) -> int:
        """Return the first entry of the file after the one with `offset` (ConsumeQueue.rollNextFile)."""
        return offset + self.entries_per_file - offset % self.entries_per_file

    def entry(self, offset: int, max_offset: int) -> ConsumeQueueEntry | None:
        """Return one entry, None if it does not exist."""
        span = self.span(offset, max_offset) if 0 <= offset < max_offset else None
        return None if span is None else ConsumeQueueEntry._make(_entry_of(span[0], span[1] // CQ_ENTRY_BYTES))

    def record_bytes(self, offset: int, end: int) -> int:
        """Return the bytes of the records of the entries [offset, end), from the sizes in the entries; filler has none."""
        total = 0
        while offset < end:
            span = self.span(offset, end)
            if span is not None:
                view, at, stop = span
                data = view[at:stop]
                if FILLER_BYTES in data:  # without filler each of the four bytes of the sizes is summed by a slice
                    total += sum(entry[1] for entry in ENTRY.iter_unpack(data) if not is_filler(entry))
                else:
                    total += sum(sum(data[8 + byte::CQ_ENTRY_BYTES]) << 8 * (3 - byte) for byte in range(4))
            offset = self.next_file_offset(offset)
        return total

    def ext_unit(self, tags_code: int) -> ConsumeQueueExtUnit | None:
        """Return the extension unit that a tags code points to, None if it does not exist."""
        offset = decode_ext_address(tags_code)
        start = self._ext.start_of(offset)
        view = None if start is None else self._ext.view(start)
        if start is None or view is None:
            return None
        try:
            return unpack_ext_unit(view, offset - start)
        except FormatError:
            return None

    @staticmethod
    def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
        """Return the first entry in [low, high) for which `holds` is true, as it must be for all later ones; `high` if none.

        It searches in growing steps from `low`, then by halving, so that a near entry is found fast, also in a file that is fetched
        by ranges.
        """
        bound, step = low, 1
        while bound < high and not holds(bound):
            low, bound, step = bound + 1, bound + step, 2 * step
        return bisect_left(range(min(bound, high)), True, lo=low, key=holds)


class QueueEntries(NamedTuple):
    """The entries [min_offset, max_offset) of a queue, for a reader of the log below `limit`."""

    queue: ConsumeQueue
    limit: int
    min_offset: int
    max_offset: int


_VOID = (0, 0, 0)


def _entry_of(view: mmap.mmap, number: int) -> tuple[int, int, int]:
    """Return a file's entry of that number, by a slice: files that are fetched by ranges have that too (spark/remote_store.py)."""
    entry: tuple[int, int, int] = ENTRY.unpack(view[number * CQ_ENTRY_BYTES : (number + 1) * CQ_ENTRY_BYTES])
    return entry


def offset_by_time(entries: QueueEntries, commit_log: MappedFileQueue, timestamp_ms: int, *, as_rocketmq: bool = False) -> int:
    """Return the first entry whose message was stored at `timestamp_ms`, else the nearest, the older one on a tie.

    The file is chosen by its last message, then its entries are searched by halving. 0 if no file has entries, or if a message in
    the search cannot be read. `as_rocketmq`: the files' modification times choose, which a copy or a clock that was set back changes,
    the file before is not looked at, and of messages of one time it is any.
    """
    queue, _, min_offset, max_offset = entries
    start = (_file_by_time(queue, timestamp_ms, max_offset) if as_rocketmq
             else _file_by_messages(entries, commit_log, timestamp_ms))
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
        store_ms = message_stored_ms(commit_log, physical_offset, size_bytes)
        if store_ms < 0:
            return 0
        if store_ms == timestamp_ms and as_rocketmq:
            return (start + middle) // CQ_ENTRY_BYTES
        if store_ms >= timestamp_ms:
            high = middle - CQ_ENTRY_BYTES
            right, right_ms = middle, store_ms
        else:
            low = middle + CQ_ENTRY_BYTES
            left, left_ms = middle, store_ms
    if left_ms is None and not as_rocketmq and (before_ms := _stored_ms(queue, commit_log, start + left)) >= 0:
        left_ms = before_ms  # of the last entry of the file before
    if left_ms is None:
        chosen = right
    elif right_ms is None:
        chosen = left
    else:
        chosen = right if timestamp_ms - left_ms > right_ms - timestamp_ms else left
    return max(0, start + chosen) // CQ_ENTRY_BYTES


def _file_by_time(queue: ConsumeQueue, timestamp_ms: int, max_offset: int) -> int | None:
    """Return the first file that was modified at or after the time, else the last (MappedFileQueue.getMappedFileByTime)."""
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


def _file_by_messages(entries: QueueEntries, commit_log: MappedFileQueue, timestamp_ms: int) -> int | None:
    """Return the first file whose last message was stored at or after the time, else the last."""
    queue, _, min_offset, max_offset = entries
    size_bytes, first, end = queue.files.size_bytes, min_offset * CQ_ENTRY_BYTES, max_offset * CQ_ENTRY_BYTES
    starts = [start for start in queue.files.starts() if start < end and start + size_bytes > first]
    at = bisect_left(starts, timestamp_ms, key=lambda start: _stored_ms(
        queue, commit_log, min(start + size_bytes, end) - CQ_ENTRY_BYTES))
    return starts[min(at, len(starts) - 1)] if starts else None


def _stored_ms(queue: ConsumeQueue, commit_log: MappedFileQueue, byte: int) -> int:
    """Return the store time of the message of the entry at this byte of the queue, -1 if that is unknown."""
    start = queue.files.start_of(byte)
    view = None if start is None else queue.files.view(start)
    if start is None or view is None:
        return -1
    physical_offset, size_bytes, _ = ENTRY.unpack_from(view, byte - start)
    return -1 if physical_offset < commit_log.min_offset else message_stored_ms(commit_log, physical_offset, size_bytes)


def message_stored_ms(commit_log: MappedFileQueue, physical_offset: int, size_bytes: int) -> int:
    """Return the record's store time, -1 if there is no such record. RocketMQ: CommitLog.pickupStoreTimestamp."""
    start = commit_log.start_of(physical_offset)
    view = None if start is None else commit_log.view(start)
    if start is None or view is None or physical_offset - start + max(size_bytes, MESSAGE_BYTES_MIN) > len(view):
        return -1
    return store_timestamp_ms(view, physical_offset - start)


class QueuesAndLog(Protocol):
    """A reader of one store's queue entries and of the records that they name."""

    def _queue(self, topic: str, queue_id: int) -> ConsumeQueue | None: ...
    def _message_below(self, physical_offset: int, limit: int) -> Message | None: ...


def log_range(reader: QueuesAndLog, bounds: Mapping[tuple[str, int], tuple[int, int]], limit: int) -> tuple[int, int]:
    """Return [start, end) of the log, outside of which there is no message of these queues' [first, end) of offsets.

    A bound of the range is 0 or `limit` unless each queue has an entry that agrees with its record, and so proves where its messages
    begin or end: other entries can be missing after a crash and prove nothing. Other bounds are those of a record.
    """
    firsts, lasts = [], []
    for queue, (first, end) in bounds.items():
        own, before, last = (place_of(reader, queue, offset, limit) for offset in (first, first - 1, end - 1))
        firsts.append(own[0] if own else before[1] if before else 0)
        lasts.append(last[1] if last else limit)
    return min(firsts, default=0), max(lasts, default=limit)


def place_of(reader: QueuesAndLog, queue: tuple[str, int], offset: int, limit: int) -> tuple[int, int] | None:
    """Return [start, end) in the log of a queue's message, None unless its entry and its record agree."""
    topic, queue_id = queue
    entries = reader._queue(topic, queue_id)
    entry = entries.entry(offset, entries.max_offset(limit)) if entries is not None else None
    message = reader._message_below(entry.physical_offset, limit) if entry is not None else None
    if message is None or (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, offset):
        return None
    return message.physical_offset, message.physical_offset + message.size_bytes


class QueueEnd(NamedTuple):
    """The end of a queue.

    `next_offset` is the queue offset after the last entry that is not filler, 0 without one; `max_physical` is the physical
    end of that entry's message, -1 without one.
    """

    next_offset: int
    max_physical: int


EMPTY = QueueEnd(0, -1)


def find_queue_end(folder: Path, file_bytes: int) -> QueueEnd:
    """Find the end of the queue in `folder`: zeros follow the last entry; filler does not count as an entry.

    Raises StoreRefusedError for a foreign file or a wrong length, DiskError when it cannot be read.
    """
    for segment in reversed(list_segments(folder, file_bytes)):
        with opened(open_file(segment.path, os.O_RDONLY)) as fd, disk_errors("read", segment.path):
            def read(number: int, fd: int = fd) -> tuple[int, int, int]:
                return ENTRY.unpack(os.pread(fd, CQ_ENTRY_BYTES, number * CQ_ENTRY_BYTES).ljust(CQ_ENTRY_BYTES, b"\0"))

            count = bisect_left(range(file_bytes // CQ_ENTRY_BYTES), True, key=lambda number: not is_live(read(number)))
            if count and not is_filler(entry := read(count - 1)):
                return QueueEnd(segment.start_offset // CQ_ENTRY_BYTES + count, entry[0] + entry[1])
    return EMPTY


def settle_empty_queue(folder: Path, file_bytes: int) -> None:
    """Delete a queue's files that have only filler and zeros, which a crash left before the first entry; sync the folders' names.

    The process that created the folders may have died before it synced them.
    """
    removed = False
    for segment in list_segments(folder, file_bytes):
        data = segment.path.read_bytes()
        fillers = 0
        while data.startswith(FILLER_BYTES, fillers):
            fillers += CQ_ENTRY_BYTES
        if data.count(0, fillers) == len(data) - fillers:
            segment.path.unlink()
            removed = True
    if removed:
        sync_folder(folder)
    if folder.is_dir():
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)


def open_queue_file(folder: Path, file_bytes: int, position: int) -> tuple[int, int, int]:
    """Open, or create, the file of entry `position`: (descriptor, start of the file in the queue, bytes with blocks, -1: unknown).

    A new file gets filler in place of entries that will not be written (docs/formats.md section 8.3).
    Raises DiskFullError, DiskError, StoreRefusedError.
    """
    byte = position * CQ_ENTRY_BYTES
    made = _open_file_at(folder, file_bytes, byte, byte % file_bytes)
    if made[2] >= 0 and len(os.listdir(folder)) == 1:
        for above in folder.parent, folder.parent.parent:
            os.utime(above)  # the queue's folder may have come long before, to a full disk, and consumers watch these for new queues
    return made


def open_ext_file(folder: Path, file_bytes: int, offset: int) -> tuple[int, int, int]:
    """Do as open_queue_file() for the extension's file of byte `offset`."""
    return _open_file_at(folder, file_bytes, offset, 0)


def _open_file_at(folder: Path, file_bytes: int, byte: int, filler_bytes: int) -> tuple[int, int, int]:
    start = byte - byte % file_bytes
    path = folder / segment_name(start)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        pass  # it is made below
    except OSError as error:
        raise disk_error(error, "open", path) from error
    else:
        length = os.fstat(fd).st_size
        if length != file_bytes:
            os.close(fd)
            raise StoreRefusedError(f"{path} has {length} bytes, not {file_bytes}, the size of this folder's files")
        return fd, start, -1
    allocated = min(filler_bytes + WINDOW_BYTES - filler_bytes % WINDOW_BYTES, file_bytes)
    with closed_on_error(create_file(folder, path.name, file_bytes, allocate=allocated)) as fd:
        if filler_bytes:
            pwrite_all(fd, FILLER_BYTES * (filler_bytes // CQ_ENTRY_BYTES), 0, str(path))
        return fd, start, allocated


_ENTRIES_READ_BYTES = 3276 * CQ_ENTRY_BYTES


def settle_ext_end(queue_folder: Path, ext_folder: Path, queue_file_bytes: int, ext_file_bytes: int) -> int:
    """Return the address of the next unit, after clearing all bytes from there on. May be repeated.

    Raises StoreRefusedError for a foreign file or a wrong length in either folder, DiskError.
    """
    files = list_segments(ext_folder, ext_file_bytes)
    end = _end_of_named(list_segments(queue_folder, queue_file_bytes), files, ext_file_bytes) if files else 0
    removed = False
    for file in reversed(files):
        if file.start_offset >= end:
            file.path.unlink(missing_ok=True)
            removed = True
        elif file.start_offset + ext_file_bytes > end and used_end(file.path) > end - file.start_offset:
            clear_file_from(file.path, end - file.start_offset)
    if removed:
        sync_folder(ext_folder)
    return end


def _end_of_named(queue: list[MappedFile], files: list[MappedFile], file_bytes: int) -> int:
    for address in _addresses_backwards(queue):
        for file in files:
            if file.start_offset <= address < file.start_offset + file_bytes:
                with open(file.path, "rb") as opened:
                    opened.seek(address - file.start_offset)
                    size_bytes = int.from_bytes(opened.read(2), "big", signed=True)
                if CQ_EXT_UNIT_BYTES_MIN <= size_bytes <= file.start_offset + file_bytes - address:
                    return address + size_bytes
    return 0


def _addresses_backwards(queue: list[MappedFile]) -> Iterator[int]:
    """Yield the extension addresses in the queue's entries, the newest entry first."""
    for file in reversed(queue):
        with open(file.path, "rb") as opened:
            end = used_end(file.path)
            end += -end % CQ_ENTRY_BYTES
            while end > 0:
                start = max(0, end - _ENTRIES_READ_BYTES)
                opened.seek(start)
                chunk = opened.read(end - start)
                for at in range(len(chunk) - CQ_ENTRY_BYTES, -1, -CQ_ENTRY_BYTES):
                    tags_code = ENTRY.unpack_from(chunk, at)[2]
                    if is_ext_address(tags_code):
                        yield decode_ext_address(tags_code)
                end = start
