"""CommitLog: the segments of a log, how it is read, and where it ends (the reading half of recovery: docs/recovery.md).

The log may be in several folders. `CommitLog` follows it, and a `Log` is what a walk needs to know of it. `find_end` is the only definition
of the log's end for readers, `check`, `status` and Spark; recovery finds the same end, unless a commit slot, a cut or an accepted loss says
another. `LogEnd` follows the end while another process appends.

The rules for a record are RocketMQ's (CommitLog.checkMessageAndReturnSize) in its stores and below pyengine's
watermark; above the watermark, where a power cut may have lost pages, topic and properties are checked too. In pyengine's
own stores a record must also have its own offset, which RocketMQ does not check.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, Unpack, cast

from pyengine.arguments import INT64_MAX
from pyengine.errors import CorruptionError, DiskError, FormatError, StoreRefusedError
from pyengine.formats.constants import MESSAGE_MAGIC, Readable
from pyengine.formats.paths import LogFolders, Root, log_folders, recorded_log_folders, segment_name
from pyengine.formats.record import BEGIN, MAGIC_AT, CaseLabel, Message, WalkResult, decode_record, store_timestamp_ms, total_size
from pyengine.native.flush import FOLIO_BYTES_MAX
from pyengine.native.scan import Checks, ColumnScanner, RawBatch, classify, sync, walk
from pyengine.storage.checkpoint import (
    LOG_BEGIN,
    DurableWatermark,
    RecoveryPath,
    StopNotes,
    WatermarkReading,
    read_stop_notes,
    read_watermark,
)
from pyengine.storage.file_system import DiskUse, free_bytes, measure
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, list_segments, map_read_only, mapped, used_end
from pyengine.storage.recovery.report import MISSING_SEGMENT, Progress

# The end of the message about a segment of wrong length; check/ has another for `check`.
LENGTH_ADVICE = ("; restore it from a copy, or carve out what is whole with `pyengine salvage STORE DEST`. If it is the "
                 "log's only segment and the store was made with that size, say so: --set mapped_file_size_commit_log_bytes=SIZE")
FULL_PERCENT = 85  # RocketMQ's diskSpaceCleanForciblyRatio
SEGMENTS_AHEAD = 2       # files that exist beyond the written part of the log, most of them without blocks
RESERVE_STEP_BYTES_MAX = 32 << 20
_MAPPINGS_MAX = 4
_MAGIC = MESSAGE_MAGIC.to_bytes(4, "big")


def list_log(root: str | os.PathLike[str], size_bytes: int) -> list[MappedFile]:
    """Return the log's segments in order. StoreRefusedError as list_segments, and for a segment that is in two folders."""
    folders = log_folders(root).all
    found = [segment for folder in folders for segment in list_segments(folder, size_bytes, LENGTH_ADVICE)]
    if len(folders) > 1:
        found.sort(key=lambda segment: segment.start_offset)
        for before, after in itertools.pairwise(found):
            if before.start_offset == after.start_offset:
                raise StoreRefusedError(f"{before.path} and {after.path} are the same segment: move one of them away")
    return found


def list_complete_log(root: str | os.PathLike[str], size_bytes: int, *, accept_loss: bool = False) -> list[MappedFile]:
    """Return the log's segments for a process that will change the store, and check that none is missing.

    StoreRefusedError as list_log. CorruptionError when a read-only folder, a segment between others, or a folder that may have had
    older ones does not exist or is empty (a disk that is not mounted); and, in a store without pyengine's watermark, when a segment
    between others is missing, since that loss could not be noticed later. With `accept_loss` missing segments are accepted.
    """
    segments = list_log(root, size_bytes)
    if accept_loss:
        return segments
    if missing := missing_part(root, segments, size_bytes):
        raise CorruptionError(missing)
    for before, after in itertools.pairwise(segments):
        end = before.start_offset + size_bytes
        if after.start_offset != end and read_watermark(root).watermark is None:
            raise CorruptionError(
                f"{after.start_offset - end:,} bytes of the log are missing: {before.path} ends at {end}, and the next "
                f"segment is {after.path}. Restore what is missing from a copy; or make a store of what is there with "
                "`pyengine salvage STORE DEST`; or end the log there with `pyengine recover STORE --accept-loss`, which "
                "puts the segments that follow into quarantine")
    return segments


def missing_part(root: str | os.PathLike[str], segments: Sequence[MappedFile], size_bytes: int, *, is_running: bool = False,
                 is_noted: bool = True) -> str:
    """Return a sentence as missing_folder(), or about a segment between others that none of several folders has; "" if there is none."""
    folders = log_folders(root).all
    if len(folders) == 1:
        return ""
    missing = missing_folder(root, segments, is_running=is_running, is_noted=is_noted)
    gaps = [end for before, after in itertools.pairwise(segments) if (end := before.start_offset + size_bytes) != after.start_offset]
    if missing or is_running or not gaps:  # what runs may just make or delete a segment
        return missing
    return f"the log's segment {segment_name(gaps[0])} is in none of its folders ({', '.join(map(str, folders))}; is a disk not mounted?)"


