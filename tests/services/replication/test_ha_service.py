"""A master and its slaves over real sockets: who is served, what is confirmed, who is turned away."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from fix_owner import woken_asleep
from fix_slave import SealedSlave, WireSlave, call_of, secret_file
from fix_writer import PlainWriter
from pyengine.cli.engine_status import why_fenced
from pyengine.engine.kinds import WorkerExit
from pyengine.errors import EngineUnavailableError
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.ipc import replication
from pyengine.native import control as native
from pyengine.native.replication import PLAIN, HALink
from pyengine.services.allocate_mapped_file import AllocateMappedFileService
from pyengine.services.replication.ha_join import ask_peers
from pyengine.services.replication.ha_service import HAService, count_slaves
from pyengine.services.replication.ha_stream import BadStreamError, LinkLostError, MasterCall
from pyengine.storage.config import EngineConfig
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from reported import Reported
from waiting import eventually

SEGMENT = 65536
SYNC_MASTER = 1


class Rig:
    """An owner with a log, a master's replicator that the test drives, and slaves on the wire."""

    def __init__(self, owner, segments: int = 8, **settings) -> None:
        self.owner = owner
        owner.position(0, ready_end=0)
        owner.publish()
        replication.create_replication(owner.folder)
        native.store(owner.control.writer, "wanted_end", segments * SEGMENT)
        allocator = AllocateMappedFileService(owner.context(EngineConfig()))
        while native.load(owner.control.allocator, "ready_end") < segments * SEGMENT:
            assert allocator.work()
        allocator.close()
        self.writer = PlainWriter(owner)
        self.config = EngineConfig(broker_role="SYNC_MASTER", **{"ha_allow_plain": "127.0.0.0/8, ::1", **settings})
        self.reported = Reported()
        self.now_ns = 10**9
        self.slaves: list[WireSlave | SealedSlave] = []
        self.service = self.new_service()

    def new_service(self) -> HAService:
        self.replication = replication.Replication(self.owner.folder, writable=True)
        return HAService(self.owner.context(self.config, report=self.reported), self.replication, port=0, clock_ns=lambda: self.now_ns)

    def slave(self, *reports: int) -> WireSlave:
        self.slaves.append(WireSlave(self.service.port))
        if reports:
            self.slaves[-1].report(*reports)
        return self.slaves[-1]

    def sealed_slave(self, call: MasterCall) -> SealedSlave:
        """A slave after its handshake, or what MasterLink says of it; the master goes on meanwhile."""
        with ThreadPoolExecutor(1) as other:
            made = other.submit(SealedSlave, self.service.port, call)
            while not made.done():
                self.service.turn(0.01)
        self.slaves.append(made.result())
        return self.slaves[-1]

    def fill(self, end: int) -> None:
        while self.writer.end < end:
            self.writer.put(b"x" * 900)

    def turn(self) -> None:
        self.service.turn()
        while self.service.work():
            pass
        for slave in self.slaves:
            if isinstance(slave, SealedSlave) or slave.socket.fileno() >= 0:
                slave.take()

    def until(self, condition, what: str) -> None:
        def step():
            self.turn()
            return condition()
        eventually(step, what)

    @property
    def connections(self) -> list:
        """The service's end of each slave's connection."""
        return [*self.service._by_descriptor.values()]

    @property
    def source(self):
        """The log as the service reads it."""
        return self.service._source

    @property
    def confirm(self) -> int:
        return native.load_position(self.owner.control.confirm)

    @property
    def connected(self) -> int:
        return native.load(self.owner.control.replicator, "slaves_connected")

    def close(self) -> None:
        for slave in self.slaves:
            slave.close()
        self.service.close()


