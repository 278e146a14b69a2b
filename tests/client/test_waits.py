"""A consumer that waits costs nothing: it reads only where messages have arrived."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import select
import threading
from contextlib import suppress
from functools import partial

import pytest

import pyengine
from fix_client import Refusing, due_commit, housekeep_once, is_asleep, members_of, reader_of, retries_of
from fix_golden import usual
from pyengine.client import consumer as consumer_module
from pyengine.ipc import live_reader
from pyengine.ipc.group_members import GroupMembers
from pyengine.native import waiting as waiting_module
from pyengine.storage import mapped_file
from pyengine.storage.commit_log import LogEnd
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def fetches(monkeypatch):
    """The queues that consumers have fetched from, one entry each time."""
    from pyengine.ipc.live_reader import LiveStoreReader

    made, fetch = [], LiveStoreReader._fetch
    monkeypatch.setattr(LiveStoreReader, "_fetch", lambda self, topic, queue_id, *rest: made.append((topic, queue_id)) or fetch(
        self, topic, queue_id, *rest))
    return made


in_async = pytest.mark.parametrize("store", usual(["async", "sync"], ["async"], pytest.mark.ci), indirect=True)


@pytest.fixture(params=usual(["async", "sync"], ["sync"], pytest.mark.ci))
def store(request, make_engine):
    """A running engine in each mode, with a topic of four queues that has been read."""
    engine = make_engine(request.param)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for queue_id in range(4):
            producer.put("quiet", b"first", queue_id=queue_id)
        yield engine, producer


def read_all(consumer) -> None:
    got = []
    eventually(lambda: got.extend(consumer.pull(32, timeout_s=0.2)) or len(got) == 4, "the first messages")
    eventually(lambda: not consumer.pull(32, timeout_s=0.2), "no more")


def test_a_close_at_any_moment_of_its_thread_ends_the_thread(store):
    """Here between the thread's waking and its looking why."""
    engine, _producer = store

    class Due(threading.Event):
        def clear(self) -> None:
            consumer._closing.set()
            self.set()
            super().clear()

    consumer = pyengine.consume(engine.root, "quiet", group="g")
    eventually(lambda: consumer._is_settled, "it waits")
    consumer._is_due.__class__ = Due
    consumer._is_due.set()
    consumer._thread.join(scaled_timeout_s(20))
    is_over = not consumer._thread.is_alive()
    consumer._is_due.set()
    consumer.close()
    assert is_over


@in_async
def test_messages_of_other_topics_cause_no_fetch(store, fetches):
    engine, producer = store
    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        read_all(consumer)
        got: list[pyengine.Message] = []
        thread = threading.Thread(target=lambda: got.extend(consumer.pull(1, timeout_s=scaled_timeout_s(60))))
        del fetches[:]
        thread.start()
        with pyengine.open_store(engine.root) as reader:
            for number in range(50):
                result = producer.put("busy", b"x", queue_id=0)
                assert reader.wait_for_message("busy", 0, result.queue_offset, timeout_s=scaled_timeout_s(30)), number
        assert fetches == []
        producer.put("quiet", b"mine", queue_id=2)
        thread.join(scaled_timeout_s(60))
        assert [message.body for message in got] == [b"mine"] and set(fetches) == {("quiet", 2)}


@in_async
def test_a_wait_polls_no_queue(store, fetches):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        read_all(consumer)
        del fetches[:]
        assert consumer.pull(1, timeout_s=1.2) == []
        assert fetches == []


def test_what_other_threads_change_ends_a_wait(store):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        read_all(consumer)
        for change in (lambda: consumer.seek(1, "first"), consumer.close):
            got: list[pyengine.Message] = []
            thread = threading.Thread(target=lambda: got.extend(consumer.pull(1, timeout_s=None)), daemon=True)
            thread.start()
            eventually(lambda: is_asleep(consumer), "it waits")
            change()
            thread.join(scaled_timeout_s(30))
            assert not thread.is_alive()


