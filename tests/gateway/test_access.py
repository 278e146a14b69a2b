"""RocketMQ's access list: signatures, rights, addresses, and a file that changes; a gateway with it and TLS."""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import ssl
import stat
import struct
from pathlib import Path
from time import time_ns
from types import SimpleNamespace

import pytest
import trustme
import yaml

import pyengine
from fix_gateway import (
    LocalClient,
    TlsClient,
    heartbeat,
    pull_fields,
    put_certificate,
    put_private,
    send_fields,
    signed,
    start_served,
    subscription,
    trusting,
)
from pyengine.client.outgoing import RawMessage
from pyengine.engine_config import EngineConfig
from pyengine.events import LINES_MAX
from pyengine.formats.record import decode_record
from pyengine.gateway import acl_file, codes
from pyengine.gateway.access import AccessList
from pyengine.gateway.acl_file import AccessError, Addresses
from pyengine.gateway.connections import RequestRefusedError
from pyengine.gateway.wire import BINARY_FORM, Frame
from pyengine.ipc.shared_objects import GATEWAY_SOCKET, find_folder
from waiting import eventually

HOST = "192.0.2.9"
ADMIN, USER = ("admin-key", "admin-secret"), ("user-key", "user-secret")
LIST = """
globalWhiteRemoteAddresses: [198.51.100.7]
accounts:
- accessKey: admin-key
  secretKey: admin-secret
  admin: true
- accessKey: user-key
  secretKey: user-secret
  whiteRemoteAddress: 203.0.113.*
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [writes=PUB, reads=SUB, both=PUB|SUB, none=DENY]
  groupPerms: [shut=DENY, wrong=PUB]
"""
REFUSED = "org.apache.rocketmq.acl.common.AclException: "


def write_list(path, text: str = LIST, mode: int = 0o600) -> None:
    put_private(path, text.encode(), mode)


@pytest.fixture
def access(tmp_path):
    """A list that is read."""
    write_list(tmp_path / "plain_acl.yml")
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    found.reload()
    return found


def fault(access, code, fields=None, body=b"", account=USER, host=HOST, **frame):
    return access.fault(Frame(code, signed(fields or {}, body, account), body, **frame), host)


# ---- signatures --------------------------------------------------------------------------------

def test_a_signature_covers_the_fields_in_order_and_the_body(access):
    # printf 'user-keyordersT1\xc3\xa9BODY' | openssl dgst -sha1 -hmac user-secret -binary | base64
    known = "adWe80QqjpZJvjHOdXAbqngRiYg="
    fields = {"b": "T1é", "a": "orders", "AccessKey": "user-key", "Signature": known}
    assert access.fault(Frame(codes.GET_MAX_OFFSET, fields, b"BODY"), HOST) == ""
    for changed in (Frame(codes.GET_MAX_OFFSET, fields, b"BODY2"), Frame(codes.GET_MAX_OFFSET, {**fields, "a": "order"}, b"BODY"),
                    Frame(codes.GET_MAX_OFFSET, {**fields, "c": "more"}, b"BODY"),
                    Frame(codes.GET_MAX_OFFSET, {**fields, "Signature": known[:-2] + "A="}, b"BODY"),
                    Frame(codes.GET_MAX_OFFSET, {**fields, "Signature": "é\ud800"}, b"BODY"),
                    Frame(codes.GET_MAX_OFFSET, {name: text for name, text in fields.items() if name != "Signature"}, b"BODY")):
        assert access.fault(changed, HOST) == "Check signature failed for accessKey=user-key"


def test_a_security_token_and_a_channel_are_signed_as_any_field(access):
    told = signed({"SecurityToken": "a token", "OnsChannel": "CLOUD"}, b"", USER)
    assert access.fault(Frame(codes.GET_MAX_OFFSET, told), HOST) == ""
    assert access.fault(Frame(codes.GET_MAX_OFFSET, told | {"SecurityToken": "another"}), HOST) != ""


def test_a_query_by_unique_key_may_have_its_mark_signed_or_not(access):
    fields = {"topic": "reads", "key": "k", "_UNIQUE_KEY_QUERY": "true"}
    with_mark = signed(fields, b"", USER)
    without = signed({"topic": "reads", "key": "k"}, b"", USER) | {"_UNIQUE_KEY_QUERY": "true"}
    for told in (with_mark, without):
        assert access.fault(Frame(codes.QUERY_MESSAGE, told), HOST) == ""
    assert access.fault(Frame(codes.QUERY_MESSAGE, with_mark | {"topic": "both"}), HOST) != ""


def test_a_key_is_needed_and_has_to_be_in_the_list(access):
    assert access.fault(Frame(codes.GET_MAX_OFFSET), HOST) == "No accessKey is configured"
    assert fault(access, codes.GET_MAX_OFFSET, account=("other-key", "user-secret")) == "No acl config for other-key"


# ---- rights ------------------------------------------------------------------------------------

def no(name: str) -> str:
    return f"No default permission for {name}"


@pytest.mark.parametrize("code, name", [(codes.SEND_MESSAGE, "topic"), (codes.SEND_MESSAGE_V2, "b"), (codes.SEND_BATCH_MESSAGE, "b")])
def test_a_send_needs_its_topic_and_to_a_retry_topic_the_group(access, code, name):
    for topic in ("writes", "both", "%RETRY%any"):
        assert fault(access, code, {name: topic}) == ""
    for topic in ("reads", "none", "unknown"):
        assert fault(access, code, {name: topic}) == no(f"topic:{topic}")
    assert fault(access, code, {name: "%RETRY%shut", "a": "any", "group": "any"}) == no("group:shut")
    assert fault(access, code, {name: "RMQ_SYS_TRACE_TOPIC"}) == "", "each client may leave its traces"


@pytest.mark.parametrize("code, name", [(codes.SEND_REPLY_MESSAGE, "topic"), (codes.SEND_REPLY_MESSAGE_V2, "b")])
def test_a_reply_needs_no_right_but_that_of_another_topic_than_the_clusters(access, code, name):
    assert fault(access, code, {name: "DefaultCluster_REPLY_TOPIC"}) == fault(access, code, {name: "writes"}) == ""
    assert fault(access, code, {name: "reads"}) == no("topic:reads")
    assert fault(access, code, {name: "%RETRY%shut"}) == no("group:shut")
    for other in ("foo_REPLY_TOPIC", "Other_REPLY_TOPIC", "_REPLY_TOPIC"):
        assert fault(access, code, {name: other}) == no(f"topic:{other}"), "only this cluster's takes replies of everybody"


@pytest.mark.parametrize("code, name", [(codes.INVOKE_BROKER_TO_RESET_OFFSET, "group"), (codes.CLONE_GROUP_OFFSET, "destGroup"),
                                        (codes.LOCK_BATCH_MQ, ""), (codes.UNLOCK_BATCH_MQ, "")])
def test_offsets_and_locks_of_a_group_need_the_right_of_the_group(access, code, name):
    for group, why in (("shut", no("group:shut")), ("open", "")):
        fields, body = ({name: group}, b"") if name else ({}, json.dumps({"consumerGroup": group}).encode())
        assert fault(access, code, fields, body) == why
    if not name:
        assert "no JSON" in fault(access, code, {}, b"{")


