"""Delayed delivery on a clock of the test's own: when, in what order, noted how, and what cannot be delivered."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import pytest

from fix_golden import usual
from pyengine.client.outgoing import DelayedCancels, RawMessage
from pyengine.client.pending_puts import PutFuture
from pyengine.errors import DiskFullError, EngineError, EngineUnavailableError
from pyengine.formats.constants import SCHEDULE_TOPIC, TIMER_GROUP, TIMER_TOPIC
from pyengine.formats.delayed_message import DelayedId, timed_properties
from pyengine.formats.record import encode_host, encode_properties, hash_map_order
from pyengine.ipc.control_block import now_ms
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.native import control as native
from pyengine.results import PutResult, PutStatus
from pyengine.services import schedule_message
from pyengine.services.reput_message import ReputMessageService
from pyengine.services.schedule_message import PAUSE_S_MAX, POLL_NS_MAX, RETRY_NS, ScheduleMessageService
from pyengine.storage import consumer_offset, durable_file
from pyengine.storage.config import EngineConfig
from pyengine.storage.consumer_offset import CANCELS_NAME, ConsumerOffsets, DelayCancels
from pyengine.storage.store_reader import StoreReader
from reported import Reported
from waiting import eventually

LEVELS = "1m 2m 1h"
HOUR_MS = 3_600_000


def delivery_of_a_broker(message) -> str:
    """The property text that 4.9 gives a delayed message when its time has come: all of it."""
    return encode_properties({name: message.properties[name] for name in hash_map_order(message.properties)})


class Session:
    """What the scheduler needs of a producer; gives the answers in `refuse`, or raises them, before it puts."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.producer, self.refuse = rig, rig.parts.producer(), rig.refuse
        rig.open_sessions += 1

    def put_raw_async(self, message) -> PutFuture:
        answer = self.refuse.pop(0) if self.refuse else None
        if answer is None:
            return self.producer.put_raw_async(message)
        if isinstance(answer, BaseException):
            raise answer
        future = PutFuture()
        future.set_result(answer)
        return future

    def close(self) -> None:
        self.rig.open_sessions -= 1
        self.producer.close()


