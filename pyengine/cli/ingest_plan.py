"""Who reads what: files are cut into byte ranges, one contiguous share of the input per producer.

A line belongs to the range in which its first byte stands, so any cut is a good one:
the producer of a range skips the line it starts inside of and finishes the line it
ends inside of. Every line is read once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pyengine.errors import UsageError


class Range(NamedTuple):
    """Bytes [start, end) of a file, by line starts."""

    path: str
    start: int
    end: int


def find_files(paths: Sequence[Path], pattern: str | None) -> list[Path]:
    """The files that were named; a folder stands for the regular files under it, in order of name.

    `pattern` (as in a shell) picks among the files of folders. UsageError for a path
    that is not there or a folder without any such file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*")
                            if one.is_file() and (pattern is None or fnmatch(one.name, pattern)))
            if not inside:
                raise UsageError(f"{path} holds no file{f' like {pattern}' if pattern else ''}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{path} does not exist")
    return found


def share_out(files: Sequence[tuple[str, int]], producers: int) -> list[list[Range]]:
    """(path, size) pairs as one list of ranges per producer, equal in bytes to within a few; empty ones left out."""
    total = sum(size for _, size in files)
    bounds = [total * number // producers for number in range(producers + 1)]
    shares: list[list[Range]] = [[] for _ in range(producers)]
    base = 0
    for path, size in files:
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            start, end = max(low - base, 0), min(high - base, size)
            if start < end:
                shares[number].append(Range(path, start, end))
        base += size
    return shares


def read_blocks(file: BinaryIO, start: int, end: int, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """The lines that start in [start, end) as blocks of whole lines, of about `block_bytes`, newlines included.

    `file` is seekable and buffered. The last line of the file may lack its newline.
    """
    if start:
        file.seek(start - 1)
        file.readline()
    else:
        file.seek(0)
    position = file.tell()
    while position < end:
        block = file.read(min(block_bytes, end - position))
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()
        position += len(block)
        yield block


def split_lines(block: bytes) -> list[bytes]:
    """The lines of a block without their newlines."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def size_of(path: Path) -> int:
    """A file's size; UsageError if it is no regular file (its end is not known)."""
    state = os.stat(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path} is no regular file; give - to read standard input")
    return state.st_size
