"""What `status`, `top` and `dump` say of a master's slaves, of a slave's master, and of a store that stopped."""

from __future__ import annotations

import re
import time

import pytest

from fix_cli import run
from pyengine.cli.engine_status import live_replication
from pyengine.ipc.replication import Replication
from pyengine.native import control as native
from pyengine.native.flush import monotonic_ns
from pyengine.native.replication import LINK_CONNECTING, LINK_HANDSHAKE, LINK_TRANSFER
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

ASYNC_MASTER, SYNC_MASTER, SLAVE = 0, 1, 2


@pytest.fixture
def replicating(make_owner):
    """replicating(role, **identity) -> (owner, its links to fill); the log ends at 4096."""
    opened: list[Replication] = []

    def make(role: int, **identity):
        owner = make_owner(role=role, replicates=1, **identity)
        (owner.root / "commitlog").mkdir()
        owner.position(4096)
        owner.make_rest()
        opened.append(Replication(owner.folder, writable=True))
        owner.publish()
        return owner, opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture(autouse=True)
def short_look(monkeypatch):
    monkeypatch.setattr("pyengine.cli.engine_status.SLAVE_WAIT_S", 0.1)


def status(owner, code: int = 0) -> dict:
    ran = run("status", owner.root, "--json")
    assert ran.code == code, ran
    return ran.document


def test_replication_status_of_a_master_shows_each_slave_and_the_unconfirmed_bytes(replicating):
    owner, links = replicating(SYNC_MASTER, min_in_sync_replicas=2)
    native.store_position(owner.control.confirm, 3000)
    native.store(owner.control.replicator, "slaves_connected", 2)
    links.listening(10912)
    near, far = links.open_link("10.0.0.2:4000", LINK_TRANSFER), links.open_link("10.0.0.3:4001", LINK_TRANSFER)
    near.start(1000)
    near.sent(4096, 3096, 2)
    near.acked(4096)
    near.caught_up(monotonic_ns() - 50 * 10**9)
    far.start(3000)
    far.caught_up(monotonic_ns() - 70 * 10**9)
    gone = links.open_link("10.0.0.4:4002")
    gone.close("the reports went back")
    document = status(owner, code=6)
    assert document["positions"]["confirm"] == 3000 and document["verdict"] == "stuck"
    assert document["summary"].startswith("the slave 10.0.0.3:4001 lags 1096 bytes and acknowledged nothing")
    found = document["replication"]
    assert (found["slaves_connected"], found["min_in_sync_replicas"], found["unconfirmed_bytes"]) == (2, 2, 1096)
    assert (found["linked"], found["master_end"], found["listening_port"], found["dispatch_at"]) == (None, None, 10912, "committed")
    first, second = found["links"]
    assert (first["address"], first["state"], first["start"], first["sent"], first["acked"], first["lag_bytes"]) == (
        "10.0.0.2:4000", "transfer", 1000, 4096, 4096, 0)
    assert first["acked_age_ms"] >= 0 and (first["bytes"], first["frames"]) == (3096, 2)
    assert (second["acked"], second["acked_age_ms"], second["lag_bytes"]) == (-1, None, 1096)
    assert first["lag_s"] == 0 and 70 <= second["lag_s"] < 130
    assert found["last_closed"]["detail"] == "the reports went back" and found["closed"] == 1
    for shown in (run("status", owner.root).stdout, run("top", owner.root, "--count", 1).stdout):
        assert "2 connected, 1.1 KiB not confirmed" in shown and "10.0.0.3:4001" in shown
        assert re.search(r"1.1 KiB, (7|8|9|10|11|12)\d? s", " ".join(shown.split()))


def test_a_slave_that_acknowledges_while_it_is_looked_at_is_no_trouble(replicating, monkeypatch):
    """A busy master is always a little ahead of its slaves."""
    owner, links = replicating(ASYNC_MASTER)
    native.store(owner.control.replicator, "slaves_connected", 1)
    link = links.open_link("10.0.0.2:4000", LINK_TRANSFER)
    link.acked(2000)
    assert status(owner)["verdict"] == "warning"
    monkeypatch.setattr("pyengine.cli.engine_status.SLAVE_WAIT_S", 60)
    monkeypatch.setattr("time.sleep", lambda seconds: link.acked(3000))
    assert status(owner)["verdict"] == "ok"


