"""The record of a client's message, and the answer to the client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import struct
from types import SimpleNamespace

import pytest

import pyengine
from crash.replicas import free_port
from fix_engine import SMALL
from fix_gateway import heartbeat, pull_fields, send_fields, start_served
from pyengine.engine_config import EngineConfig
from pyengine.errors import ConfigError, UsageError
from pyengine.formats.record import BatchMember, decode_message_id, encode_batch
from pyengine.gateway import codes
from pyengine.gateway.connections import Connection, Connections, Limits, Request, TurnExecutor
from pyengine.gateway.names import Address
from pyengine.gateway.sends import LARGE_BATCH_BYTES, Sends
from pyengine.gateway.wire import ANSWER, Frame, encode_frame
from pyengine.ipc.control_block import now_ms
from pyengine.native import control as native
from pyengine.results import PutResult, PutStatus
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.durable_writes import write_config
from waiting import eventually, scaled_timeout_s

ADDRESS = Address("127.0.0.1:1", "broker-a", "DefaultCluster", "127.0.0.1:1")


def stored(served, topic, queue_id, offset):
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, queue_id, offset, timeout_s=30, level="committed")
        return store.get_message(topic, queue_id, offset, 1, level="committed").messages[0]


@contextlib.contextmanager
def held(served, kind):
    """Stop a worker for this block."""
    served.engine.suspend(kind)
    try:
        yield
    finally:
        served.engine.kill(kind, signal.SIGCONT)


def test_a_message_is_stored_as_its_client_sent_it(served, topic):
    client = served.broker()
    text = "KEYS\x01k\x02UNIQ_KEY\x01" + "AB" * 16 + "\x02WAIT\x01true\x02TAGS\x01A\x02color\x01red"
    answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2, text, h=7, f=1), b"compressed by the client")
    assert answer.code == codes.SUCCESS and answer.remark is None
    assert answer.fields.items() >= {"queueId": "2", "queueOffset": "0", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}.items()
    message = stored(served, topic, 2, 0)
    assert (message.body, message.flag, message.sys_flag, message.born_timestamp_ms) == (
        b"compressed by the client", 7, 1, 1_700_000_000_000)
    assert message.born_host == "%s:%d" % client.socket.getsockname()
    assert message.store_host == f"127.0.0.1:{served.ports[1]}"
    assert message.msg_id == answer.fields["msgId"] and decode_message_id(message.msg_id)[1] == message.physical_offset
    assert message.raw_properties == (
        "color\x01red\x02KEYS\x01k\x02UNIQ_KEY\x01" + "AB" * 16 + "\x02CLUSTER\x01DefaultCluster\x02TAGS\x01A")


def test_a_gateway_that_clients_know_by_a_name_stores_messages_at_the_store_s_address(tmp_path, topic):
    served = start_served(tmp_path / "store", gateway_advertised_host="log.invalid", store_host="10.0.0.9:4711")
    try:
        client = served.broker()
        assert f'"log.invalid:{served.ports[1]}"'.encode() in served.name_server().ask(codes.GET_BROKER_CLUSTER_INFO).body
        heartbeat(client, "asker@1", "readers_of_replies")
        half = "TRAN_MSG\x01true\x02PGROUP\x01g\x02UNIQ_KEY\x01k"
        answers = [client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"%d" % number) for number in range(3)]  # C takes the last
        answers += [client.ask(codes.SEND_BATCH_MESSAGE, send_fields(topic, 1, m="true"), encode_batch([BatchMember(b"b", 0, "")])),
                    client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, half), b"half")]
        end = {"producerGroup": "g", "tranStateTableOffset": answers[-1].fields["queueOffset"], "commitOrRollback": 8,
               "commitLogOffset": int(answers[-1].fields["msgId"][16:], 16), "msgId": "k", "transactionId": "k"}
        assert client.ask(codes.END_TRANSACTION, end).code == codes.SUCCESS
        assert client.ask(codes.CONSUMER_SEND_MSG_BACK, {"group": "readers", "offset": 0, "delayLevel": 0}).code == codes.SUCCESS
        sent = client.send(codes.SEND_REPLY_MESSAGE_V2, send_fields(REPLIES, 0, reply_text("asker@1")), b"yes")
        pushed = client.wait_told(codes.PUSH_REPLY_MESSAGE_TO_CLIENT)
        client.socket.sendall(encode_frame(Frame(codes.SUCCESS, opaque=pushed.opaque, flag=ANSWER)))
        answers.append(client.wait(sent))
        assert [answer.code for answer in answers] == [codes.SUCCESS] * 6
        assert {decode_message_id(answer.fields["msgId"])[0] for answer in answers} == {"10.0.0.9:4711"} == {pushed.fields["storeHost"]}
        hosts = [stored(served, *where).store_host for where in [
            *((topic, 1, offset) for offset in range(5)), ("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0, 0), (REPLIES, 0, 0), ("%RETRY%readers", 0, 0)]]
        assert hosts == ["10.0.0.9:4711"] * 8
    finally:
        served.close()


def test_the_longest_name_of_a_cluster_is_in_each_message(tmp_path, topic):
    name = "c" * 256
    served = start_served(tmp_path / "store", broker_cluster_name=name)
    try:
        client = served.broker()
        codes_of = [client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"x").code for _ in range(3)]
        assert codes_of == [codes.SUCCESS] * 3  # C takes the last
        assert [stored(served, topic, 1, offset).properties["CLUSTER"] for offset in range(3)] == [name] * 3
    finally:
        served.close()
    with pytest.raises(ConfigError, match="broker_cluster_name has 257 bytes: give it 256 at most"):
        EngineConfig(broker_cluster_name=name + "c")


def test_a_send_that_is_answered_with_an_error_is_not_stored(served, topic):
    puts = SimpleNamespace(producer=object(), submit=lambda *args: pytest.fail("it is stored"))
    known = {topic: TopicConfig(topic, 4, 4)}.get
    names = SimpleNamespace(topic=known, recent_topic=known, recent_topics=dict)
    with pyengine.open_store(served.root) as reader:
        sends = Sends(puts, reader, names, Address("127.0.0.1:1", "broker-a", "c" * 257, "127.0.0.1:1"), None, None, None)
        connection = Connection(Connections(Limits(), lambda host, text: None), sends.handlers)
        frame = Frame(codes.SEND_MESSAGE_V2, {name: str(value) for name, value in send_fields(topic, 1).items()}, b"x", 1)
        with pytest.raises(UsageError, match="a part is too long"):
            sends.send(Request(connection, frame, 1))


def test_a_gateway_that_listens_everywhere_stores_what_is_sent(tmp_path, topic):
    port = free_port()
    served = start_served(tmp_path / "store", gateway_listen_host="", gateway_broker_port=port)
    try:
        answer = served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"x")
        assert decode_message_id(answer.fields["msgId"])[0] == f"0.0.0.0:{port}"
    finally:
        served.close()


GBK = "\u8ba2\u5355".encode("gbk")
BROKEN = GBK.decode("utf-8", "replace")


def raw_frame(fields: dict[str, object], body: bytes, code: int, form: int = 0) -> bytes:
    """A request's frame in which the texts of the fields are bytes."""
    raw = [(name.encode(), value if isinstance(value, bytes) else str(value).encode()) for name, value in fields.items()]
    if form:
        data = b"".join(struct.pack(">H", len(name)) + name + struct.pack(">i", len(value)) + value for name, value in raw)
        header = struct.pack(">hBhiii", code, 1, 403, 1, 0, 0) + struct.pack(">i", len(data)) + data
    else:
        text = b",".join(b'"%s":"%s"' % (name, value.replace(b"\x01", rb"\u0001").replace(b"\x02", rb"\u0002")) for name, value in raw)
        header = b'{"code":%d,"opaque":1,"flag":0,"language":"CPP","version":403,"extFields":{%s}}' % (code, text)
    return struct.pack(">ii", 4 + len(header) + len(body), form << 24 | len(header)) + header + body


