"""Queues and index made from the log in the workers, by ranges of bytes: what `pyengine rebuild` makes, byte for byte.

    look       each range of the log is walked; which queues it feeds, which of their offsets, how many keys
    move       the driver moves the old files to quarantine, and makes the queues' new ones, empty
    make       each range puts its entries into the queues' files; each index file takes its keys
    name       the driver gives the index files their names, when all of them hold what was counted
    recovery   as after any rebuild, with nothing left to dispatch: times of files, checkpoint, markers

What one dispatch makes of a log depends on what came before wherever queue offsets have gaps
or doubles, the log is damaged, or entries name units of an extension. Then the workers are
not asked, or what they made is thrown away, and one process does it; the report's notes say so.

Markers (storage.recovery.markers) exist from before the first move to the end. A driver that is
killed leaves a store that any start, `recover` or `rebuild` finishes. Spark tries a task again
when its executor dies, and under spark.speculation twice at once: an entry's place and bytes
follow from the log, so that writing it again changes nothing, and each try fills an index file
of its own, of which the driver takes the one that Spark reports. A task that lives on a little
longer can only write the bytes that are there then anyway, or into a file that is not used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record import BEGIN
from pyengine.native.dispatch import TouchedQueue
from pyengine.native.scan import count_keys
from pyengine.spark.jobs import Unit, run_units
from pyengine.spark.store_verify import TASK_BYTES, LogPart, WalkedLog, WalkUnit, walk_units
from pyengine.storage.config import EngineConfig, load_config
from pyengine.storage.consume_queue import open_queue_file
from pyengine.storage.dispatcher import is_queue_name
from pyengine.storage.durable_writes import make_folders, sibling_of, sync_folder
from pyengine.storage.index_file import IndexFiles
from pyengine.storage.log_scan import LogView
from pyengine.storage.mapped_file import mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.dispatch import FilledIndex, KeyPlace, LogRange, key_place, put_entries, put_keys, read_index_header
from pyengine.storage.recovery.markers import RebuildMarker, read_marker
from pyengine.storage.recovery.queues import move_away
from pyengine.storage.recovery.rebuild import Look, Queue, RebuildReport, RebuildWork
from pyengine.storage.recovery.report import GrowingProgress, Progress, RecoveryOptions, RecoveryPath

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNREADABLE = "\ufffd"  # a topic that is no UTF-8 comes with this in it
_QUEUE_OFFSET_MAX = (1 << 62) // CQ_ENTRY_BYTES
_REMOVE_TRIES = 100


def rebuild(
    spark: SparkSession, store: str | os.PathLike[str], *, config: EngineConfig | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> RebuildReport:
    """Make all queues and the index of a stopped store again from its log, as `pyengine rebuild` does.

    The same bytes; what was there goes to quarantine. The workers write under the same
    path, on a file system on which several hosts may write one file at different places.
    `sizes` (or a whole `config`) are settings of the store. Raises StoreBusyError while any
    process has the store open, NotAStoreError, StoreRefusedError, DiskFullError, DiskError.
    """
    from pyengine.ipc.crashed_engine_memory import rebuild_alone

    root = Path(store).absolute()
    config = config or load_config(root, {name: str(value) for name, value in sizes.items()})
    report = GrowingProgress(progress)
    return rebuild_alone(root, config, progress=report, work=WorkersRebuild(spark, task_bytes, report))


# -- units ------------------------------------------------------------------------


class CountedPart(NamedTuple):
    """What a task found in its range, and how many keys its records have."""

    part: LogPart
    keys: int


@dataclass(frozen=True, slots=True)
class LookUnit:
    """One range of the log: walked, its queues and keys counted."""

    walk: WalkUnit

    @property
    def cost(self) -> int:
        return self.walk.cost

    def run(self, common: object) -> CountedPart | None:
        part = self.walk.run(common)
        return None if part is None else self.counted(part)

    def counted(self, part: LogPart) -> CountedPart:
        segment = self.walk.segment
        with mapped(segment.path) as view:
            return CountedPart(part, count_keys(view, segment.start_offset, part.begin, part.walk.end_offset))


class Made(NamedTuple):
    """What all units of the making share."""

    store: MessageStore
    message_delay_level: str
    ranges: list[LogRange]


@dataclass(frozen=True, slots=True)
class EntriesUnit:
    """The entries of one range."""

    range: LogRange
    queues: list[TouchedQueue]

    @property
    def cost(self) -> int:
        return self.range.end - self.range.begin

    def run(self, made: Made) -> bool:
        return put_entries(made.store, self.range, self.queues, message_delay_level=made.message_delay_level,
                           multi_dispatch=True)


@dataclass(frozen=True, slots=True)
class KeysUnit:
    """One index file: from after the `skipped`-th key of the range number `first` on (0: from its beginning)."""

    folder: Path
    name: str
    first: int
    skipped: int
    cost: int

    def run(self, made: Made) -> FilledIndex:
        after: KeyPlace | None = key_place(made.ranges[self.first], self.skipped) if self.skipped else None
        return put_keys(self.folder, self.name, made.store.geometry.index_layout, made.ranges[self.first :], after,
                        made.store.queue_file_bytes)


# -- the rebuild's work -----------------------------------------------------------


@dataclass(slots=True)
class _Parts:
    """The log as the workers have found it: parts in order, and how many keys each has."""

    ranges: list[LogRange] = field(default_factory=list)
    queues: list[list[TouchedQueue]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.ranges[-1].end if self.ranges else 0


class WorkersRebuild(RebuildWork):
    """Reads the log and makes the files in the workers, where that gives what one process makes."""

    def __init__(self, spark: SparkSession, task_bytes: int, progress: GrowingProgress) -> None:
        self._spark = spark
        self._task_bytes = task_bytes
        self._progress = progress
        self._parts: _Parts | None = None
        self._ends: dict[Queue, tuple[int, int]] = {}

    def look(self, store: MessageStore, options: RecoveryOptions, log: LogView, progress: Progress) -> Look:
        why = _why_alone(store, options)
        if not why:
            self._parts = self._walk(log, options)
            why = self._why_irregular(log)
        if why:
            self._parts, self.note = None, f"made by one process: {why}"
            return super().look(store, options, log, progress)
        return Look(log, in_log=set(self._ends))

    def make(
        self, store: MessageStore, options: RecoveryOptions, made: Collection[Queue], marker: RebuildMarker
    ) -> int | None:
        if self._parts is None:
            return None
        move_away(store.root, marker)
        layout = store.geometry.index_layout
        for queue, (first, last) in sorted(self._ends.items()):
            make_queue_files(store.queue_folder(*queue), store.queue_file_bytes, first, last)
        parts = self._parts
        units: list[Unit] = [EntriesUnit(one, queues) for one, queues in zip(parts.ranges, parts.queues) if queues]
        files = plan_index_files(parts, layout) if options.message_index_enable else []
        folder = store.index
        names = IndexFiles(folder, layout).next_names(len(files))
        keys: list[Unit] = [KeysUnit(sibling_of(folder), name, *file) for name, file in zip(names, files)]
        common = Made(store, options.message_delay_level, parts.ranges)
        total = parts.end - parts.ranges[0].begin if parts.ranges else 0
        with _unfinished(sibling_of(folder), needed=bool(keys)):
            outcomes = run_units(self._spark, [*units, *keys], common, task_bytes=self._task_bytes,
                                 progress=lambda done, whole: self._progress(total + done, total + whole))
            filled = outcomes[len(units) :]
            if not all(outcomes[: len(units)]):
                self.note = "made by one process: queue offsets do not follow each other in the log"
                return None
            if keys and not _is_as_counted(filled, sum(parts.keys), layout):
                self.note = "made by one process: the index that the workers made does not hold the keys that they had counted"
                return None
            _name_index_files(folder, names, filled)
        self.made_bytes = total
        return parts.end

    def _walk(self, log: LogView, options: RecoveryOptions) -> _Parts:
        """The log's parts as far as records reach from its beginning."""
        checks_crc = options.check_crc_on_recover and log.watermark is not None
        walks = (walk_units(segment, log.size_bytes, None, self._task_bytes, checks_crc=checks_crc, multi_dispatch=True)
                 for segment in log.segments)
        units = [LookUnit(unit) for of_segment in walks for unit in of_segment]
        found = run_units(self._spark, units, None, task_bytes=self._task_bytes, progress=self._progress)
        keys = {(unit.walk.segment, counted.part.begin): counted.keys for unit, counted in zip(units, found) if counted}
        walked = WalkedLog([(unit.walk, counted and counted.part) for unit, counted in zip(units, found)])
        parts, is_over = _Parts(), False
        self._is_whole = True
        for segment, expected in zip(log.segments, itertools.count(log.min_offset, log.size_bytes)):
            if is_over or segment.start_offset != expected:
                self._is_whole = self._is_whole and is_over and used_end(segment.path) == 0
                is_over = True
                continue
            at, reason = segment.start_offset, ""
            for part in walked.of_segment(segment, segment.start_offset):
                at, reason = part.walk.end_offset, part.walk.reason
                if part.begin < at:
                    one = LogRange(segment, part.begin, at)
                    parts.ranges.append(one)
                    parts.queues.append(part.queues)
                    known = keys.get((segment, part.begin))
                    parts.keys.append(_count(one) if known is None else known)
            position = at - segment.start_offset
            if reason != "blank" and position != log.size_bytes:
                is_over = True
                self._is_whole = used_end(segment.path, position) == position
        return parts

    def _why_irregular(self, log: LogView) -> str:
        """Why one process must make the files, or nothing. Sets the queues' first and last offsets."""
        parts = self._parts
        assert parts is not None
        if not self._is_whole or (log.watermark is not None and parts.end < log.watermark):
            return "the log has damage, or bytes after its end"
        ends = self._ends = {}
        for queue in (queue for queues in parts.queues for queue in queues):
            key = queue.topic, queue.queue_id
            if _UNREADABLE in queue.topic or not is_queue_name(queue.topic.encode()):
                return f"no folder can have the name of topic {queue.topic!r}"
            first, before = ends.get(key, (queue.min_queue_offset, queue.min_queue_offset - 1))
            follows = queue.min_queue_offset == before + 1
            if not follows or queue.count != queue.max_queue_offset - before or not 0 <= first <= _QUEUE_OFFSET_MAX:
                return f"the offsets of queue {queue.queue_id} of {queue.topic} do not follow each other in the log"
            ends[key] = first, queue.max_queue_offset
        return ""


