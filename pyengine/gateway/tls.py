"""TLS of the gateway: each connection's first byte tells TLS from plain RocketMQ, at the same ports.

The files of the certificate are checked every second; a new one applies to later connections. Docs: docs/gateway.md, docs/security.md.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar, cast

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError, os_error_sentence
from pyengine.formats.small_file import file_stamp, open_private, read_small_file
from pyengine.gateway.tasks import Tasks

CA_BYTES_MAX = 4 << 20
HANDSHAKE_S = 10.0          # longest TLS handshake
TLS_FIRST_BYTE = b"\x16"    # of a handshake; a frame that begins with it would exceed the largest length


class CertificateError(EngineError):
    """The certificate or its key cannot be used; the text says why, and what to do."""


class HasHost(Protocol):
    host: str


Hosted = TypeVar("Hosted", bound=HasHost)


class HostSet(dict[Hosted, str]):
    """A set of connections, with the host of each, that counts them by host."""

    def __init__(self) -> None:
        super().__init__()
        self.of_host: Counter[str] = Counter()

    def add(self, each: Hosted) -> None:
        self[each] = each.host
        self.of_host[each.host] += 1

    def discard(self, each: Hosted) -> None:
        if (host := self.pop(each, None)) is not None:
            self.of_host[host] -= 1
            if not self.of_host[host]:
                del self.of_host[host]


class TlsHandler:
    """Makes each connection a TLS or a plain one by its first byte, like RocketMQ's HandshakeHandler; call reload() first."""

    FAILURE = "the changed certificate cannot be used; new connections get the one before"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self.is_enforcing = config.gateway_tls_mode == "enforcing"
        self._auth = config.gateway_tls_client_auth
        self._certificate, self._key = Path(root) / config.gateway_tls_cert_file, Path(root) / config.gateway_tls_key_file
        self._client_ca = Path(root) / config.gateway_tls_client_ca_file if config.gateway_tls_client_ca_file else None
        self.context: ssl.SSLContext
        self._stamps: list[tuple[int, ...]] = []
        self.undecided: HostSet[HandshakeHandler] = HostSet()
        self.tasks = Tasks()

    def reload(self) -> str:
        """Read certificate and key if they have changed; return a sentence if they were read. CertificateError if they cannot be
        used."""
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        try:
            stamps = [file_stamp(os.stat(path)) for path in paths]
            if stamps == self._stamps:
                return ""
            open_private(self._key, "the gateway's key", "gateway_tls_key_file", CertificateError).close()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(cadata=read_small_file(self._client_ca, CA_BYTES_MAX).decode("ascii"))
            context.verify_mode = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}[self._auth]
        except (OSError, ValueError) as error:  # SSLError is an OSError
            why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
            files = ", ".join(map(str, paths))
            raise CertificateError(f"the certificate in {files} cannot be used: {why} (gateway_tls_cert_file)") from None
        self.context, self._stamps = context, stamps
        return f"the certificate in {self._certificate} counts for new connections"

    def read(self) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Return key and certificate, and the CAs of clients if they are asked for one, as gRPC takes them; after reload()."""
        authorities = None if self._client_ca is None or self._auth == "none" else read_small_file(self._client_ca, CA_BYTES_MAX)
        return [(self._key.read_bytes(), self._certificate.read_bytes())], authorities

    def close(self) -> None:
        """Close the connections that have sent nothing yet."""
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.undecided):
            connection.abort()


def _no_password() -> str:
    raise ValueError("the key has a password; give a key without one, which its file's mode protects")


class HandshakeHandler(asyncio.Protocol):
    """A connection before its first byte: it counts as open, and is closed if it stays silent for `idle_s`.

    `make` makes the protocol that follows when its kind is known. `refusal(host)` is why no connection from there is taken, "" if one
    is; `report(host, sentence)` gets why one is closed.
    """

    def __init__(self, tls: TlsHandler, make: Callable[[], asyncio.Protocol], refusal: Callable[[str], str],
                 report: Callable[[str, str], None], idle_s: float) -> None:
        self._tls = tls
        self._make = make
        self._refusal = refusal
        self._report = report
        self._idle_s = idle_s
        self._transport: asyncio.Transport  # from connection_made() on
        self._peek: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early_data = b""      # bytes that arrived between the handshake and its callback
        self._is_lost = False
        self.host = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self.host = str((transport.get_extra_info("peername") or ("0.0.0.0",))[0])
        if why := self._refusal(self.host):
            self._fail(why)
            return
        self._tls.undecided.add(self)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._pause_again)
        self._timer = loop.call_later(self._idle_s, self._fail, f"nothing whole came for {self._idle_s:g} s")
        try:  # a duplicate to peek at, since asyncio reads from the transport's descriptor itself
            self._peek = transport.get_extra_info("socket").dup()
        except OSError as error:
            self._fail(os_error_sentence(error))
            return
        loop.add_reader(self._peek, self._first_byte)

    def _pause_again(self) -> None:
        """Pause reading again, since asyncio of Python 3.11.2 begins to read after connection_made in any case."""
        if self._peek is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.pause_reading()

    def _first_byte(self) -> None:
        assert self._peek is not None
        try:
            first = self._peek.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        self._stop_peeking()
        if not first:
            self.abort()
        elif first == TLS_FIRST_BYTE:
            self._tls.tasks.begin(self._start_tls())
        elif self._tls.is_enforcing:
            self._fail("it does not begin with TLS (gateway_tls_mode is enforcing)")
        else:
            self._set_protocol(self._transport)
            self._transport.resume_reading()

    async def _start_tls(self) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._tls.context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S)
        except OSError as error:  # SSLError and TimeoutError too
            self._fail(f"the TLS handshake failed: {os_error_sentence(error)}")
            return
        if secured is None or self._is_lost:
            self.abort()
            return
        self._set_protocol(secured)

    def _set_protocol(self, transport: asyncio.Transport) -> None:
        self._tls.undecided.discard(self)
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early_data:
            protocol.data_received(self._early_data)

    def data_received(self, data: bytes) -> None:
        self._early_data += data

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._stop_peeking()
        self._tls.undecided.discard(self)

    def _fail(self, why: str) -> None:
        self._report(self.host, f"a connection is closed: {why}")
        self.abort()

    def abort(self) -> None:
        self._stop_peeking()
        self._tls.undecided.discard(self)
        self._transport.abort()

    def _stop_peeking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._peek is not None:
            asyncio.get_running_loop().remove_reader(self._peek)
            self._peek.close()
            self._peek = None
