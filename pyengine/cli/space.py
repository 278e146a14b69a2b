"""The room that an engine takes on disk and in shared memory, named before it is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine.cli.output import size_text
from pyengine.errors import DiskFullError
from pyengine.formats.paths import StorePaths

if TYPE_CHECKING:
    from pyengine.config import EngineConfig

SEGMENTS_AHEAD = 2
QUEUE_WINDOW_BYTES = 65_536


def needed_space(config: EngineConfig) -> dict[str, int]:
    """Bytes by purpose: what is allocated at the start, with the first key, per queue, in shared memory."""
    return {
        "segments_bytes": SEGMENTS_AHEAD * config.mapped_file_size_commit_log_bytes,
        "index_file_bytes": config.geometry.index_layout.size_bytes if config.message_index_enable else 0,
        "per_queue_bytes": QUEUE_WINDOW_BYTES,
        "pool_bytes": (config.transient_store_pool_size * config.mapped_file_size_commit_log_bytes
                       if config.pool_enabled else 0),
    }


def check_space(root: Path, config: EngineConfig) -> None:
    """DiskFullError, with numbers and what to set, if a new store's first files have no room.

    A store with segments is not judged: its next segment is needed only when the last is full.
    """
    folders = StorePaths(root).commit_log_folders
    if any(folder.is_dir() and any(folder.iterdir()) for folder in folders.all):
        return
    first = folders.writable[0].absolute()
    folder = next(path for path in (first, *first.parents) if path.is_dir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    space = needed_space(config)
    needed = space["segments_bytes"] + space["index_file_bytes"]
    if needed > free:
        raise DiskFullError(
            f"a new store needs {size_text(needed)} on {folder} ({SEGMENTS_AHEAD} segments of "
            f"{size_text(config.mapped_file_size_commit_log_bytes)} and an index file of "
            f"{size_text(space['index_file_bytes'])}), "
            f"{size_text(free)} are free: make smaller files, as with --set mapped_file_size_commit_log_bytes=64MiB "
            f"--set max_index_num=100000 --set max_hash_slot_num=25000", path=str(folder))