def _why_alone(store: MessageStore, options: RecoveryOptions) -> str:
    marker = read_marker(store)
    if store.abort_exists() or (marker is not None and marker.path is RecoveryPath.ABNORMAL):
        return "the store was not stopped in order"
    if options.enable_consume_queue_ext:
        return "its queues have an extension, whose units are in the order of the log"
    return ""


def _count(one: LogRange) -> int:
    with mapped(one.segment.path) as view:
        return count_keys(view, one.segment.start_offset, one.begin, one.end)


def make_queue_files(folder: Path, file_bytes: int, first: int, last: int) -> None:
    """The files of a queue for its offsets from `first` to `last`, with filler before the first. Raises DiskFullError."""
    position = first
    while position <= last:
        descriptor, start, _ = open_queue_file(folder, file_bytes, position)
        os.close(descriptor)
        position = (start + file_bytes) // CQ_ENTRY_BYTES


@contextlib.contextmanager
def _unfinished(folder: Path, *, needed: bool) -> Iterator[None]:
    """A folder for index files in the making; whatever is in it at the end goes. No task makes it again."""
    _remove_unfinished(folder)
    if needed:
        make_folders(folder)
    try:
        yield
    finally:
        _remove_unfinished(folder)


def _remove_unfinished(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for _ in range(_REMOVE_TRIES):  # a task that lives on may begin a file just now
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
                return


def _is_as_counted(filled: list[FilledIndex], total: int, layout: IndexLayout) -> bool:
    """Whether each file has the keys that it was to have, by its header too: all of them full but for the last."""
    room = layout.max_index_num - 1
    wanted = [min(room, total - before) for before in range(0, len(filled) * room, room)]
    return wanted == [file.keys for file in filled] == [read_index_header(file.path).index_count - 1 for file in filled]


def _name_index_files(folder: Path, names: list[str], filled: list[FilledIndex]) -> None:
    """Each file takes its place, whole and durable."""
    if not names:
        return
    make_folders(folder)
    for name, file in zip(names, filled):
        os.rename(file.path, folder / name)
    sync_folder(folder)


def plan_index_files(parts: _Parts, layout: IndexLayout) -> list[tuple[int, int, int]]:
    """For each index file: number of the range with the last key before it, how many of its keys to skip, its cost.

    RocketMQ wants a file with room before it looks for a record's keys, so there is one
    as soon as there is a record, and one more when records follow a full one.
    """
    room = layout.max_index_num - 1
    if not parts.ranges:
        return []
    total = sum(parts.keys)
    found = [(0, 0, layout.size_bytes)]
    before = number = 0
    for wanted in range(room, total + 1, room):
        while before + parts.keys[number] < wanted:
            before += parts.keys[number]
            number += 1
        found.append((number, wanted - before, layout.size_bytes))
    if len(found) > 1 and total % room == 0 and not _record_follows(parts, *found[-1][:2]):
        found.pop()
    return found


def _record_follows(parts: _Parts, number: int, keys: int) -> bool:
    """Whether any record follows the one with this key."""
    if number + 1 < len(parts.ranges):
        return True
    one = parts.ranges[number]
    place = key_place(one, keys)
    with mapped(one.segment.path) as view:
        size_bytes, _ = BEGIN.unpack_from(view, place.offset - one.segment.start_offset)
    return bool(place.offset + size_bytes < one.end)
