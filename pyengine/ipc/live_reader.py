"""`pyengine.open_store`: a StoreReader that follows the engine while one runs, and the files when none does.

It adds to the files' reader what only shared memory tells: the level each message has
reached, the mode in which the engine writes, and the wake-up when messages arrive. It
may be opened before the engine starts and outlives it; nothing of it is needed to read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from pyengine.config import check_keywords
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.cleaning import SegmentHolds
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.live_watermark import LiveWatermark
from pyengine.ipc.shared_objects import find_folder
from pyengine.native import control as native
from pyengine.native import sequence
from pyengine.results import ReadLevel
from pyengine.storage.read_level import StoreUse, store_use
from pyengine.storage.store_reader import StoreReader

LOOK_FOR_ENGINE_S = 1.0   # how often a reader without an engine looks for one
WAIT_STEP_S = 1.0         # a wake-up may be lost to a process killed in between: no wait is longer
FLUSH_STEP_S = 0.02       # durability is announced elsewhere than arrival
WITHOUT_ENGINE_STEP_S = 0.1


def open_store(path: str | os.PathLike[str], **settings: object) -> LiveStoreReader:
    """Open the store at `path` for reading, with or without a running engine.

    Returns a StoreReader. `settings` are those of the store. NotAStoreError, ConfigError; StoreRefusedError when a
    damaged folder is first used.
    """
    check_keywords(open_store, settings)
    return LiveStoreReader(path, **settings)


class LiveStoreReader(StoreReader):
    """The StoreReader that open_store returns: it follows the engine while one runs. Threads may share it."""

    def __init__(self, root: str | os.PathLike[str], **settings: object) -> None:
        super().__init__(root, **settings)
        self._live_watermark = LiveWatermark(self.root, self.commit_log)
        self._watermark = self._live_watermark
        self._memory: EngineMemory | None = None
        self._replaced: list[EngineMemory] = []  # another thread may still sleep in one: kept until close()
        self._holds: SegmentHolds | None = None
        self._holds_of: EngineMemory | None = None
        self._all_holds: list[SegmentHolds] = []
        self._look_again_s = 0.0
        self._memory_lock = threading.Lock()

    @property
    def default_level(self) -> ReadLevel:
        """`flushed` if the engine runs in sync mode, or would by the store's settings; else `committed`."""
        memory = self._engine_memory()
        if memory is None:
            return super().default_level
        return ReadLevel.FLUSHED if memory.identity.mode == native.MODE_SYNC else ReadLevel.COMMITTED

    @property
    def is_live(self) -> bool:
        """Whether an engine runs, so that its counters are read and not the files."""
        self._require_open()
        return self._live_watermark.is_live

    def dispatched_offset(self, level: ReadLevel | str | None = None) -> int:
        """The physical offset below which each message is in its queue; never beyond the end for this level."""
        return self._queue_limit(level)

    def wait_for_message(
        self, topic: str, queue_id: int, offset: int, timeout_s: float, level: ReadLevel | str | None = None
    ) -> bool:
        """Sleep until the queue has a message at `offset` or beyond (True), or until the timeout (False).

        With a running engine the sleep ends when the message is dispatched; without one the files are read every 0.1 s.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            seen = self.arrivals()
            if self.queue_range(topic, queue_id, level)[1] > offset:
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            arrives_readable = self._level(level) in (ReadLevel.WRITTEN, ReadLevel.COMMITTED)
            self.wait_for_arrival(left_s if arrives_readable else min(left_s, FLUSH_STEP_S), seen)

    def arrivals(self) -> int:
        """A number that changes when messages are dispatched: take it before a read, then pass it to wait_for_arrival."""
        memory = self._engine_memory()
        return sequence.load(memory.control.arrival_seq) if memory else 0

    def wait_for_arrival(self, timeout_s: float, seen: int) -> None:
        """Sleep until a message is dispatched after `seen` was taken, or until the timeout; one second at most."""
        memory = self._engine_memory()
        if memory is None:
            time.sleep(min(timeout_s, WITHOUT_ENGINE_STEP_S))
        else:
            sequence.wait(memory.control.arrival_seq, seen, min(timeout_s, WAIT_STEP_S))

    @contextlib.contextmanager
    def hold(self, physical_offset: int) -> Iterator[bool]:
        """Keep the segment with this physical offset from being deleted inside the block. RocketMQ: MappedFile.hold.

        False when its deletion has begun, too many segments are held, or no engine runs. Then the segment may be deleted
        at any time, which each read notices. The engine waits for a hold up to destroy_mapped_file_interval_forcibly_ms.
        """
        with self._hold(physical_offset - physical_offset % self.commit_log.size_bytes) as held:
            yield held

    @contextlib.contextmanager
    def _hold(self, segment: int) -> Iterator[bool]:
        holds = self._segment_holds()
        held = holds is not None and holds.hold(segment)
        try:
            yield held
        finally:
            if held:
                holds.release(segment)

    def _segment_holds(self) -> SegmentHolds | None:
        """The holds of the running engine, None without one or where this user may not write to its memory."""
        memory = self._engine_memory()
        with self._memory_lock:
            if memory is not self._holds_of:
                self._holds_of, self._holds = memory, None
                if memory is not None:
                    with contextlib.suppress(EngineUnavailableError):
                        self._holds = SegmentHolds(memory.folder)
                        self._all_holds.append(self._holds)
            return self._holds

    def close(self) -> None:
        """Let go of files and shared memory; no other thread may be using the reader."""
        super().close()
        self._live_watermark.close()
        with self._memory_lock:
            for holds in self._all_holds:  # of engines that were replaced too: a hold may still be given back
                holds.close()
            self._all_holds.clear()
            self._holds = self._holds_of = None
            self._set_aside()
            for memory in self._replaced:
                memory.close()
            self._replaced.clear()

    def _engine_memory(self) -> EngineMemory | None:
        """The running engine's memory, None without one; looked for at most every LOOK_FOR_ENGINE_S."""
        self._require_open()
        with self._memory_lock:
            now_s = time.monotonic()
            if now_s >= self._look_again_s or (self._memory is not None and self._memory.retired):
                self._look_again_s = now_s + LOOK_FOR_ENGINE_S
                self._look_for_engine()
            return self._memory

    def _look_for_engine(self) -> None:
        lives = store_use(self.root) is StoreUse.ENGINE
        if self._memory is not None and (not lives or self._memory.retired):
            self._set_aside()
        if self._memory is None and lives:
            try:
                self._memory = EngineMemory.attach(find_folder(self.root), writable=False)
            except EngineUnavailableError:  # starting, stopping, or another user's: the files will do
                self._memory = None

    def _set_aside(self) -> None:
        if self._memory is not None:
            self._replaced.append(self._memory)
            self._memory = None
