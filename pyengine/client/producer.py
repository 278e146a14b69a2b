"""Producer: puts into a running engine through a session of its own.

    with pyengine.connect(path) as producer:
        producer.put("orders", b"...", tags="new", keys="42")
        producer.put_many("orders", bodies)              # one answer for all of them
        future = producer.put_async("orders", b"...")    # or: await producer.put_async(...)

What PUT_OK means depends on the store's flush mode (README, durability table). A refusal
comes back as a status with a sentence, never as an exception; wrong Python types are
TypeError. A put that was submitted and not answered in time is *indeterminate*: status
UNKNOWN_ERROR, `indeterminate=True` (docs/promises.md, 9).

When the engine dies or is replaced by another start, puts under way become indeterminate within
about a second, and the next put opens a new session. Thread-safe; what a signal handler raises
ends a put and leaves the producer whole. A producer that is dropped without close() ends by
itself. Not to be used across fork().
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

from pyengine import arguments
from pyengine.client import outgoing
from pyengine.client.outgoing import BatchMessage, PutRefusedError
from pyengine.client.pending_puts import LOOK_NS, LaterPuts, PendingPuts, PutAnswer, PutFuture
from pyengine.client.put_outcome import PutContext, busy_refusal, outcome, refusal, unknown_fate
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import (
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_NONE,
)
from pyengine.formats.properties import decode_properties, is_wait_store_ok
from pyengine.formats.record import HOST_V6_BYTES, BatchMember, encode_batch, encode_host, record_size
from pyengine.ipc.shared_objects import remove_object, side_name
from pyengine.ipc.store_lock import KIND_BYTE
from pyengine.native import control as control_native
from pyengine.native import producer as native
from pyengine.native.flush import monotonic_ns
from pyengine.results import PutManyResult, PutResult, PutStatus

if TYPE_CHECKING:
    from pyengine.client.transactions import Outcome, Transactions
    from pyengine.ipc.session_client import ProducerSession

_fast_result = partial(tuple.__new__, PutResult)  # of_answer's tuple, without its call
_TIMEOUT_S_MAX = 1e6
_INT32_MAX = 0x7FFFFFFF
_GRACE_S = 0.5  # from a put's own deadline to its caller's, so that the answer's thread can say which of two it missed
_ROOM_SLICE_NS = 10_000_000  # so long a put that waits for room keeps others from trying
_ROOM_STEP_S = 0.001
_REPLACED_MAX = 2  # sessions that one put finds over before it gives up
_CLOSED = "the producer is closed: connect again"
_FORKED = "the producer was made before a fork: connect in the process that puts"
_living: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for producer in _living:
        producer._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Producer:
    """Puts messages into a running engine. Made by pyengine.connect; a context manager.

    A refusal is a result with a status and a sentence, never an exception. A wrong argument is TypeError or UsageError.
    Threads may share a producer. A forked child cannot use it: connect there. When the engine is replaced, the next put
    opens a new session by itself.
    """

    __slots__ = (
        "_open_session", "_store_host", "_born_host", "_host_flags", "_delay_levels", "_lock", "_opening", "_session", "_pid",
        "_topics", "_tags", "_prefixes", "_closed", "_native", "_waits", "_max_message_bytes", "_timeout_s",
        "_flush_timeout_s", "_slave_timeout_s", "_lines", "_later", "_fast_put", "_fast_answer", "_fast_bytes_max",
        "_root", "_transactions", "_finalizer", "__weakref__")

    def __init__(self, open_session: Callable[[float | None], ProducerSession], *, store_host: str = "127.0.0.1:10911",
                 born_host: str = "127.0.0.1:0", delay_levels: int = 18) -> None:
        # open_session(limit_s) is called now with None, later with the seconds that a put has left.
        self._open_session = open_session
        self._store_host = encode_host(store_host)
        self._born_host = encode_host(born_host)
        self._host_flags = _host_flags(self._born_host, self._store_host)
        self._delay_levels = delay_levels
        # Taken by `with` only: between any other call that takes a lock and the block that releases it an exception
        # of a signal handler may come.
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # taken before _lock
        self._session: ProducerSession | None = None
        self._pid = os.getpid()
        self._topics: dict[str, bytes] = {}
        self._tags: dict[str | None, bytes] = {None: b"", "": b""}
        self._prefixes: dict[tuple, bytes] = {}
        self._closed = 0  # when, on the monotonic clock in ns
        self._transactions: Transactions | None = None
        self._later = LaterPuts()
        self._lines: dict[str, PendingPuts | LaterPuts] = {"later": self._later}
        self._finalizer = weakref.finalize(self, _end_lines, self._lines)
        self._finalizer.atexit = False  # daemon threads and later handlers may put until the process ends; its end is seen
        self._attach(None)
        _living.add(self)

    # ---- session ----------------------------------------------------------------

    def _attach(self, limit_s: float | None) -> None:
        """Open a session and put into it from now on. The lock is not held: it may take as long as the limit."""
        session = self._open_session(limit_s)
        identity = session.identity
        end = native.ProducerSession(session.control, session.session, session.writer_latch.semaphore,
                                     session.slot, session.generation)
        end.set_constants(self._born_host, self._store_host, self._host_flags)
        end.set_timeouts(identity.put_timeout_ms / 1000, identity.sync_flush_timeout_ms / 1000)
        if session.lock_descriptor >= 0:
            end.watch(session.lock_descriptor, KIND_BYTE)
        pending = PendingPuts(end, partial(_finish, identity.sync_flush_timeout_ms / 1000), session.close,
                              lambda: session.is_replaced)
        with self._lock:
            if self._closed:
                pending.end()
                return
            self._lines["pending"] = pending
            self._root = session.root
            self._waits = ((native.DURABLE if identity.mode == control_native.MODE_SYNC else 0)
                           | (native.CONFIRMED if identity.role == control_native.SYNC_MASTER else 0))
            self._max_message_bytes = identity.max_message_bytes
            self._timeout_s = identity.put_timeout_ms / 1000
            self._flush_timeout_s = identity.sync_flush_timeout_ms / 1000
            self._slave_timeout_s = identity.slave_timeout_ms / 1000
            self._native = end
            # put() takes these without looking them up in the session.
            self._fast_put, self._fast_answer = end.put, end.answer
            self._fast_bytes_max = min(self._max_message_bytes, end.entry_limit - 65536)
            self._session = session

    @property
    def _pending(self) -> PendingPuts:
        return self._lines["pending"]

    def _set_aside(self) -> None:
        """The session is not used any more; its answers' thread ends it. The lock is held."""
        if self._session is not None:
            self._session = None
            self._pending.end()

    def _missing(self, deadline_ns: int) -> str:
        """Why nothing can be submitted, empty when it can; opens a session where there is none. Without the lock."""
        if os.getpid() != self._pid:
            return _FORKED
        if self._session is not None:
            return ""
        if self._closed:
            return _CLOSED
        while self._opening.locked():
            if monotonic_ns() >= deadline_ns:
                return "another thread's put still opens a session with the engine; nothing was submitted"
            time.sleep(_ROOM_STEP_S)
        with self._opening:
            if self._session is None and not self._closed:
                try:
                    self._attach(max(0.0, (deadline_ns - monotonic_ns()) / 1e9))
                except EngineError as error:
                    return str(error)
        return ""

    def _forked(self) -> None:
        """In a child: the session is the parent's; a ring has one producer."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._session = None
        self._later = LaterPuts()  # its thread is the parent's
        self._finalizer.detach()

    def close(self) -> None:
        """Wait for the answers of all puts, then end the session. A second call does nothing."""
        self._closed = self._closed or monotonic_ns()
        if os.getpid() == self._pid:
            self._later.end()
            self._later.join()
            with self._lock:
                self._set_aside()
            self._pending.join()
        if self._transactions is not None:
            self._transactions.close()

    def __enter__(self) -> Producer:
        """UsageError for a producer that can put no more: closed, or made before a fork."""
        if self._closed or os.getpid() != self._pid:
            raise UsageError(_CLOSED if self._closed else _FORKED)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- puts -------------------------------------------------------------------

    def put(self, topic: str, body: bytes, *, queue_id: int = 0, tags: str | None = None,
            keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
            delay_level: int = 0, unique_key: str | None = None, wait: bool = True,
            timeout_s: float | None = None) -> PutResult:
        """Store one message and return where it is, once it is as durable as the flush mode promises.

        `keys`: words for query_message, as one text with spaces or as several texts. `unique_key` is stored as UNIQ_KEY,
        so that a consumer can recognise duplicates. `delay_level` 1..n delivers it later (message_delay_level).
        `wait=False` returns without waiting for the disk (sync mode) and for slaves (SYNC_MASTER). `timeout_s` is the
        longest time to wait for the writer's answer (default put_timeout_ms). RocketMQ: putMessage.
        """
        if (keys is None and properties is None and unique_key is None and not delay_level and timeout_s is None
                and queue_id.__class__ is int and flag.__class__ is int):  # 1.0 would find the prefix of 1
            # The common case, without a call that could be spared: what was put before, and fits.
            try:
                prefix = self._prefixes.get((topic, queue_id, tags, flag))
            except TypeError:  # a list, for example, has no hash: _put_any names the argument
                prefix = None
            if prefix is not None and type(body) is bytes:
                found = None
                with self._lock:
                    if self._session is not None and not self._closed and len(body) <= self._fast_bytes_max:
                        code = self._fast_put(prefix, body, len(body), self._waits if wait else 0)
                        answer = self._fast_answer()
                        if not (code or answer[5]):
                            return _fast_result((answer, topic, queue_id, self._store_host, "", False, ""))
                        context = PutContext(native.PUT, topic, queue_id, self._store_host, self._waits if wait else 0)
                        found = self._settle(code, context)
                if found is not None:
                    return self._wait(found, context, monotonic_ns() + int(self._timeout_s * 1e9), self._timeout_s)
        return self._put_any(topic, body, queue_id, tags, keys, properties, flag, delay_level, unique_key, wait, timeout_s)

    def _put_any(self, topic, body, queue_id, tags, keys, properties, flag, delay_level, unique_key, wait,
                 timeout_s) -> PutResult:
        """put() with everything that may be special about it."""
        try:
            topic, queue_id, name, text, body = self._prepare(topic, body, queue_id, tags, keys, properties, delay_level,
                                                              unique_key, flag)
        except PutRefusedError as refused:
            return PutResult(refused.status, topic=str(topic), queue_id=queue_id, reason=refused.reason)
        if keys is None and properties is None and unique_key is None and not delay_level and len(self._prefixes) < 10_000:
            self._prefixes[topic, queue_id, tags, flag] = self._native.prefix(name, text, queue_id, flag)
        header = self._header(native.PUT, name, text, len(body), queue_id, flag)
        context = PutContext(native.PUT, topic, queue_id, self._store_host, self._waits if wait else 0)
        return self._put_and_wait(header, name, text, body, b"", context, timeout_s)

    def _prepare(
        self, topic, body, queue_id, tags, keys, properties, delay_level, unique_key, flag
    ) -> tuple[str, int, bytes, bytes, bytes]:
        """Topic and queue (of the delay schedule, if it is put off), encoded topic and properties, body; or PutRefusedError."""
        name = self._topic_bytes(topic)
        plain = keys is None and properties is None and unique_key is None
        if tags is not None:
            arguments.text(tags, "tags")
        text = self._tags.get(tags) if plain else None
        if text is None:
            text = self._properties(tags, keys, properties, unique_key)
        if type(body) is not bytes:
            body = outgoing.body_bytes(body)
        self._refuse_sizes(len(body), queue_id, flag)
        if delay_level:
            topic, queue_id, later = self._delay(topic, queue_id, text.decode(), delay_level)
            name, text = topic.encode(), outgoing.properties_bytes(later)
        return topic, queue_id, name, text, body

    def put_async(self, topic: str, body: bytes, *, queue_id: int = 0, tags: str | None = None,
                  keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
                  delay_level: int = 0, unique_key: str | None = None, wait: bool = True,
                  timeout_s: float | None = None) -> PutFuture:
        """Like put(), but return a Future of the PutResult at once. It can be awaited.

        When the ring is full, a call in a plain thread waits up to `timeout_s` for room. In an event loop the call never
        waits: the put is submitted later, in order, so await the Future to bound the number of puts under way. The Future
        gets the engine's answer, after a restart of a worker too; if the session ends first, an indeterminate result.
        Callbacks run in the thread that takes the answers: keep them short. While 4,095 puts are under way, a put()
        in a callback is refused after put_timeout_ms.
        """
        try:
            topic, queue_id, name, text, body = self._prepare(topic, body, queue_id, tags, keys, properties, delay_level,
                                                              unique_key, flag)
        except PutRefusedError as refused:
            return _resolved(PutResult(refused.status, topic=str(topic), queue_id=queue_id, reason=refused.reason))
        header = self._header(native.PUT, name, text, len(body), queue_id, flag)
        context = PutContext(native.PUT, topic, queue_id, self._store_host, self._waits if wait else 0)
        return self._submit(header, name, text, body, b"", context, timeout_s)

    def put_many(self, topic: str, bodies: Sequence[bytes], *, queue_id: int = 0, tags: str | None = None,
                 keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
                 wait: bool = True, timeout_s: float | None = None) -> PutManyResult:
        """Store many messages in one queue, all or none, with contiguous queue offsets and one answer.

        They share tags, keys, properties and flag. Together they may have 256 MiB and span segments; each body obeys
        max_message_size_bytes.
        """
        return self._many(topic, bodies, queue_id, tags, keys, properties, flag, wait, timeout_s, asynchronous=False)

    def put_many_async(self, topic: str, bodies: Sequence[bytes], *, queue_id: int = 0, tags: str | None = None,
                       keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None,
                       flag: int = 0, wait: bool = True, timeout_s: float | None = None) -> PutFuture:
        """Like put_many(), but return a Future of the PutManyResult at once; see put_async()."""
        return self._many(topic, bodies, queue_id, tags, keys, properties, flag, wait, timeout_s, asynchronous=True)

    def _many(self, topic, bodies, queue_id, tags, keys, properties, flag, wait, timeout_s, *, asynchronous):
        try:
            name = self._topic_bytes(topic)
            text = self._properties(tags, keys, properties, None)
            arguments.several(bodies, "bodies", "a sequence of bytes")
            if not isinstance(bodies, (list, tuple)):
                bodies = list(bodies)
            if not bodies:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, "put_many got no bodies: give at least one")
            self._refuse_sizes(0, queue_id, flag)
            try:
                lengths, joined = native.pack_many(bodies)
            except TypeError:
                lengths, joined = native.pack_many([outgoing.body_bytes(body) for body in bodies])
            if len(lengths) + len(joined) > native.SIDE_BYTES_MAX - 131072:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, "put_many takes at most 256 MiB at once: split it")
        except PutRefusedError as refused:
            result = PutManyResult(refused.status, topic=str(topic), queue_id=queue_id, reason=refused.reason)
            return _resolved(result) if asynchronous else result
        header = self._header(native.MANY, name, text, len(lengths) + len(joined), queue_id, flag, len(bodies))
        context = PutContext(native.MANY, topic, queue_id, self._store_host, self._waits if wait else 0)
        if asynchronous:
            return self._submit(header, name, text, lengths, joined, context, timeout_s)
        return self._put_and_wait(header, name, text, lengths, joined, context, timeout_s)

    def put_batch(self, topic: str, messages: Iterable[BatchMessage | bytes], *, queue_id: int = 0,
                  properties: Mapping[str, str] | None = None, wait: bool = True,
                  timeout_s: float | None = None) -> PutResult:
        """Store messages with properties of their own, all or none, in one segment. RocketMQ: putMessages.

        `properties` are appended to those of each message. Together the messages obey max_message_size_bytes. The
        result has the offsets of the first message, and all message ids joined by commas.
        """
        try:
            name = self._topic_bytes(topic)
            shared = self._properties(None, None, properties, None)
            members = []
            for each in arguments.several(messages, "messages", "an iterable of BatchMessage or bytes"):
                each = each if isinstance(each, BatchMessage) else BatchMessage(outgoing.body_bytes(each))
                self._refuse_sizes(len(each.body), queue_id, each.flag)
                text = outgoing.properties_text(each.tags, each.keys, each.properties)
                outgoing.properties_bytes(text)
                members.append(BatchMember(outgoing.body_bytes(each.body), each.flag, text))
            if not members:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, "put_batch got no messages: give at least one")
        except PutRefusedError as refused:
            return PutResult(refused.status, topic=str(topic), queue_id=queue_id, reason=refused.reason)
        header = self._header(native.BATCH, name, shared, 0, queue_id, 0, len(members))
        return self._put_members(header, name, shared, members, topic, queue_id, self._store_host, wait, timeout_s)

    def _put_members(self, header, name: bytes, shared: bytes, members: list[BatchMember], topic: str, queue_id: int,
                     store_host: bytes, wait: bool, timeout_s: float | None) -> PutResult:
        payload = encode_batch(members)
        if len(payload) > self._max_message_bytes:
            return PutResult(PutStatus.MESSAGE_ILLEGAL, topic=topic, queue_id=queue_id,
                             reason=f"the batch has {len(payload)} bytes, {self._max_message_bytes} are possible "
                                    "(max_message_size_bytes): split it, or use put_many")
        header.payload_bytes = len(payload)
        sizes = []
        for member in members:
            own = len(member.properties_text.encode())
            joint = bool(shared and own and not member.properties_text.endswith("\x02"))
            sizes.append(record_size(len(member.body), len(name), own + joint + len(shared), header.sys_flag))
        context = PutContext(native.BATCH, topic, queue_id, store_host, self._waits if wait else 0, tuple(sizes))
        return self._put_and_wait(header, name, shared, payload, b"", context, timeout_s)

    # ---- raw puts: what RocketMQ's store is given by its broker -------------------

    def put_raw(self, topic: str, body: bytes, *, queue_id: int = 0, properties_text: str = "", flag: int = 0,
                sys_flag: int = 0, born_timestamp_ms: int = 0, born_host: str = "127.0.0.1:0",
                store_host: str | None = None, reconsume_times: int = 0, prepared_transaction_offset: int = 0,
                wait_store_msg_ok: bool = True, delay_level: int = 0, clock_ms: int = 0,
                timeout_s: float | None = None, asynchronous: bool = False) -> PutResult | PutFuture:
        """One message with every field given by hand; the property text is stored as it is.

        For tools that replay what a broker received. `clock_ms` counts only in an engine
        with replay_clock. `asynchronous` gives a Future at once, as put_async does.
        RocketMQ: MessageExtBrokerInner.
        """
        try:
            transaction = sys_flag & SYS_FLAG_TRANSACTION_MASK
            if len(topic) > 127:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"the topic has {len(topic)} characters, 127 are possible: shorten it")
            if delay_level > 0 and transaction in (SYS_FLAG_TRANSACTION_NONE, SYS_FLAG_TRANSACTION_COMMIT):
                outgoing.properties_bytes(properties_text)
                topic, queue_id, properties_text = outgoing.delayed(
                    topic, queue_id, properties_text, delay_level, self._delay_levels)
            name = outgoing.topic_bytes(topic)
            text = outgoing.properties_bytes(properties_text)
            self._refuse_sizes(len(body), queue_id, flag)
        except PutRefusedError as refused:
            result = PutResult(refused.status, topic=topic, queue_id=queue_id, reason=refused.reason)
            return _resolved(result) if asynchronous else result
        store = encode_host(store_host) if store_host else self._store_host
        header = self._raw_header(native.PUT, name, text, len(body), queue_id, flag, sys_flag, born_timestamp_ms,
                                  encode_host(born_host), store, reconsume_times, prepared_transaction_offset, clock_ms)
        context = PutContext(native.PUT, topic, queue_id, store, self._waits if wait_store_msg_ok else 0)
        if asynchronous:
            return self._submit(header, name, text, body, b"", context, timeout_s)
        return self._put_and_wait(header, name, text, body, b"", context, timeout_s)

    def put_batch_raw(self, topic: str, members: Sequence[BatchMember], *, queue_id: int = 0, properties_text: str = "",
                      sys_flag: int = 0, born_timestamp_ms: int = 0, born_host: str = "127.0.0.1:0",
                      store_host: str | None = None, reconsume_times: int = 0, wait_store_msg_ok: bool = True,
                      delay_level: int = 0, clock_ms: int = 0, timeout_s: float | None = None) -> PutResult:
        """A batch with every field given by hand. RocketMQ: MessageExtBatch."""
        try:
            if sys_flag & SYS_FLAG_TRANSACTION_MASK or delay_level > 0:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, "a batch holds no transaction and no delayed messages: put them singly")
            name = outgoing.topic_bytes(topic)
            shared = outgoing.properties_bytes(properties_text)
        except PutRefusedError as refused:
            return PutResult(refused.status, topic=topic, queue_id=queue_id, reason=refused.reason)
        store = encode_host(store_host) if store_host else self._store_host
        header = self._raw_header(native.BATCH, name, shared, 0, queue_id, 0, sys_flag, born_timestamp_ms,
                                  encode_host(born_host), store, reconsume_times, 0, clock_ms)
        header.count = len(members)
        wait = wait_store_msg_ok and is_wait_store_ok(decode_properties(properties_text))
        return self._put_members(header, name, shared, list(members), topic, queue_id, store, wait, timeout_s)

    # ---- transactions -------------------------------------------------------------

    def put_prepared(self, topic: str, body: bytes, **options: object) -> PutResult:
        """Store a message that consumers do not see before end_transaction() commits it; keep `msg_id` of the result.

        Options are put()'s queue_id, tags, keys, properties, flag, unique_key (made if not
        given), wait and timeout_s, and `group`, the producer's name (PGROUP).
        """
        return self._transaction().prepare(topic, body, **options)

    def end_transaction(self, msg_id: str, outcome: Outcome, *, wait: bool = True, timeout_s: float | None = None) -> PutResult:
        """Commit or roll back the prepared message of this id: "commit" or "rollback".

        The result has the offsets of the commit or rollback record; consumers find a committed message there. The
        same end again gives the same result; the other end is refused, as far as the store knows (docs/transactions.md).
        `wait` and `timeout_s` as in put(). UsageError for another outcome.
        """
        return self._transaction().end(msg_id, outcome, wait=wait, timeout_s=timeout_s)

    def _transaction(self) -> Transactions:
        if self._transactions is None:
            from pyengine.client.transactions import Transactions

            self._transactions = Transactions(weakref.proxy(self), self._root)
        return self._transactions

    def _refuse_sizes(self, body_size: int, queue_id: int, flag: int) -> None:
        if body_size > self._max_message_bytes:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL,
                          f"the body has {body_size} bytes, {self._max_message_bytes} are possible: split it or raise "
                          "max_message_size_bytes")
        if not 0 <= arguments.integer(queue_id, "queue_id") <= _INT32_MAX:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"the queue id {queue_id} is not in 0 .. {_INT32_MAX}")
        if not -_INT32_MAX - 1 <= arguments.integer(flag, "flag") <= _INT32_MAX:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"the flag {flag} is not in {-_INT32_MAX - 1} .. {_INT32_MAX}")

    def _limit_s(self, timeout_s: float | None) -> float:
        return min(self._timeout_s if timeout_s is None else arguments.number(timeout_s, "timeout_s"), _TIMEOUT_S_MAX)

    # ---- pieces -----------------------------------------------------------------

    def _topic_bytes(self, topic: str) -> bytes:
        name = self._topics.get(topic) if isinstance(topic, str) else None
        if name is None:
            name = outgoing.topic_bytes(topic)
            if len(self._topics) < 10_000:
                self._topics[topic] = name
        return name

    def _properties(self, tags, keys, properties, unique_key) -> bytes:
        data = outgoing.properties_bytes(outgoing.properties_text(tags, keys, properties, unique_key))
        if keys is None and properties is None and unique_key is None and len(self._tags) < 10_000:
            self._tags[tags] = data
        return data

    def _delay(self, topic: str, queue_id: int, text: str, level: int) -> tuple[str, int, str]:
        if arguments.integer(level, "delay_level") < 0:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"delay_level {level} is negative: give 1 to {self._delay_levels}, or 0")
        return outgoing.delayed(topic, queue_id, text, level, self._delay_levels)

    def _header(self, kind: int, name: bytes, text: bytes, payload_bytes: int, queue_id: int, flag: int, count: int = 1):
        header = native.new_header()
        header.kind = kind
        header.queue_id, header.flag, header.sys_flag, header.count = queue_id, flag, self._host_flags, count
        header.topic_bytes, header.properties_bytes, header.payload_bytes = len(name), len(text), payload_bytes
        header.born_timestamp_ms = time.time_ns() // 1_000_000
        native.fill_hosts(header, self._born_host, self._store_host)
        return header

    def _raw_header(self, kind, name, text, payload_bytes, queue_id, flag, sys_flag, born_timestamp_ms, born_host,
                    store_host, reconsume_times, prepared_transaction_offset, clock_ms):
        header = self._header(kind, name, text, payload_bytes, queue_id, flag)
        header.sys_flag = sys_flag & ~(SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6) | _host_flags(born_host, store_host)
        header.born_timestamp_ms = born_timestamp_ms
        header.reconsume_times = reconsume_times
        header.prepared_transaction_offset = prepared_transaction_offset
        header.clock_ms = clock_ms
        native.fill_hosts(header, born_host, store_host)
        return header

    def _put_and_wait(self, header, name: bytes, text: bytes, first: bytes, second: bytes, context: PutContext,
                      timeout_s: float | None):
        """One native call from submission to answer where that is short; else the answers' thread has the rest."""
        limit = self._limit_s(timeout_s)
        deadline_ns = monotonic_ns() + int(limit * 1e9)
        size = native.layout_bytes(name, text, len(first) + len(second))

        def attempt(session: native.ProducerSession) -> object:
            if size > session.entry_limit:
                if self._pending.in_own_thread:
                    return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                                   "a put this large cannot be made in a callback of put_async: make it in another thread")
                waits = self._with_deadlines(context, deadline_ns)
                return self._submit_now(session, header, name, text, first, second, waits, deadline_ns, PutAnswer())
            code = session.put_entry(header, name, text, first, second, context.waits, deadline_ns)
            return self._settle(code, context)

        return self._wait(self._until_submitted(attempt, context, deadline_ns, limit), context, deadline_ns, limit)

    def _settle(self, code: int, context: PutContext) -> object:
        """What a put that was waited for in one native call came to: its result, what to wait for (see _wait), or None
        when nothing was submitted, which may be tried again. The lock is held."""
        session = self._native
        if code == native.UNFINISHED:
            claim = session.claim()
            context = self._with_deadlines(context, monotonic_ns())
            if self._pending.in_own_thread:  # waiting for itself would last for ever
                return partial(self._pending.result_here, claim, context)
            return self._pending.add(claim, context, PutAnswer())
        if session.stage == native.NOT_SUBMITTED and code in (native.CLOSED, native.AGAIN):
            return None
        return outcome(session, code, session.stage, session.answer(), context, self._flush_timeout_s)

    def _wait(self, found: object, context: PutContext, deadline_ns: int, limit_s: float):
        """The result, once it is there, where it is still to come: of a PutAnswer, or of a call with the deadline."""
        if isinstance(found, partial):
            result = found(deadline_ns)
            return unknown_fate(context, _not_answered(limit_s)) if result is None else result
        if not isinstance(found, PutAnswer):
            return found
        try:
            return found.result((deadline_ns - monotonic_ns()) / 1e9)
        except Empty:
            if not found.is_answered:
                return unknown_fate(context, _not_answered(limit_s))
        try:
            return found.result(max(self._flush_timeout_s, self._slave_timeout_s) + _GRACE_S)
        except Empty:
            return unknown_fate(context, _not_answered(limit_s))

    def _with_deadlines(self, context: PutContext, answered_ns: int) -> PutContext:
        if not context.waits:
            return context
        return replace(context, flush_deadline_ns=answered_ns + int(self._flush_timeout_s * 1e9),
                       slave_deadline_ns=monotonic_ns() + int(self._slave_timeout_s * 1e9))

    def _submit(self, header, name: bytes, text: bytes, first: bytes, second: bytes, context: PutContext,
                timeout_s: float | None) -> PutFuture:
        """The future of a put. Waits for room and for a session, but never in an event loop or in a callback of a future:
        there what cannot be submitted at once is submitted later, by another thread."""
        limit = self._limit_s(timeout_s)
        deadline_ns = monotonic_ns() + int(limit * 1e9)
        context = self._with_deadlines(context, deadline_ns)
        future = PutFuture()
        future.set_running_or_notify_cancel()

        def attempt(session: native.ProducerSession) -> object:
            return self._submit_now(session, header, name, text, first, second, context, deadline_ns, future)

        def submit() -> object:
            return self._until_submitted(attempt, context, deadline_ns, limit)

        if not (_in_event_loop() or self._pending.in_own_thread):
            found = submit()
        elif self._later.waiting or self._opening.locked() or self._lock.locked():
            return self._later.add(submit, future)
        else:
            found = None
            with self._lock:
                if self._session is not None and not self._closed:
                    found = self._submit_now(self._native, header, name, text, first, second, context, 0, future)
            if found is None:
                return self._later.add(submit, future)
        return found if found is future else _resolved(found)

    def _until_submitted(self, attempt: Callable[[native.ProducerSession], object], context: PutContext, deadline_ns: int,
                         limit_s: float):
        """What `attempt` comes to under the lock, tried again while it is None: no room, or a session that is over.

        A refusal once the deadline has passed, no session can be opened, or the producer is closed.
        """
        replaced = 0
        while True:
            reason = self._missing(deadline_ns)
            if reason:
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, reason)
            with self._lock:
                if self._session is None:
                    continue
                session = self._native
                found = attempt(session)
                if found is not None:
                    return found
                if session.is_closed:
                    self._set_aside()
                    replaced += 1
            if replaced == _REPLACED_MAX:
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, "the engine was replaced twice: put again")
            if monotonic_ns() >= min(deadline_ns, self._closed + LOOK_NS if self._closed else deadline_ns):
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                               f"the writer made no room in {limit_s:g} s; nothing was submitted (`pyengine status` tells how it is)")
            if session is self._native and self._session is not None:
                time.sleep(_ROOM_STEP_S)

    def _submit_now(self, session: native.ProducerSession, header, name: bytes, text: bytes, first: bytes, second: bytes,
                    context: PutContext, deadline_ns: int, answer: PutFuture | PutAnswer):
        """`answer`, to be resolved by the answers' thread; a refusal; or None without room. The lock is held."""
        deadline_ns = min(deadline_ns, monotonic_ns() + _ROOM_SLICE_NS)
        if native.layout_bytes(name, text, len(first) + len(second)) <= session.entry_limit:
            code = session.submit(header, name, text, first, second, deadline_ns)
        else:
            code = session.wait_for_room_beside(deadline_ns)
            if code == 0:
                try:
                    side = self._write_side(header, name, text, first, second)
                except OSError as error:
                    return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                                   f"no room for the side object of a large put: {error.strerror}")
                small = native.new_header()
                small.kind = native.SIDE
                small.payload_bytes = native.layout_bytes(name, text, len(first) + len(second))
                small.count = header.count
                code = session.submit_side(small, deadline_ns)
                if code:
                    remove_object(side)
                context = replace(context, side=side)
        if code == native.BUSY:
            return busy_refusal(context, session)
        return None if code else self._pending.add(session.claim(), context, answer)

    def _write_side(self, header, name, text, first, second) -> Path:
        """An entry larger than half the ring goes into a file of its own beside the ring; the writer reads it."""
        header.sequence = self._native.sequence + 1
        image = native.entry_bytes(header, name, text, first, second)
        path = self._session.folder.path / side_name(
            self._session.identity.epoch, self._native.slot, self._native.generation, header.sequence)
        remove_object(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, len(image))
            with open(descriptor, "wb", closefd=False) as file:
                file.write(image)
        except BaseException:
            remove_object(path)
            raise
        finally:
            os.close(descriptor)
        return path


