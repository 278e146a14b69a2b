"""pyengine.dramatiq: real workers of Dramatiq run what was sent, also when they are killed or cannot store a retry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import dramatiq
import pytest
from dramatiq.errors import QueueJoinTimeout, QueueNotFound

import pyengine
import pyengine.dramatiq
from fix_cli import environment
from fix_client import consumers_of
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
from pyengine import testing
from pyengine.dramatiq import PyengineBroker
from test_docs import blocks_of
from waiting import eventually, scaled_timeout_s

TASKS = """
import dramatiq
from pyengine.dramatiq import PyengineBroker

dramatiq.set_broker(PyengineBroker(os.environ["STORE"], namespace=os.environ["TOPIC"].removesuffix("-default"), queues=4))

@dramatiq.actor
def work(name):
    note(name)

@dramatiq.actor
def held(name):
    note(f"{name}-begun")
    wait_for(f"{name}-go")
    note(name)

@dramatiq.actor(max_retries=2, min_backoff=10, max_backoff=20)
def failing(name, times):
    note(name)
    with open("notes") as notes:
        if sum(line.startswith(name + " ") for line in notes) <= times:
            raise ValueError("not now")

@dramatiq.actor(max_retries=2, min_backoff=10, max_backoff=20)
def failing_when_told(name):
    note(name)
    wait_for(f"{name}-go")
    with open("notes") as notes:
        if sum(line.startswith(name + " ") for line in notes) == 1:
            raise ValueError("not now")
"""
COMMAND = ["dramatiq", "tasks", "--processes", "2", "--threads", "4"]


def broker_of(rig, **options):
    broker = PyengineBroker(rig.store, namespace=rig.topic.removesuffix("-default"), queues=4, **options)
    broker.declare_queue("default")
    return broker


def message(actor, *arguments):
    return dramatiq.Message(queue_name="default", actor_name=actor, args=arguments, kwargs={}, options={})


def send_all(rig, actor, calls, delay=None):
    broker = broker_of(rig)
    for arguments in calls:
        broker.enqueue(message(actor, *arguments), delay=delay)
    broker.close()


@pytest.fixture(scope="module")
def workers(task_store, tmp_path_factory):  # noqa: F811
    """Two workers of one topic, which only get messages."""
    with rig(tmp_path_factory.mktemp("dramatiq"), task_store, "shared-default", TASKS, COMMAND) as made:
        made.start()
        yield made


@pytest.fixture
def own(task_store, tmp_path, request):  # noqa: F811
    """A rig with a topic of the test's own, without a worker."""
    with rig(tmp_path / "rig", task_store, f"{request.node.name[:80]}-default", TASKS, COMMAND) as made:
        yield made


def dead_letters(rig):
    with pyengine.open_store(rig.store) as store:
        return store.queue_end(f"%DLQ%{rig.topic}", 0)


def test_two_workers_share_the_messages_of_a_new_queue_and_run_each_once(workers):
    assert_two_workers_run_each_task_once(workers, send_all)
    broker_of(workers).join("default", timeout=int(scaled_timeout_s(60) * 1000))
    assert workers.lag() == 0


def test_a_delayed_message_is_not_run_before_its_time(workers):
    sent_s = time.time()
    send_all(workers, "work", [("due",)], delay=1500)
    (ran,) = workers.noted("due")
    assert ran.time_s >= sent_s + 1.5


def test_a_failed_message_is_retried_and_one_that_fails_for_good_is_a_dead_letter(workers):
    before = dead_letters(workers)
    send_all(workers, "failing", [("twice", 2), ("always", 100)])
    eventually(lambda: Counter(each.what for each in workers.notes())["twice"] == 3, "it was run again twice")
    eventually(lambda: dead_letters(workers) == before + 1, "the other one is a dead letter")
    workers.wait_until_acknowledged()
    assert len(workers.noted("twice", "always")) == 6


def test_a_body_that_is_no_message_and_an_unknown_actor_are_dead_letters(workers):
    before = dead_letters(workers)
    with pyengine.connect(workers.store) as producer:
        producer.put(workers.topic, b"\xff no message")
    send_all(workers, "unknown", [()])
    eventually(lambda: dead_letters(workers) == before + 2, "both are dead letters")
    workers.wait_until_acknowledged()


