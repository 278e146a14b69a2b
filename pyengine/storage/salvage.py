"""Copy the valid records of a damaged store to a new one.

The new store has every complete record of the old log in the old order, at new physical
offsets (so message ids change). Queue offsets stay the same up to the first lost message of a
queue; later ones are lowered, so that queues have no gaps. Offsets that
other records and files contain are changed accordingly: prepared transaction offsets, the numbers of half messages in op
messages, consumer offsets, delay offsets. After the log's messages come the complete records in quarantine/, from earlier
recoveries, that are not in the log, with new queue offsets. Queues, index and checkpoint are built
from the new log. The old store is not changed.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import ExitCode, FormatError, NotAStoreError, UsageError, disk_errors, shown
from pyengine.formats import constants
from pyengine.formats.consume_queue import NOT_QUEUED, further_places, with_further_offsets
from pyengine.formats.paths import StorePaths, parse_segment_name, segment_name, without_log_folders
from pyengine.formats.record import (
    BEGIN,
    BODY_CRC_AT,
    HEAD_BY_FLAGS,
    I16,
    I32,
    I64,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
    V6_FLAGS,
    CaseLabel,
    Message,
    body_crc,
    decode_record,
    encode_blank,
)
from pyengine.formats.small_file import decode_config, encode_config, read_small_file
from pyengine.storage.check.check import NOT_KEPT, why_unusable
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.commit_log import LogDamage, LogRun, SegmentBytes, log_exists, next_whole_record, runs_of
from pyengine.storage.config import record_sizes
from pyengine.storage.consumer_offset import CANCELS_NAME, delay_marks
from pyengine.storage.durable_writes import create_file, make_folders, sync_descriptor, write_config
from pyengine.storage.file_system import own_folder, refuse_inside
from pyengine.storage.later_format import LEFT_BY_SALVAGE, find_later_features
from pyengine.storage.mapped_file import mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.quarantine import QuarantineEntry, is_quarantine, list_pieces
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import Findings, Progress, RecoveryReport, with_queue_names
from pyengine.storage.replication_state import NAME as REPLICATION

# ---- the logs: runs of complete records of the old one, and the new one, in which every offset of a record is changed -------------

_WRONG_BLANK = "blank of another length"
_ZEROS_LEFT_OUT_MAX = 8  # a record without properties ends in two zeros


def list_damaged_segments(folders: Iterable[Path]) -> tuple[list[tuple[int, Path]], set[int], list[tuple[int, Path]]]:
    """Return (start offset, path) of every 20-digit file in these folders, ascending, whatever its length; other names are ignored.

    The set has the start offsets of those that are no file: a folder, or a link to a disk that is not mounted. Last those
    whose start offset another file has too, one with as many bytes or more.
    """
    found, no_files = dict[int, list[Path]](), set[int]()
    for folder in folders:
        for name in sorted(os.listdir(folder)):
            start, path = parse_segment_name(name), folder / name
            if start is None:
                continue
            if not path.is_file():
                no_files.add(start)
            else:
                found.setdefault(start, []).append(path)
    for paths in found.values():
        if len(paths) > 1:
            paths.sort(key=used_end, reverse=True)
    first = {start: paths[0] for start, paths in sorted(found.items())}
    return list(first.items()), no_files - found.keys(), [(start, path) for start in first for path in found[start][1:]]


def carve(path: Path, base: int, size_bytes: int) -> Iterator[tuple[LogRun | LogDamage, memoryview]]:
    """Yield runs and skipped ranges of one segment in order, each with its bytes; `size_bytes`: its right length.

    Zeros up to the segment's end are left out. The bytes are valid until the next step.
    """
    if path.stat().st_size == 0:
        return
    with mapped(path) as mapping:
        end = base + min(len(mapping), size_bytes)
        yield from _carve(mapping, base, end, min(end, base + used_end(path)), base + size_bytes)


def carve_quarantined(entry: QuarantineEntry) -> Iterator[tuple[LogRun | LogDamage, memoryview]]:
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
            if isinstance(piece, LogRun):
                for _, record in records_of(piece, data):
                    yield decode_record(bytes(record))


def records_of(run: LogRun, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (physical offset, bytes) of each record of a run."""
    at = 0
    while at < len(data):
        size_bytes, _ = BEGIN.unpack_from(data, at)
        with data[at : at + size_bytes] as record:
            yield run.start + at, record
        at += size_bytes


