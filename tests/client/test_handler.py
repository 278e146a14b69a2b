"""run_consumer and run_consumer_async: what is done when the handler returns or raises, how they end, and what kills lose: nothing."""

from __future__ import annotations

import asyncio
import functools
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import product

import pytest

import pyengine
from fix_cli import environment
from fix_client import age_leaving, consumers_of, housekeep
from fix_golden import usual
from pyengine.client import handler as handler_module
from pyengine.client.retries import dlq_topic, retry_topic
from pyengine.errors import EngineUnavailableError, UsageError
from pyengine.storage.acknowledgements import AckFile
from waiting import eventually, scaled_timeout_s

QUEUES = 4


@pytest.fixture(scope="module")
def engine(undelayed):
    return undelayed


@pytest.fixture
def running(engine, names):
    """running(handler, **options): run_consumer in a thread; its `stop` ends it, as the test's end does."""
    started = []

    class Running(threading.Thread):
        def __init__(self, handler, **options) -> None:
            super().__init__()
            self.stop = threading.Event()
            self.options = {"commit_interval_s": 0.05, "stop": self.stop} | options
            self.handler = handler
            self.error = None
            self.start()

        def run(self) -> None:
            try:
                pyengine.run_consumer(engine.path, *names, self.handler, **self.options)
            except BaseException as error:
                self.error = error

        def end(self) -> None:
            self.stop.set()
            self.join()

    def make(handler, **options) -> Running:
        started.append(Running(handler, **options))
        return started[-1]

    yield make
    for each in started:
        each.end()


def put(engine, topic, count):
    """Put `count` messages into QUEUES queues; return their bodies."""
    bodies = [b"%05d" % number for number in range(count)]
    with engine.connect() as producer:
        for queue_id in range(QUEUES):
            if mine := bodies[queue_id::QUEUES]:
                producer.put_many(topic, mine, queue_id=queue_id)
    return bodies


def lag(engine, *names):
    """Return the lag of the group in its topic and its retry topic."""
    return sum(state.lag for state in pyengine.ConsumerGroups(engine.path).groups(group=names[1]))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_message_is_handled_once_and_is_done(engine, names, running, concurrency):
    bodies = put(engine, names[0], 40)
    seen = []
    runs = running(lambda message: seen.append(message.body), concurrency=concurrency)
    eventually(lambda: len(seen) >= 40, "all were handled")
    runs.end()
    assert sorted(seen) == bodies and runs.error is None and lag(engine, *names) == 0


def test_with_one_at_a_time_a_queue_keeps_its_order_and_the_thread_is_the_callers(engine, names, running):
    bodies = put(engine, names[0], 40)
    seen, threads = [], set()

    def handle(message):
        seen.append((message.queue_id, message.body))
        threads.add(threading.get_ident())

    runs = running(handle)
    eventually(lambda: len(seen) == 40, "all were handled")
    assert [[body for queue_id, body in seen if queue_id == each] for each in range(QUEUES)] == [
        bodies[each::QUEUES] for each in range(QUEUES)]
    assert threads == {runs.ident}


def test_as_many_as_concurrency_says_are_handled_at_once(engine, names, running):
    put(engine, names[0], 9)
    together = threading.Barrier(3)
    seen = []

    def handle(message):
        together.wait(scaled_timeout_s(60))  # each waits for two others
        seen.append(message.body)

    running(handle, concurrency=3)
    eventually(lambda: len(seen) == 9, "all were handled")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_message_whose_handler_raises_comes_again(engine, names, running, concurrency):
    put(engine, names[0], 10)
    tries = Counter()

    def handle(message):
        tries[message.body] += 1
        if message.reconsume_times < 2:
            raise ValueError("not yet")

    runs = running(handle, concurrency=concurrency)
    eventually(lambda: sum(tries.values()) == 30, "each was handled three times")
    runs.end()
    assert set(tries.values()) == {3} and lag(engine, *names) == 0


def test_a_message_that_always_fails_is_a_dead_letter_and_keeps_nothing_up(engine, names, running):
    put(engine, names[0], 6)
    seen = []

    def handle(message):
        if message.body == b"00000":
            raise ValueError("poison")
        seen.append(message.body)

    running(handle, max_reconsume_times=1)
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: [one.body for one in letters.messages(names[1])] == [b"00000"], "the dead letter")
    assert sorted(seen) == [b"%05d" % number for number in range(1, 6)]
    assert letters.messages(names[1])[0].properties["__PYENGINE_REASON"] == "ValueError: poison"
    assert letters.queues()[0].group and dlq_topic(names[1]) != retry_topic(names[1])