def missing_folder(root: str | os.PathLike[str], segments: Sequence[MappedFile], *, is_running: bool = False, is_noted: bool = True) -> str:
    """Return a sentence about a folder of the log that does not exist or is empty and may have segments besides these; "" if there is none.

    What runs (`is_running`) may not use a writable one yet. A broker does not note where the log begins when it deletes segments, so
    beside one the note says nothing (`is_noted` is False).
    """
    folders = log_folders(root)
    needed = folders.read_only
    if not is_running and segments and segments[0].start_offset > 0:  # older ones may be deleted, or be in a folder of an earlier start
        needed += recorded_log_folders(root).writable
    gone = [folder for folder in folders.all if folder in needed and not folder.is_dir()]
    if not gone:
        empty = {*folders.all}.difference(segment.path.parent for segment in segments)
        begin = LOG_BEGIN.read(root).record if is_noted and empty and segments else None
        if begin is None or segments[0].start_offset <= begin:
            return ""
        return (f"the log began at {begin:,} and now begins at {segments[0].start_offset:,}, and {', '.join(sorted(map(str, empty)))} "
                "has no segment: mount its disk; or, if older segments were deleted or are lost, run `pyengine recover STORE "
                "--accept-loss`; or leave it out of the log's folders (store_path_commit_log, read_only_commit_log_store_paths) "
                "if its messages are to be given up")
    name, new = ("read_only_commit_log_store_paths", "") if gone[0] in folders.read_only else (
        "store_path_commit_log", ", make it if it is new")
    return f"the log's folder {gone[0]} is missing: mount its disk{new}, or leave it out of {name} if its messages are to be given up"


def note_log_begin(root: str | os.PathLike[str], offset: int) -> None:
    """Note durably where a log of several folders begins, for missing_folder(). A log in one folder has no note."""
    has_several = len(log_folders(root).all) > 1
    with contextlib.suppress(DiskError):  # a full disk, on which the cleaner must be able to delete: no note is better than an old one
        if LOG_BEGIN.read(root).record == (offset if has_several else None):
            return
        if has_several:
            LOG_BEGIN.write(root, offset)
            return
    LOG_BEGIN.remove(root)


def log_exists(root: str | os.PathLike[str]) -> bool:
    """Whether any of the log's folders exists."""
    return any(folder.is_dir() for folder in log_folders(root).all)


class CommitLog(MappedFileQueue):
    """The log of the store at `root`, followed in all its folders."""

    def __init__(self, root: str | os.PathLike[str], size_bytes: int, cache: MappingCache | None = None) -> None:
        """`cache`: by default one of its own, of few mappings."""
        self.size_bytes = size_bytes
        self._cache = cache or MappingCache(_MAPPINGS_MAX)
        self._queues = self._followed(log_folders(root))  # replaced as a whole: other threads read at any time

    @property
    def folder(self) -> str:  # type: ignore[override]
        """The first folder."""
        return self._queues[0].folder

    @property
    def has_several_folders(self) -> bool:
        return len(self._queues) > 1

    def follow_folders(self, folders: LogFolders, *, may_lose: bool) -> bool:
        """Follow the log into these folders and return True; unless it `may_lose` segments, False if they lack one that exists."""
        queues = self._followed(folders)
        try:
            listed = {start for queue in queues for start in queue.starts()}
        except (DiskError, StoreRefusedError):
            if may_lose:
                raise
            return False
        if not may_lose and not listed.issuperset(self.starts()):
            return False
        self._queues = queues
        self._cache.clear()
        return True

    def _followed(self, folders: LogFolders) -> tuple[MappedFileQueue, ...]:
        return tuple(MappedFileQueue(folder, self.size_bytes, self._cache, LENGTH_ADVICE) for folder in folders.all)

    def starts(self) -> list[int]:
        """Return the start offsets, ascending; folders that have changed are listed again. Do not modify the list."""
        first, *further = self._queues
        starts = first.starts()
        return sorted({*starts, *(start for queue in further for start in queue.starts())}) if further else starts

    def start_of(self, offset: int) -> int | None:
        """Return the start of the listed segment that contains `offset`, or None."""
        for queue in self._queues:  # quicker than a generator
            start = queue.start_of(offset)
            if start is not None:
                return start
        return None

    def folder_of(self, start_offset: int) -> str:
        """Return the folder of the segment, the first one if it does not exist."""
        queues = self._queues
        for queue in queues:
            if queue.has_listed(start_offset):
                return queue.folder
        return queues[0].folder

    def open(self, start_offset: int) -> SegmentBytes:
        """Return the segment's bytes; FileNotFoundError if it does not exist any more."""
        view = self.view(start_offset)
        if view is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path(start_offset))
        return SegmentBytes(view, start_offset)

    def segment_at(self, offset: int) -> SegmentBytes | None:
        """Return the bytes of the segment that has `offset`; None if there is none (any more)."""
        start = self.start_of(offset)
        with contextlib.suppress(FileNotFoundError):
            return None if start is None else self.open(start)
        return None

    # Callers of these three ask only for offsets below the end that recovery found or the writer committed.

    def piece(self, offset: int, size: int) -> memoryview:
        """Return up to `size` bytes from `offset` on, fewer at the end of the segment; CorruptionError if there is none."""
        found = self._holder(offset)
        return memoryview(found.view)[offset - found.base : offset - found.base + size]

    def record_boundary(self, offset: int, known: int | None = None) -> int:
        """Return the last record boundary at or below `offset`; CorruptionError if records do not reach it.

        `known` is a boundary at or below it, by default the start of its segment. A blank and its filler count
        as one record. The result is in the segment of `offset`, since the segment's start is a boundary.
        """
        base = offset - offset % self.size_bytes
        start = base if known is None else max(base, known)
        if start == offset:
            return offset
        found = self._holder(offset).walk(start, offset, limit=offset, check_crc=False)
        if found.reason not in (CaseLabel.RANGE_END, CaseLabel.OVERRUN, CaseLabel.BLANK):
            raise CorruptionError(f"the log holds no whole record at {found.end_offset} ({found.reason})")
        return found.end_offset

    def is_filler(self, offset: int, known: int) -> bool:
        """Whether the byte is in a blank, after its header, where bytes have no meaning; `known` as in record_boundary."""
        start = self.record_boundary(offset, known if known <= offset else None)
        holder = self._holder(offset)
        return start + BEGIN.size <= offset and holder.label(start, holder.base + self.size_bytes) == CaseLabel.BLANK

    def close(self) -> None:
        """Drop the mappings."""
        self._cache.clear()

    def _holder(self, offset: int) -> SegmentBytes:
        found = self.segment_at(offset)
        if found is None:
            raise CorruptionError(f"no segment of the log holds offset {offset}")
        return found


