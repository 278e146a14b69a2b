"""How full a file system is, and whether a folder can be written: what retention and refusal are decided by."""

from __future__ import annotations

import os
from typing import NamedTuple

UNKNOWN_PERCENT = -1


class DiskUse(NamedTuple):
    """One folder's file system. `used_percent` is RocketMQ's figure (UtilAll.getDiskPartitionSpaceUsedPercent):
    the used share of what this user could use, rounded up; UNKNOWN_PERCENT when it cannot be told."""

    folder: str
    used_percent: int
    usable_bytes: int
    obstacle: str = ""       # why nothing can be written there, "" when it can
    inodes_left: bool = True

    @property
    def is_known(self) -> bool:
        return self.used_percent != UNKNOWN_PERCENT


def used_percent(total_blocks: int, free_blocks: int, usable_blocks: int) -> int:
    """The used share of used + usable, in whole percent, rounded up; UNKNOWN_PERCENT for a file system without blocks."""
    used = total_blocks - free_blocks
    entire = used + usable_blocks
    if total_blocks <= 0 or entire <= 0:
        return UNKNOWN_PERCENT
    return -(-used * 100 // entire)


def used_ratio(folder: str | os.PathLike[str]) -> float | None:
    """How full the file system of `folder` is, 0 to 1, as `df` counts; None while there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    used = found.f_blocks - found.f_bfree
    return used / (used + found.f_bavail) if used + found.f_bavail else None


def measure(folder: str | os.PathLike[str]) -> DiskUse:
    """Ask the file system of `folder`; a missing folder is asked for at its nearest parent. Writes nothing, never raises."""
    path = os.path.abspath(os.fspath(folder))
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:  # a network file system that does not answer just now
        return DiskUse(path, UNKNOWN_PERCENT, 0)
    obstacle = ""
    if status.f_flag & os.ST_RDONLY:
        obstacle = f"the file system of {path} is mounted read-only"
    elif not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        obstacle = f"this user has no right to make files in {path}"
    return DiskUse(path, used_percent(status.f_blocks, status.f_bfree, status.f_bavail),
                   status.f_bavail * status.f_frsize, obstacle,
                   inodes_left=status.f_favail > 0 or status.f_files == 0)
