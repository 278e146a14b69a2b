"""Consumers of several topics: who gets which turn, patterns, and that each call reaches the topic of its message."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

import pyengine
from crash.replicas import free_port
from few_files import call_with_few_files
from fix_cli import environment
from fix_client import session_of
from fix_golden import usual
from interrupting import interrupt, interrupted_at_each_place
from pyengine.client.consumer_groups import reaches
from pyengine.client.group_session import GroupSession, SharedSession, TurnTakenError
from pyengine.client.handler import skip_undone
from pyengine.client.retries import retry_topic
from pyengine.errors import EngineError, UsageError
from pyengine.storage.acknowledgements import AckFile, SharedQueue
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_writes import write_config
from waiting import eventually, scaled_timeout_s


@pytest.fixture(scope="module")
def engine(undelayed):
    return undelayed


@pytest.fixture
def topics(names):
    """Three topics of this test, whose names begin alike."""
    return [f"{names[0]}-{letter}" for letter in "abc"]


@pytest.fixture
def consume(engine, names):
    """consume(topics, ...): a consumer of the test's group, closed at the end."""
    opened = []

    def make(chosen, **options) -> pyengine.Consumer:
        usual = {"group": names[1], "auto_commit": False, "commit_interval_s": 0.05}
        opened.append(pyengine.consume(engine.path, chosen, **(usual | options)))
        return opened[-1]

    yield make
    for consumer in opened:
        consumer.close()


def put(engine, topic, *bodies, queue_id=0):
    with engine.connect() as producer:
        for body in bodies:
            producer.put(topic, body, queue_id=queue_id)


def pull(consumer, count=1):
    """Pull exactly `count` messages."""
    found = []
    eventually(lambda: found.extend(consumer.pull(count - len(found), timeout_s=0.1)) or len(found) == count, f"{count} messages")
    return found


def stored(engine, topic, group):
    return ConsumerOffsets(engine.path).read(topic, group)


def names_of(found):
    return sorted((each.topic, each.body) for each in found)


@pytest.fixture(params=usual(["queues", "messages"], ["messages"], pytest.mark.ci))
def sharing(request):
    return request.param


def test_a_commit_writes_the_offsets_of_all_topics_at_once(engine, names, topics, consume, monkeypatch):
    for topic in topics:
        put(engine, topic, b"1", b"2")
    consumer = consume(topics)
    pull(consumer, 6)
    writes = []
    monkeypatch.setattr("pyengine.storage.consumer_offset.write_config", lambda *given: writes.append(given) or write_config(*given))
    consumer.part(topics[1]).commit()
    assert [stored(engine, topic, names[1]).get(0, 0) for topic in topics] == [0, 2, 0] and len(writes) == 1
    consumer.commit()
    assert [stored(engine, topic, names[1]) for topic in topics] == [{0: 2}, {0: 2}, {0: 2}] and len(writes) == 2


def test_each_acknowledgement_is_its_topics(engine, names, topics, consume, sharing):
    for topic in topics[:2]:
        put(engine, topic, b"1", b"2")
    consumer = consume(topics, sharing=sharing)  # the third does not exist yet
    found = pull(consumer, 4)
    assert names_of(found) == [(topic, body) for topic in topics[:2] for body in (b"1", b"2")] and consumer.topics == topics
    consumer.ack([each for each in found if each.topic == topics[1]])
    consumer.ack(next(each for each in found if each.topic == topics[0] and each.body == b"1"))
    assert consumer.part(topics[0]).commit([]) == {0: 1} and consumer.commit([]) == {}
    stored = ConsumerOffsets(engine.path).read
    assert (stored(topics[0], names[1]), stored(topics[1], names[1])) == ({0: 1}, {0: 2})
    assert consumer.total_lag() == 1 and consumer.part(topics[1]).lag()[0].lag == 0
    put(engine, topics[2], b"3")
    assert names_of(pull(consumer)) == [(topics[2], b"3")]


def test_members_that_share_messages_are_told_what_is_done_by_each_pull_whichever_topic_it_gives(engine, names, topics, consume):
    put(engine, topics[0], b"a1", b"a2"), put(engine, topics[1], b"b1", b"b2")
    consumer = consume(topics[:2], sharing="messages", commit_interval_s=3600)
    read = [*topics[:2], retry_topic(names[1])]

    def open_for_others() -> int:
        files = [AckFile(engine.path, f"{topic}@{names[1]}").read() for topic in read]
        return sum(len(SharedQueue(states[-1]).open) for file in files for states in file.values())

    consumer.retry(*pull(consumer), 1)
    for _ in range(4):
        found = pull(consumer)
        assert open_for_others() == 1, "what was pulled just now"
        consumer.ack(found)


