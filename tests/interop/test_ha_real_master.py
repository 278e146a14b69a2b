"""A pyengine slave follows a real RocketMQ master, byte for byte: through faults, kills, restarts and diverged logs."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading

import pytest

import needs
from crash.replicas import free_port
from fix_cli import run
from fix_replication import log_bytes
from ha_proxy import CLEAN, FaultProxy, Faults
from interop.judge import Judge
from pyengine.errors import EngineError
from pyengine.ipc.live_reader import check_now
from pyengine.native import control as native
from pyengine.storage.check.check import check
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

SEGMENT = 65536
SIZES = {"mappedFileSizeCommitLog": SEGMENT, "mappedFileSizeConsumeQueue": 6000, "maxHashSlotNum": 1000, "maxIndexNum": 4000}
OURS = {"mapped_file_size_commit_log_bytes": SEGMENT, "mapped_file_size_consume_queue_bytes": 6000, "max_hash_slot_num": 1000,
        "max_index_num": 4000, "broker_role": "SLAVE", "sync_from": "first"}
# The master sends a heartbeat each 50 ms, so that the slave notices the end of a link at once.
QUICK = {"haSendHeartbeatInterval": 50}


class Master:
    """A real master, open in a judge."""

    def __init__(self, judge, root, role: str = "ASYNC_MASTER", **settings) -> None:
        self.judge, self.root, self.port = judge, root, free_port()
        self.settings = {**SIZES, **QUICK, "brokerRole": role, "haListenPort": self.port, **settings}
        self.is_open = False
        self.open()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def open(self) -> None:
        self.judge.ha_open(self.root, self.settings).result(timeout=scaled_timeout_s(240))
        self.is_open = True

    def put(self, count: int, seed: int = 1, body_bytes: int = 300) -> dict:
        return self.judge.ha_put(self.root, count, body_bytes=body_bytes, seed=seed).result(timeout=scaled_timeout_s(240))

    def end(self) -> int:
        return self.judge.ha_look(self.root)["maxPhy"]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.judge.ha_close(self.root)


@pytest.fixture
def masters(judge, tmp_path):
    """masters(role="ASYNC_MASTER", judge=..., **settings of RocketMQ) -> a running Master."""
    opened = []

    def make(role="ASYNC_MASTER", judge=judge, **settings):
        opened.append(Master(judge, tmp_path / f"master-{len(opened)}", role, **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def proxies():
    """proxies(port, seed) -> a FaultProxy before that port."""
    made = []

    def make(port, seed=0):
        made.append(FaultProxy(port, seed=seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def slave_of(make_engine, address, mode="async", **settings):
    return make_engine(mode, **{**OURS, "ha_master_address": address, **settings})


def wait_equal(slave, master, timeout_s=60.0):
    """Wait until the slave has stored, dispatched and reported the master's log; compare the bytes."""
    end = master.end()

    def reached():
        with slave.memory() as memory:
            control = memory.control
            return min(native.load_position(position) for position in (control.committed, control.reput_from, control.confirm)) == end
    eventually(reached, f"the slave has everything up to {end}", timeout_s)
    eventually(lambda: master.judge.ha_look(master.root)["pushedToSlave"] == end, "the master knows it")
    with slave.memory() as memory:
        start = native.load_position(memory.control.min_offset)
    assert log_bytes(slave.root, start, end) == log_bytes(master.root, start, end)
    return end


def assert_whole(slave, messages=None):
    assert slave.stop()
    report = check(MessageStore(slave.root, load_config(slave.root, {}).geometry))
    assert report.exit_code == 0 and not report.findings, report.sentence
    if messages is not None:
        assert report.messages == messages == report.queue_entries


@pytest.mark.ci
def test_a_real_sync_master_gets_its_puts_acknowledged_and_a_stopped_slave_resumes(make_engine, masters, judge):
    master = masters("SYNC_MASTER", slaveTimeout=20000)
    slave = slave_of(make_engine, master.address)
    slave.start()
    eventually(lambda: judge.ha_look(master.root)["connections"] >= 1, "the slave is connected")
    told = master.put(700)
    assert told["statuses"] == {"PUT_OK": 700} and told["pushedToSlave"] >= told["okEnd"]
    wait_equal(slave, master)
    incarnation = slave.incarnation("replicator")
    slave.kill("replicator")
    slave.wait_back("replicator", incarnation)
    wait_equal(slave, master)
    assert slave.stop()
    eventually(lambda: judge.ha_look(master.root)["connections"] == 0, "the slave is gone")
    assert master.put(1, seed=2)["statuses"] == {"SLAVE_NOT_AVAILABLE": 1}  # and it is stored
    slave.start()
    assert wait_equal(slave, master) > 3 * SEGMENT
    assert_whole(slave, messages=701)
    facts = judge.verify(slave.root, SIZES).result(timeout=scaled_timeout_s(240))
    assert facts["loadOk"] and facts["facts"]["maxPhy"] == master.end()


@pytest.mark.long
def test_a_new_slave_begins_where_rocketmqs_does(make_engine, masters):
    master = masters()
    master.put(800)
    slave = slave_of(make_engine, master.address, sync_from="last")
    slave.start()
    end = wait_equal(slave, master)
    with slave.memory() as memory:
        assert native.load_position(memory.control.min_offset) == end - end % SEGMENT > 0
    master.put(300, seed=2)
    wait_equal(slave, master)
    assert_whole(slave)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync", "pool"])
