"""Awaited puts: what a task of an event loop gets, whatever happens to its task, its loop, its process and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fix_client import awaiting_loops, submitter
from pyengine.client import pending_puts
from pyengine.client.outgoing import RawMessage
from pyengine.client.pending_puts import LoopPuts
from pyengine.formats.record import BatchMember
from pyengine.native import control as native
from pyengine.results import PutResult, PutStatus
from waiting import eventually, scaled_timeout_s

ROOMY = {"session_ring_bytes_default": 1 << 20}


@pytest.fixture
def parts(make_parts):
    return make_parts(**ROOMY)


@pytest.fixture
def producer(parts):
    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        yield producer


@pytest.fixture
def stopped(parts):
    """stopped(kind) stops a worker; it goes on at the end, or with the function that is returned."""
    resumes = []

    def stop(kind: int, of=parts):
        worker = of.workers[kind]
        worker.send_signal(signal.SIGSTOP)
        resumes.append(lambda: worker.send_signal(signal.SIGCONT))
        return resumes[-1]

    yield stop
    for resume in resumes:
        resume()


@pytest.fixture
def without_threads(monkeypatch):
    """A function that makes a context in which no thread can be started."""
    def start(run, arguments):
        raise RuntimeError("can't start new thread")

    @contextlib.contextmanager
    def none_can_be_had():
        with monkeypatch.context() as patched:
            patched.setattr(pending_puts, "_thread", SimpleNamespace(start_new_thread=start))
            yield

    return none_can_be_had


async def until(check, what: str) -> None:
    """Like eventually(), in a loop that goes on."""
    ends_s = time.monotonic() + scaled_timeout_s(30)
    while not check():
        assert time.monotonic() < ends_s, what
        await asyncio.sleep(0.001)


async def put(producer, body: bytes = b"x", **options) -> PutResult:
    return await producer.put_async("T", body, **options)


def counted_wakes(loop) -> list:
    """Let the loop note each call of call_soon_threadsafe."""
    wakes, call = [], loop.call_soon_threadsafe

    def counted(*given, **named):
        wakes.append(given)
        return call(*given, **named)

    loop.call_soon_threadsafe = counted
    return wakes


def test_a_hundred_tasks_get_the_results_of_their_own_puts(producer):
    async def task(number: int) -> list[PutResult]:
        return [await put(producer, b"%d" % number, queue_id=number) for _ in range(20)]

    async def run():
        return await asyncio.gather(*map(task, range(100)))

    for number, results in enumerate(asyncio.run(run())):
        first = 1 if number == 0 else 0  # the fixture's put was to queue 0
        assert [(result.queue_id, result.queue_offset) for result in results] == [(number, first + n) for n in range(20)]


def test_answers_that_come_together_wake_the_loop_once(parts, producer, stopped):
    """Not once for each put, which costs ten times what the put costs."""
    async def run():
        wakes = counted_wakes(asyncio.get_running_loop())
        resume = stopped(native.WRITER)
        tasks = [asyncio.create_task(put(producer)) for _ in range(300)]
        await until(lambda: submitter(producer).front.waiting == 300, "all are submitted")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not wakes and not any(task.done() for task in tasks)
        resume()
        results = await asyncio.gather(*tasks)
        assert sorted(result.queue_offset for result in results) == list(range(1, 301))
        assert 1 <= len(wakes) <= 30, "a writer that continues answers what has piled up in few passes"

    asyncio.run(run())


def test_an_answer_that_is_there_wakes_nobody(producer):
    async def run():
        wakes = counted_wakes(asyncio.get_running_loop())
        future = producer.put_async("T", b"x")
        eventually(lambda: future.is_answered, "answered")
        assert (await future).queue_offset == 1 and (await future).queue_offset == 1
        assert not wakes

    asyncio.run(run())


def test_a_cancelled_put_is_stored_and_holds_up_no_other(parts, producer, stopped):
    async def run():
        resume = stopped(native.WRITER)
        futures = [producer.put_async("T", b"%d" % n) for n in range(4)]

        async def wait(future):
            return await future

        tasks = [asyncio.create_task(wait(future)) for future in futures]
        at_once = asyncio.create_task(wait(futures[0]))
        await asyncio.sleep(0)
        at_once.cancel()  # while it looks for the answer
        await until(lambda: awaiting_loops(producer), "the tasks wait")
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        tasks[2].cancel()
        for task in (at_once, tasks[0], tasks[2]):
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(futures[1]), 0.02)
        resume()
        assert [(await task).queue_offset for task in (tasks[1], tasks[3])] == [2, 4]
        assert [(await future).queue_offset for future in futures] == [1, 2, 3, 4]
        assert not awaiting_loops(producer)

    asyncio.run(run())


def test_one_future_serves_several_tasks_a_callback_and_a_thread(parts, producer, stopped):
    called = []

    async def run():
        resume = stopped(native.WRITER)
        future = producer.put_async("T", b"x")

        async def wait():
            return await future

        before = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0.01)  # they wait for the batch
        future.add_done_callback(called.append)  # from now on a full Future
        after = [asyncio.create_task(wait()) for _ in range(3)]
        thread = threading.Thread(target=lambda: called.append(future.result(60)))
        thread.start()
        await asyncio.sleep(0.01)
        resume()
        results = {await task for task in before + after}
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        assert results == {future.result(0)} and results.pop().queue_offset == 1

    asyncio.run(run())
    eventually(lambda: len(called) == 2, "the callback and the thread")


def test_loops_in_several_threads_share_a_producer(producer):
    results, errors = [], []

    async def task():
        for _ in range(50):
            results.append((await put(producer)).queue_offset)

    async def run():
        await asyncio.gather(*(task() for _ in range(20)))

    def loop():
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled_timeout_s(60))
    assert not errors and sorted(results) == list(range(1, 4001))


def test_a_loop_that_closes_leaves_the_producer_whole(parts, producer, stopped):
    resume = stopped(native.WRITER)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(put(producer)) for _ in range(5)]
    loop.call_later(0.05, loop.stop)
    loop.run_forever()
    assert not any(task.done() for task in tasks)
    loop.set_exception_handler(lambda *_: None)  # it is told that tasks were destroyed that wait
    loop.close()
    resume()
    assert asyncio.run(put(producer)).queue_offset == 6
    eventually(lambda: not awaiting_loops(producer), "the closed loop is forgotten")


def test_a_loop_that_is_stopped_gets_the_answers_when_it_runs_again(producer, stopped):
    resume = stopped(native.WRITER)
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(put(producer)) for _ in range(5)]
    loop.call_later(0.05, loop.stop)
    loop.run_forever()
    resume()
    assert producer.put("T", b"x").ok
    results = loop.run_until_complete(asyncio.gather(*tasks))
    loop.close()
    assert [result.queue_offset for result in results] == [1, 2, 3, 4, 5]


def test_the_loop_goes_on_while_a_put_waits_for_its_sync(make_parts, stopped):
    parts = make_parts(mode=native.MODE_SYNC, sync_flush_timeout_ms=60_000, **ROOMY)

    async def run(producer):
        resume = stopped(native.FLUSHER, parts)
        tasks = [asyncio.create_task(put(producer, b"%d" % n)) for n in range(50)]
        await until(lambda: native.load_position(parts.control.wrote) > native.load_position(parts.control.flushed), "written")
        longest_s = 0.0
        for _ in range(200):
            began_s = time.monotonic()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.monotonic() - began_s)
        assert not any(task.done() for task in tasks) and longest_s < scaled_timeout_s(5)
        wakes = counted_wakes(asyncio.get_running_loop())
        resume()
        for result in await asyncio.gather(*tasks):
            assert native.load_position(parts.control.flushed) >= result.physical_offset + result.size_bytes
        assert len(wakes) <= 20, "one sync is for all that wait for it"

    with parts.producer() as producer:
        assert producer.put("T", b"first").ok
        asyncio.run(run(producer))


def test_a_put_without_a_slave_waits_for_the_disk_before_it_says_so(make_parts, stopped):
    parts = make_parts(mode=native.MODE_SYNC, role=native.SYNC_MASTER, replicates=1, sync_flush_timeout_ms=60_000,
                       slave_timeout_ms=60_000, **ROOMY)

    async def run(producer):
        resume = stopped(native.FLUSHER, parts)
        task = asyncio.create_task(put(producer))
        await until(lambda: native.load_position(parts.control.wrote) > native.load_position(parts.control.flushed), "written")
        await asyncio.sleep(0.2)
        assert not task.done()
        resume()
        result = await task
        assert result.status is PutStatus.SLAVE_NOT_AVAILABLE
        assert native.load_position(parts.control.flushed) >= result.physical_offset + result.size_bytes

    with parts.producer() as producer:
        assert producer.put("T", b"first", wait=False).ok
        asyncio.run(run(producer))


def test_a_blocking_put_without_a_slave_waits_for_the_disk_before_it_says_so(make_parts, stopped):
    parts = make_parts(mode=native.MODE_SYNC, role=native.SYNC_MASTER, replicates=1, sync_flush_timeout_ms=60_000,
                       slave_timeout_ms=60_000, **ROOMY)
    with parts.producer() as producer, ThreadPoolExecutor(1) as thread:
        assert producer.put("T", b"first", wait=False).ok
        resume = stopped(native.FLUSHER, parts)
        answer = thread.submit(producer.put, "T", b"second")
        with pytest.raises(TimeoutError):  # more than the slice that the put itself waits
            answer.result(0.3)
        resume()
        result = answer.result(60)
        assert result.status is PutStatus.SLAVE_NOT_AVAILABLE
        assert native.load_position(parts.control.flushed) >= result.physical_offset + result.size_bytes


def test_closing_the_producer_in_the_loop_answers_its_tasks(parts, producer):
    async def run():
        tasks = [asyncio.create_task(put(producer)) for _ in range(50)]
        await asyncio.sleep(0)
        producer.close()
        return await asyncio.gather(*tasks)

    assert [result.queue_offset for result in asyncio.run(run())] == list(range(1, 51))


def test_closing_a_producer_whose_puts_have_no_answer_ends_their_tasks(parts, producer, stopped):
    async def run():
        resume = stopped(native.WRITER)
        tasks = [asyncio.create_task(put(producer)) for _ in range(10)]
        await until(lambda: awaiting_loops(producer), "the tasks wait")
        await asyncio.get_running_loop().run_in_executor(None, producer.close)
        results = await asyncio.gather(*tasks)
        resume()
        return results

    assert all(result.indeterminate for result in asyncio.run(run()))


def test_a_put_of_the_parent_that_a_forked_child_awaits_is_indeterminate(parts, producer, stopped):
    resume = stopped(native.WRITER)
    future = producer.put_async("T", b"x")
    child = os.fork()
    if child == 0:
        async def wait():
            return await future

        result = asyncio.run(wait())
        os._exit(int(not (result.indeterminate and "parent" in result.reason)))
    assert os.waitpid(child, 0)[1] == 0
    resume()
    assert future.result(60).ok


def test_a_loop_takes_results_itself_or_is_woken_where_it_gives_up(parts, producer, stopped):
    here, got = threading.get_ident(), []

    def then(future):
        assert threading.get_ident() == here
        got.append(future.result(0).status)

    async def run():
        loop = asyncio.get_running_loop()
        puts, wakes = LoopPuts(loop), counted_wakes(loop)
        puts.add(producer.put_raw_async(RawMessage("T", b"one")), then, is_taken=True)
        puts.add(producer.put_batch_raw_async(RawMessage("T"), [BatchMember(b"two"), BatchMember(b"three")]), then, is_taken=True)
        puts.add(producer.put_raw_async(RawMessage("a/b", b"refused")), then, is_taken=True)
        puts.take(10_000_000_000)
        assert got == [PutStatus.PUT_OK, PutStatus.PUT_OK, PutStatus.MESSAGE_ILLEGAL] and not wakes
        resume = stopped(native.WRITER)
        for _ in range(3):
            puts.add(producer.put_raw_async(RawMessage("T", b"late")), then, is_taken=True)
        puts.take(1_000_000)
        assert len(got) == 3
        resume()
        await until(lambda: len(got) == 6, "the loop is woken")
        assert len(wakes) <= 3
        with submitter(producer).lock:  # as while another thread puts
            puts.add(producer.put_raw_async(RawMessage("T", b"submitted later, by another thread")), then, is_taken=True)
            puts.take(1_000_000)
        await until(lambda: len(got) == 7, "the loop is told")
        puts.add(producer.put_raw_async(RawMessage("T", b"at the end")), then)
        producer.close()
        await until(lambda: len(got) == 8, "the end of the producer resolves what is left")

    asyncio.run(run())


def test_a_loop_does_not_wait_itself_for_a_sync(make_parts, stopped):
    parts, got = make_parts(mode=native.MODE_SYNC, **ROOMY), []

    async def run(producer):
        puts = LoopPuts(asyncio.get_running_loop())
        stopped(native.FLUSHER, parts)()
        puts.add(producer.put_raw_async(RawMessage("T", b"one")), got.append, is_taken=True)
        began_s = time.monotonic()
        puts.take(60_000_000_000)
        assert time.monotonic() - began_s < scaled_timeout_s(20)
        await until(lambda: got, "the sync is done")

    with parts.producer() as producer:
        asyncio.run(run(producer))
    assert got[0].result(0).ok


@pytest.mark.parametrize("options", [
    {"keys": "k"}, {"properties": {"p": "v"}}, {"delay_level": 1}, {"sharding_key": "s"}, {"wait": False}, {"timeout_s": 60},
], ids=lambda options: next(iter(options)))
def test_puts_with_options_are_answered_together_too(parts, producer, stopped, options):
    async def run():
        resume = stopped(native.WRITER)
        tasks = [asyncio.create_task(put(producer, **options)) for _ in range(100)]
        await until(lambda: submitter(producer).front.waiting == 100, "all are submitted")
        wakes = counted_wakes(asyncio.get_running_loop())
        resume()
        results = await asyncio.gather(*tasks)
        assert len({result.queue_offset for result in results}) == 100 and all(result.ok for result in results)
        assert len(wakes) <= 30

    asyncio.run(run())


def test_awaited_puts_get_their_results_while_and_after_no_thread_can_be_had(producer, stopped, without_threads):
    async def slow_put() -> PutResult:
        resume = stopped(native.WRITER)
        putting = asyncio.create_task(put(producer))
        await until(lambda: awaiting_loops(producer), "the put waits")
        resume()
        return await asyncio.wait_for(putting, scaled_timeout_s(60))

    async def run() -> list[PutResult]:
        with without_threads():
            found = [await slow_put(), await slow_put()]
        return [*found, await slow_put()]

    assert [result.queue_offset for result in asyncio.run(run())] == [1, 2, 3]


def test_a_put_that_has_to_wait_for_room_without_a_thread_is_refused(make_parts, stopped, without_threads):
    parts = make_parts()  # with a small ring

    async def run(producer) -> list[PutResult]:
        resume = stopped(native.WRITER, parts)
        with without_threads():
            futures = [producer.put_async("T", bytes(300)) for _ in range(400)]
            refused = [future.result(0) for future in futures if future.done()]
        assert refused and {result.status for result in refused} == {PutStatus.SERVICE_NOT_AVAILABLE}
        assert "threads" in refused[0].reason and not any(result.indeterminate for result in refused)
        resume()
        stored = await asyncio.wait_for(asyncio.gather(*futures), scaled_timeout_s(60))
        assert sum(result.ok for result in stored) == 400 - len(refused)
        return await asyncio.gather(*(put(producer, bytes(300)) for _ in range(400)))

    with parts.producer() as producer:
        assert all(result.ok for result in asyncio.run(run(producer)))


def test_a_callback_for_which_no_thread_can_be_had_is_refused_and_can_be_added_later(producer, stopped, without_threads):
    resume, called = stopped(native.WRITER), []
    future = producer.put_async("T", b"x")
    with without_threads(), pytest.raises(RuntimeError, match="threads"):
        future.add_done_callback(called.append)
    future.add_done_callback(called.append)
    resume()
    eventually(lambda: called == [future], "the callback")
