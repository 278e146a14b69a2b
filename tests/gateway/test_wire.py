"""Frames of real clients and brokers are read and written as they are; no other bytes do more than a WireError."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pyengine.gateway import wire
from pyengine.gateway.wire import (
    BINARY_FORM,
    JSON_FORM,
    Frame,
    IntKeys,
    ObjectKeys,
    WireError,
    decode_frame,
    encode_frame,
    frame_length,
)

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden_frames.jsonl").read_text().splitlines()]


def test_frames_of_the_real_client_and_broker_are_understood():
    for row in GOLDEN:
        frame = decode_frame(bytes.fromhex(row["frame"]))
        assert frame.is_answer == (row["kind"] == "resp") and frame.is_one_way == (row["kind"] == "oneway"), row["name"]
        assert frame.code == (row["answer"] if frame.is_answer else row["request"]), row["name"]
        assert (frame.language, frame.version, frame.form) == ("JAVA", 409, JSON_FORM)
        assert all(isinstance(value, str) for value in frame.fields.values())


@pytest.mark.parametrize("form", [JSON_FORM, BINARY_FORM], ids=["json", "binary"])
def test_an_encoded_frame_decodes_to_the_same_frame(form):
    for row in GOLDEN:
        frame = decode_frame(bytes.fromhex(row["frame"]))
        frame.form = form
        frame.fields = {name: value for name, value in frame.fields.items() if value or form == JSON_FORM}
        data = encode_frame(frame)
        assert frame_length(data, 0, 16 << 20) == len(data)
        assert decode_frame(data[4:]) == frame


def test_an_answer_is_written_as_the_broker_writes_it():
    """Byte for byte, but for the order of the fields, which is a Java map's."""
    for row in GOLDEN:
        if row["kind"] == "resp":
            data = bytes.fromhex(row["frame"])
            length = int.from_bytes(data[1:4], "big")
            header = json.loads(data[4:4 + length])
            written = encode_frame(decode_frame(data))[4:]
            told = json.loads(written[4:4 + int.from_bytes(written[1:4], "big")])
            assert list(told) == [name for name in header if name != "extFields" or header[name]], row["name"]
            assert told == {name: value for name, value in header.items() if name != "extFields" or value}


def test_a_frame_is_whole_only_with_its_last_byte():
    data = encode_frame(Frame(105, {"topic": "T"}, b"body"))
    assert [frame_length(data[:size], 0, 1000) for size in (0, 3)] == [None, None]
    assert frame_length(data, 0, 1000) == len(data)


@pytest.mark.parametrize("length", [-1, 0, 3, 1001, 0x16030100], ids=["negative", "none", "short", "long", "tls"])
def test_a_length_that_no_frame_has_is_refused(length):
    with pytest.raises(WireError):
        frame_length(struct.pack(">i", length), 0, 1000)


