"""Repeats the puts of a manifest through the real writer, with the manifest's clock; run by scripts/replay_manifest.sh.

A manifest records the puts into a RocketMQ store and their answers: JSON (.json or .json.gz) in which `config` has
RocketMQ's settings and `puts` a row for each put. The resulting commit log equals RocketMQ's, except for the filler after
blank records; tests and scripts/replay_manifest.sh depend on that.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.main import Guarded
from pyengine.cli.output import GivenPath, Reply, answers, set_option
from pyengine.client.outgoing import RawMessage
from pyengine.engine_config import MODES
from pyengine.errors import ExitCode, FormatError, UsageError
from pyengine.formats.record import BatchMember, decode_batch, encode_batch
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.results import PutResult

if TYPE_CHECKING:
    from pyengine.client.producer import Producer

DIFFERENCES_SHOWN = 20


class GuardedCommand(Guarded, click.Command):
    """A command of its own whose errors are sentences and exit codes, as those of `pyengine`."""


@dataclass(frozen=True, slots=True)
class Expected:
    """RocketMQ's answer. For a refused put all fields but `status` are None."""

    status: str
    physical_offset: int | None = None
    size_bytes: int | None = None
    queue_offset: int | None = None
    store_timestamp_ms: int | None = None
    msg_id: str | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Put(RawMessage):
    """One put of a manifest. `body` of a batch is its client encoding; `has_body` False: it is absent, which RocketMQ stores as empty."""

    number: int = 0
    is_batch: bool = False
    has_body: bool = True
    expected: Expected = Expected("?")


@dataclass(frozen=True, slots=True)
class Manifest:
    """`config` has RocketMQ's names; `document` is the whole manifest with its facts and records."""

    path: Path
    config: Mapping[str, str]
    puts: tuple[Put, ...]
    document: Mapping[str, Any]


def load_manifest(path: Path) -> Manifest:
    """Read and decode a manifest; UsageError says what is wrong with it."""
    try:
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        why = error.strerror or error if isinstance(error, OSError) else error  # BadGzipFile is an OSError without a number
        raise UsageError(f"{path} cannot be read as a manifest: {why}") from error
    if not isinstance(document, dict) or not isinstance(document.get("puts"), list) or "config" not in document:
        raise UsageError(f"{path} is not a manifest: it needs the fields `config` and `puts`")
    puts: list[Put] = []
    for number, row in enumerate(document["puts"]):
        try:
            puts.append(decode_put(number, row))
        except PARSE_ERRORS as error:
            raise UsageError(f"{path}: put {number} cannot be decoded: {type(error).__name__}: {error}") from error
    return Manifest(path, document["config"], tuple(puts), document)


