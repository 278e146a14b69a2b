"""Members of a group and their claims: the kernel's locks decide, content can only cost a redelivery."""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest

from pyengine.errors import DiskError, EngineError, UsageError
from pyengine.ipc import group_members
from pyengine.ipc.group_members import GUESTS, MEMBERS, GroupMembers
from pyengine.native.waiting import Pulse


@pytest.fixture
def member(tmp_path):
    opened = []

    def make(*, join: bool = True, **options) -> GroupMembers:
        opened.append(GroupMembers(tmp_path, "orders", "billing"))
        if join:
            opened[-1].join(**options)
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config" / "consumers" / "orders@billing"


def sharing(member) -> list[int]:
    """The slots of the living members that get a share."""
    return [at - MEMBERS for at in member.members() if at < GUESTS]


def test_members_see_each_other_while_they_live(member):
    first, second, guest = member(), member(), member(kind=GUESTS)
    assert sharing(first) == sharing(second) == sharing(guest) == [0, 1]
    assert [record.pid for record in first.members().values()] == [os.getpid()] * 3
    first.close()
    assert sharing(second) == [1]
    assert sharing(member()) == [0, 1], "a free slot is taken again"


def test_a_killed_member_is_gone_and_its_queues_are_free(tmp_path, member):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        mine = GroupMembers(tmp_path, "orders", "billing")
        mine.join()
        mine.claim(3)
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    other = member()
    assert sharing(other) == [0, 1] and other.is_claimed(3) and other.claim(3) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert sharing(other) == [1] and not other.is_claimed(3)
    assert other.holds(other.claim(3))


def test_a_member_that_gives_up_its_share_keeps_its_claims_and_may_take_a_share_again(member):
    first, second = member(), member()
    claim = first.claim(3)
    first.move(GUESTS)
    assert sharing(first) == sharing(second) == [1] and len(second.members()) == 2
    assert first.holds(claim) and second.claim(3) is None
    assert second.record(3).incarnation in {record.incarnation for record in second.members().values()}, "it lives"
    assert member().members().keys() >= {MEMBERS, MEMBERS + 1, GUESTS}, "its slot is free"
    first.move(MEMBERS)
    assert sharing(second) == [0, 1, 2] and first.holds(claim)
    first.close()
    assert len(second.members()) == 2 and second.claim(3) is not None


def test_a_member_that_cannot_move_stays_what_it_was(member, monkeypatch):
    monkeypatch.setattr(group_members, "SLOTS_MAX", 1)
    first, _ = member(), member(kind=GUESTS)
    with pytest.raises(EngineError, match="members already"):
        first.move(GUESTS)
    assert [*first.members()] == [MEMBERS, GUESTS]


def test_a_member_leaves_at_once_even_if_it_has_forked(member):
    leaving, staying = member(), member()
    leaving.claim(3)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        leaving.close()
        assert sharing(staying) == [1] and not staying.is_claimed(3)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_member_that_had_forked_a_helper_is_gone_at_once(tmp_path, member):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        mine = GroupMembers(tmp_path, "orders", "billing")
        mine.join()
        mine.claim(3)
        if os.fork() == 0:  # it may close what it has of its parent's, and changes nothing by it
            mine.close()
            os.write(writing, b"x")
        signal.pause()
    try:
        os.read(reading, 1)
        other = member()
        assert sharing(other) == [0, 1] and other.is_claimed(3) and other.claim(3) is None
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert sharing(other) == [1] and not other.is_claimed(3)
        assert other.holds(other.claim(3))
    finally:
        os.killpg(child, signal.SIGKILL)


def test_one_queue_has_one_holder(member):
    members = [member() for _ in range(4)]
    claims = [one.claim(7) for one in members]
    assert [claim is not None for claim in claims] == [True, False, False, False]
    members[0].release(claims[0])
    assert members[2].claim(7) is not None and members[0].claim(7) is None