def test_a_slave_follows_through_a_bad_network_and_kills_under_load(make_engine, masters, proxies, rng, mode):
    master = masters()
    proxy = proxies(master.port, rng.randrange(1 << 30))
    slave = slave_of(make_engine, proxy.address, mode, ha_compare_bytes=100_000)
    slave.start()
    going, pause = True, threading.Event()

    def load():
        seed = 0
        while going:
            seed += 1
            master.put(50, seed)
            pause.wait(0.05)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for faults in (Faults(split_bytes_max=50), Faults(split_bytes_max=5000, delay_s_max=0.002),
                       Faults(cut_bytes_mean=200_000), Faults(swallow_bytes_mean=300_000, split_bytes_max=3000), CLEAN):
            proxy.to_slave = faults
            for kind in ("replicator", "writer", "all", "stop"):
                with slave.memory() as memory:
                    before = native.load_position(memory.control.wrote)
                if kind == "all":
                    slave.kill_all()
                    slave.start()
                elif kind == "stop":
                    pid = slave.pid("replicator")
                    os.kill(pid, signal.SIGSTOP)
                    proxy.cut()
                    os.kill(pid, signal.SIGCONT)
                else:
                    slave.kill(kind)

                def moved():
                    with slave.memory() as memory:
                        return native.load_position(memory.control.wrote) > before
                eventually(moved, f"bytes come again after {kind} with {faults}", 60)
    finally:
        going = False
        thread.join()
    wait_equal(slave, master)
    assert_whole(slave)


@pytest.mark.long
def test_a_master_killed_under_load_loses_its_tail_and_the_slave_says_so(make_engine, masters, tmp_path, rng):
    """A kill -9 loses nothing of the page cache, so the test restores an older copy of the master's files."""
    with Judge(needs.java_command(), tmp_path) as other:
        master = masters(judge=other)
        slave = slave_of(make_engine, master.address)
        slave.start()
        master.put(300)
        wait_equal(slave, master)
        old = master.end()
        shutil.copytree(master.root, tmp_path / "before")
        master.put(300, seed=2)
        wait_equal(slave, master)
        assert slave.stop()
        other.kill()
        master.is_open = False
    with Judge(needs.java_command(), tmp_path) as third:
        shutil.rmtree(master.root)
        shutil.copytree(tmp_path / "before", master.root)
        master.judge = third
        master.open()
        assert master.end() == old
        with pytest.raises(EngineError, match=f"ends at {old}.*ha_cut=any"):
            slave.start()
        slave.start(ha_cut="any")
        wait_equal(slave, master)
        master.put(200, seed=3)
        wait_equal(slave, master)
        assert slave.stop()
        # The same after another log has grown there.
        master.put(100, seed=4)
        slave.start()
        wait_equal(slave, master)
        master.close()
    assert_whole(slave)


@pytest.mark.long
def test_a_slave_that_diverged_is_cut_to_the_last_common_record(make_engine, masters, rng):
    """An old master that took puts which no slave confirmed comes back as the slave of a real one."""
    import pyengine

    master = masters()
    slave = slave_of(make_engine, master.address)
    slave.start()
    master.put(200)
    common = wait_equal(slave, master)
    assert slave.stop()
    assert run("promote", slave.root).code == 0
    slave.settings = {**slave.settings, "broker_role": "ASYNC_MASTER", "ha_master_address": ""}
    slave.start()
    with pyengine.connect(slave.root) as producer:
        for number in range(100):
            assert producer.put("Lost", random.Random(number).randbytes(700)).physical_offset >= common
    assert slave.stop()
    master.put(250, seed=2)
    slave.settings = {**slave.settings, "broker_role": "SLAVE", "ha_master_address": master.address}
    slave.start()
    assert f"the log was cut at {common}" in slave.log()
    wait_equal(slave, master)
    assert any((slave.root / "quarantine").iterdir())
    assert_whole(slave, messages=450)


@pytest.mark.long
def test_a_slave_below_the_masters_first_segment_is_refused_and_stays_unchanged(make_engine, masters, judge):
    master = masters()
    slave = slave_of(make_engine, master.address)
    slave.start()
    master.put(100)
    end = wait_equal(slave, master)
    assert slave.stop()
    master.put(900, seed=2)
    master.close()
    first = sorted((master.root / "commitlog").iterdir())
    for path in first[:2]:  # what a cleaner would have deleted by age
        path.unlink()
    master.open()
    with pytest.raises(EngineError, match="empty directory"):
        slave.start()
    assert len(log_bytes(slave.root, 0, end)) == end and not (slave.root / "quarantine").exists()


def test_check_beside_a_running_broker_judges_what_it_has_flushed(masters):
    master = masters()
    master.put(50)

    def checked():
        report = check_now(master.root, load_config(master.root, {**SIZES}))
        assert report.exit_code == 0, report.findings
        return report if report.messages == 50 else None

    report = eventually(checked, "the checkpoint of the broker covers all that was put")
    assert [finding.kind for finding in report.findings if finding.severity == "info"][:1] == ["broker"]
    assert report.end_offset == master.end() and report.queue_entries == 50
