"""The fast path of puts, in C (csrc/front): the same results as the slow path, whatever happens in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import enum
import gc
import inspect
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy
import pytest

from fix_client import submitter
from fix_golden import usual
from fix_parts import MODES
from fix_put_ways import bodies
from pyengine import _front
from pyengine._native import lib
from pyengine.client.outgoing import OutgoingMessage
from pyengine.client.pending_puts import PendingPuts, PutFuture
from pyengine.client.producer import Producer
from pyengine.client.submission import Submitter
from pyengine.engine.kinds import child_environment
from pyengine.engine_config import EngineConfig
from pyengine.formats.record import decode_record
from pyengine.ipc.session_client import open_session
from pyengine.native import control as native
from pyengine.results import PutResult, PutStatus
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from waiting import eventually, scaled_timeout_s

PLACES = 4096


@pytest.fixture(params=usual(MODES, [mode for mode in MODES if mode != "pool"]))  # pool differs behind the ring alone
def parts(request, make_parts):
    return make_parts(session_ring_bytes_default=1 << 20, **MODES[request.param])


@pytest.fixture
def producer(parts):
    """One that has put to T: from then on puts there take the fast path."""
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok and producer.put("T", b"first", tags="red", queue_id=1).ok
        yield producer


@pytest.fixture
def stopped_writer(parts):
    """stopped_writer() stops it; it goes on at the end."""
    writer = parts.workers[native.WRITER]
    yield lambda: writer.send_signal(signal.SIGSTOP)
    writer.send_signal(signal.SIGCONT)


def test_both_ways_give_the_same_results(parts, producer):
    short = [producer.put("T", b"a"), producer.put("T", b"a", tags="red", queue_id=1)]
    long = [producer.put("T", b"a", timeout_s=5), producer.put("T", b"a", tags="red", queue_id=1, timeout_s=5)]
    for one, other in zip(short, long):
        assert type(one) is type(other) is PutResult
        assert (one.status, one.topic, one.queue_id, one.count, one.size_bytes, one.reason, one.indeterminate, one.stored) == (
            other.status, other.topic, other.queue_id, other.count, other.size_bytes, other.reason, other.indeterminate, other.stored)
        assert other.queue_offset == one.queue_offset + 1 and other.physical_offset > one.physical_offset
        assert len(one.msg_id) == 32 and one.msg_id != other.msg_id and one.store_timestamp_ms <= other.store_timestamp_ms
        assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(pickle.loads(pickle.dumps(one)))
    many = producer.put_many("T", [b"x", b"", b"yy"])
    again = producer.put_many("T", (b"x", b"", b"yy"), timeout_s=5)
    assert (many.status, many.count, many.topic) == (again.status, again.count, again.topic) == (PutStatus.PUT_OK, 3, "T")
    assert again.first_queue_offset == many.first_queue_offset + 3 and again.first_physical_offset == many.end_physical_offset
    assert bodies(parts) == [b"first"] * 2 + [b"a"] * 4 + [b"x", b"", b"yy"] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 255, 256])
def test_put_many_of_any_number_of_bodies_of_any_length(parts, producer, count, rng):
    given = [rng.randbytes(rng.choice([0, 1, 7, 8, 100, 400])) for _ in range(count)]
    result = producer.put_many("T", given)
    assert (result.status, result.count, result.first_queue_offset) == (PutStatus.PUT_OK, count, 1)
    assert bodies(parts)[2:] == given


def test_results_may_be_asked_for_in_any_order_and_more_than_once(parts, producer, rng):
    futures = [producer.put_async("T", b"%d" % n) for n in range(600)]
    for n in rng.sample(range(600), 600):
        assert futures[n].result(30).queue_offset == n + 1
        assert futures[n].done() and not futures[n].running() and futures[n].exception() is None and not futures[n].cancel()
    assert futures[0].result(timeout=0) is futures[0].result()
    assert bodies(parts)[2:] == [b"%d" % n for n in range(600)]


def test_more_futures_than_places_are_taken_by_the_puts_themselves(parts, producer):
    futures = [producer.put_async("T", b"x") for _ in range(3 * PLACES)]
    assert producer.put("T", b"after").queue_offset == 3 * PLACES + 1
    assert producer.put_many("T", [b"after"]).ok and producer.put("T", b"after", keys="k").ok
    assert [future.result(30).queue_offset for future in futures] == list(range(1, 3 * PLACES + 1))


def test_futures_that_nobody_keeps_leave_no_place_behind(parts, producer):
    for _ in range(3 * PLACES):
        producer.put_async("T", b"x")
    assert producer.put("T", b"after").queue_offset == 3 * PLACES + 1
    eventually(lambda: submitter(producer).front.take_answers() or not submitter(producer).front.waiting, "no future waits")


def test_a_future_without_an_answer_is_not_done(parts, producer, stopped_writer):
    stopped_writer()
    future = producer.put_async("T", b"x")
    assert not future.done() and future.running() and not future.cancelled()
    began_s = time.monotonic()
    for timeout in (0, 0.1, 0.4):  # the last one is longer than a future waits by itself
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(timeout)
    assert time.monotonic() - began_s < 10
    with pytest.raises(TypeError):
        future.result(1, 2)
    with pytest.raises(TypeError):
        future.result("soon")


def test_in_sync_mode_a_future_is_done_when_it_is_durable(make_parts):
    parts = make_parts(mode=native.MODE_SYNC, session_ring_bytes_default=1 << 20, sync_flush_timeout_ms=400)
    flusher = parts.workers[native.FLUSHER]
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        result = producer.put_async("T", b"x").result(30)
        assert result.ok and native.load_position(parts.control.flushed) >= result.physical_offset + result.size_bytes
        flusher.send_signal(signal.SIGSTOP)
        try:
            late = [producer.put_async("T", b"late") for _ in range(3)]
            eventually(lambda: native.load_position(parts.control.wrote) > native.load_position(parts.control.flushed), "written")
            assert not late[0].done()
            with pytest.raises(TimeoutError):
                late[1].result(0)
        finally:
            flusher.send_signal(signal.SIGCONT)
        assert all(future.result(30).ok for future in late)


@pytest.mark.parametrize("ahead_ms", [-10**12, -5000, 0, 3_600_000], ids=["replayed", "a while ago", "now", "the clock was set back"])
def test_a_timestamp_tells_when_it_was_stored_between_submission_and_now(ahead_ms):
    submitted_ns = time.monotonic_ns() - 3_000_000_000
    stored_ns = lib.ms_producer_stored_ns(submitted_ns, time.time_ns() // 1_000_000 + ahead_ms)
    if ahead_ms < -3000:
        assert stored_ns == submitted_ns
    else:
        assert submitted_ns < stored_ns <= time.monotonic_ns()


def test_callbacks_and_awaits_get_the_same_future(parts, producer):
    called = []
    future = producer.put_async("T", b"1")
    assert isinstance(future, concurrent.futures.Future) and isinstance(future, PutFuture)
    future.add_done_callback(called.append)
    eventually(lambda: called, "the callback")
    assert called == [future] and future.done() and future.result(0).queue_offset == 1
    late = producer.put_async("T", b"2")
    assert late.result(30).ok
    late.add_done_callback(called.append)  # called at once
    assert called == [future, late] and late.result(0).queue_offset == 2 and late.exception(0) is None

    async def puts() -> list[PutResult]:
        one = await producer.put_async("T", b"3")
        return [one, *await asyncio.gather(*(producer.put_async("T", b"x") for _ in range(50)))]

    assert [result.queue_offset for result in asyncio.run(puts())] == list(range(3, 54))


def test_many_futures_may_be_waited_for_together(parts, producer):
    futures = [producer.put_async("T", b"x") for _ in range(100)]
    asked = futures[50].result(30)
    done, not_done = concurrent.futures.wait(futures[:90], timeout=scaled_timeout_s(60))
    assert done == set(futures[:90]) and not not_done
    completed = concurrent.futures.as_completed(futures, timeout=scaled_timeout_s(60))
    assert sorted(future.result(0).queue_offset for future in completed) == list(range(1, 101))
    assert futures[50].result(0) == asked


def test_an_unknown_attribute_is_an_attribute_error(producer):
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        producer.put_async("T", b"x").spam  # noqa: B018


def test_closing_a_producer_resolves_its_waiting_futures(parts, producer):
    writer = parts.workers[native.WRITER]
    answered = producer.put_async("T", b"x")
    assert answered.result(30).ok
    waiting = [producer.put_async("T", b"x") for _ in range(10)]
    producer.close()
    assert all(future.done() for future in waiting) and all(future.result(0).ok for future in waiting)
    assert answered.result(0).queue_offset == 1 and writer.poll() is None
    refused = producer.put_async("T", b"x").result(0)
    assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE and "closed" in refused.reason


def test_a_dropped_producer_answers_its_futures(parts):
    producer = parts.producer()
    assert producer.put("T", b"first").ok
    futures = [producer.put_async("T", b"x") for _ in range(10)]
    is_there = weakref.ref(producer)
    del producer
    gc.collect()
    assert is_there() is None
    assert [future.result(30).queue_offset for future in futures] == list(range(1, 11))


def test_a_future_may_be_asked_by_several_threads(parts, producer, stopped_writer):
    writer = parts.workers[native.WRITER]
    stopped_writer()
    future = producer.put_async("T", b"x")
    found: list[PutResult] = []
    threads = [threading.Thread(target=lambda: found.append(future.result(60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    writer.send_signal(signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert len(found) == 4 and {result.queue_offset for result in found} == {1}


def test_an_exception_of_a_signal_handler_ends_the_wait_for_a_future(parts, producer, stopped_writer):
    stopped_writer()
    future = producer.put_async("T", b"x")

    def interrupt(number, frame):
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for timeout in (None, 30):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError):
                future.result(timeout)
    finally:
        signal.signal(signal.SIGALRM, before)
    parts.workers[native.WRITER].send_signal(signal.SIGCONT)
    assert future.result(30).ok and producer.put("T", b"y").ok and not submitter(producer).lock.locked()


def test_two_builds_do_not_work_together(producer):
    from pyengine._native import ffi, lib

    calls = ffi.new("struct ms_producer_calls *", lib.ms_producer_calls()[0])
    calls.version += 1 << 32  # of the functions, as after a change of a signature alone
    address = int(ffi.cast("uintptr_t", calls))
    with pytest.raises(ImportError, match="of two builds"):
        _front.SessionFront(submitter(producer).native.front()[0], address, submitter(producer).native, None, PutResult, b"")
    with pytest.raises(TypeError):
        _front.SessionFront(*submitter(producer).native.front(), submitter(producer).native, None, int, b"")


# ---- what a program may do that a writer of such code does not think of ----------

in_async_mode = pytest.mark.parametrize("parts", ["async"], indirect=True)


@pytest.mark.parametrize("moment", ["while it waits", "once it is answered", "once the producer is closed too"])
@in_async_mode
def test_a_future_that_two_threads_add_callbacks_to_calls_each_once(parts, producer, stopped_writer, monkeypatch, moment):
    """As a switch of threads within the first call does it."""
    writer = parts.workers[native.WRITER]
    stopped_writer()
    future, called, inner = producer.put_async("T", b"x"), [], []
    ready = PendingPuts.ready

    def switching(self):
        if not inner:
            inner.append(True)
            if moment == "while it waits":
                future.add_done_callback(called.append)
            else:
                writer.send_signal(signal.SIGCONT)
                front = submitter(producer).front
                eventually(lambda: front.take_answers() or not front.waiting, "the answer was taken")
                if "closed" in moment:
                    producer.close()
                else:
                    for _ in range(PLACES + 10):  # its place has another answer now
                        assert producer.put("T", b"y").ok
        return ready(self)

    monkeypatch.setattr(PendingPuts, "ready", switching)
    future.add_done_callback(called.append)
    writer.send_signal(signal.SIGCONT)
    assert future.result(60).ok and future.result().queue_offset == 1
    wanted = 2 if moment == "while it waits" else 1
    eventually(lambda: len(called) == wanted, "each callback is called")
    producer.close()
    assert called == [future] * wanted


@in_async_mode
def test_a_callback_whose_adding_a_signal_handler_ends_is_added_again(parts, producer, stopped_writer, monkeypatch):
    writer = parts.workers[native.WRITER]
    stopped_writer()
    future, called, raised = producer.put_async("T", b"x"), [], []
    ready = PendingPuts.ready

    def interrupted(self):
        if len(raised) < 2:
            raised.append(True)
            raise InterruptedError("enough")
        return ready(self)

    monkeypatch.setattr(PendingPuts, "ready", interrupted)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            future.add_done_callback(called.append)
    writer.send_signal(signal.SIGCONT)
    for _ in range(PLACES + 10):
        assert producer.put("T", b"y").ok
    future.add_done_callback(called.append)
    assert future.result(60).queue_offset == 1
    eventually(lambda: called == [future], "the callback")


@in_async_mode
def test_closing_that_a_signal_handler_ends_may_be_done_again(parts, producer, stopped_writer):
    stopped_writer()
    futures, raised = [producer.put_async("T", b"x") for _ in range(5)], []

    def interrupt(number, frame) -> None:
        raised.append(number)
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(InterruptedError):
                producer.close()
                signal.pause()
    finally:
        signal.signal(signal.SIGALRM, before)
    parts.workers[native.WRITER].send_signal(signal.SIGCONT)
    producer.close()
    assert len(raised) == 3 and all(future.result(0).ok or future.result(0).indeterminate for future in futures)
    assert not submitter(producer).lock.locked()


class _Last:
    def __init__(self, call) -> None:
        self.call = call

    def __del__(self) -> None:
        self.call()


@pytest.mark.parametrize("way", ["an attribute", "a weak reference"])
@in_async_mode
def test_a_deleted_future_is_not_found_by_the_code_that_its_deletion_runs(parts, producer, stopped_writer, way):
    writer = parts.workers[native.WRITER]
    stopped_writer()
    future, ended = producer.put_async("T", b"x"), []
    others = [producer.put_async("T", b"x") for _ in range(3)]

    def end(*_) -> None:
        writer.send_signal(signal.SIGCONT)
        producer.close()  # hands all futures over that wait
        ended.append(True)

    if way == "an attribute":
        future.last = _Last(end)
        kept = None
    else:
        kept = weakref.ref(future, end)
    del future
    assert ended and (kept is None or kept() is None)
    assert all(other.result(60).ok for other in others)


@in_async_mode
def test_a_future_that_comes_back_to_life_has_its_result(parts, producer, stopped_writer):
    stopped_writer()
    back: list[PutFuture] = []

    class Holder:
        def __init__(self, future) -> None:
            self.future, self.itself = future, self

        def __del__(self) -> None:
            back.append(self.future)

    holder = Holder(producer.put_async("T", b"x"))
    holder.future.holder = holder
    del holder
    gc.collect()
    assert len(back) == 1
    parts.workers[native.WRITER].send_signal(signal.SIGCONT)
    assert back[0].result(60).queue_offset == 1
    del back[0].holder, back[:]


@in_async_mode
def test_cycles_of_producer_future_and_callback_are_collected(parts):
    class Own(Producer):
        pass

    producer = Own(lambda limit_s: open_session(parts.owner.root), EngineConfig())
    assert producer.put("T", b"first").ok
    future = producer.put_async("T", b"x")
    asked = producer.put_async("T", b"x")
    future.producer = asked.producer = producer
    producer.futures = [future, asked]
    future.add_done_callback(lambda _, kept=(producer, future): None)
    assert future.result(30).ok and asked.result(30).ok
    there = [weakref.ref(each) for each in (producer, future, asked)]
    del producer, future, asked

    def collected() -> bool:
        gc.collect()
        return [ref() for ref in there] == [None] * 3

    eventually(collected, "nothing is kept")


@in_async_mode
def test_puts_succeed_while_every_allocation_collects_garbage(producer):
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            producer.put("T", b"from a finalizer", tags="red", queue_id=1)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for n in range(60):
            Cycle()
            futures = [producer.put_async("T", b"x", queue_id=n % 2, tags="red" if n % 2 else None) for _ in range(3)]
            assert producer.put("T", b"x").ok and producer.put_many("T", [b"x"] * 5).ok
            futures[0].add_done_callback(lambda _: None)
            assert all(future.result(60).ok for future in futures)
            concurrent.futures.wait(futures)
    finally:
        gc.set_threshold(*before)


@in_async_mode
def test_no_way_of_putting_keeps_a_reference(producer):
    topic, tags, body, bodies = "".join(["T", "opic"]), "".join(["r", "ed"]), bytes(1000), [bytes(100)]
    kept = (topic, tags, body, bodies, PutResult, PutFuture, producer, submitter(producer), submitter(producer).front, None)

    def puts() -> None:
        assert producer.put(topic, body, tags=tags).ok and producer.put_many(topic, bodies, tags=tags).ok
        assert producer.put(topic, body, tags=tags, keys="k").ok and producer.put_many(topic, bodies, tags=tags, flag=1).ok
        asked, handed = producer.put_async(topic, body, tags=tags), producer.put_async(topic, body, tags=tags)
        handed.add_done_callback(lambda _: None)
        assert asked.result(30).ok and handed.result(30).ok
        asked.add_done_callback(lambda _: None)
        with pytest.raises(TypeError):
            producer.put(topic, "text", tags=tags)
        with pytest.raises(TypeError):
            producer.put_async(topic, body, tags=tags, spam=1)
        with pytest.raises(TypeError):
            producer.put_many(topic)
        assert not producer.put(topic, body, tags=tags, queue_id=-1).ok

    for _ in range(20):
        puts()
    gc.collect()
    before = [sys.getrefcount(each) for each in kept]
    for _ in range(100):
        puts()

    def grown() -> list[int]:
        gc.collect()
        return [sys.getrefcount(each) - count for each, count in zip(kept, before)]

    eventually(lambda: max(grown()[:-1]) < 20 and abs(grown()[-1]) < 50, "no reference is kept")


@in_async_mode
def test_wrong_parts_of_a_front_raise_errors_or_use_the_slow_path(producer):
    puts = submitter(producer)
    with pytest.raises(RuntimeError, match="not held"):
        puts.lock.__exit__(None, None, None)
    with pytest.raises(TypeError, match="made once"):
        _front.ProducerFront.__init__(producer, puts)
    front, lock = puts.front, puts.lock
    for wrong in (5, None, object()):
        puts.front = wrong
        assert producer.put("T", b"by the slow path").ok
        puts.front = front
        puts.lock = wrong
        for put in (lambda: producer.put("T", b"x"), lambda: producer.put_async("T", b"x"), lambda: producer.put_many("T", [b"x"])):
            with pytest.raises(TypeError):
                put()
        puts.lock = lock
    assert producer.put("T", b"x").ok
    with pytest.raises(AttributeError):
        _front.ProducerFront.__new__(_front.ProducerFront).put("T", b"x")
    assert not PutFuture.__new__(PutFuture).done()


@in_async_mode
def test_futures_are_not_copied_and_results_are(producer):
    future = producer.put_async("T", b"x")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            copied(future)
    result = future.result(30)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(result, protocol)) == result
    assert copy.copy(result) == copy.deepcopy(result) == result != producer.put("T", b"x")
    with pytest.raises(AttributeError):
        result.topic = "U"
    with pytest.raises(AttributeError):
        result.spam = 1


class _Topic(str):
    """Equal to every topic, and a liar about its own text."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class _Names(enum.StrEnum):
    T = "T"


