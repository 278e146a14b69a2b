"""Who may ask the gateway: RocketMQ's access list at the broker's ports, TLS at all of them.

The list is a `plain_acl.yml` as RocketMQ 4.9.8 reads it. A request to the broker needs the access key of an account and a
signature made with its secret (HMAC-SHA1 over the header's fields in order and the body), or comes from an address that the
list names; the rights of the account then have to cover its topic and its group. The name server asks for nothing, as
RocketMQ's. Without TLS a request that was overheard can be sent again as it is.

With TLS the first byte of a connection says whether it is one: both kinds have the same ports. Both files are looked at each
second; a new one counts for what comes afterwards. Docs: docs/gateway.md, docs/security.md.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hmac
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError, os_error_sentence
from pyengine.formats.small_file import open_private, read_small_file
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Connections, Handler, Handlers, Request
from pyengine.gateway.names import RETRY_PREFIX, TRACE_TOPIC, Address
from pyengine.gateway.wire import Frame, WireError, read_json, write_json

LOOK_S = 1.0                # between two looks at the files
LIST_BYTES_MAX = 4 << 20
KEY_CHARS_MIN = 7           # of access keys and secrets, as in RocketMQ
HANDSHAKE_S = 10.0          # a TLS handshake may take so long
TLS_FIRST_BYTE = b"\x16"    # of a handshake; a frame that began with it would be longer than any may be
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"

PUB, SUB = 1, 2
_RIGHTS = {"PUB": PUB, "SUB": SUB, "PUB|SUB": PUB | SUB, "SUB|PUB": PUB | SUB, "DENY": 0}
_ADMIN_CODES = frozenset((codes.UPDATE_AND_CREATE_TOPIC, codes.UPDATE_BROKER_CONFIG, codes.DELETE_TOPIC_IN_BROKER,
                          codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, codes.DELETE_SUBSCRIPTIONGROUP))
_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "


class AccessError(EngineError):
    """The access list or the certificate cannot be used; the text says why, and what to do."""


# ---- addresses -----------------------------------------------------------------------

Ranges = tuple[tuple[int, int], ...]  # of the 4 numbers of an IPv4 address, or of the 8 of an IPv6 one
_EVERY_ADDRESS = frozenset(("*", "*.*.*.*", "*:*:*:*:*:*:*:*"))


class Addresses:
    """A white address of the list: one, several (`10.0.0.{1,2}`, `10.0.0.1,10.0.0.2`), a range (`10.0.0-9.*`), all, or none."""

    def __init__(self, text: str | None) -> None:
        """AccessError for what is no address."""
        text = (text or "").strip()
        self._is_all = text in _EVERY_ADDRESS
        self._ranges: list[Ranges] = []
        if not text or self._is_all:
            return
        if text.endswith("}"):
            head, brace, last = text[:-1].partition("{")
            if not brace or head[-1:] not in (".", ":"):
                raise _bad_address(text)
            self._ranges = [_one_address(head + piece) for piece in last.split(",") if piece]
        elif "," in text:
            self._ranges = [_one_address(piece) for piece in text.split(",") if piece]
        else:
            self._ranges = [_range(text) if "*" in text or "-" in text else _one_address(text)]

    def match(self, host: str) -> bool:
        """Whether a client's address is one of these."""
        if self._is_all:
            return True
        numbers = _numbers(host) if self._ranges else ()
        return any(len(ranges) == len(numbers) and all(low <= number <= high for number, (low, high) in zip(numbers, ranges))
                   for ranges in self._ranges)


def _bad_address(text: str) -> AccessError:
    return AccessError(f"{text} is no address: give one, as in 10.0.0.7, several, as in 10.0.0.{{7,8}}, or a range, as in 10.0.0-9.*")


@functools.lru_cache(1024)
def _numbers(host: str) -> tuple[int, ...]:
    """The 4 or 8 numbers of an address; none of what is no address."""
    for family, size in ((socket.AF_INET, 1), (socket.AF_INET6, 2)):
        try:
            packed = socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return tuple(int.from_bytes(packed[at:at + size]) for at in range(0, len(packed), size))
    return ()


def _one_address(text: str) -> Ranges:
    numbers = _numbers(text)
    if not numbers:
        raise _bad_address(text)
    return tuple((number, number) for number in numbers)


