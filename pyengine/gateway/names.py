"""Topics and groups for the gateway's clients: valid names, existing ones, their queues, and their routes.

Changes of topics.json and subscriptionGroup.json by other processes count from the next request on. (The checkpointer adds a topic
that a program creates by a put.) RocketMQ's system topics and groups exist without an entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyengine.engine_config import SLAVE, EngineConfig
from pyengine.errors import DiskError, EngineError, FormatError, UsageError
from pyengine.formats import constants
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import encode_host, java_text
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config, file_stamp, parse_properties
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Handlers, Request, RequestRefusedError, TurnExecutor
from pyengine.gateway.tasks import Pending
from pyengine.gateway.wire import IntKeys, write_json
from pyengine.settings import join_address
from pyengine.storage.config_table import (
    BROKERS_TOPICS,
    DEFAULT_TOPIC,
    FORBIDDEN_TOPICS,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    NamedRows,
    SubscriptionGroup,
    SubscriptionGroups,
    TopicConfig,
    TopicConfigs,
)
from pyengine.storage.durable_file import ConfigFile, exclusive
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

RETRY_PREFIX, DEAD_PREFIX = "%RETRY%", "%DLQ%"
GROUP_CHARS_MAX = constants.TOPIC_BYTES_MAX - len(RETRY_PREFIX)  # a group's retry topic must be a valid topic
TOPICS_MAX = 10_000             # that clients may create by sending to them; tools may create more
TOPICS_OF_TOOLS_MAX = 50_000    # up to which tools may create topics, and groups that exist get theirs
RECENT_S = 0.05                 # after which sends see a change of topics
GROUPS_MAX = 10_000             # that clients may create by their heartbeats, and tools
KEY_VALUES_CHARS_MAX = 1 << 20  # of all keys and values of tools
ORDERS_NAMESPACE = "ORDER_TOPIC_CONFIG"  # of updateOrderConf's values, by topic
ORDER_CHARS_MAX = 1024          # of such a value
ORDER_MESSAGE_ENABLE = "orderMessageEnable"
SETTINGS_BYTES_MAX = 2048       # of one update of the broker's or the name server's settings
FLAG_UNIT, FLAG_UNIT_SUB = 1, 2  # bits of topicSysFlag (TopicSysFlag)
OWN_GROUP_PREFIXES = ("CID_RMQ_SYS_", "CID_PYENGINE_")  # clients cannot change their offsets
REPLACED = "a master of a higher term has replaced this one, or one of the same term goes on"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
SYSTEM_TOPICS = BROKERS_TOPICS | FORBIDDEN_TOPICS | {TRACE_TOPIC}
SYSTEM_GROUPS = ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
                 "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER")  # which a broker always has
_NAME_CHARS = frozenset("%|_-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_READ_WRITE = PERM_READ | PERM_WRITE

Table = TypeVar("Table")
Files = TypeVar("Files")


def topic_fault(topic: str | None) -> str:
    """Return RocketMQ's sentence about an invalid topic name (TopicValidator), "" for a valid one."""
    if topic is None or not topic.strip():
        return "The specified topic is blank."
    if not _NAME_CHARS.issuperset(topic):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(topic) > constants.TOPIC_BYTES_MAX:
        return "The specified topic is longer than topic max length."
    return ""


def group_fault(group: str | None) -> str:
    """Return what is wrong with a group's name, "" for a valid one. It is shorter than RocketMQ's 255, for the retry topic."""
    if group is None or not group.strip():
        return "the specified group is blank"
    if not _NAME_CHARS.issuperset(group):
        return "the specified group contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(group) > GROUP_CHARS_MAX:
        return f"the specified group is longer than group max length {GROUP_CHARS_MAX}"
    return ""


