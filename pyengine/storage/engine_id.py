"""The identity of a store: `config/engine-id` and `config/epoch`, a number that each recovery raises.

`config/engine-id` is JSON: a UUID, and the device and inode that the file itself had when it was written. If the file has another inode
now, the store is a copy: its owner gives it a new UUID, so that it never uses the original's watermark or shared memory. `copy_of` then
has the UUID of the original, followed by those that the original was copied from: its watermark may still be of an earlier one. The same
inode on another device is the same file after a remount (btrfs and overlay number their devices at each start): the UUID is kept.

The names of a store's shared objects have `short`, which is made from the UUID and from the device and inode that the file has *now*. So
a copy, or a clone of the whole disk, never finds the original's objects, even before its owner has given it a new UUID.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import disk_error, disk_errors
from pyengine.formats.small_file import PARSE_ERRORS, open_regular, read_or_none
from pyengine.storage.durable_writes import write_config

ID_NAME, EPOCH_NAME = "config/engine-id", "config/epoch"
COPIES_MAX = 16  # most originals that are noted


@dataclass(frozen=True, slots=True)
class EngineId:
    """Identity of one store directory. `device` and `inode` are those of config/engine-id now.

    `copied_from` are the UUIDs of the stores that this directory was copied from, the latest first; `is_copy`: it
    was copied, and its owner has not given it a UUID of its own yet.
    """

    uuid: uuid.UUID
    device: int
    inode: int
    copied_from: tuple[str, ...] = ()
    is_copy: bool = False

    @property
    def short(self) -> str:
        """The 16 hex digits in the names of the store's shared objects."""
        place = struct.pack(">QQ", self.device, self.inode)
        return hashlib.sha256(self.uuid.bytes + place).hexdigest()[:16]


def read_engine_id(root: str | os.PathLike[str]) -> EngineId | None:
    """Return the identity from the file, or None if the store has none yet. Never writes."""
    found = _read(Path(root, ID_NAME))
    return None if found is None else found[0]


def renew_copied_id(root: str | os.PathLike[str]) -> None:
    """Give a copied store a UUID of its own; a store without identity gets none. For the store's owner only."""
    if read_engine_id(root) is not None:
        ensure_engine_id(root)


def ensure_engine_id(root: str | os.PathLike[str]) -> EngineId:
    """Return the store's identity; create it if there is none, replace it in a copy. For the store's owner only.

    A crash leaves the old file or the new one.
    """
    path = Path(root, ID_NAME)
    found = _read(path)
    if found is None:
        return _write(path, uuid.uuid4())
    identity, written_device = found
    if identity.is_copy:
        return _write(path, uuid.uuid4(), (str(identity.uuid), *identity.copied_from)[:COPIES_MAX])
    if written_device != identity.device:
        return _write(path, identity.uuid, identity.copied_from)
    return identity


def read_epoch(root: str | os.PathLike[str]) -> int:
    """Return the number of the last recovery, 0 if there was none."""
    path = Path(root, EPOCH_NAME)
    return max(_read_number(path), _read_number(path.with_name(path.name + ".bak")))


def raise_epoch(root: str | os.PathLike[str]) -> int:
    """Write the next epoch, durably, and return it. For the store's owner only."""
    epoch = read_epoch(root) + 1
    write_config(Path(root, EPOCH_NAME), b"%d\n" % epoch)
    return epoch


@functools.cache  # so that a process reads it once, and need not have a descriptor later
def read_boot_id() -> bytes:
    """Return 16 bytes that are different after each boot of the machine."""
    path = Path("/proc/sys/kernel/random/boot_id")
    with disk_errors("read", path):
        return uuid.UUID(path.read_text().strip()).bytes


def _read(path: Path) -> tuple[EngineId, int] | None:
    """Return (identity with the file's current device and inode, the device in the file), or None without a usable file."""
    try:
        with open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            document = json.loads(file.read(4096))
        is_copy = int(document["inode"]) != status.st_ino
        copied_from = tuple(str(document.get("copy_of", "")).split())
        identity = EngineId(uuid.UUID(document["uuid"]), status.st_dev, status.st_ino, copied_from, is_copy)
        return identity, int(document["device"])
    except (FileNotFoundError, NotADirectoryError, *PARSE_ERRORS):
        return None
    except OSError as error:
        raise disk_error(error, "read", path) from error


def _write(path: Path, value: uuid.UUID, copied_from: tuple[str, ...] = ()) -> EngineId:
    def content(status: os.stat_result) -> bytes:
        document = {"uuid": str(value), "device": status.st_dev, "inode": status.st_ino}
        document |= {"copy_of": " ".join(copied_from)} if copied_from else {}
        return json.dumps(document).encode() + b"\n"

    write_config(path, content, keep_backup=False)
    with disk_errors("read", path):
        status = os.stat(path)
    return EngineId(value, status.st_dev, status.st_ino, copied_from)


def _read_number(path: Path) -> int:
    """Return the number in the file; 0 without a usable file. DiskError if it cannot be read now, since an epoch never decreases."""
    try:
        return int(read_or_none(path) or 0)
    except ValueError:
        return 0
