"""Back up a store, running or stopped, and restore a store from the backup (docs/backup.md).

    backup_store    write a consistent cut of log and tables, as pieces that later backups do not change (storage/backup_files.py)
    check_backup    read the whole backup and compare it with its checksums
    restore_store   make a new store with an identity of its own, whose queues and index are rebuilt from the log

The cut: a hold keeps the cleaner from deleting segments (storage/log_holds.py); then the tables are read; then the backup waits
until all records that are committed by then are flushed. So the offsets of consumers and delay levels do not point beyond the
messages, and every message that was acknowledged before the backup began is in it. A queue without messages in the log cannot be
rebuilt; the end of its last file is copied, because it has the next queue offset.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pyengine import arguments
from pyengine.engine_config import FIXED_NAMES, KEPT_NAMES, EngineSettings
from pyengine.errors import (
    CorruptionError,
    DiskError,
    EngineError,
    ExitCode,
    FormatError,
    UsageError,
    command,
    disk_errors,
)
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.paths import StorePaths, segment_name, without_log_folders
from pyengine.formats.small_file import PARSE_ERRORS, open_regular, read_open_file, read_small_file
from pyengine.ipc.crashed_engine_memory import rebuild_offline
from pyengine.ipc.live_reader import LiveStoreReader, check_now, flushed_end, log_held, lost_end, open_store
from pyengine.native.failpoints import failpoint
from pyengine.native.scan import walk
from pyengine.results import ReadLevel
from pyengine.settings import Value
from pyengine.storage.backup_files import (
    CHUNK_BYTES,
    LOCK_NAME,
    MANIFEST,
    PRIVATE_FOLDER,
    PROGRESS,
    Destination,
    Folder,
    Manifest,
    Piece,
    Table,
    is_config_table,
    locked_folder,
    open_destination,
    read_manifest,
    read_progress,
    store_identity,
)
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark, read_watermark
from pyengine.storage.config import LOG_PATHS, check_keywords, existing_store, is_inert, load_config, record_sizes, setting_name
from pyengine.storage.durable_writes import create_file, make_folders, pwrite_all, sync_descriptor, sync_folder, write_config
from pyengine.storage.engine_id import ensure_engine_id, raise_epoch, read_engine_id
from pyengine.storage.file_system import (
    make_folder_in,
    open_file_in,
    open_folder,
    path_of,
    refuse_inside,
    refuse_link,
    refuse_shared,
    sync_open_folder,
)
from pyengine.storage.log_holds import RenewedHold, held_log
from pyengine.storage.recovery.report import Findings, RecoveryState
from pyengine.storage.replication_state import ROLES, ReplicationStateFile

if TYPE_CHECKING:
    from pyengine.storage.check.report import CheckReport
    from pyengine.storage.recovery.rebuild import RebuildReport

HOLD_MS = 600_000
READY = "ready"  # a file in STORE/.restoring with the result: the store is complete and only has to be moved to its place
_TEMPORARY = (f"{MANIFEST}.tmp", f"{PROGRESS}.tmp", f"{MANIFEST}.new", f"{PROGRESS}.new")
_BACKUP_FOLDERS = ("commitlog/", "tables/")

Progress = Callable[[int, int | None], None]


# ---- backup ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BackupReport(Findings):
    """What the backup has and what this run added; `damage`: where the store's log is damaged."""

    store: str
    dest: str
    number: int
    min_offset: int
    end_offset: int
    bytes: int
    new_bytes: int
    cloned_bytes: int
    rewritten_bytes: int
    checked_bytes: int
    damage: tuple[int, ...]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """As TablesReport.exit_code."""
        return ExitCode.CORRUPTION if self.damage else ExitCode.OK

    @property
    def sentence(self) -> str:
        if self.damage:
            places = ", ".join(map(str, self.damage))
            return (f"the backup has the log as it is, and the log of {self.store} is damaged at {places}: "
                    f"{command('check', self.store)} says what to do")
        return f"backup {self.number} of {self.store} is complete in {self.dest}"