class _CachedFile(Generic[Table]):
    """Caches a small file's content until the file changes. Threads may share it."""

    def __init__(self, path: Path, read: Callable[[], Table]) -> None:
        self._path = path
        self._read = read
        self._known: tuple[object, Table] | None = None  # the file's stamp and content
        self._checked_s = 0.0
        self._changes = 0  # in threads, now
        self._is_read_ahead = False
        self._counting = threading.Lock()

    def recent(self) -> Table:
        """Return the content, at most RECENT_S old, because a check of the file takes nearly a tenth of a send."""
        known = self._known
        return known[1] if known is not None and time.monotonic() - self._checked_s < RECENT_S else self.table()

    def table(self) -> Table:
        """Return the content; during changing() that of before, after read_ahead() that of its last call."""
        self._checked_s = time.monotonic()
        known = self._known
        return known[1] if known is not None and (self._changes or self._is_read_ahead) else self._read_now()

    def read_ahead(self) -> None:
        """Read a changed file; for a thread that does so all the time."""
        self._read_now()
        self._is_read_ahead = True

    @contextlib.contextmanager
    def changing(self, files: Files) -> Iterator[Files]:
        """For a thread that changes the file by `files`: it reads the file after the block, so that the event loop need not."""
        with self._counting:
            self._changes += 1
        try:
            yield files
            self._read_now()
        finally:
            with self._counting:
                self._changes -= 1

    def _read_now(self) -> Table:
        known, stamp = self._known, None
        with contextlib.suppress(OSError):
            stamp = file_stamp(os.stat(self._path))
        if known is None or stamp != known[0]:
            try:
                known = self._known = stamp, self._read()
            except DiskError:  # no descriptor is free: use the known content until the next check
                if known is None:
                    raise
        return known[1]


