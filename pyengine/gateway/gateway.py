"""The gateway as a whole: its parts, its ports, and its life in the worker's process.

One thread runs the event loop with all clients; a few threads do what may wait for a disk or takes long; one thread waits for
messages for all held pulls; the producer's thread takes the answers of puts. While the engine is killed, restarted or missing,
puts are answered with SERVICE_NOT_AVAILABLE, and reads use the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError, os_error_sentence
from pyengine.events import Event, HostLines, Report
from pyengine.gateway import codes
from pyengine.gateway.access import NAME_SERVER_CODES, AccessList, printable, without_list
from pyengine.gateway.admin import COUNT_S, Admin
from pyengine.gateway.connections import Answer, Connection, Connections, Handlers, Limits, TakeFirst, TurnExecutor
from pyengine.gateway.members import EXPIRE_S, Assignments, Members, Relays
from pyengine.gateway.names import Address, Names, NameServer, Routes
from pyengine.gateway.pop import Pops
from pyengine.gateway.pop_shares import TICK_S
from pyengine.gateway.positions import FLUSH_S, GroupOffsets, Positions
from pyengine.gateway.pulls import Pulls
from pyengine.gateway.registration import CHECK_S, TABLES_INTERVAL_S, ClusterRoutes, Registration
from pyengine.gateway.sends import NOT_AVAILABLE, NOT_RESUMED, REGION, Ends, Puts, Sends
from pyengine.gateway.tls import TlsHandler
from pyengine.ipc.control_block import EngineMemory, read_run_settings
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.sessions import bound_socket
from pyengine.ipc.shared_objects import GATEWAY_SOCKET, find_folder
from pyengine.results import PutStatus

if TYPE_CHECKING:
    from pyengine.client.producer import Producer
    from pyengine.engine.worker import Worker

THREADS = 8
RELOAD_INTERVAL_S = 1.0 # between two checks of the access list and the certificate
COUNT_LINES_S = 5.0     # between two looks for counts of lines that were left out
LIBRARIES = ("asyncio", "grpc")  # whose loggers clients can fill
VIP_DISTANCE = 2        # RocketMQ's clients may send to the broker's port minus two


class BoundedLog(logging.Handler):
    """Takes what a library would write into the log, of which clients can cause much; `say` gets a name for it, and the sentence."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say("asyncio", record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


