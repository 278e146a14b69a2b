"""Heartbeats, lists of members, notices of change, locks of ordered queues, and what tools ask of members."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

import pyengine
from fix_gateway import LocalClient, heartbeat, send_fields, subscription
from pyengine.gateway import codes, members
from pyengine.gateway.connections import TurnExecutor
from pyengine.gateway.members import LOCK_S, SUBSCRIPTIONS_MAX, Members, queue_table
from pyengine.gateway.wire import ANSWER, JSON_BYTES_MAX, JSON_FORM, Frame, WireError, encode_frame, write_json
from pyengine.storage import durable_file
from pyengine.storage.config_table import TopicConfig
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

QUIET = SimpleNamespace(notify_consumer_ids_changed_enable=False)  # a group whose members are told of no change


class Connected:
    """One end of a connection, and the requests that come by it."""

    is_closed, is_local, address = False, False, "127.0.0.1:5"

    def __init__(self):
        self.reported = []
        self.told = []  # of changes of these groups

    def report(self, sentence):
        self.reported.append(sentence)

    def invoke_oneway(self, code, fields):
        assert code == codes.NOTIFY_CONSUMER_IDS_CHANGED
        self.told.append(fields["consumerGroup"])

    def asks(self, code, fields=(), body=b""):
        return SimpleNamespace(connection=self, frame=Frame(code, dict(fields), body))

    def beat(self, members, client_id, *, producers=(), consumers=()):
        sent = {"clientID": client_id, "producerDataSet": [{"groupName": name} for name in producers], "consumerDataSet": consumers}
        return asyncio.run(members.heart_beat(self.asks(codes.HEART_BEAT, body=json.dumps(sent).encode())))


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


def test_clients_of_a_worker_are_told_of_no_change_of_their_group(served):
    """RocketMQ 5's take no part in the choice of queues: of N that come each would be told N times."""
    with LocalClient(served.root, "10.0.0.7:1") as first, LocalClient(served.root, "10.0.0.7:2") as second:
        heartbeat(first, "one", "local", subscription("T"))
        heartbeat(second, "two", "local", subscription("T"), subscription("U"))
        assert members_of(first, "local") == ["one", "two"] and not first.told


def test_clients_of_a_worker_take_no_share_of_the_queues_from_those_that_pull(served, topic):
    """They pop from any queue, so pops of a group that pulls are refused: what was left to one of them would have no reader."""
    puller, group = served.broker(), f"G_{topic}"
    asked = {"topic": topic, "consumerGroup": group, "clientId": "puller", "strategyName": "AVG", "messageModel": "CLUSTERING"}
    with LocalClient(served.root, "10.0.0.7:1") as popping:
        heartbeat(popping, "popping", group, subscription(topic))
        assert members_of(puller, group) == ["popping"]
        heartbeat(puller, "puller", group, subscription(topic))
        assert members_of(puller, group) == ["puller"]
        rows = json.loads(puller.ask(codes.QUERY_ASSIGNMENT, body=asked).body)["messageQueueAssignments"]
        assert [row["messageQueue"]["queueId"] for row in rows] == [0, 1, 2, 3]
        listed = json.loads(puller.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}).body)["connectionSet"]
        assert sorted(each["clientId"] for each in listed) == ["popping", "puller"]


def test_a_second_heartbeat_of_the_same_changes_nothing(served):
    client = served.broker()
    heartbeat(client, "one", "steady", subscription("T"))
    client.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)
    heartbeat(client, "one", "steady", subscription("T"))
    members_of(client, "steady")
    assert client.told == []
    heartbeat(client, "one", "steady", subscription("T"), subscription("U"))
    client.wait_told(codes.NOTIFY_CONSUMER_IDS_CHANGED)


def test_a_consumer_list_request_for_a_group_without_members_is_an_error(served):
    answer = served.broker().ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "nobody"})
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "no consumer for this group, nobody")


def mark(queue_id, topic="ordered"):
    return {"brokerName": "broker-a", "queueId": queue_id, "topic": topic}


def locked(client, who, *queues, group="orderly"):
    answer = client.ask(codes.LOCK_BATCH_MQ, body={"clientId": who, "consumerGroup": group, "mqSet": list(queues)})
    return [queue["queueId"] for queue in json.loads(answer.body)["lockOKMQSet"]]


