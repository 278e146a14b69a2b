"""A batch in the client's encoding."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import FormatError, UsageError
from pyengine.formats.batch import BatchMember, decode_batch, encode_batch

members = st.builds(
    BatchMember,
    body=st.binary(max_size=40),
    flag=st.integers(-(2**31), 2**31 - 1),
    properties_text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


def test_one_member_byte_for_byte():
    assert encode_batch([BatchMember(b"x", 7, "WAIT\x01true")]) == (
        struct.pack(">iiiii", 32, 0, 0, 7, 1) + b"x" + struct.pack(">h", 9) + b"WAIT\x01true"
    )


@given(st.lists(members, max_size=5))
def test_members_come_back(batch):
    assert decode_batch(encode_batch(batch)) == batch


@given(st.lists(members, min_size=1, max_size=3), st.data())
def test_a_cut_batch_is_refused(batch, data):
    encoded = encode_batch(batch)
    boundaries = {len(encode_batch(batch[:count])) for count in range(len(batch) + 1)}
    cut = data.draw(st.integers(0, len(encoded) - 1).filter(lambda at: at not in boundaries))
    with pytest.raises(FormatError):
        decode_batch(encoded[:cut])


@pytest.mark.parametrize("at, value", [(0, 33), (0, -1), (16, -1), (16, 2), (16, 0x7FFFFFFF)])
def test_lengths_that_do_not_fit_are_refused(at, value):
    encoded = bytearray(encode_batch([BatchMember(b"x", 7, "WAIT\x01true")]))
    struct.pack_into(">i", encoded, at, value)
    with pytest.raises(FormatError):
        decode_batch(bytes(encoded))


def test_properties_that_the_length_field_cannot_hold_are_refused():
    with pytest.raises(UsageError, match="take 32768 bytes; at most 32767 fit"):
        encode_batch([BatchMember(b"", 0, "p" * 32768)])
