"""Transactions in RocketMQ's half topic: what is stored, who is asked when, and what a kill leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import pyengine
from crash.replicas import free_port
from fix_cli import environment
from fix_client import leave_cancelled
from fix_engine import SMALL
from fix_golden import usual
from pyengine.client import half_messages
from pyengine.client.half_messages import HalfMessages, PreparedCheck, commit_of, half_of, op_of
from pyengine.client.outgoing import RawMessage
from pyengine.client.transactions import GroupTransactions
from pyengine.engine_config import EngineConfig
from pyengine.errors import UsageError
from pyengine.formats.record import decode_properties
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.results import PutError, PutIndeterminateError, PutResult, PutStatus
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.engine_id import raise_epoch
from waiting import eventually, scaled_timeout_s

HALF, OP, DISCARDED = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
GROUP = "CID_RMQ_SYS_TRANS"
NO_TIME = {"transaction_timeout_ms": 0, "transaction_check_interval_ms": 86_400_000, "flush_interval_commit_log_ms": 10}


@pytest.fixture
def engine(tmp_path):
    """Transactions are asked about at once, but only by check_transactions()."""
    with pyengine.Engine(tmp_path / "store", **NO_TIME, **SMALL) as engine:
        yield engine


@pytest.fixture
def producer(engine):
    with engine.connect() as producer:
        yield producer


class Halves(HalfMessages):
    """With a clock that the test sets ahead, and a steady one that it moves."""

    def __init__(self, engine, producer) -> None:
        self.ahead_ms, self.waited_ms, self.of_engine = 0, 0, EngineConfig()
        super().__init__(engine.path, lambda raw, timeout_s: producer.put_raw(raw, timeout_s=timeout_s), lambda: self.of_engine)
        clock_ms = self.now_ms
        self.now_ms = lambda: clock_ms() + self.ahead_ms
        self.steady_ms = lambda: self.waited_ms


@pytest.fixture
def halves(engine, producer):
    made = Halves(engine, producer)
    yield made
    made.close()


def messages(engine, topic, queue_id=0):
    """All of the queue, dispatched or not when it is asked."""
    with engine.open_store() as store:
        end = store.max_physical_offset("committed")
        eventually(lambda: store.dispatched_offset("committed") >= end, "all is dispatched")
        found = []
        while more := store.get_message(topic, queue_id, len(found), level="committed").messages:
            found += more
        return found


def bodies(engine, topic="orders", queue_id=0):
    return [message.body for message in messages(engine, topic, queue_id)]


def offsets(engine):
    """(next half offset, next op offset) of the check; 0 where there is none."""
    return tuple(ConsumerOffsets(engine.path).read(topic, GROUP).get(0, 0) for topic in (HALF, OP))


def prepare(halves, body=b"x", *, group="g", unique_key="U", more="", **fields):
    text = f"TRAN_MSG\x01true\x02PGROUP\x01{group}\x02UNIQ_KEY\x01{unique_key}{more}"
    result, half = halves.prepare(RawMessage("orders", body, properties_text=text, sys_flag=4, born_timestamp_ms=halves.now_ms(),
                                             **fields))
    assert result.ok
    return half


def rounds(engine, check, can_ask=lambda half: True):
    messages(engine, HALF)
    messages(engine, OP)
    return check.round(can_ask)


# --- what is stored -------------------------------------------------------------------------------


def test_a_half_message_is_the_message_in_another_topic():
    raw = RawMessage("orders", b"x", queue_id=3, properties_text="TRAN_MSG\x01true\x02PGROUP\x01g\x02TAGS\x01t", sys_flag=5, flag=7)
    half = half_of(raw)
    assert (half.topic, half.queue_id, half.sys_flag, half.flag, half.body) == (HALF, 0, 1, 7, b"x")
    assert decode_properties(half.properties_text) == {
        "TRAN_MSG": "true", "PGROUP": "g", "TAGS": "t", "REAL_TOPIC": "orders", "REAL_QID": "3"}


def test_a_delay_is_in_the_half_message_and_begins_with_the_commit():
    """A broker delivers the first as we do, and puts the second into the topic where pyengine finds it."""
    raw = RawMessage("orders", b"x", queue_id=3, properties_text="TRAN_MSGtrue", sys_flag=5)
    half = half_of(dataclasses.replace(raw, delay_level=3))
    assert half.delay_level == 0 and decode_properties(half.properties_text) == {
        "TRAN_MSG": "true", "REAL_TOPIC": "orders", "REAL_QID": "3", "DELAY": "3"}
    half = half_of(dataclasses.replace(raw, deliver_at_ms=1_900_000_000_000))
    assert half.deliver_at_ms == 0 and decode_properties(half.properties_text) == {
        "TRAN_MSG": "true", "REAL_TOPIC": "RMQ_SYS_PYENGINE_TIMER", "REAL_QID": "0", "DELAY": "10", "__PYENGINE_TOPIC": "orders",
        "__PYENGINE_QID": "3", "__PYENGINE_DELIVER_AT": "1900000000000", "__PYENGINE_FIRST": "0000000000000000000-0000000000000"}


def test_a_commit_and_an_op_message_are_the_brokers(engine, producer, halves):
    half = prepare(halves, queue_id=3, flag=7)
    commit = commit_of(half)
    assert (commit.topic, commit.queue_id, commit.sys_flag, commit.flag) == ("orders", 3, 8, 7)
    assert commit.prepared_transaction_offset == half.physical_offset
    assert decode_properties(commit.properties_text) == half.properties  # the broker's text keeps TRAN_MSG and REAL_TOPIC
    op = op_of(half, 17, 1000, "1.2.3.4:5")
    assert (op.topic, op.queue_id, op.body, op.properties_text) == (OP, 0, b"17", "WAIT\x01true\x02TAGS\x01d")
    assert (op.born_host, op.store_host, op.sys_flag, op.born_timestamp_ms) == ("1.2.3.4:5", "1.2.3.4:5", 0, 1000)
    assert halves.find(half.physical_offset) == messages(engine, HALF)[0]
    assert halves.find(producer.put("orders", b"plain").physical_offset) is None


def test_a_message_without_a_topic_is_no_half_message(engine, producer, halves):
    producer.put_raw(RawMessage(HALF, b"x"))
    (stray,) = messages(engine, HALF)
    with pytest.raises(UsageError, match="names no topic"):
        halves.end(stray, "commit")


# --- with blocks ----------------------------------------------------------------------------------


def test_a_block_commits_at_its_end(engine, producer):
    with producer.transaction(group="shop") as transaction:
        transaction.put("orders", b"one", queue_id=2, tags="paid", keys="k", properties={"own": "1"}, flag=5)
        transaction.put("bills", b"two")
        assert bodies(engine, "orders", 2) == bodies(engine, "bills") == [] and transaction.results == []
    (one,), (two,) = messages(engine, "orders", 2), messages(engine, "bills")
    assert (one.body, one.tags, one.keys, one.flag, one.properties["own"], one.properties["PGROUP"]) == (
        b"one", "paid", "k", 5, "1", "shop")
    assert [result.msg_id for result in transaction.results] == [one.msg_id, two.msg_id]
    half = messages(engine, HALF)[0]
    assert (one.sys_flag, one.prepared_transaction_offset, one.born_timestamp_ms) == (8, half.physical_offset, half.born_timestamp_ms)
    assert bodies(engine, OP) == [b"0", b"1"]
    entry = TopicConfigs(engine.path).read().rows[HALF]
    assert (entry.read_queue_nums, entry.write_queue_nums, entry.perm) == (1, 1, 6)


def test_messages_of_a_block_are_delivered_later_if_they_ask_for_it(engine, producer):
    with producer.transaction(group="shop") as transaction:
        transaction.put("orders", b"level", delay_level=1, queue_id=2)
        transaction.put("bills", b"time", deliver_at=datetime.timedelta(milliseconds=500))
        transaction.put("notes", b"over", deliver_at=datetime.timedelta(-1))
    with pytest.raises(ZeroDivisionError), producer.transaction() as other:
        other.put("orders", b"never", delay_level=1, queue_id=2)
        raise ZeroDivisionError
    assert [result.topic for result in transaction.results] == [SCHEDULE, SCHEDULE, "notes"]
    assert bodies(engine, "orders", 2) == bodies(engine, "bills") == [] and bodies(engine, "notes") == [b"over"]
    eventually(lambda: bodies(engine, "bills"), "its time has come")
    eventually(lambda: bodies(engine, "orders", 2), "its level is over")
    (bill,), (order,), (note,) = messages(engine, "bills"), messages(engine, "orders", 2), messages(engine, "notes")
    assert (order.body, order.properties["PGROUP"], order.sys_flag) == (b"level", "shop", 8)
    for one in (bill, note):
        assert not {"DELAY", "__PYENGINE_TOPIC", "__PYENGINE_QID", "__PYENGINE_DELIVER_AT", "__PYENGINE_FIRST"} & one.properties.keys()
    for wrong in ({"delay_level": -1}, {"delay_level": 1, "deliver_at": 0}, {"deliver_at": datetime.timedelta(41)}):
        with pytest.raises((PutError, UsageError)), producer.transaction() as transaction:
            transaction.put("orders", b"x", **wrong)


@pytest.mark.parametrize("delay", [pytest.param({"delay_level": 1}, marks=pytest.mark.ci), {"deliver_at_ms": 1}], ids=["level", "time"])
def test_a_delayed_commit_is_found_where_it_waits_and_not_repeated(engine, halves, delay):
    if "deliver_at_ms" in delay:
        delay = {"deliver_at_ms": halves.now_ms() + 1500}
    half = prepare(halves, **delay)
    halves.ahead_ms = 10_000
    (asked,) = rounds(engine, PreparedCheck(halves))
    assert half_messages.real_queue(asked) == ("orders", 0)
    messages(engine, HALF)
    first = halves.end(half, "commit")
    messages(engine, SCHEDULE)
    assert first.topic == SCHEDULE and halves.end(asked, "commit").msg_id == first.msg_id
    eventually(lambda: bodies(engine), "it is delivered")
    assert halves.end(asked, "commit").topic == "orders" and bodies(engine) == [b"x"]


def test_an_async_block_commits_or_takes_back_as_well(engine, producer):
    async def main(body: bytes, error: BaseException | None) -> None:
        async with producer.transaction() as transaction:
            transaction.put("orders", body)
            if error is not None:
                raise error

    asyncio.run(main(b"one", None))
    for error in (ZeroDivisionError(), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            asyncio.run(main(b"two", error))
    assert bodies(engine) == [b"one"] and bodies(engine, OP) == [b"0", b"1", b"2"]


def test_a_block_whose_end_is_cancelled_before_a_thread_is_free_waits_for_one_and_is_committed(engine, producer):
    leave_cancelled(producer.transaction(), lambda transaction: transaction.put("orders", b"one"))
    assert bodies(engine) == [b"one"]
    for end in (engine.connect(), engine.open_store()):
        leave_cancelled(end)
        with pytest.raises(UsageError, match="closed"):
            end.__enter__()


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_signal_handler_that_raises_during_the_end_keeps_no_later_message_from_it(engine, producer, monkeypatch, is_rolled_back):
    end, ended = HalfMessages.end, []

    def interrupted(halves, half, outcome):
        ended.append(half.body)
        if half.body == b"two":
            raise KeyboardInterrupt
        return end(halves, half, outcome)

    monkeypatch.setattr(HalfMessages, "end", interrupted)
    with pytest.raises(KeyboardInterrupt), producer.transaction() as transaction:
        for body in (b"one", b"two", b"three"):
            transaction.put("orders", body)
        if is_rolled_back:
            raise ZeroDivisionError
    monkeypatch.undo()
    assert ended == [b"one", b"two", b"three"] and bodies(engine, OP) == [b"0", b"2"]
    assert bodies(engine) == ([] if is_rolled_back else [b"one", b"three"])
    asked = []
    with producer.transaction(checker=asked.append):
        producer.check_transactions()
    assert {message.body for message in asked} == {b"two"}, "of what it interrupted the checker is asked"


@pytest.mark.parametrize("inside", ["check", "end"])
def test_a_signal_handler_may_close_in_a_call_that_the_checkers_thread_waits_for(engine, monkeypatch, inside):
    producer, asks = engine.connect(), threading.Event()
    block = producer.transaction(checker=lambda message: None)
    owner, check_now, closed = producer._group_transactions, GroupTransactions.check_now, []

    def checking(owner, *given):
        if threading.current_thread() is owner._thread:
            asks.set()
        return check_now(owner, *given)

    def close_in(call):
        def closing(*given):
            if threading.current_thread() is not calling or closed:
                return call(*given)
            closed.append(True)
            owner._wake.put(None)
            assert asks.wait(scaled_timeout_s(30))
            producer.close()
            return call(*given)

        return closing

    def end() -> None:
        with contextlib.suppress(PutError), block as transaction:
            transaction.put("orders", b"one")

    asks.clear()
    monkeypatch.setattr(GroupTransactions, "check_now", checking)
    monkeypatch.setattr(HalfMessages, "_may_be_put_back", lambda *_: True)
    place, name = (PreparedCheck, "round") if inside == "check" else (HalfMessages, "_copies_of")
    monkeypatch.setattr(place, name, close_in(getattr(place, name)))
    calling = threading.Thread(target=producer.check_transactions if inside == "check" else end, daemon=True)
    calling.start()
    calling.join(scaled_timeout_s(30))
    assert not calling.is_alive(), "it waits for itself"
    owner._thread.join(scaled_timeout_s(30))
    assert not owner._thread.is_alive() and owner.halves._reader is None


def test_a_block_that_ends_by_an_exception_takes_its_messages_back(engine, producer):
    with pytest.raises(ZeroDivisionError), producer.transaction() as transaction:
        transaction.put("orders", b"one")
        transaction.put("orders", b"two")
        raise ZeroDivisionError
    assert bodies(engine) == [] and bodies(engine, OP) == [b"0", b"1"] and transaction.results == []
    asked = []
    with producer.transaction(checker=asked.append):
        pass
    assert producer.check_transactions() == 0 and asked == []


def test_a_put_after_the_end_of_its_block_is_refused_and_the_block_can_begin_again(engine, producer):
    block = producer.transaction()
    with pytest.raises(UsageError, match="the block of this transaction has not begun: put[(][)] belongs inside of it"):
        block.put("orders", b"too early")
    with block as first:
        first.put("orders", b"one")
    with pytest.raises(ValueError, match="oops"), producer.transaction() as undone:
        raise ValueError("oops")
    for ended in (first, undone):
        with pytest.raises(UsageError, match="the block of this transaction has ended: put[(][)] belongs inside of it"):
            ended.put("orders", b"too late")
    with block as second:
        second.put("orders", b"two")
    assert bodies(engine) == [b"one", b"two"] and len(messages(engine, HALF)) == 2
    with pytest.raises(TypeError, match="^checker must be a function, not str$"):
        producer.transaction(checker="commit")


def test_a_message_that_put_would_refuse_ends_the_block(engine, producer):
    with pytest.raises(PutError, match="MESSAGE_ILLEGAL"), producer.transaction() as transaction:
        transaction.put("orders", b"good")
        transaction.put("or/ders", b"bad")
    assert bodies(engine) == [] and len(messages(engine, HALF)) == 1
    for wrong in (-1, 1 << 31):  # of more digits than a number of the property text has it would be no time at all
        with pytest.raises(UsageError, match="check_after_s"):
            producer.transaction(check_after_s=wrong)


def test_queues_of_a_transaction_are_chosen_as_of_a_put(engine, producer):
    with producer.transaction() as transaction:
        transaction.put("keyed", b"x", sharding_key="a")
        transaction.put("keyed", b"y", sharding_key="a")
    queues = {result.queue_id for result in transaction.results}
    assert queues == {producer.put("keyed", b"z", sharding_key="a").queue_id}


BUSY = PutResult(PutStatus.OS_PAGECACHE_BUSY, reason="busy")


def answer_raw_puts(patch, target, answer) -> None:
    """Answer the puts of whole records by a producer, or by its half messages; `answer(raw)` is None for those that are put."""
    put_raw = target._put_raw
    patch.setattr(target, "_put_raw", lambda *given: put_raw(*given) if (found := answer(given[-2])) is None else found)


def test_a_commit_that_is_refused_is_an_error_and_asked_about_later(engine, producer, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(PutIndeterminateError, match="busy"), producer.transaction() as transaction:
        transaction.put("orders", b"x")
        answer_raw_puts(patch, pyengine.Producer, lambda raw: BUSY)
    assert bodies(engine) == []
    with producer.transaction(checker=lambda message: "commit"):
        pass
    eventually(lambda: producer.check_transactions() or bodies(engine) == [b"x"], "it is committed")
    assert bodies(engine) == [b"x"]


# --- the check ------------------------------------------------------------------------------------


def test_decided_half_messages_are_not_checked_and_the_offsets_move_past_them(engine, halves):
    check = PreparedCheck(halves)
    for number in range(3):
        halves.end(prepare(halves, unique_key=str(number)), "commit" if number else "rollback")
    halves.ahead_ms = 10_000
    assert rounds(engine, check) == [] and offsets(engine) == (3, 3)
    assert len(bodies(engine)) == 2


def test_an_undecided_message_is_put_back_counted_and_given_out(engine, halves):
    half = prepare(halves)
    check = PreparedCheck(halves)
    assert rounds(engine, check) == [] and offsets(engine) == (0, 0)  # too young
    halves.ahead_ms = 10_000
    (asked,) = rounds(engine, check)
    assert asked.properties == half.properties | {"TRANSACTION_CHECK_TIMES": "1"} and asked.queue_offset == 1
    stored = messages(engine, HALF)[1]
    assert (stored.properties, stored.physical_offset, stored.born_timestamp_ms) == (
        asked.properties, asked.physical_offset, half.born_timestamp_ms)
    assert offsets(engine) == (1, 0)
    halves.end(asked, "commit")
    halves.ahead_ms += 1
    assert rounds(engine, check) == [] and bodies(engine) == [b"x"] and offsets(engine)[0] == 2


def test_the_first_end_is_found_although_the_message_was_put_back(engine, halves):
    """The producer that was slow commits what it holds; the checker's answer for the copy stores nothing twice."""
    half = prepare(halves)
    halves.ahead_ms = 10_000
    (asked,) = rounds(engine, PreparedCheck(halves))
    messages(engine, HALF)
    first = halves.end(half, "commit")
    bodies(engine)
    assert halves.end(asked, "commit").msg_id == first.msg_id
    assert bodies(engine) == [b"x"] and rounds(engine, PreparedCheck(halves)) == []


