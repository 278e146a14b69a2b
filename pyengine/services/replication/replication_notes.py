"""Keeps `config/replication.json` up to date while a replicator runs, at most once a second.

A file that is durable costs the disk milliseconds; a thread of its own pays them, so that
no acknowledgement waits for it.
"""

from __future__ import annotations

import threading

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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, name="notes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _go(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.note()

    def note(self) -> bool:
        """Write the file if it can say more than it does; whether it was written."""
        is_slave = self._role == ROLE_NAMES[native.SLAVE]
        state = ReplicationState(self._role, native.load_position(self._control.confirm), self._dispatch_at,
                                 master_end=native.load(self._control.replicator, "master_end") if is_slave else 0)
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
        self.note()
