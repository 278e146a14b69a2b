"""What a whole-store check finds, and how bad it is.

    error    a message is lost, damaged or cannot be reached; a promise of the store is broken   exit 3
    warning  recovery settles it, or RocketMQ leaves it that way and lives with it
    info     worth knowing

Each finding also has a grade, which says what can be done (storage/check/grades.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import ExitCode
from pyengine.storage.check.grades import ORDER, RESTORE, Grade, advice_for, grade_of, rank

FINDINGS_PER_KIND_MAX = 20


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found: `file` is relative to the store's root, `offset` a byte of that file (None: all of it)."""

    severity: Severity
    file: str
    offset: int | None
    text: str
    kind: str = ""
    recover_is_refused: bool = False  # these two: see check_grades.advice_for
    rebuild_is_vain: bool = False

    @property
    def grade(self) -> Grade:
        return grade_of(self.kind, self.file, is_error=self.severity is Severity.ERROR)

    @property
    def steps(self) -> list[str]:
        """What to do about it, in order; empty when there is nothing to do."""
        return advice_for(self.kind, self.file, self.grade, recover_is_refused=self.recover_is_refused,
                          rebuild_is_vain=self.rebuild_is_vain)

    @property
    def advice(self) -> str:
        """The steps as one clause."""
        return "; then ".join(self.steps)


@dataclass
class CheckReport:
    """All findings, worst first, and what was looked at."""

    findings: list[Finding] = field(default_factory=list)
    min_offset: int = -1
    end_offset: int = 0
    records: int = 0
    messages: int = 0
    queues: int = 0
    queue_entries: int = 0
    index_files: int = 0
    index_keys: int = 0
    acked: int = 0           # acknowledged messages looked for
    acked_missing: int = 0
    left_out: int = 0        # findings beyond FINDINGS_PER_KIND_MAX of their kind
    bytes: int = 0
    seconds: float = 0.0

    @property
    def grade(self) -> Grade:
        """The worst of all findings'; OK without any."""
        return max((finding.grade for finding in self.findings), default=Grade.OK)

    @property
    def advice(self) -> list[str]:
        """What to do about all of it, each step once, in the order in which to do them."""
        ranks = {}
        for finding in self.findings:
            for step in finding.steps:
                ranks[step] = min(rank(step, finding.kind), ranks.get(step, len(ORDER)))
        if any(finding.kind == "refused" and finding.grade is Grade.LOSS for finding in self.findings):
            ranks = {step: number for step, number in ranks.items() if step == RESTORE}  # no command opens the store before that
        return sorted(ranks, key=ranks.__getitem__)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.CORRUPTION if self.count(Severity.ERROR) else ExitCode.OK

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The outcome for a person, one sentence."""
        if not self.findings:
            return f"Nothing is wrong: {self.messages} messages, {self.queue_entries} queue entries, {self.index_keys} keys."
        counts = [f"{self.count(severity)} {severity.value}{'s' if self.count(severity) != 1 else ''}"
                  for severity in Severity if self.count(severity)]
        return f"{', '.join(counts)} in {self.messages} messages up to offset {self.end_offset}."

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        fields = {name: value for name, value in vars(self).items() if name != "findings"}
        return {
            **fields,
            "exit_code": int(self.exit_code),
            "grade": self.grade.label,
            "sentence": self.sentence,
            "advice": self.advice,
            "findings": [
                {"severity": finding.severity.value, "grade": finding.grade.label, "kind": finding.kind,
                 "file": finding.file, "offset": finding.offset, "text": finding.text, "advice": finding.advice}
                for finding in self.findings
            ],
        }


class Findings:
    """Collects findings; of one kind only the first FINDINGS_PER_KIND_MAX, the rest is counted."""

    def __init__(self, report: CheckReport | None = None) -> None:
        """Without a report they are those of a part, which `take` puts to the others."""
        self._report = report or CheckReport()
        self._by_kind: dict[str, int] = {}

    def take(self, part: Findings) -> None:
        """All findings of a part behind those that are here."""
        for finding in part._report.findings:
            self.add(finding.severity, finding.kind, finding.file, finding.offset, finding.text)
        for kind, number in part._by_kind.items():
            more = max(0, number - FINDINGS_PER_KIND_MAX)
            self._by_kind[kind] += more
            self._report.left_out += more

    def add(self, severity: Severity, kind: str, file: str, offset: int | None, text: str) -> None:
        number = self._by_kind[kind] = self._by_kind.get(kind, 0) + 1
        if number > FINDINGS_PER_KIND_MAX:
            self._report.left_out += 1
        else:
            self._report.findings.append(Finding(severity, file, offset, text, kind))

    def error(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.ERROR, kind, file, offset, text)

    def warning(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.WARNING, kind, file, offset, text)

    def info(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.INFO, kind, file, offset, text)


CheckProgress = Callable[[int, int], None]
