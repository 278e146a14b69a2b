"""Stores on other file systems, read by ranges: the rows are those of a mapped read, and nothing is read twice or whole."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from damage import flip
from fix_golden import RECIPES, usual
from fix_store_builder import SMALL, StoreBuilder
from pyengine.errors import CorruptionError, NotAStoreError, StoreRefusedError, UsageError
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.spark import file_access, remote_store, stream
from pyengine.spark.file_access import open_tree, uri_of
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError, cut
from pyengine.spark.plan import plan
from pyengine.spark.schema import all_names
from pyengine.spark.stream_offsets import without_mark
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark, note_sync_failure
from record_bytes import encode_record
from spark import oracle, ranged
from spark.logs import DAMAGED_END, SEGMENT_BYTES, allowing, end_of, rows, stream_reader, streamed, to_the_end, view_of, write_log

RANGED = "spark.ranged:make"
REFUSED = {"abnormal-shortfile"}
FETCH, LOOK = 5000, 700


@pytest.fixture
def small_windows(monkeypatch):
    """Windows so small that golden stores take many, and records reach over their ends."""
    monkeypatch.setattr(file_access, "FETCH_BYTES", FETCH)
    monkeypatch.setattr(file_access, "RECORD_PROBE_BYTES", LOOK)
    monkeypatch.setattr(file_access, "TAIL_PROBE_BYTES", LOOK)


@pytest.fixture
def reads():
    ranged.READS.all.clear()
    return ranged.READS


def read_plan(root, **given):
    return plan(read_options({"path": str(root), **{name: str(value) for name, value in given.items()}}))


@pytest.mark.parametrize("recipe", usual(sorted(set(RECIPES) - REFUSED - DAMAGED_END)))
def test_a_golden_store_reads_as_one_that_is_mapped(golden, recipe, small_windows, monkeypatch):
    root = golden(recipe).root
    end = end_of(root)
    monkeypatch.setattr(file_access, "FETCH_BYTES", max(FETCH, end // 40))
    level = "committed" if (root / "abort").exists() else "flushed"
    for given in ({"verifyCRC": True}, {"maxPartitionBytes": end // 17 + 1, "batchRows": 7}):
        wanted = rows(root, columns="*", **given, **allowing(recipe))
        assert rows(root, columns="*", fileSystem=RANGED, readLevel=level, **given, **allowing(recipe)) == wanted
    assert wanted == oracle.rows(oracle.log_messages(root), all_names())


@pytest.mark.parametrize("recipe", sorted(REFUSED))
def test_a_store_with_segments_of_several_lengths_is_refused(golden, recipe):
    with pytest.raises(StoreRefusedError, match="must have one length"):
        read_plan(golden(recipe).root, fileSystem=RANGED)


def test_only_the_ranges_of_a_partition_are_read(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(file_access, "FETCH_BYTES", 64 << 10)
    monkeypatch.setattr(file_access, "RECORD_PROBE_BYTES", 2 << 10)
    monkeypatch.setattr(file_access, "TAIL_PROBE_BYTES", 2 << 10)
    segment, count = 1 << 20, 5
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 900}] * (count * 1000), segment)
    assert offsets[-1] > (count - 1) * segment
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, offsets[-1]))
    parts = read_plan(tmp_path, fileSystem=RANGED, maxPartitionBytes=segment // 4)
    assert reads.bytes_of("commitlog") < segment, "the log's end is looked for from the watermark on"
    for part in parts:
        reads.all.clear()
        assert rows(tmp_path, [part], columns="physicalOffset", fileSystem=RANGED) == [
            (offset,) for offset in offsets if part.start <= offset < part.end and offset < part.limit]
        assert max(length for *_, length in reads.all) <= 64 << 10
        assert reads.bytes_of("") <= part.log_bytes + (16 << 10), "a partition reads itself, and looks over its boundary"
        spans = sorted((at, at + length) for _, at, length in reads.all)
        assert sum(max(0, a_end - b) for (_, a_end), (b, _) in itertools.pairwise(spans)) <= 4 << 10


def test_what_is_replicated_and_the_cut_may_end_anywhere(golden, small_windows, seed):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    end, chosen = end_of(root), random.Random(seed)
    for _ in range(60):
        limit = chosen.randrange(1, end)
        ranges = cut(chosen.randrange(0, limit), limit, limit, 16384, chosen.randrange(300, 20_000))
        wanted = [(m.physical_offset,) for m in messages
                  if m.physical_offset >= ranges[0].start and m.physical_offset + m.size_bytes <= limit]
        assert rows(root, ranges, columns="physicalOffset", fileSystem="arrow", readLevel="replicated") == wanted


def test_topics_tags_and_times_choose_rows_over_a_file_system(golden, small_windows):
    root = golden("basic").root
    messages = oracle.log_messages(root)
    tag, topic = next((m.tags, m.topic) for m in messages if m.tags)
    times = sorted({m.store_timestamp_ms for m in messages})
    for given in ({"subscribe": topic}, {"tags": tag}, {"startingTimestamp": times[len(times) // 2]},
                  {"subscribe": topic, "startingOffsets": f'{{"{topic}": {{"0": 1}}}}', "failOnDataLoss": False}):
        found = rows(root, columns="physicalOffset,value", fileSystem="arrow", **given)
        assert found == rows(root, columns="physicalOffset,value", **given) and 0 < len(found) < len(messages)


def test_damage_fails_the_read_or_is_skipped_as_in_a_mapped_one(golden, small_windows):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    for at in (20, 70, 71):
        start = messages[at].physical_offset - messages[at].physical_offset % 16384
        flip(StorePaths(root).commit_log_segment(start), messages[at].physical_offset - start + 4)
    end = messages[-1].physical_offset + messages[-1].size_bytes
    for most in (3000, 1 << 20):
        ranges = cut(0, end, end, 16384, most)
        with pytest.raises(CorruptionError, match=f"damaged at {messages[20].physical_offset}: foreign"):
            rows(root, ranges, fileSystem="arrow")
        wanted = rows(root, ranges, columns="physicalOffset", onCorrupt="skip")
        assert len(wanted) == len(messages) - 3
        assert rows(root, ranges, columns="physicalOffset", onCorrupt="skip", fileSystem="arrow") == wanted


def test_a_body_made_to_look_like_a_record_is_never_a_row(tmp_path, small_windows):
    def evil(offset: int) -> bytes:
        at = offset + 88 + 500  # the body's place in a record of IPv4 hosts, and some way in
        inner = encode_record(topic="E", body=b"evil", physical_offset=at)
        return (b"\0" * 500 + inner).ljust(1800, b"\0")

    offsets = write_log(tmp_path, [{"topic": "T", "body": evil if n % 3 == 1 else b"x" * 300} for n in range(12)])
    limit = end_of(tmp_path)
    outcomes = set()
    for most in range(64, SEGMENT_BYTES, 61):
        try:
            ranges = cut(0, limit, limit, SEGMENT_BYTES, most)
            assert rows(tmp_path, ranges, columns="physicalOffset", fileSystem="arrow") == [(offset,) for offset in offsets]
            outcomes.add("right")
        except CorruptionError as error:
            assert "looks like a record of its own" in str(error)
            outcomes.add("refused")
    assert outcomes == {"right", "refused"}


def test_a_remote_read_reports_shortened_deleted_and_absent_files(golden):
    root = golden("roll").root
    ranges = read_plan(root, fileSystem="arrow", maxPartitionBytes=16384)
    second = StorePaths(root).commit_log_segment(16384)
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match="has 16383 bytes here, not 16384"):
        rows(root, ranges, fileSystem="arrow")
    second.unlink()
    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        rows(root, ranges, fileSystem="arrow")
    kept = [(m.physical_offset,) for m in oracle.log_messages(root) if not 16384 <= m.physical_offset < 32768]
    assert rows(root, ranges, columns="physicalOffset", fileSystem="arrow", failOnDataLoss=False) == kept
    with pytest.raises(DataLossError, match="has a gap at 16384"):
        read_plan(root, fileSystem="arrow")
    with pytest.raises(NotAStoreError):
        read_plan(root / "nothing", fileSystem="arrow")
    (root / "empty" / "commitlog").mkdir(parents=True)
    assert read_plan(root / "empty", fileSystem="arrow") == []


def test_a_failed_sync_makes_the_level_flushed_unknown_without_a_watermark(tmp_path):
    """As for a reader on the store's own host that cannot sync the log itself."""
    write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 30)
    end = end_of(tmp_path)
    assert read_plan(tmp_path, fileSystem="arrow")[-1].limit == end
    note_sync_failure(tmp_path, 0, "the log", "EIO")
    with pytest.raises(UsageError, match="or its last sync failed"):
        read_plan(tmp_path, fileSystem="arrow")
    assert read_plan(tmp_path, fileSystem="arrow", readLevel="committed")[-1].limit == end