@pytest.mark.ci
def test_kill_9_under_load_loses_no_message_and_repeats_none_that_is_stored_as_done(own):
    assert_kill_9_loses_no_task(own, send_all, lambda victim, begun: eventually(
        lambda: "shutting down" in own.log.lower(), "Dramatiq ends when one of its workers was killed"))


@pytest.mark.ci
def test_messages_beside_one_that_kills_its_worker_are_no_dead_letters(own):
    def taking():
        consumer = broker_of(own).consume("default", prefetch=4, timeout=200)

        def take():
            found = next(consumer)
            return found and (str(found.args), lambda: consumer.ack(found))

        return take

    assert_only_a_task_that_kills_is_a_dead_letter(own, send_all, own.topic, taking)


def test_sigterm_lets_running_actors_end_and_acknowledges_them(own):
    assert_sigterm_lets_tasks_end(own, send_all, "Shutting down...")


def test_a_worker_that_ends_leaves_its_other_queues(own, monkeypatch):
    monkeypatch.setenv("dramatiq_queue_prefetch", "9")
    assert_a_worker_that_ends_leaves_its_other_queues(own, send_all, ("onto work queue", 9), "Shutting down...",
                                                      "--verbose", "--processes", "1", "--threads", "1")


@pytest.mark.ci
def test_a_retry_that_no_engine_can_store_is_stored_when_one_runs_again(tmp_path):
    """Dramatiq itself only logs that a retry was not sent, and acknowledges the message."""
    store = tmp_path / "store"
    with rig(tmp_path / "rig", store, "again-default", TASKS, COMMAND) as own:
        with pyengine.Engine(store, **testing.SMALL_FILES):
            own.start()
            send_all(own, "failing_when_told", [("again",)])
            own.noted("again")
        (own.folder / "again-go").touch()
        eventually(lambda: "Failed to post_process_message" in own.log, "the retry could not be stored", 30)
        with pyengine.Engine(store):
            eventually(lambda: len(own.notes()) == 2, "it was run again", 30)
            own.wait_until_acknowledged()


def test_a_message_and_its_retry_that_are_stored_without_a_slave_are_sent_once(tmp_path):
    assert_a_task_and_its_retry_are_sent_once_without_a_slave(tmp_path, "alone-default", TASKS, COMMAND, send_all)


def test_a_message_that_is_not_stored_raises_the_error_of_the_put(own):
    with pytest.raises(pyengine.PutRefusedError):
        send_all(own, "work", [("x" * (300 << 10),)])


def test_flush_drops_what_has_arrived_whether_the_group_is_new_or_not(own):
    broker = broker_of(own)

    def arrived():
        with pyengine.open_store(own.store) as store:
            return sum(store.queue_end(own.topic, queue_id) for queue_id in range(4))

    for part in (1, 2):
        for n in range(8):
            broker.enqueue(message("work", f"dropped-{n}"))
        eventually(lambda: arrived() == 8 * part, "all have arrived")
        with pytest.raises(QueueJoinTimeout):
            broker.join("default", timeout=1)
        broker.flush_all()
        broker.join("default", timeout=int(scaled_timeout_s(30) * 1000))
    broker.enqueue(message("work", "kept"))
    broker.close()
    own.start()
    own.noted("kept")
    assert [each.what for each in own.notes()] == ["kept"]


def test_workers_that_share_messages_take_the_next_of_one_queue(own):
    broker = PyengineBroker(own.store, namespace=own.topic.removesuffix("-default"), queues=1, sharing="messages")
    broker.declare_queue("default")
    for n in range(2):
        broker.enqueue(message("work", n))
    timeout = int(scaled_timeout_s(30) * 1000)
    consumers = [broker.consume("default", timeout=timeout) for _ in range(2)]
    got = [next(consumer) for consumer in consumers]
    assert sorted(each.args[0] for each in got) == [0, 1]
    for consumer, each in zip(consumers, got):
        consumer.ack(each)
        consumer.close()
    broker.join("default", timeout=timeout)
    broker.close()


def test_a_message_that_no_actor_began_with_does_not_count_as_delivered(own):
    broker = broker_of(own)
    broker.enqueue(message("work", "prefetched"))
    for _ in range(2):
        consumer = broker.consume("default", timeout=int(scaled_timeout_s(30) * 1000))
        prefetched = next(consumer)
        consumer.requeue([prefetched])
        consumer.close()
        assert prefetched.stored.delivery_count == 1
    broker.close()


