"""The published RocketMQ client 4.9.8, unchanged, on a gateway: it sends and consumes in all its ways, and outlives a kill -9."""

from __future__ import annotations

import re
import subprocess

import pytest

import needs
import pyengine
from crash.replicas import free_port
from fix_gateway import start_served
from fix_judge import available
from interop.clients import FLAGS, Clients, class_path_5
from pyengine.gateway import codes
from pyengine.ipc.live_reader import check_now
from pyengine.storage.check.report import Severity
from pyengine.storage.config import load_config
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

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
    with available(), Clients(needs.java_command(), f"127.0.0.1:{served.ports[0]}", tmp_path_factory.mktemp("clients")) as running:
        yield running


def consumed(clients, name, count, timeout_s=60):
    rows = clients.ask("take", name=name, count=count, timeout_s=timeout_s)
    return sorted(row["body"] for row in rows)


@pytest.mark.ci
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
    with pyengine.open_store(served.root) as store:
        found = [message for queue_id in range(4) for message in store.get_message("all_ways", queue_id, 0, 100).messages]
    assert sorted(message.content.decode() for message in found) == expected
    assert [message.content == message.body for message in found].count(False) == 1, "the client compressed the large one"
    assert TopicConfigs(served.root).read().rows["all_ways"].write_queue_nums == 4
    found = clients.ask("view", topic="all_ways", id=sync[0]["id"])
    assert (found["body"], found["born"]) == ("sync-1", "127.0.0.1")
    assert [row["body"] for row in clients.ask("query", topic="all_ways", key="async-7")] == ["async-7"]


def told_by(program, served, folder) -> list[str]:
    """The lines of a program of clients5."""
    with available():
        class_path = class_path_5()
    told = subprocess.run([needs.java_command(), *FLAGS, f"-Duser.home={folder}", "-cp",
                           class_path, f"clients5.{program}",
                           f"127.0.0.1:{served.ports[0]}"], capture_output=True, text=True, timeout=scaled_timeout_s(150), cwd=folder)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout.splitlines()


@pytest.mark.ci
def test_a_client_of_rocketmq_5_gets_messages_at_their_time_and_by_lite_pulls(served, tmp_path):
    assert told_by("Later", served, tmp_path) == [f"got 28 early 0 refused {codes.MESSAGE_ILLEGAL}"]


@pytest.mark.ci
def test_push_consumers_of_rocketmq_5_pop_and_failed_messages_come_again(served, tmp_path):
    topic, group = "pops5", "pops5_readers"
    TopicConfigs(served.root).create(TopicConfig(topic, 4, 4))
    SubscriptionGroups(served.root).put(SubscriptionGroup(group))
    body = {"topic": topic, "consumerGroup": group, "mode": "POP", "popShareQueueNum": 0}
    assert served.broker().ask(codes.SET_MESSAGE_REQUEST_MODE, body=body).code == codes.SUCCESS
    assert told_by("Pops", served, tmp_path) == ["got 80 twice 0 times {0=70, 1=10}"]
    with pyengine.open_store(served.root) as store:
        for name, queues in ((topic, 4), (f"%RETRY%{group}", 1)):
            ends = {queue_id: store.queue_range(name, queue_id)[1] for queue_id in range(queues)}
            eventually(lambda: ConsumerOffsets(served.root).read(name, group) == ends, "all are acknowledged")


@pytest.mark.ci
def test_namespaces_of_clients_share_neither_topics_nor_groups_nor_retries(served, clients):
    try:
        for name in ("east", "west"):
            clients.ask("namespace", name=name)
            clients.ask("send", group=f"{name}_senders", how="sync", topic="spaced", tags="t", bodies=[name])
            clients.ask("subscribe", name=name, group="spaced_readers", topic="spaced", failures=1, delay=1)
        assert [consumed(clients, name, 2) for name in ("east", "west")] == [["east"] * 2, ["west"] * 2], "each fails once"
    finally:
        clients.ask("namespace", name=None)
    topics, groups = TopicConfigs(served.root).read().rows, SubscriptionGroups(served.root).read().rows
    for name in ("east", "west"):
        assert {f"{name}%spaced", f"%RETRY%{name}%spaced_readers"} <= topics.keys() and f"{name}%spaced_readers" in groups
    assert "spaced" not in topics and "spaced_readers" not in groups


@pytest.mark.ci
def test_a_group_continues_where_it_stopped(served, clients):
    def send(*bodies):
        clients.ask("send", group="senders", how="sync", topic="resumed", tags="t", bodies=list(bodies))

    send("one", "two")
    clients.ask("subscribe", name="before", group="resumers", topic="resumed")
    assert consumed(clients, "before", 2) == ["one", "two"]
    # Before it stops: a message whose listener has just returned may come again to the next member of the group.
    eventually(lambda: sum(ConsumerOffsets(served.root).read("resumed", "resumers").values()) == 2, "the group's offsets are written")
    clients.ask("stop", name="before")
    send("three")
    clients.ask("subscribe", name="after", group="resumers", topic="resumed")
    assert consumed(clients, "after", 1) == ["three"]


