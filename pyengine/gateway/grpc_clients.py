"""The gRPC worker's clients: each has a connection to the gateway of its own, at a Unix socket.

So the gateway sees a client of RocketMQ 5 as it sees one of 4.9: its address is the born host of its messages, groups have it
as a member, rights, turns and the limit of pending requests are its own, and what it holds is free when its connection ends.
A gateway that is restarted is connected again; a request that it has not answered is sent once more if that changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import EngineError
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, AskingConnection, Connections, Limits, Request, host_of
from pyengine.gateway.members import GROUPS_OF_CLIENT_MAX
from pyengine.gateway.wire import LANGUAGES, Frame, write_json
from pyengine.ipc.sessions import connect_socket
from pyengine.ipc.shared_objects import GATEWAY_SOCKET

CONNECT_INTERVAL_S = 0.1
SILENT_S = 120.0                # after which a client without a stream or a call is left out
LEFT_S = 2.0                    # after the end of its stream, which it may open again
SQL = 2                         # of FilterType
TOLD_BYTES_MAX = 1 << 20        # of questions that wait for one client, if it is more than one; the gateway asks again

_OF_LINKS = Limits(frame_bytes_max=1 << 30, connection_bytes_max=1 << 30, memory_bytes_max=1 << 62)  # the gateway is trusted


class GatewayLostError(EngineError):
    """The gateway does not run, or has ended the connection before it answered: whether it did what was asked is not known."""


class TooManyClientsError(EngineError):
    """A limit of clients is reached; the text names its setting."""


class Host:
    """What the clients of one address have of the worker now."""

    def __init__(self) -> None:
        self.calls = 0
        self.held_bytes = 0  # of messages on their way in either direction


class GrpcClient:
    """One client of RocketMQ 5: an id at one address, with an account of the access list if it has a key."""

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
        self._link: AskingConnection | None = None
        self._connecting = asyncio.Lock()
        self.settings: Any = None               # of its last Telemetry
        self.groups: set[str] = set()           # in which it consumes
        self.producer_groups: set[str] = set()  # topics in whose transactions it is asked
        self.streams = 0                        # of Telemetry, now
        self.writing = asyncio.Lock()           # into such a stream
        self.calls = 0                          # now
        self.used = Host()                      # what its host has, while it calls
        self.seen_s = time.monotonic()
        self.has_left = asyncio.Event()         # it has said so, or is left out
        self._told: asyncio.Queue[Frame] = asyncio.Queue()  # questions about transactions
        self._told_bytes = 0

    async def ask(self, code: int, fields: Mapping[str, str], body: bytes = b"", *, until_s: float, again: bool = True) -> Frame:
        """Send the gateway a request of this client and return its answer; with `again` once more if it is lost.

        GatewayLostError if no gateway answers until then (`time.monotonic`).
        """
        while True:
            link = await self._connected(until_s)
            try:
                return await link.invoke(code, {**fields, **self._access}, body, until_s - time.monotonic())
            except TimeoutError:
                raise GatewayLostError("the gateway did not answer in time") from None
            except OSError:
                if not again:
                    raise GatewayLostError("the gateway has ended the connection") from None
                await asyncio.sleep(CONNECT_INTERVAL_S)  # a gateway that ends the connection for this request is not flooded with it

    async def _connected(self, until_s: float) -> AskingConnection:
        while True:
            if self.has_left.is_set():  # a call that was under way when its client left
                raise GatewayLostError("the client has left")
            if self._link is not None and not self._link.is_closed:
                return self._link
            async with self._connecting:
                if self._link is None or self._link.is_closed:
                    with contextlib.suppress(OSError, GatewayLostError):  # TimeoutError is an OSError
                        async with asyncio.timeout(until_s - time.monotonic()):
                            self._link = await self._connect()
                        continue
            if time.monotonic() + CONNECT_INTERVAL_S >= until_s:
                raise GatewayLostError("the gateway does not run, or is restarted just now")
            await asyncio.sleep(CONNECT_INTERVAL_S)

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

    def _take(self, request: Request) -> Answer:
        size_bytes = self._told_bytes + len(request.frame.body)
        if self._told.empty() or size_bytes <= TOLD_BYTES_MAX:
            self._told_bytes = size_bytes
            self._told.put_nowait(request.frame)
        return Answer()

    async def next_question(self) -> Frame:
        """Return the gateway's next question about a transaction of this client; wait for one."""
        frame = await self._told.get()
        self._told_bytes -= len(frame.body)
        return frame

    def add(self, known: set[str], names: Iterable[str]) -> None:
        """Add names to its groups or producer groups; TooManyClientsError for more than the gateway takes from one client."""
        new = {*names} - known
        if len(known) + len(new) > GROUPS_OF_CLIENT_MAX:
            raise TooManyClientsError(f"a client has at most {GROUPS_OF_CLIENT_MAX} groups, and as many topics to which it sends")
        known |= new

    def heartbeat(self) -> bytes:
        """Return the body of this client's heartbeat."""
        subscriptions = [] if self.settings is None else self.settings.subscription.subscriptions
        rows: list[dict[str, object]] = [{
            "classFilterMode": False, "codeSet": [], "expressionType": "SQL92" if each.expression.type == SQL else "TAG",
            "subString": each.expression.expression or "*", "subVersion": 0, "tagsSet": [], "topic": name_of(each.topic),
        } for each in subscriptions]
        return write_json({
            "clientID": self.client_id, "producerDataSet": [{"groupName": name} for name in sorted(self.producer_groups)],
            "consumerDataSet": [{
                "groupName": name, "consumeType": "CONSUME_POP", "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "unitMode": False, "subscriptionDataSet": rows,
            } for name in sorted(self.groups)]})

    async def leave(self) -> None:
        """Give back at once what this client holds, and end its connection."""
        self.has_left.set()
        link, self._link = self._link, None
        if link is None or link.is_closed:
            return
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LEFT_S):
                for name in sorted(self.groups):
                    await link.invoke(codes.UNREGISTER_CLIENT, {"clientID": self.client_id, "consumerGroup": name, **self._access})
        link.close()


