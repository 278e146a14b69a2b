"""What was promised before a power cut, and whether a tree that the cut may have left keeps it.

The promises are lines of the journal: rows of acked_producer.py and acked_consumer.py, `flushed` as the engine showed
it (mapped_pages.py), and which file the cleaner was about to delete (`tell_removals`).

    log         in sync mode each acknowledgement; in the async modes it reaches `flushed`, and what was acknowledged is
                there up to where it ends. It begins where a segment does, at none whose predecessor was not being
                deleted, and no segment is missing in the middle, neither in the tree nor after its recovery
    whole       `pyengine check` finds no error
    delayed     an acknowledged message is in the queue of its level; if delayOffset.json has passed over it, its
                delivered copy is in the log; the note never lies behind the queue's end
    afterwards  what a recovery, a cut, a rebuild or a salvage has kept is `flushed` once it has returned (after_kill.py); a log
                that was cut ends there then, and what lay behind the cut may be gone from when it was decided
    consumers   consumerOffset.json is whole, says what commit() has returned for and nothing that was not asked for; what
                was read at level `flushed` is there, so that such a group's offset needs no correction; after the
                recovery no offset lies behind its queue's end
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pyengine
from crash.acked_consumer import ANY, FLUSHED, TOPIC
from crash.audit import Audit, audit, still_kept
from faults.power_cut import Record
from pyengine.engine_config import EngineConfig
from pyengine.formats.paths import parse_segment_name, segment_name
from pyengine.storage.check.check import check
from pyengine.storage.check.report import Severity
from pyengine.storage.config import load_config
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState


def tell_removals(records: Iterable[Record], root: Path) -> Iterator[Record]:
    """The journal with a line before each removal of a segment: from then on it may be gone."""
    for record in records:
        path = PurePosixPath(record.a.decode()) if record.kind == "U" else None
        start = None if path is None or path.parent != root.resolve() / "commitlog" else parse_segment_name(path.name)
        if start is not None:
            yield Record("A", 0, 0, json.dumps({"removing": start}).encode() + b"\n", b"")
        yield record


@dataclass
class Promised:
    """Everything that had been promised at one moment."""

    rows: list[dict] = field(default_factory=list)
    flushed: int = 0
    read_to: int = 0
    removing: int = -1  # start of the last segment that was about to go
    cutting: int | None = None  # where the log is being cut on purpose
    is_cut: bool = False
    asked: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    committed: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Promised:
        found = cls()
        for line in map(_parsed, b"".join(lines).splitlines()):
            match line:
                case {"body_sha256": _}:
                    found.rows.append(line)
                case {"flushed": flushed}:
                    found.flushed = max(found.flushed, flushed)
                case {"read_to": end}:
                    found.read_to = max(found.read_to, end)
                case {"group": group, "asks": offsets}:
                    found.asked[group] |= _by_queue(offsets)
                case {"group": group, "commits": offsets}:
                    found.committed[group] |= _by_queue(offsets)
                case {"cutting": at}:
                    found.cutting = at
                case {"cut": _}:
                    found.is_cut = True
                case {"removing": start}:
                    found.removing = max(found.removing, start)
        if found.cutting is not None:
            found.flushed, found.read_to = min(found.flushed, found.cutting), min(found.read_to, found.cutting)
            found.rows = [row for row in found.rows
                          if row["physical_offset"] is not None and row["physical_offset"] < found.cutting]
        return found


@dataclass(frozen=True)
class SmallFiles:
    """What the tree says of groups and delay levels, with whatever sounds like damage."""

    groups: dict[str, dict[int, int]]
    delayed: dict[int, int]
    said: list[str]

    @classmethod
    def of(cls, tree: Path) -> SmallFiles:
        table = ConsumerOffsets(tree).table()
        delayed, said = DelayOffsets(tree).read()
        groups = {group: table.offsets.get(f"{TOPIC}@{group}", {}) for group in (FLUSHED, ANY)}
        return cls(groups, delayed, [*table.notes, *([said] if said else [])])


def judge_tree(mode: str, tree: Path, promised: Promised) -> tuple[list[str], int]:
    """(what is wrong, messages read). Recovers the tree as the next start would; a start that is refused is wrong too."""
    if not any((tree / "commitlog").glob("*")):
        is_lost = promised.flushed or promised.read_to or promised.committed or promised.rows and mode == "sync"
        return [f"LOST: {len(promised.rows)} acknowledged, {promised.flushed} flushed, {promised.read_to} read at `flushed`, "
                f"{len(promised.committed)} groups have committed, but there is no commit log"] * bool(is_lost), 0
    config = load_config(tree, environ={})
    as_the_same_directory(tree)
    before = SmallFiles.of(tree)
    wrong = before.said + _beginning(tree, config, promised)
    report = recover(MessageStore(tree, config.geometry), options=config)
    if report.state is not RecoveryState.RECOVERED:
        return [*wrong, report.sentence], 0
    end = report.end_offset
    wrong += [f"LOST: the log was {how} up to {to} and ends at {end}"
              for how, to in (("flushed", promised.flushed), ("read at `flushed`", promised.read_to)) if end < to]
    if promised.is_cut and end != promised.cutting:
        wrong.append(f"the log was cut at {promised.cutting} and ends at {end}")
    wrong += _beginning(tree, config, promised)
    rows = promised.rows
    if mode != "sync":
        rows = below(tree, rows, end)
    found = audit(tree, still_kept(tree, rows) if promised.removing >= 0 else rows, delayed_are_due=False)
    wrong += found.failures
    wrong += _delayed(tree, [row for row in rows if "waits_at" in row], before, found)
    wrong += _groups(tree, mode, promised, before)
    checked = check(MessageStore(tree, config.geometry))
    wrong += [f"check: {one.file} {one.text}" for one in checked.findings if one.severity is Severity.ERROR]
    return wrong, found.messages


def as_the_same_directory(tree: Path) -> None:
    """Let `config/engine-id` name the inode that it has in the tree: this is the directory that was cut, and no copy of it."""
    path = tree / "config" / "engine-id"
    with contextlib.suppress(FileNotFoundError, ValueError):
        document, status = json.loads(path.read_bytes()), path.stat()
        path.write_text(json.dumps(document | {"device": status.st_dev, "inode": status.st_ino}) + "\n")


@functools.cache
def _parsed(line: bytes) -> dict:
    """One line; the states of a run share most of theirs."""
    return json.loads(line)


def below(tree: Path, rows: Iterable[dict], end: int) -> list[dict]:
    """Those that lie in its log, which ends there; a delayed one where it waits.

    A row without a place in the log lies in it if its queue reaches that far: offsets are given out in the log's order.
    """
    with pyengine.open_store(tree) as reader:
        ends = {(topic, queue_id): reader.queue_range(topic, queue_id)[1]
                for topic, queue_ids in reader.topics().items() for queue_id in queue_ids}

    def is_below(row: dict) -> bool:
        at = row.get("waits_at", row["physical_offset"])
        return at < end if at is not None else row["queue_offset"] < ends.get((row["topic"], row["queue_id"]), 0)

    return [row for row in rows if is_below(row)]


def _by_queue(offsets: dict[str, int]) -> dict[int, int]:
    return {int(queue_id): offset for queue_id, offset in offsets.items()}


def _starts(tree: Path) -> list[int]:
    return sorted(start for path in (tree / "commitlog").iterdir() if (start := parse_segment_name(path.name)) is not None)


def _beginning(tree: Path, config: EngineConfig, promised: Promised) -> list[str]:
    """Return the log's first offset, and whether the log has a gap."""
    size, starts = config.geometry.mapped_file_size_commit_log_bytes, _starts(tree)
    if starts != list(range(starts[0], starts[0] + len(starts) * size, size)):
        return [f"GAP: the log has only the segments {[segment_name(start) for start in starts]}"]
    allowed = promised.removing + size if promised.removing >= 0 else 0
    if starts[0] > allowed:
        return [f"LOST: the log begins at {starts[0]}, but nothing above {allowed} was to be deleted"]
    return []


