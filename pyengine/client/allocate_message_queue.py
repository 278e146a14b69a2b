"""Which queues of a topic are whose (RocketMQ's AllocateMessageQueueAveragely)."""

from __future__ import annotations

from collections.abc import Sequence


def allocate_averagely(queue_ids: Sequence[int], members: Sequence[int], me: int) -> list[int]:
    """The share of member `me`: a run of neighbouring queues; shares differ by one queue at most.

    Both sequences are sorted alike by everybody. Empty for who is no member, and for the
    members that are left over where there are more of them than queues.
    """
    if me not in members or not queue_ids:
        return []
    index, rest = members.index(me), len(queue_ids) % len(members)
    size = len(queue_ids) // len(members) + (1 if index < rest else 0)
    start = index * size + (0 if index < rest else rest)
    return list(queue_ids[start : start + size])
