"""The answers to RocketMQ's tools, and the changes that they make."""

from __future__ import annotations

import asyncio
import errno
import json
import re

import pytest

import pyengine
from fix_engine import SMALL
from fix_gateway import heartbeat, pull_fields, send_fields, start_served, subscription
from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineUnavailableError, UsageError
from pyengine.gateway import admin as admin_module
from pyengine.gateway import codes
from pyengine.gateway.admin import Admin, Counts
from pyengine.gateway.connections import Request, TurnExecutor
from pyengine.gateway.names import Names
from pyengine.gateway.wire import Frame
from pyengine.ipc.cleaning import Cleaning
from pyengine.ipc.shared_objects import find_folder
from pyengine.storage.config import REFUSED_KEYS, config_path, read_file
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.file_system import measure
from waiting import eventually


def topic_fields(topic, **changes):
    return {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0, "order": "false", **changes}


def test_a_topic_is_made_changed_and_deleted(served):
    client = served.broker()
    files = TopicConfigs(served.root)
    assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields("made")).code == codes.SUCCESS
    assert files.read().rows["made"] == TopicConfig("made", 2, 2)
    assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields("made", readQueueNums=4, perm=4)).code == codes.SUCCESS
    assert files.read().rows["made"] == TopicConfig("made", 4, 2, perm=4)
    rows = json.loads(client.ask(codes.GET_ALL_TOPIC_CONFIG).body)["topicConfigTable"]
    assert rows["made"]["readQueueNums"] == 4 and "TBW102" in rows
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": "made"}).code == codes.SUCCESS
    assert served.name_server().ask(codes.DELETE_TOPIC_IN_NAMESRV, {"topic": "made"}).code == codes.SUCCESS
    assert served.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "made"}).code == codes.TOPIC_NOT_EXIST
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": "made"}).code == codes.SUCCESS


def test_a_tool_of_rocketmq_5_asks_for_one_topic_or_group(served, topic):
    client = served.broker()
    told = json.loads(client.ask(codes.GET_TOPIC_CONFIG, {"topic": topic}).body)
    rows = json.loads(client.ask(codes.GET_ALL_TOPIC_CONFIG).body)["topicConfigTable"]
    assert told == rows[topic] | {"attributes": {"message.type": "MIXED"}}
    assert client.ask(codes.GET_TOPIC_CONFIG, {"topic": "gone"}).code == codes.TOPIC_NOT_EXIST
    for text, kind in (("+message.type=TRANSACTION", "TRANSACTION"), ("", "TRANSACTION"), ("+message.type=FIFO", "FIFO"),
                       ("-message.type", "MIXED")):
        assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields(topic, attributes=text)).code == codes.SUCCESS
        assert json.loads(client.ask(codes.GET_TOPIC_CONFIG, {"topic": topic}).body)["attributes"] == {"message.type": kind}
    for text in ("+message.type=LITE", "+queue.type=BatchCQ", "message.type", "-"):
        assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields(topic, attributes=text)).code == codes.SYSTEM_ERROR
    told = json.loads(client.ask(codes.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "TOOLS_CONSUMER"}).body)
    assert told["groupName"] == "TOOLS_CONSUMER" and told["retryMaxTimes"] == 16
    assert client.ask(codes.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "gone"}).code == codes.SUBSCRIPTION_GROUP_NOT_EXIST


@pytest.fixture
def alone(tmp_path):
    """A store whose tables nobody else changes."""
    store = start_served(tmp_path / "store")
    yield store
    store.close()