@pytest.mark.parametrize("form", [0, 1], ids=["json", "binary"])
def test_a_message_whose_texts_are_not_utf8_is_stored_with_replacement_characters(served, topic, form):
    client = served.broker()
    properties = b"TAGS\x01" + GBK + b"\x02KEYS\x01k" + GBK + b"\x02" + GBK + b"\x01v"
    for code, fields in ((codes.SEND_MESSAGE_V2, send_fields(topic, 1, properties, a=b"PG" + GBK, n=GBK)),
                         (codes.SEND_MESSAGE, {"producerGroup": GBK, "topic": topic, "queueId": 1, "properties": properties})):
        client.socket.sendall(raw_frame(fields, GBK, code, form))
        answer = client.receive()
        assert (answer.code, answer.opaque) == (codes.SUCCESS, 1)
        message = stored(served, topic, 1, int(answer.fields["queueOffset"]))
        assert (message.body, message.tags, message.keys, message.properties[BROKEN]) == (GBK, BROKEN, f"k{BROKEN}", "v")


def test_a_batch_whose_texts_are_not_utf8_is_stored_with_replacement_characters(served, topic):
    properties = b"TAGS\x01" + GBK
    member = struct.pack(">iiiii", 22 + 4 + len(properties), 0, 0, 0, 4) + b"body" + struct.pack(">h", len(properties)) + properties
    client = served.broker()
    client.socket.sendall(raw_frame(send_fields(topic, 2, m="true"), member, codes.SEND_BATCH_MESSAGE))
    assert client.receive().code == codes.SUCCESS and stored(served, topic, 2, 0).tags == BROKEN


@pytest.mark.parametrize("form", [0, 1], ids=["json", "binary"])
def test_a_topic_that_is_not_utf8_is_refused_as_by_the_broker_and_the_connection_continues(served, topic, form):
    client = served.broker()
    client.socket.sendall(raw_frame(send_fields("T", b=b"T" + GBK), b"x", codes.SEND_MESSAGE_V2, form))
    refused = client.receive()
    assert refused.code == codes.SYSTEM_ERROR and refused.remark.startswith("The specified topic contains illegal characters")
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"on").code == codes.SUCCESS


