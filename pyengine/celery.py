"""A transport of Kombu whose queues are topics of a pyengine store, for Celery: `broker_url = "pyengine:///path/to/my-store"`.

    import pyengine.celery                                             # Kombu knows the scheme from here on
    app = celery.Celery("jobs", broker="pyengine:///path/to/my-store")  # an engine runs there: `pyengine start`

At least once, if a task is acknowledged late; what runs twice after a kill is in docs/tasks.md. The store keeps countdowns, dead
letters and the bindings of exchanges. What a process reads of a queue is read once for all its connections. A queue that belongs to
one client (exclusive, or deleted with its last consumer: of remote control, events and `rpc://` results) has no topic: it reads
that of its exchange from the moment of its declaration on. Needs Kombu, which comes with Celery, of the extra `celery`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlparse
from weakref import WeakValueDictionary

from pyengine import arguments
from pyengine.client.consumer import MAX_DELIVERIES, Consumer, Sharing, consume
from pyengine.client.consumer_groups import AtOffset, reaches
from pyengine.client.handler import HANDLE_AGAIN_S, SESSION_TIMEOUT_S, Running, give_back, skip_undone, stored_is_sent, undone
from pyengine.client.producer import Producer, SharedProducer, connect
from pyengine.errors import (
    DiskError,
    EngineError,
    EngineUnavailableError,
    FormatError,
    NotAStoreError,
    StoreBusyError,
    UsageError,
    require_extra,
)
from pyengine.formats.record import Message
from pyengine.formats.small_file import path_stamp
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.results import PutIndeterminateError, PutRefusedError
from pyengine.storage.config_table import QUEUE_NUMS_NEW, TopicConfig, TopicConfigs
from pyengine.storage.durable_file import DurableRecord, exclusive

try:
    from amqp.protocol import queue_declare_ok_t
    from kombu.exceptions import ChannelError
    from kombu.transport import TRANSPORT_ALIASES, virtual
    from kombu.utils.compat import detect_environment
    from kombu.utils.json import dumps, loads
    from kombu.utils.uuid import uuid
except ImportError:
    require_extra("kombu", name="celery")
    raise

GET_WAIT_S = 0.05           # how long a message that was just put may take until a get without a consumer finds it
POLL_S = 1.0                # the longest sleep of drain_events(), after which it looks again
_LOG = logging.getLogger("pyengine.celery")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Bindings = dict[str, tuple[str, list[tuple[str, str]]]]
"""Topic of an exchange -> the exchange's type, and (routing key, queue) of the shared queues that are bound to it."""

BINDINGS: DurableRecord[Bindings] = DurableRecord(
    "kombu-bindings.json",
    pack=lambda table: {name: {"type": kind, "bindings": rows} for name, (kind, rows) in table.items()},
    unpack=lambda found: {name: (row["type"], [(key, queue) for key, queue in row["bindings"]]) for name, row in found.items()},
    is_sealed=False, indent=1)


@dataclass(frozen=True, slots=True)
class _Options:
    """What `broker_transport_options` may say; Kombu's own and other transports' options are left alone."""

    namespace: str = "celery"
    queues: int = QUEUE_NUMS_NEW
    commit_interval_s: float = 1.0
    session_timeout_s: float = SESSION_TIMEOUT_S
    max_deliveries: int | None = MAX_DELIVERIES
    sharing: Sharing = "queues"

    @classmethod
    def of(cls, given: dict[str, Any]) -> _Options:
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})


# ---- what the connections of a process share ------------------------------------

_stores: dict[tuple[Path, _Options], _Store] = {}
_lock = arguments.inherited_lock()
os.register_at_fork(after_in_child=_stores.clear)  # a child makes its own; what its parent reads stays the parent's


class _Delivery(NamedTuple):
    """A message that was read of a queue, by which of its members."""

    queue: _Queue
    member: Consumer
    stored: Message