def test_the_data_version_changes_with_the_tables_whoever_changes_them(alone):
    served, topic, group = alone, "T", "versioned"
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"first").code == codes.SUCCESS

    def versions():
        for code, name in ((codes.GET_ALL_TOPIC_CONFIG, "topics.json"), (codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroup.json")):
            told = json.loads(client.ask(code).body)["dataVersion"]
            file = json.loads((served.root / "config" / name).read_text())["dataVersion"] if (served.root / "config" / name).exists() else {
                "counter": 0, "timestamp": 0}
            assert told == file, "that of the file, as RocketMQ's slaves and name servers compare it"
            yield told

    def by_a_program():
        with pyengine.connect(served.root) as producer:
            assert producer.put(f"{topic}_put", b"x")
        eventually(lambda: f"{topic}_put" in TopicConfigs(served.root).read().rows, "the checkpointer has entered it")

    changes = [(0, lambda: client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields(f"{topic}_made"))),
               (0, lambda: client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields(f"{topic}_made", perm=4))),
               (0, lambda: client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": f"{topic}_made"})),
               (0, lambda: client.ask(codes.SEND_MESSAGE_V2, send_fields(f"{topic}_sent"))), (0, by_a_program),
               (0, lambda: TopicConfigs(served.root).update(f"{topic}_put", perm=4)),
               (1, lambda: client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": group, "consumeEnable": False})),
               (1, lambda: client.ask(codes.PULL_MESSAGE, pull_fields(topic, group=f"{group}_new"))),
               (1, lambda: client.ask(codes.DELETE_SUBSCRIPTIONGROUP, {"groupName": group}))]
    for which, change in changes:
        before = list(versions())
        change()
        after = list(versions())
        assert after[which]["counter"] == before[which]["counter"] + 1 and after[which]["timestamp"] >= before[which]["timestamp"]
        assert after[1 - which] == before[1 - which]
    client.ask(codes.UPDATE_AND_CREATE_TOPIC, topic_fields(f"{topic}_sent", readQueueNums=4, writeQueueNums=4, perm=6))
    assert list(versions()) == after, "nothing has changed"


def test_the_version_of_the_settings_changes_with_them(served):
    client = served.broker()
    before = client.ask(codes.GET_BROKER_CONFIG).fields["version"]
    assert client.ask(codes.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=71\n").code == codes.SUCCESS
    assert client.ask(codes.GET_BROKER_CONFIG).fields["version"] != before
    assert client.ask(codes.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=72\n").code == codes.SUCCESS


def test_a_topic_that_may_not_be_is_not_made(served):
    client = served.broker()
    for fields in (topic_fields("bad topic"), topic_fields("TBW102"), topic_fields("fine", readQueueNums=0), topic_fields("fine", perm=99)):
        assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, fields).code == codes.SYSTEM_ERROR
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": "SCHEDULE_TOPIC_XXXX"}).code == codes.SYSTEM_ERROR
    assert "fine" not in TopicConfigs(served.root).read().rows


def test_a_group_is_made_changed_and_deleted_with_its_offsets(served, topic):
    client = served.broker()
    body = {"groupName": "toolmade", "consumeEnable": True, "retryMaxTimes": 7, "retryQueueNums": 1, "brokerId": 0}
    assert client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body).code == codes.SUCCESS
    assert SubscriptionGroups(served.root).read().rows["toolmade"].retry_max_times == 7
    assert json.loads(client.ask(codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]["toolmade"]["retryMaxTimes"] == 7
    ConsumerOffsets(served.root).commit(topic, "toolmade", {1: 5})
    fields = {"groupName": "toolmade", "removeOffset": "true"}
    assert client.ask(codes.DELETE_SUBSCRIPTIONGROUP, fields).code == codes.SUCCESS
    assert "toolmade" not in SubscriptionGroups(served.root).read().rows
    assert ConsumerOffsets(served.root).read(topic, "toolmade") == {}
    for bad in ([], {}, {"groupName": "a/b"}, {"groupName": "ok", "retryMaxTimes": "x"}):
        assert client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=bad).code == codes.SYSTEM_ERROR


def test_a_tool_cannot_make_the_files_of_topics_and_groups_grow_without_end(served, topic):
    client = served.broker()
    body = {"groupName": "grown", "retryMaxTimes": 7, "retryQueueNums": 1, "brokerId": 0}
    assert client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body | {"noField": "x" * 100_000}).code == codes.SUCCESS
    assert SubscriptionGroups(served.root).read().rows["grown"].more == {}
    answer = client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body | {"brokerId": 1 << 31})
    assert answer.code == codes.SYSTEM_ERROR and "32 bits" in answer.remark

    names = Names(served.root, EngineConfig(), None)

    async def ask(code, fields, body=b""):
        with TurnExecutor(1, "test") as executor, pyengine.open_store(served.root) as reader:
            admin = Admin(reader, names, None, None, None, executor, None)
            await admin.handlers[code](Request(None, Frame(code, fields, body, 1), 0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyengine.gateway.admin.GROUPS_MAX", 1)
        patch.setattr("pyengine.gateway.admin.TOPICS_OF_TOOLS_MAX", 1)
        asyncio.run(ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, json.dumps(body).encode()))
        with pytest.raises(UsageError, match="groups already"):
            asyncio.run(ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, json.dumps(body | {"groupName": "one_more"}).encode()))
        with pytest.raises(UsageError, match="topics already"):
            asyncio.run(ask(codes.UPDATE_AND_CREATE_TOPIC, {"topic": "one_more"}))


def test_the_stores_own_groups_are_not_deleted(served, topic):
    ConsumerOffsets(served.root).commit(topic, "CID_RMQ_SYS_OWN", {1: 5})
    fields = {"groupName": "CID_RMQ_SYS_OWN", "removeOffset": "true"}
    assert served.broker().ask(codes.DELETE_SUBSCRIPTIONGROUP, fields).code == codes.NO_PERMISSION
    assert ConsumerOffsets(served.root).read(topic, "CID_RMQ_SYS_OWN") == {1: 5}


