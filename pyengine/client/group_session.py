"""One member of a consumer group: its share of the queues, its claims on them, their offsets.

    session.has_changed()               # after a heartbeat, which the process's pulse sends: is the rest to be done again?
    session.share(queue_ids)            # the queues that are this member's now
    session.take(queues without claim)  # claims the free ones, and returns the offsets to start from
    commit_all([(session, ...)])        # stores the offsets and acknowledgements of the queues that it still holds
    session.release(claims)             # gives the queues to other members

Claims ensure that two members never hold a queue at once, even while they disagree about the shares (docs/consumers.md).
If the members share messages, each takes the next message of any queue:

    session.turn(flights, take)         # the group's lock: no other member takes or ends messages during take(), which calls
    flight.take(message, ...)           # of a queue, for the next one or one that was given back
    session.tend()                      # messages of members that died are given back
    session.store(flights)              # the group's offsets, durable

They keep one table of the messages that are open, in the acknowledgements' file (storage/acknowledgements.py says how).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pyengine.errors import StoreBusyError, command
from pyengine.formats.record import Message
from pyengine.ipc.group_members import GUESTS, MEMBERS, SHARERS, Claim, GroupMembers, SlotRecord
from pyengine.native.waiting import ITS_LENGTH, THIS_FILE, Names, Pulse
from pyengine.results import GetStatus, ReadLevel
from pyengine.storage.acknowledgements import (
    AckFile,
    Identity,
    InFlight,
    PassedOverError,
    SavedQueue,
    SharedLog,
    SharedQueue,
    new_tenure,
)
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key
from pyengine.storage.durable_file import LOCK_STEP_S, RunningClock, wait_until_held
from pyengine.storage.engine_id import read_epoch
from pyengine.storage.store_reader import StoreReader

_Queue = TypeVar("_Queue", bound="AssignedQueue")
_Thing = TypeVar("_Thing", bound=Hashable)
PASS_OVER_S = 1.5  # so long a member that has a turn may show no life
PATIENCE_S = 0.05  # so long a thread that has other work waits for a turn


class HistoryChangedError(StoreBusyError):
    """The store is being recovered, or was since the offsets were read: they may count messages that the log has lost."""

    def __init__(self, root: Path) -> None:
        super().__init__(f"{root} is being recovered: wait for that; if it was interrupted, {command('start', root)} finishes it")


class TurnTakenError(Exception):
    """Another thread or member keeps its turn for longer than a moment: try again after `session.wait_for_turn()`."""

    def __init__(self, session: SharedSession) -> None:
        super().__init__()
        self.session = session


class GroupSession:
    """A member of `group` on `topic`. `queue_ids`: claim these, and get no share of the others.

    Only holds() may be called by several threads at a time.
    """

    def __init__(
        self, root: str | os.PathLike[str], topic: str, group: str, *, queue_ids: Sequence[int] | None = None,
        session_timeout_s: float = 30.0, clock: Callable[[], float] | Pulse = time.monotonic, wanted: int = 0,
    ) -> None:
        """`clock`: a Pulse, which pauses while this process is stopped, sends the heartbeats too. `wanted` is of the SlotRecord."""
        self._root = Path(root)
        self._topic = topic
        self._group = group
        self._key = group_key(topic, group)
        self._only = None if queue_ids is None else sorted(set(queue_ids))
        self._is_leaving = False
        self._pulse = clock if isinstance(clock, Pulse) else None
        self._wanted = wanted
        self._liveness = LivenessTracker(session_timeout_s, clock.ran_s if isinstance(clock, Pulse) else clock)
        self.members = 1  # those that shared the queues in the last share()
        self._living: dict[int, SlotRecord] = {}  # the members at the last share()
        self._silent: set[int] = set()  # incarnations of members that got no share in the last share()
        self._offsets = ConsumerOffsets(root)
        self._acks = AckFile(root, self._key)
        self.epoch = read_epoch(root)  # before any offset is read
        self._members, self._slot = self._joined()

    def begin(self, starts: Callable[[], Mapping[int, int]]) -> list[str]:
        """Store where a new group `starts`, so that it misses no message if this member dies before its first commit.

        Returns the sentences about a damaged file.
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
        """Send a heartbeat, in a process without a pulse that does."""
        self._members.heartbeat()

    def rejoin_if_removed(self) -> bool:
        """Join again if the members' file was removed, which ends all claims; return whether it was."""
        if self._members.is_current:
            return False
        fresh, slot = self._joined()
        self._members.close()
        self._members, self._slot = fresh, slot
        return True

    def share(self, queue_ids: Sequence[int], is_leaving: bool = False) -> list[int]:
        """Return this member's share of the topic's queues, divided among those that live and do not leave; its claims stay its own."""
        if is_leaving != self._is_leaving:
            if self._only is None:
                self._slot = self._members.move(GUESTS if is_leaving else MEMBERS)
            self._is_leaving = is_leaving
        self._living = self._members.members()
        if is_leaving:
            return []
        if self._only is not None:
            return list(self._only)
        living = self._sharing()
        self.members = len(living)
        return allocate_averagely(sorted(queue_ids), living, self._slot)

    def has_changed(self) -> bool:
        """Whether members, claims or their file may have changed since the last call, or a member seems stopped."""
        return self._members.has_changed()

    @property
    def names(self) -> Names:
        """What to watch beside the members."""
        return {str(self._members.path): THIS_FILE}

    def living(self) -> Collection[SlotRecord]:
        """Return the records of the members that lived at the last share(): to look for them costs a call for each."""
        return self._living.values()

    def has_unstored(self, queues: Iterable[AssignedQueue]) -> bool:
        """Whether a commit of these queues would store something."""
        return any(held.done != held.committed for held in queues) or bool(unsaved(queues))

    def _sharing(self) -> list[int]:
        """Return the slots of the members that get a share: that live, and send heartbeats."""
        sharing = {at - MEMBERS: record for at, record in self._living.items() if at < GUESTS}
        silent = self._liveness.expired({("member", slot): record for slot, record in sharing.items() if slot != self._slot})
        self._silent = {sharing[slot].incarnation for _, slot in silent}
        return [slot for slot in sharing if ("member", slot) not in silent]

    def take(self, queue_ids: Iterable[int]) -> dict[int, tuple[Claim, int | None, InFlight]]:
        """Claim those of these queues that are free or whose holder has sent no heartbeat for session_timeout_s.

        Returns queue id -> (the claim, the group's next offset or None, what earlier holders have delivered and acknowledged from there).
        """
        wanted = sorted(queue_ids)
        claimed = {queue_id for queue_id in wanted if self._members.is_claimed(queue_id)}
        overdue = self._overdue(claimed) if claimed else set()
        free = [queue_id for queue_id in wanted if queue_id in overdue or queue_id not in claimed]
        for queue_id in {*wanted} - claimed:
            self._liveness.forget(("queue", queue_id))
        if not free:
            return {}
        taken: dict[int, tuple[Claim, int | None, InFlight]] = {}

        def change(table: Table) -> None:
            row = table.get(self._key, {})
            for queue_id in free:
                if queue_id in overdue:
                    self._members.fence_off(queue_id)
                if (claim := self._members.claim(queue_id)) is not None:
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
        saved = self._acks.read(flights)
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
        return self._members.holds(claim)

    def commit_in(self, table: Table, offsets: Mapping[Claim, int], states: Mapping[Claim, SavedQueue]) -> set[int]:
        """Store the next offsets, and before them the states, of the queues that this member still holds; return those queues' ids.

        `table` is that of an update by the caller, who has the lock of the offsets. HistoryChangedError, with nothing written, if the
        store was recovered meanwhile.
        """
        if read_epoch(self._root) != self.epoch:
            raise HistoryChangedError(self._root)
        row = table.get(self._key, {})
        held = {claim for claim in {*offsets, *states} if self._members.holds(claim)}
        self._acks.append([state for claim, state in states.items() if claim in held], row, is_durable=True)
        if moved := {claim.queue_id: offset for claim, offset in offsets.items() if claim in held}:
            table[self._key] = row | moved
        return {claim.queue_id for claim in held}

    def release(self, claims: Collection[Claim]) -> None:
        """Release these queues: other members continue where the last commit has ended."""
        def change(table: Table) -> None:
            for claim in claims:
                self._members.release(claim)

        if claims:
            self._offsets.update(change)

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
        members = GroupMembers(self._root, self._topic, self._group, pulse=self._pulse, wanted=self._wanted)
        try:
            return members, members.join(MEMBERS if self._only is None and not self._is_leaving else GUESTS)
        except BaseException:  # otherwise the lock would remain, and with it a member that reads nothing
            members.close()
            raise

    def _begun(self, table: Table) -> bool:
        row = table.get(self._key)
        return row is not None and (self._only is None or all(queue_id in row for queue_id in self._only))

    def _overdue(self, claimed: Iterable[int]) -> set[int]:
        """Return those of these queues whose member has sent no heartbeat for session_timeout_s."""
        holders = {one.incarnation: one for one in self._members.members().values()}
        records = {queue_id: self._members.record(queue_id) for queue_id in claimed}
        expired = self._liveness.expired({("queue", queue_id): (record, holders.get(record.incarnation))
                                          for queue_id, record in records.items() if record.incarnation not in self._silent})
        return {queue_id for queue_id, record in records.items() if record.incarnation in self._silent or ("queue", queue_id) in expired}


