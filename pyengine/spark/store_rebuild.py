"""Rebuilds queues and index from the log in the workers, by ranges of bytes, with the same bytes as `pyengine rebuild`.

A store that was stopped in order and whose log is whole:

    survey     walk each range of the log: its queues, their offsets, the number of keys
    move       the driver moves the old files to quarantine, and creates empty files of the queues
    make       each range writes its entries into the queues' files; each index file gets its keys
    name       the driver renames the index files, when all of them have the counted keys
    recovery   as after any rebuild, with nothing left to dispatch: times of files, checkpoint, markers

Any other one (it was not stopped in order, its log is damaged, queue offsets have gaps or are repeated):

    survey     by one process, as `pyengine rebuild` does; damage of durable bytes is refused
    recovery   moves the files and finds the log's end, as always; then, instead of its own dispatch:
    parts      walk each range again, and divide it where records or a queue's offsets do not follow each other
    make       as above

One process makes the queues of a store with an extension, and what the tasks find they cannot make right; the report's notes say so.

Markers (storage.checkpoint) exist from before the first move to the end, so any start, `recover` or `rebuild` completes the
store after the driver was killed. Spark may run a task twice, also at once: an entry's position and bytes follow from the log, and
each attempt fills an index file of its own, of which the driver uses the one that Spark reports.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record import BEGIN
from pyengine.formats.record_case import CaseLabel
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import count_keys, walk
from pyengine.spark.jobs import Unit, run_units
from pyengine.spark.store_verify import TASK_BYTES, LogPart, LogWalk, WalkedLog, first_record, log_walks
from pyengine.storage.checkpoint import RebuildMarker, RecoveryPath, read_marker, read_rebuild_marker, read_sync_failure
from pyengine.storage.config import EngineConfig, load_config
from pyengine.storage.consume_queue import find_queue_end, open_queue_file, settle_empty_queue
from pyengine.storage.dispatcher import is_queue_name
from pyengine.storage.durable_writes import make_folders, sibling_of, sync_folder
from pyengine.storage.index_file import IndexFiles, read_index_header
from pyengine.storage.log_scan import LogView, Owner, find_recovery_start
from pyengine.storage.mapped_file import MappedFile, mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.dispatch import UndispatchedRange, skip_damage
from pyengine.storage.recovery.log import Work, plan_log, segments_between
from pyengine.storage.recovery.quarantine import move_to_quarantine
from pyengine.storage.recovery.rebuild import (
    FilledIndex,
    LogRange,
    Queue,
    RebuildReport,
    RebuildWork,
    Survey,
    key_place,
    put_entries,
    put_keys,
    run_into,
)
from pyengine.storage.recovery.report import GrowingProgress, Progress, RecoveryOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNREADABLE = "\ufffd"  # part of the decoded topic if it is not UTF-8
_QUEUE_OFFSET_MAX = (1 << 62) // CQ_ENTRY_BYTES
_REMOVE_TRIES = 100
_PARTS_MAX = 10_000  # of one range: with more, the log is damaged in too many places


def rebuild(
    spark: SparkSession, store: str | os.PathLike[str], *, config: EngineConfig | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> RebuildReport:
    """Rebuild all queues and the index of a stopped store from its log, as `pyengine rebuild` does.

    The bytes are the same; the old files go to quarantine. The workers write under the same path, on a file system on which several
    hosts may write different parts of one file. `sizes` (or a whole `config`) are settings of the store. StoreBusyError if a
    process has the store open, NotAStoreError, StoreRefusedError, DiskFullError, DiskError.
    """
    from pyengine.ipc.crashed_engine_memory import rebuild_offline

    root = Path(store).absolute()
    config = config or load_config(root, {name: str(value) for name, value in sizes.items()})
    report = GrowingProgress(progress)
    return rebuild_offline(root, config, progress=report, work=WorkersRebuild(spark, task_bytes, report))


# -- units ------------------------------------------------------------------------


class CountedPart(NamedTuple):
    """A task's result: its range's part, and the number of keys of its records."""

    part: LogPart
    keys: int


def _survey(one: LogWalk, common: object) -> CountedPart | None:
    """Walk one range of the log, and count its queues and keys."""
    part = one.run(common)
    return None if part is None else CountedPart(part, _count(LogRange(one.segment, part.begin, part.walk.end_offset)))


def _count(one: LogRange) -> int:
    with mapped(one.segment.path) as view:
        return count_keys(view, one.segment.start_offset, one.begin, one.end)


class SharedWork(NamedTuple):
    """The common input of all units that make files."""

    store: MessageStore
    message_delay_level: str
    ranges: list[LogRange]


class PartsFound(NamedTuple):
    """A task's result: parts, each with its queues and keys, the ranges between them, and the start of the next record."""

    begin: int
    parts: list[tuple[LogRange, list[TouchedQueue], int]]
    passed: list[UndispatchedRange]
    end: int