def test_an_account_for_tls_only_is_refused_without_it(tmp_path):
    write_list(tmp_path / "plain_acl.yml", LIST.replace("  admin: true", "  admin: true\n  tlsOnly: true\n  whiteRemoteAddress: 192.0.2.*"))
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    found.reload()
    frame = Frame(codes.GET_MAX_OFFSET, signed({}, b"", ADMIN))
    assert found.fault(frame, HOST) == found.fault(frame, HOST, False) == "accessKey=admin-key is for connections with TLS only"
    assert found.fault(frame, HOST, True) == "" and fault(found, codes.GET_MAX_OFFSET) == "", "other accounts need none"
    found.change(lambda told: acl_file.put_account(told, {"accessKey": "admin-key", "secretKey": "another-secret", "admin": "true"}))
    assert found.fault(Frame(codes.GET_MAX_OFFSET, signed({}, b"", ("admin-key", "another-secret"))), HOST).endswith("TLS only")
    write_list(tmp_path / "plain_acl.yml", LIST.replace("  admin: true", "  admin: true\n  tlsOnly: maybe"))
    with pytest.raises(AccessError, match="tlsOnly of admin-key is neither true nor false"):
        found.reload()


def test_a_pull_and_an_offset_need_topic_and_group(access):
    for code in (codes.PULL_MESSAGE, codes.UPDATE_CONSUMER_OFFSET):
        assert fault(access, code, {"topic": "reads", "consumerGroup": "any"}) == ""
        assert fault(access, code, {"topic": "writes", "consumerGroup": "any"}) == no("topic:writes")
        assert fault(access, code, {"topic": "reads", "consumerGroup": "shut"}) == no("group:shut")


def test_pops_and_acks_need_topic_and_group_and_the_topic_of_a_retry_is_the_groups(access):
    for code in (codes.POP_MESSAGE, codes.NOTIFICATION, codes.ACK_MESSAGE, codes.CHANGE_MESSAGE_INVISIBLETIME, codes.MAKE_DEAD_LETTER):
        assert fault(access, code, {"topic": "reads", "consumerGroup": "any"}) == ""
        assert fault(access, code, {"topic": "writes", "consumerGroup": "any"}) == no("topic:writes")
        assert fault(access, code, {"topic": "reads", "consumerGroup": "shut"}) == no("group:shut")
        assert fault(access, code, {"topic": "%RETRY%any_reads", "consumerGroup": "any"}) == ""
        assert fault(access, code, {"topic": "%RETRY%any_reads", "consumerGroup": "shut"}) == no("group:shut")


def test_a_worker_of_the_engine_checks_the_signature_itself_and_nothing_else(access):
    frame = Frame(codes.SEND_MESSAGE_V2, {"b": "writes", "AccessKey": "user-key"})
    assert access.fault(frame, HOST).startswith("Check signature failed") and access.fault(frame, HOST, is_signed=True) == ""
    for fields, why in (({"b": "reads", "AccessKey": "user-key"}, no("topic:reads")), ({"b": "writes"}, "No accessKey is configured"),
                        ({"b": "writes", "AccessKey": "nobody"}, "No acl config for nobody")):
        assert access.fault(Frame(codes.SEND_MESSAGE_V2, fields), HOST, is_signed=True) == why


@pytest.mark.parametrize("code, name", [(codes.CONSUMER_SEND_MSG_BACK, "group"), (codes.UNREGISTER_CLIENT, "consumerGroup"),
                                        (codes.GET_CONSUMER_LIST_BY_GROUP, "consumerGroup"),
                                        (codes.GET_CONSUMER_RUNNING_INFO, "consumerGroup"),
                                        (codes.CONSUME_MESSAGE_DIRECTLY, "consumerGroup")])
def test_a_member_request_needs_the_right_to_its_group(access, code, name):
    assert fault(access, code, {name: "any"}) == ""
    assert fault(access, code, {name: "shut"}) == no("group:shut")
    assert fault(access, code, {name: "wrong"}) == no("group:wrong"), "groups are subscribed, not published"
    assert fault(access, code, {"producerGroup": "shut"}) == ""


def test_a_heartbeat_needs_each_group_and_each_topic(access):
    def heartbeat(group, *topics):
        return (f'{{"clientID":"c","producerDataSet":[{{"groupName":"shut"}}],"consumerDataSet":[{{"groupName":"{group}",'
                f'"subscriptionDataSet":[{",".join(f"""{{"topic":"{topic}"}}""" for topic in topics)}]}}]}}').encode()

    assert fault(access, codes.HEART_BEAT, body=heartbeat("any", "reads", "both")) == ""
    assert fault(access, codes.HEART_BEAT, body=heartbeat("any", "reads", "writes")) == no("topic:writes")
    assert fault(access, codes.HEART_BEAT, body=heartbeat("shut", "reads")) == no("group:shut")
    assert fault(access, codes.HEART_BEAT, body=b'{"clientID":"c"}') == ""
    for body in (b"", b"[1]", b'{"consumerDataSet":7}', b'{"consumerDataSet":[7]}', b'{"consumerDataSet":[{"subscriptionDataSet":7}]}'):
        assert fault(access, codes.HEART_BEAT, body=body) != "", body


def test_topics_and_groups_are_changed_by_an_admin_alone(access):
    for code in (17, 25, 200, 207, 215, 401):
        assert fault(access, code, account=ADMIN) == ""
        assert fault(access, code) == f"Need admin permission for request code={code}, but accessKey=user-key is not"


def test_an_admin_without_rights_of_its_own_may_do_all(access):
    assert fault(access, codes.SEND_MESSAGE_V2, {"b": "unknown"}, account=ADMIN) == ""
    assert fault(access, codes.PULL_MESSAGE, {"topic": "none", "consumerGroup": "shut"}, account=ADMIN) == ""


# ---- addresses ---------------------------------------------------------------------------------