class _Bytes(bytes):
    def __len__(self) -> int:
        return 1 << 40


class _Index:
    def __index__(self) -> int:
        return 1


GIVEN = [
    {"queue_id": 1.0}, {"queue_id": True}, {"queue_id": numpy.int64(1)}, {"queue_id": numpy.bool_(True)}, {"queue_id": "1"},
    {"queue_id": _Index()}, {"queue_id": b"1"}, {"queue_id": 1 << 31}, {"queue_id": 1 << 70}, {"queue_id": -1},
    {"topic": _Topic("U")}, {"topic": _Names.T}, {"topic": "\ud800"}, {"topic": b"T"}, {"topic": None}, {"topic": ["T"]},
    {"tags": "\ud800"}, {"tags": _Topic("blue")}, {"tags": ""}, {"tags": 5}, {"tags": b"red"}, {"keys": "\udfff"},
    {"body": bytearray(b"abc")}, {"body": memoryview(b"abcdef")[::2]}, {"body": memoryview(b"abcdef")}, {"body": _Bytes(b"abc")},
    {"body": "abc"}, {"body": None}, {"body": numpy.zeros(3, "u1")}, {"body": b""}, {"timeout_s": "x"}, {"spam": 1},
]


@pytest.mark.parametrize(("fast", "slow"), [("put", "_put_any"), ("put_async", "_put_async_any"), ("put_many", "_put_many_any")])
def test_help_names_every_option_of_a_put(fast, slow):
    shown, taken = (dict(list(inspect.signature(getattr(Producer, name)).parameters.items())[1:]) for name in (fast, slow))
    if taken.pop("options", None):  # those of a message
        for name, option in list(inspect.signature(OutgoingMessage).parameters.items())[2:]:
            if (fast, name) != ("put_many", "unique_key"):  # which many messages cannot share
                taken[name] = option.replace(kind=option.KEYWORD_ONLY)
    assert {name: (each.kind, each.default) for name, each in shown.items()} == {
        name: (each.kind, each.default) for name, each in taken.items()}


