"""Topics read through their consume queues: the same rows as a scan, or a sentence that says why not."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import sys
from collections import Counter

import pytest

from fix_golden import CLEAN, HALTED, usual
from fix_store_builder import StoreBuilder
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.constants import LMQ_PREFIX
from pyengine.formats.paths import StorePaths
from pyengine.spark import plan as planning
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError, LogRange, QueuePart
from pyengine.spark.plan import end_now, plan
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.mapped_file import MappingCache
from spark import oracle
from spark.logs import DAMAGED_END, allowing, rows, stream_reader, write_log

COLUMNS = "topic,partition,offset,physicalOffset,value,tags"
ENTRY = struct.Struct(">qiq")


def both(root, **given) -> tuple[list[tuple], list[tuple]]:
    """The rows through the queues and through a scan, in one order."""
    return tuple(sorted(rows(root, columns=COLUMNS, access=access, **given)) for access in ("queue", "scan"))


def parts(root, **given) -> list:
    return plan(read_options({"path": str(root), **{name: str(value) for name, value in given.items()}}))


@pytest.mark.parametrize(("most", "least", "given", "sizes"), [
    (0, 1, {}, [1, 1, 1, 1, 1, 1, 1, 1]),
    (4, 1, {}, [4, 4]), (4, 2, {}, [4, 4]), (8, 3, {}, [3, 3, 2]), (8, 4, {}, [2, 2, 2, 2]), (8, 16, {}, [1, 1, 1, 1, 1, 1, 1, 1]),
    (8, 1, {"minPartitions": 3}, [2, 2, 2, 2]), (4, 1, {"startingPhysicalOffset": 4096}, [4, 3]),
])
def test_parts_of_a_job_are_one_for_each_core_or_the_most_that_is_allowed(tmp_path, most, least, given, sizes):
    builder = StoreBuilder(tmp_path / "store")
    while builder.end < 8 * 4096 - 2048:  # eight segments, the last not full
        builder.put("T", bytes(300))
    options = read_options({"path": str(builder.root), "maxPartitionBytes": "4096", **{name: str(value) for name, value in given.items()}})
    found = plan(options, most * 4096, least)
    assert [-(-one.log_bytes // 4096) for one in found] == sizes


@pytest.mark.ci
def test_more_parts_than_a_driver_can_hold_are_refused_with_the_size_that_fits(tmp_path):
    write_log(tmp_path, [{"topic": "T", "body": bytes(200_000)}] * 6, 1 << 20)
    reader = stream_reader(tmp_path, maxPartitionBytes=1, maxOffsetsPerTrigger=100)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    for plan_it in (lambda: parts(tmp_path, maxPartitionBytes=1), lambda: reader.partitions(start, end)):
        with pytest.raises(UsageError, match="maxPartitionBytes = 1 makes more than 1,000,000 partitions of .* bytes: give 2 at least"):
            plan_it()
    reader.stop()
    assert 500_000 < len(parts(tmp_path, maxPartitionBytes=2)) < 1_000_000


def queue_file(root, topic: str, queue_id: int):
    return sorted(StorePaths(root).queue_folder(topic, queue_id).iterdir())[0]


def change_entry(root, topic: str, queue_id: int, number: int, change) -> None:
    """change(offset, size, tags) -> the entry to write there, in the queue's first file."""
    path = queue_file(root, topic, queue_id)
    with open(path, "r+b") as file:
        file.seek(number * ENTRY.size)
        entry = ENTRY.unpack(file.read(ENTRY.size))
        file.seek(number * ENTRY.size)
        file.write(ENTRY.pack(*change(*entry)))


@pytest.mark.parametrize("recipe", usual(sorted(set(CLEAN) - {"empty"} - DAMAGED_END)))
def test_a_read_by_queues_returns_the_rows_of_a_scan(golden, recipe):
    root = golden(recipe).root
    topics = sorted({m.topic for m in oracle.log_messages(root) if "," not in m.topic})
    for given in ({"subscribe": topics[0]}, {"subscribe": ",".join(topics), "minPartitions": 7}, {"subscribePattern": ".*"}):
        by_queue, by_scan = both(root, **given)
        assert by_queue == by_scan
    assert by_scan
    found = parts(root, subscribePattern=".*", access="queue", maxPartitionBytes=2000)
    assert all(isinstance(part, QueuePart) and part.log_bytes for part in found)
    assert not any(one.topic.startswith(LMQ_PREFIX) for part in found for one in part.slices)


