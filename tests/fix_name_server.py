"""A small name server for tests: it takes registrations of brokers as RocketMQ's does, keeps each frame, and can be away or hostile.

Its routes end with the broker's connection. tests/interop has the same cases with RocketMQ's own name servers.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from pyengine.gateway import codes
from pyengine.gateway.wire import ANSWER, Frame, decode_frame, encode_frame
from waiting import eventually


class NameServer:
    """Listens at 127.0.0.1 until close(). `brokers`: (name, id) to the last registration of a connection that is open."""

    def __init__(self, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        self.frames: list[Frame] = []
        self.brokers: dict[tuple[str, int], dict[str, Any]] = {}
        self.routes = b""  # the answer to a question for the cluster's brokers
        self.answer: Callable[[Frame], Frame | bytes | None] = lambda frame: Frame(codes.SUCCESS, opaque=frame.opaque, flag=ANSWER)
        self.context = context
        self.open: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def registrations(self) -> list[Frame]:
        with self.lock:
            return [frame for frame in self.frames if frame.code == codes.REGISTER_BROKER]

    def codes(self) -> list[int]:
        with self.lock:
            return [frame.code for frame in self.frames]

    def topics(self, name: str = "broker-a", number: int = 0) -> dict[str, Any]:
        """The topics that a broker has registered; none if it is not in the routes."""
        return self.brokers.get((name, number), {}).get("topicConfigTable", {})

    def version(self, name: str = "broker-a", number: int = 0) -> dict[str, int]:
        return self.brokers[name, number]["dataVersion"]

    def wait_for(self, name: str = "broker-a", number: int = 0) -> dict[str, Any]:
        """The registration of a broker, once it is there."""
        eventually(lambda: (name, number) in self.brokers, f"{name} registers as {number}")
        return self.brokers[name, number]

    def wait_until_gone(self, name: str = "broker-a", number: int = 0) -> None:
        eventually(lambda: (name, number) not in self.brokers, f"{name} is out of the routes")

    def drop(self) -> None:
        """End all connections."""
        with self.lock:
            for one in self.open:
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.drop()

    def accept(self) -> None:
        while True:
            try:
                one, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(one,), daemon=True).start()

    def serve(self, one: socket.socket) -> None:
        registered: set[tuple[str, int]] = set()
        try:
            if self.context is not None:
                one = self.context.wrap_socket(one, server_side=True)
            with self.lock:
                self.open.add(one)
            file = one.makefile("rb")
            while len(head := file.read(4)) == 4:
                frame = decode_frame(file.read(struct.unpack(">i", head)[0]))
                answer = self.answer(frame)
                if frame.code == codes.GET_BROKER_CLUSTER_INFO:
                    answer = Frame(codes.SUCCESS, body=self.routes, opaque=frame.opaque, flag=ANSWER)
                with self.lock:
                    self.frames.append(frame)
                    if isinstance(answer, Frame) and answer.code == codes.SUCCESS:
                        self.take(frame, registered)
                if answer is not None:
                    one.sendall(answer if isinstance(answer, bytes) else encode_frame(answer))
        except OSError:
            pass
        finally:
            with self.lock:
                self.open.discard(one)
                for key in registered:
                    self.brokers.pop(key, None)
            one.close()

    def take(self, frame: Frame, registered: set[tuple[str, int]]) -> None:
        if frame.code not in (codes.REGISTER_BROKER, codes.UNREGISTER_BROKER):
            return
        key = frame.fields["brokerName"], int(frame.fields["brokerId"])
        if frame.code == codes.REGISTER_BROKER:
            assert int(frame.fields["bodyCrc32"]) == zlib.crc32(frame.body) & 0x7FFFFFFF and frame.fields["compressed"] == "false"
            self.brokers[key] = json.loads(frame.body)["topicConfigSerializeWrapper"] | {"fields": dict(frame.fields)}
            registered.add(key)
        else:
            self.brokers.pop(key, None)
            registered.discard(key)


class HungResolver:
    """The system's resolver, which does not answer for hung.example until answer(), and then knows no address."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()
        self.real = socket.getaddrinfo

    @property
    def is_hung(self) -> bool:
        return not self.released.is_set()

    def answer(self) -> None:
        self.released.set()

    def __call__(self, host, port, family=0, type=0, proto=0, flags=0):
        if host == "hung.example" and not flags & socket.AI_NUMERICHOST:
            self.asked.append(host)
            self.released.wait(120)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.real(host, port, family, type, proto, flags)


@pytest.fixture
def hung_resolver(monkeypatch):
    resolver = HungResolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.answer()


@pytest.fixture
def name_server():
    """A NameServer at a free port."""
    server = NameServer()
    yield server
    server.close()
