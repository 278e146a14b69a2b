"""The own log as a slave looks at it: bytes to compare with its master's, and borders between records.

Only what is surely whole is asked for: below the end that recovery found or the writer
committed. Mappings are kept; a segment that was deleted meanwhile is a CorruptionError.
"""

from __future__ import annotations

import os

from pyengine.errors import CorruptionError
from pyengine.formats.record import BEGIN
from pyengine.formats.record_case import CaseLabel
from pyengine.native.scan import walk
from pyengine.storage.log_files import open_log
from pyengine.storage.segment_files import MappingCache

_MAPPINGS_MAX = 4


class LocalLog:
    """The commit log of the store at `root`."""

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self._cache = MappingCache(_MAPPINGS_MAX)
        self._log = open_log(root, segment_bytes, self._cache)

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
        """Whether the byte lies in a blank behind its header, where anything may stand; `known` as in record_boundary."""
        start = self.record_boundary(offset, known if known <= offset else None)
        if start + BEGIN.size > offset:
            return False
        base, view = self._segment(offset)
        return walk(view, base, start, start + 1, check_crc=False, limit=base + self.segment_bytes).reason == CaseLabel.BLANK

    def close(self) -> None:
        self._cache.clear()

    def _segment(self, offset: int):
        base = self._log.start_of(offset)
        view = None if base is None else self._log.view(base)
        if view is None:
            raise CorruptionError(f"no segment of the log holds offset {offset}")
        return base, view
