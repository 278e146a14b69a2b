"""The logs of a salvage: runs of complete records from the old one, and the new one to which they are appended.

A record gets a new offset, and every field of a record that has an offset is changed accordingly.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyengine.formats.constants import (
    BLANK_HEADER_BYTES,
    MESSAGE_MAGIC,
    PROPERTIES_BYTES_MAX,
    PROPERTY_INNER_MULTI_QUEUE_OFFSET,
    SYS_FLAG_TRANSACTION_MASK,
    TRANSACTION_HALF_TOPIC,
    TRANSACTION_OP_TOPIC,
)
from pyengine.formats.consume_queue import NOT_QUEUED, further_places, with_further_offsets
from pyengine.formats.paths import parse_segment_name, segment_name
from pyengine.formats.record import (
    BEGIN,
    BODY_CRC_AT,
    HEAD_BY_FLAGS,
    I16,
    I32,
    I64,
    MAGIC_AT,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
    V6_FLAGS,
    Message,
    body_crc,
    decode_record,
    encode_blank,
)
from pyengine.formats.record_case import CaseLabel
from pyengine.native.flush import allocate
from pyengine.native.scan import classify, walk
from pyengine.storage.durable_writes import create_file, make_folders, pwrite_all, sync_descriptor
from pyengine.storage.mapped_file import mapped, used_end
from pyengine.storage.recovery.quarantine import QuarantineEntry

_MAGIC = MESSAGE_MAGIC.to_bytes(4, "big")
_ZEROS_LEFT_OUT_MAX = 8  # a record without properties ends in two zeros


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive complete records in [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Bytes of [start, end) that are no complete records; `reason` is what is at the start, "" for a blank that closes the segment."""

    start: int
    end: int
    reason: str


def list_damaged_segments(folders: Iterable[Path]) -> tuple[list[tuple[int, Path]], set[int]]:
    """Return (start offset, path) of every 20-digit file in these folders, ascending, whatever its length; other names are ignored.

    The set has the start offsets of those that are no file: a folder, or a link to a disk that is not mounted.
    """
    found, no_files = [], set()
    for folder in folders:
        for name in os.listdir(folder):
            start = parse_segment_name(name)
            if start is not None and (folder / name).is_file():
                found.append((start, folder / name))
            elif start is not None:
                no_files.add(start)
    return sorted(found), no_files - {start for start, _ in found}


def carve(path: Path, base: int, size_bytes: int) -> Iterator[tuple[Run | Skipped, memoryview]]:
    """Yield runs and skipped ranges of one segment in order, each with its bytes; `size_bytes`: its right length.

    Zeros up to the segment's end are left out. The bytes are valid until the next step.
    """
    if path.stat().st_size == 0:
        return
    with mapped(path) as mapping:
        end = base + min(len(mapping), size_bytes)
        yield from _carve(mapping, base, end, min(end, base + used_end(path)), base + size_bytes)


def carve_quarantined(entry: QuarantineEntry) -> Iterator[tuple[Run | Skipped, memoryview]]:
    """Like carve(), for a piece of the log in quarantine/, which may lack its final zeros."""
    if entry.path.stat().st_size == 0:
        return
    with mapped(entry.path) as content, mmap.mmap(-1, len(content) + _ZEROS_LEFT_OUT_MAX) as mapping:
        mapping[: len(content)] = content
        base, used = entry.physical_offset, used_end(entry.path)
        yield from _carve(mapping, base, base + len(mapping), base + used, base + len(content))


def messages_in(entry: QuarantineEntry) -> Iterator[Message]:
    """Yield the messages of complete records in a piece of the log in quarantine/, in order; none for pieces of other kinds."""
    if entry.holds_messages:
        for piece, data in carve_quarantined(entry):
            if isinstance(piece, Run):
                for _, record in records_of(piece, data):
                    yield decode_record(bytes(record))


def _half_number(body: bytes) -> int | None:
    return int(body) if body.isdigit() and len(body) < _NUMBER_BYTES_MAX else None


