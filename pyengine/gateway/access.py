"""Access control of the gateway: RocketMQ's access list at the broker's ports, TLS at all ports.

The list is a `plain_acl.yml` as RocketMQ 4.9.8 reads it. A request to the broker needs the access key of an account and a
signature with its secret (HMAC-SHA1 over the header's fields in order and the body), or comes from an address in the
list; the account's rights must cover its topic and its group. The name server needs no key, as in RocketMQ. Without TLS an
overheard request can be replayed.

TLS and plain connections use the same ports: the first byte of a connection tells them apart. Both files are checked every
second; a new one applies to later requests and connections. Docs: docs/gateway.md, docs/security.md.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import hmac
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError, os_error_sentence
from pyengine.events import Event, Report
from pyengine.formats.small_file import open_private, read_small_file
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Connections, Handler, Handlers, Request, TurnExecutor
from pyengine.gateway.names import RETRY_PREFIX, TRACE_TOPIC, Address
from pyengine.gateway.wire import Frame, WireError, read_json, write_json
from pyengine.storage.config_table import LOCK_MODE, exclusive
from pyengine.storage.durable_writes import write_config

RELOAD_INTERVAL_S = 1.0     # between two checks of the files
LIST_BYTES_MAX = 4 << 20
KEY_CHARS_MIN = 7           # of access keys and secrets, as in RocketMQ
HANDSHAKE_S = 10.0          # longest TLS handshake
TLS_FIRST_BYTE = b"\x16"    # of a handshake; a frame that begins with it would exceed the largest length
UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"
_WHITE_ADDRESS = re.compile(r"(?:[^,{]|\{[^}]*\}?)+")  # the comma in `10.0.0.{1,2}` separates no addresses

PUB, SUB = 1, 2
_RIGHTS = {"PUB": PUB, "SUB": SUB, "PUB|SUB": PUB | SUB, "SUB|PUB": PUB | SUB, "DENY": 0}
_LIST_CODES = frozenset((codes.UPDATE_AND_CREATE_ACL_CONFIG, codes.DELETE_ACL_CONFIG, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG))
_ADMIN_CODES = frozenset((codes.UPDATE_AND_CREATE_TOPIC, codes.UPDATE_BROKER_CONFIG, codes.DELETE_TOPIC_IN_BROKER,
                          codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, codes.DELETE_SUBSCRIPTIONGROUP)) | _LIST_CODES
_REPLY_CODES = frozenset((codes.SEND_REPLY_MESSAGE, codes.SEND_REPLY_MESSAGE_V2))
_SEND_CODES = frozenset((codes.SEND_MESSAGE, codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE)) | _REPLY_CODES
REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"  # of a cluster's topic for replies
NOTHING = "null"            # for an absent field, in RocketMQ's sentences
_EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "


class AccessError(EngineError):
    """The access list or the certificate cannot be used; the text says why, and what to do."""


# ---- addresses -----------------------------------------------------------------------

Ranges = tuple[tuple[int, int], ...]  # of the 4 numbers of an IPv4 address, or of the 8 of an IPv6 one
_EVERY_ADDRESS = frozenset(("*", "*.*.*.*", "*:*:*:*:*:*:*:*"))


class Addresses:
    """A white address of the list: one, several (`10.0.0.{1,2}`, `10.0.0.1,10.0.0.2`), a range (`10.0.0-9.*`), all, or none."""

    def __init__(self, text: str | None) -> None:
        """Parse an address; AccessError if it is none."""
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
        if self._is_all:
            return True
        numbers = _numbers(host) if self._ranges else ()
        return any(len(ranges) == len(numbers) and all(low <= number <= high for number, (low, high) in zip(numbers, ranges))
                   for ranges in self._ranges)


def _bad_address(text: str) -> AccessError:
    return AccessError(f"{text} is not an address: give one, as in 10.0.0.7, several, as in 10.0.0.{{7,8}}, or a range, as in 10.0.0-9.*")


@functools.lru_cache(1024)
def _numbers(host: str) -> tuple[int, ...]:
    """Return the 4 or 8 numbers of an address; () for any other text."""
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
    """Parse a range: `*` and `a-b` each stand for one number of an address, in IPv6 after any `::`. RocketMQ uses only the first."""
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
        """Return RocketMQ's sentence about the first missing right, "" if the account has all."""
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
    accounts: Mapping[str, _Account] = field(default_factory=dict)
    white: tuple[Addresses, ...] = ()
    version: Mapping[str, int] = field(default_factory=lambda: {"counter": 0, "timestamp": 0})


