"""Sharing queues out among living members: RocketMQ's rule, signs of life by a fake clock, hand-over of claims."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest

from pyengine.client import group_session
from pyengine.client.group_session import GroupSession, HistoryChangedError, LivenessTracker, allocate_averagely, commit_all
from pyengine.errors import DiskError
from pyengine.formats.record import Message
from pyengine.ipc.group_members import GroupMembers
from pyengine.storage.acknowledgements import AckFile
from pyengine.storage.engine_id import raise_epoch


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def commit(session, offsets, states=None):
    return commit_all([(session, offsets, states or {})])[0]


@pytest.mark.parametrize(("queues", "members", "shares"), [
    (4, 1, [[0, 1, 2, 3]]),
    (4, 2, [[0, 1], [2, 3]]),
    (4, 3, [[0, 1], [2], [3]]),
    (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
    (5, 4, [[0, 1], [2], [3], [4]]),
    (2, 4, [[0], [1], [], []]),
    (0, 2, [[], []]),
])
def test_the_shares_are_rocketmqs(queues, members, shares):
    """AllocateMessageQueueAveragely 4.9.8, worked by hand."""
    ids = list(range(members))
    assert [allocate_averagely(range(queues), ids, me) for me in ids] == shares


def test_shares_cover_every_queue_once():
    for queues in range(20):
        for members in range(1, 12):
            ids = [3 * number for number in range(members)]
            shares = [allocate_averagely(range(queues), ids, me) for me in ids]
            assert sorted(itertools.chain.from_iterable(shares)) == list(range(queues))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert allocate_averagely(range(4), [0, 1], 5) == []


def test_a_counter_that_does_not_move_for_the_timeout_is_expired():
    clock = Clock()
    liveness = LivenessTracker(10, clock)
    assert not liveness.expired({"a": 1})
    clock.now_s += 9
    assert not liveness.expired({"a": 1})
    clock.now_s += 1
    assert liveness.expired({"a": 1}) and not liveness.expired({"a": 2})
    clock.now_s += 10
    assert liveness.expired({"a": 2})
    liveness.forget("a")
    assert not liveness.expired({"a": 2})


@pytest.fixture
def session(tmp_path):
    (tmp_path / "config").mkdir()
    made = []

    def make(clock: Clock | None = None, **options) -> GroupSession:
        made.append(GroupSession(tmp_path, "orders", "billing", session_timeout_s=10, clock=clock or Clock(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_member_that_shows_no_life_is_passed_over_and_its_claims_are_void(session):
    clock, other_clock = Clock(), Clock()
    stopped, other = session(clock), session(other_clock)
    taken = stopped.take([0, 1])
    assert stopped.share([0, 1]) == [0] and other.share([0, 1]) == [1]
    assert other.take([1]) == {}
    commit(stopped, {claim: 5 for claim, *_ in taken.values()})
    other_clock.now_s += 11  # the other's clock goes on; the stopped one never beats
    assert other.share([0, 1]) == [0, 1]
    found = other.take([0, 1])
    assert {queue_id: offset for queue_id, (_, offset, _) in found.items()} == {0: 5, 1: 5}
    assert not any(stopped.holds(claim) for claim, *_ in taken.values())
    assert commit(stopped, {claim: 9 for claim, *_ in taken.values()}) == set()
    assert other.stored() == {0: 5, 1: 5}
    clock.now_s += 12
    stopped.heartbeat()
    assert other.share([0, 1]) == [1], "it is back"


def test_a_member_that_leaves_has_no_share_and_keeps_its_claims_until_it_stays(session, tmp_path):
    leaving, other, chosen = session(), session(), session(queue_ids=[0])
    (claim, *_), = leaving.take([0]).values()
    for _ in range(2):
        assert leaving.share([0, 1], True) == chosen.share([0, 1], True) == [] and other.share([0, 1]) == [0, 1]
    assert leaving.holds(claim) and other.take([0, 1]).keys() == {1}
    assert leaving.share([0, 1]) == chosen.share([0, 1]) == [0] and other.share([0, 1]) == [1]
    leaving.share([0, 1], True)
    (tmp_path / "config" / "consumers" / "orders@billing").unlink()
    assert all(each.rejoin_if_removed() for each in (leaving, other))
    assert other.share([0, 1]) == [0, 1], "a file that was removed is no end of a leave"


def test_the_members_are_looked_for_once_however_many_queues_they_hold(session, monkeypatch):
    holder, other, looks, look = session(), session(), [], GroupMembers.members
    holder.take(range(20))
    monkeypatch.setattr(GroupMembers, "members", lambda self: looks.append(self) or look(self))
    assert other.share(range(20)) == [*range(10, 20)] and len(other.living()) == 2
    assert other.take(range(20)) == {} and len(looks) == 2, "once for the share, and once for the claims"


def test_what_a_member_acknowledges_after_it_lost_the_queue_does_not_count(session, tmp_path):
    late, other = session(), session()
    late.begin(lambda: {0: 0})
    claim, _, flight = late.take([0])[0]
    messages = [Message("orders", b"", 0, offset, 100 * offset, 100) for offset in range(4)]
    flight.deliver(messages, None)
    flight.acknowledge(flight.open[2])
    saved = {claim: flight.saved(0, 0)}
    assert commit(late, {}, saved) == {0}
    with contextlib.closing(GroupMembers(tmp_path, "orders", "billing")) as passing_over:
        passing_over.join()
        passing_over.fence_off(0)
    assert other.take([0])[0][2].unacknowledged(messages) == [messages[0], messages[1], messages[3]]
    flight.finish()
    assert commit(late, {claim: 4}, {claim: flight.saved(0, 4)}) == set()
    assert [state.acked for state in AckFile(tmp_path, "orders@billing").read()[0]] == [(), ((2, 3),), ((2, 3),)]


def test_a_member_that_beats_is_never_passed_over(session):
    clock, other_clock = Clock(), Clock()
    busy, other = session(clock), session(other_clock)
    busy.take([0, 1])
    for _ in range(10):
        clock.now_s += 5
        other_clock.now_s += 5
        busy.heartbeat()
        assert other.share([0, 1]) == [1] and other.take([1]) == {}


def test_a_queue_given_back_continues_at_its_stored_offset(session):
    first, second = session(), session()
    claims = {claim: 7 for claim, *_ in first.take([0, 1]).values()}
    assert commit(first, claims) == {0, 1}
    first.release(claims)
    assert {queue_id: offset for queue_id, (_, offset, _) in second.take([0, 1]).items()} == {0: 7, 1: 7}


def test_after_a_recovery_nothing_is_committed_before_the_member_has_looked(session, tmp_path):
    mine = session()
    claims = {claim: 7 for claim, *_ in mine.take([0]).values()}
    raise_epoch(tmp_path)
    with pytest.raises(HistoryChangedError):
        commit(mine, claims)
    assert mine.stored() == {} and all(mine.holds(claim) for claim in claims)
    mine.epoch += 1
    assert commit(mine, claims) == {0}


def test_only_the_first_member_writes_the_start_offsets_of_a_group(session):
    first, second = session(), session()
    first.begin(lambda: {0: 3, 1: 4})
    second.begin(lambda: pytest.fail("the group has begun"))
    assert second.stored() == {0: 3, 1: 4}


def test_a_guest_takes_its_queues_and_no_share(session):
    guest, member = session(queue_ids=[2]), session()
    assert guest.share(range(4)) == [2] and member.share(range(4)) == [0, 1, 2, 3]
    assert list(guest.take([2])) == [2] and member.take([2]) == {}


def test_a_group_whose_file_was_removed_begins_anew(session, tmp_path):
    mine = session()
    (claim, *_), = mine.take([0]).values()
    (tmp_path / "config" / "consumers" / "orders@billing").unlink()
    assert mine.rejoin_if_removed() and not mine.rejoin_if_removed()
    assert not mine.holds(claim) and list(mine.take([0])) == [0]


def test_a_claim_that_ends_in_an_error_releases_its_queue(session, monkeypatch):
    failing, other = session(), session()
    failing.begin(lambda: {0: 0, 1: 0})
    real_claim = GroupMembers.claim

    def fails_at_the_second(members, queue_id):
        if queue_id == 1:
            raise DiskError("no locks left", path="x")
        return real_claim(members, queue_id)

    with monkeypatch.context() as patch, pytest.raises(DiskError):
        patch.setattr(GroupMembers, "claim", fails_at_the_second)
        failing.take([0, 1])
    assert sorted(other.take([0, 1])) == [0, 1]


def test_a_member_whose_file_was_removed_joins_again_when_that_succeeds_at_last(session, tmp_path, monkeypatch):
    mine = session()
    (tmp_path / "config" / "consumers" / "orders@billing").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(group_session, "GroupMembers", _cannot_open)
        with pytest.raises(DiskError):
            mine.rejoin_if_removed()
    mine.heartbeat()
    assert mine.rejoin_if_removed() and mine.share([0]) == [0]


def test_a_member_that_could_not_join_leaves_nothing(session, tmp_path, monkeypatch):
    living = session()
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(group_session.GroupMembers, "heartbeat", _cannot_open)
        with pytest.raises(DiskError):
            session()
    assert living.share([0, 1]) == [0, 1] and len(os.listdir("/proc/self/fd")) == descriptors
    (tmp_path / "config" / "consumers" / "orders@billing").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(group_session.GroupMembers, "join", _cannot_open)
        with pytest.raises(DiskError):
            living.rejoin_if_removed()
    assert living.rejoin_if_removed() and living.share([0, 1]) == [0, 1]


def _cannot_open(*_, **__):
    raise DiskError("cannot open", path="x")