def test_a_consumer_goes_on_with_the_next_engine(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.consume(engine.root, "T", group="g") as consumer:
        for number in range(3):
            with pyengine.connect(engine.root) as producer:
                producer.put("T", b"%d" % number)
            got: list[pyengine.Message] = []
            eventually(lambda: got.extend(consumer.pull(1, timeout_s=0.5)) or got, "the message")
            assert got[0].body == b"%d" % number
            assert engine.stop() and consumer.pull(1, timeout_s=0) == []
            engine.start()


@in_async
def test_a_wait_of_asyncio_takes_no_thread_of_the_loop(store):
    engine, producer = store

    async def waits(consumer) -> list[pyengine.Message]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Refusing())
        called: list[int] = []
        loop.add_reader(consumer.fileno(), called.append, 1)  # of the program itself, beside the waits
        asked = asyncio.create_task(consumer.pull_async(1, timeout_s=None))
        while not (called and is_quiet(consumer)):
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        again = asyncio.create_task(consumer.pull_async(1, timeout_s=scaled_timeout_s(60)))
        await asyncio.sleep(0)
        del called[:]
        producer.put("quiet", b"mine", queue_id=3)
        got = await again
        while not called:
            await asyncio.sleep(0)
        assert loop.remove_reader(consumer.fileno()) and await consumer.pull_async(1, timeout_s=0.01) == []
        return got

    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        read_all(consumer)
        loop = asyncio.new_event_loop()
        try:
            assert [message.body for message in loop.run_until_complete(waits(consumer))] == [b"mine"]
        finally:
            loop.close()


def is_readable(consumer, timeout_s: float = 0.0) -> bool:
    return bool(select.select([consumer], [], [], timeout_s)[0])


def is_quiet(consumer) -> bool:
    return not is_readable(consumer) and consumer._readiness._armed_in is not None


def drain(consumer) -> list[bytes]:
    """Pull, as a program does that waits for the descriptor, until it is no longer readable."""
    got = []

    def is_done() -> bool:
        got.extend(message.body for message in consumer.pull(1, timeout_s=0))
        return is_quiet(consumer)

    eventually(is_done, "nothing more to read")
    return got


def take(consumer, count: int = 1) -> list[bytes]:
    """Wait for the descriptor, pull, and so on until there are `count` messages and the descriptor is not readable."""
    got: list[bytes] = []

    def has_come() -> bool:
        assert is_readable(consumer, scaled_timeout_s(30)), got
        got.extend(message.body for message in consumer.pull(32, timeout_s=0))
        return len(got) >= count

    eventually(has_come, "messages after the descriptor became readable", timeout_s=60)
    return got + drain(consumer)


@in_async
def test_a_descriptor_is_readable_as_long_as_there_are_messages(store):
    engine, producer = store
    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        assert is_readable(consumer), "before the first pull"
        assert take(consumer, 4) == [b"first"] * 4
        with pyengine.open_store(engine.root) as reader:
            result = producer.put("busy", b"x", queue_id=0)
            assert reader.wait_for_message("busy", 0, result.queue_offset, timeout_s=scaled_timeout_s(30))
        assert not is_readable(consumer), "messages of others do not raise it"
        for number in range(20):
            for queue_id in range(4):
                producer.put("quiet", b"%d" % number, queue_id=queue_id)
            assert take(consumer, 4) == [b"%d" % number] * 4
        consumer.pause()
        producer.put("quiet", b"while it is paused", queue_id=0)
        drain(consumer)
        consumer.resume()
        assert take(consumer) == [b"while it is paused"]


def test_no_message_is_put_past_a_descriptor(store, rng):
    """Puts race with the pulls that make it unreadable: each message is read without a look at the time."""
    engine, producer = store
    count = 400
    pauses = [rng.choice((0, 0, 50, 300, 2000)) for _ in range(count)]

    def put() -> None:
        for number, turns in enumerate(pauses):
            producer.put("quiet", b"%d" % number, queue_id=number % 4)
            for _ in range(turns):
                pass

    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        take(consumer, 4)
        thread = threading.Thread(target=put)
        thread.start()
        got: list[bytes] = []
        while len(got) < count:
            assert is_readable(consumer, scaled_timeout_s(30)), f"{len(got)} of {count}"
            got += [message.body for message in consumer.pull(rng.randint(1, 9), timeout_s=0)]
        thread.join()
        assert sorted(got, key=int) == [b"%d" % number for number in range(count)]