def backup_store(store: str | os.PathLike[str], dest: str | os.PathLike[str] | Destination, *, read_back: bool = False,
                 progress: Progress = lambda done, total: None, **settings: Unpack[EngineSettings]) -> BackupReport:
    """Back up a running or stopped store into the folder or URI `dest`, continuing its backup (docs/backup.md).

    `read_back` verifies all of `dest`. UsageError if `dest` has other files, StoreBusyError, CorruptionError if the store has lost
    what the backup has.
    """
    started_s = time.monotonic()
    check_keywords(backup_store, settings)
    root, dest = existing_store(arguments.local_path(store)), _opened(dest)
    if isinstance(dest, Folder):
        refuse_inside(root, dest.where)
    name = f"backup-{zlib.crc32(os.fsencode(dest.where)):08x}"  # the same name in each run: it renews the hold of a backup that was killed
    with dest.locked(), open_store(root, **settings) as reader:
        work = _Backup(root, reader, dest, progress)
        with held_log(reader.root, name, f"backup to {dest.where}", HOLD_MS) as hold:
            if not hold.is_written and reader.is_live:
                raise EngineError(f"{root} cannot be backed up while its engine runs: this user may not write the hold in "
                                  f"{root}/config/log-holds that keeps the cleaner off")
            manifest = work.run(hold)
        checked = check_backup(dest, progress) if read_back else 0
    return BackupReport(
        store=str(root), dest=dest.where, number=manifest.number, min_offset=manifest.min_offset, end_offset=manifest.end,
        bytes=manifest.size_bytes, new_bytes=work.new_bytes, cloned_bytes=work.cloned_bytes, rewritten_bytes=work.rewritten_bytes,
        checked_bytes=checked, damage=tuple(work.damage), seconds=time.monotonic() - started_s)


def _opened(dest: str | os.PathLike[str] | Destination) -> Destination:
    return open_destination(os.fspath(dest)) if isinstance(dest, (str, os.PathLike)) else dest