@pytest.mark.parametrize("text, yes, others", [
    ("10.0.0.7", ["10.0.0.7"], ["10.0.0.8", "::7"]),
    ("10.0.0.*", ["10.0.0.0", "10.0.0.255"], ["10.0.1.0"]),
    ("10.0.*.*", ["10.0.9.1"], ["10.1.9.1"]),
    ("10.*.*.*", ["10.9.9.1"], ["11.9.9.1"]),
    ("10.0.0.3-20", ["10.0.0.3", "10.0.0.20"], ["10.0.0.2", "10.0.0.21"]),
    ("10.0.3-20.*", ["10.0.3.9", "10.0.20.255"], ["10.0.2.9", "10.0.21.9"]),
    ("10.0.3-20.5", ["10.0.4.5"], ["10.0.4.6"]),
    ("10.0.0.{1,20}", ["10.0.0.1", "10.0.0.20"], ["10.0.0.2", "10.0.0.12"]),
    ("10.0.0.1,10.0.9.2", ["10.0.0.1", "10.0.9.2"], ["10.0.9.1"]),
    ("*", ["10.0.0.1", "2001:db8::1"], []),
    ("*.*.*.*", ["10.0.0.1"], []),
    ("2001:db8::1", ["2001:db8::1", "2001:DB8:0:0:0:0:0:1"], ["2001:db8::2", "10.0.0.1"]),
    ("2001:db8::ac5:78:1-200:*", ["2001:db8::ac5:78:1:5", "2001:db8::ac5:78:200:ffff"], ["2001:db8::ac5:78:201:5"]),
    ("2001:db8::*", ["2001:db8::ffff"], ["2001:db8::1:0"]),
    ("2001:db8::{1,f}", ["2001:db8::1", "2001:db8::f"], ["2001:db8::2"]),
    (None, [], ["10.0.0.1"]),
    (" ", [], ["10.0.0.1", "?"]),
])
def test_white_addresses_are_written_as_in_rocketmq(text, yes, others):
    found = Addresses(text)
    assert [host for host in yes if not found.match(host)] == []
    assert [host for host in others if found.match(host)] == []


@pytest.mark.parametrize("text", ["10.0.0", "10.0.0.256", "10.0.0.-5", "10.0.0.9-3", "10.0.0.1-256", "10.0.*", "x", "10.0.{1}.2",
                                  "10.0.0{1}", "10.0.0.1,x", "2001:*::1", "2001:db8::1-fffff", "10.0.0.{1,300}", "1-2-3.0.0.1"])
def test_a_wrong_address_is_refused(text):
    with pytest.raises(AccessError, match="is not an address"):
        Addresses(text)


def test_an_address_of_the_list_needs_no_key_and_one_of_an_account_no_signature(access):
    assert access.fault(Frame(codes.UPDATE_AND_CREATE_TOPIC), "198.51.100.7") == ""
    unsigned = Frame(codes.SEND_MESSAGE_V2, {"b": "none", "AccessKey": "user-key"})
    assert access.fault(unsigned, "203.0.113.5") == "" and access.fault(unsigned, HOST) != ""


# ---- the file ----------------------------------------------------------------------------------

def test_a_changed_access_list_takes_effect_and_a_broken_one_leaves_the_old_list(access, tmp_path):
    path = tmp_path / "plain_acl.yml"
    assert access.reload() == "", "it is read where it has changed"
    write_list(path, LIST.replace("user-secret", "other-secret"))
    assert "2 accounts, 1 addresses" in access.reload()
    assert fault(access, codes.GET_MAX_OFFSET) != "" and fault(access, codes.GET_MAX_OFFSET, account=("user-key", "other-secret")) == ""
    for broken in ("accounts: [", "", "accounts: 7", "- 1", LIST.replace("accounts:", "account:").replace("globalWhite", "globalwhite")):
        write_list(path, broken)
        for _ in range(2):  # said each time, so that it is known that it still is so
            with pytest.raises(AccessError, match="is not used"):
                access.reload()
        assert fault(access, codes.GET_MAX_OFFSET, account=("user-key", "other-secret")) == ""
        assert access.fault(Frame(codes.GET_MAX_OFFSET), HOST) != ""
    write_list(path)
    assert access.reload() and fault(access, codes.GET_MAX_OFFSET) == ""


def test_a_key_that_does_not_count_is_told(access, tmp_path):
    write_list(tmp_path / "plain_acl.yml", LIST.replace("globalWhite", "globalwhite") + "1: verysecret\n")
    sentence = access.reload()
    assert sentence.endswith("2 accounts, 0 addresses that need none; unknown keys are ignored: 1, globalwhiteRemoteAddresses")
    for text in (LIST, LIST.replace("accounts:", "account:"), LIST + "dataVersion: [{counter: 1}]\n"):
        write_list(tmp_path / "plain_acl.yml", text)
        assert ("ignored: account" in access.reload()) == ("account:" in text)


def test_a_list_that_is_not_there_refuses_every_client(access, tmp_path):
    (tmp_path / "plain_acl.yml").unlink()
    with pytest.raises(AccessError, match="cannot be read: No such file"):
        access.reload()
    assert fault(access, codes.GET_MAX_OFFSET) != "" and access.fault(Frame(codes.GET_MAX_OFFSET), "198.51.100.7") != ""
    write_list(tmp_path / "plain_acl.yml")
    assert access.reload() and fault(access, codes.GET_MAX_OFFSET) == ""


def test_a_list_that_others_may_read_or_that_cannot_be_read_at_first_refuses_every_client(tmp_path):
    for text, mode, why in ((LIST, 0o640, "has mode 0640"), ("accounts: [", 0o600, "is not YAML")):
        write_list(tmp_path / "plain_acl.yml", text, mode)
        found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
        with pytest.raises(AccessError, match=why):
            found.reload()
        assert fault(found, codes.GET_MAX_OFFSET, account=ADMIN) != ""


@pytest.mark.parametrize("line, why", [
    ("accounts: [{accessKey: short, secretKey: verysecret}]", "need 7 characters"),
    ("accounts: [{accessKey: long-key}]", "need 7 characters"),
    ("accounts: [{accessKey: long-key, secretKey: verysecret, admin: maybe}]", "neither true nor false"),
    ("accounts: [{accessKey: long-key, secretKey: verysecret, topicPerms: [a]}]", "NAME=RIGHT"),
    ("accounts: [{accessKey: long-key, secretKey: verysecret, topicPerms: a=PUB}]", "topicPerms is not a list"),
    ("accounts: [{accessKey: long-key, secretKey: verysecret, whiteRemoteAddress: 10.0}]", "not text"),
    ("accounts: [verysecret]", "account 1 is not a map"),
    ("globalWhiteRemoteAddresses: [10.0.0.300]", "not an address"),
    ("accounts: [{accessKey: long-key, secretKey: *verysecret}]", "not YAML from line 1"),
    ("accounts: [{accessKey: long-key, secretKey: !verysecret x}]", "not YAML from line 1"),
    ("accounts: [{accessKey: long-key, secretKey: verysecret: x]", "not YAML from line 1"),
    ("accounts: [{accessKey: long-key, secretKey: 2020-13-45}]", "not YAML"),
    ("a: \x00verysecret", "not YAML"),
])
def test_a_wrong_access_list_raises_an_error_without_its_secrets(tmp_path, line, why):
    write_list(tmp_path / "plain_acl.yml", line)
    with pytest.raises(AccessError, match=why) as caught:
        AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml")).reload()
    assert "verysecret" not in str(caught.value) and caught.value.__cause__ is None


def test_keys_may_be_numbers_and_unknown_rights_are_none(tmp_path):
    write_list(tmp_path / "plain_acl.yml", "accounts: [{accessKey: 12345678, secretKey: 87654321, admin: 'true', defaultTopicPerm: pub,\n"
                                           "topicPerms: [a=PUB|SUB , b = SUB|PUB, c=ALL]}, {accessKey: 12345678, secretKey: another-one}]")
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    found.reload()
    account = ("12345678", "87654321")
    assert [topic for topic in "abcd" if fault(found, codes.SEND_MESSAGE_V2, {"b": topic}, account=account) == ""] == ["a", "b"]
    assert fault(found, codes.UPDATE_AND_CREATE_TOPIC, account=account) == ""
    assert "87654321" not in repr(found._rules), "a secret is shown nowhere"


