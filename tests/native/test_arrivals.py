"""Readers sleep until messages arrive in their own queues (csrc/arrivals.c)."""

from __future__ import annotations

import os
import select
import threading

import pytest

from pyengine._native import ffi, lib
from pyengine.native import waiting
from pyengine.native.waiting import Awaited, Sleeper, Watch, Watched
from waiting import eventually, scaled_timeout_s

HOUR_S = 3600.0


class Asleep:
    """A thread that sleeps for a queue of the level given, of which it has read everything below `end`."""

    def __init__(self, control, level, topic: str, end: int) -> None:
        self.sleeper, self.slot = Sleeper(), waiting.arrival_slot(topic, 0)
        queue = Awaited(level, end, self.slot)
        self.thread = threading.Thread(target=self.sleeper.wait, args=(control, [queue], HOUR_S, self.sleeper.stirs), daemon=True)
        self.thread.start()
        eventually(lambda: self.sleeper._struct.is_asleep, "it sleeps")

    def has_ended(self) -> bool:
        self.thread.join(scaled_timeout_s(30))
        return not self.thread.is_alive()


@pytest.fixture
def control():
    return ffi.new("struct ms_control *")


def other_topic(topic: str) -> str:
    """Return a topic whose sleepers another bit wakes."""
    bit = waiting.arrival_slot(topic, 0) // 32
    return next(name for name in map("other{}".format, range(100)) if waiting.arrival_slot(name, 0) // 32 != bit)


def dispatch(control, slot: int, end: int) -> None:
    """Do as the reputter does for a message that ends at `end`."""
    control.arrivals.end[slot] = end
    lib.ms_store_i64(ffi.addressof(control.reput_from, "value"), end)
    lib.ms_arrivals_wake(control, 1 << slot // 32)


def test_a_message_wakes_the_readers_of_its_topic_only(control):
    mine = Asleep(control, control.committed, "mine", 100)
    other = Asleep(control, control.committed, other_topic("mine"), 100)
    control.committed.value = 200
    dispatch(control, mine.slot, 200)
    assert mine.has_ended() and other.thread.is_alive()
    other.sleeper.stir()
    assert other.has_ended()


def test_a_reader_of_what_is_flushed_is_woken_by_the_flusher(control):
    control.committed.value = 200
    dispatch(control, waiting.arrival_slot("mine", 0), 200)
    reader = Asleep(control, control.flushed, "mine", 100)  # nothing more is flushed
    raised = control.arrival_seq.value
    lib.ms_control_publish_flushed(control, 200, False)
    assert reader.has_ended() and control.arrival_seq.value != raised, "by that, not because its sleep is bounded"


def test_a_reader_of_what_is_replicated_is_woken_by_the_replicator(control):
    control.committed.value = 200
    dispatch(control, waiting.arrival_slot("mine", 0), 200)
    reader = Asleep(control, control.confirm, "mine", 100)
    raised = control.arrival_seq.value
    lib.ms_control_publish_confirm(control, 200)
    assert reader.has_ended() and control.arrival_seq.value != raised, "by that, not because its sleep is bounded"


def test_a_stir_before_the_sleep_ends_it(control):
    sleeper = Sleeper()
    stirs = sleeper.stirs
    sleeper.stir()
    sleeper.wait(control, [Awaited(control.committed, 0, 0)], HOUR_S, stirs)
    assert sleeper.stirs != stirs


def test_a_queue_has_news_only_if_a_message_of_it_became_readable(control):
    queue = Awaited(control.committed, 100, waiting.arrival_slot("mine", 3))
    control.committed.value = 300
    control.reput_from.value = 200
    control.arrivals.end[waiting.arrival_slot("mine", 4)] = 200
    assert not waiting.has_arrived(control, queue), "of another queue"
    control.arrivals.end[queue.slot] = 200
    assert waiting.has_arrived(control, queue)
    control.identity.dispatch_at = 1
    control.confirm.value = 100
    assert not waiting.has_arrived(control, queue), "readers stop at `confirm`"


def test_queues_of_one_topic_share_a_bit_and_no_slot():
    slots = {waiting.arrival_slot("orders", queue_id) for queue_id in range(32)}
    assert len(slots) == 32 and len({slot // 32 for slot in slots}) == 1


@pytest.fixture
def watch(control):
    watch = Watch(control)
    yield watch
    watch.close()


def is_readable(watched, timeout_s: float) -> bool:
    return bool(select.select([watched.descriptor], [], [], timeout_s)[0])


def test_a_watch_raises_only_the_descriptors_of_queues_with_news(control, watch):
    theirs = ffi.new("struct ms_control *")  # another mapping: only distances of it are used
    topics = ("mine", other_topic("mine"))
    readers = [Watched() for _ in topics]
    for reader, topic in zip(readers, topics):
        watch.add(reader)
        watch.arm(reader, theirs, [Awaited(theirs.committed, 100, waiting.arrival_slot(topic, queue_id)) for queue_id in range(8)])
    assert not any(is_readable(reader, 0) for reader in readers)
    control.committed.value = 200
    dispatch(control, waiting.arrival_slot("mine", 3), 200)
    assert is_readable(readers[0], scaled_timeout_s(30)) and not is_readable(readers[1], 0)
    readers[0].clear()
    dispatch(control, waiting.arrival_slot("mine", 4), 200)
    watch.arm(readers[1], theirs, [Awaited(theirs.committed, 100, waiting.arrival_slot("mine", 3))])
    assert is_readable(readers[1], 0), "what had arrived before"
    assert not is_readable(readers[0], 0), "one that is not armed"
    for reader in readers:
        watch.remove(reader)


def test_a_watch_forgets_what_is_disarmed_or_removed(control, watch):
    readers = [Watched() for _ in range(3)]
    for reader in readers:
        watch.add(reader)
        watch.arm(reader, control, [Awaited(control.committed, 100, waiting.arrival_slot("mine", 0))])
    watch.disarm(readers[0])
    watch.remove(readers[1])
    control.committed.value = 200
    dispatch(control, waiting.arrival_slot("mine", 0), 200)
    assert is_readable(readers[2], scaled_timeout_s(30)) and not any(is_readable(reader, 0) for reader in readers[:2])
    watch.close()
    watch.arm(readers[0], control, [])  # of a thread whose signal handler has closed it


def test_the_descriptor_of_a_watched_reader_is_closed_with_it():
    reader = Watched()
    descriptor = reader.descriptor
    reader.raise_now()
    assert is_readable(reader, 0)
    del reader
    with pytest.raises(OSError):
        os.fstat(descriptor)
