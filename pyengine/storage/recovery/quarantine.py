"""The folder `quarantine/`: the bytes that recovery removes from the log, each with a note of what they are and why.

Bytes that might be a message are in quarantine, durably, before they leave the log. Whole files are synced and moved, parts of a file are
copied without their final zeros.

    commitlog-00000000000000049152             a whole segment
    commitlog-00000000000000047869-512         512 bytes from that physical offset on
    commitlog-00000000000000047869-512.json    the note; written last

A name depends only on offset and length, so a recovery that runs again after a kill finds its own copy. A note without its content, or
content without its note, is replaced. Only what moves to another file system may be there twice after a kill.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, disk_error, disk_errors
from pyengine.formats.paths import SEGMENT_START_MAX, StorePaths, segment_name
from pyengine.formats.small_file import PARSE_ERRORS, open_regular, opened, read_small_file
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import RebuildMarker
from pyengine.storage.durable_writes import make_folders, open_new, sync_file, sync_folder, write_config
from pyengine.storage.mapped_file import MappedFile, used_end

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class QuarantinedPiece:
    """One piece in quarantine: `path` under quarantine/, its origin, and the reason."""

    path: Path
    physical_offset: int
    size_bytes: int
    reason: str


class PlannedPiece(NamedTuple):
    """What goes to quarantine, and as which piece: nothing is written before `keep`."""

    noted: QuarantinedPiece
    origin: str
    source: Path | memoryview | None  # None: quarantine has the copy already
    digest: str | None = None         # of bytes that are copied; None: the file or folder is moved
    at: int = 0                       # of these bytes in the source

    def keep(self) -> None:
        """Copy the bytes, or move the segment, which is synced first, or the folder, with its note. Durable when this returns.

        DiskFullError or DiskError if they cannot be copied: then no copy is left and the log is unchanged. FlushError if the
        segment cannot be synced: then it stays.
        """
        if self.digest is None and isinstance(self.source, Path):
            self._move(self.source)
        elif self.source is not None:
            self._copy(self.source)

    def _copy(self, source: Path | memoryview) -> None:
        target = self.noted.path
        make_folders(target.parent)
        try:
            with open(open_new(target), "wb") as copy:
                copy.writelines(_content(source, self.at, self.noted.size_bytes))
                copy.flush()
                os.fsync(copy.fileno())
            failpoint("quarantine_copied")
            self._write_note()
        except BaseException as error:
            for leftover in (target, _note_path(target)):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            if isinstance(error, OSError):
                raise disk_error(error, "write", target) from error
            raise

    def _move(self, source: Path) -> None:
        target = self.noted.path
        if source.is_file():
            sync_file(source)
        self._write_note()
        failpoint("quarantine_noted")
        try:
            _rename(source, target)
        except BaseException:
            if not target.exists():
                with contextlib.suppress(OSError):
                    _note_path(target).unlink()
            raise
        failpoint("quarantine_moved")
        sync_folder(target.parent)
        sync_folder(source.parent)

    def _write_note(self) -> None:
        write_note(self.noted.path, self.origin, self.noted.reason, self.noted.physical_offset, self.noted.size_bytes, self.digest)


def copy_of_bytes(store: StorePaths, segment: MappedFile, start: int, end: int, reason: str) -> list[PlannedPiece]:
    """Return the piece for the physical range [start, end) of a segment without its final zeros; none for zeros alone."""
    at = start - segment.start_offset
    size_bytes = min(used_end(segment.path, at), end - segment.start_offset) - at
    return [_copy_of(store, "commitlog", segment.path.name, segment.path, at, size_bytes, start, reason)] if size_bytes > 0 else []


def copy_of_memory(store: StorePaths, physical_offset: int, content: memoryview, reason: str) -> PlannedPiece:
    """Return the piece for published bytes that may be in no file: those of the pool after the log's end."""
    return _copy_of(store, "pool", "transient store pool", content, 0, len(content), physical_offset, reason)


def _copy_of(
    store: StorePaths, kind: str, origin: str, source: Path | memoryview, at: int, size_bytes: int, physical_offset: int, reason: str,
) -> PlannedPiece:
    """Name a copy, unless a piece in quarantine begins with it: a recovery that was killed may have cleared what followed it."""
    digest, base = _sha256(_content(source, at, size_bytes)), f"{kind}-{segment_name(physical_offset)}-"
    kept = next((path for path in sorted(store.quarantine.glob(f"{base}*[0-9]")) if _begins_with(path, size_bytes, digest)), None)
    target = kept or _unused(store.quarantine / f"{base}{size_bytes}", lambda path: _note_path(path).exists())
    return PlannedPiece(QuarantinedPiece(target, physical_offset, size_bytes, reason), origin, source if kept is None else None, digest, at)


