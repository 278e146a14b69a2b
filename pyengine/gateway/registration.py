"""Brokers and name servers of a cluster, both sides: how this broker registers, and the routes of a name server that takes brokers.

RocketMQ: BrokerOuterAPI, RouteInfoManager.

A name server drops a broker from its routes as soon as the broker's connection ends. So the process that serves clients holds
one connection to each: if it dies, clients leave it at once. When it registers: docs/gateway.md.

A master is broker 0, a slave one above that. A master of which a higher term is known closes its connections: it does not
unregister, since a name server would then remove the new master, which has the same name and number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyengine.arguments import INT64_MAX
from pyengine.engine_config import SLAVE, EngineConfig
from pyengine.errors import EngineError, EngineUnavailableError, FormatError, UsageError, os_error_sentence
from pyengine.events import Event, Report
from pyengine.formats.constants import TOPIC_BYTES_MAX
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, read_small_file
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, AskingConnection, Connection, Connections, Handlers, Limits, Request, TurnExecutor
from pyengine.gateway.names import ORDERS_NAMESPACE, Address, Broker, Names, Routes, topic_fault, topics_document
from pyengine.gateway.tls import CA_BYTES_MAX
from pyengine.gateway.wire import Frame, WireError, as_object, read_json, read_object, write_json
from pyengine.ipc.control_block import EngineMemory, now_ms, write_rows
from pyengine.ipc.shared_objects import NAME_SERVERS
from pyengine.native import control as native
from pyengine.services.replication.ha_stream import TABLES, TableSink, look_up
from pyengine.settings import split_address
from pyengine.storage.config_table import PERM_READ, PERM_WRITE, QUEUE_NUMS_MAX, TOPICS_FORMAT, NamedRows, TopicConfig

INTERVAL_S = 30.0           # between two registrations without a change; name servers forget a silent broker after 120 s
LIMIT_S = 6.0               # for a connection, and for an answer (RocketMQ: registerBrokerTimeoutMills)
ROUTES_LIMIT_S = 0.3        # for the routes, before the broker unregisters
QUEUES_LIMIT_S = 2.0        # for the queues of a topic, for which a client waits
UNREGISTER_LIMIT_S = 1.0    # an orderly stop waits no longer for name servers
CHECK_S = 0.1               # between two looks for changes
CHECK_SHARE = 5             # of the time without a look after a change, in times that it took: many topics take long
RETRY_MIN_S, RETRY_MAX_S = 0.5, 10.0
SILENT_S = 120.0            # after which a name server forgets a broker
BROKERS_MAX = 256           # of which a name server knows, each address counted
TOPICS_MAX = 400_000        # of all of them
OBJECTS_MAX = TOPICS_MAX // 2        # in one registration: a quarter of the topics, and RocketMQ 5's attributes of each
VALUES_MAX = TOPICS_MAX // 4 * 10
ADDRESS_CHARS_MAX = 255
ASK_INTERVAL_S = 2.0        # between two questions of a slave where its master is, while it is not linked
TABLES_INTERVAL_S = 5.0     # between two questions of a slave for its master's tables
_TABLE_CODES = (codes.GET_ALL_TOPIC_CONFIG, codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, codes.GET_ALL_CONSUMER_OFFSET,
                codes.GET_ALL_DELAY_OFFSET)  # of the first TABLES, in their order
PUTS_REFUSED = native.REFUSE_DISK_FULL | native.REFUSE_UNWRITABLE | native.REFUSE_LOST


@dataclass(frozen=True, slots=True)
class _Standing:
    """What is told beside the topics. `is_listed`: whether clients may find this broker at all."""

    is_listed: bool
    takes_puts: bool
    term: int


Offer = tuple[Mapping[str, str], bytes]  # header and body of a registration


@dataclass(slots=True)
class _NameServer:
    address: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # the offer has, or the connection has ended
    connection: Connection | None = None
    is_registered: bool = False
    problem: str = "it was not asked yet"
    since_ms: int = field(default_factory=now_ms)
    master: str = ""  # the HA address of a slave's master, as it tells it
    is_to_tell: bool = False  # it is asked for that, by a registration without topics: there may be many

    def row(self) -> dict[str, Any]:
        return {"address": self.address, "registered": self.is_registered, "since_ms": self.since_ms, "problem": self.problem,
                "master": self.master}


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
        self._learns_master = config.learns_master
        self._ca_file = _ca_file(names.root, config)
        self._identity = _identity(config, address)
        self._ha_address = f"{address.broker.rpartition(':')[0]}:{config.ha_port}"
        # Connections of their own: those of clients are closed when they are idle.
        self._connections = Connections(connections.limits, connections.report)
        self._connections.when_closed.append(self._ended)
        self._servers = [_NameServer(each) for each in config.name_servers]
        self._question = _offer(self._identity, "", topics_document({}, {"counter": 0}))
        self._offer: Offer | None = None
        self._offered: tuple[_Standing, NamedRows[TopicConfig]] | None = None
        self._next_check_s = self._next_ask_s = 0.0
        self._is_leaving = False
        self.takes_tables = self._is_slave and not config.ha_secret_file  # with a secret the link to the master has them
        self._master = ""                  # its address for clients, from name servers
        self._taken: dict[int, bytes] = {}  # its tables that were taken, by request code
        self._delays = TableSink(names.root, native.loader(memory.control.flushed, "value"), report)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to register; check() must be called every CHECK_S."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep(server)) for server in self._servers]
        self._publish()

    async def check(self) -> None:
        """Register again, with all name servers, if something has changed, or to hear of a master that is not linked."""
        now_s = time.monotonic()
        if self._learns_master and now_s >= self._next_ask_s and not native.load(self._memory.control.replicator, "linked"):
            self._next_ask_s = now_s + ASK_INTERVAL_S
            for server in self._servers:
                server.is_to_tell = True
                server.changed.set()
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

    async def read_queues(self, topic: str) -> dict[str, int] | None:
        """Return how many queues of a topic each broker of the cluster has for readers; None if no name server answers, or only with
        more queues than there can be."""
        for server in self._servers:
            if server.connection is not None:
                with contextlib.suppress(OSError, FormatError, *PARSE_ERRORS):
                    answer = await server.connection.invoke(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}, timeout_s=QUEUES_LIMIT_S)
                    route: Any = decode_config(answer.body.decode()) if answer.code == codes.SUCCESS else {"queueDatas": []}
                    found = {str(row["brokerName"]): max(0, int(row["readQueueNums"])) for row in route["queueDatas"]
                             if row["perm"] & PERM_READ}
                    if sum(found.values()) <= QUEUE_NUMS_MAX:
                        return found
        return None

    async def close(self) -> None:
        """Unregister, so that clients leave this broker before it ends. check() must not be called any more."""
        self._is_leaving = True
        for server in self._servers:
            server.changed.set()
        if leaving := [task for server, task in zip(self._servers, self._tasks, strict=True) if server.is_registered]:
            await asyncio.wait(leaving, timeout=UNREGISTER_LIMIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.close()

    async def take_tables(self) -> None:
        """Write topics, groups and offsets of a master that cannot prove a secret here, as RocketMQ's SlaveSynchronize does; OSError or
        EngineError if the master does not give them.

        Delay offsets wait for the log of that moment, with the delivered records, which comes over another connection.
        """
        try:
            if self._master:
                await self._ask_tables()
        finally:
            await self._executor.run(self._delays.apply)

    async def _ask_tables(self) -> None:
        connection, faults = await _connect(self._connections, self._executor, self._master, None), []
        try:
            for kind, (code, (name, write)) in enumerate(zip(_TABLE_CODES, TABLES[:len(_TABLE_CODES)], strict=True)):
                answer = await connection.invoke(code, {}, timeout_s=LIMIT_S)
                if answer.code != codes.SUCCESS:  # for example without an access key
                    faults.append(f"{name} is refused by {self._master}: {answer.code} {answer.remark or ''}")
                elif answer.body and answer.body != self._taken.get(code):
                    try:
                        if code == codes.GET_ALL_DELAY_OFFSET:
                            info = await connection.invoke(codes.GET_BROKER_RUNTIME_INFO, {}, timeout_s=LIMIT_S)
                            self._delays.take(kind, answer.body, _log_end(info))
                        else:
                            await self._executor.run(write, self._names.root, answer.body)
                        self._taken[code] = answer.body
                    except (FormatError, UnicodeDecodeError) as error:
                        faults.append(f"{name} of {self._master} cannot be used: {error}")
        finally:
            connection.abort()
        if faults:
            raise EngineError("; ".join(faults))

    # ---- what is told -------------------------------------------------------------

    def _standing(self) -> _Standing:
        control, noted = self._memory.control, self._names.replication_state()
        refused = native.load(control.state, "refuse_puts")
        is_frozen = native.load(control.state, "frozen") != 0 or self._memory.state == native.STATE_READ_ONLY
        is_fenced = self._names.is_fenced or refused & native.REFUSE_FENCED and not self._is_slave
        return _Standing(not is_fenced, not (is_frozen or refused & PUTS_REFUSED), noted.term if noted is not None else 0)

    def _make_offer(self, standing: _Standing, topics: NamedRows[TopicConfig]) -> Offer:
        """Return the registration of this broker, in a thread. A name server takes topics only with another version than before, so one
        without rights to write has another."""
        version, mask = {**topics.data_version, "stateVersion": standing.term}, -1
        if not standing.takes_puts:
            version["timestamp"] += 1
            mask = ~PERM_WRITE
        return _offer(self._identity, self._ha_address, topics_document(self._names.with_system_topics(topics), version, mask))

    # ---- one name server ----------------------------------------------------------

    async def _keep(self, server: _NameServer) -> None:
        """Keep the broker registered with one name server; after a failure try again, later each time."""
        pause_s = RETRY_MIN_S
        while not self._is_leaving:
            server.changed.clear()
            if self._offer is None:
                if self._offered is not None:
                    self._note(server, "a master of a higher term has taken this store's place, or one of the same term goes on: "
                                       "clients must not find this one")
                await server.changed.wait()
                continue
            try:
                await self._stay(server)
            except (OSError, EngineError, WireError) as error:
                pause_s = RETRY_MIN_S if server.is_registered else min(2 * pause_s, RETRY_MAX_S)
                self._note(server, _sentence(error))
            else:
                continue
            await asyncio.sleep(pause_s)

    async def _stay(self, server: _NameServer) -> None:
        """Register until there is nothing to offer or the gateway ends; OSError if the connection ends or the name server refuses."""
        connection = server.connection = await _connect(self._connections, self._executor, server.address, self._ca_file)
        sent: Offer | None = None
        try:
            while (offer := self._offer) is not None and not self._is_leaving:
                server.changed.clear()
                answer = await _register(connection, self._question if server.is_to_tell and sent is offer else offer)
                sent, server.is_to_tell = offer, False
                self._master = answer.fields.get("masterAddr", self._master)
                if (told := _told_master(answer)) not in ("", server.master):
                    server.master = told
                    self._publish()
                self._note(server)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.changed.wait(), INTERVAL_S)
                if connection.is_closed:
                    raise OSError("it has ended the connection")
            if self._is_leaving and server.is_registered and not await self._is_replaced(connection):
                await connection.invoke(codes.UNREGISTER_BROKER, self._identity)
        finally:
            server.connection = None
            connection.abort()

    async def _is_replaced(self, connection: Connection) -> bool:
        """Return whether another broker has this one's name and number there: name servers of 4.9 would unregister that one."""
        with contextlib.suppress(OSError):
            answer = await connection.invoke(codes.GET_BROKER_CLUSTER_INFO, {}, timeout_s=ROUTES_LIMIT_S)
            name, address = (write_json(self._identity[key]) for key in ("brokerName", "brokerAddr"))
            return answer.code == codes.SUCCESS and name in answer.body and address not in answer.body
        return False

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
            write_rows(self._memory.folder, NAME_SERVERS, [server.row() for server in self._servers])


