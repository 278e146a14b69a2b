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
import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyengine.errors import CorruptionError, DiskError, FormatError, StoreBusyError, UsageError, disk_errors, require_extra
from pyengine.formats.paths import segment_name
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.native.failpoint import failpoint
from pyengine.settings import Value
from pyengine.storage.durable_writes import make_folders, pwrite_all, sync_descriptor, sync_folder, write_config
from pyengine.storage.engine_id import read_engine_id

if TYPE_CHECKING:
    import pyarrow.fs

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
CHUNK_BYTES = 8 << 20
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
        """Read what content() has written; FormatError for other bytes."""
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
            return cls(**fields, pieces=pieces, tables=tables)
        except PARSE_ERRORS as error:
            raise FormatError(f"it is not readable ({error})") from None


def _crc_of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


class Destination(Protocol):
    """The place of a backup. Errors are DiskError; names are relative, with `/`."""

    @property
    def where(self) -> str: ...

    def sizes(self) -> dict[str, int]:
        """Return name -> length of every file there."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a new file, durable before this returns; it belongs to the backup once manifest or progress names it."""

    def clone(self, name: str, source: Path) -> bool:
        """Write a new file that shares the blocks of `source`, durably; False if the file system cannot do that."""

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file; after a crash it has the old content or the new one."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the file's bytes; FileNotFoundError if there is no such file."""

    def remove(self, names: Iterable[str]) -> None: ...

    def locked(self, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
        """Lock the backup for the block; StoreBusyError if another process of this host has locked it. `shared`: to read."""


def store_identity(root: Path) -> str:
    """Return the store's UUID, or `path:...` if it has none yet: only RocketMQ has run it, or it is a new copy."""
    found = read_engine_id(root)
    if found is None or found.is_copy:
        return f"path:{os.fsencode(root.absolute()).decode(errors='backslashreplace')}"
    return str(found.uuid)


def open_destination(dest: str) -> Destination:
    """Open a folder, or the place of a URI (pyarrow.fs: s3://bucket/path, gs://, hdfs://, file://). UsageError for another URI."""
    if "://" not in dest:
        return Folder(Path(dest).absolute())
    require_extra("pyarrow")
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
    try:
        content = b"".join(dest.chunks(name))
    except FileNotFoundError:
        return None
    try:
        return Manifest.read(content)
    except FormatError as error:
        raise CorruptionError(f"{dest.where}/{name} cannot be used: {error}") from None


@contextlib.contextmanager
def locked_folder(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock the folder during the block, or raise StoreBusyError if another caller has it locked; creates no file."""
    with disk_errors("open", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusyError(f"another process of pyengine is using {folder}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


class Folder:
    """A backup in a folder of this host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.where = str(path)

    def sizes(self) -> dict[str, int]:
        with disk_errors("list", self._path):
            return {str(path.relative_to(self._path)): path.stat().st_size
                    for path in self._path.rglob("*") if path.is_file()}

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        position = 0
        with self._new(name) as descriptor:
            for chunk in chunks:
                pwrite_all(descriptor, chunk, position, self._path / name)
                position += len(chunk)
            failpoint("backup_piece_written")

    def clone(self, name: str, source: Path) -> bool:
        try:
            with open(source, "rb") as original, self._new(name) as descriptor:
                fcntl.ioctl(descriptor, _FICLONE, original.fileno())
        except OSError:
            return False
        except DiskError:  # another file system, or one without reflinks: the caller copies, which reports a full disk
            return False
        return True

    def replace(self, name: str, content: bytes) -> None:
        write_config(self._path / name, content, keep_backup=False)

    def chunks(self, name: str) -> Iterator[bytes]:
        try:
            with open(self._path / name, "rb", buffering=0) as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(f"cannot read {self._path / name}: {error.strerror}", errno=error.errno or 0) from error

    def remove(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._path / name
            with disk_errors("delete", path), contextlib.suppress(FileNotFoundError):
                path.unlink()
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda one: -len(one.parts)):
            while folder != self._path and folder.is_relative_to(self._path):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
                folder = folder.parent

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        if not shared:
            make_folders(self._path)
        with locked_folder(self._path, shared=shared):
            yield

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[int]:
        """Yield a new file that gets its name, durably, at the end of the block; no part of it remains if the block fails."""
        path = self._path / name
        make_folders(path.parent)
        unfinished = path.with_name(path.name + _UNFINISHED)
        with disk_errors("write", path):
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                yield descriptor
                sync_descriptor(descriptor, path)
                failpoint("backup_piece_synced")
                os.rename(unfinished, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise
            finally:
                os.close(descriptor)
        sync_folder(path.parent)


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
