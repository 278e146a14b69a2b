"""CommitLog: the segments of a log that may be in several folders, followed, listed, and where a new one goes.

    CommitLog(root, ...)      a MappedFileQueue over all folders of the log
    list_log(root, size)      all segments, as list_segments
    look_at_log(root, size)   the same, for a process that will change the store: missing ones are refused
    new_segment_folder(...)   round robin; folders on a disk that is nearly full are passed over
    LocalLog(root, size)      what a slave compares with its master's log
"""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

from pyengine.errors import CorruptionError, StoreRefusedError
from pyengine.formats.paths import log_folders, segment_name
from pyengine.formats.record import BEGIN
from pyengine.formats.record_case import CaseLabel
from pyengine.native.scan import walk
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.file_system import DiskUse, measure
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, list_segments

# Ends the sentence about a segment of wrong length; check/ has the same for `check`.
LENGTH_ADVICE = ("; restore it from a copy, or carve out what is whole with `pyengine salvage STORE DEST`. If it is the "
                 "log's only segment and the store was made with that size, say so: --set mapped_file_size_commit_log_bytes=SIZE")
FULL_PERCENT = 85  # RocketMQ's diskSpaceCleanForciblyRatio


def list_log(root: str | os.PathLike[str], size_bytes: int) -> list[MappedFile]:
    """The log's segments in order. StoreRefusedError as list_segments, and for one that lies in two folders."""
    folders = log_folders(root).all
    found = [segment for folder in folders for segment in list_segments(folder, size_bytes, LENGTH_ADVICE)]
    if len(folders) > 1:
        found.sort(key=lambda segment: segment.start_offset)
        for before, after in itertools.pairwise(found):
            if before.start_offset == after.start_offset:
                raise StoreRefusedError(f"{before.path} and {after.path} are the same segment: move one of them away")
    return found


def look_at_log(root: str | os.PathLike[str], size_bytes: int, *, accept_loss: bool = False) -> list[MappedFile]:
    """The log's segments, looked at before anything of the store is changed.

    StoreRefusedError as list_log. CorruptionError when one of several folders, or a segment in it, is not there: a
    disk that is not mounted; and, in a store without our watermark, when a segment is missing between others: nothing
    else would tell of that loss later. With `accept_loss` missing segments are no error.
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
    """True when any of the log's folders is there."""
    return any(folder.is_dir() for folder in log_folders(root).all)


class CommitLog(MappedFileQueue):
    """The log of the store at `root`, followed, in all its folders. Its `folder` is the first one."""

    def __init__(self, root: str | os.PathLike[str], size_bytes: int, cache: MappingCache) -> None:
        folders = log_folders(root).all
        super().__init__(folders[0], size_bytes, cache, LENGTH_ADVICE)
        self._further = [MappedFileQueue(folder, size_bytes, cache, LENGTH_ADVICE) for folder in folders[1:]]
        self._holder: dict[int, MappedFileQueue] = {}

    def starts(self) -> list[int]:
        """Start offsets, ascending; folders that have changed are listed again. Not to be modified."""
        starts = super().starts()
        if not self._further:
            return starts
        self._holder = {start: folder for folder in self._further for start in folder.starts()}
        return sorted({*starts, *self._holder})

    def view(self, start_offset: int) -> mmap.mmap | None:
        """The segment's bytes, None when it is gone."""
        holder = self._holder.get(start_offset)
        return super().view(start_offset) if holder is None else holder.view(start_offset)

    def path(self, start_offset: int) -> str:
        """Where the segment is, or would be."""
        holder = self._holder.get(start_offset)
        return super().path(start_offset) if holder is None else holder.path(start_offset)

    def modified_ms(self, start_offset: int) -> int | None:
        """The segment's modification time; None when it is gone."""
        holder = self._holder.get(start_offset)
        return super().modified_ms(start_offset) if holder is None else holder.modified_ms(start_offset)


def new_segment_folder(root: str | os.PathLike[str], start_offset: int, size_bytes: int) -> Path:
    """Where the segment that starts there is to be made."""
    folders = log_folders(root)
    if len(folders.writable) == 1:
        return folders.writable[0]
    return folders.folder_for(start_offset, size_bytes, [folder for folder in folders.writable if is_nearly_full(folder)])


def is_nearly_full(folder: Path) -> bool:
    """RocketMQ's rule: more than 85 % of what this user could use of the file system is in use."""
    return measure(folder).used_percent > FULL_PERCENT


def measure_log(root: str | os.PathLike[str]) -> DiskUse:
    """The use of the log's file system; of several folders that of the emptiest one that can be written, as in RocketMQ."""
    uses = [measure(folder) for folder in log_folders(root).writable]
    return min(uses, key=lambda use: (bool(use.unwritable_reason), not use.is_known, use.used_percent))


def shown(path: Path, root: Path) -> str:
    """A file of the store as people are told of it: relative to its root, or whole when it lies elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


_MAPPINGS_MAX = 4


class LocalLog:
    """The own log as a slave looks at it: bytes to compare with its master's, and boundaries between records.

    Only what is surely whole is asked for: below the end that recovery found or the writer committed. Mappings
    are kept; a segment that was deleted meanwhile is a CorruptionError.
    """

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._cache = MappingCache(_MAPPINGS_MAX)
        self._log = CommitLog(root, segment_bytes, self._cache)

    def piece(self, offset: int, size: int) -> memoryview:
        """At most `size` bytes from `offset` on, less where the segment ends."""
        base, view = self._segment(offset)
        return memoryview(view)[offset - base : offset - base + size]

    def record_boundary(self, offset: int, known: int | None = None) -> int:
        """The last border between records at or below `offset`; `known`: one below, or the start of its segment is.

        A blank and its filler count as one record. A border in an earlier segment than
        `offset` is never given: the start of the segment is one.
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
        """Whether the byte lies in a blank after its header, where anything may be; `known` as in record_boundary."""
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
