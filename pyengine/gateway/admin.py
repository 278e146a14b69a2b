"""What RocketMQ's tools ask (mqadmin, the dashboard): topics and groups to be changed, who is connected, how far groups are.

RocketMQ: AdminBrokerProcessor. Figures that pyengine does not count are told as 0, under the names that the tools look for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

from pyengine.errors import UsageError
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Handlers, Request
from pyengine.gateway.members import Client, Members
from pyengine.gateway.names import GROUPS_MAX, OWN_GROUP_PREFIXES, TOPICS_OF_TOOLS_MAX, Address, Names, group_fault, topic_fault
from pyengine.gateway.positions import LEVEL, GroupOffsets
from pyengine.gateway.wire import ObjectKeys, WireError, read_json, write_json
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.storage.consumer_offset import Table, group_key
from pyengine.storage.subscription_group import group_of
from pyengine.storage.topic_config import TopicConfig

VERSION_TEXT = "V4_9_8"
QUEUES_SHOWN_MAX = 100_000  # of one answer
Found = TypeVar("Found")


class Admin:
    """The requests of tools. Reading many queues is done in the executor."""

    def __init__(self, reader: LiveStoreReader, names: Names, members: Members, offsets: GroupOffsets, address: Address,
                 executor: Executor) -> None:
        self._reader = reader
        self._names = names
        self._members = members
        self._offsets = offsets
        self._address = address
        self._executor = executor
        self._began_ms = time.time_ns() // 1_000_000
        self.handlers: Handlers = {
            codes.UPDATE_AND_CREATE_TOPIC: self.update_topic,
            codes.DELETE_TOPIC_IN_BROKER: self.delete_topic,
            codes.GET_ALL_TOPIC_CONFIG: self.all_topics,
            codes.GET_TOPIC_STATS_INFO: self.topic_stats,
            codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update_group,
            codes.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
            codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all_groups,
            codes.GET_CONSUME_STATS: self.consume_stats,
            codes.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            codes.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            codes.GET_PRODUCER_CONNECTION_LIST: self.producer_connections,
            codes.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            codes.GET_BROKER_CONFIG: self.broker_config,
            codes.INVOKE_BROKER_TO_RESET_OFFSET: self.reset_offset,
        }
        self.name_server_handlers: Handlers = {codes.DELETE_TOPIC_IN_NAMESRV: lambda request: Answer()}

    # ---- topics -------------------------------------------------------------------

    async def update_topic(self, request: Request) -> Answer:
        """Enter a topic, or change its queues and rights."""
        name = request.text("topic")
        if fault := topic_fault(name):
            return Answer(codes.SYSTEM_ERROR, fault)
        if self._names.is_system(name):
            return Answer(codes.SYSTEM_ERROR, f"The topic[{name}] is conflict with system topic.")
        wanted = TopicConfig(name, request.integer("readQueueNums", 8), request.integer("writeQueueNums", 8), request.integer("perm", 6),
                             request.flag("order"), topic_sys_flag=request.integer("topicSysFlag", 0))

        def put() -> None:
            files = self._names.topic_configs
            topics = files.read().topics
            if name in topics:
                files.update(name, read_queue_nums=wanted.read_queue_nums, write_queue_nums=wanted.write_queue_nums, perm=wanted.perm,
                             order=wanted.order, topic_sys_flag=wanted.topic_sys_flag)
            elif len(topics) >= TOPICS_OF_TOOLS_MAX:
                raise UsageError(f"there are {len(topics)} topics already: delete some")
            else:
                files.create(wanted)

        await self._in_executor(put)
        return Answer()

    async def delete_topic(self, request: Request) -> Answer:
        """Take a topic out of topics.json; its messages stay in the log until they are old enough."""
        name = request.text("topic")
        if self._names.is_system(name):
            return Answer(codes.SYSTEM_ERROR, f"The topic[{name}] is conflict with system topic.")
        try:
            await self._in_executor(lambda: self._names.topic_configs.delete(name))
        except UsageError:
            pass  # it was not there: RocketMQ says nothing of it
        return Answer()

    async def all_topics(self, request: Request) -> Answer:
        """Every topic of topics.json and RocketMQ's own."""
        rows = {topic.topic: {"order": topic.order, "perm": topic.perm, "readQueueNums": topic.read_queue_nums,
                              "topicFilterType": topic.topic_filter_type, "topicName": topic.topic,
                              "topicSysFlag": topic.topic_sys_flag, "writeQueueNums": topic.write_queue_nums}
                for topic in self._names.topic_table().values()}
        return Answer(body=write_json({"dataVersion": self._version(), "topicConfigTable": rows}))

    async def topic_stats(self, request: Request) -> Answer:
        """The ends of a topic's queues, and when their last messages came."""
        name = request.text("topic")
        topic = self._names.topic(name)
        if topic is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"topic[{name}] not exist")

        def look() -> ObjectKeys:
            rows = ObjectKeys()
            for queue_id in range(min(max(topic.read_queue_nums, topic.write_queue_nums), QUEUES_SHOWN_MAX)):
                low, high = self._reader.queue_range(name, queue_id, LEVEL)
                rows[self._queue(name, queue_id)] = {"lastUpdateTimestamp": self._time_of(name, queue_id, high - 1), "maxOffset": high,
                                                     "minOffset": low}
            return rows

        return Answer(body=write_json({"offsetTable": await self._in_executor(look)}))

    # ---- groups -------------------------------------------------------------------

    async def update_group(self, request: Request) -> Answer:
        """Enter a group, or replace what is told of it."""
        fields = _object(read_json(request.frame.body))
        name = fields.get("groupName")
        if not isinstance(name, str) or (fault := group_fault(name)):
            return Answer(codes.SYSTEM_ERROR, fault if isinstance(name, str) else "the specified group is blank")
        try:
            group = group_of(name, fields)
        except PARSE_ERRORS as error:
            raise WireError(f"no group: {error}") from None
        if any(not -1 << 31 <= number < 1 << 31 for number in (
                group.broker_id, group.retry_max_times, group.retry_queue_nums, group.which_broker_when_consume_slowly)):
            raise WireError("no group: a number of more than 32 bits")

        def put() -> None:
            files = self._names.group_configs
            groups = files.read().groups
            if name not in groups and len(groups) >= GROUPS_MAX:
                raise UsageError(f"there are {len(groups)} groups already: delete some")
            files.put(replace(group, more=groups[name].more if name in groups else {}))  # no text of any length by a client

        await self._in_executor(put)
        return Answer()

    async def delete_group(self, request: Request) -> Answer:
        """Take a group out of subscriptionGroup.json, with its offsets where that is asked for."""
        name = request.text("groupName")
        if name.startswith(OWN_GROUP_PREFIXES):
            return Answer(codes.NO_PERMISSION, f"the offsets of the group {name} are not a client's")
        forgets = request.flag("removeOffset") or request.flag("cleanOffset")

        def delete() -> None:
            self._names.group_configs.delete(name)
            if forgets:
                self._offsets.rewrite(lambda table: [table.pop(key) for key in list(table) if key.partition("@")[2] == name])

        if forgets:
            self._offsets.forget(name)
        await self._in_executor(delete)
        return Answer()

    async def all_groups(self, request: Request) -> Answer:
        """Every group of subscriptionGroup.json."""
        rows = {name: group.fields() for name, group in self._names.groups().items()}
        return Answer(body=write_json({"dataVersion": self._version(), "subscriptionGroupTable": rows}))

    async def consume_stats(self, request: Request) -> Answer:
        """How far a group is in each queue, in one topic or in all that it has offsets or subscriptions of."""
        group, only = request.text("consumerGroup"), request.frame.fields.get("topic")
        offsets = self._offsets.of_group(group)
        members = self._members.consumers.get(group)
        topics = [only] if only else sorted({*offsets, *(members.subscriptions if members is not None else ())})

        def look() -> ObjectKeys:
            rows = ObjectKeys()
            for name in topics:
                topic = self._names.topic(name)
                for queue_id in range(0 if topic is None else topic.read_queue_nums):
                    low, high = self._reader.queue_range(name, queue_id, LEVEL)
                    committed = offsets.get(name, {}).get(queue_id)
                    at = min(low if committed is None else committed, high)
                    rows[self._queue(name, queue_id)] = {"brokerOffset": high, "consumerOffset": at,
                                                         "lastTimestamp": self._time_of(name, queue_id, at - 1)}
                    if len(rows) >= QUEUES_SHOWN_MAX:
                        return rows
            return rows

        return Answer(body=write_json({"consumeTps": 0.0, "offsetTable": await self._in_executor(look)}))

    def groups_of_topic(self, request: Request) -> Answer:
        """The groups that consume a topic, or have."""
        name = request.text("topic")
        connected = {group.name for group in self._members.consumers.values() if name in group.subscriptions}
        return Answer(body=write_json({"groupList": sorted({*connected, *self._offsets.groups_of(name)})}))

    async def reset_offset(self, request: Request) -> Answer:
        """Set a connected group's offsets to a time, in the file and in its members, which go on there."""
        topic, group, time_ms = request.text("topic"), request.text("group"), request.integer("timestamp", bits=64)
        found = self._names.topic(topic)
        if found is None:
            return Answer(codes.SYSTEM_ERROR, f"topic {topic} not exist")
        if group.startswith(OWN_GROUP_PREFIXES) or group_fault(group):
            return Answer(codes.NO_PERMISSION, f"the offsets of the group {group} are not a client's")
        members = self._members.consumers.get(group)
        if members is None:
            return Answer(codes.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
        committed = self._offsets.of_group(group).get(topic, {})
        is_forced = request.flag("isForce")

        def find() -> dict[int, int]:
            offsets = {}
            for queue_id in range(found.read_queue_nums):
                low, high = self._reader.queue_range(topic, queue_id, LEVEL)
                wanted = high if time_ms < 0 else self._reader.offset_by_time(topic, queue_id, time_ms, LEVEL)
                at = committed.get(queue_id, low)
                offsets[queue_id] = wanted if is_forced or wanted < at else at
            self._offsets.rewrite(lambda table: _reset(table, topic, group, offsets))
            return offsets

        offsets = await self._in_executor(find)
        self._offsets.forget(group, topic)
        body = write_json({"offsetTable": ObjectKeys({self._queue(topic, queue_id): offset for queue_id, offset in offsets.items()})})
        fields = {"topic": topic, "group": group, "timestamp": str(time_ms), "isForce": str(is_forced).lower()}
        for connection in list(members.clients):
            connection.tell(codes.RESET_CONSUMER_CLIENT_OFFSET, fields, body)
        return Answer(body=body)

    # ---- connections --------------------------------------------------------------

    def consumer_connections(self, request: Request) -> Answer:
        """The members of a group, and what they consume."""
        name = request.text("consumerGroup")
        group = self._members.consumers.get(name)
        if group is None:
            return Answer(codes.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        return Answer(body=write_json({
            "connectionSet": [client.fields(connection) for connection, client in group.clients.items()],
            "consumeFromWhere": group.consume_from_where, "consumeType": group.consume_type, "messageModel": group.message_model,
            "subscriptionTable": {topic: each.fields() for topic, each in group.subscriptions.items()}}))

    def producer_connections(self, request: Request) -> Answer:
        """The producers of a group."""
        name = request.text("producerGroup")
        clients: Mapping[Any, Client] | None = self._members.producers.get(name)
        if not clients:
            return Answer(codes.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return Answer(body=write_json({"connectionSet": [client.fields(connection) for connection, client in clients.items()]}))

    # ---- the broker ---------------------------------------------------------------

    async def runtime_info(self, request: Request) -> Answer:
        """What `clusterList` and `brokerStatus` show."""

        def look() -> dict[str, str]:
            disk = os.statvfs(self._reader.root)
            used = f"{1 - disk.f_bavail / max(1, disk.f_blocks):.4f}"
            low, high = self._reader.min_physical_offset, self._reader.max_physical_offset(LEVEL)
            first = self._reader.message_at(low, LEVEL) if low >= 0 else None
            zero = "0.0 0.0 0.0"
            return {
                "brokerVersion": "409", "brokerVersionDesc": VERSION_TEXT, "bootTimestamp": str(self._began_ms),
                "commitLogMinOffset": str(max(0, low)), "commitLogMaxOffset": str(high),
                "commitLogDiskRatio": used, "consumeQueueDiskRatio": used,
                "earliestMessageTimeStamp": str(first.store_timestamp_ms if first is not None else -1),
                "putTps": zero, "getTransferedTps": zero, "getTotalTps": zero, "getFoundTps": zero, "getMissTps": zero,
                "msgPutTotalYesterdayMorning": "0", "msgPutTotalTodayMorning": "0", "msgPutTotalTodayNow": "0",
                "msgGetTotalYesterdayMorning": "0", "msgGetTotalTodayMorning": "0", "msgGetTotalTodayNow": "0",
                "sendThreadPoolQueueSize": "0", "sendThreadPoolQueueCapacity": "0", "sendThreadPoolQueueHeadWaitTimeMills": "0",
                "pullThreadPoolQueueSize": "0", "pullThreadPoolQueueCapacity": "0", "pullThreadPoolQueueHeadWaitTimeMills": "0",
                "queryThreadPoolQueueSize": "0", "queryThreadPoolQueueCapacity": "0", "queryThreadPoolQueueHeadWaitTimeMills": "0",
                "EndTransactionQueueSize": "0", "EndTransactionThreadPoolQueueCapacity": "0", "pageCacheLockTimeMills": "0",
                "dispatchMaxBuffer": "0", "dispatchBehindBytes": "0",
                "runtime": f"{(time.time_ns() // 1_000_000 - self._began_ms) // 1000} s",
            }

        return Answer(body=write_json({"table": await self._in_executor(look)}))

    def broker_config(self, request: Request) -> Answer:
        """The settings that a broker would have, as lines of `key=value`."""
        config = self._reader.config
        lines = {
            "brokerName": self._address.broker_name, "brokerClusterName": self._address.cluster, "brokerId": "0",
            "brokerRole": config.broker_role, "flushDiskType": config.flush_disk_type,
            "autoCreateTopicEnable": str(config.auto_create_topic_enable).lower(),
            "autoCreateSubscriptionGroup": str(config.auto_create_subscription_group).lower(),
            "defaultTopicQueueNums": str(config.default_topic_queue_nums), "maxMessageSize": str(config.max_message_size_bytes),
            "messageDelayLevel": config.message_delay_level, "fileReservedTime": str(config.file_reserved_time_hours),
        }
        body = "".join(f"{name}={value}\n" for name, value in lines.items()).encode()
        return Answer(fields={"version": write_json(self._version()).decode()}, body=body)

    # ---- parts --------------------------------------------------------------------

    def _queue(self, topic: str, queue_id: int) -> tuple[tuple[str, object], ...]:
        return ("brokerName", self._address.broker_name), ("queueId", queue_id), ("topic", topic)

    def _time_of(self, topic: str, queue_id: int, offset: int) -> int:
        if offset < 0:
            return 0
        found = self._reader.get_message(topic, queue_id, offset, 1, level=LEVEL).messages
        return found[0].store_timestamp_ms if found else 0

    def _version(self) -> dict[str, int]:
        return {"counter": 0, "timestamp": self._began_ms}

    async def _in_executor(self, call: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _reset(table: Table, topic: str, group: str, offsets: dict[int, int]) -> None:
    key = group_key(topic, group)
    table[key] = table.get(key, {}) | offsets


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("a JSON object was expected")
    return value
