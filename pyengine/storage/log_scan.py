"""How far whole records reach: the reading half of recovery (docs/recovery.md).

The rules for a record are RocketMQ's (CommitLog.checkMessageAndReturnSize) in its
stores and below our watermark; above it, where a power cut may have lost pages, the
text is judged too (docs/recovery.md). In our own stores a record
must also name its own offset; RocketMQ never asks for that.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyengine.formats.checkpoint import Checkpoint
from pyengine.formats.constants import MESSAGE_MAGIC
from pyengine.formats.record import BEGIN, I32, I64, SYS_FLAG_AT, store_timestamp_at
from pyengine.formats.record_case import CaseLabel, WalkResult
from pyengine.native.scan import classify
from pyengine.storage.recovery.cases import Owner
from pyengine.storage.recovery.report import Progress, RecoveryPath
from pyengine.storage.recovery.walk_ahead import Piece, walk_pieces
from pyengine.storage.segment_files import SegmentFile, mapped
from pyengine.storage.watermark import DurableWatermark

SLICE_BYTES = 32 << 20            # how much is walked between two calls of `progress`, and by one processor at a time
CLEAN_VERIFY_BYTES_MAX = 1 << 30  # read after a clean stop of our own store: it must start within a second
NORMAL_SEGMENTS = 3               # CommitLog.recoverNormally reads this many again
MISSING_SEGMENT = "missing_segment"  # a reason beside formats.record_case: the log has a gap
HEAD_BYTES = 68 + 8               # the store time is readable in these, also after a 20-byte host


@dataclass(frozen=True, slots=True)
class LogView:
    """The log's files and what is known about them before reading."""

    segments: Sequence[SegmentFile]
    size_bytes: int
    watermark: int | None  # our own; None for a store without one
    verified_from: int = 0  # below it our watermark does not vouch for anything

    @classmethod
    def of(cls, segments: Sequence[SegmentFile], size_bytes: int, watermark: DurableWatermark | None) -> LogView:
        """The log of a store with this watermark."""
        if watermark is None:
            return cls(segments, size_bytes, None)
        return cls(segments, size_bytes, watermark.flushed, watermark.verified_from)

    @property
    def owner(self) -> Owner:
        return Owner.THEIRS if self.watermark is None else Owner.OURS

    @property
    def min_offset(self) -> int:
        return self.segments[0].start_offset if self.segments else -1

    @property
    def unsynced_paths(self) -> list[Path]:
        """The segments that reach above the watermark: what stands in them may not have been synced."""
        sure = self.watermark or 0
        return [segment.path for segment in self.segments if segment.start_offset + self.size_bytes > sure]

    def is_gap_behind(self, index: int) -> bool:
        """Whether the segment that follows this one does not begin where it ends."""
        return self.segments[index + 1].start_offset != self.segments[index].start_offset + self.size_bytes

    def index_of(self, offset: int) -> int | None:
        """Which segment holds `offset`; None when none does."""
        for index, segment in enumerate(self.segments):
            if segment.start_offset <= offset < segment.start_offset + self.size_bytes:
                return index
        return None

    def head(self, segment: SegmentFile) -> bytes:
        """The first HEAD_BYTES of a segment. FileNotFoundError when it is gone, as from the two methods below."""
        with open(segment.path, "rb") as file:
            return file.read(HEAD_BYTES)

    def label_at(self, segment: SegmentFile, offset: int) -> str:
        """What is at `offset` (a label of formats.record_case); the body is not read."""
        start = segment.start_offset
        with mapped(segment.path) as view:
            return classify(view, offset - start, start + self.size_bytes - offset, offset, check_crc=False)

    def walk(
        self, segment: SegmentFile, start: int, pieces: Sequence[Piece], *, limit: int, check_crc: bool
    ) -> Iterator[WalkResult]:
        """As walk_ahead.walk_pieces, in one segment."""
        with mapped(segment.path) as view:
            view.madvise(mmap.MADV_SEQUENTIAL)
            yield from walk_pieces(
                view, segment.start_offset, start, pieces, limit=limit, check_crc=check_crc,
                check_offset=self.owner is Owner.OURS)


@dataclass(frozen=True, slots=True)
class LogScan:
    """How far whole records reach from `scan_from` on, and what stopped the walk (a label of formats.record_case)."""

    scan_from: int
    end_offset: int
    reason: str
    records: int = 0
    messages: int = 0
    last_store_timestamp_ms: int = -1

    def carried_on(self, result, end_offset: int, reason: str) -> LogScan:
        """This scan with one more walk behind it."""
        return replace(
            self,
            end_offset=end_offset,
            reason=reason,
            records=self.records + result.records,
            messages=self.messages + result.messages,
            last_store_timestamp_ms=(
                result.last_store_timestamp_ms if result.messages else self.last_store_timestamp_ms
            ),
        )


