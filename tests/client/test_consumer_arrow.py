"""`Consumer.pull_arrow`: the messages of a pull as rows of an Arrow table."""

from __future__ import annotations

import zlib

import pytest

import pyengine
from fix_client import leave_unfinished
from fix_failpoints import Interrupted
from fix_store_builder import StoreBuilder
from pyengine.errors import CorruptionError, UsageError
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

pa = pytest.importorskip("pyarrow")
from pyengine.storage.arrow import schema  # noqa: E402

COLUMNS = ["queueId", "queueOffset", "body"]


@pytest.fixture
def builder(tmp_path, rng) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    for number in range(120):
        made.put("orders" if number % 4 else "events", b"%d" % number, queue_id=rng.randrange(3), tags=rng.choice(["paid", "sent"]))
    return made


def consume(builder: StoreBuilder, **options) -> pyengine.Consumer:
    return pyengine.consume(builder.root, "orders", **{"group": "billing"} | options)


def rows(table) -> list[tuple]:
    return [tuple(row.values()) for row in table.select(COLUMNS).to_pylist()]


def committed(builder: StoreBuilder) -> dict[int, int]:
    return {queue_id: offset for queue_id, offset in ConsumerOffsets(builder.root).read("orders", "billing").items() if offset}


@pytest.mark.parametrize("choice", [{}, {"tags": "paid"}, {"queues": [0, 2]}], ids=["all", "tags", "queues"])
@pytest.mark.parametrize("max_rows", [1, 7, 1000])
def test_the_rows_are_those_of_a_scan_in_the_order_of_their_queues(builder, choice, max_rows):
    tables = []
    with consume(builder, **choice) as consumer:
        while (table := consumer.pull_arrow(max_rows, timeout_s=0)).num_rows:
            assert table.num_rows <= max_rows
            tables.append(table)
        assert table.schema == schema()
    found = pa.concat_tables(tables)
    with pyengine.open_store(builder.root) as store:
        assert sorted(rows(found)) == sorted(rows(store.to_arrow(["orders"], **choice).read_all()))
    for queue_id in range(3):
        offsets = [offset for each, offset, _ in rows(found) if each == queue_id]
        assert offsets == sorted(offsets)


def test_rows_are_done_as_the_messages_of_a_pull_are(builder):
    first, second = consume(builder, auto_commit=False), None
    try:
        wanted = rows(first.pull_arrow(1000, columns=COLUMNS))
        first.close()
        assert not committed(builder)
        second = consume(builder)
        half = rows(second.pull_arrow(40, columns=COLUMNS))
        assert not committed(builder)
        second.commit()
        assert sum(committed(builder).values()) == 40
        rest = rows(second.pull_arrow(1000, columns=COLUMNS))
        assert sorted(half + rest) == sorted(wanted)
        leave_unfinished(second)  # as by a kill: the rows of the last pull are not done
    finally:
        first.close()
        if second is not None:
            second.close()
    with consume(builder) as third:
        again = []
        while (table := third.pull_arrow(1000, columns=COLUMNS, timeout_s=0)).num_rows:  # one by one: they were delivered twice
            again += rows(table)
        assert sorted(again) == sorted(rest)


def test_bodies_are_decompressed_if_asked_and_an_error_delivers_its_rows_again(builder):
    text = b"as the producer had it " * 20
    builder.put("orders", zlib.compress(text), sys_flag=1)
    with consume(builder) as consumer:
        got = consumer.pull_arrow(1000, columns=["body"], decompress=True)
        assert got["body"].to_pylist().count(text) == 1
        consumer.commit()
        done = committed(builder)
        builder.put("orders", b"fine")
        builder.put("orders", b"no stream", sys_flag=1, queue_id=2)
        for _ in range(3):
            with pytest.raises(CorruptionError, match="cannot be decompressed"):
                consumer.pull_arrow(columns=["body"], decompress=True)
        assert consumer.commit() == done
        assert sorted(consumer.pull_arrow(columns=["body"])["body"].to_pylist()) == [b"fine", b"no stream"]
        assert sum(consumer.commit().values()) == sum(done.values()) + 2


def test_an_error_delivers_again_what_was_given_back_and_nothing_that_is_done(builder):
    for number in range(6):
        builder.put("packed", b"%d" % number, sys_flag=1)  # no stream
    with pyengine.consume(builder.root, "packed", group="billing", auto_commit=False) as consumer:
        found = consumer.pull(5)
        consumer.ack([found[1], found[3]])
        consumer.requeue([found[0], found[2]])
        for max_rows in (1, 2, 3, 3):
            with pytest.raises(CorruptionError, match="cannot be decompressed"):
                consumer.pull_arrow(max_rows, decompress=True)
        assert [(each.body, each.delivery_count) for each in consumer.pull(6)] == [(b"0", 2), (b"2", 2), (b"5", 1)]
        consumer.ack(found)
        assert consumer.commit(found[-1]) == {0: 5}


@pytest.mark.parametrize("options", [{}, {"sharing": "messages"}, {"group": None, "from_": "first"}], ids=str)
@pytest.mark.parametrize("topics", ["orders", ["orders", "events"]], ids=str)
def test_a_signal_handler_that_raises_at_the_end_of_the_call_loses_no_row(builder, options, topics):
    with pyengine.consume(builder.root, topics, **{"group": "billing"} | options) as consumer:
        block, depth, got = consumer._pulling, 0, []

        class Interrupting:
            def __enter__(self):
                nonlocal depth
                block.__enter__()
                depth += 1

            def __exit__(self, *given):
                nonlocal depth
                block.__exit__(*given)
                depth -= 1
                if not depth:
                    raise Interrupted

        consumer._pulling = Interrupting()
        with pytest.raises(Interrupted):
            consumer.pull_arrow(40)
        consumer._pulling = block
        expected = 90 if topics == "orders" else 120
        eventually(lambda: got.extend(consumer.pull_arrow(1000)["body"].to_pylist()) or len(got) >= expected, "the rows")
        assert len(set(got)) == len(got) == expected


def test_messages_of_a_segment_that_is_deleted_meanwhile_count_as_missed(builder, monkeypatch):
    with consume(builder) as consumer:
        wait = consumer._next_or_wait
        segment = builder.segment(0)
        monkeypatch.setattr(consumer, "_next_or_wait", lambda *arguments: (wait(*arguments), segment.unlink(missing_ok=True))[0])
        table = consumer.pull_arrow(1000, columns=["physicalOffset"])
        assert min(table["physicalOffset"].to_pylist()) >= 4096
        assert consumer.missed == 90 - table.num_rows > 0 and "were removed" in consumer.notes[-1]


def test_wrong_arguments_deliver_nothing(builder):
    with consume(builder) as consumer:
        for arguments, says in (({"columns": ["bodi"]}, "unknown column 'bodi'"), ({"max_rows": 0}, "ask for at least one")):
            with pytest.raises(UsageError, match=says):
                consumer.pull_arrow(**arguments)
        assert consumer.pull_arrow(1000).num_rows == 90


def test_retried_messages_are_rows_of_the_retry_topic(undelayed, names):
    topic, group = names
    with undelayed.connect() as producer:
        producer.put(topic, b"again")
    with pyengine.consume(undelayed.path, topic, group=group, from_="first") as consumer:
        consumer.retry(consumer.pull(1, timeout_s=scaled_timeout_s(30))[0], 1)
        table = consumer.pull_arrow(timeout_s=scaled_timeout_s(30), columns=["topic", "body"])
        assert table.to_pylist() == [{"topic": f"%RETRY%{group}", "body": b"again"}]
