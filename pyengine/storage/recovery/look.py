"""What recovery finds: the files of a stopped store, looked at once, before anything is decided. Reads only.

`look` lists the files of log, queues and index.

A queue's own end is found as in RocketMQ (ConsumeQueue.recover): from its
third-last file on, the data ends before the first invalid entry. After a crash earlier
files are read too if they may have entries that were never synced, since a power cut
may lose any of their pages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pyengine.arguments import INT64_MAX
from pyengine.engine_config import EngineConfig
from pyengine.errors import FormatError, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_filler, is_live
from pyengine.formats.index_file import IndexHeader
from pyengine.native import dispatch
from pyengine.storage.checkpoint import Notes
from pyengine.storage.index_file import list_index_files, read_index_header
from pyengine.storage.mapped_file import (
    MappedFile,
    drop_page_cache,
    folder_names,
    is_folder,
    list_segments,
    queue_folders,
    refuse_file,
)
from pyengine.storage.message_store import MessageStore

RECOVERED_FILES = 3  # ConsumeQueue.recover reads this many files
_FIRST_CHUNK_BYTES = 204 * CQ_ENTRY_BYTES  # most of many queues end here, within one page
_CHUNK_BYTES_MAX = _FIRST_CHUNK_BYTES << 4  # a larger buffer would be new memory each time, and its page faults cost more than the read


@dataclass(frozen=True, slots=True)
class Found:
    """The notes and the files of a stopped store, as they are before its recovery."""

    store: MessageStore
    notes: Notes
    segments: list[MappedFile]
    queues: list[QueueState]        # without the pieces that are made again, as index files
    index_files: list[IndexState]    # oldest first
    misplaced: frozenset[Path]      # files with the name of a topic's or queue's folder; RocketMQ ignores them
    orphans: tuple[Path, ...]       # the folders of queues and index that have files, if there is no log


def look(
    store: MessageStore, notes: Notes, options: EngineConfig, *, accept_loss: bool = False, reread: bool = True,
) -> Found:
    """List the files, and read where each queue ends. StoreRefusedError for files that RocketMQ would refuse, CorruptionError for
    a missing segment, unless that is accepted.

    `reread`: if a sync has failed since the last boot, drop cached pages, so that the disk is read.
    """
    watermark, pieces = notes.reading.watermark, notes.pieces
    if notes.has_failed_sync and reread:
        # If the watermark covers all before it, only segments after it may have pages that the sync could not write.
        drop_page_cache(store, notes.durable_end if watermark is not None and not watermark.verified_from else 0)
    segments = store.list_complete_log(accept_loss=accept_loss)
    queues = list_queues(store, pieces)
    if options.enable_consume_queue_ext:
        refuse_file(store.consume_queue_ext)
        for _, _, folder in _others(store.consume_queue_ext, pieces):
            list_segments(folder, store.queue_ext_file_bytes)
    orphans = () if segments else tuple(
        folder for folder in (store.consume_queue, store.index)
        if folder.is_dir() and any(path.is_file() for path in folder.rglob("*")))
    index_files = [] if "index" in pieces else list_index(store)
    misplaced = _misplaced_files(store.consume_queue) - {store.root / piece for piece in pieces}
    return Found(store, notes, segments, queues, index_files, frozenset(misplaced), orphans)


class IndexState(NamedTuple):
    """An index file; its header is None if it is too short for one."""

    path: Path
    size_bytes: int
    header: IndexHeader | None

    @property
    def keys(self) -> int:
        """The number of keys in it, by its header."""
        return 0 if self.header is None else max(0, self.header.index_count - 1)


def list_index(store: MessageStore) -> list[IndexState]:
    """Return the index files with their headers, oldest first."""
    found = []
    for path in list_index_files(store):
        header = None
        with contextlib.suppress(FormatError):
            header = read_index_header(path)
        found.append(IndexState(path, path.stat().st_size, header))
    return found


def _misplaced_files(queues: Path) -> set[Path]:
    folders = [queues, *(queues / topic for topic in folder_names(queues))] if queues.exists() else []
    return {Path(entry.path) for folder in folders for entry in os.scandir(folder) if not is_folder(entry)}


# -- queues --------------------------------------------------------------------------


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
    last_offset: int = -1  # the last entry's physical offset, -1 without one

    @property
    def max_offset(self) -> int:
        """The next queue offset."""
        return self.end // CQ_ENTRY_BYTES


def list_queues(store: MessageStore, without: frozenset[str] = frozenset()) -> list[QueueState]:
    """Return every queue that has files, with its own end, but for the pieces `without`. StoreRefusedError for files that RocketMQ
    would refuse."""
    refuse_file(store.consume_queue)
    queues, size_bytes = [], store.queue_file_bytes
    for topic, queue_id, folder in _others(store.consume_queue, without):
        files = tuple(list_segments(folder, size_bytes))
        if files:
            queues.append(_measure(QueueState(topic, queue_id, folder, files, size_bytes), files[-RECOVERED_FILES:]))
    return queues


def _others(folder: Path, pieces: frozenset[str]) -> Iterator[tuple[str, int, Path]]:
    """Yield the queues in this folder that are in none of the pieces."""
    for topic, queue_id, queue in queue_folders(folder):
        if pieces.isdisjoint((f"{folder.name}/{topic}", f"{folder.name}/{topic}/{queue_id}")):
            yield topic, queue_id, queue


def measured_from(queue: QueueState, synced_below: int) -> QueueState:
    """Return `queue` with its own end, if only entries of records before offset `synced_below` are known to be on the disk.

    Such entries come first, so the last file that begins with one is the first that must be read.
    """
    first = last_read = max(0, len(queue.files) - RECOVERED_FILES)
    while first > 0:
        entry = read_entry(queue.files[first].path, 0)
        if is_live(entry) and entry[0] < synced_below:
            break
        first -= 1
    return queue if first == last_read else _measure(queue, queue.files[first:])


def count_entries_beyond_log(queues: Sequence[QueueState], gone_from: int, files_end: int) -> int:
    """Count the queue entries that point to messages at or after offset `gone_from`, where the log has no bytes.

    A single entry may be damaged: it counts only if it points exactly to `gone_from`, or to the start of the first
    missing segment, `files_end`.
    """
    count, is_first = 0, False
    for queue in queues:
        if queue.last_offset >= gone_from:
            end, _, entries = truncated(queue, gone_from)
            holder = next(file for file in queue.files if end < file.start_offset + queue.size_bytes)
            position = max(0, end - holder.start_offset)  # the previous file may be missing
            is_first |= read_entry(holder.path, position)[0] in (gone_from, files_end)
            count += entries
    return count if count > 1 or is_first else 0


def _measure(queue: QueueState, files: Sequence[MappedFile]) -> QueueState:
    """Find the queue's own end in these last files, as ConsumeQueue.recover does."""
    last = None
    for file in files:
        entries, last_here = live_entries(file.path, queue.size_bytes)
        end = file.start_offset + entries * CQ_ENTRY_BYTES
        last = last_here or last
        if end < file.start_offset + queue.size_bytes:
            break
    before = next((file for file in reversed(queue.files) if file.start_offset < end), None) if last is None else None
    newest = last if before is None else read_entry(before.path, min(end - before.start_offset, queue.size_bytes) - CQ_ENTRY_BYTES)
    return replace(queue, end=end, max_physical_offset=_record_end(last), last_offset=newest[0] if newest else -1)


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


def truncated(queue: QueueState, log_end: int) -> tuple[int, int, int]:
    """Return the end, the last record's end and the number of dropped entries, as RocketMQ's truncateDirtyLogicFiles."""
    for file in reversed(queue.files):
        if file.start_offset >= queue.end:
            continue
        first = read_entry(file.path, 0)
        if first[0] >= log_end:
            continue
        entries, last = live_entries(file.path, queue.end - file.start_offset, log_end)
        end = file.start_offset + entries * CQ_ENTRY_BYTES
        return end, _record_end(last), (queue.end - end) // CQ_ENTRY_BYTES
    first_start = queue.files[0].start_offset
    return first_start, -1, (queue.end - first_start) // CQ_ENTRY_BYTES


def _record_end(entry: tuple[int, int, int] | None) -> int:
    return -1 if entry is None or is_filler(entry) else entry[0] + entry[1]


def read_entry(path: Path, at: int) -> tuple[int, int, int]:
    """Return the entry at byte `at` of a queue's file, zeros where that has ended."""
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
