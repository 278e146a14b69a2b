"""RocketMQ 5's messages (`apache.rocketmq.v2`): their classes, and what a message is in a 4.9 store.

The classes are made from rocketmq_v2.textproto when the gRPC worker starts. No module is generated: generated ones fit one range of
protobuf's versions, and their names collide with those of RocketMQ's own client in a program that has both.
tests/gateway/test_grpc_messages.py compares the classes with that client's descriptors.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, text_format, timestamp_pb2

from pyengine.errors import FormatError
from pyengine.formats import constants
from pyengine.formats.delayed_message import DELIVER_AT_DAYS_MAX, TIMER_PROPERTIES
from pyengine.formats.record import Message, decode_message_id, decompress_body, encode_properties, split_keys

_PROTO = Path(__file__).with_name("rocketmq_v2.textproto")
REQUEST_BYTES_MAX = 1 << 20  # beside the bodies of messages
FIELD_BYTES = 16            # about: what each field of a request takes beside its bytes
BODY_BYTES_OF_4_9 = 4 << 20  # beyond which its clients take none, before they compress it, unless they are set otherwise
GROUP_BYTES_MAX = 63        # of a message group, as in RocketMQ
ID_CHARS_MAX = 256          # of a message id: clients' have 34
SECONDS_MAX = 253_402_300_799  # of a timestamp: the end of 9999
HOST_CHARS_MAX = 255        # of what a client says of its host
_PROPERTY_BORN_HOST = "__BORNHOST"
_PROPERTY_TRACE = "TRACE_CONTEXT"
_RESERVED = constants.INTERNAL_PROPERTY_NAMES | constants.RESERVED_PROPERTY_NAMES | {  # of a client's properties, as of RocketMQ 5
    *TIMER_PROPERTIES, constants.PROPERTY_TIMER_OUT_MS, constants.PROPERTY_FIRST_POP_TIME, _PROPERTY_BORN_HOST,
    *"POP_CK POP_CK_OFFSET DUP_INFO EXTEND_UNIQ_INFO BORN_TIMESTAMP __CRC32# DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID"
     " TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL".split()}
_NOT_SENT = _RESERVED | {_PROPERTY_TRACE}
_SEPARATORS = re.compile("[\0\1\2]")
_GZIP = b"\x1f\x8b"


class CallRefusedError(Exception):
    """A request is refused; `code` is the name of RocketMQ's code, the text says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Schema:
    """The package: `v2.Status` is the class of a message, `v2.TOPIC_NOT_FOUND` the number of a value, `v2.methods` has the service's
    methods as protobuf describes them, by their names."""

    def __init__(self) -> None:
        file = text_format.Parse(_PROTO.read_text(encoding="ascii"), descriptor_pb2.FileDescriptorProto())
        pool = descriptor_pool.DescriptorPool()
        for known in (duration_pb2.DESCRIPTOR, timestamp_pb2.DESCRIPTOR):
            pool.AddSerializedFile(known.serialized_pb)
        pool.AddSerializedFile(file.SerializeToString())
        self.descriptor = pool.FindFileByName(file.name)
        for name, message in self.descriptor.message_types_by_name.items():
            setattr(self, name, message_factory.GetMessageClass(message))
        for enum in self.descriptor.enum_types_by_name.values():
            for value in enum.values:
                setattr(self, value.name, value.number)
        service, = self.descriptor.services_by_name.values()
        self.service: str = service.full_name
        self.methods = service.methods_by_name
        self._messages_tag, self._body_tag = (  # of their fields
            getattr(self, kind).DESCRIPTOR.fields_by_name[name].number << 3 | 2
            for kind, name in (("SendMessageRequest", "messages"), ("Message", "body")))

    def bytes_beside_bodies(self, sent: bytes) -> int:
        """Return about how much an encoded SendMessageRequest has beside bodies; no more than REQUEST_BYTES_MAX is looked at.

        To parse millions of tiny fields takes long, and much memory; of a map, even minutes.
        """
        at = end = found = 0  # end: of a message
        try:
            while at < len(sent) and found <= REQUEST_BYTES_MAX:
                begin, is_inside = at, at < end
                tag, at = _number(sent, at)
                if tag & 7 == 2:
                    size, at = _number(sent, at)
                    if not is_inside and tag == self._messages_tag:
                        end = at + size
                    elif is_inside and tag == self._body_tag:
                        begin = at = at + size
                    else:
                        at += size
                elif tag & 7 == 0:
                    at = _number(sent, at)[1]
                else:  # of no field that it has
                    return len(sent)
                if is_inside and at > end:
                    return len(sent)
                found += at - begin + FIELD_BYTES
        except IndexError:
            return len(sent)
        return found

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"apache.rocketmq.v2 has no {name}")


