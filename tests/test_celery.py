"""pyengine.celery: real workers of Celery run what was sent, also when they are killed, and Kombu's exchanges work across processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import celery
import kombu
import pytest
from kombu.asynchronous import Hub
from kombu.common import Broadcast

import pyengine
import pyengine.celery
from fix_cli import environment
from fix_client import consumers_of, on_next_untake
from fix_engine import wait_noted
from fix_tasks import (
    assert_a_joining_member_waits_for,
    assert_a_task_and_its_retry_are_sent_once_without_a_slave,
    assert_a_worker_that_ends_leaves_its_other_queues,
    assert_only_a_task_that_kills_is_a_dead_letter,
    assert_sigterm_lets_tasks_end,
    children,
    kill_group,
    rig,
    task_store,  # noqa: F401
)
from pyengine import testing
from test_docs import blocks_of, reader  # noqa: F401
from waiting import eventually, scaled_timeout_s

TASKS = """
import celery
import kombu
from celery.exceptions import Reject
from kombu.common import Broadcast
import pyengine.celery

app = celery.Celery("tasks", broker=f"pyengine://{os.environ['STORE']}", backend="rpc://")
app.conf.broker_transport_options = {"namespace": os.environ["TOPIC"].removesuffix("-celery"), "queues": 4,
                                      "sharing": os.environ.get("SHARING", "queues")}
app.conf.task_queues = [kombu.Queue("celery"), Broadcast("news")]
app.conf.worker_prefetch_multiplier = 2

@app.task(acks_late=True)
def work(name):
    note(name)

@app.task
def early(name):
    note(f"{name}-begun")
    wait_for(f"{name}-go")
    note(name)

@app.task(acks_late=True, reject_on_worker_lost=True)
def held(name):
    note(f"{name}-begun")
    wait_for(f"{name}-go")
    note(name)

@app.task(bind=True, max_retries=2)
def failing(self, name, times):
    note(name)
    if self.request.retries < times:
        raise self.retry(countdown=0.1)

@app.task
def add(a, b):
    return a + b

@app.task(bind=True, acks_late=True)
def rejected(self, name):
    note(name)
    raise Reject("never", requeue=False)

@app.task(bind=True, acks_late=True)
def given_back(self, name):
    note(name)
    if not self.request.delivery_info["redelivered"]:
        raise Reject("again", requeue=True)
"""
COMMAND = ["celery", "--app", "tasks", "worker", "--concurrency", "2", "--loglevel", "INFO"]


@contextlib.contextmanager
def app_of(rig):
    """A program that sends tasks and has no tasks.py."""
    with celery.Celery("sender", broker=f"pyengine://{rig.store}", backend="rpc://", set_as_current=False) as app:
        app.conf.broker_transport_options = {"namespace": rig.topic.removesuffix("-celery"), "queues": 4}
        yield app


def send_all(rig, task, calls, **options):
    with app_of(rig) as app:
        for arguments in calls:
            app.send_task(f"tasks.{task}", arguments, **options)


@pytest.fixture(scope="module")
def workers(task_store, tmp_path_factory):  # noqa: F811
    """Two workers of one topic, which only get messages; both answer."""
    with rig(tmp_path_factory.mktemp("celery"), task_store, "shared-celery", TASKS, COMMAND) as made:
        made.processes = [made.start("--hostname", f"{name}@here") for name in ("one", "two")]
        with app_of(made) as app:
            eventually(lambda: len(app.control.inspect(timeout=1).ping() or ()) == 2, "both workers answer", 60)
        yield made


@pytest.fixture
def own(task_store, tmp_path, request):  # noqa: F811
    """A rig with topics of the test's own, without a worker."""
    with rig(tmp_path / "rig", task_store, f"{request.node.name[:80]}-celery", TASKS, COMMAND) as made:
        yield made


def dead_letters(rig):
    with pyengine.open_store(rig.store) as store:
        return store.queue_end(f"%DLQ%{rig.topic}", 0)


# ---- Celery ----------------------------------------------------------------------


def test_two_workers_share_the_tasks_of_a_new_queue_and_run_each_once(workers):
    send_all(workers, "work", [(f"warm-{n}",) for n in range(8)])
    assert workers.wait_until_shared(2) == {process.pid for process in workers.processes}
    names = [f"shared-{n}" for n in range(200)]
    send_all(workers, "work", [(name,) for name in names])
    found = workers.noted(*names)
    assert set(Counter(each.what for each in found).values()) == {1}
    for process in workers.processes:
        assert children(process) & {each.pid for each in found}
    workers.wait_until_acknowledged()
    assert {each.topic: each.config for each in pyengine.Topics(workers.store).list()}[workers.topic].write_queue_nums == 4


@pytest.mark.parametrize("when", ["countdown", pytest.param("eta", marks=pytest.mark.ci)])
def test_a_task_is_not_run_before_its_time_and_waits_in_the_store(workers, when):
    due_s = time.time() + 1.5
    options = {"countdown": 1.5} if when == "countdown" else {"eta": datetime.fromtimestamp(due_s, UTC)}
    send_all(workers, "work", [(f"due-{when}",)], **options)
    with app_of(workers) as app:
        assert all(not scheduled for scheduled in app.control.inspect(timeout=1).scheduled().values())
    (ran,) = workers.noted(f"due-{when}")
    assert ran.time_s >= due_s


