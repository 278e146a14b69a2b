"""Offsets and batches of streams, without Spark: every bound gives the same rows, and what is gone is never passed over in silence."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import time

import pytest

import pyengine
from broker_lock import held_by_a_broker
from fix_golden import usual
from fix_store_builder import START_MS, StoreBuilder
from pyengine.errors import CorruptionError, EngineUnavailableError, UsageError
from pyengine.ipc.live_reader import open_store
from pyengine.spark.options import read_options
from pyengine.spark.partitions import DataLossError
from pyengine.spark.stream_offsets import LogStream, QueueStream, without_mark
from spark import logs
from spark.logs import rows
from waiting import scaled_timeout_s

QUEUES = [("A", 0), ("A", 1), ("B", 0)]


def fill(builder: StoreBuilder, count: int) -> None:
    """Messages to QUEUES in turn, a second apart, of many sizes."""
    for number in range(count):
        topic, queue_id = QUEUES[number % 3]
        builder.put(topic, b"x" * (number * 37 % 300), queue_id=queue_id, tags=f"t{number % 2}")


@pytest.fixture
def builder(tmp_path) -> StoreBuilder:
    made = StoreBuilder(tmp_path / "store")
    fill(made, 90)
    return made


class Stream:
    """A stream and what it has read."""

    def __init__(self, builder: StoreBuilder, **given: object) -> None:
        self.given = {"columns": "topic,partition,offset,physicalOffset", **{name: str(value) for name, value in given.items()}}
        self.root = builder.root
        self.options = read_options({"path": str(builder.root), **self.given}, "stream")
        self.reader = open_store(builder.root, **self.options.sizes)
        of_topics = self.options.subscribe or self.options.subscribe_pattern or self.options.assign
        self.stream = (QueueStream if of_topics else LogStream)(self.options, self.reader)
        self.batches: list[list[tuple]] = []

    def run(self, start=None, most_messages=None, most_bytes=None):
        """Batches until nothing is left; the offset reached."""
        start = self.stream.initial() if start is None else start
        while True:
            end = self.stream.bounded(start, self.stream.available(), most_messages, most_bytes)
            if end == start:
                return end
            self.batches.append(self.rows(start, end))
            start = end

    def rows(self, start, end) -> list[tuple]:
        readable = {name: value for name, value in self.given.items() if not name.startswith("starting")}
        return rows(self.root, self.stream.parts(start, end), **readable)

    @property
    def read(self) -> list[tuple]:
        return [row for batch in self.batches for row in batch]


def everything(builder: StoreBuilder, **given: object) -> list[tuple]:
    return rows(builder.root, columns="topic,partition,offset,physicalOffset", **given)


@pytest.mark.parametrize("bounds", [{}, {"most_messages": 1}, {"most_messages": 7}, {"most_bytes": 1}, {"most_bytes": 500},
                                    {"most_bytes": 4096}, {"most_bytes": 9000}, {"most_messages": 5, "most_bytes": 700}])
def test_every_bound_gives_every_row_once(builder, bounds):
    for given in ({}, {"subscribe": "A,B"}, {"assign": '{"A": [1]}'}, {"maxPartitionBytes": 700}):
        stream = Stream(builder, startingOffsets="earliest", **given)
        stream.run(**bounds)
        asked = {name: value for name, value in given.items() if name != "maxPartitionBytes"}
        assert sorted(stream.read, key=lambda row: row[3]) == everything(builder, **asked)
        if given == {}:
            assert stream.read == everything(builder)
        assert bounds or len(stream.batches) == 1
        assert len(stream.batches) > 1 or not bounds or "assign" in given
        if "most_messages" in bounds:
            queues = 3 if given.get("subscribe") else 1  # each queue with news gives at least one
            assert max(map(len, stream.batches)) <= max(bounds["most_messages"], queues)


def test_the_same_offsets_give_the_same_rows_after_more_was_put(builder):
    for given in ({}, {"subscribePattern": "[AB]"}):
        stream = Stream(builder, startingOffsets="earliest", **given)
        start = stream.stream.initial()
        end = stream.stream.bounded(start, stream.stream.available(), 20, None)
        before = stream.rows(start, end)
        fill(builder, 30)
        assert stream.rows(start, end) == before != []
        assert Stream(builder, **given).rows(start, end) == before
        assert len(stream.run(start)) > 0 and len(stream.read) == len(everything(builder, **given))


@pytest.mark.parametrize("victim", [0, 1])
def test_damage_at_the_begin_of_a_batch_fails_or_is_skipped_alone(builder, victim, caplog):
    """It is known that a record begins there, so it is not searched for."""
    strict, skipping = (Stream(builder, columns="physicalOffset", onCorrupt=what) for what in ("fail", "skip"))
    start = strict.stream.initial()
    put = [builder.put("A", b"x" * 50).physical_offset for _ in range(9)]
    end = strict.stream.available()
    builder.write_log(b"\xff" * 8, at=put[victim] + 28)
    with pytest.raises(CorruptionError, match=f"damaged at {put[victim]}"):
        strict.rows(start, end)
    assert [row[0] for row in skipping.rows(start, end)] == [at for at in put if at != put[victim]]
    assert f"bytes at {put[victim]}" in caplog.text


def test_queues_share_a_bound_in_proportion_to_their_waiting_messages(tmp_path):
    builder = StoreBuilder(tmp_path / "store")
    for number in range(110):
        builder.put("A" if number % 11 else "B", b"x" * 10)
    stream = Stream(builder, subscribe="A,B", startingOffsets="earliest")
    start = stream.stream.initial()
    end = stream.stream.bounded(start, stream.stream.available(), 22, None)
    assert end == {"A": {"0": 20}, "B": {"0": 2}}
    one_record = builder.end // 110
    end = stream.stream.bounded(start, stream.stream.available(), None, 22 * one_record + 100)
    assert end == {"A": {"0": 20}, "B": {"0": 2}}


def test_a_queue_that_appears_is_read_from_its_first_message(builder):
    stream = Stream(builder, subscribe="A,New", startingOffsets="latest")
    reached = stream.run()
    assert stream.read == [] and "New" not in reached
    for _ in range(4):
        builder.put("New", b"x", queue_id=2)
    stream.run(reached)
    assert [row[:3] for row in stream.read] == [("New", 2, offset) for offset in range(4)]


def test_a_queue_that_appears_and_has_lost_its_beginning_is_a_loss(builder):
    given = {"subscribePattern": "A|New", "startingOffsets": "latest"}
    strict, lenient = (Stream(builder, failOnDataLoss=flag, **given) for flag in ("true", "false"))
    reached = strict.run()
    put = [builder.put("New", b"x" * 200, queue_id=2) for _ in range(40)]
    kept = [message.queue_offset for message in put if builder.segment(message.physical_offset) != builder.segment(put[0].physical_offset)]
    for path in sorted(builder.paths.commit_log.iterdir()):
        if path <= builder.segment(put[0].physical_offset):
            path.unlink()
    lost = f"queue New/2 is new to the stream and begins at {kept[0]}, not at 0: its first messages were deleted; set failOnDataLoss"
    with pytest.raises(DataLossError, match=lost):
        strict.run(reached)
    with pytest.raises(DataLossError, match=lost):
        strict.stream.parts(reached, strict.stream.available())
    lenient.run(reached)
    assert [row[:3] for row in lenient.read] == [("New", 2, offset) for offset in kept] and 0 < len(kept) < 40


def test_a_choice_that_is_widened_takes_queues_from_their_first_message_too(builder):
    reached = Stream(builder, subscribe="A", startingOffsets="latest").run()
    wider = Stream(builder, subscribePattern="A|B")
    wider.run(reached)
    assert [row[:3] for row in wider.read] == [("B", 0, offset) for offset in range(30)]
    builder.segment(0).unlink()
    with pytest.raises(DataLossError, match="queue B/0 is new to the stream and begins at"):
        Stream(builder, subscribePattern="A|B").run(reached)


@pytest.mark.parametrize(
    ("starting", "of_log", "of_queues"),
    [
        ({"startingOffsets": "earliest"}, 90, 90),
        ({"startingOffsets": "latest"}, 0, 0),
        ({}, 0, 0),
        ({"startingTimestamp": START_MS + 60_000}, 30, 30),
        ({"startingTimestamp": START_MS}, 90, 90),
        ({"startingTimestamp": START_MS + 90_000}, 0, 0),
        ({"startingOffsetsByTimestamp": f'{{"A": {{"0": {START_MS + 60_000}}}}}'}, None, 10 + 30 + 30),
        ({"startingOffsets": "-5"}, None, 15),
        ({"startingOffsets": "-1000"}, None, 90),
        ({"startingOffsets": '{"A": {"0": 10, "1": -1}}'}, None, 20 + 30),
        ({"startingPhysicalOffset": 1}, 89, None),
        ({"startingPhysicalOffset": 0}, 90, None),
    ],
)
def test_a_new_stream_begins_at_its_starting_option_or_at_the_latest_message(builder, starting, of_log, of_queues):
    for given, count in (({}, of_log), ({"subscribe": "A,B"}, of_queues)):
        if count is None:
            with pytest.raises(UsageError, match="option starting"):
                Stream(builder, **given, **starting)
            continue
        stream = Stream(builder, **given, **starting)
        stream.run(most_messages=13)
        assert len(stream.read) == count
        assert set(stream.read) <= set(everything(builder))


def test_a_stream_that_asks_for_messages_of_a_time_says_where_there_are_none(builder):
    given = {"subscribe": "A,B", "startingTimestamp": START_MS + 88_000}
    assert Stream(builder, **given).stream.initial()
    with pytest.raises(UsageError, match="queue A/0 has no message that was stored at"):
        Stream(builder, **given, startingOffsetsByTimestampStrategy="error").stream.initial()
    given["startingTimestamp"] = START_MS + 87_000
    assert Stream(builder, **given, startingOffsetsByTimestampStrategy="error").stream.initial()


@pytest.mark.parametrize("given", [{}, {"subscribe": "A,B"}])
def test_a_batch_waits_for_its_least_messages_or_its_time(builder, given, monkeypatch):
    from pyspark.sql.types import StructType

    from pyengine.spark import stream as module

    now_s = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    options = {"path": str(builder.root), "minOffsetsPerTrigger": "10", "maxTriggerDelay": "2 minutes",
               "startingOffsets": "earliest", "readLevel": "committed", **given}
    reader = module.LogStreamReader(StructType(), options)
    start = reader.initialOffset()
    first = reader.latestOffset(start, None)
    assert first != start, "the first batch does not wait"
    for count, comes in ((9, False), (1, True)):  # together they are enough
        fill(builder, count)
        reached = reader.latestOffset(first, None)
        assert (reached != first) is comes
    fill(builder, 1)
    assert reader.latestOffset(reached, None) == reached
    now_s[0] += 119.0
    assert reader.latestOffset(reached, None) == reached
    now_s[0] += 1.0
    assert reader.latestOffset(reached, None) != reached, "the time is over"
    reader.stop()
    reader = module.LogStreamReader(StructType(), options)
    reader._last_batch_s = now_s[0]
    assert reader.latestOffset(reached, None) == reached
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(reached, None) != reached, "availableNow does not wait"
    reader.stop()


def test_a_stream_begins_some_minutes_ago(tmp_path):
    builder = StoreBuilder(tmp_path / "store")
    builder.now_ms = time.time_ns() // 1_000_000 - 3_600_000
    fill(builder, 40)
    builder.now_ms += 3_000_000
    fill(builder, 20)
    for given in ({}, {"subscribe": "A,B"}):
        for words, count in (("-30 minutes", 20), ("-5 minutes", 0), ("-2 hours", 60), ("-1d", 60)):
            stream = Stream(builder, startingOffsets=words, **given)
            stream.run()
            assert len(stream.read) == count, words


@pytest.mark.parametrize("given", [{}, {"subscribe": "A,B"}])
def test_deleted_segments_end_a_stream_or_are_passed_over_as_asked(builder, given):
    log = sorted((builder.root / "commitlog").iterdir())
    assert len(log) > 4
    strict, lenient = (Stream(builder, startingOffsets="earliest", failOnDataLoss=flag, **given) for flag in ("true", "false"))
    start, end = strict.stream.initial(), strict.stream.available()
    for path in log[:2]:
        path.unlink()
    for ask in (lambda: strict.stream.bounded(start, end, None, None), lambda: strict.stream.parts(start, end)):
        with pytest.raises(DataLossError, match="begins at .* now, the stream had read up to 0; set failOnDataLoss=false"):
            ask()
    for bounds in ({}, {"most_messages": 9}, {"most_bytes": 1000}):
        lenient.batches.clear()
        lenient.run(start, **bounds)
        assert sorted(lenient.read, key=lambda row: row[3]) == everything(builder, failOnDataLoss="false") != []


def test_a_log_that_ends_before_the_stream_is_loss(builder):
    for given, ahead in (({}, {"physicalOffset": builder.end + 500}), ({"subscribe": "A"}, {"A": {"0": 31, "1": 30}})):
        strict, lenient = (Stream(builder, failOnDataLoss=flag, **given) for flag in ("true", "false"))
        with pytest.raises(DataLossError, match="what it had read is gone"):
            strict.stream.bounded(ahead, strict.stream.available(), None, None)
        assert lenient.run(ahead) == lenient.stream.available()
        assert lenient.read == []


@pytest.mark.parametrize("given", [{}, {"subscribe": "A"}])
def test_an_engine_that_starts_again_is_no_news_for_a_while(builder, given, monkeypatch):
    from pyspark.sql.types import StructType

    from pyengine.spark import stream as module

    now_s = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    reader = module.LogStreamReader(StructType(), {"path": str(builder.root), "startingOffsets": "earliest", **given})
    start = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert start == reader.latestOffset() != reader.initialOffset()
    for number in range(2):
        with held_by_a_broker(builder.root):
            assert reader.latestOffset(start, None) == start
            assert reader.reportLatestOffset() is None  # Spark asks for it after each look, and would end the query
            assert reader.partitions({} if given else {"physicalOffset": 0}, start)
            now_s[0] += module.TIMEOUT_S - 1
            assert reader.latestOffset(start, None) == start
            if number:
                now_s[0] += 1
                with pytest.raises(UsageError, match="choose committed"):
                    reader.latestOffset(start, None)
        if not number:
            assert reader.latestOffset(start, None) == start  # it is over: the next time may be as long
    ahead = {"A": {"0": 31, "1": 30}} if given else {"physicalOffset": builder.end + 1}
    reader = pickle.loads(pickle.dumps(reader))
    assert reader.latestOffset(ahead, None) == ahead
    now_s[0] += module.TIMEOUT_S
    with pytest.raises(DataLossError, match="what it had read is gone"):
        reader.latestOffset(ahead, None)
    reader.stop()


def test_a_queue_that_is_gone_for_good_is_waited_for_once(builder, monkeypatch):
    from pyspark.sql.types import StructType

    from pyengine.spark import stream as module

    now_s = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    strict, lenient = (module.LogStreamReader(StructType(), {"path": str(builder.root), "subscribe": "A", "failOnDataLoss": flag})
                       for flag in ("true", "false"))
    start = {"A": {"0": 0, "1": 30, "9": 5}, "B": {"0": 7}}  # B is chosen no more
    for reader in (strict, lenient):
        assert reader.latestOffset(start, None) == start
    now_s[0] += module.TIMEOUT_S
    with pytest.raises(DataLossError, match="queue A/9 is gone, the stream had read up to 5"):
        strict.latestOffset(start, None)
    for _ in range(2):
        end = lenient.latestOffset(start, None)
        assert without_mark(end) == {"A": {"0": 30, "1": 30, "9": 5}, "B": {"0": 7}}
    now_s[0] += module.TIMEOUT_S
    assert lenient.latestOffset(end, None) == end
    with held_by_a_broker(builder.root):
        assert lenient.latestOffset(end, None) == end, "that wait is a new one"
    slept: list[float] = []
    monkeypatch.setattr(module, "sleep", lambda pause_s: (slept.append(pause_s), now_s.__setitem__(0, now_s[0] + module.TIMEOUT_S)))
    reader = module.LogStreamReader(StructType(), {"path": str(builder.root), "subscribe": "A", "failOnDataLoss": "false"})
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(start, None)
    assert reader.latestOffset(end, None) == end and len(slept) == 1
    for reader in (strict, lenient, reader):
        reader.stop()


def test_a_choice_that_is_narrowed_does_not_wait_for_the_other_queues(builder):
    reached = Stream(builder, subscribe="A,B").run()
    narrower = Stream(builder, subscribe="A")
    assert not narrower.stream.is_beyond(reached, narrower.stream.available())
    assert narrower.run(reached) == reached


@pytest.mark.parametrize("given", [{}, {"subscribe": "A"}])
def test_a_stream_whose_start_spark_does_not_tell_never_goes_back(builder, given, monkeypatch):
    """As with Spark 4.0 and 4.1; when a query is started again these ask first for the parts of an empty batch."""
    from pyengine.spark import stream as module

    now_s = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    first, again = (logs.stream_reader(builder.root, **given) for _ in range(2))
    end = first.latestOffset()
    assert again.partitions(end, end) == []
    ahead = {"A": {"0": 31, "1": 30}} if given else {"physicalOffset": builder.end + 1}
    for reader in (first, again):
        with held_by_a_broker(builder.root):
            assert reader.latestOffset() == end
        assert reader.latestOffset() == end
        assert reader.partitions(ahead, ahead) == [] and reader.latestOffset() == ahead
        now_s[0] += module.TIMEOUT_S
        with pytest.raises(DataLossError, match="what it had read is gone"):
            reader.latestOffset()
        reader.stop()


def offsets_between(reader, start, end) -> list[int]:
    return [offset for part in reader.partitions(start, end) for batch in reader.read(part) for offset in batch.column(0).to_pylist()]


@pytest.mark.parametrize(("starting", "given"), [("-5", {"assign": '{"A": [0]}'}), ("latest", {"assign": '{"A": [0]}'}), ("latest", {})])
def test_the_first_batch_gives_the_same_rows_when_spark_asks_again_where_it_begins(builder, starting, given):
    """Spark asks when it runs the batch, and again when it repeats it; it stores only where the batch ends."""
    def put(count: int) -> list[int]:
        return [builder.put("A", b"x").queue_offset for _ in range(count)]

    first, again = (logs.stream_reader(builder.root, columns="offset", startingOffsets=starting, **given) for _ in range(2))
    start = first.initialOffset()
    wanted = put(4)
    end = json.loads(json.dumps(first.latestOffset(start, None)))
    put(20)
    for reader in (first, again):
        assert reader.partitions(end, end) == []  # where a query is started again
        assert offsets_between(reader, reader.initialOffset(), end)[-4:] == wanted
        following = reader.latestOffset(end, None)
        assert offsets_between(reader, end, following)[0] == wanted[-1] + 1
        reader.stop()


@pytest.mark.parametrize(("given", "starting"), [({}, "startingTimestamp"), ({"subscribe": "A"}, "startingTimestamp"),
                                                 ({"subscribe": "A"}, "startingOffsetsByTimestamp")])
def test_a_starting_time_only_says_where_a_new_stream_begins(tmp_path, given, starting):
    """As in Kafka: a program computes it at each start, and a clock that was set back hides nothing."""
    builder = StoreBuilder(tmp_path / "store")

    def put(count: int) -> list[int]:
        return [builder.put("A", b"x").queue_offset for _ in range(count)]

    def started_at(time_ms: int):
        value = time_ms if starting == "startingTimestamp" else json.dumps({"A": {"0": time_ms}})
        return logs.stream_reader(builder.root, columns="offset", **given, **{starting: value})

    put(3)
    first = started_at(builder.now_ms)
    begun = put(2)
    start = json.loads(json.dumps(first.initialOffset()))
    builder.now_ms -= 10_000
    begun += put(1)
    end = json.loads(json.dumps(first.latestOffset(start, None)))
    assert offsets_between(first, start, end) == begun
    builder.now_ms += 60_000
    waiting = put(3)
    again = started_at(builder.now_ms)
    waiting += put(1)
    assert offsets_between(again, start, end) == begun, "the batch is repeated"
    assert offsets_between(again, end, again.latestOffset(end, None)) == waiting
    for reader in (first, again):
        reader.stop()


def test_a_first_batch_that_is_repeated_tells_what_was_deleted_meanwhile(builder):
    first, again = (logs.stream_reader(builder.root, columns="offset") for _ in range(2))
    end = first.latestOffset(first.initialOffset(), None)
    builder.segment(0).unlink()
    with pytest.raises(DataLossError, match="the stream had read up to 0"):
        again.partitions(again.initialOffset(), end)
    for reader in (first, again):
        reader.stop()


# -- the log of a checkpoint


GIVEN = [{}, {"subscribe": "A,B"}]
BOTH = pytest.mark.parametrize("given", GIVEN, ids=["log", "topics"])


@contextlib.contextmanager
def reading(root, **given):
    from pyspark.sql.types import StructType

    from pyengine.spark.stream import LogStreamReader

    reader = LogStreamReader(StructType(), {"path": str(root), "startingOffsets": "earliest", "readLevel": "committed", **given})
    try:
        yield reader
    finally:
        reader.stop()


def read_up_to_now(root, **given):
    """The offsets that Spark's checkpoint has after one batch of everything, as JSON gives them back."""
    with reading(root, **given) as reader:
        start = reader.initialOffset()
        return json.loads(json.dumps([start, reader.latestOffset(start, None)]))


