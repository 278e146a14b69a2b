"""AllocateMappedFileService: create the next segment, and reserve its blocks, before the writer needs them.

The writer publishes the offset up to which it wants the log (`wanted_end`); this service always keeps one segment ready after the one
being written. A segment is complete when its name appears (storage/durable_writes.py), with its full length and without blocks;
afterwards the service moves `ready_end` and wakes the writer.

Blocks follow the writer: the service allocates them some steps ahead (storage/commit_log.py) and then moves `reserved_end`, beyond which
the writer stores nothing. What was reserved before a restart is allocated again, which changes nothing.

A full disk is not a failure, and neither is one on which a step would leave too little space for queues and index
(storage/file_system.py): the service tries smaller steps, puts the errno into the control block and tries again each half second.

In async mapped mode PageWarmer populates pages ahead of the writer, which makes appends 2-5 times faster (bench/notes/engine.md). It
does not do so ahead of large passes, which the writer writes by system call: a write makes its own pages for less. It never does in
sync mode: a store into a populated mapping dirties its whole large folio, a megabyte to the device per small put (measured).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from functools import partial

from pyengine._native import ffi
from pyengine.errors import DiskError, DiskFullError, disk_errors
from pyengine.events import Event
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import FOLIO_BYTES_MAX, allocate, lock_memory, monotonic_ns
from pyengine.native.writer import GATHER_BYTES_MIN
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.commit_log import new_segment_folder, reserve_ahead_bytes, reserve_step_bytes
from pyengine.storage.durable_writes import create_file, make_folders, sync_folder
from pyengine.storage.file_system import copies_on_write, reserve_dispatch_space
from pyengine.storage.message_store import MessageStore, NewStoreSpace

RETRY_NS = 500_000_000
IDLE_PAUSE_S = 1.0      # the reputter wakes it each 16 MiB of log (csrc/reput.cdef.h), a quarter of the window
BUSY_PAUSE_S = 0.002    # in a stream: as long as about this much is written, so that looking costs slow ones little
BUSY_PAUSE_S_MAX = 0.02
BUSY_STEP_BYTES = 4 << 20
BUSY_NS = 100_000_000
WINDOW_BYTES = 64 << 20
STEP_BYTES = 16 << 20   # populate when this much of the window has been written
_RESERVE, _MAKE = "reserve space for the log", "make the next segment"
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python 3.11 has no name for it
PIECE_BYTES = 4 << 20   # of one call; between two calls the worker records a heartbeat and checks for signals


class AllocateMappedFileService(Service):
    """Creates segments ahead of the writer, reserves their blocks and, in async mapped mode, populates their pages."""

    KIND = native.ALLOCATOR
    records_rounds = True

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._allocator = self._control.allocator
        self._warned = False
        self._warmer: PageWarmer | None = None
        self._step_bytes = reserve_step_bytes(self._segment_bytes)
        self._reserves_all = self._memory.identity.mode == native.MODE_MAPPED and context.config.warm_mapped_file_enable
        if self._memory.identity.mode == native.MODE_MAPPED:
            self._warmer = PageWarmer(context.store, whole=self._reserves_all,
                                      populated_end=native.load(self._allocator, "populated_end"))
        self._index_bytes = NewStoreSpace.of(context.config).index_bytes  # 0 once the reputter has made the first index file
        self._retry_ns: dict[str, int] = {}  # when to try again what has failed
        native.store(self._allocator, "error_number", 0)  # a dead allocator's, which this one may never have to try again
        self._wrote = -1
        self._pass = native.load_position(self._control.slot_pass)
        self._passes_are_large = False
        waiting.schedule(waiting.BATCH)
        self._moved_ns = 0
        self._paused = 0, 0  # (time, end of the log) of the last pause

    def work(self) -> bool:
        """Reserve one step, create one segment, or populate one piece, if that is due."""
        now_ns = monotonic_ns()
        wrote = native.load_position(self._control.wrote)
        if wrote != self._wrote:
            # What the writer gathers and writes by system call needs no pages ahead of it.
            number = native.load_position(self._control.slot_pass)
            if self._wrote >= 0 and number > self._pass:
                self._passes_are_large = wrote - self._wrote >= GATHER_BYTES_MIN * (number - self._pass)
            self._wrote, self._pass, self._moved_ns = wrote, number, now_ns
        wanted, ready_end = native.load(self._control.writer, "wanted_end"), native.load(self._allocator, "ready_end")
        size, reserved_end = self._segment_bytes, native.load(self._allocator, "reserved_end")
        log_bytes = wrote - native.load_position(self._control.min_offset)
        ahead_bytes = reserve_ahead_bytes(size, log_bytes)
        is_reserved = reserved_end >= wanted and reserved_end - wrote >= ahead_bytes // 2 and not self._reserves_all
        due = {_RESERVE: reserved_end < ready_end and not is_reserved,
               _MAKE: ready_end < max(-(-wanted // size) * size, wrote - wrote % size + 2 * size)}
        for what in [what for what in self._retry_ns if not due[what]]:
            self._forget_failure(what)  # the cleaner has made the log smaller
        if due[_RESERVE] and self._may_try(_RESERVE, now_ns):
            all_of_it = self._reserves_all or log_bytes >= 2 * size
            goal = ready_end if all_of_it else max(wanted, wrote + ahead_bytes)
            return self._try(_RESERVE, partial(self._reserve, goal), now_ns)
        if due[_MAKE] and self._may_try(_MAKE, now_ns):
            return self._try(_MAKE, self._make_segment, now_ns)
        return self._warm(wrote)

    def _may_try(self, what: str, now_ns: int) -> bool:
        return now_ns >= self._retry_ns.get(what, 0) and not self._is_frozen

    def _try(self, what: str, step: Callable[[], None], now_ns: int) -> bool:
        """Make a step; if the disk refuses, say so, and try again after RETRY_NS."""
        try:
            step()
        except DiskError as error:
            reason = f"cannot {what}: {error}; trying again each {RETRY_NS / 1e9:g} s"
            self._blocked.set(reason, reason, error.errno or 0)
            native.store(self._allocator, "error_number", error.errno or errno.EIO)
            self._count_error()
            self._retry_ns[what] = now_ns + RETRY_NS
            self._memory.wake(native.WRITER)
            return False
        self._forget_failure(what)
        return True

    def _forget_failure(self, what: str) -> None:
        self._retry_ns.pop(what, None)
        if not self._retry_ns and native.load(self._allocator, "error_number"):
            native.store(self._allocator, "error_number", 0)
            self._blocked.clear("the log has space again")

    def _reserve(self, goal: int) -> None:
        """Allocate blocks up to about `goal` in one segment, at least for a step; if the disk has no room, for less than that."""
        start, size, step_bytes = native.load(self._allocator, "reserved_end"), self._segment_bytes, self._step_bytes
        base = start - start % size
        steps_bytes = max((goal - start) // step_bytes, 1) * step_bytes
        while True:
            stop = min(base + size, start - (start - base) % step_bytes + steps_bytes)
            try:
                self._allocate(base, start, stop)
                break
            except DiskFullError:
                if step_bytes <= FOLIO_BYTES_MAX:
                    raise
                step_bytes = steps_bytes = min(step_bytes, steps_bytes // 2)
        failpoint("log_reserved")
        native.store(self._allocator, "reserved_end", stop)
        failpoint("log_reserve_published")
        if native.load(self._control.writer, "wanted_end") > start:
            self._memory.wake(native.WRITER)

    def _allocate(self, base: int, start: int, stop: int) -> None:
        """Allocate the blocks of bytes [start, stop) of the segment at `base`."""
        path = self._store.commit_log_segment(base)
        with disk_errors("allocate", path), open(path, "r+b", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size != self._segment_bytes:
                raise DiskError(f"{path} has {status.st_size} bytes, not {self._segment_bytes}", path=str(path))
            missing_bytes = min(stop - base - status.st_blocks * 512, stop - start)
            if missing_bytes > 0:  # a dead engine may have allocated them
                if self._index_bytes and self._store.index.is_dir() and any(self._store.index.iterdir()):
                    self._index_bytes = 0
                undispatched_bytes = stop - native.load_position(self._control.reput_from)
                reserve_dispatch_space(path.parent, missing_bytes, undispatched_bytes, self._index_bytes)
            first = start - base - (start - base) % mmap.PAGESIZE
            allocate(file.fileno(), first, stop - base - first, str(path))

    def _make_segment(self) -> None:
        start = native.load(self._allocator, "ready_end")
        with disk_errors("make", self._store.commit_log_segment(start)):
            self._create(start)
        failpoint("segment_made")
        native.store(self._allocator, "ready_end", start + self._segment_bytes)
        failpoint("segment_ready")
        self._memory.wake(native.FLUSHER)  # first: it must open the segment before the writer writes to it
        self._memory.wake(native.WRITER)

    def _create(self, start: int) -> None:
        path = self._store.commit_log_segment(start)
        if not path.exists():
            path = new_segment_folder(self._store, start, self._segment_bytes) / path.name
            make_folders(path.parent)
        try:
            os.close(create_file(path.parent, path.name, self._segment_bytes, allocate="none"))
        except DiskError as error:
            # A predecessor created it and died before it moved `ready_end`; a segment that has its name is complete.
            if error.errno != errno.EEXIST:
                raise
            size = path.stat().st_size
            if size != self._segment_bytes:
                raise DiskError(f"{error.path} has {size} bytes, not {self._segment_bytes}", path=error.path) from error

    def _warm(self, wrote: int) -> bool:
        if self._warmer is None:
            return False
        if self._passes_are_large and monotonic_ns() - self._moved_ns < BUSY_NS:
            return False
        more = self._warmer.advance(wrote, native.load(self._allocator, "reserved_end"),
                                    window_bytes=PIECE_BYTES if self._passes_are_large else WINDOW_BYTES)
        native.store(self._allocator, "populated_end", self._warmer.populated_end)
        if self._warmer.lock_refused and not self._warned:
            self._warned = True
            why = os.strerror(self._warmer.lock_refused)
            self._report(Event.MEMORY_NOT_LOCKED, f"the pages of the next segments cannot be locked in memory ({why}), puts may wait "
                                                  f"for one: raise the memlock limit to {3 * self._segment_bytes:,} bytes "
                                                  "(ulimit -l, LimitMEMLOCK=)")
        return more

    def pause_s(self) -> float:
        now_ns = monotonic_ns()
        if native.load(self._allocator, "error_number") and not self._is_frozen:
            return max(0.01, (min(self._retry_ns.values(), default=now_ns) - now_ns) / 1e9)
        if self._warmer is None:
            return 1.0
        if now_ns - self._moved_ns >= BUSY_NS:
            return IDLE_PAUSE_S
        (then_ns, then_wrote), self._paused = self._paused, (now_ns, self._wrote)
        pause_s = (now_ns - then_ns) / 1e9 * BUSY_STEP_BYTES / max(1, self._wrote - then_wrote)
        return min(max(pause_s, BUSY_PAUSE_S), BUSY_PAUSE_S_MAX)

    def drain(self) -> bool:
        """Remove the segments that were never written to; only when the whole engine stops, after the writer has ended.

        A living writer has the next segment mapped or open already: records that it writes there
        after the name is removed would be lost, even if they are synced. A writer that starts meanwhile, for a
        supervisor that adopts the engine, opens none of them: the ends are lowered before the check for a writer.
        """
        stopping = native.load(self._control.state, "refuse_puts") & native.REFUSE_STOPPING
        if not stopping or self._is_frozen:
            return False
        wrote, _ = native.committed_slot(self._control)
        wrote = max(wrote, native.load(self._control.writer, "intent_end"))
        ready_end, reserved_end = (native.load(self._allocator, name) for name in ("ready_end", "reserved_end"))
        first = -(-wrote // self._segment_bytes) * self._segment_bytes
        if 0 < wrote == native.load_position(self._control.min_offset):
            first += self._segment_bytes  # an empty log: its only segment says where it begins
        if first >= ready_end:
            return False
        native.store(self._allocator, "reserved_end", min(first, reserved_end))
        native.store(self._allocator, "ready_end", first)
        failpoint("spare_given_up")
        if native.WRITER in living_kinds(self._store.root, len(KIND_NAMES)):
            native.store(self._allocator, "ready_end", ready_end)
            native.store(self._allocator, "reserved_end", reserved_end)
            return False
        if self._warmer is not None:
            self._warmer.close()
        folders = set()
        for start in reversed(range(first, ready_end, self._segment_bytes)):
            path = self._store.commit_log_segment(start)
            folders.add(path.parent)
            with disk_errors("remove", path):
                path.unlink(missing_ok=True)
            failpoint("spare_unlinked")
        for folder in folders:
            sync_folder(folder)
        return False

    def close(self) -> None:
        if self._warmer is not None:
            self._warmer.close()


class PageWarmer:
    """Keeps the pages of [wrote, wrote + window) present; with `whole`, those of whole segments, locked until they are written."""

    def __init__(self, store: MessageStore, *, whole: bool = False, populated_end: int = 0) -> None:
        """`populated_end`: the offset up to which a predecessor has populated; doing it again would dirty the pages again."""
        self._store = store
        self._segment_bytes = store.segment_bytes
        self._whole = whole
        self._mappings: dict[int, mmap.mmap | None] = {}  # by the segment's start
        self._filling = True
        self.populated_end = populated_end
        self.lock_refused = 0  # errno of the last lock that failed, which only costs speed

    def advance(self, wrote: int, reserved_end: int, window_bytes: int = WINDOW_BYTES) -> bool:
        """Populate one piece if at least STEP_BYTES are missing; return whether there is more to do now.

        It populates nothing from `reserved_end` on, where a page needs new blocks.
        """
        size = self._segment_bytes
        for start in [start for start in self._mappings if start + size <= wrote]:
            self._unmap(start)
        window = max(window_bytes, 2 * size) if self._whole else window_bytes
        end = min(wrote + window, reserved_end)
        at = max(self.populated_end, wrote)
        if at >= end or end - at < min(STEP_BYTES, window_bytes, size) and not self._filling:
            return False
        start = at - at % size
        stop = min(end, at + PIECE_BYTES, start + size)
        self._populate(start, at - start, stop - start)
        self.populated_end = stop
        self._filling = stop < end  # once begun, it continues to the end of the window
        return self._filling

    def _populate(self, segment: int, start: int, stop: int) -> None:
        """Populate (and lock) bytes [start, stop) of a segment. A failure only costs speed."""
        if segment not in self._mappings:
            self._mappings[segment] = self._map(segment)
        mapping = self._mappings[segment]
        if mapping is not None:
            start -= start % mmap.PAGESIZE
            with contextlib.suppress(OSError):
                mapping.madvise(_MADV_POPULATE_WRITE, start, stop - start)
            if self._whole:
                address = ffi.cast("uint8_t *", ffi.from_buffer(mapping)) + start
                self.lock_refused = lock_memory(address, stop - start) or self.lock_refused

    def _map(self, segment: int) -> mmap.mmap | None:
        """Map a segment; None if that fails, or if the file system copies on write.

        There the writer does not store into mapped pages, and populating them would take disk space.
        """
        with contextlib.suppress(OSError, ValueError), open(self._store.commit_log_segment(segment), "r+b", buffering=0) as file:
            return None if copies_on_write(file.fileno()) else mmap.mmap(file.fileno(), self._segment_bytes, mmap.MAP_SHARED)
        return None

    def _unmap(self, segment: int) -> None:
        mapping = self._mappings.pop(segment)
        if mapping is not None:
            mapping.close()  # unlocks too

    def close(self) -> None:
        for segment in list(self._mappings):
            self._unmap(segment)
