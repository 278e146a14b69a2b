"""Dispatch in recovery and rebuild: where it must begin, how it is divided, and which index files are kept.

The tables are in docs/recovery.md ("Where dispatch begins", "Index files"). RocketMQ begins at the segment where an
abnormal recovery began to read, else at the record with the highest offset in any queue (DefaultMessageStore.start);
after a crash it deletes index files, and enters only the keys from there on (IndexService.load). That is right if queues
lose only their newest entries. Here dispatch begins earlier if entries or keys would be left out of records that the log
still has. If shared memory is valid, everything below its `reput_from` has been dispatched.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskFullError, FormatError, StoreRefusedError
from pyengine.formats.paths import Root
from pyengine.native.dispatch import (
    TouchedQueue,
    touched_queues,
)
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.native.scan import sync, walk
from pyengine.storage.checkpoint import RecoveryPath
from pyengine.storage.commit_log import Log
from pyengine.storage.consume_queue import sync_ext
from pyengine.storage.dispatcher import GAP, Dispatcher, DispatchOptions, QueueGap
from pyengine.storage.durable_writes import MANY_FILES, sync_file, sync_folder
from pyengine.storage.index_file import is_plausible, list_index_files, read_index_header
from pyengine.storage.mapped_file import mapped
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.log import LogPlan, Work, segments_between
from pyengine.storage.recovery.queues import QueueCut, QueueState, list_queues, sync_queue
from pyengine.storage.recovery.report import RecoveryOptions

_SLICE_BYTES = 1 << 20
DISPATCH_SLICE_BYTES = 16 << 20


def dispatch_start(
    log: Log, path: RecoveryPath, plan: LogPlan, cuts: Sequence[QueueCut], index: IndexPlan,
    *, reput_from: int | None, options: RecoveryOptions,
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
    if index.enter_from is None and not _has_entries(log, start, plan.end_offset, options.enable_multi_dispatch):
        return plan.end_offset  # only blanks, prepared and rolled back messages
    return start


def record_start(log: Log, offset: int) -> int:
    """Return `offset` if a record begins there or the log ends there, else the start of its segment."""
    index = log.index_of(offset)
    if index is None:
        return max(offset, log.min_offset, 0)
    base = log.segments[index].start_offset
    if offset == base:
        return base
    with mapped(log.segments[index].path) as view:
        reached = walk(
            view, base, base, offset, check_crc=False, check_offset=False, limit=base + log.size_bytes
        ).end_offset
    return offset if reached == offset else base


def queues_between(log: Log, start: int, end: int, multi_dispatch: bool) -> Iterator[TouchedQueue]:
    """Yield the queues of the records in [start, end) that can be read; a queue may come several times."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, stop, multi_dispatch=multi_dispatch)
            yield from touched.queues
            if touched.reason == "blank" or touched.reached == stop:
                break
            following = sync(view, base, touched.reached + 1, stop) if touched.reached + 1 < stop else None
            at = stop if following is None else following


def _has_entries(log: Log, start: int, end: int, multi_dispatch: bool) -> bool:
    """Whether a record of [start, end) has an entry in any queue; also True if one cannot be read."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, min(stop, at + _SLICE_BYTES), multi_dispatch=multi_dispatch)
            if touched.queues:
                return True
            if touched.reached == at:
                if touched.reason == "blank":
                    break
                return True
            at = touched.reached
    return False


def _mapped_parts(log: Log, start: int, end: int) -> Iterator[tuple[mmap.mmap, int, int, int]]:
    """Yield (mapping, its first offset, start, end) of each segment's part of [start, end); it is mapped until the next step."""
    for segment in log.segments:
        base = segment.start_offset
        at, stop = max(start, base), min(end, base + log.size_bytes)
        if at < stop:
            with mapped(segment.path) as view:
                yield view, base, at, stop


