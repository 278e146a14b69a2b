"""POP: messages that the clients of a group take from any queue, each for a time, and acknowledge in any order.

    pops = Pops(reader, names, positions, offsets, pulls, give_back, executor)   # serves RocketMQ 5's requests, all in the loop's thread
    await pops.tick()                                  # ends what was not acknowledged in its time

A group has a Share of each topic that it pops from, and of its retry topic: the same claims of queues, flights of messages and files
as a program's consumer has (GroupSession, AssignedQueue, InFlight). So the group's offset in a queue is its lowest message that is not
acknowledged, a broker goes on from there, and what was acknowledged above is saved every FLUSH_S, with the offsets of all groups.

A message that was taken has a Lease. Its handle, RocketMQ's POP_CK, names queue, offset and the time of the pop; that of an ended lease
changes nothing. A lease that ends without an acknowledgement puts the message into the retry topic, or at last into the dead letters, by
the logic of every other consumer (retries.sent_back). In an ordered group it stays where it is, delivered again before all that follow.
RocketMQ: PopMessageProcessor, AckMessageProcessor, ChangeInvisibleTimeProcessor, NotificationProcessor, ConsumerOrderInfoManager.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pyengine.arguments import INT64_MAX
from pyengine.client.group_session import AssignedQueue, GroupSession, HistoryChangedError, allocate_averagely
from pyengine.client.retries import SentBack, sent_back
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import PROPERTY_FIRST_POP_TIME, PROPERTY_RETRY_TOPIC
from pyengine.formats.record import Message, encode_properties
from pyengine.gateway import codes
from pyengine.gateway.acl_file import SUB
from pyengine.gateway.connections import Answer, Connection, Handlers, Request, TurnExecutor
from pyengine.gateway.members import BROADCASTING, SUBSCRIPTION_CHARS_MAX, Members, expression_fault, subscription_of
from pyengine.gateway.names import OWN_GROUP_PREFIXES, RETRY_PREFIX, Names, group_fault
from pyengine.gateway.positions import LEVEL, GroupOffsets, Positions
from pyengine.gateway.pulls import Arrivals, Pulls
from pyengine.gateway.wire import WireError, as_object, is_number, read_object, write_json
from pyengine.ipc.control_block import write_pops
from pyengine.ipc.group_members import Claim
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.shared_objects import find_folder
from pyengine.results import GetResult, GetStatus
from pyengine.storage.acknowledgements import Identity, InFlight, SavedQueue, flip
from pyengine.storage.config_table import PERM_READ, SubscriptionGroup
from pyengine.storage.consumer_offset import Table
from pyengine.storage.durable_file import RunningClock
from pyengine.storage.message_getter import Wanted

MESSAGES_MAX = 32            # of one pop, as in RocketMQ
POP_BYTES = 4 << 20          # a pop ends with the message that reaches this size
IN_FLIGHT_MAX = 10_000       # of one queue of a group (RocketMQ: popInflightMessageThreshold)
ALL_IN_FLIGHT_MAX = 500_000  # of all groups: about 400 MB
SHARES_MAX = 2048            # topics of all groups, with the retry topics: each has a descriptor
HELD_MAX = 10_000            # pops of all clients
POLL_MS_MAX = 120_000
INVISIBLE_MS_MAX = 43_200_000
RENEWED_S_MAX = 10_800.0     # of a message that its connection keeps
POPPING_S = 30.0             # after a pop without messages in flight its group counts as one that pops
TICK_S = 0.1                 # precision of the end of a lease
ENDS_OF_TICK = 1000          # leases, in one piece of the loop's time
SLICE_S = 0.005              # of the loop's time, for what looks at all messages in flight
PUT_AGAIN_S = 1.0            # after a retry that could not be put
CLAIM_AGAIN_S = 2.0          # after a claim of queues that others have
READ_SLICE_S = 0.02          # of one pop that finds only messages that its filter excludes
ORDERED_QUEUE = 999          # reviveQid of an ordered pop (KeyBuilder.POP_ORDER_REVIVE_QUEUE)
ACKS_MAX = 4096              # in one batch
BITS_MAX = 8192              # of one of them
ACKED_MAX = 10_000           # messages of one batch: all of them are one piece of the loop's time
ASIDE_BOUNDS_MAX = 200_000   # of the runs of a queue that wait for pops of their topics: a save of it has 2.5 MB
EXPIRED = "receipt handle is expired"  # remark of an answer that changes nothing, of which RocketMQ's proxy makes an error


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
        """The message's, in its queue."""
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
        """Forget a lease, if it is planned."""
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
    burying     of the flight's dead: those that are being put into the dead letters
    end         of the queue, when messages were last read
    attempt_id  of the last ordered pop, which its client may repeat
    ended_ms    the newest time of a pop whose messages are delivered again in place
    """

    leases: dict[int, Lease] = field(default_factory=dict)
    aside: dict[str, array[int]] = field(default_factory=dict)
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
        """How many more messages may be in flight."""
        return IN_FLIGHT_MAX - len(self.flight.open)

    @property
    def room_for_next(self) -> int:
        """The same of those that were never read: some of them may have to wait for pops of their topics."""
        return self.room if len(self.flight.aside) < ASIDE_BOUNDS_MAX else 0

    def seek(self, offset: int) -> None:
        """Continue at `offset`, whatever was delivered. Its leases have ended."""
        self.aside.clear()
        self.burying.clear()
        AssignedQueue.seek(self, offset)

    def may_have(self, topic: str, end: int, *, is_ordered: bool) -> bool:
        """Whether a pop of a topic may find something; `end`: of the queue."""
        if is_ordered and self.flight.open:
            return not self.is_blocked
        return bool(self.flight.again) or self.room > 0 and topic in self.aside or self.room_for_next > 0 and end > self.position

    def set_aside(self, message: Message, topic: str) -> None:
        """Let an open message wait for pops of this topic."""
        offset = message.queue_offset
        self.flight.set_aside(offset)
        flip(self.aside.setdefault(topic, array("q")), offset, offset + 1)

    def bring_back(self, topic: str, end: int, messages: list[Message]) -> None:
        """Take what waits for this topic from its first offset to `end`: these messages, the others were deleted."""
        start = self.aside[topic][0]
        flip(self.aside[topic], start, end)
        if not self.aside[topic]:
            del self.aside[topic]
        self.flight.bring_back(start, end, messages)
        self.settle()

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
        self.turn = 0
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


@dataclass(slots=True, eq=False)
class Asked:
    """One pop, or one request to be told of messages; `queue_id` is -1 for any."""

    request: Request
    group: str
    topic: str
    queue_id: int
    most: int
    invisible_ms: int
    until_s: float
    wanted: Wanted = field(default_factory=Wanted)
    is_from_last: bool = False
    is_ordered: bool = False
    is_kept: bool = False
    attempt_id: str = ""

    @property
    def is_notification(self) -> bool:
        return self.most == 0

    @property
    def kind(self) -> tuple[object, ...]:
        """What pops have in common that find the same."""
        return self.queue_id, self.is_ordered, self.is_notification, self.wanted.tags, id(self.wanted.condition)


@dataclass(slots=True)
class Taken:
    """A message that a pop takes, and its record as it is in the log."""

    queue: PopQueue
    share: Share
    message: Message
    record: bytes = b""


GiveBack = Callable[[Message, SentBack, Callable[[str], None], Callable[[str], None]], Awaitable[None]]  # Sends.give_back


class Shares:
    """What groups pop from: the queues that this gateway has claimed for them, until they pop no more. Used in the loop's thread."""

    def __init__(self, reader: LiveStoreReader, names: Names, offsets: GroupOffsets, positions: Positions, executor: TurnExecutor,
                 release: Callable[[PopQueue], None], held_groups: Callable[[], set[str]]) -> None:
        """`release` gets each queue that is given up; `held_groups`: whose pops are held."""
        self._reader = reader
        self._names = names
        self._offsets = offsets
        self._positions = positions
        self._executor = executor
        self._release = release
        self._held_groups = held_groups
        self._by_group: dict[str, dict[str, Share]] = {}  # by topic
        self._opening: dict[tuple[str, str], asyncio.Task[Share]] = {}
        self._noted = True   # what another gateway has noted does not count any more
        self.in_flight = 0   # messages of all groups: as many as at the last note, and those that were popped since then

    def __iter__(self) -> Iterator[Share]:
        return (share for shares in self._by_group.values() for share in shares.values())

    def of_group(self, group: str) -> Mapping[str, Share]:
        """Return a group's shares by topic."""
        return self._by_group.get(group, {})

    def find(self, group: str, topic: str) -> Share | None:
        """Return a group's share of a topic, None without one."""
        return self._by_group.get(group, {}).get(topic)

    async def get(self, asked: Asked, topic: str) -> Share:
        """Return the group's share of a topic, with all queues that it can have."""
        share = self._by_group.get(asked.group, {}).get(topic)
        if share is None:
            key = asked.group, topic
            opening = self._opening.get(key)
            if opening is None:
                opening = self._opening[key] = asyncio.get_running_loop().create_task(self._open(asked, topic))
                opening.add_done_callback(lambda done: (self._opening.pop(key, None), done.cancelled() or done.exception()))
            share = await asyncio.shield(opening)
        now_s, config = time.monotonic(), self._names.recent_topic(topic)
        number = 0 if config is None else config.read_queue_nums
        if len(share.queues) < number and now_s >= share.claim_due_s:
            share.claim_due_s = now_s + CLAIM_AGAIN_S
            # It completes even if the client ends meanwhile: otherwise nobody would know what was claimed.
            await asyncio.shield(asyncio.get_running_loop().create_task(self._claim(share, number)))
            if share.is_closed:  # the group was reset, say
                return await self.get(asked, topic)
        if len(share.queues) < number:
            raise UsageError(f"programs of this host consume {topic} for the group {asked.group}, so its messages cannot be popped: stop "
                             "those, or give this consumer a group of its own")
        share.used_s = now_s
        return share

    async def _claim(self, share: Share, number: int) -> None:
        async with share.lock:
            if share.is_closed:
                return
            share.is_claiming = True
            try:
                queues = await self._executor.run(share.claimed, [each for each in range(number) if each not in share.queues])
            finally:
                share.is_claiming = False
                if share.is_closed:
                    share.session.close()
            if not share.is_closed:
                share.add(queues)

    async def _open(self, asked: Asked, topic: str) -> Share:
        if sum(map(len, self._by_group.values())) + len(self._opening) > SHARES_MAX:
            raise UsageError(f"groups pop from {SHARES_MAX} topics already: those without a pop for {POPPING_S:g} s are left out soon")
        if why := self._names.why_no_commit:
            raise UsageError(why)
        if not self._offsets.has_room:
            raise UsageError("too many offsets of groups are kept already: delete groups that are no longer used")
        await self._offsets.flush()  # a client of the group may have pulled until now
        config = self._names.topic(topic)
        number = 0 if config is None else config.read_queue_nums

        def opened() -> tuple[Share, list[PopQueue]]:
            session = GroupSession(self._reader.root, topic, asked.group, queue_ids=(), clock=RunningClock(5 * CLAIM_AGAIN_S))
            try:
                session.begin(lambda: {queue_id: self._start(topic, queue_id, asked.is_from_last) for queue_id in range(number)})
                share = Share(session, topic, asked.group)
                return share, share.claimed(range(number))
            except BaseException:
                session.close()
                raise

        share, queues = await self._executor.run(opened)
        share.add(queues)
        share.claim_due_s = time.monotonic() + CLAIM_AGAIN_S
        self._by_group.setdefault(asked.group, {})[topic] = share
        return share

    def _start(self, topic: str, queue_id: int, is_from_last: bool) -> int:
        """Return where a new group begins; as in RocketMQ at the first message of a young queue, in any case."""
        low, high = self._reader.queue_range(topic, queue_id, LEVEL)
        if not is_from_last or topic.startswith(RETRY_PREFIX):
            return low
        return 0 if self._positions.begins_near_log_end(topic, queue_id) else high

    def why_not(self, group: str) -> str:
        """Return why a group may neither pull nor commit offsets: it pops; "" if it may."""
        shares = self._by_group.get(group)
        if not shares:
            return ""
        number = sum(share.in_flight for share in shares.values())
        return (f"the group {group} is consumed by POP and has {number} messages in flight: give this consumer a group of its own, or stop "
                f"the group's POP consumers, and wait until their messages are acknowledged and {POPPING_S:g} s more")

    def pops(self, group: str) -> bool:
        """Whether a group is consumed by POP."""
        return group in self._by_group

    def forget(self, group: str, topic: str | None = None) -> None:
        """Forget what a group has in flight, of one topic or all: its offsets were set, or its queues are others'."""
        shares = self._by_group.get(group, {})
        for name in [name for name in shares if topic in (None, name)]:
            for queue in shares[name].queues.values():
                self._release(queue)
            shares.pop(name).close()
        if not shares:
            self._by_group.pop(group, None)

    def forget_all(self) -> None:
        """Forget what all groups have in flight."""
        for group in list(self._by_group):
            self.forget(group)

    def drop(self, share: Share, queue: PopQueue) -> None:
        """Give up a queue that others have now."""
        self._release(queue)
        share.session.drop(queue.grant)
        if share.queues.get(queue.queue_id) is queue:
            del share.queues[queue.queue_id]

    async def collect(self) -> _Saving | None:
        """Return what to save: of each share that changed, the offsets and what is acknowledged above them. Notes what is in flight."""
        now_s, pieces = time.monotonic(), Pieces()
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
                await pieces.end()
            saving.flights.append((share, flights))
            is_used = any(queue.is_blocked for queue in share.queues.values())
            if not (is_used or share.group in popping or share.lock.locked()) and now_s - share.used_s > POPPING_S:
                saving.idle.append((share, share.used_s))
        await self._executor.run(saving.prepare)
        await self._note(rows)
        saving.rows = [row for row in saving.rows if self.find(row[0].group, row[0].topic) is row[0]]
        return saving if saving.rows or saving.idle else None

    async def _note(self, rows: list[dict[str, Any]]) -> None:
        """Note for `groups`, `status` and the metrics what is in flight."""
        self.in_flight = sum(row["in_flight"] for row in rows)
        if rows or self._noted:
            self._noted = bool(rows)
            with contextlib.suppress(EngineError, OSError):  # without it only those have no data
                await self._executor.run(lambda: write_pops(find_folder(self._reader.root), rows))

    async def close(self) -> None:
        """Release all queues, after the last flush of the offsets."""
        self.forget_all()
        await self._note([])


