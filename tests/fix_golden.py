"""Golden stores: written by the real RocketMQ 4.9.8, with what it reads back from them.

`golden(name)` gives a fresh unpacked copy with its manifest and verify document.
`compare_inspect(doc, verify)` lists where an `inspect` document differs from a verify
document. tests/golden/README.md tells what the files hold.
"""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
RECIPES = tuple(sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.glob("*.tar.gz")))
HALTED = tuple(name for name in RECIPES if name.startswith("abnormal") or name == "pool-halt")
CLEAN = tuple(name for name in RECIPES if name not in HALTED)

# One of each shape: a log that rolls, transactions, delays, light queues, several index files, addresses of IPv6, a cleaned log,
# a log with an extension file, a log that a crash has left.
USUAL = ("roll", "tx", "delay", "lmq", "multi-index", "ipv6", "cleaned", "cqext", "abnormal-multi", "abnormal-garbled")


def usual(names: Iterable[Any], wanted: Collection[Any] = USUAL, rest: pytest.MarkDecorator = pytest.mark.long) -> list[Any]:
    """What to parametrize a test with, recipes or others: what is not `wanted` runs with --long only, or where `rest` says."""
    return [name if name in wanted else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=rest) for name in names]


SIZE_SETTINGS = {
    "mappedFileSizeCommitLog": "mapped_file_size_commit_log_bytes",
    "mappedFileSizeConsumeQueue": "mapped_file_size_consume_queue_bytes",
    "mappedFileSizeConsumeQueueExt": "mapped_file_size_consume_queue_ext_bytes",
    "maxHashSlotNum": "max_hash_slot_num",
    "maxIndexNum": "max_index_num",
}


def load_manifest(name: str) -> dict[str, Any]:
    """Return what was put, with which settings and clock, and what the real store answered."""
    return _load(GOLDEN / f"{name}.json.gz")


def load_verify(name: str) -> dict[str, Any]:
    """Return what the real store reads from the recipe's folder."""
    return _load(GOLDEN / f"{name}.verify.json.gz")


def size_settings(config: dict[str, str]) -> dict[str, int]:
    """The sizes of a manifest's `config` under our names."""
    return {ours: int(config[theirs]) for theirs, ours in SIZE_SETTINGS.items() if theirs in config}


def unpack(name: str, folder: Path) -> Path:
    """Unpack a recipe into `folder` and return the store's root. File times are kept to the nanosecond:
    RocketMQ picks queue files by them."""
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        members = archive.getmembers()
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4; the archives are our own
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder, members)
    for member in reversed(members):  # folders after what they hold
        nanoseconds = int(Decimal(member.pax_headers.get("mtime", str(member.mtime))) * 1_000_000_000)
        os.utime(folder / member.name, ns=(nanoseconds, nanoseconds))
    return folder / name


@dataclass
class GoldenStore:
    """One unpacked recipe; the documents are read when asked for."""

    name: str
    root: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return load_manifest(self.name)

    @cached_property
    def verify(self) -> dict[str, Any]:
        return load_verify(self.name)

    @property
    def sizes(self) -> dict[str, int]:
        return size_settings(self.manifest["config"])


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str], GoldenStore]:
    """golden("roll") -> a copy of that store that the test may change."""

    def make(name: str) -> GoldenStore:
        folder = tmp_path / f"golden-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return GoldenStore(name, unpack(name, folder))

    return make


def compare_inspect(
    doc: dict[str, Any],
    verify: dict[str, Any],
    *,
    more_allowed: Collection[str] = (),
    ignore: Collection[str] = (),
    limit: int = 20,
) -> list[str]:
    """Differences between an inspect document and a golden verify document, as sentences; empty when they agree.

    Parts: positions, records, queues, messages, queries, byTime. In a part named in
    `more_allowed` the inspect document may hold more than RocketMQ does, never less;
    parts in `ignore` are not looked at. At most `limit` sentences per part.
    """
    differences: list[str] = []
    for part, compare in _PARTS.items():
        if part in ignore:
            continue
        found = [f"{part}: {text}" for text in compare(doc, verify, part in more_allowed)]
        differences += found[:limit]
        if len(found) > limit:
            differences.append(f"{part}: and {len(found) - limit} more")
    return differences


