"""The report of a recovery, and what it shares with those of other commands."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pyengine.errors import ExitCode
from pyengine.storage.checkpoint import RecoveryPath

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pyengine.storage.recovery.quarantine import QuarantinedPiece

# Bytes done, bytes to do. During the work the second number may grow, and the first fall if a range is read twice.
Progress = Callable[[int, int], None]
MISSING_SEGMENT = "missing_segment"  # a reason in addition to those of formats.record: the log has a gap


class Findings:
    """What a command that checks or repairs has found and done: an exit code, a sentence, and its fields for --json."""

    __slots__ = ()

    @property
    def exit_code(self) -> ExitCode:
        """The command's."""
        raise NotImplementedError

    @property
    def sentence(self) -> str:
        """The outcome for a person, one sentence."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(cast("DataclassInstance", self)), "exit_code": int(self.exit_code), "sentence": self.sentence}


def with_queue_names(numbers: Mapping[tuple[str, int], int], name: str) -> list[dict[str, Any]]:
    """Return a number of each queue as --json shows it, by queue."""
    return [{"topic": topic, "queueId": queue_id, name: number} for (topic, queue_id), number in sorted(numbers.items())]


class RecoveryState(enum.StrEnum):
    """The state of the store after recovery."""

    RECOVERED = "recovered"
    DEGRADED = "degraded"  # damage below pyengine's watermark: nothing was changed


@dataclass(frozen=True, slots=True)
class CutQueue:
    """The truncation of one queue: dropped entries of messages that the log does not have, deleted files; `cleared`: bytes too."""

    topic: str
    queue_id: int
    entries: int
    deleted_files: int
    cleared: bool


@dataclass(frozen=True, slots=True)
class RecoveryReport(Findings):
    """What recovery has found and done, or would do in a dry run. Offsets are physical."""

    path: RecoveryPath
    state: RecoveryState
    min_offset: int                     # -1 without segments
    end_offset: int
    scan_from: int                      # where reading began
    stop_reason: str                    # what is at the end: a label of formats.record
    records: int = 0                    # read in this scan; blanks included
    messages: int = 0
    kept_bytes: int = 0                 # min_offset to end_offset
    cut_bytes: int = 0                  # non-zero bytes beyond the end
    drained_bytes: int = 0              # pool bytes that were written to the files
    dispatched_bytes: int = 0           # log bytes whose queue and index entries were written again
    last_store_timestamp_ms: int = -1
    damage_offset: int | None = None    # degraded: where the damage is
    watermark: int | None = None        # the value of config/watermark at the start
    is_copy: bool = False               # that watermark is the original's, in a copied store
    stranded_bytes: int = 0             # after the end or the damage: in quarantine, or put there with --accept-loss
    shared_state: str = "none"          # none, used, or why it was ignored
    queue_ends: Mapping[tuple[str, int], int] = field(default_factory=dict)
    index_files_removed: int = 0
    queue_entries_removed: int = 0
    removed_files: tuple[str, ...] = ()  # segments of the log
    cut_queues: tuple[CutQueue, ...] = ()
    deleted_index_files: tuple[tuple[str, str], ...] = ()  # (name, label: docs/recovery.md, "Index files")
    quarantined: tuple[QuarantinedPiece, ...] = ()
    notes: tuple[str, ...] = ()
    changed: bool = False               # whether recovery has written to the store
    is_dry_run: bool = False            # it has not: the other fields are what a run would do
    seconds: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        """The command's: CORRUPTION for a degraded store, REPAIRED if something went to quarantine."""
        return ExitCode.CORRUPTION if self.damage_offset is not None else ExitCode.REPAIRED if self.quarantined else ExitCode.OK

    @property
    def gigabytes_per_second(self) -> float:
        """Log bytes read per second, drain and dispatch included in the time; 0 when nothing was read."""
        scanned = self.end_offset - self.scan_from
        return scanned / self.seconds / 1e9 if self.seconds > 0 and scanned > 0 else 0.0

    @property
    def sentence(self) -> str:
        if self.state is RecoveryState.DEGRADED and self.is_copy:
            return f"{self.copy_note}. Nothing was changed."
        if self.state is RecoveryState.DEGRADED:
            is_away = self.min_offset < 0 or self.stop_reason == MISSING_SEGMENT
            first = "name the folder that has the segment in store_path_commit_log, " if is_away else ""
            return (
                f"The log is damaged at offset {self.damage_offset} ({self.stop_reason}), below {self.watermark}, "
                f"up to which every byte had been synced. Nothing was changed; {first}restore the segment from a copy, carve "
                "out what is valid with `salvage`, or give up what follows with `recover --accept-loss`."
            )
        is_dry, copied = self.is_dry_run, f" {self.copy_note}." if self.copy_note else ""
        did = [f"{'keep' if is_dry else 'kept'} {self.kept_bytes} bytes up to offset {self.end_offset}"]
        if self.drained_bytes:
            did.append(f"{'drain' if is_dry else 'drained'} {self.drained_bytes} from the pool")
        if self.cut_bytes:
            did.append(f"cut {self.cut_bytes}")
        if self.quarantined:
            pieces = "1 piece" if len(self.quarantined) == 1 else f"{len(self.quarantined)} pieces"
            did.append(f"put {pieces} into quarantine")
        if is_dry and not self.changed:
            return f"A recovery would change nothing: the log ends at {self.end_offset}, and queues and index fit it."
        if is_dry:
            return f"A recovery would go the {self.path} path: {', '.join(did)}. Nothing was changed.{copied}"
        if len(did) == 1 and not self.end_offset:
            return "The store is empty; there was nothing to recover."
        return f"Recovered by the {self.path} path: {', '.join(did)}.{copied}"

    @property
    def copy_note(self) -> str:
        """The sentence about the end of a copied store's log, for the first recovery of the copy; else "".

        Its first 255 bytes, which are all that shared memory holds, say what to do.
        """
        if not self.is_copy:
            return ""
        named, end = self.watermark or 0, self.end_offset if self.damage_offset is None else self.damage_offset
        said = f"This is a copy: its log ends at {end}, and the watermark that came with it names {named}"
        if self.state is RecoveryState.DEGRADED:
            return (f"{said}: it was copied while its engine wrote, or damaged. Copy it again, or `recover --accept-loss` puts "
                    f"{self.stranded_bytes:,} bytes after the end into quarantine")
        if end < named:
            said += f"; the {named - end:,} bytes between were not copied whole"
        return said + (f"; {self.stranded_bytes:,} bytes after the end go to quarantine" if self.stranded_bytes else "")

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values; queue ends as a list of {topic, queueId, end}."""
        pieces = [asdict(piece) | {"path": str(piece.path)} for piece in self.quarantined]
        return Findings.to_dict(self) | {"queue_ends": with_queue_names(self.queue_ends, "end"), "quarantined": pieces,
                                           "gigabytes_per_second": self.gigabytes_per_second}
