"""How far consumer groups have read: `config/consumerOffset.json` (ConsumerOffsetManager, docs/formats.md section 12).

`{"offsetTable": {"topic@group": {"queueId": next offset}}}`, the same file as RocketMQ's
broker keeps, with a checksum after it that JSON readers do not see. Several processes
may change it: each change is a read, a change and a whole new file under one lock
(storage/offset_lock.py), so none is lost; a crash leaves the old file or the new one.
While a broker has the store open the file is its own, and changes are refused.

A file that cannot be believed never stops a process: the one before it, `.bak`, is used,
and `notes` say so. The next change sets the bad one aside as `.damaged`; `.bak` is
never replaced by it. What the system does not let a process read (no descriptor left, no right, a
failing disk) is no damage: DiskError, and nothing is changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.errors import DiskError, FormatError, StoreBusyError, UsageError, disk_error
from pyengine.formats.paths import QUEUE_ID_MAX, StorePaths
from pyengine.formats.small_file import (
    PARSE_ERRORS,
    SMALL_FILE_BYTES_MAX,
    check_seal,
    decode_config,
    encode_config,
    read_small_file,
    seal,
)
from pyengine.storage.later_format import require_known_format
from pyengine.storage.offset_lock import TIMEOUT_S, LockPassedOnError, OffsetLock, Writer
from pyengine.storage.read_level import StoreUse, store_use

SEPARATOR = "@"
FILE_NAME = "consumerOffset.json"
GROUP_BYTES_MAX = 127
OFFSET_MAX = (1 << 63) - 1
_TRIES = 5
_NOT_THE_FILES_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES)

Table = dict[str, dict[int, int]]  # "topic@group" -> queue id -> the next offset that the group wants


@dataclass(slots=True)
class OffsetTable:
    """What the file says, or the one before it; `notes` are sentences about what could not be believed."""

    offsets: Table = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_damaged: bool = False  # the file itself: `.bak`, or nothing, is used for it


class ConsumerOffsets:
    """The groups' offsets of one store. Holds nothing open between calls; threads and processes may share it."""

    def __init__(
        self, root: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S, while_waiting: Callable[[], object] | None = None,
    ) -> None:
        self._root = Path(root)
        folder = StorePaths(root).config
        self._path = self.path = folder / FILE_NAME
        self._lock = OffsetLock(self._path, folder / "consumers", timeout_s=timeout_s, while_waiting=while_waiting)

    def table(self) -> OffsetTable:
        """All groups' offsets now, with notes about damage. Takes no lock: the file is always whole.

        DiskError where the system does not let this process read it now.
        """
        found = OffsetTable()
        for path in (self._path, self._path.with_name(FILE_NAME + ".bak")):
            try:
                found.offsets = decode_offsets(_read(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (FormatError, UnicodeDecodeError) as error:
                found.is_damaged = found.is_damaged or path is self._path
                found.notes.append(f"config/{path.name} cannot be used: {error}")
                continue
            if found.is_damaged:
                found.notes.append(f"config/{path.name} is used in its place: the groups' last commits may be missing")
            return found
        if found.is_damaged:
            found.notes.append("there is no older file to use: the groups have no offsets")
        return found

    def read(self, topic: str, group: str) -> dict[int, int]:
        """Queue id -> the next offset that the group wants; empty for a group that never committed."""
        return dict(self.table().offsets.get(group_key(topic, group), {}))

    def groups(self) -> dict[tuple[str, str], dict[int, int]]:
        """(topic, group) -> offsets, of everybody."""
        return {split_key(key): dict(offsets) for key, offsets in self.table().offsets.items()}

    def commit(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Remember these queues' next offsets, durable before this returns; other queues and groups keep theirs.

        StoreBusyError while a RocketMQ broker has the store open.
        """
        key = group_key(topic, group)

        def change(table: Table) -> None:
            table[key] = table.get(key, {}) | dict(offsets)

        self.update(change)

    def update(self, change: Callable[[Table], object]) -> OffsetTable:
        """Let `change` work on the table as the one writer; what it made of it is durable when this returns.

        Nothing is written where nothing changed. `change` may be called again if this
        process was passed over in the middle; whatever it raises ends the update, with
        nothing written. StoreBusyError while another program has the store open.
        """
        return self._update(change, own_store=False)

    def update_as_owner(self, change: Callable[[Table], object]) -> OffsetTable:
        """The same for the process that holds the store exclusively (recovery)."""
        return self._update(change, own_store=True)

    def _update(self, change: Callable[[Table], object], *, own_store: bool) -> OffsetTable:
        for _ in range(_TRIES):
            try:
                with self._lock.held() as writer:
                    use = None if own_store else store_use(self._root)
                    if use is StoreUse.OTHER:
                        raise StoreBusyError(
                            f"{self._root} is open in another program, which keeps the groups' offsets itself")
                    if use is StoreUse.CLOSED:
                        require_known_format(self._root)
                    return self._change(writer, change)
            except LockPassedOnError:
                continue
        raise DiskError(f"cannot write {self._path}: each try took so long that another process was let in before it",
                        path=str(self._path))

    def _change(self, writer: Writer, change: Callable[[Table], object]) -> OffsetTable:
        found = self.table()
        before = {key: dict(offsets) for key, offsets in found.offsets.items()}
        change(found.offsets)
        if found.offsets != before or found.is_damaged:
            text = encode_config({"offsetTable": {key: dict(sorted(found.offsets[key].items()))
                                                  for key in sorted(found.offsets)}})
            content = seal(text).encode("utf-8")
            if len(content) > SMALL_FILE_BYTES_MAX:
                raise DiskError(f"cannot write {self._path}: {len(content):,} bytes are more than {SMALL_FILE_BYTES_MAX:,}, which is all "
                                "that is read: forget groups that are no longer used", path=str(self._path))
            writer.replace(content, keep_as="damaged" if found.is_damaged else "bak")
        else:
            writer.check()  # what was read may be old by now
        return found


def group_key(topic: str, group: str) -> str:
    """`topic@group`; UsageError for names that the file, or the file system, cannot carry."""
    for what, name in (("topic", topic), ("group", group)):
        if not name or SEPARATOR in name or "/" in name or not name.isprintable():
            raise UsageError(f"{what} {name!r} must be given, printable, and hold no {SEPARATOR} and no /")
        if len(name.encode("utf-8")) > GROUP_BYTES_MAX:
            raise UsageError(f"{what} {name!r} is too long: at most {GROUP_BYTES_MAX} bytes")
    return f"{topic}{SEPARATOR}{group}"


def split_key(key: str) -> tuple[str, str]:
    """(topic, group) of a key."""
    topic, _, group = key.partition(SEPARATOR)
    return topic, group


def _read(path: Path) -> bytes:
    try:
        return read_small_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in _NOT_THE_FILES_FAULT:  # it may be whole: neither `.bak` nor a new file may take its place
            raise disk_error(error, "read", path) from error
        raise FormatError(f"it cannot be read: {error.strerror}") from error


def decode_offsets(content: bytes) -> Table:
    """The offset table; FormatError if the text has another shape or another checksum."""
    check_seal(content)
    document: Any = decode_config(content.decode("utf-8"))
    try:
        table = document["offsetTable"]
        return {_text(key): {_queue_id(queue_id): _offset(offset) for queue_id, offset in offsets.items()}
                for key, offsets in table.items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"it is no offset table: {error}") from error


def _text(key: str) -> str:
    key.encode("utf-8")  # ValueError for half a surrogate pair, which could not be written again
    return key


def _queue_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= QUEUE_ID_MAX):
        raise ValueError(f"{text!r} is no queue id")
    return int(text)


def _offset(value: object) -> int:
    if type(value) is not int or abs(value) > OFFSET_MAX:
        raise ValueError(f"{value!r} is no offset")
    return value