def first_segment_to_scan(log: LogView, path: RecoveryPath, checkpoint: Checkpoint, kept_from: int | None = None, *,
                          over_gaps: bool = False) -> int:
    """The index of the segment in which the reading begins; 0 without segments.

    It is never one beyond a gap, nor, with our watermark, a later one than the watermark's.
    After a clean stop of our own store as many of the last three segments are read as fit
    into CLEAN_VERIFY_BYTES_MAX, the watermark's own in any case. `kept_from`: in RocketMQ's
    store an earlier recovery has kept everything from there on (see recovery_marker.py).
    `over_gaps`: as a reader of RocketMQ's store, which a gap does not stop.
    """
    count = len(log.segments)
    first = 0
    if path is RecoveryPath.NORMAL:
        first = first_after_orderly_stop(log, count)
        kept = None if kept_from is None or log.owner is Owner.OURS else log.index_of(kept_from)
        first = max(first, kept or 0)
    else:
        for index in range(count - 1, 0, -1):
            if _is_older_than(log.head(log.segments[index]), checkpoint.min_timestamp_ms):
                first = index
                break
    if log.watermark is not None and count:
        holder = log.index_of(log.watermark)
        first = min(first, count - 1 if holder is None else holder)
    return first if over_gaps else next((index for index in range(first) if log.is_gap_behind(index)), first)


def first_after_orderly_stop(log: LogView, count: int) -> int:
    """Where the reading begins in the first `count` segments after an orderly stop, without a watermark."""
    segments_read = NORMAL_SEGMENTS
    if log.owner is Owner.OURS:
        segments_read = min(NORMAL_SEGMENTS, max(1, CLEAN_VERIFY_BYTES_MAX // log.size_bytes))
    return max(0, count - segments_read)


def scan_log(
    log: LogView, first: int, *, start: int | None = None, check_crc: bool = True, limit: int | None = None,
    progress: Progress | None = None, over_gaps: bool = False,
) -> LogScan:
    """Walk from segment `first` to the first thing that is no record, or to `limit` if that comes earlier.

    What is no record below `log.verified_from` was there before this engine and ends nothing: the walk goes on
    at the next segment, or at `verified_from`. `start`: a record of that segment to begin at (default: its first).
    `over_gaps`: go on after a missing segment.
    """
    if not log.segments:
        return LogScan(0, 0, CaseLabel.ZEROES)
    at = log.segments[first].start_offset if start is None else start
    log_end = log.segments[-1].start_offset + log.size_bytes
    total_bytes = (log_end if limit is None else min(limit, log_end)) - at
    scan = before_blank = LogScan(at, at, CaseLabel.RANGE_END)
    for segment in log.segments[first:]:
        base, segment_end = segment.start_offset, segment.start_offset + log.size_bytes
        if base > scan.end_offset and not over_gaps:
            return replace(scan, reason=MISSING_SEGMENT) if log.owner is Owner.OURS else before_blank
        end = segment_end if limit is None else min(segment_end, limit)
        scan = _scan_segment(log, segment, max(at, base), end, scan, check_crc, progress, total_bytes)
        if scan.reason != CaseLabel.BLANK and scan.end_offset < (resumed := min(log.verified_from, end)):
            scan = _scan_segment(log, segment, resumed, end, scan, check_crc, progress, total_bytes)
            if scan.end_offset == segment_end:
                continue
        if scan.reason != CaseLabel.BLANK:
            return scan
        if segment is log.segments[-1] and log.owner is Owner.THEIRS and limit is None:
            return scan  # RocketMQ ends the log before such a blank; a commit slot may end after it
        before_blank, scan = scan, replace(scan, end_offset=segment_end, reason=CaseLabel.RANGE_END)
    return scan


def scan_before(log: LogView, scan: LogScan, first: int, *, check_crc: bool) -> LogScan | None:
    """`scan` with everything from segment `first` on before it; None when whole records do not reach it."""
    before = scan_log(log, first, check_crc=check_crc, limit=scan.scan_from)
    if before.end_offset != scan.scan_from:
        return None
    return replace(
        scan, scan_from=before.scan_from, records=scan.records + before.records, messages=scan.messages + before.messages
    )


def _scan_segment(
    log: LogView, segment: SegmentFile, at: int, end: int, scan: LogScan, check_crc: bool, progress: Progress | None,
    total_bytes: int,
) -> LogScan:
    scan = replace(scan, end_offset=at, reason=CaseLabel.RANGE_END)
    results = log.walk(segment, at, list(_slices(at, end, log.watermark)), limit=end, check_crc=check_crc)
    with contextlib.closing(results):  # nothing reads on when `progress` raises
        for result in results:
            scan = scan.carried_on(result, result.end_offset, result.reason)
            if progress is not None:
                progress(scan.end_offset - scan.scan_from, total_bytes)
    return scan


def _slices(start: int, end: int, watermark: int | None) -> Iterator[tuple[int, bool]]:
    """(stop, strict) of the pieces of [start, end), cut at the watermark and at every SLICE_BYTES."""
    while start < end:
        stop = min(start + SLICE_BYTES, end)
        strict = watermark is not None and start >= watermark
        if watermark is not None and start < watermark:
            stop = min(stop, watermark)
        yield stop, strict
        start = stop


def _is_older_than(head: bytes, timestamp_ms: int) -> bool:
    """CommitLog.isMappedFileMatchedRecover: the first record was stored at or before `timestamp_ms`."""
    if len(head) < HEAD_BYTES or BEGIN.unpack_from(head)[1] != MESSAGE_MAGIC:
        return False
    (sys_flag,) = I32.unpack_from(head, SYS_FLAG_AT)
    (stored_ms,) = I64.unpack_from(head, store_timestamp_at(sys_flag))
    return stored_ms != 0 and stored_ms <= timestamp_ms
