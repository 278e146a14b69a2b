"""Clients of RocketMQ 5: routes, members, sends, receipts and transactions by gRPC, with the worker's own classes."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
import zlib

import psutil
import pytest

import pyengine
from fix_grpc import FakeGateway, GrpcRig
from grpc_caller import V2, duration, message
from pyengine.formats.record import decompress_body, encode_host
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Limits, host_of
from pyengine.gateway.grpc_clients import GrpcClients, address_of
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from record_bytes import encode_record
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def topic(request, grpc_store):
    """A topic of the test's own, with four queues."""
    return grpc_store.make_topic("T_" + "".join(sign if sign.isalnum() else "_" for sign in request.node.name)[:100])


def stored(root, topic: str) -> list:
    with pyengine.open_store(root) as store:
        return [each for queue_id in store.topics().get(topic, ()) for each in store.get_message(topic, queue_id, 0).messages]


# ---- routes and members ----------------------------------------------------------------


def test_a_route_has_the_queues_at_the_address_that_the_client_used(grpc_store, topic):
    mine = V2.Endpoints(scheme=V2.DOMAIN_NAME, addresses=[V2.Address(host="log.example.com", port=4711)])
    answer = grpc_store.caller().QueryRoute(topic=V2.Resource(name=topic), endpoints=mine)
    assert answer.status.code == V2.OK and [queue.id for queue in answer.message_queues] == [0, 1, 2, 3]
    for queue in answer.message_queues:
        assert queue.topic.name == topic and queue.permission == V2.READ_WRITE and queue.broker.endpoints == mine
        assert list(queue.accept_message_types) == [V2.NORMAL, V2.FIFO, V2.DELAY, V2.TRANSACTION]


def test_without_an_address_a_route_has_that_of_the_port(grpc_store, topic):
    queue = grpc_store.caller().QueryRoute(topic=V2.Resource(name=topic)).message_queues[0]
    assert queue.broker.endpoints == V2.Endpoints(scheme=V2.IPv4, addresses=[V2.Address(host="127.0.0.1", port=grpc_store.grpc_port)])


@pytest.mark.parametrize("name, code", [("no_such_topic", V2.TOPIC_NOT_FOUND), ("a b", V2.ILLEGAL_TOPIC), ("", V2.ILLEGAL_TOPIC)])
def test_a_route_of_no_topic_is_refused(grpc_store, name, code):
    assert grpc_store.caller().QueryRoute(topic=V2.Resource(name=name)).status.code == code


def test_a_call_without_a_client_id_is_refused(grpc_store, topic):
    caller = grpc_store.caller()
    caller.metadata = []
    assert caller.QueryRoute(topic=V2.Resource(name=topic)).status.code == V2.CLIENT_ID_REQUIRED


def test_a_producer_s_settings_are_answered_with_limits_and_backoff(grpc_store, topic):
    told = grpc_store.caller().settings(client_type=V2.PRODUCER, publishing=V2.Publishing(topics=[V2.Resource(name=topic)]))
    assert told.status.code == V2.OK and told.settings.publishing.max_body_size == 4 << 20
    backoff = told.settings.backoff_policy
    assert backoff.max_attempts == 3 and backoff.exponential_backoff.initial.nanos == 10_000_000


def test_a_consumer_s_settings_make_its_group_and_its_client_a_member(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    told = caller.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(
        group=V2.Resource(name=group), subscriptions=[V2.SubscriptionEntry(topic=V2.Resource(name=topic))]))
    assert told.status.code == V2.OK and not told.settings.subscription.fifo and told.settings.subscription.receive_batch_size == 32
    assert told.settings.backoff_policy.max_attempts == 17
    assert [each.seconds for each in told.settings.backoff_policy.customized_backoff.next][:4] == [1, 5, 10, 30]
    members = grpc_store.broker().ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    assert members.body == b'{"consumerIdList":["%s"]}' % caller.client_id.encode()
    assert caller.Heartbeat(group=V2.Resource(name=group), client_type=V2.PUSH_CONSUMER).status.code == V2.OK
    assert caller.NotifyClientTermination(group=V2.Resource(name=group)).status.code == V2.OK
    assert caller.told.get(timeout=30) is None  # the server has ended the stream
    eventually(lambda: grpc_store.broker().ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}).code == codes.SYSTEM_ERROR,
               "it is no member any more")


def test_node_gets_the_kind_of_backoff_that_it_knows(grpc_store, topic):
    told = grpc_store.caller().settings(client_type=V2.PUSH_CONSUMER, user_agent=V2.UA(language=V2.NODE_JS), subscription=V2.Subscription(
        group=V2.Resource(name=f"G_{topic}")))
    backoff = told.settings.backoff_policy
    assert (backoff.max_attempts, backoff.WhichOneof("strategy")) == (17, "exponential_backoff")
    assert (backoff.exponential_backoff.initial.seconds, backoff.exponential_backoff.max.seconds) == (1000, 7_200_000)  # as ms


@pytest.mark.ci
def test_a_half_closed_stream_is_ended_and_its_client_left_out(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    caller.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(group=V2.Resource(name=group)))
    caller.end_stream()
    broker = grpc_store.broker()
    eventually(lambda: broker.ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}).code == codes.SYSTEM_ERROR,
               "it is no member any more")


def test_an_assignment_is_any_queue(grpc_store, topic):
    answer = grpc_store.caller().QueryAssignment(topic=V2.Resource(name=topic), group=V2.Resource(name="some"))
    assert answer.status.code == V2.OK and [each.message_queue.id for each in answer.assignments] == [-1]


@pytest.mark.parametrize("of_resource, of_call", [("tenant", "tenant"), ("tenant", ""), ("", "tenant")])
def test_a_namespace_counts_if_a_name_or_the_call_has_it(grpc_store, of_resource, of_call):
    grpc_store.make_topic("tenant%orders_of_many", 1)
    names = V2.Resource(name="orders_of_many", resource_namespace=of_resource), V2.Resource(name="readers", resource_namespace=of_resource)
    caller = grpc_store.caller(metadata={"x-mq-namespace": of_call})
    assert caller.QueryRoute(topic=names[0]).status.code == V2.OK
    sent = message("", b"body")
    sent.topic.CopyFrom(names[0])
    assert caller.SendMessage(messages=[sent]).status.code == V2.OK
    found: list = []

    def has_come() -> list:
        found.extend(each.message for each in caller.ReceiveMessage(
            group=names[1], message_queue=V2.MessageQueue(topic=names[0], id=-1), batch_size=32, invisible_duration=duration(30),
            long_polling_timeout=duration(1)) if each.HasField("message"))
        return found

    one, = eventually(has_come, "it comes")
    assert one.topic == names[0]
    assert caller.AckMessage(group=names[1], topic=names[0], entries=[V2.AckMessageEntry(
        receipt_handle=one.system_properties.receipt_handle)]).status.code == V2.OK


