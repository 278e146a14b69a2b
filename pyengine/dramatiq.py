"""A Dramatiq broker whose queues are topics of a pyengine store: `pyengine.dramatiq.PyengineBroker`.

    dramatiq.set_broker(PyengineBroker("my-store"))      # an engine runs there: `pyengine start my-store`

At least once: a message is acknowledged when its actor has ended, and the acknowledgements are stored every `commit_interval_s`;
what runs twice after a kill is in docs/tasks.md. The store keeps delays and dead letters. Needs Dramatiq, of the extra `dramatiq`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from queue import PriorityQueue
from typing import Any

from pyengine import arguments
from pyengine.client.consumer import Consumer as Member
from pyengine.client.consumer import Sharing, consume
from pyengine.client.handler import SESSION_TIMEOUT_S, Running, give_back, skip_undone, stored_is_sent, undone
from pyengine.client.producer import SharedProducer, connect
from pyengine.errors import EngineError, require_extra
from pyengine.formats.record import Message as StoredMessage
from pyengine.results import PutError
from pyengine.storage.config_table import QUEUE_NUMS_NEW, TopicConfig, TopicConfigs

try:
    from dramatiq import Broker, Consumer, Message, MessageProxy, Middleware, Worker
    from dramatiq.common import iter_queue
    from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound
except ImportError:
    require_extra("dramatiq", name="dramatiq")
    raise

JOIN_POLL_INTERVAL_S = 0.1
_LOG = logging.getLogger("pyengine.dramatiq")


class PyengineBroker(Broker):
    """Sends the messages of the queue Q to the topic `NAMESPACE-Q`, which the workers read as the group of the same name.

    `queues` is the number of queues of a topic that is new: so many worker processes share its messages. Delays are kept by the
    store, so there are no delay queues. A message that failed for good becomes a dead letter of the group (`pyengine dlq`).
    A process connects when it first sends.
    """

    def __init__(self, store: str | os.PathLike[str], *, namespace: str = "dramatiq", queues: int = QUEUE_NUMS_NEW,
                 commit_interval_s: float = 1.0, session_timeout_s: float = SESSION_TIMEOUT_S, sharing: Sharing = "queues",
                 middleware: list[Middleware] | None = None) -> None:
        super().__init__(middleware=middleware)
        self.store = arguments.local_path(store).absolute()
        self.namespace = namespace
        self._new_topic = TopicConfig(namespace, queues, queues).check()
        self._options: dict[str, Any] = {
            "commit_interval_s": commit_interval_s, "session_timeout_s": session_timeout_s, "sharing": sharing}
        self._topics: set[str] = set()  # that this process has made or found
        self._producers = SharedProducer()
        self.add_middleware(_Leaving())

    def topic(self, queue_name: str) -> str:
        """Return the topic, and the group, of a declared queue; QueueNotFound for another one."""
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)  # type: ignore[no-untyped-call]  # Dramatiq's errors have none
        return f"{self.namespace}-{queue_name}"

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue; its topic is made when it is first used."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Store a message, to be delivered after `delay` ms. PutError if it is refused, EngineUnavailableError without an engine."""
        due_ms = None if delay is None else time.time_ns() // 1_000_000 + 1 + int(delay)
        self.emit_before("enqueue", message, delay)
        try:
            self.put(message, due_ms)
        except EngineError:
            if isinstance(message, _Task):  # its retry: Dramatiq only logs the error, and acknowledges the message
                message.unsent_due_ms = due_ms or 0
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def put(self, message: Message[Any] | MessageProxy, due_ms: int | None) -> None:
        """Store a message, to be delivered at a time in ms since 1970, without telling middleware."""
        topic = self.topic(message.queue_name)
        producer = self._producers.get(lambda: connect(self.store))
        self._make(topic)
        with stored_is_sent():
            producer.put(topic, message.encode(), keys=message.message_id, deliver_at=due_ms)

    def _make(self, topic: str) -> None:
        if topic not in self._topics:
            TopicConfigs(self.store).ensure(replace(self._new_topic, topic=topic))
            self._topics.add(topic)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """Return a member of the queue's group, with up to `prefetch` messages at once; ConnectionClosed if it cannot read now."""
        topic = self.topic(queue_name)
        with _errors_of_a_connection():
            member = consume(self.store, topic, group=topic, auto_commit=False, **self._options)
            try:
                self._make(topic)
            except BaseException:
                member.close()
                raise
        return _QueueConsumer(self, member, prefetch, timeout / 1000)

    def flush(self, queue_name: str) -> None:
        """Drop the messages that have arrived in a queue and are not done; delayed ones still arrive."""
        skip_undone(self.store, self.topic(queue_name))

    def flush_all(self) -> None:
        """Drop the messages that have arrived in any declared queue and are not done."""
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until each message that has arrived in a queue is stored as done; QueueJoinTimeout after `timeout` ms."""
        topic = self.topic(queue_name)
        until_s = None if timeout is None else time.monotonic() + timeout / 1000
        while undone(self.store, topic):
            if until_s is not None and time.monotonic() >= until_s:
                raise QueueJoinTimeout(queue_name)  # type: ignore[no-untyped-call]  # Dramatiq's errors have none
            time.sleep(JOIN_POLL_INTERVAL_S)

    def close(self) -> None:
        """Disconnect; the next message connects again."""
        self._producers.close()


class _Leaving(Middleware):
    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        for thread in worker.consumers.values():
            if isinstance(thread.consumer, _QueueConsumer):
                thread.consumer.leave(worker.work_queue)


class _Task(MessageProxy):
    """A message that was delivered to `consumer`. `unsent_due_ms`: when its next try, which could not be stored, is due; or None."""

    def __init__(self, message: Message[Any], stored: StoredMessage, consumer: _QueueConsumer) -> None:
        super().__init__(message)
        self.stored = stored
        self.consumer = consumer
        self.unsent_due_ms: int | None = None


class _QueueConsumer(Consumer):
    """A member of a queue's group. Its own thread asks for messages; the worker's threads acknowledge them."""

    def __init__(self, broker: PyengineBroker, member: Member, prefetch: int, timeout_s: float) -> None:
        self._broker = broker
        self._member = member
        self._timeout_s = timeout_s
        self._running: Running[int] = Running(member, prefetch)
        self._changed = threading.Condition()  # of what runs
        self._fetched: PriorityQueue[Any] | None = None  # once the worker is to end: what it has fetched, and not begun

    def __next__(self) -> MessageProxy | None:
        """Return the next message; None after the timeout, or if no more may run beside those that are not done."""
        if self._fetched is not None:
            for item in iter_queue(self._fetched):  # type: ignore[no-untyped-call]  # as Dramatiq's errors
                item.message.consumer.requeue([item.message])
            time.sleep(self._timeout_s)
            return None
        with self._changed:
            if not self._changed.wait_for(self._running.room, self._timeout_s):
                return None
        task = self._pull()
        if task is not None:
            with self._changed:
                self._running.begin(task.stored.physical_offset, task.stored)
        return task

    def _pull(self) -> _Task | None:
        with _errors_of_a_connection():
            for stored in self._member.pull(1, timeout_s=self._timeout_s):
                try:
                    return _Task(Message.decode(stored.body), stored, self)
                except DecodeError:
                    _LOG.exception("%s is no message of Dramatiq, so it becomes a dead letter of %s", stored.msg_id, self._member.group)
                    give_back(self._member, stored, -1)
        return None

    def ack(self, message: MessageProxy) -> None:
        """Note that a message is done. If it failed and its next try could not be stored, store that first: ConnectionClosed."""
        task = self._own(message)
        if task is None:
            return
        if task.unsent_due_ms is not None:
            try:
                with _errors_of_a_connection():
                    self._broker.put(task, task.unsent_due_ms)
            except ConnectionClosed as error:
                cause = error.__cause__
                if not (isinstance(cause, PutError) and cause.result.status.is_lasting):
                    raise
                self.nack(message)
                return
        self._member.ack(task.stored)
        self._end(task)

    def nack(self, message: MessageProxy) -> None:
        """Make a message a dead letter of the group; ConnectionClosed if that could not be stored, so that Dramatiq tries again."""
        task = self._own(message)
        if task is not None:
            with _errors_of_a_connection():
                give_back(self._member, task.stored, -1)
            self._end(task)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Leave to others what no actor has begun with: it does not count as delivered."""
        for task in filter(None, map(self._own, messages)):
            self._member._take_back([task.stored])
            self._end(task)

    def leave(self, fetched: PriorityQueue[Any]) -> None:
        """Leave to other workers what no actor has begun with, now and until close()."""
        self._fetched = fetched  # first given back by the thread that asks for messages, which may be adding one
        self._member._leave()

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._running.end(task.stored.physical_offset)
            self._changed.notify()

    def _own(self, message: MessageProxy) -> _Task | None:
        """Return the message if it is this consumer's; that of one that was closed after an error is delivered again."""
        return message if isinstance(message, _Task) and message.consumer is self else None

    def close(self) -> None:
        """Store the acknowledgements and leave the group: messages that are not acknowledged come again."""
        with _errors_of_a_connection():
            self._member.close()


@contextlib.contextmanager
def _errors_of_a_connection() -> Iterator[None]:
    """Raise an error of the store as the one after which Dramatiq tries again."""
    try:
        yield
    except EngineError as error:
        raise ConnectionClosed(error) from error  # type: ignore[no-untyped-call]  # Dramatiq's errors have none
