"""The base of all services: Service, its context, and freezing the store.

A service is RocketMQ's ServiceThread without the thread. Its worker
(pyengine/engine/worker.py) drives it:

    while service.work(): ...    one round; True: there may be more, run the next round at once
    arm the latch
    service.work() once more     work published before the latch was armed did not wake it
    service.wait()               sleep at most service.pause_s()

and, in an orderly stop, calls `drain()` until it is False, then `close()`. Services depend only
on ipc and storage, so that a test can run them in its own process.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pyengine.errors import DiskError
from pyengine.events import Event, Report
from pyengine.formats.paths import LOCK_NAME
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.native.recorder import Recorder
from pyengine.storage.checkpoint import note_sync_failure
from pyengine.storage.config import EngineConfig
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine._native import ms_worker
    from pyengine.native.waiting import Latch


@dataclass(frozen=True)
class ServiceContext:
    """What a service works with: the memory of its engine, the store, and the engine's settings.

    `report` takes an event and its sentence for the log. A service calls `heartbeat` during long work and waits, so that the
    supervisor does not take the worker for dead. `recorder` records stalls.
    """

    memory: EngineMemory
    store: MessageStore
    config: EngineConfig
    report: Report = lambda event, text: None
    heartbeat: Callable[[], None] = lambda: None
    recorder: Recorder = field(default_factory=Recorder)


class BlockedReason:
    """Why a service cannot work: `text` is a sentence for `status`, "" while it can; `error_number` its errno, 0 if there is none."""

    def __init__(self, report: Report) -> None:
        self.text = ""
        self.error_number = 0
        self._report = report

    def set(self, text: str, line: str = "", error_number: int = 0, event: Event = Event.WORK_BLOCKED) -> None:
        """Note that the service is blocked; report `line`, once for each reason."""
        self.error_number = error_number
        if text != self.text:
            self.text = text
            if line:
                self._report(event, line)

    def clear(self, line: str = "") -> None:
        """Note that the service works again; report `line` if it was blocked."""
        self.set("", line, event=Event.WORK_RESUMED)


class Service(ABC):
    """The work of one worker.

    `never_idle`: it sleeps inside work(), so that `blocked_reason` is read after each round.
    `records_rounds`: it does not sleep inside work(), and the worker records rounds that take long.
    """

    KIND: ClassVar[int]
    never_idle: ClassVar[bool] = False
    records_rounds: ClassVar[bool] = False

    def __init__(self, context: ServiceContext) -> None:
        self._memory = context.memory
        self._control = context.memory.control
        self._line: ms_worker = self._control.workers[self.KIND]
        self._store = context.store
        self._segment_bytes = context.store.segment_bytes
        self._report = context.report
        self._heartbeat = context.heartbeat
        self._recorder = context.recorder
        self._blocked = BlockedReason(context.report)
        self._reasons = [self._blocked]  # the first one that has a text counts

    @property
    def blocked_reason(self) -> str:
        """Why the service cannot work, for `status`; "" when it can."""
        return next((each.text for each in self._reasons if each.text), "")

    @property
    def blocked_errno(self) -> int:
        """The errno of the blocked reason; 0 if there is none."""
        return self._blocked.error_number

    @abstractmethod
    def work(self) -> bool:
        """Run one bounded round; True when there may be more to do at once."""

    def take_settings(self, config: EngineConfig) -> None:  # noqa: B027 - not every service has settings that are live
        """Use these settings from now on; only live ones (`Setting.live`) may have changed."""

    def pause_s(self) -> float:
        """Return the longest sleep until the next round, in seconds; a wake-up ends it earlier."""
        return 0.0

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep on the armed latch; True if the service worked meanwhile."""
        latch.wait(timeout_s)
        return False

    def drain(self) -> bool:
        """Run one round of an orderly stop; False once everything that was published is done."""
        return False

    def close(self) -> None:  # noqa: B027 - not every service has something to release
        """Release descriptors and mappings; write nothing."""

    @property
    def _is_frozen(self) -> bool:
        return native.load(self._control.state, "frozen") != 0

    def _freeze(self, error: DiskError) -> None:
        freeze(self._memory, self._store, self.KIND, error)

    def _freeze_if_read_only(self, error: DiskError) -> None:
        """Freeze the store if its disk became read-only, so that no sync can succeed any more; raise any other error.

        A folder of the log that alone is read-only may be writable again, and with it the worker that is started until then.
        """
        if error.errno != errno.EROFS or _may_be_written(self._store.root / LOCK_NAME):
            raise error
        if not self._is_frozen:
            self._freeze(error)

    def _count_error(self) -> None:
        native.increment(self._line, "error_count")


def _may_be_written(path: Path) -> bool:
    """Whether no disk that is read-only keeps this file from being opened for writing."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno != errno.EROFS
    return True


def freeze(memory: EngineMemory, root: str | os.PathLike[str], kind: int, error: DiskError) -> None:
    """Freeze the store after a failed sync or log write: every process has it read-only until a restart (docs/promises.md, 2).

    The failure is noted on the disk, and the workers that must know it are woken. A retried sync could report success
    without writing: the kernel has marked the pages that it could not write as clean.
    """
    flushed = native.load_position(memory.control.flushed)
    cause = os.strerror(error.errno) if error.errno else str(error)
    name = os.path.basename(error.path) if error.path else "the store"
    failpoint("sync_failed")
    native.freeze(memory.control, kind, error.errno,
                  f"the {KIND_NAMES[kind]} could not make {name} durable ({cause}); durable up to {flushed}, "
                  "read-only from now on: repair the disk, then stop, recover and start")
    note_sync_failure(os.fspath(root), flushed, name, cause)
    for other in (native.WRITER, native.SUPERVISOR, native.COMMITTER, native.REPUTTER, native.CHECKPOINTER):
        memory.wake(other)
