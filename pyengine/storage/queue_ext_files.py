"""The files of consume queue extensions, for whoever appends to them: where one ends, opening, making.

The end is that of the unit with the highest address that an entry of the queue names
(ConsumeQueueExt.truncateByMaxAddress). What stands behind it was written by somebody
who was killed before the entry: it is cleared, so that a walk from unit to unit, as
RocketMQ makes it at a start, never meets leftovers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pyengine.errors import StoreRefusedError, disk_error
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_UNIT_BYTES_MIN
from pyengine.formats.consume_queue import ENTRY, decode_ext_address, is_ext_address
from pyengine.formats.paths import segment_name
from pyengine.storage.durable_writes import sync_file
from pyengine.storage.file_zeros import clear_file_from, used_end
from pyengine.storage.new_file import create_file, sync_folder
from pyengine.storage.segment_files import SegmentFile, list_segments

WINDOW_BYTES = 65536
_CHUNK_BYTES = 3276 * CQ_ENTRY_BYTES


def settle_ext_end(queue_folder: Path, ext_folder: Path, queue_file_bytes: int, ext_file_bytes: int) -> int:
    """Where the next unit goes; what stands behind it is cleared. May be done twice.

    Raises StoreRefusedError for a foreign file or a wrong length in either folder, DiskError.
    """
    files = list_segments(ext_folder, ext_file_bytes)
    end = _end_of_named(list_segments(queue_folder, queue_file_bytes), files, ext_file_bytes) if files else 0
    removed = False
    for file in reversed(files):
        if file.start_offset >= end:
            file.path.unlink(missing_ok=True)
            removed = True
        elif file.start_offset + ext_file_bytes > end and used_end(file.path) > end - file.start_offset:
            clear_file_from(file.path, end - file.start_offset)
    if removed:
        sync_folder(ext_folder)
    return end


def _end_of_named(queue: list[SegmentFile], files: list[SegmentFile], file_bytes: int) -> int:
    for address in _addresses_backwards(queue):
        for file in files:
            if file.start_offset <= address < file.start_offset + file_bytes:
                with open(file.path, "rb") as opened:
                    opened.seek(address - file.start_offset)
                    size_bytes = int.from_bytes(opened.read(2), "big", signed=True)
                if CQ_EXT_UNIT_BYTES_MIN <= size_bytes <= file.start_offset + file_bytes - address:
                    return address + size_bytes
    return 0


def _addresses_backwards(queue: list[SegmentFile]) -> Iterator[int]:
    """What the queue's entries name in the extension, the newest entry first."""
    for file in reversed(queue):
        with open(file.path, "rb") as opened:
            end = used_end(file.path)
            end += -end % CQ_ENTRY_BYTES
            while end > 0:
                start = max(0, end - _CHUNK_BYTES)
                opened.seek(start)
                chunk = opened.read(end - start)
                for at in range(len(chunk) - CQ_ENTRY_BYTES, -1, -CQ_ENTRY_BYTES):
                    tags_code = ENTRY.unpack_from(chunk, at)[2]
                    if is_ext_address(tags_code):
                        yield decode_ext_address(tags_code)
                end = start


def open_ext_file(folder: Path, file_bytes: int, offset: int) -> tuple[int, int, int]:
    """Open the file that holds byte `offset` of the extension, making it if need be: (descriptor, its first byte's
    place, bytes that certainly have blocks or -1). Raises DiskFullError, DiskError, StoreRefusedError."""
    start = offset - offset % file_bytes
    path = folder / segment_name(start)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        allocated = min(WINDOW_BYTES, file_bytes)
        return create_file(folder, path.name, file_bytes, allocate=allocated), start, allocated
    except OSError as error:
        raise disk_error(error, "open", path) from error
    length = os.fstat(fd).st_size
    if length != file_bytes:
        os.close(fd)
        raise StoreRefusedError(f"{path} has {length} bytes, not {file_bytes}, the size of its like")
    return fd, start, -1


def sync_ext(folder: Path, file_bytes: int) -> None:
    """fsync all files of an extension; raises FlushError."""
    for file in list_segments(folder, file_bytes):
        sync_file(file.path)
