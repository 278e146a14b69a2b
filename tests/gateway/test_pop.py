"""POP: messages taken from any queue, acknowledged in any order, delivered again, and given up."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pyengine
from fix_cli import run
from fix_gateway import LocalClient, heartbeat, pull_fields, send_fields, start_served, subscription
from fix_pop import Popped, ack, pop, pop_fields, popped
from pyengine.errors import StoreBusyError, UsageError
from pyengine.formats.record import Message
from pyengine.formats.sql_filter import SqlFilter
from pyengine.gateway import codes, members
from pyengine.gateway.connections import Answer, Request, RequestRefusedError, TurnExecutor, refuse_if
from pyengine.gateway.pop import ACKED_MAX, EXPIRED, POP_BYTES, Pops
from pyengine.gateway.pop_shares import IN_FLIGHT_MAX, POPPING_S, Lease, PopQueue, Share, Shares
from pyengine.gateway.positions import FLUSH_S, GroupOffsets
from pyengine.gateway.wire import Frame, encode_frame
from pyengine.ipc.group_members import Claim
from pyengine.results import GetResult, GetStatus
from pyengine.storage.acknowledgements import AckFile, InFlight
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.message_getter import SHORT_CHARS, TagFilter
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def group(request):
    return "G_" + "".join(sign if sign.isalnum() else "_" for sign in request.node.name)[:100]


def put(client, topic, *bodies, queue_id=0, properties=""):
    for body in bodies:
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, queue_id, properties), body).code == codes.SUCCESS


def put_in_turn(client, topic, number):
    """Put so many messages, each queue in turn, beside the first message of the topic."""
    for each in range(number):
        put(client, topic, b"m%d" % each, queue_id=each % 4)


def pop_all(client, topic, group, number, **changes):
    """Pop until so many messages have come."""
    found = []

    def enough():
        found.extend(pop(client, topic, group, **changes))
        return len(found) >= number

    eventually(enough, f"{number} messages are popped")
    assert len(found) == number
    return found


def committed(served, topic, group):
    return ConsumerOffsets(served.root).read(topic, group)


def dead_letters(served, group):
    letters = pyengine.DeadLetters(served.root)
    return letters.messages(group) if any(queue.group == group for queue in letters.queues()) else []


def test_messages_of_all_queues_come_once_and_the_offsets_follow_their_acks(served, topic, group):
    client = served.broker()
    put_in_turn(client, topic, 20)
    found = pop_all(client, topic, group, 21)
    assert Counter(each.body for each in found) == Counter([b"first", *(b"m%d" % number for number in range(20))])
    assert not pop(client, topic, group)
    random.Random(7).shuffle(found)
    assert {ack(client, each) for each in found} == {codes.SUCCESS}
    with pyengine.open_store(served.root) as store:
        ends = {queue_id: store.queue_range(topic, queue_id)[1] for queue_id in range(4)}
    eventually(lambda: committed(served, topic, group) == ends, "the offsets are written")


def test_a_pop_is_held_until_a_message_comes_or_its_time_is_over(served, topic, group):
    client, other = served.broker(), served.broker()
    assert [each.body for each in pop_all(client, topic, group, 1)] == [b"first"]
    held = client.send(codes.POP_MESSAGE, pop_fields(topic, group, pollTime=60_000))
    assert client.is_silent()
    put(other, topic, b"late", queue_id=3)
    assert [each.body for each in popped(client.wait(held), topic, group)] == [b"late"]
    began_s = time.monotonic()
    answer = client.ask(codes.POP_MESSAGE, pop_fields(topic, group, pollTime=300))
    assert answer.code == codes.POLLING_TIMEOUT and answer.fields["restNum"] == "0" and time.monotonic() - began_s >= 0.3


def test_many_held_pops_share_the_messages_that_come(served, topic, group):
    client = served.broker()
    pop_all(client, topic, group, 1)
    held = [client.send(codes.POP_MESSAGE, pop_fields(topic, group, pollTime=60_000, maxMsgNums=1)) for _ in range(6)]
    sender = served.broker()
    put_in_turn(sender, topic, 6)
    found = [each.body for opaque in held for each in popped(client.wait(opaque), topic, group)]
    assert sorted(found) == [b"m%d" % number for number in range(6)]


def test_a_notification_says_that_messages_have_come(served, topic, group):
    client = served.broker()
    pop_all(client, topic, group, 1)
    fields = pop_fields(topic, group)
    assert client.ask(codes.NOTIFICATION, fields | {"pollTime": 0}).fields == {"hasMsg": "false", "pollingFull": "false"}
    held = client.send(codes.NOTIFICATION, fields | {"pollTime": 60_000})
    assert client.is_silent()
    put(served.broker(), topic, b"late")
    assert client.wait(held).fields["hasMsg"] == "true"
    assert [each.body for each in pop_all(client, topic, group, 1)] == [b"late"]


def test_a_pop_chooses_messages_by_tags_or_a_condition(served, topic, group):
    client = served.broker()
    for number in range(6):
        put(client, topic, b"%d" % number, queue_id=number % 4, properties=f"TAGS\x01{'ab'[number % 2]}\x02n\x01{number}")
    eventually(lambda: sum(served_end(served, topic, queue_id) for queue_id in range(4)) == 7, "all are there")
    tagged = pop_all(client, topic, group, 3, exp="a || c")
    assert sorted(each.body for each in tagged) == [b"0", b"2", b"4"]
    matched = pop_all(client, topic, f"{group}_sql", 2, expType="SQL92", exp="n > 3")
    assert sorted(each.body for each in matched) == [b"4", b"5"]
    assert [ack(client, each) for each in tagged + matched] == [0] * 5
    eventually(lambda: sum(committed(served, topic, group).values()) == 7, "what its filter excludes is done")
    answer = client.ask(codes.POP_MESSAGE, pop_fields(topic, group, expType="SQL92", exp="n >"))
    assert answer.code == codes.SUBSCRIPTION_PARSE_FAILED


def test_a_message_that_is_not_acknowledged_comes_from_the_retry_topic(served, topic, group):
    client = served.broker()
    first, = pop_all(client, topic, group, 1, invisibleTime=200)
    again, = pop_all(client, topic, group, 1)
    message = again.message
    assert (again.body, message.topic, message.reconsume_times) == (b"first", f"%RETRY%{group}", 1)
    assert message.properties["RETRY_TOPIC"] == topic and message.properties["1ST_POP_TIME"] == first.handle.split()[1]
    answer = client.ask(codes.ACK_MESSAGE, first.fields)
    assert (answer.code, answer.remark) == (codes.SUCCESS, EXPIRED), "its handle is old: as in RocketMQ nothing changes"
    assert ack(client, again) == codes.SUCCESS
    eventually(lambda: [committed(served, name, group).get(0) for name in (topic, f"%RETRY%{group}")] == [1, 1], "both are done")


@pytest.mark.parametrize("name", ["%RETRY%{group}_{topic}", "%RETRY%{group}", "{topic}"])
def test_the_handle_of_a_retry_counts_with_any_of_its_topics(served, topic, group, name):
    client = served.broker()
    pop_all(client, topic, group, 1, invisibleTime=1)
    again, = pop_all(client, topic, group, 1)
    assert again.handle.split()[4] == "1"
    fields = again.fields | {"topic": name.format(topic=topic, group=group)}
    assert client.ask(codes.ACK_MESSAGE, fields).code == codes.SUCCESS
    assert not pop(client, topic, group)


def test_a_nack_brings_a_message_back_in_its_time_with_another_handle(served, topic, group):
    client = served.broker()
    first, = pop_all(client, topic, group, 1)
    began_s = time.monotonic()
    answer = client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, first.fields | {"invisibleTime": 700})
    assert answer.code == codes.SUCCESS and answer.fields["invisibleTime"] == "700"
    changed = first.with_handle(answer)
    assert changed.handle.split()[1] == answer.fields["popTime"] != first.handle.split()[1]
    old = client.ask(codes.ACK_MESSAGE, first.fields)
    assert (old.code, old.remark) == (codes.SUCCESS, None), "the handle from before, whose time is not over: nothing changes"
    old = client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, first.fields | {"invisibleTime": 3_600_000})
    assert (old.code, old.fields["extraInfo"]) == (codes.SUCCESS, first.handle)
    again, = pop_all(client, topic, group, 1)
    assert time.monotonic() - began_s >= 0.7 and again.message.reconsume_times == 1
    assert client.ask(codes.ACK_MESSAGE, changed.fields).remark == EXPIRED
    assert [each.body for each in pop_all(served.broker(), topic, f"{group}_2", 1)] == [b"first"]
    assert ack(client, Popped(f"{group}_2", topic, first.message, first.handle)) == codes.NO_MESSAGE, "a pop of another group"


def give_back(worker, *found):
    """Give back what did not reach its client, as the gRPC worker does."""
    assert {worker.ask(codes.GIVE_BACK, each.fields).code for each in found} == {codes.SUCCESS}


def test_a_message_that_did_not_reach_its_client_comes_again_at_once_and_is_not_counted(served, topic, group):
    SubscriptionGroups(served.root).put(SubscriptionGroup(group, retry_max_times=1))
    client, other = served.broker(), served.broker()
    with LocalClient(served.root) as worker:
        for _ in range(5):
            found, = pop_all(client, topic, group, 1, invisibleTime=3_600_000)
            held = other.send(codes.POP_MESSAGE, pop_fields(topic, group, pollTime=60_000))
            assert other.is_silent()
            give_back(worker, found)
            again, = popped(other.wait(held), topic, group)
            assert (again.body, again.message.topic, again.message.reconsume_times) == (b"first", topic, 0)
            assert client.ask(codes.ACK_MESSAGE, found.fields).code == codes.SUCCESS, "the old handle changes nothing"
            give_back(worker, found)
            assert not pop(client, topic, group)
            give_back(worker, again)
        first, = pop_all(client, topic, group, 1, invisibleTime=1)
        retry, = pop_all(client, topic, group, 1)
        give_back(worker, retry)
        again, = pop_all(client, topic, group, 1)
        assert (again.message.topic, again.message.reconsume_times) == (f"%RETRY%{group}", 1), "nor is that of a retry"
    assert ack(client, again) == codes.SUCCESS and not dead_letters(served, group)
    eventually(lambda: [committed(served, name, group).get(0) for name in (topic, f"%RETRY%{group}")] == [1, 1], "both are done")


@pytest.mark.parametrize("code", [codes.GIVE_BACK, codes.INTRODUCE])
def test_only_workers_of_the_host_give_back_what_did_not_reach_a_client(served, topic, group, code):
    client = served.broker()
    found, = pop_all(client, topic, group, 1)
    assert client.ask(code, found.fields).code == codes.REQUEST_CODE_NOT_SUPPORTED
    assert not pop(client, topic, group) and ack(client, found) == codes.SUCCESS


def test_ordered_messages_that_did_not_reach_their_client_come_again_in_order_and_uncounted(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        SubscriptionGroups(served.root).put(SubscriptionGroup("g", retry_max_times=0))
        client, other = served.broker(), served.broker()
        put(client, "T", b"a", b"b", b"c")
        put(client, "T", b"d")
        acks = AckFile(served.root, "T@g")
        for victim in ("", "gateway", ""):
            found = pop_all(client, "T", "g", 4, order="true")
            held = other.send(codes.POP_MESSAGE, pop_fields("T", "g", order="true", pollTime=60_000))
            with LocalClient(served.root) as worker:
                give_back(worker, *found[2:], found[0])
                assert other.is_silent(), "one of them is still on its way"
                give_back(worker, found[1])
            again = client.ask(codes.POP_MESSAGE, pop_fields("T", "g", order="true")) if victim else other.wait(held)
            again = again if again.code == codes.SUCCESS else other.wait(held)
            assert [each.body for each in popped(again, "T", "g")] == [b"a", b"b", b"c", b"d"] and not again.fields["orderCountInfo"]
            with LocalClient(served.root) as worker:
                give_back(worker, *popped(again, "T", "g"))
            if victim:
                eventually(lambda: (states := acks.read().get(0)) and states[-1].counts == ((0, 4, 0),), "it is saved")
                incarnation = served.engine.incarnation(victim)
                served.engine.kill(victim)
                served.engine.wait_back(victim, incarnation)
                client, other = (eventually(lambda: _connected(served), "the gateway is back") for _ in range(2))
        found = pop_all(client, "T", "g", 4, order="true")
        assert not dead_letters(served, "g") and [ack(client, each) for each in found] == [0] * 4
        eventually(lambda: committed(served, "T", "g").get(0) == 4, "all are done")
    finally:
        served.close()


def test_a_longer_time_keeps_a_message(served, topic, group):
    client = served.broker()
    first, = pop_all(client, topic, group, 1, invisibleTime=400)
    kept = first.with_handle(client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, first.fields | {"invisibleTime": 60_000}))
    began_s = time.monotonic()
    eventually(lambda: pop(client, topic, group) or time.monotonic() - began_s > 1, "the first time is over")
    assert time.monotonic() - began_s > 1 and ack(client, kept) == codes.SUCCESS


def test_two_acks_of_one_handle_are_one(served, topic, group):
    client = served.broker()
    found, = pop_all(client, topic, group, 1)
    assert [ack(client, found), ack(client, found)] == [codes.SUCCESS] * 2


def test_after_its_last_retry_a_message_is_a_dead_letter(served, topic, group):
    SubscriptionGroups(served.root).put(SubscriptionGroup(group, retry_max_times=2))
    client = served.broker()
    times = [pop_all(client, topic, group, 1, invisibleTime=1)[0].message.reconsume_times for _ in range(3)]
    assert times == [0, 1, 2]
    dead = eventually(lambda: dead_letters(served, group), "it is a dead letter")
    assert [(message.body, message.topic) for message in dead] == [(b"first", topic)]
    assert not pop(client, topic, group)


def test_a_batch_acknowledges_by_bits(served, topic, group):
    client = served.broker()
    put(client, topic, *(b"m%d" % number for number in range(9)))
    found = pop_all(client, topic, group, 10)
    words = found[0].handle.split()
    body = {"brokerName": "broker-a", "acks": [{
        "c": group, "t": topic, "r": "0", "so": int(words[0]), "q": 0, "rq": 0, "pt": int(words[1]), "it": 60_000,
        "b": base64.b64encode(bytes([0b11111110, 0b1])).decode()}]}
    assert client.ask(codes.BATCH_ACK_MESSAGE, body=body).code == codes.SUCCESS
    acks = AckFile(served.root, f"{topic}@{group}")
    eventually(lambda: acks.read()[0][-1].acked == ((1, 9),), "the ranges are saved")
    assert ack(client, found[0]) == codes.SUCCESS
    assert not pop(client, topic, group, invisibleTime=1) or found[9].body == b"m8"


WRONG_BATCHES = {
    "nothing": {},
    "no list": {"acks": "x"},
    "no bits": {"acks": [{"c": "g", "t": "t", "r": "0", "so": 0, "q": 0, "pt": 1}]},
    "a negative start": {"acks": [{"c": "g", "t": "t", "r": "0", "so": -1, "q": 0, "pt": 1, "b": ""}]},
    "text for a number": {"acks": [{"c": "g", "t": "t", "r": "0", "so": "0", "q": 0, "pt": 1, "b": ""}]},
    "bits that are no base64": {"acks": [{"c": "g", "t": "t", "r": "0", "so": 0, "q": 0, "pt": 1, "b": "%%%"}]},
    "another thing": {"acks": [7]},
}


@pytest.mark.parametrize("body", WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_a_wrong_batch_is_refused(served, body):
    assert served.broker().ask(codes.BATCH_ACK_MESSAGE, body=body).code in (codes.SYSTEM_ERROR, codes.NO_MESSAGE)


WRONG_POPS = {
    "none": ({"maxMsgNums": 0}, codes.INVALID_PARAMETER),
    "too many": ({"maxMsgNums": 33}, codes.INVALID_PARAMETER),
    "no such queue": ({"queueId": 4}, codes.INVALID_PARAMETER),
    "no time": ({"invisibleTime": 0}, codes.INVALID_PARAMETER),
    "no topic": ({"topic": "no_such_topic"}, codes.TOPIC_NOT_EXIST),
    "no group": ({"consumerGroup": " "}, codes.SYSTEM_ERROR),
    "the engine's group": ({"consumerGroup": "CID_RMQ_SYS_TRANS"}, codes.NO_PERMISSION),
    "an unknown filter": ({"expType": "MAGIC", "exp": "x"}, codes.SYSTEM_ERROR),
    "a long filter": ({"exp": "a || " * 20_000}, codes.SUBSCRIPTION_PARSE_FAILED),
    "no number": ({"invisibleTime": "soon"}, codes.SYSTEM_ERROR),
}


@pytest.mark.parametrize("changes, code", WRONG_POPS.values(), ids=WRONG_POPS)
def test_a_wrong_pop_is_refused(served, topic, group, changes, code):
    assert served.broker().ask(codes.POP_MESSAGE, pop_fields(topic, group) | changes).code == code


@pytest.mark.parametrize("handle", ["", "x", "0 a b 0 0 broker-a 0 0", "0 1 2", "0 -1 1 0 0 b 0 0", "0 99999999999999999999 1 0 0 b 0 0"])
def test_a_wrong_handle_is_refused(served, topic, group, handle):
    client = served.broker()
    found, = pop_all(client, topic, group, 1)
    for code in (codes.ACK_MESSAGE, codes.CHANGE_MESSAGE_INVISIBLETIME):
        assert client.ask(code, found.fields | {"extraInfo": handle, "invisibleTime": 1}).code == codes.SYSTEM_ERROR
    assert ack(client, Popped(group, topic, found.message, found.handle)) == codes.SUCCESS


def test_a_group_does_not_pop_and_pull_at_once(served, topic, group):
    client, other = served.broker(), served.broker()
    other.ask(codes.PULL_MESSAGE, pull_fields(topic, group=group))
    refused = client.ask(codes.POP_MESSAGE, pop_fields(topic, group))
    assert refused.code == codes.NO_PERMISSION and "is consumed by pulls" in refused.remark
    other.close()
    eventually(lambda: client.ask(codes.POP_MESSAGE, pop_fields(topic, group)).code == codes.SUCCESS, "the pulling client has gone")
    for code, fields in ((codes.PULL_MESSAGE, pull_fields(topic, group=group)),
                         (codes.UPDATE_CONSUMER_OFFSET, {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 1})):
        refused = client.ask(code, fields)
        assert refused.code == codes.NO_PERMISSION and "is consumed by POP and has 1 messages in flight" in refused.remark


def test_a_consumer_that_was_refused_while_its_group_popped_begins_where_the_pops_ended(served, topic, group):
    popping, refused = served.broker(), served.broker()
    put(popping, topic, *(b"m%d" % number for number in range(11)))
    queue = {"consumerGroup": group, "topic": topic, "queueId": 0}
    found = pop_all(popping, topic, group, 12)
    assert refused.ask(codes.QUERY_CONSUMER_OFFSET, queue).fields["offset"] == "0"
    assert refused.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, group=group)).code == codes.NO_PERMISSION
    heartbeat(popping, "me", group, subscription(topic))
    assert {ack(popping, each) for each in found[:10]} == {codes.SUCCESS}
    reset = {"topic": topic, "group": group, "timestamp": 0, "queueId": 0, "offset": 10}
    for queue_id, offset in ((0, 10), (1, 0), (2, 0), (3, 0)):  # so that the group pops no more
        assert popping.ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, reset | {"queueId": queue_id, "offset": offset}).code == codes.SUCCESS

    def ask(client, code, fields):
        answer = client.ask(code, fields)
        return answer.code, answer.fields.get("nextBeginOffset") or answer.fields.get("offset")

    assert ask(refused, codes.UPDATE_CONSUMER_OFFSET, queue | {"commitOffset": 0})[0] == codes.NO_PERMISSION
    assert ask(refused, codes.PULL_MESSAGE, pull_fields(topic, 0, group=group, sysFlag=5)) == (codes.PULL_OFFSET_MOVED, "10")
    assert ask(refused, codes.QUERY_CONSUMER_OFFSET, queue) == (codes.SUCCESS, "10")
    assert ask(refused, codes.PULL_MESSAGE, pull_fields(topic, 10, group=group)) == (codes.SUCCESS, "12")
    assert ask(refused, codes.UPDATE_CONSUMER_OFFSET, queue | {"commitOffset": 11})[0] == codes.SUCCESS
    assert ask(refused, codes.PULL_MESSAGE, pull_fields(topic, 0, group=group)) == (codes.SUCCESS, "12"), "it may go back by itself"
    assert ask(served.broker(), codes.UPDATE_CONSUMER_OFFSET, queue | {"commitOffset": 1})[0] == codes.SUCCESS


def test_a_group_pulls_as_long_as_one_of_its_clients_does(served, topic, group):
    client, other, third = served.broker(), served.broker(), served.broker()
    held = pull_fields(topic, 1, 0, consumerGroup=group, sysFlag=6, suspendTimeoutMillis=60_000, subscription="*")
    opaque = client.send(codes.PULL_MESSAGE, held)
    assert client.is_silent()
    other.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 0, consumerGroup=group, sysFlag=4, subscription="*"))
    other.close()
    refused = third.ask(codes.POP_MESSAGE, pop_fields(topic, group))
    assert refused.code == codes.NO_PERMISSION and "pull" in refused.remark and not client.is_answered(opaque)
    client.close()
    eventually(lambda: third.ask(codes.POP_MESSAGE, pop_fields(topic, group)).code == codes.SUCCESS, "none of them pulls any more")


def test_a_group_that_pops_gets_no_offsets_of_another(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b")
    found = pop_all(client, topic, group, 3)
    fields = {"topic": topic, "queueId": 0, "commitOffset": 3}
    assert client.ask(codes.UPDATE_CONSUMER_OFFSET, fields | {"consumerGroup": f"{group}_2"}).code == codes.SUCCESS
    cloned = client.ask(codes.CLONE_GROUP_OFFSET, {"srcGroup": f"{group}_2", "destGroup": group, "topic": topic})
    assert cloned.code == codes.NO_PERMISSION and "POP" in cloned.remark
    assert committed(served, topic, group) == dict.fromkeys(range(4), 0), "nothing below is done"
    assert {ack(client, each) for each in found} == {codes.SUCCESS}


def test_a_program_of_the_host_and_pops_do_not_share_a_group(served, topic, group):
    client = served.broker()
    with pyengine.consume(served.root, topic, group=group) as consumer:
        assert eventually(lambda: consumer.pull(timeout_s=0.1), "the program has the message")
        refused = client.ask(codes.POP_MESSAGE, pop_fields(topic, group))
        assert refused.code == codes.SYSTEM_ERROR and "programs of this host consume" in refused.remark
    eventually(lambda: client.ask(codes.POP_MESSAGE, pop_fields(topic, group)).code == codes.POLLING_TIMEOUT, "the program has gone")
    with pyengine.consume(served.root, topic, group=group) as consumer:
        assert consumer.pull(timeout_s=1) == [] and consumer.assignment == []


def test_an_ordered_pop_blocks_its_queue_until_all_of_it_is_done(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b")
    put(client, topic, b"other", queue_id=1)
    found = pop_all(client, topic, group, 4, order="true", initMode=0)
    assert [each.body for each in found if each.message.queue_id == 0] == [b"first", b"a", b"b"]
    put(client, topic, b"c")
    assert not pop(client, topic, group, order="true")
    queue = [each for each in found if each.message.queue_id == 0]
    held = client.send(codes.POP_MESSAGE, pop_fields(topic, group, order="true", pollTime=60_000))
    assert [ack(client, each) for each in queue[:2]] == [0, 0] and client.is_silent()
    assert ack(client, queue[2]) == 0
    assert [each.body for each in popped(client.wait(held), topic, group)] == [b"c"]


@pytest.mark.ci
def test_an_ordered_message_comes_again_in_its_place(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b")
    found = pop_all(client, topic, group, 3, order="true", invisibleTime=300)
    assert ack(client, found[1]) == 0
    again = eventually(lambda: pop(client, topic, group, order="true"), "they come again")
    assert [each.body for each in again] == [b"first", b"b"]
    assert not any(each.message.topic.startswith("%RETRY%") for each in again)
    assert ack(client, found[0]) == codes.SUCCESS and not pop(client, topic, group, order="true"), "an old handle changes nothing"
    assert [ack(client, each) for each in again] == [0, 0]
    eventually(lambda: committed(served, topic, group).get(0) == 3, "all are done")


def test_an_ordered_pop_counts_deliveries_and_its_attempt_is_repeated(served, topic, group):
    client = served.broker()
    ordered = {"order": "true", "attemptId": "one"}
    first = client.ask(codes.POP_MESSAGE, pop_fields(topic, group, **ordered))
    assert first.fields["orderCountInfo"] == "" and first.fields["reviveQid"] == "999"
    again = client.ask(codes.POP_MESSAGE, pop_fields(topic, group, **ordered))
    assert again.fields["orderCountInfo"] == "" and again.body == first.body
    assert client.ask(codes.POP_MESSAGE, pop_fields(topic, group, order="true", attemptId="two")).code == codes.POLLING_TIMEOUT
    held, = popped(again, topic, group)
    assert ack(client, popped(first, topic, group)[0]) == codes.SUCCESS, "an old handle, which changes nothing"
    client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, held.fields | {"invisibleTime": 0})
    two = pop_fields(topic, group, order="true", attemptId="two")
    counted = eventually(lambda: (answer := client.ask(codes.POP_MESSAGE, two)).code == codes.SUCCESS and answer, "it comes again")
    assert counted.fields["orderCountInfo"] == "0 qo0%0 1"


def test_an_ordered_message_that_fails_too_often_is_a_dead_letter_and_its_queue_goes_on(served, topic, group):
    SubscriptionGroups(served.root).put(SubscriptionGroup(group, retry_max_times=1))
    client = served.broker()
    put(client, topic, b"next")
    seen = []

    def is_over():
        for each in pop(client, topic, group, order="true", maxMsgNums=1, invisibleTime=1):
            seen.append(each.body)
        return b"next" in seen

    eventually(is_over, "the queue goes on")
    assert seen == [b"first", b"first", b"next"]
    dead = eventually(lambda: dead_letters(served, group), "it is a dead letter")
    assert [message.body for message in dead] == [b"first"]


def test_retries_of_two_topics_come_to_their_own_pops(served, topic, group):
    client = served.broker()
    other = f"{topic}_2"
    put(client, other, b"other")
    for name in (topic, other):
        pop_all(client, name, group, 1, invisibleTime=1)
    eventually(lambda: served_end(served, f"%RETRY%{group}") == 2, "both are retries")
    found = [pop_all(client, name, group, 1)[0] for name in (other, topic)]
    assert [each.body for each in found] == [b"other", b"first"] and not pop(client, topic, group) and not pop(client, other, group)
    assert [ack(client, each) for each in found] == [0, 0]
    eventually(lambda: committed(served, f"%RETRY%{group}", group) == {0: 2}, "both are done")


def ack_all(client, found):
    """Acknowledge many messages, in batches."""
    acks = [{"c": each.group, "t": each.topic, "r": each.handle.split()[4], "so": each.message.queue_offset, "q": each.message.queue_id,
             "rq": 0, "pt": int(each.handle.split()[1]), "it": 1, "b": "AQ=="} for each in found]
    for at in range(0, len(acks), 4096):
        assert client.ask(codes.BATCH_ACK_MESSAGE, body={"brokerName": "broker-a", "acks": acks[at:at + 4096]}).code == codes.SUCCESS


def batch(number, properties=""):
    """The body of a batch of equal messages."""
    text = properties.encode()
    member = bytes(12) + b"\0\0\0\x07message" + len(text).to_bytes(2, "big") + text
    return ((len(member) + 4).to_bytes(4, "big") + member) * number


@pytest.mark.ci
def test_retries_of_a_topic_without_consumers_do_not_keep_those_of_another(tmp_path):
    served = start_served(tmp_path / "store")  # of its own: others read the first segment of theirs
    try:
        client, retry = served.broker(), "%RETRY%g"
        put(client, "T", b"first")
        put(client, "Silent", b"none")
        heartbeat(client, "me", "g", subscription("T"))
        for _ in range(IN_FLIGHT_MAX // 1000 + 1):
            assert client.ask(codes.SEND_BATCH_MESSAGE, send_fields(retry, m="true"), batch(1000, "RETRY_TOPIC\x01Silent")).code == 0
        pop_all(client, "T", "g", 1, invisibleTime=1)
        eventually(lambda: served_end(served, retry) == IN_FLIGHT_MAX + 1001, "its message is behind them")
        again, = pop_all(client, "T", "g", 1)
        assert (again.body, again.message.queue_offset) == (b"first", IN_FLIGHT_MAX + 1000) and ack(client, again) == codes.SUCCESS
        put(client, "T", b"more")
        assert [ack(client, each) for each in pop_all(client, "T", "g", 1)] == [0]
        eventually(lambda: committed(served, "T", "g").get(0) == 2, "the offsets are written")
        assert committed(served, retry, "g") == {0: 0}, "none of the others is done"
        served.engine.stop()
        served.engine.start()
        client = eventually(lambda: _connected(served), "the gateway is back")
        assert not pop(client, "T", "g")
        found = []

        def is_full():
            while more := pop(client, "Silent", "g", invisibleTime=600_000):
                found.extend(more)
            return len(found) > IN_FLIGHT_MAX

        eventually(is_full, "as many as may be in flight come")
        retries = [each for each in found if each.message.topic == retry]
        assert [each.message.queue_offset for each in retries] == list(range(IN_FLIGHT_MAX)) and len(found) == IN_FLIGHT_MAX + 1
        ack_all(client, found)
        ack_all(client, pop_all(client, "Silent", "g", IN_FLIGHT_MAX + 1000 - len(retries)))
        eventually(lambda: committed(served, retry, "g") == {0: IN_FLIGHT_MAX + 1001}, "all are done")
    finally:
        served.close()


def served_end(served, topic, queue_id=0):
    with pyengine.open_store(served.root) as store:
        return store.queue_range(topic, queue_id, "committed")[1]


def test_a_reset_makes_a_group_pop_from_there(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b")
    found = pop_all(client, topic, group, 3)
    heartbeat(client, "me", group, subscription(topic))
    answer = client.ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": topic, "group": group, "timestamp": 0, "isForce": "true"})
    assert answer.code == codes.SUCCESS
    assert ack(client, found[0]) == codes.NO_MESSAGE
    assert [each.body for each in pop_all(client, topic, group, 3)] == [b"first", b"a", b"b"]


def test_a_reset_of_one_queue_leaves_the_messages_of_the_others_in_flight(served, topic, group):
    client = served.broker()
    put(client, topic, b"other", queue_id=2)
    found = {each.body: each for each in pop_all(client, topic, group, 2)}
    heartbeat(client, "me", group, subscription(topic))
    fields = {"topic": topic, "group": group, "timestamp": 0, "queueId": found[b"first"].message.queue_id, "offset": 0}
    assert client.ask(codes.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == codes.SUCCESS
    assert ack(client, found[b"first"]) == codes.NO_MESSAGE and ack(client, found[b"other"]) == codes.SUCCESS
    asked = {name: str(value) for name, value in pop_fields(topic, group).items()}
    client.socket.sendall(b"".join(encode_frame(Frame(codes.POP_MESSAGE, asked, opaque=-number)) for number in (1, 2, 3)))
    found = sorted(client.wait(-number).code for number in (1, 2, 3))  # all asked while the queue is claimed again
    assert found == [codes.SUCCESS, codes.POLLING_TIMEOUT, codes.POLLING_TIMEOUT], "the other one does not come again"


def test_a_client_that_ends_leaves_its_messages_to_the_others(served, topic, group):
    client, other = served.broker(), served.broker()
    pop_all(client, topic, group, 1, autoRenew="true", invisibleTime=500)
    began_s = time.monotonic()
    eventually(lambda: pop(other, topic, group) or time.monotonic() - began_s > 1.5, "its time is over, and it is kept")
    assert time.monotonic() - began_s > 1.5
    client.close()
    assert pop_all(other, topic, group, 1)[0].message.reconsume_times == 1


def test_a_client_that_leaves_its_group_gives_its_messages_back_at_once(served, topic, group):
    client, other = served.broker(), served.broker()
    pop_all(client, topic, group, 1, autoRenew="true", invisibleTime=3_600_000)
    assert client.ask(codes.UNREGISTER_CLIENT, {"clientID": "me", "consumerGroup": group}).code == codes.SUCCESS
    assert pop_all(other, topic, group, 1)[0].body == b"first"


def test_no_more_than_so_many_messages_of_a_queue_are_in_flight(tmp_path):
    served = start_served(tmp_path / "store")  # of its own: others read the first segment of theirs
    try:
        client = served.broker()
        for _ in range(11):
            assert client.ask(codes.SEND_BATCH_MESSAGE, send_fields("T", m="true"), batch(1000)).code == codes.SUCCESS
        found = []

        eventually(lambda: served_end(served, "T") == 11_000, "all are there")
        while more := pop(client, "T", "g"):
            found.extend(more)
        assert len(found) == IN_FLIGHT_MAX == 10_000
        assert ack(client, found[5000]) == codes.SUCCESS and len(pop(client, "T", "g")) == 1
    finally:
        served.close()


@pytest.mark.ci
def test_only_the_last_seconds_of_acks_are_repeated_after_a_kill(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        client = served.broker()
        put_in_turn(client, "T", 400)
        found = pop_all(client, "T", "g", 400)
        random.Random(11).shuffle(found)
        saved, rest = found[:200], found[200:]
        assert {ack(client, each) for each in saved} == {codes.SUCCESS}
        acks = AckFile(served.root, "T@g")

        def is_saved():
            stored = committed(served, "T", "g")
            states = {queue_id: states[-1] for queue_id, states in acks.read().items()}
            done = sum(stored.get(queue_id, 0) for queue_id in range(4))
            return done + sum(end - start for state in states.values() for start, end in state.acked
                              if start >= stored.get(state.queue, 0)) == 200

        eventually(is_saved, f"the acks are saved within {FLUSH_S} s")
        incarnation = served.engine.incarnation("gateway")
        served.engine.kill("gateway")
        served.engine.wait_back("gateway", incarnation)
        client = eventually(lambda: _connected(served), "the gateway is back")
        assert ack(client, rest[0]) == codes.NO_MESSAGE, "its handle was the dead gateway's"
        again = pop_all(client, "T", "g", 200)
        assert Counter(each.body for each in again) == Counter(each.body for each in rest)
    finally:
        served.close()


def _connected(served):
    try:
        return served.broker()
    except OSError:
        return None


def test_an_orderly_stop_repeats_no_ack(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        client = served.broker()
        put_in_turn(client, "T", 40)
        found = pop_all(client, "T", "g", 40)
        random.Random(3).shuffle(found)
        assert {ack(client, each) for each in found[:30]} == {codes.SUCCESS}
        served.engine.stop()
        served.engine.start()
        client = eventually(lambda: _connected(served), "the gateway is back")
        assert Counter(each.body for each in pop_all(client, "T", "g", 10)) == Counter(each.body for each in found[30:])
    finally:
        served.close()


def test_a_master_that_was_replaced_writes_neither_offsets_nor_acknowledgements(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        client, other = served.broker(), served.broker()
        put_in_turn(client, "T", 8)
        found = pop_all(client, "T", "g", 8)
        assert ack(client, found[0]) == codes.SUCCESS
        kept = {"topic": "T", "consumerGroup": "pulling", "queueId": 0, "commitOffset": 1}
        assert client.ask(codes.UPDATE_CONSUMER_OFFSET, kept).code == codes.SUCCESS
        eventually(lambda: committed(served, "T", "pulling") and sum(committed(served, "T", "g").values()) == 1, "they are written")
        heartbeat(client, "me", "pulling", subscription("T"))
        files = [served.root / "config" / name for name in ("consumerOffset.json", "consumers/acks/T@g", "subscriptionGroup.json")]
        before = [path.read_bytes() for path in files]
        held = other.send(codes.POP_MESSAGE, pop_fields("T", "g", pollTime=60_000))
        assert ack(client, found[1]) == codes.SUCCESS and other.is_silent()
        ReplicationStateFile(served.root).write(ReplicationState("ASYNC_MASTER", 0, term=1, fenced_by=2))
        refused = client.ask(codes.UPDATE_CONSUMER_OFFSET, kept | {"commitOffset": 2})
        assert refused.code == codes.NO_PERMISSION and "a master of a higher term" in refused.remark
        copied = {"srcGroup": "pulling", "destGroup": "copy", "topic": "T", "offline": "true"}
        reset = {"topic": "T", "group": "pulling", "timestamp": 0, "isForce": "true"}
        for code, fields in ((codes.POP_MESSAGE, pop_fields("T", "g")), (codes.CLONE_GROUP_OFFSET, copied),
                             (codes.INVOKE_BROKER_TO_RESET_OFFSET, reset),
                             (codes.DELETE_SUBSCRIPTIONGROUP, {"groupName": "pulling", "removeOffset": "true"})):
            refused = client.ask(code, fields)
            assert refused.code == codes.NO_PERMISSION and "a master of a higher term" in refused.remark
        assert "a master of a higher term" in other.wait(held).remark
        assert ack(client, found[2]) == codes.NO_MESSAGE
        served.engine.stop()
        assert [path.read_bytes() for path in files] == before
    finally:
        served.close()


@pytest.mark.ci
def test_groups_status_and_metrics_show_what_is_in_flight(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b", queue_id=2)
    pop_all(client, topic, group, 3, invisibleTime=1)
    found = pop_all(client, topic, group, 3)
    assert ack(client, found[0]) == codes.SUCCESS
    now_ms = time.time_ns() // 1_000_000

    def rows():
        return {row["topic"]: row for row in run("status", served.root, "--json").document["pops"] if row["group"] == group}

    retry = f"%RETRY%{group}"
    eventually(lambda: list(rows()) == [retry] and rows()[retry]["in_flight"] == 2, "status has them")
    shown = rows()[retry]
    assert shown["attempts"] == 2 and 0 < shown["invisible_until_ms"] - now_ms < 300_000
    state, = run("groups", "lag", served.root, "--group", group, "--topic", retry, "--json").document["groups"]
    queue, = state["queues"]
    assert (state["in_flight"], queue["in_flight"], queue["attempts"], queue["lag"]) == (2, 2, 2, 3 - queue["committed"])
    assert abs(queue["invisible_until_ms"] - shown["invisible_until_ms"]) < 60_000 and queue["holder_pid"] == served.engine.pid("gateway")
    for words in (("status", served.root), ("groups", "lag", served.root, "--group", group)):
        text = run(*words).stdout
        assert "in flight" in text and "invisible until" in text and group in text
    told = run("metrics", served.root, "--once").stdout
    assert f'pyengine_group_in_flight_messages{{group="{group}",topic="{retry}"}} 2.0' in told
    [listed] = [row for row in run("groups", served.root, "--json").document["groups"] if (row["group"], row["topic"]) == (group, retry)]
    assert listed["in_flight"] == 2
    assert [ack(client, each) for each in found[1:]] == [0, 0]
    eventually(lambda: not rows(), "nothing is in flight")


# ---- which queues a client takes, and how ------------------------------------------------


def assignments(client, topic, group, client_id="me", **changes):
    answer = client.ask(codes.QUERY_ASSIGNMENT, body={"topic": topic, "consumerGroup": group, "clientId": client_id, "strategyName": "AVG",
                                                      "messageModel": "CLUSTERING", **changes})
    assert answer.code == codes.SUCCESS
    rows = json.loads(answer.body)["messageQueueAssignments"]
    return None if rows is None else sorted((row["mode"], row["messageQueue"]["queueId"]) for row in rows)


def test_members_get_their_shares_of_the_queues(served, topic, group):
    one, two = served.broker(), served.broker()
    assert assignments(one, topic, group) is None, "nobody is in the group"
    heartbeat(one, "a", group, subscription(topic))
    heartbeat(two, "b", group, subscription(topic))
    assert assignments(one, topic, group, "a") == [("PULL", 0), ("PULL", 1)]
    assert assignments(one, topic, group, "b") == [("PULL", 2), ("PULL", 3)]
    assert assignments(one, topic, group, "b", strategyName="AVG_BY_CIRCLE") == [("PULL", 1), ("PULL", 3)]
    assert assignments(one, topic, group, "c") == [] and assignments(one, topic, group, strategyName="MINE") is None
    assert assignments(one, topic, group, messageModel="BROADCASTING") == [("PULL", number) for number in range(4)]
    assert assignments(one, "no_such_topic", group) is None


def test_a_group_that_pops_gets_any_queue_or_shares_of_several_members(served, topic, group):
    clients = [served.broker() for _ in range(4)]
    for number, client in enumerate(clients):
        heartbeat(client, f"c{number}", group, subscription(topic))
    body = {"topic": topic, "consumerGroup": group, "mode": "POP", "popShareQueueNum": 0}
    assert clients[0].ask(codes.SET_MESSAGE_REQUEST_MODE, body=body).code == codes.SUCCESS
    assert assignments(clients[0], topic, group, "c1") == [("POP", -1)]
    assert clients[0].ask(codes.SET_MESSAGE_REQUEST_MODE, body=body | {"popShareQueueNum": 1}).code == codes.SUCCESS
    assert [assignments(clients[0], topic, group, f"c{number}") for number in range(4)] == [
        [("POP", number), ("POP", (number + 1) % 4)] if number < 3 else [("POP", 0), ("POP", 3)] for number in range(4)]
    assert assignments(clients[0], f"%RETRY%{group}", group, "c1") == [], "its pops have the retries"
    stored = json.loads((served.root / "config" / "messageRequestMode.json").read_text())
    assert stored["messageRequestModeMap"][topic][group] == {"consumerGroup": group, "mode": "POP", "popShareQueueNum": 1, "topic": topic}


def test_a_wrong_mode_is_refused(served, topic, group):
    client = served.broker()
    SubscriptionGroups(served.root).put(SubscriptionGroup(group))
    body = {"topic": topic, "consumerGroup": group, "mode": "POP", "popShareQueueNum": 0}
    for changes, code in (({"mode": "PUSH"}, codes.SYSTEM_ERROR), ({"topic": f"%RETRY%{group}"}, codes.NO_PERMISSION),
                          ({"topic": "no_such_topic"}, codes.TOPIC_NOT_EXIST), ({"popShareQueueNum": "1"}, codes.SYSTEM_ERROR),
                          ({"consumerGroup": "no_such_group"}, codes.SUBSCRIPTION_GROUP_NOT_EXIST)):
        assert client.ask(codes.SET_MESSAGE_REQUEST_MODE, body=body | changes).code == code


def test_a_pop_of_large_messages_ends_at_its_size(served, topic, group):
    client = served.broker()
    bodies = [b"%02d" % number + bytes(700_000) for number in range(16)]
    put(client, topic, *bodies)
    eventually(lambda: served_end(served, topic) == 17, "all are there")
    seen = []

    def all_came():
        answer = client.ask(codes.POP_MESSAGE, pop_fields(topic, group))
        assert len(answer.body) < POP_BYTES + 1_000_000
        found = [] if answer.code == codes.POLLING_TIMEOUT else popped(answer, topic, group)
        seen.extend(each.body[:2] for each in found)
        return sum(ack(client, each) == codes.SUCCESS for each in found) and len(seen) >= 17

    eventually(all_came, "all come in several pops")
    assert seen == [b"fi", *(body[:2] for body in bodies)]


def test_large_retries_that_were_set_aside_come_as_many_as_fit(served, topic, group):
    client, other = served.broker(), f"{topic}_2"
    put(client, other, *(bytes(700_000) for _ in range(10)))
    pop_all(client, other, group, 10, invisibleTime=int(scaled_timeout_s(2) * 1000))
    eventually(lambda: served_end(served, f"%RETRY%{group}") == 10, "all are retries")
    assert [each.body for each in pop_all(client, topic, group, 1)] == [b"first"]
    eventually(lambda: not pop(client, topic, group), "the other's retries are set aside")
    found = pop(client, other, group)
    assert found and sum(len(each.body) for each in found) < POP_BYTES + 1_000_000


def test_the_attempt_of_a_message_that_came_again_is_repeated(served, topic, group):
    client = served.broker()
    held, = pop_all(client, topic, group, 1, order="true", attemptId="one")
    client.ask(codes.CHANGE_MESSAGE_INVISIBLETIME, held.fields | {"invisibleTime": 0})
    two, = pop_all(client, topic, group, 1, order="true", attemptId="two")
    assert not pop(client, topic, group, order="true", attemptId="one"), "that attempt has ended"
    same, = pop(client, topic, group, order="true", attemptId="two")
    assert (same.body, ack(client, two)) == (b"first", codes.SUCCESS)
    put(client, topic, b"next")
    assert not pop(client, topic, group, order="true"), "the old handle has ended nothing"
    assert ack(client, same) == codes.SUCCESS and [each.body for each in pop_all(client, topic, group, 1, order="true")] == [b"next"]


def test_a_batch_of_more_messages_than_a_piece_of_work_is_refused(served, topic, group):
    client = served.broker()
    pop_all(client, topic, group, 1)
    one = {"c": group, "t": topic, "r": "0", "so": 0, "q": 0, "rq": 0, "pt": 1, "it": 1, "b": base64.b64encode(b"\xff" * 1024).decode()}
    answer = client.ask(codes.BATCH_ACK_MESSAGE, body={"brokerName": "broker-a", "acks": [one] * 600})
    assert answer.code == codes.SYSTEM_ERROR and f"more than {ACKED_MAX} messages" in answer.remark


# ---- in this process, with what a store does only at rare moments ---------------------------


class Reader:
    """The store of `pops`: one queue of `log`, whose messages cannot be read as long as there are faults."""

    def __init__(self, root, log: list[Message], faults: list[Exception]) -> None:
        self.root, self.log, self.faults = root, log, faults

    def message_at(self, offset, level):
        if self.faults:
            raise self.faults.pop()
        return self.log[offset]

    def dispatched_offset(self, level):
        return len(self.log)

    def _queue(self, topic, queue_id):
        return SimpleNamespace(max_offset=lambda limit: limit)

    def _fetch(self, topic, queue_id, offset, most, wanted, level):
        found = self.log[offset:offset + most]
        return GetResult(GetStatus.FOUND, found, offset + len(found), 0, len(self.log), [each.queue_offset for each in found])


async def all_others(*but: asyncio.Task) -> None:
    """Wait for the other tasks."""
    while rest := asyncio.all_tasks() - {asyncio.current_task(), *but}:
        await asyncio.gather(*rest)


@pytest.fixture
def pops(tmp_path):
    """A Pops that has put four messages of T in flight for g, whose leases are over; `put` are the retries of which it is told."""
    made = SimpleNamespace(put=[], faults=[], said=[])

    async def give_back(message, back, report):
        if made.faults:
            raise made.faults.pop()
        made.put.append(message.queue_offset)
        return ""

    sent = [Message("T", b"", 0, offset, offset, 100) for offset in range(4)]
    made.reader, made.give_back = Reader(tmp_path, sent, made.faults), give_back
    made.config = TopicConfig("T", 1, 1)
    names = made.names = SimpleNamespace(
        group=lambda name: None, group_or_new=lambda name: asyncio.sleep(0, SubscriptionGroup(name)), topic=lambda name: None,
        recent_topic=lambda name: made.config, recent_topics=dict, why_no_commit="")
    positions = SimpleNamespace(record=lambda message: b"record", is_near_log_end=lambda offset: True)
    pulls = SimpleNamespace(positions=positions, count_gets=lambda topic, group, number: None, is_pulling=lambda group: False,
                            end_of=lambda topic, queue_id: len(made.reader.log),
                            arrivals=SimpleNamespace(serve=lambda check, holds: None, stir=lambda: None))
    offsets = SimpleNamespace(when_rewritten=[], has_room=True, flush=lambda: asyncio.sleep(0))
    executor = TurnExecutor(1, "test")
    made.pops = Pops(made.reader, names, offsets, pulls, lambda *given: made.give_back(*given), executor, made.said.append)
    session = SimpleNamespace(heartbeat=lambda: None, rejoin_if_removed=lambda: False, close=lambda: None, holds=lambda claim: True)
    made.share = Share(session, "T", "g")
    made.queue = PopQueue(0, Claim(0, 1), 4, InFlight(0))
    made.queue.flight.deliver(sent, None)
    made.share.add([made.queue])
    made.known = made.pops.shares.by_group
    made.known["g"] = {"T": made.share}

    def leased(lease: Lease) -> Lease:
        lease.queue.leases[lease.message.queue_offset] = lease
        made.pops.shares.ends.plan(lease, 0.0)
        return lease

    made.leased = leased
    for message in sent:
        leased(Lease(made.share, made.queue, message, 1, 1.0))
    yield made
    executor.shutdown()


@pytest.mark.parametrize("fault", [StoreBusyError("the store is recovered"), OSError(24, "no descriptor"), RuntimeError()])
@pytest.mark.parametrize("times", [1, 2])  # as the messages are read, and as the first one is put
def test_what_fails_for_a_moment_leaves_no_message_in_flight_for_ever(pops, fault, times, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.PUT_AGAIN_S", 0.0)
    pops.faults += [fault] * times

    async def run():
        while pops.queue.flight.open:
            await pops.pops.tick()
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), scaled_timeout_s(30)))
    assert sorted(pops.put) == [0, 1, 2, 3] and not pops.faults and pops.queue.done == 4


def test_no_more_messages_are_read_than_a_pop_may_have_before_the_first_ones_are_put_again(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.POP_BYTES", 200)  # two messages
    putting = []

    async def put_later(message, back, report):
        putting.append((message.queue_offset, asyncio.Event()))
        await putting[-1][1].wait()
        return ""

    pops.give_back = put_later
    queue = pops.share.queues[1] = PopQueue(1, Claim(1, 1), 2, InFlight(0))

    async def run():
        await pops.pops.tick()
        await eventually_put(2)
        message, = queue.flight.deliver([Message("T", b"", 1, 0, 0, 100)], None)
        pops.leased(Lease(pops.share, queue, message, 1, 1.0, is_ordered=True))
        late = pops.leased(Lease(pops.share, queue, replace(message, queue_offset=1), 1, 1.0))
        while 0 in queue.leases:
            await asyncio.sleep(0.01)
            await pops.pops.tick()
        assert list(queue.leases.values()) == [late] and list(queue.flight.again) == [0], "others do not wait for the puts"
        queue.leases.clear()
        for _, is_put in putting[:2]:
            is_put.set()
        await eventually_put(4)
        for _, is_put in putting[2:]:
            is_put.set()

    async def eventually_put(number):
        while len(putting) < number:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(putting) == number

    asyncio.run(asyncio.wait_for(run(), scaled_timeout_s(30)))
    assert [offset for offset, _ in putting] == [0, 1, 2, 3] and pops.queue.done == 4


@pytest.mark.parametrize("keep", ["again", "aside", "lease"])
def test_a_group_whose_messages_no_client_has_pops_no_more_after_a_time(pops, keep):
    messages = list(pops.queue.flight.open.values())
    pops.share.used_s -= POPPING_S + 1
    for message in messages:
        if keep == "again":
            pops.queue.flight.give_back(message)
        elif keep == "aside":
            pops.queue.set_aside(message, "other")
    idle = [share for share, _ in asyncio.run(pops.pops.shares.collect()).idle]
    assert idle == ([] if keep == "lease" else [pops.share])


def test_a_queue_that_is_shorter_after_a_recovery_keeps_nothing_of_before(pops):
    pops.queue.set_aside(pops.queue.flight.open[0], "T")

    async def run():
        pops.pops.shares.end_leases(pops.queue)
        pops.queue.seek(2)
        await pops.pops.tick()

    asyncio.run(run())
    assert not (pops.queue.aside or pops.queue.leases or pops.put) and pops.queue.done == 2


def test_retries_that_wait_for_their_topic_come_to_its_pops_if_no_more_may_wait(pops):
    pops.queue.bounds_max = 2
    messages = list(pops.queue.flight.open.values())
    for message in messages:
        pops.queue.set_aside(message, "T" if message.queue_offset < 2 else "other")

    assert pops.queue.may_have("T", 4, is_ordered=False) and not pops.queue.may_have("none", 5, is_ordered=False)
    answer = asyncio.run(pops.pops.pop(PopOfT()))
    assert answer.fields["msgOffsetInfo"] == "0 0 0,1" and list(pops.queue.aside) == ["other"]


def test_each_queue_has_its_turn_while_retries_wait_too(pops):
    """Both topics have two queues in which as much comes again as a pop takes."""
    pops.names.recent_topics = lambda: {"%RETRY%g": pops.config}
    pops.config = TopicConfig("T", 2, 2)
    retries = Share(pops.share.session, "%RETRY%g", "g")
    pops.known["g"]["%RETRY%g"] = retries
    queues = {}
    for share in (pops.share, retries):
        share.queues.clear()
        for queue_id in range(2):
            queues[share.topic, queue_id] = queue = PopQueue(queue_id, Claim(queue_id, 1), 20, InFlight(0))
            for message in queue.flight.deliver([Message(share.topic, b"", queue_id, at, at, 100) for at in range(20)], None):
                queue.flight.give_back(message)
            share.add([queue])

    async def run():
        for _ in range(20):
            assert (await pops.pops.pop(PopOfT(maxMsgNums=1))).code == codes.SUCCESS

    asyncio.run(run())
    assert {key: len(queue.leases) for key, queue in queues.items()} == dict.fromkeys(queues, 5)


def test_a_group_that_is_reset_during_a_pop_gets_no_message_of_before(pops, monkeypatch):
    pops.reader.log = [*pops.reader.log, Message("T", b"", 0, 4, 4, 100)]
    monkeypatch.setattr(PopQueue, "know_same_history", lambda *given: True)
    read, asked = pops.reader._fetch, PopOfT()

    async def run():
        loop = asyncio.get_running_loop()

        async def reset():
            pops.pops.shares.forget("g")

        def fetch(*given):
            asyncio.run_coroutine_threadsafe(reset(), loop).result()
            return read(*given)

        pops.reader._fetch = fetch
        assert (await pops.pops.pop(asked)).code == codes.POLLING_TIMEOUT
        await all_others()

    asyncio.run(run())
    assert not (asked.answers or pops.queue.leases or pops.pops.shares.in_flight)


class Ruled(Request):
    """A request whose rights the test gives."""

    def __init__(self, rule, frame: Frame) -> None:
        super().__init__(SimpleNamespace(), frame, 0)
        self.rule = rule

    def require(self, topic, right):
        self.rule(topic)


def forbid(topic: str) -> None:
    """The rule of a client that has no right for one topic."""
    refuse_if("no right" if topic == "Secret" else "")


class Peer:
    """A connection, as pops know it."""

    is_closed = False

    def __init__(self, host: str = "10.0.0.7") -> None:
        self.host = host


class PopOfT(Request):
    """A pop of T by the group g, whose answer is taken by a client, or not."""

    def __init__(self, connection=None, *, is_taken: bool = True, **changes: object) -> None:
        fields = {name: str(value) for name, value in pop_fields("T", "g", **changes).items()}
        super().__init__(connection or Peer(), Frame(codes.POP_MESSAGE, fields), 0)
        self.is_taken, self.answers = is_taken, []

    def reply(self, answer):
        self.answers.append(answer)
        is_first, self._is_open = self._is_open, False
        return self.is_taken and is_first


def retries_of(pops, monkeypatch, topics):
    """Let the queue of `pops` be a retry queue with one message of each of these topics, all of them set aside; return its log."""
    log = [Message("%RETRY%g", b"", 0, at, at, 100, f"RETRY_TOPIC\x01{name}\x02") for at, name in enumerate(topics)]
    queue = PopQueue(0, Claim(0, 1), len(log), InFlight(0))
    queue.flight.deliver(log[:], None)
    for message in log[:]:
        queue.set_aside(message, message.properties["RETRY_TOPIC"])
    pops.share.topic, pops.queue = "%RETRY%g", queue
    pops.share.queues = {0: queue}

    async def put_again(message, back, report):
        if pops.faults:
            raise pops.faults.pop()
        log.append(replace(message, queue_offset=len(log), physical_offset=len(log)))
        return "" if back.raw.queue_id == 0 and back.raw.topic == "%RETRY%g" and back.raw.reconsume_times == 0 else "changed"

    pops.reader.log, pops.reader.faults, pops.give_back = log, [], put_again
    monkeypatch.setattr("pyengine.gateway.pop.PUT_AGAIN_S", 0.0)
    return log


def test_retries_that_wait_in_too_many_runs_are_put_again_together_and_none_is_lost(pops, monkeypatch, rng):
    """Of silent topics, between which others were done; some puts fail."""
    topics = [rng.choice("ABC") if rng.random() < 0.8 else "done" for _ in range(4000)]
    log, queue = retries_of(pops, monkeypatch, topics), pops.queue
    for offset, name in enumerate(topics):
        if name == "done":
            queue.bring_back(name, [(offset, offset + 1)], [])
    monkeypatch.setattr("pyengine.gateway.pop_shares.ASIDE_BOUNDS_MAX", 1000)
    assert queue.bounds == sum(map(len, queue.aside.values())) > 1000 and set(queue.aside) == set("ABC")
    pops.faults += [OSError(28, "no space")] * 5

    async def run():
        async with asyncio.timeout(scaled_timeout_s(60)):
            while True:
                await pops.pops.shares.collect()
                assert not queue.room_for_next or queue.bounds < 1000
                await pops.pops.tick()
                await all_others()
                for message in log[queue.position:]:  # as _take_next reads them
                    for each in queue.flight.deliver([message], None):
                        queue.set_aside(each, each.properties["RETRY_TOPIC"])
                queue.position = len(log)
                if not (queue.is_gathering or queue.is_scattered):
                    return

    asyncio.run(run())
    waiting = Counter(log[offset].properties["RETRY_TOPIC"] for runs in queue.aside.values()
                      for start, end in zip(runs[::2], runs[1::2]) for offset in range(start, end))
    assert waiting == Counter(name for name in topics if name != "done") and not queue.flight.open and not pops.faults
    assert queue.bounds == sum(map(len, queue.aside.values())) and "of 3 topics" in pops.said[0]


def test_all_queues_share_the_runs_that_may_wait_and_each_has_some_for_each_of_its_topics(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop_shares.ALL_ASIDE_BOUNDS_MAX", 100)
    retries_of(pops, monkeypatch, "AB" * 10)
    many = PopQueue(1, Claim(1, 1), 30, InFlight(0))
    many.flight.deliver([Message("%RETRY%g", b"", 1, at, at, 100) for at in range(30)], None)
    for at, message in enumerate(list(many.flight.open.values())):
        many.set_aside(message, f"T{at}")
    pops.share.queues[1] = many
    asyncio.run(pops.pops.shares.collect())
    assert [queue.bounds_max for queue in pops.share.queues.values()] == [50, 120]
    assert pops.pops.shares.scattered == [(pops.share, pops.queue)]
    assert many.scattered() == (max(many.aside, key=lambda name: len(many.aside[name])), [])


@pytest.mark.parametrize("name", ["ack", "change_invisible", "make_dead_letter", "ack_batch"])
def test_a_right_for_one_topic_ends_no_retry_of_another(pops, name):
    retry = Share(pops.share.session, "%RETRY%g", "g")
    pops.known["g"]["%RETRY%g"] = retry
    queue = PopQueue(0, None, 1, InFlight(0))
    message, = queue.flight.deliver([Message("%RETRY%g", b"", 0, 0, 0, 100, "RETRY_TOPIC\x01Secret\x02")], None)
    retry.add([queue])
    lease = pops.leased(Lease(retry, queue, message, 7, 1.0))
    body = {"acks": [{"c": "g", "t": "T", "r": "1", "so": 0, "q": 0, "pt": 7, "b": "AQ=="}]}
    fields = {"consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "0", "extraInfo": "0 7 1000 0 1 broker-a 0 0",
              "invisibleTime": "1"}
    request = Ruled(forbid, Frame(0, fields, json.dumps(body).encode()))

    async def ask():
        answer = getattr(pops.pops, name)(request)
        return await answer if name == "make_dead_letter" else answer

    with pytest.raises(RequestRefusedError, match="no right"):
        asyncio.run(ask())
    assert queue.leases == {0: lease} and lease.pop_time_ms == 7


def test_a_group_that_is_forgotten_closes_its_file_after_a_thread_has_claimed_queues_in_it(pops):
    begun, may_end, done = threading.Event(), threading.Event(), []

    def take(queue_ids):
        begun.set()
        assert may_end.wait(scaled_timeout_s(30))
        done.append("taken")
        return {1: (Claim(1, 1), 0, InFlight(0))}

    pops.share.session.take, pops.share.session.close = take, lambda: done.append("closed")
    pops.config = TopicConfig("T", 2, 2)

    async def run():
        claiming = asyncio.create_task(pops.pops.shares.get("g", "T", is_from_last=False))
        await asyncio.to_thread(begun.wait)
        pops.pops.shares.forget("g")
        pops.names.why_no_commit = "it may not be opened again"
        may_end.set()
        with pytest.raises(UsageError, match="it may not be opened again"):
            await claiming

    asyncio.run(run())
    assert done == ["taken", "closed"] and not pops.share.queues


def test_a_reset_while_a_group_begins_to_pop_counts(pops, tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def begin(start):
        begun.set()
        assert may_end.wait(scaled_timeout_s(30))

    session = SimpleNamespace(begin=begin, close=lambda: None, take=lambda queue_ids: {0: (Claim(0, 1), 0, InFlight(0))})
    monkeypatch.setattr("pyengine.gateway.pop_shares.GroupSession", lambda *given, **more: session)
    executor = TurnExecutor(2, "test")
    offsets = GroupOffsets(pops.reader, executor)
    shares = Shares(pops.reader, pops.names, offsets, SimpleNamespace(), executor, set)
    offsets.when_rewritten.append(shares.forget)

    async def run():
        opening = asyncio.create_task(shares.get("new", "T", is_from_last=False))
        await asyncio.to_thread(begun.wait)
        reset = asyncio.create_task(offsets.rewrite(lambda table: None, "new"))
        await asyncio.wait([reset], timeout=0.2)
        may_end.set()
        await asyncio.gather(opening, reset)

    asyncio.run(run())
    executor.shutdown()
    assert shares.find("new", "T") is None


@pytest.mark.parametrize("name", ["ack", "change_invisible", "ack_batch"])
def test_nothing_is_acknowledged_from_the_moment_in_which_a_master_is_replaced(pops, name):
    pops.names.why_no_commit = "another master has replaced this one"
    body = {"acks": [{"c": "g", "t": "T", "r": "0", "so": 0, "q": 0, "pt": 1, "b": "AQ=="}]}
    fields = {"consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "0", "extraInfo": "0 1 1000 0 0 broker-a 0 0",
              "invisibleTime": "1"}
    try:
        answer = getattr(pops.pops, name)(Ruled(lambda topic: None, Frame(0, fields, json.dumps(body).encode())))
    except RequestRefusedError as refused:
        answer = refused.answer
    assert answer == Answer(codes.NO_MESSAGE, "another master has replaced this one") and pops.queue.leases[0].pop_time_ms == 1
    asyncio.run(pops.pops.tick())
    assert not any(pops.pops.shares) and not pops.put


@pytest.mark.parametrize("work", ["collect", "left", "tick"])
def test_others_come_between_the_looks_at_what_is_in_flight(pops, work, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.ENDS_OF_TICK", 1)
    owner = SimpleNamespace(is_closed=False)
    pops.queue.leases.clear()
    pops.share.queues = {number: PopQueue(number, Claim(number, 1), 4, InFlight(0)) for number in range(8)}
    for queue in pops.share.queues.values():
        message, = queue.flight.deliver([Message("T", b"", queue.queue_id, 0, 0, 100)], None)
        pops.leased(Lease(pops.share, queue, message, 1, 60.0, owner=owner))
    turns = 0

    async def run():
        async def others():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(others())
        if work == "left":
            pops.pops.left(owner, "g")
            await all_others(counting)
        else:
            await (pops.pops.shares.collect() if work == "collect" else pops.pops.tick())
        counting.cancel()

    asyncio.run(run())
    assert turns >= 7


def test_a_group_that_is_forgotten_while_others_are_saved_fails_no_save(pops):
    def heartbeat():
        raise ValueError("the members' file is closed")

    other = Share(SimpleNamespace(heartbeat=heartbeat, close=lambda: None), "T", "other")
    pops.known["other"] = {"T": other}

    async def run():
        asyncio.get_running_loop().call_soon(pops.pops.shares.forget, "other")
        return await pops.pops.shares.collect()

    assert [share for share, *_ in asyncio.run(run()).rows] == [pops.share]


def test_messages_of_a_pop_whose_answer_is_not_taken_go_to_the_next_one_and_are_not_counted(pops):
    messages = list(pops.queue.flight.open.values())
    pops.queue.leases.clear()
    lost, held = PopOfT(is_taken=False), PopOfT(pollTime=60_000)

    async def run():
        assert await pops.pops.pop(held) is None and not held.answers
        pops.queue.flight.take_back(messages)
        assert await pops.pops.pop(lost) == Answer()
        assert not pops.queue.leases and not pops.pops.shares.in_flight and list(pops.queue.flight.again) == [0, 1, 2, 3]
        await all_others()

    asyncio.run(run())
    assert [answer.body for answer in (*lost.answers, held.answers[0])] == [b"record" * 4] * 2
    assert [lease.message.delivery_count for lease in pops.queue.leases.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("is_held", [True, False])  # or has not looked for messages yet
def test_a_pop_for_which_no_client_waits_any_more_takes_nothing(pops, is_held):
    messages = list(pops.queue.flight.open.values())
    pops.queue.leases.clear()
    connection = Peer()
    ended, other = (PopOfT(connection, pollTime=60_000, number=number) for number in (1, 2))

    async def run():
        if not is_held:
            pops.queue.flight.take_back(messages)
        pop = asyncio.create_task(pops.pops.pop(ended))
        if is_held:
            await pop
        for number in (1, 3):  # of which none is known
            pops.pops.cancel(Request(connection, Frame(codes.CANCEL_POP, {"number": str(number)}), 0))
        if is_held:
            pops.queue.flight.take_back(messages)
        await asyncio.gather(pop, pops.pops.pop(other))

    asyncio.run(run())
    assert ended.answers[0].code == codes.POLLING_TIMEOUT and other.answers[0].body == b"record" * 4
    assert [lease.message.delivery_count for lease in pops.queue.leases.values()] == [1, 1, 1, 1]


class Parsed(SqlFilter):
    """A condition that can be watched."""


class ParsedTags(frozenset):
    """Tags that can be watched."""


@pytest.mark.parametrize("kind, text", [("SQL92", "a > 1"), ("TAG", "a || " * (SHORT_CHARS // 4))], ids=["condition", "many tags"])
def test_what_a_held_pop_is_to_find_is_parsed_in_another_thread_and_not_kept(pops, monkeypatch, kind, text):
    """A condition of 64 KB takes a tenth of a second, and several MB for as long as its pop is held."""
    threads, parsed = [], []

    def noted(made, found):
        threads.append(threading.current_thread())
        parsed.append(weakref.ref(found))
        return made

    def tags(given):
        found = ParsedTags(given)
        return noted(TagFilter(found, b""), found)

    monkeypatch.setattr(members, "parse_condition", lambda text, **rest: noted(found := Parsed(text, **rest), found))
    monkeypatch.setattr(members, "filter_by_tags", tags)
    asked = [PopOfT(pollTime=60_000, expType=kind, exp=text) for _ in range(2)]

    async def run():
        assert await pops.pops.pop(asked[0]) is None
        pops.reader.log = [*pops.reader.log, Message("T", b"", 0, 4, 4, 100)]
        while not asked[0].answers:
            pops.pops.give_back(Request(Peer(), Frame(codes.GIVE_BACK, {
                "consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "3", "extraInfo": "3 1 1000 0 0 broker-a 0 3"}), 0))
            await asyncio.sleep(0.001)
        before = len(parsed)
        pops.reader.log = [*pops.reader.log, Message("T", b"", 0, 5, 5, 100)]
        assert (await pops.pops.pop(asked[1])).body == b"record" and len(parsed) > before, "it is parsed where it is read"

    asyncio.run(run())
    assert threading.current_thread() not in threads
    eventually(lambda: all(found() is None for found in parsed), "nothing is kept")


def test_a_pop_is_held_without_a_look_for_the_others_of_its_topic(pops, monkeypatch):
    """Otherwise each one takes longer than the one before."""
    looks, numbers = [], []
    may_have = PopQueue.may_have
    monkeypatch.setattr(PopQueue, "may_have", lambda *given, **rest: looks.append(given) or may_have(*given, **rest))

    async def run():
        for number in range(10):
            assert await pops.pops.pop(PopOfT(pollTime=60_000, exp=f"tag{number}")) is None
            numbers.append(len(looks))
            looks.clear()

    asyncio.run(run())
    assert numbers == [1] * 10


def test_the_held_pops_of_one_host_leave_room_for_those_of_others(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.HELD_MAX", 4)

    async def run():
        async def answer(host):
            return await pops.pops.pop(PopOfT(Peer(host), pollTime=60_000))

        assert [await answer("10.0.0.7") for _ in range(2)] == [None, None]
        assert (await answer("10.0.0.7")).code == codes.POLLING_FULL
        assert [await answer("10.0.0.8") for _ in range(2)] == [None, None]

    asyncio.run(run())


def test_what_all_groups_have_in_flight_has_a_limit(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.ALL_IN_FLIGHT_MAX", 4)
    pops.reader.log = [*pops.reader.log, Message("T", b"", 0, 4, 4, 100)]
    asyncio.run(pops.pops.shares.collect())
    assert asyncio.run(pops.pops.pop(PopOfT())).code == codes.POLLING_TIMEOUT
    handle = {"consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "3", "extraInfo": "3 1 1000 0 0 broker-a 0 3"}
    assert pops.pops.ack(Ruled(lambda topic: None, Frame(codes.ACK_MESSAGE, handle))) == Answer()
    assert asyncio.run(pops.pops.pop(PopOfT())).body == b"record"  # at once, not after the next note


def test_groups_pop_from_so_many_topics_at_most(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop_shares.SHARES_MAX", 2)
    pops.known["other"] = {"T": pops.share}
    with pytest.raises(UsageError, match="groups pop from 2 topics already"):
        asyncio.run(pops.pops.shares.get("a third", "T", is_from_last=False))