@pytest.mark.parametrize(
    "given",
    [
        {"assign": '{"Roll1": [0], "Other1": [1]}'},
        {"subscribe": "Roll1", "startingOffsets": '{"Roll1": {"0": 10}}', "endingOffsets": '{"Roll1": {"0": 12, "1": 3}}'},
        {"subscribe": "Roll1,Other1", "startingTimestamp": 1_700_086_430_000},
        {"subscribe": "nobody", "allowMissing": "true"},
    ],
)
def test_filters_hold_through_queues_too(golden, given):
    root = golden("roll").root
    by_queue, by_scan = both(root, **given)
    assert by_queue == by_scan
    assert by_scan or "allowMissing" in given


def test_tags_and_conditions_hold_through_queues_too(golden):
    root = golden("basic").root
    message = next(m for m in oracle.log_messages(root) if m.tags)
    for given in ({"tags": message.tags}, {"sql": "TAGS IS NOT NULL AND TAGS <> 'x'"}):
        by_queue, by_scan = both(root, subscribe=message.topic, **given)
        assert by_queue == by_scan and by_queue


@pytest.mark.parametrize("recipe", [name for name in HALTED if name != "abnormal-shortfile"])
def test_after_a_crash_the_log_is_read_instead_of_queues(golden, recipe):
    root = golden(recipe).root
    topic = oracle.log_messages(root)[0].topic
    with pytest.raises(UsageError, match="access=queue: the store was not stopped in order"):
        rows(root, subscribe=topic, allowMissing=True, access="queue", **allowing(recipe))
    assert rows(root, subscribe=topic, allowMissing=True, columns="offset", **allowing(recipe))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({}, "choose topics"), ({"subscribe": "Roll1", "startingPhysicalOffset": 5}, "physical offsets are bounds of a scan")],
)
def test_queue_access_without_topics_or_with_physical_offsets_is_refused(golden, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        rows(golden("roll").root, access="queue", **given)


def test_auto_takes_queues_for_a_small_part_of_a_large_log(golden, monkeypatch):
    root = golden("roll").root
    assert all(isinstance(part, LogRange) for part in parts(root, subscribe="Other1"))
    monkeypatch.setattr(planning, "LOG_BYTES_MIN", 0)
    assert all(isinstance(part, QueuePart) for part in parts(root, subscribe="Other1"))
    assert all(isinstance(part, LogRange) for part in parts(root, subscribe="Roll1"))
    assert all(isinstance(part, LogRange) for part in parts(root))
    assert all(isinstance(part, LogRange) for part in parts(golden("abnormal").root, subscribe="nobody",
                                                                allowMissing=True))


def test_a_plan_opens_each_queue_once_and_hands_little_to_the_tasks(builder, monkeypatch):
    """More queues than a reader keeps mapped: what is looked at twice would be opened twice."""
    topics, queues = 30, 10
    monkeypatch.setattr(MappingCache.__init__, "__defaults__", (8,))
    for number in range(topics * queues):
        builder.put(f"topic-{number % topics}", b"x", queue_id=number // topics)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    for made in StorePaths(builder.root).consume_queue.glob("*/*"):
        os.utime(made, (1, 1))  # what was changed just now is listed again
    seen: Counter[tuple[str, str]] = Counter()
    folder = re.compile(r".*/consumequeue/topic-")

    def note(event: str, given: tuple) -> None:
        if is_noting and event in ("open", "os.scandir", "os.listdir") and folder.match(str(given[0])):
            seen[event, str(given[0])] += 1

    is_noting = True
    sys.addaudithook(note)
    found = parts(builder.root, subscribePattern=".*", access="queue", minPartitions=4)
    is_noting = False
    opened = {path: count for (event, path), count in seen.items() if event == "open"}
    assert len(opened) == topics * queues and sum(opened.values()) <= len(opened) + 1  # one tells that a topic has messages of its own
    assert sum(seen.values()) <= 3 * topics * queues + 2 * topics  # a file, and two lists of its folder
    assert sum(one.end - one.first for part in found for one in part.slices) == topics * queues
    assert len(pickle.dumps(found)) < 200 * topics * queues  # so 1 MB are 5,000 queues


def test_the_undispatched_part_of_the_log_is_scanned(golden, monkeypatch):
    root = golden("roll").root
    messages = oracle.log_messages(root)
    wanted = [m.physical_offset for m in messages if m.topic == "Roll1"]
    for upto in (messages[0], messages[40], messages[41], messages[-1]):
        monkeypatch.setattr(planning, "why_no_queues", lambda *_, end=upto.physical_offset: ("", end))
        found = rows(root, subscribe="Roll1", access="queue", columns="physicalOffset", maxPartitionBytes=5000)
        assert sorted(offset for (offset,) in found) == wanted


def test_an_entry_that_names_another_record_is_not_used(golden):
    for change, sentence in (
        (lambda offset, size, tags: (offset + 1, size, tags), "but there it is"),
        (lambda offset, size, tags: (offset, size - 1, tags), "but there it is torn"),
        (lambda offset, size, tags: (10**9, size, tags), None),
    ):
        root = golden("roll").root
        change_entry(root, "Roll1", 0, 7, change)
        with pytest.raises(CorruptionError if sentence else Exception, match=sentence):
            rows(root, assign='{"Roll1": [0]}', access="queue")
    messages = oracle.log_messages(root)
    other = next(m for m in messages if m.topic == "Other1")
    later = next(m for m in messages if (m.topic, m.queue_id, m.queue_offset) == ("Roll1", 0, 20))
    for message in (other, later):
        sentence = f"entry 7 of queue Roll1/0 names message {message.queue_offset} of {message.topic}/{message.queue_id}"
        root = golden("roll").root
        change_entry(root, "Roll1", 0, 7, lambda o, s, t, m=message: (m.physical_offset, m.size_bytes, t))
        ending = json.dumps({"Roll1": {"0": 15}})
        with pytest.raises(CorruptionError, match=sentence):
            rows(root, assign='{"Roll1": [0]}', access="queue", endingOffsets=ending)
        found = rows(root, assign='{"Roll1": [0]}', access="queue", endingOffsets=ending, columns="offset", onCorrupt="skip")
        assert [offset for (offset,) in found] == [n for n in range(15) if n != 7]


def test_files_deleted_after_the_plan_raise_data_loss_or_are_left_out(golden):
    root = golden("roll").root
    given = {"subscribe": "Roll1", "access": "queue"}
    ranges = parts(root, **given)
    messages = [m for m in oracle.log_messages(root) if m.topic == "Roll1"]
    StorePaths(root).commit_log_segment(16384).unlink()
    with pytest.raises(DataLossError, match="was deleted after the query was planned"):
        rows(root, ranges, **given)
    found = rows(root, ranges, columns="physicalOffset", failOnDataLoss="false", **given)
    assert sorted(o for (o,) in found) == [m.physical_offset for m in messages if not 16384 <= m.physical_offset < 32768]
    for path in StorePaths(root).queue_folder("Roll1", 0).iterdir():
        path.unlink()
    with pytest.raises(DataLossError, match="consumequeue"):
        rows(root, ranges, **given)
    found = rows(root, ranges, columns="partition", failOnDataLoss="false", **given)
    assert {queue_id for (queue_id,) in found} == {1}


@pytest.mark.parametrize("access", ["scan", "queue"])
def test_offsets_beyond_the_end_that_load_found_are_a_loss_though_they_exist_now(tmp_path, access):
    builder = StoreBuilder(tmp_path / "store")

    def reading(**bounds: int):
        offsets = {f"{name}Offsets": json.dumps({"T": {"0": offset}}) for name, offset in bounds.items()}
        return read_options({"path": str(builder.root), "subscribe": "T", "access": access, **offsets})

    for _ in range(90):
        builder.put("T", b"x")
    end = end_now(reading())
    for _ in range(20):
        builder.put("T", b"x")
    for bounds in ({"starting": 95}, {"starting": 0, "ending": 100}):
        with pytest.raises(DataLossError, match="queue T/0 holds offsets 0 to 90"):
            plan(reading(**bounds), end=end)
        assert plan(reading(**bounds))
    assert plan(reading(starting=0, ending=90), end=end)


def test_the_undispatched_part_counts_among_the_parts_of_a_read_through_queues(tmp_path, monkeypatch):
    write_log(tmp_path, [{"topic": "T", "body": bytes(200_000)}] * 6, 1 << 20)
    monkeypatch.setattr(planning, "why_no_queues", lambda *_: ("", 0))
    given = {"subscribe": "T", "access": "queue", "allowMissing": "true"}
    with pytest.raises(UsageError, match="maxPartitionBytes = 1 makes more than 1,000,000 partitions of .* bytes: give 2 at least"):
        parts(tmp_path, maxPartitionBytes=1, **given)
    assert len(parts(tmp_path, minPartitions=7, **given)) >= 7


def test_a_snapshot_that_was_deleted_before_its_plan_is_a_loss(tmp_path):
    builder = StoreBuilder(tmp_path / "store")

    def reading(**given: str):
        return read_options({"path": str(builder.root), **given})

    of_empty = end_now(reading())
    builder.put("T", b"x")
    end = end_now(reading())
    while builder.end < 3 * 4096:
        builder.put("T", b"x")
    first = StorePaths(builder.root).commit_log_segment(0)
    first.rename(tmp_path / "segment")
    with pytest.raises(DataLossError, match=rf"begins at 4096 now, beyond its end at load\(\), {end}: load\(\) it again"):
        plan(reading(), end=end)
    assert plan(reading(failOnDataLoss="false"), end=end) == plan(reading(), end=of_empty) == []
    (tmp_path / "segment").rename(first)
    assert plan(reading(), end=end)
