"""`pyengine.Topics`: a store's topics, with and without an engine; and topics whose messages are values."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, NewType, TypedDict, TypeVar

import pytest

import pyengine
from broker_lock import held_by_a_broker
from pyengine.errors import ConfigError, EngineUnavailableError, NotAStoreError, StoreBusyError, UsageError
from pyengine.testing import make_message
from waiting import eventually


def states(root, **options) -> dict[str, pyengine.TopicState]:
    return {each.topic: each for each in pyengine.Topics(root).list(**options)}


def entry(root, topic: str) -> pyengine.TopicConfig | None:
    return next((each.config for each in pyengine.Topics(root).list() if each.topic == topic), None)


def test_topics_with_messages_and_topics_with_an_entry_are_listed(builder):
    sizes = [builder.put("orders", b"1", queue_id=queue_id).size_bytes for queue_id in (0, 2)]
    made = pyengine.Topics(builder.root).create("planned", queues=4)
    assert (made.read_queue_nums, made.write_queue_nums, made.perm_text, made.order) == (4, 4, "RW-", False)
    assert states(builder.root) == {
        "orders": pyengine.TopicState("orders", (0, 2), 2, None), "planned": pyengine.TopicState("planned", (), 0, made)}
    assert {name: state.size_bytes for name, state in states(builder.root, sizes=True).items()} == {"orders": sum(sizes), "planned": 0}


def test_a_change_names_what_it_changes(builder):
    topics = pyengine.Topics(builder.root)
    assert topics.create("orders") == pyengine.TopicConfig("orders", 8, 8)
    assert topics.update("orders", write_queue_nums=2, perm="r", order=True) == pyengine.TopicConfig("orders", 8, 2, 4, True)
    assert topics.update("orders", queues=3, read_queue_nums=5, perm=6) == pyengine.TopicConfig("orders", 5, 3, 6, True)
    assert topics.create("orders", queues=9, exist_ok=True) == states(builder.root)["orders"].config
    assert topics.create("other", queues=9, exist_ok=True).write_queue_nums == 9


@pytest.mark.parametrize(("call", "says"), [
    (lambda topics: topics.create("there"), "is there already"), (lambda topics: topics.create("a@b"), "no group could consume"),
    (lambda topics: topics.create("SCHEDULE_TOPIC_XXXX"), "one of the system's"),
    (lambda topics: topics.create("a/b"), "folder's name"), (lambda topics: topics.create(""), "is empty"),
    (lambda topics: topics.create("x", queues=0), "give 1 to"), (lambda topics: topics.create("x", perm="rx"), "perm is 'rx': give rw"),
    (lambda topics: topics.update("there"), "update changes nothing"), (lambda topics: topics.update("gone", perm="r"), "no topic gone"),
    (lambda topics: topics.delete("gone"), "no topic gone"),
])
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(builder, call, says):
    topics = pyengine.Topics(builder.root)
    topics.create("there")
    before = topics.list()
    with pytest.raises(UsageError, match=says):
        call(topics)
    for wrong in ({"queues": "4"}, {"order": 1}, {"perm": 4.0}):
        with pytest.raises(TypeError):
            topics.create("x", **wrong)
    assert topics.list() == before


def test_a_deleted_topic_keeps_its_messages_and_comes_back_with_the_next_one(undelayed, names):
    topics = pyengine.Topics(undelayed.path)
    with undelayed.connect() as producer:
        producer.put(names[0], b"before")
        eventually(lambda: entry(undelayed.path, names[0]), "its entry is made")
        topics.delete(names[0])
        assert states(undelayed.path)[names[0]] == pyengine.TopicState(names[0], (0,), 1, None)
        with pyengine.consume(undelayed.path, names[0]) as consumer:
            assert [message.body for message in consumer.pull()] == [b"before"]
        producer.put(names[0], b"after")
    eventually(lambda: entry(undelayed.path, names[0]), "its entry is made again")


def test_a_store_that_is_not_there_or_a_brokers_is_an_error(tmp_path, builder):
    with pytest.raises(NotAStoreError):
        pyengine.Topics(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="queues"):
        pyengine.Topics(builder.root, queues=4)
    (builder.root / "lock").touch()
    with held_by_a_broker(builder.root), pytest.raises(StoreBusyError):
        pyengine.Topics(builder.root).create("orders")


# --- topics of values -----------------------------------------------------------------------------


@dataclass
class Order:
    number: int
    state: str


Each = TypeVar("Each")


@dataclass
class Numbers(Generic[Each]):
    number: Each


def model(codec: str):
    """The type of an order for this codec."""
    if codec == "msgspec":
        return pytest.importorskip("msgspec").defstruct("Order", [("number", int), ("state", str)])
    if codec == "pydantic":
        return pytest.importorskip("pydantic").create_model("Order", number=(int, ...), state=(str, ...))
    return Order


@pytest.fixture
def put(undelayed):
    """put(topic, *bodies, **options): put bodies as they are."""
    def call(topic: str, *bodies: bytes, **options) -> None:
        with undelayed.connect() as producer:
            for body in bodies:
                producer.put(topic, body, **options)

    return call


@pytest.mark.parametrize("codec", ["json", "msgspec", "pydantic"])
def test_values_are_put_and_consumed(undelayed, names, codec):
    kind = model(codec)
    orders = pyengine.Topic(names[0], kind, codec=codec)
    one, two, three, four = (kind(number=number, state="é") for number in range(4))
    with undelayed.connect() as producer:
        orders.put(producer, one, tags="t", properties={"own": "1"})
        orders.put_async(producer, two).result(10)
        orders.put_many(producer, [three, four])
    with orders.consume(undelayed.path, group=names[1]) as consumer:
        found = []
        eventually(lambda: found.extend(consumer.pull(timeout_s=0.1)) or len(found) == 4, "all four")
    assert [each.value for each in found] == [one, two, three, four] and {type(each.value) for each in found} == {kind}
    assert found[0].message.properties == {"TAGS": "t", "own": "1", "content-type": "application/json"}
    assert {each.message.properties["content-type"] for each in found} == {"application/json"}


@pytest.mark.parametrize("content_type", ["Application/JSON", "application/json; charset=utf-8", " text/x-Order ;version=2"])
def test_a_codec_may_name_its_type_with_capital_letters_and_parameters(undelayed, names, content_type):
    class Raw:
        def __init__(self):
            self.content_type = content_type

        def encode(self, value):
            return value

        def decode(self, body):
            return body

    raws = pyengine.Topic(names[0], bytes, codec=Raw())
    with undelayed.connect() as producer:
        raws.put(producer, b"one")
    with raws.consume(undelayed.path, group=names[1]) as consumer:
        assert [each.value for each in consumer.pull(timeout_s=2)] == [b"one"]


@pytest.mark.parametrize("codec", ["json", "msgspec", "pydantic"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_bad_body_is_a_dead_letter(undelayed, names, put, codec, is_async):
    put(names[0], b"{", b'{"number": 1}', b"\xff")
    put(names[0], b'{"number": 2, "state": "x"}', properties={"content-type": "text/plain"})
    put(names[0], b'{"number": 3, "state": "paid"}', properties={"content-type": "Application/JSON; charset=utf-8"})
    orders = pyengine.Topic(names[0], model(codec), codec=codec)

    async def pull() -> list[int]:
        async with orders.consume(undelayed.path, group=names[1], auto_commit=False) as consumer:
            async for each in consumer:
                consumer.ack(each)
                return [each.value.number]

    if is_async:
        assert asyncio.run(pull()) == [3]
    else:
        with orders.consume(undelayed.path, group=names[1], auto_commit=False) as consumer:
            assert [each.value.number for each in consumer.pull(32, timeout_s=30)] == [3]
            assert consumer.pull(timeout_s=0) == []
            consumer.commit()
    letters = pyengine.DeadLetters(undelayed.path)
    dead = eventually(lambda: len(found := letters.messages(names[1])) >= 4 and found, "the dead letters")
    reasons = [each.properties["__PYENGINE_REASON"] for each in dead]
    assert len(reasons) == 4 and all("the body is no Order: " in reason for reason in reasons[:3])
    assert reasons[3] == "the content type is text/plain, not application/json"
    assert sum(state.lag for state in pyengine.ConsumerGroups(undelayed.path).groups(topic=names[0], group=names[1])) == 0
    letters.requeue(names[1], [0])
    with pyengine.consume(undelayed.path, names[0], group=names[1]) as consumer:
        (again,) = eventually(lambda: consumer.pull(), "it comes again")
        assert again.body == b"{" and "__PYENGINE_REASON" not in again.properties


@pytest.mark.parametrize("codec", ["json", "msgspec", "pydantic"])
@pytest.mark.parametrize("wrong", [{"number": 1}, b"bytes", None])
def test_a_value_of_another_type_is_not_put(undelayed, names, codec, wrong):
    orders = pyengine.Topic(names[0], model(codec), codec=codec)
    with undelayed.connect() as producer:
        for put in (orders.put, orders.put_async, lambda producer, value: orders.put_many(producer, [value])):
            with pytest.raises(TypeError, match=f"a value of topic '{names[0]}' must be Order, not {type(wrong).__name__}"):
                put(producer, wrong)
    assert names[0] not in {each.topic for each in pyengine.Topics(undelayed.path).list()}


@pytest.mark.parametrize(("kind", "value", "codec"), [
    (int | str, 1, "msgspec"), (Annotated[int, "a number"], 1, "pydantic"), (Any, None, "pydantic"),
    (Mapping[str, int], {"a": 1}, "msgspec"),
    (list[int], (1, 2), "json"), (float, 1, "msgspec"), (TypedDict("Row", {"a": int}), {"a": 1}, "json"), (Literal["a"], "a", "pydantic"),
    (Numbers[int], Numbers(1), "json"), (NewType("Id", int), 1, "pydantic"),
])
def test_what_an_annotation_allows_is_put(undelayed, names, kind, value, codec):
    if codec != "json":
        pytest.importorskip(codec)
    topic = pyengine.Topic(names[0], kind, codec=codec)
    with undelayed.connect() as producer:
        topic.put(producer, value)
    with topic.consume(undelayed.path) as consumer:
        (found,) = consumer.pull(timeout_s=30)
    assert found.value == value or list(value) == found.value


@pytest.mark.parametrize(("kind", "value", "error", "says"), [
    (Order, Order(1, datetime(2026, 1, 1, tzinfo=UTC)), TypeError, "cannot write datetime inside of Order: use 'msgspec' or 'pydantic'"),
    (Order, Order(1, Order(2, "x")), TypeError, "cannot write Order inside of Order"),
    (list, [Order(1, "x")], TypeError, "cannot write Order inside of list"),
    (dict, {"rate": float("nan")}, pyengine.UsageError, "cannot write the value: "),
], ids=["datetime", "nested", "list", "nan"])
def test_the_codec_json_names_what_it_cannot_write_and_read_back(undelayed, names, kind, value, error, says):
    with undelayed.connect() as producer, pytest.raises(error, match=f"^the codec 'json' {says}"):
        pyengine.Topic(names[0], kind).put(producer, value)


@dataclass
class Base:
    a: int


@dataclass
class More(Base):
    b: int = 1


@dataclass
class Summed:
    a: int
    total: int = field(init=False)

    def __post_init__(self):
        self.total = self.a + 1


@dataclass
class Scaled:
    a: int
    scale: InitVar[int] = 2

    def __post_init__(self, scale):
        self.a *= scale


@pytest.mark.parametrize(("kind", "value"), [(Base, More(1)), (Scaled, Scaled(1)), (float, True)])
def test_the_codec_json_puts_no_value_that_it_reads_otherwise(undelayed, names, kind, value):
    with undelayed.connect() as producer, pytest.raises(TypeError):
        pyengine.Topic(names[0], kind).put(producer, value)


def test_the_codec_json_makes_fields_again_that_are_made_from_others():
    codec = pyengine.Topic("T", Summed).codec
    assert codec.decode(codec.encode(Summed(1))) == Summed(1)


def test_the_codec_pydantic_writes_names_and_values_as_models_do_where_that_is_read():
    pydantic = pytest.importorskip("pydantic")

    class Private(pydantic.BaseModel):
        total: float = pydantic.Field(0, serialization_alias="orderTotal")
        _trace: object = pydantic.PrivateAttr(default_factory=object)  # no two models are equal

    class Computed(pydantic.BaseModel):
        a: int

        @pydantic.computed_field
        @property
        def twice(self) -> int:
            return 2 * self.a

    codec = pyengine.Topic("T", Private, codec="pydantic").codec
    assert codec.decode(codec.encode(Private(total=5))).total == 5
    assert pyengine.Topic("T", Computed, codec="pydantic").codec.encode(Computed(a=1)) == b'{"a":1,"twice":2}'


def test_the_codec_json_refuses_a_field_that_its_reader_makes_anew():
    @dataclass
    class Job:
        number: int
        state: str = field(default="new", init=False)

    codec, job = pyengine.Topic("T", Job).codec, Job(1)
    assert codec.decode(codec.encode(job)) == job
    job.state = "done"
    with pytest.raises(TypeError, match="reads another value of Job"):
        codec.encode(job)


def test_the_codec_pydantic_writes_what_it_reads():
    pydantic = pytest.importorskip("pydantic")

    def model(name, kind=int, **options):
        return pydantic.create_model(name, x=(kind, pydantic.Field(**options)))

    for made, value in ((model("Alias", alias="y"), {"y": 1}), (model("Optional", alias="y", default=0), {"y": 1}),
                        (model("Written", serialization_alias="z", default=0), {"x": 1}), (model("Json", pydantic.Json), {"x": "[1]"})):
        codec = pyengine.Topic("T", made, codec="pydantic").codec
        assert codec.decode(codec.encode(made(**value))) == made(**value)
    for made, value in ((model("Secret", pydantic.SecretStr), {"x": "s"}), (model("Infinite", float), {"x": float("inf")}),
                        (model("Read", validation_alias="v"), {"v": 1})):
        with pytest.raises(TypeError, match="cannot read what it writes"):
            pyengine.Topic("T", made, codec="pydantic").codec.encode(made(**value))


def test_a_body_with_nan_is_no_json():
    with pytest.raises(pyengine.BadMessageError, match="NaN is no JSON"):
        pyengine.Topic("T", dict).decode(make_message("T", b'{"rate": NaN}'))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_gets_values_and_no_bad_body(undelayed, names, put, is_async):
    put(names[0], b"bad", b'{"number": 1, "state": "paid"}')
    orders = pyengine.Topic(names[0], Order)
    handled = []
    if is_async:
        async def main() -> None:
            stop = asyncio.Event()

            async def handle(order: pyengine.Typed[Order]) -> None:
                handled.append(order.value)
                stop.set()

            await pyengine.run_consumer_async(undelayed.path, orders.name, names[1], orders.handler(handle), stop=stop)

        asyncio.run(main())
    else:
        stop = threading.Event()
        pyengine.run_consumer(undelayed.path, orders.name, names[1],
                              orders.handler(lambda order: handled.append(order.value) or stop.set()), stop=stop)
    assert handled == [Order(1, "paid")]
    (dead,) = eventually(lambda: pyengine.DeadLetters(undelayed.path).messages(names[1]), "the dead letter")
    assert dead.body == b"bad" and dead.properties["__PYENGINE_REASON"].startswith("the body is no Order: JSONDecodeError")


def test_without_a_group_a_body_that_does_not_decode_is_skipped_and_named(undelayed, names, put, caplog):
    put(names[0], b"bad", b'{"number": 1, "state": "paid"}')
    with pyengine.Topic(names[0], Order).consume(undelayed.path) as consumer:
        assert next(iter(consumer)).value == Order(1, "paid")
    assert "is skipped: the body is no Order" in caplog.text


def test_what_cannot_be_a_dead_letter_now_is_delivered_again_with_its_neighbours(builder):
    """No engine runs, so nothing can be put."""
    bodies = [b'{"number": 1, "state": "a"}', b"bad", b'{"number": 2, "state": "b"}']
    for body in bodies:
        builder.put("orders", body)
    with pyengine.Topic("orders", Order).consume(builder.root, group="g", auto_commit=False) as consumer:
        for _ in range(2):
            with pytest.raises(EngineUnavailableError):
                consumer.pull(32)
        assert [each.body for each in consumer.consumer.pull(32)] == bodies


@pytest.mark.parametrize("is_buried", [False, True])
def test_neighbours_of_a_dead_letter_come_once_more_after_a_cancelled_pull(builder, monkeypatch, is_buried):
    for body in (b'{"number": 1, "state": "a"}', b"bad", b'{"number": 2, "state": "b"}'):
        builder.put("orders", body)
    has_begun, may_end = threading.Event(), threading.Event()

    def give_back(consumer, message, level, *, reason):
        has_begun.set()
        assert may_end.wait(60)
        if not is_buried:
            raise EngineUnavailableError("no engine runs")
        consumer.ack(message)

    async def cancelled(consumer) -> None:
        pull = asyncio.ensure_future(consumer.pull_async(32))
        assert await asyncio.to_thread(has_begun.wait, 60)
        pull.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await pull

    monkeypatch.setattr("pyengine.client.topics.give_back", give_back)
    with pyengine.Topic("orders", Order).consume(builder.root, group="g", auto_commit=False) as consumer:
        asyncio.run(cancelled(consumer))
        found = consumer.consumer.pull(32)
    assert sorted((each.queue_offset, each.delivery_count) for each in found) == [(at, 1) for at in (0, 1, 2) if at != 1 or not is_buried]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("end", "options"), [
    *itertools.product(["decode", "give_back"], [{}, {"sharing": "messages"}, {"auto_commit": False}]),
    ("decode", {"group": None}),
], ids=str)
def test_a_signal_handler_that_raises_while_values_are_made_loses_no_message(builder, monkeypatch, end, options, is_async):
    for body in (b"bad 1", b"one", b"bad 2", b"two"):
        builder.put("orders", body)
    interrupted_at, values, buried = {"decode": b"two", "give_back": b"bad 2"}[end], [], []

    def interrupt_once(body: bytes) -> None:
        nonlocal interrupted_at
        if body == interrupted_at:
            interrupted_at = b""
            raise KeyboardInterrupt

    class Words:
        content_type = "text/plain"
        encode = str.encode

        def decode(self, body):
            if body.startswith(b"bad"):
                raise ValueError(body)
            if end == "decode":
                interrupt_once(body)
            return body.decode()

    def give_back(consumer, message, level, *, reason):
        interrupt_once(message.body)
        buried.append(message.body)
        if not consumer._options.auto_commit:
            consumer.ack(message)

    monkeypatch.setattr("pyengine.client.topics.give_back", give_back)
    with pyengine.Topic("orders", str, codec=Words()).consume(builder.root, from_="first", **{"group": "g"} | options) as consumer:
        pull = (lambda: asyncio.run(consumer.pull_async(9))) if is_async else lambda: consumer.pull(9)
        with pytest.raises(KeyboardInterrupt):
            pull()
        eventually(lambda: values.extend(pull()) or len(values) >= 2, "the values")
    assert [(each.value, each.message.delivery_count) for each in values] == [("one", 1), ("two", 1)]
    assert buried == ([] if "group" in options else [b"bad 1", b"bad 2"])


def test_a_typed_message_is_acknowledged_given_back_and_retried(undelayed, names):
    numbers = pyengine.Topic(names[0], int)
    with undelayed.connect() as producer:
        numbers.put_many(producer, range(4))
    with numbers.consume(undelayed.path, group=names[1], auto_commit=False) as consumer:
        zero, one, two, three = consumer.pull(4, timeout_s=30)
        consumer.ack([zero])
        consumer.requeue(one)
        (again,) = consumer.pull(1, timeout_s=30)
        assert (again.value, again.message.delivery_count) == (1, 2)
        assert consumer.retry(two, delay_s=0).topic.startswith("%RETRY%")
        assert consumer.retry(three, -1, reason="not\x01wanted").topic.startswith("%DLQ%")
        assert consumer.commit(again) == {0: 4}
        (late,) = eventually(lambda: consumer.pull(1), "the retry")
        assert (late.value, late.message.reconsume_times) == (2, 1)
    (dead,) = eventually(lambda: pyengine.DeadLetters(undelayed.path).messages(names[1]), "the dead letter")
    assert dead.properties["__PYENGINE_REASON"] == "not\ufffdwanted"


def test_the_codec_json_makes_what_json_has(undelayed, names):
    class Upper:
        content_type = "text/upper"
        encode = staticmethod(lambda value: value.upper().encode())
        decode = staticmethod(lambda body: body.decode().lower())

    with undelayed.connect() as producer:
        for number, (kind, value, codec) in enumerate([
                (dict, {"a": [1, None]}, "json"), (list[int], [1, 2], "json"), (float, 2, "json"), (object, None, "json"),
                (str, "loud", Upper())]):
            topic = pyengine.Topic(f"{names[0]}-{number}", kind, codec=codec)
            topic.put(producer, value)
            with topic.consume(undelayed.path) as consumer:
                (found,) = consumer.pull(timeout_s=30)
                assert found.value == value and found.message.properties["content-type"] == topic.codec.content_type
    topic = pyengine.Topic("T", list)
    with pytest.raises(pyengine.BadMessageError, match="the body is no list: TypeError: it is dict, not list"):
        topic.decode(make_message("T", b"{}"))


@pytest.mark.parametrize(("arguments", "says"), [
    (("a@b", dict), "no group could consume"), (("T", set), "the codec 'json' makes dataclasses, dict"),
    (("T", dict, "yaml"), "'yaml' is not a codec: give json, msgspec, pydantic"),
    (("T", dict, "msgspec"), "the codec 'msgspec' needs the package msgspec: pip install msgspec"),
])
def test_a_topic_that_cannot_be_is_refused(monkeypatch, arguments, says):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    name, kind, *codec = arguments
    with pytest.raises(UsageError, match=says):
        pyengine.Topic(name, kind, **({"codec": codec[0]} if codec else {}))