def decode_put(number: int, row: Mapping[str, Any]) -> Put:
    """Decode one row of `puts`; ValueError if the body does not have the length and hash in the row."""
    body = _body(row)
    if len(body) != row["bodyLen"] or hashlib.sha256(body).hexdigest() != row["bodySha"]:
        raise ValueError(f"the body has {len(body)} bytes, the row says {row['bodyLen']} and another hash")
    return Put(
        number=number,
        is_batch="props" not in row,  # RocketMQ's answer holds the stored text of single messages only
        topic=row["topic"],
        queue_id=row["queueId"],
        body=body,
        has_body=not row.get("bodyNull"),
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


def _body(row: Mapping[str, Any]) -> bytes:
    if row.get("bodyNull"):
        return b""
    if "subs" in row:
        return encode_batch(
            BatchMember(base64.b64decode(sub["bodyB64"], validate=True), sub["flag"], sub["props"]) for sub in row["subs"]
        )
    if "bodyB64" in row:
        return base64.b64decode(row["bodyB64"], validate=True)
    if "bodyPattern" in row:
        pattern = row["bodyPattern"]
        return pattern_body(pattern["start"], pattern["step"], pattern["shift"], pattern["len"])
    return bytes(row["bodyLen"])  # a long body that is not in the row consists of zeros; the caller checks the hash


def pattern_body(start: int, step: int, shift: int, length: int) -> bytes:
    """Return a body whose byte i is start + (i >> shift) * step, modulo 256."""
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


@dataclass
class ReplayReport:
    """The result of a replay. `differences` are sentences, empty if every answer equals RocketMQ's."""

    puts: int = 0
    stored: int = 0
    refused: int = 0
    records: int = 0
    end_offset: int = 0
    differences: list[str] = field(default_factory=list)


def settings_of(manifest: Manifest, mode: str | None) -> dict[str, str]:
    """Return the settings of a replay: the manifest's, overridden by the mode's, and replay_clock."""
    return {**manifest.config, **(MODES[mode] if mode else {}), "replay_clock": "true"}


def replay_puts(manifest: Manifest, producer: Producer, advance: Callable[[int], None] = lambda count: None) -> ReplayReport:
    """Put every row in order and compare each answer with RocketMQ's."""
    report = ReplayReport()
    for put in manifest.puts:
        result = send(producer, put)
        report.puts += 1
        report.differences += compare(put, result)
        if result.ok:
            report.stored += 1
            report.records += result.count
            report.end_offset = max(report.end_offset, result.physical_offset + result.size_bytes)
        else:
            report.refused += 1
        advance(report.puts)
    return report


def send(producer: Producer, put: Put) -> PutResult:
    """Put one row with all its inputs, including its clock."""
    if put.is_batch:
        return producer.put_batch_raw(replace(put, body=b""), _members(put.body))
    return producer.put_raw(put)


def _members(encoded: bytes) -> list[BatchMember]:
    """Decode the members of a batch; another body becomes one member, because RocketMQ checks the length first."""
    try:
        return decode_batch(encoded)
    except FormatError:
        return [BatchMember(encoded)]


def compare(put: Put, result: PutResult) -> list[str]:
    """Return how an answer differs from RocketMQ's, for the fields that RocketMQ's has."""
    if result.status.name != put.expected.status:
        why = f" ({result.reason})" if result.reason else ""
        return [f"put {put.number}: status {result.status.name}{why}, RocketMQ answered {put.expected.status}"]
    return [
        f"put {put.number}: {name} is {getattr(result, name)}, RocketMQ's is {value}"
        for name, value in asdict(put.expected).items()
        if name != "status" and value is not None and getattr(result, name) != value
    ]


@contextlib.contextmanager
def engine_for(root: Path, settings: dict[str, str]) -> Iterator[Producer]:
    """Yield a producer of the engine that runs at `root`; without one start an engine for the replay and stop it afterwards."""
    import pyengine
    from pyengine.ipc.store_lock import living_kinds

    with contextlib.ExitStack() as stack:
        if not living_kinds(root):
            if (root / "commitlog").is_dir() and any((root / "commitlog").iterdir()):
                raise UsageError(f"{root} holds a store already: a replay needs a new one, or a running engine")
            stack.enter_context(pyengine.Engine(root, **settings))
        yield stack.enter_context(pyengine.connect(root, refusals="return"))


@click.command(cls=GuardedCommand)
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("store", type=GivenPath(path_type=Path))
@click.option("--mode", type=click.Choice(list(MODES)), help="Write path. Default: the manifest's.")
@set_option
@answers
def replay(manifest: Path, store: Path, mode: str | None, settings: dict[str, str]) -> Reply:
    """Repeat recorded puts; compare the answers with RocketMQ's. The clock is that of the manifest.

    MANIFEST records the puts into a RocketMQ store and their answers: JSON, or .json.gz. The commit
    log and the queues equal RocketMQ's byte for byte. If an engine runs at STORE (started with --set
    replay_clock=true) the command uses it and leaves it running; otherwise it makes STORE, runs it and
    stops it. Exit code 1 if an answer differs.

    \b
    Example:
      scripts/replay_manifest.sh basic.json.gz STORE sync --json
    """
    loaded = load_manifest(manifest)
    with engine_for(store, {**settings_of(loaded, mode), **settings}) as producer:
        report = replay_puts(loaded, producer)
    return Reply(asdict(report), lambda: _print(report), ExitCode.FAILED if report.differences else ExitCode.OK)


def _print(report: ReplayReport) -> None:
    output.write_facts([
        ("puts", report.puts), ("stored", report.stored), ("refused", report.refused), ("records", report.records),
        ("end of the log", report.end_offset), ("different from RocketMQ", len(report.differences))])
    for sentence in report.differences[:DIFFERENCES_SHOWN]:
        click.echo(sentence, err=True)


if __name__ == "__main__":
    replay()
