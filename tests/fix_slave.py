"""A slave reduced to its side of the wire: it reports its offset and keeps what it receives; and the secret of a pair."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.services.replication.ha_handshake import PlainPeers, Secret
from pyengine.services.replication.ha_stream import FrameCutter, MasterCall, MasterLink
from pyengine.storage.config import EngineConfig

SECRET = "a secret of the tests, 32 letters"


def secret_file(folder: Path, secret: str = SECRET, name: str = "ha.secret") -> str:
    """A new file with that secret, for `ha_secret_file`; or the one that is there."""
    path = Path(folder) / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secret + "\n")
    return str(path)


def call_of(file: str, introduction: Introduction | None = None, **settings) -> MasterCall:
    """As a slave whose secret is in `file` calls its master."""
    config = EngineConfig(broker_role="SLAVE", ha_secret_file=file, **settings)
    own = introduction or Introduction(b"s" * 16, 0, is_master=False)
    return MasterCall(Secret("/", config), PlainPeers(config), lambda: own, lambda _: None)


class SealedSlave:
    """A WireSlave with the secret: it shakes hands, and what it sends and receives is sealed."""

    def __init__(self, port: int, call: MasterCall, segment_bytes: int = 65536) -> None:
        self.link = MasterLink(f"127.0.0.1:{port}", call)
        self.tables: list[tuple[int, bytes, int]] = []  # kind, content, and where the log was by then
        self.cutter = FrameCutter(segment_bytes)
        self.start = -1
        self.log = bytearray()
        self.heartbeats: list[int] = []

    @property
    def end(self) -> int:
        return self.start + len(self.log)

    def report(self, *reports: int) -> None:
        for report in reports:
            self.link.report(report)

    def take(self) -> None:
        """Everything that is there now; LinkLostError once the master has closed, BadStreamError for what does not fit its seal."""
        while (data := self.link.receive()) is not None:
            for offset, piece in self.cutter.feed(data, self.link.seals.into):
                if offset < 0:
                    self.tables.append((-1 - offset, bytes(piece), self.end))
                elif not len(piece):
                    self.heartbeats.append(offset)
                else:
                    self.start = offset if self.start < 0 else self.start
                    assert offset == self.end
                    self.log += piece

    def close(self) -> None:
        self.link.close()


class WireSlave:
    """One connection of a slave to a master's HA port; appends whole frames to `log`, which begins at `start`."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, source: str = "", receive_buffer_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if source:
            self.socket.bind((source, 0))
        if receive_buffer_bytes:  # before it connects, or the window stays tiny
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(30)
        self.socket.connect((host, port))
        self.start = -1
        self.log = bytearray()
        self.heartbeats: list[int] = []
        self.unread = bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self.log)

    def report(self, *reports: int) -> None:
        self.socket.sendall(b"".join(map(ha_wire.REPORT.pack, reports)))

    def take(self) -> bool:
        """Everything that is there now; False once the master has closed."""
        self.socket.setblocking(False)
        try:
            while True:
                try:
                    data = self.socket.recv(1 << 20)
                except BlockingIOError:
                    return True
                except ConnectionError:
                    return False
                if not data:
                    return False
                self.unread += data
                self.parse()
        finally:
            self.socket.setblocking(True)

    def parse(self) -> None:
        at = 0
        while len(self.unread) - at >= ha_wire.HEADER_BYTES:
            offset, size = ha_wire.unpack_header(self.unread, at)
            body = at + ha_wire.HEADER_BYTES
            if len(self.unread) - body < size:
                break
            if size == 0:
                self.heartbeats.append(offset)
            else:
                if self.start < 0:
                    self.start = offset
                assert offset == self.end, f"a frame for {offset} where {self.end} was expected"
                self.log += self.unread[body:body + size]
            at = body + size
        del self.unread[:at]

    def close(self) -> None:
        self.socket.close()
