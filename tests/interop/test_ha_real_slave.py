"""A real RocketMQ slave follows our master: byte for byte, acknowledged, through cuts, kills and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

import needs
import pyengine
from crash.replicas import free_port
from fix_replication import Load, log_bytes
from ha_proxy import CLEAN, FaultProxy, Faults
from interop.judge import Judge, JudgeFailure
from pyengine.ipc.replication import Replication
from pyengine.native import control as native
from pyengine.results import PutStatus
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

SIZES = {"mappedFileSizeCommitLog": 65536, "mappedFileSizeConsumeQueue": 6000, "maxHashSlotNum": 1000, "maxIndexNum": 4000}
OURS = {"mapped_file_size_commit_log_bytes": 65536, "mapped_file_size_consume_queue_bytes": 6000, "max_hash_slot_num": 1000,
        "max_index_num": 4000, "broker_role": "SYNC_MASTER", "ha_allow_plain": "127.0.0.1"}
# It first reports when its heartbeat is due, and pauses that long before it connects again.
SLAVE = {**SIZES, "brokerRole": "SLAVE", "haSendHeartbeatInterval": 50}


class Slave:
    """A real slave, open in the judge."""

    def __init__(self, judge, root, address: str) -> None:
        self.judge, self.root, self.address = judge, root, address
        self.open()

    def open(self) -> None:
        self.judge.ha_open(self.root, SLAVE, self.address).result(timeout=scaled_timeout_s(240))

    def end(self) -> int:
        return self.judge.ha_look(self.root)["maxPhy"]

    def close(self) -> dict:
        return self.judge.ha_close(self.root)


@pytest.fixture
def pair(make_engine, judge, tmp_path):
    """pair(mode) -> (our running master, a proxy before it, a real slave that follows through it)."""
    opened = []

    def make(mode: str = "async", **settings):
        engine = make_engine(mode, **OURS, ha_listen_port=free_port(), **settings)
        engine.start()
        proxy = FaultProxy(engine.settings["ha_listen_port"])
        slave = Slave(judge, tmp_path / "slave", proxy.address)
        opened.extend((slave, proxy))
        wait_connected(engine)
        return engine, proxy, slave

    yield make
    for thing in opened:
        if isinstance(thing, FaultProxy):
            thing.close()
    for thing in opened:
        if isinstance(thing, Slave) and thing.root.exists():
            try:
                thing.close()
            except AssertionError:
                pass  # the test has closed it


def connected(engine) -> int:
    with engine.memory() as memory:
        return memory.control.replicator.slaves_connected


def wait_connected(engine) -> None:
    eventually(lambda: connected(engine) == 1, "the slave is connected", 60)


def position(engine, name: str) -> int:
    with engine.memory() as memory:
        return native.load_position(getattr(memory.control, name))


def wait_unconfirmed(engine) -> None:
    eventually(lambda: position(engine, "committed") > position(engine, "confirm"), "a put waits for the slave")


def wait_same_end(engine, slave) -> int:
    eventually(lambda: slave.end() == position(engine, "committed"), "the slave has everything", 60)
    return slave.end()


def assert_same_logs(engine, slave, end: int, start: int = 0) -> None:
    ours, theirs = log_bytes(engine.root, start, end), log_bytes(slave.root, start, end)
    assert len(ours) == end - start
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    assert ours == theirs, f"they differ from {start + at} on"


@pytest.mark.parametrize("mode", ["async", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("sync", "pool"))])
def test_a_real_slave_follows_and_acknowledges(pair, mode, rng):
    engine, _, slave = pair(mode)
    bodies = []
    with pyengine.connect(engine.root) as producer:
        for number in range(60):
            bodies.append(rng.randbytes(rng.randrange(6000)))
            result = producer.put("Ha", bodies[-1], queue_id=number % 2, keys=f"k{number}", tags="t")
            assert result.status is PutStatus.PUT_OK, result
            if number % 10 == 0:
                assert slave.end() >= result.physical_offset + result.size_bytes, "confirmed before the slave had it"
        assert producer.put_many("Ha", bodies[:20], queue_id=2).status is PutStatus.PUT_OK
    end = wait_same_end(engine, slave)
    assert end > 3 * 65536
    assert position(engine, "confirm") == end
    assert engine.stop()
    facts = slave.close()["facts"]
    assert_same_logs(engine, slave, end)
    assert {queue["queueId"]: queue["max"] for queue in facts["queues"]} == {0: 30, 1: 30, 2: 20}
    with pyengine.open_store(slave.root) as store:
        found = [message.body for queue_id in range(2) for offset in range(30)
                 for message in store.get_message("Ha", queue_id, offset, max_messages=1).messages]
    assert sorted(found) == sorted(bodies)


@pytest.mark.long
def test_a_confirmed_put_is_in_the_slave_whichever_process_dies(pair, rng):
    engine, proxy, slave = pair()
    load = Load(engine.root, rng)
    for kill in ("replicator", "writer", "cut", "replicator"):
        load.wait_for(20)
        if kill == "cut":
            proxy.cut()
        else:
            incarnation = engine.incarnation(kill)
            engine.kill(kill)
            engine.wait_back(kill, incarnation)
    load.wait_for(20)
    load.stop()
    end = wait_same_end(engine, slave)
    assert engine.stop()
    slave.close()
    assert_same_logs(engine, slave, end)
    assert load.missing_in(log_bytes(slave.root, 0, end), 0) == []
    assert set(load.statuses) <= {"PUT_OK", "FLUSH_SLAVE_TIMEOUT", "SLAVE_NOT_AVAILABLE"}, load.statuses


@pytest.mark.long
def test_a_new_real_slave_gets_the_last_segment(make_engine, judge, tmp_path, rng):
    engine = make_engine("async", **OURS, ha_listen_port=free_port())
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        while position(engine, "committed") < 2 * 65536 + 10_000:
            assert producer.put("Ha", rng.randbytes(5000)).status is PutStatus.SLAVE_NOT_AVAILABLE
    slave = Slave(judge, tmp_path / "slave", f"127.0.0.1:{engine.settings['ha_listen_port']}")
    end = wait_same_end(engine, slave)
    assert judge.ha_look(slave.root)["minPhy"] == 2 * 65536
    assert engine.stop()
    slave.close()
    assert_same_logs(engine, slave, end, 2 * 65536)


@pytest.mark.long
def test_a_real_slave_that_is_ahead_is_not_served_and_confirms_nothing(pair, rng):
    engine, proxy, slave = pair()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("Ha", rng.randbytes(5000)).ok
        wait_same_end(engine, slave)
        engine.kill_all()
        end = slave.end()
    first = min((engine.root / "commitlog").iterdir(), key=lambda path: path.name)
    with first.open("r+b") as file:  # what a power cut took from the master
        file.write(bytes(end))
    for path in (engine.root / "config" / "watermark", engine.root / "config" / "watermark.bak"):
        path.unlink(missing_ok=True)
    engine.settings["ha_cut"] = "any"  # or it would not start over what its slave has confirmed
    engine.start()
    assert position(engine, "committed") == 0 and position(engine, "confirm") == 0
    with engine.memory() as memory, Replication(memory.folder) as links:
        eventually(lambda: "this log ends at 0" in str(links.totals()["last_closed"]), "it was told why", 60)
    assert connected(engine) == 0
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("Ha", b"x").status is PutStatus.SLAVE_NOT_AVAILABLE
    assert position(engine, "confirm") == 0
    assert slave.end() == end


@pytest.mark.long
def test_a_real_slave_and_one_of_ours_confirm_together(pair, make_engine, rng):
    engine, _, slave = pair(min_in_sync_replicas=2, ha_slaves_share_hosts="true")
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("Ha", b"alone").status is PutStatus.SLAVE_NOT_AVAILABLE
        ours = make_engine("async", "ours", **{**OURS, "broker_role": "SLAVE"}, sync_from="first",
                           ha_master_address=f"127.0.0.1:{engine.settings['ha_listen_port']}")
        ours.start()
        eventually(lambda: connected(engine) == 2, "both are connected", 60)
        for number in range(50):
            result = producer.put("Ha", rng.randbytes(rng.randrange(6000)), queue_id=number % 2)
            assert result.status is PutStatus.PUT_OK, result
            end = result.physical_offset + result.size_bytes
            assert position(ours, "wrote") >= end
            if number % 10 == 0:
                assert slave.end() >= end
        ours.kill("replicator", signal.SIGSTOP)
        assert producer.put("Ha", b"one is stopped").status is PutStatus.FLUSH_SLAVE_TIMEOUT
        ours.kill("replicator", signal.SIGCONT)
        eventually(lambda: producer.put("Ha", b"both go on").status is PutStatus.PUT_OK, "confirmed again")
    end = wait_same_end(engine, slave)
    eventually(lambda: position(ours, "wrote") == end, "ours has everything")
    assert engine.stop()
    assert ours.stop()
    slave.close()
    assert_same_logs(engine, slave, end)
    assert_same_logs(engine, ours, end)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_slave_that_is_killed_continues_where_it_stopped(make_engine, tmp_path, rng):
    engine = make_engine("async", **OURS, ha_listen_port=free_port())
    engine.start()
    load = Load(engine.root, rng)
    address = f"127.0.0.1:{engine.settings['ha_listen_port']}"
    try:
        for number in range(3):
            with contextlib.suppress(JudgeFailure), Judge(needs.java_command(), mkdir(tmp_path / f"judge{number}")) as own:
                slave = Slave(own, tmp_path / "slave", address)
                wait_connected(engine)
                load.wait_for(rng.randrange(20, 200))
                if number < 2:
                    own.kill()  # in the middle of what it receives
                    eventually(lambda: connected(engine) == 0, "the master has seen it", 60)
                    continue
                load.stop()
                end = wait_same_end(engine, slave)
                assert engine.stop()
                slave.close()
    finally:
        load.stop()
    assert_same_logs(engine, slave, end)
    assert load.missing_in(log_bytes(slave.root, 0, end), 0) == []


def mkdir(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["async", "sync", "pool"])
def test_long_a_real_slave_through_a_bad_network_and_kills(pair, rng, mode):
    engine, proxy, slave = pair(mode, slave_timeout_ms=20_000)
    load = Load(engine.root, rng)
    bad = Faults(split_bytes_max=3000, delay_s_max=0.002, cut_bytes_mean=200_000)
    for number in range(12):
        proxy.to_slave = proxy.to_master = rng.choice((CLEAN, bad))
        load.wait_for(rng.randrange(10, 60))
        what = rng.choice(("replicator", "writer", "everything", "cut", "hold", "stop", "slave"))
        if what == "cut":
            proxy.cut(reset=rng.random() < 0.5)
        elif what == "hold":
            proxy.hold()
            wait_unconfirmed(engine)
            proxy.release()
        elif what == "everything":
            engine.kill_all()
            engine.start()
        elif what == "stop":
            pid = engine.kill("replicator", signal.SIGSTOP)
            wait_unconfirmed(engine)
            os.kill(pid, signal.SIGCONT)
        elif what == "slave":
            slave.close()
            slave.open()
        else:
            incarnation = engine.incarnation(what)
            engine.kill(what)
            engine.wait_back(what, incarnation)
    proxy.to_slave = proxy.to_master = CLEAN
    load.wait_for(10)
    load.stop()
    end = wait_same_end(engine, slave)
    assert engine.stop()
    slave.close()
    assert_same_logs(engine, slave, end)
    assert load.missing_in(log_bytes(slave.root, 0, end), 0) == []
