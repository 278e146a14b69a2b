"""The committer's rounds (csrc/pool_commit.cdef.h): wait, write pool bytes into the file, publish, wake those that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.scan import REASONS
from pyengine.native.waiting import StreamDetector

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, ms_control
    from pyengine.native.recorder import Recorder
    from pyengine.native.waiting import Latch

IDLE: int = lib.MS_COMMIT_IDLE
TIME: int = lib.MS_COMMIT_TIME
SEGMENT: int = lib.MS_COMMIT_SEGMENT
FAILED: int = lib.MS_COMMIT_FAILED
BROKEN: int = lib.MS_COMMIT_BROKEN


class PoolCommitLoop:
    """One `struct ms_pool_commit`, and what it points to, which must outlive it."""

    def __init__(self, control: ms_control, latch: Latch, reputter: Latch, replicator: Latch | None, *, segment_bytes: int,
                 piece_bytes: int, nap_ns: int, quiet_ns: int, recorder: Recorder) -> None:
        """Goes on at the published `committed`. `latch` is the committer's; `reputter` and `replicator` are woken for what
        is committed. `nap_ns`, `quiet_ns`: those of StreamDetector. `recorder` keeps what took long."""
        self._loop = ffi.new("struct ms_pool_commit *")
        self._kept = latch, reputter, replicator, recorder
        self._loop.recorder = recorder.hand
        self._data: Array[int] | None = None
        self._loop.control = control
        self._loop.semaphore = latch.semaphore
        self._loop.reputter_semaphore = reputter.semaphore
        self._loop.replicator_semaphore = replicator.semaphore if replicator is not None else ffi.NULL
        self._loop.segment_bytes = segment_bytes
        self._loop.piece_bytes = piece_bytes
        self._loop.committed = lib.ms_load_i64(ffi.addressof(control.committed, "value"))
        self._loop.base = self._loop.fd = -1
        StreamDetector(nap_ns, quiet_ns, ffi.addressof(self._loop, "stream"))

    @property
    def committed(self) -> int:
        """All below is in the files and published."""
        return self._loop.committed

    @property
    def error_number(self) -> int:
        """FAILED: the errno of the write."""
        return self._loop.error_number

    @property
    def reason(self) -> str:
        """BROKEN: what is at `committed` in place of a record (native.scan.REASONS)."""
        return REASONS[self._loop.reason]

    def use_segment(self, view: Buffer | None, base: int = -1, fd: int = -1) -> None:
        """The pool buffer of the segment that begins at `base`, and its file; None: those before may be closed."""
        self._loop.base = -1
        if self._data is not None:
            ffi.release(self._data)
            self._data = None
        if view is not None:
            self._data = ffi.from_buffer("uint8_t[]", view)
            self._loop.view = self._data
            self._loop.fd = fd
            self._loop.base = base

    def run(self, until_ns: int, *, may_sleep: bool = False) -> int:
        """Commit what comes until CLOCK_MONOTONIC `until_ns`; IDLE, TIME, or what is wanted: SEGMENT, FAILED, BROKEN.

        `may_sleep`: wait on the latch, which is armed, where nothing is left.
        """
        return lib.ms_pool_commit_run(self._loop, until_ns, may_sleep)
