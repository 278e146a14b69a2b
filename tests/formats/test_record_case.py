"""Every state of a log position has exactly one row, and real bytes reach every row."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.formats.message import encode_blank, encode_record
from pyengine.formats.record_case import (
    RECORD_CASES,
    CaseLabel,
    Crc,
    Decision,
    Magic,
    Place,
    Size,
    Text,
    classify,
    find_case,
)

RECORD = encode_record(topic="topic", body=b"hello", physical_offset=4096, properties="a\x01b")
BODY_AT = 88
TOPIC_AT = BODY_AT + 5 + 1


def patched(at: int, data: bytes, record: bytes = RECORD) -> bytes:
    return record[:at] + data + record[at + len(data) :]


def test_every_state_has_exactly_one_row():
    for state in itertools.product(Magic, Size, Place, Crc, Text):
        assert len([case for case in RECORD_CASES if case.matches(*state)]) == 1, state


def test_every_label_has_exactly_one_row_and_only_messages_are_kept():
    assert sorted(case.label for case in RECORD_CASES) == sorted(CaseLabel)
    assert [case.label for case in RECORD_CASES if case.decision is Decision.KEEP] == [CaseLabel.MESSAGE]
    assert [case.label for case in RECORD_CASES if case.decision is Decision.NEXT_FILE] == [CaseLabel.BLANK]


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


@pytest.mark.parametrize(("label", "data"), NOT_STRICT)
def test_bytes_reach_their_row(label, data):
    assert classify(data, 0, len(data), 4096).label == label


@pytest.mark.parametrize(("label", "data"), STRICT)
def test_strict_also_judges_the_text(label, data):
    assert classify(data, 0, len(data), 4096, strict=True).label == label


def test_every_label_is_reached_by_some_bytes():
    assert {label for label, _ in NOT_STRICT + STRICT} == set(CaseLabel)


def test_crc_is_not_looked_at_when_not_asked():
    damaged = patched(BODY_AT, b"H")
    assert classify(damaged, 0, len(damaged), 4096, check_crc=False).label == "message"


def test_crc_of_an_empty_body_is_not_looked_at():
    empty = encode_record(topic="t", body=b"")
    assert classify(patched(8, b"\1\2\3\4", empty), 0, len(empty), 0).label == "message"


def test_place_is_not_looked_at_when_unknown():
    assert classify(RECORD, 0, len(RECORD), None).label == "message"


def test_position_and_room_bound_what_is_looked_at():
    data = b"\0" * 5 + RECORD + RECORD
    assert classify(data, 5, len(RECORD), 4096).label == "message"
    assert classify(data, 5, len(RECORD) - 1, 4096).label == "overrun"


@given(
    data=st.binary(max_size=160),
    head=st.sampled_from([b"", RECORD[:8], RECORD[:88], RECORD]),
    strict=st.booleans(),
    place=st.sampled_from([None, 4096]),
)
def test_any_bytes_have_a_row(data, head, strict, place):
    content = head + data
    case = classify(content, 0, len(content), place, strict=strict)
    assert case in RECORD_CASES
    state = find_case(case.magic, case.size or Size.FITS, case.place or Place.OWN, case.crc or Crc.GOOD, case.text or Text.CLEAN)
    assert state is case
