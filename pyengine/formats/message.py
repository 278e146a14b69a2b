"""One record of the commit log: its value, and its bytes both ways (section 2).

The positions of its fields stand in record_layout.py; what a place of the log
holds (a record, a blank, or damage) is told by classify, from record_case.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from pyengine.errors import FormatError, UsageError
from pyengine.formats.constants import (
    BLANK_HEADER_BYTES,
    BLANK_MAGIC,
    MESSAGE_MAGIC,
    PROPERTIES_BYTES_MAX,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    SYS_FLAG_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from pyengine.formats.hosts import HOST_V6_BYTES, decode_host, encode_host
from pyengine.formats.message_id import encode_message_id
from pyengine.formats.properties import decode_properties
from pyengine.formats.record_case import Case, CaseLabel, Decision, classify
from pyengine.formats.record_layout import (
    BEGIN,
    HEAD_BY_FLAGS,
    I16,
    I32,
    SYS_FLAG_AT,
    V6_FLAGS,
    body_crc,
    computed_size,
    record_size,
    total_size,
)

__all__ = [
    "Case",
    "CaseLabel",
    "Decision",
    "Message",
    "body_crc",
    "classify",
    "computed_size",
    "decode_record",
    "encode_blank",
    "encode_message",
    "encode_record",
    "record_size",
    "total_size",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One record of the commit log.

    Hosts are text, `1.2.3.4:10911` or `[2001:db8::1]:10911`. Times are ms since 1970.
    """

    topic: str
    body: bytes
    """As stored: compressed if sys_flag says so."""
    queue_id: int
    queue_offset: int
    """Its number in its queue."""
    physical_offset: int
    """Where the record begins in the commit log."""
    size_bytes: int
    """Of the whole record."""
    raw_properties: str = ""
    """The properties as stored; `properties` has them parsed."""
    flag: int = 0
    """The producer's own number."""
    sys_flag: int = 0
    """RocketMQ's flags: compression, transaction type, kinds of hosts."""
    born_timestamp_ms: int = 0
    """The producer's clock."""
    born_host: str = "127.0.0.1:0"
    store_timestamp_ms: int = 0
    """The store time: the writer's clock, never decreasing."""
    store_host: str = "127.0.0.1:10911"
    reconsume_times: int = 0
    """How often it was delivered again."""
    prepared_transaction_offset: int = 0
    """Of a commit or rollback: where the prepared record begins."""
    body_crc: int = 0
    """The checksum of the body as stored."""
    _properties: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def properties(self) -> dict[str, str]:
        """Name -> value."""
        if self._properties is None:
            object.__setattr__(self, "_properties", decode_properties(self.raw_properties))
        return self._properties  # type: ignore[return-value]

    @property
    def tags(self) -> str | None:
        """The tag, None without one."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> str | None:
        """The words to find it by, separated by spaces; None without any."""
        return self.properties.get(PROPERTY_KEYS)

    @property
    def uniq_key(self) -> str | None:
        """The unique key that the producer gave, None without one."""
        return self.properties.get(PROPERTY_UNIQ_KEY)

    @property
    def transaction_type(self) -> int:
        """One of the SYS_FLAG_TRANSACTION_ values."""
        return self.sys_flag & SYS_FLAG_TRANSACTION_MASK

    @property
    def msg_id(self) -> str:
        """The offset message id: store host and physical offset."""
        return encode_message_id(self.store_host, self.physical_offset)


def decode_record(buffer, at: int = 0) -> Message:
    """The record at byte `at` of a bytes-like object.

    Text that is not UTF-8 is read with replacement characters, as Java does. Raises
    FormatError when no whole record with agreeing lengths stands there; the CRC is not
    checked here.
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


def encode_record(
    *,
    topic: str,
    body: bytes,
    queue_id: int = 0,
    queue_offset: int = 0,
    physical_offset: int = 0,
    properties: str = "",
    flag: int = 0,
    sys_flag: int = 0,
    born_timestamp_ms: int = 0,
    born_host: str = "127.0.0.1:0",
    store_timestamp_ms: int = 0,
    store_host: str = "127.0.0.1:10911",
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> bytes:
    """The record's bytes. The host bits of `sys_flag` are set from the hosts, the CRC from the body.

    `properties` is the raw property text. Raises UsageError when a value has no room in its field.
    """
    topic_data = topic.encode("utf-8")
    properties_data = properties.encode("utf-8")
    if len(topic_data) > TOPIC_BYTES_MAX:
        raise UsageError(f"a topic may have {TOPIC_BYTES_MAX} bytes; this one has {len(topic_data)}")
    if len(properties_data) > PROPERTIES_BYTES_MAX:
        raise UsageError(f"properties may have {PROPERTIES_BYTES_MAX} bytes; these have {len(properties_data)}")
    born_data = encode_host(born_host)
    store_data = encode_host(store_host)
    sys_flag &= ~V6_FLAGS
    if len(born_data) == HOST_V6_BYTES:
        sys_flag |= SYS_FLAG_BORN_HOST_V6
    if len(store_data) == HOST_V6_BYTES:
        sys_flag |= SYS_FLAG_STORE_HOST_V6
    size_bytes = record_size(len(body), len(topic_data), len(properties_data), sys_flag)
    try:
        head = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].pack(
            size_bytes, MESSAGE_MAGIC, body_crc(body), queue_id, flag, queue_offset, physical_offset, sys_flag,
            born_timestamp_ms, born_data, store_timestamp_ms, store_data, reconsume_times,
            prepared_transaction_offset, len(body),
        )
    except struct.error as error:
        raise UsageError(f"a value does not fit into its field of the record: {error}") from error
    return b"".join(
        (head, body, bytes((len(topic_data),)), topic_data, I16.pack(len(properties_data)), properties_data)
    )


def encode_message(message: Message) -> bytes:
    """The bytes of a decoded record; its size and CRC are computed anew."""
    return encode_record(
        topic=message.topic,
        body=message.body,
        queue_id=message.queue_id,
        queue_offset=message.queue_offset,
        physical_offset=message.physical_offset,
        properties=message.raw_properties,
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=message.born_host,
        store_timestamp_ms=message.store_timestamp_ms,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )


def encode_blank(room: int) -> bytes:
    """The 8 bytes that close a segment with `room` bytes left (section 2.1); the rest stays as it is."""
    if room < BLANK_HEADER_BYTES:
        raise UsageError(f"a blank needs {BLANK_HEADER_BYTES} bytes, {room} are left")
    return BEGIN.pack(room, BLANK_MAGIC)
