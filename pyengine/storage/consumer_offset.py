"""How far consumer groups have read: `config/consumerOffset.json` (ConsumerOffsetManager, docs/formats.md section 12).

`{"offsetTable": {"topic@group": {"queueId": next offset}}}`, the same file as RocketMQ's
broker keeps. Several processes may commit: each change is a read, a change and a whole
new file under one lock, so none is lost; a crash leaves the old file or the new one.
While a broker has the store open the file is its own, and commits are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import DiskError, FormatError, StoreBusyError, UsageError
from pyengine.formats.json_config import decode_config, encode_config
from pyengine.formats.paths import StorePaths
from pyengine.storage.new_file import make_folders, write_config
from pyengine.storage.read_level import StoreUse, store_use

SEPARATOR = "@"


class ConsumerOffsets:
    """The groups' offsets of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self._path = StorePaths(root).config / "consumerOffset.json"

    def read(self, topic: str, group: str) -> dict[int, int]:
        """Queue id -> the next offset that the group wants; empty for a group that never committed."""
        return dict(self._table().get(_key(topic, group), {}))

    def commit(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Remember these queues' next offsets, durable before this returns; other queues and groups keep theirs.

        StoreBusyError while a RocketMQ broker has the store open.
        """
        key = _key(topic, group)
        with self._exclusive():
            if store_use(self._root) is StoreUse.OTHER:
                raise StoreBusyError(f"{self._root} is open in another program, which keeps the groups' offsets itself")
            table = self._table()
            table[key] = dict(sorted((table.get(key, {}) | dict(offsets)).items()))
            write_config(self._path, encode_config({"offsetTable": dict(sorted(table.items()))}).encode())

    def groups(self) -> dict[tuple[str, str], dict[int, int]]:
        """(topic, group) -> offsets, of everybody."""
        pairs = ((key.partition(SEPARATOR), offsets) for key, offsets in self._table().items())
        return {(topic, group): dict(offsets) for (topic, _, group), offsets in pairs}

    def _table(self) -> dict[str, dict[int, int]]:
        """The file, or its `.bak` where the file is missing or no JSON; empty where both are."""
        for path in (self._path, self._path.with_name(self._path.name + ".bak")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, UnicodeDecodeError, FormatError):
                return _decode(path.read_text(encoding="utf-8"))
        return {}

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        make_folders(self._path.parent)
        path = self._path.with_name(self._path.name + ".lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DiskError(f"cannot open {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _key(topic: str, group: str) -> str:
    if not topic or not group or SEPARATOR in group or SEPARATOR in topic:
        raise UsageError(f"topic {topic!r} and group {group!r} must be given and hold no {SEPARATOR}")
    return f"{topic}{SEPARATOR}{group}"


def _decode(text: str) -> dict[str, dict[int, int]]:
    """The offset table; FormatError if the text has another shape. An empty file is no table."""
    document: Any = decode_config(text)
    try:
        return {key: {int(queue_id): int(offset) for queue_id, offset in offsets.items()}
                for key, offsets in document["offsetTable"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"consumerOffset.json has an unknown shape: {error}") from error
