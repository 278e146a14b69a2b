"""The offsets of consumer groups, those up to which each delay level is delivered, and the delayed messages that are cancelled
(docs/formats.md section 12).

`config/consumerOffset.json` (ConsumerOffsetManager): each change reads the file and writes a whole new one under a lock, so that no
change is lost. While a broker has the store open the file is the broker's, and changes are refused. A file without the checksum was
written by a broker or an editor, for whom the acknowledgements by message (acknowledgements.py) do not exist: the next change removes
those.

A damaged file does not stop a process: it uses the previous file, `.bak`, and `notes` say so. The next commit renames the damaged file
to `.damaged`; it never becomes `.bak`. A start leaves it as it is, for its user to repair. A file that the system does not let a
process read does not count as damaged.

`config/delayOffset.json` (ScheduleMessageService): level -> next offset in queue level - 1 of SCHEDULE_TOPIC_XXXX. Only the scheduler
writes it, and recovery.

If a power cut takes a queue back, its next messages get offsets that a group may have committed before, and the group would not read
them. So recovery, before any put, lowers such offsets to the end of the queue; those of delay levels too.

`config/delay-cancels`: the order of its lines decides between a cancel and the scheduler, who do not wait for each other. The scheduler
appends which messages it takes before it puts them; a cancel's mark counts if no line before it takes the message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.arguments import INT64_MAX
from pyengine.errors import DiskError, EngineError, FormatError, UsageError, disk_error, disk_errors
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.delayed_message import DelayedId, DelayMark
from pyengine.formats.paths import QUEUE_ID_MAX, Root, StorePaths
from pyengine.formats.small_file import (
    PARSE_ERRORS,
    SMALL_FILE_BYTES_MAX,
    TRANSIENT_ERRNOS,
    check_seal,
    decode_config,
    encode_config,
    path_stamp,
    read_small_file,
    seal,
)
from pyengine.native.failpoints import failpoint
from pyengine.storage.acknowledgements import AckFile, cut_all, remove_all
from pyengine.storage.durable_file import AppendedLines, ConfigFile, exclusive, lines_of, sealed_line
from pyengine.storage.durable_writes import write_config
from pyengine.storage.later_format import require_writable

SEPARATOR = "@"
FILE_NAME = "consumerOffset.json"
GROUP_BYTES_MAX = 127
_NOT_THE_FILES_FAULT = (*TRANSIENT_ERRNOS, errno.EIO, errno.EACCES)

Table = dict[str, dict[int, int]]  # "topic@group" -> queue id -> the group's next offset
QueueEnds = Mapping[tuple[str, int], int]  # (topic, queue id) -> the queue's next offset

# What this process has read or written last: (content, its table, whether pyengine wrote it). To decode many groups takes longest.
_known: tuple[bytes | None, Table, bool] = None, {}, False


@dataclass(slots=True)
class OffsetTable:
    """The content of the file, or of the previous one; `notes` are sentences about damage."""

    offsets: Table = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_damaged: bool = False  # the file is damaged: the table comes from `.bak`, or is empty
    is_own: bool = False      # pyengine wrote the content
    stamp: int = 0  # from an update: the path_stamp() of the file with this table


class ConsumerOffsets:
    """The groups' offsets of one store. It keeps no file open between calls; threads and processes may share it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self.path = StorePaths(root).config / FILE_NAME

    def table(self) -> OffsetTable:
        """Return all groups' current offsets, with notes about damage. It takes no lock, since files are replaced atomically.

        DiskError if the system does not let this process read the file now.
        """
        found = OffsetTable()
        for path in (self.path, self.path.with_name(FILE_NAME + ".bak")):
            try:
                offsets, found.is_own = _decoded(_read(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (FormatError, UnicodeDecodeError) as error:
                found.is_damaged = found.is_damaged or path is self.path
                found.notes.append(f"config/{path.name} cannot be used: {error}")
                continue
            found.offsets = _copied(offsets)
            if found.is_damaged:
                found.notes.append(f"config/{path.name} is used in its place: the groups' last commits may be missing")
            return found
        if found.is_damaged:
            found.notes.append("there is no older file to use: the groups have no offsets")
        return found

    def notes(self) -> list[str]:
        """Return sentences about damage, also if the file cannot be read now."""
        try:
            return self.table().notes
        except DiskError as error:
            return [str(error)]

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

    def update(self, change: Callable[[Table], object]) -> OffsetTable:
        """Call `change` with the table, as the only writer; the changed table is durable when this returns.

        An unchanged table is written only if another program wrote it: from then on acknowledgements count beside it. An exception
        in `change` ends the update without a write. StoreBusyError while another program has the store open, or if another process
        that writes makes no progress.
        """
        with exclusive(self.path):
            require_writable(self._root, "being recovered, or open in a broker, which keeps the groups' offsets itself")
            return self._change(change)

    def void_acknowledgements(self) -> None:
        """Let only the offsets count from now on: they are another store's. For the store's owner."""
        with exclusive(self.path):
            remove_all(self._root)

    def lower(self, queue_ends: QueueEnds) -> list[str]:
        """Lower the groups' offsets that are beyond the ends of their queues; return a sentence for each, and for damage.

        For the store's owner. A failed write is also reported as a sentence: a store starts even if
        its offsets cannot be written.
        """
        # A process that had begun an update before this one got the store may still write; without that file, none has.
        is_used = self.path.with_name(self.path.name + ".lock").exists()
        try:
            with exclusive(self.path) if is_used else contextlib.nullcontext():
                return self._lower(queue_ends)
        except (EngineError, OSError) as error:  # for example of a process that is stopped in an update
            return [f"the groups' offsets could not be looked at: {error}"]

    def _lower(self, queue_ends: QueueEnds) -> list[str]:
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
        def change(table: Table) -> None:
            for cut in cuts:
                cut()
            for key, queue_id, end in beyond:
                table[key][queue_id] = end

        notes = [*found.notes, *(f"{key} queue {queue_id}: the offset {found.offsets[key][queue_id]} was beyond the end and is {end} now"
                                 for key, queue_id, end in beyond)]
        try:
            if beyond:
                self._change(change)
            else:
                change({})
        except (EngineError, OSError) as error:
            notes.append(f"the groups' offsets could not be corrected: {error}")
        return notes

    def _change(self, change: Callable[[Table], object]) -> OffsetTable:
        global _known
        found = self.table()
        before = _copied(found.offsets)
        if not found.is_own:
            remove_all(self._root)
        change(found.offsets)
        for key in before.keys() - found.offsets.keys():
            AckFile(self._root, key).remove()
        if found.offsets != before or found.is_damaged or (found.offsets and not found.is_own):
            offsets = {key: dict(sorted(found.offsets[key].items())) for key in sorted(found.offsets)}
            content = seal(encode_config({"offsetTable": offsets})).encode("utf-8")
            if len(content) > SMALL_FILE_BYTES_MAX:
                raise DiskError(f"cannot write {self.path}: {len(content):,} bytes are more than {SMALL_FILE_BYTES_MAX:,}, which is all "
                                "that is read: forget groups that are no longer used", path=str(self.path))
            if found.is_damaged:
                with contextlib.suppress(FileNotFoundError), disk_errors("rename", self.path):
                    os.rename(self.path, self.path.with_name(FILE_NAME + ".damaged"))
            write_config(self.path, content)
            _known = content, offsets, True
        found.stamp = path_stamp(self.path)
        return found


def _beyond(table: Table, queue_ends: QueueEnds) -> list[tuple[str, int, int]]:
    """Return (key, queue id, end of the queue) for each offset beyond its queue's end."""
    ends = [(key, queue_id, offset, queue_ends.get((split_key(key)[0], queue_id), 0))
            for key, queues in table.items() for queue_id, offset in queues.items()]
    return [(key, queue_id, end) for key, queue_id, offset, end in ends if offset > end]


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


def _decoded(content: bytes) -> tuple[Table, bool]:
    """Return the table, which must not be changed, and whether pyengine wrote it; raises what decode_offsets() does."""
    global _known
    known = _known
    if content != known[0]:
        known = _known = content, decode_offsets(content), check_seal(content)
    return known[1:]


def _copied(table: Table) -> Table:
    return {key: dict(offsets) for key, offsets in table.items()}


def decode_offsets(content: bytes) -> Table:
    """Return the offset table; FormatError if the text has another shape or a wrong checksum."""
    check_seal(content)
    document: Any = decode_config(content.decode("utf-8"))
    try:
        table = document["offsetTable"]
        return {_text(key): {_queue_id(queue_id): _offset(_number(offset)) for queue_id, offset in offsets.items()}
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


def _number(value: object) -> object:
    """Return the number that fastjson reads in "2" and 2.0; all else as it is."""
    is_number = isinstance(value, str) and re.fullmatch("-?[0-9]+", value) or isinstance(value, float) and value.is_integer()
    return int(value) if is_number else value  # type: ignore[call-overload]


def _offset(value: object) -> int:
    if type(value) is not int or abs(value) > INT64_MAX:
        raise ValueError(f"{value!r} is not an offset")
    return value


NAME = "delayOffset.json"


class DelayOffsets:
    """The file delayOffset.json of one store. It keeps no file open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._file = ConfigFile(StorePaths(root).config / NAME, _decode_delay_file)
        self.path = self._file.path
        self.is_own = True  # the last table read is empty, or of a scheduler that reads delay-cancels

    def read(self) -> tuple[dict[int, int], str]:
        """Return (level -> next offset, sentence about a damaged file); the table is empty if no file can be used.

        DiskError for lack of a descriptor or of memory.
        """
        found, problem, *_ = self._file.read()
        table, self.is_own = found or ({}, True)
        return table, problem

    def write(self, table: Mapping[int, int]) -> None:
        """Replace the file, durably; the old one is kept as `.bak`. Raises DiskFullError, DiskError or FlushError."""
        self._file.write(seal(encode_config({"offsetTable": dict(sorted(table.items()))})))

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
    """Return the table in the text of the file; FormatError for a text of another shape, or a wrong checksum."""
    return _decode_delay_file(text)[0]


def _decode_delay_file(text: str) -> tuple[dict[int, int], bool]:
    """Return the table, and whether it has the checksum."""
    is_own = check_seal(text.encode())
    document: Any = decode_config(text)
    try:
        table = {int(level): int(offset) for level, offset in document["offsetTable"].items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"no table of delay offsets: {error!r}") from error
    if not all(level >= 1 and 0 <= offset <= INT64_MAX for level, offset in table.items()):
        raise FormatError("a level below 1, or an offset that no queue has")
    return table, is_own


CANCELS_NAME = "delay-cancels"
CANCELS_SHORTEN_BYTES, CANCELS_SHORTEN_FACTOR = 64 << 10, 2


@dataclass(slots=True)
class _Cancels:
    """What the lines of the file say together."""

    taken: dict[int, int] = field(default_factory=dict)     # level -> the queue offset below which all messages are taken
    others: dict[int, int] = field(default_factory=dict)    # level -> the queue offset below which another program has delivered
    taken_ms: int = 0                                       # all messages with a time until then count as taken,
    log_end: int = 0                                        # that begin below the log's end at the last line
    recent_from: int = 0                                    # those from here on began after the clock was set back, and
    recent_ms: int = 0                                      # only count with a time until then, the last line's
    marks: dict[DelayedId, DelayMark] = field(default_factory=dict)

    def apply(self, fields: Mapping[str, Any]) -> None:
        """Take the next line into account; one of PARSE_ERRORS for fields of another kind."""
        if "queue_offset" in fields:
            mark = DelayMark.from_fields(fields)
            if not self.has_taken(mark):
                self.marks[mark.id] = mark
            return
        level, below, others, at_ms = (_offset(fields.get(name, 0)) for name in ("level", "below", "others", "at_ms"))
        if fields.get("cut"):
            for table in (self.taken, self.others):
                table[level] = min(table.get(level, 0), below)
            return
        self.taken[level] = max(self.taken.get(level, 0), below)
        self.others[level] = max(self.others.get(level, 0), others)
        if at_ms:
            if at_ms < self.recent_ms:
                self.recent_from = self.log_end  # no line before took a message that begins beyond it
            self.recent_ms, self.log_end = at_ms, _offset(fields.get("log_end", INT64_MAX))
            self.taken_ms = max(self.taken_ms, at_ms)

    def has_taken(self, mark: DelayMark) -> bool:
        if not mark.due_ms:
            return mark.queue_offset < self.taken.get(mark.level, 0)
        until_ms = self.taken_ms if mark.physical_offset < self.recent_from else self.recent_ms
        return mark.physical_offset < self.log_end and mark.due_ms <= until_ms

    def lines(self) -> Iterator[dict[str, object]]:
        """Return the lines of a new file that says the same."""
        yield from map(DelayMark._asdict, self.marks.values())
        for level, below in self.taken.items():
            yield {"level": level, "below": below, "others": self.others.get(level, 0), "at_ms": self.taken_ms, "log_end": self.recent_from}
        yield {"level": 0, "below": 0, "at_ms": self.recent_ms, "log_end": self.log_end}


class DelayCancels:
    """The file delay-cancels of one store, for the scheduler and for those that cancel. Not for several threads at once."""

    def __init__(self, root: Root) -> None:
        self._offsets = DelayOffsets(root)
        self._lines = AppendedLines(StorePaths(root).config / CANCELS_NAME)
        self.path = self._lines.path
        self._state = _Cancels()
        self._short_bytes = 0                  # its length after the last time that it was shortened
        self._noted_end = 0
        self._ends: dict[DelayedId, int] = {}  # of each mark: the end of the log when no later record of its message could come any more

    def close(self) -> None:
        self._lines.close()

    # ---- for those that cancel ---------------------------------------------------

    def cancel(self, mark: DelayMark, *, is_due: bool = False) -> bool:
        """Cancel a message; return whether it will never be delivered, which is durable then. False: it was taken for delivery.

        `is_due`: also False, unless it is cancelled already. For a power cut may lose the line that takes a message, and a slave never
        has that line, while the delivered record is there.
        EngineError if another program has moved the message on. Raises DiskFullError, DiskError, FlushError (the mark may count or not)
        or StoreBusyError.
        """
        noted, _ = self._offsets.read()
        with self._lines.hold():
            self._follow()
            is_noted = mark.queue_offset < noted.get(mark.level, 0)
            moved_by_others = is_noted and not self._offsets.is_own or mark.queue_offset < self._state.others.get(mark.level, 0)
            if mark.due_ms and moved_by_others:
                raise EngineError("it cannot be cancelled: a RocketMQ broker or an earlier version has moved it to another level, and they "
                                  "do not note what it is")
            if mark.id not in self._state.marks and (is_due or self._state.has_taken(mark) or is_noted and not mark.due_ms):
                return False
            self._lines.append(mark._asdict())
            failpoint("cancel_marked")
            self._follow()
            # Also if the mark does not count: after a power cut it must not be there without the line that took the message.
            self._lines.sync()
            failpoint("cancel_durable")
            return mark.id in self._state.marks

    # ---- for the scheduler -------------------------------------------------------

    def resume(self, noted: Mapping[int, int], now_ms: int, log_end: int = INT64_MAX) -> None:
        """Read the file and note what others have delivered: the levels up to `noted`, and what had its time before this start."""
        self._offsets.read()
        if not any(noted.values()) and not self.path.exists():
            return
        self._lines.renew()
        self._follow()
        for level, below in noted.items():
            if not self._offsets.is_own and below > self._state.others.get(level, 0):
                self._take(level, below, others=below)
        self._take(0, 0, at_ms=now_ms, log_end=log_end)

    def take(self, level: int, below: int, at_ms: int, log_end: int = INT64_MAX, newest_ms: int = 0) -> None:
        """Note, before they are put, that all messages of a level below this offset are taken, and those with a time until `at_ms`.

        `log_end`: the log's end, below which all of them begin. Then is_cancelled() has all marks that count for them. After the clock
        was set back, to before a line's time or `newest_ms`, the newest store time, the line is durable before a delivery: it may be
        set back again. Raises DiskFullError, DiskError or FlushError.
        """
        self._lines.renew()
        self._take(level, below, at_ms=at_ms, log_end=log_end)
        if at_ms < max(self._state.taken_ms, newest_ms):
            self._lines.sync()

    def is_cancelled(self, message: DelayedId) -> bool:
        """Whether a mark counted when its message was taken, or counts until it is."""
        return message in self._state.marks

    def shorten(self, noted_end: int, log_end: int | None) -> None:
        """Shorten a long file; never waits. All levels are noted to be delivered up to the physical offset `noted_end`.

        `log_end`: the log's end, if all that was ever put for delivery is below it. A mark is dropped once the levels are noted, and were
        at the last call, beyond the end that the log had when the scheduler knew the mark: no record of its message waits any more, by an
        older copy of delayOffset.json at a slave or in a backup neither.
        """
        done, self._noted_end = min(noted_end, self._noted_end), noted_end
        if self._lines.size_bytes <= max(CANCELS_SHORTEN_BYTES, CANCELS_SHORTEN_FACTOR * self._short_bytes):
            return

        def lines() -> Iterator[dict[str, object]]:
            self._follow()
            marks = self._state.marks
            self._ends = {each: end for each, end in self._ends.items() if each in marks}
            for each in [*marks]:
                if self._ends.get(each, done) < done:
                    del marks[each]
                elif log_end is not None:
                    self._ends.setdefault(each, log_end)
            return self._state.lines()

        if self._lines.shorten(lines):
            self._lines.renew()
            self._follow()
            self._short_bytes = self._lines.size_bytes

    # ---- for recovery ------------------------------------------------------------

    def lower(self, queue_ends: QueueEnds) -> list[str]:
        """Note that levels are taken up to the ends of their queues only; return a sentence for a failed write. For the store's owner."""
        if not self.path.exists():
            return []
        try:
            self._lines.renew()
            self._follow()
            beyond = {level: end for level, below in self._state.taken.items()
                      if level and below > (end := queue_ends.get((SCHEDULE_TOPIC, level - 1), 0))}
            if beyond:
                for level, end in beyond.items():
                    self._lines.append({"level": level, "below": end, "cut": True})
                self._lines.sync()
            return []
        except EngineError as error:
            return [f"{CANCELS_NAME} could not be corrected: {error}"]
        finally:
            self.close()

    def _take(self, level: int, below: int, **more: int) -> None:
        self._lines.append({"level": level, "below": below, **more})
        self._follow()

    def _follow(self) -> None:
        if not self._lines.size_bytes:
            self._state = _Cancels()
        try:
            for fields in self._lines.news():
                with contextlib.suppress(*PARSE_ERRORS):
                    self._state.apply(fields)
        except BaseException:  # of a signal handler too: some of them may not be applied
            self._lines.rewind()
            raise


def delay_marks(content: bytes) -> bytes:
    """Return the lines of the marks that count in the file's content, an empty one without any."""
    return b"".join(sealed_line(mark._asdict()) for mark in _marks(content).values()) or b"\n"


def cancelled_messages(root: Root) -> Mapping[DelayedId, DelayMark]:
    """Return the marks that count, by the names of their messages; marks of what waits no more are dropped. DiskError."""
    path = StorePaths(root).config / CANCELS_NAME
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError):
        return _marks(read_small_file(path))
    return {}


def _marks(content: bytes) -> dict[DelayedId, DelayMark]:
    state = _Cancels()
    for fields in lines_of(content):
        with contextlib.suppress(*PARSE_ERRORS):
            state.apply(fields)
    return state.marks
