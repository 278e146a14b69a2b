"""What is durable of the log, as the disk itself says: `config/watermark` and `config/sync-failure`.

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

from pyengine.errors import DiskError
from pyengine.formats.paths import Root
from pyengine.native.failpoint import failpoint
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.engine_id import read_boot_id, read_engine_id
from pyengine.storage.new_file import FILE_MODE

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
