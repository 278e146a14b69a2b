"""Calls on files, and the rounds of flusher and committer (csrc/flush, group_commit, pool_commit .cdef.h)."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from pyengine._native import ffi, lib
from pyengine.errors import DiskError, DiskFullError, FlushError, disk_errors
from pyengine.native.control import raise_os_error
from pyengine.native.scan import REASONS

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, CData, ms_control, ms_pool_commit, ms_reput, ms_store_stats
    from pyengine.native.recorder import Recorder
    from pyengine.native.waiting import Latch, Stream

monotonic_ns = time.monotonic_ns  # CLOCK_MONOTONIC, comparable between processes of one boot
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A store into a mapping needs blocks for the whole folio, which lies at a multiple of its own size. So blocks for stores are allocated
# up to multiples of this, the largest folio of a file.
FOLIO_BYTES_MAX = mmap.PAGESIZE << 9
_ZERO_PIECE_BYTES = 65536
write_in_place = lib.ms_new_file_in_place  # turn copy-on-write off for an empty file, if its file system has it; best effort


def raise_disk_error(code: int, what: str, path: str | None, kind: type[DiskError] = DiskError) -> NoReturn:
    """Raise the exception for the -errno `code` of a failed `what`: DiskFullError, or `kind`."""
    number = -code
    if number in _FULL and kind is DiskError:
        kind = DiskFullError
    where = f" {path}" if path else ""
    raise kind(f"{what}{where}: {os.strerror(number)}", errno=number, path=path)


def checked(code: int, what: str, path: str | None = None, kind: type[DiskError] = DiskError) -> int:
    """Return the result of a call in C; for -errno raise as raise_disk_error()."""
    if code < 0:
        raise_disk_error(code, what, path, kind)
    return code


def fdatasync(fd: int, path: str | None = None) -> None:
    """Make the file's data durable; a FlushError is final: a second sync proves nothing."""
    checked(lib.ms_flush_fdatasync(fd), "fdatasync", path, FlushError)


def sync_file_system(folder: str | os.PathLike[str]) -> bool:
    """Make all files and names of the file system of `folder` durable; afterwards call check_written() for each file.

    Return False if the kernel refused: then sync each file.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return lib.ms_flush_file_system(descriptor) == 0
    finally:
        os.close(descriptor)


def check_written(fd: int, path: str | None = None) -> None:
    """Raise FlushError if the kernel has failed to write back a page of the file."""
    checked(lib.ms_flush_check(fd), "write back", path, FlushError)


def start_writing(fd: int) -> int:
    """Start the write-back of the file's dirty pages, so that a later fsync waits less; return 0 or the errno (harmless)."""
    return -lib.ms_flush_start(fd)


def pwrite_all(fd: int, data: Buffer | CData, at: int, path: str | None = None, length: int | None = None) -> None:
    """Write all of `data` (bytes, or a cffi pointer with `length`) at byte `at`; DiskFullError if the disk is full."""
    memory = data if isinstance(data, ffi.CData) else ffi.from_buffer("uint8_t[]", data)
    checked(lib.ms_flush_pwrite_all(fd, memory, ffi.sizeof(memory) if length is None else length, at), "write", path)


def allocate(fd: int, offset: int, length: int, path: str | None = None) -> None:
    """Allocate blocks for [offset, offset+length) of a file, whose length stays; DiskFullError if the disk is full."""
    checked(lib.ms_flush_allocate(fd, offset, length), "allocate", path)


def punch(fd: int, offset: int, length: int) -> int:
    """Free the blocks of a range, mapped or not; return 0 or the errno (EOPNOTSUPP: not on this file system)."""
    return -lib.ms_flush_punch(fd, offset, length)


def renew(fd: int, offset: int, length: int, path: str | None = None) -> None:
    """Make [offset, offset+length) blocks of zeros with new pages, mapped or not; no effect if the file system cannot."""
    checked(lib.ms_flush_renew(fd, offset, length), "zero", path)


def zero_range(fd: int, offset: int, length: int, path: str | None = None) -> int:
    """Zero what is not zero yet in [offset, offset+length), without touching pages of zeros; return the number of bytes rewritten."""
    done, end = 0, offset + length
    while offset < end:
        with disk_errors("zero", path):
            found = os.pread(fd, min(end - offset, _ZERO_PIECE_BYTES), offset)
        if not found:
            break  # the end of the file
        if found.count(0) < len(found):
            pwrite_all(fd, bytes(len(found)), offset, path)
            done += len(found)
        offset += len(found)
    return done


def lock_memory(base: CData, length: int) -> int:
    """Lock memory with mlock; return 0 or the errno (ENOMEM or EPERM: the memlock limit is too low)."""
    return -lib.ms_memory_lock(base, length)


def file_system(fd: int) -> int:
    """Return the magic number of the file system of `fd` (statfs); OSError if that fails."""
    found = lib.ms_new_file_system(fd)
    raise_os_error(found)
    return found


GROUP_SEGMENT: int = lib.MS_GROUP_SEGMENT
GROUP_FAILED: int = lib.MS_GROUP_FAILED
GROUP_SEGMENTS_MAX: int = lib.MS_GROUP_SEGMENTS_MAX


