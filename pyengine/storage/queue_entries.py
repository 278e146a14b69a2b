"""Entries of consume queues as arrays: compares them with the records that they name, and says where they replace a scan.

An entry has a record's offset, its size and the hash of its tag; the entry's position gives topic, queue and queue offset. The
record contains all of that too, and its checksum covers only its body. So a read through a queue compares each entry with its
record: otherwise a flipped bit in either would give a wrong row, or lose one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy

from pyengine.arguments import INT64_MAX
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_ADDRESS_MAX, CQ_FILLER_SIZE, SCHEDULE_TOPIC, SYS_FLAG_TRANSACTION_MASK
from pyengine.formats.consume_queue import NOT_QUEUED, further_offset
from pyengine.formats.record import CaseLabel, decode_record, tags_code, total_size
from pyengine.native.scan import EntryRun, classify, count_matching_entries
from pyengine.storage.config_table import QUEUE_NUMS_MAX
from pyengine.storage.consume_queue import place_of

if TYPE_CHECKING:
    from pyengine.formats.constants import Readable
    from pyengine.native.scan import ChooseQueue
    from pyengine.storage.config_table import TopicConfig
    from pyengine.storage.consume_queue import ConsumeQueue, QueuesAndLog

ENTRY = numpy.dtype([("physicalOffset", ">i8"), ("size", ">i4"), ("tagsCode", ">i8")])  # of a consume queue
READ_ENTRIES = 1 << 16
_BLOCK_BYTES = 1 << 16
_AHEAD_BYTES = 1 << 12
_VOID = bytes(_BLOCK_BYTES + _AHEAD_BYTES)
_SAMPLES = 16


def queue_entries(queue: ConsumeQueue, first: int, end: int) -> Iterator[tuple[int, numpy.ndarray]]:
    """Yield (number of the first, entries) of the queue's entries [first, end), in blocks; skip deleted files."""
    while first < end:
        span = queue.span(first, end)
        if span is None:
            first = min(end, queue.next_file_offset(first))
            continue
        view, position, span_end = span
        count = min(end - first, (span_end - position) // CQ_ENTRY_BYTES, READ_ENTRIES)
        yield first, numpy.frombuffer(view[position : position + count * CQ_ENTRY_BYTES], ENTRY)
        first += count


def slice_bytes(queue: ConsumeQueue, first: int, end: int, high: int) -> int:
    """Estimate the bytes of these messages in the log from samples; if the files are fetched by ranges, from the first and the last."""
    if not queue.files.is_mapped:
        sizes = [entry.size_bytes for at in {first, end - 1} if (entry := queue.entry(at, high))]
        return (end - first) * sum(sizes) // max(1, len(sizes))
    span = queue.span(first, end) if first < end else None
    if span is None:
        return 0
    view, position, stop = span
    entries = numpy.frombuffer(view, ENTRY, (stop - position) // CQ_ENTRY_BYTES, position)  # no copy: only pages of the samples are read
    return max(0, int((end - first) * entries["size"][:: max(1, len(entries) // _SAMPLES)].mean(dtype="float64")))


def following_entries(queue: ConsumeQueue, at: int) -> tuple[int, numpy.ndarray] | None:
    """Return (number of the first, entries) of the next entries at or after `at` that are not all zeros, or None. It reads the next
    block and the first one of each later file."""
    for start in queue.files.starts():
        number = max(at, start // CQ_ENTRY_BYTES)
        position = number * CQ_ENTRY_BYTES - start
        view = queue.files.view(start) if position < queue.files.size_bytes else None
        if view is None:
            continue
        end = min(queue.files.size_bytes, (position + _AHEAD_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES + _BLOCK_BYTES)
        data = view[position : end - (end - position) % CQ_ENTRY_BYTES]
        if not _VOID.startswith(data):
            return number, numpy.frombuffer(data, ENTRY)
    return None


def runs_of_segments(entries: numpy.ndarray, segment_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (segment's start, begin, end) of runs of entries for records of one segment."""
    offsets = entries["physicalOffset"].astype(numpy.int64)
    segments = offsets - offsets % segment_bytes
    boundaries = [0, *(numpy.flatnonzero(numpy.diff(segments)) + 1).tolist(), len(offsets)]
    for begin, end in itertools.pairwise(boundaries):
        yield int(segments[begin]), begin, end


class WrongEntry(NamedTuple):
    """A wrong entry: its position, its values, the reason (of native.scan), and a sentence."""

    at: int
    physical_offset: int
    size_bytes: int
    reason: str
    sentence: str


def without_record(queue: tuple[str, int], number: int, entries: numpy.ndarray, why: str) -> Iterator[WrongEntry]:
    """Yield all of these entries as wrong, because the log never had a segment at their offsets; the first has this number."""
    for at, (offset, size, _) in enumerate(entries.tolist()):
        yield WrongEntry(at, max(0, offset), max(0, size), "no_record", _broken_entry(queue, number + at, offset, size, why))


def _broken_entry(queue: tuple[str, int], number: int, offset: int, size: int, why: str) -> str:
    what = "is empty, in the middle of its messages" if offset == size == 0 else f"names a message at {offset}, {why}"
    return f"entry {number} of queue {queue[0]}/{queue[1]} {what}"


def wrong_entries(view: Readable, base: int, queue: tuple[str, int], number: int, entries: numpy.ndarray, limit: int
                  ) -> Iterator[WrongEntry]:
    """Yield the wrong ones of the entries, in order; `number` is the number of the first one in the queue.

    All name records in `view`, which begins at the physical offset `base`. It reads nothing at or above `limit`. An entry may
    name a record of another topic that was dispatched to this queue too (INNER_MULTI_DISPATCH).
    """
    rest, at = memoryview(entries.tobytes()), 0
    while True:
        run = EntryRun(*queue, number + at, rest[at * CQ_ENTRY_BYTES :])
        at += count_matching_entries(view, base, limit, run, after=-1, check_tags=queue[0] != SCHEDULE_TOPIC, check_offset=True)
        if at == len(entries):
            return
        offset, size, code = entries[at].tolist()
        reason, sentence = _judged(view, base, queue, number + at, (offset, size, code), limit)
        if reason:
            yield WrongEntry(at, offset, 0 if reason == "filler" else size, reason, sentence)
        at += 1


def _judged(view: Readable, base: int, queue: tuple[str, int], number: int, entry: tuple[int, int, int], limit: int) -> tuple[str, str]:
    """Return what is wrong with an entry, as reason and sentence; ("", "") if it is right."""
    offset, size, code = entry
    if offset == 0 and size == CQ_FILLER_SIZE:
        return "filler", f"entry {number} of queue {queue[0]}/{queue[1]} is filler, in the middle of its messages"
    reason: str = CaseLabel.OVERRUN
    if base <= offset < limit and size <= limit - offset:
        reason = classify(view, offset - base, limit - offset, offset, check_crc=False)
        if reason in (CaseLabel.MESSAGE, CaseLabel.OFFSET_MISMATCH) and total_size(view, offset - base) != size:
            reason = CaseLabel.TORN
    if reason != CaseLabel.MESSAGE:
        return reason, _broken_entry(queue, number, offset, size, f"but there it is {reason.replace('_', ' ')}")
    message = decode_record(view, offset - base)
    what = f"entry {number} of queue {queue[0]}/{queue[1]} names message {message.queue_offset} of {message.topic}/{message.queue_id}"
    if (message.topic, message.queue_id, message.queue_offset) != (*queue, number):
        return ("", "") if further_offset(message, *queue) == number else ("another_message", what)
    if message.sys_flag & SYS_FLAG_TRANSACTION_MASK in NOT_QUEUED:
        return "in_no_queue", f"{what}, which a transaction has not committed"
    tags, wanted = message.tags or "", tags_code(message.tags)
    # An entry may have a delivery time, or an address in the extension, instead. The hash of a text that is not UTF-8 is not computed here.
    if code <= CQ_EXT_ADDRESS_MAX or queue[0] == SCHEDULE_TOPIC or code == wanted or "\ufffd" in tags:
        return "", ""
    return "another_tag", f"{what} with the tags code {code}, but the hash of its tag is {wanted}"


# -- what entries cannot prove ---------------------------------------------------------

SCAN_BYTES = 64 << 20           # the newest part of the log, whose messages may be in no queue
LOST_QUEUE_BYTES = 256 << 20    # the same if an expected queue has no entry


def newest_bytes(configured: Mapping[str, TopicConfig], found: Collection[tuple[str, int]], choose: ChooseQueue) -> int:
    """Return how much of the newest log to read for messages that are not in the chosen queues; `found`: the queues with entries.

    More if a chosen queue should have entries and has none: it is in topics.json, or a higher queue of its topic has some. Also if
    topics.json names no topic, since a whole topic may be lost.
    """
    counts = {topic: max(row.read_queue_nums, row.write_queue_nums) for topic, row in configured.items()}
    for topic, queue_id in found:
        counts[topic] = max(counts.get(topic, 0), queue_id + 1)
    is_lost = not configured or any((topic, queue_id) not in found and choose(topic, queue_id) is not None
                                    for topic, count in counts.items() for queue_id in range(min(count, QUEUE_NUMS_MAX)))
    return LOST_QUEUE_BYTES if is_lost else SCAN_BYTES


# -- reads through queues in place of a scan ---------------------------------------------

# A scan is chosen for small logs, and for logs of which most is wanted: sequential reading is faster then.
LOG_BYTES_MIN = 256 << 20
SHARE_MAX = 0.3
_QUEUE_BYTES = 1 << 20  # what a scan reads while a queue is looked up


class NamedRecords(NamedTuple):
    """The part [begin, end) of the log in which entries name each chosen record: a scan of it would give no other rows.

    Both bounds are those of records. `runs`: by segment, the queues' [first, end) of entries for its records.
    """

    begin: int
    end: int
    runs: Mapping[int, Sequence[_Span]]

    def entries(self, view: Readable, segment: int, limit: int) -> bytes | None:
        """Return the entries for records of a segment, in the order of the log; None if one is wrong or missing, for a scan."""
        found = []
        for queue, first, end in self.runs.get(segment, ()):
            for number, entries in queue_entries(queue, first, end):
                if number != first or any(wrong_entries(view, segment, (queue.topic, queue.queue_id), number, entries, limit)):
                    return None
                found.append(entries)
                first += len(entries)
            if first != end:  # the file was deleted
                return None
        both = numpy.concatenate([numpy.empty(0, ENTRY), *found], dtype=ENTRY)  # in their byte order
        _, places = numpy.unique(both["physicalOffset"], return_index=True)  # a record may be in several queues
        named: bytes = both[places].tobytes()
        return named


def find_named(reader: QueuesAndLog, queues: Mapping[ConsumeQueue, int], log: LogPart, newest: int) -> NamedRecords | None:
    """Return the part of the log in which the entries of these queues replace a scan; None if a scan is faster or may have more rows.

    `queues`: each with its first wanted offset. A scan finds the messages that no entry proves: those in the `newest` bytes of the
    log, those before a queue's first entry if the file before it is lost, and all of them if entries are damaged.
    """
    if log.end - log.begin < max(LOG_BYTES_MIN, len(queues) * _QUEUE_BYTES):
        return None
    ends = [_end_of(reader, queue, log, newest) for queue in queues]
    tail = min(ends, default=log.begin)
    lasts = [place_of(reader, (queue.topic, queue.queue_id), queue.max_offset(tail) - 1, log.limit) for queue in queues]
    end = max([tail - tail % log.segment_bytes, *(last[1] for last in lasts if last is not None)])
    spans = [_Span.of(queue, wanted, log.begin, end) for queue, wanted in queues.items()]
    wanted_bytes = sum(slice_bytes(queue, first, high, high) for queue, first, high in spans if first < high)
    begin = max([_head_of(reader, span, log) for span in spans])
    if end - begin < max(1, LOG_BYTES_MIN) or wanted_bytes > SHARE_MAX * (end - begin):
        return None
    runs: dict[int, list[_Span]] = {}
    for queue, wanted in queues.items():
        span = _Span.of(queue, wanted, begin, end)
        if not _add_runs(reader, span, begin, log, runs) or not _is_end(reader, queue, span.end, end):
            return None
    return NamedRecords(begin, end, runs)


class LogPart(NamedTuple):
    """The part [begin, end) of a log that a read wants.

    Everything below `dispatched` is in queues, unless these are damaged. No message at or above `limit` may be read, none below
    `first` exists.
    """

    begin: int
    end: int
    dispatched: int
    limit: int
    first: int
    segment_bytes: int


class _Span(NamedTuple):
    """The entries [first, end) of a queue."""

    queue: ConsumeQueue
    first: int
    end: int

    @classmethod
    def of(cls, queue: ConsumeQueue, wanted: int, begin: int, end: int) -> Self:
        """Return the queue's entries of messages in [begin, end) of the log, from the offset `wanted` on."""
        high = queue.max_offset(end)
        return cls(queue, min(max(wanted, queue.min_offset(begin, high)), high), high)


def _end_of(reader: QueuesAndLog, queue: ConsumeQueue, log: LogPart, newest: int) -> int:
    """Return a physical offset up to which the queue's entries name its messages; -1 if they are damaged."""
    end = min(log.end, log.dispatched)
    high = queue.max_offset(end)
    if following_entries(queue, high) is not None:
        return end if _is_end(reader, queue, high, end) else -1
    last = queue.entry(high - 1, high) if high and high % queue.entries_per_file == 0 else None  # the next file may be lost
    return min(end, log.limit - newest, end if last is None else last.physical_offset)


def _is_end(reader: QueuesAndLog, queue: ConsumeQueue, number: int, at: int) -> bool:
    """Return whether the entry of this number is right and names a message from `at` on, or is the queue's end."""
    place = place_of(reader, (queue.topic, queue.queue_id), number, INT64_MAX)  # it may be beyond what this read may see
    return following_entries(queue, number) is None if place is None else place[0] >= at


def _head_of(reader: QueuesAndLog, span: _Span, log: LogPart) -> int:
    """Return a physical offset, of a record or of the part's begin, from which on the entries name the queue's messages."""
    queue, first, end = span
    before = queue.entry(first - 1, first) if first else None
    if before is not None and before.size_bytes > 0 and 0 <= before.physical_offset < log.first:
        return log.begin  # deleted with the log
    if first == 0 or place_of(reader, (queue.topic, queue.queue_id), first - 1, log.limit) is not None:
        return log.begin
    entry = queue.entry(first, end)
    return log.end if entry is None else entry.physical_offset


def _add_runs(reader: QueuesAndLog, span: _Span, begin: int, log: LogPart, runs: dict[int, list[_Span]]) -> bool:
    """Add the queue's runs of entries; return whether the entries are whole, in order, and right at both ends of each run.

    Then the message of an entry inside a run is in the run's segment, also if the entry is wrong.
    """
    queue, expected, end = span
    pieces: dict[int, tuple[int, int]] = {}
    for number, entries in queue_entries(queue, expected, end):
        offsets, sizes = entries["physicalOffset"].astype(numpy.int64), entries["size"].astype(numpy.int64)
        ends = offsets + sizes
        if number != expected or offsets[0] < begin or (sizes <= 0).any() or (offsets[1:] < ends[:-1]).any():
            return False
        begin, expected = int(ends[-1]), number + len(entries)
        for segment, first, stop in runs_of_segments(entries, log.segment_bytes):
            pieces[segment] = pieces.get(segment, (number + first,))[0], number + stop
    for segment, (first, stop) in pieces.items():
        if any(place_of(reader, (queue.topic, queue.queue_id), at, log.limit) is None for at in {first, stop - 1}):
            return False
        runs.setdefault(segment, []).append(_Span(queue, first, stop))
    return expected == end
