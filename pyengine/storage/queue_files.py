"""The files of consume queues, for whoever appends to them: where a queue ends, opening, making.

A queue file has its full length at once but gets its blocks in 64 KiB windows
ahead of the entries, so that many queues do not need room for many full files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, StoreRefusedError, disk_error, disk_errors
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES, is_filler
from pyengine.formats.paths import segment_name
from pyengine.native.consume_queue import count_entries, fill
from pyengine.storage.new_file import create_file, create_files, sync_folder
from pyengine.storage.segment_files import list_segments

WINDOW_BYTES = 65536


class QueueEnd(NamedTuple):
    """`next_offset` is the queue offset behind the last real entry, 0 without any; `max_physical` the physical
    end of that entry's message, -1 without any."""

    next_offset: int
    max_physical: int


EMPTY = QueueEnd(0, -1)


def find_queue_end(folder: Path, file_bytes: int) -> QueueEnd:
    """Where the queue in `folder` ends; zeros end the data, filler alone is none.

    Raises StoreRefusedError for a foreign file or a wrong length, DiskError when it cannot be read.
    """
    for segment in reversed(list_segments(folder, file_bytes)):
        fd = _open(segment.path, os.O_RDONLY)
        try:
            count = count_entries(fd, file_bytes, str(segment.path))
            if count:
                entry = ENTRY.unpack(os.pread(fd, CQ_ENTRY_BYTES, (count - 1) * CQ_ENTRY_BYTES))
                if not is_filler(entry):
                    return QueueEnd(segment.start_offset // CQ_ENTRY_BYTES + count, entry[0] + entry[1])
        finally:
            os.close(fd)
    return EMPTY


def remove_void_files(folder: Path, file_bytes: int) -> None:
    """Delete the queue's files that hold nothing but filler and zeros, left behind by a start that was cut short."""
    removed = False
    for segment in list_segments(folder, file_bytes):
        data = segment.path.read_bytes()
        fillers = 0
        while data.startswith(FILLER_BYTES, fillers):
            fillers += CQ_ENTRY_BYTES
        if data.count(0, fillers) == len(data) - fillers:
            segment.path.unlink()
            removed = True
    if removed:
        sync_folder(folder)


def sync_names(folder: Path) -> None:
    """Make the names of a queue's folders durable: who made them may have died before it did that."""
    if folder.is_dir():
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)


def begin_queues(folders: Sequence[Path], file_bytes: int) -> bool:
    """Make the first files of queues that begin at 0, together, durable; False where that cannot be done (create_files)."""
    return create_files([folder / segment_name(0) for folder in folders], file_bytes, allocate=min(WINDOW_BYTES, file_bytes))


def open_queue_file(folder: Path, file_bytes: int, position: int, *, may_make: bool = True) -> tuple[int, int, int]:
    """Open the file that holds entry `position`, making it if need be: (descriptor, its first byte's place in the
    queue, bytes that certainly have blocks or -1).

    A new file whose first entries will never come gets filler in front (docs/formats.md section 8.3).
    Raises DiskFullError, DiskError (also for a missing file that nobody `may_make`), StoreRefusedError.
    """
    byte = position * CQ_ENTRY_BYTES
    start = byte - byte % file_bytes
    path = folder / segment_name(start)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if not may_make:
            raise DiskError(f"{path} is gone: somebody else has changed the store", errno=errno.ENOENT, path=str(path)) from None
        return (*_create(folder, path, file_bytes, start, byte - start),)
    except OSError as error:
        raise disk_error(error, "open", path) from error
    length = os.fstat(fd).st_size
    if length != file_bytes:
        os.close(fd)
        raise StoreRefusedError(f"{path} has {length} bytes, not {file_bytes}, the size of its like")
    return fd, start, -1


def _create(folder: Path, path: Path, file_bytes: int, start: int, filler_bytes: int) -> tuple[int, int, int]:
    window_end = filler_bytes + WINDOW_BYTES - filler_bytes % WINDOW_BYTES
    allocated = min(window_end, file_bytes)
    fd = create_file(folder, path.name, file_bytes, allocate=allocated)
    if filler_bytes:
        try:
            fill(fd, filler_bytes, str(path))
        except BaseException:
            os.close(fd)
            raise
    return fd, start, allocated


def _open(path: Path, flags: int) -> int:
    with disk_errors("open", path):
        return os.open(path, flags | os.O_CLOEXEC)