def _number(sent: bytes, at: int) -> tuple[int, int]:
    """Return a number of an encoded message, and where it ends; IndexError."""
    found = 0
    for shift in range(0, 70, 7):
        found |= (sent[at] & 0x7F) << shift
        at += 1
        if sent[at - 1] < 0x80:
            return found, at
    raise IndexError


# ---- a message that is sent ----------------------------------------------------------


class Translator:
    """Translates messages between RocketMQ 5's form and the remoting protocol's."""

    def __init__(self, v2: Schema, broker_name: str, body_bytes_max: int) -> None:
        self._v2 = v2
        self._broker_name = broker_name
        self._body_bytes_max = body_bytes_max

    def send_fields(self, message: Any, topic: str, queue_id: int) -> dict[str, str]:
        """Return the header of a send (310) of this message; CallRefusedError."""
        system = message.system_properties
        self._check_body(message)
        sys_flag = constants.SYS_FLAG_COMPRESSED if system.body_encoding == self._v2.GZIP else 0
        properties = self._properties_of(message)
        if (size := sum(map(len, properties.values()))) > constants.PROPERTIES_BYTES_MAX:
            raise CallRefusedError("MESSAGE_PROPERTIES_TOO_LARGE", f"properties of {size} characters: at most "
                                                               f"{constants.PROPERTIES_BYTES_MAX} bytes are possible")
        if system.message_type == self._v2.TRANSACTION:
            sys_flag |= constants.SYS_FLAG_TRANSACTION_PREPARED
            properties |= {constants.PROPERTY_TRANSACTION_PREPARED: "true", constants.PROPERTY_PRODUCER_GROUP: topic}
            if system.HasField("orphaned_transaction_recovery_duration"):
                properties[constants.PROPERTY_CHECK_IMMUNITY_TIME] = str(system.orphaned_transaction_recovery_duration.seconds)
        born_ms = time_ms(system.born_timestamp) if 0 < system.born_timestamp.seconds <= SECONDS_MAX else time.time_ns() // 1_000_000
        return {"a": topic, "b": topic, "d": "4", "e": str(queue_id), "f": str(sys_flag), "g": str(born_ms), "h": "0",
                "i": encode_properties(properties), "j": "0", "k": "false", "m": "false"}

    def type_of_sent(self, system: Any) -> str:
        """Return the name of the type of a message that is sent, by what it has."""
        if system.message_type == self._v2.TRANSACTION:
            return "TRANSACTION"
        return "DELAY" if system.HasField("delivery_timestamp") else "FIFO" if system.message_group else "NORMAL"

    def _check_body(self, message: Any) -> None:
        body, digest = message.body, message.system_properties.body_digest
        if not body:
            raise CallRefusedError("MESSAGE_BODY_EMPTY", "the body is empty: RocketMQ stores no message without one")
        if len(body) > self._body_bytes_max:
            raise CallRefusedError("MESSAGE_BODY_TOO_LARGE", f"a body of {len(body)} bytes: at most {self._body_bytes_max} "
                                                         "(max_message_size_bytes)")
        if digest.checksum and digest.checksum.upper() not in self._digests(digest.type, body):
            raise CallRefusedError("MESSAGE_CORRUPTED", f"the body's digest is not {digest.checksum[:40]}: it was damaged on its way")

    def _digests(self, kind: int, body: bytes) -> tuple[str, ...]:
        """Return the right digests of this kind: clients write a CRC32 in different forms."""
        if kind == self._v2.CRC32:
            crc = zlib.crc32(body)
            return f"{crc:X}", f"{crc:08X}", str(crc)
        if kind not in (self._v2.MD5, self._v2.SHA1):
            raise CallRefusedError("BAD_REQUEST", f"the kind of digest {kind} is not known")
        return (hashlib.new("md5" if kind == self._v2.MD5 else "sha1", body, usedforsecurity=False).hexdigest().upper(),)

    def _properties_of(self, message: Any) -> dict[str, str]:
        system, kind = message.system_properties, message.system_properties.message_type
        properties = dict(message.user_properties)
        for name, value in properties.items():
            if name in _RESERVED:
                raise CallRefusedError("ILLEGAL_MESSAGE_PROPERTY_KEY", f"the property {name} is RocketMQ's own: take another name")
            if not name or _SEPARATORS.search(name) or _SEPARATORS.search(value):
                raise CallRefusedError("ILLEGAL_MESSAGE_PROPERTY_KEY", f"the property {name!r} is empty, or has a byte 0, 1 or 2")
        if not system.message_id.strip() or len(system.message_id) > ID_CHARS_MAX or _SEPARATORS.search(system.message_id):
            raise CallRefusedError("ILLEGAL_MESSAGE_ID", f"a message id has 1 to {ID_CHARS_MAX} characters")
        properties[constants.PROPERTY_UNIQ_KEY] = system.message_id
        if system.tag:  # an empty one is none, as for RocketMQ's proxy
            if not system.tag.strip() or "|" in system.tag or _SEPARATORS.search(system.tag):
                raise CallRefusedError("ILLEGAL_MESSAGE_TAG", "a tag is not blank and has no | and no byte 0, 1 or 2")
            properties[constants.PROPERTY_TAGS] = system.tag
        if keys := [key for key in system.keys if key]:
            if any(not key.strip() or _SEPARATORS.search(key) for key in keys):
                raise CallRefusedError("ILLEGAL_MESSAGE_KEY", "a key is not blank and has no byte 0, 1 or 2")
            properties[constants.PROPERTY_KEYS] = constants.KEY_SEPARATOR.join(keys)
        if system.born_host and len(system.born_host) <= HOST_CHARS_MAX and not _SEPARATORS.search(system.born_host):
            properties[_PROPERTY_BORN_HOST] = system.born_host
        if system.HasField("trace_context") and not _SEPARATORS.search(system.trace_context):
            properties[_PROPERTY_TRACE] = system.trace_context
        if sum((bool(system.message_group), system.HasField("delivery_timestamp"), kind == self._v2.TRANSACTION)) > 1:
            raise CallRefusedError("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE",
                               "a message has a message group, or a delivery time, or belongs to a transaction")
        if system.message_group:
            group = system.message_group
            if not group.strip() or len(group.encode()) > GROUP_BYTES_MAX or _SEPARATORS.search(group):
                raise CallRefusedError("ILLEGAL_MESSAGE_GROUP", f"a message group has at most {GROUP_BYTES_MAX} bytes and is not blank")
            properties[constants.PROPERTY_SHARDING_KEY] = system.message_group
        if system.HasField("delivery_timestamp"):
            deliver_ms = time_ms(system.delivery_timestamp)
            if deliver_ms - time.time_ns() // 1_000_000 > DELIVER_AT_DAYS_MAX * 86_400_000:
                raise CallRefusedError("ILLEGAL_DELIVERY_TIME", f"a delivery time is at most {DELIVER_AT_DAYS_MAX} days ahead")
            properties[constants.PROPERTY_TIMER_DELIVER_MS] = str(deliver_ms)
        return properties

    # ---- a message that is received ---------------------------------------------------

    def body_of(self, record: Message) -> tuple[bytes, int]:
        """Return a record's body as RocketMQ 5's clients read it, and its encoding. One that is compressed takes some time."""
        if not record.sys_flag & constants.SYS_FLAG_COMPRESSED:
            return record.body, self._v2.IDENTITY
        if not record.body.startswith(_GZIP):  # by a client of 4.9 or Python, in zlib's format, which Node's does not read
            with contextlib.suppress(FormatError):
                return decompress_body(record.body, record.sys_flag, most_bytes=max(self._body_bytes_max, BODY_BYTES_OF_4_9)), \
                    self._v2.IDENTITY
        return record.body, self._v2.GZIP

    def received(self, record: Message, topic: Any, *, found: tuple[bytes, int] | None = None, handle: str = "", attempt: int = 1) -> Any:
        """Return RocketMQ 5's form of a record, of this topic (a Resource); `found` is what body_of() has returned, if it has."""
        v2, properties = self._v2, record.properties
        message = v2.Message(topic=topic)
        system = message.system_properties
        body, encoding = found or self.body_of(record)
        message.body = body
        system.body_encoding = encoding
        # MD5: clients disagree about how a CRC32 is written, and discard one message of 16.
        system.body_digest.type = v2.MD5
        system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
        for name, value in properties.items():
            if name not in _NOT_SENT:
                message.user_properties[name] = value
        system.message_id = record.uniq_key or record.msg_id
        system.message_type = self._type_of(properties)
        set_time(system.born_timestamp, record.born_timestamp_ms)
        set_time(system.store_timestamp, record.store_timestamp_ms)
        system.born_host = properties.get(_PROPERTY_BORN_HOST) or record.born_host.rpartition(":")[0]
        system.store_host = record.store_host
        system.queue_id, system.queue_offset, system.delivery_attempt = record.queue_id, record.queue_offset, attempt
        if record.tags:
            system.tag = record.tags
        system.keys.extend(split_keys(record.keys))
        if handle:
            system.receipt_handle = handle
        if group := properties.get(constants.PROPERTY_SHARDING_KEY):
            system.message_group = group
        if trace := properties.get(_PROPERTY_TRACE):
            system.trace_context = trace
        deliver_at = properties.get(constants.PROPERTY_TIMER_DELIVER_MS) or properties.get(constants.PROPERTY_TIMER_OUT_MS) or ""
        if deliver_at.isascii() and deliver_at.isdecimal() and len(deliver_at) < 16:
            set_time(system.delivery_timestamp, int(deliver_at))
        return message

    def _type_of(self, properties: dict[str, str]) -> int:
        v2 = self._v2
        if properties.get(constants.PROPERTY_TRANSACTION_PREPARED) == "true":
            return int(v2.TRANSACTION)
        if any(name in properties for name in (constants.PROPERTY_DELAY, constants.PROPERTY_TIMER_OUT_MS, *TIMER_PROPERTIES)):
            return int(v2.DELAY)
        return int(v2.FIFO if constants.PROPERTY_SHARDING_KEY in properties else v2.NORMAL)

    def handle(self, record: Message, popped: Mapping[str, str]) -> str:
        """Return the receipt handle of a record of a pop's answer with these fields, in RocketMQ's form."""
        retry = "1" if record.topic.startswith("%RETRY%") else "0"
        at = record.queue_offset
        return (f"{at} {popped.get('popTime', '0')} {popped.get('invisibleTime', '0')} {popped.get('reviveQid', '0')} {retry} "
                f"{self._broker_name} {record.queue_id} {at} {record.physical_offset}")


def time_ms(stamp: Any) -> int:
    return int(stamp.seconds * 1000 + stamp.nanos // 1_000_000)


def set_time(stamp: Any, ms: int) -> None:
    stamp.seconds, stamp.nanos = ms // 1000, ms % 1000 * 1_000_000


def transaction_id(offset_msg_id: str, queue_offset: str) -> str:
    """Return the id by which a client ends a transaction: where its half message is, so that no process must remember it."""
    return f"{decode_message_id(offset_msg_id)[1]:x}-{int(queue_offset):x}"


def transaction_fields(text: str) -> dict[str, str]:
    """Return the fields of an END_TRANSACTION (37) by such an id; CallRefusedError for another text."""
    found = re.fullmatch(r"([0-9a-f]{1,15})-([0-9a-f]{1,15})", text)
    if found is None:
        raise CallRefusedError("INVALID_TRANSACTION_ID", f"{text[:100]!r} is no transaction's id: give that of the answer to its send")
    return {"commitLogOffset": str(int(found[1], 16)), "tranStateTableOffset": str(int(found[2], 16))}