class _Store:
    """One store with one set of options in this process: its producer, its topics, and its queues by name."""

    def __init__(self, path: Path, options: _Options) -> None:
        self.path = path
        self.options = options
        self.lock = arguments.inherited_lock()  # a child closes what it has of its parent's
        self.pid = os.getpid()
        self._connections = 0
        self.bindings_path = BINDINGS.path(path)
        self._new_topic = TopicConfig(options.namespace, options.queues, options.queues).check()
        self._producers = SharedProducer()
        self._queues: dict[str, _Queue] = {}
        self._made: set[str] = set()       # topics that this process has made or found
        self._configs = TopicConfigs(path)
        self._bindings: tuple[int, Bindings] = (-1, {})

    @classmethod
    def joined(cls, path: Path, options: _Options) -> _Store:
        """Return this process's one, for one more connection, until its leave()."""
        with _lock:
            found = _stores.setdefault((path, options), cls(path, options))
            found._connections += 1
            return found

    def leave(self) -> None:
        """Note that a connection was closed; the last one closes the producer."""
        if self.pid != os.getpid():
            return
        with _lock:
            self._connections -= 1
            if self._connections:
                return
            _stores.pop((self.path, self.options), None)
        self._producers.close()

    def producer(self, timeout_s: float) -> Producer:
        """Return the producer, which connects to the engine when it is first wanted."""
        return self._producers.get(lambda: connect(self.path, timeout_s=timeout_s))

    def queue(self, name: str) -> _Queue:
        """Return the queue of this name, which is kept from here on."""
        with self.lock:
            return self._queues.setdefault(name, _Queue(self, name))

    def look_up(self, name: str) -> _Queue:
        """Return what is known of a queue; of one that this process does not use, nothing is kept."""
        return self._queues.get(name) or _Queue(self, name)

    def forget(self, queue: _Queue) -> None:
        with self.lock:
            self._queues.pop(queue.name, None)

    def exchange_topic(self, exchange: str) -> str:
        """Return the topic that clients' own queues read of an exchange; that of "" is for what is sent to such a queue by name."""
        return f"{self.options.namespace}~{quote(exchange, safe='')}"

    def make(self, topic: str, queues: int) -> None:
        """Enter a topic with so many queues into topics.json, unless it has one."""
        if topic not in self._made:
            self._configs.ensure(TopicConfig(topic, queues, queues))
            self._made.add(topic)

    def has(self, topic: str) -> bool:
        return topic in self._made or topic in self._configs.read().rows

    def bound(self, exchange: str, default: str = "direct") -> tuple[str, list[tuple[str, str]]]:
        """Return the type of an exchange, and (routing key, queue) of the shared queues that processes have bound to it."""
        return self._all_bindings().get(self.exchange_topic(exchange), (default, []))

    def _all_bindings(self) -> Bindings:
        stamp = path_stamp(self.bindings_path)
        if stamp != self._bindings[0]:
            self._bindings = stamp, self._read_bindings()
        return self._bindings[1]

    def _read_bindings(self) -> Bindings:
        """FormatError if the file is damaged: without bindings, what is published to an exchange would go nowhere."""
        record, damage = BINDINGS.read(self.path)
        if damage:
            raise FormatError(f"{self.bindings_path} {damage}, so nobody knows which queues get what is published: remove it, and start "
                              "the workers again, which bind their queues")
        return record or {}

    def bind(self, exchange: str, kind: str, row: tuple[str, str]) -> None:
        """Bind a shared queue, for all processes; durable when this returns."""
        if row not in self.bound(exchange)[1]:
            with exclusive(self.bindings_path):
                table = self._read_bindings()
                _, rows = table.setdefault(self.exchange_topic(exchange), (kind, []))
                if row not in rows:
                    rows.append(row)
                    BINDINGS.write(self.path, table)

    def unbind(self, is_gone: Callable[[str, tuple[str, str]], bool]) -> None:
        """Remove the bindings of this namespace of which `is_gone` (topic of the exchange, row) is true; durable when this returns."""
        def kept(table: Bindings) -> Bindings:
            rest = {name: (kind, [row for row in rows if not (name.startswith(self.exchange_topic("")) and is_gone(name, row))])
                    for name, (kind, rows) in table.items()}
            return {name: entry for name, entry in rest.items() if entry[1]}

        if kept(self._all_bindings()) != self._all_bindings():
            with exclusive(self.bindings_path):
                BINDINGS.write(self.path, kept(self._read_bindings()))

    def put(self, topic: str, message: dict[str, Any], timeout_s: float, **options: Any) -> None:
        """Store a message. A refusal that is about the message itself is a PutError, one that may end an error of the connection."""
        body = dumps(message).encode()
        with _errors_of_a_connection(), stored_is_sent():
            self.producer(timeout_s).put(topic, body, **options)