def test_a_queue_is_locked_by_one_client_of_a_group(served):
    client = served.broker()
    client.ask(codes.SEND_MESSAGE_V2, send_fields("ordered"), b"its first message makes it")
    assert locked(client, "a", mark(0), mark(1)) == [0, 1]
    assert locked(client, "b", mark(1), mark(2)) == [2]
    assert locked(client, "a", mark(0)) == [0], "a renewal"
    assert locked(client, "b", mark(1), group="others") == [1]
    client.ask(codes.UNLOCK_BATCH_MQ, body={"clientId": "b", "consumerGroup": "orderly", "mqSet": [mark(0)]})
    assert locked(client, "b", mark(0)) == [], "only its holder gives it back"
    client.ask(codes.UNLOCK_BATCH_MQ, body={"clientId": "a", "consumerGroup": "orderly", "mqSet": [mark(0)]})
    assert locked(client, "b", mark(0)) == [0]


def test_a_queue_that_does_not_exist_is_not_locked(served, topic):
    """A client could invent as many as there may be locks, and nobody else would get one."""
    assert locked(served.broker(), "a", *(mark(queue_id, name) for name in ("gone", topic) for queue_id in (-1, 0, 3, 4))) == [0, 3]


class Asked:
    def __init__(self, body: object) -> None:
        self.frame = Frame(codes.LOCK_BATCH_MQ, {}, write_json(body))


def test_a_lock_that_is_not_renewed_ends():
    clock = [0.0]
    names = SimpleNamespace(recent_topic=TopicConfig)
    members = Members(names, None, clock_s=lambda: clock[0])

    def take(who):
        answer = members.lock(Asked({"clientId": who, "consumerGroup": "g", "mqSet": [mark(0)]}))
        return len(json.loads(answer.body)["lockOKMQSet"])

    assert (take("a"), take("b")) == (1, 0)
    clock[0] += LOCK_S + 1
    assert (take("b"), take("a")) == (1, 0)


def test_a_pause_of_the_gateway_is_no_silence_of_its_clients(monkeypatch):
    now_s, connection = [0.0], Connected()
    monkeypatch.setattr(durable_file, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    members = Members(None, None)
    connection.beat(members, "me", producers=["g"])

    def expire_after(seconds):
        now_s[0] += seconds
        members.expire()
        return members.producer("me")

    assert expire_after(5) is expire_after(10_000) is connection
    assert [expire_after(10) for _ in range(11)] == 10 * [connection] + [None]


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
    "a version that is no number": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [
        subscription("T", version="x")]}]},
    "a version that is an empty text": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [
        subscription("T", version="")]}]},
    "a start that is no number of one": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "consumeFromWhere": 6}]},
    "a type that is a truth": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "consumeType": True}]},
    "a model below the first": {"clientID": "c", "consumerDataSet": [{"groupName": "g", "messageModel": -1}]},
    "deep": b'{"clientID":"c","consumerDataSet":' + b"[" * 100_000,
    "too long": b'{"clientID":"c","x":"' + b"x" * JSON_BYTES_MAX + b'"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=[name.replace(" ", "-") for name in HOSTILE])
def test_a_hostile_heartbeat_is_refused_and_leaves_nothing(served, body):
    client = served.broker()
    assert client.ask(codes.HEART_BEAT, body=body).code == codes.SYSTEM_ERROR
    assert members_of(client, "g") == codes.SYSTEM_ERROR


def test_a_group_has_as_many_topics_and_tags_as_its_client_says(served):
    client = served.broker()
    tags = "||".join(f"{number:025}" for number in range(200))
    wanted = [subscription(f"T{number}", tags if number < 10 else "*") for number in range(1000)]
    assert heartbeat(client, "me", "wide", *wanted).code == codes.SUCCESS
    found = json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "wide"}).body)["subscriptionTable"]
    assert len(found) == 1000 and len(found["T9"]["tagsSet"]) == 200


def test_a_subscription_beyond_the_limit_leaves_out_nothing_else_and_is_in_the_log(served):
    client, text = served.broker(), "x" * 70_000
    answer = heartbeat(client, "me", "partly", subscription("T"), subscription("toolong", text), subscription("U"))
    assert answer.code == codes.SUCCESS, "otherwise RocketMQ's client would take this for a broker without SQL92"
    assert answer.remark.startswith("toolong: a subscription of more than 65536 characters")
    found = json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "partly"}).body)
    assert sorted(found["subscriptionTable"]) == ["T", "U"]
    eventually(lambda: "counts only in part, or not at all: toolong: " in served.engine.log(), "the log says so")


