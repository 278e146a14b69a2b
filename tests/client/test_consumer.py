"""The consumer in one process: forms of asking, what is remembered when, where it starts, what it survives."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import select
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

import pyengine
from broker_lock import held_by_a_broker
from fix_client import (
    Refusing,
    age_leaving,
    before_it_looks,
    housekeep,
    housekeep_once,
    leave_cancelled,
    leave_unfinished,
    reader_of,
    session_of,
)
from fix_engine import EACH_MODE
from fix_failpoints import Interrupted
from fix_store_builder import START_MS
from interrupting import interrupt, interrupted_at_each_place
from pyengine import arguments
from pyengine.client.consumer import READ_AHEAD_BYTES
from pyengine.client.group_session import AssignedQueue
from pyengine.client.retries import RetriedMessage
from pyengine.errors import DiskError, NotAStoreError, StoreBusyError, UsageError
from pyengine.formats.consume_queue import FILLER
from pyengine.ipc.crashed_engine_memory import rebuild_offline, recover_offline
from pyengine.ipc.store_lock import owning, read_holder
from pyengine.native.waiting import Beat
from pyengine.storage.config import load_config
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.engine_id import raise_epoch
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def consume(builder):
    """consume(...) on the builder's store: a Consumer that is closed at the end."""
    opened = []

    def make(**options) -> pyengine.Consumer:
        options = {"topic": "orders", "group": "billing"} | options
        opened.append(pyengine.consume(builder.root, **settings(builder), **options))
        return opened[-1]

    yield make
    for consumer in opened:
        leave_unfinished(consumer)


def settings(builder) -> dict[str, object]:
    return {name: getattr(builder.geometry, name) for name in builder.geometry.__dataclass_fields__}


def stored(builder) -> dict[int, int]:
    return ConsumerOffsets(builder.root).read("orders", "billing")


def fill(builder, count: int, queue_id: int = 0, **fields) -> list[bytes]:
    bodies = [b"%d-%d" % (queue_id, builder.queue_offsets["orders", queue_id] + number) for number in range(count)]
    for body in bodies:
        builder.put("orders", body, queue_id=queue_id, **fields)
    return bodies


def bodies(messages) -> list[bytes]:
    return [message.body for message in messages]


# --- forms ----------------------------------------------------------------------------------------


def test_pull_gives_messages_in_the_order_of_each_queue(builder, consume):
    expected = {queue_id: fill(builder, 40, queue_id) for queue_id in range(3)}
    consumer = consume()
    got = []
    while found := consumer.pull(7, timeout_s=0):
        assert len(found) <= 7
        got += found
    for queue_id, each in expected.items():
        assert bodies(message for message in got if message.queue_id == queue_id) == each
    assert consumer.positions == {0: 40, 1: 40, 2: 40} and consumer.assignment == [0, 1, 2]


def test_a_relative_path_means_the_same_store_after_a_change_of_directory(builder, monkeypatch):
    monkeypatch.chdir(builder.root.parent)
    sent = fill(builder, 3)
    path = builder.root.relative_to(builder.root.parent)
    with pyengine.open_store(path, **settings(builder)) as reader, \
            pyengine.consume(path, "orders", group="billing", from_="first", **settings(builder)) as consumer:
        groups = pyengine.ConsumerGroups(path, **settings(builder))
        letters = pyengine.DeadLetters(path, **settings(builder))
        monkeypatch.chdir("/proc")
        assert reader.queue_range("orders", 0) == (0, 3)
        assert bodies(consumer.pull(3, timeout_s=5)) == sent
        consumer.commit()
        assert [state.group for state in groups.groups()] == ["billing"] and letters.queues() == []
    assert stored(builder) == {0: 3}


@pytest.mark.parametrize("group", ["billing", None])
def test_where_threads_are_greenlets_a_consumer_is_refused(builder, consume, monkeypatch, group):
    """With gevent's patch_all() consume() never returned."""
    sent = fill(builder, 3)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "get_ident", lambda: 1)
        with pytest.raises(UsageError, match=r"greenlets .* patch with monkey.patch_all\(thread=False\), or consume in another process$"):
            consume(group=group)
    assert bodies(consume(group=group).pull(3, timeout_s=5)) == sent


def test_a_loop_gives_messages_one_by_one_and_ends_when_closed(builder, consume):
    expected = fill(builder, 50)
    consumer = consume()
    got = []
    for message in consumer:
        got.append(message.body)
        if len(got) == 50:
            consumer.close()
    assert got == expected and stored(builder) == {0: 50}


def test_asyncio_gives_the_same(builder, consume):
    expected = fill(builder, 20)

    async def main() -> list[bytes]:
        got = []
        async with consume() as consumer:
            got += bodies(await consumer.pull_async(5))
            async for message in consumer:
                got.append(message.body)
                if len(got) == 20:
                    break
            assert await consumer.pull_async(timeout_s=0) == []
        return got

    assert asyncio.run(main()) == expected and stored(builder) == {0: 20}


@pytest.mark.parametrize("end", ["raises", "returns", "goes on"])
def test_a_block_leaves_open_what_a_task_handles_that_was_cancelled_or_goes_on(builder, consume, end):
    fill(builder, 5)

    async def work(consumer, begun) -> None:
        async for message in consumer:
            if message.queue_offset == 3:
                begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if end == "raises":
                        raise
                    return

    async def main() -> None:
        async with consume() as consumer:
            begun = asyncio.Event()
            working = asyncio.create_task(work(consumer, begun))
            await begun.wait()
            if end == "goes on":
                consumer.close()
            working.cancel()
            await asyncio.wait({working})

    asyncio.run(main())
    assert stored(builder) == {0: 3}


def test_a_block_leaves_open_what_a_short_task_has_asked_for_whose_waiter_was_cancelled(builder, consume):
    """As asyncio.wait_for does in Python 3.11."""
    expected = fill(builder, 5)

    async def work(consumer, begun) -> None:
        await asyncio.create_task(consumer.pull_async(3))
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        async with consume() as consumer:
            begun = asyncio.Event()
            working = asyncio.create_task(work(consumer, begun))
            await begun.wait()
            working.cancel()
            await asyncio.wait({working})

    asyncio.run(main())
    assert bodies(consume().pull(3)) == expected[:3]


def test_messages_of_a_task_that_has_ended_are_done(builder, consume):
    fill(builder, 5)

    async def work(consumer) -> None:
        await consumer.pull_async(3)

    async def main() -> None:
        async with consume() as consumer:
            await asyncio.create_task(work(consumer))

    asyncio.run(main())
    assert stored(builder) == {0: 3}


def test_cancelling_an_asking_task_loses_nothing(builder, consume):
    async def main() -> list[bytes]:
        async with consume() as consumer:
            asking = asyncio.create_task(consumer.pull_async(timeout_s=None))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            expected = fill(builder, 3)
            got = []
            while len(got) < 3:
                got += bodies(await consumer.pull_async(timeout_s=60))
            return [got, expected]

    builder.put("orders", b"first of all")
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 1})
    got, expected = asyncio.run(main())
    assert got == expected


@pytest.mark.parametrize("form", ["iteration", "pull_async"])
def test_a_backlog_leaves_the_event_loop_its_turns_and_a_cancellation_there_loses_nothing(builder, consume, form):
    expected = fill(builder, 3000)
    got, ended = [], []

    async def handle(consumer) -> None:
        if form == "iteration":
            async for message in consumer:
                got.append(message.body)
        while True:
            got.extend(bodies(await consumer.pull_async(1)))

    async def main() -> None:
        async with consume() as consumer:
            handling = asyncio.create_task(handle(consumer))
            while not got:
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.01, handling.cancel)
            await asyncio.wait({handling})
            ended.append(len(got))
            got.extend(bodies(await consumer.pull_async(3000)))

    asyncio.run(main())
    assert ended[0] < 3000 and got == expected


def test_a_block_whose_end_is_cancelled_before_a_thread_is_free_closes_the_consumer(consume):
    consumer = consume()
    leave_cancelled(consumer)
    assert "closed" in repr(consumer)


def test_a_cancelled_call_that_another_thread_goes_on_with_ends_no_message_that_comes_later(builder, consume, monkeypatch):
    expected = fill(builder, 2)
    for _ in range(2):
        consumer = consume()
        assert len(consumer.pull(2)) == 2
        leave_unfinished(consumer)
    may_run, begun, calls, own_thread = threading.Event(), threading.Event(), [], arguments.own_thread

    def late_once(call):
        def late():
            begun.set()
            assert may_run.wait(60)
            return call()

        calls.append(own_thread(call if calls else late))
        return calls[-1]

    async def main(consumer) -> list[bytes]:
        asyncio.get_running_loop().set_default_executor(Refusing())
        monkeypatch.setattr(arguments, "own_thread", late_once)
        asking = asyncio.create_task(consumer.pull_async())
        await asyncio.sleep(0)
        assert begun.wait(60)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        found = await consumer.pull_async(timeout_s=60)
        may_run.set()
        calls[0].result(60)
        return bodies(found)

    consumer = consume()
    assert asyncio.run(main(consumer)) == expected[:1]
    leave_unfinished(consumer)
    assert bodies(consume().pull(1)) == expected[:1]


