"""Dispatch is idempotent, waits at half records, goes on after any restart, and repairs what is missing."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from logs import Log, LogBuilder, files_below, index_contents, queue_ends
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import DiskError, StoreRefusedError, UsageError
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES, unpack_entry
from pyengine.formats.index_file import IndexLayout, unpack_header
from pyengine.formats.index_file import unpack_entry as unpack_index_entry
from pyengine.formats.record import index_key_hash, index_keys, tags_code
from pyengine.native import dispatch
from pyengine.native.dispatch import touched_queues
from pyengine.storage import dispatcher as dispatcher_module
from pyengine.storage import durable_writes, index_file
from pyengine.storage.consume_queue import find_queue_end
from pyengine.storage.dispatcher import TOGETHER_MIN, Dispatcher

SEGMENT = 16384
GEOMETRY = Geometry(
    mapped_file_size_commit_log_bytes=SEGMENT,
    mapped_file_size_consume_queue_bytes=400,
    max_hash_slot_num=16,
    max_index_num=100,
)


def store_with(tmp_path: Path, builder: LogBuilder) -> tuple[Path, Log]:
    root = builder.write(tmp_path / "store")
    return root, Log(root, builder.segment_bytes)


def varied(rng: random.Random, count: int = 300) -> LogBuilder:
    builder = LogBuilder(SEGMENT)
    builder.append_varied(rng, count)
    return builder


def outcome(root: Path) -> tuple[dict[str, bytes], list[bytes]]:
    return files_below(root / "consumequeue"), index_contents(root)


def undisturbed(tmp_path: Path, builder: LogBuilder, log: Log) -> tuple[dict[str, bytes], list[bytes]]:
    with Dispatcher(tmp_path / "undisturbed", GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
        assert dispatcher.loop.struct.messages == len(builder.messages)
    return outcome(tmp_path / "undisturbed")


def queue_bytes(root: Path, topic: str = "T", queue_id: int = 0) -> bytes:
    folder = root / "consumequeue" / topic / str(queue_id)
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("topics, at_once", [(30, True), (3, False)])
def test_many_new_queues_share_their_syncs(tmp_path, monkeypatch, topics, at_once):
    builder = LogBuilder(SEGMENT)
    for number in range(3 * topics):
        builder.append(f"topic-{number % topics}")
    root, log = store_with(tmp_path, builder)
    with monkeypatch.context() as patch, Dispatcher(tmp_path / "one-by-one", GEOMETRY) as dispatcher:
        patch.setattr("pyengine.storage.dispatcher.TOGETHER_MIN", 1000)
        log.dispatch(dispatcher)
    synced, together = [], []
    really_sync, really_sync_all = os.fsync, durable_writes.sync_file_system
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), really_sync(descriptor)))
    monkeypatch.setattr(durable_writes, "sync_file_system", lambda folder: (together.append(folder), really_sync_all(folder))[1])
    with Dispatcher(root, GEOMETRY, EngineConfig(message_index_enable=False)) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
    assert (len(together), bool(synced)) == ((2, False) if at_once else (0, True))
    assert outcome(root)[0] == outcome(tmp_path / "one-by-one")[0]


def test_an_index_that_is_written_has_the_bytes_of_one_that_is_stored_into(tmp_path, rng, monkeypatch):
    """On a disk that copies on write."""
    builder = varied(rng)
    root, log = store_with(tmp_path, builder)
    expected = undisturbed(tmp_path, builder, log)
    monkeypatch.setattr(index_file, "copies_on_write", lambda descriptor: True)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
    assert outcome(root) == expected and len(expected[1]) > 1


def test_written_entries_and_keys_equal_those_of_the_python_formats(tmp_path, rng):
    """Entries and keys against the Python formats, one by one."""
    builder = varied(rng)
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
        ends = queue_ends(dispatcher)
    assert ends == builder.queue_offsets
    expected_keys = []
    for message in builder.messages:
        if message.transaction_type != 0xC:
            expected_keys += [(index_key_hash(message.topic, key), message.physical_offset)
                              for key in index_keys(message.properties)]
        if message.transaction_type in (0x4, 0xC):
            continue
        entry = unpack_entry(queue_bytes(root, message.topic, message.queue_id), 20 * message.queue_offset)
        assert entry[:2] == (message.physical_offset, message.size_bytes)
        if message.topic != "SCHEDULE_TOPIC_XXXX":
            assert entry.tags_code == tags_code(message.tags)
    layout = IndexLayout(16, 100)
    found = []
    for content in index_contents(root):
        for number in range(1, unpack_header(content).index_count):
            found.append(unpack_index_entry(content, layout.entry_at(number))[:2])
    assert found == expected_keys


def test_neighbouring_queues_with_more_entries_than_are_gathered_at_once(tmp_path):
    builder = LogBuilder(1 << 20)
    for number in range(900):
        builder.append(topic=f"T{number % 3}")
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, replace(GEOMETRY, mapped_file_size_consume_queue_bytes=8000)) as dispatcher:
        log.dispatch(dispatcher)
    for message in builder.messages:
        entry = unpack_entry(queue_bytes(root, message.topic, message.queue_id), 20 * message.queue_offset)
        assert entry[:2] == (message.physical_offset, message.size_bytes)


def test_an_entry_of_another_message_is_left_in_its_place(tmp_path):
    """The first entry of a queue offset is kept, as in RocketMQ."""
    builder = LogBuilder(SEGMENT)
    for _ in range(10):
        builder.append()
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    path = root / "consumequeue" / "T" / "0" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    data[80:100] = ENTRY.pack(builder.messages[3].physical_offset, builder.messages[3].size_bytes + 1, 5)
    path.write_bytes(data)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    assert path.read_bytes() == data


def test_an_index_file_that_cannot_be_mapped_is_tried_again(tmp_path, rng, monkeypatch):
    """The one before it is closed by then, and nothing is put there any more."""
    builder = varied(rng)
    root, log = store_with(tmp_path, builder)
    whole = undisturbed(tmp_path, builder, log)[0]
    assert len(undisturbed(tmp_path, builder, log)[1]) > 1
    map_file, tries = index_file.map_index_file, []

    def fail_at_second(path, number, layout, **how):
        tries.append(path)
        if len(tries) == 2:
            raise DiskError("cannot map it", errno=12)
        return map_file(path, number, layout, **how)

    monkeypatch.setattr(index_file, "map_index_file", fail_at_second)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        with pytest.raises(DiskError, match="cannot map"):
            log.dispatch(dispatcher)
        assert log.dispatch(dispatcher) == builder.end
    assert files_below(root / "consumequeue") == whole


def test_delayed_messages_carry_their_delivery_time(tmp_path):
    builder = LogBuilder(SEGMENT)
    cases = [("1", 1000), ("3", 10_000), ("18", 7_200_000), ("99", 7_200_000), ("+2", 5000)]
    for text, _ in cases:
        builder.append("SCHEDULE_TOPIC_XXXX", properties=f"DELAY\x01{text}\x02TAGS\x01tagA")
    for text in ("0", "-1", "x", "1x", "99999999999"):  # no level: the tags' hash is used
        builder.append("SCHEDULE_TOPIC_XXXX", properties=f"DELAY\x01{text}\x02TAGS\x01tagA")
    builder.append("other", properties="DELAY\x013\x02TAGS\x01tagA")
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    data = queue_bytes(root, "SCHEDULE_TOPIC_XXXX")
    for number, (message, (_, delay_ms)) in enumerate(zip(builder.messages, cases, strict=False)):
        assert unpack_entry(data, 20 * number).tags_code == message.store_timestamp_ms + delay_ms
    for number in range(len(cases), 10):
        assert unpack_entry(data, 20 * number).tags_code == tags_code("tagA")
    assert unpack_entry(queue_bytes(root, "other"), 0).tags_code == tags_code("tagA")


def test_any_cut_into_calls_gives_the_same_files(tmp_path, rng):
    builder = varied(rng)
    root, log = store_with(tmp_path, builder)
    expected = undisturbed(tmp_path, builder, log)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        position = end = 0
        while position < builder.end:
            end = min(builder.end, max(end, position) + rng.randrange(1, 900))
            position = log.dispatch(dispatcher, position, end)
    assert outcome(root) == expected


def test_a_restart_at_any_record_gives_the_same_files(tmp_path, rng):
    """Each life begins where the one before had begun or got to: the published position may lag."""
    builder = varied(rng, 150)
    root, log = store_with(tmp_path, builder)
    expected = undisturbed(tmp_path, builder, log)
    published = 0
    for message in builder.messages:
        with Dispatcher(root, GEOMETRY) as dispatcher:
            reached = log.dispatch(dispatcher, published, message.physical_offset + message.size_bytes)
        if rng.random() < 0.7:
            published = reached
    assert outcome(root) == expected


def test_dispatching_again_in_one_life_changes_nothing(tmp_path, rng):
    builder = varied(rng)
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
        before, keys = outcome(root), dispatcher.loop.struct.keys
        for start in [0, *(message.physical_offset for message in builder.messages[::20])]:
            assert log.dispatch(dispatcher, start) == builder.end
        assert outcome(root) == before
        assert dispatcher.loop.struct.keys == keys


def test_a_half_record_is_waited_for(tmp_path):
    builder = LogBuilder(SEGMENT)
    first, second = builder.append(properties="KEYS\x01a"), builder.append(body=b"x" * 100)
    root, log = store_with(tmp_path, builder)
    view = log.views[0]
    with Dispatcher(root, GEOMETRY) as dispatcher:
        for end in range(second.physical_offset, builder.end):
            assert dispatcher.dispatch(view, 0, 0, end) == second.physical_offset
            assert dispatcher.stopped_by in ("range_end", "overrun")
        assert dispatcher.dispatch(view, 0, second.physical_offset, builder.end) == builder.end
        assert queue_ends(dispatcher) == {("T", 0): 2}
        assert dispatcher.loop.struct.last_store_timestamp_ms == second.store_timestamp_ms
        assert first.size_bytes == second.physical_offset


def test_a_blank_leads_to_the_next_segment_once_it_is_whole(tmp_path):
    builder = LogBuilder(1000)
    for _ in range(12):
        builder.append(body=b"x" * 60)
    root, log = store_with(tmp_path, builder)
    last = max(message.physical_offset for message in builder.messages if message.physical_offset < 1000)
    blank = last + builder.messages[0].size_bytes
    with Dispatcher(root, GEOMETRY) as dispatcher:
        assert dispatcher.dispatch(log.views[0], 0, 0, 999) == blank
        assert dispatcher.stopped_by == "blank"
        assert dispatcher.dispatch(log.views[0], 0, blank, 1000) == 1000


@pytest.mark.parametrize(
    ("at", "value", "reason"), [(4, 0, "foreign"), (35, 9, "offset_mismatch"), (84, 5, "torn")]
)
def test_damage_is_not_passed(tmp_path, at, value, reason):
    builder = LogBuilder(SEGMENT)
    first, second = builder.append(), builder.append()
    builder.append()
    builder.segments[0][second.physical_offset + at] = value
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == first.size_bytes
        assert dispatcher.stopped_by == reason
        assert queue_ends(dispatcher) == {("T", 0): 1}


def test_missing_and_wrong_entries_are_repaired_and_right_ones_left_alone(tmp_path, rng):
    builder = LogBuilder(SEGMENT)
    for _ in range(45):
        builder.append(properties="TAGS\x01a")
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    whole = outcome(root)
    folder = root / "consumequeue" / "T" / "0"
    damaged = folder / "00000000000000000400"  # entries 20 to 39
    data = bytearray(damaged.read_bytes())
    data[20:100] = bytes(80)
    data[100:120] = FILLER_BYTES
    data[120:140] = ENTRY.pack(builder.messages[26].physical_offset, 1, 0)  # a wrong size
    damaged.write_bytes(data)
    (folder / "00000000000000000000").unlink()
    untouched = folder / "00000000000000000800"
    os.utime(untouched, ns=(5, 5))
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    assert outcome(root) == whole
    assert untouched.stat().st_mtime_ns == 5


def test_a_log_that_begins_later_gives_filler_and_an_earlier_part_fills_it_in(tmp_path):
    builder = LogBuilder(SEGMENT)
    for _ in range(60):
        builder.append(body=b"x" * 500)
    root, log = store_with(tmp_path, builder)
    expected = undisturbed(tmp_path, builder, log)
    half = builder.messages[30]
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher, half.physical_offset)
    folder = root / "consumequeue" / "T" / "0"
    assert sorted(path.name for path in folder.iterdir()) == ["00000000000000000400", "00000000000000000800"]
    assert (folder / "00000000000000000400").read_bytes()[:200] == FILLER_BYTES * 10
    with Dispatcher(root, GEOMETRY, EngineConfig(message_index_enable=False)) as dispatcher:
        log.dispatch(dispatcher)
        assert queue_ends(dispatcher) == {("T", 0): 60}
    assert outcome(root)[0] == expected[0]


def test_a_start_that_was_cut_short_after_making_the_file_is_made_good(tmp_path):
    """The file has filler only, or nothing: no real entry yet."""
    for left_behind in (bytes(400), FILLER_BYTES * 7 + bytes(260), FILLER_BYTES * 20):
        builder = LogBuilder(SEGMENT, first_offset=SEGMENT)
        builder.append(queue_offset=27)
        builder.append()
        root, log = store_with(tmp_path / str(len(list(tmp_path.iterdir()))), builder)
        folder = root / "consumequeue" / "T" / "0"
        folder.mkdir(parents=True)
        for name in ("00000000000000000000", "00000000000000000400"):
            (folder / name).write_bytes(left_behind)
        with Dispatcher(root, GEOMETRY) as dispatcher:
            log.dispatch(dispatcher)
        assert [path.name for path in folder.iterdir()] == ["00000000000000000400"]
        assert queue_bytes(root)[:140] == FILLER_BYTES * 7
        assert find_queue_end(folder, 400) == (29, builder.end)


def test_a_queue_whose_first_message_is_lost_has_filler_among_many_new_queues_too(tmp_path):
    """A record with the number 0 comes later: a second life of the queue, or damage."""
    builder = LogBuilder(SEGMENT)
    builder.append(queue_offset=3)
    builder.append(queue_offset=0)
    builder.append(queue_offset=4)
    for number in range(TOGETHER_MIN):
        builder.append(topic=f"other-{number}")
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
    assert queue_bytes(root)[:60] == FILLER_BYTES * 3
    assert find_queue_end(root / "consumequeue" / "T" / "0", 400).next_offset == 5


def test_odd_queue_offsets_are_taken_as_rocketmq_takes_them(tmp_path):
    """Below the queue's end: ignored. Beyond it: put at the end (docs/formats.md section 8.4). Repeated: the same."""
    builder = LogBuilder(SEGMENT)
    for number, queue_offset in enumerate((0, 1, 2, 1, 0, 3, 9, 10, 5)):
        builder.append(body=bytes(number), queue_offset=queue_offset)
    placed = [builder.messages[number] for number in (0, 1, 2, 5, 6, 7)]
    expected = b"".join(ENTRY.pack(message.physical_offset, message.size_bytes, 0) for message in placed)
    root, log = store_with(tmp_path, builder)
    for life in range(3):
        with Dispatcher(root, GEOMETRY) as dispatcher:
            log.dispatch(dispatcher)
            log.dispatch(dispatcher)
            # The last message is below the end, and later than the queue's newest, each time.
            assert dispatcher.loop.struct.queues.out_of_order == (6 if life == 0 else 2)
        assert queue_bytes(root) == expected + bytes(400 - len(expected))


