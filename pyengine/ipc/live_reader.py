"""`pyengine.open_store`: a StoreReader that follows the engine while one runs, and the files when none does.

It adds to the reader of the files what only shared memory has: the offset up to which each read level reaches
(docs/promises.md, 4), the mode in which the engine writes, and the wake-up when messages arrive. A reader can be
opened before the engine starts, and continues to read after the engine has ended. `check_now` checks a whole store,
while an engine runs on it or stopped; `diff_now` compares two such stores.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack

from pyengine import arguments
from pyengine.engine_config import EngineSettings
from pyengine.errors import (
    DiskError,
    EngineError,
    EngineUnavailableError,
    StoreBusyError,
    UsageError,
    command,
    disk_errors,
    passing,
)
from pyengine.formats.constants import CHECKPOINT_MARGIN_MS
from pyengine.formats.paths import LOCK_NAME
from pyengine.formats.small_file import path_stamp
from pyengine.ipc.cleaning import SegmentHolds
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.sessions import ended_sessions, is_drained
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import read_holder
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.native.waiting import Awaited, Sleeper, Watch, Watched
from pyengine.results import Level, ReadLevel
from pyengine.storage.checkpoint import RECOVERY, abort_file_exists, read_checkpoint, read_watermark
from pyengine.storage.commit_log import CommitLog, Log, end_of_stored_until
from pyengine.storage.config import EngineConfig, check_keywords, existing_store, load_config
from pyengine.storage.engine_id import EPOCH_NAME, read_boot_id, read_engine_id, read_epoch
from pyengine.storage.file_system import HeldStore
from pyengine.storage.message_store import MessageStore
from pyengine.storage.read_level import DeadEngine, FilesWatermark, StoreUse, store_use
from pyengine.storage.store_reader import StoreReader

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_position
    from pyengine.storage.check.diff import DiffReport, QueueEnds
    from pyengine.storage.check.parts import RunPieces
    from pyengine.storage.check.report import CheckReport
    from pyengine.storage.recovery.report import Progress

ENGINE_CHECK_INTERVAL_S = 1.0   # interval at which a reader looks for a running engine
WAIT_S_MAX = 1.0                   # longest wait: a process that is killed before it wakes the others loses their wake-up
FLUSH_WAIT_S = 30.0
DISPATCH_S = 5.0                   # longest wait until queues and index have what was put
WITHOUT_ENGINE_POLL_INTERVAL_S = 0.1
CHECK_TRIES = 20
HOLD_WAIT_S = 5.0
HOLD_POLL_INTERVAL_S = 0.05
SETTLE_POLL_INTERVAL_S = 0.002
_POSITIONS = {
    ReadLevel.WRITTEN: "wrote",
    ReadLevel.COMMITTED: "committed",
    ReadLevel.FLUSHED: "flushed",
    ReadLevel.REPLICATED: "confirm",
}
_NO_POSITIONS_YET = (native.STATE_STOPPED, native.STATE_RECOVERING)


class LiveWatermark:
    """The current limits of a store's read levels. Threads may share it, and close it; the last use of a control block unmaps it."""

    def __init__(self, root: str | os.PathLike[str], commit_log: CommitLog, store: HeldStore | None = None) -> None:
        """`store`: of the reader, whose log is then followed into the folders of each engine."""
        self._root = root
        self._log, self._store = commit_log, store
        self._files = FilesWatermark(root, commit_log, partial(dead_engine, root))
        self._memory: EngineMemory | None = None
        self._lock = arguments.inherited_lock()  # a signal handler in a thread that has it may read

    def limit(self, level: ReadLevel) -> int:
        """Return the physical offset below which a reader of this level may read.

        With a pool, `written` is `committed`, since bytes in a pool buffer are in no file.
        UsageError for `replicated` if the engine does not replicate, StoreBusyError while the store recovers.
        """
        with self._lock:
            memory = self._attached()
            return self._files.limit(level) if memory is None else self._position(memory.control, level)

    def queue_limit(self, level: ReadLevel) -> int:
        """Return the same limit for queue and index entries, which is never beyond the dispatched offset."""
        with self._lock:
            memory = self._attached()
            if memory is None:
                return self._files.queue_limit(level)
            self._position(memory.control, level)
            return waiting.queue_limit(memory.control, _position_of(memory.control, level))

    def newest_ms(self) -> int:
        """Return a time that is not before the store time of any message of the log."""
        with self._lock:
            memory = self._attached()
            return self._files.newest_ms() if memory is None else native.committed_slot(memory.control)[1]

    @property
    def is_live(self) -> bool:
        """Whether the limits come from a running engine's counters, and not from the files."""
        with self._lock:
            return self._attached() is not None

    def close(self) -> None:
        """Drop the control block; the next call maps it again."""
        with self._lock:
            self._memory = None

    def _position(self, control: ms_control, level: ReadLevel) -> int:
        if level is ReadLevel.REPLICATED and not control.identity.replicates:
            raise UsageError("nothing is replicated here: choose the level flushed, committed or written")
        return native.load_position(_position_of(control, level))

    def memory(self) -> EngineMemory | None:
        """Return the memory of the running engine, None if none runs; it stays mapped while it is used.

        The store's lock says whether an engine runs, for one system call; the counters do not, since the
        memory stays as it was after a kill -9 of all processes.
        """
        with self._lock:
            known = self._memory
            is_engine = store_use(self._root) is StoreUse.ENGINE
            if is_engine and known is not None and not known.retired and known.folder.is_named(known.control_object):
                return known
            self._memory = None
            if self._store is not None:  # what no engine has used may be half an edit
                self._store.follow_settings(partial(self._log.follow_folders, may_lose=is_engine))
            if is_engine:
                boot_id = read_boot_id()
                with contextlib.suppress(EngineUnavailableError):  # another user's engine, or one that starts or stops
                    memory = EngineMemory.of(self._root)
                    if memory.boot_id != boot_id:
                        memory.close()
                        return None
                    weakref.finalize(memory, memory.control_object.close_descriptor).atexit = False
                    self._memory = memory
            return self._memory

    def _attached(self) -> EngineMemory | None:
        """Return what the caller keeps while it reads the counters: a signal handler in between may meet another engine."""
        memory = self.memory()
        if memory is not None and memory.state in _NO_POSITIONS_YET:
            raise passing(StoreBusyError(f"{self._root} is being recovered: wait until it runs"))
        return memory


