"""The handshake by which two stores with the same secret authenticate each other: HELLO, CHALLENGE, PROOF and WELCOME of
formats/ha_wire.py. Each HMAC-SHA256 is over all that was sent so far.

The secret is never sent. A peer that does not have it gets only the CHALLENGE, and a recorded handshake cannot be replayed,
since the numbers differ. Both ends derive the keys of the link's seals (csrc/seal.cdef.h) from secret and handshake. Only HELLO
is sent to a peer that may not know this protocol: RocketMQ's master reads it as a report of a negative offset, which confirms
nothing there.

A peer whose address is in `ha_allow_plain` may use RocketMQ's own protocol instead, which proves nothing. A slave of this
engine offers seals in it (OFFER), with keys that are in this file: they detect accidental changes, and prove nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import EngineError
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.formats.small_file import open_private
from pyengine.native.replication import Seal
from pyengine.storage.config import EngineConfig

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096
_SLAVE, _MASTER, _FRAMES, _REPORTS = (b"pyengine replication 1 " + word for word in (b"slave", b"master", b"frames", b"reports"))


class SecretError(EngineError):
    """The file of `ha_secret_file` cannot be used; the text says why, and what to do."""


class HandshakeError(EngineError):
    """The peer may not connect, or cannot prove that it has the secret."""


class Secret:
    """The file of the setting `ha_secret_file`. It is read at each handshake, so that a new secret needs no restart."""

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._path = Path(root) / config.ha_secret_file if config.ha_secret_file else None

    @property
    def is_set(self) -> bool:
        """Whether the settings name a file."""
        return self._path is not None

    def read(self) -> bytes:
        """Return its content without surrounding white space. SecretError, also if other users may read the file."""
        assert self._path is not None
        try:
            with open_private(self._path, "the secret", "ha_secret_file", SecretError) as file:
                content = file.read(SECRET_BYTES_MAX + 1)
        except OSError as error:
            raise SecretError(f"the secret in {self._path} cannot be read: {error.strerror} (ha_secret_file)") from None
        if len(content) > SECRET_BYTES_MAX or len(content.strip()) < SECRET_BYTES_MIN:
            raise SecretError(f"{self._path} holds no secret: give it {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX:,} random bytes as text, for "
                              "example of `head -c 32 /dev/urandom | base64` (ha_secret_file)")
        return content.strip()


class PlainPeers:
    """The addresses in `ha_allow_plain`."""

    def __init__(self, config: EngineConfig) -> None:
        self._networks = [ipaddress.ip_network(text) for text in config.ha_allow_plain_list]

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, host: str) -> bool:
        """Return whether a socket's peer address is one of them; an IPv4 address in IPv6 form counts as IPv4."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False  # a socket without addresses
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)


class Seals(NamedTuple):
    """The seals of one link: `out` for sent parts, `into` for received ones; both None with RocketMQ's own protocol."""

    out: Seal | None = None
    into: Seal | None = None

    @classmethod
    def unkeyed(cls, *, is_master: bool) -> Seals:
        """Return the seals of a link without authentication."""
        out, into = (_FRAMES, _REPORTS) if is_master else (_REPORTS, _FRAMES)
        return cls(_seal(b"", out, b""), _seal(b"", into, b""))


def require_followable(master: Introduction, term: int) -> None:
    """Raise HandshakeError if a slave that has followed a master of `term` must not follow this one."""
    if master.term < term:
        raise HandshakeError(f"it is a master of term {master.term}, and this store has followed one of term {term}, which took its place")
    if master.is_fenced:
        raise HandshakeError("a master of a higher term has taken its place, or one of the same term goes on: give ha_master_address "
                             "that one's address")