@pytest.fixture
def make_rig(make_owner):
    rigs = []

    def make(identity=None, **settings) -> Rig:
        rigs.append(Rig(make_owner(f"store{len(rigs)}", role=SYNC_MASTER, replicates=1, **(identity or {})), **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_the_shortest_frames_are_sent_too(make_rig):
    rig = make_rig(ha_transfer_batch_size_bytes=7)
    rig.fill(20_000)
    slave = rig.slave(1)
    rig.until(lambda: slave.end == rig.writer.end, "all of it was sent")
    assert bytes(slave.log) == bytes(rig.writer.log[1:])


@pytest.mark.parametrize("mode", [native.MODE_MAPPED, native.MODE_SYNC])
def test_slaves_get_the_log_byte_for_byte_as_it_grows(make_rig, mode):
    rig = make_rig({"mode": mode})
    rig.fill(SEGMENT + 5000)
    first = rig.slave(1)
    rig.until(lambda: first.heartbeats, "all of it was sent")
    late = rig.slave(0)
    rig.until(lambda: rig.connected == 2, "positioned")
    rig.fill(3 * SEGMENT)
    rig.until(lambda: first.end == late.end == rig.writer.end, "both have everything")
    assert bytes(first.log) == bytes(rig.writer.log[1:])
    assert late.start == SEGMENT
    assert bytes(late.log) == bytes(rig.writer.log[SEGMENT:])


def test_only_committed_bytes_are_sent_to_a_slave(make_rig):
    rig = make_rig()
    slave = rig.slave(1)
    rig.fill(5000)
    rig.until(lambda: slave.end == rig.writer.end, "what is committed arrived")
    end = rig.writer.end
    native.store_position(rig.owner.control.wrote, end + 1000)
    for _ in range(10):
        rig.turn()
    assert slave.end == end


def test_any_one_slave_confirms(make_rig):
    rig = make_rig()
    rig.fill(5000)
    one, two = rig.slave(1), rig.slave(1)
    rig.until(lambda: rig.connected == 2 and one.heartbeats and two.heartbeats, "both are positioned")
    assert rig.confirm == 0
    before = native.load(rig.owner.control.confirm_seq, "value")
    one.report(4000)
    rig.until(lambda: rig.confirm == 4000, "the first report behind the positioning one confirms")
    assert native.load(rig.owner.control.confirm_seq, "value") != before
    two.report(3000)
    rig.turn()
    assert rig.confirm == 4000
    two.report(rig.writer.end)
    rig.until(lambda: rig.confirm == rig.writer.end, "the other confirms more")


def test_with_two_replicas_the_second_best_counts(make_rig):
    rig = make_rig({"min_in_sync_replicas": 2}, ha_slaves_share_hosts=True)
    rig.fill(5000)
    slaves = [rig.slave(1) for _ in range(3)]
    rig.until(lambda: all(slave.heartbeats for slave in slaves), "all are positioned")
    slaves[0].report(5000)
    for _ in range(5):
        rig.turn()
    assert rig.confirm == 0
    slaves[1].report(3000)
    rig.until(lambda: rig.confirm == 3000, "two have it")
    slaves[2].report(4000)
    rig.until(lambda: rig.confirm == 4000, "another two have it")


def test_two_links_of_one_host_are_one_slave_where_two_are_asked_for(make_rig):
    """The old link of a slave that came back may stay open until it has been silent for 20 s."""
    rig = make_rig({"min_in_sync_replicas": 2})
    rig.fill(5000)
    old, new = rig.slave(1), rig.slave(1)
    rig.until(lambda: old.heartbeats and new.heartbeats, "both are positioned")
    assert rig.connected == 1
    old.report(4000)
    new.report(5000)
    for _ in range(5):
        rig.turn()
    assert rig.confirm == 0 and rig.connected == 1
    other = WireSlave(rig.service.port, source="127.0.0.2")
    rig.slaves.append(other)
    other.report(1)
    rig.until(lambda: other.heartbeats and rig.connected == 2, "another host")
    other.report(4500)
    rig.until(lambda: rig.confirm == 4500, "two hosts have it")


def test_of_one_host_the_best_link_counts():
    links = [("a", 5), ("b", 3), ("a", 9), ("a", -1)]
    assert sorted(count_slaves(links, by_host=True)) == [3, 9]
    assert sorted(count_slaves(links, by_host=False)) == [-1, 3, 5, 9]


def test_a_slave_that_is_gone_takes_nothing_back_and_counts_no_more(make_rig):
    rig = make_rig()
    rig.fill(5000)
    slave = rig.slave(1)
    rig.until(lambda: slave.heartbeats, "positioned")
    slave.report(4000)
    rig.until(lambda: rig.confirm == 4000, "confirmed")
    slave.close()
    rig.until(lambda: rig.connected == 0, "seen to be gone")
    assert rig.confirm == 4000
    assert "has disconnected" in rig.reported[-1]
    again = rig.slave(2000)
    rig.until(lambda: again.heartbeats, "positioned again")
    again.report(2500)
    rig.until(lambda: rig.replication.links()[0]["acked"] == 2500, "its report came")
    rig.service._move_confirm([2500])  # asked here: the report is shown before the service has weighed it
    assert rig.confirm == 4000


def test_dispatch_that_waits_for_slaves_is_woken(make_rig):
    rig = make_rig({"dispatch_at": 1})
    latch = rig.owner.memory.latch(native.REPUTTER)
    rig.fill(1000)
    slave = rig.slave(1)
    rig.until(lambda: slave.heartbeats, "positioned")
    latch.arm()
    slave.report(900)
    rig.until(lambda: rig.confirm == 900, "confirmed")
    assert latch.wait(0)


def test_there_are_no_more_slaves_than_allowed(make_rig):
    rig = make_rig(ha_connections_max=2)
    rig.fill(1000)
    one, two = rig.slave(1), rig.slave(1)
    rig.until(lambda: rig.connected == 2, "two are served")
    three = rig.slave(1)
    rig.until(lambda: not three.take(), "the third is turned away")
    one.close()
    rig.until(lambda: rig.connected == 1, "one left")
    four = rig.slave(1)
    rig.until(lambda: rig.connected == 2, "there is room again")
    assert four.take() and two.take()
    assert rig.replication.totals()["refused"] == 1


def test_garbage_on_the_port_disturbs_no_slave(make_rig):
    rig = make_rig()
    rig.fill(2 * SEGMENT)
    good = rig.slave(1)
    for seed in range(20):
        rng = random.Random(seed)
        bad = rig.slave()
        bad.socket.sendall(rng.choice((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", rng.randbytes(rng.randrange(1, 3000)),
                                       bytes(8) + b"\xff" * 64)))
        if rng.random() < 0.5:
            bad.close()
        rig.turn()
    rig.now_ns += 3 * 10**9  # the farewells are over
    rig.fill(3 * SEGMENT)
    rig.until(lambda: good.end == rig.writer.end, "the good slave has everything")
    assert bytes(good.log) == bytes(rig.writer.log[1:])
    assert rig.confirm <= rig.writer.end


def test_a_slave_that_reads_nothing_keeps_no_other_waiting(make_rig):
    rig = make_rig(segments=160)
    slow = WireSlave(rig.service.port, receive_buffer_bytes=131072)
    rig.slaves.append(slow)
    slow.report(1)
    slow.take = lambda: True
    fast = rig.slave(1)
    rig.fill(150 * SEGMENT)
    rig.until(lambda: fast.end == rig.writer.end, "the fast one has everything")
    fast.report(rig.writer.end)
    rig.until(lambda: rig.confirm == rig.writer.end, "and confirms")
    links = rig.replication.links()
    assert min(link["sent"] for link in links) < rig.writer.end
    del slow.take
    rig.until(lambda: slow.end == rig.writer.end, "the slow one catches up")
    assert bytes(slow.log) == bytes(rig.writer.log[1:])


def test_silence_and_heartbeats_by_the_clock(make_rig):
    rig = make_rig()
    rig.fill(1000)
    talks, silent = rig.slave(1), rig.slave(1)
    rig.until(lambda: talks.heartbeats and silent.heartbeats, "positioned")
    for _ in range(4):
        rig.now_ns += 5_100_000_000
        before = len(talks.heartbeats)
        talks.report(rig.writer.end)
        rig.until(lambda: len(talks.heartbeats) > before, "a heartbeat")
    rig.until(lambda: not silent.take(), "the silent one is closed")
    assert talks.take() and rig.connected == 1


def test_a_heartbeat_that_the_socket_does_not_take_goes_out_when_it_does(make_rig):
    rig = make_rig()
    rig.fill(1000)
    slave = rig.slave(1)
    rig.until(lambda: slave.heartbeats, "positioned")
    (connection,) = rig.connections
    real = connection.socket

    class FullSocket:
        fileno, recv, close = real.fileno, real.recv, real.close

        def send(self, data):
            raise BlockingIOError

    connection.socket = FullSocket()
    rig.now_ns += 5_100_000_000
    rig.service.turn()
    assert connection.blocked
    connection.socket = real
    rig.until(lambda: len(slave.heartbeats) == 2, "the heartbeat")
    rig.writer.put(b"more")
    rig.until(lambda: slave.end == rig.writer.end, "and the log goes on")


def test_segments_that_are_deleted_end_the_slave_that_needs_them(make_rig):
    rig = make_rig()
    rig.fill(4 * SEGMENT)
    os.unlink(rig.owner.root / "commitlog" / f"{0:020}")
    native.store_position(rig.owner.control.min_offset, SEGMENT)
    slave = rig.slave(1)
    rig.until(lambda: not slave.take(), "turned away")
    assert slave.heartbeats == [SEGMENT] and slave.log == b""
    slave = rig.slave(SEGMENT)
    rig.until(lambda: slave.end == rig.writer.end, "served from where the log begins")


def test_a_segment_that_vanishes_under_a_slave_sends_no_zeros(make_rig):
    rig = make_rig()
    rig.fill(4 * SEGMENT)
    read = rig.source.read

    def deleted_meanwhile(offset, views):
        native.store_position(rig.owner.control.min_offset, SEGMENT)  # by the cleaner, between the copy and the sending
        return read(offset, views)

    rig.source.read = deleted_meanwhile
    slave = rig.slave(1)
    rig.until(lambda: not slave.take(), "closed")
    assert slave.log == b""
    assert "deleted before it was sent" in rig.reported[-1]


def followed(rig, **named) -> tuple[WireSlave, HALink]:
    """A slave that has everything, served by C from now on, and what C has of it."""
    rig.fill(2000)
    slave = WireSlave(rig.service.port, **named)
    rig.slaves.append(slave)
    slave.report(1)
    rig.until(lambda: slave.heartbeats and slave.end == rig.writer.end, "it follows")
    rig.writer.put(b"through Python, which opens the segment for C")
    rig.until(lambda: slave.end == rig.writer.end, "one more")
    (connection,) = rig.connections
    assert connection.native.fields.turn == PLAIN
    return slave, connection.native


def test_single_records_need_no_python(make_rig, monkeypatch):
    rig = make_rig()
    slave, _ = followed(rig)
    monkeypatch.setattr(HAService, "_send_rest", lambda self: pytest.fail("called for an ordinary frame"))
    monkeypatch.setattr(HAService, "_on_event", lambda self, *event: pytest.fail("called for an ordinary report"))
    for number in range(20):
        rig.writer.put(b"x" * number)
        rig.until(lambda: slave.end == rig.writer.end, "the record")
        slave.report(slave.end)
        rig.until(lambda: rig.confirm == rig.writer.end, "its report")
    (link,) = rig.replication.links()
    assert (link["sent"], link["acked"]) == (rig.writer.end, rig.writer.end) and link["bytes"] == rig.writer.end - 1
    assert bytes(slave.log) == bytes(rig.writer.log[1:])


def test_bytes_deleted_before_c_sends_them_are_not_sent(make_rig):
    rig = make_rig()
    slave, _ = followed(rig)
    before = len(slave.log)
    rig.writer.put(b"too late")
    native.store_position(rig.owner.control.min_offset, rig.writer.end)
    rig.until(lambda: not slave.take(), "closed")
    assert len(slave.log) == before
    assert "deleted before it was sent" in rig.reported[-1]


def test_a_full_socket_in_the_middle_of_a_frame_loses_nothing(make_rig, rng):
    rig = make_rig(segments=160)
    slave, link = followed(rig, receive_buffer_bytes=4096)
    rig.connections[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    slave.take = lambda: True
    while link.fields.turn == PLAIN:
        rig.writer.put(rng.randbytes(rng.randrange(30_000)))
        rig.turn()
    for _ in range(3):
        rig.writer.put(b"while it is full")
        rig.turn()
    del slave.take
    rig.until(lambda: slave.end == rig.writer.end, "it catches up")
    rig.until(lambda: link.fields.turn == PLAIN, "C serves it again")
    rig.writer.put(b"one more")
    rig.until(lambda: slave.end == rig.writer.end, "one more")
    assert bytes(slave.log) == bytes(rig.writer.log[1:])


@pytest.mark.parametrize("offset, reported", [(-1, "no slave's log ends there"), (5, "its log became shorter"), (1 << 40, "was sent")])
def test_a_report_that_cannot_be_ends_a_connection_that_c_serves(make_rig, offset, reported):
    rig = make_rig()
    slave, _ = followed(rig)
    end = rig.writer.end
    slave.socket.sendall(struct.pack(">qqq", end - 10, end - 5, offset))
    rig.until(lambda: not slave.take(), "closed")
    assert reported in rig.reported[-1]
    assert rig.confirm == end - 5, "what came before it counts"


def test_reports_that_come_in_pieces_count_when_they_are_whole(make_rig):
    rig = make_rig()
    slave, _ = followed(rig)
    end = rig.writer.end
    text = struct.pack(">qq", end - 10, end)
    slave.socket.sendall(text[:11])
    rig.until(lambda: rig.confirm == end - 10, "the first")
    slave.socket.sendall(text[11:])
    rig.until(lambda: rig.confirm == end, "the second")
    rig.writer.put(b"and so on")
    rig.until(lambda: slave.end == rig.writer.end, "served as before")


def test_the_confirmed_position_and_the_role_are_noted(make_rig):
    rig = make_rig()
    rig.fill(5000)
    rig.service.start()
    slave = rig.slave(1)
    file = ReplicationStateFile(rig.owner.root)
    assert file.read().state == ReplicationState("SYNC_MASTER", 0)
    eventually(lambda: rig.service.work() or (slave.take() and slave.heartbeats), "positioned")
    slave.report(4000)
    eventually(lambda: file.read().state == ReplicationState("SYNC_MASTER", 4000), "noted while it runs")
    slave.report(4500)
    eventually(lambda: rig.confirm == 4500, "confirmed")
    rig.service.close()
    assert file.read().state == ReplicationState("SYNC_MASTER", 4500)
    rig.service = rig.new_service()
    assert rig.confirm == 4500


@pytest.mark.timeout(60)
def test_a_wake_up_while_the_engine_stops_returns_to_the_worker(make_rig):
    rig = make_rig()
    rig.turn()
    memory = rig.owner.memory
    native.refuse_puts(memory.control, native.REFUSE_STOPPING)
    latch = memory.latch(native.REPLICATOR)
    latch.arm()
    with woken_asleep(memory, native.REPLICATOR):
        assert not rig.service.wait(latch, 3600)


def test_an_orderly_stop_waits_for_the_slaves(make_rig):
    rig = make_rig()
    rig.fill(2000)
    slave = rig.slave(1)
    rig.until(lambda: slave.heartbeats, "positioned")
    rig.writer.put(b"last")
    assert rig.service.drain()
    eventually(lambda: slave.take() and slave.end == rig.writer.end, "the last bytes arrived")
    assert rig.service.drain()
    slave.report(rig.writer.end)
    rig.until(lambda: rig.confirm == rig.writer.end, "acknowledged")
    assert not rig.service.drain()


def test_an_orderly_stop_waits_for_a_slave_so_long_and_no_longer(make_rig):
    rig = make_rig()
    rig.fill(2000)
    rig.slave(1)
    rig.until(lambda: rig.connected == 1, "positioned")
    assert rig.service.drain()
    rig.now_ns += rig.config.slave_timeout_ms * 1_000_000
    assert not rig.service.drain()


def test_a_replicator_whose_port_is_taken_does_not_start(make_rig):
    rig = make_rig()
    with pytest.raises(EngineUnavailableError, match="cannot listen for slaves.*set ha_listen_host and ha_listen_port"):
        HAService(rig.owner.context(rig.config, report=rig.reported), replication.Replication(None), port=rig.service.port)


def test_a_port_that_a_later_replicator_cannot_have_is_tried_again(make_rig):
    rig = make_rig()
    rig.fill(1000)
    holder, rig.service = rig.service, None
    service = rig.service = HAService(
        rig.owner.context(rig.config, report=rig.reported), replication.Replication(None), port=holder.port,
        must_listen=False, clock_ns=lambda: rig.now_ns)
    assert "cannot listen for slaves" in service.blocked_reason and "in use" in service.blocked_reason
    for _ in range(3):
        rig.now_ns += 10**9
        rig.turn()
    assert service.blocked_reason and len([reported for reported in rig.reported if "cannot listen" in reported]) == 1
    port = holder.port
    holder.close()
    rig.turn()
    assert service.blocked_reason, "not before its time"
    rig.now_ns += 10**9
    rig.turn()
    assert not service.blocked_reason and service.port == port
    slave = rig.slave(1)
    rig.until(lambda: slave.end == rig.writer.end, "served")


def no_such_name(*arguments, **named):
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.mark.parametrize("host", ["192.0.2.1", "a-name", "a..b"])
def test_an_unusable_listen_address_is_refused_at_start_and_reported_later(make_rig, monkeypatch, host):
    rig = make_rig()
    if host == "a-name":
        monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    config = dataclasses.replace(rig.config, ha_listen_host=host)
    arguments = rig.owner.context(config, report=rig.reported), replication.Replication(None)
    with pytest.raises(EngineUnavailableError, match="cannot listen for slaves"):
        HAService(*arguments, port=0)
    service = HAService(*arguments, port=0, must_listen=False, clock_ns=lambda: rig.now_ns)
    rig.now_ns += 10**9
    service.turn()
    assert "cannot listen for slaves" in service.blocked_reason
    service.close()


def test_without_descriptors_the_listener_is_left_alone_for_a_second(make_rig):
    rig = make_rig()
    rig.fill(1000)
    slave = rig.slave(1)
    real, tries = rig.service._listener, []

    class NoDescriptors:
        fileno, close = real.fileno, real.close

        def accept(self):
            tries.append(rig.now_ns)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    rig.service._listener = NoDescriptors()
    for _ in range(5):
        rig.service.turn()
    assert len(tries) == 1 and rig.service.blocked_reason == "cannot take slaves: Too many open files"
    rig.now_ns += 10**9
    for _ in range(5):
        rig.service.turn()
    assert len(tries) == 2
    assert rig.reported == ["cannot take slaves: Too many open files"]
    rig.service._listener = real
    rig.now_ns += 10**9
    rig.until(lambda: slave.end == rig.writer.end, "served")
    assert not rig.service.blocked_reason


def test_peers_that_only_try_the_port_are_not_reported(make_rig):
    rig = make_rig()
    for _ in range(20):
        slave = rig.slave()
        slave.close()
    rig.until(lambda: rig.replication.totals()["closed"] == 20, "they came and went")
    assert rig.reported == []


def test_a_peer_that_comes_again_and_again_does_not_fill_the_log(make_rig):
    rig = make_rig()
    rig.fill(1000)
    for number in range(1, 21):
        slave = rig.slave(1)
        rig.until(lambda: rig.connected == 1, "positioned")
        slave.close()
        rig.until(lambda number=number: rig.replication.totals()["closed"] == number, "gone")
    assert len(rig.reported) == 12, "six of each kind"
    rig.now_ns += 60 * 10**9
    rig.turn()
    assert rig.reported[12:] == ["127.0.0.1: 14 more lines like those above within a minute"] * 2
    slave = rig.slave(1)
    rig.until(lambda: rig.connected == 1, "positioned")
    assert "follows from" in rig.reported[14]


def test_a_failure_of_the_slaves_thread_ends_the_worker(make_rig):
    rig = make_rig()

    def fail(wait_s=0.0):
        raise RuntimeError("broken on purpose")

    rig.service.turn = fail
    rig.service.start()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        eventually(rig.service.work, "the failure reaches the worker")


def test_the_worker_is_killed_and_the_next_one_serves(make_owner):
    owner = make_owner(role=SYNC_MASTER, replicates=1)
    rig = Rig(owner)
    rig.service.close()
    rig.fill(SEGMENT + 100)
    owner.use_settings(broker_role="SYNC_MASTER", ha_listen_port=rig.service.port, ha_allow_plain="127.0.0.1")
    with replication.Replication(owner.folder) as shared:
        for incarnation in (1, 2):
            child = owner.spawn("pyengine.workers.replicator")
            owner.wait_ready(native.REPLICATOR, incarnation)
            assert shared.totals()["listening_port"] == rig.service.port
            slave = WireSlave(rig.service.port)
            slave.report(1)
            eventually(lambda: slave.take() and slave.heartbeats, "everything was sent")
            slave.report(rig.writer.end)
            eventually(lambda: rig.confirm == rig.writer.end, "confirmed")
            rig.writer.put(b"one more")
            owner.memory.wake(native.REPLICATOR)
            eventually(lambda: slave.take() and slave.end == rig.writer.end, "woken by the latch")
            assert bytes(slave.log) == bytes(rig.writer.log[1:])
            child.send_signal(signal.SIGKILL if incarnation == 1 else signal.SIGTERM)
            slave.close()
            assert child.wait() == (-signal.SIGKILL if incarnation == 1 else 0)
        assert shared.links() == []


def test_a_port_that_is_taken_while_the_replicator_is_down_halts_no_worker(make_owner):
    owner = make_owner(role=SYNC_MASTER, replicates=1)
    rig = Rig(owner)
    rig.service.close()
    rig.fill(1000)
    port = rig.service.port
    owner.use_settings(broker_role="SYNC_MASTER", ha_listen_port=port, ha_allow_plain="127.0.0.1")
    holder = socket.create_server(("127.0.0.1", port))
    first = owner.spawn("pyengine.workers.replicator")
    assert first.wait(30) == WorkerExit.BOOT_FAILED, "the engine's start says so"
    child = owner.spawn("pyengine.workers.replicator")
    owner.wait_ready(native.REPLICATOR, 2)
    eventually(lambda: "cannot listen for slaves" in native.read_blocked_reason(owner.memory.blocked_reasons, native.REPLICATOR),
               "it says so")
    holder.close()
    with replication.Replication(owner.folder) as shared:
        eventually(lambda: shared.totals()["listening_port"] == port, "it listens")
    slave = WireSlave(port)
    slave.report(1)
    eventually(lambda: slave.take() and slave.end == rig.writer.end, "and serves")
    eventually(lambda: not native.read_blocked_reason(owner.memory.blocked_reasons, native.REPLICATOR), "nothing is wrong any more")
    slave.close()
    child.terminate()
    assert child.wait(30) == 0


def test_a_replicator_has_the_role_of_its_engine_whatever_the_settings_say(make_owner):
    owner = make_owner(role=SYNC_MASTER, replicates=1)
    owner.position(0, ready_end=0)
    owner.publish()
    replication.create_replication(owner.folder)
    native.store(owner.control.replicator, "slaves_connected", 3)
    owner.use_settings(broker_role="SLAVE", ha_master_address="127.0.0.1:1", ha_listen_port=0)
    child = owner.spawn("pyengine.workers.replicator")
    owner.wait_ready(native.REPLICATOR)
    eventually(lambda: native.load(owner.control.replicator, "slaves_connected") == 0, "it serves, and no slave has come")
    child.terminate()
    assert child.wait(30) == 0


def test_no_replicator_comes_up_beside_an_engine_without_replication(make_owner):
    owner = make_owner()
    owner.position(0, ready_end=0)
    owner.publish()
    replication.create_replication(owner.folder)
    owner.use_settings(ha_listen_port=1)
    child = owner.spawn("pyengine.workers.replicator")
    assert child.wait(30) == WorkerExit.BOOT_FAILED
    assert "without replication" in child.stderr.read()


# ---- slaves with the secret -------------------------------------------------------------


@pytest.fixture
def secret(tmp_path) -> str:
    return secret_file(tmp_path)


@pytest.mark.parametrize("batch_bytes", [700, 32768])
def test_a_slave_with_the_secret_gets_the_log_and_confirms_it(make_rig, secret, batch_bytes):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="", ha_transfer_batch_size_bytes=batch_bytes)
    rig.fill(SEGMENT + 5000)
    slave = rig.sealed_slave(call_of(secret))
    slave.report(1)
    rig.until(lambda: slave.heartbeats, "all of it was sent")
    for _ in range(20):  # by C, one frame and one report each
        rig.fill(rig.writer.end + 1)
        rig.until(lambda: slave.end == rig.writer.end, "it has everything")
        slave.report(slave.end)
        rig.until(lambda: rig.confirm == rig.writer.end, "its report counts")
    rig.fill(3 * SEGMENT)
    rig.until(lambda: slave.end == rig.writer.end, "a catch-up too")
    assert bytes(slave.log) == bytes(rig.writer.log[1:])
    assert slave.link.peer is not None and slave.link.peer.store_uuid == rig.owner.memory.store_uuid.bytes


@pytest.mark.parametrize("batch_bytes", [700, 32768])
def test_a_slave_without_a_secret_gets_the_log_sealed_and_no_tables(make_rig, batch_bytes):
    rig = make_rig(ha_transfer_batch_size_bytes=batch_bytes)
    DelayOffsets(rig.owner.root).write({1: 5})
    rig.fill(SEGMENT + 5000)
    slave = rig.sealed_slave(call_of(""))
    assert slave.link.seals.into is None
    slave.report(1)
    rig.until(lambda: slave.heartbeats, "all of it was sent")
    assert slave.link.seals.into is not None and slave.link.peer is None
    for _ in range(20):  # by C, one frame and one report each
        rig.fill(rig.writer.end + 1)
        rig.until(lambda: slave.end == rig.writer.end, "it has everything")
        slave.report(slave.end)
        rig.until(lambda: rig.confirm == rig.writer.end, "its report counts")
        rig.now_ns += 1_100_000_000
    assert bytes(slave.log) == bytes(rig.writer.log[1:]) and slave.tables == []


def test_a_report_that_was_changed_on_the_way_confirms_nothing_without_a_secret_either(make_rig):
    rig = make_rig()
    rig.fill(5000)
    slave = rig.sealed_slave(call_of(""))
    rig.slaves.remove(slave)
    slave.report(1)
    rig.until(lambda: slave.take() or slave.end == rig.writer.end, "it has everything")
    words = bytearray(slave.link.seals.out.sealed(ha_wire.REPORT.pack(slave.end - 64)))
    words[7] ^= 32
    os.write(slave.link.descriptor, words)
    rig.until(lambda: any("its seal does not fit" in line for line in rig.reported), "it is seen")
    assert rig.confirm == 0
    slave.close()


def test_without_secret_and_allowed_addresses_every_slave_is_refused(make_rig):
    rig = make_rig(ha_allow_plain="")
    assert "no slave can follow" in rig.reported[0] and "ha_secret_file" in rig.reported[0]
    slave = rig.slave(1)
    rig.until(lambda: not slave.take(), "it is closed")
    assert slave.log == b"" and rig.connected == 0
    assert any("is refused: this store has no secret (ha_secret_file)" in line for line in rig.reported)


@pytest.mark.parametrize("words", [struct.pack(">q", 1), b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_gets_nothing_where_there_is_a_secret(make_rig, secret, words):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="10.0.0.0/8")
    rig.fill(5000)
    stranger = rig.slave()
    stranger.socket.sendall(words)
    rig.until(lambda: not stranger.take(), "it is closed")
    assert stranger.log == b"" and stranger.heartbeats == [] and rig.connected == 0 and rig.confirm == 0
    assert any("is refused" in line for line in rig.reported)
    with replication.Replication(rig.owner.folder) as shared:
        assert shared.totals()["refused"] == 1


def test_a_slave_with_another_secret_is_refused_and_both_sides_say_why(make_rig, secret, tmp_path):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="")
    with pytest.raises(LinkLostError, match="closed the connection during the handshake.*ha_secret_file"):
        rig.sealed_slave(call_of(secret_file(tmp_path, "another secret of 24 by", "other")))
    assert any("refused: it does not have the secret of this store" in line for line in rig.reported)


def test_a_secret_that_cannot_be_read_refuses_slaves_until_it_can(make_rig, secret):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="")
    os.chmod(secret, 0o644)
    call = call_of(secret_file(rig.owner.root, name="copy"))
    with pytest.raises(LinkLostError):
        rig.sealed_slave(call)
    assert any("mode 0644" in line for line in rig.reported)
    os.chmod(secret, 0o600)
    assert rig.sealed_slave(call).link.peer is not None


def test_strangers_that_say_nothing_are_closed_soon_and_make_room_for_others(make_rig, secret):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="", ha_connections_max=2)
    rig.fill(5000)
    first, second = rig.slave(), rig.slave()
    rig.turn()
    slave = rig.sealed_slave(call_of(secret))
    slave.report(1)
    rig.until(lambda: slave.end == rig.writer.end, "a slave is served all the same")
    rig.until(lambda: not first.take(), "in the place of the oldest")
    assert second.take()
    rig.now_ns += 5_000_000_001
    rig.until(lambda: not second.take(), "the other had its time")
    assert rig.connected == 1