def _position_of(control: ms_control, level: ReadLevel) -> ms_position:
    """Return the position up to which this level reads; with a pool, bytes that are only `written` are in no file."""
    if level is ReadLevel.WRITTEN and control.identity.mode == native.MODE_POOL:
        level = ReadLevel.COMMITTED
    position: ms_position = getattr(control, _POSITIONS[level])
    return position


def dead_engine(root: str | os.PathLike[str]) -> DeadEngine | None:
    """Return the state in a killed engine's memory, as far as recovery would use it; None if there is no memory."""
    engine_id = read_engine_id(root)
    if engine_id is None:
        return None
    try:
        with EngineMemory.attach(find_folder(root, engine_id), writable=False) as memory:
            mismatch, sync_failed = memory.judge_ended(root, engine_id)
            return DeadEngine(None if mismatch else native.committed_slot(memory.control)[0], sync_failed)
    except EngineUnavailableError:
        return None


# ---- the reader ------------------------------------------------------------------


def open_store(path: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> LiveStoreReader:
    """Open a store for reading, with or without an engine.

    NotAStoreError; StoreRefusedError at the first use of a damaged folder.
    """
    check_keywords(open_store, settings)
    return LiveStoreReader(arguments.local_path(path), None, **settings)


class Look(NamedTuple):
    """How far a reader of a queue could see, in one engine's memory."""

    memory: EngineMemory
    queue: Awaited


class _SharedWatch:
    """The thread of this process that watches one engine for all its waiting readers, with a mapping of its own."""

    by_place: ClassVar[dict[tuple[int, int], _SharedWatch]] = {}
    lock = threading.RLock()  # a signal handler in a thread that has it may pull

    def __init__(self, memory: EngineMemory) -> None:
        self._memory = memory.again()
        self.place, self.users = memory.place, 0
        try:
            self.watch = Watch(self._memory.control)
        except BaseException:
            self._memory.close()
            raise

    @classmethod
    def of(cls, memory: EngineMemory) -> _SharedWatch:
        """Return the one of this engine, with one user more, who calls leave()."""
        if memory.place not in cls.by_place:
            cls.by_place[memory.place] = cls(memory)
        shared = cls.by_place[memory.place]
        shared.users += 1
        return shared

    def leave(self) -> None:
        """End it with its last user."""
        self.users -= 1
        if not self.users:
            self.by_place.pop(self.place, None)
            self.watch.close()
            self._memory.close()

    @classmethod
    def _at_exit(cls) -> None:
        for shared in cls.by_place.values():
            shared.watch.close()  # before the interpreter unmaps what it reads

    @classmethod
    def _after_fork_in_child(cls) -> None:
        cls.by_place, cls.lock = {}, threading.RLock()  # the threads are the parent's


atexit.register(_SharedWatch._at_exit)
os.register_at_fork(after_in_child=_SharedWatch._after_fork_in_child)


class Readiness(Watched):
    """A descriptor that is readable once queues may have something to read; leave() when nobody waits for it any more."""

    def __init__(self) -> None:
        with _waitable():
            super().__init__()
        self._shared: _SharedWatch | None = None
        self._armed_in: EngineMemory | None = None

    def arm(self, memory: EngineMemory | None, looks: Sequence[Look | None]) -> None:
        """Raise it once one of these queues may have something to read that it had not at the look; `memory`: of the engine now."""
        known = [look.queue for look in looks if look is not None and look.memory is memory]
        with _SharedWatch.lock:
            self._armed_in = memory if len(known) == len(looks) else None
            if memory is None:
                return
            if self._shared is not None and self._shared.place != memory.place:
                self.leave()
            if self._shared is None:
                with _waitable():
                    self._shared = _SharedWatch.of(memory)
                self._shared.watch.add(self)
            self._shared.watch.arm(self, memory.control, known)

    def is_armed_in(self, memory: EngineMemory | None) -> bool:
        """Whether it was armed for all that its reader waits for, and this engine still runs: otherwise look again after a while."""
        return memory is not None and self._armed_in is memory

    def disarm(self) -> None:
        """Make it unreadable until it is armed again, or raised."""
        with _SharedWatch.lock:
            if self._shared is not None:
                self._shared.watch.disarm(self)
        self.clear()

    def copy(self) -> int:
        """Return another descriptor of the same, which the caller closes."""
        with _waitable():
            return os.dup(self.descriptor)

    def leave(self) -> None:
        """Wait for nothing any more; the descriptor stays open as long as this object lives."""
        with _SharedWatch.lock:
            shared, self._shared, self._armed_in = self._shared, None, None
            if shared is not None:
                shared.watch.remove(self)
                shared.leave()


@contextlib.contextmanager
def _waitable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"this process cannot wait for messages: {error.strerror}: raise its limits (ulimit -n, ulimit -u, "
                          "ulimit -v), or end what uses them up") from error


