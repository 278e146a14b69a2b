"""A larger queue table is offered when asked for, once, whatever died before."""

from __future__ import annotations

import pytest

from pyengine.engine import bring_up
from pyengine.engine.bring_up import grow_queue_table
from pyengine.ipc import shared_objects
from pyengine.ipc.control_block import POOL_NOT_MADE
from pyengine.native import control as native
from pyengine.native.writer import format_queue_table, queue_table_bytes, view_queue_table
from reported import Reported
from waiting import eventually


@pytest.fixture
def owner(make_owner):
    made = make_owner()
    with made.folder.create(shared_objects.queues_name(1), queue_table_bytes(64)) as shared:
        format_queue_table(view_queue_table(shared.memory), 64, 1)
    native.store(made.control.state, "queue_table_generation_offered", 1)
    made.publish()
    return made


def offered(owner):
    return native.load(owner.control.state, "queue_table_generation_offered")


def want(owner, slots):
    native.store(owner.control.writer, "queue_table_wanted", slots)


def test_no_queue_table_is_offered_while_the_present_one_is_large_enough(owner):
    assert grow_queue_table(owner.memory) == "" and offered(owner) == 1
    want(owner, 64)
    assert grow_queue_table(owner.memory) == "" and offered(owner) == 1


def test_a_table_of_the_next_power_of_two_is_offered_once_and_the_writer_woken(owner):
    want(owner, 200)
    latch = owner.memory.latch(native.WRITER)
    latch.arm()
    assert grow_queue_table(owner.memory) == ""
    assert offered(owner) == 2 and latch.wait(10)
    shared, table = owner.memory.open_queue_table(2)
    with shared:
        assert (table.slots, table.generation, table.used) == (256, 2, 0)
    assert grow_queue_table(owner.memory) == "" and offered(owner) == 2


def test_the_half_made_table_of_a_dead_supervisor_is_replaced(owner):
    owner.folder.create(shared_objects.queues_name(2), 4096).close()
    want(owner, 128)
    assert grow_queue_table(owner.memory) == ""
    shared, table = owner.memory.open_queue_table(2)
    with shared:
        assert table.slots == 128


@pytest.mark.parametrize(("field", "value"), [("slots", 0), ("slots", 65), ("slots", 1 << 31), ("magic", 7)])
def test_a_table_that_was_scribbled_over_is_a_sentence_and_no_search_without_end(owner, field, value):
    with owner.folder.attach(shared_objects.queues_name(1)) as shared:
        setattr(view_queue_table(shared.memory), field, value)
    want(owner, 128)
    assert "the table of queues" in grow_queue_table(owner.memory) and offered(owner) == 1


def test_too_many_queues_and_no_room_are_sentences(owner, monkeypatch):
    want(owner, bring_up.SLOTS_MAX * 2)
    assert "more than an engine can hold" in grow_queue_table(owner.memory)
    monkeypatch.setattr(bring_up, "SLOTS_MAX", 1 << 60)
    want(owner, 1 << 30)
    assert "no room" in grow_queue_table(owner.memory)
    assert offered(owner) == 1


def test_a_pool_that_cannot_grow_says_so_whatever_refused_it(make_owner, monkeypatch):
    owner = make_owner(mode=native.MODE_POOL, pool_buffers=2)
    for number in range(2):
        native.store(owner.control.pool[number], "segment_base", POOL_NOT_MADE)
    reported = Reported()
    growth = bring_up.PoolGrowth(owner.memory, reported)
    monkeypatch.setattr(owner.memory.folder, "create", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    growth.start()
    eventually(lambda: reported, "the thread has tried")
    growth.join()
    assert len(reported) == 1 and reported[0].startswith("the pool stays smaller than asked") and "Too many open files" in reported[0]
