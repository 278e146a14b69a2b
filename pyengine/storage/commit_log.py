"""CommitLog: follow and list the segments of a log, which may be in several folders, and choose the folder of a new one."""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

from pyengine.errors import CorruptionError, StoreRefusedError
from pyengine.formats.paths import log_folders, segment_name
from pyengine.formats.record import BEGIN
from pyengine.formats.record_case import CaseLabel
from pyengine.native.flush import FOLIO_BYTES_MAX
from pyengine.native.scan import walk
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.file_system import DiskUse, free_bytes, measure
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, list_segments

# The end of the message about a segment of wrong length; check/ has another for `check`.
LENGTH_ADVICE = ("; restore it from a copy, or carve out what is whole with `pyengine salvage STORE DEST`. If it is the "
                 "log's only segment and the store was made with that size, say so: --set mapped_file_size_commit_log_bytes=SIZE")
FULL_PERCENT = 85  # RocketMQ's diskSpaceCleanForciblyRatio
SEGMENTS_AHEAD = 2       # files that exist beyond the written part of the log, most of them without blocks
RESERVE_STEP_BYTES_MAX = 32 << 20


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

    StoreRefusedError as list_log. CorruptionError when one of several folders, or a segment in it, does not exist (a
    disk that is not mounted); and, in a store without pyengine's watermark, when a segment between others is missing, since
    that loss could not be noticed later. With `accept_loss` missing segments are accepted.
    """
    segments = list_log(root, size_bytes)
    if accept_loss:
        return segments
    folders = log_folders(root)
    gone = [str(folder) for folder in folders.read_only if not folder.is_dir()]
    if gone:
        raise CorruptionError(f"the log's folder {gone[0]} is missing: mount its disk, or leave it out of "
                              "read_only_commit_log_store_paths if its messages are to be given up")
    for before, after in itertools.pairwise(segments):
        end = before.start_offset + size_bytes
        if after.start_offset == end:
            continue
        if len(folders.all) > 1:
            where = ", ".join(map(str, folders.all))
            raise CorruptionError(f"the log's segment {segment_name(end)} is in none of its folders ({where}): "
                                  "is a disk not mounted?")
        if read_watermark(root).watermark is None:
            raise CorruptionError(
                f"{after.start_offset - end:,} bytes of the log are missing: {before.path} ends at {end}, and the next "
                f"segment is {after.path}. Restore what is missing from a copy; or make a store of what is there with "
                "`pyengine salvage STORE DEST`; or end the log there with `pyengine recover STORE --accept-loss`, which "
                "puts the segments that follow into quarantine")
    return segments


def log_exists(root: str | os.PathLike[str]) -> bool:
    """Whether any of the log's folders exists."""
    return any(folder.is_dir() for folder in log_folders(root).all)


class CommitLog(MappedFileQueue):
    """The log of the store at `root`, followed in all its folders. Its `folder` is the first one."""

    def __init__(self, root: str | os.PathLike[str], size_bytes: int, cache: MappingCache) -> None:
        folders = log_folders(root).all
        super().__init__(folders[0], size_bytes, cache, LENGTH_ADVICE)
        self._further = [MappedFileQueue(folder, size_bytes, cache, LENGTH_ADVICE) for folder in folders[1:]]
        self._folder_of: dict[int, str] = {}

    def starts(self) -> list[int]:
        """Return the start offsets, ascending; folders that have changed are listed again. Do not modify the list."""
        starts = super().starts()
        if not self._further:
            return starts
        self._folder_of = {start: further.folder for further in self._further for start in further.starts()}
        return sorted({*starts, *self._folder_of})

    def folder_of(self, start_offset: int) -> str:
        """Return the folder of the segment, the first one if it does not exist."""
        return self._folder_of.get(start_offset, self.folder)


def new_segment_folder(root: str | os.PathLike[str], start_offset: int, size_bytes: int) -> Path:
    """Return the folder in which to create the segment that starts at this offset."""
    folders = log_folders(root)
    if len(folders.writable) == 1:
        return folders.writable[0]
    full = [folder for folder in folders.writable if is_nearly_full(folder) or folder.is_dir() and free_bytes(folder) < size_bytes]
    return folders.folder_for(start_offset, size_bytes, full)


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


_MAPPINGS_MAX = 4


class LocalLog:
    """A slave's own log: bytes to compare with its master's, and record boundaries.

    Callers ask only for offsets below the end that recovery found or the writer committed. Mappings
    are kept; a segment that was deleted meanwhile is a CorruptionError.
    """

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._cache = MappingCache(_MAPPINGS_MAX)
        self._log = CommitLog(root, segment_bytes, self._cache)

    def piece(self, offset: int, size: int) -> memoryview:
        """Return up to `size` bytes from `offset` on, fewer at the end of the segment."""
        base, view = self._segment(offset)
        return memoryview(view)[offset - base : offset - base + size]

    def record_boundary(self, offset: int, known: int | None = None) -> int:
        """Return the last record boundary at or below `offset`.

        `known` is a boundary at or below it, by default the start of its segment. A blank and its filler count
        as one record. The result is in the segment of `offset`, since the segment's start is a boundary.
        """
        base = offset - offset % self.segment_bytes
        start = base if known is None else max(base, known)
        if start == offset:
            return offset
        _, view = self._segment(offset)
        found = walk(view, base, start, offset, check_crc=False)
        if found.reason not in (CaseLabel.RANGE_END, CaseLabel.OVERRUN, CaseLabel.BLANK):
            raise CorruptionError(f"the log holds no whole record at {found.end_offset} ({found.reason})")
        return found.end_offset

    def is_filler(self, offset: int, known: int) -> bool:
        """Whether the byte is in a blank, after its header, where bytes have no meaning; `known` as in record_boundary."""
        start = self.record_boundary(offset, known if known <= offset else None)
        if start + BEGIN.size > offset:
            return False
        base, view = self._segment(offset)
        return walk(view, base, start, start + 1, check_crc=False, limit=base + self.segment_bytes).reason == CaseLabel.BLANK

    def close(self) -> None:
        self._cache.clear()

    def _segment(self, offset: int) -> tuple[int, mmap.mmap]:
        base = self._log.start_of(offset)
        view = None if base is None else self._log.view(base)
        if base is None or view is None:
            raise CorruptionError(f"no segment of the log holds offset {offset}")
        return base, view
