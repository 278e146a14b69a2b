"""Where the fields of a commit-log record stand, and what its lengths add up to (section 2).

    total size i32 | magic i32 | body CRC i32 | queue id i32 | flag i32 | queue offset i64
    physical offset i64 | sys flag i32 | born time i64 | born host 8/20 | store time i64
    store host 8/20 | reconsume times i32 | prepared offset i64 | body length i32, body
    topic length i8, topic | properties length i16, properties            (big-endian)
"""

from __future__ import annotations

import struct
import zlib

from pyengine.errors import FormatError
from pyengine.formats.constants import SYS_FLAG_BORN_HOST_V6, SYS_FLAG_STORE_HOST_V6, TOPIC_BYTES_MAX
from pyengine.formats.hosts import HOST_V4_BYTES, HOST_V6_BYTES

I16 = struct.Struct(">h")
I32 = struct.Struct(">i")
I64 = struct.Struct(">q")
BEGIN = struct.Struct(">iI")  # total size, magic: of a record and of a blank

MAGIC_AT = 4
BODY_CRC_AT = 8
QUEUE_OFFSET_AT = 20
PHYSICAL_OFFSET_AT = 28
SYS_FLAG_AT = 36
TRAILER_BYTES = 3  # topic length and properties length

V6_FLAGS = SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6


def _head(born_host_bytes: int, store_host_bytes: int) -> struct.Struct:
    return struct.Struct(f">iIiiiqqiq{born_host_bytes}sq{store_host_bytes}siqi")


# Everything up to and with the body length, by the host bits of sysFlag.
HEAD_BY_FLAGS = {
    0: _head(HOST_V4_BYTES, HOST_V4_BYTES),
    SYS_FLAG_BORN_HOST_V6: _head(HOST_V6_BYTES, HOST_V4_BYTES),
    SYS_FLAG_STORE_HOST_V6: _head(HOST_V4_BYTES, HOST_V6_BYTES),
    V6_FLAGS: _head(HOST_V6_BYTES, HOST_V6_BYTES),
}


def store_timestamp_at(sys_flag: int) -> int:
    """Position of the store time in a record: behind the born host."""
    return 48 + (HOST_V6_BYTES if sys_flag & SYS_FLAG_BORN_HOST_V6 else HOST_V4_BYTES)


def body_crc(body: bytes) -> int:
    """CRC-32 of the body without its sign bit; 0 for an empty body (section 3)."""
    return zlib.crc32(body) & 0x7FFFFFFF


def record_size(body_bytes: int, topic_bytes: int, properties_bytes: int, sys_flag: int = 0) -> int:
    """The total size of a record with these lengths (CommitLog.calMsgLength)."""
    return HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size + body_bytes + topic_bytes + properties_bytes + TRAILER_BYTES


def computed_size(buffer, at: int, room: int) -> int | None:
    """The total size that the record's own length fields add up to, or None when they are no lengths.

    Looks at nothing beyond `room` bytes behind `at`; the total-size field is not used.
    """
    if room < SYS_FLAG_AT + 4:
        return None
    (sys_flag,) = I32.unpack_from(buffer, at + SYS_FLAG_AT)
    head_bytes = HEAD_BY_FLAGS[sys_flag & V6_FLAGS].size
    if head_bytes > room:
        return None
    (body_bytes,) = I32.unpack_from(buffer, at + head_bytes - 4)
    topic_length_at = head_bytes + body_bytes
    if body_bytes < 0 or topic_length_at >= room:
        return None
    topic_bytes = buffer[at + topic_length_at]
    properties_length_at = topic_length_at + 1 + topic_bytes
    if topic_bytes > TOPIC_BYTES_MAX or properties_length_at + 2 > room:
        return None
    (properties_bytes,) = I16.unpack_from(buffer, at + properties_length_at)
    if properties_bytes < 0:
        return None
    return properties_length_at + 2 + properties_bytes


def total_size(buffer, at: int = 0) -> int:
    """The total-size field of the record or blank at byte `at`; FormatError when it is not there."""
    try:
        return I32.unpack_from(buffer, at)[0]
    except struct.error as error:
        raise FormatError(f"no size field at byte {at}: {error}") from error