def test_topics_and_kinds_that_are_too_many_are_left_out_alone(served):
    client = served.broker()
    answer = heartbeat(client, "me", "most", *(subscription(f"T{number}") for number in range(SUBSCRIPTIONS_MAX + 1)))
    assert (answer.code, answer.remark) == (codes.SUCCESS, "4097 topics of most: at most 4096 are taken")
    others = subscription("K", kind="k" * 60_000), subscription("S", "a = 1", kind="SQL92")
    answer = heartbeat(client, "me", "kinds", subscription("T"), *others)
    assert (answer.code, answer.remark) == (codes.SUCCESS, "K: a subscription that is neither TAG nor SQL92")

    def topics(group):
        return json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}).body)["subscriptionTable"]

    assert len(topics("most")) == SUBSCRIPTIONS_MAX and sorted(topics("kinds")) == ["S", "T"]


def test_a_client_without_any_of_its_groups_is_told_by_an_error(monkeypatch):
    monkeypatch.setattr("pyengine.gateway.members.GROUPS_MAX", 0)
    answer = Connected().beat(Members(None, None), "c", producers=["p"])
    assert answer.code == codes.SYSTEM_ERROR and "are connected already" in answer.remark


def test_a_heartbeat_whose_texts_are_not_utf8_registers_its_client(served):
    client, gbk = served.broker(), "\u8ba2\u5355".encode("gbk")
    wanted = json.dumps(subscription("TB", "@@")).encode().replace(b"@@", gbk)
    body = b'{"clientID":"%s","producerDataSet":[],"consumerDataSet":[{"groupName":"gbkers","subscriptionDataSet":[%s]}]}'
    assert client.ask(codes.HEART_BEAT, body=body % (b"me" + gbk, wanted)).code == codes.SUCCESS
    broken = gbk.decode("utf-8", "replace")
    assert members_of(client, "gbkers") == [f"me{broken}"]
    found = json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "gbkers"}).body)
    assert found["subscriptionTable"]["TB"]["tagsSet"] == [broken]
    refused = client.ask(codes.HEART_BEAT, body=(body % (b"me", wanted)).replace(b"gbkers", gbk))
    assert refused.code == codes.SYSTEM_ERROR and "illegal characters" in refused.remark


STARTS = ["CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST", "CONSUME_FROM_MIN_OFFSET",
          "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP"]


