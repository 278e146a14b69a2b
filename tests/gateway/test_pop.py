"""POP: messages taken from any queue, acknowledged in any order, delivered again, and given up."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pyengine
from fix_cli import run
from fix_gateway import heartbeat, pull_fields, send_fields, start_served, subscription
from fix_pop import Popped, ack, pop, pop_fields, popped
from pyengine.errors import StoreBusyError, UsageError
from pyengine.formats.record import Message
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Request, TurnExecutor
from pyengine.gateway.pop import ACKED_MAX, EXPIRED, IN_FLIGHT_MAX, POP_BYTES, POPPING_S, Asked, Lease, PopQueue, Pops, Share, Taken
from pyengine.gateway.positions import FLUSH_S
from pyengine.gateway.wire import Frame
from pyengine.ipc.group_members import Claim
from pyengine.storage.acknowledgements import AckFile, InFlight
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from pyengine.storage.consumer_offset import ConsumerOffsets
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
    "a long filter": ({"exp": "a || " * 2000}, codes.SUBSCRIPTION_PARSE_FAILED),
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
        files = [served.root / "config" / name for name in ("consumerOffset.json", "consumers/acks/T@g")]
        before = [path.read_bytes() for path in files]
        held = other.send(codes.POP_MESSAGE, pop_fields("T", "g", pollTime=60_000))
        assert ack(client, found[1]) == codes.SUCCESS and other.is_silent()
        ReplicationStateFile(served.root).write(ReplicationState("ASYNC_MASTER", 0, term=1, fenced_by=2))
        refused = client.ask(codes.UPDATE_CONSUMER_OFFSET, kept | {"commitOffset": 2})
        assert refused.code == codes.NO_PERMISSION and "a master of a higher term" in refused.remark
        copied = {"srcGroup": "pulling", "destGroup": "copy", "topic": "T", "offline": "true"}
        for refused in client.ask(codes.POP_MESSAGE, pop_fields("T", "g")), client.ask(codes.CLONE_GROUP_OFFSET, copied):
            assert refused.code == codes.NO_PERMISSION and "a master of a higher term" in refused.remark
        assert "a master of a higher term" in other.wait(held).remark
        assert ack(client, found[2]) == codes.NO_MESSAGE
        served.engine.stop()
        assert [path.read_bytes() for path in files] == before
    finally:
        served.close()


def test_groups_status_and_metrics_show_what_is_in_flight(served, topic, group):
    client = served.broker()
    put(client, topic, b"a", b"b", queue_id=2)
    pop_all(client, topic, group, 3, invisibleTime=1)
    found = pop_all(client, topic, group, 3)
    assert ack(client, found[0]) == codes.SUCCESS
    now_ms = time.time_ns() // 1_000_000

    def row():
        return next((row for row in run("status", served.root, "--json").document["pops"] if row["group"] == group), None)

    retry = f"%RETRY%{group}"
    shown = eventually(lambda: (one := row()) and one["in_flight"] == 2 and one, "status has them")
    assert (shown["topic"], shown["attempts"]) == (retry, 2) and 0 < shown["invisible_until_ms"] - now_ms < 300_000
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
    eventually(lambda: row() is None, "nothing is in flight")


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
    pop_all(client, other, group, 10, invisibleTime=1)
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


@pytest.fixture
def pops(tmp_path):
    """A Pops that has put four messages of T in flight for g, whose leases are over; `put` are the retries of which it is told."""
    made = SimpleNamespace(put=[], faults=[], time_s=0.0)

    def message_at(offset, level):
        if made.faults:
            raise made.faults.pop()
        return replace(sent[offset], raw_properties="")

    async def give_back(message, back, report, then):
        if made.faults:
            raise made.faults.pop()
        made.put.append(message.queue_offset)
        then("")

    sent = [Message("T", b"", 0, offset, offset, 100) for offset in range(4)]
    names = SimpleNamespace(group=lambda name: None, topic=lambda name: None, recent_topics=dict, why_no_commit="")
    positions = SimpleNamespace(record=lambda message: b"record", is_near_log_end=lambda offset: True)
    pulls = SimpleNamespace(positions=positions, count_gets=lambda topic, group, number: None,
                            arrivals=SimpleNamespace(serve=lambda check, holds: None))
    offsets = SimpleNamespace(when_rewritten=[], has_room=True)
    executor = TurnExecutor(1, "test")
    made.pops = Pops(SimpleNamespace(root=tmp_path, message_at=message_at), names, offsets, pulls, give_back, executor, lambda text: None)
    session = SimpleNamespace(heartbeat=lambda: None, rejoin_if_removed=lambda: False, close=lambda: None)
    made.share = Share(session, "T", "g")
    made.queue = PopQueue(0, None, 4, InFlight(0))
    made.queue.flight.deliver(sent, None)
    made.share.add([made.queue])
    made.pops.shares._by_group["g"] = {"T": made.share}
    for message in sent:
        made.queue.leases[message.queue_offset] = lease = Lease(made.share, made.queue, message, 1, 1.0)
        made.pops._ends.plan(lease, 0.0)
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


@pytest.mark.parametrize("keep", ["again", "aside", "lease"])
def test_a_group_whose_messages_no_client_has_pops_no_more_after_a_time(pops, keep):
    messages = list(pops.queue.flight.open.values())
    pops.share.used_s -= POPPING_S + 1
    pops.queue.claim = Claim(0, 1)
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
        pops.pops._end_leases(pops.queue)
        pops.queue.seek(2)
        await pops.pops.tick()

    asyncio.run(run())
    assert not (pops.queue.aside or pops.queue.leases or pops.put) and pops.queue.done == 2


def test_retries_that_wait_for_their_topic_come_to_its_pops_if_no_more_may_wait(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.ASIDE_BOUNDS_MAX", 2)
    messages = list(pops.queue.flight.open.values())
    for message in messages:
        pops.queue.set_aside(message, "T" if message.queue_offset < 2 else "other")

    def read(topic, queue_id, offset, most, wanted):
        found = messages[offset:offset + most]
        return SimpleNamespace(next_begin_offset=offset + len(found), _placed=lambda queue_id: found), [b"record"] * len(found)

    monkeypatch.setattr(pops.pops, "_read", read)
    assert pops.queue.may_have("T", 4, is_ordered=False) and not pops.queue.may_have("none", 5, is_ordered=False)
    taken = []
    assert asyncio.run(pops.pops._take_aside(pops.share, pops.queue, asked(pops, "T", "g"), taken))
    assert [each.message.queue_offset for each in taken] == [0, 1] and list(pops.queue.aside) == ["other"]


@pytest.mark.parametrize("name", ["ack", "change_invisible", "make_dead_letter", "ack_batch"])
def test_a_right_for_one_topic_ends_no_retry_of_another(pops, name):
    retry = Share(pops.share.session, "%RETRY%g", "g")
    pops.pops.shares._by_group["g"]["%RETRY%g"] = retry
    queue = PopQueue(0, None, 1, InFlight(0))
    message, = queue.flight.deliver([Message("%RETRY%g", b"", 0, 0, 0, 100, "RETRY_TOPIC\x01Secret\x02")], None)
    retry.add([queue])
    queue.leases[0] = lease = Lease(retry, queue, message, 7, 1.0)
    pops.pops._ends.plan(lease, 0.0)
    body = {"acks": [{"c": "g", "t": "T", "r": "1", "so": 0, "q": 0, "pt": 7, "b": "AQ=="}]}
    fields = {"consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "0", "extraInfo": "0 7 1000 0 1 broker-a 0 0",
              "invisibleTime": "1"}
    rights = SimpleNamespace(rights=lambda request, topic, right: Answer(1, "no right") if topic == "Secret" else None)
    request = Request(rights, Frame(0, fields, json.dumps(body).encode()), 0)

    async def ask():
        answer = getattr(pops.pops, name)(request)
        return await answer if name == "make_dead_letter" else answer

    assert asyncio.run(ask()).remark == "no right" and queue.leases == {0: lease} and lease.pop_time_ms == 7


def test_a_group_that_is_forgotten_closes_its_file_after_a_thread_has_claimed_queues_in_it(pops):
    begun, may_end, done = threading.Event(), threading.Event(), []

    def take(queue_ids):
        begun.set()
        assert may_end.wait(scaled_timeout_s(30))
        done.append("taken")
        return {1: (Claim(1, 1), 0, InFlight(0))}

    pops.share.session.take, pops.share.session.close = take, lambda: done.append("closed")
    pops.pops._names.recent_topic = lambda topic: SimpleNamespace(read_queue_nums=2)

    async def run():
        claiming = asyncio.create_task(pops.pops.shares._claim(pops.share, 2))
        await asyncio.to_thread(begun.wait)
        pops.pops.shares.forget("g")
        may_end.set()
        await claiming

    asyncio.run(run())
    assert done == ["taken", "closed"] and not pops.share.queues


@pytest.mark.parametrize("name", ["ack", "change_invisible", "ack_batch"])
def test_nothing_is_acknowledged_from_the_moment_in_which_a_master_is_replaced(pops, name):
    pops.pops._names.why_no_commit = "another master has replaced this one"
    body = {"acks": [{"c": "g", "t": "T", "r": "0", "so": 0, "q": 0, "pt": 1, "b": "AQ=="}]}
    fields = {"consumerGroup": "g", "topic": "T", "queueId": "0", "offset": "0", "extraInfo": "0 1 1000 0 0 broker-a 0 0",
              "invisibleTime": "1"}
    rights = SimpleNamespace(rights=lambda request, topic, right: None)
    answer = getattr(pops.pops, name)(Request(rights, Frame(0, fields, json.dumps(body).encode()), 0))
    assert answer == Answer(codes.NO_MESSAGE, "another master has replaced this one") and pops.queue.leases[0].pop_time_ms == 1
    asyncio.run(pops.pops.tick())
    assert not any(pops.pops.shares) and not pops.put


@pytest.mark.parametrize("work", ["collect", "left", "tick"])
def test_others_come_between_the_looks_at_what_is_in_flight(pops, work, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.SLICE_S", 0.0)
    monkeypatch.setattr("pyengine.gateway.pop.ENDS_OF_TICK", 1)
    owner = SimpleNamespace(is_closed=False)
    pops.queue.leases.clear()
    pops.share.queues = {number: PopQueue(number, Claim(number, 1), 4, InFlight(0)) for number in range(8)}
    for queue in pops.share.queues.values():
        message, = queue.flight.deliver([Message("T", b"", queue.queue_id, 0, 0, 100)], None)
        queue.leases[0] = lease = Lease(pops.share, queue, message, 1, 60.0, owner=owner)
        pops.pops._ends.plan(lease, 0.0)
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
            await asyncio.gather(*pops.pops._tasks)
        else:
            await (pops.pops.shares.collect() if work == "collect" else pops.pops.tick())
        counting.cancel()

    asyncio.run(run())
    assert turns >= 7


def test_a_group_that_is_forgotten_while_others_are_saved_fails_no_save(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.SLICE_S", 0.0)
    pops.queue.claim = Claim(0, 1)

    def heartbeat():
        raise ValueError("the members' file is closed")

    other = Share(SimpleNamespace(heartbeat=heartbeat, close=lambda: None), "T", "other")
    pops.pops.shares._by_group["other"] = {"T": other}

    async def run():
        asyncio.get_running_loop().call_soon(pops.pops.shares.forget, "other")
        return await pops.pops.shares.collect()

    assert [share for share, *_ in asyncio.run(run()).rows] == [pops.share]


def asked(pops, topic, group):
    return Asked(SimpleNamespace(is_open=True, connection=None), group, topic, -1, 32, 1000, 0.0)


def test_what_all_groups_have_in_flight_has_a_limit(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.ALL_IN_FLIGHT_MAX", 4)
    monkeypatch.setattr(pops.pops.shares, "get", lambda asked, topic: asyncio.sleep(0, pops.share))
    pops.queue.claim = Claim(0, 1)
    asyncio.run(pops.pops.shares.collect())
    assert asyncio.run(pops.pops._take(asked(pops, "T", "g"))) is None
    pops.queue.acknowledge(pops.queue.flight.open[3])
    asyncio.run(pops.pops.shares.collect())
    pops.queue.position = 3  # as if one more message had come

    async def take_one(share, asked, taken):
        taken.append(Taken(pops.queue, pops.share, pops.queue.flight.open[2], b"record"))

    monkeypatch.setattr(pops.pops, "_take_from", take_one)
    monkeypatch.setattr(pops.pops, "_end_of", lambda topic, queue_id: 4)
    assert asyncio.run(pops.pops._take(asked(pops, "T", "g"))).body == b"record"


def test_groups_pop_from_so_many_topics_at_most(pops, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pop.SHARES_MAX", 2)
    pops.pops.shares._by_group["other"] = {"T": pops.share}
    with pytest.raises(UsageError, match="groups pop from 2 topics already"):
        asyncio.run(pops.pops.shares.get(asked(pops, "T", "a third"), "T"))