def test_tags_choose_messages_and_the_offset_moves_over_the_others(builder, consume):
    for number in range(30):
        fill(builder, 1, tags=("paid", "sent", None)[number % 3])
    consumer = consume(tags="paid || lost")
    assert {message.tags for message in consumer.pull(100)} == {"paid"}
    assert consumer.pull(timeout_s=0) == []
    consumer.commit()
    assert stored(builder) == {0: 30}
    with pytest.raises(UsageError):
        consume(tags=" || ")
    assert len(consume(group="all", tags="*").pull(100)) == 30


def test_an_sql_condition_chooses_messages_and_the_offset_moves_over_the_others(builder, consume):
    for number in range(30):
        fill(builder, 1, properties={"price": str(number), "region": "eu" if number % 2 else "us"}, tags="paid" if number < 20 else "sent")
    consumer = consume(sql="price >= 10 AND region = 'eu'", tags="paid")
    assert [message.queue_offset for message in consumer.pull(100)] == [11, 13, 15, 17, 19]
    assert consumer.pull(timeout_s=0) == []
    consumer.commit()
    assert stored(builder) == {0: 30}
    assert consumer.notes == [] and consumer.missed == 0
    with pytest.raises(UsageError, match="SQL condition 'price >', character 8"):
        consume(sql="price >")


