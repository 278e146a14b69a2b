"""IndexService: find messages by key in the index files, open the files for the process that puts keys, find their layout.

The number of slots and entries of an index file is derived from its own bytes. Its length gives one
equation for two numbers; its content decides: the used slots come before entry 1, their count is
in the header, and the slot of every entry (hash mod slots) names one that belongs to it. In each
golden store with an index exactly one pair fits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pyengine.arguments import INT32_MAX, INT64_MAX
from pyengine.errors import FormatError, StoreRefusedError, disk_error, disk_errors
from pyengine.formats.constants import INDEX_ENTRY_BYTES, INDEX_HEADER_BYTES, INDEX_SLOT_BYTES
from pyengine.formats.index_file import SLOT, IndexHeader, IndexLayout, unpack_entry, unpack_header, unpack_slot
from pyengine.formats.paths import Root, StorePaths, is_index_name
from pyengine.formats.record import Message, index_key_hash, index_keys
from pyengine.formats.small_file import closed_on_error
from pyengine.native.dispatch import ALL_KEYS, INDEX_WINDOW_BYTES, IndexFile
from pyengine.native.failpoints import failpoint
from pyengine.storage.durable_writes import create_file
from pyengine.storage.file_system import copies_on_write
from pyengine.storage.mapped_file import index_file_names, is_plain_file, map_read_only, refuse_file

if TYPE_CHECKING:
    from pyengine._native import ms_index_progress

_FILES_CHECKED = 3
_ENTRIES_CHECKED = 256
_ENTRIES_UNCHECKED = 256  # of a chain, between two calls of KeyQuery.check
_PAGE = bytes(4096)


def find_layout(files: Sequence[Path], wanted: IndexLayout) -> IndexLayout | None:
    """Return the layout of these index files (oldest first), or None if they do not tell it.

    `wanted`, from the settings, is tried first. None if the files have no keys: then only `wanted` can be right, if it has their length.
    """
    with_keys = []
    for path in files if len(files) <= _FILES_CHECKED else (files[0], files[len(files) // 2], files[-1]):
        view = _map_if_longer(path, INDEX_HEADER_BYTES)
        if view is not None and unpack_header(view).index_count > 1:
            with_keys.append(view)
    if not with_keys:
        return None
    if all(fits(view, wanted) for view in with_keys):
        return wanted
    for candidate in _candidates(with_keys[0]):
        if all(fits(view, candidate) for view in with_keys):
            return candidate
    return None


def fits(view: mmap.mmap, layout: IndexLayout) -> bool:
    """Whether the file has this layout's length and a sample of its entries matches the layout."""
    if len(view) != layout.size_bytes:
        return False
    header = unpack_header(view)
    if not 1 < header.index_count <= layout.max_index_num or header.hash_slot_count > layout.max_hash_slot_num:
        return False
    numbers = range(1, header.index_count, max(1, (header.index_count - 1) // _ENTRIES_CHECKED))
    try:
        return (unpack_entry(view, layout.entry_at(1)).physical_offset == header.begin_physical_offset
                and unpack_entry(view, layout.entry_at(header.index_count - 1)).physical_offset == header.end_physical_offset
                and all(_slot_fits(view, layout, header, number) for number in numbers))
    except FormatError:
        return False


def _slot_fits(view: mmap.mmap, layout: IndexLayout, header: IndexHeader, number: int) -> bool:
    """Whether the slot of entry `number` names it or a newer entry, and that belongs to the slot."""
    slot = layout.slot_of(unpack_entry(view, layout.entry_at(number)).key_hash)
    (newest,) = SLOT.unpack_from(view, layout.slot_at(slot))
    return number <= newest < header.index_count and layout.slot_of(unpack_entry(view, layout.entry_at(newest)).key_hash) == slot


def _candidates(view: mmap.mmap) -> Iterator[IndexLayout]:
    """Yield layouts of this file's length with all used slots before entry 1, those nearest to the first entry's bytes first.

    The length determines the slots modulo 5, and a used entry 1 (20 bytes, the size of five slots) has a non-zero byte, unless all of it
    is 0: except in that case the first candidate is right.
    """
    header = unpack_header(view)
    words, rest = divmod(len(view) - INDEX_HEADER_BYTES, INDEX_SLOT_BYTES)
    if rest or header.hash_slot_count < 1:
        return
    per_entry = INDEX_ENTRY_BYTES // INDEX_SLOT_BYTES
    used = _used_words(view)
    last_slot, entry_word = next(islice(used, header.hash_slot_count - 1, None), None), next(used, None)
    if last_slot is None or entry_word is None:
        return
    # Entry 1 is `per_entry` words after the slots (entry 0 is never used).
    slots = entry_word - per_entry
    slots -= (slots - words) % per_entry
    while slots > last_slot:
        entries = (words - slots) // per_entry
        if entries >= 2:
            yield IndexLayout(slots, entries)
        slots -= per_entry


def _used_words(view: mmap.mmap) -> Iterator[int]:
    """Yield the numbers of the non-zero 4-byte words after the header. Zero pages are skipped quickly."""
    for start in range(INDEX_HEADER_BYTES, len(view), len(_PAGE)):
        page = view[start : start + len(_PAGE)]
        if page == _PAGE[: len(page)]:
            continue
        first_word = (start - INDEX_HEADER_BYTES) // INDEX_SLOT_BYTES
        whole = len(page) // INDEX_SLOT_BYTES * INDEX_SLOT_BYTES
        for number, (value,) in enumerate(SLOT.iter_unpack(page[:whole])):
            if value:
                yield first_word + number


def _map_if_longer(path: Path, size_bytes: int) -> mmap.mmap | None:
    """Map a file of more than `size_bytes`; None if it is shorter or was deleted. A broker gives a new file its length later."""
    try:
        return map_read_only(path) if path.stat().st_size > size_bytes else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(error, "read", path) from error


def list_index_files(root: Root) -> list[Path]:
    """Return the index files, oldest first; other names are ignored, as in RocketMQ. StoreRefusedError if `index` is no folder."""
    folder = StorePaths(root).index
    refuse_file(folder)
    return [folder / name for name in index_file_names(folder)]


def read_index_header(file: Path) -> IndexHeader:
    """Return the header of an index file of any length; FormatError if it is too short for one."""
    with open(file, "rb") as opened, disk_errors("read", file):
        return unpack_header(opened.read(INDEX_HEADER_BYTES))


def is_plausible(header: IndexHeader, layout: IndexLayout) -> bool:
    """Whether counts and offsets are possible ones. Times may decrease, since RocketMQ uses the wall clock."""
    return (
        0 <= header.begin_physical_offset <= header.end_physical_offset
        and 0 <= header.hash_slot_count < max(header.index_count, 1)
        and header.index_count <= layout.max_index_num
    )


class KeyQuery(NamedTuple):
    """The question to the index: a key of a topic, and the store times, both included, of at most `messages_max` messages.

    The index has times in whole seconds after the first one of its file. `is_exact`: an entry is a hit if its message may have been
    stored between the times, which the caller then compares; otherwise RocketMQ's rule holds, which misses messages of the first
    second, and the first message of a file. `check` is called again and again meanwhile; an error that it raises ends the query.
    """

    topic: str
    key: str
    messages_max: int
    begin_ms: int = 0
    end_ms: int = INT64_MAX
    is_exact: bool = False
    check: Callable[[], object] = lambda: None


class IndexService:
    """All index files of a store, oldest first by name."""

    def __init__(self, folder: str | os.PathLike[str], layout: IndexLayout) -> None:
        self._folder = Path(folder)
        self._layout = layout
        self._views: dict[tuple[str, int], mmap.mmap] = {}

    def hits(self, query: KeyQuery) -> Iterator[int]:
        """Yield the physical offsets of all messages with this key's hash and store time, by the index, the newest entry first.

        The index has no key text: a hash may be another key's.
        """
        begin_ms, end_ms = query.begin_ms, query.end_ms
        for _, view in reversed(self._files()):
            header = unpack_header(view)
            first_ms, last_ms = header.begin_timestamp_ms, header.end_timestamp_ms
            # IndexFile.isTimeMatched
            if (begin_ms < first_ms and end_ms > last_ms) or first_ms <= begin_ms <= last_ms or first_ms <= end_ms <= last_ms:
                yield from self._chain(view, header, query)
            if first_ms < begin_ms:
                return

    def headers(self) -> list[tuple[str, IndexHeader]]:
        """Return (file name, header) of each file."""
        return [(name, unpack_header(view)) for name, view in self._files()]

    def close(self) -> None:
        """Close the mappings."""
        self._views = {}

    def _chain(self, view: mmap.mmap, header: IndexHeader, query: KeyQuery) -> Iterator[int]:
        layout, key_hash = self._layout, index_key_hash(query.topic, query.key)
        if header.index_count <= 1:
            return
        number = unpack_slot(view, layout.slot_at(layout.slot_of(key_hash)), header.index_count)
        for count in range(header.index_count):  # a damaged chain may be circular
            if number == 0:
                return
            if count % _ENTRIES_UNCHECKED == 0:
                query.check()
            try:
                entry = unpack_entry(view, layout.entry_at(number))
            except FormatError:
                return
            if entry.time_diff_s < 0:
                return
            time_ms = last_ms = header.begin_timestamp_ms + entry.time_diff_s * 1000
            if query.is_exact:
                if number == 1 or entry.time_diff_s == 0:  # entry 1 counts from the file before; 0 stands for earlier times too
                    time_ms = 0
                last_ms += INT64_MAX if entry.time_diff_s == INT32_MAX else 999
            if entry.key_hash == key_hash and query.begin_ms <= last_ms and time_ms <= query.end_ms:
                yield entry.physical_offset
            if not 0 < entry.previous <= header.index_count or entry.previous == number or last_ms < query.begin_ms:
                return
            number = entry.previous

    def _files(self) -> list[tuple[str, mmap.mmap]]:
        """Return (name, mapping) of every index file; other names are ignored, as in RocketMQ.

        Raises StoreRefusedError when a file with keys does not have the layout's length: it
        would be read at wrong positions.
        """
        present: list[tuple[str, int]] = []
        folder = self._folder
        with disk_errors("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            present = sorted((entry.name, entry.inode()) for entry in entries if is_index_name(entry.name) and is_plain_file(entry))
        views = {}
        files = []
        for key in present:
            view = self._views.get(key) or _map_if_longer(self._folder / key[0], 0)
            if view is None:
                continue
            views[key] = view
            if len(view) == self._layout.size_bytes:
                files.append((key[0], view))
            elif len(view) >= INDEX_HEADER_BYTES and unpack_header(view).index_count > 1:
                raise StoreRefusedError(
                    f"{self._folder / key[0]} has {len(view)} bytes; with max_hash_slot_num="
                    f"{self._layout.max_hash_slot_num} and max_index_num={self._layout.max_index_num} it would have "
                    f"{self._layout.size_bytes}: set the numbers it was made with"
                )
        self._views = views
        return files


MessageAt = Callable[[int], Message | None]

RAW_HITS_MAX = 64  # maxMsgsNumBatch


def query_verified(index: IndexService, message_at: MessageAt, query: KeyQuery, bytes_max: int | None = None) -> list[Message]:
    """Return the newest messages of the topic with the key, each once, oldest first; it stops once they have `bytes_max`."""
    found: dict[int, Message] = {}
    size_bytes, last = 0, -1
    for offset in index.hits(query._replace(is_exact=True)):
        if offset == last:  # each of a message's keys may have the hash
            continue
        last = offset
        query.check()
        message = None if offset in found else message_at(offset)
        if (message is None or message.topic != query.topic or query.key not in index_keys(message.properties)
                or not query.begin_ms <= message.store_timestamp_ms <= query.end_ms):
            continue
        found[offset] = message
        size_bytes += message.size_bytes
        if len(found) == query.messages_max or bytes_max is not None and size_bytes >= bytes_max:
            break
    return [found[offset] for offset in sorted(found)]


def query_raw(index: IndexService, message_at: MessageAt, query: KeyQuery) -> list[Message]:
    """Return the result of DefaultMessageStore.queryMessage, by offset: at most 64 hits by hash, with those of other keys of the same
    hash, and one for each entry.

    RocketMQ asks up to three times if no entry leads to an existing message, but each time the same.
    """
    offsets = sorted(islice(index.hits(query), min(query.messages_max, RAW_HITS_MAX)))
    return [message for offset in offsets if (message := message_at(offset)) is not None]


_T = TypeVar("_T")


class IndexFiles:
    """Index files of one layout in one folder. Only one process at a time may have such an object."""

    def __init__(self, folder: Path, layout: IndexLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._current: IndexFile | None = None
        self._mapping: mmap.mmap | None = None

    def open_newest(self, progress: ms_index_progress) -> tuple[IndexFile | None, tuple[int, int]]:
        """Undo an unfinished put that `progress` has, map the newest file, and find out what is indexed: the physical offset of the
        newest record that has keys in the index, -1 for none, and how many of its keys.

        Raises StoreRefusedError for a file of another length, DiskFullError when there is no space for a sparse file's blocks.
        """
        names = index_file_names(self._folder)
        if progress.putting:
            name = f"{progress.file_number:017d}"
            if name not in names or not self._with_file(name, lambda file: file.roll_back(progress)):
                progress.putting = 0  # the file of the unfinished put was deleted
        if not names:
            return None, (-1, 0)
        current = self._map(names[-1])
        header = current.header()
        if len(names) > 1 and header.index_count == 1 and header.end_physical_offset == 0:
            # A process created this file and was killed before it copied the end of the previous one into the header.
            current.inherit(self._with_file(names[-2], IndexFile.header))
        return current, self._indexed(names, current)

    def make_next(self) -> IndexFile:
        """Create the file after the current one, which is full (or does not exist), and make it the current one."""
        names = index_file_names(self._folder)
        predecessor = None if self._current is None else self._current.header()
        # RocketMQ's name, yyyyMMddHHmmssSSS; the next number for two files within one millisecond, and after the clock was set back.
        now = datetime.now()
        number = int(f"{now:%Y%m%d%H%M%S}{now.microsecond // 1000:03d}")
        name = f"{max(number, int(names[-1]) + 1 if names else 0):017d}"
        os.close(create_file(self._folder, name, self._layout.size_bytes, allocate=first_bytes(self._layout)))
        failpoint("index_file_made")
        current = self._map(name)
        if predecessor is not None:
            current.inherit(predecessor)
        return current

    def close(self) -> None:
        if self._current is not None and self._mapping is not None:
            self._current.release()
            self._mapping.close()
        self._current = self._mapping = None

    def _indexed(self, names: list[str], current: IndexFile) -> tuple[int, int]:
        """Find out what is indexed from the entries themselves, which are in the order of their records."""
        header = current.header()
        offset = current.newest_offset()
        if offset < 0:
            if header.end_physical_offset == 0:
                return -1, 0
            offset = header.end_physical_offset
            if len(names) == 1:  # the previous file was deleted, which was full
                return offset, ALL_KEYS
        elif header.end_physical_offset > offset:
            return header.end_physical_offset, 0
        keys = 0
        for name in reversed(names):  # the keys of one record may fill several small files
            found, entries = self._with_file(name, lambda file: (file.count_tail(offset), file.header().index_count - 1))
            keys += found
            if found < entries:
                break
        return offset, keys

    def _with_file(self, name: str, what: Callable[[IndexFile], _T]) -> _T:
        mapping, file = map_index_file(self._folder / name, int(name), self._layout)
        try:
            return what(file)
        finally:
            file.release()
            mapping.close()

    def _map(self, name: str) -> IndexFile:
        self.close()
        self._mapping, self._current = map_index_file(self._folder / name, int(name), self._layout, to_write=True)
        return self._current


def first_bytes(layout: IndexLayout) -> int:
    """Return how many bytes of a new index file get blocks: its slots and a window of entries."""
    end = layout.entry_at(2)
    return min(end + -end % INDEX_WINDOW_BYTES, layout.size_bytes)


def map_index_file(path: Path, number: int, layout: IndexLayout, *, to_write: bool = False) -> tuple[mmap.mmap, IndexFile]:
    """Map the whole file, shared and writable; `to_write`: allocate blocks for its slots and entries, to put keys into it.

    On a file system that copies on write the file is written instead of stored to. Raises StoreRefusedError for another
    length, DiskFullError when a sparse file's blocks have no room, DiskError.
    """
    with disk_errors("open", path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    with closed_on_error(fd):
        length = os.fstat(fd).st_size
        if length != layout.size_bytes:
            raise StoreRefusedError(
                f"{path} has {length} bytes; {layout.max_hash_slot_num} slots and"
                f" {layout.max_index_num} entries need {layout.size_bytes}"
            )
        mapping = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        file = IndexFile(mapping, number, layout, fd, is_written=copies_on_write(fd))
        if to_write:
            file.allocate()  # these files are sparse: on a full disk a store into a hole would raise SIGBUS
        return mapping, file
