"""A slave engine and its master: equal logs after every fault, and no report beyond what the slave has."""

from __future__ import annotations

import os
import random
import signal
import socket

import pytest

import pyengine
from logs import LogBuilder
from pyengine.errors import EngineError
from pyengine.ipc.replication import Replication
from pyengine.native import control as native
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.replication_state import ReplicationStateFile
from scripted_master import OURS, ROCKETMQ, ScriptedMaster
from waiting import eventually

SEGMENT = 1 << 16
QUICK = {"mapped_file_size_commit_log_bytes": SEGMENT, "ha_send_heartbeat_interval_ms": 100}


class Growing:
    """A log that grows with random records; equal seeds give equal logs."""

    def __init__(self, seed, first_offset=0):
        self.log = LogBuilder(SEGMENT, first_offset)
        self.rng = random.Random(seed)

    def more(self, records):
        self.log.append_varied(self.rng, records, ("A", "topic-1", "T"))
        return self.content

    @property
    def content(self):
        return b"".join(bytes(each) for each in self.log.segments)[: self.log.end - self.log.first_offset]

    @property
    def boundaries(self):
        return ({message.physical_offset for message in self.log.messages} | {self.log.end, 1}
                | {message.physical_offset + message.size_bytes for message in self.log.messages}
                | set(range(0, self.log.end, SEGMENT)))


@pytest.fixture
def scripted():
    """scripted(content, manner, **named) -> a running ScriptedMaster."""
    running = []

    def make(content=b"", manner=ROCKETMQ, **named):
        running.append(ScriptedMaster(content, SEGMENT, manner, **named))
        return running[-1]

    yield make
    for each in running:
        each.close()


def slave_of(make_engine, master, mode="async", **settings):
    return make_engine(mode, **{**QUICK, "broker_role": "SLAVE", "ha_master_address": master.address, "sync_from": "first",
                                **settings})


def log_of(root, end):
    """The bytes of the log's files up to `end`."""
    files = sorted((root / "commitlog").iterdir())
    start = int(files[0].name)
    return b"".join(path.read_bytes() for path in files)[: end - start]


def wait_equal(slave, master):
    def reached():
        with slave.memory() as memory:
            return min(native.load_position(memory.control.reput_from), native.load_position(memory.control.committed),
                       native.load_position(memory.control.confirm)) == master.end and master.last_report == master.end
    eventually(reached, f"the slave has all up to {master.end} and has reported it", 60)
    assert log_of(slave.root, master.end) == master.content


def grow(master, source, records):
    """Replace the master's content in one step, so that a frame may cross the old end."""
    master.content[:] = source.more(records)


def assert_whole(slave):
    assert slave.stop()
    report = check(MessageStore(slave.root, load_config(slave.root, {}).geometry))
    assert report.exit_code == 0 and not report.findings, report.sentence


@pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.ci), "kill"])
def test_messages_of_a_master_whose_clock_was_set_back_are_found_by_their_times(make_engine, scripted, rng, end):
    """A segment with later messages than the next one was left out, during the run and after it."""
    source = Growing(rng.randrange(1 << 30))
    master = scripted(source.more(40))
    slave = slave_of(make_engine, master)
    slave.start()
    eventually(lambda: (found := read_watermark(slave.root).watermark) and found.flushed == master.end, "there is a watermark")
    if end == "kill":
        slave.suspend("checkpointer")
    later_ms = max(message.store_timestamp_ms for message in source.log.messages) + 3_600_000
    source.log.append(store_timestamp_ms=later_ms)
    while source.log.end < 4 * SEGMENT:
        source.more(40)
    master.content[:] = source.content
    wait_equal(slave, master)

    def found():
        with pyengine.open_store(slave.root) as store:
            return sum(batch.num_rows for batch in store.scan(columns=["size"], since=later_ms))

    if end == "kill":
        slave.kill_all()
        slave.start()
    eventually(lambda: read_watermark(slave.root).watermark.flushed == master.end, "all of the log is noted as durable")
    assert found() == 1
    assert slave.stop()
    assert found() == 1


