"""The parts of the whole-store check: every record of the log, then the queues and the index against it.

**The log**, from the first segment to the end, CRC included. The end is that of recovery and of every reader
(commit_log.find_end). Damage below it is an error, since a message is lost; the walk continues at the next complete record. At the end:

    zeros to the end of the log       no finding
    complete records after it         error: they cannot be reached
    bytes that recovery clears, and   warning: a put that a crash interrupted
    there is an abort file
    anything else                     error: it may have been a message, or no process was writing

**Queues**: every entry points to its own record, and every record has its entries. If a queue has an extension, every unit
that an entry points to must exist and belong to the entry's message. **The index**: its chains, and that every entry points
to a record with its key.

A queue is checked one file at a time; of the previous file a check only needs the log offset at which that ended (`after`), so that
files can be checked on any host and in any order, with a guess that is confirmed later.

`CheckWork` reads in this process, when a result is requested. A caller that has more processors or hosts
(pyengine.spark.store_verify) passes one that has read before; evaluation and grades stay the same.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import FormatError, StoreRefusedError
from pyengine.formats.constants import CQ_ENTRY_BYTES, LMQ_PREFIX, LMQ_QUEUE_ID, SCHEDULE_TOPIC
from pyengine.formats.consume_queue import (
    ENTRY,
    FILLER_BYTES,
    ConsumeQueueExtUnit,
    further_offset,
    is_ext_address,
    is_filler,
    is_live,
)
from pyengine.formats.index_file import IndexLayout, unpack_entry
from pyengine.formats.record import CaseLabel, WalkResult, decode_record, store_timestamp_ms
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import EntryRun, broken_chain, count_keys, count_matching_entries, first_orphan_key
from pyengine.storage.check.report import CheckReport, Severity
from pyengine.storage.checkpoint import DurableWatermark
from pyengine.storage.commit_log import (
    MISSING_SEGMENT,
    SLICE_BYTES,
    Log,
    LogDamage,
    LogScan,
    Owner,
    SegmentBytes,
    runs_of,
    shown,
    walk_pieces,
)
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.index_file import is_plausible, read_index_header
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.derived import QueueState, live_entries
from pyengine.storage.recovery.log import Tail, judge_tail
from pyengine.storage.recovery.report import Progress

# -- what reads --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueRules:
    """The severity of missing entries, and of entries beyond the log; those of a running engine are not checked."""

    missing: Severity
    beyond: Severity
    is_running: bool


@dataclass(frozen=True, slots=True)
class QueueFile:
    """One file of a queue; `name` is its path below the store's root."""

    topic: str
    queue_id: int
    path: Path
    name: str
    start_offset: int
    size_bytes: int
    is_last: bool
    previous: Path | None

    @property
    def first(self) -> int:
        """The queue offset of the file's first entry."""
        return self.start_offset // CQ_ENTRY_BYTES


class EntriesFound(NamedTuple):
    """`after`: the physical offset of the last entry; `entries`: number of correct entries, `own`: of those, of this queue's records."""

    after: int
    own: int
    entries: int
    report: CheckReport


def guess_after(log: Log, file: QueueFile) -> int:
    """Guess where in the log the previous file has ended: at its last entry, if the log still has that record."""
    if file.previous is None:
        return -1
    with open(file.previous, "rb") as opened:
        opened.seek(file.size_bytes - CQ_ENTRY_BYTES)
        data = opened.read(CQ_ENTRY_BYTES)
    entry = ENTRY.unpack(data.ljust(CQ_ENTRY_BYTES, b"\0"))
    return entry[0] if is_live(entry) and not is_filler(entry) and entry[0] >= log.min_offset else -1


