"""The whole-store check with the reading done in the workers: log, queues and index, by ranges of bytes.

The flow, the rules and the report are those of `pyengine check` (storage.check); only the
reading is done before it is asked for, in two jobs:

    log and chains   each range of the log is walked (CRC too), from the first record that a task
                     finds in it; each index file's chains are followed
    queues and keys  the entries of each queue file and of each piece of an index file against the log

A range counts only if the range before it ended where its task began; a queue file only if the
file before it ended where its task had supposed. What does not fit is read again here, so
the outcome is that of one walk, whatever the log holds.

`diff` compares the logs of two stores in the same way (storage.check.diff).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.record_case import WalkResult
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import broken_chain, count_keys, sync, walk
from pyengine.spark.jobs import Unit, run_units
from pyengine.storage.check.diff import DiffReport, DiffWork, Logs, Piece, PieceFound, Places, compare_piece, guess_record
from pyengine.storage.check.queues import queue_files
from pyengine.storage.check.report import CheckReport
from pyengine.storage.check.work import (
    CheckWork,
    EntriesFound,
    IndexPart,
    KeysFound,
    LogSegments,
    QueueFile,
    QueueRules,
    check_index_part,
    check_queue_file,
    guess_after,
)
from pyengine.storage.config import EngineConfig, load_config
from pyengine.storage.mapped_file import MappedFile, mapped
from pyengine.storage.recovery.dispatch import makes_sense, read_index_header
from pyengine.storage.recovery.queues import QueueState
from pyengine.storage.recovery.report import GrowingProgress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 256 << 20
GUESS_BYTES = 16 << 20  # how far after a range's beginning its first record is searched
_FILE_COST = 64 << 10   # opening a file, as bytes
_LOG_PER_ENTRY = 256    # how much of the log an entry makes a task look at, for sharing the work


def verify(
    spark: SparkSession, store: str | os.PathLike[str], *, config: EngineConfig | None = None,
    acked: str | os.PathLike[str] | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> CheckReport:
    """What `pyengine check` finds in a whole store: every record and CRC, queues and index against the log, holes.

    The same report, finding by finding. `sizes` (or a whole `config`) are settings of the store where its files
    cannot tell them. Beside a running engine everything that is dispatched is checked. Workers read the store's
    files under the same path; the list `acked` is compared here. Raises NotAStoreError, StoreBusyError, DiskError.
    """
    from pyengine.ipc.live_reader import check_now

    root = Path(store).absolute()
    config = config or load_config(root, {name: str(value) for name, value in sizes.items()})
    work = WorkersCheck(spark, task_bytes, GrowingProgress(progress))
    return check_now(root, config, None if acked is None else Path(acked), work=work)


def diff(
    spark: SparkSession, store: str | os.PathLike[str], other: str | os.PathLike[str], *,
    settings: Mapping[str, object] | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> DiffReport:
    """What `pyengine diff` finds between two stores, a master and its slave, or a store and its copy: the same report.

    `sizes` (or `settings`) are settings of either store where its files cannot tell them. Workers read the files of both under
    the same paths. Raises NotAStoreError, ConfigError, StoreBusyError.
    """
    from pyengine.ipc.live_reader import diff_now

    work = WorkersDiff(spark, task_bytes, GrowingProgress(progress))
    return diff_now(Path(store).absolute(), Path(other).absolute(), settings={**(settings or {}), **sizes}, work=work)


# -- units ------------------------------------------------------------------------


class LogPart(NamedTuple):
    """What a task found in its range: where it began, how far its walk came, and the queues of what it passed."""

    begin: int
    walk: WalkResult
    queues: list[TouchedQueue]


@dataclass(frozen=True, slots=True)
class WalkUnit:
    """The records that begin in [first, stop) of one segment; nothing at or above `limit` is looked at."""

    segment: MappedFile
    first: int
    stop: int
    limit: int
    checks_crc: bool = True
    multi_dispatch: bool = False
    apart: bool = False

    @property
    def cost(self) -> int:
        return self.stop - self.first

    def run(self, common: object) -> LogPart | None:
        """None when no record is found near the beginning."""
        base = self.segment.start_offset
        with mapped(self.segment.path) as view:
            end = min(self.stop, self.first + GUESS_BYTES)
            begin = base if self.first == base else sync(view, base, self.first, end, limit=self.limit)
            return None if begin is None else self.walked(view, begin)

    def walked(self, view: mmap.mmap, begin: int) -> LogPart:
        """The part from the record at `begin` on."""
        base = self.segment.start_offset
        found = walk(view, base, begin, self.stop, limit=self.limit, check_crc=self.checks_crc)
        queues = touched_queues(
            view, base, begin, found.end_offset, multi_dispatch=self.multi_dispatch, apart=self.apart).queues
        return LogPart(begin, found, queues)


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """The chains of one index file."""

    path: Path
    layout: IndexLayout
    count: int

    @property
    def cost(self) -> int:
        return self.layout.size_bytes

    def run(self, common: object) -> int:
        with mapped(self.path) as view:
            return broken_chain(view, self.layout, self.count)


@dataclass(frozen=True, slots=True)
class QueueUnit:
    """One file of a queue; the outcome says after which record of the log it was supposed to begin."""

    file: QueueFile
    rules: QueueRules

    @property
    def cost(self) -> int:
        return _FILE_COST + self.file.size_bytes

    def run(self, log: LogSegments) -> tuple[int, EntriesFound]:
        after = guess_after(log, self.file)
        found = check_queue_file(log, self.file, self.rules, after)
        log.close()
        return after, found


@dataclass(frozen=True, slots=True)
class KeysUnit:
    """A piece of an index file."""

    part: IndexPart

    @property
    def cost(self) -> int:
        return _FILE_COST + _LOG_PER_ENTRY * (self.part.end - self.part.first)

    def run(self, log: LogSegments) -> KeysFound:
        found = check_index_part(log, self.part)
        log.close()
        return found


@dataclass(frozen=True, slots=True)
class CountUnit:
    """The keys of the records of [start, end), and whether records reach from start to end."""

    segment: MappedFile
    start: int
    end: int

    @property
    def cost(self) -> int:
        return self.end - self.start

    def run(self, common: object) -> tuple[int, bool]:
        base = self.segment.start_offset
        with mapped(self.segment.path) as view:
            reached = walk(view, base, self.start, self.end, limit=self.end, check_crc=False, check_offset=False).end_offset
            return count_keys(view, base, self.start, self.end), reached == self.end


@dataclass(frozen=True, slots=True)
class DiffUnit:
    """A piece of two logs."""

    piece: Piece

    @property
    def cost(self) -> int:
        return 2 * (self.piece[1] - self.piece[0])

    def run(self, logs: Logs) -> PieceFound | None:
        """None when no record is found near the beginning in one of them."""
        here, there = (guess_record(log, self.piece[0], GUESS_BYTES) for log in logs)
        found = None if here is None or there is None else compare_piece(logs, (here, there), self.piece[1])
        for log in logs:
            log.close()
        return found


class WorkersDiff(DiffWork):
    """Pieces of two logs, compared in the workers before they are asked for."""

    def __init__(self, spark: SparkSession, task_bytes: int, progress: GrowingProgress) -> None:
        self.piece_bytes = task_bytes
        self._spark = spark
        self._progress = progress

    def begin(self, logs: Logs, pieces: Sequence[Piece]) -> None:
        for log in logs:
            log.close()
        self._found = run_units(self._spark, [DiffUnit(piece) for piece in pieces], logs, task_bytes=2 * self.piece_bytes,
                                progress=self._progress)

    def piece(self, logs: Logs, number: int, piece: Piece, at: Places) -> PieceFound:
        found = self._found[number]
        return found if found is not None and found.begin == at else super().piece(logs, number, piece, at)


# -- the check's work --------------------------------------------------------------


class WorkersCheck(CheckWork):
    """A check's reading, done in the workers before the check asks for it."""

    def __init__(self, spark: SparkSession, task_bytes: int, progress: GrowingProgress) -> None:
        self._spark = spark
        self._task_bytes = task_bytes
        self._progress = progress

    def begin(self, log: LogSegments, index_files: Sequence[Path], layout: IndexLayout) -> None:
        self._done_bytes = 0
        self._index = [(path, header.index_count) for path in index_files if (header := _sound_header(path, layout))]
        self._layout = layout
        walks = [unit for segment in log.segments
                 for unit in walk_units(segment, log.size_bytes, log.end, self._task_bytes, apart=True)]
        chains = [ChainUnit(path, layout, count) for path, count in self._index]
        found = self._run([*walks, *chains], None)
        self._walks = WalkedLog(list(zip(walks, found)))
        self._chains: dict[Path, int] = dict(zip((path for path, _ in self._index), found[len(walks):]))

    def log_is_known(self, log: LogSegments, queues: Sequence[QueueState], rules: QueueRules, root: Path) -> None:
        log.close()
        files = [QueueUnit(file, rules) for queue in queues for file in queue_files(root, queue)]
        sound = [(path, count) for path, count in self._index if self._chains[path] == 0]
        parts = [KeysUnit(part) for path, count in sound
                 for part in self.index_parts(path, str(path.relative_to(root)), self._layout, count)]
        found = self._run([*files, *parts], log)
        self._entries = dict(zip((unit.file.path for unit in files), found))
        self._keys: dict[tuple[Path, int], KeysFound] = dict(zip(((unit.part.path, unit.part.first) for unit in parts), found[len(files):]))

    def walk(self, log: LogSegments, segment: MappedFile, start: int, stop: int) -> Generator[WalkResult, None, None]:
        return (part.walk for part in self._walks.of_segment(segment, start))

    def touched(self, log: LogSegments) -> Iterator[Sequence[TouchedQueue]]:
        return (part.queues for _, part in self._walks.taken)

    def queue_file(self, log: LogSegments, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
        supposed, found = self._entries[file.path]
        return found if supposed == after else super().queue_file(log, file, rules, after)

    def broken_chain(self, path: Path, layout: IndexLayout, count: int) -> int:
        return self._chains[path]

    def index_parts(self, path: Path, name: str, layout: IndexLayout, count: int) -> Sequence[IndexPart]:
        step = max(1, self._task_bytes // _LOG_PER_ENTRY)
        return [IndexPart(path, name, layout, count, at, min(at + step, count)) for at in range(1, count, step)]

    def keys(self, log: LogSegments, part: IndexPart) -> KeysFound:
        return self._keys[part.path, part.first]

    def count_keys(self, log: LogSegments, start: int) -> int:
        units = [CountUnit(segment, max(start, part.begin), part.walk.end_offset) for segment, part in self._walks.taken
                 if part.walk.end_offset > start]
        count = 0
        cut_short: tuple[MappedFile, int] | None = None  # the end of a part that the count did not reach
        for unit, (keys, is_whole) in zip(units, self._run(units, None)):
            if cut_short == (unit.segment, unit.start):  # one process counts no key up to the next damage
                cut_short = unit.segment, unit.end
                continue
            count += keys
            cut_short = None if is_whole else (unit.segment, unit.end)
        return count

    def _run(self, units: Sequence[Unit], common: object) -> list[Any]:
        before = self._done_bytes
        self._done_bytes += sum(unit.cost for unit in units)
        return run_units(self._spark, units, common, task_bytes=self._task_bytes,
                         progress=lambda done, total: self._progress(before + done, before + total))


class WalkedLog:
    """Ranges of the log walked apart, joined to the one walk that they must make.

    `taken`: the parts that count, in order, with their segments; known as far as
    `of_segment` has been asked.
    """

    def __init__(self, walked: Sequence[tuple[WalkUnit, LogPart | None]]) -> None:
        self.taken: list[tuple[MappedFile, LogPart]] = []
        self._by_segment: dict[MappedFile, list[tuple[WalkUnit, LogPart | None]]] = {}
        for unit, part in walked:
            self._by_segment.setdefault(unit.segment, []).append((unit, part))

    def of_segment(self, segment: MappedFile, at: int) -> Iterator[LogPart]:
        """Its parts from the record at `at` on, each beginning where the one before it ended; the last one ends the walk."""
        for unit, part in self._by_segment.get(segment, []):
            if unit.stop <= at:
                continue
            if part is None or part.begin != at:
                with mapped(segment.path) as view:
                    part = replace(unit, first=at).walked(view, at)
            self.taken.append((segment, part))
            yield part
            at = part.walk.end_offset
            if part.walk.reason != "range_end" or at < unit.stop:
                return


def walk_units(segment: MappedFile, size_bytes: int, limit: int | None, task_bytes: int, **settings: bool) -> list[WalkUnit]:
    """The ranges of one segment, up to `limit` of the log."""
    start = segment.start_offset
    stop = start + size_bytes if limit is None else min(start + size_bytes, limit)
    return [WalkUnit(segment, at, min(at + task_bytes, stop), stop, **settings) for at in range(start, stop, task_bytes)]


def _sound_header(path: Path, layout: IndexLayout) -> IndexHeader | None:
    """The header of an index file that is to be looked into."""
    if path.stat().st_size != layout.size_bytes:
        return None
    header = read_index_header(path)
    return header if makes_sense(header, layout) else None