def test_a_topic_without_a_readable_queue_is_assigned_to_nobody(grpc_store):
    TopicConfigs(grpc_store.root).ensure(TopicConfig("unreadable", perm=2))
    answer = grpc_store.caller().QueryAssignment(topic=V2.Resource(name="unreadable"), group=V2.Resource(name="some"))
    assert answer.status.code == V2.FORBIDDEN and not answer.assignments


@pytest.mark.parametrize("name", ["PullMessage", "UpdateOffset", "GetOffset", "QueryOffset"])
def test_what_no_client_calls_is_not_implemented(grpc_store, name):
    answer = getattr(grpc_store.caller(), name)()
    assert (next(answer) if name == "PullMessage" else answer).status.code == V2.NOT_IMPLEMENTED


# ---- sends -----------------------------------------------------------------------------


def test_a_message_is_stored_with_what_the_client_gave(grpc_store, topic):
    entry = grpc_store.caller().send(topic, b"body", message_id="ID1", tag="paid", keys=["k1", "k2"], user_properties={"n": "1"})
    assert (entry.status.code, entry.message_id, entry.transaction_id, entry.offset) == (V2.OK, "ID1", "ID1", 0)
    eventually(lambda: stored(grpc_store.root, topic), "it can be read")
    found, = stored(grpc_store.root, topic)
    assert (found.body, found.tags, found.keys, found.uniq_key, found.properties["n"]) == (b"body", "paid", "k1 k2", "ID1", "1")
    assert found.born_host.startswith("127.0.0.1:") and not found.born_host.endswith(":0")  # the client's own address


def test_sends_go_round_the_queues_and_a_message_group_stays_in_one(grpc_store, topic):
    caller = grpc_store.caller()
    for _ in range(8):
        assert caller.send(topic, b"any").status.code == V2.OK
    entries = [caller.send(topic, b"%d" % at, message_type=V2.FIFO, message_group="g1") for at in range(6)]
    assert all(entry.status.code == V2.OK for entry in entries)
    eventually(lambda: len(stored(grpc_store.root, topic)) == 14, "they can be read")
    found = stored(grpc_store.root, topic)
    ordered = [each for each in found if each.properties.get("__SHARDINGKEY") == "g1"]
    assert {each.queue_id for each in found} == {0, 1, 2, 3}
    assert len({each.queue_id for each in ordered}) == 1 and [each.body for each in ordered] == [b"%d" % at for at in range(6)]


def test_each_message_of_a_request_has_its_own_status(grpc_store, topic):
    answer = grpc_store.caller().SendMessage(messages=[message(topic, b"good"), message("no_such_topic", b"x"), message(topic, b"")])
    assert answer.status.code == V2.MULTIPLE_RESULTS
    assert [entry.status.code for entry in answer.entries] == [V2.OK, V2.TOPIC_NOT_FOUND, V2.MESSAGE_BODY_EMPTY]
    assert grpc_store.caller().SendMessage().status.code == V2.BAD_REQUEST


def test_a_topic_of_one_type_takes_no_message_of_another(grpc_store, topic):
    TopicConfigs(grpc_store.root).ensure(TopicConfig(f"{topic}_o"[-100:], more={"attributes": {"message.type": "FIFO"}}))
    caller, name = grpc_store.caller(), f"{topic}_o"[-100:]
    route = caller.QueryRoute(topic=V2.Resource(name=name))
    assert list(route.message_queues[0].accept_message_types) == [V2.FIFO]
    settings = caller.settings(client_type=V2.PRODUCER, publishing=V2.Publishing(topics=[V2.Resource(name=name)])).settings
    assert settings.publishing.validate_message_type  # by the client, as it is told by RocketMQ's proxy
    refused = caller.send(name, b"x").status
    assert refused.code == V2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE and "takes no NORMAL message" in refused.message
    assert caller.send(name, b"x", message_type=V2.TRANSACTION).status.code == V2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    assert caller.send(name, b"x", message_type=V2.FIFO, message_group="g").status.code == V2.OK


def test_consumers_see_the_host_that_the_producer_named(grpc_store, topic):
    caller = grpc_store.caller()
    for host in ("shop-7", "", "x" * 300):
        assert caller.send(topic, host.encode() or b"none", born_host=host).status.code == V2.OK
    found: list = []
    eventually(lambda: len(found) == 3 or found.extend(caller.receive(topic, f"G_{topic}")[0]), "they come")
    assert {each.body[:6]: each.system_properties.born_host for each in found} == {
        b"shop-7": "shop-7", b"none": "127.0.0.1", b"xxxxxx": "127.0.0.1"}


def test_properties_beyond_the_store_s_limit_are_refused(grpc_store, topic):
    for text in ("x" * 33_000, "\u00fc" * 17_000, '"' * 1_000_000):
        entry = grpc_store.caller().send(topic, b"x", user_properties={"n": text})
        assert entry.status.code == V2.MESSAGE_PROPERTIES_TOO_LARGE
    late = message(topic, b"x", message_type=V2.DELAY, user_properties={"n": "x" * 32_650})  # room for its own, not for those of the delay
    late.system_properties.delivery_timestamp.seconds = int(time.time()) + 3
    assert grpc_store.caller().SendMessage(messages=[late]).status.code == V2.MESSAGE_PROPERTIES_TOO_LARGE


def test_a_giant_message_is_refused_and_the_client_goes_on(grpc_store, topic):
    import grpc

    caller = grpc_store.caller()
    for size_bytes, why in ((5 << 20, "max_message_size_bytes"), (2 << 20, "mapped_file_size_commit_log_bytes")):
        status = caller.send(topic, bytes(size_bytes), user_properties={"n": "x" * 30_000}).status
        assert status.code == V2.MESSAGE_BODY_TOO_LARGE and why in status.message
    with pytest.raises(grpc.RpcError) as refused:
        caller.send(topic, bytes(17 << 20))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caller.send(topic, b"small").status.code == V2.OK


def test_bytes_that_are_no_message_harm_nobody(grpc_store, topic):
    import grpc

    caller = grpc_store.caller()
    raw = caller.channel.unary_unary(f"/{V2.service}/SendMessage")
    with pytest.raises(grpc.RpcError) as refused:
        raw(b"\xff" * 100, metadata=caller.metadata, timeout=30)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        caller.channel.unary_unary(f"/{V2.service}/Nothing")(b"", metadata=caller.metadata, timeout=30)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caller.send(topic, b"small").status.code == V2.OK


def test_a_delayed_message_comes_at_its_time(grpc_store, topic):
    sent = message(topic, b"late", message_type=V2.DELAY)
    sent.system_properties.delivery_timestamp.seconds = due_s = int(time.time()) + 3
    assert grpc_store.caller().SendMessage(messages=[sent]).status.code == V2.OK
    eventually(lambda: stored(grpc_store.root, topic), "it is delivered")
    assert stored(grpc_store.root, topic)[0].store_timestamp_ms >= due_s * 1000


