"""Offsets of groups and queues, and messages by key and by id."""

from __future__ import annotations

import pytest

import pyengine
from fix_gateway import send_fields
from pyengine.formats.record import decode_record
from pyengine.gateway import codes
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
    answer = client.ask(codes.QUERY_MESSAGE, window | {"key": "no such key"})
    assert answer.code == codes.QUERY_NOT_FOUND and answer.fields["indexLastUpdatePhyoffset"] == "0"
    answer = client.ask(codes.VIEW_MESSAGE_BY_ID, {"offset": int(ids[0][16:], 16)})
    assert decode_record(answer.body, 0).body == b"a"
    for offset in (int(ids[0][16:], 16) + 1, 999_999_999, -5):
        assert client.ask(codes.VIEW_MESSAGE_BY_ID, {"offset": offset}).code == codes.SYSTEM_ERROR
