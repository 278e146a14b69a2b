"""The published RocketMQ client 4.9.8 with its AclClientRPCHook and with TLS, and a real broker with a list beside the gateway's."""

from __future__ import annotations

import contextlib
import json

import pytest
import trustme
import yaml

import needs
from crash.replicas import free_port
from fix_gateway import Client, pull_fields, put_certificate, put_private, send_fields, signed, start_served, subscription
from fix_judge import available
from interop.clients import FLAGS, ClientError, Clients
from interop.real_broker import RealBroker
from pyengine.gateway import codes
from pyengine.storage.config_table import TopicConfigs
from waiting import eventually

pytestmark = [pytest.mark.ci, pytest.mark.java, pytest.mark.maven, pytest.mark.timeout(300)]

ADMIN, USER = ("admin-key", "admin-secret"), ("user-key", "user-secret")
WRONG, STRANGER = ("user-key", "wrong-secret"), ("no-such-key", "none-none")
LIST = """
accounts:
- {accessKey: admin-key, secretKey: admin-secret, admin: true}
- accessKey: user-key
  secretKey: user-secret
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [writes=PUB, reads=SUB, both=PUB|SUB]
  groupPerms: [shut=DENY]
- {accessKey: third-key, secretKey: third-secret, topicPerms: [a=PUB], admin: true}
"""


def write_list(path) -> str:
    return str(put_private(path, LIST.encode()))


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    """(store, function that starts clients): the gateway has a list and takes TLS alone, the clients check its certificate."""
    scratch = tmp_path_factory.mktemp("access")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(scratch / "ca.pem")
    store = start_served(scratch / "store", acl_enable=True, gateway_acl_file=write_list(scratch / "plain_acl.yml"),
                         gateway_tls_mode="enforcing", **put_certificate(scratch, authority))
    with contextlib.closing(store), available(), contextlib.ExitStack() as running:
        def clients(account=(), ca=scratch / "ca.pem", name="clients"):
            (scratch / name).mkdir()
            tls = ["-Dtls.enable=true", "-Dtls.test.mode.enable=false", "-Dtls.client.authServer=true", f"-Dtls.client.trustCertPath={ca}"]
            return running.enter_context(Clients(needs.java_command(), f"127.0.0.1:{store.ports[0]}", scratch / name,
                                                 [*FLAGS, *(tls if ca else [])], account))

        yield store, clients


def send(clients, topic, how="sync", *bodies):
    return clients.ask("send", group="senders", how=how, topic=topic, tags="t", bodies=list(bodies or ("one", "two")))


def test_a_java_client_with_key_and_tls_does_what_its_account_may(rig):
    store, start = rig
    admin, user = start(ADMIN, name="admin"), start(USER, name="user")
    for topic in ("both", "reads", "writes"):
        send(admin, topic)
    broker = f"127.0.0.1:{store.ports[1]}"
    assert "create topic to" in admin.ask("admin", arguments=["updateTopic", "-b", broker, "-t", "by_tool"])
    user.ask("admin", arguments=["updateTopic", "-b", broker, "-t", "by_user"])
    assert "by_user" not in TopicConfigs(store.root).read().rows
    said = admin.ask("admin", arguments=["clusterAclConfigVersion", "-b", broker])
    assert "broker-a" in said and "plain_acl.yml" in said

    def change(who, command, *words):
        return who.ask("admin", arguments=[command, "-b", broker, *words])

    account = ("-a", "by-tool-key", "-s", "by-tool-secret", "-t", "both=SUB", "-i", "DENY")
    assert "success" not in change(user, "updateAclConfig", *account)
    assert "success" in change(admin, "updateAclConfig", *account)
    by_tool = start(("by-tool-key", "by-tool-secret"), name="by_tool")
    with pytest.raises(ClientError, match="AclException: No default permission for topic:both"):
        send(by_tool, "both")
    assert "success" in change(admin, "updateGlobalWhiteAddr", "-g", "192.0.2.1,192.0.2.2")
    assert "success" in change(admin, "deleteAclConfig", "-a", "by-tool-key")
    with pytest.raises(ClientError, match="AclException: No acl config for by-tool-key"):
        send(by_tool, "both")
    assert "success" not in change(admin, "deleteAclConfig", "-a", "by-tool-key")

    assert {row["status"] for how in ("sync", "batch", "async") for row in send(user, "both", how)} == {"SEND_OK"}
    for how in ("sync", "batch"):
        with pytest.raises(ClientError, match="AclException: No default permission for topic:reads"):
            send(user, "reads", how)
    (sent,) = send(user, "both", "sync", "large " * 4000)
    assert user.ask("view", topic="both", id=sent["id"])["body"] == "large " * 4000
    eventually(lambda: user.ask("query", topic="both", key="one"), "it is in the index")
    user.ask("subscribe", name="both", group="readers", topic="both")
    rows = user.ask("take", name="both", count=9, timeout_s=60)
    assert sorted(row["body"] for row in rows) == sorted([*["one", "two"] * 4, "large " * 4000])
    user.ask("subscribe", name="shut", group="shut", topic="both")
    assert user.ask("take", name="shut", count=1, timeout_s=3) == []
    # Transactions, a reply and traces of an account that may use the topic.
    assert user.ask("transact", group="payers", topic="both", outcome="COMMIT_MESSAGE", bodies=["paid"])[0]["status"] == "SEND_OK"
    user.ask("subscribe", name="replier", group="replying", topic="both", replies=True)
    user.ask("take", name="replier", count=1, timeout_s=60)
    assert user.ask("request", group="askers", topic="both", bodies=["well?"], timeout_ms=30_000) == ["re: well?"]