def message_below(log: CommitLog, offset: int, limit: int) -> Message | None:
    """Return the message that starts at `offset` and ends at or below `limit`; None if none does, or its segment is deleted."""
    segment = log.segment_at(offset) if 0 <= offset < limit else None
    if segment is None:
        return None
    with contextlib.closing(segment), contextlib.suppress(FormatError):  # it may be emptied between the two reads
        if segment.label(offset, min(limit, offset - offset % log.size_bytes + log.size_bytes)) == CaseLabel.MESSAGE:
            message = decode_record(segment.view, offset - segment.base)
            return message if offset >= log.min_offset else None
    return None


def new_segment_folder(root: str | os.PathLike[str], start_offset: int, size_bytes: int) -> Path:
    """Return the folder in which to create the segment that starts at this offset."""
    folders = log_folders(root)
    if len(folders.writable) == 1:
        return folders.writable[0]
    unusable = [folder for folder in folders.writable if is_nearly_full(folder) or folder.is_dir() and (
        free_bytes(folder) < size_bytes or not os.access(folder, os.W_OK))]
    return folders.folder_for(start_offset, size_bytes, unusable)


def reserve_step_bytes(segment_bytes: int) -> int:
    """Return in which steps the log's blocks are reserved ahead of the writer.

    A power of two of at least FOLIO_BYTES_MAX, so that no folio lies across the end of a step; a small segment is one step.
    """
    step_bytes = RESERVE_STEP_BYTES_MAX
    while step_bytes > FOLIO_BYTES_MAX and step_bytes > segment_bytes // 2:
        step_bytes //= 2
    return min(step_bytes, segment_bytes)


