"""Sends of clients: single messages, batches, one-way messages, the ends of transactions, and recalls.

RocketMQ: SendMessageProcessor, EndTransactionProcessor, TransactionalMessageCheckService, RecallMessageProcessor.

A message is stored as by the broker: body, flag, sysFlag, born time and properties are the client's, with CLUSTER and without
WAIT. A client's transaction is stored like pyengine's own (pyengine/client/half_messages.py). The answer to a message for a later
time has RocketMQ's recall handle, with the message's id as a sixth word, by which the client cancels it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pyengine.client.half_messages import HalfMessages, Outcome, PreparedCheck, half_of, real_queue
from pyengine.client.outgoing import DelayedCancels, RawMessage, delayed, map_text
from pyengine.client.pending_puts import LoopPuts, PutFuture
from pyengine.client.retries import SentBack, fitting, sent_back
from pyengine.errors import EngineError, FormatError, UsageError
from pyengine.formats import constants
from pyengine.formats.delayed_message import DELIVER_AT_DAYS_MAX, TIMER_PROPERTIES, timer_time_ms
from pyengine.formats.record import (
    HOST_V6_BYTES,
    BatchMember,
    Message,
    decode_batch,
    decode_message_id,
    decode_properties,
    encode_host,
    encode_message,
    encode_properties,
    hash_map_order,
    is_wait_store_ok,
)
from pyengine.gateway import codes
from pyengine.gateway.acl_file import PUB, SUB
from pyengine.gateway.connections import (
    INVOKE_TIMEOUT_S,
    Answer,
    Connection,
    Handlers,
    Request,
    RequestRefusedError,
    TurnExecutor,
    refuse_if,
)
from pyengine.gateway.members import Members
from pyengine.gateway.names import DEAD_PREFIX, RETRY_PREFIX, Address, Names, group_fault, topic_fault
from pyengine.gateway.positions import LEVEL
from pyengine.gateway.wire import ANSWER, Frame, encode_frame
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.native import session as native
from pyengine.results import PutError, PutResult, PutStatus
from pyengine.storage.config_table import FORBIDDEN_TOPICS, TopicConfig

if TYPE_CHECKING:
    from pyengine.client.producer import Producer

REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}  # in every answer to a send
BODY_LIMIT = "the message is illegal, maybe msg body or properties length not matched. msg body length limit {}B, msg properties " \
             "length limit 32KB."
TIMER_ILLEGAL = f"timer message illegal, the delay time should not be bigger than the max delay {DELIVER_AT_DAYS_MAX * 86_400_000}ms; " \
                "or if set del msg, the delay time should be bigger than the current time"
BUSY = "[REJECTREQUEST]system busy, start flow control for a while"
NOT_AVAILABLE = "service not available now. It may be caused by one of the following reasons: the broker's disk is full, messages are " \
                "put to the slave, message store has been shut down, etc."
_INT = re.compile("[+-]?0{0,99}[0-9]{1,10}")
COLLECT_NS = 300_000  # how long the loop itself waits for answers
LARGE_BATCH_BYTES = 64 << 10  # a larger batch is decoded in another thread
COMMITTED_WAIT_S = 5.0   # a half message in a pool buffer becomes readable within commit_interval_commit_log_ms
COMMITTED_POLL_INTERVAL_S = 0.02
ENDED_MAX = 100_000       # transactions whose end is remembered
END_THREADS = 4          # separate ones, so that their waits do not delay offsets and pulls
COMMIT_DISTANCE = 1 << 32  # an offset so far beyond the log's end is not a commit
NOT_RESUMED = f"Put message back to {constants.TRANSACTION_HALF_TOPIC} failed."
_OUTCOMES: dict[int, Outcome] = {constants.SYS_FLAG_TRANSACTION_COMMIT: "commit", constants.SYS_FLAG_TRANSACTION_ROLLBACK: "rollback"}
_V2 = {"producerGroup": "a", "topic": "b", "defaultTopic": "c", "defaultTopicQueueNums": "d", "queueId": "e", "sysFlag": "f",
       "bornTimestamp": "g", "flag": "h", "properties": "i", "reconsumeTimes": "j", "unitMode": "k", "maxReconsumeTimes": "l",
       "batch": "m"}
_V1 = {name: name for name in _V2}
_REPLY_FIELDS = ("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag",
                 "reconsumeTimes", "unitMode")  # of a reply, forwarded to the waiting producer
_STORED = {PutStatus.PUT_OK: codes.SUCCESS, PutStatus.FLUSH_DISK_TIMEOUT: codes.FLUSH_DISK_TIMEOUT,
           PutStatus.FLUSH_SLAVE_TIMEOUT: codes.FLUSH_SLAVE_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE: codes.SLAVE_NOT_AVAILABLE}


class Puts:
    """The gateway's producer, opened at the first put and after a restart of the engine; answers come in the loop's thread."""

    def __init__(self, connect: Callable[[], Producer]) -> None:
        self._connect = connect
        self._opening = threading.Lock()
        self.producer: Producer | None = None
        self._loop: asyncio.AbstractEventLoop  # both from start() on
        self._waiting: LoopPuts
        self._is_collecting = False  # the loop has been asked to look for answers
        self._thread = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = LoopPuts(self._loop)
        self._thread = threading.get_ident()

    def open(self) -> Producer:
        """Return the producer, opening one if needed; it may wait, so not in the loop's thread. EngineError without an engine."""
        with self._opening:
            if self.producer is None:
                self.producer = self._connect()
            return self.producer

    def submit(self, message: RawMessage, then: Callable[[PutResult], None], members: Sequence[BatchMember] = ()) -> None:
        """Submit a put, with `members` that of a batch, and call `then` with its result in the loop's thread."""
        producer = self.producer or self.open()
        future = producer.put_batch_raw_async(message, members) if members else producer.put_raw_async(message)
        if threading.get_ident() == self._thread:
            self.add(future, then)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the connections
                self._loop.call_soon_threadsafe(self.add, future, then)

    def add(self, future: PutFuture[PutResult], then: Callable[[PutResult], None], *, is_late: bool = False) -> None:
        """Call `then` with the result of this put of the loop, which has waited for it already if it is late."""
        self._waiting.add(future, partial(self._finish, then), is_taken=not is_late)
        if not (self._is_collecting or is_late):
            self._is_collecting = True
            self._loop.call_soon(self._collect)

    def _collect(self) -> None:
        """Take answers that arrive within microseconds: cheaper than a thread that wakes the loop, as for those of a slow writer."""
        self._is_collecting = False
        self._waiting.take(COLLECT_NS)

    def _finish(self, then: Callable[[PutResult], None], future: PutFuture[PutResult]) -> None:
        try:
            then(future.result(0))
        except Exception as error:  # noqa: BLE001 - one request's: the answers after it are given
            self._loop.call_exception_handler({"message": "the answer to a put could not be given", "exception": error})

    async def renew(self, executor: TurnExecutor) -> None:
        """End the session, and open another one for the next put, which has the settings of then. Pending answers still go out."""
        producer, self.producer = self.producer, None  # in the loop's thread, whose puts look for it first
        if producer is not None:
            await executor.run(producer.close)

    def close(self) -> None:
        with self._opening:
            producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()


