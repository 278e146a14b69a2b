"""Puts through real workers: their results, their records in the log, and what a dead worker changes."""

from __future__ import annotations

import _thread
import array
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from types import SimpleNamespace

import pytest

import pyengine
from few_files import call_with_few_files
from fix_client import submitter
from fix_failpoints import Interrupted
from fix_golden import usual
from fix_parts import MODES
from pyengine.client import pending_puts
from pyengine.client import producer as producer_module
from pyengine.client.half_messages import HalfMessages, PreparedCheck
from pyengine.client.outgoing import BatchMessage, FirstPuts, RawMessage
from pyengine.client.pending_puts import PutContext, PutFuture, QueuedPuts
from pyengine.client.producer import Producer, SharedProducer
from pyengine.engine.kinds import child_environment
from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineUnavailableError, FormatError, UsageError
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.record import BatchMember, Message, decode_record
from pyengine.ipc.control_block import EngineMemory, now_ms
from pyengine.ipc.session_client import open_session
from pyengine.ipc.shared_objects import SharedObject, side_name
from pyengine.native import control as native
from pyengine.native.session import COMPLETIONS, PUT, ProducerSession, SendRounds
from pyengine.results import PutError, PutIndeterminateError, PutRefusedError, PutResult, PutStatus
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import DelayCancels
from pyengine.storage.engine_id import raise_epoch, read_epoch
from waiting import eventually, scaled_timeout_s

HOUR_MS = 3_600_000  # a put that only such a timeout ends runs into the timeout of its test
ROOMY = {"session_ring_bytes_default": 1 << 20}  # puts that were made before take the fast path


@pytest.fixture(params=usual(MODES, [mode for mode in MODES if mode != "pool"]))  # pool differs behind the ring alone
def parts(request, make_parts):
    return make_parts(**MODES[request.param])


def messages(parts) -> list[Message]:
    """Every record of the log's files up to `committed`."""
    log, found, at = parts.log(), [], 0
    while at < native.load_position(parts.control.committed):
        if int.from_bytes(log[at + 4:at + 8], "big") == BLANK_MAGIC:
            at += int.from_bytes(log[at:at + 4], "big")
            continue
        found.append(decode_record(log, at))
        assert found[-1].physical_offset == at
        at += found[-1].size_bytes
    return found


def all_committed(parts):
    from waiting import eventually

    eventually(lambda: native.load_position(parts.control.committed) == native.load_position(parts.control.wrote), "committed")


def test_put_returns_the_offsets_and_id_of_the_message(parts):
    with parts.producer() as producer:
        first = producer.put("T", b"hello", queue_id=2, tags="a", keys=["k1", "k2"], properties={"p": "v"}, flag=5)
        second = producer.put("T", b"", queue_id=2)
    assert (first.status, first.queue_offset, first.physical_offset, first.topic) == (PutStatus.PUT_OK, 0, 0, "T")
    assert (second.status, second.queue_offset, second.physical_offset) == (PutStatus.PUT_OK, 1, first.size_bytes)
    all_committed(parts)
    stored = messages(parts)
    assert [m.msg_id for m in stored] == [first.msg_id, second.msg_id]
    assert stored[0].raw_properties == "p\x01v\x02KEYS\x01k1 k2\x02TAGS\x01a"
    assert (stored[0].body, stored[0].flag, stored[1].body) == (b"hello", 5, b"")


def test_put_many_and_large_bodies_go_beside_the_ring(parts):
    with parts.producer() as producer:
        bodies = [bytes([n % 251]) * (n % 1500) for n in range(150)]
        result = producer.put_many("T", bodies, tags="m")
        large = producer.put("T", bytes(60_000))
    assert (result.status, result.count, result.first_queue_offset) == (PutStatus.PUT_OK, 150, 0)
    assert large.ok and large.queue_offset == 150
    all_committed(parts)
    assert [m.body for m in messages(parts)] == [*bodies, bytes(60_000)]
    assert not [name for name in parts.owner.folder.names() if name.startswith("side")]


@pytest.mark.root
def test_a_large_body_that_root_puts_is_for_the_engines_user_to_read(parts):
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        os.chown(parts.owner.folder.path, 65534, 65534)
        writer = parts.workers[native.WRITER]
        writer.send_signal(signal.SIGSTOP)
        try:
            later = producer.put_async("T", bytes(60_000))
            [side] = [name for name in parts.owner.folder.names() if name.startswith("side")]
            assert (parts.owner.folder.path / side).stat().st_uid == 65534
        finally:
            writer.send_signal(signal.SIGCONT)
        assert later.result(30).ok


def test_a_folder_in_the_place_of_a_side_object_stops_no_put(parts):
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        session = submitter(producer).session
        in_the_way = parts.owner.folder.path / side_name(session.identity.epoch, session.slot, session.generation, 2)
        (in_the_way / "full").mkdir(parents=True)
        assert producer.put("T", bytes(60_000)).ok
    all_committed(parts)
    assert [m.body for m in messages(parts)] == [b"first", bytes(60_000)]


def test_put_batch_keeps_each_members_properties(parts):
    with parts.producer() as producer:
        result = producer.put_batch("T", [BatchMessage(b"a", tags="x", keys="k"), b"b"], properties={"B": "b"})
    assert (result.status, result.count) == (PutStatus.PUT_OK, 2)
    all_committed(parts)
    stored = messages(parts)
    assert result.msg_id == ",".join(m.msg_id for m in stored)
    assert [m.raw_properties for m in stored] == ["KEYS\x01k\x02TAGS\x01x\x02B\x01b", "B\x01b"]


def test_a_queue_id_is_no_float_on_the_fast_path_either(make_parts):
    with make_parts(**ROOMY).producer() as producer:
        assert [producer.put("T", b"a", queue_id=number).queue_offset for number in (1, 1, True)] == [0, 1, 2]
        for put in (producer.put, producer.put_async, lambda topic, body, queue_id: producer.put_many(topic, [body], queue_id=queue_id)):
            with pytest.raises(TypeError, match="queue_id must be int, not float"):
                put("T", b"b", queue_id=1.0)
        with pytest.raises(TypeError):
            producer.put("T", b"b", queue_id=1, flag=0.0)
        assert producer.put("T", b"c", queue_id=1).queue_offset == 3


def test_puts_go_the_short_way_however_many_tags_came_before(shared_parts, monkeypatch):
    monkeypatch.setattr(producer_module, "REMEMBERED_MAX", 4)
    with shared_parts.producer() as producer:
        for number in range(10):
            assert producer.put("T", b"x", tags=f"only-once-{number}").ok
        assert producer.put("T", b"x", tags="hot").ok
        monkeypatch.setattr(Producer, "_put_any", None)
        assert producer.put("T", b"x", tags="hot").ok
        assert len(producer._prefixes) <= 4


