"""The scheduler as a process: a RocketMQ store's waiting messages, kill -9 at random moments, an orderly stop."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

import pyengine
from fix_cli import run
from fix_engine import EACH_MODE
from fix_golden import compare_inspect
from pyengine.errors import EngineUnavailableError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.ipc.control_block import now_ms
from pyengine.native import control as native
from pyengine.storage.inspect import inspect
from waiting import eventually

LEVELS = "1s 2s 3s"


def read_queue(root, topic: str, queue_id: int) -> list:
    with pyengine.open_store(root) as store:
        found, offset = [], 0
        while offset < store.queue_range(topic, queue_id)[1]:
            answer = store.get_message(topic, queue_id, offset)
            found += answer.messages
            offset = answer.next_begin_offset
        return found


def noted(root) -> dict[str, int]:
    path = root / "config" / "delayOffset.json"
    return json.loads(path.read_text())["offsetTable"] if path.exists() else {}


def accepted_by_rocketmq(judge, root, settings) -> dict:
    """Return what the real store reads from it, after comparing that with what we read."""
    theirs = judge.verify(root, settings).result(240)
    assert compare_inspect(inspect(root, {}), theirs) == []
    return theirs


@pytest.mark.java
@pytest.mark.maven
@pytest.mark.timeout(300)
def test_delayed_messages_of_a_rocketmq_store_are_delivered_and_rocketmq_reads_them(golden, make_engine, judge):
    """Levels 1 to 3 were delivered by RocketMQ, 7 and 14 messages of levels 4 and 5 wait, all overdue."""
    store = golden("delay")
    engine = make_engine(name=str(store.root), mode="async")
    engine.settings = {}
    before = {queue: read_queue(store.root, "Delay1", queue) for queue in (0, 1)}
    waiting = read_queue(store.root, SCHEDULE_TOPIC, 3) + read_queue(store.root, SCHEDULE_TOPIC, 4)
    assert len(waiting) == 21 and "{1:8,2:8,3:8" in (store.root / "config" / "delayOffset.json").read_text()
    engine.start()
    eventually(lambda: sum(len(read_queue(store.root, "Delay1", queue)) for queue in (0, 1)) >= sum(map(len, before.values()))
               + 21,
               "all are delivered", 100)
    assert engine.stop()
    assert noted(store.root) == {"1": 8, "2": 8, "3": 8, "4": 7, "5": 14}
    after = {queue: read_queue(store.root, "Delay1", queue) for queue in (0, 1)}
    new = sorted((message for queue in (0, 1) for message in after[queue][len(before[queue]):]),
                 key=lambda one: one.physical_offset)
    assert all(after[queue][: len(before[queue])] == before[queue] for queue in (0, 1)), "nothing was delivered twice"
    assert {message.uniq_key for message in new} == {message.uniq_key for message in waiting} and len(new) == 21
    for level in ("4", "5"):
        assert [one.uniq_key for one in new if one.properties["DELAY"] == level] == [
            one.uniq_key for one in waiting if one.properties["DELAY"] == level]
    config = store.manifest["config"]
    theirs = accepted_by_rocketmq(judge, store.root, config)
    assert sum(message["topic"] == "Delay1" for message in theirs["messages"]) == sum(map(len, after.values()))


@pytest.mark.java
@pytest.mark.maven
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rounds", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", EACH_MODE)
def test_kill_9_of_the_scheduler_loses_nothing_and_keeps_the_order(make_engine, judge, rng, mode, rounds):
    engine = make_engine(mode, message_delay_level=LEVELS, flush_delay_offset_interval_ms=rng.choice((1, 300)))
    engine.start()
    sent: dict[int, list[str]] = {1: [], 2: []}
    with pyengine.connect(engine.root, message_delay_level=LEVELS) as producer:
        for _ in range(rounds):
            for _ in range(150):
                level = rng.choice((1, 2))
                name = f"{level}-{len(sent[level])}"
                assert producer.put("T", name.encode(), queue_id=level, delay_level=level, unique_key=name).ok
                sent[level].append(name)
            level = rng.choice((1, 2))
            before = len(read_queue(engine.root, "T", level))
            wanted = before + rng.randrange(1, 60)
            eventually(lambda: len(read_queue(engine.root, "T", level)) >= wanted, "deliveries move", 60)
            incarnation = engine.incarnation("scheduler")
            engine.kill("scheduler", rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
            engine.wait_back("scheduler", incarnation)

    def all_delivered() -> bool:
        """And noted: a scheduler that dies before its note begins there again, though all may be there already."""
        return noted(engine.root) == {str(level): len(names) for level, names in sent.items()} and all(
            {one.uniq_key for one in read_queue(engine.root, "T", level)} >= set(sent[level]) for level in sent)

    engine.kill_all()
    engine.start()
    eventually(all_delivered, "everything is delivered", 60)
    assert engine.stop()
    doubles = 0
    for level, names in sent.items():
        found = [one.uniq_key for one in read_queue(engine.root, "T", level)]
        assert list(dict.fromkeys(found)) == names, "the first of each, in order"
        assert all(one.body == one.uniq_key.encode() for one in read_queue(engine.root, "T", level))
        doubles += len(found) - len(names)
    print(f"{doubles} doubles of {sum(map(len, sent.values()))}")
    assert noted(engine.root) == {str(level): len(names) for level, names in sent.items()}
    assert run("check", engine.root).code == 0
    config = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6000, "maxHashSlotNum": 1000, "maxIndexNum": 4000,
              "messageDelayLevel": LEVELS}
    accepted_by_rocketmq(judge, engine.root, config)


def test_after_an_orderly_stop_nothing_is_delivered_twice(make_engine):
    engine = make_engine(message_delay_level=LEVELS)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for number in range(20):
            assert producer.put("T", b"%d" % number, delay_level=1).ok
    eventually(lambda: len(read_queue(engine.root, "T", 0)) >= 5, "deliveries move")
    assert engine.stop()
    found = len(read_queue(engine.root, "T", 0))
    assert noted(engine.root) == {"1": found}
    engine.start()
    eventually(lambda: len(read_queue(engine.root, "T", 0)) >= 20, "the rest")
    assert engine.stop()
    assert [int(one.body) for one in read_queue(engine.root, "T", 0)] == list(range(20))


def test_sizes_in_the_environment_that_are_not_the_stores_keep_no_worker_from_starting(make_engine, monkeypatch):
    """Sizes given by --set count against the environment, in every process and at every start."""
    monkeypatch.setenv("PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES", str(2 << 20))
    monkeypatch.setenv("PYENGINE_MAX_INDEX_NUM", "8000")
    engine = make_engine(message_delay_level=LEVELS)
    for number in range(2):
        engine.start()
        with pyengine.connect(engine.root, **engine.settings) as producer:
            assert producer.put("T", b"%d" % number, delay_level=1).ok
        with pyengine.open_store(engine.root, **engine.settings) as store:
            eventually(lambda: store.queue_range("T", 0)[1] == number + 1, "it is delivered", 60)
        assert engine.stop()


def test_the_scheduler_alone_can_be_stopped_and_takes_no_session_while_idle(make_engine):
    engine = make_engine()
    engine.start()
    with engine.memory() as memory:
        assert all(native.load(row, "state") != native.SESSION_OPEN for row in memory.control.sessions)
    incarnation = engine.incarnation("scheduler")
    os.kill(engine.pid("scheduler"), signal.SIGTERM)
    engine.wait_back("scheduler", incarnation)
    assert engine.stop()


def test_producers_that_have_all_sessions_keep_no_message_from_being_delivered(make_engine):
    """The engine's own workers have sessions of their own."""
    engine = make_engine(message_delay_level=LEVELS, sessions_max=2)
    engine.start()
    with pyengine.connect(engine.root) as one, pyengine.connect(engine.root):
        with pytest.raises(EngineUnavailableError, match="all 2 sessions are taken"):
            pyengine.connect(engine.root)
        assert one.put("T", b"late", delay_level=1).ok
        with pyengine.open_store(engine.root) as store:
            eventually(lambda: store.queue_range("T", 0)[1] == 1, "it is delivered", 30)
    assert engine.stop()