class LiveStoreReader(StoreReader):
    """A StoreReader that follows the engine while one runs.

    Once the folder is moved, removed or replaced, calls raise EngineUnavailableError.
    """

    _passes_gaps = False  # a consumer would commit past messages that are on a disk that is not mounted here
    _closed = ""  # what an error says of it once it is closed, if it belongs to another object

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig | None = None, **settings: Unpack[EngineSettings]) -> None:
        existing_store(Path(root).absolute())
        with disk_errors("open", root):
            self._store = HeldStore(root)
        self._loss_check_due_s = 0.0
        try:
            config = config or load_config(self._store.root, settings)
            self._store.watch()
            super().__init__(self._store.root, watermark=None, config=config)
        except BaseException:
            self._store.close()
            raise
        self._live_watermark = LiveWatermark(self.root, self.commit_log, self._store)
        self._watermark = self._live_watermark
        self._memory: EngineMemory | None = None
        self._holds: dict[EngineMemory, SegmentHolds] = {}
        self._engine_check_due_s = 0.0
        self._recovery_marker, self._epoch_file = str(RECOVERY.path(self.root)), os.path.join(self.root, EPOCH_NAME)
        self._epoch = -1, 0  # the stamp of that file, and its number
        self._memory_lock = arguments.inherited_lock()  # a signal handler in a thread that has it may read

    @property
    def default_level(self) -> ReadLevel:
        """`flushed` in sync mode, else `committed`."""
        memory = self._engine_memory()
        if memory is None:
            return super().default_level
        return ReadLevel.FLUSHED if memory.identity.mode == native.MODE_SYNC else ReadLevel.COMMITTED

    @property
    def name(self) -> Path:
        """The path of the store, for people."""
        return self._store.name

    @property
    def is_live(self) -> bool:
        """Whether an engine runs."""
        self._require_open()
        return self._live_watermark.is_live

    def _newest_ms(self) -> int:
        self._require_open()
        return self._live_watermark.newest_ms()

    def _is_dispatched(self) -> bool:
        return self.is_live or super()._is_dispatched()

    def dispatched_offset(self, level: Level | None = None) -> int:
        """Return the offset below which each is in its queue."""
        return self._queue_limit(level)

    def wait_for_message(
        self, topic: str, queue_id: int, offset: int, timeout_s: float, level: Level | None = None
    ) -> bool:
        """Sleep until the queue has a message at `offset` or beyond; False at the timeout."""
        deadline_s = time.monotonic() + arguments.number(timeout_s, "timeout_s", -math.inf)
        while True:
            look = self._look(topic, queue_id, level)
            if self.queue_range(topic, queue_id, level)[1] > offset:
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait_for_queues([look], left_s)

    def _look(self, topic: str, queue_id: int, level: Level | None = None) -> Look | None:
        """Take this before a read of the queue: if the read finds nothing, _has_arrived() and _wait_for_queues() take it.

        None without a running engine.
        """
        memory = self._engine_memory()
        if memory is None:
            return None
        position = _position_of(memory.control, self._level(level))
        return Look(memory, Awaited(position, waiting.queue_limit(memory.control, position), waiting.arrival_slot(topic, queue_id)))

    def _has_arrived(self, look: Look) -> bool:
        """Whether the queue may have something to read that it had not at the look."""
        return self._engine_memory() is not look.memory or waiting.has_arrived(look.memory.control, look.queue)

    def _wait_for_queues(self, looks: Sequence[Look | None], timeout_s: float, sleeper: Sleeper | None = None, stirs: int = 0) -> None:
        """Sleep until one of these queues may have something to read, or until the timeout.

        `sleeper.stir()` ends it too, if it is called after `stirs` was taken: the caller does so once `sleeper.waits_in` is no longer
        the memory of the running engine. Without a sleeper this returns after a second to look.
        """
        memory = self._engine_memory()
        if memory is None:
            time.sleep(min(timeout_s, WITHOUT_ENGINE_POLL_INTERVAL_S))
            return
        queues = [look.queue for look in looks if look is not None and look.memory is memory]
        if len(queues) < len(looks):  # another engine runs than at the look
            return
        if sleeper is None:
            Sleeper().wait(memory.control, queues, min(timeout_s, WAIT_S_MAX), stirs)
            return
        sleeper.waits_in = memory
        try:
            sleeper.wait(memory.control, queues, timeout_s, stirs)
        finally:
            sleeper.waits_in = None

    def _wait_for_dispatch(self, end: int, timeout_s: float) -> bool:
        """Wait until the queues and the index have all messages below this offset of the log; return whether they have in time.

        It ends at once while they come to no more: without an engine, and with dispatch_at=replicated without slaves that confirm.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._engine_memory() is None:  # perhaps at a look before it ran
            self._look_again()
        while True:
            seen = self._arrivals()
            if self.dispatched_offset(ReadLevel.COMMITTED) >= end:
                return True
            memory, left_s = self._engine_memory(), deadline_s - time.monotonic()
            if left_s <= 0 or memory is None or memory.identity.dispatch_at and (
                    native.load(memory.control.replicator, "slaves_connected") < max(1, memory.identity.min_in_sync_replicas)):
                return False
            self._wait_for_arrival(min(0.1, left_s), seen)

    def _arrivals(self) -> int:
        """Return a number that changes when messages are dispatched: take it before a read, then pass it to _wait_for_arrival()."""
        memory = self._engine_memory()
        return waiting.load_sequence(memory.control.arrival_seq) if memory else 0

    def _wait_for_arrival(self, timeout_s: float, seen: int) -> None:
        """Sleep until a message is dispatched after _arrivals() returned `seen`, or until the timeout; one second at most."""
        memory = self._engine_memory()
        if memory is None:
            time.sleep(min(timeout_s, WITHOUT_ENGINE_POLL_INTERVAL_S))
        else:
            waiting.wait_for_sequence(memory.control.arrival_seq, seen, min(timeout_s, WAIT_S_MAX))

    @contextlib.contextmanager
    def hold(self, physical_offset: int) -> Iterator[bool]:
        """Inside the block the cleaner keeps the segment with this offset, if True."""
        with self._hold(physical_offset - physical_offset % self.commit_log.size_bytes) as held:
            yield held

    @contextlib.contextmanager
    def _hold(self, segment: int) -> Iterator[bool]:
        holds = self._segment_holds()
        if holds is None or not holds.hold(segment):
            yield False
            return
        try:
            yield True
        finally:
            holds.release(segment)

    def _segment_holds(self) -> SegmentHolds | None:
        """Return the holds of the running engine; None if none runs."""
        memory = self._engine_memory()
        if memory is None:
            return None
        with self._memory_lock:
            if memory not in self._holds:
                for replaced in [each for each, holds in self._holds.items() if holds.close_if_unused()]:
                    del self._holds[replaced]
                self._holds[memory] = SegmentHolds(memory.folder)
            return self._holds[memory]

    def close(self) -> None:
        """Close files and shared memory. A call of another thread that waits ends with UsageError, within a second."""
        was_open = self._is_open
        super().close()
        with self._memory_lock:
            for holds in self._holds.values():
                holds.close()
            self._holds.clear()
            self._memory = None
        self._live_watermark.close()
        if was_open:
            self._store.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(self._closed or f"this reader of {self._store.name} is closed: open the store again")
        if time.monotonic() >= self._loss_check_due_s:
            self._require_place()

    def _require_place(self) -> None:
        """Raise EngineUnavailableError if the folder was moved, removed or replaced, so that its path leads to other files."""
        if loss := self._store.loss():
            raise EngineUnavailableError(f"{loss.sentence}: open the store again where it is")
        self._loss_check_due_s = time.monotonic() + ENGINE_CHECK_INTERVAL_S

    def _names(self, memory: EngineMemory) -> waiting.Names:
        """Return what differs once this engine has ended, or the store is not at its place: then _look_again()."""
        control = os.path.join(memory.folder.path, memory.control_object.name)
        return {**dict.fromkeys(self._store.names(), waiting.THIS_FILE), control: waiting.THIS_FILE,
                os.path.join(self.root, LOCK_NAME): waiting.ITS_LOCK}

    def _history(self) -> int | None:
        """Return the number of the recovery that has made the files what they are; None while another one does, or if one was interrupted.

        What is read counts for the history that is current afterwards. It costs a load of shared memory, or without an engine some
        system calls.
        """
        memory = self._last_memory()
        if memory is not None and memory.state != native.STATE_DEGRADED:
            return memory.identity.epoch
        with contextlib.suppress(OSError):  # the file system has no locks, which leaves the marker
            holder = read_holder(self.root)
            if holder.kind == "owner":
                return None
            if holder.kind == "foreign":
                return self._noted_epoch()
        return None if os.path.exists(self._recovery_marker) else self._noted_epoch()

    def _noted_epoch(self) -> int:
        if (stamp := path_stamp(self._epoch_file)) != self._epoch[0]:
            self._epoch = stamp, read_epoch(self.root)
        return self._epoch[1]

    def _is_past(self, history: int) -> bool:
        """Whether an engine is known to run that came after this one: never more than a load of shared memory while one runs."""
        memory = None if self._memory is None else self._last_memory()
        return memory is not None and memory.identity.epoch != history

    def _last_memory(self) -> EngineMemory | None:
        """Return the memory of the engine that was seen last, for two loads; it looks for another one only if that has ended."""
        memory = self._memory
        return self._engine_memory() if memory is None or memory.retired else memory

    def _look_again(self) -> None:
        """Let the next call look for the running engine, and whether the store is at its place."""
        self._engine_check_due_s = self._loss_check_due_s = 0.0

    @property
    def _is_in_place(self) -> bool:
        """Whether all files were at their places at the last look; a `lock` may be away for a while."""
        return not self._store.is_lock_away

    def _engine_memory(self) -> EngineMemory | None:
        """Return the running engine's memory, None if none runs; it looks for an engine at most every ENGINE_CHECK_INTERVAL_S."""
        self._require_open()
        with self._memory_lock:
            now_s = time.monotonic()
            if now_s >= self._engine_check_due_s or (self._memory is not None and self._memory.retired):
                self._memory = self._live_watermark.memory()
                self._engine_check_due_s = now_s + ENGINE_CHECK_INTERVAL_S  # not before: an exception may have ended the look
            return self._memory