@pytest.mark.ci
def test_a_lite_pull_consumer_seeks_and_commits_with_queues_of_its_group_or_of_its_own(served, clients):
    def send(*bodies):
        clients.ask("send", group="senders", how="ordered", topic="polled", queue=1, bodies=list(bodies))

    def polled(name, count):
        return [row["body"] for row in clients.ask("poll", name=name, count=count, timeout_s=60)]

    send("one", "two", "three")
    clients.ask("open_puller", name="before", group="pollers", topic="polled")
    assert polled("before", 3) == ["one", "two", "three"]
    assert clients.ask("seek_to_begin", name="before") == 4
    assert polled("before", 3) == ["one", "two", "three"]
    clients.ask("commit", name="before")
    clients.ask("stop_puller", name="before")
    eventually(lambda: sum(ConsumerOffsets(served.root).read("polled", "pollers").values()) == 3, "the group's offsets are written")
    send("four")
    clients.ask("open_puller", name="after", group="pollers", topic="polled")
    assert polled("after", 1) == ["four"]
    clients.ask("stop_puller", name="after")
    clients.ask("open_puller", name="assigned", group="pollers", topic="polled", assigned=True)
    assert clients.ask("seek_to_begin", name="assigned") == 4
    assert polled("assigned", 4) == ["one", "two", "three", "four"]
    clients.ask("stop_puller", name="assigned")


@pytest.mark.ci
def test_a_client_with_binary_headers_sends_and_consumes(served, tmp_path):
    flags = [*FLAGS, "-Drocketmq.serialize.type=ROCKETMQ"]
    with available(), Clients(needs.java_command(), f"127.0.0.1:{served.ports[0]}", tmp_path, flags) as clients:
        assert clients.ask("header_form") == "ROCKETMQ"
        (sent,) = clients.ask("send", group="senders", how="sync", topic="binary", tags="t", property="red", bodies=["one"])
        (batch,) = clients.ask("send", group="senders", how="batch", topic="binary", tags="t", bodies=["two", "three"])
        assert sent["status"] == batch["status"] == "SEND_OK"
        clients.ask("subscribe", name="binary", group="binary_readers", topic="binary", tags="t")
        assert consumed(clients, "binary", 3) == ["one", "three", "two"]
        assert clients.ask("view", topic="binary", id=sent["id"])["body"] == "one"


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
        producer.put("from_python", b"hello", tags="t")
    eventually(lambda: "from_python" in TopicConfigs(served.root).read().rows, "the checkpointer has entered the topic")
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


def test_a_request_gets_its_reply(clients):
    clients.ask("send", group="senders", how="sync", topic="asked", bodies=["first"])
    clients.ask("subscribe", name="replier", group="replying", topic="asked", replies=True)
    clients.ask("take", name="replier", count=1, timeout_s=60)  # it has its queues
    sent = ["a question", "a long one " * 1000]
    assert clients.ask("request", group="askers", topic="asked", bodies=sent, timeout_ms=30_000) == [f"re: {body}" for body in sent]
    clients.ask("stop", name="replier")
    assert clients.ask("request", group="askers", topic="asked", bodies=["no one hears it"], timeout_ms=100) == [None]


def test_the_tools_show_and_change_topics_and_groups(served, clients):
    def admin(*words):
        return clients.ask("admin", arguments=list(words))

    broker = f"127.0.0.1:{served.ports[1]}"
    assert "broker-a" in admin("clusterList") and "V4_9_8" in admin("clusterList")
    assert "create topic to" in admin("updateTopic", "-b", broker, "-t", "by_tool", "-r", "3", "-w", "3")
    assert TopicConfigs(served.root).read().rows["by_tool"].read_queue_nums == 3
    assert "by_tool" in admin("topicList").split() and '"readQueueNums":3' in "".join(admin("topicRoute", "-t", "by_tool").split())
    sent = clients.ask("send", group="senders", how="sync", topic="by_tool", tags="t", bodies=["one", "two"])

    def shown():
        rows = [line.split() for line in admin("topicStatus", "-t", "by_tool").splitlines()]
        return sum(int(row[3]) for row in rows if row and row[0] == "broker-a")

    eventually(lambda: shown() == 2, "both messages are in their queues")
    assert "success" in admin("updateSubGroup", "-b", broker, "-g", "by_tool_group", "-r", "5")
    assert SubscriptionGroups(served.root).read().rows["by_tool_group"].retry_max_times == 5
    clients.ask("subscribe", name="tool", group="tool_readers", topic="by_tool")
    assert consumed(clients, "tool", 2) == ["one", "two"]
    assert "tool_readers" in admin("consumerProgress") and "by_tool" in admin("consumerProgress", "-g", "tool_readers")
    assert "by_tool" in admin("consumerConnection", "-g", "tool_readers")
    assert "commitLogMaxOffset" in admin("brokerStatus", "-b", broker)
    assert sent[0]["unique"] in admin("queryMsgByKey", "-t", "by_tool", "-k", "one")
    assert sent[0]["id"] in admin("queryMsgById", "-i", sent[0]["id"])
    assert "success" in admin("cleanUnusedTopic", "-b", broker)
    assert "success" in admin("deleteTopic", "-n", f"127.0.0.1:{served.ports[0]}", "-c", "DefaultCluster", "-t", "by_tool")
    assert "by_tool" not in TopicConfigs(served.root).read().rows
    assert "success" not in admin("cleanUnusedTopic", "-c", "DefaultCluster"), "its messages are still there"