def test_an_eta_beyond_forty_days_is_refused(workers):
    with pytest.raises(pyengine.UsageError, match="40 days"):
        send_all(workers, "work", [("far",)], eta=datetime.fromtimestamp(time.time() + 41 * 86_400, UTC))


def test_a_task_is_retried_and_results_come_back(workers):
    send_all(workers, "failing", [("twice", 2)])
    eventually(lambda: Counter(each.what for each in workers.notes())["twice"] == 3, "it was run again twice")
    with app_of(workers) as app:
        results = [app.send_task("tasks.add", (n, n)) for n in range(20)]
        assert [each.get(timeout=scaled_timeout_s(30)) for each in results] == [2 * n for n in range(20)]


def test_a_rejected_task_and_a_body_that_is_no_message_are_dead_letters(workers):
    before = dead_letters(workers)
    send_all(workers, "rejected", [("rejected",)])
    with pyengine.connect(workers.store) as producer:
        producer.put(workers.topic, b"\xff no message")
    eventually(lambda: dead_letters(workers) == before + 2, "both are dead letters")
    workers.wait_until_acknowledged()
    assert len(workers.noted("rejected")) == 1


def test_a_task_that_is_given_back_comes_again_at_once_and_says_so(workers):
    send_all(workers, "given_back", [("back",)])
    eventually(lambda: len(workers.noted("back")) == 2, "it was run again")
    workers.wait_until_acknowledged()


def test_workers_answer_remote_control_and_get_broadcasts(workers):
    with app_of(workers) as app:
        answers = app.control.inspect(timeout=scaled_timeout_s(2)).ping()
        assert set(answers) == {"one@here", "two@here"}
        app.conf.task_queues = [kombu.Queue("celery"), Broadcast("news")]
        app.send_task("tasks.work", ("for-all",), queue="news")
    eventually(lambda: Counter(each.what for each in workers.notes())["for-all"] == 2, "each worker ran it")


def test_a_monitor_gets_the_events_of_workers(workers):
    with app_of(workers) as app, app.connection() as connection:
        hosts = set()
        receiver = app.events.Receiver(connection, handlers={"worker-heartbeat": lambda event: hosts.add(event["hostname"])})
        for _ in receiver.consume(limit=None, timeout=scaled_timeout_s(30)):
            if len(hosts) == 2:
                break
        assert hosts == {"one@here", "two@here"}


@pytest.mark.parametrize("pool", [pytest.param("solo", marks=pytest.mark.ci), "threads"])
def test_a_pool_without_processes_runs_and_acknowledges_tasks(own, pool):
    own.start("--pool", pool)
    names = [f"{pool}-{n}" for n in range(30)]
    send_all(own, "work", [(name,) for name in names])
    assert len(own.noted(*names)) == 30
    own.wait_until_acknowledged()


def test_a_worker_that_shares_tasks_takes_the_next_of_any_queue(own, monkeypatch):
    with app_of(own) as app:
        app.conf.broker_transport_options["queues"] = 1
        app.send_task("tasks.held", ("slow",))
    monkeypatch.setenv("SHARING", "messages")
    for name in ("one", "two"):
        own.start("--pool", "solo", "--prefetch-multiplier", "1", "--hostname", f"{name}@here")
    own.noted("slow-begun")
    names = [f"quick-{n}" for n in range(20)]
    send_all(own, "work", [(name,) for name in names])
    own.noted(*names)
    (own.folder / "slow-go").touch()
    own.wait_until_acknowledged()
    assert set(Counter(each.what for each in own.notes()).values()) == {1}


@pytest.mark.ci
def test_kill_9_of_a_worker_loses_no_task_that_is_acknowledged_late_and_repeats_none_that_is_stored_as_done(own):
    process = own.start()
    before = [f"before-{n}" for n in range(100)]
    send_all(own, "work", [(name,) for name in before])
    own.noted(*before)
    own.wait_until_acknowledged()
    names = [f"load-{n}" for n in range(600)]
    send_all(own, "held", [("held",)])
    own.noted("held-begun")
    send_all(own, "work", [(name,) for name in names])
    eventually(lambda: own.lag() <= 400, "what is done in the queues without the held task is stored")
    kill_group(process)
    (own.folder / "held-go").touch()
    own.start()
    runs = Counter(each.what for each in own.noted(*before, *names, "held"))
    own.wait_until_acknowledged()
    assert {runs[name] for name in before} == {1} and runs["held"] == 1


