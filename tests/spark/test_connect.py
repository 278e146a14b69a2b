"""Reads, streams and writes through Spark Connect, whose client has no JVM of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fix_cli import environment
from fix_store_builder import StoreBuilder
from spark.test_sink import bodies

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.connect, pytest.mark.timeout(600)]

# Arguments: the store to read, the store to write, a folder.
PROGRAM = """
import sys
from pyspark.sql import SparkSession
from pyengine.spark import source_metrics
source, sink, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
log = spark.read.format("pyengine").load(source)
print(log.count(), log.where("topic = 'A'").agg({"size": "sum"}).collect()[0][0])
print(spark.read.format("pyengine").option("view", "queue").load(source).agg({"messages": "sum"}).collect()[0][0])
stream = spark.readStream.format("pyengine").options(subscribe="A", startingOffsets="earliest", columns="topic,value").load(source)
query = stream.writeStream.format("pyengine").option("checkpointLocation", folder).trigger(availableNow=True).start(sink)
query.awaitTermination()
print(sum(one.rows for one in source_metrics(query, source)), source_metrics(query, source)[-1].lag_messages)
spark.range(3).selectExpr("'B' AS topic", "cast(id AS STRING) AS value").write.format("pyengine").mode("append").save(sink)
spark.stop()
"""


def test_a_remote_session_reads_streams_and_writes(sink_store, tmp_path):
    builder = StoreBuilder(tmp_path / "source")
    sizes = [builder.put("AB"[number % 2], b"%d" % number).size_bytes for number in range(40)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, builder.root, sink_store, tmp_path / "checkpoint"],
                          env=environment(PYSPARK_PYTHON=sys.executable), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["40", str(sum(sizes[::2])), "40", "20", "0"]
    assert bodies(sink_store, "A") == {b"%d" % number: 1 for number in range(0, 40, 2)}
    assert bodies(sink_store, "B") == {b"0": 1, b"1": 1, b"2": 1}
