"""Offsets of groups and queues, and messages by key and by id."""

from __future__ import annotations

import asyncio
import errno
import threading
from functools import partial
from types import SimpleNamespace

import pytest

import pyengine
from fix_gateway import send_fields
from pyengine.errors import DiskError
from pyengine.formats.record import decode_record
from pyengine.gateway import codes
from pyengine.gateway.connections import Connection, Connections, Limits, Request, RequestRefusedError, TurnExecutor
from pyengine.gateway.positions import GroupOffsets, Positions
from pyengine.gateway.wire import Frame
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually


@pytest.fixture
def filled(served, topic):
    """The topic with three messages in queue 1: (client, their ids)."""
    client = served.broker()
    ids = [client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"KEYS\x01{topic}-{body}\x02UNIQ_KEY\x01U{topic[-20:]}{body}"),
                      body.encode()).fields["msgId"] for body in "abc"]
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 2, timeout_s=30, level="committed")
    return client, ids


def of(topic, queue_id=1, **more):
    return {"topic": topic, "queueId": queue_id, **more}


def test_the_ends_of_a_queue(filled, topic):
    client, _ = filled
    assert client.ask(codes.GET_MAX_OFFSET, of(topic)).fields == {"offset": "3"}
    assert client.ask(codes.GET_MIN_OFFSET, of(topic)).fields == {"offset": "0"}
    assert client.ask(codes.GET_MAX_OFFSET, of("gone")).fields == {"offset": "0"}
    assert client.ask(codes.GET_EARLIEST_MSG_STORETIME, of("gone")).fields == {"timestamp": "-1"}
    assert int(client.ask(codes.GET_EARLIEST_MSG_STORETIME, of(topic)).fields["timestamp"]) > 1_700_000_000_000


def test_an_offset_by_time_is_the_nearest_message(filled, topic):
    client, _ = filled
    assert client.ask(codes.SEARCH_OFFSET_BY_TIMESTAMP, of(topic, timestamp=0)).fields == {"offset": "0"}
    assert client.ask(codes.SEARCH_OFFSET_BY_TIMESTAMP, of(topic, timestamp=9_999_999_999_999)).fields == {"offset": "2"}


def test_a_group_that_is_new_begins_at_a_young_queues_first_message(filled, topic):
    client, _ = filled
    assert client.ask(codes.QUERY_CONSUMER_OFFSET, of(topic, consumerGroup="new")).fields == {"offset": "0"}


def test_commits_are_known_at_once_and_written_in_time(served, filled, topic):
    client, _ = filled
    assert client.ask(codes.UPDATE_CONSUMER_OFFSET, of(topic, consumerGroup="readers", commitOffset=2)).code == codes.SUCCESS
    assert client.ask(codes.QUERY_CONSUMER_OFFSET, of(topic, consumerGroup="readers")).fields == {"offset": "2"}
    offsets = ConsumerOffsets(served.root)
    eventually(lambda: offsets.read(topic, "readers") == {1: 2}, "the offset is in consumerOffset.json")
    offsets.commit(topic, "readers", {1: 1})
    assert client.ask(codes.QUERY_CONSUMER_OFFSET, of(topic, consumerGroup="readers")).fields == {"offset": "1"}, "another's commit"