@pytest.mark.parametrize(("arguments", "status", "says"), [
    ({"topic": ""}, "MESSAGE_ILLEGAL", "empty"),
    ({"topic": "t" * 128}, "MESSAGE_ILLEGAL", "128 bytes"),
    ({"topic": "宽" * 43}, "MESSAGE_ILLEGAL", "129 bytes"),
    ({"topic": "a/b"}, "MESSAGE_ILLEGAL", "folder"),
    ({"topic": ".."}, "MESSAGE_ILLEGAL", "folder"),
    ({"topic": "a\x01"}, "MESSAGE_ILLEGAL", "character 0, 1 or 2"),
    ({"properties": {"TAGS": "x"}}, "MESSAGE_ILLEGAL", "reserved"),
    ({"properties": {"a\x02": "x"}}, "MESSAGE_ILLEGAL", "name"),
    ({"properties": {"a": "x\x00"}}, "MESSAGE_ILLEGAL", "property a"),
    ({"properties": {"a": ""}}, "MESSAGE_ILLEGAL", "empty"),
    ({"tags": "x\x02"}, "MESSAGE_ILLEGAL", "tags"),
    ({"keys": ["x\x01"]}, "MESSAGE_ILLEGAL", "key"),
    ({"properties": {"a": "p" * 32766}}, "MESSAGE_ILLEGAL", "characters"),
    ({"properties": {"a": "中" * 12000}}, "PROPERTIES_SIZE_EXCEEDED", "bytes"),
    ({"body": bytes(65536)}, "MESSAGE_ILLEGAL", "no segment"),
    ({"body": bytes((4 << 20) + 1)}, "MESSAGE_ILLEGAL", "max_message_size_bytes"),
    ({"queue_id": -1}, "MESSAGE_ILLEGAL", "queue id"),
    ({"queue_id": 10 ** 30}, "MESSAGE_ILLEGAL", "queue id"),
    ({"delay_level": -1}, "MESSAGE_ILLEGAL", "negative"),
])
def test_bad_input_is_refused_with_a_status_and_a_sentence(shared_parts, arguments, status, says):
    with shared_parts.producer() as producer:
        before = producer.put("T", b"fine")
        result = producer.put(**{"topic": "T", "body": b"x", **arguments})
        assert (result.status.name, result.indeterminate) == (status, False)
        assert says in result.reason, result.reason
        assert producer.put_async(**{"topic": "T", "body": b"x", **arguments}).result(10).status.name == status
        assert producer.put("T", b"fine").physical_offset == before.physical_offset + before.size_bytes, "nothing was stored"


def test_text_bodies_are_a_type_error(make_parts):
    with make_parts().producer() as producer:
        with pytest.raises(TypeError, match="encode"):
            producer.put("T", "text")


def test_delayed_messages_wait_in_the_schedule_topic(make_parts):
    parts = make_parts()
    with parts.producer(message_delay_level="1s 2s 3s 4s 5s") as producer:
        result = producer.put("T", b"later", queue_id=3, tags="t", delay_level=9)
    (stored,) = messages(parts)
    assert (stored.topic, stored.queue_id, result.topic) == ("SCHEDULE_TOPIC_XXXX", 4, "SCHEDULE_TOPIC_XXXX")
    assert stored.properties == {"TAGS": "t", "DELAY": "5", "REAL_TOPIC": "T", "REAL_QID": "3"}


def test_a_put_with_a_time_of_its_own_waits_in_the_level_that_ends_then(make_parts):
    parts = make_parts()
    at = datetime.now(UTC) + timedelta(minutes=1)
    with parts.producer() as producer:
        assert producer.put("T", b"later", queue_id=3, tags="t", deliver_at=at).topic == "SCHEDULE_TOPIC_XXXX"
        assert producer.put_async("T", b"now", queue_id=3, deliver_at=0).result().topic == "T"
    waiting, at_once = messages(parts)
    assert (waiting.topic, waiting.queue_id, at_once.topic, at_once.properties) == ("SCHEDULE_TOPIC_XXXX", 4, "T", {})
    assert waiting.properties == {
        "TAGS": "t", "DELAY": "5", "REAL_TOPIC": "RMQ_SYS_PYENGINE_TIMER", "REAL_QID": "0", "__PYENGINE_TOPIC": "T",
        "__PYENGINE_QID": "3", "__PYENGINE_DELIVER_AT": str(round(at.timestamp() * 1000)),
        "__PYENGINE_FIRST": "0000000000000000000-0000000000000"}


def test_messages_of_one_put_wait_together_in_one_queue(make_parts):
    """Of put_many and put_batch, after a level, at a time or after a while; a past time is no delay."""
    parts = make_parts()
    with parts.producer() as producer:
        many = producer.put_many("T", [b"a", b"b"], queue_id=3, tags="t", delay_level=5)
        later = producer.put_many_async("T", [b"c"], queue_id=3, deliver_at=timedelta(minutes=1)).result(10)
        batch = producer.put_batch("T", [BatchMessage(b"d", tags="x"), b"e"], queue_id=3, properties={"B": "b"}, delay_level=5)
        at_once = producer.put_many("T", [b"f"], queue_id=3, deliver_at=timedelta(-1))
    assert {(each.topic, each.queue_id) for each in (many, later, batch)} == {("SCHEDULE_TOPIC_XXXX", 4)}
    assert [many.first_queue_offset, later.first_queue_offset, batch.queue_offset, at_once.topic] == [0, 2, 3, "T"]
    stored = messages(parts)
    level = {"DELAY": "5", "REAL_TOPIC": "T", "REAL_QID": "3"}
    assert [(one.body, one.topic, one.queue_id, one.queue_offset) for one in stored] == [
        *[(body, "SCHEDULE_TOPIC_XXXX", 4, offset) for offset, body in enumerate([b"a", b"b", b"c", b"d", b"e"])], (b"f", "T", 3, 0)]
    assert [stored[number].properties for number in (0, 3, 4, 5)] == [
        {"TAGS": "t", **level}, {"TAGS": "x", "B": "b", **level}, {"B": "b", **level}, {}]
    assert 59_000 < int(stored[2].properties["__PYENGINE_DELIVER_AT"]) - stored[2].born_timestamp_ms <= 60_001


