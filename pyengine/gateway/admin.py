"""Requests of RocketMQ's tools (mqadmin, the dashboard): change topics and groups, list connections, progress and statistics.

RocketMQ: AdminBrokerProcessor, BrokerStatsManager. Figures that pyengine does not count are 0, under the names that the tools
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyengine.arguments import INT32_MAX, INT64_MAX
from pyengine.engine_config import AT_ONCE
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import LMQ_PREFIX, SCHEDULE_TOPIC
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import java_text
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Handlers, Request, TurnExecutor, refuse_if
from pyengine.gateway.members import Client, Members
from pyengine.gateway.names import (
    GROUPS_MAX,
    SETTINGS_BYTES_MAX,
    SYSTEM_TOPICS,
    TOPICS_OF_TOOLS_MAX,
    TRACE_TOPIC,
    Address,
    Names,
    group_fault,
    topic_fault,
    topic_fields,
    topics_document,
)
from pyengine.gateway.positions import LEVEL, OFFSETS_MAX, GroupOffsets
from pyengine.gateway.wire import IntKeys, ObjectKeys, WireError, read_object, write_json
from pyengine.ipc.control_block import EngineMemory, read_run_settings
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.session_client import ask_for_settings
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.statistics import DISTRIBUTE_NAMES, WINDOWS_S, Statistics, read_statistics
from pyengine.results import ReadLevel
from pyengine.services.clean_files import CleanRequest
from pyengine.services.clean_resource import request_cleaning
from pyengine.settings import Value
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import (
    REFUSED_KEYS,
    SETTINGS,
    UNUSED_KEYS,
    changing_engine,
    config_path,
    parse_set,
    set_durably,
    settings_to_set,
)
from pyengine.storage.config_table import CONSUME_ORDERLY, GROUPS_FORMAT, TopicConfig
from pyengine.storage.consumer_offset import DelayOffsets
from pyengine.storage.file_system import measure

VERSION_TEXT = "V4_9_8"
QUEUES_SHOWN_MAX = 100_000  # of one answer
ENTRIES_SHOWN_MAX = 1024    # of a consume queue in one answer
UNUSED_SHOWN_MAX = 5        # topics that an answer names
SETTINGS_WAIT_S = 3.0       # for the supervisor; a tool waits for 5 s
CLEAN_WAIT_S = 2.0          # a tool waits for its answer for 5 s
CLEAN_S = 10.0              # longest wait of a thread of the executor
COUNT_S = 10.0              # between two samples of the counters, as in RocketMQ
COUNTS_KEPT_S = 1.0         # greatest age of the engine's counters
COUNTED_MAX = 10_000        # groups of a topic whose messages are counted
FORGOTTEN_MAX = 1000        # of these at once: each is in about 40 samples
TOPIC_PUTS, GROUP_GETS, ALL_GETS = "TOPIC_PUT_NUMS", "GROUP_GET_NUMS", ""
MESSAGE_TYPE, MESSAGE_TYPES = "message.type", ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")  # an attribute of a topic
Counter = tuple[str, str]   # RocketMQ's name of a statistic, and its key


class Counts:
    """The messages put to a topic, and delivered to a group, in the last minute, hour and day.

    The engine counts the puts of all programs, the gateway what it delivers to groups. Used in the loop's thread.
    """

    def __init__(self, puts: Callable[[], Mapping[str, int]], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`puts` returns the messages of each topic since some moment; it raises EngineError if no engine runs."""
        self._puts = puts
        self._clock_s = clock_s
        self._gets: dict[Counter, int] = {(ALL_GETS, ALL_GETS): 0}
        self._put: dict[Counter, int] = {}
        self._counts_read_s: float | None = None
        # By window: its length, the interval of its samples, and the samples, of which the first is its begin.
        self._windows = [(60.0, COUNT_S, deque[tuple[float, dict[Counter, int]]]()), (3600.0, 600.0, deque()), (86400.0, 3600.0, deque())]
        self.sample()

    def count_gets(self, topic: str, group: str, number: int) -> None:
        key = GROUP_GETS, f"{topic}@{group}"
        self._gets[ALL_GETS, ALL_GETS] += number
        if key in self._gets or len(self._gets) < COUNTED_MAX:
            self._gets[key] = self._gets.get(key, 0) + number

    @property
    def total_gets(self) -> int:
        return self._gets[ALL_GETS, ALL_GETS]

    def sample(self) -> None:
        """Take a sample of the counters, every COUNT_S."""
        now_s = self._clock_s()
        now: dict[Counter, int] | None = None
        for length_s, pause_s, samples in self._windows:
            if not samples or now_s - samples[-1][0] >= pause_s:
                now = now if now is not None else self._read_counts() | self._gets
                samples.append((now_s, now))
            while len(samples) > 1 and now_s - samples[1][0] >= length_s:
                samples.popleft()
        if len(self._gets) >= COUNTED_MAX:
            self._make_room()

    def _make_room(self) -> None:
        """Forget the groups to which nothing was delivered in the last day: each has the same number in all samples."""
        _, before = self._windows[-1][2][0]
        idle = [key for key, number in self._gets.items() if number == before.get(key) and key != (ALL_GETS, ALL_GETS)]
        for counts in (self._gets, *(each for _, _, samples in self._windows for _, each in samples)):
            for key in idle[:FORGOTTEN_MAX]:
                counts.pop(key, None)

    def _read_counts(self) -> dict[Counter, int]:
        now_s = self._clock_s()
        if self._counts_read_s is None or now_s - self._counts_read_s >= COUNTS_KEPT_S:
            self._counts_read_s = now_s
            try:
                self._put = {(TOPIC_PUTS, topic): number for topic, number in self._puts().items()}
            except (EngineError, OSError):  # it does not run: its last counts stay
                pass
        return self._put

    def windows(self, name: str, key: str) -> list[tuple[int, float]] | None:
        """Return (messages, messages a second) of the last minute, hour and day; None if nothing was counted."""
        number = (self._read_counts() if name == TOPIC_PUTS else self._gets).get((name, key))
        if number is None:
            return None
        found = []
        for _, _, samples in self._windows:
            then_s, then = samples[0]
            before = then.get((name, key), 0)
            grown = number - before if number >= before else number  # a new engine counts from 0
            found.append((grown, grown / max(1.0, self._clock_s() - then_s)))
        return found