def _carve(mapping: mmap.mmap, base: int, end: int, data_end: int, segment_end: int) -> Iterator[tuple[LogRun | LogDamage, memoryview]]:
    """Carve [base, end), which has only zeros from `data_end` on; a blank reaches to `segment_end`."""
    with memoryview(mapping) as view:
        for piece in runs_of(SegmentBytes(mapping, base), base, data_end, end, next_whole_record):
            at = piece.end if isinstance(piece, LogDamage) else piece.walk().end_offset
            if at > piece.start:
                with view[piece.start - base : at - base] as data:
                    yield (replace(piece, reason=str(CaseLabel.BLANK)) if piece.reason == _WRONG_BLANK else piece), data
            if isinstance(piece, LogRun) and piece.reason == CaseLabel.BLANK:
                if BEGIN.unpack_from(view, at - base)[0] == segment_end - at:
                    with view[at - base : end - base] as data:  # the bytes after the blank's head are undefined
                        yield LogDamage(at, segment_end, ""), data
                else:
                    piece.reason = _WRONG_BLANK


_WRITE_BYTES = 1 << 20
_QUEUE_ID_AT = 12
_PLACES = constants.PROPERTY_INNER_MULTI_QUEUE_OFFSET.encode()
_NUMBER_BYTES_MAX = 20


