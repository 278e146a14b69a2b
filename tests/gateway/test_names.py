"""Routes, names and new topics and groups, as clients see them and as the files have them."""

from __future__ import annotations

import asyncio
import errno
import json
import threading

import pytest

import pyengine
from fix_gateway import heartbeat, pull_fields, send_fields, start_served
from pyengine.errors import DiskError, UsageError
from pyengine.gateway import codes
from pyengine.gateway.connections import TurnExecutor
from pyengine.gateway.names import GROUP_CHARS_MAX, Names, group_fault, topic_fault
from pyengine.storage.config import load_config
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from waiting import eventually


@pytest.mark.parametrize("name", [None, "", " ", "a b", "a/b", "..", "a@b", "t\n", "x" * 128, "\u00e9"],
                         ids=["absent", "empty", "blank", "space", "slash", "dots", "at", "line", "long", "accent"])
def test_a_name_that_rocketmq_refuses_is_none(name):
    assert topic_fault(name) and group_fault(name)


def test_names_of_groups_leave_room_for_their_retry_topic():
    assert topic_fault("x" * 127) == "" and group_fault("x" * GROUP_CHARS_MAX) == ""
    assert group_fault("x" * (GROUP_CHARS_MAX + 1)) and topic_fault("%RETRY%" + "x" * GROUP_CHARS_MAX) == ""


def test_the_route_of_the_topic_that_new_ones_are_made_after(served):
    answer = served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
    broker = f"127.0.0.1:{served.ports[1]}"
    assert answer.code == codes.SUCCESS and answer.body.decode() == (
        '{"brokerDatas":[{"brokerAddrs":{"0":"' + broker + '"},"brokerName":"broker-a","cluster":"DefaultCluster"}],'
        '"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":7,"readQueueNums":8,"topicSysFlag":0,'
        '"writeQueueNums":8}]}')
    old = served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}, version=300)
    assert b'"brokerAddrs":{0:"' in old.body
    strict = served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102", "acceptStandardJsonOnly": True}, version=300)
    assert strict.body.lower() == answer.body.lower()


def test_a_topic_that_is_not_there_has_no_route(served):
    answer = served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "gone"})
    assert answer.code == codes.TOPIC_NOT_EXIST
    assert answer.remark.startswith("No topic route info in name server for the topic: gone\n")
    assert served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC).code == codes.TOPIC_NOT_EXIST


def test_the_name_server_says_which_codes_it_does_not_serve(served):
    assert served.name_server().ask(codes.SEND_MESSAGE).code == codes.REQUEST_CODE_NOT_SUPPORTED
    assert served.broker().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}).code == codes.REQUEST_CODE_NOT_SUPPORTED


def test_a_first_message_to_a_retry_topic_has_the_queues_that_its_client_chose_from(served):
    """A group's own heartbeat makes one queue, but a client takes any queue of the default topic's route and tries no second time."""
    for queue in range(4):
        assert served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(f"%RETRY%early{queue}", queue), b"x").code == codes.SUCCESS
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("%RETRY%early_unit", 3, k="true"), b"x").code == codes.SUCCESS
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("%RETRY%no_default", 0, c="gone"), b"x").code == codes.SUCCESS
    topics = TopicConfigs(served.root).read().rows
    assert topics["%RETRY%early3"] == TopicConfig("%RETRY%early3", 4, 4)
    assert topics["%RETRY%early_unit"] == TopicConfig("%RETRY%early_unit", 4, 4, topic_sys_flag=2)
    assert topics["%RETRY%no_default"] == TopicConfig("%RETRY%no_default", 1, 1)
    TopicConfigs(served.root).delete("%RETRY%early_unit")  # other tests ask for all topics of units