def test_given_back_messages_come_again(engine, topics, consume, sharing):
    for topic in topics:
        put(engine, topic, b"1")
    consumer = consume(topics, sharing=sharing)
    a, b, c = sorted(pull(consumer, 3), key=lambda each: each.topic)
    with pytest.raises(UsageError, match="consumer of all topics"):
        consumer.part(topics[1]).retry(b)
    consumer.requeue([b])
    consumer.retry(c)
    assert [(each.topic, each.delivery_count, each.reconsume_times) for each in sorted(pull(consumer, 2), key=lambda each: each.topic)] == [
        (topics[1], 2, 0), (topics[2], 1, 1)]
    consumer.ack(a)


@pytest.fixture(scope="module")
def light_engine(tmp_path_factory):
    with pyengine.Engine(tmp_path_factory.mktemp("light") / "store", enable_multi_dispatch=True, enable_lmq=True,
                         mapped_file_size_commit_log_bytes=1 << 20) as engine:
        yield engine


def put_light(engine, topic, second, *bodies):
    with engine.connect() as producer, engine.open_store() as store:
        for body in bodies:
            producer.put(topic, body, queue_id=0, properties={"INNER_MULTI_DISPATCH": ",".join(second)})
        for each in (topic, *second):
            assert store.wait_for_message(each, 0, len(bodies) - 1, timeout_s=scaled_timeout_s(30))


def lags(engine, group):
    return {each.topic: each.lag for each in pyengine.ConsumerGroups(engine.path).groups(group=group)}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("copied", [lambda message: message, lambda message: pickle.loads(pickle.dumps(message))], ids=["itself", "a-copy"])
def test_a_message_is_settled_in_the_queue_that_it_was_read_from(light_engine, names, copied, at, sharing):
    light = f"{names[0]}-light"
    put_light(light_engine, names[0], [light], b"0", b"1", b"2", b"3")
    topics = [names[0], light] if at else [light, names[0]]
    settled, other = light, names[0]
    with pyengine.consume(light_engine.path, topics, group=names[1], auto_commit=False, sharing=sharing) as consumer:
        kept, given = (pull(consumer.part(topic), 4) for topic in (other, settled))
        assert {each.topic for each in (*kept, *given)} == {names[0]}
        consumer.ack(copied(given[1]))
        consumer.commit(copied(given[0]))
        assert lags(light_engine, names[1]) == {settled: 2, other: 4}
        consumer.requeue(copied(given[2]))
        (again,) = consumer.part(settled).pull(timeout_s=scaled_timeout_s(30))
        assert (again.body, again.delivery_count) == (b"2", 2) and consumer.part(other).pull(timeout_s=0) == []
        consumer.ack(copied(again))
        consumer.retry(copied(given[3]), delay_s=0)
        consumer.commit([])
        found = lags(light_engine, names[1])  # the retry is among them once its queue is dispatched
        assert found | {settled: 0, other: 4} == found
        consumer.ack(kept)
        (retried,) = pull(consumer)
        assert (retried.topic, retried.body, retried.reconsume_times) == (names[0], b"3", 1)
        consumer.retry(retried, -1)
        consumer.commit([])
        assert set(lags(light_engine, names[1]).values()) == {0}
        dead = pyengine.DeadLetters(light_engine.path)
        eventually(lambda: [each.body for each in dead.messages(names[1])] == [b"3"], "it is a dead letter")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_gets_a_message_once_for_each_light_queue(light_engine, names, sharing, is_async):
    lights = [f"%LMQ%{names[0]}-{reader}" for reader in "ab"]
    put_light(light_engine, names[0], lights, b"1", b"2")
    handled = []

    def handle(message):
        handled.append(message.body)
        if len(handled) >= 4:
            stop.set()

    async def handle_async(message):
        handle(message)

    stop = asyncio.Event() if is_async else threading.Event()
    if is_async:
        asyncio.run(pyengine.run_consumer_async(light_engine.path, lights, names[1], handle_async, stop=stop, sharing=sharing))
    else:
        pyengine.run_consumer(light_engine.path, lights, names[1], handle, stop=stop, sharing=sharing)
    assert sorted(handled) == [b"1", b"1", b"2", b"2"] and lags(light_engine, names[1]) == dict.fromkeys(lights, 0)