def test_the_list_and_the_settings_that_the_page_shows_are_taken(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    write_list(tmp_path / "plain_acl.yml", text)
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    assert "2 accounts, 1 addresses" in found.reload()
    shop = ("shop-key", "a-secret-of-the-shop")
    assert [topic for topic in ("orders", "prices", "others") if fault(found, 310, {"b": topic}, account=shop) == ""] == ["orders"]
    change = Frame(codes.UPDATE_AND_CREATE_TOPIC, signed({}, b"", ("operator", "a-secret-of-the-operator")))
    assert found.fault(change, HOST, is_secure=True) == "" != found.fault(change, HOST)
    (command,) = [block for block in re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "tls" in block]
    config = EngineConfig(**dict(re.findall(r"--set (\w+)=(\S+)", command)))
    assert (config.gateway_enable, config.gateway_tls_mode) == (True, "permissive")


def test_a_call_of_rocketmq_5_signs_its_time(tmp_path):
    write_list(tmp_path / "plain_acl.yml", "accounts: [{accessKey: the-shop, secretKey: its-secret}]\n"
               "globalWhiteRemoteAddresses: [10.1.*.*]\n")
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    found.reload()
    right = hmac.digest(b"its-secret", b"20261128T122215Z", "sha1").hex()
    assert found.call_fault("the-shop", "20261128T122215Z", right.upper(), HOST) == found.call_fault("", "", "", "10.1.2.3") == ""
    for key, time, signature in (("", "", ""), ("nobody", "20261128T122215Z", right), ("the-shop", "20261128T122216Z", right),
                                 ("the-shop", "20261128T122215Z", "ä")):
        assert found.call_fault(key, time, signature, HOST)


# ---- changing the list -------------------------------------------------------------------------

def document(path) -> dict:
    return yaml.safe_load(path.read_text())


def put_account(access, **fields):
    return access.change(lambda told: acl_file.put_account(told, {"accessKey": "new-key", "secretKey": "new-secret", **fields}))


@pytest.mark.root
def test_a_changed_list_of_root_in_another_users_folder_stays_roots(access, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    path = tmp_path / "plain_acl.yml"

    def edit(told: dict) -> None:
        path.unlink()  # the folder's user does so
        acl_file.put_account(told, {"accessKey": "new-key", "secretKey": "new-secret"})

    for change in (lambda: put_account(access), lambda: access.change(edit)):
        assert "3 accounts" in change()
        assert path.stat().st_uid == 0
    assert "3 accounts" in AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml")).reload()


def test_a_changed_account_counts_at_once_and_the_rest_of_the_file_is_as_it_was(access, tmp_path):
    path = tmp_path / "plain_acl.yml"
    written = "# of the operator\nowner: ops\n" + LIST.replace("203.0.113.*", "203.0.113.*\n  note: [kept]")
    write_list(path, written)
    access.reload()
    assert "3 accounts" in put_account(access, topicPerms="fresh=PUB", defaultGroupPerm="SUB", admin="false")
    assert fault(access, 310, {"b": "fresh"}, account=("new-key", "new-secret")) == ""
    before, after = yaml.safe_load(written), document(path)
    (version,) = after.pop("dataVersion")
    assert version["counter"] == 1 and abs(version["timestamp"] - path.stat().st_mtime_ns // 1_000_000) < 60_000
    assert after.pop("accounts") == [*before.pop("accounts"), {"accessKey": "new-key", "secretKey": "new-secret", "admin": False,
                                                               "defaultGroupPerm": "SUB", "topicPerms": ["fresh=PUB"]}]
    assert after == before and list(after)[0] == "owner"
    # Another right for an account that is there: the rest of its row stays.
    access.change(lambda told: acl_file.put_account(told, {"accessKey": "user-key", "secretKey": "user-secret-2",
                                                                 "topicPerms": "reads=PUB", "whiteRemoteAddress": ""}))
    row = document(path)["accounts"][1]
    assert (row["secretKey"], row["topicPerms"], row["groupPerms"], row["note"]) == (
        "user-secret-2", ["reads=PUB"], ["shut=DENY", "wrong=PUB"], ["kept"])
    assert fault(access, 310, {"b": "reads"}, account=("user-key", "user-secret-2")) == ""
    access.change(lambda told: acl_file.delete_account(told, "user-key"))
    assert fault(access, 310, {"b": "writes"}, account=("user-key", "user-secret-2")) == "No acl config for user-key"
    assert [row["accessKey"] for row in document(path)["accounts"]] == ["admin-key", "new-key"]
    assert document(path)["dataVersion"][0]["counter"] == 3 and (path.stat().st_mode & 0o777) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain_acl.yml", "plain_acl.yml.lock"], "no secret in another file"


@pytest.mark.parametrize("text", [
    "accounts: [{accessKey: admin-key, secretKey: admin-secret}]  # one line\n",
    "accounts:\nglobalWhiteRemoteAddresses:\n  - 10.0.0.1 # host\n  - 10.0.0.2",
    "globalWhiteRemoteAddresses: []\naccounts:\n    -   accessKey: admin-key\n        secretKey: |-\n          admin-secret\n",
    "{globalWhiteRemoteAddresses: [10.0.0.1], accounts: []}",
    "base: &base {secretKey: admin-secret, admin: true}\naccounts:\n- <<: *base\n  accessKey: admin-key\n",
    "\N{BYTE ORDER MARK}accounts:\n- {accessKey: admin-key, secretKey: 'admin-secret', city: \N{GREEK SMALL LETTER ALPHA}}\n...\n",
])
def test_a_change_of_an_access_list_in_any_form_of_yaml_keeps_its_other_entries(tmp_path, text):
    path = tmp_path / "plain_acl.yml"
    write_list(path, text)
    found = AccessList(tmp_path, EngineConfig(gateway_acl_file="plain_acl.yml"))
    before = document(path)
    put_account(found, topicPerms="a=PUB,b=SUB")
    found.change(lambda told: told.update(globalWhiteRemoteAddresses=["198.51.100.0-9"]))
    after = document(path)
    assert after["accounts"] == [*(before["accounts"] or []), {"accessKey": "new-key", "secretKey": "new-secret", "admin": False,
                                                               "topicPerms": ["a=PUB", "b=SUB"]}]
    assert after.keys() == before.keys() | {"globalWhiteRemoteAddresses", "dataVersion"}
    for row in after["accounts"]:
        found.change(lambda told, key=row["accessKey"]: acl_file.delete_account(told, key))
    assert document(path)["accounts"] == [] and fault(found, 310, {"b": "a"}, host="198.51.100.4") == ""


@pytest.mark.parametrize("fields, why", [
    ({"accessKey": "six666"}, "The accessKey=six666 and secretKey cannot be null and length should longer than 6"),
    ({"secretKey": "six666"}, "The accessKey=new-key and secretKey cannot be null"),
    ({"topicPerms": "orders"}, "Parse Resource format error for orders.\nThe expected resource format is 'Res=Perm'"),
    ({"groupPerms": "readers=ALL"}, "Parse resource permission error for readers=ALL.\nThe expected permissions are 'SUB'"),
    ({"whiteRemoteAddress": "10.0.0.x"}, "its account 3: 10.0.0.x is not an address"),
])
def test_an_account_that_rocketmq_refuses_changes_nothing(access, tmp_path, fields, why):
    before = (tmp_path / "plain_acl.yml").read_bytes()
    with pytest.raises(AccessError) as refused:
        put_account(access, **fields)
    assert str(refused.value).startswith(why) and "six666" not in str(refused.value).replace("accessKey=six666", "")
    assert (tmp_path / "plain_acl.yml").read_bytes() == before


def test_a_list_that_is_broken_or_of_others_is_not_changed(access, tmp_path):
    path = tmp_path / "plain_acl.yml"
    for text, mode, why in (("accounts: [", 0o600, "it is not YAML"), (LIST, 0o640, "chmod 600")):
        write_list(path, text, mode)
        with pytest.raises(AccessError, match=why):
            put_account(access)
        assert path.read_text() == text
    path.unlink()
    with pytest.raises(AccessError, match="cannot be read"):
        put_account(access)
    write_list(tmp_path / "real.yml")
    path.symlink_to("real.yml")
    put_account(access)
    assert path.is_symlink() and len(document(path)["accounts"]) == 3, "the file that the link names is changed"


def test_a_list_is_changed_by_an_admin_alone(access):
    for code in (codes.UPDATE_AND_CREATE_ACL_CONFIG, codes.DELETE_ACL_CONFIG, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG):
        assert fault(access, code, account=USER) == f"Need admin permission for request code={code}, but accessKey=user-key is not"
        assert fault(access, code, account=USER, host="203.0.113.5") != "", "from an address that its account names"
        assert fault(access, code, account=("user-key", "guessed"), host="203.0.113.5").startswith("Check signature failed")
        assert fault(access, code, account=ADMIN) == ""


# ---- a gateway with a list ---------------------------------------------------------------------

@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A store whose gateway has a list, and takes TLS beside plain connections."""
    root = tmp_path_factory.mktemp("guarded")
    write_list(root / "plain_acl.yml", LIST + "- {accessKey: all-topics, secretKey: all-topics-secret, defaultTopicPerm: PUB|SUB,"
                                              " defaultGroupPerm: SUB}\n"
               "- {accessKey: most-topics, secretKey: most-topics-secret, defaultTopicPerm: PUB, topicPerms: [reads=DENY]}\n"
               "- {accessKey: secure-key, secretKey: secure-secret, admin: true, tlsOnly: true}\n")
    authority = trustme.CA()
    store = start_served(root / "store", acl_enable=True, gateway_acl_file=str(root / "plain_acl.yml"), gateway_tls_mode="permissive",
                         transaction_timeout_ms=1, transaction_check_interval_ms=500, **put_certificate(root, authority))
    store.files, store.authority = root, authority
    yield store
    store.close()


ALL = ("all-topics", "all-topics-secret")


def ask(client, code, fields=None, body=b"", account=ALL, **frame):
    return client.ask(code, signed(fields or {}, body, account), body, **frame)


def test_a_client_with_a_key_sends_and_consumes(guarded):
    client = guarded.broker()
    for form in (0, BINARY_FORM):
        assert ask(client, codes.SEND_MESSAGE_V2, send_fields("kept"), b"hello", form=form).code == codes.SUCCESS
    fields = pull_fields("kept")
    eventually(lambda: ask(client, codes.PULL_MESSAGE, fields).body.count(b"hello") == 2, "both are consumed")


def test_no_request_to_the_broker_is_served_without_a_key(guarded):
    client = guarded.broker()
    refused = set()
    for code in range(400):
        answer = client.ask(code, {"b": "kept", "topic": "kept"})
        if answer.code != codes.REQUEST_CODE_NOT_SUPPORTED:
            assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, REFUSED + "No accessKey is configured"), code
            refused.add(code)
    assert {codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE, codes.PULL_MESSAGE, codes.END_TRANSACTION, codes.VIEW_MESSAGE_BY_ID,
            codes.UPDATE_AND_CREATE_TOPIC, codes.GET_BROKER_CLUSTER_ACL_INFO} <= refused and len(refused) > 50


def test_a_refused_request_is_not_done_and_its_connection_continues(guarded):
    client = guarded.broker()
    for code, fields, said in ((codes.SEND_MESSAGE_V2, send_fields("reads"), "No default permission for topic:reads"),
                               (codes.UPDATE_AND_CREATE_TOPIC, {"topic": "made"}, "Need admin permission for request code=17, but "
                                                                                 "accessKey=user-key is not")):
        answer = ask(client, code, fields, b"hello", account=USER)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, REFUSED + said)
    client.send(codes.SEND_MESSAGE_V2, send_fields("reads"), b"one-way", flag=2)  # without a key, and gets no answer
    assert ask(client, codes.GET_ALL_TOPIC_CONFIG, account=ADMIN).body.count(b'"topicName":"writes"') == 0
    topics = ask(client, codes.GET_ALL_TOPIC_CONFIG, account=ADMIN).body
    assert b'"topicName":"made"' not in topics and b'"topicName":"reads"' not in topics
    assert heartbeat(client, "c", "g", subscription("kept")).remark == REFUSED + "No accessKey is configured"
    assert "user-secret" not in guarded.engine.log()


SECURE = ("secure-key", "secure-secret")


def test_an_overheard_signature_serves_another_request_and_not_for_an_account_for_tls_only(guarded):
    """As in RocketMQ it covers neither the code nor the names of the fields: docs/security.md says what to do."""
    client, topic = guarded.broker(), "overheard"
    ask(client, codes.UPDATE_AND_CREATE_TOPIC, {"topic": topic}, account=ADMIN)
    heard = signed({"topic": topic}, b"", ADMIN)
    assert client.ask(codes.GET_TOPIC_STATS_INFO, heard).code == codes.SUCCESS
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, heard).code == codes.SUCCESS
    assert topic.encode() not in ask(client, codes.GET_ALL_TOPIC_CONFIG).body
    with TlsClient(guarded.ports[1], trusting(guarded.authority)) as secure:
        assert ask(secure, codes.UPDATE_AND_CREATE_TOPIC, {"topic": topic}, account=SECURE).code == codes.SUCCESS
        assert secure.ask(codes.GET_TOPIC_STATS_INFO, signed({"topic": topic}, b"", SECURE)).code == codes.SUCCESS
    refused = client.ask(codes.DELETE_TOPIC_IN_BROKER, signed({"topic": topic}, b"", SECURE))
    assert refused.remark == REFUSED + "accessKey=secure-key is for connections with TLS only"
    assert topic.encode() in ask(client, codes.GET_ALL_TOPIC_CONFIG).body


def test_a_message_is_read_by_its_offset_only_with_the_right_of_its_topic(guarded):
    """By its id, by a send back into a group of the client's own, and by having a member consume it."""
    client = guarded.broker()
    sent = {topic: ask(client, codes.SEND_MESSAGE_V2, send_fields(topic), b"a secret").fields["msgId"] for topic in ("none", "reads")}
    offsets = {topic: int(msg_id[16:], 16) for topic, msg_id in sent.items()}
    requests = ((codes.VIEW_MESSAGE_BY_ID, "offset", {}), (codes.CONSUMER_SEND_MSG_BACK, "offset", {"group": "own", "delayLevel": 0}),
                (codes.CONSUME_MESSAGE_DIRECTLY, "msgId", {"consumerGroup": "own", "clientId": "me"}))
    for code, name, fields in requests:
        for topic in ("none", "reads"):
            value = sent[topic] if name == "msgId" else offsets[topic]
            answer = eventually(lambda value=value, code=code, name=name, fields=fields: (
                found := ask(client, code, fields | {name: value}, account=USER)) and "by the offset" not in (found.remark or "") and found,
                "the message is dispatched")
            is_refused = (answer.remark or "").startswith(REFUSED)
            assert is_refused == (topic == "none") and b"a secret" not in (answer.body if is_refused else b""), (code, topic)
            assert not is_refused or answer.remark == REFUSED + "No default permission for topic:none"


def test_a_member_gets_no_key_or_signature_of_the_tool_that_asks_it(guarded):
    """It could cut the signed texts into other fields, and send the request as the tool's."""
    member, tool, own = guarded.broker(), guarded.broker(), {"consumerGroup": "own", "clientId": "me"}
    beat = {"clientID": "me", "consumerDataSet": [{"groupName": "own", "subscriptionDataSet": [subscription("reads")]}]}
    assert ask(member, codes.HEART_BEAT, body=json.dumps(beat).encode(), account=USER).code == codes.SUCCESS
    tool.send(codes.GET_CONSUMER_RUNNING_INFO, signed(own | {"SecurityToken": "token"}, b"", ADMIN))
    assert member.wait_told(codes.GET_CONSUMER_RUNNING_INFO).fields == own | {"brokerName": "broker-a"}


def test_a_transaction_is_ended_only_with_the_right_of_its_topic(guarded):
    client, text = guarded.broker(), "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01U%s"
    for topic, account, outcome in (("reads", USER, REFUSED + "No default permission for topic:reads"), ("writes", USER, None),
                                    ("reads", ALL, None)):
        half = ask(client, codes.SEND_MESSAGE_V2, send_fields(topic, 0, text % topic, f=4), b"half").fields
        fields = {"producerGroup": "p", "tranStateTableOffset": half["queueOffset"], "commitLogOffset": int(half["msgId"][16:], 16)}
        ended = ask(client, codes.END_TRANSACTION, fields | {"commitOrRollback": 12}, account=account)
        assert (ended.code, ended.remark) == (codes.SYSTEM_ERROR if outcome else codes.SUCCESS, outcome)


def test_a_second_queue_needs_the_right_of_its_topic(guarded):
    client = guarded.broker()
    for code in (codes.SEND_MESSAGE_V2, codes.SEND_REPLY_MESSAGE_V2):
        answer = ask(client, code, send_fields("writes", 0, "INNER_MULTI_DISPATCH\x01both,reads"), b"forged", account=USER)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, REFUSED + "No default permission for topic:reads")
    assert ask(client, codes.SEND_MESSAGE_V2, send_fields("writes", 0, "INNER_MULTI_DISPATCH\x01both"), account=USER).code == codes.SUCCESS


def test_a_producer_is_asked_only_with_the_right_of_the_topic(guarded):
    """Any account may name any producer group in its heartbeat."""
    clients, beat = [guarded.broker(), guarded.broker()], {"clientID": "me", "producerDataSet": [{"groupName": "watched"}]}
    for client, account in zip(clients, (USER, ALL)):
        assert ask(client, codes.HEART_BEAT, body=json.dumps(beat).encode(), account=account).code == codes.SUCCESS
    text = "TRAN_MSG\x01true\x02PGROUP\x01watched\x02UNIQ_KEY\x01W"
    assert ask(clients[1], codes.SEND_MESSAGE_V2, send_fields("none", 0, text, f=4, g=time_ns() // 1_000_000), b"a secret").code == 0
    for _ in range(3):
        assert b"a secret" in clients[1].wait_told(codes.CHECK_TRANSACTION_STATE).body
    assert ask(clients[0], codes.HEART_BEAT, body=b"{}", account=USER) and not clients[0].told


def test_a_transaction_of_which_nobody_may_be_asked_loses_no_try(guarded):
    """Otherwise an account that names its group while its producer is down has it put aside."""
    clients, beat = [guarded.broker(), guarded.broker()], {"clientID": "me", "producerDataSet": [{"groupName": "lonely"}]}
    assert ask(clients[0], codes.HEART_BEAT, body=json.dumps(beat).encode(), account=USER).code == codes.SUCCESS
    text = "TRAN_MSG\x01true\x02PGROUP\x01lonely\x02UNIQ_KEY\x01L"
    assert ask(clients[1], codes.SEND_MESSAGE_V2, send_fields("none", 0, text, f=4, g=time_ns() // 1_000_000), b"a secret").code == 0
    with pyengine.open_store(guarded.root) as store:
        eventually(lambda: len(store.query_message("RMQ_SYS_TRANS_HALF_TOPIC", "L", level="committed")) > 2, "it is put back twice")
    assert ask(clients[1], codes.HEART_BEAT, body=json.dumps(beat).encode(), account=ALL).code == codes.SUCCESS
    asked = decode_record(clients[1].wait_told(codes.CHECK_TRANSACTION_STATE).body)
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1" and not clients[0].told


def test_a_half_message_that_was_put_aside_is_resumed_only_with_the_right_of_its_topic(guarded):
    client = guarded.broker()
    with pyengine.connect(guarded.root) as producer:
        aside = producer.put_raw(RawMessage("TRANS_CHECK_MAX_TIME_TOPIC", b"x", properties_text="REAL_TOPIC\x01reads\x02REAL_QID\x010"))
    resumed = [eventually(lambda account=account: "begins at" not in ((found := ask(
        client, codes.RESUME_CHECK_HALF_MESSAGE, {"msgId": aside.msg_id}, account=account)).remark or "") and found, "it is dispatched")
        for account in (USER, ALL)]
    assert [(each.code, each.remark) for each in resumed] == [
        (codes.SYSTEM_ERROR, REFUSED + "No default permission for topic:reads"), (codes.SUCCESS, None)]


def test_a_timed_transaction_is_ended_only_with_the_right_of_the_topic_it_is_for(guarded):
    client, half = guarded.broker(), "RMQ_SYS_TRANS_HALF_TOPIC"
    with pyengine.connect(guarded.root) as producer, pytest.raises(KeyError), producer.transaction(group="timed") as transaction:
        transaction.put("reads", b"later", deliver_at=time_ns() // 1_000_000 + 3_600_000)
        with pyengine.open_store(guarded.root) as store:
            message, *_ = eventually(lambda: [each for offset in range(*store.queue_range(half, 0, level="committed"))
                                             for each in store.get_message(half, 0, offset, 1, level="committed").messages
                                             if each.properties["PGROUP"] == "timed"], "the half message is dispatched")
        fields = {"producerGroup": "timed", "tranStateTableOffset": message.queue_offset, "commitLogOffset": message.physical_offset,
                  "commitOrRollback": 8}
        ended = ask(client, codes.END_TRANSACTION, fields, account=("most-topics", "most-topics-secret"))
        assert (ended.code, ended.remark) == (codes.SYSTEM_ERROR, REFUSED + "No default permission for topic:reads")
        raise KeyError


def test_a_message_is_recalled_only_with_the_right_of_its_topic(guarded):
    client, text = guarded.broker(), "UNIQ_KEY\x01R\x02TIMER_DELAY_SEC\x01999"
    sent = {topic: ask(client, codes.SEND_MESSAGE_V2, send_fields(topic, 0, text), b"later", account=ADMIN).fields["recallHandle"]
            for topic in ("reads", "writes")}
    refused = ask(client, codes.RECALL_MESSAGE, {"topic": "reads", "recallHandle": sent["reads"]}, account=USER)
    assert (refused.code, refused.remark) == (codes.SYSTEM_ERROR, REFUSED + "No default permission for topic:reads")
    words = base64.urlsafe_b64decode(sent["reads"]).decode().split(" ")
    forged = base64.urlsafe_b64encode(" ".join(["v1", "writes", *words[2:]]).encode()).decode()
    refused = ask(client, codes.RECALL_MESSAGE, {"topic": "writes", "recallHandle": forged}, account=USER)
    assert refused.code == codes.INVALID_PARAMETER and "is not one of topic writes" in refused.remark
    assert ask(client, codes.RECALL_MESSAGE, {"topic": "writes", "recallHandle": sent["writes"]}, account=USER).code == codes.SUCCESS


def test_changes_at_the_name_server_need_an_admin_and_routes_no_key(guarded):
    client = guarded.name_server()
    broker, value = {"brokerName": "broker-a"}, {"namespace": "n", "key": "k"}
    changes = ((codes.WIPE_WRITE_PERM_OF_BROKER, broker, b""), (codes.UPDATE_NAMESRV_CONFIG, {}, b"orderMessageEnable=true\n"),
               (codes.PUT_KV_CONFIG, value | {"value": "v"}, b""), (codes.DELETE_KV_CONFIG, value, b""),
               (codes.ADD_WRITE_PERM_OF_BROKER, broker, b""))
    for code, fields, body in changes:
        assert client.ask(code, fields, body).remark == REFUSED + "No accessKey is configured"
        assert ask(client, code, fields, body).remark == REFUSED + (
            f"Need admin permission for request code={code}, but accessKey=all-topics is not")
        route = json.loads(client.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "BenchmarkTest"}).body)
        assert route["queueDatas"][0]["perm"] == 6, "nothing has changed"
    for code, fields, body in changes:
        assert ask(client, code, fields, body, account=ADMIN).code == codes.SUCCESS
    ask(client, codes.UPDATE_NAMESRV_CONFIG, {}, b"orderMessageEnable=false\n", account=ADMIN)


def test_a_refusal_is_logged_and_its_handler_is_not_called(access):
    connection = SimpleNamespace(host=HOST, is_secure=False, is_local=False)
    said, asked = [], SimpleNamespace(frame=Frame(10, {"AccessKey": "user-key"}), connection=connection)
    with pytest.raises(RequestRefusedError) as refused:
        access.guard(pytest.fail, lambda *told: said.append(told))(asked)
    answer = refused.value.answer
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, REFUSED + "Check signature failed for accessKey=user-key")
    assert said == [(HOST, "request 10 is refused: Check signature failed for accessKey=user-key")]


def test_a_flood_of_refusals_leaves_other_sentences_of_the_log_their_place(guarded):
    client = guarded.broker()
    for _ in range(3 * LINES_MAX):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("kept"), b"x").code == codes.SYSTEM_ERROR
    client.socket.sendall(struct.pack(">i", 70 << 20))
    eventually(lambda: f"a frame of {70 << 20} bytes" in guarded.engine.log(), "it is said why the connection was closed")


def test_a_batch_of_acks_and_a_share_of_queues_need_their_topics_and_groups(guarded):
    client = guarded.broker()
    batch = {"acks": [{"c": "any", "t": "reads", "r": "0", "so": 0, "q": 0, "pt": 1, "b": "AQ=="}]}
    share = {"topic": "reads", "consumerGroup": "any", "clientId": "me"}
    for code, body, names in ((codes.BATCH_ACK_MESSAGE, batch, ("t", "c")), (codes.QUERY_ASSIGNMENT, share, ("topic", "consumerGroup"))):
        assert ask(client, code, body=json.dumps(body).encode(), account=USER).code == codes.SUCCESS
        for name, value, why in zip(names, ("writes", "shut"), ("topic:writes", "group:shut")):
            changed = json.dumps(body).replace(json.dumps(body.get(name, batch["acks"][0].get(name))), json.dumps(value))
            answer = ask(client, code, body=changed.encode(), account=USER)
            assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, REFUSED + no(why)), name


def test_a_local_connection_stands_for_its_client(guarded):
    with LocalClient(guarded.root, "192.0.2.7:4711", secure="false") as client:
        plain = client.ask(codes.SEND_MESSAGE_V2, send_fields("kept") | {"AccessKey": "secure-key"}, b"x")
        assert plain.remark == REFUSED + "accessKey=secure-key is for connections with TLS only"
        assert client.ask(codes.INTRODUCE, {"address": "192.0.2.7:4711", "secure": "true"}).code == codes.SUCCESS
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("local") | {"AccessKey": "secure-key"}, b"x").code == codes.SUCCESS
        for wrong in ("", "192.0.2.7", "somewhere:1"):
            assert client.ask(codes.INTRODUCE, {"address": wrong}).code == codes.SYSTEM_ERROR
        refused = client.ask(codes.GET_MAX_OFFSET, {"topic": "local", "queueId": 0})
        assert refused.remark == REFUSED + "No accessKey is configured"
    with pyengine.open_store(guarded.root) as store:
        assert store.wait_for_message("local", 0, 0, 30) and store.get_message("local", 0, 0).messages[0].born_host == "192.0.2.7:4711"
    eventually(lambda: "client 192.0.2.7" in guarded.engine.log(), "refusals name the client")
    assert guarded.broker().ask(codes.INTRODUCE, {"address": "192.0.2.7:4711"}).code == codes.REQUEST_CODE_NOT_SUPPORTED


def test_only_this_user_may_connect_to_the_local_socket(guarded):
    path = find_folder(guarded.root).path / GATEWAY_SOCKET
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_name_server_asks_for_no_key_as_rocketmqs(guarded):
    ask(guarded.broker(), codes.SEND_MESSAGE_V2, send_fields("routed"), b"hello")
    assert guarded.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "routed"}).code == codes.SUCCESS