def test_a_pull_whose_time_is_long_over_leaves_the_rest_of_many_others_to_the_next_one(builder, consume, monkeypatch):
    fill(builder, 2000, tags="other")
    consumer = consume(tags="wanted", queues=[0])
    clock = itertools.count(time.monotonic())
    monkeypatch.setattr("pyengine.client.consumer.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert consumer.pull(timeout_s=0) == [] and 0 < consumer.positions[0] < 2000
    while select.select([consumer.fileno()], [], [], 0)[0]:
        assert consumer.pull(timeout_s=0) == []
    assert consumer.positions == {0: 2000}


def test_without_a_group_everything_is_read_and_nothing_written(builder, consume):
    fill(builder, 5, 0), fill(builder, 5, 1)
    before = sorted(path.name for path in builder.root.rglob("*"))
    consumer = consume(group=None)
    assert len(consumer.pull(100)) == 10
    with pytest.raises(UsageError, match="no group"):
        consumer.commit()
    consumer.close()
    assert sorted(path.name for path in builder.root.rglob("*")) == before


def test_closing_ends_a_pull_in_another_thread(builder, consume):
    fill(builder, 1)
    consumer = consume()
    assert len(consumer.pull()) == 1
    answers = []
    thread = threading.Thread(target=lambda: answers.append(consumer.pull(timeout_s=None)))
    thread.start()
    consumer.close()
    thread.join(60)
    assert answers == [[]] or not answers  # it had not begun to ask
    for ask in (consumer.pull, consumer.commit, consumer.pause, consumer.resume, consumer.fileno, consumer.lag, consumer.__enter__,
                lambda: consumer.ack([]), lambda: consumer.seek(None, "first"), lambda: consumer.seek(0, 0)):
        with pytest.raises(UsageError, match=r"this consumer of .* is closed: make another one with pyengine\.consume\(\)"):
            ask()


@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_a_consumer_that_is_dropped_without_an_end_leaves_its_messages_to_others(builder, consume, sharing):
    expected = fill(builder, 3)
    dropped = pyengine.consume(builder.root, "orders", group="billing", sharing=sharing, **settings(builder))
    thread = dropped._thread
    assert bodies(dropped.pull(3)) == expected
    del dropped
    gc.collect()
    thread.join(scaled_timeout_s(10))
    assert not thread.is_alive()
    assert bodies(consume(sharing=sharing).pull(3, timeout_s=scaled_timeout_s(5))) == expected


@pytest.mark.parametrize("options", [{}, {"sharing": "messages"}, {"group": None}, {"topic": ["other", "orders"]}], ids=str)
@pytest.mark.parametrize(("end", "is_async"), [("_next_own", False), ("_next", False), ("_pulling", False), ("_next", True)])
def test_a_signal_handler_that_raises_at_the_end_of_a_pull_loses_no_message(builder, consume, monkeypatch, options, end, is_async):
    expected = fill(builder, 6)
    builder.put("other", b"")
    consumer = consume(**options)
    pull = consumer.pull if not is_async else lambda *given: asyncio.run(consumer.pull_async(*given))
    got = []

    def take(most: int, until: int) -> None:
        eventually(lambda: got.extend(filter(None, bodies(pull(most)))) or len(got) >= until, "the messages")

    take(1, 2)

    def interrupted(*given, **more):
        found = inside(*given, **more)
        if found is None or found[0]:  # the end of the block, or messages
            monkeypatch.undo()
            raise Interrupted
        return found

    if end == "_pulling":
        inside = consumer._pulling.__exit__
        monkeypatch.setattr(consumer, "_pulling", SimpleNamespace())
        of_block = type("Block", (), {"__enter__": lambda _, enter=inside.__self__.__enter__: enter(),
                                      "__exit__": lambda _, *given: interrupted(*given)})
        consumer._pulling = of_block()
    else:
        inside = getattr(pyengine.Consumer, end)
        monkeypatch.setattr(pyengine.Consumer, end, interrupted)
    with pytest.raises(Interrupted):
        pull(3)
    take(3, 6)
    assert got == expected


class Raw:
    content_type = "text/plain"
    encode = decode = staticmethod(bytes)


def typed(consumer) -> pyengine.TypedConsumer:
    return pyengine.TypedConsumer(pyengine.Topic("orders", bytes, codec=Raw), consumer)


def asked_async(consumer) -> list:
    try:
        consumer.pull_async(2).send(None)
    except StopIteration as end:
        return end.value


def asked_in_a_loop(consumer, iterators=[]) -> list:  # noqa: B006 - keeps the last one, whose end is a place of its own
    iterators[:] = [iter(consumer)]
    for message in iterators[0]:
        return [message]
    return []


ASKS = {
    "pull": lambda consumer: consumer.pull(2),
    "pull_async": asked_async,
    "pull_arrow": lambda consumer: consumer.pull_arrow(2),
    "iteration": asked_in_a_loop,
    "typed": lambda consumer: typed(consumer).pull(2),
    "part": lambda consumer: consumer.part("orders").pull(2),
}
BODIES = {
    "pull_arrow": lambda table: table["body"].to_pylist(),
    "typed": lambda values: [each.value for each in values],
}


@pytest.mark.parametrize(("ask", "raises", "options"), [
    *((ask, True, {}) for ask in ASKS), ("pull", False, {}), ("iteration", False, {}), ("typed", False, {}),
    ("pull", True, {"sharing": "messages"}), ("part", True, {"topic": ["other", "orders"]}), ("pull", True, {"topic": ["other", "orders"]}),
], ids=str)
def test_what_a_pull_has_not_returned_is_not_done_when_a_signal_handler_closes(builder, consume, ask, raises, options):
    if ask == "pull_arrow":
        pytest.importorskip("pyarrow")
    fill(builder, 200)
    builder.put("other", b"other")
    got, found = set(), None

    def begin() -> pyengine.Consumer:
        consumer = consume(**options)
        while not (first := consumer.part("orders").pull(1)):
            pass
        got.update(bodies(first))
        return consumer

    def call() -> None:
        nonlocal found
        with suppress(*() if ask == "iteration" else (UsageError,)):  # it was closed before it asked
            found = ASKS[ask](consumer)

    def handler() -> None:
        consumer.close()
        if raises:
            interrupt()

    async def main() -> None:
        nonlocal consumer, found
        for _ in interrupted_at_each_place(call, handler, last=20):
            consumer.close()
            eventually(lambda: "closed" in repr(consumer), "it is closed")
            got.update(BODIES.get(ask, bodies)(found) if found is not None else ())
            assert got >= {b"0-%d" % number for number in range(stored(builder)[0])}
            consumer, found = begin(), None

    consumer = begin()
    asyncio.run(main())


@pytest.mark.parametrize("sharing", ["queues", "messages"])
@pytest.mark.parametrize("names_the_last", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_commit_of_another_thread_leaves_open_what_a_pull_has_not_returned(builder, consume, sharing, is_async, names_the_last):
    fill(builder, 6)
    consumer, commits = consume(sharing=sharing, auto_commit=False), []
    had = consumer.pull(3)
    consumer.requeue(had[1])

    class Interrupting(BaseException):
        pass

    class Committing(Raw):
        @staticmethod
        def decode(body: bytes) -> bytes:
            with ThreadPoolExecutor() as other:
                commits.append(other.submit(consumer.commit, had[-1] if names_the_last else None).result())
            raise Interrupting

    values = pyengine.TypedConsumer(pyengine.Topic("orders", bytes, codec=Committing), consumer)
    with pytest.raises(Interrupting):
        asyncio.run(values.pull_async(4)) if is_async else values.pull(4)
    assert commits == [{0: 1}]
    assert bodies(consumer.pull(4)) == [b"0-1", b"0-3", b"0-4", b"0-5"]
    assert consumer.commit() == {0: 6}


@pytest.mark.parametrize("ask", [ask for ask in ASKS if ask != "pull_async"])
def test_a_signal_handler_that_closes_ends_a_pull_that_waits_with_nothing(consume, monkeypatch, ask):
    if ask == "pull_arrow":
        pytest.importorskip("pyarrow")
    consumer = consume()
    wait = consumer._wait
    monkeypatch.setattr(consumer, "_wait", lambda *given: (consumer.close(), wait(*given)))
    assert len(ASKS[ask](consumer)) == 0
    eventually(lambda: "closed" in repr(consumer), "it is closed")


def test_an_iterator_and_a_part_keep_a_consumer(builder, consume):
    expected = fill(builder, 2)
    iterator = iter(pyengine.consume(builder.root, "orders", group="billing", **settings(builder)))
    part = pyengine.consume(builder.root, ["other", "orders"], group="two", **settings(builder)).part("orders")
    gc.collect()
    assert bodies([next(iterator), next(iterator)]) == expected
    assert bodies(part.pull(2, timeout_s=scaled_timeout_s(5))) == expected


def test_a_close_that_interrupts_a_commit_of_its_thread_comes_after_it(builder, consume, monkeypatch):
    """As in a signal handler."""
    fill(builder, 5)
    consumer = consume(auto_commit=False)
    consumer.pull(3)
    session = session_of(consumer)
    commit_in = session.commit_in

    def interrupted(*args):
        monkeypatch.setattr(session, "commit_in", commit_in)
        consumer.close()
        return commit_in(*args)

    monkeypatch.setattr(session, "commit_in", interrupted)
    assert consumer.commit() == {0: 3} == stored(builder)
    eventually(lambda: "closed" in repr(consumer), "it is closed")


def test_a_paused_queue_with_messages_that_may_have_killed_their_readers_slows_no_other(builder, consume):
    fill(builder, 3, 0), fill(builder, 6, 1)
    for _ in range(2):
        consumer = consume()
        consumer.pause([1])
        assert len(consumer.pull(3)) == 3
        leave_unfinished(consumer)
    consumer = consume()
    consumer.pause([0])
    assert len(consumer.pull(3)) == len(consumer.pull(3)) == 3
    consumer.resume()
    assert len(consumer.pull(3)) == 1, "each of them comes by itself"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("options", [{}, {"sharing": "messages"}, {"topic": ["orders", "other"]}], ids=str)
def test_what_is_done_is_stored_before_the_message_after_the_last_that_may_have_killed_its_readers(builder, consume, options, is_async):
    fill(builder, 2)

    def pull(consumer) -> list:
        return asyncio.run(consumer.pull_async(1)) if is_async else consumer.pull(1)

    for _ in range(2):
        consumer = consume(**options)
        assert bodies(pull(consumer)) == [b"0-0"]
        leave_unfinished(consumer)
    consumer = consume(auto_commit=False, commit_interval_s=3600, **options)
    consumer.ack(pull(consumer))
    assert bodies(pull(consumer)) == [b"0-1"] and stored(builder) == {0: 1}


@pytest.mark.parametrize("options", [{}, {"sharing": "messages"}], ids=str)
@pytest.mark.parametrize("topics", [["orders", "other"], ["other", "orders"]], ids=str)
def test_what_a_part_has_done_is_stored_before_what_another_part_delivers_after_it(builder, consume, topics, options):
    fill(builder, 1)
    builder.put("other", b"other", queue_id=0)
    for _ in range(2):
        consumer = consume(topic=topics, **options)
        assert bodies(consumer.part("orders").pull(1)) == [b"0-0"]
        leave_unfinished(consumer)
    consumer = consume(topic=topics, auto_commit=False, commit_interval_s=3600, **options)
    part, other = map(consumer.part, ("orders", "other"))
    part.ack(part.pull(1))
    assert bodies(other.pull(1)) == [b"other"] and stored(builder) == {0: 1}


@pytest.mark.parametrize("options", [{}, {"topic": ["orders", "other"]}, {"topic": ["orders", "other"], "sharing": "messages"}], ids=str)
def test_a_pull_before_the_end_of_one_that_may_have_killed_its_readers_does_not_keep_that_end_from_the_disk(builder, consume, options):
    fill(builder, 3)
    for _ in range(2):
        consumer = consume(**options)
        assert bodies(consumer.pull(1)) == [b"0-0"]
        leave_unfinished(consumer)
    consumer = consume(auto_commit=False, commit_interval_s=3600, **options)
    suspect = consumer.pull(1)
    assert bodies(consumer.pull(1)) == [b"0-1"]  # as another thread may
    consumer.ack(suspect)
    assert bodies(consumer.pull(1)) == [b"0-2"] and stored(builder) == {0: 1}


def test_a_part_that_is_paused_lets_no_pull_of_another_part_store_what_is_done(builder, consume):
    fill(builder, 2)
    for number in range(3):
        builder.put("other", b"%d" % number, queue_id=0)
    for _ in range(2):
        consumer = consume(topic=["orders", "other"])
        assert bodies(consumer.part("orders").pull(2)) == [b"0-0", b"0-1"]
        leave_unfinished(consumer)
    consumer = consume(topic=["orders", "other"], auto_commit=False, commit_interval_s=3600)
    consumer.ack(consumer.pull(1))
    consumer.part("orders").pause()
    for number in range(3):
        (message,) = consumer.part("other").pull(1)
        assert message.body == b"%d" % number
        consumer.ack(message)
    assert stored(builder) == {0: 1} and ConsumerOffsets(builder.root).read("other", "billing") == {0: 0}


def test_deliveries_after_a_seek_during_a_commit_are_counted(builder, consume, monkeypatch):
    fill(builder, 5)
    consumer = consume(auto_commit=False)
    messages = consumer.pull(3)
    consumer.ack(messages[2])
    session = session_of(consumer)
    commit_in = session.commit_in

    def slow(*args):
        kept = commit_in(*args)
        consumer.seek(0, 1)  # as another thread does
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(session, "commit_in", slow)
        consumer.commit(messages[0])
    assert [message.delivery_count for message in consumer.pull(2)] == [1, 1]
    leave_unfinished(consumer)
    assert [message.delivery_count for message in consume().pull(2)] == [2, 2]


# --- where it starts ------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["billing", None])
def test_a_consumer_starts_with_the_first_message_unless_told(builder, consume, group):
    expected = fill(builder, 5)
    assert bodies(consume(group=group).pull()) == expected


@pytest.mark.parametrize("start", ["first", "last", START_MS])
def test_a_group_that_has_offsets_continues_there_whatever_the_start(builder, consume, start):
    expected = fill(builder, 5)
    consumer = consume()
    consumer.commit(consumer.pull(2))
    consumer.close()
    assert bodies(consume(from_=start).pull()) == expected[2:]


def test_a_topic_that_is_nearly_another_one_is_noted(builder, consume):
    fill(builder, 1)
    assert consume(topic="order").notes == [f"{builder.root} has no topic 'order' (did you mean orders?): it is read once it comes"]
    assert consume(topic="invoices").notes == consume().notes == []


def test_a_new_group_can_start_at_the_end(builder, consume):
    fill(builder, 5)
    consumer = consume(from_="last")
    assert consumer.pull(timeout_s=0) == [] and stored(builder) == {0: 5}
    later = fill(builder, 2)
    assert bodies(consumer.pull()) == later


def test_a_start_at_the_end_is_remembered_at_once(builder, consume):
    """A member that dies before its first commit must not make the next one start at a later end."""
    fill(builder, 5)
    leave_unfinished(consume(from_="last"))
    later = fill(builder, 2)
    assert bodies(consume(from_="last").pull()) == later


def test_a_queue_that_comes_later_is_read_from_its_begin(builder, consume):
    fill(builder, 3)
    consumer = consume(from_="last")
    later = fill(builder, 4, queue_id=2)
    got = []
    while len(got) < 4:
        got += bodies(consumer.pull(timeout_s=60))
    assert got == later


@pytest.mark.parametrize("group", ["billing", None])
def test_a_later_queue_without_its_first_messages_is_read_from_the_rest_and_the_loss_is_noted(builder, consume, group):
    fill(builder, 3)
    consumer = consume(from_="last", group=group)
    builder.fill_queue("orders", 2, 7)
    later = fill(builder, 4, queue_id=2)
    housekeep(consumer)
    got = []
    while len(got) < 4:
        got += bodies(consumer.pull(timeout_s=60))
    assert got == later
    assert consumer.missed == 7 and consumer.notes == ["queue 2: 7 messages from 0 to 6 were removed before the group came to them"]


@pytest.mark.parametrize(("start", "first"), [
    (START_MS - 1, 0), (START_MS, 0), (START_MS + 1, 1), (START_MS + 3000, 3), (START_MS + 3001, 4), (START_MS + 9000, 9),
    (START_MS + 9001, 10), (datetime.fromtimestamp(START_MS / 1000 + 2, UTC), 2),
])
def test_from_a_time_means_the_first_message_stored_then_or_later(builder, consume, start, first):
    expected = fill(builder, 10)  # one a second
    assert bodies(consume(from_=start).pull(100, timeout_s=0)) == expected[first:]


def test_messages_of_one_millisecond_all_count(builder, consume):
    fill(builder, 3)
    builder_now = builder.now_ms
    expected = []
    for _ in range(9):
        builder.now_ms = builder_now
        expected += fill(builder, 1)
    fill(builder, 2)
    assert bodies(consume(from_=builder_now).pull(100))[:9] == expected


@pytest.mark.parametrize("start", ["end", -1, 1.5, None, datetime(2026, 1, 1)])
def test_a_wrong_start_is_refused(builder, consume, start):
    with pytest.raises(UsageError):
        consume(from_=start)


def test_named_queues_are_read_apart_from_the_sharing(builder, consume):
    for queue_id in range(3):
        fill(builder, 5, queue_id)
    guest = consume(queues=[1])
    assert {message.queue_id for message in guest.pull(100)} == {1}
    member = consume()
    assert member.assignment == [0, 2]
    guest.close()
    eventually(lambda: member.assignment == [0, 1, 2], "the queue is free again")


# --- what is remembered ---------------------------------------------------------------------------


def test_a_pull_that_waits_ends_with_nothing_when_the_consumer_is_closed(builder, consume):
    async def main():
        consumer = consume()
        waiting = asyncio.create_task(consumer.pull_async(timeout_s=None))
        await asyncio.sleep(0)
        consumer.close()
        assert await asyncio.wait_for(waiting, scaled_timeout_s(30)) == []
        with pytest.raises(UsageError, match="this consumer of orders is closed"):
            await consumer.pull_async()

    builder.put("other", b"")
    asyncio.run(main())


def test_a_pulled_batch_is_committed_only_after_the_next_pull_or_close(builder, consume):
    fill(builder, 10)
    consumer = consume(commit_interval_s=0)
    consumer.pull(4)
    housekeep(consumer)
    assert stored(builder) == {0: 0}
    consumer.pull(4)
    housekeep(consumer)
    assert stored(builder) == {0: 4}
    consumer.close()
    assert stored(builder) == {0: 8}


def test_a_block_that_ends_by_an_exception_leaves_the_last_messages_open(builder, consume):
    fill(builder, 10)
    with pytest.raises(ZeroDivisionError), consume() as consumer:
        for message in consumer:
            if message.queue_offset == 3:
                raise ZeroDivisionError
    assert stored(builder) == {0: 3}
    with consume() as consumer:
        assert consumer.pull(2)[0].queue_offset == 3
    assert stored(builder) == {0: 5}


@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_a_block_that_ends_after_a_recovery_that_it_has_not_seen_leaves_no_message_open(builder, consume, sharing):
    fill(builder, 3)
    consumer = consume(sharing=sharing, commit_interval_s=60)
    consumer.pull(3)
    raise_epoch(builder.root)
    consumer.close()
    assert stored(builder) == {0: 3}


@contextmanager
def recovery_until_the_first_wait(builder, monkeypatch):
    """Recover the store in the block, until a consumer has looked once who has it."""
    with ExitStack() as recovery:
        recovery.enter_context(owning(builder.root))

        def find_and_end(root):
            found = read_holder(root)
            recovery.close()
            return found

        monkeypatch.setattr("pyengine.client.consumer.read_holder", find_and_end)
        yield


def test_a_block_that_ends_while_the_store_is_recovered_waits_for_that(builder, consume, monkeypatch):
    fill(builder, 3)
    consumer = consume(commit_interval_s=60)
    consumer.pull(3)
    with recovery_until_the_first_wait(builder, monkeypatch):
        with pytest.raises(StoreBusyError, match="is being recovered"):
            consumer.commit()
        consumer.close()
    assert stored(builder) == {0: 3}


def test_a_block_that_ends_in_a_recovery_waits_for_it_though_only_a_further_topic_has_something_to_store(builder, consume, monkeypatch):
    fill(builder, 1), builder.put("second", b"x")
    consumer = consume(topic=["orders", "second"], sharing="messages", commit_interval_s=60)
    assert len(consumer.pull(timeout_s=0) + consumer.pull(timeout_s=0)) == 2
    consumer.commit()
    builder.put("second", b"y")
    assert bodies(consumer.pull()) == [b"y"]
    with recovery_until_the_first_wait(builder, monkeypatch):
        consumer.close()
    assert ConsumerOffsets(builder.root).read("second", "billing") == {0: 2}


def test_without_auto_commit_only_commit_remembers(builder, consume):
    fill(builder, 10, 0), fill(builder, 10, 1)
    consumer = consume(auto_commit=False)
    messages = []
    while found := consumer.pull(6, timeout_s=0):
        messages += found
    housekeep(consumer)
    assert stored(builder) == {0: 0, 1: 0}
    third = next(message for message in messages if (message.queue_id, message.queue_offset) == (1, 2))
    assert consumer.commit(third) == {0: 0, 1: 3} == stored(builder)
    assert consumer.commit() == {0: 10, 1: 10} == stored(builder)


@pytest.mark.parametrize("told", ["ack", "requeue", "nothing"])
def test_a_joining_member_waits_for_messages_unless_only_commit_tells_that_they_are_done(builder, consume, told):
    fill(builder, 2, 0), fill(builder, 2, 1)
    first = consume(auto_commit=False)
    messages = [message for _ in range(4) for message in first.pull(1)]
    if told != "nothing":
        getattr(first, told)(next(message for message in messages if message.queue_id == 1))
    second = consume(auto_commit=False)
    housekeep(first)
    age_leaving(first, 60)
    housekeep(first)
    housekeep(second)
    assert second.assignment == ([1] if told == "nothing" else [])


def test_closing_a_consumer_keeps_the_committed_offset_and_drops_later_pulls(builder, consume):
    fill(builder, 10)
    consumer = consume(auto_commit=False)
    consumer.commit(consumer.pull(4))
    consumer.pull(4)
    consumer.close()
    assert stored(builder) == {0: 4}


@pytest.mark.parametrize("auto_commit", [True, False])
@pytest.mark.parametrize("error", [DiskError("no more files"), KeyboardInterrupt()], ids=["disk", "signal"])
def test_a_pull_that_fails_half_way_gives_and_commits_nothing(builder, consume, monkeypatch, error, auto_commit):
    expected = fill(builder, 60, 0) + fill(builder, 60, 1)
    consumer = consume(auto_commit=auto_commit)
    first = consumer.pull(10, timeout_s=5)
    fetch, calls = reader_of(consumer)._fetch, []

    def failing(topic, queue_id, *rest, **limits):
        calls.append(queue_id)
        if len(calls) == 2:
            raise error
        return fetch(topic, queue_id, *rest, **limits)

    monkeypatch.setattr(reader_of(consumer), "_fetch", failing)
    with pytest.raises(type(error)):
        consumer.pull(1000, timeout_s=5)
    consumer.commit()
    assert sum(stored(builder).values()) == 10, "what was given alone is done"
    got = list(first)
    while found := consumer.pull(1000, timeout_s=0):
        got += found
    assert sorted(bodies(got)) == sorted(expected)


def test_a_pull_notes_the_state_only_of_the_queues_that_it_reads(builder, consume, monkeypatch):
    for queue_id in range(8):
        fill(builder, 3, queue_id)
    consumer, noted, before = consume(), [], AssignedQueue.before
    monkeypatch.setattr(AssignedQueue, "before", lambda held: noted.append(held.queue_id) or before(held))
    found = consumer.pull(1)
    assert len(found) == 1 and noted == [found[0].queue_id]


def test_a_signal_at_the_end_of_a_pull_leaves_its_messages_to_the_next_one(builder, consume, monkeypatch):
    expected = fill(builder, 3)
    consumer = consume()

    def interrupted(beat):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Beat, "rouse", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.pull(3)
    assert bodies(consumer.pull(3)) == expected


def test_a_signal_while_a_pull_returns_retries_leaves_them_to_the_next_one(builder, consume, monkeypatch):
    builder.put("%RETRY%billing", b"again", queue_id=0)
    fill(builder, 1)
    consumer = consume()
    of = RetriedMessage.of

    def interrupted(message):
        monkeypatch.setattr(RetriedMessage, "of", of)
        raise KeyboardInterrupt

    monkeypatch.setattr(RetriedMessage, "of", interrupted)
    got = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            got += consumer.pull(1, timeout_s=5)
    got += consumer.pull(1, timeout_s=5)
    got += consumer.pull(1, timeout_s=0)
    assert sorted(bodies(got)) == [b"0-0", b"again"]


def test_acknowledged_messages_move_the_offset_up_to_the_first_that_is_not(builder, consume):
    fill(builder, 6)
    consumer = consume(auto_commit=False, commit_interval_s=0)
    messages = consumer.pull(6)
    consumer.ack([messages[4], messages[1]])
    housekeep(consumer)
    assert stored(builder) == {0: 0}
    consumer.ack(messages[0])
    housekeep(consumer)
    assert stored(builder) == {0: 2}
    consumer.ack([messages[3], messages[2], messages[2]])
    consumer.close()
    assert stored(builder) == {0: 5}
    assert [message.queue_offset for message in consume().pull()] == [5]


def test_commit_goes_past_messages_that_were_not_acknowledged(builder, consume):
    fill(builder, 6)
    consumer = consume(auto_commit=False)
    messages = consumer.pull(6)
    consumer.ack([messages[3], messages[5]])
    assert consumer.commit(messages[2]) == {0: 4}
    assert consumer.commit() == {0: 6}


def test_acknowledgements_of_another_place_change_nothing(builder, consume):
    fill(builder, 6)
    consumer = consume(auto_commit=False, commit_interval_s=0)
    first = consumer.pull(4)
    consumer.seek(0, 1)
    consumer.ack([first[0], first[3]])           # before the place, and not given since
    (again,) = consumer.pull(1)
    consumer.ack(again)
    housekeep(consumer)
    assert stored(builder) == {0: 2} and consumer.pull(1)[0].queue_offset == 2


def test_messages_between_filtered_ones_are_acknowledged_too(builder, consume):
    for number in range(6):
        builder.put("orders", b"%d" % number, tags="ab"[number % 2])
    consumer = consume(auto_commit=False, commit_interval_s=0, tags="a")
    messages = consumer.pull(6)
    assert [message.queue_offset for message in messages] == [0, 2, 4]
    consumer.ack(messages[1:])
    consumer.ack(messages[0])
    housekeep(consumer)
    assert stored(builder) == {0: 6}


def test_with_auto_commit_an_acknowledgement_does_nothing_and_says_so_once(builder, consume):
    fill(builder, 3)
    consumer = consume(commit_interval_s=0)
    found = consumer.pull(3)
    with pytest.warns(UserWarning, match="does nothing with auto_commit.*auto_commit=False") as warned:
        consumer.ack(found[0])
        consumer.ack(found)
    assert [(one.filename, "") for one in warned] == [(__file__, "")]
    housekeep(consumer)
    assert stored(builder) == {0: 0}
    consumer.close()
    assert stored(builder) == {0: 3}


def test_seek_goes_forward_and_back(builder, consume):
    expected = fill(builder, 10)
    consumer = consume()
    consumer.pull(5)
    consumer.seek(0, 8)
    assert bodies(consumer.pull(100)) == expected[8:]
    consumer.seek(0, 1)
    assert bodies(consumer.pull(2)) == expected[1:3]
    consumer.commit()
    assert stored(builder) == {0: 3}
    with pytest.raises(UsageError, match="does not own queue 7"):
        consumer.seek(7, 0)
    with pytest.raises(UsageError):
        consumer.seek(0, -1)


def test_seek_by_time_goes_to_the_first_message_stored_then_or_later(builder, consume):
    expected = fill(builder, 10)                    # one a second, from START_MS on
    consumer = consume()
    consumer.pull(5)
    for ms, first in ((START_MS + 6000, 6), (START_MS + 2500, 3), (START_MS - 1, 0)):
        consumer.seek(0, datetime.fromtimestamp(ms / 1000, UTC))
        assert bodies(consumer.pull(100)) == expected[first:]
    consumer.seek(0, datetime.fromtimestamp(START_MS / 1000 + 3600, UTC))
    assert consumer.pull(1, timeout_s=0) == [] and consumer.positions == {0: 10}
    with pytest.raises(UsageError, match="time zone"):
        consumer.seek(0, datetime(2026, 1, 1))


def test_seek_moves_all_queues_or_none(builder, consume):
    fill(builder, 4, 0), fill(builder, 6, 1)
    consumer = consume()
    consumer.pull(100), consumer.pull(100)
    consumer.seek(None, "first")
    assert consumer.positions == {0: 0, 1: 0}
    consumer.seek(None, "last")
    assert consumer.positions == {0: 4, 1: 6}
    consumer.seek(1, 2)
    with pytest.raises(UsageError, match="does not own queue 7"):
        consumer.seek(7, "first")
    assert consumer.positions == {0: 4, 1: 2}
    with pytest.raises(UsageError, match="not a place to start"):
        consumer.seek(0, "middle")


@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_members_with_different_filters_say_so_once(builder, consume, caplog, sharing):
    for queue_id in range(4):
        fill(builder, 1, queue_id)

    def state():
        return pyengine.ConsumerGroups(builder.root, **settings(builder)).groups(group="billing")[0]

    alike = [consume(tags=tags, sql="a > 1", sharing=sharing) for tags in ("x || y", "y||x")]
    for each in alike:
        housekeep(each)
    assert [each.notes for each in alike] == [[], []] and state().note == ""
    other = consume(tags="x", sql="a > 1", sharing=sharing)
    members = [*alike, other]
    eventually(lambda: all(each.notes for each in members), "all have seen the other one")
    for each in members:
        each._look()
        housekeep(each)
    (note,) = {note for each in members for note in each.notes}
    assert [each.notes for each in members] == [[note]] * 3 and caplog.text.count(note) == 3 and state().note == note
    assert note.startswith("the members of billing on orders have different tags or sql (pid ") and "give all of them the same" in note
    other.close()
    assert state().note == ""


def test_a_group_with_more_members_than_queues_says_so_once_with_the_way_out(builder, consume, caplog, monkeypatch):
    fill(builder, 5, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        consume()
        consume(queues=[0])
    with pytest.warns(UserWarning, match=r"billing has 2 members on orders, which has 1 queue, so 1 of them get no messages: "
                                         rf"`pyengine topics update {builder.root} orders --queues 2`") as warned:
        idle = consume()
        housekeep(idle)
    assert len(warned) == 1 and idle.notes == [str(warned[0].message)] and idle.notes[0] in caplog.text
    with pytest.warns(UserWarning, match="does nothing with auto_commit"):  # another thing to say
        idle.ack([])
    (state,) = pyengine.ConsumerGroups(builder.root, **settings(builder)).groups(group="billing")
    assert (len(state.members), state.note) == (3, idle.notes[0])
    TopicConfigs(builder.root).create(TopicConfig("orders", 2, 2))  # whose other queue gets the next messages
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idle._warned.clear()
        housekeep(idle)
        (state,) = pyengine.ConsumerGroups(builder.root, **settings(builder)).groups(group="billing")
    assert state.note == ""


def test_paused_queues_give_nothing_and_stay_with_their_member(builder, consume):
    expected = {queue_id: fill(builder, 50, queue_id) for queue_id in range(3)}

    def rest(consumer):
        got = []
        while found := consumer.pull(7, timeout_s=0):
            got += found
        return sorted(bodies(got))

    consumer = consume()
    (given,) = consumer.pull(1)                      # 31 more of its queue are fetched
    paused = given.queue_id
    consumer.pause([paused])
    assert rest(consumer) == sorted(body for queue_id, each in expected.items() if queue_id != paused for body in each)
    assert consumer.paused == [paused] and consumer.assignment == [0, 1, 2]
    consumer.resume([paused])
    assert rest(consumer) == sorted(expected[paused][1:]) and consumer.paused == []


def test_pause_and_resume_of_all(builder, consume):
    expected = fill(builder, 3, 0) + fill(builder, 3, 1)
    consumer = consume()
    consumer.pause()
    assert consumer.pull(10, timeout_s=0) == [] and consumer.paused == [0, 1]
    consumer.resume([1])
    assert {message.queue_id for message in consumer.pull(10)} == {1}
    consumer.resume()
    assert bodies(consumer.pull(10)) == expected[:3]
    with pytest.raises(UsageError):
        consumer.pause([-1])


@pytest.mark.parametrize("group", ["billing", None])
def test_pause_of_all_holds_for_a_queue_that_comes_later(builder, consume, group):
    fill(builder, 1, 0)
    consumer = consume(group=group)
    consumer.pause()
    expected = fill(builder, 1, 1)
    housekeep(consumer)
    assert consumer.assignment == [0, 1] and consumer.pull(timeout_s=0) == [] and consumer.paused == [0, 1]
    consumer.resume([1])
    assert bodies(consumer.pull()) == expected and consumer.paused == [0]


def test_total_lag_is_that_of_all_queues(builder, consume):
    fill(builder, 10, 0), fill(builder, 4, 1)
    consumer = consume(auto_commit=False)
    assert consumer.total_lag() == 14
    consumer.commit(consumer.pull(3))
    assert consumer.total_lag() == 11


def test_lag_counts_uncommitted_messages(builder, consume):
    fill(builder, 10, 0), fill(builder, 4, 1)
    consumer = consume(auto_commit=False)
    consumer.commit(consumer.pull(3)[:3])
    lag = consumer.lag()
    assert sum(queue.lag for queue in lag.values()) == 11
    behind = lag[1] if lag[1].lag else lag[0]
    assert behind.waiting_since_ms >= START_MS and behind.lost == 0


def test_other_groups_and_topics_keep_their_offsets(builder, consume):
    fill(builder, 3)
    path = builder.root / "config" / "consumerOffset.json"
    path.write_text('{"offsetTable":{"orders@audit":{0:2},"%RETRY%x@x":{0:7}}}')
    with consume() as consumer:
        assert len(consumer.pull()) == 3
    assert json.loads(path.read_text()) == {
        "offsetTable": {"%RETRY%x@x": {"0": 7}, "orders@audit": {"0": 2}, "orders@billing": {"0": 3}}}


# --- trouble --------------------------------------------------------------------------------------


def test_removed_messages_are_counted_and_said(builder, consume):
    builder.fill_queue("orders", 0, 7)
    expected = fill(builder, 3)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 2})
    consumer = consume()
    assert bodies(consumer.pull()) == expected
    assert consumer.missed == 5 and "2 to 6 were removed" in consumer.notes[0]


@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_removed_messages_that_the_group_had_acknowledged_are_not_missed(builder, consume, sharing):
    expected = fill(builder, 12)
    consumer = consume(auto_commit=False, sharing=sharing)
    consumer.ack([message for message in consumer.pull(12) if message.queue_offset not in (0, 5, 9, 11)])
    leave_unfinished(consumer)
    for number in range(9):
        builder.write_entry("orders", 0, number, *FILLER)
    [state] = pyengine.ConsumerGroups(builder.root, **settings(builder)).groups()
    consumer = consume(auto_commit=False, sharing=sharing)
    assert state.lost == consumer.lag()[0].lost == 2
    assert bodies(consumer.pull(timeout_s=scaled_timeout_s(30))) == [expected[9], expected[11]] and consumer.missed == 2
    assert consumer.notes == ["queue 0: 2 messages from 0 to 5 were removed before the group came to them"]


def test_a_user_who_may_not_read_what_a_group_has_acknowledged_is_told_of_the_group(builder, consume):
    fill(builder, 10)
    consumer = consume(auto_commit=False)
    consumer.ack([message for message in consumer.pull(10) if message.queue_offset != 0])
    leave_unfinished(consumer)
    for number in range(4):
        builder.write_entry("orders", 0, number, *FILLER)
    acknowledged, = (path for path in (builder.root / "config" / "consumers" / "acks").iterdir() if not path.name.endswith(".lock"))
    acknowledged.unlink()
    acknowledged.mkdir()  # which the superuser cannot read either
    [state] = pyengine.ConsumerGroups(builder.root, **settings(builder)).groups()
    assert state.lost == 4 and state.lag == 6


@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_acknowledged_messages_that_cannot_be_read_any_more_are_not_missed(builder, consume, sharing):
    expected = fill(builder, 40)
    consumer = consume(auto_commit=False, sharing=sharing)
    consumer.ack([message for message in consumer.pull(40) if message.queue_offset in (3, 4, 38)])
    leave_unfinished(consumer)
    for number in (3, 4, 7):
        builder.write_entry("orders", 0, number, *FILLER)
    consumer = consume(auto_commit=False, sharing=sharing)
    got = bodies(consumer.pull(10, timeout_s=scaled_timeout_s(30)))
    while len(got) < 36:
        got += bodies(consumer.pull(10, timeout_s=scaled_timeout_s(30)))
    assert got == expected[:3] + expected[5:7] + expected[8:38] + expected[39:] and consumer.missed == 1


def test_an_offset_beyond_the_end_goes_back_to_it(builder, consume):
    fill(builder, 3)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 99})
    consumer = consume()
    assert consumer.pull(timeout_s=0) == [] and "after the end" in consumer.notes[0]
    later = fill(builder, 1)
    assert bodies(consumer.pull()) == later


