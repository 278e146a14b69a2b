"""Transactions of clients: half messages, their ends, and the question about those that are undecided."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from types import SimpleNamespace

import pytest

import pyengine
from fix_gateway import LocalClient, send_fields, start_served
from pyengine.client.half_messages import real_queue
from pyengine.errors import UsageError
from pyengine.formats.record import decode_record, encode_message_id
from pyengine.gateway import codes
from pyengine.gateway.connections import Connection, Connections, Limits, Request
from pyengine.gateway.names import Address
from pyengine.gateway.sends import END_THREADS, Ends
from pyengine.gateway.wire import ANSWER, Frame, encode_frame

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
ADDRESS = Address("127.0.0.1:1", "broker-a", "DefaultCluster", "127.0.0.1:1")


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A store that asks about transactions soon."""
    store = start_served(tmp_path_factory.mktemp("asking") / "store", transaction_timeout_ms=1, transaction_check_interval_ms=100,
                         gateway_connection_max_bytes=1 << 20)
    yield store
    store.close()


def prepare(client, topic, body, key, group="payers"):
    """A half message; the fields of its end but for the outcome."""
    text = f"TRAN_MSG\x01true\x02PGROUP\x01{group}\x02UNIQ_KEY\x01{key}\x02WAIT\x01true"
    answer = client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 1, text, f=4, g=time.time_ns() // 1_000_000), body)
    assert answer.code == codes.SUCCESS and answer.fields["queueId"] == "1" and answer.fields["transactionId"] == key
    return {"producerGroup": group, "tranStateTableOffset": answer.fields["queueOffset"],
            "commitLogOffset": int(answer.fields["msgId"][16:], 16), "fromTransactionCheck": "false", "msgId": key, "transactionId": key}


def wait_for(served, topic, count):
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, 1, count - 1, timeout_s=60, level="committed")
        return store.get_message(topic, 1, 0, level="committed").messages


def test_a_commit_reaches_consumers_and_a_rollback_does_not(served, topic):
    client = served.broker()
    taken_back = prepare(client, topic, b"taken back", "U1" + topic)
    paid = prepare(client, topic, b"paid", "U2" + topic)
    assert client.ask(codes.END_TRANSACTION, taken_back | {"commitOrRollback": ROLLBACK}).code == codes.SUCCESS
    assert client.ask(codes.END_TRANSACTION, paid | {"commitOrRollback": UNKNOWN}).code == codes.SUCCESS
    assert client.ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 1}).fields == {"offset": "0"}
    assert client.ask(codes.END_TRANSACTION, paid | {"commitOrRollback": COMMIT}).code == codes.SUCCESS
    (message,) = wait_for(served, topic, 1)
    assert (message.body, message.born_host) == (b"paid", "%s:%d" % client.socket.getsockname())
    assert message.prepared_transaction_offset == paid["commitLogOffset"] and message.sys_flag & 12 == COMMIT


def test_an_end_that_comes_twice_changes_nothing_and_another_one_is_refused(served, topic):
    client = served.broker()
    for key, ends in (("U4", (COMMIT, ROLLBACK)), ("U5", (ROLLBACK, COMMIT))):
        fields = prepare(client, topic, key.encode(), key + topic)
        for end in (ends[0], ends[0]):
            assert client.ask(codes.END_TRANSACTION, fields | {"commitOrRollback": end}).code == codes.SUCCESS
        refused = client.ask(codes.END_TRANSACTION, fields | {"commitOrRollback": ends[1]})
        assert refused.code == codes.SYSTEM_ERROR and "the transaction is ended already, by a " in refused.remark
    last = prepare(client, topic, b"last", "U6" + topic)
    assert client.ask(codes.END_TRANSACTION, last | {"commitOrRollback": COMMIT}).code == codes.SUCCESS
    assert [message.body for message in wait_for(served, topic, 2)] == [b"U4", b"last"]