def reserve_ahead_bytes(segment_bytes: int, log_bytes: int) -> int:
    """Return how far ahead of the writer blocks are reserved at most: two steps; of a larger log half its size, up to a segment.

    So a small store takes little, and in a large one the blocks of the next file are allocated, not those of the file that is written.
    """
    return max(2 * reserve_step_bytes(segment_bytes), min(segment_bytes, log_bytes // 2))


def is_nearly_full(folder: Path) -> bool:
    """Whether more than 85 % of the space that this user can use is in use, which is RocketMQ's rule."""
    return measure(folder).used_percent > FULL_PERCENT


def measure_log(root: str | os.PathLike[str]) -> DiskUse:
    """Return the use of the log's file system; of several that of the emptiest writable one, as in RocketMQ."""
    uses = [measure(folder) for folder in log_folders(root).writable]
    return min(uses, key=lambda use: (bool(use.unwritable_reason), not use.is_known, use.used_percent))


def shown(path: Path, root: Path) -> str:
    """Return a file's path for a message: relative to the store's root, or absolute if it is elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


# -- how it is read --------------------------------------------------------------------


class SegmentBytes:
    """The bytes of one segment: `view` has them from the offset `base` on. Here it is a mapping of all of it.

    A subclass may have only a window in `view`, which its methods move: `is_partial`.
    """

    is_partial = False

    def __init__(self, view: Readable, base: int) -> None:
        self.view = view
        self.base = base

    def fill(self, first: int, upto: int, limit: int) -> int:
        """Make bytes from `first` on available in `view`; return their end, which is from `upto` to `limit`."""
        return limit

    def read(self, first: int, upto: int) -> bytes:
        """Return the bytes [first, upto)."""
        self.fill(first, upto, upto)
        return bytes(self.view[first - self.base : upto - self.base])

    def label(self, at: int, limit: int) -> str:
        """Return what is at `at`, one of native.scan.REASONS, without a look at the body."""
        return classify(self.view, at - self.base, limit - at, at, check_crc=False)

    def find_record(self, first: int, end: int, limit: int) -> int | None:
        """Return the first record that begins in [first, end), see native.scan.sync; the result depends on the bytes alone."""
        end = min(end, limit)
        return sync(self.view, self.base, first, end, limit=limit) if first < end else None

    def walk(self, at: int, stop: int, *, limit: int, **checks: Unpack[Checks]) -> WalkResult:
        """Walk [at, stop) with `checks`, as native.scan.walk."""
        return walk(self.view, self.base, at, stop, limit=limit, **checks)

    def scan(self, scanner: ColumnScanner, at: int, end: int, limit: int) -> Iterator[RawBatch]:
        """Scan [at, end), which is not empty, as ColumnScanner.scan."""
        return scanner.scan(self.view, self.base, at, end, limit)

    def close(self) -> None:
        """Release what a subclass has opened: a mapping ends with its last user."""


@dataclass(slots=True)
class LogRun:
    """Bytes [start, end) of a segment, a record at the start, for one pass through its records, which reads nothing at `limit`.

    The pass says where it stopped, and why: a reason of native.scan.
    """

    segment: SegmentBytes
    start: int
    end: int
    limit: int
    reached: int = -1
    reason: str = ""

    def stopped(self, reached: int, reason: str) -> None:
        """Note the end of the records that the pass has read."""
        self.reached, self.reason = reached, reason

    def scan(self, scanner: ColumnScanner) -> Iterator[RawBatch]:
        """Yield the batches of a pass by this scanner."""
        yield from self.segment.scan(scanner, self.start, self.end, self.limit)
        self.stopped(scanner.position, scanner.reason)

    def walk(self, **checks: Unpack[Checks]) -> WalkResult:
        """Walk the run, as native.scan.walk."""
        found = self.segment.walk(self.start, self.end, limit=self.limit, **checks)
        self.stopped(found.end_offset, found.reason)
        return found


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Bytes [start, end) without a record at their start, for this reason of native.scan."""

    start: int
    end: int
    reason: str


# (segment, damage up to the end of the range, limit) -> where to go on
OnDamage = Callable[[SegmentBytes, LogDamage, int], int | None]


def next_record(segment: SegmentBytes, damage: LogDamage, limit: int) -> int | None:
    """Go on at the next record."""
    return segment.find_record(damage.start + 1, damage.end, limit)


def record_or_limit(segment: SegmentBytes, damage: LogDamage, limit: int) -> int:
    """Go on at the next record, which may begin after the range, or at the limit."""
    found = segment.find_record(damage.start + 1, limit, limit)
    return limit if found is None else found


def next_whole_record(segment: SegmentBytes, damage: LogDamage, limit: int) -> int | None:
    """Go on at the next complete record, by its body's checksum too, although none may follow it. The segment is mapped."""
    view, base = cast("mmap.mmap", segment.view), segment.base
    last = min(limit, damage.end + BEGIN.size - 1) - base  # the end of its magic
    found = view.find(_MAGIC, damage.start + 1 - base + MAGIC_AT, last)
    while found >= 0:
        at = found - MAGIC_AT
        if classify(view, at, limit - base - at, base + at) == CaseLabel.MESSAGE:
            return base + at
        found = view.find(_MAGIC, found + 1, last)
    return None


def refuse_damage(segment: SegmentBytes, damage: LogDamage, limit: int) -> NoReturn:
    """Raise CorruptionError."""
    raise CorruptionError(f"the log is damaged at {damage.start}: {damage.reason.replace('_', ' ')}")


def runs_of(segment: SegmentBytes, start: int, end: int, limit: int, on_damage: OnDamage | None = None,
            slice_bytes: int | None = None) -> Iterator[LogRun | LogDamage]:
    """Yield the records that begin in [start, end) of a segment as runs, and the damage between them; a record begins at `start`.

    It is the only loop that goes on after damage. The caller takes each run through a pass before the next step. A run ends at
    `end`, or has about `slice_bytes`; a blank ends them all. `on_damage` says where to go on; without it, damage is the last.
    """
    at, size_bytes = start, slice_bytes or end - start
    while at < end:
        run = LogRun(segment, at, min(end, at + size_bytes), limit)
        yield run
        if run.reason == CaseLabel.BLANK or run.reason == CaseLabel.RANGE_END and run.end == end:
            return
        if run.end < end and run.reached > at:
            at, size_bytes = run.reached, slice_bytes or end - start
        elif run.end < end:
            size_bytes = end - at  # the record is longer than the slice, or damaged
        else:
            damage = LogDamage(run.reached, end, run.reason)
            following = on_damage and on_damage(segment, damage, limit)
            yield damage if following is None else replace(damage, end=following)
            if following is None:
                return
            at = following


# -- where it ends -----------------------------------------------------------------------

SLICE_BYTES = 32 << 20            # bytes walked between two calls of `progress`, and by one processor at a time
CLEAN_VERIFY_BYTES_MAX = 1 << 30  # most bytes read after a clean stop of an own store, which must start within a second
NORMAL_SEGMENTS = 3               # CommitLog.recoverNormally reads this many segments again
KEPT_MAX = 4                      # mappings that one recovery keeps; each has a descriptor
HEAD_BYTES = 68 + 8               # the store time is readable in these, also after a 20-byte host
# The search for the first record of a piece ends this far after its start: bytes beyond the log's end may be
# allocated and never written, and those are the slowest to read.
GUESS_BYTES = 1 << 20

Piece = tuple[int, bool]  # (end, whether topic and properties are checked too: strict)


@dataclass(frozen=True, slots=True)
class Log:
    """The log's files, and what is known about them before they are read."""

    segments: Sequence[MappedFile]
    size_bytes: int
    watermark: int | None  # pyengine's; None for a store without one
    verified_from: int = 0  # the watermark does not cover bytes below this offset
    end: int = INT64_MAX  # of what a check reads
    lost: list[LogDamage] = field(default_factory=list, repr=False, compare=False)  # what the walk of a check has not found whole, in order
    kept: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)  # its newest mappings: a page faults in only once
    opened: Callable[[int], SegmentBytes] | None = field(default=None, repr=False, compare=False)  # how its reader opens a segment

    @classmethod
    def of(cls, segments: Sequence[MappedFile], size_bytes: int, watermark: DurableWatermark | None,
           opened: Callable[[int], SegmentBytes] | None = None) -> Log:
        """Make a view of a store's log with this watermark."""
        if watermark is None:
            return cls(segments, size_bytes, None, opened=opened)
        return cls(segments, size_bytes, watermark.flushed, watermark.verified_from, opened=opened)

    @property
    def is_ours(self) -> bool:
        """Whether pyengine wrote it: a valid config/watermark says so; else it is RocketMQ's, or pyengine's without its watermark."""
        return self.watermark is not None

    @property
    def min_offset(self) -> int:
        return self.segments[0].start_offset if self.segments else -1

    @property
    def unsynced_paths(self) -> list[Path]:
        """Return the segments that reach above the watermark: their bytes there may not have been synced."""
        sure = self.watermark or 0
        return [segment.path for segment in self.segments if segment.start_offset + self.size_bytes > sure]

    def is_gap_after(self, index: int) -> bool:
        """Whether the next segment begins after the end of this one, so that one is missing."""
        return self.segments[index + 1].start_offset != self.segments[index].start_offset + self.size_bytes

    def index_of(self, offset: int) -> int | None:
        """Return the index of the segment that contains `offset`; None if none does."""
        index = bisect_right(self.segments, offset, key=lambda segment: segment.start_offset) - 1
        return index if index >= 0 and offset < self.segments[index].start_offset + self.size_bytes else None

    def view_at(self, offset: int) -> tuple[int, int, mmap.mmap] | None:
        """Return (start, limit, bytes) of the segment that contains `offset`, None outside the log; limit is not beyond its end."""
        index = self.index_of(offset) if offset < self.end else None
        if index is None:
            return None
        segment = self.segments[index]
        return segment.start_offset, min(self.end, segment.start_offset + self.size_bytes), self._mapped(segment)

    def is_lost(self, offset: int) -> bool:
        """Whether the walk of a check has found no complete record at this offset."""
        at = bisect_right(self.lost, offset, key=lambda lost: lost.start) - 1
        return at >= 0 and offset < self.lost[at].end

    def head(self, segment: MappedFile) -> bytes:
        """Return the first HEAD_BYTES of a segment. FileNotFoundError if it was deleted, as from the methods below."""
        if self.opened is None:
            with open(segment.path, "rb") as file:
                return file.read(HEAD_BYTES)
        with self.open(segment) as found:
            return found.read(segment.start_offset, segment.start_offset + HEAD_BYTES)

    def label_at(self, segment: MappedFile, offset: int) -> str:
        """Return what is at `offset`, a label of formats.record, without reading the body."""
        with self.open(segment) as found:
            return found.label(offset, segment.start_offset + self.size_bytes)

    def forget(self, path: Path | None = None) -> None:
        """Drop the mapping of a segment (None: of all), before it is deleted, so that its space becomes free at once."""
        if path is None:
            self.kept.clear()
        else:
            self.kept.pop(path, None)

    def _mapped(self, segment: MappedFile) -> mmap.mmap:
        """Return the segment's mapping, and keep it; of more than KEPT_MAX the oldest is unmapped with its last user."""
        if segment.path not in self.kept:
            if len(self.kept) == KEPT_MAX:
                del self.kept[next(iter(self.kept))]
            self.kept[segment.path] = map_read_only(segment.path)
        return self.kept[segment.path]

    @contextlib.contextmanager
    def open(self, segment: MappedFile) -> Iterator[SegmentBytes]:
        """Open the segment for the block, as this log's reader does."""
        if self.opened is not None:
            with contextlib.closing(self.opened(segment.start_offset)) as found:
                yield found
            return
        view = self._mapped(segment)
        view.madvise(mmap.MADV_SEQUENTIAL)  # the block reads it in order
        yield SegmentBytes(view, segment.start_offset)

    def walk(
        self, segment: MappedFile, start: int, pieces: Sequence[Piece], *, limit: int, check_crc: bool
    ) -> Generator[WalkResult, None, None]:
        """Call walk_pieces() for one segment."""
        with self.open(segment) as found:
            yield from walk_pieces(found, start, pieces, limit=limit, check_crc=check_crc, check_offset=self.is_ours)

    def runs(self, start: int, end: int, on_damage: OnDamage | None = None, slice_bytes: int | None = None
             ) -> Iterator[LogRun | LogDamage]:
        """Yield the records of [start, end) as runs, and the damage between them, segment by segment: see runs_of()."""
        for segment in self.segments:
            base = segment.start_offset
            first, stop = max(start, base), min(end, base + self.size_bytes)
            if first < stop:
                with self.open(segment) as found:
                    for piece in runs_of(found, first, stop, stop, on_damage, slice_bytes):
                        yield piece
                        if on_damage is None and isinstance(piece, LogDamage):
                            return


@dataclass(frozen=True, slots=True)
class LogScan:
    """The result of a walk from `scan_from`: the end of the complete records, and the reason (a label of formats.record)."""

    scan_from: int
    end_offset: int
    reason: str
    records: int = 0
    messages: int = 0
    last_store_timestamp_ms: int = -1

    def extended_by(self, result: WalkResult, end_offset: int, reason: str) -> LogScan:
        """Return this scan, extended by one more walk."""
        return replace(
            self,
            end_offset=end_offset,
            reason=reason,
            records=self.records + result.records,
            messages=self.messages + result.messages,
            last_store_timestamp_ms=(
                result.last_store_timestamp_ms if result.messages else self.last_store_timestamp_ms
            ),
        )


def first_after_orderly_stop(log: Log, count: int) -> int:
    """Return the index of the segment in which reading begins after an orderly stop, in a log of `count` segments; no watermark counts."""
    segments_read = NORMAL_SEGMENTS
    if log.is_ours:
        segments_read = min(NORMAL_SEGMENTS, max(1, CLEAN_VERIFY_BYTES_MAX // log.size_bytes))
    return max(0, count - segments_read)


def scan_log(
    log: Log, first: int, *, start: int | None = None, check_crc: bool = True, limit: int | None = None,
    progress: Progress | None = None, over_gaps: bool = False,
) -> LogScan:
    """Walk from segment `first` to the first bytes that are no record, or to `limit` if that comes earlier.

    Damage below `log.verified_from` is older than this engine and does not end the walk: it continues
    at the next segment, or at `verified_from`. `start`: the record of that segment to begin at (default: its first).
    `over_gaps`: continue after a missing segment.
    """
    if not log.segments:
        return LogScan(0, 0, CaseLabel.ZEROES)
    at = log.segments[first].start_offset if start is None else start
    log_end = log.segments[-1].start_offset + log.size_bytes
    total_bytes = (log_end if limit is None else min(limit, log_end)) - at
    scan = before_blank = LogScan(at, at, CaseLabel.RANGE_END)

    def report_done(done: int) -> None:
        if progress is not None:
            progress(done, total_bytes)

    for segment in log.segments[first:]:
        base, segment_end = segment.start_offset, segment.start_offset + log.size_bytes
        if base > scan.end_offset and not over_gaps:
            return replace(scan, reason=MISSING_SEGMENT) if log.is_ours else before_blank
        end = segment_end if limit is None else min(segment_end, limit)
        scan = _scan_segment(log, segment, max(at, base), end, scan, check_crc, report_done)
        if scan.reason != CaseLabel.BLANK and scan.end_offset < (resumed := min(log.verified_from, end)):
            scan = _scan_segment(log, segment, resumed, end, scan, check_crc, report_done)
            if scan.end_offset == segment_end:
                continue
        if scan.reason != CaseLabel.BLANK:
            return scan
        if segment is log.segments[-1] and not log.is_ours and limit is None:
            return scan  # RocketMQ ends the log before such a blank; a commit slot may be after it
        before_blank, scan = scan, replace(scan, end_offset=segment_end, reason=CaseLabel.RANGE_END)
    return scan


def _scan_segment(
    log: Log, segment: MappedFile, at: int, end: int, scan: LogScan, check_crc: bool,
    progress: Callable[[int], None],
) -> LogScan:
    scan = replace(scan, end_offset=at, reason=CaseLabel.RANGE_END)
    results = log.walk(segment, at, list(_slices(at, end, log.watermark)), limit=end, check_crc=check_crc)
    with contextlib.closing(results):  # the walk ends when `progress` raises
        for result in results:
            scan = scan.extended_by(result, result.end_offset, result.reason)
            progress(scan.end_offset - scan.scan_from)
    return scan


def _slices(start: int, end: int, watermark: int | None) -> Iterator[tuple[int, bool]]:
    """Yield (stop, strict) of the pieces of [start, end), divided at the watermark and at every SLICE_BYTES."""
    while start < end:
        stop = min(start + SLICE_BYTES, end)
        strict = watermark is not None and start >= watermark
        if watermark is not None and start < watermark:
            stop = min(stop, watermark)
        yield stop, strict
        start = stop


def _is_older_than(head: bytes, timestamp_ms: int) -> bool:
    """Whether the first record was stored at or before `timestamp_ms`. RocketMQ: CommitLog.isMappedFileMatchedRecover."""
    if len(head) < HEAD_BYTES or BEGIN.unpack_from(head)[1] != MESSAGE_MAGIC:
        return False
    return 0 != store_timestamp_ms(head, 0) <= timestamp_ms


RECHECK_INTERVAL_S = 1.0
_TRIES = 16
# Reasons that an appending process may cause for a moment; with any other reason the end is final.
_UNFINISHED = frozenset((
    CaseLabel.FOREIGN, CaseLabel.OVERRUN, CaseLabel.TORN, CaseLabel.OFFSET_MISMATCH, CaseLabel.BAD_CRC, CaseLabel.BAD_TEXT,
))


def find_end(root: Root, log: Log) -> LogScan:
    """Find the end of the log from the files alone, for a store without a running engine.

    It reads from pyengine's watermark on, if the files reach that, else from where recovery would. FileNotFoundError
    if a segment is deleted meanwhile.
    """
    flushed = log.watermark
    if flushed is not None and log.segments and flushed == log.segments[-1].start_offset + log.size_bytes:
        return LogScan(flushed, flushed, CaseLabel.RANGE_END)
    index = None if flushed is None else log.index_of(flushed)
    if flushed is None or index is None:
        # A reader continues after a missing segment, as RocketMQ does; recovery refuses such a store (commit_log.list_complete_log).
        over_gaps = not log.is_ours
        return scan_log(log, find_recovery_start(read_stop_notes(root), log, over_gaps=over_gaps).first, over_gaps=over_gaps)
    label = log.label_at(log.segments[index], flushed)
    # The watermark may be inside a torn record or, if RocketMQ has appended since, inside a valid one: the segment's start is safe.
    scan = scan_log(log, index, start=None if label in _UNFINISHED else flushed)
    return scan if scan.end_offset >= flushed else replace(scan, end_offset=flushed, reason=label)


def own_watermark(reading: WatermarkReading, min_offset: int) -> DurableWatermark | None:
    """Return the watermark that is valid for this log, None if there is none; that of a copied store is not valid in the copy."""
    if reading.watermark is None or not reading.is_copied:
        return reading.watermark
    return replace(reading.watermark, flushed=max(min_offset, 0))


class RecoveryStart(NamedTuple):
    """Where recovery begins to read: RocketMQ's path, and the index of the segment."""

    path: RecoveryPath
    first: int


def find_recovery_start(left: StopNotes, log: Log, *, over_gaps: bool = False, has_failed_sync: bool = False) -> RecoveryStart:
    """Find where recovery begins to read this log; segment 0 without segments.

    The segment is not after a gap and, with pyengine's watermark, not after the watermark's segment. In RocketMQ's store it is not
    before what an earlier recovery has kept (config/recovered). `over_gaps`: ignore gaps, as a reader of RocketMQ's store does.
    `has_failed_sync`: a sync has failed, so recovery reads as after a crash.
    """
    marker, count, first = left.marker, len(log.segments), 0
    if left.abort_exists or has_failed_sync or (marker is not None and marker.path is RecoveryPath.ABNORMAL):
        path = RecoveryPath.ABNORMAL
        first = next((index for index in range(count - 1, 0, -1)
                      if _is_older_than(log.head(log.segments[index]), left.checkpoint.min_timestamp_ms)), 0)
    else:
        path = RecoveryPath.NORMAL
        kept = None if left.recovered_from is None or log.is_ours else log.index_of(left.recovered_from)
        first = max(first_after_orderly_stop(log, count), kept or 0)
    if log.watermark is not None and count:
        holder = log.index_of(log.watermark)
        first = min(first, count - 1 if holder is None else holder)
    if not over_gaps:
        first = next((index for index in range(first) if log.is_gap_after(index)), first)
    if marker is not None:  # in RocketMQ's store a second recovery that reads more would truncate what the first one kept
        unfinished = log.index_of(marker.scan_from) or 0
        first = min(first, unfinished) if log.is_ours else unfinished
    return RecoveryStart(path, first)


def end_of_stored_until(log: Log, time_ms: int) -> int:
    """Return the end of the last record that was stored at or before `time_ms`, by binary search; the log's start if none was.

    It is for a log to which another program appends: of later records it reads only the heads.
    """
    for segment in reversed(log.segments):
        base = segment.start_offset
        with mapped(segment.path) as view:
            low, high = base, base + min(len(view), used_end(segment.path))  # old before `low`, later from `high` on
            while low < high:
                middle = (low + high) // 2
                at = sync(view, base, middle, high, limit=base + len(view))
                if at is None or store_timestamp_ms(view, at - base) > time_ms:
                    high = middle
                else:
                    low = at + total_size(view, at - base)
            end = base + len(view)
            while (  # `sync` does not find a record without a following one
                low < end and classify(view, low - base, end - low, low) == CaseLabel.MESSAGE
                and store_timestamp_ms(view, low - base) <= time_ms
            ):
                low += total_size(view, low - base)
        if low > base:
            return low
    return max(0, log.min_offset)


class LogEnd:
    """Follows the end of one commit log. Threads that share it need a lock."""

    def __init__(self, root: Root, commit_log: CommitLog) -> None:
        self._root = root
        self._log = commit_log
        self._end: int | None = None
        self.last_store_timestamp_ms = -1  # of the last message below the end; -1 if none was read
        self._seen: tuple[list[int], Log] | None = None
        self._rechecked_s = 0.0

    def find(self) -> int:
        """Return the current end. The first call reads what `find_end` reads; later ones only what was appended since.

        0 for a log without segments.
        """
        for _ in range(_TRIES):
            starts = self._log.starts()
            if not starts:
                self._end = None
                return 0
            try:
                end = self._find(starts)
            except FileNotFoundError:
                end = -1
            if end >= self._log.min_offset:
                self._end = end
                return end
            self._end = None  # the segment was deleted, and may have been emptied, while it was read
        return max(self._log.min_offset, 0)

    def _current_view(self, starts: list[int]) -> Log:
        """Return a view of the current log. It reads the watermark again if segments have changed, and for each new search."""
        if self._end is None or self._seen is None or self._seen[0] != starts:
            segments = [MappedFile(Path(segment_name(start)), start) for start in starts]
            durable = own_watermark(read_watermark(self._root), starts[0])
            self._seen = starts, Log.of(segments, self._log.size_bytes, durable, self._log.open)
        return self._seen[1]

    def _find(self, starts: list[int]) -> int:
        log = self._current_view(starts)
        if self._end is None or not starts[0] <= self._end <= starts[-1] + self._log.size_bytes:
            scan = find_end(self._root, log)
            self.last_store_timestamp_ms = scan.last_store_timestamp_ms
            return scan.end_offset
        index = log.index_of(self._end)
        if index is None:
            return self._end
        if self._end >= log.verified_from and log.label_at(log.segments[index], self._end) == CaseLabel.ZEROES:
            return self._end  # no record was appended
        scan = scan_log(log, index, start=self._end, over_gaps=not log.is_ours)
        if scan.messages:
            self.last_store_timestamp_ms = scan.last_store_timestamp_ms
        if scan.end_offset > self._end or scan.reason not in _UNFINISHED or not self._may_recheck():
            return scan.end_offset
        # Either a process is writing there, or the writer was killed, and bytes that this reader has
        # passed were cleared and overwritten: the segment's start is safe.
        if not log.is_ours:
            return scan_log(log, index, over_gaps=True).end_offset
        self._end = None
        return find_end(self._root, self._current_view(starts)).end_offset

    def _may_recheck(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._rechecked_s < RECHECK_INTERVAL_S:
            return False
        self._rechecked_s = now_s
        return True


# -- a walk over a long range by two processors ----------------------------------------
#
# The start of a record in the middle of a log is known only when a walk has reached it. So while the caller walks one
# piece, a thread guesses the start of the first record of the next piece and walks from there. The thread's walk is used
# only if the caller's walk ended at exactly that byte: the result of a walk depends only on the bytes and on its start.
# So a body that looks like a record costs time, but does not change the result.
#
#     piece k, caller      [====walk====>|             the same byte:  both are used
#     piece k + 1, thread                |[====walk====>
#                           guess of the first record after the boundary
#
# With one processor, without a thread, or without a guess, the caller walks piece by piece.


def walk_pieces(
    segment: SegmentBytes, start: int, pieces: Sequence[Piece], *, limit: int, processors: int | None = None, **checks: Unpack[Checks],
) -> Generator[WalkResult, None, None]:
    """Walk from the record at `start` through consecutive `pieces`; yield one result for each piece.

    `end_offset` and `reason` of the last result are those of a single walk; the walk stops at the
    first piece whose end no record reaches. A piece that is completely inside a record of the
    previous one has no result. `processors`: by default, as many as this process may use.
    """
    if processors is None:
        processors = 1 if segment.is_partial else len(os.sched_getaffinity(0))

    def walked(at: int, piece: Piece) -> WalkResult:
        return segment.walk(at, piece[0], limit=limit, **(checks | {"strict": piece[1]}))

    def walk_ahead(boundary: int, piece: Piece) -> threading.Thread | None:
        """Walk a piece in a thread, from its first record after `boundary` as guessed; None without a thread."""

        def walk_from_guess() -> None:
            guess = segment.find_record(boundary, min(piece[0], boundary + GUESS_BYTES), limit)
            if guess is not None:
                ahead[guess] = walked(guess, piece)

        thread = threading.Thread(target=walk_from_guess, name="walk-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit on processes is reached: the caller walks this piece
            return None
        return thread

    at = start
    ahead: dict[int, WalkResult] = {}
    for number, piece in enumerate(pieces):
        stop, _ = piece
        if at >= stop:
            continue
        result = ahead.get(at)
        ahead.clear()
        if result is None:
            thread = walk_ahead(stop, pieces[number + 1]) if processors > 1 and number + 1 < len(pieces) else None
            try:
                result = walked(at, piece)
            finally:
                if thread is not None:
                    thread.join()
        yield result
        at = result.end_offset
        if result.reason != CaseLabel.RANGE_END or at < stop:
            return
