"""After a recovery no group may wait for messages that the log has lost.

A group may have committed offset 100 when a power cut takes the log back to 90. The next
messages get the offsets 90 to 99 again, and the group would never see them. So recovery,
before anything can be put, takes such offsets back to where the queue ends now. It also
writes a damaged file anew from the one before it. What `delayOffset.json` says of the delay
levels is taken back likewise (ScheduleMessageService.correctDelayOffset), and here rather than
by the scheduler, who may come up when the lost offsets have been given again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pyengine.errors import EngineError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, split_key
from pyengine.storage.delay_offset import DelayOffsets


def clamp_offsets(
    root: Path, queue_ends: Mapping[tuple[str, int], int], *, before_change: Callable[[], object] = lambda: None,
) -> list[str]:
    """Take offsets behind the ends of their queues back; returns a sentence for each and for damage.

    For the store's owner. What cannot be written is a sentence too: offsets never keep a
    store from coming up.
    """
    offsets = ConsumerOffsets(root)
    found = offsets.table()
    notes = list(found.notes)
    if not found.is_damaged and not _behind(found.offsets, queue_ends):
        return notes

    def change(table: Table) -> None:
        for key, queue_id, end in _behind(table, queue_ends):
            table[key][queue_id] = end

    notes += [f"{key} queue {queue_id}: the offset {found.offsets[key][queue_id]} was behind the end and is {end} now"
              for key, queue_id, end in _behind(found.offsets, queue_ends)]
    before_change()
    try:
        offsets.update_as_owner(change)
    except (EngineError, OSError) as error:
        notes.append(f"the groups' offsets could not be corrected: {error}")
    return notes


def _behind(table: Table, queue_ends: Mapping[tuple[str, int], int]) -> list[tuple[str, int, int]]:
    """(key, queue id, end of the queue) for each offset behind its queue's end."""
    ends = [(key, queue_id, offset, queue_ends.get((split_key(key)[0], queue_id), 0))
            for key, queues in table.items() for queue_id, offset in queues.items()]
    return [(key, queue_id, end) for key, queue_id, offset, end in ends if offset > end]


def clamp_delay_offsets(
    root: Path, queue_ends: Mapping[tuple[str, int], int], *, before_change: Callable[[], object] = lambda: None,
) -> list[str]:
    """The same for how far the delay levels are delivered; level n waits in queue n - 1 of SCHEDULE_TOPIC_XXXX.

    A damaged file is left to the scheduler, who tells of it and stands in with the one before.
    """
    offsets = DelayOffsets(root)
    table, _ = offsets.read()
    ends = {level: queue_ends.get((SCHEDULE_TOPIC, level - 1), 0) for level in table}
    behind = {level: end for level, end in ends.items() if table[level] > end}
    if not behind:
        return []
    notes = [f"delay level {level} was said to be delivered up to {table[level]}, behind the end of its queue: "
             f"up to {end} now" for level, end in behind.items()]
    before_change()
    try:
        offsets.write(table | behind)
    except EngineError as error:
        notes.append(f"delayOffset.json could not be corrected: {error}")
    return notes