def _identity(config: EngineConfig, address: Address) -> dict[str, str]:
    return {"brokerName": address.broker_name, "brokerAddr": address.broker, "clusterName": address.cluster,
            "brokerId": str(config.number_in_routes)}


def _offer(identity: Mapping[str, str], ha_address: str, topics: Mapping[str, object]) -> Offer:
    body = write_json({"filterServerList": [], "topicConfigSerializeWrapper": topics})
    return {**identity, "haServerAddr": ha_address, "compressed": "false", "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF)}, body


def _ca_file(root: str | os.PathLike[str], config: EngineConfig) -> Path | None:
    return Path(root) / config.gateway_namesrv_ca_file if config.gateway_namesrv_ca_file else None


async def _register(connection: Connection, offer: Offer) -> Frame:
    answer = await connection.invoke(codes.REGISTER_BROKER, *offer, LIMIT_S)
    if answer.code != codes.SUCCESS:
        raise OSError(f"it refuses the registration: {answer.code} {answer.remark or ''}")
    return answer


def _told_master(answer: Frame) -> str:
    """Return the HA address of a slave's master in the answer to its registration; "" if there is none, or it takes no slaves."""
    address = answer.fields.get("haServerAddr", "")
    return address if _has_port(address) else ""


def _has_port(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return len(address) <= ADDRESS_CHARS_MAX and split_address(address)[1] > 0
    return False


def find_master(root: Path, config: EngineConfig) -> str:
    """Return the HA address of a slave's master, for its start, by the first name server that knows it; EngineUnavailableError if
    none does. They tell it to brokers that register, so this one does, and leaves at once."""
    return asyncio.run(_find_master(root, config))


async def _find_master(root: Path, config: EngineConfig) -> str:
    connections, executor = Connections(Limits(), lambda host, text: None), TurnExecutor(1, "find-master")
    identity, faults = _identity(config, Address.of(config, config.gateway_broker_port or 1)), []
    try:
        for server in config.name_servers:
            try:
                connection = await _connect(connections, executor, server, _ca_file(root, config))
                try:
                    if told := _told_master(await _register(connection, _offer(identity, "", topics_document({}, {"counter": 0})))):
                        return told
                finally:
                    connection.abort()
                faults.append(f"{server} knows no master of {config.broker_name} that takes slaves")
            except (OSError, EngineError, WireError) as error:
                faults.append(f"{server}: {_sentence(error)}")
    finally:
        await connections.close()
        executor.shutdown()
    raise EngineUnavailableError(f"no name server tells where its master is ({'; '.join(faults)}): start it, or set ha_master_address")


def _sentence(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer within {LIMIT_S:g} s"
    return os_error_sentence(error) if isinstance(error, OSError) else str(error)


async def _connect(connections: Connections, executor: TurnExecutor, address: str, ca_file: Path | None) -> Connection:
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise EngineError(str(error)) from None
    context = await executor.run(_trusting, ca_file) if ca_file else None
    problem = OSError(f"{host} has no address")
    async with asyncio.timeout(LIMIT_S):
        try:
            addresses = await asyncio.wrap_future(look_up(host, port))
        except UnicodeError as error:
            raise EngineError(f"{host} cannot be the name of a host: {error}") from None
        for found in addresses:
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: AskingConnection(connections), *found, ssl=context, server_hostname=host if context else None)
            except OSError as error:
                problem = error
            else:
                return connection
    raise problem


def _trusting(ca_file: Path) -> ssl.SSLContext:
    """Return what a TLS connection is made with to a server whose certificate is of one of the CAs in the file, and names its address."""
    try:
        context = ssl.create_default_context(cadata=read_small_file(ca_file, CA_BYTES_MAX).decode("ascii"))
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
        raise EngineError(f"the certificates in {ca_file} cannot be used: {why} (gateway_namesrv_ca_file)") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


# ---- the other side: a name server that takes registrations -------------------------------


@dataclass(slots=True)
class _Registered(Broker):
    """The brokers of one name, and the topics that their master has registered."""

    topics: dict[str, TopicConfig] = field(default_factory=dict)


@dataclass(slots=True)
class _Live:
    """One registered broker process: it is in the routes while its connection is open."""

    connection: Connection
    name: str
    number: int
    version: dict[str, int]
    ha_address: str


class ClusterRoutes(Routes):
    """The routes of all brokers that have registered with this name server (RocketMQ: RouteInfoManager). Used in the event loop.

    A broker is forgotten when its connection ends, or is silent for SILENT_S. The last one that registers under a name and number has
    it, unless its term is lower. One host may have a quarter of the room, and cannot take an address of another one's broker.
    """

    def __init__(self, names: Names, executor: TurnExecutor) -> None:
        self._names = names
        self._executor = executor
        self.brokers: dict[str, _Registered] = {}
        self._live: dict[str, _Live] = {}  # by address
        self._lists: dict[str, bytes] = {}
        self.handlers: Handlers = {
            codes.REGISTER_BROKER: self.register, codes.UNREGISTER_BROKER: self.unregister, codes.QUERY_DATA_VERSION: self.query_version}

    # ---- Routes -------------------------------------------------------------------

    def rows_of(self, topic: str) -> Mapping[str, TopicConfig]:
        return {name: broker.topics[topic] for name, broker in self.brokers.items() if topic in broker.topics}

    def topic_count(self, broker: str) -> int:
        return len(self.brokers[broker].topics)

    def of_topics(self, name: str, make: Callable[[Mapping[str, TopicConfig]], bytes]) -> bytes:
        if name not in self._lists:
            topics: dict[str, TopicConfig] = {}
            for broker in reversed(self.brokers.values()):  # the first one's row is told
                topics.update(broker.topics)
            self._lists[name] = make(topics)
        return self._lists[name]

    def drop_topic(self, topic: str) -> None:
        for broker in self.brokers.values():
            broker.topics.pop(topic, None)
        self._lists.clear()

    # ---- requests of brokers ------------------------------------------------------

    async def register(self, request: Request) -> Answer:
        """Take a registration; the answer has the order of topics and, for a slave, its master's addresses."""
        body = request.frame.body
        identity = _identity_of(request)
        if request.flag("compressed"):
            raise WireError("compressed registrations are not taken: set compressedRegister=false")
        if (crc := request.integer("bodyCrc32", 0)) and crc != zlib.crc32(body) & 0x7FFFFFFF:
            return Answer(codes.SYSTEM_ERROR, "crc32 not match")
        async with request.connection.in_order:
            version, topics = await self._executor.run(_decode_registration, body)
            if request.connection.is_closed:  # meanwhile: connection_lost() has no more to forget
                return Answer(codes.SYSTEM_ERROR, "the connection has ended")
            if why := self._refusal(request.connection, identity, topics):
                return Answer(codes.SYSTEM_ERROR, why)
            self._take(request, identity, version, topics)
        answer = Answer()
        orders = self._names.key_values.table().get(ORDERS_NAMESPACE)
        if orders:
            answer.body = write_json({"table": orders})
        master = self.brokers[identity.name].addresses.get(0) if identity.name in self.brokers else None
        if identity.number != 0 and master is not None:
            answer.fields = {"masterAddr": master, "haServerAddr": self._live[master].ha_address if master in self._live else ""}
        return answer

    def unregister(self, request: Request) -> Answer:
        identity = _identity_of(request)
        live = self._live.get(identity.address)
        if live is not None and live.connection.host == request.connection.host:
            self._forget(identity.address)
        return Answer()

    def query_version(self, request: Request) -> Answer:
        live = self._live.get(_identity_of(request).address)
        if live is None:
            return Answer(fields={"changed": "true"})
        asked = read_object(request.frame.body)
        is_changed = any(asked.get(name, 0) != number for name, number in live.version.items())
        return Answer(fields={"changed": str(is_changed).lower()}, body=write_json(live.version))

    def closed(self, connection: Connection) -> None:
        for address in [address for address, live in self._live.items() if live.connection is connection]:
            self._forget(address)

    def _refusal(self, connection: Connection, identity: _Identity, topics: Mapping[str, TopicConfig]) -> str:
        live = self._live.get(identity.address)
        if live is not None and not live.connection.is_closed and live.connection.host != connection.host:
            return f"{identity.address} is registered from another host, {live.connection.host}"
        others = [each for address, each in self._live.items() if address != identity.address]
        of_host = [each for each in others if each.connection.host == connection.host]
        if len(others) >= BROKERS_MAX or len(of_host) >= BROKERS_MAX // 4:
            return f"there are {len(others)} brokers already, {len(of_host)} of them of {connection.host}"
        known = self.brokers.get(identity.name)
        coming = len(topics) if len(topics) != 1 or known is None else len(known.topics) + sum(each not in known.topics for each in topics)
        rows = sum(len(broker.topics) for name, broker in self.brokers.items() if name != identity.name)
        names_of_host = {each.name for each in of_host} - {identity.name}
        rows_of_host = sum(len(self.brokers[name].topics) for name in names_of_host if name in self.brokers)
        if rows + coming > TOPICS_MAX or rows_of_host + coming > TOPICS_MAX // 4:
            return f"{coming} topics are too many: there are {rows} of other brokers, {rows_of_host} of them of {connection.host}"
        return ""

    def _take(self, request: Request, identity: _Identity, version: dict[str, int], topics: dict[str, TopicConfig]) -> None:
        broker = self.brokers.get(identity.name)
        holder = broker.addresses.get(identity.number) if broker is not None else None
        if holder not in (None, identity.address) and (held := self._live.get(holder or "")) is not None \
                and held.version["stateVersion"] > version["stateVersion"]:
            self._forget(identity.address)  # an old master, which RocketMQ 5 answers in the same way: it is in no route
            return
        live = self._live.get(identity.address)
        if live is not None and (live.name, live.number) != (identity.name, identity.number):
            self._forget(identity.address)
            live, broker = None, self.brokers.get(identity.name)
        if broker is None:
            broker = self.brokers[identity.name] = _Registered(identity.cluster, {})
        if identity.number == 0:
            broker.cluster = identity.cluster
        broker.addresses[identity.number] = identity.address
        self._live[identity.address] = _Live(request.connection, identity.name, identity.number, version,
                                             request.frame.fields.get("haServerAddr", ""))
        request.connection.idle_s = SILENT_S
        is_changed = live is None or live.version != version
        if identity.number == 0 and (is_changed or holder != identity.address):
            is_one_change = len(topics) == 1  # brokers register a single topic when it alone has changed
            broker.topics = broker.topics | topics if is_one_change else topics
            broker.may_write = True
            self._lists.clear()

    def _forget(self, address: str) -> None:
        """Take a broker out of the routes, with its topics if it is the last one of its name."""
        live = self._live.pop(address, None)
        broker = self.brokers.get(live.name) if live is not None else None
        if live is None or broker is None:
            return
        if broker.addresses.get(live.number) == address:
            del broker.addresses[live.number]
        if not broker.addresses:
            del self.brokers[live.name]
            self._lists.clear()


@dataclass(frozen=True, slots=True)
class _Identity:
    name: str
    address: str
    cluster: str
    number: int


def _identity_of(request: Request) -> _Identity:
    """Return who registers; WireError for names and addresses that no broker has."""
    name, cluster, address = request.text("brokerName"), request.text("clusterName"), request.text("brokerAddr")
    number = request.integer("brokerId", bits=64)
    if topic_fault(name) or topic_fault(cluster):
        raise WireError(f"a broker's name and cluster have letters, digits, _, - and at most {TOPIC_BYTES_MAX} characters")
    if not _has_port(address) or number < 0:
        raise WireError("a broker has an address, host:port, and a number from 0 on")
    return _Identity(name, address, cluster, number)


def _log_end(info: Frame) -> int:
    """Return the end of a broker's log from the figures that it tells; FormatError without one."""
    try:
        figures: Any = decode_config(info.body.decode())
        return int(figures["table"]["commitLogMaxOffset"])
    except PARSE_ERRORS as error:
        raise FormatError(f"its log's end is unknown: {info.code} {info.remark or repr(error)}") from error


def _decode_registration(body: bytes) -> tuple[dict[str, int], dict[str, TopicConfig]]:
    """Return version and topics of a registration, without topics that no client could use; WireError for another structure."""
    # Counted first: a decoder that makes millions of values has no turn for the event loop, and fills the memory.
    if body.count(b"{") + body.count(b"[") > OBJECTS_MAX or body.count(b",") > VALUES_MAX:
        raise WireError(f"a registration of more than {OBJECTS_MAX:,} objects or {VALUES_MAX:,} values")
    wrapper = as_object(as_object(read_json(body, len(body))).get("topicConfigSerializeWrapper"))
    table, told = as_object(wrapper.get("topicConfigTable")), as_object(wrapper.get("dataVersion"))
    version = {name: told.get(name, 0) for name in ("counter", "stateVersion", "timestamp")}
    if any(type(number) is not int or abs(number) > INT64_MAX for number in version.values()):
        raise WireError("a dataVersion of other than three numbers")
    topics = {}
    for name, fields in table.items():
        if isinstance(fields, dict) and not topic_fault(name):
            with contextlib.suppress(UsageError, *PARSE_ERRORS):
                topics[name] = replace(TOPICS_FORMAT.row_of(name, fields), topic_filter_type="SINGLE_TAG", more={}).check()
    return version, topics
