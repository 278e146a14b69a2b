"""The gRPC worker's clients: each has a connection to the gateway of its own, at a Unix socket.

So the gateway sees a client of RocketMQ 5 as it sees one of 4.9: its address is the born host of its messages, groups have it
as a member, rights, turns and the limit of pending requests are its own, and what it holds is free when its connection ends.
A gateway that is restarted is connected again; a request that it has not answered is sent once more if that changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import re
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import EngineError
from pyengine.gateway import codes
from pyengine.gateway.connections import (
    CALL_S,
    INVOKE_TIMEOUT_S,
    Answer,
    AskingConnection,
    Connections,
    Limits,
    Request,
    Turns,
    host_of,
)
from pyengine.gateway.members import GROUPS_OF_CLIENT_MAX
from pyengine.gateway.wire import JSON_BYTES_MAX, LANGUAGES, Frame, Raw, write_json
from pyengine.ipc.sessions import connect_socket
from pyengine.ipc.shared_objects import GATEWAY_SOCKET

CONNECT_INTERVAL_S = 0.1
SILENT_S = 120.0                # after which a client without a stream or a call is left out
LEFT_S = 15.0                   # after its stream and its calls have ended: longer than from one heartbeat to the next (10 s), since
                                # a client whose connection was replaced may have none of them until then
LEAVE_S = 2.0                   # for the gateway's answers as a client leaves
ROUNDS_BETWEEN = 16             # of the event loop, from the begin of a call to the next: gRPC needs about six to give one out
SQL = 2                         # of FilterType

Invoke = Callable[[AskingConnection, int, Mapping[str, str], bytes, float], Awaitable[Frame]]

_OF_LINKS = Limits(frame_bytes_max=1 << 30, connection_bytes_max=1 << 30, memory_bytes_max=1 << 62)  # the gateway is trusted


class GatewayLostError(EngineError):
    """The gateway does not run, or has ended the connection before it answered: whether it did what was asked is not known."""


class TooManyClientsError(EngineError):
    """A limit of clients is reached; the text names its setting."""


class Host:
    """What the clients of one address have of the worker now."""

    def __init__(self) -> None:
        self.open_calls = 0  # until their clients have the answers
        self.calls = 0       # until they are answered
        self.held_bytes = 0  # on their way in either direction


class GrpcClient:
    """One client of RocketMQ 5: an id at one host, with an account of the access list if it has a key. `address` is its newest
    connection's."""

    def __init__(self, folder: Path, links: Connections, client_id: str, address: str, *, access_key: str = "", language: str = "",
                 is_secure: bool = False) -> None:
        """`links` are those of all clients."""
        self.client_id = client_id
        self.language = language if language in LANGUAGES else "OTHER"
        self.address = address
        self.host = host_of(address)
        self._folder = folder
        self._links = links
        self._access = {"AccessKey": access_key} if access_key else {}
        self.is_secure = is_secure
        self.namespace = ""                     # of its topics and groups
        self._link: AskingConnection | None = None
        self._connecting = asyncio.Lock()
        self.subscriptions: Raw | None = None   # of its last Telemetry, as in a heartbeat: its message may take 20 times its bytes
        self.groups: set[str] = set()           # in which it consumes
        self.producer_groups: set[str] = set()  # topics in whose transactions it is asked
        self.streams = 0                        # of Telemetry, now
        self.writing = asyncio.Lock()           # into such a stream
        self.calls = 0                          # now
        self.used = Host()                      # what its host has, while it calls
        self.seen_s = time.monotonic()
        self.has_left = asyncio.Event()         # it has said so, or is left out
        self.questions: asyncio.Queue[Frame] = asyncio.Queue(1)  # about transactions, of the gateway
        self._numbers = itertools.count()       # of its pops

    async def ask(self, code: int, fields: Mapping[str, str], body: bytes = b"", *, until_s: float, again: bool = True,
                  invoke: Invoke = AskingConnection.invoke) -> Frame:
        """Send the gateway a request of this client and return its answer; with `again` once more if it is lost.

        GatewayLostError if no gateway answers until then (`time.monotonic`). `invoke` asks at a connection.
        """
        while True:
            link = await self._connected(until_s)
            try:
                return await invoke(link, code, {**fields, **self._access}, body, until_s - time.monotonic())
            except TimeoutError:
                raise GatewayLostError("the gateway did not answer in time") from None
            except OSError:
                if not again:
                    raise GatewayLostError("the gateway has ended the connection") from None
                await asyncio.sleep(CONNECT_INTERVAL_S)  # a gateway that ends the connection for this request is not flooded with it

    async def pop(self, fields: Mapping[str, str], give_back: Callable[[Awaitable[Frame]], object], *, until_s: float) -> Frame:
        """Pop like ask(). If this is cancelled, the gateway is told so, and `give_back` gets what its answer will be."""
        async def invoke(link: AskingConnection, code: int, fields: Mapping[str, str], body: bytes, timeout_s: float) -> Frame:
            number, sent = str(next(self._numbers)), asyncio.Event()
            popped = asyncio.ensure_future(link.invoke(code, {**fields, "number": number}, body, timeout_s, sent.set))
            try:
                return await asyncio.shield(popped)
            except asyncio.CancelledError:
                if sent.is_set():
                    link.invoke_oneway(codes.CANCEL_POP, {"number": number})
                    give_back(popped)
                else:  # it waits until the gateway reads
                    popped.cancel()
                raise

        return await self.ask(codes.POP_MESSAGE, fields, until_s=until_s, invoke=invoke)

    async def _connected(self, until_s: float) -> AskingConnection:
        while not self.has_left.is_set():  # it may leave while a call is under way
            async with self._connecting:
                if self._link is None or self._link.is_closed:
                    with contextlib.suppress(OSError, GatewayLostError):  # TimeoutError is an OSError
                        async with asyncio.timeout(until_s - time.monotonic()):
                            self._link = await self._connect()
                if self._link is not None and not self._link.is_closed:
                    return self._link
            if time.monotonic() + CONNECT_INTERVAL_S >= until_s:
                raise GatewayLostError("the gateway does not run, or is restarted just now")
            await asyncio.sleep(CONNECT_INTERVAL_S)
        raise GatewayLostError("the client has left")

    async def _connect(self) -> AskingConnection:
        """Open a connection as this client's, with its memberships."""
        _, link = await asyncio.get_running_loop().create_unix_connection(
            lambda: AskingConnection(self._links, {codes.CHECK_TRANSACTION_STATE: self._take}, language=self.language, is_local=True),
            sock=connect_socket(self._folder, 0.0, GATEWAY_SOCKET))
        try:
            introduced = await link.invoke(codes.INTRODUCE, {"address": self.address, "secure": str(self.is_secure).lower()})
            if introduced.code != codes.SUCCESS:
                raise GatewayLostError(f"the gateway does not take the client: {introduced.remark}")
            if self.groups or self.producer_groups:
                await link.invoke(codes.HEART_BEAT, self._access, self.heartbeat())
            if self.has_left.is_set():  # nobody would close it
                raise GatewayLostError("the client has left meanwhile")
        except BaseException:
            link.close()
            raise
        return link

    async def _take(self, request: Request) -> Answer:
        """Take a question, once the client has taken the one before: so long the gateway asks no other, or does so in a later round."""
        async with asyncio.timeout(INVOKE_TIMEOUT_S):
            await self.questions.put(request.frame)
        return Answer()

    def add(self, known: set[str], names: Iterable[str]) -> None:
        """Add names to its groups or producer groups; TooManyClientsError for more than the gateway takes from one client."""
        new = {*names} - known
        if len(known) + len(new) > GROUPS_OF_CLIENT_MAX:
            raise TooManyClientsError(f"a client has at most {GROUPS_OF_CLIENT_MAX} groups, and as many topics to which it sends")
        known |= new

    def name_of(self, resource: Any) -> str:
        """Return a topic's or a group's name in the store: with its namespace, or this client's, as RocketMQ writes it."""
        name: str = resource.name
        namespace = resource.resource_namespace or self.namespace  # Node's client names it in the call's metadata only
        return f"{namespace}%{name}" if namespace else name

    def in_namespace(self, name: str) -> tuple[str, str]:
        """Return the namespace of a topic, if it is this client's, and the topic's name in it."""
        prefix = f"{self.namespace}%"
        return (self.namespace, name.removeprefix(prefix)) if self.namespace and name.startswith(prefix) else ("", name)

    def take(self, settings: Any) -> None:
        """Take the settings of a Telemetry; TooManyClientsError for more than the gateway takes from one client."""
        rows = Raw(write_json([{
            "classFilterMode": False, "codeSet": [], "expressionType": "SQL92" if each.expression.type == SQL else "TAG",
            "subString": each.expression.expression or "*", "subVersion": 0, "tagsSet": [], "topic": self.name_of(each.topic),
        } for each in settings.subscription.subscriptions]))
        self._check(rows)
        self.subscriptions = rows

    def _check(self, rows: bytes) -> None:
        if (size_bytes := len(rows) * max(1, len(self.groups))) > JSON_BYTES_MAX:
            raise TooManyClientsError(f"subscriptions of {size_bytes} bytes in all groups of a client: at most {JSON_BYTES_MAX}")

    def heartbeat(self) -> bytes:
        """Return the body of this client's heartbeat; TooManyClientsError as by take()."""
        rows = self.subscriptions or Raw(b"[]")
        self._check(rows)
        return write_json({
            "clientID": self.client_id,
            # One whose stream has ended cannot be asked; the gateway does so for 120 s more.
            "producerDataSet": [{"groupName": name} for name in sorted(self.producer_groups) if self.streams],
            "consumerDataSet": [{
                "groupName": name, "consumeType": "CONSUME_POP", "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "unitMode": False, "subscriptionDataSet": rows,
            } for name in sorted(self.groups)]})

    @property
    def has_nothing(self) -> bool:
        """Whether it loses nothing if it is left out now, and calls again later."""
        return not (self.calls or self.streams or self.groups or self.producer_groups)

    def end(self) -> None:
        """End its connection for good."""
        self.has_left.set()
        if self._link is not None:
            self._link.close()

    async def leave(self) -> None:
        """Give back at once what this client holds, and end its connection."""
        self.has_left.set()
        link, self._link = self._link, None
        if link is None or link.is_closed:
            return
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LEAVE_S):
                for name in sorted(self.groups):
                    await link.invoke(codes.UNREGISTER_CLIENT, {"clientID": self.client_id, "consumerGroup": name, **self._access})
        link.close()