def _range(text: str) -> Ranges:
    """`*` and `a-b` stand for one number of an address each, in IPv6 after any `::`. RocketMQ looks at the first of them alone."""
    mark, base, most = (":", 16, 0xFFFF) if ":" in text else (".", 10, 255)
    pieces = [piece.strip() for piece in text.split(mark)]
    is_open = [any(sign in piece for sign in "*-") for piece in pieces]
    numbers = _numbers(mark.join("0" if is_open[at] else piece for at, piece in enumerate(pieces)))
    if not numbers or "" in pieces[is_open.index(True):]:
        raise _bad_address(text)
    ranges = [(number, number) for number in numbers]
    for at, piece in enumerate(pieces):
        if is_open[at]:
            low, _, high = ("0", "-", f"{most:x}" if base == 16 else str(most)) if piece == "*" else piece.partition("-")
            try:
                ends = int(low, base), int(high, base)
            except ValueError:
                raise _bad_address(text) from None
            if not 0 <= ends[0] <= ends[1] <= most:
                raise _bad_address(text)
            ranges[at - len(pieces)] = ends
    return tuple(ranges)


# ---- the list ------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Account:
    access_key: str
    secret: bytes = field(repr=False)
    is_admin: bool
    topic_rights: int           # for topics that `rights` does not name
    group_rights: int
    rights: Mapping[str, int]   # by topic, and by retry topic for a group
    white: Addresses

    def fault(self, code: int, needed: Mapping[str, int]) -> str:
        """RocketMQ's sentence about the first right that is missing, empty where all are there."""
        if code in _ADMIN_CODES and not self.is_admin:
            return f"Need admin permission for request code={code}, but accessKey={self.access_key} is not"
        if self.is_admin and not self.rights:
            return ""
        for name, right in needed.items():
            is_group = name.startswith(RETRY_PREFIX)
            if not right & self.rights.get(name, self.group_rights if is_group else self.topic_rights):
                shown = f"group:{name.removeprefix(RETRY_PREFIX)}" if is_group else f"topic:{name}"
                return f"No default permission for {shown}"
        return ""


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a file says."""

    accounts: Mapping[str, _Account] = field(default_factory=dict)
    white: tuple[Addresses, ...] = ()
    version: Mapping[str, int] = field(default_factory=lambda: {"counter": 0, "timestamp": 0})


class AccessList:
    """The rules of a `plain_acl.yml`, and the check of each request by them. Until the file can be read every request is refused."""

    TROUBLE = "the access list cannot be used (a broken one changes nothing, without one every client is refused)"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._path = Path(root) / config.gateway_acl_file
        self._rules = _Rules()
        self._stamp: tuple[int, ...] = ()
        self._fault: AccessError | None = None

    def look(self) -> str:
        """Read the file where it is another than before; a sentence for the log where it was read. AccessError while it cannot
        be used: a file that is gone refuses all, and where it can be read but not be understood, what it said before counts."""
        try:
            with open_private(self._path, "the gateway's access list", "gateway_acl_file", AccessError) as file:
                stamp = _stamp(os.fstat(file.fileno()))
                content = file.read(LIST_BYTES_MAX + 1) if stamp != self._stamp else None
        except OSError as error:
            self._rules, self._stamp = _Rules(), ()
            raise AccessError(f"the access list in {self._path} cannot be read: {error.strerror} (gateway_acl_file)") from None
        if content is None:
            if self._fault is not None:
                raise self._fault
            return ""
        self._stamp = stamp
        try:
            self._rules = _read_rules(content, stamp[2] // 1_000_000)
            self._fault = None
        except AccessError as error:
            self._fault = AccessError(f"the access list in {self._path} is not used: {error}")
            raise self._fault from None
        rules = self._rules
        return f"the access list in {self._path} counts: {len(rules.accounts)} accounts, {len(rules.white)} addresses that need none"

    def guard(self, handler: Handler, report: Callable[[str, str], None]) -> Handler:
        """The handler behind the check: a request that is refused does not reach it."""
        def guarded(request: Request) -> Any:
            host = request.connection.host
            fault = self.fault(request.frame, host)
            if fault:
                report(host, f"request {request.frame.code} is refused: {fault}")
                return Answer(codes.SYSTEM_ERROR, _EXCEPTION + fault)
            return handler(request)

        return guarded

    def fault(self, frame: Frame, host: str) -> str:
        """RocketMQ's sentence about why a request from this address is refused, empty where it is not."""
        rules = self._rules
        for addresses in rules.white:
            if addresses.match(host):
                return ""
        key = frame.fields.get("AccessKey")
        if key is None:
            return "No accessKey is configured"
        account = rules.accounts.get(key)
        if account is None:
            return f"No acl config for {key}"
        if account.white.match(host):
            return ""
        if not _is_signed(frame, account.secret):
            return f"Check signature failed for accessKey={key}"
        try:
            needed = _needed(frame)
        except WireError as error:
            return str(error)
        if needed.get(TRACE_TOPIC) == PUB:
            return ""
        return account.fault(frame.code, needed)

    def handlers(self, address: Address) -> Handlers:
        """What `mqadmin clusterAclConfigVersion` asks."""
        def version(request: Request) -> Answer:
            said = write_json(self._rules.version).decode()
            return Answer(fields={"version": said, "allAclFileVersion": write_json({str(self._path): self._rules.version}).decode(),
                                  "brokerName": address.broker_name, "brokerAddr": address.broker, "clusterName": address.cluster})

        return {codes.GET_BROKER_CLUSTER_ACL_INFO: version}


