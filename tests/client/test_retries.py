"""Messages that are given back: their record in the retry topic, their redelivery, and dead letters."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import pyengine
from fix_cli import environment
from fix_client import epoch_of, housekeep, leave_unfinished, retries_of
from fix_engine import SMALL, wait_noted
from fix_store_builder import START_MS
from pyengine.client import retries as retries_module
from pyengine.client.outgoing import delayed
from pyengine.client.retries import REQUEUE_MESSAGES, RetriedMessage, Retries, dlq_topic, fitting, retry_topic, sent_back
from pyengine.errors import EngineError, EngineUnavailableError, StoreBusyError, UsageError
from pyengine.formats.constants import PROPERTIES_BYTES_MAX
from pyengine.formats.record import Message, decode_properties
from pyengine.results import PutError, PutRefusedError, PutStatus
from pyengine.storage import durable_file
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.engine_id import raise_epoch
from waiting import eventually, scaled_timeout_s


@pytest.fixture(scope="module")
def engine(undelayed):
    return undelayed


@pytest.fixture
def consume(engine, names):
    """consume(...) on the engine's store: a Consumer of the test's topic and group that is closed at the end."""
    opened = []

    def make(**options) -> pyengine.Consumer:
        opened.append(pyengine.consume(engine.path, names[0], **({"group": names[1], "from_": "first", "auto_commit": False,
                                                                  "commit_interval_s": 0.05} | options)))
        return opened[-1]

    yield make
    for consumer in opened:
        consumer.close()


def put(engine, topic, *bodies, **options):
    with engine.connect() as producer:
        for body in bodies:
            producer.put(topic, body, **options)


def pull(consumer, count=1):
    """Pull exactly `count` messages."""
    found = []
    eventually(lambda: found.extend(consumer.pull(count - len(found), timeout_s=0.1)) or len(found) == count, f"{count} messages")
    return found


def message(**fields) -> Message:
    properties = fields.pop("properties", {"TAGS": "paid", "KEYS": "k1 k2", "own": "1"})
    fields = {"topic": "orders", "body": b"x", "queue_id": 3, "queue_offset": 7, "physical_offset": 4096, "size_bytes": 200,
              "raw_properties": "\x02".join(f"{name}\x01{value}" for name, value in properties.items()), "flag": 5, "sys_flag": 9,
              "born_timestamp_ms": START_MS, "born_host": "10.0.0.1:1", "store_host": "10.0.0.2:10911"} | fields
    return Message(**fields)


# --- what is stored -------------------------------------------------------------------------------


def test_a_message_given_back_has_the_topic_and_properties_that_a_broker_sets():
    topic, raw, _ = sent_back(message(), "g")
    assert (topic.topic, topic.read_queue_nums, topic.write_queue_nums, topic.perm) == ("%RETRY%g", 1, 1, 6)
    assert decode_properties(raw.properties_text) == {
        "TAGS": "paid", "KEYS": "k1 k2", "own": "1", "RETRY_TOPIC": "orders", "WAIT": "false", "DELAY": "3",
        "ORIGIN_MESSAGE_ID": message().msg_id}
    assert (raw.topic, raw.queue_id, raw.delay_level, raw.reconsume_times) == ("%RETRY%g", 0, 3, 1)
    assert (raw.body, raw.flag, raw.sys_flag, raw.born_timestamp_ms, raw.born_host, raw.store_host) == (
        b"x", 5, 9, START_MS, "10.0.0.1:1", "10.0.0.2:10911")
    assert raw.wait_store_msg_ok  # in sync mode it is on the disk before the original counts as done


def test_the_property_text_is_in_the_order_of_the_brokers_map():
    """Java 17: these names put into a HashMap in this order and iterated."""
    _, raw, _ = sent_back(message(properties={"UNIQ_KEY": "U", "CLUSTER": "c", "TAGS": "t"}), "g")
    topic, queue_id, text = delayed(raw.topic, raw.queue_id, raw.properties_text, raw.delay_level, 18)
    assert (topic, queue_id) == ("SCHEDULE_TOPIC_XXXX", 2)
    assert [piece.partition("\x01")[0] for piece in text.split("\x02")] == [
        "REAL_TOPIC", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "UNIQ_KEY", "CLUSTER", "WAIT", "DELAY", "TAGS", "REAL_QID"]


@pytest.mark.parametrize(("times", "level", "expected"), [(0, 0, 3), (1, 0, 4), (15, 0, 18), (4, 2, 2)])
def test_the_delay_grows_with_each_retry_unless_it_is_given(times, level, expected):
    _, raw, _ = sent_back(message(reconsume_times=times), "g", delay_level=level)
    assert (raw.delay_level, raw.reconsume_times) == (expected, times + 1)


@pytest.mark.parametrize(("times", "most", "level"), [(16, 16, 0), (0, 0, 0), (3, 16, -1), (20, 16, 5)])
def test_after_the_last_retry_a_message_is_a_dead_letter(times, most, level):
    topic, raw, _ = sent_back(message(reconsume_times=times), "g", delay_level=level, max_reconsume_times=most)
    assert (topic.topic, topic.write_queue_nums, raw.topic, raw.queue_id) == ("%DLQ%g", 1, "%DLQ%g", 0)
    assert (raw.delay_level, raw.reconsume_times, decode_properties(raw.properties_text)["DELAY"]) == (0, times + 1, "0")


def test_a_second_retry_keeps_the_first_topic_and_message_id():
    first = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "AA", "DELAY": "3", "REAL_TOPIC": "%RETRY%g", "REAL_QID": "0", "WAIT": "false"}
    _, raw, _ = sent_back(message(topic="%RETRY%g", properties=first, reconsume_times=1), "g")
    assert decode_properties(raw.properties_text) == first | {"DELAY": "4"}


def test_several_retry_queues_are_used():
    used = {sent_back(message(), "g", retry_queue_nums=4)[1].queue_id for _ in range(200)}
    assert used == {0, 1, 2, 3}  # one is missing once in 10^24 runs


def test_a_group_whose_name_leaves_no_room_has_no_retries(builder):
    assert retry_topic("g" * 120) == "%RETRY%" + "g" * 120 and dlq_topic("g") == "%DLQ%g"
    with pytest.raises(UsageError, match="has 121 bytes in UTF-8; give it 1 to 120"):
        sent_back(message(), "g" * 121)
    builder.put("orders", b"x")
    for group in ("g" * 121, "g" * 127, "\xe9" * 61, ""):
        with pytest.raises(UsageError, match="give it 1 to 120"):
            pyengine.consume(builder.root, "orders", group=group)
    with pyengine.consume(builder.root, "orders", group="\xe9" * 60, from_="first") as consumer:
        assert [one.body for one in consumer.pull()] == [b"x"]


def full(size_chars=PROPERTIES_BYTES_MAX, **properties):
    """A message whose property text has this many characters."""
    made = message(properties=properties | {"filler": ""})
    return message(properties=properties | {"filler": "y" * (size_chars - len(made.raw_properties))})


@pytest.mark.parametrize("letter", ["y", "\xe9", "\ufffd"])
def test_a_message_without_room_for_a_retry_is_a_dead_letter_with_what_fits(letter):
    whole = full(TAGS="t", KEYS="k", small="1", other=letter * 2000)
    topic, raw, note = sent_back(whole, "g")
    properties = decode_properties(raw.properties_text)
    assert (topic.topic, raw.topic, raw.delay_level, raw.reconsume_times) == ("%DLQ%g", "%DLQ%g", 0, 1)
    assert len(raw.properties_text.encode()) <= PROPERTIES_BYTES_MAX
    # `other` is the shortest of those that make enough room alone
    assert properties == {"TAGS": "t", "KEYS": "k", "small": "1", "filler": whole.properties["filler"], "RETRY_TOPIC": "orders",
                          "ORIGIN_MESSAGE_ID": whole.msg_id}
    assert whole.msg_id in note and "at once" in note and note.endswith("no room for the properties 'other'")


def test_a_message_with_just_enough_room_is_retried():
    added = len("\x02".join(("RETRY_TOPIC\x01orders", "WAIT\x01false", "DELAY\x013", f"ORIGIN_MESSAGE_ID\x01{message().msg_id}",
                             "REAL_TOPIC\x01%RETRY%g", "REAL_QID\x010"))) + 1
    assert sent_back(full(PROPERTIES_BYTES_MAX - added), "g").topic.topic == "%RETRY%g"
    topic, raw, note = sent_back(full(PROPERTIES_BYTES_MAX - added + 1), "g")
    assert topic.topic == "%DLQ%g" and note.endswith("for those of a retry") and "filler" in decode_properties(raw.properties_text)


def test_many_short_properties_lose_as_few_as_necessary():
    many = {f"p{number:04d}": "v" * 10 for number in range(3000)}
    kept, lost = fitting(many | {"RETRY_TOPIC": "T", "ORIGIN_MESSAGE_ID": "x"})
    size_bytes = len("\x02".join(f"{name}\x01{value}" for name, value in kept.items()))
    assert PROPERTIES_BYTES_MAX - 17 < size_bytes <= PROPERTIES_BYTES_MAX and kept.keys() >= {"RETRY_TOPIC", "ORIGIN_MESSAGE_ID"}
    assert lost.endswith(" more") and len(lost) < 200
    kept, _ = fitting({"KEYS": "k" * 20_000, "TAGS": "t" * 20_000, "RETRY_TOPIC": "T"})
    assert kept.keys() == {"KEYS", "RETRY_TOPIC"} or kept.keys() == {"TAGS", "RETRY_TOPIC"}


def test_no_copy_of_a_message_enters_its_second_queues(tmp_path):
    second = {"INNER_MULTI_DISPATCH": "copies"}
    with (pyengine.Engine(tmp_path / "store", enable_multi_dispatch=True, **SMALL) as engine, engine.connect() as producer,
          pyengine.consume(engine.path, "feed", group="g", auto_commit=False) as consumer):
        producer.put("feed", b"fed", properties=second)
        consumer.retry(*pull(consumer), delay_s=0)
        (again,) = pull(consumer)
        consumer.retry(again, delay_level=-1)
        eventually(lambda: pyengine.DeadLetters(engine.path).requeue("g") == 1, "the dead letter is put back")
        assert pull(consumer)[0].body == b"fed"
        for options in ({"delay_level": 1}, {"deliver_at": datetime.timedelta(seconds=1)}):
            with pytest.raises(PutRefusedError, match="INNER_MULTI_DISPATCH.*or the message is delayed or one of a transaction"):
                producer.put("feed", b"late", properties=second, **options)
        with pytest.raises(PutRefusedError, match="or one of a transaction"), producer.transaction(group="g") as tx:
            tx.put("feed", b"half", properties=second)
        with engine.open_store() as store:
            assert [message.body for message in store.get_message("copies", 0, 0, level="committed").messages] == [b"fed"]


# --- there and back -------------------------------------------------------------------------------


def test_a_message_given_back_comes_again_under_its_own_topic(engine, names, consume):
    put(engine, names[0], b"one", tags="red", keys="k", properties={"own": "1"})
    consumer = consume()
    (first,) = pull(consumer)
    assert consumer.retry(first).ok
    (again,) = pull(consumer)
    assert (again.topic, again.body, again.tags, again.keys, again.reconsume_times) == (names[0], b"one", "red", "k", 1)
    assert again.properties["own"] == "1" and again.properties["ORIGIN_MESSAGE_ID"] == first.msg_id
    consumer.ack(again)
    consumer.close()
    assert consume().pull(timeout_s=0) == []  # neither comes a third time


def test_it_comes_to_a_consumer_that_started_before_the_retry_topic(engine, names, consume):
    put(engine, names[0], b"a", b"b")
    consumer = consume(auto_commit=True)
    a, b = pull(consumer, 2)
    consumer.retry(b)
    consumer.retry(a)
    assert sorted(again.body for again in pull(consumer, 2)) == [b"a", b"b"]


def test_a_message_given_back_without_a_delay_comes_at_once_and_is_counted(engine, names, consume):
    put(engine, names[0], b"a", b"b")
    consumer = consume(max_deliveries=3)
    a, b = pull(consumer, 2)
    assert (a.delivery_count, b.delivery_count) == (1, 1)
    consumer.ack(b)
    consumer.requeue(a)
    for count in (2, 3):
        (again,) = pull(consumer)
        assert (again, again.delivery_count, again.reconsume_times) == (a, count, 0)
        consumer.requeue([again])
    consumer.requeue(b)  # done already
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: consumer.pull(timeout_s=0.1) == [] and [one.body for one in letters.messages(names[1])] == [b"a"], "the dead letter")
    assert "was delivered 3 times and never finished" in consumer.notes[-1]
    (dead,) = letters.messages(names[1])
    assert dead.properties["__PYENGINE_REASON"] == "it was delivered 3 times and never finished (max_deliveries)"
    consumer.close()
    assert consume().pull(timeout_s=0) == []


def test_a_message_given_back_without_a_delay_goes_to_the_member_that_takes_over(engine, names, consume):
    put(engine, names[0], b"a", b"b", queue_id=0)
    consumer = consume()
    a, b = pull(consumer, 2)
    consumer.ack(b)
    consumer.requeue(a)
    consumer.close()
    (again,) = pull(consume())
    assert (again.body, again.delivery_count) == (b"a", 2)


def test_with_auto_commit_a_message_that_was_given_back_is_not_done_by_the_next_request(engine, names, consume):
    put(engine, names[0], b"a", b"b", queue_id=0)
    consumer = consume(auto_commit=True)
    (a,) = pull(consumer)
    consumer.requeue(a)
    assert [(one.body, one.delivery_count) for one in (*pull(consumer), *pull(consumer))] == [(b"a", 2), (b"b", 1)]


def test_what_was_finished_after_a_message_that_was_given_back_does_not_come_again(engine, names, consume):
    put(engine, names[0], *(b"%d" % number for number in range(6)), queue_id=0)
    consumer = consume(auto_commit=True)
    consumer.requeue(pull(consumer, 5)[1])
    consumer.close()
    assert [(one.body, one.delivery_count) for one in pull(consume(), 2)] == [(b"1", 2), (b"5", 1)]


@pytest.fixture(scope="module")
def seconds(tmp_path_factory):
    """An engine whose delay levels take their time."""
    with pyengine.Engine(tmp_path_factory.mktemp("seconds") / "store", **SMALL) as engine:
        yield engine


@pytest.mark.parametrize(("when", "wait_ms"), [
    pytest.param({"delay_s": 1.2}, 1200, marks=pytest.mark.ci), ({"at": datetime.timedelta(milliseconds=700)}, 700),
    ({"delay_s": 0}, 0), pytest.param({"at": 0}, 0, marks=pytest.mark.ci)])
def test_a_message_given_back_for_a_time_comes_then(seconds, names, when, wait_ms):
    put(seconds, names[0], b"x", tags="t")
    with pyengine.consume(seconds.path, *names[:1], group=names[1], auto_commit=False) as consumer:
        (first,) = pull(consumer)
        begun_ms = time.time_ns() // 1_000_000
        result = asyncio.run(consumer.retry_async(first, **when)) if "at" in when else consumer.retry(first, **when)
        assert result.topic == ("SCHEDULE_TOPIC_XXXX" if wait_ms else retry_topic(names[1]))
        (again,) = pull(consumer)
        assert (again.topic, again.body, again.tags, again.reconsume_times) == (names[0], b"x", "t", 1)
        assert again.store_timestamp_ms - begun_ms >= wait_ms
        assert not [name for name in again.properties if name.startswith("__PYENGINE")]
        assert consumer.retry(again, **when).topic == result.topic


def test_a_dead_letter_does_not_wait(seconds, names):
    put(seconds, names[0], b"x")
    with pyengine.consume(seconds.path, names[0], group=names[1], auto_commit=False, max_reconsume_times=0) as consumer:
        assert consumer.retry(*pull(consumer), delay_s=60).topic == dlq_topic(names[1])


@pytest.mark.parametrize(("when", "error", "says"), [
    ({"delay_level": 1, "delay_s": 1}, UsageError, "delay_level and delay_s exclude each other"),
    ({"delay_s": 1, "at": 0}, UsageError, "delay_s and at exclude each other"), ({"delay_s": -1}, UsageError, "delay_s is -1"),
    ({"delay_s": float("nan")}, UsageError, "delay_s is nan"), ({"delay_s": float("inf")}, UsageError, "delay_s is more than 40 days"),
    ({"delay_s": "1"}, TypeError, "delay_s must be a number"), ({"at": 1_800_000_000}, UsageError, "at is 1800000000: .*milliseconds"),
    ({"at": datetime.datetime(2030, 1, 1)}, UsageError, "at 2030.* has no time zone"), ({"at": 1.5}, TypeError, "at must be a datetime"),
])
def test_a_time_that_cannot_be_leaves_the_message_open(engine, names, consume, when, error, says):
    put(engine, names[0], b"x")
    consumer = consume()
    (message,) = pull(consumer)
    with pytest.raises(error, match=f"^{says}"):
        consumer.retry(message, **when)
    assert consumer.commit(message) and consumer.total_lag() == 0  # it was still this consumer's


def test_a_retried_message_can_be_given_back_too(engine, names, consume):
    put(engine, names[0], b"a")
    consumer = consume()
    consumer.retry(*pull(consumer))
    (again,) = pull(consumer)
    consumer.requeue(again)
    (third,) = pull(consumer)
    assert (third.topic, third.reconsume_times, third.delivery_count) == (names[0], 1, 2)


@pytest.mark.parametrize("is_retried", [False, True])
@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_a_dead_letter_is_done_at_once_lest_a_kill_makes_two_of_it(engine, names, consume, sharing, is_retried):
    put(engine, names[0], b"a", queue_id=0)
    consumer = consume(max_deliveries=1, sharing=sharing, commit_interval_s=3600)
    if is_retried:
        consumer.retry(*pull(consumer))
    consumer.requeue(pull(consumer))
    assert consumer.pull(timeout_s=0.1) == []
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: housekeep(consumer) or [one.body for one in letters.messages(names[1])] == [b"a"], "the dead letter")
    assert ConsumerOffsets(engine.path).read(retry_topic(names[1]) if is_retried else names[0], names[1]) == {0: 1}


def test_without_an_engine_a_message_that_was_delivered_too_often_waits_and_holds_up_no_other(builder):
    for body in (b"a", b"b"):
        builder.put("orders", body)
    with pyengine.consume(builder.root, "orders", group="g", auto_commit=False, max_deliveries=1) as consumer:
        (a,) = consumer.pull(1)
        consumer.requeue(a)
        assert [one.body for one in consumer.pull(5)] == [b"b"]
        eventually(lambda: any("cannot be a dead letter now" in note for note in consumer.notes), "a note")
        consumer.commit()
        assert ConsumerOffsets(builder.root).read("orders", "g") == {0: 0}


def test_acknowledgements_outlive_a_member(engine, names, consume):
    put(engine, names[0], *(b"%d" % number for number in range(10)), queue_id=0)
    first = consume()
    first.ack(pull(first, 10)[3:8])
    first.close()
    assert ConsumerOffsets(engine.path).read(*names) == {0: 0}
    second = consume()
    assert [one.body for one in pull(second, 5)] == [b"0", b"1", b"2", b"8", b"9"]
    second.close()
    assert [(one.body, one.delivery_count) for one in pull(consume(), 1)] == [(b"0", 3)]


def test_acknowledgements_outlive_a_recovery_before_their_next_holder_has_read(builder):
    for number in range(6):
        builder.put("orders", b"%d" % number)
    with pyengine.consume(builder.root, "orders", group="g", auto_commit=False) as first:
        first.ack(first.pull(6)[2:4])
    with pyengine.consume(builder.root, "orders", group="g", auto_commit=False) as second:
        epoch = raise_epoch(builder.root)  # a recovery that has lost nothing
        eventually(lambda: epoch_of(second) == epoch, "the member has looked")
        assert [one.body for one in second.pull(6)] == [b"0", b"1", b"4", b"5"]


def test_a_reset_and_a_seek_deliver_acknowledged_messages_again(engine, names, consume):
    put(engine, names[0], *(b"%d" % number for number in range(4)), queue_id=0)
    consumer = consume()
    consumer.ack(pull(consumer, 4)[2:])
    consumer.close()
    pyengine.ConsumerGroups(engine.path).reset(*names, 0)
    consumer = consume()
    consumer.ack(pull(consumer, 4)[2:])
    consumer.commit([])
    consumer.seek(0, 0)
    assert len(pull(consumer, 4)) == 4
    consumer.commit([])
    consumer.close()
    assert len(pull(consume(), 4)) == 4


def test_a_queue_waits_for_its_oldest_message_once_its_span_is_reached(engine, names, consume):
    put(engine, names[0], *(b"%d" % number for number in range(30)), queue_id=0)
    consumer = consume(max_span=10)
    oldest, *others = pull(consumer, 20)
    assert len(consumer.pull(5)) == 5, "nothing is acknowledged yet"
    consumer.ack(others)
    assert consumer.pull(5, timeout_s=0) == [] and "max_span" in consumer.notes[-1]
    consumer.ack(oldest)
    assert len(consumer.pull(5)) == 5
    for options in ({"max_span": 0}, {"max_deliveries": 0}):
        with pytest.raises(UsageError, match="give 1 or more"):
            consume(**options)


def test_after_max_reconsume_times_it_is_a_dead_letter(engine, names, consume):
    put(engine, names[0], b"poison")
    consumer = consume(max_reconsume_times=2)
    for times in range(3):
        (found,) = pull(consumer)
        assert found.reconsume_times == times
        result = consumer.retry(found)
    assert result.topic == dlq_topic(names[1])
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: [one.body for one in letters.messages(names[1])] == [b"poison"], "the dead letter")
    (dead,) = letters.messages(names[1])
    assert (dead.topic, dead.reconsume_times, dead.queue_id) == (names[0], 3, 0)
    assert dead.properties["__PYENGINE_REASON"] == "it was given back 3 times (max_reconsume_times)"


def test_retry_and_dead_letter_topics_are_entered_as_the_broker_enters_them(engine, names, consume):
    put(engine, names[0], b"x", b"y")
    consumer = consume()
    x, y = pull(consumer, 2)
    consumer.retry(x)
    consumer.retry(y, delay_level=-1)
    topics = TopicConfigs(engine.path).read().rows
    for topic in (retry_topic(names[1]), dlq_topic(names[1])):
        entry = topics[topic]
        assert (entry.read_queue_nums, entry.write_queue_nums, entry.perm, entry.order, entry.topic_sys_flag) == (1, 1, 6, False, 0)


def test_an_entry_that_is_there_is_kept(engine, names, consume):
    TopicConfigs(engine.path).create(pyengine.storage.config_table.TopicConfig(retry_topic(names[1]), 3, 3))
    put(engine, names[0], b"x")
    consumer = consume()
    consumer.retry(*pull(consumer))
    assert TopicConfigs(engine.path).read().rows[retry_topic(names[1])].read_queue_nums == 3


def test_a_message_that_cannot_be_stored_is_not_done(engine, names, consume, monkeypatch):
    put(engine, names[0], b"x")
    consumer = consume()
    (found,) = pull(consumer)
    refused = pyengine.PutResult(PutStatus.OS_PAGECACHE_BUSY, reason="busy")
    with monkeypatch.context() as patch:
        patch.setattr(pyengine.Producer, "put_raw", lambda self, raw, timeout_s=None: refused)
        with pytest.raises(PutError, match="busy"):
            consumer.retry(found)
    consumer.close()
    assert pull(consume())[0].body == b"x"


def test_a_message_is_not_done_without_an_engine(builder):
    builder.put("orders", b"x")
    with pyengine.consume(builder.root, "orders", group="g", from_="first", auto_commit=False) as consumer:
        (found,) = consumer.pull()
        with pytest.raises(EngineUnavailableError):
            consumer.retry(found)
    with pyengine.consume(builder.root, "orders", group="g") as consumer:
        assert [one.body for one in consumer.pull(timeout_s=0)] == [b"x"]


def test_a_consumer_without_a_group_gives_nothing_back(builder):
    builder.put("orders", b"x")
    with pyengine.consume(builder.root, "orders", from_="first") as consumer:
        (found,) = consumer.pull()
        for call in (consumer.retry, consumer.ack, consumer.commit):
            with pytest.raises(UsageError, match="no group"):
                call(found)


def test_a_kill_between_the_retry_and_its_acknowledgement_doubles_and_never_loses(engine, names, consume):
    put(engine, names[0], b"x")
    dying = """
