"""A running engine's statistics, read by another process: StoreStatsService's and BrokerStatsManager's (docs/statistics.md).

Counters are totals since the engine's start. Rates come from the supervisor's samples,
latencies of the last minute from its snapshots of the buckets. Reading does not write or wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyengine.errors import DiskError, EngineUnavailableError
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native import store_stats
from pyengine.native.flush import monotonic_ns
from pyengine.native.store_stats import Latency, Snapshot, StatsTotals, TopicCount
from pyengine.native.writer import get_queue_offset
from pyengine.results import PutStatus
from pyengine.storage.consumer_offset import DelayOffsets

if TYPE_CHECKING:
    from pyengine._native import ms_control, ms_store_stats, ms_topic_stats

SAMPLE_NS = 1_000_000_000      # StoreStatsService.FREQUENCY_OF_SAMPLING
SNAPSHOT_NS = 10_000_000_000
EARLY_NS = 50_000_000          # a round that is early by up to this time still takes the second's sample
WINDOWS_S = (10, 60, 600)
RECENT_S = 60
# StoreStatsService.PUT_MESSAGE_ENTIRE_TIME_MAX_DESC: ranges of whole milliseconds.
DISTRIBUTE_NAMES = ("<=0ms", "0~10ms", "10~50ms", "50~100ms", "100~200ms", "200~500ms", "500ms~1s", "1~2s", "2~3s",
                    "3~4s", "4~5s", "5~10s", "10s~")
LEVELS_MAX = 64  # RocketMQ has 18; of a longer message_delay_level only the first ones are shown


@dataclass(frozen=True, slots=True)
class RecentLatency:
    """Durations of one kind, in ms: the longest since the start, percentiles of the last minute; None if there was no duration."""

    max_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    p999_ms: float | None


def totals(control: ms_control, stats: ms_store_stats, at_ns: int) -> StatsTotals:
    """Take a sample of the counters from which rates are computed."""
    messages, size_bytes = native.put_totals(control)
    return StatsTotals(at_ns=at_ns, put_messages=messages, put_bytes=size_bytes, refused=native.load(control.writer, "refused"),
                  dispatched=native.load(stats.dispatch, "messages"), syncs=native.load(control.flusher, "syncs"))


def rate(samples: Sequence[StatsTotals], field: str, window_s: int) -> float | None:
    """Return the growth per second over the window before the last sample (StoreStatsService.getPutTps).

    In an engine younger than the window it is over all samples; None if there are fewer than two.
    """
    if len(samples) < 2:
        return None
    last = samples[-1]
    window_start_ns = last.at_ns - window_s * 1_000_000_000
    # The interval of samples is only about a second: take the nearest one to the start of the window.
    before = min(samples[:-1], key=lambda sample: abs(sample.at_ns - window_start_ns))
    grown: float = getattr(last, field) - getattr(before, field)
    return grown * 1e9 / (last.at_ns - before.at_ns)


def rates(samples: Sequence[StatsTotals], field: str) -> dict[int, float | None]:
    """Return the rate over each window of WINDOWS_S."""
    return {window_s: rate(samples, field, window_s) for window_s in WINDOWS_S}


def recent_counts(now: Sequence[int], snapshots: Sequence[Snapshot], field: str, now_ns: int) -> list[int]:
    """Return the counts of the last minute (or up to ten seconds more) by bucket; all counts in a younger engine."""
    window_start_ns = now_ns - RECENT_S * 1_000_000_000
    before = next((getattr(one, field) for one in reversed(snapshots) if one.at_ns <= window_start_ns), None)
    return list(now) if before is None else [count - was for count, was in zip(now, before, strict=True)]


def recent_latency(latency: Latency, recent: Sequence[int]) -> RecentLatency:
    """Compute the figures of one kind; `recent` are the buckets of the last minute."""
    def share(of: float) -> float | None:
        found = store_stats.percentile_ns(recent, of)
        return None if found is None else round(min(found, latency.max_ns) / 1e6, 6)

    return RecentLatency(latency.max_ns / 1e6 if latency.count else None, share(0.5), share(0.99), share(0.999))


class Statistics:
    """A snapshot of all figures. The keys of dictionaries by window are seconds."""

    def __init__(self, control: ms_control, stats: ms_store_stats, topics: ms_topic_stats | None, now_ns: int) -> None:
        samples, snapshots = store_stats.samples(stats), store_stats.snapshots(stats)
        now = totals(control, stats, now_ns)
        put, dispatch = stats.put, stats.dispatch
        names = {status.value: status.name for status in PutStatus}
        self.histograms = {"put": store_stats.latency(put.latency), "sync": store_stats.latency(stats.sync.latency),
                           "lag": store_stats.latency(dispatch.lag)}

        def recent(kind: str) -> RecentLatency:
            latency = self.histograms[kind]
            return recent_latency(latency, recent_counts(latency.buckets, snapshots, kind, now_ns))

        self.put_messages, self.put_bytes = now.put_messages, now.put_bytes
        self.put_entries, self.put_passes, self.put_entries_per_pass_max = put.entries, put.passes, put.entries_max
        self.refused = {names.get(number, f"status_{number}"): count for number, count in enumerate(put.refused) if count}
        self.put_tps, self.put_bytes_per_s = rates(samples, "put_messages"), rates(samples, "put_bytes")
        self.put_latency = recent("put")
        self.put_distribute_recent = recent_counts(
            list(put.distribute)[:store_stats.DISTRIBUTE_BUCKETS], snapshots, "distribute", now_ns)
        self.put_sizes = list(put.size)
        self.syncs, self.sync_tps, self.sync_latency = now.syncs, rates(samples, "syncs"), recent("sync")
        self.dispatched, self.dispatch_tps, self.dispatch_lag = now.dispatched, rates(samples, "dispatched"), recent("lag")
        self.dispatch_entries, self.dispatch_keys = dispatch.entries, dispatch.keys
        self.dispatch_out_of_order, self.dispatch_lag_max_bytes = dispatch.out_of_order, dispatch.lag_max_bytes
        self.topics = {} if topics is None else store_stats.topic_counts(topics)
        self.other_topics = TopicCount(0, 0) if topics is None else TopicCount(topics.others.messages, topics.others.bytes)
        self.sample_age_s = (now_ns - samples[-1].at_ns) / 1e9 if samples else None


def read_statistics(memory: EngineMemory, now_ns: int | None = None) -> Statistics:
    """Read the figures of a running engine; EngineUnavailableError if it has none (an engine of another version)."""
    try:
        stats = memory.open_store_stats()
        try:
            topics = memory.open_topic_stats()
        except EngineUnavailableError:  # the counters by topic may be missing
            topics = None
        return Statistics(memory.control, stats, topics, monotonic_ns() if now_ns is None else now_ns)
    finally:
        memory.close_statistics()


def document(figures: Statistics) -> dict[str, Any]:
    """Return the figures as `pyengine status --json` shows them: RocketMQ's names in snake_case, with units."""
    failed = sum(figures.refused.values())
    return {
        "put_message_times_total": figures.put_messages,
        "put_message_size_total_bytes": figures.put_bytes,
        "put_message_average_size_bytes": figures.put_bytes / figures.put_messages if figures.put_messages else None,
        "put_message_failed_times": failed,
        "put_message_failed_by_status": figures.refused,
        "put_tps": _by_window(figures.put_tps),
        "put_bytes_per_s": _by_window(figures.put_bytes_per_s),
        "put_message_entire_time_max_ms": figures.put_latency.max_ms,
        "put_message_distribute_time": dict(zip(DISTRIBUTE_NAMES, figures.put_distribute_recent, strict=True)),
        "put_latency_50_ms": figures.put_latency.p50_ms,
        "put_latency_99_ms": figures.put_latency.p99_ms,
        "put_latency_999_ms": figures.put_latency.p999_ms,
        "put_entries_total": figures.put_entries,
        "put_passes_total": figures.put_passes,
        "put_entries_per_pass_max": figures.put_entries_per_pass_max,
        "sync_times_total": figures.syncs,
        "sync_tps": _by_window(figures.sync_tps),
        "sync_time_max_ms": figures.sync_latency.max_ms,
        "sync_latency_50_ms": figures.sync_latency.p50_ms,
        "sync_latency_99_ms": figures.sync_latency.p99_ms,
        "sync_latency_999_ms": figures.sync_latency.p999_ms,
        "dispatch_messages_total": figures.dispatched,
        "dispatch_tps": _by_window(figures.dispatch_tps),
        "dispatch_max_buffer_bytes": figures.dispatch_lag_max_bytes,
        "dispatch_lag_max_ms": figures.dispatch_lag.max_ms,
        "dispatch_lag_50_ms": _whole_ms(figures.dispatch_lag.p50_ms),
        "dispatch_lag_99_ms": _whole_ms(figures.dispatch_lag.p99_ms),
        "dispatch_queue_entries_total": figures.dispatch_entries,
        "dispatch_index_keys_total": figures.dispatch_keys,
        "out_of_order": figures.dispatch_out_of_order,
        "topics": {topic: {"topic_put_nums": count.messages, "topic_put_size_bytes": count.size_bytes}
                   for topic, count in sorted(figures.topics.items())},
        "other_topics": {"topic_put_nums": figures.other_topics.messages,
                         "topic_put_size_bytes": figures.other_topics.size_bytes},
        "sample_age_s": figures.sample_age_s,
    }


