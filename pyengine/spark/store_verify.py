"""Checks a whole store with reads in the workers: log, queues and index, by ranges of bytes.

The flow, the rules and the report are those of `pyengine check` (storage.check); only the reads are done in advance, in two jobs:

    log and chains   walk each range of the log (with CRC), from the first record that a task finds in it; follow the
                     chains of each index file
    queues and keys  compare the entries of each queue file and of each piece of an index file with the log

A range counts only if the range before it ended where its task began; a queue file only if the file before it ended where its task
had assumed. Other ranges are read again in the driver, so the outcome is that of one walk for any log.
"""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.record import WalkResult
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import broken_chain, count_keys, sync, walk
from pyengine.spark.jobs import Unit, run_units
from pyengine.storage.check.parts import (
    CheckWork,
    EntriesFound,
    IndexPart,
    KeysFound,
    QueueFile,
    QueueRules,
    check_index_part,
    check_queue_file,
    guess_after,
    queue_files,
)
from pyengine.storage.check.report import CheckReport
from pyengine.storage.commit_log import Log
from pyengine.storage.config import EngineConfig, load_config
from pyengine.storage.index_file import is_plausible, read_index_header
from pyengine.storage.mapped_file import MappedFile, mapped
from pyengine.storage.recovery.derived import QueueState
from pyengine.storage.recovery.report import GrowingProgress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_BYTES = 256 << 20
GUESS_BYTES = 16 << 20  # how far after a range's start its first record is searched
_FILE_COST = 64 << 10   # opening a file, as bytes
_LOG_PER_ENTRY = 256    # bytes of the log that a task reads for an entry, to divide the work


def verify(
    spark: SparkSession, store: str | os.PathLike[str], *, config: EngineConfig | None = None,
    acked: str | os.PathLike[str] | None = None, task_bytes: int = TASK_BYTES,
    progress: Callable[[int, int], None] | None = None, **sizes: object,
) -> CheckReport:
    """Check a whole store, with the report of `pyengine check`.

    `sizes` (or `config`): settings that the files do not show. NotAStoreError, StoreBusyError, DiskError.
    """
    from pyengine.ipc.live_reader import check_now

    root = Path(store).absolute()
    config = config or load_config(root, {name: str(value) for name, value in sizes.items()})
    work = WorkersCheck(spark, task_bytes, GrowingProgress(progress))
    return check_now(root, config, None if acked is None else Path(acked), work=work)


# -- units ------------------------------------------------------------------------


class WalkedPart(NamedTuple):
    """A task's result: where its walk began and ended, and the queues of the records in between."""

    begin: int
    walk: WalkResult
    queues: list[TouchedQueue]


@dataclass(frozen=True, slots=True)
class LogWalk:
    """A walk of the records that begin in [first, stop) of one segment; it reads nothing at or above `limit`."""

    segment: MappedFile
    first: int
    stop: int
    limit: int

    @property
    def unit(self) -> Unit:
        return Unit(self.stop - self.first, self.run)

    def run(self, common: object) -> WalkedPart | None:
        """None when no record is found near the beginning."""
        with mapped(self.segment.path) as view:
            base = self.segment.start_offset
            begin = base if self.first == base else sync(view, base, self.first, min(self.stop, self.first + GUESS_BYTES), limit=self.limit)
            return None if begin is None else self.walked(view, begin)

    def walked(self, view: mmap.mmap, begin: int) -> WalkedPart:
        """Return the part from the record at `begin` on."""
        base = self.segment.start_offset
        found = walk(view, base, begin, self.stop, limit=self.limit, check_crc=True)
        return WalkedPart(begin, found, touched_queues(view, base, begin, found.end_offset, apart=True).queues)


def _follow_chains(path: Path, layout: IndexLayout, count: int, common: object) -> int:
    """Do as broken_chain for one index file."""
    with mapped(path) as view:
        return broken_chain(view, layout, count)


def _check_queue_file(file: QueueFile, rules: QueueRules, log: Log) -> tuple[int, EntriesFound]:
    """Check one file of a queue; return the record of the log after which it was assumed to begin too."""
    log = log.with_kept_mappings()
    after = guess_after(log, file)
    return after, check_queue_file(log, file, rules, after)


def _check_keys(part: IndexPart, log: Log) -> KeysFound:
    return check_index_part(log.with_kept_mappings(), part)


def _count_keys(segment: MappedFile, start: int, end: int, common: object) -> tuple[int, bool]:
    """Count the keys of the records of [start, end), and tell whether records reach from start to end."""
    base = segment.start_offset
    with mapped(segment.path) as view:
        reached = walk(view, base, start, end, limit=end, check_crc=False, check_offset=False).end_offset
        return count_keys(view, base, start, end), reached == end


# -- the check's work --------------------------------------------------------------


