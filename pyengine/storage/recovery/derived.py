"""Queues and index in recovery: what they lack compared with the log, how they are truncated to it, and the dispatch of the rest.

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

The tables are in docs/recovery.md ("Where dispatch begins", "Index files"). RocketMQ begins at the segment where an
abnormal recovery began to read, else at the record with the highest offset in any queue (DefaultMessageStore.start);
after a crash it deletes index files, and enters only the keys from there on (IndexService.load). That is right if queues
lose only their newest entries. Here dispatch begins earlier if entries or keys would be left out of records that the log
still has. If shared memory is valid, everything below its `reput_from` has been dispatched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pyengine.arguments import INT64_MAX
from pyengine.engine_config import EngineConfig
from pyengine.errors import DiskFullError, FormatError, StoreRefusedError, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_filler, is_live
from pyengine.formats.paths import Root
from pyengine.formats.record import I64, QUEUE_OFFSET_AT, decode_record
from pyengine.native import dispatch
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.storage.checkpoint import RebuildMarker, RecoveryPath, read_checkpoint
from pyengine.storage.commit_log import Log, LogDamage, LogRun, Owner, RecoveryStart, next_record
from pyengine.storage.consume_queue import message_stored_ms, sync_ext
from pyengine.storage.dispatcher import GAP, Dispatcher, QueueGap
from pyengine.storage.durable_writes import MANY_FILES, sync_file, sync_folder
from pyengine.storage.index_file import is_plausible, list_index_files, read_index_header
from pyengine.storage.mapped_file import (
    MappedFile,
    MappedFileQueue,
    MappingCache,
    clear_file_from,
    folder_names,
    is_folder,
    list_segments,
    queue_folders,
    refuse_file,
    used_end,
)
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.log import LogPlan, Work
from pyengine.storage.recovery.quarantine import Quarantine
from pyengine.storage.recovery.report import SharedState

RECOVERED_FILES = 3  # ConsumeQueue.recover reads this many files
_FIRST_CHUNK_BYTES = 204 * CQ_ENTRY_BYTES  # most of many queues end here, within one page
_CHUNK_BYTES_MAX = _FIRST_CHUNK_BYTES << 4  # a larger buffer would be new memory each time, and its page faults cost more than the read
DISPATCH_SLICE_BYTES = 16 << 20


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
    for last, queue in sorted(asked, key=lambda one: one[0]):
        base, _, view = log.view_at(last) or (last, last, b"")
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


# -- the plan ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DerivedPlan:
    """What queues and index lack, compared with the log, and how they are made to match it."""

    queues: list[QueueState]
    cuts: tuple[QueueCut, ...]
    index: IndexPlan
    dispatch_from: int
    orphaned_folders: tuple[Path, ...]  # queues and index, if there is no log
    index_progress: bytes | None        # the index undo of valid shared memory

    @property
    def changes_something(self) -> bool:
        """Whether there is something to remove; the dispatch may have work in any case."""
        return bool(self.index.deleted or self.orphaned_folders or any(cut.changes_something for cut in self.cuts))


def compare_derived(
    store: MessageStore, log: Log, plan: LogPlan, start: RecoveryStart, queues: list[QueueState], undo: SharedState | None,
    options: EngineConfig,
) -> DerivedPlan:
    """Compare queues and index with the log of `plan`; `undo`: valid shared memory. Reads only."""
    end, measured, is_abnormal = plan.end_offset, queues, start.path is RecoveryPath.ABNORMAL
    if is_abnormal:  # the checkpoint, by which scan_from was chosen, covers older records
        measured = [measured_from(queue, plan.scan.scan_from) for queue in queues]
    cuts = tuple(plan_cut(queue, end, keep_place=log.owner is Owner.PYENGINE) for queue in measured)
    reput_from = undo.reput_from if undo is not None and undo.index_progress is not None else None
    progress = undo.index_progress if undo is not None and reput_from is not None else None
    is_crash = is_abnormal and progress is None
    index = plan_index(store, start.checkpoint.index_msg_timestamp_ms if is_crash else None, max(log.min_offset, 0), end)
    dispatch_from = dispatch_start(log, start.path, plan, cuts, index, reput_from=reput_from, options=options)
    orphaned = () if log.segments else tuple(
        folder for folder in (store.consume_queue, store.index)
        if folder.is_dir() and any(path.is_file() for path in folder.rglob("*")))
    return DerivedPlan(queues, cuts, index, dispatch_from, orphaned, progress)


def quarantine_orphans(plan: DerivedPlan, quarantine: Quarantine) -> None:
    """Move the folders that have no log to quarantine."""
    for folder in plan.orphaned_folders:
        quarantine.add_file(folder, 0, "the commit log that these belong to does not exist", kind="derived")


def apply_derived(work: Work, log: Log, log_plan: LogPlan, plan: DerivedPlan) -> tuple[int, list[QueueState]]:
    """Carry out the plan, durably; return where dispatch began, and the queues afterwards."""
    quarantine_orphans(plan, work.quarantine)
    cuts = [] if plan.orphaned_folders else [cut for cut in plan.cuts if cut.changes_something]
    for cut in cuts:
        apply_cut(cut)
        failpoint("recovery_queue_cut")
    if plan.index.deleted and not plan.orphaned_folders:
        delete_index_files(plan.index.deleted)
        failpoint("recovery_index_deleted")
    unchanged = None if cuts or plan.orphaned_folders else plan.queues
    return dispatch_log(work, log, log_plan, plan.index_progress, plan.dispatch_from, unchanged)


# -- dispatch ------------------------------------------------------------------------


def dispatch_start(
    log: Log, path: RecoveryPath, plan: LogPlan, cuts: Sequence[QueueCut], index: IndexPlan,
    *, reput_from: int | None, options: EngineConfig,
) -> int:
    """Return the start by the table, or the log's end if nothing is missing, for queues and index as the plans leave them.

    `reput_from`: that of valid shared memory, else None.
    """
    log_min = max(log.min_offset, 0)
    farthest = max((cut.after.max_physical_offset for cut in cuts), default=-1)
    if farthest <= log_min:
        wanted = [log_min]
    elif reput_from is not None:
        wanted = [reput_from]
    else:
        wanted = [farthest, plan.scan.scan_from] if path is RecoveryPath.ABNORMAL else [farthest]
    wanted += [cut.rebuild_from for cut in cuts if cut.rebuild_from is not None]
    if index.enter_from is not None and options.message_index_enable:
        wanted.append(index.enter_from)
    start = max(log_min, min(wanted))
    if start not in (plan.scan.scan_from, plan.end_offset):  # a record begins there, or the last one ends
        start = record_start(log, start)
    if plan.drains or index.enter_from is not None or any(queues_between(log, start, plan.end_offset, options.enable_multi_dispatch)):
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


def dispatch_log(
    work: Work, log: Log, plan: LogPlan, index_progress: bytes | None, start: int, unchanged: list[QueueState] | None,
) -> tuple[int, list[QueueState]]:
    """Dispatch the log to queues and index from `start` on, durably; return where dispatch began, and the queues afterwards.

    `index_progress`: the index undo of valid shared memory, else None. `unchanged`: the queues as they were listed, if no queue was
    truncated since; otherwise they are listed again.
    """
    store, end, log_min = work.store, plan.end_offset, max(log.min_offset, 0)
    if start < end or index_progress is not None:
        try:
            while (gap := dispatch_until_gap(work, log, plan, index_progress, start)) is not None:
                earlier = record_start(log, max(log_min, gap.max_physical))
                if earlier >= start:  # the queue lacks an entry and has later ones: only the log's first record is early enough
                    folder = store.queue_folder(gap.topic, gap.queue_id)
                    work.quarantine.add_file(folder, 0, "it lacked entries in the middle, and was rebuilt", kind="queue")
                    earlier = log_min
                start = earlier
        except DiskFullError as error:
            raise DiskFullError(
                f"{error}. The log is whole up to offset {end} and stays as it is; its queues and index need room: "
                "free some and recover again", errno=error.errno, path=error.path) from error
        except StoreRefusedError as error:
            raise StoreRefusedError(
                f"{error}. The log is whole up to offset {end} and stays as it is; recover again then: it continues from here "
                "(config/recovery says where)") from error
    failpoint("recovery_dispatched")
    unsynced_from = min(start, plan.scan.scan_from)
    queues = unchanged if unchanged is not None and start >= end else list_queues(store)
    unsynced = [queue for queue in queues if queue.max_physical_offset > unsynced_from]
    is_synced = len(unsynced) >= MANY_FILES and sync_file_system(store.consume_queue)
    for queue in unsynced:
        sync_queue(queue, unsynced_from, is_synced=is_synced)
        if work.options.enable_consume_queue_ext:
            sync_ext(store.queue_ext_folder(queue.topic, queue.queue_id), store.queue_ext_file_bytes)
    synced_ms = read_checkpoint(store).index_msg_timestamp_ms
    for path in list_index_files(store):
        if read_index_header(path).end_timestamp_ms > synced_ms or start < end:
            sync_file(path)
    failpoint("recovery_derived_synced")
    return start, queues


def dispatch_until_gap(work: Work, log: Log, plan: LogPlan, index_progress: bytes | None, start: int) -> QueueGap | None:
    """Dispatch the log from `start` on; stop and return the gap if a queue would have one that the log can fill."""
    store, end, log_min = work.store, plan.end_offset, max(log.min_offset, 0)
    scanned_bytes = plan.scan.end_offset - plan.scan.scan_from
    gaps: list[QueueGap] = []

    def on_gap(gap: QueueGap) -> bool:
        gaps.append(gap)
        return start > log_min or gap.max_physical > log_min

    undo = None if index_progress is None else bytearray(index_progress)
    written = replace(log, segments=store.list_log())  # with those that the drain has made
    with contextlib.closing(Dispatcher(store, store.geometry, work.options, index_progress=undo, on_gap=on_gap)) as dispatcher:
        for piece in written.runs(start, end, next_record, DISPATCH_SLICE_BYTES):
            if isinstance(piece, LogDamage):  # RocketMQ's log may have damage that its recovery never reads
                work.notes.append(f"nothing between {piece.start} and {piece.end} could be dispatched ({piece.reason})")
                continue
            reached = dispatcher.dispatch(piece.segment.view, piece.segment.base, piece.start, piece.end)
            if dispatcher.stopped_by == GAP:
                return gaps[-1]
            piece.stopped(reached, dispatcher.stopped_by)
            work.progress(scanned_bytes + min(reached, end) - start, scanned_bytes + end - start)
    return None


class DeletedIndex(NamedTuple):
    """An index file that is to be deleted; `label` is its row of the table."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The decision about the index files; `deleted` newest first, so that a crash leaves no gap between files."""

    deleted: tuple[DeletedIndex, ...]
    enter_from: int | None  # physical offset from which keys are entered again; None: nowhere


