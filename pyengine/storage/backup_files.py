"""The files of a backup: pieces of the log that are written once, tables, and a manifest that is written last.

    DEST/manifest.json                  the list of files with lengths and checksums; without it there is no backup
    DEST/progress.json                  the complete pieces of a backup that has not finished
    DEST/commitlog/SEGMENT.FROM-TO.N    the bytes [FROM, TO) of a segment of the log, written by backup N
    DEST/tables/N/...                   files of the store as they were when backup N was taken, under their names there

Pieces and tables are not changed: the next backup adds its own, then replaces the manifest, then removes the files that
the new manifest does not name. So the backup of the last manifest is complete at every moment, and the next backup
continues from the files of one that was killed. `Destination` hides the place: a folder, whose files are durable before
a manifest names them, or a file system of pyarrow.fs, which makes a file durable when its stream is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pyengine.arguments import INT64_MAX, is_folder_name
from pyengine.engine_config import FIXED_NAMES, KEPT_NAMES
from pyengine.errors import (
    CorruptionError,
    DiskError,
    FormatError,
    StoreBusyError,
    UsageError,
    disk_error,
    disk_errors,
    require_extra,
)
from pyengine.formats.paths import SEGMENT_START_MAX, is_queue_id_name, parse_segment_name, segment_name
from pyengine.formats.small_file import PARSE_ERRORS, SMALL_FILE_BYTES_MAX, opened
from pyengine.native.failpoints import failpoint
from pyengine.settings import Value
from pyengine.storage.check.check import NOT_KEPT
from pyengine.storage.config import LOG_PATHS
from pyengine.storage.consumer_offset import CANCELS_NAME
from pyengine.storage.durable_writes import open_new, pwrite_all, sync_descriptor
from pyengine.storage.engine_id import read_engine_id
from pyengine.storage.file_system import make_folder_in, open_file_in, open_folder, sync_open_folder
from pyengine.storage.ofd_lock import EXCLUSIVE, SHARED, try_lock

if TYPE_CHECKING:
    import pyarrow.fs

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
CHUNK_BYTES = 8 << 20
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700  # a backup has all messages, and tables that others may not be allowed to read
MANIFEST_SETTINGS = frozenset({*FIXED_NAMES, *KEPT_NAMES, "enable_consume_queue_ext"}) - frozenset(LOG_PATHS)
TABLE_BYTES_MAX = SMALL_FILE_BYTES_MAX
DEPTH_MAX = 8  # of folders; a backup has tables/N/consumequeue/TOPIC/QUEUE
_FORMAT = 1
_UNFINISHED = ".part"
_FICLONE = 0x40049409


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes [start, end) of the log, all in one segment; `modified_ns`: the segment's file time, by which it expires.

    `number` is that of the backup that wrote it, `crc` the CRC-32 of the bytes.
    """

    start: int
    end: int
    crc: int
    segment: int
    modified_ns: int
    number: int

    @property
    def name(self) -> str:
        """The name of its file in the backup."""
        return f"commitlog/{segment_name(self.segment)}.{self.start - self.segment}-{self.end - self.segment}.{self.number}"

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Table:
    """A file of the store, `path` relative to its root, that is copied up to its final zeros; `full_bytes`: its length there."""

    path: str
    name: str
    size_bytes: int
    crc: int
    full_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One backup: the log [min_offset, end) and tables of the store `uuid` ("" if only RocketMQ has run the store).

    `verified_from` is that of the store's own watermark, None if it has none. `settings` are those that are needed to read
    or rebuild its files.
    """

    number: int
    uuid: str
    store: str
    taken_ms: int
    min_offset: int
    end: int
    verified_from: int | None
    settings: dict[str, Value]
    pieces: tuple[Piece, ...]
    tables: tuple[Table, ...] = ()

    @property
    def files(self) -> tuple[Piece | Table, ...]:
        """All files of the backup except the manifest."""
        return (*self.pieces, *self.tables)

    @property
    def size_bytes(self) -> int:
        """The sum of the lengths of its files."""
        return sum(one.size_bytes for one in self.files)

    def content(self) -> bytes:
        """Return the bytes of the manifest file; the last field is the CRC-32 of the others."""
        fields = {"format": _FORMAT, **asdict(self)}
        return json.dumps(fields | {"crc": _crc_of(fields)}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, content: bytes) -> Manifest:
        """Read what content() has written; FormatError for other bytes, and for what no backup writes.

        The checksum tells damage, not who wrote it: the user of the folder may have, and root may restore the backup.
        """
        try:
            fields = json.loads(content)
            crc, version = fields.pop("crc"), fields["format"]
            if version != _FORMAT:
                raise FormatError(f"its format is {version}, this version knows {_FORMAT}")
            if crc != _crc_of(fields):
                raise FormatError("it does not match its checksum")
            del fields["format"]
            pieces = tuple(Piece(**one) for one in fields.pop("pieces"))
            tables = tuple(Table(**one) for one in fields.pop("tables"))
            manifest = cls(**fields, pieces=pieces, tables=tables)
            manifest._check()
            return manifest
        except PARSE_ERRORS as error:
            raise FormatError(f"it is not readable ({error})") from None


    def _check(self) -> None:
        """FormatError for fields that no backup writes."""
        segment_bytes = self.settings.get("mapped_file_size_commit_log_bytes")
        _require_numbers(self, "number", "taken_ms", "min_offset", "end")
        if type(segment_bytes) is not int or segment_bytes < 1 or type(self.uuid) is not str or type(self.store) is not str:
            raise FormatError("it names no store, or no size of segments")
        if self.verified_from is not None:
            _require_numbers(self, "verified_from")
        if others := sorted(self.settings.keys() - MANIFEST_SETTINGS):
            raise FormatError(f"it has the setting {others[0]}, which no backup has")
        for piece in self.pieces:
            _require_numbers(piece, "start", "end", "crc", "segment", "modified_ns", "number")
            if (piece.segment % segment_bytes or piece.segment > SEGMENT_START_MAX
                    or not piece.segment <= piece.start < piece.end <= min(piece.segment + segment_bytes, self.end)):
                raise FormatError(f"the bytes {piece.start} to {piece.end} are not of one segment of {segment_bytes} bytes")
        for table in self.tables:
            _require_numbers(table, "size_bytes", "crc", "full_bytes")
            if not is_table_path(table.path):
                raise FormatError(f"it names {table.path!r}, which is not a file of a store that a backup has")
            match table.name.split("/", 2):
                case ["tables", number, table.path] if number.isascii() and number.isdecimal():
                    pass
                case _:
                    raise FormatError(f"it names {table.name!r} as the copy of {table.path!r}")
            if not table.size_bytes <= table.full_bytes <= TABLE_BYTES_MAX:
                raise FormatError(f"{table.path} has {table.size_bytes} of {table.full_bytes} bytes; {TABLE_BYTES_MAX} are possible")


def _require_numbers(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if type(value) is not int or not 0 <= value <= INT64_MAX:
            raise FormatError(f"{name} is {value!r:.100}, not a number of 63 bits")


def is_config_table(name: str) -> bool:
    """Whether a backup has this file of config/: tables of brokers and users, and the settings.

    It has nothing that identifies the store, and no access list, which has secrets.
    """
    plain = name.removesuffix(".bak")
    return "/" not in name and (plain in ("engine.toml", CANCELS_NAME) or plain.endswith(".json") and plain not in NOT_KEPT)


def is_table_path(path: object) -> bool:
    """Whether a backup has this file of a store in its tables: one of config/, or the last file of a queue without messages."""
    if type(path) is not str or "\0" in path:
        return False
    match path.split("/"):
        case ["config", name]:
            return is_config_table(name)
        case ["consumequeue", topic, queue_id, name]:
            return is_folder_name(topic) and is_queue_id_name(queue_id) and parse_segment_name(name) is not None
    return False


def _crc_of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def store_identity(root: Path) -> str:
    """Return the store's UUID, or `path:...` if it has none yet: only RocketMQ has run it, or it is a new copy."""
    found = read_engine_id(root)
    if found is None or found.is_copy:
        return f"path:{os.fsencode(root.absolute()).decode(errors='backslashreplace')}"
    return str(found.uuid)