def test_messages_of_a_batch_with_times_wait_for_the_earliest(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        result = producer.put_batch("T", [BatchMessage(b"a", deliver_at=timedelta(hours=1)), BatchMessage(b"b", deliver_at=0), b"c"],
                                    queue_id=3, deliver_at=timedelta(seconds=30))
        assert producer.put_batch("T", [BatchMessage(b"d", deliver_at=0)], deliver_at=timedelta(1)).topic == "T"
    assert (result.count, result.topic, result.queue_id) == (3, "SCHEDULE_TOPIC_XXXX", 0)
    waiting = messages(parts)[:3]
    assert all(one.properties["__PYENGINE_TOPIC"] == "T" and one.properties["__PYENGINE_QID"] == "3" for one in waiting)
    assert [round((int(one.properties["__PYENGINE_DELIVER_AT"]) - one.born_timestamp_ms) / 1000) for one in waiting[::2]] == [3600, 30]


@pytest.mark.parametrize("members", [
    [BatchMessage(b"", delay_level=1), BatchMessage(b"", delay_level=2)],
    [BatchMessage(b"", delay_level=1), b""],
    [BatchMessage(b"", deliver_at=timedelta(1)), b""],
    [BatchMessage(b"", deliver_at=timedelta(1)), BatchMessage(b"", delay_level=1)],
])
def test_messages_of_a_batch_that_would_wait_in_several_queues_are_refused(shared_parts, members):
    with shared_parts.producer() as producer:
        result = producer.put_batch("T", members)
    assert (result.status, result.count) == (PutStatus.MESSAGE_ILLEGAL, 0) and "each delay level is a queue of its own" in result.reason


def test_a_raw_put_waits_for_its_time(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        result = producer.put_raw(RawMessage("T", b"x", queue_id=3, deliver_at_ms=now_ms() + 30_000, delay_level=7))
        refused = producer.put_batch_raw(RawMessage("T", deliver_at_ms=now_ms() + 30_000), [BatchMember(b"m")])
    assert (result.topic, result.queue_id) == ("SCHEDULE_TOPIC_XXXX", 3) and refused.status is PutStatus.MESSAGE_ILLEGAL
    assert messages(parts)[0].properties["__PYENGINE_QID"] == "3"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"deliver_at": datetime(2030, 1, 1)}, "has no time zone: give one"),
        ({"deliver_at": timedelta(days=40, seconds=1)}, "more than 40 days ahead"),
        ({"deliver_at": datetime(2999, 1, 1, tzinfo=UTC)}, "more than 40 days ahead"),
        ({"deliver_at": 0, "delay_level": 1}, "exclude each other"),
    ],
    ids=["naive", "late", "far", "both"],
)
def test_a_time_that_cannot_be_is_refused(make_parts, options, problem):
    parts = make_parts()
    with parts.producer() as producer:
        for put in (producer.put, producer.put_async):
            with pytest.raises(UsageError, match=problem):
                put("T", b"x", **options)
        for put in (producer.put_many, producer.put_many_async, producer.put_batch):
            with pytest.raises(UsageError, match=problem):
                put("T", [b"x"], **options)
        with pytest.raises(UsageError, match=problem):
            producer.put_batch("T", [BatchMessage(b"x", **options)])
        with pytest.raises(TypeError, match="deliver_at"):
            producer.put("T", b"x", deliver_at="tomorrow")
    assert messages(parts) == []


def test_raw_puts_store_every_field_as_given(make_parts):
    parts = make_parts(replay_clock=1)
    with parts.producer() as producer:
        result = producer.put_raw(RawMessage(
            "T", b"b", queue_id=1, properties_text="TAGS\x01", flag=7, sys_flag=0x4, born_timestamp_ms=1_600_000_000_000,
            born_host="[2001:db8::1]:99", store_host="10.0.0.1:10911", reconsume_times=3, prepared_transaction_offset=77,
            clock_ms=1_700_000_000_000))
        batch = producer.put_batch_raw(RawMessage("T", clock_ms=1_700_000_000_001), [BatchMember(b"m", 1, "K\x01v")])
        refused = producer.put_batch_raw(RawMessage("T", sys_flag=4), [BatchMember(b"m")])
    stored = messages(parts)
    assert (stored[0].born_host, stored[0].store_host, stored[0].sys_flag) == ("[2001:db8::1]:99", "10.0.0.1:10911", 0x14)
    one = stored[0]
    assert (one.store_timestamp_ms, one.reconsume_times, one.raw_properties) == (1_700_000_000_000, 3, "TAGS\x01")
    assert stored[0].msg_id == result.msg_id and batch.ok and stored[1].store_timestamp_ms == 1_700_000_000_001
    assert refused.status is PutStatus.MESSAGE_ILLEGAL


def test_a_dead_writer_is_waited_for_and_loses_nothing(parts):
    with parts.producer() as producer:
        before = producer.put("T", b"before")
        parts.kill(native.WRITER)
        futures = [producer.put_async("T", b"%d" % n) for n in range(30)]
        parts.start(native.WRITER)
        assert [future.result(10).queue_offset for future in futures] == list(range(1, 31))
    all_committed(parts)
    assert [m.body for m in messages(parts)] == [b"before", *(b"%d" % n for n in range(30))]
    assert before.ok


@pytest.mark.parametrize("ring", [{}, ROOMY], ids=["small ring", "roomy ring"])
def test_an_engine_that_was_killed_in_a_pass_and_replaced_is_not_busy(make_parts, ring):
    busy = {"os_page_cache_busy_timeout_ms": 1000}
    parts = [make_parts(**ring, **busy)]
    with Producer(lambda limit_s: open_session(parts[-1].owner.root), EngineConfig()) as producer:
        assert producer.put("T", b"0").ok
        parts[0].kill(native.WRITER)
        native.store(parts[0].control.writer, "pass_started_ms", now_ms() - 2000)
        native.store(parts[0].control.state, "retired", 1)
        parts.append(make_parts(**ring, **busy))
        assert producer.put("T", b"1").ok
        assert [message.body for message in messages(parts[1])] == [b"1"]


def test_a_put_that_comes_while_a_new_session_is_being_opened_has_its_hosts(make_parts, monkeypatch):
    parts = make_parts(**ROOMY)
    producer = parts.producer(store_host="10.1.2.3:10911")
    fill = ProducerSession.set_constants

    def late(session, *constants):
        # Another thread's put: refused, for a session is being opened, but what it prepares is kept.
        assert producer.put("T", b"x", tags="new", timeout_s=0).status is PutStatus.SERVICE_NOT_AVAILABLE
        fill(session, *constants)

    with producer:
        assert producer.put("T", b"0").ok
        monkeypatch.setattr(ProducerSession, "set_constants", late)
        with submitter(producer).lock:
            submitter(producer)._detach()
        assert producer.put("T", b"1", tags="new").ok
        all_committed(parts)
        assert [(m.born_host, m.store_host) for m in messages(parts)] == [("127.0.0.1:0", "10.1.2.3:10911")] * 2


