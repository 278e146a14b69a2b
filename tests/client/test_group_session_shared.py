"""Groups whose members share messages: any member takes the next message of any queue, and kills free what the dead one had."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import pyengine
from fix_cli import environment
from fix_client import before_it_looks, epoch_of, housekeep, members_of, reader_of, session_of
from fix_engine import SMALL
from interrupting import Interrupt, interrupted_at_each_place
from pyengine.client import group_session
from pyengine.client.consumer_groups import set_offsets
from pyengine.client.retries import retry_topic
from pyengine.errors import DiskFullError, UsageError
from pyengine.ipc.group_members import GroupMembers
from pyengine.ipc.heartbeat import is_stopped
from pyengine.storage import acknowledgements, consumer_offset, durable_file
from pyengine.storage.acknowledgements import AckFile
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.engine_id import raise_epoch
from waiting import eventually, scaled_timeout_s


@pytest.fixture(scope="module")
def engine(undelayed):
    return undelayed


@pytest.fixture
def member(engine, names):
    """member(...) a consumer of the test's topic and group that shares messages; it is closed at the end."""
    opened = []

    def make(**options) -> pyengine.Consumer:
        opened.append(pyengine.consume(engine.path, names[0], **({"group": names[1], "auto_commit": False, "commit_interval_s": 0.05,
                                                                  "sharing": "messages"} | options)))
        return opened[-1]

    yield make
    for consumer in opened:
        consumer.close()


def put(engine, topic, count, queue_id=0):
    bodies = [b"%05d" % number for number in range(count)]
    with engine.connect() as producer:
        producer.put_many(topic, bodies, queue_id=queue_id)
    return bodies


def pull(consumer, count=1):
    """Pull exactly `count` messages."""
    found = []
    eventually(lambda: found.extend(consumer.pull(count - len(found), timeout_s=0.1)) or len(found) == count, f"{count} messages")
    return found


def offsets(found):
    return [each.queue_offset for each in found]


def counted(found):
    return [(each.queue_offset, each.delivery_count) for each in found]


def stored(engine, names):
    return ConsumerOffsets(engine.path).read(*names)


# --- who gets what --------------------------------------------------------------------------------


def test_more_members_than_queues_all_have_work(engine, names, member):
    put(engine, names[0], 9)
    members = [member() for _ in range(3)]
    found = [offsets(pull(each, 3)) for each in members]
    assert sorted(itertools.chain(*found)) == list(range(9)) and all(found)
    assert not any(each.notes for each in members)


def test_each_queue_has_its_turn(engine, names, member):
    for queue_id in (0, 1):
        put(engine, names[0], 300, queue_id)
    with engine.open_store() as store:
        eventually(lambda: store.queue_range(names[0], 1)[1] == 300, "all are dispatched")
    one = member()
    assert {pull(one)[0].queue_id for _ in range(200)} == {0, 1}, "one that has more does not keep the other waiting"


def test_a_slow_message_delays_no_other_one(engine, names, member):
    put(engine, names[0], 3000)
    slow, quick = member(max_span=10), member(max_span=10)
    (first,) = pull(slow)
    for count in (*[100] * 29, 99):
        quick.ack(pull(quick, count))
    assert quick.commit([]) == {0: 0}, "the offset is that of the oldest open message"
    slow.ack(first)
    assert slow.commit([]) == {0: 3000}


def test_what_is_done_in_any_order_moves_the_offset_up_to_the_first_open_message(engine, names, member):
    put(engine, names[0], 6)
    one, other = member(), member()
    a, b = pull(one, 3), pull(other, 3)
    for each in (one, other):
        session_of(each).tend()
        assert each.pull(timeout_s=0) == [], "what a living member has stays its own"
    other.ack(b)
    one.ack([a[0], a[2]])
    assert one.commit([]) == {0: 1} and other.commit([]) == {0: 1}
    one.ack(a[1])
    eventually(lambda: stored(engine, names) == {0: 6}, "the offset is stored in the background")


def test_with_auto_commit_what_was_delivered_is_done_by_the_next_request(engine, names, member):
    put(engine, names[0], 5)
    one = member(auto_commit=True)
    assert [each.queue_offset for _, each in zip(range(4), one)] == [0, 1, 2, 3]
    one.close()
    assert stored(engine, names) == {0: 4}


def test_tags_leave_out_messages_that_are_done_for_all(engine, names, member):
    with engine.connect() as producer:
        for number in range(6):
            producer.put(names[0], b"%d" % number, queue_id=0, tags="even" if number % 2 == 0 else "odd")
    one, other = member(tags="even"), member(tags="even")
    found = pull(one, 2), pull(other)
    assert [offsets(each) for each in found] == [[0, 2], [4]]
    one.ack(found[0])
    other.ack(found[1])
    assert other.pull(1, timeout_s=0) == [] and one.commit([]) == {0: 6}


def test_what_is_given_back_goes_to_any_member_and_is_a_dead_letter_at_last(engine, names, member):
    put(engine, names[0], 2)
    one, other = member(max_deliveries=2), member(max_deliveries=2)
    first, _second = pull(one, 2)
    one.requeue(first)
    one.commit([])
    (again,) = pull(other)
    assert counted([again]) == [(0, 2)]
    other.requeue(again)
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: [one.pull(timeout_s=0), other.pull(timeout_s=0)] == [[], []] and
               [each.queue_offset for each in letters.messages(names[1])] != [], "the dead letter")
    eventually(lambda: stored(engine, names) == {0: 1}, "the other one is open still")