def assert_refused(root, start, end, **given):
    """In each way in which Spark continues: the next batch, the last batch once more, what there is now."""
    for more in ({}, {"failOnDataLoss": "false"}):
        for ask in (lambda reader: reader.latestOffset(end, None), lambda reader: reader.partitions(start, end),
                    lambda reader: (reader.prepareForTriggerAvailableNow(), reader.latestOffset(end, None))):
            with reading(root, **given, **more) as reader, pytest.raises(UsageError, match="is not the one that the stream has read up to"):
                ask(reader)


@BOTH
@pytest.mark.parametrize("count", [5, 90, 150])
def test_a_checkpoint_is_not_continued_on_a_store_that_was_made_anew(builder, given, count):
    start, end = read_up_to_now(builder.root, **given)
    shutil.rmtree(builder.root)
    anew = StoreBuilder(builder.root)
    anew.now_ms += 1
    fill(anew, count)
    assert_refused(builder.root, start, end, **given)
    with reading(builder.root, **given) as reader:
        assert reader.latestOffset(reader.initialOffset(), None) != reader.initialOffset(), "a new checkpoint reads it"


@BOTH
def test_a_running_stream_notices_that_its_store_was_replaced(builder, given):
    with reading(builder.root, **given) as reader:
        end = reader.latestOffset(reader.initialOffset(), None)
        builder.root.rename(builder.root.with_name("old"))
        anew = StoreBuilder(builder.root)
        anew.now_ms += 1
        fill(anew, 150)
        with pytest.raises(EngineUnavailableError, match="moved, or another one is at that path now: open the store again"):
            reader.latestOffset(end, None)
    with reading(builder.root, **given) as reader, pytest.raises(UsageError, match="is not the one that the stream has read up to"):
        reader.latestOffset(end, None)


