"""The loops of a whole-store check that read bytes, separated from the evaluation of their results.

`LogSegments` is the log for a check: its segments, and the results of the walk. A queue is
checked one file at a time; of the previous file a check only needs the log offset at which that ended (`after`), so that
files can be checked on any host and in any order, with a guess that is confirmed later.

`CheckWork` reads in this process, when a result is requested. A caller that has more processors or hosts
(pyengine.spark.store_verify) passes one that has read before; evaluation and grades stay the same.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, SCHEDULE_TOPIC
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES, further_offset, is_filler, is_live
from pyengine.formats.index_file import IndexLayout, unpack_entry
from pyengine.formats.record import WalkResult, decode_record
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import EntryRun, broken_chain, count_keys, count_matching_entries, first_orphan_key
from pyengine.storage.check.report import CheckReport, Findings, Severity
from pyengine.storage.checkpoint import DurableWatermark
from pyengine.storage.commit_log import SLICE_BYTES, SegmentBytes, walk_pieces
from pyengine.storage.mapped_file import MappedFile, map_read_only, mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.queues import QueueState, live_entries


class LogSegments:
    """The log's segments up to its end, one mapped at a time."""

    def __init__(self, segments: Sequence[MappedFile], size_bytes: int) -> None:
        self.segments = list(segments)
        self.size_bytes = size_bytes
        self.end = 0
        self.whole: list[tuple[MappedFile, int, int]] = []  # [start, end) of a segment that was walked
        self.lost: list[tuple[int, int]] = []  # [start, end) below the end without a complete record
        self._mapped: tuple[int, mmap.mmap] | None = None
        self._starts = {segment.start_offset: segment for segment in self.segments}

    @property
    def min_offset(self) -> int:
        return self.segments[0].start_offset if self.segments else 0

    def view_at(self, offset: int) -> tuple[int, int, mmap.mmap] | None:
        """Return (start, limit, bytes) of the segment that contains `offset`, None outside the log; limit is not beyond the end."""
        start = offset - offset % self.size_bytes
        if start not in self._starts or not 0 <= offset < self.end:
            return None
        if self._mapped is None or self._mapped[0] != start:
            self.close()
            self._mapped = start, map_read_only(self._starts[start].path)
        return start, min(self.end, start + self.size_bytes), self._mapped[1]

    def ranges(self, start: int) -> Iterator[tuple[int, int, int, mmap.mmap]]:
        """Yield (base, from, to, bytes) for each walked part of [start, end)."""
        for segment, first, last in self.whole:
            if max(start, first) < last:
                with mapped(segment.path) as view:
                    yield segment.start_offset, max(start, first), last, view

    def is_lost(self, offset: int) -> bool:
        """Whether the walk has found no complete record at this offset."""
        at = bisect_right(self.lost, offset, key=lambda lost: lost[0]) - 1
        return at >= 0 and offset < self.lost[at][1]

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped[1].close()
            self._mapped = None


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
    findings: Findings


def guess_after(log: LogSegments, file: QueueFile) -> int:
    """Guess where in the log the previous file has ended: at its last entry, if the log still has that record."""
    if file.previous is None:
        return -1
    with open(file.previous, "rb") as opened:
        opened.seek(file.size_bytes - CQ_ENTRY_BYTES)
        data = opened.read(CQ_ENTRY_BYTES)
    entry = ENTRY.unpack(data.ljust(CQ_ENTRY_BYTES, b"\0"))
    return entry[0] if is_live(entry) and not is_filler(entry) and entry[0] >= log.min_offset else -1


