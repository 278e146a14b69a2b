"""Requests of tools to a group's members through the gateway: report progress, consume one message, move to other offsets.

The gateway finds the member's connection, forwards the request, and returns its answer as it is. RocketMQ: Broker2Client.
"""

from __future__ import annotations

import asyncio
import re

from pyengine.errors import FormatError
from pyengine.formats.record import decode_message_id
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Connection, Handlers, Request, TurnExecutor
from pyengine.gateway.members import Members
from pyengine.gateway.names import OWN_GROUP_PREFIXES, Address, Names, group_fault
from pyengine.gateway.positions import LEVEL, GroupOffsets, Positions
from pyengine.gateway.wire import CODE_MAX, JSON_BYTES_MAX, ObjectKeys, Raw, write_json
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.storage.consumer_offset import Table, group_key

STATUS_TIMEOUT_S = 5.0
MEMBERS_ASKED_MAX = 64  # for one request to all members of a group
STATUS_BYTES_MAX = 16 << 20  # of members' answers that are kept at once
# Matches texts in order to skip them. A text without an end matches up to the end of the input: otherwise the search from each
# of its quotes would take quadratic time.
_BRACES = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)|[{}]', re.DOTALL)


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
            codes.GET_CONSUMER_RUNNING_INFO: self.running_info,
            codes.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    async def running_info(self, request: Request) -> Answer:
        """Return a member's report of itself: settings, queues, rates, and its threads if requested."""
        return await self._ask_member(request, b"")

    async def consume_directly(self, request: Request) -> Answer:
        """Have a member consume one message now, independent of the group's offsets."""
        try:
            offset = decode_message_id(request.text("msgId"))[1]
        except FormatError as error:
            return Answer(codes.SYSTEM_ERROR, str(error))
        message = await self._executor.run(self._reader.message_at, offset, LEVEL)
        body = b"" if message is None else self._positions.record(message)
        if not body:
            return Answer(codes.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return await self._ask_member(request, body)

    async def _ask_member(self, request: Request, body: bytes) -> Answer:
        group, client_id = request.text("consumerGroup"), request.text("clientId")
        connection = self._members.consumer(group, client_id)
        if connection is None:
            return Answer(codes.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        fields = {**request.frame.fields, "brokerName": self._address.broker_name}
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
        tables = {client_id: Raw(table) for (client_id, _), body in zip(asked, bodies, strict=False) if (table := _queue_table(body))}
        return Answer(body=write_json({"consumerTable": tables, "messageQueueTable": {}}))

    async def reset_offset(self, request: Request) -> Answer:
        """Set a connected group's offsets to a time, in the file and in its members, which continue there."""
        topic, group, time_ms = request.text("topic"), request.text("group"), request.integer("timestamp", bits=64)
        found = self._names.topic(topic)
        if found is None:
            return Answer(codes.SYSTEM_ERROR, f"[reset-offset] reset offset failed, no topic in this broker. topic={topic}")
        if group.startswith(OWN_GROUP_PREFIXES) or group_fault(group):
            return Answer(codes.NO_PERMISSION, f"the offsets of the group {group} are not a client's")
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
            for queue_id in range(found.read_queue_nums):
                low, high = self._reader.queue_range(topic, queue_id, LEVEL)
                wanted = high if time_ms < 0 else self._reader.offset_by_time(topic, queue_id, time_ms, LEVEL)
                at = committed.get(queue_id, low)
                offsets[queue_id] = wanted if is_forced or wanted < at else at
            return offsets

        offsets = await self._executor.run(find)
        await self._offsets.rewrite(lambda table: _reset(table, topic, group, offsets), group, topic)
        broker_name = self._address.broker_name
        table = write_json({"offsetTable": ObjectKeys(
            {(("brokerName", broker_name), ("queueId", queue_id), ("topic", topic)): offset for queue_id, offset in offsets.items()})})
        body = table if request.frame.language != "CPP" else write_json({"offsetTable": [  # its JSON does not support objects as keys
            {"brokerName": broker_name, "offset": offset, "queueId": queue_id, "topic": topic} for queue_id, offset in offsets.items()]})
        fields = {"topic": topic, "group": group, "timestamp": str(time_ms), "isForce": str(is_forced).lower()}
        for connection in list(members.clients):
            connection.invoke_oneway(codes.RESET_CONSUMER_CLIENT_OFFSET, fields, body)
        return Answer(body=table)


def _queue_table(body: bytes) -> bytes:
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


def _reset(table: Table, topic: str, group: str, offsets: dict[int, int]) -> None:
    key = group_key(topic, group)
    table[key] = table.get(key, {}) | offsets
