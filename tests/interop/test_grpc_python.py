"""RocketMQ's own Python client for RocketMQ 5, unchanged, on a store that serves gRPC."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fix_gateway import put_private
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from waiting import scaled_timeout_s

BEGIN = """
import json, queue, sys, threading, time
from rocketmq.grpc_protocol import TransactionResolution
from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.consumer import PushConsumer, SimpleConsumer
from rocketmq.v5.consumer.push import ConsumeResult, MessageListener
from rocketmq.v5.model import FilterExpression, Message
from rocketmq.v5.producer import Producer, TransactionChecker

settings = ClientConfiguration(f"127.0.0.1:{sys.argv[1]}", Credentials(*sys.argv[4:]))
topic, group, deadline_s = sys.argv[2], "G_" + sys.argv[2], time.time() + float(sys.argv[3])

def message(body, **fields):
    made = Message()
    made.topic, made.body = topic, body.encode()
    for name, value in fields.items():
        setattr(made, name, value)
    return made

def producer(**options):
    made = Producer(settings, (topic,), **options)
    made.startup()
    return made

class Listener(MessageListener):
    def __init__(self, fails=lambda message: False):
        self.fails, self.got = fails, queue.Queue()

    def consume(self, message):
        self.got.put((message.body.decode(), message.delivery_attempt))
        return ConsumeResult.FAILURE if self.fails(message) else ConsumeResult.SUCCESS

    def take(self, count):
        return [self.got.get(timeout=deadline_s - time.time()) for _ in range(count)]

def consumer(listener, expression="*"):
    made = PushConsumer(settings, group, listener, {topic: FilterExpression(expression)})
    made.startup()
    return made

def end(told, *clients):
    for each in clients:
        each.shutdown()
    print(json.dumps(told))
"""
SIMPLE = """
sender = producer()
sent = [sender.send(message(f"body {at}", tag="even" if at % 2 == 0 else "odd", keys=f"k{at}")).message_id for at in range(20)]
coming = [sender.send_async(message(f"body {at}", tag="even")) for at in range(20, 40)]
sent += [each.result().message_id for each in coming]
reader = SimpleConsumer(settings, group, {topic: FilterExpression("even")}, 5)
reader.startup()
found, kept = {}, []
while len(found) < 30:
    for each in reader.receive(16, 30) or ():
        if each.body == b"body 4" and not kept:
            kept.append(each.delivery_attempt)
            reader.change_invisible_duration(each, 1)
            continue
        found[each.body.decode()] = each.delivery_attempt
        reader.ack(each)
end([len(set(sent)), sorted(found), found["body 4"]], sender, reader)
"""
PUSH = """
sender = producer()
listener = Listener(lambda message: message.body == b"body 3" and message.delivery_attempt < 2)
reader = consumer(listener)
for at in range(200):
    sender.send(message(f"body {at}"))
end(sorted(listener.take(201)), reader, sender)
"""
FIFO = """
sender = producer()
listener = Listener()
reader = consumer(listener)
for at in range(60):
    sender.send(message(str(at), message_group=f"group {at % 3}"))
end([body for body, _ in listener.take(60)], reader, sender)
"""
DELAY = """
sender = producer()
listener = Listener()
reader = consumer(listener)
due_s = int(time.time()) + 3
receipt = sender.send(message("recalled", delivery_timestamp=due_s))
sender.send(message("late", delivery_timestamp=due_s))
sender.recall_message(topic, receipt.recall_handle)
body = listener.take(1)[0][0]
sender.send(message("last"))
end([body, time.time() >= due_s, listener.take(1)[0][0]], reader, sender)
"""
TRANSACTIONS = """
class Checker(TransactionChecker):
    def check(self, message):
        return TransactionResolution.COMMIT if message.body == b"orphan" else TransactionResolution.ROLLBACK

listener = Listener()
reader = consumer(listener)
sender = producer(checker=Checker())
for body, finish in (("committed", "commit"), ("rolled back", "rollback"), ("orphan", ""), ("lost", "")):
    transaction = sender.begin_transaction()
    sender.send(message(body), transaction)
    if finish:
        getattr(transaction, finish)()