def test_retried_messages_are_shared_too(engine, names, member):
    put(engine, names[0], 4)
    one, other = member(), member()
    for message in pull(one, 4):
        one.retry(message)
    found = pull(one) + pull(other, 2) + pull(one)
    assert sorted(each.body for each in found) == [b"%05d" % number for number in range(4)]
    assert {each.reconsume_times for each in found} == {1}
    one.ack([found[0], found[3]])
    other.ack(found[1:3])
    one.commit([])
    other.commit([])
    assert ConsumerOffsets(engine.path).read(retry_topic(names[1]), names[1]) == {0: 4}


def test_a_closed_member_gives_its_messages_to_the_others_at_once(engine, names, member):
    put(engine, names[0], 3)
    one, other = member(), member()
    a, b, c = pull(one, 3)
    one.ack(b)
    one.close()
    assert counted(pull(other, 2)) == [(0, 2), (2, 2)]


def test_an_error_half_way_takes_nothing(engine, names, member, monkeypatch):
    put(engine, names[0], 3)
    one, other = member(), member()
    take = type(one)._take_shared

    def fail(*arguments):
        take(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(one), "_take_shared", fail)
    with pytest.raises(KeyboardInterrupt):
        one.pull(2)
    monkeypatch.undo()
    assert counted(pull(other, 3)) == [(0, 1), (1, 1), (2, 1)]


