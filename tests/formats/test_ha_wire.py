"""The replication wire: RocketMQ's bytes, and nothing that no peer sends is taken."""

from __future__ import annotations

import pytest

from pyengine.errors import FormatError
from pyengine.formats import ha_wire


def test_a_frame_is_what_rocketmq_sends():
    assert ha_wire.HEADER.pack(4096, 3) + b"abc" == bytes.fromhex("0000000000001000" "00000003" "616263")
    assert ha_wire.HEADER.pack(1 << 40, 0) == bytes.fromhex("0000010000000000" "00000000")
    assert ha_wire.REPORT.pack(4096) == bytes.fromhex("0000000000001000")


def test_frames_are_read_as_they_were_packed():
    buffer = bytearray(64)
    ha_wire.HEADER.pack_into(buffer, 5, (1 << 62) + 7, 32768)
    header = ha_wire.unpack_header(buffer, 5)
    assert header == ((1 << 62) + 7, 32768)
    assert ha_wire.unpack_report(b"--" + ha_wire.REPORT.pack(77), 2) == 77


@pytest.mark.parametrize("offset, size_bytes", [(-1, 5), (0, -1), (-(1 << 63), 0), (5, -(1 << 31))])
def test_a_header_that_no_master_sends_is_refused(offset, size_bytes):
    with pytest.raises(FormatError, match="no master sends"):
        ha_wire.unpack_header(ha_wire.HEADER.pack(offset, size_bytes))


def test_a_report_that_no_slave_sends_is_refused():
    with pytest.raises(FormatError, match="no slave"):
        ha_wire.unpack_report(ha_wire.REPORT.pack(-1))


def test_too_few_bytes_are_refused():
    with pytest.raises(FormatError, match="12 bytes, 11 are there"):
        ha_wire.unpack_header(bytes(11))
    with pytest.raises(FormatError, match="8 bytes, 3 are there"):
        ha_wire.unpack_report(bytes(11), 8)