def test_kill_9_of_a_worker_loses_no_more_than_the_running_tasks_that_are_acknowledged_early(own):
    process = own.start()
    send_all(own, "early", [("early-0",), ("early-1",)])
    own.noted("early-0-begun", "early-1-begun")
    own.wait_until_acknowledged()
    send_all(own, "early", [("early-2",)])  # is fetched, and not begun
    eventually(lambda: own.log.count("received") == 3, "the worker has all")
    kill_group(process)
    for n in range(3):
        (own.folder / f"early-{n}-go").touch()
    own.start()
    own.noted("early-2")
    own.wait_until_acknowledged()
    assert {each.what for each in own.notes()} == {"early-0-begun", "early-1-begun", "early-2-begun", "early-2"}


def test_a_task_whose_pool_process_is_killed_is_run_again_if_it_says_so(own):
    own.start()
    send_all(own, "held", [("lost",)])
    (begun,) = own.noted("lost-begun")
    os.kill(begun.pid, signal.SIGKILL)
    eventually(lambda: len(own.noted("lost-begun")) == 2, "another process of the pool has begun with it")
    (own.folder / "lost-go").touch()
    own.noted("lost")
    own.wait_until_acknowledged()


@pytest.mark.ci
def test_tasks_beside_one_that_kills_its_worker_are_no_dead_letters(own):
    def taking():
        connection, got = app_of(own).__enter__().connection(), []
        connection.Consumer([kombu.Queue("celery")], callbacks=[lambda body, message: got.append(message)], prefetch_count=4).consume()

        def take():
            with contextlib.suppress(socket.timeout):
                connection.drain_events(timeout=0.2)
            return (str(got[0].payload), got.pop(0).ack) if got else None

        return take

    assert_only_a_task_that_kills_is_a_dead_letter(own, send_all, own.topic, taking)


def test_sigterm_lets_running_tasks_end_and_acknowledges_them(own):
    assert_sigterm_lets_tasks_end(own, send_all, "Warm shutdown")


def test_a_worker_that_ends_leaves_its_other_queues(own):
    assert_a_worker_that_ends_leaves_its_other_queues(own, send_all, ("] received", 9), "Warm shutdown", "--concurrency", "1",
                                                      "--prefetch-multiplier", "9", "--hostname", "leaving@here")


def test_a_worker_goes_on_when_the_engine_is_started_again(tmp_path):
    store = tmp_path / "store"
    with rig(tmp_path / "rig", store, "again-celery", TASKS, COMMAND) as own:
        with pyengine.Engine(store, **testing.SMALL_FILES):
            own.start()
            send_all(own, "work", [("first",)])
            own.noted("first")
        with pyengine.Engine(store):
            send_all(own, "work", [("second",)])
            send_all(own, "failing", [("third", 1)])
            eventually(lambda: len(own.noted("second", "third")) == 3, "they ran")


def test_a_task_and_its_retry_that_are_stored_without_a_slave_are_sent_once(tmp_path):
    assert_a_task_and_its_retry_are_sent_once_without_a_slave(tmp_path, "alone-celery", TASKS, COMMAND, send_all)


def test_purge_drops_what_has_arrived_whether_the_group_is_new_or_not(own):
    with app_of(own) as app:
        for _ in range(2):
            for n in range(8):
                app.send_task("tasks.work", (f"dropped-{n}",))
            wait_noted(own.store)  # what is dispatched meanwhile may be dropped and not counted
            assert app.control.purge() == 8
        app.send_task("tasks.work", ("kept",))
    own.start()
    own.noted("kept")
    assert [each.what for each in own.notes()] == ["kept"]


def test_a_task_that_is_too_large_raises_the_error_of_the_put(own):
    with pytest.raises(pyengine.PutRefusedError):
        send_all(own, "work", [("x" * (300 << 10),)])


def test_without_an_engine_a_task_is_not_sent(tmp_path):
    with pyengine.Engine(tmp_path / "store", **testing.SMALL_FILES):
        pass
    with celery.Celery("sender", broker=f"pyengine://{tmp_path}/store", set_as_current=False) as app:
        app.conf.broker_connection_timeout = 0.2
        with pytest.raises(kombu.exceptions.OperationalError):
            app.send_task("tasks.work", ("never",), retry=False)


def test_a_url_without_a_store_is_refused():
    with pytest.raises(pyengine.UsageError, match="names no store: give pyengine:///path/to/my-store"):
        kombu.Connection("pyengine://").connect()


@pytest.mark.ci
def test_the_blocks_of_the_tasks_page_about_celery_run(reader):  # noqa: F811
    jobs, shell = blocks_of("docs/tasks.md")[:2]
    (reader.folder / "jobs.py").write_text(jobs.text)
    reader.environment["PATH"] = f"{Path(sys.executable).parent}:{reader.environment['PATH']}"  # Celery's command
    shown = reader.run(shell)
    assert "3\n" in shown and "7\n" in shown


# ---- Kombu -----------------------------------------------------------------------