def test_a_flushed_read_ends_at_the_watermark_or_without_one_at_the_end_of_a_stopped_log(tmp_path):
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 30)
    end = end_of(tmp_path)
    assert read_plan(tmp_path, fileSystem="arrow")[-1].limit == end
    (tmp_path / "abort").touch()
    with pytest.raises(UsageError, match="choose committed"):
        read_plan(tmp_path, fileSystem="arrow")
    assert read_plan(tmp_path, fileSystem="arrow", readLevel="committed")[-1].limit == end
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, offsets[20]))
    assert read_plan(tmp_path, fileSystem="arrow")[-1].limit == offsets[20]
    (tmp_path / "abort").unlink()
    assert read_plan(tmp_path, fileSystem="arrow")[-1].limit == offsets[20]
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, offsets[20] + 5))  # in a record: looked at from its segment on
    assert read_plan(tmp_path, fileSystem="arrow", readLevel="written")[-1].limit == end
    with pytest.raises(UsageError, match="replicated"):
        read_plan(tmp_path, fileSystem="arrow", readLevel="replicated")


def test_a_uri_is_resolved_and_an_unknown_scheme_or_file_system_is_refused(tmp_path, monkeypatch):
    write_log(tmp_path / "a store", [{"topic": "T", "body": b"x"}] * 3)
    monkeypatch.setattr(ranged, "SUBTREE", str(tmp_path))
    for path, system in ((f"file://{tmp_path}/a store", "arrow"), (str(tmp_path / "a store"), "pyarrow.fs:LocalFileSystem"),
                         ("a store", "spark.ranged:subtree")):
        assert len(rows(path, fileSystem=system, columns="offset")) == 3
    assert [uri_of(f"{scheme}://bucket/s3a://x") for scheme in ("s3a", "S3N", "s3", "gs")] == [
        f"{scheme}://bucket/s3a://x" for scheme in ("s3", "s3", "s3", "gs")]
    with pytest.raises(UsageError, match="no file system for it"):
        open_tree("nosuch://host/store", "auto")
    for system, sentence in (("nosuch.module:make", "nosuch"), ("os:nothing", "nothing"), ("os:sep", "not a file system")):
        with pytest.raises(UsageError, match=sentence):
            open_tree("/x", system)


