"""Arguments of the public functions: a wrong one is refused by the call that got it, in a sentence that names it."""

from __future__ import annotations

import asyncio
import math
import threading
from contextvars import ContextVar
from datetime import date, datetime, timedelta
from decimal import Decimal

import pytest

import pyengine
from fix_client import Refusing
from pyengine import arguments
from pyengine.client.outgoing import BatchMessage
from pyengine.errors import ConfigError, UsageError

WRONG_TYPE, WRONG_VALUE, UNKNOWN = TypeError, UsageError, ConfigError


@pytest.fixture
def producer(shared_parts):
    with shared_parts.producer() as made:
        assert made.put("orders", b"first") and made.put("orders", b"again")  # the fast path exists
        yield made


@pytest.fixture
def store(builder):
    builder.put("orders", b"first")
    return builder


def settings(builder) -> dict[str, object]:
    return {name: getattr(builder.geometry, name) for name in builder.geometry.__dataclass_fields__}


@pytest.mark.parametrize(("wrong", "says"), [
    ({"topic": b"orders"}, "topic must be str, not bytes"),
    ({"topic": ["orders"]}, "topic must be str, not list"),
    ({"body": "text"}, "body must be bytes, not str"),
    ({"queue_id": "0"}, "queue_id must be int, not str"),
    ({"tags": ["paid"]}, "tags must be str, not list"),
    ({"tags": b"paid"}, "tags must be str, not bytes"),
    ({"keys": 5}, "keys must be str or an iterable of str, not int"),
    ({"keys": b"k"}, "keys must be str or an iterable of str, not bytes"),
    ({"properties": [("a", "b")]}, "properties must be a mapping, not list"),
    ({"flag": "1"}, "flag must be int, not str"),
    ({"delay_level": "3"}, "delay_level must be int, not str"),
    ({"delay_level": 1.5}, "delay_level must be int, not float"),
    ({"unique_key": 5}, "unique_key must be str, not int"),
    ({"timeout_s": "5"}, "timeout_s must be a number, not str"),
])
@pytest.mark.parametrize("put", ["put", "put_async"])
def test_a_put_with_an_argument_of_the_wrong_type_is_refused(producer, put, wrong, says):
    before = producer.put("orders", b"x").queue_offset
    with pytest.raises(WRONG_TYPE, match=f"^{says}"):
        getattr(producer, put)(**{"topic": "orders", "body": b"x", **wrong})
    assert producer.put("orders", b"x").queue_offset == before + 1, "nothing was stored"


def test_a_timeout_may_be_without_end(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, timeout_s=float("inf")) as producer:
        assert producer.put("orders", b"x", timeout_s=float("inf")).ok