class Moves:
    """Where the old store's numbers are in the new one: ranges [old start, new start, how many] that moved by the same distance."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []

    def add(self, old: int, new: int, count: int = 1) -> None:
        """Note that [old, old + count) is at `new`, after all earlier ones."""
        if self._ranges:
            old_start, new_start, before = self._ranges[-1]
            if old - old_start == new - new_start == before:
                self._ranges[-1][2] += count
                return
        self._ranges.append([old, new, count])

    @property
    def last_distance(self) -> int:
        """The distance by which the newest numbers were lowered; 0 without any."""
        return self._ranges[-1][0] - self._ranges[-1][1] if self._ranges else 0

    def kept(self, old: int, before: int | None = None) -> int | None:
        """Return the new number; None if it is not in the new store, `before` if it is before all that are."""
        at = bisect_right(self._ranges, old, key=lambda one: one[0]) - 1
        if at < 0:
            return before
        old_start, new_start, count = self._ranges[at]
        return new_start + old - old_start if old - old_start < count else None

    def next_from(self, old: int) -> int:
        """Return the new number for a reader at the old number `old`: that of the first kept one from there on."""
        at = max(0, bisect_right(self._ranges, old, key=lambda one: one[0]) - 1)
        old_start, new_start, count = self._ranges[at]
        return new_start + min(max(0, old - old_start), count)


class SalvagedLog:
    """Appends records by RocketMQ's rule for space in a segment, each with its new offsets. Synced when closed.

    A context manager. Raises DiskFullError, DiskError or FlushError.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._folder = folder
        self._size_bytes = size_bytes
        self._file: BinaryIO | None = None
        self._segment = -size_bytes  # start of the open segment
        self._at = 0                 # physical offset of the next record
        self._places = Moves()       # physical offsets
        self._is_old_log = True  # the record that is appended is one of the old log; False: one after it
        self.queues: dict[tuple[str, int], Moves] = {}
        self._next: dict[tuple[str, int], int] = {}  # the next queue offset of each queue
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

    def append(self, old_offset: int, old_record: memoryview, *, is_old_log: bool) -> None:
        """Append a record that had been at `old_offset`: all of the old log first, then those of quarantine/.

        Of these the old queue offset is not mapped to the new one: the old log may have used that offset for another message since.
        """
        self._is_old_log, record, old_bytes = is_old_log, bytearray(old_record), len(old_record)
        self._renumber_places(record)
        room = self._segment + self._size_bytes - self._at
        if self._file is None or len(record) + constants.BLANK_HEADER_BYTES > room:
            self._file = self._roll(room)
        if self._is_old_log:
            self._places.add(old_offset, self._at, old_bytes)
        self._renumber(record)
        with disk_errors("write", self._path):
            self._file.write(record)
        self._at += len(record)
        self.records += 1
        self.kept_bytes += len(record)

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
        if len(properties) > constants.PROPERTIES_BYTES_MAX:  # only with damaged offsets: new offsets do not have more digits
            return
        record[at:] = I16.pack(len(properties)) + properties
        I32.pack_into(record, 0, len(record))

    def _next_offset(self, topic: str, queue_id: int, old: int) -> int:
        """Return the next queue offset of a queue, for the message that had the offset `old`."""
        new = self._next.get((topic, queue_id), old)
        self._next[topic, queue_id] = new + 1
        if self._is_old_log:
            self.queues.setdefault((topic, queue_id), Moves()).add(old, new)
        return new

    def _renumber(self, record: bytearray) -> None:
        I64.pack_into(record, PHYSICAL_OFFSET_AT, self._at)
        (sys_flag,) = I32.unpack_from(record, SYS_FLAG_AT)
        head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
        (prepared_offset,) = I64.unpack_from(record, head_bytes - 12)
        if prepared_offset:
            I64.pack_into(record, head_bytes - 12, self._places.kept(prepared_offset) or 0)
        if sys_flag & constants.SYS_FLAG_TRANSACTION_MASK in NOT_QUEUED:
            return
        topic_at = _topic_at(record)
        topic = str(record[topic_at : topic_at + record[topic_at - 1]], "utf-8", "replace")
        (queue_id,) = I32.unpack_from(record, _QUEUE_ID_AT)
        (queue_offset,) = I64.unpack_from(record, QUEUE_OFFSET_AT)
        new = self._next_offset(topic, queue_id, queue_offset)
        I64.pack_into(record, QUEUE_OFFSET_AT, new)
        if topic == constants.TRANSACTION_HALF_TOPIC and not self._is_old_log:
            self._halves_after[queue_id, queue_offset] = new
        if topic == constants.TRANSACTION_OP_TOPIC:
            self._renumber_half(record, head_bytes, queue_id)

    def _renumber_half(self, record: bytearray, head_bytes: int, queue_id: int) -> None:
        """Write the new number of the half message that an op message has ended; one that is not a number where that is not kept:
        another half message has its number now, or will have.
        """
        body = bytes(record[head_bytes : head_bytes + I32.unpack_from(record, head_bytes - I32.size)[0]])
        if not body.isdigit() or len(body) >= _NUMBER_BYTES_MAX:
            return
        number = int(body)
        new = self._halves_after.get((queue_id, number))
        if self._is_old_log:  # one before the first has kept its number
            halves = self.queues.get((constants.TRANSACTION_HALF_TOPIC, queue_id))
            new = halves.kept(number, before=number) if halves is not None else None
        text = b"%d" % new if new is not None else b""
        text = text.rjust(len(body), b"0") if 0 < len(text) <= len(body) else b"-" * len(body)
        record[head_bytes : head_bytes + len(body)] = text
        I32.pack_into(record, BODY_CRC_AT, body_crc(text))

    def _roll(self, room: int) -> BinaryIO:
        self._close_segment(room)
        self._segment += self._size_bytes
        self._at = self._segment
        return open(create_file(self._folder, segment_name(self._segment), self._size_bytes, allocate="none"), "wb", buffering=_WRITE_BYTES)

    def _close_segment(self, room: int = 0) -> None:
        """Close the open segment, if there is one, with a blank in its `room`."""
        if (file := self._file) is not None:
            self._file = None
            with disk_errors("write", self._path), file:
                file.write(encode_blank(room) if room else b"")
                file.flush()
                sync_descriptor(file.fileno(), self._path)

    @property
    def _path(self) -> Path:
        return self._folder / segment_name(self._segment)