@pytest.mark.parametrize(("weights", "counts"), [((4, 2, 1), (16, 8, 4)), ((1, 1, 1), (10, 9, 9)), ((100, 1, 1), (28, 0, 0))])
def test_topics_get_turns_by_their_weights(engine, topics, consume, weights, counts):
    for topic in topics:
        put(engine, topic, *(b"%d" % number for number in range(30)))
    consumer = consume(dict(zip(topics, weights)), group=None)
    eventually(lambda: all(consumer.part(topic).assignment == [0] for topic in topics) and consumer.total_lag() == 90, "all are dispatched")
    turns = Counter(pull(consumer)[0].topic for _ in range(28))
    assert all(abs(turns[topic] - count) <= 1 for topic, count in zip(topics, counts)), turns


def test_a_topic_without_messages_leaves_its_turns_to_the_others_and_saves_none(engine, topics, consume):
    put(engine, topics[1], *(b"%d" % number for number in range(20)))
    consumer = consume({topics[0]: 5, topics[1]: 1}, group=None)
    assert {each.topic for _ in range(12) for each in pull(consumer)} == {topics[1]}
    put(engine, topics[0], *(b"%d" % number for number in range(20)))
    part = consumer.part(topics[0])
    eventually(lambda: part.assignment == [0] and part.lag()[0].lag == 20, "all are dispatched")
    turns = Counter(pull(consumer)[0].topic for _ in range(8))
    assert turns[topics[1]] in (1, 2)


@pytest.mark.parametrize("busy", ["a", "b"])
def test_a_topic_whose_turn_another_member_keeps_holds_up_no_other(engine, topics, consume, monkeypatch, busy):
    for topic in topics[:2]:
        put(engine, topic, b"1", b"2")
    consumer = consume(topics[:2], sharing="messages")
    kept, free = topics[:2] if busy == "a" else reversed(topics[:2])
    session = session_of(consumer.part(kept))

    def taken(*args):
        raise TurnTakenError(session)

    with monkeypatch.context() as patch:
        patch.setattr(session, "turn", taken)
        found = [*consumer.pull(1, timeout_s=1), *consumer.pull(1, timeout_s=1)]
        assert [message.topic for message in found] == [free, free]
    assert {message.topic for message in pull(consumer, 2)} == {kept}


def test_a_pattern_finds_new_topics(engine, names, topics, consume, sharing):
    put(engine, topics[0], b"old")
    put(engine, "other-" + topics[0], b"of another one")
    consumer = consume(re.compile(re.escape(names[0]) + "-[ab]"), from_="last", sharing=sharing)
    assert consumer.topics == topics[:1]
    put(engine, topics[1], b"new")
    put(engine, topics[2], b"unmatched")
    put(engine, topics[0], b"next")
    found = pull(consumer, 2)
    assert names_of(found) == [(topics[0], b"next"), (topics[1], b"new")] and consumer.topics == topics[:2]
    for message in found:
        consumer.retry(message)
    assert names_of(pull(consumer, 2)) == names_of(found) and consumer.topics == topics[:2], "the retry topic is none of them"


@pytest.mark.parametrize(("group", "start"), usual([("billing", "last"), (None, "last"), (None, datetime.now(UTC) + timedelta(days=1))],
                                                   [("billing", "last"), (None, "last")], pytest.mark.ci))
@pytest.mark.parametrize("chosen", usual(["new", "old", ["old", "new"], re.compile("new|old")], ["new"], pytest.mark.ci))
def test_what_was_put_before_a_consumer_of_the_last_is_not_delivered_though_no_queue_has_it_yet(
        make_engine, monkeypatch, chosen, group, start):
    monkeypatch.setattr("pyengine.client.consumer.DISPATCH_S", 600.0)
    engine = make_engine()
    engine.start()
    before, after = [("old", 0), ("old", 1), ("new", 0)], [("old", 0), ("old", 1), ("old", 2), ("new", 0)]
    with pyengine.connect(engine.root) as producer:
        producer.put("old", b"dispatched", queue_id=0)
        with pyengine.consume(engine.root, "old") as consumer:
            pull(consumer)
        pid = engine.suspend("reputter")
        for topic, queue_id in before:
            producer.put(topic, b"before", queue_id=queue_id)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        with pyengine.consume(engine.root, chosen, group=group, from_=start) as consumer:
            assert consumer.notes == []
            for topic, queue_id in after:
                producer.put(topic, b"after", queue_id=queue_id)
            found = pull(consumer, sum(topic in consumer.topics for topic, _ in after))
    assert {message.body for message in found} == {b"after"}