@pytest.mark.parametrize("by_c", [True, False])
def test_a_flipped_bit_in_a_report_ends_the_link_and_confirms_nothing(make_rig, secret, by_c, rng):
    rig = make_rig({"min_in_sync_replicas": 1 if by_c else 2}, ha_secret_file=secret, ha_allow_plain="")
    rig.fill(5000)
    slave = rig.sealed_slave(call_of(secret))
    slave.report(1)
    rig.until(lambda: slave.heartbeats and slave.end == rig.writer.end, "all of it was sent")
    report = bytearray(slave.link.seals.out.sealed(struct.pack(">q", slave.end)))
    bit = rng.randrange(len(report) * 8)
    report[bit // 8] ^= 1 << bit % 8
    os.write(slave.link.descriptor, report)
    slave_was, rig.slaves = slave, []
    rig.until(lambda: any("a report did not come as it was sent" in line for line in rig.reported), "it is seen")
    assert rig.confirm == 0 and rig.connected == 0
    slave_was.close()


@pytest.mark.parametrize("where", ["header", "body", "seal"])
def test_a_flipped_bit_in_a_frame_is_seen_by_the_slave(make_rig, secret, where, rng):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="")
    rig.fill(5000)
    slave = rig.sealed_slave(call_of(secret))
    slave.report(1)
    receive, at = slave.link.receive, {"header": rng.randrange(12), "body": 20 + rng.randrange(1000), "seal": 12 + rng.randrange(8)}[where]

    def receive_changed():
        data = receive()
        if data is not None:
            data[at] ^= 1 << rng.randrange(8)
        return data

    slave.link.receive = receive_changed
    with pytest.raises(BadStreamError, match="its seal does not fit"):
        rig.until(lambda: False, "it is seen")
    assert slave.log == b""
    rig.slaves.clear()
    slave.close()


