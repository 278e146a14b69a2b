"""The offsets of consumer groups, and those up to which each delay level is delivered (docs/formats.md section 12).

`config/consumerOffset.json` (ConsumerOffsetManager):

`{"offsetTable": {"topic@group": {"queueId": next offset}}}`, the same file that RocketMQ's
broker writes, followed by a checksum that JSON readers ignore. Several processes
may change it: each change reads the file and writes a whole new one under a lock
(durable_file.exclusive), so that no change is lost; a crash leaves the old file or the new one.
While a broker has the store open the file is the broker's, and changes are refused. A file without the checksum was written
by a broker or an editor, for whom the acknowledgements by message (acknowledgements.py) do not exist: the next change removes those.

A damaged file does not stop a process: it uses the previous file, `.bak`, and `notes` say so. The
next change renames the damaged file to `.damaged`; it never becomes `.bak`. A file that the system
does not let a process read (no free descriptor, no permission, a failing disk) does not count as
damaged: the process raises DiskError and changes nothing.

`config/delayOffset.json` (ScheduleMessageService):
`{"offsetTable": {level: next offset in queue level - 1 of SCHEDULE_TOPIC_XXXX}}`. RocketMQ
writes the levels without quotes, which this module can read; it writes strict JSON, which
RocketMQ can read. Only the scheduler writes the file, and recovery.

If a power cut takes a queue back to 90, the next messages get the offsets from 90 on again, and a group that has
committed offset 100 would not read them. So recovery, before any put, lowers such offsets to the current end of the
queue; also those of delay levels (ScheduleMessageService.correctDelayOffset), since the scheduler may start too late.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.arguments import INT64_MAX
from pyengine.errors import DiskError, EngineError, FormatError, StoreBusyError, UsageError, disk_error, disk_errors
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.paths import QUEUE_ID_MAX, StorePaths
from pyengine.formats.small_file import (
    PARSE_ERRORS,
    SMALL_FILE_BYTES_MAX,
    TRANSIENT_ERRNOS,
    check_seal,
    decode_config,
    encode_config,
    read_small_file,
    seal,
)
from pyengine.storage.acknowledgements import AckFile, cut_all, remove_all
from pyengine.storage.durable_file import ConfigFile, exclusive
from pyengine.storage.durable_writes import write_config
from pyengine.storage.later_format import require_known_format
from pyengine.storage.read_level import StoreUse, store_use

SEPARATOR = "@"
FILE_NAME = "consumerOffset.json"
GROUP_BYTES_MAX = 127
_NOT_THE_FILES_FAULT = (*TRANSIENT_ERRNOS, errno.EIO, errno.EACCES)

Stamp = tuple[int, int, int]       # inode, time of the last change in ns, bytes
Table = dict[str, dict[int, int]]  # "topic@group" -> queue id -> the group's next offset
QueueEnds = Mapping[tuple[str, int], int]  # (topic, queue id) -> the queue's next offset


@dataclass(slots=True)
class OffsetTable:
    """The content of the file, or of the previous one; `notes` are sentences about damage."""

    offsets: Table = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_damaged: bool = False  # the file is damaged: the table comes from `.bak`, or is empty
    is_own: bool = False      # pyengine wrote the content
    stamp: Stamp = (0, 0, 0)  # from an update: the stamp() of the file with this table


class ConsumerOffsets:
    """The groups' offsets of one store. It keeps no file open between calls; threads and processes may share it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self._path = self.path = StorePaths(root).config / FILE_NAME

    def stamp(self) -> Stamp:
        """Return numbers that differ once the file has changed; zeros without a file."""
        return _stamp(self.path)

    def table(self) -> OffsetTable:
        """Return all groups' current offsets, with notes about damage. It takes no lock, since files are replaced atomically.

        DiskError if the system does not let this process read the file now.
        """
        found = OffsetTable()
        for path in (self._path, self._path.with_name(FILE_NAME + ".bak")):
            try:
                content = _read(path)
                found.offsets, found.is_own = decode_offsets(content), check_seal(content)
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
        """Return queue id -> the group's next offset; empty for a group that has never committed."""
        return dict(self.table().offsets.get(group_key(topic, group), {}))

    def groups(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return (topic, group) -> offsets, of all groups."""
        return {split_key(key): dict(offsets) for key, offsets in self.table().offsets.items()}

    def commit(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Store these queues' next offsets, durable before this returns; other queues and groups keep theirs.

        StoreBusyError while a RocketMQ broker has the store open.
        """
        key = group_key(topic, group)

        def change(table: Table) -> None:
            table[key] = table.get(key, {}) | dict(offsets)

        self.update(change)

    def update(self, change: Callable[[Table], object], *, is_owner: bool = False) -> OffsetTable:
        """Call `change` with the table, as the only writer; the changed table is durable when this returns.

        An unchanged table is written only if another program wrote it: from then on acknowledgements count beside it. An exception
        in `change` ends the update without a write. StoreBusyError while another program has the store open, or if another process
        that writes makes no progress; `is_owner`: this process has locked the store exclusively (recovery).
        """
        with exclusive(self._path):
            use = None if is_owner else store_use(self._root)
            if use is StoreUse.OTHER:
                raise StoreBusyError(f"{self._root} is open in another program, which keeps the groups' offsets itself")
            if use is StoreUse.CLOSED:
                require_known_format(self._root)
            return self._change(change)

    def lower(self, queue_ends: QueueEnds) -> list[str]:
        """Lower the groups' offsets that are beyond the ends of their queues; return a sentence for each, and for damage.

        For the store's owner. A failed write is also reported as a sentence: a store starts even if
        its offsets cannot be written.
        """
        try:
            found = self.table()
        except DiskError as error:
            return [f"the groups' offsets could not be read: {error}"]
        beyond = _beyond(found.offsets, queue_ends)
        try:
            cuts = cut_all(self._root, queue_ends)
        except DiskError as error:  # for example of a folder that is another user's
            cuts = []
            found.notes.append(f"the acknowledgements of groups could not be read: {error}")
        if not found.is_damaged and not beyond and not cuts:
            return list(found.notes)

        def change(table: Table) -> None:
            for cut in cuts:
                cut()
            for key, queue_id, end in _beyond(table, queue_ends):
                table[key][queue_id] = end

        notes = [*found.notes, *(f"{key} queue {queue_id}: the offset {found.offsets[key][queue_id]} was beyond the end and is {end} now"
                                 for key, queue_id, end in beyond)]
        try:
            self.update(change, is_owner=True)
        except (EngineError, OSError) as error:
            notes.append(f"the groups' offsets could not be corrected: {error}")
        return notes

    def _change(self, change: Callable[[Table], object]) -> OffsetTable:
        found = self.table()
        before = {key: dict(offsets) for key, offsets in found.offsets.items()}
        if not found.is_own:
            remove_all(self._root)
        change(found.offsets)
        for key in before.keys() - found.offsets.keys():
            AckFile(self._root, key).remove()
        if found.offsets != before or found.is_damaged or (found.offsets and not found.is_own):
            text = encode_config({"offsetTable": {key: dict(sorted(found.offsets[key].items()))
                                                  for key in sorted(found.offsets)}})
            content = seal(text).encode("utf-8")
            if len(content) > SMALL_FILE_BYTES_MAX:
                raise DiskError(f"cannot write {self._path}: {len(content):,} bytes are more than {SMALL_FILE_BYTES_MAX:,}, which is all "
                                "that is read: forget groups that are no longer used", path=str(self._path))
            if found.is_damaged:
                with contextlib.suppress(FileNotFoundError), disk_errors("rename", self._path):
                    os.rename(self._path, self._path.with_name(FILE_NAME + ".damaged"))
            write_config(self._path, content)
        found.stamp = self.stamp()
        return found


def _beyond(table: Table, queue_ends: QueueEnds) -> list[tuple[str, int, int]]:
    """Return (key, queue id, end of the queue) for each offset beyond its queue's end."""
    ends = [(key, queue_id, offset, queue_ends.get((split_key(key)[0], queue_id), 0))
            for key, queues in table.items() for queue_id, offset in queues.items()]
    return [(key, queue_id, end) for key, queue_id, offset, end in ends if offset > end]


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def group_key(topic: str, group: str) -> str:
    """Return `topic@group`; UsageError for names that are illegal in the file or in the file system."""
    for what, name in (("topic", topic), ("group", group)):
        if not name:
            raise UsageError(f"the {what} is empty: name one")
        if SEPARATOR in name or "/" in name:
            raise UsageError(f"the {what} {name!r} holds '{SEPARATOR}' or '/', which separate names in the file of offsets and in the file "
                             "system: name another one")
        if not name.isprintable():
            raise UsageError(f"the {what} {name!r} has a character that is not printable: name another one")
        if len(name.encode("utf-8")) > GROUP_BYTES_MAX:
            raise UsageError(f"{what} {name!r} is too long: at most {GROUP_BYTES_MAX} bytes")
    return f"{topic}{SEPARATOR}{group}"


def split_key(key: str) -> tuple[str, str]:
    """Return (topic, group) of a key."""
    topic, _, group = key.partition(SEPARATOR)
    return topic, group


def _read(path: Path) -> bytes:
    try:
        return read_small_file(path)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in _NOT_THE_FILES_FAULT:  # the file may be undamaged: `.bak` or a new file must not replace it
            raise disk_error(error, "read", path) from error
        raise FormatError(f"it cannot be read: {error.strerror}") from error


def decode_offsets(content: bytes) -> Table:
    """Return the offset table; FormatError if the text has another shape or a wrong checksum."""
    check_seal(content)
    document: Any = decode_config(content.decode("utf-8"))
    try:
        table = document["offsetTable"]
        return {_text(key): {_queue_id(queue_id): _offset(offset) for queue_id, offset in offsets.items()}
                for key, offsets in table.items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"it is not an offset table: {error}") from error


def _text(key: str) -> str:
    key.encode("utf-8")  # ValueError for half a surrogate pair, which could not be written back
    return key


def _queue_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= QUEUE_ID_MAX):
        raise ValueError(f"{text!r} is not a queue id")
    return int(text)