class GrpcClients:
    """The clients by id, host, key, and whether they use TLS, and the limits of all together. One address can have half of the calls
    and of the memory."""

    def __init__(self, folder: Path, limits: Limits, calls_max: int) -> None:
        self._folder = folder
        self._limits = limits
        self._calls_of_host_max = max(1, calls_max // 2)
        self._open_calls_of_host_max = max(1, calls_max * 3 // 4)
        self._links = Connections(_OF_LINKS, lambda host, sentence: None)
        self.own = GrpcClient(folder, self._links, "", "127.0.0.1:0")  # the worker itself
        self._clients: dict[tuple[str, str, str, bool], GrpcClient] = {}
        self._hosts: dict[str, Host] = {}  # those with calls, or answers on their way
        self._unknown_s: dict[str, float] = {}  # since when a connection of no known client is seen, by its address
        self._turns: Turns[GrpcClient, asyncio.Future[None]] = Turns()  # calls that have not begun
        self._giving: asyncio.Task[None] | None = None  # them turns, while one has begun that others wait for
        self.held_bytes = 0

    def find(self, client_id: str, peer: str, access_key: str, language: str, *, is_secure: bool) -> GrpcClient:
        """Return the client of a call, a new one if it is not known; TooManyClientsError."""
        address = address_of(peer)
        host = host_of(address)
        key = client_id, host, access_key, is_secure
        found = self._clients.get(key)
        if found is None:
            limits, of_host = self._limits, {key: each for key, each in self._clients.items() if each.host == host}
            is_full = len(self._clients) >= limits.connections_max
            if is_full or len(of_host) >= limits.address_connections_max:
                # Of other connections, most of which have ended: one that names ever new clients is refused.
                idle = [key for key, each in of_host.items() if each.has_nothing and each.address != address]
                if not idle:
                    raise TooManyClientsError(
                        f"{limits.connections_max} clients are served already (gateway_connections_max)" if is_full else
                        f"{limits.address_connections_max} clients from there are served already (gateway_address_connections_max)")
                self._clients.pop(min(idle, key=lambda key: of_host[key].seen_s)).end()
            found = self._clients[key] = GrpcClient(self._folder, self._links, client_id, address, access_key=access_key, language=language,
                                                    is_secure=is_secure)
        found.address, found.seen_s = address, time.monotonic()
        return found

    def admit(self, peer: str, call: asyncio.Task[Any]) -> bool:
        """Count a call until its client has the answer; return False if its host has too many, whose answers it may not take."""
        name = host_of(address_of(peer))
        host = self._hosts.setdefault(name, Host())
        if host.open_calls >= self._open_calls_of_host_max:
            return False
        host.open_calls += 1

        def end(_: object) -> None:
            host.open_calls -= 1
            self._forget_idle(name)

        call.add_done_callback(end)
        return True

    @contextlib.contextmanager
    def calling(self, client: GrpcClient) -> Iterator[None]:
        """Count a call of this client while it lasts; TooManyClientsError if its host has too many."""
        host = client.used = self._hosts.setdefault(client.host, Host())
        if host.calls >= self._calls_of_host_max:
            raise TooManyClientsError(f"{host.calls} calls from there are under way already (half of grpc_calls_max)")
        host.calls += 1
        client.calls += 1
        try:
            yield
        finally:
            host.calls -= 1
            client.calls -= 1
            client.seen_s = time.monotonic()

    def _forget_idle(self, host: str) -> None:
        if (found := self._hosts.get(host)) is not None and not found.open_calls and not found.held_bytes:
            del self._hosts[host]

    async def turn(self, client: GrpcClient) -> None:
        """Wait until a call of this client may begin: next is one of the host, and of it the client, of which the fewest have begun.

        gRPC gives out calls in the order in which they came, and needs some rounds of the event loop for each. If calls began as
        fast, a flood would wait in gRPC's queue, before all others; so it waits here.
        """
        if self._giving is not None:
            call = asyncio.get_running_loop().create_future()
            self._turns.add(client, call)
            await call
        else:
            self._giving = asyncio.get_running_loop().create_task(self._give_turns())

    async def _give_turns(self) -> None:
        """Let calls begin while some wait; those that their clients have ended take no turn: else they would gather without a limit."""
        rounds_left = ROUNDS_BETWEEN
        while rounds_left or self._turns:
            if rounds_left:
                await asyncio.sleep(0)
                rounds_left -= 1
                continue
            client, call = self._turns.take()
            if not call.done():
                self._turns.charge(client, CALL_S)
                call.set_result(None)
                rounds_left = ROUNDS_BETWEEN
        self._giving = None

    @contextlib.contextmanager
    def holding(self, client: GrpcClient, size_bytes: int, own_bytes: int = 0) -> Iterator[None]:
        """Count the bytes of a call's messages, or of a large answer, while they are on their way; TooManyClientsError above a limit.
        `own_bytes` are of this call and counted already."""
        most, host = self._limits.memory_bytes_max, client.used
        if self.held_bytes + size_bytes > most or host.held_bytes > own_bytes and host.held_bytes + size_bytes > most // 2:
            raise TooManyClientsError(f"{self.held_bytes} bytes are on their way already, {host.held_bytes} of them with this "
                                      "client's host (gateway_memory_max_bytes)")
        self.held_bytes += size_bytes
        host.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes
            host.held_bytes -= size_bytes
            self._forget_idle(client.host)

    async def remove(self, client: GrpcClient) -> None:
        """Leave a client out, and give back what it holds; a later call makes it known again."""
        self._clients = {key: each for key, each in self._clients.items() if each is not client}
        await client.leave()

    async def expire(self) -> None:
        """Leave out the clients that are silent, and those whose stream has ended and was not opened again."""
        now_s = time.monotonic()
        for client in list(self._clients.values()):
            silent_s = SILENT_S if client.subscriptions is None else LEFT_S
            if not client.calls and not client.streams and now_s - client.seen_s > silent_s:
                await self.remove(client)

    def surplus(self, ports: Collection[int], known: Collection[str]) -> dict[str, int]:
        """End connections of a host beyond its share, those of no known address first and of these the oldest, since the newest ones may
        be about to call; return how many by host. Called in a thread.

        gRPC counts those of all hosts together, and has no other way to end one than that its client does so, or seems to.
        """
        share = self._limits.address_connections_max
        ended: dict[str, int] = {}
        if len(os.listdir("/proc/self/fd")) <= share:
            return ended
        with contextlib.ExitStack() as stack:
            now_s, unknown_s = time.monotonic(), dict[str, float]()
            hosts: dict[str, list[tuple[float, socket.socket]]] = {}
            for each, address in _connections(ports, stack):
                if address not in known:
                    unknown_s[address] = self._unknown_s.get(address, now_s)
                hosts.setdefault(host_of(address), []).append((unknown_s.get(address, math.inf), each))
            self._unknown_s = unknown_s
            for host, found in hosts.items():
                for _, each in sorted(found, key=lambda pair: pair[0])[:max(0, len(found) - share)]:
                    with contextlib.suppress(OSError):  # ended meanwhile
                        each.shutdown(socket.SHUT_RDWR)
                        ended[host] = ended.get(host, 0) + 1
        return ended

    def addresses(self) -> set[str]:
        """Return the addresses of the clients."""
        return {client.address for client in self._clients.values()}

    async def close(self) -> None:
        """End all connections; what clients hold stays theirs for its time, since they go on with the next worker."""
        for client in (*self._clients.values(), self.own):
            client.end()
        self._clients.clear()


def _connections(ports: Collection[int], stack: contextlib.ExitStack) -> Iterator[tuple[socket.socket, str]]:
    """Yield this process's connections at these ports, with their clients' addresses; the stack closes what they are dups of."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            descriptor = os.dup(int(name))
            try:
                connection = stack.enter_context(socket.socket(fileno=descriptor))
            except OSError:  # another kind of file meanwhile
                os.close(descriptor)
                continue
            if connection.family != socket.AF_UNIX and connection.getsockname()[1] in ports:
                host, port = connection.getpeername()[:2]
                host = host.partition("%")[0]
                yield connection, address_of(f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}")


def address_of(peer: str) -> str:
    """Return host:port of gRPC's name for a peer: `ipv4:10.0.0.7:4711`, `ipv6:%5B::1%5D:4711`."""
    kind, _, rest = peer.partition(":")
    address = re.sub(r"%[^\]]*\]", "]", urllib.parse.unquote(rest))  # without the zone of a link-local address
    if kind not in ("ipv4", "ipv6"):
        return "127.0.0.1:0"
    if address.startswith("[::ffff:"):
        host, _, port = address[len("[::ffff:"):].partition("]:")
        return f"{host}:{port}"
    return address
