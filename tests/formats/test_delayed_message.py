"""Deliveries of delayed messages are RocketMQ's, byte for byte; some messages can never be delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fix_golden import load_manifest
from pyengine.client.outgoing import delayed
from pyengine.formats.constants import (
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    TRANSACTION_DISCARD_TOPIC,
    TRANSACTION_HALF_TOPIC,
    TRANSACTION_OP_TOPIC,
)
from pyengine.formats.delayed_message import DEFAULT_DELAYS_MS, DelayedId, DelayMark, Delivery, delivery_of, wait_level
from pyengine.formats.record import Message, decode_properties, hash_map_order
from pyengine.storage.store_reader import StoreReader
from record_bytes import encode_record


def test_every_delivery_of_the_real_store_comes_out_byte_for_byte(golden):
    store = golden("delay")
    log = (store.root / "commitlog" / ("0" * 20)).read_bytes()
    puts = {row["phy"] for row in store.manifest["puts"]}
    with StoreReader(store.root) as reader:
        waiting = {message.uniq_key: message for level in range(5)
                   for message in reader.get_message(SCHEDULE_TOPIC, level, 0).messages}
        delivered = [reader.message_at(row["phy"]) for row in store.manifest["records"] if row["phy"] not in puts]
    assert len(delivered) == 24
    for theirs in delivered:
        original = waiting[theirs.uniq_key]
        ours = delivery_of(original)
        record = encode_record(
            topic=ours.topic, body=original.body, queue_id=ours.queue_id, queue_offset=theirs.queue_offset,
            properties=ours.properties_text, store_timestamp_ms=theirs.store_timestamp_ms,
            physical_offset=theirs.physical_offset, flag=original.flag, sys_flag=original.sys_flag,
            born_timestamp_ms=original.born_timestamp_ms, born_host=original.born_host, store_host=original.store_host,
            reconsume_times=original.reconsume_times, prepared_transaction_offset=0)
        assert bytes(record) == log[theirs.physical_offset:theirs.physical_offset + theirs.size_bytes]


def test_a_waiting_message_has_the_text_that_the_real_store_wrote():
    rows = [row for row in load_manifest("delay")["puts"] if row["delayLevel"] > 0]
    assert len(rows) == 45
    for row in rows:
        assert delayed(row["topic"], row["queueId"], row["propsIn"], row["delayLevel"], 5) == (
            row["topicStored"], row["queueIdStored"], row["props"])


@pytest.mark.parametrize(("count", "theirs"), [
    (12, "14 35 56 77 21 42 7 63 70 0 28 49"),
    (13, "28 49 14 35 56 77 21 42 7 63 84 70 0"),
    (30, "196 133 112 175 154 119 14 35 56 77 98 70 91 140 182 161 189 126 203 105 168 147 28 49 21 42 7 63 84 0"),
])
def test_the_order_is_that_of_a_java_map(count, theirs):
    """`theirs` was printed by a JVM; 13 names make the map grow, 25 once more."""
    names = [f"name{number * 7}" for number in range(count)]
    assert hash_map_order(names) == [f"name{number}" for number in theirs.split()]
    assert hash_map_order(["Aa", "BB"]) == ["Aa", "BB"] and hash_map_order(["BB", "Aa"]) == ["BB", "Aa"], "one hash"


@pytest.mark.parametrize(
    ("left_ms", "level"),
    [(1, 1), (1000, 1), (1001, 1), (4000, 2), (4001, 2), (5001, 2), (29_500, 4), (100_000, 5), (7_200_000, 18), (40 * 86_400_000, 18)],
)
def test_a_time_of_its_own_is_reached_by_the_levels_that_fit(left_ms, level):
    assert wait_level(left_ms, DEFAULT_DELAYS_MS) == level


@pytest.mark.parametrize(("left_ms", "level"), [(5, 2), (90_000, 1), (10**9, 1), (61_000, 1), (59_500, 1), (40_000, 2)])
def test_the_levels_of_a_table_need_no_order(left_ms, level):
    assert wait_level(left_ms, [60_000, 10_000]) == level


TIMED = {"__PYENGINE_DELIVER_AT": "5000", "__PYENGINE_TOPIC": "T", "__PYENGINE_QID": "3"}


def test_a_message_with_a_time_of_its_own_goes_on_waiting_or_to_its_topic():
    waiting = message(TAGS="t", DELAY="4", REAL_TOPIC=TIMER_TOPIC, REAL_QID="0", **TIMED)
    on = delivery_of(waiting, 4000, DEFAULT_DELAYS_MS)
    assert (on.topic, on.queue_id, on.delay_level) == (TIMER_TOPIC, 0, 1)
    assert decode_properties(on.properties_text) == {"TAGS": "t", **TIMED}
    assert delivery_of(waiting, 5000, DEFAULT_DELAYS_MS) == Delivery("T", 3, "TAGS\x01t")


@pytest.mark.parametrize("changed", [
    {"__PYENGINE_DELIVER_AT": "soon"}, {"__PYENGINE_DELIVER_AT": "9" * 5000}, {"__PYENGINE_QID": "-1"}, {"__PYENGINE_TOPIC": TIMER_TOPIC},
    {"__PYENGINE_TOPIC": SCHEDULE_TOPIC}, {"__PYENGINE_TOPIC": TRANSACTION_OP_TOPIC}, {"__PYENGINE_TOPIC": TRANSACTION_DISCARD_TOPIC},
], ids=range(7))
def test_a_time_of_its_own_that_makes_no_sense_is_never_delivered(changed):
    waiting = message(REAL_TOPIC=TIMER_TOPIC, REAL_QID="0", **(TIMED | changed))
    assert "does not say which topic" in delivery_of(waiting, 0, DEFAULT_DELAYS_MS)


def message(**properties: str) -> Message:
    text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
    return Message(topic=SCHEDULE_TOPIC, body=b"", queue_id=0, queue_offset=0, physical_offset=0, size_bytes=0,
                   raw_properties=text)


@pytest.mark.parametrize(("properties", "why"), [
    ({"DELAY": "1"}, "no REAL_TOPIC"),
    ({"REAL_TOPIC": TRANSACTION_HALF_TOPIC, "REAL_QID": "0"}, "takes no delayed messages"),
    ({"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"}, "takes no delayed messages"),
    ({"REAL_TOPIC": "T"}, "is not a queue"),
    ({"REAL_TOPIC": "T", "REAL_QID": "-1"}, "is not a queue"),
    ({"REAL_TOPIC": "T", "REAL_QID": "9999999999"}, "is not a queue"),
    ({"REAL_TOPIC": "T", "REAL_QID": "²"}, "is not a queue"),
])
def test_a_message_that_can_never_be_delivered_has_a_reason(properties, why):
    assert why in delivery_of(message(**properties))


def test_properties_that_a_reader_would_not_see_are_left_out_of_the_new_text():
    made = delivery_of(Message(topic=SCHEDULE_TOPIC, body=b"", queue_id=0, queue_offset=0, physical_offset=0, size_bytes=0,
                               raw_properties="TAGS\x01\x02REAL_QID\x013\x02REAL_TOPIC\x01T\x02a\x01b\x02"))
    assert isinstance(made, Delivery) and (made.topic, made.queue_id) == ("T", 3)
    assert decode_properties(made.properties_text) == {"REAL_QID": "3", "REAL_TOPIC": "T", "a": "b"}
    assert "TAGS" not in made.properties_text and not made.properties_text.endswith("\x02")


@pytest.mark.parametrize("now_ms", [0, 100])
@pytest.mark.parametrize("topic", ["orders", TIMER_TOPIC])
def test_a_delivery_enters_no_second_queue(topic, now_ms):
    text = (f"REAL_TOPIC\x01{topic}\x02REAL_QID\x010\x02DELAY\x011\x02INNER_MULTI_DISPATCH\x01copies\x02INNER_MULTI_QUEUE_OFFSET\x010"
            "\x02__PYENGINE_DELIVER_AT\x0150\x02__PYENGINE_TOPIC\x01orders\x02__PYENGINE_QID\x010")
    delivery = delivery_of(Message(SCHEDULE_TOPIC, b"x", 0, 0, 0, 200, text), now_ms, DEFAULT_DELAYS_MS)
    assert isinstance(delivery, Delivery) and "INNER_MULTI" not in delivery.properties_text


def test_a_message_is_named_after_its_first_record():
    first = replace(message(REAL_TOPIC=TIMER_TOPIC, REAL_QID="0", **TIMED, __PYENGINE_FIRST=DelayedId(0, 0).text),
                    physical_offset=77, store_timestamp_ms=1_700_000_000_000)
    assert DelayedId.of(first) == (77, 1_700_000_000_000)
    moved = delivery_of(first, 4000, DEFAULT_DELAYS_MS).properties_text
    second = replace(message(REAL_TOPIC=TIMER_TOPIC, REAL_QID="0", **decode_properties(moved)), physical_offset=999)
    assert DelayedId.of(second) == DelayedId.of(first) and len(moved) == len(delivery_of(second, 4000, DEFAULT_DELAYS_MS).properties_text)
    assert DelayMark.of(second) == DelayMark(77, 1_700_000_000_000, 1, 0, 5000)
    assert delivery_of(second, 5000, DEFAULT_DELAYS_MS) == Delivery("T", 3, "")


def test_a_message_that_an_earlier_version_put_moves_as_it_was_and_cannot_be_cancelled():
    """It may have no room for another property."""
    waiting = message(REAL_TOPIC=TIMER_TOPIC, REAL_QID="0", **TIMED)
    assert decode_properties(delivery_of(waiting, 4000, DEFAULT_DELAYS_MS).properties_text) == TIMED
    assert "an earlier version has put it" in DelayMark.of(waiting)