class AccessList:
    """Checks each request by the rules of a `plain_acl.yml`; it refuses every request until the file can be read."""

    FAILURE = "the access list cannot be used (a broken one changes nothing, without one every client is refused)"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._path = Path(root) / config.gateway_acl_file
        self._rules = _Rules()
        self._stamp: tuple[int, ...] = ()
        self._fault: AccessError | None = None
        self._lock = threading.RLock()

    def reload(self) -> str:
        """Read the file if it has changed; return a sentence for the log if it was read. AccessError while it cannot be used.

        Without a readable file all requests are refused; with one that cannot be parsed the previous rules apply."""
        with self._lock:
            return self._reload()

    def _reload(self) -> str:
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
        """Return a handler that checks each request, and calls the given one for those that are allowed."""
        def guarded(request: Request) -> Any:
            host = request.connection.host
            fault = self.fault(request.frame, host)
            if fault:
                report(host, f"request {request.frame.code} is refused: {fault}")
                return Answer(codes.SYSTEM_ERROR, _EXCEPTION + fault)
            return handler(request)

        return guarded

    def fault(self, frame: Frame, host: str) -> str:
        """Return RocketMQ's sentence why a request from this address is refused, "" if it is allowed."""
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
        if account.white.match(host) and (account.is_admin or frame.code not in _LIST_CODES):
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

    def change(self, edit: Callable[[dict[str, Any]], None]) -> str:
        """Change the file durably and apply it before this returns; return reload()'s sentence. `edit` changes the document.

        AccessError if the new content would be wrong, or the present one cannot be parsed; also exceptions of `edit`. The file does
        not change then. DiskFullError, DiskError or FlushError.
        """
        path = Path(os.path.realpath(self._path))
        with exclusive(path), self._lock:
            try:
                with open_private(path, "the gateway's access list", "gateway_acl_file", AccessError) as file:
                    content = file.read(LIST_BYTES_MAX + 1)
            except OSError as error:
                raise AccessError(f"the access list in {path} cannot be read: {error.strerror} (gateway_acl_file)") from None
            document = _document(content)
            changed = copy.deepcopy(document)
            edit(changed)
            versions = _list(changed, "dataVersion")
            version = versions[0] if versions and isinstance(versions[0], dict) else {}
            changed["dataVersion"] = [version | {"counter": _number(version.get("counter")) + 1,
                                                 "timestamp": time.time_ns() // 1_000_000}, *versions[1:]]
            new = _rewritten(content, document, changed)
            _read_rules(new, 0)
            write_config(path, new, keep_backup=False, mode=LOCK_MODE)
            return self._reload()

    def handlers(self, address: Address, executor: TurnExecutor, report: Report) -> Handlers:
        """Return handlers for mqadmin's clusterAclConfigVersion, updateAclConfig, deleteAclConfig and updateGlobalWhiteAddr."""
        async def change(request: Request, what: str, failed: int, edit: Callable[[dict[str, Any]], None]) -> Answer:
            try:
                sentence = await executor.run(self.change, edit)
            except EngineError as error:
                return Answer(failed, str(error))
            key = request.frame.fields.get("AccessKey", "without an access key")
            report(Event.GATEWAY_ACCESS, f"client {request.connection.host} ({printable(key)}) has changed {printable(what)}: {sentence}")
            return Answer()

        async def put_account(request: Request) -> Answer:
            fields = request.frame.fields
            return await change(request, f"the account {fields.get('accessKey')}", codes.UPDATE_AND_CREATE_ACL_CONFIG_FAILED,
                                lambda document: _put_account(document, fields))

        async def delete_account(request: Request) -> Answer:
            key = request.frame.fields.get("accessKey", NOTHING)
            return await change(request, f"the account {key}", codes.DELETE_ACL_CONFIG_FAILED,
                                lambda document: _delete_account(document, key))

        async def put_addresses(request: Request) -> Answer:
            text, named = request.frame.fields.get("globalWhiteAddrs"), request.frame.fields.get("aclFileFullPath")
            own = (str(self._path), os.path.abspath(self._path), os.path.realpath(self._path))
            if text is None or named and named not in own:
                return Answer(codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED,
                              f"The globalWhiteAddresses[{text or NOTHING}] has been updated failed. (the access list is {self._path})")
            return await change(request, "the addresses that need no key", codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED,
                                lambda document: document.update(globalWhiteRemoteAddresses=[
                                    piece for piece in _WHITE_ADDRESS.findall(text) if piece.strip()]))

        def version(request: Request) -> Answer:
            version_text = write_json(self._rules.version).decode()
            return Answer(fields={"version": version_text, "allAclFileVersion": write_json({str(self._path): self._rules.version}).decode(),
                                  "brokerName": address.broker_name, "brokerAddr": address.broker, "clusterName": address.cluster})

        return {codes.GET_BROKER_CLUSTER_ACL_INFO: version, codes.UPDATE_AND_CREATE_ACL_CONFIG: put_account,
                codes.DELETE_ACL_CONFIG: delete_account, codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: put_addresses}


def without_list() -> Handlers:
    """Return handlers that refuse changes of the list without `acl_enable`, with RocketMQ's codes (which has no sentence)."""
    def refuse(failed: int) -> Handler:
        return lambda request: Answer(failed, "there is no access list to change: acl_enable is off")

    return {codes.UPDATE_AND_CREATE_ACL_CONFIG: refuse(codes.UPDATE_AND_CREATE_ACL_CONFIG_FAILED),
            codes.DELETE_ACL_CONFIG: refuse(codes.DELETE_ACL_CONFIG_FAILED),
            codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: refuse(codes.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG_FAILED)}


def printable(text: str, chars_max: int = 100) -> str:
    """Return a client's text in a form that is safe for the log."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:chars_max])


def _is_signed(frame: Frame, secret: bytes) -> bool:
    """Return whether the frame has the signature of this secret. RocketMQ's client 4.9.8 signs `_UNIQUE_KEY_QUERY`, older
    ones and the broker leave it out: both are accepted."""
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
    """Return RocketMQ's signature of a request; `values` are the header's fields, in the order of their names."""
    return base64.b64encode(hmac.digest(secret, "".join(values).encode("utf-8", "replace") + body, "sha1"))


def _needed(frame: Frame) -> dict[str, int]:
    """Return the rights that a request needs, by topic and by retry topic for a group.

    As RocketMQ's PlainAccessValidator, but a batch needs the right of its topic like a single message, a message to a retry
    topic needs that of the group, and a reply needs the right of its topic, unless that is a cluster's topic for replies."""
    code, fields = frame.code, frame.fields
    needed: dict[str, int] = {}

    def needs(topic: object, right: int) -> None:
        if isinstance(topic, str) and topic:
            needed[topic] = right

    def needs_group(group: object) -> None:
        if isinstance(group, str) and group:
            needed[RETRY_PREFIX + group] = SUB

    if code in _SEND_CODES:
        topic = fields.get("topic" if code in (codes.SEND_MESSAGE, codes.SEND_REPLY_MESSAGE) else "b", "")
        if code not in _REPLY_CODES or not topic.endswith(REPLY_TOPIC_SUFFIX):
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
        document = read_json(frame.body)
        for consumer in _rows(document, "consumerDataSet"):
            needs_group(consumer.get("groupName"))
            for subscription in _rows(consumer, "subscriptionDataSet"):
                needs(subscription.get("topic"), SUB)
    return needed


def _rows(document: object, name: str) -> list[dict[str, object]]:
    found = document.get(name) or [] if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise WireError(f"a heartbeat whose {name} is not a list of objects")
    return found


# ---- reading the list ----------------------------------------------------------------

def _loader() -> Any:
    import yaml  # late: only a gateway with a list needs it

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _document(content: bytes) -> dict[str, Any]:
    """Parse a plain_acl.yml; AccessError, whose text has no secret."""
    import yaml

    if len(content) > LIST_BYTES_MAX:
        raise AccessError(f"it is longer than {LIST_BYTES_MAX:,} bytes")
    try:
        document = yaml.load(content, _loader())
    except yaml.YAMLError as error:  # its text may have a piece of the file with a secret
        mark = getattr(error, "problem_mark", None)
        raise AccessError("it is not YAML" + (f" from line {mark.line + 1}, column {mark.column + 1} on" if mark else "")) from None
    except (ValueError, RecursionError):
        raise AccessError("it is not YAML") from None
    if not isinstance(document, dict) or not document:
        raise AccessError("it is empty: give it `accounts`, `globalWhiteRemoteAddresses`, or both")
    return document


def _read_rules(content: bytes, changed_ms: int) -> _Rules:
    """Read the rules of a plain_acl.yml. AccessError, whose text has no secret, for what RocketMQ would not accept either.

    A file without a version has its time of change as version."""
    document = _document(content)
    accounts: dict[str, _Account] = {}
    for number, row in enumerate(_list(document, "accounts"), 1):
        if not isinstance(row, dict):
            raise AccessError(f"its account {number} is not a map")
        try:
            account = _read_account(row)
        except AccessError as error:
            raise AccessError(f"its account {number}: {error}") from None
        accounts.setdefault(account.access_key, account)  # RocketMQ uses the first of two with the same key
    white = tuple(Addresses(_text(each, "an address")) for each in _list(document, "globalWhiteRemoteAddresses"))
    versions = _list(document, "dataVersion")
    row = versions[0] if versions and isinstance(versions[0], dict) else {}
    version = {name: _number(row.get(name), other) for name, other in (("counter", 0), ("timestamp", changed_ms))}
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


def _list(document: Mapping[str, object], name: str) -> list[object]:
    found = document.get(name) or []
    if not isinstance(found, list):
        raise AccessError(f"{name} is not a list")
    return found


def _number(value: object, other: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else other


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise AccessError(f"{name} is not text: put it in quotes")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


# ---- changing the list ---------------------------------------------------------------

def _put_account(document: dict[str, Any], fields: Mapping[str, str]) -> None:
    """Add or change the account of a request; fields that it does not name stay. RocketMQ: updateAccessConfig."""
    key, secret = fields.get("accessKey", ""), fields.get("secretKey", "")
    if len(key) < KEY_CHARS_MIN or len(secret) < KEY_CHARS_MIN:
        raise AccessError(f"The accessKey={fields.get('accessKey', NOTHING)} and secretKey cannot be null and length should longer "
                          f"than {KEY_CHARS_MIN - 1}")
    if any("\ud800" <= sign <= "\udfff" for text in fields.values() for sign in text):
        raise AccessError("a field has half a surrogate pair, which no file can hold")
    lists = {name: fields[name].split(",") for name in ("topicPerms", "groupPerms") if name in fields}
    for each in (one for rights in lists.values() for one in rights):
        pieces = [piece for piece in each.split("=") if piece]
        if len(pieces) != 2:
            raise AccessError(f"Parse Resource format error for {each}.\nThe expected resource format is 'Res=Perm'. "
                              "For example: topicA=SUB")
        if pieces[1].strip() not in _RIGHTS:
            raise AccessError(f"Parse resource permission error for {each}.\nThe expected permissions are 'SUB' or 'PUB' or "
                              "'SUB|PUB' or 'PUB|SUB'.")
    accounts: list[Any] = _list(document, "accounts")
    document["accounts"] = accounts
    at = _place_of(accounts, key)
    if at < 0:
        accounts.append({})
    white = {name: fields[name] for name in ("whiteRemoteAddress",) if name in fields}
    rights = {name: fields[name] for name in ("defaultTopicPerm", "defaultGroupPerm") if fields.get(name)}
    accounts[at].update({"accessKey": key, "secretKey": secret, **white, "admin": fields.get("admin", "").lower() == "true",
                         **rights, **lists})


def _delete_account(document: dict[str, Any], key: str) -> None:
    accounts = _list(document, "accounts")
    at = _place_of(accounts, key)
    if at < 0:
        raise AccessError(f"The accesskey[{key}] corresponding to accessConfig has been deleted failed.")
    del accounts[at]


def _place_of(accounts: list[Any], key: str) -> int:
    """Return the position of an account in the list, -1 if it is absent."""
    return next((at for at, row in enumerate(accounts) if isinstance(row, dict) and str(row.get("accessKey")) == key), -1)


def _rewritten(content: bytes, document: dict[str, Any], changed: dict[str, Any]) -> bytes:
    """Return the file with the changes, and all else byte for byte, with comments; if its style does not allow that, the whole
    document without comments."""
    import yaml

    text = content.decode("utf-8-sig")
    edits: list[tuple[int, int, str]] = []
    try:
        _edit(text, yaml.compose(text, Loader=_loader()), document, changed, edits)
        for start, end, piece in sorted(edits, reverse=True):
            text = text[:start] + piece + text[end:]
        if yaml.load(text, _loader()) == changed:
            return text.encode()
    except (yaml.YAMLError, LookupError, ValueError):
        pass
    return cast(str, yaml.safe_dump(changed, sort_keys=False, allow_unicode=True)).encode()


def _edit(text: str, node: Any, old: Any, new: Any, edits: list[tuple[int, int, str]]) -> None:
    """Add the smallest edits (start, end, text) that change the node from `old` to `new`."""
    nodes: list[tuple[Any, Any]] = []  # (place in old and new, its node)
    if isinstance(old, dict) and isinstance(new, dict) and node.value and old.keys() <= new.keys():
        nodes = [(key.value, value) for key, value in node.value]
    elif isinstance(old, list) and isinstance(new, list) and node.value and len(old) <= len(new):
        nodes = list(enumerate(node.value))
    elif isinstance(old, list) and isinstance(new, list) and new and not node.flow_style and len(old) == len(new) + 1:
        at = next((at for at, (one, other) in enumerate(zip(old, new)) if one != other), len(new))
        dash = text.rindex("-", 0, node.value[at].start_mark.index)
        edits.append((text.rindex("\n", 0, dash) + 1, _line_end(text, _end(node.value[at])) + 1, ""))
        return
    if not nodes:
        start, end = node.start_mark.index, _end(node)
        edits.append((start, end, (" " if start == end else "") + _on_one_line(new)))
        return
    for place, child in nodes:
        if old[place] != new[place]:
            _edit(text, child, old[place], new[place], edits)
    added = [f"{name}: {_on_one_line(new[name])}" for name in new if name not in old] if isinstance(new, dict) else [
        _on_one_line(each) for each in new[len(old):]]
    if not added:
        return
    if node.flow_style:
        edits.append((_end(node.value[-1]), _end(node.value[-1]), "".join(f", {each}" for each in added)))
    else:
        begin = "\n" + " " * node.start_mark.column + ("" if isinstance(new, dict) else "- ")
        end = _line_end(text, _end(node))
        edits.append((end, end, "".join(begin + each for each in added)))


def _end(node: Any) -> int:
    """Return the end of a node's content, or of a pair's value; a block's end mark comes after the comments behind it."""
    if isinstance(node, tuple):
        node = node[1]
    is_block = isinstance(node.value, list) and node.value and not node.flow_style
    return _end(node.value[-1]) if is_block else int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _on_one_line(value: object) -> str:
    import yaml

    written = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=LIST_BYTES_MAX)
    return cast(str, written).removesuffix("\n").removesuffix("\n...")


# ---- TLS -----------------------------------------------------------------------------

class TlsHandler:
    """Makes each connection a TLS or a plain one by its first byte, like RocketMQ's HandshakeHandler; call reload() first."""

    FAILURE = "the changed certificate cannot be used; new connections get the one before"

    def __init__(self, root: str | os.PathLike[str], config: EngineConfig) -> None:
        self._mode = config.gateway_tls_mode
        self._auth = config.gateway_tls_client_auth
        self._certificate, self._key, self._client_ca = (Path(root) / name if name else None for name in (
            config.gateway_tls_cert_file, config.gateway_tls_key_file, config.gateway_tls_client_ca_file))
        self._context: ssl.SSLContext | None = None
        self._stamps: list[tuple[int, ...]] = []
        self.undecided: set[_HandshakeHandler] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def is_enforcing(self) -> bool:
        return self._mode == "enforcing"

    @property
    def context(self) -> ssl.SSLContext:
        assert self._context is not None
        return self._context

    def reload(self) -> str:
        """Read certificate and key if they have changed; return a sentence if they were read. AccessError if they cannot be
        used."""
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
        """Close the connections that have sent nothing yet."""
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.undecided):
            connection.abort()

    def protocol(self, owner: Connections, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection; `make` makes the one that follows when its kind is known."""
        return _HandshakeHandler(self, owner, make)


def _no_password() -> str:
    raise ValueError("the key has a password; give a key without one, which its file's mode protects")


class _HandshakeHandler(asyncio.Protocol):
    """A connection before its first byte: it counts as open, and is closed if it stays silent."""

    def __init__(self, tls: TlsHandler, owner: Connections, make: Callable[[], asyncio.Protocol]) -> None:
        self._tls = tls
        self._owner = owner
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._peek: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early_data = b""      # bytes that arrived between the handshake and its callback
        self._is_lost = False
        self.host = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.pause_reading()
        self.host = str((transport.get_extra_info("peername") or ("0.0.0.0",))[0])
        if why := self._owner.refusal(self.host):
            self._fail(why)
            return
        self._tls.undecided.add(self)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._pause_again)
        idle_s = self._owner.limits.idle_s
        self._timer = loop.call_later(idle_s, self._fail, f"nothing whole came for {idle_s:g} s")
        try:  # a duplicate to peek at, since asyncio reads from the transport's descriptor itself
            self._peek = transport.get_extra_info("socket").dup()
        except OSError as error:
            self._fail(os_error_sentence(error))
            return
        loop.add_reader(self._peek, self._first_byte)

    def _pause_again(self) -> None:
        """Pause reading again, since asyncio of Python 3.11.2 begins to read after connection_made in any case."""
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
        self._stop_peeking()
        if not first:
            self.abort()
        elif first == TLS_FIRST_BYTE:
            task = asyncio.get_running_loop().create_task(self._start_tls())
            self._tls.tasks.add(task)
            task.add_done_callback(self._tls.tasks.discard)
        elif self._tls.is_enforcing:
            self._fail("it does not begin with TLS (gateway_tls_mode is enforcing)")
        else:
            self._set_protocol(self._transport)
            self._transport.resume_reading()

    async def _start_tls(self) -> None:
        assert self._transport is not None
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
        self._owner.report(self.host, f"a connection is closed: {why}")
        self.abort()

    def abort(self) -> None:
        self._stop_peeking()
        self._tls.undecided.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def _stop_peeking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._peek is not None:
            asyncio.get_running_loop().remove_reader(self._peek)
            self._peek.close()
            self._peek = None