def _topic_at(record: bytearray) -> int:
    """Return the position of the topic; the byte before it is its length, and length and bytes of the properties follow."""
    (sys_flag,) = I32.unpack_from(record, SYS_FLAG_AT)
    head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
    body_bytes: int = I32.unpack_from(record, head_bytes - 4)[0]
    return head_bytes + body_bytes + 1


# ---- the store -----------------------------------------------------------------------

LOST = "lost"  # a reason in addition to those of formats.record: bytes that were synced are missing
MISSING_LISTED_MAX = 1000


@dataclass(frozen=True, slots=True)
class SalvageReport(Findings):
    """The records that were copied, and the ranges that were not."""

    records: int
    kept_bytes: int
    skipped: tuple[LogDamage, ...]
    missing_segments: tuple[int, ...]  # start offsets
    moved_queues: dict[tuple[str, int], int]  # by how much the queue's newest offsets moved up
    quarantined: int  # records that came from quarantine/, after those of the log
    lost_beyond_end: int | None  # bytes that had been synced after the last record; None: no watermark tells
    end_offset: int
    written_end: int  # of the new log; end_offset is how far its recovery found it whole
    recovery: RecoveryReport  # of the new store
    notes: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        is_all = not (self.skipped or self.missing_segments or self.end_offset < self.written_end)
        return ExitCode.OK if is_all else ExitCode.REPAIRED

    @property
    def sentence(self) -> str:
        return f"{self.records:,} records, {self.kept_bytes:,} bytes, were copied"

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        fields = Findings.to_dict(self) | {"moved_queues": with_queue_names(self.moved_queues, "by")}
        return {name: value for name, value in fields.items() if name not in ("recovery", "written_end", "sentence")}


def salvage(
    root: Path | str, destination: Path | str, geometry: Geometry, *,
    options: EngineConfig | None = None, progress: Progress | None = None, with_quarantine: bool = True,
    settings: EngineConfig | None = None,
) -> SalvageReport:
    """Make a store at `destination`, an absent or empty directory, from the valid records of the store at `root`.

    The records in quarantine/ follow those of the log, unless `with_quarantine` is False. If `root` is a store's quarantine/
    alone, or a copy of it, the new store has the messages of its pieces, by physical offset. The new store records the sizes of
    `settings`. Root makes it through no link of another user, and in no directory in which another user can put one.

    Raises NotAStoreError, UsageError, DiskFullError or DiskError; no file is left at the
    destination then.
    """
    started_s = time.monotonic()
    root, destination = Path(root), Path(destination)
    if not log_exists(root) and not is_quarantine(root):
        raise NotAStoreError(f"{root} holds no store: there is no commitlog in it, and no piece of a log that recovery moved aside")
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is not an empty directory; name a new one")
    refuse_inside(root, destination)
    with own_folder(destination) as held:
        if any(held.iterdir()):
            raise UsageError(f"{destination} is not an empty directory; name a new one")
        try:
            report = _salvage(root, held, geometry, options, progress, started_s, with_quarantine)
            if settings is not None:
                record_sizes(held, replace(settings, store_path_commit_log="", read_only_commit_log_store_paths=""))  # its log is in it
            return replace(report, notes=tuple(map(shown, report.notes)))
        except BaseException:  # the directory itself stays with its rights if it was there; it may be a mount
            for path in held.iterdir():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            raise


def _missing(segments: Sequence[tuple[int, Path]], size_bytes: int) -> tuple[tuple[int, ...], list[str]]:
    """Return the start offsets of missing segments between others; and a sentence if there are too many to list."""
    missing: list[int] = []
    notes = []
    for (before, _), (after, path) in itertools.pairwise(segments):
        starts = range(before + size_bytes, after, size_bytes)
        missing += starts[:MISSING_LISTED_MAX]
        if len(starts) > MISSING_LISTED_MAX:
            notes.append(f"{len(starts):,} segments are missing before {path.name}; the first {MISSING_LISTED_MAX:,} are listed")
    return tuple(missing), notes


