"""The read side: every status of a get, look-ups by offset, id, key and time, levels, deletion under the reader."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import os
import threading
from pathlib import Path

import pytest

from fix_golden import CLEAN
from fix_store_builder import SMALL, START_MS, StoreBuilder, queue_of
from pyengine.errors import CorruptionError, DiskError, FormatError, NotAStoreError, StoreRefusedError, UsageError
from pyengine.formats.constants import CQ_FILLER_SIZE
from pyengine.formats.record import decode_record, string_hash
from pyengine.results import GetStatus, ReadLevel
from pyengine.storage import message_getter
from pyengine.storage.consume_queue import offset_by_time
from pyengine.storage.mapped_file import MAPPINGS_MAX
from pyengine.storage.store_reader import StoreReader


class FixedWatermark:
    """Levels that a test sets."""

    def __init__(self, **limits: int) -> None:
        self.limits = limits

    def limit(self, level: ReadLevel) -> int:
        return self.limits[level.value]

    queue_limit = limit


def bodies(result) -> list[bytes]:
    return [message.body for message in result.messages]


def put_all(builder: StoreBuilder, count: int, topic: str = "T", **fields):
    return [builder.put(topic, str(number).encode(), **fields) for number in range(count)]


# -- get_message: the statuses in the order of RocketMQ's own checks


def test_an_unknown_topic_or_queue_has_no_message(builder):
    put_all(builder, 1)
    with StoreReader(builder.root) as store:
        for topic, queue_id in (("X", 0), ("T", 7), ("T", -1), ("", 0), ("..", 0), ("a/b", 0), ("a\0b", 0)):
            result = store.get_message(topic, queue_id, 5)
            assert (result.status, result.next_begin_offset) == (GetStatus.NO_MESSAGE_IN_QUEUE, 0)
            assert store.queue_range(topic, queue_id) == (0, 0)


def test_a_queue_without_readable_entries_has_no_message(builder):
    message = put_all(builder, 1)[0]
    with StoreReader(builder.root, watermark=FixedWatermark(committed=message.size_bytes - 1)) as store:
        assert store.get_message("T", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE


def test_found_gives_messages_in_order_and_the_next_offset(builder):
    put_all(builder, 5)
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, 1, 3)
        assert result.status is GetStatus.FOUND
        assert bodies(result) == [b"1", b"2", b"3"]
        assert [message.queue_offset for message in result.messages] == [1, 2, 3]
        assert (result.next_begin_offset, result.min_offset, result.max_offset) == (4, 0, 5)


@pytest.mark.parametrize(
    ("offset", "status", "next_offset"),
    [
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
        (3, GetStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
        (1000, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
    ],
)
def test_offsets_outside_the_queue_are_corrected(builder, offset, status, next_offset):
    put_all(builder, 3)
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, offset)
        assert (result.status, result.next_begin_offset, result.messages) == (status, next_offset, [])


def test_a_call_never_crosses_a_queue_file(builder):
    put_all(builder, 25)  # 10 entries a file
    with StoreReader(builder.root) as store:
        assert bodies(store.get_message("T", 0, 8)) == [b"8", b"9"]
        assert store.get_message("T", 0, 8).next_begin_offset == 10
        assert len(store.get_message("T", 0, 10).messages) == 10
        assert len(store.get_message("T", 0, 20).messages) == 5


def test_a_missing_queue_file_is_found_null_and_passed(builder):
    put_all(builder, 25)
    builder.queue_file("T", 0, 200).unlink()
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, 13)
        assert (result.status, result.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 20)


def test_a_get_stops_at_the_asked_number(builder):
    put_all(builder, 5)
    with StoreReader(builder.root) as store:
        assert [len(store.get_message("T", 0, 0, number).messages) for number in (1, 2, 5, 32)] == [1, 2, 5, 5]
        with pytest.raises(UsageError):
            store.get_message("T", 0, 0, 0)


def test_batch_limits_of_memory_and_disk(tmp_path):
    builder = StoreBuilder(tmp_path / "store", dataclasses.replace(SMALL, mapped_file_size_consume_queue_bytes=2000))
    size = [builder.put("T", b"x" * 100) for _ in range(50)][0].size_bytes
    cases = [
        ({}, 32),  # 32 messages from memory
        ({"max_transfer_count_on_message_in_memory": 5}, 5),
        ({"max_transfer_bytes_on_message_in_memory_bytes": 3 * size}, 3),
        ({"max_transfer_bytes_on_message_in_memory_bytes": 3 * size - 1}, 2),
        ({"max_transfer_bytes_on_message_in_memory_bytes": 1}, 1),  # the first whatever its size
        ({"access_message_in_memory_max_ratio": 0}, 8),  # all counts as being on disk
        ({"access_message_in_memory_max_ratio": 0, "max_transfer_bytes_on_message_in_disk_bytes": 2 * size}, 2),
    ]
    for settings, expected in cases:
        with StoreReader(builder.root, **settings) as store:
            result = store.get_message("T", 0, 0, 40)
            assert (len(result.messages), result.next_begin_offset) == (expected, expected), settings


# -- tags


def test_tags_are_a_subscription(builder):
    for tags in ("a", "b", None, "a||b", "c"):
        builder.put("T", str(tags).encode(), tags=tags)
    with StoreReader(builder.root) as store:
        for text, expected in (
            (None, 5),
            ("*", 5),
            ("", 5),
            ("a", [b"a"]),
            (" c || a ", [b"a", b"c"]),
            ("a||b", [b"a", b"b"]),
        ):
            found = bodies(store.get_message("T", 0, 0, tags=text))
            assert found == expected or len(found) == expected, text
        with pytest.raises(UsageError):
            store.get_message("T", 0, 0, tags=" || ")


@pytest.mark.parametrize("text", ["paid,sent", "paid|sent"])
def test_one_tag_that_may_be_meant_as_several_is_told(builder, caplog, text):
    builder.put("T", b"x", tags=text)  # as a client of RocketMQ may
    with StoreReader(builder.root) as store:
        assert bodies(store.get_message("T", 0, 0, tags=text)) == [b"x"]
    assert [record.getMessage() for record in caplog.records] == [f"'{text}' is one tag: write several tags like 'a || b'"]


def test_tags_are_trimmed_as_rocketmq_trims_them(builder):
    """Java's trim() takes the characters up to U+0020 alone."""
    sent = ["red\u3000", "red\u00a0", "\u2003red", "red\u0085", "red"]
    for tag in sent:
        builder.put("T", b"x", tags=tag)
    with StoreReader(builder.root) as store:
        for tag in sent:
            assert [message.tags for message in store.get_message("T", 0, 0, tags=f"\0\x1c {tag}\x1f\t").messages] == [tag]