def test_queues_and_groups_are_shown_as_the_tools_read_them(served, topic):
    client = served.broker()
    client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"x")
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
    shown = client.ask(codes.GET_TOPIC_STATS_INFO, {"topic": topic}).body.decode()
    assert shown.startswith('{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"' + topic + '"}:{"lastUpdateTimestamp":')
    assert shown.count('"maxOffset":1') == 2
    assert client.ask(codes.GET_TOPIC_STATS_INFO, {"topic": "gone"}).code == codes.TOPIC_NOT_EXIST
    client.ask(codes.UPDATE_CONSUMER_OFFSET, {"topic": topic, "queueId": 1, "consumerGroup": "shown", "commitOffset": 1})
    shown = client.ask(codes.GET_CONSUME_STATS, {"consumerGroup": "shown"}).body.decode()
    assert '"queueId":1,"topic":"' + topic + '"}:{"brokerOffset":1,"consumerOffset":1,' in shown
    nothing = b'{"consumeTps":0.0,"offsetTable":{}}'
    assert client.ask(codes.GET_CONSUME_STATS, {"consumerGroup": "nobody"}).body == nothing
    heartbeat(client, "one", "shown", subscription("another"))
    assert client.ask(codes.GET_CONSUME_STATS, {"consumerGroup": "shown"}).body == nothing, "it has left the topic"
    client.ask(codes.UNREGISTER_CLIENT, {"clientID": "one", "consumerGroup": "shown"})
    assert json.loads(client.ask(codes.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": topic}).body) == {"groupList": ["shown"]}


def test_connection_lists_show_connected_consumers_and_producers(served):
    client = served.broker()
    heartbeat(client, "me", "connected", subscription("T", "a || b", 3))
    shown = json.loads(client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "connected"}).body)
    assert [row["clientId"] for row in shown["connectionSet"]] == ["me"]
    assert shown["connectionSet"][0]["clientAddr"] == "%s:%d" % client.socket.getsockname()
    assert shown["subscriptionTable"]["T"]["tagsSet"] == ["a", "b"] and shown["subscriptionTable"]["T"]["codeSet"] == [97, 98]
    shown = json.loads(client.ask(codes.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "CLIENT_INNER_PRODUCER"}).body)
    assert "me" in [row["clientId"] for row in shown["connectionSet"]]
    assert client.ask(codes.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "nobody"}).code == codes.CONSUMER_NOT_ONLINE
    assert client.ask(codes.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "nobody"}).code == codes.SYSTEM_ERROR


def test_the_broker_tells_about_itself(served):
    client = served.broker()
    table = json.loads(client.ask(codes.GET_BROKER_RUNTIME_INFO).body)["table"]
    assert all(isinstance(value, str) for value in table.values()) and int(table["commitLogMaxOffset"]) >= 0
    used = measure(served.root).used_percent
    for name in ("commitLogDiskRatio", "consumeQueueDiskRatio"):
        assert abs(float(table[name]) * 100 - used) < 5, "as df counts it, without what is kept for root"
    config = client.ask(codes.GET_BROKER_CONFIG)
    assert config.fields["version"].startswith("{")
    told = {"brokerName": "broker-a", "listenPort": str(served.ports[1]), "fileReservedTime": "72", "flushDiskType": "ASYNC_FLUSH",
            "mappedFileSizeCommitLog": str(SMALL["mapped_file_size_commit_log_bytes"]), "storePathRootDir": str(served.root)}
    assert told.items() <= broker_settings(client).items()


def check_what_the_exporter_reads(table):
    """It takes these without asking whether they are there; one that is not ends its whole round. Returns the puts by their time."""
    for name in ("sendThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueHeadWaitTimeMills",
                 "queryThreadPoolQueueSize", "pullThreadPoolQueueSize", "sendThreadPoolQueueSize", "sendThreadPoolQueueCapacity",
                 "pullThreadPoolQueueCapacity", "queryThreadPoolQueueCapacity", "msgPutTotalTodayNow", "msgGetTotalTodayNow",
                 "msgPutTotalTodayMorning", "msgGetTotalTodayMorning", "msgPutTotalYesterdayMorning", "msgGetTotalYesterdayMorning",
                 "bootTimestamp", "startAcceptSendRequestTimeStamp", "commitLogMinOffset", "commitLogMaxOffset", "brokerVersion",
                 "pageCacheLockTimeMills", "getMessageEntireTimeMax", "putMessageEntireTimeMax", "putMessageTimesTotal",
                 "putMessageSizeTotal", "dispatchMaxBuffer", "dispatchBehindBytes", "remainTransientStoreBufferNumbs"):
        assert int(table[name]) >= 0, name
    for name in ("consumeQueueDiskRatio", "commitLogDiskRatio", "putMessageAverageSize", "putLatency99", "putLatency999"):
        assert float(table[name]) >= 0, name
    assert re.fullmatch(r"\d+ B", table["remainHowManyDataToFlush"])
    times = [pair.split(":") for pair in table["putMessageDistributeTime"].split(" ")]
    assert len(times) == 13 and [name for name, _ in times[:3]] == ["[<=0ms]", "[0~10ms]", "[10~50ms]"]
    return sum(int(count) for _, count in times)


