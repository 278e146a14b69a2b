"""Pulls: messages of a queue, at once or when they arrive (RocketMQ: PullMessageProcessor, PullRequestHoldService).

A pull that finds no messages may be held. Held pulls wait by queue. One thread for all held requests sleeps on the engine's
arrival sequence (Arrivals); when messages were dispatched, the loop checks the queues of held pulls. A held pull ends with
messages, with its timeout, or with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from pyengine.arguments import INT64_MAX
from pyengine.errors import EngineError
from pyengine.formats.record import PHYSICAL_OFFSET_AT
from pyengine.gateway import codes
from pyengine.gateway.connections import (
    REQUESTER,
    Answer,
    Connection,
    Handlers,
    Request,
    RequestRefusedError,
    TurnExecutor,
    Turns,
    refuse_if,
)
from pyengine.gateway.members import BROADCASTING, TAG, Members, Subscription, asked_subscription, check_expression
from pyengine.gateway.names import DEAD_PREFIX, Names, group_fault
from pyengine.gateway.positions import LEVEL, Positions
from pyengine.gateway.tasks import Tasks
from pyengine.ipc.live_reader import LiveStoreReader, Look
from pyengine.results import GetRecords, GetStatus
from pyengine.storage.config_table import PERM_READ, SubscriptionGroup

COMMIT_FLAG, SUSPEND_FLAG, SUBSCRIPTION_FLAG = 1, 2, 4  # of a pull's sysFlag
SUSPEND_MS_MAX = 120_000
PULLING_S = 30.0          # after a pull, and while it is held, its group counts as one that pulls, if its client is connected
TICK_S = 0.2              # precision of the end of a held pull
ANSWER_SLICE_S = 0.05     # of one turn of the loop, for held pulls
ANSWERS_S = 0.2           # of one check of held pulls, for answers
ENDS_MAX = 20_000         # of queues that are remembered: about 10 MB
_CODES = {
    GetStatus.FOUND: codes.SUCCESS,
    GetStatus.MESSAGE_WAS_REMOVING: codes.PULL_RETRY_IMMEDIATELY,
    GetStatus.NO_MATCHED_MESSAGE: codes.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: codes.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: codes.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: codes.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: codes.PULL_OFFSET_MOVED,
}


@dataclass(slots=True)
class Pull:
    """One pull request; the `offset` of a held one advances over messages that its tags exclude."""

    request: Request
    topic: str
    queue_id: int
    offset: int
    most: int
    subscription: Subscription
    asked_offset: int
    until_s: float = 0.0
    is_being_read: bool = False  # in another thread
    group: str = ""  # if it is checked again when messages come


class Arrivals:
    """Has held requests looked at when messages were dispatched, and a few times a second; one thread waits for all of them."""

    def __init__(self, reader: LiveStoreReader) -> None:
        self._reader = reader
        self._served: list[tuple[Callable[[], Iterator[None]], Callable[[], bool]]] = []
        self._anything_held = threading.Event()
        self._closing = threading.Event()
        self._check_s = 0.0  # of the last check
        self._loop: asyncio.AbstractEventLoop  # from start() on
        self._thread: threading.Thread | None = None

    def serve(self, check: Callable[[], Iterator[None]], holds: Callable[[], bool]) -> None:
        """Call `check` in the loop's thread, whose pieces others may come between, while `holds` says that a request is held."""
        self._served.append((check, holds))

    def start(self) -> None:
        """Begin to wait for arrivals; call it in the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._wait, name="arrivals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop waiting for arrivals; the reader may be closed afterwards."""
        self._closing.set()
        self._anything_held.set()
        if self._thread is not None:
            self._thread.join()

    def stir(self) -> None:
        """Note that a request is held."""
        self._anything_held.set()

    def _wait(self) -> None:
        """Sleep in a thread until messages are dispatched; it reads only the sequence.

        After each check of the held requests the loop has four times the check's duration for other work.
        """
        seen = 0
        while not self._closing.is_set():
            self._anything_held.wait()
            try:
                self._reader._wait_for_arrival(TICK_S, seen)
                seen = self._reader._arrivals()
            except Exception:  # noqa: BLE001 - the store is recovered, or has no descriptor left: the checks tell the clients
                self._closing.wait(TICK_S)
            check = self.check()
            try:
                wait([asyncio.run_coroutine_threadsafe(check, self._loop)])
            except RuntimeError:  # the loop has ended
                check.close()
                return
            self._closing.wait(4 * self._check_s)

    async def check(self) -> None:
        """Check the held requests, in several turns of the loop if it takes long."""
        began_s, self._check_s = time.monotonic(), 0.0
        try:
            for _ in chain.from_iterable(check() for check, _ in self._served):
                if (took_s := time.monotonic() - began_s) >= ANSWER_SLICE_S:
                    self._check_s += took_s
                    await asyncio.sleep(0)
                    began_s = time.monotonic()
        except Exception as error:  # noqa: BLE001 - the next check may succeed
            asyncio.get_running_loop().call_exception_handler({"message": "a check of held requests failed", "exception": error})
        self._check_s += time.monotonic() - began_s
        if not any(holds() for _, holds in self._served):
            self._anything_held.clear()