class _ToolsFile(_CachedFile[dict[str, Any]]):
    """A file of config/ in which tools store texts or settings: maps of them, `depth` deep, below `key` if it has one."""

    def __init__(self, root: str | os.PathLike[str], executor: TurnExecutor, name: str, key: str, depth: int, kind: type,
                 chars_max: int = 16 << 20) -> None:
        def decode(text: str) -> Any:
            document = decode_config(text)
            try:
                table = document[key] if key else document
                if all(isinstance(leaf, kind) for leaf in _leaves(table, depth)):
                    return table
            except PARSE_ERRORS as error:
                raise FormatError(f"not what tools store: {error!r}") from error
            raise FormatError(f"a value that is no {kind.__name__}")

        self._executor, self._key, self._chars_max = executor, key, chars_max
        self._file: ConfigFile[Any] = ConfigFile(StorePaths(root).config / name, decode)
        super().__init__(self._file.path, lambda: self._file.read().value or {})

    async def change(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the table, durably before this returns; empty maps are left out. UsageError if it would be too long."""
        await self._executor.run(self._change, change)

    def _change(self, change: Callable[[dict[str, Any]], object]) -> None:
        with exclusive(self._path):
            table = self._file.read_to_change().value or {}
            change(table)
            table = {name: each for name, each in table.items() if each}
            text = encode_config({self._key: table} if self._key else table)
            if len(text) > self._chars_max:
                raise UsageError(f"what tools have stored would take {len(text)} characters: delete some")
            self._file.write(text)


def _leaves(value: Any, depth: int) -> list[Any]:
    """Return what is in maps of maps; one of PARSE_ERRORS for another structure."""
    return [leaf for each in value.values() for leaf in _leaves(each, depth - 1)] if depth else [value]


def topics_document(topics: Mapping[str, TopicConfig], version: Mapping[str, int], perm_mask: int = -1) -> dict[str, object]:
    """Return topics as brokers tell them to tools, slaves and name servers, each with the rights that are in `perm_mask`."""
    return {"dataVersion": version, "topicConfigTable": {name: topic_fields(topic, perm_mask) for name, topic in topics.items()}}


def topic_fields(topic: TopicConfig, perm_mask: int = -1) -> dict[str, object]:
    return {"order": topic.order, "perm": topic.perm & perm_mask, "readQueueNums": topic.read_queue_nums,
            "topicFilterType": topic.topic_filter_type, "topicName": topic.topic, "topicSysFlag": topic.topic_sys_flag,
            "writeQueueNums": topic.write_queue_nums}


@dataclass(frozen=True, slots=True)
class Address:
    """The gateway's address for clients: host:port of its broker, the names of broker and cluster, and the address in records.

    A record has no room for a host's name, whose number may be unknown or change: then it is that of the setting `store_host`.
    """

    broker: str
    broker_name: str
    cluster: str
    store_host: str

    @classmethod
    def of(cls, config: EngineConfig, port: int) -> Address:
        broker = store_host = join_address(config.gateway_advertised_host or config.gateway_listen_host or "0.0.0.0", port)
        try:
            encode_host(broker)
        except UsageError:
            store_host = config.store_host
        return cls(broker, config.broker_name, config.broker_cluster_name, store_host)


class Names:
    """The topics and groups of one store. Used in the loop's thread; it writes files in the executor."""

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig, executor: TurnExecutor) -> None:
        self.root = root
        self._config = config
        self._executor = executor
        self.is_of_slave = config.broker_role == SLAVE  # whose tables are its master's
        self.suggests_slaves = config.slave_read_enable  # to groups that are far behind
        self.topic_configs = TopicConfigs(root)
        self.group_configs = SubscriptionGroups(root)
        self._topics = _CachedFile(self.topic_configs.path, self.topic_configs.read)
        self._groups = _CachedFile(self.group_configs.path, self.group_configs.read)
        # Values that tools store, by namespace and key (RocketMQ: KVConfigManager, in its name server).
        self.key_values = _ToolsFile(root, executor, "kvConfig.json", "configTable", 2, str, KEY_VALUES_CHARS_MAX)
        self.name_server_settings = _ToolsFile(root, executor, "namesrvConfig.json", "", 1, str)
        # How groups consume, by topic and group, where a tool has set it (RocketMQ 5: MessageRequestModeManager).
        self.request_modes = _ToolsFile(root, executor, "messageRequestMode.json", "messageRequestModeMap", 2, dict)
        state_file = ReplicationStateFile(root)
        self._replication = _CachedFile(state_file.path, lambda: state_file.read().state)
        self._listed: NamedRows[TopicConfig] | None = None
        self._lists: dict[str, bytes] = {}  # by their names, of `_listed`
        self._making: Pending[str, asyncio.Future[Any]] = Pending()
        cluster = config.broker_cluster_name
        inherited = _READ_WRITE | PERM_INHERIT
        self._system = {topic.topic: topic for topic in (
            TopicConfig(cluster, 16, 16, inherited), TopicConfig(config.broker_name, 1, 1, inherited),
            TopicConfig("SELF_TEST_TOPIC", 1, 1), TopicConfig("BenchmarkTest", 1024, 1024),
            TopicConfig("OFFSET_MOVED_EVENT", 1, 1),
            TopicConfig(constants.SCHEDULE_TOPIC, len(config.delay_levels_ms), len(config.delay_levels_ms)),
            TopicConfig(constants.TRANSACTION_HALF_TOPIC, 1, 1), TopicConfig(constants.TRANSACTION_OP_TOPIC, 1, 1),
            TopicConfig(constants.TRANSACTION_DISCARD_TOPIC, 1, 1), TopicConfig(f"{cluster}_REPLY_TOPIC", 1, 1),
        )}
        if config.auto_create_topic_enable:
            number = config.client_topic_queue_nums
            self._system[DEFAULT_TOPIC] = TopicConfig(DEFAULT_TOPIC, number, number, inherited)
        self._system_groups = {name: SubscriptionGroup(name) for name in SYSTEM_GROUPS}

    async def read_ahead(self) -> None:
        """Read topics and groups in a thread if they have changed; the looks of the loop's thread read them no more."""
        for each in (self._topics, self._groups):
            await self._executor.run(each.read_ahead)

    # ---- topics -------------------------------------------------------------------

    def topic(self, name: str) -> TopicConfig | None:
        """Return a topic of topics.json, or a system topic; None if it does not exist."""
        return self._topics.table().rows.get(name) or self._system.get(name)

    def existing(self, name: str, advice: str = "") -> TopicConfig:
        found = self.topic(name)
        if found is None:
            raise RequestRefusedError(codes.TOPIC_NOT_EXIST, f"topic[{name}] not exist{advice}")
        return found

    def recent_topic(self, name: str) -> TopicConfig | None:
        return self._topics.recent().rows.get(name) or self._system.get(name) or self._topics.table().rows.get(name)

    def recent_topics(self) -> Mapping[str, TopicConfig]:
        """Return the topics of topics.json, at most RECENT_S old; the same object while the file is the same."""
        return self._topics.recent().rows

    def file_of_topics(self) -> NamedRows[TopicConfig]:
        """Return the content of topics.json now; the same object while the file is the same."""
        return self._topics.table()

    def with_system_topics(self, table: NamedRows[TopicConfig]) -> dict[str, TopicConfig]:
        """Return these topics and the system topics; threads may call it."""
        return self._system | table.rows

    def replication_state(self) -> ReplicationState | None:
        """Return the store's role and term as its replicator has noted them; None if it never replicated."""
        return self._replication.table()

    @property
    def is_fenced(self) -> bool:
        """Whether this was a master, and another has replaced it."""
        noted = self.replication_state()
        return not self.is_of_slave and noted is not None and noted.is_fenced

    @property
    def why_no_commit(self) -> str:
        """Why offsets and acknowledgements of clients are not this store's, but a master's; "" if they are."""
        if self.is_of_slave:
            return "this is a slave, whose offsets are its master's"
        return REPLACED if self.is_fenced else ""

    def of_topics(self, name: str, make: Callable[[dict[str, TopicConfig], dict[str, int]], bytes]) -> bytes:
        """Return what `make` makes of all topics and their dataVersion, once for each content of topics.json: it may be long."""
        table = self._topics.table()
        if table is not self._listed:
            self._listed, self._lists = table, {}
        if name not in self._lists:
            self._lists[name] = make(self.with_system_topics(table), table.data_version)
        return self._lists[name]

    def is_system(self, topic: str) -> bool:
        return topic in self._system or topic in SYSTEM_TOPICS

    async def create(self, topic: TopicConfig) -> TopicConfig:
        """Add a topic, durably before this returns; return it, or that of a faster process. UsageError if there are too many."""
        if self.is_of_slave:
            raise EngineError(f"the topic {topic.topic} is not created on a slave: its master has the topics")
        group = topic.topic.removeprefix(RETRY_PREFIX).removeprefix(DEAD_PREFIX)
        most = TOPICS_OF_TOOLS_MAX if group != topic.topic and self.group(group) else TOPICS_MAX
        if len(self._topics.table().rows) >= most:
            raise UsageError(f"there are {most} topics already: create {topic.topic} by hand")

        def enter() -> TopicConfig:
            with self.changing_topics() as files:
                return files.ensure(topic)

        made: TopicConfig = await self._once(f"topic {topic.topic}", enter)
        return made

    def changing_topics(self) -> contextlib.AbstractContextManager[TopicConfigs]:
        return self._topics.changing(self.topic_configs)

    async def create_for_send(self, name: str, default: str | None, queue_nums: int, *, is_of_unit: bool = False) -> TopicConfig | None:
        """Create the topic of a first message, like the default topic that its client names; None if that is not allowed."""
        model = self.topic(default) if default else None
        is_of_retries = name.startswith(RETRY_PREFIX)
        flag = (FLAG_UNIT_SUB if is_of_retries else FLAG_UNIT) if is_of_unit else 0
        if model is None or not model.perm & PERM_INHERIT:
            return await self.create(TopicConfig(name, 1, 1, topic_sys_flag=flag)) if is_of_retries else None
        number = max(1, min(queue_nums, model.write_queue_nums))
        return await self.create(replace(
            model, topic=name, read_queue_nums=number, write_queue_nums=number, perm=model.perm & ~PERM_INHERIT,
            topic_sys_flag=flag, order=False, more={}))

    # ---- groups -------------------------------------------------------------------

    def group(self, name: str) -> SubscriptionGroup | None:
        return self._groups.table().rows.get(name) or self._system_groups.get(name)

    def groups(self) -> dict[str, SubscriptionGroup]:
        return self._system_groups | self._groups.table().rows

    @property
    def groups_version(self) -> dict[str, int]:
        return self._groups.table().data_version

    async def group_or_new(self, name: str) -> SubscriptionGroup | None:
        """Return the group, a new one if that may be created; a slave's is in no file. UsageError if there are GROUPS_MAX already."""
        found = self.group(name)
        if found is not None or group_fault(name) or not self._config.auto_create_subscription_group:
            return found
        if self.is_of_slave:
            return SubscriptionGroup(name)

        def enter() -> SubscriptionGroup:
            with self.changing_groups() as files:
                return files.enter(SubscriptionGroup(name), groups_max=GROUPS_MAX)

        made: SubscriptionGroup = await self._once(f"group {name}", enter)
        return made

    def changing_groups(self) -> contextlib.AbstractContextManager[SubscriptionGroups]:
        return self._groups.changing(self.group_configs)

    async def _once(self, key: str, make: Callable[[], Any]) -> Any:
        """Call `make` in the executor; concurrent calls with the same key share its result."""
        return await asyncio.shield(self._making.once(key, lambda: self._executor.run(make)))