class MasterHandshake:
    """The master's side of a handshake: pass the received bytes to `take` until the peer is known.

    `introduce` returns this store's current introduction. Afterwards `peer` is the introduction that the peer has proven, None
    for one that uses RocketMQ's own protocol.
    """

    def __init__(self, secret: Secret, introduce: Callable[[], Introduction], *, may_be_plain: bool) -> None:
        self.peer: Introduction | None = None
        self.seals = Seals()
        self.may_be_plain = may_be_plain
        self.is_finished = False
        self._secret = secret
        self._introduce = introduce
        self._transcript = b""   # what both sides have sent so far

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Return (the answer, unused bytes); call it again with those and the next bytes. HandshakeError, SecretError."""
        if self.is_finished:
            return b"", data
        if not self._transcript:
            if len(data) < ha_wire.REPORT_BYTES:
                return b"", data
            return self._take_first(data)
        if len(data) < ha_wire.PROOF_BYTES:
            return b"", data
        return self._take_proof(data[: ha_wire.PROOF_BYTES]), data[ha_wire.PROOF_BYTES :]

    def _take_first(self, data: bytes) -> tuple[bytes, bytes]:
        first, rest = data[: ha_wire.REPORT_BYTES], data[ha_wire.REPORT_BYTES :]
        is_offer = first == ha_wire.OFFER
        if is_offer or not ha_wire.is_hello(first):
            if not self.may_be_plain:
                raise HandshakeError("it uses RocketMQ's own protocol, and ha_allow_plain does not name its address")
            if not is_offer:
                self.is_finished = True
                return b"", data
            if len(rest) < ha_wire.REPORT_BYTES:
                return b"", data
            self.seals = Seals.unkeyed(is_master=True)
            self.is_finished = True
            return ha_wire.SEALED, rest[ha_wire.REPORT_BYTES :]  # the report that RocketMQ would need
        if first != ha_wire.HELLO:
            raise HandshakeError("it uses another version of pyengine's replication protocol")
        if not self._secret.is_set:
            raise HandshakeError("it asks for a proof, and this store has no secret: set ha_secret_file")
        challenge = ha_wire.CHALLENGE + secrets.token_bytes(ha_wire.NONCE_BYTES)
        self._transcript = first + challenge
        return challenge, rest

    def _take_proof(self, proof: bytes) -> bytes:
        secret = self._secret.read()
        introduced, mac = proof[: -ha_wire.MAC_BYTES], proof[-ha_wire.MAC_BYTES :]
        self._transcript += introduced
        if not hmac.compare_digest(mac, _mac(secret, _SLAVE, self._transcript)):
            raise HandshakeError("it does not have the secret of this store (ha_secret_file)")
        self.peer = ha_wire.unpack_introduction(introduced)
        welcome = ha_wire.pack_introduction(self._introduce())
        self._transcript += welcome
        self.seals = Seals(_seal(secret, _FRAMES, self._transcript), _seal(secret, _REPORTS, self._transcript))
        self.is_finished = True
        return welcome + _mac(secret, _MASTER, self._transcript)


def slave_handshake(exchange: Callable[[bytes, int], bytes], secret: bytes, own: Introduction) -> tuple[Introduction, Seals]:
    """Authenticate with a master. `exchange(words, size)` sends, and returns the next `size` bytes; its errors and HandshakeError."""
    challenge = exchange(ha_wire.HELLO, len(ha_wire.CHALLENGE))
    if challenge != ha_wire.CHALLENGE:
        raise HandshakeError("it answers without asking for a proof: is it a master of RocketMQ? Then name its address in ha_allow_plain")
    challenge += exchange(b"", ha_wire.NONCE_BYTES)
    transcript = ha_wire.HELLO + challenge + ha_wire.pack_introduction(own, secrets.token_bytes(ha_wire.NONCE_BYTES))
    introduced = transcript[len(ha_wire.HELLO) + len(challenge) :]
    welcome = exchange(introduced + _mac(secret, _SLAVE, transcript), ha_wire.WELCOME_BYTES)
    transcript += welcome[: -ha_wire.MAC_BYTES]
    if not hmac.compare_digest(welcome[-ha_wire.MAC_BYTES :], _mac(secret, _MASTER, transcript)):
        raise HandshakeError("it cannot prove that it has the secret of this store (ha_secret_file)")
    peer = ha_wire.unpack_introduction(welcome[: -ha_wire.MAC_BYTES])
    return peer, Seals(_seal(secret, _REPORTS, transcript), _seal(secret, _FRAMES, transcript))


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.new(secret, label + b"\0" + transcript, hashlib.sha256).digest()


def _seal(secret: bytes, label: bytes, transcript: bytes) -> Seal:
    return Seal(_mac(secret, label, transcript)[: Seal.KEY_BYTES])