def test_a_message_that_no_actor_began_with_is_taken_again_though_no_other_comes(own):
    broker = broker_of(own)
    broker.enqueue(message("work", "retried"))
    with pyengine.consume(own.store, own.topic, group=own.topic, auto_commit=False) as member:  # its group has a retry topic from now on
        for end in (lambda stored: member.retry(stored, delay_s=0.0), lambda _: member.commit()):
            (stored,) = member.pull(1, timeout_s=scaled_timeout_s(30))
            end(stored)
    consumer = broker.consume("default", prefetch=4, timeout=100)
    broker.enqueue(message("work", "prefetched"))
    prefetched = eventually(lambda: next(consumer), "it comes")
    for _ in range(2):
        assert next(consumer) is None
        consumer.requeue([prefetched])
        prefetched = eventually(lambda: next(consumer), "it comes again", 5)
    consumer.close()
    broker.close()


def test_a_joining_worker_gets_no_queue_of_a_message_that_runs(own, monkeypatch):
    broker = PyengineBroker(own.store, namespace=own.topic.removesuffix("-default"), queues=2)
    broker.declare_queue("default")
    for n in range(2):
        broker.enqueue(message("work", n))
    members = consumers_of(pyengine.dramatiq, monkeypatch)
    consumer = broker.consume("default", prefetch=2, timeout=int(scaled_timeout_s(30) * 1000))
    running = [next(consumer) for _ in range(2)]
    assert None not in running
    assert_a_joining_member_waits_for(members[0], own.store)
    consumer.close()
    broker.close()


def test_a_queue_that_was_not_declared_is_not_found(task_store):  # noqa: F811
    broker = PyengineBroker(task_store)
    for call in (lambda: broker.enqueue(message("work")), lambda: broker.consume("default"), lambda: broker.flush("default"),
                 lambda: broker.join("default")):
        with pytest.raises(QueueNotFound):
            call()


def test_a_forked_child_sends_too(own):
    broker = broker_of(own)
    broker.enqueue(message("work", "parent"))
    pid = os.fork()
    if pid == 0:
        try:
            broker.enqueue(message("work", "child"))
            broker.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    broker.enqueue(message("work", "parent again"))
    with pyengine.open_store(own.store) as store:
        assert sum(store.queue_end(own.topic, queue_id) for queue_id in range(4)) == 3
    broker.close()


def test_a_forked_child_sends_while_a_thread_of_its_parent_connects(own, monkeypatch):
    broker, connecting, may_connect = broker_of(own), threading.Event(), threading.Event()

    def connect_slowly(*arguments):
        connecting.set()
        may_connect.wait()
        return pyengine.connect(*arguments)

    monkeypatch.setattr(pyengine.dramatiq, "connect", connect_slowly)
    sender = threading.Thread(target=broker.enqueue, args=(message("work", "parent"),))
    sender.start()
    connecting.wait()
    monkeypatch.undo()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(scaled_timeout_s(30)))
            broker.enqueue(message("work", "child"))
            broker.close()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    may_connect.set()
    sender.join()
    broker.close()
    assert status == 0
    with pyengine.open_store(own.store) as store:
        assert sum(store.queue_end(own.topic, queue_id) for queue_id in range(4)) == 2


def test_the_actors_of_the_tasks_page_run(tmp_path):
    program = blocks_of("docs/tasks.md")[-1].text
    with rig(tmp_path / "rig", tmp_path / "rig" / "my-store", "dramatiq-default", program, COMMAND) as own:
        with pyengine.Engine(own.store, **testing.SMALL_FILES):
            sent = subprocess.run([sys.executable, "tasks.py"], cwd=own.folder, env=environment(), check=False)
            assert sent.returncode == 0
            own.start()
            eventually(lambda: "charged 17" in own.log, "the first message ran")
            own.wait_until_acknowledged()
            assert "charged 18" not in own.log


def test_without_dramatiq_the_sentence_says_how_to_get_it():
    code = "import sys; sys.modules['dramatiq'] = None; import pyengine.dramatiq"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "dramatiq is not installed" in done.stderr and "pip install 'pyengine-store[dramatiq]'" in done.stderr