@pytest.fixture
def connect(task_store, request):  # noqa: F811
    """Make connections of one namespace, which are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(kombu.Connection(
            f"pyengine://{task_store}", transport_options={"namespace": f"kombu{zlib.crc32(request.node.name.encode())}", "queues": 2}))


def received(connection, queue, count, timeout_s=10.0):
    """The bodies of `count` messages of a queue, acknowledged; fewer at the timeout."""
    bodies = []

    def note(body, message):
        bodies.append(body)
        message.ack()

    with kombu.Consumer(connection, [queue], callbacks=[note]), contextlib.suppress(socket.timeout):
        while len(bodies) < count:
            connection.drain_events(timeout=scaled_timeout_s(timeout_s))
    return bodies


@pytest.mark.parametrize(("kind", "keys", "sent", "gets"), [
    ("direct", ("a", "b"), "a", (True, False)), ("topic", ("t.*", "t.#"), "t.x.y", (False, True)), ("fanout", ("", ""), "", (True, True))])
@pytest.mark.parametrize("is_own", [False, True], ids=["shared", "of one client"])
def test_an_exchange_routes_to_queues_that_other_connections_have_bound(connect, kind, keys, sent, gets, is_own):
    exchange = kombu.Exchange("routes", type=kind)
    queues = [kombu.Queue(f"q{n}", exchange, routing_key=key, exclusive=is_own) for n, key in enumerate(keys)]
    reading, writing = connect(), connect()
    for queue in queues:
        queue(reading.default_channel).declare()
    kombu.Producer(writing, exchange, auto_declare=False).publish("hello", routing_key=sent)
    for queue, wanted in zip(queues, gets):
        assert received(reading, queue, 1, 10.0 if wanted else 0.2) == ["hello"] * wanted


def test_what_a_wait_would_stop_for_ever_is_refused_and_may_send(connect, monkeypatch):
    """A worker with the pool gevent took no task, and did not end."""
    connection, queue = connect(), kombu.Queue("tasks")
    connection.Producer().publish("sent", routing_key="tasks", declare=[queue])
    monkeypatch.setattr(pyengine.celery, "detect_environment", lambda: "gevent")
    for read in (lambda: received(connection, queue, 1), lambda: connection.default_channel.basic_get("tasks")):
        with pytest.raises(pyengine.UsageError, match="^pyengine:// is not read beside gevent, .*: use the pool prefork, threads or solo$"):
            read()
    connection.Producer().publish("sent too", routing_key="tasks")
    monkeypatch.undo()
    assert sorted(received(connection, queue, 2)) == ["sent", "sent too"]


def test_two_own_queues_of_a_channel_each_have_their_message_to_settle(connect):
    connection, exchange, got = connect(), kombu.Exchange("news", type="fanout"), []
    queues = [kombu.Queue(f"own{n}", exchange, exclusive=True) for n in range(2)]
    with connection.Consumer(queues, callbacks=[lambda body, message: got.append(message)], prefetch_count=2):
        for text in ("first", "second"):
            connection.Producer().publish(text, exchange="news")
            eventually(lambda: connection.drain_events(timeout=scaled_timeout_s(10)) or len(got) == 2, "each queue has it")
            assert {message.payload for message in got} == {text} and len({message.delivery_tag for message in got}) == 2
            with pytest.raises(socket.timeout):
                connection.drain_events(timeout=0.2)  # the prefetch limit counts both
            while got:
                got.pop().ack()


@pytest.mark.parametrize(("kind", "keys", "sent", "gets"), [
    ("topic", ["a.*", "*.b"], ["a.b", "c.d", "a.c"], ["a.b", "a.c"]), ("fanout", ["x", "y"], ["z"], ["z"]),
    ("direct", ["", "a"], ["a", "b", ""], ["", "a"])])
@pytest.mark.parametrize("is_read", [False, True], ids=["before", "while it is read"])
def test_an_own_queue_has_a_message_once_however_many_of_its_bindings_match(connect, kind, keys, sent, gets, is_read):
    connection, exchange, got = connect(), kombu.Exchange("routes", type=kind), []
    queue = kombu.Queue("own", exchange, routing_key=keys[0], exclusive=True)(connection.default_channel)
    queue.declare()
    with contextlib.ExitStack() as reading:
        consumer = kombu.Consumer(connection, [queue], callbacks=[lambda body, message: got.append(body)], no_ack=True)
        if is_read:
            reading.enter_context(consumer)
        for key in keys:
            queue.bind_to(exchange, key)
        if not is_read:
            reading.enter_context(consumer)
        for key in sent:
            connection.Producer().publish(f"to {key}", exchange="routes", routing_key=key)
        with pytest.raises(socket.timeout):
            while True:
                connection.drain_events(timeout=scaled_timeout_s(1 if len(got) >= len(gets) else 30))
    assert sorted(got) == [f"to {key}" for key in gets]


def test_an_own_queue_has_what_is_sent_from_its_binding_on_whatever_the_clocks_say(connect, monkeypatch):
    """A worker began with old broadcasts, as one to shut down, while the store's clock was ahead of its own."""
    a_day_ago = SimpleNamespace(**{**vars(time), "time_ns": lambda: time.time_ns() - 86_400_000_000_000})
    monkeypatch.setattr(pyengine.celery, "time", a_day_ago)
    writing, reading, exchange = connect(), connect(), kombu.Exchange("news", type="fanout")
    kombu.Queue("other", exchange, exclusive=True)(writing.default_channel).declare()
    writing.Producer().publish("before", exchange="news")
    queue = kombu.Queue("own", exchange, exclusive=True)
    queue(reading.default_channel).declare()
    writing.Producer().publish("first", exchange="news")
    assert received(reading, queue, 1) == ["first"]
    writing.Producer().publish("between", exchange="news")
    assert received(reading, queue, 2, timeout_s=1) == ["between"]