def _salvage(
    root: Path, destination: Path, geometry: Geometry, options: EngineConfig | None, progress: Progress | None,
    started_s: float, with_quarantine: bool,
) -> SalvageReport:
    size_bytes = geometry.mapped_file_size_commit_log_bytes
    has_log = log_exists(root)
    folders = StorePaths(root).commit_log_folders.all if has_log else ()
    segments, no_files, copies = list_damaged_segments(folder for folder in folders if folder.is_dir())
    missing, notes = _missing(segments, size_bytes)
    missing = tuple(sorted({*missing, *no_files}))
    notes += [f"the log's folder {folder} does not exist: if its disk is not mounted, mount it and salvage again"
              for folder in folders if not folder.is_dir()]
    skipped: list[LogDamage] = []
    unsure: list[LogDamage] = []  # zeros that are the end of the log, unless records follow
    end = segments[0][0] if segments else 0
    with SalvagedLog(StorePaths(destination).commit_log, size_bytes) as log:
        for number, (base, path) in enumerate(segments, 1):
            reached = base
            for piece, data in carve(path, base, size_bytes):
                skipped += unsure
                unsure.clear()
                end = reached = piece.reached if isinstance(piece, LogRun) else piece.end
                if isinstance(piece, LogRun):
                    for offset, record in records_of(piece, data):
                        log.append(offset, record, is_old_log=True)
                elif piece.reason:
                    skipped.append(piece)
            there = max(reached, base + min(size_bytes, path.stat().st_size))
            if reached < there:
                unsure.append(LogDamage(reached, there, str(CaseLabel.ZEROES)))
            if there < base + size_bytes:
                unsure.append(LogDamage(there, base + size_bytes, LOST))
            if progress is not None:
                progress(number * size_bytes, len(segments) * size_bytes)
        if has_log:
            notes += copy_config(root, destination, log.queues)
        moved = {key: queue.last_distance for key, queue in log.queues.items() if queue.last_distance}
        pieces = list_pieces(root) if not has_log else list_pieces(StorePaths(root).quarantine) if with_quarantine else []
        first, seen = dict(segments), set[tuple[int, bytes]]()
        for base, path in copies:
            added, _ = _append_pieces(carve(path, base, size_bytes), log, segments, size_bytes, seen)
            notes.append(f"{path} is the segment of {first[base]} too: {added:,} records that are only in it follow those of the log")
        carved = itertools.chain.from_iterable(carve_quarantined(entry) for entry in pieces if entry.holds_messages)
        quarantined, left_out = _append_pieces(carved, log, segments, size_bytes, seen)
        if not has_log:
            skipped += left_out
            notes += [f"{entry.name}: {entry.problem}" for entry in pieces if entry.problem]
    reading = read_watermark(root)
    durable = reading.watermark
    if durable is not None and end < durable.flushed:
        skipped.append(LogDamage(end, durable.flushed, LOST))
    notes += [f"{one.sentence}; nothing of that comes over" for one in find_later_features(root)]
    report = recover(MessageStore(destination, geometry), options=options)
    if report.end_offset < log.end_offset:
        notes.append(f"the new log was written to {log.end_offset:,}, and its recovery ended it at {report.end_offset:,}: "
                     "compare with the damaged store before you give that up")
    if durable is None and has_log:
        notes.append(f"whether messages are missing after {end:,}, where the last one ends, is unknown: "
                     + (reading.damage or "the store has no config/watermark, which would say up to where it had been synced"))
    return SalvageReport(
        log.records, log.kept_bytes, tuple(skipped), missing,
        moved, quarantined,
        None if durable is None else max(0, durable.flushed - end),
        report.end_offset, log.end_offset, report, tuple(notes), time.monotonic() - started_s,
    )


