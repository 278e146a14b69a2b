"""The connected clients: producers and consumer groups by their heartbeats, locks of ordered queues, requests that members answer.

The gateway makes one Members, whose handlers serve these requests; sends, pulls and tools look up members and connections in
it. It has no file: after a restart of the gateway clients reconnect and send their heartbeat within 30 s. Relays forwards
requests of tools to a member (report progress, consume one message, move to other offsets), and returns its answer as it is.
Assignments tells members which queues to take.
RocketMQ: ConsumerManager, ProducerManager, RebalanceLockManager, Broker2Client.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.client.consumer_groups import set_offsets
from pyengine.client.group_session import allocate_averagely
from pyengine.errors import FormatError, UsageError
from pyengine.formats.record import decode_message_id, java_trim, string_hash
from pyengine.gateway import codes
from pyengine.gateway.acl_file import SUB
from pyengine.gateway.connections import Answer, Connection, Handlers, Request, RequestRefusedError, TurnExecutor, refuse_if
from pyengine.gateway.names import (
    FLAG_UNIT_SUB,
    GROUPS_MAX,
    RETRY_PREFIX,
    Address,
    Names,
    group_fault,
    topic_fault,
)
from pyengine.gateway.positions import LEVEL, GroupOffsets, Positions
from pyengine.gateway.wire import (
    CODE_MAX,
    JSON_BYTES_MAX,
    ObjectKeys,
    Raw,
    WireError,
    as_object,
    is_number,
    read_object,
    write_json,
)
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.storage.config_table import TopicConfig
from pyengine.storage.consumer_offset import group_key
from pyengine.storage.durable_file import RunningClock
from pyengine.storage.message_getter import Wanted, filter_by_tags, parse_condition

PULL, POP = "PULL", "POP"
EXPIRED_S = 120.0        # without a heartbeat
EXPIRE_S = 5.0           # between two calls of Members.expire()
NOTICE_S = 0.1           # from a change of a group to its notices: when N join at once, each is not told N times
LOCK_S = 60.0            # of an ordered queue without a renewal
CLIENT_ID_CHARS_MAX = 512
GROUPS_OF_CLIENT_MAX = 256   # in one heartbeat
SUBSCRIPTIONS_MAX = 4096     # of one group
SUBSCRIPTION_CHARS_MAX = 64 << 10  # of one topic: a pull parses it
SUBSCRIPTION_BYTES_MAX = 64 << 20  # of all groups together, about
QUEUES_MAX = 65_536          # in one request to lock or unlock
LOCKS_MAX = 100_000
FAULTS_MAX = 8               # of a heartbeat, in its answer
STATUS_TIMEOUT_S = 5.0
MEMBERS_ASKED_MAX = 64  # for one request to all members of a group
STATUS_BYTES_MAX = 16 << 20  # of members' answers that are kept at once
# Matches texts in order to skip them. A text without an end matches up to the end of the input: otherwise the search from each
# of its quotes would take quadratic time.
_BRACES = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)|[{}]', re.DOTALL)
TAG, SQL = "TAG", "SQL92"
CLUSTERING, BROADCASTING, PASSIVELY, FROM_LAST = "CLUSTERING", "BROADCASTING", "CONSUME_PASSIVELY", "CONSUME_FROM_LAST_OFFSET"
_TYPES, _MODELS = ("CONSUME_ACTIVELY", PASSIVELY), (BROADCASTING, CLUSTERING)  # as RocketMQ numbers them
_STARTS = (FROM_LAST, f"{FROM_LAST}_AND_FROM_MIN_WHEN_BOOT_FIRST", "CONSUME_FROM_MIN_OFFSET", "CONSUME_FROM_MAX_OFFSET",
           "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP")


@dataclass(frozen=True, slots=True)
class Subscription:
    """A group's subscription to a topic: `text` is `a || b`, `*`, or an SQL92 condition; each change raises `version`."""

    topic: str
    text: str
    version: int
    expression_type: str = TAG
    tags: tuple[str, ...] = ()

    @property
    def wanted(self) -> Wanted:
        """The filter of a get. UsageError for a wrong SQL92 condition; RocketMQ ignores what follows a whole one."""
        return Wanted(filter_by_tags(self.tags) if self.tags else None,
                      parse_condition(self.text, ignores_rest=True) if self.expression_type == SQL else None)

    def fields(self) -> dict[str, Any]:
        return {"classFilterMode": False, "codeSet": [string_hash(tag) for tag in self.tags], "expressionType": self.expression_type,
                "subString": self.text, "subVersion": self.version, "tagsSet": list(self.tags), "topic": self.topic}


