"""The classes made from rocketmq_v2.textproto are those of RocketMQ's own client, field by field."""

from __future__ import annotations

import hashlib
import time

import pytest

from grpc_caller import V2, message
from pyengine.formats.record import Message, decode_properties
from pyengine.gateway.grpc_messages import CallRefusedError, Translator, transaction_fields, transaction_id

LITE = {"OffsetOption", "SyncLiteSubscriptionRequest", "SyncLiteSubscriptionResponse", "LiteSubscriptionAction", "SyncLiteSubscription"}
TRANSLATOR = Translator(V2, "broker-a", 4096)


def fields_of(descriptor) -> set[tuple]:
    """What decides how a message is encoded and used: name, number, kind, repetition, presence, oneof."""
    return {(field.name, field.number, field.type, field.is_repeated, field.has_presence,
             field.containing_oneof.name if field.containing_oneof else None,
             (field.message_type or field.enum_type).full_name if field.message_type or field.enum_type else None)
            for field in descriptor.fields}


@pytest.fixture(scope="module")
def theirs():
    """What the client's modules define, by kind; without consumers of light topics, which are not served."""
    from rocketmq.grpc_protocol import definition_pb2, service_pb2

    files = [definition_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR]
    return {kind: {name: each for file in files for name, each in getattr(file, f"{kind}_by_name").items() if name not in LITE}
            for kind in ("message_types", "enum_types", "services")}


def test_each_message_has_the_fields_of_the_client(theirs):
    assert {name: fields_of(each) for name, each in V2.descriptor.message_types_by_name.items()} == {
        name: fields_of(each) for name, each in theirs["message_types"].items()}


def test_each_enum_has_the_values_of_the_client(theirs):
    assert {name: {value.name: value.number for value in each.values} for name, each in V2.descriptor.enum_types_by_name.items()} == {
        name: {value.name: value.number for value in each.values} for name, each in theirs["enum_types"].items()}


def test_the_service_has_the_methods_of_the_client(theirs):
    service = theirs["services"]["MessagingService"]
    assert V2.service == service.full_name
    ours, of_client = ({each.name: (each.input_type.full_name, each.output_type.full_name, each.client_streaming, each.server_streaming)
                        for each in methods if each.name not in LITE} for methods in (V2.methods.values(), service.methods))
    assert ours == of_client


def test_the_client_reads_a_message_and_writes_the_same(theirs):
    from google.protobuf import message_factory

    sent = message("orders", b"body", tag="paid", keys=["a", "b"], user_properties={"n": "1", "ä": "ü"}, message_group="g")
    sent.system_properties.born_timestamp.seconds = 1_700_000_000
    read = message_factory.GetMessageClass(theirs["message_types"]["Message"]).FromString(sent.SerializeToString())
    assert read.user_properties == {"n": "1", "ä": "ü"} and read.system_properties.message_group == "g"
    assert V2.Message.FromString(read.SerializeToString()) == sent


# ---- what is sent ----------------------------------------------------------------------


@pytest.mark.parametrize("code, fields", [
    ("MESSAGE_BODY_EMPTY", {"body": b""}),
    ("MESSAGE_BODY_TOO_LARGE", {"body": b"x" * 4097}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"user_properties": {"KEYS": "x"}}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"user_properties": {"TIMER_DELIVER_MS": "1"}}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"user_properties": {"POP_CK": "x"}}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"user_properties": {"a\x01": "x"}}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"user_properties": {"a": "x\x02"}}),
    ("ILLEGAL_MESSAGE_ID", {"message_id": " "}),
    ("ILLEGAL_MESSAGE_TAG", {"tag": "a|b"}),
    ("ILLEGAL_MESSAGE_TAG", {"tag": " "}),
    ("ILLEGAL_MESSAGE_KEY", {"keys": ["a", " "]}),
    ("ILLEGAL_MESSAGE_GROUP", {"message_group": " "}),
    ("ILLEGAL_MESSAGE_GROUP", {"message_group": "ü" * 32}),
    ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", {"message_group": "g", "message_type": V2.TRANSACTION}),
    ("MESSAGE_CORRUPTED", {"body_digest": V2.Digest(type=V2.MD5, checksum="00")}),
    ("BAD_REQUEST", {"body_digest": V2.Digest(type=9, checksum="00")}),
])
def test_a_wrong_message_is_refused_with_rocketmq_s_code(code, fields):
    with pytest.raises(CallRefusedError) as refused:
        TRANSLATOR.send_fields(message("orders", **{"body": b"body", **fields}), "orders", 0)
    assert refused.value.code == code


