"""The folder `quarantine/`: the bytes that recovery removes from the log, each with a note of what they are and why.

Bytes that might be a message are in quarantine, durably, before they leave the
log. Whole files are moved, which needs no space; parts of a file are copied
without their final zeros. Queue entries and index files are not kept, since
they can be rebuilt from the remaining log.

    commitlog-00000000000000049152             a whole segment
    commitlog-00000000000000047869-512         512 bytes from that physical offset on
    commitlog-00000000000000047869-512.json    the note; written last

A name depends only on the content, so a recovery that runs again after a kill finds
its own copy and does not make a second one. A crash may leave a note without its
content, or content without its note: the next run replaces it.

The files that a rebuild replaces are moved to quarantine/rebuild-N/ before it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from pyengine.errors import disk_error, disk_errors
from pyengine.formats.paths import SEGMENT_START_MAX, Root, StorePaths, segment_name
from pyengine.formats.small_file import PARSE_ERRORS, open_regular, read_small_file
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import RebuildMarker
from pyengine.storage.durable_writes import make_folders, open_new, sync_folder, write_config

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QuarantinedPiece:
    """One piece in quarantine: `path` under quarantine/, its origin, and the reason."""

    path: Path
    physical_offset: int
    size_bytes: int
    reason: str


class Quarantine:
    """Keeps the pieces of one recovery in quarantine; `pieces` lists them in order. With `dry_run` it only lists them."""

    def __init__(self, store: StorePaths, *, dry_run: bool = False) -> None:
        self._folder = store.quarantine
        self._dry_run = dry_run
        self.pieces: list[QuarantinedPiece] = []

    def add_bytes(self, segment: Path, segment_start: int, start: int, end: int, reason: str) -> None:
        """Copy the physical range [start, end) of a segment without its final zeros.

        Durable before this returns. Raises DiskFullError (then no copy is left
        and the log is unchanged) or DiskError.
        """
        with open(segment, "rb") as source:
            at = start - segment_start
            size_bytes = _length_without_zeros(source, at, end - segment_start)
            if size_bytes:
                self._copy("commitlog", segment.name, start, size_bytes, lambda: _chunks(source, at, at + size_bytes), reason)

    def add_memory(self, physical_offset: int, content: memoryview, reason: str) -> None:
        """Keep bytes that are in no file: pool bytes that are no complete records. Durable before this returns."""
        self._copy("pool", "transient store pool", physical_offset, len(content), lambda: [content], reason)

    def _copy(
        self, kind: str, origin: str, physical_offset: int, size_bytes: int, content: Callable[[], Iterable[bytes | memoryview]],
        reason: str,
    ) -> None:
        """Copy `content` unless a complete copy of it is in quarantine already."""
        digest = _sha256(content())
        name = base = f"{kind}-{segment_name(physical_offset)}-{size_bytes}"
        number = 0
        while not (is_kept := self._has(name, digest)) and _note_path(self._folder / name).exists():
            number += 1
            name = f"{base}.{number}"
        target = self._folder / name
        if not self._dry_run and not is_kept:
            make_folders(self._folder)
            with self._removed_on_failure(target):
                with open(open_new(target), "wb") as copy:
                    copy.writelines(content())
                    copy.flush()
                    os.fsync(copy.fileno())
                failpoint("quarantine_copied")
                write_note(target, origin, reason, physical_offset, size_bytes, digest)
        self.pieces.append(QuarantinedPiece(target, physical_offset, size_bytes, reason))

    def add_file(self, path: Path, physical_offset: int, reason: str, *, kind: str = "commitlog") -> None:
        """Move a file or a folder to quarantine, with its note. Durable before this returns."""
        name = f"{kind}-{path.name}"
        target = self._folder / name
        number = 0
        while target.exists():
            number += 1
            target = self._folder / f"{name}.{number}"
        size_bytes = path.stat().st_size if path.is_file() else 0
        self.pieces.append(QuarantinedPiece(target, physical_offset, size_bytes, reason))
        if self._dry_run:
            return
        make_folders(self._folder)
        write_note(target, path.name, reason, physical_offset, size_bytes)
        failpoint("quarantine_noted")
        try:
            _move(path, target)
        except BaseException:
            if not target.exists():
                with contextlib.suppress(OSError):
                    _note_path(target).unlink()
            raise
        failpoint("quarantine_moved")
        sync_folder(self._folder)
        sync_folder(path.parent)

    def _has(self, name: str, digest: str) -> bool:
        """Whether a complete copy of exactly this content is in quarantine already."""
        try:
            note = json.loads(read_small_file(_note_path(self._folder / name)))
            return bool(note.get("sha256") == digest == _digest_of_file(self._folder / name))
        except (OSError, *PARSE_ERRORS):
            return False

    @contextlib.contextmanager
    def _removed_on_failure(self, target: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for leftover in (target, _note_path(target)):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            if isinstance(error, OSError):
                raise disk_error(error, "write", target) from error
            raise


def move_to_quarantine(store: StorePaths, marker: RebuildMarker) -> None:
    """Move every piece of `marker`, durably. May be repeated: an incomplete new file in place of a moved piece is removed."""
    for piece in marker.pieces:
        _move_piece(store, marker, piece)


def _move_piece(store: StorePaths, marker: RebuildMarker, piece: str) -> None:
    """Move `piece`, durably. If it was moved already, the file in its place is incomplete and is removed."""
    source, target = store.root / piece, marker.moved_path(store, piece)
    if not source.exists():
        return
    is_topic = source.parent.parent == store.root
    if is_topic and target.exists():  # queue by queue, since only some of them may have been moved
        for queue in list(source.iterdir()):
            _move_piece(store, marker, f"{piece}/{queue.name}")
        source.rmdir()
    elif target.exists():
        _remove(source)
    else:
        noted = store.quarantine / marker.folder
        if not _note_path(noted).exists():
            write_note(noted, list(marker.pieces), "replaced by a rebuild from the log")
        make_folders(target.parent)
        _move(source, target)
        sync_folder(target.parent)
    sync_folder(source.parent)


def _move(source: Path, target: Path) -> None:
    """Move a file or folder. To another file system it is copied: the copy is complete and durable before it gets its name, and the name
    before the source is removed."""
    with disk_errors("move", source, f" (to {target})"):
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            part = target.with_name(target.name + ".part")
            try:
                _remove(part)
                shutil.copytree(source, part) if source.is_dir() else shutil.copy2(source, part)
                sync_tree(part)
                os.rename(part, target)
                sync_folder(target.parent)
            finally:
                with contextlib.suppress(OSError):
                    _remove(part)
            _remove(source)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# ---- list of the pieces ----------------------------------------------------------

MESSAGE_KINDS = ("commitlog", "pool")  # bytes of the log; other kinds can be rebuilt from it


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """One piece in quarantine/ with its note; `problem` is a sentence if they do not match."""

    name: str
    path: Path
    kind: str                     # commitlog, pool, derived, queue or rebuild
    origin: str = ""
    physical_offset: int = 0
    size_bytes: int = 0
    sha256: str | None = None     # of copied bytes; a moved file has none
    reason: str = ""
    at: str = ""
    problem: str = ""

    @property
    def holds_messages(self) -> bool:
        """Whether it is a part of the log and its content exists."""
        return self.kind in MESSAGE_KINDS and self.path.is_file()


def list_quarantine(root: Root) -> list[QuarantineEntry]:
    """Return every piece in quarantine/, as list_pieces()."""
    return list_pieces(StorePaths(root).quarantine)


def is_quarantine(folder: Path) -> bool:
    """Whether a folder, of any name, has pieces of a log with messages: the quarantine/ of a store, or a copy of it."""
    return any(entry.holds_messages for entry in list_pieces(folder))


def list_pieces(folder: Path) -> list[QuarantineEntry]:
    """Return every piece in the folder, by physical offset and name; empty without the folder. It reads only the notes.

    DiskError if the folder cannot be listed, also if it is a link to a disk that is not mounted: it may hold messages.
    """
    try:
        names = sorted(os.listdir(folder))
    except NotADirectoryError:
        return []
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        raise disk_error(error, "list", folder) from error
    pieces = dict.fromkeys(name.removesuffix(".json") for name in names if not name.endswith((".tmp", ".part")))
    return sorted((_entry(folder / name) for name in pieces), key=lambda entry: (entry.physical_offset, entry.name))


def _entry(path: Path) -> QuarantineEntry:
    kind = path.name.partition("-")[0]
    try:
        note = json.loads(read_small_file(_note_path(path)))
        origin = note["from"] if isinstance(note["from"], str) else ", ".join(map(str, note["from"]))
        known = QuarantineEntry(
            path.name, path, kind, origin, _number(note, "physical_offset") or 0, _number(note, "size_bytes") or 0, note.get("sha256"),
            str(note["reason"]), str(note["at"]))
    except (OSError, *PARSE_ERRORS) as error:
        return QuarantineEntry(path.name, path, kind, problem=f"its note cannot be read: {error}")
    if not path.exists():
        return replace(known, problem="the note is there, its content is not")
    if path.is_file() and path.stat().st_size != known.size_bytes:
        return replace(known, problem=f"it has {path.stat().st_size} bytes, and its note says {known.size_bytes}")
    return known


def _number(note: dict[str, Any], name: str) -> int | None:
    value = note.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= SEGMENT_START_MAX):
        raise ValueError(f"{name} is {value!r}")
    return value


def changed_content(entry: QuarantineEntry) -> bool:
    """Whether copied bytes no longer match the note's checksum. It reads all of them."""
    return entry.sha256 is not None and entry.path.is_file() and _digest_of_file(entry.path) != entry.sha256