class GrpcClients:
    """The clients by id, address and key, and the limits of all together. One address can have half of the calls and of the memory."""

    def __init__(self, folder: Path, limits: Limits, calls_max: int) -> None:
        self._folder = folder
        self._limits = limits
        self._calls_of_host_max = max(1, calls_max // 2)
        self._links = Connections(_OF_LINKS, lambda host, sentence: None)
        self._clients: dict[tuple[str, str, str], GrpcClient] = {}
        self._hosts: dict[str, Host] = {}  # those with calls
        self.held_bytes = 0

    def find(self, client_id: str, peer: str, access_key: str, language: str, *, is_secure: bool) -> GrpcClient:
        """Return the client of a call, a new one if it is not known; TooManyClientsError."""
        key = client_id, peer, access_key
        found = self._clients.get(key)
        if found is None:
            address = address_of(peer)
            host = host_of(address)
            if len(self._clients) >= self._limits.connections_max:
                raise TooManyClientsError(f"{self._limits.connections_max} clients are served already (gateway_connections_max)")
            if sum(each.host == host for each in self._clients.values()) >= self._limits.address_connections_max:
                raise TooManyClientsError(f"{self._limits.address_connections_max} clients from there are served already "
                                          "(gateway_address_connections_max)")
            found = self._clients[key] = GrpcClient(self._folder, self._links, client_id, address, access_key=access_key, language=language,
                                                    is_secure=is_secure)
        found.seen_s = time.monotonic()
        return found

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
            if not host.calls:
                del self._hosts[client.host]

    @contextlib.contextmanager
    def holding(self, client: GrpcClient, size_bytes: int) -> Iterator[None]:
        """Count the bytes of messages of a call while they are on their way; TooManyClientsError above a limit."""
        most, host = self._limits.memory_bytes_max, client.used
        if self.held_bytes + size_bytes > most or host.held_bytes and host.held_bytes + size_bytes > most // 2:
            raise TooManyClientsError(f"{self.held_bytes} bytes of messages are on their way already, {host.held_bytes} of them with this "
                                      "client's host (gateway_memory_max_bytes)")
        self.held_bytes += size_bytes
        host.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes
            host.held_bytes -= size_bytes

    async def remove(self, client: GrpcClient) -> None:
        """Leave a client out, and give back what it holds; a later call makes it known again."""
        self._clients = {key: each for key, each in self._clients.items() if each is not client}
        await client.leave()

    async def expire(self) -> None:
        """Leave out the clients that are silent, and those whose stream has ended and was not opened again."""
        now_s = time.monotonic()
        for client in list(self._clients.values()):
            if not client.calls and not client.streams and now_s - client.seen_s > (LEFT_S if client.settings is not None else SILENT_S):
                await self.remove(client)

    async def close(self) -> None:
        """End all connections; what clients hold stays theirs for its time, since they go on with the next worker."""
        for client in self._clients.values():
            client.has_left.set()
            if client._link is not None:
                client._link.close()
        self._clients.clear()


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


def name_of(resource: Any) -> str:
    """Return a topic's or a group's name in the store: with its namespace as RocketMQ writes it."""
    name: str = resource.name
    return f"{resource.resource_namespace}%{name}" if resource.resource_namespace else name