def move_of(store: StorePaths, path: Path, physical_offset: int, reason: str, *, kind: str = "commitlog") -> PlannedPiece:
    """Return the piece for a segment, or for a folder of queues or index, that is moved to quarantine."""
    target = _unused(store.quarantine / f"{kind}-{path.name}", Path.exists)
    size_bytes = path.stat().st_size if path.is_file() else 0
    return PlannedPiece(QuarantinedPiece(target, physical_offset, size_bytes, reason), path.name, path)


def _unused(target: Path, is_used: Callable[[Path], bool]) -> Path:
    numbered = (target.with_name(f"{target.name}.{number}") for number in itertools.count(1))
    return next(path for path in itertools.chain([target], numbered) if not is_used(path))


def _content(source: Path | memoryview, at: int, size_bytes: int) -> Iterator[bytes | memoryview]:
    """Yield these bytes of a file, or the memory. A file is not mapped: where the disk cannot read it, that would be a SIGBUS."""
    if isinstance(source, memoryview):
        yield source
        return
    with open(open_regular(source), "rb") as file, disk_errors("read", source):
        file.seek(at)
        while size_bytes > 0 and (chunk := file.read(min(_COPY_BYTES, size_bytes))):
            size_bytes -= len(chunk)
            yield chunk


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
        _rename(source, target)
        sync_folder(target.parent)
    sync_folder(source.parent)


def _rename(source: Path, target: Path) -> None:
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
                for entry in (part, *part.rglob("*")):
                    with opened(os.open(entry, os.O_RDONLY)) as descriptor:
                        os.fsync(descriptor)
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


def is_quarantine(folder: Path) -> bool:
    """Whether a folder, of any name, has pieces of a log with messages: the quarantine/ of a store, or a copy of it."""
    return any(entry.holds_messages for entry in list_pieces(folder))


def list_pieces(folder: Path) -> list[QuarantineEntry]:
    """Return every piece in a quarantine/, by physical offset and name; empty without the folder. It reads only the notes.

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
        offset, size_bytes = (note.get(name) or 0 for name in ("physical_offset", "size_bytes"))
        for name, number in (("physical_offset", offset), ("size_bytes", size_bytes)):
            if type(number) is not int or not 0 <= number <= SEGMENT_START_MAX:
                raise ValueError(f"{name} is {number!r}")
        known = QuarantineEntry(path.name, path, kind, origin, offset, size_bytes, note.get("sha256"), str(note["reason"]), str(note["at"]))
    except (OSError, *PARSE_ERRORS) as error:
        return QuarantineEntry(path.name, path, kind, problem=f"its note cannot be read: {error}")
    if not path.exists():
        return replace(known, problem="the note is there, its content is not")
    if path.is_file() and path.stat().st_size != known.size_bytes:
        return replace(known, problem=f"it has {path.stat().st_size} bytes, and its note says {known.size_bytes}")
    return known


def changed_content(entry: QuarantineEntry) -> bool:
    """Whether copied bytes no longer match the note's checksum. It reads all of them."""
    path = entry.path
    return entry.sha256 is not None and path.is_file() and _sha256(_content(path, 0, path.stat().st_size)) != entry.sha256


def write_note(target: Path, origin: str | list[str], reason: str, offset: int | None = None, size_bytes: int = 0, sha256: str | None = None
               ) -> None:
    """Write the note of a piece next to it, with the time; durable before this returns. Without an `offset` it is no piece of the log."""
    place = {} if offset is None else {"physical_offset": offset, "size_bytes": size_bytes, "sha256": sha256}
    note = {"from": origin, **place, "reason": reason, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    write_config(_note_path(target), json.dumps(note, indent=2).encode() + b"\n", keep_backup=False)


def _begins_with(piece: Path, size_bytes: int, digest: str) -> bool:
    """Whether the piece has its note, so that it is durable, and its first bytes have this digest."""
    try:
        return _note_path(piece).exists() and _sha256(_content(piece, 0, size_bytes)) == digest
    except (OSError, DiskError):
        return False


def _note_path(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _sha256(content: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in content:
        digest.update(chunk)
    return digest.hexdigest()
