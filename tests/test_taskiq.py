"""pyengine.taskiq: real workers of taskiq run what was sent, also when they are killed, and docs/tasks.md is true."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from taskiq import SendTaskError
from taskiq.kicker import AsyncKicker

import pyengine
import pyengine.taskiq
from fix_cli import environment
from fix_client import Refusing, consumers_of, leave_cancelled
from fix_golden import usual
from fix_tasks import (
    assert_a_joining_member_waits_for,
    assert_a_task_and_its_retry_are_sent_once_without_a_slave,
    assert_a_worker_that_ends_leaves_its_other_queues,
    assert_kill_9_loses_no_task,
    assert_only_a_task_that_kills_is_a_dead_letter,
    assert_sigterm_lets_tasks_end,
    assert_two_workers_run_each_task_once,
    rig,
    task_store,  # noqa: F401
)
from pyengine.taskiq import PyengineBroker
from test_docs import blocks_of, reader  # noqa: F401
from waiting import eventually, scaled_timeout_s

TASKS = """
import asyncio
from taskiq import SimpleRetryMiddleware
from pyengine.taskiq import PyengineBroker

broker = PyengineBroker(os.environ["STORE"], topic=os.environ["TOPIC"], queues=4)
broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))

@broker.task
async def work(name: str) -> None:
    await asyncio.sleep(0.001)
    note(name)

@broker.task
def held(name: str) -> None:
    note(f"{name}-begun")
    wait_for(f"{name}-go")
    note(name)

@broker.task
async def failing(name: str, times: int) -> None:
    note(name)
    with open("notes") as notes:
        if sum(line.startswith(name + " ") for line in notes) <= times:
            raise ValueError("not now")
"""
COMMAND = ["taskiq", "worker", "tasks:broker", "--workers", "2", "--max-async-tasks", "10"]


@asynccontextmanager
async def started(store, topic, **options):
    broker = PyengineBroker(store, topic=topic, **options)
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


def send(rig, task, *arguments, **labels):
    """Send one task, as a program would that has no tasks.py."""
    send_all(rig, task, [arguments], **labels)


def send_all(rig, task, calls, **labels):
    async def main():
        async with started(rig.store, rig.topic, queues=4) as broker:
            for arguments in calls:
                await AsyncKicker(task_name=f"tasks:{task}", broker=broker, labels=dict(labels)).kiq(*arguments)

    asyncio.run(main())


@pytest.fixture(scope="module")
def workers(task_store, tmp_path_factory):  # noqa: F811
    """Two workers of one topic, which only get tasks."""
    with rig(tmp_path_factory.mktemp("taskiq"), task_store, "taskiq-shared", TASKS, COMMAND) as made:
        made.start()
        yield made


@pytest.fixture
def own(task_store, tmp_path, request):  # noqa: F811
    """A rig with a topic of the test's own, without a worker."""
    with rig(tmp_path / "rig", task_store, f"taskiq-{request.node.name}"[:100], TASKS, COMMAND) as made:
        yield made


def test_two_workers_share_the_tasks_of_a_new_topic_and_run_each_once(workers):
    assert_two_workers_run_each_task_once(workers, send_all)


@pytest.mark.parametrize("labels", [
    {"delay": 1.5}, pytest.param({"deliver_at": True}, marks=pytest.mark.ci), {"delay": 0.1, "deliver_at": True}], ids=str)
def test_a_delayed_task_is_not_run_before_its_time(workers, labels):
    name, due_s = f"due-{'-'.join(labels)}", time.time() + 1.5
    if "deliver_at" in labels:
        labels = {**labels, "deliver_at": datetime.fromtimestamp(due_s, UTC)}
    send(workers, "work", name, **labels)
    (ran,) = workers.noted(name)
    assert ran.time_s >= due_s - 0.001


def test_a_time_may_be_milliseconds_and_be_past(workers):
    send(workers, "work", "past", deliver_at=int(time.time() * 1000) - 5000)
    send(workers, "work", "long-past", deliver_at=datetime(1969, 1, 1, tzinfo=UTC))
    workers.noted("past", "long-past")


def test_a_failed_task_is_retried_and_one_that_fails_each_time_is_done(workers):
    send(workers, "failing", "twice", 2, retry_on_error=True)
    eventually(lambda: len(workers.noted("twice")) == 3, "it was run again twice")
    send(workers, "failing", "always", 100, retry_on_error=True, max_retries=2)
    eventually(lambda: len(workers.noted("always")) == 2, "it was run again once")
    workers.wait_until_acknowledged()
    assert len(workers.noted("twice", "always")) == 5


def test_a_task_and_its_retry_that_are_stored_without_a_slave_are_sent_once(tmp_path):
    assert_a_task_and_its_retry_are_sent_once_without_a_slave(tmp_path, "taskiq-alone", TASKS, COMMAND,
                                                              partial(send_all, retry_on_error=True))


