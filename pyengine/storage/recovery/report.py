"""What goes into a recovery beside the files, and what comes out of it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pyengine.errors import ExitCode
from pyengine.formats.delayed_message import DEFAULT_MESSAGE_DELAY_LEVEL

if TYPE_CHECKING:
    from pyengine.engine_config import EngineConfig
    from pyengine.storage.recovery.quarantine import QuarantinedPiece

# Bytes done, bytes to do; the second number may grow while the work goes on.
Progress = Callable[[int, int], None]
# Called with a step's name before the step changes anything.
OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """Settings of the store that recovery needs beside its geometry."""

    check_crc_on_recover: bool = True
    message_index_enable: bool = True
    enable_multi_dispatch: bool = False
    enable_consume_queue_ext: bool = False
    message_delay_level: str = DEFAULT_MESSAGE_DELAY_LEVEL

    @classmethod
    def of(cls, config: EngineConfig) -> RecoveryOptions:
        """The options that a store's settings name."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})


class GrowingProgress:
    """Passes progress on, never backwards: what has to be read twice does not show."""

    def __init__(self, report: Progress | None) -> None:
        self._report = report
        self._done = self._total = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._report is not None and done_bytes > self._done:
            self._done, self._total = done_bytes, max(total_bytes, self._total)
            self._report(self._done, self._total)

    def finish(self) -> None:
        """The work is done, however much had been expected."""
        if self._report is not None and self._total > self._done:
            self._report(self._total, self._total)


def copy_note(end_offset: int, named: int) -> str:
    """What is said once of a copied store: its log's end, and what the original's watermark named."""
    said = f"This is a copy: its log ends at {end_offset}, and the watermark that came with it names {named}"
    return said + (f"; the {named - end_offset:,} bytes between were not copied whole" if end_offset < named else "")


class RecoveryPath(enum.StrEnum):
    """RocketMQ's two ways to recover (CommitLog.recoverNormally, recoverAbnormally)."""

    NORMAL = "normal"      # no abort file: the last three segments are read again
    ABNORMAL = "abnormal"  # abort file: from where the checkpoint says


class RecoveryState(enum.StrEnum):
    """The state of the store afterwards."""

    RECOVERED = "recovered"
    DEGRADED = "degraded"  # damage below our own watermark: nothing was changed


@dataclass(frozen=True, slots=True)
class SharedState:
    """What shared memory says about the log, for an engine all of whose processes died.

    `slot_end` is the commit slot's position: every record below it was published, none
    above. `committed` is how far pool bytes had been written into the files, and
    `pool_buffers` holds (physical offset of the buffer's first byte, its bytes) for each
    buffer in use; no buffers means that the writer wrote into the files themselves.
    `flushed` is how far that engine had synced the files, `sync_failed` that a sync failed in
    it, so that it is unknown which later pages reached the disk. `mismatch` names what differs
    (UUID, epoch, boot, `lock`); then all of it is ignored.

    `reput_from` and a copy of the index undo (`index_progress`, 256 bytes) spare making
    again what the dead reputter had already handed to the kernel; without both of them
    queues and index are dispatched again from where files alone can be believed.
    """

    slot_end: int
    committed: int
    pool_buffers: Sequence[tuple[int, memoryview]] = ()
    mismatch: str = ""
    reput_from: int | None = None
    index_progress: bytes | None = None
    flushed: int = 0
    sync_failed: bool = False


@dataclass(frozen=True, slots=True)
class CutQueue:
    """What one queue loses: entries of messages that the log does not hold, and files; `cleared`: a part of the last file too."""

    topic: str
    queue_id: int
    entries: int
    deleted_files: int
    cleared: bool


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found and did, or in a dry run would do. Offsets are physical; `exit_code` is the command's."""

    path: RecoveryPath
    state: RecoveryState
    exit_code: ExitCode
    min_offset: int                     # -1 without segments
    end_offset: int
    scan_from: int                      # where the reading began
    stop_reason: str                    # what is at the end: a label of formats.record_case
    records: int = 0                    # read in this scan; blanks included
    messages: int = 0
    kept_bytes: int = 0                 # min_offset to end_offset
    cut_bytes: int = 0                  # non-zero bytes beyond the end
    drained_bytes: int = 0              # pool bytes that were written into the files
    dispatched_bytes: int = 0           # log bytes whose queue and index entries were written again
    last_store_timestamp_ms: int = -1
    damage_offset: int | None = None    # degraded: where the damage is
    watermark: int | None = None        # what config/watermark said at the start
    is_copy: bool = False               # that watermark came with a copied directory
    shared_state: str = "none"          # none, used, or why it was discarded
    queue_ends: Mapping[tuple[str, int], int] = field(default_factory=dict)
    index_files_removed: int = 0
    queue_entries_removed: int = 0
    removed_files: tuple[str, ...] = ()  # segments of the log
    cut_queues: tuple[CutQueue, ...] = ()
    deleted_index_files: tuple[tuple[str, str], ...] = ()  # (name, label: a row of docs/recovery.md#index-files)
    quarantined: tuple[QuarantinedPiece, ...] = ()
    notes: tuple[str, ...] = ()
    changed: bool = False               # anything at all was written
    is_dry_run: bool = False            # nothing was: all else is what a run would do
    seconds: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Log bytes read per second, drain and dispatch included in the time; 0 when nothing was read."""
        scanned = self.end_offset - self.scan_from
        return scanned / self.seconds / 1e9 if self.seconds > 0 and scanned > 0 else 0.0

    @property
    def sentence(self) -> str:
        """The outcome for a person, one sentence."""
        if self.state is RecoveryState.DEGRADED:
            return (
                f"The log is damaged at offset {self.damage_offset} ({self.stop_reason}), below {self.watermark}, "
                "up to which every byte had been synced. Nothing was changed; restore the segment from a copy, carve "
                "out what is valid with `salvage`, or give up what follows with `recover --accept-loss`."
            )
        is_dry = self.is_dry_run
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
            return f"A recovery would go the {self.path} path: {', '.join(did)}. Nothing was changed."
        return f"Recovered by the {self.path} path: {', '.join(did)}.{f' {self.copy_note}.' if self.copy_note else ''}"

    @property
    def copy_note(self) -> str:
        """Where the log of a copied directory ends, said by the recovery that finds the copy; else empty."""
        if not self.is_copy:
            return ""
        return copy_note(self.end_offset, self.watermark or 0)

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values; queue ends as a list of {topic, queueId, end}."""
        fields = asdict(self)
        fields["queue_ends"] = [
            {"topic": topic, "queueId": queue_id, "end": end} for (topic, queue_id), end in sorted(self.queue_ends.items())
        ]
        fields["quarantined"] = [
            {"path": str(piece.path), "physical_offset": piece.physical_offset, "size_bytes": piece.size_bytes,
             "reason": piece.reason} for piece in self.quarantined
        ]
        fields["exit_code"] = int(self.exit_code)
        fields["gigabytes_per_second"] = self.gigabytes_per_second
        fields["sentence"] = self.sentence
        return fields
