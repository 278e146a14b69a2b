"""One record of the commit log: encoding, decoding, and its parts (sections 2, 3, 5, 7).

    total size i32 | magic i32 | body CRC i32 | queue id i32 | flag i32 | queue offset i64
    physical offset i64 | sys flag i32 | born time i64 | born host 8/20 | store time i64
    store host 8/20 | reconsume times i32 | prepared offset i64 | body length i32, body
    topic length i8, topic | properties length i16, properties            (big-endian)

A host field is the address, then the port as 32 bits; in Python it is text, `1.2.3.4:10911` or `[2001:db8::1]:10911`.
CaseLabel has what a position of the log may hold: a record, a blank, or damage.

The property text is a list of name 0x01 value, joined by 0x02 (section 6). This module also has Java's hashes of such
text: String.hashCode, the codes that the store derives from it, and the order of a HashMap.
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyengine.errors import FormatError, UsageError
from pyengine.formats.constants import (
    BLANK_HEADER_BYTES,
    BLANK_MAGIC,
    COMPRESSION_NAMES,
    INDEX_KEY_SEPARATOR,
    KEY_SEPARATOR,
    MESSAGE_MAGIC,
    NAME_VALUE_SEPARATOR,
    PROPERTIES_BYTES_MAX,
    PROPERTY_KEYS,
    PROPERTY_SEPARATOR,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_COMPRESSED,
    SYS_FLAG_COMPRESSION_MASK,
    SYS_FLAG_COMPRESSION_SHIFT,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
    Readable,
)

if TYPE_CHECKING:
    from datetime import datetime

I16 = struct.Struct(">h")
I32 = struct.Struct(">i")
I64 = struct.Struct(">q")

HOST_V4_BYTES = 8
HOST_V6_BYTES = 20


@functools.lru_cache(maxsize=4096)
def encode_host(text: str, *, port_min: int = 0) -> bytes:
    """Encode host text as 8 (IPv4) or 20 (IPv6) bytes; UsageError if it is not a numeric address with a port."""
    address, colon, port_text = text.rpartition(":")
    try:
        port = int(port_text)
        if not colon or not port_min <= port <= 0x7FFFFFFF:
            raise ValueError("no port")
        if address.startswith("[") and address.endswith("]"):
            packed = socket.inet_pton(socket.AF_INET6, address[1:-1])
        else:
            packed = socket.inet_pton(socket.AF_INET, address)
    except (OSError, ValueError) as error:
        raise UsageError(f"{text!r} is not a host: write 1.2.3.4:10911 or [2001:db8::1]:10911") from error
    return packed + I32.pack(port)


@functools.lru_cache(maxsize=4096)
def decode_host(data: bytes) -> str:
    """Decode 8 or 20 host bytes to text; FormatError for another length."""
    if len(data) == HOST_V4_BYTES:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{I32.unpack_from(data, 4)[0]}"
    if len(data) == HOST_V6_BYTES:
        return f"[{socket.inet_ntop(socket.AF_INET6, data[:16])}]:{I32.unpack_from(data, 16)[0]}"
    raise FormatError(f"a host field has {HOST_V4_BYTES} or {HOST_V6_BYTES} bytes, not {len(data)}")


REPR_MAX = 80  # bytes of a body, characters of a text
HTML_ROWS_MAX = 100
BEGIN = struct.Struct(">iI")  # the first two fields of a record and of a blank: total size, magic

MAGIC_AT = 4
BODY_CRC_AT = 8
QUEUE_OFFSET_AT = 20
PHYSICAL_OFFSET_AT = 28
SYS_FLAG_AT = 36
TRAILER_BYTES = 3  # topic length and properties length

V6_FLAGS = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6


def _head(born_host_bytes: int, store_host_bytes: int) -> struct.Struct:
    return struct.Struct(f">iIiiiqqiq{born_host_bytes}sq{store_host_bytes}siqi")


# All fields up to the body length, which is included, by the host bits of sysFlag.
HEAD_BY_FLAGS = {
    0: _head(HOST_V4_BYTES, HOST_V4_BYTES),
    SYS_FLAG_BORN_HOST_V6: _head(HOST_V6_BYTES, HOST_V4_BYTES),
    SYS_FLAG_STORE_HOST_V6: _head(HOST_V4_BYTES, HOST_V6_BYTES),
    V6_FLAGS: _head(HOST_V6_BYTES, HOST_V6_BYTES),
}


def store_timestamp_ms(buffer: Readable, at: int) -> int:
    """Return the store time of the record at byte `at`."""
    (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
    time_ms: int = I64.unpack_from(buffer, at + store_timestamp_at(sys_flag))[0]
    return time_ms


def store_timestamp_at(sys_flag: int) -> int:
    """Return the position of the store time in a record, after the born host."""
    return 48 + (HOST_V6_BYTES if sys_flag & SYS_FLAG_BORN_HOST_V6 else HOST_V4_BYTES)


def body_crc(body: Readable) -> int:
    """Return the CRC-32 of the body without its sign bit; 0 for an empty body (section 3)."""
    return zlib.crc32(body) & 0x7FFFFFFF


DECOMPRESSED_BYTES_MAX = 256 << 20  # a larger body is refused before it is decompressed as a whole


def compression_of(sys_flag: int) -> str | None:
    """Return a body's compression by its sysFlag: None, zlib, LZ4, ZSTD, or the number of an unknown one."""
    if not sys_flag & SYS_FLAG_COMPRESSED:
        return None
    number = sys_flag >> SYS_FLAG_COMPRESSION_SHIFT & SYS_FLAG_COMPRESSION_MASK
    return COMPRESSION_NAMES[number] if number < len(COMPRESSION_NAMES) else f"compression {number}"


