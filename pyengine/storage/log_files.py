"""The segments of a log that may lie in several folders: listing, following, and where a new one goes.

    list_log(root, size)      all segments, as list_segments
    look_at_log(root, size)   the same, for a process that will change the store: missing ones are refused
    LogFolder(root, ...)      what a SegmentFolder is, over all folders
    new_segment_folder(...)   round robin; folders on a disk that is nearly full are passed over
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from pyengine.errors import CorruptionError, StoreRefusedError
from pyengine.formats.paths import log_folders, segment_name
from pyengine.storage.disk_use import DiskUse, measure
from pyengine.storage.segment_files import MappingCache, SegmentFile, SegmentFolder, list_segments
from pyengine.storage.watermark import read_watermark

# Ends the sentence about a segment of wrong length; check_grades.py has the same for `check`.
LENGTH_ADVICE = ("; restore it from a copy, or carve out what is whole with `pyengine salvage STORE DEST`. If it is the "
                 "log's only segment and the store was made with that size, say so: --set mapped_file_size_commit_log_bytes=SIZE")
FULL_PERCENT = 85  # RocketMQ's diskSpaceCleanForciblyRatio


def list_log(root: str | os.PathLike[str], size_bytes: int) -> list[SegmentFile]:
    """The log's segments in order. StoreRefusedError as list_segments, and for one that lies in two folders."""
    folders = log_folders(root).all
    found = [segment for folder in folders for segment in list_segments(folder, size_bytes, LENGTH_ADVICE)]
    if len(folders) > 1:
        found.sort(key=lambda segment: segment.start_offset)
        for before, after in itertools.pairwise(found):
            if before.start_offset == after.start_offset:
                raise StoreRefusedError(f"{before.path} and {after.path} are the same segment: move one of them away")
    return found


def look_at_log(root: str | os.PathLike[str], size_bytes: int, *, accept_loss: bool = False) -> list[SegmentFile]:
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


def open_log(root: str | os.PathLike[str], size_bytes: int, cache: MappingCache) -> SegmentFolder | LogFolder:
    """The log's segments, followed."""
    folders = log_folders(root).all
    if len(folders) == 1:
        return SegmentFolder(folders[0], size_bytes, cache, LENGTH_ADVICE)
    return LogFolder(folders, size_bytes, cache)


class LogFolder(SegmentFolder):
    """Several folders that together hold one row of segments. Its `folder` is the first one."""

    def __init__(self, folders: Iterable[Path], size_bytes: int, cache: MappingCache) -> None:
        self._folders = [SegmentFolder(folder, size_bytes, cache, LENGTH_ADVICE) for folder in folders]
        super().__init__(self._folders[0].folder, size_bytes, cache)
        self._holder: dict[int, SegmentFolder] = {}

    def starts(self) -> list[int]:
        """Start offsets, ascending; folders that have changed are listed again."""
        lists = [folder.starts() for folder in self._folders]
        self._holder = {start: folder for folder, starts in zip(self._folders, lists) for start in starts}
        self._starts = sorted(self._holder)
        return self._starts

    def view(self, start_offset: int) -> mmap.mmap | None:
        """The segment's bytes, None when it is gone."""
        holder = self._holder.get(start_offset)
        return None if holder is None else holder.view(start_offset)

    def path(self, start_offset: int) -> str:
        """Where the segment is, or would be."""
        return self._holder.get(start_offset, super()).path(start_offset)

    def modified_ms(self, start_offset: int) -> int | None:
        """The segment's modification time; None when it is gone."""
        holder = self._holder.get(start_offset)
        return None if holder is None else holder.modified_ms(start_offset)


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
    return min(uses, key=lambda use: (bool(use.obstacle), not use.is_known, use.used_percent))


def shown(path: Path, root: Path) -> str:
    """A file of the store as people are told of it: relative to its root, or whole when it lies elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
