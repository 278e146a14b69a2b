"""The small files of config/: one record of this engine, or one table that RocketMQ reads too (docs/formats.md section 12).

    DurableRecord   a line or a few of JSON that only this engine writes: watermark, markers, notes
    ConfigFile      RocketMQ's config/*.json, with `.bak`: a process starts even if the file is damaged

Both are replaced atomically and durably (durable_writes.write_config), and what several processes change is changed under
`exclusive`. After a power cut RocketMQ's broker may find an empty or
garbled file, and then does not start. Here a process uses the `.bak` of the last write instead or, without that, no content, and
reports it in a sentence.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pyengine.errors import DiskError, FormatError, StoreBusyError, disk_error, disk_errors
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, TRANSIENT_ERRNOS, read_small_file
from pyengine.storage.durable_writes import open_shared_file, sync_folder, write_config

Value = TypeVar("Value")


class Reading(NamedTuple, Generic[Value]):
    """The record, None if there is no file or it is damaged; `damage` is the end of a sentence about the damage."""

    record: Value | None
    damage: str = ""


@dataclass(frozen=True, slots=True)
class DurableRecord(Generic[Value]):
    """The file config/`name`. `unpack` makes the record from its fields (PARSE_ERRORS for wrong ones); `pack` is the inverse.

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
        """Return the bytes of the file."""
        fields = self.pack(record)
        if self.is_sealed:
            crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
            fields = fields | {"crc": f"{crc:08x}"}
        return json.dumps(fields, indent=self.indent).encode() + b"\n"

    def read(self, root: Root) -> Reading[Value]:
        """Read the file. DiskError when it cannot be read now."""
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
        """Replace the file atomically, durable before this returns. DiskFullError, DiskError or FlushError."""
        write_config(self.path(root), self.content(record), keep_backup=False)

    def remove(self, root: Root) -> None:
        """Remove the file, if it exists; its absence is durable before this returns. DiskError or FlushError."""
        path = self.path(root)
        with disk_errors("remove", path):
            try:
                path.unlink()
            except FileNotFoundError:  # another process may have just removed it
                return
        sync_folder(path.parent)


class ReadConfig(NamedTuple, Generic[Value]):
    """The outcome of a read: the content or None; a sentence about damage; whether the content is of `.bak`; whether the file
    may be undamaged although it could not be read, so that it must not be replaced; whether both files are absent or empty."""

    value: Value | None
    problem: str = ""
    from_backup: bool = False
    is_unread: bool = False
    is_empty: bool = False


class ConfigFile(Generic[Value]):
    """One config/*.json of a store. It keeps no file open between calls."""

    def __init__(self, path: Path, decode: Callable[[str], Value]) -> None:
        """`decode` raises FormatError for a text of another shape."""
        self.path = path
        self._decode = decode
        self._link_backup = True

    def read(self) -> ReadConfig[Value]:
        """Read the file, else its `.bak`; the content is None if neither can be used.

        The sentence is empty if the file is undamaged, or if neither file exists. DiskError if a file cannot be opened
        for lack of a descriptor or of memory: the file may be undamaged, and a later try may succeed.
        """
        backup = self.path.with_name(self.path.name + ".bak")
        found = self._read(self.path, backup)
        self._link_backup = not found.from_backup
        return found

    def read_to_change(self) -> ReadConfig[Value]:
        """Like read(), before a write; DiskError also if the write would destroy content that could not be read or used."""
        found = self.read()
        if found.is_unread or (found.value is None and found.problem and not found.is_empty):
            raise DiskError(f"{found.problem}: it is not changed; repair the file or remove it", path=str(self.path))
        return found

    def write(self, text: str) -> None:
        """Replace the file, durably; the old one is kept as `.bak`. DiskFullError, DiskError or FlushError.

        If the last read() used `.bak`, the damaged file does not replace it: a crash between the two renames would leave
        two damaged files.
        """
        write_config(self.path, text.encode(), keep_backup=self._link_backup)
        self._link_backup = True

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
        """Return (value, damage, whether it may be undamaged); an empty file is damaged, since RocketMQ never writes one."""
        try:
            text = read_small_file(path).decode()
        except FileNotFoundError:
            return None, _MISSING, False
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:
                raise disk_error(error, "read", path) from error
            return None, f"cannot be read ({error.strerror})", True
        except UnicodeDecodeError:
            return None, "is not text", False
        if not text.strip("\0 \t\r\n"):
            return None, _EMPTY, False
        try:
            return self._decode(text), "", False
        except FormatError as error:
            return None, f"is damaged ({error})", False


_MISSING, _EMPTY = "is not there", "is empty"
LOCK_WAIT_S = 10.0
_POLL_INTERVAL_FIRST_S, _POLL_INTERVAL_LAST_S = 0.0005, 0.01
_locked: set[int] = set()  # descriptors of lock files, of all threads


def _after_fork_in_child() -> None:
    for descriptor in _locked:  # otherwise the lock of a parent that is killed would last as long as the child
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Allow one process at a time to change this file of config/, by a lock on `<name>.lock` that ends with the process.

    StoreBusyError if another process holds the lock for LOCK_WAIT_S: a stopped process must not block the others for ever.
    Only the folder's user, and root, may open the lock file.
    """
    lock = path.with_name(path.name + ".lock")
    descriptor, pid = open_shared_file(lock), os.getpid()
    _locked.add(descriptor)
    try:
        wait_until_held(lambda: _try_flock(descriptor, lock), lock, path.name)
        yield
    finally:
        if pid == os.getpid():  # a child that was forked by a change has no descriptor
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # not by close() alone: a child of a fork at this moment may have it too
            _locked.discard(descriptor)
            os.close(descriptor)


def wait_until_held(try_lock: Callable[[], bool], lock: Path, name: str) -> None:
    """Call `try_lock` until it is true; StoreBusyError after LOCK_WAIT_S, because a stopped process must not block the others for ever."""
    until_s, interval_s = time.monotonic() + LOCK_WAIT_S, _POLL_INTERVAL_FIRST_S
    while not try_lock():
        if time.monotonic() >= until_s:
            raise StoreBusyError(f"{name} is not changed: another process has held {lock} for {LOCK_WAIT_S:g} s")
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _POLL_INTERVAL_LAST_S)


def _try_flock(descriptor: int, lock: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # for example of a network file system without locks
        raise disk_error(error, "lock", lock) from error
    return True