class LogDispatch:
    """Dispatches the log to queues and index, and makes them durable."""

    def __init__(self, work: Work, log: Log, plan: LogPlan, index_progress: bytes | None) -> None:
        """`index_progress`: the index undo of valid shared memory, else None."""
        self._work, self._log, self._plan, self._index_progress = work, log, plan, index_progress

    def run(self, start: int, unchanged: list[QueueState] | None) -> tuple[int, list[QueueState]]:
        """Dispatch from `start` on, durably; return where dispatch began, and the queues afterwards.

        `unchanged`: the queues as they were listed, if no queue was truncated since; otherwise they are listed again.
        """
        end = self._plan.end_offset
        if start < end or self._index_progress is not None:
            self._work.on_step("dispatch")
            try:
                while (gap := self._dispatch_until_gap(start)) is not None:
                    log_min = max(self._log.min_offset, 0)
                    earlier = record_start(self._log, max(log_min, gap.max_physical))
                    if earlier >= start:  # the queue lacks an entry and has later ones: only the log's first record is early enough
                        folder = self._work.store.queue_folder(gap.topic, gap.queue_id)
                        self._work.quarantine.add_file(folder, 0, "it lacked entries in the middle, and was rebuilt", kind="queue")
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
        self._work.on_step("sync derived")
        unsynced_from = min(start, self._plan.scan.scan_from)
        queues = unchanged if unchanged is not None and start >= end else list_queues(self._work.store)
        unsynced = [queue for queue in queues if queue.max_physical_offset > unsynced_from]
        is_synced = len(unsynced) >= MANY_FILES and sync_file_system(self._work.store.consume_queue)
        for queue in unsynced:
            sync_queue(queue, unsynced_from, is_synced=is_synced)
            if self._work.options.enable_consume_queue_ext:
                sync_ext(self._work.store.queue_ext_folder(queue.topic, queue.queue_id),
                         self._work.store.queue_ext_file_bytes)
        synced_ms = self._work.store.read_checkpoint().index_msg_timestamp_ms
        for path in list_index_files(self._work.store):
            if read_index_header(path).end_timestamp_ms > synced_ms or start < end:
                sync_file(path)
        failpoint("recovery_derived_synced")
        return start, queues

    def _dispatch_until_gap(self, start: int) -> QueueGap | None:
        """Dispatch [start, end); stop and return the gap if a queue would have one that the log can fill."""
        end = self._plan.end_offset
        scanned_bytes = self._plan.scan.end_offset - self._plan.scan.scan_from
        gaps: list[QueueGap] = []

        def on_gap(gap: QueueGap) -> bool:
            gaps.append(gap)
            log_min = max(self._log.min_offset, 0)
            return start > log_min or gap.max_physical > log_min

        undo = None if self._index_progress is None else bytearray(self._index_progress)
        options, store = DispatchOptions.of(self._work.options), self._work.store
        with contextlib.closing(Dispatcher(store, store.geometry, options, index_progress=undo, on_gap=on_gap)) as dispatcher:
            for segment in segments_between(self._work.store, start, end):
                base = segment.start_offset
                with self._log.mapped(segment) as view:
                    at, stop = max(start, base), min(end, base + self._log.size_bytes)
                    while at < stop:
                        reached = dispatcher.dispatch(view, base, at, min(stop, at + DISPATCH_SLICE_BYTES))
                        if reached == at:  # the record or the blank is longer than the slice
                            reached = dispatcher.dispatch(view, base, at, stop)
                        if dispatcher.stopped_by == GAP:
                            return gaps[-1]
                        if reached == at:  # RocketMQ's log may have damage that its recovery never reads
                            following = sync(view, base, at + 1, stop) if at + 1 < stop else None
                            reached = stop if following is None else following
                            self._work.notes.append(
                                f"nothing between {at} and {reached} could be dispatched ({dispatcher.stopped_by})")
                        at = reached
                        self._work.progress(scanned_bytes + min(at, end) - start, scanned_bytes + end - start)
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


