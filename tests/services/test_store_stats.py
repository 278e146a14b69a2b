"""What the workers count, read from outside: each put once, by what became of it; each sync; each batch and topic."""

from __future__ import annotations

import mmap

import pytest

from fix_writer_rig import WriterRig, submit
from pyengine.errors import EngineUnavailableError
from pyengine.events import Event
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import EngineMemory, now_ms
from pyengine.native import control as native
from pyengine.native import store_stats
from pyengine.native.session import PUT
from pyengine.results import PutStatus
from pyengine.services.reput_message import ReputMessageService
from ready_store import store_with_writer
from reported import Reported
from waiting import eventually

MODES = pytest.mark.parametrize("mode", (native.MODE_MAPPED, native.MODE_POOL, native.MODE_SYNC))


@pytest.fixture
def look(make_parts):
    """look(mode) -> (parts, read-only statistics of them)."""
    opened = []

    def make(mode):
        parts = make_parts(mode=mode, pool_buffers=3 if mode == native.MODE_POOL else 0)
        opened.append(EngineMemory.attach(parts.owner.folder, writable=False))
        return parts, opened[-1].open_store_stats()

    yield make
    for memory in opened:
        memory.close()


def reputter_of(owner):
    return ReputMessageService(owner.context())


@MODES
def test_every_put_is_counted_once_with_its_time(look, mode):
    parts, stats = look(mode)
    with parts.producer() as producer:
        for _ in range(3):
            assert producer.put("T", b"x" * 100).ok
        assert producer.put_many("T", [b"y" * 100] * 5).ok
        assert producer.put_async("T", b"z" * 3000).result(10).ok
    eventually(lambda: stats.put.latency.count == 5, "the last pass is counted")
    assert (stats.put.entries, stats.put.unmeasured) == (5, 0)
    assert 1 <= stats.put.passes <= 5
    assert sum(stats.put.distribute) == sum(stats.put.latency.bucket) == 5
    assert 0 < stats.put.latency.max_ns <= stats.put.latency.sum_ns
    assert stats.put.size[7] == 8 and stats.put.size[11] == 1
    assert not any(stats.put.refused)


def test_a_refused_entry_is_counted_by_its_status_and_not_as_a_put():
    rig = WriterRig()
    stats = store_stats.private()
    try:
        producer = rig.open_session()
        store_stats.count_puts(rig.start_writer().pointer, stats)
        submit(producer, PUT, b"not/a topic", b"", b"body")
        submit(producer, PUT, b"topic", b"", b"body")
        rig.drain()
    finally:
        rig.close()
    assert stats.put.entries == 1
    assert {status: count for status, count in enumerate(stats.put.refused) if count} == {PutStatus.MESSAGE_ILLEGAL.value: 1}


def test_a_writer_killed_between_puts_goes_on_counting(look):
    parts, stats = look(native.MODE_MAPPED)
    with parts.producer() as producer:
        for life in range(3):
            assert producer.put("T", b"x").ok
            eventually(lambda: stats.put.entries == life + 1, "the put is counted")
            parts.kill(native.WRITER)
            parts.start(native.WRITER)


@pytest.mark.parametrize("mode", (native.MODE_MAPPED, native.MODE_SYNC))
def test_every_sync_is_counted_with_its_time(look, mode):
    parts, stats = look(mode)
    with parts.producer() as producer:
        assert producer.put("T", b"x").ok
    flushed = parts.control.flushed
    wrote = native.load_position(parts.control.wrote)
    eventually(lambda: native.load_position(flushed) == wrote, "flushed")
    latency = store_stats.latency(stats.sync.latency)
    assert latency.count == native.load(parts.control.flusher, "syncs") >= 1
    assert latency.sum_ns == native.load(parts.control.flusher, "sync_ns_total")
    assert latency.max_ns == native.load(parts.control.flusher, "sync_ns_max")
    assert sum(latency.buckets) == latency.count