def test_rocketmqs_exporter_gets_all_that_it_reads_of_the_broker_with_and_without_an_engine(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        client = served.broker()
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("exported"), b"x").code == codes.SUCCESS
        assert check_what_the_exporter_reads(json.loads(client.ask(codes.GET_BROKER_RUNTIME_INFO).body)["table"]) == 1
        served.engine.stop()

        async def ask():
            with TurnExecutor(1, "test") as executor, pyengine.open_store(served.root) as reader:
                return await Admin(reader, None, None, None, None, executor, None).runtime_info(None)

        assert check_what_the_exporter_reads(json.loads(asyncio.run(ask()).body)["table"]) == 0
    finally:
        served.close()


def broker_settings(client):
    return dict(line.split("=", 1) for line in client.ask(codes.GET_BROKER_CONFIG).body.decode().splitlines())


def test_settings_of_the_running_engine_are_changed_all_or_none(served):
    client = served.broker()
    before = broker_settings(client)
    assert client.ask(codes.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=48\ndeleteWhen=05\n").code == codes.SUCCESS
    changed = before | {"fileReservedTime": "48", "deleteWhen": "05"}
    assert broker_settings(client) == changed
    assert {"file_reserved_time_hours": 48, "delete_when": "05"}.items() <= read_file(config_path(served.root)).items()
    for body, why in ((b"deleteWhen=06\nfileReservedTime=long\n", "file_reserved_time_hours = long"),
                      (b"deleteWhen=06\nnotASetting=1\n", "notASetting"),
                      (b"deleteWhen=06\nflushDiskType=SYNC_FLUSH\n", "flushDiskType: taken at a start only"),
                      (b"deleteWhen=06\nmappedFileSizeCommitLog=1024\n", "fixed at creation"), (b"deleteWhen=06\n\xff", "\ufffd"),
                      (b"deleteWhen=06\nbrokerPermission=4\n", "brokerPermission=4: give topics their rights"),
                      (b"deleteWhen=06\nlistenPort=1\n", "gateway_broker_port decides it"), (b"", "no setting is given"),
                      (b"# nothing\n", "no setting is given"), (b"deleteWhen\n", "updateBrokerConfig deleteWhen: give key=value"),
                      (b"x" * 100_000 + b"=1\n", "bytes of settings are more than")):
        answer = client.ask(codes.UPDATE_BROKER_CONFIG, {}, body)
        assert answer.code == codes.SYSTEM_ERROR and why in answer.remark
    assert broker_settings(client) == changed


def test_a_changed_limit_of_pulls_and_of_puts_counts_for_the_gateway_at_once(served, topic):
    client = served.broker()
    for number in range(5):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"%d" % number).code == codes.SUCCESS
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 4, timeout_s=30, level="committed")
    for text, count in (("2", 2), ("32", 5)):
        body = b"maxTransferCountOnMessageInMemory=%s\nsyncFlushTimeout=%s000\n" % (text.encode(), text.encode())
        answer = client.ask(codes.UPDATE_BROKER_CONFIG, {}, body)
        assert (answer.code, answer.remark) == (codes.SUCCESS, None)
        assert broker_settings(client).items() >= {"maxTransferCountOnMessageInMemory": text, "syncFlushTimeout": f"{text}000"}.items()
        assert client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 1)).fields["nextBeginOffset"] == str(count)
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2), b"by a new session").code == codes.SUCCESS


def test_a_key_that_has_no_effect_here_is_kept_and_the_answer_says_so(served):
    client = served.broker()
    told = client.ask(codes.UPDATE_BROKER_CONFIG, {}, b"sendMessageThreadPoolNums=32\nflushCommitLogLeastPages=8\ndeleteWhen=03\n")
    assert told.code == codes.SUCCESS and "sendMessageThreadPoolNums is kept without effect: the gateway serves its clients" in told.remark
    assert "flushCommitLogLeastPages is kept without effect" in told.remark and "deleteWhen" not in told.remark
    shown = broker_settings(client)
    assert shown.items() >= {"sendMessageThreadPoolNums": "32", "flushCommitLogLeastPages": "8", "deleteWhen": "03"}.items()
    everything = "".join(f"{key}={value}\n" for key, value in shown.items() if key in REFUSED_KEYS or key == "storePathRootDir")
    assert client.ask(codes.UPDATE_BROKER_CONFIG, {}, everything.encode()).code == codes.SUCCESS, "what holds already may be set"
    assert client.ask(codes.UPDATE_BROKER_CONFIG, {}, b"deleteWhen=04\n").code == codes.SUCCESS