def test_a_message_that_was_asked_about_too_often_is_put_aside(engine, halves):
    prepare(halves)
    halves.of_engine = dataclasses.replace(halves.config, transaction_check_max=3)
    check = PreparedCheck(halves)
    halves.ahead_ms = 10_000
    for times in range(1, 4):
        (asked,) = rounds(engine, check)
        assert asked.properties["TRANSACTION_CHECK_TIMES"] == str(times)
        halves.ahead_ms += 1000
    assert rounds(engine, check) == []
    (discarded,) = messages(engine, DISCARDED)
    assert (discarded.body, discarded.properties["REAL_TOPIC"]) == (b"x", "orders") and offsets(engine) == (4, 0)
    assert TopicConfigs(engine.path).read().rows[DISCARDED].write_queue_nums == 1


def test_a_message_that_was_put_aside_is_asked_about_from_the_first_try_on(engine, halves):
    half = prepare(halves)
    halves.ahead_ms = 10_000
    halves.of_engine = dataclasses.replace(halves.config, transaction_check_max=0)
    assert rounds(engine, PreparedCheck(halves)) == []
    halves.of_engine = dataclasses.replace(halves.config, transaction_check_max=15)
    (discarded,) = messages(engine, DISCARDED)
    for offset in (half.physical_offset, discarded.physical_offset + 1, 1 << 60):
        assert halves.find(offset, DISCARDED) is None
    halves.resume(halves.find(discarded.physical_offset, DISCARDED))
    (asked,) = rounds(engine, PreparedCheck(halves))
    assert (asked.topic, asked.properties["TRANSACTION_CHECK_TIMES"]) == (HALF, "1")
    assert halves.end(asked, "commit").stored and bodies(engine) == [b"x"]


