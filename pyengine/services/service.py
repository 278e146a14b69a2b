"""What all services share: the Service itself, its context, and freezing the store.

A service is RocketMQ's ServiceThread without the thread: it decides and acts. Its worker
(pyengine/engine/worker.py) drives it:

    while service.work(): ...    one round; True: there may be more, go round at once
    arm the latch
    service.work() once more     what was published before arming woke no one
    service.wait()               sleep at most service.pause_s()

and, on the way out, `drain()` until it is False, then `close()`. Services are built on
ipc and storage, so a test drives them in its own process.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pyengine.errors import DiskError
from pyengine.events import Event, Report
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.native.recorder import Recorder
from pyengine.storage.checkpoint import note_sync_failure
from pyengine.storage.config import EngineConfig
from pyengine.storage.message_store import MessageStore

if TYPE_CHECKING:
    from pyengine._native import ms_worker
    from pyengine.native.waiting import Latch


def _ignore(event: Event, text: str) -> None:
    pass


@dataclass(frozen=True)
class ServiceContext:
    """What a service works with: the memory of its engine, the store, and the engine's settings.

    `report` takes an event and its sentence for the log. `beat` is called in long work and in waits, so that the
    supervisor does not take the worker for dead. `recorder` keeps what took long.
    """

    memory: EngineMemory
    store: MessageStore
    config: EngineConfig
    report: Report = _ignore
    beat: Callable[[], None] = lambda: None
    recorder: Recorder = field(default_factory=Recorder)


class BlockedReason:
    """Why a service does not do its work: `text`, a sentence for `status`; "" while nothing blocks it. `error_number`: the errno
    of it, 0 where there is none."""

    def __init__(self, report: Report) -> None:
        self.text = ""
        self.error_number = 0
        self._report = report

    def set(self, text: str, said: str = "", error_number: int = 0, event: Event = Event.WORK_BLOCKED) -> None:
        """The service is blocked; `said` is reported, once for each reason."""
        self.error_number = error_number
        if text != self.text:
            self.text = text
            if said:
                self._report(event, said)

    def clear(self, said: str = "") -> None:
        """The service works again; `said` is reported if it was blocked."""
        self.set("", said, event=Event.WORK_RESUMED)


class Service(ABC):
    """One worker's work. `never_idle`: it waits inside work(), so `blocked_reason` is read after each round.
    `records_rounds`: it does not, and a round that takes long is recorded."""

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
        self._beat = context.beat
        self._recorder = context.recorder
        self._blocked = BlockedReason(context.report)

    @property
    def blocked_reason(self) -> str:
        """What keeps the service from its work, for `status`; "" when nothing does."""
        return self._blocked.text

    @property
    def blocked_errno(self) -> int:
        """The errno of what keeps it from its work; 0 where there is none."""
        return self._blocked.error_number

    @abstractmethod
    def work(self) -> bool:
        """One bounded round; True when there may be more to do at once."""

    def take_settings(self, config: EngineConfig) -> None:  # noqa: B027 - not every service has settings that are live
        """Work with these from here on: the ones that are live (`Setting.live`) may have changed."""

    def pause_s(self) -> float:
        """Longest sleep until the next round, in seconds; a wake-up ends it."""
        return 0.0

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep on the armed latch; True if the service did work that came meanwhile."""
        latch.wait(timeout_s)
        return False

    def drain(self) -> bool:
        """One round of an orderly stop; False once everything published before is done."""
        return False

    def close(self) -> None:  # noqa: B027 - not every service has something to release
        """Release descriptors and mappings; nothing is written."""

    @property
    def _is_frozen(self) -> bool:
        return native.load(self._control.state, "frozen") != 0

    def _freeze(self, error: DiskError) -> None:
        freeze(self._memory, self._store, self.KIND, error)

    def _count_error(self) -> None:
        native.increment(self._line, "error_count")


def freeze(memory: EngineMemory, root: str | os.PathLike[str], kind: int, error: DiskError) -> None:
    """Freeze the store after a failed sync or log write: read-only in every process, for good (docs/promises.md, 2).

    The failure is noted on the disk, and each worker that must learn of it is woken. Nothing is retried: the kernel
    has marked the pages clean that it could not write.
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
