"""How far a reader may look: what each ReadLevel means for files alone.

A reader asks a `Watermark`. A running engine's shared counters give a better one,
made where shared memory is known; this module's needs the files only.
"""

from __future__ import annotations

import enum
import fcntl
import os
import struct
import threading
from typing import Protocol

from pyengine.errors import UsageError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import open_regular
from pyengine.results import ReadLevel
from pyengine.storage.log_end import LogEnd
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from pyengine.storage.segment_files import SegmentFolder
from pyengine.storage.watermark import read_watermark

_FLOCK = "hhqqi0q"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class Watermark(Protocol):
    """Where each level ends, now."""

    def limit(self, level: ReadLevel) -> int:
        """Bytes of the log at or above this physical offset must not be looked at. Raises UsageError for a level
        that cannot be told."""

    def queue_limit(self, level: ReadLevel) -> int:
        """The same for queue and index entries: they may be behind the log, or being written again."""


class StoreUse(enum.Enum):
    """Who has the store open."""

    NOBODY = "nobody"
    ENGINE = "engine"  # shared lock: processes of this engine
    OTHER = "other"    # exclusive lock: a broker, or a recovery


def store_use(root: str | os.PathLike[str]) -> StoreUse:
    """Who holds byte 0 of `lock`; needs no right but to read it, and takes no lock. NOBODY where it cannot be read."""
    try:
        descriptor = open_regular(StorePaths(root).lock)
    except OSError:
        return StoreUse.NOBODY
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    except OSError:  # a file system without locks
        return StoreUse.NOBODY
    finally:
        os.close(descriptor)
    return {fcntl.F_UNLCK: StoreUse.NOBODY, fcntl.F_RDLCK: StoreUse.ENGINE}.get(kind, StoreUse.OTHER)


class FilesWatermark:
    """Levels told by the files: the log's end is found by reading it, and followed.

    While nobody has the store open, what is in the files is all there will be: `written`,
    `committed` and `flushed` end at the log's end. While an engine has it open, `flushed`
    is what the engine last noted on the disk; while another process has, it cannot be
    told. `replicated` is what was last noted as confirmed, where anything was. Queues end
    there too in a store whose engine kept them there (dispatch_at=replicated): recovery
    has written the rest, which is for nobody to see.
    """

    def __init__(self, root: str | os.PathLike[str], commit_log: SegmentFolder) -> None:
        self._root = root
        self._end = LogEnd(root, commit_log)
        self._lock = threading.Lock()
        self._noted: tuple[tuple[int, int] | None, ReplicationState | None] = (None, None)

    def limit(self, level: ReadLevel) -> int:
        if level is ReadLevel.REPLICATED:
            noted = self._replication()
            if noted is None:
                raise UsageError("nothing is replicated here: choose the level flushed, committed or written")
            return min(noted.confirm, self._find_end())
        if level is not ReadLevel.FLUSHED:
            return self._find_end()
        use = store_use(self._root)
        if use is StoreUse.NOBODY:
            return self._find_end()
        durable = read_watermark(self._root).watermark if use is StoreUse.ENGINE else None
        if durable is None:
            raise UsageError(
                "the level `flushed` cannot be told from the files while another process has the store open: "
                "choose committed"
            )
        return min(durable.flushed, self._find_end())

    def queue_limit(self, level: ReadLevel) -> int:
        noted = self._replication()
        if noted is not None and noted.dispatch_at == "replicated":
            return min(self.limit(level), noted.confirm)
        return self.limit(level)

    def _replication(self) -> ReplicationState | None:
        """config/replication.json, read again when it was replaced."""
        file = ReplicationStateFile(self._root)
        try:
            found = os.stat(file.path)
        except OSError:
            return None
        place = found.st_ino, found.st_mtime_ns
        with self._lock:
            if self._noted[0] != place:
                self._noted = place, file.read().state
            return self._noted[1]

    def _find_end(self) -> int:
        with self._lock:
            return self._end.find()
