"""Compares entries of consume queues with the records that they name.

An entry has a record's offset, its size and the hash of its tag; the entry's position gives topic, queue and queue offset. The
record contains all of that too, and its checksum covers only its body. So a read through a queue compares each entry with its
record: otherwise a flipped bit in either would give a wrong row, or lose one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy
import pyarrow as pa
from pyarrow import compute

from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_ADDRESS_MAX, CQ_FILLER_SIZE, SCHEDULE_TOPIC, SYS_FLAG_TRANSACTION_MASK
from pyengine.formats.consume_queue import NOT_QUEUED, further_offset
from pyengine.formats.record import decode_record, tags_code
from pyengine.native.scan import ColumnScanner
from pyengine.spark.remote_store import RemoteQueueFiles
from pyengine.storage.arrow import allocate, to_array

if TYPE_CHECKING:
    from pyengine.formats.constants import Readable
    from pyengine.native.scan import RawBatch
    from pyengine.storage.consume_queue import ConsumeQueue

ENTRY = numpy.dtype([("physicalOffset", ">i8"), ("size", ">i4"), ("tagsCode", ">i8")])  # of a consume queue
READ_ENTRIES = 1 << 16
_CHECKED = ["topic", "queueId", "queueOffset", "sysFlag", "tags"]
_BATCH_ROWS = 1 << 14
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
    """Estimate the bytes of these messages in the log from samples, in remote files from the first and the last."""
    if isinstance(queue.files, RemoteQueueFiles):
        sizes = [entry.size_bytes for at in {first, end - 1} if (entry := queue.entry(at, high))]
        return (end - first) * sum(sizes) // max(1, len(sizes))
    span = queue.span(first, end) if first < end else None
    if span is None:
        return 0
    view, position, stop = span
    entries = numpy.frombuffer(view, ENTRY, (stop - position) // CQ_ENTRY_BYTES, position)  # no copy: only pages of the samples are read
    return max(0, int((end - first) * entries["size"][:: max(1, len(entries) // _SAMPLES)].mean(dtype="float64")))


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


class EntryCheck:
    """Compares entries with records; each thread needs its own."""

    def __init__(self) -> None:
        self._scanner = ColumnScanner(_CHECKED, batch_rows=_BATCH_ROWS, allocate=allocate)

    def wrong(self, view: Readable, base: int, queue: tuple[str, int], number: int, entries: numpy.ndarray, limit: int
              ) -> Iterator[WrongEntry]:
        """Yield the wrong ones of the entries, in order; `number` is the number of the first one in the queue.

        All name records in `view`, which begins at the physical offset `base`. It reads nothing at or above `limit`. An entry may
        name a record of another topic that was dispatched to this queue too (INNER_MULTI_DISPATCH).
        """
        fillers = numpy.flatnonzero((entries["physicalOffset"] == 0) & (entries["size"] == CQ_FILLER_SIZE)).tolist()
        begin = 0
        for stop in [*fillers, len(entries)]:
            while begin < stop:
                for raw in self._scanner.gather(view, base, entries[begin:stop].tobytes(), limit):
                    yield from self._mismatched(view, base, queue, number, entries, begin, raw)
                    begin += raw.rows
                if begin < stop:
                    reason = self._scanner.reason
                    entry = entries[begin]
                    offset, size = int(entry["physicalOffset"]), int(entry["size"])
                    yield WrongEntry(begin, offset, size, reason, _broken_entry(
                        queue, number + begin, offset, size, f"but there it is {reason.replace('_', ' ')}"))
                    begin += 1
            if stop < len(entries):
                yield WrongEntry(stop, 0, 0, "filler", f"entry {number + stop} of queue {queue[0]}/{queue[1]} is filler, in the middle of "
                                                       "its messages")
                begin = stop + 1

    def _mismatched(self, view: Readable, base: int, queue: tuple[str, int], number: int, entries: numpy.ndarray, begin: int, raw: RawBatch
                ) -> Iterator[WrongEntry]:
        """Yield those of the next entries whose records are whole but differ from the entry."""
        topics, queue_ids, queue_offsets, sys_flags, tags = (to_array(column, raw.rows) for column in raw.columns)
        mine = entries[begin : begin + raw.rows]
        is_other = ~compute.equal(topics, queue[0]).to_numpy(zero_copy_only=False)
        is_other |= queue_ids.to_numpy() != queue[1]
        is_other |= queue_offsets.to_numpy() != numpy.arange(number + begin, number + begin + raw.rows)
        transactions = sys_flags.to_numpy() & SYS_FLAG_TRANSACTION_MASK
        is_hidden = numpy.isin(transactions, NOT_QUEUED)
        codes, wanted = mine["tagsCode"].astype(numpy.int64), _codes_of(tags)
        # These entries have a delivery time, or an address in the extension, instead.
        has_tags = (codes > CQ_EXT_ADDRESS_MAX) & (queue[0] != SCHEDULE_TOPIC)
        is_unlike = has_tags & (codes != wanted) & (wanted != _UNKNOWN)
        for row in numpy.flatnonzero(is_other | is_hidden | is_unlike).tolist():
            offset, size = int(mine[row]["physicalOffset"]), int(mine[row]["size"])
            what = f"entry {number + begin + row} of queue {queue[0]}/{queue[1]} names message {queue_offsets[row]} of {topics[row]}/" \
                   f"{queue_ids[row]}"
            if is_other[row]:
                message = decode_record(view, offset - base)
                if further_offset(message, *queue) == number + begin + row:
                    continue
                yield WrongEntry(begin + row, offset, size, "another_message", what)
            elif is_hidden[row]:
                yield WrongEntry(begin + row, offset, size, "in_no_queue", f"{what}, which a transaction has not committed")
            else:
                yield WrongEntry(begin + row, offset, size, "another_tag",
                                 f"{what} with the tags code {int(codes[row])}, but the hash of its tag is {int(wanted[row])}")


_UNKNOWN = 1 << 62  # no hash


def _codes_of(tags: pa.Array) -> numpy.ndarray:
    """Return the tags code of each; _UNKNOWN for a text that is not UTF-8, whose hash is not computed here."""
    coded = tags.dictionary_encode()
    known = [_UNKNOWN if "\ufffd" in text else tags_code(text) for text in coded.dictionary.to_pylist()]
    places = coded.indices.fill_null(len(known)).to_numpy()
    codes: numpy.ndarray = numpy.array([*known, 0], dtype=numpy.int64)[places]
    return codes