def test_a_message_that_cannot_be_given_back_is_handled_again(engine, names, running, monkeypatch):
    monkeypatch.setattr(handler_module, "HANDLE_AGAIN_S", 0.01)
    refusals = []

    def refused(self, message, delay_level=None, *, reason):
        refusals.append(message)
        raise EngineUnavailableError("no engine")

    monkeypatch.setattr(pyengine.Consumer, "retry", refused)
    put(engine, names[0], 1)
    tries = []

    def handle(message):
        tries.append(message.body)
        if len(tries) < 4:
            raise ValueError("not yet")

    runs = running(handle)
    eventually(lambda: len(tries) == 4, "it was handled until it went well")
    runs.end()
    assert len(refusals) == 3 and lag(engine, *names) == 0


def test_an_end_while_a_message_waits_to_be_handled_again_leaves_it_to_the_next_run(engine, names, running, monkeypatch):
    def refused(self, message, delay_level=None, *, reason):
        raise EngineUnavailableError("no engine")

    monkeypatch.setattr(pyengine.Consumer, "retry", refused)
    put(engine, names[0], 1)
    tries = []
    runs = running(lambda message: tries.append(1) or 1 / 0)
    eventually(lambda: tries, "it was handled")
    runs.end()
    assert runs.error is None and len(tries) == 1 and lag(engine, *names) == 1


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_base_exception_ends_the_call(engine, names, running, concurrency):
    put(engine, names[0], 1)

    def handle(message):
        raise SystemExit(3)

    runs = running(handle, concurrency=concurrency)
    eventually(lambda: not runs.is_alive(), "the call has ended")
    assert isinstance(runs.error, SystemExit) and lag(engine, *names) == 1


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_handler_that_returns_an_awaitable_ends_the_call_and_its_message_is_not_done(engine, names, running, concurrency):
    put(engine, names[0], 1)

    async def handle(message):
        raise AssertionError("nothing awaits it")

    runs = running(lambda message: handle(message), concurrency=concurrency)
    eventually(lambda: not runs.is_alive(), "the call has ended")
    assert isinstance(runs.error, UsageError) and "use run_consumer_async" in str(runs.error) and lag(engine, *names) == 1


def test_a_joining_member_does_not_get_the_message_that_a_handler_works_on(engine, names, running, monkeypatch):
    consumers, assigned = consumers_of(handler_module, monkeypatch), []
    with engine.connect() as producer:
        for queue_id in range(2):
            producer.put(names[0], b"long", queue_id=queue_id)

    def handle(message):
        if message.queue_id == 0:
            return
        with pyengine.consume(engine.path, names[0], group=names[1], auto_commit=False) as joining:
            housekeep(consumers[0])
            age_leaving(consumers[0], 60)
            housekeep(consumers[0])
            housekeep(joining)
            assigned.append(joining.assignment)

    running(handle)
    eventually(lambda: assigned, "the message was handled")
    assert assigned == [[]]


def test_a_member_that_comes_and_goes_lets_other_messages_run_beside_a_long_one(engine, names, running, monkeypatch):
    monkeypatch.setattr(handler_module, "ALONE_S", scaled_timeout_s(handler_module.ALONE_S))
    consumers, begun, beside, waited = consumers_of(handler_module, monkeypatch), threading.Event(), threading.Event(), []
    with engine.connect() as producer:
        for queue_id, body in ((1, b"long"), (0, b"joined"), (0, b"beside")):
            producer.put(names[0], body, queue_id=queue_id)

    def handle(message):
        if message.body == b"long":
            begun.set()
            waited.append(beside.wait(handler_module.ALONE_S / 2))
        elif message.body == b"joined":
            begun.wait(scaled_timeout_s(10))
            with pyengine.consume(engine.path, names[0], group=names[1], auto_commit=False):
                housekeep(consumers[0])
            housekeep(consumers[0])
        else:
            beside.set()

    running(handle, concurrency=2)
    eventually(lambda: waited, "the long one has ended")
    assert waited == [True]


