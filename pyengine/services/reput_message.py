"""DefaultMessageStore.ReputMessageService: dispatch the log into queues and index.

RocketMQ's polls each millisecond. Here the writer (with the pool the committer) wakes it by its
latch; in a stream of puts it polls (StreamDetector).

Order: entries and keys first, then `reput_from`, then the arrival sequence that consumers
sleep on. After a crash everything from `reput_from` on is dispatched again, which changes
nothing that is right (storage/dispatcher.py); the undo of an unfinished index put is
in the control block.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from pyengine._native import ffi
from pyengine.errors import DiskError, EngineUnavailableError
from pyengine.ipc.control_block import EngineMemory, now_ms
from pyengine.native import control as native
from pyengine.native import store_stats, waiting
from pyengine.native.failpoint import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.services.service import Service, ServiceContext, StreamDetector
from pyengine.storage.dispatcher import Dispatcher, DispatchOptions
from pyengine.storage.mapped_file import map_read_only

BATCH_BYTES = 4 << 20      # `reput_from` moves at least this often
BACKLOG_BYTES = 1 << 20    # after a batch as long as this there is no gathering
NAP_NS = 250_000           # in a stream of puts, what comes within this time is dispatched together
QUIET_NS = 1_000_000       # the stream is over after so long without one
SYNC_NAP_NS = 1_000_000    # beside puts that wait for the disk or for slaves: each time this process runs, one of them waits longer
SYNC_QUIET_NS = 3_000_000
ROUND_NS = 50_000_000      # one work() lasts at most about this long
RETRY_NS = 1_000_000_000
IDLE_PAUSE_S = 0.5
INSIDE_A_RECORD = ("range_end", "overrun", "blank")  # of a blank, too: a slave of RocketMQ, or `confirm`, may end inside one


class ReputMessageService(Service):
    """Dispatches what is committed; moves `reput_from` and the arrival sequence."""

    KIND = native.REPUTTER

    def __init__(self, context: ServiceContext, clock_ms: Callable[[], int] = now_ms) -> None:
        """`clock_ms` is the wall clock."""
        super().__init__(context)
        memory, config = context.memory, context.config
        self._limit = self._control.confirm if memory.identity.dispatch_at else self._control.committed
        self._dispatcher = Dispatcher(
            context.store, config.geometry, DispatchOptions.of(config),
            index_progress=ffi.addressof(self._control, "index_progress"),
            topic_stats=_topic_stats(memory))
        self._counted = 0, 0, 0, 0
        self._clock_ms = clock_ms
        self._reput_from = native.load_position(self._control.reput_from)
        self._base = -1
        self._view: mmap.mmap | None = None
        self._has_backlog = False
        self._woken_up_to = -1  # consumers were woken for what is readable below; -1: what a predecessor did is not known
        self._retry_ns = 0
        if memory.identity.mode == native.MODE_SYNC or memory.identity.role in (native.SYNC_MASTER, native.SLAVE):
            self._stream = StreamDetector(SYNC_NAP_NS, SYNC_QUIET_NS)
        else:
            self._stream = StreamDetector(NAP_NS, QUIET_NS)
        waiting.sleep_precisely()

    def work(self) -> bool:
        """Dispatch what is committed, and in a stream what is committed meanwhile."""
        if not self._advance():
            return False
        leave_ns = monotonic_ns() + ROUND_NS
        while monotonic_ns() < leave_ns and self._stream.wait_for_next(
                self._limit, self._reput_from, has_backlog=self._has_backlog):
            if not self._advance():
                break
        return True

    def _advance(self) -> bool:
        """One batch; whether `reput_from` moved."""
        start = self._reput_from
        end = native.load_position(self._limit)
        if end <= start:
            self._wake_consumers(end)
            return False
        if self._retry_ns and monotonic_ns() < self._retry_ns:
            return False
        base = start - start % self._segment_bytes
        try:
            if base != self._base:
                self._open(base)
            # A batch may end inside a record: then it is dispatched again, up to all that is there.
            stop = min(end, base + self._segment_bytes)
            reached = self._dispatcher.dispatch(self._view, base, start, min(stop, start + BATCH_BYTES))
            if reached == start:
                reached = self._dispatcher.dispatch(self._view, base, start, stop)
        except DiskError as error:
            self._fail(str(error))
            return False
        if reached <= start and stop == end and self._dispatcher.stopped_by in INSIDE_A_RECORD:
            return False  # the rest of the record is waited for
        if reached <= start:
            self._fail(f"the record at {start} cannot be dispatched ({self._dispatcher.stopped_by}), "
                       f"although everything below {end} is committed")
            return False
        self._blocked.clear("dispatching works again")
        self._retry_ns = 0
        self._reput_from = reached
        failpoint("batch_dispatched")
        native.store_position(self._control.reput_from, reached)
        failpoint("reput_from_moved")
        self._woken_up_to = reached
        waiting.raise_sequence(self._control.arrival_seq)
        self._has_backlog = reached - start >= BACKLOG_BYTES
        self._stream.worked()
        self._count(end - start)
        return True

    def _wake_consumers(self, end: int) -> None:
        """Wake consumers for what a predecessor dispatched beyond `confirm` as it was stopped, once `confirm` passes it."""
        if self._woken_up_to < end:
            self._woken_up_to = end
            waiting.raise_sequence(self._control.arrival_seq)

    def _count(self, behind_bytes: int) -> None:
        """Statistics, after everything else: consumers are awake already."""
        done = self._dispatcher
        before, self._counted = self._counted, (done.messages, done.entries, done.keys, done.out_of_order)
        last_ms = done.last_store_timestamp_ms
        lag_ns = -1 if last_ms < 0 or self._memory.identity.replay_clock else max(0, self._clock_ms() - last_ms) * 1_000_000
        messages, entries, keys, out_of_order = (now - was for now, was in zip(self._counted, before, strict=True))
        store_stats.add_batch(self._memory.counters, messages, entries, keys, out_of_order, behind_bytes, lag_ns)

    def _open(self, base: int) -> None:
        """Map the segment read-only; the one before it stays mapped until then."""
        path = self._store.commit_log_segment(base)
        try:
            view = map_read_only(path)
        except FileNotFoundError as error:
            raise DiskError(f"{path} is gone, but not dispatched yet", path=str(path)) from error
        self._close_view()
        self._view, self._base = view, base

    def _close_view(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None
            self._base = -1

    def _fail(self, why: str) -> None:
        """Queues and index can wait: puts are accepted meanwhile, and dispatching is tried again each second."""
        self._blocked.set(why, f"queues and index do not grow: {why}")
        self._count_error()
        self._retry_ns = monotonic_ns() + RETRY_NS

    def pause_s(self) -> float:
        if self._retry_ns:
            return max(0.01, (self._retry_ns - monotonic_ns()) / 1e9)
        return IDLE_PAUSE_S

    def drain(self) -> bool:
        """Dispatch to the log's end; gives up where it does not work.

        Also beyond `confirm`: the queues of a store that was stopped in order are complete, and readers apply
        `confirm` themselves (ipc/live_reader.py, storage/read_level.py).
        """
        self._limit = self._control.committed
        return self._advance()

    def close(self) -> None:
        self._dispatcher.close()
        self._close_view()


def _topic_stats(memory: EngineMemory) -> object | None:
    """The shared counters by topic; None, so that nothing is counted, where there are none."""
    try:
        return memory.open_topic_stats(writable=True)
    except EngineUnavailableError:
        return None
