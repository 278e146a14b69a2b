"""Byte for byte comparison of two stores: the log up to its end, the queues, the index files' contents.

What may differ, and is masked: the filler behind a blank record's eight header bytes (RocketMQ's pool
leaves an older file's bytes there), and index file names (the wall clock).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BLANK_HEADER_BYTES = 8
DIFFERENCES_MAX = 10


def log_differences(ours: Path, theirs: Path, records: Sequence[dict[str, Any]], segment_bytes: int) -> list[str]:
    """Return where our log differs from theirs in the range that `records` cover, record by record; then what follows it.

    `records` are rows with `phy`, `size` and perhaps `blank`, as a manifest or a verify document holds
    them. Behind the last one our log must be zeros to the end of its segment.
    """
    found: list[str] = []
    mine, other = Segments(ours, segment_bytes), Segments(theirs, segment_bytes)
    for number, record in enumerate(records):
        length = BLANK_HEADER_BYTES if record.get("blank") else record["size"]
        a, b = mine.read(record["phy"], length), other.read(record["phy"], length)
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            found.append(f"record {number} at {record['phy']} ({length} bytes) differs at byte {at}: {a[at:at + 8].hex()} "
                         f"instead of {b[at:at + 8].hex()}")
            if len(found) == DIFFERENCES_MAX:
                return found
    end = records[-1]["phy"] + records[-1]["size"] if records else 0
    rest = mine.read(end, -end % segment_bytes)
    if any(rest):
        found.append(f"the log goes on behind its end {end}: {rest[:16].hex()}")
    return found


def queue_differences(ours: Path, theirs: Path) -> list[str]:
    """Return where the files under consumequeue/ differ; a file of zeros counts as none."""
    mine, other = _contents(ours / "consumequeue"), _contents(theirs / "consumequeue")
    return list(_file_differences(mine, other))


def index_differences(ours: Path, theirs: Path) -> list[str]:
    """Return where the index files differ, oldest against oldest."""
    mine = dict(enumerate(_contents(ours / "index").values()))
    other = dict(enumerate(_contents(theirs / "index").values()))
    return list(_file_differences(mine, other))


class Segments:
    """Reads ranges of a folder of commit log segments."""

    def __init__(self, root: Path, segment_bytes: int) -> None:
        self.folder = root / "commitlog"
        self.segment_bytes = segment_bytes
        self.loaded: tuple[int, bytes] = (-1, b"")

    def read(self, at: int, length: int) -> bytes:
        """[at, at + length) of one segment; empty where there is no such segment."""
        start = at - at % self.segment_bytes
        if self.loaded[0] != start:
            path = self.folder / f"{start:020d}"
            self.loaded = (start, path.read_bytes() if path.exists() else b"")
        return self.loaded[1][at - start : at - start + length]


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    read = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: data for name, data in read.items() if any(data)}


def _file_differences(mine: dict, other: dict) -> Iterable[str]:
    for name in sorted(mine.keys() | other.keys()):
        a, b = mine.get(name), other.get(name)
        if a is None or b is None:
            yield f"{name}: {'missing here' if a is None else 'only here'}"
        elif a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            yield (f"{name}: {len(a)} and {len(b)} bytes, first difference at {at}: "
                       f"{a[at:at + 20].hex()} instead of {b[at:at + 20].hex()}")