def test_an_empty_tag_key_or_message_group_is_none():
    sent = message("orders", b"body", message_id="ID", tag="", keys=["", "a"], message_group="")
    assert decode_properties(TRANSLATOR.send_fields(sent, "orders", 0)["i"]) == {"UNIQ_KEY": "ID", "KEYS": "a"}
    assert TRANSLATOR.type_of_sent(sent.system_properties) == "NORMAL"


def test_a_time_more_than_forty_days_ahead_is_refused():
    sent = message("orders", b"body", message_type=V2.DELAY)
    sent.system_properties.delivery_timestamp.seconds = 1 << 40
    with pytest.raises(CallRefusedError) as refused:
        TRANSLATOR.send_fields(sent, "orders", 0)
    assert refused.value.code == "ILLEGAL_DELIVERY_TIME"


@pytest.mark.parametrize("kind, checksum", [
    (V2.MD5, hashlib.md5(b"x31").hexdigest()), (V2.SHA1, hashlib.sha1(b"x31").hexdigest().upper()),
    (V2.CRC32, "1685F0"), (V2.CRC32, "001685F0"), (V2.CRC32, "1476080")])
def test_a_right_digest_is_taken_in_the_form_of_each_client(kind, checksum):
    assert TRANSLATOR.send_fields(message("orders", b"x31", body_digest=V2.Digest(type=kind, checksum=checksum)), "orders", 3)["e"] == "3"


def test_a_message_becomes_a_send_with_the_client_s_properties():
    sent = message("orders", b"body", message_id="ID", tag="paid", keys=["a", "b"], user_properties={"n": "1"}, body_encoding=V2.GZIP,
                   message_type=V2.TRANSACTION)
    sent.system_properties.orphaned_transaction_recovery_duration.seconds = 30
    fields = TRANSLATOR.send_fields(sent, "orders", 2)
    assert (fields["a"], fields["b"], fields["e"], fields["f"]) == ("orders", "orders", "2", "5")
    assert decode_properties(fields["i"]) == {"n": "1", "UNIQ_KEY": "ID", "TAGS": "paid", "KEYS": "a b", "TRAN_MSG": "true",
                                              "PGROUP": "orders", "CHECK_IMMUNITY_TIME_IN_SECONDS": "30"}


@pytest.mark.parametrize("born_s", [0, -5, 1 << 40, 1 << 62])
def test_a_born_time_that_is_none_is_now(born_s):
    sent = message("orders", b"body")
    sent.system_properties.born_timestamp.seconds = born_s
    before_ms = time.time_ns() // 1_000_000
    assert before_ms <= int(TRANSLATOR.send_fields(sent, "orders", 0)["g"]) <= time.time_ns() // 1_000_000


def test_of_a_send_only_the_bodies_are_not_counted():
    sent = V2.SendMessageRequest(messages=[V2.Message(body=bytes(2 << 20), topic=V2.Resource(name="t"))] * 3).SerializeToString()
    assert V2.bytes_beside_bodies(sent) < 300
    sent = V2.SendMessageRequest(messages=[V2.Message(user_properties={"n": "x" * 1000})]).SerializeToString()
    assert 1000 < V2.bytes_beside_bodies(sent) < 1200
    assert V2.bytes_beside_bodies(b"") == 0


@pytest.mark.parametrize("begin", [
    b"", b"\x0a\x04\x22\xff\xff\x7f", b"\x0b\x0a\x04\x22\xff\xff\x7f\x0c", b"\x0a\x06\x0a\x04\x22\xff\xff\x7f", b"\x09",
    b"\xff" * 20, b"\x22\xff\xff\x7f"], ids=["no", "beyond-its-message", "in-a-group", "in-a-topic", "fixed", "endless", "outside"])
def test_no_body_that_is_none_hides_the_parts_of_a_send(begin):
    assert V2.bytes_beside_bodies(begin + b"\x0a\x00" * 1_000_000) > 1 << 20


