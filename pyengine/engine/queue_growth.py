"""A larger queue table when the writer asks for one.

The supervisor makes it, empty; the writer copies what it has and goes over (then it
removes the old one). Between the two the writer goes on with the old table, or waits,
bounded, when that is full.
"""

from __future__ import annotations

from pyengine.errors import EngineError
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
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
    except EngineError as error:
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
