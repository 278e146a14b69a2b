"""The replication wire of RocketMQ 4.9 (HAConnection, HAClient): two kinds of frame, and this engine's greeting before them.

    slave -> master   report   i64 how far the slave's log reaches                        8 bytes
    master -> slave   header   i64 where the body begins, i32 its size; then the body    12 + size
                      a size of 0 is a heartbeat; it names the next position to be sent

All big-endian. In RocketMQ's own protocol there is no greeting, version, checksum or name. A body is raw bytes of
the commit log, cut anywhere, but never across the border of a segment. The master is
silent until the first report has come, which says where to begin; 0 there means "at the
start of your last segment", any other value is taken as it is. Each later report says
that the slave has everything below it.

Stores with a secret greet each other first (services/replication/ha_greeting.py): HELLO is eight bytes that are negative
as a report, and CHALLENGE begins with bytes that are negative as the offset of a header.

    HELLO      slave -> master   magic 8
    CHALLENGE  master -> slave   magic 8, nonce 32
    PROOF      slave -> master   introduction 40, nonce 32, HMAC 32
    WELCOME    master -> slave   introduction 40, HMAC 32
    introduction                 uuid of the store 16, term u64, bits u64 (1 it is a master, 2 it is fenced), zeros 8

Afterwards each header, each body and each report is followed by a seal of eight bytes, and a header with an offset of
-1 - kind has no bytes of the log but a table of that kind (services/replication/ha_stream.py).

A slave that proves nothing offers seals before its first report. To RocketMQ's master the offer is a report of -1, which is
what it has before any report. This engine's master answers, and from then on both seal, with keys that are no secret.

    OFFER      slave -> master   -1 as a report, then the first report                    16 bytes
    SEALED     master -> slave   magic 8; the slave says its first report again, sealed
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import Readable

HEADER_BYTES = 12
REPORT_BYTES = 8
REPORT_LAST_SEGMENT = 0  # a first report of 0 asks for the last segment only

HELLO = b"\xffpyhello"      # each begins with its version's own words; another version has others of that length
CHALLENGE = b"\xffpyprove"
OFFER = b"\xff" * REPORT_BYTES
SEALED = b"\xffpyseals"
NONCE_BYTES = MAC_BYTES = 32
_INTRODUCTION = struct.Struct(">16sQQ8x")
PROOF_BYTES = _INTRODUCTION.size + NONCE_BYTES + MAC_BYTES
WELCOME_BYTES = _INTRODUCTION.size + MAC_BYTES
_IS_MASTER, _IS_FENCED = 1, 2

_HEADER = struct.Struct(">qi")
_REPORT = struct.Struct(">q")


class Header(NamedTuple):
    """Of one frame from the master: the body's place in the whole log, and its bytes."""

    offset: int
    size_bytes: int


class Introduction(NamedTuple):
    """Who one side of a link is: its store, the term that it knows, and whether it is a master, or was one and is fenced."""

    store_uuid: bytes
    term: int
    is_master: bool
    is_fenced: bool = False


def is_hello(first: bytes | memoryview) -> bool:
    """Whether the first eight bytes of a connection are a greeting of any version, which no report is."""
    return first[0] >= 0x80


def pack_introduction(one: Introduction, nonce: bytes = b"") -> bytes:
    """40 bytes, and the nonce."""
    return _INTRODUCTION.pack(one.store_uuid, one.term, one.is_master * _IS_MASTER | one.is_fenced * _IS_FENCED) + nonce


def unpack_introduction(buffer: bytes) -> Introduction:
    """What the first 40 bytes say; they are proven already."""
    store_uuid, term, bits = _INTRODUCTION.unpack_from(buffer)
    return Introduction(store_uuid, term, bool(bits & _IS_MASTER), bool(bits & _IS_FENCED))


def pack_header(offset: int, size_bytes: int) -> bytes:
    """12 bytes; size 0 makes a heartbeat."""
    return _HEADER.pack(offset, size_bytes)


def pack_header_into(buffer: Readable, at: int, offset: int, size_bytes: int) -> None:
    """The same, at byte `at` of a writable buffer."""
    _HEADER.pack_into(buffer, at, offset, size_bytes)


def unpack_header(buffer: Readable, at: int = 0) -> Header:
    """The header at byte `at`; FormatError for what no master sends: a negative offset or size, or too few bytes."""
    try:
        header = Header(*_HEADER.unpack_from(buffer, at))
    except struct.error as error:
        raise FormatError(f"a frame's header has {HEADER_BYTES} bytes, {max(0, len(buffer) - at)} are there") from error
    if header.offset < 0 or header.size_bytes < 0:
        raise FormatError(f"a frame of {header.size_bytes} bytes for offset {header.offset}: no master sends that")
    return header


def pack_report(offset: int) -> bytes:
    """8 bytes."""
    return _REPORT.pack(offset)


def unpack_sealed_header(buffer: Readable) -> Header:
    """A header of a link with seals, where a negative offset is a table."""
    return Header(*_HEADER.unpack_from(buffer))


def unpack_report(buffer: Readable, at: int = 0) -> int:
    """The report at byte `at`; FormatError when it is negative or too short."""
    try:
        offset: int = _REPORT.unpack_from(buffer, at)[0]
    except struct.error as error:
        raise FormatError(f"a report has {REPORT_BYTES} bytes, {max(0, len(buffer) - at)} are there") from error
    if offset < 0:
        raise FormatError(f"a report of {offset}: no slave's log ends there")
    return offset