WAYS = {"seek": ("seek", "last"), "to a time": ("seek", datetime.now(UTC) + timedelta(days=1)), "topics": ("seek of two topics", "last"),
        "reset": ("reset", "last"), "skip": ("skip", "last")}


@pytest.mark.parametrize("way", usual(WAYS, ["seek", "to a time", "reset"], pytest.mark.ci))
def test_what_was_put_before_a_place_is_chosen_is_not_delivered_though_no_queue_has_it_yet(make_engine, monkeypatch, way):
    way, to = WAYS[way]
    monkeypatch.setattr("pyengine.client.consumer.DISPATCH_S", 600.0)
    engine = make_engine()
    engine.start()
    topics = ["one", "two"][:1 + (way == "seek of two topics")]
    with pyengine.connect(engine.root) as producer:
        for topic in topics:
            producer.put(topic, b"dispatched", queue_id=0)
        with pyengine.consume(engine.root, topics, group="one", auto_commit=False) as consumer:
            pull(consumer, len(topics))
            consumer.commit()
            if not way.startswith("seek"):
                consumer.close()
            pid = engine.suspend("reputter")
            for topic in topics:
                producer.put(topic, b"before", queue_id=0)
            threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
            if way.startswith("seek"):
                consumer.seek(None, to)
            elif way == "reset":
                pyengine.ConsumerGroups(engine.root).reset("one", "one", to)
            else:
                skip_undone(engine.root, "one")
            for topic in topics:
                producer.put(topic, b"after", queue_id=0)
            if way.startswith("seek"):
                assert {message.body for message in pull(consumer, len(topics))} == {b"after"}
        if not way.startswith("seek"):
            with pyengine.consume(engine.root, "one", group="one") as consumer:
                assert pull(consumer)[0].body == b"after"


def test_a_consumer_waits_for_no_queue_where_what_was_put_before_does_not_count(make_engine, monkeypatch):
    monkeypatch.setattr("pyengine.client.consumer.DISPATCH_S", 30.0)
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put("old", b"dispatched", queue_id=0)
        with pyengine.consume(engine.root, "old", group="known") as consumer:
            pull(consumer)
        pid = engine.suspend("reputter")
        before = datetime.now(UTC) - timedelta(seconds=1)
        producer.put("new", b"before", queue_id=0)
        for group, start in ((None, "first"), (None, before), ("known", "last"), ("known", datetime.now(UTC))):
            with pyengine.consume(engine.root, "old", group=group, from_=start) as consumer:
                assert consumer.notes == [], (group, start)
        os.kill(pid, signal.SIGCONT)


@contextmanager
def behind(make_engine):
    """(engine, a consumer of the group `one`): the queue of the topic `one` lacks a message that was put, while the block runs."""
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put("one", b"dispatched", queue_id=0)
        with pyengine.consume(engine.root, "one", group="one") as consumer:
            pull(consumer)
            pid = engine.suspend("reputter")
            producer.put("one", b"before", queue_id=0)
            yield engine, consumer
        os.kill(pid, signal.SIGCONT)


def test_a_seek_in_a_queue_of_another_member_waits_for_none(make_engine, monkeypatch):
    monkeypatch.setattr("pyengine.client.consumer.DISPATCH_S", 30.0)
    with behind(make_engine) as (_, consumer):
        with pytest.raises(UsageError, match="does not own queue 99"):
            consumer.seek(99, "last")
        assert consumer.notes == []


def test_a_reset_tells_that_queues_lack_what_was_put_before(make_engine, monkeypatch, caplog):
    monkeypatch.setattr("pyengine.client.consumer_groups.reaches", partial(reaches, timeout_s=0.0))
    with behind(make_engine) as (engine, consumer):
        consumer.close()
        assert pyengine.ConsumerGroups(engine.root).reset("one", "one", "last") == {0: 1}
        assert "queues of one lack messages that were put before" in caplog.text


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_consumer_of_the_last_waits_for_no_message_that_no_slave_can_confirm(make_engine, monkeypatch, is_stopped):
    monkeypatch.setattr("pyengine.client.consumer.DISPATCH_S", 600.0)
    engine = make_engine(dispatch_at="replicated", broker_role="ASYNC_MASTER", ha_listen_port=free_port())
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put("T", b"unconfirmed", queue_id=0)
    if is_stopped:
        engine.kill_all()
    with pyengine.consume(engine.root, "T", from_="last") as consumer:
        assert is_stopped or any("lack messages that were put before" in note for note in consumer.notes)


