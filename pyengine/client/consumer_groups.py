"""The consumer groups of a store, for programs that are no members: members, lag, start offsets, reset.

A group's lag is the number of messages between what it has committed and the end of each queue. A group starts
in a queue at its first message, after its last, at a time, or at an offset.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeGuard, Unpack

from pyengine import arguments
from pyengine.engine_config import EngineSettings
from pyengine.errors import DiskError, EngineUnavailableError, UsageError, command, did_you_mean
from pyengine.formats.paths import Root
from pyengine.formats.record import html_table
from pyengine.ipc.control_block import read_rows
from pyengine.ipc.group_members import GUESTS, GroupMembers, SlotRecord
from pyengine.ipc.live_reader import DISPATCH_S, LiveStoreReader, open_store
from pyengine.ipc.shared_objects import POPS, find_folder
from pyengine.results import Level, ReadLevel
from pyengine.storage.acknowledgements import AckFile
from pyengine.storage.config import check_keywords
from pyengine.storage.config_table import GROUP_TOPIC_PREFIXES, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key
from pyengine.storage.store_reader import StoreReader

LIKELY_TIME = 10 ** 9  # seconds since 1970 in 2001: no queue has as many messages soon
_LOG = logging.getLogger("pyengine.client.consumer_groups")


@dataclass(frozen=True, slots=True, repr=False)
class GroupState:
    """One group on one topic; `members` and `holders` are pids."""

    topic: str
    group: str
    members: tuple[int, ...]
    queues: dict[int, QueueLag]
    holders: dict[int, int]
    note: str = ""
    """If it has more members than queues, or members with different filters."""

    def __repr__(self) -> str:
        return (f"GroupState(topic={self.topic!r}, group={self.group!r}, lag={self.lag}, lost={self.lost}, members={len(self.members)}, "
                f"queues={len(self.queues)})")

    @property
    def lag(self) -> int:
        """Messages not committed."""
        return sum(queue.lag for queue in self.queues.values())

    @property
    def in_flight(self) -> int:
        """Of them popped."""
        return sum(queue.in_flight for queue in self.queues.values())

    @property
    def lost(self) -> int:
        """Deleted before the group read them."""
        return sum(queue.lost for queue in self.queues.values())


class ConsumerGroups:
    """The groups of a store, with or without an engine."""

    def __init__(self, path: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> None:
        check_keywords(ConsumerGroups, settings)
        self._root = arguments.local_path(path).absolute()
        self._settings = settings
        self._offsets = ConsumerOffsets(self._root)
        with self._open():
            pass

    def __repr__(self) -> str:
        return f"ConsumerGroups({str(self._root)!r})"

    def _repr_html_(self) -> str:
        rows = ((each.topic, each.group, each.lag, each.lost, len(each.members), len(each.queues), each.note) for each in self.groups())
        return html_table(repr(self), ("topic", "group", "lag", "lost", "members", "queues", "note"), rows)

    def groups(self, *, topic: str | None = None, group: str | None = None) -> list[GroupState]:
        """Return each group on each topic."""
        popped: dict[tuple[str, str, int], dict[str, Any]] = {}
        with suppress(EngineUnavailableError):  # no engine ever ran
            popped = {(row["topic"], row["group"], row["queue_id"]): row for row in read_rows(find_folder(self._root), POPS)}
        with self._open() as reader:
            return [self._state(reader, each_topic, each_group, offsets, popped)
                    for (each_topic, each_group), offsets in sorted(self._offsets.groups().items())
                    if topic in (None, each_topic) and group in (None, each_group)]

    def notes(self) -> list[str]:
        """Return the damage in config/consumerOffset.json."""
        return self._offsets.notes()

    def reset(
        self, topic: str, group: str, to: Literal["first", "last"] | int | datetime, queues: Sequence[int] | None = None,
    ) -> dict[int, int]:
        """Set the group's offsets; return the next ones.

        Living members follow within a second. An offset outside a queue becomes its nearest end. UsageError for an unknown topic
        or group.
        """
        key = group_key(topic, group)
        groups = [each_group for each_topic, each_group in self._offsets.groups() if each_topic == topic]
        if group not in groups:
            raise UsageError(f"{self._root} has no offsets of group {group!r} on topic {topic!r}{did_you_mean(group, groups)}: a new group "
                             "begins where from_ of its first consumer says")
        with self._open() as reader:
            chosen = reader.queue_ids(topic) if queues is None else sorted(set(queues))
            unknown = set(chosen) - set(reader.queue_ids(topic))
            if unknown or not chosen:
                raise UsageError(f"{self._root} has no {f'queue {min(unknown)}' if unknown else 'queues'} of topic {topic}")
            start = AtOffset(to.__index__()) if is_offset(to) else check_start(to, "to", PLACE)
            if not reaches(reader, start):
                _LOG.warning("queues of %s lack messages that were put before: they count as new ones", topic)
            offsets = {queue_id: start_offset(reader, topic, queue_id, start) for queue_id in chosen}

        def change(table: Table) -> None:
            with suppress(FileNotFoundError), closing(GroupMembers(self._root, topic, group, may_create=False)) as members:
                for queue_id in chosen:
                    members.fence_off(queue_id)
            set_offsets(self._root, table, key, offsets)

        self._offsets.update(change)
        return offsets

    def forget(self, topic: str, group: str) -> bool:
        """Remove the group's offsets of a topic; whether there were any. UsageError while it has members."""
        members, _, _ = self._members(topic, group, ())
        if members:
            pids = ", ".join(str(one.pid) for one in members)
            raise UsageError(f"{group} has living members on {topic} (pids {pids}): stop them first")
        removed: list[object] = []

        def change(table: Table) -> None:
            removed[:] = [table.pop(group_key(topic, group), None)]

        self._offsets.update(change)
        return removed[0] is not None

    def _open(self) -> LiveStoreReader:
        return open_store(self._root, **self._settings)

    def _state(self, reader: LiveStoreReader, topic: str, group: str, offsets: Mapping[int, int],
               popped: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> GroupState:
        queues = queue_lags(reader, topic, offsets, group=group)
        for queue_id, lag in queues.items():
            if row := popped.get((topic, group, queue_id)):
                queues[queue_id] = replace(lag, in_flight=row["in_flight"], attempts=row["attempts"],
                                           invisible_until_ms=row["invisible_until_ms"])
        members, holders, sharing = self._members(topic, group, tuple(queues))
        notes = lack_of_queues(self._root, topic, group, sharing, len(queues)), different_filters(topic, group, members)
        return GroupState(topic, group, tuple(sorted(one.pid for one in members)), queues, holders, "; ".join(filter(None, notes)))

    def _members(self, topic: str, group: str, queues: Sequence[int]) -> tuple[Collection[SlotRecord], dict[int, int], int]:
        """Return (the living members, queue id -> pid of its holder, the number of members that get a share)."""
        try:
            found = GroupMembers(self._root, topic, group, may_create=False)
        except (FileNotFoundError, UsageError, DiskError):  # the group never had a member here, or its file is another user's
            return (), {}, 0
        with closing(found):
            members = found.members()
            living = members.values()
            pids = {one.incarnation: one.pid for one in living}
            records = {queue_id: found.record(queue_id).incarnation for queue_id in queues}
            holders = {queue_id: pids[incarnation] for queue_id, incarnation in records.items() if incarnation in pids}
            return living, holders, sum(at < GUESTS for at in members)


def set_offsets(root: Root, table: Table, key: str, offsets: dict[int, int]) -> None:
    """Let a group go on at these offsets, in an update of the table of all: what was acknowledged above others does not count."""
    AckFile(root, key).void(offsets)
    table[key] = table.get(key, {}) | offsets


# ---- members that do not fit ------------------------------------------------------


def different_filters(topic: str, group: str, members: Iterable[SlotRecord]) -> str:
    """Return a sentence if the members of a group have different tags or conditions, as far as they tell; otherwise ""."""
    pids: dict[int, list[str]] = {}
    for one in sorted(members, key=lambda one: one.pid):
        if one.wanted:
            pids.setdefault(one.wanted, []).append(str(one.pid))
    if len(pids) < 2:
        return ""
    named = ", the others ".join(f"pid {', '.join(each)}" for each in pids.values())
    return (f"the members of {group} on {topic} have different tags or sql ({named}), so each passes over messages that only others want: "
            "give all of them the same, or consume in groups of their own")


def lack_of_queues(root: Path, topic: str, group: str, members: int, queues: int) -> str:
    """Return a sentence if so many members of a group share fewer queues, with the command that makes more; otherwise "".

    `queues` have messages; those that topics.json has beside them will have some.
    """
    if not 0 < queues < members or topic.startswith(GROUP_TOPIC_PREFIXES):
        return ""
    with suppress(DiskError):
        row = TopicConfigs(root).read().rows.get(topic)
        queues = max(queues, row.write_queue_nums if row else 0)
    if queues >= members:
        return ""
    has = "1 queue" if queues == 1 else f"{queues} queues"
    return (f"the group {group} has {members} members on {topic}, which has {has}, so {members - queues} of them get no messages: "
            f"{command('topics', 'update', root, topic, '--queues', members)} makes more queues")


# ---- lag -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The lag of a group in one queue.

    `committed` is the next offset, None for a new queue; `lag` counts from there to `max_offset`, of any tags; `waiting_since_ms`
    is the store time of the first; `lost` were deleted before the group read them. Clients have popped `in_flight`: the first
    comes back at `invisible_until_ms`, the most delivered one came `attempts` times.
    """

    queue_id: int
    committed: int | None
    min_offset: int
    max_offset: int
    lag: int
    lost: int
    waiting_since_ms: int | None
    in_flight: int = 0
    attempts: int = 0
    invisible_until_ms: int | None = None


def queue_lags(
    reader: StoreReader, topic: str, committed: Mapping[int, int], level: Level | None = None, group: str | None = None,
) -> dict[int, QueueLag]:
    """Return the lag in each queue of the topic, and in queues that only have offsets."""
    lags = {}
    for queue_id in sorted({*reader.queue_ids(topic), *committed}):
        low, high = reader.queue_range(topic, queue_id, level)
        wanted = committed.get(queue_id, low)
        first = max(wanted, low)
        found = reader.get_message(topic, queue_id, first, 1, level=level).messages if first < high else []
        lost = [(wanted, low)] if wanted < low else []
        if lost and group is not None:
            with suppress(DiskError, UsageError):  # another user's file, or a name that has none: what is acknowledged counts too
                lost = AckFile(reader.root, group_key(topic, group)).unread(queue_id, wanted, low)
        lags[queue_id] = QueueLag(queue_id, committed.get(queue_id), low, high, max(0, high - first), sum(end - at for at, end in lost),
                                  found[0].store_timestamp_ms if found else None)
    return lags


# ---- where to start --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtOffset:
    """A start at the same offset in every queue; a plain number would be a time."""

    offset: int


Start = Literal["first", "last"] | int | datetime | AtOffset
"""Where a new group starts: first message, after the last, or a time (a datetime with a zone, or ms since 1970)."""


PLACE = "'first', 'last', an offset, or a datetime with a time zone"


class WrongStartError(UsageError, TypeError):
    """A start of a wrong type."""


def check_start(start: Start, name: str = "from_", wanted: str = f"'first', 'last', {arguments.MOMENT}") -> Start:
    """Return `start`; UsageError if it is not a valid start, also TypeError for a wrong type."""
    if isinstance(start, AtOffset) or isinstance(start, str) and start in ("first", "last"):
        return start
    if isinstance(start, str):
        raise UsageError(f"{name} is {start!r}, which is not a place to start: give {wanted}")
    try:
        time_ms = arguments.moment_ms(start, name, wanted)
    except TypeError as error:
        raise WrongStartError(str(error)) from None
    return start if isinstance(start, datetime) else time_ms


def is_offset(place: object) -> TypeGuard[SupportsIndex]:
    """Whether a place, where an int is an offset and no time, is one."""
    return hasattr(place, "__index__") and not isinstance(place, bool)


def check_offset(offset: int, queue_id: int, end: int) -> int:
    """Return a queue's offset; UsageError for one below 0, and for one beyond the end that is rather a time."""
    if offset < 0:
        raise UsageError(f"{offset} is not an offset: give 0 or more")
    if offset > end and offset >= LIKELY_TIME:
        raise UsageError(f"{offset} is beyond the end {end} of queue {queue_id}: an int is an offset here; for a time give a datetime "
                         "with a time zone")
    return offset


def needs_dispatch(reader: LiveStoreReader, start: Start) -> bool:
    """Return whether a start can lie after a message that is not in its queue yet: for a time, if the oldest of these is older."""
    if isinstance(start, str | AtOffset):
        return start not in ("first", AtOffset(0))
    oldest = reader.message_at(reader.dispatched_offset(ReadLevel.COMMITTED), ReadLevel.COMMITTED)
    return oldest is None or oldest.store_timestamp_ms < _time_ms(start)


def reaches(reader: LiveStoreReader, start: Start, timeout_s: float = DISPATCH_S) -> bool:
    """Wait until the queues have each message that was put and that a start can lie after; return whether they do in time."""
    return not needs_dispatch(reader, start) or reader._wait_for_dispatch(reader.max_physical_offset(ReadLevel.COMMITTED), timeout_s)


def _time_ms(start: int | datetime) -> int:
    return int(start.timestamp() * 1000) if isinstance(start, datetime) else start


def start_offset(reader: StoreReader, topic: str, queue_id: int, start: Start) -> int:
    """Return the first offset to read, within the queue.

    For a time it is the offset of the first message stored then or later, or the end if there is none.
    """
    low, high = reader.queue_range(topic, queue_id)
    if start == "first":
        return low
    if start == "last":
        return high
    if isinstance(start, AtOffset):
        return min(max(check_offset(start.offset, queue_id, high), low), high)
    # RocketMQ's own look-up returns the nearest message, and any one of several in the same millisecond: a reader that
    # started there could miss some.
    def stored_ms(offset: int) -> int:
        found = reader.get_message(topic, queue_id, offset, 1).messages
        return found[0].store_timestamp_ms if found else -1  # deleted just now, which only happens to the oldest

    return low + bisect_left(range(low, high), _time_ms(start), key=stored_ms)