def check_queue_file(log: LogSegments, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
    """Check every entry; `after`: the physical offset of the last entry of the previous files, -1 if there is none."""
    findings = Findings()
    count, _ = live_entries(file.path, file.size_bytes)
    used = used_end(file.path, count * CQ_ENTRY_BYTES)
    if used > count * CQ_ENTRY_BYTES or (count * CQ_ENTRY_BYTES < file.size_bytes and not file.is_last):
        findings.error("queue hole", file.name, count * CQ_ENTRY_BYTES,
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
                findings.add(rules.beyond, "entry beyond the log", file.name, at * CQ_ENTRY_BYTES,
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
            findings.error("wrong entry", file.name, at * CQ_ENTRY_BYTES,
                           f"entry {file.first + at} does not point to its message (log offset {offset})")
        after = max(after, offset)
        at += 1
    return EntriesFound(after, own, own + further, findings)


def _is_multi_dispatched(log: LogSegments, file: QueueFile, entries: bytes, at: int, after: int) -> bool:
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
    findings: Findings


class CheckWork:
    """Reads in this process, one piece after the other."""

    def begin(self, log: LogSegments, index_files: Sequence[Path], layout: IndexLayout) -> None:
        """Prepare; called before the first read, when the log's end is known."""

    def log_is_known(self, log: LogSegments, queues: Sequence[QueueState], rules: QueueRules, root: Path) -> None:
        """Note that the log has been walked; the check of queues and index comes next."""

    def walk(self, log: LogSegments, segment: MappedFile, start: int, stop: int) -> Generator[WalkResult, None, None]:
        """Walk from the record at `start`; yield consecutive results, of which the last has the reason for the end."""
        with mapped(segment.path) as view:
            view.madvise(mmap.MADV_SEQUENTIAL)
            pieces = [(min(at + SLICE_BYTES, stop), False) for at in range(start, stop, SLICE_BYTES)]
            results = walk_pieces(SegmentBytes(view, segment.start_offset), start, pieces, limit=stop)
            with contextlib.closing(results):  # the walk ends with its caller
                yield from results

    def touched(self, log: LogSegments) -> Iterator[Sequence[TouchedQueue]]:
        """Yield the queues of the whole log, range by range, with the `further` entries of records in other queues."""
        for base, start, stop, view in log.ranges(log.min_offset):
            yield touched_queues(view, base, start, stop, apart=True).queues

    def queue_file(self, log: LogSegments, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
        """Check the entries of one file of a queue; the previous file ended at the record `after`."""
        return check_queue_file(log, file, rules, after)

    def broken_chain(self, path: Path, layout: IndexLayout, count: int) -> int:
        """Find a broken chain of an index file; see native.scan."""
        with mapped(path) as view:
            return broken_chain(view, layout, count)

    def index_parts(self, path: Path, name: str, layout: IndexLayout, count: int) -> Sequence[IndexPart]:
        """Return all entries of an index file as parts, in order."""
        return [IndexPart(path, name, layout, count, 1, count)]

    def keys(self, log: LogSegments, part: IndexPart) -> KeysFound:
        """Compare the entries of one part with the log."""
        return check_index_part(log, part)

    def count_keys(self, log: LogSegments, start: int) -> int:
        """Return the number of keys of the records from `start` on."""
        return sum(count_keys(view, base, first, last) for base, first, last, view in log.ranges(start))


def check_index_part(log: LogSegments, part: IndexPart) -> KeysFound:
    """Count the entries that point to a record with their key. Entries are in the order of the log."""
    findings, found = Findings(), 0
    with mapped(part.path) as view:

        def offset_of(number: int) -> int:
            return unpack_entry(view, part.layout.entry_at(number)).physical_offset

        at = max(part.first, 1 + bisect_left(range(1, part.count), log.min_offset, key=offset_of))
        while at < part.end:
            offset = offset_of(at)
            segment = log.view_at(offset)
            if segment is None and offset >= log.end:
                return KeysFound(found, at, findings)
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
                findings.error("wrong key", part.name, part.layout.entry_at(at),
                               f"entry {at} names {offset}, where no message has its key")
                reached += 1
            at = reached
    return KeysFound(found, 0, findings)


@dataclass(frozen=True, slots=True)
class StoreUnderCheck:
    """The context of all parts of a check: the store, how it was stopped, its reader, and the findings."""

    store: MessageStore
    log: LogSegments
    work: CheckWork
    findings: Findings
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
