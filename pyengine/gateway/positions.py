"""Offsets of groups and queues: committed ones, ends of queues, offsets by time; and messages by key and by offset.

The gateway keeps offsets that clients commit in memory and writes them to consumerOffset.json every FLUSH_S, as RocketMQ's
broker does. If it dies between two writes, the last commits are lost and those messages are delivered again. Programs that
consume without the gateway commit to the same file, each for its own groups and queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from pyengine.arguments import INT64_MAX
from pyengine.errors import EngineError, UsageError
from pyengine.formats.record import Message
from pyengine.formats.small_file import path_stamp
from pyengine.gateway import codes
from pyengine.gateway.acl_file import SUB
from pyengine.gateway.connections import Answer, Handlers, Request, TurnExecutor, refuse_if
from pyengine.gateway.names import OWN_GROUP_PREFIXES, REPLACED, Names, group_fault, topic_fault
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.results import ReadLevel
from pyengine.storage.consumer_offset import ConsumerOffsets, Table, group_key
from pyengine.storage.index_file import KeyQuery

FLUSH_S = 5.0           # between two writes, RocketMQ's flushConsumerOffsetInterval
LEVEL = ReadLevel.COMMITTED  # a broker's consumers see what is in the page cache
QUERY_MAX = 64          # messages of one query
UNIQUE_QUERY_MAX = 32   # of one by unique key
QUERY_BYTES = 8 << 20    # an answer ends with the message that reaches this size
QUERY_S = 5.0            # of a thread for one query, also if clients have many keys with one hash

OFFSETS_MAX = 200_000  # of all groups and queues together, so that the file stays readable; clients cannot add more


class Saving(Protocol):
    """What one write of the offsets stores for the groups that consume by POP."""

    def write(self, table: Table) -> None:
        """Change the table that is written; in a thread, with the lock of the offsets."""

    def settle(self) -> None:
        """Note that it is durable; in the loop's thread."""


async def _nothing_more() -> Saving | None:
    return None


