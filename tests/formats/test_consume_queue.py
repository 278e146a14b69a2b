"""The positions of a record's further entries, and the files in which they are searched."""

from __future__ import annotations

import pytest

from pyengine.formats.consume_queue import belongs_to, further_offset, further_places, with_further_offsets
from pyengine.formats.record import decode_record
from record_bytes import encode_record


def record(names: str, offsets: str):
    text = f"INNER_MULTI_DISPATCH\1{names}\2INNER_MULTI_QUEUE_OFFSET\1{offsets}"
    return decode_record(encode_record(topic="T", body=b"b", queue_id=2, queue_offset=0, store_timestamp_ms=1, physical_offset=0,
                                       properties=text), 0)


@pytest.mark.parametrize("names, offsets, places", [
    ("%LMQ%a,archive", "5,6", [(0, "%LMQ%a", 0, 5), (1, "archive", 2, 6)]),
    ("%LMQ%a,,archive", "5,0,6", [(0, "%LMQ%a", 0, 5), (2, "archive", 2, 6)]),
    ("%LMQ%a,archive", "5,x", [(0, "%LMQ%a", 0, 5)]),
    ("%LMQ%a,archive", "5", []),
    ("", "", []),
])  # fmt: skip
def test_each_name_has_the_offset_of_the_same_position(names, offsets, places):
    assert further_places(record(names, offsets)) == places


def test_a_record_belongs_to_its_queues_and_to_a_light_one_under_either_number():
    """RocketMQ with enableLmq=false puts the entries of `%LMQ%...` under the record's own queue id."""
    one = record("%LMQ%a,archive", "5,6")
    asked = [(topic, queue_id) for topic in ("T", "%LMQ%a", "archive", "other") for queue_id in range(4)]
    assert [place for place in asked if belongs_to(one, *place)] == [("T", 2), ("%LMQ%a", 0), ("%LMQ%a", 2), ("archive", 2)]


def test_of_a_queue_that_is_named_twice_the_first_offset_counts():
    one = record("%LMQ%a,archive,%LMQ%a", "5,6,7")
    assert [further_offset(one, *place) for place in (("%LMQ%a", 0), ("%LMQ%a", 2), ("archive", 2), ("archive", 0), ("T", 2))] == [
        5, 5, 6, None, None]


def test_only_the_offsets_at_the_given_positions_are_replaced():
    text = b"x\1\xff\xfe\2INNER_MULTI_QUEUE_OFFSET\0015,0,6\2INNER_MULTI_QUEUE_OFFSET2\0019\2"
    assert with_further_offsets(text, {0: 4, 2: 70}) == text.replace(b"5,0,6", b"4,0,70")
