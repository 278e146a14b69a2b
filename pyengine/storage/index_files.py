"""The folder of index files, for whoever puts keys: the newest file, the next one, and what is in already."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

from pyengine.errors import DiskError, DiskFullError, StoreRefusedError, disk_errors
from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import allocate
from pyengine.native.index_file import ALL_KEYS, IndexMapping, forget, is_putting
from pyengine.storage.file_system import copies_on_write
from pyengine.storage.folder_entries import index_file_names
from pyengine.storage.new_file import create_file

_CREATE_TRIES = 16
_T = TypeVar("_T")


class Indexed(NamedTuple):
    """The newest record that has keys in the index, and how many of its keys are in."""

    physical_offset: int
    keys: int


NOTHING_INDEXED = Indexed(-1, 0)


class IndexFiles:
    """Index files of one layout in one folder. One process at a time may hold this object."""

    def __init__(self, folder: Path, layout: IndexLayout, *, now: Callable[[], datetime] = datetime.now) -> None:
        self._folder = folder
        self._layout = layout
        self._now = now
        self._current: IndexMapping | None = None
        self._mapping: mmap.mmap | None = None

    def names(self) -> list[str]:
        """Names of the index files, oldest first. Other names in the folder are passed over, as RocketMQ does."""
        try:
            return index_file_names(self._folder)
        except FileNotFoundError:
            return []

    def open_newest(self, progress) -> tuple[IndexMapping | None, Indexed]:
        """Map the newest file and tell what is indexed, after undoing a put that `progress` says was cut short.

        Raises StoreRefusedError for a file of another length, DiskFullError when a sparse file finds no room.
        """
        names = self.names()
        self._undo(names, progress)
        if not names:
            return None, NOTHING_INDEXED
        current = self._map(names[-1])
        header = current.header()
        if len(names) > 1 and header.index_count == 1 and header.end_physical_offset == 0:
            # Made, but killed before it took over the end of its predecessor.
            current.inherit(self._look(names[-2], IndexMapping.header))
        return current, self._indexed(names, current)

    def make_next(self) -> IndexMapping:
        """A new file behind the current one, which is full (or there is none); becomes the current one."""
        names = self.names()
        predecessor: IndexHeader | None = None
        if self._current is not None:
            predecessor = self._current.header()
        name = self._create(int(names[-1]) if names else None)
        failpoint("index_file_made")
        current = self._map(name)
        if predecessor is not None:
            current.inherit(predecessor)
        return current

    def next_names(self, count: int) -> list[str]:
        """Names for so many files behind the newest one, for somebody else to make."""
        names = self.names()
        number = int(names[-1]) if names else None
        found = []
        for _ in range(count):
            number = next_index_number(number, self._now())
            found.append(f"{number:017d}")
        return found

    def close(self) -> None:
        if self._current is not None and self._mapping is not None:
            self._current.release()
            self._mapping.close()
        self._current = self._mapping = None

    def _indexed(self, names: list[str], current: IndexMapping) -> Indexed:
        """Read off the entries themselves: they stand in the order of their records."""
        header = current.header()
        offset = current.newest_offset()
        if offset < 0:
            if header.end_physical_offset == 0:
                return NOTHING_INDEXED
            offset = header.end_physical_offset
            if len(names) == 1:  # its predecessor was deleted, full and whole
                return Indexed(offset, ALL_KEYS)
        elif header.end_physical_offset > offset:
            return Indexed(header.end_physical_offset, 0)
        keys = 0
        for name in reversed(names):  # one record's keys may fill several small files
            found, entries = self._look(name, lambda file: (file.count_tail(offset), file.header().index_count - 1))
            keys += found
            if found < entries:
                break
        return Indexed(offset, keys)

    def _undo(self, names: list[str], progress) -> None:
        if is_putting(progress):
            name = f"{progress.file_number:017d}"
            if name not in names or not self._look(name, lambda file: file.roll_back(progress)):
                forget(progress)  # that file is gone, and its entries with it

    def _look(self, name: str, what: Callable[[IndexMapping], _T]) -> _T:
        mapping, written_to = self._open(name)
        file = IndexMapping(mapping, int(name), self._layout, written_to)
        try:
            return what(file)
        finally:
            file.release()
            mapping.close()

    def _map(self, name: str) -> IndexMapping:
        self.close()
        self._mapping, written_to = self._open(name, to_write=True)
        self._current = IndexMapping(self._mapping, int(name), self._layout, written_to)
        return self._current

    def _open(self, name: str, *, to_write: bool = False) -> tuple[mmap.mmap, int | None]:
        return map_index_file(self._folder / name, self._layout, to_write=to_write)

    def _create(self, previous: int | None) -> str:
        for _ in range(_CREATE_TRIES):
            number = next_index_number(previous, self._now())
            name = f"{number:017d}"
            try:
                os.close(create_file(self._folder, name, self._layout.size_bytes, allocate="full"))
                return name
            except DiskFullError:
                raise
            except DiskError as error:
                if error.errno != errno.EEXIST:
                    raise
                previous = number
        raise DiskError(f"every name for a new index file in {self._folder} is taken", path=str(self._folder))


def map_index_file(path: Path, layout: IndexLayout, *, to_write: bool = False) -> tuple[mmap.mmap, int | None]:
    """The whole file, shared and writable, and where its disk copies on write a descriptor: it is to be written, not
    stored into. Raises StoreRefusedError for another length, DiskError."""
    with disk_errors("open", path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        length = os.fstat(fd).st_size
        if length != layout.size_bytes:
            raise StoreRefusedError(
                f"{path} has {length} bytes; {layout.max_hash_slot_num} slots and"
                f" {layout.max_index_num} entries need {layout.size_bytes}"
            )
        if to_write:
            # RocketMQ's files are sparse: a store into a hole of a full disk would be a SIGBUS.
            allocate(fd, 0, length, str(path))
        mapping = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        return mapping, os.dup(fd) if copies_on_write(fd) else None
    finally:
        os.close(fd)


def next_index_number(previous: int | None, now: datetime) -> int:
    """The number yyyyMMddHHmmssSSS of `now`, or the next millisecond after `previous` if the clock is not past it.

    Two files within one millisecond, or a clock that was set back, must not break the order of names.
    """
    number = _as_number(now)
    if previous is None or number > previous:
        return number
    try:
        seconds, milliseconds = divmod(previous, 1000)
        last = datetime.strptime(f"{seconds:014d}", "%Y%m%d%H%M%S") + timedelta(milliseconds=milliseconds)
        return _as_number(last + timedelta(milliseconds=1))
    except (ValueError, OverflowError):  # digits that are no time
        return previous + 1


def _as_number(time: datetime) -> int:
    return int(f"{time:%Y%m%d%H%M%S}{time.microsecond // 1000:03d}")
