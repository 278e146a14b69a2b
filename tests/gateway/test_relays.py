"""What tools ask of members through the gateway, and what it answers for those that are not there."""

from __future__ import annotations

import json

import pyengine
from fix_gateway import heartbeat, send_fields, subscription
from pyengine.gateway import codes
from pyengine.gateway.relays import _queue_table
from pyengine.gateway.wire import ANSWER, JSON_FORM, Frame, encode_frame
from pyengine.storage.consumer_offset import ConsumerOffsets


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


def test_a_member_that_is_not_there_or_goes_is_told_to_the_tool(served):
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
    assert _queue_table(b'{"consumerTable":{},"messageQueueTable":{{"topic":"}\\"{"}:1}}') == b'{{"topic":"}\\"{"}:1}'
    for bad in (b"", b"{}", b'{"messageQueueTable":', b'{"messageQueueTable":{{"a":1}', b'{"messageQueueTable":null}', b"\xff" * 9):
        assert _queue_table(bad) == b""
    endless = b'{"messageQueueTable":{"' + b'\\"' * 500_000
    assert _queue_table(endless) == b"", "in time that follows its length: hours otherwise, in which no client is served"