@pytest.mark.parametrize("kept_hours", [0, pytest.param(72, marks=pytest.mark.ci), 100_000])
def test_a_message_is_put_aside_after_72_hours_however_long_the_log_is_kept(engine, halves, kept_hours):
    prepare(halves)
    halves.of_engine = dataclasses.replace(halves.config, file_reserved_time_hours=kept_hours)
    halves.ahead_ms = 71 * 3_600_000
    assert len(rounds(engine, PreparedCheck(halves))) == 1
    halves.ahead_ms = 73 * 3_600_000
    assert rounds(engine, PreparedCheck(halves)) == [] and len(messages(engine, DISCARDED)) == 1


def test_the_clock_of_the_store_may_be_ahead_of_a_message_that_is_asked_about(engine, halves):
    """It stays where it is until the wall clock has passed it, perhaps for days."""
    halves.ahead_ms = -24 * 3_600_000
    prepare(halves, b"other", group="other", unique_key="A")
    prepare(halves, b"mine", group="mine", unique_key="B")
    halves.ahead_ms += 10_000
    messages(engine, HALF)
    (asked,) = PreparedCheck(halves).round(lambda half: half.properties["PGROUP"] == "mine", 30_000)
    assert asked.body == b"mine"
    messages(engine, HALF)
    assert halves.end(asked, "commit").stored and bodies(engine) == [b"mine"]