def test_a_clock_that_was_set_is_no_long_pass(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        parts.kill(native.WRITER)
        native.store(parts.control.writer, "pass_started_ms", now_ms() - 20_000_000)
        assert producer.put("T", b"x", timeout_s=0.05).indeterminate, "submitted"


@pytest.mark.timeout(20)
def test_closing_over_a_dead_writer_waits_once_for_all_puts(make_parts):
    parts = make_parts(session_ring_bytes_default=1 << 20)
    producer = parts.producer()
    parts.kill(native.WRITER)
    futures = [producer.put_async("T", b"%d" % n) for n in range(2000)]
    producer.close()
    assert all(future.done() and future.result().indeterminate for future in futures)


class Longer(bytes):
    """Says that it has more bytes than it has."""

    def __len__(self) -> int:
        return 1000


def test_a_body_of_a_subclass_is_stored_with_the_bytes_that_it_has(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put("T", Longer(b"x")).ok and producer.put_raw(RawMessage("T", Longer(b"y"))).ok
    assert [m.body for m in messages(parts)] == [b"x", b"y"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_exits_ends_nothing_but_itself(make_parts, capfd):
    parts = make_parts()
    producer = parts.producer()
    writer = parts.workers[native.WRITER]
    writer.send_signal(signal.SIGSTOP)
    try:
        producer.put_async("T", b"0").add_done_callback(lambda future: sys.exit(3))
    finally:
        writer.send_signal(signal.SIGCONT)
    assert producer.put_async("T", b"1").result(8).queue_offset == 1
    _close_in_time(producer)
    assert capfd.readouterr().err == ""


def test_a_producer_leaves_an_engine_that_could_not_say_that_it_is_over(make_parts):
    parts = make_parts(put_timeout_ms=HOUR_MS)
    producer = parts.producer()
    assert producer.put("T", b"x").ok
    writer = parts.workers[native.WRITER]
    writer.send_signal(signal.SIGSTOP)
    try:
        while read_epoch(parts.owner.root) <= parts.owner.memory.identity.epoch:
            raise_epoch(parts.owner.root)  # as a start that does not find the memory of the engine before
        result = producer.put("T", b"x")
        assert result.indeterminate and "session closed" in result.reason
    finally:
        writer.send_signal(signal.SIGCONT)
    producer.close()


def test_two_threads_start_one_thread_for_queued_puts(monkeypatch):
    starts, start = [], _thread.start_new_thread

    def start_slowly(run, arguments):
        starts.append(run)
        time.sleep(0.1)
        start(run, arguments)

    monkeypatch.setattr(pending_puts, "_thread", SimpleNamespace(start_new_thread=start_slowly))
    later = QueuedPuts()
    futures, context = [PutFuture(), PutFuture()], PutContext(PUT, "T", 0, b"", 0)
    stored = PutResult(PutStatus.PUT_OK)
    adding = [threading.Thread(target=later.add, args=(lambda: stored, future, context)) for future in futures]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert [future.result(8).status for future in futures] == [PutStatus.PUT_OK] * 2 and len(starts) == 1
    later.end()
    later.join()


@pytest.mark.parametrize("goes_on", [True, False], ids=["another put", "close"])
def test_a_put_whose_thread_cannot_be_started_is_resolved_by_the_next_or_by_close(make_parts, monkeypatch, goes_on):
    producer = make_parts().producer()

    def start(run, arguments):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(pending_puts, "_thread", SimpleNamespace(start_new_thread=start))
        future = producer.put_async("T", b"x")  # submitted: the caller must not be told otherwise
    if goes_on:
        assert producer.put_async("T", b"y").result(10).ok and future.result(0).ok
    _close_in_time(producer)
    assert future.result(0).ok or future.result(0).indeterminate


def _close_in_time(producer) -> None:
    closing = threading.Thread(target=producer.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_a_callback_may_put_again_also_while_the_producer_closes(make_parts):
    parts = make_parts()
    producer = parts.producer()
    results = []
    producer.put_async("T", b"1").add_done_callback(lambda _: results.append(producer.put("T", b"2")))
    future = producer.put_async("T", b"3")
    assert future.result(10).ok
    eventually(lambda: results, "the callback has put")
    futures = [producer.put_async("T", b"x") for _ in range(50)]
    futures[-1].add_done_callback(lambda _: results.append(producer.put("T", b"late")))
    producer.close()
    assert results[0].ok and len(results) == 2  # the late one: stored, or refused because the producer is closed
    assert results[1].ok or "closed" in results[1].reason


@pytest.mark.parametrize("bodies", [[array.array("I", [1, 2])], [memoryview(b"12345678").cast("I")]])
def test_bodies_with_wide_items_do_not_cost_the_session(make_parts, bodies):
    with make_parts().producer() as producer:
        try:
            assert producer.put_many("T", bodies).ok  # taken byte for byte
        except TypeError:
            pass
        assert producer.put("T", b"x").ok


@pytest.mark.parametrize("options", [{}, {"keys": "k"}], ids=["in C", "in Python"])
@pytest.mark.parametrize("kind", [list, iter], ids=["list", "iterator"])
def test_a_refusal_of_one_of_many_bodies_names_it(make_parts, kind, options):
    with make_parts(max_message_bytes=1000).producer() as producer:
        for bad, problem in ((bytes(1001), r"bodies\[2\]: the body has 1001 bytes, 1000 are possible"), ("text", r"bodies\[2\] must be")):
            given = [b"a", b"b", bad, b"d"]
            for put in (lambda: producer.put_many("T", kind(given), **options),
                        lambda: producer.put_many_async("T", kind(given), **options).result(10)):
                if isinstance(bad, str):
                    with pytest.raises(TypeError, match=problem):
                        put()
                else:
                    result = put()
                    assert result.status is PutStatus.MESSAGE_ILLEGAL and re.search(problem, result.reason)
        assert producer.put_many("T", [bytes(1000), bytearray(b"x"), memoryview(b"y")], **options).count == 3


@pytest.mark.parametrize("options", [{}, {"keys": "k"}], ids=["in C", "in Python"])
def test_a_body_of_many_that_no_segment_can_hold_is_named(make_parts, options):
    parts = make_parts()
    with parts.producer() as producer:
        stored = producer.put_many("T", [b"", b"x"], **options)
        rest_bytes = stored.end_physical_offset // 2 - len(b"x") / 2
        most = int(parts.control.identity.segment_bytes - 8 - rest_bytes)
        assert producer.put_many("T", [b"a", bytes(most)], **options).ok
        result = producer.put_many("T", [b"a", bytes(most + 1)], **options)
        assert result.status is PutStatus.MESSAGE_ILLEGAL
        assert result.reason.startswith(f"bodies[1]: the body has {most + 1} bytes, which no segment of the commit log can hold")


@pytest.mark.parametrize(("bad", "problem"), [
    (bytes(1001), "the body has 1001 bytes"), (BatchMessage(b"", properties={"p": "a\x01"}), "the property p holds"),
    (BatchMessage(b"", properties={"p": "v" * 40_000}), "the properties have"), (BatchMessage(b"", flag=1 << 40), "the flag")])
def test_a_refusal_of_one_of_a_batch_names_it(make_parts, bad, problem):
    with make_parts(max_message_bytes=1000).producer() as producer:
        result = producer.put_batch("T", iter([b"a", BatchMessage(bytearray(b"b")), bad]))
        assert result.status is PutStatus.MESSAGE_ILLEGAL and result.reason.startswith(f"messages[2]: {problem}")
        with pytest.raises(TypeError, match=r"messages\[1\] must be bytes, not str"):
            producer.put_batch("T", [b"a", BatchMessage("b")])


@pytest.mark.parametrize("arguments", [{"queue_id": 1 << 31}, {"queue_id": 1 << 40}])
def test_a_queue_id_beyond_its_field_is_refused(make_parts, arguments):
    with make_parts().producer() as producer:
        assert producer.put("T", b"x", **arguments).status is PutStatus.MESSAGE_ILLEGAL
        assert producer.put("T", b"x", timeout_s=float("inf")).ok


def test_a_put_many_whose_records_outgrow_a_pass_is_refused(make_parts):
    parts = make_parts(session_ring_bytes_default=8 << 20)
    with parts.producer() as producer:
        result = producer.put_many("T", [b""] * 20_000, properties={"p": "v" * 30_000})
        assert result.status is PutStatus.MESSAGE_ILLEGAL and "split" in result.reason
        assert producer.put("T", b"x").physical_offset == 0


def test_a_store_that_is_being_frozen_takes_no_put(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put("T", b"x").ok
        native.store(parts.control.state, "frozen", 1)  # killed before it could say read-only
        assert producer.put("T", b"x").status is PutStatus.SERVICE_NOT_AVAILABLE


def test_an_allocator_that_is_ended_alone_takes_no_segment_from_the_writer(make_parts):
    parts = make_parts(mode=native.MODE_SYNC)
    with parts.producer() as producer:
        for _ in range(15):
            assert producer.put("T", bytes(3000)).ok
        parts.workers[native.ALLOCATOR].terminate()
        assert parts.workers[native.ALLOCATOR].wait(20) == 0
        assert producer.put_many("T", [bytes(3000)] * 10).ok
        parts.start(native.ALLOCATOR)
        assert producer.put_many("T", [bytes(3000)] * 40).ok
    assert len(messages(parts)) == 65


class _Interrupt(Exception):
    """The exception that signal handlers of these tests raise."""


@contextlib.contextmanager
def interrupting():
    """SIGALRM raises _Interrupt in the main thread inside the block; gives the list that counts its calls.

    One that comes within a finalizer is raised there, printed by Python, and goes no further.
    """
    calls = []

    def handler(number, frame):
        calls.append(number)
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield calls
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("way", [
    lambda producer: producer.put_many("T", [b"x"]),
    lambda producer: producer.put_many_async("T", [b"x"]).result(),
    lambda producer: producer.put_batch("T", [b"x"]),
    lambda producer: producer.put("T", b"x", keys="k"),
], ids=["put_many", "put_many_async", "put_batch", "put"])
def test_an_exception_of_a_signal_handler_is_not_an_unknown_outcome(parts, way):
    with parts.producer() as producer, interrupting() as calls:
        def profile(frame, event, _):
            if event == "call" and frame.f_code.co_name == "_result":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGALRM)

        sys.setprofile(profile)
        try:
            with contextlib.suppress(_Interrupt):  # one message may need no result made in Python
                assert way(producer).ok and not calls
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize(("ring", "size"), usual(product([{}, ROOMY], [10, 50_000]), [({}, 50_000), (ROOMY, 10)], pytest.mark.ci))
def test_an_exception_of_a_signal_handler_ends_a_put_at_once(make_parts, ring, size):
    parts = make_parts(**ring, put_timeout_ms=HOUR_MS)
    with parts.producer() as producer:
        assert producer.put("T", b"x" * size).ok
        writer = parts.workers[native.WRITER]
        writer.send_signal(signal.SIGSTOP)
        try:
            with interrupting():
                for keys in (None, "k"):
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                    with pytest.raises(_Interrupt):
                        producer.put("T", b"y" * size, keys=keys)
        finally:
            writer.send_signal(signal.SIGCONT)
        assert producer.put("T", b"z").queue_offset == 3, "both had been submitted"


@pytest.mark.parametrize("mode", MODES)
def test_timeout_s_ends_a_put_while_the_writer_is_stopped(make_parts, mode):
    parts = make_parts(**MODES[mode], put_timeout_ms=HOUR_MS, sync_flush_timeout_ms=HOUR_MS)
    with parts.producer() as producer:
        assert producer.put("T", b"x").ok
        writer = parts.workers[native.WRITER]
        writer.send_signal(signal.SIGSTOP)
        try:
            for body in (b"y", bytes(50_000)):
                result = producer.put("T", body, timeout_s=0.1)
                assert (result.status, result.indeterminate) == (PutStatus.UNKNOWN_ERROR, True)
        finally:
            writer.send_signal(signal.SIGCONT)
        assert producer.put("T", b"z").queue_offset == 3


def test_puts_that_were_not_answered_in_time_do_not_use_up_the_answers(make_parts):
    with make_parts(**ROOMY).producer() as producer:
        for n in range(3 * COMPLETIONS):
            producer.put("T", b"x", timeout_s=1e-6)
            if n % 1000 == 0:
                assert producer.put("T", b"y").ok
        assert producer.put("T", b"x").ok


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_producer_survives_hundreds_of_exceptions_at_any_instruction(make_parts, mode, capfd):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    parts = make_parts(**MODES[mode], **ROOMY)
    producer = parts.producer()
    futures, hits = [], 0
    with interrupting() as calls:
        while hits < 300:
            try:
                calls.clear()
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-3))
                while not calls:
                    producer.put("T", b"x")
                    producer.put("T", b"x", keys="k")
                    producer.put_many("T", [b"x"] * 3)
                    futures.append(producer.put_async("T", b"x"))
                    if chance.random() < 0.02:
                        producer.put("T", bytes(600_000))
                    if chance.random() < 0.1:
                        chance.choice(futures).done()
            except _Interrupt:
                hits += 1
    assert producer.put("T", b"after").ok
    assert all(future.result(30).ok for future in futures)
    for _ in range(5000):  # more than there are places for answers
        assert producer.put("T", b"x").ok
    producer.close()
    assert not submitter(producer).lock.locked()


def test_dropped_producers_give_everything_back(make_parts):
    parts = make_parts(sessions_max=4)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = _thread._count()
    for use in range(20):
        producer = parts.producer()
        assert producer.put("T", b"x").ok
        if use % 2:
            future = producer.put_async("T", b"y")
            del producer
            assert future.result(30).ok, "a put under way is not lost"
        else:
            del producer
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors are closed")
    eventually(lambda: _thread._count() <= threads, "threads have ended")
    eventually(lambda: all(native.load(row, "state") == native.SESSION_FREE for row in parts.control.sessions), "sessions are free")


_LEFT_AT_EXIT = """
import atexit, sys, threading, time
import pyengine
def put_for_ever():
    while True:
        producer.put("T", b"x")
atexit.register(lambda: print(producer.put("T", b"last").status.name))  # runs after whatever connect() may register
producer = pyengine.connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    threading.Thread(target=put_for_ever, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("threads", [0, 3])
def test_a_program_may_put_until_it_ends(make_parts, threads):
    parts = make_parts()
    for _ in range(4 if threads else 1):
        ended = subprocess.run([sys.executable, "-c", _LEFT_AT_EXIT, str(parts.owner.root), str(threads)], env=child_environment(),
                               capture_output=True, text=True, timeout=scaled_timeout_s(60), check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "PUT_OK\n", "")


_CLOSED_AT_EXIT = """
import asyncio, atexit, sys
import pyengine
async def close():
    async with producer:
        pass
    print(producer)
atexit.register(lambda: asyncio.run(close()))
producer = pyengine.connect(sys.argv[1])
"""


_CLOSED_IN_A_DAEMON = """
import asyncio, sys, threading
import pyengine
from pyengine.arguments import AsyncBlock, Closing
class Late(AsyncBlock, Closing):
    def close(self):
        leaving.set()
        threading.main_thread().join()  # after which the interpreter ends
        producer.close()
        print(producer)
async def use():
    async with Late():
        pass
producer = pyengine.connect(sys.argv[1])
leaving = threading.Event()
threading.Thread(target=lambda: asyncio.run(use()), daemon=True).start()
leaving.wait()
"""


@pytest.mark.parametrize("program", [_CLOSED_AT_EXIT, _CLOSED_IN_A_DAEMON])
def test_async_with_may_end_while_the_interpreter_does(make_parts, program):
    ended = subprocess.run([sys.executable, "-c", program, str(make_parts().owner.root)], env=child_environment(),
                           capture_output=True, text=True, timeout=scaled_timeout_s(60), check=False)
    assert ended.returncode == 0 and ended.stdout.endswith(", closed)\n") and ended.stderr == ""


def test_a_connect_that_lacks_descriptors_leaves_none_open(make_engine):
    engine = make_engine()
    engine.start()
    said = call_with_few_files(
        engine.root, 'with pyengine.connect(root) as producer: assert producer.put("T", b"x").ok',
        'pyengine.connect(root, timeout_s=0).close(); print("connected")')
    assert said.endswith("connected\n")


_DURING_AN_IMPORT = """
import sys, threading
import pyengine
begun, may_end = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path, target=None):
        if name.startswith("asyncio."):
            begun.set()
            may_end.wait()

producer = pyengine.connect(sys.argv[1])
assert "asyncio" not in sys.modules
sys.meta_path.insert(0, Slow())
importing = threading.Thread(target=__import__, args=("asyncio",), daemon=True)
importing.start()
begun.wait()
try:
    for options in {}, {"keys": "k"}:
        print(producer.put("T", b"x", **options).status.name, producer.put_async("T", b"x", **options).result().status.name)
finally:
    may_end.set()
importing.join()
producer.close()
"""


def test_a_put_while_another_thread_imports_asyncio_needs_no_event_loop(make_parts):
    ended = subprocess.run([sys.executable, "-c", _DURING_AN_IMPORT, str(make_parts().owner.root)], env=child_environment(),
                           capture_output=True, text=True, timeout=scaled_timeout_s(60), check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "PUT_OK PUT_OK\n" * 2, "")


def test_an_event_loop_continues_while_the_ring_is_full(make_parts):
    parts = make_parts()
    writer = parts.workers[native.WRITER]

    async def run() -> list:
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        writer.send_signal(signal.SIGSTOP)
        try:
            puts = []
            for n in range(400):  # of 300 bytes, in a ring of 65,536
                puts.append(asyncio.ensure_future(_awaited(producer.put_async("T", b"%03d" % n + bytes(200)))))
                await asyncio.sleep(0)
            assert ticks >= 400 and not any(put.done() for put in puts)
        finally:
            writer.send_signal(signal.SIGCONT)
        results = await asyncio.gather(*puts)
        ticking.cancel()
        return results

    with parts.producer() as producer:
        results = asyncio.run(run())
        assert [result.queue_offset for result in results] == list(range(400))
        futures = []
        chained = producer.put_async("T", b"first")
        chained.add_done_callback(lambda _: futures.extend(producer.put_async("T", bytes(300)) for _ in range(400)))
        assert chained.result(30).ok
        eventually(lambda: len(futures) == 400, "a callback is not held up either")
        assert all(future.result(30).ok for future in futures)


async def _awaited(future):
    return await future


def test_closing_waits_for_a_writer_that_answers_slowly(make_parts):
    parts = make_parts(session_ring_bytes_default=1 << 20)
    writer, stopped = parts.workers[native.WRITER], threading.Event()
    producer = parts.producer()

    def keep_it_slow() -> None:
        while not stopped.wait(0.002):
            writer.send_signal(signal.SIGSTOP)
            stopped.wait(0.1)
            writer.send_signal(signal.SIGCONT)

    slowing = threading.Thread(target=keep_it_slow)
    slowing.start()
    try:
        futures = [producer.put_async("T", b"%d" % n) for n in range(3900)]
        producer.close()
    finally:
        stopped.set()
        slowing.join()
    assert {future.result(0).status for future in futures} == {PutStatus.PUT_OK}


def test_puts_that_wait_for_room_are_refused_when_the_producer_closes(make_parts):
    parts = make_parts()
    writer = parts.workers[native.WRITER]

    async def run(producer) -> list:
        return [producer.put_async("T", bytes(300)) for _ in range(400)]

    producer = parts.producer()
    writer.send_signal(signal.SIGSTOP)
    try:
        futures = asyncio.run(run(producer))
        producer.close()
    finally:
        writer.send_signal(signal.SIGCONT)
    results = [future.result(0) for future in futures]
    assert {result.indeterminate for result in results} == {True, False}
    assert all(result.indeterminate or result.status is PutStatus.SERVICE_NOT_AVAILABLE for result in results)


def test_futures_of_refused_puts_leave_nothing(make_parts):
    parts = make_parts(session_ring_bytes_default=1 << 20)
    with parts.producer(refusals="raise") as producer:
        assert producer.put("T", b"first").ok
        native.store(parts.control.state, "state", native.STATE_READ_ONLY)
        kept = []

        def put() -> None:
            future = producer.put_async("T", b"x")
            kept.append(weakref.ref(future))
            with pytest.raises(PutRefusedError):
                future.result(60)
            assert isinstance(future.exception(), PutRefusedError) and future.done()

        put()
        gc.collect()
        assert kept[0]() is None, "the error refers to the future's frame, and the future kept the error"


def test_what_happens_to_refusals_is_checked(parts):
    with pytest.raises(UsageError, match="'raise' or 'return'"):
        producer_module.connect(parts.owner.root, refusals="ignore")


# ---- sends of RocketMQ's clients, without an object for each ---------------------

HOST = bytes((127, 0, 0, 1, 0, 0, 42, 159))


def made_sends(topic: str = "T") -> SendRounds:
    sends = SendRounds(HOST, 0, b"cluster", [b"id ", b" queue ", b" offset ", b" number ", b"."], 1 << 20)
    sends.enter_topic(topic, 4)
    return sends


def send_frame(number: int, body: bytes = b"body", **changes: object) -> bytes:
    """As RocketMQ's Java client 4.9.8 writes it."""
    header = {"code": 310, "extFields": {
        "a": "group", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1795294055449", "h": "0",
        "i": "UNIQ_KEY\x01FD00\x02WAIT\x01true\x02TAGS\x01t", "j": "0", "k": "false", "m": "false", "n": "broker-a"},
        "flag": 0, "language": "JAVA", "opaque": number, "serializeTypeCurrentRPC": "JSON", "version": 409}
    header["extFields"].update({name: value for name, value in changes.items() if len(name) == 1})
    header.update({name: value for name, value in changes.items() if len(name) > 1})
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


def exchange(producer, sends, data, left=None):
    """(bytes taken, answers); `left` gets (request number, future) of those without an answer."""
    timeout_ns = 10_000_000_000 if left is None else 1_000_000
    taken, answers, late = producer._puts.serve_sends(sends, bytearray(b"??" + data), 2, HOST, timeout_ns)
    assert left is not None or not late
    if left is not None:
        left += [(number, future) for future, number, _, _ in late]
    return taken, answers


def test_plain_sends_are_stored_and_answered_in_one_round(make_parts):
    parts = make_parts(**ROOMY)
    frames = [send_frame(number, b"%d" % number * 100) for number in range(70)]
    with parts.producer() as producer:
        sends = made_sends()
        taken, answers = exchange(producer, sends, b"".join(frames[:5]) + frames[5][:-1])
        assert taken == sum(map(len, frames[:5])), "whole frames only"
        taken, answers = exchange(producer, sends, b"".join(frames[5:]))
        assert taken == sum(map(len, frames[5:5 + SendRounds.ROUND_MAX])) and sends.count == SendRounds.ROUND_MAX
    found = messages(parts)
    assert [message.body for message in found] == [b"%d" % number * 100 for number in range(5 + SendRounds.ROUND_MAX)]
    assert found[0].raw_properties == "UNIQ_KEY\x01FD00\x02CLUSTER\x01cluster\x02TAGS\x01t"
    assert (found[0].topic, found[0].queue_id, found[0].born_timestamp_ms, found[0].born_host) == ("T", 1, 1795294055449, "127.0.0.1:10911")
    texts = b""
    for message, number in zip(found[5:], range(5, 70), strict=False):
        text = f"id {message.msg_id} queue 1 offset {message.queue_offset} number {number}.".encode()
        texts += struct.pack(">II", 4 + len(text), len(text)) + text
    assert answers == texts


NOT_PLAIN = {
    "another code": {"code": 11}, "one-way": {"flag": 2}, "an answer": {"flag": 1}, "a field of no client": {"z": "1"},
    "a key of no client": {"remark": "r"}, "another topic": {"b": "U"}, "a queue that is not there": {"e": "4"}, "any queue": {"e": "-1"},
    "no number": {"d": "x"}, "a number in a field": {"h": 1}, "half": {"f": "4"}, "a commit": {"f": "8"}, "a batch": {"m": "true"},
    "tries of its own": {"l": "3"}, "later": {"i": "DELAY\x011"}, "prepared": {"i": "TRAN_MSG\x01true"}, "a cluster": {"i": "CLUSTER\x01c"},
    "a property twice": {"i": "a\x011\x02a\x012"}, "a name that Java hashes otherwise": {"i": "\u00e4\x011"},
    "a lone surrogate": {"i": "a\x01\ud800"}, "long properties": {"i": "a\x01" + "v" * 32767},
    "many properties": {"i": "\x02".join(f"{n}\x01v" for n in range(60))},
    "a large number": {"opaque": 1 << 31}, "no object": {"extFields": "x"},
}


@pytest.mark.parametrize("changes", NOT_PLAIN.values(), ids=[name.replace(" ", "-") for name in NOT_PLAIN])
def test_another_request_than_a_plain_send_is_left_in_the_buffer(shared_parts, changes):
    with shared_parts.producer() as producer:
        first, other = send_frame(1), send_frame(2, **changes)
        assert exchange(producer, made_sends(), first + other + first)[0] == len(first)


@pytest.mark.parametrize("frame", [
    b"\0\0\0\x03abc", struct.pack(">II", 1 << 21, 3), struct.pack(">II", 4, 1), struct.pack(">II", 20, 1 << 24 | 10) + b"x" * 16,
    send_frame(2).replace(b'"flag"', b'\n\n"flag":0,"flag"'), send_frame(2).replace(b'"code":310', b'"code":0310'),
    send_frame(2).replace(b'"e":"1"', b'"e":"1\n"'), send_frame(2).replace(b'"e":"1",', b""), send_frame(2).replace(b"409}", b"409]"),
    send_frame(2).replace(b"WAIT", b"\xff\xfeIT"), send_frame(2, b"x" * (4 << 20)),
], ids=["a short frame", "a long one", "a header beyond it", "the binary form", "a key twice", "no JSON number", "a line break", "no queue",
        "no end", "no UTF-8", "a long body"])
def test_bytes_that_are_no_plain_send_are_left_where_they_are(shared_parts, frame):
    with shared_parts.producer() as producer:
        assert exchange(producer, made_sends(), send_frame(1) + frame)[0] == len(send_frame(1))


def test_plain_sends_that_the_writer_does_not_answer_have_futures(make_parts):
    parts = make_parts(**ROOMY)
    writer = parts.workers[native.WRITER]
    left = []
    with parts.producer() as producer:
        sends = made_sends()
        assert exchange(producer, sends, send_frame(1))[1]
        writer.send_signal(signal.SIGSTOP)
        try:
            assert exchange(producer, sends, send_frame(2) + send_frame(3), left)[1] == b""
            assert sends.count == 2 and not any(future.done() for _, future in left)
        finally:
            writer.send_signal(signal.SIGCONT)
        assert left[1][1].result(60).ok
        writer.send_signal(signal.SIGSTOP)
        try:
            exchange(producer, sends, send_frame(4), left)
        finally:
            writer.send_signal(signal.SIGCONT)
    assert [number for number, _ in left] == [2, 3, 4]
    results = [future.result(0) for _, future in left]  # the end of the producer resolves the last one
    assert all(result.status is PutStatus.PUT_OK and result.queue_offset == number + 1 for number, result in enumerate(results))
    assert results[0].msg_id == messages(parts)[1].msg_id


def test_plain_sends_of_a_round_that_an_exception_ends_leave_no_place(make_parts, monkeypatch):
    parts = make_parts(**ROOMY)
    with parts.producer() as producer:
        sends = made_sends()
        for _ in range(5000 // SendRounds.ROUND_MAX):  # more than there are places for answers
            with monkeypatch.context() as patched:
                patched.setattr(SendRounds, "answer", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    exchange(producer, sends, b"".join(map(send_frame, range(SendRounds.ROUND_MAX))))
        assert exchange(producer, sends, send_frame(1))[1]


def test_plain_sends_are_taken_as_far_as_there_is_room(make_parts):
    parts = make_parts()
    with parts.producer() as producer:
        sends, left = made_sends(), []
        parts.workers[native.WRITER].send_signal(signal.SIGSTOP)
        try:
            data = send_frame(1, b"x" * 10_000) * 20
            taken, _ = exchange(producer, sends, data, left)
            assert 0 < taken < len(data), "as many as there is room for"
            assert exchange(producer, sends, data, left)[0] == 0
        finally:
            parts.workers[native.WRITER].send_signal(signal.SIGCONT)
        assert len(left) * len(data) == taken * 20 and all(future.result(60).ok for _, future in left)


def test_sends_whose_answers_wait_for_the_disk_are_not_plain(make_parts):
    with make_parts(mode=native.MODE_SYNC).producer() as producer:
        assert exchange(producer, made_sends(), send_frame(1))[0] == 0


def test_a_producer_cancels_its_delayed_messages(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        puts = [producer.put("T", b"x", delay_level=18), producer.put("T", b"x", deliver_at=timedelta(days=39)),
                producer.put_async("T", b"x", delay_level=18, queue_id=2).result(10)]
        assert all(producer.cancel_delayed(put.msg_id) for put in puts)
        batch = producer.put_batch("T", [b"a", b"b"], delay_level=18)
        assert [producer.cancel_delayed(msg_id) for msg_id in batch.msg_id.split(",")] == [True, True]
        for wrong, error in ((1, TypeError), ("", FormatError), (producer.put("N", b"now").msg_id, UsageError)):
            with pytest.raises(error):
                producer.cancel_delayed(wrong)
    with pytest.raises(UsageError, match="closed"):
        producer.cancel_delayed(puts[0].msg_id)


@pytest.mark.parametrize("written_bytes", usual([0, 8, 12, 19], [0, 19], pytest.mark.ci))
def test_a_message_whose_entry_is_not_whole_yet_is_not_due(make_engine, written_bytes):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        engine.kill("reputter", signal.SIGSTOP)
        try:
            put = producer.put("T", b"x", delay_level=18)
            entry = ENTRY.pack(put.physical_offset, put.size_bytes, put.store_timestamp_ms + 7_200_000)[:written_bytes]
            file = engine.root / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "17" / f"{0:020d}"
            file.parent.mkdir(parents=True)
            file.write_bytes(entry.ljust(6000, b"\0"))
            assert put.physical_offset == 0 and producer.cancel_delayed(put.msg_id)
        finally:
            engine.kill("reputter", signal.SIGCONT)


def test_threads_and_a_forked_child_may_cancel_by_one_producer(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        ids = [producer.put("T", b"x", delay_level=18).msg_id for _ in range(24)]
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(producer.cancel_delayed, ids[:20]))
        pid = os.fork()
        if not pid:
            os._exit(0 if all(map(producer.cancel_delayed, ids[16:22])) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert all(map(producer.cancel_delayed, ids[18:]))


def test_a_cancel_leaves_no_file_open_in_a_forked_child_or_once_its_producer_is_dropped(make_engine):
    engine = make_engine()
    engine.start()

    def opened() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{each}").endswith("/delay-cancels") for each in os.listdir("/proc/self/fd"))

    producer = pyengine.connect(engine.root)
    assert producer.cancel_delayed(producer.put("T", b"x", delay_level=18).msg_id) and opened() == 1
    pid = os.fork()
    if not pid:
        os._exit(opened())
    assert os.waitpid(pid, 0)[1] == 0
    assert producer.cancel_delayed(producer.put("T", b"x", delay_level=18).msg_id), "the parent's is open"
    del producer
    gc.collect()
    assert opened() == 0


def in_transaction(producer, topic):
    with producer.transaction(check_after_s=0) as transaction:
        transaction.put(topic, b"x")


FILES_USED = {  # a call that uses the store's files, inside of what, and whether it is done though the producer is closed meanwhile
    "once": (lambda producer, topic, put: producer.put(topic, b"x", unique_key="k", once=True), FirstPuts, "locked", False),
    "cancel_delayed": (lambda producer, topic, put: producer.cancel_delayed(put.msg_id), DelayCancels, "cancel", True),
    "check_transactions": (lambda producer, topic, put: producer.check_transactions(), PreparedCheck, "round", True),
    "transaction": (lambda producer, topic, put: in_transaction(producer, topic), HalfMessages, "enter", False),
    "end of a transaction": (lambda producer, topic, put: in_transaction(producer, topic), HalfMessages, "end", False),
    "first put of a topic": (lambda producer, topic, put: producer.put(f"{topic}-new", b"x"), TopicConfigs, "ensure", False),
}


@pytest.mark.parametrize("call", FILES_USED)
def test_a_call_beside_or_after_close_touches_no_file_that_the_program_opens_next(undelayed, names, tmp_path, monkeypatch, call):
    use, where, name, is_done = FILES_USED[call]
    producer, inside = undelayed.connect(default_topic_queue_nums=5), getattr(where, name)
    opened, is_closed = contextlib.ExitStack(), threading.Event()
    put = producer.put(names[0], b"later", deliver_at=timedelta(hours=1))
    foreign = tmp_path / "foreign"
    (foreign / "config").mkdir(parents=True)

    def go_on() -> None:
        """As a program does: its files get the descriptors that close() has freed."""
        for number in range(20):
            opened.callback(os.close, os.open(foreign, os.O_RDONLY))
            opened.enter_context(open(foreign / f"{number}.db", "w+b"))

    def beside(*given, **options):
        if not is_closed.is_set():
            is_closed.set()
            closing = threading.Thread(target=producer.close)
            closing.start()
            closing.join(scaled_timeout_s(60))
            assert not closing.is_alive()
            go_on()
        return inside(*given, **options)

    monkeypatch.setattr(where, name, beside)
    with opened:
        for is_after in (False, True):
            error = PutIndeterminateError if call == "end of a transaction" and not is_after else (UsageError, PutError)
            with contextlib.nullcontext() if is_done and not is_after else pytest.raises(
                    error, match="this producer is closed: make another one"):
                use(producer, names[0], put)
            go_on()
            assert is_closed.is_set() and {path.stat().st_size for path in foreign.rglob("*.*")} == {0}
            assert not [*(foreign / "config").iterdir()] and {path.suffix for path in foreign.iterdir()} == {"", ".db"}


def test_threads_that_want_a_producer_while_one_cannot_connect_get_its_error_and_the_next_one_connects(undelayed):
    """Each would wait for an engine as long as all before it together."""
    shared, tries, errors = SharedProducer(), [], []

    def waits(thread):
        frame = sys._current_frames().get(thread.ident)
        while frame is not None and "failure" not in frame.f_locals:
            frame = frame.f_back
        return frame is not None

    def fail():
        tries.append(threading.current_thread())
        eventually(lambda: all(waits(thread) for thread in threads), "all want it")
        raise EngineUnavailableError("none runs")

    def want():
        with pytest.raises(EngineUnavailableError, match="none runs") as error:
            shared.get(fail)
        errors.append(error.value)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tries) == 1 and len({*map(id, errors)}) == 4
    producer = shared.get(lambda: pyengine.connect(undelayed.path))
    assert shared.get(fail) is producer and producer.put("T", b"1").ok
    shared.close()
    with pytest.raises(PutRefusedError, match="this producer is closed"):
        producer.put("T", b"2")


@pytest.mark.parametrize(("where", "name"), [(SharedObject, "close"), (EngineMemory, "close"), (os, "close")],
                         ids=["object", "memory", "descriptor"])
def test_a_session_whose_close_a_signal_handler_has_ended_is_closed_by_the_next_call(undelayed, monkeypatch, where, name):
    before = len(os.listdir("/proc/self/fd"))
    session, inside = open_session(undelayed.path), getattr(where, name)

    def interrupted(*given):
        monkeypatch.undo()
        inside(*given)
        raise Interrupted

    monkeypatch.setattr(where, name, interrupted)
    with pytest.raises(Interrupted):
        session.close()
    session.close()
    session.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, "its descriptors are closed")
