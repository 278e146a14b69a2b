"""Prepared messages and their ends through the public API: records, readers, repeated ends, and RocketMQ's view."""

from __future__ import annotations

import signal

import pytest

import pyengine
from fix_golden import compare_inspect
from pyengine.errors import UsageError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.native import control as native
from pyengine.results import PutStatus
from pyengine.storage.inspect import inspect
from waiting import eventually

PREPARED, COMMIT, ROLLBACK = 4, 8, 12
SIZES = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6000, "maxHashSlotNum": 1000, "maxIndexNum": 4000}


@pytest.fixture(params=["async", "sync", "pool"])
def engine(request, make_engine):
    made = make_engine(request.param)
    made.start()
    return made


def queue(root, topic: str = "orders", queue_id: int = 2) -> list:
    with pyengine.open_store(root) as store:
        end = store.queue_range(topic, queue_id, "committed")[1]
        return store.get_message(topic, queue_id, 0, level="committed").messages if end else []


def kinds_by_key(root, key: str) -> list[int]:
    with pyengine.open_store(root) as store:
        return [message.sys_flag & 12 for message in store.query_message("orders", key, level="committed")]


def settle(root) -> None:
    """Wait until all records are in queues and index, also those that are in pool buffers now."""
    with pyengine.open_store(root) as store, EngineMemory.of(root) as memory:
        eventually(lambda: store.dispatched_offset("committed") == native.load_position(memory.control.wrote), "dispatched")


@pytest.mark.java
@pytest.mark.maven
@pytest.mark.timeout(300)
def test_each_kind_of_end_has_its_records_queue_entries_and_keys(engine, judge):
    with pyengine.connect(engine.root) as producer:
        put = {"queue_id": 2, "tags": "t", "keys": "k", "properties": {"a": "b"}, "flag": 3, "group": "g"}
        first = producer.put_prepared("orders", b"to be committed", **put)
        second = producer.put_prepared("orders", b"to be rolled back", **put)
        producer.put_prepared("orders", b"never ended", **put)
        assert first.ok and first.queue_offset == second.queue_offset == 0
        settle(engine.root)
        assert queue(engine.root) == [] and kinds_by_key(engine.root, "k") == [PREPARED] * 3
        plain = producer.put("orders", b"plain", queue_id=2)
        committed = producer.end_transaction(first.msg_id, "commit")
        rolled = producer.end_transaction(second.msg_id, "rollback")
        assert committed.ok and rolled.ok and (plain.queue_offset, committed.queue_offset, rolled.queue_offset) == (0, 1, 0)
    settle(engine.root)
    assert [message.body for message in queue(engine.root)] == [b"plain", b"to be committed"]
    assert kinds_by_key(engine.root, "k") == [PREPARED, PREPARED, PREPARED, COMMIT]
    with pyengine.open_store(engine.root) as store:
        prepared, commit, other, rollback = (store.message(result.msg_id, "committed")
                                             for result in (first, committed, second, rolled))
    for name in ("topic", "queue_id", "flag", "born_timestamp_ms", "born_host", "store_host", "tags", "keys", "uniq_key"):
        assert getattr(prepared, name) == getattr(commit, name), name
        assert getattr(other, name) == getattr(rollback, name), name
    assert (prepared.sys_flag, commit.sys_flag, rollback.sys_flag) == (PREPARED, COMMIT, ROLLBACK)
    assert prepared.properties == commit.properties | {"TRAN_MSG": "true"} and commit.properties["PGROUP"] == "g"
    assert other.properties == rollback.properties | {"TRAN_MSG": "true"}
    assert (commit.body, rollback.body) == (prepared.body, b"")
    assert commit.prepared_transaction_offset == prepared.physical_offset and prepared.prepared_transaction_offset == 0
    assert rollback.prepared_transaction_offset == second.physical_offset
    assert engine.stop()
    assert compare_inspect(inspect(engine.root, {}), judge.verify(engine.root, SIZES).result(240)) == []


