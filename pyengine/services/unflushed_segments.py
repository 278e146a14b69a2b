"""Descriptors of the log segments that may hold unflushed bytes.

Opened as soon as a segment stands ready, before anything is written to it, and kept
until all of it is flushed: the kernel tells each open file of a failed write-back once,
and a descriptor opened after it may never hear of it.
"""

from __future__ import annotations

import os

from pyengine.errors import DiskError
from pyengine.formats.paths import StorePaths


class UnflushedSegments:
    """Open segments of [flushed, ready_end), by start offset."""

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int) -> None:
        self._paths = StorePaths(root)
        self.segment_bytes = segment_bytes
        self.descriptors: dict[int, int] = {}

    def path(self, start: int) -> str:
        return str(self._paths.commit_log_segment(start))

    def follow(self, flushed: int, ready_end: int) -> None:
        """Open what has become ready, close what is flushed. Cheap when nothing has changed."""
        for start in [start for start in self.descriptors if start + self.segment_bytes <= flushed]:
            os.close(self.descriptors.pop(start))
        start = flushed - flushed % self.segment_bytes
        while start < ready_end:
            if start not in self.descriptors:
                self.descriptors[start] = self._open(start)
            start += self.segment_bytes

    def between(self, start: int, end: int) -> list[int]:
        """Start offsets of the segments that [start, end) touches; all of them are open after follow()."""
        first = start - start % self.segment_bytes
        return list(range(first, end, self.segment_bytes))

    def _open(self, start: int) -> int:
        try:
            return os.open(self.path(start), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(f"cannot open {self.path(start)}: {error.strerror}", errno=error.errno or 0,
                            path=self.path(start)) from error

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
