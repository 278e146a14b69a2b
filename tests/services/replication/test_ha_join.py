"""A starting slave and its master: where a new log begins, where two logs part, what is never cut."""

from __future__ import annotations

import itertools
import random
import select

import pytest

from fix_golden import usual
from logs import LogBuilder
from pyengine.errors import EngineUnavailableError
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.formats.paths import segment_name
from pyengine.services.replication import ha_join
from pyengine.services.replication.ha_handshake import Seals
from pyengine.services.replication.ha_join import Join, JoinRefusedError, join
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from scripted_master import OURS, ROCKETMQ, ScriptedMaster
from waiting import eventually

SEGMENT = 4096
MANNERS = pytest.mark.parametrize("manner", [ROCKETMQ, OURS])


@pytest.fixture
def masters():
    """masters(content, manner, **named) -> a running ScriptedMaster."""
    running = []

    def make(content, manner, **named):
        running.append(ScriptedMaster(content, SEGMENT, manner, **named))
        return running[-1]

    yield make
    for each in running:
        each.close()


def log_of(seed, records, first_offset=0):
    log = LogBuilder(SEGMENT, first_offset)
    log.append_varied(random.Random(seed), records)
    return log


def content_of(log):
    return b"".join(bytes(each) for each in log.segments)[: log.end - log.first_offset]


def boundaries_of(log):
    return [message.physical_offset for message in log.messages]


