"""The handshake by which two stores with the same secret authenticate each other (docs/replication.md has the wire format).

    slave                                            master
    HELLO      8 bytes that no report begins with  ->
                                                   <- CHALLENGE  a number used once
    PROOF      UUID, role and term, its own number,
               HMAC-SHA256 over all so far         ->
                                                   <- WELCOME    UUID, role and term, HMAC-SHA256 over all so far

The secret is never sent. A peer that does not have it gets only the CHALLENGE, and a recorded handshake cannot be replayed,
since the numbers differ. Both ends derive the keys of the link's seals (csrc/seal.cdef.h) from secret and handshake. Only HELLO
is sent to a peer that may not know this protocol: RocketMQ's master reads it as a report of a negative offset, which confirms
nothing there.

A peer whose address is in `ha_allow_plain` may use RocketMQ's own protocol instead, which proves nothing. A slave of this
engine offers seals in it (OFFER), with keys that are in this file: they detect accidental changes, and prove nothing.

`ReplicationNotes` keeps `config/replication.json` up to date while a replicator runs, with at most one write a second. A durable
write takes milliseconds, so a thread of its own writes the file and no acknowledgement waits for it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import EngineError
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.formats.small_file import open_private
from pyengine.ipc.control_block import ROLE_NAMES
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.native.replication import Seal
from pyengine.services.service import BlockedReason, ServiceContext
from pyengine.storage.config import EngineConfig
from pyengine.storage.replication_state import DISPATCH_AT, ReplicationState, ReplicationStateFile

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096
INTERVAL_S = 1.0  # between two notes
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
        raise HandshakeError("a master of a higher term has taken its place: give ha_master_address that one's address")


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


class ReplicationNotes:
    """Notes the role and the confirmed offset of one engine and, of a slave, the last known end of its master's log.

    `blocked`: why the file cannot be written at present; `term`: of this store as a master, or of the master that it follows.
    """

    def __init__(self, context: ServiceContext, after_note: Callable[[], None] = lambda: None) -> None:
        """`after_note` is called by the notes' thread, after each note."""
        memory = context.memory
        self._control = memory.control
        self._role = ROLE_NAMES[memory.identity.role]
        self._dispatch_at = DISPATCH_AT[memory.identity.dispatch_at]  # not from the file, which may be unreadable now
        self._file = ReplicationStateFile(context.store.root)
        self._written = self._file.read().state
        self.blocked = BlockedReason(context.report)
        self._after_note = after_note
        self._lock = threading.Lock()
        known = self._written or ReplicationState(self._role, 0)
        self.term, self._fenced_by = known.term, known.fenced_by
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self.note()
            self._after_note()

    @property
    def known_term(self) -> int:
        """The highest term that this store knows of."""
        return max(self.term, self._fenced_by)

    @property
    def is_fenced(self) -> bool:
        """Whether a master with a higher term has replaced this one."""
        return self._fenced_by > self.term

    def follow(self, term: int) -> None:
        """Note, as a slave, the term of its master, before this returns; if that fails, `blocked` says why, and it is tried each second."""
        with self._lock:
            if term > self.term:
                self.term = term
                self._note()

    def fence(self, term: int) -> None:
        """Note, as a master, a term that another store has; like follow()."""
        with self._lock:
            if term > self._fenced_by:
                self._fenced_by = term
                self._note()

    def note(self) -> bool:
        """Write the file if its content has changed; return whether it was written."""
        with self._lock:
            return self._note()

    def _note(self) -> bool:
        is_slave = self._role == ROLE_NAMES[native.SLAVE]
        state = ReplicationState(self._role, native.load_position(self._control.confirm), self._dispatch_at,
                                 master_end=native.load(self._control.replicator, "master_end") if is_slave else 0,
                                 term=self.term, fenced_by=self._fenced_by)
        if state == self._written:
            return False
        try:
            self._file.write(state)
            failpoint("replication_noted")
        except EngineError as error:
            reason = f"how far the log is confirmed cannot be noted: {error}"
            self.blocked.set(reason, reason)
            return False
        self._written = state
        self.blocked.clear()
        return True

    def close(self) -> None:
        """Write the last note, and end the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._after_note()
        self.note()
