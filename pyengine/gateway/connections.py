"""Connections of RocketMQ clients: requests, answers, and the limits of each client.

One event loop serves all connections. A `Handler` gets each request in the loop's thread. It returns an Answer, or an awaitable
of one; or it (or the coroutine) returns None and calls `request.reply` once later.

A hostile client can harm only its own connection: the gateway stops reading from a client that does not read its answers, then
closes it, and counts the waiting bytes of each connection and of all (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import socket
import ssl
import threading
import time
from collections import ChainMap, Counter, deque
from collections.abc import Awaitable, Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from pyengine.errors import EngineError, UsageError
from pyengine.formats.record import encode_host
from pyengine.gateway import codes
from pyengine.gateway.tls import HandshakeHandler, HasHost, HostSet, TlsHandler
from pyengine.gateway.wire import ANSWER, ONE_WAY, Frame, WireError, decode_frame, encode_frame, frame_length
from pyengine.settings import join_address

TLS_WRITE_BYTES = 32 << 10  # given to TLS at once, which keeps a buffer of its longest write until the connection ends
SMALL_BYTES = 64 << 10      # a connection with no more is not closed for the memory of others
REQUESTS_MAX = 2048         # pending requests of one connection, with held pulls
REQUEST_BYTES, FIELD_BYTES = 2048, 200  # approximate memory of a pending request without its frame, and of each header field
FAR_READS_MAX = 4           # of one connection, in threads, none of which begins while its client does not read
FRAMES_AT_ONCE = 32         # of one connection, before other connections are served
SLICE_S = 0.000_5           # of one connection, likewise
TURN_S = 0.002              # of all connections, before the loop looks for new bytes
TICK_S = 1.0
INVOKE_TIMEOUT_S = 10.0     # for a client's answer to a request of the gateway (RocketMQ: Broker2Client)
INT32_MASK = 0x7FFFFFFF
_INTEGER = re.compile("-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of clients. `connection_bytes_max` bounds the waiting bytes of one connection, `memory_bytes_max` of all."""

    frame_bytes_max: int = 16 << 20
    idle_s: float = 120.0
    connections_max: int = 1024
    connection_bytes_max: int = 32 << 20
    memory_bytes_max: int = 256 << 20
    address_connections_max: int = 512


