"""The reputter's rounds (csrc/reput.cdef.h): wait, dispatch, publish, wake the consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.waiting import StreamDetector

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, ms_control, ms_position, ms_store_stats
    from pyengine.native.dispatch import DispatchLoop
    from pyengine.native.waiting import Latch

IDLE: int = lib.MS_REPUT_IDLE
TIME: int = lib.MS_REPUT_TIME
SEGMENT: int = lib.MS_REPUT_SEGMENT
DECIDE: int = lib.MS_REPUT_DECIDE


class ReputLoop:
    """One `struct ms_reput`, and what it points to, which must outlive it."""

    def __init__(self, control: ms_control, dispatch: DispatchLoop, stats: ms_store_stats, latch: Latch, *, segment_bytes: int,
                 batch_bytes: int, nap_ns: int, quiet_ns: int, allocator: Latch | None = None) -> None:
        """Goes on at the published `reput_from`, up to `committed`. `nap_ns`, `quiet_ns`: those of StreamDetector.
        `allocator`: the latch of an allocator that brings pages in ahead of the writer."""
        self._loop = ffi.new("struct ms_reput *")
        self._kept = dispatch, latch, allocator
        self._data: Array[int] | None = None
        self._loop.control = control
        self._loop.dispatch = dispatch.struct
        self._loop.stats = ffi.addressof(stats, "dispatch")
        self._loop.semaphore = latch.semaphore
        self._loop.allocator_semaphore = allocator.semaphore if allocator is not None else ffi.NULL
        self._loop.segment_bytes = segment_bytes
        self._loop.batch_bytes = batch_bytes
        self._loop.reput_from = self._loop.warmed_from = lib.ms_load_i64(ffi.addressof(control.reput_from, "value"))
        self._loop.base = self._loop.incomplete_end = self._loop.woken_up_to = -1
        self._loop.lag_is_known = not control.identity.replay_clock
        self.use_limit(control.committed)
        StreamDetector(nap_ns, quiet_ns, ffi.addressof(self._loop, "stream"))

    @property
    def reput_from(self) -> int:
        """All below is dispatched and published."""
        return self._loop.reput_from

    def use_limit(self, limit: ms_position) -> None:
        """Nothing at or above this position is dispatched."""
        self._loop.limit = ffi.addressof(limit)

    def use_segment(self, view: Buffer | None, base: int) -> None:
        """The mapping of the whole segment that begins at `base`; None: the one before may be unmapped."""
        self._loop.base = -1
        if self._data is not None:
            ffi.release(self._data)
            self._data = None
        if view is not None:
            self._data = ffi.from_buffer("uint8_t[]", view)
            self._loop.view = self._data
            self._loop.base = base

    def run(self, until_ns: int, *, may_sleep: bool = False) -> int:
        """Dispatch what comes until CLOCK_MONOTONIC `until_ns`; IDLE, TIME, or what is wanted: SEGMENT, DECIDE.

        `may_sleep`: wait on the latch, which is armed, where nothing is left.
        """
        return lib.ms_reput_run(self._loop, until_ns, may_sleep)

    def publish(self, reached: int, behind_bytes: int) -> None:
        """All below `reached` was dispatched: move `reput_from` and wake the consumers."""
        lib.ms_reput_publish(self._loop, reached, behind_bytes)