def test_a_group_that_cannot_be_asked_loses_no_try_and_keeps_none_up(engine, halves):
    prepare(halves, b"other", group="other", unique_key="A")
    prepare(halves, b"mine", group="mine", unique_key="B")
    halves.ahead_ms = 10_000
    check = PreparedCheck(halves)
    (asked,) = rounds(engine, check, lambda half: half.properties["PGROUP"] == "mine")
    assert asked.body == b"mine" and offsets(engine) == (2, 0)
    halves.ahead_ms += 1000
    asked = rounds(engine, check)
    assert {one.body: one.properties["TRANSACTION_CHECK_TIMES"] for one in asked} == {b"other": "1", b"mine": "2"}


def test_a_message_that_the_last_round_did_not_come_to_loses_no_try(engine, halves):
    prepare(halves)
    halves.ahead_ms = 10_000
    check = PreparedCheck(halves)
    for times in ("1", "1", "2"):
        (asked,) = rounds(engine, check)
        assert asked.properties["TRANSACTION_CHECK_TIMES"] == times
        check.not_asked = {asked.physical_offset} if times == "1" and halves.ahead_ms == 10_000 else set()
        halves.ahead_ms += 1000


def test_a_group_that_cannot_be_asked_is_not_put_back_by_each_process_in_turn(engine, halves):
    """Each of many processes would store a copy of each such message in each interval, for the 72 hours that it is kept."""
    prepare(halves)
    messages(engine, HALF)
    halves.ahead_ms = 10_000
    for _ in range(3):
        assert PreparedCheck(halves).round(lambda half: False, 30_000) == []
    assert len(messages(engine, HALF)) == 1
    halves.ahead_ms = 31_000
    assert PreparedCheck(halves).round(lambda half: False, 30_000) == []
    assert len(messages(engine, HALF)) == 2