@dataclass(slots=True)
class Broker:
    """The brokers of one name: addresses by number, of which 0 is the master's. wipeWritePerm clears `may_write`."""

    cluster: str
    addresses: dict[int, str]
    may_write: bool = True


class Routes:
    """What a name server's routes are made of: here this gateway's broker alone, as number 0, by its files."""

    def __init__(self, names: Names, address: Address) -> None:
        self._names = names
        self._name = address.broker_name
        self.brokers: Mapping[str, Broker] = {address.broker_name: Broker(address.cluster, {0: address.broker})}

    def rows_of(self, topic: str) -> Mapping[str, TopicConfig]:
        """Return a topic as each broker has it, by the broker's name."""
        row = self._names.topic(topic)
        return {} if row is None else {self._name: row}

    def topic_count(self, broker: str) -> int:
        return len(self._names.with_system_topics(self._names.file_of_topics()))

    def of_topics(self, name: str, make: Callable[[Mapping[str, TopicConfig]], bytes]) -> bytes:
        """Return what `make` makes of all topics, once for each change of them; `name` tells the lists apart."""
        return self._names.of_topics(name, lambda topics, _: make(topics))

    def drop_topic(self, topic: str) -> None:
        """Leave a topic out until a broker registers it again; the own broker's stays while it has it."""