class Pulls:
    """Serves all pulls of the gateway. Used in the loop's thread."""

    def __init__(self, reader: LiveStoreReader, names: Names, members: Members, positions: Positions, executor: TurnExecutor,
                 count_gets: Callable[[str, str, int], None] = lambda topic, group, number: None) -> None:
        """`count_gets` gets the number of messages of a topic delivered to a group."""
        self.count_gets = count_gets
        self._reader = reader
        self._names = names
        self._members = members
        self.positions = positions
        self._executor = executor
        self._held: dict[tuple[str, int], dict[Request, Pull]] = {}
        self._ends: dict[tuple[str, int], tuple[Look, int]] = {}  # of queues, as long as nothing comes after the look
        self._pulled: dict[str, WeakKeyDictionary[Connection, float]] = {}  # by group, until when its clients count as ones that pull
        self.why_not: Callable[[str], str] = lambda group: ""  # why a group may not pull now
        self._tasks = Tasks()
        self.arrivals = Arrivals(reader)
        self.arrivals.serve(self._check, lambda: bool(self._held))
        self.handlers: Handlers = {codes.PULL_MESSAGE: self.pull, codes.LITE_PULL_MESSAGE: self.pull}

    # ---- a pull -------------------------------------------------------------------

    def pull(self, request: Request) -> Answer | Coroutine[Any, Any, Answer | None] | None:
        """Return messages from an offset on, or RocketMQ's answer without any; near the log's end without a thread."""
        group = request.text("consumerGroup")
        refuse_if(group_fault(group))
        config = self._names.group(group)
        return self._pull_of_new_group(request, group) if config is None else self._pull(request, group, config)

    async def _pull_of_new_group(self, request: Request, group: str) -> Answer | None:
        config = await self._names.group_or_new(group)
        if config is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{group}] does not exist, {codes.FAQ}")
        await request.connection.may_write()
        answer = self._pull(request, group, config)
        return await answer if isinstance(answer, Coroutine) else answer

    def _pull(self, request: Request, group: str, config: SubscriptionGroup) -> Answer | Coroutine[Any, Any, Answer | None] | None:
        _check_enabled(config)
        name, queue_id, flags = request.text("topic"), request.integer("queueId"), request.integer("sysFlag")
        behind, place = request.connection.behind, (name, group, queue_id)
        if why := self.why_not(group):
            if (known := self._names.topic(name)) is not None and 0 <= queue_id < known.read_queue_nums:
                behind.add(place)
            raise RequestRefusedError(codes.NO_PERMISSION, why)
        self._note_pull(request, group, PULLING_S)
        self._check_queue(request, name, queue_id)
        found = self._subscription(request, config, name, flags)
        offset = request.integer("queueOffset", bits=64)
        pull = Pull(request, name, queue_id, offset, max(1, request.integer("maxMsgNums")), found, offset, group=group)
        if place in behind:  # its client's offset was read before, or while, the group popped
            committed = self.positions.committed(*place)
            behind.remove(place)
            if offset < committed:
                low, high = self._reader.queue_range(name, queue_id, LEVEL)
                return self._answer(pull, GetRecords(GetStatus.OFFSET_TOO_SMALL, b"", 0, committed, low, high))
        if flags & COMMIT_FLAG and not self._names.is_of_slave:
            self.positions.commit(name, group, queue_id, max(0, request.integer("commitOffset", 0, bits=64)))
        result = self._near(pull) if found.expression_type == TAG else None
        return self._pull_far(pull, flags) if result is None else self._answer_or_hold(pull, flags, result)

    def _check_queue(self, request: Request, name: str, queue_id: int) -> None:
        topic = self._names.existing(name, f", apply first please! {codes.FAQ}")
        if not topic.perm & PERM_READ and not name.startswith(DEAD_PREFIX):
            raise RequestRefusedError(codes.NO_PERMISSION, f"the topic[{name}] pulling message is forbidden")
        if not 0 <= queue_id < topic.read_queue_nums:
            raise RequestRefusedError(codes.SYSTEM_ERROR, f"queueId[{queue_id}] is illegal, topic:[{name}] topicConfig.readQueueNums:"
                                                          f"[{topic.read_queue_nums}] consumer:[/{request.connection.address}]")

    async def _pull_far(self, pull: Pull, flags: int) -> Answer | None:
        """Read in another thread, since messages far from the log's end may be on the disk, and a condition, or its text, takes long."""
        async with pull.request.connection.far_reads:
            await pull.request.connection.may_write()
            result = await self._executor.run(self._get_now, pull)
            return self._answer_or_hold(pull, flags, result)

    def _answer_or_hold(self, pull: Pull, flags: int, result: GetRecords) -> Answer | None:
        request, offset, result = pull.request, pull.offset, self._waited_for(pull, result)
        if result.status in _WAITING and flags & SUSPEND_FLAG and (offset == 0 or result.status is not GetStatus.NO_MESSAGE_IN_QUEUE):
            suspend_ms = max(0, min(request.integer("suspendTimeoutMillis", 0, bits=64), SUSPEND_MS_MAX))
            self._note_pull(request, request.text("consumerGroup"), max(PULLING_S, suspend_ms / 1000))
            self._hold(pull, suspend_ms / 1000)
            return None
        return self._answer(pull, result)

    def _subscription(self, request: Request, config: SubscriptionGroup, topic: str, flags: int) -> Subscription:
        """Return the subscription of a pull: its own, or that of its group's heartbeats."""
        if flags & SUBSCRIPTION_FLAG:
            fields = request.frame.fields
            found = asked_subscription(topic, fields.get("subscription"), fields.get("expressionType"))
        else:
            members = self._members.consumers.get(config.group)
            if members is None:
                raise RequestRefusedError(codes.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{codes.FAQ}")
            if members.message_model == BROADCASTING and not config.consume_broadcast_enable:
                raise RequestRefusedError(codes.NO_PERMISSION, f"the consumer group[{config.group}] can not consume by broadcast way")
            known = members.subscriptions.get(topic)
            if known is None:
                raise RequestRefusedError(codes.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{codes.FAQ}")
            if known.version < request.integer("subVersion", 0, bits=64):
                raise RequestRefusedError(codes.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
            found = known
        return found

    def _near(self, pull: Pull, near_bytes: int | None = None) -> GetRecords | None:
        """Return the messages of a pull without a condition; None if they are not near the log's end."""
        wanted = pull.subscription.wanted
        return self._reader._get_records(pull.topic, pull.queue_id, pull.offset, pull.most, wanted.tags, LEVEL, near_bytes)

    def _get_now(self, pull: Pull) -> GetRecords:
        check_expression(pull.subscription.expression_type, pull.subscription.text)
        wanted = pull.subscription.wanted
        if wanted.condition is None and (near := self._near(pull, INT64_MAX)) is not None:
            return near
        found = self._reader._fetch(pull.topic, pull.queue_id, pull.offset, pull.most, wanted, LEVEL)
        records = b"".join(map(self.positions.record, found.messages)) if found.messages else b""
        return GetRecords(found.status, records, len(found.messages), found.next_begin_offset, found.min_offset, found.max_offset)

    def _waited_for(self, pull: Pull, result: GetRecords) -> GetRecords:
        """Return `result`, but OFFSET_OVERFLOW_ONE for an offset beyond what readers see and not beyond the queue's end.

        With dispatch_at=replicated a queue has entries that readers do not see yet. PULL_OFFSET_MOVED would reset the group's
        offset to an earlier one.
        """
        is_beyond = result.status in (GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.NO_MESSAGE_IN_QUEUE) and pull.offset > 0
        if is_beyond and pull.offset <= self._reader.queue_end(pull.topic, pull.queue_id):
            return result._replace(status=GetStatus.OFFSET_OVERFLOW_ONE, next_begin_offset=pull.offset)
        return result

    def _answer(self, pull: Pull, result: GetRecords) -> Answer:
        code = _CODES.get(result.status)
        if code is None:  # no messages, or no such queue yet
            code = codes.PULL_NOT_FOUND if pull.offset == 0 else codes.PULL_OFFSET_MOVED
        if code == codes.PULL_NOT_FOUND and pull.offset != pull.asked_offset:
            code = codes.PULL_RETRY_IMMEDIATELY  # it skipped messages of other tags: its client must continue after them
        is_moved = code == codes.PULL_OFFSET_MOVED and self._names.is_of_slave
        if is_moved:  # the master may have that offset: a consumer must not go back
            code, result = codes.PULL_RETRY_IMMEDIATELY, result._replace(next_begin_offset=pull.offset)
        broker_id = self._suggested_broker(pull, result) if is_moved or self._names.suggests_slaves else 0
        if result.message_count:
            self.count_gets(pull.topic, pull.request.text("consumerGroup"), result.message_count)
        return Answer(code, result.status.name, {
            "nextBeginOffset": str(result.next_begin_offset), "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset), "suggestWhichBrokerId": str(broker_id)}, result.records)

    def _suggested_broker(self, pull: Pull, result: GetRecords) -> int:
        """Return the number of the broker that the group reads from next, by its settings: another one while it is far behind."""
        config = self._names.group(pull.request.text("consumerGroup"))
        if config is None:
            return 0
        is_slow = bool(result.records) and not self.positions.is_near_log_end(
            int.from_bytes(result.records[PHYSICAL_OFFSET_AT:PHYSICAL_OFFSET_AT + 8], "big"))
        return config.which_broker_when_consume_slowly if is_slow else config.broker_id

    def is_pulling(self, group: str) -> bool:
        """Whether a connected client of the group has pulled within PULLING_S, or has a pull that is held."""
        now_s = time.monotonic()
        if any(until_s >= now_s and not connection.is_closed for connection, until_s in self._pulled.get(group, {}).items()):
            return True
        self._pulled.pop(group, None)
        return False

    def _note_pull(self, request: Request, group: str, seconds: float) -> None:
        if self._names.is_of_slave:  # which enters no group, so that clients invent names without end
            return
        clients = self._pulled.get(group)
        if clients is None:
            clients = self._pulled[group] = WeakKeyDictionary()
        clients[request.connection] = time.monotonic() + seconds

    # ---- held pulls ---------------------------------------------------------------

    @property
    def held(self) -> int:
        return sum(map(len, self._held.values()))

    def _hold(self, pull: Pull, suspend_s: float) -> None:
        if not pull.request.is_open:
            return
        pull.until_s = time.monotonic() + suspend_s
        self._held.setdefault((pull.topic, pull.queue_id), {})[pull.request] = pull
        self.arrivals.stir()
        self._answer_held(pull)  # for messages that were dispatched after the read

    def _drop(self, pull: Pull) -> None:
        key = pull.topic, pull.queue_id
        if self._held.get(key, {}).pop(pull.request, None) is not None and not self._held[key]:
            del self._held[key]

    def _check(self) -> Iterator[None]:
        """Answer the held pulls with messages and those whose time is over, in the turns of their clients, and forget those of
        connections that ended; what is left after ANSWERS_S is for the next check, which also sees what comes meanwhile."""
        due: Turns[Connection, Pull] = Turns()
        now_s = time.monotonic()
        for key in list(self._held):
            end = INT64_MAX  # if it is not known, each pull gets the error
            with contextlib.suppress(Exception):
                end = self.end_of(*key)
            for pull in list(self._held.get(key, {}).values()):
                yield
                if not pull.request.is_open or not pull.is_being_read and (end > pull.offset or now_s >= pull.until_s):
                    due.add(pull.request.connection, pull)
        until_s = time.monotonic() + ANSWERS_S
        while due and now_s < until_s:
            yield
            began_s = time.monotonic()
            connection, pull = due.take()
            self._answer_held(pull)
            now_s = time.monotonic()
            due.charge(connection, now_s - began_s)

    def end_of(self, topic: str, queue_id: int) -> int:
        """Return the end of a queue as clients see it; its files are looked at only if messages may have come for it."""
        known = self._ends.get((topic, queue_id))
        if known is not None and not self._reader._has_arrived(known[0]):
            return known[1]
        look = self._reader._look(topic, queue_id, LEVEL)
        try:
            limit = self._reader.dispatched_offset(LEVEL)
        except (EngineError, OSError):
            return 0  # the store is being recovered: there is nothing new
        queue = self._reader._queue(topic, queue_id)
        end = 0 if queue is None else queue.max_offset(limit)
        if look is not None:
            if len(self._ends) >= ENDS_MAX:
                self._ends.clear()
            self._ends[topic, queue_id] = look, end
        return end

    def _answer_held(self, pull: Pull) -> None:
        """Answer a held pull if there are messages for it or its time is over; an error ends this one only."""
        now_s = time.monotonic()
        try:
            is_waiting = now_s < pull.until_s and self.end_of(pull.topic, pull.queue_id) <= pull.offset
            if pull.request.is_open and (is_waiting or self._is_as_asked(pull) and not self._finish(pull, now_s)):
                return
        except Exception as error:  # noqa: BLE001 - the other pulls are answered all the same
            pull.request.reply(pull.request.failure(error))
        self._drop(pull)

    def _is_as_asked(self, pull: Pull) -> bool:
        """Refuse a held pull that would be refused now. If its group's subscription is another, answer it, and return False: what came
        since must not be skipped by the old one, neither here nor in its client, which asks again at once."""
        config = self._names.group(pull.group) if pull.group else None
        if config is None:  # as after a tool has deleted it
            return True
        _check_enabled(config)
        self._check_queue(pull.request, pull.topic, pull.queue_id)
        flags, was = pull.request.integer("sysFlag"), pull.subscription
        found = was if flags & SUBSCRIPTION_FLAG else self._subscription(pull.request, config, pull.topic, flags)
        if (found.text, found.expression_type) == (was.text, was.expression_type):
            return True
        low, high = self._reader.queue_range(pull.topic, pull.queue_id, LEVEL)
        pull.request.reply(self._answer(pull, GetRecords(GetStatus.NO_MATCHED_MESSAGE, b"", 0, pull.offset, low, high)))
        return False

    def _finish(self, pull: Pull, now_s: float) -> bool:
        """Answer a held pull; return False if it stays held, also while another thread reads for it."""
        if pull.is_being_read:
            return False
        if pull.subscription.expression_type == TAG and not pull.request.connection.is_full:
            return self._try(pull, now_s, lambda: self._get_now(pull))
        pull.is_being_read = True
        self._tasks.begin(self._finish_later(pull))
        return False

    async def _finish_later(self, pull: Pull) -> None:
        """Answer a held pull in another thread, in its client's turn and once that reads: one with a condition takes long."""
        REQUESTER.set(pull.request.connection)
        async with pull.request.connection.far_reads:
            await pull.request.connection.may_write()
            if not pull.request.is_open:
                return
            coming = self._executor.run(self._get_now, pull)
            await asyncio.wait((coming,))
            pull.is_being_read = False
            if pull.request.is_open and self._try(pull, time.monotonic(), coming.result):
                self._drop(pull)

    def _try(self, pull: Pull, now_s: float, get: Callable[[], GetRecords]) -> bool:
        try:
            result = self._waited_for(pull, get())
            if now_s < pull.until_s and result.status is not GetStatus.FOUND:
                if result.status is GetStatus.NO_MATCHED_MESSAGE:
                    pull.offset = result.next_begin_offset
                if result.status in _WAITING or result.status is GetStatus.NO_MATCHED_MESSAGE:
                    return False
            answer = self._answer(pull, result)
        except Exception as error:  # noqa: BLE001 - as above
            answer = pull.request.failure(error)
        pull.request.reply(answer)
        return True


def _check_enabled(config: SubscriptionGroup) -> None:
    if not config.consume_enable:
        raise RequestRefusedError(codes.NO_PERMISSION, f"subscription group no permission, {config.group}")


_WAITING = frozenset((GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_FOUND_NULL))