def _whole_ms(value: float | None) -> float | None:
    """Round to whole milliseconds, the resolution of store times: the fraction comes from interpolation only."""
    return None if value is None else round(value, 1)


def _by_window(found: dict[int, float | None]) -> dict[str, float | None]:
    return {f"{window_s}s": None if value is None else round(value, 1) for window_s, value in found.items()}


class StoreStatsService:
    """Samples the counters: the totals once a second, the latency buckets once in ten seconds, into shared memory.

    RocketMQ samples in the broker's own process and prints. Here the reader of the samples (`pyengine
    status`, `top`, `metrics`) computes the rates, which costs the workers nothing. The supervisor calls this
    in its round, without a thread or wake-up of its own. A new supervisor appends to the samples of the dead one.
    """

    def __init__(self, memory: EngineMemory, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self._memory = memory
        self._clock_ns = clock_ns
        self._stats = memory.counters
        before = store_stats.samples(self._stats)
        taken = store_stats.snapshots(self._stats)
        self._due_ns = before[-1].at_ns + SAMPLE_NS if before else 0
        self._snapshot_due_ns = taken[-1].at_ns + SNAPSHOT_NS if taken else 0

    def tick(self) -> None:
        """Take the samples that are due; cheap when none is."""
        now_ns = self._clock_ns()
        if now_ns + EARLY_NS < self._due_ns:
            return
        self._due_ns = now_ns + SAMPLE_NS
        store_stats.take_sample(self._stats, totals(self._memory.control, self._stats, now_ns))
        if now_ns + EARLY_NS >= self._snapshot_due_ns:
            self._snapshot_due_ns = now_ns + SNAPSHOT_NS
            store_stats.take_snapshot(self._stats, now_ns)


# ---- the delay levels ------------------------------------------------------------


def schedule_offsets(root: str | os.PathLike[str], memory: EngineMemory) -> dict[str, dict[str, int]]:
    """Return by delay level that ever had a message: `offset`, the next to deliver by the scheduler's note, `max`, and `pending`.

    Empty while the queue table is replaced by a larger one, or if the note cannot be read.
    """
    generation = native.load(memory.control.slots[native.load_position(memory.control.slot_pass) % 2], "queue_table_generation")
    try:
        delivered, _ = DelayOffsets(root).read()
        shared, table = memory.open_queue_table(generation)
    except (DiskError, EngineUnavailableError):
        return {}
    with shared:
        ends = {level: get_queue_offset(table, SCHEDULE_TOPIC, level - 1) for level in range(1, LEVELS_MAX + 1)}
    return {str(level): {"offset": (offset := delivered.get(level, 0)), "max": end, "pending": max(0, end - offset)}
            for level, end in ends.items() if end}