def plan_index(store: MessageStore, synced_time_ms: int | None, log_min: int, log_end: int) -> IndexPlan:
    """Compare every index file with the log [log_min, log_end), and decide which are deleted. Reads only.

    `synced_time_ms`: after a crash, the checkpoint's index time; files with a later end time
    are deleted. None after an orderly stop, or if the undo of the unfinished put was kept.
    """
    layout, enter_from = store.geometry.index_layout, log_min
    deleted: list[DeletedIndex] = []
    for path in list_index_files(store):
        if deleted:
            label = "orphaned"
        elif path.stat().st_size != layout.size_bytes:
            label = "short"
        elif not is_plausible(header := read_index_header(path), layout):
            label = "senseless"
        elif synced_time_ms is not None and header.end_timestamp_ms > synced_time_ms:
            label = "unsynced"
        elif header.index_count > 1 and header.end_physical_offset >= log_end:
            label = "beyond"
        else:
            enter_from = max(header.end_physical_offset, log_min)
            continue
        deleted.insert(0, DeletedIndex(path, label))
    return IndexPlan(tuple(deleted), enter_from if deleted or synced_time_ms is not None else None)


def delete_index_files(files: Sequence[DeletedIndex]) -> None:
    """Unlink the files in this order, durably. May be repeated."""
    for file in files:
        file.path.unlink(missing_ok=True)
    if files:
        sync_folder(files[0].path.parent)


def keys_in_index(root: Root) -> int:
    """Return the sum of the keys in the headers of all index files."""
    count = 0
    for file in list_index_files(root):
        with contextlib.suppress(FormatError):
            count += max(0, read_index_header(file).index_count - 1)
    return count


def synced_index_time_ms(store: MessageStore) -> int:
    """Return the checkpoint's index time when all index files are synced: the end time of the newest full one, 0 without one."""
    newest = 0
    for file in list_index_files(store):
        header = read_index_header(file)
        if store.geometry.index_layout.is_full(header.index_count):
            newest = header.end_timestamp_ms
    return newest