class _Backup:
    def __init__(self, root: Path, store: LiveStoreReader, dest: Destination, progress: Progress) -> None:
        self._root = root
        self._store = store
        self._dest = dest
        self._progress = progress
        self._segment_bytes = store.geometry.mapped_file_size_commit_log_bytes
        self.new_bytes = 0
        self.cloned_bytes = 0
        self.rewritten_bytes = 0  # of the log, where an earlier backup had different bytes
        self.damage: list[int] = []

    def run(self, hold: RenewedHold) -> Manifest:
        before, unfinished = read_manifest(self._dest), read_progress(self._dest)
        uuid = store_identity(self._root)
        self._refuse_foreign(before or unfinished, uuid)
        self._known = (*(before.pieces if before else ()), *(unfinished.pieces if unfinished else ()))
        manifest = self._cut(uuid, before)
        hold.move(manifest.min_offset)
        self._dest.replace(PROGRESS, manifest.content())
        reused = self._reusable(manifest)
        manifest = self._copy_log(replace(manifest, pieces=tuple(reused)), hold)
        if before is not None and self.rewritten_bytes and self.damage:  # no cut explains the difference: only the copy is undamaged
            self._clear(before)
            raise self._only_copy_error(before, f"the log of {self._root} is damaged at {self.damage[0]}, where the backup has other bytes")
        manifest = replace(manifest, tables=tuple(self._write_tables(manifest.number)))
        failpoint("backup_manifest_due")
        self._dest.replace(MANIFEST, manifest.content())
        failpoint("backup_manifest_written")
        self._clear(manifest)
        return manifest

    def _clear(self, manifest: Manifest) -> None:
        """Remove what the backup of this manifest does not consist of."""
        kept = {one.name for one in manifest.files}
        found = self._dest.sizes()
        self._dest.remove([name for name in found if name not in kept and name.startswith(_BACKUP_FOLDERS)])
        self._dest.remove([name for name in (PROGRESS, *_TEMPORARY) if name in found])

    def _only_copy_error(self, before: Manifest, why: str) -> CorruptionError:
        """The error for a store whose backup, made before it was damaged, may be the only copy."""
        return CorruptionError(
            f"{why}: nothing of backup {before.number} in {self._dest.where} was changed. {command('check', self._root)} says what to do; "
            f"{command('restore', self._dest.where, 'NEW')} makes a store of that backup; back up what is left into another destination")

    def _refuse_foreign(self, before: Manifest | None, uuid: str) -> None:
        names = self._dest.sizes().keys() - set(_TEMPORARY)
        if before is None and names:
            raise UsageError(f"{self._dest.where} holds {min(names)}, which no backup wrote: give an empty folder")
        if before is not None and before.uuid not in (uuid, f"path:{self._root.absolute()}"):
            raise UsageError(f"{self._dest.where} holds a backup of another store ({before.store}, {before.uuid}): give {self._root} "
                             "a destination of its own")

    def _cut(self, uuid: str, before: Manifest | None) -> Manifest:
        """Decide what to back up, as a manifest without pieces and tables; from now on the engine does not delete it."""
        if self._store.is_live:
            with log_held(self._store.root):  # waits for deletions that began before the hold
                pass
        self._tables = list(_config_tables(self._root))
        try:
            flushed = flushed_end(self._store)
        except UsageError as error:
            raise UsageError(f"{self._root} cannot be backed up now, because it is not known how far its log is durable: {error}") from None
        end = self._whole_end(before, flushed)
        starts = [start for start in self._store.commit_log.starts() if start < end]
        first = starts[0] if starts else end
        for expected, start in zip(range(first, end, self._segment_bytes), [*starts, -1]):
            if expected != start:
                raise CorruptionError(f"the segment {segment_name(expected)} of {self._root} is missing: {command('check', self._root)} "
                                      "says what to do")
        reading = read_watermark(self._root)
        self._tables += _ends_of_empty_queues(self._store)
        return Manifest(
            number=1 + (before.number if before else 0), uuid=uuid, store=str(self._root.absolute()),
            taken_ms=time.time_ns() // 1_000_000, min_offset=first, end=end,
            verified_from=None if reading.watermark is None or reading.is_copied else reading.watermark.verified_from,
            settings=_rebuild_settings(self._store), pieces=())

    def _whole_end(self, before: Manifest | None, end: int) -> int:
        """Return the offset up to which to copy the log: `end`; for a store that lost synced records, what its files still have.

        CorruptionError if an earlier backup in the destination has more, since it may be the only copy.
        """
        synced = lost_end(self._store)
        is_shorter = before is not None and before.end > end
        is_own = self._store.is_live or read_watermark(self._root).watermark is not None  # whose loss was accepted
        if before is not None and is_shorter and (synced is not None or not is_own):
            why = f"backup {before.number} reaches {before.end}" if synced is None else f"everything up to {synced} had been synced"
            raise self._only_copy_error(before, f"the log of {self._root} ends at {end}, but {why}, so its end is lost or damaged")
        if synced is None:
            return end
        copied_end = end
        for start in self._store.commit_log.starts():
            if start <= copied_end < start + self._segment_bytes:
                copied_end = min(start + self._segment_bytes, synced)
        if copied_end == end:
            self.damage.append(end)  # _copy_piece() finds damage in what is copied
        return copied_end

    def _reusable(self, manifest: Manifest) -> list[Piece]:
        """Return the pieces of earlier backups that exist and have the log's bytes, ascending, without gaps in a segment."""
        sizes = self._dest.sizes()
        there = [piece for piece in self._known if sizes.get(piece.name) == piece.size_bytes]
        found = list(self._chains(manifest, there))
        if found and not self._matches_log(found[-1]):  # the log was truncated below its durable end, and other records were appended
            matching = [piece for piece in there if self._matches_log(piece)]
            self.rewritten_bytes = sum(piece.size_bytes for piece in {*there} - {*matching})
            found = list(self._chains(manifest, matching))
        return found

    def _chains(self, manifest: Manifest, pieces: Iterable[Piece]) -> Iterator[Piece]:
        by_start: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_start.setdefault(piece.start, []).append(piece)
        for segment in range(manifest.min_offset, manifest.end, self._segment_bytes):
            at, end = segment, min(segment + self._segment_bytes, manifest.end)
            while at < end:
                fitting = [piece for piece in by_start.get(at, ()) if piece.segment == segment and piece.end <= end]
                if len(fitting) > 1:  # some are of a log that was truncated, after which other records were appended
                    fitting = [piece for piece in fitting if self._matches_log(piece)]
                if not fitting:
                    break
                longest = max(fitting, key=lambda piece: (piece.end, piece.number))
                yield longest
                at = longest.end

    def _matches_log(self, piece: Piece) -> bool:
        view = self._store.commit_log.view(piece.segment)
        if view is None or piece.end > piece.segment + self._segment_bytes:
            return False
        crc = 0
        with memoryview(view) as bytes_:
            for at in range(piece.start - piece.segment, piece.end - piece.segment, CHUNK_BYTES):
                crc = zlib.crc32(bytes_[at : min(at + CHUNK_BYTES, piece.end - piece.segment)], crc)
        return crc == piece.crc

    def _copy_log(self, manifest: Manifest, hold: RenewedHold) -> Manifest:
        ends: dict[int, int] = {}
        for piece in manifest.pieces:
            ends[piece.segment] = piece.end
        missing = [(segment, ends.get(segment, segment), min(segment + self._segment_bytes, manifest.end))
                   for segment in range(manifest.min_offset, manifest.end, self._segment_bytes)]
        missing = [(segment, start, end) for segment, start, end in missing if start < end]
        total = sum(end - start for _, start, end in missing)
        pieces = list(manifest.pieces)
        self._progress(0, total)
        for segment, start, end in missing:
            pieces.append(self._copy_piece(segment, start, end, manifest.number, hold, total))
            manifest = replace(manifest, pieces=tuple(sorted(pieces, key=lambda piece: piece.start)))
            self._dest.replace(PROGRESS, manifest.content())
            failpoint("backup_piece_noted")
        return manifest

    def _copy_piece(self, segment: int, start: int, end: int, number: int, hold: RenewedHold, total: int) -> Piece:
        log = self._store.commit_log
        path, view = Path(log.path(segment)), log.view(segment)
        if view is None:
            raise self._deleted(segment)
        with disk_errors("read", path):
            piece = Piece(start, end, 0, segment, path.stat().st_mtime_ns, number)
        crc = 0

        def chunks() -> Iterator[memoryview]:
            nonlocal crc
            with memoryview(view) as content:
                for at in range(start - segment, end - segment, CHUNK_BYTES):
                    with content[at : min(at + CHUNK_BYTES, end - segment)] as chunk:
                        crc = zlib.crc32(chunk, crc)
                        yield chunk
                        self.new_bytes += len(chunk)
                        hold.renew()
                        self._progress(self.new_bytes, total)

        if piece.size_bytes == self._segment_bytes and self._dest.clone(piece.name, path):
            for _ in chunks():
                pass
            self.cloned_bytes += piece.size_bytes
        else:
            self._dest.write(piece.name, chunks())
        found = walk(view, segment, start, end, check_crc=True)
        if found.end_offset < end and found.reason not in ("range_end", "blank"):
            self.damage.append(found.end_offset)
        if self._store.min_physical_offset > segment:
            raise self._deleted(segment)
        return replace(piece, crc=crc)

    def _deleted(self, segment: int) -> EngineError:
        return EngineError(f"the segment {segment_name(segment)} of {self._root} was deleted while it was copied, because the disk is "
                           "nearly full: make room there and run the backup again")

    def _write_tables(self, number: int) -> Iterator[Table]:
        for path, content, full_bytes in self._tables:
            name = f"tables/{number}/{path}"
            self._dest.write(name, [content])
            yield Table(path, name, len(content), zlib.crc32(content), full_bytes)