def test_half_a_surrogate_pair_is_stored_as_java_encodes_it(served, topic):
    client = served.broker()
    client.socket.sendall(raw_frame(send_fields(topic, 3, rb"TAGS\u0001\ud800x"), b"", codes.SEND_MESSAGE_V2))
    assert client.receive().code == codes.SUCCESS and stored(served, topic, 3, 0).tags == "?x"


def test_the_long_names_of_old_clients_do_the_same(served, topic):
    answer = served.broker().ask(codes.SEND_MESSAGE, {
        "producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 1, "sysFlag": 0,
        "bornTimestamp": 5, "flag": 0, "properties": "TAGS\x01old", "reconsumeTimes": 0, "unitMode": "false", "batch": "false"}, b"old")
    assert answer.code == codes.SUCCESS
    message = stored(served, topic, 1, 0)
    assert (message.body, message.tags, message.born_timestamp_ms) == (b"old", "old", 5)


def test_a_one_way_message_is_stored_without_an_answer(served, topic):
    client = served.broker()
    client.send(codes.SEND_MESSAGE_V2, send_fields(topic, 3), b"one way", flag=2)
    assert stored(served, topic, 3, 0).body == b"one way"
    assert client.is_silent()


def test_a_message_that_an_ordered_consumer_sends_again_enters_no_second_queue(served, topic):
    text = "INNER_MULTI_DISPATCH\x01other\x02DELAY\x011"
    assert served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(f"%RETRY%{topic}", 0, text, j=1, l=16), b"again").code == codes.SUCCESS
    assert "INNER_MULTI_DISPATCH" not in stored(served, f"%RETRY%{topic}", 0, 0).properties


def test_a_batch_is_stored_whole_with_all_its_ids(served, topic):
    members = [BatchMember(b"%d" % number, 0, f"KEYS\x01k{number}\x02WAIT\x01true") for number in range(5)]
    answer = served.broker().ask(codes.SEND_BATCH_MESSAGE, send_fields(topic, 1, "WAIT\x01true", m="true"), encode_batch(members))
    assert answer.code == codes.SUCCESS and answer.fields["queueOffset"] == "0"
    ids = answer.fields["msgId"].split(",")
    found = [stored(served, topic, 1, number) for number in range(5)]
    assert [message.msg_id for message in found] == ids and [message.body for message in found] == [b"%d" % n for n in range(5)]
    assert found[0].raw_properties == "KEYS\x01k0\x02WAIT\x01true\x02CLUSTER\x01DefaultCluster\x02WAIT\x01true"


@pytest.mark.parametrize("body", [b"", b"xx", b"\xff" * 40, encode_batch([BatchMember(b"a", 0, "K\x01v")])[:-1]],
                         ids=["empty", "short", "noise", "cut"])
def test_a_batch_that_cannot_be_read_is_refused(served, topic, body):
    assert served.broker().ask(codes.SEND_BATCH_MESSAGE, send_fields(topic, m="true"), body).code == codes.SYSTEM_ERROR


def test_a_delayed_message_goes_into_the_schedule_and_comes_out(served, topic):
    assert served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2, "DELAY\x011"), b"later").code == codes.SUCCESS
    message = stored(served, topic, 2, 0)
    assert message.body == b"later" and message.properties["REAL_TOPIC"] == topic


@pytest.mark.parametrize("name", [pytest.param("TIMER_DELAY_MS", marks=pytest.mark.ci), "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
def test_a_message_of_a_later_client_is_delivered_at_its_time(served, topic, name):
    """As DELAY it is stored with its properties, and RocketMQ's note of the time; several plain sends of its topic went before."""
    client, began_ms = served.broker(), now_ms()
    value = {"TIMER_DELAY_MS": 1500, "TIMER_DELAY_SEC": 1, "TIMER_DELIVER_MS": began_ms + 1500}[name]
    for body in (b"1", b"2"):
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), body)
    sent = send_fields(topic, 2, f"KEYS\x01k\x02WAIT\x01true\x02{name}\x01{value}\x02TAGS\x01t", h=7)
    answer = client.ask(codes.SEND_MESSAGE_V2, sent, b"later")
    assert answer.code == codes.SUCCESS and answer.fields["queueId"] == "2"
    pulled = client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 2))
    assert pulled.code == codes.PULL_NOT_FOUND, "not at once"
    message = stored(served, topic, 2, 0)
    assert message.store_timestamp_ms >= began_ms + (1000 if name == "TIMER_DELAY_SEC" else 1500)
    assert (message.body, message.flag, message.tags, message.keys, message.properties[name]) == (b"later", 7, "t", "k", str(value))
    assert message.properties.keys() == {"KEYS", "WAIT", name, "TAGS", "CLUSTER", "TIMER_OUT_MS"}
    assert began_ms + 1000 <= int(message.properties["TIMER_OUT_MS"]) <= message.store_timestamp_ms
    again = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 3, message.raw_properties), b"forwarded")
    assert again.code == codes.SUCCESS and again.fields["queueOffset"] == "0" and stored(served, topic, 3, 0).body == b"forwarded"


