"""`put(..., unique_key=, once=True)`: the first result again, whichever producer of which process has put the message."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import pyengine
from broker_lock import held_by_a_broker
from fix_cli import environment
from fix_engine import MODES, SMALL
from fix_golden import usual
from pyengine.client.outgoing import FirstPuts
from pyengine.errors import DiskError, UsageError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.results import PutRefusedError, PutStatus
from pyengine.storage.consumer_offset import CANCELS_NAME, DelayOffsets
from waiting import eventually, scaled_timeout_s


@pytest.fixture(scope="module", params=usual(["async", "pool", "sync"], ["sync"], pytest.mark.ci))
def engine(request, tmp_path_factory):
    with pyengine.Engine(tmp_path_factory.mktemp("once") / "store", message_delay_level="1s", **MODES[request.param], **SMALL) as engine:
        yield engine


@pytest.fixture
def producer(engine):
    with engine.connect() as producer:
        yield producer


def stored(engine, topic: str) -> list[bytes]:
    """The bodies of all messages of the topic's queue 0."""
    with engine.open_store() as store:
        end = store.max_physical_offset("committed")
        eventually(lambda: store.dispatched_offset("committed") >= end, "all is dispatched")
        found: list[bytes] = []
        while more := store.get_message(topic, 0, len(found), level="committed").messages:
            found += [message.body for message in more]
        return found


def test_the_first_result_comes_again(engine, producer, names):
    first = producer.put(names[0], b"first", unique_key="k", keys="other", once=True)
    with engine.connect() as another:
        for each in (producer, another):
            assert each.put(names[0], b"second", unique_key="k", once=True, timeout_s=60) == first
    assert producer.put(names[0], b"third", unique_key="other", once=True).ok  # which is no unique key yet
    assert producer.put(f"{names[0]}-2", b"elsewhere", unique_key="k", once=True).ok
    assert stored(engine, names[0]) == [b"first", b"third"] and stored(engine, f"{names[0]}-2") == [b"elsewhere"]


def test_a_put_without_once_counts_and_is_not_stopped(engine, producer, names):
    first = producer.put(names[0], b"first", unique_key="k")
    eventually(lambda: stored(engine, names[0]), "it is in the files, also with a pool")
    assert producer.put(names[0], b"second", unique_key="k", once=True) == first
    assert producer.put(names[0], b"again", unique_key="k").queue_offset == 1


def test_a_delayed_message_is_found_while_it_waits_and_later(engine, producer, names):
    first = producer.put(names[0], b"later", unique_key="k", delay_level=1, once=True)
    assert first.topic == "SCHEDULE_TOPIC_XXXX"
    assert producer.put(names[0], b"x", unique_key="k", once=True) == first
    assert producer.put(f"{names[0]}-2", b"of another topic", unique_key="k", once=True).topic == f"{names[0]}-2"
    eventually(lambda: stored(engine, names[0]), "it is delivered")
    assert producer.put(names[0], b"x", unique_key="k", once=True) == first
    assert stored(engine, names[0]) == [b"later"]


def test_a_cancelled_message_is_not_the_first_one(engine, producer, names):
    in_an_hour = datetime.timedelta(hours=1)
    cancelled = producer.put(names[0], b"cancelled", unique_key="k", deliver_at=in_an_hour, once=True)
    assert producer.put(names[0], b"x", unique_key="k", once=True) == cancelled and producer.cancel_delayed(cancelled.msg_id)
    assert producer.cancel_delayed(producer.put(names[0], b"again", unique_key="k", deliver_at=in_an_hour, once=True).msg_id)
    first = producer.put(names[0], b"first", unique_key="k", once=True)
    assert first.topic == names[0] and producer.put(names[0], b"x", unique_key="k", once=True) == first
    assert stored(engine, names[0]) == [b"first"]