class PlainSends:
    """Serves plain sends without an object for each, to topics that an ordinary send has used since topics.json has changed."""

    def __init__(self, puts: Puts, names: Names, address: Address, answer: Callable[[PutResult, int], Answer]) -> None:
        self._puts = puts
        self._names = names
        self._address = address
        self._answer = answer
        self._sends: native.SendRounds | None = None
        self._topics: Mapping[str, TopicConfig] = {}  # of topics.json, when topics were entered

    def enter(self, name: str, frame_bytes_max: int) -> None:
        if self._sends is None:
            self._sends = self._new_sends(frame_bytes_max)
        topics = self._names.recent_topics()
        if topics is not self._topics:
            self._topics = topics
            self._sends.clear_topics()
        topic = topics.get(name)
        if topic is not None and name not in self._sends.topics:
            self._sends.enter_topic(name, max(topic.write_queue_nums, topic.read_queue_nums))

    def take(self, connection: Connection, data: bytearray, at: int) -> tuple[int, int]:
        """Store and answer the plain sends in `data` from `at` on; return the number of bytes and sends taken."""
        sends, producer = self._sends, self._puts.producer
        if sends is None or producer is None or not connection.born_host or self._names.recent_topics() is not self._topics:
            return 0, 0
        taken, answers, left = producer._puts.serve_sends(sends, data, at, connection.born_host, COLLECT_NS)
        if not taken:
            return 0, 0
        connection.begin(sends.count, taken)
        for future, opaque, queue_id, frame_bytes in left:
            request = connection.deferred_request(codes.SEND_MESSAGE_V2, opaque, frame_bytes)
            self._puts.add(future, partial(self._reply, request, queue_id), is_late=True)
        connection.end(sends.count - len(left), taken - sum(frame_bytes for *_, frame_bytes in left), answers)
        return taken, sends.count

    def _reply(self, request: Request, queue_id: int, result: PutResult) -> None:
        request.reply(self._answer(result, queue_id))

    def _new_sends(self, frame_bytes_max: int) -> native.SendRounds:
        differs = {"msgId": "<id>", "queueId": "<queue>", "queueOffset": "<offset>"}
        whole = encode_frame(Frame(codes.SUCCESS, REGION | differs, flag=ANSWER))
        text, pieces = whole[8:].replace(b'"opaque":0', b'"opaque":<opaque>'), []
        for name in (*differs.values(), "<opaque>"):
            piece, _, text = text.partition(name.encode())
            pieces.append(piece)
        store_host = encode_host(self._address.store_host)
        return native.SendRounds(store_host, constants.SYS_FLAG_STORE_HOST_V6 if len(store_host) == HOST_V6_BYTES else 0,
                            self._address.cluster.encode(), [*pieces, text], frame_bytes_max)


