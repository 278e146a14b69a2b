"""The log part of the whole-store check: every record from the first segment to the end, CRC included.

What stands at the place where the walk stops:

    zeros to the end of the log       the end
    damage below our watermark        error: an acknowledged message may be gone
    whole records behind the damage   error: they cannot be reached
    what recovery just clears, and    warning: a put that a crash cut short
    there is an abort file
    anything else                     error: it may have been a message, or nobody was writing
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pyengine.formats.record_case import CaseLabel
from pyengine.native.scan import sync, walk
from pyengine.storage.check_report import CheckProgress, CheckReport, Findings, Severity
from pyengine.storage.check_segments import LogSegments
from pyengine.storage.check_work import CheckWork
from pyengine.storage.file_zeros import used_end
from pyengine.storage.log_files import shown
from pyengine.storage.log_recovery import tail_content
from pyengine.storage.recovery_cases import Content, End, Owner, TailDecision, tail_case
from pyengine.storage.segment_files import SegmentFile, mapped
from pyengine.storage.watermark import DurableWatermark


@dataclass(frozen=True, slots=True)
class QueueInLog:
    """What the log holds for one queue."""

    min_queue_offset: int
    max_queue_offset: int
    count: int


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What the other parts need to know about the log."""

    is_damaged: bool
    last_store_timestamp_ms: int
    queues: dict[tuple[str, int], QueueInLog]
    further: dict[tuple[str, int], int]  # records of other queues that have an entry in this one (INNER_MULTI_DISPATCH)


def check_log(
    root: Path, log: LogSegments, work: CheckWork, findings: Findings, report: CheckReport, *,
    limit: int | None, watermark: DurableWatermark | None, was_stopped: bool, progress: CheckProgress,
) -> LogFacts:
    """Walk the log and set its end. `limit`: a running engine's position, beyond which nothing is looked at."""
    last_ms = -1
    end, reason, index = log.min_offset, CaseLabel.ZEROES, 0
    total_bytes = len(log.segments) * log.size_bytes
    for index, segment in enumerate(log.segments):
        base = segment.start_offset
        if base != end:
            findings.error("gap", _name(root, segment.path), None, f"the segment before it, from {end} on, is missing")
            reason = "missing_segment"
            break
        stop = base + log.size_bytes if limit is None else min(base + log.size_bytes, limit)
        if base >= stop and limit is not None:
            break
        end, reason, last_ms = _walk_segment(work, segment, log, stop, report, last_ms, progress, total_bytes)
        if reason != CaseLabel.BLANK:
            break
        is_last = index + 1 == len(log.segments)
        if not is_last or watermark is not None:
            end = base + log.size_bytes
    report.bytes, report.min_offset, report.end_offset = end - log.min_offset, log.min_offset if log.segments else -1, end
    log.end = end
    is_damaged = False
    if limit is None or end < limit:
        is_damaged = _judge_end(root, log, index, end, reason, findings, watermark, was_stopped)
    queues, further = _queues_in_log(work, log, findings)
    return LogFacts(is_damaged, last_ms, queues, further)


def _walk_segment(
    work: CheckWork, segment: SegmentFile, log: LogSegments, stop: int, report: CheckReport, last_ms: int,
    progress: CheckProgress, total: int,
) -> tuple[int, str, int]:
    at, reason = segment.start_offset, str(CaseLabel.RANGE_END)
    with contextlib.closing(work.walk(log, segment, stop)) as results:  # nothing reads on when `progress` raises
        for result in results:
            at, reason = result.end_offset, str(result.reason)
            report.records += result.records
            report.messages += result.messages
            last_ms = result.last_store_timestamp_ms if result.messages else last_ms
            progress(at - log.min_offset, total)
    return at, reason, last_ms


