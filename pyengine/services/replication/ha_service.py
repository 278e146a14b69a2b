"""HAService of a master: accepts slaves, sends them the log as it grows, and receives their reports.

RocketMQ has a writer and a reader thread for each connection; here two threads serve all connections, under one lock:

    the worker's   sleeps on the latch that the writer posts; `work` sends committed bytes
    "slaves"       sleeps in epoll; takes connections and reports, continues when a full socket is writable

so that no record and no acknowledgement is passed between threads. Both run in C for the common work (csrc/ha_links.cdef.h), and
return to Python for everything else. `confirm` is the offset that min_in_sync_replicas connected slaves have reported (without each
slave's first report, which only sets its position); it never decreases. If that number is two or more, only the best link of each
slave counts: otherwise a slave that reconnects before its old link is detected as dead would count twice. A slave is identified by
its proven store UUID, or by its address.

If the port cannot be opened, the first replicator of an engine ends, and the start fails. Later ones, and a listener without a free
descriptor, try again every second and report it (`blocked_reason`); until then puts follow the rules for missing slaves.

A failure of either thread ends the worker: its successor listens again, and slaves reconnect and report their offsets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable

from pyengine.errors import EngineError, EngineUnavailableError
from pyengine.events import Event, HostLines
from pyengine.formats.ha_wire import Introduction
from pyengine.ipc.replication import Replication
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.native.replication import LINKS_MAX, HALinks
from pyengine.native.waiting import Latch
from pyengine.services.replication.ha_connection import EndTimes, HAConnection, TransferSource
from pyengine.services.replication.ha_handshake import MasterHandshake, PlainPeers, Secret
from pyengine.services.replication.ha_join import call_peer
from pyengine.services.replication.ha_notes import ReplicationNotes
from pyengine.services.replication.ha_stream import TableSource
from pyengine.services.service import Service, ServiceContext
from pyengine.settings import join_address
from pyengine.storage.replication_state import second_master_sentence

PAUSE_S = 0.5
PEER_PAUSE_S = 1.0
TICK_S_MAX = 1.0
BACKLOG = 64
DRAIN_POLL_INTERVAL_S = 0.005
RETRY_NS = 1_000_000_000   # of listening, and of accepting slaves without free descriptors
FORGET_NS = 1_000_000_000  # how often the descriptors of deleted segments are closed
_GONE_ALREADY = (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPROTO)  # of accept(): the peer has closed it
_WATCHED = select.EPOLLIN | select.EPOLLRDHUP
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


def count_slaves(links: Iterable[tuple[str, int]], *, by_host: bool) -> list[int]:
    """Return what each slave has, from (host, reported) of every link: with `by_host` the best of each host."""
    if not by_host:
        return [reported for _, reported in links]
    best: dict[str, int] = {}
    for host, reported in links:
        best[host] = max(reported, best.get(host, reported))
    return list(best.values())


class HAService(Service):
    """The replicator of a master."""

    KIND = native.REPLICATOR

    def __init__(self, context: ServiceContext, replication: Replication, *, port: int | None = None, must_listen: bool = True,
                 clock_ns: Callable[[], int] = monotonic_ns) -> None:
        """Listen at the configured port, or at `port` (0: any free one); serve after start().

        If the address is not available: EngineUnavailableError with `must_listen`, otherwise try again every second.
        """
        super().__init__(context)
        memory, config = context.memory, context.config
        self._lines = HostLines(context.report)
        self._clock_ns = clock_ns
        self._secret = Secret(context.store.root, config)
        self._plain_peers = PlainPeers(config)
        if not self._secret.is_set and not self._plain_peers:
            context.report(Event.SLAVE_REFUSED, "no slave can follow: set ha_secret_file here and there, or name RocketMQ's slaves in "
                                                "ha_allow_plain")
        self._config = config
        self._peers = config.ha_peer_list
        self._ends = threading.Event()
        self._equals: set[bytes] = set()  # reported masters of the same term
        self._callers = threading.Thread(target=self._call_peers, name="peers", daemon=True) if self._peers else None
        self._connections_max = min(config.ha_connections_max, LINKS_MAX)
        self._drain_ns = config.slave_timeout_ms * 1_000_000
        self._drain_until_ns = 0
        self._source = TransferSource(memory, context.store)
        self._end_times = EndTimes()
        self._tables = TableSource(context.store, native.loader(memory.control.wrote, "value"),
                                   native.loader(memory.control.reput_from, "value"), context.report)
        self._by_descriptor: dict[int, HAConnection] = {}
        self._failure: BaseException | None = None
        self._host = config.ha_listen_host
        self.port = config.ha_port if port is None else port
        self._listener: socket.socket | None = None
        self._takes = False       # whether epoll watches the listener
        self._take_ns = 0         # when to try again if it does not
        self._forget_ns = 0
        self._epoll = select.epoll()
        self._replicas = max(1, memory.identity.min_in_sync_replicas)
        self._by_host = self._replicas > 1 and not config.ha_slaves_share_hosts
        self._links = HALinks(
            self._control, memory.latch(native.REPLICATOR), memory.latch(native.REPUTTER) if memory.identity.dispatch_at else None,
            batch_bytes=config.ha_transfer_batch_size_bytes, epoll_fd=self._epoll.fileno(), recorder=self._recorder)
        self._segment = -1        # the descriptor that C reads; the source has its own
        try:
            if self.port or port is not None:
                self._listen()
            else:
                self._takes = True  # a master without slaves, that has peers
        except EngineUnavailableError as error:
            if must_listen:
                self._epoll.close()
                raise
            self._retry_later(str(error), clock_ns())
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._waker, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="slaves", daemon=True)
        self._replication = replication
        self._notes = ReplicationNotes(context, self._tables.read_queue_ends)
        self._reasons.append(self._notes.blocked)
        self._replication.listening(self.port if self._listener else 0)
        self._publish_connected()

    def start(self) -> None:
        """Start to serve slaves."""
        self._notes.note()
        self._notes.start()
        self._thread.start()
        if self._callers is not None:
            self._callers.start()

    # ---- the worker's thread ----------------------------------------------------

    def work(self) -> bool:
        """Send committed bytes to every slave that takes them; return True if there is more to send."""
        if self._failure is not None:
            raise self._failure
        return self._links.send() and self._send_rest()

    def wait(self, latch: Latch, timeout_s: float) -> bool:
        """Sleep, and send bytes that are committed meanwhile."""
        if not self._links.send(monotonic_ns() + int(timeout_s * 1e9), may_sleep=True):
            return False
        self._send_rest()
        return True

    def _send_rest(self) -> bool:
        """Send what C does not; return True if there is more."""
        more = False
        with self._links:
            end = self._source.end()
            if self._by_descriptor:
                now_ns = self._clock_ns()
                for connection in list(self._by_descriptor.values()):
                    if not connection.blocked:
                        more = self._transfer(connection, end, now_ns) or more
                self._open_segment(end)
            if more:
                self._links.resume_sending()
            else:
                self._links.sent(end)
        return more

    def _open_segment(self, end: int) -> None:
        """Let C read the segment with the byte before `end`, the log's last one, which the cleaner does not delete."""
        base = max(0, end - 1) - max(0, end - 1) % self._segment_bytes
        if base == self._links.segment_base:
            return
        self._close_segment()
        with contextlib.suppress(OSError):  # then C returns for each frame
            self._segment = os.open(self._store.commit_log_segment(base), os.O_RDONLY | os.O_CLOEXEC)
            self._links.use_segment(base, self._segment)

    def _close_segment(self) -> None:
        self._links.use_segment(-1, -1)
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1

    def _resume_sending(self) -> None:
        """Wake the worker's thread, from the slaves' thread under the lock, for a slave that takes bytes again."""
        self._links.resume_sending()
        self._memory.wake(native.REPLICATOR)

    def pause_s(self) -> float:
        return PAUSE_S

    def drain(self) -> bool:
        """Wait until the slaves have acknowledged the whole log and have the last tables, for slave_timeout_ms at most: neither grows."""
        now_ns = self._clock_ns()
        if not self._drain_until_ns:
            self._drain_until_ns = now_ns + self._drain_ns
            self._tables.reload()
            self._tables.read_queue_ends()
        if now_ns >= self._drain_until_ns:
            return False
        self.work()
        with self._links:
            end = self._source.end()
            self._send_tables(now_ns)
            waits = any(connection.positioned and (connection.reported < end or not connection.is_all_sent)
                        for connection in self._by_descriptor.values())
        if waits:
            self._memory.latch(native.REPLICATOR).wait(DRAIN_POLL_INTERVAL_S)
        return waits

    def close(self) -> None:
        self._ends.set()
        os.eventfd_write(self._waker, 1)
        if self._thread.ident is not None:
            self._thread.join()
        if self._callers is not None and self._callers.ident is not None:
            self._callers.join()
        for connection in list(self._by_descriptor.values()):
            self._drop(connection)
        self._replication.listening(0)
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        os.close(self._waker)
        self._close_segment()
        self._notes.close()
        self._replication.close()

    # ---- the slaves' thread -----------------------------------------------------

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the worker's
        waiting.schedule(waiting.INTERACTIVE)  # a put waits for the report that this thread reads
        try:
            while not self._ends.is_set():
                self.turn(self._wait_s())
        except BaseException as error:  # noqa: BLE001 - the worker raises it
            self._failure = error
            self._memory.wake(native.REPLICATOR)

    def _wait_s(self) -> float:
        with self._links:
            due_ns = [connection.due_ns() for connection in self._by_descriptor.values()]
        if not due_ns:
            return TICK_S_MAX
        return min(TICK_S_MAX, max(0.0, (min(due_ns) - self._clock_ns()) / 1e9))

    def turn(self, wait_s: float = 0.0) -> None:
        """Wait for slaves and serve them; run timers."""
        if not self._takes and self._clock_ns() >= self._take_ns:
            self._listen_again()
        if self._clock_ns is not monotonic_ns:
            self._links.use_clock(self._clock_ns())
        events = self._links.listen(monotonic_ns() + int(wait_s * 1e9))
        if self._clock_ns() >= self._forget_ns:
            self._tables.reload()  # before the lock: it reads files
        with self._links:
            now_ns = self._clock_ns()
            for descriptor, event in events:
                if descriptor == self._waker:
                    os.eventfd_read(self._waker)
                elif self._listener is not None and descriptor == self._listener.fileno():
                    self._accept(self._listener, now_ns)
                elif (connection := self._by_descriptor.get(descriptor)) is not None:
                    self._on_event(connection, event, now_ns)
            for connection in list(self._by_descriptor.values()):
                if now_ns >= connection.due_ns():
                    was_blocked = connection.blocked
                    connection.tick(now_ns)
                    self._after_event(connection, was_blocked)
            if now_ns >= self._forget_ns:
                self._forget_ns = now_ns + FORGET_NS
                self._send_tables(now_ns)
                self._end_times.note(now_ns, self._source.end())
                for connection in self._by_descriptor.values():
                    connection.note_lag(self._end_times)
                self._lines.tick(now_ns)

    def _send_tables(self, now_ns: int) -> None:
        for connection in list(self._by_descriptor.values()):
            was_blocked = connection.blocked
            connection.send_tables(self._tables.tables, now_ns)
            self._after_event(connection, was_blocked)

    def _on_event(self, connection: HAConnection, event: int, now_ns: int) -> None:
        if event & _READABLE:
            was_positioned, acked = connection.positioned, connection.acked
            was_known = connection.peer is not None
            connection.on_readable(now_ns)
            if not was_known and connection.peer is not None:
                self._check_peer(connection, connection.peer)
            if connection.acked != acked:
                self._move_confirm(count_slaves(((other.counts_as, other.acked) for other in self._by_descriptor.values()
                                                 if other.acked >= 0), by_host=self._by_host))
            if connection.positioned != was_positioned:
                self._publish_connected()
                self._tables.want_queue_ends(connection.sent)
                self._lines.report(connection.host, Event.SLAVE_FOLLOWS, f"{connection.address} follows from {connection.sent}", now_ns)
                self._transfer(connection, self._source.end(), now_ns)
                self._resume_sending()
        if event & select.EPOLLOUT and not connection.ended:
            self._transfer(connection, self._source.end(), now_ns)
        self._after_event(connection, connection.blocked)

    def _move_confirm(self, acked: list[int]) -> None:
        """Move `confirm` to the offset that enough slaves have, by what each has reported; it never decreases."""
        if len(acked) >= self._replicas:
            confirmed = sorted(acked, reverse=True)[self._replicas - 1]
            if confirmed > native.load_position(self._control.confirm):
                self._links.confirm(confirmed)

    def _listen(self) -> None:
        self._listener = _listen(self._host, self.port)
        self.port = self._listener.getsockname()[1]
        self._epoll.register(self._listener, select.EPOLLIN)
        self._takes = True

    def _listen_again(self) -> None:
        """Try to listen again."""
        try:
            if self._listener is None:
                self._listen()
                self._replication.listening(self.port)
                self._blocked.clear(f"listens for slaves at {self._host}:{self.port}")
            else:
                self._epoll.register(self._listener, select.EPOLLIN)
                self._takes = True
                with self._links:
                    self._accept(self._listener, self._clock_ns())
        except (EngineUnavailableError, OSError) as error:
            self._retry_later(str(error), self._clock_ns())

    def _retry_later(self, why: str, now_ns: int) -> None:
        """Note that no slaves can be accepted, report it once, and try again in a second."""
        self._blocked.set(why, why)
        self._take_ns = now_ns + RETRY_NS

    def _accept(self, listener: socket.socket, now_ns: int) -> None:
        try:
            connected, address = listener.accept()
        except OSError as error:
            if error.errno in _GONE_ALREADY:
                self._blocked.clear()
                return
            self._epoll.unregister(listener)  # no descriptor is free: the listener stays readable, so epoll must not watch it for a while
            self._takes = False
            self._retry_later(f"cannot take slaves: {error.strerror}", now_ns)
            return
        self._blocked.clear()
        host, port = address[:2]
        name = join_address(host, port)
        may_be_plain = host in self._plain_peers
        if not may_be_plain and not self._secret.is_set:
            self._replication.count("refused")
            self._lines.report(host, Event.SLAVE_REFUSED, f"{name} is refused: this store has no secret (ha_secret_file), and "
                            "ha_allow_plain does not name that address", now_ns)
            connected.close()
            return
        if len(self._by_descriptor) >= self._connections_max and (oldest := next(
                (other for other in self._by_descriptor.values() if other.is_unidentified), None)):
            oldest.end("refused: it had not authenticated itself when another peer connected")
            self._drop(oldest)
        link = self._replication.open_link(name) if len(self._by_descriptor) < self._connections_max else None
        if link is None:
            self._replication.count("refused")
            connected.close()
            return
        failpoint("link_opened")
        self._replication.count("connections")
        handshake = MasterHandshake(self._secret, self._introduce, may_be_plain=may_be_plain)
        connection = HAConnection(connected, name, self._source, link, self._config, now_ns, handshake)
        self._by_descriptor[connected.fileno()] = connection
        self._links.add(connection.native)
        self._epoll.register(connected, _WATCHED)

    def _introduce(self) -> Introduction:
        refused = native.load(self._control.state, "refuse_puts") & native.REFUSE_FENCED  # its note may not be written yet
        return Introduction(self._memory.store_uuid.bytes, self._notes.term, True, self._notes.is_fenced or refused != 0)

    def _check_peer(self, connection: HAConnection, peer: Introduction) -> None:
        """Judge a peer that has proven the secret: a slave may follow; a master of a higher term replaces this one."""
        self._check_term(connection.address, peer)
        if peer.is_master:
            connection.end("it was a master, and has received this one's term")
        elif self._notes.is_fenced:
            connection.end("refused: another master has taken this one's place")

    def _check_term(self, address: str, peer: Introduction, *, is_asked: bool = False) -> None:
        """Compare the term of another store that has the secret, from either thread.

        Of two that were promoted to one term the one that asks yields. At term 0 the other may be a new, empty store at a peer's address.
        """
        own = self._notes.term
        if peer.term > own:
            is_known = native.load(self._control.state, "refuse_puts") & native.REFUSE_FENCED
            native.refuse_puts(self._control, native.REFUSE_FENCED)
            self._notes.fence(peer.term)  # even if puts are refused: that process may have died before its note
            if is_known:
                return
            self._report(Event.FENCED, f"{address} knows a master of term {peer.term}, and this one is of term {own}: puts are refused "
                                       "from now on; start this store as that one's slave")
        elif self._notes.is_fenced or not peer.is_second(self._memory.store_uuid.bytes, own):
            return
        elif is_asked and own:
            native.refuse_puts(self._control, native.REFUSE_FENCED)
            self._notes.yield_to(address)
            self._report(Event.SECOND_MASTER, second_master_sentence(address))
        elif peer.store_uuid not in self._equals:
            self._equals.add(peer.store_uuid)
            self._report(Event.SECOND_MASTER, f"{address} is a master of the same term, {own}: stop one of the two")

    # ---- the peers' thread ------------------------------------------------------

    def _call_peers(self) -> None:
        """Exchange terms with the other masters, repeatedly."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ends.is_set():
            for address in self._peers:
                with contextlib.suppress(EngineError), contextlib.closing(
                        call_peer(self._store.root, self._config, address, self._introduce)) as link:
                    if link.peer is not None:
                        self._check_term(address, link.peer, is_asked=True)
            self._ends.wait(PEER_PAUSE_S)

    # ---- both, under the lock ---------------------------------------------------

    def _transfer(self, connection: HAConnection, end: int, now_ns: int) -> bool:
        was_blocked = connection.blocked
        more = connection.transfer(end, now_ns)
        self._after_event(connection, was_blocked)
        return more

    def _after_event(self, connection: HAConnection, was_blocked: bool) -> None:
        """Update a connection after an event that may have ended it, or filled or emptied its socket."""
        if connection.ended:
            self._drop(connection)
        elif connection.blocked != was_blocked:
            self._epoll.modify(connection.socket, _WATCHED | (select.EPOLLOUT if connection.blocked else 0))
            if not connection.blocked:
                self._resume_sending()

    def _drop(self, connection: HAConnection) -> None:
        descriptor = connection.socket.fileno()
        if self._by_descriptor.pop(descriptor, None) is None:
            return
        self._links.remove(descriptor)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)
        if connection.was_refused:
            self._replication.count("refused")
            self._lines.report(connection.host, Event.SLAVE_REFUSED, f"{connection.address} is {connection.ended}", self._clock_ns())
        elif connection.ended and connection.has_reported:  # probes of the port are only counted
            self._lines.report(connection.host, Event.SLAVE_GONE, f"{connection.address} has disconnected: {connection.ended}",
                               self._clock_ns())
        connection.close()
        failpoint("link_dropped")
        self._publish_connected()

    def _publish_connected(self) -> None:
        count = count_slaves(((connection.counts_as, 0) for connection in self._by_descriptor.values()
                              if connection.positioned and not connection.ended), by_host=self._by_host)
        native.store(self._control.replicator, "slaves_connected", len(count))
        failpoint("slaves_counted")


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; EngineUnavailableError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: of an invalid host name
        raise EngineUnavailableError(
            f"cannot listen for slaves at {host}:{port}: {getattr(error, 'strerror', None) or error}: "
            "set ha_listen_host and ha_listen_port") from error
    listener.setblocking(False)
    return listener
