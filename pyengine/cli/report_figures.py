"""What `pyengine report` draws, as plain figures: counted by Spark's workers, lags from the groups' offsets.

Many topics and hours stay in Spark: what is collected is a row for each topic, and a row
for each hour and each of the few topics that are drawn one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Count:
    """Messages and the bytes of their records."""

    messages: int
    bytes: int

    def __add__(self, other: Count) -> Count:
        return Count(self.messages + other.messages, self.bytes + other.bytes)


NOTHING = Count(0, 0)


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic. `largest` is its longest record; times are of the store."""

    topic: str
    count: Count
    largest: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One consumer group on one topic. `lost`: removed before the group came to them; `waiting_since_ms` 0: nothing waits."""

    group: str
    topic: str
    queues: int
    lag: int
    lost: int
    waiting_since_ms: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A store at one moment.

    `topics` begin with the one of the most bytes. `hours` (their beginning, ms) hold a
    count for each of the first `drawn` topics, and under None for all others together.
    """

    store: str
    made_ms: int
    level: str
    topics: list[TopicFigures] = field(default_factory=list)
    drawn: int = 0
    hours: dict[int, dict[str | None, Count]] = field(default_factory=dict)
    groups: list[GroupFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Count:
        return sum((topic.count for topic in self.topics), NOTHING)


def collect(spark: SparkSession, root: Path, options: Mapping[str, object], settings: Mapping[str, object], *, level: str,
            drawn: int, progress: Callable[[int, int], None] | None = None) -> Figures:
    """The figures of the store at `root`: one pass over its log. `drawn` topics are kept apart by hour."""
    from pyspark.sql import functions as f

    from pyengine.spark.jobs import watched
    from pyengine.spark.message_stats import planned_stats

    made_ms = time.time_ns() // 1_000_000
    frame, log_bytes = planned_stats(spark, root, None, "hour", {**options, "readLevel": level})
    frame = frame.persist()
    try:
        with watched(spark, log_bytes, progress):
            rows = frame.groupBy("topic").agg(
                f.sum("messages"), f.sum("bytes"), f.max("largest"), f.unix_millis(f.min("firstTimestamp")),
                f.unix_millis(f.max("lastTimestamp"))).collect()
        topics = [TopicFigures(row[0], Count(row[1], row[2]), row[3], row[4], row[5]) for row in rows]
        topics.sort(key=lambda one: (-one.count.bytes, one.topic))
        apart = [one.topic for one in topics[:drawn]]
        name = f.when(f.col("topic").isin(apart), f.col("topic")) if apart else f.lit(None).cast("string")
        cells = frame.groupBy(f.unix_millis("hour"), name).agg(f.sum("messages"), f.sum("bytes")).collect()
    finally:
        frame.unpersist()
    hours: dict[int, dict[str | None, Count]] = {}
    for hour_ms, topic, messages, size in cells:
        hours.setdefault(hour_ms, {})[topic] = Count(messages, size)
    groups, notes = _groups(root, settings)
    return Figures(str(root), made_ms, level, topics, len(apart), dict(sorted(hours.items())), groups, notes)


def _groups(root: Path, settings: Mapping[str, object]) -> tuple[list[GroupFigures], list[str]]:
    from pyengine.client.consumer_groups import ConsumerGroups

    found = ConsumerGroups(root, **settings)
    figures = []
    for state in found.groups():
        waiting = [queue.waiting_since_ms for queue in state.queues.values() if queue.waiting_since_ms]
        figures.append(GroupFigures(state.group, state.topic, len(state.queues), state.lag, state.lost, min(waiting, default=0)))
    figures.sort(key=lambda one: (-one.lag, one.group, one.topic))
    return figures, list(found.notes())
