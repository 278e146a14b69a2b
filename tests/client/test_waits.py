"""A consumer that waits costs nothing: it reads only where messages have arrived."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import pyengine
from pyengine.ipc import live_reader
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def fetches(monkeypatch):
    """The queues that consumers have fetched from, one entry each time."""
    from pyengine.ipc.live_reader import LiveStoreReader

    made, fetch = [], LiveStoreReader._fetch
    monkeypatch.setattr(LiveStoreReader, "_fetch", lambda self, topic, queue_id, *rest: made.append((topic, queue_id)) or fetch(
        self, topic, queue_id, *rest))
    return made


@pytest.fixture(params=["async", "sync"])
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
            eventually(lambda: consumer._sleeper._struct.is_asleep, "it waits")
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


class Refusing(ThreadPoolExecutor):
    """An event loop's default executor of which nobody may take a thread."""

    def submit(self, *_, **__):
        raise AssertionError("the wait takes a thread that to_thread() and look-ups of names need")


def test_a_wait_of_asyncio_takes_no_thread_of_the_loop(store):
    engine, producer = store

    async def waits(consumer) -> list[pyengine.Message]:
        asyncio.get_running_loop().set_default_executor(Refusing())
        asked = asyncio.create_task(consumer.pull_async(1, timeout_s=None))
        while not consumer._sleeper._struct.is_asleep:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        again = asyncio.create_task(consumer.pull_async(1, timeout_s=scaled_timeout_s(60)))
        await asyncio.sleep(0)
        producer.put("quiet", b"mine", queue_id=3)
        return await again

    with pyengine.consume(engine.root, "quiet", group="g") as consumer:
        read_all(consumer)
        loop = asyncio.new_event_loop()
        try:
            assert [message.body for message in loop.run_until_complete(waits(consumer))] == [b"mine"]
        finally:
            loop.close()


def test_a_member_lists_the_queues_of_a_topic_again_only_after_new_messages(store, monkeypatch):
    engine, producer = store
    with pyengine.consume(engine.root, "quiet", group="g", session_timeout_s=60) as consumer:
        read_all(consumer)
        monkeypatch.setattr("pyengine.client.consumer.LISTING_INTERVAL_S", 3600.0)
        consumer._housekeep_once()
        listed, queue_ids = [], consumer._reader.queue_ids
        monkeypatch.setattr(consumer._reader, "queue_ids", lambda topic: listed.append(topic) or queue_ids(topic))
        consumer._queue_ids()
        consumer._listing_due_s = float("inf")
        del listed[:]
        assert consumer._queue_ids() == [0, 1, 2, 3] and "quiet" not in listed
        producer.put("quiet", b"new", queue_id=7)
        eventually(lambda: consumer._queue_ids() == [0, 1, 2, 3, 7], "the new queue")
        got: list[pyengine.Message] = []
        eventually(lambda: got.extend(consumer.pull(1, timeout_s=0.2)) or got, "its message")
        assert got[0].queue_id == 7


def test_a_signal_handler_may_use_the_consumer_that_it_interrupts(store, monkeypatch):
    engine, _ = store
    consumer = pyengine.consume(engine.root, "quiet", group="g")
    read_all(consumer)
    used: list[str] = []
    look = live_reader.store_use

    def interrupted(root):  # inside the look for the engine that a call of the consumer begins with
        if threading.current_thread() is asking and not used:
            used.append("resume")
            consumer.resume()
        return look(root)

    asking = threading.Thread(target=lambda: eventually(lambda: consumer.pull(1, timeout_s=0.2) or used, "it looked"), daemon=True)
    monkeypatch.setattr(live_reader, "store_use", interrupted)
    monkeypatch.setattr(live_reader, "ENGINE_CHECK_INTERVAL_S", 0.0)
    asking.start()
    asking.join(scaled_timeout_s(10))
    assert used and not asking.is_alive(), "it waits for itself"
    consumer.close()  # not if it fails: it would wait too