class _Saving:
    """One save of all shares that changed."""

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
            for claim in {*offsets, *states}:
                queue = share.queues.get(claim.queue_id)
                if queue is None or queue.claim != claim:
                    continue
                if claim.queue_id not in kept:
                    self._shares.drop(share, queue)
                    continue
                queue.committed = offsets.get(claim, queue.committed)
                if claim in states:
                    queue.flight.note_saved(states[claim])
        for share, used_s in self.idle:
            if share.used_s == used_s and not share.lock.locked() and all(queue.done == queue.committed for queue in share.queues.values()):
                self._shares.forget(share.group, share.topic)


class HeldPops:
    """Pops that wait until messages come for them, or their time is over."""

    def __init__(self, arrivals: Arrivals, take: Callable[[Asked], Awaitable[Answer | None]], has_news: Callable[[Asked], bool]) -> None:
        """`take` answers a pop if it finds messages; `has_news`: whether it may."""
        self._arrivals = arrivals
        self._take = take
        self._has_news = has_news
        self._held: dict[tuple[str, str], list[Asked]] = {}  # by group and topic
        self._serving: dict[tuple[str, str], asyncio.Task[None]] = {}
        arrivals.serve(self._check, lambda: bool(self._held))

    @property
    def groups(self) -> set[str]:
        """Those whose pops are held."""
        return {group for group, _ in self._held}

    def hold(self, asked: Asked) -> Answer | None:
        """Answer a pop later; at once if it does not wait, or too many do."""
        if time.monotonic() >= asked.until_s:
            return _nothing(asked)
        if sum(map(len, self._held.values())) >= HELD_MAX:
            return _nothing(asked, is_full=True)
        if asked.request.is_open:
            self._held.setdefault((asked.group, asked.topic), []).append(asked)
            self._arrivals.stir()
            self.wake(asked.group, asked.topic)  # for what has come after the look
        return None

    def closed(self, connection: Connection) -> None:
        """Drop the pops of a connection that has ended."""
        for key, pops in list(self._held.items()):
            self._set(key, [asked for asked in pops if asked.request.connection is not connection])

    def wake(self, group: str, topic: str) -> None:
        """Have the pops of a group's topic served if messages may have come for them."""
        key = group, topic
        waiting = self._held.get(key)
        if not waiting or key in self._serving:
            return
        if any(self._has_news(asked) for asked in {asked.kind: asked for asked in waiting}.values()):
            self._serving[key] = task = asyncio.get_running_loop().create_task(self._serve(key))
            task.add_done_callback(lambda done: (self._serving.pop(key, None), done.cancelled() or done.exception()))

    def close(self) -> None:
        """Serve no more."""
        for task in self._serving.values():
            task.cancel()

    def _set(self, key: tuple[str, str], pops: list[Asked]) -> None:
        if pops:
            self._held[key] = pops
        else:
            self._held.pop(key, None)

    def _check(self) -> Iterator[None]:
        """Answer the pops whose time is over, and look for messages for the others, a group's topic at a time."""
        now_s = time.monotonic()
        for key in list(self._held):
            yield
            waiting = self._held.get(key, [])
            for asked in [asked for asked in waiting if now_s >= asked.until_s]:
                waiting.remove(asked)
                asked.request.reply(_nothing(asked))
            self._set(key, waiting)
            self.wake(*key)

    async def _serve(self, key: tuple[str, str]) -> None:
        """Answer pops of a group's topic with what has come, the oldest first."""
        without: set[tuple[object, ...]] = set()
        pieces = Pieces()
        for asked in list(self._held.get(key, ())):
            await pieces.end()
            if asked.kind in without or asked not in self._held.get(key, ()):
                continue
            try:
                answer = await self._take(asked)
            except Exception as error:  # noqa: BLE001 - the others' pops are answered all the same
                if not isinstance(error, EngineError):
                    asked.request.connection.report(f"a held pop of {asked.topic} by {asked.group} failed: {error!r}")
                answer = Answer(codes.SYSTEM_ERROR, f"{type(error).__name__}: {error}")
            if answer is None:
                without.add(asked.kind)
                continue
            self._set(key, [each for each in self._held.get(key, ()) if each is not asked])
            asked.request.reply(answer)


