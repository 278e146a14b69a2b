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
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskFullError, FormatError, InvariantError, StoreRefusedError, disk_errors
from pyengine.formats.constants import INDEX_HEADER_BYTES
from pyengine.formats.index_file import IndexHeader, IndexLayout, unpack_header
from pyengine.formats.paths import Root, StorePaths, segment_name
from pyengine.formats.record import decode_record
from pyengine.native.dispatch import (
    NEEDS_INDEX,
    NEEDS_QUEUE,
    RANGE_END,
    DispatchLoop,
    IndexFile,
    TouchedQueue,
    new_progress,
    touched_queues,
)
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import sync_file_system
from pyengine.native.scan import bounded, count_keys, sync, walk
from pyengine.storage.checkpoint import RecoveryPath
from pyengine.storage.consume_queue import sync_ext
from pyengine.storage.dispatcher import GAP, Dispatcher, DispatchOptions, QueueGap, is_queue_name
from pyengine.storage.durable_writes import FILE_MODE, MANY_FILES, sync_file, sync_folder
from pyengine.storage.index_file import map_index_file
from pyengine.storage.log_scan import LogView
from pyengine.storage.mapped_file import MappedFile, index_file_names, mapped
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.log import LogPlan, Work, segments_between
from pyengine.storage.recovery.queues import QueueCut, QueueState, list_queues, refuse_file, sync_queue
from pyengine.storage.recovery.report import RecoveryOptions

_SLICE_BYTES = 1 << 20
DISPATCH_SLICE_BYTES = 16 << 20


