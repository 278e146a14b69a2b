"""Topics and groups as the gateway's clients see them: what a name may be, which there are, their queues, and their routes.

RocketMQ's topics.json and subscriptionGroup.json are the truth, as they are for its broker; files that others change are
noticed at the next question. (A topic that a program makes by a put is entered by the checkpointer.) RocketMQ's own
topics and groups are there without being written down.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyengine.engine_config import EngineConfig
from pyengine.errors import DiskError, FormatError, UsageError
from pyengine.formats.constants import (
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TOPIC_BYTES_MAX,
    TRANSACTION_DISCARD_TOPIC,
    TRANSACTION_HALF_TOPIC,
    TRANSACTION_OP_TOPIC,
)
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Handlers, Request
from pyengine.gateway.wire import IntKeys, write_json
from pyengine.storage.config_table import (
    BROKERS_TOPICS,
    DEFAULT_TOPIC,
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    SubscriptionGroup,
    SubscriptionGroups,
    TopicConfig,
    TopicConfigs,
    exclusive,
)
from pyengine.storage.durable_file import ConfigFile

RETRY_PREFIX, DEAD_PREFIX = "%RETRY%", "%DLQ%"
GROUP_CHARS_MAX = TOPIC_BYTES_MAX - len(RETRY_PREFIX)  # a group's retry topic has to be a topic, too
TOPICS_MAX = 10_000             # that clients may create by sending to them; tools may create more
TOPICS_OF_TOOLS_MAX = 50_000    # that there may be for a tool to create one more
RECENT_S = 0.05                 # so late sends may see a change of topics
GROUPS_MAX = 10_000             # that clients may create by their heartbeats, and tools
KEY_VALUES_CHARS_MAX = 1 << 20  # of all keys and values of tools
ORDERS_NAMESPACE = "ORDER_TOPIC_CONFIG"  # of what updateOrderConf keeps, by topic
ORDER_CHARS_MAX = 1024          # of it for one topic
ORDER_MESSAGE_ENABLE = "orderMessageEnable"
SETTINGS_BYTES_MAX = 2048       # of one update of the broker's or the name server's settings
FLAG_UNIT, FLAG_UNIT_SUB = 1, 2  # bits of topicSysFlag (TopicSysFlag)
OWN_GROUP_PREFIXES = ("CID_RMQ_SYS_", "CID_PYENGINE_")  # whose offsets no client may move
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
SYSTEM_TOPICS = BROKERS_TOPICS | {TRANSACTION_HALF_TOPIC, TRANSACTION_OP_TOPIC, TRANSACTION_DISCARD_TOPIC, TIMER_TOPIC, TRACE_TOPIC}
FORBIDDEN_TOPICS = SYSTEM_TOPICS - {DEFAULT_TOPIC, "BenchmarkTest", TRACE_TOPIC}  # to which no client sends
SYSTEM_GROUPS = ("TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
                 "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER")  # which a broker always has, whatever the settings say
_NAME_CHARS = frozenset("%|_-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_READ_WRITE = PERM_READ | PERM_WRITE

Table = TypeVar("Table")
KeyValues = dict[str, dict[str, str]]


def topic_fault(topic: str | None) -> str:
    """RocketMQ's sentence about a name that no topic may have (TopicValidator), empty for a good one."""
    if topic is None or not topic.strip():
        return "The specified topic is blank."
    if not _NAME_CHARS.issuperset(topic):
        return "The specified topic contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(topic) > TOPIC_BYTES_MAX:
        return "The specified topic is longer than topic max length."
    return ""


def group_fault(group: str | None) -> str:
    """What is wrong with a group's name, empty for a good one. Shorter than RocketMQ's 255: its retry topic must be one."""
    if group is None or not group.strip():
        return "the specified group is blank"
    if not _NAME_CHARS.issuperset(group):
        return "the specified group contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(group) > GROUP_CHARS_MAX:
        return f"the specified group is longer than group max length {GROUP_CHARS_MAX}"
    return ""


