"""One member of a consumer group: its share of the queues, its claims on them, their offsets.

    session.heartbeat()                 # often, so that other members know that this process lives
    session.share(queue_ids)            # the queues that are this member's now
    session.take(queues without claim)  # claims the free ones, and returns the offsets to start from
    session.commit(...)                 # stores the offsets and acknowledgements of the queues that it still holds
    session.give_back(...)              # the same, then releases the queues

Every member computes its own share from the living members (AllocateMessageQueueAveragely);
claims ensure that two members never hold a queue at once, even while they disagree.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyengine.ipc.group_members import Claim, GroupMembers
from pyengine.storage.acknowledgements import AckFile, InFlight, SavedQueue
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key
from pyengine.storage.engine_id import read_epoch

if TYPE_CHECKING:
    from pyengine.formats.record import Message

HEARTBEAT_INTERVAL_S = 0.5


class HistoryChangedError(Exception):
    """The store was recovered since the offsets were read: they may count messages that the log has lost."""


class GroupSession:
    """A member of `group` on `topic`. `queue_ids`: claim these, and get no share of the others.

    A member without a heartbeat for `session_timeout_s` gets no share. Only holds() may be called
    by several threads at a time.
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
        self._heartbeat_s = float("-inf")
        self._liveness = LivenessTracker(session_timeout_s, clock)
        self.members = 1  # those that shared the queues in the last share()
        self._silent: set[int] = set()  # incarnations of members that got no share in the last share()
        self._offsets = ConsumerOffsets(root, while_waiting=self.heartbeat)
        self._acks = AckFile(root, self._key)
        self.epoch = read_epoch(root)  # before any offset is read
        self._members, self._slot = self._joined()

    def begin(self, starts: Callable[[], Mapping[int, int]]) -> list[str]:
        """Store where a new group starts, so that it misses no message if this member dies before its first commit.

        `starts` is called only for a group without offsets of this topic. Returns the sentences
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

    def heartbeat(self) -> None:
        """Send a heartbeat if the last one is HEARTBEAT_INTERVAL_S old."""
        if self._clock() - self._heartbeat_s >= HEARTBEAT_INTERVAL_S:
            self._heartbeat_s = self._clock()
            self._members.heartbeat()

    def rejoin_if_removed(self) -> bool:
        """Join again if the members' file was removed, which ends all claims; return whether it was."""
        if self._members.is_current:
            return False
        fresh, slot = self._joined()
        self._members.close()
        self._members, self._slot = fresh, slot
        return True

    def share(self, queue_ids: Sequence[int]) -> list[int]:
        """Return this member's share of the topic's queues, divided among the members that live now."""
        if self._only is not None:
            return list(self._only)
        self._silent.clear()
        living = [slot for slot in self._members.sharing() if slot == self._slot or not self._is_silent(slot)]
        self.members = len(living)
        return allocate_averagely(sorted(queue_ids), living, self._slot)

    def take(self, queue_ids: Iterable[int]) -> dict[int, tuple[Claim, int | None, InFlight]]:
        """Claim those of these queues that are free or whose holder has sent no heartbeat for session_timeout_s.

        Returns queue id -> (the claim, the group's next offset, which is None for a queue that
        is new to it, and what earlier holders have delivered and acknowledged from there on).
        """
        wanted = sorted(queue_ids)
        overdue = {queue_id for queue_id in wanted if self._is_overdue(queue_id)}
        free = [queue_id for queue_id in wanted if queue_id in overdue or not self._members.is_claimed(queue_id)]
        if not free:
            return {}
        taken: dict[int, tuple[Claim, int | None, InFlight]] = {}

        def change(table: Table) -> None:
            row = table.get(self._key, {})
            for queue_id in free:
                claim = self._members.seize(queue_id) if queue_id in overdue else self._members.claim(queue_id)
                if claim is not None:
                    taken[queue_id] = claim, row.get(queue_id), InFlight(row.get(queue_id, 0))
            if taken:
                self._resume({queue_id: flight for queue_id, (_, _, flight) in taken.items()}, row)

        try:
            self._offsets.update(change)
        except BaseException:  # otherwise a claim without a record would keep the queue from all members
            for claim, *_ in taken.values():
                self._members.drop(claim)
            raise
        for queue_id in taken:
            self._liveness.forget(("queue", queue_id))
        return taken

    def _resume(self, flights: Mapping[int, InFlight], row: Mapping[int, int]) -> None:
        """Begin a tenure of each queue with what its earlier ones have left. The caller has the lock of the offsets."""
        saved = self._acks.read()
        begun = []
        for queue_id, flight in flights.items():
            flight.resume(saved.get(queue_id, ()), row.get(queue_id), partial(self._members.marked_end, queue_id))
            if (state := flight.saved(queue_id, row.get(queue_id, -1))) is not None:
                flight.note_saved(state)
                begun.append(state)
        self._acks.append(begun, row, is_durable=False)

    def mark(self, claim: Claim, flight: InFlight) -> None:
        """Note how far a queue is delivered, so that a kill of this process counts the messages. Called before they are handed out."""
        self._members.mark(claim.queue_id, flight.tenure, flight.delivered_end)

    def note_delivery(self, claim: Claim, flight: InFlight, message: Message) -> None:
        """The same for a message that is delivered again by its holder."""
        self._acks.note_delivery(claim.queue_id, flight.tenure, message.queue_offset, message.delivery_count)

    def holds(self, claim: Claim) -> bool:
        """Whether this member still holds the queue."""
        return self._members.holds(claim)

    def commit(self, offsets: Mapping[Claim, int], states: Mapping[Claim, SavedQueue] | None = None) -> set[int]:
        """Store the next offsets, and before them the states, of the queues that this member still holds; return those queues' ids.

        HistoryChangedError, with nothing written, if the store was recovered meanwhile.
        """
        kept: set[int] = set()

        def change(table: Table) -> None:
            if read_epoch(self._root) != self.epoch:
                raise HistoryChangedError
            row = table.get(self._key, {})
            held = {claim for claim in {*offsets, *(states or ())} if self._members.holds(claim)}
            self._acks.append([state for claim, state in (states or {}).items() if claim in held], row, is_durable=True)
            if moved := {claim.queue_id: offset for claim, offset in offsets.items() if claim in held}:
                table[self._key] = row | moved
            kept.clear()
            kept.update(claim.queue_id for claim in held)

        self._offsets.update(change)
        return kept

    def give_back(self, offsets: Mapping[Claim, int], states: Mapping[Claim, SavedQueue] | None = None) -> set[int]:
        """Store these and release the queues of `offsets`; the errors are those of commit(), and then no queue is released."""
        kept = self.commit(offsets, states)

        def release(table: Table) -> None:
            for claim in offsets:
                self._members.release(claim)

        if offsets:
            self._offsets.update(release)
        return kept

    def stored(self) -> dict[int, int]:
        """Return the group's offsets of the topic from the file."""
        return self._offsets.read(self._topic, self._group)

    def drop(self, claim: Claim) -> None:
        """Release the kernel lock of a claim that was lost."""
        self._members.drop(claim)

    def close(self) -> None:
        """Leave the group; all queues that are still claimed become free at once."""
        self._members.close()

    def _joined(self) -> tuple[GroupMembers, int]:
        members = GroupMembers(self._root, self._topic, self._group)
        try:
            return members, members.join(shares=self._only is None)
        except BaseException:  # otherwise the lock would remain, and with it a member that reads nothing
            members.close()
            raise

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
        """Whether the queue is claimed by a member that has sent no heartbeat for session_timeout_s."""
        if not self._members.is_claimed(queue_id):
            self._liveness.forget(("queue", queue_id))
            return False
        record = self._members.record(queue_id)
        if record.incarnation in self._silent:
            return True
        holder = next((one for one in self._members.members().values() if one.incarnation == record.incarnation), None)
        return self._liveness.is_expired(("queue", queue_id), (record, holder))


