"""Names that do not exist and ends that are gone: an error that names them, never a store with fewer messages."""

from __future__ import annotations

import itertools
import re
import shutil
from types import SimpleNamespace

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from broker_lock import held_by_a_broker
from fix_store_builder import StoreBuilder, queue_of
from pyengine.arguments import INT32_MAX
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.small_file import Checkpoint
from pyengine.ipc.live_reader import open_store
from pyengine.spark import plan as planning
from pyengine.spark.export import export_parquet
from pyengine.spark.partitions import DataLossError
from pyengine.spark.queue_view import plan_view
from pyengine.spark.schema import view_options
from pyengine.spark.stream import LogStreamReader
from pyengine.storage import queue_entries
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark, write_checkpoint
from pyengine.storage.commit_log import note_log_begin
from pyengine.storage.config import config_path
from pyengine.storage.config_table import QUEUE_NUMS_MAX, TopicConfig, TopicConfigs
from pyengine.storage.consume_queue import ConsumeQueue
from spark.logs import rows

COLUMNS = {"columns": "topic,offset"}
SCHEMA = StructType([StructField("topic", StringType()), StructField("offset", LongType())])
NO_SUCH = [
    ({"subscribe": "order"}, "has no topic 'order' (did you mean orders?): allowMissing=true reads what there is"),
    ({"subscribe": "orders,zzz,aaa"}, "has no topic 'zzz': allowMissing=true"),
    ({"assign": '{"orders": [1, 99]}'}, "has no queue orders/99: allowMissing=true"),
    ({"assign": '{"orders": [0], "events": [0]}'}, "has no topic 'events'"),
]
# Offsets and times of queues choose rows too: one of a name that is wrong would read everything.
NO_SUCH_BOUND = [
    ({"endingOffsets": '{"order": {"0": 0}}'}, "has no topic 'order' (did you mean orders?): allowMissing=true reads what there is"),
    ({"startingOffsets": '{"orders": {"9": -2}}'}, "has no queue orders/9: allowMissing=true"),
    ({"subscribePattern": "ord.*", "startingOffsets": '{"order": {"0": 5}}'}, "has no topic 'order'"),
    ({"subscribe": "orders", "endingOffsetsByTimestamp": '{"orders": {"9": 5, "1": 5}}'}, "has no queue orders/9"),
    ({"startingOffsetsByTimestamp": '{"order": {"0": 5}}'}, "has no topic 'order'"),
    ({"startingOffsets": '{"%LMQ%a": {"0": 0}}'}, "%LMQ%a is a light queue"),
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
    return plan_view(view_options({"path": str(builder.root), "view": "queue", **{name: str(value) for name, value in given.items()}}))


@pytest.mark.parametrize(("given", "sentence"), [*NO_SUCH, NO_MATCH])
def test_a_batch_read_of_an_absent_topic_or_queue_is_an_error_unless_allow_missing_is_set(builder, given, sentence):
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


@pytest.mark.parametrize(("given", "sentence"), NO_SUCH_BOUND)
def test_offsets_and_times_of_queues_that_do_not_exist_are_an_error_unless_it_is_allowed(builder, given, sentence):
    for more in ({}, {"fileSystem": "arrow"}, {"access": "queue"} if "subscribe" in given else {"access": "scan"}):
        with pytest.raises(UsageError) as refused:
            rows(builder.root, **COLUMNS, **given, **more)
        assert sentence in str(refused.value)
        if "light" not in sentence:
            assert rows(builder.root, **COLUMNS, **given, **more, allowMissing=True, failOnDataLoss=False)
    if "Timestamp" in str(given) and "subscribe" in given:
        with pytest.raises(DataLossError, match="startingOffsetsByTimestamp names queue orders/9, which does not exist"):
            stream(builder, subscribe="orders", startingOffsetsByTimestamp='{"orders": {"9": 5}}').initialOffset()


@pytest.mark.parametrize(("given", "sentence"), NO_SUCH)
def test_a_stream_of_an_absent_topic_or_queue_is_an_error_at_its_start_and_at_each_restart(builder, given, sentence):
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


def test_a_topic_exists_that_is_configured_and_one_in_the_log_alone_is_an_error(builder):
    TopicConfigs(builder.root).create(TopicConfig("planned", read_queue_nums=3, write_queue_nums=2))
    for more in ({}, {"fileSystem": "arrow"}):
        assert rows(builder.root, **COLUMNS, subscribe="planned", **more) == []
        assert rows(builder.root, **COLUMNS, assign='{"planned": [2]}', **more) == []
        with pytest.raises(UsageError, match="has no queue planned/3"):
            rows(builder.root, **COLUMNS, assign='{"planned": [3]}', **more)
    builder.put("new", b"x", queue_id=5, dispatch=False)
    (builder.root / "abort").touch()  # after a crash the queues may lack messages
    for given in ({"subscribe": "new"}, {"assign": '{"new": [5]}'}, {"subscribePattern": "n.w"}):
        with pytest.raises(UsageError, match="has no topic 'new'.*: allowMissing=true reads|matches none of"):
            rows(builder.root, **COLUMNS, **given)
        assert rows(builder.root, **COLUMNS, **given, allowMissing=True) == [("new", 0)]


def test_names_cannot_be_told_of_a_log_that_was_copied_alone_over_a_file_system_and_of_no_store_at_all(builder, tmp_path):
    shutil.rmtree(builder.root / "consumequeue")
    assert rows(builder.root, **COLUMNS, subscribe="nosuch", fileSystem="arrow") == []
    for topic in ("orders", "nosuch"):
        with pytest.raises(UsageError, match=f"has no topic '{topic}'"):
            rows(builder.root, **COLUMNS, subscribe=topic)
    assert len(rows(builder.root, **COLUMNS, subscribe="orders", allowMissing=True)) == 30
    empty = StoreBuilder(tmp_path / "empty")
    assert rows(empty.root, **COLUMNS, subscribePattern=".*") == []


# -- the log's end ------------------------------------------------------------------


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_a_lost_end_of_our_own_store_is_read_up_to_it_with_fail_on_data_loss_false(builder, system):
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    last = sorted((builder.root / "commitlog").iterdir())[-1]
    last.unlink()
    with pytest.raises(DataLossError, match="had been synced; its end is missing .*: set failOnDataLoss=false to read what there is"):
        rows(builder.root, **COLUMNS, fileSystem=system)
    found = rows(builder.root, columns="physicalOffset", failOnDataLoss=False, fileSystem=system)
    kept = rows(builder.root, columns="physicalOffset", onCorrupt="skip", fileSystem=system)
    assert found == kept and 0 < len(found) < 40 and found[-1][0] < int(last.name)


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_damage_with_whole_records_behind_it_is_no_lost_end(builder, system):
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    offsets = [at for (at,) in rows(builder.root, columns="physicalOffset")]
    builder.write_log(bytes(offsets[34] - offsets[33]), offsets[33])
    for given in ({}, {"failOnDataLoss": False}):
        with pytest.raises(CorruptionError, match=f"damaged at {offsets[33]}"):
            rows(builder.root, **COLUMNS, fileSystem=system, **given)
    found = rows(builder.root, columns="physicalOffset", onCorrupt="skip", fileSystem=system)
    assert [at for (at,) in found] == [at for at in offsets if at != offsets[33]]


@pytest.fixture
def broker(tmp_path) -> StoreBuilder:
    """A store as RocketMQ leaves it when it is stopped in order: no watermark, times of the last message in the checkpoint."""
    made = StoreBuilder(tmp_path / "broker")
    for number in range(60):
        made.put(("orders", "other")[number % 4 == 0], bytes(300), queue_id=number % 2)
    last_ms = made.now_ms - 1000
    write_checkpoint(made.root, Checkpoint(last_ms, last_ms, last_ms))
    return made


def physical(root, **given: object) -> list[int]:
    return [at for (at,) in rows(root, columns="physicalOffset", **given)]


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("given", [{}, {"subscribe": "orders"}, {"subscribe": "orders", "access": "queue"}, {"readLevel": "committed"}])
def test_a_lost_log_end_of_a_broker_store_is_found_by_its_queues(broker, segments, given):
    whole = physical(broker.root, **given)
    files = sorted((broker.root / "commitlog").iterdir())
    for path in files[-segments:]:
        path.unlink()
    lost_from = int(files[-segments].name)
    with pytest.raises(DataLossError) as refused:
        physical(broker.root, **given)
    said = str(refused.value)
    with open_store(broker.root) as reader:
        end = reader.max_physical_offset("committed")
        first = queue_of(reader, "orders", 1).max_offset(end)
    assert f"ends at {end}, but consume queues name messages up to {broker.end}: orders/1 from offset {first} on" in said
    assert "set failOnDataLoss=false" in said
    assert physical(broker.root, failOnDataLoss=False, **given) == [at for at in whole if at < lost_from]


def test_a_zeroed_record_near_the_end_of_a_brokers_store_is_damage_and_not_its_end(broker):
    whole = physical(broker.root)
    broker.write_log(bytes(whole[50] - whole[49]), whole[49])
    for given in ({}, {"failOnDataLoss": False}, {"subscribe": "orders"}):
        with pytest.raises(CorruptionError, match=f"queues name messages up to {broker.end}: .*; it is damaged there, "
                                                  f"and continues at {whole[50]} .*: onCorrupt=skip reads what there is"):
            physical(broker.root, **given)
    assert physical(broker.root, onCorrupt="skip") == [at for at in whole if at != whole[49]]


@pytest.mark.parametrize("system", ["auto", "arrow"])
def test_a_lost_end_of_log_and_queues_of_a_stopped_store_is_found_by_its_checkpoint(broker, system):
    shutil.rmtree(broker.root / "consumequeue")
    assert len(physical(broker.root, fileSystem=system)) == 60
    sorted((broker.root / "commitlog").iterdir())[-1].unlink()
    with pytest.raises(DataLossError, match=f"stored at [0-9]+, but messages up to {broker.now_ms - 1000} had been synced .checkpoint.; "
                                            "its end is missing"):
        physical(broker.root, fileSystem=system)
    assert 0 < len(physical(broker.root, fileSystem=system, failOnDataLoss=False)) < 60
    for path in (broker.root / "commitlog").iterdir():
        path.unlink()
    with pytest.raises(DataLossError, match="ends at 0 with a message that was stored at 0, but"):
        physical(broker.root, fileSystem=system)


def test_a_message_torn_off_by_a_crash_is_a_loss_only_if_it_had_been_synced(broker):
    whole = physical(broker.root)
    (broker.root / "abort").touch()
    broker.write_log(bytes(broker.end - whole[-1]), whole[-1])
    with pytest.raises(DataLossError, match="queues name messages up to"):
        physical(broker.root)
    write_checkpoint(broker.root, Checkpoint(broker.now_ms - 2000, broker.now_ms - 2000, broker.now_ms - 2000))
    assert physical(broker.root) == whole[:-1]


def test_a_broker_that_writes_on_has_lost_nothing(broker, monkeypatch):
    """The end is taken, then the queues are looked at: what was put between the two is behind that end."""
    whole, seen = physical(broker.root, readLevel="committed"), []

    def put_meanwhile(queue, limit):
        if not seen:
            seen.append(broker.put("orders", bytes(300)))
        return max_offset(queue, limit)

    max_offset = ConsumeQueue.max_offset
    monkeypatch.setattr(ConsumeQueue, "max_offset", put_meanwhile)
    with held_by_a_broker(broker.root):
        assert physical(broker.root, readLevel="committed") == whole
    assert seen and len(physical(broker.root)) == 61


@pytest.mark.parametrize("given", [{}, {"subscribe": "orders"}])
def test_a_stream_of_a_store_that_has_lost_its_end_does_not_begin(broker, given):
    sorted((broker.root / "commitlog").iterdir())[-1].unlink()
    reader = stream(broker, **given)
    with pytest.raises(DataLossError, match="consume queues name"):
        reader.initialOffset()
    reader.stop()
    reader = stream(broker, failOnDataLoss="false", **given)
    assert reader.latestOffset(reader.initialOffset()) != reader.initialOffset()
    reader.stop()


def test_a_level_above_the_last_segment_is_a_loss(builder, monkeypatch):
    from pyengine.ipc.live_reader import LiveStoreReader

    monkeypatch.setattr(LiveStoreReader, "is_live", True)
    monkeypatch.setattr(LiveStoreReader, "max_physical_offset", lambda *_: 1 << 20)
    with pytest.raises(DataLossError, match="below the level flushed at 1048576: segments are missing; set failOnDataLoss=false"):
        rows(builder.root, **COLUMNS)
    assert len(rows(builder.root, **COLUMNS, failOnDataLoss=False, onCorrupt="skip")) == 40




# -- what queues lack -----------------------------------------------------------------

def lose_last_file(builder: StoreBuilder) -> None:
    builder.queue_file("orders", 1, 200).unlink()


def lose_first_file(builder: StoreBuilder) -> None:
    builder.queue_file("orders", 1).unlink()


def lose_all_files(builder: StoreBuilder) -> None:
    for start in (0, 200):
        builder.queue_file("orders", 1, start).unlink()


def lose_folder(builder: StoreBuilder) -> None:
    shutil.rmtree(builder.root / "consumequeue" / "orders" / "1")


def lose_last_entries(builder: StoreBuilder) -> None:
    for number in range(15, 20):
        builder.write_entry("orders", 1, number, 0, 0, 0)


LOSSES = [
    (lose_last_file, "orders/1 from offset 10 on", range(10)),
    (lose_first_file, "orders/1 before offset 10", range(10, 20)),
    (lose_all_files, "orders/1 from offset 0 on", range(0)),
    (lose_folder, "orders/1 from offset 0 on", range(0)),
    (lose_last_entries, "orders/1 from offset 15 on", range(15)),
]


def test_a_lost_end_of_the_log_is_seen_behind_a_hole_in_the_queue_that_proves_it(builder):
    """There is no watermark, and the checkpoint has no times."""
    for _ in range(40):
        builder.put("orders", bytes(300), queue_id=1)
    sorted((builder.root / "commitlog").iterdir())[-1].unlink()
    missed = []
    for path in sorted((builder.root / "consumequeue" / "orders" / "1").iterdir())[-2:]:
        whole = path.read_bytes()
        last = len(whole.rstrip(b"\0")) // 20 - 1  # the last entry stays, else nothing tells of the end
        for first, count in itertools.product(range(last), range(1, 5)):
            if first + count <= last:
                path.write_bytes(whole[: first * 20] + bytes(count * 20) + whole[(first + count) * 20:])
                try:
                    rows(builder.root, **COLUMNS, subscribe="orders")
                    missed.append((path.name, first, count))
                except DataLossError:
                    pass
        path.write_bytes(whole)
    assert not missed


@pytest.mark.parametrize("is_ours", [pytest.param(True, marks=pytest.mark.ci), False], ids=["watermark", "rocketmq"])
@pytest.mark.parametrize(("lose", "sentence", "left"), LOSSES, ids=[lose.__name__ for lose, *_ in LOSSES])
def test_messages_that_the_log_has_and_a_queue_has_not_are_a_loss(builder, monkeypatch, lose, sentence, left, is_ours):
    if is_ours:
        WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    given = {"subscribePattern": "ord.*|other"}
    whole = rows(builder.root, **COLUMNS, **given, access="scan")
    lose(builder)
    for system in ("auto", "arrow"):
        with pytest.raises(DataLossError) as lost:
            rows(builder.root, **COLUMNS, **given, access="queue", fileSystem=system)
        assert f"lack messages that the log has: {sentence}: `pyengine rebuild" in str(lost.value)
        assert "access=scan reads the log itself; set failOnDataLoss=false" in str(lost.value)
        found = rows(builder.root, **given, columns="topic,partition,offset", access="queue", fileSystem=system, failOnDataLoss=False)
        assert [offset for *queue, offset in sorted(found) if queue == ["orders", 1]] == list(left) and len(found) == 20 + len(left)
        assert rows(builder.root, **COLUMNS, **given, access="scan", fileSystem=system) == whole
        for asked in ({"view": "queue"}, {"view": "entries"}):
            with pytest.raises(DataLossError, match=re.escape(sentence)):
                view(builder, fileSystem=system, **asked)
            view(builder, fileSystem=system, failOnDataLoss=False, **asked)
    for ask in (LogStreamReader.initialOffset, lambda reader: reader.latestOffset({"orders": {"0": 1}})):
        reader = stream(builder, **given)
        with pytest.raises(DataLossError, match=re.escape(sentence)):
            ask(reader)
        reader.stop()
    reader = stream(builder, **given, failOnDataLoss=False)
    reader.initialOffset()
    reader.stop()
    for name, value in (("LOG_BYTES_MIN", 0), ("SHARE_MAX", 1.0)):
        monkeypatch.setattr(planning, name, value)
    assert rows(builder.root, **COLUMNS, **given) == whole  # by a scan, for the queues are not whole


def test_a_loss_that_a_read_does_not_touch_is_none_for_it(builder):
    lose_last_file(builder)
    for given in ({"subscribe": "other"}, {"assign": '{"orders": [0]}'},
                  {"subscribe": "orders", "endingOffsets": '{"orders": {"1": 10}}'}):
        by_queue, by_scan = (sorted(rows(builder.root, **COLUMNS, **given, access=access)) for access in ("queue", "scan"))
        assert by_queue == by_scan


@pytest.mark.parametrize("at", [12, 20, 21], ids=["queueId", "queueOffset", "queueOffset, lower"])
def test_a_bit_that_moves_a_record_to_the_end_of_a_queue_is_damage_and_no_loss(builder, at):
    with open_store(builder.root) as reader:
        offset = queue_of(reader, "orders", 1).entry(19, 20).physical_offset
    path, place = builder.segment(offset), offset % 4096 + at + (3 if at == 12 else 6)
    data = bytearray(path.read_bytes())
    data[place] ^= 2
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="entry 19 of queue orders/1 names message") as told:
        rows(builder.root, **COLUMNS, subscribe="orders", access="queue")
    assert not isinstance(told.value, DataLossError)
    assert len(rows(builder.root, **COLUMNS, subscribe="orders", access="queue", onCorrupt="skip")) == 29


