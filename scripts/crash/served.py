"""The rounds for a gateway and a gRPC worker: producers send to it by RocketMQ's protocol while it is killed.

    python -m crash.served PORT ACKED --name p0 --seed 7 [--grpc]     one such producer

The store must have each message that was answered SUCCESS. The producer is that of crash.acked_producer, with a connection
in place of a session. A send without an answer is not in its list, and its number is not used again.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash.acked_producer import AGAIN_S, QUEUES, TOPICS, AckedList, AckedProducer
from crash.replicas import free_port
from crash.rounds import AIM_SHARE, CrashRun
from pyengine.formats.record import BatchMember, encode_batch
from pyengine.gateway import codes
from pyengine.gateway.wire import Frame, decode_frame, encode_frame
from pyengine.storage.config_table import TopicConfig, TopicConfigs

TIMEOUT_S = 10.0
RATE = 2000.0
GROUPS = {zlib.crc32(name.encode()) % QUEUES: name for name in map(str, range(8 * QUEUES))}  # message groups by their queue


class GatewayRun(CrashRun):
    """A CrashRun of a gateway and its clients."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int, aim: float = AIM_SHARE) -> None:
        super().__init__(store, scratch, kind, mode, seed, aim)
        self.port = free_port()
        self.settings |= {"gateway_enable": True, "gateway_broker_port": self.port, "gateway_namesrv_port": 0,
                          "default_topic_queue_nums": 4}

    def producer_command(self) -> list[str]:
        return ["crash.served", str(self.port)]


class GrpcRun(GatewayRun):
    """A CrashRun of a gRPC worker and its clients."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int, aim: float = AIM_SHARE) -> None:
        super().__init__(store, scratch, kind, mode, seed, aim)
        self.settings |= {"grpc_enable": True, "grpc_port": self.port, "gateway_broker_port": 0}

    def make_producers(self) -> None:
        for topic in TOPICS:  # its clients make none
            TopicConfigs(self.store).ensure(TopicConfig(topic, QUEUES, QUEUES))
        super().make_producers()

    def producer_command(self) -> list[str]:
        return [*super().producer_command(), "--grpc"]


class Sends:
    """One connection; an OSError ends it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._file = self._socket.makefile("rb")

    def all(self, topic: str, queue_id: int, bodies: list[bytes], code: int = codes.SEND_MESSAGE_V2) -> list[Frame]:
        """Send all bodies, then return the answers in the same order."""
        fields = {"a": "crash", "b": topic, "c": "TBW102", "d": "4", "e": str(queue_id), "f": "0", "g": "1", "h": "0", "i": "", "j": "0"}
        self._socket.sendall(b"".join(encode_frame(Frame(code, fields, body, number)) for number, body in enumerate(bodies)))
        answers: dict[int, Frame] = {}
        while len(answers) < len(bodies):
            (size,) = struct.unpack(">i", self._exactly(4))
            frame = decode_frame(self._exactly(size))
            answers[frame.opaque] = frame
        return [answers[number] for number in range(len(bodies))]

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise ConnectionError("the gateway has gone")
        return data

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class GrpcSends:
    """One channel of gRPC; an OSError ends it."""

    def __init__(self, port: int) -> None:
        import grpc

        from pyengine.gateway.grpc_messages import Schema

        self._v2 = Schema()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        self._send = self._channel.unary_unary(
            f"/{self._v2.service}/SendMessage", self._v2.SendMessageRequest.SerializeToString, self._v2.SendMessageResponse.FromString)
        self._failed = grpc.RpcError

    def all(self, topic: str, queue_id: int, bodies: list[bytes]) -> list[Any]:
        """Send all bodies in one request; return their entries of the answer."""
        v2, request = self._v2, self._v2.SendMessageRequest()
        for body in bodies:
            message = request.messages.add(topic=v2.Resource(name=topic), body=body)
            message.system_properties.MergeFrom(v2.SystemProperties(
                message_id=hashlib.md5(body, usedforsecurity=False).hexdigest(), message_type=v2.FIFO, message_group=GROUPS[queue_id]))
        try:
            return list(self._send(request, timeout=TIMEOUT_S, metadata=[("x-mq-client-id", "crash")]).entries)
        except self._failed as error:
            raise ConnectionError(f"the gRPC worker has gone: {error.code().name}") from None

    def is_stored(self, entry: Any) -> bool:
        return bool(entry.status.code == self._v2.OK)

    def close(self) -> None:
        self._channel.close()