def test_an_interrupt_after_the_file_was_written_takes_nothing(engine, names, member, monkeypatch):
    put(engine, names[0], 2)
    one, other = member(), member()
    write = acknowledgements.SharedLog.write

    def fail(log):
        write(log)
        raise KeyboardInterrupt

    monkeypatch.setattr(acknowledgements.SharedLog, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        one.pull(1)
    monkeypatch.undo()
    assert counted(pull(other)) == [(1, 1)], "the first one is in the file as taken"
    assert counted(pull(one)) == [(0, 1)]


@pytest.fixture(params=["before", "after"])
def interrupted(request, monkeypatch):
    """interrupted(call): the call is interrupted before or after its turn is in the file."""
    def run(call):
        write = acknowledgements.SharedLog.write

        def fail(log):
            if request.param == "after":
                write(log)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(acknowledgements.SharedLog, "write", fail)
            call()

    return run


def test_a_turn_that_is_interrupted_counts_no_delivery_of_what_was_given_back(engine, names, member, interrupted):
    put(engine, names[0], 2)
    one, other = member(), member()
    kept, given = pull(one, 2)
    one.requeue(given)
    for _ in range(2):
        interrupted(lambda: one.pull(1))
    assert counted(pull(one)) == [(1, 2)]
    one.ack(kept)
    one.close()
    assert counted(pull(other)) == [(1, 3)]


@pytest.mark.parametrize("place", ["end_turn", "is_suspicious"])
def test_what_a_pull_took_comes_again_uncounted_if_it_is_interrupted_after_its_turn(engine, names, member, monkeypatch, place):
    put(engine, names[0], 2)
    put(engine, names[0], 2, queue_id=1)
    one, went_on = member(), getattr(group_session.SharedFlight, place)

    def interrupt(flight, *given):
        found = went_on(flight, *given)
        if flight.open:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(group_session.SharedFlight, place, interrupt)
        pull(one, 4)
    assert sorted((each.queue_id, each.queue_offset, each.delivery_count) for each in pull(one, 4)) == [
        (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


def test_a_turn_that_is_interrupted_spares_a_message_once(engine, names, member, interrupted):
    put(engine, names[0], 2)
    one, other = member(), member()
    beside, suspect = pull(one, 2)
    for spared in ([beside], []):
        one._spare(spared)
        one.requeue(suspect)
        interrupted(lambda: one.pull(1))
        interrupted(lambda: one.pull(1))
        (suspect,) = pull(one)
    one.close()
    assert sorted(counted(pull(other, 2))) == [(0, 2), (1, 4)]


def test_rows_of_arrow_that_the_program_did_not_get_come_again_uncounted(engine, names, member, monkeypatch):
    put(engine, names[0], 2)
    one = member()
    pytest.importorskip("pyarrow")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(reader_of(one)), "_named_rows", lambda *_: lambda entries: 1 / 0)
        one.pull_arrow(2, timeout_s=5)
    assert counted(pull(one, 2)) == [(0, 1), (1, 1)]


# --- members that do not fit, and what no member can do ------------------------------------------


@pytest.mark.parametrize("options", [{}, {"queues": [0]}], ids=["shares of queues", "chosen queues"])
def test_a_group_of_both_kinds_is_refused_either_way(engine, names, member, options):
    put(engine, names[0], 1)
    one = member()
    with pytest.raises(UsageError, match="share messages, so one that owns queues cannot join"):
        member(sharing="queues", **options)
    one.close()
    two = member(sharing="queues", **options)
    with pytest.raises(UsageError, match="own queues, so one that shares messages cannot join"):
        member()
    two.close()
    assert pull(member())


def test_wrong_options_are_refused(engine, names, member):
    with pytest.raises(UsageError, match='"queues" or "messages"'):
        member(sharing="all")
    with pytest.raises(UsageError, match="leave out `queues`"):
        member(queues=[0])
    with pytest.raises(UsageError, match="no group"):
        member(group=None)
    put(engine, names[0], 1)
    with pytest.raises(UsageError, match="reset"):
        member().seek(0, 0)


def test_a_group_changes_its_sharing_and_keeps_acknowledgements_and_counts(engine, names, member):
    put(engine, names[0], 6)
    for sharing, count in (("queues", 1), ("messages", 2), ("messages", 3), ("queues", 4), ("messages", 5)):
        one = member(sharing=sharing, max_deliveries=None)
        found = []
        eventually(lambda one=one, found=found: found.extend(one.pull(6, timeout_s=0.1)) or len(found) == 7 - count, "all open ones")
        assert counted(found) == [(offset, count) for offset in range(7 - count)]
        one.ack(found[-1])
        one.close()


# --- what ends a turn from outside ----------------------------------------------------------------


def test_a_reset_of_a_queue_during_a_turn_keeps_what_the_turn_says_of_others(engine, names, member, monkeypatch):
    monkeypatch.setattr(acknowledgements, "COMPACT_BYTES", 1)
    for queue_id in (0, 1):
        put(engine, names[0], 2, queue_id)
    one, other = member(commit_interval_s=60), member(commit_interval_s=60)
    found = pull(one, 4)
    write, mine, resets = acknowledgements.SharedLog.write, (session_of(one).log, threading.get_ident()), []

    def reset_before(log):
        if (log, threading.get_ident()) == mine and not resets:  # the members' own threads have turns too
            resets.append(pyengine.ConsumerGroups(engine.path).reset(*names, 0, [1]))
        return write(log)

    one.ack([each for each in found if each.queue_id == 0])
    monkeypatch.setattr(acknowledgements.SharedLog, "write", reset_before)
    one.pull(timeout_s=0)
    monkeypatch.setattr(acknowledgements, "COMPACT_BYTES", 1 << 20)
    assert resets == [{1: 0}] and other.commit([]) == {0: 2, 1: 0}


def test_a_reset_while_a_queue_is_begun_counts(engine, names, member, monkeypatch):
    put(engine, names[0], 1)
    one = member(commit_interval_s=60)
    pull(one)
    write, mine, resets = acknowledgements.SharedLog.write, (session_of(one).log, threading.get_ident()), []

    def reset_before(log):
        if (log, threading.get_ident()) == mine and 1 in log.queues and not resets:
            resets.append(pyengine.ConsumerGroups(engine.path).reset(*names, 3, [1]))
        return write(log)

    monkeypatch.setattr(acknowledgements.SharedLog, "write", reset_before)
    put(engine, names[0], 4, 1)
    eventually(lambda: one.pull(4, timeout_s=0.1) and resets == [{1: 3}], "the queue is begun beside a reset")
    assert one.commit([])[1] == 3
    assert [(each.queue_id, each.queue_offset) for each in pull(one)] == [(1, 3)]


def test_a_reset_that_is_not_yet_written_counts_for_a_queue_that_is_begun(engine, names, member):
    put(engine, names[0], 4)
    one = member(commit_interval_s=60)

    def change(table):
        AckFile(engine.path, "@".join(names)).remove()
        set_offsets(engine.path, table, "@".join(names), {0: 3})
        pull(one)

    ConsumerOffsets(engine.path).update(change)
    assert one.commit([])[0] == 3


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_reset_goes_back_into_what_a_member_has_just_taken_or_fetched(engine, names, member, count):
    put(engine, names[0], 6)
    earlier = member()
    earlier.ack(pull(earlier, 6)[4])
    earlier.close()
    one = member()
    assert offsets(pull(one, count)) == [0, 1, 2, 3, 5][:count], "message 4 was acknowledged"
    pyengine.ConsumerGroups(engine.path).reset(*names, 1)
    assert offsets(pull(one, 5)) == [1, 2, 3, 4, 5] and one.commit([]) == {0: 1}


def test_a_reset_sets_all_members_and_voids_what_they_had(engine, names, member):
    put(engine, names[0], 4)
    one, other = member(), member()
    held = pull(one, 2)
    other.ack(pull(other, 2))
    other.commit([])
    pyengine.ConsumerGroups(engine.path).reset(*names, 1)
    one.ack(held)
    found = []
    eventually(lambda: found.extend(other.pull(timeout_s=0.1)) or len(found) == 3, "the messages from 1 on")
    assert counted(found) == [(1, 1), (2, 1), (3, 1)]


def test_a_recovery_that_has_lost_nothing_changes_nothing(builder):
    for number in range(6):
        builder.put("orders", b"%d" % number)
    options = {"group": "g", "auto_commit": False, "sharing": "messages"}
    with pyengine.consume(builder.root, "orders", **options) as one, pyengine.consume(builder.root, "orders", **options) as other:
        a, b, c = one.pull(3)
        epoch = raise_epoch(builder.root)
        eventually(lambda: epoch_of(one) == epoch_of(other) == epoch, "the members have looked")
        one.ack([a, b, c])
        assert offsets(other.pull(3)) == [3, 4, 5] and one.commit([]) == {0: 3}


def cut_at(builder, messages, kept, count):
    """Let a recovery cut the queue after `kept` messages; `count` new ones come. The number of the recovery is not raised yet."""
    builder.end, builder.queue_offsets["orders", 0] = messages[kept].physical_offset, kept
    for number in range(count):
        builder.put("orders", b"new %d" % number)
    assert ConsumerOffsets(builder.root).lower({("orders", 0): kept}) == []


@pytest.mark.parametrize("seen", [False, True], ids=["before it has looked", "after it has looked"])
def test_a_recovery_that_cuts_below_what_a_member_took_brings_each_new_message_once(builder, seen):
    messages = [builder.put("orders", b"old %d" % number) for number in range(10)]
    with pyengine.consume(builder.root, "orders", group="g", auto_commit=False, sharing="messages", commit_interval_s=60) as one:
        taken = one.pull(5)
        cut_at(builder, messages, 3, 7)
        if seen:
            epoch = raise_epoch(builder.root)
            eventually(lambda: epoch_of(one) == epoch, "the member has looked")
        found = [one.pull(10, timeout_s=0) for _ in range(3)]
        assert [[each.body for each in part] for part in found] == [[b"new %d" % number for number in range(7)], [], []]
        one.ack(taken)
        assert one.commit([]) == {0: 3}


def test_a_recovery_that_cuts_below_what_one_member_took_gives_it_nothing_lost_though_another_has_taken_as_much_again(builder):
    """The end of the table is then again between where the first member's last turn ended and what it had fetched."""
    messages = [builder.put("orders", b"old %d" % number) for number in range(10)]
    options = {"group": "g", "auto_commit": False, "sharing": "messages", "commit_interval_s": 60}
    with pyengine.consume(builder.root, "orders", **options) as one, pyengine.consume(builder.root, "orders", **options) as other:
        one.ack(one.pull(5))
        cut_at(builder, messages, 3, 7)
        found = [other.pull(4, timeout_s=0), one.pull(10, timeout_s=0), other.pull(10, timeout_s=0)]
        assert [[each.body for each in part] for part in found] == [
            [b"new %d" % number for number in numbers] for numbers in (range(4), range(4, 7), ())]


def test_a_recovery_that_cuts_above_what_a_member_took_leaves_nothing_lost_of_what_it_had_fetched(builder):
    messages = [builder.put("orders", b"old %d" % number) for number in range(10)]
    with pyengine.consume(builder.root, "orders", group="g", auto_commit=False, sharing="messages", commit_interval_s=60) as one:
        one.ack(one.pull(5))
        with before_it_looks(one):
            cut_at(builder, messages, 7, 3)
            raise_epoch(builder.root)
            assert one.pull(10, timeout_s=0) == []
        housekeep(one)
        found = one.pull(10)
        assert counted(found) == [(offset, 1) for offset in range(5, 10)]
        assert [each.body for each in found] == [b"old 5", b"old 6", b"new 0", b"new 1", b"new 2"]
        one.ack(found)
        assert one.commit([]) == {0: 10}


def test_a_restart_of_the_engine_changes_nothing(tmp_path):
    options = {"group": "g", "auto_commit": False, "sharing": "messages"}
    with pyengine.Engine(tmp_path / "store", **SMALL) as engine, engine.connect() as producer:
        producer.put_many("jobs", [b"1", b"2", b"3"], queue_id=0)
        one, other = pyengine.consume(engine.path, "jobs", **options), pyengine.consume(engine.path, "jobs", **options)
        a = pull(one)
    with one, other, pyengine.Engine(tmp_path / "store", **SMALL) as engine, engine.connect() as producer:
        b = pull(other, 2)
        producer.put("jobs", b"4", queue_id=0)
        assert offsets(pull(one)) == [3]
        one.ack(a)
        other.ack(b)
        assert one.commit([]) == {0: 1} and other.commit([]) == {0: 3}


def test_removed_files_cost_a_redelivery_at_most(engine, names, member):
    put(engine, names[0], 4)
    one, other = member(), member()
    one.ack(pull(one, 2))
    other.commit(pull(other))
    eventually(lambda: stored(engine, names) == {0: 3}, "the offset")
    for folder in ("consumers", "consumers/acks"):
        (engine.path / "config" / folder / "@".join(names)).unlink()
    assert offsets(pull(one)) == [3]


def test_a_removed_file_of_acknowledgements_repeats_what_was_taken_last(engine, names, member):
    put(engine, names[0], 4)
    one = member()
    assert offsets(pull(one, 4)) == [0, 1, 2, 3]
    AckFile(engine.path, "@".join(names)).remove()
    assert offsets(pull(one, 4)) == [0, 1, 2, 3] and one.commit([]) == {0: 0}


def test_a_member_that_could_not_join_in_the_new_file_joins_at_the_next_try(engine, names, member, monkeypatch):
    one, errors, begin = member(), [DiskFullError("no space left")], group_session.SharedSession.begin

    def begin_at_the_second_try(*arguments):
        if errors:
            raise errors.pop()
        return begin(*arguments)

    monkeypatch.setattr(group_session.SharedSession, "begin", begin_at_the_second_try)
    members_of(one).path.unlink()
    eventually(lambda: not errors and members_of(one).members(), "it is a member again")


def test_a_step_that_a_power_cut_has_lost_is_of_open_messages(builder):
    """Later ones may be on the disk: pages of a file are written in any order."""
    for number in range(8):
        builder.put("orders", b"%d" % number)
    options = {"group": "g", "auto_commit": False, "sharing": "messages", "commit_interval_s": 60}
    path = builder.root / "config" / "consumers" / "acks" / "orders@g"
    with pyengine.consume(builder.root, "orders", **options) as one, pyengine.consume(builder.root, "orders", **options) as other:
        assert offsets(one.pull(3)) == [0, 1, 2]
        start = path.stat().st_size
        assert offsets(one.pull(2)) == [3, 4]
        end = path.stat().st_size
        other.ack(other.pull(2))
        other.pull(1, timeout_s=0)
        content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])
    with pyengine.consume(builder.root, "orders", **options) as one:
        assert offsets(one.pull(8)) == [0, 1, 2, 3, 4, 7]


