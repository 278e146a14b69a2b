"""What the next recovery goes by: `checkpoint`, `abort` (docs/formats.md sections 11, 13), and notes in config/.

`checkpoint` has three store times, none of them ahead of the files on the disk: a time that is ahead loses queue entries, one that lags
makes the scan longer. So the caller reads the time, then syncs, then writes that time. It is written in place, 24 bytes in one sector.
`abort` exists while the store is open.

`config/recovery` makes the recovery after one that was killed read from the same offsets again, in a pyengine store from there or earlier,
although abort file, segments or queues would now lead to others. The end of the log is found again from the files, so an old marker
does no harm in a store to which another program has written since.

`config/recovered` remains: in a store without pyengine's watermark the last recovery has kept everything from this offset on, and has not
read what is before it. RocketMQ's rule after an orderly stop may begin earlier, and damage there would truncate what was kept.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyengine.errors import CorruptionError, DiskError, disk_error, disk_errors, flush_error
from pyengine.formats.constants import CHECKPOINT_BYTES
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import Checkpoint, opened, pack_checkpoint, read_or_none, unpack_checkpoint
from pyengine.native.failpoints import failpoint
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.durable_writes import open_given, pwrite_all, sync_folder, write_config
from pyengine.storage.engine_id import EngineId, read_boot_id, read_engine_id


def read_checkpoint(root: Root) -> Checkpoint:
    """Return the three times; zeros if there is no file or it is too short, as RocketMQ's mapping would read it."""
    content = read_or_none(StorePaths(root).checkpoint) or b""
    return unpack_checkpoint(content[:CHECKPOINT_BYTES].ljust(CHECKPOINT_BYTES, b"\0"))


def write_checkpoint(root: Root, checkpoint: Checkpoint) -> None:
    """Write the three times, durable before this returns. The files that they refer to must be durable already.

    Raises FlushError when the sync failed, DiskError when the file cannot be written.
    """
    path = StorePaths(root).checkpoint
    content = pack_checkpoint(checkpoint)
    flags = os.O_WRONLY | os.O_NONBLOCK
    with disk_errors("open", path), contextlib.suppress(FileNotFoundError), opened(os.open(path, flags)) as descriptor:
        if os.fstat(descriptor).st_size == CHECKPOINT_BYTES:
            pwrite_all(descriptor, content, 0, path)
            failpoint("checkpoint_written")
            try:
                os.fdatasync(descriptor)
            except OSError as error:
                raise flush_error(error, "fdatasync", path) from error
            failpoint("checkpoint_synced")
            return
    write_config(path, content, keep_backup=False)


def abort_file_exists(root: Root) -> bool:
    """Whether the store was not stopped in an orderly way, or is open now."""
    return StorePaths(root).abort.exists()


def create_abort_file(root: Root) -> None:
    """Create an empty `abort`, durable before this returns; an existing one is not changed."""
    path = StorePaths(root).abort
    with disk_errors("create", path):
        os.close(open_given(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK))
    failpoint("abort_created")
    sync_folder(path.parent)


def remove_abort_file(root: Root) -> None:
    """Remove `abort`, the last step of an orderly stop; its absence is durable before this returns."""
    path = StorePaths(root).abort
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(error, "remove", path) from error
    failpoint("abort_removed")
    sync_folder(path.parent)


@dataclass(frozen=True, slots=True)
class DurableWatermark:
    """Every byte of the log in [verified_from, flushed) was synced by the engine `uuid` up to its epoch `epoch`.

    `verified_from`: 0, or a record boundary. Records below it were written before that engine, which
    has not read them yet or has found damage there. Store times are known not to decrease in [`ordered_from`, flushed).
    """

    uuid: str
    epoch: int
    flushed: int
    verified_from: int = 0
    ordered_from: int = 0

    def moved_to(self, flushed: int, ordered_from: int | None = None) -> DurableWatermark:
        """Return this watermark with another `flushed`: a lower one, or that of a log which was continued.

        `ordered_from`: of what was written since; None if another program may have written it.
        """
        if ordered_from is None:
            ordered_from = flushed if flushed > self.flushed else 0
        return replace(self, flushed=flushed, verified_from=min(self.verified_from, flushed),
                       ordered_from=min(max(self.ordered_from, ordered_from), flushed))


@dataclass(frozen=True, slots=True)
class WatermarkReading:
    """The content of the file. `damage` is a sentence if the file is damaged; then there is no watermark.

    `is_copied`: the directory is a copy and the watermark is the original's. It is not valid here: a segment
    that was copied while it was written ends earlier, and the copy may not have been synced. `identity`: the store's.
    """

    watermark: DurableWatermark | None
    damage: str = ""
    is_copied: bool = False
    identity: EngineId | None = field(default=None, compare=False)


def _watermark(fields: dict[str, Any]) -> DurableWatermark:
    flushed = int(fields["flushed"])
    found = DurableWatermark(str(fields["uuid"]), int(fields["epoch"]), flushed, int(fields.get("verified_from", 0)),
                             int(fields.get("ordered_from", flushed)))
    if not 0 <= found.verified_from <= found.flushed >= found.ordered_from >= 0:
        raise ValueError
    return found