class Sends:
    def __init__(self, puts: Puts, reader: LiveStoreReader, names: Names, address: Address, executor: TurnExecutor,
                 prepare_halves: Callable[[], None], find_producer: Callable[[str], Connection | None]) -> None:
        """`prepare_halves` is called once, in the executor, before the first half message; `find_producer` gets a client's id."""
        self._puts = puts
        self._prepare_halves = prepare_halves
        self._takes_halves = False
        self._find_producer = find_producer
        self._reader = reader
        self._names = names
        self._address = address
        self.plain = PlainSends(puts, names, address, self._answer)
        self._limit = BODY_LIMIT.format(reader.config.max_message_size_bytes)
        self._executor = executor
        self.handlers: Handlers = {
            codes.SEND_MESSAGE: self.send,
            codes.SEND_MESSAGE_V2: self.send,
            codes.SEND_BATCH_MESSAGE: self.send,
            codes.CONSUMER_SEND_MSG_BACK: self.send_back,
            codes.SEND_REPLY_MESSAGE: self.send_reply,
            codes.SEND_REPLY_MESSAGE_V2: self.send_reply,
        }

    def send(self, request: Request) -> Answer | Coroutine[Any, Any, Answer | None] | None:
        """Put one message or a batch, and answer later; a put that waits for a topic or a session does not delay others."""
        sent = _Sent(request)
        topic = self._names.recent_topic(sent.topic)
        is_large = sent.is_batch and len(request.frame.body) > LARGE_BATCH_BYTES
        needs_halves = sent.is_half and not self._takes_halves
        if (topic is None or self._puts.producer is None or is_large or needs_halves or sent.topic.startswith(RETRY_PREFIX)
                or request.connection.waiting):
            request.connection.waiting += 1
            return self._put_when_ready(request, sent, is_large)
        if request.frame.code == codes.SEND_MESSAGE_V2:
            self.plain.enter(sent.topic, request.connection.frame_bytes_max)
        return self._put(request, sent, topic)

    async def _put_when_ready(self, request: Request, sent: _Sent, is_large: bool) -> Answer | None:
        """Put after creating its topic or session, or a large batch, in the connection's order; its `waiting` counts it already."""
        try:
            async with request.connection.in_order:
                ready = await self._prepare(sent)
                if is_large:
                    return await self._executor.run(self._put, request, sent, ready)
                return self._put(request, sent, ready)
        except UsageError as error:
            return Answer(codes.SYSTEM_ERROR, str(error), REGION)
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, f"{NOT_AVAILABLE} ({error})", REGION)
        finally:
            request.connection.waiting -= 1

    async def send_back(self, request: Request) -> Answer:
        """Put a message that its consumer failed to process again, delayed, for its group, or into the group's dead letters."""
        group, offset, level = request.text("group"), request.integer("offset", bits=64), request.integer("delayLevel", 0)
        refuse_if(group_fault(group))
        config = await self._names.group_or_new(group)
        if config is None:
            return Answer(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group} {codes.FAQ}")
        if config.retry_queue_nums <= 0:
            return Answer()
        most = request.integer("maxReconsumeTimes", config.retry_max_times)
        try:
            message = await self._executor.run(self._reader.message_at, offset, LEVEL)
            if message is None:
                return Answer(codes.SYSTEM_ERROR, f"look message by offset failed, {offset}")
            request.require(message.topic, SUB)
            fault = await self.give_back(message, sent_back(message, group, delay_level=level, max_reconsume_times=most,
                                                            retry_queue_nums=config.retry_queue_nums), request.connection.report)
        except EngineError as error:
            fault = str(error)
        return Answer(codes.SYSTEM_ERROR, fault) if fault else Answer()

    async def give_back(self, message: Message, back: SentBack, report: Callable[[str], None]) -> str:
        """Put what is stored for a message that was given back. Return why it is not stored, "" if it is, or never can be: then it
        counts as done, since otherwise its clients would handle it for ever. EngineError without an engine."""
        known = self._names.topic(back.topic.topic) or await self._names.create(back.topic)
        raw = replace(back.raw, queue_id=back.raw.queue_id % max(1, known.read_queue_nums))  # of more its consumers know nothing
        if self._puts.producer is None:
            await self._executor.run(self._puts.open)

        result = await self._stored(raw)
        if result.status.is_lasting:
            group = known.topic.removeprefix(RETRY_PREFIX).removeprefix(DEAD_PREFIX)
            report(f"{message.msg_id} can neither be delivered to {group} again nor be a dead letter, and counts as done: {result.reason}")
            return ""
        if back.note and result.stored:
            report(back.note)
        return "" if result else f"{result.status.name}: {result.reason}"

    async def _stored(self, message: RawMessage) -> PutResult:
        coming: asyncio.Future[PutResult] = asyncio.get_running_loop().create_future()
        self._puts.submit(message, lambda result: None if coming.done() else coming.set_result(result))
        return await coming

    async def send_reply(self, request: Request) -> Answer:
        """Forward a reply to the producer that waits for it, which the answer's code is about, and store it in the reply topic."""
        sent = _Sent(request)
        if len(request.frame.body) > self._reader.config.max_message_size_bytes:
            return Answer(codes.MESSAGE_ILLEGAL, self._limit, REGION)
        stored: PutResult | None = None
        try:
            topic: TopicConfig | None = await self._prepare(sent)
        except UsageError as error:
            return Answer(codes.SYSTEM_ERROR, str(error), REGION)
        except EngineError:  # without an engine the producer still gets the reply
            topic = self._names.topic(sent.topic)
        if topic is not None:
            self._check(request, sent, topic)
        properties_text = request.frame.fields.get(_names_of(request)["properties"], "")
        fault = await self._push_reply(request, sent)
        if self._puts.producer is not None:
            message = RawMessage(  # like the broker: with unchanged properties and without sysFlag
                sent.topic, request.frame.body, queue_id=sent.queue_id, properties_text=properties_text, flag=sent.flag,
                born_timestamp_ms=sent.born_timestamp_ms, born_host=request.connection.address, store_host=self._address.store_host,
                reconsume_times=sent.reconsume_times, wait_store_msg_ok=is_wait_store_ok(sent.properties))
            stored = await self._stored(message)
        answer_fields = REGION | {"msgId": "0", "queueId": str(sent.queue_id), "queueOffset": "0"}
        if stored is not None and stored.status in _STORED:
            answer_fields |= {"msgId": stored.msg_id, "queueOffset": str(stored.queue_offset)}
        return Answer(codes.SYSTEM_ERROR, fault, answer_fields) if fault else Answer(fields=answer_fields)

    async def _push_reply(self, request: Request, sent: _Sent) -> str:
        client_id = sent.properties.get(constants.PROPERTY_REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{constants.PROPERTY_REPLY_TO_CLIENT}] is null"
        connection = self._find_producer(client_id)
        if connection is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        names, fields, now_ms = _names_of(request), request.frame.fields, str(time.time_ns() // 1_000_000)
        answer_fields = {name: fields[names[name]] for name in _REPLY_FIELDS if names[name] in fields}
        answer_fields |= {"properties": encode_properties(sent.properties | {constants.PROPERTY_PUSH_REPLY_TIME: now_ms}),
                 "storeTimestamp": now_ms, "bornHost": request.connection.address, "storeHost": self._address.store_host}
        try:
            answer = await connection.invoke(codes.PUSH_REPLY_MESSAGE_TO_CLIENT, answer_fields, request.frame.body)
        except OSError:
            return f"push reply message to {client_id} fail."
        return "" if answer.code == codes.SUCCESS else f"push reply message to {client_id} fail."

    async def _prepare(self, sent: _Sent) -> TopicConfig:
        topic = self._names.topic(sent.topic)
        if topic is None:
            topic = await self._names.create_for_send(sent.topic, sent.default_topic, sent.default_queue_nums, is_of_unit=sent.is_of_unit)
        if topic is None:
            raise RequestRefusedError(codes.TOPIC_NOT_EXIST, f"topic[{sent.topic}] not exist, apply first please!{codes.FAQ}", REGION)
        if self._puts.producer is None:
            await self._executor.run(self._puts.open)
        if sent.is_half and not self._takes_halves:
            await self._executor.run(self._prepare_halves)
            self._takes_halves = True
        if sent.topic.startswith(RETRY_PREFIX):
            return await self._dead_letter(sent) or topic
        return topic

    async def _dead_letter(self, sent: _Sent) -> TopicConfig | None:
        """Put a message that an ordered consumer returns itself into its dead letters after the last try, or if it has no room for a
        retry's properties."""
        group = sent.topic[len(RETRY_PREFIX):]
        config = await self._names.group_or_new(group)
        if config is None:
            raise RequestRefusedError(codes.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {group}", REGION)
        most = config.retry_max_times if sent.max_reconsume_times is None else sent.max_reconsume_times
        text = encode_properties(sent.properties | {"CLUSTER": self._address.cluster})
        if sent.reconsume_times < most and len(delayed(sent.topic, 0, text, 1, 1)[2].encode()) <= constants.PROPERTIES_BYTES_MAX:
            return None
        sent.topic, sent.queue_id = f"{DEAD_PREFIX}{group}", 0
        sent.properties.pop(constants.PROPERTY_DELAY, None)
        sent.properties, lost = fitting(sent.properties | {"CLUSTER": self._address.cluster})
        if lost:
            sent.connection.report(f"a dead letter of {group} has no room for {lost}")
        found = self._names.topic(sent.topic)
        return found if found is not None else await self._names.create(TopicConfig(sent.topic, 1, 1))

    def _check(self, request: Request, sent: _Sent, topic: TopicConfig) -> None:
        if sent.queue_id >= max(topic.write_queue_nums, topic.read_queue_nums):
            raise RequestRefusedError(codes.SYSTEM_ERROR, f"request queueId[{sent.queue_id}] is illegal, {_described(topic)} Producer: "
                                                          f"{request.connection.address}", REGION)
        if sent.queue_id < 0:
            if topic.write_queue_nums <= 0:
                raise RequestRefusedError(codes.SYSTEM_ERROR, f"the topic {topic.topic} has no queue to write to", REGION)
            sent.queue_id = random.randrange(topic.write_queue_nums)
        if sent.is_batch and (sent.is_half or sent.level):
            raise RequestRefusedError(codes.MESSAGE_ILLEGAL, "a batch holds no transaction and no delayed message: send it singly", REGION)
        if sent.sys_flag & constants.SYS_FLAG_TRANSACTION_MASK and not sent.is_half:
            raise RequestRefusedError(codes.NO_PERMISSION, "a part of a transaction cannot be sent as a message", REGION)

    def _put(self, request: Request, sent: _Sent, topic: TopicConfig) -> Answer | None:
        """Submit one message or a batch, which is answered later; in the loop's thread, or another for a large batch."""
        self._check(request, sent, topic)
        members: list[BatchMember] = []
        if sent.is_batch:
            try:
                members = decode_batch(request.frame.body)
                if not members:
                    raise FormatError("it holds no message")
            except FormatError as error:
                return Answer(codes.SYSTEM_ERROR, f"the batch cannot be read: {error}", REGION)
        try:
            message = self._timed(sent, members, self._message(request, sent))
        except FormatError as error:
            return Answer(codes.MESSAGE_ILLEGAL, f"{TIMER_ILLEGAL} ({error})", REGION)
        message = half_of(message) if sent.is_half else message
        # RocketMQ 5's proxy needs the number of a transaction, which is its message's unique key.
        unique_key = sent.properties.get(constants.PROPERTY_UNIQ_KEY, "")
        more = {"transactionId": unique_key} if sent.is_half else {}

        def answer(result: PutResult) -> None:
            found = self._answer(result, sent.queue_id)
            if message.deliver_at_ms and unique_key and " " not in unique_key:
                text = f"v1 {sent.topic} {self._address.broker_name} {message.deliver_at_ms} {unique_key} {result.msg_id}"
                more["recallHandle"] = base64.urlsafe_b64encode(text.encode()).decode()
            request.reply(replace(found, fields={**found.fields, **more}) if more and result.stored else found)

        self._puts.submit(message, answer, members)
        return None

    def _timed(self, sent: _Sent, members: Sequence[BatchMember], message: RawMessage) -> RawMessage:
        """Return the message to store of one that a client of RocketMQ 5 may have given a time; FormatError if it is refused."""
        if message.delay_level or not any(_names_time(text) for text in (message.properties_text, *(
                member.properties_text for member in members))):
            return message
        if sent.is_batch or sent.is_half:
            raise FormatError("a batch and a transaction hold no message for a later time: send it singly, outside of a transaction")
        now_ms = time.time_ns() // 1_000_000
        deliver_at_ms = timer_time_ms(sent.properties, now_ms)
        if deliver_at_ms is None:
            return message
        noted = sent.properties | {"CLUSTER": self._address.cluster, constants.PROPERTY_TIMER_OUT_MS: str(deliver_at_ms)}
        return replace(message, properties_text=map_text(noted), deliver_at_ms=deliver_at_ms)

    def _message(self, request: Request, sent: _Sent) -> RawMessage:
        """Return the message to store, with properties in the order of the broker's map."""
        properties: Mapping[str, str] = sent.properties | {"CLUSTER": self._address.cluster}
        waits = is_wait_store_ok(properties)
        names = hash_map_order(properties)
        level = 0 if sent.is_half else sent.level
        if level:  # it counts, and not the time
            names = [name for name in names if name not in TIMER_PROPERTIES]
        elif not (sent.is_batch or sent.is_half):  # of these the broker encodes the properties again, with WAIT
            names = [name for name in names if name != constants.PROPERTY_WAIT]
        return RawMessage(
            sent.topic, b"" if sent.is_batch else request.frame.body, queue_id=sent.queue_id,
            properties_text=encode_properties({name: properties[name] for name in names}), flag=sent.flag, sys_flag=sent.sys_flag,
            born_timestamp_ms=sent.born_timestamp_ms, born_host=request.connection.address, store_host=self._address.store_host,
            reconsume_times=sent.reconsume_times, wait_store_msg_ok=waits, delay_level=level)

    def _answer(self, result: PutResult, queue_id: int) -> Answer:
        status = result.status
        code = _STORED.get(status)
        if code is not None:
            return Answer(code, None if code == codes.SUCCESS else result.reason, REGION | {
                "msgId": result.msg_id, "queueId": str(queue_id), "queueOffset": str(result.queue_offset)})
        if status in (PutStatus.MESSAGE_ILLEGAL, PutStatus.PROPERTIES_SIZE_EXCEEDED):
            return Answer(codes.MESSAGE_ILLEGAL, f"{self._limit} ({result.reason})", REGION)
        if status is PutStatus.OS_PAGECACHE_BUSY:
            return Answer(codes.SYSTEM_BUSY, BUSY, REGION)
        if status is PutStatus.SERVICE_NOT_AVAILABLE:
            return Answer(codes.SERVICE_NOT_AVAILABLE, f"{NOT_AVAILABLE} ({result.reason})", REGION)
        if status is PutStatus.CREATE_MAPEDFILE_FAILED:
            return Answer(codes.SYSTEM_ERROR, "create mapped file failed, server is busy or broken.", REGION)
        return Answer(codes.SYSTEM_ERROR, f"{status.name}: {result.reason}", REGION)


class _Sent:
    """The header of a send, with long or short names; WireError for wrong numbers, RequestRefusedError for topics."""

    __slots__ = ("connection", "topic", "default_topic", "default_queue_nums", "queue_id", "sys_flag", "born_timestamp_ms", "flag",
                 "properties", "reconsume_times", "max_reconsume_times", "is_of_unit", "is_batch", "is_half")

    @property
    def level(self) -> int:
        """The delay level, 0 for none; RequestRefusedError for what is no int of Java, as of the broker."""
        text = self.properties.get(constants.PROPERTY_DELAY, "0")
        if not _INT.fullmatch(text) or not -(1 << 31) <= (level := int(text)) < 1 << 31:
            raise RequestRefusedError(codes.SYSTEM_ERROR, f"the delay level {text[:32]!r} is not a number of 32 bits", REGION)
        return max(0, level)

    def __init__(self, request: Request) -> None:
        frame = request.frame
        names = _names_of(request)
        fields = frame.fields
        self.connection = request.connection
        self.topic = fields.get(names["topic"], "")
        self.default_topic = fields.get(names["defaultTopic"])
        self.default_queue_nums = request.integer(names["defaultTopicQueueNums"], 4)
        self.queue_id = request.integer(names["queueId"])
        self.sys_flag = request.integer(names["sysFlag"], 0)
        self.born_timestamp_ms = request.integer(names["bornTimestamp"], 0, bits=64)
        self.flag = request.integer(names["flag"], 0)
        text = fields.get(names["properties"], "")
        if len(text) > 2 * constants.PROPERTIES_BYTES_MAX:  # a shorter one may fit without what is left out of it
            raise RequestRefusedError(codes.MESSAGE_ILLEGAL, f"the message is illegal: its properties have {len(text)} characters, at most "
                                                             f"{constants.PROPERTIES_BYTES_MAX} bytes are possible", REGION)
        self.properties = decode_properties(text)
        self.reconsume_times = request.integer(names["reconsumeTimes"], 0)
        most = names["maxReconsumeTimes"]
        self.max_reconsume_times = request.integer(most) if most in fields else None
        self.is_of_unit = request.flag(names["unitMode"])
        # A retried message is not a half message any more, even if its properties say so.
        self.is_half = (self.properties.get(constants.PROPERTY_TRANSACTION_PREPARED, "").lower() == "true"
                        and not (self.reconsume_times > 0 and self.properties.get(constants.PROPERTY_DELAY, "0") != "0"))
        self.is_batch = frame.code == codes.SEND_BATCH_MESSAGE or request.flag(names["batch"])
        _check_topic(self.topic)
        # A copy of a message, which its second queues have already; a reply is stored as it is.
        if self.topic.startswith(RETRY_PREFIX) and frame.code not in (codes.SEND_REPLY_MESSAGE, codes.SEND_REPLY_MESSAGE_V2):
            self.properties.pop(constants.PROPERTY_INNER_MULTI_DISPATCH, None)
        if constants.PROPERTY_INNER_MULTI_DISPATCH in self.properties:
            for name in self.properties[constants.PROPERTY_INNER_MULTI_DISPATCH].split(constants.MULTI_DISPATCH_SEPARATOR):
                _check_topic(name)
                request.require(name, PUB)


def _names_of(request: Request) -> Mapping[str, str]:
    return _V1 if request.frame.code in (codes.SEND_MESSAGE, codes.SEND_REPLY_MESSAGE) else _V2


def _names_time(properties_text: str) -> bool:
    if not any(name in properties_text for name in TIMER_PROPERTIES):  # of most messages
        return False
    properties = decode_properties(properties_text)
    return constants.PROPERTY_TIMER_OUT_MS not in properties and any(name in properties for name in TIMER_PROPERTIES)


def _check_topic(topic: str) -> None:
    if fault := topic_fault(topic):
        raise RequestRefusedError(codes.SYSTEM_ERROR, fault, REGION)
    if topic in FORBIDDEN_TOPICS:
        raise RequestRefusedError(codes.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden.", REGION)


def _described(topic: TopicConfig) -> str:
    """Format a topic like Java's TopicConfig.toString."""
    return (f"TopicConfig [topicName={topic.topic}, readQueueNums={topic.read_queue_nums}, writeQueueNums={topic.write_queue_nums}, "
            f"perm={topic.perm_text}, topicFilterType={topic.topic_filter_type}, topicSysFlag={topic.topic_sys_flag}, "
            f"order={str(topic.order).lower()}]")


class Ends:
    """Serves the ends of transactions, asks producers for missing ones, and cancels messages for a later time."""

    def __init__(self, puts: Puts, reader: LiveStoreReader, members: Members, address: Address,
                 topic_fault: Callable[[str | None, str, int, str, int], str] | None = None) -> None:
        """`topic_fault`: that of the access list, if there is one."""
        self._puts = puts
        self._topic_fault = topic_fault
        self._reader = reader
        self._members = members
        self._executor = TurnExecutor(END_THREADS, "ends")
        self._recalls = TurnExecutor(1, "recalls")  # one after the other waits for the disk
        self._halves = HalfMessages(reader.root, lambda message, timeout_s: puts.open().put_raw(message, timeout_s=timeout_s),
                                    lambda: reader.config, address.store_host)
        self._check = PreparedCheck(self._halves)
        self.interval_s = reader.config.transaction_check_interval_ms / 1000  # between two rounds of ask_for_ends()
        self._cancels: DelayedCancels | None = None
        self._ended: dict[tuple[int, str], str] = {}  # how transactions have ended, "" for one that ends just now
        self._ended_lock = threading.Lock()
        self.handlers: Handlers = {codes.END_TRANSACTION: self.end, codes.RESUME_CHECK_HALF_MESSAGE: self.resume,
                                   codes.RECALL_MESSAGE: self.recall}

    def prepare(self) -> None:
        """Add the half topic to topics.json; not in the loop's thread."""
        self._halves.enter(constants.TRANSACTION_HALF_TOPIC)

    async def end(self, request: Request) -> Answer | None:
        """Commit or roll back, if group and offsets are those of the half message; UNKNOWN changes nothing."""
        kind = request.integer("commitOrRollback")
        group = request.text("producerGroup")
        queue_offset, offset = request.integer("tranStateTableOffset", bits=64), request.integer("commitLogOffset", bits=64)
        if kind == constants.SYS_FLAG_TRANSACTION_NONE:
            return Answer()
        if kind not in _OUTCOMES:
            return Answer(codes.SYSTEM_ERROR, f"{kind} ends no transaction")
        try:
            half = await self._executor.run(self._halves.find, offset) if await self._is_committed(offset) else None
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, str(error))
        if half is None:
            return Answer(codes.SYSTEM_ERROR, "Find prepared transaction message failed")
        request.require(real_queue(half)[0], PUB)
        if half.properties.get(constants.PROPERTY_PRODUCER_GROUP) != group:
            return Answer(codes.SYSTEM_ERROR, "The producer group wrong")
        if half.queue_offset != queue_offset:
            return Answer(codes.SYSTEM_ERROR, "The transaction state table offset wrong")
        try:
            return await self._executor.run(self._end_once, _OUTCOMES[kind], half)
        except PutError as error:
            return Answer(codes.SYSTEM_ERROR, str(error))
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, str(error))

    def _end_once(self, outcome: Outcome, half: Message) -> Answer:
        """End a transaction; a second end changes nothing, as with RocketMQ's proxy (its broker would store the message again)."""
        key = half.physical_offset, half.uniq_key or ""
        with self._ended_lock:
            if (known := self._ended.get(key)) is not None:
                return Answer() if known == outcome else Answer(
                    codes.SYSTEM_ERROR, f"the transaction is ended already, by a {known or 'request that is under way'}")
            if len(self._ended) >= ENDED_MAX:
                del self._ended[next(iter(self._ended))]
            self._ended[key] = ""
        is_stored = False
        try:
            result = self._halves.end(half, outcome)
            is_stored = result.stored
        finally:
            with self._ended_lock:
                if is_stored:
                    self._ended[key] = outcome
                else:
                    self._ended.pop(key, None)
        return Answer() if is_stored else Answer(codes.SYSTEM_ERROR, result.reason)

    async def resume(self, request: Request) -> Answer:
        """Put a half message back for which checks were given up; they begin again with the first one."""
        try:
            offset = decode_message_id(request.text("msgId"))[1]
            discarded = await self._executor.run(self._halves.find, offset, constants.TRANSACTION_DISCARD_TOPIC)
            if discarded is None:
                raise UsageError(f"no message of {constants.TRANSACTION_DISCARD_TOPIC} begins at {offset}")
            request.require(real_queue(discarded)[0], PUB)
            await self._executor.run(self._halves.resume, discarded)
        except EngineError as error:
            return Answer(codes.SYSTEM_ERROR, f"{NOT_RESUMED} ({error})")
        return Answer()

    async def recall(self, request: Request) -> Answer:
        """Cancel a message for a later time by its recall handle; the answer has its unique key."""
        topic = request.text("topic")
        request.require(topic, PUB)
        try:
            version, of_topic, _, _, unique_key, msg_id = base64.urlsafe_b64decode(request.text("recallHandle")).decode().split(" ")
        except ValueError:
            version = of_topic = ""
        if version != "v1" or of_topic != topic:
            return Answer(codes.INVALID_PARAMETER, "recall failed, the handle is none of a message of this topic here")

        def cancel() -> bool:
            if self._cancels is None:
                self._cancels = DelayedCancels(LiveStoreReader(self._reader.root))
            return self._cancels.cancel(msg_id, topic)

        try:
            if not await self._is_committed(decode_message_id(msg_id)[1]):  # cancel() would wait for it in the thread
                raise UsageError(f"no message has the id {msg_id}")
            is_cancelled = await self._recalls.run(cancel)
        except (FormatError, UsageError) as error:
            return Answer(codes.INVALID_PARAMETER, f"recall failed, {error}")
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, f"recall failed, {error}")
        return Answer(fields={"msgId": unique_key}) if is_cancelled else Answer(
            codes.SYSTEM_ERROR, "recall failed, the message is due, delivered or deleted")

    async def _is_committed(self, offset: int) -> bool:
        """Return whether this byte is in the file; wait, without a thread, while acknowledged ones may not be there yet."""
        deadline_s = time.monotonic() + COMMITTED_WAIT_S
        while 0 <= offset - self._reader.max_physical_offset(LEVEL) < COMMIT_DISTANCE and time.monotonic() < deadline_s:
            await asyncio.sleep(COMMITTED_POLL_INTERVAL_S)
        return offset < self._reader.max_physical_offset(LEVEL)

    # ---- asking -------------------------------------------------------------------

    async def ask_for_ends(self) -> None:
        """Find undecided transactions once, and ask a producer of each one's group; raise errors at the end."""
        asked: dict[Connection, list[Message]] = {}
        producers = cache(self._producers)  # the rights are checked once in a round, in its thread

        def producers_of(half: Message) -> list[Connection]:
            topic = ""  # without one _ask() fails
            with contextlib.suppress(UsageError):
                topic, _ = real_queue(half)
            return producers(half.properties.get(constants.PROPERTY_PRODUCER_GROUP, ""), topic)

        for half in await self._executor.run(self._check.round, lambda half: bool(producers_of(half)), round(self.interval_s * 500)):
            clients = [each for each in producers_of(half) if not each.is_closed]
            if clients:  # another one at each try, since not all may know
                asked.setdefault(clients[int(half.properties[constants.PROPERTY_TRANSACTION_CHECK_TIMES]) % len(clients)], []).append(half)
        if asked:
            self._check.not_asked.clear()
        for failed in await asyncio.gather(*(self._ask_all(producer, halves) for producer, halves in asked.items())):
            if failed is not None:
                raise failed

    def _producers(self, group: str, topic: str) -> list[Connection]:
        """Return the group's producers that may send to the topic: any client may name any group. Thread-safe."""
        fault = self._topic_fault
        return [connection for connection, client in list(self._members.producers.get(group, {}).items())
                if fault is None or not fault(client.access_key, connection.host, codes.CHECK_TRANSACTION_STATE, topic, PUB)]

    async def _ask_all(self, producer: Connection, halves: list[Message]) -> Exception | None:
        """Ask a producer as fast as it reads, for an interval at most; return an error. The next round asks about what is left, with
        no try less if this producer took any."""
        failed: Exception | None = None
        number = 0
        with contextlib.suppress(OSError):  # it does not read, or has gone
            async with asyncio.timeout(max(INVOKE_TIMEOUT_S, self.interval_s)):
                for half in halves:
                    try:
                        await self._ask(producer, half)
                    except OSError:
                        raise
                    except Exception as error:  # noqa: BLE001 - the others must be asked about too
                        failed = error
                    number += 1
        if number:
            self._check.not_asked.update(half.physical_offset for half in halves[number:])
        return failed

    async def _ask(self, producer: Connection, half: Message) -> None:
        """Ask about one message; the answer is an END_TRANSACTION. OSError."""
        topic, queue_id = real_queue(half)
        unique = half.uniq_key or ""
        body = encode_message(replace(half, topic=topic, queue_id=queue_id))
        fields = {"commitLogOffset": str(half.physical_offset), "msgId": unique, "offsetMsgId": half.msg_id,
                  "tranStateTableOffset": str(half.queue_offset), "transactionId": unique}
        await producer.may_write(INVOKE_TIMEOUT_S)
        if not producer.is_local:
            producer.invoke_oneway(codes.CHECK_TRANSACTION_STATE, fields, body)
        elif (await producer.invoke(codes.CHECK_TRANSACTION_STATE, fields, body)).code != codes.SUCCESS:
            raise TimeoutError(f"the client at {producer.address} takes no question")

    def close(self) -> None:
        for executor in (self._executor, self._recalls):
            executor.shutdown(wait=True)
        if self._cancels is not None:
            self._cancels.close()
        self._halves.close()
