"""Every way to read a store gives the same messages: RocketMQ's own reading, the pure-Python parser, the C scanner's Arrow
batches, the tasks of a Spark read (by ranges, by queues, over a file system), streams, and Spark itself."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

import pyarrow
import pytest

import pyengine
from fix_golden import CLEAN, HALTED, GoldenStore, unpack, usual
from pyengine.errors import EngineError
from spark import oracle
from spark.logs import DAMAGED_END, allowing, rows, streamed

# RocketMQ's names, which are the scanner's too, and those of the documents that the real store made.
FIELDS = {
    "topic": "topic", "queueId": "queueId", "queueOffset": "queueOffset", "physicalOffset": "phy", "size": "size",
    "body": "bodySha", "properties": "props", "storeTimestamp": "storeTs", "bornTimestamp": "born", "flag": "flag",
    "sysFlag": "sysFlag", "bodyCRC": "crc", "reconsumeTimes": "reconsume", "preparedTransactionOffset": "prepared",
    "bornHost": "bornHost", "storeHost": "storeHost",
}
NAMES = list(FIELDS)
OF_LOG = {"columns": ",".join(NAMES)}
OF_QUEUES = {**OF_LOG, "subscribePattern": ".*"}
WHOLE = tuple(name for name in CLEAN if name not in DAMAGED_END)
BODY = NAMES.index("body")
TIMES = [NAMES.index(name) for name in ("storeTimestamp", "bornTimestamp")]
HOSTS = [NAMES.index(name) for name in ("bornHost", "storeHost")]

Rows = list[tuple]


def plain(found: list[tuple]) -> Rows:
    """Rows in the log's order, bodies as their hash, times as milliseconds: as the real store's document has them."""
    made = []
    for row in found:
        values = list(row)
        values[BODY] = sha256(values[BODY]).hexdigest()
        for at in TIMES:
            values[at] = (values[at] - oracle.EPOCH) // oracle.timedelta(milliseconds=1)
        made.append(with_plain_hosts(values))
    return sorted(made, key=lambda row: row[NAMES.index("physicalOffset")])


def with_plain_hosts(values: list) -> tuple:
    """Addresses as numbers: Java does not shorten those of IPv6."""
    for at in HOSTS:
        address, _, port = values[at].rpartition(":")
        values[at] = int(ip_address(address.strip("[]"))), int(port)
    return tuple(values)


def of_rocketmq(store: GoldenStore) -> Rows:
    """The log as the real store walks it."""
    return [with_plain_hosts([record[theirs] for theirs in FIELDS.values()]) for record in store.verify["records"]
            if "topic" in record]


def offsets_of_rocketmqs_queues(store: GoldenStore) -> list[tuple]:
    """(topic, queue, offset, where) of every message that the real store gets through its own queues."""
    return sorted((m["topic"], m["queueId"], m["queueOffset"], m["phy"]) for m in store.verify["messages"]
                  if "phy" in m and m.get("queue", m["topic"]) == m["topic"])


def of_arrow(root: Path) -> Iterator[Rows]:
    """By `scan`, and by the Arrow stream."""
    with pyengine.open_store(root) as store:
        stream = store.to_arrow(columns=NAMES, level="committed")
        scanned = list(store.scan(columns=NAMES, level="committed"))
        for table in (pyarrow.Table.from_batches(scanned, schema=stream.schema), stream.read_all()):
            yield plain(list(zip(*(column.to_pylist() for column in table.columns))))


@pytest.mark.parametrize("recipe", usual(WHOLE, ("tx", "delay", "cleaned")))
def test_every_read_path_returns_the_messages_that_rocketmq_reads(golden, recipe):
    store = golden(recipe)
    root = store.root
    wanted = of_rocketmq(store)
    assert wanted or recipe == "empty"
    assert plain(oracle.rows(oracle.log_messages(root), NAMES)) == wanted
    for found in of_arrow(root):
        assert found == wanted
    for given in ({}, {"maxPartitionBytes": 3000}, {"fileSystem": "arrow", "maxPartitionBytes": 9000}):
        assert plain(rows(root, **OF_LOG, **given)) == wanted
    assert plain(streamed(root, **OF_LOG)) == wanted
    queued = [row for row in wanted if (row[0], row[1], row[2], row[3]) in set(offsets_of_rocketmqs_queues(store))]
    assert [row[:4] for row in sorted(queued)] == offsets_of_rocketmqs_queues(store)
    for given in ({"access": "queue"}, {"access": "queue", "maxPartitionBytes": 2000}, {"access": "scan"}):
        assert plain(rows(root, **OF_QUEUES, **given)) == queued
    assert plain(streamed(root, **OF_QUEUES)) == queued


@pytest.mark.parametrize("recipe", usual(HALTED, ("abnormal-garbled",)))
def test_every_read_path_returns_the_same_messages_after_a_crash(golden, recipe):
    store = golden(recipe)
    try:
        wanted = plain(oracle.rows(oracle.log_messages(store.root), NAMES))
    except EngineError as error:
        with pytest.raises(type(error)):
            rows(store.root, **OF_LOG)
        return
    assert wanted
    for found in of_arrow(store.root):
        assert found == wanted
    for given in ({}, {"maxPartitionBytes": 3000}, {"fileSystem": "arrow", "maxPartitionBytes": 9000}):
        assert plain(rows(store.root, readLevel="committed", **OF_LOG, **given, **allowing(recipe))) == wanted
    assert plain(streamed(store.root, readLevel="committed", **OF_LOG, **allowing(recipe))) == wanted


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
@pytest.mark.parametrize("recipe", usual(WHOLE, ("tx",)))
def test_spark_itself_gives_it_too(spark, tmp_path, recipe, request):
    store = GoldenStore(recipe, unpack(recipe, tmp_path))
    wanted, queues = of_rocketmq(store), offsets_of_rocketmqs_queues(store)
    queued = [row for row in wanted if row[:4] in set(queues)]
    made = spark.read.format("pyengine")
    for given, expected in ((OF_LOG, wanted), ({**OF_QUEUES, "access": "queue"}, queued)):
        for most in ("256m", "9000") if request.config.run_long else ("9000",):
            assert collected(made.options(**given, maxPartitionBytes=most).load(str(store.root))) == expected
        if given is OF_LOG and not request.config.run_long:
            continue  # test_stream.py streams a log
        place = tmp_path / f"stream-{len(given)}"
        stream = spark.readStream.format("pyengine").options(**{**given, "startingOffsets": "earliest"}).load(str(store.root))
        stream.writeStream.format("parquet").option("checkpointLocation", str(place / "state")).trigger(
            availableNow=True).start(str(place / "rows")).awaitTermination()
        assert collected(spark.read.schema(stream.schema).parquet(str(place / "rows"))) == expected
    entries = spark.read.format("pyengine").options(view="entries").load(str(store.root))
    found = sorted(tuple(row) for row in entries.select("topic", "partition", "offset", "physicalOffset").collect())
    assert [row for row in found if row in set(queues)] == queues


def collected(df) -> Rows:
    """The rows of a DataFrame of NAMES; its times are taken as numbers, free of this process's zone."""
    from pyspark.sql import functions as f

    times = {NAMES[at]: f.unix_millis(NAMES[at]) for at in TIMES}
    found = [[*row] for row in df.withColumns(times).select(*NAMES).collect()]
    for row in found:
        for at in TIMES:
            row[at] = oracle.EPOCH + oracle.timedelta(milliseconds=row[at])
    return plain([tuple(row) for row in found])
