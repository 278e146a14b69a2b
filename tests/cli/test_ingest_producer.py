"""One producer of an ingest puts every line once, in order; errors name file and line."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import multiprocessing
import zlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import pyengine
from fix_cli import HOSTILE_JSON
from pyengine.cli import ingest
from pyengine.cli.ingest import Job, Range, produce, share_out
from pyengine.cli.output import message_document
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import SYS_FLAG_COMPRESSED
from pyengine.formats.record import Message, encode_properties
from pyengine.results import PutManyResult, PutResult, PutStatus


@dataclass
class FakeProducer:
    """A producer without an engine: keeps what it is given, answers `status` from the `good`-th put on."""

    status: PutStatus = PutStatus.PUT_OK
    good: int = 1 << 30
    batches: list = field(default_factory=list)
    singles: list = field(default_factory=list)
    indeterminate: bool = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def status_now(self) -> PutStatus:
        return PutStatus.PUT_OK if len(self.batches) + len(self.singles) <= self.good else self.status

    def put_many(self, topic, bodies, *, queue_id=0, tags=None):
        self.batches.append((topic, queue_id, list(bodies), tags))
        return PutManyResult(self.status_now(), count=len(bodies), reason="said so", indeterminate=self.indeterminate)

    def put_async(self, topic, body, **arguments):
        self.singles.append((topic, body, arguments))
        future = Future()
        future.set_result(PutResult(self.status_now(), reason="said so"))
        return future


@pytest.fixture
def producer(monkeypatch, tmp_path):
    fake = FakeProducer()
    monkeypatch.chdir(tmp_path)  # the job's store
    monkeypatch.setitem(vars(pyengine), "connect", lambda store, **settings: fake)
    return fake


def job(ranges=(), **changes) -> Job:
    return Job(**{"store": "s", "topic": "t", "settings": {}, "queues": 1, "first_queue": 0, "format": "lines",
                  "tags": None, "ranges": list(ranges)} | changes)


def whole(path) -> Range:
    return Range(str(path), 0, path.stat().st_size)


def test_every_line_is_one_message_without_its_newline(tmp_path, producer):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\n\n\xff\x00 three\r\nlast")
    reports = []
    tally = produce(job([whole(path)], tags="A"), lambda now: reports.append(now.messages))
    assert producer.batches == [("t", 0, [b"one", b"", b"\xff\x00 three\r", b"last"], "A")]
    assert (tally.messages, tally.body_bytes, tally.read_bytes, tally.unconfirmed) == (4, 16, 19, 0)
    assert reports == [4]


def test_batches_are_bounded_and_go_round_the_queues(tmp_path, producer, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_MESSAGES", 3)
    monkeypatch.setattr(ingest, "BLOCK_BYTES", 14)
    path = tmp_path / "in.txt"
    lines = [b"%d" % number for number in range(7)] + [b"x" * 50] + [b"y"]
    path.write_bytes(b"\n".join(lines))
    produce(job([whole(path)], queues=2, first_queue=1), lambda now: None)
    assert [len(bodies) for _, _, bodies, _ in producer.batches] == [3, 3, 1, 1, 1]
    assert [queue for _, queue, _, _ in producer.batches] == [1, 0, 1, 0, 1]
    assert [body for _, _, bodies, _ in producer.batches for body in bodies] == lines


@pytest.mark.parametrize("producers", [1, 2, 3, 5])
def test_shares_together_are_the_input(tmp_path, producer, producers):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"".join(b"%s %d\n" % (path.name.encode(), number) for number in range(100)))
    shares = share_out([(str(path), path.stat().st_size) for path in paths], producers)
    total = sum(produce(job(share), lambda now: None).messages for share in shares)
    assert total == 300
    assert sorted(body for _, _, bodies, _ in producer.batches for body in bodies) == sorted(
        line for path in paths for line in path.read_bytes().splitlines())


def test_standard_input_is_read_to_its_end(producer, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb\n")))
    assert produce(job(), lambda now: None).messages == 2


class Pieces(io.RawIOBase):
    """A stream that gives these pieces, one at each read; `seen`: how many batches `producer` had at each read."""

    def __init__(self, producer: FakeProducer, *pieces: bytes) -> None:
        self.seen, self._producer, self._pieces = [], producer, [*pieces, b""]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self.seen.append(len(self._producer.batches))
        piece = self._pieces.pop(0)
        buffer[:len(piece)] = piece
        return len(piece)


def test_a_line_of_a_live_stream_is_put_as_soon_as_it_is_whole(producer, monkeypatch):
    stream = Pieces(producer, b"a\nb", b"b\nc\n", b"d", b"d", b"d")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(stream)))
    assert produce(job(), lambda now: None).read_bytes == 10
    assert stream.seen == [0, 1, 2, 2, 2, 2] and [bodies for _, _, bodies, _ in producer.batches] == [[b"a"], [b"bb", b"c"], [b"ddd"]]


def test_a_refusal_ends_the_ingest_of_a_live_stream_before_more_is_read(producer, monkeypatch):
    producer.good, producer.status = 1, PutStatus.OS_PAGECACHE_BUSY
    stream = Pieces(producer, *[b'{"body": "a"}\n'] * 4)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(stream)))
    with pytest.raises(EngineError, match="standard input, line 2: .*OS_PAGECACHE_BUSY"):
        produce(job(format="jsonl"), lambda now: None)
    assert len(stream.seen) == 2


def test_a_producer_process_says_which_file_cannot_be_read(tmp_path, producer):
    pipe, theirs = multiprocessing.Pipe(duplex=False)
    ingest._produce_alone(job([Range(str(tmp_path / "gone"), 0, 5)]), theirs)
    error = pipe.recv()
    assert isinstance(error, EngineError) and str(error) == f"{tmp_path / 'gone'}: No such file or directory"


def test_a_refused_batch_names_file_and_line(tmp_path, producer, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_MESSAGES", 2)
    producer.good, producer.status = 2, PutStatus.OS_PAGECACHE_BUSY
    path = tmp_path / "in.txt"
    path.write_bytes(b"1\n2\n3\n4\n5\n6\n")
    reports = []
    with pytest.raises(EngineError) as caught:
        produce(job([whole(path)]), lambda now: reports.append(now.messages))
    assert str(caught.value) == f"{path}, line 5: the next 2 line(s) are not stored: OS_PAGECACHE_BUSY: said so"
    assert reports[-1] == 4


def test_a_batch_of_unknown_fate_is_not_called_not_stored(tmp_path, producer):
    producer.good, producer.status, producer.indeterminate = 0, PutStatus.UNKNOWN_ERROR, True
    path = tmp_path / "in.txt"
    path.write_bytes(b"1\n2\n")
    with pytest.raises(EngineError) as caught:
        produce(job([whole(path)]), lambda now: None)
    assert str(caught.value) == f"{path}, line 1: the next 2 line(s): UNKNOWN_ERROR: said so"


def test_stored_but_not_confirmed_is_counted(tmp_path, producer):
    producer.good, producer.status = 0, PutStatus.FLUSH_DISK_TIMEOUT
    path = tmp_path / "in.txt"
    path.write_bytes(b"1\n2\n")
    tally = produce(job([whole(path)]), lambda now: None)
    assert (tally.messages, tally.unconfirmed) == (2, 2)


def test_jsonl_says_all_of_a_message(tmp_path, producer):
    path = tmp_path / "in.jsonl"
    rows = [{"body": "eins", "tags": "A", "keys": "k1 k2", "properties": {"a": "b"}, "flag": 3, "queue_id": 7},
            {"body_base64": base64.b64encode(b"\xff\x00").decode()}, {"body": ""}]
    path.write_text("\r\n".join(json.dumps(row) for row in rows))
    tally = produce(job([whole(path)], format="jsonl", queues=4), lambda now: None)
    assert producer.singles == [
        ("t", b"eins", {"tags": "A", "keys": "k1 k2", "properties": {"a": "b"}, "flag": 3, "queue_id": 7}),
        ("t", b"\xff\x00", {"queue_id": 1}), ("t", b"", {"queue_id": 2})]
    assert (tally.messages, tally.body_bytes, tally.read_bytes) == (3, 6, path.stat().st_size)


def test_a_line_of_tail_keeps_its_queue_and_its_own_properties(tmp_path, producer):
    path = tmp_path / "in.jsonl"
    rows = [message_document(Message("t", b"x", queue_id, 0, 0, 91, encode_properties({"a": "b", "TAGS": "A", "UNIQ_KEY": "1"})))
            for queue_id in (0, 2, 0)]
    path.write_text("\n".join(map(json.dumps, rows)))
    produce(job([whole(path)], format="jsonl", queues=4, first_queue=1), lambda now: None)
    assert [arguments.pop("queue_id") for _, _, arguments in producer.singles] == [0, 2, 0]
    assert producer.singles[0] == ("t", b"x", {"tags": "A", "keys": None, "properties": {"a": "b"}, "flag": 0, "unique_key": "1"})


@pytest.mark.parametrize(("stored", "raw"), [(zlib.compress(b"x" * 100), True), (b"no zlib", False)], ids=["raw", "damaged"])
def test_a_line_of_tail_whose_body_is_still_compressed_is_refused(tmp_path, producer, stored, raw):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(message_document(Message("t", stored, 0, 0, 0, 91, sys_flag=SYS_FLAG_COMPRESSED), raw)))
    with pytest.raises(UsageError, match="line 1: .* compressed"):
        produce(job([whole(path)], format="jsonl"), lambda now: None)
    assert producer.singles == []


@pytest.mark.parametrize(("line", "sentence"), [
    ("{", "not a JSON object"), ("[]", "give an object"), ("{}", "give an object"), ('{"body": 3}', "not text"),
    ('{"body": "a", "body_base64": "YQ=="}', "give an object"), ('{"body_base64": "§"}', "not base64"),
    ('{"body": "a", "tag": "b"}', "unknown field 'tag'"),
    ('{"physical_offset": 1, "body": null}', "not text"),
    ('{"physical_offset": 1, "body": "a", "properties": [1]}', "properties must be a mapping, not list"),
    *[pytest.param(hostile, "not a JSON object", id=name) for name, hostile in HOSTILE_JSON.items()],
])
def test_a_line_that_is_no_message_names_the_place(tmp_path, producer, line, sentence):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"body": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UsageError) as caught:
        produce(job([whole(path)], format="jsonl"), lambda now: None)
    assert f"{path}, line 2: " in str(caught.value) and sentence in str(caught.value)


@pytest.fixture
def answering(monkeypatch):
    """A producer whose answers say where the messages are; every second batch waits in vain for its sync."""

    class Answering(FakeProducer):
        def put_many(self, topic, bodies, *, queue_id=0, tags=None):
            self.batches.append(bodies)
            number = len(self.batches)
            return PutManyResult(PutStatus.PUT_OK if number % 2 else PutStatus.FLUSH_DISK_TIMEOUT, len(bodies),
                                 100 * number, 1000 * number, topic=topic, queue_id=queue_id)

        def put_async(self, topic, body, **arguments):
            self.singles.append(body)
            future = Future()
            future.set_result(PutResult(PutStatus.PUT_OK, queue_offset=len(self.singles), physical_offset=1000,
                                        topic=topic, queue_id=arguments["queue_id"]))
            return future

    fake = Answering()
    monkeypatch.setitem(vars(pyengine), "connect", lambda store, **settings: fake)
    return fake


def listed(path) -> list[tuple]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["topic"], row["queue_id"], row["queue_offset"], row["physical_offset"], row["body_sha256"]) for row in rows]


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def test_the_list_of_acknowledged_holds_only_confirmed_messages(tmp_path, answering, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_MESSAGES", 2)
    path, acked = tmp_path / "in.txt", tmp_path / "acked.jsonl"
    path.write_bytes(b"a\nb\nc\nd\ne\n")
    acked.write_text("")
    tally = produce(job([whole(path)], acked=str(acked)), lambda now: None)
    assert (tally.messages, tally.unconfirmed) == (5, 2)
    assert listed(acked) == [("t", 0, 100, 1000, digest(b"a")), ("t", 0, 101, None, digest(b"b")),
                             ("t", 0, 300, 3000, digest(b"e"))]


def test_each_json_line_is_listed_and_a_list_grows(tmp_path, answering):
    path, acked = tmp_path / "in.jsonl", tmp_path / "acked.jsonl"
    path.write_text('{"body": "a", "queue_id": 3}\n{"body": "b"}\n')
    for _ in range(2):
        produce(job([whole(path)], format="jsonl", acked=str(acked)), lambda now: None)
    assert [row[1:4] for row in listed(acked)] == [(3, 1, 1000), (0, 2, 1000), (3, 3, 1000), (0, 4, 1000)]


def test_messages_acknowledged_before_a_failure_are_listed(tmp_path, answering):
    path, acked = tmp_path / "in.jsonl", tmp_path / "acked.jsonl"
    path.write_text('{"body": "a"}\n{"body": "b"}\nno json\n')
    with pytest.raises(UsageError, match="line 3"):
        produce(job([whole(path)], format="jsonl", acked=str(acked)), lambda now: None)
    assert [row[4] for row in listed(acked)] == [digest(b"a"), digest(b"b")]


def test_a_list_that_cannot_be_written_is_refused_first(tmp_path, answering):
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\n")
    with pytest.raises(UsageError, match="list of acknowledged"):
        produce(job([whole(path)], acked=str(tmp_path)), lambda now: None)
    assert answering.batches == []
