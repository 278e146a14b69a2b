"""How far each delay level is delivered: scheduleMessageOffset_<level> of RocketMQ's runtime figures."""

from __future__ import annotations

import os
from typing import NamedTuple

from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native import queue_table
from pyengine.storage.delay_offset import DelayOffsets

LEVELS_MAX = 64  # RocketMQ has 18; who sets more by message_delay_level sees the first ones


class LevelOffset(NamedTuple):
    """Queue offsets of one level: the next to be delivered, as the scheduler last noted it, and the level's end."""

    offset: int
    end: int

    @property
    def pending(self) -> int:
        """Messages that wait, or were delivered since the scheduler noted it."""
        return max(0, self.end - self.offset)


def schedule_offsets(root: str | os.PathLike[str], memory: EngineMemory) -> dict[int, LevelOffset]:
    """By level (1 to LEVELS_MAX), of the levels that ever had a message.

    EngineUnavailableError when the queue table is just being replaced by a larger one.
    """
    generation = native.load(memory.control.slots[native.load_position(memory.control.slot_pass) % 2], "queue_table_generation")
    delivered, _ = DelayOffsets(root).read()
    with memory.folder.attach(shared_objects.queues_name(generation), writable=False) as shared:
        table = queue_table.view(shared.memory)
        ends = {level: queue_table.get_offset(table, SCHEDULE_TOPIC, level - 1) for level in range(1, LEVELS_MAX + 1)}
    return {level: LevelOffset(delivered.get(level, 0), end) for level, end in ends.items() if end}
