"""The audit after a crash: no acknowledged message is lost, and none is torn, doubled or out of order.

It reads the store through its queues, as a consumer does; `pyengine check` checks the rest (log chain, checksums, holes,
index). Acknowledged messages are rows as acked_producer.py writes them.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pyengine
from crash.acked_producer import DELAYED_TOPIC, read_body
from pyengine.cli.torture import check_acked
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.record import Message
from pyengine.results import GetStatus

PULL = 256
FAILURES_MAX = 10


@dataclass
class Audit:
    """The result; without `failures`, which are sentences, the store has all that was acknowledged.

    `waiting`: (queue id, offset) in SCHEDULE_TOPIC_XXXX -> digest of that body; `delivered`: digest -> the number of messages
    with that body in its own topic.
    """

    acknowledged: int = 0
    messages: int = 0
    lost: int = 0
    redelivered: int = 0
    cancelled: int = 0
    failures: list[str] = field(default_factory=list)
    waiting: dict[tuple[int, int], str] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)


def read_acked(paths: Iterable[Path]) -> list[dict]:
    """Return all whole lines; a line that a kill cut short promises nothing."""
    rows = []
    for path in paths:
        *whole, _ = path.read_bytes().split(b"\n")
        rows += [json.loads(line) for line in whole]
    return rows


def still_kept(store: Path, rows: Sequence[dict]) -> list[dict]:
    """Return the rows that retention has not deleted, whose message is at or after the log's begin.

    For a row without a physical offset the first offset of its queue decides. A queue that does not exist was deleted with the
    segments of its messages, unless a row with a physical offset shows that one of them is kept.
    """
    with pyengine.open_store(store) as reader:
        log_min = reader.min_physical_offset
        queue_min = {(topic, queue_id): reader.queue_range(topic, queue_id)[0]
                     for topic, queue_ids in reader.topics().items() for queue_id in queue_ids}

    if log_min > 0:
        known = {(row["topic"], row["queue_id"]) for row in rows if (row["physical_offset"] or 0) >= log_min}
        queue_min = {(row["topic"], row["queue_id"]): math.inf for row in rows} | dict.fromkeys(known, 0) | queue_min

    def is_kept(row: dict) -> bool:
        if row["physical_offset"] is not None:
            return row["physical_offset"] >= log_min
        if row["queue_offset"] is None:
            return True
        return row["queue_offset"] >= queue_min.get((row["topic"], row["queue_id"]), 0)

    return [row for row in rows if is_kept(row)]


def audit(store: Path, rows: Sequence[dict], level: str = "committed", topics: Collection[str] | None = None, *,
          delayed_are_due: bool = True) -> Audit:
    """Read every queue (of `topics` only, if given) to its end, and look for every acknowledged message.

    A delayed message must have been delivered if `delayed_are_due`, and may have been delivered twice; one that was cancelled must not.
    """
    found = Audit(acknowledged=len(rows))
    at_offset = [row for row in rows if row["queue_offset"] is not None]
    delayed = {row["body_sha256"]: row for row in rows if row["queue_offset"] is None and "cancelled" not in row}
    cancelled = {row["body_sha256"]: row for row in rows if "cancelled" in row}
    promised = {(row["topic"], row["queue_id"], row["queue_offset"]): row for row in at_offset}
    if len(promised) != len(at_offset):
        found.failures.append(f"{len(at_offset) - len(promised)} queue offsets were acknowledged twice")
    expected = _Expected(promised)
    with pyengine.open_store(store) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids if topics is None or topic in topics else ():
                at, end = reader.queue_range(topic, queue_id)
                while at < end:
                    got = reader.get_message(topic, queue_id, at, max_messages=PULL, level=level)
                    if got.status is not GetStatus.FOUND:
                        found.failures.append(f"{topic}-{queue_id} at {at}: {got.status.name}, the queue ends at {end}")
                        break
                    for message in got.messages:
                        if topic in (SCHEDULE_TOPIC, DELAYED_TOPIC):
                            _check_delayed(message, topic, queue_id, found)
                        else:
                            _check_message(message, at, topic, queue_id, expected, found)
                        at += 1
    found.cancelled = len(cancelled)
    found.failures += [f"DELIVERED: a message that was cancelled: {cancelled[digest]}"
                       for digest in cancelled.keys() & found.delivered.keys()]
    found.redelivered = found.delivered.total() - len(found.delivered)
    if delayed_are_due:
        promised |= {(DELAYED_TOPIC, digest, None): row for digest, row in delayed.items() if digest not in found.delivered}
    found.lost = len(promised)
    for row in list(promised.values())[:FAILURES_MAX]:
        found.failures.append(f"LOST: acknowledged, but not there: {row}")
    return found


def audit_kept(store: Path, rows: Sequence[dict], **options) -> tuple[Audit, Sequence[dict]]:
    """Return audit() of the rows that retention has not deleted, and these rows; a cleaner may delete more meanwhile."""
    while True:
        rows = still_kept(store, rows)
        found = audit(store, rows, **options)
        if not found.failures or len(still_kept(store, rows)) == len(rows):
            return found, rows


def _check_delayed(message, topic: str, queue_id: int, found: Audit) -> None:
    """Check that a delayed message is whole, and note that it waits (SCHEDULE_TOPIC) or was delivered."""
    found.messages += 1
    try:
        read_body(message.body)
    except ValueError as error:
        found.failures.append(f"TORN: {topic} offset {message.queue_offset}: {error}")
    digest = sha256(message.body).hexdigest()
    if topic == DELAYED_TOPIC:
        found.delivered[digest] += 1
    else:
        found.waiting[queue_id, message.queue_offset] = digest


@dataclass
class _Expected:
    """Rows by (topic, queue id, offset) whose message was not read yet, and the messages read of each producer."""

    promised: dict[tuple[str, int, int], dict]
    last_of: dict[tuple[str, int, str], int] = field(default_factory=lambda: defaultdict(lambda: -1))
    seen: set[tuple[str, int]] = field(default_factory=set)


def _check_message(message: Message, at: int, topic: str, queue_id: int, expected: _Expected, found: Audit) -> None:
    last_of, seen = expected.last_of, expected.seen
    found.messages += 1
    if message.queue_offset != at:
        found.failures.append(f"{topic}-{queue_id} serves {message.queue_offset} where {at} was due")
    try:
        maker, sequence = read_body(message.body)
    except ValueError as error:
        found.failures.append(f"TORN: {topic}-{queue_id} offset {at}: {error}")
        return
    if (maker, sequence) in seen:
        found.failures.append(f"DOUBLED: {maker} number {sequence}, again at {topic}-{queue_id} offset {at}")
    seen.add((maker, sequence))
    if sequence <= last_of[topic, queue_id, maker]:
        found.failures.append(f"ORDER: {maker} number {sequence} after {last_of[topic, queue_id, maker]} in {topic}-{queue_id}")
    last_of[topic, queue_id, maker] = max(sequence, last_of[topic, queue_id, maker])
    row = expected.promised.get((topic, queue_id, at))
    if row is None:
        return
    if row["body_sha256"] != sha256(message.body).hexdigest() or row["physical_offset"] not in (None, message.physical_offset):
        found.failures.append(f"WRONG: the message at {topic}-{queue_id} offset {at} is not the acknowledged one")
    else:
        del expected.promised[topic, queue_id, at]


def check(store: Path, rows: Sequence[dict], scratch: Path) -> list[str]:
    """Run `pyengine check --acked` with the same list; return its failure."""
    merged = scratch / "acked.jsonl"
    merged.write_text("".join(json.dumps(row) + "\n" for row in rows if row["queue_offset"] is not None))
    _, _, failure = check_acked(store, merged)
    return [failure] if failure else []
