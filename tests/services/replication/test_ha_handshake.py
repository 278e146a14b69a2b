"""The handshake: who has the secret is known on both sides, who has not gets nothing, and nothing of it can be used again."""

from __future__ import annotations

import os

import pytest

from fix_slave import SECRET, secret_file
from pyengine.engine_config import EngineConfig
from pyengine.errors import ConfigError
from pyengine.formats import ha_wire
from pyengine.formats.ha_wire import Introduction
from pyengine.services.replication.ha_handshake import (
    HandshakeError,
    MasterHandshake,
    PlainPeers,
    Seals,
    Secret,
    SecretError,
    require_followable,
    slave_handshake,
)

MASTER = Introduction(b"m" * 16, 7, is_master=True)
SLAVE = Introduction(b"s" * 16, 5, is_master=False)


def secret_of(file: str) -> Secret:
    return Secret("/", EngineConfig(ha_secret_file=file))


@pytest.fixture
def secret(tmp_path) -> Secret:
    return secret_of(secret_file(tmp_path))


class Wire:
    """Lets the two sides talk, keeps the words of both, and may change them: `change(number, words)`."""

    def __init__(self, handshake: MasterHandshake, change=lambda number, words: words) -> None:
        self.handshake, self.change = handshake, change
        self.words: list[bytes] = []
        self.unread = b""

    def say(self, words: bytes) -> bytes:
        self.words.append(words)
        return self.change(len(self.words) - 1, words)

    def exchange(self, words: bytes, size: int) -> bytes:
        if words:
            answer, rest = self.handshake.take(self.say(words))
            assert not rest
            self.unread += self.say(answer) if answer else b""
        found, self.unread = self.unread[:size], self.unread[size:]
        return found


def test_both_know_each_other_and_have_the_same_keys_afterwards(secret):
    handshake = MasterHandshake(secret, lambda: MASTER, may_be_plain=False)
    peer, seals = slave_handshake(Wire(handshake).exchange, secret.read(), SLAVE)
    assert (peer, handshake.peer, handshake.is_finished) == (MASTER, SLAVE, True)
    for sender, receiver in ((seals.out, handshake.seals.into), (handshake.seals.out, seals.into)):
        for part in (b"12345678", b"", b"x" * 1000):
            assert receiver.take(sender.sealed(part))
        part = bytearray(sender.sealed(b"report"))
        part[2] ^= 1
        assert not receiver.take(bytes(part))
    assert not handshake.seals.into.take(handshake.seals.out.sealed(b"12345678")), "what is sent back does not fit"


def test_the_secret_is_not_sent_and_each_handshake_differs(secret):
    said = []
    for _ in range(2):
        wire = Wire(MasterHandshake(secret, lambda: MASTER, may_be_plain=False))
        slave_handshake(wire.exchange, secret.read(), SLAVE)
        said.append(wire.words)
        assert SECRET.encode() not in b"".join(wire.words)
    for number in (1, 2, 3):  # HELLO is always the same
        assert said[0][number] != said[1][number]


def test_words_may_come_in_any_pieces(secret):
    handshake = MasterHandshake(secret, lambda: MASTER, may_be_plain=False)

    def exchange(words: bytes, size: int) -> bytes:
        nonlocal unread, kept
        for byte in words:
            answer, kept = handshake.take(kept + bytes([byte]))
            unread += answer
        found, unread = unread[:size], unread[size:]
        return found

    unread = kept = b""
    assert slave_handshake(exchange, secret.read(), SLAVE)[0] == MASTER and handshake.peer == SLAVE and kept == b""


def test_a_slave_with_another_secret_gets_a_number_and_nothing_else(secret, tmp_path):
    wire = Wire(MasterHandshake(secret, lambda: MASTER, may_be_plain=False))
    other = secret_of(secret_file(tmp_path, "another secret of 24 by", "other"))
    with pytest.raises(HandshakeError, match="does not have the secret of this store"):
        slave_handshake(wire.exchange, other.read(), SLAVE)
    assert wire.handshake.peer is None and not wire.handshake.is_finished
    assert [len(words) for words in wire.words] == [8, 8 + ha_wire.NONCE_BYTES, ha_wire.PROOF_BYTES]


