"""How far a reader may look: what each ReadLevel means for files alone.

A reader asks a `Watermark`. A running engine's shared counters give a better one,
made where shared memory is known; this module's needs the files only.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyengine.errors import UsageError, disk_error
from pyengine.formats.paths import LOCK_NAME
from pyengine.formats.small_file import PASSING_ERRNOS, open_regular
from pyengine.results import ReadLevel
from pyengine.storage.checkpoint import WatermarkReading, abort_file_exists, read_sync_failure, read_watermark
from pyengine.storage.log_scan import LogEnd
from pyengine.storage.mapped_file import MappedFileQueue
from pyengine.storage.ofd_lock import SHARED, find_lock
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

# Where fdatasync on a read-only descriptor makes durable what another process of this host has written.
LOCAL_FILE_SYSTEMS = frozenset((
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs",
))


class Watermark(Protocol):
    """Where each level ends, now."""

    def limit(self, level: ReadLevel) -> int:
        """Bytes of the log at or above this physical offset must not be looked at. Raises UsageError for a level
        that cannot be told."""

    def queue_limit(self, level: ReadLevel) -> int:
        """The same for queue and index entries: they may lag the log, or being written again."""


class StoreUse(enum.Enum):
    """What has the store open."""

    CLOSED = "closed"  # no process has
    ENGINE = "engine"  # shared lock: processes of this engine
    OTHER = "other"    # exclusive lock: a broker, or a recovery


def store_use(root: str | os.PathLike[str]) -> StoreUse:
    """What holds byte 0 of `lock`; needs no right but to read it, and takes no lock. CLOSED where there is none, or none that
    may be read; DiskError where that cannot be told now: a reader must not take an engine that lives for none."""
    path = os.path.join(root, LOCK_NAME)
    try:
        descriptor = open_regular(path)
    except OSError as error:
        if error.errno in PASSING_ERRNOS or error.errno == errno.EIO:
            raise disk_error(error, "open", path) from error
        return StoreUse.CLOSED
    try:
        lock = find_lock(descriptor, 0)
    except OSError:  # a file system without locks
        return StoreUse.CLOSED
    finally:
        os.close(descriptor)
    if lock is None:
        return StoreUse.CLOSED
    return StoreUse.ENGINE if lock.kind == SHARED else StoreUse.OTHER


@dataclass(frozen=True, slots=True)
class DeadEngine:
    """What the memory of an engine all of whose processes died says: where its log ends, and whether it saw a sync fail."""

    end: int
    sync_failed: bool


class FilesWatermark:
    """Levels told by the files: the log's end is found by reading it, and followed.

    While no process has the store open, what is in the files is all there will be: `written`
    and `committed` end at the log's end. `flushed` is the durable watermark; beyond it only what this
    reader has synced itself (`_synced_here`). While an engine has it open, `flushed`
    is what the engine last noted on the disk; while another process has, it cannot be
    told. `replicated` is what was last noted as confirmed, where anything was. Queues end
    there too in a store whose engine kept them there (dispatch_at=replicated): recovery
    has written the rest, which no reader may see.
    """

    def __init__(self, root: str | os.PathLike[str], commit_log: MappedFileQueue,
                 dead_engine: Callable[[], DeadEngine | None] = lambda: None, end: LogEnd | None = None) -> None:
        """`dead_engine` looks for the memory of one, where shared memory is known. `end`: how the log's end is found, if not
        in mapped files."""
        self._root = root
        self._log = commit_log
        self._dead_engine = dead_engine
        self.end = LogEnd(root, commit_log) if end is None else end
        self._lock = threading.Lock()
        self._synced: tuple[WatermarkReading, int, int] | None = None  # watermark, end, and what was claimed then
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
        reading = WatermarkReading(None) if use is StoreUse.OTHER else read_watermark(self._root)
        durable = reading.watermark
        if use is StoreUse.CLOSED:
            return self._flushed_at_rest(reading)
        if durable is None:
            raise UsageError(
                "the level `flushed` cannot be told from the files while another process has the store open: "
                "choose committed"
            )
        return min(durable.flushed, self._find_end())

    def _flushed_at_rest(self, reading: WatermarkReading) -> int:
        """The watermark, or how far this reader has made the log durable itself."""
        end = self._find_end()
        noted = 0 if reading.watermark is None else min(reading.watermark.flushed, end)
        sure = 0 if reading.is_copied else noted
        with self._lock:
            if self._synced is None or self._synced[:2] != (reading, end):
                self._synced = reading, end, self._synced_here(sure, end)
            claimed = max(self._synced[2], noted)
        if reading.watermark is not None or claimed:
            return claimed
        if not end or not abort_file_exists(Path(self._root)) and read_sync_failure(self._root) is None:
            return end  # RocketMQ syncs everything when it stops in order, and has no watermark
        raise UsageError("the level `flushed` cannot be told here: the store was not stopped in order, or its last sync failed; it has "
                         "no config/watermark, and this reader cannot sync it itself (that needs a local, writable file system): "
                         "choose committed")

    def _synced_here(self, sure: int, end: int) -> int:
        """Up to where the log is durable now that this reader has synced it; `sure` where that proves nothing.

        It proves nothing on a file system of another host or one that is mounted read-only, nor after a failed sync
        of this boot: the kernel says nothing a second time about the pages that it could not write.
        """
        dead = self._dead_engine()
        if dead is not None:
            end = min(end, dead.end)  # what lies beyond was never published, and the next recovery clears it
        failure = read_sync_failure(self._root)
        if end <= sure or dead is not None and dead.sync_failed or failure is not None and failure.is_of_this_boot:
            return sure
        start = self._log.start_of(max(sure, self._log.min_offset))
        try:
            while start is not None and start < end:
                descriptor = os.open(self._log.path(start), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not _is_local_and_writable(descriptor):
                        return sure
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                start += self._log.size_bytes
        except OSError:
            return sure
        return end

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
            return self.end.find()


def _is_local_and_writable(descriptor: int) -> bool:
    """Whether the open file lies on a file system of this host that is mounted for writing."""
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return False
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as facts, open("/proc/self/mountinfo") as mounts:
        mount = next(line.split()[1] for line in facts if line.startswith("mnt_id:"))
        fields = next(line for line in mounts if line.startswith(f"{mount} ")).split(" - ")[1].split()
        return fields[0] in LOCAL_FILE_SYSTEMS and "ro" not in fields[2].split(",")
    return False