@BOTH
def test_a_checkpoint_is_not_continued_on_a_log_that_was_cut_and_written_further(builder, given):
    shutil.copytree(builder.root, builder.root.with_name("shorter"))
    shorter = StoreBuilder(builder.root.with_name("shorter"))
    vars(shorter).update(end=builder.end, now_ms=builder.now_ms + 1, queue_offsets=builder.queue_offsets.copy())
    shorter.index, shorter.index_path = builder.index, shorter.paths.index / builder.index_path.name
    fill(builder, 30)
    start, end = read_up_to_now(builder.root, **given)
    assert_refused(shorter.root, start, end, **given)  # cut, and nothing written yet
    fill(shorter, 40)
    assert_refused(shorter.root, start, end, **given)


@BOTH
def test_a_checkpoint_is_continued_wherever_the_log_is_the_same(builder, given, tmp_path):
    """Moved, copied, deleted from the beginning, and with the checkpoint of a version that noted no log."""
    _, end = read_up_to_now(builder.root, **given)
    fill(builder, 7)
    whole = builder.root.with_name("copy")
    shutil.copytree(builder.root, whole)
    builder.root.rename(tmp_path / "moved")
    with reading(whole, **given) as reader:
        expected = reader.latestOffset(end, None)
        assert expected != end and expected.keys() == end.keys()
    log = sorted((tmp_path / "moved/commitlog").iterdir())
    for path in log[:-1]:
        path.unlink()
    for root in (whole, tmp_path / "moved"):
        with reading(root, failOnDataLoss="false", **given) as reader:
            assert without_mark(reader.latestOffset(without_mark(end), None)) == without_mark(expected)
            assert without_mark(reader.latestOffset(end, None)) == without_mark(expected)
            assert reader.partitions(end, expected)


