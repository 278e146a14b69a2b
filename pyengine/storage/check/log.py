"""The log part of the whole-store check: every record from the first segment to the end, CRC included.

The end is that of recovery and of every reader (log_scan.find_end). Damage below it is an
error, since a message is lost; the walk continues at the next complete record. At the end:

    zeros to the end of the log       no finding
    complete records after it         error: they cannot be reached
    bytes that recovery clears, and   warning: a put that a crash interrupted
    there is an abort file
    anything else                     error: it may have been a message, or no process was writing
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass

from pyengine.formats.record_case import CaseLabel
from pyengine.native.scan import sync, walk
from pyengine.storage.check.report import CheckProgress, Findings, Severity
from pyengine.storage.check.work import CheckWork, LogSegments, StoreUnderCheck
from pyengine.storage.commit_log import shown
from pyengine.storage.log_scan import LogScan, Owner
from pyengine.storage.mapped_file import MappedFile, mapped, used_end
from pyengine.storage.recovery.log import Tail, judge_tail


@dataclass(frozen=True, slots=True)
class QueueInLog:
    """The messages of one queue in the log."""

    min_queue_offset: int
    max_queue_offset: int
    count: int


@dataclass(frozen=True, slots=True)
class LogFacts:
    """The results of the log part that the other parts need."""

    is_damaged: bool
    is_cut_short: bool  # the log has non-zero bytes beyond its end
    last_store_timestamp_ms: int
    queues: dict[tuple[str, int], QueueInLog]
    further: dict[tuple[str, int], int]  # records of other queues that have an entry in this one (INNER_MULTI_DISPATCH)


def check_log(store: StoreUnderCheck, end: LogScan, progress: CheckProgress) -> LogFacts:
    """Walk the log up to `end`: report every range without a complete record, and collect those ranges in `log.lost`.

    Bytes beyond a running engine's end are not checked.
    """
    log, findings, report, watermark = store.log, store.findings, store.report, store.watermark
    reached, last_ms = log.min_offset, -1
    for segment in log.segments:
        base = segment.start_offset
        if base != reached:
            findings.error("gap", shown(segment.path, store.root), None, f"the segment before it, from {reached} on, is missing")
            log.lost.append((reached, base))
        if base >= end.end_offset:
            break
        last_ms = _check_segment(store, segment, min(base + log.size_bytes, end.end_offset), last_ms, progress)
        reached = base + log.size_bytes
    report.bytes, report.min_offset = end.end_offset - log.min_offset, log.min_offset if log.segments else -1
    report.end_offset = end.end_offset
    is_damaged = bool(log.lost)
    if watermark is not None and end.end_offset < watermark.flushed:
        is_damaged = True
        findings.error("below watermark", "commitlog", end.end_offset,
                       f"the log ends at {end.end_offset} ({end.reason}), but everything up to {watermark.flushed} had been synced")
    is_cut_short = not store.is_running and _judge_end(store, end)
    queues, further = _queues_in_log(store.work, log, findings)
    return LogFacts(is_damaged or is_cut_short, is_cut_short, last_ms, queues, further)


def _check_segment(store: StoreUnderCheck, segment: MappedFile, stop: int, last_ms: int, progress: CheckProgress) -> int:
    """Walk a segment up to `stop`; return the store time of its last message, or `last_ms`."""
    log, report, at, used = store.log, store.report, segment.start_offset, None
    while at < stop:
        start, reason = at, str(CaseLabel.RANGE_END)
        with contextlib.closing(store.work.walk(log, segment, start, stop)) as results:  # the walk ends when `progress` raises
            for result in results:
                at, reason = result.end_offset, str(result.reason)
                report.records += result.records
                report.messages += result.messages
                last_ms = result.last_store_timestamp_ms if result.messages else last_ms
                progress(at - log.min_offset, len(log.segments) * log.size_bytes)
        log.whole.append((segment, start, at))
        if reason == CaseLabel.BLANK or at >= stop:
            break
        if used is None:  # read the rest of the segment once, even if it is damaged in many places
            used = used_end(segment.path, at - segment.start_offset)
        following = _whole_record_after(segment, log.size_bytes, at, stop, used)
        _report_damage(store, segment, at, reason, following)
        log.lost.append((at, following or segment.start_offset + log.size_bytes))
        at = following or stop
    return last_ms


def _report_damage(store: StoreUnderCheck, segment: MappedFile, at: int, reason: str, following: int | None) -> None:
    ours, findings, name, position = store.watermark, store.findings, shown(segment.path, store.root), at - segment.start_offset
    after = f"whole records follow from {following} on" if following is not None else "no whole record follows in this segment"
    if ours is None or at >= ours.flushed:
        findings.error("damage", name, position, f"{reason} at {at}; {after}")
    elif at < ours.verified_from:
        findings.error("damaged before", name, position, f"{reason} at {at}, in records from before this engine, which has synced "
                       f"{ours.verified_from} to {ours.flushed}; {after}")
    else:
        findings.error("below watermark", name, position,
                       f"{reason} at {at}, below {ours.flushed}, up to which everything had been synced; {after}")


def _judge_end(store: StoreUnderCheck, end: LogScan) -> bool:
    """Report the bytes at the end and after it; True if there are non-zero ones."""
    log, findings = store.log, store.findings
    at, reason = end.end_offset, str(end.reason)
    segments = [segment for segment in log.segments if segment.start_offset + log.size_bytes > at]
    if not segments or reason == CaseLabel.BLANK:
        return False
    segment = segments[0]
    name, start = shown(segment.path, store.root), max(0, at - segment.start_offset)
    tail, used_bytes = Tail.UNKNOWN, 0
    if at >= segment.start_offset:
        tail, used_bytes = judge_tail(segment, at, reason, Owner.PYENGINE if store.is_ours else Owner.ROCKETMQ)
    after = next((found for each in segments
                  if (found := _whole_record_after(each, log.size_bytes, at, each.start_offset + log.size_bytes,
                                                   used_end(each.path, max(0, at - each.start_offset)))) is not None), None)
    is_later_used = any(used_end(later.path) for later in segments[1:])
    if after is not None:
        findings.error(
            "unreachable", name, start, f"{reason} at {at}; whole records follow from {after} on and cannot be reached"
        )
    elif not used_bytes and not is_later_used:
        return False
    elif store.was_stopped:
        findings.error("tail", name, start, f"{reason} at {at}, although the store was stopped in order")
    elif is_later_used or tail.may_be_message:
        findings.error("tail", name, start, f"{reason} at {at}: {used_bytes} bytes that may have been a message")
    else:
        findings.warning("tail", name, start, f"{reason} at {at}: a put that was cut short; `recover` clears it")
    return True


def _whole_record_after(segment: MappedFile, size_bytes: int, at: int, stop: int, used: int) -> int | None:
    """Return the first complete record of a segment after `at` and before `stop`. From its byte `used` on it has only zeros."""
    base = segment.start_offset
    start = max(base, at + 1)
    if start >= stop:
        return None
    last = min(stop, base + used)
    with mapped(segment.path) as view:
        while start < last:
            found = sync(view, base, start, last, limit=base + size_bytes)
            if found is None or walk(view, base, found, found + 1, limit=base + size_bytes).messages:
                return found
            start = found + 1
    return None


def _queues_in_log(
    work: CheckWork, log: LogSegments, findings: Findings
) -> tuple[dict[tuple[str, int], QueueInLog], dict[tuple[str, int], int]]:
    """Return each queue's messages in the log, and its entries for records of other queues; missing or duplicate offsets are errors."""
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
    for (topic, queue_id), held in sorted(found.items()):  # sorted: they were found in an order that depends on the division of the log
        if held.count != held.max_queue_offset - held.min_queue_offset + 1:
            findings.add(
                Severity.ERROR, "log gap", f"consumequeue/{topic}/{queue_id}", None,
                f"the log holds {held.count} messages of this queue with the queue offsets "
                f"{held.min_queue_offset} to {held.max_queue_offset}",
            )
    return found, further