def _is_signed(frame: Frame, secret: bytes) -> bool:
    """Whether the frame has the signature that this secret makes. RocketMQ's client 4.9.8 signs `_UNIQUE_KEY_QUERY`, older ones
    do not, and its broker leaves it out: both are taken."""
    fields = frame.fields
    given = fields.get("Signature", "").encode("utf-8", "replace")
    names = sorted(fields.keys() - {"Signature", UNIQUE_KEY_QUERY})
    if hmac.compare_digest(signature([fields[name] for name in names], frame.body, secret), given):
        return True
    if UNIQUE_KEY_QUERY not in fields:
        return False
    names = sorted((*names, UNIQUE_KEY_QUERY))
    return hmac.compare_digest(signature([fields[name] for name in names], frame.body, secret), given)


def signature(values: list[str], body: bytes, secret: bytes) -> bytes:
    """RocketMQ's signature of a request: `values` are those of its header's fields, in the order of their names."""
    return base64.b64encode(hmac.digest(secret, "".join(values).encode("utf-8", "replace") + body, "sha1"))


def _needed(frame: Frame) -> dict[str, int]:
    """The rights that a request needs, by topic and by retry topic for a group. RocketMQ's PlainAccessValidator, but a batch needs
    its topic's as a single message does, and what goes to a retry topic that of its group."""
    code, fields = frame.code, frame.fields
    needed: dict[str, int] = {}

    def needs(topic: object, right: int) -> None:
        if isinstance(topic, str) and topic:
            needed[topic] = right

    def needs_group(group: object) -> None:
        if isinstance(group, str) and group:
            needed[RETRY_PREFIX + group] = SUB

    if code in (codes.SEND_MESSAGE, codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE):
        topic = fields.get("topic" if code == codes.SEND_MESSAGE else "b", "")
        needs(topic, SUB if topic.startswith(RETRY_PREFIX) else PUB)
    elif code == codes.CONSUMER_SEND_MSG_BACK:
        needs_group(fields.get("group"))
    elif code in (codes.PULL_MESSAGE, codes.UPDATE_CONSUMER_OFFSET):
        needs(fields.get("topic"), SUB)
        needs_group(fields.get("consumerGroup"))
    elif code == codes.QUERY_MESSAGE:
        needs(fields.get("topic"), SUB)
    elif code in (codes.UNREGISTER_CLIENT, codes.GET_CONSUMER_LIST_BY_GROUP):
        needs_group(fields.get("consumerGroup"))
    elif code == codes.HEART_BEAT:
        told = read_json(frame.body)
        for consumer in _rows(told, "consumerDataSet"):
            needs_group(consumer.get("groupName"))
            for subscription in _rows(consumer, "subscriptionDataSet"):
                needs(subscription.get("topic"), SUB)
    return needed


def _rows(told: object, name: str) -> list[dict[str, object]]:
    found = told.get(name) or [] if isinstance(told, dict) else None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise WireError(f"a heartbeat whose {name} is no list of objects")
    return found


# ---- reading the list ----------------------------------------------------------------