def test_an_end_must_fit_its_half_message(served, topic):
    client = served.broker()
    fields = prepare(client, topic, b"x", "U3" + topic) | {"commitOrRollback": COMMIT}
    for changes, remark in (({"producerGroup": "others"}, "The producer group wrong"),
                            ({"tranStateTableOffset": 10**6}, "The transaction state table offset wrong"),
                            ({"commitLogOffset": 1}, "Find prepared transaction message failed"),
                            ({"commitLogOffset": 10**17}, "Find prepared transaction message failed")):
        answer = client.ask(codes.END_TRANSACTION, fields | changes)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, remark)
    assert client.ask(codes.END_TRANSACTION, fields | {"commitOrRollback": 3}).code == codes.SYSTEM_ERROR
    assert client.ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 1}).fields == {"offset": "0"}


def test_a_producer_is_asked_about_its_undecided_message(asking):
    client = asking.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields("asked"), b"first").code == codes.SUCCESS
    client.ask(codes.HEART_BEAT, body={"clientID": "me", "producerDataSet": [{"groupName": "forgetful"}]})
    prepare(client, "asked", b"undecided", "UNDECIDED", "forgetful")
    told = client.wait_told(codes.CHECK_TRANSACTION_STATE)
    half = decode_record(told.body, 0)
    assert (half.topic, half.queue_id, half.body, told.fields["msgId"]) == ("asked", 1, b"undecided", "UNDECIDED")
    assert half.properties["TRANSACTION_CHECK_TIMES"] == "1" and told.is_one_way
    client.send(codes.END_TRANSACTION, {
        "producerGroup": "forgetful", "tranStateTableOffset": told.fields["tranStateTableOffset"],
        "commitLogOffset": told.fields["commitLogOffset"], "commitOrRollback": COMMIT, "fromTransactionCheck": "true",
        "msgId": "UNDECIDED", "transactionId": "UNDECIDED"}, flag=2)
    assert [message.body for message in wait_for(asking, "asked", 1)] == [b"undecided"]


def test_each_producer_of_a_group_is_asked_in_turn(asking):
    """One that was there first and does not know keeps no other from being asked."""
    clients = [asking.broker(), asking.broker()]
    assert clients[0].ask(codes.SEND_MESSAGE_V2, send_fields("asked"), b"first").code == codes.SUCCESS
    for number, client in enumerate(clients):
        client.ask(codes.HEART_BEAT, body={"clientID": f"sharer {number}", "producerDataSet": [{"groupName": "sharers"}]})
    prepare(clients[0], "asked", b"undecided", "SHARED", "sharers")
    for client in clients:
        assert client.wait_told(codes.CHECK_TRANSACTION_STATE).fields["msgId"] == "SHARED"


def test_a_producer_that_reads_is_asked_about_more_than_may_wait_for_it(asking):
    """At once it would not read that much in time, and lose its connection, at each try."""
    sender, producer = asking.broker(), asking.broker()
    producer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    assert sender.ask(codes.SEND_MESSAGE_V2, send_fields("asked"), b"first").code == codes.SUCCESS
    keys = {f"LARGE{number}" for number in range(20)}  # 10 MB
    for key in keys:
        prepare(sender, "asked", bytes(500_000), key, "large")
    producer.ask(codes.HEART_BEAT, body={"clientID": "me", "producerDataSet": [{"groupName": "large"}]})
    while keys:
        keys.discard(producer.wait_told(codes.CHECK_TRANSACTION_STATE).fields["msgId"])
    producer.ask(codes.UNREGISTER_CLIENT, {"clientID": "me", "producerGroup": "large"})