# ---- what is received ------------------------------------------------------------------


def record(body: bytes = b"body", properties: str = "", **fields) -> Message:
    return Message("orders", body, 1, 7, 4711, 100, properties, **fields)


def test_a_record_becomes_a_message_with_an_md5_digest_in_capitals():
    found = TRANSLATOR.received(record(properties="n\x011\x02KEYS\x01a b\x02TAGS\x01t\x02UNIQ_KEY\x01ID\x02CLUSTER\x01c",
                                       born_timestamp_ms=1500, store_timestamp_ms=2250, born_host="10.0.0.7:99"),
                                V2.Resource(name="orders"), handle="H", attempt=3)
    system = found.system_properties
    assert (found.topic.name, found.body, dict(found.user_properties)) == ("orders", b"body", {"n": "1"})
    assert system.body_digest == V2.Digest(type=V2.MD5, checksum=hashlib.md5(b"body").hexdigest().upper())
    assert (system.message_id, system.tag, list(system.keys), system.receipt_handle) == ("ID", "t", ["a", "b"], "H")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt, system.message_type) == (1, 7, 3, V2.NORMAL)
    assert (system.born_timestamp.seconds, system.born_timestamp.nanos, system.store_timestamp.nanos) == (1, 500_000_000, 250_000_000)
    assert system.born_host == "10.0.0.7" and system.body_encoding == V2.IDENTITY


def test_a_compressed_body_is_sent_as_clients_of_rocketmq_5_read_it():
    import gzip
    import zlib

    of_4_9 = TRANSLATOR.received(record(zlib.compress(b"body"), sys_flag=1), V2.Resource(name="orders"))
    of_5 = TRANSLATOR.received(record(gzip.compress(b"body"), sys_flag=1), V2.Resource(name="orders"))
    assert (of_4_9.body, of_4_9.system_properties.body_encoding) == (b"body", V2.IDENTITY)
    assert (gzip.decompress(of_5.body), of_5.system_properties.body_encoding) == (b"body", V2.GZIP)


@pytest.mark.parametrize("size_bytes, is_plain", [(4 << 20, True), ((4 << 20) + 1, False)])
def test_a_body_that_grows_beyond_those_of_4_9_stays_compressed(size_bytes, is_plain):
    """Of a few kilobytes, hundreds of megabytes could come."""
    import zlib

    stored = zlib.compress(bytes(size_bytes))
    found = TRANSLATOR.received(record(stored, sys_flag=1), V2.Resource(name="orders"))
    assert found.system_properties.body_encoding == (V2.IDENTITY if is_plain else V2.GZIP)
    assert found.body == (bytes(size_bytes) if is_plain else stored)
    assert found.system_properties.body_digest.checksum == hashlib.md5(found.body).hexdigest().upper()


@pytest.mark.parametrize("properties, kind", [
    ("__SHARDINGKEY\x01g", V2.FIFO), ("TIMER_DELIVER_MS\x011700000000000", V2.DELAY), ("TRAN_MSG\x01true", V2.TRANSACTION)])
def test_a_message_keeps_its_type(properties, kind):
    assert TRANSLATOR.received(record(properties=properties), V2.Resource(name="orders")).system_properties.message_type == kind


def test_a_handle_has_rocketmq_s_words_and_the_place_in_the_log():
    popped = {"popTime": "17", "invisibleTime": "60000", "reviveQid": "1"}
    assert TRANSLATOR.handle(record(), popped) == "7 17 60000 1 0 broker-a 1 7 4711"
    again = Message("%RETRY%g", b"body", 0, 3, 9000, 100)
    assert TRANSLATOR.handle(again, popped) == "3 17 60000 1 1 broker-a 0 3 9000"


def test_a_transaction_s_id_says_where_its_half_message_is():
    assert transaction_fields(transaction_id("7F00000100002A9F00000000000BEEF0", "17")) == {
        "commitLogOffset": str(0xBEEF0), "tranStateTableOffset": "17"}
    for text in ("", "x-1", "1", "1-2-3", "F" * 20 + "-1"):
        with pytest.raises(CallRefusedError):
            transaction_fields(text)
