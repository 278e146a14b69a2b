"""The parts of the whole-store check: every record of the log, then the queues and the index against it.

The log's end is that of recovery and of every reader (commit_log.find_end). Damage below it is an error, since a message is lost; the
walk continues at the next complete record. Of a queue every entry must point to its own record, and every record must have its entries.

All reading is done in pieces, one for each segment, file of a queue and file of the index: a piece depends on the files alone, so it
may run on any host, in any order (`RunPieces`; pyengine.spark.store_verify). The judgement of what the pieces have found is here.
"""

from __future__ import annotations

import contextlib
import functools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from pyengine.formats.record import CaseLabel, decode_record, store_timestamp_ms
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import EntryRun, broken_chain, count_keys, count_matching_entries, first_orphan_key
from pyengine.storage.check.report import CheckReport, Severity, counted
from pyengine.storage.checkpoint import DurableWatermark
from pyengine.storage.commit_log import (
    SLICE_BYTES,
    Log,
    LogDamage,
    LogScan,
    SegmentBytes,
    next_whole_record,
    runs_of,
    shown,
    walk_pieces,
)
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.index_file import is_plausible, read_index_header
from pyengine.storage.mapped_file import MappedFile, MappedFileQueue, MappingCache, mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.derived import QueueState, live_entries, read_entry
from pyengine.storage.recovery.log import Tail, judge_tail
from pyengine.storage.recovery.report import MISSING_SEGMENT, Progress

_FILE_COST = 64 << 10   # opening a file, as bytes
_LOG_PER_ENTRY = 256    # bytes of the log that are read for an entry of the index
HEADER_CHANGES_S = 1.0  # a running engine has changed all fields of an index file's header long before
HEADER_POLL_INTERVAL_S = 0.01


class CheckPiece(NamedTuple):
    """A piece of the reading: about how many bytes it reads, and what reads them. `run` and its outcome can be pickled."""

    cost: int
    run: Callable[[Log], Any]


Queues = dict[tuple[str, int], TouchedQueue]

# Runs pieces and gives their outcomes in order.
RunPieces = Callable[[Sequence[CheckPiece], Log], Iterator[Any]]


def run_here(pieces: Sequence[CheckPiece], log: Log) -> Iterator[Any]:
    """Run each piece when its outcome is asked for, in this process."""
    return (piece.run(log) for piece in pieces)


@dataclass(slots=True)
class StoreUnderCheck:
    """A store, how it was stopped, and what the check of its log has found, which the other parts need."""

    store: MessageStore
    log: Log
    run: RunPieces
    report: CheckReport
    watermark: DurableWatermark | None  # None in RocketMQ's store
    was_stopped: bool  # it was stopped in order, or it is running
    is_running: bool
    is_damaged: bool = False
    is_cut_short: bool = False  # the log has non-zero bytes beyond its end
    last_store_timestamp_ms: int = -1
    queues: Queues = field(default_factory=dict)  # the messages of each queue in the log
    whole: list[tuple[MappedFile, list[tuple[int, int]]]] = field(default_factory=list)  # ranges of whole records

    @property
    def root(self) -> Path:
        return self.store.root

    @property
    def is_ours(self) -> bool:
        return self.watermark is not None

    @property
    def settled_by_recovery(self) -> bool:
        """Whether recovery is expected to change queues."""
        return not self.was_stopped or self.is_damaged or self.is_cut_short

    @property
    def missing(self) -> Severity:
        """How severe missing entries are: RocketMQ tolerates a queue that has lost some or whose topic was deleted."""
        return Severity.ERROR if self.is_ours and not self.settled_by_recovery else Severity.WARNING

    @property
    def beyond(self) -> Severity | None:
        """How severe entries beyond the log are; None: those of a running engine are not checked."""
        if self.is_running:
            return None
        return Severity.WARNING if self.settled_by_recovery or not self.is_ours else Severity.ERROR


# -- the log -------------------------------------------------------------------------


