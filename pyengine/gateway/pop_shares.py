"""What the clients of groups that pop have, and until when: the queues that the gateway has claimed, their messages in flight, the leases.

    share = await shares.get(group, topic, is_from_last=False)   # claims its queues, if they are free
    shares.lease(lease, until_s)                                 # a client has an open message of a PopQueue
    shares.find_lease(group, topic, queue_id, offset, pop_ms)    # by what a handle says
    shares.end_in_place(lease, is_counted=True)                  # its message is delivered again, before all that follow
    saving = await shares.collect()                              # what is saved with the offsets of all groups

A group has a Share of each topic that it pops from, and of its retry topic: the same claims of queues, flights of messages and files
as a program's consumer has (GroupSession, AssignedQueue, InFlight). They are saved every FLUSH_S, with the offsets of all groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pyengine.client.group_session import AssignedQueue, GroupSession, HistoryChangedError, note_stored
from pyengine.errors import EngineError, UsageError
from pyengine.formats.record import Message
from pyengine.gateway.connections import REQUESTER, Connection, TurnExecutor
from pyengine.gateway.names import RETRY_PREFIX, Names
from pyengine.gateway.positions import LEVEL, GroupOffsets, Positions
from pyengine.gateway.tasks import Pending
from pyengine.ipc.control_block import write_rows
from pyengine.ipc.group_members import Claim
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.shared_objects import POPS, find_folder
from pyengine.storage.acknowledgements import InFlight, SavedQueue, flip
from pyengine.storage.consumer_offset import Table
from pyengine.storage.durable_file import RunningClock

IN_FLIGHT_MAX = 10_000       # of one queue of a group (RocketMQ: popInflightMessageThreshold)
SHARES_MAX = 2048            # topics of all groups, with the retry topics: each has a descriptor
POPPING_S = 30.0             # after a pop without messages in flight its group counts as one that pops
TICK_S = 0.1                 # precision of the end of a lease
CLAIM_AGAIN_S = 2.0          # after a claim of queues that others have
ASIDE_BOUNDS_MAX = 200_000   # of the runs of a queue that wait for pops of their topics: a save of it has 2.5 MB
ALL_ASIDE_BOUNDS_MAX = 1_000_000  # of all queues; a queue may have four of each topic
GATHERED = 256               # messages that are put again in one piece; a run of as many is not put again


@dataclass(slots=True, eq=False)
class Lease:
    """One message that a client has, until a time, or while its connection `owner` is open. `pop_time_ms` is that of its handle."""

    share: Share
    queue: PopQueue
    message: Message
    pop_time_ms: int
    invisible_s: float
    is_ordered: bool = False
    owner: Connection | None = None
    began_s: float = field(default_factory=time.monotonic)
    until_s: float = 0.0
    tick: int = -1  # in which it ends; LeaseEnds'

    @property
    def offset(self) -> int:
        return self.message.queue_offset


class LeaseEnds:
    """When leases end, to the tick."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[Lease, None]] = {}
        self._next = math.floor(time.monotonic() / TICK_S)  # all earlier ones are over

    def plan(self, lease: Lease, until_s: float) -> None:
        """Let a lease end then, whatever was planned."""
        self.leave_out(lease)
        lease.until_s, lease.tick = until_s, max(self._next, math.ceil(until_s / TICK_S))
        self._ticks.setdefault(lease.tick, {})[lease] = None

    def leave_out(self, lease: Lease) -> None:
        if (leases := self._ticks.get(lease.tick)) is not None:
            leases.pop(lease, None)
            if not leases:
                del self._ticks[lease.tick]
        lease.tick = -1

    def due(self, now_s: float, most: int) -> list[Lease]:
        """Return leases whose time is over, no more than so many, and leave them out."""
        found: list[Lease] = []
        last = math.floor(now_s / TICK_S)
        if not self._ticks:
            self._next = last + 1
        while self._next <= last and len(found) < most:
            leases = list(islice(self._ticks.get(self._next, ()), most - len(found)))
            found += leases
            for lease in leases:
                self.leave_out(lease)
            self._next += self._next not in self._ticks
        return found


