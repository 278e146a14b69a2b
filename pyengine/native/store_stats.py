"""Counters and latency buckets of a running engine (csrc/store_stats.cdef.h).

Each part has one writing process; readers take copies with the functions here. A latency histogram is a list of counts
by bucket; `bound_ns` is the upper end of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pyengine._native import ffi, lib
from pyengine.native.control import SharedStruct, load, store

if TYPE_CHECKING:
    from pyengine._native import (
        Array,
        Struct,
        ms_latency,
        ms_stats_sample,
        ms_stats_snapshot,
        ms_store_stats,
        ms_topic_stats,
        ms_writer,
    )

_Read = TypeVar("_Read")
_SHARED: SharedStruct[ms_store_stats] = SharedStruct("the statistics", "struct ms_store_stats", magic=b"MSSTATS!",
                                                     version=lib.MS_STATS_LAYOUT_VERSION)
view, check, publish = _SHARED.view, _SHARED.check, _SHARED.publish
private = _SHARED.private  # for a process that finds no shared counters
STATS_BYTES = _SHARED.size_bytes
LATENCY_BUCKETS: int = lib.MS_LATENCY_BUCKETS
DISTRIBUTE_BUCKETS: int = lib.MS_DISTRIBUTE_BUCKETS
SAMPLES: int = lib.MS_STATS_SAMPLES
SNAPSHOTS: int = lib.MS_STATS_SNAPSHOTS
# Return the size of a table of `slots` (a power of two), of which at most three quarters are used.
topic_stats_bytes = lib.ms_topic_stats_bytes
format_topic_stats = lib.ms_topic_stats_format  # make zeroed memory an empty table; from then on other processes can attach


class StatsTotals(NamedTuple):
    """Totals at one moment (CLOCK_MONOTONIC, ns)."""

    at_ns: int
    put_messages: int
    put_bytes: int
    refused: int
    dispatched: int
    syncs: int


class Latency(NamedTuple):
    """A histogram: `buckets[k]` durations below bound_ns(k) and not below bound_ns(k - 1)."""

    count: int  # type: ignore[assignment]  # a tuple has a method of that name, which is not used
    sum_ns: int
    max_ns: int
    buckets: list[int]


class Snapshot(NamedTuple):
    """The histograms of one moment."""

    at_ns: int
    put: list[int]
    distribute: list[int]
    sync: list[int]
    lag: list[int]


# ---- the writing processes ------------------------------------------------------------------


def count_puts(writer: ms_writer, stats: ms_store_stats) -> None:
    """Let a native writer (native.writer.Writer.pointer) count its passes; `stats` must outlive it."""
    writer.meter.stats = ffi.addressof(stats, "put")


def take_sample(stats: ms_store_stats, sample: StatsTotals) -> None:
    """Append the totals of this second; called by the supervisor."""
    history = stats.history
    place = history.sample[history.samples % SAMPLES]
    for name, value in sample._asdict().items():
        setattr(place, name, value)
    store(history, "samples", history.samples + 1)


def take_snapshot(stats: ms_store_stats, at_ns: int) -> None:
    """Append the current histograms; called by the supervisor."""
    history = stats.history
    place = history.snapshot[history.snapshots % SNAPSHOTS]
    place.at_ns = at_ns
    for to, counts in ((place.put, stats.put.latency.bucket), (place.distribute, stats.put.distribute),
                       (place.sync, stats.sync.latency.bucket), (place.lag, stats.dispatch.lag.bucket)):
        ffi.memmove(to, counts, ffi.sizeof(counts))
    store(history, "snapshots", history.snapshots + 1)


# ---- readers --------------------------------------------------------------------------------


def samples(stats: ms_store_stats) -> list[StatsTotals]:
    """Return the complete samples of the last ten minutes, oldest first."""
    return _newest(stats.history, "samples", stats.history.sample, SAMPLES, SAMPLES - 8, _sample)


def _sample(struct: ms_stats_sample) -> StatsTotals:
    return StatsTotals(*(getattr(struct, name) for name in StatsTotals._fields))


def snapshots(stats: ms_store_stats) -> list[Snapshot]:
    """Return the complete snapshots of a little more than the last minute, oldest first."""
    return _newest(stats.history, "snapshots", stats.history.snapshot, SNAPSHOTS, SNAPSHOTS - 1, _snapshot)


def _newest(history: Struct, counter: str, places: Array[Any], room: int, count: int, read: Callable[[Any], _Read]) -> list[_Read]:
    """Return the newest `count` of what the supervisor has taken, in `room` places, oldest first."""
    while True:
        taken = load(history, counter)
        first = max(0, taken - count)
        found = [read(places[number % room]) for number in range(first, taken)]
        if load(history, counter) < first + room:  # the supervisor has replaced none of them
            return found


def _snapshot(struct: ms_stats_snapshot) -> Snapshot:
    return Snapshot(struct.at_ns, list(struct.put), list(struct.distribute)[:DISTRIBUTE_BUCKETS],
                    list(struct.sync), list(struct.lag))


def latency(struct: ms_latency) -> Latency:
    """Copy a `struct ms_latency`; if its writer counts meanwhile, the parts of the copy may differ by those counts."""
    return Latency(struct.count, struct.sum_ns, struct.max_ns, list(struct.bucket))


@cache
def bounds_ns() -> tuple[int, ...]:
    """Return bound_ns of every bucket."""
    return tuple(lib.ms_latency_bound_ns(bucket) for bucket in range(LATENCY_BUCKETS))


def percentile_ns(buckets: Sequence[int], share: float) -> int | None:
    """Return the duration that `share` (0 to 1) of the counted ones do not exceed; None if nothing was counted.

    It interpolates inside a bucket, so the error is at most the bucket's width, a sixteenth of the value.
    """
    total = sum(buckets)
    if total == 0:
        return None
    wanted, passed = share * total, 0
    bounds = bounds_ns()
    for bucket, count in enumerate(buckets):
        if count and passed + count >= wanted:
            low = bounds[bucket - 1] if bucket else 0
            return round(low + (bounds[bucket] - low) * max(0.0, wanted - passed) / count)
        passed += count
    return bounds[-1]


_TOPICS: SharedStruct[ms_topic_stats] = SharedStruct("the statistics by topic", "struct ms_topic_stats", lib.ms_topic_stats_check)
view_topics, check_topics = _TOPICS.view, _TOPICS.check


class TopicCount(NamedTuple):
    """The messages of one topic since the engine's start."""

    messages: int
    size_bytes: int


def topic_counts(stats: ms_topic_stats) -> dict[str, TopicCount]:
    """Return the counts by topic, in no order, without topics that have no messages."""
    found = {}
    for number in range(stats.slots):
        slot = stats.slot[number]
        length = min(lib.ms_load_u32(ffi.addressof(slot, "topic_bytes")), lib.MS_TOPIC_STATS_NAME_BYTES)
        if length and slot.messages:
            found[bytes(ffi.buffer(slot.topic, length)).decode("utf-8", "replace")] = TopicCount(slot.messages, slot.bytes)
    return found