def open_destination(dest: str) -> Destination:
    """Open a folder, or the place of a URI (pyarrow.fs: s3://bucket/path, gs://, hdfs://, file://). UsageError for another URI."""
    if not dest:
        raise UsageError("DEST is empty: give a folder or a URI")
    if "://" not in dest:
        return Folder(Path(dest).absolute())
    require_extra("pyarrow", name="arrow")
    import pyarrow
    from pyarrow.fs import FileSystem, LocalFileSystem

    try:
        file_system, path = FileSystem.from_uri(dest)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"cannot use {dest}: {error}") from None
    return Folder(Path(path)) if isinstance(file_system, LocalFileSystem) else Remote(file_system, path.rstrip("/"), dest)


def read_progress(dest: Destination) -> Manifest | None:
    """Return the complete pieces of an unfinished backup; None if there is none, or if the file is damaged."""
    with contextlib.suppress(CorruptionError):
        return read_manifest(dest, PROGRESS)
    return None


def read_manifest(dest: Destination, name: str = MANIFEST) -> Manifest | None:
    """Return the finished backup there, None if there is none. CorruptionError for a damaged manifest."""
    content = bytearray()
    try:
        for chunk in dest.chunks(name):
            content += chunk
            if len(content) > SMALL_FILE_BYTES_MAX:
                raise CorruptionError(f"{dest.where}/{name} cannot be used: it is longer than {SMALL_FILE_BYTES_MAX:,} bytes")
    except FileNotFoundError:
        return None
    try:
        return Manifest.read(bytes(content))
    except FormatError as error:
        raise CorruptionError(f"{dest.where}/{name} cannot be used: {error}") from None