@pytest.mark.parametrize("given", usual(GIVEN, GIVEN[1:], pytest.mark.ci), ids=["log", "topics"])
def test_a_checkpoint_is_continued_on_a_restored_store_unless_the_backup_is_older(make_engine, tmp_path, given, monkeypatch):
    from pyengine.client.backup import backup_store, restore_store
    from pyengine.errors import EngineError
    from pyengine.spark import stream as module
    from pyengine.storage.backup_files import Folder

    monkeypatch.setattr(module, "TIMEOUT_S", 0)
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put_many("A", [b"%d" % number for number in range(50)])
        producer.put_many("B", [b"b"])
        early = read_up_to_now(engine.root, **given)[1]
        producer.put_many("A", [b"%d" % number for number in range(50, 60)])
        backup_store(engine.root, Folder(tmp_path / "backup"))
        later = producer.put_many("A", [b"later"])
        with pyengine.open_store(engine.root) as store:
            assert store.wait_for_message("A", later.queue_id, later.first_queue_offset, timeout_s=scaled_timeout_s(30))
        late = read_up_to_now(engine.root, **given)[1]
    engine.stop()
    restore_store(Folder(tmp_path / "backup"), tmp_path / "restored")
    with reading(tmp_path / "restored", **given) as reader:
        assert reader.latestOffset(early, None) not in (early, late)
        with pytest.raises(EngineError, match="is not the one that the stream has read up to"):
            reader.latestOffset(late, None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"endingTimestamp": "5"}, "a stream has no end; read what there is with the trigger availableNow"),
        ({"endingOffsets": '{"a": {"0": 5}}'}, "a stream has no end"),
        ({"endingPhysicalOffset": "5"}, "a stream has no end"),
        ({"startingOffsets": "-5 weeks"}, "give a span of time like 30s, 15m or 1 hour"),
        ({"startingOffsets": '{"a": {"0": 5}}'}, "option startingOffsets needs a choice of topics"),
        ({"endingOffsetsByTimestamp": '{"a": {"0": 5}}'}, "a stream has no end"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": 5}}'}, "option startingOffsetsByTimestamp needs a choice of topics"),
        ({"minOffsetsPerTrigger": "6", "maxOffsetsPerTrigger": "5"}, "minOffsetsPerTrigger is more than maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "give a span of time like 30s"),
        ({"maxOffsetsPerTrigger": "0"}, "give 1 to"),
        ({"maxBytesPerTrigger": "much"}, "give 1 to"),
    ],
)
def test_a_stream_refuses_ending_options_wrong_values_and_queue_offsets_without_topics(options, sentence):
    with pytest.raises(UsageError) as refused:
        read_options({"path": "/store", **options}, "stream")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(("given", "start"), [({"subscribe": "A"}, {"physicalOffset": 0}), ({}, {"A": {"0": 0}})])