def test_a_consumer_at_an_unconfirmed_offset_waits_until_slaves_confirm_it(builder, consume):
    """dispatch_at=replicated is new to the store, or the store is a restored backup: its queues seem shorter for a while."""
    fill(builder, 3)
    confirmed = builder.end
    expected = fill(builder, 3)[-1:]
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 5})
    noted = ReplicationStateFile(builder.root)
    noted.write(ReplicationState("SYNC_MASTER", confirmed, "replicated"))
    consumer = consume()
    assert consumer.pull(timeout_s=0) == [] and consumer.notes == []
    consumer.commit()
    assert stored(builder) == {0: 5}
    noted.write(ReplicationState("SYNC_MASTER", builder.end, "replicated"))
    assert bodies(consumer.pull()) == expected


def test_a_recovery_that_kept_the_log_changes_nothing(builder, consume):
    fill(builder, 6)
    consumer = consume()
    consumer.pull(4)
    raise_epoch(builder.root)
    housekeep(consumer)
    assert consumer.positions == {0: 4} and len(consumer.pull(10)) == 2


def test_after_a_recovery_cut_the_log_a_consumer_without_a_group_reads_its_queue_again(builder, consume):
    messages = [builder.put("orders", b"old %d" % number) for number in range(6)]
    consumer = consume(group=None)
    assert bodies(consumer.pull(1)) == [b"old 0"]
    builder.end, builder.queue_offsets["orders", 0] = messages[4].physical_offset, 4
    later = [builder.put("orders", b"new %d" % number).body for number in range(3)]
    raise_epoch(builder.root)
    housekeep(consumer)
    assert bodies(consumer.pull(10)) == [b"old 0", b"old 1", b"old 2", b"old 3", *later], "the first one was not done yet"