@pytest.mark.parametrize("mode, ack_level", [pytest.param("async", "written", marks=pytest.mark.ci), ("sync", "flushed")])
def test_each_record_is_reported_and_a_damaged_one_is_not(make_engine, scripted, rng, mode, ack_level):
    source = Growing(rng.random())
    spoil = []

    def spoiling(master, connected, offset, body):
        hit = next((message for message in source.log.messages if len(message.body) > 40
                    and offset <= message.physical_offset and message.physical_offset + 160 < offset + len(body)), None)
        if not spoil or hit is None:
            return False
        spoil.pop()
        wrong = bytearray(body)
        wrong[hit.physical_offset - offset + 130] ^= 4  # inside the body, whatever the hosts' lengths
        connected.sendall(offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + wrong)
        return True

    master = scripted(source.more(5), OURS, frame_bytes=30_000, script=spoiling)
    slave = slave_of(make_engine, master, mode, ack_level=ack_level)
    slave.start()
    wait_equal(slave, master)
    number = 0
    while master.end < SEGMENT + 5000:
        number += 1
        if number in (20, 50):
            spoil.append(number)
        grow(master, source, rng.randrange(1, 6))
        eventually(lambda: master.last_report == master.end, "what came is reported at once", 60)
    assert set(reports := [report for each in master.reports for report in each]) <= source.boundaries
    assert len(set(reports)) > number and not spoil
    wait_equal(slave, master)
    assert_whole(slave)


@pytest.mark.parametrize("mode", ["async", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("sync", "pool"))])
def test_a_slave_follows_through_closed_links_corruption_and_kills(make_engine, scripted, rng, mode):
    source = Growing(rng.random())
    breaks = {"left": 0, "corrupt": 0}

    def breaking(master, connected, offset, body):
        if breaks["left"] and rng.random() < 0.2:
            breaks["left"] -= 1
            connected.sendall(offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + body[: rng.randrange(len(body))])
            connected.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if breaks["corrupt"]:
            hit = next((message for message in source.log.messages if len(message.body) > 40
                        and offset <= message.physical_offset and message.physical_offset + 160 < offset + len(body)), None)
            if hit is not None:
                breaks["corrupt"] -= 1
                wrong = bytearray(body)
                wrong[hit.physical_offset - offset + 130] ^= 4  # inside the body, whatever the hosts' lengths
                connected.sendall(offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + wrong)
                return True
        return False

    master = scripted(source.more(300), frame_bytes=3000, script=breaking)
    slave = slave_of(make_engine, master, mode, ha_compare_bytes=5000)
    slave.start()
    wait_equal(slave, master)
    assert master.end > 1.5 * SEGMENT / 2
    breaks["left"] = 3
    grow(master, source, 400)
    wait_equal(slave, master)
    breaks["left"] = 0
    for kind in ("replicator", "writer"):
        grow(master, source, 100)
        incarnation = slave.incarnation(kind)
        slave.kill(kind)
        grow(master, source, 200)
        wait_equal(slave, master)
        slave.wait_back(kind, incarnation)
    breaks["corrupt"] = 1
    grow(master, source, 200)
    wait_equal(slave, master)
    assert breaks["corrupt"] == 0 and "are not a record" in slave.log()
    grow(master, source, 100)
    slave.kill_all()
    grow(master, source, 100)
    slave.start()
    wait_equal(slave, master)
    for connection in master.reports:
        assert connection == sorted(connection), "a report went back"
        assert set(connection) <= source.boundaries, "a report that is not a boundary between records"
    assert_whole(slave)
    assert ReplicationStateFile(slave.root).read().state.confirm == master.end