end(sorted(body for body, _ in listener.take(2)), reader, sender)
"""


ACCOUNT = """
sender = producer()
sender.send(message("allowed"))
reader = SimpleConsumer(settings, group, {topic: FilterExpression("*")}, 5)
reader.startup()
found = []
while not found:
    for each in reader.receive(16, 30) or ():
        found.append(each.body.decode())
        reader.ack(each)
refused = ""
try:
    other = message("refused")
    other.topic = "private5"
    sender.send(other)
except Exception as error:
    refused = str(error)
end([found, refused], sender, reader)
"""


@pytest.fixture(scope="module")
def grpc_store(tmp_path_factory):
    """A GrpcStore that asks soon about transactions without an end."""
    from grpc_caller import start_grpc

    store = start_grpc(tmp_path_factory.mktemp("grpc") / "store", transaction_timeout_ms=1000, transaction_check_interval_ms=1000)
    yield store
    store.close()


def told_by(store, topic: str, program: str, home, *account: str):
    """What a program prints, whose clients are of a process of their own; they write logs below their home."""
    timeout_s = scaled_timeout_s(100)
    done = subprocess.run([sys.executable, "-c", BEGIN + program, str(store.grpc_port), store.make_topic(topic), str(timeout_s), *account],
                          capture_output=True, text=True, timeout=timeout_s + 30, env={"HOME": str(home), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_simple_consumer_receives_what_a_producer_sends_and_waits_for(grpc_store, tmp_path):
    sent, found, attempt = told_by(grpc_store, "simple5", SIMPLE, tmp_path)
    assert sent == 40 and attempt == 2
    assert found == sorted([f"body {at}" for at in range(0, 20, 2)] + [f"body {at}" for at in range(20, 40)])


def test_a_push_consumer_gets_each_message_and_a_failed_one_again(grpc_store, tmp_path):
    assert told_by(grpc_store, "push5", PUSH, tmp_path) == sorted([[f"body {at}", 1] for at in range(200)] + [["body 3", 2]])


def test_an_ordered_consumer_gets_each_group_in_its_order(grpc_store, tmp_path):
    SubscriptionGroups(grpc_store.root).put(SubscriptionGroup("G_fifo5", more={"consumeMessageOrderly": True}))
    found = [int(body) for body in told_by(grpc_store, "fifo5", FIFO, tmp_path)]
    assert [[at for at in found if at % 3 == group] for group in range(3)] == [list(range(group, 60, 3)) for group in range(3)]


def test_a_delayed_message_comes_at_its_time_unless_it_was_recalled(grpc_store, tmp_path):
    assert told_by(grpc_store, "delay5", DELAY, tmp_path) == ["late", True, "last"]


@pytest.mark.ci
def test_transactions_end_by_their_producer_or_by_its_answer(grpc_store, tmp_path):
    assert told_by(grpc_store, "transactions5", TRANSACTIONS, tmp_path) == ["committed", "orphan"]

    grpc_store.make_topic("tenant%transactions6")
    in_namespace = 'settings = ClientConfiguration(f"127.0.0.1:{sys.argv[1]}", Credentials(), namespace="tenant")\n' + TRANSACTIONS
    assert told_by(grpc_store, "transactions6", in_namespace, tmp_path) == ["committed", "orphan"]


def test_a_client_with_an_access_key_does_what_its_account_may(tmp_path):
    from grpc_caller import start_grpc

    (tmp_path / "store" / "config").mkdir(parents=True)
    put_private(tmp_path / "store" / "config" / "plain_acl.yml",
                b"accounts: [{accessKey: the-shop, secretKey: its-secret, topicPerms: [guarded5=PUB|SUB], groupPerms: [G_guarded5=SUB]}]")
    store = start_grpc(tmp_path / "store", acl_enable=True)
    try:
        store.make_topic("private5")
        found, refused = told_by(store, "guarded5", ACCOUNT, tmp_path, "the-shop", "its-secret")
        assert found == ["allowed"] and "No default permission for topic:private5" in refused
        with pytest.raises(AssertionError, match="failed to fetch topic:guarded5 route"):
            told_by(store, "guarded5", ACCOUNT, tmp_path, "the-shop", "another-one")
    finally:
        store.close()