def test_a_checkpoint_of_other_options_is_refused(builder, given, start):
    from pyspark.sql.types import StructType

    from pyengine.spark.stream import LogStreamReader

    reader = LogStreamReader(StructType(), {"path": str(builder.root), **given})
    for ask in (lambda: reader.latestOffset(start, None), lambda: reader.partitions(start, start)):
        with pytest.raises(UsageError, match="the checkpoint is of a stream of .*, and this one reads"):
            ask()
    reader.stop()


def test_messages_put_after_prepare_for_available_now_do_not_move_the_latest_offset(builder):
    from pyspark.sql.types import StructType

    from pyengine.spark.stream import LogStreamReader

    reader = LogStreamReader(StructType(), {"path": str(builder.root), "startingOffsets": "earliest"})
    reader.prepareForTriggerAvailableNow()
    before = reader.latestOffset()
    fill(builder, 9)
    assert reader.latestOffset() == before
    reader.stop()


def test_available_now_waits_for_an_engine_that_starts_again(builder, monkeypatch):
    from pyengine.spark import stream as module

    with reading(builder.root, readLevel="flushed") as reader, contextlib.ExitStack() as stack:
        stack.enter_context(held_by_a_broker(builder.root))
        with monkeypatch.context() as patched, pytest.raises(UsageError, match="choose committed"):
            patched.setattr(module, "TIMEOUT_S", 0)
            reader.prepareForTriggerAvailableNow()
        monkeypatch.setattr(module, "sleep", lambda _: stack.close())
        reader.prepareForTriggerAvailableNow()
        assert without_mark(reader.latestOffset({"physicalOffset": 0}, None)) == {"physicalOffset": builder.end}