def test_links_of_one_store_count_once_whatever_address_they_come_from(make_rig, secret):
    rig = make_rig({"min_in_sync_replicas": 2}, ha_secret_file=secret, ha_allow_plain="")
    rig.fill(5000)
    names = [b"one" + bytes(13), b"one" + bytes(13), b"two" + bytes(13)]
    links = [rig.sealed_slave(call_of(secret, Introduction(name, 0, is_master=False))) for name in names]
    for slave in links:
        slave.report(1)
        rig.until(lambda slave=slave: slave.heartbeats, "all of it was sent")
    assert rig.connected == 2
    for slave, confirmed in zip(links, (0, 0, rig.writer.end), strict=True):
        slave.report(slave.end)
        rig.until(lambda: sum(one.acked == rig.writer.end for one in rig.connections) == links.index(slave) + 1, "its report came")
        assert rig.confirm == confirmed


# ---- of two masters the older one yields --------------------------------------------------


def is_fenced(rig) -> bool:
    return native.load(rig.owner.control.state, "refuse_puts") & native.REFUSE_FENCED != 0


@pytest.mark.parametrize("is_master", [True, False], ids=["a master", "a slave of another master"])
def test_a_master_that_meets_a_higher_term_refuses_puts_and_remembers_it(make_rig, secret, is_master):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="")
    rig.fill(5000)
    rig.sealed_slave(call_of(secret, Introduction(b"o" * 16, 0, is_master=False))).report(1)
    rig.until(lambda: rig.connected == 1, "slaves of its own term follow")
    assert not is_fenced(rig)
    peer = rig.sealed_slave(call_of(secret, Introduction(b"x" * 16, 3, is_master)))
    rig.slaves.remove(peer)
    assert peer.link.peer.term == 0 and not peer.link.peer.is_fenced, "it did not know it when it spoke"
    rig.until(lambda: is_fenced(rig), "puts are refused")
    state = ReplicationStateFile(rig.owner.root).read().state
    assert (state.term, state.fenced_by, state.is_fenced) == (0, 3, True)
    assert any("knows a master of term 3, and this one is of term 0: puts are refused" in line for line in rig.reported)
    peer.close()
    other = rig.sealed_slave(call_of(secret))
    assert other.link.peer.is_fenced, "it says so to slaves"
    rig.slaves.remove(other)
    with pytest.raises(LinkLostError):
        rig.until(lambda: other.take() and False, "and are not served")
    other.close()


