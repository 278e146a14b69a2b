"""Partitions read on their own, without Spark: the same rows as the pure-Python parser, however the log is cut."""

from __future__ import annotations

import datetime
import json
import pickle
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest

from fix_golden import RECIPES, usual
from fix_store_builder import SMALL, StoreBuilder
from pyengine.errors import CorruptionError, StoreRefusedError, UsageError
from pyengine.formats.paths import StorePaths, segment_name, use_log_folders
from pyengine.ipc.live_reader import open_store
from pyengine.native.flush import punch
from pyengine.spark import task_reader
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError, LogRange, cut
from pyengine.spark.plan import plan
from pyengine.spark.presence import with_lost_end
from pyengine.spark.schema import all_names, chosen_columns
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.commit_log import SegmentBytes
from pyengine.storage.config import config_path
from record_bytes import encode_record
from spark import oracle
from spark.logs import DAMAGED_END, LOST_END, SEGMENT_BYTES, allowing, batches, end_of, rows, write_log

ALL = all_names()
REFUSED = {"abnormal-shortfile"}  # a segment of another length: RocketMQ refuses the store too


def offsets_of(found: list[tuple], at: int = 0) -> list[int]:
    return [row[at] for row in found]


# -- every store, every cut -------------------------------------------------------------


@pytest.mark.parametrize("recipe", usual(sorted(set(RECIPES) - REFUSED - DAMAGED_END)))
def test_a_golden_store_reads_as_the_python_parser_reads_it(golden, recipe):
    root = golden(recipe).root
    messages = oracle.log_messages(root)
    wanted = oracle.rows(messages, ALL)
    end = end_of(root)
    for most in (1 << 30, end // 3 + 1, end // 17 + 1, end // 101 + 1):
        assert rows(root, columns="*", maxPartitionBytes=most, batchRows=7, **allowing(recipe)) == wanted
    assert rows(root, columns="*", minPartitions=40, batchBytes=1, **allowing(recipe)) == wanted
    names = sorted({name for message in messages for name in message.properties if "," not in name})
    if names:
        columns = [f"property.{name}" for name in [*names, "of nobody"]]
        assert rows(root, columns=",".join(columns), **allowing(recipe)) == oracle.rows(messages, columns)


@pytest.mark.parametrize("recipe", sorted(DAMAGED_END | LOST_END))
def test_a_golden_store_whose_queues_name_more_than_its_log_has_is_refused(golden, recipe):
    with pytest.raises(CorruptionError, match="consume queues name messages up to"):
        rows(golden(recipe).root)


@pytest.mark.parametrize("recipe", sorted(REFUSED))
def test_a_store_that_rocketmq_refuses_is_refused(golden, recipe):
    with pytest.raises(StoreRefusedError, match="bytes, not"):
        rows(golden(recipe).root)


def places(request, start: int, end: int) -> list[int]:
    """Every byte from `start` to `end`; in the short form those around both, and some between."""
    every = range(start, end + 1)
    return [*every] if request.config.run_long else sorted({*every[:3], *every[3:-3:17], *every[-3:]})


def test_what_is_replicated_may_end_anywhere_in_a_record(golden, request):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    first, last = messages[20], messages[21]
    start, size = oracle.log_messages(root)[0].physical_offset, 16384
    for limit in places(request, first.physical_offset, last.physical_offset + last.size_bytes):
        ranges = cut(start, limit, limit, size, size // 5)
        found = offsets_of(rows(root, ranges, columns="physicalOffset", readLevel="replicated"))
        assert found == [m.physical_offset for m in messages if m.physical_offset + m.size_bytes <= limit]


def test_a_range_may_begin_at_any_byte(golden, request):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    first, last, end = messages[20], messages[21], end_of(root)
    for start in places(request, first.physical_offset, last.physical_offset + last.size_bytes):
        found = offsets_of(rows(root, columns="physicalOffset", startingPhysicalOffset=start, endingPhysicalOffset=end - 1))
        assert found == [m.physical_offset for m in messages if start <= m.physical_offset < end - 1]


@pytest.mark.parametrize(("form", "system"), [("{}", "auto"), ("file://{}", "arrow")], ids=["local", "remote"])
def test_a_log_that_ends_before_its_synced_end_is_refused_and_not_read_as_a_shorter_one(tmp_path, form, system):
    offsets = write_log(tmp_path, [{"topic": "T", "body": bytes(500), "queue_offset": number} for number in range(40)])
    path = form.format(tmp_path)
    files = sorted(StorePaths(tmp_path).commit_log.iterdir())
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, end_of(tmp_path)))
    assert len(rows(path, columns="physicalOffset", fileSystem=system)) == 40
    last_start = int(files[-1].name)
    files[-1].unlink()
    with pytest.raises(CorruptionError, match=r"ends at \d+, but everything up to .* had been synced"):
        rows(path, fileSystem=system)
    found = offsets_of(rows(path, columns="physicalOffset", onCorrupt="skip", fileSystem=system))
    assert found == [at for at in offsets if at < last_start]
    for file in files[:-1]:
        file.unlink()
    with pytest.raises(CorruptionError, match="ends at 0, but"):
        rows(path, fileSystem=system)


