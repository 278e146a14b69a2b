"""Pages of the log brought in ahead of the writer (async mapped mode only).

A store to a page that is not there costs a fault of 0.8 us and, on memory the machine's
host has taken back, up to 9 us; populating whole pieces ahead makes appends 2-5 times
faster. Never in sync mode: a store into a populated mapping dirties its whole large
folio, a megabyte to the device per small put (measured). Populating changes no
byte, so it may run beside the writer.
"""

from __future__ import annotations

import mmap
import os

from pyengine._native import ffi
from pyengine.errors import DiskError
from pyengine.formats.paths import StorePaths
from pyengine.native.flush import lock_memory, populate
from pyengine.storage.file_system import copies_on_write

WINDOW_BYTES = 64 << 20
STEP_BYTES = 16 << 20   # populate when this much of the window is used up
PIECE_BYTES = 4 << 20   # one call; the process looks around in between
PAGE_BYTES = mmap.PAGESIZE


class _Window:
    """One segment's mapping."""

    def __init__(self, path: os.PathLike[str], segment_bytes: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(f"cannot open {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
        try:
            # There the writer does not store into mapped pages, and bringing them in would take room.
            is_written = copies_on_write(descriptor)
            self._mapping = None if is_written else mmap.mmap(descriptor, segment_bytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._address = ffi.cast("uint8_t *", ffi.from_buffer(self._mapping)) if self._mapping is not None else None

    def bring_in(self, start: int, stop: int, *, lock: bool) -> tuple[int, int]:
        """Populate (and lock) bytes [start, stop) of the segment; for each 0 or an errno."""
        if self._address is None:
            return 0, 0
        start -= start % PAGE_BYTES
        refused = populate(self._address + start, stop - start)
        return refused, lock_memory(self._address + start, stop - start) if lock else 0

    def close(self) -> None:
        self._address = None
        if self._mapping is not None:
            self._mapping.close()  # unlocks too


class PageWarmer:
    """Keeps the pages of [wrote, wrote + window) present; `whole` takes whole segments, and locks them until written."""

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int, *, whole: bool = False,
                 populated_end: int = 0) -> None:
        """`populated_end`: how far a predecessor had come; populating again would dirty the pages again."""
        self._paths = StorePaths(root)
        self._segment_bytes = segment_bytes
        self._whole = whole
        self._windows: dict[int, _Window] = {}
        self._filling = True
        self.populated_end = populated_end
        self.refused = 0  # errno of the last populate or lock that did not work; harmless
        self.lock_refused = 0  # of the last lock

    def advance(self, wrote: int, ready_end: int) -> bool:
        """Populate one piece if a step's worth is missing; whether there is more to do now."""
        size = self._segment_bytes
        for start in [start for start in self._windows if start + size <= wrote]:
            self._windows.pop(start).close()
        window = max(WINDOW_BYTES, 2 * size) if self._whole else WINDOW_BYTES
        end = min(wrote + window, ready_end)
        at = max(self.populated_end, wrote)
        if at >= end or end - at < min(STEP_BYTES, size) and not self._filling:
            return False
        start = at - at % size
        stop = min(end, at + PIECE_BYTES, start + size)
        if start not in self._windows:
            self._windows[start] = _Window(self._paths.commit_log_segment(start), size)
        refused, lock_refused = self._windows[start].bring_in(at - start, stop - start, lock=self._whole)
        self.lock_refused = lock_refused or self.lock_refused
        self.refused = lock_refused or refused or self.refused
        self.populated_end = stop
        self._filling = stop < end  # once begun, to the window's end
        return self._filling

    def close(self) -> None:
        for window in self._windows.values():
            window.close()
        self._windows.clear()
