"""Names that do not exist and ends that are gone: an error that names them, never a store with fewer messages."""

from __future__ import annotations

import shutil

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from fix_store_builder import StoreBuilder
from pyengine.errors import CorruptionError, UsageError
from pyengine.spark.partitions import DataLossError
from pyengine.spark.queue_view import plan_view, read_view_options
from pyengine.spark.stream import LogStreamReader
from pyengine.storage.topic_config import TopicConfig, TopicConfigs
from pyengine.storage.watermark import DurableWatermark, write_watermark
from spark.logs import rows

COLUMNS = {"columns": "topic,offset"}
SCHEMA = StructType([StructField("topic", StringType()), StructField("offset", LongType())])
NO_SUCH = [
    ({"subscribe": "order"}, "has no topic 'order' (did you mean orders?): allowMissing=true reads what there is"),
    ({"subscribe": "orders,zzz,aaa"}, "has no topic 'aaa', 'zzz': allowMissing=true"),
    ({"assign": '{"orders": [1, 99]}'}, "has no queue orders/99: allowMissing=true"),
    ({"assign": '{"orders": [0], "events": [0]}'}, "has no topic 'events'"),
]
NO_MATCH = ({"subscribePattern": "order"}, "subscribePattern 'order' matches none of the 2 topics of")


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    for number in range(40):
        made.put(("orders", "other")[number % 4 == 0], bytes(300), queue_id=number % 2)
    return made


def stream(builder: StoreBuilder, **given: object) -> LogStreamReader:
    options = {"path": str(builder.root), "startingOffsets": "earliest", **COLUMNS, **given}
    return LogStreamReader(SCHEMA, {name: str(value) for name, value in options.items()})


def view(builder: StoreBuilder, **given: object) -> list:
    return plan_view(read_view_options({"path": str(builder.root), **{name: str(value) for name, value in given.items()}}))


@pytest.mark.parametrize(("given", "sentence"), [*NO_SUCH, NO_MATCH])
def test_a_batch_read_of_what_does_not_exist_is_an_error_unless_it_is_allowed(builder, given, sentence):
    for more in ({}, {"access": "queue"}, {"fileSystem": "arrow"}):
        with pytest.raises(UsageError) as refused:
            rows(builder.root, **COLUMNS, **given, **more)
        assert sentence in str(refused.value)
        found = rows(builder.root, **COLUMNS, **given, **more, allowMissing=True)
        assert {topic for topic, _ in found} == ({"orders"} if "orders" in str(given) else set())
    with pytest.raises(UsageError) as refused:
        view(builder, **given)
    assert sentence in str(refused.value)
    view(builder, allowMissing=True, **given)


@pytest.mark.parametrize(("given", "sentence"), NO_SUCH)
def test_a_stream_of_what_does_not_exist_is_an_error_at_its_start_and_at_each_restart(builder, given, sentence):
    for ask in (LogStreamReader.initialOffset, lambda reader: reader.latestOffset({"orders": {"0": 1}})):
        reader = stream(builder, **given)
        with pytest.raises(UsageError) as refused:
            ask(reader)
        reader.stop()
        assert sentence in str(refused.value)


@pytest.mark.parametrize("given", [{"subscribe": "orders,later", "allowMissing": True}, {"subscribePattern": "later|nothing"}])
def test_a_stream_reads_a_topic_that_comes_later_where_that_is_allowed_or_a_pattern_waits_for_it(builder, given):
    reader = stream(builder, **given)
    start = reader.latestOffset(reader.initialOffset())
    for _ in range(3):
        builder.put("later", b"x")
    end = reader.latestOffset(start)
    found = [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]
    reader.stop()
    assert found == [{"topic": "later", "offset": number} for number in range(3)]


def test_a_topic_exists_that_is_configured_or_in_the_log_alone(builder):
    TopicConfigs(builder.root).create(TopicConfig("planned", read_queue_nums=3, write_queue_nums=2))
    for more in ({}, {"fileSystem": "arrow"}):
        assert rows(builder.root, **COLUMNS, subscribe="planned", **more) == []
        assert rows(builder.root, **COLUMNS, assign='{"planned": [2]}', **more) == []
        with pytest.raises(UsageError, match="has no queue planned/3"):
            rows(builder.root, **COLUMNS, assign='{"planned": [3]}', **more)
    builder.put("new", b"x", queue_id=5, dispatch=False)
    (builder.root / "abort").touch()  # after a crash the queues may lack messages
    for given in ({"subscribe": "new"}, {"assign": '{"new": [5]}'}, {"subscribePattern": "n.w"}):
        assert rows(builder.root, **COLUMNS, **given) == [("new", 0)]
    with pytest.raises(UsageError, match="has no queue new/6"):
        rows(builder.root, **COLUMNS, assign='{"new": [5, 6]}')


def test_names_cannot_be_told_of_a_log_that_was_copied_alone_over_a_file_system_and_of_no_store_at_all(builder, tmp_path):
    shutil.rmtree(builder.root / "consumequeue")
    assert rows(builder.root, **COLUMNS, subscribe="nosuch", fileSystem="arrow") == []
    assert len(rows(builder.root, **COLUMNS, subscribe="orders")) == 30
    with pytest.raises(UsageError, match="has no topic 'nosuch'"):
        rows(builder.root, **COLUMNS, subscribe="nosuch")
    empty = StoreBuilder(tmp_path / "empty")
    assert rows(empty.root, **COLUMNS, subscribePattern=".*") == []


# -- the log's end ------------------------------------------------------------------


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_a_lost_end_of_our_own_store_is_read_up_to_it_with_fail_on_data_loss_false(builder, system):
    write_watermark(builder.root, DurableWatermark("u", 1, builder.end))
    last = sorted((builder.root / "commitlog").iterdir())[-1]
    last.unlink()
    with pytest.raises(DataLossError, match="had been synced: its end is missing .* set failOnDataLoss=false to read what there is"):
        rows(builder.root, **COLUMNS, fileSystem=system)
    found = rows(builder.root, columns="physicalOffset", failOnDataLoss=False, fileSystem=system)
    kept = rows(builder.root, columns="physicalOffset", onCorrupt="skip", fileSystem=system)
    assert found == kept and 0 < len(found) < 40 and found[-1][0] < int(last.name)


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_damage_with_whole_records_behind_it_is_no_lost_end(builder, system):
    write_watermark(builder.root, DurableWatermark("u", 1, builder.end))
    offsets = [at for (at,) in rows(builder.root, columns="physicalOffset")]
    builder.write_log(bytes(offsets[34] - offsets[33]), offsets[33])
    for given in ({}, {"failOnDataLoss": False}):
        with pytest.raises(CorruptionError, match=f"damaged at {offsets[33]}"):
            rows(builder.root, **COLUMNS, fileSystem=system, **given)
    found = rows(builder.root, columns="physicalOffset", onCorrupt="skip", fileSystem=system)
    assert [at for (at,) in found] == [at for at in offsets if at != offsets[33]]


def test_a_level_above_the_last_segment_is_a_loss(builder, monkeypatch):
    from pyengine.ipc.live_reader import LiveStoreReader

    monkeypatch.setattr(LiveStoreReader, "is_live", True)
    monkeypatch.setattr(LiveStoreReader, "max_physical_offset", lambda *_: 1 << 20)
    with pytest.raises(DataLossError, match="below the level flushed at 1048576: segments are missing; set failOnDataLoss=false"):
        rows(builder.root, **COLUMNS)
    assert len(rows(builder.root, **COLUMNS, failOnDataLoss=False, onCorrupt="skip")) == 40