def decompress_body(body: bytes | memoryview, sys_flag: int, codec: Callable[[str, bytes, int], bytes] | None = None,
                    most_bytes: int | None = None) -> bytes:
    """Return the body as the producer had it: decompressed if sysFlag has SYS_FLAG_COMPRESSED.

    Clients compress with zlib by default, and up to 4.9.3 always. `codec(kind, body, most_bytes)` decompresses LZ4 and
    ZSTD, if the caller has a library for them; it raises OSError for wrong bytes. FormatError for an unknown
    compression, for wrong bytes, and for a body of more than `most_bytes` (DECOMPRESSED_BYTES_MAX).
    """
    most_bytes = DECOMPRESSED_BYTES_MAX if most_bytes is None else most_bytes
    kind = compression_of(sys_flag)
    if kind is None:
        return bytes(body)
    if codec is not None and kind in ("LZ4", "ZSTD"):
        try:
            text = codec(kind, bytes(body), most_bytes + 1)
        except OSError as error:
            raise FormatError(f"the body is not a valid {kind} frame ({error}), though sysFlag says so; read the stored bytes") from error
        if len(text) > most_bytes:
            raise FormatError(f"the body has more than {most_bytes} bytes; read the stored bytes")
        return text
    if kind != "zlib":
        raise FormatError(f"the body is compressed by {kind}, which pyengine does not decompress; read the stored bytes")
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(body, most_bytes)
    except zlib.error as error:
        raise FormatError(f"the body is not a valid zlib stream ({error}), though sysFlag says so; read the stored bytes") from error
    if not stream.eof:
        why = f"has more than {most_bytes} bytes" if stream.unconsumed_tail else "ends within its zlib stream"
        raise FormatError(f"the body {why}; read the stored bytes")
    return text


def record_size(body_bytes: int, topic_bytes: int, properties_bytes: int, sys_flag: int = 0) -> int:
    """Return the total size of a record with these lengths (CommitLog.calMsgLength)."""
    return HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size + body_bytes + topic_bytes + properties_bytes + TRAILER_BYTES


def total_size(buffer: Readable, at: int = 0) -> int:
    """Return the total-size field of the record or blank at byte `at`; FormatError if there are fewer than 4 bytes."""
    try:
        size_bytes: int = I32.unpack_from(buffer, at)[0]
        return size_bytes
    except struct.error as error:
        raise FormatError(f"no size field at byte {at}: {error}") from error


def encode_message_id(store_host: str, physical_offset: int) -> str:
    """Return the offset message id: 32 (IPv4) or 56 (IPv6) upper-case hex characters.

    No checksum covers a record's hosts: a port that decode_host() has read may be negative.
    """
    return (encode_host(store_host, port_min=_INT_MIN) + I64.pack(physical_offset)).hex().upper()


class MessageIdError(UsageError, FormatError):
    """A text is no offset message id: a wrong argument, and no damage."""