@pytest.mark.parametrize("mode", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_producer_that_wants_each_put_on_the_disk_gets_that_or_an_error(make_engine, mode):
    engine = make_engine(flush_disk_type=mode)
    engine.start()
    if mode == "ASYNC_FLUSH":
        with pytest.raises(WRONG_VALUE, match="^flush_disk_type=SYNC_FLUSH is asked for, and the engine on .* runs with ASYNC_FLUSH"):
            pyengine.connect(engine.root, flush_disk_type="SYNC_FLUSH")
    else:
        with pyengine.connect(engine.root, flushDiskType="SYNC_FLUSH") as producer:
            assert producer.put("orders", b"x").ok
    with pyengine.connect(engine.root, flush_disk_type="ASYNC_FLUSH") as producer:  # more than it asks for does no harm
        assert producer.put("orders", b"x").ok


@pytest.mark.parametrize("flag", [1 << 31, -(1 << 31) - 1, 1 << 40])
def test_a_flag_beyond_its_field_is_refused(producer, flag):
    for result in (producer.put("orders", b"x", flag=flag), producer.put_async("orders", b"x", flag=flag).result(10),
                   producer.put_many("orders", [b"x"], flag=flag), producer.put_batch("orders", [BatchMessage(b"x", flag=flag)])):
        assert not result and result.status.name == "MESSAGE_ILLEGAL" and "flag" in result.reason


@pytest.mark.parametrize(("call", "says"), [
    (lambda producer: producer.put_many("orders", b"abc"), "bodies must be an iterable of bytes, not bytes"),
    (lambda producer: producer.put_many("orders", None), "bodies must be an iterable of bytes, not NoneType"),
    (lambda producer: producer.put_many(b"orders", [b"x"]), "topic must be str, not bytes"),
    (lambda producer: producer.put_batch("orders", b"abc"), "messages must be an iterable of BatchMessage or bytes, not bytes"),
    (lambda producer: producer.put_batch("orders", [b"x"], queue_id="0"), "queue_id must be int, not str"),
    (lambda producer: producer.put_batch("orders", [BatchMessage(b"x", flag="1")]), "flag must be int, not str"),
    (lambda producer: producer.put_batch("orders", 5), "messages must be an iterable of BatchMessage or bytes, not int"),
])
def test_puts_of_many_name_the_wrong_argument(producer, call, says):
    with pytest.raises(WRONG_TYPE, match=f"^{says}"):
        call(producer)


@pytest.mark.parametrize(("wrong", "error", "says"), [
    ({"topic": b"orders"}, WRONG_TYPE, "topic must be str, not bytes"),
    ({"topic": ""}, WRONG_VALUE, "the topic ''"),
    ({"topic": "a/b"}, WRONG_VALUE, "the topic 'a/b'"),
    ({"group": b"billing"}, WRONG_TYPE, "group must be str, not bytes"),
    ({"tags": ["paid"]}, WRONG_TYPE, "tags must be str, not list"),
    ({"tags": "paid || "}, WRONG_VALUE, "no tag"),
    ({"tags": "paid || || sent"}, WRONG_VALUE, "no tag"),
    ({"tags": "amount > 5"}, WRONG_VALUE, "goes into sql"),
    ({"level": "x"}, WRONG_VALUE, "'x' is not a read level"),
    ({"queues": 5}, WRONG_TYPE, "queues must be a sequence of int, not int"),
    ({"queues": ["0"]}, WRONG_TYPE, "a queue id must be int, not str"),
    ({"queues": [-1]}, WRONG_VALUE, "-1 is not a queue id"),
    ({"queues": [1 << 31]}, WRONG_VALUE, "2147483648 is not a queue id"),
    ({"queues": []}, WRONG_VALUE, "queues is empty"),
    ({"auto_commit": "no"}, WRONG_TYPE, "auto_commit must be bool, not str"),
    ({"commit_interval_s": "1"}, WRONG_TYPE, "commit_interval_s must be a number, not str"),
    ({"commit_interval_s": -1}, WRONG_VALUE, "commit_interval_s is -1"),
    ({"session_timeout_s": "30"}, WRONG_TYPE, "session_timeout_s must be a number, not str"),
    ({"groop": "billing"}, UNKNOWN, "'groop'.*did you mean group[?]"),
    ({"timeout": 1}, UNKNOWN, "no argument 'timeout': did you mean timeout_s[?]"),
    ({"topics": ["orders"]}, UNKNOWN, "no argument 'topics': did you mean topic[?]"),
    ({"slave_timeot_ms": 1}, UNKNOWN, "'slave_timeot_ms'.*did you mean slave_timeout_ms[?]"),
    ({"auto_offset_reset": "earliest"}, UNKNOWN, "no argument 'auto_offset_reset': it has path, topic, group, .*from_, .*config explain"),
    ({"tag": "paid"}, UNKNOWN, "'tag'.*did you mean tags[?]"),
    ({"session_timeout": 30}, UNKNOWN, "'session_timeout'.*did you mean session_timeout_s[?]"),
    ({"flush_disk_typ": "SYNC_FLUSH"}, UNKNOWN, "'flush_disk_typ'.*did you mean flush_disk_type[?]"),
    ({"flush_disk_type": "x"}, UNKNOWN, "flush_disk_type = x [(]consume[(][)][)] is not allowed"),
])
def test_consume_refuses_a_wrong_argument_at_once(store, wrong, error, says):
    with pytest.raises(error, match=says):
        pyengine.consume(store.root, **{"topic": "orders", "from_": "first", **settings(store), **wrong})


@pytest.mark.parametrize(("call", "error", "says"), [
    (lambda reader: reader.get_message(b"orders", 0, 0), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.get_message("orders", "0", 0), WRONG_TYPE, "queue_id must be int, not str"),
    (lambda reader: reader.get_message("orders", 0, "0"), WRONG_TYPE, "offset must be int, not str"),
    (lambda reader: reader.get_message("orders", 0, 0, tags="paid || "), WRONG_VALUE, "no tag"),
    (lambda reader: reader.get_message("orders", 0, 0, tags="TAGS in ('paid')"), WRONG_VALUE, "goes into sql"),
    (lambda reader: reader.get_message("orders", 0, 0, level="x"), WRONG_VALUE, "'x' is not a read level"),
    (lambda reader: reader.queue_range(b"orders", 0), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.queue_ids(b"orders"), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.query_message(b"orders", "k"), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.query_message("orders", b"k"), WRONG_TYPE, "key must be str, not bytes"),
    (lambda reader: reader.query_message("orders", "k", 1.7e12), WRONG_TYPE, "begin_ms must be int, not float"),
    (lambda reader: reader.query_message("orders", "k", 0, math.nan), WRONG_TYPE, "end_ms must be int, not float"),
    (lambda reader: reader.query_message("orders", "k", max_messages=1.5), WRONG_TYPE, "max_messages must be int, not float"),
    (lambda reader: reader.get_message("orders", 0, 0, math.nan), WRONG_TYPE, "max_messages must be int, not float"),
    (lambda reader: reader.offset_by_time(b"orders", 0, 0), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.offset_by_time("orders", 0, math.nan), WRONG_TYPE, "timestamp_ms must be int, not float"),
    (lambda reader: reader.message(5), WRONG_TYPE, "msg_id must be str, not int"),
    (lambda reader: reader.message_at("0"), WRONG_TYPE, "physical_offset must be int, not str"),
    (lambda reader: reader.scan(topics="orders"), WRONG_TYPE, "topics must be a sequence of str, not str: give .'orders'.$"),
    (lambda reader: reader.scan(topics=[b"orders"]), WRONG_TYPE, "topic must be str, not bytes"),
    (lambda reader: reader.scan(columns="body"), WRONG_TYPE, "columns must be a sequence of str, not str: give .'body'.$"),
    (lambda reader: reader.scan(topic="orders"), WRONG_TYPE, "^scan[(][)] has no argument 'topic' [(]did you mean topics[?][)]$"),
    (lambda reader: reader.to_arrow(tag="a"), WRONG_TYPE, "^to_arrow[(][)] has no argument 'tag' [(]did you mean tags[?][)]$"),
    (lambda reader: reader.scan(queues=[0]), WRONG_VALUE, "^queues chooses among the queues of topics: name the topics too$"),
    (lambda reader: reader.scan(["orders"], queues=0), WRONG_TYPE, "queues must be a sequence of int, not int"),
    (lambda reader: reader.scan(["orders"], queues=[-1]), WRONG_VALUE, "-1 is not a queue id"),
    (lambda reader: reader.scan(["orders"], tags="a ||"), WRONG_VALUE, "no tag"),
    (lambda reader: reader.scan(["orders"], sql="a >"), WRONG_VALUE, "SQL"),
    (lambda reader: reader.scan(["orders"], since=1.5), WRONG_TYPE, "^since must be a datetime .*not float: round it"),
    (lambda reader: reader.scan(["orders"], until=SECONDS), WRONG_VALUE, "^until is .*in milliseconds since 1970, not in seconds"),
    (lambda reader: reader.scan(since=10 ** 12 + 1, until=10 ** 12), WRONG_VALUE, "^since .* is after until"),
    (lambda reader: reader.scan(["orders"], from_offsets=5), WRONG_TYPE, "^from_offsets must be a mapping, not int"),
    (lambda reader: reader.scan(["orders"], from_offsets={"orders": 5}), WRONG_TYPE, "^from_offsets.'orders'. must be a mapping, not int"),
    (lambda reader: reader.scan(["orders"], from_offsets={"orders": {0: -1}}), WRONG_VALUE, "is -1: give an offset of the queue"),
    (lambda reader: reader.scan(["orders"], from_offsets={"orders": {"0": 1}}), WRONG_TYPE, "a queue id must be int, not str"),
    (lambda reader: reader.scan(decompress="no"), WRONG_TYPE, "decompress must be bool, not str"),
    (lambda reader: reader.scan(allow_missing=1), WRONG_TYPE, "allow_missing must be bool, not int"),
])
def test_a_reader_refuses_a_wrong_argument_at_once(store, call, error, says):
    with pyengine.open_store(store.root, **settings(store)) as reader, pytest.raises(error, match=says):
        call(reader)


@pytest.mark.parametrize("make", [
    pyengine.Engine, pyengine.open_store, pyengine.connect, pyengine.ConsumerGroups,
    lambda path, **given: pyengine.consume(path, "orders", **given),
    lambda path, **given: pyengine.backup_store(path, "backup", **given),
    lambda path, **given: pyengine.restore_store("backup", path, **given),
], ids=["Engine", "open_store", "connect", "ConsumerGroups", "consume", "backup_store", "restore_store"])
def test_a_setting_that_there_is_not_is_refused_with_the_nearest_name(store, make):
    with pytest.raises(UNKNOWN, match="'flush_disk_typ'.*did you mean flush_disk_type[?]"):
        make(store.root, flush_disk_typ="SYNC_FLUSH")


def test_no_copy_of_a_store_is_made_inside_of_it(store):
    inside = store.root / "lake"
    for call in (lambda: pyengine.backup_store(store.root, inside), lambda: pyengine.write_tables(store.root, inside, "delta"),
                 lambda: pyengine.backup_store(store.root, f"file://{inside}")):
        with pytest.raises(WRONG_VALUE, match="is inside the store .*: give another folder"):
            call()
    assert not inside.exists()


def test_tables_take_a_pattern_of_topics(store, tmp_path):
    with pytest.raises(WRONG_TYPE, match="^topics must be str, not list$"):
        pyengine.write_tables(store.root, tmp_path / "lake", "delta", topics=["orders"])


def test_a_call_that_passes_settings_on_is_named_itself(store):
    with pytest.raises(UNKNOWN, match="^backup_store[(][)] has no argument 'check': it has store, dest, read_back"):
        pyengine.backup_store(store.root, "backup", check=True)
    says = "ephemeral_store[(][)] has no argument|[(]ephemeral_store[(][)][)]"
    with pytest.raises(UNKNOWN, match=says), pyengine.testing.ephemeral_store(flush_disk="x"):
        pass


def test_the_argument_of_run_consumer_that_was_meant_is_named(store):
    for run in (pyengine.run_consumer, lambda *given, **more: asyncio.run(pyengine.run_consumer_async(*given, **more))):
        with pytest.raises(UNKNOWN, match="run_consumer(_async)?[(][)] has no argument 'concurency': did you mean concurrency[?]"):
            run(store.root, "orders", "G", print if run is pyengine.run_consumer else handle, concurency=4)


async def handle(message):
    pass


@pytest.mark.parametrize(("call", "says"), [
    (lambda producer: producer.put("orders", b"x", tag="a"), "^put[(][)] has no argument 'tag' [(]did you mean tags[?][)]$"),
    (lambda producer: producer.put_async("orders", b"x", unique=1), "^put_async[(][)] has no argument 'unique' .*unique_key"),
    (lambda producer: producer.put_many("orders", [b"x"], when=1), "^put_many[(][)] has no argument 'when': it has topic"),
    (lambda producer: producer.put("orders"), "Producer.put[(][)] missing 1 required positional argument: 'body'"),
    (lambda producer: producer.put("orders", b"x", 0), "Producer.put[(][)] takes 3 positional arguments but 4 were given"),
    (lambda producer: producer.put_async("orders"), "Producer.put_async[(][)] missing"),
    (lambda producer: producer.put_many("orders"), "Producer.put_many[(][)] missing"),
    (lambda producer: producer.put_many_async("orders", [b"x"], tag="a"), "^put_many_async[(][)] has no argument 'tag' .*tags[?]"),
    (lambda producer: producer.put_batch("orders", [b"x"], tags="a"), "^put_batch[(][)] has no argument 'tags': it has topic, messages"),
    (lambda producer: producer.put_arrow("orders", [], flag=1), "^put_arrow[(][)] has no argument 'flag': it has topic, table"),
    (lambda producer: producer.transaction().__enter__().put("T", b"x", wait=False), "^put[(][)] has no argument 'wait': it has topic"),
])
def test_an_error_about_arguments_names_the_public_call(producer, call, says):
    with pytest.raises(WRONG_TYPE, match=says):
        call(producer)


SECONDS = 1_800_000_000  # an id of a test must be the same in each process of a run
NO_TIMES = [
    (SECONDS, WRONG_VALUE, "in milliseconds since 1970, not in seconds.*datetime"), (-5, WRONG_VALUE, "in milliseconds since 1970"),
    (SECONDS * 10 ** 9, WRONG_VALUE, "not in micro- or nanoseconds: divide, or give a datetime"),
    (1.7e12, WRONG_TYPE, "not float: round it"), (timedelta(hours=1), WRONG_TYPE, "not timedelta: add it to datetime.now[(]UTC[)]"),
    (True, WRONG_TYPE, "not bool"), (date(2026, 1, 1), WRONG_TYPE, "not date"), (datetime(2026, 1, 1), WRONG_VALUE, "no time zone"),
]


@pytest.mark.parametrize(("when", "error", "says"), NO_TIMES)
def test_what_is_no_time_is_refused_where_a_time_is_meant(producer, store, when, error, says):
    for put in (producer.put, producer.put_async) if not isinstance(when, timedelta) else ():
        with pytest.raises(error, match=f"^deliver_at .*{says}"):
            put("orders", b"x", deliver_at=when)
    with pytest.raises(error, match=f"^from_ .*{says}"):
        pyengine.consume(store.root, "orders", from_=when, **settings(store))


@pytest.mark.parametrize(("to", "error", "says"), [
    (SECONDS, WRONG_VALUE, "beyond the end 1 of queue 0: an int is an offset here; for a time give a datetime"),
    (SECONDS * 1000, WRONG_VALUE, "an int is an offset here"), *NO_TIMES[3:],
])
def test_what_is_no_place_is_refused_where_an_offset_or_a_datetime_is_meant(store, to, error, says):
    with pyengine.consume(store.root, "orders", group="G", **settings(store)) as consumer:
        before = consumer.positions
        with pytest.raises(error, match=says):
            consumer.seek(None, to)
        with pytest.raises(error, match=says):
            pyengine.ConsumerGroups(store.root, **settings(store)).reset("orders", "G", to)
        assert consumer.positions == before


def test_what_else_is_a_time_is_said(producer, store):
    with pytest.raises(WRONG_VALUE, match="a datetime with a time zone, or a timedelta from now on$"):
        producer.put("orders", b"x", deliver_at=30)
    with pytest.raises(WRONG_VALUE, match="a datetime with a time zone, 'first', 'last'$"):
        pyengine.consume(store.root, "orders", from_=1, **settings(store))


@pytest.mark.parametrize("call", [pyengine.run_consumer, lambda *call: asyncio.run(pyengine.run_consumer_async(*call))], ids=["", "async"])
def test_messages_are_handled_for_a_group(store, call):
    with pytest.raises(WRONG_TYPE, match="^group must be str, not NoneType$"):
        call(store.root, "orders", None, lambda message: None)


def test_letters_are_put_back_at_several_offsets(store):
    with pytest.raises(WRONG_TYPE, match="^offsets must be an iterable of int, not int$"):
        pyengine.DeadLetters(store.root, **settings(store)).requeue("g", 5)


def test_a_delay_without_end_is_refused_and_a_decimal_is_a_number(producer, store):
    for when in (timedelta.max, timedelta(days=41)):
        with pytest.raises(WRONG_VALUE, match="^deliver_at is more than 40 days ahead: give at most 40 days"):
            producer.put("orders", b"x", deliver_at=when)
    assert producer.put("orders", b"x", timeout_s=Decimal("1.5"), queue_id=0).ok
    with pytest.raises(WRONG_VALUE, match="^timeout_s is -1.5"):
        producer.put("orders", b"x", timeout_s=Decimal("-1.5"), queue_id=0)
    with pyengine.consume(store.root, "orders", commit_interval_s=Decimal(1), **settings(store)) as consumer:
        assert consumer.pull(1, timeout_s=Decimal("0.5"))


PATHS = {
    "Engine": pyengine.Engine, "connect": pyengine.connect, "open_store": pyengine.open_store, "Topics": pyengine.Topics,
    "consume": lambda path: pyengine.consume(path, "orders"), "ConsumerGroups": pyengine.ConsumerGroups,
    "DeadLetters": pyengine.DeadLetters, "backup_store": lambda path: pyengine.backup_store(path, "backup"),
    "restore_store": lambda path: pyengine.restore_store("backup", path),
    "write_tables": lambda path: pyengine.write_tables("store", path, "delta"),
    "write_tables of": lambda path: pyengine.write_tables(path, "lake", "delta"),
    "dataset": lambda path: pyengine.arrow.dataset(path),
}


@pytest.mark.parametrize(("path", "says"), [("", "is empty: give a directory"), ("s3://b/store", "s3://b/store, is a URI: give a")])
@pytest.mark.parametrize("call", PATHS)
def test_neither_an_empty_path_nor_a_uri_is_a_folder_here(call, path, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WRONG_VALUE, match=says):
        PATHS[call](path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wrong", "says"), [
    (None, "messages must be a Message or an iterable of them, not NoneType"), ("id", "messages must be .*, not str"),
    (["id"], "each of messages must be a Message, not str"), ([None], "each of messages must be a Message, not NoneType"),
])
def test_what_is_no_message_settles_none(store, wrong, says):
    with pyengine.consume(store.root, "orders", group="G", auto_commit=False, **settings(store)) as consumer:
        (message,) = consumer.pull(1, timeout_s=5)
        for call in (consumer.ack, consumer.requeue, *([consumer.commit] if wrong is not None else [])):
            with pytest.raises(WRONG_TYPE, match=f"^{says}"):
                call(wrong)
        with pytest.raises(WRONG_TYPE, match="^message must be a Message, not"):
            consumer.retry([message])
        assert consumer.commit([]) == {0: 0}