def test_a_worker_that_is_cancelled_while_it_opens_its_consumer_leaves_no_member(own, monkeypatch):
    begun, released, opened = threading.Event(), threading.Event(), []

    def consume(*arguments, **options):
        begun.set()
        released.wait()
        opened.append(pyengine.consume(*arguments, **options))
        return opened[0]

    async def main():
        async with started(own.store, own.topic) as broker:
            listening = asyncio.ensure_future(anext(broker.listen()))
            await asyncio.to_thread(begun.wait)
            listening.cancel()
            await asyncio.sleep(0)
            released.set()
            with pytest.raises(asyncio.CancelledError):
                await listening
            with pytest.raises(pyengine.UsageError, match="closed"):
                opened[0].pull(timeout_s=0)

    monkeypatch.setattr(pyengine.taskiq, "consume", consume)
    asyncio.run(main())


@pytest.mark.ci
def test_kill_9_under_load_loses_no_task_and_repeats_none_that_is_stored_as_done(own):
    def another_has_them(victim, begun):
        eventually(lambda: {each.what for each in own.notes() if each.pid != victim} >= begun, "another worker has the victim's tasks")

    victim, killed = assert_kill_9_loses_no_task(own, send_all, another_has_them)
    firsts = {each.what: each.pid for each in reversed(killed)}
    again = {each.what for each in killed if firsts[each.what] != each.pid}
    assert {firsts[name] for name in again} == {victim}  # until everything was killed, only the victim's came again


@pytest.mark.ci
def test_tasks_beside_one_that_kills_its_worker_are_no_dead_letters(own):
    def taking():
        loop = asyncio.new_event_loop()
        arrived = asyncio.Queue()

        async def listen():
            async for task in PyengineBroker(own.store, topic=own.topic).listen():
                arrived.put_nowait(task)

        listening = loop.create_task(listen())

        def take():
            loop.run_until_complete(asyncio.wait([listening, getting := loop.create_task(arrived.get())], timeout=0.2,
                                                 return_when=asyncio.FIRST_COMPLETED))
            if not getting.done():
                getting.cancel()
                return None
            return getting.result().data.decode(), getting.result().ack

        return take

    assert_only_a_task_that_kills_is_a_dead_letter(own, send_all, "taskiq", taking)


def test_sigterm_lets_running_tasks_end_and_acknowledges_them(own):
    assert_sigterm_lets_tasks_end(own, send_all, "running tasks to complete")
    assert "Traceback" not in own.log


@pytest.mark.parametrize(("at_once", "fetched"), usual([("1", 1), ("10", 9)], [("10", 9)], pytest.mark.ci))
def test_a_worker_that_ends_leaves_its_other_queues(own, at_once, fetched):
    assert_a_worker_that_ends_leaves_its_other_queues(own, send_all, ("Executing task", fetched), "running tasks to complete",
                                                      "--workers", "1", "--max-async-tasks", at_once)