def test_an_engine_that_wrote_on_and_ended_since_the_limit_was_taken_lost_nothing(tmp_path):
    offsets = write_log(tmp_path, [{"topic": "T", "body": bytes(500), "queue_offset": number} for number in range(40)])
    end, options = end_of(tmp_path), read_options({"path": str(tmp_path)})
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, end))
    with open_store(tmp_path) as reader:
        assert with_lost_end(options, reader, offsets[20]) == offsets[20]


def test_batches_keep_to_their_bounds(golden):
    root = golden("roll").root
    assert max(batch.num_rows for batch in batches(root, batchRows=9)) == 9
    for batch in batches(root, batchBytes=3000, columns="size,value"):
        assert batch.num_rows == 1 or sum(batch.column(0).to_pylist()) <= 3000


# -- choosing rows ----------------------------------------------------------------------


def queued(message) -> bool:
    return message.sys_flag & 0xC not in (0x4, 0xC)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"subscribe": "Roll1"}, lambda m: m.topic == "Roll1"),
        ({"subscribe": "Roll1,Other1"}, lambda m: m.topic in ("Roll1", "Other1")),
        ({"subscribe": "Roll", "allowMissing": "true"}, lambda m: False),
        ({"subscribePattern": "R.*|nothing"}, lambda m: m.topic.startswith("R")),
        ({"subscribePattern": "oll1", "allowMissing": "true"}, lambda m: False),
        ({"assign": '{"Roll1": [1], "Other1": [0]}'}, lambda m: (m.topic, m.queue_id) in (("Roll1", 1), ("Other1", 0))),
        ({"subscribe": "Roll1", "startingOffsets": '{"Roll1": {"0": 10}}'},
         lambda m: m.topic == "Roll1" and (m.queue_id != 0 or m.queue_offset >= 10)),
        ({"subscribe": "Roll1", "endingOffsets": '{"Roll1": {"0": 10, "1": -1}}'},
         lambda m: m.topic == "Roll1" and (m.queue_id != 0 or m.queue_offset < 10)),
        ({"startingOffsets": '{"Roll1": {"1": 50}}'}, lambda m: (m.topic, m.queue_id) != ("Roll1", 1) or m.queue_offset >= 50),
        ({"assign": '{"Roll1": [0, 1]}', "startingOffsets": '{"Roll1": {"0": 10, "1": 20}}',
          "endingOffsets": '{"Roll1": {"0": 30, "1": 40}}'},
         lambda m: m.topic == "Roll1" and (10 <= m.queue_offset < 30, 20 <= m.queue_offset < 40)[m.queue_id]),
        ({"startingPhysicalOffset": 50_000, "endingPhysicalOffset": 90_000}, lambda m: 50_000 <= m.physical_offset < 90_000),
    ],
)
def test_options_choose_rows(golden, given, wanted):
    root = golden("roll").root
    expected = [m.physical_offset for m in oracle.log_messages(root) if wanted(m)]
    for most in ("256m", "3000"):
        assert offsets_of(rows(root, columns="physicalOffset", maxPartitionBytes=most, **given)) == expected