def lost_end(store: LiveStoreReader) -> int | None:
    """Return the watermark of a stopped store if its log ends below it, which means that durable bytes are lost; else None."""
    if store.is_live or store_use(store.root) is not StoreUse.CLOSED:
        return None
    reading = read_watermark(store.root)  # first: an engine may run meanwhile, and write on
    if reading.watermark is None or reading.is_copied:
        return None
    return reading.watermark.flushed if reading.watermark.flushed > store.max_physical_offset(ReadLevel.COMMITTED) else None


def flushed_end(store: LiveStoreReader) -> int:
    """Wait until everything that is committed now is flushed, and return the flushed offset; without an engine, at once.

    EngineError if the engine does not flush it within two of its intervals plus FLUSH_WAIT_S. UsageError if the flushed
    offset is unknown.
    """
    wanted = store.max_physical_offset(ReadLevel.COMMITTED)
    wait_s = FLUSH_WAIT_S + 2 * store.config.flush_interval_commit_log_ms / 1000
    deadline_s = time.monotonic() + wait_s
    while True:
        end = store.max_physical_offset(ReadLevel.FLUSHED)
        if end >= wanted or not store.is_live:
            return max(end, 0)
        if time.monotonic() >= deadline_s:
            raise EngineError(f"the log of {store.root} is durable up to {end:,}, but messages up to {wanted:,} were committed "
                              f"{wait_s:.0f} s ago: {command('status', store.root)} says why it is not flushed; run the command again")
        time.sleep(HOLD_POLL_INTERVAL_S)