def test_a_delayed_message_is_recalled_by_its_handle_until_it_is_due(grpc_store, topic):
    caller = grpc_store.caller()
    sent = [message(topic, body, message_type=V2.DELAY) for body in (b"recalled", b"late")]
    for each in sent:
        each.system_properties.delivery_timestamp.seconds = int(time.time()) + 4
    first, second = [caller.SendMessage(messages=[each]).entries[0] for each in sent]
    answer = caller.RecallMessage(topic=V2.Resource(name=topic), recall_handle=first.recall_handle)
    assert (answer.status.code, answer.message_id) == (V2.OK, first.message_id)
    for handle, name in (("x", topic), (second.recall_handle, "another")):
        assert caller.RecallMessage(topic=V2.Resource(name=name), recall_handle=handle).status.code == V2.BAD_REQUEST
    eventually(lambda: [each.body for each in stored(grpc_store.root, topic)] == [b"late"], "the other is delivered")
    assert caller.RecallMessage(topic=V2.Resource(name=topic), recall_handle=second.recall_handle).status.code == V2.INTERNAL_SERVER_ERROR


# ---- receipts --------------------------------------------------------------------------


def bodies(messages) -> list[bytes]:
    return sorted(each.body for each in messages)


def test_a_message_is_received_acknowledged_and_gone(grpc_store, topic):
    caller = grpc_store.caller()
    for at in range(3):
        caller.send(topic, b"%d" % at, tag="t", keys=["k"], user_properties={"n": str(at)})
    found, group = [], f"G_{topic}"
    while len(found) < 3:
        found += caller.receive(topic, group)[0]
    assert bodies(found) == [b"0", b"1", b"2"]
    one = found[0]
    assert (one.topic.name, one.system_properties.tag, list(one.system_properties.keys)) == (topic, "t", ["k"])
    assert one.system_properties.delivery_attempt == 1 and one.user_properties["n"] == one.body.decode()
    answer = caller.ack(topic, group, *found)
    assert answer.status.code == V2.OK and [each.status.code for each in answer.entries] == [V2.OK] * 3
    assert caller.ack(topic, group, one).status.code == V2.OK  # a client whose answer was lost repeats it
    messages, status = caller.receive(topic, group, poll_s=0.2)
    assert (messages, status.code, status.message) == ([], V2.MESSAGE_NOT_FOUND, "no new message")


def test_a_held_receive_gets_a_message_that_comes(grpc_store, topic):
    import threading

    caller, got = grpc_store.caller(), []
    waiting = threading.Thread(target=lambda: got.extend(caller.receive(topic, f"G_{topic}", poll_s=25)[0]))
    waiting.start()
    grpc_store.caller().send(topic, b"late")
    waiting.join(60)
    assert bodies(got) == [b"late"]


def test_only_messages_that_the_expression_wants_are_received(grpc_store, topic):
    caller = grpc_store.caller()
    for tag in "abc":
        caller.send(topic, tag.encode(), tag=tag, user_properties={"n": str(ord(tag))})
    found = []
    eventually(lambda: len(found) == 2 or found.extend(caller.receive(topic, f"G_{topic}", expression="a || c")[0]), "both came")
    assert bodies(found) == [b"a", b"c"]
    by_sql = V2.FilterExpression(type=V2.SQL, expression="n > 98 AND n < 100 n")
    got = [answer.message.body for answer in caller.ReceiveMessage(
        group=V2.Resource(name=f"S_{topic}"), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic)), batch_size=32,
        filter_expression=by_sql, invisible_duration=duration(30), long_polling_timeout=duration(1)) if answer.HasField("message")]
    assert got == [b"c"]
    wrong = caller.ReceiveMessage(
        group=V2.Resource(name=f"W_{topic}"), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic)), batch_size=1,
        filter_expression=V2.FilterExpression(type=V2.SQL, expression="n >"), invisible_duration=duration(30))
    assert next(wrong).status.code == V2.ILLEGAL_FILTER_EXPRESSION