def test_a_queue_whose_messages_are_in_light_queues_too_is_missed(builder):
    for number in range(3):
        message = builder.put("lit", b"x", properties={"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)})
        builder.write_entry("%LMQ%a", 0, number, message.physical_offset, message.size_bytes, 0)
    assert view(builder)
    shutil.rmtree(builder.root / "consumequeue" / "lit")
    with pytest.raises(DataLossError, match="lit/0 from offset 0 on"):
        view(builder)


@pytest.mark.parametrize("given", [{"subscribe": "orders,archive"}, {"assign": '{"archive": [0]}'}, {"subscribePattern": "arch.*"}])
def test_a_topic_that_is_a_queue_of_others_messages_is_refused_as_a_light_queue(builder, given):
    for number in range(3):
        message = builder.put("orders", b"x", properties={"INNER_MULTI_DISPATCH": "archive", "INNER_MULTI_QUEUE_OFFSET": str(number)})
        builder.write_entry("archive", 0, number, message.physical_offset, message.size_bytes, 0)
    for more in ({}, {"access": "queue"}, {"fileSystem": "arrow"}):
        with pytest.raises(UsageError, match="archive is a light queue: its messages are rows of their own topics"):
            rows(builder.root, **COLUMNS, **given, **more)
        rows(builder.root, **COLUMNS, **given, **more, allowMissing=True)
    with pytest.raises(UsageError, match="archive is a light queue"):
        stream(builder, **given).initialOffset()
    assert rows(builder.root, **COLUMNS, subscribePattern=".*", onCorrupt="skip")
    builder.queue_offsets["archive", 0] = 3
    builder.put("archive", b"its own")
    assert [tuple(row) for row in rows(builder.root, **COLUMNS, **given)][-1][0] == "archive"


def test_a_queue_that_topics_json_names_is_looked_for_and_a_deleted_topic_is_not(builder):
    shutil.rmtree(builder.root / "consumequeue" / "orders")
    with pytest.raises(DataLossError, match="orders/[01] from offset 0 on"):
        view(builder)
    TopicConfigs(builder.root).create(TopicConfig("other"))
    assert view(builder)
    TopicConfigs(builder.root).create(TopicConfig("orders"))
    for read in (lambda: view(builder), lambda: rows(builder.root, **COLUMNS, subscribe="orders", access="queue")):
        with pytest.raises(DataLossError, match="orders/[01] from offset 0 on"):
            read()


def test_queues_that_no_topic_can_have_are_not_looked_for():
    """A file that another program wrote, or a folder, may have any number."""
    asked = itertools.count()

    def choose(topic, queue_id):
        assert next(asked) < 2 * QUEUE_NUMS_MAX

    planned = TopicConfig("planned", read_queue_nums=INT32_MAX)
    assert queue_entries.newest_bytes({"planned": planned}, {("orders", INT32_MAX): None}, choose) == queue_entries.SCAN_BYTES


def test_loss_search_begins_at_the_last_queue_entry_and_goes_further_back_without_entries(builder, monkeypatch):
    """It begins at the last entry if the queue ends at a file's boundary; it is long for a queue without entries, else short."""
    for _ in range(30):
        builder.put("late", bytes(300))
    monkeypatch.setattr(queue_entries, "SCAN_BYTES", 0)
    lose_last_file(builder)
    with pytest.raises(DataLossError, match="orders/1 from offset 10 on"):
        view(builder, subscribe="orders")
    shutil.rmtree(builder.root / "consumequeue" / "other")
    with pytest.raises(DataLossError, match="other/0 from offset 0 on"):
        view(builder, subscribePattern="other|late")
    monkeypatch.setattr(queue_entries, "LOST_QUEUE_BYTES", 0)
    assert view(builder, subscribePattern="other|late")


def test_files_that_were_deleted_with_their_messages_are_no_loss(builder):
    for number in range(60):
        builder.put("orders", bytes(300), queue_id=1)
    first = rows(builder.root, columns="physicalOffset", assign='{"orders": [1]}', startingOffsets='{"orders": {"1": 30}}')[0][0]
    for segment in sorted((builder.root / "commitlog").iterdir()):
        if int(segment.name) + 4096 <= first:
            segment.unlink()
    for start in (0, 200):
        builder.queue_file("orders", 1, start).unlink()
    by_queue, by_scan = (sorted(rows(builder.root, **COLUMNS, subscribe="orders", access=access)) for access in ("queue", "scan"))
    assert by_queue == by_scan
    assert view(builder) and view(builder, view="entries")


@pytest.mark.parametrize("how", ["gone", "empty", "between"])
def test_a_disk_of_the_log_that_is_not_mounted_is_said_by_every_read(builder, tmp_path, how):
    disk, away = tmp_path / "disk", tmp_path / "away"
    disk.mkdir()
    segments = sorted(builder.paths.commit_log.iterdir())
    for segment in segments[1:2] if how == "between" else segments[:2]:
        shutil.move(segment, disk)
    config_path(builder.root).write_text(f'store_path_commit_log = "commitlog,{disk}"\n')
    note_log_begin(builder.root, 0)
    wanted = rows(builder.root, **COLUMNS)
    disk.rename(away)
    if how == "empty":
        disk.mkdir()
    session = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=1))
    with open_store(builder.root) as store:
        for read in (lambda: rows(builder.root, **COLUMNS), lambda: rows(builder.root, **COLUMNS, subscribe="orders", access="queue"),
                     lambda: view(builder), stream(builder).initialOffset, stream(builder, subscribe="orders").initialOffset, store.scan,
                     lambda: export_parquet(session, builder.root, tmp_path / "out", incremental=True)):
            with pytest.raises(CorruptionError, match="mount"):
                read()
    if how != "between":
        assert set(rows(builder.root, **COLUMNS, failOnDataLoss=False)) < set(wanted)
    if how == "empty":
        disk.rmdir()
    away.rename(disk)
    assert rows(builder.root, **COLUMNS) == wanted and len(wanted) == 40