def decode_message_id(msg_id: str) -> tuple[str, int]:
    """Return (store host, physical offset); MessageIdError if the text is not an offset message id."""
    try:
        data = bytes.fromhex(msg_id)
    except ValueError as error:
        why = "it has those of a batch's messages, joined by commas: give one" if "," in msg_id else "it must be hexadecimal"
        raise MessageIdError(f"{msg_id!r} is not a message id: {why}") from error
    host_bytes = len(data) - I64.size
    if len(msg_id) != 2 * len(data) or host_bytes not in (HOST_V4_BYTES, HOST_V6_BYTES):
        raise MessageIdError(f"{msg_id!r} is not a message id: it must have 32 or 56 characters")
    (physical_offset,) = I64.unpack_from(data, host_bytes)
    if physical_offset < 0:
        raise MessageIdError(f"{msg_id!r} is not a message id: its offset {physical_offset} is negative")
    return decode_host(data[:host_bytes]), physical_offset


def _cut(value: bytes | str) -> str:
    """Return the repr of a value, of a long one that of its beginning and its length."""
    if len(value) <= REPR_MAX:
        return repr(value)
    return f"{value[:REPR_MAX]!r}... ({len(value):,} {'bytes' if isinstance(value, bytes) else 'characters'})"


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook, of the first HTML_ROWS_MAX rows. All text is escaped; long bodies are cut."""
    from html import escape  # here, since only notebooks need it

    def cells(kind: str, values: Sequence[object]) -> str:
        texts = ("" if value is None else _cut(value) if isinstance(value, bytes) else str(value) for value in values)
        return "<tr>" + "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts) + "</tr>"

    body = [cells("td", row) for row in itertools.islice(rows, HTML_ROWS_MAX + 1)]
    if len(body) > HTML_ROWS_MAX:
        body[-1] = cells("td", ["..."])
    return f"<table><caption>{escape(title)}</caption>{cells('th', head)}{''.join(body)}</table>"


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """One record of the commit log. Times are ms since 1970, hosts text: `1.2.3.4:10911`, `[2001:db8::1]:10911`."""

    topic: str
    body: bytes
    """As stored; `content` is the producer's."""
    queue_id: int
    queue_offset: int
    physical_offset: int
    """Of its record."""
    size_bytes: int
    """Of its record."""
    raw_properties: str = ""
    """As stored; `properties` has them parsed."""
    flag: int = 0
    """The producer's own number."""
    sys_flag: int = 0
    """docs/formats.md, 4."""
    born_timestamp_ms: int = 0
    """The producer's clock."""
    born_host: str = "127.0.0.1:0"
    store_timestamp_ms: int = 0
    """The writer's clock."""
    store_host: str = "127.0.0.1:10911"
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    """Of the prepared record, in a commit or rollback."""
    body_crc: int = 0
    """Of the body as stored."""
    delivery_count: int = field(default=1, compare=False)
    """This time included."""
    _properties: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        """One line, with a long body cut: `raw_properties` and the other fields are not in it."""
        more = "".join(f", {name}={_cut(value)}" for name, value in (("tags", self.tags), ("keys", self.keys)) if value is not None)
        return (f"{self.__class__.__name__}(topic={self.topic!r}, body={_cut(self.body)}, queue_id={self.queue_id}, "
                f"queue_offset={self.queue_offset}{more})")

    def _repr_html_(self) -> str:
        return html_table(repr(self.msg_id), ("topic", "queue", "offset", "store time", "tags", "keys", "body"),
                          [(self.topic, self.queue_id, self.queue_offset, self.store_time.isoformat(timespec="milliseconds"), self.tags,
                            self.keys, self.body)])

    @property
    def store_time(self) -> datetime:
        """In UTC."""
        return _moment(self.store_timestamp_ms)

    @property
    def born_time(self) -> datetime:
        """In UTC."""
        return _moment(self.born_timestamp_ms)

    @property
    def content(self) -> bytes:
        """The body, decompressed; FormatError above 256 MiB, or if not zlib."""
        return decompress_body(self.body, self.sys_flag)

    @property
    def properties(self) -> dict[str, str]:
        found = self._properties
        if found is None:
            found = decode_properties(self.raw_properties)
            object.__setattr__(self, "_properties", found)
        return found

    @property
    def tags(self) -> str | None:
        """TAGS."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> str | None:
        """Words, separated by spaces."""
        return self.properties.get(PROPERTY_KEYS)

    @property
    def uniq_key(self) -> str | None:
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def transaction_type(self) -> int:
        """The bits 0xC of sys_flag."""
        return self.sys_flag & SYS_FLAG_TRANSACTION_MASK

    @property
    def msg_id(self) -> str:
        """The offset id (docs/formats.md, 5)."""
        return encode_message_id(self.store_host, self.physical_offset)

    def _of_queue(self, topic: str, queue_id: int, queue_offset: int) -> LightMessage:
        """Return this message as one of a light queue."""
        mine: dict[str, Any] = {name: getattr(self, name) for name in self.__match_args__}
        return LightMessage(**mine | {"queue_id": queue_id, "queue_offset": queue_offset, "queue_topic": topic})


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LightMessage(Message):
    """A message of a light queue: queue and offset are those of the queue of `queue_topic`, `topic` is its record's."""

    queue_topic: str = ""


