"""Entries of queues held against their records: a bit that flipped in either is an error, wherever queues are read."""

from __future__ import annotations

import pytest

from fix_golden import CLEAN, usual
from fix_store_builder import StoreBuilder, queue_of
from pyengine.errors import CorruptionError, UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError
from pyengine.spark.presence import queue_end
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.queue_entries import queue_entries, runs_of_segments, wrong_entries
from spark.logs import DAMAGED_END, rows, streamed
from spark.test_presence import stream
from spark.test_queue_view import read

TOPIC, NUMBER = "orders", 7
QUEUE = {"assign": '{"orders": [1]}', "columns": "topic,partition,offset,tags"}
BODY = b"b" * 40
# Where a record with IPv4 hosts has its fields.
BODY_AT, TOPIC_AT = 88, 88 + len(BODY) + 1
PROPERTIES_AT = TOPIC_AT + len(TOPIC) + 2


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    for number in range(40):
        made.put(("orders", "other")[number % 4 == 0], BODY, queue_id=number % 4 // 2, tags=f"t{number % 3}")
    return made


def entry_of(builder: StoreBuilder, number: int = NUMBER) -> tuple[int, int, int]:
    """(offset, size, tags code) of a message of orders/1."""
    with open_store(builder.root) as reader:
        return tuple(queue_of(reader, TOPIC, 1).entry(number, number + 1))


def flip_bit(builder: StoreBuilder, at: int, bit: int) -> None:
    """In the log."""
    path = builder.segment(at)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)


def refused_everywhere(builder: StoreBuilder, sentence: str) -> None:
    for given in ({}, {"tags": "t1"}, {"startingTimestamp": builder.now_ms - 1000}, {"verifyCRC": True}, {"columns": "tags"}):
        with pytest.raises(CorruptionError, match=sentence):
            rows(builder.root, access="queue", **{**QUEUE, **given})
    with pytest.raises(CorruptionError, match=sentence):
        read(builder.root, view="entries", assign='{"orders": [1]}')
    reader = stream(builder, assign='{"orders": [1]}')
    start = reader.initialOffset()
    with pytest.raises(CorruptionError, match=sentence):
        [batch for part in reader.partitions(start, reader.latestOffset(start)) for batch in reader.read(part)]
    reader.stop()


def left_out_everywhere(builder: StoreBuilder) -> None:
    wanted = [number for number in range(20) if number != NUMBER]
    found = rows(builder.root, access="queue", onCorrupt="skip", **QUEUE)
    assert [(topic, queue_id, offset) for topic, queue_id, offset, _ in found] == [(TOPIC, 1, number) for number in wanted]
    listed = read(builder.root, view="entries", assign='{"orders": [1]}', onCorrupt="skip")
    assert [row["offset"] for row in listed] == wanted


@pytest.mark.parametrize(
    ("at", "length", "bits", "sentence"),
    [
        (12, 4, range(8), "entry 7 of queue orders/1 names message 7 of orders/"),
        (20, 8, range(8), "entry 7 of queue orders/1 names message -?[0-9]+ of orders/1"),
        (TOPIC_AT, len(TOPIC), (0, 1, 2), "entry 7 of queue orders/1 names message 7 of "),
        (PROPERTIES_AT + len("TAGS") + 1, 1, (0, 1, 2), "names message 7 of orders/1 with the tags code"),
        (39, 1, (2,), "names message 7 of orders/1, which a transaction has not committed"),
        (28, 8, (0, 5), "names a message at [0-9]+, but there it is offset mismatch"),
    ],
    ids=["queueId", "queueOffset", "topic", "tags", "sysFlag", "physicalOffset"],
)
def test_a_bit_that_flipped_in_a_record_is_an_error_and_is_left_out_if_asked(builder, at, length, bits, sentence):
    begin = entry_of(builder)[0] + at
    everywhere = True
    for place in range(begin, begin + length):
        for bit in bits:
            flip_bit(builder, place, bit)
            if everywhere:
                refused_everywhere(builder, sentence)
                left_out_everywhere(builder)
            with pytest.raises(CorruptionError, match=sentence):
                rows(builder.root, access="queue", **QUEUE)
            flip_bit(builder, place, bit)
            everywhere = False
    assert len(rows(builder.root, access="queue", **QUEUE)) == 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda entry, other: (entry[0], entry[1] + 1, entry[2]), "but there it is"),
        (lambda entry, other: (entry[0] + 1, *entry[1:]), "but there it is"),
        (lambda entry, other: (*entry[:2], entry[2] ^ 1), "with the tags code"),
        (lambda entry, other: other, "entry 7 of queue orders/1 names message 6 of orders/1"),
    ],
    ids=["size", "offset", "tags", "repeat"],
)
def test_an_entry_that_is_not_what_its_record_says_is_an_error_and_is_left_out_if_asked(builder, change, sentence):
    entry = entry_of(builder)
    builder.write_entry(TOPIC, 1, NUMBER, *change(entry, entry_of(builder, NUMBER - 1)))
    refused_everywhere(builder, sentence)
    left_out_everywhere(builder)