def test_a_message_for_a_later_time_is_recalled_by_the_handle_in_its_answer(served, topic):
    client = served.broker()

    def send(body: bytes, delay_ms: int, key: str) -> dict[str, str]:
        answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"UNIQ_KEY\x01{key}\x02TIMER_DELAY_MS\x01{delay_ms}"), body)
        assert answer.code == codes.SUCCESS
        return {"topic": topic, "recallHandle": answer.fields["recallHandle"]}

    gone, kept = send(b"gone", 1500, "A1"), send(b"kept", 1500, "A2")
    words = base64.urlsafe_b64decode(gone["recallHandle"]).decode().split(" ")
    assert words[:2] == ["v1", topic] and words[4] == "A1" and len(words) == 6, "clients of RocketMQ 5 read five of them"
    for _ in range(2):
        answer = client.ask(codes.RECALL_MESSAGE, gone)
        assert (answer.code, answer.fields["msgId"]) == (codes.SUCCESS, "A1")
    assert stored(served, topic, 1, 0).body == b"kept"
    answer = client.ask(codes.RECALL_MESSAGE, kept)
    assert answer.code == codes.SYSTEM_ERROR and "is due, delivered or deleted" in answer.remark
    assert "recallHandle" not in client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, "UNIQ_KEY\x01A3"), b"now").fields
    later = send(b"later", 3_600_000, "A4")
    words = base64.urlsafe_b64decode(later["recallHandle"]).decode().split(" ")
    other = base64.urlsafe_b64encode(" ".join(["v1", "other", *words[2:]]).encode())
    for fields in ({"topic": "other", "recallHandle": later["recallHandle"]}, {"topic": "other", "recallHandle": other.decode()},
                   {"topic": topic, "recallHandle": "?"}, {"topic": topic, "recallHandle": "djEgVA=="}):
        answer = client.ask(codes.RECALL_MESSAGE, fields)
        assert answer.code == codes.INVALID_PARAMETER and answer.remark.startswith("recall failed"), fields


def test_a_time_that_is_past_and_a_time_beside_a_level_do_not_count(served, topic):
    client = served.broker()
    for number, (name, value) in enumerate((("TIMER_DELAY_MS", "0"), ("TIMER_DELAY_SEC", "-5"), ("TIMER_DELIVER_MS", "+1"))):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"{name}\x01{value}"), b"now").fields["queueOffset"] == str(number)
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2, "DELAY\x011\x02TIMER_DELAY_SEC\x01999"), b"level").code == codes.SUCCESS
    assert stored(served, topic, 2, 0).properties.keys() == {"DELAY", "CLUSTER", "REAL_TOPIC", "REAL_QID"}


def test_a_delay_level_is_any_int_of_java(served, topic):
    client = served.broker()
    for number, level in enumerate(("-2147483648", "-1", "0", "+0")):
        answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"DELAY\x01{level}"), b"now")
        assert (answer.code, answer.fields["queueOffset"]) == (codes.SUCCESS, str(number)), level
    for level in ("999999999", "1000000000", "2147483647", "00000000002147483647"):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"DELAY\x01{level}"), b"last").code == codes.SUCCESS
    assert stored(served, "SCHEDULE_TOPIC_XXXX", 17, 3).properties["DELAY"] == "18"
    for level in ("2147483648", "-2147483649", "soon", "1.0", "9" * 5000):
        answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, f"DELAY\x01{level}"), b"x")
        assert answer.code == codes.SYSTEM_ERROR and "is not a number of 32 bits" in answer.remark, level
    assert client.ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 1}).fields["offset"] == "4"


@pytest.mark.parametrize(("properties", "why"), [
    ("TIMER_DELAY_MS\x01soon", "TIMER_DELAY_MS is 'soon'"), ("TIMER_DELAY_SEC\x011.5", "TIMER_DELAY_SEC is '1.5'"),
    ("TIMER_DELIVER_MS\x01" + "9" * 20, "TIMER_DELIVER_MS is"), ("TIMER_DELAY_MS\x01" + "9" * 19, "more than 40 days"),
    ("TIMER_DELAY_SEC\x01" + "9" * 19, "more than 40 days"), (f"TIMER_DELAY_SEC\x01{40 * 86_400 + 60}", "more than 40 days"),
    ("TIMER_DELAY_SEC\x015\x02TIMER_DEL_UNIQKEY\x01k", "cannot be taken back"),
    ("TIMER_DELAY_SEC\x015\x02TRAN_MSG\x01true\x02PGROUP\x01p", "outside of a transaction")])
def test_a_time_that_cannot_be_kept_is_refused(served, topic, properties, why):
    answer = served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, properties), b"x")
    assert answer.code == codes.MESSAGE_ILLEGAL and why in answer.remark
    assert answer.remark.startswith("timer message illegal, the delay time should not be bigger than the max delay 3456000000ms")