def test_a_worker_is_asked_the_next_question_once_its_client_has_taken_the_last(asking):
    sender = asking.broker()
    assert sender.ask(codes.SEND_MESSAGE_V2, send_fields("asked"), b"first").code == codes.SUCCESS
    for key in ("FIRST", "SECOND"):
        prepare(sender, "asked", b"undecided", key, "local")
    with LocalClient(asking.root, "10.0.0.7:1") as worker:
        worker.ask(codes.HEART_BEAT, body={"clientID": "me", "producerDataSet": [{"groupName": "local"}]})
        asked = worker.wait_told(codes.CHECK_TRANSACTION_STATE)
        worker.ask(codes.GET_MAX_OFFSET, {"topic": "asked", "queueId": 1})
        assert not worker.told
        worker.socket.sendall(encode_frame(Frame(codes.SUCCESS, opaque=asked.opaque, flag=ANSWER)))
        assert {asked.fields["msgId"], worker.wait_told(codes.CHECK_TRANSACTION_STATE).fields["msgId"]} == {"FIRST", "SECOND"}


def test_a_half_message_that_was_put_aside_is_asked_about_again(tmp_path):
    served = start_served(tmp_path / "store", transaction_timeout_ms=1, transaction_check_interval_ms=100, transaction_check_max=1)
    try:
        client = served.broker()
        client.ask(codes.SEND_MESSAGE_V2, send_fields("asked"), b"first")
        client.ask(codes.HEART_BEAT, body={"clientID": "me", "producerDataSet": [{"groupName": "forgetful"}]})
        half = prepare(client, "asked", b"undecided", "ASIDE", "forgetful")
        client.wait_told(codes.CHECK_TRANSACTION_STATE)
        with pyengine.open_store(served.root) as store:
            assert store.wait_for_message("TRANS_CHECK_MAX_TIME_TOPIC", 0, 0, timeout_s=60, level="committed")
            (aside,) = store.get_message("TRANS_CHECK_MAX_TIME_TOPIC", 0, 0, level="committed").messages
        assert client.is_silent()
        half_id = encode_message_id("127.0.0.1:10911", half["commitLogOffset"])
        for msg_id, why in ((half_id, "no message of TRANS_CHECK_MAX_TIME_TOPIC begins at"), ("UNIQUE", "is not a message id"),
                            (encode_message_id("127.0.0.1:10911", 1 << 60), "no message of TRANS_CHECK_MAX_TIME_TOPIC begins at")):
            answer = client.ask(codes.RESUME_CHECK_HALF_MESSAGE, {"msgId": msg_id})
            assert answer.code == codes.SYSTEM_ERROR and why in answer.remark
            assert answer.remark.startswith("Put message back to RMQ_SYS_TRANS_HALF_TOPIC failed.")
        assert client.ask(codes.RESUME_CHECK_HALF_MESSAGE, {"msgId": aside.msg_id}).code == codes.SUCCESS
        told = client.wait_told(codes.CHECK_TRANSACTION_STATE)
        asked = decode_record(told.body, 0)
        assert (asked.topic, asked.queue_id, asked.body) == ("asked", 1, b"undecided")
        assert asked.properties["TRANSACTION_CHECK_TIMES"] == "1", "it is counted from the first try on"
        client.send(codes.END_TRANSACTION, {
            "producerGroup": "forgetful", "tranStateTableOffset": told.fields["tranStateTableOffset"],
            "commitLogOffset": told.fields["commitLogOffset"], "commitOrRollback": COMMIT, "fromTransactionCheck": "true",
            "msgId": "ASIDE", "transactionId": "ASIDE"}, flag=2)
        assert [message.body for message in wait_for(served, "asked", 1)] == [b"undecided"]
    finally:
        served.close()


def clients_of(*access_keys):
    """The clients of a producer group, by connections without sockets."""
    found = {Connection(Connections(Limits(), print), {}): SimpleNamespace(access_key=key) for key in access_keys}
    for connection in found:
        connection.is_closed = False
    return found