def test_waiting_messages_are_counted_once(builder, monkeypatch):
    stream = Stream(builder, readLevel="committed").stream
    begins, records = [], LogStream._records
    monkeypatch.setattr(LogStream, "_records", lambda self, begin, end, **settings: begins.append(begin) or records(
        self, begin, end, **settings))
    start, first = {"physicalOffset": 0}, stream.available()
    assert not stream.has_waiting(start, first, 91) and not stream.has_waiting(start, first, 91)
    assert stream.has_waiting(start, first, 90)
    fill(builder, 1)
    second = stream.available()
    assert not stream.has_waiting(start, second, 92) and stream.has_waiting(start, second, 91)
    assert begins == [0, first["physicalOffset"]]
    assert not stream.has_waiting(start, first, 91), "the log ends earlier than before"
    assert not stream.has_waiting(first, second, 2) and begins[2:] == [0, first["physicalOffset"]]


@pytest.mark.parametrize("options", [
    {"maxOffsetsPerTrigger": "5"}, {"maxBytesPerTrigger": "5"}, {"minOffsetsPerTrigger": "5"}, {"maxTriggerDelay": "5s"},
    {"startingOffsets": "-5"}, {"startingOffsets": "-1 hour"},
])
def test_a_batch_read_refuses_options_that_only_streams_have(options):
    assert read_options({"path": "/store", "subscribe": "a", **options}, "stream")
    with pytest.raises(UsageError, match="readStream"):
        read_options({"path": "/store", "subscribe": "a", **options})