def test_an_own_queue_whose_first_declaration_met_a_recovery_is_read_after_the_next(connect, monkeypatch):
    connection, queue = connect(), kombu.Queue("own", exclusive=True)

    def busy(*_):
        monkeypatch.undo()
        raise pyengine.StoreBusyError("the store is recovered")

    monkeypatch.setattr(pyengine.celery.LiveStoreReader, "queue_range", busy)
    with pytest.raises(connection.connection_errors):
        queue(connection.default_channel).declare()
    queue(connection.default_channel).declare()
    connection.Producer().publish("first", routing_key="own")
    assert received(connection, queue, 1) == ["first"]


def test_a_binding_that_was_removed_routes_nothing(connect):
    exchange = kombu.Exchange("routes", type="direct")
    queue = kombu.Queue("q", exchange, routing_key="a")
    writing = connect()
    bound = queue(connect().default_channel)
    bound.declare()
    bound.unbind_from(exchange, "a")
    kombu.Producer(writing, exchange, auto_declare=False).publish("lost", routing_key="a")
    bound.queue_bind()
    kombu.Producer(writing, exchange, auto_declare=False).publish("kept", routing_key="a")
    bound.exchange.delete()
    kombu.Producer(writing, exchange, auto_declare=False).publish("lost", routing_key="a")
    assert received(writing, queue, 2, 1.0) == ["kept"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 5}', b"\xff"])
def test_with_damaged_bindings_nothing_is_published_to_nobody(connect, task_store, content):  # noqa: F811
    exchange, path = kombu.Exchange("routes", type="direct"), pyengine.celery.BINDINGS.path(task_store)
    queue = kombu.Queue("q", exchange, routing_key="a")
    queue(connect().default_channel).declare()
    path.write_bytes(content)
    writing = connect()
    for use in (lambda: kombu.Producer(writing, exchange, auto_declare=False).publish("lost", routing_key="a"),
                lambda: kombu.Queue("other", exchange, routing_key="b")(writing.default_channel).declare()):
        with pytest.raises(pyengine.FormatError, match="kombu-bindings.json .*: remove it, and start the workers again"):
            use()
    path.unlink()
    queue(writing.default_channel).declare()
    kombu.Producer(writing, exchange, auto_declare=False).publish("kept", routing_key="a")
    assert received(writing, queue, 1) == ["kept"]


def test_messages_are_read_once_by_all_connections_of_a_process(connect):
    connections = [connect(), connect()]
    with contextlib.closing(connections[0].SimpleQueue("once")) as first, contextlib.closing(connections[1].SimpleQueue("once")) as second:
        for n in range(20):
            first.put(n)
        found = []
        for n in range(20):
            message = (first, second)[n % 2].get(timeout=scaled_timeout_s(10))
            found.append(message.payload)
            message.ack()
    assert sorted(found) == list(range(20))


def test_a_joining_worker_gets_no_queue_of_a_task_that_runs(connect, task_store, monkeypatch):  # noqa: F811
    connection, got, members = connect(), [], consumers_of(pyengine.celery, monkeypatch)
    with connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)]):
        for n in range(2):
            connection.Producer().publish(n, routing_key="q")
        while len(got) < 2:
            connection.drain_events(timeout=scaled_timeout_s(10))
        assert_a_joining_member_waits_for(members[0], task_store)


def test_a_process_has_a_share_of_a_queue_as_long_as_a_channel_reads_it(connect, task_store, request):  # noqa: F811
    connection, got, topic = connect(), [], f"kombu{zlib.crc32(request.node.name.encode())}-q"
    consumer = connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)], prefetch_count=1)
    consumer.consume()
    for n in range(4):
        connection.Producer().publish(n, routing_key="q")
    connection.drain_events(timeout=scaled_timeout_s(10))
    consumer.cancel()
    with pyengine.consume(task_store, topic, group=topic, auto_commit=False) as other:
        eventually(lambda: len(other.assignment) == 1, "it has the queue without a message that is not settled")
        consumer.consume()
    while len(got) < 4:
        got[-1].ack()
        connection.drain_events(timeout=scaled_timeout_s(10))
    assert sorted(message.payload for message in got) == [*range(4)]


def test_a_cancelled_consumers_message_of_which_the_program_has_only_the_tag_is_still_its_own(connect):
    connection, got, queue = connect(), [], kombu.Queue("q")
    channel = connection.channel()
    callbacks = [lambda body, message: got.append((body, message.delivery_tag))]
    consumers = [kombu.Consumer(channel, [queue], callbacks=callbacks, tag_prefix=name) for name in ("a", "b")]
    for consumer in consumers:
        consumer.consume()
    connection.Producer().publish("one", routing_key="q")
    connection.drain_events(timeout=scaled_timeout_s(10))
    consumers[0].cancel()
    connection.Producer().publish("two", routing_key="q")
    while "two" not in dict(got):
        connection.drain_events(timeout=scaled_timeout_s(10))
    assert [body for body, _ in got] == ["one", "two"]
    consumers[1].cancel()
    for _, tag in got:
        channel.basic_ack(tag)
    channel.close()
    assert queue(connection.default_channel).get() is None


