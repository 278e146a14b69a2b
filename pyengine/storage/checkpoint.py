"""How a store ended and what of it is durable: `checkpoint`, `abort` (docs/formats.md sections 11, 13), the watermark.

`checkpoint` has three store times, none of them ahead of what is on the disk. Abnormal recovery starts at the newest
segment whose first record is older than these times. A time that is ahead loses queue entries; one that lags costs a
longer scan. So the caller syncs first and writes the time afterwards, and the time it writes is one it read before the
sync. The file is written in place: 24 bytes of one sector, as RocketMQ's mapping does it.

`abort` is there while the store is open. RocketMQ removes it only after an orderly stop with nothing left to dispatch;
found at load it means the abnormal recovery path.

`config/watermark`: below this physical offset our own engine has synced every byte.

In a store that another program made (RocketMQ, or a copy) it covers only what this engine wrote, or
has read and checked since: from `verified_from` on (services/flush_consume_queue.py).

Only our engine writes it (RocketMQ's stores have none), the checkpointer at most
once a second and at stop. It may be less than what is durable and is never ahead of
it. Recovery and readers rely on it: nothing below it is ever cut (docs/promises.md, 1).

One line of JSON with a CRC over its other fields. A damaged file counts as absent,
and its reader is told.

`config/sync-failure`: a sync of the store failed in this boot of the machine. The kernel then
marks pages clean that it could not write, so until they are written again, or the machine is
started again, no later sync says anything about them. Every process that sees a sync of the log
fail writes the file before it believes anything else; a recovery that has written and synced all
that is in doubt removes it (docs/recovery.md). A damaged file counts as such a failure.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.errors import DiskError, FlushError, disk_error, disk_errors
from pyengine.formats.constants import CHECKPOINT_BYTES
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import Checkpoint, pack_checkpoint, read_small_file, unpack_checkpoint
from pyengine.native.failpoint import failpoint
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.durable_writes import FILE_MODE, sync_folder, write_config
from pyengine.storage.engine_id import read_boot_id, read_engine_id


def read_checkpoint(root: Root) -> Checkpoint:
    """The three times; zeros where there is no file or it is too short, as RocketMQ's mapping would read it."""
    path = StorePaths(root).checkpoint
    try:
        content = read_small_file(path)
    except FileNotFoundError:
        return Checkpoint()
    except OSError as error:
        raise disk_error(error, "read", path) from error
    return unpack_checkpoint(content[:CHECKPOINT_BYTES].ljust(CHECKPOINT_BYTES, b"\0"))


def write_checkpoint(root: Root, checkpoint: Checkpoint) -> None:
    """Write the three times, durable before this returns. Whatever they speak of must be durable already.

    Raises FlushError when the sync failed, DiskError when the file cannot be written.
    """
    path = StorePaths(root).checkpoint
    content = pack_checkpoint(checkpoint)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        write_config(path, content, keep_backup=False)
        return
    except OSError as error:
        raise disk_error(error, "open", path) from error
    try:
        if os.fstat(descriptor).st_size != CHECKPOINT_BYTES:
            write_config(path, content, keep_backup=False)
            return
        with disk_errors("write", path):
            written = os.pwrite(descriptor, content, 0)
        if written != len(content):
            raise DiskError(f"short write to {path}", path=str(path))
        failpoint("checkpoint_written")
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise FlushError(f"fdatasync of {path} failed: {error.strerror}",
                             errno=error.errno or 0, path=str(path)) from error
        failpoint("checkpoint_synced")
    finally:
        os.close(descriptor)


def abort_file_exists(root: Root) -> bool:
    """True when the store was not stopped in an orderly way, or is open now."""
    return StorePaths(root).abort.exists()