class NameServer:
    def __init__(self, names: Names, routes: Routes) -> None:
        self._names = names
        self._routes = routes
        self.handlers: Handlers = {
            codes.GET_ROUTEINFO_BY_TOPIC: self.route,
            codes.GET_BROKER_CLUSTER_INFO: self.cluster,
            codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topic_list,
            codes.GET_TOPICS_BY_CLUSTER: self.topic_list,
            codes.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.system_topics,
            codes.GET_UNIT_TOPIC_LIST: self.unit_topics,
            codes.GET_HAS_UNIT_SUB_TOPIC_LIST: self.unit_topics,
            codes.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self.unit_topics,
            codes.WIPE_WRITE_PERM_OF_BROKER: self.set_write_perm,
            codes.ADD_WRITE_PERM_OF_BROKER: self.set_write_perm,
            codes.PUT_KV_CONFIG: self.put_key_value,
            codes.GET_KV_CONFIG: self.key_value,
            codes.DELETE_KV_CONFIG: self.delete_key_value,
            codes.GET_KVLIST_BY_NAMESPACE: self.key_values,
            codes.GET_NAMESRV_CONFIG: self.config,
            codes.UPDATE_NAMESRV_CONFIG: self.update_config,
            codes.DELETE_TOPIC_IN_NAMESRV: self.drop_topic,
        }

    def route(self, request: Request) -> Answer:
        """Return the route of a topic. As from RocketMQ, clients before 4.9.4 get brokers' numbers as bare integers."""
        name = request.frame.fields.get("topic")
        brokers, rows = self._routes.brokers, self._routes.rows_of(name) if name else {}
        if name is None or not rows:
            return Answer(codes.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {name or 'null'}{codes.FAQ}")
        strict = request.frame.version >= _STRICT_JSON_VERSION or request.flag("acceptStandardJsonOnly")
        return Answer(body=write_json(self._order(name, rows) | {
            "brokerDatas": [_broker_data(each, brokers[each], strict) for each in rows],
            "filterServerTable": {},
            "queueDatas": [{"brokerName": each, "perm": row.perm if brokers[each].may_write else row.perm & ~PERM_WRITE,
                            "readQueueNums": row.read_queue_nums, "topicSysFlag": row.topic_sys_flag,
                            "writeQueueNums": row.write_queue_nums} for each, row in rows.items()]}))

    def _order(self, topic: str, rows: Mapping[str, TopicConfig]) -> dict[str, str]:
        """Return updateOrderConf's value of a topic, for its route, as far as every client can parse it and all its queues exist:
        tools need no key to set it, and clients create the queues in a route."""
        text = self._names.key_values.table().get(ORDERS_NAMESPACE, {}).get(topic, "") if self._is_ordered_by_values else ""
        queues: dict[str, int] = {}
        for piece in text.split(";") if len(text) <= ORDER_CHARS_MAX else ():
            name, _, number = piece.partition(":")
            if name in rows and name not in queues and number.isascii() and number.isdecimal():
                queues[name] = min(int(number), rows[name].write_queue_nums)
        return {"orderTopicConf": ";".join(f"{name}:{number}" for name, number in queues.items())} if queues else {}

    @property
    def _is_ordered_by_values(self) -> bool:
        """Whether routes contain updateOrderConf's value of their topic (RocketMQ's orderMessageEnable)."""
        return self._names.name_server_settings.table().get(ORDER_MESSAGE_ENABLE) == "true"

    def cluster(self, request: Request) -> Answer:
        brokers, clusters = self._routes.brokers, dict[str, list[str]]()
        for name, broker in brokers.items():
            clusters.setdefault(broker.cluster, []).append(name)
        return Answer(body=write_json({
            "brokerAddrTable": {name: _broker_data(name, broker, strict=False) for name, broker in brokers.items()},
            "clusterAddrTable": clusters}))

    def topic_list(self, request: Request) -> Answer:
        cluster = request.frame.fields.get("cluster")
        if cluster is not None and all(broker.cluster != cluster for broker in self._routes.brokers.values()):
            return Answer(body=write_json({"topicList": []}))
        return Answer(body=self._routes.of_topics("names", lambda topics: write_json({"topicList": sorted(topics)})))

    def system_topics(self, request: Request) -> Answer:
        """Return the names of clusters and brokers, which are topics in RocketMQ, and one broker's address."""
        brokers = self._routes.brokers
        names = dict.fromkeys([*(broker.cluster for broker in brokers.values()), *brokers])
        addresses = [address for broker in brokers.values() for address in broker.addresses.values()]
        return Answer(body=write_json(({"brokerAddr": addresses[0]} if addresses else {}) | {"topicList": list(names)}))

    def unit_topics(self, request: Request) -> Answer:
        """Return topics by the bits of their topicSysFlag: of a unit, with subscribers of a unit, or only the latter."""
        code = request.frame.code

        def is_wanted(flags: int) -> bool:
            if code == codes.GET_UNIT_TOPIC_LIST:
                return bool(flags & FLAG_UNIT)
            return bool(flags & FLAG_UNIT_SUB) and not (flags & FLAG_UNIT and code == codes.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST)

        return Answer(body=self._routes.of_topics(f"of units, {code}", lambda topics: write_json({"topicList": sorted(
            name for name, topic in topics.items() if is_wanted(topic.topic_sys_flag))})))

    def set_write_perm(self, request: Request) -> Answer:
        """Mark a broker in routes as writable or not, so that producers leave it; messages that they send anyway are stored."""
        may_write, name = request.frame.code == codes.ADD_WRITE_PERM_OF_BROKER, request.text("brokerName")
        broker = self._routes.brokers.get(name)
        if broker is not None:
            broker.may_write = may_write
        return Answer(fields={"addTopicCount" if may_write else "wipeTopicCount":
                              str(0 if broker is None else self._routes.topic_count(name))})

    def drop_topic(self, request: Request) -> Answer:
        self._routes.drop_topic(request.text("topic"))
        return Answer()

    # ---- keys and values of tools -------------------------------------------------

    async def put_key_value(self, request: Request) -> Answer:
        namespace, key, value = (request.text(name) for name in ("namespace", "key", "value"))
        await self._names.key_values.change(lambda table: table.setdefault(namespace, {}).update({key: value}))
        return Answer()

    async def delete_key_value(self, request: Request) -> Answer:
        namespace, key = request.text("namespace"), request.text("key")
        await self._names.key_values.change(lambda table: table.get(namespace, {}).pop(key, None))
        return Answer()

    def key_value(self, request: Request) -> Answer:
        namespace, key = request.text("namespace"), request.text("key")
        value = self._names.key_values.table().get(namespace, {}).get(key)
        if value is None:
            return Answer(codes.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace} Key: {key}")
        return Answer(fields={"value": value})

    def key_values(self, request: Request) -> Answer:
        namespace = request.text("namespace")
        table = self._names.key_values.table().get(namespace)
        if not table:
            return Answer(codes.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return Answer(body=write_json({"table": table}))

    def config(self, request: Request) -> Answer:
        ordered = str(self._is_ordered_by_values).lower()
        return Answer(body=f"clusterTest=false\n{ORDER_MESSAGE_ENABLE}={ordered}\nproductEnvName=center\n".encode())

    async def update_config(self, request: Request) -> Answer:
        """Change orderMessageEnable, durably; refuse settings that RocketMQ's name server accepts without effect."""
        body = request.frame.body
        if len(body) > SETTINGS_BYTES_MAX:
            return Answer(codes.SYSTEM_ERROR, f"{len(body):,} bytes of settings are more than {SETTINGS_BYTES_MAX:,}")
        lines = parse_properties(java_text(body))
        if lines.keys() & {"kvConfigPath", "configStorePath"}:
            return Answer(codes.NO_PERMISSION, "Can not update config path")
        if others := lines.keys() - {ORDER_MESSAGE_ENABLE}:
            return Answer(codes.SYSTEM_ERROR, f"{', '.join(sorted(others))}: the gateway's name server has one setting, "
                                              f"{ORDER_MESSAGE_ENABLE}")
        value = lines.get(ORDER_MESSAGE_ENABLE, "").lower()
        if value not in ("true", "false"):
            return Answer(codes.SYSTEM_ERROR, f"{ORDER_MESSAGE_ENABLE}={value}: give true or false")
        await self._names.name_server_settings.change(lambda settings: settings.update({ORDER_MESSAGE_ENABLE: value}))
        return Answer()


def _broker_data(name: str, broker: Broker, strict: bool) -> dict[str, object]:
    addresses: object = {str(number): address for number, address in broker.addresses.items()} if strict else IntKeys(broker.addresses)
    return {"brokerAddrs": addresses, "brokerName": name, "cluster": broker.cluster}


_STRICT_JSON_VERSION = 401  # MQVersion V4_9_4
