"""A record's bytes both ways, its cut by a batch, and what is not a record."""

from __future__ import annotations

import struct
import zlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import FormatError, UsageError
from pyengine.formats import constants
from pyengine.formats.record import (
    BatchMember,
    Message,
    body_crc,
    compression_of,
    decode_batch,
    decode_message_id,
    decode_record,
    decompress_body,
    encode_batch,
    encode_blank,
    encode_host,
    encode_message,
    html_table,
    record_size,
    total_size,
)
from record_bytes import encode_record

GOLDEN = bytes.fromhex(
    "00000083 daa320a7 3610a686 00000001 00000007 0000000000000000 0000000000000000 00000000"
    "00000174876e807b 0a0102030000d431 000001a1fc4c93a1 c0a8000900002a9f 00000002 0000000000000000"
    "00000005 68656c6c6f 01 54 0022"
    "4b455953016b31206b3202554e49515f4b4559015551303102544147530174616741"
)
GOLDEN_PROPERTIES = "KEYS\x01k1 k2\x02UNIQ_KEY\x01UQ01\x02TAGS\x01tagA"
GOLDEN_FIELDS = {
    "topic": "T",
    "body": b"hello",
    "queue_id": 1,
    "flag": 7,
    "properties": GOLDEN_PROPERTIES,
    "born_timestamp_ms": 1600000000123,
    "born_host": "10.1.2.3:54321",
    "store_timestamp_ms": 0x1A1FC4C93A1,
    "store_host": "192.168.0.9:10911",
    "reconsume_times": 2,
}


def test_encode_gives_the_golden_bytes():
    assert encode_record(**GOLDEN_FIELDS).hex() == GOLDEN.hex()


def test_decode_reads_every_field_of_the_golden_bytes():
    message = decode_record(GOLDEN)
    assert message.topic == "T"
    assert message.body == b"hello"
    assert (message.queue_id, message.queue_offset, message.physical_offset) == (1, 0, 0)
    assert message.size_bytes == len(GOLDEN) == 0x83
    assert message.flag == 7
    assert message.sys_flag == 0
    assert message.body_crc == 0x3610A686 == body_crc(b"hello")
    assert message.born_timestamp_ms == 1600000000123
    assert message.born_host == "10.1.2.3:54321"
    assert message.store_timestamp_ms == 0x1A1FC4C93A1
    assert message.store_host == "192.168.0.9:10911"
    assert message.reconsume_times == 2
    assert message.prepared_transaction_offset == 0
    assert message.raw_properties == GOLDEN_PROPERTIES
    assert message.properties == {"KEYS": "k1 k2", "UNIQ_KEY": "UQ01", "TAGS": "tagA"}
    assert (message.tags, message.keys, message.uniq_key) == ("tagA", "k1 k2", "UQ01")
    assert message.msg_id == "C0A8000900002A9F0000000000000000"
    assert encode_message(message) == GOLDEN


def test_ipv6_hosts_set_their_bits_and_cost_twelve_bytes_each():
    data = encode_record(
        topic="abc", body=b"123456789", born_host="[2001:db8::1]:54321", store_host="[::1]:10911"
    )
    assert len(data) == 115 + 3 + 9
    assert data[36:40].hex() == "00000030"
    assert data[48:68].hex() == "20010db80000000000000000000000010000d431"
    message = decode_record(data)
    assert message.born_host == "[2001:db8::1]:54321"
    assert message.store_host == "[::1]:10911"
    assert len(message.msg_id) == 56


def test_host_bits_follow_the_hosts_and_other_bits_stay():
    data = encode_record(topic="t", body=b"", sys_flag=0x3 | 0x8 | 0x30, born_host="[::1]:1", store_host="1.2.3.4:5")
    assert decode_record(data).sys_flag == 0x3 | 0x8 | 0x10


@pytest.mark.parametrize(("body", "crc"), [(b"", 0), (b"123456789", 1274296614)])
def test_a_body_crc_has_no_sign_bit(body, crc):
    assert body_crc(body) == crc