def _moment(ms: int) -> datetime:
    from datetime import UTC, datetime, timedelta  # here, since readers that look at no time need none

    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    except OverflowError:
        return (datetime.max if ms > 0 else datetime.min).replace(tzinfo=UTC)


def decode_record(buffer: Readable, at: int = 0) -> Message:
    """Decode the record at byte `at` of a bytes-like object, without checking its CRC.

    Invalid UTF-8 becomes replacement characters, as in Java. FormatError if there is no whole record or its lengths
    disagree.
    """
    try:
        (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
        head = HEAD_BY_FLAGS[sys_flag & V6_FLAGS]
        (
            size_bytes, magic, crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp_ms,
            born_host, store_timestamp_ms, store_host, reconsume_times, prepared_offset, body_bytes,
        ) = head.unpack_from(buffer, at)
        if magic != MESSAGE_MAGIC:
            raise FormatError(f"no record at byte {at}: its magic is {magic:#010x}")
        body_at = at + head.size
        topic_at = body_at + body_bytes + 1
        if body_bytes < 0:
            raise FormatError(f"the record at byte {at} has a body of {body_bytes} bytes")
        topic_end = topic_at + buffer[topic_at - 1]
        (properties_bytes,) = I16.unpack_from(buffer, topic_end)
    except (struct.error, IndexError) as error:
        raise FormatError(f"no whole record at byte {at}: {error}") from error
    end = topic_end + 2 + properties_bytes
    if topic_end - topic_at > TOPIC_BYTES_MAX or properties_bytes < 0 or end != at + size_bytes or end > len(buffer):
        raise FormatError(f"the lengths of the record at byte {at} do not add up to its size {size_bytes}")
    return Message(
        topic=str(buffer[topic_at:topic_end], "utf-8", "replace"),
        body=bytes(buffer[body_at : topic_at - 1]),
        queue_id=queue_id,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        size_bytes=size_bytes,
        raw_properties=str(buffer[topic_end + 2 : end], "utf-8", "replace"),
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp_ms=born_timestamp_ms,
        born_host=decode_host(born_host),
        store_timestamp_ms=store_timestamp_ms,
        store_host=decode_host(store_host),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body_crc=crc,
    )


def encode_message(message: Message) -> bytes:
    """Encode a record; compute its size and CRC, and set the host bits of its `sys_flag` from the hosts.

    UsageError if a value does not fit its field.
    """
    topic = message.topic.encode("utf-8")
    properties = message.raw_properties.encode("utf-8")
    if len(topic) > TOPIC_BYTES_MAX:
        raise UsageError(f"a topic may have {TOPIC_BYTES_MAX} bytes; this one has {len(topic)}")
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise UsageError(f"properties may have {PROPERTIES_BYTES_MAX} bytes; these have {len(properties)}")
    born_host, store_host = encode_host(message.born_host), encode_host(message.store_host)
    sys_flag = message.sys_flag & ~V6_FLAGS
    if len(born_host) == HOST_V6_BYTES:
        sys_flag |= SYS_FLAG_BORN_HOST_V6
    if len(store_host) == HOST_V6_BYTES:
        sys_flag |= SYS_FLAG_STORE_HOST_V6
    body = message.body
    try:
        head = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].pack(
            record_size(len(body), len(topic), len(properties), sys_flag), MESSAGE_MAGIC, body_crc(body), message.queue_id,
            message.flag, message.queue_offset, message.physical_offset, sys_flag, message.born_timestamp_ms, born_host,
            message.store_timestamp_ms, store_host, message.reconsume_times, message.prepared_transaction_offset, len(body))
    except struct.error as error:
        raise UsageError(f"a value does not fit into its field of the record: {error}") from error
    return b"".join((head, body, bytes((len(topic),)), topic, I16.pack(len(properties)), properties))


