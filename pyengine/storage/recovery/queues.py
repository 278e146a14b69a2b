"""Consume queues in recovery: find their ends, truncate them to the log, give rebuilt files their times.

A queue's own end is found as in RocketMQ (ConsumeQueue.recover): from its
third-last file on, the data ends before the first invalid entry. After a crash earlier
files are read too if they may have entries that were never synced, since a power cut
may lose any of their pages. Then entries of records at or after the end
of the log are dropped (truncateDirtyLogicFiles; the table is in docs/recovery.md, "Queues").
RocketMQ does not dispatch again after a hole, and loses the entries after it.

A queue whose entries were shifted, by another program or a bad copy, has no hole: it ends before the queue offset of its
last message. Its next message must not get a queue offset that an older message has, or a rebuild could not tell the two apart.

The new files of a rebuild get the times of those that they replace: a search by time takes the first file of the queue
that was modified at or after that time (MappedFileQueue.getMappedFileByTime).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyengine.arguments import INT64_MAX
from pyengine.errors import FormatError, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_filler, is_live
from pyengine.formats.record import I64, QUEUE_OFFSET_AT, decode_record
from pyengine.native import dispatch
from pyengine.storage.checkpoint import RebuildMarker
from pyengine.storage.commit_log import Log
from pyengine.storage.consume_queue import message_stored_ms
from pyengine.storage.durable_writes import sync_file, sync_folder
from pyengine.storage.mapped_file import (
    MappedFile,
    MappedFileQueue,
    MappingCache,
    clear_file_from,
    folder_names,
    is_folder,
    list_segments,
    mapped,
    queue_folders,
    refuse_file,
    used_end,
)
from pyengine.storage.message_store import MessageStore

RECOVERED_FILES = 3  # ConsumeQueue.recover reads this many files
_FIRST_CHUNK_BYTES = 204 * CQ_ENTRY_BYTES  # most of many queues end here, within one page
_CHUNK_BYTES_MAX = _FIRST_CHUNK_BYTES << 4  # a larger buffer would be new memory each time, and its page faults cost more than the read


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue on the disk. Positions are bytes of the queue, 20 times the queue offset."""

    topic: str
    queue_id: int
    folder: Path
    files: tuple[MappedFile, ...]
    size_bytes: int
    end: int = 0                   # after the last entry
    max_physical_offset: int = -1  # end of the last entry's record, -1 without real entries
    last_offset: int | None = None  # the last entry's physical offset; None: not read yet

    @property
    def max_offset(self) -> int:
        """The next queue offset."""
        return self.end // CQ_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class QueueCut:
    """The truncation of one queue: files to delete, newest first, and the bytes of `cleared` from `clear_from` on."""

    after: QueueState    # the queue afterwards; without files if all are deleted
    deleted: tuple[MappedFile, ...] = ()
    cleared: MappedFile | None = None
    clear_from: int = 0  # byte in that file
    entries: int = 0     # entries of records that the log no longer has
    rebuild_from: int | None = None  # if entries after a hole are dropped: the physical offset to dispatch again from

    @property
    def changes_something(self) -> bool:
        return bool(self.deleted or self.cleared)


def list_queues(store: MessageStore) -> list[QueueState]:
    """Return every queue that has files, with its own end. StoreRefusedError for files that RocketMQ would refuse."""
    refuse_file(store.consume_queue)
    queues, size_bytes = [], store.queue_file_bytes
    for topic, queue_id, folder in queue_folders(store.consume_queue):
        files = tuple(list_segments(folder, size_bytes))
        if files:
            queues.append(_measure(QueueState(topic, queue_id, folder, files, size_bytes), files[-RECOVERED_FILES:]))
    return queues


def misplaced_files(queues: Path) -> set[Path]:
    """Return the files with the name of a topic's or queue's folder; RocketMQ ignores them."""
    folders = [queues, *(queues / topic for topic in folder_names(queues))] if queues.exists() else []
    return {Path(entry.path) for folder in folders for entry in os.scandir(folder) if not is_folder(entry)}


def refuse_foreign_extensions(store: MessageStore) -> None:
    """Raise StoreRefusedError for files in the queues' extensions that RocketMQ would refuse."""
    refuse_file(store.consume_queue_ext)
    for _, _, queue in queue_folders(store.consume_queue_ext):
        list_segments(queue, store.queue_ext_file_bytes)


def measured_from(queue: QueueState, synced_below: int) -> QueueState:
    """Return `queue` with its own end, if only entries of records before offset `synced_below` are known to be on the disk.

    Such entries come first, so the last file that begins with one is the first that must be read.
    """
    first = last_read = max(0, len(queue.files) - RECOVERED_FILES)
    while first > 0:
        entry = _read_entry(queue.files[first].path, 0)
        if is_live(entry) and entry[0] < synced_below:
            break
        first -= 1
    return queue if first == last_read else _measure(queue, queue.files[first:])