def test_ending_it_again_the_same_way_changes_nothing(engine):
    with pyengine.connect(engine.root, refusals="return") as producer:
        first, second = (producer.put_prepared("orders", b"x", queue_id=2) for _ in range(2))
        committed = producer.end_transaction(first.msg_id, "commit")
        assert producer.end_transaction(first.msg_id, "commit") == committed
        rolled = producer.end_transaction(second.msg_id, "rollback")
        assert producer.end_transaction(second.msg_id, "rollback") == rolled
        for msg_id, outcome, ended in ((first.msg_id, "rollback", "commit"), (second.msg_id, "commit", "rollback")):
            refused = producer.end_transaction(msg_id, outcome)
            assert refused.status is PutStatus.MESSAGE_ILLEGAL and f"ended by {ended} already" in refused.reason
    settle(engine.root)
    with pyengine.connect(engine.root, refusals="return") as another:
        again = another.end_transaction(first.msg_id, "commit")
        assert (again.ok, again.msg_id, again.queue_offset) == (True, committed.msg_id, 0), "the index knows of it"
        assert "ended by commit already" in another.end_transaction(first.msg_id, "rollback").reason
    settle(engine.root)
    assert len(queue(engine.root)) == 1


def test_an_end_of_another_message_is_refused_with_a_reason(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        plain = producer.put("orders", b"x")
        prepared = producer.put_prepared("orders", b"x")
        for msg_id, says in ((plain.msg_id, "is not a prepared message"), ("zz", "is not a message id"),
                             (prepared.msg_id[:-2] + "FF", "has no message"), ("0A" + prepared.msg_id[2:], "has no message")):
            refused = producer.end_transaction(msg_id, "commit")
            assert refused.status is PutStatus.MESSAGE_ILLEGAL and refused.reason.count(says) == 1 and refused.count == 0
        with pytest.raises(UsageError, match="ends no transaction"):
            producer.end_transaction(prepared.msg_id, "maybe")
        for wrong in ({"group": ""}, {"group": "a\x01b"}, {"properties": {"TRAN_MSG": "x"}}, {"queue_id": -1}):
            assert producer.put_prepared("orders", b"x", **wrong).status is PutStatus.MESSAGE_ILLEGAL
        assert producer.put_prepared("", b"x").status is PutStatus.MESSAGE_ILLEGAL
        with pytest.raises(TypeError):
            producer.put_prepared("orders", "text")


def test_a_prepared_message_survives_a_kill_of_all_and_another_producer_commits_it(make_engine):
    engine = make_engine("pool")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        prepared = producer.put_prepared("orders", b"x" * 5000, queue_id=2)
        engine.kill_all()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.end_transaction(prepared.msg_id, "commit").ok
    settle(engine.root)
    assert [message.body for message in queue(engine.root)] == [b"x" * 5000]


def test_a_message_that_becomes_readable_during_the_search_is_found(make_engine, monkeypatch):
    engine = make_engine("pool")
    engine.start()
    look, seen = LiveStoreReader.message, []

    def look_before_the_commit(reader, *given):
        found = look(reader, *given)
        if not seen:
            seen.append(found)
            engine.kill("committer", signal.SIGCONT)
            eventually(lambda: look(reader, *given), "committed")
        return found

    with pyengine.connect(engine.root) as producer:
        engine.kill("committer", signal.SIGSTOP)
        prepared = producer.put_prepared("orders", b"x", queue_id=2)
        monkeypatch.setattr(LiveStoreReader, "message", look_before_the_commit)
        assert producer.end_transaction(prepared.msg_id, "commit").ok
    assert seen == [None]


def test_an_end_waits_for_a_prepared_message_in_a_pool_buffer(make_engine):
    engine = make_engine("pool")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        engine.kill("committer", signal.SIGSTOP)
        prepared = producer.put_prepared("orders", b"x", queue_id=2)
        engine.kill("committer", signal.SIGCONT)
        assert producer.end_transaction(prepared.msg_id, "commit").ok
    settle(engine.root)
    assert [message.body for message in queue(engine.root)] == [b"x"]


def test_an_end_that_is_not_dispatched_yet_is_found_by_another_producer(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer, pyengine.connect(engine.root, refusals="return") as another:
        first, second = (producer.put_prepared("orders", b"x" * 400_000, queue_id=2) for _ in range(2))
        engine.kill("reputter", signal.SIGSTOP)
        committed = producer.end_transaction(first.msg_id, "commit")
        for _ in range(4):  # over the end of a segment
            producer.put("orders", b"y" * 400_000)
        rolled = producer.end_transaction(second.msg_id, "rollback")
        again = another.end_transaction(first.msg_id, "commit")
        assert (again.ok, again.msg_id, again.queue_offset) == (True, committed.msg_id, 0)
        assert "ended by commit already" in another.end_transaction(first.msg_id, "rollback").reason
        assert another.end_transaction(second.msg_id, "rollback").msg_id == rolled.msg_id
        engine.kill("reputter", signal.SIGCONT)
    settle(engine.root)
    assert len(queue(engine.root)) == 1