def records_of(run: Run, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (physical offset, bytes) of each record of a run."""
    at = 0
    while at < len(data):
        size_bytes, _ = BEGIN.unpack_from(data, at)
        with data[at : at + size_bytes] as record:
            yield run.start + at, record
        at += size_bytes


def _carve(
    mapping: mmap.mmap, base: int, end: int, data_end: int, segment_end: int
) -> Iterator[tuple[Run | Skipped, memoryview]]:
    """Carve [base, end), which has only zeros from `data_end` on; a blank reaches to `segment_end`."""
    with memoryview(mapping) as view:
        at = base
        while at < data_end:
            result = walk(mapping, base, at, end)
            if result.end_offset > at:
                with view[at - base : result.end_offset - base] as piece:
                    yield Run(at, result.end_offset), piece
                at = result.end_offset
            if at >= data_end or result.reason == CaseLabel.RANGE_END:
                return
            if result.reason == CaseLabel.BLANK and BEGIN.unpack_from(view, at - base)[0] == segment_end - at:
                with view[at - base : end - base] as piece:  # the bytes after the blank's head are undefined
                    yield Skipped(at, segment_end, ""), piece
                return
            following = _next_record(mapping, base, at + 1, end)
            stop = data_end if following is None else following
            with view[at - base : stop - base] as piece:
                yield Skipped(at, stop, str(result.reason)), piece
            at = stop


def _next_record(view: mmap.mmap, base: int, start: int, end: int) -> int | None:
    """Return the first complete record that begins in [start, end)."""
    found = view.find(_MAGIC, start - base + MAGIC_AT, end - base)
    while found >= 0:
        at = found - MAGIC_AT
        if classify(view, at, end - base - at, base + at) == CaseLabel.MESSAGE:
            return base + at
        found = view.find(_MAGIC, found + 1, end - base)
    return None


_WRITE_BYTES = 1 << 20
_QUEUE_ID_AT = 12
_PLACES = PROPERTY_INNER_MULTI_QUEUE_OFFSET.encode()
_NUMBER_BYTES_MAX = 20


@dataclass
class MovedQueue:
    """Old and new queue offsets of one queue, as ranges whose messages moved by the same distance."""

    next_offset: int
    old_starts: list[int] = field(default_factory=list)
    new_starts: list[int] = field(default_factory=list)
    last_old: int = -2

    def take(self, old: int) -> int:
        """Assign a queue offset to the next kept message, which had the offset `old`."""
        new = self.next_offset
        if old != self.last_old + 1:
            self.old_starts.append(old)
            self.new_starts.append(new)
        self.last_old = old
        self.next_offset = new + 1
        return new

    def append(self) -> int:
        """Assign a queue offset to a message that comes after all kept ones, whatever its old offset."""
        self.next_offset += 1
        return self.next_offset - 1

    @property
    def moved_by(self) -> int:
        """The distance by which the newest messages were lowered."""
        return self.old_starts[-1] - self.new_starts[-1]

    def moved(self, old: int) -> int:
        """Return the new offset for a reader at the old offset `old`: that of the first kept message from there on."""
        at = bisect_right(self.old_starts, old) - 1
        if at < 0:
            return self.new_starts[0]
        return min(self.new_starts[at] + old - self.old_starts[at], self._new_end(at))

    def kept(self, old: int) -> int | None:
        """Return the new offset of the message at the old offset `old`; None if it is not in the new queue."""
        at = bisect_right(self.old_starts, old) - 1
        if at < 0:
            return old  # before the first one, which has kept its offset
        new = self.new_starts[at] + old - self.old_starts[at]
        return new if new < self._new_end(at) else None

    def _new_end(self, at: int) -> int:
        return self.new_starts[at + 1] if at + 1 < len(self.new_starts) else self.next_offset


class SalvagedLog:
    """Appends records by RocketMQ's rule for space in a segment, each with its new offsets. Synced when closed.

    A context manager. Raises DiskFullError, DiskError or FlushError.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder = folder
        self._size_bytes = size_bytes
        self._descriptor = -1
        self._segment = -size_bytes  # start of the open segment
        self._at = 0                 # physical offset of the next record
        self._pending = bytearray()
        self._pending_at = 0         # physical offset of the first pending byte
        self._moved: list[tuple[int, int]] = []  # (old start, new start) of ranges that moved by the same distance
        self._moved_old_end: list[int] = []
        self._is_old_log = True  # appended records are those of the old log; False: they are those after it
        self.queues: dict[tuple[str, int], MovedQueue] = {}
        self._halves_after: dict[tuple[int, int], int] = {}  # (queue id, old offset) of a half message of quarantine/ -> its new one
        self.records = 0
        self.kept_bytes = 0

    def __enter__(self) -> SalvagedLog:
        make_folders(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._close_segment()

    @property
    def end_offset(self) -> int:
        """Return the physical end of the last record."""
        return self._at

    def append_run(self, run: Run, data: memoryview) -> None:
        """Append all records of a run of the old log."""
        for old_offset, record in records_of(run, data):
            self._append(old_offset, bytearray(record))

    def append_after_old_log(self, old_offset: int, record: memoryview) -> None:
        """Append a record of quarantine/, which had been at `old_offset`; call it after all records of the old log.

        Its old queue offset is not mapped to the new one: the old log may have used that offset for another message since.
        """
        self._is_old_log = False
        self._append(old_offset, bytearray(record))

    def moved_offset(self, old_offset: int) -> int:
        """Return the new offset of the record that was at `old_offset`, 0 if it was not kept."""
        at = bisect_right(self._moved, (old_offset, 1 << 63)) - 1
        if at < 0 or old_offset >= self._moved_old_end[at]:
            return 0
        old_start, new_start = self._moved[at]
        return new_start + old_offset - old_start

    def _append(self, old_offset: int, record: bytearray) -> None:
        old_bytes = len(record)
        self._renumber_places(record)
        room = self._segment + self._size_bytes - self._at
        if self._descriptor < 0 or len(record) + BLANK_HEADER_BYTES > room:
            self._roll(room)
        if self._is_old_log:
            self._note_move(old_offset, old_bytes)
        self._renumber(record)
        self._pending += record
        self._at += len(record)
        self.records += 1
        self.kept_bytes += len(record)
        if len(self._pending) >= _WRITE_BYTES:
            self._flush()

    def _note_move(self, old_offset: int, size_bytes: int) -> None:
        if self._moved and self._moved_old_end[-1] == old_offset:
            old_start, new_start = self._moved[-1]
            if new_start - old_start == self._at - old_offset:
                self._moved_old_end[-1] += size_bytes
                return
        self._moved.append((old_offset, self._at))
        self._moved_old_end.append(old_offset + size_bytes)

    def _renumber_places(self, record: bytearray) -> None:
        """Write the new offsets in further queues (docs/formats.md section 8.6), as bytes, without a change of damaged properties."""
        if _PLACES not in record:
            return
        places = further_places(decode_record(record))
        offsets = {place.number: self._next_offset(place.topic, place.queue_id, place.queue_offset) for place in places}
        if offsets == {place.number: place.queue_offset for place in places}:
            return
        topic_at = _topic_at(record)
        at = topic_at + record[topic_at - 1]
        properties = with_further_offsets(bytes(record[at + I16.size :]), offsets)
        if len(properties) > PROPERTIES_BYTES_MAX:  # only with damaged offsets: new offsets do not have more digits
            return
        record[at:] = I16.pack(len(properties)) + properties
        I32.pack_into(record, 0, len(record))

    def _next_offset(self, topic: str, queue_id: int, old: int) -> int:
        queue = self.queues.setdefault((topic, queue_id), MovedQueue(old))
        return queue.take(old) if self._is_old_log else queue.append()

    def _renumber(self, record: bytearray) -> None:
        I64.pack_into(record, PHYSICAL_OFFSET_AT, self._at)
        (sys_flag,) = I32.unpack_from(record, SYS_FLAG_AT)
        head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
        (prepared_offset,) = I64.unpack_from(record, head_bytes - 12)
        if prepared_offset:
            I64.pack_into(record, head_bytes - 12, self.moved_offset(prepared_offset))
        if sys_flag & SYS_FLAG_TRANSACTION_MASK in NOT_QUEUED:
            return
        topic_at = _topic_at(record)
        topic = str(record[topic_at : topic_at + record[topic_at - 1]], "utf-8", "replace")
        (queue_id,) = I32.unpack_from(record, _QUEUE_ID_AT)
        (queue_offset,) = I64.unpack_from(record, QUEUE_OFFSET_AT)
        new = self._next_offset(topic, queue_id, queue_offset)
        I64.pack_into(record, QUEUE_OFFSET_AT, new)
        if topic == TRANSACTION_HALF_TOPIC and not self._is_old_log:
            self._halves_after[queue_id, queue_offset] = new
        if topic == TRANSACTION_OP_TOPIC:
            self._renumber_half(record, head_bytes, queue_id)

    def _renumber_half(self, record: bytearray, head_bytes: int, queue_id: int) -> None:
        """Write the new number of the half message that an op message has ended; one that is not a number where that is not kept:
        another half message has its number now, or will have.
        """
        body = bytes(record[head_bytes : head_bytes + I32.unpack_from(record, head_bytes - I32.size)[0]])
        number = _half_number(body)
        if number is None:
            return
        halves = self.queues.get((TRANSACTION_HALF_TOPIC, queue_id))
        new = self._halves_after.get((queue_id, number)) if not self._is_old_log else halves.kept(number) if halves is not None else None
        text = b"%d" % new if new is not None else b""
        text = text.rjust(len(body), b"0") if 0 < len(text) <= len(body) else b"-" * len(body)
        record[head_bytes : head_bytes + len(body)] = text
        I32.pack_into(record, BODY_CRC_AT, body_crc(text))

    def _roll(self, room: int) -> None:
        if self._descriptor >= 0:
            self._pending += encode_blank(room)
            self._close_segment()
        self._segment += self._size_bytes
        self._at = self._pending_at = self._segment
        self._descriptor = create_file(self._folder, segment_name(self._segment), self._size_bytes, allocate="none")

    def _close_segment(self) -> None:
        if self._descriptor < 0:
            return
        try:
            self._flush()
            sync_descriptor(self._descriptor, self._path)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _flush(self) -> None:
        if self._pending:
            allocate(self._descriptor, self._pending_at - self._segment, len(self._pending), str(self._path))
        pwrite_all(self._descriptor, memoryview(self._pending), self._pending_at - self._segment, self._path)
        self._pending_at += len(self._pending)
        self._pending = bytearray()

    @property
    def _path(self) -> Path:
        return self._folder / segment_name(self._segment)


def _topic_at(record: bytearray) -> int:
    """Return the position of the topic; the byte before it is its length, and length and bytes of the properties follow."""
    (sys_flag,) = I32.unpack_from(record, SYS_FLAG_AT)
    head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
    body_bytes: int = I32.unpack_from(record, head_bytes - 4)[0]
    return head_bytes + body_bytes + 1