@dataclass(slots=True)
class Answer:
    """The answer to a request: RocketMQ's response code, a remark for errors, header fields, a body."""

    code: int = codes.SUCCESS
    remark: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class RequestRefusedError(Exception):
    def __init__(self, code: int, remark: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(remark)
        self.answer = Answer(code, remark, fields or {})


def refuse_if(fault: str, code: int = codes.SYSTEM_ERROR) -> None:
    if fault:
        raise RequestRefusedError(code, fault)


class Request:
    """One request of a connection. `reply` answers it; a second reply, or one after the connection's end, has no effect."""

    __slots__ = ("connection", "frame", "size_bytes", "_is_open", "__weakref__")

    def __init__(self, connection: Connection, frame: Frame, size_bytes: int) -> None:
        self.connection = connection
        self.frame = frame
        self.size_bytes = size_bytes
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open and not self.connection.is_closed

    def text(self, name: str) -> str:
        """Return a field of the header; WireError if it is absent."""
        value = self.frame.fields.get(name)
        if value is None:
            raise WireError(f"the custom field <{name}> is null")
        return value

    def integer(self, name: str, default: int | None = None, *, bits: int = 32) -> int:
        """Return a field of the header as a signed number, `default` if it is absent; WireError if it is not a number."""
        text = self.frame.fields.get(name)
        if text is None:
            if default is not None:
                return default
            text = self.text(name)
        if _INTEGER.fullmatch(text) and -(1 << bits - 1) <= (number := int(text)) < 1 << bits - 1:
            return number
        raise WireError(f"the field {name} is not a number of {bits} bits")

    def flag(self, name: str) -> bool:
        return self.frame.fields.get(name, "").lower() == "true"

    def require(self, topic: str, right: int) -> None:
        """Refuse it if the client lacks a right (acl_file) for a topic that the header does not name."""
        self.connection._owner.require(self, topic, right)

    def reply(self, answer: Answer) -> bool:
        """Send the answer, unless the request is one-way; return whether the connection has taken it for its client."""
        if not self._is_open:
            return False
        self._is_open = False
        return self.connection.finish(self, answer, self.size_bytes)

    def failure(self, error: Exception) -> Answer:
        """Return the answer that says why it failed; report what is the gateway's fault."""
        if isinstance(error, RequestRefusedError):
            return error.answer
        if not isinstance(error, (WireError, EngineError)):
            self.connection.report(f"request {self.frame.code} failed: {error!r}")
        return Answer(codes.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


Handler = Callable[[Request], "Answer | Awaitable[Answer | None] | None"]
Handlers = dict[int, Handler]  # by request code
Require = Callable[[Request, str, int], None]  # Request.require() of all connections
# Serves requests at a position of a connection's bytes, without a Request for each; returns the bytes and requests it served.
TakeFirst = Callable[["Connection", bytearray, int], tuple[int, int]]


class Connections:
    """All connections of the gateway, at all of its ports."""

    def __init__(self, limits: Limits, report: Callable[[str, str], None], tls: TlsHandler | None = None) -> None:
        """`report(host, sentence)` gets the reason why the gateway closes a connection. With a `tls`, connections may use TLS."""
        self.limits = limits
        self._tls = tls
        self.report = report
        self.open: set[Connection] = set()
        self.clients: HostSet[Connection] = HostSet()  # of these, those that are not local
        self.held_bytes = 0
        self.left_bytes: Counter[str] = Counter()  # of these, of requests whose connections are lost, by host
        self._turns: Turns[Connection, None] = Turns()  # connections with more frames, which are not read from meanwhile
        self._turn_s = 0.0          # spent since the last turn
        self._is_turn_due = False
        self.when_closed: list[Callable[[Connection], None]] = []
        self.require: Require = lambda request, topic, right: None  # by the access list, if there is one
        self.tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._watch: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int, handlers: Mapping[int, Handler], take_first: TakeFirst | None = None) -> int:
        """Bind an address, to serve these codes after start(); return the port. `take_first` is called before a frame is read."""
        tls = self._tls

        def make() -> asyncio.Protocol:
            return Connection(self, handlers, take_first)

        server = await asyncio.get_running_loop().create_server(
            make if tls is None else lambda: HandshakeHandler(tls, make, self.refusal, self.report, self.limits.idle_s),
            host, port, backlog=1024, reuse_address=True, start_serving=False)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def listen_local(self, listener: socket.socket, own: Handlers, handlers: Handlers, take_first: TakeFirst | None = None) -> None:
        """Serve these codes at a Unix socket, to workers of this engine that have a connection for each client, which they check and
        whose number they bound. `own` are of requests of the worker itself."""
        served: ChainMap[int, Handler] = ChainMap({codes.INTRODUCE: introduce}, own, handlers)
        self._servers.append(await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self, served, take_first, is_local=True), sock=listener, start_serving=False))

    async def start(self) -> None:
        for server in self._servers:
            await server.start_serving()
        self._watch = asyncio.get_running_loop().create_task(self._close_idle())

    def refusal(self, host: str) -> str:
        """Return why one more connection from that host is refused, "" if it is not."""
        limits = self.limits
        taken: list[HostSet[Any]] = [self.clients] if self._tls is None else [self.clients, self._tls.undecided]
        if (left := self.left_bytes[host]) > limits.memory_bytes_max // 2 or self.left_bytes.total() > limits.memory_bytes_max:
            return f"{left} bytes of lost connections from there still wait in the gateway (gateway_memory_max_bytes)"
        if sum(map(len, taken)) >= limits.connections_max:
            return f"{limits.connections_max} connections are open already (gateway_connections_max)"
        if sum(each.of_host[host] for each in taken) >= limits.address_connections_max:
            return f"{limits.address_connections_max} connections from there are open already (gateway_address_connections_max)"
        return ""

    def give_back(self) -> None:
        while self._servers:
            self._servers.pop().close()

    async def close(self) -> None:
        """Accept no more connections, and close the open ones once their answers are sent."""
        self.give_back()
        if self._tls is not None:
            self._tls.close()
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        for connection in list(self.open):
            connection.close()
        for task in list(self.tasks):
            task.cancel()

    # ---- turns --------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Handle frames of a connection now, or in its turn if others wait or much was done since the last turn."""
        if self._turns or self._turn_s >= TURN_S:
            if connection not in self._turns:
                self._turns.add(connection, None)
                connection.pause()
            self._plan_turn()
        else:
            self._take_slice(connection)

    def serve_later(self, connection: Connection) -> None:
        if connection not in self._turns:
            self._turns.add(connection, None)
            self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._is_turn_due = False
        self._turn_s = 0.0
        while self._turns and self._turn_s < TURN_S:
            connection, _ = self._turns.take()
            assert connection is not None
            if not connection.is_closed:
                self._take_slice(connection)
        if self._turns:  # a turn may have ended with closed connections
            self._plan_turn()

    def _take_slice(self, connection: Connection) -> None:
        began_s = time.perf_counter()
        has_more = connection.read_frames(began_s + SLICE_S)
        took_s = time.perf_counter() - began_s
        self._turn_s += took_s
        self._turns.charge(connection, took_s)
        if has_more:
            self.serve_later(connection)  # an answer of its slice may have done that already
            connection.pause()
        else:
            connection.unpause()

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self.limits.idle_s / 4))
            now_s = time.monotonic()
            for connection in [each for each in self.open if each.active_s < now_s - each.idle_s]:
                connection.fail(f"nothing whole came for {connection.idle_s:g} s")