@in_async_mode
def test_the_fast_path_takes_nothing_else_than_the_slow_path(producer):
    """Whatever is remembered of puts before it: in async mode and others, once with the option that leads to the slow path."""
    def puts(given: dict, more: dict) -> list[object]:
        found: list[object] = []
        arguments = {"topic": "T", "body": b"x", **given, **more}
        many = {"bodies" if name == "body" else name: [value] if name == "body" else value for name, value in arguments.items()}
        for put in (lambda: producer.put(**arguments), lambda: producer.put(arguments.pop("topic"), arguments.pop("body"), **arguments),
                    lambda: producer.put_many(many.pop("topic"), many.pop("bodies"), **many)):
            try:
                result = put()
                found.append((result.status, result.topic, result.queue_id, type(result.topic), type(result.queue_id), result.reason))
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    for given in GIVEN * 2:
        assert puts(given, {}) == puts(given, {} if "timeout_s" in given else {"timeout_s": 5}), given


@pytest.mark.parametrize("size", ["0", "1", "short - 1", "short", "short + 1", "ring", "most", "most + 1"])
def test_bodies_of_every_size_go_all_ways(make_parts, size):
    parts = make_parts(session_ring_bytes_default=1 << 20, segment_bytes=8 << 20)
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        puts = submitter(producer)
        sizes = {"short": puts.body_bytes_max, "ring": 1 << 20, "most": puts.max_message_bytes}
        name, _, more = size.partition(" ")
        count = (sizes[name] if name in sizes else int(name)) + int(more.replace(" ", "") or 0)
        body, wanted = bytes(count), PutStatus.PUT_OK if count <= puts.max_message_bytes else PutStatus.MESSAGE_ILLEGAL
        assert producer.put("T", body).status is wanted
        assert producer.put_async("T", body).result(60).status is wanted
        assert producer.put_many("T", [body]).status is wanted
        assert producer.put_many("T", (b"", body, b"")).status is wanted
        assert producer.put("T", b"after").queue_offset == (1 + 6 if wanted is PutStatus.PUT_OK else 1)


