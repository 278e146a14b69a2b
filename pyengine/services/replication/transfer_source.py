"""The master's log as it goes over the wire: raw bytes below `committed`, copied out of the files.

They are copied before they are sent, and the log's minimum is looked at after copying, as
every short reader does: a segment that is deleted while a slave is fed from it yields
zeros, and none of those may leave this process. Reading through a descriptor costs one
system call for many frames, no page faults, and a file that somebody shortened is an error
instead of a signal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pyengine.errors import DiskError
from pyengine.formats.paths import StorePaths
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint

SEGMENTS_OPEN_MAX = 32


class TransferSource:
    """Reads one store's log for its slaves. Used by one thread at a time."""

    def __init__(self, memory: EngineMemory, root: str | os.PathLike[str]) -> None:
        self._load_committed = native.loader(memory.control.committed, "value")
        self._load_min_offset = native.loader(memory.control.min_offset, "value")
        self._paths = StorePaths(root)
        self.segment_bytes = memory.identity.segment_bytes
        self._open: dict[int, int] = {}

    def end(self) -> int:
        """Everything below is in the files, and may be sent."""
        return self._load_committed()

    def min_offset(self) -> int:
        """Everything below is deleted."""
        return self._load_min_offset()

    def read(self, offset: int, views: Sequence[memoryview]) -> bool:
        """Fill the views with the bytes from `offset` on, all of one segment and below end().

        False when they are deleted by now, whatever the views hold. Raises DiskError.
        """
        base = offset - offset % self.segment_bytes
        wanted = sum(len(view) for view in views)
        try:
            descriptor = self._open.get(base)
            if descriptor is None:
                descriptor = self._open_segment(base)
            got = os.preadv(descriptor, views, offset - base)
            failpoint("source_read")
        except OSError as error:
            if self.min_offset() > offset:
                return False
            raise DiskError(f"cannot read {self._paths.commit_log_segment(base)}: {error.strerror}",
                            errno=error.errno or 0, path=str(self._paths.commit_log_segment(base))) from error
        if self.min_offset() > offset:
            return False
        if got != wanted:
            raise DiskError(f"{self._paths.commit_log_segment(base)} is shorter than a segment: {got} bytes instead of "
                            f"{wanted} at {offset}", path=str(self._paths.commit_log_segment(base)))
        return True

    def _open_segment(self, base: int) -> int:
        if len(self._open) >= SEGMENTS_OPEN_MAX:
            self._close(next(iter(self._open)))
        descriptor = os.open(self._paths.commit_log_segment(base), os.O_RDONLY | os.O_CLOEXEC)
        failpoint("source_opened")
        self._open[base] = descriptor
        return descriptor

    def forget_deleted(self) -> None:
        """Close what is deleted, or its blocks stay taken."""
        min_offset = self.min_offset()
        for base in [base for base in self._open if base < min_offset]:
            self._close(base)

    def _close(self, base: int) -> None:
        os.close(self._open.pop(base))

    def close(self) -> None:
        for base in list(self._open):
            self._close(base)
