"""Keeps `config/replication.json` up to date while a replicator runs, at most once a second.

A file that is durable costs the disk milliseconds; a thread of its own pays them, so that
no acknowledgement waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pyengine.errors import EngineError
from pyengine.ipc.control_block import ROLE_NAMES
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.services.service import BlockedReason, ServiceContext
from pyengine.storage.replication_state import DISPATCH_AT, ReplicationState, ReplicationStateFile

INTERVAL_S = 1.0


class ReplicationNotes:
    """Notes the role and the confirmed position of one engine, and how far a slave's master was heard of.

    `blocked`: why nothing can be noted at present.
    """

    def __init__(self, context: ServiceContext) -> None:
        memory = context.memory
        self._control = memory.control
        self._role = ROLE_NAMES[memory.identity.role]
        self._dispatch_at = DISPATCH_AT[memory.identity.dispatch_at]  # not as the file says, which may be unreadable now
        self._file = ReplicationStateFile(context.store.root)
        self._written, _ = self._file.read()
        self.blocked = BlockedReason(context.report)
        self.also: Callable[[], None] | None = None  # called by the same thread, after each note
        self._lock = threading.Lock()
        self._term = self._written.term if self._written is not None else 0
        self._fenced_by = self._written.fenced_by if self._written is not None else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, name="notes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _go(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.note()
            if self.also is not None:
                self.also()

    @property
    def term(self) -> int:
        """Of the master that this store is, or follows."""
        return self._term

    @property
    def known_term(self) -> int:
        """The highest that this store knows of."""
        return max(self._term, self._fenced_by)

    @property
    def is_fenced(self) -> bool:
        """Whether a master of a higher term has taken the place of this one."""
        return self._fenced_by > self._term

    def follow(self, term: int) -> None:
        """A slave has met the master of that term: noted when this returns, unless `blocked` says why not, then each second."""
        if term > self._term:
            self._term = term
            self.note()

    def fence(self, term: int) -> None:
        """A master has heard of that term; noted as follow() does."""
        if term > self._fenced_by:
            self._fenced_by = term
            self.note()

    def note(self) -> bool:
        """Write the file if it can say more than it does; whether it was written."""
        with self._lock:
            return self._note()

    def _note(self) -> bool:
        is_slave = self._role == ROLE_NAMES[native.SLAVE]
        state = ReplicationState(self._role, native.load_position(self._control.confirm), self._dispatch_at,
                                 master_end=native.load(self._control.replicator, "master_end") if is_slave else 0,
                                 term=self._term, fenced_by=self._fenced_by)
        if state == self._written:
            return False
        try:
            self._file.write(state)
            failpoint("replication_noted")
        except EngineError as error:
            reason = f"how far the log is confirmed cannot be noted: {error}"
            self.blocked.set(reason, reason)
            return False
        self._written = state
        self.blocked.clear()
        return True

    def close(self) -> None:
        """The last note."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            if self.also is not None:
                self.also()
        self.note()