def write_note(target: Path, origin: str | list[str], reason: str, offset: int | None = None, size_bytes: int = 0, sha256: str | None = None
               ) -> None:
    """Write the note of a piece next to it, with the time; durable before this returns. Without an `offset` it is no piece of the log."""
    place = {} if offset is None else {"physical_offset": offset, "size_bytes": size_bytes, "sha256": sha256}
    note = {"from": origin, **place, "reason": reason, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    write_config(_note_path(target), json.dumps(note, indent=2).encode() + b"\n", keep_backup=False)


def _note_path(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _chunks(source: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    source.seek(start)
    while start < end:
        with disk_errors("read", source.name):
            chunk = source.read(min(_COPY_BYTES, end - start))
        if not chunk:
            return
        start += len(chunk)
        yield chunk


def _sha256(content: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in content:
        digest.update(chunk)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    with open(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _length_without_zeros(source: BinaryIO, start: int, end: int) -> int:
    """Return the length of the file range [start, end) without its final zeros."""
    used = position = 0
    for chunk in _chunks(source, start, end):
        stripped = len(chunk.rstrip(b"\0"))
        if stripped:
            used = position + stripped
        position += len(chunk)
    return used


def sync_tree(path: Path) -> None:
    """fsync a file, or a folder with all of its content; raises OSError."""
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