def diverged(log, at, seed=99, records=30):
    """Another log that is equal up to the boundary `at` and goes on differently."""
    other = LogBuilder(SEGMENT, log.first_offset)
    other.segments = [bytearray(each) for each in log.segments[: (at - log.first_offset) // SEGMENT + 1]]
    other.used = at % SEGMENT
    other.segments[-1][other.used :] = bytes(SEGMENT - other.used)
    other.append_varied(random.Random(seed), records)
    return other


def config_of(root, master, **settings):
    named = {"broker_role": "SLAVE", "mapped_file_size_commit_log_bytes": SEGMENT, "ha_master_address": master.address,
             "ha_compare_bytes": 2000, "ha_housekeeping_interval_ms": 5000, **settings}
    return load_config(root, {name: str(value) for name, value in named.items()})


def joined(root, log, master, **settings):
    root.mkdir(exist_ok=True)
    if log is None:
        found = join(MessageStore(root), config_of(root, master, **settings), 0, 0)
    else:
        if not (root / "commitlog").exists():
            log.write(root)
        found = join(MessageStore(root), config_of(root, master, **settings), log.first_offset, log.end)
    return found


# ---- new stores -----------------------------------------------------------------------


@MANNERS
def test_a_new_slave_begins_at_the_last_segment(tmp_path, masters, manner):
    master = masters(content_of(log_of(1, 60)), manner)
    assert joined(tmp_path, None, master).origin == master.end - master.end % SEGMENT > 0


@MANNERS
def test_a_new_slave_begins_at_the_first_byte_when_asked(tmp_path, masters, manner):
    assert joined(tmp_path, None, masters(content_of(log_of(1, 60)), manner), sync_from="first").origin == 0


@MANNERS
@pytest.mark.parametrize("sync_from", ["first", "last"])
def test_a_new_slave_of_an_empty_master_begins_at_0(tmp_path, masters, manner, sync_from):
    assert joined(tmp_path, None, masters(b"", manner), sync_from=sync_from).origin == 0


def test_a_new_slave_begins_where_the_master_begins_now(tmp_path, masters):
    log = log_of(1, 60, 7 * SEGMENT)
    master = masters(content_of(log), OURS, min_offset=log.first_offset)
    assert joined(tmp_path, None, master, sync_from="first").origin == 7 * SEGMENT


def test_a_rocketmq_master_that_has_deleted_its_first_segments_cannot_say_where_it_begins(tmp_path, masters):
    log = log_of(1, 60, 7 * SEGMENT)
    master = masters(content_of(log), ROCKETMQ, min_offset=log.first_offset)
    with pytest.raises(JoinRefusedError, match="sync_from=last"):
        joined(tmp_path, None, master, sync_from="first")
    assert joined(tmp_path, None, master).origin == log.end - log.end % SEGMENT


def test_a_new_slave_must_reach_its_master(tmp_path, masters):
    master = masters(b"", OURS)
    master.close()
    with pytest.raises(EngineUnavailableError, match="where to begin.*without ha_secret_file a master takes only"):
        joined(tmp_path, None, master)


def test_a_new_slave_with_segments_of_another_size_is_refused(tmp_path, masters):
    master = masters(content_of(log_of(1, 60)), ROCKETMQ)
    with pytest.raises(JoinRefusedError, match="mapped_file_size_commit_log_bytes"):
        joined(tmp_path, None, master, mapped_file_size_commit_log_bytes=3 * SEGMENT)


# ---- stores that have a log -------------------------------------------------------------


@MANNERS
@pytest.mark.parametrize("behind", [0, 1, 20, 50])
def test_a_beginning_of_the_masters_log_stays_as_it_is(tmp_path, masters, manner, behind):
    log = log_of(1, 60)
    end = [*boundaries_of(log), log.end][-1 - behind]
    (tmp_path / "commitlog").mkdir()
    for number, data in enumerate(content_of(log)[at : at + SEGMENT] for at in range(0, end, SEGMENT)):
        (tmp_path / "commitlog" / segment_name(number * SEGMENT)).write_bytes(data.ljust(SEGMENT, b"\0"))
    config = config_of(tmp_path, masters(content_of(log), manner))
    assert join(MessageStore(tmp_path), config, 0, end) == Join()


@MANNERS
@pytest.mark.parametrize("compare_bytes", [0, 1, 700, 1 << 20])
def test_the_log_is_cut_where_it_parts_from_the_masters(tmp_path, masters, manner, compare_bytes):
    log = log_of(1, 60)
    log.write(tmp_path)
    for number in (1, 2, 17, 40, 58, 59):
        boundary = boundaries_of(log)[number]
        other = diverged(log, boundary)
        common = next(at for at in range(boundary, min(log.end, other.end))
                      if content_of(log)[at] != content_of(other)[at])
        found = joined(tmp_path, log, masters(content_of(other), manner), ha_compare_bytes=compare_bytes)
        assert found.cut_at == boundary, (number, common)
        assert "other bytes" in found.notes[0] or "ends at" in found.notes[0]


@MANNERS
@pytest.mark.parametrize("compare_bytes", usual([0, 700, 1 << 20], [700], pytest.mark.ci))
def test_the_log_is_cut_where_the_masters_ends(tmp_path, masters, manner, compare_bytes):
    log = log_of(1, 60)
    ends = [boundaries_of(log)[number] for number in (1, 2, 30, 50, 59)] + [SEGMENT, 2 * SEGMENT]
    for end in ends:
        found = joined(tmp_path, log, masters(content_of(log)[:end], manner), ha_compare_bytes=compare_bytes)
        assert found.cut_at == end
        assert f"ends at {end}" in found.notes[0]


@MANNERS
def test_logs_without_a_common_record_are_refused_even_with_ha_cut_any(tmp_path, masters, manner):
    for number, content in enumerate((content_of(log_of(2, 60)), content_of(log_of(2, 2)), b"")):
        with pytest.raises(JoinRefusedError, match="nothing in common"):
            joined(tmp_path, log_of(1, 60), masters(content, manner), ha_cut="any")


@MANNERS
@pytest.mark.parametrize("master_begins", [1, 2, 3])
def test_a_master_that_deleted_its_oldest_segments_is_followed_if_the_logs_overlap(
        tmp_path, masters, manner, master_begins):
    log = log_of(1, 60)
    whole = content_of(diverged(log, log.end, records=60))
    begins = master_begins * SEGMENT
    assert log.end // SEGMENT >= 2
    if begins > log.end:
        with pytest.raises(JoinRefusedError, match="no holes"):
            joined(tmp_path, log, masters(whole[begins:], manner, min_offset=begins), ha_compare_bytes=1 << 20)
    else:
        assert joined(tmp_path, log, masters(whole[begins:], manner, min_offset=begins), ha_compare_bytes=1 << 20) == Join()


@MANNERS
def test_a_slave_far_below_a_master_that_has_moved_on_is_refused(tmp_path, masters, manner):
    log = log_of(1, 20)
    later = log_of(3, 60, 40 * SEGMENT)
    with pytest.raises(JoinRefusedError, match="empty directory"):
        joined(tmp_path, log, masters(content_of(later), manner, min_offset=later.first_offset))


def test_confirmed_records_are_cut_only_with_ha_cut_any(tmp_path, masters):
    log = log_of(1, 60)
    boundary = boundaries_of(log)[30]
    log.write(tmp_path)
    (tmp_path / "config").mkdir()
    master = masters(content_of(log)[:boundary], OURS)
    for confirm, refused in ((boundary, False), (boundaries_of(log)[31], True), (1 << 40, True), (0, False)):
        ReplicationStateFile(tmp_path).write(ReplicationState("SYNC_MASTER", confirm))
        if refused:
            with pytest.raises(JoinRefusedError, match="ha_cut=any"):
                joined(tmp_path, log, master)
        else:
            assert joined(tmp_path, log, master).cut_at == boundary
        assert joined(tmp_path, log, master, ha_cut="any").cut_at == boundary
    with pytest.raises(JoinRefusedError, match="ha_cut=any"):  # the note is older than what a dead engine's memory says
        join(MessageStore(tmp_path), config_of(tmp_path, master), 0, log.end, remembered=boundaries_of(log)[31])


@pytest.mark.parametrize("fenced_by", [0, 1])
def test_a_master_that_is_started_as_a_slave_does_not_have_the_new_term_before_it_follows(tmp_path, fenced_by):
    """A start that is refused or killed after the meeting leaves no master of that term."""
    (tmp_path / "config").mkdir()
    file = ReplicationStateFile(tmp_path)
    file.write(ReplicationState("ASYNC_MASTER", 100, term=0, fenced_by=fenced_by))
    config = load_config(tmp_path, {"broker_role": "SLAVE", "ha_master_address": "127.0.0.1:9"})
    ha_join._check_peer(tmp_path, config, Introduction(b"m" * 16, 1, is_master=True))
    state = file.read().state
    assert state == ReplicationState("ASYNC_MASTER", 100, term=0, fenced_by=1) and state.is_fenced and state.known_term == 1
    ReplicationStateFile(tmp_path).write(ReplicationState("SLAVE", 100, term=0))
    ha_join._check_peer(tmp_path, config, Introduction(b"m" * 16, 2, is_master=True))
    assert ReplicationStateFile(tmp_path).read().state.term == 2, "a slave has it at once"


def test_a_join_keeps_a_connection_to_the_master_until_its_presence_is_closed(tmp_path, masters):
    master = masters(content_of(log_of(1, 60)), ROCKETMQ)
    found = joined(tmp_path, None, master)
    assert len(master.reports) == 1, "one that looked, and one that says nothing"
    eventually(lambda: master.connections == 1, "the one that looked is gone")
    found.presence.close()
    eventually(lambda: master.connections == 0, "it is gone")


def test_an_unreadable_note_of_what_was_confirmed_forbids_every_cut(tmp_path, masters):
    log = log_of(1, 60)
    log.write(tmp_path)
    (tmp_path / "config").mkdir()
    ReplicationStateFile(tmp_path).path.write_bytes(b"{")
    with pytest.raises(JoinRefusedError, match="ha_cut=any"):
        joined(tmp_path, log, masters(content_of(log)[: boundaries_of(log)[30]], OURS))


def test_a_store_with_a_log_starts_without_its_master(tmp_path, masters):
    master = masters(b"", OURS)
    master.close()
    found = joined(tmp_path, log_of(1, 20), master)
    assert found.cut_at is None and "not compared" in found.notes[0]


def test_a_master_that_says_nothing_is_not_waited_for_for_ever(tmp_path, masters):
    master = masters(b"", OURS)
    master.is_silent = True
    found = joined(tmp_path, log_of(1, 20), master, ha_housekeeping_interval_ms=50)
    assert found.cut_at is None and "sends nothing" in found.notes[0]


def test_a_master_that_sends_byte_by_byte_is_not_waited_for_for_ever(tmp_path, masters):
    log = log_of(1, 60)

    def dribble(master, connected, offset, body):
        for byte in offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + body:
            connected.sendall(bytes([byte]))
            if select.select([connected], [], [], 0.02)[0]:
                raise ConnectionResetError  # the slave has left
        return True

    found = joined(tmp_path, log, masters(content_of(log), ROCKETMQ, script=dribble), ha_housekeeping_interval_ms=200)
    assert found.cut_at is None and "less than 8,192 bytes per second" in found.notes[0]


def test_a_slow_master_is_waited_for(tmp_path, masters, monkeypatch):
    """1 MiB at little more than the lowest rate, on a clock of the test's."""
    clock_ns = [0]
    monkeypatch.setattr(ha_join, "monotonic_ns", lambda: clock_ns[0])

    class SlowLink:
        seals = Seals()

        def __init__(self, address, call):
            self.pieces = iter([ha_wire.HEADER.pack(0, 1 << 20), *[bytes(9000)] * 110])

        def report(self, offset):
            pass

        def receive(self):
            clock_ns[0] += 10**9
            return memoryview(next(self.pieces))

    monkeypatch.setattr(ha_join, "MasterLink", SlowLink)
    probe = ha_join._Probe(config_of(tmp_path, masters(b"", OURS), mapped_file_size_commit_log_bytes=1 << 20), None, 0)
    assert sum(len(piece) for _, piece in itertools.islice(probe._pieces, 110)) > 900_000


def test_one_heartbeat_is_no_end(tmp_path, masters):
    """A master that was stopped for a while says that it is there, and goes on."""
    log = log_of(1, 60)
    said = set()

    def heartbeat_first(master, connected, offset, body):
        if offset not in said:
            said.add(offset)
            connected.sendall(offset.to_bytes(8, "big") + bytes(4))
        return False

    assert joined(tmp_path, log, masters(content_of(log), ROCKETMQ, script=heartbeat_first)) == Join()
    assert said


def test_a_byte_that_the_network_has_changed_cuts_nothing(tmp_path, masters):
    log = log_of(1, 60)
    wrong = []

    def change_one(master, connected, offset, body):
        if not wrong and len(body) > 500:
            wrong.append(offset)
            connected.sendall(offset.to_bytes(8, "big") + len(body).to_bytes(4, "big") + body[:400] + b"!" + body[401:])
            return True
        return False

    assert joined(tmp_path, log, masters(content_of(log), ROCKETMQ, script=change_one)) == Join()
    assert wrong


def test_garbage_changes_nothing(tmp_path, masters, rng):
    log = log_of(1, 60)

    def garbage(master, connected, offset, body):
        connected.sendall(rng.randbytes(200))
        return True

    found = joined(tmp_path, log, masters(content_of(log), ROCKETMQ, script=garbage))
    assert found.cut_at is None and "not compared" in found.notes[0]