# ---- the check beside an engine --------------------------------------------------


def check_now(root: Path, config: EngineConfig, acked: Path | None = None, progress: Progress | None = None,
              run: RunPieces | None = None) -> CheckReport:
    """Check the store as it is; start again when the program that runs on it deletes a file before it is checked.

    Raises what storage.check.check raises, and StoreBusyError as `dispatched_end` does. While a broker runs on the store,
    only records up to the flushed time of its checkpoint are checked, and a finding of the kind `broker` names that offset.
    """
    from pyengine.storage.check.check import check  # imported here, since readers do not need it
    from pyengine.storage.check.parts import run_here

    store = MessageStore(root.absolute(), config.geometry)  # findings name files by what follows the root

    def checked_below(limit: int | None, beside: str = "") -> CheckReport:
        return check(store, acked=acked, limit=limit, options=config, progress=progress, run=run or run_here, beside=beside)

    holder = read_holder(root)
    if holder.kind == "foreign":
        return _settled(root, lambda: _log_begin(store), lambda: checked_below(_flushed_by_broker(store), holder.description))
    if dispatched_end(root) is None:
        return checked_below(None)
    with log_held(root) as first_offset:
        return _settled(root, first_offset, lambda: checked_below(dispatched_end(root)))


def _settled(root: Path, first_offset: Callable[[], int], checked: Callable[[], CheckReport]) -> CheckReport:
    """Repeat the check until the start of the log did not move during it."""
    for _ in range(CHECK_TRIES):
        before = first_offset()
        try:
            report = checked()
        except (DiskError, FileNotFoundError) as error:
            if isinstance(error, DiskError) and error.errno != errno.ENOENT:
                raise
            continue  # a file was deleted before it was read
        if first_offset() == before:
            return report
    raise StoreBusyError(f"files of {root} are being deleted faster than they can be checked: try again")