def test_a_recovery_does_not_undo_a_seek_back(builder, consume):
    fill(builder, 6)
    consumer = consume(auto_commit=False)
    consumer.commit(consumer.pull(5))
    consumer.seek(0, 1)
    raise_epoch(builder.root)
    housekeep(consumer)
    assert [message.queue_offset for message in consumer.pull(10)] == [1, 2, 3, 4, 5]


def test_after_a_recovery_that_cut_the_log_the_new_messages_are_given(builder, consume):
    """The last two messages are lost and two others take their place: of the same size, at the same offsets."""
    messages = [builder.put("orders", b"old %d" % number) for number in range(6)]
    consumer = consume(auto_commit=False)
    consumer.commit(consumer.pull(3))
    assert len(consumer.pull(10)) == 3
    builder.end, builder.queue_offsets["orders", 0] = messages[4].physical_offset, 4
    later = [builder.put("orders", b"new %d" % number).body for number in range(2)]
    raise_epoch(builder.root)
    housekeep(consumer)
    assert bodies(consumer.pull(10)) == [b"old 3", *later]
    consumer.commit()
    assert stored(builder) == {0: 6}


def cut_at(builder, messages, kept, count, **fields):
    """Recover the store, whose log has lost all but the first messages; `count` new ones come. Returns their bodies."""
    builder.end, builder.queue_offsets["orders", 0] = messages[kept].physical_offset, kept
    new = [builder.put("orders", b"new %d" % (kept + number), **fields).body for number in range(count)]
    ConsumerOffsets(builder.root).lower({("orders", 0): kept})
    raise_epoch(builder.root)
    return new


