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
from pyengine.formats.record import store_timestamp_ms
from pyengine.storage.check.log import LogFacts, QueueInLog
from pyengine.storage.check.report import Findings, Severity
from pyengine.storage.check.work import LogSegments, QueueFile, QueueRules, StoreUnderCheck
from pyengine.storage.consume_queue import ConsumeQueue
from pyengine.storage.index_file import is_plausible, read_index_header
from pyengine.storage.mapped_file import MappedFileQueue, MappingCache
from pyengine.storage.recovery.queues import QueueState


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
            store.findings.add(rules.missing, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                               f"the log holds {in_log.count} messages of this queue, which has no files")
    if expects_light_queues or +further:
        for (topic, queue_id), count in sorted(facts.further.items()):
            have = further[topic, queue_id]
            if have < count:
                store.findings.add(
                    rules.missing, "missing entries", f"consumequeue/{topic}/{queue_id}", None,
                    f"only {have} of the {count} messages that name this queue as a further one have an entry in it")


def _check_queue(store: StoreUnderCheck, rules: QueueRules, queue: QueueState, in_log: QueueInLog | None) -> int:
    """Check one queue; return the number of its entries for records of other queues."""
    store.report.queues += 1
    expected_start = queue.files[0].start_offset
    after, own_entries, further = -1, 0, 0
    for file in queue_files(store.root, queue):
        if file.start_offset != expected_start:
            store.findings.error("queue gap", file.name, None, f"the file before it, {expected_start:020d}, is missing")
        expected_start = file.start_offset + queue.size_bytes
        found = store.work.queue_file(store.log, file, rules, after)
        store.findings.take(found.findings)
        store.report.queue_entries += found.entries
        own_entries += found.own
        further += found.entries - found.own
        after = found.after
    if in_log is not None and own_entries < in_log.count and not store.is_running:
        store.findings.add(
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
    root, findings, paths = store.root, store.findings, store.store
    if not paths.consume_queue_ext.is_dir():
        return
    cache = MappingCache()
    for queue in queues:
        reader = ConsumeQueue(
            queue.topic, queue.queue_id, MappedFileQueue(queue.folder, queue.size_bytes, cache),
            MappedFileQueue(paths.queue_ext_folder(queue.topic, queue.queue_id), paths.queue_ext_file_bytes, cache),
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


def check_index(store: StoreUnderCheck, files: Sequence[Path]) -> None:
    """Check the index files that `work` got at the beginning: a running engine creates and deletes others meanwhile."""
    log, work, findings, layout = store.log, store.work, store.findings, store.store.geometry.index_layout
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
