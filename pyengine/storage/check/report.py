"""The findings of a whole-store check, their grades, and what to do about them.

    error    a message is lost, damaged or cannot be reached; a promise of the store is broken   exit 3
    warning  recovery repairs it, or RocketMQ leaves stores in this state and tolerates it
    info     worth knowing

Each finding also has a grade, which says what can be done:

    grade       means
    ok          there is no finding
    notice      no action is needed
    repairable  the log has all messages: a command of pyengine repairs it
    loss        messages are lost, damaged or cannot be reached in this copy of the store
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, NamedTuple

from pyengine.errors import ExitCode
from pyengine.formats.paths import parse_segment_name
from pyengine.storage.recovery.report import Findings


class Grade(enum.IntEnum):
    """Grades, from best to worst: the worst grade of all findings is the store's."""

    OK = 0
    NOTICE = 1
    REPAIRABLE = 2
    LOSS = 3

    @property
    def label(self) -> str:
        return self.name.lower()


RESTORE = "restore the segment from a copy, or carve out what is whole with `pyengine salvage STORE DEST`"
LATER_FORMAT = "keep the store with RocketMQ 5, or make one of its log with `pyengine salvage STORE DEST`"
MOVE_AWAY = "move away what does not belong there"
RECOVER = "run `pyengine recover STORE`, as every start does: what it cuts goes to quarantine first"
ACCEPT_LOSS = ("run `pyengine recover STORE --accept-loss` when nothing more can be restored: the log ends before the damage then, "
               "and what it cuts goes to quarantine first")
REBUILD_INDEX = "run `pyengine rebuild STORE --index`"
REBUILD_QUEUE = "run `pyengine rebuild STORE --topic {topic} --queue-id {queue_id}`"
REBUILD_QUEUES = "run `pyengine rebuild STORE --queues`"
RESTORE_CONFIG = "restore its content before the last change: `cp STORE/{file}.bak STORE/{file}`"
GIVE_UP_CONFIG = "restore STORE/{file} from a copy, or give up what it said: `rm -rf STORE/{file} STORE/{file}.bak`"
STOP = "start the store and stop it: an orderly stop writes the file again"
# Steps in the order in which to do them: bytes that one step truncates cannot be salvaged later, and queues are rebuilt from the log.
ORDER = (RESTORE, LATER_FORMAT, MOVE_AWAY, RESTORE_CONFIG, GIVE_UP_CONFIG, RECOVER, ACCEPT_LOSS, REBUILD_INDEX, REBUILD_QUEUES,
         REBUILD_QUEUE, STOP)


class Grades(NamedTuple):
    """A kind of finding: its grade as an error, its grade otherwise, and the steps, in order."""

    as_error: Grade
    otherwise: Grade
    advice: tuple[str, ...]


def _rows(kinds: str, as_error: Grade, otherwise: Grade, *advice: str) -> dict[str, Grades]:
    return dict.fromkeys(kinds.split(", "), Grades(as_error, otherwise, advice))


_R, _N, _L = Grade.REPAIRABLE, Grade.NOTICE, Grade.LOSS
#                                                                                        as error  otherwise
KINDS = {
    **_rows("refused",                                                                         _R, _R, MOVE_AWAY),
    **_rows("gap, below watermark, damaged before, damage, lost messages, log gap, acked",     _L, _L, RESTORE),
    **_rows("unreachable",                                                                     _L, _L, RESTORE, RECOVER),
    **_rows("tail",                                                                            _L, _R, RECOVER),
    **_rows("missing queue, missing entries, queue gap, queue hole, wrong entry, extension",   _R, _R, REBUILD_QUEUE),
    **_rows("index length, index header, index chain, wrong key, missing keys",                _R, _R, REBUILD_INDEX),
    **_rows("entry beyond the log, key beyond the log, abort, marker, checkpoint",             _R, _R, RECOVER),
    **_rows("acked entry",                                                                     _R, _R, REBUILD_QUEUES),
    **_rows("config",                                                                          _R, _R, RESTORE_CONFIG),
    **_rows("config lost",                                                                     _L, _L, GIVE_UP_CONFIG),
    **_rows("watermark",                                                                       _R, _N, STOP),
    **_rows("copy",                                                                            _L, _N, RECOVER),
    **_rows("later format",                                                                    _N, _N, LATER_FORMAT),
    **_rows("config backup, broker, acked list",                                               _N, _N),
}

# Damage at which `recover` does not truncate the log without --accept-loss.
REFUSED_BY_RECOVER = frozenset(("gap", "below watermark", "lost messages"))