def test_the_marks_of_cancelled_messages_are_not_read_for_a_key_of_which_none_waits(tmp_path):
    with pyengine.Engine(tmp_path / "store", **SMALL) as engine, engine.connect() as producer:
        waits = datetime.timedelta(hours=1)
        first = producer.put("orders", b"first", unique_key="k", once=True)
        producer.put("orders", b"later", unique_key="waits", deliver_at=waits, once=True)
        marks = engine.path / "config" / CANCELS_NAME
        marks.unlink(missing_ok=True)
        marks.mkdir()  # which cannot be read
        assert producer.put("orders", b"x", unique_key="k", once=True) == first
        assert producer.put("orders", b"later", unique_key="new", deliver_at=waits, once=True).ok
        with pytest.raises(DiskError, match=CANCELS_NAME):
            producer.put("orders", b"x", unique_key="waits", once=True)


def test_a_message_is_known_to_be_cancelled_or_delivered_when_its_mark_was_dropped(tmp_path):
    with (pyengine.Engine(tmp_path / "store", message_delay_level="1s", flush_delay_offset_interval_ms=10, **SMALL) as engine,
          engine.connect() as producer):
        delivered = producer.put("orders", b"delivered", unique_key="delivered", delay_level=1, once=True)
        for number in itertools.count():  # until one is cancelled before it is due
            cancelled = producer.put("orders", b"cancelled", unique_key=f"{number}", delay_level=1, once=True)
            if producer.cancel_delayed(cancelled.msg_id):
                break
        noted = DelayOffsets(engine.path)
        eventually(lambda: noted.read()[0].get(1, 0) > cancelled.queue_offset, "the scheduler notes that the level is done")
        (engine.path / "config" / CANCELS_NAME).unlink()  # as the scheduler, of whose long file nothing would be left
        assert producer.put("orders", b"x", unique_key="delivered", once=True) == delivered
        assert producer.put("orders", b"first", unique_key=f"{number}", once=True).topic == "orders"


def test_cancelled_messages_are_known_when_marks_were_dropped_however_many_records_their_key_has(tmp_path):
    with (pyengine.Engine(tmp_path / "store", message_delay_level="1s 3s", flush_delay_offset_interval_ms=10, **SMALL) as engine,
          engine.connect() as producer, engine.open_store() as reader):
        noted = DelayOffsets(engine.path)

        def cancelled(key: str, **delay) -> pyengine.PutResult:
            put = producer.put("orders", b"cancelled", unique_key=key, once=True, **delay)
            assert put.topic == SCHEDULE_TOPIC and producer.cancel_delayed(put.msg_id)
            return put

        puts = [cancelled("twice", delay_level=2), cancelled("twice", delay_level=2)]
        timed = producer.put("orders", b"cancelled", unique_key="moved", deliver_at=datetime.timedelta(seconds=5.5), once=True)
        moved = reader.queue_range(SCHEDULE_TOPIC, 1)[1]
        eventually(lambda: len(reader.query_message(SCHEDULE_TOPIC, "moved")) == 2, "it waits at another level")
        assert producer.cancel_delayed(timed.msg_id)
        eventually(lambda: noted.read()[0].get(2, 0) > puts[1].queue_offset, "level 2 is done")
        for level in (1, 2):
            end = reader.queue_range(SCHEDULE_TOPIC, level - 1)[1]
            eventually(lambda: noted.read()[0].get(level, 0) >= end, "all levels are done")
        assert moved == 3
        (engine.path / "config" / CANCELS_NAME).unlink()
        for key in ("twice", "moved"):
            first = producer.put("orders", key.encode(), unique_key=key, once=True)
            assert first.topic == "orders" and producer.put("orders", b"x", unique_key=key, once=True) == first


PUT_ALL = """
import json, random, sys
import pyengine

path, topic, name, seed = sys.argv[1:]
numbers = list(range(40))
random.Random(seed).shuffle(numbers)
with pyengine.connect(path) as producer:
    sys.stdin.readline()
    print(json.dumps({number: producer.put(topic, f"{number} {name}".encode(), unique_key=str(number), once=True, timeout_s=60).msg_id
                      for number in numbers}))
"""