def test_messages_of_topics_and_groups_are_counted(served, topic):
    client = served.broker()
    for body in (b"2", b"3", b"4"):  # the first one made the topic
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), body)
    group = f"counting_{topic}"
    eventually(lambda: client.ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 0}).fields["offset"] == "4", "all are in the queue")
    client.ask(codes.PULL_MESSAGE, pull_fields(topic, offset=2, group=group))

    def counted(name, key):
        answer = client.ask(codes.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key})
        return json.loads(answer.body) if answer.code == codes.SUCCESS else None

    eventually(lambda: counted("TOPIC_PUT_NUMS", topic), "the gateway has looked at the engine's counters")
    for name, key, number in (("TOPIC_PUT_NUMS", topic, 4), ("GROUP_GET_NUMS", f"{topic}@{group}", 2)):
        found = counted(name, key)
        assert list(found) == ["statsMinute", "statsHour", "statsDay"]
        assert found["statsDay"]["sum"] == number and found["statsDay"]["tps"] > 0
    shown = client.ask(codes.GET_CONSUME_STATS, {"consumerGroup": group, "topic": topic}).body.decode()
    assert float(re.match(r'\{"consumeTps":([0-9.e-]+),', shown)[1]) > 0
    table = json.loads(client.ask(codes.GET_BROKER_RUNTIME_INFO).body)["table"]
    assert int(table["msgPutTotalTodayNow"]) >= 4 and int(table["msgGetTotalTodayNow"]) >= 2


def test_a_window_ends_with_what_is_older_and_another_engines_counters_begin_anew():
    now_s, puts = 1000.0, {"T": 5}
    counts = Counts(lambda: puts, clock_s=lambda: now_s)
    assert counts.windows("TOPIC_PUT_NUMS", "gone") is None
    assert [number for number, _ in counts.windows("TOPIC_PUT_NUMS", "T")] == [0, 0, 0], "what was before does not count"
    for _ in range(9):
        now_s += 10
        puts = {"T": puts["T"] + 10}
        counts.count_gets("T", "g", 1)
        counts.sample()
    assert counts.windows("TOPIC_PUT_NUMS", "T") == [(60, 1.0), (90, 1.0), (90, 1.0)]
    assert counts.windows("GROUP_GET_NUMS", "T@g") == [(6, 0.1), (9, 0.1), (9, 0.1)] and counts.total_gets == 9
    now_s, puts = now_s + 10, {"T": 2}
    assert counts.windows("TOPIC_PUT_NUMS", "T")[0][0] == 2