class SentProducer(AckedProducer):
    """Makes sends of every kind over one connection at a time."""

    def __init__(self, name: str, rng: random.Random, acked: AckedList) -> None:
        super().__init__(name, rng, acked)
        self._ways = [self._one_by_one, self._pipelined, self._in_a_batch]

    def send(self, connection: Sends, topic: str, queue_id: int) -> int:
        """Make one send of a random kind; return the number of messages."""
        return self._rng.choice(self._ways)(connection, topic, queue_id)

    def _one_by_one(self, connection: Sends, topic: str, queue_id: int) -> int:
        (body,) = self.bodies(1)
        self._note_answer(topic, queue_id, connection.all(topic, queue_id, [body])[0], [body])
        return 1

    def _pipelined(self, connection: Sends, topic: str, queue_id: int) -> int:
        bodies = self.bodies(self._rng.randrange(1, 32))
        for answer, body in zip(connection.all(topic, queue_id, bodies), bodies, strict=True):
            self._note_answer(topic, queue_id, answer, [body])
        return len(bodies)

    def _in_a_batch(self, connection: Sends, topic: str, queue_id: int) -> int:
        bodies = self.bodies(self._rng.randrange(1, 6))
        data = encode_batch([BatchMember(body) for body in bodies])
        self._note_answer(topic, queue_id, connection.all(topic, queue_id, [data], codes.SEND_BATCH_MESSAGE)[0], bodies)
        return len(bodies)

    def _note_answer(self, topic: str, queue_id: int, answer: Frame, bodies: list[bytes]) -> None:
        if answer.code == codes.SUCCESS:
            first = int(answer.fields["queueOffset"])
            for number, (body, msg_id) in enumerate(zip(bodies, answer.fields["msgId"].split(","), strict=True)):
                self._acked.add(topic, queue_id, first + number, int(msg_id[-16:], 16), body)


class GrpcProducer(AckedProducer):
    """Makes sends of one message and of several over one channel at a time. No answer has a physical offset."""

    def send(self, channel: GrpcSends, topic: str, queue_id: int) -> int:
        """Make one send; return the number of messages."""
        bodies = self.bodies(self._rng.choice((1, 1, self._rng.randrange(2, 32))))
        for entry, body in zip(channel.all(topic, queue_id, bodies), bodies):
            if channel.is_stored(entry):
                self._acked.add(topic, queue_id, entry.offset, None, body)
        return len(bodies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("acked", type=Path)
    parser.add_argument("--name", required=True, help="must differ from every other producer's, earlier ones included")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--grpc", action="store_true", help="PORT is that of a gRPC worker")
    arguments = parser.parse_args()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    rng = random.Random(f"{arguments.seed}/{arguments.name}")
    acked = AckedList(arguments.acked)
    maker: Any = (GrpcProducer if arguments.grpc else SentProducer)(arguments.name, rng, acked)
    connect: Callable[[int], Any] = GrpcSends if arguments.grpc else Sends
    while not stopping:
        try:
            connection = connect(arguments.port)
            try:
                while not stopping:
                    began_s = time.monotonic()
                    sent = maker.send(connection, rng.choice(TOPICS), rng.randrange(QUEUES))
                    time.sleep(max(0.0, sent / RATE - (time.monotonic() - began_s)))
            finally:
                connection.close()
        except OSError as error:
            print(f"{error}; trying again", file=sys.stderr)
            time.sleep(AGAIN_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
