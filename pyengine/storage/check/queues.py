"""The queues and the index in the whole-store check: every entry points to its own record, and every record has its entries.

If a queue has an extension, every unit that an entry points to must exist and belong to the entry's message.
Of the index it checks the chains, and that every entry points to a record with its key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyengine.errors import StoreRefusedError
from pyengine.formats.constants import CQ_ENTRY_BYTES, LMQ_PREFIX, LMQ_QUEUE_ID
from pyengine.formats.consume_queue import ENTRY, ConsumeQueueExtUnit, is_ext_address
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import store_timestamp_ms
from pyengine.storage.check.log import LogFacts
from pyengine.storage.check.report import Findings, Severity
from pyengine.storage.check.work import LogSegments, QueueFile, QueueRules, StoreUnderCheck
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.mapped_file import MappedFileQueue, MappingCache
from pyengine.storage.recovery.dispatch import is_plausible, list_index_files, read_index_header
from pyengine.storage.recovery.queues import QueueState


class QueueCheck:
    """Checks one queue after the other, then finds missing queues."""

    def __init__(self, store: StoreUnderCheck, facts: LogFacts) -> None:
        self._store = store
        self._findings = store.findings
        self._facts = facts
        self._further: Counter[tuple[str, int]] = Counter()  # entries of other queues' records, by queue
        # RocketMQ tolerates a queue that has lost entries or whose topic was deleted; pyengine never loses entries.
        settled_by_recovery = not store.was_stopped or facts.is_damaged
        self.rules = QueueRules(
            missing=Severity.ERROR if store.is_ours and not settled_by_recovery else Severity.WARNING,
            beyond=Severity.WARNING if settled_by_recovery or not store.is_ours else Severity.ERROR,
            is_running=store.is_running,
        )

    def check(self, queues: list[QueueState]) -> None:
        """Check all queues on the disk, then those that only the log has."""
        for queue in queues:
            self._check_queue(queue)
        if self._store.is_running:
            return
        known = {(queue.topic, queue.queue_id) for queue in queues}
        for (topic, queue_id), in_log in sorted(self._facts.queues.items()):
            if (topic, queue_id) not in known:
                self._findings.add(
                    self.rules.missing, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                    f"the log holds {in_log.count} messages of this queue, which has no files",
                )

    def check_light_queues(self, *, is_expected: bool) -> None:
        """Report further entries of records (docs/formats.md section 8.6) that no queue has; call it after `check`.

        If the store has no light queue, they are checked only if `is_expected`: RocketMQ may have been set to make none.
        """
        if self._store.is_running or not (is_expected or +self._further):
            return
        for (topic, queue_id), count in sorted(self._facts.further.items()):
            have = self._further[topic, queue_id]
            if have < count:
                self._findings.add(
                    self.rules.missing, "missing entries", f"consumequeue/{topic}/{queue_id}", None,
                    f"only {have} of the {count} messages that have a further place in this queue have an entry there",
                )

    def _check_queue(self, queue: QueueState) -> None:
        self._store.report.queues += 1
        expected_start = queue.files[0].start_offset
        after, own_entries = -1, 0
        for file in queue_files(self._store.root, queue):
            if file.start_offset != expected_start:
                self._findings.error("queue gap", file.name, None, f"the file before it, {expected_start:020d}, is missing")
            expected_start = file.start_offset + queue.size_bytes
            found = self._store.work.queue_file(self._store.log, file, self.rules, after)
            self._findings.take(found.findings)
            self._store.report.queue_entries += found.entries
            own_entries += found.own
            self._further[_counted_as(queue.topic, queue.queue_id)] += found.entries - found.own
            after = found.after
        in_log = self._facts.queues.get((queue.topic, queue.queue_id))
        if in_log is not None and own_entries < in_log.count and not self._store.is_running:
            self._findings.add(
                self.rules.missing, "missing entries", f"consumequeue/{queue.topic}/{queue.queue_id}", None,
                f"only {own_entries} of the {in_log.count} messages that the log holds for this queue have an entry",
            )


def _counted_as(topic: str, queue_id: int) -> tuple[str, int]:
    """Return the key of a queue; a light queue has one key for all queue ids that RocketMQ may use (consume_queue.further_offset)."""
    return (topic, LMQ_QUEUE_ID) if topic.startswith(LMQ_PREFIX) else (topic, queue_id)


def queue_files(root: Path, queue: QueueState) -> Iterator[QueueFile]:
    """Yield the files of a queue, in order."""
    previous = None
    for number, file in enumerate(queue.files):
        yield QueueFile(queue.topic, queue.queue_id, file.path, str(file.path.relative_to(StorePaths(root).root)),
                        file.start_offset, queue.size_bytes, number + 1 == len(queue.files), previous)
        previous = file.path


_TIME_READABLE_BYTES = 68 + 8  # after a 20-byte host


def check_extensions(store: StoreUnderCheck, ext_file_bytes: int, queues: Sequence[QueueState]) -> None:
    """Check the extensions of all queues that have one; for other queues it only tests for the folder."""
    root, findings, paths = store.root, store.findings, StorePaths(store.root)
    if not paths.consume_queue_ext.is_dir():
        return
    cache = MappingCache()
    for queue in queues:
        reader = ConsumeQueue(
            queue.topic, queue.queue_id, MappedFileQueue(queue.folder, queue.size_bytes, cache),
            MappedFileQueue(paths.queue_ext_folder(queue.topic, queue.queue_id), ext_file_bytes, cache),
        )
        try:
            _check_units(root, queue, reader, store.log, findings)
        except StoreRefusedError as error:
            findings.error("extension", f"consumequeue_ext/{queue.topic}/{queue.queue_id}", None,
                           str(error).replace(f"{root}/", ""))


def _check_units(root: Path, queue: QueueState, reader: ConsumeQueue, log: LogSegments, findings: Findings) -> None:
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
                    findings.error("extension", name, at * CQ_ENTRY_BYTES,
                                   f"the unit that entry {file.start_offset // CQ_ENTRY_BYTES + at} names {wrong}")


def _wrong(unit: ConsumeQueueExtUnit | None, offset: int, log: LogSegments) -> str:
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


def index_files_to_check(root: Path, *, is_running: bool) -> list[Path]:
    """Return the index files, oldest first, without the newest of a running engine, which may have an unfinished put."""
    files = list_index_files(root)
    return files[:-1] if is_running else files


def check_index(store: StoreUnderCheck, layout: IndexLayout, files: Sequence[Path]) -> None:
    """Check the index files that `work` got at the beginning: a running engine creates and deletes others meanwhile."""
    log, work, findings = store.log, store.work, store.findings
    covered_from, keys = None, 0
    for path in files:
        if store.is_running and not path.exists():
            continue
        store.report.index_files += 1
        name = str(path.relative_to(store.root))
        if path.stat().st_size != layout.size_bytes:
            findings.error("index length", name, None,
                           f"{path.stat().st_size} bytes, not {layout.size_bytes} as its slots and entries need")
            continue
        header = read_index_header(path)
        if not is_plausible(header, layout):
            findings.error("index header", name, 0, f"the header makes no sense: {header}")
            continue
        broken = work.broken_chain(path, layout, header.index_count)
        if broken:
            where = layout.entry_at(broken) if broken > 0 else layout.slot_at(-1 - broken)
            what = f"entry {broken}" if broken > 0 else f"slot {-1 - broken}"
            findings.error("index chain", name, where, f"{what} is not chained as its hash wants it")
            continue
        if covered_from is None and header.index_count > 1:
            covered_from = header.begin_physical_offset
        for part in work.index_parts(path, name, layout, header.index_count):
            found = work.keys(log, part)
            findings.take(found.findings)
            store.report.index_keys += found.keys
            keys += found.keys
            if found.beyond:
                if not store.is_running:  # a running engine may have filled the file during the check
                    findings.warning("key beyond the log", name, layout.entry_at(found.beyond),
                                     f"{header.index_count - found.beyond} entries name records after the log's end, {log.end}")
                break
    if covered_from is None or store.is_running:
        return
    expected = work.count_keys(log, max(covered_from, log.min_offset))
    if keys < expected:
        severity = Severity.ERROR if store.is_ours and store.was_stopped else Severity.WARNING
        findings.add(severity, "missing keys", "index", None,
                     f"the index holds {keys} of the {expected} keys that the log has from {covered_from} on")