REFUSED = {
    "a group with a path": {"consumerGroup": "../x"}, "a group with an at": {"consumerGroup": "a@b"},
    "a long group": {"consumerGroup": "x" * 200}, "a topic with a line": {"topic": "a\nb"}, "no such topic": {"topic": "gone"},
    "no such queue": {"queueId": 4}, "a negative queue": {"queueId": -1}, "a negative offset": {"commitOffset": -1},
    "too large": {"commitOffset": 1 << 64}, "the transactions' group": {"consumerGroup": "CID_RMQ_SYS_TRANS"},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_an_offset_that_no_client_may_commit_is_refused(served, filled, topic, changes):
    client, _ = filled
    assert client.ask(codes.UPDATE_CONSUMER_OFFSET, of(topic, consumerGroup="refused", commitOffset=1) | changes).code != codes.SUCCESS
    assert ConsumerOffsets(served.root).table().notes == []


def test_messages_are_found_by_key_and_by_id(filled, topic):
    client, ids = filled
    window = {"topic": topic, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": 9_999_999_999_999}
    answer = client.ask(codes.QUERY_MESSAGE, window | {"key": f"{topic}-b", "_UNIQUE_KEY_QUERY": "false"})
    assert answer.code == codes.SUCCESS and decode_record(answer.body, 0).body == b"b"
    answer = client.ask(codes.QUERY_MESSAGE, window | {"key": f"U{topic[-20:]}c", "_UNIQUE_KEY_QUERY": "true"})
    assert decode_record(answer.body, 0).body == b"c"
    for none in (0, -1):
        assert client.ask(codes.QUERY_MESSAGE, window | {"key": f"{topic}-b", "maxNum": none}).code == codes.QUERY_NOT_FOUND
    answer = client.ask(codes.QUERY_MESSAGE, window | {"key": "no such key"})
    assert answer.code == codes.QUERY_NOT_FOUND and answer.fields["indexLastUpdatePhyoffset"] == "0"
    answer = client.ask(codes.VIEW_MESSAGE_BY_ID, {"offset": int(ids[0][16:], 16)})
    assert decode_record(answer.body, 0).body == b"a"
    for offset in (int(ids[0][16:], 16) + 1, 999_999_999, -5):
        assert client.ask(codes.VIEW_MESSAGE_BY_ID, {"offset": offset}).code == codes.SYSTEM_ERROR


@pytest.fixture
def in_file(tmp_path):
    """The same as `kept`, as another program reads and writes them."""
    return ConsumerOffsets(tmp_path)


@pytest.fixture
def kept(tmp_path):
    """The groups' offsets of an empty store."""
    (tmp_path / "config").mkdir()
    with TurnExecutor(4, "test") as executor:
        yield GroupOffsets(SimpleNamespace(root=tmp_path), executor)


def test_a_write_whose_caller_is_cancelled_ends_before_the_next_begins(kept, in_file, monkeypatch):
    began, may_go_on, update = threading.Event(), threading.Event(), ConsumerOffsets.update

    def slow(offsets, change):
        if not began.is_set():
            began.set()
            assert may_go_on.wait(60)
        return update(offsets, change)

    monkeypatch.setattr(ConsumerOffsets, "update", slow)

    async def whole():
        kept.commit("T", "G", 0, 1)
        kept.commit("T", "G", 1, 1)
        first = asyncio.create_task(kept.flush())
        await asyncio.get_running_loop().run_in_executor(None, began.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        kept.commit("T", "G", 0, 2)
        last = asyncio.create_task(kept.flush())
        await asyncio.sleep(0)
        assert kept.committed("T", "G", 0) == 2 and kept.committed("T", "G", 1) == 1
        may_go_on.set()
        await last

    asyncio.run(whole())
    assert in_file.read("T", "G") == {0: 2, 1: 1} and kept.all() == {"T@G": {0: 2, 1: 1}}


def test_the_loop_does_not_read_the_offsets_again_after_its_own_writes(kept, in_file, monkeypatch):
    """A file with all offsets that are possible takes nearly a second, in which no client is served."""
    read, table = [], ConsumerOffsets.table
    monkeypatch.setattr(ConsumerOffsets, "table", lambda offsets: (read.append(threading.current_thread()), table(offsets))[1])

    async def whole():
        for number in range(3):
            assert kept.commit("T", "G", number, 1)
            await kept.flush()
            assert kept.committed("T", "G", number) == 1 and kept.all() == {"T@G": dict.fromkeys(range(number + 1), 1)}
        await kept.rewrite(lambda table: table.update({"T@G": {0: 5}}), "G")
        assert kept.committed("T", "G", 0) == 5 and kept.committed("T", "G", 1) is None

    asyncio.run(whole())
    assert read.count(threading.current_thread()) == 1, "only before the first write"
    in_file.commit("T", "G", {0: 6})
    assert kept.committed("T", "G", 0) == 6, "another program's write"


def test_offsets_that_could_not_be_written_wait_whatever_it_was(kept, in_file, monkeypatch):
    def fails(offsets, change):
        raise MemoryError

    async def whole():
        kept.commit("T", "G", 0, 1)
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(ConsumerOffsets, "update", fails)
            await kept.flush()
        await kept.flush()

    asyncio.run(whole())
    assert in_file.read("T", "G") == {0: 1}


def test_a_file_that_cannot_be_read_now_is_not_taken_for_an_empty_one(kept, in_file, monkeypatch):
    in_file.commit("T", "G", {0: 7})

    def fails(path):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.consumer_offset.read_small_file", fails)
        with pytest.raises(DiskError, match="Too many open files"):
            kept.committed("T", "G", 0)
    assert kept.committed("T", "G", 0) == 7


@pytest.mark.parametrize("topic", ["T", None], ids=["reset", "delete"])
def test_a_flush_under_way_does_not_restore_offsets_that_are_reset_or_deleted(kept, in_file, topic):
    """A flush takes what waits before the change has the file, and writes it after."""
    def change(table):
        changing.set()
        assert going.wait(30)
        table["T@G"] = {0: 5}
        if topic is None:
            del table["T@G"]

    changing, going = threading.Event(), threading.Event()

    async def race():
        kept.commit("T", "G", 0, 100)
        rewriting = asyncio.create_task(kept.rewrite(change, "G", topic))
        await asyncio.get_running_loop().run_in_executor(None, changing.wait, 30)
        flushing = asyncio.create_task(kept.flush())
        await asyncio.sleep(0)
        going.set()
        await asyncio.gather(rewriting, flushing)

    asyncio.run(race())
    expected = 5 if topic else None
    assert (kept.committed("T", "G", 0), in_file.read("T", "G").get(0)) == (expected, expected)


def test_a_change_of_some_queues_leaves_what_waits_of_the_others(kept, in_file):
    for queue_id in (0, 1):
        assert kept.commit("T", "G", queue_id, 100)
    asyncio.run(kept.rewrite(lambda table: table.update({"T@G": {0: 5}}), "G", "T", {0}))
    assert [kept.committed("T", "G", queue_id) for queue_id in (0, 1)] == [5, 100]
    asyncio.run(kept.flush())
    assert in_file.read("T", "G") == {0: 5, 1: 100}


def test_clients_make_no_more_offsets_than_the_file_may_have(kept, in_file, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.positions.OFFSETS_MAX", 4)
    in_file.commit("T", "G", {0: 1, 1: 1})
    assert [kept.commit("T", "H", queue_id, 5) for queue_id in (0, 1, 2)] == [True, True, False]
    assert kept.commit("T", "G", 0, 2) and kept.commit("T", "H", 0, 6), "what is there goes on"
    asyncio.run(kept.flush())
    assert in_file.groups() == {("T", "G"): {0: 2, 1: 1}, ("T", "H"): {0: 6, 1: 5}}
    assert kept.commit("T", "H", 1, 7) and not kept.commit("T", "H", 2, 1)
    asyncio.run(kept.rewrite(lambda table: table.pop("T@G"), "G"))
    assert kept.commit("T", "H", 2, 1)


def test_the_right_to_a_message_is_checked_in_the_loops_thread():
    """What a refusal counts for the log belongs to that thread."""
    required = []
    current = threading.current_thread
    request = SimpleNamespace(integer=lambda name, bits: 7, require=lambda topic, right: required.append((topic, current())))
    reader = SimpleNamespace(message_at=lambda offset, level: SimpleNamespace(topic=current().name))

    async def whole(executor):
        positions = Positions(reader, None, None, executor)
        positions.record = lambda message: b"bytes"
        assert (await positions.handlers[codes.VIEW_MESSAGE_BY_ID](request)).body == b"bytes"

    with TurnExecutor(1, "reading") as executor:
        asyncio.run(whole(executor))
    assert required == [("reading_0", current())]


def test_a_query_ends_where_its_answer_is_long_with_its_client_and_after_its_time(served, filled, topic, monkeypatch):
    client = served.broker()
    for body in (b"one", b"two"):
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, "KEYS\x01long_answer"), body)
    fields = {"topic": topic, "key": "long_answer", "maxNum": "10", "beginTimestamp": "0", "endTimestamp": "9999999999999"}

    with pyengine.open_store(served.root) as reader, TurnExecutor(1, "test") as executor:
        eventually(lambda: len(reader.query_message(topic, "long_answer", level="committed")) == 2, "both are in the index")
        monkeypatch.setattr("pyengine.gateway.positions.QUERY_BYTES", 1)
        read = []
        message_below = reader._message_below
        monkeypatch.setattr(reader, "_message_below", lambda offset, limit: read.append(offset) or message_below(offset, limit))
        connection = Connection(Connections(Limits(), lambda host, text: None), {})
        connection.is_closed = False
        request = Request(connection, Frame(codes.QUERY_MESSAGE, fields, b"", 1), 0)
        query = partial(Positions(reader, None, None, executor).query_message, request)
        answer = query()
        with monkeypatch.context() as patch, pytest.raises(RequestRefusedError, match="more has the hash of this key than can be read"):
            patch.setattr("pyengine.gateway.positions.QUERY_S", 0.0)
            query()
        connection.is_closed = True
        with pytest.raises(RequestRefusedError, match="the client has gone"):
            query()
    message = decode_record(answer.body, 0)
    assert (message.size_bytes, message.body) == (len(answer.body), b"two")
    assert len(read) == 1, "what is too much is not read"