@dataclass(frozen=True, slots=True)
class PartsSearch:
    """Divides the records that begin in [first, stop) of one segment into parts in which a queue's offsets follow each other.

    `segment_stop`: the segment's end `segment_end`, or the log's end before it.
    """

    segment: MappedFile
    first: int
    stop: int
    segment_stop: int
    segment_end: int

    @property
    def unit(self) -> Unit:
        return Unit(self.stop - self.first, self.run)

    def run(self, common: object) -> PartsFound | None:
        """Return the parts; None if no record is found near the start, or if there are too many parts."""
        with mapped(self.segment.path) as view:
            begin = first_record(view, self.segment, self.first, self.stop, self.segment_stop)
        return None if begin is None else self.found_from(begin)

    def found_from(self, begin: int) -> PartsFound | None:
        """Return the parts from the record, or the damage, at `begin` on."""
        base, at = self.segment.start_offset, begin
        found = PartsFound(begin, [], [], begin)
        with mapped(self.segment.path) as view:
            while at < self.stop:
                walked = walk(view, base, at, self.stop, limit=self.segment_stop, check_crc=False)
                if not self._add_parts(view, at, walked.end_offset, found):
                    return None
                at = walked.end_offset
                if at >= self.stop:
                    break
                if walked.reason == CaseLabel.BLANK and self.segment_stop == self.segment_end:
                    at = self.segment_end
                elif len(found.passed) == _PARTS_MAX:
                    return None
                else:
                    found.passed.append(skip_damage(view, base, at, self.segment_stop, walked.reason))
                    at = found.passed[-1].following
        return found._replace(end=at)

    def _add_parts(self, view: mmap.mmap, begin: int, end: int, found: PartsFound) -> bool:
        """Halve whole records until the offsets of each queue follow each other; False for too many parts."""
        base, wanted = self.segment.start_offset, [(begin, end)]
        while wanted:
            begin, end = wanted.pop()
            if begin == end:
                continue
            queues, middle = touched_queues(view, base, begin, end, multi_dispatch=True).queues, end
            if any(queue.count != queue.max_queue_offset - queue.min_queue_offset + 1 for queue in queues):
                middle = walk(view, base, begin, max(begin + 1, (begin + end) // 2), limit=end, check_crc=False).end_offset
                if middle == end:
                    middle = walk(view, base, begin, begin + 1, limit=end, check_crc=False).end_offset
            if middle == end:
                if len(found.parts) == _PARTS_MAX:
                    return False
                found.parts.append((LogRange(self.segment, begin, end), queues, count_keys(view, base, begin, end)))
            else:
                wanted += [(middle, end), (begin, middle)]
        return True


def _put_entries(one: LogRange, begins: dict[Queue, int | None], expected: int, shared: SharedWork) -> bool:
    """Write the entries of one range; `begins` and `expected`: see put_entries."""
    return put_entries(shared.store, one, begins, expected, message_delay_level=shared.message_delay_level, multi_dispatch=True)


def _fill_index(folder: Path, name: str, first: int, skipped: int, shared: SharedWork) -> FilledIndex:
    """Fill one index file, from the key after the `skipped`-th one of the range number `first` on."""
    after = key_place(shared.ranges[first], skipped) if skipped else None
    return put_keys(folder, name, shared.store.geometry.index_layout, shared.ranges[first:], after, shared.store.queue_file_bytes)


# -- the rebuild's work -----------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """The log as found by the workers: parts in order, and the number of keys of each."""

    ranges: list[LogRange] = field(default_factory=list)
    queues: list[list[TouchedQueue]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def add(self, one: LogRange, queues: list[TouchedQueue], keys: int) -> None:
        self.ranges.append(one)
        self.queues.append(queues)
        self.keys.append(keys)

    @property
    def end(self) -> int:
        return self.ranges[-1].end if self.ranges else 0

    @property
    def bytes(self) -> int:
        return self.end - self.ranges[0].begin if self.ranges else 0


class WorkersRebuild(RebuildWork):
    """Reads the log and makes the files in the workers, if the result is that of one process."""

    def __init__(self, spark: SparkSession, task_bytes: int, progress: GrowingProgress) -> None:
        self._spark = spark
        self._task_bytes = task_bytes
        self._progress = progress
        self._parts: _Parts | None = None
        self._is_late = False  # the files are made inside the recovery, from the recovered log

    def survey(self, store: MessageStore, options: RecoveryOptions, log: LogView, progress: Progress) -> Survey:
        if options.enable_consume_queue_ext:
            self.note = "made by one process: its queues have an extension, whose units are in the order of the log"
            return super().survey(store, options, log, progress)
        if not _was_cut_short(store):
            self._parts = self._walk(log, options)
            if self._is_regular(log) and self._parts.end == _end_of_recovery(store, log, options):
                return Survey(log, in_log={(queue.topic, queue.queue_id) for queues in self._parts.queues for queue in queues})
        self._parts, self._is_late = None, True
        return super().survey(store, options, log, progress)

    def make(
        self, store: MessageStore, options: RecoveryOptions, made: Collection[Queue], marker: RebuildMarker
    ) -> int | None:
        parts = self._parts
        if parts is None:
            return None
        move_to_quarantine(store, marker)
        self.note = self._make_files(store, options, parts)
        if self.note:
            return None
        self.made_bytes = parts.bytes
        return parts.end

    def dispatch(self, work: Work, log: LogView, start: int, end: int) -> bool:
        marker = read_rebuild_marker(work.store)
        if not self._is_late or start != max(log.min_offset, 0) or marker is None:
            return False
        parts, passed = self._parts_between(work.store, log, start, end)
        note = "made by one process: the log has too many gaps to divide it into parts"
        if parts is not None:
            note = self._make_files(work.store, work.options, parts)
            if not note:
                work.notes.extend(one.note for one in passed)
                return True
            move_to_quarantine(work.store, marker)  # the incomplete files
        work.notes.append(note)
        return False

    def _make_files(self, store: MessageStore, options: RecoveryOptions, parts: _Parts) -> str:
        """Make queues and index of these parts; return why the result differs from that of one process, or ""."""
        layout = store.geometry.index_layout
        units, ends, why = _entries_of(store, parts)
        if why:
            return f"made by one process: {why}"
        for queue, (first, last) in sorted(ends.items()):
            make_queue_files(store.queue_folder(*queue), store.queue_file_bytes, first, last)
        files = plan_index_files(parts, layout) if options.message_index_enable else []
        folder = store.index
        names = IndexFiles(folder, layout).next_names(len(files))
        keys = [Unit(layout.size_bytes, functools.partial(_fill_index, sibling_of(folder), name, *file))
                for name, file in zip(names, files)]
        common = SharedWork(store, options.message_delay_level, parts.ranges)
        with _unfinished(sibling_of(folder), needed=bool(keys)):
            outcomes = run_units(self._spark, [*units, *keys], common, task_bytes=self._task_bytes,
                                 progress=lambda done, whole: self._progress(parts.bytes + done, parts.bytes + whole))
            filled = outcomes[len(units) :]
            if not all(outcomes[: len(units)]):
                return "made by one process: queue offsets do not follow each other in the log"
            if keys and not _is_as_counted(filled, sum(parts.keys), layout):
                return "made by one process: the index that the workers made does not hold the keys that they had counted"
            _name_index_files(folder, names, filled)
        return ""

    def _parts_between(self, store: MessageStore, log: LogView, start: int, end: int) -> tuple[_Parts | None, list[UndispatchedRange]]:
        """Return the parts of [start, end) and the ranges between them, as one walk finds them; None for too many parts."""
        searches = [PartsSearch(segment, first, min(first + self._task_bytes, stop), stop, segment.start_offset + log.size_bytes)
                    for segment in segments_between(store, start, end)
                    for stop in [min(end, segment.start_offset + log.size_bytes)]
                    for first in range(max(start, segment.start_offset), stop, self._task_bytes)]
        outcomes = run_units(self._spark, [search.unit for search in searches], None, task_bytes=self._task_bytes)
        parts, passed, at = _Parts(), [], start
        for search, found in zip(searches, outcomes):
            at = max(at, search.segment.start_offset)
            if at >= search.stop:
                continue
            if found is None or found.begin != at:
                found = search.found_from(at)
            if found is None:
                return None, []
            for one, queues, keys in found.parts:
                parts.add(one, queues, keys)
            passed += found.passed
            at = found.end
        return parts, passed

    def _walk(self, log: LogView, options: RecoveryOptions) -> _Parts:
        """Return the log's parts up to the first position without a record."""
        checks_crc = options.check_crc_on_recover and log.watermark is not None
        walks = [one for segment in log.segments
                 for one in log_walks(segment, log.size_bytes, None, self._task_bytes, checks_crc=checks_crc, multi_dispatch=True)]
        units = [Unit(one.stop - one.first, functools.partial(_survey, one)) for one in walks]
        found = run_units(self._spark, units, None, task_bytes=self._task_bytes, progress=self._progress)
        keys = {(one.segment, counted.part.begin): counted.keys for one, counted in zip(walks, found) if counted}
        walked = WalkedLog([(one, counted and counted.part) for one, counted in zip(walks, found)])
        parts, has_ended = _Parts(), False
        self._is_whole = True
        for segment, expected in zip(log.segments, itertools.count(log.min_offset, log.size_bytes)):
            if has_ended or segment.start_offset != expected:
                self._is_whole = self._is_whole and has_ended and used_end(segment.path) == 0
                has_ended = True
                continue
            at, reason = segment.start_offset, ""
            for part in walked.of_segment(segment, segment.start_offset):
                at, reason = part.walk.end_offset, part.walk.reason
                if part.begin < at:
                    one = LogRange(segment, part.begin, at)
                    known = keys.get((segment, part.begin))
                    parts.add(one, part.queues, _count(one) if known is None else known)
            position = at - segment.start_offset
            if reason != "blank" and position != log.size_bytes:
                has_ended = True
                self._is_whole = used_end(segment.path, position) == position
        return parts

    def _is_regular(self, log: LogView) -> bool:
        """Return whether the log is whole, and each queue's offsets follow each other in the order of the log."""
        parts = self._parts
        assert parts is not None
        if not self._is_whole or (log.watermark is not None and parts.end < log.watermark):
            return False
        reached: dict[Queue, int] = {}
        for queue in (queue for queues in parts.queues for queue in queues):
            key = queue.topic, queue.queue_id
            before = reached.get(key, queue.min_queue_offset - 1)
            if queue.min_queue_offset != before + 1 or queue.count != queue.max_queue_offset - before:
                return False
            reached[key] = queue.max_queue_offset
        return True


def _was_cut_short(store: MessageStore) -> bool:
    """Return whether the store was not stopped in order, or a sync had failed."""
    marker = read_marker(store)
    return store.abort_exists() or read_sync_failure(store) is not None or (marker is not None and marker.path is RecoveryPath.ABNORMAL)


def _end_of_recovery(store: MessageStore, log: LogView, options: RecoveryOptions) -> int:
    """Return where the recovery of a store that was stopped in order will end its log; an earlier rebuild may have begun one."""
    first = find_recovery_start(store.root, log).first
    if log.owner is Owner.ROCKETMQ and read_marker(store) is None:
        first = len(log.segments) - 1  # rebuild's marker will say so
    return plan_log(log, first, None, check_crc=options.check_crc_on_recover).end_offset


def _entries_of(store: MessageStore, parts: _Parts) -> tuple[list[Unit], dict[Queue, tuple[int, int]], str]:
    """Return a unit for each part with entries, the first and last offset of each queue, and why one process must make them, or ""."""
    first: dict[Queue, int] = {}
    reached: dict[Queue, int | None] = {}  # None: the queue gets no entries
    units = []
    for one, queues in zip(parts.ranges, parts.queues):
        begins: dict[Queue, int | None] = {}
        expected = 0
        for queue in queues:
            key = queue.topic, queue.queue_id
            if key not in reached:
                is_named = is_queue_name(queue.topic.encode()) and _UNREADABLE not in queue.topic
                reached[key] = queue.min_queue_offset if is_named and 0 <= queue.min_queue_offset <= _QUEUE_OFFSET_MAX else None
                if reached[key] is not None:
                    first[key] = queue.min_queue_offset
                    if find_queue_end(store.queue_folder(*key), store.queue_file_bytes).max_physical >= 0:
                        return [], {}, f"queue {queue.queue_id} of {queue.topic} has entries of messages that are not in the log"
                    settle_empty_queue(store.queue_folder(*key), store.queue_file_bytes)
            begin = begins[key] = reached[key]
            if begin is not None:
                count = run_into(queue, begin)
                expected += count
                reached[key] = begin + count
        if queues:
            units.append(Unit(one.end - one.begin, functools.partial(_put_entries, one, begins, expected)))
    return units, {key: (offset, (reached[key] or 0) - 1) for key, offset in first.items()}, ""


def make_queue_files(folder: Path, file_bytes: int, first: int, last: int) -> None:
    """Create the files of a queue for its offsets from `first` to `last`, with filler before the first. DiskFullError."""
    position = first
    while position <= last:
        descriptor, start, _ = open_queue_file(folder, file_bytes, position)
        os.close(descriptor)
        position = (start + file_bytes) // CQ_ENTRY_BYTES


@contextlib.contextmanager
def _unfinished(folder: Path, *, needed: bool) -> Iterator[None]:
    """Yield a folder for unfinished index files, and remove it at the end; no task creates it again."""
    _remove_unfinished(folder)
    if needed:
        make_folders(folder)
    try:
        yield
    finally:
        _remove_unfinished(folder)


def _remove_unfinished(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for _ in range(_REMOVE_TRIES):  # a task that still lives may just begin a file
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
                return


def _is_as_counted(filled: list[FilledIndex], total: int, layout: IndexLayout) -> bool:
    """Return whether each file has its planned keys, also by its header: all are full except the last."""
    room = layout.max_index_num - 1
    wanted = [min(room, total - before) for before in range(0, len(filled) * room, room)]
    return wanted == [file.keys for file in filled] == [read_index_header(file.path).index_count - 1 for file in filled]


def _name_index_files(folder: Path, names: list[str], filled: list[FilledIndex]) -> None:
    """Sync and rename each file."""
    if not names:
        return
    make_folders(folder)
    for name, file in zip(names, filled):
        os.rename(file.path, folder / name)
    sync_folder(folder)


def plan_index_files(parts: _Parts, layout: IndexLayout) -> list[tuple[int, int]]:
    """Return for each index file: the number of the range with the last key before it, and how many of its keys to skip.

    RocketMQ needs a file with room before it looks for a record's keys, so there is one file as soon as there is a record, and one
    more if records follow a full one.
    """
    room = layout.max_index_num - 1
    if not parts.ranges:
        return []
    total = sum(parts.keys)
    found = [(0, 0)]
    before = number = 0
    for wanted in range(room, total + 1, room):
        while before + parts.keys[number] < wanted:
            before += parts.keys[number]
            number += 1
        found.append((number, wanted - before))
    if len(found) > 1 and total % room == 0 and not _record_follows(parts, *found[-1]):
        found.pop()
    return found


def _record_follows(parts: _Parts, number: int, keys: int) -> bool:
    """Return whether a record follows the one with this key."""
    if number + 1 < len(parts.ranges):
        return True
    one = parts.ranges[number]
    place = key_place(one, keys)
    with mapped(one.segment.path) as view:
        size_bytes, _ = BEGIN.unpack_from(view, place.offset - one.segment.start_offset)
    return bool(place.offset + size_bytes < one.end)