def test_one_message_after_the_other_is_got_before_any_is_settled(connect, task_store):  # noqa: F811
    connection = connect()
    queue = kombu.Queue("q")(connection.default_channel)
    queue.declare()
    for n in range(4):
        connection.Producer().publish(n, routing_key="q")
    wait_noted(task_store)
    got = [queue.get() for _ in range(4)]
    assert sorted(message.payload for message in got) == [*range(4)]
    for message in got:
        message.ack()


def test_what_a_closed_channel_had_not_settled_comes_again_however_often(connect):
    connection = connect()
    queue = kombu.Queue("q")
    with contextlib.closing(connection.channel()) as channel:
        queue(channel).declare()
        kombu.Producer(channel).publish("again", routing_key="q")
    for _ in range(pyengine.celery.MAX_DELIVERIES + 2):  # none of them counts as a delivery that has killed its reader
        with contextlib.closing(connection.channel()) as channel:
            assert eventually_got(queue(channel)).payload == "again"
    message = eventually_got(queue(connection.default_channel))
    message.ack()
    assert queue(connection.default_channel).get() is None


def test_a_connection_whose_end_cannot_store_what_is_done_gives_back_all_the_rest(connect, monkeypatch):
    connection, got, close = connect(), [], pyengine.Consumer.close
    queues = [kombu.Queue(name) for name in ("q0", "q1", "q2")]

    def fail_once(consumer):
        monkeypatch.undo()
        close(consumer)
        raise pyengine.DiskError("the disk is full")

    for channel, its in ((connection.channel(), queues[:2]), (connection.channel(), queues[2:])):
        kombu.Consumer(channel, its, callbacks=[lambda body, message: got.append(message)]).consume()
    for queue in queues:
        connection.Producer().publish(queue.name, routing_key=queue.name)
    while len(got) < len(queues):
        connection.drain_events(timeout=scaled_timeout_s(10))
    done = min(got, key=lambda message: message.payload)
    done.ack()
    monkeypatch.setattr(pyengine.Consumer, "close", fail_once)
    with pytest.raises(pyengine.DiskError, match="the disk is full"):
        connection.transport.close_connection(connection.connection)
    other = connect()
    for queue in queues[1:]:
        assert received(other, queue, 1, timeout_s=30) == [queue.name]


def test_a_message_that_another_thread_acknowledges_while_its_channel_closes_is_done(connect, monkeypatch):
    connection, queue, got = connect(), kombu.Queue("q"), []
    channel = connection.channel()
    with kombu.Consumer(channel, [queue], callbacks=[lambda body, message: got.append(message)]):
        for n in range(2):
            connection.Producer().publish(n, routing_key="q")
        while len(got) < 2:
            connection.drain_events(timeout=scaled_timeout_s(10))
    on_next_untake(monkeypatch, got[1].ack)
    channel.close()
    assert eventually_got(queue(connection.default_channel)).payload == got[0].payload
    assert queue(connection.default_channel).get() is None


def eventually_got(queue):
    """The next message of a bound queue."""
    found = []
    eventually(lambda: found.append(queue.get()) or found[-1] is not None, "the queue has a message")
    return found[-1]


def test_a_queue_is_read_while_another_one_is_opened(connect, monkeypatch):
    connection, other, got, opening, was_read, waited = connect(), connect(), [], threading.Event(), threading.Event(), []

    def slow(*arguments, **options):
        opening.set()
        waited.append(was_read.wait(scaled_timeout_s(5)))
        return pyengine.consume(*arguments, **options)

    with connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)]):
        connection.Producer().publish("read", routing_key="q")
        channel = other.channel()
        monkeypatch.setattr(pyengine.celery, "consume", slow)
        opener = threading.Thread(target=kombu.Consumer(channel, [kombu.Queue("other")]).consume)
        opener.start()
        opening.wait(scaled_timeout_s(10))
        connection.drain_events(timeout=scaled_timeout_s(10))
        was_read.set()
        opener.join()
        got[0].ack()
    assert waited == [True]


def test_the_prefetch_limit_holds_until_another_thread_acknowledges(connect):
    connection = connect()
    got = []
    producer = connection.Producer()
    with connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)], prefetch_count=2):
        for n in range(3):
            producer.publish(n, routing_key="q")
        with pytest.raises(socket.timeout):
            while True:
                connection.drain_events(timeout=1)
        assert len(got) == 2
        other = threading.Thread(target=got[0].ack)
        other.start()
        connection.drain_events(timeout=scaled_timeout_s(10))
        other.join()
        for message in got[1:]:
            message.ack()
    assert len(got) == 3


