"""pyengine.open_store beside an engine: levels, mode and arrivals from shared memory, files when it is gone."""

from __future__ import annotations

import shutil
import threading

import pytest

import pyengine
from pyengine.config import keep_sizes, load_config
from pyengine.native import control as native
from pyengine.native import sequence
from pyengine.results import ReadLevel


@pytest.fixture
def live(make_owner, golden):
    """(owner, store): an owner in this process whose store holds the golden store `basic`, counters at its end."""
    def make(**identity):
        owner = make_owner(**identity)
        store = golden("basic")
        for name in ("commitlog", "consumequeue", "index"):
            shutil.copytree(store.root / name, owner.root / name)
        (owner.root / "config" / "engine.toml").unlink()
        keep_sizes(owner.root, load_config(owner.root, {}, {}))
        owner.position(store.verify["facts"]["maxPhy"])
        owner.publish()
        return owner, store
    return make


def test_nothing_beyond_the_counters_is_read(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    second_end = queue["entries"][1][0] + queue["entries"][1][1]
    with pyengine.open_store(owner.root) as reader:
        assert reader.queue_range(queue["topic"], queue["queueId"])[1] == queue["max"]
        native.store_position(owner.control.reput_from, second_end)
        assert reader.queue_range(queue["topic"], queue["queueId"]) == (0, 2)
        native.store_position(owner.control.flushed, second_end - 1)
        assert reader.queue_range(queue["topic"], queue["queueId"], "flushed") == (0, 1)
        assert len(reader.get_message(queue["topic"], queue["queueId"], 0, level="flushed").messages) == 1


def test_how_far_dispatch_has_come_is_told(live):
    owner, store = live()
    end = store.verify["facts"]["maxPhy"]
    native.store_position(owner.control.reput_from, end - 10)
    with pyengine.open_store(owner.root) as reader:
        assert reader.is_live
        assert reader.dispatched_offset("flushed") == end - 10
        native.store_position(owner.control.flushed, end - 20)
        assert reader.dispatched_offset("flushed") == end - 20
    with pyengine.open_store(store.root) as reader:
        assert not reader.is_live


@pytest.mark.parametrize(("mode", "level"), [(native.MODE_MAPPED, ReadLevel.COMMITTED), (native.MODE_SYNC, ReadLevel.FLUSHED)])
def test_the_default_level_is_that_of_the_running_mode(live, mode, level):
    owner, _ = live(mode=mode)
    with pyengine.open_store(owner.root) as reader:
        assert reader.default_level is level


def test_a_waiter_is_woken_by_the_arrival(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    entry = queue["entries"][1]
    native.store_position(owner.control.reput_from, entry[0])
    woken = []
    with pyengine.open_store(owner.root) as reader:
        thread = threading.Thread(
            target=lambda: woken.append(reader.wait_for_message(queue["topic"], queue["queueId"], 1, timeout_s=60)))
        thread.start()
        native.store_position(owner.control.reput_from, entry[0] + entry[1])
        sequence.raise_(owner.control.arrival_seq)
        thread.join(timeout=60)
        assert woken == [True]
        assert not reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"], timeout_s=0.05)


def test_the_reader_outlives_the_engine_and_meets_its_successor(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    with pyengine.open_store(owner.root) as reader:
        native.store_position(owner.control.reput_from, 0)
        assert reader.queue_range(queue["topic"], queue["queueId"]) == (0, 0)
        owner.memory.retire()
        owner.lock.close()
        assert reader.queue_range(queue["topic"], queue["queueId"])[1] == queue["max"], "from the files"
        assert reader.wait_for_message(queue["topic"], queue["queueId"], 0, timeout_s=5)


def test_without_an_engine_the_files_are_followed(golden):
    store = golden("basic")
    queue = store.verify["facts"]["queues"][0]
    with pyengine.open_store(store.root) as reader:
        assert reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"] - 1, timeout_s=5)
        assert not reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"], timeout_s=0.05)
        assert reader.arrivals() == 0
