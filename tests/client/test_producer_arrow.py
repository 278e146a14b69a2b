"""`Producer.put_arrow`: the rows of a table as messages."""

from __future__ import annotations

import datetime

import pytest

import pyengine
from pyengine.client import outgoing
from pyengine.errors import UsageError
from pyengine.results import PutRefusedError, PutStatus
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from waiting import eventually

pa = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def engine(undelayed):
    return undelayed


def read(engine, topic: str) -> list[pyengine.Message]:
    with engine.open_store() as store:
        found = []
        for queue_id in store.queue_ids(topic):
            offset = 0
            while (result := store.get_message(topic, queue_id, offset, level="committed")).next_begin_offset > offset:
                found += result.messages
                offset = result.next_begin_offset
    return found


@pytest.fixture
def put(engine, names):
    """put(table, ...): the results, and the messages of the test's topic then."""
    def call(table, refusals="raise", **options):
        with engine.connect(refusals=refusals) as producer:
            results = producer.put_arrow(names[0], table, **options)
        with engine.open_store() as store:
            last = max((result.first_queue_offset + result.count - 1 for result in results if result.count), default=-1)
            store.wait_for_message(names[0], 0, last, timeout_s=10)
        return results, read(engine, names[0])

    return call


def test_bodies_alone_are_one_put_of_all_rows(put):
    [result], messages = put(pa.table({"body": [b"%d" % number for number in range(1000)], "other": range(1000)}))
    assert result.ok and result.count == 1000 and result.first_queue_offset == 0
    assert [message.body for message in messages] == [b"%d" % number for number in range(1000)]
    assert result.end_physical_offset == messages[-1].physical_offset + messages[-1].size_bytes


def test_columns_give_keys_tags_and_properties(put):
    table = pa.table({
        "text": ["one", "two", "drei €"], "id": [["a", "b"], None, ["c"]], "kind": ["paid", None, "sent"], "price": [1.5, None, 3.0],
        "region": pa.array(["eu", "us", None]).dictionary_encode(), "day": [datetime.date(2024, 1, 2)] * 3})
    [result], messages = put(table, body="text", keys="id", tags="kind", properties=["price", "region", "day"])
    assert result.count == 3 and result.end_physical_offset == messages[-1].physical_offset + messages[-1].size_bytes
    assert [(message.body.decode(), message.keys, message.tags) for message in messages] == [
        ("one", "a b", "paid"), ("two", None, None), ("drei €", "c", "sent")]
    assert [{name: message.properties.get(name) for name in ("price", "region", "day")} for message in messages] == [
        {"price": "1.5", "region": "eu", "day": "2024-01-02"}, {"price": None, "region": "us", "day": "2024-01-02"},
        {"price": "3", "region": None, "day": "2024-01-02"}]


def test_a_list_of_keys_without_its_nulls_and_any_text_of_a_dictionary_are_put(put):
    kinds = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.uint32()), pa.array(["paid", "sent"], pa.string_view()))
    table = pa.table({"body": ["x", "y", "z"], "id": [["a", None, "b"], [None], []], "kind": kinds, "code": kinds})
    _, messages = put(table.slice(0, 2), keys="id", tags="kind", properties=["code"])
    assert [(message.body, message.keys, message.tags, message.properties.get("code")) for message in messages] == [
        (b"x", "a b", "sent", "sent"), (b"y", None, None, None)]
    assert put(table.slice(2), body="kind")[1][2].body == b"paid"


def test_a_large_table_is_put_in_pieces_in_order_in_one_queue(put, engine, names, monkeypatch):
    monkeypatch.setattr(outgoing, "PIECE_BYTES", 5000)
    bodies = [b"%d" % number * (number % 50) for number in range(2000)]
    results, messages = put(pa.table({"body": bodies}).to_reader(max_chunksize=300))
    assert len(results) > 5 and sum(result.count for result in results) == 2000 and len({result.queue_id for result in results}) == 1
    assert [message.body for message in messages] == bodies
    with engine.connect() as producer:
        table = pa.table({"body": [b"x"] * 5000 + [bytes(300_000)], "k": ["key"] * 5001})
        results = producer.put_arrow(names[0], table, keys="k", queue_id=0)
    assert len(results) > 3 and sum(result.count for result in results) == 5001