def test_of_producers_that_put_a_key_at_once_one_stores_it_and_all_get_its_result(engine, names, rng):
    processes = [subprocess.Popen(
        [sys.executable, "-c", PUT_ALL, str(engine.path), names[0], str(name), str(rng.random())], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=environment()) for name in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [json.loads(process.communicate(timeout=scaled_timeout_s(120))[0]) for process in processes]
    assert told[0] == told[1] == told[2] and len(set(told[0].values())) == 40
    assert sorted(int(body.split()[0]) for body in stored(engine, names[0])) == list(range(40))


STOPPED = """
import os, signal, sys
import pyengine
from pyengine.client.submission import Submitter

def stop(self, entry, timeout_s):
    print("has the key", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

Submitter.put_and_wait = stop
with pyengine.connect(sys.argv[1]) as producer:
    producer.put(sys.argv[2], b"never", unique_key="k", once=True)
"""


def test_a_put_that_is_stopped_holds_its_key_alone_and_a_kill_frees_it(engine, producer, names):
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(engine.path), names[0]], stdout=subprocess.PIPE, env=environment())
    try:
        assert process.stdout.readline() == b"has the key\n"
        with pytest.raises(PutRefusedError, match="another put of the unique key 'k' takes longer than 0.05 s"):
            producer.put(names[0], b"x", unique_key="k", once=True, timeout_s=0.05)
        assert producer.put(names[0], b"other", unique_key="other", once=True).ok
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert producer.put(names[0], b"next", unique_key="k", once=True).ok
    assert stored(engine, names[0]) == [b"other", b"next"]


def test_the_first_message_must_be_as_durable_as_the_put(tmp_path):
    with pyengine.Engine(tmp_path / "store", flush_interval_commit_log_ms=600_000, **SMALL) as engine, engine.connect() as producer:
        first = producer.put("orders", b"x", unique_key="k", once=True)
        firsts = FirstPuts(engine.path)
        late = firsts.result(firsts.find("orders", "k"), pyengine.ReadLevel.FLUSHED, 0.05)
        firsts.close()
        assert (late.status, late.stored, late.msg_id) == (PutStatus.FLUSH_DISK_TIMEOUT, True, first.msg_id)


def test_a_first_message_is_waited_for_while_nothing_tells_how_durable_it_is(tmp_path):
    with pyengine.Engine(tmp_path / "store", **MODES["sync"], **SMALL) as engine, engine.connect() as producer:
        first = producer.put("orders", b"x", unique_key="k", once=True)
        firsts = FirstPuts(engine.path)
        found = firsts.find("orders", "k")
    with held_by_a_broker(engine.path):  # as recovery holds it
        late = firsts.result(found, pyengine.ReadLevel.FLUSHED, 0.05)
        assert (late.status, late.stored, late.msg_id) == (PutStatus.FLUSH_DISK_TIMEOUT, True, first.msg_id)
        ends = ThreadPoolExecutor(1).submit(firsts.result, found, pyengine.ReadLevel.FLUSHED, scaled_timeout_s(60))
    assert ends.result(scaled_timeout_s(60)) == first
    firsts.close()


def test_what_once_cannot_do_is_an_error(engine, producer, names, tmp_path):
    for wrong in ({}, {"unique_key": None}):
        with pytest.raises(UsageError, match="once recognises a message by its unique_key"):
            producer.put(names[0], b"x", once=True, **wrong)
    with pytest.raises(TypeError, match="once must be bool"):
        producer.put(names[0], b"x", unique_key="k", once="yes")
    with pytest.raises(TypeError, match="no argument 'once'"):
        producer.put_async(names[0], b"x", unique_key="k", once=True)
    with pytest.raises(PutRefusedError, match="folder"):
        producer.put("a/b", b"x", unique_key="k", once=True)
    with pyengine.Engine(tmp_path / "store", message_index_enable="false", **SMALL) as other, other.connect() as without:
        with pytest.raises(UsageError, match="message_index_enable"):
            without.put("orders", b"x", unique_key="k", once=True)
        assert without.put("orders", b"the first one", queue_id=0).queue_offset == 0