class Admin:
    """Serves the requests of tools; it reads many queues in the executor."""

    def __init__(self, reader: LiveStoreReader, names: Names, members: Members, offsets: GroupOffsets, address: Address,
                 executor: TurnExecutor, use_settings: Callable[[], Awaitable[None]]) -> None:
        """`use_settings` has the gateway itself take the engine's present settings."""
        self._use_settings = use_settings
        self._kept: dict[str, str] = {}  # keys of updates that have no effect
        self._reader = reader
        self._names = names
        self._members = members
        self._offsets = offsets
        self._address = address
        self._executor = executor
        self._began_ms = time.time_ns() // 1_000_000
        self.counts = Counts(lambda: {topic: each.messages for topic, each in self._figures().topics.items()})
        self._cleaning: asyncio.Future[None] | None = None  # one at a time
        self._changing = asyncio.Lock()                      # one change of settings at a time
        self.handlers: Handlers = {
            codes.UPDATE_AND_CREATE_TOPIC: executor.serving(self.update_topic),
            codes.DELETE_TOPIC_IN_BROKER: executor.serving(self.delete_topic),
            codes.GET_ALL_TOPIC_CONFIG: self.all_topics,
            codes.GET_TOPIC_CONFIG: self.topic_config,
            codes.GET_SUBSCRIPTIONGROUP_CONFIG: self.group_config,
            codes.GET_TOPIC_STATS_INFO: executor.serving(self.topic_stats),
            codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: executor.serving(self.update_group),
            codes.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
            codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: executor.serving(self.all_groups),
            codes.GET_CONSUME_STATS: self.consume_stats,
            codes.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            codes.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            codes.GET_PRODUCER_CONNECTION_LIST: self.producer_connections,
            codes.GET_BROKER_RUNTIME_INFO: self.runtime_info,
            codes.GET_BROKER_CONFIG: executor.serving(self.broker_config),
            codes.UPDATE_BROKER_CONFIG: self.update_broker_config,
            codes.GET_ALL_PRODUCER_INFO: self.all_producers,
            codes.GET_ALL_CONSUMER_OFFSET: self.all_offsets,
            codes.GET_ALL_DELAY_OFFSET: executor.serving(self.delay_offsets),
            codes.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
            codes.QUERY_CONSUME_TIME_SPAN: self.time_spans,
            codes.QUERY_CORRECTION_OFFSET: self.correction_offsets,
            codes.GET_BROKER_CONSUME_STATS: self.all_consume_stats,
            codes.CLONE_GROUP_OFFSET: self.clone_offsets,
            codes.QUERY_CONSUME_QUEUE: self.queue_entries,
            codes.VIEW_BROKER_STATS_DATA: self.statistics,
            codes.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean,
            codes.DELETE_EXPIRED_COMMITLOG: self.clean,
            codes.CLEAN_UNUSED_TOPIC: self.clean_unused,
        }

    # ---- topics -------------------------------------------------------------------

    def update_topic(self, request: Request) -> Answer:
        """Add a topic, or change its queues and rights."""
        name = request.text("topic")
        refuse_if(topic_fault(name))
        if self._names.is_system(name):
            return Answer(codes.SYSTEM_ERROR, f"The topic[{name}] is conflict with system topic.")
        wanted = TopicConfig(name, request.integer("readQueueNums", 8), request.integer("writeQueueNums", 8), request.integer("perm", 6),
                             request.flag("order"), topic_sys_flag=request.integer("topicSysFlag", 0))
        attributes = _attributes(request.frame.fields.get("attributes", ""))
        with self._names.changing_topics() as files:
            topics = files.read().rows
            if name in topics:
                before = topics[name].more
                files.update(name, read_queue_nums=wanted.read_queue_nums, write_queue_nums=wanted.write_queue_nums, perm=wanted.perm,
                             order=wanted.order, topic_sys_flag=wanted.topic_sys_flag,
                             more=before if attributes is None else before | {"attributes": attributes})
            elif len(topics) >= TOPICS_OF_TOOLS_MAX:
                raise UsageError(f"there are {len(topics)} topics already: delete some")
            else:
                files.create(wanted if attributes is None else replace(wanted, more={"attributes": attributes}))
        return Answer()

    def delete_topic(self, request: Request) -> Answer:
        """Remove a topic from topics.json; its messages stay in the log until they expire."""
        name = request.text("topic")
        if self._names.is_system(name):
            return Answer(codes.SYSTEM_ERROR, f"The topic[{name}] is conflict with system topic.")
        with contextlib.suppress(UsageError), self._names.changing_topics() as files:  # its absence is not an error in RocketMQ
            files.delete(name)
        return Answer()

    def all_topics(self, request: Request) -> Answer:
        """Return every topic of topics.json and RocketMQ's system topics."""
        return Answer(body=self._names.of_topics("rows", lambda topics, version: write_json(topics_document(topics, version))))

    def topic_config(self, request: Request) -> Answer:
        """Return one topic as RocketMQ 5 does. Its proxy sends only messages of the topic's type, which is any here."""
        name = request.text("topic")
        topic = self._names.topic(name)
        if topic is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return Answer(body=write_json(topic_fields(topic) | {"attributes": topic.more.get("attributes") or {MESSAGE_TYPE: "MIXED"}}))

    def topic_stats(self, request: Request) -> Answer:
        """Return the ends of a topic's queues, and the times of their last messages."""
        name = request.text("topic")
        topic = self._names.existing(name)
        rows = ObjectKeys()
        for queue_id in range(min(max(topic.read_queue_nums, topic.write_queue_nums), QUEUES_SHOWN_MAX)):
            low, high = self._reader.queue_range(name, queue_id, LEVEL)
            rows[self._queue(name, queue_id)] = {"lastUpdateTimestamp": self._time_of(name, queue_id, high - 1), "maxOffset": high,
                                                 "minOffset": low}
        return Answer(body=write_json({"offsetTable": rows}))

    # ---- groups -------------------------------------------------------------------

    def update_group(self, request: Request) -> Answer:
        """Add a group, or replace its settings."""
        fields = read_object(request.frame.body)
        name = fields.get("groupName")
        if not isinstance(name, str) or (fault := group_fault(name)):
            return Answer(codes.SYSTEM_ERROR, fault if isinstance(name, str) else "the specified group is blank")
        try:
            group = GROUPS_FORMAT.row_of(name, fields)
        except PARSE_ERRORS as error:
            raise WireError(f"no group: {error}") from None
        if any(not -1 << 31 <= number < 1 << 31 for number in (
                group.broker_id, group.retry_max_times, group.retry_queue_nums, group.which_broker_when_consume_slowly)):
            raise WireError("no group: a number of more than 32 bits")
        with self._names.changing_groups() as files:
            groups = files.read().rows
            if name not in groups and len(groups) >= GROUPS_MAX:
                raise UsageError(f"there are {len(groups)} groups already: delete some")
            more = groups[name].more if name in groups else {}  # not the request's, which may have any length
            if isinstance(is_ordered := fields.get(CONSUME_ORDERLY), bool):
                more = more | {CONSUME_ORDERLY: is_ordered}
            files.put(replace(group, more=more))
        return Answer()

    async def delete_group(self, request: Request) -> Answer:
        """Remove a group from subscriptionGroup.json, and its offsets if requested."""
        name = request.text("groupName")
        refuse_if(self._offsets.why_not(name, is_of_tool=True), codes.NO_PERMISSION)
        forgets = request.flag("removeOffset") or request.flag("cleanOffset")

        def delete() -> None:
            with self._names.changing_groups() as files:
                files.delete(name)

        await self._executor.run(delete)
        if forgets:
            await self._offsets.rewrite(lambda table: [table.pop(key) for key in list(table) if key.partition("@")[2] == name], name)
        return Answer()

    def all_groups(self, request: Request) -> Answer:
        rows = {name: GROUPS_FORMAT.fields_of(group) for name, group in self._names.groups().items()}
        return Answer(body=write_json({"dataVersion": self._names.groups_version, "subscriptionGroupTable": rows}))

    def group_config(self, request: Request) -> Answer:
        name = request.text("group")
        group = self._names.group(name)
        if group is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"No group in this broker. group: {name}")
        return Answer(body=write_json(GROUPS_FORMAT.fields_of(group)))

    async def consume_stats(self, request: Request) -> Answer:
        """Return a group's progress in each queue of one topic or of all: those that it subscribes to, or, while it is not
        connected, those with its offsets."""
        group, only = request.text("consumerGroup"), request.frame.fields.get("topic")
        offsets = self._offsets.of_group(group)
        members = self._members.consumers.get(group)
        subscribed = members.subscriptions if members is not None else {}
        topics = [only] if only else sorted(subscribed or offsets)
        if subscribed:
            topics = [name for name in topics if name in subscribed]

        def collect() -> ObjectKeys:
            rows = ObjectKeys()
            for name in topics:
                rows.update(self._progress(name, offsets.get(name, {}), QUEUES_SHOWN_MAX - len(rows)))
            return rows

        tps = sum((self._consume_tps(name, group) for name in topics), 0.0)
        return Answer(body=write_json({"consumeTps": tps, "offsetTable": await self._executor.run(collect)}))

    def _consume_tps(self, topic: str, group: str) -> float:
        """Return how many messages of a topic were delivered to a group per second, in the last minute."""
        found = self.counts.windows(GROUP_GETS, f"{topic}@{group}")
        return 0.0 if found is None else found[0][1]

    def _progress(self, name: str, offsets: Mapping[int, int], most: int) -> ObjectKeys:
        """Return the progress of a group with these offsets in the queues of a topic."""
        rows = ObjectKeys()
        topic = self._names.topic(name)
        for queue_id in range(0 if topic is None else min(topic.read_queue_nums, most)):
            low, high = self._reader.queue_range(name, queue_id, LEVEL)
            at = min(offsets.get(queue_id, low), high)
            rows[self._queue(name, queue_id)] = {"brokerOffset": high, "consumerOffset": at,
                                                 "lastTimestamp": self._time_of(name, queue_id, at - 1)}
        return rows

    async def all_consume_stats(self, request: Request) -> Answer:
        """Return the progress of every group of subscriptionGroup.json in every topic with its offsets."""
        only_ordered = request.flag("isOrder")
        by_group = self._offsets.by_group()
        offsets = {name: by_group.get(name, {}) for name in sorted(self._names.groups())}
        tps = {(group, name): self._consume_tps(name, group) for group, topics in offsets.items() for name in topics}

        def collect() -> tuple[list[object], int]:
            groups: list[object] = []
            behind = shown = 0
            for group, topics in offsets.items():
                stats = []
                for name, queues in sorted(topics.items()):
                    topic = self._names.topic(name)
                    if topic is None or (only_ordered and not topic.order):
                        continue
                    rows = self._progress(name, queues, QUEUES_SHOWN_MAX - shown)
                    shown += len(rows)
                    behind += sum(row["brokerOffset"] - row["consumerOffset"] for row in rows.values() if isinstance(row, dict))
                    stats.append({"consumeTps": tps[group, name], "offsetTable": rows})
                groups.append({group: stats})
            return groups, behind

        groups, behind = await self._executor.run(collect)
        return Answer(body=write_json({"brokerAddr": self._address.broker, "consumeStatsList": groups, "totalDiff": behind}))

    async def time_spans(self, request: Request) -> Answer:
        """Return the store times of the first, the last and a group's next message of each queue."""
        name, group = request.text("topic"), request.text("group")
        topic = self._names.existing(name)
        offsets = self._offsets.of_group(group).get(name, {})

        def collect() -> list[object]:
            rows: list[object] = []
            for queue_id in range(min(topic.write_queue_nums, QUEUES_SHOWN_MAX)):
                low, high = self._reader.queue_range(name, queue_id, LEVEL)
                at = offsets.get(queue_id, -1)
                first_ms = self._time_of(name, queue_id, low if high > low else -1, -1)
                waits_ms = self._time_of(name, queue_id, max(at, low), -1) if at < high else -1
                rows.append({"consumeTimeStamp": self._time_of(name, queue_id, at - 1, -1) if at > 0 else first_ms,
                             "delayTime": max(0, time.time_ns() // 1_000_000 - waits_ms) if waits_ms >= 0 else 0,
                             "maxTimeStamp": self._time_of(name, queue_id, high - 1, -1), "messageQueue": dict(self._queue(name, queue_id)),
                             "minTimeStamp": first_ms})
            return rows

        return Answer(body=write_json({"consumeTimeSpanSet": await self._executor.run(collect)}))

    def correction_offsets(self, request: Request) -> Answer:
        """Return the lowest offset of other groups in each queue of a topic; the largest number if the compared group is behind."""
        topic, compared = request.text("topic"), request.text("compareGroup")
        left_out = {name for name in request.frame.fields.get("filterGroups", "").split(",") if name}
        lowest: dict[int, int] = {}
        by_group = {name: topics[topic] for name, topics in self._offsets.by_group().items() if topic in topics}
        for group, queues in by_group.items():
            if group not in left_out:
                for queue_id, offset in queues.items():
                    lowest[queue_id] = min(offset, lowest.get(queue_id, offset))
        for queue_id, offset in by_group.get(compared, {}).items():
            if lowest.get(queue_id, INT64_MAX) > offset:
                lowest[queue_id] = INT64_MAX
        return Answer(body=write_json({"correctionOffsets": IntKeys(lowest)}))

    async def clone_offsets(self, request: Request) -> Answer:
        """Copy the offsets of a group to another one, in one topic or in all of its topics."""
        source, target, only = request.text("srcGroup"), request.text("destGroup"), request.frame.fields.get("topic", "").strip()
        refuse_if(group_fault(target))
        refuse_if(self._offsets.why_not(target), codes.NO_PERMISSION)
        members = self._members.consumers.get(source)
        subscribed = None if members is None or request.flag("offline") else members.subscriptions.keys()
        for topic, queues in self._offsets.of_group(source).items():
            if only in ("", topic) and self._names.topic(topic) is not None and (subscribed is None or topic in subscribed):
                for queue_id, offset in queues.items():
                    if not self._offsets.commit(topic, target, queue_id, offset):
                        return Answer(codes.SYSTEM_ERROR, f"{OFFSETS_MAX} offsets of groups are kept already")
        await self._offsets.flush()
        return Answer()

    async def all_offsets(self, request: Request) -> Answer:
        """Return every committed offset, by topic@group."""
        offsets = self._offsets.all()
        return Answer(body=await self._executor.run(
            lambda: write_json({"offsetTable": {key: IntKeys(queues) for key, queues in offsets.items()}})))

    def delay_offsets(self, request: Request) -> Answer:
        table, _ = DelayOffsets(self._reader.root).read()
        return Answer(body=write_json({"offsetTable": IntKeys(table)}))

    def groups_of_topic(self, request: Request) -> Answer:
        """Return the groups that consume a topic, or have consumed it."""
        name = request.text("topic")
        groups = {group.name for group in self._members.consumers.values() if name in group.subscriptions}
        groups |= {group for group, topics in self._offsets.by_group().items() if name in topics}
        return Answer(body=write_json({"groupList": sorted(groups)}))

    # ---- connections --------------------------------------------------------------

    def consumer_connections(self, request: Request) -> Answer:
        name = request.text("consumerGroup")
        group = self._members.consumers.get(name)
        if group is None:
            return Answer(codes.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        return Answer(body=write_json({
            "connectionSet": [client.fields(connection) for connection, client in group.clients.items()],
            "consumeFromWhere": group.consume_from_where, "consumeType": group.consume_type, "messageModel": group.message_model,
            "subscriptionTable": {topic: each.fields() for topic, each in group.subscriptions.items()}}))

    def producer_connections(self, request: Request) -> Answer:
        name = request.text("producerGroup")
        clients: Mapping[Any, Client] | None = self._members.producers.get(name)
        if not clients:
            return Answer(codes.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return Answer(body=write_json({"connectionSet": [client.fields(connection) for connection, client in clients.items()]}))

    def all_producers(self, request: Request) -> Answer:
        now_ms, now_s = time.time_ns() // 1_000_000, self._members.now_s()
        return Answer(body=write_json({"data": {name: [{
            "clientId": client.client_id, "language": client.language,
            "lastUpdateTimestamp": now_ms - int((now_s - client.last_heartbeat_s) * 1000),
            "remoteIP": f"/{connection.address}", "version": client.version} for connection, client in clients.items()]
            for name, clients in self._members.producers.items()}}))

    # ---- the broker ---------------------------------------------------------------

    async def runtime_info(self, request: Request) -> Answer:
        """Return the figures of `clusterList` and `brokerStatus`."""
        gets = self.counts.windows(ALL_GETS, ALL_GETS) or [(0, 0.0)]
        get_tps = " ".join(f"{tps:.2f}" for _, tps in (gets[0], *gets[:2]))

        def collect() -> dict[str, str]:
            disk = os.statvfs(self._reader.root)
            log, queues = measure_log(self._reader.root), measure(StorePaths(self._reader.root).consume_queue)
            low, high = self._reader.min_physical_offset, self._reader.max_physical_offset(LEVEL)
            first = self._reader.message_at(low, LEVEL) if low >= 0 else None
            delays, _ = DelayOffsets(self._reader.root).read()
            return {
                "brokerVersion": "409", "brokerVersionDesc": VERSION_TEXT, "bootTimestamp": str(self._began_ms),
                "startAcceptSendRequestTimeStamp": "0",
                "commitLogMinOffset": str(max(0, low)), "commitLogMaxOffset": str(high),
                **{name: f"{max(0, use.used_percent) / 100:.2f}" for name, use in (
                    ("commitLogDiskRatio", log), ("consumeQueueDiskRatio", queues))},
                "commitLogDirCapacity": f"Total : {_gib(disk.f_blocks * disk.f_frsize)}, Free : {_gib(disk.f_bavail * disk.f_frsize)}.",
                "earliestMessageTimeStamp": str(first.store_timestamp_ms if first is not None else -1),
                **self._put_figures(),
                "getTransferedTps": get_tps, "getTotalTps": get_tps, "getFoundTps": get_tps, "getMissTps": "0.0 0.0 0.0",
                "msgPutTotalYesterdayMorning": "0", "msgPutTotalTodayMorning": "0",
                "msgGetTotalYesterdayMorning": "0", "msgGetTotalTodayMorning": "0", "msgGetTotalTodayNow": str(self.counts.total_gets),
                "sendThreadPoolQueueSize": "0", "sendThreadPoolQueueCapacity": "0", "sendThreadPoolQueueHeadWaitTimeMills": "0",
                "pullThreadPoolQueueSize": "0", "pullThreadPoolQueueCapacity": "0", "pullThreadPoolQueueHeadWaitTimeMills": "0",
                "queryThreadPoolQueueSize": "0", "queryThreadPoolQueueCapacity": "0", "queryThreadPoolQueueHeadWaitTimeMills": "0",
                "EndTransactionQueueSize": "0", "EndTransactionThreadPoolQueueCapacity": "0", "pageCacheLockTimeMills": "0",
                "remainHowManyDataToFlush": f"{max(0, high - self._reader.max_physical_offset(ReadLevel.FLUSHED))} B",
                "remainTransientStoreBufferNumbs": str(INT32_MAX), "getMessageEntireTimeMax": "0",
                "dispatchMaxBuffer": "0", "dispatchBehindBytes": str(max(0, high - self._reader.dispatched_offset(LEVEL))),
                **{f"scheduleMessageOffset_{level}": f"{offset},{self._reader.queue_range(SCHEDULE_TOPIC, level - 1, LEVEL)[1]}"
                   for level, offset in delays.items()},
                "runtime": f"{(time.time_ns() // 1_000_000 - self._began_ms) // 1000} s",
            }

        return Answer(body=write_json({"table": await self._executor.run(collect)}))

    def _figures(self) -> Statistics:
        """Return the engine's statistics; EngineError if it does not run."""
        with EngineMemory.of(self._reader.root, writable=True) as memory:
            return read_statistics(memory)

    def _put_figures(self) -> dict[str, str]:
        """Return the puts since the engine's start, and per second in the last 10, 60 and 600 s."""
        try:
            figures = self._figures()
        except EngineError:  # it does not run
            return {"putTps": "0.0 0.0 0.0", "putMessageDistributeTime": _distribution([0] * len(DISTRIBUTE_NAMES)), **dict.fromkeys((
                "putMessageTimesTotal", "msgPutTotalTodayNow", "putMessageSizeTotal", "putMessageAverageSize", "putMessageFailedTimes",
                "putMessageEntireTimeMax", "putLatency99", "putLatency999"), "0")}
        number = figures.put_messages
        return {
            "putTps": " ".join(f"{figures.put_tps[window_s] or 0.0:.2f}" for window_s in WINDOWS_S),
            "putMessageTimesTotal": str(number), "msgPutTotalTodayNow": str(number),
            "putMessageSizeTotal": str(figures.put_bytes), "putMessageAverageSize": f"{figures.put_bytes / max(1, number):.1f}",
            "putMessageFailedTimes": str(sum(figures.refused.values())),
            "putMessageDistributeTime": _distribution(figures.put_distribute_recent),
            "putMessageEntireTimeMax": f"{figures.put_latency.max_ms or 0:.0f}",
            "putLatency99": f"{figures.put_latency.p99_ms or 0:.3f}", "putLatency999": f"{figures.put_latency.p999_ms or 0:.3f}"}

    async def update_broker_config(self, request: Request) -> Answer:
        """Change settings of the running engine, given by RocketMQ's keys, as `pyengine config set`: the file, then the engine.

        A key that has no effect here is kept until the gateway ends, and the answer says so. All changes are refused if a key is
        unknown or unsupported, or needs a restart of a process, this gateway included; a broker accepts them silently.
        """
        body = request.frame.body
        if len(body) > SETTINGS_BYTES_MAX:
            return Answer(codes.SYSTEM_ERROR, f"{len(body):,} bytes of settings are more than {SETTINGS_BYTES_MAX:,}")

        def change() -> tuple[dict[str, Value], dict[str, str]]:
            lines = [line for line in java_text(body).splitlines() if line and not line.startswith("#")]
            values, kept = self._settings_of(parse_set(lines, "updateBrokerConfig"))
            if values:
                set_durably(self._reader.root, values)
                texts = {name: SETTINGS[name].show(value) for name, value in values.items()}
                with changing_engine(self._reader.root):
                    ask_for_settings(self._reader.root, texts, SETTINGS_WAIT_S)
            return values, kept

        try:
            async with self._changing:
                values, kept = await self._executor.run(change)
                self._kept.update(kept)
                if any(SETTINGS[name].live != AT_ONCE for name in values):
                    await self._use_settings()
        except EngineError as error:
            return Answer(codes.SYSTEM_ERROR, str(error))
        return Answer(remark="; ".join(f"{key} is kept without effect: {UNUSED_KEYS[key]}" for key in kept) or None)

    def _settings_of(self, given: Mapping[str, str]) -> tuple[dict[str, Value], dict[str, str]]:
        """Return the settings to change, typed, and what is kept without effect, of an update; ConfigError if a key of it is refused."""
        if not given:
            raise UsageError("no setting is given: give key=value")
        shown, pairs, kept = self._shown_settings(), [], {}
        for key, text in given.items():
            if shown.get(key) == text:
                continue
            if key in REFUSED_KEYS:
                raise UsageError(f"{key}={text}: {REFUSED_KEYS[key][1]}")
            if key in UNUSED_KEYS:
                kept[key] = text
            else:
                pairs.append(f"{key}={text}")
        values = settings_to_set(pairs, "updateBrokerConfig")
        if later := [SETTINGS[name].key or name for name in values if not SETTINGS[name].live]:
            raise UsageError(f"{', '.join(later)}: taken at a start only: pyengine config set, then stop and start the engine")
        return values, kept

    def _shown_settings(self) -> dict[str, str]:
        """Return pyengine's settings by RocketMQ's keys, what holds for other keys, and what updates have set without effect."""
        config = read_run_settings(find_folder(self._reader.root))
        host, _, port = self._address.broker.rpartition(":")
        return {key: held for key, (held, _) in REFUSED_KEYS.items() if held} | {
            row.key: row.show(getattr(config, name)) for name, row in SETTINGS.items() if row.key} | {
            "defaultTopicQueueNums": str(config.client_topic_queue_nums),
            "brokerName": self._address.broker_name, "brokerClusterName": self._address.cluster, "brokerIP1": host, "listenPort": port,
            "storePathRootDir": str(self._reader.name), "filterServerNums": "0", "msgTraceTopicName": TRACE_TOPIC} | self._kept

    def broker_config(self, request: Request) -> Answer:
        """Return the settings as lines of `key=value`."""
        changed_ms = self._began_ms
        body = "".join(f"{name}={value}\n" for name, value in sorted(self._shown_settings().items())).encode("utf-8", "replace")
        with contextlib.suppress(OSError):  # without a file nothing has changed since the gateway's start
            changed_ms = os.stat(config_path(self._reader.root)).st_mtime_ns // 1_000_000
        return Answer(fields={"version": write_json({"counter": len(self._kept), "timestamp": changed_ms}).decode()}, body=body)

    def system_topics(self, request: Request) -> Answer:
        return Answer(body=write_json({"topicList": sorted(SYSTEM_TOPICS)}))

    async def queue_entries(self, request: Request) -> Answer:
        """Return entries of a consume queue, and whether a group's subscription matches them."""
        name, queue_id, index = request.text("topic"), request.integer("queueId"), request.integer("index", bits=64)
        count, group = max(0, min(request.integer("count"), ENTRIES_SHOWN_MAX)), request.frame.fields.get("consumerGroup")
        members = self._members.consumers.get(group or "")
        wanted = members.subscriptions.get(name) if members is not None else None

        def collect() -> Answer:
            queue = self._reader._queue(name, queue_id)
            if queue is None:
                return Answer(codes.SYSTEM_ERROR, f"{queue_id}@{name} is not exist!")
            low, high = self._reader.queue_range(name, queue_id, LEVEL)
            entries = [queue.entry(offset, high) for offset in range(index, min(index + count, high))] if index >= low else []
            body: dict[str, object] = {"maxQueueIndex": high, "minQueueIndex": low}
            if group is not None:
                body["filterData"] = "null" if wanted is not None else f"{group}@{name} is not online!"
                if wanted is not None:
                    body["subscriptionData"] = wanted.fields()
            body["queueData"] = [{"eval": False, "physicOffset": entry.physical_offset, "physicSize": entry.size_bytes,
                                  "tagsCode": entry.tags_code} for entry in entries if entry is not None]
            return Answer(codes.SUCCESS, None if entries else f"Index {index} of {queue_id}@{name} is not exist!", body=write_json(body))

        return await self._executor.run(collect)

    def statistics(self, request: Request) -> Answer:
        """Return the recent messages of a topic or of a group. RocketMQ has more statistics, which no tool requests."""
        name, key = request.text("statsName"), request.text("statsKey")
        found = self.counts.windows(name, key)
        if found is None:
            return Answer(codes.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
        return Answer(body=write_json({window: {"avgpt": 1.0 if number else 0.0, "sum": number, "tps": tps}
                                       for window, (number, tps) in zip(("statsMinute", "statsHour", "statsDay"), found, strict=True)}))

    async def clean(self, request: Request) -> Answer:
        """Have the engine's cleaner delete expired files now. It continues if that takes longer than a tool waits."""

        def ask() -> None:
            with EngineMemory.of(self._reader.root, writable=True) as memory:
                request_cleaning(memory, CleanRequest(), CLEAN_S)

        if self._cleaning is None or self._cleaning.done():
            self._cleaning = self._executor.run(ask)
        done, _ = await asyncio.wait((self._cleaning,), timeout=CLEAN_WAIT_S)
        for cleaning in done:
            cleaning.result()
        return Answer()

    async def clean_unused(self, request: Request) -> Answer:
        """Clean, and report an error while deleted topics still have messages, with which their queue files go, but the last of each."""
        await self.clean(request)
        known = self._names.with_system_topics(self._names.file_of_topics())

        def collect() -> list[str]:
            return sorted(
                name for name, queues in self._reader.topics().items() if name not in known and not name.startswith(LMQ_PREFIX)
                and any(low < high for low, high in (self._reader.queue_range(name, queue_id, LEVEL) for queue_id in queues)))

        left = await self._executor.run(collect)
        if not left:
            return Answer()
        names = ", ".join(left[:UNUSED_SHOWN_MAX]) + (f" and {len(left) - UNUSED_SHOWN_MAX} others" if len(left) > UNUSED_SHOWN_MAX else "")
        return Answer(codes.SYSTEM_ERROR,
                      f"topics that topics.json does not name still have messages, and their queue files stay as long: {names}")

    # ---- parts --------------------------------------------------------------------

    def _queue(self, topic: str, queue_id: int) -> tuple[tuple[str, object], ...]:
        return ("brokerName", self._address.broker_name), ("queueId", queue_id), ("topic", topic)

    def _time_of(self, topic: str, queue_id: int, offset: int, without: int = 0) -> int:
        """Return the store time of the message at an offset; `without` if there is none."""
        found = [] if offset < 0 else self._reader.get_message(topic, queue_id, offset, 1, level=LEVEL).messages
        return found[0].store_timestamp_ms if found else without


def _attributes(text: str) -> dict[str, str] | None:
    """Return a topic's attributes from RocketMQ 5's text of changes, None for none. UsageError for others than the type of messages."""
    if not text:
        return None
    found: dict[str, str] = {}
    for change in text.split(","):
        name, _, value = change.strip().partition("=")
        if name == f"+{MESSAGE_TYPE}" and value in MESSAGE_TYPES:
            found[MESSAGE_TYPE] = value
        elif name != f"-{MESSAGE_TYPE}":
            raise UsageError(f"the attribute {change[:100]!r} does not exist here: give +{MESSAGE_TYPE}= with {', '.join(MESSAGE_TYPES)}")
    return found


def _distribution(counts: Sequence[int]) -> str:
    return " ".join(f"[{name}]:{count}" for name, count in zip(DISTRIBUTE_NAMES, counts, strict=True))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