def _log_begin(store: MessageStore) -> int:
    segments = store.list_log()
    return segments[0].start_offset if segments else -1


def _flushed_by_broker(store: MessageStore) -> int:
    """Return the offset up to which a broker, by its checkpoint, has flushed log, queues and index.

    Messages younger than RocketMQ's own margin are left out: they may not be in their queues yet, or only in a pool.
    """
    checkpoint, young_ms = read_checkpoint(store), int(time.time() * 1000) - CHECKPOINT_MARGIN_MS
    until_ms = min(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, young_ms)
    return end_of_stored_until(Log.of(store.list_log(), store.segment_bytes, None), until_ms)


def diff_now(root: Path, other: Path, *, settings: Mapping[str, Any] | None = None,
             progress: Progress | None = None) -> DiffReport:
    """Compare two stores as they are now: with a running engine up to the committed offset, else to the end of the log.

    Records that an engine appends meanwhile are not compared, and engines are kept from deleting segments. `settings` apply to
    a store whose files do not tell them. Raises NotAStoreError, ConfigError, and StoreBusyError if a store recovers or loses
    segments meanwhile.
    """
    from pyengine.storage.check.diff import ComparedStore, DiffReport, Logs, compare_logs

    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(open_store(path, **(settings or {}))) for path in (root, other)]
        for reader in readers:
            if reader.is_live:
                stack.enter_context(log_held(reader.root))
        ends = [max(0, reader.max_physical_offset(ReadLevel.COMMITTED)) for reader in readers]
        dispatched = [reader.dispatched_offset(ReadLevel.COMMITTED) for reader in readers]
        logs = Logs(*(_log_to_compare(reader, end) for reader, end in zip(readers, ends)))
        start, end = max(0, *(log.min_offset for log in logs)), min(log.end for log in logs)
        notes = [f"{reader.name} begins at {log.min_offset}: nothing before is compared" for log, reader in zip(logs, readers)
                 if start < end and log.min_offset > min(logs.store.min_offset, logs.other.min_offset)]
        try:
            found = compare_logs(logs, start, end, progress or (lambda done, total: None))
        except FileNotFoundError as error:
            raise StoreBusyError(f"{error.filename} was deleted while it was compared: try again") from error
        notes += [f"{reader.name} has no whole record at {places[0]}: `pyengine check` tells more"
                  for reader, places in zip(readers, found.damaged) if places]
        queues, reasons = _queue_ends(readers, min(end, *dispatched))
        one, two = (ComparedStore(str(reader.name), log.min_offset, log.end, log.size_bytes) for log, reader in zip(logs, readers))
    return DiffReport(one, two, start, end, found, queues, tuple(notes + reasons), time.monotonic() - began_s)