def test_a_master_with_another_secret_is_not_followed(secret, tmp_path):
    class Believes(MasterHandshake):
        """A false master: it takes any proof."""

        def _take_proof(self, proof: bytes) -> bytes:
            return ha_wire.pack_introduction(MASTER) + os.urandom(ha_wire.MAC_BYTES)

    with pytest.raises(HandshakeError, match="cannot prove that it has the secret"):
        slave_handshake(Wire(Believes(secret, lambda: MASTER, may_be_plain=False)).exchange, secret.read(), SLAVE)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_changed_word_of_either_side_ends_the_handshake(secret, number, rng):
    for _ in range(50):
        def change(at: int, words: bytes) -> bytes:
            if at != number:
                return words
            bit = rng.randrange(len(words) * 8)
            return (int.from_bytes(words, "big") ^ 1 << bit).to_bytes(len(words), "big")

        with pytest.raises(HandshakeError):
            slave_handshake(Wire(MasterHandshake(secret, lambda: MASTER, may_be_plain=False), change).exchange, secret.read(), SLAVE)


def test_an_old_handshake_fits_no_new_one(secret):
    old = Wire(MasterHandshake(secret, lambda: MASTER, may_be_plain=False))
    slave_handshake(old.exchange, secret.read(), SLAVE)
    hello, _, proof, _ = old.words
    handshake = MasterHandshake(secret, lambda: MASTER, may_be_plain=False)
    handshake.take(hello)
    with pytest.raises(HandshakeError, match="does not have the secret"):
        handshake.take(proof)
    answers = iter((old.words[1][:8], old.words[1][8:], old.words[3]))
    with pytest.raises(HandshakeError, match="cannot prove"):
        slave_handshake(lambda words, size: next(answers), secret.read(), SLAVE)


def test_bytes_right_after_the_proof_are_left_unread_by_the_handshake(secret):
    handshake = MasterHandshake(secret, lambda: MASTER, may_be_plain=False)
    wire = Wire(handshake)

    def exchange(words: bytes, size: int) -> bytes:
        if len(words) != ha_wire.PROOF_BYTES:
            return wire.exchange(words, size)
        answer, rest = handshake.take(words + b"a report")
        assert rest == b"a report" and handshake.take(rest) == (b"", rest)
        return answer

    assert slave_handshake(exchange, secret.read(), SLAVE)[0] == MASTER


def test_a_slave_follows_no_master_whose_place_was_taken():
    require_followable(MASTER, 7)
    require_followable(MASTER, 5)
    with pytest.raises(HandshakeError, match="a master of term 7, and this store has followed one of term 8"):
        require_followable(MASTER, 8)
    with pytest.raises(HandshakeError, match="a master of a higher term has taken its place"):
        require_followable(MASTER._replace(is_fenced=True), 7)


# ---- RocketMQ's own protocol ----------------------------------------------------------


def test_a_plain_report_is_refused_unless_it_may_be_plain(secret):
    report = ha_wire.REPORT.pack(4096)
    with pytest.raises(HandshakeError, match="ha_allow_plain does not name its address"):
        MasterHandshake(secret, lambda: MASTER, may_be_plain=False).take(report)
    allowed = MasterHandshake(secret, lambda: MASTER, may_be_plain=True)
    assert allowed.take(report[:5]) == (b"", report[:5]) and not allowed.is_finished
    assert allowed.take(report) == (b"", report) and allowed.is_finished
    assert allowed.peer is None and allowed.seals == (None, None)


def test_an_offer_of_seals_is_taken_where_rocketmqs_protocol_would_be(secret):
    words = ha_wire.OFFER + ha_wire.REPORT.pack(4096)
    with pytest.raises(HandshakeError, match="ha_allow_plain does not name its address"):
        MasterHandshake(secret, lambda: MASTER, may_be_plain=False).take(words)
    handshake, kept = MasterHandshake(secret_of(""), lambda: MASTER, may_be_plain=True), b""
    for byte in words[:-1]:
        answer, kept = handshake.take(kept + bytes([byte]))
        assert answer == b"" and not handshake.is_finished
    assert handshake.take(kept + words[-1:] + b"a report") == (ha_wire.SEALED, b"a report")
    assert handshake.is_finished and handshake.peer is None
    slaves = Seals.unkeyed(is_master=False)
    assert handshake.seals.into.take(slaves.out.sealed(b"12345678")) and slaves.into.take(handshake.seals.out.sealed(b"frame"))
    assert not handshake.seals.into.take(handshake.seals.out.sealed(b"12345678")), "what is sent back does not fit"