@in_async
def test_a_descriptor_is_raised_by_what_other_threads_change(store, monkeypatch):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="g", auto_commit=False, max_span=1) as consumer:
        monkeypatch.setattr("pyengine.client.consumer.FETCH_MESSAGES", 1)
        messages: list[pyengine.Message] = []
        eventually(lambda: messages.extend(consumer.pull(32, timeout_s=0.2)) or len(messages) == 4, "the first messages")
        for change in (lambda: consumer.requeue(messages[0]), lambda: consumer.seek(1, "first"),
                       lambda: setattr(consumer, "_background_error", pyengine.EngineError("told")) or consumer._stir()):
            drain(consumer)
            thread = threading.Thread(target=change)
            thread.start()
            assert is_readable(consumer, scaled_timeout_s(30))
            thread.join()
            with suppress(pyengine.EngineError):
                consumer.pull(1, timeout_s=0)
        drain(consumer)
        descriptor = consumer.fileno()
        threading.Thread(target=consumer.close).start()
        assert select.select([descriptor], [], [], scaled_timeout_s(30))[0], "a loop learns that it was closed"
        eventually(lambda: consumer._is_closed, "it is closed")
        assert select.select([descriptor], [], [], 0)[0]
        with pytest.raises(pyengine.UsageError, match="closed"):
            consumer.fileno()


def test_a_descriptor_is_raised_by_a_commit_that_frees_a_queue(store):
    engine, producer = store
    for number in range(4):
        producer.put("quiet", b"%d" % number, queue_id=0)
    with pyengine.consume(engine.root, "quiet", group="g", auto_commit=False, max_span=2, queues=[0]) as consumer:
        messages: list[pyengine.Message] = []
        eventually(lambda: messages.extend(consumer.pull(1, timeout_s=0)) or len(messages) == 3, "as many as the span allows")
        consumer.ack(messages[1:])
        while more := consumer.pull(1, timeout_s=0):
            messages += more
        drain(consumer)
        assert len(messages) < 5
        consumer.commit(messages)
        assert is_readable(consumer), "without a wait for the housekeeping"
        assert consumer.pull(1, timeout_s=0)


def test_a_descriptor_is_raised_for_what_another_member_leaves(store):
    engine, producer = store
    with pyengine.consume(engine.root, "quiet", group="g", auto_commit=False) as other:
        with pyengine.consume(engine.root, "quiet", group="g") as consumer:
            eventually(lambda: len(consumer.assignment) == 2 == len(other.assignment), "two queues each")
            got = drain(consumer)
            for queue_id in range(4):
                producer.put("quiet", b"second", queue_id=queue_id)
            while got.count(b"second") < 2:
                got += take(consumer)
            other.close()
            while got.count(b"second") < 4:
                got += take(consumer)


@in_async
def test_a_descriptor_is_raised_for_a_redelivery(store):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="g", queues=[1], auto_commit=False) as consumer:
        message, = consumer.pull(1, timeout_s=scaled_timeout_s(30))
        drain(consumer)
        consumer.retry(message, delay_level=1)
        assert take(consumer) == [b"first"]