def test_pause_of_all_holds_for_a_topic_that_comes_to_match(engine, topics, consume):
    put(engine, topics[0], b"1")
    consumer = consume(re.compile(re.escape(topics[0][:-1]) + "."))
    pull(consumer)
    consumer.pause()
    put(engine, topics[1], b"2")
    eventually(lambda: topics[1] in consumer.topics, "it is found")
    assert consumer.pull(timeout_s=0) == [] and consumer.part(topics[1]).assignment == [0]
    consumer.resume()
    assert names_of(pull(consumer)) == [(topics[1], b"2")]


def test_a_group_leaves_out_of_a_pattern_what_no_group_can_read_and_notes_it_once(engine, topics, consume):
    for topic in (topics[0], topics[0] + "@", topics[1]):
        with engine.connect() as producer:
            producer.put_raw(pyengine.RawMessage(topic, b"1"))
        if topic == topics[0]:
            consumer = consume(re.compile(re.escape(topics[0][:-1]) + ".*"))
    assert names_of(pull(consumer, 2)) == [(topic, b"1") for topic in topics[:2]]
    assert [topics[0] + "@" in note for note in consumer.notes] == [True]


def test_a_wait_for_a_topic_that_a_group_can_read_ends_with_why_it_cannot_read_the_others(engine, topics, consume, caplog):
    with engine.connect() as producer:
        producer.put_raw(pyengine.RawMessage(topics[0] + "@", b"1"))
    with pytest.raises(EngineError, match=f"no topic .* yet that a group can read: the topic '{topics[0]}@' holds '@'"):
        consume(re.compile(re.escape(topics[0]) + ".*"), timeout_s=0.1)
    assert "not read" not in caplog.text, "not at each attempt"


def test_a_pattern_waits_for_its_first_topic(engine, names, topics, consume):
    pattern = re.compile(re.escape(topics[0]))
    with pytest.raises(EngineError, match="no topic of .* matches"):
        consume(pattern, timeout_s=0)
    putter = threading.Timer(0.3, put, (engine, topics[0], b"1"))
    putter.start()
    assert names_of(pull(consume(pattern, timeout_s=30))) == [(topics[0], b"1")]
    putter.join()


def test_pause_resume_and_seek_reach_all_topics_or_one(engine, topics, consume):
    for topic in topics[:2]:
        put(engine, topic, b"1")
    consumer = consume(topics[:2])
    pull(consumer, 2)
    consumer.seek(None, "first")
    consumer.pause()
    assert consumer.pull(timeout_s=0) == []
    consumer.resume()
    assert names_of(pull(consumer, 2)) == [(topic, b"1") for topic in topics[:2]]
    consumer.part(topics[1]).seek(0, 0)
    assert names_of(pull(consumer)) == [(topics[1], b"1")]
    for wrong in (lambda: consumer.seek(0, 0), lambda: consumer.seek(None, 0), lambda: consumer.part("no")):
        with pytest.raises(UsageError, match="part|does not read"):
            wrong()


def test_with_auto_commit_and_in_asyncio_all_topics_are_done_at_the_end(engine, names, topics, consume):
    for topic in topics:
        put(engine, topic, b"1")

    async def read():
        found = []
        async with consume(topics, auto_commit=True) as consumer:
            async for message in consumer:
                found.append(message)
                if len(found) == 3:
                    return found

    assert names_of(asyncio.run(read())) == [(topic, b"1") for topic in topics]
    assert [ConsumerOffsets(engine.path).read(topic, names[1]) for topic in topics] == [{0: 1}] * 3


@pytest.mark.parametrize("wrong", [[], {}, ["a", ""], {"a": 0}, {"a": -1}])
def test_a_choice_that_is_none_is_refused(consume, wrong):
    with pytest.raises(UsageError):
        consume(wrong)


def test_queues_of_several_topics_are_refused(consume, topics):
    with pytest.raises(UsageError, match="belong to one topic"):
        consume(topics, queues=[0])


@pytest.mark.parametrize("is_pattern", [False, True])
@pytest.mark.parametrize("call", [
    lambda one: one.lag(), lambda one: one.positions, lambda one: one.assignment, lambda one: one.paused, lambda one: one.pause([0]),
    lambda one: one.resume([0]), lambda one: one.seek(0, "first"), lambda one: one.seek(0, 0), lambda one: one.seek(None, 0)])