def test_streams_and_readers_go_on_in_the_log_folders_of_the_next_engine(tmp_path):
    root, sizes = tmp_path / "store", {"mapped_file_size_commit_log_bytes": 65536, "mapped_file_size_consume_queue_bytes": 6000}

    def put(count: int) -> None:
        with pyengine.connect(root) as producer:
            for _ in range(count):
                assert producer.put("T", bytes(900), queue_id=0).ok

    with pyengine.Engine(root, **sizes):
        put(50)
    streams = [logs.stream_reader(root, columns="offset", readLevel="committed", maxOffsetsPerTrigger=20, **given)
               for given in ({}, {"subscribe": "T"})]
    ends = [stream.initialOffset() for stream in streams]
    found: list[list[int]] = [[], []]

    def follow() -> None:
        for at, stream in enumerate(streams):
            while (end := stream.latestOffset(ends[at], stream.getDefaultReadLimit())) != ends[at]:
                batch = [row["offset"] for part in stream.partitions(ends[at], end) for one in stream.read(part) for row in one.to_pylist()]
                assert 0 < len(batch) <= 20 and "" in end
                found[at], ends[at] = found[at] + batch, end

    follow()
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.stop)
        held = stack.enter_context(open_store(root))
        consumer = stack.enter_context(pyengine.consume(root, "T", group="G"))
        pulled = len(consumer.pull(max_messages=64, timeout_s=scaled_timeout_s(30)))
        with pyengine.Engine(root, store_path_commit_log="new", read_only_commit_log_store_paths=str(root / "commitlog")):
            put(250)
            assert held.wait_for_message("T", 0, 299, scaled_timeout_s(30))
            follow()
            while pulled < 300:
                pulled += len(consumer.pull(max_messages=64, timeout_s=scaled_timeout_s(30)))
            assert sum(batch.num_rows for batch in held.scan()) == 300
        assert found == [[*range(300)]] * 2
        with pyengine.Engine(root):
            put(10)
        follow()  # no engine was met
        assert found == [[*range(310)]] * 2 and sum(batch.num_rows for batch in held.scan()) == 310


@pytest.mark.parametrize("is_replay", [False, True])
def test_a_queue_that_a_broker_has_made_anew_is_not_read_on_by_its_number(builder, is_replay):
    given = {"columns": "topic,offset", "subscribe": "A,B", "maxOffsetsPerTrigger": 1000}
    first = logs.stream_reader(builder.root, **given)
    begin = first.initialOffset()
    _, end = logs.to_the_end(first, begin)
    first.stop()
    shutil.rmtree(builder.root / "consumequeue" / "B")
    builder.queue_offsets["B", 0] = 0
    for _ in range(50):
        builder.put("B", b"new")
    strict, lenient = (logs.stream_reader(builder.root, **given, failOnDataLoss=flag) for flag in (True, False))
    with pytest.raises(DataLossError, match="queue B/0 was deleted and made anew since the stream had read up to 30: begin"):
        strict.partitions(begin, end) if is_replay else strict.latestOffset(end, strict.getDefaultReadLimit())
    assert logs.to_the_end(lenient, end)[0] == [("B", number) for number in range(30, 50)]
    for reader in (strict, lenient):
        reader.stop()
    assert len(logs.streamed(builder.root, **given)) == 60 + 50
