"""A batch as RocketMQ's client encodes it (section 7): members end to end, each without topic and offsets."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from pyengine.errors import FormatError, UsageError

# totalSize, magic (0), bodyCRC (0), flag, bodyLength; then body, propertiesLength, properties
_HEAD = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
MEMBER_OVERHEAD_BYTES = _HEAD.size + _PROPERTIES_LENGTH.size
PROPERTIES_MAX_BYTES = 32767


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One message of a batch; topic, queue and hosts are the batch's."""

    body: bytes
    flag: int = 0
    properties_text: str = ""


def encode_batch(members: Iterable[BatchMember]) -> bytes:
    """MessageDecoder.encodeMessages; UsageError for properties that the length field cannot hold."""
    pieces: list[bytes] = []
    for member in members:
        properties = member.properties_text.encode()
        if len(properties) > PROPERTIES_MAX_BYTES:
            raise UsageError(f"the properties of a batch member take {len(properties)} bytes; at most {PROPERTIES_MAX_BYTES} fit")
        size = MEMBER_OVERHEAD_BYTES + len(member.body) + len(properties)
        pieces += (
            _HEAD.pack(size, 0, 0, member.flag, len(member.body)),
            member.body,
            _PROPERTIES_LENGTH.pack(len(properties)),
            properties,
        )
    return b"".join(pieces)


def decode_batch(data: bytes) -> list[BatchMember]:
    """The members of an encoded batch; FormatError if a length does not fit."""
    members: list[BatchMember] = []
    at = 0
    while at < len(data):
        try:
            size, _, _, flag, body_bytes = _HEAD.unpack_from(data, at)
            body_at = at + _HEAD.size
            (properties_bytes,) = _PROPERTIES_LENGTH.unpack_from(data, body_at + body_bytes)
        except struct.error as error:
            raise FormatError(f"batch member {len(members)} ends outside the batch: {error}") from error
        is_consistent = min(body_bytes, properties_bytes) >= 0 and size == MEMBER_OVERHEAD_BYTES + body_bytes + properties_bytes
        if not is_consistent or at + size > len(data):
            raise FormatError(f"batch member {len(members)} says {size} bytes, but holds a body of {body_bytes} and properties "
                              f"of {properties_bytes}")
        properties_at = body_at + body_bytes + _PROPERTIES_LENGTH.size
        text = data[properties_at : properties_at + properties_bytes].decode()
        members.append(BatchMember(bytes(data[body_at : body_at + body_bytes]), flag, text))
        at += size
    return members
