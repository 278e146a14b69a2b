"""Compare two logs record by record: a master and its slave, a store and its copy (`pyengine diff`).

Replication copies bytes, so a copy has the same records at the same offsets. The part that both logs have is compared; if one
log starts earlier or ends later, the report says so, but that is not a difference. Fillers
at the ends of segments are not compared: their bytes after the header have no meaning. After damage the comparison continues at the
log's next complete record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from pyengine.errors import ExitCode
from pyengine.formats.record import Message, body_crc, decode_record, total_size
from pyengine.native.dispatch import touched_queues
from pyengine.native.scan import sync, walk
from pyengine.storage.commit_log import Log, LogDamage, LogRun, SegmentBytes, next_record, record_or_limit, runs_of
from pyengine.storage.mapped_file import mapped, used_end
from pyengine.storage.recovery.report import Findings

_COUNTED = ("store", "other", "differing", "only_in_store", "only_in_other")
DIFFERENCES_MAX = 100   # most differences that are listed; all are counted
SLICE_BYTES = 256 << 10
_NAMES = tuple(each.name for each in fields(Message) if each.compare and each.name != "physical_offset")


class Logs(NamedTuple):
    """Both logs, each with its own end."""

    store: Log
    other: Log


@dataclass(frozen=True, slots=True)
class Difference:
    """One record that is not equal in both logs; `kind`: differs, only_in_store or only_in_other."""

    kind: str
    physical_offset: int
    topic: str
    queue_id: int
    queue_offset: int
    fields: tuple[str, ...] = ()   # the names of the fields that differ
    bad_crc: tuple[str, ...] = ()  # store, other: the logs in which the body does not match its checksum


@dataclass(slots=True)
class LogDifferences:
    """What a comparison has found; `damaged`: where each log has no complete record.

    `topics`: for each of _COUNTED, a topic's messages with queue entries in the part of the log that was compared, and its differing
    records.
    """

    equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    topics: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    damaged: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def total(self, name: str) -> int:
        return sum(counts[name] for counts in self.topics.values())


def compare_logs(logs: Logs, start: int, end: int, progress: Callable[[int, int], None]) -> LogDifferences:
    """Compare the records that begin in [start, end), a range that both logs have."""
    found, here, there = LogDifferences(), _first_record(logs.store, start), _first_record(logs.other, start)
    while (at := min(here, there)) < end:
        stop = min(end, at + SLICE_BYTES, *(at - at % log.size_bytes + log.size_bytes for log in logs))
        if here == there and (reached := _equal_to(logs, here, stop, found)) > here:
            here = there = reached
        else:
            ours, here = _records(logs, 0, here, stop, found)
            theirs, there = _records(logs, 1, there, stop, found)
            _compare_records(ours, theirs, found)
        progress(min(here, there, end) - start, end - start)
    return found


def end_beyond_damage(log: Log, end: int, *, was_stopped: bool) -> int:
    """Return the end of a closed log, including records after damage at `end`, where a walk has stopped.

    After a crash only complete records with undamaged bodies count; a store that was stopped in order (`was_stopped`) has no torn end.
    """
    for segment in log.segments:
        base = segment.start_offset
        at = max(end, base)
        used = base + used_end(segment.path, at - base) if at < base + log.size_bytes else base
        if used <= at:
            continue
        with mapped(segment.path) as view:
            for piece in runs_of(SegmentBytes(view, base), at, used, base + log.size_bytes, next_record):
                if isinstance(piece, LogRun):
                    walked = piece.walk(check_crc=not was_stopped)
                    end = walked.end_offset if walked.messages else end
                elif was_stopped and piece.end == used:
                    end = max(end, used)
    return end


def _first_record(log: Log, start: int) -> int:
    """Return the first record at or after `start`, by a walk from the start of its segment if that reaches it."""
    segment = log.view_at(start)
    if segment is None or start == segment[0]:
        return start
    base, limit, view = segment
    found = sync(view, base, start, limit, limit=limit, certain=True) or sync(view, base, start, limit, limit=limit)
    return base + log.size_bytes if found is None else found


def _equal_to(logs: Logs, at: int, stop: int, found: LogDifferences) -> int:
    """Return the end of the complete records that begin in [at, stop) if both logs have the same bytes there; else `at`."""
    ours, theirs = logs.store.view_at(at), logs.other.view_at(at)
    if ours is None or theirs is None:
        return at
    (base, limit, view), (its_base, its_limit, its_view) = ours, theirs
    walked = walk(view, base, at, min(stop, limit), limit=limit, check_crc=False, check_offset=False)
    reached = walked.end_offset
    if reached > its_limit or view[at - base : reached - base] != its_view[at - its_base : reached - its_base]:
        return at
    found.equal += walked.messages
    for queue in touched_queues(view, base, at, reached).queues:
        found.topics[queue.topic].update(store=queue.count, other=queue.count)
    return reached


def _records(logs: Logs, side: int, at: int, boundary: int, found: LogDifferences) -> tuple[dict[int, bytes], int]:
    """Return (offset -> bytes of the records of one log from `at` on that begin before `boundary`, the start of the next one)."""
    log, records = logs[side], dict[int, bytes]()
    while at < boundary:
        segment = log.view_at(at)
        if segment is None:  # the segment is missing
            found.damaged[side].append(at)
            at = at - at % log.size_bytes + log.size_bytes
            continue
        base, limit, view = segment
        for piece in runs_of(SegmentBytes(view, base), at, min(boundary, limit), limit, record_or_limit):
            if isinstance(piece, LogDamage):
                found.damaged[side].append(piece.start)
                at = piece.end
                continue
            walked = piece.walk(check_crc=False, check_offset=False)
            for queue in touched_queues(view, base, at, walked.end_offset).queues:
                found.topics[queue.topic][logs._fields[side]] += queue.count
            while at < walked.end_offset:
                records[at] = view[at - base : at - base + total_size(view, at - base)]
                at += len(records[at])
        if at < boundary:  # a blank, or the log's end
            at = base + log.size_bytes
    return records, at


def _compare_records(ours: dict[int, bytes], theirs: dict[int, bytes], found: LogDifferences) -> None:
    for offset in sorted(ours.keys() | theirs.keys()):
        data = {"store": ours.get(offset, b""), "other": theirs.get(offset, b"")}
        if data["store"] == data["other"]:
            found.equal += 1
            continue
        both = {name: decode_record(one) for name, one in data.items() if one}
        message, where = next(iter(both.values())), next(iter(both))
        kind, name = ("differs", "differing") if len(both) == 2 else (f"only_in_{where}",) * 2
        found.topics[message.topic][name] += 1
        if len(found.differences) == DIFFERENCES_MAX:
            continue
        unlike = tuple(each.removeprefix("raw_") for each in _NAMES if len({getattr(one, each) for one in both.values()}) == 2)
        bad = tuple(where for where, one in both.items() if body_crc(one.body) != one.body_crc)
        found.differences.append(Difference(kind, offset, message.topic, message.queue_id, message.queue_offset, unlike, bad))


# -- the report --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedStore:
    """One of the two stores; its log is [min_offset, end_offset)."""

    path: str
    min_offset: int
    end_offset: int
    segment_bytes: int

    @property
    def is_empty(self) -> bool:
        return self.end_offset <= max(self.min_offset, 0)


@dataclass(frozen=True, slots=True)
class QueueEnds:
    """A queue that has another end in the other store, within the part of the log that both have."""

    topic: str
    queue_id: int
    store: int
    other: int


@dataclass(frozen=True, slots=True)
class DiffReport(Findings):
    """The differences between two stores in the part of the log that both have, [start, end)."""

    store: ComparedStore
    other: ComparedStore
    start: int
    end: int
    found: LogDifferences
    queues: tuple[QueueEnds, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_comparable(self) -> bool:
        """False if both logs have messages, but their ranges of offsets do not overlap."""
        return self.start < self.end or self.store.is_empty or self.other.is_empty

    @property
    def is_equal(self) -> bool:
        """False if a record or the end of a queue differs; a copy that ends earlier is equal if its part is."""
        return self.is_comparable and not self.queues and self.first_difference is None

    @property
    def first_difference(self) -> int | None:
        """The physical offset of the first record that is not equal in both logs, None if there is none."""
        return self.found.differences[0].physical_offset if self.found.differences else None

    @property
    def lag_bytes(self) -> int:
        """The bytes by which the other log ends before the store's; negative if it ends later. 0 if the later end is of an empty log."""
        ahead_bytes = self.store.end_offset - self.other.end_offset
        return 0 if (self.store if ahead_bytes > 0 else self.other).is_empty else ahead_bytes

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OK if self.is_equal else ExitCode.CORRUPTION if self.is_comparable else ExitCode.FAILED

    @property
    def sentence(self) -> str:
        found, lag_bytes = self.found, self.lag_bytes
        unlike = []
        if found.differences:
            unlike = [f"the first record that differs is at {self.first_difference} (differing: {found.total('differing')}, only in STORE: "
                      f"{found.total('only_in_store')}, only in OTHER: {found.total('only_in_other')})"]
        if self.queues:
            unlike.append(f"{len(self.queues)} queues end elsewhere")
        if unlike:
            said = f"The stores differ: {'; '.join(unlike)}."
        elif self.start < self.end:
            said = f"The stores are equal from {self.start} to {self.end}: {found.equal} records."
        else:
            said = "One log is empty." if self.is_comparable else "No offset is in both logs, so nothing was compared."
        if lag_bytes:
            said += f" The log of {'OTHER' if lag_bytes > 0 else 'STORE'} ends {abs(lag_bytes)} bytes earlier."
        return said

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        found = self.found
        unlike = {name: found.total(name) for name in _COUNTED[2:]}
        return {
            "is_equal": self.is_equal, "exit_code": int(self.exit_code), "sentence": self.sentence,
            "store": asdict(self.store), "other": asdict(self.other), "start": self.start, "end": self.end,
            "lag_bytes": self.lag_bytes, "first_difference": self.first_difference,
            "records": {"equal": found.equal} | unlike,
            "differences": [asdict(one) for one in found.differences],
            "left_out": sum(unlike.values()) - len(found.differences),
            "queues": [asdict(one) for one in self.queues],
            "topics": [{"topic": topic} | {name: counts[name] for name in _COUNTED} for topic, counts in sorted(found.topics.items())],
            "damaged": dict(zip(("store", "other"), found.damaged)),
            "notes": list(self.notes), "seconds": self.seconds,
        }