def test_what_names_queues_is_refused_for_several_topics_and_belongs_to_each_of_them(engine, names, topics, consume, call, is_pattern):
    put(engine, topics[0], b"1")
    consumer = consume(re.compile(re.escape(names[0]) + "-[ab]") if is_pattern else topics[:2])
    with pytest.raises(UsageError, match=r"part\(topic\)\."):
        call(consumer)
    pull(consumer)
    call(consumer.part(topics[0]))
    assert topics[0] in repr(consumer)


def test_each_part_has_the_queues_of_its_topic(engine, topics, consume):
    put(engine, topics[0], b"1")
    put(engine, topics[1], b"2", b"3")
    consumer = consume(topics[:2])
    pull(consumer, 3)
    parts = [consumer.part(topic) for topic in topics[:2]]
    assert [part.positions for part in parts] == [{0: 1}, {0: 2}] and [part.lag()[0].lag for part in parts] == [1, 2]
    parts[0].seek(None, "first")
    assert [part.positions for part in parts] == [{0: 0}, {0: 2}]
    parts[0].seek(0, 1)
    parts[0].pause([0])
    assert [part.paused for part in parts] == [[0], []]
    parts[0].resume([0])
    assert [part.commit() for part in parts] == [{0: 1}, {0: 2}] and consumer.commit() == {} and consumer.total_lag() == 0
    consumer.seek(None, "first")
    assert names_of(pull(consumer, 3)) == [(topics[0], b"1"), (topics[1], b"2"), (topics[1], b"3")]


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_part_is_told_concerns_its_topic_alone(engine, names, topics, consume, at):
    for topic in topics[:2]:
        put(engine, topic, b"1", b"2")
    consumer = consume(topics[:2])
    found = pull(consumer, 4)
    part, other = consumer.part(topics[at]), consumer.part(topics[1 - at])
    assert part.topics == [topics[at]] and part.total_lag() == 2
    assert part.commit() == {0: 2}
    assert [stored(engine, each.topic, names[1]).get(0, 0) for each in (part, other)] == [2, 0]
    with pytest.raises(UsageError, match="consumer of all topics"):
        part.retry(found[0])
    consumer.retry(found[0])
    consumer.seek(None, "first")
    part.pause()
    assert (part.paused, other.paused) == ([0], [])
    assert {each.topic for each in pull(consumer, 3)} == {other.topic, found[0].topic}, "the retried one too"
    other.pause()
    part.resume()
    assert (part.paused, other.paused) == ([], [0])
    assert [each.topic for each in pull(part, 2)] == [part.topic] * 2
    consumer.pause()
    part.resume()
    put(engine, other.topic, b"3")
    put(engine, part.topic, b"3")
    assert names_of(pull(part)) == [(part.topic, b"3")]
    other.resume()
    assert names_of(pull(other)) == [(other.topic, b"3")] and part.pull(timeout_s=0) == []


@pytest.mark.parametrize("at", [0, 1])
def test_the_close_of_a_part_is_that_of_all(engine, names, topics, consume, at):
    for topic in topics[:2]:
        put(engine, topic, b"1")
    consumer = consume(topics[:2], auto_commit=True)
    pull(consumer, 2)
    with consumer.part(topics[at]):
        pass
    assert [stored(engine, topic, names[1]) for topic in topics[:2]] == [{0: 1}, {0: 1}]
    with pytest.raises(UsageError, match="closed"):
        consumer.pull()


@pytest.mark.parametrize("at", [0, 1])
def test_a_consumer_whose_part_was_asked_leaves_its_group_once_it_is_dropped(engine, names, topics, at):
    gc.disable()
    try:
        consumer = pyengine.consume(engine.path, topics[:2], group=names[1])
        ends = weakref.finalize(consumer, list)
        part = consumer.part(topics[at])
        del consumer
        assert ends.alive and part.topics == [topics[at]]
        del part
        eventually(lambda: not ends.alive, "no garbage collection is needed")
    finally:
        gc.enable()


def test_a_waiting_consumer_wakes_for_each_topic(engine, topics, consume):
    consumer = consume(topics)
    for topic in (topics[2], topics[0], topics[1]):
        timer = threading.Timer(0.2, put, (engine, topic, b"1"))
        timer.start()
        assert names_of(pull(consumer)) == [(topic, b"1")]
        timer.join()


