"""Replay manifests: the puts that a RocketMQ store got, with their clock and its answers.

A manifest is JSON (.json, or packed as .json.gz): `config` holds RocketMQ's settings, `puts` one row
for each put. Rows are decoded here into Put values and nothing is sent anywhere.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.errors import UsageError
from pyengine.formats.record import BatchMember, encode_batch


@dataclass(frozen=True, slots=True)
class Expected:
    """RocketMQ's answer. Fields beyond `status` are None where it gave none (a refused put)."""

    status: str
    physical_offset: int | None = None
    size_bytes: int | None = None
    queue_offset: int | None = None
    store_timestamp_ms: int | None = None
    msg_id: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """One put of a manifest. `body` of a batch is its client encoding; None is RocketMQ's absent body."""

    number: int
    is_batch: bool
    topic: str
    queue_id: int
    body: bytes | None
    properties_text: str
    flag: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: str
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    wait_store_msg_ok: bool
    delay_level: int
    clock_ms: int
    expected: Expected


@dataclass(frozen=True, slots=True)
class Manifest:
    """`config` has RocketMQ's names; `document` is the whole manifest with its facts and records."""

    path: Path
    config: Mapping[str, str]
    puts: tuple[Put, ...]
    document: Mapping[str, Any]


def load_manifest(path: Path) -> Manifest:
    """Reads and decodes a manifest; UsageError says what is wrong with it."""
    try:
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a manifest: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("puts"), list) or "config" not in document:
        raise UsageError(f"{path} is no manifest: it needs the fields `config` and `puts`")
    puts: list[Put] = []
    for number, row in enumerate(document["puts"]):
        try:
            puts.append(decode_put(number, row))
        except (KeyError, TypeError, binascii.Error, ValueError) as error:
            raise UsageError(f"{path}: put {number} cannot be decoded: {type(error).__name__}: {error}") from error
    return Manifest(path, document["config"], tuple(puts), document)


def decode_put(number: int, row: Mapping[str, Any]) -> Put:
    """One row of `puts`; ValueError where the body does not have the length and hash that the row gives."""
    # A batch row has no `props`: RocketMQ's answer holds the stored text of single messages only.
    is_batch = "props" not in row
    body = _body(row)
    stored = body or b""
    if len(stored) != row["bodyLen"] or hashlib.sha256(stored).hexdigest() != row["bodySha"]:
        raise ValueError(f"the body has {len(stored)} bytes, the row says {row['bodyLen']} and another hash")
    return Put(
        number=number,
        is_batch=is_batch,
        topic=row["topic"],
        queue_id=row["queueId"],
        body=body,
        properties_text=row["propsIn"],
        flag=row["flag"],
        sys_flag=row["sysFlagIn"],
        born_timestamp_ms=row["born"],
        born_host=row["bornHost"],
        store_host=row["storeHost"],
        reconsume_times=row["reconsume"],
        prepared_transaction_offset=row["prepared"],
        wait_store_msg_ok=row["waitStoreMsgOK"],
        delay_level=row["delayLevel"],
        clock_ms=row["clock"],
        expected=_expected(row),
    )


def _body(row: Mapping[str, Any]) -> bytes | None:
    if row.get("bodyNull"):
        return None
    if "subs" in row:
        return encode_batch(
            BatchMember(base64.b64decode(sub["bodyB64"], validate=True), sub["flag"], sub["props"]) for sub in row["subs"]
        )
    if "bodyB64" in row:
        return base64.b64decode(row["bodyB64"], validate=True)
    if "bodyPattern" in row:
        pattern = row["bodyPattern"]
        return pattern_body(pattern["start"], pattern["step"], pattern["shift"], pattern["len"])
    return bytes(row["bodyLen"])  # a long body without either is zeros; the hash is checked


def pattern_body(start: int, step: int, shift: int, length: int) -> bytes:
    """Byte i is start + (i >> shift) * step, modulo 256."""
    run = 1 << shift
    period = b"".join(bytes([(start + block * step) & 0xFF]) * run for block in range(256))
    return (period * (length // len(period) + 1))[:length]


def _expected(row: Mapping[str, Any]) -> Expected:
    if "append" not in row:
        return Expected(row["status"])
    return Expected(
        status=row["status"],
        physical_offset=row["phy"],
        size_bytes=row["size"],
        queue_offset=row["queueOffset"],
        store_timestamp_ms=row["storeTs"],
        msg_id=row["msgId"],
        count=row["msgNum"],
    )