def test_a_message_comes_again_when_its_time_is_over_and_its_old_handle_is_not_taken(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    caller.send(topic, b"once more")
    first, = caller.receive(topic, group, invisible_s=1)[0]
    second, = eventually(lambda: caller.receive(topic, group)[0], "it comes again")
    assert second.body == b"once more" and second.topic.name == topic
    assert second.system_properties.delivery_attempt == 2 and second.system_properties.message_id == first.system_properties.message_id
    assert caller.ack(topic, group, first).entries[0].status.code == V2.INVALID_RECEIPT_HANDLE
    assert caller.ack(topic, group, second).status.code == V2.OK


def test_a_changed_time_gives_a_new_handle(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    caller.send(topic, b"body")
    found, = caller.receive(topic, group)[0]
    names = {"group": V2.Resource(name=group), "topic": V2.Resource(name=topic)}
    answer = caller.ChangeInvisibleDuration(
        **names, receipt_handle=found.system_properties.receipt_handle, invisible_duration=duration(60))
    assert answer.status.code == V2.OK and answer.receipt_handle != found.system_properties.receipt_handle
    assert caller.ack(topic, group, found).entries[0].status.code == V2.OK, "as in RocketMQ: nothing changes"
    assert caller.receive(topic, group, poll_s=0.2)[0] == []
    soon = caller.ChangeInvisibleDuration(**names, receipt_handle=answer.receipt_handle, invisible_duration=duration(0.5))
    again, = eventually(lambda: caller.receive(topic, group)[0], "it comes again")
    assert soon.status.code == V2.OK and again.system_properties.delivery_attempt == 2
    for handle in (soon.receipt_handle, f"{soon.receipt_handle.partition(' ')[0]} 1 60000 0 0 broker-a 0 0 0"):  # its time is over
        found.system_properties.receipt_handle = handle
        assert caller.ack(topic, group, found).entries[0].status.code == V2.INVALID_RECEIPT_HANDLE
        answer = caller.ChangeInvisibleDuration(**names, receipt_handle=handle, invisible_duration=duration(60))
        assert answer.status.code == V2.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize("fields", [{"invisible_s": 0}, {"invisible_s": 13 * 3600}])
def test_a_wrong_invisible_time_is_refused(grpc_store, topic, fields):
    assert grpc_store.caller().receive(topic, f"G_{topic}", **fields)[1].code == V2.ILLEGAL_INVISIBLE_TIME


def test_a_refused_change_of_the_invisible_time_keeps_the_handle(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    caller.send(topic, b"one")
    found, = eventually(lambda: caller.receive(topic, group)[0], "it comes")
    handle = found.system_properties.receipt_handle
    answer = caller.ChangeInvisibleDuration(group=V2.Resource(name=group), topic=V2.Resource(name=topic), receipt_handle=handle,
                                            invisible_duration=duration(13 * 3600))
    assert (answer.status.code, answer.receipt_handle) == (V2.ILLEGAL_INVISIBLE_TIME, handle)  # by which Python's client goes on
    assert caller.ack(topic, group, found).entries[0].status.code == V2.OK


def test_a_change_of_the_invisible_time_that_is_refused_before_it_is_served_keeps_the_handle(grpc_store, topic):
    caller = grpc_store.caller()
    caller.metadata = []
    answer = caller.ChangeInvisibleDuration(topic=V2.Resource(name=topic), receipt_handle="a handle")
    assert (answer.status.code, answer.receipt_handle) == (V2.CLIENT_ID_REQUIRED, "a handle")


@pytest.mark.parametrize("handle", ["", "x", "1 2 3", "0 1 60000 1 0 broker-a x 0", "0 1 60000 1 0 broker-a 0 " + "9" * 30])
def test_a_handle_that_is_none_is_refused(grpc_store, topic, handle):
    names = {"group": V2.Resource(name=f"G_{topic}"), "topic": V2.Resource(name=topic)}
    caller = grpc_store.caller()
    assert caller.AckMessage(**names, entries=[V2.AckMessageEntry(receipt_handle=handle)]).status.code == V2.INVALID_RECEIPT_HANDLE
    assert caller.ChangeInvisibleDuration(**names, receipt_handle=handle, invisible_duration=duration(10)
                                          ).status.code == V2.INVALID_RECEIPT_HANDLE
    assert caller.ForwardMessageToDeadLetterQueue(**names, receipt_handle=handle).status.code == V2.INVALID_RECEIPT_HANDLE


def test_a_message_is_forwarded_to_the_dead_letters(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"[:100]
    caller.send(topic, b"dead", message_id="DEAD1")
    found, = caller.receive(topic, group)[0]
    answer = caller.ForwardMessageToDeadLetterQueue(
        group=V2.Resource(name=group), topic=V2.Resource(name=topic), receipt_handle=found.system_properties.receipt_handle,
        message_id="DEAD1", delivery_attempt=17, max_delivery_attempts=16)
    assert answer.status.code == V2.OK
    eventually(lambda: stored(grpc_store.root, f"%DLQ%{group}"), "it is a dead letter")
    assert bodies(stored(grpc_store.root, f"%DLQ%{group}")) == [b"dead"]
    assert caller.receive(topic, group, poll_s=0.2)[0] == []


def test_a_handle_forwards_only_the_message_that_it_was_given_for(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"[:100]
    other = grpc_store.make_topic(f"other_{topic}"[:100])
    for name in (topic, other):
        caller.send(name, name.encode())
    found, = caller.receive(topic, group)[0]
    foreign, = caller.receive(other, f"{group}_2")[0]
    names = {"group": V2.Resource(name=group), "topic": V2.Resource(name=topic)}
    words = found.system_properties.receipt_handle.split()

    def forward(handle):
        assert caller.ForwardMessageToDeadLetterQueue(**names, receipt_handle=handle).status.code == V2.OK, "Java would ask for ever"

    forward(foreign.system_properties.receipt_handle)
    forward(" ".join([*words[:6], *foreign.system_properties.receipt_handle.split()[6:]]))
    forward(" ".join([words[0], str(int(words[1]) - 1), *words[2:]]))
    changed = caller.ChangeInvisibleDuration(**names, receipt_handle=" ".join(words), invisible_duration=duration(60)).receipt_handle
    forward(" ".join(words))
    assert stored(grpc_store.root, f"%DLQ%{group}") == [], "none of these is the handle of a message"
    physical = foreign.system_properties.receipt_handle.split()[8]
    forward(" ".join([*changed.split()[:8], physical]))
    forward(changed)
    eventually(lambda: stored(grpc_store.root, f"%DLQ%{group}"), "it is a dead letter")
    assert bodies(stored(grpc_store.root, f"%DLQ%{group}")) == [topic.encode()]
    assert caller.receive(topic, group, poll_s=0.2)[0] == []
    assert caller.ack(other, f"{group}_2", foreign).status.code == V2.OK


def test_messages_of_a_client_that_leaves_come_again_at_once(grpc_store, topic):
    group, sender = f"G_{topic}", grpc_store.caller()
    sender.send(topic, b"one")
    gone = grpc_store.caller()
    gone.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(group=V2.Resource(name=group)))
    assert bodies(gone.receive(topic, group, auto_renew=True)[0]) == [b"one"]
    assert sender.receive(topic, group, poll_s=0.2)[0] == []
    gone.NotifyClientTermination()
    again, = eventually(lambda: sender.receive(topic, group)[0], "it comes again")
    assert again.system_properties.delivery_attempt == 2


def test_what_a_client_no_longer_waits_for_is_given_back(grpc_store, topic):
    import grpc

    group, caller = f"G_{topic}", grpc_store.caller()
    request = V2.ReceiveMessageRequest(
        group=V2.Resource(name=group), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic), id=-1), batch_size=32,
        invisible_duration=duration(3600), long_polling_timeout=duration(20))
    call = caller.stub("ReceiveMessage")(request, metadata=caller.metadata, timeout=60)
    eventually(lambda: grpc_store.broker().ask(codes.GET_TOPIC_STATS_INFO, {"topic": topic}).code == codes.SUCCESS, "it is held")
    time.sleep(0.3)  # the call has reached the gateway; nothing shows that
    call.cancel()
    with pytest.raises(grpc.RpcError):
        next(call)
    caller.send(topic, b"body")
    found, = eventually(lambda: caller.receive(topic, group)[0], "it comes to the one that waits")
    assert found.body == b"body" and found.system_properties.delivery_attempt == 1


def test_a_message_that_no_answer_can_have_counts_as_delivered(grpc_store, topic):
    from fix_gateway import send_fields

    sender, group = grpc_store.broker(), f"G_{topic}"[:100]
    for times, body in ((2**31 - 1, b"old"), (0, b"new")):  # as many times as its number can be
        assert sender.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 0, j=times), body).code == codes.SUCCESS
    found = []
    caller = grpc_store.caller()
    eventually(lambda: len(found) == 2 or found.extend(caller.receive(topic, group)[0]), "both come")
    assert {each.body: each.system_properties.delivery_attempt for each in found} == {b"old": 2**31 - 1, b"new": 1}