def test_queues_that_end_at_confirm_are_told(replicating):
    owner, _ = replicating(SYNC_MASTER, dispatch_at=1)
    document = status(owner, code=6)
    assert document["replication"]["dispatch_at"] == "replicated"
    assert (document["verdict"], document["summary"]) == (
        "stuck", "0 of 1 required slaves are connected, so puts answer SLAVE_NOT_AVAILABLE; 4096 bytes are not confirmed")
    assert "0 connected, 4.0 KiB not confirmed, and queues end there" in run("status", owner.root).stdout


def test_a_slave_shows_its_master_and_how_far_it_lags(replicating):
    owner, links = replicating(SLAVE)
    native.refuse_puts(owner.control, native.REFUSE_SLAVE)
    link = links.open_link("10.0.0.1:10912", LINK_HANDSHAKE)
    document = status(owner)
    assert (document["verdict"], document["reason"]) == ("warning", "it compares its log with its master's")
    link.state(LINK_TRANSFER)
    native.store(owner.control.replicator, "linked", 1)
    native.store(owner.control.replicator, "master_end", 5120)
    for slot in owner.control.slots:
        slot.store_timestamp_ms = int(time.time() * 1000) - 40_000
    native.store_position(owner.control.received, 4100)
    document = status(owner)
    found = document["replication"]
    assert (document["role"], document["reason"], found["linked"], found["master_end"], found["received"],
            found["master_lag_bytes"]) == ("SLAVE", "", True, 5120, 4100, 1024)
    assert 40 <= found["master_lag_s"] < 100
    for shown in (run("status", owner.root).stdout, run("top", owner.root, "--count", 1).stdout):
        assert re.search(r"10.0.0.1:10912 linked, its log ends at 5,120, lag 1.0 KiB, [4-9]\d s", shown)


def test_a_slave_without_its_master_says_why(replicating):
    owner, links = replicating(SLAVE)
    links.open_link("10.0.0.1:10912", LINK_CONNECTING).state(LINK_CONNECTING, "10.0.0.1:10912: Connection refused")
    document = status(owner, code=6)
    assert document["verdict"] == "stuck"
    assert document["reason"] == "it is not linked to its master: 10.0.0.1:10912: Connection refused"
    assert document["state"] == "running" and not document["read_only"]
    assert "not linked, end of its log unknown" in run("status", owner.root).stdout


def test_an_engine_without_replication_shows_none(make_owner):
    owner = make_owner(role=SLAVE)
    (owner.root / "commitlog").mkdir()
    owner.publish()
    assert status(owner, code=6)["replication"] is None and live_replication(owner.memory) is None


def test_without_the_shared_object_the_counters_are_shown(make_owner):
    owner = make_owner(role=SYNC_MASTER, replicates=1)
    (owner.root / "commitlog").mkdir()
    owner.publish()
    found = status(owner, code=6)["replication"]  # its names in shared memory are not all there
    assert (found["slaves_connected"], found["links"]) == (0, [])
    assert run("top", owner.root, "--count", 1).code == run("metrics", owner.root, "--once").code == 0


def test_replication_status_of_a_stopped_store_shows_its_noted_state(make_owner):
    owner = make_owner()
    (owner.root / "commitlog").mkdir()
    ReplicationStateFile(owner.root).write(ReplicationState("SLAVE", 700, master_end=900))
    owner.memory.retire()
    owner.lock.close()
    document = status(owner)
    assert document["replication"] == {"role": "SLAVE", "confirm": 700, "dispatch_at": "committed", "master_end": 900, "term": 0,
                                       "fenced_by": 0, "problem": ""}
    assert document["positions"]["confirm"] == 0, "never beyond the log"
    assert document["role"] == "SLAVE", "as it ran last"
    assert run("status", owner.root, "--json", "--set", "broker_role=SYNC_MASTER").document["role"] == "SYNC_MASTER"


def test_the_dump_names_who_writes_each_field(replicating):
    owner, _ = replicating(SYNC_MASTER)
    native.store_position(owner.control.confirm, 3000)
    fields = {one["field"]: one for one in run("dump", "control", owner.root, "--json").document["fields"]}
    for name in ("confirm.value", "received.value", "confirm_seq.value", "replicator.slaves_connected", "replicator.linked",
                 "replicator.master_end"):
        assert fields[name]["owner"] == "replicator", name
    assert fields["confirm.value"]["value"] == 3000
