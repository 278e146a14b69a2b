"""MessageStore: a store on disk as one value, which functions take in place of a root, a geometry and sizes.

It holds no descriptor and no content: each method reads what the files hold at that moment. It is small and can be
pickled, so Spark sends it to its executors. Wherever a function still asks for a root it can be passed as it is.
"""

from __future__ import annotations

import os

from pyengine.engine_config import Geometry
from pyengine.formats.checkpoint import Checkpoint
from pyengine.formats.paths import StorePaths
from pyengine.storage.checkpoint import abort_file_exists, read_checkpoint
from pyengine.storage.commit_log import CommitLog, list_log, look_at_log
from pyengine.storage.engine_id import EngineId, read_engine_id, read_epoch
from pyengine.storage.geometry import discover
from pyengine.storage.mapped_file import MappedFile, MappingCache
from pyengine.storage.watermark import WatermarkReading, read_watermark


class MessageStore(StorePaths):
    """The store at `root`: its paths, sizes, log and small state files. Two are equal when their roots are."""

    __slots__ = ("_geometry",)
    _geometry: Geometry | None

    def __init__(self, root: str | os.PathLike[str], geometry: Geometry | None = None) -> None:
        """`geometry` as the store's configuration gives it; without it the files are asked when it is first used."""
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
        """The log's segments in order. StoreRefusedError for a file that does not belong there or has a wrong length."""
        return list_log(self.root, self.segment_bytes)

    def look_at_log(self, *, accept_loss: bool = False) -> list[MappedFile]:
        """The log's segments, for a process that will change the store: missing ones are refused (commit_log.py)."""
        return look_at_log(self.root, self.segment_bytes, accept_loss=accept_loss)

    def open_log(self, cache: MappingCache) -> CommitLog:
        """The log's segments, followed while other processes add and delete some."""
        return CommitLog(self.root, self.segment_bytes, cache)

    def read_watermark(self) -> WatermarkReading:
        """What config/watermark says; DiskError when it cannot be read."""
        return read_watermark(self.root)

    def read_checkpoint(self) -> Checkpoint:
        """The three store times, zeros without a file; DiskError when it cannot be read."""
        return read_checkpoint(self.root)

    def read_engine_id(self) -> EngineId | None:
        """Which store this is, None for one that has no identity yet; DiskError when it cannot be read."""
        return read_engine_id(self.root)

    def read_epoch(self) -> int:
        """The number of the last recovery, 0 if there was none."""
        return read_epoch(self.root)

    def abort_exists(self) -> bool:
        """True while the store is open, and after a crash."""
        return abort_file_exists(self.root)