def test_an_event_that_would_end_no_run_is_refused_at_once(store):
    stop = threading.Event()
    stop.set()
    for wrong in (asyncio.Event(), 5):
        with pytest.raises(WRONG_TYPE, match="^stop must be a threading.Event; run_consumer_async takes an asyncio.Event"):
            pyengine.run_consumer(store.root, "orders", "G", print, stop=wrong)
    with pytest.raises(WRONG_TYPE, match="^stop must be an asyncio.Event; run_consumer takes a threading.Event, not Event"):
        asyncio.run(pyengine.run_consumer_async(store.root, "orders", "G", handle, stop=stop))


def test_a_topic_that_no_group_could_consume_is_refused_by_each_put(producer):
    for put in (lambda: producer.put("a@b", b"x"), lambda: producer.put_async("a@b", b"x").result(10),
                lambda: producer.put_many("a@b", [b"x"]), lambda: producer.put_batch("a@b", [b"x"]),
                lambda: producer.put("a@b", b"x", queue_id=None)):
        answer = told(put)
        assert "MESSAGE_ILLEGAL" in answer and "'a@b' holds '@'" in answer and "leave it out" in answer
    for topic in ("a\nb", "a\u200bb"):
        answer = told(lambda topic=topic: producer.put(topic, b"x"))
        assert f"MESSAGE_ILLEGAL: the topic {topic!r} has a character that is not printable" in answer