@pytest.fixture
def many(engine, names):
    """200 topics, in each of which is a message."""
    topics = [f"{names[0]}-{number}" for number in range(200)]
    with engine.connect() as producer, engine.open_store() as store:
        for put in [producer.put_async(topic, b"x", queue_id=0) for topic in topics]:
            assert put.result().ok
        for topic in topics:
            assert store.wait_for_message(topic, 0, 0, timeout_s=scaled_timeout_s(30))
    return topics


@pytest.fixture
def joined(monkeypatch):
    """joined(sharing, call): the topics whose group is joined from here on; call(topics) comes at each."""
    def watch(sharing, call=lambda topics: None):
        topics = []
        kind = {"queues": GroupSession, "messages": SharedSession}[sharing]

        class Watched(kind):
            def __init__(self, root, topic, *rest, **more):
                topics.append(topic)
                call(topics)
                super().__init__(root, topic, *rest, **more)

        monkeypatch.setattr(f"pyengine.client.consumer.{kind.__name__}", Watched)
        return topics

    return watch


@pytest.mark.parametrize("start", ["first", "last"])
def test_a_new_group_of_many_topics_stores_where_it_starts_at_once(engine, names, many, consume, sharing, monkeypatch, start):
    writes = []
    monkeypatch.setattr("pyengine.storage.consumer_offset.write_config", lambda *given: writes.append(given) or write_config(*given))
    consumer = consume(re.compile(f"{names[0]}-.*"), sharing=sharing, from_=start)
    assert len(consumer.topics) == 200 and len(writes) <= 2
    groups = ConsumerOffsets(engine.path).groups()
    assert {tuple(groups[topic, names[1]].items()) for topic in many} == {((0, int(start == "last")),)}


def test_a_pull_asks_no_topic_again_that_had_no_message(engine, names, many, consume, monkeypatch):
    consumer = consume(re.compile(f"{names[0]}-.*"), auto_commit=True)
    pull(consumer, 200)
    assert consumer.pull(timeout_s=0) == []
    put(engine, many[7], *(b"%d" % number for number in range(20)))
    asked, holds = [], GroupSession.holds
    with monkeypatch.context() as patch:
        patch.setattr(GroupSession, "holds", lambda session, claim: asked.append(session) or holds(session, claim))
        assert [pull(consumer)[0].body for _ in range(20)] == [b"%d" % number for number in range(20)]
    assert session_of(consumer.part(many[7])) in asked and len(asked) < 600
    consumer.close()
    assert stored(engine, many[7], names[1]) == {0: 21}


def test_a_cancelled_pull_lets_no_topic_be_asked_again_that_had_no_message(engine, names, many, consume, monkeypatch):
    consumer = consume(re.compile(f"{names[0]}-.*"))
    pull(consumer, 200)
    assert consumer.pull(timeout_s=0) == []
    put(engine, many[7], b"last")
    pull(consumer)
    asked, holds = [], GroupSession.holds

    async def cancelled_pull():
        asking = asyncio.create_task(consumer.pull_async(timeout_s=None))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with monkeypatch.context() as patch:
        patch.setattr(GroupSession, "holds", lambda session, claim: asked.append(session) or holds(session, claim))
        for _ in range(5):
            asyncio.run(cancelled_pull())
    assert len(asked) < 600


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_that_is_to_stop_joins_no_more_topics(engine, names, many, joined, sharing, is_async):
    topics = joined(sharing, lambda topics: len(topics) == 5 and stop.set())
    stop = asyncio.Event() if is_async else threading.Event()
    pattern = re.compile(f"{names[0]}-.*")
    if is_async:
        asyncio.run(pyengine.run_consumer_async(engine.path, pattern, names[1], print, stop=stop, sharing=sharing))
    else:
        pyengine.run_consumer(engine.path, pattern, names[1], print, stop=stop, sharing=sharing)
    assert len(topics) == 5


def test_a_consumer_that_closes_joins_no_more_topics(engine, names, topics, consume, joined, sharing):
    put(engine, topics[0], b"first")
    consumer = consume(re.compile(f"{names[0]}-.*"), sharing=sharing)
    pulling = threading.Thread(target=lambda: [None for _ in consumer])  # to the close, which then waits for the thread that joins
    closing = threading.Thread(target=consumer.close)

    def close_now(topics):
        if len(topics) == 1:
            closing.start()
            pulling.join()

    pulling.start()
    found = joined(sharing, close_now)
    with engine.connect() as producer:
        for result in [producer.put_async(f"{names[0]}-{letter}", b"x") for letter in "bcdefgh"]:
            assert result.result().ok
    pulling.join(), closing.join()
    assert len(found) == 1