def framed(form: int, header: bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    return struct.pack(">I", form << 24 | (len(header) if length is None else length)) + header + body


HOSTILE = {
    "no header": b"",
    "form": framed(7, b"{}"),
    "header beyond the frame": framed(0, b"{}", length=500),
    "header too long": framed(0, b" " * (wire.HEADER_BYTES_MAX + 1)),
    "no json": framed(0, b"{"),
    "a list": framed(0, b"[]"),
    "deep": framed(0, b"[" * 60_000),
    "code is text": framed(0, b'{"code":"x"}'),
    "code too large": framed(0, b'{"code":9999999999}'),
    "number too long": framed(0, b'{"code":' + b"9" * 5000 + b"}"),
    "fields are a list": framed(0, b'{"code":1,"extFields":[1]}'),
    "a field is an object": framed(0, b'{"code":1,"extFields":{"a":{}}}'),
    "too many fields": framed(0, json.dumps({"code": 1, "extFields": {str(n): "" for n in range(300)}}).encode()),
    "binary ends early": framed(1, b"\0" * 12),
    "binary remark too long": framed(1, struct.pack(">hBhiii", 1, 0, 409, 1, 0, 500)),
    "binary remark negative": framed(1, struct.pack(">hBhiii", 1, 0, 409, 1, 0, -5) + b"\0" * 8),
    "binary field too long": framed(1, struct.pack(">hBhiii", 1, 0, 409, 1, 0, 0) + struct.pack(">iH", 4, 900) + b"ab"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_hostile_bytes_are_a_wire_error(data):
    with pytest.raises(WireError):
        decode_frame(data)


NOT_UTF8 = {  # bytes -> what Java's decoder makes of them
    "gbk": ("\u8ba2\u5355".encode("gbk"), "\ufffd" * 3 + "\ufffd"),
    "latin": (b"caf\xe9 ", "caf\ufffd "),
    "cut": (b"\xe8\xae", "\ufffd"),
    "encoded surrogates": (b"\xed\xa0\xbd\xed\xb8\x80", "\ufffd\ufffd"),
    "cut surrogate": (b"\xed\xa0", "\ufffd"),
    "beyond unicode": (b"\xf5\x80", "\ufffd\ufffd"),
}


@pytest.mark.parametrize(("data", "text"), NOT_UTF8.values(), ids=[name.replace(" ", "-") for name in NOT_UTF8])
def test_texts_that_are_not_utf8_are_decoded_as_by_java(data, text):
    """In every text of both headers: names, values, the remark."""
    name = b"n" + data
    fields = struct.pack(">H", len(name)) + name + struct.pack(">i", len(data)) + data
    binary = struct.pack(">hBhiii", 310, 0, 409, 7, 0, len(data)) + data + struct.pack(">i", len(fields)) + fields
    for form, header in ((BINARY_FORM, binary), (JSON_FORM, b'{"code":310,"opaque":7,"remark":"%s","extFields":{"%s":"%s"}}' % (
            data, name, data))):
        assert decode_frame(framed(form, header, data)) == Frame(310, {f"n{text}": text}, data, 7, 0, text, "JAVA" if form else "OTHER",
                                                                 409 if form else 0, form)
    assert wire.read_json(b'["%s"]' % data) == [text]


def test_half_a_surrogate_pair_in_an_escape_is_what_java_encodes_it_as():
    assert wire.read_json(rb'{"\ud800a":["\uDFFF", "\ud83d\ude00", "\\ud800", 1]}') == {"?a": ["?", "\U0001f600", "\\ud800", 1]}


def test_no_changed_byte_does_more_than_a_wire_error(rng):
    """Real frames of both forms with bytes changed, cut and grown."""
    for row in rng.sample(GOLDEN, 40):
        frame = decode_frame(bytes.fromhex(row["frame"]))
        frame.form = rng.choice((JSON_FORM, BINARY_FORM))
        data = bytearray(encode_frame(frame)[4:])
        for _ in range(30):
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            if rng.random() < 0.3:
                del changed[rng.randrange(len(changed)):]
            try:
                decode_frame(bytes(changed))
            except WireError:
                pass


def test_a_body_is_read_only_up_to_its_limit():
    assert wire.read_json(b'{"a":[1]}') == {"a": [1]}
    for data in (b" " * (wire.JSON_BYTES_MAX + 1), b"[" * 100_000, b"{", b'{"a":\xff}'):
        with pytest.raises(WireError):
            wire.read_json(data)


def test_maps_are_written_in_fastjsons_dialect():
    queue = (("brokerName", "b"), ("queueId", 0))
    assert wire.write_json({"a": IntKeys({0: "x"}), "b": ObjectKeys({queue: 5}), "c": [True, None, 1.5, "\u00e9\""]}) == (
        '{"a":{0:"x"},"b":{{"brokerName":"b","queueId":0}:5},"c":[true,null,1.5,"\u00e9\\""]}'.encode())
    assert wire.write_json({"t": {"x": 1, "y": "\u00e9\"", "z": None, 7: 1.5}, "n": {"u": {}, 3: {"v": IntKeys({2: "w"})}}}) == (
        '{"t":{"x":1,"y":"\u00e9\\"","z":null,"7":1.5},"n":{"u":{},"3":{"v":{2:"w"}}}}'.encode())
