"""A put means the same whichever way it is made: in C or by Python, one message or many, waited for, asked, awaited or called back."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from fix_client import submitter
from fix_parts import MODES
from fix_put_ways import BLOCKING, LARGE_BYTES, WAYS, bodies
from pyengine.ipc.control_block import now_ms
from pyengine.native import control as native
from pyengine.results import PutError, PutIndeterminateError, PutNotDurableError, PutRefusedError, PutStatus
from waiting import eventually, scaled_timeout_s

HOUR_MS = 3_600_000  # a put that only such a timeout ends runs into the timeout of its test
STORES = {"segment_bytes": 1 << 22, "session_ring_bytes_default": 1 << 20, "sessions_max": 64}


def offset_of(result) -> int:
    return result.first_queue_offset if hasattr(result, "first_queue_offset") else result.queue_offset


def start_of(result) -> int:
    return result.first_physical_offset if hasattr(result, "first_physical_offset") else result.physical_offset


def one_after_another(producer) -> dict[str, object]:
    """Return what each way returns or raises, by its name."""
    found = {}
    for name, way in WAYS.items():
        try:
            found[name] = way(producer)
        except PutError as error:
            found[name] = error
    return found


def at_once(parts, stopped: int, act: Callable[[], None]) -> dict[str, object]:
    """Return what all ways return or raise, each in a thread with a producer of its own, where `act` follows their submission.

    Meanwhile the worker `stopped` does nothing.
    """
    def run(way, producer):
        try:
            return way(producer)
        except PutError as error:
            return error

    with ExitStack() as stack:
        producers = {name: stack.enter_context(parts.producer(refusals="raise")) for name in WAYS}
        for producer in producers.values():
            assert producer.put("T", b"first").ok
        threads = stack.enter_context(ThreadPoolExecutor(len(WAYS)))
        parts.workers[stopped].send_signal(signal.SIGSTOP)
        try:
            waiting = {name: threads.submit(run, WAYS[name], producer) for name, producer in producers.items()}
            puts = [submitter(producer) for producer in producers.values()]
            eventually(lambda: all(one.native.sequence == 2 for one in puts), "all are submitted")
            eventually(lambda: all(one.front.has_open for one in puts), "none waits in the call of its put")
            act()
            return {name: each.result(scaled_timeout_s(60)) for name, each in waiting.items()}
        finally:
            parts.workers[stopped].send_signal(signal.SIGCONT)


@pytest.mark.parametrize("mode", MODES)
def test_each_way_stores_its_message_and_returns_where_it_is(make_parts, mode):
    parts = make_parts(**STORES, **MODES[mode])
    with parts.producer(refusals="raise") as producer:
        assert producer.put("T", b"first").ok
        found = one_after_another(producer)
        for number, (name, result) in enumerate(found.items()):
            assert (result.status, result.topic, result.queue_id, result.reason, result.indeterminate, result.stored) == (
                PutStatus.PUT_OK, "T", 0, "", False, True), name
            assert offset_of(result) == number + 1 and result.count == 1, name
            if mode == "sync":
                assert native.load_position(parts.control.flushed) > start_of(result), name
        assert not [name for name in parts.owner.folder.names() if name.startswith("side")]
    stored = bodies(parts)
    assert stored == [b"first", *(bytes(LARGE_BYTES) if "large" in name else b"x" for name in found)]


@pytest.mark.parametrize("state", ["closed", pytest.param("frozen", marks=pytest.mark.ci), "read-only", "busy"])
def test_each_way_is_refused_with_the_same_sentence(make_parts, state):
    parts = make_parts(**STORES, os_page_cache_busy_timeout_ms=1000)
    for refusals in ("raise", "return"):
        with parts.producer(refusals=refusals) as producer:
            if state != "busy" and refusals == "raise":
                assert producer.put("T", b"first").ok
            if state == "closed":
                producer.close()
            elif state == "frozen":
                native.freeze(parts.control, native.FLUSHER, 5, "the flusher could not make it durable (Input/output error)")
            elif state == "read-only":
                native.store(parts.control.state, "state", native.STATE_READ_ONLY)
            elif refusals == "raise":
                parts.kill(native.WRITER)
                native.store(parts.control.writer, "pass_started_ms", now_ms() - 2000)  # as if it were caught in a page fault
            found = one_after_another(producer)
        if refusals == "raise":
            assert {type(error) for error in found.values()} == {PutRefusedError}
            assert all(error.result.reason in str(error) for error in found.values())
            found = {name: error.result for name, error in found.items()}
        assert len({(result.status, result.reason) for result in found.values()}) == 1
        assert {(result.ok, result.stored, result.indeterminate, result.count) for result in found.values()} == {(False,) * 3 + (0,)}
        status = PutStatus.OS_PAGECACHE_BUSY if state == "busy" else PutStatus.SERVICE_NOT_AVAILABLE
        says = {"closed": "this producer is closed", "frozen": "read-only", "read-only": "read-only", "busy": "again later"}[state]
        assert found["put"].status is status and says in found["put"].reason
    if state == "busy":
        parts.start(native.WRITER)
        eventually(lambda: native.load(parts.control.writer, "pass_started_ms") == 0, "the next writer ended the pass")
        with parts.producer() as producer:
            assert producer.put("T", b"1").queue_offset == 0, "nothing of what was refused had been submitted"


@pytest.mark.parametrize(("identity", "status"), [
    ({"mode": native.MODE_SYNC, "sync_flush_timeout_ms": 30}, PutStatus.FLUSH_DISK_TIMEOUT),
    pytest.param({"role": native.SYNC_MASTER, "replicates": 1, "slave_timeout_ms": 30}, PutStatus.FLUSH_SLAVE_TIMEOUT,
                 marks=pytest.mark.ci),
    ({"role": native.SYNC_MASTER, "replicates": 1, "slave_timeout_ms": HOUR_MS}, PutStatus.SLAVE_NOT_AVAILABLE),
], ids=["no sync", "no slave confirms", "no slave"])
def test_each_way_says_that_a_message_is_stored_and_not_durable(make_parts, identity, status):
    """From the writer's answer on: the hour that a put may wait for that answer does not count."""
    parts = make_parts(**STORES, **identity, put_timeout_ms=HOUR_MS)
    native.store(parts.control.replicator, "slaves_connected", int(status is PutStatus.FLUSH_SLAVE_TIMEOUT))
    parts.kill(native.FLUSHER)
    for refusals in ("raise", "return"):
        with parts.producer(refusals=refusals) as producer:
            assert producer.put("T", b"first", wait=False).ok
            found = one_after_another(producer)
        if refusals == "raise":
            assert {type(error) for error in found.values()} == {PutNotDurableError}
            found = {name: error.result for name, error in found.items()}
        assert {(result.status, result.stored, result.indeterminate) for result in found.values()} == {(status, True, False)}
        assert all(result.reason.startswith("stored, but") for result in found.values())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_each_way_gets_an_answer_that_comes_late(make_parts, mode):
    parts = make_parts(**STORES, **MODES[mode], sync_flush_timeout_ms=HOUR_MS)
    found = at_once(parts, native.WRITER, lambda: parts.workers[native.WRITER].send_signal(signal.SIGCONT))
    assert sorted(offset_of(result) for result in found.values()) == list(range(len(WAYS), 2 * len(WAYS)))


