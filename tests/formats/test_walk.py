"""The walk over a segment: where it ends, why, and what it passed."""

from __future__ import annotations

import pytest

from pyengine.errors import UsageError
from pyengine.formats.message import encode_blank, encode_record
from pyengine.formats.walk import WalkResult, iter_records, walk

BASE = 8192


def segment(*bodies: bytes, tail: bytes = b"") -> tuple[bytes, list[int]]:
    """Records of these bodies from BASE on, then `tail`; and the records' offsets with the end."""
    data, offsets = b"", [BASE]
    for number, body in enumerate(bodies):
        data += encode_record(topic="T", body=body, physical_offset=offsets[-1], store_timestamp_ms=1000 + number)
        offsets.append(BASE + len(data))
    return data + tail, offsets


def test_a_whole_segment_ends_at_its_blank():
    data, offsets = segment(b"a", b"bb", b"ccc", tail=encode_blank(8))
    assert walk(data, BASE, BASE, BASE + len(data)) == WalkResult(offsets[3], "blank", 4, 3, 1000, 1002)


def test_a_range_ends_at_a_record_boundary():
    data, offsets = segment(b"a", b"bb", b"ccc", tail=bytes(100))
    assert walk(data, BASE, offsets[1], offsets[2]) == WalkResult(offsets[2], "range_end", 1, 1, 1001, 1001)


def test_nothing_at_all():
    assert walk(b"", BASE, BASE, BASE) == WalkResult(BASE, "range_end", 0, 0, -1, -1)
    assert walk(bytes(64), BASE, BASE, BASE + 64) == WalkResult(BASE, "zeroes", 0, 0, -1, -1)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda data, at: data.__setitem__(slice(at, at + 4), bytes(4)), "torn"),
        (lambda data, at: data.__setitem__(at + 4, 0), "foreign"),
        (lambda data, at: data.__setitem__(slice(at, len(data)), bytes(len(data) - at)), "zeroes"),
        (lambda data, at: data.__setitem__(at, 0x7F), "overrun"),
        (lambda data, at: data.__setitem__(at + 35, 7), "offset_mismatch"),
        (lambda data, at: data.__setitem__(at + 88, 7), "bad_crc"),
    ],
)
def test_damage_ends_the_walk_right_before_it(break_it, reason):
    data, offsets = segment(b"a", b"bb", b"ccc", tail=bytes(100))
    broken = bytearray(data)
    break_it(broken, offsets[1] - BASE)
    assert walk(broken, BASE, BASE, BASE + len(data)) == WalkResult(offsets[1], reason, 1, 1, 1000, 1000)


def test_text_is_judged_when_strict():
    data, offsets = segment(b"a", b"bb")
    broken = bytearray(data)
    broken[offsets[2] - BASE - 3] = 0  # the topic of the second record
    assert walk(broken, BASE, BASE, offsets[2]).reason == "range_end"
    assert walk(broken, BASE, BASE, offsets[2], strict=True)[:2] == (offsets[1], "bad_text")


def test_a_range_outside_the_segment_is_refused():
    for start, end in ((BASE - 1, BASE), (BASE, BASE + 9), (BASE + 4, BASE + 3)):
        with pytest.raises(UsageError):
            walk(bytes(8), BASE, start, end)


def test_iter_records_gives_messages_and_the_blank():
    data, offsets = segment(b"a", b"bb", tail=encode_blank(20))
    *messages, blank = iter_records(data, BASE, BASE, BASE + len(data))
    assert [message.body for message in messages] == [b"a", b"bb"]
    assert [message.physical_offset for message in messages] == offsets[:2]
    assert blank == 20