def _log_to_compare(reader: LiveStoreReader, end: int) -> Log:
    """Return the reader's log, which ends at `end` or, if no process writes it, after the last record beyond damage there."""
    from pyengine.storage.check.diff import end_beyond_damage

    store = MessageStore(reader.root, reader.geometry)
    log = Log.of(store.list_log(), store.segment_bytes, None)
    if store_use(reader.root) is StoreUse.CLOSED:
        end = end_beyond_damage(log, end, was_stopped=not abort_file_exists(store))
    return replace(log, end=end)


def _queue_ends(readers: Sequence[LiveStoreReader], limit: int) -> tuple[tuple[QueueEnds, ...], list[str]]:
    """Return the queues that have different ends for a log that ends at `limit`; or the reason why they were not compared."""
    from pyengine.storage.check.diff import QueueEnds

    for reader in readers:
        if not reader.is_live and abort_file_exists(reader.root):
            return (), [f"{reader.name} was not stopped in order, so its queues may lack entries and are not compared: recover it first"]
    ends: list[dict[tuple[str, int], int]] = []
    for reader in readers:
        queues = {(topic, queue_id): reader._queue(topic, queue_id) for topic, ids in reader.topics().items() for queue_id in ids}
        ends.append({key: queue.max_offset(limit) for key, queue in queues.items() if queue is not None})
    unlike = [QueueEnds(*key, *(each.get(key, 0) for each in ends)) for key in sorted(ends[0].keys() | ends[1].keys())]
    return tuple(one for one in unlike if one.store != one.other), []