def _offset(value: object) -> int:
    if type(value) is not int or abs(value) > INT64_MAX:
        raise ValueError(f"{value!r} is not an offset")
    return value


NAME = "delayOffset.json"


class DelayOffsets:
    """The file delayOffset.json of one store. It keeps no file open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._file = ConfigFile(StorePaths(root).config / NAME, decode_delay_offsets)
        self.path = self._file.path

    def read(self) -> tuple[dict[int, int], str]:
        """Return (level -> next offset, sentence about a damaged file); the table is empty if no file can be used.

        DiskError for lack of a descriptor or of memory.
        """
        table, problem, *_ = self._file.read()
        return table or {}, problem

    def write(self, table: Mapping[int, int]) -> None:
        """Replace the file, durably; the old one is kept as `.bak`. Raises DiskFullError, DiskError or FlushError."""
        self._file.write(encode_config({"offsetTable": dict(sorted(table.items()))}))

    def lower(self, queue_ends: QueueEnds) -> list[str]:
        """Lower the offsets beyond the ends of their queues; return a sentence for each, and for a failed write.

        Level n waits in queue n - 1 of SCHEDULE_TOPIC_XXXX. A damaged file is left to the scheduler, which reports it and uses
        the previous one.
        """
        table, _ = self.read()
        ends = {level: queue_ends.get((SCHEDULE_TOPIC, level - 1), 0) for level in table}
        beyond = {level: end for level, end in ends.items() if table[level] > end}
        if not beyond:
            return []
        notes = [f"delay level {level} was said to be delivered up to {table[level]}, beyond the end of its queue: "
                 f"up to {end} now" for level, end in beyond.items()]
        try:
            self.write(table | beyond)
        except EngineError as error:
            notes.append(f"delayOffset.json could not be corrected: {error}")
        return notes


def decode_delay_offsets(text: str) -> dict[int, int]:
    """Return the table in the text of the file; FormatError for a text of another shape."""
    document: Any = decode_config(text)
    try:
        table = {int(level): int(offset) for level, offset in document["offsetTable"].items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"no table of delay offsets: {error!r}") from error
    if not all(level >= 1 and 0 <= offset <= INT64_MAX for level, offset in table.items()):
        raise FormatError("a level below 1, or an offset that no queue has")
    return table
