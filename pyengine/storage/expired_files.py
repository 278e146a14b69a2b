"""Files of queues, their extensions and the index that nothing in the log needs any more.

The rules are RocketMQ's (CleanConsumeQueueService): queues and index follow the log. A
file goes when everything in it lies below the log's first byte; never the last file of a
queue or of the index, which says where to go on.

    a queue's file       its last entry's record lies below        (MappedFileQueue.deleteExpiredFileByOffset)
    an extension file    the queue's first living entry points after it (ConsumeQueueExt.truncateByMinAddress)
    an index file        its last key's record lies below          (IndexService.deleteExpiredFile)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pyengine.errors import disk_error
from pyengine.formats.constants import CQ_ENTRY_BYTES, INDEX_HEADER_BYTES
from pyengine.formats.consume_queue import ENTRY, decode_ext_address, is_ext_address, is_filler, is_live
from pyengine.formats.index_file import unpack_header
from pyengine.formats.paths import StorePaths, is_queue_id_name, parse_segment_name
from pyengine.storage.mapped_file import index_file_names, is_folder

_CHUNK_ENTRIES = 3276


def queue_folders(paths: StorePaths) -> Iterator[tuple[str, int, Path]]:
    """(topic, queue id, folder) of every queue, in no particular order; foreign names are passed over."""
    for topic in _folders(paths.consume_queue):
        for queue in _folders(topic):
            if is_queue_id_name(queue.name):
                yield topic.name, int(queue.name), queue


def expired_queue_files(folder: Path, size_bytes: int, log_min: int) -> list[Path]:
    """The queue's files to delete, oldest first."""
    starts = _starts(folder)
    expired = []
    for start in starts[:-1]:
        path = folder / f"{start:020d}"
        entry = _entry(path, size_bytes - CQ_ENTRY_BYTES)
        if entry is None or not is_live(entry) or (not is_filler(entry) and entry[0] >= log_min):
            break
        expired.append(path)
    return expired


def expired_ext_files(folder: Path, ext_folder: Path, ext_size_bytes: int, log_min: int) -> list[Path]:
    """The extension files of a queue to delete, oldest first; the queue's own files must have been deleted before."""
    ext_starts = _starts(ext_folder)
    if len(ext_starts) < 2:
        return []
    tags_code = _first_living_tags_code(folder, log_min)
    if tags_code is None or not is_ext_address(tags_code):
        return []
    first_used = decode_ext_address(tags_code)
    return [ext_folder / f"{start:020d}" for start in ext_starts[:-1] if start + ext_size_bytes < first_used]


def expired_index_files(folder: Path, log_min: int) -> list[Path]:
    """The index files to delete, oldest first."""
    try:
        names = index_file_names(folder)
    except FileNotFoundError:
        return []
    expired = []
    for name in names[:-1]:
        data = _read(folder / name, 0, INDEX_HEADER_BYTES)
        if len(data) < INDEX_HEADER_BYTES or unpack_header(data).end_physical_offset >= log_min:
            break
        expired.append(folder / name)
    return expired


def _first_living_tags_code(folder: Path, log_min: int) -> int | None:
    """Tags code of the first entry whose record is still in the log; looked for in the first file, as RocketMQ does."""
    starts = _starts(folder)
    if not starts:
        return None
    path, at = folder / f"{starts[0]:020d}", 0
    while chunk := _read(path, at, _CHUNK_ENTRIES * CQ_ENTRY_BYTES):
        for entry in ENTRY.iter_unpack(chunk[: len(chunk) // CQ_ENTRY_BYTES * CQ_ENTRY_BYTES]):
            if not is_live(entry):
                return None
            if entry[0] >= log_min and not is_filler(entry):
                return int(entry[2])
        at += len(chunk)
    return None


def _entry(path: Path, at: int) -> tuple[int, int, int] | None:
    data = _read(path, at, CQ_ENTRY_BYTES)
    return ENTRY.unpack(data) if len(data) == CQ_ENTRY_BYTES else None


def _read(path: Path, at: int, length: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise disk_error(error, "open", path) from error
    try:
        return os.pread(descriptor, length, at)
    except OSError as error:
        raise disk_error(error, "read", path) from error
    finally:
        os.close(descriptor)


def _starts(folder: Path) -> list[int]:
    try:
        return sorted(start for name in os.listdir(folder) if (start := parse_segment_name(name)) is not None)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if is_folder(entry)]
    except FileNotFoundError:
        return []