def test_names_that_no_folder_can_have_get_no_queue(tmp_path):
    builder = LogBuilder(SEGMENT)
    for topic in ("", ".", "..", "../../etc", "a/b"):
        builder.append(topic, properties="KEYS\x01k")
    builder.append("fine")
    builder.append("deep", queue_offset=1 << 60)
    builder.append("negative", queue_offset=-1)
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
        assert queue_ends(dispatcher) == {("fine", 0): 1}
        assert dispatcher.loop.struct.keys == 5
    assert [path.name for path in (root / "consumequeue").iterdir()] == ["fine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_many_new_queues_are_made_and_none_of_a_topic_that_is_not_utf8(tmp_path):
    builder = LogBuilder(SEGMENT)
    for number in range(TOGETHER_MIN):
        builder.append(f"topic-{number}")
    builder.append("spoiled")
    at = builder.segments[0].index(b"spoiled")
    builder.segments[0][at : at + 2] = b"\xff\xfe"
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
    assert {path.name for path in (root / "consumequeue").iterdir()} == {f"topic-{number}" for number in range(TOGETHER_MIN)}


def test_few_descriptors_are_enough(tmp_path, rng):
    builder = LogBuilder(1 << 20)
    topics = [f"topic-{number}" for number in range(40)]
    for _ in range(1500):
        builder.append(rng.choice(topics), queue_id=rng.randrange(3))
    root, log = store_with(tmp_path, builder)
    before = len(os.listdir("/proc/self/fd"))
    with Dispatcher(root, GEOMETRY, open_files_max=16) as dispatcher:
        log.dispatch(dispatcher)
        assert len(os.listdir("/proc/self/fd")) <= before + 18  # and the index
        ends = queue_ends(dispatcher)
    assert len(os.listdir("/proc/self/fd")) == before
    assert ends == builder.queue_offsets
    for message in builder.messages:
        entry = unpack_entry(queue_bytes(root, message.topic, message.queue_id), 20 * message.queue_offset)
        assert entry[:2] == (message.physical_offset, message.size_bytes)


def test_new_queues_are_made_together_where_all_descriptors_are_in_use(tmp_path, monkeypatch):
    builder = LogBuilder(1 << 20)
    for number in range(200):
        builder.append(f"topic-{number}")
    root, log = store_with(tmp_path, builder)
    together, create = [], dispatcher_module.create_files
    monkeypatch.setattr(dispatcher_module, "create_files",
                        lambda paths, size, **allocate: together.append(len(paths)) or create(paths, size, **allocate))
    with Dispatcher(root, GEOMETRY, open_files_max=64) as dispatcher:
        for at in range(0, builder.end, 10_000):  # whole records of it: what is new of each range is made at once
            log.dispatch(dispatcher, end=min(builder.end, at + 10_000))
        assert queue_ends(dispatcher) == builder.queue_offsets
    assert sum(together) >= 180, together
    assert max(together) <= 64


def test_more_queues_than_one_batch_can_gather_for(tmp_path, monkeypatch):
    builder = LogBuilder(1 << 20)
    for number in range(5000):
        builder.append(f"t{number % 5}", b"", queue_id=number % 1000)
    root, log = store_with(tmp_path, builder)
    monkeypatch.setattr(dispatch, "CHUNKS", 100)
    with Dispatcher(root, GEOMETRY, EngineConfig(message_index_enable=False)) as dispatcher:
        log.dispatch(dispatcher)
        assert queue_ends(dispatcher) == builder.queue_offsets
    for message in builder.messages[::37]:
        entry = unpack_entry(queue_bytes(root, message.topic, message.queue_id), 20 * message.queue_offset)
        assert entry[:2] == (message.physical_offset, message.size_bytes)


def test_files_of_wrong_length_are_refused(tmp_path):
    builder = LogBuilder(SEGMENT)
    builder.append(properties="KEYS\x01k")
    root, log = store_with(tmp_path, builder)
    folder = root / "consumequeue" / "T" / "0"
    folder.mkdir(parents=True)
    (folder / "00000000000000000000").write_bytes(bytes(399))
    with Dispatcher(root, GEOMETRY) as dispatcher, pytest.raises(StoreRefusedError, match="399 bytes"):
        log.dispatch(dispatcher)
    (folder / "00000000000000000000").unlink()
    index = next((root / "index").iterdir()) if (root / "index").exists() else root / "index" / "20240101000000000"
    index.parent.mkdir(exist_ok=True)
    index.write_bytes(bytes(100))
    with pytest.raises(StoreRefusedError, match="100 bytes"):
        Dispatcher(root, GEOMETRY)


def test_ranges_outside_the_view_are_refused(tmp_path):
    with Dispatcher(tmp_path, GEOMETRY) as dispatcher:
        for start, end in ((-1, 5), (5, 4), (0, 101)):
            with pytest.raises(UsageError):
                dispatcher.dispatch(bytes(100), 0, start, end)
            with pytest.raises(UsageError):
                touched_queues(bytes(100), 0, start, end)


def test_without_index_none_is_made(tmp_path, rng):
    builder = varied(rng, 50)
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY, EngineConfig(message_index_enable=False)) as dispatcher:
        log.dispatch(dispatcher)
    assert not (root / "index").exists()