def test_a_fifo_group_gets_one_batch_of_a_queue_after_the_other(grpc_store, topic):
    group, caller = f"G_{topic}", grpc_store.caller()
    body = {"groupName": group, "consumeMessageOrderly": True, "groupRetryPolicy": {"type": "CUSTOMIZED"}}  # as a tool of RocketMQ 5
    assert grpc_store.broker().ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body).code == codes.SUCCESS
    told = caller.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(group=V2.Resource(name=group)))
    assert told.settings.subscription.fifo
    answer = caller.QueryAssignment(topic=V2.Resource(name=topic), group=V2.Resource(name=group))
    assert [each.message_queue.id for each in answer.assignments] == [0, 1, 2, 3]
    for at in range(4):
        caller.send(topic, b"%d" % at, message_type=V2.FIFO, message_group="g1")
    eventually(lambda: len(stored(grpc_store.root, topic)) == 4, "they can be read")
    queue_id = stored(grpc_store.root, topic)[0].queue_id
    first = caller.receive(topic, group, queue_id=queue_id, batch=2)[0]
    assert [each.body for each in first] == [b"0", b"1"] and first[0].system_properties.message_group == "g1"
    assert caller.receive(topic, group, queue_id=queue_id, poll_s=0.2)[0] == []  # until they are acknowledged
    assert caller.ack(topic, group, *first).status.code == V2.OK
    rest = eventually(lambda: caller.receive(topic, group, queue_id=queue_id, invisible_s=1)[0], "the others come")
    assert [each.body for each in rest] == [b"2", b"3"]
    again = eventually(lambda: caller.receive(topic, group, queue_id=queue_id)[0], "in place, when their time is over")
    assert [each.body for each in again] == [b"2", b"3"] and again[0].system_properties.delivery_attempt == 2


# ---- transactions ----------------------------------------------------------------------


@pytest.mark.parametrize("resolution, expected", [("COMMIT", [b"body"]), ("ROLLBACK", [])])
def test_a_transaction_is_ended_by_its_id(grpc_store, topic, resolution, expected):
    caller = grpc_store.caller()
    entry = caller.send(topic, b"body", message_type=V2.TRANSACTION)
    assert entry.status.code == V2.OK
    assert caller.receive(topic, f"G_{topic}", poll_s=0.2)[0] == []
    answer = caller.EndTransaction(topic=V2.Resource(name=topic), message_id=entry.message_id, transaction_id=entry.transaction_id,
                                   resolution=getattr(V2, resolution), source=V2.SOURCE_CLIENT)
    assert answer.status.code == V2.OK
    caller.send(topic, b"marker")
    found = []
    eventually(lambda: b"marker" in bodies(found) or found.extend(caller.receive(topic, f"G_{topic}")[0]), "what follows is received")
    found += caller.receive(topic, f"G_{topic}", poll_s=0.2)[0]
    assert [body for body in bodies(found) if body != b"marker"] == expected


@pytest.mark.parametrize("fields, code", [
    ({"transaction_id": "nothing", "resolution": 1}, V2.INVALID_TRANSACTION_ID),
    ({"transaction_id": "fffffff-1", "resolution": 1}, V2.INVALID_TRANSACTION_ID),
    ({"transaction_id": "1-1"}, V2.BAD_REQUEST)])
def test_the_end_of_no_transaction_is_refused(grpc_store, topic, fields, code):
    assert grpc_store.caller().EndTransaction(topic=V2.Resource(name=topic), message_id="x", **fields).status.code == code


def test_a_client_that_says_goodbye_leaves_nothing_of_its_held_receives(grpc_store, topic):
    pid = grpc_store.engine.pid("grpc")

    def links():
        return sum(each.type == socket.SOCK_STREAM for each in psutil.Process(pid).net_connections(kind="unix"))

    before = links()
    caller, group = grpc_store.caller(), f"g_{topic}"
    request = V2.ReceiveMessageRequest(
        group=V2.Resource(name=group), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic), id=-1), batch_size=1,
        invisible_duration=duration(30), long_polling_timeout=duration(20))
    held = caller.stub("ReceiveMessage")(request, metadata=caller.metadata, timeout=60)
    eventually(lambda: links() > before, "its connection to the gateway is open")
    began_s = time.monotonic()
    caller.NotifyClientTermination()
    assert [each.status.code for each in held] == [V2.INTERNAL_SERVER_ERROR] and time.monotonic() - began_s < 10
    eventually(lambda: links() <= before, "its connection is closed, and none is opened again")


def test_requests_without_messages_are_small(grpc_store, topic):
    caller = grpc_store.caller()
    giant = V2.Endpoints(scheme=V2.DOMAIN_NAME)
    giant.addresses.add(host="x" * 2_000_000, port=1)
    assert caller.QueryRoute(topic=V2.Resource(name=topic), endpoints=giant).status.code == V2.PAYLOAD_TOO_LARGE
    assert caller.receive(topic, "g", expression="x" * 2_000_000)[1].code == V2.PAYLOAD_TOO_LARGE
    del giant.addresses[:]
    giant.addresses.add(host="x" * 5000, port=1)
    assert caller.QueryRoute(topic=V2.Resource(name=topic), endpoints=giant).status.code == V2.ILLEGAL_ACCESS_POINT
    settings = {"client_type": V2.PRODUCER, "publishing": V2.Publishing(topics=[V2.Resource(name="x" * 2_000_000)])}
    assert caller.settings(**settings).status.code == V2.PAYLOAD_TOO_LARGE
    assert caller.send(topic, b"body").status.code == V2.OK


def raw(caller, method: str, *pieces: bytes):
    """A call with these bytes; its answer."""
    answer = getattr(V2, V2.methods[method].output_type.name)
    return caller.channel.unary_unary(f"/{V2.service}/{method}", None, answer.FromString)(
        b"".join(pieces), metadata=caller.metadata, timeout=scaled_timeout_s(60))


def test_a_send_of_many_parts_is_refused_before_it_costs_anything(grpc_store, topic):
    """Of a million empty messages, or of a map, each part costs a hundred times what it cost its client."""
    caller = grpc_store.caller()
    assert caller.SendMessage(messages=[V2.Message()] * 1025).status.code == V2.BAD_REQUEST
    assert len(caller.SendMessage(messages=[V2.Message()] * 1024).entries) == 1024
    many = message(topic, bytes(3 << 20), user_properties={f"{number:06x}": "" for number in range(60_000)})
    assert caller.SendMessage(messages=[many]).status.code == V2.PAYLOAD_TOO_LARGE
    assert raw(caller, "SendMessage", b"\x0a\x00" * 1_000_000).status.code == V2.PAYLOAD_TOO_LARGE
    assert raw(caller, "QueryRoute", V2.QueryRouteRequest(topic=V2.Resource(name=topic)).SerializeToString(),
               b"\x12\x00" * 1_000_000).status.code == V2.PAYLOAD_TOO_LARGE
    assert caller.send(topic, bytes(3 << 20), user_properties={"n": "x" * 10_000}).status.code != V2.PAYLOAD_TOO_LARGE


def test_a_client_has_only_as_many_subscriptions_as_the_gateway_takes(grpc_store, topic):
    def sent(**subscription):
        return caller.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(
            group=V2.Resource(name=f"G_{topic}"), **subscription))

    caller = grpc_store.caller()
    assert sent(subscriptions=[V2.SubscriptionEntry()] * 4097).status.code == V2.TOO_MANY_REQUESTS
    caller = grpc_store.caller()
    long = V2.SubscriptionEntry(topic=V2.Resource(name=topic), expression=V2.FilterExpression(type=V2.TAG, expression="\1" * 200_000))
    assert sent(subscriptions=[long]).status.code == V2.TOO_MANY_REQUESTS
    caller, entry = grpc_store.caller(), V2.SubscriptionEntry(topic=V2.Resource(name=topic))
    assert sent(subscriptions=[entry] * 4000).status.code == V2.OK
    assert caller.Heartbeat(group=V2.Resource(name=f"H_{topic}"), client_type=V2.PUSH_CONSUMER).status.code == V2.TOO_MANY_REQUESTS