class LivenessTracker:
    """Detects dead or stopped processes: it notes when the state of each thing changed last.

    It uses only this process's clock, so that clocks are not compared. If this process itself was stopped, it finds
    the states of living members changed when it resumes.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def is_expired(self, thing: Hashable, state: object) -> bool:
        """Whether `thing` has had this `state` in each call since the timeout began."""
        now_s = self._clock()
        seen, since_s = self._seen.get(thing, (None, 0.0))
        if thing not in self._seen or seen != state:
            self._seen[thing] = (state, now_s)
            return False
        return now_s - since_s >= self._timeout_s

    def forget(self, thing: Hashable) -> None:
        """Forget the state of `thing`, so that its timeout begins again."""
        self._seen.pop(thing, None)


def allocate_averagely(queue_ids: Sequence[int], members: Sequence[int], me: int) -> list[int]:
    """Return the share of member `me`: a run of neighbouring queues; shares differ by one queue at most.

    All members must sort both sequences in the same way. Empty for a process that is not a member, and for the
    last members if there are more members than queues.
    """
    if me not in members or not queue_ids:
        return []
    index, rest = members.index(me), len(queue_ids) % len(members)
    size = len(queue_ids) // len(members) + (1 if index < rest else 0)
    start = index * size + (0 if index < rest else rest)
    return list(queue_ids[start : start + size])


@dataclass(slots=True)
class AssignedQueue:
    """A queue that this consumer reads, with its offsets; `done <= delivered_end <= position` outside of its methods.

    position     the next entry to fetch
    committed    the offset that is stored; -1 for none
    flight       what was delivered and what of it is done: a commit stores its offset `done`
    """

    queue_id: int
    claim: Claim | None
    position: int
    flight: InFlight
    committed: int = -1
    buffer: deque[Message] = field(default_factory=deque)
    read_ahead: int = 0                   # least number of messages that the next fetch asks for: twice as many as the last one found
    last: Message | None = None           # the last one fetched: by it a recovery that has lost messages is noticed
    releasing_since_s: float | None = None  # since when it is another member's share: no more messages are delivered

    @property
    def grant(self) -> Claim:
        """Its claim; only in a group."""
        assert self.claim is not None
        return self.claim

    @property
    def done(self) -> int:
        """The offset that a commit stores."""
        return self.flight.done

    @property
    def next_offset(self) -> int:
        """The offset of the next message to deliver, or at which to search for it."""
        return self.buffer[0].queue_offset if self.buffer else self.position

    def deliver(self, count: int, deliveries_max: int | None) -> list[Message]:
        """Take up to `count` messages to deliver to the program; without a group none of them has to be finished."""
        messages = [self.buffer.popleft() for _ in range(min(count, len(self.buffer)))]
        if self.claim is not None:
            return self.flight.deliver(messages, deliveries_max)
        self.flight.delivered_end = messages[-1].queue_offset + 1
        return messages

    def finish(self, last: Message | None = None) -> None:
        """Note that all delivered messages are done; with `last`, those up to it."""
        self.flight.finish(last)
        self.settle()

    def acknowledge(self, message: Message) -> None:
        """Note that the message is done, even if earlier ones are not."""
        if self.flight.acknowledge(message):
            self.settle()

    def settle(self) -> None:
        """Move `done` past filtered entries, if no earlier message is open."""
        if self.flight.done >= self.flight.delivered_end and not self.buffer:
            self.flight.done = self.flight.delivered_end = self.position

    def put_back(self) -> None:
        """Drop the messages that were fetched but not delivered."""
        self.position = self.next_offset
        self.buffer.clear()
        self.settle()

    def before(self) -> tuple[int, int, int, dict[int, Message]]:
        """Return what restore() needs if the next delivery fails."""
        return self.next_offset, self.flight.delivered_end, self.flight.done, self.flight.given_back()

    def restore(self, next_offset: int, delivered_end: int, done: int, again: Mapping[int, Message]) -> None:
        """Restore the offsets from before a delivery that failed; its messages are fetched again."""
        self.buffer.clear()
        self.position = next_offset
        self.flight.undeliver(delivered_end, done, again)

    def seek(self, offset: int) -> None:
        """Continue at `offset`, whatever was delivered before."""
        self.buffer.clear()
        self.last = None
        self.position = offset
        self.flight.seek(offset)