class WorkersCheck(CheckWork):
    """Does the reads of a check in the workers, in advance."""

    def __init__(self, spark: SparkSession, task_bytes: int, progress: GrowingProgress) -> None:
        self._spark = spark
        self._task_bytes = task_bytes
        self._progress = progress

    def begin(self, log: Log, index_files: Sequence[Path], layout: IndexLayout) -> None:
        self._done_bytes = 0
        self._index = [(path, header.index_count) for path in index_files if (header := _plausible_header(path, layout))]
        self._layout = layout
        walks = [one for segment in log.segments
                 for one in log_walks(segment, log.size_bytes, log.end, self._task_bytes)]
        chains = [Unit(layout.size_bytes, functools.partial(_follow_chains, path, layout, count)) for path, count in self._index]
        found = self._run([*(one.unit for one in walks), *chains], None)
        self._walks = WalkedLog(list(zip(walks, found)))
        self._chains: dict[Path, int] = dict(zip((path for path, _ in self._index), found[len(walks):]))

    def log_is_known(self, log: Log, queues: Sequence[QueueState], rules: QueueRules, root: Path) -> None:
        files = [file for queue in queues for file in queue_files(root, queue)]
        parts = [part for path, count in self._index if self._chains[path] == 0
                 for part in self.index_parts(path, str(path.relative_to(root)), self._layout, count)]
        units = [Unit(_FILE_COST + file.size_bytes, functools.partial(_check_queue_file, file, rules)) for file in files]
        units += [Unit(_FILE_COST + _LOG_PER_ENTRY * (part.end - part.first), functools.partial(_check_keys, part)) for part in parts]
        found = self._run(units, replace(log, kept=None))
        self._entries = dict(zip((file.path for file in files), found))
        self._keys: dict[tuple[Path, int], KeysFound] = dict(zip(((part.path, part.first) for part in parts), found[len(files):]))

    def walk(self, log: Log, segment: MappedFile, start: int, stop: int) -> Generator[WalkResult, None, None]:
        return (part.walk for part in self._walks.of_segment(segment, start))

    def touched(self, log: Log) -> Iterator[Sequence[TouchedQueue]]:
        return (part.queues for _, part in self._walks.taken)

    def queue_file(self, log: Log, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
        supposed, found = self._entries[file.path]
        return found if supposed == after else super().queue_file(log, file, rules, after)

    def broken_chain(self, path: Path, layout: IndexLayout, count: int) -> int:
        return self._chains[path]

    def index_parts(self, path: Path, name: str, layout: IndexLayout, count: int) -> Sequence[IndexPart]:
        step = max(1, self._task_bytes // _LOG_PER_ENTRY)
        return [IndexPart(path, name, layout, count, at, min(at + step, count)) for at in range(1, count, step)]

    def keys(self, log: Log, part: IndexPart) -> KeysFound:
        return self._keys[part.path, part.first]

    def count_keys(self, log: Log, start: int) -> int:
        ranges = [(segment, max(start, part.begin), part.walk.end_offset) for segment, part in self._walks.taken
                  if part.walk.end_offset > start]
        units = [Unit(end - begin, functools.partial(_count_keys, segment, begin, end)) for segment, begin, end in ranges]
        count = 0
        cut_short: tuple[MappedFile, int] | None = None  # the end of a part whose count stopped early
        for (segment, begin, end), (keys, is_whole) in zip(ranges, self._run(units, None)):
            if cut_short == (segment, begin):  # one process counts no key up to the next damage
                cut_short = segment, end
                continue
            count += keys
            cut_short = None if is_whole else (segment, end)
        return count

    def _run(self, units: Sequence[Unit], common: object) -> list[Any]:
        before = self._done_bytes
        self._done_bytes += sum(unit.cost for unit in units)
        return run_units(self._spark, units, common, task_bytes=self._task_bytes,
                         progress=lambda done, total: self._progress(before + done, before + total))


class WalkedLog:
    """Joins the walks of ranges of the log to one walk.

    `taken`: the parts that count, in order, with their segments, as far as `of_segment` has been called.
    """

    def __init__(self, walked: Sequence[tuple[LogWalk, WalkedPart | None]]) -> None:
        self.taken: list[tuple[MappedFile, WalkedPart]] = []
        self._by_segment: dict[MappedFile, list[tuple[LogWalk, WalkedPart | None]]] = {}
        for one, part in walked:
            self._by_segment.setdefault(one.segment, []).append((one, part))

    def of_segment(self, segment: MappedFile, at: int) -> Iterator[WalkedPart]:
        """Yield a segment's parts from the record at `at` on, each of which begins at the end of the previous one."""
        for one, part in self._by_segment.get(segment, []):
            if one.stop <= at:
                continue
            if part is None or part.begin != at:
                with mapped(segment.path) as view:
                    part = one.walked(view, at)
            self.taken.append((segment, part))
            yield part
            at = part.walk.end_offset
            if part.walk.reason != "range_end" or at < one.stop:
                return


def log_walks(segment: MappedFile, size_bytes: int, limit: int | None, task_bytes: int) -> list[LogWalk]:
    """Return the ranges of one segment, up to `limit` of the log."""
    start = segment.start_offset
    stop = start + size_bytes if limit is None else min(start + size_bytes, limit)
    return [LogWalk(segment, at, min(at + task_bytes, stop), stop) for at in range(start, stop, task_bytes)]


def _plausible_header(path: Path, layout: IndexLayout) -> IndexHeader | None:
    """Return the header of an index file if it is sound enough to check the file."""
    if path.stat().st_size != layout.size_bytes:
        return None
    header = read_index_header(path)
    return header if is_plausible(header, layout) else None