def test_a_master_that_was_killed_before_it_noted_who_is_above_it_is_noted_by_the_next(make_rig, secret):
    rig = make_rig(ha_secret_file=secret)
    native.refuse_puts(rig.owner.control, native.REFUSE_FENCED)  # the predecessor came as far as that
    peer = rig.sealed_slave(call_of(secret, Introduction(b"x" * 16, 3, is_master=True)))
    rig.slaves.remove(peer)
    rig.until(lambda: ReplicationStateFile(rig.owner.root).read().state.fenced_by == 3, "the note is made after all")
    peer.close()


def test_a_master_whose_note_of_another_was_lost_still_says_that_it_takes_no_puts(make_rig, secret):
    """Or that one would yield to it, and none of the two would take puts."""
    rig = make_rig(ha_secret_file=secret)
    native.refuse_puts(rig.owner.control, native.REFUSE_FENCED)  # the predecessor came as far as that
    peer = rig.sealed_slave(call_of(secret, Introduction(b"x" * 16, 0, is_master=True)))
    rig.slaves.remove(peer)
    assert peer.link.peer.is_fenced
    assert "of a higher term has taken this store's place, or one of the same term" in why_fenced(native.REFUSE_FENCED, rig.owner.root)
    peer.close()


def test_a_plain_peer_and_one_of_a_lower_or_equal_term_fence_nothing(make_rig, secret):
    rig = make_rig(ha_secret_file=secret)
    rig.service.close()
    ReplicationStateFile(rig.owner.root).write(ReplicationState("SYNC_MASTER", 0, term=2))
    rig.service = rig.new_service()
    rig.slave(1)
    for term in (1, 2):
        call = call_of(secret, Introduction(b"x" * 16, term, is_master=True), ha_allow_plain="10.0.0.1")
        rig.slaves.remove(peer := rig.sealed_slave(call))
        assert peer.link.peer.term == 2
        peer.close()
    rig.until(lambda: any("is a master of the same term, 2" in line for line in rig.reported), "two of one term: it says so")
    assert not is_fenced(rig)


