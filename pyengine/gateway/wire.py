"""Encodes and decodes RocketMQ's remoting frames, both header forms, and the JSON of bodies.

    length i32 | header form u8, header length u24 | header | body        (big-endian; length counts what follows it)

Any program that reaches the port can send a frame: every length is checked before it is used, and a header has at most
HEADER_BYTES_MAX, so that no frame takes long to decode. Wrong bytes raise WireError and no other exception. Texts are decoded as
by Java: bytes that are not UTF-8 become U+FFFD, half a surrogate pair becomes `?`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.arguments import INT32_MAX
from pyengine.formats.record import java_text

JSON_FORM, BINARY_FORM = 0, 1
ANSWER, ONE_WAY = 1, 2          # bits of `flag`
HEADER_BYTES_MAX = 256 << 10    # its properties have at most 32,767, and JSON writes a control character with 6
FIELDS_MAX = 256
JSON_BYTES_MAX = 1 << 20        # of a body that is JSON: a heartbeat, a list of queues
VERSION = 409                   # RemotingCommand's number for 4.9.8
LANGUAGES = ("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST")
CODE_MAX = 0x7FFF            # of a binary header
NAME_BYTES_MAX = 0xFFFF      # of a field in a binary header

_LENGTH = struct.Struct(">i")
_MARK = struct.Struct(">I")
_HEAD = struct.Struct(">hBhii")
_INT16 = struct.Struct(">H")
_INT32 = struct.Struct(">i")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_json: Callable[[str], str] = json.encoder.encode_basestring  # a text with its quotes, in C
_PLAIN = frozenset((str, int, float, bool, type(None)))  # types that json writes as fastjson does
_JSON_HEAD = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class WireError(Exception):
    """The bytes are no frame, or the body is wrong for its code; RocketMQ closes the connection, or answers 1."""


@dataclass(slots=True)
class Frame:
    """One request or answer. `fields` are the header's extFields, as texts; `form` is the form of its header."""

    code: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "JAVA"
    version: int = VERSION
    form: int = JSON_FORM

    @property
    def is_answer(self) -> bool:
        return bool(self.flag & ANSWER)

    @property
    def is_one_way(self) -> bool:
        return bool(self.flag & ONE_WAY)


def is_number(text: str) -> bool:
    """Whether a text is a decimal number below 10^18: a word of a handle."""
    return text.isascii() and text.isdecimal() and len(text) < 19


def frame_length(buffer: bytes | bytearray | memoryview, at: int, bytes_max: int) -> int | None:
    """Return the frame's length with its length field, None while that field is incomplete; WireError for a wrong one."""
    if len(buffer) - at < _LENGTH.size:
        return None
    length = _LENGTH.unpack_from(buffer, at)[0]
    if not _MARK.size <= length <= bytes_max:
        raise WireError(f"a frame of {length} bytes: {_MARK.size} to {bytes_max} are possible")
    return int(_LENGTH.size + length)