def test_a_file_system_that_cannot_be_reached_is_a_sentence_at_once(monkeypatch):
    with pytest.raises(UsageError, match="^hdfs://localhost:1/store cannot be reached [(].*[)]: pyarrow reads HDFS with Hadoop's"):
        read_plan("hdfs://localhost:1/store")

    def fails(path: str, file_system: str):
        raise OSError("When resolving region for bucket 'b': no network\nstack")

    monkeypatch.setattr(file_access, "open_tree", fails)
    with pytest.raises(UsageError, match="^s3a://b/store cannot be reached [(]When .* no network[)]: look at the bucket's name") as refused:
        read_plan("s3a://b/store")
    assert "stack" not in str(refused.value)
    over = threading.Event()
    monkeypatch.setattr(file_access, "open_tree", lambda *_: over.wait(60))
    monkeypatch.setattr(file_access, "REACH_TIMEOUT_S", 0.01)
    with pytest.raises(UsageError, match="^gs://b/store cannot be reached [(]no answer within 0.01 s[)]: look at its name"):
        read_plan("gs://b/store")
    over.set()


def test_fsspec_file_systems_serve_too():
    import fsspec

    memory = fsspec.filesystem("memory")
    record = encode_record(topic="T", body=b"x" * 100, physical_offset=0)
    memory.pipe_file("/fsspec-store/commitlog/00000000000000000000", record.ljust(4096, b"\0"))
    assert rows("memory://fsspec-store", columns="topic,value") == [("T", b"x" * 100)]