def test_a_master_tells_its_peers_its_term_and_hears_theirs(make_rig, secret):
    old, new = make_rig(ha_secret_file=secret), make_rig(ha_secret_file=secret)
    new.service.close()
    ReplicationStateFile(new.owner.root).write(ReplicationState("SYNC_MASTER", 0, term=1))
    new.config = dataclasses.replace(new.config, ha_peers=f"127.0.0.1:{old.service.port}")
    new.service = new.new_service()
    new.service.start()
    old.until(lambda: is_fenced(old), "the old one knows it")
    assert not is_fenced(new)
    again = make_rig(ha_secret_file=secret)
    again.config = dataclasses.replace(again.config, ha_peers=f"127.0.0.1:1, 127.0.0.1:{new.service.port}")
    again.service.close()
    again.service = again.new_service()
    again.service.start()
    eventually(lambda: is_fenced(again), "one that returns asks")
    eventually(lambda: ReplicationStateFile(again.owner.root).read().state.fenced_by == 1, "and remembers it")


def two_masters_of_term(term, make_rig, secret):
    """Return two that run, the second of which asks the first, and the address of the first."""
    asked, asks = make_rig(ha_secret_file=secret), make_rig(ha_secret_file=secret)
    for rig in (asked, asks):
        rig.service.close()
        ReplicationStateFile(rig.owner.root).write(ReplicationState("SYNC_MASTER", 0, term=term))
        rig.service = rig.new_service()
        rig.service.start()
        address = asks.config.ha_peers or f"127.0.0.1:{rig.service.port}"
        asks.config = dataclasses.replace(asks.config, ha_peers=address)
    return asked, asks, address