def test_all_pieces_of_a_table_wait_for_one_queue(engine, names, monkeypatch):
    monkeypatch.setattr(outgoing, "PIECE_BYTES", 1)
    TopicConfigs(engine.path).create(TopicConfig(names[0], 4, 4))
    with engine.connect() as producer:
        results = producer.put_arrow(names[0], pa.table({"body": ["a", "b", "c"]}), delay_level=2)
    assert [(result.topic, result.queue_id) for result in results] == [("SCHEDULE_TOPIC_XXXX", 1)] * 3
    messages = eventually(lambda: len(found := read(engine, names[0])) == 3 and found, "all are delivered")
    assert [message.body for message in messages] == [b"a", b"b", b"c"] and len({message.queue_id for message in messages}) == 1


@pytest.mark.parametrize("library", ["polars", "duckdb", "pandas"])
def test_tables_of_other_libraries_are_put(put, library):
    rows = {"body": ["one", "two"], "k": ["a", "b"]}
    if library == "duckdb":
        table = pytest.importorskip("duckdb").sql("SELECT * FROM (VALUES ('one', 'a'), ('two', 'b')) AS t(body, k)")
    else:
        table = pytest.importorskip(library).DataFrame(rows)
    _, messages = put(table, keys="k")
    assert [(message.body, message.keys) for message in messages] == [(b"one", "a"), (b"two", "b")]
    _, messages = put(table)
    assert [message.body for message in messages[2:]] == [b"one", b"two"]


def test_a_batch_or_an_empty_table_is_put(put):
    assert put(pa.table({"body": pa.array([], pa.binary())}))[0] == []
    assert put(pa.record_batch({"body": [b"x"]}))[0][0].count == 1


def test_a_piece_that_is_refused_ends_the_call_and_the_error_says_what_is_stored(put, engine, names, monkeypatch):
    monkeypatch.setattr(outgoing, "PIECE_BYTES", 100)
    table = pa.table({"body": [b"x" * 60, b"y" * 60, bytes(64 << 20), b"z"]})
    with pytest.raises(PutRefusedError, match="row 2: the body has 67108864 bytes, .* are possible") as caught:
        put(table)
    assert caught.value.__notes__ == ["2 rows of the table are stored, those of earlier pieces"]
    results, messages = put(table, refusals="return")
    assert [result.status for result in results] == [PutStatus.PUT_OK, PutStatus.PUT_OK, PutStatus.MESSAGE_ILLEGAL]
    assert len(messages) == 4
    with pytest.raises(PutRefusedError, match="row 1: .*character 0, 1 or 2"):
        put(pa.table({"body": ["x", "y"], "t": ["a", "a\x01b"]}), tags="t")
    assert len(read(engine, names[0])) == 4


@pytest.mark.parametrize(("table", "options", "kind", "says"), [
    ({"body": [b"x"]}, {"body": "bodi"}, UsageError, "no column 'bodi' .did you mean body"),
    ({"body": [b"x", None]}, {}, UsageError, "column 'body' has a null"),
    ({"body": [{"a": 1}]}, {}, UsageError, "column 'body' is struct<a: int64>, not text or bytes"),
    ({"body": pa.array([1]).dictionary_encode()}, {}, UsageError, "column 'body' is dictionary.*, not text or bytes"),
    ({"body": [1]}, {}, UsageError, "column 'body' is int64, not text or bytes"),
    ({"body": [b"x"], "k": [{"a": 1}]}, {"keys": "k"}, UsageError, "column 'k' is struct"),
    ({"body": [b"x"]}, {"properties": "body"}, TypeError, "properties"),
    ({"body": [b"x"]}, {"key": "body"}, TypeError, "key"),
])
def test_wrong_tables_and_arguments_put_nothing(put, engine, names, table, options, kind, says):
    with pytest.raises(kind, match=says):
        put(pa.table(table), **options)
    with pytest.raises(TypeError, match="table must be a table of pyarrow, Polars, DuckDB or pandas"):
        put([{"body": b"x"}])
    assert read(engine, names[0]) == []
