"""The small files of config/: one record of this engine, or one table that RocketMQ reads too (docs/formats.md section 12).

    DurableRecord   a line or a few of JSON that only this engine writes: watermark, markers, notes
    ConfigFile      RocketMQ's config/*.json, with `.bak`: a process starts even if the file is damaged
    AppendedLines   lines of JSON that several processes append, in an order that is the same for all

The first two are replaced atomically and durably (durable_writes.write_config), and what several processes change is changed under
`exclusive`. After a power cut RocketMQ's broker may find an empty or garbled file, and then does not start. Here a process uses the
`.bak` of the last write instead or, without that, no content, and reports it in a sentence.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pyengine.errors import DiskError, DiskFullError, FormatError, StoreBusyError, disk_error, disk_errors
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, TRANSIENT_ERRNOS, path_stamp, read_or_none, read_small_file
from pyengine.storage.durable_writes import LOCK_MODE, open_shared_file, sync_descriptor, sync_folder, write_config
from pyengine.storage.ofd_lock import SHARED, is_at, try_lock, unlock

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
        content = read_or_none(self.path(root))
        if content is None:
            return Reading(None)
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
        value, why, is_unread = self.attempt(path)
        if not why:
            return ReadConfig(value)
        old_value, old_why, is_old_unread = self.attempt(backup)
        if not old_why:
            return ReadConfig(old_value, f"{path} {why}: {backup.name}, its content before the last change, is used instead", True,
                              is_unread)
        if why == old_why == _MISSING:
            return ReadConfig(None)
        return ReadConfig(None, f"{path} {why} and {backup.name} {old_why}: nothing of it is used", False, is_unread or is_old_unread,
                          {why, old_why} <= {_MISSING, _EMPTY})

    def attempt(self, path: Path) -> tuple[Value | None, str, bool]:
        """Read this file or its `.bak`: (value, damage, whether it may be undamaged); an empty file is damaged: RocketMQ never writes one.

        DiskError as read().
        """
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


def sealed_line(fields: Mapping[str, object]) -> bytes:
    """Return a line of JSON with its checksum. It begins with a newline, because a torn line may be before it."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"\n%s %08x" % (text, zlib.crc32(text))


def unsealed(line: bytes) -> Any:
    """Return the fields of a sealed line; one of PARSE_ERRORS for a torn or damaged one.

    Zeros behind it are no damage: after a power cut the next line may be lost and one behind that be there.
    """
    text, _, crc = line.rstrip(b"\0").rpartition(b" ")
    if int(crc, 16) != zlib.crc32(text):
        raise ValueError(line)
    return json.loads(text.decode())


def lines_of(content: bytes) -> Iterator[Any]:
    """Yield the fields of the lines of such a file. Damaged ones are left out."""
    for line in content.split(b"\n"):
        with contextlib.suppress(*PARSE_ERRORS):
            yield unsealed(line)