def _append_pieces(
    pieces: Iterable[tuple[LogRun | LogDamage, memoryview]], log: SalvagedLog, segments: Sequence[tuple[int, Path]], size_bytes: int,
    seen: set[tuple[int, bytes]],
) -> tuple[int, list[LogDamage]]:
    """Append the complete records of these pieces that are neither in the log nor `seen`; return their number, and what they lack."""
    before = len(seen)
    left_out: list[LogDamage] = []
    for piece, data in pieces:
        if isinstance(piece, LogDamage):
            left_out += [piece] if piece.reason not in ("", str(CaseLabel.BLANK)) else []
            continue
        for offset, record in records_of(piece, data):
            if _is_there(segments, size_bytes, offset, record):
                continue
            known = offset, hashlib.sha256(record).digest()
            if known not in seen:
                log.append(offset, record, is_old_log=False)
                seen.add(known)
    return len(seen) - before, left_out


def _is_there(segments: Sequence[tuple[int, Path]], size_bytes: int, offset: int, record: memoryview) -> bool:
    """Whether a segment has these bytes there: a recovery that was killed has copied them and not truncated the log yet."""
    number = bisect_right(segments, offset, key=lambda segment: segment[0])  # the given size may be wrong
    base, path = segments[number - 1] if number else (offset, None)
    if path is None or offset >= base + size_bytes:
        return False
    with open(path, "rb") as file:
        file.seek(offset - base)
        return file.read(len(record)) == record


# Files of the engine that wrote the old store, or of an unfinished change to it, which are not copied.
_NOT_COPIED = LEFT_BY_SALVAGE | NOT_KEPT | frozenset({"engine-id", "epoch", "watermark", "recovery", "recovered", "rebuild", "cut",
                                               "sync-failure", "log-begin", REPLICATION})
_NOT_COPIED_SUFFIXES = (".tmp", ".bak", ".damaged")

Queues = Mapping[tuple[str, int], Moves]


def copy_config(root: Path, destination: Path, queues: Queues) -> list[str]:
    """Copy config/*; return a sentence for each file that could not be used: its `.bak` was copied, or it was left out."""
    folder = StorePaths(root).config
    found = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    notes = []
    for name in sorted({path.name.removesuffix(".bak") if path.name.endswith(".json.bak") else path.name for path in found}):
        path = folder / name
        if name in _NOT_COPIED or path.suffix in _NOT_COPIED_SUFFIXES:
            continue
        if path.suffix == ".json" and (why := why_unusable(path)):
            backup = folder / f"{name}.bak"
            if why_unusable(backup):
                notes.append(f"config/{name} {why}: it was left out")
                continue
            notes.append(f"config/{name} {why}: config/{backup.name}, its content before the last change, was used instead")
            path = backup
        try:
            content = read_small_file(path)
            if name == CANCELS_NAME:
                if delay_marks(content).strip():
                    notes.append(f"config/{name} was left out, since messages have other ids now: those that were cancelled are delivered")
                continue
            if name == "engine.toml":
                content = without_log_folders(content)
            if name in ("consumerOffset.json", "delayOffset.json"):
                table = decode_config(content.decode("utf-8"))
                _move_offsets(table["offsetTable"], queues, is_delay=name == "delayOffset.json")
                content = encode_config(table).encode("utf-8")
        except (OSError, FormatError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(f"config/{name} could not be read and was left out: {error}")
            continue
        write_config(StorePaths(destination).config / name, content, keep_backup=False)
    return notes


def _move_offsets(table: dict[str, Any], queues: Queues, *, is_delay: bool) -> None:
    """Change the offsets in {"topic@group": {queue id: offset}} to those of the new store; {level: offset} with `is_delay`.

    Delay level n waits in queue n - 1 of the schedule topic.
    """
    for name, offsets in {constants.SCHEDULE_TOPIC: table}.items() if is_delay else table.items():
        for number, offset in offsets.items():
            queue = queues.get((name.partition("@")[0], int(number) - is_delay))
            if queue is not None:
                offsets[number] = queue.next_from(offset)