class SegmentFound(NamedTuple):
    """What a walk of a segment has found: the ranges of whole records, those without, and the queues of the records."""

    records: int
    messages: int
    last_ms: int
    whole: list[tuple[int, int]]
    lost: list[LogDamage]
    queues: Queues


def walk_segment(segment: MappedFile, stop: int, log: Log) -> SegmentFound:
    """Walk a segment up to `stop`, over damage."""
    records = messages = 0
    last_ms = used = -1
    whole: list[tuple[int, int]] = []
    lost: list[LogDamage] = []
    queues: Queues = {}

    def next_whole(found: SegmentBytes, damage: LogDamage, limit: int) -> int | None:
        nonlocal used
        if used < 0:  # read the rest of the segment once, even if it is damaged in many places
            used = found.base + used_end(segment.path, damage.start - found.base)
        return next_whole_record(found, replace(damage, end=min(damage.end, used)), found.base + log.size_bytes)

    with log.open(segment) as found:
        for piece in runs_of(found, found.base, stop, stop, next_whole):
            if isinstance(piece, LogDamage):
                lost.append(piece)
                continue
            slices = [(min(at + SLICE_BYTES, stop), False) for at in range(piece.start, stop, SLICE_BYTES)]
            with contextlib.closing(walk_pieces(found, piece.start, slices, limit=stop)) as results:  # the walk ends with its caller
                for result in results:
                    piece.stopped(result.end_offset, str(result.reason))
                    records += result.records
                    messages += result.messages
                    last_ms = result.last_store_timestamp_ms if result.messages else last_ms
            whole.append((piece.start, piece.reached))
            _add(queues, touched_queues(found.view, found.base, piece.start, piece.reached, apart=True).queues)
            if piece.reason == CaseLabel.RANGE_END and piece.reached < stop:  # too few bytes to be read as a record's
                lost.append(LogDamage(piece.reached, stop, piece.reason))
    return SegmentFound(records, messages, last_ms, whole, lost, queues)


def check_log(store: StoreUnderCheck, end: LogScan, progress: Progress) -> None:
    """Walk the log up to `end`: report every range without a complete record, and collect those ranges in `log.lost`.

    Bytes beyond a running engine's end are not checked.
    """
    log, report, watermark, size_bytes = store.log, store.report, store.watermark, store.log.size_bytes
    reached = max(log.min_offset, 0)
    report.bytes, report.min_offset, report.end_offset = end.end_offset - reached, log.min_offset, end.end_offset
    stops = [(segment, min(segment.start_offset + size_bytes, end.end_offset)) for segment in log.segments]
    outcomes = store.run([CheckPiece(stop - segment.start_offset, functools.partial(walk_segment, segment, stop))
                          for segment, stop in stops if segment.start_offset < stop], log)
    for number, (segment, stop) in enumerate(stops, 1):
        base = segment.start_offset
        if base != reached:
            report.error("gap", shown(segment.path, store.root), None, f"the segment before it, from {reached} on, is missing")
            log.lost.append(LogDamage(reached, base, MISSING_SEGMENT))
        if base >= end.end_offset:
            break
        found: SegmentFound = next(outcomes)
        for damage in found.lost:
            _report_damage(store, segment, damage, stop)
        log.lost.extend(found.lost)
        report.records += found.records
        report.messages += found.messages
        store.last_store_timestamp_ms = found.last_ms if found.last_ms >= 0 else store.last_store_timestamp_ms
        store.whole.append((segment, found.whole))
        _add(store.queues, found.queues.values())
        reached = base + size_bytes
        progress(number * size_bytes, len(log.segments) * size_bytes)
    store.is_damaged = bool(log.lost)
    if watermark is not None and end.end_offset < watermark.flushed:
        store.is_damaged = True
        report.error("below watermark", "commitlog", end.end_offset,
                       f"the log ends at {end.end_offset} ({end.reason}), but everything up to {watermark.flushed} had been synced")
    store.is_cut_short = not store.is_running and _judge_end(store, end)
    for (topic, queue_id), held in sorted(store.queues.items()):
        if held.count and held.count != held.max_queue_offset - held.min_queue_offset + 1:
            report.error("log gap", f"consumequeue/{topic}/{queue_id}", None,
                         f"the log holds {counted(held.count, 'message')} of this queue with the queue offsets "
                         f"{held.min_queue_offset} to {held.max_queue_offset}")