def test_the_reputter_counts_batches_lag_and_topics(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    service = reputter_of(owner)
    writer.clock_ms = now_ms() - 1000
    writer.put(b"first", topic="orders", properties="KEYS\x01k1 k2")
    writer.put(b"second", topic="orders", queue_id=5)
    writer.put(b"third", topic="bills")
    end, began_ms = writer.end, now_ms()
    assert service.work()
    lag_ms = range(began_ms - writer.clock_ms, now_ms() - writer.clock_ms + 1)
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        stats, topics = seen.open_store_stats(), seen.open_topic_stats()
        assert (stats.dispatch.batches, stats.dispatch.messages, stats.dispatch.entries) == (1, 3, 3)
        assert (stats.dispatch.keys, stats.dispatch.out_of_order, stats.dispatch.lag_max_bytes) == (2, 0, end)
        assert stats.dispatch.lag.count == 1 and stats.dispatch.lag.sum_ns in [lag * 1_000_000 for lag in lag_ms]
        counts = store_stats.topic_counts(topics)
        assert {topic: count.messages for topic, count in counts.items()} == {"orders": 2, "bills": 1}
        assert sum(count.size_bytes for count in counts.values()) == end
    service.close()


def test_a_reputter_that_dispatches_again_counts_no_topic_twice(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    start = native.load_position(owner.control.reput_from)
    for number in range(100):
        writer.put(b"%d" % number, topic="orders")
    service = reputter_of(owner)
    assert service.work()
    service.close()
    native.store_position(owner.control.reput_from, start)  # the first one was killed before it could say so
    writer.put(b"one more", topic="orders")
    service = reputter_of(owner)
    assert service.work()
    service.close()
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        topics = seen.open_topic_stats()
        assert store_stats.topic_counts(topics)["orders"].messages == 101


@pytest.mark.parametrize("queue_offset", [5, 0])
def test_messages_out_of_order_are_counted_and_reported(make_owner, queue_offset):
    """Beyond the end of its queue, where the log has a hole, and below it, where no reader of the queue finds the message."""
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    writer.put(b"0", topic="T")
    writer.queue_offsets["T", 0] = queue_offset
    writer.put(b"other", topic="T")
    reported = Reported()
    service = ReputMessageService(owner.context(report=reported))
    assert service.work()
    service.close()
    assert reported.events == [Event.QUEUE_OUT_OF_ORDER]
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        assert seen.open_store_stats().dispatch.out_of_order == 1


def test_topics_beyond_the_tables_room_are_counted_together(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    owner.folder.unlink(shared_objects.TOPIC_STATS)
    with owner.folder.create(shared_objects.TOPIC_STATS, store_stats.topic_stats_bytes(4)) as shared:
        store_stats.format_topic_stats(store_stats.view_topics(shared.memory), 4)
    for number in range(5):
        writer.put(b"x", topic=f"topic-{number}")
    service = reputter_of(owner)
    assert service.work()
    service.close()
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        topics = seen.open_topic_stats()
        assert len(store_stats.topic_counts(topics)) == 3
        assert topics.others.messages == 2


def test_a_damaged_length_of_a_topics_name_reads_nothing_after_the_name():
    memory = mmap.mmap(-1, store_stats.topic_stats_bytes(4))
    stats = store_stats.view_topics(memory)
    store_stats.format_topic_stats(stats, 4)
    slot = stats.slot[3]
    slot.messages, slot.topic_bytes = 1, 0xFFFFFFFF
    assert list(store_stats.topic_counts(stats)) == ["\0" * 256]


def test_missing_statistics_keep_no_worker_from_its_work(make_owner):
    owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    owner.folder.unlink(shared_objects.STORE_STATS)
    owner.folder.unlink(shared_objects.TOPIC_STATS)
    writer.put(b"x")
    service = reputter_of(owner)
    assert service.work()
    service.close()
    assert native.load_position(owner.control.reput_from) == writer.end
    with EngineMemory.attach(owner.folder, writable=False) as seen, pytest.raises(EngineUnavailableError):
        seen.open_store_stats()


def test_readers_cannot_write_statistics(make_owner):
    owner, _ = store_with_writer(make_owner, mode=native.MODE_MAPPED)
    with owner.folder.attach(shared_objects.STORE_STATS, writable=False) as shared, pytest.raises(TypeError):
        shared.memory[200] = 1