def test_of_two_masters_of_one_term_the_one_that_asks_yields_and_remembers_it(make_rig, secret):
    asked, asks, address = two_masters_of_term(2, make_rig, secret)
    eventually(lambda: is_fenced(asks), "it takes no puts")
    told = f"{address} is a master of the same term, so this one takes no puts"
    eventually(lambda: any(told in line for line in asks.reported), "and says so")
    eventually(lambda: any("is a master of the same term, 2: stop one" in line for line in asked.reported), "so does the other")
    state = ReplicationStateFile(asks.owner.root).read().state
    assert (state.is_fenced, state.second_master, state.known_term) == (True, address, 2), "so that it can follow the other"
    again = dataclasses.replace(asked.config, ha_peers=f"127.0.0.1:{asks.service.port}")
    assert ask_peers(asked.owner.root, again) == () and not is_fenced(asked), "one that yielded is no second master"
    assert not ReplicationStateFile(asked.owner.root).read().state.is_fenced


def test_a_master_that_was_never_promoted_does_not_yield_to_one_of_its_term(make_rig, secret):
    """Both have none: the other may be a new store at the address of a slave that was lost, while this one has the messages."""
    asked, asks, address = two_masters_of_term(0, make_rig, secret)
    for rig in (asked, asks):
        eventually(lambda rig=rig: any("is a master of the same term, 0: stop one" in line for line in rig.reported), "it says so")
        assert not is_fenced(rig)
    assert ask_peers(asks.owner.root, asks.config) == ()
    assert not ReplicationStateFile(asks.owner.root).read().state.is_fenced