def test_a_client_has_only_so_many_groups(grpc_store, topic):
    caller = grpc_store.caller()
    names = [V2.Resource(name=f"{topic}_{number}"[-100:]) for number in range(300)]
    assert caller.settings(client_type=V2.PRODUCER, publishing=V2.Publishing(topics=names)).status.code == V2.TOO_MANY_REQUESTS
    other = grpc_store.caller()
    assert other.settings(client_type=V2.PRODUCER, publishing=V2.Publishing(topics=names[:200])).status.code == V2.OK


@pytest.mark.parametrize("peer, host, address", [
    ("ipv4:10.0.0.7:4711", "10.0.0.7", "10.0.0.7:4711"), ("ipv6:%5B::1%5D:4711", "::1", "[::1]:4711"),
    ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::1", "[fe80::1]:4711"), ("ipv6:%5B::ffff:10.0.0.7%5D:4711", "10.0.0.7", "10.0.0.7:4711"),
    ("unix:", "127.0.0.1", "127.0.0.1:0")])
def test_a_client_s_address_is_one_that_a_message_and_an_access_list_can_have(peer, host, address):
    assert (address_of(peer), host_of(address_of(peer))) == (address, host) and encode_host(address)


@pytest.mark.parametrize("name, expected", [("tenant%orders", ("tenant", "orders")), ("tenant%a%b", ("tenant", "a%b")),
                                            ("other%orders", ("", "other%orders")), ("orders", ("", "orders"))])
def test_a_question_names_its_topic_in_the_namespace_of_the_client(tmp_path, name, expected):
    client = GrpcClients(tmp_path, Limits(), 1).find("c", "ipv4:10.0.0.7:1", "", "", is_secure=False)
    client.namespace = "tenant"
    assert client.in_namespace(name) == expected


# ---- in this process, with a gateway of the test --------------------------------------------


def test_a_call_without_time_left_is_refused_before_it_costs_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.grpc_service.DEADLINE_S", 3600.0)

    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway, GrpcRig(tmp_path, acl_enable=True) as rig:
            answer = await rig.call("SendMessage", messages=[message("T", b"late")])
            assert answer.status.code == V2.TOO_MANY_REQUESTS and not gateway.asked and not rig.said

    asyncio.run(run())


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, b"")


def headers(method: str, stream: int) -> bytes:
    """What a client sends to begin a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/{V2.service}/{method}", ":authority": "x",
              "content-type": "application/grpc", "te": "trailers", "x-mq-client-id": "silent@1"}
    return http2(1, 4, stream, b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields.items()))


async def frames(reader: asyncio.StreamReader):
    """Yield the type, the flags and the payload of each frame."""
    while True:
        head = await reader.readexactly(9)
        yield head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def hold(port: int, method: str, request):
    """Make a call and take no more of its answer than the first window lets through; the connection's writer."""
    sent = request.SerializeToString()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + headers(method, 1) + http2(0, 1, 1, struct.pack(">BI", 0, len(sent)) + sent))
    read = 0
    async for kind, _, payload in frames(reader):
        read += len(payload) if kind == 0 else 0
        if read >= 40_000:
            return writer


def test_calls_whose_message_does_not_come_take_half_of_all_and_end(tmp_path):
    methods = ["QueryRoute", "ReceiveMessage", "SendMessage", "ChangeInvisibleDuration"] * 3

    async def run() -> None:
        async with GrpcRig(tmp_path, grpc_calls_max=16) as rig, asyncio.timeout(scaled_timeout_s(30)):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, local_addr=("127.0.0.9", 0))
            writer.write(PREFACE + b"".join(headers(method, 2 * number + 1) for number, method in enumerate(methods)))
            answers = (payload async for kind, _, payload in frames(reader) if kind == 0)

            async def given(number: int) -> list[int]:
                """The codes of the next answers; all have their status at the same place."""
                return [V2.QueryRouteResponse.FromString((await anext(answers))[5:]).status.code for _ in range(number)]

            assert await given(4) == [V2.TOO_MANY_REQUESTS] * 4
            assert (await rig.call("QueryRoute", topic=V2.Resource(name="T"))).status.code == V2.OK
            assert await given(8) == [V2.REQUEST_TIMEOUT] * 8
            writer.close()

    asyncio.run(run())


def test_calls_whose_answer_is_not_taken_leave_room_for_other_hosts(tmp_path):
    """A window of 0 lets no answer through, not even a refusal, but gRPC's own statuses."""
    sent = V2.QueryRouteRequest(topic=V2.Resource(name="T")).SerializeToString()

    async def run() -> None:
        async with GrpcRig(tmp_path, grpc_calls_max=16) as rig, asyncio.timeout(scaled_timeout_s(10)):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port, local_addr=("127.0.0.9", 0))
            writer.write(PREFACE + http2(4, 0, 0, struct.pack(">HI", 4, 0)))
            for stream in range(1, 64, 2):
                writer.write(headers("QueryRoute", stream) + http2(0, 1, stream, struct.pack(">BI", 0, len(sent)) + sent))
            refused = (payload async for kind, flags, payload in frames(reader) if kind == 1 and flags & 1)
            for _ in range(32 - 12):
                await anext(refused)
            assert (await rig.call("QueryRoute", topic=V2.Resource(name="T"))).status.code == V2.OK
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("method", ["QueryRoute", "ReceiveMessage"])
def test_a_call_that_ends_without_a_message_is_answered(tmp_path, method):
    answer_of = getattr(V2, V2.methods[method].output_type.name)

    async def run() -> None:
        async with GrpcRig(tmp_path) as rig, asyncio.timeout(scaled_timeout_s(30)):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(PREFACE + headers(method, 1) + http2(0, 1, 1, b""))
            payload = await anext(payload async for kind, _, payload in frames(reader) if kind == 0)
            assert answer_of.FromString(payload[5:]).status.code == V2.BAD_REQUEST
            writer.close()

    asyncio.run(run())


def noting(given_back: asyncio.Queue):
    """Return a gateway's handler that notes the offsets of the messages that it gets back."""
    def give_back(request) -> Answer:
        given_back.put_nowait(request.frame.fields["offset"])
        return Answer()

    return give_back


