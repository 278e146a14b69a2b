"""From where the log must be dispatched again so that no queue and no index lacks anything.

RocketMQ takes the segment where an abnormal recovery began to read, else the farthest
record that any queue knows (DefaultMessageStore.start). That is right
as long as queues lose nothing but their newest entries. The start is earlier here where
it would otherwise leave something out that the log still holds:

    what is missing                                      start
    every queue                                          the log's first record
    all entries since the farthest one, which lies       that entry
    before the segment where the reading began
    entries in the middle of a queue                     the last entry before the hole
    index files that could not be believed               where the last believed one ends
    entries between a queue's end and its first message  that queue's last entry, or the
    after the start (seen while dispatching)            log's first record without one

When shared memory counts, everything below its `reput_from` has been dispatched.

A rebuild with many processes makes queues and index files piece by piece, to the bytes that one dispatch makes.

    entries  the records of one range of the log put their entries into queue files that exist already. Entry k
             is at byte 20 k, so ranges may be done in any order and at the same time.
    keys     one index file takes its keys from the log, beginning with the record where the file before it was
             full. How many keys each range has must have been counted before. It is a new file at each call,
             beside the folder of the index: a task may be tried again, or twice at once.

Where a queue's offsets have gaps or doubles an entry's place depends on those before it: the caller tells which offset each
queue has reached before the range (`run_into`), and how many entries it will put; `put_entries` says when that was wrong.
Everything written is synced before a function here returns.

pyengine.spark.store_rebuild does so; the store's owner makes the queues' files before, and gives one of the filled index
files its name.

Which index files can be believed, and from where the log's keys must be entered again.

RocketMQ deletes, after a crash, every index file whose end time is later than the
checkpoint's index time, and never cuts an index with the log (IndexService.load).
Then it enters only the keys of the segment where recovery began; older keys of the
deleted file are lost for good. Here they are entered again from where the last believed
file ends (docs/compatibility.md).

    label     what                                                decision
    short     another length than header, slots and entries make  delete
    senseless counts or offsets that no index has                 delete
    unsynced  abort file, and end time after the checkpoint's     delete
    beyond    its last key is of a record that the log lost       delete
    orphaned  follows a file that is deleted                      delete
    sound     everything else                                     keep

Index files are made from the log, so what is deleted here is not kept anywhere.
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
from pyengine.storage.consume_queue import sync_ext
from pyengine.storage.dispatcher import GAP, Dispatcher, DispatchOptions, QueueGap, is_queue_name
from pyengine.storage.durable_writes import FILE_MODE, MANY_FILES, sync_file, sync_folder
from pyengine.storage.index_file import map_index_file
from pyengine.storage.log_scan import LogView
from pyengine.storage.mapped_file import MappedFile, index_file_names, mapped
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.log import LogPlan, Work, segments_between
from pyengine.storage.recovery.queues import QueueCut, QueueState, list_queues, sync_queue
from pyengine.storage.recovery.report import RecoveryOptions, RecoveryPath

_SLICE_BYTES = 1 << 20
DISPATCH_SLICE_BYTES = 16 << 20


def dispatch_start(
    log: LogView, path: RecoveryPath, plan: LogPlan, cuts: Sequence[QueueCut], index: IndexPlan,
    *, reput_from: int | None, options: RecoveryOptions,
) -> int:
    """The start as the table says; the log's end when nothing is missing. Queues and index are taken as the plans leave them.

    `reput_from`: of shared memory that counts, else None.
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
        return plan.end_offset  # nothing but blanks, prepared and rolled back messages
    return start


def record_start(log: LogView, offset: int) -> int:
    """`offset` when a record begins or the log's last one ends there, else the start of its segment."""
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


def queues_between(log: LogView, start: int, end: int, multi_dispatch: bool) -> Iterator[tuple[str, int]]:
    """The queues that the records of [start, end) have entries in, as far as they can be read; each perhaps several times."""
    for view, base, at, stop in _mapped_parts(log, start, end):
        while at < stop:
            touched = touched_queues(view, base, at, stop, multi_dispatch=multi_dispatch)
            yield from ((queue.topic, queue.queue_id) for queue in touched.queues)
            if touched.reason == "blank" or touched.reached == stop:
                break
            following = sync(view, base, touched.reached + 1, stop) if touched.reached + 1 < stop else None
            at = stop if following is None else following


