"""Raw entries: a slave's log becomes its master's, byte for byte, or the entry is refused whole."""

from __future__ import annotations

import os
import random
import struct

import pytest

from fix_writer_rig import RING_BYTES, WriterRig, answer_of, submit
from pyengine._native import ffi, lib
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.native import control as control_native
from pyengine.native.flush import monotonic_ns
from pyengine.native.scan import walk
from pyengine.native.session import COMPLETIONS, PUT
from pyengine.native.writer import RUN_ROLLED, RUN_SEGMENT, RUN_TIME
from pyengine.results import PutStatus

SEGMENT_BYTES = 4096
PHYSICAL, END, STATUS, DETAIL, COUNT = 1, 2, 5, 6, 7
REPLICATOR_PID = 4711
STORE_TIME_AT = 56  # in a record, with born hosts of IPv4


@pytest.fixture
def rigs():
    made = []

    def make(**settings) -> WriterRig:
        made.append(WriterRig(segment_bytes=SEGMENT_BYTES, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def filled_master(rigs, seed: int, messages: int = 60) -> bytes:
    """A log of several segments, with bytes behind the header of each blank as a pool leaves them."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    master = rigs()
    producer = master.open_session()
    master.start_writer()
    for _ in range(messages):
        submit(producer, PUT, b"T", b"", draw.randbytes(draw.randrange(1, 900)), queue_id=draw.randrange(3),
               clock_ms=1_700_000_000_000)
        master.drain()
    log = bytearray(master.log[:master.wrote()])
    for piece in whole_records(log):
        if is_blank(log, piece):
            log[piece.start + 8:piece.stop] = draw.randbytes(piece.stop - piece.start - 8)
    return bytes(log)


def is_blank(log: bytes, piece: slice) -> bool:
    return int.from_bytes(log[piece.start + 4:piece.start + 8], "big") == BLANK_MAGIC


def whole_records(log: bytes) -> list[slice]:
    pieces, at = [], 0
    while at < len(log):
        size = int.from_bytes(log[at:at + 4], "big")
        pieces.append(slice(at, at + size))
        at += size
    return pieces


def entries(log: bytes, draw: random.Random) -> list[slice]:
    """Neighbouring records together, some at a time, never across a segment's end."""
    made: list[slice] = []
    for piece in whole_records(log):
        if made and made[-1].start // SEGMENT_BYTES == (piece.stop - 1) // SEGMENT_BYTES and draw.random() < 0.6:
            made[-1] = slice(made[-1].start, piece.stop)
        else:
            made.append(piece)
    return made


def slave_with_session(rigs, tmp_path, mode: int = control_native.MODE_MAPPED, ahead: int = 4):
    slave = rigs(mode=mode, replay_clock=False)
    slave.control.identity.role = control_native.SLAVE
    slave.folder = tmp_path
    native = control_native
    native.refuse_puts(slave.control, native.REFUSE_SLAVE)
    slave.control.workers[native.REPLICATOR].pid = REPLICATOR_PID
    slave.control.sessions[0].pid = REPLICATOR_PID
    producer = slave.open_session()
    slave.start_writer(ahead)
    return slave, producer


def submit_raw(slave: WriterRig, producer, records: bytes, where: int) -> tuple:
    assert producer.submit_raw(records, where, monotonic_ns() + 5_000_000_000) == 0
    slave.drain()
    return answer_of(producer, producer.sequence)


def log_of(slave: WriterRig) -> bytes:
    if slave.control.identity.mode != control_native.MODE_SYNC:
        return slave.log[:slave.wrote()]
    files = [os.pread(slave.fds[base], SEGMENT_BYTES, 0).ljust(SEGMENT_BYTES, b"\0") for base in sorted(slave.fds)]
    return b"".join(files)[:slave.wrote()]


@pytest.mark.parametrize("mode", (control_native.MODE_MAPPED, control_native.MODE_SYNC), ids=("mapped", "sync"))
def test_a_slave_s_log_is_its_master_s_byte_for_byte_fillers_too(rigs, tmp_path, mode):
    log = filled_master(rigs, seed=random.randrange(1 << 30))
    slave, producer = slave_with_session(rigs, tmp_path, mode)
    for piece in entries(log, random.Random(1)):
        answer = submit_raw(slave, producer, log[piece], piece.start)
        assert (answer[STATUS], answer[PHYSICAL], answer[END]) == (PutStatus.PUT_OK, piece.start, piece.stop)
    assert log_of(slave) == log
    messages = sum(not is_blank(log, piece) for piece in whole_records(log))
    assert slave.control.slots[slave.control.slot_pass.value & 1].put_messages == messages == 60
    assert control_native.committed_slot(slave.control)[1] == 1_700_000_000_000


def test_gathered_entries_of_an_exactly_full_segment_are_written_before_the_next_segment(rigs, tmp_path):
    """The last entry of the pass closes the segment, the next one begins another."""
    log = filled_master(rigs, seed=random.randrange(1 << 30))
    slave, producer = slave_with_session(rigs, tmp_path, control_native.MODE_SYNC)
    for piece in entries(log, random.Random(1)):
        if producer.submit_raw(log[piece], piece.start, monotonic_ns()) != 0:  # no room in the ring
            slave.drain()
            assert producer.submit_raw(log[piece], piece.start, monotonic_ns() + 5_000_000_000) == 0
    slave.drain()
    assert slave.wrote() == len(log) and log_of(slave) == log


def test_a_session_outlives_as_many_entries_as_it_has_places_for_answers(rigs, tmp_path):
    slave, producer = slave_with_session(rigs, tmp_path)
    deadline_ns = monotonic_ns() + 60_000_000_000
    for _ in range(2 * COMPLETIONS + 10):
        assert producer.submit_raw(b"of another place", 1, deadline_ns) == 0
        slave.drain()
        code, answer = producer.take_answer(producer.sequence, deadline_ns)
        assert (code, answer[DETAIL]) == (0, lib.MS_REFUSED_OFFSET)


def test_a_raw_append_continues_after_a_killed_writer(rigs, tmp_path):
    log = filled_master(rigs, seed=7)
    slave, producer = slave_with_session(rigs, tmp_path)
    pieces = entries(log, random.Random(2))
    for piece in pieces[:9]:
        submit_raw(slave, producer, log[piece], piece.start)
    # The next one dies in its pass: the intent is stored, and half of the bytes.
    native, start = control_native, pieces[9].start
    control = slave.control
    native.store(control.writer, "intended_pass", control.slot_pass.value + 1)
    native.store(control.writer, "intent_end", start + 60)
    slave.log[start:start + 60] = b"x" * 60
    slave.writer.detach_session(0)
    slave.start_writer()
    for piece in pieces[9:]:
        assert submit_raw(slave, producer, log[piece], piece.start)[STATUS] == PutStatus.PUT_OK
    assert log_of(slave) == log


def damaged(log: bytes, kind: str) -> tuple[bytes, int]:
    pieces = whole_records(log)
    first, second = pieces[0], pieces[1]
    closing = next(piece for piece in pieces if is_blank(log, piece))
    return {
        "another place": (log[second], second.start),
        "another place, said to be this one": (log[second], 0),
        "this place, said to be another": (log[first], second.start),
        "half a record": (log[:first.stop + 40], 0),
        "cut in its header": (log[:first.stop + 5], 0),
        "zeros": (bytes(200), 0),
        "nothing": (b"", 0),
        "a blank that is shorter than the segment": (log[closing][:-1], 0),
        "a blank that says so itself": (struct.pack(">iI", 100, BLANK_MAGIC) + bytes(92), 0),
        "a blank that is longer than the segment": (struct.pack(">iI", SEGMENT_BYTES + 100, BLANK_MAGIC) + bytes(SEGMENT_BYTES + 92), 0),
        "a blank in the middle": (log[closing] + log[first], 0),
        "a size beyond the segment": ((SEGMENT_BYTES + 1).to_bytes(4, "big") + log[4:first.stop], 0),
        "a negative size": (b"\xff" + log[1:first.stop], 0),
    }[kind]


@pytest.mark.parametrize("kind", (
    "another place", "another place, said to be this one", "this place, said to be another", "half a record",
    "cut in its header", "zeros", "nothing", "a blank that is shorter than the segment", "a blank that says so itself",
    "a blank that is longer than the segment", "a blank in the middle", "a size beyond the segment", "a negative size"))
def test_bytes_that_are_not_whole_records_of_this_offset_are_refused(rigs, tmp_path, kind):
    log = filled_master(rigs, seed=11)
    slave, producer = slave_with_session(rigs, tmp_path)
    answer = submit_raw(slave, producer, *damaged(log, kind))
    assert (answer[STATUS], answer[PHYSICAL], answer[COUNT]) == (PutStatus.MESSAGE_ILLEGAL, -1, 0)
    assert answer[DETAIL] == (
        lib.MS_REFUSED_OFFSET if kind in ("another place", "this place, said to be another") else lib.MS_REFUSED_RAW)
    assert slave.wrote() == 0
    first = whole_records(log)[0]
    assert submit_raw(slave, producer, log[first], 0)[END] == first.stop


def test_the_store_time_of_a_slave_does_not_step_back(rigs, tmp_path):
    log = bytearray(filled_master(rigs, seed=14, messages=2))
    first, second = whole_records(log)
    time_of_second = slice(second.start + STORE_TIME_AT, second.start + STORE_TIME_AT + 8)
    log[time_of_second] = (int.from_bytes(log[time_of_second], "big") - 1000).to_bytes(8, "big")
    slave, producer = slave_with_session(rigs, tmp_path)
    times = []
    for piece in (first, second):
        assert submit_raw(slave, producer, bytes(log[piece]), piece.start)[STATUS] == PutStatus.PUT_OK
        times.append((control_native.committed_slot(slave.control)[1], control_native.load(slave.control.writer, "ordered_from")))
    assert times == [(1_700_000_000_000, 0), (1_700_000_000_000, second.start)]
    assert log_of(slave) == log


def test_after_a_full_segment_the_next_one_is_asked_for(rigs, tmp_path):
    """At the very beginning, and where a blank has closed the last one."""
    log = filled_master(rigs, seed=15, messages=20)
    first = [piece for piece in whole_records(log) if piece.start < SEGMENT_BYTES]
    slave, producer = slave_with_session(rigs, tmp_path, ahead=0)
    for number, piece in enumerate([*first, whole_records(log)[len(first)]]):
        assert producer.submit_raw(log[piece], piece.start, monotonic_ns() + 5_000_000_000) == 0
        if number in (0, len(first)):
            assert slave.writer.run(0) == RUN_SEGMENT and slave.writer.pointer.segments_needed == 1
            assert slave.writer.ahead_count == 0 and slave.wrote() == piece.start
            slave.writer.add_ahead(slave.segment(slave.writer.next_base))
        assert slave.writer.run(0) in (RUN_TIME, RUN_ROLLED)
        slave.writer.take_finished()
        assert answer_of(producer, producer.sequence)[END] == piece.stop
    assert log_of(slave) == log[:slave.wrote()]


def test_raw_records_wait_for_blocks_as_puts_do(rigs, tmp_path):
    """Also the blank that ends a segment, all of whose bytes a slave copies."""
    log = filled_master(rigs, seed=16)
    slave, producer = slave_with_session(rigs, tmp_path)
    allocator = slave.control.allocator
    control_native.store(allocator, "reserved_end", 0)
    slave.writer.open()
    for piece in entries(log, random.Random(1)):
        assert producer.submit_raw(log[piece], piece.start, monotonic_ns() + 5_000_000_000) == 0
        while slave.writer.run(0) == RUN_ROLLED:
            slave.writer.take_finished()
        assert slave.wrote() == piece.start and slave.writer.pointer.wanted_end == piece.stop
        assert not any(slave.log[allocator.reserved_end :])
        control_native.store(allocator, "reserved_end", piece.stop)
        slave.drain()
    assert log_of(slave) == log


def test_only_the_replicator_of_a_slave_may(rigs, tmp_path):
    log = filled_master(rigs, seed=12)
    first = whole_records(log)[0]
    slave, producer = slave_with_session(rigs, tmp_path)
    for pid, role in ((REPLICATOR_PID + 1, control_native.SLAVE), (REPLICATOR_PID, control_native.SYNC_MASTER)):
        slave.control.sessions[0].pid = pid
        slave.control.identity.role = role
        answer = submit_raw(slave, producer, log[first], 0)
        assert (answer[STATUS], answer[DETAIL]) == (PutStatus.SERVICE_NOT_AVAILABLE, lib.MS_REFUSED_RAW)
    assert slave.wrote() == 0


def test_an_ordinary_put_to_a_slave_is_refused_and_raw_ones_obey_a_full_disk(rigs, tmp_path):
    log = filled_master(rigs, seed=13)
    first = whole_records(log)[0]
    slave, producer = slave_with_session(rigs, tmp_path)
    sequence = submit(producer, PUT, b"T", b"", b"x")
    slave.drain()
    assert answer_of(producer, sequence)[DETAIL] == lib.MS_REFUSED_SLAVE
    control_native.refuse_puts(slave.control, control_native.REFUSE_DISK_FULL)
    assert submit_raw(slave, producer, log[first], 0)[DETAIL] == lib.MS_REFUSED_DISK_FULL
    control_native.refuse_puts(slave.control, control_native.REFUSE_DISK_FULL, on=False)
    assert submit_raw(slave, producer, log[first], 0)[STATUS] == PutStatus.PUT_OK


def test_more_than_half_a_ring_is_refused_at_the_door(rigs, tmp_path):
    _, producer = slave_with_session(rigs, tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        producer.submit_raw(bytes(RING_BYTES), 0, monotonic_ns())


def test_any_bytes_at_all_leave_a_readable_log(rigs, tmp_path):
    seed = random.randrange(1 << 30)
    log = filled_master(rigs, seed=seed)
    draw = random.Random(seed)
    slave, producer = slave_with_session(rigs, tmp_path)
    end = 0
    for piece in entries(log, draw):
        for _ in range(4):
            spoilt = bytearray(log[piece])
            spoilt[draw.randrange(min(len(spoilt), 100))] ^= 1 << draw.randrange(8)
            answer = submit_raw(slave, producer, bytes(spoilt), piece.start)
            if answer[STATUS] == PutStatus.PUT_OK:  # a bit that no length depends on: the replicator's check is for those
                end = answer[END]
                break
        else:
            end = submit_raw(slave, producer, log[piece], piece.start)[END]
        assert end == piece.stop == slave.wrote()
    for base in range(0, end, SEGMENT_BYTES):
        view = ffi.buffer(ffi.from_buffer(slave.log))[base:base + SEGMENT_BYTES]
        walked = walk(view, base, base, min(end, base + SEGMENT_BYTES), check_crc=False)
        assert walked.reason in ("blank", "range_end"), walked