class GroupOffsets:
    """The committed offsets of all groups: those in consumerOffset.json, overridden by those that wait to be written."""

    def __init__(self, reader: LiveStoreReader, executor: TurnExecutor) -> None:
        self._offsets = ConsumerOffsets(reader.root)
        self._executor = executor
        self._waiting: Table = {}
        self._writing: Table = {}
        self._fresh: set[tuple[str, int]] = set()  # committed, and not in the file when it was last read
        self.changing = asyncio.Lock()  # of what changes the file, or must not miss a change
        self.collect: Callable[[], Awaitable[Saving | None]] = _nothing_more  # what to write beside them
        self.is_fenced: Callable[[], bool] = lambda: False  # whether offsets are not this store's any more
        self.why_popped: Callable[[str], str] = lambda group: ""  # why clients may not commit a group's offsets now
        self.when_rewritten: list[Callable[[str, str | None, Collection[int] | None], None]] = []  # called as rewrite()
        self._stamp: int | None = None  # of the file with `_table`
        self._table: Table = {}
        self._count = 0  # offsets in it

    def why_not(self, group: str, *, is_of_tool: bool = False) -> str:
        """Return why a group's offsets may not be set here, by its clients or by a tool; "" if they may."""
        if group.startswith(OWN_GROUP_PREFIXES):
            return f"the offsets of the group {group} are not a client's"
        if self.is_fenced():  # they would not be written
            return f"no offset is committed here: {REPLACED}"
        return "" if is_of_tool else self.why_popped(group)

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> bool:
        """Store a queue's next offset, which is written within FLUSH_S; False for a new one if there are OFFSETS_MAX already."""
        key = group_key(topic, group)
        queues = self._waiting.get(key, {})
        if queue_id not in queues:
            with contextlib.suppress(EngineError):  # its last known content suffices
                self._file()
            if queue_id not in self._table.get(key, {}) and (key, queue_id) not in self._fresh:
                if self._count + len(self._fresh) >= OFFSETS_MAX:
                    return False
                self._fresh.add((key, queue_id))
        queues[queue_id] = offset
        self._waiting[key] = queues
        return True

    def committed(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the queue's next offset, None if the group has not committed one."""
        key = group_key(topic, group)
        for table in (self._waiting, self._writing, self._file()):
            found = table.get(key, {}).get(queue_id)
            if found is not None:
                return found
        return None

    def all(self) -> Table:
        found = self._file().copy()
        for table in (self._writing, self._waiting):
            for key, queues in table.items():
                found[key] = found.get(key, {}) | queues
        return found

    def by_group(self) -> dict[str, Table]:
        """Return group -> topic -> queue id -> next offset."""
        found: dict[str, Table] = {}
        for key, queues in self.all().items():
            topic, _, group = key.partition("@")
            found.setdefault(group, {})[topic] = queues
        return found

    def of_group(self, group: str) -> Table:
        """Return topic -> queue id -> next offset, of one group."""
        return {topic: queues for key, queues in self.all().items() for topic, _, name in (key.partition("@"),) if name == group}

    async def rewrite(self, change: Callable[[Table], object], group: str, topic: str | None = None,
                      queue_ids: Collection[int] | None = None) -> None:
        """Change a group's offsets in the file, of all topics and queues or these, durably before this returns, and drop waiting ones.

        It completes even if the caller is cancelled."""
        await asyncio.shield(self._rewrite(change, group, topic, queue_ids))

    async def _rewrite(self, change: Callable[[Table], object], group: str, topic: str | None, queue_ids: Collection[int] | None) -> None:
        async with self.changing:  # otherwise a running flush could write the old offsets after it
            if self.is_fenced():  # since its request came
                raise UsageError(REPLACED)
            await self._update(change)
            for key in [key for key in self._waiting if key.partition("@")[2] == group and topic in (None, key.partition("@")[0])]:
                queues = self._waiting[key]
                for queue_id in list(queues) if queue_ids is None else queues.keys() & queue_ids:
                    del queues[queue_id]
                    self._fresh.discard((key, queue_id))
                if not queues:
                    del self._waiting[key]
            for listener in self.when_rewritten:
                listener(group, topic, queue_ids)

    @property
    def has_room(self) -> bool:
        """Whether a new group may begin."""
        with contextlib.suppress(EngineError):
            self._file()
        return self._count + len(self._fresh) < OFFSETS_MAX

    async def flush(self) -> None:
        """Write the waiting offsets. If that fails they wait on, unless newer ones have replaced them; EngineError says why.

        A write completes even if the caller is cancelled; the next one waits for it.
        """
        await asyncio.shield(self._flush())

    async def _flush(self) -> None:
        async with self.changing:
            if self.is_fenced():
                self._waiting.clear()
                return
            saving = await self.collect()
            if not self._waiting and saving is None:
                return
            taken = self._writing = self._waiting
            self._waiting = {}

            def change(table: Table) -> None:
                if saving is not None:
                    saving.write(table)
                for key, queues in taken.items():
                    table[key] = table.get(key, {}) | queues

            try:
                await self._update(change)
            except BaseException:
                for key, queues in taken.items():
                    self._waiting[key] = queues | self._waiting.get(key, {})
                raise
            finally:
                self._writing = {}
            if saving is not None:
                saving.settle()

    async def _update(self, change: Callable[[Table], object]) -> None:
        found = await self._executor.run(self._offsets.update, change)
        self._know(found.offsets, found.stamp)

    def _file(self) -> Table:
        """Return the file's content, as it was before a write of the gateway that has not ended.

        A read of a large file delays all clients, so that only a write of another program causes one.
        """
        if self._stamp is None or not self.changing.locked():
            stamp = path_stamp(self._offsets.path)
            if stamp != self._stamp:
                self._know(self._offsets.table().offsets, stamp)  # DiskError fails the request: an empty table would reset groups
        return self._table

    def _know(self, table: Table, stamp: int) -> None:
        self._table, self._stamp = table, stamp
        self._count = sum(map(len, table.values()))
        self._fresh = {(key, queue_id) for key, queue_id in self._fresh if queue_id not in table.get(key, {})}


class Positions:
    """Serves requests for offsets and for single messages. RocketMQ: ConsumerManageProcessor, QueryMessageProcessor."""

    def __init__(self, reader: LiveStoreReader, names: Names, offsets: GroupOffsets, executor: TurnExecutor) -> None:
        self._reader = reader
        self._names = names
        self._offsets = offsets
        self._executor = executor
        self._memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.handlers: Handlers = {
            codes.QUERY_CONSUMER_OFFSET: self.query_offset,
            codes.UPDATE_CONSUMER_OFFSET: self.update_offset,
            codes.GET_MAX_OFFSET: self.max_offset,
            codes.GET_MIN_OFFSET: self.min_offset,
            codes.SEARCH_OFFSET_BY_TIMESTAMP: executor.serving(self.search_offset),
            codes.GET_EARLIEST_MSG_STORETIME: executor.serving(self.earliest_time),
            codes.QUERY_MESSAGE: executor.serving(self.query_message),
            codes.VIEW_MESSAGE_BY_ID: self.view_message,
        }

    # ---- groups -------------------------------------------------------------------

    def query_offset(self, request: Request) -> Answer:
        """Return the next offset of a group; without one, 0 if the queue's first message is recent, else the client decides."""
        topic, group, queue_id = request.text("topic"), request.text("consumerGroup"), request.integer("queueId")
        if fault := topic_fault(topic) or group_fault(group):
            return Answer(codes.SYSTEM_ERROR, fault)
        offset = self._offsets.committed(topic, group, queue_id)
        if offset is None and self.begins_near_log_end(topic, queue_id):
            offset = 0
        if offset is None:
            return Answer(codes.QUERY_NOT_FOUND, "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first")
        return _offset(offset)

    def update_offset(self, request: Request) -> Answer:
        """Commit an offset of an existing queue, for a group that belongs to clients."""
        topic, group, queue_id = request.text("topic"), request.text("consumerGroup"), request.integer("queueId")
        if (topic, group, queue_id) in request.connection.behind and not self._offsets.why_not(group):
            return Answer(codes.NO_PERMISSION, f"the group {group} has popped from queue {queue_id} of {topic} meanwhile: pull first")
        return self.commit(topic, group, queue_id, request.integer("commitOffset", bits=64))

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> Answer:
        if fault := topic_fault(topic) or group_fault(group):
            return Answer(codes.SYSTEM_ERROR, fault)
        if why := self._offsets.why_not(group):
            return Answer(codes.NO_PERMISSION, why)
        found = self._names.topic(topic)
        if found is None:
            return Answer(codes.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        if not (0 <= queue_id < found.read_queue_nums and offset >= 0):
            return Answer(codes.SYSTEM_ERROR, f"no offset {offset} can be committed in queue {queue_id} of {topic}")
        if not self._offsets.commit(topic, group, queue_id, offset):
            return Answer(codes.SYSTEM_ERROR, f"{OFFSETS_MAX} offsets of groups are kept already: delete groups that are no longer used")
        return Answer()

    def committed(self, topic: str, group: str, queue_id: int) -> int:
        """Return the next offset of a group, 0 without one."""
        return self._offsets.committed(topic, group, queue_id) or 0

    def begins_near_log_end(self, topic: str, queue_id: int) -> bool:
        """Return whether the queue begins at 0 and has its first message near the log's end, or has no message."""
        low, high = self._reader.queue_range(topic, queue_id, LEVEL)
        if low > 0:
            return False
        if not high:
            return True
        first = self._reader.get_message(topic, queue_id, 0, 1, level=LEVEL).messages
        return not first or self.is_near_log_end(first[0].physical_offset)

    def is_near_log_end(self, physical_offset: int) -> bool:
        """Return whether a message counts as in memory (accessMessageInMemoryMaxRatio)."""
        near_bytes = self._memory_bytes * self._reader.config.access_message_in_memory_max_ratio // 100
        return self._reader.max_physical_offset(LEVEL) - physical_offset <= near_bytes

    # ---- queues -------------------------------------------------------------------

    def max_offset(self, request: Request) -> Answer:
        return _offset(self._range(request)[1])

    def min_offset(self, request: Request) -> Answer:
        return _offset(self._range(request)[0])

    def _range(self, request: Request) -> tuple[int, int]:
        return self._reader.queue_range(request.text("topic"), request.integer("queueId"), LEVEL)

    def search_offset(self, request: Request) -> Answer:
        """Return the offset of the message with the nearest store time."""
        return _offset(self._reader.offset_by_time(
            request.text("topic"), request.integer("queueId"), request.integer("timestamp", bits=64), LEVEL))

    def earliest_time(self, request: Request) -> Answer:
        """Return the store time of a queue's first message, -1 without one."""
        low, high = self._range(request)
        found = [] if low == high else self._reader.get_message(
            request.text("topic"), request.integer("queueId"), low, 1, level=LEVEL).messages
        return Answer(fields={"timestamp": str(found[0].store_timestamp_ms if found else -1)})

    # ---- messages -----------------------------------------------------------------

    def query_message(self, request: Request) -> Answer:
        """Return messages by a key, or by their unique key."""
        topic, key = request.text("topic"), request.text("key")
        is_unique = request.flag("_UNIQUE_KEY_QUERY")
        most = UNIQUE_QUERY_MAX if is_unique else min(request.integer("maxNum"), QUERY_MAX)
        begin_ms, end_ms = request.integer("beginTimestamp", bits=64), request.integer("endTimestamp", bits=64)
        until_s = time.monotonic() + QUERY_S

        def check() -> None:
            refuse_if("" if request.is_open else "the client has gone")
            refuse_if("" if time.monotonic() < until_s else f"more has the hash of this key than can be read within {QUERY_S:g} s")

        query = KeyQuery(topic, key, most, max(0, begin_ms), end_ms, check=check)
        found = self._reader._query(query, LEVEL, QUERY_BYTES) if most > 0 else []
        body = b"".join(map(self.record, found))
        if not body:
            return Answer(codes.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", _INDEX_UNKNOWN)
        return Answer(fields=_INDEX_UNKNOWN, body=body)

    async def view_message(self, request: Request) -> Answer:
        """Return the message at a physical offset, which its id contains."""
        return Answer(body=await self.record_at(request, request.integer("offset", bits=64)))

    async def record_at(self, request: Request, offset: int) -> bytes:
        """Return the bytes of the message at a physical offset, for a request that needs the right to its topic."""
        message = await self._executor.run(self._reader.message_at, offset, LEVEL)
        if message is not None:
            request.require(message.topic, SUB)
        found = b"" if message is None else self.record(message)
        refuse_if("" if found else f"can not find message by the offset, {offset}")
        return found

    def record(self, message: Message) -> bytes:
        """Return a message's bytes as in the log; empty if it was just deleted."""
        log, offset = self._reader.commit_log, message.physical_offset
        start = offset - offset % log.size_bytes
        view = log.view(start)
        data = b"" if view is None else view[offset - start:offset - start + message.size_bytes]
        return data if offset >= log.min_offset else b""


_INDEX_UNKNOWN = {"indexLastUpdatePhyoffset": "0", "indexLastUpdateTimestamp": "0"}


def _offset(value: int) -> Answer:
    return Answer(fields={"offset": str(min(value, INT64_MAX))})