def _has_entries(log: LogView, start: int, end: int, multi_dispatch: bool) -> bool:
    """True when a record of [start, end) has an entry in any queue; what cannot be read counts as such."""
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
    """(mapping, its first offset, start, end) of each segment's part of [start, end); mapped until the next one is asked for."""
    for segment in log.segments:
        base = segment.start_offset
        at, stop = max(start, base), min(end, base + log.size_bytes)
        if at < stop:
            with mapped(segment.path) as view:
                yield view, base, at, stop


# Makes queues and index of [start, end) of the log from nothing, durable, in other processes; False: it shall be done here.
DispatchElsewhere = Callable[[Work, LogView, int, int], bool]


class LogDispatch:
    """Puts what the log has into queues and index, and makes them durable."""

    def __init__(
        self, work: Work, log: LogView, plan: LogPlan, index_progress: bytes | None, elsewhere: DispatchElsewhere | None = None
    ) -> None:
        """`index_progress`: the index undo of shared memory that counts, else None."""
        self._work, self._log, self._plan, self._index_progress = work, log, plan, index_progress
        self._elsewhere = elsewhere

    def run(self, start: int, unchanged: list[QueueState] | None) -> tuple[int, list[QueueState]]:
        """Bring queues and index up to the log and make them durable; returns where that began, and the queues as they are then.

        `unchanged`: the queues as they were listed, when nothing of them was cut since; they are listed again otherwise.
        """
        end = self._plan.end_offset
        if start < end or self._index_progress is not None:
            self._work.on_step("dispatch")
            try:
                is_done = self._elsewhere is not None and self._index_progress is None and self._elsewhere(
                    self._work, self._log, start, end)
                while not is_done and (gap := self._until_gap(start)) is not None:
                    log_min = max(self._log.min_offset, 0)
                    earlier = record_start(self._log, max(log_min, gap.max_physical))
                    if earlier >= start:  # it lacks an entry and knows later ones: no start in the middle mends that
                        folder = self._work.store.queue_folder(gap.topic, gap.queue_id)
                        self._work.quarantine.keep_file(folder, 0, "it lacked entries in the middle: it was made again", kind="queue")
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

    def _until_gap(self, start: int) -> QueueGap | None:
        """Dispatch [start, end), or stop before a queue would be left with a gap that the log can fill."""
        end = self._plan.end_offset
        scanned_bytes = self._plan.scan.end_offset - self._plan.scan.scan_from
        gaps: list[QueueGap] = []

        def on_gap(gap: QueueGap) -> bool:
            gaps.append(gap)
            log_min = max(self._log.min_offset, 0)
            return start > log_min or gap.max_physical > log_min

        with contextlib.closing(self._dispatcher(on_gap)) as dispatcher:
            for segment in segments_between(self._work.store, start, end):
                base = segment.start_offset
                with self._log.mapped(segment) as view:
                    at, stop = max(start, base), min(end, base + self._log.size_bytes)
                    while at < stop:
                        reached = dispatcher.dispatch(view, base, at, min(stop, at + DISPATCH_SLICE_BYTES))
                        if reached == at:  # a record or a blank that is longer than the slice
                            reached = dispatcher.dispatch(view, base, at, stop)
                        if dispatcher.stopped_by == GAP:
                            return gaps[-1]
                        at = reached if reached > at else self._step_over(view, base, at, stop, dispatcher.stopped_by)
                        self._work.progress(scanned_bytes + min(at, end) - start, scanned_bytes + end - start)
        return None

    def _step_over(self, view: mmap.mmap, base: int, at: int, stop: int, reason: str) -> int:
        """Where dispatch goes on when it cannot pass `at`: RocketMQ's log may hold what its recovery never looks at."""
        passed = step_over(view, base, at, stop, reason)
        self._work.notes.append(passed.note)
        return passed.following

    def _dispatcher(self, on_gap: Callable[[QueueGap], bool]) -> Dispatcher:
        return Dispatcher(
            self._work.store,
            self._work.store.geometry,
            DispatchOptions.of(self._work.options),
            index_progress=None if self._index_progress is None else bytearray(self._index_progress),
            on_gap=on_gap,
        )


