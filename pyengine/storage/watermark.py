"""What is durable of the log, as the disk itself says: `config/watermark` and `config/sync-failure`.

`config/watermark`: below this physical offset our own engine has synced every byte.

In a store that another program made (RocketMQ, or a copy) it covers only what this engine wrote, or
has read and checked since: from `verified_from` on (services/flush_consume_queue.py).

Only our engine writes it (RocketMQ's stores have none), the checkpointer at most
once a second and at stop. It may lag behind what is durable and is never ahead of
it. Recovery and readers rely on it: nothing below it is ever cut (docs/promises.md, 1).

One line of JSON with a CRC over its other fields. A damaged file counts as absent,
and whoever reads it is told.

`config/sync-failure`: a sync of the store failed in this boot of the machine. The kernel then
marks pages clean that it could not write, so until they are written again, or the machine is
started again, no later sync says anything about them. Every process that sees a sync of the log
fail writes the file before it believes anything else; a recovery that has written and synced all
that is in doubt removes it (docs/recovery.md). A damaged file counts as such a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyengine.errors import DiskError, disk_error
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, read_small_file
from pyengine.native.failpoint import failpoint
from pyengine.storage.config_file import read_note
from pyengine.storage.engine_id import read_boot_id, read_engine_id
from pyengine.storage.new_file import FILE_MODE, sync_folder, write_config

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


def watermark_path(root: Path | str) -> Path:
    return StorePaths(root).config / WATERMARK_NAME


def write_watermark(root: Path | str, watermark: DurableWatermark) -> None:
    """Replace the file, whole or not at all, durable before this returns. `flushed` must be durable already."""
    write_config(watermark_path(root), _pack(watermark), keep_backup=False)


def read_watermark(root: Path | str) -> WatermarkReading:
    """The watermark, or none; never raises for what the file holds (DiskError when it cannot be read)."""
    path = watermark_path(root)
    try:
        content = read_small_file(path)
    except FileNotFoundError:
        return WatermarkReading(None)
    except OSError as error:
        raise disk_error(error, "read", path) from error
    try:
        fields = json.loads(content)
        watermark = DurableWatermark(str(fields["uuid"]), int(fields["epoch"]), int(fields["flushed"]),
                                     int(fields.get("verified_from", 0)))
    except PARSE_ERRORS:
        return WatermarkReading(None, f"{path} is not readable; it counts as absent")
    if content != _pack(watermark) or not 0 <= watermark.verified_from <= watermark.flushed:
        return WatermarkReading(None, f"{path} does not match its checksum; it counts as absent")
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


def sync_failure_path(root: Path | str) -> Path:
    return StorePaths(root).config / SYNC_FAILURE_NAME


def note_sync_failure(root: Path | str, flushed: int, file: str, cause: str) -> bool:
    """Note that a sync failed, durable where the disk still can; False when it could not be noted at all.

    The first failure of a boot stays: it names the lowest offset. The note matters only until the next
    boot, so on a disk that syncs nothing more the page cache is enough to keep it.
    """
    path = sync_failure_path(root)
    with contextlib.suppress(DiskError):
        before = read_sync_failure(root)
        if before is not None and before.is_of_this_boot:
            return True
    content = _pack(SyncFailure(read_boot_id().hex(), flushed, file, cause))
    try:
        write_config(path, content, keep_backup=False)
    except DiskError:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        except OSError:
            return False
        with open(descriptor, "wb", buffering=0) as note, contextlib.suppress(OSError):  # empty, it says the same
            note.write(content)
    failpoint("sync_failure_noted")
    return True


def read_sync_failure(root: Path | str) -> SyncFailure | None:
    """The failed sync that has not been made good; None without one. DiskError when the file cannot be read now."""
    path = sync_failure_path(root)
    content = read_note(path)
    if content is None:
        return None
    try:
        fields = json.loads(content)
        failure = SyncFailure(str(fields["boot_id"]), int(fields["flushed"]), str(fields["file"]), str(fields["cause"]))
    except PARSE_ERRORS:
        failure = None
    if failure is None or content != _pack(failure):
        return SyncFailure("", 0, "", "the note about it is damaged")
    return failure


def forget_sync_failure(root: Path | str) -> None:
    """Remove the note: all that was in doubt is written and synced. Durable before this returns."""
    path = sync_failure_path(root)
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def _pack(said: DurableWatermark | SyncFailure) -> bytes:
    fields = asdict(said)
    if not fields.get("verified_from", True):
        del fields["verified_from"]
    crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields | {"crc": f"{crc:08x}"}).encode() + b"\n"
