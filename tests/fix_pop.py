"""Pops of the gateway in tests: their headers, and the messages and handles of their answers."""

from __future__ import annotations

from dataclasses import dataclass

from fix_gateway import Client
from pyengine.formats.record import Message, decode_record
from pyengine.gateway import codes
from pyengine.gateway.wire import Frame


@dataclass(frozen=True)
class Popped:
    """A message of a pop, with its handle."""

    group: str
    topic: str
    message: Message
    handle: str

    @property
    def body(self) -> bytes:
        return self.message.body

    @property
    def fields(self) -> dict[str, object]:
        """The header of a request about it."""
        return {"consumerGroup": self.group, "topic": self.topic, "queueId": self.message.queue_id, "offset": self.message.queue_offset,
                "extraInfo": self.handle}

    def with_handle(self, answer: Frame) -> Popped:
        """The same after a change of its time."""
        return Popped(self.group, self.topic, self.message, answer.fields["extraInfo"])


def pop_fields(topic: str, group: str, **changes: object) -> dict[str, object]:
    """The header of a pop of any queue that is not held, and whose messages are invisible for a minute."""
    return {"consumerGroup": group, "topic": topic, "queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0,
            "initMode": 0, "expType": "TAG", "exp": "*", "order": "false", **changes}


def popped(answer: Frame, topic: str, group: str) -> list[Popped]:
    """The messages of an answer. Their handles are made as RocketMQ's client makes them, from startOffsetInfo and msgOffsetInfo."""
    assert answer.code == codes.SUCCESS, answer.remark
    starts, offsets = {}, {}
    for text, found in ((answer.fields["startOffsetInfo"], starts), (answer.fields["msgOffsetInfo"], offsets)):
        for one in text.split(";"):
            retry, queue_id, value = one.split(" ")
            assert (retry, int(queue_id)) not in found
            found[retry, int(queue_id)] = value
    messages, at = [], 0
    while at < len(answer.body):
        messages.append(decode_record(answer.body, at))
        at += messages[-1].size_bytes
    times = " ".join(answer.fields[name] for name in ("popTime", "invisibleTime", "reviveQid"))
    made = []
    for message in messages:
        key = "1" if message.topic.startswith("%RETRY%") else "0", message.queue_id
        assert str(message.queue_offset) in offsets[key].split(",")
        made.append(Popped(group, topic, message, f"{starts[key]} {times} {key[0]} broker-a {message.queue_id} {message.queue_offset}"))
    for key, text in offsets.items():
        listed = list(map(int, text.split(",")))
        assert listed == sorted(listed) and int(starts[key]) == listed[0]
    return made


def pop(client: Client, topic: str, group: str, **changes: object) -> list[Popped]:
    """Pop once; no messages where there are none."""
    answer = client.ask(codes.POP_MESSAGE, pop_fields(topic, group, **changes))
    return [] if answer.code == codes.POLLING_TIMEOUT else popped(answer, topic, group)


def ack(client: Client, message: Popped) -> int:
    """The code of the answer to an acknowledgement."""
    return client.ask(codes.ACK_MESSAGE, message.fields).code