def _add(queues: Queues, later: Iterable[TouchedQueue]) -> None:
    """Add the entries that a later range of the log has in its queues; a range without own messages of a queue has no offsets."""
    for queue in later:
        key = queue.topic, queue.queue_id
        both = [queues[key], queue] if key in queues else [queue]
        owners = [one for one in both if one.count] or both
        queues[key] = queue._replace(
            min_queue_offset=min(one.min_queue_offset for one in owners), max_queue_offset=max(one.max_queue_offset for one in owners),
            count=sum(one.count for one in both), further=sum(one.further for one in both))


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
        tail, used_bytes = judge_tail(segment, at, reason, is_ours=store.is_ours)

    def whole_after(each: MappedFile) -> int | None:
        with log.open(each) as found:
            used = found.base + used_end(each.path, max(0, at - found.base))
            return next_whole_record(found, LogDamage(max(at, found.base - 1), used, reason), found.base + log.size_bytes)

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


# -- queues --------------------------------------------------------------------------


class EntriesFound(NamedTuple):
    """`entries`: number of correct entries, `own`: of those, of this queue's records."""

    own: int
    entries: int
    report: CheckReport


def _end_of_previous(queue: QueueState, log: Log) -> int:
    """Return the physical offset of the last entry of the file before the last one, -1 if none of the log is there."""
    if len(queue.files) == 1:
        return -1
    entry = read_entry(queue.files[-2].path, queue.size_bytes - CQ_ENTRY_BYTES)
    return entry[0] if is_live(entry) and not is_filler(entry) and log.min_offset <= entry[0] < log.end else -1


def check_queue_file(queue: QueueState, is_newest: bool, beyond: Severity | None, log: Log) -> EntriesFound:
    """Check every entry of the last of these files of a queue; the one before it, if there is one, has what comes before."""
    path, start_offset = queue.files[-1]
    name, first = f"consumequeue/{queue.topic}/{queue.queue_id}/{path.name}", start_offset // CQ_ENTRY_BYTES
    report = CheckReport()
    count, _ = live_entries(path, queue.size_bytes)
    used = used_end(path, count * CQ_ENTRY_BYTES)
    if used > count * CQ_ENTRY_BYTES:  # or a running engine has appended meanwhile
        count, _ = live_entries(path, queue.size_bytes)
    if used > count * CQ_ENTRY_BYTES or (count * CQ_ENTRY_BYTES < queue.size_bytes and not is_newest):
        report.error("queue hole", name, count * CQ_ENTRY_BYTES,
                       f"entry {first + count} is empty, but later entries exist")
    with open(path, "rb") as opened:
        entries = opened.read(count * CQ_ENTRY_BYTES)
    count, after = len(entries) // CQ_ENTRY_BYTES, _end_of_previous(queue, log)
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
                view, base, limit, EntryRun(queue.topic, queue.queue_id, first + at, memoryview(entries)[at * CQ_ENTRY_BYTES :]),
                after=after, check_tags=queue.topic != SCHEDULE_TOPIC)
        elif offset >= log.end:
            if beyond is not None:
                report.add(beyond, "entry beyond the log", name, at * CQ_ENTRY_BYTES,
                             f"entry {first + at} points to {offset}, beyond the end of the log")
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
        elif _is_multi_dispatched(log, queue, first, entries, at, after):
            further += 1
        else:
            report.error("wrong entry", name, at * CQ_ENTRY_BYTES,
                           f"entry {first + at} does not point to its message (log offset {offset})")
        after = max(after, offset)
        at += 1
    return EntriesFound(own, own + further, report)