def test_java_clients_without_the_right_secret_or_without_tls_are_refused(rig):
    store, start = rig
    wrong = start(WRONG, name="wrong")
    with pytest.raises(ClientError, match="AclException: Check signature failed for accessKey=user-key"):
        send(wrong, "both")
    without_key = start(name="without_key")
    with pytest.raises(ClientError, match="AclException: No accessKey is configured"):
        send(without_key, "both")
    without_tls = start(ADMIN, ca=None, name="without_tls")
    with pytest.raises(ClientError, match="No route info|send request to|connect to"):
        send(without_tls, "both")
    assert "it does not begin with TLS" in store.engine.log()
    (store.root.parent / "other.pem").write_bytes(trustme.CA().cert_pem.bytes())
    distrusting = start(ADMIN, ca=store.root.parent / "other.pem", name="distrusting")
    with pytest.raises(ClientError, match="No route info|send request to|connect to"):
        send(distrusting, "both")


@pytest.fixture(scope="module")
def both_brokers(tmp_path_factory):
    """(port of the gateway's broker, port of a real one, the list of the one, of the other): both lists say the same."""
    scratch = tmp_path_factory.mktemp("real")
    store = start_served(scratch / "store", acl_enable=True, gateway_acl_file=write_list(scratch / "plain_acl.yml"))
    real_port = free_port()
    with contextlib.closing(store), available(), contextlib.ExitStack() as running:
        real = RealBroker(needs.java_command(), scratch / "real_store", scratch / "real", free_port(), real_port, aclEnable="true",
                          haListenPort=free_port(), mappedFileSizeCommitLog=1 << 20, mappedFileSizeConsumeQueue=6000,
                          maxHashSlotNum=1000, maxIndexNum=4000)
        write_list(scratch / "real" / "conf" / "plain_acl.yml")
        running.callback(real.kill)
        real.start()
        yield store.ports[1], real_port, scratch / "plain_acl.yml", scratch / "real" / "conf" / "plain_acl.yml"


