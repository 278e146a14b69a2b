"""A slave's replicator driven by the test: what it says to its master, and how it leaves."""

from __future__ import annotations

import pytest

from pyengine.ipc import replication
from pyengine.native import control as native
from pyengine.services.replication.ha_client import HAClient
from pyengine.services.replication.ha_stream import LinkLostError
from pyengine.storage.config import EngineConfig
from pyengine.storage.replication_state import ReplicationStateFile
from ready_store import SEGMENT, store_with_writer
from reported import Reported
from scripted_master import OURS, ROCKETMQ, ScriptedMaster
from waiting import eventually

SLAVE = 2


class NoWriter:
    """A session whose writer is never given anything."""

    entry_limit = 8 << 20

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Rig:
    """A slave whose log has what `PlainWriter` put, and its replicator, over a master of the test's."""

    def __init__(self, make_owner, manner, monkeypatch, **settings) -> None:
        self.owner, self.writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, role=SLAVE, replicates=1)
        while self.writer.end < 5000:
            self.writer.put(b"x" * 900)
        replication.create_replication(self.owner.folder)
        native.store(self.owner.control.replicator, "linked", 1)  # of a replicator that was killed
        self.master = ScriptedMaster(bytes(self.writer.log), SEGMENT, manner)
        self.now_ns = 10**12
        self.reported = Reported()
        self.session = NoWriter()
        config = EngineConfig(broker_role="SLAVE", ha_master_address=self.master.address, **settings)

        def begin_session(client):
            client._session = client._writer = self.session

        monkeypatch.setattr(HAClient, "_begin_session", begin_session)
        self.client = HAClient(self.owner.context(config, report=self.reported), lambda ring_bytes: None,
                               replication.Replication(self.owner.folder, writable=True), lambda: self.now_ns)

    def until(self, condition, what) -> None:
        eventually(lambda: self.client.work() and condition(), what)

    @property
    def link(self):
        """The slave's connection; None without one."""
        return self.client._link

    def listen(self) -> list[int]:
        """Return what the slave reports on this connection from now on."""
        reported: list[int] = []
        report = self.link.report
        self.link.report = lambda offset: reported.append(offset) or report(offset)
        return reported

    def follow(self, what: str, offers: int = 0) -> None:
        """Work until the slave has the whole log, on the connection of that number."""
        self.until(lambda: self.master.offers >= offers and self.client._acked == self.writer.end, what)

    @property
    def reports(self) -> list[int]:
        return self.master.reports[-1] if self.master.reports else []

    def close(self) -> None:
        self.client.close()
        self.master.close()


@pytest.fixture
def make_rig(make_owner, monkeypatch):
    rigs = []

    def make(manner=OURS, **settings):
        rigs.append(Rig(make_owner, manner, monkeypatch, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_a_master_that_breaks_off_during_an_orderly_stop_is_no_failure(make_rig):
    rig = make_rig()
    rig.follow("it follows")

    def broken(offset):
        raise LinkLostError("the connection broke: on purpose")

    rig.writer.put(b"one more")
    stream = rig.client._stream
    stream.drop(rig.writer.end)
    stream.position = rig.writer.end
    rig.link.report = broken
    assert rig.client.drain() is False
    assert rig.session.closed and rig.link is None
    assert "on purpose" in rig.reported[-1]


def test_the_successor_of_a_killed_replicator_is_linked_when_it_has_compared_and_not_before(make_rig):
    rig = make_rig()
    linked = native.loader(rig.owner.control.replicator, "linked")
    assert not linked()
    rig.follow("it follows")
    assert linked() and any("follows from" in reported for reported in rig.reported)
    with replication.Replication(rig.owner.folder) as links:
        assert [link["state"] for link in links.links()] == ["transfer"]


@pytest.mark.parametrize("manner", [OURS, ROCKETMQ])
def test_each_connection_offers_seals_and_says_that_it_has_none(make_rig, manner):
    rig = make_rig(manner)
    rig.follow("it follows a master that knows of no seals")
    assert rig.master.offers == 1 and "by RocketMQ's own protocol: what is sent has no checksum" in rig.reported[-1]
    rig.master.drop()
    rig.follow("the next one too", 2)


@pytest.mark.parametrize("answer", [b"\xffpyseal2", b"\xff" * 8])
def test_an_answer_to_the_offer_that_did_not_come_as_it_was_sent_ends_the_connection(make_rig, answer):
    rig = make_rig()
    rig.master.script = lambda master, connected, offset, body: connected.sendall(answer) or True

    def reported() -> bool:
        rig.client.work()
        rig.now_ns += 10**9
        return any("answer to the offer of seals" in line for line in rig.reported)

    eventually(reported, "it is said")
    assert not native.load(rig.owner.control.replicator, "linked")


def test_a_slave_is_known_for_one_from_its_first_moment(make_rig):
    rig = make_rig()
    assert ReplicationStateFile(rig.owner.root).read().state.role == "SLAVE"


def test_a_slave_does_not_report_again_before_the_master_has_sent_a_byte(make_rig):
    rig = make_rig(ROCKETMQ, ha_compare_bytes=2000)
    rig.master.is_silent = True
    rig.until(lambda: rig.reports, "it has reported")
    (begin,) = rig.reports
    assert begin < rig.writer.end
    waits, reported = [], rig.listen()
    wait = rig.link.wait
    rig.link.wait = lambda timeout_s: waits.append(timeout_s) or wait(timeout_s)
    for _ in range(3):
        rig.now_ns += 5 * 10**9
        rig.client.work()
    assert reported == [] and min(waits) > 0, "and it sleeps meanwhile"
    rig.master.is_silent = False
    rig.until(lambda: rig.reports[-1] == rig.writer.end, "what it has compared")
    assert set(rig.reports) == {begin, rig.writer.end}, "the first again, at most, while the master's bytes came in pieces"


def test_a_slave_that_is_at_its_masters_end_speaks_once_the_master_has(make_rig):
    rig = make_rig(ROCKETMQ, ha_compare_bytes=0)
    rig.master.is_silent = True
    rig.until(lambda: rig.reports == [rig.writer.end], "it has reported")
    reported = rig.listen()
    rig.now_ns += 5 * 10**9
    rig.client.work()
    assert reported == []
    rig.master.is_silent = False
    rig.until(lambda: len(rig.reports) > 1, "a heartbeat for a heartbeat")
    assert set(rig.reports) == {rig.writer.end}