def _is_multi_dispatched(log: Log, queue: QueueState, first: int, entries: bytes, at: int, after: int) -> bool:
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
    number = further_offset(message, queue.topic, queue.queue_id)
    return message.size_bytes == size_bytes and number is not None and number >= first + at


def _offset(entries: bytes, number: int) -> int:
    offset: int = ENTRY.unpack_from(entries, number * CQ_ENTRY_BYTES)[0]
    return offset


def queue_pieces(store: StoreUnderCheck, queues: Sequence[QueueState]) -> list[CheckPiece]:
    """Return the pieces of the check of these queues, in order."""
    pieces = []
    for queue in queues:
        for number in range(len(queue.files)):
            near = replace(queue, files=queue.files[max(0, number - 1) : number + 1])
            pieces.append(CheckPiece(_FILE_COST + queue.size_bytes, functools.partial(
                check_queue_file, near, number + 1 == len(queue.files), store.beyond)))
    return pieces


def check_queues(
    store: StoreUnderCheck, queues: Sequence[QueueState], outcomes: Iterator[EntriesFound], *, expects_light_queues: bool
) -> None:
    """Check all queues on the disk; then report queues and further entries (docs/formats.md section 8.6) that only the log has.

    `outcomes`: those of queue_pieces(). If the store has no light queue, they are checked only if expected: RocketMQ may have been
    set to make none.
    """
    report, further = store.report, Counter[tuple[str, int]]()  # entries of other queues' records, by queue
    for queue in queues:
        report.queues += 1
        own, expected_start = 0, queue.files[0].start_offset
        # A light queue has one key for all queue ids that RocketMQ may use (consume_queue.further_offset).
        key = queue.topic, LMQ_QUEUE_ID if queue.topic.startswith(LMQ_PREFIX) else queue.queue_id
        for file in queue.files:
            if file.start_offset != expected_start:
                report.error("queue gap", str(file.path.relative_to(store.root)), None,
                             f"the file before it, {expected_start:020d}, is missing")
            expected_start = file.start_offset + queue.size_bytes
            found = next(outcomes)
            report.take(found.report)
            report.queue_entries += found.entries
            own += found.own
            further[key] += found.entries - found.own
        in_log = store.queues.get((queue.topic, queue.queue_id))
        if in_log is not None and own < in_log.count and not store.is_running:
            report.add(store.missing, "missing entries", f"consumequeue/{queue.topic}/{queue.queue_id}", None,
                       f"only {own} of the {counted(in_log.count, 'message')} that the log holds for this queue have an entry")
    if store.is_running:
        return
    known, in_order = {(queue.topic, queue.queue_id) for queue in queues}, sorted(store.queues.items())
    for (topic, queue_id), in_log in in_order:
        if in_log.count and (topic, queue_id) not in known:
            report.add(store.missing, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                       f"the log holds {counted(in_log.count, 'message')} of this queue, which has no files")
    for (topic, queue_id), in_log in in_order if expects_light_queues or +further else ():
        if (have := further[topic, queue_id]) < in_log.further:
            report.add(store.missing, "missing entries", f"consumequeue/{topic}/{queue_id}", None,
                       f"only {have} of the {counted(in_log.further, 'message')} with this queue as a further one have an entry in it")


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


# -- the index -----------------------------------------------------------------------


class KeysFound(NamedTuple):
    """The number of entries that point to a record with their key; where the file's records begin, if that is known."""

    keys: int
    covered_from: int | None
    report: CheckReport


