"""A slave's connection to its master: bytes in, reports out. What they mean is not known here."""

from __future__ import annotations

import contextlib
import select
import socket

from pyengine.errors import EngineError, os_error_sentence
from pyengine.formats.ha_wire import pack_report

CONNECT_TIMEOUT_S = 5.0
READ_BYTES = 512 << 10


class LinkLostError(EngineError):
    """There is no connection to the master, or not any more."""


class MasterLink:
    """One connection. `address` is host:port, IPv6 as [::1]:port."""

    def __init__(self, address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect; LinkLostError says why not."""
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except TimeoutError:
            raise LinkLostError(f"{address} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise LinkLostError(f"{address}: {os_error_sentence(error)}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._unsent = b""

    def report(self, offset: int) -> None:
        """Send one report. One that went out half is finished first, so that the next is not torn."""
        self._unsent += pack_report(offset)
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise LinkLostError(f"the connection broke: {os_error_sentence(error)}") from None
        rest = self._unsent[sent:]
        whole_to_come = len(rest) - len(rest) % 8
        # Of what the master does not read, the newest says it all; what has begun must end.
        self._unsent = rest[: len(rest) % 8] + (rest[-8:] if whole_to_come else b"")

    def wait(self, timeout_s: float) -> bool:
        """Sleep until bytes have come (or the end of the connection), or for so long."""
        return bool(self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))))

    def receive(self) -> memoryview | None:
        """What has come, valid until the next call; None when nothing has. LinkLostError at the connection's end."""
        try:
            count = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise LinkLostError(f"the connection broke: {os_error_sentence(error)}") from None
        if count == 0:
            raise LinkLostError("the master closed the connection")
        return self._buffer[:count]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