@pytest.mark.parametrize("path", ["bucket/named", "/bucket/named/", "memory://bucket/named"])
def test_a_named_fsspec_file_system_takes_a_path_in_any_form(path):
    import fsspec

    memory = fsspec.filesystem("memory")
    record = encode_record(topic="T", body=b"x" * 100, physical_offset=0)
    memory.pipe_file("/bucket/named/commitlog/00000000000000000000", record.ljust(4096, b"\0"))
    memory.pipe_file("/bucket/named/consumequeue/T/0/00000000000000000000", b"q")
    named = "fsspec.implementations.memory:MemoryFileSystem"
    assert rows(path, columns="topic,value", fileSystem=named) == [("T", b"x" * 100)]
    tree = file_access.open_tree(path, named)
    assert sorted(tree.entries("")) == ["commitlog", "consumequeue"]
    assert list(tree.files("consumequeue", recursive=True)) == ["T/0/00000000000000000000"]


def test_a_growing_copy_is_followed_where_fsspec_keeps_its_listings(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    builder = StoreBuilder(tmp_path / "store")
    put(builder, 20)
    reader = stream_reader(builder.root, fileSystem="spark.ranged:make_listing")
    found, at = to_the_end(reader, reader.initialOffset())
    put(builder, 60)
    assert len(found) == 20 and len(to_the_end(reader, at)[0]) == 60
    reader.stop()


def test_a_log_in_several_folders_is_refused(tmp_path):
    write_log(tmp_path, [{"topic": "T", "body": b"x"}])
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "engine.toml").write_text('store_path_commit_log = "commitlog,/mnt/other"\n')
    with pytest.raises(UsageError, match="is in other folders"):
        read_plan(tmp_path, fileSystem="arrow")


@pytest.mark.ci
@pytest.mark.parametrize("recipe", usual(sorted(set(RECIPES) - REFUSED - DAMAGED_END)))
def test_the_queues_of_a_golden_store_read_as_those_that_are_mapped(golden, recipe, small_windows, monkeypatch):
    """access=queue, both queue views, and streams of either kind."""
    monkeypatch.setattr(file_access, "BLOCK_BYTES", 400)
    monkeypatch.setattr(file_access, "GAP_BYTES", 500)
    root = golden(recipe).root
    level = {"readLevel": "committed"} if (root / "abort").exists() else {}
    far = {"fileSystem": RANGED}
    chosen = {"columns": "*", "subscribePattern": ".*", "allowMissing": True, **level, **allowing(recipe)}
    if not level:
        queued = sorted(rows(root, access="queue", **chosen), key=repr)
        assert sorted(rows(root, access="queue", **chosen, **far), key=repr) == queued
        assert sorted(rows(root, access="queue", maxPartitionBytes=2000, batchRows=3, **chosen, **far), key=repr) == queued
    else:
        with pytest.raises(UsageError, match="the store was not stopped in order|has no queues"):
            rows(root, access="queue", **chosen, **far)
    shared = {"failOnDataLoss": False, **level}
    for view in ("queue", "entries", "groups"):
        assert view_of(root, view, **shared, **far) == view_of(root, view, **shared)
    for given in ({"columns": "*", **level, **allowing(recipe)}, chosen):
        if given is chosen and not any((root / "consumequeue").glob("*/*/*")):
            with pytest.raises(UsageError, match="has no queues"):
                streamed(root, **given, **far)
        else:
            assert sorted(streamed(root, **given, **far), key=repr) == sorted(streamed(root, **given), key=repr)


def put(builder, count: int) -> int:
    """Messages of two topics; where the log ends then."""
    for number in range(count):
        builder.put("AB"[number % 2], b"%06d" % number * 20, queue_id=number % 3 // 2)
    return builder.end


def copy(builder, to: Path, *what: str) -> None:
    """Bring a copy of the store up to date, in the order that docs/spark.md gives."""
    for name in what or ("consumequeue", "commitlog", "config"):
        for path in sorted((builder.root / name).rglob("*")):
            place = to / path.relative_to(builder.root)
            if path.is_file() and not (place.exists() and place.read_bytes() == path.read_bytes()):
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)