# -- pieces, each by another process -----------------------------------------------------

Queue = tuple[str, int]


class LogRange(NamedTuple):
    """Whole records, from `begin` to `end`, in one segment."""

    segment: MappedFile
    begin: int
    end: int


class KeyPlace(NamedTuple):
    """A key of the log: the record at `offset` has it, as the `number`-th of its own (from 1)."""

    offset: int
    number: int
    store_timestamp_ms: int


class Passed(NamedTuple):
    """A place of the log that cannot be dispatched."""

    at: int
    following: int
    reason: str

    @property
    def note(self) -> str:
        return f"nothing between {self.at} and {self.following} could be dispatched ({self.reason})"


def step_over(view: mmap.mmap, base: int, at: int, stop: int, reason: str) -> Passed:
    """Where whole records follow what cannot be dispatched at `at`; `stop` without any before it."""
    following = sync(view, base, at + 1, stop) if at + 1 < stop else None
    return Passed(at, stop if following is None else following, reason)


def run_into(queue: TouchedQueue, next_offset: int) -> int:
    """How many entries a queue that has reached `next_offset` gets from offsets that follow each other.

    What is below is there already; the first one beyond goes to the queue's end, and so do all after it.
    """
    return min(queue.count, max(0, queue.max_queue_offset + 1 - next_offset))


def put_entries(store: MessageStore, part: LogRange, begins: Mapping[Queue, int | None], expected: int, *,
                message_delay_level: str, multi_dispatch: bool) -> bool:
    """Put the entries of one range; `begins`: the offset that each queue has reached before it, None: it gets none.

    False when other than `expected` entries were put: then the queues are not what one dispatch makes, and must be made
    again. Raises DiskError, FlushError.
    """
    dispatcher = _RangeDispatcher(store, begins, DispatchOptions(False, message_delay_level, multi_dispatch))
    with mapped(part.segment.path) as view, dispatcher:
        reached = dispatcher.dispatch(view, part.segment.start_offset, part.begin, part.end)
        return reached == part.end and dispatcher.is_known and dispatcher.entries == expected


class _RangeDispatcher(Dispatcher):
    """Takes the ends of queues from its caller, opens only files that exist, and syncs what it closes."""

    _may_make_files = False

    def __init__(self, store: MessageStore, begins: Mapping[Queue, int | None], options: DispatchOptions) -> None:
        super().__init__(store, store.geometry, options)
        self._begins = begins
        self.is_known = True

    def _add_queue(self, topic: bytes, queue_id: int, queue_offset: int) -> bool:
        queue = self._loop.queues[self._loop.queues.add(topic, queue_id)]
        begin = self._begins.get((topic.decode("utf-8"), queue_id), -1) if is_queue_name(topic) else None
        self.is_known = self.is_known and begin != -1
        queue.next_offset = max(begin or 0, 0)
        queue.refused = begin is None or begin < 0
        return True

    def _close_file(self, number: int) -> None:
        queue = self._loop.queues[number]
        if queue.fd >= 0:
            folder = self._folder(self._loop.queues.topic(number), queue.queue_id)
            sync_file(folder / segment_name(queue.file_start))
        super()._close_file(number)


class FilledIndex(NamedTuple):
    """An index file that no reader knows yet, and how many keys were put into it."""

    path: Path
    keys: int