def pulled(consumer, count):
    """The next messages, `count` at least."""
    found = []
    eventually(lambda: found.extend(consumer.pull(100, timeout_s=0.1)) or len(found) >= count, f"{count} messages")
    return found


@pytest.mark.parametrize("auto_commit", [True, False])
def test_messages_in_the_place_of_lost_ones_are_given_to_a_program_that_asks_before_the_thread_has_looked(builder, consume, auto_commit):
    messages = [builder.put("orders", b"old %d" % number) for number in range(10)]
    consumer = consume(auto_commit=auto_commit)
    assert len(consumer.pull(10)) == 10 and consumer.pull(timeout_s=0) == [] and consumer.commit() == {0: 10}
    with before_it_looks(consumer):
        new = cut_at(builder, messages, 3, 10)
        assert consumer.pull(timeout_s=0) == [], "it is not compared yet"
    housekeep(consumer)
    assert bodies(consumer.pull(20)) == new
    assert consumer.commit() == {0: 13} and stored(builder) == {0: 13}


def test_messages_in_the_place_of_lost_ones_that_did_not_match_are_given_if_they_match(builder, consume):
    messages = [builder.put("orders", b"old %d" % number, tags="paid" if number < 5 else "sent") for number in range(10)]
    consumer = consume(tags="paid")
    assert len(consumer.pull(10)) == 5 and consumer.pull(timeout_s=0) == [] and consumer.positions == {0: 10}
    new = cut_at(builder, messages, 7, 10, tags="paid")
    housekeep(consumer)
    assert bodies(consumer.pull(20)) == new
    assert consumer.commit() == {0: 17}


