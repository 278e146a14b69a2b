"""A master's connection to one slave, over a socket pair and on a clock of the test's own."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from pyengine.formats import ha_wire
from pyengine.ipc.replication import Replication
from pyengine.services.replication.ha_connection import END_TIMES_MAX, REFUSAL_NS, EndTimes, HAConnection
from pyengine.storage.config import EngineConfig

SEGMENT = 65536
SECOND_NS = 1_000_000_000


class Log:
    """What a connection needs of a log, in memory."""

    segment_bytes = SEGMENT

    def __init__(self, size_bytes: int, low: int = 0) -> None:
        self.data = random.Random(size_bytes).randbytes(size_bytes)
        self.low = low
        self.gone = False

    def end(self) -> int:
        return len(self.data)

    def min_offset(self) -> int:
        return self.low

    def read(self, offset: int, views) -> bool:
        assert offset // SEGMENT == (offset + sum(map(len, views)) - 1) // SEGMENT
        for view in views:
            view[:] = self.data[offset:offset + len(view)]
            offset += len(view)
        return not self.gone


class Rig:
    def __init__(self, log: Log, batch_bytes: int = 32768) -> None:
        self.log = log
        ours, self.slave = socket.socketpair()
        self.slave.setblocking(False)
        self.now_ns = SECOND_NS
        self.replication = Replication(None)
        self.connection = HAConnection(ours, "slave", log, self.replication.open_link("slave"),
                                       EngineConfig(ha_transfer_batch_size_bytes=batch_bytes), self.now_ns)

    def report(self, *reports: int) -> None:
        self.slave.sendall(b"".join(map(ha_wire.REPORT.pack, reports)))
        self.connection.on_readable(self.now_ns)

    def transfer(self) -> None:
        while self.connection.transfer(self.log.end(), self.now_ns):
            pass

    def hear(self) -> bytes:
        """Everything that was sent."""
        pieces = []
        while True:
            self.transfer()
            try:
                data = self.slave.recv(1 << 20)
            except BlockingIOError:
                return b"".join(pieces)
            if not data:
                return b"".join(pieces)
            pieces.append(data)

    def frames(self) -> list[tuple[int, bytes]]:
        data, at, found = self.hear(), 0, []
        while at < len(data):
            offset, size = ha_wire.unpack_header(data, at)
            at += ha_wire.HEADER_BYTES
            assert at + size <= len(data), "a frame was cut"
            found.append((offset, data[at:at + size]))
            at += size
        return found

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        if self.now_ns >= self.connection.due_ns():
            self.connection.tick(self.now_ns)


def joined(frames) -> bytes:
    position = frames[0][0]
    for offset, body in frames:
        assert offset == position
        position += len(body)
    return b"".join(body for _, body in frames)


def test_a_master_sends_no_bytes_before_the_first_report():
    rig = Rig(Log(1000))
    assert rig.hear() == b""
    rig.pass_s(10)
    assert rig.hear() == b""
    assert not rig.connection.positioned


def test_a_slave_gets_all_bytes_after_its_report_and_then_the_end_of_the_log():
    rig = Rig(Log(3 * SEGMENT + 100))
    rig.report(1000)
    frames = rig.frames()
    assert joined(frames[:-1]) == rig.log.data[1000:]
    assert frames[-1] == (rig.log.end(), b"")
    for offset, body in frames:
        assert len(body) <= 32768
        assert not body or offset // SEGMENT == (offset + len(body) - 1) // SEGMENT
    rig.log.data += b"more"
    assert rig.frames() == [(3 * SEGMENT + 100, b"more")]  # and no heartbeat behind each


def test_a_slave_that_has_nothing_gets_the_last_segment():
    rig = Rig(Log(2 * SEGMENT + 5))
    rig.report(0)
    frames = rig.frames()
    assert frames[0] == (2 * SEGMENT, rig.log.data[2 * SEGMENT:])
    rig.report(0)  # RocketMQ's says so again while nothing has arrived
    assert rig.connection.acked == -1 and not rig.connection.ended
    rig.report(2 * SEGMENT)
    assert rig.connection.acked == -1, "nothing of what was sent"
    rig.report(2 * SEGMENT + 5)
    assert rig.connection.acked == 2 * SEGMENT + 5


def test_a_slave_that_asks_for_byte_one_gets_the_whole_log():
    rig = Rig(Log(2 * SEGMENT))
    rig.report(1)
    assert joined(rig.frames()) == rig.log.data[1:]


def test_a_slave_that_has_everything_hears_so_at_once():
    rig = Rig(Log(500))
    rig.report(500)
    assert rig.frames() == [(500, b"")]


def test_an_empty_log_is_served():
    rig = Rig(Log(0))
    rig.report(0)
    assert rig.frames() == [(0, b"")]
    rig.log.data = b"first"
    assert rig.frames() == [(0, b"first")]


@pytest.mark.parametrize("report, low, answer, why", [(1001, 0, 1000, "ends at 1000"), (1 << 62, 0, 1000, "ends at 1000"),
                                                      (5, SEGMENT, SEGMENT, "begins at 65536")])
def test_a_report_outside_the_log_is_answered_with_the_logs_range(report, low, answer, why):
    log = Log(1000 if not low else SEGMENT + 1000, low)
    rig = Rig(log)
    rig.report(report)
    assert rig.hear() == ha_wire.HEADER.pack(answer, 0)
    assert rig.slave.recv(10) == b""  # and no more
    assert not rig.connection.positioned and not rig.connection.ended
    rig.slave.close()
    rig.connection.on_readable(rig.now_ns)
    assert why in rig.connection.ended


def test_a_refused_slave_that_stays_is_closed():
    rig = Rig(Log(10))
    rig.report(11)
    rig.slave.sendall(b"whatever")
    rig.connection.on_readable(rig.now_ns)
    assert not rig.connection.ended
    rig.pass_s(REFUSAL_NS / SECOND_NS)
    assert "ends at 10" in rig.connection.ended


def test_the_first_report_confirms_nothing_and_later_ones_do():
    rig = Rig(Log(1000))
    rig.report(400)
    assert rig.connection.acked == -1
    rig.transfer()
    rig.report(400, 400)
    assert rig.connection.acked == rig.replication.links()[0]["acked"] == -1, "said again it is no more than a claim"
    rig.report(700, 900)
    assert rig.connection.acked == 900
    assert rig.replication.links()[0]["acked"] == 900


def test_a_report_may_come_in_pieces():
    rig = Rig(Log(1000))
    for byte in ha_wire.REPORT.pack(300) + ha_wire.REPORT.pack(1000):
        rig.slave.sendall(bytes([byte]))
        rig.connection.on_readable(rig.now_ns)
        rig.transfer()
    assert (rig.connection.acked, rig.connection.ended) == (1000, "")


@pytest.mark.parametrize("reports, why", [((100, 1001), "only 1000 was sent"), ((100, 500, 499), "became shorter"),
                                          ((-1,), "no slave"), ((100, -5), "no slave")])
def test_a_report_that_cannot_be_ends_the_connection(reports, why):
    rig = Rig(Log(1000))
    rig.report(reports[0])
    rig.transfer()
    for report in reports[1:]:
        rig.report(report)
    assert why in rig.connection.ended
    assert rig.connection.acked in (-1, 500)


def test_a_report_beyond_what_was_really_sent_ends_the_connection():
    rig = Rig(Log(4 << 20))
    rig.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    rig.report(7)
    rig.transfer()
    assert rig.connection.blocked
    sent = rig.connection.sent
    assert 7 < sent < 4 << 20
    rig.report(sent + 1)
    assert f"only {sent} was sent" in rig.connection.ended


@pytest.mark.parametrize("pushed, sent", [(0, 700), (5, 700), (12, 700), (15, 703), (112, 800), (120, 800), (125, 801)])
def test_of_a_frame_that_is_half_sent_the_body_counts_and_not_its_header(pushed, sent):
    connection = Rig(Log(1000), batch_bytes=100).connection
    connection._buffer_start, connection._filled, connection._pushed = 700, 200, pushed
    connection.native.fields.next = 876
    assert connection.sent == sent


@pytest.mark.parametrize("seed", range(30))
def test_a_connection_knows_the_sent_bytes_exactly_however_slowly_the_slave_reads(seed):
    rng = random.Random(seed)
    log = Log(rng.randrange(1, 4 * SEGMENT))
    start = rng.randrange(1, log.end() + 1)
    rig = Rig(log, batch_bytes=rng.choice((1, 7, 1000, 32768, 100000)) if log.end() < 3000 else rng.choice((1000, 32768, 100000)))
    rig.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    rig.report(start)
    got, body, here = bytearray(), bytearray(), 0
    left_of_frame = 0
    while len(body) < log.end() - start:
        rig.connection.transfer(log.end(), rig.now_ns)
        while True:
            try:
                got += rig.slave.recv(rng.choice((1, 5, 12, 13, 100, 5000, 1 << 20)))
            except BlockingIOError:
                break
            if rng.random() < 0.3:
                break
        while True:  # parse
            if left_of_frame == 0:
                if len(got) - here < 12:
                    break
                offset, left_of_frame = ha_wire.unpack_header(got, here)
                assert offset == start + len(body), f"seed {seed}"
                here += 12
                if left_of_frame == 0:
                    break
            piece = got[here:here + left_of_frame]
            if not piece:
                break
            body += piece
            here += len(piece)
            left_of_frame -= len(piece)
        assert rig.connection.sent >= start + len(body), f"seed {seed}"
        assert not rig.connection.ended
    assert bytes(body) == log.data[start:], f"seed {seed}"
    assert rig.connection.sent == log.end()


def test_bytes_of_a_segment_that_is_being_deleted_are_not_sent():
    rig = Rig(Log(1000))
    rig.report(1)
    rig.log.gone = True
    assert rig.hear() == b""
    assert "deleted before it was sent" in rig.connection.ended


def test_a_heartbeat_after_a_while_without_one_write():
    rig = Rig(Log(100))
    rig.report(100)
    assert rig.frames() == [(100, b"")]
    rig.pass_s(4.9)
    assert rig.frames() == []
    rig.pass_s(0.2)
    assert rig.frames() == [(100, b"")]
    rig.pass_s(4.9)
    rig.log.data += b"x"
    assert rig.frames() == [(100, b"x")]
    rig.pass_s(4.9)
    assert rig.frames() == []


@pytest.mark.parametrize("positioned", [True, False])
def test_a_silent_slave_is_closed(positioned):
    rig = Rig(Log(100))
    if positioned:
        rig.pass_s(1)
        rig.report(100)
    else:
        rig.slave.sendall(b"1234")
        rig.connection.on_readable(rig.now_ns)
    for _ in range(4):
        rig.pass_s(5)
        assert not rig.connection.ended
    rig.pass_s(1)
    assert "sent nothing for 21 s" in rig.connection.ended


def test_bytes_that_never_make_a_report_keep_no_connection():
    rig = Rig(Log(100))
    for _ in range(6):  # one each 3 s
        rig.pass_s(3)
        assert not rig.connection.ended
        rig.slave.sendall(b"\0")
        rig.connection.on_readable(rig.now_ns)
    assert not rig.connection.has_reported
    rig.pass_s(3)
    assert "sent nothing for 21 s" in rig.connection.ended


def test_a_slave_that_takes_no_bytes_gets_no_heartbeat_between_two_halves_of_a_frame():
    rig = Rig(Log(4 << 20))
    rig.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    rig.report(1)
    rig.transfer()
    rig.pass_s(6)
    rig.report(1)
    rig.pass_s(6)
    assert joined([frame for frame in rig.frames() if frame[1]]) == rig.log.data[1:]


def test_the_end_of_the_connection_is_seen():
    rig = Rig(Log(100))
    rig.report(50)
    rig.slave.close()
    rig.connection.on_readable(rig.now_ns)
    assert rig.connection.ended
    rig.connection.close()
    assert rig.replication.links() == []
    assert rig.replication.totals()["last_closed"]["detail"] == rig.connection.ended


@pytest.mark.parametrize("seed", range(20))
def test_garbage_never_does_more_than_end_its_connection(seed):
    rng = random.Random(seed)
    rig = Rig(Log(1000))
    if seed % 2:
        rig.report(10)
        rig.transfer()
    for _ in range(20):
        data = rng.choice((rng.randbytes(rng.randrange(1, 100)), b"GET / HTTP/1.1\r\n\r\n", struct.pack(">q", rng.randrange(-5, 2000))))
        try:
            rig.slave.sendall(data)
        except OSError:
            break
        rig.connection.on_readable(rig.now_ns)
        assert rig.connection.acked <= 1000
        if rig.connection.ended:
            break
        rig.transfer()


def test_when_the_log_ended_below_an_offset_is_the_last_look_at_which_it_did():
    ends = EndTimes()
    assert ends.last_at_or_below(100) == 0
    for now, end in ((1, 100), (2, 100), (3, 250), (4, 250), (5, 400)):
        ends.note(now, end)
    assert [ends.last_at_or_below(offset) for offset in (100, 249, 250, 399, 400, 9000)] == [2, 2, 4, 4, 5, 5]
    assert ends.last_at_or_below(99) == 2, "from before the first look: as late as is known"


def test_looks_at_the_end_of_the_log_take_bounded_room_and_the_newest_stay_exact():
    ends = EndTimes()
    looks = 100 * END_TIMES_MAX
    for now in range(1, looks):
        ends.note(now, now * 1000)
    assert len(ends._ends) <= END_TIMES_MAX
    for late in (0, 1, 10, 50, 1000, 30_000, looks // 2, looks - 10):
        found = ends.last_at_or_below((looks - 1 - late) * 1000)
        assert 0 <= looks - 1 - late - found <= late // 100, "within a hundredth of how long ago it was"
    assert ends.last_at_or_below(500) == 1