def encode_blank(room: int) -> bytes:
    """Return the 8 bytes that end a segment with `room` bytes left (section 2.1); the bytes after them stay as they are."""
    if room < BLANK_HEADER_BYTES:
        raise UsageError(f"a blank needs {BLANK_HEADER_BYTES} bytes, {room} are left")
    return BEGIN.pack(room, BLANK_MAGIC)


# totalSize, magic (0), bodyCRC (0), flag, bodyLength; then body, propertiesLength, properties
_MEMBER_HEAD = struct.Struct(">iiiii")
MEMBER_OVERHEAD_BYTES = _MEMBER_HEAD.size + I16.size
_ENCODED_SURROGATE, _REPLACEMENT = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?"), "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One message of a batch; the batch has topic, queue and hosts."""

    body: bytes
    flag: int = 0
    properties_text: str = ""


def encode_batch(members: Iterable[BatchMember]) -> bytes:
    """Encode a batch, as MessageDecoder.encodeMessages; UsageError if a member's properties exceed the length field."""
    pieces: list[bytes] = []
    for member in members:
        properties = member.properties_text.encode()
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise UsageError(f"the properties of a batch member take {len(properties)} bytes; at most {PROPERTIES_BYTES_MAX} fit")
        size = MEMBER_OVERHEAD_BYTES + len(member.body) + len(properties)
        pieces += (
            _MEMBER_HEAD.pack(size, 0, 0, member.flag, len(member.body)),
            member.body,
            I16.pack(len(properties)),
            properties,
        )
    return b"".join(pieces)


def decode_batch(data: bytes) -> list[BatchMember]:
    """Decode a batch into its members; FormatError if a length is wrong."""
    members: list[BatchMember] = []
    at = 0
    while at < len(data):
        try:
            size, _, _, flag, body_bytes = _MEMBER_HEAD.unpack_from(data, at)
            body_at = at + _MEMBER_HEAD.size
            (properties_bytes,) = I16.unpack_from(data, body_at + body_bytes)
        except struct.error as error:
            raise FormatError(f"batch member {len(members)} ends outside the batch: {error}") from error
        is_consistent = min(body_bytes, properties_bytes) >= 0 and size == MEMBER_OVERHEAD_BYTES + body_bytes + properties_bytes
        if not is_consistent or at + size > len(data):
            raise FormatError(f"batch member {len(members)} says {size} bytes, but holds a body of {body_bytes} and properties "
                              f"of {properties_bytes}")
        properties_at = body_at + body_bytes + I16.size
        text = java_text(data[properties_at : properties_at + properties_bytes])
        members.append(BatchMember(bytes(data[body_at : body_at + body_bytes]), flag, text))
        at += size
    return members


def java_text(data: bytes) -> str:
    """Decode UTF-8 as Java's `new String(bytes, UTF_8)`: wrong bytes become U+FFFD, an encoded surrogate a single one."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _ENCODED_SURROGATE.sub(_REPLACEMENT, data).decode("utf-8", "replace")


def encode_properties(properties: Mapping[str, str | None]) -> str:
    """Encode properties in the mapping's order, without None values and without a separator at the end."""
    return PROPERTY_SEPARATOR.join(
        f"{name}{NAME_VALUE_SEPARATOR}{value}" for name, value in properties.items() if value is not None
    )


def decode_properties(text: str) -> dict[str, str]:
    """Decode properties as MessageDecoder.string2messageProperties does.

    It ignores a piece without 0x01, or with an empty name or value, and splits at the first 0x01. The last of equal
    names wins. A separator at the end (4.9.0) is accepted.
    """
    found: dict[str, str] = {}
    for piece in text.split(PROPERTY_SEPARATOR):
        name, _, value = piece.partition(NAME_VALUE_SEPARATOR)
        if name and value:
            found[name] = value
    return found


def split_keys(keys: str | None) -> list[str]:
    """Return the words of KEYS: split at single spaces, without empty words."""
    return [word for word in keys.split(KEY_SEPARATOR) if word] if keys else []