class _CachedFile(Generic[Table]):
    """A small file's content, read again when the file is another."""

    def __init__(self, path: Path, read: Callable[[], Table]) -> None:
        self._path = path
        self._read = read
        self._stamp: tuple[int, int, int] | None = (0, 0, 0)
        self._table: Table | None = None
        self._looked_s = 0.0

    def recent(self) -> Table:
        """The content as it was within the last RECENT_S: a look at the file takes nearly a tenth of a send."""
        if self._table is not None and time.monotonic() - self._looked_s < RECENT_S:
            return self._table
        return self.table()

    def table(self) -> Table:
        self._looked_s = time.monotonic()
        try:
            status = os.stat(self._path)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = None
        if self._table is None or stamp != self._stamp:
            try:
                self._table = self._read()
            except DiskError:  # no descriptor now: what was known holds until the next look
                if self._table is None:
                    raise
            else:
                self._stamp = stamp
        return self._table


@dataclass(frozen=True, slots=True)
class Address:
    """What the gateway tells clients about itself: host:port of its broker, the broker's and the cluster's name."""

    broker: str
    broker_name: str
    cluster: str


class Names:
    """The topics and groups of one store. Used in the loop's thread; what writes a file does so in the executor."""

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor
        self.topic_configs = TopicConfigs(root)
        self.group_configs = SubscriptionGroups(root)
        self._topics = _CachedFile(self.topic_configs.path, lambda: self.topic_configs.read().rows)
        self._groups = _CachedFile(self.group_configs.path, lambda: self.group_configs.read().rows)
        self._key_value_file = ConfigFile(StorePaths(root).config / "kvConfig.json", decode_key_values)
        self._key_values = _CachedFile(self._key_value_file.path, lambda: self._key_value_file.read().value or {})
        self._name_server_file = ConfigFile(StorePaths(root).config / "namesrvConfig.json", decode_settings)
        self._name_server = _CachedFile(self._name_server_file.path, lambda: self._name_server_file.read().value or {})
        self._making: dict[str, asyncio.Future[Any]] = {}
        cluster = config.broker_cluster_name
        inherited = _READ_WRITE | PERM_INHERIT
        self._system = {topic.topic: topic for topic in (
            TopicConfig(cluster, 16, 16, inherited), TopicConfig(config.broker_name, 1, 1, inherited),
            TopicConfig("SELF_TEST_TOPIC", 1, 1), TopicConfig("BenchmarkTest", 1024, 1024),
            TopicConfig("OFFSET_MOVED_EVENT", 1, 1), TopicConfig(SCHEDULE_TOPIC, len(config.delay_levels_ms), len(config.delay_levels_ms)),
            TopicConfig(TRANSACTION_HALF_TOPIC, 1, 1), TopicConfig(TRANSACTION_OP_TOPIC, 1, 1),
            TopicConfig(TRANSACTION_DISCARD_TOPIC, 1, 1), TopicConfig(f"{cluster}_REPLY_TOPIC", 1, 1),
        )}
        if config.auto_create_topic_enable:
            number = config.default_topic_queue_nums
            self._system[DEFAULT_TOPIC] = TopicConfig(DEFAULT_TOPIC, number, number, inherited)
        self._system_groups = {name: SubscriptionGroup(name) for name in SYSTEM_GROUPS}

    # ---- topics -------------------------------------------------------------------

    def topic(self, name: str) -> TopicConfig | None:
        """What topics.json says of a topic, or RocketMQ of one of its own; None where it is not there."""
        return self._topics.table().get(name) or self._system.get(name)

    def recent_topic(self, name: str) -> TopicConfig | None:
        """The same for sends, which need not see a change at once."""
        return self._topics.recent().get(name) or self._system.get(name) or self._topics.table().get(name)

    def recent_topics(self) -> Mapping[str, TopicConfig]:
        """What topics.json has, as it was seen lately: the same object while the file is the same."""
        return self._topics.recent()

    def topic_table(self) -> dict[str, TopicConfig]:
        """Every topic, the system's too."""
        return self._system | self._topics.table()

    def is_system(self, topic: str) -> bool:
        """Whether a topic is RocketMQ's own."""
        return topic in self._system or topic in SYSTEM_TOPICS

    async def create(self, topic: TopicConfig, *, bounded: bool = True) -> TopicConfig:
        """Enter a topic, durable before this returns; the topic as the file has it, where another was faster.

        UsageError where there are TOPICS_MAX already and the creation is `bounded`.
        """
        if bounded and len(self._topics.table()) >= TOPICS_MAX:
            raise UsageError(f"there are {TOPICS_MAX} topics already: create {topic.topic} by hand")

        def enter() -> TopicConfig:
            try:
                return self.topic_configs.create(topic)
            except UsageError:
                existing = self.topic_configs.read().rows.get(topic.topic)
                if existing is None:
                    raise
                return existing

        made: TopicConfig = await self._once(f"topic {topic.topic}", enter)
        return made

    async def create_for_send(self, name: str, default: str | None, queue_nums: int, *, is_of_unit: bool = False) -> TopicConfig | None:
        """The new topic of a first message, like the topic that its client names for that; None where it may not be made.

        RocketMQ: TopicConfigManager.createTopicInSendMessageMethod.
        """
        model = self.topic(default) if default else None
        if name.startswith(RETRY_PREFIX):
            return await self.create(TopicConfig(name, 1, 1, topic_sys_flag=FLAG_UNIT_SUB if is_of_unit else 0))
        if model is None or not model.perm & PERM_INHERIT:
            return None
        number = max(1, min(queue_nums, model.write_queue_nums))
        return await self.create(replace(
            model, topic=name, read_queue_nums=number, write_queue_nums=number, perm=model.perm & ~PERM_INHERIT,
            topic_sys_flag=FLAG_UNIT if is_of_unit else 0, order=False, more={}))

    # ---- groups -------------------------------------------------------------------

    def group(self, name: str) -> SubscriptionGroup | None:
        """What subscriptionGroup.json says of a group, or RocketMQ of one of its own."""
        return self._groups.table().get(name) or self._system_groups.get(name)

    def groups(self) -> dict[str, SubscriptionGroup]:
        """Every group of subscriptionGroup.json, and RocketMQ's own."""
        return self._system_groups | self._groups.table()

    async def group_or_new(self, name: str) -> SubscriptionGroup | None:
        """The group, entered where it is new and may be (autoCreateSubscriptionGroup); None where it may not.

        UsageError where there are GROUPS_MAX already.
        """
        found = self.group(name)
        if found is not None or group_fault(name) or not self._config.auto_create_subscription_group:
            return found
        made: SubscriptionGroup = await self._once(
            f"group {name}", lambda: self.group_configs.enter(SubscriptionGroup(name), groups_max=GROUPS_MAX))
        return made

    # ---- keys and values ----------------------------------------------------------

    def key_values(self) -> KeyValues:
        """What tools keep here, by namespace and key (RocketMQ: KVConfigManager, in its name server)."""
        return self._key_values.table()

    async def change_key_values(self, change: Callable[[KeyValues], object]) -> None:
        """Change it, durable before this returns; UsageError where it would be longer than KEY_VALUES_CHARS_MAX."""
        def write() -> None:
            with exclusive(self._key_value_file.path):
                table = self._key_value_file.read_to_change().value or {}
                change(table)
                text = encode_config({"configTable": {namespace: values for namespace, values in table.items() if values}})
                if len(text) > KEY_VALUES_CHARS_MAX:
                    raise UsageError(f"the keys and values of tools would take {len(text)} characters: delete some")
                self._key_value_file.write(text)

        await asyncio.get_running_loop().run_in_executor(self._executor, write)

    @property
    def orders_by_configuration(self) -> bool:
        """Whether routes tell what `updateOrderConf` says of their topic (RocketMQ's orderMessageEnable)."""
        return self._name_server.table().get(ORDER_MESSAGE_ENABLE) == "true"

    async def order_by_configuration(self, is_on: bool) -> None:
        """Set that, durable before this returns."""
        def write() -> None:
            with exclusive(self._name_server_file.path):
                settings = self._name_server_file.read_to_change().value or {}
                self._name_server_file.write(encode_config(settings | {ORDER_MESSAGE_ENABLE: str(is_on).lower()}))

        await asyncio.get_running_loop().run_in_executor(self._executor, write)

    async def _once(self, key: str, make: Callable[[], Any]) -> Any:
        """`make` in the executor; those who ask for the same meanwhile share what it gives."""
        under_way = self._making.get(key)
        if under_way is None:
            under_way = self._making[key] = asyncio.get_running_loop().run_in_executor(self._executor, make)
            under_way.add_done_callback(lambda done: (self._making.pop(key, None), done.cancelled() or done.exception()))
        return await asyncio.shield(under_way)


