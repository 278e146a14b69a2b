"""What the file system below a store does that the store has to know: copy on write, or share it between hosts.

Told by statfs's magic number. One that is not in these tables is taken for a local one that writes
in place, as ext4, xfs and tmpfs are. One that does not is found out by the first store into a
mapping that it has no room for (csrc/session_guard.cdef.h).
"""

from __future__ import annotations

import os
from pathlib import Path

from pyengine.errors import UsageError, disk_errors
from pyengine.native.new_file import file_system

# A write over bytes that are there takes new blocks: on a full disk a store into a mapping is a SIGBUS.
# An overlay does not tell what lies below it.
COPIES_ON_WRITE = {0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xCA451A4E: "bcachefs", 0x3434: "nilfs2", 0x794C7630: "overlay"}
# More than one host can have it mounted; a lock may be lost with a connection, or be seen on one host alone.
SHARED = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "SMB (cifs)", 0xFE534D42: "SMB (cifs)", 0x01021997: "9p", 0x00C36400: "CephFS",
    0x5346414F: "AFS", 0x6B414653: "AFS", 0x73757245: "Coda", 0x0BD00BD0: "Lustre", 0x01161970: "GFS2", 0x7461636F: "OCFS2",
    0x47504653: "GPFS", 0x19830326: "BeeGFS",
}


def copies_on_write(descriptor: int) -> bool:
    """Whether room that was allocated once is not enough for a later write over it."""
    try:
        return file_system(descriptor) in COPIES_ON_WRITE
    except OSError:
        return False


def refuse_shared(root: str | os.PathLike[str]) -> None:
    """UsageError for a store (to be made, too) that another host may have mounted: two engines might write to it."""
    folder = Path(root).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with disk_errors("find the file system of", root):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = SHARED.get(file_system(descriptor))
        finally:
            os.close(descriptor)
    if found is not None:
        raise UsageError(
            f"{root} is on {found}, which several hosts can mount: its locks do not keep an engine of another host from "
            "writing too; put the store on a local disk (ext4, xfs), and let others read it, or replicate to them")
