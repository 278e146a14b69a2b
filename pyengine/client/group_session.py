"""One member's part in a consumer group: its share of the queues, its claims on them, their offsets.

    session.beat()                      # often, so that no member takes this process for dead
    session.share(queue_ids)            # which queues are this member's now
    session.take(those it lacks)        # claims what is free, with the offsets to start from
    session.commit(...)                 # only what it still holds is remembered
    session.give_back(...)              # remembers, then releases

Every member works its share out by itself from who is alive (AllocateMessageQueueAveragely);
claims see to it that two of them never hold a queue at once, even while they disagree.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine.ipc.group_members import Claim, GroupMembers
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key
from pyengine.storage.engine_id import read_epoch

if TYPE_CHECKING:
    from pyengine.formats.record import Message

BEAT_S = 0.5


class HistoryChangedError(Exception):
    """The store was recovered since the offsets were read: they may count messages that are gone."""


class GroupSession:
    """A member of `group` on `topic`. `queue_ids`: take these and no share of the others.

    A member that shows no sign of life for `session_timeout_s` is passed over. One thread
    at a time, but for holds().
    """

    def __init__(
        self, root: str | os.PathLike[str], topic: str, group: str, *, queue_ids: Sequence[int] | None = None,
        session_timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = Path(root)
        self._topic = topic
        self._group = group
        self._key = group_key(topic, group)
        self._only = None if queue_ids is None else sorted(set(queue_ids))
        self._clock = clock
        self._beaten_s = float("-inf")
        self._liveness = LivenessTracker(session_timeout_s, clock)
        self._silent: set[int] = set()  # incarnations of members that were passed over in the last share()
        self._offsets = ConsumerOffsets(root, while_waiting=self.beat)
        self.epoch = read_epoch(root)  # before any offset is read
        self._members, self._slot = self._joined()

    def begin(self, starts: Callable[[], Mapping[int, int]]) -> list[str]:
        """Write down where a new group starts, so that a death before its first commit leaves nothing out.

        `starts` is asked only for a group that has no offsets here. Returns the sentences
        about a damaged file.
        """
        now = self._offsets.table()
        if self._begun(now.offsets):
            return now.notes
        found = dict(starts())

        def change(table: Table) -> None:
            if not self._begun(table):
                row = table.setdefault(self._key, {})
                row.update({queue_id: offset for queue_id, offset in found.items() if queue_id not in row})

        return self._offsets.update(change).notes

    def beat(self) -> None:
        """Show a sign of life, if the last one is BEAT_S old."""
        if self._clock() - self._beaten_s >= BEAT_S:
            self._beaten_s = self._clock()
            self._members.beat()

    def rejoin_if_removed(self) -> bool:
        """Start anew if the members' file was removed: all claims are void then."""
        if self._members.is_current:
            return False
        fresh, slot = self._joined()
        self._members.close()
        self._members, self._slot = fresh, slot
        return True

    def share(self, queue_ids: Sequence[int]) -> list[int]:
        """This member's queues among the topic's, as the living members divide them now."""
        if self._only is not None:
            return list(self._only)
        self._silent.clear()
        living = [slot for slot in self._members.sharing() if slot == self._slot or not self._is_silent(slot)]
        return allocate_averagely(sorted(queue_ids), living, self._slot)

    def take(self, queue_ids: Iterable[int]) -> dict[int, tuple[Claim, int | None]]:
        """Claim these queues as far as they are free, or their holder shows no sign of life.

        Queue id -> the claim, and the next offset that the group wants (None for a queue
        that is new to it).
        """
        wanted = sorted(queue_ids)
        overdue = {queue_id for queue_id in wanted if self._is_overdue(queue_id)}
        free = [queue_id for queue_id in wanted if queue_id in overdue or not self._members.is_claimed(queue_id)]
        if not free:
            return {}
        claims: dict[int, Claim] = {}

        def drop_claims() -> None:
            for claim in claims.values():
                self._members.drop(claim)
            claims.clear()

        def change(table: Table) -> None:
            drop_claims()  # of a try in which this process was passed over
            for queue_id in free:
                claim = self._members.seize(queue_id) if queue_id in overdue else self._members.claim(queue_id)
                if claim is not None:
                    claims[queue_id] = claim

        try:
            row = self._offsets.update(change).offsets.get(self._key, {})
        except BaseException:  # a claim that is not recorded would keep its queue from all members
            drop_claims()
            raise
        for queue_id in claims:
            self._liveness.forget(("queue", queue_id))
        return {queue_id: (claim, row.get(queue_id)) for queue_id, claim in claims.items()}

    def holds(self, claim: Claim) -> bool:
        """Whether the queue is still this member's."""
        return self._members.holds(claim)

    def commit(self, offsets: Mapping[Claim, int]) -> set[int]:
        """Remember the next offsets of queues that are still this member's; returns the ids of those that are.

        HistoryChangedError when the store was recovered meanwhile; nothing is written then.
        """
        return self._remember(offsets, ())

    def give_back(self, offsets: Mapping[Claim, int]) -> set[int]:
        """Remember these offsets and release their queues; the same errors, and then nothing is released."""
        return self._remember(offsets, offsets.keys())

    def stored(self) -> dict[int, int]:
        """The group's offsets of the topic as they stand in the file."""
        return self._offsets.read(self._topic, self._group)

    def drop(self, claim: Claim) -> None:
        """Drop the lock of a claim that was lost."""
        self._members.drop(claim)

    def close(self) -> None:
        """Leave the group; everything still claimed is free at once."""
        self._members.close()

    def _joined(self) -> tuple[GroupMembers, int]:
        members = GroupMembers(self._root, self._topic, self._group)
        try:
            return members, members.join(shares=self._only is None)
        except BaseException:  # a lock that stays would be a member that reads nothing
            members.close()
            raise

    def _remember(self, offsets: Mapping[Claim, int], release: Collection[Claim]) -> set[int]:
        kept: set[int] = set()

        def change(table: Table) -> None:
            if read_epoch(self._root) != self.epoch:
                raise HistoryChangedError
            held = {claim.queue_id: offset for claim, offset in offsets.items() if self._members.holds(claim)}
            if held:
                table[self._key] = table.get(self._key, {}) | held
            kept.clear()
            kept.update(held)

        self._offsets.update(change)
        if release:
            self._release(release)
        return kept

    def _release(self, claims: Collection[Claim]) -> None:
        def change(table: Table) -> None:
            for claim in claims:
                self._members.release(claim)

        self._offsets.update(change)

    def _begun(self, table: Table) -> bool:
        row = table.get(self._key)
        return row is not None and (self._only is None or all(queue_id in row for queue_id in self._only))

    def _is_silent(self, slot: int) -> bool:
        record = self._members.record_of(slot)
        if not self._liveness.is_expired(("member", slot), record):
            return False
        self._silent.add(record.incarnation)
        return True

    def _is_overdue(self, queue_id: int) -> bool:
        """Whether the queue is claimed, but its member has shown no sign of life."""
        if not self._members.is_claimed(queue_id):
            self._liveness.forget(("queue", queue_id))
            return False
        record = self._members.record(queue_id)
        if record.incarnation in self._silent:
            return True
        holder = next((one for one in self._members.members().values() if one.incarnation == record.incarnation), None)
        return self._liveness.is_expired(("queue", queue_id), (record, holder))


