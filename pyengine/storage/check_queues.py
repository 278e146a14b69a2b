"""The queue part of the whole-store check: every entry points to its own record, and every record has its entry."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, SCHEDULE_TOPIC
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES
from pyengine.formats.message import decode_record
from pyengine.formats.paths import StorePaths
from pyengine.native.store_check import fitting_entries
from pyengine.storage.check_log import LogFacts, LogSegments
from pyengine.storage.check_report import CheckReport, Findings, Severity
from pyengine.storage.file_zeros import used_end
from pyengine.storage.queue_recovery import QueueState, live_entries

PROPERTY_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
PROPERTY_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"


class QueueCheck:
    """Looks at one queue after the other, then for queues that are missing."""

    def __init__(
        self, root: Path, log: LogSegments, facts: LogFacts, findings: Findings, report: CheckReport, *,
        is_ours: bool, was_stopped: bool, is_running: bool,
    ) -> None:
        self._root = root
        self._log = log
        self._facts = facts
        self._findings = findings
        self._report = report
        self._is_running = is_running
        # RocketMQ lives with a queue that it lost in part or whose topic was deleted; our own never loses one.
        settled_by_recovery = not was_stopped or facts.is_damaged
        self._missing_severity = Severity.ERROR if is_ours and not settled_by_recovery else Severity.WARNING
        self._beyond_severity = Severity.WARNING if settled_by_recovery or not is_ours else Severity.ERROR

    def check(self, queues: list[QueueState]) -> None:
        """All queues on the disk, then the ones that only the log knows."""
        for queue in queues:
            self._check_queue(queue)
        if self._is_running:
            return
        known = {(queue.topic, queue.queue_id) for queue in queues}
        for (topic, queue_id), in_log in sorted(self._facts.queues.items()):
            if (topic, queue_id) not in known:
                self._add(
                    self._missing_severity, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                    f"the log holds {in_log.count} messages of this queue, which has no files",
                )

    def _check_queue(self, queue: QueueState) -> None:
        self._report.queues += 1
        expected_start = queue.files[0].start_offset
        after, own_entries = -1, 0
        for number, file in enumerate(queue.files):
            if file.start_offset != expected_start:
                self._add(Severity.ERROR, "queue gap", self._name(file.path), None,
                          f"the file before it, {expected_start:020d}, is missing")
            expected_start = file.start_offset + queue.size_bytes
            count, _ = live_entries(file.path, queue.size_bytes)
            used = used_end(file.path, count * CQ_ENTRY_BYTES)
            is_last = number + 1 == len(queue.files)
            if used > count * CQ_ENTRY_BYTES or (count * CQ_ENTRY_BYTES < queue.size_bytes and not is_last):
                self._add(Severity.ERROR, "queue hole", self._name(file.path), count * CQ_ENTRY_BYTES,
                          f"entry {file.start_offset // CQ_ENTRY_BYTES + count} is none, but later ones follow")
            with open(file.path, "rb") as opened:
                entries = opened.read(count * CQ_ENTRY_BYTES)
            after, own = self._check_entries(queue, file.path, file.start_offset // CQ_ENTRY_BYTES, entries, after)
            own_entries += own
        in_log = self._facts.queues.get((queue.topic, queue.queue_id))
        if in_log is not None and own_entries < in_log.count and not self._is_running:
            self._add(
                self._missing_severity, "missing entries", f"consumequeue/{queue.topic}/{queue.queue_id}", None,
                f"only {own_entries} of the {in_log.count} messages that the log holds for this queue have an entry",
            )

    def _check_entries(self, queue: QueueState, path: Path, first_offset: int, entries: bytes, after: int) -> tuple[int, int]:
        """The last physical offset that was passed, and how many entries are of records of this queue itself."""
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
                    if not self._is_running:
                        self._add(self._beyond_severity, "entry beyond the log", self._name(path), at * CQ_ENTRY_BYTES,
                                  f"entry {first_offset + at} points to {offset}, where the log has ended")
                    return after, own
                fitting = 0
            else:
                base, limit, view = segment
                fitting = fitting_entries(
                    view, base, limit, queue.topic, queue.queue_id, first_offset + at,
                    memoryview(entries)[at * CQ_ENTRY_BYTES :], after=after, check_tags=queue.topic != SCHEDULE_TOPIC,
                )
            self._report.queue_entries += fitting
            own += fitting
            at += fitting
            if fitting:
                after = _offset(entries, at - 1)
            if at == count or (fitting and self._is_elsewhere(entries, at, segment)):
                continue
            offset = _offset(entries, at)
            if self._is_multi_dispatched(queue, entries, first_offset, at, after):
                self._report.queue_entries += 1
            elif not self._is_elsewhere(entries, at, segment) or segment is None:
                self._add(Severity.ERROR, "wrong entry", self._name(path), at * CQ_ENTRY_BYTES,
                          f"entry {first_offset + at} does not point to its message (log offset {offset})")
            after = max(after, offset)
            at += 1
        return after, own

    @staticmethod
    def _is_elsewhere(entries: bytes, at: int, segment) -> bool:
        """True when the entry points into another segment than the one just looked at."""
        return segment is not None and not segment[0] <= _offset(entries, at) < segment[1]

    def _is_multi_dispatched(self, queue: QueueState, entries: bytes, first_offset: int, at: int, after: int) -> bool:
        """True for an entry of a light queue (docs/formats.md section 8.6): a record of another queue that names this."""
        offset, size_bytes, _ = ENTRY.unpack_from(entries, at * CQ_ENTRY_BYTES)
        segment = self._log.view_at(offset)
        if segment is None or offset <= after:
            return False
        try:
            message = decode_record(segment[2], offset - segment[0])
        except FormatError:
            return False
        names = message.properties.get(PROPERTY_MULTI_DISPATCH, "").split(",")
        numbers = message.properties.get(PROPERTY_MULTI_QUEUE_OFFSET, "").split(",")
        return message.size_bytes == size_bytes and (queue.topic, str(first_offset + at)) in zip(names, numbers)

    def _add(self, severity: Severity, kind: str, file: str, offset: int | None, text: str) -> None:
        self._findings.add(severity, kind, file, offset, text)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(StorePaths(self._root).root))


def _offset(entries: bytes, number: int) -> int:
    return ENTRY.unpack_from(entries, number * CQ_ENTRY_BYTES)[0]