def test_channels_of_a_connection_that_read_one_queue_each_have_their_messages_and_limits(connect):
    connection, got = connect(), []
    channels = [connection.channel() for _ in range(2)]
    consumers = [kombu.Consumer(channel, [kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)], prefetch_count=1)
                 for channel in channels]
    for consumer in consumers:
        consumer.consume()
    for n in range(6):
        connection.Producer().publish(n, routing_key="q")
    for _ in range(2):
        while len(got) < 2:
            connection.drain_events(timeout=scaled_timeout_s(30))
        assert [message.channel for message in sorted(got, key=lambda message: channels.index(message.channel))] == channels
        while got:
            got.pop().ack()
    consumers[1].cancel()
    for _ in range(2):
        connection.drain_events(timeout=scaled_timeout_s(30))
        got.pop().ack()
    with contextlib.closing(connect().SimpleQueue("q")) as rest:
        eventually(lambda: rest.qsize() == 0, "all are done")


def test_a_header_named_id_that_is_no_text_is_sent(connect):
    connection, queue = connect(), kombu.Queue("q")
    for number in (0, 5):
        connection.Producer().publish(number, routing_key="q", declare=[queue], headers={"id": number})
    assert sorted(received(connection, queue, 2)) == [0, 5]


def test_a_process_keeps_nothing_of_the_queues_that_it_has_answered(connect):
    connection = connect()

    def kept():
        gc.collect()
        return sum(type(each).__module__ == "pyengine.celery" for each in gc.get_objects())

    counts = []
    for first in (0, 20):
        for number in range(first, first + 20):
            connection.Producer().publish("answer", routing_key=f"reply-{number}")
        counts.append(kept())
    assert counts[0] == counts[1]


def test_a_message_is_dropped_after_its_expiration(connect):
    connection = connect()
    producer = connection.Producer()
    producer.publish("old", routing_key="q", declare=[kombu.Queue("q")], expiration=0.001)
    time.sleep(0.01)  # longer than the message may wait
    producer.publish("new", routing_key="q", expiration=600)
    assert received(connection, kombu.Queue("q"), 2, 1.0) == ["new"]


def test_an_eta_in_the_past_is_due_now_however_far(connect):
    connection, queue = connect(), kombu.Queue("q")
    for year in (1, 1969, 1970, 2020):
        connection.Producer().publish(year, routing_key="q", declare=[queue], headers={"eta": datetime(year, 1, 1, tzinfo=UTC).isoformat()})
    assert sorted(received(connection, queue, 4)) == [1, 1969, 1970, 2020]


@pytest.mark.ci
@pytest.mark.parametrize("wrong", [
    {"body": "x"}, {"body": 5}, {"headers": [1]}, {"properties": {"delivery_info": {}, "body_encoding": "none"}},
    {"properties": {"delivery_info": []}}, {"properties": {"delivery_info": {}, "expiration": "1e9"}}],
    ids=["body", "number", "headers", "encoding", "info", "expiration"])
def test_what_kombu_cannot_open_becomes_a_dead_letter_and_ends_no_worker(connect, task_store, request, wrong):  # noqa: F811
    connection, queue = connect(), kombu.Queue("q")
    producer, topic = connection.Producer(), f"kombu{zlib.crc32(request.node.name.encode())}-q"
    queue(connection.default_channel).declare()
    message = {"body": "eA==", "content-type": "text/plain", "content-encoding": "utf-8", "headers": {},
               "properties": {"delivery_info": {}, "body_encoding": "base64"}}
    with pyengine.connect(task_store) as other:
        other.put(topic, json.dumps(message | wrong).encode())
    producer.publish("sound", routing_key="q")
    assert received(connection, queue, 2, 2.0) == ["sound"]
    with pyengine.open_store(task_store) as store:
        eventually(lambda: store.queue_end(f"%DLQ%{topic}", 0) == 1, "it is a dead letter")


def test_a_dead_letter_comes_again_if_the_engine_goes_before_it_is_put(connect, task_store, request, monkeypatch):  # noqa: F811
    connection, queue = connect(), kombu.Queue("q")
    queue(connection.default_channel).declare()
    with pyengine.connect(task_store) as other:
        other.put(f"kombu{zlib.crc32(request.node.name.encode())}-q", b"no message")
    failed = threading.Event()

    def fail(*arguments, **options):
        failed.set()
        raise pyengine.EngineUnavailableError("it has gone")

    with kombu.Consumer(connection, [queue], callbacks=[lambda found, message: None]):
        with monkeypatch.context() as patch:
            patch.setattr(pyengine.celery, "give_back", fail)
            with pytest.raises(pyengine.EngineUnavailableError):
                connection.drain_events(timeout=scaled_timeout_s(10))
        assert failed.is_set()
    assert received(connection, queue, 1, 0.2) == []
    with contextlib.closing(connect().SimpleQueue("q")) as rest:
        eventually(lambda: rest.qsize() == 0, "it is done")


