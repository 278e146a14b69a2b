"""Stores and exports on a server that speaks S3: the rows are those of a local store, and a killed export loses and doubles none."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow
import pytest
from pyarrow import dataset

from fix_cli import run
from fix_golden import CLEAN, usual
from fix_store_builder import StoreBuilder
from pyengine.errors import DiskError, UsageError
from pyengine.spark.export import STATE, SUCCESS, export_parquet
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from spark.logs import DAMAGED_END, rows, stream_reader, streamed, to_the_end, view_of
from waiting import eventually

pytestmark = pytest.mark.s3

WHOLE = tuple(name for name in CLEAN if name not in DAMAGED_END)
USUAL = ("tx", "cleaned")
DAY_MS = 86_400_000


def put(builder: StoreBuilder, count: int) -> None:
    """Messages of three topics over two days."""
    for number in range(count):
        builder.put(("orders", "events", "a%b")[number % 3], b"%05d" % number * 10, queue_id=number % 2)
        builder.now_ms += 2 * DAY_MS // count - 1000  # put itself adds a second
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    put(made, 60)
    return made


@pytest.mark.ci
@pytest.mark.parametrize("recipe", usual(WHOLE, USUAL))
def test_a_golden_store_reads_as_it_does_locally(golden, bucket, recipe):
    root = golden(recipe).root
    bucket.upload(root, "store")
    far = f"s3://{bucket.name}/store"
    queues = {"columns": "*", "subscribePattern": ".*", "allowMissing": True}
    for given in ({"columns": "*"}, {**queues, "access": "queue"}, {**queues, "access": "scan", "maxPartitionBytes": 9000}):
        assert sorted(rows(far, **given), key=repr) == sorted(rows(root, **given), key=repr)
    for view, more in (("queue", {"group": "billing", "allowMissing": True}), ("entries", {})):
        assert view_of(far, view, **more) == view_of(root, view, **more)
    for given in ({"columns": "*"}, queues) if any((root / "consumequeue").glob("*/*/*")) else ({"columns": "*"},):
        unbounded = {**given, "maxOffsetsPerTrigger": 1_000_000}
        assert sorted(streamed(far, **unbounded), key=repr) == sorted(streamed(root, **unbounded), key=repr)


@pytest.mark.ci
def test_a_stream_follows_a_copy_in_a_bucket(bucket, builder, monkeypatch):
    from pyengine.spark import remote_store

    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    bucket.upload(builder.root, "store")
    reader = stream_reader(f"s3a://{bucket.name}/store", subscribe="orders,events", columns="topic,offset,value", maxOffsetsPerTrigger=1000)
    found, at = to_the_end(reader, reader.initialOffset())
    for _ in range(3):  # within the second in which S3 tells times
        put(builder, 30)
        bucket.upload(builder.root, "store")
        more, at = to_the_end(reader, at)
        assert len(more) == 20
        found += more
    reader.stop()
    assert sorted(found) == sorted(rows(builder.root, subscribe="orders,events", columns="topic,offset,value"))


def test_keys_in_a_uri_are_in_no_message(bucket, builder):
    bucket.upload(builder.root, "store")
    for given in ({"subscribe": "nosuch"}, {"startingPhysicalOffset": 10**9}):
        with pytest.raises(Exception, match=f"s3://{bucket.name}/store has no topic|startingPhysicalOffset") as told:
            rows(bucket.uri("store"), **given)
        assert "of-this-project" not in str(told.value)


# -- exports -------------------------------------------------------------------------

COLUMNS = "physicalOffset,topic,offset,value"


def exported(bucket, folder: str) -> list[tuple]:
    """All rows of the Parquet files there, as a reader of a folder sees it."""
    found = dataset.dataset(f"{bucket.name}/{folder}", filesystem=bucket.system, format="parquet",
                            partitioning=dataset.partitioning(pyarrow.schema([("topic", pyarrow.string()), ("date", pyarrow.string())]),
                                                              flavor="hive"))
    return sorted((row["physicalOffset"], row["topic"], row["offset"], row["value"]) for row in found.to_table().to_pylist())


def wanted(root: Path) -> list[tuple]:
    return sorted(rows(root, columns=COLUMNS))


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_an_incremental_export_from_a_bucket_into_a_bucket_has_every_row_once(spark, bucket, builder):
    bucket.upload(builder.root, "store")
    given = {"incremental": True, "partitioned": True, "columns": COLUMNS, "maxPartitionBytes": 4096}
    source, dest = bucket.uri("store"), bucket.uri("lake/all")
    done = export_parquet(spark, source, dest, **given)
    assert (done.messages, done.dest) == (60, f"s3://{bucket.name}/lake/all")
    assert exported(bucket, "lake/all") == wanted(builder.root)
    before = bucket.read(f"lake/all/{STATE}")
    put(builder, 31)
    bucket.upload(builder.root, "store")
    assert export_parquet(spark, source, dest, **given).messages == 31
    assert exported(bucket, "lake/all") == wanted(builder.root)
    # As if the run had been killed before it noted its end, one object being half way to its name:
    bucket.write(f"lake/all/{STATE}", before)
    bucket.system.delete_file(f"{bucket.name}/lake/all/{SUCCESS}")
    bucket.write("lake/all/topic=orders/.part-00000000000000000000.parquet.run.1", b"half")
    assert export_parquet(spark, source, dest, **given).messages == 31
    assert exported(bucket, "lake/all") == wanted(builder.root)
    assert not [name for name in bucket.objects("lake/all") if "/.part-" in name] and SUCCESS in bucket.objects("lake/all")
    with pytest.raises(UsageError, match="columns was 'physicalOffset,offset,value', is 'offset'"):
        export_parquet(spark, source, dest, **{**given, "columns": "offset"})
    with pytest.raises(UsageError, match=f"s3://{bucket.name}/lake/all is not empty"):
        export_parquet(spark, builder.root, dest)
    assert export_parquet(spark, builder.root, dest, ["orders"], overwrite=True, columns="offset").messages == 31
    assert sorted(bucket.objects("lake/all")) == [SUCCESS, "part-00000.parquet"]
    bucket.write("lake/all/notes.txt", b"mine")
    with pytest.raises(UsageError, match="holds notes.txt, which no export wrote"):
        export_parquet(spark, builder.root, dest, overwrite=True)
    assert export_parquet(spark, builder.root, bucket.uri("empty"), ["orders"], endingTimestamp=1, columns="offset").messages == 0
    assert sorted(bucket.objects("empty")) == [SUCCESS, "part-00000.parquet"]


def test_an_export_to_an_absent_bucket_fails_before_a_task_runs(bucket, builder):
    spark = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
    for incremental in (False, True):
        with pytest.raises(DiskError, match="cannot write s3://no-such-bucket/x/._SUCCESS: .*NO_SUCH_BUCKET") as told:
            export_parquet(spark, builder.root, bucket.uri("x").replace(bucket.name, "no-such-bucket"), incremental=incremental)
        assert "of-this-project" not in str(told.value)


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_spark_reads_streams_and_counts_a_store_in_a_bucket(spark, bucket, builder, tmp_path):
    from pyengine.spark import source_metrics, stats

    bucket.upload(builder.root, "store")
    far = bucket.uri("store")
    for given in ({}, {"subscribe": "orders", "access": "queue"}):
        frame = spark.read.format("pyengine").options(columns=COLUMNS, **given).load(far)
        assert sorted((*row[:3], bytes(row[3])) for row in frame.collect()) == sorted(rows(builder.root, columns=COLUMNS, **given))
    counted = spark.read.format("pyengine").option("view", "queue").load(far)
    assert counted.selectExpr("sum(messages)").first()[0] == 60
    assert sorted(map(tuple, stats(spark, far).collect())) == sorted(map(tuple, stats(spark, builder.root).collect()))
    stream = spark.readStream.format("pyengine").options(subscribe="orders,events", columns=COLUMNS, startingOffsets="earliest").load(far)
    query = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True).start(str(tmp_path / "rows"))
    assert query.awaitTermination(120)
    found = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted((*row[:3], bytes(row[3])) for row in found) == sorted(rows(builder.root, columns=COLUMNS, subscribe="orders,events"))
    assert source_metrics(query, far)[0].rows == 40


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_the_commands_read_and_write_buckets(spark, bucket, builder):
    done = run("export", builder.root, bucket.uri("all"), "--columns", COLUMNS, "--json")
    assert (done.code, done.document["messages"], done.document["dest"]) == (0, 60, f"s3://{bucket.name}/all"), done.stderr
    assert exported(bucket, "all") == wanted(builder.root)
    bucket.upload(builder.root, "store")
    counted = run("stats", bucket.uri("store"), "--by", "topic", "--json")
    assert (counted.code, counted.document["messages"]) == (0, 60), counted.stderr


# Arguments: store, destination.
PROGRAM = """
import sys
from pyengine.spark import export_parquet, session
spark = session("export", cores=2)
columns = "physicalOffset,topic,offset,value"
done = export_parquet(spark, sys.argv[1], sys.argv[2], incremental=True, columns=columns, maxPartitionBytes=4096)
print(done.messages)
"""


def driver(builder: StoreBuilder, dest: str) -> psutil.Popen:
    return psutil.Popen([sys.executable, "-c", PROGRAM, str(builder.root), dest], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["driver", pytest.param("all", marks=pytest.mark.long)])
def test_an_export_that_is_killed_half_way_and_run_again_has_every_row_once(bucket, builder, killed, rng):
    """The driver alone: its JVM and the tasks may go on for a while beside the next run."""
    put(builder, 600)
    dest, parts = f"s3://{bucket.name}/lake", rng.randint(1, 12)
    first = driver(builder, dest)
    tree = [first]
    try:
        eventually(lambda: len(bucket.objects("lake")) > parts or first.poll() is not None, "files are written", timeout_s=240)
        assert first.poll() is None, first.communicate()[1][-4000:]
        tree += first.children(recursive=True)
        for process in tree if killed == "all" else [first]:
            process.kill()
        assert SUCCESS not in bucket.objects("lake") and json.loads(bucket.read(f"lake/{STATE}"))["end"] is None
        again = driver(builder, dest)
        tree.append(again)
        shown, complaints = again.communicate(timeout=600)
        assert again.returncode == 0, complaints[-4000:]
        assert int(shown) == 660 and exported(bucket, "lake") == wanted(builder.root)
        psutil.wait_procs(tree, timeout=120)
        assert exported(bucket, "lake") == wanted(builder.root), "nothing of the killed run comes later"
    finally:
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        first.communicate()