def _delayed(tree: Path, rows: Sequence[dict], before: SmallFiles, found: Audit) -> list[str]:
    starts = _starts(tree)
    wrong = [f"LOST: the delayed message is not where it waits: {row}" for row in rows
             if row["waits_at"] >= starts[0] and found.waiting.get((row["level"] - 1, row["waits_as"])) != row["body_sha256"]]
    wrong += [f"LOST: level {queue_id + 1} is noted as delivered up to {before.delayed[queue_id + 1]}, but the message "
              f"at {offset} was not: {digest}" for (queue_id, offset), digest in found.waiting.items()
              if offset < before.delayed.get(queue_id + 1, 0) and digest not in found.delivered]
    after = DelayOffsets(tree).read()[0]
    if after != before.delayed:
        wrong.append(f"delayOffset.json lay behind the ends of its queues: {before.delayed} became {after}")
    return wrong


def _groups(tree: Path, mode: str, promised: Promised, before: SmallFiles) -> list[str]:
    after = SmallFiles.of(tree)
    if not (promised.committed or any(before.groups.values())):
        return after.said
    wrong = []
    with pyengine.open_store(tree) as reader:
        ends = {queue_id: reader.queue_range(TOPIC, queue_id)[1] for queue_id in reader.topics().get(TOPIC, [])}
    for group, offsets in promised.committed.items():
        stored = before.groups[group]
        wrong += [f"LOST: group {group} has committed {offset} in queue {queue_id}, and the file says {stored.get(queue_id)}"
                  for queue_id, offset in offsets.items() if stored.get(queue_id, -1) < offset]
    for group, stored in before.groups.items():
        asked = promised.asked[group]
        wrong += [f"group {group} is at {offset} in queue {queue_id}, further than the {asked.get(queue_id, 0)} it asked for"
                  for queue_id, offset in stored.items() if offset > asked.get(queue_id, 0)]
        wanted = {queue_id: min(offset, ends.get(queue_id, 0)) for queue_id, offset in stored.items()}
        if after.groups[group] != wanted:
            wrong.append(f"group {group} was at {stored}, the queues end at {ends}, and now it is at {after.groups[group]}")
        if wanted != stored and (mode == "sync" or group == FLUSHED):
            wrong.append(f"LOST: group {group} has committed {stored}, and the queues end at {ends}")
    return wrong + after.said