def decode_frame(data: bytes | memoryview) -> Frame:
    """Decode a frame, given without its length field; WireError if it is wrong."""
    if len(data) < _MARK.size:
        raise WireError("a frame without a header")
    mark = _MARK.unpack_from(data)[0]
    form, header_bytes = mark >> 24, mark & 0xFFFFFF
    if header_bytes > HEADER_BYTES_MAX or _MARK.size + header_bytes > len(data):
        raise WireError(f"a header of {header_bytes} bytes in a frame of {len(data)}: at most {HEADER_BYTES_MAX} are possible")
    header, body = bytes(data[_MARK.size:_MARK.size + header_bytes]), bytes(data[_MARK.size + header_bytes:])
    if form not in (JSON_FORM, BINARY_FORM):
        raise WireError(f"the header form {form} is not known")
    return _decode_json(header, body) if form == JSON_FORM else _decode_binary(header, body)


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame with its length field, in its own header form; WireError if a part is too long."""
    header = _encode_json(frame) if frame.form == JSON_FORM else _encode_binary(frame)
    if len(header) > HEADER_BYTES_MAX:
        raise WireError(f"a header of {len(header)} bytes: at most {HEADER_BYTES_MAX} are possible")
    length = _MARK.size + len(header) + len(frame.body)
    return b"".join((_LENGTH.pack(length), _MARK.pack(frame.form << 24 | len(header)), header, frame.body))


def _decode_json(header: bytes, body: bytes) -> Frame:
    found = read_json(header)
    if not isinstance(found, dict):
        raise WireError("a header that is not a JSON object")
    fields = found.get("extFields")
    if fields is None:
        fields = {}
    if not isinstance(fields, dict) or len(fields) > FIELDS_MAX:
        raise WireError(f"extFields that are no map of at most {FIELDS_MAX} fields")
    texts = {name: value if isinstance(value, str) else _json_text(value) for name, value in fields.items() if value is not None}
    remark, language = found.get("remark"), found.get("language")
    return Frame(_header_int(found, "code"), texts, body, _header_int(found, "opaque"), _header_int(found, "flag"),
                 remark if isinstance(remark, str) else None, language if language in LANGUAGES else "OTHER",
                 _header_int(found, "version"), JSON_FORM)


def _json_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise WireError("a field of the header that is not text")


def _header_int(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name, 0)
    if type(value) is not int or abs(value) > INT32_MAX + 1:
        raise WireError(f"the header's {name} is not a 32-bit number")
    return value


def _decode_binary(header: bytes, body: bytes) -> Frame:
    try:
        code, language, version, opaque, flag = _HEAD.unpack_from(header)
        remark, at = _take(header, _HEAD.size, _INT32)
        fields, end = _take(header, at, _INT32)
    except struct.error:
        raise WireError("a binary header that ends too early") from None
    found: dict[str, str] = {}
    at = 0
    while at < len(fields):
        try:
            name, at = _take(fields, at, _INT16)
            value, at = _take(fields, at, _INT32)
        except struct.error:
            raise WireError("a field of a binary header that ends too early") from None
        if len(found) >= FIELDS_MAX:
            raise WireError(f"more than {FIELDS_MAX} fields in a header")
        if value:  # an empty value is null in Java
            found[java_text(name)] = java_text(value)
    return Frame(code, found, body, opaque, flag, java_text(remark) or None,
                 LANGUAGES[language] if language < len(LANGUAGES) else "OTHER", version, BINARY_FORM)


def _take(data: bytes, at: int, size: struct.Struct) -> tuple[bytes, int]:
    length = size.unpack_from(data, at)[0]
    begin = at + size.size
    if not 0 <= length <= len(data) - begin:
        raise WireError("a length in a binary header that points beyond it")
    return data[begin:begin + length], begin + length


def _encode_json(frame: Frame) -> bytes:
    fields = ",".join([f"{_json(name)}:{_json(value)}" for name, value in frame.fields.items()])
    ext_fields = f'"extFields":{{{fields}}},' if fields else ""
    remark = "" if frame.remark is None else f'"remark":{_json(frame.remark)},'
    return (f'{{"code":{frame.code},{ext_fields}"flag":{frame.flag},"language":{_json(frame.language)},"opaque":{frame.opaque},{remark}'
            f'"serializeTypeCurrentRPC":"JSON","version":{frame.version}}}').encode("utf-8", "replace")


def _encode_binary(frame: Frame) -> bytes:
    remark = (frame.remark or "").encode("utf-8", "replace")
    pieces = []
    for name, value in frame.fields.items():
        key, text = name.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if len(key) > NAME_BYTES_MAX:
            raise WireError(f"a field's name of {len(key)} bytes: a binary header has names of at most {NAME_BYTES_MAX}")
        pieces.append(_INT16.pack(len(key)) + key + _INT32.pack(len(text)) + text)
    fields = b"".join(pieces)
    return b"".join((_HEAD.pack(frame.code, LANGUAGES.index(frame.language), frame.version, frame.opaque, frame.flag),
                     _INT32.pack(len(remark)), remark, _INT32.pack(len(fields)), fields))


# ---- bodies ----------------------------------------------------------------------

def read_json(data: bytes, bytes_max: int = JSON_BYTES_MAX) -> Any:
    """Decode the JSON of a header or a body; WireError for other or too many bytes, and for deep nesting."""
    if len(data) > bytes_max:
        raise WireError(f"JSON of {len(data)} bytes: at most {bytes_max} are read")
    text = java_text(data)
    try:
        found = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):  # half a pair becomes `?`
            found = json.loads(_JSON_HEAD(found).encode("utf-8", "replace"))
        return found
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {error}") from None


def as_object(value: object) -> dict[str, Any]:
    """Return a decoded JSON object; WireError for any other value."""
    if not isinstance(value, dict):
        raise WireError("a JSON object was expected")
    return value


def read_object(data: bytes) -> dict[str, Any]:
    """Decode the JSON object of a body; WireError for other bytes."""
    return as_object(read_json(data))


class ObjectKeys(dict[tuple[tuple[str, object], ...], object]):
    """A map whose keys are objects, each as its (name, value) pairs; fastjson's dialect writes it as {{...}:value}."""


class IntKeys(dict[int, object]):
    """A map with integer keys, which fastjson writes without quotes."""


class Raw(bytes):
    """Encoded JSON, which is written as it is."""


def write_json(value: object) -> bytes:
    """Encode JSON like RocketMQ's fastjson: names in their order, integer keys without quotes, object keys as objects."""
    return _write(value).encode("utf-8", "replace")


def _write(value: object) -> str:
    if isinstance(value, Raw):
        return value.decode("utf-8", "replace")
    if isinstance(value, ObjectKeys):
        return "{" + ",".join(f"{_write(dict(key))}:{_write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, IntKeys):
        return "{" + ",".join(f"{key}:{_write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, dict):
        if _PLAIN.issuperset(map(type, value.values())):  # a row of a table, of which there may be many
            return _JSON_HEAD(value)
        return "{" + ",".join(f"{_JSON_HEAD(str(key))}:{_write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value)) + "]"
    return _JSON_HEAD(value)
