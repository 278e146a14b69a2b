"""DefaultMessageStore.ReputMessageService: dispatch the log into queues and index.

RocketMQ's service polls each millisecond. Here the writer (with a pool, the committer) wakes this service by its
latch; in a stream of puts the service polls (csrc/stream.cdef.h). One call of C runs the common round, from the wake-up to the
next sleep (csrc/reput.cdef.h); the code here handles what that call returns for: other segments, new queues and files, errors.

Order: entries and keys first, then `reput_from`, then the arrival sequence that consumers
sleep on. After a crash everything from `reput_from` on is dispatched again, which does not change
entries that are already correct (storage/dispatcher.py); the undo of an unfinished index put is
in the control block.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from pyengine._native import ffi
from pyengine.errors import DiskError, EngineUnavailableError, StoreRefusedError
from pyengine.events import Event
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native import dispatch, waiting
from pyengine.native.dispatch import ReputLoop
from pyengine.native.flush import monotonic_ns
from pyengine.native.waiting import Stream
from pyengine.services.service import Service, ServiceContext
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.mapped_file import map_read_only

if TYPE_CHECKING:
    from pyengine._native import ms_position, ms_topic_stats
    from pyengine.native.waiting import Latch

NEAR_BYTES = 64 << 20      # bytes this close to the end of the log are in the page cache
BATCH_BYTES = 4 << 20      # `reput_from` moves at least this often
STREAM = Stream(gather_ns=250_000, quiet_ns=1_000_000)
SYNC_STREAM = Stream(gather_ns=1_000_000, quiet_ns=3_000_000)  # puts wait for the disk or for slaves: each run delays one of them
ROUND_NS = 50_000_000      # one work() lasts at most about this long
RETRY_NS = 1_000_000_000
IDLE_PAUSE_S = 1.0
INSIDE_A_RECORD = ("range_end", "overrun", "blank")  # a blank too: the log of a RocketMQ slave, or `confirm`, may end inside one


class ReputMessageService(Service):
    """Dispatches committed records; moves `reput_from` and the arrival sequence."""

    KIND = native.REPUTTER
    records_rounds = True

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        memory, config = context.memory, context.config
        self._dispatcher = Dispatcher(
            context.store, config.geometry, config,
            index_progress=ffi.addressof(self._control, "index_progress"),
            topic_stats=_topic_stats(memory))
        self._view: mmap.mmap | None = None
        self._advice = mmap.MADV_NORMAL  # the advice that the view has
        self._retry_ns = 0
        follows_disk = memory.identity.mode == native.MODE_SYNC or memory.identity.role in (native.SYNC_MASTER, native.SLAVE)
        self._stats = memory.counters.dispatch
        self._out_of_order = native.load(self._stats, "out_of_order")  # when the last line about them was reported
        self._loop = ReputLoop(self._control, self._dispatcher.loop, memory.counters, memory.latch(native.REPUTTER),
                               batch_bytes=BATCH_BYTES, stream=SYNC_STREAM if follows_disk else STREAM,
                               allocator=memory.latch(native.ALLOCATOR) if memory.identity.mode == native.MODE_MAPPED else None)
        self._use_limit(self._control.confirm if memory.identity.dispatch_at else self._control.committed)
        waiting.sleep_precisely()

    def work(self) -> bool:
        """Dispatch the committed records and, in a stream of puts, those that are committed meanwhile."""
        return self._run(monotonic_ns() + ROUND_NS)

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep, and dispatch the records that are committed meanwhile."""
        if self._retry_ns:
            return super().wait(latch, timeout_s)
        return self._run(monotonic_ns() + int(timeout_s * 1e9), may_sleep=True)

    def _use_limit(self, limit: ms_position) -> None:
        self._limit = limit
        self._loop.use_limit(limit)

    def _run(self, until_ns: int, *, may_sleep: bool = False) -> bool:
        """Run rounds in C and handle what they return for; return whether `reput_from` moved."""
        if self._retry_ns and monotonic_ns() < self._retry_ns:
            return False
        before = self._loop.reput_from
        self._advise()
        try:
            why = self._loop.run(until_ns, may_sleep=may_sleep)
            if why == dispatch.SEGMENT:
                self._open(self._loop.reput_from - self._loop.reput_from % self._segment_bytes)
                why = self._loop.run(until_ns)
            if why == dispatch.DECIDE and not self._advance():
                return False
        except (DiskError, StoreRefusedError) as error:
            self._fail(str(error))
            return False
        if self._loop.reput_from == before:
            return False
        self._blocked.clear("dispatching works again")
        self._retry_ns = 0
        if (count := native.load(self._stats, "out_of_order")) > 2 * self._out_of_order:  # few lines, however many they are
            self._out_of_order = count
            self._report(Event.QUEUE_OUT_OF_ORDER, f"{count:,} messages below {self._loop.reput_from} are not the next of their queues: "
                                                   "`pyengine check` tells where")
        return True

    def _advance(self) -> bool:
        """Dispatch one batch, opening the queues and files that it needs; False if `reput_from` did not move."""
        start = self._loop.reput_from
        end = native.load_position(self._limit)
        base = start - start % self._segment_bytes
        # BATCH_BYTES may end inside the first record: then the batch is tried again up to the end of the segment.
        stop = min(end, base + self._segment_bytes)
        assert self._view is not None, "the loop asks for its segment first"
        reached = self._dispatcher.dispatch(self._view, base, start, min(stop, start + BATCH_BYTES))
        if reached == start:
            reached = self._dispatcher.dispatch(self._view, base, start, stop)
        if reached > start:
            self._loop.publish(reached, end - start)
            return True
        if stop < end or self._dispatcher.stopped_by not in INSIDE_A_RECORD:  # otherwise the rest of the record is still to come
            self._fail(f"the record at {start} cannot be dispatched ({self._dispatcher.stopped_by}), "
                       f"although everything below {end} is committed")
        return False

    def _open(self, base: int) -> None:
        """Map the segment read-only, then unmap the previous one."""
        path = self._store.commit_log_segment(base)
        try:
            view = map_read_only(path)
        except FileNotFoundError as error:
            raise DiskError(f"{path} was removed before it was dispatched", path=str(path)) from error
        if len(view) < self._segment_bytes:
            raise DiskError(f"{path} has {len(view)} bytes, not {self._segment_bytes}", path=str(path))
        self._close_view()
        self._view, self._advice = view, mmap.MADV_NORMAL
        self._advise()
        self._loop.use_segment(view, base)

    def _advise(self) -> None:
        """Turn read-ahead off close to the writer: the kernel would read pages of zeros that the writer is about to overwrite."""
        lag_bytes = native.load_position(self._control.committed) - self._loop.reput_from
        advice = mmap.MADV_RANDOM if lag_bytes <= NEAR_BYTES else mmap.MADV_NORMAL
        if self._view is not None and advice != self._advice:
            self._view.madvise(advice)
            self._advice = advice

    def _close_view(self) -> None:
        self._loop.use_segment(None, -1)
        if self._view is not None:
            self._view.close()
            self._view = None

    def _fail(self, why: str) -> None:
        """Note a failure; dispatch is tried again each second. Puts are accepted meanwhile: queues and index can be late."""
        self._blocked.set(why, f"queues and index do not grow: {why}")
        self._count_error()
        self._retry_ns = monotonic_ns() + RETRY_NS

    def pause_s(self) -> float:
        if self._retry_ns:
            return max(0.01, (self._retry_ns - monotonic_ns()) / 1e9)
        return IDLE_PAUSE_S

    def drain(self) -> bool:
        """Dispatch to the end of the log; stop at a failure.

        Records beyond `confirm` are dispatched too: the queues of a store that was stopped in order are complete, and
        readers apply `confirm` themselves (ipc/live_reader.py, storage/read_level.py).
        """
        self._use_limit(self._control.committed)
        return self._run(monotonic_ns())

    def close(self) -> None:
        self._dispatcher.close()
        self._close_view()


def _topic_stats(memory: EngineMemory) -> ms_topic_stats | None:
    """Return the shared counters by topic; None, which disables counting, if the engine has none."""
    try:
        return memory.open_topic_stats()
    except EngineUnavailableError:
        return None