@pytest.mark.parametrize("place", range(6))
def test_numbers_as_text_and_places_of_enums_are_taken_as_by_fastjson(served, topic, place):
    """So RocketMQ's client for C++ writes a heartbeat; other clients and tools see the names."""
    client, group, types, models = served.broker(), f"cpp{place}", ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY"), ("BROADCASTING", "CLUSTERING")
    body = {"clientID": "c", "producerDataSet": [{"groupName": group}], "consumerDataSet": [{
        "groupName": group, "consumeFromWhere": place, "consumeType": place % 2, "messageModel": place % 2,
        "subscriptionDataSet": [{"subString": "*", "subVersion": "1796088589546", "topic": topic}]}]}
    assert client.ask(codes.HEART_BEAT, body=body).code == codes.SUCCESS
    found = json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}).body)
    assert (found["consumeFromWhere"], found["consumeType"], found["messageModel"]) == (STARTS[place], types[place % 2], models[place % 2])
    assert found["subscriptionTable"][topic]["subVersion"] == 1796088589546
    assert client.ask(codes.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": group}).code == codes.SUCCESS
    assert locked(client, "c", mark("2", topic), group=group) == [2]


def test_a_lock_request_with_a_malformed_queue_is_refused():
    members = Members(None, None)
    for queue in ({"brokerName": "b", "queueId": "x", "topic": "T"}, {"brokerName": "b", "queueId": "", "topic": "T"},
                  {"brokerName": 1, "queueId": 0, "topic": "T"}, {"brokerName": "b", "queueId": 0, "topic": "../x"}, 5):
        with pytest.raises(WireError):
            members.lock(Asked({"clientId": "c", "consumerGroup": "g", "mqSet": [queue]}))


def test_a_condition_is_checked_before_a_client_consumes_by_it(served):
    def check(kind, text):
        return served.broker().ask(codes.CHECK_CLIENT_CONFIG, body={
            "clientId": "c", "group": "g", "subscriptionData": subscription("T", text, kind=kind)}).code

    assert check("SQL92", "price > 5 AND region = 'eu'") == codes.SUCCESS
    assert check("SQL92", "region = 'eu' price > 5") == check("SQL92", "price > 5 )") == codes.SUCCESS, "RocketMQ ignores the rest"
    assert check("SQL92", "region = 'eu' AND price > 5;") == codes.SUBSCRIPTION_PARSE_FAILED, "no token begins with this"
    assert check("SQL92", "price >") == check("SQL92", "(" * 4000) == check("SQL92", "a" * 70_000) == codes.SUBSCRIPTION_PARSE_FAILED
    assert check("SQL92", "region IN ({})".format(",".join(f"'{number:030}'" for number in range(1000)))) == codes.SUCCESS
    assert check("CLASS", "x") == codes.SYSTEM_ERROR
    assert check("TAG", "a || b") == codes.SUCCESS


def test_a_condition_is_checked_in_another_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(members, "parse_condition", lambda text, **rest: threads.append(threading.current_thread()))
    body = json.dumps({"subscriptionData": subscription("T", "a > 1", kind="SQL92")}).encode()

    async def answer(executor):
        return await Members(None, executor).handlers[codes.CHECK_CLIENT_CONFIG](Connected().asks(codes.CHECK_CLIENT_CONFIG, body=body))

    with TurnExecutor(1, "test") as executor:
        assert asyncio.run(answer(executor)).code == codes.SUCCESS
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_groups_that_are_known_do_not_grow_beyond_what_all_may_take(monkeypatch):
    monkeypatch.setattr("pyengine.gateway.members.SUBSCRIPTION_BYTES_MAX", 1000)
    async def no_new_group(name):
        return None

    members = Members(SimpleNamespace(group=lambda name: QUIET, group_or_new=no_new_group), None)
    connection = Connected()

    def tell(*topics):
        one = {"groupName": "g", "subscriptionDataSet": [subscription(topic) for topic in topics]}
        return connection.beat(members, "c", consumers=[one], producers=["p"])

    tell("A", "B", "C")
    assert "bytes of subscriptions" in tell("A", "B", "C", "D").remark and len(connection.reported) == 1
    tell("A", "B", "C")
    tell("A")
    tell("A", "D")
    assert list(members.consumers["g"].subscriptions) == ["A", "D"] and len(connection.reported) == 1
    assert members.producer("c") is connection, "what exceeds nothing is taken"


def test_a_heartbeat_of_a_connected_group_is_taken_within_its_client_s_turn():
    """What a task does counts for no client: many long heartbeats of one would hold up all others."""
    async def no_new_group(name):
        return None

    members, connection = Members(SimpleNamespace(group=lambda name: QUIET, group_or_new=no_new_group), None), Connected()
    group = {"groupName": "g", "subscriptionDataSet": [subscription("A")]}
    connection.beat(members, "c", consumers=[group])
    group["subscriptionDataSet"] = [subscription("B")]
    sent = {"clientID": "c", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [group]}
    coming = members.heart_beat(connection.asks(codes.HEART_BEAT, body=json.dumps(sent).encode()))
    assert list(members.consumers["g"].subscriptions) == ["B"] and members.producer("c") is connection
    assert asyncio.run(coming).code == codes.SUCCESS


def test_many_that_join_a_group_at_once_are_one_change_for_each_member():
    async def no_new_group(name):
        return None

    async def join_all(members):
        for number, connection in enumerate(connections):
            sent = {"clientID": f"c{number}", "consumerDataSet": [{"groupName": name} for name in ("g", "h")]}
            await members.heart_beat(connection.asks(codes.HEART_BEAT, body=json.dumps(sent).encode()))
        async with asyncio.timeout(scaled_timeout_s(30)):
            while not all(len(each.told) >= 2 for each in connections):
                await asyncio.sleep(0)

    connections = [Connected() for _ in range(20)]
    asyncio.run(join_all(Members(SimpleNamespace(group=lambda name: None, group_or_new=no_new_group), None)))
    assert [sorted(each.told) for each in connections] == 20 * [["g", "h"]]


def test_a_producer_is_found_by_its_id_until_it_leaves_its_last_group():
    members = Members(None, None)
    one, other = Connected(), Connected()
    for connection, name, client_id in ((one, "a", "me"), (one, "b", "me"), (other, "a", "you")):
        connection.beat(members, client_id, producers=[name])
    members.unregister(one.asks(codes.UNREGISTER_CLIENT, {"producerGroup": "a"}))
    assert (members.producer("me"), members.producer("you")) == (one, other)
    one.beat(members, "renamed", producers=["b"])
    assert (members.producer("me"), members.producer("renamed")) == (None, one)
    other.beat(members, "renamed", producers=["a"])
    members.closed(one)
    assert members.producer("renamed") is other, "the one that came later"
    members.closed(other)
    assert members.producer("renamed") is None


# ---- requests that members answer --------------------------------------------------------------


def test_a_connected_group_is_set_back_and_told_so(served, topic):
    client = served.broker()
    client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"x")
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
    fields = {"topic": topic, "group": "backwards", "timestamp": 0, "isForce": "true"}
    assert client.ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == codes.SYSTEM_ERROR, "there is no such group"
    heartbeat(client, "me", "backwards", subscription(topic))
    client.ask(codes.UPDATE_CONSUMER_OFFSET, {"topic": topic, "queueId": 1, "consumerGroup": "backwards", "commitOffset": 1})
    answer = served.broker().ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    assert answer.code == codes.SUCCESS and b'"queueId":1,"topic":"' + topic.encode() + b'"}:0' in answer.body
    told = client.wait_told(codes.RESET_CONSUMER_CLIENT_OFFSET)
    assert (told.body, told.fields["group"], told.is_one_way) == (answer.body, "backwards", True)
    committed = client.ask(codes.QUERY_CONSUMER_OFFSET, {"topic": topic, "queueId": 1, "consumerGroup": "backwards"})
    assert committed.fields == {"offset": "0"}
    refused = fields | {"group": "CID_RMQ_SYS_TRANS"}
    assert client.ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, refused).code == codes.NO_PERMISSION
    for_c = served.broker().ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields, language="CPP")
    assert for_c.body == answer.body
    told = json.loads(client.wait_told(codes.RESET_CONSUMER_CLIENT_OFFSET).body)
    assert told["offsetTable"][1] == {"brokerName": "broker-a", "offset": 0, "queueId": 1, "topic": topic}