def test_a_message_that_was_rejected_while_no_engine_ran_comes_again(tmp_path, monkeypatch):
    """Celery settles it no second time: it only logs the error of a reject."""
    monkeypatch.setattr(pyengine.celery, "HANDLE_AGAIN_S", 0.05)
    store, got = tmp_path / "store", []
    with kombu.Connection(f"pyengine://{store}") as connection:
        with pyengine.Engine(store, **testing.SMALL_FILES):
            connection.Producer().publish("again", routing_key="q", declare=[kombu.Queue("q")])
            consumer = connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: got.append(message)], prefetch_count=1)
            consumer.consume()
            connection.drain_events(timeout=scaled_timeout_s(10))
        got[0].reject_log_error(pyengine.celery._LOG, connection.connection_errors)
        with pyengine.Engine(store):
            connection.drain_events(timeout=scaled_timeout_s(10))
            assert [message.payload for message in got] == ["again"] * 2
            got[1].reject()
            assert consumer.channel.qos.can_consume()
            with pyengine.open_store(store) as reader:
                eventually(lambda: reader.queue_end("%DLQ%celery-q", 0) == 1, "it is a dead letter")


def test_a_message_that_is_given_back_while_it_is_taken_again_counts_once_and_can_be_acknowledged(connect, monkeypatch):
    connection, queue = connect(), kombu.Queue("q")
    connection.Producer().publish("twice", routing_key="q", declare=[queue])
    got, give_back = [], pyengine.Consumer.requeue

    def give_back_and_take(*arguments):  # as another thread may, before the first one goes on
        give_back(*arguments)
        connection.drain_events(timeout=scaled_timeout_s(10))

    with kombu.Consumer(connection, [queue], callbacks=[lambda body, message: got.append(message)], prefetch_count=2) as consumer:
        connection.drain_events(timeout=scaled_timeout_s(10))
        with monkeypatch.context() as patch:
            patch.setattr(pyengine.Consumer, "requeue", give_back_and_take)
            got[0].requeue()
        connection.Producer().publish("beside", routing_key="q")
        connection.drain_events(timeout=scaled_timeout_s(10))
        assert not consumer.channel.qos.can_consume()
        for message in got[1:]:
            message.ack()
    with contextlib.closing(connect().SimpleQueue("q")) as rest:
        eventually(lambda: rest.qsize() == 0, "it is done")


def test_a_clients_own_message_that_is_given_back_wakes_the_event_loop(connect):
    connection, hub, got = connect(), Hub(), []
    queue = kombu.Queue("own", kombu.Exchange("news", type="fanout"), exclusive=True)

    def give_back_once(body, message):
        got.append(body)
        (message.ack if len(got) == 2 else message.requeue)()

    with kombu.Consumer(connection, [queue], callbacks=[give_back_once]):
        connection.Producer().publish("again", exchange="news")
        connection.register_with_event_loop(hub)
        hub.call_later(scaled_timeout_s(5), hub.stop)
        loop = hub.create_loop()
        until_s = time.monotonic() + scaled_timeout_s(5)
        while len(got) < 2 and time.monotonic() < until_s:
            next(loop)
        connection.transport.unregister_from_event_loop(connection.connection, hub)
    hub.close()
    assert got == ["again"] * 2


def test_a_forked_child_needs_no_lock_that_another_thread_of_its_parent_has(connect):
    connection = connect()
    with connection.SimpleQueue("q") as queue:
        queue.put("x")
        message = queue.get(timeout=scaled_timeout_s(10))
        store, has_lock, may_end = connection.transport.store, threading.Event(), threading.Event()

        def hold():
            with store.lock, store.queue("q").lock:
                has_lock.set()
                may_end.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        has_lock.wait()
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(int(scaled_timeout_s(10)))
                connection.close()
                os._exit(0)
            finally:
                os._exit(1)
        may_end.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        message.ack()


def test_a_forked_child_sends_and_reads_by_itself(connect):
    connection = connect()
    queue = kombu.Queue("q")
    producer = connection.Producer()
    producer.publish("parent", routing_key="q", declare=[queue])
    pid = os.fork()
    if pid == 0:
        try:
            connection.Producer().publish("child", routing_key="q")
            connection.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    producer.publish("parent again", routing_key="q")
    assert sorted(received(connection, queue, 3)) == ["child", "parent", "parent again"]


def test_a_queue_that_does_not_exist_is_not_found(connect):
    with pytest.raises(kombu.exceptions.ChannelError, match="NOT_FOUND"):
        kombu.Queue("none")(connect().default_channel).queue_declare(passive=True)


def test_the_size_of_a_queue_is_what_is_not_done(connect):
    with contextlib.closing(connect().SimpleQueue("sized")) as queue:
        assert queue.qsize() == 0
        for n in range(3):
            queue.put(n)
        eventually(lambda: queue.qsize() == 3, "all three wait")
        queue.clear()
        eventually(lambda: queue.qsize() == 0, "all are dropped")


def test_without_kombu_the_sentence_says_how_to_get_it():
    code = "import sys; sys.modules['kombu'] = None; import pyengine.celery"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "kombu is not installed" in done.stderr and "pip install 'pyengine-store[celery]'" in done.stderr