@pytest.mark.parametrize("error", [EngineUnavailableError("it starts again"), OSError(errno.EMFILE, "no descriptor")])
def test_counters_that_cannot_be_read_for_a_while_are_no_new_messages(error):
    now_s, answers = 1000.0, [{"T": 500}]

    def puts():
        answer = answers[-1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    counts = Counts(puts, clock_s=lambda: now_s)
    for answer in (error, {"T": 501}):
        now_s += 10
        answers.append(answer)
        counts.sample()
    assert counts.windows("TOPIC_PUT_NUMS", "T")[0][0] == 1


def test_no_more_groups_are_counted_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(admin_module, "COUNTED_MAX", 3)
    counts = Counts(dict)
    for number in range(9):
        counts.count_gets("T", f"g{number}", 1)
    assert counts.total_gets == 9 and [number for number in range(9) if counts.windows("GROUP_GET_NUMS", f"T@g{number}")] == [0, 1]


def test_groups_that_got_nothing_for_a_day_make_room_for_others(monkeypatch):
    monkeypatch.setattr(admin_module, "COUNTED_MAX", 4)
    now_s = 1000.0
    counts = Counts(dict, clock_s=lambda: now_s)

    def day_sums():
        return [found and found[2][0] for found in (counts.windows("GROUP_GET_NUMS", f"T@{name}") for name in ("busy", "idle", "new"))]

    for name in ("busy", "idle", "old"):
        counts.count_gets("T", name, 5)
    for _ in range(24):
        now_s += 3600
        counts.sample()
        counts.count_gets("T", "busy", 1)
    counts.count_gets("T", "new", 1)
    assert day_sums() == [29, 5, None], "it is full, and all got some in that day"
    now_s += 3600
    counts.sample()
    for name in ("idle", "new", "idle"):
        counts.count_gets("T", name, 7)
    assert day_sums() == [24, 14, 7] and counts.total_gets == 61


def test_each_admin_request_for_the_progress_of_a_group_returns_it(served, topic):
    client = served.broker()
    heartbeat(client, "me", "spanned", subscription(topic))
    for body in (b"x", b"y"):
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), body)
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 1, timeout_s=30, level="committed")
        first, last = store.get_message(topic, 1, 0, level="committed").messages
    commit = {"topic": topic, "queueId": 1, "consumerGroup": "spanned", "commitOffset": 1}
    client.ask(codes.UPDATE_CONSUMER_OFFSET, commit)
    client.ask(codes.UPDATE_CONSUMER_OFFSET, commit | {"consumerGroup": "quicker", "commitOffset": 2})

    spans = json.loads(client.ask(codes.QUERY_CONSUME_TIME_SPAN, {"topic": topic, "group": "spanned"}).body)["consumeTimeSpanSet"]
    span = spans[1]
    assert span.pop("delayTime") >= 0 and span == {
        "messageQueue": {"brokerName": "broker-a", "queueId": 1, "topic": topic}, "minTimeStamp": first.store_timestamp_ms,
        "maxTimeStamp": last.store_timestamp_ms, "consumeTimeStamp": first.store_timestamp_ms}
    assert spans[2]["minTimeStamp"] == -1 and spans[2]["delayTime"] == 0
    assert client.ask(codes.QUERY_CONSUME_TIME_SPAN, {"topic": "gone", "group": "g"}).code == codes.TOPIC_NOT_EXIST

    stats = client.ask(codes.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}).body.decode()
    queue = '{"brokerName":"broker-a","queueId":1,"topic":"%s"}' % topic
    assert '"brokerAddr":"127.0.0.1:%d"' % served.ports[1] in stats and '"totalDiff":' in stats
    assert '{"spanned":[' in stats and queue + ':{"brokerOffset":2,"consumerOffset":1,' in stats
    assert queue not in client.ask(codes.GET_BROKER_CONSUME_STATS, {"isOrder": "true"}).body.decode()

    fields = {"topic": topic, "compareGroup": "spanned", "filterGroups": ""}
    assert client.ask(codes.QUERY_CORRECTION_OFFSET, fields).body == b'{"correctionOffsets":{1:1}}'
    fields |= {"filterGroups": "spanned"}
    assert client.ask(codes.QUERY_CORRECTION_OFFSET, fields).body == b'{"correctionOffsets":{1:9223372036854775807}}', "it is behind"
    assert '"%s@quicker":{1:2}' % topic in client.ask(codes.GET_ALL_CONSUMER_OFFSET).body.decode()
    assert client.ask(codes.GET_ALL_DELAY_OFFSET).body.startswith(b'{"offsetTable":{')


def test_a_group_gets_the_offsets_of_another(served, topic):
    client = served.broker()
    client.ask(codes.UPDATE_CONSUMER_OFFSET, {"topic": topic, "queueId": 1, "consumerGroup": "original", "commitOffset": 7})
    assert client.ask(codes.CLONE_GROUP_OFFSET, {"srcGroup": "original", "destGroup": "copy", "topic": topic}).code == codes.SUCCESS
    assert ConsumerOffsets(served.root).read(topic, "copy") == {1: 7}
    heartbeat(client, "me", "original", subscription("another"))
    fields = {"srcGroup": "original", "destGroup": "second", "topic": "", "offline": "false"}
    assert client.ask(codes.CLONE_GROUP_OFFSET, fields).code == codes.SUCCESS
    assert ConsumerOffsets(served.root).read(topic, "second") == {}, "the group does not consume that topic now"
    assert client.ask(codes.CLONE_GROUP_OFFSET, fields | {"offline": "true"}).code == codes.SUCCESS
    assert ConsumerOffsets(served.root).read(topic, "second") == {1: 7}
    for refused in ("CID_RMQ_SYS_X", "a b"):
        assert client.ask(codes.CLONE_GROUP_OFFSET, fields | {"destGroup": refused}).code != codes.SUCCESS