def test_a_tool_sets_back_the_queue_that_it_names_to_its_offset(served, topic):
    """As RocketMQ 5's resetOffsetByQueue: a time beside it, and no `isForce`, count for nothing."""
    client = served.broker()
    heartbeat(client, "me", "onequeue", subscription(topic))
    for queue_id in (0, 0, 0, 1):
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, queue_id), b"x")
    with pyengine.open_store(served.root) as store:
        assert all(store.wait_for_message(topic, *at, timeout_s=30, level="committed") for at in ((0, 2), (1, 0)))
    for queue_id, offset in ((0, 1), (1, 1)):
        client.ask(codes.UPDATE_CONSUMER_OFFSET, {"topic": topic, "queueId": queue_id, "consumerGroup": "onequeue", "commitOffset": offset})

    def set_back(queue_id, offset):
        return served.broker().ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, {
            "topic": topic, "group": "onequeue", "timestamp": 0, "queueId": queue_id, "offset": offset, "isForce": "false"})

    def committed():
        asked = {"topic": topic, "consumerGroup": "onequeue"}
        return [client.ask(codes.QUERY_CONSUMER_OFFSET, asked | {"queueId": queue_id}).fields["offset"] for queue_id in (0, 1)]

    answer = set_back(0, 2)
    assert answer.code == codes.SUCCESS and answer.body.count(b'"queueId"') == 1 and answer.body.endswith(b"}:2}}")
    assert client.wait_told(codes.RESET_CONSUMER_CLIENT_OFFSET).body == answer.body
    assert committed() == ["2", "1"]
    assert set_back(0, 9).code == set_back(99, 0).code == codes.SYSTEM_ERROR
    assert set_back(0, -1).code == codes.SUCCESS and committed() == ["0", "1"], "to the time, then"


def test_a_group_that_is_not_connected_is_left_to_the_tool(served, topic):
    ConsumerOffsets(served.root).commit(topic, "away", {1: 1})
    fields = {"topic": topic, "group": "away", "timestamp": 0, "isForce": "true"}
    assert served.broker().ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == codes.CONSUMER_NOT_ONLINE
    assert served.broker().ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields | {"topic": "gone"}).code == codes.SYSTEM_ERROR


def reply(client, asked, body=b"", code=codes.SUCCESS, **more):
    client.socket.sendall(encode_frame(Frame(code, {"own": "field"}, body, asked.opaque, ANSWER, "its remark", **more)))