@contextlib.contextmanager
def _errors_of_a_connection() -> Iterator[None]:
    """Raise a refusal that may end, as for a full disk, as an error of the connection, after which Kombu and Celery try again."""
    try:
        yield
    except PutRefusedError as error:
        if error.result.status.is_lasting:
            raise
        raise EngineUnavailableError(str(error)) from error


class _Source(NamedTuple):
    """What one member of a client's own queue reads: one routing key of a direct exchange, or all that a queue wants of another one."""

    exchange: str
    kind: str
    routing_key: str


class _Queue:
    """A queue of Kombu in this process: its members, which the channels share, while a channel uses it or a message is not settled.

    A shared queue Q is the topic and the group NAMESPACE-Q. A client's own one has a member for each source, no two of which have the
    same message.
    """

    def __init__(self, store: _Store, name: str) -> None:
        self.name = name
        self.topic = f"{store.options.namespace}-{quote(name, safe='')}"
        self.is_own = False
        self.is_declared = False
        self.is_auto_delete = False
        self._store = store
        self._pid = os.getpid()
        self._sources: dict[_Source, list[str]] = {}  # of an own one: the routing keys
        self._starts: dict[_Source, int] = {}  # where to begin in its topic; no time, since the store's clock may be ahead
        self._members: deque[tuple[_Source | None, Consumer, Callable[[str], object] | None]] = deque()
        self._users = 0
        self._unsettled: set[str] = set()
        self._running: Running[str] | None = None  # of a shared one
        # Of what runs: an event loop must not wait for the store's, beside which others connect and close.
        self.lock = arguments.inherited_lock()
        self._returned: deque[_Delivery] = deque()

    def declare(self, *, exclusive: bool = False, auto_delete: bool = False, durable: bool = True) -> None:
        self.is_auto_delete = auto_delete
        if exclusive or auto_delete and (not durable or _UUID.fullmatch(self.name)):  # a name for replies: Celery's `rpc://` results
            self._become_own()
        self.is_declared = True

    def _become_own(self) -> None:
        if not self.is_own:
            self._note_start(_Source("", "direct", self.name))
            self.is_own = True

    def _note_start(self, source: _Source) -> None:
        topic = self._store.exchange_topic(source.exchange)
        with LiveStoreReader(self._store.path) as reader:
            reaches(reader, "last")
            self._starts.setdefault(source, reader.queue_range(topic, 0)[1])

    def bind(self, exchange: str, kind: str, routing_key: str) -> bool:
        """Bind a client's own queue to an exchange; False for a shared queue. One that a fan-out deletes with its consumer is one too."""
        if kind == "fanout" and self.is_auto_delete:
            self._become_own()
        source = _Source(exchange, kind, routing_key if kind == "direct" else "")
        with self._store.lock:
            if self.is_own and routing_key not in self._sources.get(source, ()):
                self._store.make(self._store.exchange_topic(exchange), 1)
                self._note_start(source)
                self._sources[source] = [*self._sources.get(source, ()), routing_key]
                if self._members and len(self._sources[source]) == 1:
                    self._join(source)
        return self.is_own

    def acquire(self, timeout_s: float) -> None:
        """Begin to read the queue, for one more channel. UsageError with gevent or eventlet, whose greenlets a wait would stop for ever."""
        if (patched := detect_environment()) != "default":
            raise UsageError(f"pyengine:// is not read beside {patched}, whose greenlets its waits would stop: use the pool prefork, "
                             "threads or solo")
        with self._store.lock:
            self._users += 1
            for _, member, _ in self._members:
                member._stay()
            if not self._members:
                try:
                    self._open(timeout_s)
                except BaseException:
                    self._users -= 1
                    self._close()
                    raise

    def _open(self, timeout_s: float) -> None:
        options = self._store.options
        if self.is_own:
            for source in self._sources or [_Source("", "direct", self.name)]:
                self._join(source)
            return
        member = consume(
            self._store.path, self.topic, group=self.topic, auto_commit=False, commit_interval_s=options.commit_interval_s,
            session_timeout_s=options.session_timeout_s, max_deliveries=options.max_deliveries, sharing=options.sharing,
            timeout_s=timeout_s)
        self._members.append((None, member, None))
        self._running = Running(member, sys.maxsize)
        self._store.make(self.topic, options.queues)

    def _join(self, source: _Source) -> None:
        """Read the topic of an exchange: by tag if one routing key is wanted, and all of it for patterns or a fan-out."""
        pattern_of = virtual.exchange.TopicExchange(None).key_to_pattern
        matches: dict[str, Callable[[str], object]] = {
            "direct": lambda sent: sent == source.routing_key,  # no tag stands for the empty one
            "topic": lambda sent: any(re.match(pattern_of(key), sent) for key in self._sources[source])}
        member = consume(self._store.path, self._store.exchange_topic(source.exchange), tags=_tag(source.routing_key),
                         from_=AtOffset(self._starts[source]))
        self._members.append((source, member, matches.get(source.kind)))

    def release(self) -> None:
        """End to read the queue for one channel."""
        with self._store.lock:
            self._users -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._users or self._pid != os.getpid():
            return
        if not self._unsettled:
            self._close()
        for _, member, _ in self._members:
            member._leave()

    def _close(self) -> None:
        if self._pid != os.getpid():
            return
        self._returned.clear()
        while self._members:
            source, member, _ = self._members.popleft()
            if source is not None:
                self._starts[source] = max([self._starts[source], *member.positions.values()])
            member.close()

    def delete(self) -> None:
        with self._store.lock:
            self._store.forget(self)
            if self.is_own:
                self._unsettled.clear()
                self._close()

    def filenos(self) -> Iterator[int]:
        """Yield descriptors that are readable when there may be a message to take."""
        if self._has_room():
            for _, member, _ in list(self._members):
                yield member.fileno()

    def _has_room(self) -> bool:
        """Whether a message may run beside those that are not settled."""
        with self.lock:
            return self._running is None or self._running.room() > 0

    def take(self, timeout_s: float = 0.0) -> _Delivery | None:
        """Return the next message, or None if there is none until the timeout."""
        if self._returned:
            delivery = self._returned.popleft()
            self._unsettled.add(delivery.stored.msg_id)
            return delivery
        for _ in range(len(self._members) if self._has_room() else 0):
            _, member, matches = self._members[0]
            self._members.rotate(-1)
            while found := member.pull(1, timeout_s=timeout_s):
                if matches is None or matches(unquote(found[0].tags or "")):
                    self._unsettled.add(found[0].msg_id)
                    with self.lock:
                        if self._running is not None:
                            self._running.begin(found[0].msg_id, found[0])
                    return _Delivery(self, member, found[0])
        return None

    def ack(self, delivery: _Delivery) -> None:
        if not self.is_own:
            delivery.member.ack(delivery.stored)
        self._settle(delivery)

    def reject(self, delivery: _Delivery) -> None:
        """Make a message a dead letter of the group."""
        if not self.is_own:
            with _errors_of_a_connection():
                give_back(delivery.member, delivery.stored, -1)
        self._settle(delivery)

    def requeue(self, delivery: _Delivery) -> None:
        """Have a message delivered again at once."""
        with self._store.lock:
            self._end(delivery)  # first, since another thread may take it before this returns
            if self.is_own:
                self._returned.append(delivery)
            else:
                delivery.member.requeue(delivery.stored)
            self._close_if_unused()

    def untake(self, delivery: _Delivery) -> None:
        """Have a message delivered again that no program has begun with: it does not count as delivered."""
        if not self.is_own and self._pid == os.getpid():
            delivery.member._take_back([delivery.stored])
        self._settle(delivery)

    def _settle(self, delivery: _Delivery) -> None:
        self._end(delivery)
        if not self._users and not self._unsettled:  # else another queue's opening is not waited for
            with self._store.lock:
                self._close_if_unused()

    def _end(self, delivery: _Delivery) -> None:
        self._unsettled.discard(delivery.stored.msg_id)
        with self.lock:
            if self._running is not None:
                self._running.end(delivery.stored.msg_id)


