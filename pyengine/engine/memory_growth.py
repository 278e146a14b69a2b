"""What the supervisor adds to the memory of a running engine: a larger queue table, the rest of the pool.

It makes a queue table when the writer asks for a larger one, empty; the writer copies what it has,
goes over and removes the old one. Between the two the writer goes on with the old table, or waits,
bounded, when that is full. Pool buffers that were not needed at once are made beside the running engine.
"""

from __future__ import annotations

import threading

from pyengine.errors import EngineError
from pyengine.events import Event, Report
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import POOL_NOT_MADE, EngineMemory
from pyengine.ipc.shared_objects import pool_name
from pyengine.native import control as native
from pyengine.native import queue_table
from pyengine.native.failpoint import failpoint

SLOTS_MAX = 1 << 24


def grow_queue_table(memory: EngineMemory) -> str:
    """Offer a larger table if one is wanted; a sentence if it cannot be made (it is tried again at the next call)."""
    wanted = native.load(memory.control.writer, "queue_table_wanted")
    if wanted == 0:
        return ""
    generation = native.load(memory.control.state, "queue_table_generation_offered")
    try:
        shared, table = memory.open_queue_table(generation)
    except (EngineError, OSError) as error:
        return str(error)
    with shared:
        offered = table.slots
    if wanted <= offered:
        return ""
    slots = offered
    while slots < wanted:
        slots *= 2
    if slots > SLOTS_MAX:
        return f"{wanted:,} queues are more than an engine can hold ({SLOTS_MAX:,} slots)"
    name = shared_objects.queues_name(generation + 1)
    memory.folder.unlink(name)  # of a supervisor that died in here
    try:
        with memory.folder.create(name, queue_table.table_bytes(slots)) as made:
            queue_table.format_table(queue_table.view(made.memory), slots, generation + 1)
    except EngineError as error:
        return str(error)
    failpoint("table_made")
    native.store(memory.control.state, "queue_table_generation_offered", generation + 1)
    failpoint("table_offered")
    memory.wake(native.WRITER)
    return ""


def make_pool_buffer(memory: EngineMemory, number: int) -> None:
    """Create one buffer, every page of it, and let the writer have it."""
    name = pool_name(number)
    memory.folder.unlink(name)  # of a supervisor that died in here
    memory.folder.create(name, memory.identity.segment_bytes).close()
    native.compare_and_swap(memory.control.pool[number], "segment_base", POOL_NOT_MADE, -1)


def missing_pool_buffers(memory: EngineMemory) -> list[int]:
    """Numbers of the buffers that are still to be made."""
    return [number for number in range(memory.identity.pool_buffers)
            if native.load(memory.control.pool[number], "segment_base") == POOL_NOT_MADE]


class PoolGrowth:
    """Makes the pool buffers that were not needed at once, beside the running engine, and has all of them open."""

    def __init__(self, memory: EngineMemory, say: Report) -> None:
        self._memory = memory
        self.buffers = list(memory.open_pool(writable=False).values())
        self._say = say
        self._going = True
        self._thread = threading.Thread(target=self._make, name="pool", daemon=True)

    def start(self) -> None:
        """Make what is missing, in a thread of its own."""
        if missing_pool_buffers(self._memory):
            self._thread.start()

    def _make(self) -> None:
        try:
            for number in missing_pool_buffers(self._memory):
                if not self._going:
                    return
                make_pool_buffer(self._memory, number)
                self.buffers.append(self._memory.folder.attach(pool_name(number), writable=False))
                self._memory.wake(native.WRITER)
        except (EngineError, OSError) as error:  # no room, no descriptor: the writer goes on with what it has
            self._say(Event.POOL_SMALLER, f"the pool stays smaller than asked: {error}")

    def join(self) -> None:
        """Stop after the buffer that is being made."""
        self._going = False
        if self._thread.ident is not None:
            self._thread.join()
