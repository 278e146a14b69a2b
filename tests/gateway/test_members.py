"""Heartbeats, lists of members, notices of change, and the locks of ordered queues."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fix_gateway import heartbeat, subscription
from pyengine.errors import UsageError
from pyengine.gateway import codes
from pyengine.gateway.members import LOCK_S, SUBSCRIPTIONS_MAX, Client, Group, Members, Subscription
from pyengine.gateway.wire import Frame, WireError, write_json


def members_of(client, group):
    answer = client.ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    return sorted(json.loads(answer.body)["consumerIdList"]) if answer.code == codes.SUCCESS else answer.code


def test_members_come_and_go_and_the_others_are_told(served):
    first, second = served.broker(), served.broker()
    heartbeat(first, "one", "crew", subscription("T"))
    assert members_of(first, "crew") == ["one"] and first.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    heartbeat(second, "two", "crew", subscription("T"))
    assert members_of(first, "crew") == ["one", "two"]
    assert first.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED).fields == {"consumerGroup": "crew"}
    second.close()
    first.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    assert members_of(first, "crew") == ["one"]
    third = served.broker()
    heartbeat(third, "three", "crew", subscription("T"))
    first.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    assert third.ask(codes.UNREGISTER_CLIENT, {"clientID": "three", "consumerGroup": "crew"}).code == codes.SUCCESS
    first.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    assert members_of(third, "crew") == ["one"]


def test_a_second_heartbeat_of_the_same_changes_nothing(served):
    client = served.broker()
    heartbeat(client, "one", "steady", subscription("T"))
    client.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    heartbeat(client, "one", "steady", subscription("T"))
    members_of(client, "steady")
    assert client.told == []
    heartbeat(client, "one", "steady", subscription("T"), subscription("U"))
    client.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)


def test_a_group_without_members_is_said_so(served):
    answer = served.broker().ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "nobody"})
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "no consumer for this group, nobody")


def mark(queue_id, topic="ordered"):
    return {"brokerName": "broker-a", "queueId": queue_id, "topic": topic}


def locked(client, who, *queues, group="orderly"):
    answer = client.ask(codes.LOCK_BATCH_MQ, body={"clientId": who, "consumerGroup": group, "mqSet": list(queues)})
    return [queue["queueId"] for queue in json.loads(answer.body)["lockOKMQSet"]]


def test_a_queue_is_locked_by_one_client_of_a_group(served):
    client = served.broker()
    assert locked(client, "a", mark(0), mark(1)) == [0, 1]
    assert locked(client, "b", mark(1), mark(2)) == [2]
    assert locked(client, "a", mark(0)) == [0], "a renewal"
    assert locked(client, "b", mark(1), group="others") == [1]
    client.ask(codes.UNLOCK_BATCH_MQ, body={"clientId": "b", "consumerGroup": "orderly", "mqSet": [mark(0)]})
    assert locked(client, "b", mark(0)) == [], "only its holder gives it back"
    client.ask(codes.UNLOCK_BATCH_MQ, body={"clientId": "a", "consumerGroup": "orderly", "mqSet": [mark(0)]})
    assert locked(client, "b", mark(0)) == [0]


class Asked:
    def __init__(self, body: object) -> None:
        self.frame = Frame(codes.LOCK_BATCH_MQ, {}, write_json(body))


def test_a_lock_that_is_not_renewed_ends():
    clock = [0.0]
    members = Members(None, clock_s=lambda: clock[0])

    def take(who):
        answer = members.lock(Asked({"clientId": who, "consumerGroup": "g", "mqSet": [mark(0)]}))
        return len(json.loads(answer.body)["lockOKMQSet"])

    assert (take("a"), take("b")) == (1, 0)
    clock[0] += LOCK_S + 1
    assert (take("b"), take("a")) == (1, 0)


HOSTILE = {
    "broken": b'{"clientID":',
    "a list": b"[]",
    "no client id": {"consumerDataSet": [], "producerDataSet": []},
    "a long client id": {"clientID": "x" * 1000},
    "a group with a path": {"clientID": "c", "consumerDataSet": [{"groupName": "../../etc"}]},
    "a group with an at": {"clientID": "c", "consumerDataSet": [{"groupName": "a@b"}]},
    "a group that is a number": {"clientID": "c", "producerDataSet": [{"groupName": 5}]},
    "a long group": {"clientID": "c", "consumerDataSet": [{"groupName": "g" * 200}]},
    "a topic with a line": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [subscription("a\nb")]}]},
    "a version that is a text": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [
        subscription("T", version="x")]}]},
    "many subscriptions": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [
        subscription(f"T{number}") for number in range(SUBSCRIPTIONS_MAX + 1)]}]},
    "a long subscription": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [
        subscription("T", "x" * 5000)]}]},
    "deep": b'{"clientID":"c","consumerDataSet":' + b"[" * 100_000,
    "too long": b'{"clientID":"c","x":"' + b"x" * (2 << 20) + b'"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_a_hostile_heartbeat_is_refused_and_leaves_nothing(served, body):
    client = served.broker()
    assert client.ask(codes.HEART_BEAT, body=body).code == codes.SYSTEM_ERROR
    assert members_of(client, "g") == codes.SYSTEM_ERROR


def test_what_no_queue_is_cannot_be_locked():
    members = Members(None)
    for queue in ({"brokerName": "b", "queueId": "0", "topic": "T"}, {"brokerName": 1, "queueId": 0, "topic": "T"},
                  {"brokerName": "b", "queueId": 0, "topic": "../x"}, 5):
        with pytest.raises(WireError):
            members.lock(Asked({"clientId": "c", "consumerGroup": "g", "mqSet": [queue]}))


def test_a_condition_is_checked_before_a_client_consumes_by_it(served):
    def check(kind, text):
        return served.broker().ask(codes.CHECK_CLIENT_CONFIG, body={
            "clientId": "c", "group": "g", "subscriptionData": subscription("T", text, kind=kind)}).code

    assert check("SQL92", "price > 5 AND region = 'eu'") == codes.SUCCESS
    assert check("SQL92", "price >") == check("SQL92", "(" * 4000) == check("SQL92", "a" * 9000) == codes.SUBSCRIPTION_PARSE_FAILED
    assert check("CLASS", "x") == codes.SYSTEM_ERROR
    assert check("TAG", "a || b") == codes.SUCCESS


def test_groups_that_are_known_do_not_grow_beyond_what_all_may_take(monkeypatch):
    monkeypatch.setattr("pyengine.gateway.members.SUBSCRIPTION_BYTES_MAX", 1000)
    quiet = SimpleNamespace(notify_consumer_ids_changed_enable=False)
    members, client = Members(SimpleNamespace(group=lambda name: quiet)), Client("c", "JAVA", 0, 0.0)

    def told(*topics):
        return Group("g", subscriptions={topic: Subscription(topic, "*", 1) for topic in topics})

    members._register("connection", told("A", "B", "C"), client)
    with pytest.raises(UsageError, match="bytes of subscriptions"):
        members._register("connection", told("A", "B", "C", "D"), client)
    members._register("connection", told("A", "B", "C"), client)
    members._register("connection", told("A"), client)
    members._register("connection", told("A", "D"), client)
    assert list(members.consumers["g"].subscriptions) == ["A", "D"]


def test_a_producer_is_found_by_its_id_until_it_leaves_its_last_group():
    members = Members(None)
    one, other = object(), object()
    for connection, name, client_id in ((one, "a", "me"), (one, "b", "me"), (other, "a", "you")):
        members._register_producer(connection, name, Client(client_id, "JAVA", 0, 0.0))
    members._leave_producers(one, "a")
    assert (members.producer("me"), members.producer("you")) == (one, other)
    members._register_producer(one, "b", Client("renamed", "JAVA", 0, 0.0))
    assert (members.producer("me"), members.producer("renamed")) == (None, one)
    members._register_producer(other, "a", Client("renamed", "JAVA", 0, 0.0))
    members.closed(one)
    assert members.producer("renamed") is other, "the one that came later"
    members.closed(other)
    assert members._connection_of == {} and members._id_counts == {}
