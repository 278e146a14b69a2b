"""The C record agrees with formats: encoding byte for byte, judging case for case."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pyengine._native import ffi, lib
from pyengine.formats.record import decode_record, encode_blank, encode_host
from pyengine.native.scan import classify
from record_bytes import classify as oracle
from record_bytes import encode_record

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
HOSTS = st.sampled_from(["10.1.2.3:54321", "192.168.0.9:10911", "[2001:db8::1]:54321", "[::ffff:1.2.3.4]:0"])
TOPICS = st.text(max_size=30).filter(lambda text: len(text.encode()) <= 127)
FIELDS = st.fixed_dictionaries(
    {
        "topic": TOPICS,
        "body": st.binary(max_size=300),
        "properties": st.text(max_size=100),
        "queue_id": I32,
        "flag": I32,
        "sys_flag": I32,
        "queue_offset": I64,
        "physical_offset": I64,
        "born_timestamp_ms": I64,
        "store_timestamp_ms": I64,
        "reconsume_times": I32,
        "prepared_transaction_offset": I64,
        "born_host": HOSTS,
        "store_host": HOSTS,
    }
)


def encode(*, topic, body, properties, born_host, store_host, **numbers) -> bytes:
    """The record as ms_record_encode writes it."""
    topic_data, properties_data = topic.encode(), properties.encode()
    born, store = encode_host(born_host), encode_host(store_host)
    sys_flag = numbers.pop("sys_flag", 0) & ~0x30
    sys_flag |= (0x10 if len(born) == 20 else 0) | (0x20 if len(store) == 20 else 0)
    template = ffi.new("struct ms_record_template *", {**numbers, "sys_flag": sys_flag})
    kept = [ffi.from_buffer("uint8_t[]", data) for data in (body, topic_data, properties_data)]
    template.body, template.topic, template.properties = kept
    template.body_bytes, template.topic_bytes, template.properties_bytes = map(len, kept)
    ffi.memmove(template.born_host, born, len(born))
    ffi.memmove(template.store_host, store, len(store))
    size = lib.ms_record_bytes(sys_flag, len(topic_data), len(properties_data), len(body))
    target = ffi.new("uint8_t[]", size + 8)
    ffi.memmove(target + size, b"guard---", 8)
    assert lib.ms_record_encode(target, template) == size
    assert ffi.buffer(target)[size:] == b"guard---"
    return ffi.buffer(target)[:size]


@given(FIELDS)
def test_encoding_equals_formats(fields):
    assert encode(**fields) == encode_record(**fields)


def test_the_record_that_rocketmq_wrote():
    """Bytes as the real store wrote them."""
    assert encode(
        topic="T", body=b"hello", properties="KEYS\x01k1 k2\x02UNIQ_KEY\x01UQ01\x02TAGS\x01tagA", queue_id=1, flag=7,
        reconsume_times=2, born_timestamp_ms=1600000000123, born_host="10.1.2.3:54321",
        store_host="192.168.0.9:10911", store_timestamp_ms=0x1A1FC4C93A1,
    ) == bytes.fromhex(
        "00000083daa320a73610a6860000000100000007000000000000000000000000000000000000000000000174876e807b"
        "0a0102030000d431000001a1fc4c93a1c0a8000900002a9f000000020000000000000000"
        "0000000568656c6c6f01540022"
        "4b455953016b31206b3202554e49515f4b4559015551303102544147530174616741"
    )


def test_blanks_equal_those_of_formats():
    target = ffi.new("uint8_t[]", 8)
    for room in (8, 9, 100, 2**31 - 1):
        assert lib.ms_record_encode_blank(target, room) == 8
        assert ffi.buffer(target)[:] == encode_blank(room)


RECORDS = [
    encode_record(topic="topic", body=b"hello, world", physical_offset=4096, properties="TAGS\x01b\x02KEYS\x01k1 k2"),
    encode_record(topic="t", body=b"", physical_offset=4096, born_host="[::1]:5", store_host="[::2]:6"),
    encode_record(topic="主题", body=bytes(40), physical_offset=4096, properties="shop\x01北京"),
    encode_blank(64) + bytes(56),
    bytes(100),
]


@given(
    record=st.sampled_from(RECORDS),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    room=st.integers(0, 250),
    physical_offset=st.sampled_from([None, 4096, 4097]),
    check_crc=st.booleans(),
    strict=st.booleans(),
)
def test_damaged_records_get_the_oracle_s_case(record, changes, room, physical_offset, check_crc, strict):
    data = bytearray(record + bytes(250 - len(record)))
    for at, value in changes:
        data[at] = value
    checks = {"check_crc": check_crc, "strict": strict}
    assert classify(data, 0, room, physical_offset, **checks) == str(oracle(data, 0, room, physical_offset, **checks))


def test_every_byte_of_a_record_at_every_value_gets_the_oracle_s_case():
    """No value of any length field makes the two differ."""
    for record in RECORDS[:3]:
        dice = random.Random(1)
        for at in range(len(record)):
            for value in {0, 1, 127, 128, 255, *(dice.randrange(256) for _ in range(8))}:
                data = bytearray(record)
                data[at] = value
                expected = oracle(data, 0, len(data), 4096, strict=True)
                assert classify(data, 0, len(data), 4096, strict=True) == str(expected), (at, value)


def test_every_truncation_of_a_record_gets_the_oracle_s_case():
    for record in RECORDS:
        for room in range(len(record) + 1):
            assert classify(record[:room], 0, room, None) == str(oracle(record[:room], 0, room))


@given(st.one_of(st.binary(max_size=40), st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_clean_text_is_what_python_decodes_without_nul(data):
    try:
        clean = "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        clean = False
    assert lib.ms_record_text_is_clean(ffi.from_buffer("uint8_t[]", data), len(data)) == int(clean)


def test_all_short_byte_sequences_are_judged_as_python_does():
    """All lead bytes with the edges of what may follow, also behind and before plain text."""
    edges = (0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    for lead in range(256):
        for second in edges:
            for third in edges:
                for prefix, suffix in ((b"", b"\x80"), (b"eight by", b"\x80\x80tes more!")):
                    data = prefix + bytes((lead, second, third)) + suffix
                    try:
                        clean = "\0" not in data.decode("utf-8")
                    except UnicodeDecodeError:
                        clean = False
                    found = lib.ms_record_text_is_clean(ffi.from_buffer("uint8_t[]", data), len(data))
                    assert found == int(clean), data


@given(FIELDS)
def test_an_encoded_record_decodes_to_its_fields(fields):
    data = encode(**fields)
    message = decode_record(data)
    assert (message.topic, message.body, message.raw_properties) == (
        fields["topic"], fields["body"], fields["properties"],
    )
    assert message.size_bytes == len(data)
