"""pyengine.taskiq: real workers of taskiq run what was sent, also when they are killed, and docs/tasks.md is true."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from taskiq import SendTaskError
from taskiq.kicker import AsyncKicker

import pyengine
from fix_cli import environment
from fix_tasks import kill_group, rig, task_store  # noqa: F401
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
    send_all(workers, "work", [(f"warm-{n}",) for n in range(8)])
    workers.noted(*(f"warm-{n}" for n in range(8)))
    pids = workers.wait_until_shared(2)
    names = [f"shared-{n}" for n in range(200)]
    send_all(workers, "work", [(name,) for name in names])
    found = workers.noted(*names)
    assert set(Counter(each.what for each in found).values()) == {1} and {each.pid for each in found} == pids
    workers.wait_until_acknowledged()
    assert pyengine.TopicConfigs(workers.store).read().rows[workers.topic].write_queue_nums == 4


@pytest.mark.parametrize("labels", [{"delay": 1.5}, {"deliver_at": True}, {"delay": 0.1, "deliver_at": True}], ids=str)
def test_a_delayed_task_is_not_run_before_its_time(workers, labels):
    name, due_s = f"due-{'-'.join(labels)}", time.time() + 1.5
    if "deliver_at" in labels:
        labels = {**labels, "deliver_at": datetime.fromtimestamp(due_s, UTC)}
    send(workers, "work", name, **labels)
    (ran,) = workers.noted(name)
    assert ran.time_s >= due_s - 0.001


def test_a_time_may_be_milliseconds_and_be_past(workers):
    send(workers, "work", "past", deliver_at=int(time.time() * 1000) - 5000)
    workers.noted("past")


def test_a_failed_task_is_retried_and_one_that_fails_each_time_is_done(workers):
    send(workers, "failing", "twice", 2, retry_on_error=True)
    eventually(lambda: len(workers.noted("twice")) == 3, "it was run again twice")
    send(workers, "failing", "always", 100, retry_on_error=True, max_retries=2)
    eventually(lambda: len(workers.noted("always")) == 2, "it was run again once")
    workers.wait_until_acknowledged()
    assert len(workers.noted("twice", "always")) == 5


def test_kill_9_under_load_loses_no_task_and_repeats_none_that_is_stored_as_done(own):
    process = own.start()
    before = [f"before-{n}" for n in range(100)]
    send_all(own, "work", [(name,) for name in before])
    own.noted(*before)
    own.wait_until_acknowledged()
    own.wait_until_shared(2)
    held = [f"held-{n}" for n in range(3)]
    send_all(own, "held", [(name,) for name in held])
    begun = {each.what: each.pid for each in own.noted(*(f"{name}-begun" for name in held))}
    names = [f"load-{n}" for n in range(1500)]
    send_all(own, "work", [(name,) for name in names])
    eventually(lambda: own.lag() <= 1500 + 3 - 300, "what is done in the queue without a held task is stored")
    victim = begun["held-0-begun"]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: {each.what for each in own.notes() if each.pid != victim} >= begun.keys(), "another worker has the victim's tasks")
    kill_group(process)
    killed = own.notes()
    for name in held:
        (own.folder / f"{name}-go").touch()
    own.start()
    runs = Counter(each.what for each in own.noted(*before, *names, *held))
    own.wait_until_acknowledged()
    assert {runs[name] for name in before} == {1}
    firsts = {each.what: each.pid for each in reversed(killed)}
    again = {each.what for each in killed if firsts[each.what] != each.pid}
    assert {firsts[name] for name in again} == {victim}  # until everything was killed, only the victim's came again


def test_sigterm_lets_running_tasks_end_and_acknowledges_them(own):
    process = own.start()
    send_all(own, "held", [("long",), ("longer",)])
    own.noted("long-begun", "longer-begun")
    process.send_signal(signal.SIGTERM)
    eventually(lambda: "running tasks to complete" in own.log, "the workers wait for their tasks")
    for name in ("long", "longer"):
        (own.folder / f"{name}-go").touch()
    assert process.wait(scaled_timeout_s(60)) == 0, own.log
    own.wait_until_acknowledged()
    send(own, "work", "later")
    own.start()
    own.noted("later")
    assert Counter(each.what for each in own.notes()) == {
        "long-begun": 1, "longer-begun": 1, "long": 1, "longer": 1, "later": 1}, own.log
    assert "Traceback" not in own.log


def test_a_task_that_is_not_stored_raises_with_the_result_of_the_put(task_store):  # noqa: F811
    async def main():
        async with started(task_store, "taskiq-large") as broker:
            await AsyncKicker(task_name="tasks:work", broker=broker, labels={}).kiq("x" * (300 << 10))

    with pytest.raises(SendTaskError) as raised:
        asyncio.run(main())
    assert isinstance(raised.value.__cause__, pyengine.PutRefusedError)


@pytest.mark.parametrize(("labels", "says"), [
    ({"delay": "soon"}, "the label delay is 'soon': give a number of seconds"),
    ({"delay": float("inf")}, "give a number of seconds"),
    ({"deliver_at": "tomorrow"}, "the label deliver_at is 'tomorrow': give a datetime with a time zone, or ms since 1970"),
    ({"deliver_at": datetime(2030, 1, 1)}, "with a time zone"),
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
    assert sum(pyengine.open_store(task_store).queue_end("taskiq-again", n) for n in range(8)) == 2


def test_a_number_of_queues_that_a_topic_cannot_have_is_refused(task_store):  # noqa: F811
    with pytest.raises(pyengine.UsageError, match="give 1 to"):
        PyengineBroker(task_store, queues=0)


def test_without_taskiq_the_sentence_says_how_to_get_it():
    code = "import sys; sys.modules['taskiq'] = None; import pyengine.taskiq"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "taskiq is not installed" in done.stderr and "pip install 'pyengine-store[taskiq]'" in done.stderr


@pytest.mark.ci
def test_the_blocks_of_the_tasks_page_run(reader):  # noqa: F811
    tasks, send_them, shell, _ = blocks_of("docs/tasks.md")  # tests/test_dramatiq.py runs the last one
    (reader.folder / "tasks.py").write_text(tasks.text)
    (reader.folder / "send.py").write_text(send_them.text)
    reader.environment["PATH"] = f"{Path(sys.executable).parent}:{reader.environment['PATH']}"  # taskiq's command
    shown = reader.run(replace(shell, text=shell.text.replace("sleep 5", f"sleep {scaled_timeout_s(5):.0f}")))
    assert "1 + 2 = 3" in shown and "3 + 4 = 7" in shown
    assert re.search(r"taskiq +taskiq ", shown), shown
