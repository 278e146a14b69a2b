"""One queue's entries, read from its files (RocketMQ's ConsumeQueue, the reading half)."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_FILLER_SIZE
from pyengine.formats.consume_queue import ENTRY, ConsumeQueueEntry, ConsumeQueueExtUnit, decode_ext_address, unpack_ext_unit
from pyengine.storage.segment_files import MappingCache, SegmentFolder


class QueueReader:
    """The queue `topic`-`queue_id`. Offsets are entry numbers; positions are bytes of one file.

    Entries stand in the order of their physical offsets behind possible filler, and zeros
    end them, so every bound is found by halving. Entries that reach beyond a limit do not
    exist for the reader.
    """

    def __init__(
        self,
        topic: str,
        queue_id: int,
        folder: str | os.PathLike[str],
        ext_folder: str | os.PathLike[str],
        size_bytes: int,
        ext_size_bytes: int,
        cache: MappingCache,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.files = SegmentFolder(folder, size_bytes, cache)
        self.entries_per_file = size_bytes // CQ_ENTRY_BYTES
        self._max_hint = (-1, 1)  # (file, entries in it): the last max_offset
        self._ext = SegmentFolder(ext_folder, ext_size_bytes, cache)

    def max_offset(self, limit: int) -> int:
        """One behind the last entry whose message ends at or below `limit`; 0 for an empty queue."""

        def is_outside(entry: tuple[int, int, int]) -> bool:
            offset, size_bytes, _ = entry
            if size_bytes == CQ_FILLER_SIZE and offset == 0:
                return False
            return size_bytes <= 0 or offset < 0 or offset + size_bytes > limit

        for start in reversed(self.files.starts()):
            view = self.files.view(start)
            if view is None or is_outside(ENTRY.unpack_from(view)):
                continue
            count = self._max_hint[1] if self._max_hint[0] == start else 1
            if is_outside(ENTRY.unpack_from(view, (count - 1) * CQ_ENTRY_BYTES)):
                count = 1  # another limit than last time, or entries were cut
            if count < self.entries_per_file and not is_outside(ENTRY.unpack_from(view, count * CQ_ENTRY_BYTES)):
                count = self._first(view, count + 1, self.entries_per_file, is_outside)
            self._max_hint = (start, count)
            return start // CQ_ENTRY_BYTES + count
        return 0

    def min_offset(self, log_min_offset: int, max_offset: int) -> int:
        """The first entry whose message is still in the log, filler passed over; `max_offset` when all are gone."""

        def is_there(entry: tuple[int, int, int]) -> bool:
            offset, size_bytes, _ = entry
            return offset >= log_min_offset and not (offset == 0 and size_bytes == CQ_FILLER_SIZE)

        for start in self.files.starts():
            view = self.files.view(start)
            first = start // CQ_ENTRY_BYTES
            count = min(self.entries_per_file, max_offset - first)
            if view is None or count <= 0:
                continue
            at = 0 if is_there(ENTRY.unpack_from(view)) else self._first(view, 1, count, is_there)
            if at < count:
                return first + at
        return max_offset

    def min_offset_at_load(self, log_min_offset: int, max_offset: int) -> int:
        """What RocketMQ reports after loading (ConsumeQueue.correctMinOffset).

        It looks at the first file only, and 0 remains when no entry of it has a message in
        the log; where the log starts at 0, filler counts as an entry.
        """
        starts = self.files.starts()
        view = self.files.view(starts[0]) if starts else None
        if view is None:
            return 0
        first = starts[0] // CQ_ENTRY_BYTES
        count = max(0, min(self.entries_per_file, max_offset - first))
        at = self._first(view, 0, count, lambda entry: entry[0] >= log_min_offset)
        return first + at if at < count else 0

    def span(self, offset: int, max_offset: int) -> tuple[mmap.mmap, int, int] | None:
        """(file, position of entry `offset`, position behind the file's last readable entry), None without the file."""
        start = self.files.start_of(offset * CQ_ENTRY_BYTES)
        view = None if start is None else self.files.view(start)
        if start is None or view is None:
            return None
        return view, offset * CQ_ENTRY_BYTES - start, min(self.files.size_bytes, max_offset * CQ_ENTRY_BYTES - start)

    def next_file_offset(self, offset: int) -> int:
        """The first entry of the file behind the one that holds `offset` (ConsumeQueue.rollNextFile)."""
        return offset + self.entries_per_file - offset % self.entries_per_file

    def entry(self, offset: int, max_offset: int) -> ConsumeQueueEntry | None:
        """One entry, None when it is not there."""
        span = self.span(offset, max_offset) if 0 <= offset < max_offset else None
        return None if span is None else ConsumeQueueEntry._make(ENTRY.unpack_from(span[0], span[1]))

    def ext_unit(self, tags_code: int) -> ConsumeQueueExtUnit | None:
        """The extension unit that a tags code names, None when it is not there."""
        offset = decode_ext_address(tags_code)
        start = self._ext.start_of(offset)
        view = None if start is None else self._ext.view(start)
        if start is None or view is None:
            return None
        try:
            return unpack_ext_unit(view, offset - start)
        except FormatError:
            return None

    @staticmethod
    def _first(view: mmap.mmap, low: int, high: int, is_it: Callable[[tuple[int, int, int]], bool]) -> int:
        """The first entry of the file in [low, high) for which `is_it` holds, as for all behind it; else `high`."""

        def holds(number: int) -> bool:
            return is_it(ENTRY.unpack_from(view, number * CQ_ENTRY_BYTES))

        return bisect_left(range(high), True, lo=low, key=holds)
