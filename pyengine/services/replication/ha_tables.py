"""A master's tables for its slaves: topics, groups, and how far groups and delay levels are, so that a promoted slave goes on there.

    master   once a second: TableSource.look() reads the files that were changed, HAConnection sends them as messages
    slave    TableSink.take(kind, content, position) keeps them, apply() makes them durable

Only on links with seals. A table says what was true of the master's log up to its end at that moment: it is sent after those bytes,
and the slave writes it once it has them on its disk. Else a promoted slave could take a delayed message for delivered whose
delivery it does not have.

Topics, groups and delay offsets become the master's. Of the consumer offsets each group and topic of the master's replaces the slave's own,
and those that the master does not have stay, as a RocketMQ slave does it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from pyengine.errors import EngineError, FormatError
from pyengine.events import Event, Report
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import read_small_file
from pyengine.services.service import BlockedReason
from pyengine.storage import consumer_offset, delay_offset, subscription_group, topic_config
from pyengine.storage.config_table import exclusive
from pyengine.storage.consumer_offset import ConsumerOffsets, decode_offsets
from pyengine.storage.durable_file import ConfigFile

TABLE_BYTES_MAX = 16 << 20
WAITING_MAX = 8  # tables of one kind that wait for their bytes of the log to be durable


def _keep_text(text: str) -> str:
    return text


class Table(NamedTuple):
    """One file as the master has it. `end`: where its log ended when it said so."""

    kind: int
    content: bytes
    end: int


def _offsets(root: str | os.PathLike[str], content: bytes) -> None:
    theirs = decode_offsets(content)
    ConsumerOffsets(root).update(lambda table: table.update(theirs))


def _replace(name: str, decode: Callable[[str], object], *, is_shared: bool = True) -> Callable[[str | os.PathLike[str], bytes], None]:
    def write(root: str | os.PathLike[str], content: bytes) -> None:
        text = content.decode()
        decode(text)  # FormatError
        file = ConfigFile(StorePaths(root).config / name, _keep_text)
        with exclusive(file.path) if is_shared else contextlib.nullcontext():
            if file.read().value != text:
                file.write(text)
    return write


# By their kinds on the wire, which stay: the name of the file, and how a slave takes it over.
TABLES: tuple[tuple[str, Callable[[str | os.PathLike[str], bytes], None]], ...] = (
    (topic_config.NAME, _replace(topic_config.NAME, topic_config.FORMAT.decode)),
    (subscription_group.NAME, _replace(subscription_group.NAME, subscription_group.FORMAT.decode)),
    (consumer_offset.FILE_NAME, _offsets),
    (delay_offset.NAME, _replace(delay_offset.NAME, delay_offset.decode_delay_offsets, is_shared=False)),
)


class TableSource:
    """The files of a master. One thread calls look(); `tables` is what was read last, by kind."""

    def __init__(self, root: str | os.PathLike[str], load_end: Callable[[], int], report: Report) -> None:
        self._folder = StorePaths(root).config
        self._load_end = load_end
        self._stamps: dict[int, tuple[int, int, int]] = {}
        self.tables: dict[int, Table] = {}
        self._blocked = BlockedReason(report)

    def look(self) -> None:
        """Read what was changed since the last look; a file that is not there, or cannot be read now, is left out."""
        why = ""
        for kind, (name, _) in enumerate(TABLES):
            path = self._folder / name
            try:
                found = os.stat(path)
                stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
                if self._stamps.get(kind) == stamp:
                    continue
                content = read_small_file(path, TABLE_BYTES_MAX)
            except FileNotFoundError:
                continue
            except OSError as error:
                why = f"{name} is not sent to slaves: {error.strerror}"
                continue
            self._stamps[kind] = stamp  # of before the reading: a change in between is seen at the next look
            self.tables[kind] = Table(kind, content, self._load_end())
        self._blocked.set(why, why, event=Event.TABLE_UNUSABLE)


class TableSink:
    """The files of a slave. take() by the thread of the connection, apply() by one that may wait for the disk."""

    def __init__(self, root: str | os.PathLike[str], load_flushed: Callable[[], int], report: Report) -> None:
        self._root = root
        self._load_flushed = load_flushed
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Table]] = {}
        self.blocked = BlockedReason(report)

    def take(self, kind: int, content: bytes, position: int) -> None:
        """A table came after the bytes of the log below `position`. A kind of a later version is left out."""
        if kind < len(TABLES):
            with self._lock:
                self._waiting.setdefault(kind, []).append(Table(kind, content, position))
                del self._waiting[kind][:-WAITING_MAX]

    def apply(self) -> None:
        """Write the newest of each kind whose bytes of the log are durable here; what cannot be written is tried again."""
        flushed = self._load_flushed()
        for kind, (name, write) in enumerate(TABLES):
            with self._lock:
                due = [table for table in self._waiting.get(kind, ()) if table.end <= flushed]
            if not due:
                continue
            try:
                write(self._root, due[-1].content)
            except (FormatError, UnicodeDecodeError) as error:
                self._block(f"the master's {name} cannot be used: {error}")
            except EngineError as error:
                self._block(f"the master's {name} cannot be written here: {error}")
                continue
            else:
                self.blocked.clear()
            with self._lock:
                self._waiting[kind] = [table for table in self._waiting[kind] if table not in due]

    def _block(self, why: str) -> None:
        self.blocked.set(why, why, event=Event.TABLE_UNUSABLE)
