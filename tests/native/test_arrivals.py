"""Readers sleep until messages arrive in their own queues (csrc/arrivals.c)."""

from __future__ import annotations

import threading

import pytest

from pyengine._native import ffi, lib
from pyengine.native import waiting
from pyengine.native.waiting import Awaited, Sleeper
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
    other.sleeper.stir(control)
    assert other.has_ended()


def test_a_reader_of_what_is_flushed_is_woken_by_the_flusher(control):
    reader = Asleep(control, control.flushed, "mine", 100)
    control.committed.value = 200
    dispatch(control, reader.slot, 200)
    eventually(lambda: reader.sleeper._struct.is_asleep, "it sleeps on, since nothing more is flushed")
    lib.ms_control_publish_synced(control, 200, 0)
    assert reader.has_ended()


def test_a_reader_of_what_is_replicated_is_woken_by_the_replicator(control):
    reader = Asleep(control, control.confirm, "mine", 100)
    control.committed.value = 200
    dispatch(control, reader.slot, 200)
    lib.ms_control_publish_confirm(control, 200)
    assert reader.has_ended()


def test_a_stir_before_the_sleep_ends_it(control):
    sleeper = Sleeper()
    stirs = sleeper.stirs
    sleeper.stir(control)
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
