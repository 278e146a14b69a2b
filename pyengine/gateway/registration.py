"""Registers the gateway's broker with the name servers of a cluster (RocketMQ: BrokerOuterAPI, RouteInfoManager).

A name server drops a broker from its routes as soon as the broker's connection ends. So the process that serves clients holds
one connection to each: if it dies, clients leave it at once. It registers when it starts, every 30 s, and at once when topics,
their rights, the right to take puts or the term change. A name server that is away is asked again after a pause, and nothing
else waits for it.

A master is broker 0, a slave one above that. A master of which a higher term is known closes its connections: it does not
unregister, since a name server would then remove the new master, which has the same name and number. Where puts are refused,
topics have no right to be written, so producers go to other brokers. Docs: docs/gateway.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.engine_config import SLAVE, EngineConfig
from pyengine.errors import EngineError, os_error_sentence
from pyengine.events import Event, Report
from pyengine.formats.small_file import read_small_file
from pyengine.gateway import codes
from pyengine.gateway.connections import Connection, Connections, TurnExecutor
from pyengine.gateway.names import Address, Names, topics_document
from pyengine.gateway.tls import CA_BYTES_MAX
from pyengine.gateway.wire import WireError, write_json
from pyengine.ipc.control_block import EngineMemory, now_ms, write_name_servers
from pyengine.native import control as native
from pyengine.settings import split_address
from pyengine.storage.config_table import PERM_WRITE, NamedRows, TopicConfig

INTERVAL_S = 30.0           # between two registrations without a change; name servers forget a silent broker after 120 s
LIMIT_S = 6.0               # for a connection, and for an answer (RocketMQ: registerBrokerTimeoutMills)
ROUTES_LIMIT_S = 0.3        # for the routes, before the broker unregisters
UNREGISTER_LIMIT_S = 1.0    # an orderly stop waits no longer for name servers
CHECK_S = 0.1               # between two looks for changes
CHECK_SHARE = 5             # of the time without a look after a change, in times that it took: many topics take long
RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0
PUTS_REFUSED = native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE | native.REFUSE_LOST


@dataclass(frozen=True, slots=True)
class _Standing:
    """What is told beside the topics. `is_listed`: whether clients may find this broker at all."""

    is_listed: bool
    takes_puts: bool
    term: int


@dataclass(frozen=True, slots=True)
class _Offer:
    """A registration as it is sent."""

    fields: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _NameServer:
    """One name server, and how it stands with it."""

    address: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # the offer has, or the connection has ended
    connection: Connection | None = None
    is_registered: bool = False
    problem: str = "it was not asked yet"
    since_ms: int = field(default_factory=now_ms)

    def row(self) -> dict[str, Any]:
        return {"address": self.address, "registered": self.is_registered, "since_ms": self.since_ms, "problem": self.problem}


class Registration:
    """Keeps one broker registered. Used in the event loop."""

    FAILURE = "what name servers are to be told cannot be read"

    def __init__(self, config: EngineConfig, names: Names, address: Address, memory: EngineMemory, connections: Connections,
                 executor: TurnExecutor, report: Report) -> None:
        """`connections` are those of clients, whose limits and reports count for name servers too."""
        self._names = names
        self._memory = memory
        self._executor = executor
        self._report = report
        self._is_slave = config.broker_role == SLAVE
        self._ca_file = Path(names.root) / config.gateway_namesrv_ca_file if config.gateway_namesrv_ca_file else None
        self._identity = {"brokerName": address.broker_name, "brokerAddr": address.broker, "clusterName": address.cluster,
                          "brokerId": str((config.broker_id or 1) if self._is_slave else 0)}
        self._ha_address = f"{address.broker.rpartition(':')[0]}:{config.ha_port}"
        # Connections of their own: those of clients are closed when they are idle.
        self._connections = Connections(connections.limits, connections.report)
        self._connections.when_closed.append(self._ended)
        self._servers = [_NameServer(each) for each in config.name_servers]
        self._offer: _Offer | None = None
        self._offered: tuple[_Standing, NamedRows[TopicConfig]] | None = None
        self._next_check_s = 0.0
        self._is_leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to register; check() must be called every CHECK_S."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep(server)) for server in self._servers]
        self._publish()

    async def check(self) -> None:
        """Register again, with all name servers, if something has changed."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        standing, topics = self._standing(), self._names.file_of_topics()
        if self._offered is not None and self._offered[0] == standing and self._offered[1] is topics:
            return
        self._offer = await self._executor.run(self._make_offer, standing, topics) if standing.is_listed else None
        self._offered = standing, topics
        self._next_check_s = time.monotonic() + CHECK_SHARE * (time.monotonic() - now_s)
        for server in self._servers:
            server.changed.set()

    async def close(self) -> None:
        """Unregister, so that clients leave this broker before it ends. check() must not be called any more."""
        self._is_leaving = True
        leaving = []
        for server, task in zip(self._servers, self._tasks, strict=True):
            server.changed.set()
            if server.is_registered:
                leaving.append(task)
            else:
                task.cancel()
        if leaving:
            await asyncio.wait(leaving, timeout=UNREGISTER_LIMIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.close()

    # ---- what is told -------------------------------------------------------------

    def _standing(self) -> _Standing:
        control, noted = self._memory.control, self._names.replication_state()
        refused = native.load(control.state, "refuse_puts")
        is_frozen = native.load(control.state, "frozen") != 0 or self._memory.state == native.STATE_READ_ONLY
        is_fenced = not self._is_slave and (refused & native.REFUSE_FENCED or noted is not None and noted.is_fenced)
        return _Standing(not is_fenced, not (is_frozen or refused & PUTS_REFUSED), noted.term if noted is not None else 0)

    def _make_offer(self, standing: _Standing, topics: NamedRows[TopicConfig]) -> _Offer:
        """Return the registration of this broker. Runs in a thread, since it may be long.

        A name server takes topics only with another version than before, so one without rights to write has another.
        """
        version, mask = {**topics.data_version, "stateVersion": standing.term}, -1
        if not standing.takes_puts:
            version["timestamp"] += 1
            mask = ~PERM_WRITE
        body = write_json({"filterServerList": [], "topicConfigSerializeWrapper":
                           topics_document(self._names.with_system_topics(topics), version, mask)})
        return _Offer({**self._identity, "haServerAddr": self._ha_address, "compressed": "false",
                       "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF)}, body)

    # ---- one name server ----------------------------------------------------------

    async def _keep(self, server: _NameServer) -> None:
        """Keep the broker registered with one name server; after a failure try again, later each time."""
        pause_s = RETRY_MIN_S
        while not self._is_leaving:
            server.changed.clear()
            if self._offer is None:
                if self._offered is not None:
                    self._note(server, "a master of a higher term has taken this store's place, and clients must not find this one")
                await server.changed.wait()
                continue
            try:
                await self._stay(server)
            except TimeoutError:
                problem = f"it did not answer within {LIMIT_S:g} s"
            except (OSError, EngineError, WireError) as error:
                problem = os_error_sentence(error) if isinstance(error, OSError) else str(error)
            else:
                continue
            pause_s = RETRY_MIN_S if server.is_registered else min(2 * pause_s, RETRY_MAX_S)
            self._note(server, problem)
            await asyncio.sleep(pause_s)

    async def _stay(self, server: _NameServer) -> None:
        """Connect, and register until there is nothing to offer or the gateway ends; OSError if the connection ends or the name server
        refuses."""
        connection = server.connection = await self._connect(server.address)
        try:
            while (offer := self._offer) is not None and not self._is_leaving:
                server.changed.clear()
                answer = await connection.invoke(codes.REGISTER_BROKER, offer.fields, offer.body, LIMIT_S)
                if answer.code != codes.SUCCESS:
                    raise OSError(f"it refuses the registration: {answer.code} {answer.remark or ''}")
                self._note(server)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.changed.wait(), INTERVAL_S)
                if connection.is_closed:
                    raise OSError("it has ended the connection")
            if self._is_leaving and server.is_registered and not await self._is_replaced(connection):
                await connection.invoke(codes.UNREGISTER_BROKER, self._identity)
        finally:
            server.connection = None
            connection.close()

    async def _is_replaced(self, connection: Connection) -> bool:
        """Return whether another broker has this one's name and number there: name servers of 4.9 would unregister that one."""
        with contextlib.suppress(OSError):
            answer = await connection.invoke(codes.GET_BROKER_CLUSTER_INFO, {}, timeout_s=ROUTES_LIMIT_S)
            name, address = (write_json(self._identity[key]) for key in ("brokerName", "brokerAddr"))
            return answer.code == codes.SUCCESS and name in answer.body and address not in answer.body
        return False

    async def _connect(self, address: str) -> Connection:
        host, port = split_address(address)
        context = await self._executor.run(_trusting, self._ca_file) if self._ca_file else None
        async with asyncio.timeout(LIMIT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._connections, {}), host, port, ssl=context)
        return connection

    def _ended(self, connection: Connection) -> None:
        for server in self._servers:
            if server.connection is connection:
                server.changed.set()

    # ---- what is shown ------------------------------------------------------------

    def _note(self, server: _NameServer, problem: str = "") -> None:
        """Note, for the log and `pyengine status`, that the broker is registered, or the problem for which it is not."""
        is_registered = not problem
        if (is_registered, problem) == (server.is_registered, server.problem):
            return
        if is_registered != server.is_registered:
            server.since_ms = now_ms()
        server.is_registered, server.problem = is_registered, problem
        if is_registered:
            self._report(Event.NAME_SERVER_JOINED, f"registered with the name server {server.address} as {self._identity['brokerName']}, "
                         f"number {self._identity['brokerId']}, at {self._identity['brokerAddr']}")
        else:
            self._report(Event.NAME_SERVER_LOST, f"not registered with the name server {server.address}: {problem}")
        self._publish()

    def _publish(self) -> None:
        with contextlib.suppress(EngineError, OSError):  # then `status` shows what was written last
            write_name_servers(self._memory.folder, [server.row() for server in self._servers])


def _trusting(ca_file: Path) -> ssl.SSLContext:
    """Return what a TLS connection is made with to a server whose certificate is of one of the CAs in the file, and names its address."""
    try:
        context = ssl.create_default_context(cadata=read_small_file(ca_file, CA_BYTES_MAX).decode("ascii"))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
        raise EngineError(f"the certificates in {ca_file} cannot be used: {why} (gateway_namesrv_ca_file)") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
