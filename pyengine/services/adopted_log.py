"""Reads what stood in the log before this engine came, so that the watermark vouches for nothing unread.

A store of RocketMQ, or one whose watermark is lost, is ready after the check of its tail. The rest is
read here, segment by segment, the newest first: synced, then every record looked at as `check` does.
Each whole segment moves `verified_from` to its start; at the log's beginning it is 0 and the work is
over. At damage it stays: what is below it was so before, keeps being served as RocketMQ would,
and is nothing that recovery may stop for later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from pyengine.errors import DiskError, FlushError
from pyengine.formats.paths import StorePaths
from pyengine.formats.record_case import CaseLabel
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import fdatasync, monotonic_ns
from pyengine.native.scan import walk
from pyengine.storage.segment_files import mapped

SLICE_BYTES = 8 << 20
RETRY_NS = 1_000_000_000


class AdoptedLog:
    """The part of a log that is below `verified_from`; driven in one process by the checkpointer."""

    def __init__(self, root: str | os.PathLike[str], segment_bytes: int, verified_from: int, min_offset: Callable[[], int],
                 report: Callable[[str], None] = lambda text: None) -> None:
        """`min_offset` tells where the log begins now; `report` gets a sentence at the end of the work."""
        self.verified_from = verified_from if verified_from > min_offset() else 0
        self.obstacle = ""  # the damage, or why nothing can be read at present
        self._is_over = not self.verified_from
        self._paths = StorePaths(root)
        self._segment_bytes = segment_bytes
        self._min_offset = min_offset
        self._report = report
        self._at = -1  # the next record of the segment that is being read; -1 between two
        self._due_ns = 0

    def work(self) -> None:
        """Read a slice, if it is time: as long a pause follows as it took. Raises FlushError."""
        if self.pause_s() > 0:
            return
        began_ns = monotonic_ns()
        try:
            self._read()
        except FlushError:
            self._is_over = True
            raise
        except DiskError as error:
            if self.obstacle != str(error):
                self.obstacle = str(error)
                self._report(f"what was there before this engine is not read: {error}; trying again each {RETRY_NS / 1e9:g} s")
            self._due_ns = monotonic_ns() + RETRY_NS
        else:
            if not self._is_over:
                self.obstacle = ""
            self._due_ns = 2 * monotonic_ns() - began_ns

    def pause_s(self) -> float:
        """Until there is work; infinite when there is none any more."""
        return math.inf if self._is_over else max(0.0, (self._due_ns - monotonic_ns()) / 1e9)

    def _read(self) -> None:
        top = self.verified_from
        base = (top - 1) // self._segment_bytes * self._segment_bytes
        path = self._paths.commit_log_segment(base)
        try:
            if self._is_deleted(base):
                return
            if self._at < 0:
                self._sync(str(path))
                self._at = base
            with mapped(path) as view:
                found = walk(view, base, self._at, min(self._at + SLICE_BYTES, top), limit=top)
            self._at = found.end_offset
            if found.reason == CaseLabel.RANGE_END and self._at < top:
                return
            is_whole = found.reason in (CaseLabel.RANGE_END, CaseLabel.BLANK)
            why = f"damaged at {self._at} ({found.reason})"
        except FileNotFoundError:
            is_whole, why = False, f"not whole: {path} is missing"
        if is_whole:
            failpoint("adopted_segment_read")
            self._move_to(base)
        elif not self._is_deleted(base):
            self._is_over = True
            self.obstacle = (
                f"the log is {why}, in what was there before this engine; everything from {top} on was read and is whole. "
                "Restore that segment from a copy and start again, or make a store without the damage: stop, then "
                "`pyengine salvage STORE DEST`")
            self._report(self.obstacle)

    def _is_deleted(self, base: int) -> bool:
        """Whether the cleaner has taken the segment: its bytes read as zeros then. All that is left is read."""
        if base >= self._min_offset():
            return False
        self._move_to(base)
        return True

    def _move_to(self, base: int) -> None:
        self._at = -1
        self.verified_from = base if base > self._min_offset() else 0
        if not self.verified_from:
            self._is_over = True
            self._report("the log that was there before this engine is read and whole: the watermark covers all of it")

    def _sync(self, path: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(f"cannot open {path}: {error.strerror}", errno=error.errno or 0, path=path) from error
        try:
            fdatasync(descriptor, path)
        finally:
            os.close(descriptor)