def _end_lines(lines: dict[str, PendingPuts | LaterPuts]) -> None:
    """What becomes of a producer's threads and session when it is dropped. Waits for nothing."""
    for line in lines.values():
        line.end()


def _finish(flush_timeout_s: float, session: native.ProducerSession, code: int, answer: tuple, context: PutContext,
            give_up_ns: int):
    """The result of one pending put; in the answers' thread."""
    if context.side is not None:
        remove_object(context.side)
    if code:
        return outcome(session, code, native.SUBMITTED, answer, context, flush_timeout_s)
    if context.waits and answer[5] == 0:
        give_up_ns = give_up_ns or max(context.flush_deadline_ns, context.slave_deadline_ns)
        code = session.wait_kept(answer[2], context.waits, min(context.flush_deadline_ns, give_up_ns),
                                 min(context.slave_deadline_ns, give_up_ns))
    return outcome(session, code, native.ANSWERED, answer, context, flush_timeout_s)


def _not_answered(limit_s: float) -> str:
    return f"submitted, but not answered within {limit_s:g} s: it may or may not be stored"


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")  # a program that runs a loop has imported it
    return asyncio is not None and asyncio._get_running_loop() is not None


def _resolved(result: object) -> PutFuture:
    future = PutFuture()
    future.set_result(result)
    return future


def _host_flags(born_host: bytes, store_host: bytes) -> int:
    flags = SYS_FLAG_BORN_HOST_V6 if len(born_host) == HOST_V6_BYTES else 0
    return flags | (SYS_FLAG_STORE_HOST_V6 if len(store_host) == HOST_V6_BYTES else 0)
