"""A slave reduced to its side of the wire: says where it stands, keeps what it hears."""

from __future__ import annotations

import socket

from pyengine.formats import ha_wire


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
        self._unread = bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self.log)

    def say(self, *reports: int) -> None:
        self.socket.sendall(b"".join(map(ha_wire.pack_report, reports)))

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
                self._unread += data
                self._parse()
        finally:
            self.socket.setblocking(True)

    def _parse(self) -> None:
        at = 0
        while len(self._unread) - at >= ha_wire.HEADER_BYTES:
            offset, size = ha_wire.unpack_header(self._unread, at)
            body = at + ha_wire.HEADER_BYTES
            if len(self._unread) - body < size:
                break
            if size == 0:
                self.heartbeats.append(offset)
            else:
                if self.start < 0:
                    self.start = offset
                assert offset == self.end, f"a frame for {offset} where {self.end} was expected"
                self.log += self._unread[body:body + size]
            at = body + size
        del self._unread[:at]

    def close(self) -> None:
        self.socket.close()