def test_a_slave_reports_only_flushed_bytes_and_skips_none_on_a_full_disk(make_engine, scripted, rng):
    source = Growing(rng.random())
    master = scripted(source.more(100), OURS)
    slave = slave_of(make_engine, master, ack_level="flushed", flush_interval_commit_log_ms=20)
    slave.start()
    wait_equal(slave, master)
    with slave.memory(writable=True) as memory:
        control = memory.control
        os.kill(slave.pid("flusher"), signal.SIGSTOP)
        grow(master, source, 100)
        eventually(lambda: native.load_position(control.wrote) == master.end, "all is written")
        flushed = native.load_position(control.flushed)
        count = len(master.reports[-1])
        eventually(lambda: len(master.reports[-1]) > count + 2, "heartbeats of the slave")
        assert flushed < master.end and master.last_report <= flushed
        assert native.load_position(control.confirm) <= flushed
        os.kill(slave.pid("flusher"), signal.SIGCONT)
        wait_equal(slave, master)

        os.kill(slave.pid("cleaner"), signal.SIGSTOP)  # it would find that there is room
        native.refuse_puts(control, native.REFUSE_DISK_FULL)
        before = master.end
        grow(master, source, 100)
        eventually(lambda: native.load_position(control.received) == master.end, "all is received")
        count = len(master.reports[-1])
        eventually(lambda: len(master.reports[-1]) > count + 2, "heartbeats of the slave")
        assert master.last_report == before == native.load_position(control.wrote)
        with Replication(memory.folder) as replication:
            (link,) = replication.links()
            assert "disk is too full" in link["detail"] and link["state"] == "transfer"
        os.kill(slave.pid("cleaner"), signal.SIGCONT)
        native.refuse_puts(control, native.REFUSE_DISK_FULL, on=False)
        wait_equal(slave, master)
        assert len(master.reports) == 2, "the connection was never closed (the first one was the start's)"

        before = master.end
        native.freeze(control, native.FLUSHER, 5, "a disk that fails")
        grow(master, source, 100)
        count = len(master.reports[-1])
        eventually(lambda: len(master.reports[-1]) > count + 2, "heartbeats of the slave")
        assert master.last_report == before == native.load_position(control.wrote)
        assert native.load_position(control.confirm) == before


@pytest.mark.long
def test_a_slave_ahead_of_its_master_says_so_and_cuts_confirmed_records_only_with_ha_cut_any(make_engine, scripted, rng):
    seed = rng.random()
    source, other = Growing(seed), Growing(seed)
    boundary = len(other.more(150))
    other.rng = rng  # from here on it is another log
    master = scripted(source.more(200), ROCKETMQ)
    slave = slave_of(make_engine, master)
    slave.start()
    wait_equal(slave, master)
    whole = bytes(master.content)
    assert whole[:boundary] == other.content
    master.content[:] = other.content
    master.drop()
    eventually(lambda: f"ends at {boundary}" in slave.log() and "promote this slave" in slave.log(), "it says what is wrong")
    with slave.memory() as memory:
        assert native.load_position(memory.control.wrote) == len(whole) and not native.load(memory.control.replicator, "linked")
    assert slave.stop()
    with pytest.raises(EngineError, match="ha_cut=any"):
        slave.start()
    assert log_of(slave.root, len(whole)) == whole and not (slave.root / "quarantine").exists()
    slave.start(ha_cut="any")
    wait_equal(slave, master)
    (kept,) = [path for path in (slave.root / "quarantine").iterdir() if path.suffix != ".json"]
    assert kept.read_bytes().rstrip(b"\0") == whole[boundary:].rstrip(b"\0")
    grow(master, other, 50)
    wait_equal(slave, master)
    assert_whole(slave)


def test_a_new_slave_whose_master_is_away_does_not_start(make_engine, scripted):
    master = scripted()
    master.close()
    slave = slave_of(make_engine, master, ha_housekeeping_interval_ms=300)
    with pytest.raises(EngineError, match="where to begin"):
        slave.start()
    assert "waiting up to 0.9 s for the master" in slave.log()