class Server:
    """What the gateway and the gRPC worker's server share: limits, access list, certificate, lines about clients, and tasks."""

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig, executor: TurnExecutor, report: Report) -> None:
        self._config = config
        self._report = report
        self._executor = executor
        self._limits = Limits(
            config.gateway_frame_max_bytes, config.gateway_idle_timeout_ms / 1000, config.gateway_connections_max,
            config.gateway_connection_max_bytes, config.gateway_memory_max_bytes,
            config.gateway_address_connections_max or max(1, config.gateway_connections_max // 2))
        self._access = AccessList(root, config) if config.acl_enable else None
        self._tls = TlsHandler(root, config) if config.gateway_tls_mode != "disabled" else None
        self._lines = HostLines(report)
        self._log = BoundedLog(partial(self._tell, Event.CLIENT_FAILED))
        self._tasks: list[asyncio.Task[None]] = []

    def _tell(self, event: Event, host: str, sentence: str) -> None:
        """Report a sentence about a client, one of the few a minute that the log takes."""
        self._lines.report(host, event, f"client {host}: {printable(sentence, 500)}", time.monotonic_ns())

    async def _reload(self, watched: AccessList | TlsHandler) -> None:
        if sentence := await self._executor.run(watched.reload):
            self._report(Event.GATEWAY_ACCESS, sentence)

    def _begin(self, *work: Coroutine[None, None, None], watched: Iterable[AccessList | TlsHandler | None]) -> None:
        """Do this work, look for changes of what is watched, and take what libraries say, until _end_tasks()."""
        for name in LIBRARIES:
            logging.getLogger(name).addHandler(self._log)
            logging.getLogger(name).propagate = False
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in (
            *work, repeat(COUNT_LINES_S, lambda: self._lines.tick(time.monotonic_ns()), self._report, "lines cannot be counted"),
            *(repeat(RELOAD_INTERVAL_S, partial(self._reload, each), self._report, each.FAILURE) for each in watched if each is not None))]

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _leave_logs(self) -> None:
        for name in LIBRARIES:
            logging.getLogger(name).removeHandler(self._log)
            logging.getLogger(name).propagate = True


class Gateway(Server):
    """A broker on one store, and a name server unless it registers with others. All but the constructor is called in an event loop."""

    def __init__(self, reader: LiveStoreReader, config: EngineConfig, connect: Callable[[], Producer], *,
                 report: Report, blocked: Callable[[str], None], memory: EngineMemory) -> None:
        """`connect` opens a producer; `report` takes an event and its sentence for the log, `blocked` the blocked reason, "" without
        one. The caller closes the reader and `memory`."""
        super().__init__(reader.root, config, TurnExecutor(THREADS, "gateway", THREADS // 2), report)
        self._reader = reader
        self._memory = memory
        self._blocked = blocked
        self.connections = Connections(self._limits, partial(self._tell, Event.CLIENT_FAILED), self._tls)
        self._puts = Puts(connect)
        self._offsets = GroupOffsets(reader, self._executor)
        self.pulls: Pulls | None = None
        self.members: Members | None = None
        self.pops: Pops | None = None
        self._ends: Ends | None = None
        self._registration: Registration | None = None

    async def start(self) -> None:
        """Begin to listen and serve; OSError if a port or a certificate is not available."""
        config, reader, executor = self._config, self._reader, self._executor
        access, host = self._access, config.gateway_listen_host
        names = Names(reader.root, config, executor)
        broker: Handlers = {}
        worker: Handlers = {}  # of the gRPC worker, which no access list names

        def take_first(connection: Connection, data: bytearray, at: int) -> tuple[int, int]:
            # Not if another handler wraps that of the sends, since it must see every request.
            return sends.plain.take(connection, data, at) if broker.get(codes.SEND_MESSAGE_V2) == sends.send else (0, 0)

        name_server: Handlers = {}
        name_server_port, broker_port = await self._open_ports(broker, worker, name_server, take_first)
        address = Address.of(config, broker_port)
        members = self.members = Members(names, executor)
        positions = Positions(reader, names, self._offsets, executor)
        admin = Admin(reader, names, members, self._offsets, address, executor, self._use_settings)
        pulls = self.pulls = Pulls(reader, names, members, positions, executor, admin.counts.count_gets)
        ends = self._ends = Ends(self._puts, reader, members, address, None if access is None else access.topic_fault)
        sends = Sends(self._puts, reader, names, address, executor, ends.prepare, members.producer)
        self._offsets.is_fenced = lambda: names.is_fenced
        pops = self.pops = Pops(reader, names, self._offsets, pulls, sends.give_back, executor, partial(self.connections.report, "gateway"))
        async def read_queues(topic: str) -> dict[str, int] | None:
            if self._registration is not None:
                return await self._registration.read_queues(topic)
            row = names.topic(topic)
            return {} if row is None else {config.broker_name: row.read_queue_nums}

        assignments = Assignments(names, members, pops.shares.pops, read_queues)
        relays = Relays(reader, names, members, self._offsets, positions, address, executor)
        for part in (members, positions, pulls, pops, assignments, sends, ends, admin, relays):
            broker.update(part.handlers)
        worker.update(pops.worker_handlers)
        if names.is_of_slave:
            broker.update(refused_by_slave())
        name_server.update(self._name_server(names, address))
        if access is None:
            broker.update(without_list())
        else:
            with contextlib.suppress(EngineError):  # reported by the next reload(); until the list can be read every client is refused
                await self._reload(access)
            broker.update(access.handlers(address, executor, self._report))
            refusals = partial(self._tell, Event.CLIENT_REFUSED)
            broker.update({code: access.guard(handler, refusals) for code, handler in broker.items()})
            name_server.update({code: access.guard(name_server[code], refusals) for code in NAME_SERVER_CODES & name_server.keys()})
            self.connections.require = access.requirement(refusals)
        self.connections.when_closed.append(members.closed)
        members.when_left.append(pops.left)
        self._puts.start()
        pulls.arrivals.start()
        await self.connections.start()
        self._begin(
            *self._join(names, address),
            repeat(FLUSH_S, self._write_offsets, self._report, "the groups' offsets cannot be written, and wait"),
            repeat(COUNT_S, admin.counts.sample, self._report, "messages cannot be counted"),
            repeat(TICK_S, pops.tick, self._report, "messages whose time is over cannot be delivered again"),
            repeat(EXPIRE_S, members.expire, self._report, "clients that are silent cannot be left out"),
            *([] if names.is_of_slave else [repeat(ends.interval_s, ends.ask_for_ends, self._report, "transactions could not be checked")]),
            watched=(self._tls, access))
        own = f"name server at {host}:{name_server_port}" if name_server_port else "no name server of its own"
        self._report(Event.GATEWAY_LISTENS, f"{own}, broker {address.broker_name} at {host}:{broker_port}, "
                     f"known to clients as {address.broker}, TLS {config.gateway_tls_mode}, "
                     f"access list {'off' if access is None else 'on'}")

    async def _open_ports(self, broker: Handlers, worker: Handlers, name_server: Handlers, take_first: TakeFirst) -> tuple[int, int]:
        """Bind the ports; return those of name server (0 without one) and broker. OSError if one, or the certificate, is not available."""
        config, listen, host = self._config, self.connections.listen, self._config.gateway_listen_host
        name_port = 0
        try:
            if self._tls is not None:
                await self._reload(self._tls)
            broker_port = await listen(host, config.gateway_broker_port, broker, take_first)
            if config.gateway_broker_port > VIP_DISTANCE:
                await listen(host, config.gateway_broker_port - VIP_DISTANCE, broker, take_first)
            if config.gateway_namesrv_cluster or not config.name_servers:
                name_port = await listen(host, config.gateway_namesrv_port, name_server)
            listener = bound_socket(find_folder(self._reader.root).path, GATEWAY_SOCKET)
            await self.connections.listen_local(listener, worker, broker, take_first)
        except EngineError as error:
            raise OSError(errno.EINVAL, str(error)) from error
        except OSError as error:
            self.connections.give_back()
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                advice = "stop what listens there, or set gateway_listen_host, gateway_broker_port and gateway_namesrv_port"
                raise OSError(error.errno, f"{error.strerror}: {advice}") from error
            raise
        return name_port, broker_port

    def _name_server(self, names: Names, address: Address) -> Handlers:
        """Return the handlers of the name server: of this broker alone, or of all that register."""
        if not self._config.gateway_namesrv_cluster:
            return NameServer(names, Routes(names, address)).handlers
        cluster = ClusterRoutes(names, self._executor)
        self.connections.when_closed.append(cluster.closed)
        return NameServer(names, cluster).handlers | cluster.handlers

    def _join(self, names: Names, address: Address) -> list[Coroutine[None, None, None]]:
        """Begin to register with name servers, if there are any; return the work that goes on."""
        if not self._config.name_servers:
            return []
        joined = self._registration = Registration(
            self._config, names, address, self._memory, self.connections, self._executor, self._report)
        joined.start()
        work = [repeat(CHECK_S, joined.check, self._report, joined.FAILURE)]
        if joined.takes_tables:
            work += [repeat(TABLES_INTERVAL_S, joined.take_tables, self._report, "the master's topics, groups and offsets are not taken")]
        return work

    async def _use_settings(self) -> None:
        """Read and put with the engine's present settings from now on."""
        config = await self._executor.run(lambda: read_run_settings(find_folder(self._reader.root)))
        self._reader._use_settings(config)
        await self._puts.renew(self._executor)

    async def _write_offsets(self) -> None:
        try:
            await self._offsets.flush()
        except Exception as error:
            self._blocked(f"the groups' offsets cannot be written, and a stop loses those that wait: {_sentence(error)}")
            raise
        self._blocked("")

    async def close(self) -> None:
        """End in order: leave the routes, take no more requests, then write the committed offsets."""
        await self._end_tasks()
        if self._registration is not None:
            await self._registration.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._puts.close)  # its answers still go out
        await asyncio.sleep(0)
        await self.connections.close()
        if self.pulls is not None:
            await loop.run_in_executor(None, self.pulls.arrivals.close)
        try:
            await self._write_offsets()
        except Exception as error:  # noqa: BLE001 - the rest must be closed too
            self._report(Event.WORK_BLOCKED, f"the groups' last offsets could not be written: {_sentence(error)}")
        if self.pops is not None:
            await self.pops.close()
        self._executor.shutdown(wait=True, cancel_futures=True)  # of connections that are closed
        if self._ends is not None:
            self._ends.close()
        self._leave_logs()


def refused_by_slave() -> Handlers:
    """Return handlers that refuse what a slave's broker refuses, as it does: topics, groups and messages come from its master."""
    change = Answer(codes.SYSTEM_ERROR, "Can't modify topic or subscription group from slave broker, please execute it from master broker.")
    send = Answer(codes.SERVICE_NOT_AVAILABLE, NOT_AVAILABLE, REGION)
    refusals = {
        codes.UPDATE_AND_CREATE_TOPIC: change, codes.DELETE_TOPIC_IN_BROKER: change,
        codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: change, codes.DELETE_SUBSCRIPTIONGROUP: change,
        codes.SEND_MESSAGE: send, codes.SEND_MESSAGE_V2: send, codes.SEND_BATCH_MESSAGE: send,
        codes.CONSUMER_SEND_MSG_BACK: Answer(codes.SYSTEM_ERROR, PutStatus.SERVICE_NOT_AVAILABLE.name),
        codes.END_TRANSACTION: Answer(codes.SLAVE_NOT_AVAILABLE),
        codes.RECALL_MESSAGE: Answer(codes.SLAVE_NOT_AVAILABLE, "recall failed, this is a slave"),
        codes.RESUME_CHECK_HALF_MESSAGE: Answer(codes.SYSTEM_ERROR, NOT_RESUMED),
    }
    return {code: lambda request, answer=answer: answer for code, answer in refusals.items()}  # type: ignore[misc]


async def repeat(pause_s: float, step: Callable[[], Awaitable[None] | None], report: Report, failed: str) -> None:
    """Call `step` after each pause, without end; report what it raises after the text `failed`, once until that changes."""
    reported = ""
    while True:
        await asyncio.sleep(pause_s)
        try:
            if (coming := step()) is not None:
                await coming
            reported = ""
        except Exception as error:  # noqa: BLE001 - the next try may succeed
            if reported != _sentence(error):
                reported = _sentence(error)
                report(Event.WORK_BLOCKED, f"{failed}: {reported}")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else repr(error)


LISTEN_RETRY_S = 1.0
HEARTBEAT_INTERVAL_S = 0.25


async def serve(start: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[None]], attached: Worker) -> None:
    """Run a server, this gateway or that of gRPC, until its worker must stop. If a port or a certificate is not available: OSError at
    the worker's first start, so that `pyengine start` fails; later it tries again every second, and the worker is blocked."""
    loop, is_woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(is_woken.set)

    attached.on_signal = wake  # a stop need not wait for the next heartbeat
    must_listen = attached.incarnation == 1
    waiting = loop.create_task(_listen(start, must_listen, attached.set_blocked_reason))
    try:
        if must_listen:
            await waiting
        attached.ready()
        while not attached.stopping:
            attached.heartbeat()
            if waiting.done():
                waiting.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_woken.wait(), HEARTBEAT_INTERVAL_S)
    finally:
        if not waiting.done():
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        await close()


async def _listen(start: Callable[[], Awaitable[object]], must_listen: bool, blocked: Callable[[str], None]) -> None:
    while True:
        try:
            await start()
        except OSError as error:
            if must_listen:
                raise
            blocked(f"it cannot listen: {os_error_sentence(error)}")
            await asyncio.sleep(LISTEN_RETRY_S)
            continue
        blocked("")
        return
