"""Mapped files: folders of 20-digit files, read-only mappings that survive a deletion, and the used ranges of files.

A `MappedFileQueue` follows a folder in which other processes create and delete files: it lists the folder again only if the folder's time
has changed, and drops the mapping of a file that was deleted or replaced. The last reference unmaps it.

Zeros are written and searched by file ranges: holes are skipped without a read, since a queue file is mostly a hole. Writes of zeros keep
the file's time, by which RocketMQ finds a queue file (MappedFileQueue.getMappedFileByTime).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pyengine import arguments
from pyengine.errors import DiskError, StoreRefusedError, disk_error
from pyengine.formats.paths import is_index_name, is_queue_id_name, parse_segment_name, segment_name
from pyengine.formats.record import I64, PHYSICAL_OFFSET_AT
from pyengine.formats.small_file import opened
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import renew
from pyengine.storage.durable_writes import open_file, pwrite_all, sync_descriptor
from pyengine.storage.file_system import refuse_link

_MISSING_ERRNOS = (errno.ELOOP, errno.ENOENT, errno.ENOTDIR)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder, or a link to one. OSError if that is unknown now; DiskError as of refuse_link()."""
    return _is_kind(entry, entry.is_dir)


def is_plain_file(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a regular file, or a link to one. Errors as of is_folder()."""
    return _is_kind(entry, entry.is_file)


def _is_kind(entry: os.DirEntry[str], check: Callable[[], bool]) -> bool:
    try:
        if entry.is_symlink():
            refuse_link(entry.stat(follow_symlinks=False), entry.path)
        return check()
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return False
        raise


def refuse_file(folder: Path) -> None:
    """Raise StoreRefusedError for a file in the folder's place, and for a link without a target: a disk that is not mounted."""
    if folder.exists():
        if not folder.is_dir():
            raise StoreRefusedError(f"{folder} is a file where a folder belongs; move it away")
    elif folder.is_symlink():
        raise StoreRefusedError(f"{folder} is a link to {os.readlink(folder)}, which does not exist; mount its disk or make that folder")


def index_file_names(folder: Path | str) -> list[str]:
    """Return the names of the index files, sorted; other names are ignored, as in RocketMQ. Empty without a folder. DiskError."""
    return _names(folder, lambda entry: is_index_name(entry.name) and is_plain_file(entry))


def folder_names(folder: Path | str) -> list[str]:
    """Return the names of the folders in a folder, sorted; empty without a folder. DiskError."""
    return _names(folder, is_folder)


def queue_folders(queues: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield (topic, queue id, folder) of every queue in `consumequeue` or `consumequeue_ext`; foreign names are ignored."""
    for topic in folder_names(queues):
        folder = queues / topic
        for name in folder_names(folder):
            if is_queue_id_name(name):
                yield topic, int(name), folder / name


def _names(folder: Path | str, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if is_wanted(entry))
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(folder):  # a link's target may be on a disk that is not mounted
            return []
        raise disk_error(error, "list", folder) from error


# Folder times have the granularity of the kernel's clock tick. A listing made within
# this time of the folder's last change may have missed a second change of the same tick.
_TICK_NS = 50_000_000
# A broker creates a file first and then sets its length; this engine links complete files.
CREATION_GRACE_NS = 1_000_000_000
MAPPINGS_MAX = 256


class MappedFile(NamedTuple):
    """One file of the folder; its length is the segment size."""

    path: Path
    start_offset: int


def list_segments(folder: str | os.PathLike[str], size_bytes: int, advice: str = "") -> list[MappedFile]:
    """Return the folder's segments in order; empty if there is no folder.

    Raises StoreRefusedError if the folder has other files, a length differs from
    `size_bytes`, or a name is not a multiple of it: RocketMQ would refuse the whole store
    (MappedFileQueue.load) or compute wrong offsets. `advice` is the end of the message about a wrong length.
    """
    found, _ = list_inodes(folder, size_bytes, advice)
    path = folder if isinstance(folder, Path) else Path(folder)
    return [MappedFile(path / segment_name(start), start) for start in sorted(found)]


def map_read_only(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map the whole file, read-only and shared. Raises FileNotFoundError, or DiskError when it cannot be mapped."""
    try:
        with opened(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:  # a pipe of that name is not waited for
            return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None) or 0
        advice = ("; raise this process's limit (ulimit -v; of Spark spark.executor.pyspark.memory and "
                  "spark.sql.planner.pythonExecution.memory), or read by Spark's option fileSystem=arrow" if number == errno.ENOMEM else "")
        raise DiskError(f"cannot map {path}: {error}{advice}", errno=number, path=str(path)) from error


@contextlib.contextmanager
def mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap]:
    """Map the whole file, read-only, inside the block.

    An exception that ends the block reaches the caller unchanged. Its frames may still have views of the mapping, which
    cannot be closed then (BufferError); it is unmapped with the last view.
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
    """The mappings of a reader, of all folders together: at most MAPPINGS_MAX, as each has a descriptor; the least recently used goes."""

    def __init__(self, mappings_max: int = MAPPINGS_MAX) -> None:
        self._mappings: OrderedDict[tuple[str, int], mmap.mmap] = OrderedDict()
        self._mappings_max = mappings_max
        self._lock = arguments.inherited_lock()  # a signal handler in a thread that has it may read

    def get(self, folder: str, start_offset: int) -> mmap.mmap | None:
        """Return the segment's mapping, which is made if necessary; None if the file does not exist any more."""
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
        """Drop a mapping; it stays valid for readers that still use it."""
        with self._lock:
            self._mappings.pop((folder, start_offset), None)

    def clear(self) -> None:
        with self._lock:
            self._mappings.clear()


class MappedFileQueue:
    """One folder of segments of `size_bytes`, which it follows."""

    is_mapped = True

    def __init__(self, folder: str | os.PathLike[str], size_bytes: int, cache: MappingCache, advice: str = "") -> None:
        """`advice`: as for list_segments."""
        self.folder = os.fspath(folder)
        self.size_bytes = size_bytes
        self._advice = advice
        self._cache = cache
        self._starts: list[int] = []
        self._inode_of: dict[int, int] = {}
        self._seen_ns: int | None = None
        self._first_seen = -1, 0  # the folder's time at the last listing, and when a listing first met it

    def starts(self) -> list[int]:
        """Return the start offsets, ascending, listed again if the folder has changed. Do not modify the list.

        Raises StoreRefusedError as list_segments does, but not for a name of no segment that came after the first segments were listed.
        """
        try:
            changed_ns = os.stat(self.folder).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            changed_ns = -1
        except OSError as error:
            raise disk_error(error, "list", self.folder) from error
        if changed_ns != self._seen_ns:
            now_ns = time.monotonic_ns()
            if changed_ns != self._first_seen[0]:  # a time ahead of the clock never becomes old, but has been there for a while
                self._first_seen = changed_ns, now_ns
            complete = self._list()
            settled = complete and max(time.time_ns() - changed_ns, now_ns - self._first_seen[1]) > _TICK_NS
            self._seen_ns = changed_ns if settled else None
        return self._starts

    def _list(self) -> bool:
        """List the folder; False if another process is just creating a file in it."""
        inode_of, complete = list_inodes(self.folder, self.size_bytes, self._advice, self._inode_of)
        for start, inode in self._inode_of.items():
            if inode_of.get(start) != inode:
                self._cache.drop(self.folder, start)
        self._inode_of = inode_of
        self._starts = sorted(inode_of)
        return complete

    @property
    def min_offset(self) -> int:
        """Return the start of the first segment, -1 if there is none."""
        starts = self.starts()
        return starts[0] if starts else -1

    def start_of(self, offset: int) -> int | None:
        """Return the start of the listed segment that contains `offset`, or None."""
        starts = self._starts if self._seen_ns is not None else self.starts()
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset >= starts[at] + self.size_bytes:
            starts = self.starts()
            at = bisect_right(starts, offset) - 1
            if at < 0 or offset >= starts[at] + self.size_bytes:
                return None
        return starts[at]

    def has_listed(self, start_offset: int) -> bool:
        """Whether the segment was there at the last listing."""
        return start_offset in self._inode_of

    def folder_of(self, start_offset: int) -> str:
        """Return the folder of the segment, whether or not it exists."""
        return self.folder

    def view(self, start_offset: int) -> mmap.mmap | None:
        """Return the segment's bytes, None if it does not exist any more."""
        return self._cache.get(self.folder_of(start_offset), start_offset)

    def path(self, start_offset: int) -> str:
        """Return the path of the segment, whether or not it exists."""
        return os.path.join(self.folder_of(start_offset), segment_name(start_offset))

    def modified_ms(self, start_offset: int) -> int | None:
        """Return the segment's modification time as Java's File.lastModified does; None if it does not exist any more."""
        try:
            return os.stat(self.path(start_offset)).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_error(error, "read", self.path(start_offset)) from error


def list_inodes(
    folder: str | os.PathLike[str], size_bytes: int, advice: str, followed: dict[int, int] | None = None
) -> tuple[dict[int, int], bool]:
    """Return (start offset -> inode of every file, whether the list is complete). StoreRefusedError as list_segments.

    The follower of a folder passes its last result: those files are not checked again, an empty file that is younger than a second
    is left out, since another process is creating it, and so is what came later and has no segment's name, as for a broker.
    """
    found: dict[int, int] = {}
    complete = True
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                start = parse_segment_name(entry.name)
                if start is None and followed:
                    continue
                if start is None or not is_plain_file(entry):
                    if start is not None and not os.path.lexists(entry.path):  # deleted since the folder was read
                        continue
                    raise StoreRefusedError(
                        f"{entry.path} does not belong there; move it away (RocketMQ refuses the store too)"
                    )
                inode = entry.inode()
                if followed is None or followed.get(start) != inode:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # deleted since the folder was read
                        continue
                    is_young = time.time_ns() - status.st_ctime_ns < CREATION_GRACE_NS
                    if followed is not None and status.st_size == 0 and is_young:
                        complete = False
                        continue
                    if status.st_size != size_bytes:
                        raise StoreRefusedError(
                            f"{entry.path} has {status.st_size} bytes, not {size_bytes}, the size of this folder's files{advice}")
                    if start % size_bytes:
                        raise StoreRefusedError(f"{entry.path}: its name is not a multiple of the size {size_bytes}")
                found[start] = inode
    except FileNotFoundError:
        refuse_file(Path(folder))
        return {}, True
    except NotADirectoryError:
        raise StoreRefusedError(f"{folder} is a file where a folder of segments belongs; move it away") from None
    except OSError as error:
        raise disk_error(error, "list", folder) from error
    return found, complete


_CHUNK_BYTES = 1 << 17
_ZERO_PAGE_BYTES = 4096
_RECORD_HEAD_BYTES = PHYSICAL_OFFSET_AT + I64.size  # by these bytes recovery knows a torn record
_NO_SEEK_DATA = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS))
_ZEROS = bytes(_CHUNK_BYTES)