class Connection(asyncio.Protocol):
    """One peer, in most cases a client. `address` is host:port as RocketMQ writes it, `born_host` the same as in a message."""

    _language = "JAVA"  # of the requests that this side sends
    _reads_answers = False  # also while the peer does not read

    def __init__(self, owner: Connections, handlers: Mapping[int, Handler], take_first: TakeFirst | None = None, *,
                 is_local: bool = False) -> None:
        self._owner = owner
        self.is_local = is_local
        self._handlers = handlers
        self._take_first = take_first
        self._limits = owner.limits
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._is_tls = False
        self._unsent: deque[memoryview] = deque()  # what TLS gets when the client reads again
        self._unsent_bytes = 0
        self._requests = 0
        self._request_bytes = 0
        self._tasks: dict[asyncio.Task[None], Request] = {}
        self._task_bytes = 0        # of their requests
        self._has_left = False
        self._counted = 0           # the part of this connection in the owner's held_bytes
        self._longest = 0           # frame that was sent
        self._may_write = asyncio.Event()  # unless the client does not read
        self._may_write.set()
        self._is_paused = False
        self._opaque = itertools.count(1)
        self._invoked: dict[int, asyncio.Future[Frame]] = {}
        self.host, self.address, self.born_host = "", "", b""
        self._is_introduced_secure = False
        self.frame_bytes_max = owner.limits.frame_bytes_max
        self.active_s = time.monotonic()
        self.idle_s = math.inf if is_local else owner.limits.idle_s  # after which it is closed
        self.is_closed = True
        self.behind: set[tuple[str, str, int]] = set()  # topic, group and queue of pulls that were refused while the group popped
        self.far_reads = asyncio.Semaphore(FAR_READS_MAX)
        self.in_order = asyncio.Lock()  # for requests whose handler may wait, and whose order must not change
        self.waiting = 0                # pending requests of that kind

    # ---- asyncio's side -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_tls = isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)
        if self._is_tls:
            self._transport.set_write_buffer_limits(1)  # pause once the socket is full, not when as much waits in TLS
        host, port = ("127.0.0.1", 0) if self.is_local else (transport.get_extra_info("peername") or ("0.0.0.0", 0))[:2]
        with contextlib.suppress(UsageError):  # a link-local address has no form in a message
            self.be_from(str(host), join_address(str(host), port))
        self.is_closed = False
        if not self.is_local:
            if why := self._owner.refusal(self.host):
                self.fail(why)
                return
            self._owner.clients.add(self)
        self._owner.open.add(self)

    def be_from(self, host: str, address: str) -> None:
        """Note where its client is; UsageError, with that noted, for an address that has no form in a message."""
        self.host, self.address = host, address
        self.born_host = encode_host(address)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = self._has_left = True
        self._may_write.set()
        self._owner.open.discard(self)
        self._owner.clients.discard(self)
        self._buffer.clear()
        self._unsent.clear()
        for task, request in self._tasks.items():
            if not request.frame.is_one_way:
                task.cancel()  # its client would not get the answer
        self._count(self._task_bytes)
        if self._task_bytes:
            self._owner.left_bytes[self.host] += self._task_bytes
        for coming in self._invoked.values():
            if not coming.done():
                coming.set_exception(ConnectionResetError(f"the connection of {self.address} has ended"))
        for listener in self._owner.when_closed:
            listener(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._owner.serve(self)

    def pause_writing(self) -> None:
        self._may_write.clear()
        if self._may_not_ask:
            self.pause()

    def eof_received(self) -> None:
        self._hand_over()  # the transport closes now, but a client that sends no more may still read

    def resume_writing(self) -> None:
        self._may_write.set()
        self._write_unsent()
        self._continue_reading()

    # ---- requests -----------------------------------------------------------------

    def read_frames(self, until_s: float) -> bool:
        """Handle some whole frames of the buffer, until this time; return whether more may be there."""
        at = handled = 0
        may_have_more = True
        try:
            while not (self.is_closed or self._may_not_ask):
                if handled and (handled >= FRAMES_AT_ONCE or time.perf_counter() >= until_s):
                    break
                if self._take_first is not None and not self.waiting and at < len(self._buffer):
                    taken, requests = self._take_first(self, self._buffer, at)
                    if taken:
                        at += taken
                        handled += requests
                        continue
                size_bytes = frame_length(self._buffer, at, self._limits.frame_bytes_max)
                if size_bytes is None or len(self._buffer) - at < size_bytes:
                    may_have_more = False
                    break
                data = bytes(memoryview(self._buffer)[at + 4:at + size_bytes])
                at += size_bytes
                handled += 1
                self.active_s = time.monotonic()
                self._handle(decode_frame(data), size_bytes)
        except WireError as error:
            self.fail(str(error))
        if at:
            del self._buffer[:at]
        self._measure()
        return may_have_more and not self.is_closed and not self._may_not_ask

    @property
    def is_full(self) -> bool:
        """Whether may_write() would wait."""
        return not self._may_write.is_set()

    @property
    def _may_not_ask(self) -> bool:
        waits = self.is_full and not self._reads_answers
        return waits or self._requests >= REQUESTS_MAX or self._request_bytes > self._limits.connection_bytes_max

    def _handle(self, frame: Frame, size_bytes: int) -> None:
        if frame.is_answer:
            coming = self._invoked.get(frame.opaque)
            if coming is not None and not coming.done():
                coming.set_result(frame)
            return
        size_bytes += REQUEST_BYTES + FIELD_BYTES * len(frame.fields)
        request = Request(self, frame, size_bytes)
        self._requests += 1
        self._request_bytes += size_bytes
        handler = self._handlers.get(frame.code)
        if handler is None:
            request.reply(Answer(codes.REQUEST_CODE_NOT_SUPPORTED, f" request type {frame.code} not supported"))
            return
        requester = REQUESTER.set(self)
        try:
            self._serve(request, handler)
        finally:
            REQUESTER.reset(requester)

    def _serve(self, request: Request, handler: Handler) -> None:
        try:
            answer = handler(request)
        except Exception as error:  # noqa: BLE001 - the request's fault or the handler's: RocketMQ answers its text
            request.reply(request.failure(error))
            return
        if isinstance(answer, Answer):
            request.reply(answer)
        elif answer is not None:
            task = asyncio.get_running_loop().create_task(self._wait_for(request, answer))
            self._owner.tasks.add(task)
            self._tasks[task] = request
            self._task_bytes += request.size_bytes
            task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._owner.tasks.discard(task)
        size_bytes = self._tasks.pop(task).size_bytes
        self._task_bytes -= size_bytes
        if self._has_left:
            self._owner.left_bytes -= Counter({self.host: size_bytes})
            self._count(self._task_bytes)

    async def _wait_for(self, request: Request, coming: Awaitable[Answer | None]) -> None:
        try:
            answer = await coming
            if answer is not None:
                request.reply(answer)
        except Exception as error:  # noqa: BLE001 - as above
            request.reply(request.failure(error))

    def finish(self, request: Request, answer: Answer, size_bytes: int) -> bool:
        """Send the answer to a request; return as Request.reply, which calls it once for each."""
        self._requests -= 1
        self._request_bytes -= size_bytes
        asked, is_taken = request.frame, False
        if not (asked.is_one_way or self.is_closed):
            try:
                data = encode_frame(Frame(answer.code, answer.fields, answer.body, asked.opaque, ANSWER, answer.remark, form=asked.form))
            except WireError as error:
                self._send(encode_frame(Frame(codes.SYSTEM_ERROR, opaque=asked.opaque, flag=ANSWER, remark=str(error), form=asked.form)))
            else:
                is_taken = self._send(data)
        if self._is_paused:
            self._continue_reading()
        return is_taken

    def begin(self, requests: int, size_bytes: int) -> None:
        self._requests += requests
        self._request_bytes += size_bytes + requests * REQUEST_BYTES
        self.active_s = time.monotonic()

    def end(self, requests: int, size_bytes: int, answers: bytes) -> None:
        self._requests -= requests
        self._request_bytes -= size_bytes + requests * REQUEST_BYTES
        if answers and not self.is_closed:
            self._send(answers)

    def deferred_request(self, code: int, opaque: int, size_bytes: int) -> Request:
        """Return a request that is answered later as a Request, whose reply counts it as ended."""
        return Request(self, Frame(code, opaque=opaque), size_bytes + REQUEST_BYTES)

    async def may_write(self, timeout_s: float | None = None) -> None:
        """Wait until the peer has read most of what was written; TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._may_write.is_set():  # others may have written meanwhile
                await self._may_write.wait()

    def invoke_oneway(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        if not self.is_closed:
            self._write(Frame(code, fields, body, next(self._opaque) & INT32_MASK, ONE_WAY))

    async def invoke(self, code: int, fields: Mapping[str, str], body: bytes = b"", timeout_s: float = INVOKE_TIMEOUT_S) -> Frame:
        """Send the peer a request and wait for its answer. OSError if it does not read, disconnects, or does not answer."""
        if self.is_closed or self._transport is None:
            raise ConnectionError(f"the peer at {self.address} has gone")
        # Requests of one client to another must not fill the other's connection, nor close it for the memory limit.
        if self._transport.get_write_buffer_size() + self._unsent_bytes > self._limits.connection_bytes_max // 4:
            raise ConnectionError(f"the peer at {self.address} does not read")
        if self._owner.held_bytes + len(body) > self._limits.memory_bytes_max:
            raise ConnectionError("too many bytes wait in the gateway (gateway_memory_max_bytes)")
        opaque = next(self._opaque) & INT32_MASK
        coming = self._invoked[opaque] = asyncio.get_running_loop().create_future()
        try:
            self._write(Frame(code, fields, body, opaque, language=self._language))
            return await asyncio.wait_for(coming, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the peer at {self.address} did not answer within {timeout_s:g} s") from None
        finally:
            del self._invoked[opaque]

    def _write(self, frame: Frame) -> None:
        self._send(encode_frame(frame))

    def _send(self, data: bytes) -> bool:
        """Write to the peer; return whether the connection is still open then."""
        assert self._transport is not None
        if self._transport.is_closing():  # its client has gone, and the loop will say so
            return False
        self._longest = max(self._longest, len(data))
        if self._is_tls:
            self._unsent.append(memoryview(data))
            self._unsent_bytes += len(data)
            self._write_unsent()
        else:
            self._transport.write(data)
        self.active_s = time.monotonic()
        self._measure()
        return not self.is_closed

    def _write_unsent(self) -> None:
        while self._unsent and self._may_write.is_set() and self._transport is not None:
            data = self._unsent.popleft()
            if len(data) > TLS_WRITE_BYTES:
                self._unsent.appendleft(data[TLS_WRITE_BYTES:])
            else:
                self._unsent_bytes -= len(cast(bytes, data.obj))  # counted whole until now, since a rest keeps it whole
            self._transport.write(data[:TLS_WRITE_BYTES])

    def _hand_over(self) -> None:
        """Give TLS all that waits, since a transport that closes takes no more."""
        if self._transport is not None:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()
            self._unsent_bytes = 0

    # ---- limits -------------------------------------------------------------------

    def _measure(self) -> None:
        """Count the waiting bytes of this connection; close it if they are too many."""
        if self.is_closed or self._transport is None:
            return
        unsent = self._transport.get_write_buffer_size() + self._unsent_bytes
        self._count(len(self._buffer) + self._request_bytes + unsent)
        # A frame may be longer than the limit, and as many are made at once before it is seen that the peer does not read.
        if unsent > max(self._limits.connection_bytes_max, self._longest * (FAR_READS_MAX + 1)):
            self.fail(f"it does not read: {unsent} bytes wait for it")
        elif self._counted > SMALL_BYTES and self._owner.held_bytes > self._limits.memory_bytes_max:
            self.fail(f"{self._owner.held_bytes} bytes wait in the gateway (gateway_memory_max_bytes), {self._counted} of them its own")

    def _count(self, held: int) -> None:
        self._owner.held_bytes += held - self._counted
        self._counted = held

    def pause(self) -> None:
        if not (self._is_paused or self.is_closed) and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def unpause(self) -> None:
        """Read from the client unless it must not ask; finish() and resume_writing() look again."""
        if self._may_not_ask:
            self.pause()
        elif self._is_paused and not self.is_closed and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def _continue_reading(self) -> None:
        if self._is_paused and not self._may_not_ask and not self.is_closed:
            self._owner.serve_later(self)

    def close(self) -> None:
        """Close it once its output is sent."""
        if self._transport is not None:
            self._hand_over()
            self._transport.close()

    def abort(self) -> None:
        """Close it without its output, which a peer that hangs may never read."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_secure(self) -> bool:
        """Whether it uses TLS, or stands for a client that does."""
        return self._is_introduced_secure or self._is_tls

    def report(self, sentence: str) -> None:
        """Report a sentence about this client, one of the few a minute that the log takes."""
        self._owner.report(self.host, sentence)

    def fail(self, why: str) -> None:
        """Close it now, because its client broke a rule."""
        if not self.is_closed and self._transport is not None:
            self.is_closed = True
            self.report(f"the connection of {self.address} is closed: {why}")
            self._transport.abort()


class AskingConnection(Connection):
    """A connection that this process has opened in order to ask. It reads answers also while its peer does not read."""

    _reads_answers = True

    def __init__(self, owner: Connections, handlers: Mapping[int, Handler] | None = None, *, language: str = "JAVA",
                 is_local: bool = False) -> None:
        super().__init__(owner, handlers or {}, is_local=is_local)
        self._language = language

    async def invoke(self, code: int, fields: Mapping[str, str], body: bytes = b"", timeout_s: float = INVOKE_TIMEOUT_S,
                     when_sent: Callable[[], object] = lambda: None) -> Frame:
        """Send a request once the peer reads, and wait for its answer; OSError as above. Without time left nothing is sent."""
        until_s = time.monotonic() + timeout_s
        await self.may_write(timeout_s)
        if (left_s := until_s - time.monotonic()) <= 0:  # the timeout ends only what waits
            raise TimeoutError(f"no time is left to ask the peer at {self.address}")
        when_sent()
        return await super().invoke(code, fields, body, left_s)


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def introduce(request: Request) -> Answer:
    """Take the address of the client that a local connection stands for, and whether it speaks TLS to its worker."""
    address = request.text("address")
    try:
        encode_host(address)
        request.connection.be_from(host_of(address), address)
    except UsageError as error:
        return Answer(codes.SYSTEM_ERROR, str(error))
    request.connection._is_introduced_secure = request.flag("secure")
    return Answer()


# ---- threads ------------------------------------------------------------------------

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


REQUESTER: ContextVar[HasHost | None] = ContextVar("REQUESTER", default=None)  # whose request is handled: a connection's, or a client's
Asker = TypeVar("Asker", bound=HasHost)
HOSTS_REMEMBERED_MAX = 4096
CALL_S = 0.000_1  # of a call that has only begun


class Turns(Generic[Asker, Result]):
    """Gives turns to connections, or to clients: first to the host, and of it to the connection, that has used the least time.

    So a client that asks for little has its turn next, however many others ask for much. Who was idle has no credit: it begins
    with what the last one had used that got a turn. Nothing counts while nobody waits. None stands for the gateway itself.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Asker | None, deque[Result]]] = {}
        self._host_used_s: dict[str, float] = {}
        self._used_s: WeakKeyDictionary[Asker, float] = WeakKeyDictionary()
        self._host_base_s = self._base_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, connection: Asker | None) -> bool:
        return connection in self._waiting.get(connection.host if connection else "", ())

    def add(self, connection: Asker | None, item: Result) -> None:
        """Let a connection wait for a turn, in which it gets the item: one for each, in order."""
        host = connection.host if connection else ""
        if host not in self._waiting:
            if len(self._host_used_s) >= HOSTS_REMEMBERED_MAX:
                self._host_used_s = {each: self._host_used_s[each] for each in self._waiting}
            self._host_used_s[host] = max(self._host_used_s.get(host, 0.0), self._host_base_s)
        waiting = self._waiting.setdefault(host, {})
        if connection is not None and connection not in waiting:
            self._used_s[connection] = max(self._used_s.get(connection, 0.0), self._base_s)
        waiting.setdefault(connection, deque()).append(item)

    def take(self, but: Container[str] = ()) -> tuple[Asker | None, Result]:
        """Return the connection whose turn it is, of none of these hosts, and its first item, which waits no more; ValueError if
        there is none."""
        host = min((each for each in self._waiting if each not in but), key=self._host_used_s.__getitem__)
        waiting = self._waiting[host]
        connection = min(waiting, key=lambda each: self._used_s.get(each, 0.0) if each is not None else 0.0)
        self._host_base_s = self._host_used_s[host]
        self._base_s = self._used_s.get(connection, 0.0) if connection is not None else self._base_s
        item = waiting[connection].popleft()
        if not waiting[connection]:
            del waiting[connection]
        if not waiting:
            del self._waiting[host]
        return connection, item

    def charge(self, connection: Asker | None, spent_s: float) -> None:
        if not self._waiting:
            if self._host_used_s:
                self._host_used_s, self._used_s = {}, WeakKeyDictionary()
                self._host_base_s = self._base_s = 0.0
            return
        host = connection.host if connection else ""
        self._host_used_s[host] = self._host_used_s.get(host, self._host_base_s) + spent_s
        if connection is not None:
            self._used_s[connection] = self._used_s.get(connection, self._base_s) + spent_s


Call = tuple[Future[Any], Callable[[], Any]]


class TurnExecutor(ThreadPoolExecutor):
    """Runs calls in the turns of their clients, so that many calls of one delay no other, nor long ones, which have `of_host` threads
    of one host at most."""

    def __init__(self, threads: int, name: str, of_host: int | None = None) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._turns: Turns[HasHost, Call] = Turns()
        self._of_host = of_host or threads
        self._running: Counter[str] = Counter()  # calls, by host
        self._skipped = 0  # turns in which only hosts with all their threads had calls: other threads take them
        self._lock = threading.Lock()

    def submit(self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
        future = Future[Result]()
        with self._lock:
            self._turns.add(REQUESTER.get(), (future, partial(fn, *args, **kwargs)))
        super().submit(self._run_next)
        return future

    def run(self, call: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> asyncio.Future[Result]:
        return asyncio.wrap_future(self.submit(call, *args, **kwargs))

    def serving(self, handler: Callable[[Request], Answer]) -> Handler:
        return lambda request: self.run(handler, request)

    def _run_next(self) -> None:
        has_turn = True
        while has_turn:
            began_s = time.perf_counter()
            with self._lock:
                try:
                    connection, (future, call) = self._turns.take({host for host, calls in self._running.items() if calls >= self._of_host})
                except ValueError:
                    self._skipped += 1
                    return
                host = [connection.host] if connection is not None else []  # the gateway's own are not counted
                self._running.update(host)
                self._turns.charge(connection, CALL_S)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - the caller's, as by ThreadPoolExecutor
                    future.set_exception(error)
            with self._lock:
                self._running -= Counter(host)
                self._turns.charge(connection, time.perf_counter() - began_s)
                if has_turn := self._skipped > 0:
                    self._skipped -= 1