@pytest.mark.parametrize("form", ["this thread", "threads", "tasks"])
def test_a_call_that_is_to_end_leaves_the_queues_without_a_running_handler_to_others(engine, names, form):
    bodies, begun, handled = put(engine, names[0], 4 * QUEUES), threading.Lock(), []

    def handle(message):
        if begun.acquire(blocking=False):
            signal.raise_signal(signal.SIGTERM)
            with pyengine.consume(engine.path, names[0], group=names[1], auto_commit=False) as other:
                eventually(lambda: {*other.assignment} == {*range(QUEUES)} - {message.queue_id}, "it has the other queues")
        handled.append(message.body)

    async def handle_async(message):
        await asyncio.to_thread(handle, message)

    if form == "tasks":
        asyncio.run(pyengine.run_consumer_async(engine.path, *names, handle_async, concurrency=2))
    else:
        pyengine.run_consumer(engine.path, *names, handle, concurrency=2 if form == "threads" else 1)
    with pyengine.consume(engine.path, *names[:1], group=names[1]) as rest:
        while len(handled) < len(bodies):
            handled += [message.body for message in rest.pull(timeout_s=scaled_timeout_s(10))]
    assert sorted(handled) == bodies


@pytest.fixture
def waits(monkeypatch):
    """After how many seconds each message was to come again; it comes at once."""
    found, retry = [], pyengine.Consumer.retry

    def record(consumer, message, delay_level=None, *, delay_s=None, at=None, reason="", timeout_s=None):
        found.append(delay_s)
        return retry(consumer, message, delay_level)

    monkeypatch.setattr(pyengine.Consumer, "retry", record)
    return found


@pytest.mark.parametrize(("backoff", "expected"), [
    (1.5, [1.5] * 4), ([1, 5, 60], [1, 5, 60, 60]), (lambda times: 2 ** times, [1, 2, 4, 8]), (lambda times: 1e9, [40 * 86_400] * 4),
    (lambda times: -1 if times else "soon", [None] * 4),
], ids=["number", "sequence", "function", "long", "wrong"])
@pytest.mark.parametrize("form", usual(["threads", "tasks"], ["tasks"], pytest.mark.ci))
def test_backoff_says_when_a_failed_message_comes_again(engine, names, running, waits, caplog, form, backoff, expected):
    put(engine, names[0], 1)

    def fail(message):
        if message.reconsume_times < 4:
            raise ValueError("not now")

    if form == "threads":
        running(fail, backoff=backoff)
        eventually(lambda: len(waits) == 4 and lag(engine, *names) == 0, "it is done")
    else:
        async def main():
            stop = asyncio.Event()

            async def handle(message):
                if message.reconsume_times == 4:
                    stop.set()
                fail(message)

            await asyncio.wait_for(pyengine.run_consumer_async(engine.path, *names, handle, backoff=backoff, stop=stop),
                                   scaled_timeout_s(60))

        asyncio.run(main())
    assert waits == expected
    assert caplog.text.count("comes again after the usual delay") == expected.count(None)


def test_a_signal_that_comes_while_the_call_begins_to_wait_ends_it(tmp_path):
    class Stop(threading.Event):
        is_raised = False

        def wait(self, timeout=None):
            if not self.is_raised:  # a second one would end this process
                self.is_raised = True
                with self._cond:
                    signal.raise_signal(signal.SIGTERM)
            return super().wait(timeout)

    pyengine.run_consumer(tmp_path / "store", "T", "G", print, stop=Stop(), timeout_s=60)


def test_a_signal_ends_all_consumers_and_goes_to_the_program_s_handler_after_the_last(engine, names, request):
    topic, group = names
    put(engine, topic, 1)
    put(engine, topic + "-2", 1)
    ended, came = [], []
    usual = signal.signal(signal.SIGTERM, lambda *_: came.append([*ended]))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, usual))
    own, of_interrupt = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def consume(of, handle, stop=None):
        await pyengine.run_consumer_async(engine.path, of, group, handle, stop=stop)
        ended.append(of)

    async def main():
        stop, both = asyncio.Event(), asyncio.Barrier(2)

        async def handle(message):
            await both.wait()
            if message.topic == topic:
                stop.set()  # of the one that has caught the signal first
                await first
                signal.raise_signal(signal.SIGTERM)

        async with asyncio.timeout(scaled_timeout_s(60)):
            first = asyncio.create_task(consume("none", handle, stop))
            while signal.getsignal(signal.SIGTERM) is own:  # it is not inside yet
                await asyncio.sleep(0.001)
            await asyncio.gather(first, consume(topic, handle), consume(topic + "-2", handle))

    asyncio.run(main())
    assert ended[0] == "none" and sorted(ended[1:]) == [topic, topic + "-2"] and came == [ended[:-1]]  # within the last call
    assert signal.getsignal(signal.SIGTERM) is own and signal.getsignal(signal.SIGINT) is of_interrupt
    assert lag(engine, topic, group) == lag(engine, topic + "-2", group) == 0