class NameServer:
    """What clients ask a name server: routes and lists of names. The cluster has one broker, this gateway."""

    def __init__(self, names: Names, address: Address) -> None:
        self._names = names
        self._address = address
        self._may_write = True  # what wipeWritePerm takes away, until this process ends
        self.handlers: Handlers = {
            codes.GET_ROUTEINFO_BY_TOPIC: self.route,
            codes.GET_BROKER_CLUSTER_INFO: self.cluster,
            codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topic_list,
            codes.GET_TOPICS_BY_CLUSTER: self.topic_list,
            codes.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.system_topics,
            codes.GET_UNIT_TOPIC_LIST: self.unit_topics,
            codes.GET_HAS_UNIT_SUB_TOPIC_LIST: self.unit_topics,
            codes.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self.unit_topics,
            codes.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_perm,
            codes.ADD_WRITE_PERM_OF_BROKER: self.add_write_perm,
            codes.PUT_KV_CONFIG: self.put_key_value,
            codes.GET_KV_CONFIG: self.key_value,
            codes.DELETE_KV_CONFIG: self.delete_key_value,
            codes.GET_KVLIST_BY_NAMESPACE: self.key_values,
            codes.GET_NAMESRV_CONFIG: self.config,
            codes.UPDATE_NAMESRV_CONFIG: self.update_config,
        }

    def route(self, request: Request) -> Answer:
        """Where a topic's queues are. Clients before 4.9.4 get the broker's number as a bare integer, as from RocketMQ."""
        name = request.frame.fields.get("topic")
        topic = self._names.topic(name) if name else None
        if topic is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {name or 'null'}{codes.FAQ}")
        strict = request.frame.version >= _STRICT_JSON_VERSION or request.flag("acceptStandardJsonOnly")
        address = self._address
        perm = topic.perm if self._may_write else topic.perm & ~PERM_WRITE
        addresses: object = {"0": address.broker} if strict else IntKeys({0: address.broker})
        return Answer(body=write_json(self._order(topic) | {
            "brokerDatas": [{"brokerAddrs": addresses, "brokerName": address.broker_name, "cluster": address.cluster}],
            "filterServerTable": {},
            "queueDatas": [{"brokerName": address.broker_name, "perm": perm, "readQueueNums": topic.read_queue_nums,
                            "topicSysFlag": topic.topic_sys_flag, "writeQueueNums": topic.write_queue_nums}]}))

    def _order(self, topic: TopicConfig) -> dict[str, str]:
        """What `updateOrderConf` says of a topic, for its route. Only what every client can read, and no queue that is not there:
        tools need no key for it, and clients make the queues that a route names."""
        text = self._names.key_values().get(ORDERS_NAMESPACE, {}).get(topic.topic, "") if self._names.orders_by_configuration else ""
        for piece in text.split(";") if len(text) <= ORDER_CHARS_MAX else ():
            name, _, number = piece.partition(":")
            if name == self._address.broker_name and number.isascii() and number.isdecimal():
                return {"orderTopicConf": f"{name}:{min(int(number), topic.write_queue_nums)}"}
        return {}

    def cluster(self, request: Request) -> Answer:
        """The brokers of the cluster."""
        address = self._address
        return Answer(body=write_json({
            "brokerAddrTable": {address.broker_name: {"brokerAddrs": IntKeys({0: address.broker}), "brokerName": address.broker_name,
                                                      "cluster": address.cluster}},
            "clusterAddrTable": {address.cluster: [address.broker_name]}}))

    def topic_list(self, request: Request) -> Answer:
        """The names of all topics; of another cluster there are none."""
        cluster = request.frame.fields.get("cluster")
        topics = sorted(self._names.topic_table()) if cluster in (None, self._address.cluster) else []
        return Answer(body=write_json({"topicList": topics}))


    def system_topics(self, request: Request) -> Answer:
        """The names of the cluster and its broker, which are topics to RocketMQ, and the broker's address."""
        return Answer(body=write_json({"brokerAddr": self._address.broker,
                                       "topicList": [self._address.cluster, self._address.broker_name]}))

    def unit_topics(self, request: Request) -> Answer:
        """Topics by the bits of their topicSysFlag: of a unit, with subscribers of a unit, or the latter without the former."""
        def is_wanted(flags: int) -> bool:
            if request.frame.code == codes.GET_UNIT_TOPIC_LIST:
                return bool(flags & FLAG_UNIT)
            return bool(flags & FLAG_UNIT_SUB) and not (
                flags & FLAG_UNIT and request.frame.code == codes.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST)

        return Answer(body=write_json({"topicList": sorted(
            name for name, topic in self._names.topic_table().items() if is_wanted(topic.topic_sys_flag))}))

    def wipe_write_perm(self, request: Request) -> Answer:
        """Let routes say that the broker takes no messages, so that producers leave it; what is sent all the same is stored."""
        return self._set_write_perm(request, False, "wipeTopicCount")

    def add_write_perm(self, request: Request) -> Answer:
        """Take that back."""
        return self._set_write_perm(request, True, "addTopicCount")

    def _set_write_perm(self, request: Request, may_write: bool, counted: str) -> Answer:
        if request.text("brokerName") != self._address.broker_name:
            return Answer(fields={counted: "0"})
        self._may_write = may_write
        return Answer(fields={counted: str(len(self._names.topic_table()))})

    # ---- keys and values of tools -------------------------------------------------

    async def put_key_value(self, request: Request) -> Answer:
        """Keep a value by namespace and key, durable before this is answered."""
        namespace, key, value = (request.text(name) for name in ("namespace", "key", "value"))
        await self._names.change_key_values(lambda table: table.setdefault(namespace, {}).update({key: value}))
        return Answer()

    async def delete_key_value(self, request: Request) -> Answer:
        """Forget a value."""
        namespace, key = request.text("namespace"), request.text("key")
        await self._names.change_key_values(lambda table: table.get(namespace, {}).pop(key, None))
        return Answer()

    def key_value(self, request: Request) -> Answer:
        """One value."""
        namespace, key = request.text("namespace"), request.text("key")
        value = self._names.key_values().get(namespace, {}).get(key)
        if value is None:
            return Answer(codes.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace} Key: {key}")
        return Answer(fields={"value": value})

    def key_values(self, request: Request) -> Answer:
        """All values of a namespace."""
        namespace = request.text("namespace")
        table = self._names.key_values().get(namespace)
        if not table:
            return Answer(codes.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return Answer(body=write_json({"table": table}))

    def config(self, request: Request) -> Answer:
        """The settings that a name server would have, as lines of `key=value`."""
        ordered = str(self._names.orders_by_configuration).lower()
        return Answer(body=f"clusterTest=false\n{ORDER_MESSAGE_ENABLE}={ordered}\nproductEnvName=center\n".encode())

    async def update_config(self, request: Request) -> Answer:
        """Change orderMessageEnable, durably. What RocketMQ's name server notes or passes over without effect is refused."""
        body = request.frame.body
        if len(body) > SETTINGS_BYTES_MAX:
            return Answer(codes.SYSTEM_ERROR, f"{len(body):,} bytes of settings are more than {SETTINGS_BYTES_MAX:,}")
        try:
            lines = decode_properties_text(body.decode())
        except (FormatError, UnicodeDecodeError) as error:
            return Answer(codes.SYSTEM_ERROR, f"string2Properties error: {error}")
        if lines.keys() & {"kvConfigPath", "configStorePath"}:
            return Answer(codes.NO_PERMISSION, "Can not update config path")
        if others := lines.keys() - {ORDER_MESSAGE_ENABLE}:
            return Answer(codes.SYSTEM_ERROR, f"{', '.join(sorted(others))}: the gateway's name server has one setting, "
                                              f"{ORDER_MESSAGE_ENABLE}")
        value = lines.get(ORDER_MESSAGE_ENABLE, "").lower()
        if value not in ("true", "false"):
            return Answer(codes.SYSTEM_ERROR, f"{ORDER_MESSAGE_ENABLE}={value}: give true or false")
        await self._names.order_by_configuration(value == "true")
        return Answer()


def decode_key_values(text: str) -> KeyValues:
    """The table in the text of kvConfig.json; FormatError for one of another shape."""
    document: Any = decode_config(text)
    try:
        table = {namespace: dict(values) for namespace, values in document["configTable"].items()}
    except PARSE_ERRORS as error:
        raise FormatError(f"no table of keys and values: {error!r}") from error
    if not all(isinstance(value, str) for values in table.values() for value in values.values()):
        raise FormatError("a value that is no text")
    return table


def decode_settings(text: str) -> dict[str, str]:
    """The settings of the name server in the text of namesrvConfig.json, by RocketMQ's keys; FormatError for another shape."""
    found: Any = decode_config(text)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise FormatError("no settings of a name server")
    return found


def decode_properties_text(text: str) -> dict[str, str]:
    """The lines of Java's properties, `key=value`, without comments; FormatError for a line of another shape."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if line.strip() and not line.lstrip().startswith(("#", "!")):
            if not equals:
                raise FormatError(f"{line[:100]!r} is not key=value")
            found[name.strip()] = value.strip()
    return found


_STRICT_JSON_VERSION = 401  # MQVersion V4_9_4