def test_nor_is_it_while_the_clock_of_the_store_is_ahead(engine, halves):
    """All store times are the same then. The process that can ask does, although another one has just put the message back."""
    halves.ahead_ms = -24 * 3_600_000
    prepare(halves)
    for ahead_ms, copies in ((10_000, 1), (600_000, 2)):
        halves.ahead_ms += ahead_ms
        for _ in range(3):
            messages(engine, HALF)
            assert PreparedCheck(halves).round(lambda half: False, 600_000) == []
        assert len(messages(engine, HALF)) == 1 + copies
    (asked,) = PreparedCheck(halves).round(lambda half: True, 600_000)
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1"


def test_an_immunity_time_keeps_a_message_from_being_asked_about(engine, halves):
    half = prepare(halves, more="\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x0160")
    halves.ahead_ms = 10_000
    assert rounds(engine, PreparedCheck(halves)) == []
    copy = messages(engine, HALF)[1]
    assert copy.properties == half.properties | {"TRAN_PREPARED_QUEUE_OFFSET": "0"}
    halves.ahead_ms = 61_000
    (asked,) = rounds(engine, PreparedCheck(halves))
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1" and asked.body == b"x"


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
@pytest.mark.parametrize("has_index", usual([True, False], [True], pytest.mark.ci))
@pytest.mark.parametrize("ends_during_a_round", usual([False, True], [True], pytest.mark.ci))
def test_a_transaction_that_has_ended_within_its_immunity_time_is_not_asked_about(
        tmp_path, monkeypatch, outcome, has_index, ends_during_a_round):
    """The end names the original, which is a copy by then, or becomes one just after the round has looked for ends."""
    expected = [b"x"] if outcome == "commit" else []
    with (pyengine.Engine(tmp_path / "store", message_index_enable=has_index, **NO_TIME, **SMALL) as engine, engine.connect() as producer,
          contextlib.closing(Halves(engine, producer)) as halves):
        half = prepare(halves, more="\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x0160")
        other = prepare(halves, b"of one that died", unique_key="V")
        halves.ahead_ms = 1000
        put_back = halves.put_back
        with monkeypatch.context() as patch:
            if ends_during_a_round:
                patch.setattr(halves, "put_back", lambda *given: halves.end(half, outcome) and put_back(*given))
            assert rounds(engine, PreparedCheck(halves)) == [] and offsets(engine) == (1, 0)  # the other one is too young
        if not ends_during_a_round:
            halves.end(half, outcome)
        assert rounds(engine, PreparedCheck(halves)) == [] and offsets(engine) == (1, 0)  # so it does not come to the copy
        halves.ahead_ms = 70_000
        (asked,) = rounds(engine, PreparedCheck(halves))
        assert asked.uniq_key == other.uniq_key and offsets(engine) == (3, 1) and bodies(engine) == expected
        halves.end(asked, "rollback")
        assert rounds(engine, PreparedCheck(halves)) == [] and offsets(engine) == (4, 2 + has_index)


def test_an_immunity_time_below_the_timeout_commits_nothing_twice(engine, halves):
    half = prepare(halves, more="\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x011")
    halves.ahead_ms = 2000
    (asked,) = rounds(engine, PreparedCheck(halves))
    messages(engine, HALF)
    halves.end(half, "commit")
    bodies(engine)
    halves.end(asked, "commit")
    assert bodies(engine) == [b"x"]


def test_a_producers_clock_that_is_ahead_has_it_asked_no_sooner(engine, halves):
    """It would be asked while it is at work, and what it commits then would be committed by its answer too."""
    halves.ahead_ms = 3_600_000
    half = prepare(halves)
    halves.ahead_ms = 1000
    assert rounds(engine, PreparedCheck(halves)) == []
    halves.ahead_ms = 10_000
    (asked,) = rounds(engine, PreparedCheck(halves))
    messages(engine, HALF)
    halves.end(asked, "commit")
    bodies(engine)
    halves.end(half, "commit")
    assert bodies(engine) == [b"x"] and rounds(engine, PreparedCheck(halves)) == []


IMMUNE_FOR_60_S = "\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x0160"