@dataclass(slots=True)
class PopQueue(AssignedQueue):
    """A queue from which a group pops.

    leases      by offset, of the open messages that clients have; an open one without any is on its way back
    aside       of a retry topic: what waits for pops of the topics that it came from, by them, as the bounds of runs (InFlight.aside)
    bounds      how many these are, of at most `bounds_max`
    burying     of the flight's dead: those that are being put into the dead letters
    end         of the queue, when messages were last read
    attempt_id  of the last ordered pop, which its client may repeat
    ended_ms    the newest time of a pop whose messages are delivered again in place
    """

    leases: dict[int, Lease] = field(default_factory=dict)
    aside: dict[str, array[int]] = field(default_factory=dict)
    bounds: int = 0
    bounds_max: int = ASIDE_BOUNDS_MAX
    is_gathering: bool = False
    burying: set[int] = field(default_factory=set)
    end: int = 0
    attempt_id: str = ""
    ended_ms: int = 0

    @property
    def is_blocked(self) -> bool:
        """Whether an ordered group must wait for messages of this queue: clients have them, or some are on their way back."""
        return len(self.flight.open) > len(self.flight.again)

    @property
    def room(self) -> int:
        return IN_FLIGHT_MAX - len(self.flight.open)

    @property
    def room_for_next(self) -> int:
        """The same of those that were never read: some of them may have to wait for pops of their topics."""
        return self.room if self.bounds < self.bounds_max else 0

    def seek(self, offset: int) -> None:
        """Continue at `offset`, whatever was delivered. Its leases have ended."""
        self.aside.clear()
        self.bounds = 0
        self.burying.clear()
        AssignedQueue.seek(self, offset)

    def may_have(self, topic: str, end: int, *, is_ordered: bool) -> bool:
        """Whether a pop of a topic may find something; `end`: of the queue."""
        if is_ordered and self.flight.open:
            return not self.is_blocked
        return bool(self.flight.again) or self.room > 0 and topic in self.aside or self.room_for_next > 0 and end > self.position

    @property
    def is_scattered(self) -> bool:
        """Whether its runs will soon be as many as they may."""
        return self.bounds > self.bounds_max // 2

    def set_aside(self, message: Message, topic: str) -> None:
        offset, waiting = message.queue_offset, self.aside.setdefault(topic, array("q"))
        self.flight.set_aside(offset)
        self.bounds -= len(waiting)
        flip(waiting, offset, offset + 1)
        self.bounds += len(waiting)

    def bring_back(self, topic: str, runs: list[tuple[int, int]], messages: Iterable[Message]) -> None:
        """Take what waits for this topic in these runs: these messages, the others were deleted."""
        waiting = self.aside[topic]
        self.bounds -= len(waiting)
        for start, end in runs:
            flip(waiting, start, end)
        self.bounds += len(waiting)
        if not waiting:
            del self.aside[topic]
        self.flight.bring_back(runs, messages)
        self.settle()

    def scattered(self) -> tuple[str, list[tuple[int, int]]]:
        """Return the topic that has the most runs, and short ones of them with about GATHERED messages: the last ones."""
        topic = max(self.aside, key=lambda name: len(self.aside[name]))
        waiting, found, number = self.aside[topic], [], 0
        if len(waiting) == 2:
            return topic, []
        for at in range(len(waiting) - 2, -1, -2):
            start, end = waiting[at:at + 2]
            if number < GATHERED and end - start < GATHERED:
                found.append((start, end))
                number += end - start
            if number >= GATHERED:
                break
        return topic, found or [(waiting[0], min(waiting[1], waiting[0] + GATHERED))]

    def row(self, group: str, topic: str, now_s: float) -> dict[str, object]:
        """Return what is told of the messages in flight; of the clock only the time that is left counts."""
        opened = self.flight.open.values()
        first_s = min((lease.until_s for lease in self.leases.values()), default=now_s)
        return {"group": group, "topic": topic, "queue_id": self.queue_id, "in_flight": len(opened),
                "attempts": max(each.reconsume_times + each.delivery_count for each in opened),
                "invisible_until_ms": time.time_ns() // 1_000_000 + round(max(0.0, first_s - now_s) * 1000)}


class Share:
    """The queues of one topic that the gateway has claimed for a group that pops."""

    def __init__(self, session: GroupSession, topic: str, group: str) -> None:
        self.session = session
        self.topic = topic
        self.group = group
        self.queues: dict[int, PopQueue] = {}
        self.lock = asyncio.Lock()  # of pops, whose reads may wait
        self.turn = 0            # of the pops that have looked into its queues: each begins with another one
        self.is_second = False   # after the group's retries, in every other pop
        self.opened_ms = time.time_ns() // 1_000_000
        self.used_s = time.monotonic()
        self.claim_due_s = 0.0
        self.is_claiming = False  # a thread uses the session's file
        self.is_closed = False

    @property
    def in_flight(self) -> int:
        return sum(len(queue.flight.open) for queue in self.queues.values())

    def close(self) -> None:
        """Release the queues, at once or when no thread claims any."""
        self.is_closed = True
        self.queues.clear()
        if not self.is_claiming:
            self.session.close()

    def claimed(self, queue_ids: Iterable[int]) -> list[PopQueue]:
        """Claim those of these queues that are free; in a thread."""
        return [PopQueue(queue_id, claim, flight.done, flight, -1 if stored is None else stored)
                for queue_id, (claim, stored, flight) in self.session.take(queue_ids).items()]

    def add(self, queues: Iterable[PopQueue]) -> None:
        self.queues.update({queue.queue_id: queue for queue in queues})


class Shares:
    """What groups pop from: the queues that this gateway has claimed for them, until they pop no more. Used in the loop's thread."""

    def __init__(self, reader: LiveStoreReader, names: Names, offsets: GroupOffsets, positions: Positions, executor: TurnExecutor,
                 held_groups: Callable[[], set[str]]) -> None:
        self._reader = reader
        self._names = names
        self._offsets = offsets
        self._positions = positions
        self._executor = executor
        self._held_groups = held_groups
        self.by_group: dict[str, dict[str, Share]] = {}  # by group and topic
        self.ends = LeaseEnds()
        self._opening: Pending[tuple[str, str], asyncio.Task[Share]] = Pending()
        self._noted = True   # what another gateway has noted does not count any more
        self.scattered: list[tuple[Share, PopQueue]] = []  # of which too many runs wait for pops of their topics
        self.in_flight = 0   # messages of all groups: as many as at the last note, and what was popped less what was done since then

    def __iter__(self) -> Iterator[Share]:
        return (share for shares in self.by_group.values() for share in shares.values())

    def of_group(self, group: str) -> Mapping[str, Share]:
        return self.by_group.get(group, {})

    def find(self, group: str, topic: str) -> Share | None:
        return self.by_group.get(group, {}).get(topic)

    async def get(self, group: str, topic: str, *, is_from_last: bool) -> Share:
        """Return the group's share of a topic, with all queues that it can have."""
        share = self.find(group, topic)
        if share is None:
            share = await asyncio.shield(self._opening.once(
                (group, topic), lambda: asyncio.get_running_loop().create_task(self._open(group, topic, is_from_last))))
        now_s, config = time.monotonic(), self._names.recent_topic(topic)
        number = 0 if config is None else config.read_queue_nums
        if len(share.queues) < number and now_s >= share.claim_due_s:
            # It completes even if the client ends meanwhile: otherwise nobody would know what was claimed.
            await asyncio.shield(asyncio.get_running_loop().create_task(self._claim(share, number)))
        if share.is_closed:  # the group was reset, say
            return await self.get(group, topic, is_from_last=is_from_last)
        if len(share.queues) < number:
            raise UsageError(f"programs of this host consume {topic} for the group {group}, so its messages cannot be popped: stop "
                             "those, or give this consumer a group of its own")
        share.used_s = now_s
        return share

    async def _claim(self, share: Share, number: int) -> None:
        async with share.lock:
            if share.is_closed or time.monotonic() < share.claim_due_s:  # another pop has claimed meanwhile
                return
            share.is_claiming = True
            try:
                queues = await self._executor.run(share.claimed, [each for each in range(number) if each not in share.queues])
            finally:
                share.is_claiming = False
                share.claim_due_s = time.monotonic() + CLAIM_AGAIN_S
                if share.is_closed:
                    share.session.close()
            if not share.is_closed:
                share.add(queues)

    async def _open(self, group: str, topic: str, is_from_last: bool) -> Share:
        if sum(map(len, self.by_group.values())) + len(self._opening) > SHARES_MAX:
            raise UsageError(f"groups pop from {SHARES_MAX} topics already: those without a pop for {POPPING_S:g} s are left out soon")
        if why := self._names.why_no_commit:
            raise UsageError(why)
        if not self._offsets.has_room:
            raise UsageError("too many offsets of groups are kept already: delete groups that are no longer used")
        await self._offsets.flush()  # a client of the group may have pulled until now
        config = self._names.topic(topic)
        number = 0 if config is None else config.read_queue_nums

        def opened() -> tuple[Share, list[PopQueue]]:
            session = GroupSession(self._reader.root, topic, group, queue_ids=(), clock=RunningClock(5 * CLAIM_AGAIN_S))
            try:
                session.begin(lambda: {queue_id: self._start(topic, queue_id, is_from_last) for queue_id in range(number)})
                share = Share(session, topic, group)
                return share, share.claimed(range(number))
            except BaseException:
                session.close()
                raise

        REQUESTER.set(None)  # in this task: while it has the lock, it waits for no other work of its client
        async with self._offsets.changing:  # a reset finds the share in `by_group`, or comes before its offsets are read
            share, queues = await self._executor.run(opened)
            share.add(queues)
            share.claim_due_s = time.monotonic() + CLAIM_AGAIN_S
            self.by_group.setdefault(group, {})[topic] = share
        return share

    def _start(self, topic: str, queue_id: int, is_from_last: bool) -> int:
        """Return where a new group begins; as in RocketMQ at the first message of a young queue, in any case."""
        low, high = self._reader.queue_range(topic, queue_id, LEVEL)
        if not is_from_last or topic.startswith(RETRY_PREFIX):
            return low
        return 0 if self._positions.begins_near_log_end(topic, queue_id) else high

    def why_not(self, group: str) -> str:
        """Return why a group may neither pull nor commit offsets: it pops; "" if it may."""
        shares = self.by_group.get(group)
        if not shares:
            return ""
        number = sum(share.in_flight for share in shares.values())
        return (f"the group {group} is consumed by POP and has {number} messages in flight: give this consumer a group of its own, or stop "
                f"the group's POP consumers, and wait until their messages are acknowledged and {POPPING_S:g} s more")

    def pops(self, group: str) -> bool:
        return group in self.by_group

    def forget(self, group: str, topic: str | None = None, queue_ids: Collection[int] | None = None) -> None:
        """Forget what a group has in flight, of these topics and queues or all: offsets were set, or the queues are others'."""
        shares = self.by_group.get(group, {})
        for name in [name for name in shares if topic in (None, name)]:
            share = shares[name]
            gone = [queue for queue in share.queues.values() if queue_ids is None or queue.queue_id in queue_ids]
            if len(gone) < len(share.queues) and not share.is_claiming:  # what it claims now may have begun at the old offset
                for queue in gone:
                    self.drop(share, queue)
                share.claim_due_s = 0.0
                continue
            for queue in share.queues.values():
                self.end_leases(queue)
            shares.pop(name).close()
        if not shares:
            self.by_group.pop(group, None)

    def forget_all(self) -> None:
        for group in list(self.by_group):
            self.forget(group)

    def drop(self, share: Share, queue: PopQueue) -> None:
        """Give up a queue that others have now."""
        self.end_leases(queue)
        share.session.drop(queue.grant)
        if share.queues.get(queue.queue_id) is queue:
            del share.queues[queue.queue_id]

    # ---- leases -------------------------------------------------------------------

    def lease(self, lease: Lease, until_s: float) -> None:
        lease.queue.leases[lease.offset] = lease
        self.ends.plan(lease, until_s)

    def find_lease(self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int) -> Lease | str:
        """Return the lease with this time of its pop, else why there is none; "" if the handle is old."""
        share = self.find(group, topic)
        queue = None if share is None else share.queues.get(queue_id)
        if share is None or queue is None or offset >= queue.flight.delivered_end:
            return f"message {offset} of queue {queue_id} of {topic} is not in flight for {group}"
        lease = queue.leases.get(offset)
        if lease is not None and lease.pop_time_ms == pop_ms:
            return lease
        if pop_ms < share.opened_ms:
            return f"the handle of message {offset} of queue {queue_id} of {topic} is older than what is known of {group}: it comes again"
        return ""

    def end(self, lease: Lease) -> None:
        """End a lease; its message is still open."""
        self.ends.leave_out(lease)
        del lease.queue.leases[lease.offset]

    def end_in_place(self, lease: Lease, *, is_counted: bool) -> None:
        """End a lease; its message is delivered again before all that follow."""
        self.end(lease)
        queue = lease.queue
        queue.ended_ms = max(queue.ended_ms, lease.pop_time_ms)
        if is_counted:
            queue.flight.give_back(lease.message)
        else:
            queue.flight.take_back([lease.message])

    def end_leases(self, queue: PopQueue) -> None:
        """End all leases of a queue that is another one from now on."""
        for lease in queue.leases.values():
            self.ends.leave_out(lease)
        queue.leases = {}

    # ---- saves --------------------------------------------------------------------

    async def collect(self) -> _Saving | None:
        """Return what to save: of each share that changed, the offsets and what is acknowledged above them. Notes what is in flight."""
        now_s = time.monotonic()
        popping = self._held_groups() | {group for group, _ in self._opening}
        saving, rows = _Saving(self), []
        for share in list(self):
            if self.find(share.group, share.topic) is not share:  # it was forgotten meanwhile
                continue
            try:
                share.session.heartbeat()
                if share.session.rejoin_if_removed():  # its claims are no claims any more
                    self.forget(share.group, share.topic)
                    continue
            except (EngineError, OSError):  # what it writes next says why
                pass
            flights = {}
            for queue in list(share.queues.values()):
                flights[queue.grant] = queue.flight.copied(), queue.committed
                if queue.flight.open:
                    rows.append(queue.row(share.group, share.topic, now_s))
                    await asyncio.sleep(0)  # a queue with messages takes up to 10 ms
            await asyncio.sleep(0)
            saving.flights.append((share, flights))
            is_used = any(queue.is_blocked for queue in share.queues.values())
            if not (is_used or share.group in popping or share.lock.locked()) and now_s - share.used_s > POPPING_S:
                saving.idle.append((share, share.used_s))
        self._share_bounds()
        await self._executor.run(saving.prepare)
        await self._note(rows)
        saving.rows = [row for row in saving.rows if self.find(row[0].group, row[0].topic) is row[0]]
        return saving if saving.rows or saving.idle else None

    def _share_bounds(self) -> None:
        """Let each queue have its part of the bounds that all may have, and find those that need more soon."""
        waiting = [(share, queue) for share in self for queue in share.queues.values() if queue.aside]
        for _, queue in waiting:
            queue.bounds_max = max(4 * len(queue.aside), min(ASIDE_BOUNDS_MAX, ALL_ASIDE_BOUNDS_MAX // len(waiting)))
        self.scattered = [(share, queue) for share, queue in waiting if queue.is_scattered]

    async def _note(self, rows: list[dict[str, Any]]) -> None:
        self.in_flight = sum(row["in_flight"] for row in rows)
        if rows or self._noted:
            self._noted = bool(rows)
            with contextlib.suppress(EngineError, OSError):  # without it only those have no data
                await self._executor.run(lambda: write_rows(find_folder(self._reader.root), POPS, rows))

    async def close(self) -> None:
        """Release all queues, after the last flush of the offsets."""
        self.forget_all()
        await self._note([])


class _Saving:
    def __init__(self, shares: Shares) -> None:
        self.flights: list[tuple[Share, dict[Claim, tuple[InFlight, int]]]] = []  # as they were, and the committed offsets
        self.rows: list[tuple[Share, dict[Claim, int], dict[Claim, SavedQueue]]] = []
        self.idle: list[tuple[Share, float]] = []
        self._shares = shares
        self._kept: dict[Share, set[int]] = {}  # the ids of the queues that the group still has; not of one whose log was recovered

    def prepare(self) -> None:
        """Find what has changed, in a thread: a queue may have many runs."""
        for share, flights in self.flights:
            offsets = {claim: flight.done for claim, (flight, committed) in flights.items() if flight.done != committed}
            states = {claim: state for claim, (flight, _) in flights.items()
                      if (state := flight.saved(claim.queue_id, flight.done)) is not None}
            if offsets or states:
                self.rows.append((share, offsets, states))
        self.flights.clear()

    def write(self, table: Table) -> None:
        for share, offsets, states in self.rows:
            with contextlib.suppress(HistoryChangedError):
                self._kept[share] = share.session.commit_in(table, offsets, states)

    def settle(self) -> None:
        for share, offsets, states in self.rows:
            kept = self._kept.get(share)
            if kept is None:
                self._shares.forget(share.group, share.topic)
                continue
            for queue in note_stored(share.queues, offsets, states, kept):
                self._shares.drop(share, queue)
        for share, used_s in self.idle:
            if share.used_s == used_s and not share.lock.locked() and all(queue.done == queue.committed for queue in share.queues.values()):
                self._shares.forget(share.group, share.topic)
