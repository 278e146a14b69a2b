"""A producer in a forked child: a session of its own, and nothing of its parent's is touched or waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from fix_client import locks_of
from fix_golden import usual
from fix_parts import MODES
from fix_put_ways import WAYS
from pyengine import UsageError
from pyengine.native import control as native
from pyengine.results import PutIndeterminateError, PutRefusedError
from waiting import eventually, scaled_timeout_s


@pytest.fixture(params=usual(["async", "sync"], ["sync"], pytest.mark.ci))
def parts(request, make_parts):
    return make_parts(session_ring_bytes_default=1 << 20, segment_bytes=1 << 22, sync_flush_timeout_ms=60_000, **MODES[request.param])


@pytest.fixture
def producer(parts):
    with parts.producer(refusals="raise") as producer:
        assert producer.put("T", b"first").ok
        yield producer


@pytest.fixture
def stopped_writer(parts):
    """stopped_writer() stops it; it goes on with the function that is returned, and at the end."""
    writer = parts.workers[native.WRITER]

    def stop():
        os.kill(writer.pid, signal.SIGSTOP)
        return lambda: os.kill(writer.pid, signal.SIGCONT)  # Popen.send_signal does nothing in a forked child

    yield stop
    writer.send_signal(signal.SIGCONT)


def in_child(run) -> str:
    """Return what `run` returns or raises in a forked child, which may take a minute."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(scaled_timeout_s(60)))
        try:
            said = repr(run())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said
    return said


def sessions(parts) -> int:
    return sum(native.load(slot, "state") == native.SESSION_OPEN for slot in parts.control.sessions)


def test_the_first_put_of_a_child_opens_a_session_whichever_it_is(parts, producer):
    for name, way in WAYS.items():
        def child(way=way):
            results = [way(producer).ok for _ in range(3)]
            found = sessions(parts)
            producer.close()
            return results, found, sessions(parts)

        assert in_child(child) == repr(([True] * 3, 2, 1)), name
    assert producer.put("U", b"after").ok, "the parent goes on in its own"


@pytest.mark.ci
def test_children_of_children_and_many_at_once_have_sessions_of_their_own(parts, producer):
    def grandchild():
        assert producer.put("T", b"child").ok
        return in_child(lambda: producer.put("T", b"grandchild").ok)

    assert in_child(grandchild) == repr("True")
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            os._exit(int(not all(producer.put_async("T", b"x").result(60).ok for _ in range(20))))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert producer.put("T", b"after").queue_offset == 163


def test_a_child_that_puts_nothing_leaves_its_parents_session_open(parts, producer):
    def child():
        with producer:
            pass
        return producer.put_async("T", b"x").exception(60)

    assert in_child(child).startswith("PutRefusedError") and sessions(parts) == 1
    assert producer.put("T", b"after").queue_offset == 1


def test_a_closed_producer_stays_closed_in_a_child(parts, producer):
    producer.close()
    assert in_child(lambda: producer.put("T", b"x")).startswith("PutRefusedError")


def test_a_dropped_producer_of_a_child_ends_its_session(parts):
    producers = [parts.producer()]
    assert producers[0].put("T", b"x").ok

    def child():
        assert producers[0].put("T", b"x").ok and sessions(parts) == 2
        producers.clear()
        eventually(lambda: sessions(parts) == 1, "the session of the child ends")

    assert in_child(child) == "None"
    assert producers[0].put("T", b"x").queue_offset == 2


@pytest.mark.parametrize("what", usual(["submitted", "with a callback", "slow", "many", "awaited"], ["slow", "awaited"], pytest.mark.ci))
def test_the_parents_pending_futures_are_indeterminate_in_the_child(parts, producer, stopped_writer, what):
    resume = stopped_writer()
    called = []
    future = {"slow": lambda: producer.put_async("T", b"x", keys="k"),
              "many": lambda: producer.put_many_async("T", [b"x"])}.get(what, lambda: producer.put_async("T", b"x"))()
    if what == "with a callback":
        future.add_done_callback(called.append)

    async def wait():
        return await future

    def child():
        try:
            asyncio.run(wait()) if what == "awaited" else future.result(60)
        except PutIndeterminateError as error:
            return "the parent of this process" in str(error), future.done(), called
        return "no error"

    assert in_child(child) == repr((True, True, []))
    resume()
    assert future.result(60).ok
    eventually(lambda: len(called) == (what == "with a callback"), "the callback of the parent")


def test_puts_that_wait_for_room_in_the_parent_are_indeterminate_in_the_child(parts, producer, stopped_writer):
    resume = stopped_writer()

    async def submit():
        return [producer.put_async("T", bytes(100_000)) for _ in range(20)]

    futures = asyncio.run(submit())

    def child():
        return {type(future.exception(60)).__name__ for future in futures}

    assert in_child(child) == repr({"PutIndeterminateError"})
    resume()
    assert all(future.result(60).ok for future in futures)


def test_locks_that_threads_of_the_parent_have_hold_up_no_child(parts, producer, stopped_writer):
    resume = stopped_writer()
    futures = [producer.put_async("T", b"x", keys="k") for _ in range(3)]
    locks = locks_of(producer, futures)
    are_held, go_on = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.__enter__()
        are_held.set()
        go_on.wait()
        for lock in locks:
            lock.__exit__(None, None, None)

    holder = threading.Thread(target=hold)
    holder.start()
    assert are_held.wait(60)

    def child():
        kinds = {type(future.exception(60)).__name__ for future in futures}
        resume()
        return kinds, producer.put("T", b"x").ok, producer.put_async("T", b"x", keys="k").result(60).ok, producer.close()

    try:
        assert in_child(child) == repr(({"PutIndeterminateError"}, True, True, None))
    finally:
        go_on.set()
        holder.join()
    assert all(future.result(60).ok for future in futures)


def test_a_child_has_transactions_of_its_own_and_ends_none_of_its_parents(make_engine_store):
    store, producer = make_engine_store
    with producer.transaction(checker=lambda message: "commit") as transaction:
        transaction.put("T", b"parent")

        def child():
            with pytest.raises(UsageError, match="begun before a fork"):
                transaction.put("T", b"no")
            with producer.transaction() as own:
                own.put("T", b"child")
            return own.results[0].ok, producer.check_transactions()

        assert in_child(child) == repr((True, 0))
    assert transaction.results[0].ok

    def ends_the_block():
        block = producer.transaction()
        mine = block.__enter__()
        mine.put("T", b"x")
        said = in_child(lambda: block.__exit__(None, None, None))
        in_child(lambda: block.__exit__(ValueError, ValueError("the child's own"), None))
        block.__exit__(ValueError, ValueError("rolled back by the parent"), None)
        return said

    assert "the parent ends it" in ends_the_block()


@pytest.fixture
def make_engine_store(tmp_path):
    import pyengine

    with pyengine.Engine(tmp_path / "store", mapped_file_size_commit_log_bytes=1 << 22) as engine, engine.connect() as producer:
        assert producer.put("T", b"first").ok
        yield tmp_path / "store", producer


def test_a_consumer_in_a_child_says_what_to_do(make_engine_store):
    import pyengine

    store, _ = make_engine_store
    with pyengine.consume(store, "T", group="g", from_="first") as consumer:
        assert consumer.pull(timeout_s=60)
        assert "make a new one in the child" in in_child(lambda: consumer.pull(timeout_s=1))


def test_refused_puts_are_errors_in_a_child_too(parts, producer):
    def child():
        with pytest.raises(PutRefusedError):
            producer.put("a/b", b"x")
        return producer.put("T", b"x").ok

    assert in_child(child) == "True"