def test_tags_and_times_choose_rows(golden):
    root = golden("basic").root
    messages = oracle.log_messages(root)
    tags = sorted({m.tags for m in messages if m.tags})[:2]
    assert len(tags) == 2
    found = offsets_of(rows(root, columns="physicalOffset", tags=" || ".join(tags)))
    assert found == [m.physical_offset for m in messages if m.tags in tags] and found
    times = sorted({m.store_timestamp_ms for m in messages})
    start, end = times[len(times) // 3], times[2 * len(times) // 3]
    found = offsets_of(rows(root, columns="physicalOffset", startingTimestamp=start, endingTimestamp=end))
    assert found == [m.physical_offset for m in messages if start <= m.store_timestamp_ms < end] and found


@pytest.mark.parametrize("columns", ["physicalOffset", "physicalOffset,properties,value"])
def test_an_sql_condition_chooses_rows(golden, columns):
    root = golden("basic").root
    messages = oracle.log_messages(root)
    tag = next(m.tags for m in messages if m.tags and "'" not in m.tags)
    found = offsets_of(rows(root, columns=columns, sql=f"TAGS = '{tag}' AND nosuch IS NULL", batchRows="7"))
    assert found == [m.physical_offset for m in messages if m.tags == tag] and found
    assert rows(root, columns=columns, sql="nosuch > 5") == []


def test_queues_may_each_have_times_of_their_own(golden):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    times = {m.queue_id: [n.store_timestamp_ms for n in messages if (n.topic, n.queue_id) == ("Roll1", m.queue_id)]
             for m in messages if m.topic == "Roll1"}
    start, end = times[0][len(times[0]) // 3], times[1][len(times[1]) // 2]
    given = {"startingOffsetsByTimestamp": f'{{"Roll1": {{"0": {start}}}}}', "endingOffsetsByTimestamp": f'{{"Roll1": {{"1": {end}}}}}'}
    for more, topics in (({"subscribe": "Roll1"}, {"Roll1"}), ({}, {m.topic for m in messages})):
        expected = sorted(m.physical_offset for m in messages if m.topic in topics and not (
            m.topic == "Roll1" and (m.queue_id == 0 and m.store_timestamp_ms < start or m.queue_id == 1 and m.store_timestamp_ms >= end)))
        assert 0 < len(expected) < len(messages)
        for access in ("scan", "queue") if more else ("scan",):
            found = rows(root, columns="physicalOffset", access=access, maxPartitionBytes=3000, **more, **given)
            assert sorted(offsets_of(found)) == expected


@pytest.mark.parametrize("times", [{"startingTimestamp": "{}"}, {"startingOffsetsByTimestamp": '{{"Roll1": {{"1": {}}}}}'}])
def test_a_queue_that_has_nothing_of_a_time_or_later_is_an_error_if_asked(golden, times):
    root = golden("roll").root
    newest = max(m.store_timestamp_ms for m in oracle.log_messages(root) if (m.topic, m.queue_id) == ("Roll1", 1))
    def given(at_ms: int) -> dict[str, str]:
        return {"assign": '{"Roll1": [1]}', **{name: text.format(at_ms) for name, text in times.items()}}
    strict = {"startingOffsetsByTimestampStrategy": "error"}
    assert len(rows(root, columns="offset", **given(newest), **strict)) == 1
    assert rows(root, columns="offset", **given(newest + 1)) == []
    with pytest.raises(UsageError, match=f"queue Roll1/1 has no message that was stored at {newest + 1} or later"):
        rows(root, columns="offset", **given(newest + 1), **strict)


@pytest.mark.parametrize("recipe", ["basic", "delay", "tx", "lmq", "ipv6", "keyclash", "bigmsg"])
def test_headers_are_the_properties_in_their_order(golden, recipe):
    root = golden(recipe).root
    found = rows(root, columns="physicalOffset,headers", includeHeaders="true", batchRows=7)
    assert found == oracle.rows(oracle.log_messages(root), ["physicalOffset", "headers"])


def test_only_properties_are_headers(tmp_path):
    texts = ["", "A\x01b", "\x02\x02", "A\x01\x02\x01b\x02c", "K\x01v\x01w\x02K\x01ä\x02", "\x01", "x" * 300, "A\x011\x02B\x012"]
    write_log(tmp_path, [{"topic": "T", "body": b"", "properties": text} for text in texts * 3])
    found = [row[0] for row in rows(tmp_path, columns="headers", batchRows=5)]
    assert found == [oracle.headers(text) for text in texts * 3]
    assert found[3:6] == [None, [{"key": "K", "value": b"v\x01w"}, {"key": "K", "value": "ä".encode()}], None]


def test_a_topic_is_what_its_consumers_see_and_the_log_is_all_records(golden):
    root = golden("tx").root
    messages = oracle.log_messages(root)
    topics = {m.topic for m in messages}
    assert any(not queued(m) for m in messages)
    assert len(rows(root, columns="offset")) == len(messages)
    found = offsets_of(rows(root, columns="physicalOffset", subscribe=",".join(topics)))
    assert found == [m.physical_offset for m in messages if queued(m)]


def test_assigned_queues_with_offsets_read_only_the_bytes_between(golden):
    root = golden("roll").root
    given = {"path": str(root), "assign": '{"Roll1": [0]}', "startingOffsets": '{"Roll1": {"0": 10}}',
             "endingOffsets": '{"Roll1": {"0": 12}}'}
    messages = [m for m in oracle.log_messages(root) if (m.topic, m.queue_id) == ("Roll1", 0)]
    ranges = plan(read_options(given))
    assert (ranges[0].start, ranges[-1].end) == (messages[10].physical_offset,
                                                 messages[11].physical_offset + messages[11].size_bytes)


# -- what is not there any more ---------------------------------------------------------


def test_a_segment_deleted_after_the_plan_is_a_loss_or_left_out(golden):
    root = golden("roll").root
    ranges = plan(read_options({"path": str(root), "maxPartitionBytes": "16384"}))
    kept = [m.physical_offset for m in oracle.log_messages(root) if not 16384 <= m.physical_offset < 32768]
    StorePaths(root).commit_log_segment(16384).unlink()
    with pytest.raises(DataLossError, match=f"{segment_name(16384)} was deleted after the query was planned"):
        rows(root, ranges)
    assert offsets_of(rows(root, ranges, columns="physicalOffset", failOnDataLoss="false")) == kept


def test_a_segment_deleted_while_it_is_read_gives_no_further_rows(golden):
    root = golden("roll").root
    for tolerated in ("false", "true"):
        reading = batches(root, columns="physicalOffset", batchRows=2, failOnDataLoss=tolerated)
        next(reading)
        StorePaths(root).commit_log_segment(0).rename(root / "gone")
        if tolerated == "true":
            with pytest.raises(DataLossError):
                next(reading)
        else:
            assert next(reading).column(0)[0].as_py() >= 16384
        (root / "gone").rename(StorePaths(root).commit_log_segment(0))


SKIPPING = {"onCorrupt": "skip"}


@pytest.mark.parametrize(
    ("look", "first", "end", "given", "before"),
    [
        ("find_record", 2000, 4096, {}, 0),
        ("find_record", 2000, 4096, SKIPPING, 0),
        ("label", 0, 2000, {}, 2000),
        ("find_record", 0, 2000, {}, 2000),
        ("find_record", 0, 4096, SKIPPING, 1000),
    ],
)
def test_a_segment_deleted_before_any_look_at_it_is_a_loss_and_no_damage(plain, monkeypatch, look, first, end, given, before):
    """The cleaner takes its name, then its blocks: a reader that has it mapped sees zeros."""
    root, offsets = plain
    part = LogRange(first, end, SEGMENT_BYTES, SEGMENT_BYTES, SEGMENT_BYTES)
    if before == 1000:
        overwrite(root, next(at for at in offsets if at >= 1000), b"\xff" * 80)
    path = StorePaths(root).commit_log_segment(0)
    content, real = path.read_bytes(), getattr(SegmentBytes, look)

    def after_the_cleaner(*arguments):
        if path.exists():
            with open(path, "r+b") as file:
                path.unlink()
                assert punch(file.fileno(), 0, SEGMENT_BYTES) == 0
        return real(*arguments)

    monkeypatch.setattr(SegmentBytes, look, after_the_cleaner)
    kept = [at for at in offsets if first <= at < before]
    with pytest.raises(DataLossError, match=f"{segment_name(0)} was deleted after the query was planned"):
        rows(root, [part], **given)
    path.write_bytes(content)
    options = read_options({"path": str(root), "columns": "physicalOffset", "failOnDataLoss": "false", **given})
    reader = task_reader.RangeReader(options, columns := chosen_columns(options))
    schema = task_reader.arrow_schema(columns)
    assert [at for batch in reader.batches(part, schema) for at in batch.column(0).to_pylist()] == kept
    assert reader.skipped == [] and not path.exists()


@pytest.mark.parametrize(
    ("given", "sentence", "left"),
    [
        ({"startingPhysicalOffset": 0}, "the log begins at 49152 now", lambda m: True),
        ({"endingPhysicalOffset": 10**9}, "the log ends at 109043 (flushed)", lambda m: True),
    ],
)
def test_physical_offsets_outside_the_log_are_a_loss(golden, given, sentence, left):
    root = golden("cleaned").root
    with pytest.raises(DataLossError) as lost:
        rows(root, **given)
    assert sentence in str(lost.value) and "failOnDataLoss=false" in str(lost.value)
    assert rows(root, failOnDataLoss="false", **given) == rows(root)


def test_queue_offsets_outside_the_queue_are_a_loss(golden):
    root = golden("cleaned").root
    topic, queue_id = next((m.topic, m.queue_id) for m in oracle.log_messages(root))
    for name, offset in (("startingOffsets", 1), ("endingOffsets", 10**6)):
        given = {"assign": json.dumps({topic: [queue_id]}), name: json.dumps({topic: {str(queue_id): offset}})}
        with pytest.raises(DataLossError, match=f"{name} {offset}: queue {topic}/{queue_id} holds offsets"):
            rows(root, **given)
        assert rows(root, failOnDataLoss="false", **given) == rows(root, assign=given["assign"])
    with pytest.raises(UsageError, match="is after"):
        rows(root, assign=json.dumps({topic: [queue_id]}), startingOffsets=json.dumps({topic: {str(queue_id): 90}}),
             endingOffsets=json.dumps({topic: {str(queue_id): 80}}))


def test_a_file_that_is_shorter_here_is_refused(golden):
    root = golden("roll").root
    ranges = plan(read_options({"path": str(root)}))
    path = StorePaths(root).commit_log_segment(16384)
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(CorruptionError, match="has 10000 bytes here, not 16384"):
        rows(root, ranges)


@pytest.mark.parametrize("given_by", ["option", "environment"])
@pytest.mark.parametrize("given", [{}, {"subscribe": "T", "access": "queue"}])
def test_a_task_finds_the_log_in_the_folders_that_the_driver_was_told(tmp_path, monkeypatch, given, given_by):
    """The task has only its pickled options, and the file of settings, which has the other folder."""
    builder = StoreBuilder(tmp_path / "store")
    wanted = [builder.put("T", b"x" * 100).physical_offset for _ in range(100)]
    for number, path in enumerate(sorted(builder.paths.commit_log.iterdir())[:4]):
        folder = (tmp_path / "archive", builder.root / "second")[number % 2]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    config_path(builder.root).write_text('store_path_commit_log = "second,commitlog"\n')
    given, archive = {"path": str(builder.root), "columns": "physicalOffset", **given}, str(tmp_path / "archive")
    if given_by == "option":
        given["readOnlyCommitLogStorePaths"] = archive
    else:
        monkeypatch.setenv("PYENGINE_READ_ONLY_COMMIT_LOG_STORE_PATHS", archive)
    options = read_options(given)
    parts = plan(options)
    monkeypatch.delenv("PYENGINE_READ_ONLY_COMMIT_LOG_STORE_PATHS", raising=False)
    use_log_folders(builder.root, None)
    columns = chosen_columns(options)
    schema = task_reader.arrow_schema(columns)
    assert [at for part in parts for batch in task_reader.read_partition(pickle.loads(pickle.dumps(options)), columns, part, schema)
            for at in batch.column(0).to_pylist()] == wanted


def test_log_folders_are_no_options_of_a_remote_store(tmp_path):
    with pytest.raises(UsageError, match="mount them to read it"):
        read_options({"path": str(tmp_path), "fileSystem": "arrow", "storePathCommitLog": "a,b"})


def test_a_missing_segment_between_others_is_an_error(golden):
    root = golden("roll").root
    StorePaths(root).commit_log_segment(32768).unlink()
    with pytest.raises(CorruptionError, match="has a gap at 32768"):
        rows(root)


# -- damage, and bodies that imitate records --------------------------------------------


@pytest.fixture
def plain(tmp_path):
    """(root, offsets) of a log of forty records in several segments."""
    root = tmp_path / "store"
    offsets = write_log(root, [{"topic": "T", "body": bytes([65 + n % 26]) * (50 + 7 * n), "queue_offset": n,
                                "store_timestamp_ms": 1_700_000_000_000 + n} for n in range(40)])
    return root, offsets


CUTS = (64, 150, 333, 1000, 2048, SEGMENT_BYTES, 3 * SEGMENT_BYTES)


def overwrite(root, offset: int, data: bytes) -> None:
    path = StorePaths(root).commit_log_segment(offset - offset % SEGMENT_BYTES)
    with open(path, "r+b") as file:
        file.seek(offset % SEGMENT_BYTES)
        file.write(data)


@pytest.mark.parametrize(("field", "number"), [
    ("size", 17), ("magic", 17), ("offset", 17), ("all", 17), ("large size", 17), ("large size", 37), ("large size", 38)])
@pytest.mark.parametrize("most", CUTS)
def test_a_damaged_record_fails_the_read_or_is_skipped_alone(plain, most, field, number):
    root, offsets = plain
    size, limit = SEGMENT_BYTES, end_of(root)
    victim = offsets[number]
    at, data = {"size": (0, b"\0\0\0\1"), "large size": (0, b"\x40"),
                "magic": (4, b"\1\1\1\1"), "offset": (28, b"\xff" * 8), "all": (0, b"\xff" * 80)}[field]
    overwrite(root, victim + at, data)
    ranges = cut(0, limit, limit, size, most)
    with pytest.raises(CorruptionError, match=f"damaged (at|after the record at) ({victim}|{offsets[number - 1]})"):
        rows(root, ranges)
    options = read_options({"path": str(root), "columns": "physicalOffset", "onCorrupt": "skip"})
    reader = task_reader.RangeReader(options, columns := chosen_columns(options))
    schema = task_reader.arrow_schema(columns)
    assert [at for part in ranges for batch in reader.batches(part, schema) for at in batch.column(0).to_pylist()] == [
        o for o in offsets if o != victim]
    assert [(one.offset, one.length) for one in reader.skipped] == [(victim, offsets[number + 1] - victim)]


@pytest.mark.parametrize("most", CUTS)
def test_a_damaged_body_is_found_by_its_checksum_only(plain, most):
    root, offsets = plain
    limit = end_of(root)
    overwrite(root, offsets[17] + 95, b"!")
    ranges = cut(0, limit, limit, SEGMENT_BYTES, most)
    assert offsets_of(rows(root, ranges, columns="physicalOffset")) == offsets
    with pytest.raises(CorruptionError, match=f"damaged at {offsets[17]}: bad crc"):
        rows(root, ranges, verifyCRC="true")
    found = offsets_of(rows(root, ranges, columns="physicalOffset", verifyCRC="true", onCorrupt="skip"))
    assert found == [o for o in offsets if o != offsets[17]]


@pytest.mark.parametrize("most", CUTS)
def test_records_in_bodies_are_bodies(tmp_path, most):
    root = tmp_path / "store"
    copied = encode_record(topic="T", body=b"not a record of this place", physical_offset=10**6) * 4
    offsets = write_log(root, [{"topic": "T", "body": copied} for _ in range(20)])
    limit = end_of(root)
    assert offsets_of(rows(root, cut(0, limit, limit, SEGMENT_BYTES, most), columns="physicalOffset")) == offsets


def test_a_body_that_imitates_a_record_of_its_very_place_never_gives_rows(tmp_path):
    def imitation(offset: int) -> bytes:
        body, at = b"", offset + 88
        for _ in range(6):
            record = encode_record(topic="FAKE", body=b"x" * 40, physical_offset=at)
            body, at = body + record, at + len(record)
        return body

    root = tmp_path / "store"
    offsets = write_log(root, [{"topic": "T", "body": imitation if n % 3 else b"y" * 200} for n in range(20)])
    limit = end_of(root)
    outcomes = set()
    for most in range(64, SEGMENT_BYTES, 61):
        try:
            assert offsets_of(rows(root, cut(0, limit, limit, SEGMENT_BYTES, most), columns="physicalOffset")) == offsets
            outcomes.add("right")
        except CorruptionError as error:
            assert "looks like a record of its own" in str(error) and "maxPartitionBytes" in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes
    assert offsets_of(rows(root, columns="physicalOffset", maxPartitionBytes=SEGMENT_BYTES)) == offsets


def test_times_beyond_what_pandas_can_hold_come_as_the_nearest(tmp_path):
    root = tmp_path / "store"
    write_log(root, [{"topic": "T", "body": b"", "store_timestamp_ms": 1, "born_timestamp_ms": (1 << 62)}])
    [batch] = batches(root, columns="bornTimestamp,timestamp")
    assert batch.column(0)[0].as_py() == datetime.datetime(2262, 4, 10, tzinfo=datetime.UTC)
    assert batch.column(1)[0].as_py() == datetime.datetime(1970, 1, 1, 0, 0, 0, 1000, datetime.UTC)


def test_a_running_engines_counter_is_the_limit(make_owner):
    owner = make_owner()
    offsets = write_log(owner.root, [{"topic": "T", "body": b"z" * 100} for _ in range(10)], 65536)
    for name, value in (("wrote", offsets[9]), ("committed", offsets[7]), ("flushed", offsets[4])):
        from pyengine.native import control as native

        native.store_position(getattr(owner.control, name), value)
    owner.publish()
    for level, count in (("flushed", 4), ("committed", 7), ("written", 9)):
        assert offsets_of(rows(owner.root, columns="physicalOffset", readLevel=level)) == offsets[:count]
    with pytest.raises(UsageError, match="nothing is replicated"):
        rows(owner.root, readLevel="replicated")


# -- compressed bodies --------------------------------------------------------------------


def frame(kind: str, text: bytes) -> bytes:
    """As a stream, which does not say its length: as RocketMQ's clients write it."""
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, kind) as stream:
        stream.write(text)
    return out.getvalue().to_pybytes()


TEXTS = [b"plain", b"zlib " * 500, b"", b"lz4 " * 700, b"zstd " * 900, b"zlib named", b"\x78\x9c looks like zlib"]
STORED = [(TEXTS[0], 0), (zlib.compress(TEXTS[1]), 0x1), (zlib.compress(TEXTS[2]), 0x1), (frame("lz4", TEXTS[3]), 0x101),
          (frame("zstd", TEXTS[4]), 0x201), (zlib.compress(TEXTS[5], 9), 0x301), (TEXTS[6], 0x300)]


@pytest.fixture
def compressed(tmp_path) -> StoreBuilder:
    builder = StoreBuilder(tmp_path / "store", replace(SMALL, mapped_file_size_commit_log_bytes=SEGMENT_BYTES * 4))
    for number, (body, sys_flag) in enumerate(STORED * 3):
        builder.put("T", body, sys_flag=sys_flag, properties={"n": str(number)})
    return builder


@pytest.mark.parametrize("given", [{}, {"subscribe": "T", "access": "queue"}, {"batchRows": 2}], ids=["scan", "queue", "small batches"])
def test_bodies_are_what_the_producers_had_whatever_compressed_them(compressed, given, monkeypatch):
    for most in (1 << 20, 3000, 1):
        monkeypatch.setattr("pyengine.storage.arrow.DECOMPRESSED_BATCH_BYTES", most)
        found = rows(compressed.root, columns="offset,value,body,bodySize", **given)
        assert found == [(at, text, text, len(STORED[at % 7][0])) for at, text in enumerate(TEXTS * 3)]
        sizes = [len(b) for b in batches(compressed.root, columns="value", **given)]
        assert sum(sizes) == 21 and (most > 3000 or len(sizes) > 3)
    assert rows(compressed.root, columns="value", decompress="false", **given) == [(body,) for body, _ in STORED * 3]
    chosen = rows(compressed.root, columns="value,property.n", sql="n in ('1', '10', '12')", **given)
    assert chosen == [(TEXTS[1], "1"), (TEXTS[3], "10"), (TEXTS[5], "12")]


@pytest.mark.parametrize(("body", "sys_flag", "why"), [
    (b"no stream", 0x1, "not a valid zlib stream"), (b"no frame", 0x101, "not a valid LZ4 frame"),
    (b"no frame", 0x201, "not a valid ZSTD frame"),
    (frame("zstd", TEXTS[4])[:-3], 0x201, "is not a valid ZSTD frame"), (zlib.compress(TEXTS[1])[:-3], 0x1, "ends within"),
    (b"unknown", 0x701, "compression 7")], ids=["zlib", "lz4", "zstd", "short zstd", "short zlib", "unknown"])
def test_a_body_that_cannot_be_decompressed_is_an_error_or_is_skipped(compressed, body, sys_flag, why):
    bad = compressed.put("T", body, sys_flag=sys_flag)
    compressed.put("T", b"after")
    with pytest.raises(CorruptionError, match=f"the message at {bad.physical_offset} cannot be decompressed: .*{why}.*decompress=false"):
        rows(compressed.root, columns="value")
    assert rows(compressed.root, columns="offset,value", onCorrupt="skip")[20:] == [(20, TEXTS[6]), (22, b"after")]
    assert rows(compressed.root, columns="offset,value", decompress="false")[21:] == [(21, body), (22, b"after")]
    assert len(rows(compressed.root, columns="offset")) == 23
