"""The queue part of the whole-store check: every entry points to its own record, and every record has its entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pyengine.formats.constants import LMQ_PREFIX, LMQ_QUEUE_ID
from pyengine.formats.paths import StorePaths
from pyengine.storage.check.entries import QueueFile, QueueRules
from pyengine.storage.check.log import LogFacts
from pyengine.storage.check.report import CheckReport, Findings, Severity
from pyengine.storage.check.segments import LogSegments
from pyengine.storage.check.work import CheckWork
from pyengine.storage.recovery.queues import QueueState


class QueueCheck:
    """Looks at one queue after the other, then for queues that are missing."""

    def __init__(
        self, root: Path, log: LogSegments, facts: LogFacts, work: CheckWork, findings: Findings, report: CheckReport, *,
        is_ours: bool, was_stopped: bool, is_running: bool,
    ) -> None:
        self._root = root
        self._log = log
        self._facts = facts
        self._work = work
        self._findings = findings
        self._report = report
        self._is_running = is_running
        self._further: Counter[tuple[str, int]] = Counter()  # entries of other queues' records, by queue
        # RocketMQ lives with a queue that it lost in part or whose topic was deleted; our own never loses one.
        settled_by_recovery = not was_stopped or facts.is_damaged
        self.rules = QueueRules(
            missing=Severity.ERROR if is_ours and not settled_by_recovery else Severity.WARNING,
            beyond=Severity.WARNING if settled_by_recovery or not is_ours else Severity.ERROR,
            is_running=is_running,
        )

    def check(self, queues: list[QueueState]) -> None:
        """All queues on the disk, then the ones that only the log knows."""
        for queue in queues:
            self._check_queue(queue)
        if self._is_running:
            return
        known = {(queue.topic, queue.queue_id) for queue in queues}
        for (topic, queue_id), in_log in sorted(self._facts.queues.items()):
            if (topic, queue_id) not in known:
                self._findings.add(
                    self.rules.missing, "missing queue", f"consumequeue/{topic}/{queue_id}", None,
                    f"the log holds {in_log.count} messages of this queue, which has no files",
                )

    def check_light_queues(self, *, is_expected: bool) -> None:
        """Further entries of records (docs/formats.md section 8.6) that no queue has; after `check`.

        Not looked for in a store without any, unless they are expected: RocketMQ makes none where its settings say so.
        """
        if self._is_running or not (is_expected or +self._further):
            return
        for (topic, queue_id), count in sorted(self._facts.further.items()):
            have = self._further[topic, queue_id]
            if have < count:
                self._findings.add(
                    self.rules.missing, "missing entries", f"consumequeue/{topic}/{queue_id}", None,
                    f"only {have} of the {count} messages that have a further place in this queue have an entry there",
                )

    def _check_queue(self, queue: QueueState) -> None:
        self._report.queues += 1
        expected_start = queue.files[0].start_offset
        after, own_entries = -1, 0
        for file in queue_files(self._root, queue):
            if file.start_offset != expected_start:
                self._findings.error("queue gap", file.name, None, f"the file before it, {expected_start:020d}, is missing")
            expected_start = file.start_offset + queue.size_bytes
            found = self._work.queue_file(self._log, file, self.rules, after)
            self._findings.take(found.findings)
            self._report.queue_entries += found.entries
            own_entries += found.own
            self._further[_counted_as(queue.topic, queue.queue_id)] += found.entries - found.own
            after = found.after
        in_log = self._facts.queues.get((queue.topic, queue.queue_id))
        if in_log is not None and own_entries < in_log.count and not self._is_running:
            self._findings.add(
                self.rules.missing, "missing entries", f"consumequeue/{queue.topic}/{queue.queue_id}", None,
                f"only {own_entries} of the {in_log.count} messages that the log holds for this queue have an entry",
            )


def _counted_as(topic: str, queue_id: int) -> tuple[str, int]:
    """A light queue is one, whichever queue id RocketMQ's settings gave its entries (formats.light_queues.further_offset)."""
    return (topic, LMQ_QUEUE_ID) if topic.startswith(LMQ_PREFIX) else (topic, queue_id)


def queue_files(root: Path, queue: QueueState) -> Iterator[QueueFile]:
    """The files of a queue, in order."""
    previous = None
    for number, file in enumerate(queue.files):
        yield QueueFile(queue.topic, queue.queue_id, file.path, str(file.path.relative_to(StorePaths(root).root)),
                        file.start_offset, queue.size_bytes, number + 1 == len(queue.files), previous)
        previous = file.path
