"""A small gRPC client for tests, with the worker's own classes, and an engine that serves it.

gRPC itself is loaded when a client is made, since each process of a run loads this module.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import socket
import threading
from pathlib import Path
from typing import Any

from fix_gateway import ServedStore, start_served
from pyengine.gateway.grpc_messages import Schema
from waiting import eventually, scaled_timeout_s

V2 = Schema()
_PORT = re.compile(r"RocketMQ 5 at 127\.0\.0\.1:(\d+)")
_numbers = itertools.count(1)


class Caller:
    """One client: calls by the names of the service's methods, `caller.QueryRoute(topic=...)`, and a stream of Telemetry."""

    def __init__(self, port: int, *, client_id: str | None = None, credentials: Any = None,
                 metadata: dict[str, str] | None = None) -> None:
        import grpc

        self.client_id = client_id or f"test@{next(_numbers)}"
        target, options = f"localhost:{port}" if credentials else f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
        self.metadata = [("x-mq-client-id", self.client_id), ("x-mq-language", "PYTHON"), *(metadata or {}).items()]
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.told: queue.SimpleQueue = queue.SimpleQueue()
        self.stream = None

    def __getattr__(self, name: str):
        request = getattr(V2, V2.methods[name].input_type.name)

        def call(timeout: float = 30.0, **fields):
            return self.stub(name)(request(**fields), timeout=scaled_timeout_s(timeout), metadata=self.metadata)

        return call

    def stub(self, name: str):
        method = V2.methods[name]
        kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
        request, answer = (getattr(V2, each.name) for each in (method.input_type, method.output_type))
        return getattr(self.channel, kind)(f"/{V2.service}/{name}", request.SerializeToString, answer.FromString)

    def settings(self, **fields):
        """Send settings in the client's stream of Telemetry, which the first one opens; the answer."""
        if self.stream is None:
            self.stream = self.stub("Telemetry")(iter(self.commands.get, None), metadata=self.metadata)
            threading.Thread(target=self.listen, args=(self.stream,), daemon=True).start()
        self.commands.put(V2.TelemetryCommand(settings=V2.Settings(**fields)))
        return self.told.get(timeout=scaled_timeout_s(30))

    def listen(self, stream) -> None:
        import grpc

        with contextlib.suppress(grpc.RpcError):
            for command in stream:
                self.told.put(command)
        self.told.put(None)

    def end_stream(self) -> None:
        """Half-close the stream, and wait until the server has ended it."""
        self.commands.put(None)
        while self.told.get(timeout=scaled_timeout_s(30)) is not None:
            pass

    def send(self, topic: str, body: bytes, **system):
        """Send one message; the answer's entry."""
        return self.SendMessage(messages=[message(topic, body, **system)]).entries[0]

    def receive(self, topic: str, group: str, *, queue_id: int = -1, batch: int = 32, invisible_s: float = 30.0, poll_s: float = 1.0,
                expression: str = "*", **fields):
        """One receive; its messages, and last the status of its first answer."""
        answers = list(self.ReceiveMessage(
            group=V2.Resource(name=group), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic), id=queue_id), batch_size=batch,
            filter_expression=V2.FilterExpression(type=V2.TAG, expression=expression), invisible_duration=duration(invisible_s),
            long_polling_timeout=duration(poll_s), **fields))
        return [answer.message for answer in answers if answer.HasField("message")], answers[0].status

    def ack(self, topic: str, group: str, *messages):
        return self.AckMessage(group=V2.Resource(name=group), topic=V2.Resource(name=topic), entries=[
            V2.AckMessageEntry(message_id=each.system_properties.message_id, receipt_handle=each.system_properties.receipt_handle)
            for each in messages])

    def close(self) -> None:
        self.commands.put(None)
        self.channel.close()


def duration(seconds: float):
    """A Duration of the package's own classes."""
    made = type(V2.Settings().request_timeout)()
    made.seconds, made.nanos = int(seconds), round(seconds % 1 * 1e9)
    return made


def message(topic: str, body: bytes, **system):
    """A Message with an id of its own."""
    properties = system.pop("user_properties", {})
    system.setdefault("message_id", f"01{next(_numbers):032X}")
    system.setdefault("message_type", V2.NORMAL)
    made = V2.Message(topic=V2.Resource(name=topic), body=body, user_properties=properties)
    made.system_properties.MergeFrom(V2.SystemProperties(**system))
    return made


class Relay:
    """A port of this host whose connections come to another one from `own_host`, as those of another host do."""

    def __init__(self, to_port: int, own_host: str) -> None:
        self.to, self.own_host = to_port, own_host
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(("127.0.0.1", self.to), 30, (self.own_host, 0))
                for each in (near, far):
                    each.settimeout(None)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=pair, daemon=True).start()

    def copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


class GrpcStore(ServedStore):
    """A ServedStore with gRPC, and its clients."""

    def __init__(self, served: ServedStore) -> None:
        super().__init__(served.engine)
        self.callers: list[Caller] = []

    @property
    def grpc_port(self) -> int:
        return int(_PORT.findall(self.engine.log())[-1])

    def caller(self, **settings) -> Caller:
        self.callers.append(Caller(self.grpc_port, **settings))
        return self.callers[-1]

    def make_topic(self, name: str, queues: int = 4) -> str:
        """Create a topic, as a tool does."""
        from pyengine.storage.config_table import TopicConfig, TopicConfigs

        TopicConfigs(self.root).ensure(TopicConfig(name, queues, queues))
        return name

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        super().close()


def start_grpc(root: Path, **settings: object) -> GrpcStore:
    """An engine that serves gRPC at a free port."""
    store = GrpcStore(start_served(root, **{"grpc_enable": True, "grpc_port": 0, **settings}))
    eventually(lambda: _PORT.search(store.engine.log()), "gRPC is served")
    return store