def _read_rules(content: bytes, changed_ms: int) -> _Rules:
    """What a plain_acl.yml says; AccessError, which names no secret, for what RocketMQ would not take either. The version of a
    file that has none is when it was changed."""
    import yaml  # by those alone who have a list

    if len(content) > LIST_BYTES_MAX:
        raise AccessError(f"it is longer than {LIST_BYTES_MAX:,} bytes")
    try:
        told = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:  # its text may hold a piece of the file, and that a secret
        mark = getattr(error, "problem_mark", None)
        raise AccessError("it is no YAML" + (f" from line {mark.line + 1}, column {mark.column + 1} on" if mark else "")) from None
    except (ValueError, RecursionError):
        raise AccessError("it is no YAML that can be read") from None
    if not isinstance(told, dict) or not told:
        raise AccessError("it is empty: give it `accounts`, `globalWhiteRemoteAddresses`, or both")
    accounts: dict[str, _Account] = {}
    for number, row in enumerate(_list(told, "accounts"), 1):
        if not isinstance(row, dict):
            raise AccessError(f"its account {number} is no map")
        try:
            account = _read_account(row)
        except AccessError as error:
            raise AccessError(f"its account {number}: {error}") from None
        accounts.setdefault(account.access_key, account)  # of two with one key RocketMQ takes the first
    white = tuple(Addresses(_text(each, "an address")) for each in _list(told, "globalWhiteRemoteAddresses"))
    versions = _list(told, "dataVersion")
    said = versions[0] if versions and isinstance(versions[0], dict) else {}
    version = {name: value if isinstance(value := said.get(name), int) else other for name, other in (
        ("counter", 0), ("timestamp", changed_ms))}
    return _Rules(accounts, white, version)


def _read_account(row: Mapping[str, object]) -> _Account:
    key, secret = (_text(row.get(name), name) if row.get(name) is not None else "" for name in ("accessKey", "secretKey"))
    if len(key) < KEY_CHARS_MIN or len(secret) < KEY_CHARS_MIN:
        raise AccessError(f"accessKey and secretKey need {KEY_CHARS_MIN} characters or more")
    admin = row.get("admin") or False
    if isinstance(admin, str) and admin.lower() in ("true", "false"):
        admin = admin.lower() == "true"
    if not isinstance(admin, bool):
        raise AccessError(f"admin of {key} is neither true nor false")
    rights = {RETRY_PREFIX + name: right for name, right in _rights(row, "groupPerms")}
    rights.update(_rights(row, "topicPerms"))
    topic_rights, group_rights = (_RIGHTS.get(str(row.get(name)).strip(), 0) for name in ("defaultTopicPerm", "defaultGroupPerm"))
    white = row.get("whiteRemoteAddress")
    return _Account(key, secret.encode(), admin, topic_rights, group_rights, rights,
                    Addresses(None if white is None else _text(white, "whiteRemoteAddress")))


def _rights(row: Mapping[str, object], name: str) -> list[tuple[str, int]]:
    found = []
    for each in _list(row, name):
        pieces = [piece for piece in _text(each, name).split("=") if piece]
        if len(pieces) != 2:
            raise AccessError(f"{name}: {each} is not NAME=RIGHT, as in orders=PUB|SUB")
        found.append((pieces[0].strip(), _RIGHTS.get(pieces[1].strip(), 0)))  # an unknown right is DENY, as in RocketMQ
    return found


def _list(told: Mapping[str, object], name: str) -> list[object]:
    found = told.get(name) or []
    if not isinstance(found, list):
        raise AccessError(f"{name} is no list")
    return found


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise AccessError(f"{name} is no text: put it in quotes")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


# ---- TLS -----------------------------------------------------------------------------