def create_abort_file(root: Root) -> None:
    """Leave an empty `abort`, durable before this returns; an existing one stays as it is."""
    path = StorePaths(root).abort
    with disk_errors("create", path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
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


WATERMARK_NAME = "watermark"
SYNC_FAILURE_NAME = "sync-failure"


@dataclass(frozen=True, slots=True)
class DurableWatermark:
    """Every byte of the log in [verified_from, flushed) was synced by the engine `uuid` up to its epoch `epoch`.

    `verified_from`: 0, or a border between records. What is below it was there before that engine came
    and has not been read by it, or was found damaged.
    """

    uuid: str
    epoch: int
    flushed: int
    verified_from: int = 0

    def moved_to(self, flushed: int) -> DurableWatermark:
        """The same with another `flushed`, lower perhaps."""
        return replace(self, flushed=flushed, verified_from=min(self.verified_from, flushed))


@dataclass(frozen=True, slots=True)
class WatermarkReading:
    """What the file says. `damage` is a sentence when there is a file that cannot be believed; then there is no watermark.

    `is_copied`: the directory is a copy and the watermark is the original's. It vouches for nothing here: a file
    that was copied while it was written ends earlier, and none of it may have been synced.
    """

    watermark: DurableWatermark | None
    damage: str = ""
    is_copied: bool = False


def _watermark(fields: dict[str, Any]) -> DurableWatermark:
    found = DurableWatermark(str(fields["uuid"]), int(fields["epoch"]), int(fields["flushed"]), int(fields.get("verified_from", 0)))
    if not 0 <= found.verified_from <= found.flushed:
        raise ValueError
    return found


def _fields(watermark: DurableWatermark) -> dict[str, Any]:
    return {name: value for name, value in asdict(watermark).items() if name != "verified_from" or value}


_WATERMARK: DurableRecord[DurableWatermark] = DurableRecord(WATERMARK_NAME, _fields, _watermark)


def watermark_path(root: Root) -> Path:
    return _WATERMARK.path(root)


def write_watermark(root: Root, watermark: DurableWatermark) -> None:
    """Replace the file, whole or not at all, durable before this returns. `flushed` must be durable already."""
    _WATERMARK.write(root, watermark)


def read_watermark(root: Root) -> WatermarkReading:
    """The watermark, or none; never raises for what the file holds (DiskError when it cannot be read)."""
    watermark, damage = _WATERMARK.read(root)
    if watermark is None:
        return WatermarkReading(None, f"{watermark_path(root)} {damage}; it counts as absent" if damage else "")
    identity = read_engine_id(root)
    return WatermarkReading(watermark, is_copied=identity is not None and (
        identity.is_copy or watermark.uuid in identity.copied_from))


@dataclass(frozen=True, slots=True)
class SyncFailure:
    """A sync of `file` failed in the boot `boot_id`; the log was durable up to `flushed` then."""

    boot_id: str
    flushed: int
    file: str
    cause: str

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the page cache still holds what that sync left; a file that cannot be understood names no boot."""
        return self.boot_id in ("", read_boot_id().hex())


_SYNC_FAILURE: DurableRecord[SyncFailure] = DurableRecord(
    SYNC_FAILURE_NAME, asdict,
    lambda fields: SyncFailure(str(fields["boot_id"]), int(fields["flushed"]), str(fields["file"]), str(fields["cause"])))


def sync_failure_path(root: Root) -> Path:
    return _SYNC_FAILURE.path(root)


def note_sync_failure(root: Root, flushed: int, file: str, cause: str) -> bool:
    """Note that a sync failed, durable where the disk still can; False when it could not be noted at all.

    The first failure of a boot stays: it names the lowest offset. The note matters only until the next
    boot, so on a disk that syncs nothing more the page cache is enough to keep it.
    """
    with contextlib.suppress(DiskError):
        before = read_sync_failure(root)
        if before is not None and before.is_of_this_boot:
            return True
    failure = SyncFailure(read_boot_id().hex(), flushed, file, cause)
    try:
        _SYNC_FAILURE.write(root, failure)
    except DiskError:
        try:
            descriptor = os.open(sync_failure_path(root), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        except OSError:
            return False
        with open(descriptor, "wb", buffering=0) as note, contextlib.suppress(OSError):  # empty, it says the same
            note.write(_SYNC_FAILURE.content(failure))
    failpoint("sync_failure_noted")
    return True


def read_sync_failure(root: Root) -> SyncFailure | None:
    """The failed sync that has not been made good; None without one. DiskError when the file cannot be read now."""
    failure, damage = _SYNC_FAILURE.read(root)
    return SyncFailure("", 0, "", "the note about it is damaged") if damage else failure


def forget_sync_failure(root: Root) -> None:
    """Remove the note: all that was in doubt is written and synced. Durable before this returns."""
    _SYNC_FAILURE.remove(root)