def test_a_descriptor_goes_on_with_the_next_engine(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.consume(engine.root, "T", group="g") as consumer:
        drain(consumer)
        for number in range(3):
            with pyengine.connect(engine.root) as producer:
                producer.put("T", b"%d" % number)
            assert take(consumer) == [b"%d" % number]
            if number == 1:
                engine.kill_all()
            else:
                assert engine.stop()
            engine.start()


@in_async
def test_a_descriptor_of_a_parent_is_refused_in_a_child(store):
    engine, producer = store
    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        take(consumer, 4)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                with pytest.raises(pyengine.UsageError, match="make a new one in the child"):
                    consumer.fileno()
                with pyengine.consume(engine.root, "quiet", group="of the child") as mine:
                    os.write(writing, b"".join(take(mine, 4)))
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as told:
            assert told.read() == b"first" * 4
        os.waitpid(child, 0)
        producer.put("quiet", b"for the parent", queue_id=2)
        assert take(consumer) == [b"for the parent"]


def test_one_thread_waits_for_all_consumers(store):
    engine, producer = store

    def threads() -> int:  # of the system: this one is not Python's
        return len(os.listdir("/proc/self/task")) - threading.active_count()

    before, open_before = threads(), len(os.listdir("/proc/self/fd"))
    consumers = [pyengine.consume(engine.root, "quiet", group=f"g{number}") for number in range(8)]
    for consumer in consumers:
        take(consumer, 4)
    assert threads() == before + 1
    producer.put("quiet", b"for all", queue_id=1)
    assert [take(consumer) for consumer in consumers] == [[b"for all"]] * 8
    for consumer in consumers:
        consumer.close()
    assert threads() == before
    del consumer, consumers
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_a_signal_handler_may_use_the_consumer_that_it_interrupts(store, monkeypatch):
    engine, _ = store
    consumer = pyengine.consume(engine.root, "quiet", group="g")
    read_all(consumer)
    used: list[str] = []
    nested: list[int] = []
    look = live_reader.store_use

    def interrupted(root):  # inside the looks for the engine that calls of the consumer begin with, for its memory and for a level
        if threading.current_thread() is asking and not nested and len(used) < 20:
            nested.append(1)
            consumer.resume()
            consumer.lag()
            used.append("resume and lag")
            nested.clear()
        return look(root)

    def ask() -> None:
        eventually(lambda: consumer.pull(1, timeout_s=0.2) and len(used) >= 4, "it looked")

    asking = threading.Thread(target=ask, daemon=True)
    monkeypatch.setattr(live_reader, "store_use", interrupted)
    monkeypatch.setattr(live_reader, "ENGINE_CHECK_INTERVAL_S", 0.0)
    consumer.seek(None, "first")
    asking.start()
    asking.join(scaled_timeout_s(20))
    assert len(used) >= 4 and not asking.is_alive(), "it waits for itself"
    consumer.close()  # not if it fails: it would wait too


@in_async
def test_a_signal_handler_may_read_the_files_that_it_interrupts(store, monkeypatch):
    engine, _ = store
    assert engine.stop()
    reader = pyengine.open_store(engine.root)
    used: list[int] = []
    find, map_file = LogEnd.find, mapped_file.map_read_only

    def interrupted(function, *arguments):
        if len(used) < 2:
            at = len(used)
            used.append(-1)
            used[at] = len(reader.get_message("quiet", 0, 0).messages)
        return function(*arguments)

    monkeypatch.setattr(LogEnd, "find", lambda end: interrupted(find, end))
    monkeypatch.setattr(mapped_file, "map_read_only", partial(interrupted, map_file))
    thread = threading.Thread(target=reader.get_message, args=("quiet", 0, 0), daemon=True)
    thread.start()
    thread.join(scaled_timeout_s(20))
    assert used == [1, 1] and not thread.is_alive(), "it waits for itself"
    reader.close()


def beats(consumer) -> bool:
    """One beat of the process: whether the consumer's own thread is to do something."""
    consumer._is_due.clear()
    consumer_module._pulse.beats.wait(0.01)
    consumer._look()
    return consumer._is_due.is_set()


def rests(consumer) -> bool:
    """Whether nothing of this consumer needs the interpreter."""
    return not beats(consumer) and consumer._beat._rests


@pytest.fixture
def unkept(monkeypatch):
    """No thread beats or does housekeeping: the test does."""
    monkeypatch.setattr(consumer_module._Pulse, "add", lambda *_: None)
    monkeypatch.setattr(consumer_module, "_pulse", consumer_module._Pulse())
    monkeypatch.setattr(waiting_module, "BEAT_INTERVAL_S", 0.0)
    monkeypatch.setattr(consumer_module, "_housekeeping_loop", lambda *_: None)


def settle(*consumers) -> None:
    def is_settled() -> bool:
        for consumer in consumers:
            housekeep_once(consumer)
            queues = reader_of(consumer).root / "consumequeue"
            if not queues.is_dir():  # the first message is not dispatched yet
                return False
            for folder in queues, *queues.iterdir():
                os.utime(folder, (1, 1))  # as if its last queue was made long ago
        return all(rests(consumer) for consumer in consumers)

    eventually(is_settled, "nothing more to do")


def keep_while_it_beats(consumer, is_so, what: str) -> None:
    """Do the housekeeping that beats ask for until something is so: a queue's file may come after its folder."""
    eventually(lambda: beats(consumer) and (housekeep_once(consumer) or is_so()), what)


@pytest.mark.parametrize("sharing", usual(["queues", "messages"], ["messages"], pytest.mark.ci))
def test_an_idle_member_only_beats_until_something_changes(store, unkept, sharing):
    engine, producer = store
    options = {"group": "g", "session_timeout_s": 60, "sharing": sharing}
    with pyengine.consume(engine.root, "quiet", **options) as consumer:
        eventually(lambda: housekeep_once(consumer) or len(consumer.assignment) == 4, "the queues are made")
        read_all(consumer)
        due_commit(consumer)
        settle(consumer)
        slot = members_of(consumer)
        before = slot.members()
        assert rests(consumer) and slot.members() != before, "others see that it lives"
        producer.put("quiet", b"more", queue_id=1)
        got: list[pyengine.Message] = []
        eventually(lambda: got.extend(consumer.pull(1, timeout_s=0.2)) or got, "the message")
        consumer.pull(1, timeout_s=0)
        due_commit(consumer, float("inf"))
        assert not rests(consumer), "an offset is to be stored soon"
        due_commit(consumer)
        assert beats(consumer), "it is to be stored now"
        settle(consumer)
        with pyengine.consume(engine.root, "quiet", **options) as other:
            assert beats(consumer), "a member has joined"
            settle(consumer, other)
            assert len(consumer.assignment) == len(other.assignment) == (2 if sharing == "queues" else 4)
        assert beats(consumer), "it has left"
        settle(consumer)
        pyengine.ConsumerGroups(engine.root).reset("quiet", "g", "first")
        assert beats(consumer), "the group was reset"
        settle(consumer)
        producer.put("quiet", b"in a new queue", queue_id=4)
        keep_while_it_beats(consumer, lambda: len(consumer.assignment) == 5, "a queue was made")
        settle(consumer)
        members_of(consumer).path.unlink()
        assert beats(consumer), "the members' file is gone"
        settle(consumer)
        assert engine.stop()
        eventually(lambda: beats(consumer), "the engine has ended")
        engine.start()


def test_an_idle_consumer_wakes_for_a_retry_topic_a_matching_topic_and_a_store_that_is_gone(store, unkept):
    engine, producer = store
    with pyengine.consume(engine.root, re.compile("qui.*"), group="g", auto_commit=False) as consumer:
        messages: list[pyengine.Message] = []
        eventually(lambda: messages.extend(consumer.pull(32, timeout_s=0.2)) or messages, "the messages")
        settle(consumer)
        producer.put("quince", b"of another topic")
        keep_while_it_beats(consumer, lambda: consumer.topics == ["quiet", "quince"], "a topic was made")
        settle(consumer)
        consumer.retry(messages[0], delay_level=1)
        keep_while_it_beats(consumer, lambda: retries_of(consumer) is not None, "its retry topic was made")
        settle(consumer)
        engine.root.rename(engine.root.with_name("elsewhere"))
        try:
            assert beats(consumer), "the store was moved"
            housekeep_once(consumer)
            with pytest.raises(pyengine.EngineUnavailableError, match="moved"):
                consumer.pull(1, timeout_s=0)
        finally:
            engine.root.with_name("elsewhere").rename(engine.root)


@in_async
def test_a_member_that_seems_stopped_is_looked_at_until_it_beats_again(store, unkept):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="g", session_timeout_s=60) as consumer:
        settle(consumer)
        stopped = GroupMembers(engine.root, "quiet", "g")
        stopped.join()
        try:
            assert beats(consumer), "it has joined"
            eventually(lambda: beats(consumer), "it seems stopped")
            for _ in range(3):
                assert beats(consumer)
            stopped.heartbeat()
            assert beats(consumer), "it is back"
        finally:
            stopped.close()