@pytest.mark.long
def test_a_traced_message_is_found_by_its_trace(clients):
    (sent,) = clients.ask("send", group="traced_senders", how="sync", topic="traced", bodies=["followed"])
    found = eventually(lambda: "traced_senders" in (told := clients.ask("admin", arguments=["queryMsgTraceById", "-i", sent["unique"]]))
                       and told, "the trace is written", timeout_s=60)
    assert "success" in found


@pytest.mark.long
def test_the_other_tools_work_too(served, clients, tmp_path):
    def admin(*words):
        return clients.ask("admin", arguments=list(words))

    broker = f"127.0.0.1:{served.ports[1]}"
    sent = clients.ask("send", group="senders", how="sync", topic="tools", tags="a", bodies=["one", "two", "three"])
    clients.ask("subscribe", name="tools", group="tool_group", topic="tools")
    assert consumed(clients, "tools", 3) == ["one", "three", "two"]
    queue, client_id = str(sent[0]["queue"]), re.search(r"\S+@\S+", admin("consumerConnection", "-g", "tool_group")).group()

    # Members answer through the gateway.
    assert "Rebalance OK" in admin("consumerStatus", "-g", "tool_group")
    assert "consumeThreadMax" in admin("consumerStatus", "-g", "tool_group", "-i", client_id, "-s")
    assert "CR_SUCCESS" in admin("queryMsgById", "-i", sent[0]["id"], "-g", "tool_group", "-d", client_id)
    assert client_id.partition("@")[0] in admin("consumerProgress", "-g", "tool_group", "-s", "true")
    # Progress, connections, queues.
    eventually(lambda: sum(ConsumerOffsets(served.root).read("tools", "tool_group").values()) == 3, "its offsets are written", timeout_s=60)
    assert "tool_group" in admin("brokerConsumeStats", "-b", broker)  # once in a JVM: this command keeps a closed client
    assert "producer group (senders)" in admin("producer", "-b", broker)
    assert re.search(r"tools\s+tool_group\s+\d+\s+\S+\s+\S+\s+3\s+3\s", admin("statsAll", "-t", "tools")), "3 came in a day, and 3 went"
    assert re.search(r"broker-a\s+0\s+0\s+[1-9]\d*\s+[1-9]", admin("clusterList", "-m"))
    assert "tagsCode=97" in admin("queryCq", "-t", "tools", "-q", queue, "-i", "0", "-c", "5", "-b", broker)
    assert "Queue Offset:        0" in admin("queryMsgByOffset", "-t", "tools", "-b", "broker-a", "-i", queue, "-o", "0")
    assert sent[0]["unique"] in admin("queryMsgByUniqueKey", "-t", "tools", "-i", sent[0]["unique"])
    assert "clone group offset success" in admin("cloneGroupOffset", "-s", "tool_group", "-d", "cloned", "-t", "tools", "-o", "false")
    # The name server's side.
    assert "orderConf=[broker-a:2]" in admin("updateTopic", "-b", broker, "-t", "tools_ordered", "-o", "true", "-r", "2", "-w", "2")
    assert "orderConf=[broker-a:2]" in admin("updateOrderConf", "-t", "tools_ordered", "-m", "get")
    assert "success" in admin("updateKvConfig", "-s", "n", "-k", "a", "-v", "b")
    assert "success" in admin("deleteKvConfig", "-s", "n", "-k", "a")
    assert " OK, " in admin("wipeWritePerm", "-b", "broker-a") and " OK, " in admin("addWritePerm", "-b", "broker-a")
    assert "orderMessageEnable" in admin("getNamesrvConfig") and "DefaultCluster" in admin("topicClusterList", "-t", "tools")
    for value in ("true", "false"):
        assert "success" in admin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", value)
        assert ("orderTopicConf" in admin("topicRoute", "-t", "tools_ordered")) == (value == "true")
    assert "broker-a" in admin("allocateMQ", "-t", "tools", "-i", "192.0.2.1,192.0.2.2")
    # The broker's.
    assert "maxMessageSize" in admin("getBrokerConfig", "-b", broker) and "retryMaxTimes" in admin("getConsumerConfig", "-g", "tool_group")
    assert "success" in admin("updateBrokerConfig", "-b", broker, "-k", "fileReservedTime", "-v", "71")
    assert re.search(r"^fileReservedTime\s*=\s*71$", admin("getBrokerConfig", "-b", broker), re.MULTILINE)
    assert "success" in admin("cleanExpiredCQ", "-b", broker) and "success" in admin("deleteExpiredCommitLog", "-b", broker)
    assert "equals to the old one" in admin("updateTopicPerm", "-b", broker, "-t", "tools", "-p", "6")
    for command in ("exportMetadata", "exportConfigs", "exportMetrics"):
        assert "success" in admin(command, "-c", "DefaultCluster", "-f", str(tmp_path))
    # Messages.
    assert "SEND_OK" in admin("sendMsgStatus", "-b", "broker-a", "-s", "8", "-c", "2")
    assert "Avg RT" in admin("checkMsgSendRT", "-t", "tools", "-a", "2", "-s", "8")
    assert "SEND_OK" in admin("sendMessage", "-t", "tools", "-p", "hello")
    assert "Consume ok" in admin("consumeMessage", "-t", "tools", "-c", "3")
    assert sent[0]["unique"] in admin("printMsgByQueue", "-t", "tools", "-a", "broker-a", "-i", queue, "-p", "true")
    assert "#offset" in admin("skipAccumulatedMessage", "-g", "tool_group", "-t", "tools")
    # A group that is away: the tool sets each queue's offset itself.
    clients.ask("stop", name="tools")
    assert "#rollbackOffset" in admin("resetOffsetByTime", "-g", "tool_group", "-t", "tools", "-s", "0")
    assert "success" in admin("deleteSubGroup", "-b", broker, "-g", "tool_group")


