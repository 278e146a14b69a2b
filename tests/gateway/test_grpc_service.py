"""Clients of RocketMQ 5: routes, members, sends, receipts and transactions by gRPC, with the worker's own classes."""

from __future__ import annotations

import time

import pytest

import pyengine
from grpc_caller import V2, message
from pyengine.gateway import codes
from waiting import eventually


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


def test_a_half_closed_stream_is_ended_and_its_client_left_out(grpc_store, topic):
    caller, group = grpc_store.caller(), f"G_{topic}"
    caller.settings(client_type=V2.PUSH_CONSUMER, subscription=V2.Subscription(group=V2.Resource(name=group)))
    caller.end_stream()
    eventually(lambda: grpc_store.broker().ask(codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}).code == codes.SYSTEM_ERROR,
               "it is no member any more")


def test_an_assignment_is_any_queue(grpc_store, topic):
    answer = grpc_store.caller().QueryAssignment(topic=V2.Resource(name=topic), group=V2.Resource(name="some"))
    assert answer.status.code == V2.OK and [each.message_queue.id for each in answer.assignments] == [-1]


@pytest.mark.parametrize("name", ["PullMessage", "UpdateOffset", "GetOffset", "QueryOffset"])
def test_what_no_client_calls_is_not_implemented(grpc_store, name):
    answer = getattr(grpc_store.caller(), name)()
    assert (next(answer) if name == "PullMessage" else answer).status.code == V2.NOT_IMPLEMENTED


def test_a_recall_is_refused_as_by_a_broker_of_rocketmq_5(grpc_store, topic):
    answer = grpc_store.caller().RecallMessage(topic=V2.Resource(name=topic), recall_handle="x")
    assert (answer.status.code, answer.status.message) == (V2.INTERNAL_SERVER_ERROR, "recall failed, operation is forbidden")


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


def test_properties_beyond_the_store_s_limit_are_refused(grpc_store, topic):
    entry = grpc_store.caller().send(topic, b"x", user_properties={"n": "x" * 33_000})
    assert entry.status.code == V2.MESSAGE_PROPERTIES_TOO_LARGE


def test_a_giant_message_is_refused_and_the_client_goes_on(grpc_store, topic):
    import grpc

    caller = grpc_store.caller()
    assert caller.send(topic, bytes(5 << 20)).status.code == V2.MESSAGE_BODY_TOO_LARGE
    with pytest.raises(grpc.RpcError) as refused:
        caller.send(topic, bytes(17 << 20))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caller.send(topic, b"small").status.code == V2.OK


def test_bytes_that_are_no_message_harm_nobody(grpc_store, topic):
    import grpc

    caller = grpc_store.caller()
    raw = caller.channel.unary_unary(f"/{V2.service}/SendMessage")
    with pytest.raises(grpc.RpcError):
        raw(b"\xff" * 100, metadata=caller.metadata, timeout=30)
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