def test_a_table_of_many_members_turns_is_read_in_one_pass():
    count = 20_000
    runs = tuple((offset, offset + 1, offset % 2 + 2) for offset in range(count))
    begin = time.process_time()
    queue = acknowledgements.SharedQueue(acknowledgements.SavedQueue(0, 7, 0, count, counts=runs, taken=runs))
    took_s = time.process_time() - begin
    assert list(queue.open.values()) == [(offset % 2 + 2, offset % 2 + 2) for offset in range(count)]
    assert took_s < 2


def test_members_that_start_at_once_have_one_table(engine, names, member):
    put(engine, names[0], 40)
    found, barrier = [], threading.Barrier(4)

    def run():
        barrier.wait()
        found.extend(offsets(pull(member(), 10)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(found) == list(range(40))


def test_the_file_is_compacted_under_members_that_use_it(engine, names, member, monkeypatch):
    monkeypatch.setattr(acknowledgements, "COMPACT_BYTES", 2000)
    put(engine, names[0], 600)
    one, other = member(), member()
    (kept,) = pull(one)
    seen = [kept.queue_offset]
    while len(seen) < 600:
        for each in (one, other):
            found = each.pull(7, timeout_s=0)
            seen += offsets(found)
            each.ack(found)
            each.commit([])
    assert sorted(seen) == list(range(600))
    assert os.stat(engine.path / "config" / "consumers" / "acks" / "@".join(names)).st_size < 6000
    one.ack(kept)
    assert other.commit([]) == {0: 0} and one.commit([]) == {0: 600}


def test_messages_of_a_turn_that_failed_come_with_the_next_one(engine, names, member, monkeypatch):
    put(engine, names[0], 6)
    one, other = member(), member()
    (first,) = pull(one)
    with monkeypatch.context() as patch:
        def full(log):
            raise DiskFullError("no space left")

        patch.setattr(acknowledgements.SharedLog, "write", full)
        with pytest.raises(DiskFullError):
            one.pull(2, timeout_s=0)
    assert counted(pull(one, 2)) == [(1, 1), (2, 1)] and offsets(pull(other, 3)) == [3, 4, 5]
    one.ack(first)
    assert one.commit([]) == {0: 1}


def test_a_commit_whose_offsets_could_not_be_written_stores_them_next_time(engine, names, member, monkeypatch):
    put(engine, names[0], 3)
    one = member(commit_interval_s=3600)
    one.ack(pull(one, 3))

    def full(*arguments, **options):
        raise DiskFullError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(consumer_offset, "write_config", full)
        with pytest.raises(DiskFullError):
            one.commit([])
    assert one.commit([]) == stored(engine, names) == {0: 3}


def test_a_commit_stores_what_another_threads_turn_has_told_during_the_one_before(engine, names, member, monkeypatch):
    put(engine, names[0], 4)
    one = member(commit_interval_s=3600)
    one.ack(pull(one))
    second = pull(one)
    as_before = group_session.SharedLog.syncing

    def syncing(log):
        sync = as_before(log)
        return lambda: (sync(), turn())

    def turn():
        monkeypatch.setattr(group_session.SharedLog, "syncing", as_before)
        one.ack(second)
        assert offsets(pull(one)) == [2]  # its turn tells the acknowledgement

    monkeypatch.setattr(group_session.SharedLog, "syncing", syncing)
    one.commit([])
    assert one.commit([]) == stored(engine, names) == {0: 2}


def test_a_sync_is_of_the_file_that_was_written_though_another_one_is_opened_meanwhile(engine, names, member, monkeypatch):
    put(engine, names[0], 4)
    one = member(commit_interval_s=60)
    one.ack(pull(one))
    path = session_of(one).log.path
    written, synced, sync = os.stat(path), [], durable_file.sync_descriptor

    def replaced_before(descriptor, *rest, **options):
        monkeypatch.setattr(durable_file, "sync_descriptor", sync)
        path.rename(path.with_name("other"))
        thread = threading.Thread(target=lambda: session_of(one).tend())  # of the program, which may pull meanwhile
        thread.start()
        thread.join()
        synced.append(os.fstat(descriptor))
        path.with_name("other").rename(path)
        return sync(descriptor, *rest, **options)

    monkeypatch.setattr(durable_file, "sync_descriptor", replaced_before)
    before = len(os.listdir("/proc/self/fd"))
    assert one.commit([]) == {0: 1}
    assert os.path.samestat(synced[0], written) and len(os.listdir("/proc/self/fd")) <= before


def test_a_look_for_news_while_another_thread_opens_the_next_file_finds_some(tmp_path, monkeypatch):
    log = durable_file.AppendedLines(tmp_path / "log")
    log.renew()
    log.append({})
    log.news()
    assert not log.has_news
    is_at = durable_file.is_at

    def closed_before(descriptor, path):
        log.close()  # the first half of another thread's renew()
        return is_at(descriptor, path)

    monkeypatch.setattr(durable_file, "is_at", closed_before)
    assert log.has_news


def test_what_a_turn_ends_gives_back_and_takes_of_a_queue_is_one_line(engine, names, member):
    put(engine, names[0], 6)
    one = member(commit_interval_s=60)
    first = pull(one, 3)
    one.ack(first[0])
    one.requeue(first[1])
    before = session_of(one).log.path.read_bytes()
    assert counted(pull(one, 2)) == [(1, 2), (3, 1)]
    after = session_of(one).log.path.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == before.count(b"\n") + 1
    (state,) = AckFile(engine.path, "@".join(names)).read()[0][-1:]
    assert (state.end, state.acked, state.counts) == (4, ((0, 1),), ((1, 2, 2),))


# --- kills, hung members --------------------------------------------------------------------------


SHARER = """
import os, random, sys
import pyengine
store, topic, group, log, kind = sys.argv[1:6]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(kind, messages):
    os.write(out, b"".join(b"%s %s %d\\n" % (kind, message.body, message.delivery_count) for message in messages))
with pyengine.consume(store, topic, group=group, auto_commit=False, commit_interval_s=60, max_deliveries=None, sharing="messages",
                      session_timeout_s=3) as consumer:
    held = []
    while kind == "hold":
        found = consumer.pull(3 - len(held), timeout_s=0.1)
        note(b"got", found)
        held += found
        if len(held) == 3:
            os.read(0, 1)
            consumer.ack(held)
            consumer.commit([])
            note(b"late", held)
            held = []
    while True:
        found = consumer.pull(5, timeout_s=0.05)
        note(b"got", found)
        held += found
        random.shuffle(held)
        ended, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
        if random.random() < 0.1:
            consumer.requeue(held)
            held = []
        consumer.ack(ended)
        consumer.commit([])
        note(b"saved", ended)
"""


def sharer(engine, names, log, kind="any"):
    return subprocess.Popen([sys.executable, "-c", SHARER, str(engine.path), *names, str(log), kind], env=environment(),
                            stdin=subprocess.PIPE)


def lines(log):
    return [line.split() for line in log.read_bytes().splitlines()] if log.exists() else []


def end(processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()


@pytest.mark.parametrize(("count", "kills"), [
    (400, 4), pytest.param(10_000, 60, marks=pytest.mark.long)], ids=["short", "long"])
def test_kills_of_members_repeat_no_stored_acknowledgement_and_lose_no_message(engine, names, tmp_path, rng, count, kills):
    put(engine, names[0], count // 2, 0)
    bodies = {b"%05d" % number for number in range(count // 2)}
    log = tmp_path / "log"
    processes = [sharer(engine, names, log) for _ in range(3)]

    def saved():
        return {body for kind, body, _ in lines(log) if kind == b"saved"}

    try:
        for number in range(kills):
            before = (number + 1) * len(bodies) // (kills + 2)
            eventually(lambda: len(saved()) >= before, f"{before} acknowledgements are stored", timeout_s=90)
            victim = rng.randrange(3)
            end([processes[victim]])
            processes[victim] = sharer(engine, names, log)
        eventually(lambda: stored(engine, names) == {0: len(bodies)}, "every message is done", timeout_s=120)
    finally:
        end(processes)
    got, ended = set(), set()
    for kind, body, _ in lines(log):
        (ended if kind == b"saved" else got).add(body)
        assert kind == b"saved" or body not in ended, f"{body!r} came again after its acknowledgement was stored"
    assert got == bodies


def test_a_killed_member_frees_its_open_messages_alone_and_they_are_counted(engine, names, member, tmp_path):
    put(engine, names[0], 8)
    log = tmp_path / "log"
    process = sharer(engine, names, log, "hold")
    one = member()
    try:
        eventually(lambda: len(lines(log)) == 3, "it has three")
        mine = pull(one, 5)
        one.ack(mine[2:])
        assert one.pull(timeout_s=0) == []
    finally:
        end([process])
    theirs = {int(body) for _, body, _ in lines(log)}
    assert counted(sorted(pull(one, 3), key=lambda each: each.queue_offset)) == [(offset, 2) for offset in sorted(theirs)]
    assert one.pull(timeout_s=0) == []


def test_a_stopped_member_loses_its_messages_and_its_late_acknowledgement_does_not_count(engine, names, member, tmp_path):
    put(engine, names[0], 3)
    log = tmp_path / "log"
    process = sharer(engine, names, log, "hold")
    try:
        eventually(lambda: len(lines(log)) == 3, "it has three")
        os.kill(process.pid, signal.SIGSTOP)
        one = member(session_timeout_s=2)
        found = pull(one, 3)
        assert counted(found) == [(0, 2), (1, 2), (2, 2)]
        process.stdin.write(b"x")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: lines(log)[-1][0] == b"late", "it has acknowledged them")
        assert one.commit([]) == {0: 0}
        one.ack(found)
        assert one.commit([]) == {0: 3}
    finally:
        end([process])


STOPS_IN_A_TURN = """
import os, signal, sys
import pyengine
from pyengine.storage import acknowledgements, consumer_offset, durable_file
store, topic, group, log, where = sys.argv[1:6]
stops = [1]
def stopping(name, when):
    place = durable_file if name == "write_config" else durable_file.AppendedLines
    real = getattr(place, name)
    def call(*arguments, **options):
        if when == "after":
            done = real(*arguments, **options)
        if stops and armed:
            stops.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        return done if when == "after" else real(*arguments, **options)
    setattr(place, name, call)
armed = []
name, when = where.split()
stopping(name, when)
if name == "write_config":
    acknowledgements.COMPACT_BYTES = 0
with pyengine.consume(store, topic, group=group, auto_commit=False, commit_interval_s=60, sharing="messages") as consumer:
    held = consumer.pull(2, timeout_s=30)
    armed.append(1)
    consumer.ack(held[:1])
    if name == "write_config":
        consumer.commit([])
    held = held[1:] + consumer.pull(2, timeout_s=0)
    with open(log, "w") as file:
        print(*(message.queue_offset for message in held), file=file)
    os.read(0, 1)
    consumer.ack(held)
    consumer.commit([])
"""


@pytest.mark.parametrize("where", ["append before", "append after", pytest.param("write_config before", marks=pytest.mark.ci)])
def test_a_member_that_is_stopped_in_its_turn_holds_up_nobody_for_long_and_nothing_of_it_counts_late(engine, names, member, tmp_path,
                                                                                                    where):
    put(engine, names[0], 8)
    one, log = member(), tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", STOPS_IN_A_TURN, str(engine.path), *names, str(log), where], env=environment(),
                               stdin=subprocess.PIPE)
    try:
        eventually(lambda: is_stopped(process.pid), "it has stopped itself")
        if where.startswith("write_config"):  # while it replaces the file, others wait for it
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(durable_file, "LOCK_WAIT_S", 2.5)
                eventually(lambda: one.pull(1, timeout_s=0) == [] and "has held" in one.notes[-1], "it knows the topic, and cannot write")
            os.kill(process.pid, signal.SIGCONT)
        mine = pull(one, 2)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: log.exists() and log.read_text(), "its program has its messages")
        theirs = [int(each) for each in log.read_text().split()]
        mine += pull(one, 7 - len(mine) - len(theirs))
        assert sorted(offsets(mine) + theirs) == list(range(1, 8)) and {each.delivery_count for each in mine} == {1}
        assert one.pull(timeout_s=0) == []
        one.ack(mine)
        process.communicate(b"x", timeout=60)
        assert process.returncode == 0 and one.commit([]) == {0: 8}
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_a_member_that_was_paused_with_the_one_that_has_the_turn_does_not_pass_over_it(engine, names, member, tmp_path, monkeypatch):
    put(engine, names[0], 4)
    one, log = member(), tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", STOPS_IN_A_TURN, str(engine.path), *names, str(log), "append before"],
                               env=environment(), stdin=subprocess.PIPE)
    clock, paused_s, members = time.monotonic, [], GroupMembers.members

    def pause_after(self):
        found = members(self)
        paused_s.append(60)
        return found

    def monotonic():
        if paused_s:
            os.kill(process.pid, signal.SIGCONT)
        return clock() + sum(paused_s)

    try:
        eventually(lambda: is_stopped(process.pid), "it has stopped itself")
        for module in (group_session, durable_file):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
        monkeypatch.setattr(GroupMembers, "members", pause_after)
        turns = []
        session_of(one).turn((), lambda: turns.append((*paused_s, session_of(one).log.fence)))
        assert turns == [(60, 0)]
        process.communicate(b"x", timeout=60)
        assert process.returncode == 0
    finally:
        end([process])


def test_an_event_loop_goes_on_while_another_member_is_stopped_in_its_turn(engine, names, member, tmp_path, monkeypatch):
    monkeypatch.setattr(group_session, "PASS_OVER_S", 6.0)
    put(engine, names[0], 8)
    one, log = member(), tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", STOPS_IN_A_TURN, str(engine.path), *names, str(log), "append before"],
                               env=environment(), stdin=subprocess.PIPE)

    async def pull_beside_a_ticker():
        loop, ticks, found = asyncio.get_running_loop(), [], []

        def tick():
            ticks.append(time.monotonic())
            loop.call_later(0.05, tick)

        tick()
        while len(found) < 2:
            found += await one.pull_async(2 - len(found))
        one.ack(found)
        return offsets(found), max(after - before for before, after in itertools.pairwise([*ticks, time.monotonic()]))

    try:
        eventually(lambda: is_stopped(process.pid), "it has stopped itself")
        found, longest_s = asyncio.run(pull_beside_a_ticker())
        assert found == [2, 3] and longest_s < 2
    finally:
        end([process])


def test_an_event_loop_does_not_store_what_is_done_before_a_suspect_comes(engine, names, member, monkeypatch):
    put(engine, names[0], 2)
    one, threads, store = member(commit_interval_s=60), [], group_session.SharedSession.store

    def noting(*arguments):
        threads.append(threading.current_thread().name)
        return store(*arguments)

    async def main():
        for _ in range(2):
            one.requeue(await one.pull_async(2))
        monkeypatch.setattr(group_session.SharedSession, "store", noting)
        return await one.pull_async(2), await one.pull_async(2)

    assert [counted(found) for found in asyncio.run(main())] == [[(0, 3)], [(1, 3)]]
    assert threads and "MainThread" not in threads


def test_a_pull_that_a_signal_handler_interrupts_keeps_no_other_thread_or_member_from_its_turn(engine, names, member):
    put(engine, names[0], 1)
    one, two = member(), member()
    found, errors = [], []

    def call() -> None:
        try:
            found[:] = one.pull(1, timeout_s=0)
        except Interrupt as error:
            errors[:] = [error]  # with all frames, as sys.last_exc
            raise

    for _ in interrupted_at_each_place(call):
        threads = [threading.Thread(target=session_of(each).wait_for_turn, daemon=True) for each in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scaled_timeout_s(30))
            assert not thread.is_alive(), errors
    eventually(lambda: found or call() or found, "the message")


def test_a_signal_handler_may_close_a_member_that_waits_for_its_turn(engine, names, monkeypatch):
    put(engine, names[0], 2)
    one = pyengine.consume(engine.path, names[0], group=names[1], auto_commit=False, commit_interval_s=0.05, sharing="messages")
    first, waits, tends = pull(one), threading.Event(), threading.Event()
    wait_for_turn, tend, try_table = session_of(one).wait_for_turn, session_of(one).tend, GroupMembers.try_table

    def waiting():
        waits.set()
        wait_for_turn()

    def tending():
        tends.set()
        assert waits.wait(scaled_timeout_s(20))
        tend()

    def interrupted(*args):
        if threading.current_thread() is not asking:
            return try_table(*args)
        if waits.is_set() and not closed:
            closed.append(True)
            assert tends.wait(scaled_timeout_s(20))
            one.close()
        return waits.is_set() and try_table(*args)

    closed: list[bool] = []
    monkeypatch.setattr(session_of(one), "wait_for_turn", waiting)
    monkeypatch.setattr(session_of(one), "tend", tending)
    monkeypatch.setattr(GroupMembers, "try_table", interrupted)
    asking = threading.Thread(target=lambda: one.pull(timeout_s=None), daemon=True)
    one.ack(first)
    asking.start()
    asking.join(scaled_timeout_s(20))
    assert not asking.is_alive(), "it waits for itself"
    eventually(lambda: "closed" in repr(one), "it is closed")


KEEPS_QUEUE_0 = """
import os, select, sys
import pyengine
store, topic, group, log, sharing = sys.argv[1:6]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with pyengine.consume(store, topic, group=group, auto_commit=False, commit_interval_s=0.05, session_timeout_s=5,
                      sharing=sharing) as consumer:
    kept = []
    while True:
        found = consumer.pull(3, timeout_s=0.1)
        os.write(out, b"".join(b"%d\\n" % message.queue_id for message in found))
        kept += [message for message in found if message.queue_id == 0]
        consumer.ack([message for message in found if message.queue_id == 1])
        if select.select([0], [], [], 0)[0]:
            os.read(0, 1)
            consumer.ack(kept)
"""


def test_members_that_were_stopped_together_take_nothing_from_each_other(engine, names, tmp_path):
    """Like the processes of a container that is paused. The others look at the members a moment before the first ones run again."""
    kinds = "queues", "messages"
    processes, logs = {}, {}

    def start(name):
        for kind in kinds:
            log = logs[name, kind] = tmp_path / f"{name}-{kind}"
            processes[name, kind] = subprocess.Popen(
                [sys.executable, "-c", KEEPS_QUEUE_0, str(engine.path), names[0], f"{names[1]}-{kind}", str(log), kind], env=environment(),
                stdin=subprocess.PIPE)

    def send(name, number):
        with durable_file.exclusive(ConsumerOffsets(engine.path).path):  # so that no process is stopped with this lock
            for kind in kinds:
                os.kill(processes[name, kind].pid, number)
            if number == signal.SIGSTOP:
                eventually(lambda: all(is_stopped(processes[name, kind].pid) for kind in kinds), "they are stopped")

    numbers = itertools.count(1)

    def put_and_wait(done=0):
        put(engine, names[0], 1, 1)
        offsets = {0: done, 1: next(numbers)}
        eventually(lambda: all(ConsumerOffsets(engine.path).read(names[0], f"{names[1]}-{kind}") == offsets for kind in kinds),
                   f"the offsets {offsets} are stored")

    try:
        put(engine, names[0], 3, 0)
        start("first")
        put_and_wait()
        start("other")
        eventually(lambda: put_and_wait() or lines(logs["other", "queues"]), "it owns queue 1")
        send("first", signal.SIGSTOP)
        put_and_wait()
        send("other", signal.SIGSTOP)
        stopped_s = time.monotonic()
        eventually(lambda: time.monotonic() >= stopped_s + 5, "the timeout is over")
        send("other", signal.SIGCONT)
        put_and_wait()
        send("first", signal.SIGCONT)
        for kind in kinds:
            processes["first", kind].stdin.write(b"x")
            processes["first", kind].stdin.flush()
        put_and_wait(done=3)
    finally:
        end(processes.values())
    assert {kind: lines(logs["other", kind]).count([b"0"]) for kind in kinds} == {"queues": 0, "messages": 0}


def test_a_handler_of_a_shared_group_that_kills_is_a_dead_letter_and_the_slow_one_beside_it_is_none(engine, names, tmp_path):
    put(engine, names[0], 1)
    with engine.connect() as producer:
        producer.put_many(names[0], [b"poison", b"after"], queue_id=0)
    program = """
import os, sys, threading
import pyengine
begun = threading.Event()
def handle(message):
    if message.body == b"00000":
        begun.set()
        threading.Event().wait(0.5)
    if message.body == b"poison":
        begun.wait(0.3)
        os.kill(os.getpid(), 9)
pyengine.run_consumer(*sys.argv[1:4], handle, concurrency=3, commit_interval_s=0.05, max_deliveries=3, sharing="messages")
"""
    letters = pyengine.DeadLetters(engine.path)

    def is_over():
        return [each.body for each in letters.messages(names[1])] == [b"poison"] and stored(engine, names) == {0: 3}

    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program, str(engine.path), *names], env=environment())
        try:
            eventually(lambda: process.poll() is not None or is_over(), "a kill, or the dead letter")
        finally:
            process.kill()
            process.wait()
    assert is_over()


def test_the_ack_file_of_a_shared_group_is_one_that_a_holder_of_the_queue_reads(engine, names, member):
    put(engine, names[0], 10)
    one = member()
    found = pull(one, 8)
    one.ack(found[3:])
    one.commit([])
    (*_, state) = AckFile(engine.path, "@".join(names)).read()[0]
    assert (state.offset, state.end, state.acked) == (0, 8, ((3, 8),))
    assert {run[2] for run in state.taken} == {members_of(one).incarnation}