@pytest.mark.long
@pytest.mark.parametrize("manner", [ROCKETMQ, OURS])
def test_a_slave_follows_a_master_that_has_deleted_the_bytes_to_compare(make_engine, scripted, rng, manner):
    source = Growing(rng.random())
    master = scripted(source.more(520), manner)
    assert 1.1 * SEGMENT < master.end < 2 * SEGMENT
    slave = slave_of(make_engine, master)
    slave.start()
    wait_equal(slave, master)
    del master.content[:SEGMENT]
    master.min_offset = SEGMENT
    master.drop()
    source.more(100)
    master.content[:] = source.content[SEGMENT:]
    with slave.memory() as memory:
        eventually(lambda: native.load_position(memory.control.reput_from) == master.end == master.last_report, "it follows")
    assert log_of(slave.root, master.end) == source.content
    assert_whole(slave)


@pytest.mark.long
def test_a_new_slave_killed_after_its_first_segment_begins_there_again(make_engine, scripted, rng, monkeypatch):
    source = Growing(rng.random())
    master = scripted(source.more(700))
    origin = master.end - master.end % SEGMENT
    assert origin > 0
    slave = slave_of(make_engine, master, sync_from="last")
    monkeypatch.setenv(VARIABLE, "origin_made@supervisor:1:kill")
    with pytest.raises(EngineError):
        slave.start()
    assert [path.name for path in (slave.root / "commitlog").iterdir()] == [f"{origin:020d}"]
    monkeypatch.delenv(VARIABLE)
    slave.start()
    with slave.memory() as memory:
        eventually(lambda: native.load_position(memory.control.reput_from) == master.end == master.last_report, "it follows")
        assert native.load_position(memory.control.min_offset) == origin
    assert log_of(slave.root, master.end) == master.content[origin:]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync", "pool"])
def test_a_new_slave_killed_before_its_first_byte_keeps_its_origin(make_engine, scripted, rng, mode):
    source = Growing(rng.random())

    def heartbeats_only(master, connected, offset, body):
        connected.sendall(offset.to_bytes(8, "big") + bytes(4))
        raise ConnectionResetError

    master = scripted(source.more(700), script=heartbeats_only)
    origin = master.end - master.end % SEGMENT
    assert origin > 0
    slave = slave_of(make_engine, master, mode, sync_from="last")
    for stop in (slave.kill_all, slave.stop, slave.kill_all):
        slave.start()
        assert slave.positions()["wrote"] == origin
        stop()
    master.script = None
    slave.start()
    with slave.memory() as memory:
        eventually(lambda: native.load_position(memory.control.reput_from) == master.end == master.last_report, "it follows")
        assert native.load_position(memory.control.min_offset) == origin
    assert log_of(slave.root, master.end) == master.content[origin:]
    assert_whole(slave)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "sync", "pool"])
def test_a_storm_of_kills_and_stops_leaves_an_equal_log(make_engine, scripted, rng, mode):
    source = Growing(rng.random())

    def breaking(master, connected, offset, body):
        if rng.random() < 0.01:
            connected.sendall(offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + body[: rng.randrange(len(body))])
            raise ConnectionResetError
        return False

    master = scripted(source.more(100), frame_bytes=2000, script=breaking)
    slave = slave_of(make_engine, master, mode, ha_compare_bytes=20_000)
    slave.start()
    kinds = [kind for kind in slave.pids() if kind != "supervisor"]
    for _ in range(40):
        grow(master, source, 60)
        what = rng.choice([*kinds, "replicator", "replicator", "writer", "all", "stop"])
        if what == "all":
            slave.kill_all()
            slave.start()
        elif what == "stop":
            pid = slave.pid("replicator")
            os.kill(pid, signal.SIGSTOP)
            grow(master, source, 60)
            os.kill(pid, signal.SIGCONT)
        else:
            incarnation = slave.incarnation(what)
            slave.kill(what)
            slave.wait_back(what, incarnation)
    wait_equal(slave, master)
    assert all(connection == sorted(connection) for connection in master.reports)
    assert_whole(slave)