def test_entries_of_a_queue_are_shown(served, topic):
    client = served.broker()
    heartbeat(client, "me", "queue_readers", subscription(topic))
    sent = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, "TAGS\x01a"), b"x").fields
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
    fields = {"topic": topic, "queueId": 1, "index": 0, "count": 10, "consumerGroup": "queue_readers"}
    shown = json.loads(client.ask(codes.QUERY_CONSUME_QUEUE, fields).body)
    (entry,) = shown["queueData"]
    assert (entry["physicOffset"], entry["tagsCode"]) == (int(sent["msgId"][16:], 16), 97)
    assert (shown["minQueueIndex"], shown["maxQueueIndex"], shown["subscriptionData"]["topic"]) == (0, 1, topic)
    answer = client.ask(codes.QUERY_CONSUME_QUEUE, fields | {"index": 5, "consumerGroup": "gone"})
    assert answer.remark == f"Index 5 of 1@{topic} is not exist!" and b"gone@" in answer.body
    assert client.ask(codes.QUERY_CONSUME_QUEUE, fields | {"queueId": 9}).code == codes.SYSTEM_ERROR


def test_all_producers_and_the_systems_topics_are_told(served):
    client = served.broker()
    heartbeat(client, "this producer", "any")
    rows = json.loads(client.ask(codes.GET_ALL_PRODUCER_INFO).body)["data"]["CLIENT_INNER_PRODUCER"]
    (row,) = [row for row in rows if row["clientId"] == "this producer"]
    assert (row["remoteIP"], row["language"]) == ("/%s:%d" % client.socket.getsockname(), "JAVA")
    assert row["lastUpdateTimestamp"] > 1_700_000_000_000
    assert "SCHEDULE_TOPIC_XXXX" in json.loads(client.ask(codes.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body)["topicList"]
    answer = client.ask(codes.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "T"})
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "The stats <TOPIC_PUT_NUMS> <T> not exist")


def test_clean_requests_of_a_tool_ask_the_cleaner_to_run(served):
    with Cleaning(find_folder(served.root)) as cleaning:
        asked = cleaning.block.asked
        for code in (codes.CLEAN_EXPIRED_CONSUMEQUEUE, codes.DELETE_EXPIRED_COMMITLOG):
            assert served.broker().ask(code).code == codes.SUCCESS
        assert cleaning.block.asked == asked + 2


def test_cleaning_unused_topics_names_deleted_topics_that_keep_their_queues(served, topic):
    client = served.broker()
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 0, 0, timeout_s=30, level="committed")
    assert topic not in (client.ask(codes.CLEAN_UNUSED_TOPIC).remark or ""), "other tests delete topics of their own"
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": topic}).code == codes.SUCCESS
    answer = client.ask(codes.CLEAN_UNUSED_TOPIC)
    says, _, named = (answer.remark or "").partition(": ")
    assert (answer.code, says) == (codes.SYSTEM_ERROR, "topics that topics.json does not name still have messages, and their queue "
                                                       "files stay as long")
    assert topic in named.split(", ")
    with pyengine.open_store(served.root) as store:
        assert [message.body for message in store.get_message(topic, 0, 0).messages] == [b"first"]


def test_without_an_access_list_there_is_none_to_change(served):
    for code, failed in ((codes.UPDATE_AND_CREATE_ACL_CONFIG, 209), (codes.DELETE_ACL_CONFIG, 210),
                         (codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, 211)):
        answer = served.broker().ask(code, {"accessKey": "any-key", "secretKey": "any-secret", "globalWhiteAddrs": "10.0.0.1"})
        assert (answer.code, answer.remark) == (failed, "there is no access list to change: acl_enable is off")


def test_a_message_that_is_sent_back_comes_again_and_at_last_is_a_dead_letter(served, topic):
    client = served.broker()
    first = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, "TAGS\x01a"), b"bad").fields
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")

        def send_back(offset, level):
            return client.ask(codes.CONSUMER_SEND_MSG_BACK, {
                "offset": offset, "group": "senders_back", "delayLevel": level, "originMsgId": "", "originTopic": topic,
                "unitMode": "false", "maxReconsumeTimes": 1})

        offset = int(first["msgId"][16:], 16)
        assert send_back(offset, 1).code == codes.SUCCESS
        assert store.wait_for_message("%RETRY%senders_back", 0, 0, timeout_s=60, level="committed")
        again = store.get_message("%RETRY%senders_back", 0, 0, level="committed").messages[0]
        assert (again.body, again.reconsume_times, again.tags) == (b"bad", 1, "a")
        assert again.properties["RETRY_TOPIC"] == topic and again.properties["ORIGIN_MESSAGE_ID"] == first["msgId"]
        assert send_back(again.physical_offset, 0).code == codes.SUCCESS
        assert store.wait_for_message("%DLQ%senders_back", 0, 0, timeout_s=60, level="committed")
    answer = send_back(999_999_999, 0)
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "look message by offset failed, 999999999")
    eventually(lambda: "%DLQ%senders_back" in TopicConfigs(served.root).read().rows, "the topic is entered")