@pytest.mark.long
def test_a_group_is_set_back_by_the_tools(served, clients):
    clients.ask("send", group="senders", how="sync", topic="set_back", bodies=["one", "two"])
    clients.ask("subscribe", name="set_back", group="set_backers", topic="set_back")
    assert consumed(clients, "set_back", 2) == ["one", "two"]
    clients.ask("admin", arguments=["resetOffsetByTime", "-g", "set_backers", "-t", "set_back", "-s", "0"])
    assert consumed(clients, "set_back", 4) == ["one", "one", "two", "two"]


@pytest.mark.long
def test_kills_under_load_lose_nothing_acknowledged_and_consumers_continue(served, clients):
    clients.ask("subscribe", name="survivor", group="survivors", topic="survived")
    clients.begin("stream", group="survivors_feed", topic="survived", ms=45_000)
    for victim in ("gateway", "writer", "all", "gateway", "reputter", "flusher", "all"):
        goal = count(served, "survived") + 50
        eventually(lambda goal=goal: count(served, "survived") >= goal, f"messages are stored before the kill of {victim}", timeout_s=60)
        if victim == "all":
            served.engine.kill_all()
            served.engine.start()
        else:
            before = served.engine.incarnation(victim)
            served.engine.kill(victim)
            served.engine.wait_back(victim, before)
    goal = count(served, "survived") + 50
    eventually(lambda: count(served, "survived") >= goal, "messages are stored after the last kill", timeout_s=60)
    acknowledged = set(clients.answer())
    taken: list[str] = []

    def all_taken():
        taken[:] = [row["body"] for row in clients.ask("take", name="survivor", count=0, timeout_s=0)]
        return acknowledged <= set(taken)

    eventually(all_taken, "everything acknowledged is consumed", timeout_s=120)
    print(f"{len(acknowledged)} acknowledged, {len(set(taken))} different ones consumed, {len(taken) - len(set(taken))} again")
    with pyengine.open_store(served.root) as store:
        stored = {message.body.decode() for queue_id in store.queue_ids("survived") for message in every_message(store, queue_id)}
    assert acknowledged <= stored and len(acknowledged) > 350
    assert not [finding for finding in check_now(served.root, load_config(served.root)).findings if finding.severity is Severity.ERROR]


def every_message(store, queue_id, topic="survived"):
    offset, end = store.queue_range(topic, queue_id, "committed")
    while offset < end:
        got = store.get_message(topic, queue_id, offset, level="committed")
        yield from got.messages
        offset = got.next_begin_offset


def count(served, topic):
    with pyengine.open_store(served.root) as store:
        return sum(store.queue_range(topic, queue_id, "committed")[1] for queue_id in store.queue_ids(topic))
