"""One mapped index file (csrc/index_file.cdef.h)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import InvariantError
from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.native.flush import raise_disk_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import CData, ms_index_progress

PROGRESS_BYTES = lib.MS_INDEX_PROGRESS_BYTES
ALL_KEYS = 1 << 62  # more than any record has


class IndexFile:
    """The file's header, chains and newest entries, over a writable mapping of its whole length.

    The mapping must not be closed before `release` was called. With `written_to` (a descriptor, which is closed then
    too) nothing is stored into the mapping: it is written, and DiskFullError tells of a disk without room.
    """

    def __init__(self, mapping: Buffer, number: int, layout: IndexLayout, written_to: int | None = None) -> None:
        memory = ffi.from_buffer("uint8_t[]", mapping, require_writable=True)
        if len(memory) != layout.size_bytes or layout.max_hash_slot_num < 1 or layout.max_index_num < 1:
            raise InvariantError(f"an index file of {len(memory)} bytes does not have the layout {layout}")
        self._memory = memory
        self._written_to = written_to
        self.struct = ffi.new(
            "struct ms_index_file *",
            {"base": memory, "number": number, "slots": layout.max_hash_slot_num, "entries": layout.max_index_num,
             "is_written": written_to is not None, "fd": -1 if written_to is None else written_to},
        )

    def header(self) -> IndexHeader:
        found = ffi.new("struct ms_index_header *")
        lib.ms_index_read_header(self.struct, found)
        return IndexHeader(
            found.begin_timestamp_ms,
            found.end_timestamp_ms,
            found.begin_physical_offset,
            found.end_physical_offset,
            found.hash_slot_count,
            found.index_count,
        )

    def inherit(self, predecessor: IndexHeader) -> None:
        """Begin and end of an empty file become the end of the full one before it."""
        _check(lib.ms_index_inherit(self.struct, ffi.new("struct ms_index_header *", tuple(predecessor))))

    def roll_back(self, progress: ms_index_progress) -> bool:
        """Undo the put that `progress` says is unfinished, if it is this file's."""
        return bool(_check(lib.ms_index_roll_back(self.struct, progress)))

    def newest_offset(self) -> int:
        """The record of the newest entry, -1 without entries."""
        return lib.ms_index_newest_offset(self.struct)

    def count_tail(self, physical_offset: int) -> int:
        """How many entries at the end are the keys of the record at `physical_offset`."""
        return lib.ms_index_count_tail(self.struct, physical_offset)

    def release(self) -> None:
        """Release the mapping."""
        self.struct.base = ffi.NULL
        ffi.release(self._memory)
        if self._written_to is not None:
            os.close(self._written_to)
            self._written_to = None


def _check(code: int) -> int:
    if code < 0:
        raise_disk_error(code, "write an index file", None)
    return code


def new_progress() -> ms_index_progress:
    """A `struct ms_index_progress *` of this process alone."""
    return ffi.new("struct ms_index_progress *")


def progress_at(memory: Buffer | CData) -> ms_index_progress:
    """The progress area in shared memory: any cffi pointer, or an object with a writable buffer of 256 bytes.

    The caller keeps the memory alive.
    """
    if not isinstance(memory, ffi.CData):
        area = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
        if len(area) < PROGRESS_BYTES:
            raise InvariantError(f"an index progress area has {PROGRESS_BYTES} bytes, not {len(area)}")
        memory = area
    return ffi.cast("struct ms_index_progress *", memory)


def is_putting(progress: ms_index_progress) -> bool:
    """True when a put was cut short."""
    return progress.putting != 0


def forget(progress: ms_index_progress) -> None:
    """Drop an undo whose file is gone. Only for who owns the area, before it puts."""
    progress.putting = 0


def key_hash(topic: bytes, key: bytes) -> int:
    """|String.hashCode| of topic # key, 0 for the smallest int."""
    return lib.ms_index_key_hash(topic, len(topic), key, len(key))