def test_a_get_without_a_match_moves_the_next_offset_on(builder):
    put_all(builder, 10, tags="a")
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, 2, tags="b")
        assert (result.status, result.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 10)


def test_a_condition_that_nothing_meets_still_moves_on(builder):
    put_all(builder, 10, tags="a", properties={"n": "1"})
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, 2, sql="n > 1")
        assert (result.status, result.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 10)
        assert len(store.get_message("T", 0, 2, sql="n > 0").messages) == len(store.get_message("T", 0, 2, sql="  ").messages) == 8


def test_tags_with_equal_hashes_are_told_apart_by_text(builder):
    assert string_hash("Aa") == string_hash("BB")
    builder.put("T", b"1", tags="Aa")
    builder.put("T", b"2", tags="BB")
    with StoreReader(builder.root) as store:
        assert bodies(store.get_message("T", 0, 0, tags="BB")) == [b"2"]
        result = store.get_message("T", 0, 0, 1, tags="Aa")
        assert bodies(result) == [b"1"]


def test_a_filter_walks_at_most_800_entries_a_call(tmp_path):
    builder = StoreBuilder(tmp_path / "store", dataclasses.replace(SMALL, mapped_file_size_consume_queue_bytes=40_000))
    message = builder.put("T", b"x", tags="a")
    for number in range(1, 1000):
        builder.write_entry("T", 0, number, message.physical_offset, message.size_bytes, string_hash("a"))
    with StoreReader(builder.root) as store:
        result = store.get_message("T", 0, 0, tags="b")
        assert (result.status, result.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 800)
        assert store.get_message("T", 0, 0, 900, tags="b").next_begin_offset == 900


# -- filler, deletion, entries that lie


def test_filler_is_not_part_of_the_queue(builder):
    builder.fill_queue("T", 0, 13)
    put_all(builder, 3)
    with StoreReader(builder.root) as store:
        assert store.queue_range("T", 0) == (13, 16)
        result = store.get_message("T", 0, 10)
        assert (result.status, result.next_begin_offset) == (GetStatus.OFFSET_TOO_SMALL, 13)
        assert bodies(store.get_message("T", 0, 13)) == [b"0", b"1", b"2"]


