"""Durability and room: system calls on files, and the committer's rounds (csrc/flush, new_file, group_commit, pool_commit .cdef.h).

A round of the committer: wait, write pool bytes into the file, publish, wake those that follow.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from pyengine._native import ffi, lib
from pyengine.errors import DiskError, DiskFullError, FlushError
from pyengine.native.scan import REASONS
from pyengine.native.store_stats import count_syncs

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import Array, CData, ms_control, ms_pool_commit, ms_reput, ms_store_stats
    from pyengine.native.recorder import Recorder
    from pyengine.native.waiting import Latch

_FULL = (errno.ENOSPC, errno.EDQUOT)


def raise_disk_error(code: int, what: str, path: str | None, kind: type[DiskError] = DiskError) -> NoReturn:
    """Raise what the -errno `code` of a failed `what` means: DiskFullError, or `kind`."""
    number = -code
    if number in _FULL and kind is DiskError:
        kind = DiskFullError
    where = f" {path}" if path else ""
    raise kind(f"{what}{where}: {os.strerror(number)}", errno=number, path=path)


def fdatasync(fd: int, path: str | None = None) -> None:
    """Make the file's data durable, or raise FlushError, which is final."""
    code = lib.ms_flush_fdatasync(fd)
    if code:
        raise_disk_error(code, "fdatasync", path, FlushError)


def fsync(fd: int, path: str | None = None) -> None:
    """Make the file (or the names in a folder) durable, or raise FlushError, which is final."""
    code = lib.ms_flush_fsync(fd)
    if code:
        raise_disk_error(code, "fsync", path, FlushError)


def sync_file_system(folder: str | os.PathLike[str]) -> bool:
    """Make all files and names of the file system that `folder` lies on durable; then ask check_written of each file.

    False: it could not be done, sync each file.
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
    """Nothing if the kernel could write what it wrote of the file, or FlushError, which is final."""
    code = lib.ms_flush_check(fd)
    if code:
        raise_disk_error(code, "write back", path, FlushError)


def start_writing(fd: int) -> int:
    """Have the kernel begin to write the file's dirty pages, so that a later fsync waits less; 0 or the errno (harmless)."""
    return -lib.ms_flush_start(fd)


def pwrite_all(fd: int, data: Buffer | CData, at: int, path: str | None = None, length: int | None = None) -> None:
    """Write all of `data` (bytes or a cffi pointer with `length`) at byte `at`; DiskFullError when there is no room."""
    memory = data if isinstance(data, ffi.CData) else ffi.from_buffer("uint8_t[]", data)
    code = lib.ms_flush_pwrite_all(fd, memory, ffi.sizeof(memory) if length is None else length, at)
    if code:
        raise_disk_error(code, "write", path)


def allocate(fd: int, offset: int, length: int, path: str | None = None) -> None:
    """Really allocate [offset, offset+length), extending the file; DiskFullError when there is no room."""
    code = lib.ms_flush_allocate(fd, offset, length)
    if code:
        raise_disk_error(code, "allocate", path)


def punch(fd: int, offset: int, length: int) -> int:
    """Give the blocks of a range back, mapped or not; 0 or the errno (EOPNOTSUPP: not on this file system)."""
    return -lib.ms_flush_punch(fd, offset, length)


def zero_range(fd: int, offset: int, length: int, path: str | None = None) -> int:
    """Zero what is not zero yet in [offset, offset+length); the number of bytes rewritten."""
    done = lib.ms_flush_zero_range(fd, offset, length)
    if done < 0:
        raise_disk_error(done, "zero", path)
    return done


def populate(base: CData, length: int) -> int:
    """Bring pages of a writable mapping in ahead of use; 0 or the errno (harmless: the pages come later)."""
    return -lib.ms_memory_populate(base, length)


def lock_memory(base: CData, length: int) -> int:
    """mlock; 0 or the errno (ENOMEM or EPERM: the memlock limit is too low)."""
    return -lib.ms_memory_lock(base, length)


def current_cpu() -> int:
    """The CPU this process runs on at this moment."""
    return lib.ms_current_cpu()


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in ns, comparable between processes of one boot."""
    return lib.ms_clock_monotonic_ns()


def link_unnamed(fd: int, path: str, folder_fd: int = -100) -> None:  # AT_FDCWD
    """Give the O_TMPFILE file `fd` its name, in `folder_fd` if given, or raise OSError (FileExistsError: taken)."""
    _raise_for(lib.ms_new_file_link(fd, folder_fd, os.fsencode(path)), path)


def rename_exclusive(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Move `source` to `target`, or raise OSError: FileExistsError if taken, EINVAL if the file system cannot say."""
    _raise_for(lib.ms_new_file_rename(os.fsencode(source), os.fsencode(target)), os.fspath(target))


def write_in_place(fd: int) -> None:
    """Have an empty file overwritten in place where its file system would copy on write; best effort."""
    lib.ms_new_file_in_place(fd)


def file_system(fd: int) -> int:
    """The magic number of the file system that `fd` lies on (statfs), or OSError."""
    found = lib.ms_new_file_system(fd)
    if found < 0:
        raise OSError(-found, os.strerror(-found))
    return found


def _raise_for(result: int, path: str) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result), path)


GROUP_TIME: int = lib.MS_GROUP_TIME
GROUP_SEGMENT: int = lib.MS_GROUP_SEGMENT
GROUP_FAILED: int = lib.MS_GROUP_FAILED
GROUP_SEGMENTS_MAX: int = lib.MS_GROUP_SEGMENTS_MAX