def test_a_first_message_creates_its_topic_as_the_broker_would(served):
    assert served.broker().ask(codes.SEND_MESSAGE_V2, send_fields("fresh", d=3), b"x").code == codes.SUCCESS
    assert TopicConfigs(served.root).read().rows["fresh"] == TopicConfig("fresh", 3, 3, perm=6)
    route = json.loads(served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "fresh"}).body)
    assert route["queueDatas"][0] | {"perm": 6, "readQueueNums": 3, "writeQueueNums": 3} == route["queueDatas"][0]
    topics = json.loads(served.name_server().ask(codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"]
    assert {"fresh", "TBW102", "SCHEDULE_TOPIC_XXXX"} <= set(topics)
    assert json.loads(served.name_server().ask(codes.GET_TOPICS_BY_CLUSTER, {"cluster": "another"}).body) == {"topicList": []}


def test_a_message_to_the_topic_that_new_ones_are_made_after_does_not_end_that(served):
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("TBW102"), b"x").code == codes.SUCCESS
    with pyengine.connect(served.root) as producer:
        producer.put("entered_after_it", b"x")
    eventually(lambda: "entered_after_it" in TopicConfigs(served.root).read().rows, "the checkpointer has entered new topics")
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("made_after_it"), b"x").code == codes.SUCCESS


def test_messages_to_the_topics_of_broker_and_cluster_leave_those_as_they_are(served):
    def routes():
        told = (served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}) for topic in topics)
        return [json.loads(answer.body)["queueDatas"] for answer in told]

    topics, client = ("DefaultCluster", "broker-a", "DefaultCluster_REPLY_TOPIC"), served.broker()
    before = routes()
    for topic in topics:
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"x").code == codes.SUCCESS
    with pyengine.connect(served.root) as producer:
        producer.put("entered_after_them", b"x")
    eventually(lambda: "entered_after_them" in TopicConfigs(served.root).read().rows, "the checkpointer has entered new topics")
    assert routes() == before


def test_rocketmqs_own_topics_and_groups_are_there_whatever_may_be_made(tmp_path):
    served = start_served(tmp_path / "store", auto_create_topic_enable=False, auto_create_subscription_group=False)
    try:
        for topic, perm, queues in (("DefaultCluster", 7, 16), ("broker-a", 7, 1), ("SELF_TEST_TOPIC", 6, 1)):
            told = json.loads(served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).body)["queueDatas"][0]
            assert (told["perm"], told["readQueueNums"], told["writeQueueNums"]) == (perm, queues, queues)
        client = served.broker()
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("broker-a"), b"x").code == codes.SUCCESS
        pulled = client.ask(codes.PULL_MESSAGE, pull_fields("broker-a", group="TOOLS_CONSUMER"))
        assert pulled.code in (codes.SUCCESS, codes.PULL_NOT_FOUND)
        unknown = client.ask(codes.PULL_MESSAGE, pull_fields("broker-a", group="another"))
        assert unknown.code == codes.SUBSCRIPTION_GROUP_NOT_EXIST
        groups = json.loads(client.ask(codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
        assert "TOOLS_CONSUMER" in groups and "another" not in groups
    finally:
        served.close()


def test_a_topic_is_not_made_after_one_that_does_not_let_it(served):
    answer = served.broker().ask(codes.SEND_MESSAGE_V2, send_fields("refused", c="fresh_no_default"), b"x")
    assert answer.code == codes.TOPIC_NOT_EXIST and "refused" not in TopicConfigs(served.root).read().rows


def test_a_topic_that_another_process_makes_or_changes_is_seen(served):
    TopicConfigs(served.root).create(TopicConfig("by_hand", 2, 2))
    ask = served.name_server().ask
    assert json.loads(ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "by_hand"}).body)["queueDatas"][0]["writeQueueNums"] == 2
    TopicConfigs(served.root).update("by_hand", write_queue_nums=5)
    assert json.loads(ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "by_hand"}).body)["queueDatas"][0]["writeQueueNums"] == 5