class LivenessTracker:
    """Remembers when it last saw each thing change, and so which process is dead or stopped.

    The clock is this process's own, so no clocks are compared; a process that was stopped itself sees everything
    moved when it resumes.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def is_expired(self, thing: Hashable, state: object) -> bool:
        """Whether `thing` has been in this `state` at each look for the timeout."""
        now_s = self._clock()
        seen, since_s = self._seen.get(thing, (None, 0.0))
        if thing not in self._seen or seen != state:
            self._seen[thing] = (state, now_s)
            return False
        return now_s - since_s >= self._timeout_s

    def forget(self, thing: Hashable) -> None:
        """Start measuring it anew."""
        self._seen.pop(thing, None)


def allocate_averagely(queue_ids: Sequence[int], members: Sequence[int], me: int) -> list[int]:
    """The share of member `me`: a run of neighbouring queues; shares differ by one queue at most.

    All members sort both sequences the same way. Empty for a process that is no member, and for the
    members that are left over where there are more of them than queues.
    """
    if me not in members or not queue_ids:
        return []
    index, rest = members.index(me), len(queue_ids) % len(members)
    size = len(queue_ids) // len(members) + (1 if index < rest else 0)
    start = index * size + (0 if index < rest else rest)
    return list(queue_ids[start : start + size])


@dataclass(slots=True)
class AssignedQueue:
    """Always `done <= handed_end <= position`, but for a moment inside a method.

    position     the next entry to fetch
    handed_end   after the last message that the program was given
    done         everything below has been dealt with: what a commit remembers
    committed    what is remembered; -1 for nothing
    open         offsets that were given and are not done, in order; of these `acked` are done before others. Only with
                 `is_acked_singly`.
    """

    queue_id: int
    claim: Claim | None
    position: int
    committed: int = -1
    done: int = -1
    handed_end: int = -1
    buffer: deque[Message] = field(default_factory=deque)
    read_ahead: int = 0                   # how many the next fetch asks for at least: twice what the last one found
    last: Message | None = None           # the last one fetched: tells whether the log is still the same
    leaving_since_s: float | None = None  # it belongs to another member now: nothing more is handed out
    is_acked_singly: bool = False
    open: deque[int] = field(default_factory=deque)
    acked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = self.handed_end = self.position

    @property
    def grant(self) -> Claim:
        """Its claim, where a group shares the queues."""
        assert self.claim is not None
        return self.claim

    @property
    def is_outstanding(self) -> bool:
        """Whether the program was given messages and has not said that it is done with them."""
        return self.done < self.handed_end

    @property
    def next_offset(self) -> int:
        """What is handed out next, or where it will be looked for."""
        return self.buffer[0].queue_offset if self.buffer else self.position

    def hand_out(self, count: int) -> list[Message]:
        """Up to `count` messages for the program."""
        messages = [self.buffer.popleft() for _ in range(min(count, len(self.buffer)))]
        if messages:
            self.handed_end = messages[-1].queue_offset + 1
            if self.is_acked_singly:
                self.open.extend(message.queue_offset for message in messages)
        return messages

    def finish(self, end: int | None = None) -> None:
        """The program is done with what it was given, below `end` at least if that is said."""
        self.done = self.handed_end if end is None else max(self.done, min(end, self.handed_end))
        if self.is_acked_singly:
            while self.open and self.open[0] < self.done:
                self.acked.discard(self.open.popleft())
            self._pass_acked()
        self.settle()

    def acknowledge(self, offset: int) -> None:
        """The message at `offset` is done, whatever came before it."""
        if self.done <= offset < self.handed_end:
            self.acked.add(offset)
            self._pass_acked()
            self.settle()

    def _pass_acked(self) -> None:
        """Everything below the first message that is not done is done."""
        while self.open and self.open[0] in self.acked:
            self.acked.discard(self.open.popleft())
            self.done = self.open[0] if self.open else self.handed_end

    def settle(self) -> None:
        """What was passed over without being handed out is done too, once nothing before it is open."""
        if not self.is_outstanding and not self.buffer:
            self.done = self.handed_end = self.position

    def put_back(self) -> None:
        """Forget what was fetched but not handed out."""
        self.position = self.next_offset
        self.buffer.clear()
        self.settle()

    def go_back(self, next_offset: int, handed_end: int, done: int) -> None:
        """As before a hand-out that failed: what was taken since is fetched again."""
        self.buffer.clear()
        self.position, self.handed_end, self.done = next_offset, handed_end, done
        while self.open and self.open[-1] >= handed_end:
            self.acked.discard(self.open.pop())

    def go_to(self, offset: int) -> None:
        """Go on at `offset`, whatever was handed out."""
        self.buffer.clear()
        self.last = None
        self.open.clear()
        self.acked.clear()
        self.position = self.handed_end = self.done = offset