def test_the_close_of_a_consumer_needs_no_deeper_stack_for_more_topics(engine, names, many):
    consumer = pyengine.consume(engine.path, many, group=names[1])
    before, depth = sys.getrecursionlimit(), len(traceback.extract_stack())
    try:
        sys.setrecursionlimit(depth + 100)
        consumer.close()
    finally:
        sys.setrecursionlimit(before)
    with pyengine.consume(engine.path, many[0], group=names[1]) as other:
        assert other.pull(1, timeout_s=scaled_timeout_s(30))


def test_kills_of_a_handler_lose_no_message(engine, names, topics, tmp_path, sharing):
    program = """
import os, sys
import pyengine
store, group, log, sharing, *topics = sys.argv[1:]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
pyengine.run_consumer(store, topics, group, lambda message: os.write(out, message.topic.encode() + message.body + b"\\n"), concurrency=2,
                      commit_interval_s=0.05, sharing=sharing)
"""
    for topic in topics:
        put(engine, topic, *(b"%d" % number for number in range(100)))
    log = tmp_path / "log"
    wanted = {b"%s%d" % (topic.encode(), number) for topic in topics for number in range(100)}

    def start():
        return subprocess.Popen([sys.executable, "-c", program, str(engine.path), names[1], str(log), sharing, *topics], env=environment())

    def read():
        return set(log.read_bytes().splitlines()) if log.exists() else set()

    for least in (50, 150):
        process = start()
        try:
            eventually(lambda least=least: len(read()) >= least, "messages are handled")
        finally:
            process.kill()
            process.wait()
    process = start()
    try:
        eventually(lambda: read() == wanted, "every message")
        groups = pyengine.ConsumerGroups(engine.path)
        eventually(lambda: process.pid in groups.groups(topic=topics[0], group=names[1])[0].members, "it has begun")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert [ConsumerOffsets(engine.path).read(topic, names[1]) for topic in topics] == [{0: 100}] * 3


def test_an_error_at_the_end_of_one_topic_keeps_no_other_one_open(engine, names, topics, consume, monkeypatch):
    for topic in topics:
        put(engine, topic, b"1")
    one = consume(topics)
    one.ack(pull(one, 3))
    give_back = type(one)._give_back

    def fail(consumer, queues):
        if consumer.topic != topics[2]:
            raise EngineError("the disk is full")
        give_back(consumer, queues)

    monkeypatch.setattr(type(one), "_give_back", fail)
    with pytest.raises(EngineError, match="full"):
        one.close()
    monkeypatch.undo()
    assert ConsumerOffsets(engine.path).read(topics[2], names[1]) == {0: 1}
    put(engine, topics[0], b"2")
    assert pull(consume(topics), 1)[0].topic == topics[0]


def test_a_close_that_a_signal_handler_interrupts_keeps_no_other_thread_from_one(consume, topics):
    consumer = consume(topics, group=None)

    def handler() -> None:
        if "closed" not in repr(consumer) and sys._getframe(2).f_globals["__name__"] != "threading":  # an Event's own code, not ours
            interrupt()

    for _ in interrupted_at_each_place(lambda: consumer.close(), handler):
        thread = threading.Thread(target=consumer.close, daemon=True)
        thread.start()
        thread.join(scaled_timeout_s(30))
        assert not thread.is_alive() and "closed" in repr(consumer)
        consumer = consume(topics, group=None)


def test_a_commit_that_a_signal_handler_interrupts_keeps_no_other_thread_from_one(consume, topics):
    consumer = consume(topics)
    for _ in interrupted_at_each_place(lambda: consumer.commit([])):
        thread = threading.Thread(target=consumer.commit, daemon=True)
        thread.start()
        thread.join(scaled_timeout_s(30))
        assert not thread.is_alive()


def test_a_consumer_that_lacks_descriptors_names_their_limit(engine, names, topics):
    put(engine, topics[0], b"x")
    consume = f'pyengine.consume(root, "{topics[0]}", group="{names[1]}", timeout_s=0)'
    said = call_with_few_files(engine.path, f"{consume}.close()", f"""
        try:
            {consume}
        except pyengine.DiskError as error:
            print("named" if "raise the limit of open files" in str(error) else error)
            raise
        """)
    assert set(said.splitlines()) == {"named"}
