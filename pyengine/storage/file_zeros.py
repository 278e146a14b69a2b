"""Where a file is not zero, and making it so. Holes are skipped, not read: a queue file is mostly hole.

File times are kept where only zeros are written, because RocketMQ finds a queue file
by its time (MappedFileQueue.getMappedFileByTime).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from pyengine.native.failpoint import failpoint
from pyengine.storage.durable_writes import open_file, pwrite_all, sync_descriptor

_CHUNK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_CANNOT_TELL = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS))
_ZEROS = bytes(_CHUNK_BYTES)


def used_end(path: Path, start: int = 0) -> int:
    """The position behind the file's last non-zero byte, or `start` when there is none from there on."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        end = start
        for position, chunk in data_chunks(descriptor, start):
            used = _used(chunk)
            if used:
                end = position + used
        return end
    finally:
        os.close(descriptor)


def clear_file_from(path: Path, start: int, *, zeros_too: bool = False) -> int:
    """Zero a file from byte `start` to its end, durable, length and file time kept.

    Returns how many bytes there were up to the last non-zero one. Holes stay holes, and pages that
    are zero already are not written, unless `zeros_too` asks for it: after a failed sync a
    page may be zero in memory and not on the disk. May be done twice.
    """
    descriptor = open_file(path, os.O_RDWR)
    try:
        status = os.fstat(descriptor)
        end, is_written = start, False
        for position, chunk in data_chunks(descriptor, start):
            used = _used(chunk)
            end = position + used if used else end
            for at in range(0, len(chunk) if zeros_too else used, _PAGE_BYTES):
                page = chunk[at : at + _PAGE_BYTES]
                if zeros_too or _used(page):
                    pwrite_all(descriptor, bytes(len(page)), position + at, path)
                    is_written = True
                    failpoint("zeros_page_written")
        if is_written:
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
            failpoint("zeros_written")
            sync_descriptor(descriptor, path)
        return end - start
    finally:
        os.close(descriptor)


def data_chunks(descriptor: int, start: int) -> Iterator[tuple[int, bytearray]]:
    """(position, bytes) of everything from `start` on that is no hole, at most 1 MiB at a time.

    The bytes are a buffer that the next step overwrites.
    """
    pieces = _data_ranges(descriptor, start)
    buffer = bytearray(min(_CHUNK_BYTES, max((end - position for position, end in pieces), default=0)))
    for position, end in pieces:
        while position < end:
            chunk = buffer if end - position >= len(buffer) else bytearray(end - position)
            count = os.preadv(descriptor, [chunk], position)
            if not count:
                return
            yield position, chunk if count == len(chunk) else chunk[:count]
            position += count


def _data_ranges(descriptor: int, start: int) -> list[tuple[int, int]]:
    """The ranges from `start` on that are no hole; allocated blocks that nobody wrote to count as holes.

    All are looked up before any is read: reading brings in pages behind the range, which
    the kernel would then take for data, and so on to the end of the file. Where a file system
    cannot tell, all of it is data.
    """
    ranges = []
    end = start
    while True:
        try:
            position = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, position, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return ranges
            if error.errno not in _CANNOT_TELL:
                raise
            return [*ranges, (end, os.fstat(descriptor).st_size)]
        ranges.append((position, end))


def _used(chunk: bytes | bytearray) -> int:
    """The length without zeros at the end. Comparing first is ten times as fast where all is zero."""
    zeros = _ZEROS if len(chunk) == _CHUNK_BYTES else bytes(len(chunk))
    return 0 if chunk == zeros else len(chunk.rstrip(b"\0"))
