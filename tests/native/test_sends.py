"""csrc/sends.c at its bounds: what a hostile client writes stays within the memory that is there for it."""

from __future__ import annotations

import json
import struct

import pytest

from fix_writer_rig import WriterRig
from pyengine._native import ffi, lib
from pyengine.native.session import SendRounds

GUARD = b"\xa5" * 4096


@pytest.fixture
def rig():
    rig = WriterRig(segment_bytes=1 << 20, segments=2)
    yield rig
    rig.close()


def frame(properties: str, body: bytes) -> bytes:
    header = json.dumps({"code": 310, "extFields": {"b": "T", "e": "0", "i": properties}}, separators=(",", ":")).encode()
    return struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body


@pytest.mark.parametrize("cluster", [b"c", b"c" * 255])
@pytest.mark.parametrize("header_bytes", [lib.MS_SEND_HEADER_BYTES_MAX, 32767 + 49 + 9, 200])
def test_properties_as_long_as_a_header_may_be_stay_within_their_room(rig, cluster, header_bytes):
    producer = rig.open_session()
    sends = SendRounds(bytes(8), 0, cluster, [b"{", b",", b",", b",", b"}"], 4 << 20)
    memory = ffi.new("uint8_t[]", ffi.sizeof("struct ms_sends") + len(GUARD))
    ffi.memmove(memory, sends._sends, ffi.sizeof("struct ms_sends"))
    ffi.memmove(memory + ffi.sizeof("struct ms_sends"), GUARD, len(GUARD))
    sends._sends = ffi.cast("struct ms_sends *", memory)
    sends.enter_topic("T", 1)
    whole = frame("o\x01", b"")
    data = frame("o\x01" + "v" * (header_bytes - (len(whole) - 8)), b"body")
    taken = sends.take(producer, bytearray(data), 0, bytes(8))
    assert bytes(ffi.buffer(memory)[ffi.sizeof("struct ms_sends"):len(ffi.buffer(memory))]) == GUARD
    assert (taken, sends.count) == ((len(data), 1) if header_bytes == 200 else (0, 0))
