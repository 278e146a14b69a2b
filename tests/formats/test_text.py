"""Hashes, properties, message ids, hosts, config text: the rules of sections 5, 6, 12 and 15."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import ConfigError, FormatError, UsageError
from pyengine.formats.delayed_message import (
    DEFAULT_MESSAGE_DELAY_LEVEL,
    parse_delay_levels,
)
from pyengine.formats.record import (
    decode_host,
    decode_message_id,
    decode_properties,
    encode_host,
    encode_message_id,
    encode_properties,
    index_key_hash,
    index_keys,
    is_wait_store_ok,
    split_keys,
    string_hash,
    tags_code,
)
from pyengine.formats.small_file import decode_config, encode_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("tagA", 3552231),
        ("\u4e2d\u6587", 646394),
        ("T#k1", 2539445),
        ("polygenelubricants", -2147483648),
        ("Aa", 2112),
        ("BB", 2112),
        ("\U0001f600", 31 * 0xD83D + 0xDE00),  # two UTF-16 units
        ("\ud83d", 0xD83D),  # a lone surrogate
    ],
)
def test_a_string_hashes_as_in_java(text, expected):
    assert string_hash(text) == expected


@given(st.text())
def test_string_hash_is_the_plain_recurrence_over_utf16_units(text):
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(data), 2):
        value = 31 * value + int.from_bytes(data[at : at + 2], "big")
    value &= 0xFFFFFFFF
    assert string_hash(text) == (value if value < 1 << 31 else value - (1 << 32))


def test_tags_code_is_zero_without_tags_and_keeps_its_sign():
    assert tags_code(None) == tags_code("") == 0
    assert tags_code("tagA") == 0x003633E7
    assert tags_code("polygenelubricants") == -2147483648


def test_index_key_hash_is_never_negative():
    assert index_key_hash("T", "k1") == 2539445
    assert index_key_hash("BB", "key") == index_key_hash("Aa", "key")
    assert min(index_key_hash("T", str(number)) for number in range(200)) >= 0


def test_index_key_hash_of_the_smallest_int_is_zero():
    # Seven units from "@" on, as digits of base 31, reach every 32-bit hash.
    start = string_hash("T#" + "@" * 7)
    missing = (-2147483648 - start) % (1 << 32)
    key = "".join(chr(ord("@") + missing // 31**place % 31) for place in range(6, -1, -1))
    assert string_hash("T#" + key) == -2147483648
    assert index_key_hash("T", key) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x02", {"a": "b"}),  # 4.9.0 ended with a separator
        ("\x02\x02a\x01b\x02\x02c\x01d", {"a": "b", "c": "d"}),
        ("TAGS\x01", {}),  # empty value
        ("\x01b", {}),  # empty name
        ("ab", {}),  # no name-value separator
        ("abc", {}),
        ("a\x01", {}),
        ("a\x01b\x01c", {"a": "b\x01c"}),  # the first separator splits
        ("a\x01\x01", {"a": "\x01"}),
        ("a\x01b\x02a\x01c", {"a": "c"}),  # the last wins
        ("a\x01b\x02a\x01", {"a": "b"}),  # an ignored piece does not win
        ("k\x01 x ", {"k": " x "}),
    ],
)
def test_properties_are_read_as_rocketmq_reads_them(text, expected):
    assert decode_properties(text) == expected


def test_encode_properties_keeps_the_order_and_leaves_none_out():
    assert encode_properties({"b": "1", "a": None, "c": "2"}) == "b\x011\x02c\x012"
    assert encode_properties({}) == ""


_word = st.text(st.characters(exclude_characters="\x01\x02"), min_size=1)


@given(st.dictionaries(_word, _word))
def test_properties_come_back(properties):
    assert decode_properties(encode_properties(properties)) == properties


@pytest.mark.parametrize(
    ("keys", "words"),
    [(None, []), ("", []), ("k", ["k"]), (" lead0  two ", ["lead0", "two"]), ("a\tb c", ["a\tb", "c"]), ("a a", ["a", "a"])],
)
def test_split_keys_at_single_blanks_only(keys, words):
    assert split_keys(keys) == words


def test_index_keys_start_with_the_unique_key():
    assert index_keys({"KEYS": "b a", "UNIQ_KEY": "u"}) == ["u", "b", "a"]
    assert index_keys({"KEYS": "b"}) == ["b"]
    assert index_keys({}) == []


@pytest.mark.parametrize(("value", "waits"), [(None, True), ("true", True), ("TRUE", True), ("false", False), ("1", False)])
def test_a_put_waits_where_wait_is_true_or_absent(value, waits):
    assert is_wait_store_ok({} if value is None else {"WAIT": value}) is waits


def test_message_id_of_an_ipv4_and_an_ipv6_store_host():
    assert encode_message_id("192.168.0.9:10911", 0x83) == "C0A8000900002A9F0000000000000083"
    assert decode_message_id("C0A8000900002A9F0000000000000083") == ("192.168.0.9:10911", 0x83)
    text = encode_message_id("[2001:db8::1]:10911", 5)
    assert len(text) == 56
    assert decode_message_id(text.lower()) == ("[2001:db8::1]:10911", 5)


@pytest.mark.parametrize(
    "text", ["", "xyz", "C0A8000900002A9F00000000000000", "C0" * 17, "C0A8 000900002A9F0000000000000083", "C0" * 8 + "FF" * 8]
)
def test_a_wrong_message_id_is_refused(text):
    with pytest.raises(FormatError) as caught:
        decode_message_id(text)
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2, "a wrong argument is no damage"


def test_the_ids_of_a_batch_are_not_one():
    with pytest.raises(UsageError, match="joined by commas: give one"):
        decode_message_id("C0A8000900002A9F0000000000000083,C0A8000900002A9F0000000000000103")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("10.1.2.3:54321", "0a0102030000d431"),
        ("0.0.0.0:0", "0000000000000000"),
        ("[::]:1", "00" * 16 + "00000001"),
        ("[2001:db8::1]:54321", "20010db80000000000000000000000010000d431"),
    ],
)
def test_a_host_is_its_address_and_port_in_bytes(text, data):
    assert encode_host(text).hex() == data
    assert decode_host(bytes.fromhex(data)) == text


@pytest.mark.parametrize("text", ["", ":1", "1.2.3:1", "1.2.3.4:", "1.2.3.4:x", "::1", "[1.2.3.4]:1", "host:1"])
def test_a_wrong_host_is_refused(text):
    with pytest.raises(UsageError):
        encode_host(text)


def test_host_bytes_of_another_length():
    with pytest.raises(FormatError):
        decode_host(bytes(12))


def test_config_text_with_unquoted_integer_keys():
    assert decode_config('{\n\t"offsetTable":{3:12,12:1\n\t}\n}') == {"offsetTable": {"3": 12, "12": 1}}
    assert decode_config('{"offsetTable":{"t@g":{0:123, -1 : 45}}}') == {"offsetTable": {"t@g": {"0": 123, "-1": 45}}}


def test_config_text_inside_strings_is_left_alone():
    text = '{"a":"{3:12,","b\\"{4:5":[1,2,{7:"x"}]}'
    assert decode_config(text) == {"a": "{3:12,", 'b"{4:5': [1, 2, {"7": "x"}]}
    text = """{"/*":1,"//":"'2'",'it':"'",3:",}"}"""
    assert decode_config(text) == {"/*": 1, "//": "'2'", "it": "'", "3": ",}"}


@pytest.mark.parametrize("text", ["", "{", "{3:12", "offsetTable", "/*", "/*/*" * 10_000, "'" * 10_001, '{"a":,}'])
def test_a_wrong_config_text_is_refused(text):
    with pytest.raises(FormatError):
        decode_config(text)


def test_config_is_written_as_strict_json():
    value = {"offsetTable": {"3": 12}, "topic": "\u5317\u4eac"}
    text = encode_config(value)
    assert json.loads(text) == value == decode_config(text)
    assert text.startswith('{\n\t"offsetTable"') and text.endswith("}\n")


def test_the_default_has_eighteen_delay_levels():
    levels = parse_delay_levels(DEFAULT_MESSAGE_DELAY_LEVEL)
    assert len(levels) == 18
    assert (levels[0], levels[4], levels[17]) == (1000, 60_000, 7_200_000)


@pytest.mark.parametrize("text", ["", "5", "s", "1x", "-1s"])
def test_a_wrong_delay_table_is_refused(text):
    with pytest.raises(ConfigError):
        parse_delay_levels(text)