def used_end(path: Path, start: int = 0) -> int:
    """Return the position after the file's last non-zero byte, or `start` if there is none from there on."""
    with opened(open_file(path, os.O_RDONLY)) as descriptor:
        end = start
        for position, chunk in data_chunks(descriptor, start):
            used = _used(chunk)
            if used:
                end = position + used
        return end


def clear_file_from(path: Path, start: int, *, zeros_too: bool = False) -> int:
    """Zero a file from byte `start` to its end, durably, without a change of its length and file time.

    Returns the number of bytes up to the last non-zero one. Holes remain, and pages that
    are zero already are not written, unless `zeros_too`: after a failed sync a
    page may be zero in memory and not on the disk. May be repeated: a crash leaves the bytes from `start` to the end of their
    page as they were, or clears all. A record's head that is in two pages is cleared in one write, which only a power cut can divide.
    """
    with opened(open_file(path, os.O_RDWR)) as descriptor:
        status = os.fstat(descriptor)
        end, pages = start, list[tuple[int, int]]()
        for position, chunk in data_chunks(descriptor, start):
            used = _used(chunk)
            end = position + used if used else end
            at, stop = 0, len(chunk) if zeros_too else used
            while at < stop:
                head_end = position + at + _RECORD_HEAD_BYTES
                page = chunk[at : head_end + -head_end % _ZERO_PAGE_BYTES - position]
                if zeros_too or _used(page):
                    pages.append((position + at, len(page)))
                at += len(page)
        for at, count in reversed(pages):
            if len(pages) > 1 and at == pages[0][0]:  # the others are cleared first, also after a power cut
                sync_descriptor(descriptor, path)
            pwrite_all(descriptor, bytes(count), at, path)
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))  # at once, since a kill may follow
            failpoint("zeros_page_written")
        if pages:
            failpoint("zeros_written")
            sync_descriptor(descriptor, path)
        return end - start