def test_a_half_message_that_cannot_be_asked_about_keeps_no_other_from_it(served, monkeypatch):
    asked, clients = [], clients_of("one", "two")
    halves = [SimpleNamespace(body=body, msg_id=body, physical_offset=at, properties={"PGROUP": "g", "TRANSACTION_CHECK_TIMES": times})
              for at, (body, times) in enumerate([("bad", "2"), ("gone", "3"), ("good", "4"), ("gone", "5"), ("gone", "6"), ("good", "8")])]

    async def ask(producer, half):
        if half.body == "bad":
            real_queue(half)
        if half.body == "gone":
            raise ConnectionError(half.body)
        asked.append(half.body)

    with pyengine.open_store(served.root) as reader:
        ends = Ends(None, reader, None, ADDRESS)
        ends._members = SimpleNamespace(producers={"g": clients})
        ends._check = SimpleNamespace(round=lambda can_ask, again_after_ms: list(filter(can_ask, halves)), not_asked={100})
        monkeypatch.setattr(ends, "_ask", ask)
        with pytest.raises(UsageError, match="bad names no topic"):
            asyncio.run(ends.ask_for_ends())
        ends.close()
    assert asked == ["good"]
    assert ends._check.not_asked == {4, 5}, "a producer that takes none has one try less"


def test_the_rights_of_producers_are_looked_up_once_in_a_round_and_not_in_the_loop(served, monkeypatch):
    """Otherwise a group of many producers, which any client may name, delays all others for each undecided message."""
    looked, asked = [], []
    names = [f"key {number}" for number in range(4)]
    clients = clients_of(*names)
    halves = [SimpleNamespace(properties={"PGROUP": group, "REAL_TOPIC": "T", "REAL_QID": "0", "TRANSACTION_CHECK_TIMES": str(times)})
              for times in range(6) for group in ("g", "gone")]

    def topic_fault(key, host, code, topic, right):
        looked.append((threading.current_thread(), key, topic))
        return "" if key in names[1:3] else "No default permission"

    async def ask(producer, half):
        asked.append(clients[producer].access_key)

    with pyengine.open_store(served.root) as reader:
        ends = Ends(None, reader, SimpleNamespace(producers={"g": clients}), ADDRESS,
                    topic_fault)
        ends._check = SimpleNamespace(round=lambda can_ask, again_after_ms: list(filter(can_ask, halves)), not_asked=set())
        monkeypatch.setattr(ends, "_ask", ask)
        asyncio.run(ends.ask_for_ends())
        ends.close()
    assert sorted(asked) == names[1:2] * 3 + names[2:3] * 3
    assert [row[1:] for row in looked] == [(name, "T") for name in names]
    assert threading.current_thread() not in {row[0] for row in looked}


@pytest.mark.parametrize("code", [codes.END_TRANSACTION, codes.RECALL_MESSAGE])
def test_ends_and_recalls_beyond_the_log_hold_up_no_thread(served, monkeypatch, code):
    monkeypatch.setattr("pyengine.gateway.sends.COMMITTED_WAIT_S", 600)
    connection = Connection(Connections(Limits(), lambda host, text: None), {})

    def asked(ends, offset, number=0):
        handle = f"v1 T broker-a 1 KEY {encode_message_id('127.0.0.1:10911', offset)}"
        fields = {"producerGroup": "p", "tranStateTableOffset": "0", "commitLogOffset": str(offset), "commitOrRollback": str(COMMIT),
                  "topic": "T", "recallHandle": base64.urlsafe_b64encode(handle.encode()).decode()}
        return ends.handlers[code](Request(connection, Frame(code, fields, b"", number), 0))

    async def whole(ends, offset):
        waiting = [asyncio.create_task(asked(ends, offset, number)) for number in range(3 * END_THREADS)]
        done, _ = await asyncio.wait(waiting, timeout=0)
        async with asyncio.timeout(60):
            for _ in range(END_THREADS):
                await asyncio.get_running_loop().run_in_executor(ends._executor, int)
                await asyncio.get_running_loop().run_in_executor(ends._recalls, int)
            assert (await asked(ends, 1 << 62)).code in (codes.SYSTEM_ERROR, codes.INVALID_PARAMETER), "so far off it is none to come"
        assert not done and not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()

    with pyengine.open_store(served.root) as reader:
        ends = Ends(None, reader, None, ADDRESS)
        asyncio.run(whole(ends, reader.max_physical_offset("committed") + (1 << 20)))
        ends.close()