OFFSET_BITS, SIZE_BITS = range(64), range(64, 96)


def flip_entry(builder: StoreBuilder, number: int, bit: int) -> None:
    """A bit of an entry of orders/1, counted from its first one."""
    per_file = builder.geometry.mapped_file_size_consume_queue_bytes // 20
    path = builder.queue_file(TOPIC, 1, number // per_file * per_file * 20)
    data = bytearray(path.read_bytes())
    data[number % per_file * 20 + bit // 8] ^= 0x80 >> bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("system", usual(["auto", "arrow"], ["auto"], pytest.mark.ci))
@pytest.mark.parametrize("is_ours", usual([True, False], [True], pytest.mark.ci), ids=["watermark", "rocketmq"])
def test_no_bit_of_an_entry_ends_or_shortens_a_queue_in_silence(builder, is_ours, system, rng, request):
    """Not in its first, its last, and neighbours of a file's boundary either; beyond the log, negative, or another place in it."""
    if is_ours:
        WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    bits = [0, 1, 20, 63 - 13, 64, 95] if not request.config.run_long else [*OFFSET_BITS, *SIZE_BITS]
    for number in (0, NUMBER, 9, 10, 18, 19):
        for bit in (*bits, rng.choice(OFFSET_BITS), rng.choice(SIZE_BITS)):
            flip_entry(builder, number, bit)
            given = {"assign": '{"orders": [1]}', "fileSystem": system}
            named = f"(entry {number} of queue orders/1|orders/1 from offset {number} on)"
            with pytest.raises(CorruptionError, match=named):
                rows(builder.root, access="queue", columns="offset", **given)
            with pytest.raises(CorruptionError, match=named):
                read(builder.root, view="entries", **given)
            with pytest.raises(CorruptionError, match=named):
                streamed(builder.root, columns="offset", **given)
            others = [other for other in range(20) if other != number]
            allowed = {**given, "failOnDataLoss": False, "onCorrupt": "skip"}
            assert [offset for offset, in rows(builder.root, access="queue", columns="offset", **allowed)] == others
            assert [row["offset"] for row in read(builder.root, view="entries", **allowed)] == others
            assert [offset for offset, in streamed(builder.root, columns="offset", **allowed)] == others
            flip_entry(builder, number, bit)
    assert len(rows(builder.root, access="queue", columns="offset", **given)) == 20


def test_with_fail_on_data_loss_false_damage_is_still_an_error_and_a_last_entry_beyond_the_log_is_noted(builder, caplog):
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    given = {"columns": "offset", "assign": '{"orders": [1]}', "access": "queue", "failOnDataLoss": False}
    flip_entry(builder, 12, 3)
    with pytest.raises(CorruptionError, match="entry 12 of queue orders/1 names a message at [0-9]+, beyond the log's end"):
        rows(builder.root, **given)
    flip_entry(builder, 12, 3)
    flip_entry(builder, 19, 3)
    assert [offset for offset, in rows(builder.root, **given)] == list(range(19))
    assert "entry 19 of queue orders/1 names a message at" in caplog.text and "is left out" in caplog.text


@pytest.mark.parametrize(("first", "count"), [(12, 5), (3, 9), (10, 9)])
def test_a_hole_in_a_queue_is_no_end_of_it(builder, first, count):
    """Neighbours that lost their bytes, over a file's boundary and as all that a file has."""
    for number in range(first, first + count):
        builder.write_entry(TOPIC, 1, number, 0, 0, 0)
    wanted = [number for number in range(20) if not first <= number < first + count]
    with pytest.raises(CorruptionError, match=f"entry {first} of queue orders/1 is empty, in the middle of its messages"):
        rows(builder.root, access="queue", **QUEUE)
    found = rows(builder.root, access="queue", onCorrupt="skip", **QUEUE)
    assert [offset for _, _, offset, _ in found] == wanted


def test_entries_beyond_the_level_that_is_read_are_no_damage(builder):
    """As those that a running engine dispatches beyond the limit of a plan."""
    with open_store(builder.root) as reader:
        options = read_options({"path": str(builder.root), **QUEUE})
        queue = queue_of(reader, TOPIC, 1)
        for number in range(1, 20):
            limit = queue.entry(number, 20).physical_offset + 1
            assert queue_end(options, reader, queue, limit) == number


def test_an_entry_that_leads_into_a_deleted_segment_after_one_that_does_not_is_damage(builder):
    for _ in range(40):
        builder.put("orders", BODY, queue_id=1)
    builder.segment(0).unlink()
    first = rows(builder.root, access="queue", **QUEUE)[0][2]
    assert first > 0
    builder.write_entry(TOPIC, 1, 40, 100, entry_of(builder, 40)[1], 0)
    with pytest.raises(CorruptionError, match="entry 40 of queue orders/1 names a message at 100, where the log has no segment"):
        rows(builder.root, access="queue", failOnDataLoss=False, **QUEUE)
    with pytest.raises(CorruptionError, match="entry 40 of queue orders/1 names a message at 100, where the log has no segment"):
        read(builder.root, view="entries", failOnDataLoss=False, assign='{"orders": [1]}')
    found = rows(builder.root, access="queue", onCorrupt="skip", failOnDataLoss=False, **QUEUE)
    assert [offset for _, _, offset, _ in found] == [number for number in range(first, 60) if number != 40]


def test_filler_in_the_middle_of_a_queue_is_an_error(builder):
    builder.write_entry(TOPIC, 1, NUMBER, 0, 0x7FFFFFFF, 0)
    refused_everywhere(builder, "entry 7 of queue orders/1 is filler, in the middle")
    left_out_everywhere(builder)


def test_counts_look_at_the_first_and_the_last_record(builder):
    for number in (0, 19):
        begin = entry_of(builder, number)[0]
        flip_bit(builder, begin + 27, 3)
        with pytest.raises(CorruptionError, match=f"entry {number} of queue orders/1 names message"):
            read(builder.root)
        assert sum(row["messages"] for row in read(builder.root, onCorrupt="skip")) == 40
        flip_bit(builder, begin + 27, 3)
    assert sum(row["messages"] for row in read(builder.root)) == 40


def test_a_queue_file_that_is_missing_in_the_middle_is_a_loss(builder):
    for _ in range(30):
        builder.put("long", BODY)
    builder.queue_file("long", 0, 200).unlink()
    for given in ({"view": "entries"}, {}, {"columns": "bytes"}):
        with pytest.raises(DataLossError, match="consumequeue/long/0/0+200 was deleted after the query was planned"):
            read(builder.root, subscribe="long", **given)
    assert len(read(builder.root, subscribe="long", view="entries", failOnDataLoss=False)) == 20
    assert read(builder.root, subscribe="long", failOnDataLoss=False)[0]["messages"] == 30


@pytest.mark.parametrize("recipe", usual(sorted(set(CLEAN) - DAMAGED_END)))
def test_no_entry_of_a_golden_store_is_wrong(golden, recipe):
    count = 0
    with open_store(golden(recipe).root) as reader:
        limit, size_bytes = reader.max_physical_offset("committed"), reader.commit_log.size_bytes
        for topic, ids in reader.topics().items():
            for queue_id in ids:
                queue = queue_of(reader, topic, queue_id)
                high = queue.max_offset(limit)
                for number, entries in queue_entries(queue, queue.min_offset(reader.min_physical_offset, high), high):
                    for segment, begin, end in runs_of_segments(entries, size_bytes):
                        view = reader.commit_log.view(segment)
                        upto = min(limit, segment + size_bytes)
                        assert list(wrong_entries(view, segment, (topic, queue_id), number + begin, entries[begin:end], upto)) == []
                    count += len(entries)
    assert count or recipe == "empty"


# -- light queues -------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [False, True])
def test_light_queues_are_refused_with_where_their_messages_are(golden, allowed):
    root = golden("lmq").root
    with open_store(root) as reader:
        light = next(topic for topic in reader.topics() if topic.startswith("%LMQ%"))
    for given in ({"subscribe": light}, {"assign": f'{{"{light}": [0]}}'}, {"subscribePattern": "%LMQ%.*"}):
        for more in ({}, {"access": "queue"}, {"fileSystem": "arrow"}):
            with pytest.raises(UsageError, match="%LMQ%.* is a light queue: its messages are rows of their own topics, whose property"):
                rows(root, allowMissing=allowed, **given, **more)
        assert read(root, view="entries", **given)
    assert rows(root, subscribePattern=".*", columns="offset")
