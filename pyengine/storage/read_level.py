"""How far a reader may read: the limit of each ReadLevel, from the files alone.

A reader asks a `Watermark` for the limit. The one in this module needs only the files;
ipc/live_reader.py has one that uses the counters of a running engine.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyengine import arguments
from pyengine.errors import UsageError, disk_error
from pyengine.formats.paths import LOCK_NAME
from pyengine.formats.small_file import TRANSIENT_ERRNOS, open_regular, opened, path_stamp
from pyengine.results import ReadLevel
from pyengine.storage.checkpoint import WatermarkReading, abort_file_exists, read_checkpoint, read_sync_failure, read_watermark
from pyengine.storage.commit_log import CommitLog, LogEnd
from pyengine.storage.file_system import mount_of
from pyengine.storage.ofd_lock import SHARED, find_lock
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

# File systems on which fdatasync of a read-only descriptor makes durable what another process of this host has written.
LOCAL_FILE_SYSTEMS = frozenset((
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs",
))


class Watermark(Protocol):
    """The current limit of each level."""

    def limit(self, level: ReadLevel) -> int:
        """Return the physical offset below which a reader may read the log. UsageError for a level whose limit is unknown."""

    def queue_limit(self, level: ReadLevel) -> int:
        """Return the limit for queue and index entries, which may be lower: they lag the log, or are being rebuilt."""


class StoreUse(enum.Enum):
    """The kind of process that has the store open."""

    CLOSED = "closed"  # none
    ENGINE = "engine"  # a shared lock: processes of an engine
    OTHER = "other"    # an exclusive lock: a broker, or a recovery


def store_use(root: str | os.PathLike[str]) -> StoreUse:
    """Return what holds byte 0 of `lock`; it needs only the right to read the file, and does not lock.

    CLOSED if there is no lock, or the file may not be read; DiskError if it is unknown now: a reader must not miss a living engine.
    """
    path = os.path.join(root, LOCK_NAME)
    try:
        descriptor = open_regular(path)
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS or error.errno == errno.EIO:
            raise disk_error(error, "open", path) from error
        return StoreUse.CLOSED
    lock = None
    with opened(descriptor), contextlib.suppress(OSError):  # the file system has no locks
        lock = find_lock(descriptor, 0)
    if lock is None:
        return StoreUse.CLOSED
    return StoreUse.ENGINE if lock.kind == SHARED else StoreUse.OTHER


@dataclass(frozen=True, slots=True)
class DeadEngine:
    """The state in the memory of an engine whose processes are all dead: the end of its log, and whether a sync had failed.

    `end` is None if the memory does not tell it, for example since a broker has opened the store.
    """

    end: int | None
    sync_failed: bool


class FilesWatermark:
    """The limits from the files: it finds the end of the log by reading, and follows it.

    While no process has the store open, `flushed` is the durable watermark, or the offset up to which this reader itself has synced the
    log; while an engine has, the engine's last note on the disk; while another process has, it is unknown. `replicated` is the last noted
    confirmed offset. In a store with dispatch_at=replicated it is the limit of queues too: recovery has dispatched the records beyond it.
    """

    def __init__(self, root: str | os.PathLike[str], commit_log: CommitLog,
                 dead_engine: Callable[[], DeadEngine | None] = lambda: None) -> None:
        """`dead_engine` returns the state in a killed engine's memory; only callers with shared memory pass it."""
        self._root = root
        self._log = commit_log
        self._dead_engine = dead_engine
        self.end = LogEnd(root, commit_log)
        self._lock = arguments.inherited_lock()  # a signal handler in a thread that has it may read
        self._synced: tuple[WatermarkReading, int, int] | None = None  # (watermark, end, the offset that was returned for them)
        self._noted: tuple[int, ReplicationState | None] = (0, None)

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
            return self._flushed_offline(reading)
        if durable is None:
            raise UsageError(
                "the level `flushed` cannot be told from the files while another process has the store open: "
                "choose committed"
            )
        return min(durable.flushed, self._find_end())

    def newest_ms(self) -> int:
        """Return a time that is not before the store time of any message of the log."""
        self._find_end()
        return max(self.end.last_store_timestamp_ms, read_checkpoint(self._root).physic_msg_timestamp_ms)

    def _flushed_offline(self, reading: WatermarkReading) -> int:
        """Return the watermark, or the offset up to which this reader itself has synced the log."""
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
            return end  # RocketMQ has no watermark, but syncs everything in an orderly stop
        raise UsageError("the level `flushed` cannot be told here: the store was not stopped in order, or its last sync failed; it has "
                         "no config/watermark, and this reader cannot sync it itself (that needs a local, writable file system): "
                         "choose committed")

    def _synced_here(self, sure: int, end: int) -> int:
        """Sync the log and return the offset up to which it is durable now; `sure` if the sync proves nothing.

        A sync proves nothing on a file system of another host or one that is mounted read-only, and after a failed sync
        since the last boot: the kernel does not report a second time the pages that it could not write.
        """
        dead = self._dead_engine()
        if dead is not None and dead.end is not None:
            end = min(end, dead.end)  # records beyond were never published, and the next recovery clears them
        failure = read_sync_failure(self._root)
        if end <= sure or dead is not None and dead.sync_failed or failure is not None and failure.is_of_this_boot:
            return sure
        start = self._log.start_of(max(sure, self._log.min_offset))
        try:
            while start is not None and start < end:
                with opened(os.open(self._log.path(start), os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
                    if not _is_local_and_writable(descriptor):
                        return sure
                    os.fdatasync(descriptor)
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
        """Return the content of config/replication.json, which is read again when it was replaced."""
        file = ReplicationStateFile(self._root)
        stamp = path_stamp(file.path)
        with self._lock:
            if self._noted[0] != stamp:
                self._noted = stamp, file.read().state if stamp else None
            return self._noted[1]

    def _find_end(self) -> int:
        with self._lock:
            return self.end.find()


def _is_local_and_writable(descriptor: int) -> bool:
    """Whether the open file is on a file system of this host that is mounted for writing."""
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return False
    kind, options = mount_of(descriptor)
    return kind.decode() in LOCAL_FILE_SYSTEMS and b"ro" not in options
