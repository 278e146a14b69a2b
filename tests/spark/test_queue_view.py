"""The option `view` counts and lists the entries of the queues' files, without the log."""

from __future__ import annotations

import pytest

from fix_golden import CLEAN, usual
from fix_store_builder import StoreBuilder, queue_of
from pyengine.errors import UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.spark.partitions import DataLossError
from pyengine.spark.queue_view import plan_view, view_rows
from pyengine.spark.schema import view_columns, view_options
from pyengine.spark.task_reader import arrow_schema
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from pyengine.storage.consumer_offset import ConsumerOffsets
from reference import queue_section
from spark.logs import DAMAGED_END


def read(root, **given: object) -> list[dict]:
    """The rows, as the tasks would give them."""
    options = view_options({"path": str(root), "view": "queue", **{name: str(value) for name, value in given.items()}})
    schema = arrow_schema(view_columns(options))
    found = []
    for part in plan_view(options):
        for batch in view_rows(options, part, schema):
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def listed(root) -> list[dict]:
    """All entries, one by one through the store's reader."""
    found = []
    with open_store(root) as reader:
        limit = reader.max_physical_offset("flushed")
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                low, high = reader.queue_range(topic, queue_id, "flushed")
                queue = queue_of(reader, topic, queue_id)
                for offset in range(low, high):
                    entry = queue.entry(offset, queue.max_offset(limit))
                    found.append({"topic": topic, "partition": queue_id, "offset": offset,
                                  "physicalOffset": entry.physical_offset,
                                  "size": entry.size_bytes, "tagsCode": entry.tags_code})
    return found


def by_place(row: dict) -> tuple:
    return row["topic"], row["partition"], row.get("offset", 0)