@pytest.mark.parametrize("topic", [
    "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT", "RMQ_SYS_PYENGINE_TIMER"])
def test_a_topic_of_the_system_is_refused_by_each_put_but_a_raw_one(producer, topic):
    for put in (lambda: producer.put(topic, b"x", queue_id=0), lambda: producer.put_async(topic, b"x").result(10),
                lambda: producer.put_many(topic, [b"x"]), lambda: producer.put_batch(topic, [b"x"])):
        assert f"MESSAGE_ILLEGAL: the topic {topic} is one of the system's" in told(put)
    with producer.transaction() as block, pytest.raises(pyengine.PutRefusedError, match="one of the system's"):
        block.put(topic, b"x")
    assert all(producer.put(name, b"x").ok for name in ("BenchmarkTest", "TBW102"))


def told(put) -> str:
    try:
        result = put()
    except pyengine.PutError as error:
        result = error.result
    return f"{result.status.name}: {result.reason}"


def test_await_says_where_it_works(producer, store):
    """Under trio, for example, no loop of asyncio runs."""
    async def awaits():
        await producer.put_async("orders", b"x")

    async def enters(each):
        async with each as same:
            entered.append(same)

    entered: list[object] = []
    with pyengine.consume(store.root, "orders", **settings(store)) as consumer:
        for coroutine in (awaits(), enters(producer), enters(consumer)):
            with pytest.raises(WRONG_VALUE, match="asyncio only.*trio.to_thread"):
                coroutine.send(None)
        assert entered == [] and [each.body for each in consumer.pull()] == [b"first"]