@pytest.mark.parametrize(("shared", "own"), [("TIMER_DELAY_MS\x015000", ""), ("", "TIMER_DELIVER_MS\x01" + "9" * 13), ("DELAY\x013", "")])
def test_a_batch_with_a_message_for_later_is_refused_whole(served, topic, shared, own):
    batch = encode_batch([BatchMember(b"1"), BatchMember(b"2", 0, own)])
    answer = served.broker().ask(codes.SEND_BATCH_MESSAGE, send_fields(topic, 1, shared, m="true"), batch)
    assert answer.code == codes.MESSAGE_ILLEGAL and "send it singly" in answer.remark
    assert served.broker().ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 1}).fields["offset"] == "0"


def test_the_broker_chooses_a_queue_for_a_client_that_does_not(served, topic):
    answer = served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(topic, -1), b"anywhere")
    assert answer.code == codes.SUCCESS and 0 <= int(answer.fields["queueId"]) < 4


REFUSED = {
    "a queue past the end": ({"e": 99}, b"x", codes.SYSTEM_ERROR, "request queueId[99] is illegal, TopicConfig [topicName="),
    "no topic": ({"b": ""}, b"x", codes.SYSTEM_ERROR, "The specified topic is blank."),
    "bad characters": ({"b": "bad topic!"}, b"x", codes.SYSTEM_ERROR, "The specified topic contains illegal characters"),
    "a long name": ({"b": "x" * 128}, b"x", codes.SYSTEM_ERROR, "The specified topic is longer"),
    "a system topic": ({"b": "SCHEDULE_TOPIC_XXXX"}, b"x", codes.NO_PERMISSION, "Sending message to topic[SCHEDULE_TOPIC_XXXX]"),
    "the timer's topic": ({"b": "RMQ_SYS_PYENGINE_TIMER"}, b"x", codes.NO_PERMISSION, "Sending message to topic[RMQ_SYS_PYENGINE_TIMER]"),
    "a system topic's queue": ({"i": "INNER_MULTI_DISPATCH\x01other,RMQ_SYS_TRANS_OP_HALF_TOPIC"}, b"x", codes.NO_PERMISSION,
                               "Sending message to topic[RMQ_SYS_TRANS_OP_HALF_TOPIC]"),
    "a second queue's bad characters": ({"i": "INNER_MULTI_DISPATCH\x01a@b"}, b"x", codes.SYSTEM_ERROR, "illegal characters"),
    "long properties": ({"i": "k\x01" + "v" * 33_000}, b"x", codes.MESSAGE_ILLEGAL, "the message is illegal, maybe msg body"),
    "properties longer than a header was": ({"i": "k\x01" + "v" * 70_000}, b"x", codes.MESSAGE_ILLEGAL, "the message is illegal"),
    "properties of quotes": ({"i": "k\x01" + '"' * 33_000}, b"x", codes.MESSAGE_ILLEGAL, "the message is illegal"),
    "properties of thousands": ({"i": "k\x01v\x02" * 17_000}, b"x", codes.MESSAGE_ILLEGAL, "the message is illegal"),
    "a long body": ({}, b"x" * ((4 << 20) + 1), codes.MESSAGE_ILLEGAL, "the message is illegal, maybe msg body"),
    "no number": ({"e": "x"}, b"x", codes.SYSTEM_ERROR, ""),
    "a commit": ({"f": 8}, b"x", codes.NO_PERMISSION, "a part of a transaction"),
    "a batch of half messages": ({"i": "TRAN_MSG\x01true", "m": "true"}, b"x", codes.MESSAGE_ILLEGAL, "a batch holds no"),
}


@pytest.mark.parametrize("changes, body, code, remark", REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_a_refused_send_has_the_brokers_answer(served, topic, changes, body, code, remark):
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"after which C serves plain sends").code == codes.SUCCESS
    answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic) | changes, body)
    assert answer.code == code and remark in answer.remark
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"the next one").code == codes.SUCCESS


@pytest.mark.parametrize("character", ['"', "\x03"], ids=["quotes", "control"])
def test_a_text_that_is_longer_in_json_than_in_a_message_is_stored(served, topic, character):
    client, properties = served.broker(), "k\x01" + character * 32_650
    for _ in range(2):  # the second one may be taken as a plain send
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, properties), b"quotes").code == codes.SUCCESS
    assert stored(served, topic, 1, 1).properties["k"] == character * 32_650


def test_a_send_to_a_topic_without_write_queues_is_refused_with_that_reason(served, topic):
    path = TopicConfigs(served.root).path  # a broker may have left such an entry; no command makes one
    table = json.loads(path.read_text())
    table["topicConfigTable"][topic]["writeQueueNums"] = 0
    write_config(path, json.dumps(table).encode())
    client = served.broker()
    eventually(lambda: f"the topic {topic} has no queue to write to" in (
        client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, -1), b"x").remark or ""), "the send is refused")