class Door:
    """Makes each connection a TLS or a plain one by its first byte, as RocketMQ's ports do. look() has to be called first."""

    TROUBLE = "the changed certificate cannot be used; new connections get the one before"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._mode = config.gateway_tls_mode
        self._auth = config.gateway_tls_client_auth
        self._certificate, self._key, self._client_ca = (Path(root) / name if name else None for name in (
            config.gateway_tls_cert_file, config.gateway_tls_key_file, config.gateway_tls_client_ca_file))
        self._context: ssl.SSLContext | None = None
        self._stamps: list[tuple[int, ...]] = []
        self.arriving: set[_Arrival] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def is_enforcing(self) -> bool:
        """Whether plain connections are closed."""
        return self._mode == "enforcing"

    @property
    def context(self) -> ssl.SSLContext:
        """What a handshake that begins now uses."""
        assert self._context is not None
        return self._context

    def look(self) -> str:
        """Read certificate and key where they are others than before; a sentence where they were read. AccessError where they
        cannot be used."""
        assert self._certificate is not None and self._key is not None
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        try:
            stamps = [_stamp(os.stat(path)) for path in paths]
            if stamps == self._stamps:
                return ""
            open_private(self._key, "the gateway's key", "gateway_tls_key_file", AccessError).close()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(cadata=read_small_file(self._client_ca, LIST_BYTES_MAX).decode("ascii"))
            context.verify_mode = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "require": ssl.CERT_REQUIRED}[self._auth]
        except (OSError, ValueError) as error:  # SSLError is an OSError
            why = os_error_sentence(error) if isinstance(error, OSError) else str(error)
            files = ", ".join(map(str, paths))
            raise AccessError(f"the certificate in {files} cannot be used: {why} (gateway_tls_cert_file)") from None
        self._context, self._stamps = context, stamps
        return f"the certificate in {self._certificate} counts for new connections"

    def close(self) -> None:
        """Close what has not said yet what it is."""
        for task in list(self.tasks):
            task.cancel()
        for arrival in list(self.arriving):
            arrival.leave()

    def protocol(self, owner: Connections, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """The protocol of a connection that comes; `make` gives the one that it gets once it is known what it is."""
        return _Arrival(self, owner, make)


def _no_password() -> str:
    raise ValueError("the key has a password; give a key without one, which its file's mode protects")


class _Arrival(asyncio.Protocol):
    """A connection of which no byte is read yet: it counts as open, and is closed where it stays silent."""

    def __init__(self, door: Door, owner: Connections, make: Callable[[], asyncio.Protocol]) -> None:
        self._door = door
        self._owner = owner
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._peek: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early = b""           # came between the handshake and its notice
        self._is_lost = False
        self.host = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self.host = str((transport.get_extra_info("peername") or ("0.0.0.0",))[0])
        if why := self._owner.refusal(self.host):
            self._fail(why)
            return
        self._door.arriving.add(self)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._pause_again)
        idle_s = self._owner.limits.idle_s
        self._timer = loop.call_later(idle_s, self._fail, f"nothing whole came for {idle_s:g} s")
        try:  # asyncio reads from a transport's descriptor itself: this one is looked at
            self._peek = transport.get_extra_info("socket").dup()
        except OSError as error:
            self._fail(os_error_sentence(error))
            return
        loop.add_reader(self._peek, self._first_byte)

    def _pause_again(self) -> None:
        """asyncio of Python 3.11.2 begins to read right after connection_made, whatever was asked for in it."""
        if self._peek is not None and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._transport.pause_reading()

    def _first_byte(self) -> None:
        assert self._peek is not None and self._transport is not None
        try:
            first = self._peek.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            first = b""
        self._stop_looking()
        if not first:
            self.leave()
        elif first == TLS_FIRST_BYTE:
            task = asyncio.get_running_loop().create_task(self._shake_hands())
            self._door.tasks.add(task)
            task.add_done_callback(self._door.tasks.discard)
        elif self._door.is_enforcing:
            self._fail("it does not begin with TLS (gateway_tls_mode is enforcing)")
        else:
            self._go_in(self._transport)
            self._transport.resume_reading()

    async def _shake_hands(self) -> None:
        assert self._transport is not None
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._door.context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S)
        except OSError as error:  # ssl's and a timeout, too
            self._fail(f"the TLS handshake failed: {os_error_sentence(error)}")
            return
        if secured is None or self._is_lost:
            self.leave()
            return
        self._go_in(secured)

    def _go_in(self, transport: asyncio.Transport) -> None:
        self._door.arriving.discard(self)
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._stop_looking()
        self._door.arriving.discard(self)

    def _fail(self, why: str) -> None:
        self._owner.report(self.host, f"a connection is closed: {why}")
        self.leave()

    def leave(self) -> None:
        """Close it."""
        self._stop_looking()
        self._door.arriving.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._peek is not None:
            asyncio.get_running_loop().remove_reader(self._peek)
            self._peek.close()
            self._peek = None
