"""How far a reader may look while the engine runs: the read levels (docs/promises.md, 4) from the shared counters.

`LiveWatermark` is a `Watermark` for `open_store(path, watermark=...)`. It maps the control
block read-only; where no engine runs, or the reader may not see its memory, the files
decide (`FilesWatermark`). A look costs two system calls and a few loads.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pyengine.errors import EngineUnavailableError, StoreBusyError, UsageError
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import SharedObject, find_folder
from pyengine.native import control as native
from pyengine.results import ReadLevel
from pyengine.storage.engine_id import read_boot_id, read_engine_id, read_epoch
from pyengine.storage.read_level import DeadEngine, FilesWatermark, StoreUse, store_use
from pyengine.storage.segment_files import SegmentFolder

_POSITIONS = {
    ReadLevel.WRITTEN: "wrote",
    ReadLevel.COMMITTED: "committed",
    ReadLevel.FLUSHED: "flushed",
    ReadLevel.REPLICATED: "confirm",
}
_NO_POSITIONS_YET = (native.STATE_STOPPED, native.STATE_RECOVERING)


class LiveWatermark:
    """The levels of one store, now. Threads may share it; close() unmaps the control block."""

    def __init__(self, root: str | os.PathLike[str], commit_log: SegmentFolder) -> None:
        self._root = root
        self._files = FilesWatermark(root, commit_log, self._dead_engine)
        self._shared: SharedObject | None = None
        self._control = None
        self._path = Path()
        self._lock = threading.Lock()

    def limit(self, level: ReadLevel) -> int:
        """Nothing at or above this physical offset may be looked at.

        With the pool `written` is `committed`: what only stands in a buffer is in no file.
        UsageError for `replicated` where nothing replicates, StoreBusyError while the store recovers.
        """
        with self._lock:
            if not self._attached():
                return self._files.limit(level)
            return self._position(level)

    def queue_limit(self, level: ReadLevel) -> int:
        """The same for queue and index entries: never beyond what is dispatched."""
        with self._lock:
            if not self._attached():
                return self._files.queue_limit(level)
            limit = min(self._position(level), native.load_position(self._control.reput_from))
            if self._control.identity.dispatch_at:  # at an orderly stop queues are written to the log's end
                limit = min(limit, native.load_position(self._control.confirm))
            return limit

    @property
    def is_live(self) -> bool:
        """Whether the counters of a running engine answer, and not the files."""
        with self._lock:
            return self._attached()

    def close(self) -> None:
        """Unmap; the next question maps again."""
        with self._lock:
            self._detach()

    def _position(self, level: ReadLevel) -> int:
        identity = self._control.identity
        if level is ReadLevel.REPLICATED and not identity.replicates:
            raise UsageError("nothing is replicated here: choose the level flushed, committed or written")
        if level is ReadLevel.WRITTEN and identity.mode == native.MODE_POOL:
            level = ReadLevel.COMMITTED
        return native.load_position(getattr(self._control, _POSITIONS[level]))

    def _attached(self) -> bool:
        """Whether `_control` belongs to the engine that runs now.

        The counters alone cannot tell: after a kill -9 of everything the memory stays as it
        was. The store's lock can, and it costs one system call.
        """
        if store_use(self._root) is not StoreUse.ENGINE:
            self._detach()
            return False
        if self._control is not None and self._is_replaced():
            self._detach()
        if self._control is None:
            self._attach()
        if self._control is None:
            return False
        if native.load(self._control.state, "state") in _NO_POSITIONS_YET:
            self._detach()
            raise StoreBusyError(f"{self._root} is being recovered: wait until it runs")
        return True

    def _dead_engine(self) -> DeadEngine | None:
        """What the memory of an engine that was killed says, if it is this store's and the next recovery will believe it."""
        identity = read_engine_id(self._root)
        try:
            with EngineMemory.attach(find_folder(self._root), writable=False) as memory:
                its = memory.identity
                if (identity is None or memory.state == native.STATE_DEGRADED or its.boot_id != read_boot_id()
                        or (its.store_uuid, its.epoch) != (identity.uuid, read_epoch(self._root))):
                    return None
                return DeadEngine(native.committed_slot(memory.control)[0], native.load(memory.control.state, "frozen") != 0)
        except EngineUnavailableError:
            return None

    def _is_replaced(self) -> bool:
        if native.load(self._control.state, "retired"):
            return True
        try:
            return os.stat(self._path).st_ino != os.fstat(self._shared.descriptor).st_ino
        except OSError:
            return True

    def _attach(self) -> None:
        try:
            folder = find_folder(self._root)
            self._shared = folder.attach(shared_objects.CONTROL, writable=False)
            self._control = native.view_control(self._shared.memory)
            native.check_control(self._control, self._shared.size_bytes)
        except EngineUnavailableError:  # another user's engine, or one that has just gone
            self._detach()
            return
        self._path = folder.path / shared_objects.CONTROL
        if bytes(self._control.identity.boot_id) != read_boot_id():
            self._detach()

    def _detach(self) -> None:
        self._control = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None
