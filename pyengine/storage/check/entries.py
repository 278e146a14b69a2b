"""The entries of one file of a consume queue against the log: the part of a check that reads, one file at a time.

A file needs of the one before it only where that ended in the log (`after`), so that
files may be looked at anywhere and in any order, with a guess that is confirmed later.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, SCHEDULE_TOPIC
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES, further_offset, is_filler, is_live
from pyengine.formats.record import decode_record
from pyengine.native.store_check import count_matching_entries
from pyengine.storage.check.report import Findings, Severity
from pyengine.storage.check.segments import LogSegments
from pyengine.storage.mapped_file import used_end
from pyengine.storage.recovery.queues import live_entries


@dataclass(frozen=True, slots=True)
class QueueRules:
    """How bad it is that a queue lacks entries, and that it has entries beyond the log; a running engine's are not judged."""

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
        """The queue offset of its first entry."""
        return self.start_offset // CQ_ENTRY_BYTES


class EntriesFound(NamedTuple):
    """`after`: the last physical offset that was passed; `entries` that fit, `own` of them of records of this queue itself."""

    after: int
    own: int
    entries: int
    findings: Findings


def check_queue_file(log: LogSegments, file: QueueFile, rules: QueueRules, after: int) -> EntriesFound:
    """Look at every entry; `after`: the last physical offset that was passed in the files before it, -1 for none."""
    return _Look(log, file, rules).run(after)


def guess_after(log: LogSegments, file: QueueFile) -> int:
    """Where the file before it has most likely ended in the log: its last entry, if the log still holds that record."""
    if file.previous is None:
        return -1
    with open(file.previous, "rb") as opened:
        opened.seek(file.size_bytes - CQ_ENTRY_BYTES)
        data = opened.read(CQ_ENTRY_BYTES)
    entry = ENTRY.unpack(data.ljust(CQ_ENTRY_BYTES, b"\0"))
    return entry[0] if is_live(entry) and not is_filler(entry) and entry[0] >= log.min_offset else -1


class _Look:
    def __init__(self, log: LogSegments, file: QueueFile, rules: QueueRules) -> None:
        self._log = log
        self._file = file
        self._rules = rules
        self._findings = Findings()
        self._entries = 0

    def run(self, after: int) -> EntriesFound:
        file = self._file
        count, _ = live_entries(file.path, file.size_bytes)
        used = used_end(file.path, count * CQ_ENTRY_BYTES)
        if used > count * CQ_ENTRY_BYTES or (count * CQ_ENTRY_BYTES < file.size_bytes and not file.is_last):
            self._findings.error("queue hole", file.name, count * CQ_ENTRY_BYTES,
                                 f"entry {file.first + count} is none, but later ones follow")
        with open(file.path, "rb") as opened:
            entries = opened.read(count * CQ_ENTRY_BYTES)
        after, own = self._check(entries, after)
        return EntriesFound(after, own, self._entries, self._findings)

    def _check(self, entries: bytes, after: int) -> tuple[int, int]:
        """The last physical offset that was passed, and how many entries are of records of this queue itself."""
        file = self._file
        count = len(entries) // CQ_ENTRY_BYTES
        at = own = 0
        while entries.startswith(FILLER_BYTES, at * CQ_ENTRY_BYTES):
            at += 1
        # Entries of records that the cleaner has deleted stand at the front.
        at = bisect_left(range(count), self._log.min_offset, lo=min(at, count), key=lambda n: _offset(entries, n))
        while at < count:
            offset = _offset(entries, at)
            segment = self._log.view_at(offset)
            if segment is None:
                if offset >= self._log.end:
                    if not self._rules.is_running:
                        self._findings.add(self._rules.beyond, "entry beyond the log", file.name, at * CQ_ENTRY_BYTES,
                                           f"entry {file.first + at} points to {offset}, where the log has ended")
                    return after, own
                fitting = 0
            else:
                base, limit, view = segment
                fitting = count_matching_entries(
                    view, base, limit, file.topic, file.queue_id, file.first + at,
                    memoryview(entries)[at * CQ_ENTRY_BYTES :], after=after, check_tags=file.topic != SCHEDULE_TOPIC,
                )
            self._entries += fitting
            own += fitting
            at += fitting
            if fitting:
                after = _offset(entries, at - 1)
            if at == count or (fitting and self._is_elsewhere(entries, at, segment)):
                continue
            offset = _offset(entries, at)
            if self._log.is_lost(offset):
                pass
            elif self._is_multi_dispatched(entries, at, after):
                self._entries += 1
            elif not self._is_elsewhere(entries, at, segment) or segment is None:
                self._findings.error("wrong entry", file.name, at * CQ_ENTRY_BYTES,
                                     f"entry {file.first + at} does not point to its message (log offset {offset})")
            after = max(after, offset)
            at += 1
        return after, own

    @staticmethod
    def _is_elsewhere(entries: bytes, at: int, segment) -> bool:
        """True when the entry points into another segment than the one just looked at."""
        return segment is not None and not segment[0] <= _offset(entries, at) < segment[1]

    def _is_multi_dispatched(self, entries: bytes, at: int, after: int) -> bool:
        """True for an entry of a light queue (docs/formats.md section 8.6): a record of another queue that names this.

        Its number may be higher: RocketMQ passes over one where a record names the queue twice, and appends all the same.
        """
        offset, size_bytes, _ = ENTRY.unpack_from(entries, at * CQ_ENTRY_BYTES)
        segment = self._log.view_at(offset)
        if segment is None or offset <= after:
            return False
        try:
            message = decode_record(segment[2], offset - segment[0])
        except FormatError:
            return False
        number = further_offset(message, self._file.topic, self._file.queue_id)
        return message.size_bytes == size_bytes and number is not None and number >= self._file.first + at


def _offset(entries: bytes, number: int) -> int:
    return ENTRY.unpack_from(entries, number * CQ_ENTRY_BYTES)[0]