def messages(root: Path) -> list[tuple]:
    return sorted(rows(root, columns="physicalOffset,value"))


@pytest.mark.parametrize("given", [{}, {"subscribePattern": "[AB]"}], ids=["log", "queues"])
def test_a_stream_follows_a_copy_that_is_brought_up_to_date_up_to_its_watermark(tmp_path, monkeypatch, small_windows, given):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    builder, far = StoreBuilder(tmp_path / "store"), tmp_path / "copy"
    first = put(builder, 20)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, first))
    put(builder, 9)
    copy(builder, far)
    reader = stream_reader(far, fileSystem=RANGED, columns="physicalOffset,value", **given)
    found, at = to_the_end(reader, reader.initialOffset())
    assert len(found) == 20, "what lies beyond the watermark is not claimed"
    assert sorted(found) == [row for row in messages(far) if row[0] < first]
    end = put(builder, 40)
    copy(builder, far, "commitlog", "consumequeue")
    assert to_the_end(reader, at) == ([], at)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, end))
    copy(builder, far, "config")
    more, at = to_the_end(reader, at)
    assert sorted(found + more) == messages(builder.root) and len(found + more) == 69
    put(builder, 3)  # what an interrupted copy leaves: the watermark is ahead of the log
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    copy(builder, far, "config")
    assert to_the_end(reader, at) == ([], at)
    copy(builder, far, "commitlog", "consumequeue")
    assert len(to_the_end(reader, at)[0]) == 3
    reader.stop()


def test_a_brokers_copy_has_to_be_of_an_orderly_stop_or_is_read_as_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    builder = StoreBuilder(tmp_path)
    put(builder, 20)
    for given in ({}, {"subscribe": "A"}):
        (tmp_path / "abort").touch()
        with pytest.raises(UsageError, match="choose committed"):
            streamed(tmp_path, fileSystem=RANGED, **given)
        count = 10 if given else 20
        assert len(streamed(tmp_path, fileSystem=RANGED, readLevel="committed", **given)) == count
        (tmp_path / "abort").unlink()
        assert len(streamed(tmp_path, fileSystem=RANGED, **given)) == count


def test_a_file_that_is_being_copied_is_passed_over_or_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    builder = StoreBuilder(tmp_path)
    put(builder, 20)
    for folder in (tmp_path / "commitlog", tmp_path / "consumequeue" / "A" / "0"):
        (folder / f".{segment_name(9 * 4096)}.X1").write_bytes(b"part")
    assert len(rows(tmp_path, fileSystem=RANGED, subscribe="A", access="queue")) == 10
    reader = stream_reader(tmp_path, fileSystem=RANGED)
    found, at = to_the_end(reader, reader.initialOffset())
    half = builder.segment(builder.end - builder.end % 4096 + 4096)
    half.write_bytes(b"half")
    assert to_the_end(reader, at) == ([], at)
    half.unlink()
    put(builder, 7)
    assert len(found) == 20 and len(to_the_end(reader, at)[0]) == 7
    reader.stop()


@pytest.mark.parametrize("given", [{}, {"subscribe": "A,B"}], ids=["log", "queues"])
def test_a_remote_stream_raises_data_loss_for_a_deleted_segment_and_an_older_copy(tmp_path, monkeypatch, small_windows, given):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    monkeypatch.setattr(stream, "TIMEOUT_S", 0)
    builder = StoreBuilder(tmp_path / "store")
    put(builder, 60)
    whole = builder.end
    WATERMARK.write(builder.root, DurableWatermark("u", 1, whole))
    strict = stream_reader(builder.root, fileSystem=RANGED, columns="physicalOffset,value", **given)
    lenient = stream_reader(builder.root, fileSystem=RANGED, columns="physicalOffset,value", failOnDataLoss=False, **given)
    begin = strict.initialOffset()
    everything, end = to_the_end(strict, begin)
    assert lenient.initialOffset() == begin
    builder.segment(0).unlink()
    for reader in (strict, lenient):
        reader.reportLatestOffset()  # it looks again
    with pytest.raises(DataLossError, match="begins at .* now, the stream had read up to 0"):
        strict.partitions(begin, end)
    kept = sorted(row for row in everything if row[0] >= 4096)
    assert sorted(to_the_end(lenient, begin)[0]) == kept and 0 < len(kept) < 60
    WATERMARK.write(builder.root, DurableWatermark("u", 1, 5000))  # an older copy in its place
    with pytest.raises(DataLossError, match="what it had read is gone"):
        strict.latestOffset(end, strict.getDefaultReadLimit())


