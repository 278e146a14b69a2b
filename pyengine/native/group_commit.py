"""Group commit in C: one flusher round is a fdatasync, not a walk through Python (csrc/group_commit.cdef.h)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.store_stats import count_syncs

if TYPE_CHECKING:
    from pyengine._native import CData, ms_control, ms_store_stats

TIME: int = lib.MS_GROUP_TIME
SEGMENT: int = lib.MS_GROUP_SEGMENT
FAILED: int = lib.MS_GROUP_FAILED
SEGMENTS_MAX: int = lib.MS_GROUP_SEGMENTS_MAX


class GroupCommit:
    """The flusher's rounds over one engine's memory."""

    def __init__(self, control: ms_control, semaphore: CData, writer_semaphore: CData, segment_bytes: int, incarnation: int,
                 stats: ms_store_stats) -> None:
        """`semaphore`, `writer_semaphore`: of the flusher's own latch and the writer's; `incarnation`: what the
        writer must have verified; `stats`: where each fdatasync is counted (native.store_stats), it must outlive
        this object."""
        self._state = ffi.new("struct ms_group_commit *")
        self._state.control = control
        self._state.semaphore, self._state.writer_semaphore = semaphore, writer_semaphore
        self._state.segment_bytes = segment_bytes
        self._state.incarnation = incarnation
        count_syncs(self._state, stats)

    def use(self, descriptors: Mapping[int, int]) -> None:
        """The open segments from here on: start offset -> descriptor; of very many, the oldest SEGMENTS_MAX."""
        oldest = sorted(descriptors)[:SEGMENTS_MAX]
        for at, base in enumerate(oldest):
            self._state.base[at] = base
            self._state.fd[at] = descriptors[base]
        self._state.count = len(oldest)

    def run(self, deadline_ns: int) -> int:
        """Sync whatever is committed, sleep on the latch in between; TIME at the deadline, or SEGMENT, or FAILED."""
        return lib.ms_group_commit_run(self._state, deadline_ns)

    def once(self) -> bool:
        """One round without sleeping: whether `flushed` moved. Raises LookupError (SEGMENT) or OSError (FAILED)."""
        moved = lib.ms_group_commit_once(self._state)
        if moved == -SEGMENT:
            raise LookupError("a segment is not open yet")
        if moved == -FAILED:
            raise OSError(self._state.error_number, "fdatasync")
        return moved == 1

    @property
    def failure(self) -> tuple[int, int]:
        """After FAILED: (errno, start of the segment)."""
        return self._state.error_number, self._state.failed_base