def test_sigterm_ends_an_idle_worker(own):
    process = own.start()
    eventually(lambda: own.log.count("Listening started") == 2, "both processes wait for tasks", 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(scaled_timeout_s(20)) == 0, own.log


def test_a_task_that_is_not_stored_raises_with_the_result_of_the_put(task_store):  # noqa: F811
    async def main():
        async with started(task_store, "taskiq-large") as broker:
            await AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq("x" * (300 << 10))

    with pytest.raises(SendTaskError) as raised:
        asyncio.run(main())
    assert isinstance(raised.value.__cause__, pyengine.PutRefusedError)


@pytest.mark.parametrize(("labels", "says"), [
    ({"delay": "soon"}, "the label delay is 'soon': give a number of seconds"),
    ({"delay": float("inf")}, "40 days"),
    ({"deliver_at": "tomorrow"}, "the label deliver_at is 'tomorrow': give a datetime with a time zone, or ms since 1970"),
    ({"deliver_at": datetime(2030, 1, 1)}, "no time zone"),
    ({"delay": timedelta(days=60).total_seconds()}, "40 days"),
], ids=str)
def test_a_label_that_says_no_time_is_refused(task_store, labels, says):  # noqa: F811
    async def main():
        async with started(task_store, "taskiq-labels") as broker:
            await AsyncKicker(task_name="tasks:work", broker=broker, labels=labels).kiq("never")

    with pytest.raises(SendTaskError) as raised:
        asyncio.run(main())
    assert isinstance(raised.value.__cause__, pyengine.UsageError) and says in str(raised.value.__cause__)


def test_a_task_that_is_sent_before_startup_raises_a_sentence(task_store):  # noqa: F811
    broker = PyengineBroker(task_store)
    with pytest.raises(SendTaskError) as raised:
        asyncio.run(AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq("early"))
    assert "await broker.startup()" in str(raised.value.__cause__)


def test_a_broker_can_be_started_again(task_store):  # noqa: F811
    async def main():
        broker = PyengineBroker(task_store, topic="taskiq-again")
        for _ in range(2):
            await broker.startup()
            await broker.startup()
            await AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq("again")
            await broker.shutdown()

    asyncio.run(main())
    with pyengine.open_store(task_store) as store:
        eventually(lambda: sum(store.queue_end("taskiq-again", n) for n in range(8)) == 2, "both are dispatched")


def test_a_startup_needs_no_thread_of_the_loop_and_one_that_is_cancelled_disconnects(task_store, monkeypatch):  # noqa: F811
    producers, is_connected, may_go_on = [], threading.Event(), threading.Event()

    def connect(store):
        producers.append(pyengine.connect(store))
        is_connected.set()
        assert may_go_on.wait(scaled_timeout_s(30))
        return producers[0]

    async def main():
        asyncio.get_running_loop().set_default_executor(Refusing())
        starting = asyncio.create_task(PyengineBroker(task_store, topic="taskiq-cancelled").startup())
        while not is_connected.is_set():
            await asyncio.sleep(0)
            if starting.done():
                break
        starting.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(pyengine.taskiq, "connect", connect)
    asyncio.run(main())
    with pytest.raises(pyengine.UsageError, match="closed"):
        producers[0].__enter__()


def test_a_shutdown_that_is_cancelled_before_a_thread_is_free_disconnects(task_store, monkeypatch):  # noqa: F811
    producers = []
    monkeypatch.setattr(pyengine.taskiq, "connect", lambda store: producers.append(pyengine.connect(store)) or producers[0])
    broker = PyengineBroker(task_store, topic="taskiq-cancelled")

    @asynccontextmanager
    async def until_its_end():
        yield
        await broker.shutdown()

    asyncio.run(broker.startup())
    leave_cancelled(until_its_end())
    with pytest.raises(pyengine.UsageError, match="closed"):
        producers[0].__enter__()


def test_workers_that_share_tasks_take_the_next_of_one_queue(task_store):  # noqa: F811
    async def main():
        async with started(task_store, "taskiq-sharing", queues=1, sharing="messages") as first, \
                started(task_store, "taskiq-sharing", sharing="messages") as second:
            for name in ("one", "two"):
                await AsyncKicker(task_name="tasks:work", broker=first, labels={}).kiq(name)
            async with asyncio.timeout(scaled_timeout_s(30)):
                got = [await anext(broker.listen()) for broker in (first, second)]
            return {each.data for each in got}

    assert len(asyncio.run(main())) == 2


def test_a_joining_worker_gets_no_queue_of_a_task_that_runs(task_store, monkeypatch):  # noqa: F811
    members = consumers_of(pyengine.taskiq, monkeypatch)

    async def main():
        async with started(task_store, "taskiq-joining", queues=2) as broker:
            for name in ("one", "two"):
                await AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq(name)
            async with asyncio.timeout(scaled_timeout_s(30)):
                tasks = broker.listen()
                running = [await anext(tasks) for _ in range(2)]
            await asyncio.to_thread(assert_a_joining_member_waits_for, members[0], task_store)
            assert len(running) == 2

    asyncio.run(main())


def test_a_listen_that_ends_after_the_next_one_began_takes_nothing_from_it(task_store):  # noqa: F811
    async def main():
        async with started(task_store, "taskiq-twice") as broker, asyncio.timeout(scaled_timeout_s(30)):
            async def send_one(name):
                await AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq(name)

            for n in range(8):
                await send_one(f"{n}")
            for _ in range(8):  # Python ends what `break` leaves while the next one begins
                async for task in broker.listen():
                    task.ack()
                    break
            first, second = broker.listen(), broker.listen()
            for tasks in (first, *[second] * 8):
                await send_one("another")
                (await anext(tasks)).ack()
                if tasks is second:
                    await first.aclose()

    asyncio.run(main())


def test_a_number_of_queues_that_a_topic_cannot_have_is_refused(task_store):  # noqa: F811
    with pytest.raises(pyengine.UsageError, match="give 1 to"):
        PyengineBroker(task_store, queues=0)


def test_without_taskiq_the_sentence_says_how_to_get_it():
    code = "import sys; sys.modules['taskiq'] = None; import pyengine.taskiq"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "taskiq is not installed" in done.stderr and "pip install 'pyengine-store[taskiq]'" in done.stderr


@pytest.mark.ci
def test_the_blocks_of_the_tasks_page_about_taskiq_run(reader):  # noqa: F811
    tasks, send_them, shell = blocks_of("docs/tasks.md")[2:5]  # tests/test_celery.py and tests/test_dramatiq.py run the others
    (reader.folder / "tasks.py").write_text(tasks.text)
    (reader.folder / "send.py").write_text(send_them.text)
    reader.environment["PATH"] = f"{Path(sys.executable).parent}:{reader.environment['PATH']}"  # taskiq's command
    shown = reader.run(replace(shell, text=shell.text.replace("sleep 5", f"sleep {scaled_timeout_s(5):.0f}")))
    assert "1 + 2 = 3" in shown and "3 + 4 = 7" in shown
    assert re.search(r"taskiq +taskiq ", shown), shown