def _tag(routing_key: str) -> str | None:
    return quote(routing_key, safe="") or None


# ---- Kombu's classes -------------------------------------------------------------


class QoS(virtual.QoS):
    """What a channel has delivered and is not settled; the prefetch limit."""

    channel: Channel
    restore_at_shutdown = False  # a message that is not settled comes again by itself

    def ack(self, delivery_tag: str) -> None:
        self._quick_ack(delivery_tag)
        self.channel._settle(delivery_tag, _Queue.ack)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Have a message delivered again at once, or make it a dead letter; if that cannot be stored, it comes again after a pause."""
        if requeue:
            self._quick_ack(delivery_tag)  # first, since another thread may take it before this returns
            self.channel._settle(delivery_tag, _Queue.requeue)
            return
        try:
            self.channel._settle(delivery_tag, _Queue.reject)
        except EngineError as error:
            # Kombu only logs the error, and Celery does not settle a message twice.
            _LOG.warning("%s cannot be a dead letter now, and comes again in %g s: %s", delivery_tag, HANDLE_AGAIN_S, error)
            pause = threading.Timer(HANDLE_AGAIN_S, self.reject, (delivery_tag, True))
            pause.daemon = True
            pause.start()
            return
        self._quick_ack(delivery_tag)

    def restore_unacked(self) -> list[Any]:
        """Have all messages that are not settled delivered again."""
        for tag in list(self.channel._unsettled):
            self.reject(tag, requeue=True)
        return []


class Channel(virtual.Channel):
    QoS = QoS
    connection: Transport
    supports_fanout = True
    do_restore = False

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self._unsettled: dict[str, _Delivery] = {}  # by delivery tag
        self._known: WeakValueDictionary[str, virtual.Message] = WeakValueDictionary()  # what the program has of them
        self._deliveries = itertools.count()  # of clients' own queues, several of which may get one message
        # By consumer tag: what it reads, whether a delivery settles a message, and what gets it.
        self._consumed: dict[str, tuple[_Queue, bool, Callable[[Any], object]]] = {}
        self._got: list[_Queue] = []  # own ones that are read without a consumer

    @property
    def _store(self) -> _Store:
        return self.connection.store

    # -- queues, exchanges, bindings

    def queue_declare(self, queue: str | None = None, passive: bool = False, durable: bool = True, exclusive: bool = False,
                      auto_delete: bool = False, **options: Any) -> queue_declare_ok_t:
        """Declare a queue, whose topic is made when it is first used; with `passive`, ChannelError if there is none."""
        found = self._store.queue(queue or f"amq.gen-{uuid()}")
        if not passive:
            found.declare(exclusive=exclusive, auto_delete=auto_delete, durable=durable)
        elif not found.is_declared and not self._store.has(found.topic):
            raise ChannelError(f"NOT_FOUND - no queue {queue!r} in {self._store.path}", (50, 10), "Channel.queue_declare", "404")
        return queue_declare_ok_t(found.name, self._size(found.name) if passive else 0, 0)

    def queue_bind(self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **options: Any) -> None:
        """Bind a queue to an exchange: a shared one for all processes and durably, a client's own one for this process."""
        exchange = exchange or "amq.direct"
        if not self._store.queue(queue).bind(exchange, self.typeof(exchange).type, routing_key or ""):
            super().queue_bind(queue, exchange, routing_key or "", arguments, **options)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        self._store.bind(exchange, self.typeof(exchange).type, (routing_key, queue))

    def queue_unbind(self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **options: Any) -> None:
        """Undo queue_bind() of a shared queue, for all processes."""
        exchange = exchange or "amq.direct"
        super().queue_unbind(queue, exchange, routing_key or "", arguments, **options)
        topic, gone = self._store.exchange_topic(exchange), (routing_key or "", queue)
        self._store.unbind(lambda name, row: name == topic and row == gone)

    def get_table(self, exchange: str) -> list[Any]:
        """Return (routing key, pattern, queue) of the shared queues that any process has bound to an exchange."""
        kind = self.typeof(exchange)
        return [kind.prepare_bind(queue, exchange, routing_key, None) for routing_key, queue in self._store.bound(exchange)[1]]

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """Return the type of an exchange that this connection has declared, or to which any process has bound a queue."""
        return super().typeof(exchange, default=self._store.bound(exchange, default)[0])

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings; the queues remain."""
        topic = self._store.exchange_topic(exchange)
        self._store.unbind(lambda name, row: name == topic)
        self.state.exchanges.pop(exchange, None)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any) -> None:
        """Drop a queue's messages and bindings. Its topic remains, without messages."""
        if if_empty and self._size(queue):
            return
        self._purge(queue)
        self._store.unbind(lambda name, row: row[1] == queue)
        self.state.queue_bindings_delete(queue)
        self._store.look_up(queue).delete()

    def _size(self, queue: str) -> int:
        found = self._store.look_up(queue)
        return undone(self._store.path, found.topic) if not found.is_own and self._store.has(found.topic) else 0

    def _purge(self, queue: str) -> int:
        """Drop the messages that have arrived and are not done; delayed ones still arrive."""
        count = self._size(queue)
        if count:
            skip_undone(self._store.path, self._store.look_up(queue).topic)
        return count

    # -- publish

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **options: Any) -> None:
        """Store a message once for each shared queue that gets it, and once for all queues of clients. PutError, EngineUnavailableError."""
        self._inplace_augment_message(message, exchange, routing_key)
        store, timeout_s = self._store, self.connection.timeout_s
        if not exchange:
            queue = store.look_up(routing_key)
            if not queue.is_own and (queue.is_declared or store.has(queue.topic)):
                self._put(routing_key, message)
            else:
                store.put(store.exchange_topic(""), message, timeout_s, tags=_tag(routing_key))
            return
        for name in self._lookup(exchange, routing_key):
            self._put(name, message)
        topic = store.exchange_topic(exchange)
        if store.has(topic):
            store.put(topic, message, timeout_s, tags=_tag(routing_key or ""))

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        topic = self._store.look_up(queue).topic
        self._store.make(topic, self._store.options.queues)
        message, due_ms = _delayed(message)
        task_id = (message.get("headers") or {}).get("id")
        keys = task_id if isinstance(task_id, str) else None  # other programs of Kombu may put anything there
        self._store.put(topic, message, self.connection.timeout_s, keys=keys or None, deliver_at=due_ms)

    # -- deliver

    def basic_consume(self, queue: str, no_ack: bool, callback: Callable[[Any], object], consumer_tag: str, **options: Any) -> None:
        """Deliver the queue's messages by drain_events(), or in the event loop."""
        found = self._store.queue(queue)
        found.acquire(self.connection.timeout_s)
        self._consumed[consumer_tag] = found, no_ack, callback
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)

    def basic_cancel(self, consumer_tag: str) -> None:
        """End basic_consume(). Messages that are not settled remain this process's; of a worker that ends, those that it has begun with."""
        super().basic_cancel(consumer_tag)
        if consumer_tag in self._consumed:
            queue, *_ = self._consumed.pop(consumer_tag)
            self.connection.watch()
            if type(sys.exception()).__name__ in {"WorkerShutdown", "WorkerTerminate"}:  # with which a worker of Celery ends
                for tag, delivery in reversed(list(self._unsettled.items())):
                    if delivery.queue is queue and tag not in self._known:  # Celery, which settles by the message, has dropped it
                        self.qos._quick_ack(tag)
                        self._untake(tag)
            queue.release()

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        found = self._store.queue(queue)
        if found not in self._got:
            found.acquire(self.connection.timeout_s)
            self._got.append(found)
        try:
            payload = self._payload(found, no_ack, GET_WAIT_S)
        finally:
            if not found.is_own:  # other processes share it, so this one has no share of it without a consumer
                self._got.remove(found)
                found.release()
        if payload is None:
            return None
        return self._message(payload, no_ack)

    def _message(self, payload: dict[str, Any], no_ack: bool) -> Any:
        message = self.Message(payload, channel=self)
        if not no_ack:
            self._known[message.delivery_tag] = message
            self.qos.append(None, message.delivery_tag)  # not the message, which the program may drop
        return message

    def filenos(self) -> Iterator[int]:
        """Yield the descriptors of what this channel may deliver now."""
        if self._consumed and self.qos.can_consume():
            for queue, *_ in list(self._consumed.values()):
                yield from queue.filenos()

    def deliver(self) -> int:
        """Deliver up to one message of each queue that is consumed, within the prefetch limit; return how many."""
        count = 0
        for tag, (queue, no_ack, callback) in list(self._consumed.items()):
            if not self.qos.can_consume():
                break
            payload = self._payload(queue, no_ack) if tag in self._consumed else None  # the callback before may have cancelled it
            if payload is not None:
                callback(self._message(payload, no_ack))  # Kombu itself has one callback of a queue for all channels
                count += 1
        return count

    def _payload(self, queue: _Queue, no_ack: bool, timeout_s: float = 0.0) -> dict[str, Any] | None:
        """Return the next message in Kombu's form; without `no_ack`, it is to be settled by its delivery tag."""
        while (delivery := queue.take(timeout_s)) is not None:
            try:
                payload = self._opened(delivery, no_ack)
            except BaseException:  # no engine, for example: without this nobody had the message until the process ends
                queue.untake(delivery)
                raise
            if payload is not None:
                return payload
        return None

    def _opened(self, delivery: _Delivery, no_ack: bool) -> dict[str, Any] | None:
        """Return what a message holds; None if that is not for the program, and done with."""
        queue, _, stored = delivery
        try:
            payload: dict[str, Any] = loads(stored.body)
            properties = payload["properties"]
            properties["delivery_tag"] = tag = stored.msg_id if not queue.is_own else f"{stored.msg_id}-{next(self._deliveries)}"
            properties["delivery_info"]["redelivered"] = stored.delivery_count > 1
            self.Message(payload, channel=self)  # fails as it would where the message is delivered, which would end a worker
            expired = int(properties.get("expiration") or 0)
        except Exception:  # noqa: BLE001 - what another program has put may be anything
            _LOG.exception("%s is no message of Kombu, so it becomes a dead letter of %s", stored.msg_id, queue.topic)
            queue.reject(delivery)
            return None
        if expired and stored.store_timestamp_ms + expired <= time.time_ns() // 1_000_000:
            queue.ack(delivery)
            return None
        if no_ack:
            queue.ack(delivery)
        else:
            self._unsettled[tag] = delivery
        return payload

    def _settle(self, delivery_tag: str, how: Callable[[_Queue, _Delivery], None]) -> None:
        delivery = self._unsettled.pop(delivery_tag, None)  # first, since another thread may deliver it again before this returns
        if delivery is None:
            return
        try:
            how(delivery.queue, delivery)
        except BaseException:
            self._unsettled[delivery_tag] = delivery
            raise
        if self.connection is not None:
            self.connection.wake()

    def close(self) -> None:
        """End all consumers; messages that are not settled come again."""
        if not self.closed:
            with contextlib.ExitStack() as ends:  # each of these, the last one first, whichever fails
                ends.callback(super().close)
                while self._got:
                    ends.callback(self._got.pop().release)
                for tag in reversed(list(self._unsettled)):
                    ends.callback(self._untake, tag)
                for tag in list(self._consumed):
                    ends.callback(self.basic_cancel, tag)

    def _untake(self, delivery_tag: str) -> None:
        delivery = self._unsettled.pop(delivery_tag, None)  # which another thread may have settled
        if delivery is not None:
            delivery.queue.untake(delivery)