@in_async
def test_a_member_that_is_busy_does_not_keep_the_others_from_beating(store):
    engine, _ = store
    with pyengine.consume(engine.root, "quiet", group="one", session_timeout_s=60) as busy, \
            pyengine.consume(engine.root, "quiet", group="two", session_timeout_s=60) as other, busy._work:
        def seen() -> object:
            return [each.heartbeats for each in members_of(other).members().values()]

        for _ in range(3):
            before = seen()
            eventually(lambda before=before: seen() != before, "a heartbeat of the other one")


def test_the_thread_that_beats_ends_with_the_last_consumer(store):
    engine, _ = store

    def runs() -> bool:
        return any(thread.name == "pyengine-consumers" for thread in threading.enumerate())

    for _ in range(2):
        with pyengine.consume(engine.root, "quiet", group="g"), pyengine.consume(engine.root, "quiet", group="h"):
            assert sum(thread.name == "pyengine-consumers" for thread in threading.enumerate()) == 1
        eventually(lambda: not runs(), "it ends")


def test_a_long_wait_notices_the_next_engine(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.consume(engine.root, "T", group="g") as consumer:
        got: list[pyengine.Message] = []
        thread = threading.Thread(target=lambda: got.extend(consumer.pull(1, timeout_s=None)), daemon=True)
        thread.start()
        eventually(lambda: is_asleep(consumer), "it waits")
        engine.kill_all()
        engine.start()
        with pyengine.connect(engine.root) as producer:
            producer.put("T", b"of the next engine")
        thread.join(scaled_timeout_s(30))
        assert [message.body for message in got] == [b"of the next engine"]
