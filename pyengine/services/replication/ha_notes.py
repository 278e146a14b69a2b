"""`config/replication.json` while a replicator runs: it is kept up to date, with at most one write a second.

A durable write takes milliseconds, so a thread of its own writes the file and no acknowledgement waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pyengine.errors import EngineError
from pyengine.ipc.control_block import ROLE_NAMES
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.services.service import BlockedReason, ServiceContext
from pyengine.storage.replication_state import DISPATCH_AT, ReplicationState, ReplicationStateFile

INTERVAL_S = 1.0  # between two notes


class ReplicationNotes:
    """Notes the role and the confirmed offset of one engine and, of a slave, the last known end of its master's log.

    `blocked`: why the file cannot be written at present; `term`: of this store as a master, or of the master that it follows.
    """

    def __init__(self, context: ServiceContext, after_note: Callable[[], None] = lambda: None) -> None:
        """`after_note` is called by the notes' thread, after each note."""
        memory = context.memory
        self._control = memory.control
        self._role = ROLE_NAMES[memory.identity.role]
        self._dispatch_at = DISPATCH_AT[memory.identity.dispatch_at]  # not from the file, which may be unreadable now
        self._file = ReplicationStateFile(context.store.root)
        self._written = self._file.read().state
        self.blocked = BlockedReason(context.report)
        self._after_note = after_note
        self._lock = threading.Lock()
        known = self._written or ReplicationState(self._role, 0)
        self.term, self._fenced_by, self._second_master = known.term, known.fenced_by, known.second_master
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.note()
            self._after_note()

    @property
    def known_term(self) -> int:
        """The highest term that this store knows of."""
        return max(self.term, self._fenced_by)

    @property
    def is_fenced(self) -> bool:
        """Whether another master has replaced this one."""
        return self._fenced_by > self.term or self._second_master != ""

    def follow(self, term: int) -> None:
        """Note, as a slave, the term of its master, before this returns; if that fails, `blocked` says why, and it is tried each second."""
        with self._lock:
            if term > self.term:
                self.term = term
                self._note()

    def fence(self, term: int) -> None:
        """Note, as a master, a term that another store has; like follow()."""
        with self._lock:
            if term > self._fenced_by:
                self._fenced_by = term
                self._note()

    def yield_to(self, address: str) -> None:
        """Note, as a master, where another of the same term is; like follow()."""
        with self._lock:
            self._second_master = address
            self._note()

    def note(self) -> bool:
        """Write the file if its content has changed; return whether it was written."""
        with self._lock:
            return self._note()

    def _note(self) -> bool:
        is_slave = self._role == ROLE_NAMES[native.SLAVE]
        state = ReplicationState(self._role, native.load_position(self._control.confirm), self._dispatch_at,
                                 master_end=native.load(self._control.replicator, "master_end") if is_slave else 0,
                                 term=self.term, fenced_by=self._fenced_by, second_master="" if is_slave else self._second_master)
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
        """Write the last note, and end the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._after_note()
        self.note()