def test_messages_in_the_place_of_lost_ones_are_given_without_a_group_though_none_has_matched_yet(builder, consume):
    messages = [builder.put("orders", b"old %d" % number, tags="sent") for number in range(10)]
    consumer = consume(group=None, tags="paid")
    assert consumer.pull(timeout_s=0) == [] and consumer.positions == {0: 10}
    new = cut_at(builder, messages, 7, 10, tags="paid")
    housekeep(consumer)
    assert bodies(consumer.pull(20)) == new and consumer.missed == 0


def test_after_a_recovery_that_lost_nothing_a_consumer_without_a_group_reads_nothing_again(builder, consume):
    for number in range(40):
        builder.put("orders", b"%d" % number, tags="sent" if number else "paid")
    consumers = [consume(group=None, tags=tags) for tags in ("paid", "none")]
    assert [bodies(consumer.pull(timeout_s=0)) for consumer in consumers] == [[b"0"], []]
    for consumer in consumers:
        assert consumer.pull(timeout_s=0) == [] and consumer.positions == {0: 40}
    raise_epoch(builder.root)
    for consumer in consumers:
        housekeep(consumer)
        assert consumer.positions == {0: 40}


def test_after_a_recovery_a_consumer_without_a_group_gets_none_again_of_before_what_was_lost(builder, consume):
    messages = [builder.put("orders", b"old %d" % number, tags="sent" if number > 4 else "paid") for number in range(40)]
    consumer = consume(group=None, tags="paid")
    assert len(consumer.pull(10)) == 5
    assert consumer.pull(timeout_s=0) == [] and consumer.positions == {0: 40}
    new = cut_at(builder, messages, 20, 20, tags="paid")
    housekeep(consumer)
    assert bodies(pulled(consumer, 20)) == new


def test_messages_that_did_not_match_and_were_deleted_later_are_not_missed_after_a_recovery(builder, consume):
    segment_bytes = builder.geometry.mapped_file_size_commit_log_bytes
    while builder.end < segment_bytes:
        last = builder.put("orders", b"x" * (segment_bytes // 4), tags="sent")
    consumer = consume(group=None, tags="paid")
    assert consumer.pull(timeout_s=0) == [] and consumer.positions == {0: last.queue_offset + 1}
    (builder.root / "commitlog" / f"{0:020}").unlink()
    raise_epoch(builder.root)
    housekeep(consumer)
    assert consumer.pull(timeout_s=0) == [] and consumer.missed == 0


def test_a_message_that_was_fetched_and_lost_is_not_given_beside_the_next_engine(tmp_path):
    options = {"mapped_file_size_commit_log_bytes": 1 << 20}
    root = tmp_path / "store"
    with pyengine.Engine(root, **options) as engine, engine.connect() as producer:
        placed = [producer.put("orders", b"old %d" % number, queue_id=0) for number in range(20)]
        with engine.open_store() as store:
            assert store.wait_for_message("orders", 0, placed[-1].queue_offset, timeout_s=scaled_timeout_s(30))
        consumer = pyengine.consume(root, "orders", group="billing")
        assert consumer.commit(consumer.pull(5)) == {0: 5}, "the others are fetched"
    with consumer, ExitStack() as running:
        with before_it_looks(consumer):
            with open(root / "commitlog" / ("0" * 20), "r+b") as log:
                log.seek(placed[10].physical_offset)
                log.write(bytes((1 << 20) - placed[10].physical_offset))
            recover_offline(root, load_config(root), accept_loss=True)
            engine = running.enter_context(pyengine.Engine(root, **options))
            with engine.connect() as producer:
                producer.put_many("orders", [b"new %d" % number for number in range(10, 30)], queue_id=0)
            eventually(lambda: reader_of(consumer).is_live and not consumer.pull(timeout_s=0), "it sees the engine")
        assert bodies(pulled(consumer, 25)) == [b"old %d" % number for number in range(5, 10)] + [
            b"new %d" % number for number in range(10, 30)]


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["finished", "interrupted and run again"])
@pytest.mark.parametrize("sharing", ["queues", "messages"])
def test_a_consumer_keeps_its_place_while_queues_are_rebuilt(builder, consume, sharing, is_interrupted):
    fill(builder, 120)
    consumer = consume(sharing=sharing, auto_commit=False, commit_interval_s=0)
    taken = pulled(consumer, 120)
    consumer.ack(taken[:10])
    assert consumer.commit([]) == stored(builder) == {0: 10}
    config, ends = load_config(builder.root, settings(builder)), []

    def look(done, size):
        housekeep_once(consumer)
        assert consumer.pull(timeout_s=0) == [] and stored(builder) == {0: 10} and consumer.positions == {0: 120}
        ends.append(reader_of(consumer).queue_end("orders", 0))
        if is_interrupted and 0 < ends[-1] < 120:
            raise Interrupted

    if is_interrupted:
        with pytest.raises(Interrupted):
            rebuild_offline(builder.root, config, progress=look)
        is_interrupted = False
        look(0, 0)
    rebuild_offline(builder.root, config, progress=look)
    assert any(0 < end < 120 for end in ends), "the queue was seen half made"
    later = fill(builder, 2)
    housekeep(consumer)
    assert bodies(consumer.pull(200)) == later
    consumer.ack(taken[10:20])
    assert consumer.commit([]) == stored(builder) == {0: 20}


def test_no_consumer_begins_in_a_store_that_is_recovered(builder, consume):
    fill(builder, 3)
    with owning(builder.root), pytest.raises(StoreBusyError, match="is being recovered"):
        consume(group=None, from_="last", timeout_s=0)
    assert bodies(consume(group=None).pull()) == [b"0-0", b"0-1", b"0-2"]


@pytest.mark.parametrize("way", ["ack", "commit"])
def test_a_late_acknowledgement_of_a_lost_message_does_not_count_for_another_in_its_place(builder, consume, way):
    messages = [builder.put("orders", b"old %d" % number) for number in range(3)]
    consumer = consume(auto_commit=False, commit_interval_s=0)
    lost = consumer.pull(3)[2]
    consumer.ack(messages[:2])
    housekeep(consumer)
    builder.end, builder.queue_offsets["orders", 0] = messages[2].physical_offset, 2
    builder.put("orders", b"new 2")
    raise_epoch(builder.root)
    housekeep(consumer)
    (new,) = consumer.pull(3)
    assert (new.body, new.queue_offset, new.physical_offset) == (b"new 2", lost.queue_offset, lost.physical_offset)
    getattr(consumer, way)(lost)
    housekeep(consumer)
    assert stored(builder) == {0: 2}
    getattr(consumer, way)(new)
    housekeep(consumer)
    assert stored(builder) == {0: 3}


def test_a_light_queue_is_read_by_its_own_numbers(builder, consume):
    """The record of a light queue has the queue id and number of the queue that it was put to."""
    fill(builder, 30, queue_id=2)
    put = [builder.put("orders", b"light %d" % number, queue_id=2,
                       properties={"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)})
           for number in range(8)]
    for number, message in enumerate(put):
        builder.write_entry("%LMQ%a", 0, number, message.physical_offset, message.size_bytes, 0)
    with consume(topic="%LMQ%a") as consumer:
        first = consumer.pull(3, timeout_s=5)
        assert [(message.queue_id, message.queue_offset, message.topic) for message in first] == [
            (0, number, "orders") for number in range(3)]
        consumer.commit(first[:2])
    assert ConsumerOffsets(builder.root).read("%LMQ%a", "billing") == {0: 3}
    with consume(topic="%LMQ%a") as consumer:
        assert bodies(consumer.pull(9, timeout_s=5)) == [b"light %d" % number for number in range(3, 8)]


@pytest.mark.parametrize("damage", ["another queue's record", "queue offset", "beyond the log", "negative"])
def test_a_damaged_message_or_entry_costs_at_most_itself_and_a_loss_is_noted(builder, consume, damage):
    fill(builder, 12)
    other = builder.put("other", b"not of this queue")
    with pyengine.open_store(builder.root, **settings(builder)) as reader:
        fifth = reader.get_message("orders", 0, 5).messages[0]
    if damage == "queue offset":
        builder.write_log((1 << 40).to_bytes(8, "big"), at=fifth.physical_offset + 20)
    else:
        leads_to = {"beyond the log": fifth.physical_offset | 1 << 40, "negative": fifth.physical_offset - (1 << 63)}
        builder.write_entry("orders", 0, 5, leads_to.get(damage, other.physical_offset), other.size_bytes, 0)
    with consume() as consumer:
        given = []
        while len(given) < 11:
            pulled = consumer.pull(12, timeout_s=5)
            assert pulled
            given += pulled
    assert [m.queue_offset for m in given] == [n for n in range(12) if n != 5 or damage == "queue offset"]
    assert (consumer.missed, len(consumer.notes)) == ((0, 0) if damage == "queue offset" else (1, 1))
    assert stored(builder) == {0: 12}


def test_a_broker_that_owns_the_store_keeps_the_offsets(builder, consume):
    fill(builder, 3)
    consumer = consume()
    consumer.pull()
    with held_by_a_broker(builder.root):
        with pytest.raises(StoreBusyError):
            consumer.commit()
        with pytest.raises(StoreBusyError):
            consume(group="other")
        housekeep_once(consumer)
    assert stored(builder) == {0: 0}
    assert consumer.commit() == {0: 3}


def test_a_damaged_offset_file_is_noted_and_its_backup_is_used(builder, consume):
    fill(builder, 3)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 1})
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 2})
    (builder.root / "config" / "consumerOffset.json").write_bytes(b"\0\0\0")
    consumer = consume()
    assert len(consumer.pull()) == 2
    assert any("consumerOffset.json.bak is used" in note for note in consumer.notes)


