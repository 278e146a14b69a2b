"""Whole records out of damaged segments: where they stand, and what lies between them.

A record counts when its lengths add up, it names its own offset, and its CRC fits.
Behind damage the next one is looked for byte by byte at its magic number, whatever
stands around it, so that a good record between two bad ones is not lost. Only a
message body forged to look like a record at its very place can deceive this, and only
inside a damaged record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyengine.formats.constants import MESSAGE_MAGIC
from pyengine.formats.paths import parse_segment_name
from pyengine.formats.record import BEGIN, MAGIC_AT
from pyengine.formats.record_case import CaseLabel
from pyengine.native.scan import classify, walk
from pyengine.storage.mapped_file import mapped, used_end

_MAGIC = MESSAGE_MAGIC.to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class Run:
    """Whole records, one behind the other, in [start, end)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Bytes of [start, end) that are no whole records; `reason` is what stands at the start."""

    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class Blank:
    """The blank in [start, end) that closes a segment."""

    start: int
    end: int


def list_damaged_segments(folder: Path) -> list[tuple[int, Path]]:
    """(start offset, path) of every 20-digit file, whatever its length; other files are left out."""
    found = []
    for name in os.listdir(folder):
        start = parse_segment_name(name)
        if start is not None and (folder / name).is_file():
            found.append((start, folder / name))
    return sorted(found)


def carve(path: Path, base: int, size_bytes: int) -> Iterator[tuple[Run | Skipped | Blank, memoryview]]:
    """Runs, skipped ranges and the blank of one segment in order, each with its bytes; `size_bytes` is what it should have.

    Zeros up to the segment's end are left out. The bytes are valid until the next one is asked for.
    """
    if path.stat().st_size == 0:
        return
    with mapped(path) as mapping, memoryview(mapping) as view:
        end = base + min(len(view), size_bytes)
        data_end = min(end, base + used_end(path))
        at = base
        while at < data_end:
            result = walk(mapping, base, at, end)
            if result.end_offset > at:
                with view[at - base : result.end_offset - base] as piece:
                    yield Run(at, result.end_offset), piece
                at = result.end_offset
            if at >= data_end or result.reason == CaseLabel.RANGE_END:
                return
            if result.reason == CaseLabel.BLANK and BEGIN.unpack_from(view, at - base)[0] == base + size_bytes - at:
                with view[at - base : end - base] as piece:  # what follows the blank's head is undefined
                    yield Blank(at, base + size_bytes), piece
                return
            following = _next_record(mapping, base, at + 1, end)
            stop = data_end if following is None else following
            with view[at - base : stop - base] as piece:
                yield Skipped(at, stop, str(result.reason)), piece
            at = stop


def _next_record(view, base: int, start: int, end: int) -> int | None:
    """The first whole record that begins in [start, end)."""
    found = view.find(_MAGIC, start - base + MAGIC_AT, end - base)
    while found >= 0:
        at = found - MAGIC_AT
        if classify(view, at, end - base - at, base + at) == CaseLabel.MESSAGE:
            return base + at
        found = view.find(_MAGIC, found + 1, end - base)
    return None