def test_every_status_of_a_put_has_rocketmqs_code(served):
    with pyengine.open_store(served.root) as reader:
        sends = Sends(None, reader, None, ADDRESS, None, None, None)
    expected = {PutStatus.PUT_OK: 0, PutStatus.FLUSH_DISK_TIMEOUT: 10, PutStatus.SLAVE_NOT_AVAILABLE: 11,
                PutStatus.FLUSH_SLAVE_TIMEOUT: 12, PutStatus.MESSAGE_ILLEGAL: 13, PutStatus.PROPERTIES_SIZE_EXCEEDED: 13,
                PutStatus.SERVICE_NOT_AVAILABLE: 14, PutStatus.OS_PAGECACHE_BUSY: 2, PutStatus.CREATE_MAPEDFILE_FAILED: 1,
                PutStatus.UNKNOWN_ERROR: 1, PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED: 1}
    for status in PutStatus:
        is_stored = expected[status] in (0, 10, 11, 12)
        answer = sends._answer(PutResult(status, "ID", 3, 100 if is_stored else -1), 1)
        assert answer.code == expected[status], status
        assert ("msgId" in answer.fields) == is_stored, "a client looks for the id where the message is stored"


def test_many_messages_on_one_connection_are_all_answered_and_in_order(served, topic):
    client = served.broker()
    numbers = [client.send(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"%d" % number) for number in range(300)]
    answers = [client.wait(number) for number in numbers]
    assert [answer.code for answer in answers] == [0] * 300
    assert [int(answer.fields["queueOffset"]) for answer in answers] == list(range(300))


def random_properties(rng):
    names = rng.sample(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "color", "größe", "a", "b" * 30, "INSTANCE_ID", "TRACE_ON", "x y", "Aa", "BB",
                        "MSG_REGION", "PGROUP", *map(str, range(12))], rng.randrange(22))
    values = ["true", "false", "v", "mit Umlaut ü", '"quoted"', "back\\slash", "tab\tand\nline", "\x01inside", "😀", "", "0",
              "w" * rng.randrange(300)]
    pieces = [f"{name}\x01{rng.choice(values)}" for name in names]
    if rng.random() < 0.2:
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(["no mark", "\x01no name", "", "TAGS\x01again", "CLUSTER\x01theirs"]))
    return "\x02".join(pieces) + rng.choice(["", "\x02"])


def test_sends_that_are_taken_without_an_object_are_stored_and_answered_as_all_others(served, topic, rng):
    """A field that no client sends has a message go the common way."""
    client = served.broker()
    client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 0), b"makes the topic known")
    asked = []
    for number in range(150):
        queue_id = rng.randrange(1, 4)
        fields = send_fields(topic, queue_id, random_properties(rng), n="broker-a", h=rng.choice([0, 7, -3, 1 << 30]),
                             f=rng.choice([0, 1, 2, 16, 32, 48]), g=rng.choice([0, 1_700_000_000_000 + number, 10 ** 17]),
                             j=rng.choice([0, 5]))
        body = rng.randbytes(rng.choice([0, 1, 100, 5000]))
        asked += [client.send(codes.SEND_MESSAGE_V2, fields, body), client.send(codes.SEND_MESSAGE_V2, fields | {"z": "1"}, body)]
    answers = [client.wait(number) for number in asked]
    for number in range(0, len(answers), 2):
        plain, other = answers[number], answers[number + 1]
        assert (plain.code, plain.remark, plain.form, plain.version) == (codes.SUCCESS, None, other.form, other.version)
        same = [name for name in other.fields if name not in ("msgId", "queueOffset")]
        assert list(plain.fields) == list(other.fields) and all(plain.fields[name] == other.fields[name] for name in same)
        queue_id = int(plain.fields["queueId"])
        first, second = [stored(served, topic, queue_id, int(each.fields["queueOffset"])) for each in (plain, other)]
        for name in ("body", "raw_properties", "flag", "sys_flag", "born_timestamp_ms", "born_host", "store_host", "reconsume_times",
                     "prepared_transaction_offset", "topic", "queue_id", "body_crc"):
            assert getattr(first, name) == getattr(second, name), name
        assert (first.msg_id, second.msg_id) == (plain.fields["msgId"], other.fields["msgId"])


def test_sends_under_way_when_the_writer_stops_are_answered_when_it_continues(served, topic):
    client = served.broker()
    client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"makes the topic known")
    with held(served, "writer"):
        numbers = [client.send(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"%d" % number) for number in range(100)]
        assert client.is_silent()
    answers = [client.wait(number) for number in numbers]
    assert [(answer.code, int(answer.fields["queueOffset"])) for answer in answers] == [(0, 1 + number) for number in range(100)]


def test_later_sends_of_a_client_to_a_deleted_topic_are_refused(served, topic):
    client = served.broker()
    for _ in range(2):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"known").code == codes.SUCCESS
    assert client.ask(codes.DELETE_TOPIC_IN_BROKER, {"topic": topic}).code == codes.SUCCESS
    refused = eventually(lambda: (answer := client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, c="gone"))).code and answer,
                         "the topic is not there any more")
    assert refused.code == codes.TOPIC_NOT_EXIST


