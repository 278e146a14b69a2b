"""The stream inside Spark: batches of any size end in the same rows, once each, also when a query is started again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fix_spark import spark_version
from fix_store_builder import StoreBuilder
from pyengine.errors import UsageError
from spark.logs import rows
from waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.java]

HAS_BOUNDS = spark_version() >= (4, 2)  # of a batch
COLUMNS = "topic,partition,offset,physicalOffset,value,timestamp"
PLAIN = "topic, partition, offset, physicalOffset, cast(value AS STRING) AS value"


def stream(spark, root: Path, **options: object):
    return spark.readStream.format("pyengine").options(columns=COLUMNS, **options).load(str(root))


def write(df, folder: Path, **trigger):
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start(str(folder / "out"))


def all_there_is(df, folder: Path) -> int:
    """Run a query over what there is now; how many batches with rows it took."""
    query = write(df, folder, availableNow=True)
    assert query.awaitTermination(120)
    return sum(progress["numInputRows"] > 0 for progress in query.recentProgress)


def read_back(spark, folder: Path) -> list[tuple]:
    return sorted(map(tuple, spark.read.parquet(str(folder / "out")).selectExpr(PLAIN.split(", ")).collect()),
                  key=lambda row: row[3])


def put(builder: StoreBuilder, count: int) -> None:
    for number in range(count):
        builder.put("AB"[number % 2], b"%06d" % number * 20, queue_id=number % 3 // 2)


def wanted(root: Path) -> list[tuple]:
    return [(*row[:4], row[4].decode()) for row in rows(root, columns=COLUMNS)]


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    put(made, 60)
    return made


@pytest.mark.ci
def test_the_whole_log_in_bounded_batches_and_on_from_the_checkpoint(spark, builder, tmp_path):
    df = stream(spark, builder.root, startingOffsets="earliest", maxBytesPerTrigger="4k")
    assert df.isStreaming
    assert all_there_is(df, tmp_path) > (2 if HAS_BOUNDS else 0)
    assert read_back(spark, tmp_path) == wanted(builder.root)
    put(builder, 17)
    again = stream(spark, builder.root, startingOffsets="earliest", maxOffsetsPerTrigger="9")
    assert all_there_is(again, tmp_path) == (2 if HAS_BOUNDS else 1)
    assert read_back(spark, tmp_path) == wanted(builder.root) and len(wanted(builder.root)) == 77
    assert all_there_is(again, tmp_path) == 0


@pytest.mark.ci
def test_topics_by_the_offsets_of_their_queues(spark, builder, tmp_path):
    df = stream(spark, builder.root, subscribePattern="[AB]", startingOffsets='{"A": {"0": 4}}', maxOffsetsPerTrigger="30")
    assert all_there_is(df, tmp_path) >= (2 if HAS_BOUNDS else 1)
    start = {row[3] for row in wanted(builder.root) if row[:2] == ("A", 0) and row[2] < 4}
    assert len(start) == 4
    assert read_back(spark, tmp_path) == [row for row in wanted(builder.root) if row[3] not in start]


@pytest.mark.ci
def test_a_running_query_reads_messages_put_while_it_runs(spark, tmp_path):
    import pyengine

    sizes = {"mapped_file_size_commit_log_bytes": 1 << 20, "mapped_file_size_consume_queue_bytes": 60_000,
             "max_hash_slot_num": 1000, "max_index_num": 4000}
    store = tmp_path / "store"
    with pyengine.Engine(store, **sizes) as engine, engine.connect() as producer, contextlib.ExitStack() as stack:
        assert producer.put("T", b"before").ok
        queries = {}
        for name, options in (("log", {}), ("queues", {"subscribe": "T"})):
            df = stream(spark, store, startingOffsets="earliest", readLevel="committed", **options)
            queries[name] = write(df, tmp_path / name, processingTime="0 seconds")
            stack.callback(queries[name].stop)
        for number in range(3):
            assert producer.put_many("T", [b"%d-%d" % (number, n) for n in range(500)]).ok
            done = 1 + 500 * (number + 1)
            for query in queries.values():
                eventually(lambda: query.exception() is not None or sum(p["numInputRows"] for p in query.recentProgress) >= done,
                           "the stream has come there", timeout_s=120)
                assert query.exception() is None
    for name in queries:
        found = read_back(spark, tmp_path / name)
        assert [row[2] for row in found] == list(range(1501))
        assert found == wanted(store)


class Told:
    """A query whose progress says that its batches had these offsets and rows."""

    def __init__(self, *batches: tuple[object, object, object, int]) -> None:
        self.recentProgress = [
            SimpleNamespace(json=json.dumps({"batchId": number, "timestamp": "2026-01-01T00:00:00.000Z", "sources": [
                {"startOffset": start, "endOffset": end, "latestOffset": latest, "numInputRows": count}]}))
            for number, (start, end, latest, count) in enumerate(batches)]


def test_rows_bytes_and_lag_of_each_batch_are_told(builder):
    from pyengine.spark import source_metrics

    sizes = {row[:3]: row[3] for row in rows(builder.root, columns="topic,partition,offset,size")}
    first, second, latest = {"A": {"0": 4}}, {"A": {"0": 9, "1": 2}}, {"A": {"0": 20, "1": 10}, "B": {"0": 20, "1": 10}}

    def size_of(topic, queue_id, begin, end):
        return sum(sizes[topic, queue_id, offset] for offset in range(begin, end))

    waiting = size_of("A", 0, 9, 20) + size_of("A", 1, 2, 10) + size_of("B", 0, 0, 20) + size_of("B", 1, 0, 10)
    told = source_metrics(Told((None, first, None, 4), (json.dumps(first), json.dumps(second), json.dumps(latest), 7)), builder.root)
    assert [(one.batch_id, one.rows, one.bytes, one.lag_messages, one.lag_bytes) for one in told] == [
        (0, 4, None, None, None), (1, 7, size_of("A", 0, 4, 9) + size_of("A", 1, 0, 2), 11 + 8 + 20 + 10, waiting)]
    odd = {"physicalOffset": {"0": 0}}  # a topic of that name
    assert source_metrics(Told((odd, odd, odd, 0)), builder.root)[0].lag_messages == 0
    log = source_metrics(Told(({"physicalOffset": 5}, {"physicalOffset": 105}, {"physicalOffset": 1105}, 2)), builder.root)
    assert (log[0].bytes, log[0].lag_messages, log[0].lag_bytes) == (100, None, 1000)
    with pytest.raises(UsageError, match="has 1 sources, number 1 is none of them"):
        source_metrics(Told((None, first, None, 4)), builder.root, source=1)


def test_metrics_of_a_query_count_rows_read_and_rows_waiting(spark, builder, tmp_path):
    from pyengine.spark import source_metrics

    df = stream(spark, builder.root, subscribe="A,B", startingOffsets="earliest", maxOffsetsPerTrigger="25")
    query = df.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    told = source_metrics(query, builder.root)
    assert sum(one.rows for one in told) == 60
    if HAS_BOUNDS:
        assert told[0].lag_messages == 60 - told[0].rows and told[-1].lag_messages == told[-1].lag_bytes == 0
        total = sum(row[0] for row in rows(builder.root, columns="size"))
        assert sum(one.bytes for one in told[1:]) == told[0].lag_bytes and 0 < told[0].lag_bytes < total


@pytest.mark.ci
def test_an_error_ends_the_query_with_its_sentence(spark, builder, tmp_path):
    with pytest.raises(Exception, match="a stream has no end"):
        all_there_is(stream(spark, builder.root, endingTimestamp="5"), tmp_path / "other")
    assert all_there_is(stream(spark, builder.root, startingOffsets="earliest"), tmp_path) == 1
    before = read_back(spark, tmp_path)
    put(builder, 60)
    for segment in sorted((builder.root / "commitlog").iterdir())[:-1]:
        segment.unlink()
    with pytest.raises(Exception, match="the log begins at .* now, the stream had read up to .*; set failOnDataLoss=false"):
        all_there_is(stream(spark, builder.root), tmp_path)
    assert all_there_is(stream(spark, builder.root, failOnDataLoss="false"), tmp_path) == 1
    assert read_back(spark, tmp_path) == before + wanted(builder.root) and 0 < len(wanted(builder.root)) < 60
