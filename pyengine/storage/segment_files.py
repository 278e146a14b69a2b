"""Folders of 20-digit files: listing, and read-only mappings that survive a deletion.

A `SegmentFolder` follows a folder that others add to and delete from. It lists again
only when the folder's time has changed; mappings are kept per segment and dropped when
the file is gone or replaced. A mapping that someone still reads from stays valid after
its file was deleted: the last reference unmaps it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, StoreRefusedError
from pyengine.formats.paths import parse_segment_name, segment_name
from pyengine.storage.folder_entries import is_plain_file

# Folder times have the granularity of the kernel's clock tick. A listing made within
# this time of the folder's last change may have missed a second change of the same tick.
_TICK_NS = 50_000_000
# A broker makes a file first and gives it its length then; this engine links finished files.
_BEING_MADE_NS = 1_000_000_000
MAPPINGS_MAX = 256


class SegmentFile(NamedTuple):
    """One file of the folder; its length is the segment size."""

    path: Path
    start_offset: int


def list_segments(folder: str | os.PathLike[str], size_bytes: int, advice: str = "") -> list[SegmentFile]:
    """The folder's segments in order; empty when there is no folder.

    Raises StoreRefusedError when anything else lies there, a length differs from
    `size_bytes`, or a name is no multiple of it: RocketMQ would refuse the whole store
    (MappedFileQueue.load) or misplace every offset. `advice` ends the sentence about a wrong length.
    """
    found, _ = _inodes(folder, size_bytes, advice)
    return [SegmentFile(Path(folder) / segment_name(start), start) for start in sorted(found)]


def map_read_only(path: str | os.PathLike[str]) -> mmap.mmap:
    """The whole file, read-only and shared. Raises FileNotFoundError, or DiskError when it cannot be mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or 0
        raise DiskError(f"cannot map {path}: {error}", errno=number, path=str(path)) from error


@contextlib.contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    """The whole file, read-only, for the length of a block.

    An error that ends the block is what its caller sees. Its frames may still point into the mapping, which
    cannot be closed then (BufferError); it goes with the last of them.
    """
    view = map_read_only(path)
    try:
        yield view
    except BaseException:
        with contextlib.suppress(BufferError):
            view.close()
        raise
    view.close()


class MappingCache:
    """The mappings of a reader, all folders together: at most MAPPINGS_MAX, the least used goes first.

    Each holds a descriptor, so the number is bounded; a reader of 100,000 queues keeps
    the ones it uses.
    """

    def __init__(self, mappings_max: int = MAPPINGS_MAX) -> None:
        self._mappings: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()
        self._mappings_max = mappings_max
        self._lock = threading.Lock()

    def get(self, folder: str, start_offset: int) -> mmap.mmap | None:
        """The segment's mapping, made when it is not there; None when the file is gone."""
        key = (folder, start_offset)
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is not None:
                self._mappings.move_to_end(key)
                return mapping
            try:
                mapping = map_read_only(os.path.join(folder, segment_name(start_offset)))
            except FileNotFoundError:
                return None
            self._mappings[key] = mapping
            if len(self._mappings) > self._mappings_max:
                self._mappings.popitem(last=False)
            return mapping

    def drop(self, folder: str, start_offset: int) -> None:
        """Forget a mapping; whoever still reads from it keeps it."""
        with self._lock:
            self._mappings.pop((folder, start_offset), None)

    def clear(self) -> None:
        with self._lock:
            self._mappings.clear()


class SegmentFolder:
    """One folder of segments of `size_bytes`, as it is now."""

    def __init__(self, folder: str | os.PathLike[str], size_bytes: int, cache: MappingCache, advice: str = "") -> None:
        """`advice`: as list_segments."""
        self.folder = os.fspath(folder)
        self.size_bytes = size_bytes
        self._advice = advice
        self._cache = cache
        self._starts: list[int] = []
        self._inode_of: dict[int, int] = {}
        self._seen_ns: int | None = None

    def starts(self) -> list[int]:
        """Start offsets, ascending, listed again if the folder has changed. Not to be modified.

        Raises StoreRefusedError as list_segments does.
        """
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            changed_ns = -1
        if changed_ns != self._seen_ns:
            complete = self._list()
            settled = complete and time.time_ns() - changed_ns > _TICK_NS
            self._seen_ns = changed_ns if settled else None
        return self._starts

    def _list(self) -> bool:
        """List the folder; False when a file in it is just being made."""
        inode_of, complete = _inodes(self.folder, self.size_bytes, self._advice, self._inode_of)
        for start, inode in self._inode_of.items():
            if inode_of.get(start) != inode:
                self._cache.drop(self.folder, start)
        self._inode_of = inode_of
        self._starts = sorted(inode_of)
        return complete

    @property
    def min_offset(self) -> int:
        """Start of the first segment, -1 without any."""
        starts = self.starts()
        return starts[0] if starts else -1

    def start_of(self, offset: int) -> int | None:
        """The start of the listed segment that holds `offset`, or None."""
        starts = self._starts if self._seen_ns is not None else self.starts()
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset >= starts[at] + self.size_bytes:
            starts = self.starts()
            at = bisect_right(starts, offset) - 1
            if at < 0 or offset >= starts[at] + self.size_bytes:
                return None
        return starts[at]

    def view(self, start_offset: int) -> mmap.mmap | None:
        """The segment's bytes, None when it is gone."""
        return self._cache.get(self.folder, start_offset)

    def path(self, start_offset: int) -> str:
        """Where the segment is, or would be."""
        return os.path.join(self.folder, segment_name(start_offset))

    def modified_ms(self, start_offset: int) -> int | None:
        """The segment's modification time as Java's File.lastModified gives it; None when it is gone."""
        try:
            return os.stat(self.path(start_offset)).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None


def _inodes(
    folder: str | os.PathLike[str], size_bytes: int, advice: str, followed: dict[int, int] | None = None
) -> tuple[dict[int, int], bool]:
    """(start offset -> inode of every file, whether that is all). StoreRefusedError as list_segments.

    Who follows a folder gives what was found before: these files are not judged again, and
    an empty file that is younger than a second is left out, since someone is making it.
    """
    found: dict[int, int] = {}
    complete = True
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                start = parse_segment_name(entry.name)
                if start is None or not is_plain_file(entry):
                    raise StoreRefusedError(
                        f"{entry.path} does not belong there; move it away (RocketMQ refuses the store too)"
                    )
                inode = entry.inode()
                if followed is None or followed.get(start) != inode:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # deleted since the folder was read
                        continue
                    if followed is not None and status.st_size == 0 and _is_being_made(status):
                        complete = False
                        continue
                    _judge(entry.path, start, status.st_size, size_bytes, advice)
                found[start] = inode
    except FileNotFoundError:
        return {}, True
    except NotADirectoryError:
        raise StoreRefusedError(f"{folder} is a file where a folder of segments belongs; move it away") from None
    return found, complete


def _is_being_made(status: os.stat_result) -> bool:
    return time.time_ns() - status.st_ctime_ns < _BEING_MADE_NS


def _judge(path: str, start: int, length: int, size_bytes: int, advice: str) -> None:
    if length != size_bytes:
        raise StoreRefusedError(f"{path} has {length} bytes, not {size_bytes}, the size of its like{advice}")
    if start % size_bytes:
        raise StoreRefusedError(f"{path}: its name is no multiple of the size {size_bytes}")
