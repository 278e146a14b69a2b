"""A `plain_acl.yml` as RocketMQ 4.9.8 reads it: the rules that it gives, and changes of it."""

from __future__ import annotations

import functools
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pyengine.errors import EngineError
from pyengine.gateway.names import RETRY_PREFIX

LIST_BYTES_MAX = 4 << 20
KEY_CHARS_MIN = 7           # of access keys and secrets, as in RocketMQ
PUB, SUB = 1, 2
_WHITE_ADDRESS = re.compile(r"(?:[^,{]|\{[^}]*\}?)+")  # the comma in `10.0.0.{1,2}` separates no addresses
NOTHING = "null"            # for an absent field, in RocketMQ's sentences
_RULES = "accounts", "globalWhiteRemoteAddresses"  # beside which RocketMQ's files have a version
_RIGHTS = {"PUB": PUB, "SUB": SUB, "PUB|SUB": PUB | SUB, "SUB|PUB": PUB | SUB, "DENY": 0}


class AccessError(EngineError):
    """The access list cannot be used; the text says why, and what to do."""


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


# ---- reading the list ----------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Account:
    """One account of the list."""

    access_key: str
    secret: bytes = field(repr=False)
    is_admin: bool
    topic_rights: int           # for topics that `rights` does not name
    group_rights: int
    rights: Mapping[str, int]   # by topic, and by retry topic for a group
    white: Addresses
    tls_only: bool = False      # this gateway's own: RocketMQ ignores the field


@dataclass(frozen=True, slots=True)
class Rules:
    """What a list says; an empty one allows nothing."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    white: tuple[Addresses, ...] = ()
    version: Mapping[str, int] = field(default_factory=lambda: {"counter": 0, "timestamp": 0})
    unknown: tuple[str, ...] = ()  # keys


def _document(content: bytes) -> dict[str, Any]:
    """Parse a plain_acl.yml; AccessError, whose text has no secret."""
    import yaml  # late: only a gateway with a list needs it

    if len(content) > LIST_BYTES_MAX:
        raise AccessError(f"it is longer than {LIST_BYTES_MAX:,} bytes")
    try:
        document = yaml.load(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:  # its text may have a piece of the file with a secret
        mark = getattr(error, "problem_mark", None)
        raise AccessError("it is not YAML" + (f" from line {mark.line + 1}, column {mark.column + 1} on" if mark else "")) from None
    except (ValueError, RecursionError):
        raise AccessError("it is not YAML") from None
    if not isinstance(document, dict) or document.keys().isdisjoint(_RULES):
        raise AccessError(f"it {'has no rules' if document else 'is empty'}: give it `accounts`, `globalWhiteRemoteAddresses`, or both")
    return document


def read_rules(content: bytes, changed_ms: int) -> Rules:
    """Read the rules of a plain_acl.yml. AccessError, whose text has no secret, for what RocketMQ would not accept either,
    and for one without rules.

    A file without a version has its time of change as version."""
    document = _document(content)
    accounts: dict[str, Account] = {}
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
    return Rules(accounts, white, version, tuple(sorted(map(str, document.keys() - {*_RULES, "dataVersion"}))))


def _read_account(row: Mapping[str, object]) -> Account:
    key, secret = (_text(row.get(name), name) if row.get(name) is not None else "" for name in ("accessKey", "secretKey"))
    if len(key) < KEY_CHARS_MIN or len(secret) < KEY_CHARS_MIN:
        raise AccessError(f"accessKey and secretKey need {KEY_CHARS_MIN} characters or more")
    admin, tls_only = (_flag(row, name, key) for name in ("admin", "tlsOnly"))
    rights = {RETRY_PREFIX + name: right for name, right in _rights(row, "groupPerms")}
    rights.update(_rights(row, "topicPerms"))
    topic_rights, group_rights = (_RIGHTS.get(str(row.get(name)).strip(), 0) for name in ("defaultTopicPerm", "defaultGroupPerm"))
    white = row.get("whiteRemoteAddress")
    return Account(key, secret.encode(), admin, topic_rights, group_rights, rights,
                    Addresses(None if white is None else _text(white, "whiteRemoteAddress")), tls_only)


def _flag(row: Mapping[str, object], name: str, key: str) -> bool:
    found = row.get(name) or False
    if isinstance(found, str) and found.lower() in ("true", "false"):
        found = found.lower() == "true"
    if not isinstance(found, bool):
        raise AccessError(f"{name} of {key} is neither true nor false")
    return found


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


# ---- changing the list ---------------------------------------------------------------

def change_list(content: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the file after `edit` has changed its document, and its version; like RocketMQ's broker without comments.

    AccessError if the file cannot be parsed, or its new content would be wrong; also exceptions of `edit`.
    """
    import yaml

    document = _document(content)
    edit(document)
    versions = _list(document, "dataVersion")
    version = versions[0] if versions and isinstance(versions[0], dict) else {}
    document["dataVersion"] = [version | {"counter": _number(version.get("counter")) + 1,
                                          "timestamp": time.time_ns() // 1_000_000}, *versions[1:]]
    new = cast(str, yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).encode()
    read_rules(new, 0)
    return new


def put_account(document: dict[str, Any], fields: Mapping[str, str]) -> None:
    """Add or change the account of a request; fields that it does not name stay. RocketMQ: updateAccessConfig."""
    key, secret = fields.get("accessKey", ""), fields.get("secretKey", "")
    if len(key) < KEY_CHARS_MIN or len(secret) < KEY_CHARS_MIN:
        raise AccessError(f"The accessKey={fields.get('accessKey', NOTHING)} and secretKey cannot be null and length should longer "
                          f"than {KEY_CHARS_MIN - 1}")
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


def delete_account(document: dict[str, Any], key: str) -> None:
    """Delete the account of a request. RocketMQ: deleteAccessConfig."""
    accounts = _list(document, "accounts")
    at = _place_of(accounts, key)
    if at < 0:
        raise AccessError(f"The accesskey[{key}] corresponding to accessConfig has been deleted failed.")
    del accounts[at]


def put_addresses(document: dict[str, Any], text: str) -> None:
    """Replace the addresses that need no key."""
    document["globalWhiteRemoteAddresses"] = [piece for piece in _WHITE_ADDRESS.findall(text) if piece.strip()]


def _place_of(accounts: list[Any], key: str) -> int:
    """Return the position of an account in the list, -1 if it is absent."""
    return next((at for at, row in enumerate(accounts) if isinstance(row, dict) and str(row.get("accessKey")) == key), -1)