def put_keys(
    folder: Path, name: str, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> FilledIndex:
    """A new file in `folder` with the keys of `ranges` that follow `after`, until it is full; it is to become the index file `name`.

    No two calls make the same file. `after`: the last key of the file before it, None for the
    first one. Raises DiskError (no such folder, too), DiskFullError, FlushError; then nothing is left.
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
    """How many keys the empty file took."""
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
    """False when the file is full before all keys of the range are in it."""
    base = part.segment.start_offset
    with mapped(part.segment.path) as view, bounded(view, base, begin, part.end) as data:
        while True:
            reason = loop.run(data, base, begin, part.end)
            begin = loop.struct.reached
            if reason == NEEDS_QUEUE:  # entries are none of ours
                queues = loop.queues
                queues[queues.add(loop.wanted_topic(), loop.struct.wanted_queue_id)].refused = True
            elif reason == NEEDS_INDEX:
                return False
            elif reason == RANGE_END and begin == part.end:
                return True
            else:
                raise InvariantError(f"the log at {begin} is not what it was: {reason}")


def key_place(part: LogRange, number: int) -> KeyPlace:
    """Where the `number`-th key of a range is (from 1); InvariantError when it has fewer."""
    base, begin, end = part.segment.start_offset, part.begin, part.end
    passed = 0  # keys of the records before `begin`
    with mapped(part.segment.path) as view:

        def record_from(offset: int) -> int:
            """Where the first record at or after `offset` begins."""
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


@dataclass(frozen=True, slots=True)
class IndexFileState:
    """One index file on the disk; `label` is its row of the table above."""

    path: Path
    header: IndexHeader
    label: str


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """`deleted` newest first, so that a crash leaves a row of files without a gap."""

    kept: tuple[IndexFileState, ...]
    deleted: tuple[IndexFileState, ...]
    enter_from: int | None  # physical offset from which keys are entered again; None: nowhere


def plan_index(store: MessageStore, synced_time_ms: int | None, log_min: int, log_end: int) -> IndexPlan:
    """Judge every index file against the log [log_min, log_end). Reads only.

    `synced_time_ms`: after a crash, the checkpoint's index time, beyond which nothing is
    believed; None after an orderly stop, or when the undo of the put under way was kept.
    """
    layout = store.geometry.index_layout
    files: list[IndexFileState] = []
    for file in list_index_files(store):
        label = "orphaned" if files and files[-1].label != "sound" else ""
        files.append(_judge(file, layout, synced_time_ms, log_end, label))
    kept = tuple(file for file in files if file.label == "sound")
    deleted = tuple(file for file in reversed(files) if file.label != "sound")
    enter_from = None
    if deleted or synced_time_ms is not None:
        enter_from = max(kept[-1].header.end_physical_offset, log_min) if kept else log_min
    return IndexPlan(kept, deleted, enter_from)


def delete_index_files(files: Sequence[IndexFileState]) -> None:
    """Unlink them in this order, durable. May be done twice."""
    for file in files:
        file.path.unlink(missing_ok=True)
    if files:
        sync_folder(files[0].path.parent)


def list_index_files(root: Root) -> list[Path]:
    """Index files, oldest first; other names are skipped, as RocketMQ does."""
    folder = StorePaths(root).index
    try:
        return [folder / name for name in index_file_names(folder)]
    except FileNotFoundError:
        return []


def keys_in_index(root: Root) -> int:
    """How many keys the headers of all index files tell of."""
    count = 0
    for file in list_index_files(root):
        with contextlib.suppress(FormatError):
            count += max(0, read_index_header(file).index_count - 1)
    return count


def synced_index_time_ms(store: MessageStore) -> int:
    """What the checkpoint may say when all index files are synced: the end time of the newest full one, 0 without."""
    newest = 0
    for file in list_index_files(store):
        header = read_index_header(file)
        if store.geometry.index_layout.is_full(header.index_count):
            newest = header.end_timestamp_ms
    return newest


def makes_sense(header: IndexHeader, layout: IndexLayout) -> bool:
    """False for counts or offsets that no index has. Times may run backwards: RocketMQ follows the clock."""
    return (
        0 <= header.begin_physical_offset <= header.end_physical_offset
        and 0 <= header.hash_slot_count < max(header.index_count, 1)
        and header.index_count <= layout.max_index_num
    )


def _judge(
    file: Path, layout: IndexLayout, synced_time_ms: int | None, log_end: int, label: str
) -> IndexFileState:
    if file.stat().st_size != layout.size_bytes:
        return IndexFileState(file, IndexHeader(), label or "short")
    header = read_index_header(file)
    if not label:
        if not makes_sense(header, layout):
            label = "senseless"
        elif synced_time_ms is not None and header.end_timestamp_ms > synced_time_ms:
            label = "unsynced"
        elif header.index_count > 1 and header.end_physical_offset >= log_end:
            label = "beyond"
        else:
            label = "sound"
    return IndexFileState(file, header, label)


def read_index_header(file: Path) -> IndexHeader:
    """The header of an index file of any length; FormatError when it has none."""
    with open(file, "rb") as opened:
        return unpack_header(opened.read(INDEX_HEADER_BYTES))