def test_the_first_word_is_no_report_and_the_answer_no_frame():
    assert ha_wire.is_hello(ha_wire.HELLO) and int.from_bytes(ha_wire.HELLO, "big", signed=True) < 0
    assert int.from_bytes(ha_wire.OFFER, "big", signed=True) == -1, "what RocketMQ's master has before any report"
    assert ha_wire.is_hello(ha_wire.SEALED) and int.from_bytes(ha_wire.SEALED, "big", signed=True) < 0
    assert not any(ha_wire.is_hello(ha_wire.REPORT.pack(offset)) for offset in (0, 1, 1 << 40, (1 << 63) - 1))
    assert int.from_bytes(ha_wire.CHALLENGE[:8], "big", signed=True) < 0


def test_another_version_and_a_store_without_a_secret_say_so(secret):
    with pytest.raises(HandshakeError, match="another version"):
        MasterHandshake(secret, lambda: MASTER, may_be_plain=True).take(b"\xffpyhell2")
    with pytest.raises(HandshakeError, match="set ha_secret_file"):
        MasterHandshake(secret_of(""), lambda: MASTER, may_be_plain=True).take(ha_wire.HELLO)


def test_a_master_of_rocketmq_is_told_from_one_that_asks_for_a_proof(secret):
    with pytest.raises(HandshakeError, match="is it a master of RocketMQ.*ha_allow_plain"):
        slave_handshake(lambda words, size: ha_wire.HEADER.pack(0, 0)[:size], secret.read(), SLAVE)


@pytest.mark.parametrize("text, host, is_allowed", [
    ("10.0.0.7", "10.0.0.7", True), ("10.0.0.7", "10.0.0.8", False), ("10.0.0.0/24, ::1", "10.0.0.8", True),
    ("10.0.0.0/24, ::1", "::1", True), ("10.0.0.0/24", "::ffff:10.0.0.8", True), ("fe80::/10", "fe80::1%eth0", True),
    ("", "127.0.0.1", False), ("0.0.0.0/0", "", False)])
def test_addresses_and_networks_are_named(text, host, is_allowed):
    assert (host in PlainPeers(EngineConfig(ha_allow_plain=text))) is is_allowed


@pytest.mark.parametrize("text", ["localhost", "10.0.0.1/8", "10.0.0.1;10.0.0.2"])
def test_a_wrong_address_in_ha_allow_plain_is_refused_with_the_settings(text):
    with pytest.raises(ConfigError, match="ha_allow_plain.*give addresses and networks"):
        EngineConfig(ha_allow_plain=text)


# ---- the file -------------------------------------------------------------------------


def test_a_secret_may_end_with_a_line_end(tmp_path):
    assert secret_of(secret_file(tmp_path)).read() == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_may_use_is_refused(tmp_path, mode):
    file = secret_file(tmp_path)
    os.chmod(file, mode)
    with pytest.raises(SecretError, match=f"mode {mode:04o}.*chmod 600"):
        secret_of(file).read()


@pytest.mark.parametrize("content", ["", "short", " " * 40, "x" * 5000])
def test_a_file_that_holds_no_secret_is_refused(tmp_path, content):
    with pytest.raises(SecretError, match="holds no secret"):
        secret_of(secret_file(tmp_path, content)).read()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(SecretError, match=f"{file}.*ha_secret_file"):
            secret_of(str(file)).read()


@pytest.mark.root
def test_a_secret_of_another_user_is_refused(tmp_path):
    file = secret_file(tmp_path)
    os.chown(file, 12345, 12345)
    with pytest.raises(SecretError, match="belongs to the user 12345"):
        secret_of(file).read()


def test_a_relative_path_lies_in_the_store(tmp_path):
    secret_file(tmp_path)
    assert Secret(tmp_path, EngineConfig(ha_secret_file="ha.secret")).read() == SECRET.encode()