def test_each_way_gets_the_answer_of_the_next_writer(make_parts):
    parts = make_parts(**STORES)

    def replace() -> None:
        parts.kill(native.WRITER)
        parts.start(native.WRITER)

    found = at_once(parts, native.WRITER, replace)
    assert sorted(offset_of(result) for result in found.values()) == list(range(len(WAYS), 2 * len(WAYS)))


def test_each_way_waits_for_a_sync_that_comes_late(make_parts):
    parts = make_parts(**STORES, **MODES["sync"], sync_flush_timeout_ms=HOUR_MS)
    found = at_once(parts, native.FLUSHER, lambda: parts.workers[native.FLUSHER].send_signal(signal.SIGCONT))
    assert all(result.ok for result in found.values())


@pytest.mark.parametrize("what", ["the engine is replaced", "the session is closed"])
def test_each_way_is_indeterminate_without_an_answer(make_parts, what):
    parts = make_parts(**STORES, put_timeout_ms=HOUR_MS)

    def act() -> None:
        if what == "the engine is replaced":
            native.store(parts.control.state, "retired", 1)  # as a start does that recovers the store
        else:
            for row in parts.control.sessions:
                if native.load(row, "state") == native.SESSION_OPEN:
                    native.store(row, "state", native.SESSION_DEAD)

    found = at_once(parts, native.WRITER, act)
    assert {type(error) for error in found.values()} == {PutIndeterminateError}
    assert all("it may or may not be stored" in str(error) and error.result.status is PutStatus.UNKNOWN_ERROR for error in found.values())


def test_a_put_that_times_out_is_indeterminate_and_later_ones_go_on(make_parts):
    parts = make_parts(**STORES, put_timeout_ms=200)
    with parts.producer(refusals="raise") as producer:
        assert producer.put("T", b"first").ok
        parts.workers[native.WRITER].send_signal(signal.SIGSTOP)
        try:
            for name, way in BLOCKING.items():
                with pytest.raises(PutIndeterminateError, match="may or may not be stored; look for it") as raised:
                    way(producer)
                assert raised.value.result.indeterminate, name
        finally:
            parts.workers[native.WRITER].send_signal(signal.SIGCONT)
        assert producer.put("T", b"after").queue_offset == len(BLOCKING) + 1, "all had been submitted"
        eventually(lambda: not [name for name in parts.owner.folder.names() if name.startswith("side")], "side objects are removed")


def test_each_way_may_be_used_in_a_callback(make_parts):
    """Also by a large put, and while all places for answers are in use: it takes its answer itself."""
    parts, found = make_parts(**STORES), queue.SimpleQueue()
    with parts.producer(refusals="raise") as producer:
        assert producer.put("T", b"first").ok
        parts.workers[native.WRITER].send_signal(signal.SIGSTOP)
        try:
            first = producer.put_async("T", b"x")
            first.add_done_callback(lambda _: found.put([producer.put("T", b"x").ok, *(way(producer).ok for way in BLOCKING.values())]))
            kept = [producer.put_async("T", b"x") for _ in range(2000)]
            for future in kept:
                future.add_done_callback(lambda _: None)
        finally:
            parts.workers[native.WRITER].send_signal(signal.SIGCONT)
        assert found.get(timeout=scaled_timeout_s(60)) == [True] * (len(BLOCKING) + 1)
        assert all(future.result(scaled_timeout_s(60)).ok for future in kept)


def test_threads_share_a_producer_in_all_ways(make_parts):
    parts, found, failed = make_parts(**STORES, **MODES["sync"]), [], []
    small = [way for name, way in WAYS.items() if "large" not in name]

    def work() -> None:
        try:
            for way in small:
                found.append(offset_of(way(producer)))
        except BaseException as error:
            failed.append(error)

    with parts.producer(refusals="raise") as producer:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed and sorted(found) == list(range(6 * len(small)))