@in_async_mode
def test_a_message_is_born_in_the_millisecond_of_its_put_and_stored_not_before(parts, producer):
    # Many to a millisecond, and through many: producer and writer look at the wall clock once for several.
    times = []
    while len(times) < 2000 or times[-1][0] < times[0][0] + 30:
        before_ms = time.time_ns() // 1_000_000
        result = producer.put("T", b"x") if len(times) % 2 else producer.put_async("T", b"x").result(60)
        times.append((before_ms, result, time.time_ns() // 1_000_000))
    log = parts.log()
    for before_ms, result, after_ms in times:
        message = decode_record(log, result.physical_offset)
        assert before_ms <= message.born_timestamp_ms <= message.store_timestamp_ms <= after_ms


@in_async_mode
def test_puts_without_a_queue_are_put_in_c_too(parts, producer, monkeypatch):
    TopicConfigs(parts.owner.root).create(TopicConfig("turns", 3, 3))
    for topic in ("T", "turns", "turns", "turns"):
        assert producer.put(topic, b"x").ok
    for name in ("_put_any", "_put_async_any", "_put_many_any"):
        monkeypatch.setattr(Producer, name, None)
    ways = (lambda: producer.put("turns", b"x"), lambda: producer.put_async("turns", b"x").result(60),
            lambda: producer.put_many("turns", [b"x"]))
    queues = [way().queue_id for _ in range(4) for way in ways]
    assert queues == [(queues[0] + number) % 3 for number in range(12)]
    assert producer.put("T", b"x").queue_id == 0
    producer._turns["T"].until_ns = 0
    with pytest.raises(TypeError):  # Python must look at topics.json again
        producer.put("T", b"x")


@in_async_mode
def test_an_event_loop_does_not_wait_for_the_lock(producer):
    async def submit() -> PutFuture:
        return producer.put_async("T", b"x")

    with submitter(producer).lock:  # as another thread has it that waits for its answer
        future = asyncio.run(submit())
    assert future.result(60).queue_offset == 1
    assert producer.put_async("T", b"y").result(60).queue_offset == 2


def test_a_put_async_without_room_is_refused_after_one_timeout(make_parts, monkeypatch):
    parts = make_parts(session_ring_bytes_default=1 << 20, put_timeout_ms=300)
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        parts.workers[native.WRITER].send_signal(signal.SIGSTOP)
        monkeypatch.setattr(Submitter, "submit", None)  # the slow path would wait once more
        try:
            futures = [producer.put_async("T", bytes(30_000))]
            while not futures[-1].done():
                futures.append(producer.put_async("T", bytes(30_000)))
        finally:
            parts.workers[native.WRITER].send_signal(signal.SIGCONT)
        refused = futures.pop().result(0)
        assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE and "made no room in 0.3 s" in refused.reason
        assert not refused.indeterminate and (refused.topic, refused.queue_id) == ("T", 0)
        assert [future.result(60).queue_offset for future in futures] == list(range(1, len(futures) + 1))


@in_async_mode
def test_a_signal_handler_ends_a_put_async_that_waits_for_room(parts, producer, stopped_writer):
    stopped_writer()

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before, futures = signal.signal(signal.SIGALRM, interrupt), []
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:
                futures.append(producer.put_async("T", bytes(30_000), queue_id=0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not submitter(producer).lock.locked()
    parts.workers[native.WRITER].send_signal(signal.SIGCONT)
    assert [future.result(60).queue_offset for future in futures] == list(range(1, len(futures) + 1))


@pytest.mark.parametrize("wait", ["for room", "for an answer"])
@in_async_mode
def test_a_handler_that_forks_within_a_wait_leaves_two_programs_with_a_session_each(parts, producer, stopped_writer, wait):
    writer = parts.workers[native.WRITER]
    stopped_writer()
    found: list[int] = []

    def fork(number, frame) -> None:
        found.append(os.fork())
        if found[0]:
            writer.send_signal(signal.SIGCONT)

    before, futures = signal.signal(signal.SIGALRM, fork), []
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        if wait == "for room":
            while not found:
                futures.append(producer.put_async("T", bytes(30_000)))
        else:
            futures.append(producer.put_async("T", b"x"))
            futures[0].result(60)
        if found == [0]:
            is_submitted_here = wait == "for room"  # by the child, which found no room in the ring of its parent
            os._exit(0 if futures[-1].result(60).ok == is_submitted_here and producer.put("U", b"x").ok else 1)
    except BaseException:
        if found == [0]:
            os._exit(2)
        raise
    finally:
        signal.signal(signal.SIGALRM, before)
    assert os.waitstatus_to_exitcode(os.waitpid(found[0], 0)[1]) == 0
    offsets = [future.result(60).queue_offset for future in futures]
    assert offsets == sorted(offsets) and len(set(offsets)) == len(futures)
    by_child = wait == "for room"
    assert producer.put("T", b"after").queue_offset == len(futures) + 1 + by_child


def test_a_fork_while_a_session_ends_leaves_two_programs(make_parts):
    """As a signal handler in its end may make it; the future waits for the disk."""
    parts = make_parts(mode=native.MODE_SYNC, session_ring_bytes_default=1 << 20)
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        flusher = parts.workers[native.FLUSHER]
        flusher.send_signal(signal.SIGSTOP)
        future = producer.put_async("T", b"x")
        eventually(lambda: future.is_answered, "the writer has answered")
        front, found = submitter(producer).front, []

        def fork(number, frame) -> None:
            found.append(os.fork())
            if found[0]:
                flusher.send_signal(signal.SIGCONT)

        before = signal.signal(signal.SIGALRM, fork)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        front.give_up_ns = time.monotonic_ns() + 60_000_000_000
        try:
            with submitter(producer).lock:
                front.end()
            if found == [0]:
                os._exit(1 if future.result(0).ok else 0)
        finally:
            if found == [0]:
                os._exit(2)
            signal.signal(signal.SIGALRM, before)
            flusher.send_signal(signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(found[0], 0)[1]) == 0
        assert future.result(60).ok


@in_async_mode
def test_a_fork_while_another_thread_frees_an_answers_slot_holds_up_no_child(parts, producer):
    future = producer.put_async("T", b"x")
    session = submitter(producer).native
    session.pointer.finishing = 1  # as that thread leaves it in the child
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # for a wait that never ends
        del future
        os._exit(0 if producer.put_async("T", b"y").result(20).ok else 1)
    session.pointer.finishing = 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@in_async_mode
def test_a_fork_while_other_threads_put_leaves_both_programs_whole(parts, producer):
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            futures = [producer.put_async("T", b"x") for _ in range(20)]
            assert producer.put("T", b"x").ok and producer.put_many("T", [bytes(50_000)] * 2).ok
            assert all(future.result(60).ok for future in futures)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            future = producer.put_async("T", b"x")
            pid = os.fork()
            if pid == 0:
                known = future.result(0)  # or it is not known here
                os._exit(0 if producer.put("T", b"y").ok and known is not None else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert future.result(60).ok
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_closing_with_thousands_of_futures_resolves_all(parts, producer):
    futures = [producer.put_async("T", b"x") for _ in range(PLACES - 100)]
    called: list[PutFuture] = []
    for future in futures[::100]:
        future.add_done_callback(called.append)
    del futures[1::7]
    producer.close()
    assert all(future.done() and future.result(0).ok for future in futures)
    assert len(called) == len(range(0, PLACES - 100, 100))


def test_many_answered_futures_that_wait_for_the_disk_may_be_dropped_in_any_order(make_parts, rng):
    parts = make_parts(mode=native.MODE_SYNC, session_ring_bytes_default=1 << 20)
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        futures = {n: producer.put_async("T", b"x") for n in range(1, 20_001)}  # five times as many as places
        for n in rng.sample(sorted(futures), 9_000):
            del futures[n]
        order = rng.sample(sorted(futures), len(futures))
        assert all(futures.pop(n).result(60).queue_offset == n for n in order[:5000])
        producer.close()
        assert all(future.result(0).queue_offset == n for n, future in futures.items())


def test_a_future_that_is_answered_while_its_session_ends_waits_for_the_disk(make_parts):
    parts = make_parts(mode=native.MODE_SYNC, session_ring_bytes_default=1 << 20)
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        writer, flusher = parts.workers[native.WRITER], parts.workers[native.FLUSHER]
        flusher.send_signal(signal.SIGSTOP)  # answered is not yet durable
        writer.send_signal(signal.SIGSTOP)
        futures = [producer.put_async("T", b"x") for _ in range(3)]
        front = submitter(producer).front
        front.give_up_ns = time.monotonic_ns() + 60_000_000_000
        closing = threading.Thread(target=producer.close)
        try:
            closing.start()
            writer.send_signal(signal.SIGCONT)
            eventually(lambda: front.waiting == 0 and front.has_open, "the answers are taken")
            assert closing.is_alive()
        finally:
            for worker in (writer, flusher):
                worker.send_signal(signal.SIGCONT)
            closing.join(60)
        assert [future.result(0).status for future in futures] == [PutStatus.PUT_OK] * 3


def test_threads_that_ask_and_add_callbacks_while_the_producer_closes(parts, producer, rng):
    futures = [producer.put_async("T", b"x") for _ in range(3000)]
    seeds = [rng.random() for _ in range(4)]

    def work(seed: float) -> None:
        chance = random.Random(seed)
        for _ in range(1500):
            future = chance.choice(futures)
            match chance.randrange(4):
                case 0:
                    assert future.result(60).ok, future.result(0).reason
                case 1:
                    future.done()
                case 2:
                    future.add_done_callback(lambda _: None)
                case 3:
                    assert future.exception(60) is None

    failed: list[BaseException] = []

    def watched(seed: float) -> None:
        try:
            work(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=watched, args=(seed,)) for seed in seeds]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        producer.close()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not [str(error) for error in failed]
    assert not [(number, future.result(60).reason) for number, future in enumerate(futures) if not future.result(60).ok]
    assert sorted(future.result(60).queue_offset for future in futures) == list(range(1, 3001))


_LEFT_AT_EXIT = """
import sys, threading, time
import pyengine
producer = pyengine.connect(sys.argv[1])
assert producer.put("T", b"first").ok
def work(number):
    while True:
        if number == 0:
            producer.put_many("T", [bytes(50_000)] * 3)
        elif number == 1:
            kept.extend(producer.put_async("T", b"x") for _ in range(100))
            kept[-1].add_done_callback(lambda _: producer.put("T", b"from a callback"))
        elif number == 2 and kept:
            kept[-1].result(60)
        else:
            producer.put("T", b"x")
kept = []
for number in range(4):
    threading.Thread(target=work, args=(number,), daemon=True).start()
time.sleep(0.2)
print("ends")
"""


@in_async_mode
def test_a_program_may_end_with_puts_of_all_kinds_under_way(parts):
    for _ in range(5):
        ended = subprocess.run([sys.executable, "-c", _LEFT_AT_EXIT, str(parts.owner.root)], env=child_environment(),
                               capture_output=True, text=True, timeout=scaled_timeout_s(60), check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


_IN_ANOTHER_INTERPRETER = """
import pyengine._front
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
made = interpreters.create("legacy") if hasattr(interpreters, "new_config") else interpreters.create(isolated=False)
found = interpreters.{run}(made, {code!r})
print("refused" if found is None else found)
"""
_REFUSED = """
try:
    import pyengine._front
except ImportError as error:
    assert "main interpreter" in str(error), error
else:
    raise SystemExit("it was loaded twice")
"""


def test_another_interpreter_of_the_process_is_refused():
    run = "run_string" if sys.version_info < (3, 13) else "exec"
    ended = subprocess.run([sys.executable, "-c", _IN_ANOTHER_INTERPRETER.format(run=run, code=_REFUSED)], env=child_environment(),
                           capture_output=True, text=True, timeout=scaled_timeout_s(60), check=False)
    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stderr


def test_a_put_to_a_new_session_follows_the_size_limit_of_that_session(make_parts):
    """The limits of the fast path are those of the session that is put to, also when it comes between."""
    parts = [make_parts(session_ring_bytes_default=1 << 20, segment_bytes=8 << 20)]
    with Producer(lambda limit_s: open_session(parts[-1].owner.root), EngineConfig()) as producer:
        assert producer.put("T", b"first").ok
        body = bytes(submitter(producer).body_bytes_max)
        assert producer.put("T", body).ok
        parts.append(make_parts(session_ring_bytes_default=1 << 18, segment_bytes=8 << 20))
        native.store(parts[0].control.state, "retired", 1)
        assert producer.put("T", body).ok and producer.put_async("T", body).result(60).ok and producer.put_many("T", [body]).ok
        assert submitter(producer).body_bytes_max < len(body)


@in_async_mode
def test_a_future_that_is_only_looked_at_is_done_when_the_engine_is_gone(parts, producer, stopped_writer):
    stopped_writer()
    looked, run = producer.put_async("T", b"x"), producer.put_async("T", b"x")
    others = [producer.put_async("T", b"x") for _ in range(2000)]
    native.store(parts.control.state, "retired", 1)
    eventually(looked.done, "it is resolved")
    eventually(lambda: not run.running(), "it is resolved")
    eventually(lambda: all(other.done() for other in others), "not one after another")
    assert looked.result(0).indeterminate and run.result(0).indeterminate and others[-1].result(0).indeterminate


@in_async_mode
def test_a_future_tells_whether_the_writer_has_answered(parts, producer, stopped_writer):
    answered = [producer.put_async("T", b"x") for _ in range(3)]
    answered[1].add_done_callback(lambda _: None)
    assert answered[2].result(30).ok
    answered[2].add_done_callback(lambda _: None)
    eventually(lambda: all(future.is_answered for future in answered), "all are answered")
    stopped_writer()
    waiting = [producer.put_async("T", b"x") for _ in range(2)]
    waiting[1].add_done_callback(lambda _: None)
    assert not any(future.is_answered for future in waiting)


@in_async_mode
def test_a_signal_handler_that_puts_within_a_put_gets_a_runtime_error(parts, producer, stopped_writer):
    """It would wait for itself."""
    stopped_writer()
    told: list[str] = []

    def put(number, frame) -> None:
        if submitter(producer).lock.locked():
            with pytest.raises(RuntimeError) as error:
                producer.put("T", b"from a handler")
            told.append(str(error.value))
            signal.setitimer(signal.ITIMER_REAL, 0)
            parts.workers[native.WRITER].send_signal(signal.SIGCONT)

    before, futures = signal.signal(signal.SIGALRM, put), []
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)
    try:
        while not told:
            futures.append(producer.put_async("T", bytes(30_000)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "within a call of this producer" in told[0]
    assert all(future.result(60).ok for future in futures)