@pytest.mark.parametrize(
    ("sys_flag", "extra"), [(0, 0), (0x10, 12), (0x20, 12), (0x30, 24), (0xC, 0)]
)
def test_record_size_is_91_plus_lengths_plus_12_for_each_ipv6_host(sys_flag, extra):
    assert record_size(5, 1, 0x22, sys_flag) == 91 + 5 + 1 + 0x22 + extra


def test_longest_topic_and_properties():
    message = decode_record(
        encode_record(
            topic="t" * constants.TOPIC_BYTES_MAX, body=b"x", properties="p" * constants.PROPERTIES_BYTES_MAX
        )
    )
    assert len(message.topic) == 127
    assert len(message.raw_properties) == 32767


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": "t" * 128},
        {"topic": "\u5317" * 43},
        {"properties": "p" * 32768},
        {"queue_id": 1 << 31},
        {"queue_offset": 1 << 63},
        {"flag": -(1 << 31) - 1},
        {"born_host": "somewhere"},
        {"born_host": "1.2.3.4"},
        {"store_host": "::1:10911"},
        {"store_host": "1.2.3.4:-1"},
    ],
    ids=str,
)
def test_a_value_longer_than_its_field_is_refused(wrong):
    with pytest.raises(UsageError):
        encode_record(**({"topic": "T", "body": b""} | wrong))


@pytest.mark.parametrize("cut", range(len(GOLDEN)))
def test_every_cut_of_a_record_is_refused(cut):
    with pytest.raises(FormatError):
        decode_record(GOLDEN[:cut])


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, b"\x00\x00\x00\x82"),  # total size one less than the lengths say
        (4, b"\x00\x00\x00\x00"),  # magic
        (84, b"\xff\xff\xff\xff"),  # negative body length
        (84, b"\x7f\xff\xff\xff"),  # body length beyond everything
        (93, b"\x80"),  # negative topic length
        (95, b"\xff\xff"),  # negative properties length
    ],
)
def test_lengths_that_disagree_are_refused(at, data):
    damaged = bytearray(GOLDEN)
    damaged[at : at + len(data)] = data
    with pytest.raises(FormatError):
        decode_record(damaged)


def test_text_that_is_no_utf8_is_read_with_replacement_characters():
    damaged = GOLDEN.replace(b"\x01T\x00\x22", b"\x01\xff\x00\x22")
    assert decode_record(damaged).topic == "\ufffd"


def test_decode_at_a_position_of_any_buffer():
    for buffer in (b"12345" + GOLDEN + b"rest", memoryview(b"12345" + GOLDEN + b"rest")):
        assert decode_record(buffer, 5) == decode_record(GOLDEN)


def test_a_blank_names_the_room_it_fills():
    assert encode_blank(8).hex() == "00000008cbd43194"
    assert total_size(encode_blank(983)) == 983
    with pytest.raises(UsageError):
        encode_blank(7)


_i32 = st.integers(-(1 << 31), (1 << 31) - 1)
_i64 = st.integers(-(1 << 63), (1 << 63) - 1)
_port = st.integers(0, (1 << 31) - 1)
_host = st.one_of(
    st.builds("{}:{}".format, st.ip_addresses(v=4), _port), st.builds("[{}]:{}".format, st.ip_addresses(v=6), _port)
)
_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@given(
    topic=_text.filter(lambda text: len(text.encode()) <= 127),
    body=st.binary(max_size=200),
    properties=_text,
    queue_id=_i32,
    flag=_i32,
    queue_offset=_i64,
    physical_offset=st.integers(0, (1 << 63) - 1),
    sys_flag=st.integers(0, 0xF),
    born_timestamp_ms=_i64,
    born_host=_host,
    store_timestamp_ms=_i64,
    store_host=_host,
    reconsume_times=_i32,
    prepared_transaction_offset=_i64,
)
def test_any_record_comes_back_as_it_was(**fields):
    data = encode_record(**fields)
    message = decode_record(data)
    assert encode_message(message) == data
    assert message.raw_properties == fields.pop("properties")
    v6 = (0x10 if fields["born_host"][0] == "[" else 0) | (0x20 if fields["store_host"][0] == "[" else 0)
    assert message.sys_flag == fields.pop("sys_flag") | v6
    # Two spellings of one IPv6 address are equal as bytes, so hosts are compared by the round trip above.
    del fields["born_host"], fields["store_host"]
    assert {name: getattr(message, name) for name in fields} == fields


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