def _positions(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    for name in ("minPhy", "maxPhy", "flushedWhere", "committedWhere"):
        ours, theirs = doc["facts"].get(name), verify["facts"][name]
        if ours != theirs and not (more and name != "minPhy" and ours > theirs):
            yield f"{name} is {ours}, not {theirs}"


def _records(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    return _lists(doc["records"], verify["records"], more, lambda record: f"record at {record['phy']}")


def _messages(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    def key(message: dict) -> tuple:
        return message.get("queue", message["topic"]), message["queueId"], message.get("phy"), message.get("at")

    if not more:
        yield from _lists(doc["messages"], verify["messages"], False, lambda message: f"message {key(message)}")
        return
    ours = {key(message): message for message in doc["messages"]}
    for message in verify["messages"]:
        yield from _same(f"message {key(message)}", ours.get(key(message)), message)


def _queues(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    def table(facts: dict) -> dict:
        return {(queue["topic"], queue["queueId"]): queue for queue in facts["queues"]}

    ours, theirs = table(doc["facts"]), table(verify["facts"])
    for key in theirs:
        if key not in ours:
            yield f"{key} is missing"
        elif not more:
            yield from _same(str(key), ours[key], theirs[key])
        else:
            present = {json.dumps(entry) for entry in ours[key]["entries"]}
            lost = [entry for entry in theirs[key]["entries"] if json.dumps(entry) not in present]
            real = [entry for entry in lost if entry != [0, 0x7FFFFFFF, 0]]
            if real:
                yield f"{key} lacks entries {real[:5]}"
    if not more:
        yield from (f"{key} is not in RocketMQ's" for key in ours if key not in theirs)


def _queries(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    """Compared as sets: RocketMQ's order is by offset, and it may name one message twice."""

    def table(document: dict) -> dict:
        return {(query["topic"], query["key"]): set(query["phys"]) for query in document["queries"]}

    def last(document: dict) -> dict:
        return {(query["topic"], query["key"]): (query["lastTs"], query["lastPhy"]) for query in document["queries"]}

    ours, theirs = table(doc), table(verify)
    for key, offsets in theirs.items():
        found = ours.get(key)
        if found is None:
            yield f"{key} is missing"
        elif offsets - found or (found - offsets and not more):
            yield f"{key} gives {sorted(found)}, not {sorted(offsets)}"
        elif not more and last(doc)[key] != last(verify)[key]:
            yield f"{key} names the index's end {last(doc)[key]}, not {last(verify)[key]}"
    if not more:
        yield from (f"{key} is not in RocketMQ's" for key in ours if key not in theirs)


def _by_time(doc: dict, verify: dict, more: bool) -> Iterable[str]:
    def key(sample: dict) -> tuple:
        return sample["topic"], sample["queueId"], sample.get("ts", "edges")

    if more:
        ours = {key(sample): sample for sample in doc["byTime"]}
        for sample in verify["byTime"]:
            if key(sample) in ours:
                yield from _same(str(key(sample)), ours[key(sample)], sample)
        return
    yield from _lists(doc["byTime"], verify["byTime"], False, lambda sample: str(key(sample)))


def _lists(ours: list[dict], theirs: list[dict], more: bool, name: Callable[[dict], str]) -> Iterable[str]:
    """Element by element; with `more`, ours may go on where theirs ends."""
    for mine, other in zip(ours, theirs):
        yield from _same(name(other), mine, other)
    if len(ours) < len(theirs):
        yield f"only {len(ours)} of {len(theirs)}, the first missing is {name(theirs[len(ours)])}"
    elif len(ours) > len(theirs) and not more:
        yield f"{len(ours)} instead of {len(theirs)}, the first extra is {name(ours[len(theirs)])}"


def _same(what: str, ours: Any, theirs: Any) -> Iterable[str]:
    if ours == theirs:
        return
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        yield f"{what} is {_short(ours)}, not {_short(theirs)}"
        return
    for field in sorted(ours.keys() | theirs.keys()):
        if field not in ours:
            yield f"{what} has no {field}"
        elif field not in theirs:
            yield f"{what} has {field}, RocketMQ's has not"
        elif ours[field] != theirs[field]:
            yield f"{what}: {field} is {_short(ours[field])}, not {_short(theirs[field])}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


_PARTS: dict[str, Callable[[dict, dict, bool], Iterable[str]]] = {
    "positions": _positions,
    "records": _records,
    "queues": _queues,
    "messages": _messages,
    "queries": _queries,
    "byTime": _by_time,
}


def _load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)
