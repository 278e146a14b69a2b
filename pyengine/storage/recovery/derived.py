"""Queues and index files in a recovery: what is found of them, what the log makes of them, and how they are changed.

A queue's own end is found as in RocketMQ (ConsumeQueue.recover), after a crash also in earlier files whose entries may never have been
synced, since a power cut may lose any of their pages. RocketMQ does not dispatch again after a hole, and loses the entries after it; it
begins at the segment where an abnormal recovery began to read, else at the record with the highest offset in any queue
(DefaultMessageStore.start). That is right if queues lose only their newest entries. Here dispatch begins earlier (docs/recovery.md) if
entries or keys would be left out of records that the log still has.

A queue whose entries were shifted, by another program or a bad copy, has no hole: it ends before the queue offset of its
last message. Its next message must not get a queue offset that an older message has, or a rebuild could not tell the two apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyengine.arguments import INT64_MAX
from pyengine.errors import CorruptionError, DiskFullError, FormatError, StoreRefusedError, command, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_filler, is_live
from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.record import I64, QUEUE_OFFSET_AT, decode_record
from pyengine.native import dispatch
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.storage.checkpoint import RecoveryMarker, SharedState, read_checkpoint, write_checkpoint, write_marker
from pyengine.storage.commit_log import CommitLog, Log, LogDamage, LogRun, next_record
from pyengine.storage.consume_queue import message_stored_ms
from pyengine.storage.dispatcher import GAP, Dispatcher, QueueGap
from pyengine.storage.durable_writes import MANY_FILES, rewrite, sync_file, sync_folder
from pyengine.storage.index_file import is_plausible, list_index_files, read_index_header
from pyengine.storage.later_format import refuse_later_record
from pyengine.storage.mapped_file import (
    MappedFile,
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
from pyengine.storage.recovery.log import LogPlan
from pyengine.storage.recovery.quarantine import PlannedPiece, QuarantinedPiece, move_of
from pyengine.storage.recovery.report import Progress

DISPATCH_SLICE_BYTES = 16 << 20
RECOVERED_FILES = 3  # ConsumeQueue.recover reads this many files
_FIRST_CHUNK_BYTES = 204 * CQ_ENTRY_BYTES  # most of many queues end here, within one page
_CHUNK_BYTES_MAX = _FIRST_CHUNK_BYTES << 4  # a larger buffer would be new memory each time, and its page faults cost more than the read
_NS_PER_MS = 1_000_000

# -- what is found -------------------------------------------------------------------


IndexFile = tuple[Path, IndexHeader | None]  # the header is None if the file is too short for one


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


def list_index(store: MessageStore) -> list[IndexFile]:
    """Return the index files with their headers, oldest first."""
    found = []
    for path in list_index_files(store):
        header = None
        with contextlib.suppress(FormatError):
            header = read_index_header(path)
        found.append((path, header))
    return found


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


# -- what is planned -----------------------------------------------------------------


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


def plan_cut(queue: QueueState, log_end: int, *, keep_place: bool) -> QueueCut:
    """Return the truncation of `queue` for a log that ends at `log_end`. Reads only.

    `keep_place`: if no entry is left of a queue that did not begin at 0, its first
    file remains, empty, so that its queue offsets are not used again.
    """
    end, max_physical_offset, entries = queue.end, queue.max_physical_offset, 0
    reaches_beyond = queue.last_offset >= log_end
    if reaches_beyond:
        end, max_physical_offset, entries = truncated(queue, log_end)
    kept = tuple(file for file in queue.files if file.start_offset < end)
    if not kept and keep_place and queue.files[0].start_offset > 0:
        kept, end = queue.files[:1], queue.files[0].start_offset
    is_whole = not reaches_beyond and len(kept) == len(queue.files)
    after = queue if is_whole else replace(
        queue, files=kept, end=end if kept else 0, max_physical_offset=max_physical_offset)
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


def plan_index(
    files: Sequence[IndexFile], layout: IndexLayout, synced_time_ms: int | None, log_min: int, log_end: int
) -> tuple[tuple[tuple[Path, str], ...], int | None]:
    """Compare every index file with the log [log_min, log_end). Return which are deleted and why (docs/recovery.md, "Index files"),
    newest first, so that a crash leaves no gap between files; and the physical offset from which keys are entered again, None: nowhere.

    `synced_time_ms`: after a crash, also of a recovery, the checkpoint's index time; files with a later end time, or after one that ends
    at that time, are deleted. None after an orderly stop, or if the undo of the unfinished put was kept.
    """
    enter_from, before_ms, deleted = log_min, -1, list[tuple[Path, str]]()
    for path, header in files:
        if deleted:
            label = "orphaned"
        elif path.stat().st_size != layout.size_bytes:
            label = "short"
        elif header is None or not is_plausible(header, layout):
            label = "senseless"
        elif synced_time_ms is not None and (header.end_timestamp_ms > synced_time_ms or before_ms == synced_time_ms):
            label = "unsynced"
        elif header.index_count > 1 and header.end_physical_offset >= log_end:
            label = "beyond"
        else:
            enter_from, before_ms = max(header.end_physical_offset, log_min), header.end_timestamp_ms
            continue
        deleted.insert(0, (path, label))
    return tuple(deleted), enter_from if deleted or synced_time_ms is not None else None


def dispatch_start(
    plan: LogPlan, cuts: Sequence[QueueCut], enter_from: int | None, synced_below: int, reputter: SharedState | None,
) -> int:
    """Return where dispatch begins (docs/recovery.md), the log's end if nothing is missing, for queues and index as the plans leave them.

    `enter_from`: see plan_index. `synced_below`: after a crash the offset below which entries are on the disk. `reputter`: see
    RecoveryPlan.
    """
    log, log_min, options = plan.log, max(plan.log.min_offset, 0), plan.found.options
    farthest = max((cut.after.max_physical_offset for cut in cuts), default=-1)
    if farthest <= log_min:
        wanted = [log_min]
    elif reputter is not None and reputter.reput_from is not None:
        wanted = [reputter.reput_from]
    else:
        wanted = [farthest, synced_below]
    wanted += [cut.rebuild_from for cut in cuts if cut.rebuild_from is not None]
    if enter_from is not None and options.message_index_enable:
        wanted.append(enter_from)
    start = max(log_min, min(wanted))
    if start not in (plan.scan.scan_from, plan.end_offset):  # a record begins there, or the last one ends
        start = record_start(log, start)
    if plan.drains or enter_from is not None or any(queues_between(log, start, plan.end_offset, options.enable_multi_dispatch)):
        return start
    return plan.end_offset  # only blanks, prepared and rolled back messages


def record_start(log: Log, offset: int) -> int:
    """Return `offset` if a record begins there or the log ends there, else the start of its segment."""
    index = log.index_of(offset)
    if index is None:
        return max(offset, log.min_offset, 0)
    base = log.segments[index].start_offset
    if offset == base:
        return base
    with log.open(log.segments[index]) as segment:
        reached = segment.walk(base, offset, limit=base + log.size_bytes, check_crc=False, check_offset=False).end_offset
    return offset if reached == offset else base


def queues_between(log: Log, start: int, end: int, multi_dispatch: bool) -> Iterator[TouchedQueue]:
    """Yield the queues of the records in [start, end) that can be read; a queue may come several times."""
    for piece in log.runs(start, end, next_record):
        if isinstance(piece, LogRun):
            touched = touched_queues(piece.segment.view, piece.segment.base, piece.start, piece.end, multi_dispatch=multi_dispatch)
            yield from touched.queues
            piece.stopped(touched.reached, touched.reason)


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a recovery does, decided before its first change: to the log, and by that to queues and index."""

    log: LogPlan
    queues: list[QueueState]      # as they are before, like `index_files`, oldest first; without the pieces that are made again
    index_files: list[IndexFile]
    cuts: tuple[QueueCut, ...]
    deleted_index: tuple[tuple[Path, str], ...]
    dispatch_from: int
    orphans: tuple[PlannedPiece, ...]
    reputter: SharedState | None  # valid shared memory if what its reputter dispatched counts, else None

    def raise_refusals(self) -> None:
        """Raise what `recover` raises before any change; not for a plan that `is_degraded`, whose report says it."""
        if (holder := self.log.holder) is not None:
            with mapped(holder.path) as view:
                refuse_later_record(view, self.log.end_offset - holder.start_offset, self.log.end_offset)
        if not self.log.is_degraded:
            self._refuse_loss()
            self._refuse_misplaced()

    def _refuse_loss(self) -> None:
        """Raise CorruptionError if queues or index have messages whose bytes are in no segment, unless that is accepted.

        It is for RocketMQ's stores, which have no watermark to tell the loss; RocketMQ's own recovery empties the queues.
        """
        found, notes, log = self.log.found, self.log.found.notes, self.log
        if found.accept_loss or log.log.is_ours or notes.left.marker is not None or notes.rebuilding is not None:
            return
        lost = lost_messages(log.log, self.queues, self.index_files, log.end_offset, was_emptied=log.was_emptied)
        if lost:
            raise CorruptionError(
                f"{found.store} has lost a part of its commit log: {lost}. Nothing was changed; restore what is missing from a "
                "copy, carve out what is whole with `pyengine salvage STORE DEST`, or give up those messages with "
                "`pyengine recover STORE --accept-loss`")

    def _refuse_misplaced(self) -> None:
        """Raise StoreRefusedError if dispatch needs a folder and a file has its name; RocketMQ ignores files that no message needs."""
        store, found = self.log.found.store, self.log.found
        tops = [store.consume_queue, *(store.consume_queue / topic for topic in folder_names(store.consume_queue))]
        misplaced = {Path(entry.path) for top in tops if top.exists() for entry in os.scandir(top) if not is_folder(entry)}
        misplaced -= {store.root / piece for piece in found.notes.pieces}
        for queue in queues_between(
                found.log, self.dispatch_from, self.log.end_offset, found.options.enable_multi_dispatch) if misplaced else ():
            folder = store.queue_folder(queue.topic, queue.queue_id)
            for path in misplaced & {folder.parent, folder}:
                raise StoreRefusedError(f"{path} is not a folder, and the log has messages for the queue {folder}; move it away")

    # -- the change

    def mark(self, dispatch_from: int) -> None:
        """Note from where this recovery reads and dispatches, for the next one if this does not finish."""
        write_marker(self.log.found.store, RecoveryMarker(self.log.found.start.path, self.log.scan.scan_from, dispatch_from))

    def change(self, pieces: list[QuarantinedPiece], said: list[str], progress: Progress | None) -> tuple[int, list[QueueState]]:
        """Truncate queues and index and dispatch to them, durably; return where dispatch began, and the queues afterwards."""
        store, end = self.log.found.store, self.log.end_offset
        for orphan in self.orphans:
            orphan.keep()
        cuts = [] if self.orphans else [cut for cut in self.cuts if cut.changes_something]
        for cut in cuts:
            _apply_cut(cut)
            failpoint("recovery_queue_cut")
        self._lower_index_time()
        if self.deleted_index and not self.orphans:
            for path, _ in self.deleted_index:
                path.unlink(missing_ok=True)
            sync_folder(store.index)
            failpoint("recovery_index_deleted")
        start = self._dispatch(pieces, said, progress)
        is_unchanged = not cuts and not self.orphans and start >= end
        queues = self.queues if is_unchanged else list_queues(store)
        self._sync(queues, start)
        return start, queues

    def _lower_index_time(self) -> None:
        """Lower the checkpoint's index time to that of the last file that stays: the next ones, which are made again here if an operator
        removed them, are not synced before all is dispatched."""
        checkpoint, files = self.log.found.notes.left.checkpoint, self.index_files
        kept = [header for _, header in files[: len(files) - len(self.deleted_index)] if header is not None]
        kept_ms = kept[-1].end_timestamp_ms if kept else 0
        if checkpoint.index_msg_timestamp_ms > kept_ms:
            write_checkpoint(self.log.found.store, replace(checkpoint, index_msg_timestamp_ms=kept_ms))

    def _dispatch(self, pieces: list[QuarantinedPiece], said: list[str], progress: Progress | None) -> int:
        """Dispatch the log to queues and index, from where the plan says; return where that began, earlier if a queue has a gap."""
        log, end, start, log_min = self.log.log, self.log.end_offset, self.dispatch_from, max(self.log.log.min_offset, 0)
        if start < end or self.reputter is not None:
            try:
                while (gap := self._dispatch_until_gap(start, said, progress)) is not None:
                    earlier = record_start(log, max(log_min, gap.max_physical))
                    if earlier >= start:  # the queue lacks an entry and has later ones: only the log's first record is early enough
                        folder = self.log.found.store.queue_folder(gap.topic, gap.queue_id)
                        piece = move_of(self.log.found.store, folder, 0, f"queue {gap.queue_id} of {gap.topic} lacked entries in the "
                                        "middle, and was rebuilt", kind="queue")
                        piece.keep()
                        pieces.append(piece.noted)
                        earlier = log_min
                    start = earlier
                    self.mark(start)  # what is written from there on is not synced before all is dispatched
            except DiskFullError as error:
                raise DiskFullError(
                    f"{error}. The log is whole up to offset {end} and stays as it is; its queues and index need room: "
                    "free some and recover again", errno=error.errno, path=error.path) from error
            except StoreRefusedError as error:
                raise StoreRefusedError(
                    f"{error}. The log is whole up to offset {end} and stays as it is; recover again then: it continues from here "
                    "(config/recovery says where)") from error
        failpoint("recovery_dispatched")
        return start

    def _dispatch_until_gap(self, start: int, said: list[str], progress: Progress | None) -> QueueGap | None:
        """Dispatch the log from `start` on; stop and return the gap if a queue would have one that the log can fill."""
        found, log, scan, end = self.log.found, self.log.log, self.log.scan, self.log.end_offset
        scanned_bytes = scan.end_offset - scan.scan_from
        log_min = max(log.min_offset, 0)
        gaps_above = log_min if start == log_min else -2  # what is before a later start may fill any gap
        undo = None if self.reputter is None else bytearray(self.reputter.index_progress or b"")
        written = replace(log, segments=found.store.list_log())  # with those that the drain has made
        with contextlib.closing(Dispatcher(
                found.store, found.store.geometry, found.options, index_progress=undo, gaps_above=gaps_above)) as dispatcher:
            for piece in written.runs(start, end, next_record, DISPATCH_SLICE_BYTES):
                if isinstance(piece, LogDamage):  # RocketMQ's log may have damage that its recovery never reads
                    said.append(f"nothing between {piece.start} and {piece.end} could be dispatched ({piece.reason})")
                    continue
                reached = dispatcher.dispatch(piece.segment.view, piece.segment.base, piece.start, piece.end)
                if dispatcher.stopped_by == GAP:
                    return dispatcher.gap
                piece.stopped(reached, dispatcher.stopped_by)
                if progress is not None:
                    progress(scanned_bytes + min(reached, end) - start, scanned_bytes + end - start)
            if count := dispatcher.loop.struct.queues.out_of_order:
                said.append(f"{count} messages from {start} on are not the next of their queues: {command('check', found.store.root)}")
        return None

    def _sync(self, queues: list[QueueState], start: int) -> None:
        """Sync what has entries or keys of records from `start` on, or from where the reading of the log began.

        After a failed sync queues are rewritten, as the log is, and all of them get the zeros after their end again: those of an earlier
        recovery may be in memory only. Index files that may not be on the disk were made again.
        """
        found, store, unsynced_from = self.log.found, self.log.found.store, min(start, self.log.scan.scan_from)
        has_failed_sync = found.notes.has_failed_sync
        unsynced = [queue for queue in queues if queue.max_physical_offset > unsynced_from]
        is_synced = len(unsynced) >= MANY_FILES and sync_file_system(store.consume_queue)
        for queue in unsynced:
            sync_queue(queue, unsynced_from, is_synced=is_synced, has_failed_sync=has_failed_sync)
            if found.options.enable_consume_queue_ext:
                for extension in list_segments(store.queue_ext_folder(queue.topic, queue.queue_id), store.queue_ext_file_bytes):
                    _sync_queue_file(extension.path, has_failed_sync=has_failed_sync)
        synced_ms = read_checkpoint(store).index_msg_timestamp_ms if found.copied is None else -1
        is_unsynced = start < self.log.end_offset
        for path, header in list_index(store):
            is_unsynced |= header is not None and header.end_timestamp_ms >= synced_ms
            if is_unsynced:
                sync_file(path)
        for queue in queues if has_failed_sync else ():
            extensions = list_segments(store.queue_ext_folder(queue.topic, queue.queue_id), store.queue_ext_file_bytes)
            for path, end in [*((file.path, max(0, queue.end - file.start_offset)) for file in queue.files),
                              *((file.path, used_end(file.path)) for file in extensions)]:
                clear_file_from(path, end, zeros_too=True)
        failpoint("recovery_derived_synced")

    def finish(self) -> int:
        """Restore the times of the files of rebuilt queues, by which a search finds the first file modified at or after a time
        (MappedFileQueue.getMappedFileByTime); return the index time for the checkpoint. May be repeated."""
        store, rebuilding = self.log.found.store, self.log.found.notes.rebuilding
        if rebuilding is not None:
            log, pieces = CommitLog(store, store.segment_bytes), frozenset(rebuilding.pieces)
            for queue in list_queues(store):
                folder = queue.folder.relative_to(store.root)
                if any(str(piece) in pieces for piece in (folder, *folder.parents)):
                    for path, time_ns in _times(queue, rebuilding.moved_path(store, str(folder)), log):
                        os.utime(path, ns=(time_ns, time_ns))
        headers, layout = [header for _, header in list_index(store) if header is not None], store.geometry.index_layout
        return next((header.end_timestamp_ms for header in reversed(headers) if layout.is_full(header.index_count)), 0)

    def next_offsets(self, queues: list[QueueState], said: list[str]) -> dict[tuple[str, int], int]:
        """Return the next queue offset, by the log, of each queue that ends before its last message in what was read just before.

        Its pages are in memory; for a correct queue only one number is compared. Nothing is returned in RocketMQ's stores, where
        an entry's position is its offset, whatever the record has.
        """
        found: dict[tuple[str, int], int] = {}
        read_from = self.log.scan.scan_from if self.log.log.is_ours else self.log.end_offset
        asked = [(queue.last_offset, queue) for queue in queues if read_from <= queue.last_offset < self.log.end_offset]
        for last, queue in sorted(asked, key=lambda one: one[0]):
            base, _, view = self.log.log.view_at(last) or (last, last, b"")
            at = last - base
            if at + QUEUE_OFFSET_AT + I64.size > len(view) or I64.unpack_from(view, at + QUEUE_OFFSET_AT)[0] < queue.max_offset:
                continue
            with contextlib.suppress(FormatError):
                message = decode_record(view, at)
                if (message.topic, message.queue_id, message.physical_offset) == (queue.topic, queue.queue_id, last):
                    found[queue.topic, queue.queue_id] = message.queue_offset + 1
        for topic, queue_id in sorted(found):
            said.append(f"queue {queue_id} of {topic} lacks entries, since its last message has a higher queue offset than "
                        f"its entry: run {command('rebuild', 'STORE', '--topic', topic, '--queue-id', queue_id)}")
        return found