@pytest.fixture
def ready(served, topic):
    """A client whose sends are taken without an object from now on: its topic is known and its gateway has a session."""
    client = served.broker()
    for offset in range(2):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"before").fields["queueOffset"] == str(offset)
    return client


def ask_in_every_way(client, topic):
    """The answers to a send that is taken without an object, one of the common way, and a batch."""
    fields = send_fields(topic, 1)
    return [client.ask(codes.SEND_MESSAGE_V2, fields, b"refused"), client.ask(codes.SEND_MESSAGE_V2, fields | {"z": "1"}, b"refused"),
            client.ask(codes.SEND_BATCH_MESSAGE, send_fields(topic, 1, m="true"), encode_batch([BatchMember(b"refused", 0, "")]))]


def test_while_the_page_cache_is_busy_sends_are_answered_as_busy_and_nothing_is_stored(served, topic, ready):
    with served.engine.memory(writable=True) as memory:
        writer = memory.control.writer
        with held(served, "writer"):  # as if it were caught in a page fault
            native.store(writer, "pass_started_ms", now_ms() - 2 * SMALL["os_page_cache_busy_timeout_ms"])
            try:
                answers = ask_in_every_way(ready, topic)
            finally:
                native.store(writer, "pass_started_ms", 0)
        del writer
    for answer in answers:
        assert (answer.code, answer.remark) == (codes.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while")
        assert "msgId" not in answer.fields
    assert ready.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"after").fields["queueOffset"] == "2"


def test_while_the_disk_is_full_sends_are_refused_with_the_cause_and_nothing_is_stored(served, topic, ready):
    with served.engine.memory(writable=True) as memory:
        with held(served, "cleaner"):  # it would find that there is room, as it does at the end
            native.refuse_puts(memory.control, native.REFUSE_DISK_FULL)
            answers = ask_in_every_way(ready, topic)
        eventually(lambda: native.load(memory.control.state, "refuse_puts") == 0, "the room is seen")
    for answer in answers:
        assert answer.code == codes.SERVICE_NOT_AVAILABLE and "msgId" not in answer.fields
        assert answer.remark.startswith("service not available now.") and "the disk is too full" in answer.remark
    assert ready.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"after").fields["queueOffset"] == "2"


def test_a_send_that_is_not_flushed_in_time_says_so_and_is_stored(tmp_path, topic):
    served = start_served(tmp_path / "store", flush_disk_type="SYNC_FLUSH", sync_flush_timeout_ms=int(scaled_timeout_s(300)),
                          put_timeout_ms=3_600_000)
    try:
        client = served.broker()
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"in time").code == codes.SUCCESS
        with held(served, "flusher"):
            answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"too late")
            offset = decode_message_id(answer.fields["msgId"])[1]
            assert served.engine.positions()["flushed"] <= offset
        eventually(lambda: served.engine.positions()["flushed"] > offset, "the flusher goes on")
        assert (answer.code, answer.fields["queueOffset"]) == (codes.FLUSH_DISK_TIMEOUT, "1")
        message = stored(served, topic, 1, 1)
        assert (message.body, message.msg_id) == (b"too late", answer.fields["msgId"])
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"in time again").code == codes.SUCCESS
    finally:
        served.close()


def test_a_send_to_a_synchronous_master_without_slaves_says_so_and_is_stored(tmp_path, topic):
    served = start_served(tmp_path / "store", broker_role="SYNC_MASTER", ha_allow_plain="127.0.0.1", ha_listen_port=0)
    try:
        client = served.broker()
        for offset in range(2):  # a topic that is made by its first send, and one that is known
            answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"%d" % offset)
            assert (answer.code, answer.fields["queueOffset"]) == (codes.SLAVE_NOT_AVAILABLE, str(offset))
            message = stored(served, topic, 1, offset)
            assert (message.body, message.msg_id) == (b"%d" % offset, answer.fields["msgId"])
        answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, "WAIT\x01false"), b"waits for none")
        assert (answer.code, answer.fields["queueOffset"]) == (codes.SUCCESS, "2")
    finally:
        served.close()


def test_a_store_that_is_stopped_and_started_again_is_served_again(tmp_path):
    served = start_served(tmp_path / "store", gateway_broker_port=free_port(), flush_disk_type="SYNC_FLUSH")
    try:
        client = served.broker()
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"one").code == codes.SUCCESS
        before = served.engine.incarnation("gateway")
        served.engine.kill("gateway")
        assert client.is_closed
        served.engine.wait_back("gateway", before)
        again = eventually(lambda: _connected(served), "the gateway listens again")
        assert again.ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"two").fields["queueOffset"] == "1"
        assert served.engine.stop()
        assert again.is_closed
    finally:
        served.close()


def _connected(served):
    try:
        return served.broker()
    except ConnectionError:
        return None


