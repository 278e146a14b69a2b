"""The replication wire of RocketMQ 4.9 (HAConnection, HAClient): two kinds of frame, and this engine's handshake before them.

    slave -> master   report   i64 how far the slave's log reaches                        8 bytes
    master -> slave   header   i64 where the body begins, i32 its size; then the body    12 + size
                      a size of 0 is a heartbeat; it names the next position to be sent

All numbers are big-endian. RocketMQ's own protocol has no handshake, version, checksum or name. A body is raw bytes of the
commit log, from any offset on, but never across a segment boundary. The master sends nothing before the first report,
which is the offset at which to begin; 0 means "at the start of your last segment". A later report says that the slave has
everything below it.

Stores with a secret shake hands first (services/replication/ha_handshake.py): HELLO is eight bytes that would be a
negative report, and CHALLENGE begins with bytes that would be a negative offset in a header.

    HELLO      slave -> master   magic 8
    CHALLENGE  master -> slave   magic 8, nonce 32
    PROOF      slave -> master   introduction 40, nonce 32, HMAC 32
    WELCOME    master -> slave   introduction 40, HMAC 32
    introduction                 uuid of the store 16, term u64, bits u64 (1 it is a master, 2 it is fenced), zeros 8

Afterwards a seal of eight bytes follows each header, each body and each report, and the body after a header with the
offset -1 - kind is a table of that kind instead of log bytes (services/replication/ha_stream.py).

A slave without a secret offers seals before its first report. RocketMQ's master reads the offer as a report of -1, its
value before any report. This engine's master answers; from then on both sides send seals, with keys that are not secret.

    OFFER      slave -> master   -1 as a report, then the first report                    16 bytes
    SEALED     master -> slave   magic 8; the slave repeats its first report, with a seal
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pyengine.errors import FormatError
from pyengine.formats.constants import Readable

HEADER_BYTES = 12
REPORT_BYTES = 8
REPORT_LAST_SEGMENT = 0  # as a first report

HELLO = b"\xffpyhello"      # each magic belongs to this protocol version; another version has others of the same length
CHALLENGE = b"\xffpyprove"
OFFER = b"\xff" * REPORT_BYTES
SEALED = b"\xffpyseals"
NONCE_BYTES = MAC_BYTES = 32
_INTRODUCTION = struct.Struct(">16sQQ8x")
PROOF_BYTES = _INTRODUCTION.size + NONCE_BYTES + MAC_BYTES
WELCOME_BYTES = _INTRODUCTION.size + MAC_BYTES
_IS_MASTER, _IS_FENCED = 1, 2

HEADER = struct.Struct(">qi")  # the body's offset and its size, 0 for a heartbeat; a negative offset: a table, on a link with seals
REPORT = struct.Struct(">q")


class Header(NamedTuple):
    """The header of a master's frame: the body's physical offset, and its size."""

    offset: int
    size_bytes: int


class Introduction(NamedTuple):
    """One side of a link: its store, the term that it knows, and whether it is a master, or was one and is fenced."""

    store_uuid: bytes
    term: int
    is_master: bool
    is_fenced: bool = False

    def is_second(self, store_uuid: bytes, term: int) -> bool:
        """Whether it takes puts beside the master of this store, and this term."""
        return self.is_master and not self.is_fenced and self.term == term and self.store_uuid != store_uuid


def is_hello(first: bytes | memoryview) -> bool:
    """Return whether the first eight bytes of a connection are a HELLO of any version, which no report is."""
    return first[0] >= 0x80


def pack_introduction(one: Introduction, nonce: bytes = b"") -> bytes:
    """Return the 40 bytes of the introduction, and the nonce."""
    return _INTRODUCTION.pack(one.store_uuid, one.term, one.is_master * _IS_MASTER | one.is_fenced * _IS_FENCED) + nonce


def unpack_introduction(buffer: bytes) -> Introduction:
    """Decode the first 40 bytes, which the caller has authenticated."""
    store_uuid, term, bits = _INTRODUCTION.unpack_from(buffer)
    return Introduction(store_uuid, term, bool(bits & _IS_MASTER), bool(bits & _IS_FENCED))


def unpack_header(buffer: Readable, at: int = 0) -> Header:
    """Return the header at byte `at`; FormatError for a negative offset or size, or too few bytes."""
    try:
        header = Header(*HEADER.unpack_from(buffer, at))
    except struct.error as error:
        raise FormatError(f"a frame's header has {HEADER_BYTES} bytes, {max(0, len(buffer) - at)} are there") from error
    if header.offset < 0 or header.size_bytes < 0:
        raise FormatError(f"a frame of {header.size_bytes} bytes for offset {header.offset}: no master sends that")
    return header


def unpack_report(buffer: Readable, at: int = 0) -> int:
    """Return the report at byte `at`; FormatError if it is negative or too short."""
    try:
        offset: int = REPORT.unpack_from(buffer, at)[0]
    except struct.error as error:
        raise FormatError(f"a report has {REPORT_BYTES} bytes, {max(0, len(buffer) - at)} are there") from error
    if offset < 0:
        raise FormatError(f"a report of {offset}: no slave's log ends there")
    return offset
