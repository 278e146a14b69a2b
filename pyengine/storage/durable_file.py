"""The small files of config/: one record of this engine, or one table that RocketMQ reads too (docs/formats.md section 12).

    DurableRecord   a line or a few of JSON that only this engine writes: watermark, markers, notes
    ConfigFile      RocketMQ's config/*.json, with `.bak`: a bad file keeps no process from starting

Both are replaced whole and durable (durable_writes.write_config). A power cut under RocketMQ may leave an empty or garbled
file, and its broker then does not start. Here the `.bak` of the last write is used instead, then nothing at all; a
sentence says what happened.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pyengine.errors import DiskError, FormatError, disk_error
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, PASSING_ERRNOS, read_small_file
from pyengine.storage.durable_writes import sync_folder, write_config

Value = TypeVar("Value")


class Reading(NamedTuple, Generic[Value]):
    """The record, None without a file or with one that cannot be believed: then `damage` ends the sentence about it."""

    record: Value | None
    damage: str = ""


@dataclass(frozen=True, slots=True)
class DurableRecord(Generic[Value]):
    """The file config/`name`. `unpack` makes the record of its fields, PARSE_ERRORS for wrong ones; `pack` undoes that.

    `is_sealed`: the file has a CRC-32 over its other fields as a field of its own.
    """

    name: str
    pack: Callable[[Value], dict[str, Any]]
    unpack: Callable[[dict[str, Any]], Value]
    is_sealed: bool = True
    indent: int | None = None

    def path(self, root: Root) -> Path:
        return StorePaths(root).config / self.name

    def content(self, record: Value) -> bytes:
        """The bytes of the file."""
        fields = self.pack(record)
        if self.is_sealed:
            crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
            fields = fields | {"crc": f"{crc:08x}"}
        return json.dumps(fields, indent=self.indent).encode() + b"\n"

    def read(self, root: Root) -> Reading[Value]:
        """What the file says. DiskError when it cannot be read now."""
        path = self.path(root)
        try:
            content = read_small_file(path)
        except FileNotFoundError:
            return Reading(None)
        except OSError as error:
            raise disk_error(error, "read", path) from error
        try:
            record = self.unpack(json.loads(content))
        except PARSE_ERRORS:
            return Reading(None, "is not readable")
        if self.is_sealed and content != self.content(record):
            return Reading(None, "does not match its checksum")
        return Reading(record)

    def write(self, root: Root, record: Value) -> None:
        """Replace the file, whole or not at all, durable before this returns. DiskFullError, DiskError or FlushError."""
        write_config(self.path(root), self.content(record), keep_backup=False)

    def remove(self, root: Root) -> None:
        """Durable before this returns; nothing happens without the file."""
        path = self.path(root)
        if path.exists():
            path.unlink()
            sync_folder(path.parent)


class ReadConfig(NamedTuple, Generic[Value]):
    """What a file says, or None; a sentence about what was wrong; whether `.bak` said it; whether the file may be whole,
    although it could not be read: then nothing may be written in its place; whether nothing stands in either file."""

    value: Value | None
    said: str = ""
    from_backup: bool = False
    is_unread: bool = False
    is_empty: bool = False


class ConfigFile(Generic[Value]):
    """One config/*.json of a store. Holds nothing open between calls."""

    def __init__(self, path: Path, decode: Callable[[str], Value]) -> None:
        """`decode` raises FormatError for a text of another shape."""
        self.path = path
        self._decode = decode
        self._keep_backup = True

    def read(self) -> ReadConfig[Value]:
        """What the file says, else its `.bak`; None where neither can be used.

        The sentence is empty when the file was good, or when neither file is there. DiskError where a file cannot be opened
        for want of a descriptor or of memory: that says nothing about it, and the next try may do.
        """
        backup = self.path.with_name(self.path.name + ".bak")
        found = self._read(self.path, backup)
        self._keep_backup = not found.from_backup
        return found

    def read_to_change(self) -> ReadConfig[Value]:
        """The same before a write; DiskError too where what stands there would be lost by it: it could not be read, or used."""
        found = self.read()
        if found.is_unread or (found.value is None and found.said and not found.is_empty):
            raise DiskError(f"{found.said}: it is not changed; repair the file or remove it", path=str(self.path))
        return found

    def write(self, text: str) -> None:
        """Replace the file, durable; the old one stays as `.bak`. DiskFullError, DiskError or FlushError.

        Where the last read() used `.bak`, the bad file does not become it: a crash between the two renames would leave
        two bad files.
        """
        write_config(self.path, text.encode(), keep_backup=self._keep_backup)
        self._keep_backup = True

    def _read(self, path: Path, backup: Path) -> ReadConfig[Value]:
        value, why, is_unread = self._try(path)
        if not why:
            return ReadConfig(value)
        old_value, old_why, is_old_unread = self._try(backup)
        if not old_why:
            return ReadConfig(old_value, f"{path} {why}: {backup.name}, its content before the last change, is used instead", True,
                              is_unread)
        if why == old_why == _MISSING:
            return ReadConfig(None)
        return ReadConfig(None, f"{path} {why} and {backup.name} {old_why}: nothing of it is used", False, is_unread or is_old_unread,
                          {why, old_why} <= {_MISSING, _EMPTY})

    def _try(self, path: Path) -> tuple[Value | None, str, bool]:
        """(value, why not, whether it may be whole); an empty file counts as damaged: RocketMQ never writes one on purpose."""
        try:
            text = read_small_file(path).decode()
        except FileNotFoundError:
            return None, _MISSING, False
        except OSError as error:
            if error.errno in PASSING_ERRNOS:
                raise disk_error(error, "read", path) from error
            return None, f"cannot be read ({error.strerror})", True
        except UnicodeDecodeError:
            return None, "is no text", False
        if not text.strip("\0 \t\r\n"):
            return None, _EMPTY, False
        try:
            return self._decode(text), "", False
        except FormatError as error:
            return None, f"is damaged ({error})", False


_MISSING, _EMPTY = "is not there", "is empty"