def test_messages_of_deleted_segments_are_below_the_queues_minimum(builder):
    messages = put_all(builder, 60)
    builder.segment(0).unlink()
    first = next(message for message in messages if message.physical_offset >= 4096)
    with StoreReader(builder.root) as store:
        assert store.min_physical_offset == 4096
        assert store.queue_range("T", 0) == (first.queue_offset, 60)
        result = store.get_message("T", 0, 0)
        assert (result.status, result.next_begin_offset) == (GetStatus.OFFSET_TOO_SMALL, first.queue_offset)
        assert store.message_at(0) is None


def test_a_queue_whose_messages_are_all_gone_is_empty(builder):
    put_all(builder, 3, "Old")
    put_all(builder, 60)
    builder.segment(0).unlink()
    with StoreReader(builder.root) as store:
        assert store.queue_range("Old", 0) == (3, 3)
        assert store.get_message("Old", 0, 0).status is GetStatus.OFFSET_TOO_SMALL
        assert store.get_message("Old", 0, 3).status is GetStatus.OFFSET_OVERFLOW_ONE


def test_a_gap_in_the_log_is_removing_and_passed(builder):
    messages = put_all(builder, 120)
    gone = [message for message in messages if 4096 <= message.physical_offset < 8192]
    builder.segment(4096).unlink()
    with StoreReader(builder.root, watermark=FixedWatermark(committed=builder.end)) as store:
        offset = gone[0].queue_offset
        result = store.get_message("T", 0, offset, 1)
        expected_end = min(offset - offset % 10 + 10, gone[-1].queue_offset + 1)
        assert (result.status, result.messages) == (GetStatus.MESSAGE_WAS_REMOVING, [])
        assert result.next_begin_offset == expected_end


def test_a_segment_deleted_under_the_reader(builder, monkeypatch):
    messages = put_all(builder, 60)
    with StoreReader(builder.root) as store:
        assert store.get_message("T", 0, 0).status is GetStatus.FOUND  # mapped now
        real = message_getter.read_queue

        def delete_then_read(*args):
            builder.segment(0).unlink(missing_ok=True)
            return real(*args)

        monkeypatch.setattr(message_getter, "read_queue", delete_then_read)
        result = store.get_message("T", 0, 0)
        assert (result.status, result.messages) == (GetStatus.MESSAGE_WAS_REMOVING, [])
        assert result.next_begin_offset == 10
        assert store.queue_range("T", 0)[0] == next(m.queue_offset for m in messages if m.physical_offset >= 4096)
        assert store.message_at(0) is None


@pytest.mark.parametrize("topic", ["x" * 256, "é" * 128, "\ud800"], ids=["long", "long in UTF-8", "half a pair"])
def test_a_topic_that_no_folder_can_be_named_after_has_no_queues(builder, topic):
    builder.put("T", b"x")
    with StoreReader(builder.root) as store:
        assert store.queue_ids(topic) == []
        assert queue_of(store, topic, 0) is None


def test_records_are_what_get_message_gives_as_they_are_in_the_log(builder, monkeypatch):
    put_all(builder, 60)
    far = 1 << 40
    with StoreReader(builder.root) as store:
        def records_of(queue_id, offset, near_bytes):
            return store._get_records("T", queue_id, offset, 32, None, None, near_bytes)

        for offset in (-1, 0, 7, 45, 59, 60, 61):
            found, records = store.get_message("T", 0, offset), records_of(0, offset, far)
            assert (records.status, records.message_count, records.next_begin_offset, records.min_offset, records.max_offset) == (
                found.status, len(found.messages), found.next_begin_offset, found.min_offset, found.max_offset)
            at = 0
            for message in found.messages:
                assert decode_record(records.records, at) == message
                at += message.size_bytes
            assert at == len(records.records)
        assert records_of(9, 0, far).status is GetStatus.NO_MESSAGE_IN_QUEUE
        transferred = store.gets.transferred_bytes
        assert transferred == 2 * sum(len(records_of(0, at, far).records) for at in (0, 7, 45, 59))
        assert records_of(0, 0, 4096) is None, "far from the log's end"
        assert records_of(0, 59, 4096).status is GetStatus.FOUND
        assert records_of(0, 0, None).status is GetStatus.FOUND, "near enough to be in memory"
        monkeypatch.setattr(store.getter, "_near_bytes", 4096)
        assert records_of(0, 0, None) is None
        real = message_getter.read_records

        def delete_then_read(*args):
            found = real(*args)
            builder.segment(0).unlink(missing_ok=True)
            return found

        monkeypatch.setattr(message_getter, "read_records", delete_then_read)
        assert records_of(0, 0, far) is None, "deleted while it was read"