def index_keys(properties: Mapping[str, str]) -> list[str]:
    """Return the keys of a record in the order of the index: UNIQ_KEY, then each word of KEYS."""
    uniq_key = properties.get(PROPERTY_UNIQ_KEY)
    words = split_keys(properties.get(PROPERTY_KEYS))
    return [uniq_key, *words] if uniq_key else words


def is_wait_store_ok(properties: Mapping[str, str]) -> bool:
    """Return Message.isWaitStoreMsgOK: whether WAIT is absent or `true` in any case."""
    return properties.get(PROPERTY_WAIT, "true").lower() == "true"


_INT_MIN = -0x80000000
_HASH_MAP_BUCKETS_MIN = 16
_UP_TO_BLANK = "".join(map(chr, range(0x21)))


def java_trim(text: str) -> str:
    """Return `String.trim`: characters above U+0020 remain, also those that are blanks in Python."""
    return text.strip(_UP_TO_BLANK)


def string_hash(text: str) -> int:
    """Return `String.hashCode`: h = 31 h + c over UTF-16 units, wrapped to a signed 32-bit number."""
    value = 0
    units: Iterable[int]
    if text.isascii():
        units = text.encode("ascii")
    else:
        # surrogatepass: a Java string may contain a lone surrogate and hashes it like any other unit.
        wide = text.encode("utf-16-be", "surrogatepass")
        units = [wide[i] << 8 | wide[i + 1] for i in range(0, len(wide), 2)]
    for unit in units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x80000000 else value


def tags_code(tags: str | None) -> int:
    """Return the tags code of a queue entry (section 8.2): the hash of the tags, 0 without tags."""
    return string_hash(tags) if tags else 0


def index_key_hash(topic: str, key: str) -> int:
    """Return the hash in an index entry (IndexService.indexKeyHashMethod): |hash|, and 0 for the smallest int."""
    value = string_hash(f"{topic}{INDEX_KEY_SEPARATOR}{key}")
    return 0 if value == _INT_MIN else abs(value)


def hash_map_order(names: Iterable[str]) -> list[str]:
    """Return the order in which a new java.util.HashMap iterates over `names` (all different), inserted in this order.

    This is the order on disk if RocketMQ encodes a property text from a map: by bucket, and in a bucket by insertion.
    (A bucket of more than eight names would be a tree.)
    """
    names = list(names)
    buckets = _HASH_MAP_BUCKETS_MIN
    while len(names) > buckets * 3 // 4:
        buckets *= 2

    return sorted(names, key=lambda name: (_known_hash if len(name) <= _KNOWN_CHARS_MAX else _spread_hash)(name) & (buckets - 1))


def _spread_hash(name: str) -> int:
    """HashMap.hash."""
    value = string_hash(name) & 0xFFFFFFFF
    return value ^ value >> 16


_KNOWN_CHARS_MAX = 64
_known_hash = functools.lru_cache(maxsize=1024)(_spread_hash)  # most messages have the same few property names


# ---- what a position holds ---------------------------------------------------------------------


class CaseLabel(enum.StrEnum):
    """What a position of the commit log holds, in the order of the checks (csrc/record.c).

    RocketMQ knows message and blank and stops at everything else (CommitLog.checkMessageAndReturnSize); it looks
    neither at the text nor at the record's own offset.
    """

    RANGE_END = "range_end"  # fewer than 8 bytes are left: no header fits
    ZEROES = "zeroes"        # never written: the normal end of the log
    BLANK = "blank"          # the filler that closes a segment
    FOREIGN = "foreign"      # random bytes, or a record of which only the second half was written
    OVERRUN = "overrun"      # a size that exceeds the available bytes: garbage, or a short range
    TORN = "torn"            # lengths that do not add up: a crash inside a write
    OFFSET_MISMATCH = "offset_mismatch"  # a whole record with another offset: stale bytes
    BAD_CRC = "bad_crc"      # the body differs from what was written
    BAD_TEXT = "bad_text"    # topic or properties hold NULs or are not UTF-8: a page that was lost
    MESSAGE = "message"      # everything else: a whole record


class WalkResult(NamedTuple):
    """The result of a walk: where it stopped and why, and what it has counted.

    `end_offset` is the physical offset of the first byte after the walked records; a blank is not part of them. `reason`
    is why it stopped. `records` counts the blank, `messages` does not. Store times are -1 without messages.
    """

    end_offset: int
    reason: str
    records: int
    messages: int
    first_store_timestamp_ms: int
    last_store_timestamp_ms: int
