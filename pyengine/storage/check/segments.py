"""The log's segments as a whole-store check looks into them: up to the end that its walk has found."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pyengine.storage.mapped_file import MappedFile, map_read_only, mapped


class LogSegments:
    """The log's segments up to its end, one mapped at a time."""

    def __init__(self, segments: Sequence[MappedFile], size_bytes: int) -> None:
        self.segments = list(segments)
        self.size_bytes = size_bytes
        self.end = 0
        self.whole: list[tuple[MappedFile, int, int]] = []  # what was walked: [start, end) of a segment
        self.lost: list[tuple[int, int]] = []  # [start, end) below the end where no whole record is
        self._mapped: tuple[int, mmap.mmap] | None = None
        self._starts = {segment.start_offset: segment for segment in self.segments}

    @property
    def min_offset(self) -> int:
        return self.segments[0].start_offset if self.segments else 0

    def view_at(self, offset: int) -> tuple[int, int, mmap.mmap] | None:
        """(start, limit, bytes) of the segment that holds `offset`, None outside the log; limit is not beyond the end."""
        start = offset - offset % self.size_bytes
        if start not in self._starts or not 0 <= offset < self.end:
            return None
        if self._mapped is None or self._mapped[0] != start:
            self.close()
            self._mapped = start, map_read_only(self._starts[start].path)
        return start, min(self.end, start + self.size_bytes), self._mapped[1]

    def ranges(self, start: int) -> Iterator[tuple[int, int, int, mmap.mmap]]:
        """(base, from, to, bytes) for each walked part of [start, end)."""
        for segment, first, last in self.whole:
            if max(start, first) < last:
                with mapped(segment.path) as view:
                    yield segment.start_offset, max(start, first), last, view

    def is_lost(self, offset: int) -> bool:
        """True where the walk has found no whole record."""
        at = bisect_right(self.lost, offset, key=lambda lost: lost[0]) - 1
        return at >= 0 and offset < self.lost[at][1]

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped[1].close()
            self._mapped = None