def subscription_of(topic: str, text: str | None, version: int, expression_type: str | None) -> Subscription:
    """Parse a subscription like RocketMQ's FilterAPI, without empty parts; WireError if no tag remains."""
    kind = expression_type or TAG
    if text is None or text in ("", "*") or kind != TAG:
        return Subscription(topic, text or "*", version, kind)
    tags = tuple(dict.fromkeys(trimmed for tag in text.split("||") if (trimmed := java_trim(tag))))
    if not tags:
        raise WireError("subString split error")
    return Subscription(topic, text, version, kind, tags)


def asked_subscription(topic: str, text: str | None, kind: str | None) -> Subscription:
    """Return the subscription that a request names; a request with one that is too long, or has no tag, is refused."""
    if len(text or "") > SUBSCRIPTION_CHARS_MAX:
        raise RequestRefusedError(codes.SUBSCRIPTION_PARSE_FAILED, f"a subscription of more than {SUBSCRIPTION_CHARS_MAX} characters")
    try:
        return subscription_of(topic, text, 0, kind)
    except WireError:
        raise RequestRefusedError(codes.SUBSCRIPTION_PARSE_FAILED, "parse the consumer's subscription failed") from None


def check_expression(kind: object, text: object) -> None:
    """Refuse the request that is served if it has a wrong subscription."""
    if kind in (None, TAG):
        return
    if kind != SQL or not isinstance(text, str | None):
        raise RequestRefusedError(codes.SYSTEM_ERROR, f"The broker does not support consumer to filter message by {kind}")
    try:
        parse_condition(text, ignores_rest=True)
    except (UsageError, RecursionError) as error:
        raise RequestRefusedError(codes.SUBSCRIPTION_PARSE_FAILED, str(error)) from None


@dataclass(slots=True)
class Client:
    """One client program of a group, at one connection."""

    client_id: str
    language: str
    version: int
    last_heartbeat_s: float
    access_key: str | None

    def fields(self, connection: Connection) -> dict[str, Any]:
        return {"clientAddr": connection.address, "clientId": self.client_id, "language": self.language, "version": self.version}


@dataclass(slots=True)
class Group:
    """A connected consumer group. RocketMQ: ConsumerGroupInfo."""

    name: str
    consume_type: str = PASSIVELY
    message_model: str = CLUSTERING
    consume_from_where: str = FROM_LAST
    is_of_unit: bool = False
    clients: dict[Connection, Client] = field(default_factory=dict)
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """The approximate size of its subscriptions in bytes."""
        return sum(400 + 4 * len(each.text) + 64 * len(each.tags) for each in self.subscriptions.values())

    @property
    def client_ids(self) -> list[str]:
        """The members that share the queues. RocketMQ 5's at a worker pop from any queue: they count only among themselves."""
        sharing = [client.client_id for connection, client in self.clients.items() if not connection.is_local]
        return sharing or [client.client_id for client in self.clients.values()]