@pytest.mark.parametrize(("more", "wait_ms"), [("", 6000), (IMMUNE_FOR_60_S, 60_000)])
@pytest.mark.parametrize("back_hours", [1, 10_000])
def test_messages_ahead_of_a_clock_that_was_set_back_are_asked_about_in_their_time(engine, halves, more, wait_ms, back_hours):
    """One of before that, or a new one of a producer with the right time: the clock of the store stays where it was."""
    first = prepare(halves, b"before", unique_key="A", more=more)
    new = prepare(halves, b"of another host", unique_key="B", more=more)
    halves.ahead_ms = -back_hours * 3_600_000
    check = PreparedCheck(halves)
    for waited_ms in (0, wait_ms // 2, wait_ms - 1):
        halves.waited_ms = waited_ms
        assert rounds(engine, check) == []
    later = prepare(halves, b"after", unique_key="C")
    halves.ahead_ms += 10_000
    halves.waited_ms = wait_ms
    asked = rounds(engine, check)
    assert sorted(one.body for one in asked) == [b"after", b"before", b"of another host"]
    assert offsets(engine)[0] == len(messages(engine, HALF)) - 3, "they keep none up"
    for one in asked:
        halves.end(one, "commit")
    bodies(engine)
    for one in (first, new, later):
        halves.end(one, "commit")
    assert sorted(bodies(engine)) == [b"after", b"before", b"of another host"] and rounds(engine, check) == []


def test_a_message_ahead_of_the_clock_is_asked_about_although_another_process_puts_it_back(engine, halves):
    prepare(halves)
    halves.ahead_ms = -3_600_000
    other = PreparedCheck(halves)
    assert rounds(engine, other, lambda half: False) == []
    for _ in range(2):
        halves.waited_ms += 6000
        assert rounds(engine, other, lambda half: False) == []
    assert len(messages(engine, HALF)) == 3
    (asked,) = rounds(engine, PreparedCheck(halves))
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1"


def test_messages_ahead_of_the_clock_stay_as_old_while_others_arrive(engine, halves, monkeypatch):
    monkeypatch.setattr(half_messages, "SEEN_MAX", 4)
    check, asked = PreparedCheck(halves), []
    for number in range(17):
        halves.ahead_ms = 0
        prepare(halves, unique_key=str(number), more=IMMUNE_FOR_60_S)
        halves.ahead_ms = -3_600_000
        halves.waited_ms = 5000 * number
        asked.append([one.uniq_key for one in rounds(engine, check)])
    assert asked[:12] == [[]] * 12 and all(str(number) in asked[number + 12] for number in range(5))


def test_a_message_ahead_of_the_clock_is_not_older_than_the_recovery_of_its_store(engine, halves):
    """What was at its queue offset may have been cut off."""
    prepare(halves)
    halves.ahead_ms = -3_600_000
    check = PreparedCheck(halves)
    assert rounds(engine, check) == []
    raise_epoch(engine.path)
    halves.waited_ms = 6000
    assert rounds(engine, check) == []
    halves.waited_ms = 12_000
    assert len(rounds(engine, check)) == 1


def test_a_check_continues_from_offsets_and_op_messages_that_a_broker_left(engine, producer, halves):
    """Its offsets, op messages of half messages before them, and an op message that is none."""
    for number in range(4):
        prepare(halves, b"%d" % number, unique_key=str(number))
    for offset in (0, 1):
        producer.put_raw(RawMessage(OP, b"%d" % offset, properties_text="WAIT\x01true\x02TAGS\x01d"))
    producer.put_raw(RawMessage(OP, b"no number", properties_text="TAGS\x01d"))
    ConsumerOffsets(engine.path).commit(HALF, GROUP, {0: 2})
    ConsumerOffsets(engine.path).commit(OP, GROUP, {0: 1})
    halves.ahead_ms = 10_000
    asked = rounds(engine, PreparedCheck(halves))
    assert [one.body for one in asked] == [b"2", b"3"] and offsets(engine) == (4, 3)


def test_one_process_at_a_time_checks(engine, halves):
    prepare(halves)
    halves.ahead_ms = 10_000
    hold = ("import sys\nfrom pyengine.storage.ofd_lock import try_lock\nlock = open(sys.argv[1], 'w')\n"
            "print(try_lock(lock.fileno(), 0, lock), flush=True)\nsys.stdin.read()")
    path = engine.path / "config" / "transactions.lock"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"True\n"
        assert rounds(engine, PreparedCheck(halves)) == []
        other.communicate()
    assert len(rounds(engine, PreparedCheck(halves))) == 1


def test_a_half_message_that_can_never_be_put_back_does_not_stop_those_after_it(engine, producer, halves, caplog):
    """The properties of a check do not fit into its own. RocketMQ's check stops there, for all groups."""
    prepare(halves, b"full", unique_key="F", more="\x02own\x01" + "y" * 32_690)
    prepare(halves, b"after", unique_key="A")
    halves.ahead_ms = 10_000
    check = PreparedCheck(halves)
    assert [one.body for one in rounds(engine, check)] == [b"after"]
    (discarded,) = messages(engine, DISCARDED)
    assert discarded.body == b"full" and "can never be put back" in caplog.text and offsets(engine)[0] == 2


def test_a_half_message_that_can_never_be_stored_again_is_reported_and_passed(engine, producer, halves, caplog, monkeypatch):
    prepare(halves, b"never", unique_key="N")
    prepare(halves, b"after", unique_key="A")
    halves.ahead_ms = 10_000
    refused = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="too large now")
    answer_raw_puts(monkeypatch, halves, lambda raw: refused if raw.body == b"never" else None)
    assert [one.body for one in rounds(engine, PreparedCheck(halves))] == [b"after"]
    assert "can neither be put back nor moved" in caplog.text and messages(engine, DISCARDED) == []


