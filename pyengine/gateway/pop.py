"""POP: messages that the clients of a group take from any queue, each for a time, and acknowledge in any order.

    pops = Pops(reader, names, positions, offsets, pulls, give_back, executor)   # serves RocketMQ 5's requests, all in the loop's thread
    await pops.tick()                                  # ends what was not acknowledged in its time

A message that was taken has a Lease. Its handle, RocketMQ's POP_CK, names queue, offset and the time of the pop; that of an ended lease
changes nothing. A lease that ends without an acknowledgement puts the message into the retry topic, or at last into the dead letters
(retries.sent_back); in an ordered group it stays where it is.
RocketMQ: PopMessageProcessor, AckMessageProcessor, ChangeInvisibleTimeProcessor, NotificationProcessor, ConsumerOrderInfoManager.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from pyengine.arguments import INT64_MAX
from pyengine.client.outgoing import raw_of
from pyengine.client.retries import SentBack, sent_back
from pyengine.errors import EngineError
from pyengine.formats.constants import PROPERTY_FIRST_POP_TIME, PROPERTY_RETRY_TOPIC
from pyengine.formats.record import Message, encode_properties
from pyengine.gateway import codes
from pyengine.gateway.acl_file import SUB
from pyengine.gateway.connections import Answer, Connection, Handlers, Request, RequestRefusedError, TurnExecutor, refuse_if
from pyengine.gateway.members import TAG, asked_subscription, check_expression
from pyengine.gateway.names import OWN_GROUP_PREFIXES, RETRY_PREFIX, Names, group_fault
from pyengine.gateway.pop_shares import GATHERED, TICK_S, Lease, PopQueue, Share, Shares
from pyengine.gateway.positions import LEVEL, GroupOffsets
from pyengine.gateway.pulls import Arrivals, Pulls
from pyengine.gateway.tasks import Pending, Tasks
from pyengine.gateway.wire import WireError, as_object, is_number, read_object
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.results import GetResult, GetStatus
from pyengine.storage.acknowledgements import Identity
from pyengine.storage.config_table import PERM_READ, SubscriptionGroup, TopicConfig
from pyengine.storage.message_getter import SHORT_CHARS, Wanted

MESSAGES_MAX = 32            # of one pop, as in RocketMQ
POP_BYTES = 4 << 20          # a pop ends with the message that reaches this size
ALL_IN_FLIGHT_MAX = 500_000  # of all groups: about 400 MB
HELD_MAX = 10_000            # pops of all clients; one address can have half of them
POLL_MS_MAX = 120_000
INVISIBLE_MS_MAX = 43_200_000
RENEWED_S_MAX = 10_800.0     # of a message that its connection keeps
ENDS_OF_TICK = 1000          # leases, in one piece of the loop's time
PUT_AGAIN_S = 1.0            # after a retry that could not be put
READ_SLICE_S = 0.02          # of one pop that finds only messages that its filter excludes
ORDERED_QUEUE = 999          # reviveQid of an ordered pop (KeyBuilder.POP_ORDER_REVIVE_QUEUE)
ACKS_MAX = 4096              # in one batch
BITS_MAX = 8192              # of one of them
ACKED_MAX = 10_000           # messages of one batch: all of them are one piece of the loop's time
EXPIRED = "receipt handle is expired"  # remark of an answer that changes nothing, of which RocketMQ's proxy makes an error


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
    is_from_last: bool = False
    is_ordered: bool = False
    is_kept: bool = False
    attempt_id: str = ""

    @property
    def is_notification(self) -> bool:
        return self.most == 0

    @property
    def host(self) -> str:
        return self.request.connection.host

    @property
    def kind(self) -> tuple[object, ...]:
        """What pops have in common that find the same."""
        return self.queue_id, self.is_ordered, self.is_notification, *_expression(self.request)


@dataclass(slots=True)
class Taken:
    """A message that a pop takes, and its record as it is in the log."""

    queue: PopQueue
    share: Share
    message: Message
    record: bytes = b""


GiveBack = Callable[[Message, SentBack, Callable[[str], None]], Awaitable[str]]  # Sends.give_back


class HeldPops:
    """Pops that wait until messages come for them, or their time is over."""

    def __init__(self, arrivals: Arrivals, take: Callable[[Asked], Awaitable[Answer | None]], has_news: Callable[[Asked], bool]) -> None:
        self._arrivals = arrivals
        self._take = take
        self._has_news = has_news
        self._held: dict[tuple[str, str], dict[Request, Asked]] = {}  # by group and topic
        self._of_host: Counter[str] = Counter()  # how many these are
        self._serving: Pending[tuple[str, str], asyncio.Task[None]] = Pending()
        arrivals.serve(self._check, lambda: bool(self._held))

    @property
    def groups(self) -> set[str]:
        return {group for group, _ in self._held}

    def hold(self, asked: Asked) -> Answer | None:
        """Answer a pop later; at once if it does not wait, or too many do."""
        if time.monotonic() >= asked.until_s:
            return _nothing(asked)
        if self._of_host.total() >= HELD_MAX or self._of_host[asked.host] >= HELD_MAX // 2:
            return _nothing(asked, is_full=True)
        if asked.request.is_open:
            self._held.setdefault((asked.group, asked.topic), {})[asked.request] = asked
            self._of_host[asked.host] += 1
            self._arrivals.stir()
            self._wake((asked.group, asked.topic), (asked,))  # for what has come after the look
        return None

    def cancel(self, request: Request) -> None:
        """Answer a pop for which no client waits, held or not: it takes nothing more."""
        key = request.text("consumerGroup"), request.text("topic")
        asked = self._held.get(key, {}).get(request)
        if asked is None:
            request.reply(Answer(codes.POLLING_TIMEOUT))
        else:
            self._end(asked, _nothing(asked))

    def wake(self, group: str, topic: str) -> None:
        """Have the pops of a group's topic served if messages may have come for them."""
        held = self._held.get((group, topic), {}).values()
        self._wake((group, topic), {(asked.queue_id, asked.is_ordered): asked for asked in held}.values())

    def _wake(self, key: tuple[str, str], some: Iterable[Asked]) -> None:
        if key not in self._serving and any(map(self._has_news, some)):
            self._serving.once(key, lambda: asyncio.get_running_loop().create_task(self._serve(key)))

    def close(self) -> None:
        for task in self._serving.values():
            task.cancel()

    def _end(self, asked: Asked, answer: Answer) -> None:
        key = asked.group, asked.topic
        if self._held.get(key, {}).pop(asked.request, None) is not None:
            if not self._held[key]:
                del self._held[key]
            self._of_host -= Counter((asked.host,))
            asked.request.reply(answer)

    def _check(self) -> Iterator[None]:
        """Answer the pops whose time or connection is over, and look for messages for the others, a group's topic at a time."""
        now_s = time.monotonic()
        for key in list(self._held):
            yield
            for asked in [asked for asked in self._held.get(key, {}).values() if now_s >= asked.until_s or not asked.request.is_open]:
                self._end(asked, _nothing(asked))
            self.wake(*key)

    async def _serve(self, key: tuple[str, str]) -> None:
        """Answer pops of a group's topic with what has come, the oldest first."""
        without: set[tuple[object, ...]] = set()
        for asked in list(self._held.get(key, {}).values()):
            if asked.kind in without or not asked.request.is_open or asked.request not in self._held.get(key, {}):
                continue
            try:
                answer = await self._take(asked)
            except Exception as error:  # noqa: BLE001 - the others' pops are answered all the same
                answer = asked.request.failure(error)
            await asyncio.sleep(0)
            if answer is None:
                without.add(asked.kind)
                continue
            self._end(asked, answer)


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

    async def put(self, leases: list[Lease], then: Callable[[Lease, str], None], *, is_dead: bool = False, is_same: bool = False) -> None:
        """Put the messages of these leases, with `is_same` unchanged into their own queues; `then` gets each one, and why it could not
        be put, "" if it is, or was deleted. Messages of POP_BYTES are put before the next ones are read."""
        rest = iter(leases)
        while piece := _of_size(rest):
            await self._put_piece(piece, then, is_dead=is_dead, is_same=is_same)

    async def _put_piece(self, leases: list[Lease], then: Callable[[Lease, str], None], *, is_dead: bool, is_same: bool) -> None:
        offsets = [lease.message.physical_offset for lease in leases]
        faults: Sequence[str | BaseException]
        try:
            originals = await self._executor.run(lambda: [self._reader.message_at(offset, LEVEL) for offset in offsets])
            faults = await asyncio.gather(*(self._put(lease, original, is_dead=is_dead, is_same=is_same)
                                            for lease, original in zip(leases, originals)), return_exceptions=True)
        except Exception as error:  # noqa: BLE001 - the store is recovered, say: no message may be forgotten
            faults = [error] * len(leases)
        for lease, found in zip(leases, faults):
            fault = found if isinstance(found, str) else f"{type(found).__name__}: {found}"
            if fault and self._blocked_by != fault:
                self._blocked_by = fault
                self._report(f"messages of {lease.share.group} can neither be delivered again nor be dead letters now, and wait: {fault}")
            then(lease, fault)

    async def _put(self, lease: Lease, original: Message | None, *, is_dead: bool, is_same: bool) -> str:
        if original is None or Identity.of(original) != Identity.of(lease.message):
            return ""  # it was deleted
        if is_same:
            raw = replace(raw_of(original, original.properties), queue_id=lease.queue.queue_id)
            return await self._give_back(original, SentBack(TopicConfig(original.topic), raw), self._report)
        group = lease.share.group
        config = self._names.group(group) or SubscriptionGroup(group)
        first = original.properties.get(PROPERTY_FIRST_POP_TIME, str(lease.pop_time_ms))
        original = replace(original, raw_properties=encode_properties(original.properties | {PROPERTY_FIRST_POP_TIME: first}))
        back = sent_back(original, group, delay_level=-1 if is_dead else 0, deliver_at_ms=None if is_dead else 0,
                         max_reconsume_times=config.retry_max_times, retry_queue_nums=max(1, config.retry_queue_nums))
        return await self._give_back(original, back, self._report)


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
        self._tasks = Tasks()
        self._putting: asyncio.Task[None] | None = None  # what ticks have ended: no more is read until it is put
        self._retries = RetryPuts(reader, names, give_back, executor, report)
        self._report = report
        self._held = HeldPops(pulls.arrivals, self._take, self._has_news)
        shares = self.shares = Shares(reader, names, offsets, pulls.positions, executor, lambda: self._held.groups)
        offsets.collect = shares.collect
        offsets.when_rewritten.append(shares.forget)
        pulls.why_not = offsets.why_popped = shares.why_not
        self.handlers: Handlers = {
            codes.POP_MESSAGE: self.pop,
            codes.NOTIFICATION: self.pop,
            codes.ACK_MESSAGE: self.ack,
            codes.BATCH_ACK_MESSAGE: self.ack_batch,
            codes.CHANGE_MESSAGE_INVISIBLETIME: self.change_invisible,
            codes.MAKE_DEAD_LETTER: self.make_dead_letter,
        }
        self.worker_handlers: Handlers = {codes.GIVE_BACK: self.give_back, codes.CANCEL_POP: self.cancel}
        self._numbered: WeakValueDictionary[tuple[Connection, str], Request] = WeakValueDictionary()  # pops that may be cancelled

    # ---- a pop --------------------------------------------------------------------

    def pop(self, request: Request) -> Coroutine[object, object, Answer | None]:
        if number := request.frame.fields.get("number"):
            self._numbered[request.connection, number] = request
        return self._pop(request)

    def cancel(self, request: Request) -> Answer:
        if (found := self._numbered.get((request.connection, request.text("number")))) is not None:
            self._held.cancel(found)
        return Answer()

    async def _pop(self, request: Request) -> Answer | None:
        asked = await self._asked(request)
        answer = await self._take(asked)
        return self._held.hold(asked) if answer is None else answer

    async def _asked(self, request: Request) -> Asked:
        group, name, queue_id = request.text("consumerGroup"), request.text("topic"), max(-1, request.integer("queueId"))
        is_pop = request.frame.code == codes.POP_MESSAGE
        most = request.integer("maxMsgNums") if is_pop else 0
        refuse_if(group_fault(group))
        if not (not is_pop or 1 <= most <= MESSAGES_MAX):
            raise RequestRefusedError(codes.INVALID_PARAMETER, f"a pop of {most} messages: 1 to {MESSAGES_MAX} are possible")
        topic = self._names.recent_topic(name)
        if topic is None:
            raise RequestRefusedError(codes.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please! {codes.FAQ}")
        if not topic.perm & PERM_READ:
            raise RequestRefusedError(codes.NO_PERMISSION, f"the topic[{name}] peeking message is forbidden")
        if queue_id >= topic.read_queue_nums:
            raise RequestRefusedError(codes.INVALID_PARAMETER, f"queueId[{queue_id}] is illegal, topic:[{name}] topicConfig.readQueueNums:"
                                      f"[{topic.read_queue_nums}] consumer:[{request.connection.address}]")
        config = await self._names.group_or_new(group)
        if config is None:
            raise RequestRefusedError(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist, {codes.FAQ}")
        if is_pop and not _is_short(request):
            await self._executor.run(_filter, request, name)
        elif is_pop:
            _filter(request, name)
        refuse_if(self._why_no_pop(group, name, config), codes.NO_PERMISSION)
        invisible_ms = min(request.integer("invisibleTime", bits=64), INVISIBLE_MS_MAX) if is_pop else 0
        if is_pop and invisible_ms <= 0:
            raise RequestRefusedError(codes.INVALID_PARAMETER, f"messages that are invisible for {invisible_ms} ms: give 1 or more")
        poll_ms = max(0, min(request.integer("pollTime", 0, bits=64), POLL_MS_MAX))
        return Asked(request, group, name, queue_id, most, invisible_ms, time.monotonic() + poll_ms / 1000,
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
        """Answer a pop with messages, and return the answer; None if there are none."""
        topics = [asked.topic]
        retry = RETRY_PREFIX + asked.group
        if not asked.is_ordered and retry in self._names.recent_topics():
            topics.append(retry)
        shares = [await self.shares.get(asked.group, topic, is_from_last=asked.is_from_last) for topic in topics]
        if asked.is_notification:
            return Answer(fields={"hasMsg": "true", "pollingFull": "false"}) if self._has_news(asked) else None
        if self.shares.in_flight >= ALL_IN_FLIGHT_MAX:
            return None
        shares[0].is_second = not shares[0].is_second
        if shares[0].is_second:  # otherwise many retries or many new messages would keep the others waiting
            shares.reverse()
        taken: list[Taken] = []
        try:
            for share in shares:
                async with share.lock:
                    await self._take_from(share, asked, taken)
            taken = [each for each in taken if each.share.queues.get(each.queue.queue_id) is each.queue]  # but for a reset meanwhile
            if not taken:
                return None
            return self._lease(asked, taken)
        except BaseException as error:
            for each in reversed(taken):
                each.queue.flight.take_back([each.message])
            if isinstance(error, (ConnectionResetError, asyncio.CancelledError)):
                self._held.wake(asked.group, asked.topic)
            if isinstance(error, ConnectionResetError):
                return Answer()  # nobody gets it
            raise

    async def _take_from(self, share: Share, asked: Asked, taken: list[Taken]) -> None:
        """Take messages of one topic, a queue after the other from another one each time."""
        only = asked.queue_id if share.topic == asked.topic else -1
        queues = [queue for queue in share.queues.values() if only in (-1, queue.queue_id)]
        if not queues or _is_full(asked, taken):
            return
        share.turn += 1
        first = share.turn % len(queues)
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
            if queue.is_scattered:
                self.shares.scattered.append((share, queue))
            if len(taken) > before:
                queue.attempt_id = asked.attempt_id

    async def _take_again(self, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken]) -> None:
        flight, first = queue.flight, len(taken)
        if asked.is_ordered:
            if asked.attempt_id and asked.attempt_id == queue.attempt_id:
                for lease in sorted(queue.leases.values(), key=lambda each: each.offset, reverse=True):
                    self.shares.end_in_place(lease, is_counted=False)
            if queue.is_blocked:
                return
            flight.again = OrderedDict.fromkeys(sorted(flight.again))
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
        found, records = await self._executor.run(self._read, asked, share.topic, queue.queue_id, start, most)
        end = min(end, found.next_begin_offset)
        if end <= start or asked.topic not in queue.aside or queue.aside[asked.topic][0] != start:
            return False
        messages = found._placed(share.topic, queue.queue_id)
        placed = [(_without_body(message, share.topic), record) for message, record in zip(messages, records)
                  if start <= message.queue_offset < end]
        queue.bring_back(asked.topic, [(start, end)], [message for message, _ in placed])
        for message, record in placed:
            self._take_if_meant(message, share, queue, asked, taken, record)
        return True

    async def _take_next(self, share: Share, queue: PopQueue, asked: Asked, taken: list[Taken]) -> bool:
        """Take the next messages of a queue; return whether there may be more."""
        most = min(asked.most - len(taken), queue.room_for_next)
        if most <= 0:
            return False
        topic, position = share.topic, queue.position
        if queue.flight.last is not None and queue.last is None \
                and not await self._executor.run(queue.know_same_history, self._reader, topic):
            return False
        read = partial(self._read, asked, topic, queue.queue_id, position, most)
        is_near = queue.last is not None and _is_short(asked.request) and self._positions.is_near_log_end(queue.last.physical_offset)
        if not is_near and self._end_of(topic, queue.queue_id) == position:
            return False
        found, records = read() if is_near else await self._executor.run(read)
        if found.status in _NOTHING_YET:
            if found.status is GetStatus.OFFSET_OVERFLOW_BADLY and position > (end := self._reader.queue_end(topic, queue.queue_id)):
                self.shares.end_leases(queue)
                queue.seek(end)
            return False
        queue.position, queue.end = found.next_begin_offset, found.max_offset
        messages = [_without_body(message, topic) for message in queue.flight.unacknowledged(found._placed(topic, queue.queue_id))]
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

    def _read(self, asked: Asked, topic: str, queue_id: int, offset: int, most: int) -> tuple[GetResult, list[bytes]]:
        """Read messages and their records, in a thread if they may be on the disk, or a filter takes long."""
        wanted = _filter(asked.request, topic) if topic == asked.topic else Wanted()
        found = self._reader._fetch(topic, queue_id, offset, most, wanted, LEVEL)
        return found, self._records(found.messages)

    def _records(self, messages: Iterable[Message]) -> list[bytes]:
        return [self._positions.record(message) for message in messages]

    def _deliveries_max(self, asked: Asked) -> int | None:
        """Return how often a message is delivered in place; None for those that have retries."""
        if not asked.is_ordered:
            return None
        return (self._names.group(asked.group) or SubscriptionGroup(asked.group)).retry_max_times + 1

    def _lease(self, asked: Asked, taken: list[Taken]) -> Answer:
        """Answer a pop with these messages, which are its client's then; ConnectionResetError if the client does not get the answer."""
        now_s = time.monotonic()
        pop_ms = max(time.time_ns() // 1_000_000, *(each.queue.ended_ms + 1 for each in taken))
        owner = asked.request.connection if asked.is_kept else None
        by_queue: dict[tuple[int, int], list[int]] = {}
        for each in taken:
            by_queue.setdefault((int(each.share.topic != asked.topic), each.queue.queue_id), []).append(each.message.queue_offset)
        fields = _pop_fields(pop_ms, asked)
        fields["startOffsetInfo"] = ";".join(f"{retry} {queue_id} {min(offsets)}" for (retry, queue_id), offsets in by_queue.items())
        fields["msgOffsetInfo"] = ";".join(
            f"{retry} {queue_id} {','.join(map(str, sorted(offsets)))}" for (retry, queue_id), offsets in by_queue.items())
        if asked.is_ordered:
            fields["orderCountInfo"] = ";".join(
                f"0 qo{each.queue.queue_id}%{each.message.queue_offset} {each.message.delivery_count - 1}" for each in taken
                if each.message.delivery_count > 1)
        rest = sum(max(0, queue.end - queue.position) for queue in {id(each.queue): each.queue for each in taken}.values())
        answer = Answer(remark="FOUND", fields={**fields, "restNum": str(rest)}, body=b"".join(each.record for each in taken))
        if not asked.request.reply(answer):
            raise ConnectionResetError
        for each in taken:
            lease = Lease(each.share, each.queue, each.message, pop_ms, asked.invisible_ms / 1000, asked.is_ordered, owner, now_s)
            self.shares.lease(lease, now_s + lease.invisible_s)
        self.shares.in_flight += len(taken)
        for share in {each.share.topic: each.share for each in taken}.values():
            self._pulls.count_gets(share.topic, asked.group, sum(each.share is share for each in taken))
        return answer

    def _has_news(self, asked: Asked) -> bool:
        shares = self.shares.of_group(asked.group)
        topics = [asked.topic] if asked.is_ordered else [asked.topic, RETRY_PREFIX + asked.group]
        for topic in topics:
            share = shares.get(topic)
            if share is None and (topic == asked.topic or topic in self._names.recent_topics()):
                return True  # a take opens it
            for queue in () if share is None else share.queues.values():
                if topic == asked.topic and asked.queue_id not in (-1, queue.queue_id):
                    continue
                if queue.may_have(asked.topic, self._end_of(topic, queue.queue_id), is_ordered=asked.is_ordered):
                    return True
        return False

    def _end_of(self, topic: str, queue_id: int) -> int:
        try:
            return self._pulls.end_of(topic, queue_id)
        except (EngineError, OSError):
            return 0

    # ---- ends of leases -----------------------------------------------------------

    def ack(self, request: Request) -> Answer:
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
        refuse_if(self._names.why_no_commit, codes.NO_MESSAGE)
        number = 0
        for each in map(as_object, acks):
            group, topic = _named(each, "c", "consumerGroup", str), _named(each, "t", "topic", str)
            request.require(topic, SUB)
            request.require(RETRY_PREFIX + group, SUB)
            source = topic if _named(each, "r", "retry", str) == "0" else RETRY_PREFIX + group
            start, queue_id = _named(each, "so", "startOffset", int), _named(each, "q", "queueId", int)
            pop_ms = _named(each, "pt", "popTime", int)
            for bit in _bits(each.get("b", each.get("bitSet"))):
                if (number := number + 1) > ACKED_MAX:
                    raise WireError(f"a batch of more than {ACKED_MAX} messages: the first ones are acknowledged, send the rest again")
                found = self.shares.find_lease(group, source, queue_id, start + bit, pop_ms)
                if isinstance(found, Lease):
                    _require_right(request, found, topic)
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
        self.shares.ends.plan(lease, time.monotonic() + lease.invisible_s)
        return Answer(fields={
            "popTime": str(lease.pop_time_ms), "invisibleTime": str(invisible_ms), "reviveQid": words[3],
            "extraInfo": " ".join([words[0], str(lease.pop_time_ms), str(invisible_ms), *words[3:]])})

    def give_back(self, request: Request) -> Answer:
        """Let a message that did not reach its client come again at once, and not count this delivery, if its handle is valid."""
        lease = self._leased_by(request)
        if isinstance(lease, Answer):
            return lease
        self.shares.end_in_place(lease, is_counted=False)
        self._held.wake(lease.share.group, request.text("topic"))
        return Answer()

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

        self.shares.end(lease)
        self._tasks.begin(self._retries.put([lease], then, is_dead=True))
        fault = await faults
        return Answer(codes.SYSTEM_ERROR, fault) if fault else Answer()

    def _leased_by(self, request: Request) -> Lease | Answer:
        """Return the lease of a request with a handle, else the answer: as by RocketMQ's broker SUCCESS for an old handle."""
        group, topic = request.text("consumerGroup"), request.text("topic")
        queue_id, offset = request.integer("queueId"), request.integer("offset", bits=64)
        words = request.text("extraInfo").split(" ")
        if len(words) < 7 or not all(map(is_number, words[1:3])):
            raise WireError("a handle that is not POP_CK's text")
        if why := self._names.why_no_commit:  # the next tick forgets the leases
            return Answer(codes.NO_MESSAGE, why)
        source = topic if words[4] == "0" else RETRY_PREFIX + group
        found = self.shares.find_lease(group, source, queue_id, offset, int(words[1]))
        if isinstance(found, Lease):
            _require_right(request, found, topic)
            return found
        if found:
            return Answer(codes.NO_MESSAGE, found)
        return Answer(remark=EXPIRED if time.time_ns() // 1_000_000 >= int(words[1]) + int(words[2]) else None)

    def _acknowledge(self, lease: Lease) -> None:
        self.shares.end(lease)
        self._done(lease)
        lease.share.used_s = time.monotonic()
        if lease.is_ordered and not lease.queue.is_blocked:
            self._held.wake(lease.share.group, lease.share.topic)

    def _done(self, lease: Lease) -> None:
        lease.queue.acknowledge(lease.message)
        self.shares.in_flight -= 1

    async def tick(self) -> None:
        """End the leases whose time is over."""
        if any(self.shares) and self._names.why_no_commit:  # others have these messages, of the master that has replaced this one
            self.shares.forget_all()
        while self.shares.scattered:
            share, queue = self.shares.scattered.pop()
            if not queue.is_gathering:
                queue.is_gathering = True
                self._tasks.begin(self._gather(share, queue))
        now_s, waiting = time.monotonic(), 0
        ended: list[Lease] = []
        while len(ended) < ENDS_OF_TICK and (due := self.shares.ends.due(now_s, ENDS_OF_TICK)):
            for lease in due:
                if lease.queue.leases.get(lease.offset) is not lease:
                    continue
                if lease.owner is not None and not lease.owner.is_closed and now_s - lease.began_s < RENEWED_S_MAX:
                    self.shares.ends.plan(lease, now_s + max(TICK_S, lease.invisible_s))
                elif lease.is_ordered:
                    self.shares.end_in_place(lease, is_counted=True)
                    self._held.wake(lease.share.group, lease.share.topic)
                elif self._putting is not None and not self._putting.done():
                    waiting += 1
                    self.shares.ends.plan(lease, now_s + TICK_S * math.ceil(waiting / ENDS_OF_TICK))
                else:
                    self.shares.end(lease)
                    ended.append(lease)
            await asyncio.sleep(0)
        if ended:
            self._putting = self._tasks.begin(self._retries.put(ended, self._after_retry))

    async def _gather(self, share: Share, queue: PopQueue) -> None:
        """Put again what waits for pops of its topics, a topic's messages together, until it has a quarter of the runs that it may have:
        those topics may never be popped, and no other one may wait for them."""
        self._report(f"retries of {share.group} wait for pops of {len(queue.aside)} topics in {queue.bounds // 2} runs of a queue: they "
                     "are put into it again, those of a topic together")
        try:
            while queue.aside and queue.bounds > queue.bounds_max // 4 and await self._gather_some(share, queue):
                pass
        finally:
            queue.is_gathering = False

    async def _gather_some(self, share: Share, queue: PopQueue) -> bool:
        """Put some messages again; return whether there may be more."""
        async with share.lock:
            (topic, runs), tenure = queue.scattered(), queue.flight.tenure
            if queue.room < 2 * GATHERED or not runs:
                return False
            runs, found = await self._executor.run(self._read_runs, share.topic, queue.queue_id, runs)
            if not runs or share.queues.get(queue.queue_id) is not queue or queue.flight.tenure != tenure:
                return False
            queue.bring_back(topic, runs, found)
        pop_ms, faults = time.time_ns() // 1_000_000, [""]

        def then(lease: Lease, fault: str) -> None:
            if share.queues.get(queue.queue_id) is not queue or lease.offset not in queue.flight.open:
                return  # the group was reset
            if fault:
                faults.append(fault)
                queue.set_aside(lease.message, topic)
            else:
                queue.acknowledge(lease.message)

        await self._retries.put([Lease(share, queue, message, pop_ms, 0.0) for message in found], then, is_same=True)
        if faults[-1]:
            await asyncio.sleep(PUT_AGAIN_S)
        return True

    def _read_runs(self, topic: str, queue_id: int, runs: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[Message]]:
        """Return what of these runs can be read now, and its messages, without those that were deleted; in a thread."""
        read: list[tuple[int, int]] = []
        found: list[Message] = []
        for start, end in runs:
            while start < end:
                got = self._reader._fetch(topic, queue_id, start, min(MESSAGES_MAX, end - start), Wanted(), LEVEL)
                read_end = min(end, got.next_begin_offset)
                if read_end <= start:
                    return read, found
                found += [_without_body(message, topic) for message in got._placed(topic, queue_id)
                          if start <= message.queue_offset < read_end]
                read.append((start, read_end))
                start = read_end
        return read, found

    def left(self, connection: Connection, group: str) -> None:
        """End the leases of a client that leaves its group, if its connection keeps them."""
        self._tasks.begin(self._free(connection, group))

    async def _free(self, connection: Connection, group: str) -> None:
        for queue in [queue for share in self.shares.of_group(group).values() for queue in share.queues.values()]:
            for lease in [lease for lease in queue.leases.values() if lease.owner is connection]:
                lease.owner = None
                self.shares.ends.plan(lease, 0.0)
            await asyncio.sleep(0)  # a queue takes up to 20 ms

    def _after_retry(self, lease: Lease, fault: str) -> None:
        queue, offset = lease.queue, lease.offset
        queue.burying.discard(offset)
        if lease.share.queues.get(queue.queue_id) is not queue or offset not in queue.flight.open:
            return  # the group was reset
        if not fault:
            self._done(lease)
            if lease.is_ordered:
                self._held.wake(lease.share.group, lease.share.topic)
            return
        queue.flight.dead.pop(offset, None)  # else it would be buried at once, beside its lease
        self.shares.lease(lease, time.monotonic() + PUT_AGAIN_S)

    def _bury(self, share: Share, queue: PopQueue) -> None:
        """Put the messages of an ordered group that were delivered too often into its dead letters."""
        dead = [offset for offset in queue.flight.dead if offset not in queue.burying]
        if dead:
            queue.burying.update(dead)
            pop_ms = time.time_ns() // 1_000_000
            leases = [Lease(share, queue, queue.flight.open[offset], pop_ms, 0.0, is_ordered=True) for offset in dead]
            self._tasks.begin(self._retries.put(leases, self._after_retry, is_dead=True))

    async def close(self) -> None:
        self._held.close()
        await self.shares.close()
        for task in self._tasks:
            task.cancel()


_NOTHING_YET = frozenset((GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.NO_MESSAGE_IN_QUEUE))


def _is_full(asked: Asked, taken: list[Taken]) -> bool:
    return len(taken) >= asked.most or sum(each.message.size_bytes for each in taken) >= POP_BYTES


def _of_size(leases: Iterator[Lease]) -> list[Lease]:
    """Take the next leases, of messages that have POP_BYTES together."""
    found: list[Lease] = []
    size_bytes = 0
    while size_bytes < POP_BYTES and (lease := next(leases, None)) is not None:
        found.append(lease)
        size_bytes += lease.message.size_bytes
    return found


def _without_body(message: Message, topic: str) -> Message:
    source = message.properties.get(PROPERTY_RETRY_TOPIC) if topic.startswith(RETRY_PREFIX) else None
    return Message(topic, b"", message.queue_id, message.queue_offset, message.physical_offset, message.size_bytes,
                   "" if source is None else encode_properties({PROPERTY_RETRY_TOPIC: source}),
                   store_timestamp_ms=message.store_timestamp_ms, reconsume_times=message.reconsume_times, body_crc=message.body_crc)


def _expression(request: Request) -> tuple[str | None, str | None]:
    return request.frame.fields.get("exp"), request.frame.fields.get("expType")


def _is_short(request: Request) -> bool:
    """Return whether the loop may parse a pop's filter: a condition, or a long list of tags, takes long."""
    text, kind = _expression(request)
    return kind in (None, TAG) and len(text or "") <= SHORT_CHARS


def _filter(request: Request, topic: str) -> Wanted:
    """Parse a pop's filter, which is not kept: it takes up to a hundred times the memory of its text."""
    text, kind = _expression(request)
    found = asked_subscription(topic, text, kind)
    check_expression(kind, text)
    return found.wanted


def _require_right(request: Request, lease: Lease, topic: str) -> None:
    """Refuse to end a lease for a client without a right for the topic from which a retry came, which the handle need not tell."""
    if lease.share.topic.startswith(RETRY_PREFIX) and (source := lease.message.properties.get(PROPERTY_RETRY_TOPIC, topic)) != topic:
        request.require(source, SUB)


def _pop_fields(pop_ms: int, asked: Asked) -> dict[str, str]:
    return {"popTime": str(pop_ms), "invisibleTime": str(asked.invisible_ms), "reviveQid": str(ORDERED_QUEUE if asked.is_ordered else 0)}


def _nothing(asked: Asked, *, is_full: bool = False) -> Answer:
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