def test_an_emptied_record_is_never_served(builder):
    """The cleaner has punched holes into a file that this reader still maps."""
    first, second, _ = put_all(builder, 3)
    with StoreReader(builder.root) as store:
        assert bodies(store.get_message("T", 0, 0)) == [b"0", b"1", b"2"]
        builder.write_log(bytes(first.size_bytes), at=0)
        result = store.get_message("T", 0, 0)
        assert (bodies(result), result.next_begin_offset) == ([b"1", b"2"], 3)
        assert store.message_at(0) is None
        builder.write_log(bytes(8), at=second.physical_offset)
        result = store.get_message("T", 0, 0, 1)
        assert (bodies(result), result.next_begin_offset) == ([b"2"], 3)


@pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_an_entry_that_does_not_fit_its_record_gives_nothing(builder, change):
    message = put_all(builder, 2)[1]
    offset, size = message.physical_offset + change[0], message.size_bytes + change[1]
    builder.write_entry("T", 0, 1, offset, size, 0)
    with StoreReader(builder.root, watermark=FixedWatermark(committed=4096)) as store:
        result = store.get_message("T", 0, 1)
        assert (result.status, result.messages, result.next_begin_offset) == (GetStatus.MESSAGE_WAS_REMOVING, [], 2)
        assert bodies(store.get_message("T", 0, 0)) == [b"0"]


# -- levels


def test_each_level_ends_where_the_watermark_says(builder):
    messages = put_all(builder, 6)
    ends = [message.physical_offset + message.size_bytes for message in messages]
    marks = FixedWatermark(written=ends[5], committed=ends[3], flushed=ends[1], replicated=0)
    with StoreReader(builder.root, watermark=marks) as store:
        for level, count in (("written", 6), (ReadLevel.COMMITTED, 4), (None, 4), ("flushed", 2), ("replicated", 0)):
            assert store.queue_range("T", 0, level) == (0, count)
            assert len(store.get_message("T", 0, 0, level=level).messages) == count
            assert [store.message_at(message.physical_offset, level) is not None for message in messages] == [
                number < count for number in range(6)
            ]
        marks.limits["committed"] = ends[3] - 1  # the middle of a record
        assert store.queue_range("T", 0) == (0, 3)
        assert store.message_at(messages[3].physical_offset) is None
        with pytest.raises(UsageError, match="committed"):
            store.get_message("T", 0, 0, level="durable")