@pytest.mark.parametrize("mode", EACH_MODE)
@pytest.mark.ci
def test_each_message_is_cancelled_or_delivered_whatever_is_killed(make_engine, rng, mode):
    """Threads cancel messages around their times, each message twice; the scheduler is killed meanwhile, then everything."""
    engine = make_engine(mode, message_delay_level="1s 2s", flush_delay_offset_interval_ms=50)
    engine.start()
    due: dict[str, tuple[int, str]] = {}  # message id -> when it is due, and its key
    with pyengine.connect(engine.root) as producer:
        for number in range(400):
            ahead_ms = rng.choice((1000, 2000, rng.randrange(1500, 4000)))
            at_ms = now_ms() + ahead_ms
            when = {"deliver_at": at_ms} if ahead_ms % 1000 else {"delay_level": ahead_ms // 1000}
            put = producer.put("T", b"", unique_key=str(number), **when)
            due[put.msg_id] = at_ms, str(number)
    chosen = sorted(rng.sample(sorted(due), 300), key=due.__getitem__)
    answers: dict[str, set[bool]] = {msg_id: set() for msg_id in chosen}
    early_ms = {msg_id: rng.randrange(-5, 15) for msg_id in chosen}

    def cancel(mine: list[str]) -> None:
        with pyengine.connect(engine.root) as canceller:
            for msg_id in mine:
                eventually(lambda: now_ms() >= due[msg_id][0] - early_ms[msg_id], "it is about due")
                answers[msg_id].add(canceller.cancel_delayed(msg_id))

    threads = [threading.Thread(target=cancel, args=(chosen[number % 2::2],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        before = len(read_queue(engine.root, "T", 0))
        eventually(lambda: len(read_queue(engine.root, "T", 0)) > before or now_ms() > max(due.values())[0], "deliveries move", 60)
        incarnation = engine.incarnation("scheduler")
        engine.kill("scheduler")
        engine.wait_back("scheduler", incarnation)
    for thread in threads:
        thread.join()
    engine.kill_all()
    engine.start()
    gone = {due[msg_id][1] for msg_id, given in answers.items() if True in given}
    wanted = {key for _, key in due.values()} - gone
    eventually(lambda: {one.uniq_key for one in read_queue(engine.root, "T", 0)} >= wanted, "all others are delivered", 60)
    assert engine.stop()
    print(f"{len(gone)} of {len(chosen)} cancelled")
    assert 0 < len(gone) < len(chosen) and not gone & {one.uniq_key for one in read_queue(engine.root, "T", 0)}