def test_a_topic_put_without_the_gateway_gets_a_route_and_can_be_pulled(served):
    with pyengine.connect(served.root) as producer:
        producer.put("only_in_the_log", b"here", queue_id=2)
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message("only_in_the_log", 2, 0, timeout_s=30)
    ask = served.name_server().ask
    answer = eventually(lambda: (found := ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "only_in_the_log"})).body and found,
                        "the topic is entered")
    route = json.loads(answer.body)
    assert route["queueDatas"][0]["readQueueNums"] == 3
    assert served.broker().ask(codes.PULL_MESSAGE, pull_fields("only_in_the_log", queue_id=2)).code == codes.SUCCESS


def test_the_cluster_has_one_broker(served):
    found = served.name_server().ask(codes.GET_BROKER_CLUSTER_INFO).body.decode()
    assert found == ('{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"127.0.0.1:%d"},"brokerName":"broker-a","cluster":'
                     '"DefaultCluster"}},"clusterAddrTable":{"DefaultCluster":["broker-a"]}}' % served.ports[1])


def test_a_group_that_comes_is_entered_with_its_retry_topic(served):
    assert heartbeat(served.broker(), "me", "newcomers").code == codes.SUCCESS
    group = SubscriptionGroups(served.root).read().rows["newcomers"]
    assert (group.retry_max_times, group.retry_queue_nums, group.consume_enable) == (16, 1, True)
    assert TopicConfigs(served.root).read().rows["%RETRY%newcomers"] == TopicConfig("%RETRY%newcomers", 1, 1)


def test_topics_that_clients_of_a_unit_make_are_the_units(served):
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("units", k="true"), b"hello").code == codes.SUCCESS
    assert heartbeat(client, "me", "unit_readers", is_of_unit=True).code == codes.SUCCESS
    topics = TopicConfigs(served.root).read().rows
    assert (topics["units"].topic_sys_flag, topics["%RETRY%unit_readers"].topic_sys_flag) == (1, 2)
    for name in ("units", "%RETRY%unit_readers"):
        TopicConfigs(served.root).delete(name)  # other tests ask for all topics of units


def test_routes_say_that_the_broker_takes_no_messages_until_that_is_taken_back(served):
    client = served.name_server()

    def perm():
        return json.loads(client.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "BenchmarkTest"}).body)["queueDatas"][0]["perm"]

    wiped = client.ask(codes.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
    assert int(wiped.fields["wipeTopicCount"]) >= 8 and perm() == 4
    added = client.ask(codes.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "broker-a"})
    assert added.fields == {"addTopicCount": wiped.fields["wipeTopicCount"]} and perm() == 6
    assert client.ask(codes.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "another"}).fields == {"wipeTopicCount": "0"} and perm() == 6


def test_tools_keep_values_by_keys(served):
    client = served.name_server()
    names = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T"}
    assert client.ask(codes.GET_KV_CONFIG, names).code == codes.QUERY_NOT_FOUND
    assert client.ask(codes.PUT_KV_CONFIG, names | {"value": "broker-a:4"}).code == codes.SUCCESS
    assert client.ask(codes.GET_KV_CONFIG, names).fields == {"value": "broker-a:4"}
    assert client.ask(codes.GET_KVLIST_BY_NAMESPACE, names).body == b'{"table":{"T":"broker-a:4"}}'
    kept = json.loads((served.root / "config" / "kvConfig.json").read_text())
    assert kept == {"configTable": {"ORDER_TOPIC_CONFIG": {"T": "broker-a:4"}}}
    assert client.ask(codes.DELETE_KV_CONFIG, names).code == codes.SUCCESS
    for code in (codes.GET_KV_CONFIG, codes.GET_KVLIST_BY_NAMESPACE):
        assert client.ask(code, names).code == codes.QUERY_NOT_FOUND
    for number in range(40):
        answer = client.ask(codes.PUT_KV_CONFIG, {"namespace": "n", "key": number, "value": "x" * 32_000})
        if answer.code != codes.SUCCESS:
            break
    assert number > 30 and "characters" in answer.remark, "a file of any length would be a way to fill the disk"