@pytest.mark.parametrize("given", [{}, {"subscribe": "A,B"}], ids=["log", "queues"])
def test_a_segment_that_is_deleted_just_after_the_list_is_data_loss_and_not_another_log(tmp_path, monkeypatch, given):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 1e9)
    builder = StoreBuilder(tmp_path / "store")
    put(builder, 60)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    first, strict, lenient = (stream_reader(builder.root, fileSystem=RANGED, columns="physicalOffset", failOnDataLoss=flag, **given)
                              for flag in (True, True, False))
    begin = first.initialOffset()
    end = first.latestOffset(begin, first.getDefaultReadLimit())
    for reader in (strict, lenient):
        reader.reportLatestOffset()
    builder.segment(0).unlink()
    with pytest.raises(DataLossError, match="begins at .* now, the stream had read up to"):
        strict.partitions(begin, end)
    assert min(to_the_end(lenient, end)[0]) >= (4096,)
    for reader in (first, strict, lenient):
        reader.stop()


def test_a_store_is_looked_at_once_in_an_interval_and_only_what_has_changed_is_fetched(tmp_path, monkeypatch, reads):
    builder = StoreBuilder(tmp_path)
    put(builder, 30)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    reader = stream_reader(tmp_path, fileSystem=RANGED, subscribe="A")
    at = to_the_end(reader, reader.initialOffset())[1]
    put(builder, 30)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 1e9)
    reads.all.clear()
    at = without_mark(at)
    assert reader.reportLatestOffset() == at and reads.all == []
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    following = reader.reportLatestOffset()
    assert following != at
    for path in tmp_path.rglob("*"):  # times as of a file system that knows seconds: nothing shows the change
        os.utime(path, ns=(0, time.time_ns() // 10**9 * 10**9))
    reader.reportLatestOffset()
    put(builder, 30)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    for path in tmp_path.rglob("*"):
        os.utime(path, ns=(0, time.time_ns() // 10**9 * 10**9))
    assert reader.reportLatestOffset() not in (at, following)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 1))
    reader.reportLatestOffset()
    reads.all.clear()
    assert reader.reportLatestOffset() != at
    assert {os.path.basename(path) for path, *_ in reads.all} == {segment_name(builder.end - builder.end % 4096)}, "the log's end alone"
    reader.stop()


def test_a_look_at_a_log_that_has_not_changed_is_a_glance(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(remote_store, "REFRESH_INTERVAL_S", 0)
    builder = StoreBuilder(tmp_path, replace(SMALL, mapped_file_size_commit_log_bytes=4 << 20))
    put(builder, 20)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    reader = stream_reader(tmp_path, fileSystem=RANGED, maxOffsetsPerTrigger=10**9)
    reader.initialOffset()
    reads.all.clear()
    assert reader.reportLatestOffset() == {"physicalOffset": builder.end}
    assert reads.bytes_of("commitlog") == file_access.TAIL_PROBE_BYTES
    for _ in range(100):
        builder.put("T", b"x" * 20_000)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    assert reader.reportLatestOffset() == {"physicalOffset": builder.end}
    reader.stop()


def test_a_few_entries_of_a_long_queue_are_a_few_blocks_and_near_records_one_range(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(file_access, "GAP_BYTES", 64 << 10)
    geometry = replace(SMALL, mapped_file_size_commit_log_bytes=4 << 20, mapped_file_size_consume_queue_bytes=6_000_000)
    builder = StoreBuilder(tmp_path, geometry)
    offsets = []
    for number in range(4000):
        builder.put("rare" if number % 1000 < 2 else "T", b"x" * 900, dispatch=number % 1000 < 2)
        offsets.append(builder.end)
    WATERMARK.write(tmp_path, DurableWatermark("u", 1, builder.end))
    queued = {"columns": "offset,value", "subscribe": "rare", "access": "queue"}
    reads.all.clear()
    parts = read_plan(tmp_path, fileSystem=RANGED, **queued)
    assert 0 < reads.bytes_of("consumequeue") <= 2 * file_access.BLOCK_BYTES
    reads.all.clear()
    assert [row[0] for row in rows(tmp_path, parts, fileSystem=RANGED, **queued)] == list(range(8))
    assert reads.bytes_of("consumequeue") == 8 * 20
    ranges = [length for path, _, length in reads.all if "commitlog" in path]
    assert len(ranges) == 4 and sum(ranges) < 8 * 1200, "messages that follow each other are fetched together, no others"


def test_wrong_entries_are_found_in_windows_as_in_a_mapping(tmp_path, small_windows, seed, monkeypatch):
    monkeypatch.setattr(file_access, "GAP_BYTES", 300)
    chosen = random.Random(seed)
    queued = {"columns": "offset,physicalOffset,value", "subscribe": "A,B", "access": "queue"}
    for number in range(20):
        root = tmp_path / str(number)
        builder = StoreBuilder(root)
        put(builder, 60)
        for path in chosen.sample(sorted((root / "consumequeue").glob("*/*/*")), 2):
            data = bytearray(path.read_bytes())
            data[20 * chosen.randrange(5) + chosen.choice((7, 11, *range(12, 20)))] ^= 1 << chosen.randrange(8)  # offset, size or tag
            path.write_bytes(data)
        told = []
        for far in ({}, {"fileSystem": RANGED}):
            given = {**queued, **far, "failOnDataLoss": False}
            try:
                told.append(rows(root, **given))
            except CorruptionError as error:
                told.append(str(error).replace("torn", "overrun"))  # a window ends where the entry says
            told.append(sorted(rows(root, onCorrupt="skip", **given)))
        assert told[:2] == told[2:]


def test_a_copy_of_the_log_alone_is_scanned_and_what_needs_queues_is_refused(tmp_path):
    offsets = write_log(tmp_path, [{"topic": "T", "body": b"x" * 300}] * 30)
    far = {"fileSystem": RANGED, "subscribe": "T"}
    assert len(rows(tmp_path, **far)) == len(streamed(tmp_path, fileSystem=RANGED)) == len(offsets)
    with pytest.raises(UsageError, match="access=queue: the copy of the log has no queues"):
        rows(tmp_path, access="queue", **far)
    with pytest.raises(UsageError, match="has no queues .*, so it cannot be checked"):
        rows(tmp_path, startingOffsets='{"T": {"0": 5}}', **far)
    with pytest.raises(UsageError, match="has no queues .*, by which a stream of topics goes"):
        streamed(tmp_path, **far)
    assert view_of(tmp_path, "queue", fileSystem=RANGED) == []
    with pytest.raises(UsageError, match="give auto, arrow, or module:name"):
        read_options({"path": "/store", "fileSystem": "s3"})


def test_offsets_and_times_of_queues_are_checked_and_found_over_a_file_system(tmp_path, small_windows):
    builder = StoreBuilder(tmp_path)
    put(builder, 60)
    for given in ({"assign": '{"A": [0]}', "startingOffsets": '{"A": {"0": 3}}', "endingOffsets": '{"A": {"0": 9}}'},
                  {"subscribe": "A", "startingTimestamp": builder.now_ms - 20_000, "startingOffsetsByTimestampStrategy": "error"}):
        found = rows(tmp_path, columns="*", fileSystem=RANGED, **given)
        assert found == rows(tmp_path, columns="*", **given) and 0 < len(found) < 30
    with pytest.raises(DataLossError, match="startingOffsets 99: queue A/0 holds offsets 0 to "):
        rows(tmp_path, fileSystem=RANGED, subscribe="A", startingOffsets='{"A": {"0": 99}}')
    with pytest.raises(UsageError, match="has no message that was stored at"):
        rows(tmp_path, fileSystem=RANGED, subscribe="A", startingTimestamp=builder.now_ms + 1, startingOffsetsByTimestampStrategy="error")
    times = {"startingTimestamp": str(builder.now_ms - 20_000)}
    for given in ({"subscribe": "A,B"}, {}):
        assert sorted(streamed(tmp_path, fileSystem=RANGED, **times, **given)) == sorted(streamed(tmp_path, **times, **given))


def test_a_lost_log_end_in_a_copy_of_a_broker_store_is_found_by_its_queues(tmp_path):
    builder = StoreBuilder(tmp_path)
    put(builder, 60)
    builder.segment(builder.end).unlink()
    with pytest.raises(DataLossError) as local:
        rows(tmp_path, columns="offset")
    with pytest.raises(DataLossError) as far:
        rows(tmp_path, columns="offset", fileSystem=RANGED)
    assert str(far.value) == str(local.value) and "consume queues name" in str(far.value)
    given = {"columns": "offset", "failOnDataLoss": False}
    assert rows(tmp_path, fileSystem=RANGED, **given) == rows(tmp_path, **given)


def test_times_go_before_offsets_over_a_file_system_too():
    offsets = {"subscribe": "T", "startingOffsets": '{"T": {"0": 5}}', "startingTimestamp": "7"}
    found = read_options({"path": "s3://bucket/store", **offsets})
    assert (found.starting_offsets, found.starting_timestamp_ms) == (None, 7)


class Bytes:
    """A file whose reads are noted."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, []

    def read_at(self, count: int, at: int) -> bytes:
        self.reads.append((at, count))
        return self.data[at : at + count]


@pytest.mark.parametrize("tail", [b"\0" * 200_000, b"\xaa" * 200_000])
def test_a_range_without_a_record_is_all_that_is_fetched(small_windows, tail):
    file = Bytes(tail)
    segment = file_access.FetchedSegment(file, 0)
    assert segment.find_record(100, 60_000, len(tail)) is None
    assert file.reads[0][0] == 100 and max(at + count for at, count in file.reads) <= 60_008
    assert sum(count for _, count in file.reads) <= 60_000 and len(segment.view) <= FETCH + 16


def test_each_window_size_finds_the_same_record(monkeypatch):
    """Records whose bodies hold look-alikes, what follows these being wrong; every window, against all bytes at once."""
    from pyengine.native.scan import sync

    log = b""
    for number in range(6):
        at = len(log) + 88 + 30
        inner = encode_record(topic="E", body=b"evil", physical_offset=at)
        follower = encode_record(topic="E", body=b"y" * 40, physical_offset=at + len(inner) + number % 2)
        body = (b"\0" * 30 + inner + (b"", follower, follower[:-9], b"\xda\xa3 \xa7" * 9)[number % 4]).ljust(400, b"x")
        log += encode_record(topic="T", body=body, physical_offset=len(log))
    for view in (log, log + bytes(300), log + b"\xaa" * 300):
        for limit in (len(view), len(log) - 150):
            for first in range(0, limit, 29):
                for end in (first + 40, first + 600, limit):
                    wanted = sync(view, 0, first, min(end, limit), limit=limit)
                    for window in (40, 150):
                        monkeypatch.setattr(file_access, "RECORD_PROBE_BYTES", window)
                        monkeypatch.setattr(file_access, "FETCH_BYTES", window)
                        found = file_access.FetchedSegment(Bytes(view), 0).find_record(first, end, limit)
                        assert found == wanted, (limit, first, end, window)


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_spark_reads_and_jobs_run_over_a_file_system(spark, golden, tmp_path):
    from pyengine.spark import export_parquet, skipped_ranges, stats

    root = golden("roll").root
    far = {"fileSystem": "pyarrow.fs:LocalFileSystem", "maxPartitionBytes": "16k"}
    read = spark.read.format("pyengine").options(columns="physicalOffset,value", **far).load(str(root))
    messages = oracle.log_messages(root)
    assert sorted((row[0], bytes(row[1])) for row in read.collect()) == [(m.physical_offset, m.body) for m in messages]
    assert sorted(map(tuple, stats(spark, root, **far).collect())) == sorted(map(tuple, stats(spark, root).collect()))
    assert skipped_ranges(spark, root, **far).count() == 0
    assert export_parquet(spark, root, tmp_path / "out", **far).messages == len(messages)
