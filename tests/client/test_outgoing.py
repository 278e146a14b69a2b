"""Puts that name no queue: in turn, or by their sharding key; how many queues there are, and who says so."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections import Counter

import pytest

import pyengine
from fix_engine import SMALL
from pyengine.client import outgoing
from pyengine.client.outgoing import BatchMessage, QueueChoice, RawMessage
from pyengine.errors import DiskError, UsageError
from pyengine.results import PutRefusedError
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.durable_file import LOCK_WAIT_S, exclusive
from waiting import eventually


@pytest.fixture
def choice(tmp_path):
    """Return the choice for a store whose topic `four` has four queues to write and eight to read."""
    TopicConfigs(tmp_path).create(TopicConfig("four", 8, 4))
    now = [0]
    made = QueueChoice(tmp_path, 8, clock_ns=lambda: now[0])
    made.now, made.topics = now, TopicConfigs(tmp_path)
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with pyengine.Engine(tmp_path_factory.mktemp("queues") / "store", default_topic_queue_nums=3, **SMALL) as engine:
        yield engine


@pytest.fixture
def producer(engine):
    with engine.connect() as producer:
        yield producer


def raises(error):
    """Return a function that raises it."""
    def raising(*_):
        raise error

    return raising


# --- the choice -----------------------------------------------------------------------------------


def test_queues_take_turns(choice):
    queues = [choice.next_queue("four") for _ in range(8)]
    assert queues == [(queues[0] + number) % 4 for number in range(8)]


def test_the_first_turn_is_at_random(tmp_path):
    seen = {QueueChoice(tmp_path, 4).next_queue("T") for _ in range(100)}
    assert seen == {0, 1, 2, 3}  # one is missing once in 10^12 runs


def test_a_producer_of_ever_new_topics_keeps_a_bounded_number_of_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(outgoing, "TURNS_MAX", 10)
    turns: dict[str, object] = {}
    choice = QueueChoice(tmp_path, 4, turns)
    queues = [choice.next_queue(f"T{number}") for number in range(95)]
    assert len(turns) == 5 and set(queues) <= {0, 1, 2, 3}
    assert choice.next_queue("T94") == (queues[-1] + 1) % 4


def test_threads_share_the_turns(choice):
    queues: list[int] = []

    def run():
        queues.extend([choice.next_queue("four") for _ in range(1000)])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Counter(queues).values()) == {1000}


# Java 17: Math.abs(key.hashCode() % queues)
@pytest.mark.parametrize(("key", "queue"), [("", 0), ("a", 1), ("customer-4", 3), ("polygenelubricants", 0), ("Ä€😀", 3)],
                         ids=["empty", "a", "customer", "smallest-int", "wide"])
def test_a_sharding_key_chooses_as_rocketmqs_client_does(choice, key, queue):
    assert choice.queue_of("four", key) == queue


def test_a_topic_that_is_not_there_has_the_number_that_it_will_be_entered_with(choice):
    assert {choice.next_queue("new") for _ in range(8)} == set(range(8))
    assert "new" not in choice.topics.read().rows, "the checkpointer enters it, for all new topics at once"


def test_a_producer_with_a_number_of_its_own_enters_the_topic(tmp_path, monkeypatch):
    choice, topics = QueueChoice(tmp_path, 3, is_own=True), TopicConfigs(tmp_path)
    assert {choice.next_queue("new") for _ in range(3)} == {0, 1, 2}
    entry = topics.read().rows["new"]
    assert (entry.read_queue_nums, entry.write_queue_nums, entry.perm) == (3, 3, 6)
    assert choice.next_queue("in a loop", may_wait=False) in range(3)
    assert "in a loop" not in topics.read().rows
    monkeypatch.setattr(TopicConfigs, "ensure", raises(DiskError("cannot write")))
    assert choice.next_queue("kept out") in range(3), "a file that cannot be written keeps no put back"


def test_many_topics_cost_one_look_at_the_file(choice, monkeypatch):
    reads = []
    monkeypatch.setattr(TopicConfigs, "read", lambda topics, read=TopicConfigs.read: reads.append(1) or read(topics))
    for number in range(1000):
        choice.next_queue(f"topic-{number}")
    choice.now[0] = outgoing.RELOAD_INTERVAL_NS
    for number in range(1000):
        choice.next_queue(f"topic-{number}")
    assert len(reads) == 1, "the file has not changed"


def test_a_change_of_the_topic_is_seen_after_a_while(choice):
    assert choice.queue_of("four", "a") == 1
    choice.topics.update("four", write_queue_nums=1)
    assert choice.queue_of("four", "a") == 1
    choice.now[0] = outgoing.RELOAD_INTERVAL_NS
    assert choice.queue_of("four", "a") == 0


# --- puts -----------------------------------------------------------------------------------------


def in_queues(engine, topic) -> dict[int, list[bytes]]:
    with engine.open_store() as store:
        ids = store.queue_ids(topic)
        return {queue_id: [message.body for message in store.get_message(topic, queue_id, 0).messages] for queue_id in ids}


def test_puts_without_a_queue_are_spread(engine, producer):
    results = [producer.put("spread", b"%d" % number) for number in range(9)]
    results += [producer.put("spread", b"x", keys="k") for _ in range(3)]
    assert all(result.ok for result in results)
    assert Counter(result.queue_id for result in results) == {0: 4, 1: 4, 2: 4}
    assert [result.queue_offset for result in results[:9]] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_put_in_an_event_loop_does_not_wait_for_the_topics_file(engine, producer):
    """The checkpointer enters the topic after its first message."""
    async def put():
        began_s = time.monotonic()
        future = producer.put_async("from-a-loop", b"x")
        took_s = time.monotonic() - began_s
        return took_s, await future

    with exclusive(TopicConfigs(engine.path).path):
        took_s, result = asyncio.run(put())
    assert result.ok and took_s < LOCK_WAIT_S / 2
    eventually(lambda: "from-a-loop" in TopicConfigs(engine.path).read().rows, "the topic is entered")


def test_a_topic_that_a_put_makes_has_the_engines_number_of_queues(engine, producer):
    assert sorted(producer.put("plain", b"x").queue_id for _ in range(3)) == [0, 1, 2]
    entry = eventually(lambda: TopicConfigs(engine.path).read().rows.get("plain"), "the topic is entered")
    assert (entry.read_queue_nums, entry.write_queue_nums) == (3, 3)


def test_a_put_that_names_a_queue_changes_no_turn(engine, producer):
    """Whether it or the entry in topics.json comes first."""
    for queue_id in (5, 0, 7):
        assert producer.put("named", b"x", queue_id=queue_id).queue_id == queue_id
    entry = eventually(lambda: TopicConfigs(engine.path).read().rows.get("named"), "the topic is entered")
    assert (entry.read_queue_nums, entry.write_queue_nums) == (8, 3)
    with engine.connect() as other:
        assert sorted(other.put("named", b"x").queue_id for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_turns_in_c_and_in_python_are_the_same_turns(engine, producer, rng: random.Random):
    ways = (
        lambda: producer.put("ways", b"x").queue_id, lambda: producer.put("ways", b"x", tags="t").queue_id,
        lambda: producer.put("ways", b"x", keys="k").queue_id, lambda: producer.put("ways", bytearray(b"x")).queue_id,
        lambda: producer.put_async("ways", b"x").result(30).queue_id, lambda: producer.put_many("ways", [b"x"]).queue_id,
        lambda: producer.put_many("ways", (b"x" for _ in range(2))).queue_id, lambda: producer.put_batch("ways", [b"x"]).queue_id)
    queues = [rng.choice(ways)() for _ in range(120)]
    assert queues == [(queues[0] + number) % 3 for number in range(120)]


def test_topics_with_turns_do_not_disturb_each_other(engine, producer):
    queues = {topic: [] for topic in ("odd", "even")}
    for number in range(60):
        topic = ("odd", "even")[number % 2]
        queues[topic].append(producer.put(topic, b"x").queue_id)
    for of_topic in queues.values():
        assert Counter(of_topic) == {0: 10, 1: 10, 2: 10}


def test_a_topic_that_a_put_makes_has_one_queue_until_it_gets_more(tmp_path, monkeypatch):
    monkeypatch.setattr(outgoing, "RELOAD_INTERVAL_NS", 100_000_000)
    root = tmp_path / "store"
    topics = TopicConfigs(root)
    with pyengine.Engine(root, **SMALL) as engine, engine.connect() as first, engine.connect() as second:
        for number in range(20):
            producer = (first, second)[number % 2]
            assert (producer.put("T", b"x") if number % 3 else producer.put_async("T", b"x").result(30)).queue_id == 0
        entry = eventually(lambda: topics.read().rows.get("T"), "the topic is entered")
        assert (entry.read_queue_nums, entry.write_queue_nums) == (1, 1)
        topics.update("T", read_queue_nums=3, write_queue_nums=3)  # as `pyengine topics update --queues 3`
        eventually(lambda: {first.put("T", b"x").queue_id for _ in range(3)} == {0, 1, 2}, "the producer sees it")
        eventually(lambda: {second.put_many("T", [b"x"]).queue_id for _ in range(3)} == {0, 1, 2}, "and the other")
    with pyengine.Engine(root) as engine, engine.connect() as producer:
        assert {producer.put("T", b"x").queue_id for _ in range(3)} == {0, 1, 2}, "also after a restart"


def test_messages_of_one_key_keep_their_order_in_one_queue(engine, producer, rng: random.Random):
    keys = [f"customer-{number}" for number in range(6)]
    put: dict[str, list[int]] = {key: [] for key in keys}
    queues: dict[str, set[int]] = {key: set() for key in keys}
    for _ in range(60):
        key = rng.choice(keys)
        result = producer.put("keyed", key.encode(), sharding_key=key, properties={"own": "1"})
        put[key].append(result.queue_offset)
        queues[key].add(result.queue_id)
    assert all(len(each) == 1 for each in queues.values() if each)
    assert all(offsets == sorted(offsets) for offsets in put.values())
    assert len(set().union(*queues.values())) > 1
    with engine.open_store() as store:
        some = next(key for key in keys if put[key])
        (queue_id,) = queues[some]
        store.wait_for_message("keyed", queue_id, put[some][0], timeout_s=30)
        (message,) = store.get_message("keyed", queue_id, put[some][0], 1).messages
    assert message.properties == {"own": "1", "__SHARDINGKEY": some}


def test_every_form_of_put_chooses_alike(engine, producer):
    producer.put("forms", b"", sharding_key="a")
    queue = producer.put("forms", b"", sharding_key="a").queue_id
    results = [
        producer.put_async("forms", b"", sharding_key="a").result(30), producer.put_many("forms", [b"1", b"2"], sharding_key="a"),
        producer.put_many_async("forms", [b"1"], sharding_key="a").result(30), producer.put_batch("forms", [b"1"], sharding_key="a")]
    assert all(result.ok and result.queue_id == queue for result in results)
    spread = [
        [producer.put_async("forms", b"").result(30) for _ in range(3)],
        [producer.put_many("forms", [b"1", b"2"]) for _ in range(3)],
        [producer.put_many_async("forms", [b"1"]).result(30) for _ in range(3)],
        [producer.put_batch("forms", [b"1"]) for _ in range(3)]]
    for form in spread:
        assert sorted(result.queue_id for result in form) == [0, 1, 2]

    async def main():
        return [(await producer.put_async("forms", b"")).queue_id for _ in range(3)]

    assert sorted(asyncio.run(main())) == [0, 1, 2]


def test_a_delayed_message_is_delivered_to_the_chosen_queue(engine, producer):
    queue = producer.put("late", b"now", sharding_key="b").queue_id
    producer.put("late", b"later", sharding_key="b", delay_level=1)
    with engine.open_store() as store:
        store.wait_for_message("late", queue, 1, timeout_s=60)
    assert in_queues(engine, "late")[queue] == [b"now", b"later"]


@pytest.mark.parametrize("call", [
    lambda producer, **options: producer.put("T/x", b"", **options),
    lambda producer, **options: producer.put_async("T/x", b"", **options).result(30),
    lambda producer, **options: producer.put_many("T/x", [b""], **options),
    lambda producer, **options: producer.put_many_async("T/x", [b""], **options).result(30),
    lambda producer, **options: producer.put_batch("T/x", [b""], **options),
], ids=["put", "put_async", "put_many", "put_many_async", "put_batch"])
def test_a_topic_that_cannot_be_is_refused_and_not_entered(engine, producer, call):
    for options in ({}, {"sharding_key": "a"}):
        with pytest.raises(PutRefusedError, match="MESSAGE_ILLEGAL.*folder") as raised:
            call(producer, **options)
        assert raised.value.result.topic == "T/x"
    assert "T/x" not in TopicConfigs(engine.path).read().rows


@pytest.mark.parametrize("name", ["SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "a@b", "a\tb", ""])
def test_a_second_queue_is_of_a_topic_to_which_a_program_may_put(producer, name):
    with pytest.raises(PutRefusedError, match="a queue in INNER_MULTI_DISPATCH: the topic"):
        producer.put("T", b"", properties={"INNER_MULTI_DISPATCH": f"other,{name}"})


@pytest.mark.parametrize("settings", [{}, {"enable_lmq": True}], ids=str)
def test_second_queues_that_the_engine_would_not_fill_are_refused(tmp_path, settings):
    second = {"INNER_MULTI_DISPATCH": "archive"}
    with pyengine.Engine(tmp_path / "store", **settings, **SMALL) as engine, engine.connect() as producer:
        for options in ({}, {"delay_level": 1}):
            with pytest.raises(PutRefusedError, match="enable_multi_dispatch=false: start it with enable_multi_dispatch=true"):
                producer.put("news", b"x", properties=second, **options)
        with pytest.raises(PutRefusedError, match="enable_multi_dispatch"), producer.transaction(group="g") as tx:
            tx.put("news", b"x", properties=second)
        producer.put_raw(RawMessage("news", b"kept", properties_text="INNER_MULTI_DISPATCH\x01archive"))  # as RocketMQ stores it
        eventually(lambda: in_queues(engine, "news") == {0: [b"kept"]}, "the raw put is in its queue")


@pytest.mark.parametrize(("given", "says"), [
    ({"tags": "a || b"}, "tags is 'a || b': a message has one tag"), ({"keys": ["k", "order 17"]}, "the key 'order 17' holds a blank")])
def test_tags_and_keys_that_no_consumer_could_name_are_refused(producer, given, says):
    for put in (producer.put, lambda topic, body, **options: producer.put_batch(topic, [BatchMessage(body, **options)])):
        with pytest.raises(PutRefusedError, match=re.escape(says)):
            put("T", b"x", **given)


def test_a_queue_and_a_key_exclude_each_other(producer):
    with pytest.raises(UsageError, match="exclude"):
        producer.put("T", b"", queue_id=0, sharding_key="a")
    with pytest.raises(TypeError, match="sharding_key"):
        producer.put("T", b"", sharding_key=7)
    with pytest.raises(PutRefusedError, match="empty"):  # readers would drop an empty property
        producer.put("T", b"", sharding_key="")


def test_a_message_to_be_put_is_shown_without_its_body():
    assert repr(BatchMessage(b"x", tags="new", flag=1)).startswith("BatchMessage(tags='new', keys=None, ")
    for message in (BatchMessage(bytes(100_000)), RawMessage("orders", bytearray(100_000))):
        assert len(repr(message)) < 400