LOCK_NAME = ".pyengine.lock"  # those who may not write in the folder cannot open it: to lock it would stop every backup
_OF_GROUP = stat.S_ISGID | stat.S_IWGRP  # a folder whose files are its group's, who may write in it


@contextlib.contextmanager
def locked_folder(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock the folder during the block by a file in it, which the last process removes. StoreBusyError if another caller has it locked.

    `shared`, for reading: a folder in which no file can be created is read without a lock.
    """
    with opened(open_folder(folder)) as held:
        try:
            descriptor = _lock_file(held, folder, SHARED if shared else EXCLUSIVE)
        except OSError as error:
            if not shared or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise disk_error(error, "lock", folder / LOCK_NAME) from error
            descriptor = -1
        if descriptor < 0:
            yield
            return
        with opened(descriptor):
            try:
                yield
            finally:
                with contextlib.suppress(OSError, DiskError):
                    if try_lock(descriptor, 0, folder):  # else others still read
                        os.unlink(LOCK_NAME, dir_fd=held)


def _lock_file(folder: int, where: Path, kind: int) -> int:
    """Return a descriptor of the lock file, locked. StoreBusyError if another process has it; OSError, DiskError."""
    mode = PRIVATE | 0o060 if os.fstat(folder).st_mode & _OF_GROUP == _OF_GROUP else PRIVATE
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with contextlib.suppress(OSError), opened(os.open(LOCK_NAME, flags | os.O_EXCL, mode, dir_fd=folder)) as made:
            os.fchmod(made, mode)  # whatever the umask; only of a new file: one that is there may be another that a member renamed
        descriptor = os.open(LOCK_NAME, flags, mode, dir_fd=folder)
        try:
            if not try_lock(descriptor, 0, where, kind):
                raise StoreBusyError(f"another process of pyengine is using {where}: wait for it")
            if os.path.samestat(os.stat(LOCK_NAME, dir_fd=folder, follow_symlinks=False), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:  # the process that had it locked has removed it meanwhile
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class Folder:
    """A backup in a folder of this host.

    Another user may be able to write in it, and root may run the backup: every name is opened below a held descriptor of the folder,
    one step after the other and through no link, and new files are really new. Only their owner may read them. Names are relative, with
    `/`; errors are DiskError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.where = str(path)

    def sizes(self) -> dict[str, int]:
        """Return name -> length of every file there."""
        with disk_errors("list", self._path):
            try:
                descriptor = open_folder(self._path)
            except DiskError as error:
                if error.errno == errno.ENOENT:
                    return {}
                raise
            found = dict(_sizes(descriptor, "", DEPTH_MAX))
        found.pop(LOCK_NAME, None)
        return found

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a new file, durable before this returns; it belongs to the backup once manifest or progress names it."""
        position = 0
        with self._new(name, _UNFINISHED) as descriptor:
            for chunk in chunks:
                pwrite_all(descriptor, chunk, position, self._path / name)
                position += len(chunk)
            failpoint("backup_piece_written")

    def clone(self, name: str, source: Path) -> bool:
        """Write a new file that shares the blocks of `source`, durably; False if the file system cannot do that."""
        try:
            with open(source, "rb") as original, self._new(name, _UNFINISHED) as descriptor:
                fcntl.ioctl(descriptor, _FICLONE, original.fileno())
        except OSError:
            return False
        except DiskError:  # another file system, or one without reflinks: the caller copies, which reports a full disk
            return False
        return True

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file; after a crash it has the old content or the new one."""
        with self._new(name, ".tmp") as descriptor:
            pwrite_all(descriptor, content, 0, self._path / name)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the file's bytes; FileNotFoundError if there is no such file."""
        path = self._path / name
        try:
            with self._folder_of(name) as (folder, last), open(open_file_in(folder, last, path), "rb", buffering=0) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:
            raise
        except OSError as error:
            raise disk_error(error, "read", path) from error

    def remove(self, names: Iterable[str]) -> None:
        folders: set[str] = set()
        for name in names:
            with disk_errors("delete", self._path / name), contextlib.suppress(FileNotFoundError), self._folder_of(name) as (folder, last):
                os.unlink(last, dir_fd=folder)
            folders.update(parent for parent in map(str, PurePath(name).parents) if parent != ".")
        for name in sorted(folders, key=lambda one: -one.count("/")):
            with contextlib.suppress(OSError), self._folder_of(name) as (folder, last):  # not empty
                os.rmdir(last, dir_fd=folder)

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Lock the backup for the block; StoreBusyError if another process of this host has locked it. `shared`: to read."""
        if not shared:
            os.close(open_folder(self._path, make_mode=PRIVATE_FOLDER))
        with locked_folder(self._path, shared=shared):
            yield

    @contextlib.contextmanager
    def _folder_of(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield (the open folder of this name, its last part); `make`: create missing folders. FileNotFoundError, DiskError or OSError."""
        *parents, last = name.split("/")
        try:
            here = open_folder(self._path, make_mode=PRIVATE_FOLDER if make else None)
        except DiskError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where) from None
            raise
        try:
            for part in parents:
                if make:
                    make_folder_in(here, part, PRIVATE_FOLDER)
                inside = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                here, inside = inside, here
                os.close(inside)  # last: a signal handler may raise after it
            yield here, last
        finally:
            os.close(here)

    @contextlib.contextmanager
    def _new(self, name: str, suffix: str) -> Iterator[int]:
        """Yield a new file that gets its name, durably, at the end of the block; no part of it remains if the block fails."""
        path = self._path / name
        with disk_errors("write", path), self._folder_of(name, make=True) as (folder, last):
            unfinished = last + suffix
            with opened(open_new(unfinished, PRIVATE, folder)) as descriptor:
                try:
                    yield descriptor
                    sync_descriptor(descriptor, path)
                    if suffix == _UNFINISHED:
                        failpoint("backup_piece_synced")
                    else:
                        failpoint("backup_note_synced")
                    os.rename(unfinished, last, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(unfinished, dir_fd=folder)
                    raise
            sync_open_folder(folder)


def _sizes(folder: int, prefix: str, depth: int) -> Iterator[tuple[str, int]]:
    """Yield (name, length) of all that is below the open folder, which it closes; -1 for what is no file, and nothing follows a link."""
    with opened(folder):
        for name in os.listdir(folder):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and depth:
                yield from _sizes(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder),
                                  f"{prefix}{name}/", depth - 1)
            else:
                yield f"{prefix}{name}", status.st_size if stat.S_ISREG(status.st_mode) else -1