class Pieces:
    """Long work in the loop's thread, in pieces between which others come."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def end(self) -> None:
        """Let others come if the piece was long."""
        if time.monotonic() - self._began_s >= SLICE_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()


class RetryPuts:
    """Puts messages whose leases have ended into the retry topic of their group, or into its dead letters."""

    def __init__(self, reader: LiveStoreReader, names: Names, give_back: GiveBack, executor: TurnExecutor, report: Callable[[str], None]
                 ) -> None:
        self._reader = reader
        self._names = names
        self._give_back = give_back
        self._executor = executor
        self._report = report
        self._blocked_by = ""  # why messages could not be put last

    async def put(self, leases: list[Lease], then: Callable[[Lease, str], None], *, is_dead: bool = False) -> None:
        """Put the messages of these leases; `then` gets each one, and why it could not be put, "" if it is, or was deleted."""
        offsets = [lease.message.physical_offset for lease in leases]
        try:
            originals = await self._executor.run(lambda: [self._reader.message_at(offset, LEVEL) for offset in offsets])
        except Exception as error:  # noqa: BLE001 - the store is recovered, say: no message may be forgotten
            for lease in leases:
                self._end(then, lease, f"{type(error).__name__}: {error}")
            return
        for lease, original in zip(leases, originals):
            try:
                await self._put(lease, original, partial(self._end, then, lease), is_dead=is_dead)
            except Exception as error:  # noqa: BLE001 - as above
                self._end(then, lease, f"{type(error).__name__}: {error}")

    async def _put(self, lease: Lease, original: Message | None, then: Callable[[str], None], *, is_dead: bool) -> None:
        if original is None or Identity.of(original) != Identity.of(lease.message):
            then("")  # it was deleted
            return
        group = lease.share.group
        config = self._names.group(group) or SubscriptionGroup(group)
        first = original.properties.get(PROPERTY_FIRST_POP_TIME, str(lease.pop_time_ms))
        original = replace(original, raw_properties=encode_properties(original.properties | {PROPERTY_FIRST_POP_TIME: first}))
        back = sent_back(original, group, delay_level=-1 if is_dead else 0, deliver_at_ms=None if is_dead else 0,
                         max_reconsume_times=config.retry_max_times, retry_queue_nums=max(1, config.retry_queue_nums))
        await self._give_back(original, back, self._report, then)

    def _end(self, then: Callable[[Lease, str], None], lease: Lease, fault: str) -> None:
        if fault and self._blocked_by != fault:
            self._blocked_by = fault
            self._report(f"messages of {lease.share.group} can neither be delivered again nor be dead letters now, and wait: {fault}")
        then(lease, fault)


class Pops:
    """Serves all pops of the gateway. Used in the loop's thread."""

    def __init__(self, reader: LiveStoreReader, names: Names, offsets: GroupOffsets, pulls: Pulls, give_back: GiveBack,
                 executor: TurnExecutor, report: Callable[[str], None]) -> None:
        """`give_back` is Sends.give_back; `report` gets sentences for the log."""
        self._reader = reader
        self._names = names
        self._positions = pulls.positions
        self._pulls = pulls
        self._executor = executor
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = LeaseEnds()
        self._retries = RetryPuts(reader, names, give_back, executor, report)
        self._held = HeldPops(pulls.arrivals, self._take, self._has_news)
        self.closed = self._held.closed
        shares = self.shares = Shares(reader, names, offsets, pulls.positions, executor, self._end_leases, lambda: self._held.groups)
        offsets.collect = shares.collect
        offsets.when_rewritten.append(shares.forget)
        pulls.why_not = offsets.why_not = shares.why_not
        self.handlers: Handlers = {
            codes.POP_MESSAGE: self.pop,
            codes.NOTIFICATION: self.pop,
            codes.ACK_MESSAGE: self.ack,
            codes.BATCH_ACK_MESSAGE: self.ack_batch,
            codes.CHANGE_MESSAGE_INVISIBLETIME: self.change_invisible,
            codes.MAKE_DEAD_LETTER: self.make_dead_letter,
        }

    # ---- a pop --------------------------------------------------------------------

    async def pop(self, request: Request) -> Answer | None:
        """Take messages, at once or when they come; or answer that some have come."""
        asked = await self._asked(request)
        if isinstance(asked, Answer):
            return asked
        answer = await self._take(asked)
        return self._held.hold(asked) if answer is None else answer

    async def _asked(self, request: Request) -> Asked | Answer:
        group, name, queue_id = request.text("consumerGroup"), request.text("topic"), max(-1, request.integer("queueId"))
        is_pop = request.frame.code == codes.POP_MESSAGE
        most = request.integer("maxMsgNums") if is_pop else 0
        if fault := group_fault(group):
            return Answer(codes.SYSTEM_ERROR, fault)
        if not (not is_pop or 1 <= most <= MESSAGES_MAX):
            return Answer(codes.INVALID_PARAMETER, f"a pop of {most} messages: 1 to {MESSAGES_MAX} are possible")
        topic = self._names.recent_topic(name)
        if topic is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please! {codes.FAQ}")
        if not topic.perm & PERM_READ:
            return Answer(codes.NO_PERMISSION, f"the topic[{name}] peeking message is forbidden")
        if queue_id >= topic.read_queue_nums:
            return Answer(codes.INVALID_PARAMETER, f"queueId[{queue_id}] is illegal, topic:[{name}] topicConfig.readQueueNums:"
                                                   f"[{topic.read_queue_nums}] consumer:[{request.connection.address}]")
        config = await self._names.group_or_new(group)
        if config is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist, {codes.FAQ}")
        if why := self._why_no_pop(group, name, config):
            return Answer(codes.NO_PERMISSION, why)
        wanted = _filter(request, name) if is_pop else Wanted()
        if isinstance(wanted, Answer):
            return wanted
        invisible_ms = min(request.integer("invisibleTime", bits=64), INVISIBLE_MS_MAX) if is_pop else 0
        if is_pop and invisible_ms <= 0:
            return Answer(codes.INVALID_PARAMETER, f"messages that are invisible for {invisible_ms} ms: give 1 or more")
        poll_ms = max(0, min(request.integer("pollTime", 0, bits=64), POLL_MS_MAX))
        return Asked(request, group, name, queue_id, most, invisible_ms, time.monotonic() + poll_ms / 1000, wanted,
                     request.integer("initMode", 0) != 0, request.flag("order"), request.flag("autoRenew"),
                     request.frame.fields.get("attemptId", ""))

    def _why_no_pop(self, group: str, topic: str, config: SubscriptionGroup) -> str:
        if not config.consume_enable:
            return f"subscription group no permission, {group}"
        if why := self._names.why_no_commit:
            return f"messages are popped from a master: {why}"
        if group.startswith(OWN_GROUP_PREFIXES):
            return f"the offsets of the group {group} are not a client's"
        if topic.startswith(RETRY_PREFIX):
            return "messages of a retry topic come with pops of the topics that they came from"
        if self._pulls.is_pulling(group):
            return (f"the group {group} is consumed by pulls, so its messages cannot be popped: stop its pulling consumers, or give "
                    "this one a group of its own")
        return ""

    async def _take(self, asked: Asked) -> Answer | None:
        """Take messages for a pop; None if there are none."""
        topics = [asked.topic]
        retry = RETRY_PREFIX + asked.group
        if not asked.is_ordered and retry in self._names.recent_topics():
            topics.append(retry)
        shares = [await self.shares.get(asked, topic) for topic in topics]
        if asked.is_notification:
            return Answer(fields={"hasMsg": "true", "pollingFull": "false"}) if self._has_news(asked) else None
        if self.shares.in_flight >= ALL_IN_FLIGHT_MAX:
            return None
        shares[0].turn += 1
        if shares[0].turn % 2:  # otherwise many retries or many new messages would keep the others waiting
            shares.reverse()
        taken: list[Taken] = []
        try:
            for share in shares:
                async with share.lock:
                    await self._take_from(share, asked, taken)
            if not taken:
                return None
            if not asked.request.is_open:
                raise ConnectionResetError
            return self._leased(asked, taken)
        except BaseException as error:
            for each in taken:
                each.queue.flight.take_back([each.message])
            if isinstance(error, ConnectionResetError):
                return Answer()  # nobody gets it
            raise

    async def _take_from(self, share: Share, asked: Asked, taken: list[Taken]) -> None:
        """Take messages of one topic, a queue after the other from another one each time."""
        only = asked.queue_id if share.topic == asked.topic else -1
        queues = [queue for queue in share.queues.values() if only in (-1, queue.queue_id)]
        first = share.turn % len(queues) if queues else 0
        for queue in queues[first:] + queues[:first]:
            if _is_full(asked, taken):
                return
            if share.queues.get(queue.queue_id) is not queue:
                continue
            if not share.session.holds(queue.grant):  # a reset, or a program of this host
                self.shares.drop(share, queue)
                continue
            before, began_s = len(taken), time.monotonic()
            await self._take_again(share, queue, asked, taken)
            while asked.topic in queue.aside and not _is_full(asked, taken) and await self._take_aside(share, queue, asked, taken):
                pass
            while not (_is_full(asked, taken) or asked.is_ordered and queue.flight.open):
                if not await self._take_next(share, queue, asked, taken) or time.monotonic() - began_s >= READ_SLICE_S:
                    break
            if len(taken) > before:
                queue.attempt_id = asked.attempt_id

    async def _take_again(self, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken]) -> None:
        """Take messages that were delivered before."""
        flight, first = queue.flight, len(taken)
        if asked.is_ordered:
            if asked.attempt_id and asked.attempt_id == queue.attempt_id:
                for lease in sorted(queue.leases.values(), key=lambda each: each.offset, reverse=True):
                    self._end_in_place(lease, is_counted=False)
            if queue.is_blocked:
                return
            flight.again = dict.fromkeys(sorted(flight.again))
        while flight.again and not _is_full(asked, taken):
            for message in flight.deliver_again(1, self._deliveries_max(asked)):
                self._take_if_meant(message, share, queue, asked, taken)
        again = taken[first:]
        read = partial(self._records, [each.message for each in again])
        is_near = all(self._positions.is_near_log_end(each.message.physical_offset) for each in again)
        for each, record in zip(again, read() if is_near else await self._executor.run(read)):
            each.record = record
            if not record:  # it was deleted
                taken.remove(each)
                queue.acknowledge(each.message)
        self._bury(share, queue)

    async def _take_aside(self, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken]) -> bool:
        """Take messages that wait for pops of this topic; return whether there may be more."""
        start, end = queue.aside[asked.topic][:2]
        most = min(asked.most - len(taken), queue.room, end - start)
        if most <= 0:
            return False
        found, records = await self._executor.run(self._read, share.topic, queue.queue_id, start, most, Wanted())
        end = min(end, found.next_begin_offset)
        if end <= start or asked.topic not in queue.aside or queue.aside[asked.topic][0] != start:
            return False
        placed = [(_without_body(message, share.topic), record) for message, record in zip(found._placed(queue.queue_id), records)
                  if start <= message.queue_offset < end]
        queue.bring_back(asked.topic, end, [message for message, _ in placed])
        for message, record in placed:
            self._take_if_meant(message, share, queue, asked, taken, record)
        return True

    async def _take_next(self, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken]) -> bool:
        """Take the next messages of a queue; return whether there may be more."""
        most = min(asked.most - len(taken), queue.room_for_next)
        if most <= 0:
            return False
        topic, position = share.topic, queue.position
        wanted = asked.wanted if topic == asked.topic else Wanted()
        if queue.flight.last is not None and queue.last is None \
                and not await self._executor.run(queue.know_same_history, self._reader, topic):
            return False
        read = partial(self._read, topic, queue.queue_id, position, most, wanted)
        is_near = queue.last is not None and wanted.condition is None and self._positions.is_near_log_end(queue.last.physical_offset)
        if not is_near and self._end_of(topic, queue.queue_id, self._dispatched()) == position:
            return False
        found, records = read() if is_near else await self._executor.run(read)
        if found.status in _NOTHING_YET:
            if found.status is GetStatus.OFFSET_OVERFLOW_BADLY and position > (end := self._reader.queue_end(topic, queue.queue_id)):
                self._end_leases(queue)
                queue.seek(end)
            return False
        queue.position, queue.end = found.next_begin_offset, found.max_offset
        messages = [_without_body(message, topic) for message in queue.flight.unacknowledged(found._placed(queue.queue_id))]
        if messages:
            queue.last = messages[-1]
            numbers = {offset: number for number, offset in enumerate(found.queue_offsets)}
            for message in queue.flight.deliver(messages, self._deliveries_max(asked)):
                self._take_if_meant(message, share, queue, asked, taken, records[numbers[message.queue_offset]])
            self._bury(share, queue)
        queue.settle()
        return found.next_begin_offset < found.max_offset

    def _take_if_meant(self, message: Message, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken],
                       record: bytes = b"") -> None:
        """Take an open message if it is for this pop; a retry of another topic waits for the pops of that."""
        source = asked.topic if share.topic == asked.topic else message.properties.get(PROPERTY_RETRY_TOPIC, asked.topic)
        if source == asked.topic:
            taken.append(Taken(queue, share, message, record))
        else:
            queue.set_aside(message, source)

    def _read(self, topic: str, queue_id: int, offset: int, most: int, wanted: Wanted) -> tuple[GetResult, list[bytes]]:
        """Read messages and their records, in a thread if they may be on the disk."""
        found = self._reader._fetch(topic, queue_id, offset, most, wanted, LEVEL)
        return found, self._records(found.messages)

    def _records(self, messages: Iterable[Message]) -> list[bytes]:
        return [self._positions.record(message) for message in messages]

    def _deliveries_max(self, asked: Asked) -> int | None:
        """Return how often a message is delivered in place; None for those that have retries."""
        if not asked.is_ordered:
            return None
        return (self._names.group(asked.group) or SubscriptionGroup(asked.group)).retry_max_times + 1

    def _leased(self, asked: Asked, taken: list[Taken]) -> Answer:
        """Give these messages to the client; return the answer."""
        now_s = time.monotonic()
        pop_ms = max(time.time_ns() // 1_000_000, *(each.queue.ended_ms + 1 for each in taken))
        owner = asked.request.connection if asked.is_kept else None
        by_queue: dict[tuple[int, int], list[int]] = {}
        for each in taken:
            lease = Lease(each.share, each.queue, each.message, pop_ms, asked.invisible_ms / 1000, asked.is_ordered, owner, now_s)
            each.queue.leases[lease.offset] = lease
            self._ends.plan(lease, now_s + lease.invisible_s)
            by_queue.setdefault((int(each.share.topic != asked.topic), each.queue.queue_id), []).append(lease.offset)
        self.shares.in_flight += len(taken)
        for share in {each.share.topic: each.share for each in taken}.values():
            self._pulls.count_gets(share.topic, asked.group, sum(each.share is share for each in taken))
        fields = _pop_fields(pop_ms, asked)
        fields["startOffsetInfo"] = ";".join(f"{retry} {queue_id} {min(offsets)}" for (retry, queue_id), offsets in by_queue.items())
        fields["msgOffsetInfo"] = ";".join(
            f"{retry} {queue_id} {','.join(map(str, sorted(offsets)))}" for (retry, queue_id), offsets in by_queue.items())
        if asked.is_ordered:
            fields["orderCountInfo"] = ";".join(
                f"0 qo{each.queue.queue_id}%{each.message.queue_offset} {each.message.delivery_count - 1}" for each in taken
                if each.message.delivery_count > 1)
        rest = sum(max(0, queue.end - queue.position) for queue in {id(each.queue): each.queue for each in taken}.values())
        return Answer(remark="FOUND", fields={**fields, "restNum": str(rest)}, body=b"".join(each.record for each in taken))

    def _has_news(self, asked: Asked) -> bool:
        shares, limit = self.shares.of_group(asked.group), self._dispatched()
        topics = [asked.topic] if asked.is_ordered else [asked.topic, RETRY_PREFIX + asked.group]
        for topic in topics:
            share = shares.get(topic)
            if share is None and (topic == asked.topic or topic in self._names.recent_topics()):
                return True  # a take opens it
            for queue in () if share is None else share.queues.values():
                if topic == asked.topic and asked.queue_id not in (-1, queue.queue_id):
                    continue
                if queue.may_have(asked.topic, self._end_of(topic, queue.queue_id, limit), is_ordered=asked.is_ordered):
                    return True
        return False

    def _dispatched(self) -> int:
        try:
            return self._reader.dispatched_offset(LEVEL)
        except (EngineError, OSError):
            return 0  # the store is being recovered: there is nothing new

    def _end_of(self, topic: str, queue_id: int, limit: int) -> int:
        """Return the end of a queue for clients, who see the log up to `limit`."""
        try:
            queue = self._reader._queue(topic, queue_id)
            return 0 if queue is None else queue.max_offset(limit)
        except (EngineError, OSError):
            return 0

    # ---- ends of leases -----------------------------------------------------------

    def ack(self, request: Request) -> Answer:
        """End a message, if its handle is valid."""
        found = self._leased_by(request)
        if isinstance(found, Answer):
            return found
        self._acknowledge(found)
        return Answer()

    def ack_batch(self, request: Request) -> Answer:
        """End messages of several queues. As in RocketMQ the answer does not say which of their handles were not valid."""
        acks = read_object(request.frame.body).get("acks")
        if not isinstance(acks, list) or not 0 < len(acks) <= ACKS_MAX:
            return Answer(codes.NO_MESSAGE, f"a batch of 1 to {ACKS_MAX} acknowledgements was expected")
        if why := self._names.why_no_commit:
            return Answer(codes.NO_MESSAGE, why)
        number = 0
        for each in map(as_object, acks):
            group, topic = _named(each, "c", "consumerGroup", str), _named(each, "t", "topic", str)
            if refused := request.refusal(topic, SUB) or request.refusal(RETRY_PREFIX + group, SUB):
                return refused
            source = topic if _named(each, "r", "retry", str) == "0" else RETRY_PREFIX + group
            start, queue_id = _named(each, "so", "startOffset", int), _named(each, "q", "queueId", int)
            pop_ms = _named(each, "pt", "popTime", int)
            for bit in _bits(each.get("b", each.get("bitSet"))):
                if (number := number + 1) > ACKED_MAX:
                    raise WireError(f"a batch of more than {ACKED_MAX} messages: the first ones are acknowledged, send the rest again")
                found = self._find(group, source, queue_id, start + bit, pop_ms)
                if isinstance(found, Lease):
                    if refused := _refusal(request, found, topic):
                        return refused
                    self._acknowledge(found)
        return Answer()

    def change_invisible(self, request: Request) -> Answer:
        """Let a message come back after another time from now on; its handle is another one then."""
        lease, words = self._leased_by(request), request.text("extraInfo").split(" ")
        invisible_ms = max(0, min(request.integer("invisibleTime", bits=64), INVISIBLE_MS_MAX))
        if isinstance(lease, Answer):
            if lease.code == codes.SUCCESS:
                lease.fields = {"popTime": words[1], "invisibleTime": words[2], "reviveQid": words[3], "extraInfo": " ".join(words)}
            return lease
        lease.pop_time_ms = max(time.time_ns() // 1_000_000, lease.pop_time_ms + 1)
        lease.invisible_s, lease.owner = invisible_ms / 1000, None
        self._ends.plan(lease, time.monotonic() + lease.invisible_s)
        return Answer(fields={
            "popTime": str(lease.pop_time_ms), "invisibleTime": str(invisible_ms), "reviveQid": words[3],
            "extraInfo": " ".join([words[0], str(lease.pop_time_ms), str(invisible_ms), *words[3:]])})

    async def make_dead_letter(self, request: Request) -> Answer:
        """Put a message into its group's dead letters, then end it, if its handle is valid."""
        lease = self._leased_by(request)
        if isinstance(lease, Answer):  # of another handle nothing is put; Java's client would ask for ever until it is told SUCCESS
            return Answer() if lease.code in (codes.SUCCESS, codes.NO_MESSAGE) else lease
        faults: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def then(lease: Lease, fault: str) -> None:
            self._after_retry(lease, fault)
            if not faults.done():
                faults.set_result(fault)

        self._end(lease)
        self._begin(self._retries.put([lease], then, is_dead=True))
        fault = await faults
        return Answer(codes.SYSTEM_ERROR, fault) if fault else Answer()

    def _leased_by(self, request: Request) -> Lease | Answer:
        """Return the lease of a request with a handle. Else the answer: as by RocketMQ's broker that of an old handle is SUCCESS, and
        nothing has changed."""
        group, topic = request.text("consumerGroup"), request.text("topic")
        queue_id, offset = request.integer("queueId"), request.integer("offset", bits=64)
        words = request.text("extraInfo").split(" ")
        if len(words) < 7 or not all(map(is_number, words[1:3])):
            raise WireError("a handle that is not POP_CK's text")
        if why := self._names.why_no_commit:  # the next tick forgets the leases
            return Answer(codes.NO_MESSAGE, why)
        source = topic if words[4] == "0" else RETRY_PREFIX + group
        found = self._find(group, source, queue_id, offset, int(words[1]))
        if isinstance(found, Lease):
            return _refusal(request, found, topic) or found
        if found:
            return Answer(codes.NO_MESSAGE, found)
        return Answer(remark=EXPIRED if time.time_ns() // 1_000_000 >= int(words[1]) + int(words[2]) else None)

    def _find(self, group: str, topic: str, queue_id: int, offset: int, pop_ms: int) -> Lease | str:
        """Return the lease with this time of its pop. Else why there is none; "" if the handle is old: the message is done, or was
        delivered again, or waits for that."""
        share = self.shares.find(group, topic)
        queue = None if share is None else share.queues.get(queue_id)
        if share is None or queue is None or offset >= queue.flight.delivered_end:
            return f"message {offset} of queue {queue_id} of {topic} is not in flight for {group}"
        lease = queue.leases.get(offset)
        if lease is not None and lease.pop_time_ms == pop_ms:
            return lease
        if pop_ms < share.opened_ms:
            return f"the handle of message {offset} of queue {queue_id} of {topic} is older than what is known of {group}: it comes again"
        return ""

    def _acknowledge(self, lease: Lease) -> None:
        self._end(lease)
        lease.queue.acknowledge(lease.message)
        lease.share.used_s = time.monotonic()
        if lease.is_ordered and not lease.queue.is_blocked:
            self._held.wake(lease.share.group, lease.share.topic)

    def _end(self, lease: Lease) -> None:
        """End a lease; its message is still open."""
        self._ends.leave_out(lease)
        del lease.queue.leases[lease.offset]

    def _end_in_place(self, lease: Lease, *, is_counted: bool) -> None:
        """End a lease; its message is delivered again before all that follow."""
        self._end(lease)
        queue = lease.queue
        queue.ended_ms = max(queue.ended_ms, lease.pop_time_ms)
        if is_counted:
            queue.flight.give_back(lease.message)
        else:
            queue.flight.take_back([lease.message])

    def _end_leases(self, queue: PopQueue) -> None:
        """End all leases of a queue that is another one from now on."""
        ended, queue.leases = queue.leases, {}
        self._begin(self._leave_out(ended.values()))

    async def _leave_out(self, ended: Iterable[Lease]) -> None:
        pieces = Pieces()
        for lease in ended:
            self._ends.leave_out(lease)
            await pieces.end()

    async def tick(self) -> None:
        """End the leases whose time is over."""
        if any(self.shares) and self._names.why_no_commit:  # others have these messages, of the master that has replaced this one
            self.shares.forget_all()
        now_s = time.monotonic()
        ended: list[Lease] = []
        while len(ended) < ENDS_OF_TICK and (due := self._ends.due(now_s, ENDS_OF_TICK)):
            for lease in due:
                if lease.queue.leases.get(lease.offset) is not lease:
                    continue
                if lease.owner is not None and not lease.owner.is_closed and now_s - lease.began_s < RENEWED_S_MAX:
                    self._ends.plan(lease, now_s + max(TICK_S, lease.invisible_s))
                elif lease.is_ordered:
                    self._end_in_place(lease, is_counted=True)
                    self._held.wake(lease.share.group, lease.share.topic)
                else:
                    self._end(lease)
                    ended.append(lease)
            await asyncio.sleep(0)
        if ended:
            await self._retries.put(ended, self._after_retry)

    def left(self, connection: Connection, group: str) -> None:
        """End the leases of a client that leaves its group, if its connection keeps them."""
        self._begin(self._free(connection, group))

    async def _free(self, connection: Connection, group: str) -> None:
        pieces = Pieces()
        for queue in [queue for share in self.shares.of_group(group).values() for queue in share.queues.values()]:
            for lease in [lease for lease in queue.leases.values() if lease.owner is connection]:
                lease.owner = None
                self._ends.plan(lease, 0.0)
            await pieces.end()

    def _after_retry(self, lease: Lease, fault: str) -> None:
        queue, offset = lease.queue, lease.offset
        queue.burying.discard(offset)
        if lease.share.queues.get(queue.queue_id) is not queue or offset not in queue.flight.open:
            return  # the group was reset
        if not fault:
            queue.acknowledge(lease.message)
            if lease.is_ordered:
                self._held.wake(lease.share.group, lease.share.topic)
            return
        queue.leases[offset] = lease
        self._ends.plan(lease, time.monotonic() + PUT_AGAIN_S)

    def _bury(self, share: Share, queue: PopQueue) -> None:
        """Put the messages of an ordered group that were delivered too often into its dead letters."""
        dead = [offset for offset in queue.flight.dead if offset not in queue.burying]
        if dead:
            queue.burying.update(dead)
            pop_ms = time.time_ns() // 1_000_000
            leases = [Lease(share, queue, queue.flight.open[offset], pop_ms, 0.0, is_ordered=True) for offset in dead]
            self._begin(self._retries.put(leases, self._after_retry, is_dead=True))

    async def close(self) -> None:
        """Release all queues, after the last flush of the offsets."""
        self._held.close()
        await self.shares.close()
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

class Assignments:
    """Tells the clients of a group which queues to take, and whether by pulls or by POP (RocketMQ: QueryAssignmentProcessor)."""

    def __init__(self, names: Names, members: Members, shares: Shares,
                 read_queues: Callable[[str], Awaitable[dict[str, int] | None]]) -> None:
        """`read_queues` returns how many queues of a topic each broker of the cluster has for readers, None if that is not known now."""
        self._names = names
        self._members = members
        self._shares = shares
        self._read_queues = read_queues
        self.handlers: Handlers = {codes.QUERY_ASSIGNMENT: self.query, codes.SET_MESSAGE_REQUEST_MODE: self.set_mode}

    async def set_mode(self, request: Request) -> Answer:
        """Set how a group consumes a topic; its clients follow when they balance next."""
        body = read_object(request.frame.body)
        topic, group, mode, share = body.get("topic"), body.get("consumerGroup"), body.get("mode"), body.get("popShareQueueNum", 0)
        if not isinstance(topic, str) or not isinstance(group, str) or mode not in (PULL, POP) or type(share) is not int:
            raise WireError(f"topic, consumerGroup, and a mode of {PULL} or {POP} were expected")
        if topic.startswith(RETRY_PREFIX):
            return Answer(codes.NO_PERMISSION, "retry topic is not allowed to set mode")
        if self._names.topic(topic) is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        if self._names.group(group) is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group does not exist")
        await self._names.set_request_mode(topic, group, {"consumerGroup": group, "mode": mode, "popShareQueueNum": share, "topic": topic})
        return Answer()

    async def query(self, request: Request) -> Answer:
        """Return a client's share of the cluster's queues; no list of shares where RocketMQ's client must keep what it has."""
        body = read_object(request.frame.body)
        topic, group, client_id = body.get("topic"), body.get("consumerGroup"), body.get("clientId")
        if not all(isinstance(each, str) for each in (topic, group, client_id)):
            raise WireError("topic, consumerGroup and clientId were expected")
        for name in (str(topic), f"{RETRY_PREFIX}{group}"):
            if refused := request.refusal(name, SUB):
                return refused
        found = await self._read_queues(str(topic))
        known = [(name, queue_id) for name, number in sorted((found or {}).items()) for queue_id in range(number)]
        mode, queues = self._assigned(str(topic), str(group), str(client_id), known, body)
        rows = None if queues is None else [
            {"messageQueue": {"brokerName": name, "queueId": queue_id, "topic": topic}, "mode": mode} for name, queue_id in queues]
        return Answer(body=write_json({"messageQueueAssignments": rows}))

    def _assigned(self, topic: str, group: str, client_id: str, queues: list[tuple[str, int]], body: Mapping[str, object]
                  ) -> tuple[str, list[tuple[str, int]] | None]:
        modes = self._names.request_modes()
        if topic.startswith(RETRY_PREFIX) and (self._shares.pops(group) or any(
                row.get(group, {}).get("mode") == POP for row in modes.values())):
            return PULL, []  # pops of the group's topics have its retries
        if not queues:
            return PULL, None
        if body.get("messageModel") == BROADCASTING:
            return PULL, queues
        row = modes.get(topic, {}).get(group, {})
        members = self._members.consumers.get(group)
        if members is None:
            return PULL, None
        clients = sorted(members.client_ids)
        at = clients.index(client_id) if client_id in clients else -1
        if row.get("mode") == POP:
            more = int(row.get("popShareQueueNum", 0))
            if not 0 < more < len(clients) - 1 or at < 0:
                return POP, [(name, -1) for name in dict(queues)]
            if len(clients) > len(queues):
                return POP, [queues[at % len(queues)]]
            shares = [self._share(queues, len(clients), (at + each) % len(clients)) for each in range(more + 1)]
            return POP, sorted({queue for share in shares for queue in share})
        if body.get("strategyName") == "AVG":
            return PULL, self._share(queues, len(clients), at)
        if body.get("strategyName") == "AVG_BY_CIRCLE":
            return PULL, queues[at::len(clients)] if at >= 0 else []
        return PULL, None


    def _share(self, queues: list[tuple[str, int]], clients: int, at: int) -> list[tuple[str, int]]:
        return [queues[index] for index in allocate_averagely(range(len(queues)), range(clients), at)]


PULL, POP = "PULL", "POP"
_NOTHING_YET = frozenset((GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.NO_MESSAGE_IN_QUEUE))


def _is_full(asked: Asked, taken: list[Taken]) -> bool:
    """Whether a pop has all that its answer may have."""
    return len(taken) >= asked.most or sum(each.message.size_bytes for each in taken) >= POP_BYTES


def _without_body(message: Message, topic: str) -> Message:
    """Return what is kept of a message in flight."""
    source = message.properties.get(PROPERTY_RETRY_TOPIC) if topic.startswith(RETRY_PREFIX) else None
    return Message(topic, b"", message.queue_id, message.queue_offset, message.physical_offset, message.size_bytes,
                   "" if source is None else encode_properties({PROPERTY_RETRY_TOPIC: source}),
                   store_timestamp_ms=message.store_timestamp_ms, reconsume_times=message.reconsume_times, body_crc=message.body_crc)


def _filter(request: Request, topic: str) -> Wanted | Answer:
    """Return the filter of a pop."""
    text, kind = request.frame.fields.get("exp"), request.frame.fields.get("expType")
    if len(text or "") > SUBSCRIPTION_CHARS_MAX:
        return Answer(codes.SUBSCRIPTION_PARSE_FAILED, f"a subscription of more than {SUBSCRIPTION_CHARS_MAX} characters")
    if fault := expression_fault(kind, text):
        return fault
    try:
        found = subscription_of(topic, text, 0, kind)
    except WireError:
        return Answer(codes.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed")
    return Wanted.of(found.tag_filter, found.condition)


def _refusal(request: Request, lease: Lease, topic: str) -> Answer | None:
    """Return why a client may not end a lease: it has no right for the topic from which a retry came, which the handle need not tell."""
    source = lease.message.properties.get(PROPERTY_RETRY_TOPIC, topic) if lease.share.topic.startswith(RETRY_PREFIX) else topic
    return request.refusal(source, SUB) if source != topic else None


def _pop_fields(pop_ms: int, asked: Asked) -> dict[str, str]:
    return {"popTime": str(pop_ms), "invisibleTime": str(asked.invisible_ms), "reviveQid": str(ORDERED_QUEUE if asked.is_ordered else 0)}


def _nothing(asked: Asked, *, is_full: bool = False) -> Answer:
    """Return the answer to a pop that found nothing."""
    if asked.is_notification:
        return Answer(fields={"hasMsg": "false", "pollingFull": str(is_full).lower()})
    return Answer(codes.POLLING_FULL if is_full else codes.POLLING_TIMEOUT, GetStatus.NO_MESSAGE_IN_QUEUE.name,
                  _pop_fields(time.time_ns() // 1_000_000, asked) | {"restNum": "0"})


Kind = TypeVar("Kind", str, int)


def _named(fields: Mapping[str, object], short: str, long: str, kind: type[Kind]) -> Kind:
    """Return a field of one acknowledgement in a batch; WireError without it."""
    value = fields.get(short, fields.get(long))
    if type(value) is not kind or kind is int and not 0 <= int(value) <= INT64_MAX:
        raise WireError(f"an acknowledgement without its field {long}")
    return value


def _bits(value: object) -> Iterator[int]:
    """Yield the numbers of the bits of a Java BitSet, as its bytes in base64 or in a list."""
    try:
        if isinstance(value, str):
            data = base64.b64decode(value, validate=True)
        elif isinstance(value, list):
            data = bytes(each & 0xFF for each in value)
        else:
            raise ValueError
    except (ValueError, TypeError, binascii.Error):
        raise WireError("an acknowledgement whose bits cannot be read") from None
    left = int.from_bytes(data[:BITS_MAX // 8], "little")
    while left:
        lowest = left & -left
        yield lowest.bit_length() - 1
        left ^= lowest
