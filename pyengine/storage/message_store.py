"""MessageStore: a store on disk as one value, which functions take in place of a root, a geometry and sizes.

It has no descriptor and no content: each method reads the current files. It can be pickled, so that Spark sends it to its executors.

This module also derives the sizes of a store's files, which RocketMQ has only in its broker's configuration, and a store of this engine
in config/engine.toml: segment sizes from file lengths and name differences, the index layout from its chains (index_file.py). If a log
has only one segment, which may be truncated, its length is accepted if it is a power of two or divides the segment's own name;
otherwise --set or RocketMQ's default decides, and the code that opens a segment of another length refuses it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import DiskFullError, NotAStoreError, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.paths import StorePaths, parse_segment_name, segment_start
from pyengine.native.dispatch import WINDOW_BYTES
from pyengine.storage.commit_log import (
    SEGMENTS_AHEAD,
    Log,
    list_complete_log,
    list_log,
    reserve_ahead_bytes,
    reserve_step_bytes,
)
from pyengine.storage.file_system import derived_room_bytes, free_bytes
from pyengine.storage.index_file import find_layout, first_bytes
from pyengine.storage.mapped_file import MappedFile, index_file_names, is_plain_file, queue_folders


class NewStoreSpace(NamedTuple):
    """The space of a new store: what it takes on the disk with its first messages, and the lengths of those files, which fill later."""

    log_bytes: int
    index_bytes: int
    log_length_bytes: int
    index_length_bytes: int
    per_queue_bytes: int
    pool_bytes: int

    @classmethod
    def of(cls, config: EngineConfig) -> NewStoreSpace:
        """Compute it from the settings of a store."""
        segment_bytes, layout = config.mapped_file_size_commit_log_bytes, config.geometry.index_layout
        has_index, is_warm = config.message_index_enable, config.warm_mapped_file_enable and config.mode == "async"
        length_bytes = SEGMENTS_AHEAD * segment_bytes
        return cls(length_bytes if is_warm else reserve_ahead_bytes(segment_bytes, 0), first_bytes(layout) if has_index else 0,
                   length_bytes, layout.size_bytes if has_index else 0, WINDOW_BYTES, config.pool_bytes)


def require_space(root: str | os.PathLike[str], config: EngineConfig) -> None:
    """Raise DiskFullError, with numbers and a remedy, if there is no space for the first messages of a new store.

    A store with segments is not checked: its engine refuses puts while the disk is full.
    """
    folders = StorePaths(root).commit_log_folders
    if any(folder.is_dir() and any(folder.iterdir()) for folder in folders.all):
        return
    step_bytes, index_bytes = reserve_step_bytes(config.mapped_file_size_commit_log_bytes), NewStoreSpace.of(config).index_bytes
    needed: dict[int, tuple[Path, int]] = {}
    for place, place_bytes in ((Path(root), index_bytes), (folders.writable[0], step_bytes + derived_room_bytes(step_bytes))):
        folder = next(path for path in (place.absolute(), *place.absolute().parents) if path.is_dir())
        disk = folder.stat().st_dev
        needed[disk] = folder, place_bytes + needed.get(disk, (folder, 0))[1]
    for folder, needed_bytes in needed.values():
        if needed_bytes > (free := free_bytes(folder)):
            raise DiskFullError(
                f"a new store needs {needed_bytes:,} bytes on {folder} for its first messages ({step_bytes:,} of its log, {index_bytes:,} "
                f"of an index file, and space for queues), {free:,} are free: make smaller files, as with the settings "
                "mapped_file_size_commit_log_bytes=16MiB, max_index_num=100000, max_hash_slot_num=25000", path=str(folder))


class MessageStore(StorePaths):
    """The store at `root`: its paths, sizes, log and small state files. Two objects are equal if their roots are."""

    __slots__ = ("_geometry",)
    _geometry: Geometry | None

    def __init__(self, root: str | os.PathLike[str], geometry: Geometry | None = None) -> None:
        """`geometry` is that of the store's configuration; None: it is derived from the files at its first use."""
        super().__init__(root)
        object.__setattr__(self, "_geometry", geometry)

    def __fspath__(self) -> str:
        return os.fspath(self.root)

    def __str__(self) -> str:
        return str(self.root)

    def __reduce__(self) -> tuple[type[MessageStore], tuple[os.PathLike[str], Geometry | None]]:
        return MessageStore, (self.root, self._geometry)

    @property
    def geometry(self) -> Geometry:
        """The sizes of the store's files."""
        geometry = self._geometry
        if geometry is None:
            geometry = discover(self.root)
            object.__setattr__(self, "_geometry", geometry)
        return geometry

    def require_exists(self) -> None:
        """Raise NotAStoreError for a folder that holds no store."""
        has_log = any(folder.is_dir() for folder in self.commit_log_folders.all)
        if not has_log and not self.checkpoint.exists() and not self.consume_queue.exists():
            raise NotAStoreError(f"{self} holds no store: there is no commitlog in it")

    @property
    def segment_bytes(self) -> int:
        """The size of one segment of the commit log."""
        return self.geometry.mapped_file_size_commit_log_bytes

    @property
    def queue_file_bytes(self) -> int:
        """The size of one file of a consume queue."""
        return self.geometry.mapped_file_size_consume_queue_bytes

    @property
    def queue_ext_file_bytes(self) -> int:
        """The size of one file of a consume queue's extension."""
        return self.geometry.mapped_file_size_consume_queue_ext_bytes

    def list_log(self) -> list[MappedFile]:
        """Return the log's segments in order. StoreRefusedError for a foreign file or a wrong length."""
        return list_log(self.root, self.segment_bytes)

    def list_complete_log(self, *, accept_loss: bool = False) -> list[MappedFile]:
        """Return the log's segments for a process that will change the store: a missing one is an error (commit_log.py)."""
        return list_complete_log(self.root, self.segment_bytes, accept_loss=accept_loss)

    def log_between(self, start: int, end: int) -> Log:
        """Return the log's segments that have bytes of [start, end), by their names: it does not look which exist."""
        starts = range(segment_start(start, self.segment_bytes), end, self.segment_bytes)
        return Log([MappedFile(self.commit_log_segment(base), base) for base in starts], self.segment_bytes, None)

    def space(self) -> dict[str, int]:
        """Return how many bytes the files of log and index take on the disk, and their lengths, which they take when they are full."""
        disk_bytes = length_bytes = 0
        for folder in (*self.commit_log_folders.all, self.index):
            with contextlib.suppress(OSError):  # the folder does not exist
                for file in folder.iterdir():
                    with contextlib.suppress(FileNotFoundError):  # the cleaner has deleted it
                        status = file.stat()
                        disk_bytes, length_bytes = disk_bytes + status.st_blocks * 512, length_bytes + status.st_size
        return {"disk_bytes": disk_bytes, "length_bytes": length_bytes}