def test_a_body_is_decompressed_beside_the_others_and_counts_as_it_is_then(tmp_path, monkeypatch):
    fields = {"group": V2.Resource(name="g"), "batch_size": 1, "invisible_duration": duration(60), "long_polling_timeout": duration(20),
              "message_queue": V2.MessageQueue(topic=V2.Resource(name="T"), id=-1)}
    body, threads, given_back = random.randbytes(1000) + bytes(3 << 20), [], asyncio.Queue()

    def decompress(*args, **more):
        threads.append(threading.current_thread())
        return decompress_body(*args, **more)

    def pop(request) -> Answer:
        return Answer(fields={"popTime": "7"}, body=encode_record(topic="T", body=zlib.compress(body), sys_flag=1))

    async def run() -> None:
        gateway = FakeGateway(tmp_path, POP_MESSAGE=pop, GIVE_BACK=noting(given_back))
        async with gateway, GrpcRig(tmp_path, gateway_memory_max_bytes=8 << 20) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                writer = await hold(rig.port, "ReceiveMessage", V2.ReceiveMessageRequest(**fields))
                answers = [each async for each in rig.call("ReceiveMessage", **fields)]
                assert answers[-1].status.code == V2.TOO_MANY_REQUESTS and await given_back.get() == "0"
                writer.transport.abort()
                found = []
                while not found:
                    found = [each.message.body async for each in rig.call("ReceiveMessage", **fields) if each.HasField("message")]
                assert found == [body] and threading.main_thread() not in threads

    monkeypatch.setattr("pyengine.gateway.grpc_messages.decompress_body", decompress)
    asyncio.run(run())


@pytest.mark.parametrize("bodies", [[3 << 20], [1, 3 << 20], [3 << 20, 3 << 20]], ids=["alone", "after-another", "never-both"])
def test_a_compressed_body_reaches_a_client_whose_call_is_the_only_one(tmp_path, bodies):
    """It is decompressed as far as gateway_memory_max_bytes has room for it and the other messages of its call."""
    fields = {"group": V2.Resource(name="g"), "batch_size": 32, "invisible_duration": duration(60), "long_polling_timeout": duration(20),
              "message_queue": V2.MessageQueue(topic=V2.Resource(name="T"), id=-1)}

    def pop(request) -> Answer:
        records = [encode_record(topic="T", body=zlib.compress(bytes(bodies[-1])), sys_flag=1)]
        records += [encode_record(topic="T", body=bytes(size), physical_offset=1) for size in bodies[:-1]]
        return Answer(fields={"popTime": "7"}, body=b"".join(records))

    async def run() -> None:
        async with FakeGateway(tmp_path, POP_MESSAGE=pop), GrpcRig(tmp_path, gateway_memory_max_bytes=5 << 20) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                found = [each.message async for each in rig.call("ReceiveMessage", **fields) if each.HasField("message")]
        first, encoding = found[0], found[0].system_properties.body_encoding
        assert (zlib.decompress(first.body) if encoding == V2.GZIP else first.body) == bytes(bodies[-1])
        assert encoding == (V2.GZIP if sum(bodies) > 5 << 20 else V2.IDENTITY)
        assert [len(each.body) for each in found[1:]] == bodies[:-1]

    asyncio.run(run())


RECEIVE = {"group": V2.Resource(name="g"), "batch_size": 32, "auto_renew": True, "long_polling_timeout": duration(20),
           "message_queue": V2.MessageQueue(topic=V2.Resource(name="T"), id=-1)}


def test_a_receive_for_which_memory_ends_keeps_its_messages_and_gives_back_the_rest(tmp_path):
    large, given_back, pops = zlib.compress(random.randbytes(1000) + bytes(3 << 20)), asyncio.Queue(), []

    def pop(request) -> Answer:
        pops.append(request)
        records = [encode_record(topic="T", body=large, sys_flag=1, queue_offset=offset, physical_offset=offset) for offset in (1, 2)]
        first = encode_record(topic="T", body=b"first")
        return Answer(fields={"popTime": "7"}, body=records[0] if len(pops) == 1 else first + b"".join(records))

    async def run() -> None:
        gateway = FakeGateway(tmp_path, POP_MESSAGE=pop, GIVE_BACK=noting(given_back))
        async with gateway, GrpcRig(tmp_path, gateway_memory_max_bytes=8 << 20) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                writer = await hold(rig.port, "ReceiveMessage", V2.ReceiveMessageRequest(**RECEIVE))
                answers = [each async for each in rig.call("ReceiveMessage", **RECEIVE)]
                assert [each.WhichOneof("content") for each in answers] == ["status", "message", "delivery_timestamp"]
                assert answers[0].status.code == V2.OK and answers[1].message.body == b"first"
                assert [await given_back.get(), await given_back.get()] == ["2", "1"]
                writer.transport.abort()

    asyncio.run(run())


def popping(given_back: asyncio.Queue, *bodies: bytes, **more: object) -> dict:
    """Handlers of a gateway that has messages with these bodies, and notes the offsets that it gets back; `more` are fields of each."""
    def pop(request) -> Answer:
        return Answer(fields={"popTime": "7"}, body=b"".join(
            encode_record(topic="T", body=body, queue_offset=offset, physical_offset=offset, **more) for offset, body in enumerate(bodies)))

    return {"POP_MESSAGE": pop, "GIVE_BACK": noting(given_back)}


