"""The data source inside Spark: found by itself, the same rows as the Python parser, errors that say what to change."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from damage import flip
from fix_golden import unpack, usual
from fix_store_builder import SMALL, StoreBuilder
from pyengine.formats.paths import StorePaths
from pyengine.spark.schema import all_names
from pyengine.storage.consumer_offset import ConsumerOffsets
from spark import oracle
from spark.logs import SEGMENT_BYTES, write_log
from waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.java]

DOCS = Path(__file__).parents[2] / "docs" / "spark.md"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return unpack("roll", tmp_path_factory.mktemp("spark"))


def load(spark, root: Path, **options: object):
    return spark.read.format("pyengine").options(**options).load(str(root))


def test_every_column_of_every_row_in_any_number_of_tasks(spark, root):
    messages = oracle.log_messages(root)
    names = [*all_names(), "property.WAIT"]
    wanted = oracle.rows(messages, names)
    for most in ("256m", "20000"):
        df = load(spark, root, columns=",".join(names), maxPartitionBytes=most)
        found = [tuple(row) for row in df.sort("physicalOffset").collect()]
        plain = [tuple(bytes(v) if isinstance(v, bytearray) else v.astimezone(oracle.EPOCH.tzinfo) if hasattr(v, "astimezone")
                       else v
                       for v in row) for row in found]
        assert plain == wanted
        assert df.rdd.getNumPartitions() > 1 or most == "256m"


def test_aggregates_filters_and_sql_agree_with_the_parser(spark, root):
    messages = oracle.log_messages(root)
    counted = {(row["topic"], row["partition"]): row["count"]
               for row in load(spark, root).groupBy("topic", "partition").count().collect()}
    wanted: dict[tuple[str, int], int] = {}
    for message in messages:
        wanted[message.topic, message.queue_id] = wanted.get((message.topic, message.queue_id), 0) + 1
    assert counted == wanted
    chosen = load(spark, root, subscribe="Roll1", includeBody="false")
    assert "value" not in chosen.columns and chosen.count() == sum(m.topic == "Roll1" for m in messages)
    df = load(spark, root)
    assert df.where("topic = 'Roll1'").count() == chosen.count() and df.count() == len(messages)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW log USING pyengine OPTIONS (path '{root}', columns 'topic,size')")
    assert spark.sql("SELECT sum(size) FROM log").first()[0] == sum(m.size_bytes for m in messages)


def test_headers_come_as_kafkas_source_gives_them(spark, root):
    df = load(spark, root, schemaMode="kafka", includeHeaders="true", maxPartitionBytes=50_000)
    assert df.dtypes[-1] == ("headers", "array<struct<key:string,value:binary>>")
    found = df.selectExpr("topic", "partition", "offset", "headers").sort("topic", "partition", "offset").collect()
    wanted = sorted(oracle.rows(oracle.log_messages(root), ["topic", "partition", "offset", "headers"]), key=lambda row: row[:3])
    assert [(*row[:3], row[3] and [pair.asDict() for pair in row[3]]) for row in found] == wanted
    assert spark.read.format("pyengine").schema(df.select("headers").schema).load(str(root)).count() == len(wanted)


def test_a_schema_chooses_columns_and_converts_nothing(spark, root):
    df = spark.read.format("pyengine").schema("offset BIGINT, Topic STRING").load(str(root))
    assert df.columns == ["offset", "Topic"]
    assert sorted(map(tuple, df.collect())) == sorted(oracle.rows(oracle.log_messages(root), ["offset", "topic"]))
    for schema, sentence in (("offset INT", "is of type BIGINT, not INT"), ("nothing INT", "unknown column 'nothing'")):
        with pytest.raises(Exception, match=sentence):
            spark.read.format("pyengine").schema(schema).load(str(root)).count()
    with pytest.raises(Exception, match="name different columns"):
        spark.read.format("pyengine").schema("offset BIGINT").option("columns", "topic").load(str(root)).count()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"subscirbe": "a"}, "unknown option 'subscirbe' (did you mean subscribe?)"),
        ({"columns": "ofset"}, "unknown column 'ofset' (did you mean offset?)"),
        ({"startingPhysicalOffset": "1", "endingPhysicalOffset": "999999999"}, "the log ends at"),
        *usual([
            ({"subscribe": "Roll"}, "has no topic 'Roll' (did you mean Roll1?): allowMissing=true reads what there is"),
            ({"readLevel": "replicated"}, "nothing is replicated here: choose"),
        ], [], pytest.mark.ci),
    ],
)
def test_a_wrong_option_is_named(spark, root, options, sentence):
    with pytest.raises(Exception, match=re.escape(sentence)):
        load(spark, root, **options).count()


def test_no_store_and_an_empty_store(spark, root, golden):
    with pytest.raises(Exception, match="does not exist: check the path"):
        load(spark, root / "nothing").count()
    assert load(spark, golden("empty").root).count() == 0


def test_a_dataframe_is_one_snapshot_and_a_new_one_sees_more(spark, tmp_path):
    """Of the time of load(), so that several scans in its first query agree; with a schema of the first action."""
    fields = {"topic": "T", "body": b"x" * 100}
    write_log(tmp_path, [fields] * 5)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW five USING pyengine OPTIONS (path '{tmp_path}', columns 'size')")
    found = [load(spark, tmp_path), spark.read.format("pyengine").schema("size INT").load(str(tmp_path)), spark.table("five"),
             load(spark, tmp_path, fileSystem="arrow")]
    for count in (9, 12):
        write_log(tmp_path, [fields] * count)
        assert [df.union(df.where("size > 0")).count() for df in found] == [10, 18, 10, 10]
        assert load(spark, tmp_path).count() == count


def test_damage_fails_the_query_with_its_place(spark, tmp_path):
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 60)
    flip(StorePaths(tmp_path).commit_log_segment(0), offsets[3] + 4)
    assert offsets[-1] > 5 * SEGMENT_BYTES  # the log's end is looked for in the last three segments
    with pytest.raises(Exception, match=f"the log is damaged at {offsets[3]}: foreign"):
        load(spark, tmp_path).count()
    assert load(spark, tmp_path, onCorrupt="skip").count() == 59


def test_modules_that_spark_imports_to_find_formats_load_neither_arrow_nor_c(tmp_path):
    code = ("import sys, pyspark_pyengine; "
            "print(sorted(set(sys.modules) & {'pyarrow', 'pandas', 'pyengine._native'}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.ci
def test_the_page_of_docs_runs(spark, root, tmp_path, capsys, monkeypatch):
    """Every Python block of docs/spark.md in order, in one namespace; then its shell commands, in this process."""
    from fix_cli import run

    ConsumerOffsets(root).commit("Roll1", "billing", {0: 5})
    text = DOCS.read_text(encoding="utf-8")
    places = {"/var/lib/pyengine/store": str(root), "/var/lib/pyengine": str(tmp_path), "TopicA": "Roll1", "TopicB": "Other1"}
    for before, after in places.items():
        text = text.replace(before, after)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), namespace)
    shown = capsys.readouterr().out
    assert len(blocks) >= 4
    assert f"{sum(m.topic == 'Roll1' for m in oracle.log_messages(root))} messages in" in shown
    assert re.search(r"\|\s*5\|\s*143\|\n\|\s*6\|\s*142\|", shown), "from_json counts weekdays"
    commands = [line.split()[1:] for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
                if line.startswith("pyengine")]
    done = {}
    for name, *arguments in commands:
        done[name] = run(name, *arguments)
        assert done[name].code == 0, done[name].stderr
    assert done.keys() >= {"check", "export", "stats"}
    assert done["export"].document["messages"] == sum(m.topic == "Roll1" for m in oracle.log_messages(root))


def test_compressed_json_is_parsed_by_sparks_own_function(spark, tmp_path):
    from pyspark.sql.functions import col, from_json

    builder = StoreBuilder(tmp_path / "store", replace(SMALL, mapped_file_size_commit_log_bytes=1 << 16))
    for number in range(20):
        body = b'{"id": %d, "name": "%s"}' % (number, b"x" * number * 10)
        builder.put("J", zlib.compress(body) if number % 2 else body, sys_flag=number % 2)
    df = load(spark, tmp_path / "store", columns="value")
    parsed = df.select(from_json(col("value").cast("string"), "id INT, name STRING").alias("event")).select("event.*")
    assert sorted(map(tuple, parsed.collect())) == [(number, "x" * number * 10) for number in range(20)]


def test_a_query_beside_a_running_engine_returns_a_whole_prefix_of_the_put_messages(spark, tmp_path):
    import threading

    import pyengine

    sizes = {"mapped_file_size_commit_log_bytes": 1 << 20, "mapped_file_size_consume_queue_bytes": 60_000,
             "max_hash_slot_num": 1000, "max_index_num": 4000}
    store = tmp_path / "store"
    over = threading.Event()
    with pyengine.Engine(store, **sizes) as engine:
        def put() -> None:
            with engine.connect() as producer:
                number = 0
                while not over.wait(0.005) and number < 20_000:
                    result = producer.put_many("T", [b"%08d" % (number + n) for n in range(64)])
                    assert result.ok, result
                    number += 64

        producing = threading.Thread(target=put)
        producing.start()
        try:
            seen = 0
            with pyengine.open_store(store) as reader:
                eventually(lambda: reader.max_physical_offset("flushed") > 0, "something is flushed")
            through_queues = {"subscribe": "T", "access": "queue"}
            for level, options in (("flushed", {}), ("committed", {}), ("committed", through_queues),
                                   ("flushed", through_queues)):
                df = load(spark, store, columns="offset,value,physicalOffset,size", readLevel=level, maxPartitionBytes="512k",
                          **options)
                found = df.sort("offset").collect()
                assert [row["offset"] for row in found] == list(range(len(found)))
                assert all(bytes(row["value"]) == b"%08d" % row["offset"] for row in found)
                if level == "flushed":
                    assert len(found) >= seen
                    seen = len(found)
                    with pyengine.open_store(store) as reader:
                        assert found[-1]["physicalOffset"] + found[-1]["size"] <= reader.max_physical_offset("flushed")
        finally:
            over.set()
            producing.join()
    stopped = load(spark, store, columns="offset")
    with pyengine.open_store(store) as reader:
        assert stopped.count() == reader.queue_range("T", 0)[1] >= seen > 0