def test_the_name_server_tells_its_settings_and_topics_by_their_flags(served):
    client = served.name_server()
    assert b"orderMessageEnable=false\n" in client.ask(codes.GET_NAMESRV_CONFIG).body
    assert set(json.loads(client.ask(codes.GET_SYSTEM_TOPIC_LIST_FROM_NS).body)["topicList"]) == {"DefaultCluster", "broker-a"}
    for name, flags in (("of_unit", 1), ("with_unit_sub", 2), ("both", 3)):
        TopicConfigs(served.root).create(TopicConfig(name, topic_sys_flag=flags))

    def listed(code):
        return json.loads(client.ask(code).body)["topicList"]

    assert listed(codes.GET_UNIT_TOPIC_LIST) == ["both", "of_unit"]
    assert listed(codes.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["both", "with_unit_sub"]
    assert listed(codes.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["with_unit_sub"]


def test_a_tool_has_routes_tell_the_order_of_their_topic(served):
    client, path = served.name_server(), served.root / "config" / "namesrvConfig.json"

    def route():
        return json.loads(client.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "BenchmarkTest"}).body)

    def update(body):
        answer = client.ask(codes.UPDATE_NAMESRV_CONFIG, {}, body)
        return answer.code, answer.remark or ""

    client.ask(codes.PUT_KV_CONFIG, {"namespace": "ORDER_TOPIC_CONFIG", "key": "BenchmarkTest", "value": "broker-a:4"})
    assert "orderTopicConf" not in route()
    assert update(b"#a comment\norderMessageEnable=true\n") == (codes.SUCCESS, "")
    assert route()["orderTopicConf"] == "broker-a:4" and json.loads(path.read_text()) == {"orderMessageEnable": "true"}
    assert b"orderMessageEnable=true\n" in client.ask(codes.GET_NAMESRV_CONFIG).body
    assert "orderTopicConf" not in json.loads(client.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "SELF_TEST_TOPIC"}).body)
    for value, told in (("broker-b:4;broker-a:8", "broker-a:8"), ("broker-a:1000000000", "broker-a:1024"), ("broker-a:-1", None),
                        ("broker-a", None), ("broker-a:\u0664", None), ("broker-b:4", None), ("broker-a:" + "9" * 5000, None)):
        client.ask(codes.PUT_KV_CONFIG, {"namespace": "ORDER_TOPIC_CONFIG", "key": "BenchmarkTest", "value": value})
        assert route().get("orderTopicConf") == told, "what a client without a key has set breaks no other client"
    client.ask(codes.PUT_KV_CONFIG, {"namespace": "ORDER_TOPIC_CONFIG", "key": "BenchmarkTest", "value": "broker-a:4"})
    for body, code, why in ((b"kvConfigPath=/tmp/x\n", codes.NO_PERMISSION, "Can not update config path"),
                            (b"orderMessageEnable=false\nconfigStorePath=x\n", codes.NO_PERMISSION, "Can not update config path"),
                            (b"orderMessageEnable=false\nlistenPort=1\n", codes.SYSTEM_ERROR, "listenPort: the gateway's name server has"),
                            (b"orderMessageEnable=maybe\n", codes.SYSTEM_ERROR, "give true or false"),
                            (b"", codes.SYSTEM_ERROR, "give true or false"),
                            (b"\xff=1", codes.SYSTEM_ERROR, "\ufffd: the gateway's name server has"),
                            (b"orderMessageEnable", codes.SYSTEM_ERROR, "give true or false"),
                            (b"x" * 100_000 + b"=1\n", codes.SYSTEM_ERROR, "bytes of settings are more than")):
        assert update(body)[0] == code and why in update(body)[1]
    assert route()["orderTopicConf"] == "broker-a:4"
    path.write_text('{"productEnvName":"center","orderMessageEnable":"true"}')
    assert update(b"orderMessageEnable=false\n") == (codes.SUCCESS, "") and "orderTopicConf" not in route()
    assert json.loads(path.read_text()) == {"productEnvName": "center", "orderMessageEnable": "false"}, "the other fields of the file stay"