def plan_cut(queue: QueueState, log_end: int, *, keep_place: bool) -> QueueCut:
    """Return the truncation of `queue` for a log that ends at `log_end`. Reads only.

    `keep_place`: if no entry is left of a queue that did not begin at 0, its first
    file remains, empty, so that its queue offsets are not used again.
    """
    end, max_physical_offset, entries = queue.end, queue.max_physical_offset, 0
    reaches_beyond = _last_offset(queue) >= log_end
    if reaches_beyond:
        end, max_physical_offset, entries = _truncated(queue, log_end)
    kept = tuple(file for file in queue.files if file.start_offset < end)
    if not kept and keep_place and queue.files[0].start_offset > 0:
        kept, end = queue.files[:1], queue.files[0].start_offset
    is_whole = not reaches_beyond and len(kept) == len(queue.files)
    after = queue if is_whole else replace(
        queue, files=kept, end=end if kept else 0, max_physical_offset=max_physical_offset, last_offset=None)
    cut = QueueCut(after, deleted=tuple(reversed(queue.files[len(kept):])), entries=entries)
    is_lossy = any(used_end(file.path) for file in cut.deleted)
    if kept:
        clear_from = end - kept[-1].start_offset
        if used_end(kept[-1].path, clear_from) > clear_from:
            cut = replace(cut, cleared=kept[-1], clear_from=clear_from)
            is_lossy = True
    if is_lossy and not reaches_beyond:  # the queue has entries after its own end: a hole
        cut = replace(cut, rebuild_from=max(0, max_physical_offset))
    return cut


def count_entries_beyond_log(queues: Sequence[QueueState], gone_from: int, files_end: int) -> int:
    """Count the queue entries that point to messages at or after offset `gone_from`, where the log has no bytes.

    A single entry may be damaged: it counts only if it points exactly to `gone_from`, or to the start of the first
    missing segment, `files_end`.
    """
    count, is_first = 0, False
    for queue in queues:
        if queue.files and _last_offset(queue) >= gone_from:
            end, _, entries = _truncated(queue, gone_from)
            holder = next(file for file in queue.files if end < file.start_offset + queue.size_bytes)
            position = max(0, end - holder.start_offset)  # the previous file may be missing
            is_first |= _read_entry(holder.path, position)[0] in (gone_from, files_end)
            count += entries
    return count if count > 1 or is_first else 0


def apply_cut(cut: QueueCut) -> None:
    """Truncate the queue, durably. May be repeated; an empty folder is removed, and then its topic's folder if that is empty."""
    for file in cut.deleted:
        file.path.unlink(missing_ok=True)
    if cut.cleared is not None:
        clear_file_from(cut.cleared.path, cut.clear_from)
    if cut.after.files:
        sync_folder(cut.after.folder)
        return
    for empty in (cut.after.folder, cut.after.folder.parent):
        try:
            empty.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # the folder has other files
            sync_folder(empty)
            return
        sync_folder(empty.parent)


def sync_queue(queue: QueueState, from_physical_offset: int, *, is_synced: bool) -> None:
    """fsync the files (sync_file) with entries of records at or after `from_physical_offset`; raises FlushError."""
    for file in reversed(queue.files):
        sync_file(file.path, is_synced=is_synced)
        first = _read_entry(file.path, 0)
        if is_live(first) and not is_filler(first) and first[0] < from_physical_offset:
            return


# -- reading ----------------------------------------------------------------------


def _measure(queue: QueueState, files: Sequence[MappedFile]) -> QueueState:
    """Find the queue's own end in these last files, as ConsumeQueue.recover does."""
    last = None
    for file in files:
        entries, last_here = live_entries(file.path, queue.size_bytes)
        end = file.start_offset + entries * CQ_ENTRY_BYTES
        last = last_here or last
        if end < file.start_offset + queue.size_bytes:
            break
    return replace(queue, end=end, max_physical_offset=_record_end(last), last_offset=last[0] if last else None)


def live_entries(path: Path, size_bytes: int, below: int = INT64_MAX) -> tuple[int, tuple[int, int, int] | None]:
    """Return the number of entries at the file's beginning, in at most `size_bytes`, and the last of them.

    They end before the first invalid entry, or the first of a record at or after offset `below`.
    """
    count, last, room = 0, None, size_bytes // CQ_ENTRY_BYTES
    for chunk in _chunks(path):
        live = min(dispatch.live_entries(chunk, below), room - count)
        if live:
            count += live
            last = ENTRY.unpack_from(chunk, (live - 1) * CQ_ENTRY_BYTES)
        if live * CQ_ENTRY_BYTES < len(chunk):
            break
    return count, last