def plan_derived(log: LogPlan) -> RecoveryPlan:
    """Read where each queue ends and the headers of the index files, and compare them with the log as it will be. Reads only.

    StoreRefusedError for files that RocketMQ would refuse.
    """
    found, scan_from, end, log_min = log.found, log.scan.scan_from, log.end_offset, max(log.log.min_offset, 0)
    store, notes, is_abnormal, marker = found.store, found.notes, found.is_abnormal, found.notes.left.marker
    queues, index_files = list_queues(store, notes.pieces), [] if "index" in notes.pieces else list_index(store)
    if found.options.enable_consume_queue_ext:
        refuse_file(store.consume_queue_ext)
        for _, _, folder in _others(store.consume_queue_ext, notes.pieces):
            list_segments(folder, store.queue_ext_file_bytes)
    orphans = () if found.log.segments or found.beyond else tuple(
        move_of(store, folder, 0, "the commit log that these belong to does not exist", kind="derived")
        for folder in (store.consume_queue, store.index)
        if folder.is_dir() and any(path.is_file() for path in folder.rglob("*")))
    # An earlier recovery, interrupted or complete (then `abort` is gone), has put keys that the undo in shared memory does not have.
    is_untouched = is_abnormal and marker is None and notes.rebuilding is None and not notes.has_failed_sync
    reputter = notes.shared if log.by_slot and is_untouched else None
    if reputter is not None and None in (reputter.reput_from, reputter.index_progress):
        reputter = None
    is_crash = (is_abnormal or marker is not None) and reputter is None
    # After a crash the checkpoint, by which scan_from was chosen, covers older records.
    measured = [measured_from(queue, scan_from) for queue in queues] if is_abnormal else queues
    cuts = tuple(plan_cut(queue, end, keep_place=log.log.is_ours) for queue in measured)
    deleted, enter_from = plan_index(index_files, store.geometry.index_layout,
                                     notes.left.checkpoint.index_msg_timestamp_ms if is_crash else None, log_min, end)
    if "index" in notes.pieces:
        deleted, enter_from = (), None
    dispatch_from = dispatch_start(log, cuts, enter_from, scan_from if is_abnormal else end, reputter)
    return RecoveryPlan(log, queues, index_files, cuts, deleted, dispatch_from, orphans, reputter)