def test_touched_queues_are_those_of_the_range(tmp_path, rng):
    builder = varied(rng, 400)
    for number in range(2000):  # more than the first table holds
        builder.append(f"many-{number}", b"")
    root, log = store_with(tmp_path, builder)
    for base, view in log.views.items():
        end = min(base + SEGMENT, builder.end)
        here = [message for message in builder.messages if base <= message.physical_offset < end]
        expected: dict[tuple[str, int], list[int]] = {}
        for message in here:
            if message.transaction_type not in (0x4, 0xC):
                expected.setdefault((message.topic, message.queue_id), []).append(message.queue_offset)
        found = touched_queues(view, base, base, end)
        assert {(queue.topic, queue.queue_id): queue[2:5] for queue in found.queues} == {
            key: (min(offsets), max(offsets), len(offsets)) for key, offsets in expected.items()
        }
        assert found.last_store_timestamp_ms == here[-1].store_timestamp_ms
        newest_ms = {(message.topic, message.queue_id): message.store_timestamp_ms for message in here
                     if message.transaction_type not in (0x4, 0xC)}
        assert all(queue.newest_ms == newest_ms[queue.topic, queue.queue_id] for queue in found.queues)
        assert found.reached == here[-1].physical_offset + here[-1].size_bytes
    assert touched_queues(view, base, base, base) == ([], base, "range_end", -1)
    assert root.exists()


