"""What retention decides: pure functions of the time, the disk and the settings (docs/cleaning.md).

RocketMQ's rules (DefaultMessageStore.CleanCommitLogService), as a table. The first row that holds counts:

| when | deleted | how many |
|---|---|---|
| asked by hand, down to a disk use | the oldest, whatever the age | until no more is used |
| asked by hand | what is old enough | all of it |
| use over disk_space_clean_forcibly_ratio, clean_file_forcibly_enable | the oldest, whatever the age | a batch, until below again |
| the log over log_retention_bytes (not RocketMQ's) | the oldest; while held, only what a row below deletes | a batch, until it fits |
| disk use over disk_max_used_space_ratio | what is old enough | a batch |
| an hour of delete_when | what is old enough | a batch |
| a segment that was held when its turn came | that one | itself |

Over disk_space_warning_level_ratio puts are refused. With disk_space_enough_bytes left
neither that nor a deletion before the age happens. A disk whose use cannot be told
deletes nothing and refuses nothing (RocketMQ deletes then).

No I/O, no clock: both are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyengine.engine_config import EngineConfig, delete_hours
from pyengine.native.control import REFUSE_DISK_FULL, REFUSE_UNWRITABLE
from pyengine.storage.file_system import DiskUse

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class CleanRules:
    """The settings that decide."""

    reserved_ms: int
    hours: frozenset[int]
    max_used_percent: int
    forcibly_percent: int
    warning_percent: int
    enough_bytes: int
    forcibly_enabled: bool
    batch_max: int
    retention_bytes: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> CleanRules:
        return cls(
            reserved_ms=config.file_reserved_time_hours * HOUR_MS, hours=delete_hours(config.delete_when),
            max_used_percent=config.disk_max_used_space_ratio,
            forcibly_percent=config.disk_space_clean_forcibly_ratio,
            warning_percent=config.disk_space_warning_level_ratio, enough_bytes=config.disk_space_enough_bytes,
            forcibly_enabled=config.clean_file_forcibly_enable, batch_max=config.delete_files_batch_max,
            retention_bytes=config.log_retention_bytes)


class Request(NamedTuple):
    """What was asked by hand. `reserved_ms` None: the setting; `used_percent` 0: by age only."""

    reserved_ms: int | None = None
    used_percent: int = 0


class Decision(NamedTuple):
    """What may be deleted now, and why: "" nothing, else "hand", "space", "size" or "time"."""

    why: str = ""
    reserved_ms: int = 0
    at_once: bool = False     # whatever the age
    batch_max: int | None = None
    age_counts: bool = False  # of "size": whether age alone would delete now too

    @property
    def passes_log_holds(self) -> bool:
        """Whether the disk is so full that a hold in config/log-holds keeps nothing."""
        return self.why == "space" and self.at_once


NOTHING = Decision()


def decide(rules: CleanRules, uses: Sequence[DiskUse], hour: int, request: Request | None = None, log_bytes: int = 0) -> Decision:
    """The first row of the table that holds. `uses`: the file systems of log and queues; `hour`: 0..23, local time; `log_bytes`:
    from the log's beginning to its end."""
    if request is not None:
        reserved_ms = rules.reserved_ms if request.reserved_ms is None else request.reserved_ms
        if not request.used_percent:
            return Decision("hand", reserved_ms)
        if any(use.used_percent > request.used_percent for use in uses):
            return Decision("hand", reserved_ms, at_once=True)
        return NOTHING
    by_age = NOTHING
    if any(use.used_percent > rules.max_used_percent for use in uses):
        by_age = Decision("space", rules.reserved_ms, batch_max=rules.batch_max)
    elif hour in rules.hours:
        by_age = Decision("time", rules.reserved_ms, batch_max=rules.batch_max)
    if rules.forcibly_enabled and any(_is_beyond(rules, use, rules.forcibly_percent) for use in uses):
        return Decision("space", rules.reserved_ms, at_once=True, batch_max=rules.batch_max)
    if rules.retention_bytes and log_bytes > rules.retention_bytes:
        return Decision("size", rules.reserved_ms, at_once=True, batch_max=rules.batch_max, age_counts=bool(by_age.why))
    return by_age


def refusal(rules: CleanRules, uses: Sequence[DiskUse]) -> tuple[int, str]:
    """(REFUSE_ bits, a sentence that names the cause and the cure); (0, "") when puts are taken."""
    for use in uses:
        if use.unwritable_reason:
            return REFUSE_UNWRITABLE, (f"{use.unwritable_reason}: make it writable; puts are accepted again by themselves")
    for use in uses:
        if not use.inodes_left:
            return REFUSE_DISK_FULL, (f"the file system of {use.folder} has no inode left: delete files there; puts are "
                                      "accepted again by themselves")
        if _is_beyond(rules, use, rules.warning_percent):
            return REFUSE_DISK_FULL, (
                f"the disk of {use.folder} is {use.used_percent} % used, over disk_space_warning_level_ratio = "
                f"{rules.warning_percent}: free space or run `pyengine clean`; puts are accepted again by themselves")
    return 0, ""


def _is_beyond(rules: CleanRules, use: DiskUse, percent: int) -> bool:
    return use.used_percent > percent and not (rules.enough_bytes and use.usable_bytes >= rules.enough_bytes)


def deletable_end(segment_bytes: int, wrote: int, *others: int) -> int:
    """Segments that end at or below this may be deleted: never the last one with data, nothing above any of `others`.

    `others` are the positions that still need the log: committed, flushed, reput_from, and
    up to where the checkpointer has synced the queues.
    """
    last = max(0, wrote - 1)
    return max(0, min(last - last % segment_bytes, *others))


def next_to_go(
    segments: Sequence[tuple[int, int]], segment_bytes: int, end: int, decision: Decision, now_ms: int, removing_end: int = 0
) -> int | None:
    """The start of the segment to delete next, None without: only ever the oldest, as RocketMQ stops at the first that stays.

    `segments`: (start, modification time in ms), ascending. The one that ends at
    `removing_end` was held when its turn came and is deleted whatever the decision says; any
    other value of it means nothing, since readers can write there.
    """
    if not segments:
        return None
    start, modified_ms = segments[0]
    if start + segment_bytes > end:
        return None
    if start + segment_bytes == removing_end:
        return start
    if not decision.why:
        return None
    return start if decision.at_once or now_ms >= modified_ms + decision.reserved_ms else None