def _truncated(queue: QueueState, log_end: int) -> tuple[int, int, int]:
    """Return the end, the last record's end and the number of dropped entries, as RocketMQ's truncateDirtyLogicFiles."""
    for file in reversed(queue.files):
        if file.start_offset >= queue.end:
            continue
        first = _read_entry(file.path, 0)
        if first[0] >= log_end:
            continue
        entries, last = live_entries(file.path, queue.end - file.start_offset, log_end)
        end = file.start_offset + entries * CQ_ENTRY_BYTES
        return end, _record_end(last), (queue.end - end) // CQ_ENTRY_BYTES
    first_start = queue.files[0].start_offset
    return first_start, -1, (queue.end - first_start) // CQ_ENTRY_BYTES


def _record_end(entry: tuple[int, int, int] | None) -> int:
    return -1 if entry is None or is_filler(entry) else entry[0] + entry[1]


def _last_offset(queue: QueueState) -> int:
    """Return the physical offset of the last entry, -1 without one."""
    if queue.last_offset is not None:
        return queue.last_offset
    for file in reversed(queue.files):
        if file.start_offset < queue.end:
            return _read_entry(file.path, min(queue.end - file.start_offset, queue.size_bytes) - CQ_ENTRY_BYTES)[0]
    return -1


def _read_entry(path: Path, at: int) -> tuple[int, int, int]:
    with open(path, "rb") as file, disk_errors("read", path):
        file.seek(at)
        return ENTRY.unpack(file.read(CQ_ENTRY_BYTES).ljust(CQ_ENTRY_BYTES, b"\0"))


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the file's bytes in chunks of complete entries, except for the last; the chunks grow."""
    with open(path, "rb", buffering=0) as file:
        want = _FIRST_CHUNK_BYTES
        while True:
            with disk_errors("read", path):
                chunk = file.read(want)
            if not chunk:
                return
            yield chunk
            want = min(want << 4, _CHUNK_BYTES_MAX)


# -- queue offsets in the log ------------------------------------------------------------


def next_offsets_from_log(log: Log, queues: Sequence[QueueState], start: int, end: int) -> dict[tuple[str, int], int]:
    """Return the next queue offset, by the log, of each queue that ends before its last message in [start, end).

    The range was read just before, so its pages are in memory; for a correct queue only one number is compared.
    """
    found: dict[tuple[str, int], int] = {}
    asked = [(queue.last_offset, queue) for queue in queues
             if queue.last_offset is not None and start <= queue.last_offset < end]
    base = -1
    with contextlib.ExitStack() as stack:
        for last, queue in sorted(asked, key=lambda one: one[0]):
            index = log.index_of(last)
            if index is None:
                continue
            segment = log.segments[index]
            if segment.start_offset != base:
                stack.close()
                base, view = segment.start_offset, stack.enter_context(mapped(segment.path))
            at = last - base
            if at + QUEUE_OFFSET_AT + I64.size > len(view) or I64.unpack_from(view, at + QUEUE_OFFSET_AT)[0] < queue.max_offset:
                continue
            with contextlib.suppress(FormatError):
                message = decode_record(view, at)
                if (message.topic, message.queue_id, message.physical_offset) == (queue.topic, queue.queue_id, last):
                    found[queue.topic, queue.queue_id] = message.queue_offset + 1
    return found


# -- times -------------------------------------------------------------------------------

_NS_PER_MS = 1_000_000


def restore_queue_times(store: MessageStore, marker: RebuildMarker) -> None:
    """Set the times of the files of all queues of `marker`. May be repeated."""
    log = store.open_log(MappingCache(mappings_max=8))
    for queue in list_queues(store):
        folder = queue.folder.relative_to(store.root)
        if any(str(piece) in marker.pieces for piece in (folder, *folder.parents)):
            for path, time_ns in _times(queue, marker.moved_path(store, str(folder)), log):
                os.utime(path, ns=(time_ns, time_ns))


def _times(queue: QueueState, replaced: Path, log: MappedFileQueue) -> Iterable[tuple[Path, int]]:
    """Yield (file, modification time) from the newest to the oldest; files without a message keep their time.

    It is the store time of the last entry's message, or the time of the replaced file if that is not earlier and not later
    than the next file's.
    """
    following_ns: int | None = None
    for file in reversed(queue.files):
        stored_ms = _last_store_time_ms(queue, file.path, file.start_offset, log)
        if stored_ms < 0:
            continue
        time_ns = stored_ms * _NS_PER_MS
        try:
            before_ns = os.stat(replaced / file.path.name).st_mtime_ns
        except OSError:
            before_ns = -1
        if before_ns >= time_ns and (following_ns is None or before_ns <= following_ns):
            time_ns = before_ns
        yield file.path, time_ns
        following_ns = time_ns


def _last_store_time_ms(queue: QueueState, path: Path, start: int, log: MappedFileQueue) -> int:
    last = min(queue.end - start, queue.size_bytes) - CQ_ENTRY_BYTES
    if last < 0:
        return -1
    entry = _read_entry(path, last)
    return -1 if is_filler(entry) else message_stored_ms(log, entry[0], entry[1])