def test_a_seized_queue_is_no_longer_held_by_the_one_before(member):
    first, second, third = member(), member(), member()
    old = first.claim(1)
    second.fence_off(1)
    new = second.claim(1)
    assert second.holds(new) and not first.holds(old)
    assert first.claim(1) is None and third.claim(1) is None
    first.release(old)
    assert second.holds(new), "a late release of the one before changes nothing"
    second.release(new)
    assert third.claim(1) is not None


def test_a_fenced_off_queue_is_free_for_all(member):
    first, second = member(), member()
    old = first.claim(1)
    second.fence_off(1)
    assert not first.holds(old)
    assert first.holds(first.claim(1)), "also for the one that had it"


def test_a_beat_moves_the_record(member):
    first, second = member(), member()
    _, seen = first.members().values()
    second.heartbeat()
    _, moved = first.members().values()
    assert moved != seen and moved.incarnation == second.incarnation


@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x01\x00"])
def test_a_scribbled_record_ends_a_hold_and_nothing_worse(member, path, junk):
    first, second = member(), member()
    claim = first.claim(2)
    descriptor = os.open(path, os.O_RDWR)
    for at in (group_members.SLOTS_AT, group_members.RECORDS_AT):
        os.pwrite(descriptor, (junk * 64)[:64], at)
    os.close(descriptor)
    assert first.holds(claim)
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, (junk * 64)[:32], group_members.RECORDS_AT + 2 * 32)
    os.close(descriptor)
    assert not first.holds(claim)
    first.heartbeat()
    assert sharing(first) == [0, 1], "who lives is the kernel's to say"
    again = first.claim(2)
    assert again is not None and second.claim(2) is None


def test_every_bit_of_a_record_counts(member, path):
    first = member()
    claim = first.claim(0)
    descriptor = os.open(path, os.O_RDWR)
    good = os.pread(descriptor, 20, group_members.RECORDS_AT)
    for bit in range(len(good) * 8):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        os.pwrite(descriptor, changed, group_members.RECORDS_AT)
        assert not first.holds(claim), bit
    os.pwrite(descriptor, good, group_members.RECORDS_AT)
    os.close(descriptor)
    assert first.holds(claim)


def test_a_disk_that_fails_is_named(member, path, monkeypatch):
    def fails(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    first = member()
    claim = first.claim(0)
    monkeypatch.setattr(group_members.os, "pread", fails)
    monkeypatch.setattr(group_members, "locked_bytes", fails)
    for call in (first.members, lambda: first.holds(claim)):
        with pytest.raises(DiskError, match="orders@billing") as failed:
            call()
        assert failed.value.errno == errno.EIO
    monkeypatch.undo()


def test_a_removed_file_is_noticed(member, path):
    first = member()
    assert first.is_current
    path.unlink()
    assert not first.is_current
    member()
    assert not first.is_current


def test_the_highest_of_all_queues_takes_no_member_long_to_watch(member, tmp_path):
    """A beat read the records of all queues up to it, which are 64 GB of zeros, and held each close() up meanwhile."""
    pulse = Pulse()
    watching = GroupMembers(tmp_path, "orders", "billing", pulse=pulse)
    watching.join()
    claims = [watching.claim(queue_id) for queue_id in (5, (1 << 31) - 1)]
    pulse.wait(0)
    watching.has_changed()
    began_s = time.thread_time()
    pulse.wait(0)
    assert time.thread_time() - began_s < 5 and not watching.has_changed()
    other = member()
    pulse.wait(0)
    watching.has_changed()
    other.fence_off(5)
    other.fence_off((1 << 31) - 1)
    pulse.wait(0)
    assert watching.has_changed() and not any(watching.holds(claim) for claim in claims)
    watching.close()


def test_a_full_group_refuses_the_next(member, monkeypatch):
    monkeypatch.setattr(group_members, "SLOTS_MAX", 2)
    member(), member()
    with pytest.raises(EngineError, match="members already"):
        member()


def test_opening_members_without_leave_to_create_makes_no_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        GroupMembers(tmp_path, "orders", "billing", may_create=False)
    with pytest.raises(UsageError):
        GroupMembers(tmp_path, "orders", "../x")
    assert list(tmp_path.iterdir()) == []