def cases():
    def heartbeat(group, topic):
        return {"clientID": "c", "producerDataSet": [], "consumerDataSet": [{
            "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING", "consumeFromWhere":
            "CONSUME_FROM_FIRST_OFFSET", "unitMode": False, "subscriptionDataSet": [subscription(topic)]}]}

    max_offset = {"topic": "both", "queueId": 0}
    yield codes.GET_MAX_OFFSET, max_offset, b"", None
    for account in (ADMIN, USER, WRONG, STRANGER):
        yield codes.GET_MAX_OFFSET, max_offset, b"", account
    for topic in ("both", "writes", "reads", "unknown", "%RETRY%any", "%RETRY%shut"):
        for account in (ADMIN, USER):
            yield codes.SEND_MESSAGE_V2, send_fields(topic, a=topic.removeprefix("%RETRY%")), b"x", account
    for topic, group in (("both", "any"), ("reads", "any"), ("writes", "any"), ("reads", "shut")):
        yield codes.PULL_MESSAGE, pull_fields(topic, group=group), b"", USER
        yield codes.UPDATE_CONSUMER_OFFSET, {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": 0}, b"", USER
        yield codes.HEART_BEAT, {}, json.dumps(heartbeat(group, topic)).encode(), USER
    yield codes.HEART_BEAT, {}, b"", USER
    for group in ("any", "shut"):
        yield codes.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}, b"", USER
        yield codes.UNREGISTER_CLIENT, {"clientID": "c", "consumerGroup": group}, b"", USER
        yield codes.CONSUMER_SEND_MSG_BACK, {"group": group, "offset": 0, "delayLevel": 0, "originTopic": "both"}, b"", USER
    for topic in ("reads", "writes"):
        yield codes.QUERY_MESSAGE, {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}, b"", USER
    for account in (ADMIN, USER):
        yield codes.UPDATE_AND_CREATE_TOPIC, {"topic": "made", "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6,
                                              "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}, b"", account
        yield codes.DELETE_SUBSCRIPTIONGROUP, {"groupName": "any", "cleanOffset": "false"}, b"", account


def test_the_gateway_refuses_what_a_real_broker_with_the_same_list_refuses(both_brokers):
    with Client(both_brokers[0]) as gateway, Client(both_brokers[1]) as real:
        refused = allowed = 0
        for code, fields, body, account in cases():
            header = fields if account is None else signed(fields, body, account)
            (ours, theirs) = (client.ask(code, header, body) for client in (gateway, real))
            case = (code, fields, account)
            if "AclException" in (theirs.remark or ""):
                assert ours.code == theirs.code, case
                if body or code != codes.HEART_BEAT:  # of a heartbeat without a body Java says null
                    assert theirs.remark.startswith(f"{ours.remark}, "), (case, ours.remark, theirs.remark)
                refused += 1
            else:
                assert "AclException" not in (ours.remark or ""), (case, ours.remark)
                allowed += 1
        print(f"{refused} refused, {allowed} allowed")
        assert refused > 15 and allowed > 15


def changes():
    """(code, fields) of an admin, one after the other."""
    def account(key, secret="a-new-secret", **fields):
        return codes.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": key, "secretKey": secret, "admin": "false", **fields}

    yield account("new-key-1", defaultTopicPerm="PUB|SUB", defaultGroupPerm="SUB", topicPerms="a=PUB,b=SUB", groupPerms="g=SUB",
                  whiteRemoteAddress="192.0.2.1")
    yield account("new-key-1", topicPerms="c=DENY", admin="true")
    yield account("third-key", "another-secret", defaultTopicPerm="PUB")
    yield account("short")
    yield account("new-key-2", "short")
    yield account("new-key-2", topicPerms="a")
    yield account("new-key-2", groupPerms="a=PUB=SUB")
    yield account("new-key-2", topicPerms="a=ALL")
    yield account("new-key-2", whiteRemoteAddress="192.0.2.x")
    yield account("new-key-3", defaultTopicPerm="ALL")
    yield codes.UPDATE_AND_CREATE_ACL_CONFIG, {"accessKey": "new-key-4"}
    yield codes.DELETE_ACL_CONFIG, {}
    yield codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {}
    yield codes.DELETE_ACL_CONFIG, {"accessKey": "new-key-1"}
    yield codes.DELETE_ACL_CONFIG, {"accessKey": "new-key-1"}
    yield codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "192.0.2.7,198.51.100.*"}
    yield codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "192.0.2.7", "aclFileFullPath": "/etc/passwd"}
    yield codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "192.0.2.8"}


def test_a_list_is_changed_as_a_real_broker_changes_its_own(both_brokers):
    def told(path):
        document = yaml.safe_load(path.read_text())
        accounts = {row["accessKey"]: row for row in document["accounts"]}
        return accounts, document.get("globalWhiteRemoteAddresses"), document["dataVersion"][0]["counter"]

    refused = 0
    with Client(both_brokers[0]) as gateway, Client(both_brokers[1]) as real:
        for code, fields in changes():
            header = signed(fields, b"", ADMIN)
            ours, theirs = gateway.ask(code, header), real.ask(code, header)
            assert ours.code == theirs.code, (fields, ours.remark, theirs.remark)
            if theirs.code != codes.SUCCESS:
                refused += 1
                assert "secret" in theirs.remark or "address" in theirs.remark or "null" in theirs.remark or (
                    ours.remark.startswith(theirs.remark)), (fields, ours.remark, theirs.remark)
            assert both_brokers[3].read_text().count("dataVersion") == 0 or told(both_brokers[2]) == told(both_brokers[3]), fields
    assert refused == 11 and told(both_brokers[2]) == told(both_brokers[3])