def check_queue_file(log: Log, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
    """Check every entry; `after`: the physical offset of the last entry of the previous files, -1 if there is none."""
    report = CheckReport()
    count, _ = live_entries(file.path, file.size_bytes)
    used = used_end(file.path, count * CQ_ENTRY_BYTES)
    if used > count * CQ_ENTRY_BYTES or (count * CQ_ENTRY_BYTES < file.size_bytes and not file.is_last):
        report.error("queue hole", file.name, count * CQ_ENTRY_BYTES,
                       f"entry {file.first + count} is empty, but later entries exist")
    with open(file.path, "rb") as opened:
        entries = opened.read(count * CQ_ENTRY_BYTES)
    count = len(entries) // CQ_ENTRY_BYTES
    at = own = further = 0
    while entries.startswith(FILLER_BYTES, at * CQ_ENTRY_BYTES):
        at += 1
    # Entries of records that the cleaner has deleted come first.
    at = bisect_left(range(count), log.min_offset, lo=min(at, count), key=lambda n: _offset(entries, n))
    while at < count:
        offset, matching = _offset(entries, at), 0
        segment = log.view_at(offset)
        if segment is not None:
            base, limit, view = segment
            matching = count_matching_entries(
                view, base, limit, EntryRun(file.topic, file.queue_id, file.first + at, memoryview(entries)[at * CQ_ENTRY_BYTES :]),
                after=after, check_tags=file.topic != SCHEDULE_TOPIC)
        elif offset >= log.end:
            if not rules.is_running:
                report.add(rules.beyond, "entry beyond the log", file.name, at * CQ_ENTRY_BYTES,
                             f"entry {file.first + at} points to {offset}, beyond the end of the log")
            break
        if matching:
            own += matching
            at += matching
            after = _offset(entries, at - 1)
            if at == count:
                break
            offset = _offset(entries, at)
            if segment is not None and not segment[0] <= offset < segment[1]:
                continue
        if log.is_lost(offset):
            pass
        elif _is_multi_dispatched(log, file, entries, at, after):
            further += 1
        else:
            report.error("wrong entry", file.name, at * CQ_ENTRY_BYTES,
                           f"entry {file.first + at} does not point to its message (log offset {offset})")
        after = max(after, offset)
        at += 1
    return EntriesFound(after, own, own + further, report)


def _is_multi_dispatched(log: Log, file: QueueFile, entries: bytes, at: int, after: int) -> bool:
    """Whether it is a light queue's entry (docs/formats.md section 8.6) for a record of another queue that names this queue.

    Its offset may be higher than the record's: RocketMQ skips one if a record names the queue twice, and still appends the entry.
    """
    offset, size_bytes, _ = ENTRY.unpack_from(entries, at * CQ_ENTRY_BYTES)
    segment = log.view_at(offset)
    if segment is None or offset <= after:
        return False
    try:
        message = decode_record(segment[2], offset - segment[0])
    except FormatError:
        return False
    number = further_offset(message, file.topic, file.queue_id)
    return message.size_bytes == size_bytes and number is not None and number >= file.first + at


def _offset(entries: bytes, number: int) -> int:
    offset: int = ENTRY.unpack_from(entries, number * CQ_ENTRY_BYTES)[0]
    return offset


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The entries [first, end) of an index file of `count` entries."""

    path: Path
    name: str
    layout: IndexLayout
    count: int
    first: int
    end: int


class KeysFound(NamedTuple):
    """The number of entries that point to a record with their key; `beyond`: the first entry beyond the log's end, 0 for none."""

    keys: int
    beyond: int
    report: CheckReport


class CheckWork:
    """Reads in this process, one piece after the other."""

    def __init__(self) -> None:
        self._whole: list[tuple[MappedFile, int, int]] = []  # [start, end) of a segment that was walked

    def begin(self, log: Log, index_files: Sequence[Path], layout: IndexLayout) -> None:
        """Prepare; called before the first read, when the log's end is known."""

    def log_is_known(self, log: Log, queues: Sequence[QueueState], rules: QueueRules, root: Path) -> None:
        """Note that the log has been walked; the check of queues and index comes next."""

    def walk(self, log: Log, segment: MappedFile, start: int, stop: int) -> Generator[WalkResult, None, None]:
        """Walk from the record at `start`; yield consecutive results, of which the last has the reason for the end."""
        at = start
        with mapped(segment.path) as view:
            view.madvise(mmap.MADV_SEQUENTIAL)
            pieces = [(min(at + SLICE_BYTES, stop), False) for at in range(start, stop, SLICE_BYTES)]
            with contextlib.closing(walk_pieces(SegmentBytes(view, segment.start_offset), start, pieces, limit=stop)) as results:
                for result in results:  # the walk ends with its caller
                    yield result
                    at = result.end_offset
        self._whole.append((segment, start, at))

    def touched(self, log: Log) -> Iterator[Sequence[TouchedQueue]]:
        """Yield the queues of the whole log, range by range, with the `further` entries of records in other queues."""
        for base, start, stop, view in self.ranges(0):
            yield touched_queues(view, base, start, stop, apart=True).queues

    def ranges(self, start: int) -> Iterator[tuple[int, int, int, mmap.mmap]]:
        """Yield (base, from, to, bytes) for each walked part from `start` on."""
        for segment, first, last in self._whole:
            if max(start, first) < last:
                with mapped(segment.path) as view:
                    yield segment.start_offset, max(start, first), last, view

    def queue_file(self, log: Log, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
        """Check the entries of one file of a queue; the previous file ended at the record `after`."""
        return check_queue_file(log, file, rules, after)

    def broken_chain(self, path: Path, layout: IndexLayout, count: int) -> int:
        """Find a broken chain of an index file; see native.scan."""
        with mapped(path) as view:
            return broken_chain(view, layout, count)

    def index_parts(self, path: Path, name: str, layout: IndexLayout, count: int) -> Sequence[IndexPart]:
        """Return all entries of an index file as parts, in order."""
        return [IndexPart(path, name, layout, count, 1, count)]

    def keys(self, log: Log, part: IndexPart) -> KeysFound:
        """Compare the entries of one part with the log."""
        return check_index_part(log, part)

    def count_keys(self, log: Log, start: int) -> int:
        """Return the number of keys of the records from `start` on."""
        return sum(count_keys(view, base, first, last) for base, first, last, view in self.ranges(start))


def check_index_part(log: Log, part: IndexPart) -> KeysFound:
    """Count the entries that point to a record with their key. Entries are in the order of the log."""
    report, found = CheckReport(), 0
    with mapped(part.path) as view:

        def offset_of(number: int) -> int:
            return unpack_entry(view, part.layout.entry_at(number)).physical_offset

        at = max(part.first, 1 + bisect_left(range(1, part.count), log.min_offset, key=offset_of))
        while at < part.end:
            offset = offset_of(at)
            segment = log.view_at(offset)
            if segment is None and offset >= log.end:
                return KeysFound(found, at, report)
            reached = at
            if segment is not None:
                base, limit, log_view = segment
                reached = first_orphan_key(log_view, base, limit, view, part.layout, at, part.end)
            found += reached - at
            if reached == part.end:
                break
            if reached == at and log.is_lost(offset):
                reached += 1
            elif reached == at:
                report.error("wrong key", part.name, part.layout.entry_at(at),
                               f"entry {at} names {offset}, where no message has its key")
                reached += 1
            at = reached
    return KeysFound(found, 0, report)


@dataclass(frozen=True, slots=True)
class StoreUnderCheck:
    """The context of all parts of a check: the store, how it was stopped, its reader, and the report."""

    store: MessageStore
    log: Log
    work: CheckWork
    report: CheckReport
    watermark: DurableWatermark | None  # None in RocketMQ's store
    was_stopped: bool  # it was stopped in order, or it is running
    is_running: bool

    @property
    def root(self) -> Path:
        return self.store.root

    @property
    def is_ours(self) -> bool:
        return self.watermark is not None


# -- what is judged ------------------------------------------------------------------


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


def check_log(store: StoreUnderCheck, end: LogScan, progress: Progress) -> LogFacts:
    """Walk the log up to `end`: report every range without a complete record, and collect those ranges in `log.lost`.

    Bytes beyond a running engine's end are not checked.
    """
    log, report, watermark = store.log, store.report, store.watermark
    reached, last_ms = max(log.min_offset, 0), -1
    report.bytes, report.min_offset, report.end_offset = end.end_offset - reached, log.min_offset, end.end_offset
    for segment in log.segments:
        base = segment.start_offset
        if base != reached:
            report.error("gap", shown(segment.path, store.root), None, f"the segment before it, from {reached} on, is missing")
            log.lost.append(LogDamage(reached, base, MISSING_SEGMENT))
        if base >= end.end_offset:
            break
        last_ms = _check_segment(store, segment, min(base + log.size_bytes, end.end_offset), last_ms, progress)
        reached = base + log.size_bytes
    is_damaged = bool(log.lost)
    if watermark is not None and end.end_offset < watermark.flushed:
        is_damaged = True
        report.error("below watermark", "commitlog", end.end_offset,
                       f"the log ends at {end.end_offset} ({end.reason}), but everything up to {watermark.flushed} had been synced")
    is_cut_short = not store.is_running and _judge_end(store, end)
    queues, further = _queues_in_log(store.work, log, report)
    return LogFacts(is_damaged or is_cut_short, is_cut_short, last_ms, queues, further)


def _check_segment(store: StoreUnderCheck, segment: MappedFile, stop: int, last_ms: int, progress: Progress) -> int:
    """Walk a segment up to `stop`; return the store time of its last message, or `last_ms`."""
    log, report, used = store.log, store.report, -1

    def next_whole(found: SegmentBytes, damage: LogDamage, limit: int) -> int | None:
        nonlocal used
        if used < 0:  # read the rest of the segment once, even if it is damaged in many places
            used = found.base + used_end(segment.path, damage.start - found.base)
        return _whole_record_after(found, damage.start, min(damage.end, used), found.base + log.size_bytes)

    def lost(damage: LogDamage) -> None:
        _report_damage(store, segment, damage, stop)
        log.lost.append(damage)

    with log.open(segment) as found:
        for piece in runs_of(found, found.base, stop, stop, next_whole):
            if isinstance(piece, LogDamage):
                lost(piece)
                continue
            with contextlib.closing(store.work.walk(log, segment, piece.start, stop)) as results:  # the walk ends when `progress` raises
                for result in results:
                    piece.stopped(result.end_offset, str(result.reason))
                    report.records += result.records
                    report.messages += result.messages
                    last_ms = result.last_store_timestamp_ms if result.messages else last_ms
                    progress(result.end_offset - max(log.min_offset, 0), len(log.segments) * log.size_bytes)
            if piece.reason == CaseLabel.RANGE_END and piece.reached < stop:  # too few bytes to be read as a record's
                lost(LogDamage(piece.reached, stop, piece.reason))
    return last_ms


def _report_damage(store: StoreUnderCheck, segment: MappedFile, damage: LogDamage, stop: int) -> None:
    ours, report, name, at, reason = store.watermark, store.report, shown(segment.path, store.root), damage.start, damage.reason
    position = at - segment.start_offset
    after = f"whole records follow from {damage.end} on" if damage.end < stop else "no whole record follows in this segment"
    if ours is None or at >= ours.flushed:
        report.error("damage", name, position, f"{reason} at {at}; {after}")
    elif at < ours.verified_from:
        report.error("damaged before", name, position, f"{reason} at {at}, in records from before this engine, which has synced "
                       f"{ours.verified_from} to {ours.flushed}; {after}")
    else:
        report.error("below watermark", name, position,
                       f"{reason} at {at}, below {ours.flushed}, up to which everything had been synced; {after}")


def _judge_end(store: StoreUnderCheck, end: LogScan) -> bool:
    """Report the bytes at the end and after it; True if there are non-zero ones."""
    log, report = store.log, store.report
    at, reason = end.end_offset, str(end.reason)
    segments = [segment for segment in log.segments if segment.start_offset + log.size_bytes > at]
    if not segments or reason == CaseLabel.BLANK:
        return False
    segment = segments[0]
    name, start = shown(segment.path, store.root), max(0, at - segment.start_offset)
    tail, used_bytes = Tail.UNKNOWN, 0
    if at >= segment.start_offset:
        tail, used_bytes = judge_tail(segment, at, reason, Owner.PYENGINE if store.is_ours else Owner.ROCKETMQ)

    def whole_after(each: MappedFile) -> int | None:
        with log.open(each) as found:
            used = found.base + used_end(each.path, max(0, at - found.base))
            return _whole_record_after(found, at, used, found.base + log.size_bytes)

    after = next((found for each in segments if (found := whole_after(each)) is not None), None)
    is_later_used = any(used_end(later.path) for later in segments[1:])
    if after is not None:
        report.error(
            "unreachable", name, start, f"{reason} at {at}; whole records follow from {after} on and cannot be reached"
        )
    elif not used_bytes and not is_later_used:
        return False
    elif store.was_stopped:
        report.error("tail", name, start, f"{reason} at {at}, although the store was stopped in order")
    elif is_later_used or tail.may_be_message:
        report.error("tail", name, start, f"{reason} at {at}: {used_bytes} bytes that may have been a message")
    else:
        report.warning("tail", name, start, f"{reason} at {at}: a put that was cut short; `recover` clears it")
    return True


def _whole_record_after(found: SegmentBytes, at: int, stop: int, limit: int) -> int | None:
    """Return the first complete record of a segment after `at` and before `stop`."""
    start = max(found.base, at + 1)
    while start < stop:
        following = found.find_record(start, stop, limit)
        if following is None or found.walk(following, following + 1, limit=limit).messages:
            return following
        start = following + 1
    return None


def _queues_in_log(
    work: CheckWork, log: Log, report: CheckReport
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
            report.add(
                Severity.ERROR, "log gap", f"consumequeue/{topic}/{queue_id}", None,
                f"the log holds {held.count} messages of this queue with the queue offsets "
                f"{held.min_queue_offset} to {held.max_queue_offset}",
            )
    return found, further


def queue_rules(store: StoreUnderCheck, facts: LogFacts) -> QueueRules:
    """Return how severe missing entries are: RocketMQ tolerates a queue that has lost some or whose topic was deleted."""
    settled_by_recovery = not store.was_stopped or facts.is_damaged
    return QueueRules(
        missing=Severity.ERROR if store.is_ours and not settled_by_recovery else Severity.WARNING,
        beyond=Severity.WARNING if settled_by_recovery or not store.is_ours else Severity.ERROR,
        is_running=store.is_running,
    )


def check_queues(
    store: StoreUnderCheck, facts: LogFacts, rules: QueueRules, queues: list[QueueState], *, expects_light_queues: bool
) -> None:
    """Check all queues on the disk; then report queues and further entries (docs/formats.md section 8.6) that only the log has.

    If the store has no light queue, they are checked only if expected: RocketMQ may have been set to make none.
    """
    further: Counter[tuple[str, int]] = Counter()  # entries of other queues' records, by queue
    for queue in queues:
        # A light queue has one key for all queue ids that RocketMQ may use (consume_queue.further_offset).
        key = queue.topic, LMQ_QUEUE_ID if queue.topic.startswith(LMQ_PREFIX) else queue.queue_id
        further[key] += _check_queue(store, rules, queue, facts.queues.get((queue.topic, queue.queue_id)))
    if store.is_running:
        return
    known = {(queue.topic, queue.queue_id) for queue in queues}
    for (topic, queue_id), in_log in sorted(facts.queues.items()):
        if (topic, queue_id) not in known:
            store.report.add(rules.missing, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                               f"the log holds {in_log.count} messages of this queue, which has no files")
    if expects_light_queues or +further:
        for (topic, queue_id), count in sorted(facts.further.items()):
            have = further[topic, queue_id]
            if have < count:
                store.report.add(
                    rules.missing, "missing entries", f"consumequeue/{topic}/{queue_id}", None,
                    f"only {have} of the {count} messages that name this queue as a further one have an entry in it")


def _check_queue(store: StoreUnderCheck, rules: QueueRules, queue: QueueState, in_log: QueueInLog | None) -> int:
    """Check one queue; return the number of its entries for records of other queues."""
    store.report.queues += 1
    expected_start = queue.files[0].start_offset
    after, own_entries, further = -1, 0, 0
    for file in queue_files(store.root, queue):
        if file.start_offset != expected_start:
            store.report.error("queue gap", file.name, None, f"the file before it, {expected_start:020d}, is missing")
        expected_start = file.start_offset + queue.size_bytes
        found = store.work.queue_file(store.log, file, rules, after)
        store.report.take(found.report)
        store.report.queue_entries += found.entries
        own_entries += found.own
        further += found.entries - found.own
        after = found.after
    if in_log is not None and own_entries < in_log.count and not store.is_running:
        store.report.add(
            rules.missing, "missing entries", f"consumequeue/{queue.topic}/{queue.queue_id}", None,
            f"only {own_entries} of the {in_log.count} messages that the log holds for this queue have an entry")
    return further


def queue_files(root: Path, queue: QueueState) -> Iterator[QueueFile]:
    """Yield the files of a queue, in order."""
    previous = None
    for number, file in enumerate(queue.files):
        yield QueueFile(queue.topic, queue.queue_id, file.path, str(file.path.relative_to(root)),
                        file.start_offset, queue.size_bytes, number + 1 == len(queue.files), previous)
        previous = file.path


_TIME_READABLE_BYTES = 68 + 8  # after a 20-byte host


def check_extensions(store: StoreUnderCheck, queues: Sequence[QueueState]) -> None:
    """Check the extensions of all queues that have one; for other queues it only tests for the folder."""
    root, report, paths = store.root, store.report, store.store
    if not paths.consume_queue_ext.is_dir():
        return
    cache = MappingCache()
    for queue in queues:
        reader = ConsumeQueue(
            queue.topic, queue.queue_id, MappedFileQueue(queue.folder, queue.size_bytes, cache),
            MappedFileQueue(paths.queue_ext_folder(queue.topic, queue.queue_id), paths.queue_ext_file_bytes, cache),
        )
        try:
            _check_units(root, queue, reader, store.log, report)
        except StoreRefusedError as error:
            report.error("extension", f"consumequeue_ext/{queue.topic}/{queue.queue_id}", None,
                           str(error).replace(f"{root}/", ""))


def _check_units(root: Path, queue: QueueState, reader: ConsumeQueue, log: Log, report: CheckReport) -> None:
    for file in queue.files:
        name = str(file.path.relative_to(root))
        used = min(queue.end - file.start_offset, queue.size_bytes)
        if used <= 0:
            break
        with open(file.path, "rb") as opened:
            entries = opened.read(used)
        for at, (offset, _, tags_code) in enumerate(ENTRY.iter_unpack(entries[: used - used % CQ_ENTRY_BYTES])):
            if is_ext_address(tags_code) and log.min_offset <= offset < log.end:
                wrong = _wrong(reader.ext_unit(tags_code), offset, log)
                if wrong:
                    report.error("extension", name, at * CQ_ENTRY_BYTES,
                                   f"the unit that entry {file.start_offset // CQ_ENTRY_BYTES + at} names {wrong}")


def _wrong(unit: ConsumeQueueExtUnit | None, offset: int, log: Log) -> str:
    if unit is None:
        return "is not there"
    segment = log.view_at(offset)
    if segment is None:
        return ""
    base, _, view = segment
    if offset - base + _TIME_READABLE_BYTES > len(view):
        return ""  # no record begins there: the check of the entries reports that
    stored_ms = store_timestamp_ms(view, offset - base)
    if unit.store_timestamp_ms == stored_ms:
        return ""
    return f"has the store time {unit.store_timestamp_ms}, its message {stored_ms}"


def check_index(store: StoreUnderCheck, files: Sequence[Path]) -> None:
    """Check the index files that `work` got at the beginning: a running engine creates and deletes others meanwhile."""
    log, work, report, layout = store.log, store.work, store.report, store.store.geometry.index_layout
    covered_from, keys = None, 0
    for path in files:
        if store.is_running and not path.exists():
            continue
        store.report.index_files += 1
        name = str(path.relative_to(store.root))
        if path.stat().st_size != layout.size_bytes:
            report.error("index length", name, None,
                           f"{path.stat().st_size} bytes, not {layout.size_bytes} as its slots and entries need")
            continue
        header = read_index_header(path)
        if not is_plausible(header, layout):
            report.error("index header", name, 0, f"the header makes no sense: {header}")
            continue
        broken = work.broken_chain(path, layout, header.index_count)
        if broken:
            where = layout.entry_at(broken) if broken > 0 else layout.slot_at(-1 - broken)
            what = f"entry {broken}" if broken > 0 else f"slot {-1 - broken}"
            report.error("index chain", name, where, f"{what} is not chained as its hash wants it")
            continue
        if covered_from is None and header.index_count > 1:
            covered_from = header.begin_physical_offset
        for part in work.index_parts(path, name, layout, header.index_count):
            found = work.keys(log, part)
            report.take(found.report)
            store.report.index_keys += found.keys
            keys += found.keys
            if found.beyond:
                if not store.is_running:  # a running engine may have filled the file during the check
                    report.warning("key beyond the log", name, layout.entry_at(found.beyond),
                                     f"{header.index_count - found.beyond} entries name records after the log's end, {log.end}")
                break
    if covered_from is None or store.is_running:
        return
    expected = work.count_keys(log, max(covered_from, log.min_offset))
    if keys < expected:
        severity = Severity.ERROR if store.is_ours and store.was_stopped else Severity.WARNING
        report.add(severity, "missing keys", "index", None,
                     f"the index holds {keys} of the {expected} keys that the log has from {covered_from} on")