def _delayed(message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Return the message that is delivered at its ETA, and when, in ms since 1970; the store waits, and no worker.

    One without a time zone keeps the ETA. One in the past, however far, is due now.
    """
    eta = (message.get("headers") or {}).get("eta")
    try:
        at = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
        due_ms = None if at is None or at.tzinfo is None else int(at.timestamp() * 1000) + 1
    except (ValueError, AttributeError, OverflowError):  # the worker reports it
        due_ms = None
    if due_ms is None:
        return message, None
    return {**message, "headers": {**message["headers"], "eta": None}}, due_ms if due_ms > time.time_ns() // 1_000_000 else None


class Transport(virtual.Transport):
    Channel = Channel
    can_parse_url = True
    polling_interval = None
    driver_type = driver_name = "pyengine"
    implements = virtual.Transport.implements.extend(asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]))
    connection_errors = (*virtual.Transport.connection_errors, EngineUnavailableError, NotAStoreError, StoreBusyError, DiskError,
                         PutIndeterminateError)
    _awake = -1

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._path = _path_of(client.hostname or "")
        self._options = _Options.of(client.transport_options)
        self.timeout_s = float(client.connect_timeout or 0)
        self._joined: _Store | None = None
        self._loop: Any = None
        self._loop_pid = 0
        self._watched: set[int] = set()

    def __del__(self) -> None:
        if self._awake >= 0:
            os.close(self._awake)

    @property
    def store(self) -> _Store:
        """What this process has of the store."""
        if self._joined is None or self._joined.pid != os.getpid():
            self._joined = _Store.joined(self._path, self._options)
        return self._joined

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL, which has no password."""
        return uri

    def establish_connection(self) -> Transport:
        """Connect to the engine; EngineUnavailableError or NotAStoreError if none runs within the connection's timeout."""
        self.store.producer(self.timeout_s)
        super().establish_connection()
        return self

    def close_connection(self, connection: Transport) -> None:
        if self._loop is not None:
            self.unregister_from_event_loop(connection, self._loop)
        joined, self._joined = self._joined, None
        with contextlib.ExitStack() as ends:  # as in Channel.close()
            if joined is not None:
                ends.callback(joined.leave)
            ends.callback(super().close_connection, connection)
            for channel in list(self.channels):
                ends.callback(channel.close)

    def drain_events(self, connection: Transport, timeout: float | None = None) -> None:
        """Deliver messages, at least one, as soon as there is one; TimeoutError after the timeout."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_all():
            left_s = POLL_S if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            poller = select.poll()
            for descriptor in self._descriptors():
                poller.register(descriptor, select.POLLIN)
            poller.poll(min(left_s, POLL_S) * 1000)
            self._forget_wake()

    def _deliver_all(self) -> int:
        return sum(channel.deliver() for channel in list(self.channels))

    def _descriptors(self) -> set[int]:
        return {self._awake, *(descriptor for channel in list(self.channels) for descriptor in channel.filenos())}

    def wake(self) -> None:
        """Have a thread or loop that waits look again at what may be delivered, after a message was settled."""
        os.eventfd_write(self._awake, 1)

    def _forget_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._awake)

    # -- the event loop of a worker

    def register_with_event_loop(self, connection: Transport, loop: Any) -> None:
        """Deliver messages in an event loop of Kombu, which watches the descriptors of what may be delivered."""
        self._loop, self._loop_pid = loop, os.getpid()
        loop.on_tick.add(self.watch)

    def unregister_from_event_loop(self, connection: Transport, loop: Any) -> None:
        loop.on_tick.discard(self.watch)
        if self._loop_pid == os.getpid():
            for descriptor in self._watched:
                loop.remove_reader(descriptor)
        self._watched.clear()
        self._loop = None

    def watch(self) -> None:
        """Have the loop watch what may be delivered now: while a channel is at its prefetch limit, nothing of it."""
        if self._loop is None or self._loop_pid != os.getpid():  # a forked child would change what its parent watches
            return
        wanted = self._descriptors()
        for descriptor in self._watched - wanted:
            self._loop.remove_reader(descriptor)
        for descriptor in wanted:
            if descriptor not in self._loop.readers:
                self._loop.add_reader(descriptor, self.on_readable)
        self._watched = wanted

    def on_readable(self, *arguments: Any) -> None:
        """Deliver what is there, one message of each queue."""
        self._forget_wake()
        self._deliver_all()


def _path_of(url: str) -> Path:
    parts = urlparse(url)
    if parts.scheme != "pyengine" or not parts.netloc + parts.path:
        raise UsageError(f"the broker URL {url!r} names no store: give pyengine:///path/to/my-store")
    return Path(unquote(parts.netloc + parts.path)).absolute()


TRANSPORT_ALIASES["pyengine"] = "pyengine.celery:Transport"
