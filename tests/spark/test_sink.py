"""The sink without a JVM: what a row becomes, and that a task that runs again, however its attempt ended, puts each row once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import pyengine
from dying import run_and_die_at
from fix_engine import tail_of_ring
from pyengine.errors import EngineUnavailableError, StoreBusyError, UsageError
from pyengine.formats.record import Message
from pyengine.results import GetResult, GetStatus, PutError, ReadLevel
from pyengine.storage.ofd_lock import remove_unlocked, try_lock
from waiting import eventually

pytestmark = pytest.mark.spark

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
PLAIN = pa.schema([("topic", pa.string()), ("value", pa.binary())])
names = (f"q{number}" for number in itertools.count())  # of queries: each test has its own


@pytest.fixture
def topic(request) -> str:
    """A topic that no other test has."""
    return f"T{zlib.crc32(request.node.name.encode())}"


def sink_of(root: Path, schema: pa.Schema = PLAIN, **given: str):
    from pyspark.sql.pandas.types import from_arrow_schema

    from pyengine.spark.sink import Sink

    return Sink.prepared({"path": str(root), **given}, from_arrow_schema(schema), is_stream=True)


def task_of(query: str, batch: int = 0, task: int = 0):
    from pyengine.spark.sink import SinkTask

    return SinkTask(query, batch, task)


def batches_of(topic: str, bodies, *, rows: int = 100):
    bodies = list(bodies)
    for at in range(0, len(bodies), rows):
        part = bodies[at : at + rows]
        yield pa.record_batch([pa.array([topic] * len(part)), pa.array(part, pa.binary())], schema=PLAIN)


def put(root: Path, task, batches):
    from pyengine.spark.sink import put_rows

    return put_rows(sink_of(root), task, batches)


def messages(root: Path, topic: str, queue_id: int | None = None) -> list:
    """The messages of the queue, or of all the topic's, once all that was put is dispatched. A row without a queue goes to any
    of them once the engine has entered the topic in topics.json."""
    from pyengine.ipc.live_reader import settled_end

    settled_end(root, 60)
    found = []
    with pyengine.open_store(root) as reader:
        for number in reader.queue_ids(topic) if queue_id is None else [queue_id]:
            at = 0
            while got := reader.get_message(topic, number, at, 1000, level="committed").messages:
                found += got
                at += len(got)
    return found


def bodies(root: Path, topic: str, queue_id: int | None = None) -> Counter:
    return Counter(message.body for message in messages(root, topic, queue_id))


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + count)]


# -- rows -----------------------------------------------------------------------------


def test_each_column_becomes_its_part_of_the_message(sink_store, topic):
    schema = pa.schema([("Topic", pa.string()), ("value", pa.string()), ("partition", pa.int32()), ("key", pa.binary()),
                        ("keys", pa.list_(pa.string())), ("tags", pa.string()), ("headers", HEADERS), ("delayLevel", pa.int32()),
                        ("offset", pa.int64())])
    rows = [
        (topic, "one", 3, b"by key", None, "red", [{"key": "a", "value": b"x"}, {"key": "b", "value": "\u00e9".encode()}], None, 7),
        (topic, None, 3, b"not this", ["k1", None, "k2"], "a||b", None, 0, 8),
        (None, "elsewhere", None, None, None, "", [], None, 9),
        (topic, "later", 3, None, None, None, None, 2, 10),
    ]
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row)) for row in rows], schema=schema)
    from pyengine.spark.sink import PROPERTY, put_rows

    query = next(names)
    done = put_rows(sink_of(sink_store, schema, topic=f"{topic}-else"), task_of(query, 5, 2), [batch])
    assert (done.query, done.batch, done.rows, done.put, done.is_committed) == (query, 5, 4, 4, False)
    first, second = messages(sink_store, topic, 3)
    assert (first.body, first.keys, first.tags, first.properties["a"], first.properties["b"]) == (b"one", "by key", "red", "x", "é")
    assert (second.body, second.keys, second.tags) == (b"", "k1 k2", "a||b")
    assert [message.properties[PROPERTY].rsplit(":", 1)[0] for message in (first, second)] == [f"{query}:5:2:0", f"{query}:5:2:1"]
    assert [message.body for message in messages(sink_store, f"{topic}-else")] == [b"elsewhere"]
    assert [message.body for message in messages(sink_store, "SCHEDULE_TOPIC_XXXX", 1)
            if message.properties["REAL_TOPIC"] == topic] == [b"later"]


def test_a_row_without_a_queue_goes_to_one_of_the_topics_write_queues(sink_store, topic):
    from pyengine.storage.config_table import TopicConfig, TopicConfigs

    TopicConfigs(sink_store).create(TopicConfig(topic, read_queue_nums=4, write_queue_nums=4))
    schema = pa.schema([("value", pa.string()), ("keys", pa.string())])
    batch = pa.record_batch([pa.array([f"{n}" for n in range(24)]), pa.array([f"k{n % 5}" if n < 12 else None for n in range(24)])],
                            schema=schema)
    from pyengine.spark.sink import put_rows

    put_rows(sink_of(sink_store, schema, topic=topic), task_of(next(names)), [batch])
    found = [messages(sink_store, topic, queue_id) for queue_id in range(4)]
    assert sorted(int(message.body) for queue in found for message in queue) == list(range(24))
    of_key = {}
    for queue_id, queue in enumerate(found):
        assert sum(message.keys is None for message in queue) == 3
        for message in queue:
            assert of_key.setdefault(message.keys, queue_id) == queue_id or message.keys is None


@pytest.mark.parametrize(
    ("fields", "given", "sentence"),
    [
        ([("topic", pa.string())], {}, "without a column value"),
        ([("value", pa.string())], {}, "add a column topic, or set the option topic"),
        ([("value", pa.string()), ("tag", pa.string())], {"topic": "T"}, "did you mean tags?"),
        ([("value", pa.int32())], {"topic": "T"}, "column value of type INT: cast it to BINARY or STRING"),
        ([("value", pa.string()), ("body", pa.string())], {"topic": "T"}, "is given twice: value and body"),
        ([("value", pa.string())], {"topc": "T"}, "unknown option 'topc' (did you mean topic?)"),
        ([("value", pa.string())], {"topic": "T", "path": "s3://bucket/x"}, "the store is a directory of this host"),
        ([("value", pa.string())], {"topic": "T", "path": "file://store/x"}, "tasks cannot open this"),
        ([("value", pa.string())], {"topic": "T", "writeId": "w"}, "one of batch writes"),
    ],
    ids=["no value", "no topic", "misspelt column", "type", "twice", "misspelt option", "uri", "file uri", "writeId"],
)
def test_rows_that_cannot_be_written_are_refused_before_a_task_runs(tmp_path, fields, given, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        sink_of(tmp_path, pa.schema(fields), **given)


def test_without_an_engine_on_this_host_nothing_is_written(tmp_path, sink_store, topic, monkeypatch):
    monkeypatch.setattr(pyengine, "connect", partial(pyengine.connect, timeout_s=0.1))
    with pytest.raises(EngineUnavailableError, match="cannot write to .*only on its host: no engine has ever run"):
        sink_of(tmp_path)
    from pyengine.spark.sink import put_rows

    elsewhere = dataclasses.replace(sink_of(sink_store), boot_id=b"\0" * 16)
    with pytest.raises(EngineUnavailableError, match="another host than the driver"):
        put_rows(elsewhere, task_of(next(names)), batches_of(topic, numbered(3)))
    assert not messages(sink_store, topic)


def test_a_row_without_a_queue_is_refused_for_a_topic_without_write_queues(sink_store, topic):
    from pyengine.spark.sink import put_rows
    from pyengine.storage.config_table import TopicConfig, TopicConfigs

    TopicConfigs(sink_store).create(TopicConfig(topic, read_queue_nums=4, write_queue_nums=4))
    path = sink_store / "config" / "topics.json"  # a broker lets an operator set 0, and nothing else is written there
    document = json.loads(path.read_text())
    document["topicConfigTable"][topic]["writeQueueNums"] = 0
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"topic {topic} has no write queue in config/topics.json"):
        put_rows(sink_of(sink_store), task_of(next(names)), batches_of(topic, numbered(3)))


def test_a_row_that_cannot_be_a_message_is_named(sink_store, topic):
    schema = pa.schema([("topic", pa.string()), ("value", pa.string()), ("headers", HEADERS)])
    from pyengine.spark.sink import put_rows

    for topics, headers, sentence in (
        ([topic, "no/topic"], [None, None], "cannot write row 1 of task 0 to no/topic/0: MESSAGE_ILLEGAL"),
        ([None, topic], [None, None], "whose topic is null"),
        ([topic, topic], [None, [{"key": "a", "value": b"\xff"}]], "header 'a' that is not UTF-8"),
        ([topic, topic], [[{"key": "a", "value": b"1"}] * 2, None], "'a' twice"),
        ([topic, topic], [None, [{"key": "TAGS", "value": b"1"}]], "the property name TAGS is reserved"),
        ([topic, topic], [None, [{"key": "a", "value": None}]], "header 'a' is null: a property has a value, so leave such headers out"),
        ([topic, topic], [None, [{"key": None, "value": b"1"}]], "a header without a name"),
        ([topic, topic], [None, [None]], "a header without a name"),
        ([topic, "PYENGINE_SPARK_SINK"], [None, None], "to PYENGINE_SPARK_SINK, which has the sink's own markers"),
    ):
        batch = pa.record_batch([pa.array(topics), pa.array(["x", "y"]), pa.array(headers, HEADERS)], schema=schema)
        with pytest.raises(UsageError, match=sentence):
            put_rows(sink_of(sink_store, schema), task_of(next(names)), [batch])


# -- attempts -------------------------------------------------------------------------


def test_an_attempt_that_dies_at_any_step_leaves_nothing_that_is_lost_or_doubled(sink_store, topic, rng, monkeypatch):
    from pyengine.spark import sink

    monkeypatch.setattr(sink, "GROUP_ROWS", 40)
    rows = [b"same"] * 30 + numbered(150)
    steps = [(sink._Attempt, "_put_once"), (sink, "put_marker"), (sink._Attempt, "close")]
    for step in itertools.count():
        query, here = next(names), f"{topic}-{step}"
        ended = run_and_die_at(step, lambda: put(sink_store, task_of(query), batches_of(here, rows)), (), steps)
        before = bodies(sink_store, here)
        again = rng.sample(rows, len(rows))  # Spark promises no order
        done = put(sink_store, task_of(query), batches_of(here, again, rows=77))
        assert (done.rows, done.put) == (180, 180 - before.total())
        found = messages(sink_store, here)
        assert Counter(message.body for message in found) == Counter(rows), step
        assert len({message.properties[sink.PROPERTY].split(":")[3] for message in found}) == 180
        if ended:
            break
    assert step > 5


def test_a_new_attempt_waits_for_rows_that_a_killed_attempt_had_submitted(make_engine, topic, monkeypatch):
    from pyengine.ipc import live_reader

    engine = make_engine()
    engine.start()
    query, rows = next(names), numbered(200)
    forked = multiprocessing.get_context("fork")
    stopped, is_stopped = forked.Pipe()

    def slowly():
        parts = list(batches_of(topic, rows))
        yield parts[0]
        stopped.send("now")
        stopped.recv()
        yield parts[1]

    child = forked.Process(target=lambda: put(engine.root, task_of(query), slowly()))
    child.start()
    assert is_stopped.poll(60) and is_stopped.recv() == "now"
    before = tail_of_ring(engine, child.pid)
    engine.kill("writer", signal.SIGSTOP)
    is_stopped.send("go on")
    eventually(lambda: tail_of_ring(engine, child.pid) > before, "the second batch is in the ring")
    child.kill()
    child.join()
    outcome = []
    second = threading.Thread(target=lambda: outcome.append(put(engine.root, task_of(query), batches_of(topic, rows))))
    looks = threading.Event()
    is_drained = live_reader.is_drained
    monkeypatch.setattr(live_reader, "is_drained", lambda *session: looks.set() or is_drained(*session))
    second.start()
    eventually(lambda: looks.is_set() or tail_of_ring(engine, os.getpid()), "the second attempt waits, or puts")
    engine.kill("writer", signal.SIGCONT)
    second.join(240)
    assert bodies(engine.root, topic) == Counter(rows)
    assert (outcome[0].rows, outcome[0].put) == (200, 0)


def test_two_attempts_of_a_task_do_not_put_at_once(sink_store, topic, monkeypatch):
    from pyengine.spark import sink

    query, rows = next(names), numbered(200)
    inside, may_go_on = threading.Event(), threading.Event()

    def slowly():
        parts = list(batches_of(topic, rows))
        yield parts[0]
        inside.set()
        assert may_go_on.wait(60)
        yield parts[1]

    outcomes = {}
    first = threading.Thread(target=lambda: outcomes.update(first=put(sink_store, task_of(query), slowly())))
    first.start()
    assert inside.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(sink, "ATTEMPT_WAIT_S", 0.0)
        with pytest.raises(StoreBusyError, match="another attempt of task 0"):
            put(sink_store, task_of(query), batches_of(topic, rows))
    assert put(sink_store, task_of(query, task=1), batches_of(topic, [b"other task"])).put == 1
    second = threading.Thread(target=lambda: outcomes.update(second=put(sink_store, task_of(query), batches_of(topic, rows))))
    second.start()
    may_go_on.set()
    first.join(60)
    second.join(60)
    assert (outcomes["first"].put, outcomes["second"].put) == (200, 0)
    assert bodies(sink_store, topic) == Counter([*rows, b"other task"])


def test_an_orderly_stop_leaves_no_file_of_locks(make_engine, topic):
    """Also where an attempt holds one while the engine stops, or waits for one of a file that is removed then."""
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.spark.sink import only_attempt

    engine = make_engine()
    engine.start()
    path = find_folder(engine.root).sink_locks_path
    assert put(engine.root, task_of(next(names)), batches_of(topic, numbered(3))).put == 3 and path.exists()
    engine.stop()
    assert not path.exists()
    engine.start()
    task = task_of(next(names))
    with only_attempt(engine.root, task):
        engine.stop()
        assert path.exists()
        engine.start()
        assert path.exists()
        engine.stop()
    assert not path.exists()


def test_an_attempt_whose_file_of_locks_is_removed_while_it_waits_locks_the_next_one(sink_store, monkeypatch):
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.spark import sink

    path, task, opened = find_folder(sink_store).sink_locks_path, task_of(next(names)), []

    def lock_late(descriptor: int, byte: int, named: Path) -> bool:
        opened.append(os.fstat(descriptor).st_ino)
        if len(opened) == 1:
            assert remove_unlocked(named)
        return try_lock(descriptor, byte, named)

    monkeypatch.setattr(sink, "try_lock", lock_late)
    with sink.only_attempt(sink_store, task):
        assert len(opened) == 2 and path.stat().st_ino == opened[1]
        monkeypatch.setattr(sink, "ATTEMPT_WAIT_S", 0.0)
        with pytest.raises(StoreBusyError), sink.only_attempt(sink_store, task):
            pass


def test_other_rows_than_those_of_an_earlier_attempt_are_refused_and_not_put(sink_store, topic):
    query, rows = next(names), numbered(50)
    put(sink_store, task_of(query), batches_of(topic, rows))
    for others in (rows[1:], [*rows[1:], b"another"], []):
        with pytest.raises(UsageError, match="ran before with other rows: 1 of the 50 messages|other rows: 50 of the 50"):
            put(sink_store, task_of(query), batches_of(topic, others))
    assert put(sink_store, task_of(query), batches_of(topic, [*rows, b"one more"])).put == 1
    assert bodies(sink_store, topic) == Counter([*rows, b"one more"])


def test_a_batch_that_runs_again_with_fewer_tasks_is_refused_once(sink_store, topic):
    from pyengine.spark.sink import put_commit

    query, rows = next(names), numbered(20)
    for task in (0, 1):
        put(sink_store, task_of(query, 3, task), batches_of(topic, rows[task::2]))
    done = put(sink_store, task_of(query, 3), batches_of(topic, rows))
    with pytest.raises(UsageError, match=f"batch 3 of query {query} has 1 task now, and an attempt before had task 1: .* twice"):
        put_commit(str(sink_store), query, 3, [done])
    again = put(sink_store, task_of(query, 3), batches_of(topic, rows))
    assert again.is_committed, "all rows are there, and the query can go on"
    put_commit(str(sink_store), query, 3, [again])
    put_commit(str(sink_store), query, 4, [put(sink_store, task_of(query, 4), batches_of(topic, rows))])


def test_a_committed_batch_puts_nothing_and_hides_nothing_of_the_next(sink_store, topic):
    from pyengine.spark.sink import put_commit

    query = next(names)
    rows = {batch: numbered(20, 100 * batch) for batch in range(3)}
    for batch in (0, 1):
        done = [put(sink_store, task_of(query, batch, task), batches_of(topic, rows[batch][task::2])) for task in (0, 1)]
        put_commit(str(sink_store), query, batch, done)
    put(sink_store, task_of(query, 2), batches_of(topic, rows[2][:10]))
    for batch in (1, 0):  # Spark's own notes of them were lost; now one task has all rows
        again = put(sink_store, task_of(query, batch), batches_of(topic, reversed(rows[batch])))
        assert (again.rows, again.put, again.is_committed) == (20, 0, True)
        put_commit(str(sink_store), query, batch, [again])
    assert put(sink_store, task_of(query, 2), batches_of(topic, rows[2])).put == 10
    assert bodies(sink_store, topic) == Counter(itertools.chain(*rows.values()))


def test_batches_that_the_log_lacks_before_the_one_that_is_committed_are_said(sink_store, topic, caplog):
    from pyengine.spark.sink import put_commit

    query = next(names)
    for batch in (0, 1, 5):
        assert not caplog.text
        put_commit(str(sink_store), query, batch, [put(sink_store, task_of(query, batch), batches_of(topic, numbered(2, batch)))])
    assert f"has no commit of the batches between 1 and 5 of query {query}" in caplog.text and "restored from a backup" in caplog.text


def test_a_batch_that_was_committed_with_other_rows_is_refused_each_time(sink_store, topic):
    """As of a checkpoint that is older than the log, whose next batch has the number of one that was committed."""
    from pyengine.spark.sink import put_commit

    query, rows = next(names), numbered(20)

    def run(batch, *bodies_of_tasks):
        done = [put(sink_store, task_of(query, batch, task), batches_of(topic, of_task)) for task, of_task in enumerate(bodies_of_tasks)]
        put_commit(str(sink_store), query, batch, done)
        return sum(task.put for task in done)

    assert run(1, rows[:10], rows[10:]) == 20
    assert run(3, numbered(5, 100)) == 5
    for others, count in ((numbered(25), 25), (numbered(19), 19), ([*rows[1:], rows[1]], 20), ([], 0)):
        for _ in range(2):
            with pytest.raises(UsageError, match=rf"batch 1 of query {query} was committed before, with other rows \(20 then, {count} "):
                run(1, others)
    with pytest.raises(UsageError, match=f"batch 2 of query {query} was committed before, and the log has no note of its rows"):
        run(2, numbered(5, 50))
    assert run(1, rows[5:], rows[:5]) == 0
    assert run(4, numbered(5, 200)) == 5
    assert bodies(sink_store, topic) == Counter([*rows, *numbered(5, 100), *numbered(5, 200)])


def test_markers_are_found_among_those_of_many_other_queries(sink_store, topic):
    from pyengine.spark.sink import MARKER_TOPIC, marker_queue, put_marker

    query = next(names)
    put(sink_store, task_of(query), batches_of(topic, numbered(30)))
    like = next(name for name in names if marker_queue(name) == marker_queue(query))
    with pyengine.connect(sink_store) as producer:
        producer.put_many(MARKER_TOPIC, [f"begin {like} 0 {n}".encode() for n in range(1000)], queue_id=marker_queue(query))
        put_marker(producer, like, f"commit {like} 0")
    assert put(sink_store, task_of(query), batches_of(topic, numbered(30))).put == 0


def test_messages_among_the_markers_that_are_none_are_passed_over(sink_store, topic):
    from pyengine.spark.sink import MARKER_TOPIC, marker_queue, put_commit

    query = next(names)
    done = put(sink_store, task_of(query), batches_of(topic, numbered(30)))
    with pyengine.connect(sink_store) as producer:
        for body in (b"v", b"", b"\xff\xfe", b"begin", f"commit {query}".encode(), f"begin {query} x 0".encode()):
            assert producer.put(MARKER_TOPIC, body, queue_id=marker_queue(query)).ok
    assert put(sink_store, task_of(query), batches_of(topic, numbered(30))).put == 0
    put_commit(str(sink_store), query, 0, [done])
    assert put(sink_store, task_of(query), batches_of(topic, numbered(30))).is_committed


class Markers:
    """A queue of begin markers of the tasks 0, 1, ..., whose beginning moves to `kept` while it is read."""

    def __init__(self, query: str, count: int, kept: int = 0, unreadable: Collection[int] = ()) -> None:
        self.query, self.count, self.kept, self.unreadable = query, count, kept, unreadable

    def queue_range(self, topic: str, queue_id: int, level: ReadLevel) -> tuple[int, int]:
        return 0, self.count

    def get_message(self, topic: str, queue_id: int, offset: int, most: int, *, level: ReadLevel) -> GetResult:
        if offset < self.kept:
            return GetResult(GetStatus.OFFSET_TOO_SMALL, [], self.kept)
        found, at = [], offset
        while at < self.count and len(found) < min(most, 32):
            if at not in self.unreadable:
                found.append(Message("markers", b"begin %b 7 %d" % (self.query.encode(), at), 0, at, 1000 + at, 100))
            at += 1
        return GetResult(GetStatus.FOUND if found else GetStatus.MESSAGE_WAS_REMOVING, found, at)


@pytest.mark.parametrize(
    ("kept", "unreadable"), [(40, ()), (199, ()), (0, {199}), (0, range(150, 200)), (0, {5, 70, 136, 198}), (70, {140})])
def test_markers_that_are_left_are_found_while_others_are_deleted_or_cannot_be_read(kept, unreadable):
    from pyengine.spark.sink import find_markers

    query = next(names)
    left = [number for number in range(200) if number >= kept and number not in unreadable]
    for number in range(200):
        found = find_markers(Markers(query, 200, kept, unreadable), task_of(query, 7, number), 0)
        assert found == (False, 1000 + number if number in left else None)


# -- the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long), pytest.param("pool", marks=pytest.mark.long)])
def test_an_attempt_outlives_an_engine_that_is_killed_and_starts_again(make_engine, topic, mode):
    engine = make_engine(mode)
    engine.start()
    query, rows = next(names), numbered(300)
    again = threading.Thread(target=lambda: (engine.kill_all(), engine.start()))

    def meanwhile():
        parts = list(batches_of(topic, rows))
        yield parts[0]
        engine.kill_all()
        engine.start()
        yield parts[1]
        engine.kill("writer", signal.SIGSTOP)  # the next put gets no answer
        again.start()
        yield parts[2]

    assert put(engine.root, task_of(query), meanwhile()).put == 300
    again.join(60)
    assert bodies(engine.root, topic) == Counter(rows)
    assert put(engine.root, task_of(query), batches_of(topic, rows)).put == 0


def test_a_task_and_a_commit_wait_for_an_engine_that_was_stopped_and_starts_again(make_engine, topic, monkeypatch):
    """It is started once they wait for it, and then recovers for a while."""
    from pyengine.ipc.live_reader import LiveWatermark
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.spark import sink

    engine = make_engine()
    engine.start()
    query, rows, prepared = next(names), numbered(50), sink_of(engine.root)
    limit, refusals = LiveWatermark.queue_limit, 0

    def limit_once_recovered(self, level):
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise StoreBusyError(f"{engine.root} is being recovered: wait until it runs")
        return limit(self, level)

    def wait(seconds):
        nonlocal refusals
        if not find_folder(engine.root).path.exists():
            engine.start()
            refusals = 2
        time.sleep(seconds)

    monkeypatch.setattr(sink, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))
    monkeypatch.setattr(LiveWatermark, "queue_limit", limit_once_recovered)
    assert engine.stop()
    done = sink.put_rows(prepared, task_of(query), batches_of(topic, rows))
    assert done.put == 50 and refusals == 0
    assert engine.stop()
    sink.put_commit(str(engine.root), query, 0, [done])
    assert refusals == 0
    assert put(engine.root, task_of(query), batches_of(topic, rows)).is_committed
    assert bodies(engine.root, topic) == Counter(rows)


def test_an_engine_that_does_not_come_back_ends_the_attempt(make_engine, topic, monkeypatch):
    from pyengine.spark import sink

    engine = make_engine()
    engine.start()
    monkeypatch.setattr(sink, "ENGINE_TIMEOUT_S", 0.5)

    def meanwhile():
        yield from batches_of(topic, numbered(10))
        engine.kill_all()
        yield from batches_of(topic, numbered(10, 10))

    query = next(names)
    with pytest.raises((PutError, EngineUnavailableError)):
        put(engine.root, task_of(query), meanwhile())
    engine.start()
    assert put(engine.root, task_of(query), batches_of(topic, numbered(20))).put == 10
    assert bodies(engine.root, topic) == Counter(numbered(20))