FINDINGS_PER_KIND_MAX = 20


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class FileFinding:
    """One finding: `file` is relative to the store's root, `offset` a byte of that file (None: the whole file)."""

    severity: Severity
    file: str
    offset: int | None
    text: str
    kind: str = ""
    recover_is_refused: bool = False  # while the damage exists, `recover` changes nothing without --accept-loss
    rebuild_is_vain: bool = False     # the log lacks the records for queues and index: only a restored log helps

    @property
    def grade(self) -> Grade:
        row, (folder, _, name) = KINDS[self.kind], self.file.rpartition("/")
        if self.kind == "refused" and folder == "commitlog" and parse_segment_name(name) is not None:
            return Grade.LOSS  # a segment cannot be rebuilt; a foreign file has no such name
        return row.as_error if self.severity is Severity.ERROR else row.otherwise

    @property
    def steps(self) -> list[str]:
        """The steps, in order, with the queue's own name if the file tells it; empty if no action is needed."""
        steps = list(KINDS[self.kind].advice)
        if self.kind == "refused" and self.file.startswith("consumequeue/"):
            steps = [REBUILD_QUEUE]
        elif self.kind == "refused" and self.grade is Grade.LOSS:
            steps = [RESTORE]
        if self.rebuild_is_vain:
            steps = [RESTORE if step in (REBUILD_INDEX, REBUILD_QUEUES, REBUILD_QUEUE) else step for step in steps]
        if self.recover_is_refused:
            steps = [ACCEPT_LOSS if step is RECOVER else step for step in steps]
            if self.kind in REFUSED_BY_RECOVER:
                steps.append(ACCEPT_LOSS)
        parts = self.file.split("/")
        queue = REBUILD_QUEUES if len(parts) < 3 else REBUILD_QUEUE.format(topic=quote(parts[1]), queue_id=parts[2])
        return [queue if step is REBUILD_QUEUE else step.format(file=self.file) for step in steps]

    @property
    def advice(self) -> str:
        """The steps as one clause."""
        return "; then ".join(self.steps)


@dataclass
class CheckReport(Findings):
    """All findings, worst first, and the numbers of checked objects; of each kind the first FINDINGS_PER_KIND_MAX, the others are counted.

    A part of a check, which may run elsewhere, has a report of its own, and `take` adds its findings to the others.
    """

    findings: list[FileFinding] = field(default_factory=list)
    min_offset: int = -1
    end_offset: int = 0
    records: int = 0
    messages: int = 0
    queues: int = 0
    queue_entries: int = 0
    index_files: int = 0
    index_keys: int = 0
    acked: int = 0           # acknowledged messages that were searched
    acked_missing: int = 0
    left_out: int = 0        # findings beyond FINDINGS_PER_KIND_MAX of their kind
    bytes: int = 0
    seconds: float = 0.0
    by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def grade(self) -> Grade:
        """The worst grade of all findings; OK if there are none."""
        return max((finding.grade for finding in self.findings), default=Grade.OK)

    @property
    def advice(self) -> list[str]:
        """The steps for all findings, each once, in the order in which to do them (ORDER)."""
        ranks: dict[str, int] = {}
        for finding in self.findings:
            for step in finding.steps:
                rank = next(number for number, form in enumerate(ORDER) if step.startswith(form.split("{")[0]))
                if finding.kind == "refused" and step != RESTORE:  # no command can open the store before this step
                    rank = ORDER.index(MOVE_AWAY)
                ranks[step] = min(rank, ranks.get(step, len(ORDER)))
        if any(finding.kind == "refused" and finding.grade is Grade.LOSS for finding in self.findings):
            ranks = {step: number for step, number in ranks.items() if step == RESTORE}  # before that no command can open the store
        return sorted(ranks, key=ranks.__getitem__)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.CORRUPTION if self.count(Severity.ERROR) else ExitCode.OK

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def sentence(self) -> str:
        if not self.findings:
            entries = counted(self.queue_entries, "queue entry", "queue entries")
            return f"Nothing is wrong: {counted(self.messages, 'message')}, {entries}, {counted(self.index_keys, 'key')}."
        counts = [counted(self.count(severity), severity.value) for severity in Severity if self.count(severity)]
        return f"{', '.join(counts)} in {counted(self.messages, 'message')} up to offset {self.end_offset}."

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        fields = {name: value for name, value in vars(self).items() if name not in ("findings", "by_kind")}
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

    def take(self, part: CheckReport) -> None:
        """Append all findings of a part."""
        for finding in part.findings:
            self.add(finding.severity, finding.kind, finding.file, finding.offset, finding.text)
        for kind, number in part.by_kind.items():
            more = max(0, number - FINDINGS_PER_KIND_MAX)
            self.by_kind[kind] += more
            self.left_out += more

    def add(self, severity: Severity, kind: str, file: str, offset: int | None, text: str) -> None:
        number = self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        if number > FINDINGS_PER_KIND_MAX:
            self.left_out += 1
        else:
            self.findings.append(FileFinding(severity, file, offset, text, kind))

    def error(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.ERROR, kind, file, offset, text)

    def warning(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.WARNING, kind, file, offset, text)

    def info(self, kind: str, file: str, offset: int | None, text: str) -> None:
        self.add(Severity.INFO, kind, file, offset, text)


def counted(number: int, one: str, many: str = "") -> str:
    """Return `1 message` or `2 messages`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
