"""Any bytes have a label, and real bytes reach every label: in C, and in the Python that other tests compare it with."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.formats.record import CaseLabel, WalkResult, encode_blank
from pyengine.native import scan
from record_bytes import classify, encode_record, iter_records, walk_in_python

RECORD = encode_record(topic="topic", body=b"hello", physical_offset=4096, properties="a\x01b")
BODY_AT = 88
TOPIC_AT = BODY_AT + 5 + 1


def patched(at: int, data: bytes, record: bytes = RECORD) -> bytes:
    return record[:at] + data + record[at + len(data) :]


NOT_STRICT = [
    ("message", RECORD),
    ("message", RECORD + b"whatever follows"),
    ("blank", encode_blank(8)),
    ("blank", encode_blank(8) + b"stale"),
    ("blank", struct.pack(">iI", -1, 0xCBD43194)),  # its size is never read
    ("zeroes", bytes(8)),
    ("zeroes", bytes(500)),
    ("range_end", b""),
    ("range_end", RECORD[:7]),
    ("foreign", patched(4, bytes(4))),  # the size was written, the magic was not
    ("foreign", b"0123456789"),
    ("foreign", patched(4, bytes.fromhex("daa320ab"))),  # the record of RocketMQ 5
    ("overrun", RECORD[:-1]),
    ("overrun", RECORD[:8]),
    ("overrun", patched(0, b"\x7f\xff\xff\xff")),
    ("torn", patched(0, b"\x00\x00\x00\x00")),
    ("torn", patched(0, b"\xff\xff\xff\xff")),
    ("torn", patched(0, struct.pack(">i", len(RECORD) - 1))),
    ("torn", patched(0, struct.pack(">i", 8))),
    ("torn", patched(84, struct.pack(">i", -1))),
    ("torn", patched(84, struct.pack(">i", 1 << 30))),
    ("torn", patched(84, struct.pack(">i", 4))),
    ("torn", patched(TOPIC_AT - 1, b"\x80")),
    ("torn", patched(TOPIC_AT - 1, b"\x00")),
    ("torn", patched(TOPIC_AT + 5, b"\xff\xff")),
    ("torn", patched(36, b"\x00\x00\x00\x10")),  # another host length
    ("offset_mismatch", patched(28, struct.pack(">q", 4095))),
    ("offset_mismatch", patched(28, bytes(8))),
    ("bad_crc", patched(BODY_AT, b"H")),
    ("bad_crc", patched(8, bytes(4))),
    ("message", patched(TOPIC_AT, b"\0")),  # not looked at
]
STRICT = [
    ("message", RECORD),
    ("bad_text", patched(TOPIC_AT + 2, b"\0")),
    ("bad_text", patched(TOPIC_AT, b"\xff")),
    ("bad_text", patched(len(RECORD) - 1, b"\0")),
    ("bad_text", patched(len(RECORD) - 1, b"\xc3")),
    ("bad_crc", patched(BODY_AT, bytes(5), patched(TOPIC_AT, b"\0"))),  # the CRC is judged first
]


@pytest.fixture(params=[classify, scan.classify], ids=["python", "c"])
def judge(request):
    return request.param


@pytest.mark.parametrize(("label", "data"), NOT_STRICT)
def test_bytes_get_their_label(judge, label, data):
    assert judge(data, 0, len(data), 4096) == label


@pytest.mark.parametrize(("label", "data"), STRICT)
def test_strict_also_judges_the_text(judge, label, data):
    assert judge(data, 0, len(data), 4096, strict=True) == label


def test_every_label_is_reached_by_some_bytes():
    assert {label for label, _ in NOT_STRICT + STRICT} == set(CaseLabel)


def test_crc_is_not_looked_at_when_not_asked(judge):
    damaged = patched(BODY_AT, b"H")
    assert judge(damaged, 0, len(damaged), 4096, check_crc=False) == "message"


def test_crc_of_an_empty_body_is_not_looked_at(judge):
    empty = encode_record(topic="t", body=b"")
    assert judge(patched(8, b"\1\2\3\4", empty), 0, len(empty), 0) == "message"


def test_place_is_not_looked_at_when_unknown(judge):
    assert judge(RECORD, 0, len(RECORD), None) == "message"


def test_position_and_room_bound_what_is_looked_at(judge):
    data = b"\0" * 5 + RECORD + RECORD
    assert judge(data, 5, len(RECORD), 4096) == "message"
    assert judge(data, 5, len(RECORD) - 1, 4096) == "overrun"


@given(
    data=st.binary(max_size=160),
    head=st.sampled_from([b"", RECORD[:8], RECORD[:88], RECORD]),
    strict=st.booleans(),
    place=st.sampled_from([None, 4096]),
)
def test_any_bytes_have_a_label(data, head, strict, place):
    content = head + data
    assert isinstance(classify(content, 0, len(content), place, strict=strict), CaseLabel)


BASE = 8192


def segment(*bodies: bytes, tail: bytes = b"") -> tuple[bytes, list[int]]:
    """Records of these bodies from BASE on, then `tail`; and the records' offsets with the end."""
    data, offsets = b"", [BASE]
    for number, body in enumerate(bodies):
        data += encode_record(topic="T", body=body, physical_offset=offsets[-1], store_timestamp_ms=1000 + number)
        offsets.append(BASE + len(data))
    return data + tail, offsets


@pytest.fixture(params=[walk_in_python, scan.walk], ids=["python", "c"])
def walk(request):
    return request.param


def test_a_whole_segment_ends_at_its_blank(walk):
    data, offsets = segment(b"a", b"bb", b"ccc", tail=encode_blank(8))
    assert walk(data, BASE, BASE, BASE + len(data)) == WalkResult(offsets[3], "blank", 4, 3, 1000, 1002)


def test_a_range_ends_at_a_record_boundary(walk):
    data, offsets = segment(b"a", b"bb", b"ccc", tail=bytes(100))
    assert walk(data, BASE, offsets[1], offsets[2]) == WalkResult(offsets[2], "range_end", 1, 1, 1001, 1001)


def test_a_walk_over_no_bytes_or_zeros_finds_no_record(walk):
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
def test_damage_ends_the_walk_right_before_it(walk, break_it, reason):
    data, offsets = segment(b"a", b"bb", b"ccc", tail=bytes(100))
    broken = bytearray(data)
    break_it(broken, offsets[1] - BASE)
    assert walk(broken, BASE, BASE, BASE + len(data)) == WalkResult(offsets[1], reason, 1, 1, 1000, 1000)


def test_text_is_judged_when_strict(walk):
    data, offsets = segment(b"a", b"bb")
    broken = bytearray(data)
    broken[offsets[2] - BASE - 3] = 0  # the topic of the second record
    assert walk(broken, BASE, BASE, offsets[2]).reason == "range_end"
    assert walk(broken, BASE, BASE, offsets[2], strict=True)[:2] == (offsets[1], "bad_text")


def test_iter_records_gives_messages_and_the_blank():
    data, offsets = segment(b"a", b"bb", tail=encode_blank(20))
    *messages, blank = iter_records(data, BASE, BASE, BASE + len(data))
    assert [message.body for message in messages] == [b"a", b"bb"]
    assert [message.physical_offset for message in messages] == offsets[:2]
    assert blank == 20
