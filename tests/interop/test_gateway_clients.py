"""The published RocketMQ client 4.9.8, unchanged, on a gateway: it sends and consumes in all its ways, and outlives a kill -9."""

from __future__ import annotations

import os

import pytest

import needs
import pyengine
from fix_gateway import start_served
from fix_replication import free_port
from interop.clients import Clients
from interop.judge import JudgeUnavailableError
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.subscription_group import SubscriptionGroups
from pyengine.storage.topic_config import TopicConfig, TopicConfigs
from waiting import eventually

pytestmark = [pytest.mark.java, pytest.mark.maven, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A store whose gateway keeps its ports when it is started again."""
    store = start_served(tmp_path_factory.mktemp("served") / "store", gateway_namesrv_port=free_port(), gateway_broker_port=free_port(),
                         message_delay_level="1s 5s", transaction_timeout_ms=500, transaction_check_interval_ms=500)
    yield store
    store.close()


@pytest.fixture(scope="module")
def clients(served, tmp_path_factory):
    try:
        running = Clients(needs.java_command(), f"127.0.0.1:{served.ports[0]}", tmp_path_factory.mktemp("clients"))
    except JudgeUnavailableError as error:
        if os.environ.get("PYENGINE_REQUIRE"):
            raise
        pytest.skip(f"maven: {error}")
    with running:
        yield running


def consumed(clients, name, count, timeout_s=60):
    rows = clients.ask("take", name=name, count=count, timeout_s=timeout_s)
    return sorted(row["body"] for row in rows)


def test_messages_sent_in_every_way_are_consumed_once_each(served, clients):
    def send(how, *bodies):
        return clients.ask("send", group="senders", how=how, topic="all_ways", tags="t", bodies=list(bodies))

    sync = send("sync", "sync-1", "sync-2", "large " * 4000)
    assert all(row["status"] == "SEND_OK" and row["id"] for row in sync)
    asynchronous = [f"async-{number}" for number in range(50)]
    assert {row["status"] for row in send("async", *asynchronous)} == {"SEND_OK"}
    send("one-way", "one-way")
    (batch,) = send("batch", "batch-1", "batch-2", "batch-3")
    assert batch["status"] == "SEND_OK" and len(batch["id"].split(",")) == 3
    expected = sorted(["sync-1", "sync-2", "large " * 4000, *asynchronous, "one-way", "batch-1", "batch-2", "batch-3"])
    clients.ask("subscribe", name="all", group="all_readers", topic="all_ways")
    assert consumed(clients, "all", len(expected)) == expected
    assert TopicConfigs(served.root).read().topics["all_ways"].write_queue_nums == 4
    found = clients.ask("view", topic="all_ways", id=sync[0]["id"])
    assert (found["body"], found["born"]) == ("sync-1", "127.0.0.1")
    assert [row["body"] for row in clients.ask("query", topic="all_ways", key="async-7")] == ["async-7"]


def test_a_group_goes_on_where_it_stopped(served, clients):
    def send(*bodies):
        clients.ask("send", group="senders", how="sync", topic="resumed", tags="t", bodies=list(bodies))

    send("one", "two")
    clients.ask("subscribe", name="before", group="resumers", topic="resumed")
    assert consumed(clients, "before", 2) == ["one", "two"]
    clients.ask("stop", name="before")
    eventually(lambda: sum(ConsumerOffsets(served.root).read("resumed", "resumers").values()) == 2, "the group's offsets are written")
    send("three")
    clients.ask("subscribe", name="after", group="resumers", topic="resumed")
    assert consumed(clients, "after", 1) == ["three"]


def test_an_ordered_consumer_gets_a_queue_in_order(clients):
    bodies = [f"{number:03d}" for number in range(40)]
    clients.ask("send", group="senders", how="ordered", topic="in_order", queue=1, bodies=bodies)
    clients.ask("subscribe", name="ordered", group="orderly", topic="in_order", ordered=True)
    rows = clients.ask("take", name="ordered", count=40, timeout_s=60)
    assert [row["body"] for row in rows] == bodies and {row["queue"] for row in rows} == {1}


def test_tags_and_conditions_choose_what_is_consumed(clients):
    for tags, color in (("a", "red"), ("b", "blue"), ("c", "red")):
        clients.ask("send", group="senders", how="sync", topic="chosen", tags=tags, property=color, bodies=[f"{tags}-{color}"])
    clients.ask("subscribe", name="tagged", group="tag_readers", topic="chosen", tags="a || b")
    clients.ask("subscribe", name="condition", group="sql_readers", topic="chosen", sql="color = 'red' AND TAGS IS NOT NULL")
    assert consumed(clients, "tagged", 2) == ["a-red", "b-blue"]
    assert consumed(clients, "condition", 2) == ["a-red", "c-red"]


def test_a_delayed_message_comes_and_a_broadcast_reaches_every_member(clients):
    clients.ask("send", group="senders", how="sync", topic="told_to_all", delay=1, bodies=["later"])
    for name in ("first", "second"):
        clients.ask("subscribe", name=name, group="listeners", topic="told_to_all", broadcast=True)
    assert consumed(clients, "first", 1) == consumed(clients, "second", 1) == ["later"]


def test_messages_of_a_python_producer_and_a_java_consumer_meet(served, clients):
    with pyengine.connect(served.root) as producer:
        producer.put("from_python", b"hello", tags="t").raise_for_status()
    eventually(lambda: "from_python" in TopicConfigs(served.root).read().topics, "the checkpointer has entered the topic")
    clients.ask("subscribe", name="python", group="python_readers", topic="from_python")
    assert consumed(clients, "python", 1) == ["hello"]
    clients.ask("send", group="senders", how="sync", topic="from_java", bodies=["hello back"])
    with pyengine.consume(served.root, "from_java", group="g", from_="first") as consumer:
        assert [message.body for message in consumer.pull(timeout_s=30)] == [b"hello back"]


def test_a_message_that_fails_comes_again_and_goes_to_the_dead_letters_at_last(served, clients):
    for group in ("failers", "hopeless"):  # or a client looks for it after 20 s only
        TopicConfigs(served.root).create(TopicConfig(f"%RETRY%{group}", 1, 1))
    clients.ask("send", group="senders", how="sync", topic="fails", tags="t", bodies=["bad"])
    clients.ask("subscribe", name="failing", group="failers", topic="fails", failures=1, delay=1)
    clients.ask("subscribe", name="hopeless", group="hopeless", topic="fails", failures=9, delay=1, most=1)
    rows = clients.ask("take", name="failing", count=2, timeout_s=60)
    assert [(row["body"], row["times"], row["topic"]) for row in rows] == [("bad", 0, "fails"), ("bad", 1, "fails")]
    eventually(lambda: count(served, "%DLQ%hopeless") == 1, "the message is a dead letter", timeout_s=90)
    assert [row["times"] for row in clients.ask("take", name="hopeless", count=2, timeout_s=1)] == [0, 1]


def test_a_transaction_is_consumed_once_it_is_committed_or_its_producer_says_so_when_it_is_asked(clients):
    clients.ask("send", group="senders", how="sync", topic="paid", bodies=["first"])
    for outcome in ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW"):
        (sent,) = clients.ask("transact", group="payers", topic="paid", outcome=outcome, bodies=[outcome])
        assert sent["status"] == "SEND_OK"
    clients.ask("subscribe", name="paid", group="paid_readers", topic="paid")
    assert consumed(clients, "paid", 3) == ["COMMIT_MESSAGE", "UNKNOW", "first"]


def test_the_tools_show_and_change_topics_and_groups(served, clients):
    def admin(*words):
        return clients.ask("admin", arguments=list(words))

    broker = f"127.0.0.1:{served.ports[1]}"
    assert "broker-a" in admin("clusterList") and "V4_9_8" in admin("clusterList")
    assert "create topic to" in admin("updateTopic", "-b", broker, "-t", "by_tool", "-r", "3", "-w", "3")
    assert TopicConfigs(served.root).read().topics["by_tool"].read_queue_nums == 3
    assert "by_tool" in admin("topicList").split() and '"readQueueNums":3' in "".join(admin("topicRoute", "-t", "by_tool").split())
    sent = clients.ask("send", group="senders", how="sync", topic="by_tool", tags="t", bodies=["one", "two"])

    def shown():
        rows = [line.split() for line in admin("topicStatus", "-t", "by_tool").splitlines()]
        return sum(int(row[3]) for row in rows if row and row[0] == "broker-a")

    eventually(lambda: shown() == 2, "both messages are in their queues")
    assert "success" in admin("updateSubGroup", "-b", broker, "-g", "by_tool_group", "-r", "5")
    assert SubscriptionGroups(served.root).read().groups["by_tool_group"].retry_max_times == 5
    clients.ask("subscribe", name="tool", group="tool_readers", topic="by_tool")
    assert consumed(clients, "tool", 2) == ["one", "two"]
    assert "tool_readers" in admin("consumerProgress") and "by_tool" in admin("consumerProgress", "-g", "tool_readers")
    assert "by_tool" in admin("consumerConnection", "-g", "tool_readers")
    assert "commitLogMaxOffset" in admin("brokerStatus", "-b", broker)
    assert sent[0]["unique"] in admin("queryMsgByKey", "-t", "by_tool", "-k", "one")
    assert sent[0]["id"] in admin("queryMsgById", "-i", sent[0]["id"])
    assert "success" in admin("deleteTopic", "-n", f"127.0.0.1:{served.ports[0]}", "-c", "DefaultCluster", "-t", "by_tool")
    assert "by_tool" not in TopicConfigs(served.root).read().topics


@pytest.mark.long
def test_a_group_is_set_back_by_the_tools(served, clients):
    clients.ask("send", group="senders", how="sync", topic="set_back", bodies=["one", "two"])
    clients.ask("subscribe", name="set_back", group="set_backers", topic="set_back")
    assert consumed(clients, "set_back", 2) == ["one", "two"]
    clients.ask("admin", arguments=["resetOffsetByTime", "-g", "set_backers", "-t", "set_back", "-s", "0"])
    assert consumed(clients, "set_back", 4) == ["one", "one", "two", "two"]


@pytest.mark.long
def test_a_kill_of_the_gateway_under_load_loses_nothing_acknowledged(served, clients):
    bodies = [f"{number:05d}" for number in range(1000)]
    clients.ask("subscribe", name="survivor", group="survivors", topic="survived")
    clients.begin("send", group="senders", how="sync", topic="survived", go_on=True, bodies=bodies)
    eventually(lambda: count(served, "survived") > 20, "messages are sent")
    before = served.engine.incarnation("gateway")
    served.engine.kill("gateway")
    served.engine.wait_back("gateway", before)
    answers = clients.answer()
    sent = {body for body, answer in zip(bodies, answers, strict=True) if not isinstance(answer, str) and answer["status"] == "SEND_OK"}
    assert len(sent) > 100
    found = eventually(lambda: sent <= (got := {row["body"] for row in clients.ask("take", name="survivor", count=0, timeout_s=0)}) and got,
                       "everything acknowledged is consumed", timeout_s=90)
    assert found <= set(bodies)


def count(served, topic):
    with pyengine.open_store(served.root) as store:
        return sum(store.queue_range(topic, queue_id, "committed")[1] for queue_id in store.queue_ids(topic))