@pytest.mark.parametrize("recipe", usual(sorted(set(CLEAN) - DAMAGED_END)))
def test_both_views_have_the_entries_that_the_reader_has(golden, recipe):
    root = golden(recipe).root
    wanted = listed(root)
    for least in (1, 3):
        assert sorted(read(root, view="entries", minPartitions=least), key=by_place) == sorted(wanted, key=by_place)
        counted = read(root, minPartitions=least)
        for row in counted:
            mine = [one for one in wanted if by_place(one)[:2] == by_place(row)[:2]]
            assert (row["messages"], row["bytes"]) == (len(mine), sum(one["size"] for one in mine))
            assert row["maxOffset"] - row["minOffset"] == len(mine)
            if mine:
                assert (row["firstPhysicalOffset"], row["lastPhysicalOffset"]) == (mine[0]["physicalOffset"],
                                                                                   mine[-1]["physicalOffset"])
            assert row["committedOffset"] is row["lag"] is None
        with open_store(root) as reader:
            assert sorted(map(by_place, counted)) == sorted((topic, one, 0) for topic, ids in reader.topics().items()
                                                            for one in ids)


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    for number in range(60):
        made.put("AB"[number % 2], b"x" * 50, queue_id=number % 4 // 2)
    return made


@pytest.mark.parametrize("least", [1, 7, 100])
def test_a_queue_without_messages_is_a_row_and_has_no_entries(builder, least):
    of_another = next((builder.root / "consumequeue" / "A" / "0").iterdir())
    folder = builder.root / "consumequeue" / "C" / "0"
    folder.mkdir(parents=True)
    (folder / of_another.name).write_bytes(bytes(of_another.stat().st_size))
    assert [row["messages"] for row in read(builder.root, subscribe="C", minPartitions=least)] == [0]
    assert read(builder.root, view="entries", subscribe="C", minPartitions=least) == []
    assert len(read(builder.root, view="entries", minPartitions=least)) == 60


def test_the_lag_of_a_group_is_counted_from_its_offset_or_the_minimum(builder):
    offsets = ConsumerOffsets(builder.root)
    offsets.commit("A", "G", {0: 11, 1: 99})
    lags = {(row["topic"], row["partition"]): (row["committedOffset"], row["lag"])
            for row in read(builder.root, group="G", columns="topic,partition,committedOffset,lag")}
    assert lags == {("A", 0): (11, 4), ("A", 1): (99, 0), ("B", 0): (None, 15), ("B", 1): (None, 15)}
    for segment in sorted((builder.root / "commitlog").iterdir())[:1]:
        segment.unlink()
    offsets.commit("A", "G", {0: 1})
    row = next(row for row in read(builder.root, group="G", assign='{"A": [0]}'))
    assert row["minOffset"] > 1 and row["lag"] == row["messages"] == row["maxOffset"] - row["minOffset"]


def test_every_group_that_committed_in_a_topic_has_a_row_for_each_of_its_queues(builder):
    offsets = ConsumerOffsets(builder.root)
    offsets.commit("A", "G", {0: 11})
    offsets.commit("A", "H", {0: 15, 1: 2})
    offsets.commit("B", "H", {1: 15})
    found = [tuple(row.values()) for row in read(builder.root, view="groups", columns="group,topic,partition,committedOffset,lag")]
    assert sorted(found, key=lambda row: row[:3]) == [
        ("G", "A", 0, 11, 4), ("G", "A", 1, None, 15), ("H", "A", 0, 15, 0), ("H", "A", 1, 2, 13), ("H", "B", 0, None, 15),
        ("H", "B", 1, 15, 0)]
    assert {row["group"] for row in read(builder.root, view="groups", subscribe="A", group="G")} == {"G"}


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_a_group_that_the_store_does_not_know_is_an_error_unless_it_is_allowed(builder, system):
    given = {"group": "billin", "columns": "lag", "fileSystem": system}
    with pytest.raises(UsageError, match="knows no consumer group 'billin': it has committed no offset"):
        read(builder.root, **given)
    ConsumerOffsets(builder.root).commit("A", "billing", {0: 3})
    with pytest.raises(UsageError, match=r"'billin' \(did you mean billing\?\)"):
        read(builder.root, **given)
    assert read(builder.root, **given, allowMissing=True) == [{"lag": 15}] * 4
    SubscriptionGroups(builder.root).put(SubscriptionGroup("billin"))
    assert read(builder.root, **given) == [{"lag": 15}] * 4


def test_queues_and_columns_are_chosen(builder):
    assert {row["topic"] for row in read(builder.root, subscribe="A")} == {"A"}
    assert read(builder.root, subscribePattern="B", columns="MESSAGES") == [{"messages": 15}, {"messages": 15}]
    assert [list(row) for row in read(builder.root, view="entries", assign='{"A": [1]}',
                                      columns="size,offset")] == [["size", "offset"]] * 15
    assert read(builder.root, subscribe="Nothing", allowMissing=True) == []


def test_entries_of_messages_beyond_the_level_do_not_exist(builder):
    builder.write_entry("A", 0, 15, builder.end, 100, 0)
    given = {"assign": '{"A": [0]}', "failOnDataLoss": False}
    assert read(builder.root, **given)[0]["maxOffset"] == 15 and len(read(builder.root, view="entries", **given)) == 15
    with pytest.raises(DataLossError, match="consume queues name messages up to .*: A/0 from offset 15 on"):
        read(builder.root)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"view": "rows"}, "option view = 'rows': give messages, queue, entries or groups"),
        ({"group": ""}, "give the name of a consumer group"),
        ({"group": "g", "view": "entries"}, "give it with view=queue or view=groups"),
        ({"columns": "lagg"}, "unknown column 'lagg' of view=queue (did you mean lag?)"),
        ({"columns": "lag,LAG"}, "named twice"),
        ({"tags": "a"}, "option tags is for messages; view=queue takes path"),
        ({"vieww": "a"}, "unknown option 'vieww'"),
    ],
)
def test_a_wrong_option_is_named(options, sentence):
    with pytest.raises(UsageError) as refused:
        view_options({"path": "/store", "view": "queue", **options})
    assert sentence in str(refused.value)


def test_the_page_holds_the_tables():
    from spark.test_options import DOCS

    text = DOCS.read_text(encoding="utf-8")
    assert queue_section() in text


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_spark_reads_the_views_and_refuses_the_old_name(spark, builder):
    def load(name="pyengine", **given):
        return spark.read.format(name).options(**given).load(str(builder.root))

    df = load(view="queue", columns="topic,partition,messages,bytes")
    assert sorted(tuple(row)[:3] for row in df.collect()) == [("A", 0, 15), ("A", 1, 15), ("B", 0, 15), ("B", 1, 15)]
    entries = load(view="entries")
    assert entries.selectExpr("sum(size)").first()[0] == df.selectExpr("sum(bytes)").first()[0]
    assert load(view="queue", subscribe="Nothing", allowMissing="true").count() == 0
    with pytest.raises(Exception, match="takes no .schema"):
        spark.read.format("pyengine").schema("topic INT").options(view="queue").load(str(builder.root)).count()
    ConsumerOffsets(builder.root).commit("A", "G", {0: 11})
    rows = load(view="groups", columns="group,topic,partition,lag").collect()
    assert sorted(map(tuple, rows)) == [("G", "A", 0, 4), ("G", "A", 1, 15)]
    for call in (lambda: load("pyengine-queue"), lambda: load("pyengine-queue", view="entries").count()):
        with pytest.raises(Exception, match="option of format.*view=queue"):
            call()
    with pytest.raises(Exception, match="only spark.read takes it"):
        spark.readStream.format("pyengine").options(view="queue").load(str(builder.root)).writeStream.format("noop").start().processAllAvailable()
