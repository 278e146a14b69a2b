"""The writer's pass: the records in the log, and the answers to the producers."""

from __future__ import annotations

import os
import random
import struct

import pytest

from fix_golden import usual
from fix_writer_rig import HOST, RING_BYTES, WriterRig, answer_of, header, submit
from pyengine._native import ffi, lib
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.record import decode_record
from pyengine.native import control as control_native
from pyengine.native.flush import monotonic_ns
from pyengine.native.session import (
    AGAIN,
    BATCH,
    COMPLETIONS,
    MANY,
    PUT,
    SIDE,
    entry_bytes,
    pack_many,
)
from pyengine.native.writer import RUN_FAILED, RUN_ROLLED, RUN_SEGMENT, RUN_SIDE, RUN_TIME, STAGE_BYTES
from pyengine.results import PutStatus
from record_bytes import encode_record

SEQUENCE, PHYSICAL, END, QUEUE_OFFSET, STORE_TIME, STATUS, DETAIL, COUNT, SIZE = range(9)


@pytest.fixture
def rig():
    made = []

    def make(**settings):
        made.append(WriterRig(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_put_is_in_the_log_as_the_formats_would_write_it(rig):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    sequence = submit(producer, PUT, b"T", b"TAGS\x01a", b"hello", queue_id=3, flag=7, clock_ms=1_700_000_000_000)
    rig.drain()
    answer = answer_of(producer, sequence)
    message = decode_record(rig.log, answer[PHYSICAL])
    assert (message.body, message.topic, message.tags, message.queue_id, message.flag) == (b"hello", "T", "a", 3, 7)
    assert answer[:6] == (1, 0, answer[SIZE], 0, 1_700_000_000_000, PutStatus.PUT_OK)
    assert rig.wrote() == answer[END] == message.size_bytes
    assert control_native.committed_slot(rig.control) == (rig.wrote(), 1_700_000_000_000)


def test_queue_offsets_are_contiguous_per_queue_and_prepared_records_take_none(rig):
    rig = rig(segment_bytes=65536)
    producer = rig.open_session()
    rig.start_writer()
    got = []
    for n, sys_flag in enumerate((0, 0x4, 0x8, 0xC, 0)):
        sequence = submit(producer, PUT, b"T", b"", b"%d" % n, sys_flag=sys_flag)
        rig.drain()
        got.append(answer_of(producer, sequence)[QUEUE_OFFSET])
    assert got == [0, 0, 1, 0, 2]


@pytest.mark.parametrize("left", [8, 9, 7, 1, 0])
def test_a_record_is_written_only_where_a_blank_still_fits_after_it(rig, left):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    overhead = 91 + 1
    submit(producer, PUT, b"T", b"", bytes(4096 - left - overhead - 200 - overhead))
    probe = submit(producer, PUT, b"T", b"", bytes(200))
    last = submit(producer, PUT, b"T", b"", b"x")
    rig.drain()
    first_end = 4096 - left - overhead - 200
    fits = left >= 8
    assert answer_of(producer, probe)[PHYSICAL] == (first_end if fits else 4096)
    blank_at = 4096 - left if fits else first_end
    assert struct.unpack_from(">iI", rig.log, blank_at) == (4096 - blank_at, BLANK_MAGIC)
    assert answer_of(producer, last)[PHYSICAL] == (4096 if fits else 4096 + 200 + overhead)


def test_put_many_spans_segments_with_contiguous_offsets(rig):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    bodies = [bytes([n % 256]) * (n % 700) for n in range(60)]
    sequence = submit(producer, MANY, b"T", b"TAGS\x01m", pack_many(bodies), count=len(bodies))
    rig.drain()
    answer = answer_of(producer, sequence)
    assert (answer[STATUS], answer[QUEUE_OFFSET], answer[COUNT]) == (PutStatus.PUT_OK, 0, 60)
    assert rig.writer.pointer.put_bytes == answer[END] - answer[PHYSICAL]  # its blanks too
    found, at = [], 0
    while at < answer[END]:
        size, magic = struct.unpack_from(">iI", rig.log, at)
        if magic != BLANK_MAGIC:
            message = decode_record(rig.log, at)
            assert message.physical_offset == at and message.queue_offset == len(found)
            found.append(message.body)
        at += size
    assert found == bodies


def test_put_many_is_refused_whole_when_one_member_is_illegal(rig):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    bodies = [b"fine", bytes(5000), b"fine too"]
    sequence = submit(producer, MANY, b"T", b"", pack_many(bodies), count=3)
    rig.drain()
    assert answer_of(producer, sequence)[STATUS] == PutStatus.MESSAGE_ILLEGAL
    assert rig.wrote() == 0
    after = submit(producer, PUT, b"T", b"", b"x")
    rig.drain()
    assert answer_of(producer, after)[QUEUE_OFFSET] == 0


def test_put_many_whose_lengths_do_not_add_up_closes_its_session(rig):
    rig = rig()
    liar, good = rig.open_session(0), rig.open_session(1)
    rig.start_writer()
    submit(liar, MANY, b"T", b"", pack_many([b"one", b"two"]) + b"and more", count=2)
    sequence = submit(good, PUT, b"T", b"", b"x")
    rig.drain()
    assert answer_of(good, sequence)[QUEUE_OFFSET] == 0 and liar.pointer.session.acked == 0


def test_a_record_that_leaves_no_room_for_a_blank_in_an_empty_segment_is_refused(rig):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    empty = submit(producer, PUT, b"T", b"", b"")
    rig.drain()
    most = 4096 - 8 - answer_of(producer, empty)[SIZE]
    for body_bytes in (most + 1, most + 8):
        sequence = submit(producer, PUT, b"T", b"", bytes(body_bytes))
        rig.drain()
        assert answer_of(producer, sequence)[STATUS] == PutStatus.MESSAGE_ILLEGAL
    sequence = submit(producer, PUT, b"T", b"", bytes(most))
    rig.drain()
    assert (answer_of(producer, sequence)[PHYSICAL], answer_of(producer, sequence)[END]) == (4096, 2 * 4096 - 8)


def test_a_refusal_is_for_the_entry_whose_segment_did_not_come_and_for_no_later_one(rig):
    rig = rig(segment_bytes=4096)
    liar = rig.open_session()
    rig.start_writer(ahead=0)
    submit(liar, PUT, b"T", b"", b"x")
    assert rig.writer.run(monotonic_ns()) == RUN_SEGMENT
    rig.writer.pointer.refuse_segment = 1
    memory, _ = rig.sessions[0]
    struct.pack_into("<H", memory, len(memory) - RING_BYTES + 4, lib.MS_ENTRY_PAD)
    liar.pointer.sequence = 0
    assert rig.writer.run(monotonic_ns()) == RUN_TIME  # a pass without an entry that wants a segment
    sequence = submit(liar, PUT, b"T", b"", b"x")
    rig.drain()
    assert answer_of(liar, sequence)[STATUS] == PutStatus.PUT_OK


def take_back(producer) -> int:
    """Unpublish all entries that the writer has not executed; return the tail that publishes them again."""
    session = producer.pointer.session
    tail, session.tail = session.tail, session.head
    return tail


def submit_side(producer, payload_bytes: int) -> None:
    head = header(SIDE, payload_bytes=payload_bytes, topic=b"", properties=b"")
    assert producer.submit_side(head, monotonic_ns() + 5_000_000_000) == 0


def test_a_refusal_is_not_for_another_session_when_its_entry_was_taken_back(rig):
    rig = rig(segment_bytes=4096)
    hostile, good = rig.open_session(0), rig.open_session(1)
    pointer = rig.start_writer(ahead=0).pointer
    submit_side(hostile, 4096)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE
    pointer.side_failed = 1
    take_back(hostile)
    submit_side(good, 5000)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE and (pointer.side_slot, pointer.side_bytes) == (1, 5000)


def test_a_refusal_is_not_for_the_next_session_of_the_slot(rig):
    rig = rig(segment_bytes=4096)
    hostile = rig.open_session(0)
    pointer = rig.start_writer(ahead=0).pointer
    submit_side(hostile, 4096)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE
    pointer.side_failed = 1
    take_back(hostile)
    rig.writer.detach_session(0)
    good = rig.open_session(0, generation=2)
    rig.attach_sessions()
    submit_side(good, 5000)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE and pointer.side_bytes == 5000


def test_a_side_object_serves_the_session_that_requested_it_only(rig):
    """Otherwise a hostile producer could read the writer's memory beyond another session's shorter side object."""
    rig = rig(segment_bytes=8 << 20, segments=2)
    short, long, forged = (rig.open_session(slot) for slot in range(3))
    rig.start_writer(ahead=2)
    submit_side(short, 4096)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE
    rig.writer.load_side(bytes(4096))
    take_back(short)
    submit_side(long, 3 << 20)
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE
    rig.writer.pointer.side_failed = 1
    tail = take_back(long)
    submit(forged, PUT, b"T", b"", b"x")
    memory, _ = rig.sessions[2]
    struct.pack_into("<I", memory, len(memory) - RING_BYTES + 108, (5 << 19) + 1)  # payload_bytes of an entry that ends long before
    rig.writer.run(monotonic_ns())
    rig.attach_sessions()  # which the writer asks for, to have the forged one freed
    long.pointer.session.tail = tail
    assert rig.writer.run(monotonic_ns()) == RUN_SIDE and rig.wrote() == 0


def test_segments_that_python_has_yet_to_take_are_bounded(rig):
    rig = rig(segment_bytes=1024, segments=200)
    producers = [rig.open_session(slot) for slot in range(2)]
    rig.start_writer(ahead=0)
    bodies = [bytes(600)] * 40  # one a segment
    for producer in producers:
        submit(producer, MANY, b"T", b"", pack_many(bodies), count=len(bodies))
    why = RUN_SEGMENT
    while why == RUN_SEGMENT:
        why = rig.writer.run(monotonic_ns() + 10_000_000_000)
        while rig.writer.ahead_count < rig.writer.pointer.segments_needed:
            rig.writer.add_ahead(rig.segment(rig.writer.next_base))
    assert why == RUN_ROLLED and rig.writer.pointer.rolled <= 64
    rig.drain()
    assert [answer_of(producer, 1)[STATUS] for producer in producers] == [PutStatus.PUT_OK] * 2


def member(body: bytes, properties: bytes, flag: int = 0) -> bytes:
    return struct.pack(f">iiiii{len(body)}sh", 22 + len(body) + len(properties), 0, 0, flag, len(body), body,
                       len(properties)) + properties


def test_a_batch_rolls_as_a_whole_and_its_properties_are_appended_to_each_member(rig):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    submit(producer, PUT, b"T", b"", bytes(3000))
    members = [member(b"one" * 100, b"K\x01v", 1), member(b"two" * 100, b"", 2), member(b"three" * 60, b"K\x01v\x02", 3)]
    sequence = submit(producer, BATCH, b"T", b"B\x01b", b"".join(members), count=3)
    rig.drain()
    answer = answer_of(producer, sequence)
    assert (answer[STATUS], answer[PHYSICAL], answer[QUEUE_OFFSET]) == (PutStatus.PUT_OK, 4096, 1)
    at, texts = 4096, []
    for _ in range(3):
        message = decode_record(rig.log, at)
        texts.append((message.raw_properties, message.flag))
        at += message.size_bytes
    assert texts == [("K\x01v\x02B\x01b", 1), ("B\x01b", 2), ("K\x01v\x02B\x01b", 3)]


@pytest.mark.parametrize("left", [9, 8, 7, 1, 0])
def test_a_batch_is_written_only_where_a_blank_still_fits_after_it(rig, left):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    overhead = 91 + 1
    begin = 4096 - left - 3 * (overhead + 50)
    submit(producer, PUT, b"T", b"", bytes(begin - overhead))
    sequence = submit(producer, BATCH, b"T", b"", member(bytes(50), b"") * 3, count=3)
    rig.drain()
    answer = answer_of(producer, sequence)
    assert answer[PHYSICAL] == (begin if left >= 8 else 4096)
    offsets = [answer[PHYSICAL] + number * (overhead + 50) for number in range(3)]
    assert [decode_record(rig.log, at).physical_offset for at in offsets] == offsets, "one after the other, in one segment"
    if left < 8:
        assert struct.unpack_from(">iI", rig.log, begin) == (4096 - begin, BLANK_MAGIC)


@pytest.mark.parametrize("change", ["short", "long", "count", "prepared", "none"])
def test_a_malformed_batch_is_refused_and_the_session_lives(rig, change):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    rig.start_writer()
    good = member(b"body", b"K\x01v")
    data = {"short": good[:-1], "long": good + b"x", "none": b""}.get(change, good)
    sequence = submit(producer, BATCH, b"T", b"", data, count=2 if change == "count" else 1,
                      sys_flag=4 if change == "prepared" else 0)
    after = submit(producer, PUT, b"T", b"", b"x")
    rig.drain()
    assert answer_of(producer, sequence)[STATUS] == PutStatus.MESSAGE_ILLEGAL
    assert answer_of(producer, after)[STATUS] == PutStatus.PUT_OK


@pytest.mark.parametrize("topic", [b"", b"t" * 128, b"a/b", b".", b"..", b"a\0b", b"a\x01b", b"a\x02b", b"\xff\xfe",
                                   b"\xe0\x80\x80"])
def test_a_topic_that_would_hurt_the_store_is_refused(rig, topic):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    sequence = submit(producer, PUT, topic, b"", b"x")
    rig.drain()
    assert answer_of(producer, sequence)[STATUS] == PutStatus.MESSAGE_ILLEGAL
    assert rig.wrote() == 0


def test_sizes_are_refused_with_rocketmqs_statuses(rig):
    rig = rig(segment_bytes=1 << 20, max_message_bytes=1000)
    producer = rig.open_session()
    rig.start_writer()
    results = []
    for properties, body in ((b"", bytes(1000)), (b"", bytes(1001)), (b"p" * 32767, b""), (b"p" * 32768, b"")):
        sequence = submit(producer, PUT, b"T", properties, body)
        rig.drain()
        results.append(PutStatus(answer_of(producer, sequence)[STATUS]).name)
    assert results == ["PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK", "PROPERTIES_SIZE_EXCEEDED"]


def test_a_frozen_store_refuses_every_put(rig):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    control_native.freeze(rig.control, control_native.FLUSHER, 5, "fdatasync: input/output error")
    sequence = submit(producer, PUT, b"T", b"", b"x")
    rig.drain()
    assert answer_of(producer, sequence)[STATUS] == PutStatus.SERVICE_NOT_AVAILABLE
    assert control_native.reason(rig.control) == "fdatasync: input/output error"
    assert not control_native.freeze(rig.control, control_native.WRITER, 28, "another")
    assert "input/output" in control_native.reason(rig.control)


def test_the_store_time_does_not_step_back_to_an_impossible_time(rig):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    sequences = [submit(producer, PUT, b"T", b"", b"x", clock_ms=clock_ms) for clock_ms in (1_700_000_000_000, -(1 << 63))]
    rig.drain()
    assert [answer_of(producer, sequence)[STORE_TIME] for sequence in sequences] == [1_700_000_000_000] * 2


def test_a_new_generation_of_a_session_slot_starts_at_zero(rig):
    rig = rig()
    first = rig.open_session(slot=5, generation=1)
    rig.start_writer()
    submit(first, PUT, b"T", b"", b"a")
    rig.drain()
    rig.writer.detach_session(5)
    second = rig.open_session(slot=5, generation=2)
    sequence = submit(second, PUT, b"T", b"", b"b")
    rig.drain()
    assert sequence == 1 and answer_of(second, 1)[QUEUE_OFFSET] == 1


def test_the_committed_slot_has_what_every_session_did(rig, rng):
    rig = rig(segment_bytes=1 << 20)
    slots = rng.sample(range(lib.MS_SESSION_SLOTS), 20)
    producers = {slot: rig.open_session(slot) for slot in slots}
    rig.start_writer()
    for _ in range(400):
        for slot in rng.sample(slots, rng.randrange(4)):
            if rng.random() < 0.1:
                rig.writer.detach_session(slot)
                producers[slot] = rig.open_session(slot, producers[slot].pointer.generation + 1)
            for _ in range(rng.randrange(3)):
                submit(producers[slot], PUT, b"T", b"", bytes(rng.randrange(50)))
        if rng.random() < 0.1:
            rig.start_writer()  # as after a kill between two passes
        rig.drain()
        if rng.random() < 0.2:
            rig.writer.use_table(rig.table)  # an empty pass
        committed = rig.control.slots[control_native.load_position(rig.control.slot_pass) % 2]
        for slot, producer in producers.items():
            account = committed.sessions[slot]
            known = account.generation == producer.pointer.generation
            assert (account.head, account.acked) == (producer.pointer.tail, producer.sequence) if known else producer.sequence == 0


def test_a_session_that_was_quiet_is_seen_again(rig):
    rig = rig(segment_bytes=1 << 20)
    producers = [rig.open_session(slot) for slot in range(100)]
    writer = rig.start_writer().pointer
    for n in range(300):
        submit(producers[0], PUT, b"T", b"", b"%d" % n)
        rig.drain()
    assert (writer.active[0] & ~1, writer.active[1]) == (0, 0), "passes look at the one that puts"
    for producer in producers[::-1]:
        for _ in range(10):
            submit(producers[0], PUT, b"T", b"", b"x")
        sequence = submit(producer, PUT, b"T", b"", b"y")
        rig.drain()
        assert answer_of(producer, sequence)[STATUS] == PutStatus.PUT_OK


def test_the_store_clock_never_steps_back(rig):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    times = []
    for clock_ms in (1_700_000_005_000, 1_700_000_001_000, 1_700_000_006_000):
        sequence = submit(producer, PUT, b"T", b"", b"x", clock_ms=clock_ms)
        rig.drain()
        times.append(answer_of(producer, sequence)[STORE_TIME])
    assert times == [1_700_000_005_000, 1_700_000_005_000, 1_700_000_006_000]
    assert rig.control.writer.clock_back_ms == 4000


def test_sync_mode_writes_the_same_bytes_through_descriptors(rig, tmp_path):
    mapped, sync = rig(segment_bytes=4096), rig(segment_bytes=4096, mode=control_native.MODE_SYNC)
    sync.folder = tmp_path
    sync.zero_ahead_bytes = 1500
    for each in (mapped, sync):
        producer = each.open_session()
        each.start_writer()
        for n in range(30):
            submit(producer, PUT, b"T", b"TAGS\x01x", bytes([n]) * (n * 13), clock_ms=1_700_000_000_000 + n)
        each.drain()
    files = sorted(tmp_path.iterdir())
    written = b"".join(path.read_bytes().ljust(4096, b"\0") for path in files)[: sync.wrote()]
    assert len(files) > 3 and sync.wrote() == mapped.wrote() and max(path.stat().st_size for path in files) == 4096
    assert mapped.control.writer.intent_end == sync.control.writer.intent_end == sync.wrote()
    assert written == mapped.log[: mapped.wrote()]


@pytest.mark.parametrize("way", usual(["stored", "gathered", "written"], ["gathered"], pytest.mark.ci))
def test_nothing_is_stored_or_written_beyond_what_is_reserved(rig, tmp_path, way):
    """Nor zeros ahead, nor the zeros that fill a page; what waited is in the log as if there had been no limit."""
    size = 65536
    mode = control_native.MODE_SYNC if way == "written" else control_native.MODE_MAPPED
    limited, free = rig(segment_bytes=size, mode=mode), rig(segment_bytes=size)
    limited.folder, limited.zero_ahead_bytes = tmp_path, 5000
    limited.gather_bytes_min = 1 if way == "gathered" else 0
    for each in (limited, free):
        producer = each.open_session()
        if each is limited:
            control_native.store(each.control.allocator, "reserved_end", 0)
        each.start_writer()
        for number in range(40):
            submit(producer, PUT, b"T", b"", bytes([number + 1]) * 3000, clock_ms=1_700_000_000_000)
            reserved_end = each.control.allocator.reserved_end
            while each.writer.run(monotonic_ns()) == RUN_SEGMENT:
                assert each is limited and each.writer.pointer.wanted_end > reserved_end
                reserved_end += 4096
                control_native.store(each.control.allocator, "reserved_end", reserved_end)
            each.drain()
            each.load_files()
            assert not any(each.log[reserved_end:])
            if way == "written" and each is limited:  # their files are as long as what was written
                assert max(int(path.name) + path.stat().st_size for path in tmp_path.iterdir() if path.stat().st_size) <= reserved_end
    assert limited.wrote() == free.wrote() > size and limited.log[: free.wrote()] == free.log[: free.wrote()]


def test_a_refused_entry_that_needs_more_than_is_reserved_leaves_room_for_a_smaller_one(rig):
    rig = rig(segment_bytes=65536)
    producer = rig.open_session()
    control_native.store(rig.control.allocator, "reserved_end", 8192)
    rig.start_writer()
    large = submit(producer, PUT, b"T", b"", bytes(9000))
    small = submit(producer, PUT, b"T", b"", bytes(1000))
    assert rig.writer.run(monotonic_ns()) == RUN_SEGMENT
    rig.writer.pointer.refuse_segment = 1
    rig.drain()
    assert answer_of(producer, large)[STATUS] == PutStatus.CREATE_MAPEDFILE_FAILED
    assert answer_of(producer, small)[STATUS] == PutStatus.PUT_OK


def test_an_entry_of_several_segments_needs_blocks_to_its_end(rig):
    rig = rig(segment_bytes=4096)
    producer = rig.open_session()
    control_native.store(rig.control.allocator, "reserved_end", 2 * 4096)
    rig.start_writer()
    bodies = [bytes(3000)] * 3
    sequence = submit(producer, MANY, b"T", b"", pack_many(bodies), count=3)
    assert rig.writer.run(monotonic_ns()) == RUN_SEGMENT
    assert rig.writer.pointer.wanted_end == 2 * 4096 + 3092 and not any(rig.log[:])
    control_native.store(rig.control.allocator, "reserved_end", 2 * 4096 + 3092)
    rig.drain()
    assert answer_of(producer, sequence)[END] == rig.wrote() == 2 * 4096 + 3092


def test_a_refusal_in_sync_mode_wakes_producers_that_wait_for_a_sync(rig, tmp_path):
    rig = rig(segment_bytes=4096, mode=control_native.MODE_SYNC)
    rig.folder = tmp_path
    producer = rig.open_session()
    rig.start_writer()
    seen = rig.control.flush_seq.value
    submit(producer, PUT, b"T", b"", b"x")
    rig.drain()
    assert rig.control.flush_seq.value == seen
    refused = submit(producer, PUT, b"T", b"", bytes(5000))
    rig.drain()
    assert answer_of(producer, refused)[STATUS] != PutStatus.PUT_OK
    assert rig.control.flush_seq.value == seen + 1


def test_a_failed_write_in_sync_mode_freezes_the_store_and_acknowledges_nothing(rig, tmp_path):
    rig = rig(segment_bytes=4096, mode=control_native.MODE_SYNC)
    rig.folder = tmp_path
    rig.open_flags = os.O_RDONLY  # every pwrite fails with EBADF
    producer = rig.open_session()
    rig.start_writer()
    sequence = submit(producer, PUT, b"T", b"", b"x")
    assert rig.writer.run(monotonic_ns() + 1_000_000_000) == RUN_FAILED
    assert "offset 0" in control_native.reason(rig.control)
    rig.start_writer()
    rig.drain()
    assert answer_of(producer, sequence)[STATUS] == PutStatus.SERVICE_NOT_AVAILABLE
    assert rig.wrote() == 0


def test_garbage_in_a_ring_closes_that_session_only(rig):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    rig = rig(segment_bytes=65536, segments=400)
    good = rig.open_session(0)
    rig.start_writer()
    sent = 0
    for generation in range(1, 200):
        hostile = rig.open_session(1, generation)
        view = hostile.pointer
        if chance.random() < 0.5:
            submit(hostile, PUT, b"H", b"", b"x" * chance.randrange(200))
            # Scribble over the published entry.
            at = chance.randrange(0, 128)
            view.ring[at] = chance.randrange(256)
        else:
            for n in range(256):
                view.ring[n] = chance.randrange(256)
            view.session.tail = chance.choice([8, 64, 128, 256, 1 << 40, (1 << 64) - 8])
        submit(good, PUT, b"G", b"", b"good")
        sent += 1
        rig.drain()
        rig.writer.detach_session(1)
        rig.sessions.pop(1)
    assert answer_of(good, sent)[STATUS] == PutStatus.PUT_OK
    at, seen = 0, 0
    while at < rig.wrote():
        size, magic = struct.unpack_from(">iI", rig.log, at)
        if magic != BLANK_MAGIC:
            message = decode_record(rig.log, at)
            assert message.physical_offset == at
            seen += message.topic == "G"
        at += size
    assert seen == sent


def test_encoding_equals_the_formats(rig):
    rig = rig()
    producer = rig.open_session()
    rig.start_writer()
    submit(producer, PUT, "主题".encode(), "KEYS\x01ключ".encode(), b"body", queue_id=2, flag=-3, clock_ms=1_700_000_000_123)
    rig.drain()
    want = encode_record(
        topic="主题", body=b"body", properties="KEYS\x01ключ", queue_id=2, flag=-3, queue_offset=0, physical_offset=0,
        sys_flag=0, born_timestamp_ms=1_600_000_000_000, born_host="127.0.0.1:10911", store_timestamp_ms=1_700_000_000_123,
        store_host="127.0.0.1:10911", reconsume_times=0, prepared_transaction_offset=0)
    assert rig.log[:rig.wrote()] == want
    assert len(HOST) == 8 and ffi.sizeof("struct ms_entry") == 128
    assert lib.MS_COMPLETIONS == 4096


def test_a_record_longer_than_what_is_gathered_by_default_is_synced_whole(rig, tmp_path):
    rig = rig(mode=control_native.MODE_SYNC, segment_bytes=2 * STAGE_BYTES, segments=1, max_message_bytes=2 * STAGE_BYTES)
    rig.folder = tmp_path
    producer = rig.open_session()
    writer = rig.start_writer()
    body = random.Random(1).randbytes(STAGE_BYTES + 1_000_000)
    large = header(PUT, payload_bytes=len(body), topic=b"T", properties=b"")
    large.sequence = 2
    image = entry_bytes(large, b"T", b"", body)
    submit(producer, PUT, b"T", b"", b"small")
    side = header(SIDE, payload_bytes=len(image), topic=b"", properties=b"")
    assert producer.submit_side(side, monotonic_ns() + 5_000_000_000) == 0
    sides = 0
    while (why := writer.run(monotonic_ns() + 1_000_000)) != RUN_TIME:
        assert why == RUN_SIDE
        sides += 1
        writer.load_side(image)
    answer = answer_of(producer, 2)
    assert (answer[STATUS], sides) == (PutStatus.PUT_OK, 1)
    log = (tmp_path / f"{0:020d}").read_bytes()
    assert decode_record(log, 0).body == b"small"
    assert decode_record(log, answer[PHYSICAL]).body == body


@pytest.mark.parametrize("gather_bytes_min", [1, 600, 2000])
def test_gathered_passes_write_the_same_log_as_stored_passes(rig, tmp_path, gather_bytes_min):
    """Gathered and stored passes in turns, across segments and blanks, and in the page where the last pass ended."""
    logs, written = [], []
    for name, least in (("stored", 0), ("gathered", gather_bytes_min)):
        chance = random.Random(7)
        each = rig(segment_bytes=10_000, segments=24)
        each.folder, each.gather_bytes_min = tmp_path / name, least
        each.folder.mkdir()
        producer = each.open_session()
        writer = each.start_writer()
        for n in range(60):
            for _ in range(chance.randrange(1, 4)):
                bodies = [chance.randbytes(chance.randrange(700)) for _ in range(chance.randrange(1, 6))]
                submit(producer, MANY, b"T", b"", pack_many(bodies), count=len(bodies), clock_ms=1_700_000_000_000 + n)
            each.drain()
            written.append(writer.pointer.is_gathering)
        each.load_files()
        logs.append(bytes(each.log))
        assert not any(each.log[each.wrote():])
    assert logs[0] == logs[1]
    assert not any(written[:60]) and any(written[60:]) and all(written[60:]) == (gather_bytes_min == 1)


def test_a_large_body_of_a_side_object_is_gathered(rig, tmp_path):
    rig = rig(segment_bytes=1 << 20, segments=8)
    rig.folder, rig.gather_bytes_min = tmp_path, 10_000
    producer = rig.open_session()
    writer = rig.start_writer()
    body = random.Random(1).randbytes(200_000)
    large = header(PUT, payload_bytes=len(body), topic=b"T", properties=b"")
    large.sequence = 1
    image = entry_bytes(large, b"T", b"", body)
    assert producer.submit_side(header(SIDE, payload_bytes=len(image), topic=b"", properties=b""), monotonic_ns() + 5_000_000_000) == 0
    assert writer.run(monotonic_ns() + 1_000_000) == RUN_SIDE and not writer.pointer.is_gathering
    writer.load_side(image)
    assert writer.run(monotonic_ns() + 1_000_000) == RUN_TIME and writer.pointer.is_gathering
    rig.load_files()
    assert decode_record(rig.log, answer_of(producer, 1)[PHYSICAL]).body == body


def test_the_slot_of_an_answer_is_kept_until_it_is_taken(rig, monkeypatch):
    monkeypatch.setattr("fix_writer_rig.RING_BYTES", 1 << 20)
    rig = rig(segment_bytes=1 << 20)
    producer = rig.open_session()
    rig.start_writer()
    submit(producer, PUT, b"T", b"", b"first")
    producer.pointer.unclaimed = 0  # as a future does that will take it
    for n in range(2, COMPLETIONS + 1):
        submit(producer, PUT, b"T", b"", b"x")
        if n % 1000 == 0:
            rig.drain()
    rig.drain()
    assert producer.wait_for_room_beside(0) == AGAIN, "a further answer would take the place of the first"
    assert producer.take_answer(1, 0)[1][STATUS] == PutStatus.PUT_OK
    assert producer.wait_for_room_beside(0) == 0