def test_no_other_user_can_open_the_lock_of_the_check(engine, halves):
    lock = engine.path / "config" / "transactions.lock"
    lock.touch(0o644)
    lock.chmod(0o644)  # of an older version
    assert rounds(engine, PreparedCheck(halves)) == [] and lock.stat().st_mode & 0o777 == 0o600


def test_a_commit_that_no_slave_has_confirmed_is_not_made_again(tmp_path, monkeypatch):
    """With dispatch_at=replicated what ends a transaction is in no queue until a slave has it."""
    monkeypatch.setattr(half_messages, "DISPATCH_S", 0.1)
    bounded = {"dispatch_at": "replicated", "ha_listen_port": free_port()}
    with pyengine.Engine(tmp_path / "store", **NO_TIME, **SMALL, **bounded) as engine, engine.connect() as producer, \
            EngineMemory.of(engine.path, writable=True) as memory, engine.open_store() as store:
        memory.open_latches()

        def confirm(end):
            native.publish_confirm(memory.control, end)
            memory.wake(native.REPUTTER)
            eventually(lambda: store.dispatched_offset("committed") >= end, "dispatched")

        halves = Halves(engine, producer)
        half = prepare(halves)
        confirm(half.physical_offset + half.size_bytes)
        halves.end(half, "commit")
        halves.ahead_ms = 10_000
        for asked in PreparedCheck(halves).round(lambda half: True):
            halves.end(asked, "commit")
        confirm(store.max_physical_offset("written"))
        assert bodies(engine) == [b"x"] and PreparedCheck(halves).round(lambda half: True) == []
        halves.close()


def test_a_put_that_is_refused_ends_the_round_where_it_came_to(engine, halves, monkeypatch):
    for key in ("A", "B"):
        prepare(halves, key.encode(), unique_key=key)
    halves.ahead_ms = 10_000
    answers = iter([None])
    with monkeypatch.context() as patch, pytest.raises(PutError, match="next round"):
        answer_raw_puts(patch, halves, lambda raw: next(answers, BUSY))
        rounds(engine, PreparedCheck(halves))
    assert offsets(engine) == (1, 0)
    assert sorted(one.body for one in rounds(engine, PreparedCheck(halves))) == [b"A", b"B"]


def test_the_offsets_wait_for_the_disk_and_the_next_round_continues_meanwhile(tmp_path, monkeypatch):
    """A power cut would take a copy that is not flushed; its original has to be above the offset then."""
    monkeypatch.setattr(half_messages, "FLUSHED_WAIT_S", 0.0)
    with pyengine.Engine(tmp_path / "store", **NO_TIME | {"flush_interval_commit_log_ms": 86_400_000}, **SMALL) as engine:
        with engine.connect() as producer, engine.open_store() as store:
            producer.put("orders", b"flushed at once")
            end = store.max_physical_offset("committed")
            eventually(lambda: store.max_physical_offset("flushed") >= end, "the next flush is a day away")
            halves = Halves(engine, producer)
            halves.end(prepare(halves, unique_key="ended"), "commit")
            prepare(halves, unique_key="undecided")
            halves.ahead_ms = 10_000
            check = PreparedCheck(halves)
            assert len(rounds(engine, check)) == 1 and offsets(engine) == (0, 0)
            halves.ahead_ms += 1000
            (asked,) = rounds(engine, check)
            assert asked.properties["TRANSACTION_CHECK_TIMES"] == "2", "the original is not asked about again"
            assert len(messages(engine, HALF)) == 4 and offsets(engine) == (0, 0)
            raise_epoch(engine.path)
            halves.ahead_ms += 1000
            asked = rounds(engine, check)
            assert [one.properties["TRANSACTION_CHECK_TIMES"] for one in asked] == ["1", "2", "3"], "a recovery may have cut the log"
            halves.flushed_end = lambda: 1 << 60
            halves.ahead_ms += 1000
            assert len(rounds(engine, check)) == 3 and offsets(engine) == (7, 1)
            halves.close()


# --- checkers -------------------------------------------------------------------------------------


def test_the_checker_decides_about_messages_that_a_killed_producer_left(engine, producer):
    dying = """
import os, sys, pyengine
with pyengine.connect(sys.argv[1]) as producer, producer.transaction(group="shop") as transaction:
    for body in (b"commit", b"rollback", b"later"):
        transaction.put("orders", body, queue_id=1)
    os.kill(os.getpid(), 9)
"""
    ran = subprocess.run([sys.executable, "-c", dying, engine.path], env=environment(), timeout=scaled_timeout_s(120), check=False)
    assert ran.returncode == -signal.SIGKILL
    assert len(messages(engine, HALF)) == 3
    asked = []

    def checker(message):
        asked.append((message.topic, message.queue_id, message.body))
        return {b"commit": "commit", b"rollback": "rollback"}.get(message.body)

    with producer.transaction(group="shop", checker=checker):
        pass
    eventually(lambda: len(asked) >= 3 or producer.check_transactions(), "all were asked about")
    assert sorted(asked)[:1] == [("orders", 1, b"commit")] and {body for *_, body in asked} == {b"commit", b"rollback", b"later"}
    assert bodies(engine, queue_id=1) == [b"commit"]
    before = len(asked)
    eventually(lambda: producer.check_transactions() == 1, "the one that was put off is asked about again")
    assert {body for *_, body in asked[before:]} == {b"later"}