def test_a_master_that_is_among_its_own_peers_is_no_second_one(make_rig, secret):
    rig = make_rig(ha_secret_file=secret)
    port = rig.service.port
    rig.service.close()
    rig.config = dataclasses.replace(rig.config, ha_peers=f"127.0.0.1:{port}")
    found = replication.Replication(rig.owner.folder, writable=True)
    rig.service = HAService(rig.owner.context(rig.config, report=rig.reported), found, port=port)
    rig.service.start()
    eventually(lambda: found.totals()["closed"] > 1, "it has met itself")
    assert ask_peers(rig.owner.root, rig.config) == () and not is_fenced(rig)


# ---- tables ---------------------------------------------------------------------------


def test_a_slave_with_the_secret_gets_tables_after_the_bytes_they_speak_of(make_rig, secret):
    rig = make_rig(ha_secret_file=secret)
    rig.fill(5000)
    plain = rig.slave(1)
    slave = rig.sealed_slave(call_of(secret))
    DelayOffsets(rig.owner.root).write({1: 5})
    slave.report(1)
    rig.until(lambda: slave.heartbeats, "the log first")
    rig.now_ns += 1_100_000_000
    rig.until(lambda: slave.tables, "the table came")
    assert [kind for kind, _, _ in slave.tables] == [3] and slave.tables[0][2] == rig.writer.end
    assert b"5" in slave.tables[0][1]
    for number in range(6, 9):
        rig.fill(rig.writer.end + 2000)
        DelayOffsets(rig.owner.root).write({1: number})
        end = rig.writer.end
        rig.until(lambda end=end: slave.end == end, "the log first")
        rig.now_ns += 1_100_000_000
        rig.until(lambda number=number: len(slave.tables) == number - 4, "the next one, too")
        assert slave.tables[-1][2] >= end
        slave.report(slave.end)
        rig.until(lambda end=end: rig.confirm >= end, "reports go on")
    rig.until(lambda: plain.end == slave.end == rig.writer.end, "and the log")
    assert bytes(slave.log) == bytes(plain.log) == bytes(rig.writer.log[1:])


def test_a_large_table_goes_in_pieces_beside_the_log(make_rig, secret):
    rig = make_rig(ha_secret_file=secret, ha_allow_plain="")
    rig.fill(5000)
    slave = rig.sealed_slave(call_of(secret))
    slave.report(1)
    rig.until(lambda: slave.heartbeats, "the log first")
    ConsumerOffsets(rig.owner.root).commit("T", "g", dict.fromkeys(range(200000), 1 << 40))
    rig.now_ns += 1_100_000_000
    rig.until(lambda: slave.tables, "it came")
    rig.fill(9000)
    rig.until(lambda: slave.end == rig.writer.end, "and what was put meanwhile")
    assert slave.tables[0][1] == (rig.owner.root / "config" / "consumerOffset.json").read_bytes()


def test_a_link_tells_since_when_its_slave_lacks_something(make_rig):
    rig = make_rig()

    def caught_up_s(step_s: float) -> float:
        """After that time, and a turn in it."""
        rig.now_ns += int(step_s * 10**9)
        rig.turn()
        (link,) = rig.replication.links()
        return link["caught_up_ns"] / 1e9

    rig.fill(5000)
    slave = rig.slave(1)
    rig.until(lambda: slave.end == rig.writer.end, "all was sent")
    first = rig.writer.end
    slave.report(first)
    rig.until(lambda: rig.confirm == first, "and confirmed")
    at_s = rig.now_ns / 1e9
    assert caught_up_s(1) == at_s + 1
    assert caught_up_s(5) == at_s + 6
    rig.fill(7000)
    assert caught_up_s(1) == at_s + 6 and caught_up_s(9) == at_s + 6, "from the last look at which it had all"
    rig.fill(9000)
    assert caught_up_s(2) == at_s + 6
    rig.until(lambda: slave.end == rig.writer.end, "all was sent")
    slave.report(slave.end)
    rig.until(lambda: rig.confirm == rig.writer.end, "and confirmed")
    assert caught_up_s(1) == at_s + 19