def test_a_signal_handler_of_the_loop_is_called_once(engine, names):
    topic, group = names
    put(engine, topic, 1)
    came = []

    async def handle(message):
        signal.raise_signal(signal.SIGTERM)

    async def main():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, came.append, "once")
        await asyncio.wait_for(pyengine.run_consumer_async(engine.path, topic, group, handle), scaled_timeout_s(60))
        for _ in range(10):  # the loop has looked for signals meanwhile
            await asyncio.sleep(0)
        loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())
    assert came == ["once"]


def test_a_generator_as_a_handler_is_refused_before_a_message_is_acknowledged(engine, names):
    put(engine, names[0], 1)

    def generator(message):
        yield

    async def generator_async(message):
        yield

    for wrong in (generator, generator_async):
        with pytest.raises(UsageError, match="generator function"):
            pyengine.run_consumer(engine.path, *names, wrong)
        with pytest.raises(UsageError, match="generator function"):
            asyncio.run(pyengine.run_consumer_async(engine.path, *names, wrong))
        with pytest.raises(UsageError, match="returns a generator"):
            pyengine.run_consumer(engine.path, *names, lambda message, wrong=wrong: wrong(message))
    assert lag(engine, *names) == 1


def test_wrong_arguments_are_refused(engine):
    async def coroutine(message):
        pass

    def run(handler=print, **options):
        pyengine.run_consumer(engine.path, "T", "G", handler, **options)

    with pytest.raises(TypeError, match="callable"):
        run(None)
    with pytest.raises(UsageError, match="run_consumer_async"):
        run(coroutine)
    with pytest.raises(UsageError, match="at least 1"):
        run(concurrency=0)
    with pytest.raises(UsageError, match="auto_commit"):
        run(auto_commit=True)
    for wrong, says in (((), "backoff is empty"), ([1, -1], "backoff is -1"), (-1, "backoff is -1")):
        with pytest.raises(UsageError, match=says):
            run(backoff=wrong)
    for wrong in ("1", ["1"], object()):
        with pytest.raises(TypeError, match="backoff"):
            run(backoff=wrong)
    with pytest.raises(UsageError, match="exclude each other"):
        run(backoff=1, delay_level=1)


# --- asyncio --------------------------------------------------------------------------------------


def test_tasks_handle_messages_and_failed_ones_come_again(engine, names):
    put(engine, names[0], 20)
    tries = Counter()
    most = [0, 0]  # running now, and at most

    async def main():
        stop = asyncio.Event()

        async def handle(message):
            most[0] += 1
            most[1] = max(most)
            await asyncio.sleep(0)
            most[0] -= 1
            tries[message.body] += 1
            if sum(tries.values()) == 40:
                stop.set()
            if message.reconsume_times == 0:
                raise ValueError("not yet")

        await asyncio.wait_for(pyengine.run_consumer_async(engine.path, *names, handle, concurrency=5, stop=stop),
                               scaled_timeout_s(60))

    asyncio.run(main())
    assert set(tries.values()) == {2} and len(tries) == 20 and 1 < most[1] <= 5 and lag(engine, *names) == 0


def test_a_function_that_returns_an_awaitable_is_awaited(engine, names):
    bodies = put(engine, names[0], 3)
    seen = []

    async def main():
        stop = asyncio.Event()

        async def handle(message):
            await asyncio.sleep(0)
            seen.append(message.body)
            if len(seen) == 3:
                stop.set()

        await asyncio.wait_for(pyengine.run_consumer_async(engine.path, *names, lambda message: handle(message), stop=stop),
                               scaled_timeout_s(60))

    asyncio.run(main())
    assert sorted(seen) == bodies and lag(engine, *names) == 0


def test_a_function_that_returns_no_awaitable_ends_the_call_and_its_message_is_not_done(engine, names):
    put(engine, names[0], 1)
    with pytest.raises(UsageError, match="use run_consumer$"):
        asyncio.run(asyncio.wait_for(pyengine.run_consumer_async(engine.path, *names, lambda message: None), scaled_timeout_s(60)))
    assert lag(engine, *names) == 1