def test_a_transaction_that_is_still_open_is_not_asked_about_and_committed_once(engine, producer):
    asked = []
    with producer.transaction(checker=lambda message: asked.append(message) or "rollback") as transaction:
        transaction.put("orders", b"slow")
        eventually(lambda: producer.check_transactions() == 0 and len(messages(engine, HALF)) >= 2, "it was put back")
    assert asked == [] and bodies(engine) == [b"slow"]
    messages(engine, OP)
    assert producer.check_transactions() == 0 and asked == [] and bodies(engine) == [b"slow"]


def test_a_checker_that_fails_is_asked_again(engine, producer):
    calls = []

    def checker(message):
        calls.append(message)
        if len(calls) == 1:
            raise ValueError("not now")
        return "commit"

    with HalfOpen(engine):
        pass
    with producer.transaction(group="shop", checker=checker):
        pass
    eventually(lambda: producer.check_transactions() or len(calls) >= 2, "it was asked twice")
    assert bodies(engine) == [b"left"]


def test_a_message_that_cannot_be_ended_keeps_no_other_from_being_asked_about(engine, producer, halves):
    prepare(halves, b"before", group="shop", unique_key="before")
    messages(engine, HALF)
    with producer.transaction(group="shop", checker=lambda message: "commit"):
        pass
    eventually(lambda: bodies(engine) == [b"before"], "the producer's own thread has asked, and does not again for a day")
    for number in range(3):
        prepare(halves, b"%d" % number, group="shop", unique_key=f"U{number}")
    messages(engine, HALF)
    asked = []

    def checker(message):
        asked.append(message.body)
        return "yes" if message.body == b"0" else "commit"

    with producer.transaction(group="shop", checker=checker):
        pass
    with pytest.raises(UsageError, match="'yes' ends no transaction"):
        producer.check_transactions()
    assert asked == [b"0", b"1", b"2"] and bodies(engine) == [b"before", b"1", b"2"]


class HalfOpen:
    """A producer of `shop` that leaves a message undecided."""

    def __init__(self, engine) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        with self.engine.connect() as producer:
            left = Halves(self.engine, producer)
            prepare(left, b"left", group="shop")
            left.close()
        messages(self.engine, HALF)

    def __exit__(self, *_: object) -> None:
        pass


def test_the_producers_own_thread_asks_and_ends_with_it(tmp_path):
    with pyengine.Engine(tmp_path / "store", transaction_timeout_ms=0, transaction_check_interval_ms=20, **SMALL) as engine:
        with HalfOpen(engine):
            pass
        before = threading.active_count()
        with engine.connect() as producer:
            with producer.transaction(group="shop", checker=lambda message: "commit"):
                pass
            eventually(lambda: bodies(engine) == [b"left"], "it is committed")
        assert threading.active_count() == before and os.path.exists(engine.path)


def test_threads_that_begin_the_first_transaction_together_have_one_thread_that_asks(producer, monkeypatch):
    both, begin = threading.Barrier(2), GroupTransactions.__init__

    def begin_together(*given):
        begin(*given)
        both.wait(scaled_timeout_s(30))

    monkeypatch.setattr(GroupTransactions, "__init__", begin_together)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: producer.transaction(checker=lambda half: None), range(2)))
    assert [thread.name for thread in threading.enumerate()].count("pyengine-transactions") == 1


def test_a_forked_child_closes_its_parents_producer_at_once(engine, producer):
    """At any moment a thread of the parent may have a lock, which it does not give back in the child."""
    with producer.transaction(checker=lambda message: None) as transaction:
        transaction.put("orders", b"x")
    halves, may_end = producer._group_transactions.halves, threading.Event()
    locked = threading.Event()

    def keep():
        with halves.lock:
            locked.set()
            may_end.wait(60)

    thread = threading.Thread(target=keep)
    thread.start()
    assert locked.wait(30)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        producer.close()
        os._exit(0)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert producer.check_transactions() == 0 and producer.put("orders", b"y").ok, "the parent's goes on"


def test_a_child_forked_during_a_round_does_not_keep_the_check_from_others(engine, halves):
    with halves.lock_check() as lock:
        assert lock is not None
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with halves.lock_check() as lock:
            assert lock is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_check_thread_of_a_producer_continues_after_an_error(tmp_path, monkeypatch):
    calls, rounds, run_round = [], [], PreparedCheck.round

    def fails_once(*arguments):
        rounds.append(True)
        if len(rounds) == 1:
            raise MemoryError
        return run_round(*arguments)

    monkeypatch.setattr(PreparedCheck, "round", fails_once)
    with pyengine.Engine(tmp_path / "store", transaction_timeout_ms=0, transaction_check_interval_ms=20, **SMALL) as engine:
        with HalfOpen(engine):
            pass
        with engine.connect() as producer, producer.transaction(group="shop", checker=calls.append):
            eventually(lambda: calls, "the next round asks")


def test_several_producers_of_a_group_ask_no_more_often_than_one(tmp_path, monkeypatch):
    """The checker of a web server with 16 workers would be asked for the last time after a minute, whatever the interval."""
    calls, done, run_round = [], [], PreparedCheck.round

    def counted(*arguments):
        try:
            return run_round(*arguments)
        finally:
            done.append(True)

    monkeypatch.setattr(PreparedCheck, "round", counted)
    with pyengine.Engine(tmp_path / "store", **NO_TIME, **SMALL) as engine:
        with HalfOpen(engine):
            pass
        with engine.connect() as one, engine.connect() as other:
            for number, producer in enumerate((one, other), 1):
                with producer.transaction(group="shop", checker=calls.append):
                    pass
                eventually(lambda number=number: len(done) == number, "its thread has made a round")
            assert len(calls) == 1
            messages(engine, HALF)
            assert other.check_transactions() == 1, "the program's own call asks whenever it is made"
