"""CommitLog.GroupCommitService: in sync mode, sync as soon as there is something, and again while there is.

RocketMQ swaps two request lists; here a waiting put watches `flushed` itself, so a round
is one fdatasync and one broadcast, in C (csrc/group_commit.cdef.h).
"""

from __future__ import annotations

import os

from pyengine.config import EngineConfig
from pyengine.errors import FlushError
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native import cpu, group_commit
from pyengine.native.flush import monotonic_ns
from pyengine.services.flush_real_time import take_over
from pyengine.services.freeze import freeze
from pyengine.services.unflushed_segments import UnflushedSegments

ROUND_NS = 100_000_000
RECHECK_NS = 5_000_000


class GroupCommitService:
    """Latch-driven flushing of the commit log. work() sleeps on the latch itself."""

    def __init__(self, memory: EngineMemory, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._memory = memory
        self._control = memory.control
        self._root = root
        self._segments = UnflushedSegments(root, memory.identity.segment_bytes)
        self._follow()
        self.incarnation = take_over(memory)
        self._group = group_commit.GroupCommit(
            self._control, memory.latch(native.FLUSHER).semaphore, memory.latch(native.WRITER).semaphore,
            memory.identity.segment_bytes, self.incarnation, memory.counters)
        self._group.use(self._segments.descriptors)
        cpu.schedule_interactive()

    def _follow(self) -> None:
        ready_end = max(native.load(self._control.allocator, "ready_end"),
                        native.load_position(self._control.committed))
        self._segments.follow(native.load_position(self._control.flushed), ready_end)

    def work(self) -> bool:
        """A tenth of a second of group commits."""
        self._follow()
        self._group.use(self._segments.descriptors)
        verified = native.load(self._control.writer, "verified_flusher") == self.incarnation
        outcome = self._group.run(monotonic_ns() + (ROUND_NS if verified else RECHECK_NS))
        if outcome == group_commit.FAILED:
            self._freeze(*self._group.failure)
        return outcome == group_commit.SEGMENT

    def _freeze(self, error_number: int, base: int) -> None:
        path = self._segments.path(base)
        freeze(self._memory, self._root, native.FLUSHER, FlushError(f"fdatasync {path}", errno=error_number, path=path))

    def pause_s(self) -> float:
        return 0.0

    def drain(self) -> bool:
        """Flush to the end; gives up where the store is frozen or no writer vouches for this incarnation."""
        self._follow()
        self._group.use(self._segments.descriptors)
        try:
            return self._group.once()
        except OSError:
            self._freeze(*self._group.failure)
            return False

    def close(self) -> None:
        self._segments.close()
