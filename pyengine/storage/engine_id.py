"""Which store this is: `config/engine-id` and `config/epoch`.

`config/engine-id` is JSON: a UUID, and the device and inode that the file itself had
when it was written. A file with another inode is a copy of a store: the store's owner
gives it a new UUID, so that it never believes the original's watermark or shared
memory, and notes in `copy_of` the original's and, after it, those from which that one had been
copied: a copy that is copied before its recovery is over hands on a watermark that is not its own.
Another device with the same inode is the same file after a remount (btrfs and overlay number their
devices anew each time): the UUID stays.

The shared objects of a store are named by `short`, made of the UUID and of the device
and inode that the file has *now*, so a copy, or a clone of the whole disk, never finds
the original's objects, even before its owner gave it a new UUID.

`config/epoch` is a number, raised at each recovery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

from pyengine.errors import disk_error, disk_errors
from pyengine.formats.small_file import PARSE_ERRORS, open_regular, read_small_file
from pyengine.storage.durable_writes import FILE_MODE, make_folders, sync_folder, write_config

COPIES_MAX = 16  # so many originals are noted


@dataclass(frozen=True, slots=True)
class EngineId:
    """Identity of one store directory. `device` and `inode` are those of config/engine-id now.

    `copied_from` are the UUIDs of the stores that this directory was copied from, the latest first; `is_copy` says that it
    was copied and that its owner has not given it a UUID of its own yet.
    """

    uuid: uuid.UUID
    device: int
    inode: int
    copied_from: tuple[str, ...] = ()
    is_copy: bool = False

    @property
    def short(self) -> str:
        """16 hex digits that name the store's shared objects."""
        place = struct.pack(">QQ", self.device, self.inode)
        return hashlib.sha256(self.uuid.bytes + place).hexdigest()[:16]


def engine_id_path(root: str | os.PathLike[str]) -> Path:
    """Where a store keeps its identity."""
    return Path(root) / "config" / "engine-id"


def epoch_path(root: str | os.PathLike[str]) -> Path:
    """Where a store keeps the number of its last recovery."""
    return Path(root) / "config" / "epoch"


def read_engine_id(root: str | os.PathLike[str]) -> EngineId | None:
    """The identity as the file says, or None if the store has none yet. Never writes."""
    found = _read(engine_id_path(root))
    return None if found is None else found[0]


def renew_copied_id(root: str | os.PathLike[str]) -> None:
    """Give a copied directory a UUID of its own; one that has no identity stays without. For the store's owner only."""
    if read_engine_id(root) is not None:
        ensure_engine_id(root)


def ensure_engine_id(root: str | os.PathLike[str]) -> EngineId:
    """The store's identity, made or, for a copied directory, replaced. For the store's owner only.

    A crash leaves the old file or the new one.
    """
    path = engine_id_path(root)
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
    """The number of the last recovery, 0 if there was none."""
    path = epoch_path(root)
    return max(_read_number(path), _read_number(path.with_name(path.name + ".bak")))


def raise_epoch(root: str | os.PathLike[str]) -> int:
    """Write and return the next epoch, durable. For the store's owner only."""
    epoch = read_epoch(root) + 1
    write_config(epoch_path(root), b"%d\n" % epoch)
    return epoch


def read_boot_id() -> bytes:
    """16 bytes that differ after each boot of the machine."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def _read(path: Path) -> tuple[EngineId, int] | None:
    """(identity with the present place, device as written), or None without a usable file."""
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
    make_folders(path.parent)
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors("write", path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            status = os.fstat(descriptor)  # the rename below keeps the inode
            document = {"uuid": str(value), "device": status.st_dev, "inode": status.st_ino}
            document |= {"copy_of": " ".join(copied_from)} if copied_from else {}
            text = json.dumps(document).encode() + b"\n"
            if os.write(descriptor, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    sync_folder(path.parent)
    return EngineId(value, status.st_dev, status.st_ino, copied_from)


def _read_number(path: Path) -> int:
    """The number in the file; 0 without a usable file. DiskError when that cannot be told now: an epoch never goes back."""
    try:
        return int(read_small_file(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return 0
    except OSError as error:
        raise disk_error(error, "read", path) from error