class GroupCommit:
    """The flusher's rounds: sync what is committed, publish `flushed`, wake the puts that wait."""

    def __init__(self, control: ms_control, semaphore: CData, incarnation: int, stats: ms_store_stats,
                 recorder: Recorder) -> None:
        """`semaphore`: of the flusher's latch. `incarnation`: the flusher incarnation
        that the writer must have verified. `stats` counts each fdatasync and must outlive this object."""
        self._state = ffi.new("struct ms_group_commit *")
        self._state.control = control
        self._state.semaphore = semaphore
        self._state.segment_bytes = control.identity.segment_bytes
        self._state.incarnation = incarnation
        self._recorder = recorder
        self._state.recorder = recorder.handle
        self._state.latency = ffi.addressof(stats.sync, "latency")

    def follow_writer(self) -> None:
        """Keep this thread on the writer's CPU (csrc/cpu.cdef.h)."""
        lib.ms_affinity_begin(ffi.addressof(self._state, "affinity"))

    def use(self, descriptors: Mapping[int, int]) -> None:
        """Set the open segments (start offset -> descriptor); only the oldest GROUP_SEGMENTS_MAX are used."""
        oldest = sorted(descriptors)[:GROUP_SEGMENTS_MAX]
        for at, base in enumerate(oldest):
            self._state.base[at] = base
            self._state.fd[at] = descriptors[base]
        self._state.count = len(oldest)

    def run(self, deadline_ns: int, busy_ns: int) -> int:
        """Sync what is committed and sleep on the latch in between; return GROUP_SEGMENT if a segment must be opened, GROUP_FAILED,
        or another number at the deadline or `busy_ns` after the first sync."""
        return lib.ms_group_commit_run(self._state, deadline_ns, busy_ns)

    def once(self) -> bool:
        """Do one round without sleeping, and wake all that wait; return whether `flushed` moved.

        LookupError if a segment must be opened, OSError if a sync failed."""
        self._state.has_published = 0
        moved = lib.ms_group_commit_once(self._state)
        if moved == -GROUP_SEGMENT:
            raise LookupError("a segment is not open yet")
        if moved == -GROUP_FAILED:
            raise OSError(self._state.error_number, "fdatasync")
        return moved == 1

    @property
    def failure(self) -> tuple[int, int]:
        """Return (errno, start of the segment) after GROUP_FAILED."""
        return self._state.error_number, self._state.failed_base


SEGMENT: int = lib.MS_COMMIT_SEGMENT
FAILED: int = lib.MS_COMMIT_FAILED
BROKEN: int = lib.MS_COMMIT_BROKEN


class LoopSegment:
    """Keeps the mapping of the segment that a C loop reads, in the fields `view` and `base` of its struct."""

    def __init__(self, loop: ms_pool_commit | ms_reput) -> None:
        self._loop = loop
        self._data: Array[int] | None = None

    def use(self, view: Buffer | None, base: int) -> None:
        """Set the mapping of the segment that begins at `base`; with None the caller may unmap the previous one."""
        self._loop.base = -1
        if self._data is not None:
            ffi.release(self._data)
            self._data = None
        if view is not None:
            self._data = ffi.from_buffer("uint8_t[]", view)
            self._loop.view = self._data
            self._loop.base = base


class PoolCommitLoop:
    """The committer's rounds: wait, write pool bytes into the file, publish `committed`, wake those that wait for it.

    What its `struct ms_pool_commit` points to must outlive it.
    """

    def __init__(self, control: ms_control, latch: Latch, reputter: Latch, replicator: Latch | None, *, piece_bytes: int,
                 stream: Stream, recorder: Recorder) -> None:
        """Begin at the published `committed`. `latch` is the committer's; commits wake `reputter` and `replicator`."""
        self._loop = ffi.new("struct ms_pool_commit *")
        self._references = latch, reputter, replicator, recorder
        self._loop.recorder = recorder.handle
        self._segment = LoopSegment(self._loop)
        self._loop.control = control
        self._loop.semaphore = latch.semaphore
        self._loop.reputter_semaphore = reputter.semaphore
        self._loop.replicator_semaphore = replicator.semaphore if replicator is not None else ffi.NULL
        self._loop.segment_bytes = control.identity.segment_bytes
        self._loop.piece_bytes = piece_bytes
        self._loop.committed = lib.ms_load_i64(ffi.addressof(control.committed, "value"))
        self._loop.base = self._loop.fd = -1
        lib.ms_stream_begin(ffi.addressof(self._loop, "stream"), *stream)

    @property
    def committed(self) -> int:
        """The offset below which everything is in the files and published."""
        return self._loop.committed

    @property
    def error_number(self) -> int:
        """The errno of the write, after FAILED."""
        return self._loop.error_number

    @property
    def reason(self) -> str:
        """What is at `committed` instead of a record, after BROKEN (native.scan.REASONS)."""
        return REASONS[self._loop.reason]

    def use_segment(self, view: Buffer | None, base: int = -1, fd: int = -1) -> None:
        """Set the pool buffer and the file of the segment that begins at `base`; with None the caller may close the previous ones."""
        self._segment.use(view, base)
        self._loop.fd = fd

    def run(self, until_ns: int, *, may_sleep: bool = False) -> int:
        """Commit until CLOCK_MONOTONIC `until_ns`; return SEGMENT (one must be provided), FAILED, BROKEN or another number.

        With `may_sleep` wait on the armed latch when nothing is left to commit.
        """
        return lib.ms_pool_commit_run(self._loop, until_ns, may_sleep)
