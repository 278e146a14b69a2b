"""The consumer groups of a store: their members, their lag, and their offsets, which can be reset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pyengine.client.group_lag import QueueLag, queue_lags
from pyengine.client.start_offset import AtOffset, check_start, start_offset
from pyengine.config import check_keywords
from pyengine.errors import DiskError, UsageError
from pyengine.ipc.group_members import GroupMembers
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group on one topic: the pids of its living members, and by queue id its lag and the pid of the queue's member."""

    topic: str
    group: str
    members: tuple[int, ...]
    queues: dict[int, QueueLag]
    holders: dict[int, int]

    @property
    def lag(self) -> int:
        """How many messages the group has not committed yet."""
        return sum(queue.lag for queue in self.queues.values())

    @property
    def lost(self) -> int:
        """How many messages were deleted before the group read them."""
        return sum(queue.lost for queue in self.queues.values())


class ConsumerGroups:
    """The groups of the store at `path`; needs no engine. Only reset() and forget() change anything."""

    def __init__(self, path: str | os.PathLike[str], **settings: object) -> None:
        """NotAStoreError, ConfigError."""
        check_keywords(ConsumerGroups, settings)
        self._root = Path(path)
        self._settings = settings
        self._offsets = ConsumerOffsets(path)
        with self._open():
            pass

    def groups(self, *, topic: str | None = None, group: str | None = None) -> list[GroupState]:
        """The state of every group on every topic, or of this topic or group only."""
        with self._open() as reader:
            return [self._state(reader, each_topic, each_group, offsets)
                    for (each_topic, each_group), offsets in sorted(self._offsets.groups().items())
                    if topic in (None, each_topic) and group in (None, each_group)]

    def notes(self) -> list[str]:
        """Sentences about a damaged config/consumerOffset.json; empty when all is well."""
        return self._offsets.table().notes

    def reset(
        self, topic: str, group: str, to: Literal["first", "last"] | int | datetime, queues: Sequence[int] | None = None,
    ) -> dict[int, int]:
        """Set the group's offsets to the first or last message, an offset, or a time, in all queues or in these.

        Living members continue there within a second; their commits of messages read before have no effect. An offset
        outside a queue becomes the queue's nearest end. Returns queue id -> next offset. UsageError for a topic
        without queues.
        """
        key = group_key(topic, group)
        with self._open() as reader:
            chosen = reader.queue_ids(topic) if queues is None else sorted(set(queues))
            unknown = set(chosen) - set(reader.queue_ids(topic))
            if unknown or not chosen:
                raise UsageError(f"{self._root} has no queue {min(unknown, default=0)} of topic {topic}")
            start = AtOffset(to) if type(to) is int else check_start(to)
            offsets = {queue_id: start_offset(reader, topic, queue_id, start) for queue_id in chosen}

        def change(table: Table) -> None:
            self._end_holds(topic, group, chosen)
            table[key] = table.get(key, {}) | offsets

        self._offsets.update(change)
        return offsets

    def forget(self, topic: str, group: str) -> bool:
        """Remove the group's offsets of a topic; whether there were any. UsageError while it has living members."""
        members, _ = self._members(topic, group, ())
        if members:
            raise UsageError(f"{group} has living members on {topic} (pids {', '.join(map(str, members))}): stop them first")
        removed: list[object] = []

        def change(table: Table) -> None:
            removed[:] = [table.pop(group_key(topic, group), None)]

        self._offsets.update(change)
        return removed[0] is not None

    def _open(self) -> LiveStoreReader:
        return open_store(self._root, **self._settings)

    def _state(self, reader: LiveStoreReader, topic: str, group: str, offsets: Mapping[int, int]) -> GroupState:
        queues = queue_lags(reader, topic, offsets)
        members, holders = self._members(topic, group, tuple(queues))
        return GroupState(topic, group, members, queues, holders)

    def _members(self, topic: str, group: str, queues: Sequence[int]) -> tuple[tuple[int, ...], dict[int, int]]:
        """(pids of the living members, queue id -> pid of its holder)."""
        try:
            found = GroupMembers(self._root, topic, group, may_create=False)
        except (FileNotFoundError, UsageError, DiskError):  # never consumed here, or not by this user
            return (), {}
        try:
            living = found.members().values()
            pids = {one.incarnation: one.pid for one in living}
            records = {queue_id: found.record(queue_id).incarnation for queue_id in queues}
            holders = {queue_id: pids[incarnation] for queue_id, incarnation in records.items() if incarnation in pids}
            return tuple(sorted(one.pid for one in living)), holders
        finally:
            found.close()

    def _end_holds(self, topic: str, group: str, queues: Sequence[int]) -> None:
        try:
            members = GroupMembers(self._root, topic, group, may_create=False)
        except FileNotFoundError:  # nobody has ever held a queue
            return
        try:
            for queue_id in queues:
                members.fence_off(queue_id)
        finally:
            members.close()
