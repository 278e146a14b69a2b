"""A small client of the gateway for tests, and a gateway with an engine of its own for the tests of a module."""

from __future__ import annotations

import base64
import hmac
import itertools
import json
import re
import socket
import ssl
import struct
import time
from pathlib import Path

import pytest
import trustme

from fix_engine import SMALL, RunningEngine
from pyengine.gateway import codes
from pyengine.gateway.wire import Frame, decode_frame, encode_frame
from pyengine.ipc.sessions import connect_socket
from pyengine.ipc.shared_objects import GATEWAY_SOCKET, find_folder
from waiting import eventually, scaled_timeout_s

_PORTS = re.compile(r"(?:name server at \S*:(\d+)|no name server of its own), broker \S+ at \S*:(\d+)")
_numbers = itertools.count(1)


class Client:
    """One connection. Frames that the gateway sends by itself are in `told`."""

    def __init__(self, port: int, host: str = "127.0.0.1", own_host: str = "") -> None:
        self.socket = socket.create_connection((host, port), 30, (own_host, 0))
        self.told: list[Frame] = []
        self.answers: dict[int, Frame] = {}

    def ask(self, code: int, fields: dict[str, object] | None = None, body: bytes | object = b"", **frame) -> Frame:
        """One request and its answer."""
        return self.wait(self.send(code, fields, body, **frame))

    def send(self, code: int, fields: dict[str, object] | None = None, body: bytes | object = b"", **frame) -> int:
        """One request; its number, by which wait() finds the answer."""
        opaque = next(_numbers)
        texts = {name: str(value) for name, value in (fields or {}).items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.socket.sendall(encode_frame(Frame(code, texts, data, opaque, **frame)))
        return opaque

    def wait(self, opaque: int, timeout_s: float = 30.0) -> Frame:
        """The answer to a request; others that come first are kept."""
        while opaque not in self.answers:
            self.take(self.receive(timeout_s))
        return self.answers.pop(opaque)

    def is_answered(self, opaque: int) -> bool:
        """Whether the answer to a request was among the frames that wait() has received."""
        return opaque in self.answers

    def wait_told(self, code: int) -> Frame:
        """The first request of this code that the gateway sends by itself."""
        while not any(frame.code == code for frame in self.told):
            self.take(self.receive())
        found = next(frame for frame in self.told if frame.code == code)
        self.told.remove(found)
        return found

    def is_silent(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes for a while."""
        try:
            self.take(self.receive(seconds))
        except TimeoutError:
            return True
        return False

    def take(self, frame: Frame) -> None:
        if frame.is_answer:
            self.answers[frame.opaque] = frame
        else:
            self.told.append(frame)

    def receive(self, timeout_s: float = 30.0) -> Frame:
        """The next frame; EOFError when the gateway has closed the connection."""
        deadline_s = time.monotonic() + (timeout_s if timeout_s < 1 else scaled_timeout_s(timeout_s))
        return decode_frame(self.exactly(struct.unpack(">i", self.exactly(4, deadline_s))[0], deadline_s))

    def exactly(self, size: int, deadline_s: float) -> bytes:
        found = b""
        while len(found) < size:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.socket.settimeout(left_s)
            piece = self.socket.recv(size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    @property
    def is_closed(self) -> bool:
        """Waits until the gateway has closed the connection."""
        try:
            while True:
                self.take(self.receive())
        except (EOFError, ConnectionError):
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalClient(Client):
    """A connection to the gateway's Unix socket, for a client at `address`."""

    def __init__(self, root: Path, address: str | None = None, **fields: object) -> None:
        self.socket = connect_socket(find_folder(root).path, 30.0, GATEWAY_SOCKET)
        self.told, self.answers = [], {}
        if address is not None:
            assert self.ask(codes.INTRODUCE, {"address": address, **fields}).code == codes.SUCCESS


class TlsClient(Client):
    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        self.socket = context.wrap_socket(self.socket, server_hostname="localhost")


def trusting(authority) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


class ServedStore:
    """An engine with its gateway, and connections to it that are closed at the end."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.root = engine.root
        self.clients: list[Client] = []

    @property
    def ports(self) -> tuple[int, int]:
        """(name server, broker) of the last gateway that said that it listens; 0 if it has no name server."""
        return tuple(int(port or 0) for port in _PORTS.findall(self.engine.log())[-1])

    def broker(self) -> Client:
        self.clients.append(Client(self.ports[1]))
        return self.clients[-1]

    def name_server(self) -> Client:
        self.clients.append(Client(self.ports[0]))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.engine.sweep()


def start_served(root: Path, **settings: object) -> ServedStore:
    """An engine with a gateway at free ports, or at those of the settings."""
    served = ServedStore(RunningEngine(root, {**SMALL, "gateway_enable": True, "gateway_namesrv_port": 0, "gateway_broker_port": 0,
                                              **settings}))
    served.engine.start()
    eventually(lambda: _PORTS.search(served.engine.log()), "the gateway listens")
    return served


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One store with its gateway for all tests of a module: each uses topics and groups of its own."""
    store = start_served(tmp_path_factory.mktemp("served") / "store")
    yield store
    store.close()


def put_private(path: Path, text: bytes, mode: int = 0o600) -> Path:
    """Put a file in the place of `path`, as an editor does: another one, of this mode."""
    new = path.with_name(f"{path.name}.new")
    new.touch(mode=0o600)
    new.write_bytes(text)
    new.chmod(mode)
    return new.replace(path)


def put_certificate(folder: Path, authority: trustme.CA, name: str = "localhost") -> dict[str, object]:
    """Issue a certificate of this machine into a folder; the settings with which a gateway shows it."""
    made = authority.issue_cert("127.0.0.1", name)
    return {"gateway_tls_cert_file": str(put_private(folder / "cert.pem", b"".join(one.bytes() for one in made.cert_chain_pems))),
            "gateway_tls_key_file": str(put_private(folder / "key.pem", made.private_key_pem.bytes()))}


def signed(fields: dict[str, object], body: bytes, account: tuple[str, str]) -> dict[str, str]:
    """The header of a request with an account's key and signature, as RocketMQ's AclClientRPCHook makes them."""
    texts = {name: str(value) for name, value in fields.items()} | {"AccessKey": account[0]}
    content = "".join(text for _, text in sorted(texts.items())).encode() + body
    return texts | {"Signature": base64.b64encode(hmac.digest(account[1].encode(), content, "sha1")).decode()}


def send_fields(topic: str, queue_id: int = 0, properties: str = "", **changes: object) -> dict[str, object]:
    """The header of a send in its short names."""
    return {"a": "test", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "f": 0, "g": 1_700_000_000_000, "h": 0, "i": properties,
            "j": 0, "k": "false", "m": "false", **changes}


def pull_fields(topic: str, offset: int = 0, queue_id: int = 0, group: str = "readers", **changes: object) -> dict[str, object]:
    """The header of a pull that names its subscription itself and is not held."""
    return {"consumerGroup": group, "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32, "sysFlag": 4,
            "commitOffset": 0, "suspendTimeoutMillis": 60_000, "subscription": "*", "subVersion": 0, "expressionType": "TAG", **changes}


def subscription(topic: str, text: str = "*", version: int = 1, kind: str = "TAG") -> dict[str, object]:
    return {"classFilterMode": False, "codeSet": [], "expressionType": kind, "subString": text, "subVersion": version, "tagsSet": [],
            "topic": topic}


def heartbeat(client: Client, client_id: str, group: str, *subscriptions: dict[str, object], model: str = "CLUSTERING",
         is_of_unit: bool = False) -> Frame:
    """A consumer's heartbeat."""
    return client.ask(codes.HEART_BEAT, body={"clientID": client_id, "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
                                              "consumerDataSet": [{
                                                  "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": model,
                                                  "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "unitMode": is_of_unit,
                                                  "subscriptionDataSet": list(subscriptions)}]})


