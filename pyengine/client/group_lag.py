"""How far a group is behind: messages between what it has committed and the end of each queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine.results import ReadLevel

if TYPE_CHECKING:
    from pyengine.storage.store_reader import StoreReader


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The lag of a group in one queue.

    `committed` is the next offset of the group, None for a queue that is new to it; `lag` the number of messages
    from there to `max_offset`, whatever their tags; `waiting_since_ms` the store time of the first of them, None without
    any. `lost` counts messages that were deleted before the group read them.
    """

    queue_id: int
    committed: int | None
    min_offset: int
    max_offset: int
    lag: int
    lost: int
    waiting_since_ms: int | None


def queue_lags(
    reader: StoreReader, topic: str, committed: Mapping[int, int], level: ReadLevel | str | None = None,
) -> dict[int, QueueLag]:
    """The lag in each queue of the topic, and in queues that only the offsets name."""
    return {queue_id: _queue_lag(reader, topic, queue_id, committed.get(queue_id), level)
            for queue_id in sorted({*reader.queue_ids(topic), *committed})}


def _queue_lag(
    reader: StoreReader, topic: str, queue_id: int, committed: int | None, level: ReadLevel | str | None,
) -> QueueLag:
    low, high = reader.queue_range(topic, queue_id, level)
    wanted = low if committed is None else committed
    first = max(wanted, low)
    found = reader.get_message(topic, queue_id, first, 1, level=level).messages if first < high else []
    return QueueLag(queue_id, committed, low, high, max(0, high - first), max(0, low - wanted),
                    found[0].store_timestamp_ms if found else None)
