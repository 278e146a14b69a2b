"""One config/*.json that RocketMQ's broker keeps as a table of named rows, and several of our processes change.

    {"dataVersion": {counter, timestamp}, KEY: {name: {...}}}

Each change is a read, a change and a whole new file under one lock. While a broker has the store open the file is its own,
and changes are refused. topic_config.py and subscription_group.py say what the rows are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyengine.errors import FormatError, StoreBusyError, disk_errors
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.storage.durable_file import ConfigFile
from pyengine.storage.later_format import require_known_format
from pyengine.storage.new_file import make_folders
from pyengine.storage.read_level import StoreUse, store_use

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[Row]):
    """How a file's rows are written. `row_of(name, fields)` raises one of PARSE_ERRORS for fields of another shape."""

    name: str  # of the file
    key: str
    row_of: Callable[[str, Any], Row]
    fields_of: Callable[[Row], dict[str, Any]]

    def decode(self, text: str) -> NamedRows[Row]:
        """The table in the text of the file; FormatError for one of another shape."""
        document: Any = decode_config(text)
        try:
            version = document.get("dataVersion") or {}
            rows = {name: self.row_of(name, fields) for name, fields in document[self.key].items()}
            return NamedRows(rows, int(version.get("counter", 0)), int(version.get("timestamp", 0)))
        except PARSE_ERRORS as error:
            raise FormatError(f"no {self.key}: {error!r}") from error

    def encode(self, table: NamedRows[Row]) -> str:
        """Its inverse."""
        return encode_config({
            "dataVersion": {"counter": table.counter, "timestamp": table.timestamp_ms},
            self.key: {name: self.fields_of(row) for name, row in sorted(table.rows.items())}})


@dataclass(frozen=True, slots=True)
class NamedRows(Generic[Row]):
    """The file as a whole; `said` is a sentence about a bad file, `is_lost` whether nothing of it could be used."""

    rows: dict[str, Row]
    counter: int = 0
    timestamp_ms: int = 0
    said: str = ""
    is_lost: bool = False


class ConfigTable(Generic[Row]):
    """The file of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str], row_format: RowFormat[Row]) -> None:
        self._root = Path(root)
        self._format = row_format
        self._file = ConfigFile(StorePaths(root).config / row_format.name, row_format.decode)
        self.path = self._file.path

    def read(self) -> NamedRows[Row]:
        """What the file, or in its place `.bak`, says; a bad file is told in `said`, never raised."""
        table, said, _ = self._file.read()
        return NamedRows({}, said=said, is_lost=bool(said)) if table is None else replace(table, said=said)

    @contextlib.contextmanager
    def changed(self) -> Iterator[NamedRows[Row]]:
        """The table, whose rows the block may change; then, if it did, the new file is written, durable before this returns."""
        with exclusive(self.path):
            use = store_use(self._root)
            if use is StoreUse.OTHER:
                raise StoreBusyError(f"{self._root} is open in another program, which keeps {self.path.name} itself")
            if use is StoreUse.CLOSED:
                require_known_format(self._root)
            table = self.read()
            before = dict(table.rows)
            yield table
            if table.rows != before:
                now_ms = time.time_ns() // 1_000_000
                self._file.write(self._format.encode(replace(table, counter=table.counter + 1, timestamp_ms=now_ms)))


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Be the one process that changes this config/*.json inside the block: a lock on `<name>.lock`, which dies with its process."""
    make_folders(path.parent)
    lock = path.with_name(path.name + ".lock")
    with disk_errors("open", lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
