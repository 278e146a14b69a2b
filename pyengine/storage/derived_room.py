"""The room that queues and index will take, kept free of segments.

Queues and index are made from the log, always behind it. On a disk that the log fills to the last byte they
could not follow: what was acknowledged would stay out of sight, and after a crash recovery could not
finish. So a new segment is made only if room is left behind it for what the log up to its end may still need.

A share of the log is an estimate: a queue entry has 20 bytes and a key about 30 more, against
messages of some 200. Where it is not enough nothing is lost; queues stand still until there is room.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pyengine.errors import DiskFullError

SHARE_OF_LOG = 4               # 1/4 of the log that is not dispatched yet
SMALL_FILES_BYTES = 128 << 10  # beginnings of queue files, checkpoint, watermark, marker


def derived_room_bytes(log_bytes: int) -> int:
    """What queues and index of that much log, not dispatched yet, may take."""
    return log_bytes // SHARE_OF_LOG + SMALL_FILES_BYTES


def free_bytes(folder: Path) -> int:
    """What a process without special rights may still take on this file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def reserve_dispatch_space(folder: Path, wanted_bytes: int, undispatched_bytes: int) -> None:
    """DiskFullError if `wanted_bytes` more on `folder`'s file system leave too little for what is to be dispatched."""
    free, kept = free_bytes(folder), derived_room_bytes(undispatched_bytes)
    if wanted_bytes + kept > free:
        raise DiskFullError(
            f"a segment of {wanted_bytes:,} bytes and {kept:,} more for its queues and index have no room in {folder}: "
            f"{free:,} are free", errno=errno.ENOSPC, path=str(folder))