def renew_zeros(path: Path, start: int) -> None:
    """Give the whole blocks of a file from byte `start` on, which hold zeros, new pages; blocks that no process has touched stay.

    It is for blocks whose write-back may have failed: ext4 takes a block for written then, although its extent stays unwritten, so that
    what is stored there later would read as zeros after a reboot (durable_writes.rewrite). Not synced; the file time stays.
    """
    with opened(open_file(path, os.O_RDWR)) as descriptor:
        status = os.fstat(descriptor)
        for position, end in _data_ranges(descriptor, start + -start % _ZERO_PAGE_BYTES):
            renew(descriptor, position, end - position, str(path))
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))


def data_chunks(descriptor: int, start: int) -> Iterator[tuple[int, bytearray]]:
    """Yield (position, bytes) of everything from `start` on that is not a hole, at most _CHUNK_BYTES at a time.

    The bytes are a buffer that the next step overwrites.
    """
    pieces = _data_ranges(descriptor, start)
    buffer = bytearray(min(_CHUNK_BYTES, max((end - position for position, end in pieces), default=0)))
    for position, end in pieces:
        while position < end:
            chunk = buffer if end - position >= len(buffer) else bytearray(end - position)
            count = os.preadv(descriptor, [chunk], position)
            if not count:
                return
            yield position, chunk if count == len(chunk) else chunk[:count]
            position += count


def _data_ranges(descriptor: int, start: int) -> list[tuple[int, int]]:
    """Return the ranges from `start` on that are not holes; allocated blocks that were never written count as holes.

    All ranges are found before the first is read: reading one caches pages after it, which
    the kernel would then report as data, and so on to the end of the file. If the file system
    does not report holes, the whole file is data.
    """
    ranges: list[tuple[int, int]] = []
    end = start
    while True:
        try:
            position = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, position, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return ranges
            if error.errno not in _NO_SEEK_DATA:
                raise
            return [*ranges, (end, os.fstat(descriptor).st_size)]
        ranges.append((position, end))


def _used(chunk: bytes | bytearray) -> int:
    """Return the length without the final zeros. If all bytes are zero, the comparison is ten times as fast as rstrip()."""
    zeros = _ZEROS if len(chunk) == _CHUNK_BYTES else bytes(len(chunk))
    return 0 if chunk == zeros else len(chunk.rstrip(b"\0"))