def test_touched_queues_grow_their_table(tmp_path):
    builder = LogBuilder(1 << 20)
    for number in range(3000):
        builder.append(f"many-{number}", b"")
    _, log = store_with(tmp_path, builder)
    found = touched_queues(log.views[0], 0, 0, builder.end)
    assert len(found.queues) == 3000
    assert found.reached == builder.end


def test_light_queues_get_their_entries_when_asked(tmp_path):
    properties = "INNER_MULTI_DISPATCH\x01%LMQ%a,other,%LMQ%b,,\x02INNER_MULTI_QUEUE_OFFSET\x010,0,0"
    builder = LogBuilder(SEGMENT)
    message = builder.append("T", queue_id=3, properties=properties)
    builder.append("T", queue_id=3, properties=properties.replace("0,0,0", "1,1"))  # counts differ: none
    root, log = store_with(tmp_path, builder)
    with Dispatcher(root, GEOMETRY) as dispatcher:
        log.dispatch(dispatcher)
        assert queue_ends(dispatcher) == {("T", 3): 2}
    with Dispatcher(root, GEOMETRY, EngineConfig(enable_multi_dispatch=True)) as dispatcher:
        log.dispatch(dispatcher)
        assert queue_ends(dispatcher) == {("T", 3): 2, ("%LMQ%a", 0): 1, ("other", 3): 1, ("%LMQ%b", 0): 1}
    assert unpack_entry(queue_bytes(root, "other", 3))[:2] == (0, message.size_bytes)
    found = touched_queues(log.views[0], 0, 0, builder.end, multi_dispatch=True)
    assert {(queue.topic, queue.queue_id) for queue in found.queues} == {
        ("T", 3), ("%LMQ%a", 0), ("other", 3), ("%LMQ%b", 0),
    }