def lost_messages(
    log: Log, queues: Sequence[QueueState], index: Sequence[IndexFile], end: int, *, was_emptied: bool
) -> str:
    """Return a sentence about messages that queues and index have and the log has no bytes of; "" if there are none.

    `was_emptied`: only zeros are at the log's end, although the store was stopped in order; after a crash the
    last messages may never have reached the disk, but their segment has.
    """
    files_end = log.segments[-1].start_offset + log.size_bytes if log.segments else 0
    entries = count_entries_beyond_log(queues, end if was_emptied else files_end, files_end)
    keys = 0 if log.segments else sum(header.index_count - 1 for _, header in index if header is not None)
    if not entries and not keys:
        return ""
    named = f"{entries} queue entries name" if entries else f"{keys} keys of the index name"
    return f"{named} messages after its end at {end}, where nothing is left"


# -- the files of a queue ------------------------------------------------------------


def _apply_cut(cut: QueueCut) -> None:
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


def sync_queue(queue: QueueState, from_physical_offset: int, *, is_synced: bool, has_failed_sync: bool) -> None:
    """fsync the files (sync_file) with entries of records at or after `from_physical_offset`; raises FlushError."""
    for file in reversed(queue.files):
        _sync_queue_file(file.path, is_synced=is_synced, has_failed_sync=has_failed_sync)
        first = read_entry(file.path, 0)
        if is_live(first) and not is_filler(first) and first[0] < from_physical_offset:
            return


def _sync_queue_file(path: Path, *, is_synced: bool = False, has_failed_sync: bool) -> None:
    if has_failed_sync:
        rewrite(path, 0, used_end(path))
    else:
        sync_file(path, is_synced=is_synced)


def _times(queue: QueueState, replaced: Path, log: CommitLog) -> Iterable[tuple[Path, int]]:
    """Yield (file, modification time) from the newest to the oldest; files without a message keep their time.

    It is the store time of the last entry's message, or the time of the replaced file if that is not earlier and not later
    than the next file's.
    """
    following_ns: int | None = None
    for file in reversed(queue.files):
        last = min(queue.end - file.start_offset, queue.size_bytes) - CQ_ENTRY_BYTES
        if last < 0 or is_filler(entry := read_entry(file.path, last)) or (stored_ms := message_stored_ms(log, *entry[:2])) < 0:
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