def test_trouble_in_the_background_is_raised_to_the_program(builder, consume):
    fill(builder, 3)
    consumer = consume(commit_interval_s=0)
    consumer.pull(1)
    lock = builder.root / "config" / "consumerOffset.json.lock"
    lock.unlink()
    lock.mkdir()
    consumer.pull(1)
    with pytest.raises(DiskError):
        eventually(lambda: consumer.pull(timeout_s=0) and False, "it is raised")
    lock.rmdir()
    consumer.close()
    assert stored(builder) == {0: 3}, "and it goes on once the trouble is over"


def test_trouble_that_is_over_is_not_raised_to_the_program(builder, consume):
    expected = fill(builder, 3)
    consumer = consume(commit_interval_s=0)
    consumer.pull(1)
    lock = builder.root / "config" / "consumerOffset.json.lock"
    eventually(lambda: lock.exists(), "the group's offsets begin")
    lock.unlink()
    lock.mkdir()
    assert bodies(consumer.pull(1)) == expected[1:2]
    housekeep_once(consumer)
    lock.rmdir()
    housekeep_once(consumer)
    assert stored(builder) == {0: 1} and bodies(consumer.pull(1)) == expected[2:]


def test_a_removed_members_file_costs_a_redelivery_at_most(builder, consume):
    expected = fill(builder, 6)
    consumer = consume()
    consumer.pull(3)
    (builder.root / "config" / "consumers" / "orders@billing").unlink()
    housekeep(consumer)
    assert bodies(consumer.pull(10)) in (expected, expected[3:])


def test_a_forked_child_may_not_use_it(builder, consume):
    fill(builder, 1)
    consumer = consume()
    child = os.fork()
    if child == 0:
        try:
            consumer.pull(timeout_s=0)
        except UsageError:
            consumer.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(consumer.pull()) == 1


@pytest.mark.parametrize("lock", ["_pulling", "_work", "_state"])
def test_calls_in_a_child_forked_while_another_thread_uses_the_consumer_are_refused(builder, consume, lock):
    fill(builder, 1)
    consumer = consume()
    locked, may_end = threading.Event(), threading.Event()

    def keep():
        with getattr(consumer, lock):
            locked.set()
            may_end.wait(60)

    thread = threading.Thread(target=keep)
    thread.start()
    assert locked.wait(30)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        refused = 0
        for call in (consumer.pull, consumer.commit, lambda: consumer.ack([]), consumer.pause, lambda: consumer.seek(0, 0)):
            try:
                call()
            except UsageError as error:
                refused += "fork" in str(error)
        consumer.close()
        os._exit(0 if refused == 5 else refused + 1)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert len(consumer.pull()) == 1


def test_a_wrong_path_topic_or_group_is_refused(builder, consume, tmp_path):
    with pytest.raises(NotAStoreError):
        pyengine.consume(tmp_path / "nothing", "orders", group="billing", timeout_s=0)
    for group in ("", "a@b", "a/b", "x" * 200):
        with pytest.raises(UsageError):
            consume(group=group)
    with pytest.raises(UsageError):
        consume(session_timeout_s=0.1)


# --- beside a running engine ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_message_is_given_as_it_arrives(make_engine, mode):
    engine = make_engine(mode)
    engine.start()
    with pyengine.connect(engine.root) as producer, pyengine.consume(
            engine.root, "orders", group="billing", from_="first") as consumer:
        assert consumer.pull(timeout_s=0) == []
        for number in range(20):
            assert producer.put("orders", b"%d" % number, queue_id=number % 2).ok
            assert bodies(consumer.pull(timeout_s=60)) == [b"%d" % number]
    assert ConsumerOffsets(engine.root).read("orders", "billing") == {0: 10, 1: 10}


@pytest.mark.parametrize("asked", [1, 32])
def test_a_queue_with_many_messages_is_fetched_by_more_than_are_asked_for(make_engine, asked):
    engine = make_engine("async", mapped_file_size_consume_queue_bytes=2000 * 20)
    engine.start()
    wanted = [b"%d" % number for number in range(2000)]
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many("orders", wanted).ok
    with pyengine.consume(engine.root, "orders", from_="first") as consumer:
        got = bodies(consumer.pull(asked, timeout_s=60))
        while len(got) < len(wanted):
            given = bodies(consumer.pull(asked, timeout_s=60))
            assert 0 < len(given) <= asked
            got += given
        assert got == wanted
        assert reader_of(consumer).gets.found <= 11  # 32, 64, 128, then 256 each
        assert consumer.pull(timeout_s=0) == []


def test_messages_fetched_ahead_stay_within_a_limit_in_bytes(make_engine):
    engine = make_engine("async")
    engine.start()
    body = os.urandom(100_000)
    with pyengine.connect(engine.root) as producer:
        for _ in range(20):
            assert producer.put_many("orders", [body] * 10).ok
    with pyengine.consume(engine.root, "orders", from_="first") as consumer:
        got, ahead_bytes = 0, 0
        while got < 200:
            got += len(consumer.pull(32, timeout_s=60))
            ahead_bytes = max(ahead_bytes, sum(len(message.body) for held in consumer._held.values() for message in held.buffer))
        assert ahead_bytes <= READ_AHEAD_BYTES


@pytest.mark.parametrize("call", [
    lambda consumer: consumer.pull(float("nan")), lambda consumer: consumer.pull(1.5), lambda consumer: consumer.pull(float("inf")),
    lambda consumer: consumer.pull("1"), lambda consumer: consumer.pull(timeout_s=float("nan")),
    lambda consumer: consumer.pull(timeout_s="1"),
    lambda consumer: consumer.seek(0, float("nan")), lambda consumer: consumer.seek(0.5, 0)], ids=range(8))
def test_numbers_that_are_none_and_fractions_of_messages_are_refused(builder, call):
    builder.put("T", b"x")
    with pyengine.consume(builder.root, "T", group="g") as consumer:
        with pytest.raises((TypeError, UsageError)):
            call(consumer)
        assert [one.body for one in consumer.pull(timeout_s=-1)] == [b"x"]


def test_a_seek_beyond_the_end_continues_at_the_end_and_says_so(builder):
    for body in (b"0", b"1"):
        builder.put("T", body)
    with pyengine.consume(builder.root, "T", group="g") as consumer:
        consumer.seek(0, 1000)
        assert consumer.commit() == {0: 2}, "which another member continues at"
        assert any("offset 1000 is after the end 2; the consumer continues at the end" in note for note in consumer.notes)
        builder.put("T", b"2")
        assert [one.body for one in consumer.pull(timeout_s=30)] == [b"2"]


@pytest.mark.parametrize("timeout_s", [float("nan"), "1"])
def test_a_wait_of_no_number_is_refused(builder, timeout_s):
    builder.put("T", b"x")
    with pyengine.open_store(builder.root) as store, pytest.raises((TypeError, UsageError)):
        store.wait_for_message("T", 0, 1, timeout_s=timeout_s)
