"""walk() agrees with the oracle on whole, split and broken segments; sync() finds true beginnings only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import UsageError
from pyengine.formats.record import WalkResult, encode_blank
from pyengine.native.scan import sync, walk
from record_bytes import encode_record, walk_in_python

BASE = 1 << 40


def segment(seed: int, records: int = 30, tail: bytes | None = None) -> tuple[bytes, list[int]]:
    """A segment of varied records from BASE on, and the offsets of their beginnings and of the end."""
    dice = random.Random(seed)
    data, starts = bytearray(), [BASE]
    for number in range(records):
        data += encode_record(
            topic=dice.choice(["T", "topic-00", "主题"]),
            body=dice.randbytes(dice.choice([0, 1, 20, 300])),
            properties=dice.choice(["", "TAGS\x01a", "KEYS\x01k1 k2\x02TAGS\x01b"]),
            physical_offset=starts[-1],
            store_timestamp_ms=1_700_000_000_000 + number,
            born_host=dice.choice(["10.0.0.1:1", "[::1]:1"]),
        )
        starts.append(BASE + len(data))
    data += encode_blank(1000) + bytes(992) if tail is None else tail
    return bytes(data), starts


@pytest.mark.parametrize("seed", range(5))
def test_every_range_walks_as_the_oracle_does(seed):
    data, starts = segment(seed)
    for start in starts:
        for end in (start, start + 1, start + 7, start + 8, *starts, BASE + len(data)):
            if start <= end <= BASE + len(data):
                assert walk(data, BASE, start, end) == walk_in_python(data, BASE, start, end)


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_broken_segments_walk_as_the_oracle_does(seed, changes, check_crc, strict):
    data, _ = segment(seed)
    broken = bytearray(data)
    for at, value in changes:
        broken[at % len(broken)] = value
    end = BASE + len(data)
    options = {"check_crc": check_crc, "strict": strict}
    assert walk(broken, BASE, BASE, end, **options) == walk_in_python(broken, BASE, BASE, end, **options)


def test_a_limit_lets_the_last_record_reach_over_the_end():
    data, starts = segment(1)
    middle = starts[3] + 8
    assert walk(data, BASE, BASE, middle).reason == "overrun"
    assert walk(data, BASE, BASE, middle, limit=starts[4])[:4] == (starts[4], "range_end", 4, 4)
    assert walk(data, BASE, BASE, middle, limit=starts[4] - 1)[:4] == (starts[3], "overrun", 3, 3)


def test_foreign_offsets_can_be_allowed():
    data = encode_record(topic="T", body=b"x", physical_offset=5, store_timestamp_ms=9)
    assert walk(data, BASE, BASE, BASE + len(data)) == WalkResult(BASE, "offset_mismatch", 0, 0, -1, -1)
    allowed = walk(data, BASE, BASE, BASE + len(data), check_offset=False)
    assert allowed == WalkResult(BASE + len(data), "range_end", 1, 1, 9, 9)


def test_ranges_outside_the_view_are_refused():
    data, _ = segment(1)
    top = BASE + len(data)
    for start, end in ((BASE - 1, top), (BASE, top + 1), (top, BASE)):
        with pytest.raises(UsageError):
            walk(data, BASE, start, end)
        with pytest.raises(UsageError):
            sync(data, BASE, start, end)
    with pytest.raises(UsageError):
        walk(data, BASE, BASE, top, limit=top + 1)
    with pytest.raises(UsageError):
        walk(data, BASE, BASE, top, limit=top - 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("certain", [False, True])
def test_sync_from_every_byte(seed, certain):
    data, starts = segment(seed)
    end = starts[-1]
    for from_ in range(BASE, end + 1):
        following = next((start for start in starts[:-1] if start >= from_), None)
        assert sync(data, BASE, from_, end, limit=BASE + len(data), certain=certain) == following, from_


def test_every_split_covers_every_record_once():
    data, starts = segment(2, records=12)
    top = BASE + len(data)
    for split in range(BASE, top + 1):
        found = []
        for start, end in ((BASE, split), (split, top)):
            at = sync(data, BASE, start, end, limit=top)
            while at is not None and at < end:
                step = walk(data, BASE, at, at + 1, limit=top)
                if step.messages == 0:
                    break
                found.append(at)
                at = step.end_offset
        assert found == starts[:-1], split


def test_sync_is_not_deceived_by_records_in_bodies():
    """A body may hold a copied record; it names another offset than the one it is at now."""
    inner = encode_record(topic="T", body=b"inner", physical_offset=BASE + 10_000)
    data = b""
    starts = []
    for _ in range(5):
        starts.append(BASE + len(data))
        data += encode_record(topic="T", body=inner * 3, physical_offset=BASE + len(data))
    for from_ in range(BASE, BASE + len(data)):
        following = next((start for start in starts if start >= from_), None)
        assert sync(data, BASE, from_, BASE + len(data)) == following


def test_a_crafted_body_deceives_all_but_a_certain_sync():
    head = encode_record(topic="T", body=b"", physical_offset=BASE)
    at_inner = BASE + len(head) + 88
    fake = encode_record(topic="T", body=b"fake", physical_offset=at_inner)
    fake += encode_record(topic="T", body=b"fake", physical_offset=at_inner + len(fake))
    outer = encode_record(topic="T", body=fake, physical_offset=BASE + len(head))
    data = head + outer + encode_record(topic="T", body=b"true", physical_offset=BASE + len(head + outer))
    top = BASE + len(data)
    assert sync(data, BASE, BASE + len(head) + 1, top) == at_inner
    assert sync(data, BASE, BASE + len(head) + 1, top, certain=True) == BASE + len(head + outer)


def test_sync_sees_nothing_above_its_limit():
    data, starts = segment(3)
    assert sync(data, BASE, starts[5], starts[6], limit=starts[6]) == starts[5]
    assert sync(data, BASE, starts[5], starts[6] - 1, limit=starts[6] - 1) is None
    assert sync(bytes(5000), 0, 0, 5000) is None
    assert sync(b"", 0, 0, 0) is None