def test_a_message_does_not_overtake_an_earlier_large_batch_of_its_connection(served, topic):
    batch = encode_batch([BatchMember(b"x" * LARGE_BATCH_BYTES, 0, "")])
    stored_bytes = []

    class Kept:
        """Puts that are counted and never answered."""

        producer = object()

        def submit(self, message, then, members=()):
            stored_bytes.append(len(members[0].body if members else message.body))

    async def whole(sends):
        connection = Connection(Connections(Limits(), lambda host, text: None), sends.handlers)
        connection.address = "127.0.0.1:1"

        def send(code, fields, body):
            texts = {name: str(value) for name, value in fields.items()}
            return sends.send(Request(connection, Frame(code, texts, body, 1), len(body)))

        for _ in range(2):  # nothing is left over for a second time
            coming = [asyncio.create_task(found) for found in (
                send(codes.SEND_BATCH_MESSAGE, send_fields(topic, 1, m="true"), batch),
                send(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"single")) if found is not None]
            await asyncio.gather(*coming)
        assert send(codes.SEND_MESSAGE_V2, send_fields(topic, 1), b"at once") is None

    with pyengine.open_store(served.root) as reader, TurnExecutor(1, "test") as executor:
        known = {topic: TopicConfig(topic, 4, 4)}.get
        names = SimpleNamespace(topic=known, recent_topic=known, recent_topics=dict)
        asyncio.run(whole(Sends(Kept(), reader, names, ADDRESS, executor, None, None)))
    assert stored_bytes == [LARGE_BATCH_BYTES, 6, LARGE_BATCH_BYTES, 6, 7]


# ---- requests and their replies ------------------------------------------------------

REPLIES = "DefaultCluster_REPLY_TOPIC"


def reply_text(client_id):
    return f"CORRELATION_ID\x0117\x02REPLY_TO_CLIENT\x01{client_id}\x02"


def test_a_reply_reaches_the_producer_that_waits_and_is_stored_as_the_broker_stores_it(served):
    asker, replier = served.broker(), served.broker()
    heartbeat(asker, "asker@1", "readers_of_replies")
    sent = replier.send(codes.SEND_REPLY_MESSAGE_V2, send_fields(REPLIES, 0, reply_text("asker@1"), f=1), b"yes")
    pushed = asker.wait_told(codes.PUSH_REPLY_MESSAGE_TO_CLIENT)
    assert (pushed.body, pushed.is_one_way) == (b"yes", False)
    assert pushed.fields["properties"].startswith(reply_text("asker@1") + "PUSH_REPLY_TIME\x01")
    assert pushed.fields.items() >= {
        "producerGroup": "test", "topic": REPLIES, "queueId": "0", "sysFlag": "1", "storeHost": f"127.0.0.1:{served.ports[1]}",
        "bornHost": "%s:%d" % replier.socket.getsockname(), "defaultTopic": "TBW102", "defaultTopicQueueNums": "4"}.items()
    asker.socket.sendall(encode_frame(Frame(codes.SUCCESS, opaque=pushed.opaque, flag=ANSWER)))
    answer = replier.wait(sent)
    assert (answer.code, answer.fields["queueId"]) == (codes.SUCCESS, "0")
    message = stored(served, REPLIES, 0, int(answer.fields["queueOffset"]))
    assert (message.body, message.raw_properties, message.sys_flag) == (b"yes", reply_text("asker@1"), 0)
    assert message.msg_id == answer.fields["msgId"]


@pytest.mark.parametrize("text, remark", [
    ("", "reply message properties[REPLY_TO_CLIENT] is null"),
    (reply_text("gone@1"), "push reply message fail, channel of <gone@1> not found."),
], ids=["to-no-one", "to-one-that-has-gone"])
def test_a_reply_that_reaches_no_producer_is_an_error_with_the_reason(served, text, remark):
    answer = served.broker().ask(codes.SEND_REPLY_MESSAGE_V2, send_fields(REPLIES, 0, text), b"yes")
    assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, remark)


def test_a_reply_whose_producer_refuses_it_or_ends_is_an_error(served):
    asker, replier = served.broker(), served.broker()
    heartbeat(asker, "asker@2", "readers_of_replies")
    names = {"producerGroup": "test", "topic": REPLIES, "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 0, "sysFlag": 0,
             "bornTimestamp": 1, "flag": 0, "properties": reply_text("asker@2")}
    sent = replier.send(codes.SEND_REPLY_MESSAGE, names, b"yes")
    pushed = asker.wait_told(codes.PUSH_REPLY_MESSAGE_TO_CLIENT)
    asker.socket.sendall(encode_frame(Frame(codes.SYSTEM_ERROR, opaque=pushed.opaque, flag=ANSWER)))
    assert replier.wait(sent).code == codes.SYSTEM_ERROR
    sent = replier.send(codes.SEND_REPLY_MESSAGE, names, b"yes")
    asker.wait_told(codes.PUSH_REPLY_MESSAGE_TO_CLIENT)
    asker.close()
    assert replier.wait(sent).remark == "push reply message to asker@2 fail."