class GroupCommit:
    """The flusher's rounds over one engine's memory."""

    def __init__(self, control: ms_control, semaphore: CData, writer_semaphore: CData, segment_bytes: int, incarnation: int,
                 stats: ms_store_stats, recorder: Recorder) -> None:
        """`semaphore`, `writer_semaphore`: of the flusher's own latch and the writer's; `incarnation`: what the
        writer must have verified; `stats`: where each fdatasync is counted (native.store_stats), it must outlive
        this object; `recorder` keeps what took long."""
        self._state = ffi.new("struct ms_group_commit *")
        self._state.control = control
        self._state.semaphore, self._state.writer_semaphore = semaphore, writer_semaphore
        self._state.segment_bytes = segment_bytes
        self._state.incarnation = incarnation
        self._recorder = recorder
        self._state.recorder = recorder.hand
        count_syncs(self._state, stats)

    def follow_writer(self) -> None:
        """From here on this thread runs on the writer's CPU (csrc/cpu.cdef.h)."""
        lib.ms_home_begin(ffi.addressof(self._state, "home"))

    def use(self, descriptors: Mapping[int, int]) -> None:
        """The open segments from here on: start offset -> descriptor; of very many, the oldest GROUP_SEGMENTS_MAX."""
        oldest = sorted(descriptors)[:GROUP_SEGMENTS_MAX]
        for at, base in enumerate(oldest):
            self._state.base[at] = base
            self._state.fd[at] = descriptors[base]
        self._state.count = len(oldest)

    def run(self, deadline_ns: int, busy_ns: int) -> int:
        """Sync whatever is committed, sleep on the latch in between; GROUP_TIME at the deadline or `busy_ns` after the
        first sync, or GROUP_SEGMENT, or GROUP_FAILED."""
        return lib.ms_group_commit_run(self._state, deadline_ns, busy_ns)

    def once(self) -> bool:
        """One round without sleeping: whether `flushed` moved. Raises LookupError (GROUP_SEGMENT) or OSError
        (GROUP_FAILED)."""
        moved = lib.ms_group_commit_once(self._state)
        if moved == -GROUP_SEGMENT:
            raise LookupError("a segment is not open yet")
        if moved == -GROUP_FAILED:
            raise OSError(self._state.error_number, "fdatasync")
        return moved == 1

    @property
    def failure(self) -> tuple[int, int]:
        """After GROUP_FAILED: (errno, start of the segment)."""
        return self._state.error_number, self._state.failed_base


IDLE: int = lib.MS_COMMIT_IDLE
TIME: int = lib.MS_COMMIT_TIME
SEGMENT: int = lib.MS_COMMIT_SEGMENT
FAILED: int = lib.MS_COMMIT_FAILED
BROKEN: int = lib.MS_COMMIT_BROKEN


class MappedSegment:
    """The segment that a loop in C reads: the fields `view` and `base` of its struct."""

    def __init__(self, loop: ms_pool_commit | ms_reput) -> None:
        self._loop = loop
        self._data: Array[int] | None = None

    def use(self, view: Buffer | None, base: int) -> None:
        """The mapping of the segment that begins at `base`; None: the one before may be unmapped."""
        self._loop.base = -1
        if self._data is not None:
            ffi.release(self._data)
            self._data = None
        if view is not None:
            self._data = ffi.from_buffer("uint8_t[]", view)
            self._loop.view = self._data
            self._loop.base = base


class PoolCommitLoop:
    """One `struct ms_pool_commit`, and what it points to, which must outlive it."""

    def __init__(self, control: ms_control, latch: Latch, reputter: Latch, replicator: Latch | None, *, segment_bytes: int,
                 piece_bytes: int, nap_ns: int, quiet_ns: int, recorder: Recorder) -> None:
        """Goes on at the published `committed`. `latch` is the committer's; `reputter` and `replicator` are woken for what
        is committed. `nap_ns`, `quiet_ns`: see csrc/stream.cdef.h. `recorder` keeps what took long."""
        self._loop = ffi.new("struct ms_pool_commit *")
        self._kept = latch, reputter, replicator, recorder
        self._loop.recorder = recorder.hand
        self._segment = MappedSegment(self._loop)
        self._loop.control = control
        self._loop.semaphore = latch.semaphore
        self._loop.reputter_semaphore = reputter.semaphore
        self._loop.replicator_semaphore = replicator.semaphore if replicator is not None else ffi.NULL
        self._loop.segment_bytes = segment_bytes
        self._loop.piece_bytes = piece_bytes
        self._loop.committed = lib.ms_load_i64(ffi.addressof(control.committed, "value"))
        self._loop.base = self._loop.fd = -1
        lib.ms_stream_begin(ffi.addressof(self._loop, "stream"), nap_ns, quiet_ns)

    @property
    def committed(self) -> int:
        """All below is in the files and published."""
        return self._loop.committed

    @property
    def error_number(self) -> int:
        """FAILED: the errno of the write."""
        return self._loop.error_number

    @property
    def reason(self) -> str:
        """BROKEN: what is at `committed` in place of a record (native.scan.REASONS)."""
        return REASONS[self._loop.reason]

    def use_segment(self, view: Buffer | None, base: int = -1, fd: int = -1) -> None:
        """The pool buffer of the segment that begins at `base`, and its file; None: those before may be closed."""
        self._segment.use(view, base)
        self._loop.fd = fd

    def run(self, until_ns: int, *, may_sleep: bool = False) -> int:
        """Commit what comes until CLOCK_MONOTONIC `until_ns`; IDLE, TIME, or what is wanted: SEGMENT, FAILED, BROKEN.

        `may_sleep`: wait on the latch, which is armed, where nothing is left.
        """
        return lib.ms_pool_commit_run(self._loop, until_ns, may_sleep)