def test_a_cluster_acl_request_returns_the_version_of_the_access_list(guarded):
    answer = ask(guarded.broker(), codes.GET_BROKER_CLUSTER_ACL_INFO)
    changed_ms = (guarded.files / "plain_acl.yml").stat().st_mtime_ns // 1_000_000
    assert answer.fields["version"] == f'{{"counter":0,"timestamp":{changed_ms}}}'
    assert (answer.fields["brokerName"], answer.fields["clusterName"]) == ("broker-a", "DefaultCluster")


def test_tools_change_the_list_of_a_running_gateway(guarded):
    path, client = guarded.files / "plain_acl.yml", guarded.broker()
    before, fresh = path.read_text(), ("by-tool-key", "by-tool-secret")
    account = {"accessKey": fresh[0], "secretKey": fresh[1], "admin": "false", "topicPerms": "kept=SUB,other=PUB"}

    def max_offset(account):
        return ask(client, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}, account=account)

    try:
        refused = ask(client, codes.UPDATE_AND_CREATE_ACL_CONFIG, account, account=USER)
        assert refused.remark == REFUSED + "Need admin permission for request code=50, but accessKey=user-key is not"
        assert max_offset(fresh).remark == REFUSED + "No acl config for by-tool-key"
        assert ask(client, codes.UPDATE_AND_CREATE_ACL_CONFIG, account, account=ADMIN).code == codes.SUCCESS
        assert max_offset(fresh).code == codes.SUCCESS and "by-tool-key" in path.read_text()
        version = ask(client, codes.GET_BROKER_CLUSTER_ACL_INFO, account=ADMIN).fields["version"]
        assert version.startswith('{"counter":1,')
        bad = ask(client, codes.UPDATE_AND_CREATE_ACL_CONFIG, account | {"topicPerms": "kept"}, account=ADMIN)
        assert bad.code == codes.UPDATE_AND_CREATE_ACL_CONFIG_FAILED
        assert bad.remark.splitlines()[0] == "Parse Resource format error for kept."

        answer = ask(client, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, {"globalWhiteAddrs": "10.0.0.{1,2},127.0.0.1"}, account=ADMIN)
        assert answer.code == codes.SUCCESS and client.ask(codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}).code == codes.SUCCESS
        assert document(path)["globalWhiteRemoteAddresses"] == ["10.0.0.{1,2}", "127.0.0.1"]
        for fields, why in (({"globalWhiteAddrs": "10.0.0.x"}, "10.0.0.x is not an address"),
                            ({"globalWhiteAddrs": "10.0.0.1", "aclFileFullPath": "/etc/passwd"},
                             "The globalWhiteAddresses[10.0.0.1] has been updated failed.")):
            answer = ask(client, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, fields, account=ADMIN)
            assert answer.code == codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED and answer.remark.startswith(why)
        fields = {"globalWhiteAddrs": "198.51.100.7", "aclFileFullPath": str(path)}
        assert ask(client, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, fields, account=ADMIN).code == codes.SUCCESS

        assert ask(client, codes.DELETE_ACL_CONFIG, {"accessKey": fresh[0]}, account=ADMIN).code == codes.SUCCESS
        assert max_offset(fresh).remark == REFUSED + "No acl config for by-tool-key"
        answer = ask(client, codes.DELETE_ACL_CONFIG, {"accessKey": fresh[0]}, account=ADMIN)
        assert (answer.code, answer.remark) == (codes.DELETE_ACL_CONFIG_FAILED,
                                                "The accesskey[by-tool-key] corresponding to accessConfig has been deleted failed.")
        log = guarded.engine.log()
        assert "client 127.0.0.1 (admin-key) has changed the account by-tool-key" in log and "by-tool-secret" not in log
    finally:
        write_list(path, before)
    eventually(lambda: ask(client, codes.GET_BROKER_CLUSTER_ACL_INFO).fields["version"].startswith('{"counter":0,'), "the list is back")


