"""Names in the store's directory: 20-digit segments and the tree around them (section 1).

A segment's name is the whole-log (or whole-queue) offset of its first byte, so
1 GiB segments are called 00000000000000000000, 00000000001073741824, ...
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pyengine.formats.constants import INDEX_NAME_DIGITS, SEGMENT_NAME_DIGITS
from pyengine.formats.log_folders import LogFolders, log_folders

QUEUE_ID_MAX = 2**31 - 1
SEGMENT_START_MAX = (1 << 63) - (1 << 32)


def segment_name(start_offset: int) -> str:
    """20 digits; ValueError for a negative offset."""
    if start_offset < 0:
        raise ValueError(f"a segment cannot start at {start_offset}")
    return f"{start_offset:0{SEGMENT_NAME_DIGITS}d}"


def parse_segment_name(name: str) -> int | None:
    """The start offset, or None when the name is not 20 decimal digits, or its file would end beyond any offset (63 bits)."""
    if len(name) == SEGMENT_NAME_DIGITS and name.isascii() and name.isdigit() and int(name) <= SEGMENT_START_MAX:
        return int(name)
    return None


def is_queue_id_name(name: str) -> bool:
    """True for the name of a queue's folder: its number, without leading zeros; a record has 4 signed bytes for it."""
    return (name.isascii() and name.isdigit() and len(name) <= 10 and (name == "0" or name[0] != "0")
            and int(name) <= QUEUE_ID_MAX)


def is_index_name(name: str) -> bool:
    """True for yyyyMMddHHmmssSSS, the name of an index file."""
    return len(name) == INDEX_NAME_DIGITS and name.isascii() and name.isdigit()


def segment_start(offset: int, size_bytes: int) -> int:
    """The start of the segment that holds `offset`."""
    return offset - offset % size_bytes


@dataclass(frozen=True, slots=True)
class StorePaths:
    """Every path of a store. Nothing is made; only the log's folders are looked up (formats/log_folders.py)."""

    root: Path

    def __init__(self, root: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "root", Path(root))

    @property
    def commit_log(self) -> Path:
        """The log's folder; the first of them when it has several."""
        return log_folders(self.root).writable[0]

    @property
    def commit_log_folders(self) -> LogFolders:
        return log_folders(self.root)

    @property
    def consume_queue(self) -> Path:
        return self.root / "consumequeue"

    @property
    def consume_queue_ext(self) -> Path:
        return self.root / "consumequeue_ext"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @property
    def abort(self) -> Path:
        return self.root / "abort"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def queue_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue / topic / str(queue_id)

    def queue_ext_folder(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue_ext / topic / str(queue_id)

    def commit_log_segment(self, start_offset: int) -> Path:
        """The segment's file: where it is, or, if it is nowhere, in the first folder."""
        return log_folders(self.root).segment(segment_name(start_offset))