def test_a_cancelled_call_leaves_running_messages_to_the_next_call(engine, names):
    put(engine, names[0], 2)
    cancelled = []

    async def main():
        begun = asyncio.Event()

        async def handle(message):
            try:
                begun.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.body)
                raise

        task = asyncio.ensure_future(pyengine.run_consumer_async(engine.path, *names, handle))
        await asyncio.wait_for(begun.wait(), scaled_timeout_s(60))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(cancelled) == 1 and lag(engine, *names) == 2


def run_until_cancelled(engine, names, handle, begun, released, times):
    """Run a call, cancel it so often once its thread has begun, as anyio does in each turn of the loop, then release that thread."""
    async def main():
        task = asyncio.ensure_future(pyengine.run_consumer_async(engine.path, *names, handle))
        await asyncio.to_thread(begun.wait)
        for _ in range(times):
            task.cancel()
            await asyncio.wait({task}, timeout=0.2)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_is_cancelled_while_it_opens_its_consumer_leaves_no_member(engine, names, monkeypatch, times):
    put(engine, names[0], 1)
    consumers = []
    begun, released = threading.Event(), threading.Event()

    @functools.wraps(pyengine.consume)
    def consume(*args, **options):
        begun.set()
        released.wait()
        consumers.append(pyengine.consume(*args, **options))
        return consumers[0]

    async def handle(message):
        raise AssertionError("the call was cancelled")

    monkeypatch.setattr(handler_module, "consume", consume)
    run_until_cancelled(engine, names, handle, begun, released, times)
    try:
        with pytest.raises(UsageError, match="closed"):
            consumers[0].pull(timeout_s=0)
    finally:
        consumers[0].close()


def test_a_handler_that_awaits_what_others_have_cancelled_has_failed(engine, names):
    put(engine, names[0], 1)
    tries = []

    async def main():
        stop = asyncio.Event()

        async def handle(message):
            tries.append(message.reconsume_times)
            if message.reconsume_times:
                stop.set()
                return
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

        await asyncio.wait_for(pyengine.run_consumer_async(engine.path, *names, handle, stop=stop), scaled_timeout_s(60))

    asyncio.run(main())
    assert tries == [0, 1] and lag(engine, *names) == 0


@pytest.mark.parametrize("times", [1, 3])
def test_a_call_that_is_cancelled_while_it_gives_a_message_back_does_that_first(engine, names, monkeypatch, times):
    put(engine, names[0], 1)
    begun, released = threading.Event(), threading.Event()
    retry = pyengine.Consumer.retry

    def slow(*args, **options):
        begun.set()
        released.wait()
        return retry(*args, **options)

    async def handle(message):
        raise ValueError("not now")

    monkeypatch.setattr(pyengine.Consumer, "retry", slow)
    run_until_cancelled(engine, names, handle, begun, released, times)
    assert sum(state.lag for state in pyengine.ConsumerGroups(engine.path).groups(topic=names[0], group=names[1])) == 0


# --- brokers --------------------------------------------------------------------------------------


def test_messages_that_were_deleted_before_a_group_began_are_not_undone(builder):
    builder.fill_queue("orders", 0, 7)
    builder.put("orders", b"the only one", queue_id=0)
    assert handler_module.undone(builder.root, "orders") == 1


# --- processes ------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, random, sys, threading
import pyengine
store, topic, group, log, form = sys.argv[1:6]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
class Stop(threading.Event):
    def set(self):
        os.write(out, b"stopping\\n")
        super().set()
def handle(message):
    if "hold" in form and message.body == b"00000":
        os.write(out, b"begun\\n")
        sys.stdin.readline()
    elif "hold" not in form and random.random() < 0.1:
        raise ValueError("at random")
    os.write(out, message.body + b"\\n")
async def handle_async(message):
    if message.body == b"00000":
        os.write(out, b"begun\\n")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    os.write(out, message.body + b"\\n")
options = dict(commit_interval_s=0.05, max_reconsume_times=1000)
if form == "async":
    asyncio.run(pyengine.run_consumer_async(store, topic, group, handle_async, concurrency=2, **options))
else:
    stop = Stop() if form == "many hold" else None
    pyengine.run_consumer(store, topic, group, handle, concurrency=4 if form.startswith("many") else 1, stop=stop, **options)