def begin_all(root: str | os.PathLike[str], starts: Mapping[str, Callable[[], Mapping[int, int]]]) -> None:
    """Do what begin() does for several members of groups, given by their group_key(), by one update."""
    offsets = ConsumerOffsets(root)
    begun = offsets.table().offsets if starts else {}
    found = {key: dict(start()) for key, start in starts.items() if key not in begun}
    if found:
        offsets.update(lambda table: table.update(found | table))


def commit_all(commits: Sequence[tuple[GroupSession, Mapping[Claim, int], Mapping[Claim, SavedQueue]]]) -> list[set[int]]:
    """Do what commit_in() does for several members of groups of one store, of all or none, by one update."""
    kept: list[set[int]] = []

    def change(table: Table) -> None:
        kept[:] = [session.commit_in(table, offsets, states) for session, offsets, states in commits]

    if commits:
        commits[0][0]._offsets.update(change)
    return kept


class LivenessTracker:
    """Detects dead or stopped processes, by one clock: it notes when the state of each thing changed last.

    The clock pauses while this process is stopped: the others may have been stopped with it.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def expired(self, states: Mapping[_Thing, object]) -> set[_Thing]:
        """Return those things that have had these states in each call since the timeout began."""
        now_s, found = self._clock(), set()
        for thing, state in states.items():
            seen, since_s = self._seen.get(thing, (None, 0.0))
            if thing not in self._seen or seen != state:
                self._seen[thing] = (state, now_s)
            elif now_s - since_s >= self._timeout_s:
                found.add(thing)
        return found

    def forget(self, thing: Hashable) -> None:
        """Forget the state of `thing`, so that its timeout begins again."""
        self._seen.pop(thing, None)


def allocate_averagely(queue_ids: Sequence[int], members: Sequence[int], me: int) -> list[int]:
    """Return the share of member `me`, a run of neighbouring queues; all members must sort both sequences in the same way."""
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
    passed: Message | None = None         # the newest of those after it that did not match; only without a group, where nothing is done
    releasing_since_s: float | None = None  # since when it is another member's share: no more messages are delivered

    @property
    def grant(self) -> Claim:
        """Its claim; only in a group."""
        assert self.claim is not None
        return self.claim

    @property
    def done(self) -> int:
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

    def finish(self, last: Message | None, kept: Collection[int]) -> None:
        self.flight.finish(last, kept)
        self.settle()

    def acknowledge(self, message: Message) -> None:
        if self.flight.acknowledge(message):
            self.settle()

    def settle(self) -> None:
        """Move `done` past filtered entries, if no earlier message is open; without a group nothing is done."""
        if self.claim is not None and self.flight.done >= self.flight.delivered_end and not self.buffer:
            self.flight.done = self.flight.delivered_end = self.position

    def put_back(self) -> None:
        """Drop the messages that were fetched but not delivered."""
        self.position = self.next_offset
        self.buffer.clear()
        self.settle()

    def before(self) -> tuple[int, int, int, dict[int, Message]]:
        """Return what restore() needs if the next delivery fails."""
        return self.next_offset, self.flight.delivered_end, self.flight.done, self.flight.redelivered()

    def restore(self, next_offset: int, delivered_end: int, done: int, again: Mapping[int, Message]) -> None:
        """Restore the offsets from before a delivery that failed; its messages are fetched again."""
        self.buffer.clear()
        self.position = next_offset
        self.flight.undeliver(delivered_end, done, again)

    def know_same_history(self, reader: StoreReader, topic: str) -> bool:
        """Drop what earlier holders have saved if the log has lost the newest of those messages; whether that is known."""
        assert self.flight.last is not None
        try:
            if not self.is_there(reader, topic, self.flight.last):
                self.flight.forget()
        except StoreBusyError:  # the store is being recovered
            return False
        return True

    def is_there(self, reader: StoreReader, topic: str, last: Sequence[int]) -> bool:
        """Whether the message of this offset and Identity is still in the queue, or was deleted with all before it."""
        offset, *identity = last
        found = reader.get_message(topic, self.queue_id, offset, 1, level=ReadLevel.WRITTEN)
        return found.status is GetStatus.OFFSET_TOO_SMALL or [list(Identity.of(each)) for each in found.messages] == [identity]

    def kept_end(self, reader: StoreReader, topic: str) -> int:
        """Return the offset after the newest message that was read, here or by an earlier holder; 0 if the log does not have it."""
        passed, mine = (None if each is None else (each.queue_offset, *Identity.of(each)) for each in (self.passed, self.last))
        newest = max(filter(None, (mine, self.flight.last)), default=None)
        return next((each[0] + 1 for each in (passed, newest) if each is not None and self.is_there(reader, topic, each)), 0)

    def go_back(self, kept_end: int, first: int, end: int, stored: int | None) -> None:
        """Go back after a recovery to before what the log has lost: nothing below `kept_end`. The queue is from `first` to `end` now.

        `stored`: the group's offset, which recovery has lowered if that was beyond the end; None without a group, -1 for none.
        """
        if not kept_end:
            self.seek(min(max(self.done, first) if stored is None else min(max(stored, 0), self.done), end))
        else:  # what was passed after `kept_end` did not match, but what has come in its place may
            offset, flight = max(kept_end, stored or 0), self.flight
            self.position, flight.delivered_end, flight.done = (
                min(each, offset) for each in (self.position, flight.delivered_end, flight.done))
        if stored is not None:
            self.committed = stored

    def seek(self, offset: int) -> None:
        """Continue at `offset`, whatever was delivered before."""
        self.buffer.clear()
        self.last = self.passed = None
        self.position = offset
        self.flight.seek(offset)


def note_stored(queues: Mapping[int, _Queue], offsets: Mapping[Claim, int], states: Mapping[Claim, SavedQueue],
                kept: Collection[int]) -> list[_Queue]:
    """Note that these are stored of the queues `kept`, as commit() says; return the others, which this member does not hold any more."""
    lost = []
    for claim in {*offsets, *states}:
        held = queues.get(claim.queue_id)
        if held is None or held.claim != claim:
            continue
        if claim.queue_id not in kept:
            lost.append(held)
            continue
        held.committed = offsets.get(claim, held.committed)
        if claim in states and states[claim].tenure == held.flight.tenure:  # no seek() came between
            held.flight.note_saved(states[claim])
    return lost


def unsaved(queues: Iterable[AssignedQueue]) -> dict[Claim, SavedQueue]:
    """Return the states that must be in the file before the offsets of these queues are stored."""
    states = {held.grant: held.flight.saved(held.queue_id, held.done) for held in queues}
    return {claim: state for claim, state in states.items() if state is not None}


# ---- members that share messages ---------------------------------------------------


class SharedFlight(InFlight):
    """What this member has of one queue, and what of it the table does not say yet."""

    def __init__(self, queue_id: int, log: SharedLog) -> None:
        super().__init__(0)
        self.queue_id = queue_id
        self._log = log
        self._notes: dict[str, list[int]] = {"ended": [], "back": []}
        self._undone: dict[int, int] = {}      # how often they were delivered without that
        self._told_spared: set[int] = set()
        self._now_spared: set[int] = set()
        self._now_undone: dict[int, int] = {}
        self._step: dict[str, Any] | None = None  # of this turn, in the table
        self._taken: dict[int, Message] = {}   # in this turn
        self._end = 0                          # of what was taken in this turn
        self._restart: int | None = None

    @property
    def state(self) -> SharedQueue | None:
        """The queue in the table; None before the first turn."""
        return self._log.queues.get(self.queue_id)

    @property
    def table(self) -> SharedQueue:
        """The queue in the table, during a turn."""
        state = self.state
        assert state is not None
        return state

    @property
    def has_notes(self) -> bool:
        """Whether messages were ended or given back since the last turn."""
        return bool(self._undone) or any(self._notes.values())

    # -- in a turn

    def take(self, message: Message, deliveries_max: int | None) -> Message | None:
        """Take a message; return it with its count, None if it was delivered too often."""
        offset = message.queue_offset
        deliveries = self.table.deliveries(offset)
        is_dead = deliveries_max is not None and deliveries >= deliveries_max
        if deliveries:
            message = replace(message, delivery_count=deliveries + (not is_dead))
        self._taken[offset] = self.open[offset] = message
        if is_dead:
            self.dead[offset] = None
        return None if is_dead else message

    def skip(self, offset: int) -> None:
        """End a message that was given back and does not exist any more."""
        self._log.add(self.table.step(0, {"ended": [offset]}))

    def take_until(self, end: int) -> None:
        """Note that the messages below `end` that were not taken are done: the subscription has none of them."""
        self._end = end

    def restart(self, offset: int) -> None:
        """Begin a tenure at this offset, whatever was taken before: the log has lost it."""
        self._restart = offset

    def undo(self) -> None:
        """Forget a turn that failed: the program did not get its messages."""
        self._undo(self._taken)  # the file may have them: a signal or a full disk comes at any moment
        self._taken.clear()
        self._end, self._restart = 0, None

    def begin_turn(self, member: int) -> dict[str, int]:
        """Tell the table what was ended and given back; return how much of each, for end_turn().

        The file may have all or nothing of a turn that failed, so a count changes only if the table has the other one.
        """
        self._step, self._now_spared, self._now_undone = None, self.spared, self._undone.copy()
        if not self.has_notes and self._now_spared == self._told_spared:
            return {}
        ended, back = (self._notes[name][:] for name in ("ended", "back"))

        def is_counted(offset: int, deliveries: int) -> bool:
            return self.table.open.get(offset) == (deliveries, member)

        undone = [offset for offset, deliveries in self._now_undone.items() if is_counted(offset, deliveries + 1)]
        free = {*back, *self._now_undone}.difference(undone)
        counts = {offset: message.delivery_count for offset in self._told_spared ^ self._now_spared
                  if (message := self.open.get(offset)) is not None}
        self._step = self.table.step(member, {
            "counted": [offset for offset, count in counts.items() if offset in self._told_spared and is_counted(offset, count - 1)],
            "spared": [offset for offset, count in counts.items() if offset in self._now_spared and is_counted(offset, count)],
            "ended": ended, "back": free, "undone": undone})
        self._log.add(self._step)
        return {"ended": len(ended), "back": len(back)}

    def tell_taken(self, member: int) -> None:
        """Tell the table what was taken in this turn."""
        state = self.table
        if self._taken or self._end > state.end:
            newest = max(self._taken, default=-1)
            last = self._taken[newest] if newest >= state.end else None
            step = state.step(member, {"took": self._taken}, max(self._end, newest + 1), last)
            if self._step is None:
                self._log.add(step)
            else:  # what others have to read is half as long
                self._log.add_to(self._step, step)
        if self._restart is not None:
            self._log.add(SavedQueue(self.queue_id, new_tenure(), self._restart, self._restart))

    def end_turn(self, told: Mapping[str, int]) -> None:
        """Note that the file has what was told."""
        for name, count in told.items():
            del self._notes[name][:count]
        for offset in self._now_undone:
            del self._undone[offset]
        self._told_spared = self._now_spared
        self._taken.clear()
        self._end, self._restart = 0, None
        self.done, self.delivered_end, self.last = self.table.done, self.table.end, self.table.last

    # -- what the program says of its messages

    def finish(self, last: Message | None = None, kept: Collection[int] = ()) -> None:
        if last is None or self._is_same(last):
            self._end_those(self._those_to_end(last, kept))

    def acknowledge(self, message: Message) -> bool:
        offset = message.queue_offset
        if offset not in self.open or not self._is_same(message):
            return False
        self._end_those([offset])
        return True

    def give_back(self, message: Message) -> bool:
        """Note that a message is any member's again; return whether this one has it."""
        return self._give_back([message.queue_offset] if self._is_same(message) else [])

    def give_all_back(self) -> None:
        """Note that all messages that this member has are any member's again."""
        self._give_back([*self.open])

    def take_back(self, messages: Iterable[Message]) -> None:
        """Note that the program did not get these messages: they are any member's again, without being counted twice."""
        self._undo([message.queue_offset for message in messages])

    def unacknowledged(self, messages: list[Message]) -> list[Message]:
        return self.table.unacknowledged(messages)

    def unread(self, start: int, end: int) -> list[tuple[int, int]]:
        return self.table.unread(start, end)

    def is_suspicious(self, deliveries_max: int | None) -> bool:
        return self.state is not None and self.state.is_suspicious(deliveries_max)

    def exceeds(self, span: int) -> bool:
        """No queue waits for its oldest message: what is stored is what is open."""
        return False

    def forget(self) -> None:
        self.restart(self.table.done)

    def _end_those(self, offsets: list[int]) -> None:
        for offset in offsets:
            del self.open[offset]
            self.dead.pop(offset, None)
        self._notes["ended"] += offsets

    def _give_back(self, offsets: list[int]) -> bool:
        mine = [offset for offset in offsets if self.open.pop(offset, None) is not None]
        for offset in mine:
            self.dead.pop(offset, None)
        self._notes["back"] += mine
        return bool(mine)

    def _undo(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            is_dead = self.dead.pop(offset, 0) is None
            if (message := self.open.pop(offset, None)) is not None:
                self._undone[offset] = message.delivery_count - (not is_dead)


@dataclass(slots=True)
class SharedAssignment(AssignedQueue):
    """A queue that this member reads with all others; `buffer` has messages that match from the table's end on, which was in `tenure`."""

    tenure: int = -1

    @property
    def shared(self) -> SharedFlight:
        assert isinstance(self.flight, SharedFlight)
        return self.flight

    def follow(self) -> None:
        """Drop what others have taken meanwhile."""
        tenure, end = self.shared.table.tenure, self.shared.table.end
        if tenure != self.tenure or end > self.position:
            self.buffer.clear()
            self.position = end
        self.tenure = tenure
        self.shared.last = self.shared.table.last  # a recovery may have cut it off
        while self.buffer and self.buffer[0].queue_offset < end:
            self.buffer.popleft()

    def settle(self) -> None:
        """The table says what is done."""

    def seek(self, offset: int) -> None:
        """Continue at `offset` in a turn, because the log ends there."""
        self.drop_buffer()
        self.position = offset
        self.shared.restart(offset)

    def go_back(self, kept_end: int, first: int, end: int, stored: int | None) -> None:
        """Continue where the table says, which recovery has cut."""
        self.drop_buffer()

    def drop_buffer(self) -> None:
        """Fetch again, from the table's end on."""
        self.put_back()
        self.tenure, self.last = -1, None


class SharedSession(GroupSession):
    """A member of `group` on `topic` that shares messages. It joins in begin(). Threads may share it."""

    _slot = -1

    def __init__(self, root: str | os.PathLike[str], topic: str, group: str, *, session_timeout_s: float = 30.0,
                 clock: Callable[[], float] | Pulse = time.monotonic, wanted: int = 0) -> None:
        self._turn = threading.RLock()  # the kernel's lock excludes other members only
        super().__init__(root, topic, group, session_timeout_s=session_timeout_s, clock=clock, wanted=wanted)
        self.log = SharedLog(self._acks)
        self._stored_size = -1

    def begin(self, starts: Callable[[], Mapping[int, int]]) -> list[str]:
        """Join, and store where a new group starts; returns the sentences about a damaged file. UsageError beside other members."""
        found = {} if self._begun(self._offsets.table().offsets) else dict(starts())

        def change(table: Table) -> None:
            if self._slot < 0:
                self._slot = self._members.join(SHARERS)
            row = table.setdefault(self._key, found)
            if len(self._members.members()) == 1:  # the first one: whoever joins next waits for this lock
                self._in_table(partial(begin_queues, row))

        def begin_queues(row: Mapping[int, int]) -> None:
            self.log.forget()
            self.log.follow()
            states = self._acks.read()
            for queue_id in sorted({*states, *row}):
                self.log.add(self._begun_queue(queue_id, states.get(queue_id, ()), row.get(queue_id)))
            self.log.write()

        return self._offsets.update(change).notes

    @property
    def names(self) -> Names:
        return {**super().names, str(self.log.path): ITS_LENGTH}

    def has_unstored(self, queues: Iterable[AssignedQueue]) -> bool:
        return (self.log.size_bytes != self._stored_size or self.log.has_news
                or any(held.shared.has_notes for held in queues if isinstance(held, SharedAssignment)))

    def rejoin_if_removed(self) -> bool:
        """Join again if the members' file was removed, which ends what this member has; return whether it was."""
        if self._members.is_current and self._slot >= 0:
            return False
        with self._turn:
            before, self._slot = self._members, -1
            self._members, _ = self._joined()
            before.close()
        self.begin(dict)
        return True

    def share(self, queue_ids: Sequence[int], is_leaving: bool = False) -> list[int]:
        return list(queue_ids)

    def living(self) -> Collection[SlotRecord]:
        """Return the records of the members that live now."""
        return self._members.members().values()

    def take(self, queue_ids: Iterable[int]) -> dict[int, tuple[Claim, int | None, InFlight]]:
        """Return what it takes to read these queues. No member claims them."""
        stored = self.stored()
        return {queue_id: (Claim(queue_id, 0), stored.get(queue_id), SharedFlight(queue_id, self.log)) for queue_id in queue_ids}

    def holds(self, claim: Claim) -> bool:
        return True

    def release(self, claims: Collection[Claim]) -> None:
        """There is no claim to release."""

    # What runs in a turn is a function, and no block: an exception of a signal handler, at the begin or the end of a block that is a
    # generator, leaves that as it is as long as the exception is kept, and with it the locks.

    def _in_table(self, work: Callable[[], object], patience_s: float | None = None) -> None:
        """Exclude other threads and members, and read what they have done, for `work`. StoreBusyError as durable_file.exclusive().

        TurnTakenError after `patience_s`. A thread of this process that already has it must not ask for it.
        """
        try:  # around it, since an exception of a signal handler may follow it at once
            if not self._turn.acquire(timeout=-1 if patience_s is None else patience_s):
                raise TurnTakenError(self)
            is_newest = False
            while not is_newest:
                try:
                    fence = self._locked_table(self.log.fence, patience_s)
                    self.log.follow()
                    is_newest = self.log.fence == fence
                    if is_newest:
                        work()
                    else:
                        self.log.forget()  # others may have been writing
                finally:
                    try:
                        self._members.leave_table()
                    except BaseException:  # such a one, before it has
                        self._members.leave_table()
                        raise
        finally:
            try:  # not suppress(), at whose begin such an exception may come
                self._turn.release()
            except RuntimeError:  # it was not acquired
                pass

    def _locked_table(self, fence: int, patience_s: float | None) -> int:
        """Take the lock of this fence, or of a later one past a member that has it and seems stopped; return the fence."""
        if self._members.try_table(fence):  # nearly always
            return fence
        clock_s = RunningClock(LOCK_STEP_S)  # while this process is stopped the one with the lock may be too
        seen: dict[int, SlotRecord] = {}

        def try_lock() -> bool:
            nonlocal fence, clock_s, seen
            if self._members.try_table(fence):
                return True
            waited_s = clock_s()
            if patience_s is not None and waited_s >= patience_s:
                raise TurnTakenError(self)
            if not seen and waited_s >= PASS_OVER_S / 3:
                seen = self._members.members()
            elif waited_s >= PASS_OVER_S:
                if (newest := self.log.read_fence()) > fence:
                    fence = newest
                elif any(record == seen.get(at) and record.incarnation != self._members.incarnation
                       for at, record in self._members.members().items()):
                    fence = self._passed_over(fence)
                clock_s, seen = RunningClock(LOCK_STEP_S), {}
            return False

        wait_until_held(try_lock, self._members.path, self._members.path.name, self.log.path)
        return fence

    def _passed_over(self, fence: int) -> int:
        """Raise the fence above this one, and return it, unless a stopped member replaces the file, which no fence could prevent."""
        with self._members.compaction() as may_raise:
            if may_raise:
                self._acks.raise_fence(fence + 1)
        return fence + may_raise

    def turn(self, flights: Sequence[SharedFlight], work: Callable[[], object], patience_s: float | None = None,
             check: Callable[[], None] = lambda: None) -> None:
        """Exclude the other members for `work`; note what they have done before, and what this one has after it, in the file.

        `check` is called after that; if it raises an error, the turn has failed.
        PassedOverError if others have passed over this process meanwhile: what it has noted does not count. TurnTakenError after
        `patience_s`.
        """
        def whole() -> None:
            member = self._members.incarnation
            try:
                stored: dict[int, int] | None = None
                for flight in flights:
                    if flight.state is None:  # a new queue, or a file that was removed
                        stored = self.stored() if stored is None else stored
                        self.log.add(self._begun_queue(flight.queue_id, (), stored.get(flight.queue_id)))
                told = [flight.begin_turn(member) for flight in flights]
                work()
                for flight in flights:
                    flight.tell_taken(member)
                self.log.write()
                check()  # after the write: a recovery that has cut the table before has not seen what was taken
            except BaseException:
                self.log.forget()
                raise
            for flight, counts in zip(flights, told):
                flight.end_turn(counts)

        self._in_table(whole, patience_s)

    def wait_for_turn(self) -> None:
        """Wait until other members have ended their turns, or are passed over. StoreBusyError as durable_file.exclusive()."""
        with self._turn:
            if self._slot >= 0:  # it was not closed meanwhile
                self._in_table(lambda: None)

    def tend(self) -> None:
        """Give back the messages of members that died, or sent no heartbeat for session_timeout_s; follow the others."""
        with self._turn:
            if not self._others() and not self.log.has_news:
                return
            with contextlib.suppress(PassedOverError):
                self.turn((), self._give_back_of_dead)

    def _give_back_of_dead(self) -> None:
        members = self._members.members()
        silent = self._liveness.expired({at: record for at, record in members.items()
                                         if record.incarnation != self._members.incarnation})
        living = {record.incarnation for at, record in members.items() if at not in silent}
        if 0 in living:  # a record that is just being written
            return
        for dead in self._others() - living:
            for queue in self.log.queues.values():
                if taken := [offset for offset, (_, owner) in queue.open.items() if owner == dead]:
                    self.log.add(queue.step(dead, {"back": taken}))

    def store(self, flights: Sequence[SharedFlight]) -> dict[int, int]:
        """Store what is done, and before it what is done beyond that; return the group's offsets. It is durable then.

        HistoryChangedError, with nothing written, if the store was recovered meanwhile.
        """
        if self.log.size_bytes == self._stored_size and not self.log.has_news and not any(flight.has_notes for flight in flights):
            return self.stored()
        found: dict[int, int] = {}
        size_bytes = -1

        def change(table: Table) -> None:
            nonlocal size_bytes
            if read_epoch(self._root) != self.epoch:
                raise HistoryChangedError(self._root)
            row = table.get(self._key, {})
            found.clear()
            moved: dict[int, int] = {}

            def save() -> None:
                moved.update({queue_id: queue.done for queue_id, queue in self.log.queues.items() if row.get(queue_id) != queue.done})
                for queue_id, done in moved.items():
                    self.log.add(self.log.queues[queue_id].saved(done))

            with self._turn:
                self.turn(flights, save)
                sync, size_bytes = self.log.syncing(), self.log.size_bytes  # another thread's turn may make it longer from here on
            sync()
            found.update(row | moved)
            if moved:
                table[self._key] = found.copy()
            if self._acks.is_long(size_bytes):
                self._compact(row)

        while True:
            with contextlib.suppress(PassedOverError):
                # No fence ends this lock: a stopped holder that goes on would put its old file in the place of newer offsets.
                self._offsets.update(change)
                self._stored_size = size_bytes  # not before the offsets are written
                return found

    def _compact(self, row: Mapping[int, int]) -> None:
        def compact() -> None:
            with self._members.compaction() as may_replace:
                fence = self.log.fence
                self.log.follow()
                if may_replace and self.log.fence == fence:  # others had not passed over this member before it had that lock
                    self._acks.compact(row)

        self._in_table(compact)

    def close(self) -> None:
        """Leave the group; messages that this member still has are the others'."""
        with self._turn:
            self._slot = -1
            super().close()
            self.log.close()

    def _joined(self) -> tuple[GroupMembers, int]:
        return GroupMembers(self._root, self._topic, self._group, pulse=self._pulse, wanted=self._wanted), -1

    def _others(self) -> set[int]:
        """Return the other members that have messages."""
        return {owner for queue in self.log.queues.values() for owner in queue.owners} - {self._members.incarnation}

    def _begun_queue(self, queue_id: int, states: Sequence[SavedQueue], offset: int | None) -> SavedQueue:
        """Return a new tenure with what earlier ones have left."""
        flight = InFlight(0 if offset is None else offset)
        flight.resume(states, offset, partial(self._members.marked_end, queue_id))
        state = flight.saved(queue_id, -1 if offset is None else offset)
        assert state is not None
        return state