def test_a_members_answer_is_handed_on(served):
    member, tool = served.broker(), served.broker()
    heartbeat(member, "me", "relayed", subscription("T"))
    fields = {"consumerGroup": "relayed", "clientId": "me", "jstackEnable": "true"}
    asked = tool.send(codes.GET_CONSUMER_RUNNING_INFO, fields, b"not handed on: it would fill the other's connection")
    told = member.wait_told(codes.GET_CONSUMER_RUNNING_INFO)
    assert told.fields.items() >= {"jstackEnable": "true", "clientId": "me"}.items()
    assert told.body == b""
    reply(member, told, b"{all about me}")
    answer = tool.wait(asked)
    assert (answer.code, answer.body, answer.remark, answer.fields) == (codes.SUCCESS, b"{all about me}", "its remark", {"own": "field"})
    asked = tool.send(codes.GET_CONSUMER_RUNNING_INFO, fields)
    reply(member, member.wait_told(codes.GET_CONSUMER_RUNNING_INFO), code=70_000, form=JSON_FORM)
    assert tool.wait(asked).code == codes.SYSTEM_ERROR, "no code of two bytes: the tool would get no answer"


def test_a_member_consumes_one_message_now(served, topic):
    member, tool = served.broker(), served.broker()
    sent = tool.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"this one").fields
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
    heartbeat(member, "me", "direct", subscription(topic))
    fields = {"consumerGroup": "direct", "clientId": "me", "msgId": sent["msgId"]}
    asked = tool.send(codes.CONSUME_MESSAGE_DIRECTLY, fields)
    told = member.wait_told(codes.CONSUME_MESSAGE_DIRECTLY)
    assert b"this one" in told.body and told.fields["brokerName"] == "broker-a"
    reply(member, told, b"CR_SUCCESS")
    assert tool.wait(asked).body == b"CR_SUCCESS"
    for bad in ("no id", sent["msgId"][:16] + "0" * 14 + "01"):
        assert tool.ask(codes.CONSUME_MESSAGE_DIRECTLY, fields | {"msgId": bad}).code == codes.SYSTEM_ERROR


def test_a_tool_that_asks_an_absent_or_leaving_member_gets_an_error(served):
    member, tool = served.broker(), served.broker()
    heartbeat(member, "me", "leaving", subscription("T"))
    fields = {"consumerGroup": "leaving", "clientId": "you"}
    answer = tool.ask(codes.GET_CONSUMER_RUNNING_INFO, fields)
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "The Consumer <leaving> <you> not online")
    asked = tool.send(codes.GET_CONSUMER_RUNNING_INFO, fields | {"clientId": "me"})
    member.wait_told(codes.GET_CONSUMER_RUNNING_INFO)
    member.close()
    assert tool.wait(asked).code == codes.SYSTEM_ERROR


def test_each_member_says_how_far_it_is(served):
    one, other, tool = served.broker(), served.broker(), served.broker()
    heartbeat(one, "one", "asked", subscription("T"))
    heartbeat(other, "other", "asked", subscription("T"))
    asked = tool.send(codes.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "T", "group": "asked"})
    table = b'{{"brokerName":"broker-a","queueId":0,"topic":"T"}:5}'
    reply(one, one.wait_told(codes.GET_CONSUMER_STATUS_FROM_CLIENT), b'{"messageQueueTable":' + table + b"}")
    reply(other, other.wait_told(codes.GET_CONSUMER_STATUS_FROM_CLIENT), b"", codes.SYSTEM_ERROR)
    assert tool.wait(asked).body == b'{"consumerTable":{"one":' + table + b'},"messageQueueTable":{}}'
    answer = tool.ask(codes.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "T", "group": "gone"})
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "No Any Consumer online in the consumer group: [gone]")


def test_the_table_in_a_members_answer_is_found_or_left_out():
    assert queue_table(b'{"consumerTable":{},"messageQueueTable":{{"topic":"}\\"{"}:1}}') == b'{{"topic":"}\\"{"}:1}'
    for bad in (b"", b"{}", b'{"messageQueueTable":', b'{"messageQueueTable":{{"a":1}', b'{"messageQueueTable":null}', b"\xff" * 9):
        assert queue_table(bad) == b""
    endless = b'{"messageQueueTable":{"' + b'\\"' * 500_000
    assert queue_table(endless) == b"", "in time that follows its length: hours otherwise, in which no client is served"