os.write(out, b"ended\\n")
"""


def program(engine, names, log, form):
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(engine.path), *names, str(log), form], env=environment(),
                            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def lines(log):
    return log.read_bytes().split(b"\n")[:-1] if log.exists() else []


@pytest.mark.parametrize(("form", "number"), usual(product(["hold", "async"], [signal.SIGTERM, signal.SIGINT]),
                                                   [("hold", signal.SIGTERM), ("async", signal.SIGINT)], pytest.mark.ci))
def test_a_signal_lets_the_handler_end_and_stores_offsets(engine, names, tmp_path, form, number):
    put(engine, names[0], 1)
    log = tmp_path / "log"
    process = program(engine, names, log, form)
    try:
        eventually(lambda: b"begun" in lines(log), "the handler runs", timeout_s=90)
        process.send_signal(number)

        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(timeout=scaled_timeout_s(60)) == 0
    finally:
        process.kill()
        process.wait()
    assert lines(log) == [b"begun", b"00000", b"ended"] and lag(engine, *names) == 0


def test_a_signal_ends_the_call_also_if_no_thread_can_be_had(engine, names, monkeypatch):
    put(engine, names[0], 2)
    seen = []

    def handle(message):
        seen.append(message.body)
        signal.raise_signal(signal.SIGTERM)

    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("pyengine.client.handler._thread.start_new_thread", refused)
    pyengine.run_consumer(engine.path, *names, handle)
    assert len(seen) == lag(engine, *names) == 1


def test_a_second_ctrl_c_waits_for_no_handler_that_hangs_in_a_thread(engine, names, tmp_path):
    put(engine, names[0], 1)
    log = tmp_path / "log"
    process = program(engine, names, log, "many hold")
    try:
        for told in (b"begun", b"stopping"):
            eventually(lambda told=told: told in lines(log), "the handler runs, and then the consumer stops", timeout_s=90)
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=scaled_timeout_s(30)) == -signal.SIGINT
    finally:
        process.kill()
        process.wait()
    assert lag(engine, *names) == 1


@pytest.mark.parametrize(("count", "kills"), [
    (600, 3), pytest.param(20_000, 40, marks=pytest.mark.long)], ids=["short", "long"])
def test_kill_9_of_consumers_loses_no_message(engine, names, tmp_path, rng, count, kills):
    bodies = put(engine, names[0], count)
    log = tmp_path / "log"
    processes = [program(engine, names, log, form) for form in ("many", "one")]
    try:
        for number in range(kills):
            before = (number + 1) * count // (kills + 2)
            eventually(lambda: len(set(lines(log))) >= before, f"{before} messages were handled", timeout_s=90)
            victim = rng.randrange(2)
            processes[victim].kill()
            processes[victim].wait()
            processes[victim] = program(engine, names, log, "many" if victim == 0 else "one")
        eventually(lambda: set(lines(log)) >= set(bodies), "every message was handled", timeout_s=120)
        eventually(lambda: lag(engine, *names) == 0, "every message is done")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert set(lines(log)) == set(bodies)


KILLED = """
import os, sys, threading
import pyengine
store, topic, group, log = sys.argv[1:5]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def handle(message):
    if message.body == b"00000":
        threading.Event().wait()
    if message.body == b"poison":
        os.kill(os.getpid(), 9)
    os.write(out, b"%s %d\\n" % (message.body, message.delivery_count))
pyengine.run_consumer(store, topic, group, handle, concurrency=int(sys.argv[5]), commit_interval_s=0.05, max_deliveries=3)
"""


def killed_program(engine, names, log, concurrency):
    return subprocess.Popen([sys.executable, "-c", KILLED, str(engine.path), *names, str(log), str(concurrency)], env=environment())


def saved_acks(engine, names):
    """Return how many messages above the group's offset are stored as acknowledged in queue 0."""
    states = AckFile(engine.path, "@".join(names)).read().get(0, [])
    return sum(end - start for start, end in states[-1].acked) if states else 0


def test_after_kill_9_no_acknowledged_message_comes_again_beside_one_that_hangs(engine, names, tmp_path):
    log = tmp_path / "log"
    with engine.connect() as producer:
        producer.put_many(names[0], [b"%05d" % number for number in range(300)], queue_id=0)
    for first, end in ((0, 300), (300, 400)):
        process = killed_program(engine, names, log, 3)
        try:
            eventually(lambda: len(lines(log)) == end - 1 and saved_acks(engine, names) == end - 1, f"{end - 1} are acknowledged")
        finally:
            process.kill()
            process.wait()
        assert lag(engine, *names) == end, "the first one is not done"
        with engine.connect() as producer:
            producer.put_many(names[0], [b"%05d" % number for number in range(end, end + 100)], queue_id=0)
    assert [each.split() for each in sorted(lines(log))] == [[b"%05d" % number, b"1"] for number in range(1, 400)]