import os, sys, pyengine
consumer = pyengine.consume(sys.argv[1], sys.argv[2], group=sys.argv[3], from_="first", auto_commit=False)
consumer.ack = lambda message: os.kill(os.getpid(), 9)
consumer.retry(*consumer.pull(timeout_s=60))
"""
    ran = subprocess.run([sys.executable, "-c", dying, engine.path, *names], env=environment(), timeout=scaled_timeout_s(120), check=False)
    assert ran.returncode == -signal.SIGKILL
    found = pull(consume(), 2)
    assert [one.body for one in found] == [b"x", b"x"] and sorted(one.reconsume_times for one in found) == [0, 1]


def test_the_topic_and_the_retries_come_in_turn(engine, names, consume):
    """A full topic does not keep back what is given back, and the other way round."""
    put(engine, names[0], *[b"%d" % number for number in range(200)])
    consumer = consume()
    for found in pull(consumer, 100):
        consumer.retry(found)
    eventually(lambda: pyengine.open_store(engine.path).queue_range(retry_topic(names[1]), 0) == (0, 100), "all are delivered")
    eventually(lambda: retries_of(consumer) is not None, "the retry topic is read")
    kinds = [type(consumer.pull(1)[0]) is RetriedMessage for _ in range(20)]
    assert sum(kinds) == 10 and kinds[0] is not kinds[1]


def test_a_retried_message_is_distinct_from_a_message_at_the_same_offset(engine, names, consume):
    put(engine, names[0], b"a", b"b")
    consumer = consume()
    a, b = pull(consumer, 2)
    consumer.retry(b)
    (again,) = pull(consumer)
    assert (again.queue_id, again.queue_offset) == (a.queue_id, a.queue_offset)
    consumer.ack(pickle.loads(pickle.dumps(again)))  # back from another process
    consumer.close()
    assert [one.body for one in pull(consume())] == [b"a"]


def test_commit_stores_the_offsets_of_both(engine, names, consume):
    put(engine, names[0], b"a", b"b")
    consumer = consume()
    a, b = pull(consumer, 2)
    consumer.retry(a)
    (again,) = pull(consumer)
    assert consumer.commit([b, again]) == {0: 2}
    offsets = {state.topic: state.queues[0].committed for state in pyengine.ConsumerGroups(engine.path).groups(group=names[1])}
    assert offsets == {names[0]: 2, retry_topic(names[1]): 1}


def test_retries_count_in_the_total_lag_and_are_paused_with_all(engine, names, consume):
    put(engine, names[0], b"x")
    consumer = consume()
    consumer.retry(*pull(consumer))
    consumer.commit()
    eventually(lambda: consumer.total_lag() == 1, "the retry waits")
    consumer.pause()
    assert consumer.pull(1, timeout_s=0) == []
    consumer.resume()
    assert [one.body for one in pull(consumer)] == [b"x"]


def test_paused_retries_that_may_have_killed_their_readers_slow_no_topic(engine, names, consume):
    put(engine, names[0], b"x")
    consumer = consume()
    consumer.retry(*pull(consumer))
    for _ in range(2):
        assert pull(consumer)[0].reconsume_times == 1
        leave_unfinished(consumer)
        consumer = consume()
    consumer.pause()
    consumer.resume(consumer.assignment)
    put(engine, names[0], b"1", b"2", b"3", b"4")
    wait_noted(engine.path)
    assert len(consumer.pull(2)) == len(consumer.pull(2)) == 2
    consumer.resume()
    put(engine, names[0], b"5", b"6")
    wait_noted(engine.path)
    (again,) = consumer.pull(2)
    assert again.body == b"x", "it comes by itself"


def test_the_store_still_passes_its_check(engine, names, consume):
    """After all the others of this module on the same engine: records, queues and index agree."""
    ran = subprocess.run([sys.executable, "-m", "pyengine", "check", str(engine.path)], env=environment(), timeout=scaled_timeout_s(120),
                         capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# --- dead letters ---------------------------------------------------------------------------------


def dead(engine, names, consume, *bodies):
    put(engine, names[0], *bodies)
    consumer = consume()
    for found in pull(consumer, len(bodies)):
        consumer.retry(found, delay_level=-1)
    consumer.close()
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: len(letters.messages(names[1])) == len(bodies), "the dead letters")
    return letters


def queue_of(letters, group):
    (found,) = [queue for queue in letters.queues() if queue.group == group]
    return found


def test_requeued_letters_come_to_their_group_alone_with_all_retries(engine, names, consume):
    letters = dead(engine, names, consume, b"a", b"b", b"c")
    assert (queue_of(letters, names[1]).messages, queue_of(letters, names[1]).waiting) == (3, 3)
    other = pyengine.consume(engine.path, names[0], group=names[1] + "2", from_="last")
    assert letters.requeue(names[1]) == 3 and letters.requeue(names[1]) == 0
    found = pull(consume(), 3)
    assert [(one.topic, one.body, one.reconsume_times) for one in found] == [(names[0], body, 0) for body in (b"a", b"b", b"c")]
    assert other.pull(timeout_s=0) == []
    other.close()
    queue = queue_of(letters, names[1])
    assert (queue.messages, queue.waiting, queue.oldest_ms) == (3, 0, None)


def test_letters_can_be_requeued_one_by_one(engine, names, consume):
    letters = dead(engine, names, consume, b"a", b"b", b"c")
    assert letters.requeue(names[1], [2, 0]) == 2
    assert [one.body for one in pull(consume(), 2)] == [b"c", b"a"]
    with pytest.raises(UsageError, match="no dead letter at offset 3"):
        letters.requeue(names[1], [1, 3])
    assert queue_of(letters, names[1]).waiting == 3  # only requeue() of all notes how far it came


def test_a_letter_that_dies_again_is_a_new_letter(engine, names, consume):
    letters = dead(engine, names, consume, b"a")
    letters.requeue(names[1])
    consumer = consume()
    consumer.retry(*pull(consumer), delay_level=-1)
    eventually(lambda: queue_of(letters, names[1]).waiting == 1, "the new letter")
    (first, second) = letters.messages(names[1])
    assert first.properties["ORIGIN_MESSAGE_ID"] == second.properties["ORIGIN_MESSAGE_ID"]
    assert [one.body for one in letters.messages(names[1], 1)] == [b"a"]


def test_a_letter_that_can_never_be_stored_again_does_not_stop_those_after_it(engine, names, consume, monkeypatch):
    letters = dead(engine, names, consume, b"a", b"b", b"c")
    put_raw = pyengine.Producer.put_raw
    refused = pyengine.PutResult(PutStatus.MESSAGE_ILLEGAL, reason="never")
    monkeypatch.setattr(pyengine.Producer, "put_raw",
                        lambda self, raw, timeout_s=None: refused if raw.body == b"b" else put_raw(self, raw, timeout_s=timeout_s))
    with pytest.raises(PutError, match=f"2 of 3 dead letters of {names[1]} were put back; .* MESSAGE_ILLEGAL: never"):
        letters.requeue(names[1])
    assert [one.body for one in pull(consume(), 2)] == [b"a", b"c"]
    assert letters.requeue(names[1]) == 0 and queue_of(letters, names[1]).messages == 3
    refused = pyengine.PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="full")  # which passes: nothing is skipped
    with pytest.raises(PutError, match="SERVICE_NOT_AVAILABLE"):
        letters.requeue(names[1], [1, 2])


def test_letters_that_were_put_back_before_an_error_are_not_put_back_again(engine, names, consume, monkeypatch):
    letters = dead(engine, names, consume, b"a", b"b", b"c")
    put_raw = pyengine.Producer.put_raw
    with monkeypatch.context() as patched:
        patched.setattr(pyengine.Producer, "put_raw", lambda self, raw, timeout_s=None: pyengine.PutResult(
            PutStatus.SERVICE_NOT_AVAILABLE, reason="full") if raw.body == b"c" else put_raw(self, raw, timeout_s=timeout_s))
        with pytest.raises(PutError, match="SERVICE_NOT_AVAILABLE"):
            letters.requeue(names[1])
    assert queue_of(letters, names[1]).waiting == 1 and letters.requeue(names[1]) == 1
    assert [one.body for one in pull(consume(), 3)] == [b"a", b"b", b"c"]


def test_letters_are_put_back_once_by_calls_at_once(engine, names, consume):
    bodies = [b"%d" % number for number in range(REQUEUE_MESSAGES)]
    letters = dead(engine, names, consume, *bodies)
    both = threading.Barrier(2)

    def requeue(_) -> int:
        both.wait()
        return pyengine.DeadLetters(engine.path).requeue(names[1])

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(requeue, range(2))) == [0, len(bodies)]
    assert [one.body for one in pull(consume(), len(bodies))] == bodies and queue_of(letters, names[1]).waiting == 0


def test_a_call_beside_one_that_puts_letters_back_is_told_so(engine, names, consume, monkeypatch):
    letters = dead(engine, names, consume, b"a", b"b")
    put_raw = pyengine.Producer.put_raw

    def beside_another(self, raw, timeout_s=None):
        monkeypatch.setattr(pyengine.Producer, "put_raw", put_raw)
        with pytest.raises(StoreBusyError, match=f"%DLQ%{names[1]} is not changed: another process has held .*requeue.lock for 0 s"):
            letters.requeue(names[1])
        return put_raw(self, raw, timeout_s=timeout_s)

    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0)
    monkeypatch.setattr(pyengine.Producer, "put_raw", beside_another)
    assert letters.requeue(names[1]) == 2


def test_a_message_with_a_host_that_no_put_can_have_is_given_back(engine, names):
    retries = Retries(engine.path, names[1])
    assert retries.put(message(born_host="10.0.0.1:-7", store_host="10.0.0.1:-8")).ok
    retries.close()


def test_a_message_is_not_done_when_its_consumer_has_been_closed_meanwhile(engine, names, consume, monkeypatch):
    put(engine, names[0], b"x")
    consumer = consume()
    (found,) = pull(consumer)
    put_raw = pyengine.Producer.put_raw

    def close_first(self, raw, timeout_s=None):
        self.close()
        return put_raw(self, raw, timeout_s=timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(pyengine.Producer, "put_raw", close_first)
        with pytest.raises(EngineError) as caught:
            consumer.retry(found)
    assert not isinstance(caught.value, PutError) or not caught.value.result.status.is_lasting
    consumer.close()
    assert pull(consume())[0].body == b"x"


def test_retries_of_one_group_share_a_session(engine, names, monkeypatch):
    producers, connect = [], retries_module.connect_with
    monkeypatch.setattr(retries_module, "connect_with", lambda *given: producers.append(connect(*given)) or producers[-1])
    retries = Retries(engine.path, names[1])
    put(engine, names[0], b"x")
    with engine.open_store() as store:
        store.wait_for_message(names[0], 0, 0, timeout_s=30)
        (found,) = store.get_message(names[0], 0, 0).messages
    first = retries.put(found)
    assert retries.put(dataclasses.replace(found, reconsume_times=16)).topic == dlq_topic(names[1])
    assert first.topic == "SCHEDULE_TOPIC_XXXX" and len(producers) == 1
    retries.close()
    assert "closed" in repr(producers[0])
