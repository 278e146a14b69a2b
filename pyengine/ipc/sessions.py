"""The session table: who may put. Its one writing process here is the supervisor.

A slot goes FREE -> OPEN (supervisor) -> DEAD (supervisor, or the writer for a bad entry)
-> FREE (writer, once the ring is drained). Each opening raises the slot's generation,
which is part of the object's name beside the epoch, so that nothing ever speaks of the
wrong session, of this engine or of an earlier one.
The object itself carries a lock that lasts as long as any copy of the producer's descriptor or
its mapping does: that tells of a producer that dropped its session without a word, or that
became another program by exec. Its process's end is told at once, by a pidfd.
Every step is one compare-and-swap; after it `session_seq` rises and the writer is woken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from pyengine.errors import DiskFullError, EngineUnavailableError
from pyengine.ipc.control_block import SESSION_SLOTS, EngineMemory
from pyengine.ipc.heartbeat import is_alive, process_start_ms
from pyengine.ipc.shared_objects import session_name
from pyengine.ipc.store_lock import hold, is_held
from pyengine.native import control as native
from pyengine.native import sequence
from pyengine.native import session as native_session
from pyengine.native.failpoint import failpoint


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session just opened. `descriptor` is its object's, read-write; the caller closes it."""

    slot: int
    generation: int
    ring_bytes: int
    session_bytes: int
    descriptor: int


class SlotsDrainingError(DiskFullError):
    """All slots are taken, but some are about to be free."""


class Sessions:
    """Opens sessions, marks them dead, clears up behind them."""

    def __init__(self, memory: EngineMemory) -> None:
        self._memory = memory
        self._control = memory.control
        self._slots = range(min(memory.identity.sessions_max, SESSION_SLOTS))

    def open(self, pid: int, uid: int, ring_bytes: int | None = None) -> OpenSession:
        """A session for the process `pid`. Raises a sentence: all slots taken, wrong size, no room, process gone."""
        ring_bytes = ring_bytes or self._memory.identity.session_ring_bytes_default
        native_session.check_ring_bytes(ring_bytes)
        start_ms = process_start_ms(pid)
        if start_ms is None:
            raise EngineUnavailableError(f"process {pid} is not to be seen from here: "
                                         "producer and engine must share one pid namespace")
        slot = self._free_slot()
        line = self._control.sessions[slot]
        generation = native.load(line, "generation") % 0xFFFFFFFF + 1
        size = native_session.session_bytes(ring_bytes)
        name = session_name(self._memory.identity.epoch, slot, generation)
        self._memory.folder.unlink(name)  # of a supervisor that died right here
        with self._memory.folder.create(name, size) as shared:
            view = native_session.view(shared.memory)
            native_session.format_session(view, ring_bytes, slot, generation, self._memory.identity.epoch)
            hold(shared.descriptor)
            descriptor = os.dup(shared.descriptor)
        failpoint("session_object_made")
        line.pid, line.uid, line.start_time_ms = pid, uid, start_ms
        line.ring_bytes, line.bad_entry = ring_bytes, 0
        native.store(line, "generation", generation)
        failpoint("session_row_filled")
        native.compare_and_swap(line, "state", native.SESSION_FREE, native.SESSION_OPEN)
        failpoint("session_opened")
        self._changed()
        return OpenSession(slot, generation, ring_bytes, size, descriptor)

    def _free_slot(self) -> int:
        for slot in self._slots:
            if native.load(self._control.sessions[slot], "state") == native.SESSION_FREE:
                return slot
        sentence = f"all {len(self._slots)} sessions are taken: close producers, or raise sessions_max"
        states = (native.load(self._control.sessions[slot], "state") for slot in self._slots)
        if self.close_dropped() or native.SESSION_DEAD in states:
            raise SlotsDrainingError(sentence)
        raise DiskFullError(sentence)

    def close_dropped(self) -> list[int]:
        """Mark the sessions dead that no process has open any more; the slots closed."""
        return [slot for slot, generation, _ in self.open_slots()
                if not self._is_held(slot, generation) and self.close(slot, generation)]

    def _is_held(self, slot: int, generation: int) -> bool:
        name = session_name(self._memory.identity.epoch, slot, generation)
        try:
            descriptor = os.open(self._memory.folder.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:  # somebody removed the name: the pidfd must do
            return True
        try:
            return is_held(descriptor)
        finally:
            os.close(descriptor)

    def close(self, slot: int, generation: int) -> bool:
        """The producer is done or dead: what it published is still executed. False when it was closed already."""
        if slot not in self._slots:
            return False
        line = self._control.sessions[slot]
        if native.load(line, "generation") != generation:
            return False
        if not native.compare_and_swap(line, "state", native.SESSION_OPEN, native.SESSION_DEAD):
            return False
        failpoint("session_marked_dead")
        self._changed()
        return True

    def owner_lives(self, slot: int) -> bool:
        """Whether the very process that the slot was opened for is alive."""
        line = self._control.sessions[slot]
        return is_alive(native.load(line, "pid"), native.load(line, "start_time_ms"))

    def open_slots(self) -> list[tuple[int, int, int]]:
        """(slot, generation, pid) of the open sessions."""
        found = []
        for slot in self._slots:
            line = self._control.sessions[slot]
            if native.load(line, "state") == native.SESSION_OPEN:
                found.append((slot, native.load(line, "generation"), native.load(line, "pid")))
        return found

    def close_orphans(self) -> list[int]:
        """Mark the sessions of processes that are gone; for a supervisor that takes over. The slots closed."""
        return [slot for slot, generation, _ in self.open_slots()
                if not self.owner_lives(slot) and self.close(slot, generation)]

    def sweep_objects(self) -> list[str]:
        """Remove session and side objects whose session is over and drained; the names removed."""
        living = set()
        for slot in self._slots:
            line = self._control.sessions[slot]
            if native.load(line, "state") != native.SESSION_FREE:
                living.add((self._memory.identity.epoch, slot, native.load(line, "generation")))
        removed = []
        try:
            names = self._memory.folder.names()
        except OSError:  # no descriptor is to be had: later
            return []
        for name in names:
            kind, *numbers = name.split("-")
            if kind not in ("session", "side") or not all(number.isdecimal() for number in numbers):
                continue
            if tuple(map(int, numbers[:3])) not in living:
                if self._memory.folder.unlink(name):
                    removed.append(name)
        return removed

    def _changed(self) -> None:
        sequence.raise_(self._control.session_seq)
        self._memory.wake(native.WRITER)