class AppendedLines:
    """A file of sealed lines that several processes append and follow. The caller admits one thread at a time, but for a sync.

    The kernel orders the writes of a file, and each process reads the lines in this order, so it can decide between processes that
    do not wait for each other. Torn and damaged lines are left out. One of the processes shortens the file, by a new one in its
    place; a process that must find its line in the new one too appends it inside hold().
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0                              # up to where it is read
        self.durable_name: tuple[int, int] | None = None  # device and inode of the file whose name is durable
        self._seen_bytes = 0                             # up to where it is read, with what may be the begin of a line
        self._descriptor = -1

    def renew(self) -> bool:
        """Open the file that has the name now, create it if necessary; return whether it is another one, to be read from its begin."""
        if self._descriptor >= 0 and is_at(self._descriptor, self.path):
            return False
        self.close()
        descriptor = open_shared_file(self.path)
        self._closer = weakref.finalize(self, os.close, descriptor)  # also of one that a program, or a forked child, only drops
        self._closer.atexit = False
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        if not os.fstat(descriptor).st_size:  # perhaps a new file with an old number
            self.durable_name = None
        self._descriptor = descriptor  # last, since the exception of a signal handler may end this call
        return True

    def length(self) -> int:
        """Return the length of the file that was opened last."""
        return os.fstat(self._descriptor).st_size

    @property
    def has_news(self) -> bool:
        """Whether others have changed the file since it was read. Another thread may use the file meanwhile."""
        with contextlib.suppress(OSError):
            return self._descriptor < 0 or not is_at(self._descriptor, self.path) or self.length() != self._seen_bytes
        return True  # the other thread has just closed it, for the next one

    def append(self, *lines: Mapping[str, object], are_known: bool = False) -> bool:
        """Append lines; they outlive this process, not a power cut. Raises DiskFullError or DiskError; a part of them may be there then.

        With `are_known` news() leaves them out, if nothing of others came before them: the answer says so.
        """
        content = b"".join(map(sealed_line, lines))
        with disk_errors("write", self.path):
            count = os.write(self._descriptor, content)
        if count < len(content):  # a second write would be another line
            raise DiskFullError(f"cannot write {self.path}: {count} of {len(content)} bytes were written", path=str(self.path))
        is_next = are_known and self.length() == self._seen_bytes + count
        if is_next:
            self._seen_bytes += count
            self.size_bytes = self._seen_bytes
        return is_next

    def news(self) -> list[Any]:
        """Return what was appended since the last call, at least everything before the end of this process's own last line."""
        with disk_errors("read", self.path):
            self._seen_bytes = self.length()
            if self._seen_bytes <= self.size_bytes:
                return []
            content = os.pread(self._descriptor, self._seen_bytes - self.size_bytes, self.size_bytes)
        found, is_whole = [], False
        lines = content.split(b"\n")
        for line in lines:
            is_whole = False
            with contextlib.suppress(*PARSE_ERRORS):
                found.append(unsealed(line))
                is_whole = True
        self.size_bytes += len(content) - (0 if is_whole else len(lines[-1]) + (len(lines) > 1))  # the last one may be still written
        return found

    def rewind(self) -> None:
        """Let news() return the whole file next time."""
        self.size_bytes = self._seen_bytes = 0

    def sync(self) -> None:
        """Make all lines durable. Raises DiskFullError or FlushError."""
        self.syncing()()

    def syncing(self) -> Callable[[], None]:
        """Return a call that makes durable what was appended, by a descriptor of its own: another thread may renew() meanwhile."""
        with disk_errors("open", self.path):
            descriptor = os.dup(self._descriptor)

        def sync() -> None:
            try:
                sync_descriptor(descriptor, self.path, may_repeat=True)
                status = os.fstat(descriptor)
                if self.durable_name != (status.st_dev, status.st_ino):
                    sync_folder(self.path.parent)
                    self.durable_name = status.st_dev, status.st_ino
            finally:
                os.close(descriptor)

        return sync

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Open the file as renew(), and keep it from being shortened during the block. StoreBusyError after LOCK_WAIT_S."""
        is_new = True
        self.renew()
        try:
            while is_new:
                wait_until_held(lambda: try_lock(self._descriptor, 0, self.path, SHARED), self.path, self.path.name, self.path)
                is_new = self.renew()  # it was shortened before the lock
            yield
        finally:
            if self._descriptor >= 0:  # not if the next file could not be opened
                unlock(self._descriptor)

    def shorten(self, lines: Callable[[], Iterable[Mapping[str, object]]]) -> bool:
        """Put a durable new file with these lines in the place of this one; False if another process holds it. Never waits.

        `lines` is called when none of the others can append any more. For the only process that does this.
        """
        if not try_lock(self._descriptor, 0, self.path):
            return False
        try:
            self.replace(lines())
        finally:
            unlock(self._descriptor)
        return True

    def replace(self, lines: Iterable[Mapping[str, object]]) -> int:
        """Put a durable new file with these lines in the place of this one; return its length. No other process may append meanwhile."""
        content = b"".join(map(sealed_line, lines))
        write_config(self.path, content, keep_backup=False, mode=LOCK_MODE)
        return len(content)

    def close(self) -> None:
        """Close the file."""
        self.rewind()
        if self._descriptor >= 0:
            self._descriptor = -1
            self._closer()


_MISSING, _EMPTY = "is not there", "is empty"
LOCK_WAIT_S, LOCK_STEP_S = 10.0, 0.25
_POLL_INTERVAL_FIRST_S, _POLL_INTERVAL_LAST_S = 0.0005, 0.01
_locked: weakref.WeakSet[io.FileIO] = weakref.WeakSet()  # open lock files, of all threads


def _after_fork_in_child() -> None:
    for file in [*_locked]:  # otherwise the lock of a parent that is killed would last as long as the child
        file.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Allow one process at a time to change this file of config/, by a lock on `<name>.lock` that ends with the process.

    StoreBusyError if another process holds the lock for LOCK_WAIT_S: a stopped process must not block the others for ever.
    Only the folder's user, and root, may open the lock file.
    """
    lock = path.with_name(path.name + ".lock")
    with opened_to_lock(lock) as descriptor:
        wait_until_held(lambda: try_lock(descriptor, 0, lock), lock, path.name, path, lock)
        with contextlib.suppress(OSError):  # a full disk
            os.utime(descriptor)  # those that wait see that it changes hands, also if nothing is written
        yield


@contextlib.contextmanager
def opened_to_lock(path: Path) -> Iterator[int]:
    """Open a file of locks; those that the block takes end with it. A child that is forked meanwhile does not have them.

    The file's object closes it, also if an exception of a signal handler comes into the end of the block.
    """
    with open(open_shared_file(path), "r+b", buffering=0) as file:
        _locked.add(file)
        try:
            yield file.fileno()
        finally:
            with contextlib.suppress(OSError, ValueError):  # in a child that was forked by a change it is closed
                unlock(file.fileno())  # not by close() alone: a child of a fork at this moment may have it too


class RunningClock:
    """The seconds since it was made, without those for which this process was stopped: between two calls at most `step_s` pass."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self._passed_s, self._seen_s = step_s, 0.0, time.monotonic()

    def __call__(self) -> float:
        now_s = time.monotonic()
        self._passed_s, self._seen_s = self._passed_s + min(self._step_s, now_s - self._seen_s), now_s
        return self._passed_s


def wait_until_held(try_lock: Callable[[], bool], lock: Path, name: str, *changed: Path) -> None:
    """Call `try_lock` until it is true; StoreBusyError after LOCK_WAIT_S in which the files that holders change stay as they are.

    For a stopped process must not block the others for ever, while many that take turns only make each of them wait longer.
    """
    waited_s, interval_s, seen = RunningClock(LOCK_STEP_S), _POLL_INTERVAL_FIRST_S, [*map(path_stamp, changed)]
    while not try_lock():
        if waited_s() >= LOCK_WAIT_S:
            if (now := [*map(path_stamp, changed)]) == seen:
                raise StoreBusyError(f"{name} is not changed: another process has held {lock} for {LOCK_WAIT_S:g} s")
            waited_s, seen = RunningClock(LOCK_STEP_S), now
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _POLL_INTERVAL_LAST_S)