SINGLY = """
import os, random, sys
import pyengine
store, topic, group, log = sys.argv[1:5]
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with pyengine.consume(store, topic, group=group, auto_commit=False, commit_interval_s=60, max_deliveries=None) as consumer:
    held = []
    while True:
        found = consumer.pull(5, timeout_s=0.05)
        os.write(out, b"".join(b"got %s\\n" % message.body for message in found))
        held += found
        random.shuffle(held)
        ended, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
        if random.random() < 0.1:
            consumer.requeue(held)
            held = []
        consumer.ack(ended)
        if set(consumer.commit([])) >= {message.queue_id for message in ended}:  # the offsets of queues that are still its own
            os.write(out, b"".join(b"saved %s\\n" % message.body for message in ended))
"""


@pytest.mark.parametrize(("count", "kills"), [
    (400, 4), pytest.param(10_000, 60, marks=pytest.mark.long)], ids=["short", "long"])
def test_kills_of_members_repeat_no_acknowledgement_that_was_stored_and_lose_no_message(engine, names, tmp_path, rng, count, kills):
    bodies = put(engine, names[0], count)
    log = tmp_path / "log"

    def start():
        return subprocess.Popen([sys.executable, "-c", SINGLY, str(engine.path), *names, str(log)], env=environment())

    def saved():
        return {line[6:] for line in lines(log) if line.startswith(b"saved ")}

    processes = [start(), start()]
    try:
        for number in range(kills):
            before = (number + 1) * count // (kills + 2)
            eventually(lambda: len(saved()) >= before, f"{before} acknowledgements are stored", timeout_s=90)
            victim = rng.randrange(2)
            processes[victim].kill()
            processes[victim].wait()
            processes[victim] = start()
        eventually(lambda: lag(engine, *names) == 0, "every message is done", timeout_s=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    got, ended = set(), set()
    for kind, body in (line.split(b" ") for line in lines(log)):
        (ended if kind == b"saved" else got).add(body)
        assert kind == b"saved" or body not in ended, f"{body!r} came again after its acknowledgement was stored"
    assert got == set(bodies)


def test_a_message_that_kills_its_process_is_counted_and_becomes_a_dead_letter(engine, names, tmp_path):
    log = tmp_path / "log"
    with engine.connect() as producer:
        producer.put_many(names[0], [b"one", b"poison"], queue_id=0)
    for _ in range(3):
        assert killed_program(engine, names, log, 1).wait(timeout=scaled_timeout_s(60)) == -signal.SIGKILL
    process = killed_program(engine, names, log, 1)
    letters = pyengine.DeadLetters(engine.path)
    try:
        eventually(lambda: [one.body for one in letters.messages(names[1])] == [b"poison"] and lag(engine, *names) == 0, "the dead letter")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert lines(log) == [b"one %d" % count for count in range(1, len(lines(log)) + 1)], "it was finished, so it is no dead letter"


BESIDE = """
import asyncio, os, sys, threading
import pyengine
from pyengine.client import handler as handler_module
store, topic, group, log, form, sharing, hangs = sys.argv[1:8]
handler_module.ALONE_S = 0.3 if hangs == "True" else 60.0
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
begun = threading.Event()
def handle(message):
    os.write(out, b"begin %s %d\\n" % (message.body, message.delivery_count))
    if message.body == b"slow":
        begun.set()
        threading.Event().wait(None if hangs == "True" else 1)
    if message.body == b"poison":
        begun.wait(0.5)
        os.kill(os.getpid(), 9)
    os.write(out, b"end %s\\n" % message.body)
async def handle_async(message):
    await asyncio.to_thread(handle, message)
options = {"concurrency": 3, "commit_interval_s": 0.05, "max_deliveries": 3, "sharing": sharing}
if form == "threads":
    pyengine.run_consumer(store, topic, group, handle, **options)
else:
    asyncio.run(pyengine.run_consumer_async(store, topic, group, handle_async, **options))
"""


@pytest.mark.parametrize(("form", "sharing", "hangs"), usual([
    ("threads", "queues", False), ("threads", "queues", True), ("tasks", "queues", False), ("tasks", "queues", True),
    ("threads", "messages", True)], [("threads", "queues", True)], pytest.mark.ci))
def test_a_slow_message_is_no_dead_letter_beside_one_that_kills(engine, names, tmp_path, form, sharing, hangs):
    log = tmp_path / "log"
    with engine.connect() as producer:
        producer.put_many(names[0], [b"slow", b"poison", b"after"], queue_id=0)
    letters = pyengine.DeadLetters(engine.path)

    def is_over():
        return [one.body for one in letters.messages(names[1])] == [b"poison"] and b"end after" in lines(log)

    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", BESIDE, str(engine.path), *names, str(log), form, sharing, str(hangs)],
                                   env=environment())
        try:
            eventually(lambda: process.poll() is not None or is_over(), "a kill, or the dead letter")
            assert process.poll() in (None, -signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    assert is_over()
    counts = [int(line.split()[2]) for line in lines(log) if line.startswith(b"begin slow")]
    assert max(counts) <= 3 and (b"end slow" in lines(log)) is not hangs


def test_a_message_with_full_properties_becomes_a_dead_letter_and_the_queue_goes_on(engine, names, running, caplog):
    """RocketMQ's consumer handles it each 5 s for ever: its retry has more properties than fit."""
    size = 32_767 - len("filler\x01")
    with engine.connect() as producer:
        producer.put(names[0], b"one", queue_id=0).raise_for_status()
        producer.put(names[0], b"poison", queue_id=0, properties={"filler": "y" * size}).raise_for_status()
        producer.put(names[0], b"three", queue_id=0).raise_for_status()
    calls = []

    def handle(message):
        calls.append((message.body, message.reconsume_times))
        if message.body == b"poison":
            raise ValueError

    running(handle)
    letters = pyengine.DeadLetters(engine.path)
    eventually(lambda: lag(engine, *names) == 0 and letters.messages(names[1]), "the dead letter, and the end of the queue")
    assert calls == [(b"one", 0), (b"poison", 0), (b"three", 0)]
    (letter,) = letters.messages(names[1])
    assert (letter.topic, letter.body, letter.reconsume_times) == (names[0], b"poison", 1)
    assert "__PYENGINE_REASON" not in letter.properties
    assert [record.levelname for record in caplog.records if "no room for the properties 'filler'" in record.getMessage()] == ["ERROR"]
    assert letters.requeue(names[1]) == 1
    eventually(lambda: (b"poison", 0) in calls[3:], "it is handled again")


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("status", usual([status for status in pyengine.PutStatus if status.is_lasting],
                                         [pyengine.PutStatus.MESSAGE_ILLEGAL], pytest.mark.ci))
def test_what_can_never_be_given_back_is_reported_and_done(engine, names, running, monkeypatch, caplog, status, concurrency):
    put(engine, names[0], 8)
    calls = Counter()

    def handle(message):
        calls[message.body] += 1
        raise ValueError

    refused = pyengine.PutResult(status, reason="never")
    monkeypatch.setattr(pyengine.Producer, "put_raw", lambda self, raw, timeout_s=None: refused)
    running(handle, concurrency=concurrency)
    eventually(lambda: len(calls) == 8 and lag(engine, *names) == 0, "all are done")
    assert set(calls.values()) == {1}
    assert sum(record.levelname == "ERROR" and "counts as done" in record.getMessage() for record in caplog.records) == 8


def test_a_coroutine_whose_message_can_never_be_given_back_is_not_called_for_ever(engine, names, monkeypatch):
    put(engine, names[0], 4)
    calls = Counter()
    refused = pyengine.PutResult(pyengine.PutStatus.MESSAGE_ILLEGAL, reason="never")
    monkeypatch.setattr(pyengine.Producer, "put_raw", lambda self, raw, timeout_s=None: refused)

    async def main():
        stop = asyncio.Event()

        async def handle(message):
            calls[message.body] += 1
            if len(calls) == 4:
                stop.set()
            raise ValueError

        await pyengine.run_consumer_async(engine.path, *names, handle, from_="first", stop=stop)

    asyncio.run(main())
    assert len(calls) == 4 and set(calls.values()) == {1} and lag(engine, *names) == 0


def test_messages_of_a_declared_queue_that_never_had_one_are_skipped_too(engine, names):
    for _ in range(2):  # of a new group and of a known one
        handler_module.skip_undone(engine.path, names[0])
    assert [state.queues for state in pyengine.ConsumerGroups(engine.path).groups(topic=names[0])] == [{}]