def check_index_file(path: Path, layout: IndexLayout, is_running: bool, log: Log) -> KeysFound | None:
    """Check an index file; None if a running engine has deleted it."""
    if is_running and not path.exists():
        return None
    report, size_bytes, name = CheckReport(), path.stat().st_size, f"index/{path.name}"
    if size_bytes != layout.size_bytes:
        report.error("index length", name, None, f"{size_bytes} bytes, not {layout.size_bytes} as its slots and entries need")
        return KeysFound(0, None, report)
    header, until_s = read_index_header(path), time.monotonic() + HEADER_CHANGES_S
    while is_running and not is_plausible(header, layout) and time.monotonic() < until_s:  # a put changes one field after another
        time.sleep(HEADER_POLL_INTERVAL_S)
        header = read_index_header(path)
    if not is_plausible(header, layout):
        report.error("index header", name, 0, f"the header makes no sense: {header}")
        return KeysFound(0, None, report)
    with mapped(path) as view:
        broken = broken_chain(view, layout, header.index_count, may_grow=is_running)
    if broken:
        where = layout.entry_at(broken) if broken > 0 else layout.slot_at(-1 - broken)
        what = f"entry {broken}" if broken > 0 else f"slot {-1 - broken}"
        report.error("index chain", name, where, f"{what} is not chained as its hash wants it")
        return KeysFound(0, None, report)
    keys, beyond = _compare_keys(path, name, layout, header.index_count, report, log)
    if beyond and not is_running:  # a running engine may have filled the file during the check
        report.warning("key beyond the log", name, layout.entry_at(beyond),
                       f"{header.index_count - beyond} entries name records after the log's end, {log.end}")
    return KeysFound(keys, header.begin_physical_offset if header.index_count > 1 else None, report)


def _compare_keys(path: Path, name: str, layout: IndexLayout, count: int, report: CheckReport, log: Log) -> tuple[int, int]:
    """Return (number of entries that point to a record with their key, the first entry beyond the log or 0)."""
    found = 0
    with mapped(path) as view:

        def offset_of(number: int) -> int:
            return unpack_entry(view, layout.entry_at(number)).physical_offset

        # Entries are in the order of the log.
        at = 1 + bisect_left(range(1, count), log.min_offset, key=offset_of)
        while at < count:
            offset = offset_of(at)
            segment = log.view_at(offset)
            if segment is None and offset >= log.end:
                return found, at
            reached = at
            if segment is not None:
                base, limit, log_view = segment
                reached = first_orphan_key(log_view, base, limit, view, layout, at, count)
            found += reached - at
            if reached == at:
                if not log.is_lost(offset):
                    report.error("wrong key", name, layout.entry_at(at), f"entry {at} names {offset}, where no message has its key")
                reached += 1
            at = reached
    return found, 0


def index_pieces(store: StoreUnderCheck, files: Sequence[Path]) -> list[CheckPiece]:
    """Return the pieces of the check of these index files, which are listed at the beginning: a running engine makes others meanwhile."""
    layout = store.store.geometry.index_layout
    return [CheckPiece(layout.size_bytes + _LOG_PER_ENTRY * layout.max_index_num, functools.partial(
        check_index_file, path, layout, store.is_running)) for path in files]


def check_index(store: StoreUnderCheck, outcomes: Iterator[KeysFound | None]) -> None:
    """Take what the index files have; of a store that is closed compare the number of keys with the log's. `outcomes`: index_pieces()."""
    found = [one for one in outcomes if one is not None]
    for one in found:
        store.report.take(one.report)
        store.report.index_files += 1
        store.report.index_keys += one.keys
    covered_from = next((one.covered_from for one in found if one.covered_from is not None), None)
    if covered_from is None or store.is_running:
        return
    start = max(covered_from, store.log.min_offset)
    expected = sum(store.run([CheckPiece(ranges[-1][1] - ranges[0][0], functools.partial(_count_keys, segment, start, ranges))
                              for segment, ranges in store.whole if ranges and ranges[-1][1] > start], store.log))
    if store.report.index_keys < expected:
        severity = Severity.ERROR if store.is_ours and store.was_stopped else Severity.WARNING
        store.report.add(severity, "missing keys", "index", None,
                         f"the index holds {store.report.index_keys} of the {expected} keys that the log has from {covered_from} on")


def _count_keys(segment: MappedFile, start: int, ranges: Sequence[tuple[int, int]], log: Log) -> int:
    """Count the keys of the records of these ranges from `start` on."""
    with mapped(segment.path) as view:
        return sum(count_keys(view, segment.start_offset, max(start, first), last) for first, last in ranges if max(start, first) < last)