class Remote:
    """A backup on a file system of pyarrow.fs. It has no lock: the caller must run one backup at a time."""

    def __init__(self, file_system: pyarrow.fs.FileSystem, path: str, where: str) -> None:
        self._files = file_system
        self._path = path
        self.where = where.rstrip("/")

    def sizes(self) -> dict[str, int]:
        from pyarrow.fs import FileSelector, FileType

        with disk_errors("list", self.where):
            found = self._files.get_file_info(FileSelector(self._path, allow_not_found=True, recursive=True))
        return {one.path[len(self._path):].lstrip("/"): one.size for one in found if one.type == FileType.File}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        path = self._at(name)
        with disk_errors("write", f"{self.where}/{name}"):
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
            with self._files.open_output_stream(path) as stream:
                for chunk in chunks:
                    stream.write(chunk)

    def clone(self, name: str, source: Path) -> bool:
        return False

    def replace(self, name: str, content: bytes) -> None:
        self.write(f"{name}.new", [content])
        with disk_errors("write", f"{self.where}/{name}"):
            self._files.move(self._at(f"{name}.new"), self._at(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        try:
            with self._files.open_input_stream(self._at(name)) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(f"cannot read {self.where}/{name}: {error}", errno=error.errno or 0) from error

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with disk_errors("delete", f"{self.where}/{name}"), contextlib.suppress(FileNotFoundError):
                self._files.delete_file(self._at(name))

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        yield

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"


Destination = Folder | Remote