def test_a_message_sent_back_goes_to_a_queue_that_the_retry_topic_has(served, topic):
    """`mqadmin updateSubGroup -q 64` does not change the retry topic that is there, whose other queues no consumer would read."""
    TopicConfigs(served.root).create(TopicConfig("%RETRY%resized", 1, 1))
    SubscriptionGroups(served.root).put(SubscriptionGroup("resized", retry_queue_nums=64))
    client = served.broker()
    first = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"bad").fields
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
        before = store.queue_range("SCHEDULE_TOPIC_XXXX", 17, "committed")[1]
        for _ in range(8):
            assert client.ask(codes.CONSUMER_SEND_MSG_BACK, {
                "offset": int(first["msgId"][16:], 16), "group": "resized", "delayLevel": 18}).code == codes.SUCCESS
        assert store.wait_for_message("SCHEDULE_TOPIC_XXXX", 17, before + 7, timeout_s=30, level="committed")
        waiting = store.get_message("SCHEDULE_TOPIC_XXXX", 17, before, level="committed").messages
    assert {message.properties["REAL_QID"] for message in waiting} == {"0"}


def test_a_message_without_room_for_a_retry_is_a_dead_letter_when_it_is_sent_back(served, topic):
    """After an error the Java client handles the message again each 5 s, for ever."""
    client = served.broker()
    fields = send_fields(topic, 1, "own\x01" + "y" * 32_600 + "\x02TAGS\x01a")
    first = client.ask(codes.SEND_MESSAGE_V2, fields, b"full").fields
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, 0, timeout_s=30, level="committed")
        assert client.ask(codes.CONSUMER_SEND_MSG_BACK, {"offset": int(first["msgId"][16:], 16), "group": "full_back",
                                                         "delayLevel": 1}).code == codes.SUCCESS
        assert store.wait_for_message("%DLQ%full_back", 0, 0, timeout_s=60, level="committed")
        letter = store.get_message("%DLQ%full_back", 0, 0, level="committed").messages[0]
    assert (letter.body, letter.tags, letter.properties["RETRY_TOPIC"]) == (b"full", "a", topic) and "own" not in letter.properties
    assert f"{first['msgId']} is a dead letter of full_back at once" in (served.root / "engine.log").read_text()


def test_a_dead_letter_that_no_slave_has_yet_is_no_message_that_counts_as_done(tmp_path):
    served = start_served(tmp_path / "store", broker_role="SYNC_MASTER", ha_allow_plain="127.0.0.1", ha_listen_port=0)
    try:
        with pyengine.connect(served.root, refusals="return") as producer:
            put = producer.put("T", b"full", properties={"own": "y" * 32_740})
        assert (put.status.name, put.stored) == ("SLAVE_NOT_AVAILABLE", True)
        answer = served.broker().ask(codes.CONSUMER_SEND_MSG_BACK, {"offset": put.physical_offset, "group": "full_back", "delayLevel": 1})
        assert answer.code == codes.SYSTEM_ERROR and "SLAVE_NOT_AVAILABLE" in answer.remark
        assert f"{put.msg_id} is a dead letter of full_back at once" in served.engine.log() and "counts as done" not in served.engine.log()
    finally:
        served.close()


def test_a_retry_that_an_ordered_consumer_sends_itself_and_that_has_no_room_is_a_dead_letter(served):
    client = served.broker()
    properties = "own\x01" + "y" * 32_740 + "\x02RETRY_TOPIC\x01orders\x02DELAY\x013\x02TAGS\x01a"
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("%RETRY%ordered_back", 0, properties), b"full").code == codes.SUCCESS
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message("%DLQ%ordered_back", 0, 0, timeout_s=60, level="committed")
        letter = store.get_message("%DLQ%ordered_back", 0, 0, level="committed").messages[0]
    assert (letter.body, letter.tags, letter.properties["RETRY_TOPIC"]) == (b"full", "a", "orders") and "own" not in letter.properties
    assert "a dead letter of ordered_back has no room for the properties 'own'" in (served.root / "engine.log").read_text()


def test_a_message_that_can_never_be_stored_again_counts_as_sent_back(tmp_path):
    """The limit of bodies may have been lowered since it was stored; the log says which message it is."""
    served = start_served(tmp_path / "store")
    try:
        with pyengine.connect(served.root) as producer:
            offset = producer.put("T", b"x" * 3000).physical_offset
        assert served.engine.stop()
        served.engine.start(max_message_size_bytes=2000)
        eventually(lambda: served.engine.log().count("name server at") == 2, "the gateway listens again")
        fields = {"offset": offset, "group": "never", "delayLevel": 1}
        assert served.broker().ask(codes.CONSUMER_SEND_MSG_BACK, fields).code == codes.SUCCESS
        assert "can neither be delivered to never again nor be a dead letter, and counts as done" in served.engine.log()
    finally:
        served.close()