class Rig:
    """Real writer, flusher and allocator; dispatch and scheduler driven by the test, with its clocks."""

    def __init__(self, parts, **settings) -> None:
        self.parts, self.owner = parts, parts.owner
        self.root, self.control = parts.owner.root, parts.owner.control
        self.config = EngineConfig(message_delay_level=LEVELS, mapped_file_size_commit_log_bytes=65536,
                                   mapped_file_size_consume_queue_bytes=6000, max_hash_slot_num=100, max_index_num=400,
                                   **settings)
        self.producer = parts.producer(message_delay_level=LEVELS)
        self.reputter = ReputMessageService(self.owner.context(self.config))
        self.wall_ms = 0
        self.steady_ns = 1_000_000_000
        self.reported = Reported()
        self.services: list[ScheduleMessageService] = []
        self.connects = self.open_sessions = 0
        self.why_no_session = ""
        self.refuse: list[PutResult | BaseException | None] = []  # answers to give instead of putting; None: put

    def put(self, level: int, body: bytes, topic: str = "T", **options):
        result = self.producer.put(topic, body, delay_level=level, **options)
        assert result.ok
        self.dispatch()
        return result

    def dispatch(self) -> None:
        while self.reputter.work():
            pass
        assert native.load_position(self.control.reput_from) == native.load_position(self.control.committed)

    def service(self) -> ScheduleMessageService:
        """A scheduler as the worker makes it; an earlier one is dropped as kill -9 drops it."""
        self.services.append(ScheduleMessageService(
            self.owner.context(self.config, report=self.reported), self.connect, lambda: self.wall_ms, lambda: self.steady_ns))
        return self.services[-1]

    def connect(self):
        if self.why_no_session:
            raise EngineUnavailableError(self.why_no_session)
        self.connects += 1
        return Session(self)

    def go(self, service: ScheduleMessageService) -> None:
        """Everything that is due by the clocks; then dispatched."""
        while service.work():
            pass
        self.dispatch()

    def delivered(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        with StoreReader(self.root) as store:
            found, offset = [], 0
            while offset < store.queue_range(topic, queue_id)[1]:
                answer = store.get_message(topic, queue_id, offset)
                found += [message.body for message in answer.messages]
                offset = answer.next_begin_offset
            return found

    def queue_end(self, topic: str, queue_id: int) -> int:
        with StoreReader(self.root) as store:
            return store.queue_range(topic, queue_id)[1]

    def flushed(self) -> None:
        eventually(lambda: native.load_position(self.control.flushed) == native.load_position(self.control.wrote), "flushed")

    def noted(self) -> dict[str, int]:
        return json.loads((self.root / "config" / "delayOffset.json").read_text())["offsetTable"]

    def close(self) -> None:
        for service in self.services:
            service.close()
        self.reputter.close()
        self.producer.close()


@pytest.fixture
def make_rig(make_parts):
    rigs = []

    def make(identity=None, **settings) -> Rig:
        rigs.append(Rig(make_parts(**(identity or {})), **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_a_message_is_delivered_when_its_time_has_come_and_not_before(make_rig):
    rig = make_rig()
    rig.wall_ms = 0
    put = rig.put(1, b"later", queue_id=3, tags="t", keys="k", unique_key="u1", flag=7)
    service = rig.service()
    due_ms = put.store_timestamp_ms + 60_000
    for rig.wall_ms in (put.store_timestamp_ms, due_ms - 1):
        rig.go(service)
        assert rig.delivered(queue_id=3) == []
    assert service.pause_s() == pytest.approx(0.001)
    rig.wall_ms = due_ms
    rig.go(service)
    with StoreReader(rig.root) as store:
        [message] = store.get_message("T", 3, 0, tags="t").messages
        [waited] = store.get_message(SCHEDULE_TOPIC, 0, 0).messages
        assert [found.physical_offset for found in store.query_message("T", "k")] == [message.physical_offset]
    for name in ("body", "flag", "sys_flag", "born_timestamp_ms", "born_host", "store_host", "reconsume_times", "properties"):
        assert getattr(message, name) == getattr(waited, name), name
    assert message.properties["REAL_QID"] == "3" and message.prepared_transaction_offset == 0
    rig.wall_ms += HOUR_MS
    rig.go(service)
    assert rig.delivered(queue_id=3) == [b"later"]


def test_fields_that_only_a_broker_sets_survive_the_wait(make_rig):
    rig = make_rig()
    result = rig.producer.put_raw(RawMessage(
        "T", b"zipped", queue_id=1, properties_text="TAGS\x01a", flag=-5, sys_flag=0x1 | 0x8, born_timestamp_ms=1234,
        born_host="[2001:db8::1]:99", store_host="10.9.8.7:10911", reconsume_times=4, prepared_transaction_offset=77,
        delay_level=2))
    assert result.ok
    rig.dispatch()
    rig.wall_ms = result.store_timestamp_ms + 120_000
    rig.go(rig.service())
    with StoreReader(rig.root) as store:
        [message] = store.get_message("T", 1, 0).messages
    assert (message.flag, message.sys_flag, message.born_timestamp_ms, message.born_host) == (-5, 0x19, 1234, "[2001:db8::1]:99")
    assert (message.store_host, message.reconsume_times, message.prepared_transaction_offset) == ("10.9.8.7:10911", 4, 0)


def test_each_level_is_delivered_in_order_and_none_waits_for_another(make_rig):
    rig = make_rig()
    for number in range(300):
        last = rig.put(1 + number % 3, b"%d/%03d" % (1 + number % 3, number), topic=f"T{1 + number % 3}")
    service = rig.service()
    rig.wall_ms = last.store_timestamp_ms + 120_000
    rig.go(service)
    assert rig.delivered("T1") == [b"1/%03d" % number for number in range(0, 300, 3)]
    assert rig.delivered("T2") == [b"2/%03d" % number for number in range(1, 300, 3)]
    assert rig.delivered("T3") == []
    rig.wall_ms = last.store_timestamp_ms + HOUR_MS
    rig.go(service)
    assert rig.delivered("T3") == [b"3/%03d" % number for number in range(2, 300, 3)]


def test_it_sleeps_until_the_next_message_is_due_or_an_empty_level_could_have_one(make_rig):
    rig = make_rig()
    service = rig.service()
    rig.go(service)
    assert service.pause_s() == PAUSE_S_MAX, "all levels are empty, and the shortest is a minute"
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms
    rig.steady_ns += POLL_NS_MAX
    rig.go(service)
    rig.wall_ms += 60_000 - 250
    rig.go(service)
    assert service.pause_s() == pytest.approx(0.25) and rig.delivered() == []
    rig.wall_ms += 250
    rig.go(service)
    assert rig.delivered() == [b"a"]


def test_a_message_put_into_an_empty_level_is_seen_before_it_is_due(make_rig):
    """No process wakes it: an empty level is polled before a message in it can be due."""
    rig = make_rig()
    service = rig.service()
    rig.go(service)
    put = rig.put(1, b"a")
    rig.wall_ms = start_ms = put.store_timestamp_ms
    while not rig.delivered():
        pause_s = max(0.001, service.pause_s())
        rig.wall_ms += int(pause_s * 1000)
        rig.steady_ns += int(pause_s * 1e9)
        rig.go(service)
        assert rig.wall_ms <= start_ms + 60_001
    assert rig.wall_ms >= start_ms + 60_000


def test_a_message_noted_as_delivered_is_flushed(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a", unique_key="same")
    rig.flushed()
    rig.parts.kill(native.FLUSHER)
    service = rig.service()
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.go(service)
    rig.steady_ns += 3600 * 10**9
    rig.go(service)
    assert rig.delivered() == [b"a"] and not (rig.root / "config" / "delayOffset.json").exists()
    again = rig.service()
    rig.go(again)
    assert rig.delivered() == [b"a", b"a"], "a power cut might have taken it: it is delivered again"
    with StoreReader(rig.root) as store:
        assert len(store.query_message("T", "same")) == 2, "and recognised by its unique key"
    rig.parts.start(native.FLUSHER)
    rig.flushed()
    assert not again.drain()
    assert rig.noted() == {"1": 1}
    third = rig.service()
    rig.go(third)
    assert rig.delivered() == [b"a", b"a"]


def test_the_note_is_written_at_most_once_an_interval(make_rig):
    rig = make_rig(flush_delay_offset_interval_ms=10_000)
    puts = [rig.put(1, b"a"), rig.put(2, b"b")]
    service = rig.service()
    rig.wall_ms = puts[0].store_timestamp_ms + 60_000
    rig.go(service)
    rig.flushed()
    rig.go(service)
    assert rig.noted() == {"1": 1}
    rig.wall_ms = puts[1].store_timestamp_ms + 120_000
    rig.steady_ns += 9_999 * 10**6
    rig.go(service)
    rig.flushed()
    rig.go(service)
    assert rig.noted() == {"1": 1}
    rig.steady_ns += 10**6
    rig.go(service)
    assert rig.noted() == {"1": 1, "2": 1}


def test_a_changed_interval_of_the_note_counts_at_once(make_rig):
    rig = make_rig(flush_delay_offset_interval_ms=86_400_000)
    puts = [rig.put(1, b"a"), rig.put(2, b"b")]
    service = rig.service()
    for put, after_ms in zip(puts, (60_000, 120_000), strict=True):
        rig.wall_ms = put.store_timestamp_ms + after_ms
        rig.go(service)
        rig.flushed()
        rig.go(service)
    assert rig.noted() == {"1": 1}
    service.take_settings(EngineConfig(flush_delay_offset_interval_ms=1))
    rig.go(service)
    assert rig.noted() == {"1": 1, "2": 1}


@pytest.mark.parametrize(("file", "backup", "first", "says"), [
    ('{\n\t"offsetTable":{1:2,7:9\n\t}\n}', None, 2, ""),
    ('{"offsetTable":', '{"offsetTable":{1:2}}', 2, "is damaged"),
    ('{"offsetTable":[]}', b"\xff", 0, "nothing of it is used"),
    ('{"offsetTable":{1:99}}', None, 3, "but its queue reaches from 0 to 3: continuing at 3"),
    *usual([
        ('{"offsetTable":{"1":1}}', "garbage", 1, ""),
        ("\0" * 40, '{"offsetTable":{1:2}}', 2, "is empty: delayOffset.json.bak"),
        (None, '{"offsetTable":{1:2}}', 2, "is not there: delayOffset.json.bak"),
        ('{"offsetTable":{0:1}}', None, 0, "nothing of it is used"),
    ], [], pytest.mark.ci),
])
def test_delivery_continues_from_the_noted_offsets_and_a_bad_note_does_not_stop_it(make_rig, file, backup, first, says):
    rig = make_rig()
    for number in range(3):
        put = rig.put(1, b"%d" % number)
    for name, content in (("delayOffset.json", file), ("delayOffset.json.bak", backup)):
        if content is not None:
            (rig.root / "config" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    service = rig.service()
    assert [says in sentence for sentence in rig.reported] == ([True] if says else [])
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.go(service)
    assert rig.delivered() == [b"%d" % number for number in range(first, 3)]
    rig.flushed()
    service.drain()
    if first < 3:
        assert rig.noted()["1"] == 3, "strict JSON"
    if file and "7:9" in file:
        assert rig.noted()["7"] == 9, "a level that the table lacks keeps its place"


def test_a_delivered_message_is_not_delivered_again_while_no_slave_has_confirmed_it(make_rig):
    """dispatch_at=replicated is new to the store, or the store is a restored backup: queues end at 0 for a while."""
    rig = make_rig({"dispatch_at": 1, "replicates": 1})

    def go(service):
        while service.work():
            pass
        native.store_position(rig.control.confirm, native.load_position(rig.control.committed))
        rig.dispatch()

    service = rig.service()
    put = rig.producer.put("T", b"once", delay_level=1)
    go(service)
    rig.wall_ms, rig.steady_ns = put.store_timestamp_ms + 60_000, rig.steady_ns + HOUR_MS * 1_000_000
    go(service)
    rig.flushed()
    service.drain()
    assert rig.delivered() == [b"once"] and rig.noted() == {"1": 1}
    native.store_position(rig.control.confirm, 0)
    service = rig.service()
    go(service)
    assert rig.noted() == {"1": 1} and rig.reported == []
    rig.steady_ns += HOUR_MS * 1_000_000
    go(service)
    assert rig.delivered() == [b"once"]


def test_an_undeliverable_message_is_reported_and_does_not_block_the_others(make_rig):
    rig = make_rig()
    for text in ("DELAY\x011", "DELAY\x011\x02REAL_TOPIC\x01a/b\x02REAL_QID\x010"):
        assert rig.producer.put_raw(RawMessage(SCHEDULE_TOPIC, b"bad", properties_text=text)).ok
    put = rig.put(1, b"good")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"good"]
    assert [sentence.split(" is not delivered: ")[0] for sentence in rig.reported] == [
        f"the message at offset {offset} of {SCHEDULE_TOPIC} queue 0" for offset in (0, 1)]
    rig.flushed()
    service.drain()
    assert rig.noted() == {"1": 3}


@pytest.mark.parametrize("fields", [
    {"properties_text": "DELAY\x011\x02REAL_TOPIC\x01T\x02REAL_QID\x01" + "9" * 5000},
    {"properties_text": "DELAY\x011\x02REAL_TOPIC\x01T\x02REAL_QID\x01" + "0" * 5000 + "2147483648"},
    {"properties_text": "DELAY\x011\x02REAL_TOPIC\x01T\x02REAL_QID\x010", "born_host": bytes([1, 2, 3, 4, 255, 255, 255, 255])},
], ids=["no number", "too large", "negative port"])
def test_a_forged_message_stops_no_delivery(make_rig, monkeypatch, fields):
    rig = make_rig()
    monkeypatch.setattr("pyengine.client.producer.encode_host", lambda host: host if isinstance(host, bytes) else encode_host(host))
    assert rig.producer.put_raw(RawMessage(SCHEDULE_TOPIC, b"bad", **fields)).ok
    monkeypatch.undo()
    put = rig.put(1, b"good")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.go(rig.service())
    assert rig.delivered() == [b"good"] and len(rig.reported) == 1 and "is not delivered" in rig.reported[0]


def test_a_refusal_is_waited_for_and_the_order_kept(make_rig):
    rig = make_rig()
    for body in (b"0", b"1", b"2"):
        put = rig.put(1, body)
    rig.wall_ms = put.store_timestamp_ms + 60_000
    full = PutResult(PutStatus.CREATE_MAPEDFILE_FAILED, reason="the disk is full")
    rig.refuse = [None, full, full, full, full]
    service = rig.service()
    for reported in (["delayed messages wait: CREATE_MAPEDFILE_FAILED: the disk is full"],) * 2:
        rig.go(service)
        assert rig.delivered() == [b"0"] and rig.reported == reported
        assert service.pause_s() == pytest.approx(RETRY_NS / 1e9)
        rig.steady_ns += RETRY_NS
    rig.go(service)
    assert rig.delivered() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("status", usual([status for status in PutStatus if status.is_lasting],
                                         [PutStatus.PROPERTIES_SIZE_EXCEEDED], pytest.mark.ci))
def test_a_message_that_is_refused_for_ever_stops_no_delivery(make_rig, status):
    rig = make_rig()
    for body in (b"0", b"1", b"2"):
        put = rig.put(1, body)
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.refuse = [None, PutResult(status, reason="never"), None]
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"0", b"2"]
    assert rig.reported == [f"the message at offset 1 of {SCHEDULE_TOPIC} queue 0 is not delivered: never"]
    rig.flushed()
    service.drain()
    assert rig.noted() == {"1": 3}


def test_messages_delivered_after_a_refused_one_are_not_delivered_twice(make_rig):
    rig = make_rig()
    for number in range(5):
        put = rig.put(1, b"%d" % number)
    rig.wall_ms = put.store_timestamp_ms + 60_000
    full = PutResult(PutStatus.CREATE_MAPEDFILE_FAILED, reason="no room for a large one")
    rig.refuse = [None, full, None, full, None]
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"0", b"2", b"4"]
    rig.flushed()
    rig.go(service)
    assert rig.noted() == {"1": 1}, "only what is delivered without a gap"
    rig.steady_ns += 60 * 10**9
    rig.go(service)
    assert rig.delivered() == [b"0", b"2", b"4", b"1", b"3"]
    rig.flushed()
    service.drain()
    assert rig.noted() == {"1": 5}


def test_an_answer_that_does_not_come_is_waited_for_and_not_asked_for_twice(make_rig, monkeypatch):
    rig = make_rig()
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    monkeypatch.setattr(schedule_message, "ANSWER_WAIT_S_MAX", 0.01)
    service = rig.service()
    rig.parts.workers[native.WRITER].send_signal(signal.SIGSTOP)
    for _ in range(3):
        assert service.work(), "still under way"
    rig.parts.workers[native.WRITER].send_signal(signal.SIGCONT)
    rig.go(service)
    assert rig.delivered() == [b"a"] and rig.reported == []


def test_without_a_session_it_tries_again(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    service = rig.service()
    rig.why_no_session = "no slot is free"
    rig.go(service)
    assert rig.reported == ["delayed messages wait: no slot is free"] and rig.delivered() == []
    rig.why_no_session = ""
    rig.steady_ns += RETRY_NS
    rig.go(service)
    assert rig.delivered() == [b"a"]


def test_a_session_is_open_only_around_deliveries(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    service = rig.service()
    rig.wall_ms = put.store_timestamp_ms
    rig.go(service)
    assert rig.connects == 0
    rig.wall_ms += 59_000
    rig.go(service)
    assert rig.connects == 1 and rig.delivered() == [], "a moment before it is needed"
    rig.wall_ms += 1000
    rig.go(service)
    assert rig.connects == 1 and rig.delivered() == [b"a"]
    rig.steady_ns += 11 * 10**9
    rig.go(service)
    assert rig.open_sessions == 0


def test_no_delayed_message_is_delivered_while_the_engine_stops(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    native.store(rig.control.state, "state", native.STATE_STOPPING)
    service = rig.service()
    rig.go(service)
    assert rig.connects == 0 and not service.drain()
    native.store(rig.control.state, "state", native.STATE_RUNNING)
    rig.go(service)
    assert rig.delivered() == [b"a"]


@pytest.mark.parametrize("state", [native.STATE_STOPPING, native.STATE_READ_ONLY])
def test_it_sleeps_while_the_engine_refuses_puts(make_rig, state):
    rig = make_rig()
    service = rig.service()
    service.work()
    native.store(rig.control.state, "state", state)
    rig.steady_ns += 3600 * 10**9
    assert not service.work() and service.pause_s() == PAUSE_S_MAX


def test_a_clock_set_back_makes_late_never_early(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    service = rig.service()
    rig.wall_ms = put.store_timestamp_ms - HOUR_MS  # due 61 minutes ahead of that clock, with a delay of one
    rig.go(service)
    assert rig.delivered() == []
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.go(service)
    assert rig.delivered() == [b"a"]


def test_a_clock_that_was_a_year_ahead_and_is_set_right_does_not_hold_deliveries_up_for_a_year(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    service = rig.service()
    rig.wall_ms = put.store_timestamp_ms - 365 * 24 * HOUR_MS

    def step(seconds: int) -> list[bytes]:
        for _ in range(seconds):
            rig.steady_ns += 10**9
            rig.wall_ms += 1000
            rig.go(service)
        return rig.delivered()

    rig.go(service)
    assert step(30) == []
    rig.put(1, b"b")
    assert step(29) == []
    assert step(2) == [b"a"], "a minute after it was seen first"
    assert step(28) == [b"a"]
    assert step(3) == [b"a", b"b"], "each waits its own minute"
    assert service.pause_s() <= 1.0


def test_a_due_time_beyond_its_levels_delay_is_a_mistake_and_due(make_rig):
    rig = make_rig()
    rig.put(3, b"of the table with 1h as level 3")
    rig.config = replace(rig.config, message_delay_level="1s 2s 3s")
    rig.go(rig.service())
    assert rig.delivered() == [b"of the table with 1h as level 3"]


def test_a_level_that_the_table_has_no_more_is_delivered_at_its_time(make_rig):
    rig = make_rig()
    put = rig.put(3, b"a")
    rig.config = replace(rig.config, message_delay_level="1s")
    service = rig.service()
    rig.wall_ms = put.store_timestamp_ms + HOUR_MS - 1
    rig.go(service)
    assert rig.delivered() == []
    rig.wall_ms += 1
    rig.go(service)
    assert rig.delivered() == [b"a"]


@pytest.mark.parametrize("identity", [{"replay_clock": 1}, {"role": 2}], ids=["replay", "slave"])
def test_a_replayed_clock_and_a_slave_deliver_nothing(make_rig, identity):
    rig = make_rig({"replay_clock": identity.get("replay_clock", 0)})
    service = rig.service()
    rig.go(service)
    assert service.blocked_reason == ""
    put = rig.put(1, b"a")
    if "role" in identity:
        rig.owner.memory.identity.role = 2
    rig.wall_ms = put.store_timestamp_ms + HOUR_MS
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [] and rig.connects == 0 and not service.drain()
    assert ("replay_clock is true" in service.blocked_reason) == ("role" not in identity)


def test_a_full_disk_under_the_delay_offsets_is_reported_and_delivery_continues(make_rig, monkeypatch):
    rig = make_rig()
    puts = [rig.put(1, b"a"), rig.put(2, b"b")]
    service = rig.service()

    def full(offsets, table):
        raise DiskFullError("cannot write delayOffset.json: the disk is full")

    monkeypatch.setattr(consumer_offset.DelayOffsets, "write", full)
    rig.wall_ms = puts[0].store_timestamp_ms + 60_000
    rig.go(service)
    rig.flushed()
    rig.go(service)
    assert len(rig.reported) == 1 and "cannot be noted" in rig.reported[0] and "delivered again" in rig.reported[0]
    monkeypatch.undo()
    rig.wall_ms = puts[1].store_timestamp_ms + 120_000
    rig.steady_ns += 11 * 10**9
    rig.go(service)
    rig.flushed()
    service.drain()
    assert rig.delivered() == [b"a", b"b"] and rig.noted() == {"1": 1, "2": 1}


@pytest.mark.parametrize("is_down", [False, True])
def test_messages_that_are_deleted_before_they_are_due_are_named_once_and_at_once(make_rig, is_down):
    rig = make_rig()
    for number in range(40):
        put = rig.put(1, b"%02d" % number + bytes(4000))
    rig.flushed()
    service = None
    if not is_down:
        service = rig.service()
        rig.go(service)
    (rig.root / "commitlog" / ("0" * 20)).unlink()
    native.store_position(rig.control.min_offset, 65536)
    service = service or rig.service()
    rig.go(service)
    [sentence] = rig.reported
    rig.wall_ms = put.store_timestamp_ms + 60_000
    rig.go(service)
    first, *_ = found = [int(body[:2]) for body in rig.delivered()]
    assert 1 < first < 40 and found == list(range(first, 40)) and rig.reported == [sentence]
    assert sentence.startswith(
        f"delayOffset.json has no offset for delay level 1, but its queue reaches from {first} to 40" if is_down else
        f"the {first} messages at offset 0 of {SCHEDULE_TOPIC} queue 0 are not delivered: deleted")


# -- a time of its own


def test_a_message_with_a_time_of_its_own_waits_level_after_level(make_rig):
    rig = make_rig()
    began_ms = now_ms()
    put = rig.put(0, b"then", queue_id=2, tags="t", keys="k", properties={"colour": "red"}, deliver_at=began_ms + 120_500)
    assert (put.topic, put.queue_id) == (SCHEDULE_TOPIC, 1)
    service = rig.service()
    first_due_ms = put.store_timestamp_ms + 120_000
    for rig.wall_ms in (first_due_ms - 1, first_due_ms, began_ms + 120_499):
        rig.go(service)
        assert rig.delivered(queue_id=2) == []
    assert rig.queue_end(SCHEDULE_TOPIC, 0) > 0, "it waits on in the shortest level"
    rig.wall_ms, rig.steady_ns = began_ms + 120_000 + HOUR_MS, rig.steady_ns + 60_000_000_000
    rig.go(service)
    with StoreReader(rig.root) as store:
        [message] = store.get_message("T", 2, 0, tags="t").messages
        assert len(store.query_message("T", "k")) == 1
    assert message.body == b"then"
    assert message.properties == {"TAGS": "t", "KEYS": "k", "colour": "red"}
    assert rig.queue_end(TIMER_TOPIC, 0) == 0, "only a broker puts into it"


def test_timed_messages_that_a_broker_moved_are_delivered_once(make_rig):
    rig = make_rig()
    rig.put(0, b"due", deliver_at=now_ms() + 60_000), rig.put(0, b"later", deliver_at=now_ms() + HOUR_MS)
    with StoreReader(rig.root) as store:
        waiting = [message for queue_id in (0, 2) for message in store.get_message(SCHEDULE_TOPIC, queue_id, 0).messages]
    assert [message.body for message in waiting] == [b"due", b"later"]
    for message in waiting:  # a broker delivers by REAL_TOPIC alone, and keeps the properties
        text = delivery_of_a_broker(message)
        assert rig.producer.put_raw(RawMessage(TIMER_TOPIC, message.body, properties_text=text)).ok
    assert rig.producer.put_raw(RawMessage(TIMER_TOPIC, b"stray")).ok
    rig.dispatch()
    (rig.root / "config").mkdir(exist_ok=True)
    (rig.root / "config" / "delayOffset.json").write_text('{"offsetTable": {"1": 1, "3": 1}}')
    rig.wall_ms = now_ms() + 61_000
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"due"]
    assert [line for line in rig.reported if "offset 2 of RMQ_SYS_PYENGINE_TIMER" in line and "is not delivered" in line]
    rig.flushed()
    assert ConsumerOffsets(rig.root).read(TIMER_TOPIC, TIMER_GROUP) == {}, "noted only when it is flushed"
    rig.steady_ns += 60_000_000_000
    rig.go(service)
    assert ConsumerOffsets(rig.root).read(TIMER_TOPIC, TIMER_GROUP) == {0: 3}
    rig.go(rig.service())
    assert rig.delivered() == [b"due"]
    rig.wall_ms, rig.steady_ns = rig.wall_ms + 2 * HOUR_MS, rig.steady_ns + HOUR_MS * 1_000_000
    rig.go(rig.services[-1])
    assert rig.delivered() == [b"due", b"later"]


# -- cancelled


def cancels(rig, put) -> bool:
    with closing(DelayedCancels(LiveStoreReader(rig.root))) as program:
        return program.cancel(put.msg_id)


def test_a_cancelled_message_is_left_out_and_the_others_are_not(make_rig):
    rig = make_rig()
    puts = [rig.put(1, b"%d" % number) for number in range(5)]
    service = rig.service()
    assert cancels(rig, puts[1]) and cancels(rig, puts[4])
    rig.wall_ms = puts[-1].store_timestamp_ms + 60_000
    rig.go(service)
    assert rig.delivered() == [b"0", b"2", b"3"]
    rig.flushed()
    service.drain()
    assert rig.noted() == {"1": 5} and rig.reported == []
    assert not cancels(rig, puts[0]) and cancels(rig, puts[1]), "it is due or was delivered; it is cancelled"


def test_a_message_is_cancelled_for_every_later_scheduler(make_rig):
    """Also one that begins at an older note."""
    rig = make_rig()
    puts = [rig.put(1, b"%d" % number) for number in range(3)]
    assert cancels(rig, puts[1])
    rig.wall_ms = puts[-1].store_timestamp_ms + 60_000
    for times in range(1, 4):
        rig.go(rig.service())
        assert rig.delivered() == [b"0", b"2"] * times, "nothing was noted"


def test_a_message_that_is_due_can_be_cancelled_until_the_scheduler_takes_it(make_rig, monkeypatch):
    rig = make_rig()
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    service = rig.service()
    answers = []
    take = DelayCancels.take

    def cancelled_then(*given) -> None:
        take(*given)
        answers.append(cancels(rig, put))

    monkeypatch.setattr(DelayCancels, "take", cancelled_then)
    rig.go(service)
    assert answers == [False] and rig.delivered() == [b"a"]


@pytest.mark.parametrize("use_extension", [False, True])
def test_a_delivered_message_is_not_cancelled_after_a_power_cut_or_at_a_slave(make_rig, use_extension):
    """The delivered record is there, and neither its line in delay-cancels nor a note in delayOffset.json."""
    rig = make_rig(enable_consume_queue_ext=use_extension)
    puts = [rig.put(1, b"a"), rig.put(0, b"b", deliver_at=now_ms() + 60_000)]
    rig.wall_ms = puts[-1].store_timestamp_ms + 65_000
    rig.steady_ns += 65_000_000_000
    rig.go(rig.service())
    assert sorted(rig.delivered()) == [b"a", b"b"]
    (rig.root / "config" / CANCELS_NAME).unlink()
    with closing(DelayedCancels(LiveStoreReader(rig.root), lambda: rig.wall_ms)) as program:
        assert [program.cancel(put.msg_id) for put in puts] == [False, False]


@pytest.mark.parametrize("is_live", [True, False], ids=["running", "stopped"])
def test_a_clock_that_was_set_back_lets_no_delivered_message_be_cancelled(make_rig, tmp_path, is_live):
    rig = make_rig()
    due_ms = now_ms() + 50
    put = rig.put(0, b"a", deliver_at=due_ms)
    eventually(lambda: now_ms() >= due_ms, "it is due")
    rig.wall_ms = put.store_timestamp_ms + 65_000
    rig.go(rig.service())
    assert rig.delivered() == [b"a"]
    (rig.root / "config" / CANCELS_NAME).unlink()
    root = rig.root if is_live else shutil.copytree(rig.root, tmp_path / "copy")
    with closing(DelayedCancels(LiveStoreReader(root), lambda: due_ms - HOUR_MS)) as program:
        assert not program.cancel(put.msg_id)


def test_a_message_that_is_put_after_the_clock_was_set_back_can_be_cancelled(make_rig):
    """Also once it has moved to another level, which the scheduler notes by the new time."""
    rig = make_rig()
    first = rig.put(0, b"a", deliver_at=now_ms() + 60_000)
    rig.wall_ms = first.store_timestamp_ms + 10 * HOUR_MS
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"a"]
    rig.wall_ms -= 10 * HOUR_MS
    puts = [rig.put(0, body, deliver_at=now_ms() + 3 * HOUR_MS) for body in (b"b", b"c", b"d")]
    assert cancels(rig, puts[0])
    rig.wall_ms += HOUR_MS + 60_000
    rig.steady_ns += POLL_NS_MAX
    rig.go(service)
    with closing(LiveStoreReader(rig.root)) as reader:
        assert reader.queue_range(SCHEDULE_TOPIC, 2, "committed") == (0, 5), "two have moved on, within the longest level"
    assert rig.delivered() == [b"a"] and cancels(rig, puts[1])
    rig.wall_ms += 2 * HOUR_MS
    rig.steady_ns += POLL_NS_MAX
    rig.go(service)
    assert rig.delivered() == [b"a", b"d"] and not cancels(rig, puts[2]) and not cancels(rig, first)


def test_a_message_with_a_time_can_be_cancelled_while_the_clock_of_the_store_is_ahead_of_that(make_rig):
    """The store's clock was ahead when the message was put, so that it says nothing about a delivery."""
    rig = make_rig()
    rig.wall_ms = rig.put(0, b"first").store_timestamp_ms - HOUR_MS
    put = rig.producer.put_raw(RawMessage(TIMER_TOPIC, b"a", queue_id=0, delay_level=1,
                                          properties_text=timed_properties("", "T", 0, rig.wall_ms + 60_000)))
    rig.dispatch()
    assert put.store_timestamp_ms > rig.wall_ms + 60_000
    with closing(DelayedCancels(LiveStoreReader(rig.root), lambda: rig.wall_ms)) as program:
        assert program.cancel(put.msg_id)
    rig.wall_ms, rig.steady_ns = rig.wall_ms + 61_000, rig.steady_ns + 61_000_000_000
    rig.go(rig.service())
    assert rig.delivered("T") == [b"first"]


def test_what_is_delivered_while_puts_hold_the_stores_clock_ahead_is_not_cancelled_after_a_power_cut(make_rig, monkeypatch):
    """Nothing was taken while the clock was ahead, and it is set back again in the cut."""
    rig = make_rig()
    path, synced = rig.root / "config" / CANCELS_NAME, [0]
    sync = durable_file.sync_descriptor

    def noted(descriptor, at, **options) -> None:
        sync(descriptor, at, **options)
        if at == path:
            synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(durable_file, "sync_descriptor", noted)
    rig.wall_ms = rig.put(0, b"first").store_timestamp_ms - HOUR_MS
    puts = [rig.put(1, b"level"), rig.producer.put_raw(RawMessage(
        TIMER_TOPIC, b"timed", queue_id=0, delay_level=1, properties_text=timed_properties("", "T", 0, rig.wall_ms + 60_000)))]
    rig.dispatch()
    service = rig.service()
    rig.go(service)
    rig.wall_ms, rig.steady_ns = rig.wall_ms + 61_000, rig.steady_ns + 61_000_000_000
    rig.go(service)
    assert rig.delivered() == [b"first", b"level", b"timed"]
    os.truncate(path, synced[-1])
    (rig.root / "config" / "delayOffset.json").unlink(missing_ok=True)
    rig.wall_ms -= 2 * HOUR_MS
    rig.service()
    with closing(DelayedCancels(LiveStoreReader(rig.root), lambda: rig.wall_ms)) as program:
        assert [program.cancel(put.msg_id) for put in puts] == [False, False]


def test_a_message_whose_extension_unit_cannot_be_read_is_not_cancelled(make_rig):
    """The scheduler delivers it, by the store time of its record."""
    rig = make_rig(enable_consume_queue_ext=True)
    put = rig.put(1, b"a")
    for path in (rig.root / "consumequeue_ext" / SCHEDULE_TOPIC / "0").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    rig.wall_ms = put.store_timestamp_ms + 65_000
    rig.go(rig.service())
    assert rig.delivered() == [b"a"]
    (rig.root / "config" / CANCELS_NAME).unlink()
    with closing(DelayedCancels(LiveStoreReader(rig.root), lambda: rig.wall_ms)) as program, pytest.raises(
            EngineError, match="extension unit.*pyengine rebuild"):
        program.cancel(put.msg_id)


def test_a_scheduler_that_dies_between_taking_and_putting_leaves_the_message_to_the_next(make_rig):
    rig = make_rig()
    put = rig.put(1, b"a")
    rig.wall_ms = put.store_timestamp_ms + 60_000
    service = rig.service()
    rig.refuse.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        service.work()
    assert not cancels(rig, put) and rig.delivered() == []
    rig.go(rig.service())
    assert rig.delivered() == [b"a"]


def test_a_message_with_a_time_is_cancelled_by_its_first_id_wherever_it_waits(make_rig):
    rig = make_rig()
    began_ms = now_ms()
    at_ms = began_ms + 180_500
    gone, kept = (rig.put(0, body, properties={"colour": "red"}, deliver_at=at_ms) for body in (b"gone", b"kept"))
    service = rig.service()
    rig.wall_ms = kept.store_timestamp_ms + 120_000
    rig.go(service)
    assert rig.queue_end(SCHEDULE_TOPIC, 0) == 2, "both wait in another level"
    with StoreReader(rig.root) as store:
        [first, second] = [each for queue in (0, 1) for each in store.get_message(SCHEDULE_TOPIC, queue, 0).messages
                           if each.body == b"gone"][::-1]
    assert (DelayedId.of(second) == DelayedId.of(first) == (gone.physical_offset, gone.store_timestamp_ms)
            and len(second.raw_properties) == len(first.raw_properties)), "a message that could be put can be moved"
    assert cancels(rig, gone)
    rig.wall_ms, rig.steady_ns = at_ms + 120_000, rig.steady_ns + HOUR_MS * 1_000_000
    rig.go(service)
    with StoreReader(rig.root) as store:
        [message] = store.get_message("T", 0, 0).messages
    assert message.body == b"kept" and message.properties == {"colour": "red"}
    assert not cancels(rig, kept) and cancels(rig, gone)


def test_a_message_whose_first_record_is_deleted_can_be_cancelled_while_it_waits(make_rig):
    rig = make_rig()
    at_ms = now_ms() + 180_500
    gone, kept = (rig.put(0, body, deliver_at=at_ms) for body in (b"gone", b"kept"))
    for _ in range(20):
        rig.put(0, bytes(4000), topic="Other")
    service = rig.service()
    rig.wall_ms = kept.store_timestamp_ms + 120_000
    rig.go(service)
    rig.flushed()
    service.drain()
    (rig.root / "commitlog" / ("0" * 20)).unlink()
    assert cancels(rig, gone)
    rig.wall_ms, rig.steady_ns = at_ms + 120_000, rig.steady_ns + HOUR_MS * 1_000_000
    service = rig.service()
    rig.go(service)
    assert rig.delivered() == [b"kept"]
    rig.flushed()
    service.drain()
    assert not cancels(rig, kept), "nothing of it waits"


def test_ids_that_no_message_has_cost_one_look_at_those_that_wait(make_rig, monkeypatch):
    """Anybody who may send to a topic can make up any number of them."""
    rig = make_rig()
    at_ms = now_ms() + 180_500
    first = rig.put(0, b"first", deliver_at=at_ms)
    for _ in range(20):
        rig.put(0, bytes(4000), topic="Other")
    second = rig.put(0, b"second", deliver_at=at_ms)
    for _ in range(20):
        rig.put(0, bytes(4000), topic="Other")
    service = rig.service()
    rig.wall_ms = second.store_timestamp_ms + 120_000
    rig.go(service)
    rig.flushed()
    service.drain()
    files = sorted((rig.root / "commitlog").iterdir())
    of_second = [path for path in files if int(path.name) <= second.physical_offset]
    assert 1 < len(of_second) < len(files)
    of_second[0].unlink()
    looks = []
    get = LiveStoreReader.get_message
    monkeypatch.setattr(LiveStoreReader, "get_message", lambda *given, **rest: looks.append(given) or get(*given, **rest))
    with closing(DelayedCancels(LiveStoreReader(rig.root))) as program:
        assert not program.cancel(first.msg_id[:16] + f"{first.physical_offset + 1:016X}")
        number = len(looks)
        for made_up in range(2, 50):
            assert not program.cancel(first.msg_id[:16] + f"{first.physical_offset + made_up:016X}")
        assert len(looks) == number > 0
        for path in of_second[1:]:
            path.unlink()
        assert program.cancel(second.msg_id) and program.cancel(first.msg_id)


def test_marks_are_dropped_once_nothing_of_their_messages_waits(make_rig, monkeypatch):
    monkeypatch.setattr(consumer_offset, "CANCELS_SHORTEN_BYTES", -1)
    monkeypatch.setattr(consumer_offset, "CANCELS_SHORTEN_FACTOR", 0)
    rig = make_rig(flush_delay_offset_interval_ms=1)
    path = rig.root / "config" / CANCELS_NAME
    put = rig.put(1, b"cancelled")
    service = rig.service()
    assert cancels(rig, put)
    waiting = rig.put(3, b"long")
    rig.wall_ms = put.store_timestamp_ms + 60_000

    def notes(count: int) -> None:
        for _ in range(count):
            rig.put(1, b"")
            rig.wall_ms += 60_000
            rig.steady_ns += 60_000_000_000
            rig.go(service)
            rig.flushed()
            rig.steady_ns += 60_000_000_000
            rig.go(service)

    notes(4)
    assert b"queue_offset" in path.read_bytes(), "a level is not delivered beyond what the log had then"
    rig.wall_ms = waiting.store_timestamp_ms + HOUR_MS
    notes(4)
    assert b"queue_offset" not in path.read_bytes() and b"cancelled" not in rig.delivered() and b"long" in rig.delivered()