def test_groups_get_their_topics_beside_as_many_as_tools_may_make(tmp_path, monkeypatch):
    """Otherwise no push consumer of a new group starts, and no message becomes a dead letter."""
    monkeypatch.setattr("pyengine.gateway.names.TOPICS_MAX", 1)
    monkeypatch.setattr("pyengine.gateway.names.TOPICS_OF_TOOLS_MAX", 4)
    (tmp_path / "config").mkdir()
    TopicConfigs(tmp_path).create(TopicConfig("of a tool"))

    async def whole(executor):
        names = Names(tmp_path, load_config(tmp_path), executor)
        for name in ("T", "%RETRY%invented"):
            with pytest.raises(UsageError, match="there are 1 topics already"):
                await names.create_for_send(name, "TBW102", 4)
        await names.group_or_new("g")
        for name in ("%RETRY%g", "%DLQ%g"):
            assert (await names.create(TopicConfig(name))).topic == name
        await names.create_for_send("%RETRY%g", None, 4)
        TopicConfigs(tmp_path).create(TopicConfig("of a tool too"))
        await names.group_or_new("h")
        with pytest.raises(UsageError, match="there are 4 topics already"):
            await names.create(TopicConfig("%RETRY%h"))

    with TurnExecutor(2, "test") as executor:
        asyncio.run(whole(executor))


def test_a_table_that_cannot_be_read_now_is_read_at_the_next_look(tmp_path, monkeypatch):
    configs = TopicConfigs(tmp_path)
    configs.create(TopicConfig("orders"))

    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    names = Names(tmp_path, load_config(tmp_path), None)
    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.durable_file.read_small_file", refuse)
        with pytest.raises(DiskError, match="Too many open files"):
            names.topic("orders")
    assert names.topic("orders") is not None
    configs.create(TopicConfig("later"))
    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.durable_file.read_small_file", refuse)
        assert names.topic("orders") is not None, "what was known holds"
    assert names.topic("later") is not None


def test_the_loop_does_not_read_topics_and_groups_that_the_gateway_has_entered(tmp_path, monkeypatch):
    """A file with 10,000 topics takes a fifth of a second, in which no client is served."""
    (tmp_path / "config").mkdir()
    read = []

    async def whole(executor):
        names = Names(tmp_path, load_config(tmp_path), executor)
        assert names.topic("first") is names.group("first") is None
        for files in (names.topic_configs, names.group_configs):
            monkeypatch.setattr(files, "read", lambda real=files.read: (read.append(threading.current_thread()), real())[1])
        for name in ("first", "second"):
            await asyncio.gather(names.create(TopicConfig(name)), names.group_or_new(name))
            assert names.topic(name).topic == name and names.group(name).group == name and names.recent_topic(name).topic == name

    with TurnExecutor(2, "test") as executor:
        asyncio.run(whole(executor))
    assert read and threading.current_thread() not in read


def test_after_a_read_ahead_the_loop_reads_no_topics_or_groups_that_others_have_changed(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    read = []

    async def whole(executor):
        for files in (TopicConfigs, SubscriptionGroups):
            monkeypatch.setattr(files, "read", lambda own, real=files.read: (read.append(threading.current_thread()), real(own))[1])
        names = Names(tmp_path, load_config(tmp_path), executor)
        await names.read_ahead()
        TopicConfigs(tmp_path).create(TopicConfig("T"))
        SubscriptionGroups(tmp_path).put(SubscriptionGroup("g"))
        assert names.topic("T") is names.recent_topic("T") is names.group("g") is None
        await names.read_ahead()
        assert names.topic("T") and names.recent_topic("T") and names.group("g")

    with TurnExecutor(2, "test") as executor:
        asyncio.run(whole(executor))
    assert len(read) == 4 and threading.current_thread() not in read
