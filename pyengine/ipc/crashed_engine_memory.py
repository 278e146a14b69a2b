"""Shared memory of a crashed engine: check it, recover or rebuild a stopped store with it, and remove it.

For the store's owner only, which holds the lock exclusively, so that no other process writes to the memory.
After kill -9 of all processes the control block has the end of the log, and pool buffers
have records that were acknowledged but not yet committed to files. Recovery uses both only if
they belong to this store, epoch and boot, and no other program has opened the store since.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine.errors import CorruptionError, EngineUnavailableError, OtherLayoutError, StoreBusyError, command
from pyengine.ipc import sessions, shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.heartbeat import is_alive
from pyengine.ipc.shared_objects import KIND_NAMES, SharedFolder, SharedObject, find_folder
from pyengine.ipc.store_lock import living_kinds, owning, read_holder
from pyengine.native import control as native
from pyengine.native import recorder
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import LOG_BEGIN, SharedState
from pyengine.storage.config import EngineConfig, record_sizes
from pyengine.storage.engine_id import EngineId, raise_epoch, read_boot_id, read_engine_id, renew_copied_id
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.report import Progress, RecoveryReport, RecoveryState

if TYPE_CHECKING:
    from pyengine._native import ms_control
    from pyengine.storage.recovery.rebuild import RebuildReport, Selection

EXIT_WAIT_S = 2.0  # a process that was killed releases its lock a moment before it disappears
POLL_INTERVAL_S = 0.02


class CrashedEngineMemory:
    """The memory of the last engine, if any. `shared` is for recover(); None when there is no usable memory and no rejected pool."""

    def __init__(self, folder: SharedFolder | None) -> None:
        self._folder = folder
        self._buffers: list[SharedObject] = []
        self._semaphore_id = sessions.NO_ATTACH_COUNT
        self._memory: EngineMemory | None = None
        self._has_other_layout = False
        self.unreadable = ""  # why acknowledged pool bytes may be lost: only another version can read them
        self.shared: SharedState | None = None
        self.confirm = 0  # the offset that slaves have confirmed; it may be newer than the note

    @property
    def undrained_bytes(self) -> int:
        """Acknowledged pool bytes that are in no file yet; 0 when the memory is rejected."""
        if self.shared is None or self.shared.mismatch or not self.shared.pool_buffers:
            return 0
        return max(0, self.shared.slot_end - self.shared.committed)

    def require_dead(self, *, retire: bool = True, accept_loss: bool = False) -> None:
        """Raise StoreBusyError while processes of that engine live, which hold a lock file that was removed or replaced.

        CorruptionError if it is dead and `unreadable`, unless `accept_loss`. Once they are dead, the memory is retired: otherwise
        producers and readers that have it mapped would wait until recovery has ended. `retire` False is for callers that only read.
        """
        deadline_s = time.monotonic() + EXIT_WAIT_S
        while pids := self._living():
            if time.monotonic() >= deadline_s:
                raise StoreBusyError(f"an engine still runs on this store, although its file `lock` was removed or replaced: end its "
                                     f"processes ({', '.join(map(str, pids))}), then start again; the next start recovers")
            time.sleep(POLL_INTERVAL_S)
        if self.unreadable and not accept_loss:
            raise CorruptionError(self.unreadable)
        if self._memory is not None and retire:
            self._memory.retire()
            failpoint("left_memory_retired")

    def _living(self) -> list[int]:
        if self._folder is not None and self._has_other_layout:  # where it has the pids is unknown
            return _mapping_writably(self._folder)
        if self._memory is None or self._memory.boot_id != read_boot_id():
            return []
        lines = [self._memory.control.workers[kind] for kind in range(len(KIND_NAMES))]
        # A worker that has released the store may still pause before it ends (pyengine/engine/log_file.py): it does not count.
        pids = [(native.load(line, "pid"), native.load(line, "start_time_ms")) for line in lines
                if native.load(line, "state") not in (native.WORKER_ABSENT, native.WORKER_FAILED)]
        return [pid for pid, start_ms in pids if pid != os.getpid() and is_alive(pid, start_ms)]

    def recorded(self) -> bytes:
        """Return the flight recorder (native/recorder.py) for the next engine of this boot; b"" if there is none."""
        if self._folder is None:
            return b""
        try:
            shared, found = self._folder.open_checked(shared_objects.RECORDER, recorder.view, recorder.check, writable=False)
            with shared:
                if recorder.boot_of(found) == read_boot_id() and shared.size_bytes == recorder.RECORDER_BYTES:
                    return bytes(shared.memory)
        except EngineUnavailableError:
            pass
        return b""

    def discard(self) -> bool:
        """Remove the memory; True if there was any. Call it after recovery, when all its bytes are in files."""
        if self._folder is None:
            return False
        sessions.remove_attach_count(self._semaphore_id)
        return bool(self._folder.sweep())

    def _inspect(self, folder: SharedFolder, root: str | os.PathLike[str], engine_id: EngineId) -> None:
        try:
            memory = self._memory = EngineMemory.attach(folder)
        except EngineUnavailableError as error:
            has_pool = any(name.startswith("pool-") for name in folder.names())
            if isinstance(error, OtherLayoutError):
                self._has_other_layout = True
                with EngineMemory(folder, folder.attach(shared_objects.CONTROL, writable=False)) as other:
                    if has_pool and not other.why_stale(root, engine_id):
                        self.unreadable = (
                            f"the engine of another version of pyengine (layout {other.identity.layout_version} of shared memory, "
                            "docs/upgrades.md) was killed, and its pool may have acknowledged messages that are in no file: start and "
                            f"stop the store once with that version; {command('recover', root, '--accept-loss')} gives them up")
            # There is no memory, or its supervisor died before it was published, so no put used it; or it was overwritten.
            if has_pool:
                self.shared = SharedState(0, 0, (), f"{error}; what may have been in its pool alone is given up")
            return
        control = memory.control
        if memory.boot_id == read_boot_id():  # also if its positions are of no use: discard() removes the memory with the id
            self._semaphore_id = memory.identity.sysv_semaphore_id
        slot_end, _ = native.committed_slot(control)
        committed, flushed, reput_from = (native.load_position(getattr(control, name)) for name in ("committed", "flushed", "reput_from"))
        mismatch, sync_failed = memory.judge_ended(root, engine_id)
        mismatch = mismatch or _contradiction(control, slot_end)
        pool: tuple[tuple[int, memoryview], ...] = ()
        if not mismatch:
            self.confirm = native.load_position(control.confirm)
            try:
                pool = tuple(self._map_pool(folder, memory))
            except EngineUnavailableError as error:
                mismatch = f"a buffer of the pool is missing: {error}"
        frozen = native.load(control.state, "frozen") != 0
        # After a failed sync it is unknown which pages of queues and index are on the disk.
        self.shared = SharedState(slot_end, committed, pool, mismatch, flushed=flushed, sync_failed=sync_failed,
                                  ordered_from=native.load(control.writer, "ordered_from"),
                                  reput_from=None if frozen else reput_from,
                                  index_progress=None if frozen else native.index_progress_copy(control))

    def _map_pool(self, folder: SharedFolder, memory: EngineMemory) -> Iterator[tuple[int, memoryview]]:
        """Map the buffers in use; yield (physical offset of the first byte, bytes) of each."""
        size_bytes = memory.identity.segment_bytes
        for number in range(memory.identity.pool_buffers if memory.identity.mode == native.MODE_POOL else 0):
            base = native.load(memory.control.pool[number], "segment_base")
            if base < 0:
                continue
            buffer = folder.attach(shared_objects.pool_name(number), writable=False)
            self._buffers.append(buffer)
            if base % size_bytes or buffer.size_bytes != size_bytes:
                raise EngineUnavailableError(f"{buffer.name} has {buffer.size_bytes} bytes from offset {base} on, which is no segment")
            yield base, memoryview(buffer.memory)

    def _close(self) -> None:
        self.shared = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for buffer in self._buffers:
            buffer.close()


@contextlib.contextmanager
def open_crashed_memory(root: str | os.PathLike[str]) -> Iterator[CrashedEngineMemory]:
    """Map the shared memory that the last engine of the store at `root` left, inside the block.

    It creates no object. A store that never had an engine of pyengine, or was stopped in order, has no such memory.
    """
    engine_id = read_engine_id(root)
    if engine_id is None:
        yield CrashedEngineMemory(None)
        return
    folder = find_folder(root, engine_id)
    left = CrashedEngineMemory(folder)
    try:
        left._inspect(folder, root, engine_id)
        yield left
    finally:
        left._close()


def _mapping_writably(folder: SharedFolder) -> list[int]:
    """Return the other processes that have the control block mapped writable, as only those of an engine have it, from /proc."""
    name, found = f"/{folder.path.name}/{shared_objects.CONTROL}".encode(), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
            if pid != os.getpid() and any(name in line and b" rw-s " in line for line in lines):
                found.append(pid)
    return found


def _contradiction(control: ms_control, slot_end: int) -> str:
    """Return how the positions of a control block contradict each other, which an engine never writes; "" if they do not.

    From a commit slot that was moved back recovery would take published records for unpublished ones.
    """
    wrote, committed, flushed, reput_from = (
        native.load_position(position) for position in (control.wrote, control.committed, control.flushed, control.reput_from))
    if 0 <= flushed <= committed <= slot_end and wrote <= slot_end and 0 <= reput_from <= committed:
        return ""
    return (f"its positions contradict each other (committed slot {slot_end}, wrote {wrote}, committed {committed}, "
            f"flushed {flushed}, reput_from {reput_from})")


def recover_offline(
    root: Path, config: EngineConfig, *, progress: Progress | None = None, accept_loss: bool = False, dry_run: bool = False,
) -> RecoveryReport:
    """Recover a store, with the bytes that a crashed engine left in memory, and leave it stopped.

    With `dry_run` report what that would do; change nothing, not even the file `lock`. StoreBusyError if a process has it open.
    """
    from pyengine.storage.recovery.recover import recover  # imported here, as in the function below: `status` does not need it

    with _unused(root) if dry_run else owning(root):
        if not dry_run:
            renew_copied_id(root)
        with open_crashed_memory(root) as crashed:
            crashed.require_dead(retire=not dry_run, accept_loss=accept_loss)
            report = recover(MessageStore(root, config.geometry), progress=progress, accept_loss=accept_loss,
                             shared=crashed.shared, options=config, dry_run=dry_run)
            if accept_loss and not dry_run:
                LOG_BEGIN.remove(root)
            if not dry_run and report.state is RecoveryState.RECOVERED and (crashed.discard() or report.changed):
                raise_epoch(root)
    return report


@contextlib.contextmanager
def _unused(root: Path) -> Iterator[None]:
    """Raise StoreBusyError if a process has the store open, also after the block: what it found is invalid then."""
    for is_over in (False, True):
        holder = read_holder(root)
        if holder.kind != "none" or living_kinds(root):
            user = holder.description if holder.kind == "foreign" else "an engine, or a command that owns it"
            raise StoreBusyError(f"{root} is in use by {user}: stop it first; a running engine needs no recovery")
        if not is_over:
            yield


def rebuild_offline(
    root: Path, config: EngineConfig, selection: Selection | None = None, *, progress: Progress | None = None,
) -> RebuildReport:
    """Run storage.recovery.rebuild in a stopped store. StoreBusyError while any process has it open."""
    from pyengine.storage.recovery.rebuild import rebuild

    store = MessageStore(root, config.geometry)
    with owning(root):
        renew_copied_id(root)
        store.list_complete_log()
        record_sizes(root, config)  # after the queue files are removed, their sizes could not be told any more
        with open_crashed_memory(root) as crashed:
            crashed.require_dead()
            report = rebuild(store, selection, options=config, shared=crashed.shared, progress=progress)
            if report.state is RecoveryState.RECOVERED:
                crashed.discard()
                raise_epoch(root)  # a reader may have seen queues that were not whole
    return report
