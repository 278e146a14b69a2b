"""Bulk jobs in the workers: an export holds every row, is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from damage import flip
from fix_cli import run
from fix_golden import unpack, usual
from pyengine.errors import UsageError
from pyengine.formats.paths import StorePaths
from pyengine.spark.export import SUCCESS, export_parquet
from pyengine.spark.jobs import collect_from_workers, collect_stats, skipped_ranges
from pyengine.spark.partitions import QueuePart, QueueSlice
from spark import oracle
from spark.logs import write_log

NAMES = ["topic", "partition", "offset", "physicalOffset", "key", "value", "tags", "timestamp"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return unpack("pool-roll", tmp_path_factory.mktemp("jobs"))


def read_parquet(folder: Path) -> list[tuple]:
    from pyarrow import parquet

    found = []
    for path in sorted(folder.glob("part-*.parquet")):
        table = parquet.read_table(path, columns=NAMES)
        found += zip(*(column.to_pylist() for column in table.columns))
    return found


@pytest.mark.spark
@pytest.mark.java
@pytest.mark.parametrize("compression", usual(["snappy", "none"], ["none"], pytest.mark.ci))
def test_an_export_holds_every_row_in_the_logs_order(spark, root, tmp_path, compression):
    told = []
    done = export_parquet(spark, root, tmp_path / "out", compression=compression, progress=lambda *one: told.append(one),
                          maxPartitionBytes=100_000)
    messages = oracle.log_messages(root)
    assert read_parquet(tmp_path / "out") == oracle.rows(messages, NAMES)
    assert done.messages == len(messages) and done.files == len(list((tmp_path / "out").glob("part-*"))) > 1
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("part-*"))
    assert (tmp_path / "out" / SUCCESS).exists() and not list((tmp_path / "out").glob(".part-*"))
    assert all(0 <= part <= whole for part, whole in told)


@pytest.mark.spark
@pytest.mark.java
def test_topics_columns_and_an_empty_choice(spark, root, tmp_path):
    topic = oracle.log_messages(root)[0].topic
    chosen = [m for m in oracle.log_messages(root) if m.topic == topic]
    done = export_parquet(spark, root, tmp_path / "one", [topic], columns="offset,value")
    df = spark.read.parquet(str(tmp_path / "one"))
    assert df.columns == ["offset", "value"] and df.count() == done.messages == len(chosen)
    nothing = export_parquet(spark, root, tmp_path / "none", ["nobody"], allowMissing=True)
    assert (nothing.messages, spark.read.parquet(str(tmp_path / "none")).count()) == (0, 0)


@pytest.mark.spark
@pytest.mark.java
def test_a_folder_that_holds_something_is_left_alone(spark, root, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        export_parquet(spark, root, tmp_path / "file")
    export_parquet(spark, root, tmp_path / "out", ["nobody"], allowMissing=True)
    with pytest.raises(UsageError, match="is not empty"):
        export_parquet(spark, root, tmp_path / "out")
    assert export_parquet(spark, root, tmp_path / "out", overwrite=True).messages > 0
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(UsageError, match="holds precious, which no export wrote"):
        export_parquet(spark, root, tmp_path / "out", overwrite=True)
    with pytest.raises(UsageError, match="choose one of snappy"):
        export_parquet(spark, root, tmp_path / "other", compression="best")
    assert not (tmp_path / "other").exists()


@pytest.mark.spark
@pytest.mark.java
def test_an_export_that_fails_leaves_no_half_file_and_no_success(spark, tmp_path):
    offsets = write_log(tmp_path / "store", [{"topic": "T", "body": b"x" * 300}] * 60)
    path = StorePaths(tmp_path / "store").commit_log_segment(4096)
    path.write_bytes(bytes(100) + path.read_bytes()[100:])
    assert offsets[-1] > 5 * 4096  # the log's end is looked for in the last three segments
    with pytest.raises(Exception, match="the log is damaged at 4096: zeroes"):
        export_parquet(spark, tmp_path / "store", tmp_path / "out", maxPartitionBytes=4096)
    assert not list((tmp_path / "out").glob(".part-*")) and not (tmp_path / "out" / SUCCESS).exists()


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_skipped_ranges_lists_each_damaged_range_with_its_reason(spark, tmp_path):
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 60)
    size = offsets[1] - offsets[0]
    flip(StorePaths(tmp_path).commit_log_segment(0), offsets[3] + 4)
    flip(StorePaths(tmp_path).commit_log_segment(4096), offsets[15] - 4096 + 120)  # in the body
    assert offsets[15] > 4096 and offsets[-1] > 5 * 4096
    assert [tuple(row) for row in skipped_ranges(spark, tmp_path).collect()] == [(offsets[3], size, "foreign")]
    found = sorted(map(tuple, skipped_ranges(spark, tmp_path, verifyCRC=True, maxPartitionBytes=4096).collect()))
    assert found == [(offsets[3], size, "foreign"), (offsets[15], size, "bad_crc")]


@pytest.mark.spark
@pytest.mark.java
def test_the_export_command_writes_a_topic_and_refuses_a_full_folder(spark, root, tmp_path):
    topic = oracle.log_messages(root)[0].topic
    done = run("export", root, tmp_path / "out", "--topic", topic, "--columns", "offset", "--json")
    assert done.code == 0, done.stderr
    document = done.document
    assert document["messages"] == sum(m.topic == topic for m in oracle.log_messages(root))
    assert (document["format"], document["dest"], document["files"]) == ("parquet", str(tmp_path / "out"), 1)
    again = run("export", root, tmp_path / "out")
    assert again.code == 2 and "is not empty" in again.stderr
    assert "messages in 1 files" in run("export", root, tmp_path / "out", "--overwrite").stdout
    assert run("export", tmp_path / "nothing", tmp_path / "x").code == 2
    missing = run("export", root, tmp_path / "y", "--topic", "nobody")
    assert missing.code == 2 and "has no topic 'nobody'" in missing.stderr and not (tmp_path / "y").exists()
    assert run("export", root, tmp_path / "y", "--topic", "nobody", "--allow-missing", "--json").document["messages"] == 0


class NoSpark:
    """Takes what a job hands to Spark, and runs its tasks here: each in a copy of the function, as a worker gets it."""

    def __init__(self) -> None:
        self.sparkContext = self

    def getLocalProperty(self, name: str) -> None:
        return None

    def setLocalProperty(self, name: str, value: str | None) -> None:
        pass

    def parallelize(self, parts: list, count: int):
        self.parts, self.bounds = parts, (count,)
        return self

    def flatMap(self, task):
        self.task = task
        return self

    def collect(self) -> list:
        return [found for one in self.parts for found in self.task(one)]


def test_ten_thousand_queues_go_to_the_workers_in_a_megabyte_and_a_task_gets_its_part():
    slices = [QueueSlice(f"orders-of-region-{number // 16:05d}", number % 16, number, number + 1000 + number % 77, 12345 * number)
              for number in range(10_000)]
    parts = [QueuePart(tuple(slices[at : at + 100]), 1 << 40, 1 << 30, 6_000_000) for at in range(0, len(slices), 100)]
    spark, seen = NoSpark(), []

    def work(number: int, part: QueuePart):
        seen.append((number, part))
        return iter(())

    assert collect_from_workers(spark, work, parts) == [] and seen == list(enumerate(parts)) and seen[17][1] is not parts[17]
    assert sum(len(packed) for _, packed in spark.parts) < 1_000_000 and spark.bounds == (100,)
    assert [cell.cell_contents for cell in spark.task.__closure__] == [work], "a task gets its own part only"


def test_an_option_that_is_none_is_not_given(root):
    given = {"topics": [oracle.log_messages(root)[0].topic], "maxPartitionBytes": "1g"}
    found = collect_stats(NoSpark(), root, **given)
    assert found and found == collect_stats(NoSpark(), root, **given, tags=None, sql=None, columns=None, subscribePattern=None)


@pytest.mark.parametrize("name", ["a,b", " a", "a "])
def test_a_topic_that_a_list_of_texts_cannot_name_is_refused(tmp_path, name):
    write_log(tmp_path, [{"topic": "a", "body": b"x"}, {"topic": "b", "body": b"x"}])
    with pytest.raises(UsageError, match=f"topics names {name!r}: subscribe.* give the topic with its queues in assign"):
        collect_stats(NoSpark(), tmp_path, ["b", name])
    given = {"maxPartitionBytes": "1g", "allowMissing": True}
    assert [row.topic for row in collect_stats(NoSpark(), tmp_path, "a, b", **given)] == ["a", "b"]


@pytest.mark.spark
@pytest.mark.java
def test_collected_rows_come_in_part_order_and_a_worker_error_reaches_the_driver(spark):
    assert collect_from_workers(spark, lambda number, part: [(number, part * 2), number], ["a", "b", "c"]) == [
        (0, "aa"), 0, (1, "bb"), 1, (2, "cc"), 2]
    assert collect_from_workers(spark, lambda number, part: [part], []) == []

    def fail(number: int, part: str):
        raise UsageError(f"part {part} is wrong")

    with pytest.raises(Exception, match="part b is wrong"):
        collect_from_workers(spark, fail, ["b"])