ZLIB = zlib.compress(b"a body " * 1000, 5)


@pytest.mark.parametrize("sys_flag", [0x1, 0x1 | 0x10 | 0x4, 0x301], ids=["first clients", "other flags", "zlib named"])
def test_a_compressed_body_is_what_the_producer_had(sys_flag):
    assert decompress_body(ZLIB, sys_flag) == decompress_body(memoryview(ZLIB), sys_flag) == b"a body " * 1000
    assert Message("T", ZLIB, 0, 0, 0, 0, sys_flag=sys_flag).content == b"a body " * 1000


def test_a_body_without_the_flag_is_left_as_it_is():
    assert decompress_body(ZLIB, 0x300) == ZLIB and compression_of(0x300) is None
    assert Message("T", ZLIB, 0, 0, 0, 0).content == ZLIB


@pytest.mark.parametrize(("body", "sys_flag", "why"), [
    (b"no stream", 0x1, "not a valid zlib stream"), (b"", 0x1, "ends within"), (ZLIB[:-5], 0x1, "ends within"),
    (ZLIB, 0x101, "LZ4"), (ZLIB, 0x201, "ZSTD"), (ZLIB, 0x701, "compression 7"),
], ids=["other bytes", "nothing", "cut short", "LZ4", "ZSTD", "unknown"])
def test_a_body_that_cannot_be_decompressed_is_refused_with_the_reason(body, sys_flag, why):
    with pytest.raises(FormatError, match=why):
        decompress_body(body, sys_flag)


def test_a_body_that_grows_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("pyengine.formats.record.DECOMPRESSED_BYTES_MAX", 6999)
    with pytest.raises(FormatError, match="more than 6999 bytes"):
        decompress_body(ZLIB, 0x1)
    monkeypatch.setattr("pyengine.formats.record.DECOMPRESSED_BYTES_MAX", 7000)
    assert len(decompress_body(ZLIB, 0x1)) == 7000


@pytest.mark.parametrize("store_host", ["10.0.0.1:10911", "[::1]:10911"])
def test_a_record_with_any_bits_in_its_store_host_has_a_message_id(store_host):
    """No checksum covers them, so `check` cannot find the damage, and one record must not end a listing of all."""
    record = bytearray(encode_record(topic="T", body=b"x", physical_offset=7, store_host=store_host))
    host_bytes = 8 if store_host[0] == "1" else 20
    at = 48 + 8 + 8 + host_bytes - 4  # the store host's port
    record[at] ^= 0x80
    message = decode_record(record)
    host, offset = decode_message_id(message.msg_id)
    assert (host, offset) == (message.store_host, 7) and ":-" in host
    with pytest.raises(UsageError, match="is not a host"):
        encode_host(host)


def test_times_are_datetimes_in_utc_beside_the_milliseconds():
    message = Message("T", b"", 0, 0, 0, 0, born_timestamp_ms=-1, store_timestamp_ms=1_700_000_000_123)
    assert message.store_time == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert message.born_time == datetime(1970, 1, 1, tzinfo=UTC) - timedelta(milliseconds=1)
    assert message.store_time.utcoffset() == timedelta(0)
    far = Message("T", b"", 0, 0, 0, 0, born_timestamp_ms=1 << 62, store_timestamp_ms=-(1 << 62))
    assert (far.born_time.year, far.store_time.year) == (9999, 1)


def test_a_notebook_shows_a_message_as_a_table_without_its_markup():
    message = Message("<b>T</b>", b"<script>" + bytes(1000), 0, 7, 0, 0, raw_properties="TAGS\x01a&b\x02")
    shown = message._repr_html_()
    assert "<script>" not in shown and "<b>" not in shown and "&lt;b&gt;T&lt;/b&gt;" in shown and "a&amp;b" in shown
    assert "(1,008 bytes)" in shown and len(shown) < 1000


def test_a_table_of_a_notebook_has_at_most_a_hundred_rows():
    shown = html_table("numbers", ["number"], ([number] for number in iter(int, 1)))
    assert shown.count("<tr>") == 102 and shown.endswith("<tr><td>...</td></tr></table>")