def test_a_running_gateway_takes_a_changed_list_and_keeps_it_when_the_next_is_broken(guarded):
    path, client = guarded.files / "plain_acl.yml", guarded.broker()
    before = path.read_text()
    try:
        write_list(path, before + "- {accessKey: new-key, secretKey: new-secret}\n")
        eventually(lambda: ask(client, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}, account=("new-key", "new-secret")).code == 0,
                   "the new key counts")
        write_list(path, "accounts: [")
        eventually(lambda: "is not YAML" in guarded.engine.log(), "it is said")
        assert ask(client, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}, account=("new-key", "new-secret")).code == 0
        path.unlink()
        eventually(lambda: ask(client, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}).code == codes.SYSTEM_ERROR,
                   "without a list every client is refused")
    finally:
        write_list(path, before)
    eventually(lambda: ask(client, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}).code == 0, "the list is back")


# ---- TLS ---------------------------------------------------------------------------------------

def test_both_ports_take_tls_beside_plain_connections(guarded):
    context = trusting(guarded.authority)
    with TlsClient(guarded.ports[1], context) as client, TlsClient(guarded.ports[0], context) as names:
        assert client.socket.version() in ("TLSv1.2", "TLSv1.3")
        body = os.urandom(900_000)  # many TLS records, both ways
        assert ask(client, codes.SEND_MESSAGE_V2, send_fields("sealed"), body).code == codes.SUCCESS
        fields = pull_fields("sealed")
        found = eventually(lambda: (answer := ask(client, codes.PULL_MESSAGE, fields)).code == codes.SUCCESS and answer, "it is consumed")
        assert body in found.body
        assert names.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "sealed"}).code == codes.SUCCESS
    assert ask(guarded.broker(), codes.GET_MAX_OFFSET, {"topic": "sealed", "queueId": 0}).code == codes.SUCCESS


def test_a_client_that_trusts_another_ca_does_not_connect_and_old_versions_are_refused(guarded):
    with pytest.raises(ssl.SSLCertVerificationError):
        TlsClient(guarded.ports[1], trusting(trustme.CA()))
    old = trusting(guarded.authority)
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        TlsClient(guarded.ports[1], old)


def test_a_renewed_certificate_is_shown_to_new_connections(guarded):
    context = trusting(guarded.authority)
    with TlsClient(guarded.ports[1], context) as before:
        old = before.socket.getpeercert(True)
        put_certificate(guarded.files, guarded.authority)

        def is_another():
            with TlsClient(guarded.ports[1], context) as client:
                return client.socket.getpeercert(True) != old

        eventually(is_another, "the new one is shown")
        assert ask(before, codes.GET_MAX_OFFSET, {"topic": "kept", "queueId": 0}).code == codes.SUCCESS, "the old connection goes on"
    (guarded.files / "key.pem").write_text("no key")
    eventually(lambda: "the changed certificate cannot be used" in guarded.engine.log(), "it is said")
    with TlsClient(guarded.ports[1], context):
        put_certificate(guarded.files, guarded.authority)