@contextlib.contextmanager
def log_held(root: Path) -> Iterator[Callable[[], int]]:
    """Keep the running engine from deleting segments inside the block, by a hold on the oldest, which is deleted first.

    Yields a function that returns the start of the log. A segment whose deletion has begun
    cannot be held: this waits up to HOLD_WAIT_S until it is deleted.
    """
    with open_store(root) as store, contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + HOLD_WAIT_S
        while store.min_physical_offset >= 0 and not stack.enter_context(store.hold(store.min_physical_offset)):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(HOLD_POLL_INTERVAL_S)
        yield lambda: store.min_physical_offset


def dispatched_end(root: Path) -> int | None:
    """Return `reput_from` of the engine that runs on the store; None if no process writes to the store.

    That is so if no process has it open or its engine is degraded; then a check covers the log beyond that offset too.
    StoreBusyError while the store is recovered or open in another program: its unfinished
    writes would look like damage.
    """
    holder = read_holder(root)
    if holder.kind == "none":
        return None
    if holder.kind != "engine":
        user = holder.description if holder.kind == "foreign" else "its owner, which starts or recovers it"
        raise StoreBusyError(f"{root} is held by {user}: wait for it or stop it first")
    try:
        with EngineMemory.of(root) as memory:
            if memory.state == native.STATE_DEGRADED:
                return None
            return native.load_position(memory.control.reput_from)
    except EngineUnavailableError as error:
        raise StoreBusyError(f"{root} has an engine whose counters cannot be read: {error}") from error


# ---- puts of ended producers -------------------------------------------------------


def settled_end(root: Path, timeout_s: float) -> int:
    """Wait until all puts of ended producers are executed, committed and dispatched, and return the end of the log.

    A put of a producer that had closed its session, or had died, before this call is below that offset or was not submitted.
    EngineUnavailableError without a running engine, StoreBusyError at the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    with EngineMemory.of(root) as memory:
        control = memory.control

        def wait(is_done: Callable[[], bool], what: str) -> None:
            while not is_done():
                if memory.retired or store_use(root) is not StoreUse.ENGINE:
                    raise EngineUnavailableError(f"no engine is running on {root}: start it with {command('start', root)}")
                if time.monotonic() >= deadline_s:
                    raise StoreBusyError(f"the engine on {root} has not {what} within {timeout_s:g} s: see {command('status', root)}")
                time.sleep(SETTLE_POLL_INTERVAL_S)

        wait(lambda: store_use(root) is StoreUse.ENGINE and native.load(control.state, "state") not in _NO_POSITIONS_YET, "started")
        for line, generation in ended_sessions(memory):
            wait(partial(is_drained, line, generation), "executed what an ended producer had submitted")
        end = native.committed_slot(control)[0]
        positions = [control.committed, control.reput_from, *([control.confirm] if control.identity.dispatch_at else [])]
        wait(lambda: min(map(native.load_position, positions)) >= end, "dispatched all messages")
        if memory.retired or store_use(root) is not StoreUse.ENGINE:
            raise EngineUnavailableError(f"the engine on {root} has just ended")
        return end