class Members:
    """All connected clients. Used in the event loop's thread."""

    def __init__(self, names: Names, executor: TurnExecutor, *, clock_s: Callable[[], float] | None = None) -> None:
        self._names = names
        self.now_s = clock_s or RunningClock(2 * EXPIRE_S)  # while the gateway is stopped it reads no heartbeat
        self.consumers: dict[str, Group] = {}
        self.producers: dict[str, dict[Connection, Client]] = {}
        self._groups_of: dict[Connection, tuple[set[str], set[str]]] = {}  # (consumer groups, producer groups)
        self._id_of: dict[Connection, str] = {}  # the client ids of producers, that of the newest heartbeat last
        self._weight = 0  # of all groups' subscriptions
        self._changed: set[str] = set()  # groups whose members are told so next
        self.when_left: list[Callable[[Connection, str], None]] = []  # called with a client's connection and the group that it leaves
        self._locks: dict[tuple[str, str, int], tuple[str, float]] = {}
        self.handlers: Handlers = {
            codes.HEART_BEAT: self.heart_beat,
            codes.UNREGISTER_CLIENT: self.unregister,
            codes.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            codes.LOCK_BATCH_MQ: self.lock,
            codes.UNLOCK_BATCH_MQ: self.unlock,
            codes.CHECK_CLIENT_CONFIG: lambda request: executor.run(self.check_client_config, request),
        }

    # ---- heartbeats ---------------------------------------------------------------

    def heart_beat(self, request: Request) -> Coroutine[Any, Any, Answer]:
        """Register a client in the groups that it names; create new groups and their retry topics.

        What exceeds a limit is left out, and the log and the answer say so: an error only if the client has no group then, for on one
        RocketMQ's does not note this version, and refuses to filter by SQL92. WireError, and nothing is taken, if the heartbeat is wrong.

        It is read, and taken for groups that are connected, before this returns: that counts for the client, a task's work for none.
        """
        if (size_bytes := len(request.frame.body)) > JSON_BYTES_MAX:
            fault = f"it has {size_bytes} bytes: at most {JSON_BYTES_MAX} are read"
            raise RequestRefusedError(codes.SYSTEM_ERROR, _reported([fault], request.connection))
        heartbeat, faults = read_object(request.frame.body), list[str]()
        client_id = _client_id(heartbeat.get("clientID"))
        consumers = [_group_of(each, faults)
                     for each in _first(GROUPS_OF_CLIENT_MAX, "groups", heartbeat.get("consumerDataSet"), faults)]
        producers = [_name(as_object(each).get("groupName"), group_fault)
                     for each in _first(GROUPS_OF_CLIENT_MAX, "groups", heartbeat.get("producerDataSet"), faults)]
        client = Client(client_id, request.frame.language, request.frame.version, self.now_s(), request.frame.fields.get("AccessKey"))
        new = {group.name for group in consumers} - self.consumers.keys()
        for group in consumers:
            if group.name not in new:
                with _noting(faults, group.name):
                    self._register(request.connection, group, client)
        for name in producers:
            with _noting(faults, name):
                self._register_producer(request.connection, name, client)
        return self._end_heartbeat(request.connection, client, consumers, new, faults)

    async def _end_heartbeat(self, connection: Connection, client: Client, groups: list[Group], new: set[str], faults: list[str]) -> Answer:
        """Create what the groups lack, and take the heartbeat for the new ones."""
        for group in groups:
            with _noting(faults, group.name):
                config = await self._names.group_or_new(group.name)
                retry = f"{RETRY_PREFIX}{group.name}"
                if config is not None and self._names.topic(retry) is None and not self._names.is_of_slave:
                    number = max(1, config.retry_queue_nums)
                    await self._names.create(TopicConfig(retry, number, number, topic_sys_flag=FLAG_UNIT_SUB if group.is_of_unit else 0))
                if group.name in new and not connection.is_closed:
                    self._register(connection, group, client)
        if not faults:
            return Answer()
        code = codes.SUCCESS if any(self._groups_of.get(connection, ())) else codes.SYSTEM_ERROR
        return Answer(code, _reported(faults, connection))

    def _register(self, connection: Connection, sent: Group, client: Client) -> None:
        group = self.consumers.get(sent.name)
        grows = group is None or sent.weight > group.weight
        if (group is None and len(self.consumers) >= GROUPS_MAX) or (grows and self._weight > SUBSCRIPTION_BYTES_MAX):
            raise UsageError(f"{len(self.consumers)} groups with {self._weight} bytes of subscriptions are connected already")
        if group is None:
            group = self.consumers[sent.name] = Group(sent.name)
        group.consume_type, group.message_model = sent.consume_type, sent.message_model
        group.consume_from_where = sent.consume_from_where
        known = group.clients.get(connection)
        is_new = known is None or known.client_id != client.client_id
        group.clients[connection] = client
        self._groups_of.setdefault(connection, (set(), set()))[0].add(group.name)
        if self._subscribe(group, sent.subscriptions) or is_new:
            self._notify(group)

    def _register_producer(self, connection: Connection, name: str, client: Client) -> None:
        if name not in self.producers and len(self.producers) >= GROUPS_MAX:
            raise UsageError(f"{GROUPS_MAX} producer groups are connected already")
        self.producers.setdefault(name, {})[connection] = client
        self._id_of.pop(connection, None)
        self._id_of[connection] = client.client_id
        self._groups_of.setdefault(connection, (set(), set()))[1].add(name)

    def _subscribe(self, group: Group, sent: dict[str, Subscription]) -> bool:
        """Set the group's subscriptions from a heartbeat, with the newest version of each topic; return whether topics changed."""
        changed = group.subscriptions.keys() != sent.keys()
        self._weight -= group.weight
        for topic, subscription in sent.items():
            known = group.subscriptions.get(topic)
            if known is None or subscription.version > known.version:
                group.subscriptions[topic] = subscription
        for topic in group.subscriptions.keys() - sent.keys():
            del group.subscriptions[topic]
        self._weight += group.weight
        return changed

    def _notify(self, group: Group) -> None:
        """Notify every member soon that members or subscriptions have changed, so that they rebalance; RocketMQ 5's at a worker do not."""
        config = self._names.group(group.name)
        if config is None or config.notify_consumer_ids_changed_enable:
            if not self._changed:
                asyncio.get_running_loop().call_later(NOTICE_S, self._send_notices)
            self._changed.add(group.name)

    def _send_notices(self) -> None:
        changed, self._changed = self._changed, set()
        for group in [self.consumers[name] for name in changed if name in self.consumers]:
            for connection in [each for each in group.clients if not each.is_local]:
                connection.invoke_oneway(codes.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group.name})

    def unregister(self, request: Request) -> Answer:
        fields = request.frame.fields
        if name := fields.get("producerGroup"):
            self._leave_producers(request.connection, name)
        if name := fields.get("consumerGroup"):
            self._leave(request.connection, name)
            for listener in self.when_left:
                listener(request.connection, name)
        return Answer()

    def closed(self, connection: Connection) -> None:
        """Remove the client of a connection that has ended."""
        consumers, producers = self._groups_of.pop(connection, (set(), set()))
        for name in list(producers):
            self._leave_producers(connection, name)
        for name in list(consumers):
            self._leave(connection, name)

    def expire(self) -> None:
        """Remove clients and locks that have expired."""
        oldest_s = self.now_s() - EXPIRED_S
        for group in list(self.consumers.values()):
            for connection in [each for each, client in group.clients.items() if client.last_heartbeat_s < oldest_s]:
                self._leave(connection, group.name)
        for name, clients in list(self.producers.items()):
            for connection in [each for each, client in clients.items() if client.last_heartbeat_s < oldest_s]:
                self._leave_producers(connection, name)
        now_s = self.now_s()
        for key in [key for key, (_, until_s) in self._locks.items() if until_s < now_s]:
            del self._locks[key]

    def _leave(self, connection: Connection, name: str) -> None:
        group = self.consumers.get(name)
        if group is None or group.clients.pop(connection, None) is None:
            return
        if connection in self._groups_of:
            self._groups_of[connection][0].discard(name)
        if not group.clients:
            del self.consumers[name]
            self._weight -= group.weight
        self._notify(group)

    def _leave_producers(self, connection: Connection, name: str) -> None:
        clients = self.producers.get(name, {})
        clients.pop(connection, None)
        groups = self._groups_of.get(connection, (set(), set()))[1]
        groups.discard(name)
        if not groups:
            self._id_of.pop(connection, None)
        if not clients:
            self.producers.pop(name, None)

    def producer(self, client_id: str) -> Connection | None:
        """Return the newest connection of a producer: an older one may be dead and not closed yet."""
        return next((connection for connection, known in reversed(self._id_of.items()) if known == client_id), None)

    def consumer(self, group: str, client_id: str) -> Connection | None:
        members = self.consumers.get(group)
        found = () if members is None else members.clients.items()
        return next((connection for connection, client in found if client.client_id == client_id), None)

    def consumer_list(self, request: Request) -> Answer:
        """Return the ids of the members of a group that share its queues, from which each computes its own."""
        name = request.text("consumerGroup")
        group = self.consumers.get(name)
        if group is None:
            return Answer(codes.SYSTEM_ERROR, f"no consumer for this group, {name}")
        return Answer(body=write_json({"consumerIdList": group.client_ids}))

    def check_client_config(self, request: Request) -> Answer:
        """Check a subscription that is not a tag expression; a client requests this before it consumes. It takes long."""
        sent = read_object(request.frame.body).get("subscriptionData")
        if sent is not None:
            check_expression(as_object(sent).get("expressionType"), as_object(sent).get("subString"))
        return Answer()

    # ---- locks of ordered queues --------------------------------------------------

    def lock(self, request: Request) -> Answer:
        """Lock queues for one client, or renew its locks; answer with the queues that it holds now."""
        client_id, group, queues = _queues(request)
        now_s = self.now_s()
        got = []
        for queue in queues:
            key = (group, queue["topic"], queue["queueId"])
            holder, topic = self._locks.get(key), self._names.recent_topic(queue["topic"])
            if topic is None or not 0 <= queue["queueId"] < topic.read_queue_nums:
                continue
            if holder is not None and holder[0] != client_id and holder[1] >= now_s:
                continue
            if holder is None and len(self._locks) >= LOCKS_MAX:
                continue
            self._locks[key] = client_id, now_s + LOCK_S
            got.append(queue)
        return Answer(body=write_json({"lockOKMQSet": got}))

    def unlock(self, request: Request) -> Answer:
        client_id, group, queues = _queues(request)
        for queue in queues:
            key = (group, queue["topic"], queue["queueId"])
            if self._locks.get(key, ("", 0.0))[0] == client_id:
                del self._locks[key]
        return Answer()