def test_a_store_in_sync_mode_is_read_up_to_flushed(builder):
    put_all(builder, 2)
    marks = FixedWatermark(written=builder.end, committed=builder.end, flushed=0)
    with StoreReader(builder.root, watermark=marks, flush_disk_type="SYNC_FLUSH") as store:
        assert store.default_level is ReadLevel.FLUSHED
        assert store.get_message("T", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
    with StoreReader(builder.root, watermark=marks) as store:
        assert store.default_level is ReadLevel.COMMITTED


# -- by offset and id


def test_message_at_needs_a_records_start(builder):
    first, second = put_all(builder, 2)
    with StoreReader(builder.root) as store:
        assert store.message_at(0) == first
        assert store.message_at(second.physical_offset) == second
        for offset in (-1, 1, second.physical_offset - 1, builder.end, 4096, 1 << 40):
            assert store.message_at(offset) is None


def test_a_record_inside_a_body_is_no_message(builder):
    inner = builder.put("T", b"inner")
    outer = builder.put("T", bytes(builder.segment(0).read_bytes()[: inner.size_bytes]))
    with StoreReader(builder.root) as store:
        assert store.message_at(outer.physical_offset) == outer
        assert store.message_at(outer.physical_offset + 88) is None


def test_a_message_is_found_by_its_id(builder):
    message = builder.put("T", b"x", store_host="10.0.0.1:10911")
    with StoreReader(builder.root) as store:
        assert store.message(message.msg_id) == message
        assert store.message(message.msg_id.lower()) == message
        assert store.message("7F00000100002A9F" + "0" * 16) is None  # another host's message
        with pytest.raises(FormatError):
            store.message("xyz")


# -- by key


def test_query_finds_unique_keys_and_words(builder):
    one = builder.put("T", b"1", keys="k1 k2", properties={"UNIQ_KEY": "U1"})
    two = builder.put("T", b"2", keys="k2 k2")
    other = builder.put("S", b"3", keys="k2")
    with StoreReader(builder.root) as store:
        assert store.query_message("T", "k1") == [one]
        assert store.query_message("T", "U1") == [one]
        assert store.query_message("T", "k2") == [one, two]
        assert store.query_message("T", "k2", max_messages=1) == [two]  # the newest
        assert store.query_message("S", "k2") == [other]
        assert store.query_message("T", "k3") == []
        with pytest.raises(UsageError):
            store.query_message("T", "k1", max_messages=0)


def test_raw_hits_keep_doubles_and_other_keys_of_the_same_hash(builder):
    assert string_hash("T#Aa") == string_hash("T#BB")
    one = builder.put("T", b"1", keys="Aa Aa")
    two = builder.put("T", b"2", keys="BB")
    with StoreReader(builder.root) as store:
        assert store.query_message("T", "Aa", verify_key=False) == [one, one, two]
        assert store.query_message("T", "Aa") == [one]
        assert store.query_message("T", "BB") == [two]


def test_a_message_whose_keys_have_one_hash_is_read_once_for_a_query(builder, monkeypatch):
    words = ["".join(pairs) for pairs in itertools.product(("Aa", "BB"), repeat=4)]
    messages, read = [builder.put("T", b"x", keys=" ".join(words[1:])) for _ in range(3)], []
    with StoreReader(builder.root) as store:
        message_below = store._message_below
        monkeypatch.setattr(store, "_message_below", lambda offset, limit: read.append(offset) or message_below(offset, limit))
        assert store.query_message("T", words[0]) == []
        assert read == [message.physical_offset for message in reversed(messages)]


def test_query_by_time_in_whole_seconds_of_the_index(builder):
    messages = [builder.put("T", b"x", keys="k") for _ in range(6)]
    with StoreReader(builder.root) as store:
        found = store.query_message("T", "k", START_MS + 2000, START_MS + 4000)
        assert found == messages[2:5]
        assert store.query_message("T", "k", START_MS + 9000) == []
        assert store.query_message("T", "k", 0, START_MS - 1) == []


def test_query_by_time_is_exact_to_the_millisecond_whatever_the_index_rounds(builder, rng):
    messages = []
    for number in range(36):
        if number in (12, 24):
            builder.next_index_file()
            builder.now_ms += 30_000
        builder.now_ms += rng.choice((0, 0, 1, 300, 999, 2500)) - 1000  # each put adds a second
        messages.append(builder.put("T", b"%d" % number, keys="k"))
    times = sorted({one.store_timestamp_ms + step for one in messages for step in (-1, 0, 1)})
    with StoreReader(builder.root) as store:
        for begin_ms, end_ms in [(0, None), *((time, None) for time in times), *((0, time) for time in times),
                                 *(sorted(rng.sample(times, 2)) for _ in range(300)), *((time, time) for time in times)]:
            expected = [one for one in messages if begin_ms <= one.store_timestamp_ms <= (times[-1] if end_ms is None else end_ms)]
            assert store.query_message("T", "k", begin_ms, end_ms) == expected, (begin_ms, end_ms)
            assert store.query_message("T", "k", begin_ms, end_ms, max_messages=3) == expected[-3:], (begin_ms, end_ms)
        late = messages[12].store_timestamp_ms  # entry 1 of a file: RocketMQ computes a time that is 30 s later
        assert messages[12] not in store.query_message("T", "k", late, late, verify_key=False)


def test_query_sees_nothing_beyond_its_level(builder):
    one = builder.put("T", b"1", keys="k")
    builder.put("T", b"2", keys="k")
    with StoreReader(builder.root, watermark=FixedWatermark(committed=one.size_bytes)) as store:
        assert store.query_message("T", "k") == [one]
        assert store.query_message("T", "k", verify_key=False) == [one]


def test_query_through_a_gap_of_deleted_messages(builder):
    for number in range(30):
        builder.put("T", b"x" * 100, keys="k")
    builder.segment(0).unlink()
    with StoreReader(builder.root) as store:
        found = store.query_message("T", "k")
        assert found and all(message.physical_offset >= 4096 for message in found)
        assert store.query_message("T", "k", verify_key=False) == found


def test_an_index_of_other_sizes_is_refused_only_when_asked(builder):
    builder.put("T", b"x", keys="k")
    with StoreReader(builder.root) as store:
        assert len(store.query_message("T", "k")) == 1
    path = next(builder.paths.index.iterdir())
    with open(path, "ab") as file:
        file.write(bytes(8))  # no layout has this length with these chains
    with StoreReader(builder.root) as store:
        assert store.get_message("T", 0, 0).status is GetStatus.FOUND
        with pytest.raises(StoreRefusedError, match="max_hash_slot_num"):
            store.query_message("T", "k")


# -- by time


def test_offset_by_time_and_its_ties(builder):
    put_all(builder, 5)  # one a second
    os.utime(builder.queue_file("T", 0), ns=(0, (START_MS + 4000) * 1_000_000))
    with StoreReader(builder.root) as store:
        for timestamp_ms, offset in (
            (0, 0),
            (START_MS - 1, 0),
            (START_MS, 0),
            (START_MS + 1499, 1),
            (START_MS + 1500, 1),  # the older one on a tie
            (START_MS + 1501, 2),
            (START_MS + 4000, 4),
            (START_MS + 99000, 4),
        ):
            assert store.offset_by_time("T", 0, timestamp_ms) == offset, timestamp_ms
        assert store.offset_by_time("X", 0, START_MS) == 0


def test_the_nearest_message_is_found_where_a_queue_file_ends(builder):
    put_all(builder, 25)  # one a second, ten in a file
    with StoreReader(builder.root) as store:
        for offset in range(24):
            found = [store.offset_by_time("T", 0, START_MS + 1000 * offset + after_ms) for after_ms in (1, 499, 500, 501, 999)]
            assert found == [offset, offset, offset, offset + 1, offset + 1], offset


def test_the_oldest_message_of_just_that_time_is_found(builder):
    for number in range(30):
        builder.now_ms = START_MS + 1000 * (number // 15)
        builder.put("T", b"x")
    with StoreReader(builder.root) as store:
        assert [store.offset_by_time("T", 0, START_MS + after_ms) for after_ms in (-1, 0, 500, 501, 1000, 9000)] == [0, 0, 14, 15, 15, 29]


def test_rocketmq_picks_the_queue_file_by_its_modification_time(builder):
    put_all(builder, 25)
    for start in (0, 200, 400):
        os.utime(builder.queue_file("T", 0, start), ns=(0, (START_MS + start * 1000) * 1_000_000))
    with StoreReader(builder.root) as store:
        entries = store._entries("T", 0, None)
        assert offset_by_time(entries, store.commit_log, START_MS + 15_000, as_rocketmq=True) == 15  # in the second file
        assert offset_by_time(entries, store.commit_log, START_MS, as_rocketmq=True) == 0
        os.utime(builder.queue_file("T", 0, 0), ns=(0, (START_MS + 15_000) * 1_000_000))
        assert offset_by_time(entries, store.commit_log, START_MS + 15_000, as_rocketmq=True) == 9  # the last of the file


@pytest.mark.parametrize("file_ms", [START_MS - 3_600_000, START_MS + 3_600_000])
def test_the_times_of_files_do_not_mislead_a_look_up_by_time(builder, file_ms):
    """The wall clock was ahead and was set back: store times never go back, file times do. A copy has the time of the copy."""
    put_all(builder, 25)
    for start in (0, 200, 400):
        os.utime(builder.queue_file("T", 0, start), ns=(0, (file_ms + start) * 1_000_000))
    with StoreReader(builder.root) as store:
        for offset in range(25):
            assert store.offset_by_time("T", 0, START_MS + 1000 * offset) == offset
        assert store.offset_by_time("T", 0, START_MS - 1) == 0
        assert store.offset_by_time("T", 0, START_MS + 99_000) == 24


# -- files


def test_topics_and_their_queues(builder):
    builder.put("b", queue_id=10)
    builder.put("b", queue_id=9)
    builder.put("a")
    (builder.paths.consume_queue / "empty" / "0").mkdir(parents=True)
    (builder.paths.consume_queue / "odd" / "x").mkdir(parents=True)
    (builder.paths.consume_queue / "file").write_text("a user's")
    with StoreReader(builder.root) as store:
        assert store.topics() == {"a": [0], "b": [9, 10]}
        assert (store.queue_ids("b"), store.queue_ids("file"), store.queue_ids("none")) == ([9, 10], [], [])


def test_a_queue_that_this_user_may_not_read_is_not_absent(builder, monkeypatch):
    """A group that was told so would begin again at offset 0."""
    builder.put("a")
    found = os.stat

    def refused(path, *rest, **named):
        if f"{builder.paths.consume_queue}/" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return found(path, *rest, **named)

    with StoreReader(builder.root) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refused)
            for call in (lambda: store.queue_range("a", 0), lambda: store.get_message("a", 0, 0), lambda: store.queue_ids("a")):
                with pytest.raises(DiskError, match="cannot read .*consumequeue/a.*: Permission denied"):
                    call()
        assert store.queue_range("a", 0) == (0, 1) and store.queue_range("a" * 300, 0) == (0, 0)


def test_a_reader_follows_a_store_that_grows(builder):
    with StoreReader(builder.root, mapped_file_size_commit_log_bytes=4096, mapped_file_size_consume_queue_bytes=200,
                    max_hash_slot_num=16, max_index_num=40) as store:
        assert store.topics() == {}
        offset = 0
        for number in range(70):  # over two segments and six queue files
            builder.put("T", str(number).encode(), keys=f"k{number % 7}")
            result = store.get_message("T", 0, offset)
            assert (bodies(result), result.next_begin_offset) == ([str(number).encode()], number + 1)
            offset = result.next_begin_offset
            if number < 30:
                assert len(store.query_message("T", f"k{number % 7}")) == number // 7 + 1


def test_a_path_without_a_store_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(NotAStoreError):
            StoreReader(path)


def test_a_foreign_file_in_the_log_is_refused(builder):
    put_all(builder, 1)
    (builder.paths.commit_log / "x.tmp").write_bytes(b"")
    with StoreReader(builder.root, watermark=FixedWatermark(committed=100)) as store:
        with pytest.raises(StoreRefusedError):
            store.get_message("T", 0, 0)


def test_a_closed_reader_says_so(builder):
    put_all(builder, 1)
    store = StoreReader(builder.root)
    store.close()
    store.close()
    for ask in (store.topics, lambda: store.get_message("T", 0, 0), lambda: store.message_at(0), store.__enter__):
        with pytest.raises(UsageError, match="closed: open the store again"):
            ask()


def test_many_queues_keep_a_bounded_number_of_files_open(builder):
    queues = MAPPINGS_MAX + 50
    for number in range(queues):
        builder.put("T", queue_id=number)
    with StoreReader(builder.root) as store:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(queues):
            assert store.get_message("T", number, 0).status is GetStatus.FOUND
        assert len(os.listdir("/proc/self/fd")) - before <= MAPPINGS_MAX


def test_threads_may_share_a_reader(builder):
    put_all(builder, 200)
    wrong = []
    with StoreReader(builder.root) as store:

        def read() -> None:
            offset, seen = 0, []
            while offset < 200:
                result = store.get_message("T", 0, offset, 7)
                seen += [int(message.body) for message in result.messages]
                offset = result.next_begin_offset
            if seen != list(range(200)):
                wrong.append(seen)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def fingerprint(root: Path) -> dict[str, tuple]:
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("name", ["roll", "cqext"])
def test_reading_changes_nothing(golden, name):
    root = golden(name).root
    before = fingerprint(root)
    with StoreReader(root) as store:
        for topic, queue_ids in store.topics().items():
            for queue_id in queue_ids:
                store.get_message(topic, queue_id, 0)
                store.offset_by_time(topic, queue_id, START_MS)
            store.query_message(topic, "k1")
        store.message_at(0)
    assert fingerprint(root) == before


def test_a_read_only_directory_can_be_read(golden):
    root = golden("basic").root
    for path in sorted(root.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with StoreReader(root) as store:
        assert store.message_at(0) is not None
    for path in root.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


@pytest.mark.parametrize("name", CLEAN)
def test_every_message_of_a_golden_store_is_found_by_queue_offset_and_id(golden, name):
    store_copy = golden(name)
    with StoreReader(store_copy.root) as store:
        for expected in store_copy.verify["messages"]:
            found = store.message_at(expected["phy"])
            assert hashlib.sha256(found.body).hexdigest() == expected["bodySha"]
            assert store.message(expected["msgId"]) == found
            if expected["uniq"]:
                assert found in store.query_message(expected["topic"], expected["uniq"])


def test_filler_entries_count_nowhere(builder):
    builder.write_entry("T", 0, 0, 0, CQ_FILLER_SIZE, 0)
    with StoreReader(builder.root, watermark=FixedWatermark(committed=0)) as store:
        assert store.get_message("T", 0, 0).messages == []


def test_an_entry_that_leads_to_another_queues_record_gives_nothing(builder):
    other = [builder.put("other", b"a"), builder.put("T", b"b", queue_id=1)]
    mine = builder.put("T", b"c")
    light = builder.put("other", b"d", properties={"INNER_MULTI_DISPATCH": "T", "INNER_MULTI_QUEUE_OFFSET": "3"})
    for number, message in enumerate((other[0], mine, other[1], light)):
        builder.write_entry("T", 0, number, message.physical_offset, message.size_bytes, 0)
    with StoreReader(builder.root, watermark=FixedWatermark(committed=builder.end)) as store:
        found = store.get_message("T", 0, 0)
    assert [message.body for message in found.messages] == [b"c", b"d"]
    assert (found.queue_offsets, found.next_begin_offset) == ([1, 3], 4)
    assert [(m.queue_id, m.queue_offset) for m in found._placed("T", 0)] == [(0, 1), (0, 3)]


@pytest.mark.parametrize("size_bytes", [1, 8, 60])
def test_a_look_up_by_time_passes_an_entry_that_leads_to_a_segments_last_bytes(builder, size_bytes):
    for _ in range(40):
        builder.put("T", b"x" * 100)
    builder.write_entry("T", 0, 4, builder.geometry.mapped_file_size_commit_log_bytes - size_bytes, size_bytes, 0)
    with StoreReader(builder.root, watermark=FixedWatermark(committed=builder.end)) as store:
        for number in range(10):
            assert 0 <= store.offset_by_time("T", 0, START_MS + 1000 * number) < 40


# -- as columns


def test_scan_gives_the_log_as_arrow_batches(golden):
    pyarrow = pytest.importorskip("pyarrow")
    copy = golden("roll")
    with StoreReader(copy.root) as store:
        table = pyarrow.Table.from_batches(list(store.scan(columns=["topic", "queueId", "queueOffset", "body", "msgId"])))
        messages = [store.message_at(record["phy"]) for record in copy.verify["records"] if "topic" in record]
        assert table.to_pylist() == [
            {"topic": m.topic, "queueId": m.queue_id, "queueOffset": m.queue_offset, "body": m.body, "msgId": m.msg_id}
            for m in messages
        ]
        topic = messages[0].topic
        some = pyarrow.Table.from_batches(list(store.scan(topics=[topic], columns=["physicalOffset"])))
        assert some["physicalOffset"].to_pylist() == [m.physical_offset for m in messages if m.topic == topic]
        with pytest.raises(UsageError, match="nonsense"):
            store.scan(columns=["nonsense"])


def test_scan_ends_at_its_level_and_begins_after_what_was_deleted(builder):
    messages = put_all(builder, 120)
    builder.segment(0).unlink()
    kept = [message for message in messages if message.physical_offset >= 4096]
    half = kept[len(kept) // 2].physical_offset
    marks = FixedWatermark(committed=builder.end, flushed=half)
    with StoreReader(builder.root, watermark=marks) as store:
        offsets = {
            level: [row for batch in store.scan(columns=["physicalOffset"], level=level) for row in batch[0].to_pylist()]
            for level in ("committed", "flushed")
        }
    assert offsets["committed"] == [message.physical_offset for message in kept]
    assert offsets["flushed"] == [message.physical_offset for message in kept if message.physical_offset < half]


def test_scan_of_a_segment_that_is_deleted_meanwhile(builder, monkeypatch):
    """Bytes of a segment that is deleted during the copy are dropped; damage in a segment that still exists is reported."""
    messages = put_all(builder, 120)
    with StoreReader(builder.root, watermark=FixedWatermark(committed=builder.end)) as store:
        real = store.commit_log.view

        def view_then_delete(start):
            view = real(start)
            if start == 0:
                builder.segment(0).rename(builder.root / "away")
                with open(builder.root / "away", "r+b") as file:
                    file.seek(messages[5].physical_offset)
                    file.write(bytes(100))
            return view

        monkeypatch.setattr(store.commit_log, "view", view_then_delete)
        found = [offset for batch in store.scan(columns=["physicalOffset"]) for offset in batch[0].to_pylist()]
        gone = [message.physical_offset for message in messages if message.physical_offset < 4096]
        assert gone and set(found) | set(gone) == {message.physical_offset for message in messages}
        assert not set(found) & set(gone) and found == sorted(found)
        builder.write_log(bytes(100), at=next(m.physical_offset for m in messages if m.physical_offset > 5000))
        with pytest.raises(CorruptionError):
            list(store.scan())
