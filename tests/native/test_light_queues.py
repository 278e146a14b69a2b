"""Places in further queues (INNER_MULTI_DISPATCH): given out inside the pass, written into the record, put back after a kill."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fix_writer_rig import WriterRig, answer_of, submit
from pyengine._native import lib
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.record import BatchMember, decode_record, encode_batch
from pyengine.native.session import BATCH, MANY, PUT, pack_many
from pyengine.native.writer import get_queue_offset
from pyengine.results import PutStatus

NAMES = "INNER_MULTI_DISPATCH"
OFFSETS = "INNER_MULTI_QUEUE_OFFSET"


@pytest.fixture
def rig():
    made = WriterRig()
    producer = made.open_session()
    start(made)
    yield made, producer
    made.close()


def start(rig, lmq=True, lmq_max=1000):
    rig.start_writer().enable_multi_dispatch(lmq=lmq, lmq_max=lmq_max)


def put(rig, producer, text: str, topic=b"T", body=b"hello", **fields):
    """(status, offset in the log) of one put with this property text."""
    sequence = submit(producer, PUT, topic, text.encode(), body, **fields)
    rig.drain()
    _, physical_offset, _, _, _, status, *_ = answer_of(producer, sequence)
    return PutStatus(status), physical_offset


def stored(rig, at):
    return decode_record(rig.log, at)


def offset(rig, topic, queue_id=0):
    return get_queue_offset(rig.table, topic, queue_id)


def test_each_named_queue_grows_by_one_and_the_record_has_its_offset(rig):
    rig, producer = rig
    for number in range(12):
        status, at = put(rig, producer, f"TAGS\x01a\x02{NAMES}\x01%LMQ%u{number % 2},other", queue_id=3)
        assert status is PutStatus.PUT_OK
        message = stored(rig, at)
        places = f"{NAMES}\x01%LMQ%u{number % 2},other\x02{OFFSETS}\x01{number // 2},{number}"
        assert message.raw_properties == f"TAGS\x01a\x02{places}"
        assert (message.queue_id, message.queue_offset) == (3, number)
    assert (offset(rig, "%LMQ%u0"), offset(rig, "%LMQ%u1"), offset(rig, "other", 3), offset(rig, "T", 3)) == (6, 6, 12, 12)
    assert offset(rig, "%LMQ%u0", 3) is None


def test_offsets_from_an_earlier_life_and_wait_are_left_out(rig):
    rig, producer = rig
    _, at = put(rig, producer, f"WAIT\x01false\x02{OFFSETS}\x0177\x02{NAMES}\x01%LMQ%a\x02x\x01y\x02")
    assert stored(rig, at).raw_properties == f"{NAMES}\x01%LMQ%a\x02x\x01y\x02{OFFSETS}\x010"


PLACED = f"TAGS\x01a\x02{NAMES}\x01other\x02{OFFSETS}\x010"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("kind", "text", "payload"), [
    pytest.param(MANY, PLACED, pack_many([b"a", b"b"]), id="many"),
    pytest.param(BATCH, PLACED, encode_batch([BatchMember(b"a", 0, "")]), id="shared"),
    pytest.param(BATCH, "TAGS\x01a", encode_batch([BatchMember(b"a", 0, PLACED)]), id="member"),
])
def test_several_messages_with_places_of_their_own_making_are_refused(kind, text, payload, enabled):
    rig = WriterRig()
    try:
        producer = rig.open_session()
        if enabled:
            start(rig)
        else:
            rig.start_writer()
        sequence = submit(producer, kind, b"T", text.encode(), payload, count=1 if kind == BATCH else 2)
        rig.drain()
        assert answer_of(producer, sequence)[5:7] == (PutStatus.MESSAGE_ILLEGAL, lib.MS_REFUSED_LIGHT_QUEUE_PLACE)
        assert rig.wrote() == 0
    finally:
        rig.close()


@pytest.mark.parametrize("topic", [b"SCHEDULE_TOPIC_XXXX", b"RMQ_SYS_TRANS_HALF_TOPIC"])
def test_a_message_that_waits_for_its_time_or_its_transaction_takes_no_place(rig, topic):
    rig, producer = rig
    assert put(rig, producer, f"{NAMES}\x01other", topic=topic) == (PutStatus.MESSAGE_ILLEGAL, -1)
    assert offset(rig, "other") is None and rig.wrote() == 0


def test_without_multi_dispatch_places_are_left_out_and_all_else_stays():
    rig = WriterRig()
    try:
        producer = rig.open_session()
        rig.start_writer()
        _, at = put(rig, producer, f"WAIT\x01false\x02{PLACED}\x02x\x01{OFFSETS}")
        assert stored(rig, at).raw_properties == f"WAIT\x01false\x02TAGS\x01a\x02{NAMES}\x01other\x02x\x01{OFFSETS}"
        _, at = put(rig, producer, f"{OFFSETS}\x010")
        assert stored(rig, at).raw_properties == ""
    finally:
        rig.close()


@pytest.mark.parametrize("sys_flag", [4, 12])
def test_a_prepared_or_rolled_back_message_takes_no_place(rig, sys_flag):
    rig, producer = rig
    put(rig, producer, f"{NAMES}\x01%LMQ%a")
    _, at = put(rig, producer, f"{NAMES}\x01%LMQ%a", sys_flag=sys_flag)
    assert stored(rig, at).properties[OFFSETS] == "1" and offset(rig, "%LMQ%a") == 1


def test_a_plain_message_is_left_as_it_is(rig):
    rig, producer = rig
    _, at = put(rig, producer, "WAIT\x01true\x02TAGS\x01a")
    assert stored(rig, at).raw_properties == "WAIT\x01true\x02TAGS\x01a"


@pytest.mark.parametrize("names", ["a/b", "a,,b", ",", "a,a", "T", "..", "%LMQ%x/y", ",".join(f"q{n}" for n in range(65)),
                                   "n" * 128])
def test_a_name_that_no_queue_can_have_refuses_the_put(rig, names):
    rig, producer = rig
    status, at = put(rig, producer, f"{NAMES}\x01{names}")
    assert (status, at) == (PutStatus.MESSAGE_ILLEGAL, -1)
    status, _ = put(rig, producer, f"{NAMES}\x01{','.join(f'q{n}' for n in range(64))}")
    assert status is PutStatus.PUT_OK


@pytest.mark.parametrize("text", [f"{NAMES}\x01%LMQ%new,other,a/b", f"{NAMES}\x01%LMQ%new,other,T",
                                  f"{NAMES}\x01%LMQ%new,other,other", f"{NAMES}\x01%LMQ%new,other,%LMQ%n2,%LMQ%n3",
                                  f"{NAMES}\x01%LMQ%new,other\x02x\x01{'v' * 32710}"])
def test_a_put_that_is_refused_makes_no_queues(rig, text):
    rig, producer = rig
    start(rig, lmq_max=2)
    status, at = put(rig, producer, text)
    assert status is not PutStatus.PUT_OK and at == -1
    assert offset(rig, "%LMQ%new") is None and offset(rig, "other") is None and offset(rig, "T") is None
    assert put(rig, producer, f"{NAMES}\x01%LMQ%a,%LMQ%b")[0] is PutStatus.PUT_OK, "none counted"
    assert put(rig, producer, f"{NAMES}\x01%LMQ%c")[0] is PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED


def test_light_queues_want_their_setting_and_are_counted():
    rig = WriterRig()
    try:
        producer = rig.open_session()
        start(rig, lmq=False)
        assert put(rig, producer, f"{NAMES}\x01%LMQ%a")[0] is PutStatus.MESSAGE_ILLEGAL
        assert put(rig, producer, f"{NAMES}\x01a")[0] is PutStatus.PUT_OK
        start(rig, lmq_max=2)
        for name, status in (("a", PutStatus.PUT_OK), ("b", PutStatus.PUT_OK), ("c", PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED),
                             ("a", PutStatus.PUT_OK)):
            assert put(rig, producer, f"{NAMES}\x01%LMQ%{name}")[0] is status
    finally:
        rig.close()


def test_a_text_that_becomes_too_long_is_refused_and_the_queue_does_not_move():
    rig = WriterRig(segment_bytes=1 << 17)
    try:
        producer = rig.open_session()
        start(rig)
        text = f"{NAMES}\x01%LMQ%a\x02x\x01"
        room = 32767 - len(f"\x02{OFFSETS}\x010")
        for missing, status in ((0, PutStatus.PUT_OK), (-1, PutStatus.PROPERTIES_SIZE_EXCEEDED)):
            assert put(rig, producer, text + "v" * (room - missing - len(text)))[0] is status
        assert offset(rig, "%LMQ%a") == 1
    finally:
        rig.close()


def test_the_longer_record_is_what_must_fit_into_the_segment(rig):
    rig, producer = rig
    text = f"{NAMES}\x01%LMQ%a"
    grown = len(text) + len(f"\x02{OFFSETS}\x010")
    room = 4096 - 8 - 91 - 1 - grown
    assert put(rig, producer, text, body=b"x" * (room + 1))[0] is PutStatus.MESSAGE_ILLEGAL
    status, at = put(rig, producer, text, body=b"x" * room)
    assert status is PutStatus.PUT_OK and stored(rig, at).size_bytes == 4096 - 8


def test_a_batch_is_stored_as_it_is(rig):
    from pyengine.formats.record import BatchMember, encode_batch

    rig, producer = rig
    sequence = submit(producer, BATCH, b"T", f"{NAMES}\x01%LMQ%a".encode(), encode_batch([BatchMember(b"1"), BatchMember(b"2")]),
                      count=2)
    rig.drain()
    at = answer_of(producer, sequence)[1]
    assert OFFSETS not in stored(rig, at).raw_properties and offset(rig, "%LMQ%a") is None


def writer_process(rig) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        start(rig)
        while True:
            rig.drain(deadline_s=1.0)
    finally:
        os._exit(3)


def test_no_kill_of_the_writer_loses_or_doubles_a_place(rng):
    rig = WriterRig(segment_bytes=1 << 20, segments=100)
    pid, sent = 0, 0
    try:
        producer = rig.open_session()
        for _ in range(60):
            pid = writer_process(rig)
            until = time.monotonic() + rng.uniform(0.0005, 0.004)  # the moment of the kill
            while time.monotonic() < until:
                names = ",".join(rng.sample([f"%LMQ%{n}" for n in range(6)] + ["other"], rng.randrange(1, 5)))
                submit(producer, PUT, b"T", f"{NAMES}\x01{names}".encode(), b"b" * rng.randrange(100))
                sent += 1
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = 0
        start(rig)
        rig.drain()
        expected: dict[str, int] = {}
        at, records = 0, 0
        while at < rig.wrote():
            size, magic = int.from_bytes(rig.log[at : at + 4], "big"), int.from_bytes(rig.log[at + 4 : at + 8], "big")
            if magic != BLANK_MAGIC:
                message = decode_record(rig.log, at)
                places = [int(place) for place in message.properties[OFFSETS].split(",")]
                for name, place in zip(message.properties[NAMES].split(","), places, strict=True):
                    assert place == expected.get(name, 0)
                    expected[name] = place + 1
                records += 1
            at += size
        assert records == sent > 100
        assert {name: offset(rig, name) for name in expected} == expected
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        rig.close()