def _rebuild_settings(store: LiveStoreReader) -> dict[str, Value]:
    """Return the settings that a rebuild of queues and index needs. A broker's store does not have them; its files tell some."""
    config = store.config
    settings = {name: getattr(store.geometry, name) for name in FIXED_NAMES}
    settings |= {name: getattr(config, name) for name in KEPT_NAMES if name not in LOG_PATHS}
    return settings | {"enable_consume_queue_ext": config.enable_consume_queue_ext or StorePaths(store.root).consume_queue_ext.is_dir()}


def _config_tables(root: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield (path, content, length) of the files of brokers and users in config/, without those that identify the store."""
    folder = StorePaths(root).config
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_config_table(path.name) and path.is_file():
            with disk_errors("read", path), contextlib.suppress(FileNotFoundError):
                content = _read_table(folder, path.name)
                yield f"config/{path.name}", content, len(content)


def _read_table(folder: Path, name: str) -> bytes:
    """Read a file of config/; as root, through no link of another user. OSError or DiskError."""
    opened, path = open_folder(folder), folder / name
    try:
        status = os.stat(name, dir_fd=opened, follow_symlinks=False)
        refuse_link(status, str(path))
        return read_small_file(path) if stat.S_ISLNK(status.st_mode) else read_open_file(open_file_in(opened, name, path), path)
    finally:
        os.close(opened)


def _ends_of_empty_queues(store: LiveStoreReader) -> Iterator[tuple[str, bytes, int]]:
    """Yield (path, content, length) of the last file of each queue whose messages have all been deleted."""
    size_bytes = store.geometry.mapped_file_size_consume_queue_bytes
    for topic, queue_ids in store.topics().items():
        for queue_id in queue_ids:
            first, end = store.queue_range(topic, queue_id, ReadLevel.FLUSHED)
            queue = store._queue(topic, queue_id)
            if queue is None or first < end or not end:
                continue
            begin = (end - 1) * CQ_ENTRY_BYTES // size_bytes * size_bytes
            path = StorePaths(store.root).queue_folder(topic, queue_id) / f"{begin:020d}"
            with disk_errors("read", path), open(open_regular(path), "rb") as file:
                yield str(path.relative_to(store.root)), file.read(end * CQ_ENTRY_BYTES - begin), size_bytes


# ---- check -----------------------------------------------------------------------


def check_backup(dest: Destination, progress: Progress = lambda done, total: None) -> int:
    """Read the whole backup and compare it with its checksums; return its bytes. CorruptionError names the file that differs."""
    manifest = _require_manifest(dest)
    done, damaged = 0, []
    for one in manifest.files:
        try:
            for chunk in _verified(dest, one):
                done += len(chunk)
                progress(done, manifest.size_bytes)
        except CorruptionError as error:
            damaged.append(str(error))
    if damaged:
        more = f"; and {len(damaged) - 3} more files" if len(damaged) > 3 else ""
        raise CorruptionError("; ".join(damaged[:3]) + more + ". Run a new backup into another folder")
    return done


def _require_manifest(dest: Destination) -> Manifest:
    manifest = read_manifest(dest)
    if manifest is None:
        why = "a backup into it has not finished: run it again" if read_progress(dest) else f"it has no {MANIFEST}"
        raise UsageError(f"{dest.where} holds no backup: {why}")
    return manifest


def _verified(dest: Destination, one: Piece | Table) -> Iterator[bytes]:
    """Yield the file's bytes; CorruptionError at the end if they do not match the checksum."""
    crc = length = 0
    try:
        for chunk in dest.chunks(one.name):
            crc, length = zlib.crc32(chunk, crc), length + len(chunk)
            if length > one.size_bytes:
                break
            yield chunk
    except FileNotFoundError:
        raise CorruptionError(f"{dest.where}/{one.name} is missing") from None
    if (crc, length) != (one.crc, one.size_bytes):
        more = "or more " if length > one.size_bytes else ""
        raise CorruptionError(f"{dest.where}/{one.name} is damaged: {length} {more}bytes with checksum {crc:08x}, not {one.size_bytes} "
                              f"with {one.crc:08x}")


# ---- restore ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestoreReport(Findings):
    """The outcome of a restore; `refused`: why queues and index were not rebuilt.

    `rebuilt` and `check` are None if an earlier restore completed it: `found` is its result.
    """

    store: str
    dest: str
    uuid: str
    taken_ms: int
    min_offset: int
    end_offset: int
    rebuilt: RebuildReport | None
    check: CheckReport | None
    refused: str
    seconds: float
    found: ExitCode = ExitCode.OK

    @property
    def exit_code(self) -> ExitCode:
        """As TablesReport.exit_code."""
        return ExitCode.CORRUPTION if self.refused else self.found

    @property
    def sentence(self) -> str:
        if self.refused:
            return f"{self.store} has the log of {self.dest}, but not its queues and index: {self.refused}"
        if self.check is None:
            damaged = f". It is damaged: {command('check', self.store)} says what to do" if self.found else ""
            return f"{self.store} is restored from {self.dest}{damaged}"
        return f"{self.store} is restored from {self.dest}. {self.check.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        reports = {"rebuilt": self.rebuilt, "check": self.check}
        fields = Findings.to_dict(self) | {name: report and report.to_dict() for name, report in reports.items()}
        del fields["found"]
        return fields


def restore_store(dest: str | os.PathLike[str] | Destination, store: str | os.PathLike[str], *,
                  progress: Progress = lambda done, total: None, **settings: Unpack[EngineSettings]) -> RestoreReport:
    """Restore the backup in `dest` to `store`, absent or empty.

    It becomes a store when all is checked; the same call continues an interrupted one. UsageError, CorruptionError.
    """
    started_s = time.monotonic()
    check_keywords(restore_store, settings)
    if named := set(LOG_PATHS).intersection(setting_name(key, "restore") for key in settings if not is_inert(key)):
        raise UsageError(f"{min(named)} cannot be set here: the log is restored into {StorePaths(store).commit_log}. Move it afterwards")
    dest, root = _opened(dest), arguments.local_path(store)
    manifest = _require_manifest(dest)
    refuse_shared(root)
    folder = open_folder(root, make_mode=PRIVATE_FOLDER)
    try:
        with _private_files(), locked_folder(root), dest.locked(shared=True):
            report = _restore(manifest, dest, folder, root, progress, settings)
    finally:
        os.close(folder)
    return replace(report, seconds=time.monotonic() - started_s)


def _restore(manifest: Manifest, dest: Destination, folder: int, root: Path, progress: Progress,
             settings: EngineSettings) -> RestoreReport:
    """Restore into the open folder of `root`; `seconds` is not set yet."""
    name = StorePaths(root).restoring.name
    others = sorted(set(os.listdir(folder)) - {name, LOCK_NAME, "lost+found"})
    has_begun = name in os.listdir(folder)
    rebuilt, check, crc = None, None, zlib.crc32(manifest.content())
    origin: dict[str, Any] = {"manifest": crc, "dest": dest.where, "taken_ms": manifest.taken_ms,
                              "min_offset": manifest.min_offset, "end_offset": manifest.end}
    with _open_restoring(folder, root) if has_begun or not others else contextlib.nullcontext() as made:
        ready = None if made is None else _read_ready(made / READY)
        is_moved = bool(others) and made is not None and (ready is not None or not os.listdir(made))
        if others and not is_moved:
            raise UsageError(f"{root} holds {others[0]}: a backup is restored into an empty or absent directory")
        assert made is not None
        if not is_moved and (ready is None or ready["manifest"] != crc):  # DEST may have a newer backup by now
            try:
                _copy_store(manifest, dest, made, progress)
            except CorruptionError:
                _clear_folder(made)
                os.rmdir(name, dir_fd=folder)
                raise
            rebuilt, check, refused = _complete(made, settings, progress)
            ready = origin | {"refused": refused, "found": ExitCode.OK if check is None else check.exit_code}
            write_config(made / READY, json.dumps(ready).encode() + b"\n", keep_backup=False)
        failpoint("restore_moving")
        _move(made, folder, root)
    identity = read_engine_id(root)
    if ready is None:  # the last run was killed after it had removed the note, before its last step
        check = check_now(root, load_config(root, settings), progress=progress)
        ready = origin | {"refused": "", "found": check.exit_code}
    del ready["manifest"]
    return RestoreReport(store=str(root), uuid=str(identity.uuid) if identity else "", rebuilt=rebuilt, check=check, seconds=0.0,
                         **ready | {"found": ExitCode(ready["found"])})


def _read_ready(path: Path) -> dict[str, Any] | None:
    """Return what READY has: the backup (CRC-32 of its manifest) that the store was made from, and the result; None without it."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError, *PARSE_ERRORS):
        found = json.loads(read_small_file(path))
        return {name: found[name] for name in ("manifest", "dest", "taken_ms", "min_offset", "end_offset", "refused", "found")}
    return None


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Let only this user read what the process creates inside the block: the store that was backed up may have been as private."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def _open_restoring(folder: int, root: Path) -> Iterator[Path]:
    """Open the folder in which the store is made; yield a path that leads to it whatever its name becomes.

    So the user of `root` cannot put a link in its place while root writes.
    """
    named = StorePaths(root).restoring
    with disk_errors("open", named):
        make_folder_in(folder, named.name, PRIVATE_FOLDER)
        descriptor = os.open(named.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise DiskError(f"{named} belongs to the user {owner}: run `restore` as that user, or remove it", errno=errno.EPERM)
        with path_of(descriptor, named) as held:
            yield held
    finally:
        os.close(descriptor)


def _clear_folder(folder: Path) -> None:
    with disk_errors("clear", folder):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _copy_store(manifest: Manifest, dest: Destination, root: Path, progress: Progress) -> None:
    """Write tables and log, durably, and give the store an identity; CorruptionError for a file that does not match its checksum."""
    (root / READY).unlink(missing_ok=True)  # first: if this run is killed, the files are no complete store
    sync_folder(root)
    _clear_folder(root)
    for table in manifest.tables:
        _restore_table(table, dest, root)
    file = ReplicationStateFile(root)
    if (state := file.read().state) is not None and state.role == "SLAVE":  # it starts without a promotion, whose term would fence a master
        file.write(replace(state, role=ROLES[0], master_end=0))
    record_sizes(root, load_config(root, manifest.settings))
    make_folders(StorePaths(root).commit_log)
    done = 0
    for segment in dict.fromkeys(piece.segment for piece in manifest.pieces):
        for count in _restore_segment([piece for piece in manifest.pieces if piece.segment == segment], manifest, dest, root):
            done += count
            progress(done, manifest.size_bytes)
        failpoint("restore_segment_made")
    identity = ensure_engine_id(root)
    if manifest.verified_from is not None:
        WATERMARK.write(root, DurableWatermark(
            str(identity.uuid), raise_epoch(root), manifest.end, manifest.verified_from, ordered_from=manifest.end))


def _complete(root: Path, settings: EngineSettings, progress: Progress) -> tuple[RebuildReport | None, CheckReport | None, str]:
    """Rebuild queues, index and the other files, and check the store; (rebuild, check, why the log does not allow it)."""
    config = load_config(root, settings)
    rebuilt, check, refused = None, None, ""
    try:
        if any(StorePaths(root).commit_log.iterdir()):
            rebuilt = rebuild_offline(root, config, progress=progress)
            refused = rebuilt.sentence if rebuilt.state is RecoveryState.DEGRADED else ""
            shutil.rmtree(StorePaths(root).quarantine, ignore_errors=True)  # copied ends of queues that were rebuilt
            end, size_bytes = rebuilt.end_offset, config.geometry.mapped_file_size_commit_log_bytes
            if end and end % size_bytes == 0 and not StorePaths(root).commit_log_segment(end).exists():
                # As a running engine does: without it RocketMQ ends a log earlier whose last segment is full.
                os.close(create_file(StorePaths(root).commit_log, segment_name(end), size_bytes, allocate="none"))
            failpoint("restore_rebuilt")
            check = check_now(root, config, progress=progress)
    except CorruptionError as error:
        refused = str(error)
    return rebuilt, check, refused


def _restore_table(table: Table, dest: Destination, root: Path) -> None:
    content = b"".join(_verified(dest, table))
    if table.path == "config/engine.toml":
        try:
            content = without_log_folders(content)
        except FormatError as error:
            raise CorruptionError(f"{dest.where}/{table.name} cannot be used: {error}") from None
    write_config(root / table.path, content + bytes(max(0, table.full_bytes - table.size_bytes)), keep_backup=False)


def _restore_segment(pieces: list[Piece], manifest: Manifest, dest: Destination, root: Path) -> Iterator[int]:
    """Write one segment from its pieces, durably; yield the bytes of each step."""
    segment, size_bytes = pieces[0].segment, int(manifest.settings["mapped_file_size_commit_log_bytes"])
    folder, name = StorePaths(root).commit_log, segment_name(segment)
    descriptor = create_file(folder, name, size_bytes, allocate=pieces[-1].end - segment)
    try:
        for piece in pieces:
            at = piece.start - segment
            for chunk in _verified(dest, piece):
                pwrite_all(descriptor, chunk, at, folder / name)
                at += len(chunk)
                yield len(chunk)
        os.utime(descriptor, ns=(time.time_ns(), pieces[-1].modified_ns))
        sync_descriptor(descriptor, folder / name)
    finally:
        os.close(descriptor)


def _move(made: Path, folder: int, root: Path) -> None:
    """Move the complete store to its place, the log last: without the log no program takes the folder for a store."""
    names = sorted(set(os.listdir(made)) - {READY}, key=lambda name: (name == "commitlog", name))
    with disk_errors("move", made):
        for name in names:
            os.rename(made / name, name, dst_dir_fd=folder)
            failpoint("restore_moved")
        sync_open_folder(folder)
        sync_folder(made)
        (made / READY).unlink(missing_ok=True)
        os.rmdir(StorePaths(root).restoring.name, dir_fd=folder)
        sync_open_folder(folder)