# ---- requests that members answer ---------------------------------------------------


class Assignments:
    """Tells the clients of a group which queues to take, and whether by pulls or by POP (RocketMQ: QueryAssignmentProcessor)."""

    def __init__(self, names: Names, members: Members, pops: Callable[[str], bool],
                 read_queues: Callable[[str], Awaitable[dict[str, int] | None]]) -> None:
        """`pops`: whether a group is consumed by POP. `read_queues` returns how many queues of a topic each broker of the cluster has
        for readers, None if that is not known now."""
        self._names = names
        self._members = members
        self._pops = pops
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
        self._names.existing(topic)
        if self._names.group(group) is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, "subscription group does not exist")

        def change(modes: dict[str, dict[str, object]]) -> None:
            modes.setdefault(topic, {})[group] = {"consumerGroup": group, "mode": mode, "popShareQueueNum": share, "topic": topic}
            if sum(map(len, modes.values())) > GROUPS_MAX:
                raise UsageError(f"the modes of {GROUPS_MAX} groups are kept already")

        await self._names.request_modes.change(change)
        return Answer()

    async def query(self, request: Request) -> Answer:
        """Return a client's share of the cluster's queues; no list of shares where RocketMQ's client must keep what it has."""
        body = read_object(request.frame.body)
        topic, group, client_id = body.get("topic"), body.get("consumerGroup"), body.get("clientId")
        if not all(isinstance(each, str) for each in (topic, group, client_id)):
            raise WireError("topic, consumerGroup and clientId were expected")
        for name in (str(topic), f"{RETRY_PREFIX}{group}"):
            request.require(name, SUB)
        found = await self._read_queues(str(topic))
        known = [(name, queue_id) for name, number in sorted((found or {}).items()) for queue_id in range(number)]
        mode, queues = self._assigned(str(topic), str(group), str(client_id), known, body)
        rows = None if queues is None else [
            {"messageQueue": {"brokerName": name, "queueId": queue_id, "topic": topic}, "mode": mode} for name, queue_id in queues]
        return Answer(body=write_json({"messageQueueAssignments": rows}))

    def _assigned(self, topic: str, group: str, client_id: str, queues: list[tuple[str, int]], body: Mapping[str, object]
                  ) -> tuple[str, list[tuple[str, int]] | None]:
        modes = self._names.request_modes.table()
        if topic.startswith(RETRY_PREFIX) and (self._pops(group) or any(
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


class Relays:
    """Serves the requests that members of a group answer."""

    def __init__(self, reader: LiveStoreReader, names: Names, members: Members, offsets: GroupOffsets, positions: Positions,
                 address: Address, executor: TurnExecutor) -> None:
        self._reader = reader
        self._names = names
        self._members = members
        self._offsets = offsets
        self._positions = positions
        self._address = address
        self._executor = executor
        self._status_bytes = 0  # of answers to consumer_status that wait for others
        self.handlers: Handlers = {
            codes.INVOKE_BROKER_TO_RESET_OFFSET: self.reset_offset,
            codes.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.consumer_status,
            codes.GET_CONSUMER_RUNNING_INFO: self._ask_member,  # for its report of itself
            codes.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    async def consume_directly(self, request: Request) -> Answer:
        """Have a member consume one message now, independent of the group's offsets."""
        try:
            offset = decode_message_id(request.text("msgId"))[1]
        except FormatError as error:
            return Answer(codes.SYSTEM_ERROR, str(error))
        return await self._ask_member(request, await self._positions.record_at(request, offset))

    async def _ask_member(self, request: Request, body: bytes = b"") -> Answer:
        group, client_id = request.text("consumerGroup"), request.text("clientId")
        connection = self._members.consumer(group, client_id)
        if connection is None:
            return Answer(codes.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        signed = {"AccessKey", "Signature", "SecurityToken"}  # with these the member could sign in as the tool
        fields = {name: text for name, text in request.frame.fields.items() if name not in signed} | {
            "brokerName": self._address.broker_name}
        try:
            answer = await connection.invoke(request.frame.code, fields, body)
        except TimeoutError as error:
            return Answer(codes.CONSUME_MSG_TIMEOUT, f"consumer <{group}> <{client_id}> Timeout: {error}")
        except OSError as error:
            return Answer(codes.SYSTEM_ERROR, f"invoke consumer <{group}> <{client_id}> Exception: {error}")
        if not 0 <= answer.code <= CODE_MAX:
            return Answer(codes.SYSTEM_ERROR, f"consumer <{group}> <{client_id}> answered with the code {answer.code}")
        return Answer(answer.code, answer.remark, answer.fields, answer.body)

    async def consumer_status(self, request: Request) -> Answer:
        """Return the progress in a topic that each member of a group reports."""
        topic, group, only = request.text("topic"), request.text("group"), request.frame.fields.get("clientAddr", "").strip()
        members = self._members.consumers.get(group)
        if members is None:
            return Answer(codes.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{group}]")
        asked = [(client.client_id, connection) for connection, client in members.clients.items() if only in ("", client.client_id)]

        kept = 0

        async def ask(connection: Connection) -> bytes:
            nonlocal kept
            try:
                answer = await connection.invoke(codes.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": topic, "group": group},
                                            timeout_s=STATUS_TIMEOUT_S)
            except OSError:
                return b""
            size_bytes = len(answer.body)
            if answer.code != codes.SUCCESS or size_bytes > min(JSON_BYTES_MAX, STATUS_BYTES_MAX - self._status_bytes):
                return b""
            self._status_bytes += size_bytes
            kept += size_bytes
            return answer.body

        try:
            bodies = await asyncio.gather(*(ask(connection) for _, connection in asked[:MEMBERS_ASKED_MAX]))
        finally:
            self._status_bytes -= kept
        tables = {client_id: Raw(table) for (client_id, _), body in zip(asked, bodies, strict=False) if (table := queue_table(body))}
        return Answer(body=write_json({"consumerTable": tables, "messageQueueTable": {}}))

    async def reset_offset(self, request: Request) -> Answer:
        """Set a connected group's offsets to a time, in the file and in its members, which continue there.

        RocketMQ 5's tools name one queue, which alone is set then, and may name its offset instead of a time.
        """
        topic, group, time_ms = request.text("topic"), request.text("group"), request.integer("timestamp", bits=64)
        found = self._names.topic(topic)
        if found is None:
            return Answer(codes.SYSTEM_ERROR, f"[reset-offset] reset offset failed, no topic in this broker. topic={topic}")
        only, offset = request.integer("queueId", -1), request.integer("offset", -1, bits=64)
        refuse_if(f"queueId[{only}] is illegal, {topic} has {found.read_queue_nums}" if only >= found.read_queue_nums else "")
        refuse_if(group_fault(group) or self._offsets.why_not(group, is_of_tool=True), codes.NO_PERMISSION)
        members = self._members.consumers.get(group)
        committed = self._offsets.of_group(group).get(topic, {})
        if members is None and not committed:
            return Answer(codes.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
        if members is None:  # a tool then sets each queue's offset itself
            return Answer(codes.CONSUMER_NOT_ONLINE, f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic} "
                                                     f"Timestamp: {time_ms}")
        is_forced = request.flag("isForce")

        def find() -> dict[int, int]:
            offsets = {}
            for queue_id in range(found.read_queue_nums) if only < 0 else (only,):
                low, high = self._reader.queue_range(topic, queue_id, LEVEL)
                if only >= 0 <= offset:
                    refuse_if("" if low <= offset <= high else f"Target offset {offset} not in consume queue range [{low}-{high}]")
                    offsets[queue_id] = offset
                    continue
                wanted = high if time_ms < 0 else self._reader.offset_by_time(topic, queue_id, time_ms, LEVEL)
                at = committed.get(queue_id, low)
                offsets[queue_id] = wanted if is_forced or wanted < at else at
            return offsets

        offsets = await self._executor.run(find)
        await self._offsets.rewrite(lambda table: set_offsets(self._reader.root, table, group_key(topic, group), offsets), group, topic,
                                    offsets)
        broker_name = self._address.broker_name
        table = write_json({"offsetTable": ObjectKeys(
            {(("brokerName", broker_name), ("queueId", queue_id), ("topic", topic)): offset for queue_id, offset in offsets.items()})})
        body = table if request.frame.language != "CPP" else write_json({"offsetTable": [  # its JSON does not support objects as keys
            {"brokerName": broker_name, "offset": offset, "queueId": queue_id, "topic": topic} for queue_id, offset in offsets.items()]})
        fields = {"topic": topic, "group": group, "timestamp": str(time_ms), "isForce": str(is_forced).lower()}
        for connection in list(members.clients):
            connection.invoke_oneway(codes.RESET_CONSUMER_CLIENT_OFFSET, fields, body)
        return Answer(body=table)


def queue_table(body: bytes) -> bytes:
    """Return the text of messageQueueTable in a client's answer, empty if there is none.

    Its keys are objects, which JSON does not allow, so the gateway does not decode it: the tool uses the same dialect.
    """
    _, _, rest = body.partition(b'"messageQueueTable":')
    depth = 0
    for found in _BRACES.finditer(rest) if rest.startswith(b"{") else ():
        depth += {b"{": 1, b"}": -1}.get(found.group(), 0)
        if depth == 0:
            return rest[:found.end()]
    return b""


# ---- fields of a heartbeat ----------------------------------------------------------


def _queues(request: Request) -> tuple[str, str, list[dict[str, Any]]]:
    body = read_object(request.frame.body)
    found = []
    for each in _list(body.get("mqSet"), QUEUES_MAX):
        queue = as_object(each)
        broker, queue_id = queue.get("brokerName"), _number(queue.get("queueId"))
        if not isinstance(broker, str) or type(queue_id) is not int:
            raise WireError("a queue without its broker's name or its number")
        found.append({"brokerName": broker, "queueId": queue_id, "topic": _name(queue.get("topic"), topic_fault)})
    return _client_id(body.get("clientId")), _name(body.get("consumerGroup"), group_fault), found


@contextlib.contextmanager
def _noting(faults: list[str], name: str) -> Iterator[None]:
    """Note why the block exceeds a limit."""
    try:
        yield
    except UsageError as error:
        faults.append(f"{name}: {error}")


def _reported(faults: list[str], connection: Connection) -> str:
    """Report what of a heartbeat does not count; return it for the answer."""
    connection.report(f"a heartbeat of {connection.address} counts only in part, or not at all: {faults[0]}")
    return "; ".join(faults[:FAULTS_MAX])


def _first(most: int, what: str, sent: object, faults: list[str]) -> list[Any]:
    """Return the first rows of a list in a heartbeat."""
    found = _list(sent)
    if len(found) > most:
        faults.append(f"{len(found)} {what}: at most {most} are taken")
    return found[:most]


def _group_of(sent: object, faults: list[str]) -> Group:
    """Return a group of a heartbeat; `faults` gets a sentence about each subscription that is left out."""
    fields = as_object(sent)
    name = _name(fields.get("groupName"), group_fault)
    subscriptions: dict[str, Subscription] = {}
    for each in _first(SUBSCRIPTIONS_MAX, f"topics of {name}", fields.get("subscriptionDataSet"), faults):
        one = as_object(each)
        text, version, kind = one.get("subString"), _number(one.get("subVersion", 0)), one.get("expressionType")
        if not isinstance(text, str | None) or type(version) is not int or not isinstance(kind, str | None):
            raise WireError("a subscription whose fields have wrong types")
        topic = _name(one.get("topic"), topic_fault)
        if kind not in (None, "", TAG, SQL):
            faults.append(f"{topic}: a subscription that is neither {TAG} nor {SQL}")
        elif len(text or "") > SUBSCRIPTION_CHARS_MAX:
            faults.append(f"{topic}: a subscription of more than {SUBSCRIPTION_CHARS_MAX} characters")
        else:
            subscriptions[topic] = subscription_of(topic, text, version, kind)
    return Group(name, _value_of(fields.get("consumeType"), _TYPES, PASSIVELY), _value_of(fields.get("messageModel"), _MODELS, CLUSTERING),
                 _value_of(fields.get("consumeFromWhere"), _STARTS, FROM_LAST), fields.get("unitMode") is True, subscriptions=subscriptions)


def _number(value: object) -> object:
    """Return a number also if it was sent as text: as fastjson, and RocketMQ's client for C++ sends a version so."""
    return int(value) if isinstance(value, str) and is_number(value) else value


def _value_of(sent: object, names: tuple[str, ...], without: str) -> str:
    """Return the name of an enum's value, which RocketMQ's client for C++ sends by its number."""
    if type(sent) is int and 0 <= sent < len(names):
        return names[sent]
    if not (sent is None or isinstance(sent, str) and len(sent) < 64):
        raise WireError("a group whose type, model or start is neither a short text nor its number")
    return sent or without


def _client_id(value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > CLIENT_ID_CHARS_MAX:
        raise WireError(f"a client id that is not text of 1 to {CLIENT_ID_CHARS_MAX} characters")
    return value


def _name(value: object, fault_of: Callable[[str | None], str]) -> str:
    if not isinstance(value, str):
        raise WireError("a name that is not text")
    if fault := fault_of(value):
        raise WireError(fault)
    return value


def _list(value: object, most: int = JSON_BYTES_MAX) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise WireError(f"a JSON list of at most {most} was expected")
    return value
