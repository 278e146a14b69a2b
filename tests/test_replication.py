"""Pairs of engines: what a put of a master waits for, who sees what when, and a master that is lost and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

import pyengine
from crash.replicas import free_port
from fix_cli import run
from fix_golden import usual
from fix_slave import secret_file
from ha_proxy import CLEAN, FaultProxy, Faults
from pyengine.native import control as native
from pyengine.results import PutStatus
from pyengine.storage.commit_log import list_log
from pyengine.storage.config import config_path, read_file
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from waiting import eventually

SEGMENT_BYTES = 1 << 20


def has_listener(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Pair:
    """A master and a slave, not started; with the same secret, or without any."""

    def __init__(self, make_engine, *, master_mode: str = "async", slave_mode: str = "async", role: str = "SYNC_MASTER",
                 has_secret: bool = True, slave: dict | None = None, **master: object) -> None:
        self.port = free_port()
        self.master = make_engine(master_mode, "master", broker_role=role, ha_listen_port=self.port, slave_timeout_ms=20_000,
                                  **master)
        self.secret = secret_file(self.master.root.parent) if has_secret else ""
        self.master.settings |= {"ha_secret_file": self.secret} if has_secret else {"ha_allow_plain": "127.0.0.1"}
        self.slave = make_engine(slave_mode, "slave", broker_role="SLAVE", ha_master_address=f"127.0.0.1:{self.port}",
                                 ha_secret_file=self.secret, **(slave or {}))

    def start(self) -> Pair:
        self.master.start()
        self.slave.start()
        self.wait_linked()
        return self

    def wait_linked(self) -> None:
        with self.master.memory() as memory, self.slave.memory() as other:
            eventually(lambda: native.load(memory.control.replicator, "slaves_connected") == 1
                       and native.load(other.control.replicator, "linked") == 1, "the slave follows")

    def wait_equal(self) -> int:
        """Wait until the slave has what its master has, and both show it; return the end of both logs."""
        def ends() -> list[int]:
            return [one.positions()[name] for one, name in
                    ((self.master, "wrote"), (self.master, "reput_from"), (self.slave, "wrote"), (self.slave, "reput_from"))]
        return eventually(lambda: ends()[0] if len(set(ends())) == 1 else 0, "both end at the same place")


def put(root: Path, *bodies: bytes) -> list[PutStatus]:
    with pyengine.connect(root, refusals="return") as producer:
        return [producer.put("T", body, keys=body.decode()).status for body in bodies]


def bodies(root: Path, level: str | None = None) -> list[bytes]:
    """Return the bodies that its queue serves."""
    with pyengine.open_store(root) as store:
        return [message.body for message in store.get_message("T", 0, 0, level=level).messages]


def log_of(root: Path, end: int) -> bytes:
    return b"".join(segment.path.read_bytes() for segment in list_log(root, SEGMENT_BYTES))[:end]


def position(one, name: str) -> int:
    with one.memory() as memory:
        return native.load_position(getattr(memory.control, name))


def test_a_message_acknowledged_by_a_sync_master_can_be_read_on_its_slave(make_engine):
    pair = Pair(make_engine).start()
    assert put(pair.master.root, b"one", b"two") == [PutStatus.PUT_OK] * 2
    end = position(pair.master, "wrote")
    assert position(pair.master, "confirm") == end == position(pair.slave, "wrote"), "before the put returned"
    assert pair.wait_equal() == end
    eventually(lambda: position(pair.slave, "confirm") == end, "noted by the slave itself, after it has reported")
    eventually(lambda: position(pair.slave, "reput_from") == position(pair.master, "reput_from") == end, "both have dispatched")
    assert bodies(pair.slave.root) == bodies(pair.slave.root, "replicated") == bodies(pair.master.root, "replicated") == [
        b"one", b"two"]
    with pyengine.open_store(pair.slave.root) as store:
        assert [found.body for found in store.query_message("T", "two")] == [b"two"]
    with pyengine.connect(pair.slave.root, refusals="return") as producer:
        refused = producer.put("T", b"three")
        assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE
    for one, told in ((pair.master, "1 connected, 0 B not confirmed"), (pair.slave, f"linked, its log ends at {end:,}, lag 0 B")):
        eventually(lambda: told in run("status", one.root).stdout, told)
    pair.slave.stop()
    pair.master.stop()
    assert log_of(pair.slave.root, end) == log_of(pair.master.root, end)
    for root in (pair.master.root, pair.slave.root):
        assert run("check", root).code == 0
    stopped = run("status", pair.slave.root, "--json").document
    assert (stopped["replication"]["role"], stopped["positions"]["confirm"]) == ("SLAVE", end)


def test_diff_of_a_slave_behind_its_master_reports_the_lag_and_no_difference(make_engine):
    pair = Pair(make_engine, role="ASYNC_MASTER").start()
    put(pair.master.root, b"one", b"two")
    end = pair.wait_equal()
    both = pair.master.root, pair.slave.root
    equal = run("diff", *both, "--json")
    assert (equal.code, equal.document["lag_bytes"], equal.document["records"]["equal"], equal.document["end"]) == (0, 0, 2, end)
    pair.slave.stop()
    put(pair.master.root, b"three")
    eventually(lambda: position(pair.master, "reput_from") == position(pair.master, "wrote"), "it is dispatched")
    behind = run("diff", *both, "--json")
    assert (behind.code, behind.document["is_equal"], behind.document["queues"]) == (0, True, [])
    assert behind.document["lag_bytes"] == position(pair.master, "wrote") - end > 0
    assert "The log of OTHER ends" in run("diff", *both).stdout and "The log of STORE ends" in run("diff", *reversed(both)).stdout
    pair.master.stop()


HAS_SECRET = pytest.mark.parametrize("has_secret", usual([True, False], [True], pytest.mark.ci), ids=["secret", "address"])


@HAS_SECRET
def test_bytes_changed_between_master_and_slave_are_not_used(make_engine, rng, has_secret):
    pair = Pair(make_engine, has_secret=has_secret)
    with FaultProxy(pair.port, seed=rng.randrange(1 << 30)) as proxy:
        pair.slave.settings["ha_master_address"] = proxy.address
        pair.start()
        proxy.to_slave = Faults(corrupt_bytes_mean=60_000)
        proxy.to_master = Faults(corrupt_bytes_mean=400)
        with pyengine.connect(pair.master.root, refusals="return") as producer:
            for _ in range(8):
                assert producer.put_many("T", [rng.randbytes(2000) for _ in range(30)]).stored
        eventually(lambda: proxy.done["corrupt"] >= 3, "bits were flipped")
        proxy.to_slave = proxy.to_master = CLEAN
        end = pair.wait_equal()
        assert "its seal does not fit" in pair.master.log() + pair.slave.log()
    pair.slave.stop()
    pair.master.stop()
    assert log_of(pair.slave.root, end) == log_of(pair.master.root, end)


@HAS_SECRET
def test_a_bit_that_flips_where_a_record_has_no_checksum_is_seen_before_it_is_acknowledged(make_engine, has_secret):
    pair = Pair(make_engine, has_secret=has_secret)
    with FaultProxy(pair.port) as proxy:
        pair.slave.settings["ha_master_address"] = proxy.address
        pair.start()
        before = proxy.done["connections"]
        proxy.to_slave = Faults(flip_in=b"a-key-of-the-message")
        (status,) = put(pair.master.root, b"a-key-of-the-message")
        assert status in (PutStatus.PUT_OK, PutStatus.SLAVE_NOT_AVAILABLE), "by the second try, or told that there is no slave just now"
        assert proxy.done["flip"] == 1 and proxy.done["connections"] > before
        end = pair.wait_equal()
        eventually(lambda: position(pair.master, "confirm") == end, "the second try is confirmed")
        assert "a frame did not come as it was sent: its seal does not fit" in pair.slave.log()
        assert "follows from" in pair.slave.log() and "no checksum" not in pair.slave.log()
    with pyengine.open_store(pair.slave.root) as store:
        assert [found.body for found in store.query_message("T", "a-key-of-the-message")] == [b"a-key-of-the-message"]
    pair.slave.stop()
    pair.master.stop()
    assert log_of(pair.slave.root, end) == log_of(pair.master.root, end)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_queues_of_a_bounded_master_end_at_confirmed_messages_through_stops_and_kills(make_engine):
    pair = Pair(make_engine, dispatch_at="replicated")
    pair.master.start()
    assert put(pair.master.root, b"one", b"two") == [PutStatus.SLAVE_NOT_AVAILABLE] * 2
    assert bodies(pair.master.root) == []
    pair.master.kill_all()
    assert bodies(pair.master.root) == [], "nor from the files alone"
    pair.master.start()
    assert bodies(pair.master.root) == [], "recovery has dispatched them where no reader sees them"
    pair.slave.start()
    with pyengine.open_store(pair.master.root) as store:
        assert store.wait_for_message("T", 0, 1, timeout_s=30), "consumers are woken by the slave's report"
    pair.wait_linked()
    assert put(pair.master.root, b"three") == [PutStatus.PUT_OK]
    pair.slave.stop()
    eventually(lambda: put(pair.master.root, b"four") == [PutStatus.SLAVE_NOT_AVAILABLE], "the master knows that it is alone")
    assert bodies(pair.master.root) == [b"one", b"two", b"three"]
    pair.master.stop()
    assert not (pair.master.root / "abort").exists() and run("check", pair.master.root).code == 0
    assert bodies(pair.master.root) == [b"one", b"two", b"three"]
    pair.master.start()
    assert bodies(pair.master.root) == [b"one", b"two", b"three"] == bodies(pair.master.root, "replicated")


def test_a_lost_master_returns_as_the_slave_of_the_one_that_was_promoted(make_engine):
    pair = Pair(make_engine).start()
    assert put(pair.master.root, b"one") == [PutStatus.PUT_OK]
    confirmed = pair.wait_equal()
    pair.slave.stop()
    eventually(lambda: put(pair.master.root, b"for nobody") == [PutStatus.SLAVE_NOT_AVAILABLE], "the master is alone")
    lost_end = position(pair.master, "wrote")
    pair.slave.settings["ha_master_address"] = f"127.0.0.1:{free_port()}"  # it does not get what came meanwhile
    pair.slave.start()
    pair.master.kill_all()
    promoted = run("promote", pair.slave.root, "--role", "SYNC_MASTER", "--json", "--set", f"ha_listen_port={pair.port}")
    assert promoted.code == 0, promoted
    with pair.slave.memory() as memory:
        pair.slave.semaphores.add(memory.identity.sysv_semaphore_id)
    assert (promoted.document["end"], promoted.document["was_linked"], promoted.document["missing_bytes"]) == (confirmed, False, 0)
    old, new = pair.master, pair.slave
    old.settings |= {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{pair.port}", "ha_listen_port": 0}
    old.start()
    assert f"ends at {confirmed}, this one at {lost_end}" in old.log()
    pieces = [path for path in (old.root / "quarantine").rglob("*") if path.is_file()]
    assert any(b"for nobody" in path.read_bytes() for path in pieces), "what was cut is kept"
    with new.memory() as memory:
        eventually(lambda: native.load(memory.control.replicator, "slaves_connected") == 1, "the old one follows the new one")
    assert put(new.root, b"two") == [PutStatus.PUT_OK]
    end = position(new, "wrote")
    assert position(old, "wrote") == end
    eventually(lambda: bodies(old.root) == [b"one", b"two"], "the old one serves the new one's messages")
    old.stop()
    new.stop()
    assert log_of(old.root, end) == log_of(new.root, end)
    assert run("check", old.root).code == 0


def promote(slave, *words: str) -> list[str]:
    """Promote a slave; return the notes."""
    done = run("promote", slave.root, "--json", *words)
    assert done.code == 0, done
    with slave.memory() as memory:
        slave.semaphores.add(memory.identity.sysv_semaphore_id)
    return done.document["notes"]


@pytest.mark.timeout(300)
def test_an_old_master_that_returns_refuses_puts_until_it_is_a_slave(make_engine):
    pair = Pair(make_engine, role="ASYNC_MASTER").start()
    old, new = pair.master, pair.slave
    assert put(old.root, b"one") == [PutStatus.PUT_OK]
    pair.wait_equal()
    kinds = ("supervisor", "replicator", "writer")  # the supervisor first, or it would kill the others
    for kind in kinds:
        os.kill(old.pid(kind), signal.SIGSTOP)
    promote(new, "--set", f"ha_listen_port={(port := free_port())}")
    assert put(new.root, b"of the new one") == [PutStatus.PUT_OK]
    for kind in reversed(kinds):
        os.kill(old.pid(kind), signal.SIGCONT)
    eventually(lambda: put(old.root, b"of the old one") == [PutStatus.SERVICE_NOT_AVAILABLE], "it knows the other")
    with pyengine.connect(old.root, refusals="return") as producer:
        assert "a master of a higher term has taken this store's place" in producer.put("T", b"x").reason

    def noted() -> dict[str, object] | None:
        """Puts are refused at once; the file that says why for the next start follows."""
        found = run("status", old.root, "--json").document
        return found if found["replication"]["fenced_by"] else None

    shown = eventually(noted, "the other's term is noted")
    assert (shown["verdict"], shown["takes_puts"], shown["replication"]["term"], shown["replication"]["fenced_by"]) == (
        "read-only", False, 0, 1)
    old.kill_all()
    new.stop()
    old.start()
    assert put(old.root, b"again") == [PutStatus.SERVICE_NOT_AVAILABLE], "it remembers, although it is alone"
    refused = run("promote", old.root, "--force")
    assert refused.code == 1 and "is a master already" in refused.stderr and "first `pyengine stop" in refused.stderr, refused
    waited = run("wait", old.root, "--timeout", 3600)
    assert waited.code == 1 and "a master of a higher term has taken this store's place" in waited.stderr, waited
    old.stop()
    new.settings |= {"broker_role": "ASYNC_MASTER", "ha_listen_port": port, "ha_master_address": ""}
    new.start()
    old.settings |= {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{port}", "ha_listen_port": 0}
    old.start()
    with new.memory() as memory:
        eventually(lambda: native.load(memory.control.replicator, "slaves_connected") == 1, "it follows the new one")
    assert put(new.root, b"two") == [PutStatus.PUT_OK]
    eventually(lambda: bodies(old.root) == [b"one", b"of the new one", b"two"], "and has what that one has")
    old.stop()
    promote_stopped = run("promote", old.root, "--json")
    assert promote_stopped.code == 0 and run("status", old.root, "--json").document["replication"]["term"] == 2


def test_a_promoted_slave_continues_with_topics_and_groups(make_engine):
    pair = Pair(make_engine).start()
    TopicConfigs(pair.master.root).create(TopicConfig("T", 2, 2))
    with pyengine.connect(pair.master.root) as producer:
        for number in range(4):
            assert producer.put("T", b"%d" % number, queue_id=number % 2).ok
    with pyengine.consume(pair.master.root, "T", group="billing", from_="first") as consumer:
        read = [message.body for message in consumer.pull(max_messages=2, timeout_s=30)]
        consumer.commit()
    committed = ConsumerOffsets(pair.master.root).read("T", "billing")
    eventually(lambda: ConsumerOffsets(pair.slave.root).read("T", "billing") == committed != {}, "the group is on the slave")
    eventually(lambda: "T" in TopicConfigs(pair.slave.root).read().rows, "and the topic")
    assert TopicConfigs(pair.slave.root).read().rows["T"].read_queue_nums == 2
    pair.wait_equal()
    pair.master.kill_all()
    promote(pair.slave)
    with pyengine.consume(pair.slave.root, "T", group="billing", from_="first") as consumer:
        rest: list[bytes] = []
        while len(rest) < 2:
            rest += [message.body for message in consumer.pull(max_messages=4, timeout_s=30)]
    assert sorted(read + rest) == [b"0", b"1", b"2", b"3"], "what was committed does not come again"


@pytest.mark.parametrize("given", usual([{}, {"sharing": "messages"}], [{}], pytest.mark.ci), ids=["queues", "messages"])
def test_acknowledgements_of_a_former_master_do_not_outlive_a_reset_on_another(make_engine, given):
    """Its own are above the offset that the group has there again when it is promoted: a reset in between has made them void."""
    pair = Pair(make_engine).start()
    first, second, port = pair.master, pair.slave, free_port()

    def consumed(root: Path, count: int, left_open: bytes = b"") -> list[bytes]:
        with pyengine.consume(root, "T", group="g", auto_commit=False, **given) as consumer:
            found = consumer.pull(count, timeout_s=30)
            consumer.ack([message for message in found if message.body != left_open])
        return [message.body for message in found]

    sent = [b"%d" % number for number in range(10)]
    assert put(first.root, *sent) == [PutStatus.PUT_OK] * 10
    assert consumed(first.root, 10, left_open=b"5") == sent
    eventually(lambda: ConsumerOffsets(second.root).read("T", "g") == {0: 5}, "the offset is on the slave")
    first.stop()
    promote(second, "--set", f"ha_listen_port={port}")
    first.settings |= {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{port}", "ha_listen_port": 0}
    first.start()
    assert run("groups", "reset", second.root, "--group", "g", "--topic", "T", "--to", "first").code == 0
    eventually(lambda: ConsumerOffsets(first.root).read("T", "g") == {0: 0}, "the reset is on the slave")
    assert consumed(second.root, 5) == sent[:5]
    eventually(lambda: ConsumerOffsets(first.root).read("T", "g") == {0: 5}, "its offset is where it was")
    second.stop()
    promote(first)
    assert consumed(first.root, 10) == sent[5:]


def test_a_delayed_message_does_not_come_again_after_a_planned_change_of_the_master(make_engine):
    """The last deliveries are noted while the master stops."""
    pair = Pair(make_engine, message_delay_level="1s", flush_delay_offset_interval_ms=3_600_000).start()
    with pyengine.connect(pair.master.root) as producer:
        for number in range(3):
            assert producer.put("T", b"%d" % number, delay_level=1).ok
    eventually(lambda: len(bodies(pair.master.root)) == 3, "they are delivered")
    pair.master.stop()
    noted = DelayOffsets(pair.master.root).read()
    promote(pair.slave)
    assert DelayOffsets(pair.slave.root).read() == noted == ({1: 3}, "")


def test_a_slave_that_lacks_the_messages_of_a_queue_continues_at_its_end_once_it_is_promoted(make_engine):
    """Its log begins at the master's last segment: a queue offset that it used again would be left out on the old master, and by groups."""
    pair = Pair(make_engine, role="ASYNC_MASTER", mapped_file_size_commit_log_bytes=1 << 16,
                slave={"mapped_file_size_commit_log_bytes": 1 << 16})
    old, new = pair.master, pair.slave
    old.start()
    with pyengine.connect(old.root) as producer:
        for number in range(10):
            producer.put("idle", b"%d" % number)
        while producer.put("busy", bytes(1000)).physical_offset < 1 << 16:
            pass
    ConsumerOffsets(old.root).commit("idle", "billing", {0: 10})
    new.start()
    pair.wait_linked()
    assert "the log begins at 65536: what lies before is not here" in new.log()
    assert "; here it begins at 65,536" in run("status", new.root).stdout
    noted = new.root / "config" / "queueEnds.json"
    eventually(noted.exists, "the slave knows where its master's queues ended")
    eventually(lambda: ConsumerOffsets(new.root).read("idle", "billing") == {0: 10}, "and what the group has read")
    old.stop()
    promote(new, "--role", "SYNC_MASTER", "--set", f"ha_listen_port={pair.port}")
    assert not noted.exists() and ConsumerOffsets(new.root).read("idle", "billing") == {0: 10}
    old.settings |= {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{pair.port}", "ha_listen_port": 0}
    old.start()
    with new.memory() as memory:
        eventually(lambda: native.load(memory.control.replicator, "slaves_connected") == 1, "the old one follows the new one")
    with pyengine.connect(new.root) as producer:
        assert [producer.put("idle", b"new %d" % number).queue_offset for number in range(2)] == [10, 11]
    end = position(new, "wrote")
    for one in (old, new):
        eventually(lambda one=one: position(one, "reput_from") == end, "it is dispatched")
        with pyengine.open_store(one.root) as store:
            assert [message.body for message in store.get_message("idle", 0, 10).messages] == [b"new 0", b"new 1"]
        one.stop()
        assert run("check", one.root).code == 0


@pytest.mark.parametrize("given", usual([{}, {"subscribe": "T"}], [{}], pytest.mark.ci), ids=["log", "topics"])
def test_the_checkpoint_of_a_stream_is_continued_on_the_promoted_slave(make_engine, given):
    pytest.importorskip("pyspark")
    from pyspark.sql.types import StructType

    from pyengine.spark.stream import LogStreamReader

    def reader_of(engine) -> LogStreamReader:
        return LogStreamReader(StructType(), {"path": str(engine.root), "startingOffsets": "earliest", "readLevel": "committed", **given})

    pair = Pair(make_engine).start()
    assert put(pair.master.root, b"one", b"two") == [PutStatus.PUT_OK] * 2
    pair.wait_equal()
    reader = reader_of(pair.master)
    end = reader.latestOffset(reader.initialOffset(), None)
    reader.stop()
    pair.master.kill_all()
    promote(pair.slave, "--role", "ASYNC_MASTER")
    assert put(pair.slave.root, b"three") == [PutStatus.PUT_OK]
    reader = reader_of(pair.slave)
    eventually(lambda: reader.latestOffset(end, None) != end, "the stream goes on")
    assert reader.partitions(end, reader.latestOffset(end, None))
    reader.stop()


def test_a_master_that_returns_asks_its_peers_before_its_first_put(make_engine):
    pair = Pair(make_engine, role="ASYNC_MASTER").start()
    old, new, port = pair.master, pair.slave, free_port()
    old.settings["ha_peers"] = f"127.0.0.1:{port}"
    old.kill_all()
    promote(new, "--set", f"ha_listen_port={port}")
    old.start()
    assert put(old.root, b"one") == [PutStatus.SERVICE_NOT_AVAILABLE]
    assert f"127.0.0.1:{port} knows a master of term 1, and this one is of term 0: it takes no puts" in old.log()


def two_slaves_without_their_master(make_engine):
    """Return two slaves of a master that was killed, and their addresses; each has the other's among its peers."""
    ports = [free_port() for _ in range(3)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    pair = Pair(make_engine, role="ASYNC_MASTER")
    both = [make_engine("async", name, broker_role="SLAVE", ha_master_address=f"127.0.0.1:{pair.port}", ha_secret_file=pair.secret,
                        ha_listen_port=port, ha_peers=", ".join(other for other in addresses if other != own))
            for name, port, own in zip(("first", "second"), ports, addresses, strict=False)]
    pair.master.start()
    assert put(pair.master.root, b"one") == [PutStatus.PUT_OK]
    for one in both:
        one.start()
        eventually(lambda one=one: bodies(one.root) == [b"one"], "it has what the master has")
    pair.master.kill_all()
    return *both, addresses


def test_of_two_slaves_promoted_apart_one_takes_puts_and_the_operator_decides(make_engine):
    """Neither has heard of the other, so both have the same term."""
    first, second, addresses = two_slaves_without_their_master(make_engine)
    for one in (first, second):
        promote(one)
        assert put(one.root, b"of one only") == [PutStatus.PUT_OK]
        one.settings |= {"broker_role": "ASYNC_MASTER", "ha_master_address": ""}
        one.stop()
    second.start()
    assert put(second.root, b"alone") == [PutStatus.PUT_OK], "one that meets nobody is refused nothing"
    first.start()
    with pyengine.connect(first.root, refusals="return") as producer:
        refused = producer.put("T", b"x")
    assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE, "before its first put"
    assert "or one of the same term goes on" in refused.reason
    shown = run("status", first.root, "--json").document
    told = f"{addresses[1]} is a master of the same term, so this one takes no puts"
    assert shown["verdict"] == "read-only" and told in shown["reason"] and "`pyengine promote --force`" in shown["reason"], shown
    assert "a copy for a drill" in shown["reason"], "which the force would make the only master"
    assert told in first.log()
    assert put(second.root, b"x") == [PutStatus.PUT_OK], "it goes on"
    first.stop()
    second.stop()
    first.start()
    assert put(first.root, b"x") == [PutStatus.SERVICE_NOT_AVAILABLE], "it remembers, although it is alone"
    first.stop()
    second.start()
    refused = run("promote", first.root)
    assert refused.code == 1 and f"{addresses[1]} is a master of its term too" in refused.stderr, refused
    assert run("promote", first.root, "--force").code == 0
    first.start()
    assert put(first.root, b"decided") == [PutStatus.PUT_OK]
    eventually(lambda: put(second.root, b"x") == [PutStatus.SERVICE_NOT_AVAILABLE], "the other hears of the higher term")
    second.stop()
    second.settings |= {"broker_role": "SLAVE", "ha_master_address": addresses[0], "ha_cut": "any"}
    second.start()
    eventually(lambda: bodies(second.root) == bodies(first.root) == [b"one", b"of one only", b"decided"], "it follows")


def test_a_promoted_slave_that_yields_to_another_is_not_said_to_run(make_engine):
    first, second, addresses = two_slaves_without_their_master(make_engine)
    promote(first)
    done = run("promote", second.root)
    with second.memory() as memory:
        second.semaphores.add(memory.identity.sysv_semaphore_id)
    assert done.code == 6 and "but it takes no puts (pid" in done.stdout, done
    assert f"note: {addresses[0]} is a master of the same term, so this one takes no puts" in done.stdout, done
    assert [put(one.root, b"x") for one in (first, second)] == [[PutStatus.PUT_OK], [PutStatus.SERVICE_NOT_AVAILABLE]]


def test_a_living_master_is_told_of_the_promotion_of_a_slave_that_has_other_peers(make_engine):
    pair = Pair(make_engine, role="ASYNC_MASTER", slave={"ha_peers": (other := f"127.0.0.1:{free_port()}")}).start()
    old, new = pair.master, pair.slave
    assert put(old.root, b"one") == [PutStatus.PUT_OK]
    pair.wait_equal()
    (note,) = promote(new, "--set", f"ha_listen_port={free_port()}")
    assert f"its master was still linked and is told at 127.0.0.1:{pair.port}: make sure" in note
    assert read_file(config_path(new.root))["ha_peers"] == f"127.0.0.1:{pair.port}, {other}"
    eventually(lambda: put(old.root, b"of the old one") == [PutStatus.SERVICE_NOT_AVAILABLE], "it is told")
    assert put(new.root, b"of the new one") == [PutStatus.PUT_OK]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("slave_mode", ["async", "sync"])
@pytest.mark.parametrize("master_mode", ["async", "sync", "pool"])
@pytest.mark.parametrize("ack_level", ["written", "flushed"])
def test_every_write_path_on_either_side_gives_equal_logs(make_engine, master_mode, slave_mode, ack_level, rng):
    pair = Pair(make_engine, master_mode=master_mode, slave_mode=slave_mode, slave={"ack_level": ack_level}).start()
    with pyengine.connect(pair.master.root) as producer:
        for number in range(40):
            made = [rng.randbytes(rng.randrange(1, 4000)) for _ in range(rng.randrange(1, 40))]
            assert producer.put_many(f"T{number % 3}", made, queue_id=number % 2).status is PutStatus.PUT_OK
            confirm = position(pair.master, "confirm")
            if ack_level == "flushed":
                assert position(pair.slave, "flushed") >= confirm, "acknowledged is durable on the slave"
    end = pair.wait_equal()
    assert end > SEGMENT_BYTES, "segments were rolled"
    pair.slave.stop()
    pair.master.stop()
    assert log_of(pair.slave.root, end) == log_of(pair.master.root, end)
    assert run("check", pair.slave.root).code == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_port_that_was_lost_with_its_replicator_costs_slaves_only_and_comes_back(make_engine):
    pair = Pair(make_engine).start()
    supervisor, incarnation = pair.master.pid("supervisor"), pair.master.incarnation("replicator")
    os.kill(supervisor, signal.SIGSTOP)  # or the next one would have it at once
    pair.master.kill("replicator")
    with contextlib.closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: not has_listener(pair.port), "the port is free")
        holder.bind(("127.0.0.1", pair.port))
        holder.listen()
        os.kill(supervisor, signal.SIGCONT)
        pair.master.wait_back("replicator", incarnation)
        eventually(lambda: "cannot listen for slaves" in run("status", pair.master.root).stdout, "status says so")
        assert put(pair.master.root, *[b"%d" % number for number in range(20)]) == [PutStatus.SLAVE_NOT_AVAILABLE] * 20
        assert pair.master.pid("supervisor") == supervisor and pair.master.incarnation("replicator") == incarnation + 1
    pair.wait_linked()
    pair.wait_equal()
    assert put(pair.master.root, b"again") == [PutStatus.PUT_OK]
    eventually(lambda: "cannot listen" not in run("status", pair.master.root).stdout, "nothing is wrong any more")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_replicas_are_waited_for_where_two_are_asked_for(make_engine):
    pair = Pair(make_engine, min_in_sync_replicas=2, ha_slaves_share_hosts="true").start()
    assert put(pair.master.root, b"one") == [PutStatus.SLAVE_NOT_AVAILABLE]
    assert position(pair.master, "confirm") == 0
    second = make_engine("async", "second", broker_role="SLAVE", ha_master_address=f"127.0.0.1:{pair.port}",
                         ha_secret_file=pair.secret)
    second.start()
    with pair.master.memory() as memory:
        eventually(lambda: native.load(memory.control.replicator, "slaves_connected") == 2, "both follow")
    assert put(pair.master.root, b"two") == [PutStatus.PUT_OK]
    end = position(pair.master, "wrote")
    assert [position(one, "wrote") for one in (pair.slave, second)] == [end, end]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_slave_that_is_linked_is_promoted_while_its_master_lives(make_engine):
    pair = Pair(make_engine).start()
    assert put(pair.master.root, b"one") == [PutStatus.PUT_OK]
    end = pair.wait_equal()
    done = run("promote", pair.slave.root, "--json")
    assert done.code == 0, done
    with pair.slave.memory() as memory:
        pair.slave.semaphores.add(memory.identity.sysv_semaphore_id)
    assert (done.document["was_linked"], done.document["end"], done.document["running"]) == (True, end, True)
    assert "takes no puts" in done.document["notes"][0]
    assert put(pair.slave.root, b"two") == [PutStatus.PUT_OK]
    assert bodies(pair.master.root) == [b"one"]


def test_a_slave_whose_store_is_moved_acknowledges_nothing_more_and_goes_on_from_there(make_engine):
    pair = Pair(make_engine).start()
    assert put(pair.master.root, b"one") == [PutStatus.PUT_OK]
    supervisor = psutil.Process(pair.slave.pid("supervisor"))
    root = pair.slave.root
    pair.slave.root = root.rename(root.with_name("moved"))
    eventually(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE, "the slave has ended", timeout_s=60)
    assert "STORE_LOST" in pair.slave.log() and not root.exists() and not (pair.slave.root / "abort").exists()
    eventually(lambda: put(pair.master.root, b"alone") == [PutStatus.SLAVE_NOT_AVAILABLE], "the master says that no slave confirms")
    pair.slave.start()
    pair.wait_linked()
    assert put(pair.master.root, b"both") == [PutStatus.PUT_OK]
    pair.wait_equal()
    assert bodies(pair.slave.root) == bodies(pair.master.root) and bodies(pair.slave.root)[-1] == b"both"