def test_async_with_closes_a_producer_at_its_end_also_if_no_thread_of_the_loop_is_free(producer):
    async def main():
        asyncio.get_running_loop().set_default_executor(Refusing())
        async with producer as same:
            assert same is producer and (await producer.put_async("orders", b"x")).ok

    asyncio.run(main())
    with pytest.raises(WRONG_VALUE, match="closed"), producer:
        pass


def test_a_call_in_a_thread_of_its_own_has_the_context_of_its_task():
    name = ContextVar[str]("name")

    async def main():
        name.set("mine")
        return await arguments.in_thread(lambda: (name.get(), threading.get_ident()))

    got, thread = asyncio.run(main())
    assert got == "mine" and thread != threading.get_ident()


def test_a_block_ends_also_where_no_thread_can_be_had(producer, monkeypatch):
    """At the end of an interpreter, for example."""
    async def main():
        async with producer:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ZeroDivisionError):
            await arguments.in_thread(lambda: 1 // 0)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    asyncio.run(main())
    assert "closed" in repr(producer)


def test_async_with_closes_a_reader_at_its_end(store):
    async def main():
        async with pyengine.open_store(store.root, **settings(store)) as reader:
            assert reader.max_physical_offset() >= 0
        return reader

    with pytest.raises(pyengine.UsageError, match="closed"):
        asyncio.run(main()).max_physical_offset()


def test_each_object_is_shown_in_one_line(producer, store):
    with pyengine.open_store(store.root, **settings(store)) as reader, pyengine.consume(
            store.root, "orders", group="G", **settings(store)) as consumer:
        assert repr(reader) == f"LiveStoreReader({str(store.root)!r})"
        assert repr(consumer) == f"Consumer('orders', group 'G', queues [0], {str(store.root)!r})"
    assert repr(reader).endswith(", closed)") and "closed" in repr(consumer)
    assert repr(pyengine.Engine(store.root)) == f"Engine({str(store.root)!r}, stopped)"
    assert repr(producer).startswith("Producer('/") and repr(producer).endswith(", open)")
    future = producer.put_async("orders", b"x")
    assert future.result(10) and repr(future) == "<PutFuture, done>"
    producer.close()
    assert repr(producer).endswith(", closed)")
    message = pyengine.Message("orders", b"x" * 5000, 1, 2, 3, 5100, "TAGS\x01paid\x02KEYS\x01" + "k" * 300)
    assert repr(message) == (f"Message(topic='orders', body=b'{'x' * 80}'... (5,000 bytes), queue_id=1, queue_offset=2, tags='paid', "
                             f"keys='{'k' * 80}'... (300 characters))")


def test_a_ring_of_a_wrong_size_is_refused_as_a_wrong_argument(store):
    for wrong, error in ((5, WRONG_VALUE), ("1", WRONG_TYPE), (65537, WRONG_VALUE)):
        with pytest.raises(error, match="ring_bytes"):
            pyengine.connect(store.root, ring_bytes=wrong, **settings(store))
    with pytest.raises(WRONG_VALUE, match="timeout_s is -1"):
        pyengine.connect(store.root, timeout_s=-1, **settings(store))


def test_a_closed_producer_is_no_context(producer):
    producer.close()
    with pytest.raises(UsageError, match="this producer is closed: make another one"), producer:
        pass