def test_a_receive_that_its_client_cancels_gives_back_all_its_messages(tmp_path):
    """Java's client drops those that it has by then."""
    given_back = asyncio.Queue()

    async def run() -> None:
        async with FakeGateway(tmp_path, **popping(given_back, b"first", bytes(3 << 20), b"last")), GrpcRig(tmp_path) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                writer = await hold(rig.port, "ReceiveMessage", V2.ReceiveMessageRequest(**RECEIVE))
                writer.write(b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08")  # RST_STREAM, CANCEL: as at its deadline
                assert [await given_back.get() for _ in range(3)] == ["2", "1", "0"]
                writer.transport.abort()

    asyncio.run(run())


@pytest.mark.parametrize("failing, returned", [("decompress_body", ["2", "1"]), ("split_keys", ["2"])])
def test_a_receive_that_fails_after_messages_keeps_those(tmp_path, monkeypatch, failing, returned):
    """The one that cannot be translated counts as received: otherwise it would come for ever."""
    given_back, calls = asyncio.Queue(), []

    def fail_second(*args, **more):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("the second")
        return zlib.decompress(args[0]) if failing == "decompress_body" else []

    async def run() -> None:
        bodies = map(zlib.compress, (b"first", b"second", b"third"))
        async with FakeGateway(tmp_path, **popping(given_back, *bodies, sys_flag=1)), GrpcRig(tmp_path) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                answers = [each async for each in rig.call("ReceiveMessage", **RECEIVE)]
                assert [each.WhichOneof("content") for each in answers] == ["status", "message", "delivery_timestamp"]
                assert answers[0].status.code == V2.OK and answers[1].message.body == b"first"
                assert [await given_back.get() for _ in returned] == returned
                assert [line for line in rig.said if "the second" in line]

    monkeypatch.setattr(f"pyengine.gateway.grpc_messages.{failing}", fail_second)
    asyncio.run(run())
    assert given_back.empty()


@pytest.mark.parametrize("failing, returned", [("decompress_body", ["1", "0"]), ("split_keys", ["1"])])
def test_a_receive_that_fails_at_its_first_message_says_so(tmp_path, monkeypatch, failing, returned):
    given_back = asyncio.Queue()

    def fail(*args, **more):
        raise ValueError("the first")

    async def run() -> None:
        bodies = map(zlib.compress, (b"first", b"second"))
        async with FakeGateway(tmp_path, **popping(given_back, *bodies, sys_flag=1)), GrpcRig(tmp_path) as rig:
            async with asyncio.timeout(scaled_timeout_s(60)):
                answers = [each async for each in rig.call("ReceiveMessage", **RECEIVE)]
                assert [each.status.code for each in answers] == [V2.OK, V2.INTERNAL_ERROR]
                assert [await given_back.get() for _ in returned] == returned

    monkeypatch.setattr(f"pyengine.gateway.grpc_messages.{failing}", fail)
    asyncio.run(run())
    assert given_back.empty()


def test_a_route_counts_until_its_client_has_read_it(tmp_path):
    """Each of a topic's queues has the client's address: a small request may have an answer of megabytes."""
    TopicConfigs(tmp_path).ensure(TopicConfig("Wide", 512, 512))
    fields = {"topic": V2.Resource(name="Wide"), "endpoints": V2.Endpoints(addresses=[V2.Address(host="h" * 4000, port=1)])}

    async def run() -> None:
        async with GrpcRig(tmp_path, gateway_memory_max_bytes=3 << 20) as rig, asyncio.timeout(scaled_timeout_s(60)):
            writer = await hold(rig.port, "QueryRoute", V2.QueryRouteRequest(**fields))
            assert (await rig.call("QueryRoute", **fields)).status.code == V2.TOO_MANY_REQUESTS
            writer.transport.abort()
            while len((await rig.call("QueryRoute", **fields)).message_queues) != 512:
                pass  # the server has not learnt yet that its client has gone

    asyncio.run(run())


def test_the_end_of_a_transaction_whose_answer_is_lost_is_not_sent_again(tmp_path):
    """The gateway may have stored the commit; a transaction without an end is asked about later."""
    def dies(request):
        request.connection.abort()
        return Answer()

    async def run() -> None:
        async with FakeGateway(tmp_path, END_TRANSACTION=dies) as gateway, GrpcRig(tmp_path) as rig:
            answer = await rig.call("EndTransaction", topic=V2.Resource(name="T"), message_id="1", transaction_id="1-1",
                                    resolution=V2.COMMIT)
            assert answer.status.code == V2.INTERNAL_SERVER_ERROR and gateway.asked == [codes.END_TRANSACTION]

    asyncio.run(run())


class LatePops:
    """Pops that a FakeGateway answers with one message when their clients do not wait any more."""

    def __init__(self) -> None:
        self.held, self.given_back = asyncio.Queue(), asyncio.Queue()

    def pop(self, request) -> None:
        self.held.put_nowait(request)

    def cancel(self, request) -> Answer:
        held = self.held.get_nowait()
        assert held.frame.fields["number"] == request.frame.fields["number"]
        held.reply(Answer(fields={"popTime": "7"}, body=encode_record(topic="T", body=b"late", queue_id=2, queue_offset=5)))
        return Answer()

    def give_back(self, request) -> Answer:
        self.given_back.put_nowait(request.frame.fields)
        return Answer()

    @property
    def gateway(self) -> dict[str, object]:
        return {"POP_MESSAGE": self.pop, "CANCEL_POP": self.cancel, "GIVE_BACK": self.give_back}


@pytest.mark.parametrize("end", ["call", "server"])
def test_what_is_popped_for_a_call_that_has_ended_is_given_back(tmp_path, end):
    async def run() -> None:
        pops = LatePops()
        async with FakeGateway(tmp_path, **pops.gateway) as gateway, GrpcRig(tmp_path) as rig:
            call = rig.call("ReceiveMessage", group=V2.Resource(name="g"), batch_size=1, invisible_duration=duration(60),
                            message_queue=V2.MessageQueue(topic=V2.Resource(name="T"), id=-1), long_polling_timeout=duration(20))
            reading = asyncio.ensure_future(call.read())
            while pops.held.empty():
                await asyncio.sleep(0.01)
            if end == "call":
                call.cancel()
                given_back = await asyncio.wait_for(pops.given_back.get(), scaled_timeout_s(10))
            else:
                await rig.server.close()
                given_back = pops.given_back.get_nowait()
            assert (given_back["queueId"], given_back["offset"]) == ("2", "5") and gateway.asked.count(codes.POP_MESSAGE) == 1
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())


def test_a_receive_whose_client_has_ended_it_does_not_pop_when_the_gateway_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.grpc_clients.CONNECT_INTERVAL_S", 0.001)

    async def run() -> None:
        pops = LatePops()
        async with GrpcRig(tmp_path) as rig:
            call = rig.call("ReceiveMessage", group=V2.Resource(name="g"), batch_size=1, invisible_duration=duration(60),
                            message_queue=V2.MessageQueue(topic=V2.Resource(name="T"), id=-1), long_polling_timeout=duration(20))
            reading = asyncio.ensure_future(call.read())
            await rig.call("QueryRoute", topic=V2.Resource(name="T"))  # the receive is under way
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            for _ in range(2):  # which come after the end of the first call
                await rig.call("QueryRoute", topic=V2.Resource(name="T"))
            async with FakeGateway(tmp_path, **pops.gateway) as gateway:
                for _ in range(10):
                    assert (await rig.call("Heartbeat", client_type=V2.PRODUCER)).status.code == V2.OK
                assert gateway.asked == [codes.HEART_BEAT] * 10

    asyncio.run(run())


def test_a_group_that_was_changed_just_now_is_served_as_it_is(tmp_path):
    async def run() -> None:
        SubscriptionGroups(tmp_path).put(SubscriptionGroup("g"))
        async with GrpcRig(tmp_path) as rig:
            for is_ordered, expected in ((False, [-1]), (True, [0, 1, 2, 3])):
                SubscriptionGroups(tmp_path).put(SubscriptionGroup("g", more={"consumeMessageOrderly": is_ordered}))
                answer = await rig.call("QueryAssignment", topic=V2.Resource(name="T"), group=V2.Resource(name="g"))
                assert [each.message_queue.id for each in answer.assignments] == expected

    asyncio.run(run())


def test_calls_that_wait_for_long_in_grpc_s_queue_are_dropped(tmp_path, monkeypatch):
    import grpc

    made, options = grpc.aio.server, {}

    def make(**settings):
        options.update(settings["options"])
        return made(**settings)

    async def run() -> None:
        async with GrpcRig(tmp_path):
            assert 0 < options["grpc.server_max_unrequested_time_in_server"] < 3  # a client's usual deadline

    monkeypatch.setattr(grpc.aio, "server", make)
    asyncio.run(run())