def _fields(watermark: DurableWatermark) -> dict[str, Any]:
    absent = {"verified_from": 0, "ordered_from": watermark.flushed}  # version 0.2 has not judged the order
    return {name: value for name, value in asdict(watermark).items() if value != absent.get(name)}


# Before it is written the log below `flushed` must be durable.
WATERMARK: DurableRecord[DurableWatermark] = DurableRecord("watermark", _fields, _watermark)


def read_watermark(root: Root) -> WatermarkReading:
    """Return the watermark, or none; a damaged file raises no error, one that cannot be read raises DiskError."""
    watermark, damage = WATERMARK.read(root)
    if watermark is None:
        return WatermarkReading(None, f"{WATERMARK.path(root)} {damage}; it counts as absent" if damage else "")
    identity = read_engine_id(root)
    return WatermarkReading(watermark, is_copied=identity is not None and (
        identity.is_copy or watermark.uuid in identity.copied_from), identity=identity)


@dataclass(frozen=True, slots=True)
class SyncFailure:
    """A sync of `file` failed in the boot `boot_id`; the log was durable up to `flushed` then."""

    boot_id: str
    flushed: int
    file: str
    cause: str

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the sync failed since the last boot, so that the page cache is as it left it; also True for a damaged file."""
        return self.boot_id in ("", read_boot_id().hex())


# Removed after all doubtful bytes were rewritten and synced.
SYNC_FAILURE: DurableRecord[SyncFailure] = DurableRecord(
    "sync-failure", asdict,
    lambda fields: SyncFailure(str(fields["boot_id"]), int(fields["flushed"]), str(fields["file"]), str(fields["cause"])))


def note_sync_failure(root: Root, flushed: int, file: str, cause: str) -> bool:
    """Note that a sync failed, durably if the disk still can; False when it could not be noted at all.

    The first note of a boot is kept: it has the lowest offset. The note matters only until the next
    boot, so the page cache is enough for it if the disk cannot sync any more.
    """
    with contextlib.suppress(DiskError):
        before = read_sync_failure(root)
        if before is not None and before.is_of_this_boot:
            return True
    failure = SyncFailure(read_boot_id().hex(), flushed, file, cause)
    try:
        SYNC_FAILURE.write(root, failure)
    except DiskError:
        try:
            descriptor = open_given(SYNC_FAILURE.path(root), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        except OSError:
            return False
        with open(descriptor, "wb", buffering=0) as note, contextlib.suppress(OSError):  # an empty file means the same
            note.write(SYNC_FAILURE.content(failure))
    failpoint("sync_failure_noted")
    return True


def read_sync_failure(root: Root) -> SyncFailure | None:
    """Return the failed sync whose bytes were not rewritten yet; None if there is none. DiskError when the file cannot be read."""
    failure, damage = SYNC_FAILURE.read(root)
    return SyncFailure("", 0, "", "the note about it is damaged") if damage else failure


class RecoveryPath(enum.StrEnum):
    """RocketMQ's two ways to recover (CommitLog.recoverNormally, recoverAbnormally)."""

    NORMAL = "normal"      # no abort file: the last three segments are read again
    ABNORMAL = "abnormal"  # abort file: reading begins where the checkpoint says


@dataclass(frozen=True, slots=True)
class RecoveryMarker:
    """The offsets from which the unfinished recovery has read."""

    path: RecoveryPath
    scan_from: int
    dispatch_from: int


@dataclass(frozen=True, slots=True)
class RebuildMarker:
    """`folder`: a name in quarantine/; `pieces`: paths relative to the root, and relative to that folder after the move."""

    folder: str
    pieces: tuple[str, ...]

    def moved_path(self, store: StorePaths, piece: str) -> Path:
        """Return the path of a piece after its move."""
        return store.quarantine / self.folder / piece


@dataclass(frozen=True, slots=True)
class Cut:
    """The decision that the log [.., end) of a slave must end at `at`: each recovery ends it there, until one has finished.

    `kept`: the copy of the bytes to clear is in quarantine/.
    """

    at: int
    end: int
    reason: str
    kept: bool = False


RECOVERY: DurableRecord[RecoveryMarker] = DurableRecord(
    "recovery", asdict, lambda of: RecoveryMarker(RecoveryPath(of["path"]), int(of["scan_from"]), int(of["dispatch_from"])),
    is_sealed=False)
RECOVERED: DurableRecord[int] = DurableRecord(
    "recovered", lambda offset: {"kept_from": offset}, lambda of: int(of["kept_from"]), is_sealed=False)
# A damaged one counts as none: then only `config/recovery` counts.
REBUILD: DurableRecord[RebuildMarker] = DurableRecord(
    "rebuild", asdict, lambda of: RebuildMarker(str(of["folder"]), () if of.get("is_made") is True else tuple(map(str, of["pieces"]))),
    is_sealed=False, indent=1)  # version 0.2 noted with `is_made` that the pieces are rebuilt: none is moved any more