def dispatch_start(
    log: LogView, path: RecoveryPath, plan: LogPlan, cuts: Sequence[QueueCut], index: IndexPlan,
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


def record_start(log: LogView, offset: int) -> int:
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


def queues_between(log: LogView, start: int, end: int, multi_dispatch: bool) -> Iterator[TouchedQueue]:
    """Yield the queues of the records in [start, end) that can be read; a queue may come several times."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, stop, multi_dispatch=multi_dispatch)
            yield from touched.queues
            if touched.reason == "blank" or touched.reached == stop:
                break
            following = sync(view, base, touched.reached + 1, stop) if touched.reached + 1 < stop else None
            at = stop if following is None else following


def _has_entries(log: LogView, start: int, end: int, multi_dispatch: bool) -> bool:
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


def _mapped_parts(log: LogView, start: int, end: int) -> Iterator[tuple[mmap.mmap, int, int, int]]:
    """Yield (mapping, its first offset, start, end) of each segment's part of [start, end); it is mapped until the next step."""
    for segment in log.segments:
        base = segment.start_offset
        at, stop = max(start, base), min(end, base + log.size_bytes)
        if at < stop:
            with mapped(segment.path) as view:
                yield view, base, at, stop


# Writes the queues and the index of [start, end) of the log, durably, in other processes; False: the caller must do it.
DispatchElsewhere = Callable[[Work, LogView, int, int], bool]


class LogDispatch:
    """Dispatches the log to queues and index, and makes them durable."""

    def __init__(
        self, work: Work, log: LogView, plan: LogPlan, index_progress: bytes | None, elsewhere: DispatchElsewhere | None = None
    ) -> None:
        """`index_progress`: the index undo of valid shared memory, else None."""
        self._work, self._log, self._plan, self._index_progress = work, log, plan, index_progress
        self._elsewhere = elsewhere

    def run(self, start: int, unchanged: list[QueueState] | None) -> tuple[int, list[QueueState]]:
        """Dispatch from `start` on, durably; return where dispatch began, and the queues afterwards.

        `unchanged`: the queues as they were listed, if no queue was truncated since; otherwise they are listed again.
        """
        end = self._plan.end_offset
        if start < end or self._index_progress is not None:
            self._work.on_step("dispatch")
            try:
                is_done = self._elsewhere is not None and self._index_progress is None and self._elsewhere(
                    self._work, self._log, start, end)
                while not is_done and (gap := self._dispatch_until_gap(start)) is not None:
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
                    f"{error}. The log is whole up to offset {end} and stays as it is; recover again then: it goes on from here "
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
                            passed = skip_damage(view, base, at, stop, dispatcher.stopped_by)
                            self._work.notes.append(passed.note)
                            reached = passed.following
                        at = reached
                        self._work.progress(scanned_bytes + min(at, end) - start, scanned_bytes + end - start)
        return None


# -- pieces for several processes --------------------------------------------------------
#
# A rebuild with many processes (pyengine.spark.store_rebuild) writes queues and index files piece by piece, with the same
# bytes as a single dispatch. Everything that is written is synced before a function returns.
#
#     entries  a task writes the entries of one range of the log to queue files that exist already. Entry k is at byte
#              20 k, so ranges may be done in any order and at the same time. If a queue's offsets have gaps or duplicates,
#              the position of an entry depends on the earlier ones: the caller passes the offset that each queue has
#              reached before the range (`run_into`), and the number of its entries.
#     keys     a task writes the keys of one index file, beginning with the record at which the previous file was full.
#              Each call writes a new file, in a sibling of the index folder, since a task may be repeated or run twice
#              at once; the caller gives one of them its name.

Queue = tuple[str, int]


class LogRange(NamedTuple):
    """Complete records from `begin` to `end`, in one segment."""

    segment: MappedFile
    begin: int
    end: int


class KeyPlace(NamedTuple):
    """A key of the log: the `number`-th key (from 1) of the record at `offset`."""

    offset: int
    number: int
    store_timestamp_ms: int


class UndispatchedRange(NamedTuple):
    """A range of the log that cannot be dispatched."""

    at: int
    following: int
    reason: str

    @property
    def note(self) -> str:
        return f"nothing between {self.at} and {self.following} could be dispatched ({self.reason})"


def skip_damage(view: mmap.mmap, base: int, at: int, stop: int, reason: str) -> UndispatchedRange:
    """Return where complete records follow the damage at `at`; `stop` if there are none before it."""
    following = sync(view, base, at + 1, stop) if at + 1 < stop else None
    return UndispatchedRange(at, stop if following is None else following, reason)


def run_into(queue: TouchedQueue, next_offset: int) -> int:
    """Return how many entries a queue that has reached `next_offset` gets from consecutive offsets.

    Entries below that offset exist already; the first one beyond it goes to the queue's end, and so do all later ones.
    """
    return min(queue.count, max(0, queue.max_queue_offset + 1 - next_offset))


def put_entries(store: MessageStore, part: LogRange, begins: Mapping[Queue, int | None], expected: int, *,
                message_delay_level: str, multi_dispatch: bool) -> bool:
    """Put the entries of one range; `begins`: the offset that each queue has reached before it, None: it gets no entry.

    False if the number of entries was not `expected`: then the queues differ from those of a single dispatch, and must be
    written again. Raises DiskError, FlushError.
    """
    dispatcher = _RangeDispatcher(store, begins, DispatchOptions(False, message_delay_level, multi_dispatch))
    with mapped(part.segment.path) as view, dispatcher:
        reached = dispatcher.dispatch(view, part.segment.start_offset, part.begin, part.end)
        return reached == part.end and dispatcher.is_known and dispatcher.loop.struct.queues.written == expected


class _RangeDispatcher(Dispatcher):
    """A dispatcher that gets the ends of queues from its caller, opens only existing files, and syncs each file that it closes."""

    _may_make_files = False

    def __init__(self, store: MessageStore, begins: Mapping[Queue, int | None], options: DispatchOptions) -> None:
        super().__init__(store, store.geometry, options)
        self._begins = begins
        self.is_known = True

    def _add_queue(self, topic: bytes, queue_id: int, queue_offset: int) -> bool:
        queue = self.loop.queues[self.loop.queues.add(topic, queue_id)]
        begin = self._begins.get((topic.decode("utf-8"), queue_id), -1) if is_queue_name(topic) else None
        self.is_known = self.is_known and begin != -1
        queue.next_offset = max(begin or 0, 0)
        queue.refused = begin is None or begin < 0
        return True

    def _close_file(self, number: int) -> None:
        queue = self.loop.queues[number]
        if queue.fd >= 0:
            folder = self._folder(self.loop.queues.topic(number), queue.queue_id)
            sync_file(folder / segment_name(queue.file_start))
        super()._close_file(number)


class FilledIndex(NamedTuple):
    """An index file that does not have its name yet, and the number of its keys."""

    path: Path
    keys: int


def put_keys(
    folder: Path, name: str, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> FilledIndex:
    """Write the keys of `ranges` that follow `after`, until it is full, to a new file in `folder` for the index file `name`.

    Each call creates another file. `after`: the last key of the previous index file, None for the
    first one. Raises DiskError (also without the folder), DiskFullError, FlushError; then no file is left.
    """
    path = folder / f"{name}.{uuid.uuid4().hex}"
    with disk_errors("make", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.ftruncate(descriptor, layout.size_bytes)
        finally:
            os.close(descriptor)
    try:
        return FilledIndex(path, _fill(path, int(name), layout, ranges, after, queue_file_bytes))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _fill(
    path: Path, number: int, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> int:
    """Fill the empty file; return the number of its keys."""
    mapping, written_to = map_index_file(path, layout, to_write=True)
    try:
        file = IndexFile(mapping, number, layout, written_to)
        try:
            if after is not None:
                file.inherit(IndexHeader(end_timestamp_ms=after.store_timestamp_ms, end_physical_offset=after.offset))
            loop = DispatchLoop(queue_file_bytes, (), new_progress(), index_enabled=True, multi_dispatch=False)
            loop.use_index(file)
            if after is not None:
                loop.struct.indexed_offset, loop.struct.indexed_keys = after.offset, after.number
            for part in ranges:
                begin = part.begin if after is None else max(part.begin, after.offset)
                if begin < part.end and not _put_keys_of(loop, part, begin):
                    break
            keys = loop.struct.keys
            loop.use_index(None)
        finally:
            file.release()
    finally:
        mapping.close()
    sync_file(path)
    return keys


def _put_keys_of(loop: DispatchLoop, part: LogRange, begin: int) -> bool:
    """Put the keys of a range; False if the file is full before all of them are in it."""
    base = part.segment.start_offset
    with mapped(part.segment.path) as view, bounded(view, base, begin, part.end) as data:
        while True:
            reason = loop.run(data, base, begin, part.end)
            begin = loop.struct.reached
            if reason == NEEDS_QUEUE:  # this task does not write entries
                queues = loop.queues
                queues[queues.add(loop.wanted_topic(), loop.struct.wanted_queue_id)].refused = True
            elif reason == NEEDS_INDEX:
                return False
            elif reason == RANGE_END and begin == part.end:
                return True
            else:
                raise InvariantError(f"the log at {begin} is not what it was: {reason}")


def key_place(part: LogRange, number: int) -> KeyPlace:
    """Return the place of the `number`-th key (from 1) of a range; InvariantError if it has fewer keys."""
    base, begin, end = part.segment.start_offset, part.begin, part.end
    passed = 0  # keys of the records before `begin`
    with mapped(part.segment.path) as view:

        def record_from(offset: int) -> int:
            """Return the start of the first record at or after `offset`."""
            return walk(view, base, begin, offset, limit=part.end, check_crc=False).end_offset

        while begin < end:
            single = record_from(begin + 1)
            middle = record_from(max(begin + 1, (begin + end) // 2))
            if middle >= end:
                middle = single
            keys = count_keys(view, base, begin, middle)
            if passed + keys >= number:
                if middle == single:
                    return KeyPlace(begin, number - passed, decode_record(view, begin - base).store_timestamp_ms)
                end = middle
            elif middle > begin:
                begin, passed = middle, passed + keys
            else:
                break
    raise InvariantError(f"the log has no {number} keys in [{part.begin}, {part.end})")


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


def list_index_files(root: Root) -> list[Path]:
    """Return the index files, oldest first; other names are ignored, as in RocketMQ. StoreRefusedError if `index` is no folder."""
    folder = StorePaths(root).index
    refuse_file(folder)
    return [folder / name for name in index_file_names(folder)]


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


def is_plausible(header: IndexHeader, layout: IndexLayout) -> bool:
    """Whether counts and offsets are possible ones. Times may decrease, since RocketMQ uses the wall clock."""
    return (
        0 <= header.begin_physical_offset <= header.end_physical_offset
        and 0 <= header.hash_slot_count < max(header.index_count, 1)
        and header.index_count <= layout.max_index_num
    )


def read_index_header(file: Path) -> IndexHeader:
    """Return the header of an index file of any length; FormatError if it is too short for one."""
    with open(file, "rb") as opened, disk_errors("read", file):
        return unpack_header(opened.read(INDEX_HEADER_BYTES))