def _judge_end(
    root: Path, log: LogSegments, index: int, end: int, reason: str, findings: Findings,
    watermark: DurableWatermark | None, was_stopped: bool,
) -> bool:
    """Report what stands at and behind the end; True when it is damage."""
    is_lost = watermark is not None and end < watermark.flushed
    if is_lost and end >= watermark.verified_from:
        findings.error(
            "below watermark", "commitlog", end,
            f"the log ends at {end} ({reason}), but everything up to {watermark.flushed} had been synced",
        )
    elif is_lost:
        findings.error(
            "damaged before", "commitlog", end,
            f"the log is damaged at {end} ({reason}), in what was there before this engine; it vouches for "
            f"{watermark.verified_from} to {watermark.flushed}",
        )
    if not log.segments or reason == CaseLabel.BLANK:
        return is_lost
    segment = log.segments[index]
    name, start = _name(root, segment.path), max(0, end - segment.start_offset)
    behind = _whole_record_behind(log, index, end)
    content, used_bytes = tail_content(segment, end, reason) if end >= segment.start_offset else (Content.OTHER, 0)
    is_later_used = any(used_end(later.path) for later in log.segments[index + 1 :])
    if behind is not None:
        findings.error(
            "unreachable", name, start, f"{reason} at {end}; whole records follow from {behind} on and cannot be reached"
        )
    elif not used_bytes and not is_later_used:
        return is_lost
    elif was_stopped:
        findings.error("tail", name, start, f"{reason} at {end}, although the store was stopped in order")
    elif is_later_used or tail_case(content, _owner(watermark), End.SCAN).decision is TailDecision.QUARANTINE:
        findings.error("tail", name, start, f"{reason} at {end}: {used_bytes} bytes that may have been a message")
    else:
        findings.warning("tail", name, start, f"{reason} at {end}: a put that was cut short; `recover` clears it")
    return True


def _owner(watermark: DurableWatermark | None) -> Owner:
    return Owner.THEIRS if watermark is None else Owner.OURS


def _whole_record_behind(log: LogSegments, index: int, end: int) -> int | None:
    """The first whole record behind the end, in its segment or a later one. Zeros to a segment's end are not searched."""
    for segment in log.segments[index:]:
        base = segment.start_offset
        start = max(base, end + 1)
        if start >= base + log.size_bytes:
            continue
        used = base + used_end(segment.path, start - base)
        if used == start:
            continue
        with mapped(segment.path) as view:
            at: int | None = start
            while at is not None:
                at = sync(view, base, at, used, limit=base + log.size_bytes) if at < used else None
                if at is None:
                    break
                if walk(view, base, at, at + 1, limit=base + log.size_bytes).messages:
                    return at
                at += 1
    return None


def _queues_in_log(
    work: CheckWork, log: LogSegments, findings: Findings
) -> tuple[dict[tuple[str, int], QueueInLog], dict[tuple[str, int], int]]:
    """What the log holds for each queue, and how many records of others; offsets that are missing or doubled are errors."""
    found: dict[tuple[str, int], QueueInLog] = {}
    further: Counter[tuple[str, int]] = Counter()
    for queues in work.touched(log):
        for queue in queues:
            key = queue.topic, queue.queue_id
            if queue.further:
                further[key] += queue.further
            if not queue.count:
                continue
            before = found.get(key)
            found[key] = QueueInLog(
                min(queue.min_queue_offset, before.min_queue_offset if before else queue.min_queue_offset),
                max(queue.max_queue_offset, before.max_queue_offset if before else queue.max_queue_offset),
                queue.count + (before.count if before else 0),
            )
    for (topic, queue_id), queue in found.items():
        if queue.count != queue.max_queue_offset - queue.min_queue_offset + 1:
            findings.add(
                Severity.ERROR, "log gap", "commitlog", None,
                f"queue {queue_id} of {topic}: {queue.count} messages have the queue offsets "
                f"{queue.min_queue_offset} to {queue.max_queue_offset}",
            )
    return found, further


def _name(root: Path, path: Path) -> str:
    return shown(path, root)