_QUEUES_SAMPLED = 16  # a topic may have thousands of queues, all with the same sizes
DEFAULTS = Geometry()


def discover(root: str | os.PathLike[str], overrides: Mapping[str, int] | None = None) -> Geometry:
    """Return the geometry of the store at `root`: from its files, else from `overrides`, else RocketMQ's defaults.

    If files and `overrides` differ, the files take precedence; the caller compares and refuses.
    If several values are consistent with the files, an override among them decides.
    No file makes it raise an error: the code that opens one of a wrong length, or one in a folder's place, refuses it.
    """
    overrides = overrides or {}
    paths = StorePaths(root)
    wanted = replace(DEFAULTS, **overrides)
    found: dict[str, int] = {}
    for name, queues, unit_bytes in (
        ("mapped_file_size_consume_queue_bytes", paths.consume_queue, CQ_ENTRY_BYTES),
        ("mapped_file_size_consume_queue_ext_bytes", paths.consume_queue_ext, 1),
    ):
        folders = islice(queue_folders(queues), _QUEUES_SAMPLED) if queues.is_dir() else ()
        size_bytes = segment_size([_segments(folder) for _, _, folder in folders], unit_bytes)
        if size_bytes is not None:
            found[name] = size_bytes
    log_bytes = _log_segment_size(paths, overrides.get("mapped_file_size_commit_log_bytes"))
    if log_bytes is not None:
        found["mapped_file_size_commit_log_bytes"] = log_bytes
    index_files = index_file_names(paths.index) if paths.index.is_dir() else []
    layout = find_layout([paths.index / name for name in index_files], wanted.index_layout)
    if layout is not None:
        found["max_hash_slot_num"] = layout.max_hash_slot_num
        found["max_index_num"] = layout.max_index_num
    return replace(wanted, **found)


def _log_segment_size(paths: StorePaths, wanted: int | None) -> int | None:
    """Return the size of the log's segments; None if there are none, or only one, whose length may be wrong."""
    folders = [_segments(folder) for folder in paths.commit_log_folders.all]
    size_bytes = segment_size(folders)
    segments = [segment for folder in folders for segment in folder]
    if len(segments) > 1 or size_bytes is None:
        return size_bytes
    start, length = segments[0]
    if wanted is not None and wanted > length and start % wanted == 0:
        return None
    is_likely = length.bit_count() == 1 or start > 0 and start % length == 0
    return length if is_likely else None


def segment_size(folders: Iterable[list[tuple[int, int]]], unit_bytes: int = 1) -> int | None:
    """Return the size of the segments in these folders, None if there are none.

    If all files have the same length, that is the size. If not (a file was truncated), it is the length that matches
    the differences of names, else the most frequent, else the largest; every name must be a multiple of it, and it
    must be a multiple of `unit_bytes`. If all lengths are wrong, it is the smallest
    difference of two names.
    """
    lengths, steps, starts = Counter[int](), Counter[int](), set[int]()
    for segments in folders:
        lengths.update(length for _, length in segments)
        starts.update(start for start, _ in segments)
        steps.update(after - before for (before, _), (after, _) in pairwise(segments))
    possible = [length for length in lengths
                if length and length % unit_bytes == 0 and not any(start % length for start in starts)]
    if not possible:
        return min(steps, default=None)
    return max(possible, key=lambda length: (steps[length], lengths[length], length))


def _segments(folder: Path) -> list[tuple[int, int]]:
    """Return (start offset, length) of the 20-digit files of a folder, ascending."""
    found = []
    with disk_errors("list", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            start = parse_segment_name(entry.name)
            if start is not None and is_plain_file(entry):
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                    found.append((start, entry.stat().st_size))
    return sorted(found)
