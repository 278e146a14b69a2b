"""Where the commit log ends: the one definition, for recovery, readers, `check`, `status` and Spark.

Nothing is written, and nothing is judged. In our own store everything below the durable
watermark belongs to the log, damaged or not, and the log ends at the first byte from there on
that is not part of a whole record. In RocketMQ's store it ends where RocketMQ ends it: at the
first such byte from where its recovery begins to read (docs/recovery.md).
Once found it is followed, so that a log that another process appends to can be read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyengine.formats.paths import segment_name
from pyengine.formats.record_case import CaseLabel, WalkResult
from pyengine.native.scan import classify
from pyengine.storage.abort_file import abort_file_exists
from pyengine.storage.log_scan import HEAD_BYTES, LogScan, LogView, first_segment_to_scan, scan_log
from pyengine.storage.recovery.cases import Owner
from pyengine.storage.recovery.marker import read_kept_from, read_marker
from pyengine.storage.recovery.report import RecoveryPath
from pyengine.storage.recovery.walk_ahead import Piece, walk_pieces
from pyengine.storage.segment_files import SegmentFile, SegmentFolder
from pyengine.storage.store_checkpoint import read_checkpoint
from pyengine.storage.watermark import DurableWatermark, WatermarkReading, read_watermark

_LOOK_AGAIN_S = 1.0
_TRIES = 16
# What an appending process leaves for a moment; anything else at the end is final.
_UNFINISHED = frozenset((
    CaseLabel.FOREIGN, CaseLabel.OVERRUN, CaseLabel.TORN, CaseLabel.OFFSET_MISMATCH, CaseLabel.BAD_CRC, CaseLabel.BAD_TEXT,
))


def find_end(root: str | os.PathLike[str], log: LogView) -> LogScan:
    """How far the log reaches, for a store that no engine tells about.

    Reads from our watermark on, where the files reach it, else from where recovery would. FileNotFoundError when
    a segment is deleted meanwhile.
    """
    flushed = log.watermark
    if flushed is not None and log.segments and flushed == log.segments[-1].start_offset + log.size_bytes:
        return LogScan(flushed, flushed, CaseLabel.RANGE_END)
    index = None if flushed is None else log.index_of(flushed)
    if flushed is None or index is None:
        # RocketMQ goes on after a missing segment, and a reader with it; recovery refuses such a store (log_files.look_at_log).
        over_gaps = log.owner is Owner.THEIRS
        return scan_log(log, where_to_read(root, log, over_gaps=over_gaps)[1], over_gaps=over_gaps)
    label = log.label_at(log.segments[index], flushed)
    # A torn record may be there, or, in a log that RocketMQ went on with, the middle of another: the segment's start is sure.
    scan = scan_log(log, index, start=None if label in _UNFINISHED else flushed)
    return scan if scan.end_offset >= flushed else replace(scan, end_offset=flushed, reason=label)


def own_watermark(reading: WatermarkReading, min_offset: int) -> DurableWatermark | None:
    """The watermark by which the log ends; the one that came with a copied directory vouches for nothing in it."""
    if reading.watermark is None or not reading.is_copied:
        return reading.watermark
    return replace(reading.watermark, flushed=max(min_offset, 0))


def where_to_read(root: str | os.PathLike[str], log: LogView, *, over_gaps: bool = False,
                  is_doubted: bool = False) -> tuple[RecoveryPath, int]:
    """RocketMQ's path for this store, and the index of the segment in which recovery begins to read.

    `is_doubted`: a sync has failed, so it reads as after a crash.
    """
    marker = read_marker(root)
    is_abnormal = abort_file_exists(root) or is_doubted or (marker is not None and marker.path is RecoveryPath.ABNORMAL)
    path = RecoveryPath.ABNORMAL if is_abnormal else RecoveryPath.NORMAL
    first = first_segment_to_scan(log, path, read_checkpoint(root), read_kept_from(root), over_gaps=over_gaps)
    if marker is not None:  # in RocketMQ's store a second run that read more would cut what the first one keeps
        unfinished = log.index_of(marker.scan_from) or 0
        first = unfinished if log.owner is Owner.THEIRS else min(first, unfinished)
    return path, first


class LogEnd:
    """The end of one commit log, as far as it was found. Not shared between threads without a lock."""

    def __init__(self, root: str | os.PathLike[str], commit_log: SegmentFolder) -> None:
        self._root = root
        self._log = commit_log
        self._end: int | None = None
        self._seen: tuple[list[int], LogView] | None = None
        self._looked_again_s = 0.0

    def find(self) -> int:
        """The end now. The first call reads what `find_end` does; later ones only what was appended since.

        0 for a log without segments.
        """
        for _ in range(_TRIES):
            starts = self._log.starts()
            if not starts:
                self._end = None
                return 0
            try:
                end = self._find(starts)
            except FileNotFoundError:
                end = -1
            if end >= self._log.min_offset:
                self._end = end
                return end
            self._end = None  # the segment was deleted, and perhaps emptied, while it was read
        return max(self._log.min_offset, 0)

    def _look(self, starts: list[int]) -> LogView:
        """The log as it is now. The watermark is read again when segments come or go, and for each new search."""
        if self._end is None or self._seen is None or self._seen[0] != starts:
            segments = [SegmentFile(Path(segment_name(start)), start) for start in starts]
            durable = own_watermark(read_watermark(self._root), starts[0])
            self._seen = starts, self._view(LogView.of(segments, self._log.size_bytes, durable))
        return self._seen[1]

    def _view(self, log: LogView) -> LogView:
        return _FollowedLog(log.segments, log.size_bytes, log.watermark, log.verified_from, folder=self._log)

    def _find(self, starts: list[int]) -> int:
        log = self._look(starts)
        if self._end is None or not starts[0] <= self._end <= starts[-1] + self._log.size_bytes:
            return find_end(self._root, log).end_offset
        index = log.index_of(self._end)
        if index is None:
            return self._end
        scan = scan_log(log, index, start=self._end, over_gaps=log.owner is Owner.THEIRS)
        if scan.end_offset > self._end or scan.reason not in _UNFINISHED or not self._may_look_again():
            return scan.end_offset
        # Either a process is writing there, or the writer was killed and what we had
        # passed was cleared and written over: the segment's start is sure.
        if log.owner is Owner.THEIRS:
            return scan_log(log, index, over_gaps=True).end_offset
        self._end = None
        return find_end(self._root, self._look(starts)).end_offset

    def _may_look_again(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_again_s < _LOOK_AGAIN_S:
            return False
        self._looked_again_s = now_s
        return True


@dataclass(frozen=True, slots=True)
class _FollowedLog(LogView):
    """The log as a reader has it mapped."""

    folder: SegmentFolder = field(kw_only=True)

    def _bytes(self, segment: SegmentFile):
        view = self.folder.view(segment.start_offset)
        if view is None:
            raise FileNotFoundError(segment.path)
        return view

    def head(self, segment: SegmentFile) -> bytes:
        return self._bytes(segment)[:HEAD_BYTES]

    def label_at(self, segment: SegmentFile, offset: int) -> str:
        at = offset - segment.start_offset
        return classify(self._bytes(segment), at, self.size_bytes - at, offset, check_crc=False)

    def walk(
        self, segment: SegmentFile, start: int, pieces: Sequence[Piece], *, limit: int, check_crc: bool
    ) -> Iterator[WalkResult]:
        return walk_pieces(self._bytes(segment), segment.start_offset, start, pieces, limit=limit, check_crc=check_crc,
                           check_offset=self.owner is Owner.OURS)
