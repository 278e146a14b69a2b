"""The queue table: the next queue offset of each (topic, queue id), in shared memory (csrc/queue_table.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import lib
from pyengine.errors import DiskFullError
from pyengine.native.control import SharedStruct

if TYPE_CHECKING:
    from pyengine._native import ms_queue_table


_SHARED: SharedStruct[ms_queue_table] = SharedStruct("the table of queues", "struct ms_queue_table", lib.ms_queue_table_check)
view, check = _SHARED.view, _SHARED.check


def table_bytes(slots: int) -> int:
    """Return the size of a table of `slots` (a power of two)."""
    return lib.ms_queue_table_bytes(slots)


def format_table(table: ms_queue_table, slots: int, generation: int) -> None:
    """Make zeroed memory an empty table."""
    lib.ms_queue_table_format(table, slots, generation)


def set_offset(table: ms_queue_table, topic: str, queue_id: int, next_offset: int) -> None:
    """Set a queue's next offset outside any pass (at start)."""
    name = topic.encode()
    if lib.ms_queue_table_set(table, name, len(name), queue_id, next_offset):
        raise DiskFullError(f"the queue table of {table.slots} slots is full")


def get_offset(table: ms_queue_table, topic: str, queue_id: int) -> int | None:
    """Return the next offset of a queue, None if the table does not have the queue."""
    name = topic.encode()
    slot = lib.ms_queue_table_find(table, name, len(name), queue_id, 0)
    return None if slot < 0 else table.slot[slot].next_offset


def copy(to: ms_queue_table, source: ms_queue_table) -> None:
    """Copy all queues of `source` into the empty, larger table `to`."""
    if lib.ms_queue_table_copy(to, source):
        raise DiskFullError(f"the queue table of {to.slots} slots is full")
