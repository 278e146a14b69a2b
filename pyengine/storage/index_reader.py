"""Key look-up through the index files (RocketMQ's IndexService.queryOffset, IndexFile.selectPhyOffset)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pyengine.errors import FormatError, StoreRefusedError
from pyengine.formats.constants import INDEX_HEADER_BYTES
from pyengine.formats.index_file import IndexHeader, IndexLayout, unpack_entry, unpack_header, unpack_slot
from pyengine.formats.properties import index_key_hash
from pyengine.storage.folder_entries import is_plain_file
from pyengine.storage.segment_files import map_read_only


class IndexReader:
    """All index files of a store, oldest first by name."""

    def __init__(self, folder: str | os.PathLike[str], layout: IndexLayout) -> None:
        self._folder = Path(folder)
        self._layout = layout
        self._views: dict[tuple[str, int], object] = {}

    def select_offsets(
        self,
        topic: str,
        key: str,
        offsets_max: int,
        begin_ms: int,
        end_ms: int,
        accept: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """Physical offsets of messages with this key's hash, stored in [begin_ms, end_ms] as the index knows it.

        Newest file first, newest entry first, at most `offsets_max`; of those that
        `accept` takes, if it is given. The index holds no key text: a hash may be
        another key's. Times are whole seconds from the file's begin, so a message at
        the edge of the interval may be missed or found by up to a second.
        """
        key_hash = index_key_hash(topic, key)
        found: list[int] = []
        for _, view in reversed(self._files()):
            header = unpack_header(view)
            if _is_time_matched(header, begin_ms, end_ms):
                for offset in self._chain(view, header, key_hash, begin_ms, end_ms):
                    if accept is None or accept(offset):
                        found.append(offset)
                        if len(found) >= offsets_max:
                            return found
            if header.begin_timestamp_ms < begin_ms:
                break
        return found

    def headers(self) -> list[tuple[str, IndexHeader]]:
        """(file name, header) of each file."""
        return [(name, unpack_header(view)) for name, view in self._files()]

    def close(self) -> None:
        """Let go of the mappings."""
        self._views = {}

    def _chain(self, view, header: IndexHeader, key_hash: int, begin_ms: int, end_ms: int) -> Iterator[int]:
        layout = self._layout
        if header.index_count <= 1:
            return
        number = unpack_slot(view, layout.slot_at(layout.slot_of(key_hash)), header.index_count)
        for _ in range(header.index_count):  # a damaged chain may run in a circle
            if number == 0:
                return
            try:
                entry = unpack_entry(view, layout.entry_at(number))
            except FormatError:
                return
            if entry.time_diff_s < 0:
                return
            time_ms = header.begin_timestamp_ms + entry.time_diff_s * 1000
            if entry.key_hash == key_hash and begin_ms <= time_ms <= end_ms:
                yield entry.physical_offset
            if not 0 < entry.previous <= header.index_count or entry.previous == number or time_ms < begin_ms:
                return
            number = entry.previous

    def _has_bytes(self, entry: os.DirEntry[str]) -> bool:
        if (entry.name, entry.inode()) in self._views:
            return True
        try:
            return entry.stat().st_size > 0
        except FileNotFoundError:  # deleted since the folder was read
            return False

    def _files(self) -> list[tuple[str, object]]:
        """(name, mapping) of every index file; names that are no number are passed over, as RocketMQ does.

        Raises StoreRefusedError when a file with keys has not the layout's length: it
        would be read at the wrong places.
        """
        try:
            with os.scandir(self._folder) as entries:
                present = sorted((entry.name, entry.inode()) for entry in entries
                                 if _is_number(entry.name) and is_plain_file(entry) and self._has_bytes(entry))
        except (FileNotFoundError, NotADirectoryError):
            present = []
        views = {}
        files = []
        for key in present:
            view = self._views.get(key)
            if view is None:
                try:
                    view = map_read_only(self._folder / key[0])
                except FileNotFoundError:
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


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _is_time_matched(header: IndexHeader, begin_ms: int, end_ms: int) -> bool:
    """IndexFile.isTimeMatched: the file's interval and the asked one touch."""
    first, last = header.begin_timestamp_ms, header.end_timestamp_ms
    return (begin_ms < first and end_ms > last) or first <= begin_ms <= last or first <= end_ms <= last