# Written by the store's owner; `at` is a record boundary above the log's start.
CUT: DurableRecord[Cut] = DurableRecord(
    "cut", asdict, lambda fields: Cut(int(fields["at"]), int(fields["end"]), str(fields["reason"]), bool(fields["kept"])), indent=1)

# Of a log in several folders; written before a segment is deleted. One that is damaged counts as none, and the log as whole.
LOG_BEGIN: DurableRecord[int] = DurableRecord("log-begin", lambda offset: {"begin": offset}, lambda of: int(of["begin"]))


def read_marker(root: Root) -> RecoveryMarker | None:
    """Return the marker, None if there is none. A damaged one counts as a marker to read everything again."""
    found = RECOVERY.read(root)
    return RecoveryMarker(RecoveryPath.ABNORMAL, 0, 0) if found.damage else found.record


def write_marker(root: Root, marker: RecoveryMarker) -> None:
    """Write the marker, durable before this returns. An equal one is kept, since a full disk may have no space for another."""
    if read_marker(root) == marker:
        sync_folder(RECOVERY.path(root).parent)
    else:
        RECOVERY.write(root, marker)


def read_cut(root: Root) -> Cut | None:
    """Return the unfinished cut, None if there is none. CorruptionError for a damaged note."""
    cut, damage = CUT.read(root)
    if damage:
        raise CorruptionError(f"{CUT.path(root)} is damaged: a cut of the log was in progress. Remove the file to keep what the log "
                              "holds now; a slave finds out again from its master what has to go")
    return cut


class StopNotes(NamedTuple):
    """How a store was left: what its next recovery begins to read by."""

    abort_exists: bool
    marker: RecoveryMarker | None  # of a recovery that did not finish
    checkpoint: Checkpoint
    recovered_from: int | None     # config/recovered; None without it, also if it is damaged


def read_stop_notes(root: Root) -> StopNotes:
    """Read them. DiskError if one cannot be read, but for config/recovered, which then counts as absent.

    That is read last: recovery writes it before it removes the abort file, which a reader beside it may miss.
    """
    abort_exists, marker, checkpoint, recovered_from = abort_file_exists(root), read_marker(root), read_checkpoint(root), None
    with contextlib.suppress(DiskError):
        recovered_from = RECOVERED.read(root).record
    return StopNotes(abort_exists, marker, checkpoint, recovered_from)


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of the log in the shared memory of an engine whose processes are all dead.

    `slot_end` is the commit slot's position: every record below it was published, none
    above. `committed` is the offset up to which pool bytes were written to the files, and
    `pool_buffers` has (physical offset of the buffer's first byte, its bytes) for each
    buffer in use; without buffers the writer wrote to the files directly.
    `flushed` is the offset up to which that engine had synced the files; `sync_failed`: a sync had failed,
    so that it is unknown which later pages reached the disk. `mismatch` names what differs
    from the store (UUID, epoch, boot, `lock`); then only `sync_failed` counts. `ordered_from`: as its writer noted it.

    With `reput_from` and a copy of the index undo (`index_progress`, 256 bytes) recovery need not repeat
    the dead reputter's dispatch, whose writes the kernel has; without both of them
    dispatch begins where the files alone are known to be complete.
    """

    slot_end: int
    committed: int
    pool_buffers: Sequence[tuple[int, memoryview]] = ()
    mismatch: str = ""
    reput_from: int | None = None
    index_progress: bytes | None = None
    flushed: int = 0
    sync_failed: bool = False
    ordered_from: int = 0


@dataclass(frozen=True, slots=True)
class Notes:
    """What notes and shared memory say, before the files are read. The log is durable below `durable_end` in any case.

    `has_failed_sync`: a sync has failed since the last boot, so clean pages may not be on the disk.
    """

    left: StopNotes
    reading: WatermarkReading
    durable_end: int
    failure: SyncFailure | None
    has_failed_sync: bool
    cut: Cut | None
    rebuilding: RebuildMarker | None  # pieces to be moved away and made again
    shared: SharedState | None     # what the last engine left in memory

    @property
    def pieces(self) -> frozenset[str]:
        """The pieces that are made again: what they hold does not count."""
        return frozenset(self.rebuilding.pieces if self.rebuilding is not None else ())


def read_notes(root: Root, shared: SharedState | None = None, rebuilding: RebuildMarker | None = None) -> Notes:
    """Read all notes. CorruptionError for a damaged note of a cut."""
    reading, left = read_watermark(root), shared or SharedState(0, 0)
    watermark, failure, cut = reading.watermark, read_sync_failure(root), read_cut(root)
    durable_end = max(0 if watermark is None else watermark.flushed, 0 if left.mismatch else left.flushed)
    if watermark is not None and cut is not None and cut.at < watermark.flushed:
        reading = replace(reading, watermark=watermark.moved_to(cut.at))
    return Notes(read_stop_notes(root), reading, durable_end, failure, left.sync_failed or failure is not None and failure.is_of_this_boot,
                 cut, rebuilding or REBUILD.read(root).record, shared)
