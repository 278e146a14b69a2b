"""Rates from samples, the last minute from snapshots, and what a look from outside makes of them."""

from __future__ import annotations

import itertools
import os
import sys
from bisect import bisect_right

import pytest

from fix_owner import add_sync
from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError
from pyengine.ipc import shared_objects, statistics
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.statistics import StoreStatsService
from pyengine.native import control as native
from pyengine.native import store_stats
from pyengine.native.store_stats import Latency, Snapshot, StatsTotals

S = 1_000_000_000


def sample(at_s: float, messages: int) -> StatsTotals:
    return StatsTotals(round(at_s * S), messages, messages * 100, 0, messages, 0)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000 * S

    def __call__(self) -> int:
        return self.now_ns


# ---- rates ------------------------------------------------------------------


def test_a_rate_is_growth_over_the_window_before_the_last_sample():
    samples = [sample(at, messages) for at, messages in enumerate([0] * 600 + [100 * n for n in range(61)])]
    assert statistics.rate(samples, "put_messages", 10) == 100
    assert statistics.rate(samples, "put_messages", 60) == 100
    assert statistics.rate(samples, "put_messages", 600) == 10
    assert statistics.rate(samples, "put_bytes", 10) == 10_000


def test_samples_that_come_late_do_not_falsify_the_rate():
    samples = [sample(at, round(at * 50)) for at in (0, 1.2, 2.1, 5, 9.9, 11.3, 12)]
    assert statistics.rate(samples, "put_messages", 10) == pytest.approx(50)


def test_a_young_engine_has_rates_over_its_life_and_none_before_its_second_sample():
    unknown = {10: None, 60: None, 600: None}
    assert statistics.rates([], "put_messages") == statistics.rates([sample(1, 5)], "put_messages") == unknown
    assert statistics.rate([sample(1, 5), sample(3, 25)], "put_messages", 600) == 10


# ---- the last minute ---------------------------------------------------------


def bucket_of(ns: int) -> int:
    return bisect_right(store_stats.bounds_ns(), ns)


def histogram(**at: int) -> list[int]:
    found = [0] * store_stats.LATENCY_BUCKETS
    for ns, count in at.items():
        found[bucket_of(int(ns.removeprefix("ns")))] += count
    return found


def test_the_last_minute_leaves_out_what_was_counted_before():
    old, newer, now = histogram(ns1000=5), histogram(ns1000=5, ns9000=2), histogram(ns1000=5, ns9000=3)
    snapshots = [Snapshot(0, old, [], [], []), Snapshot(30 * S, newer, [], [], [])]
    assert statistics.recent_counts(now, snapshots, "put", 70 * S) == histogram(ns9000=3)
    assert statistics.recent_counts(now, snapshots, "put", 90 * S) == histogram(ns9000=1)
    assert statistics.recent_counts(now, snapshots, "put", 59 * S) == now  # nothing is as old as a minute


def test_percentiles_are_right_within_a_sixteenth():
    durations = [1_000 * n for n in range(1, 10_001)]
    buckets = [0] * store_stats.LATENCY_BUCKETS
    for ns in durations:
        buckets[bucket_of(ns)] += 1
    for share in (0.001, 0.5, 0.99, 0.999, 1.0):
        wanted = durations[max(0, round(share * len(durations)) - 1)]
        assert store_stats.percentile_ns(buckets, share) == pytest.approx(wanted, rel=1 / 16)
    assert store_stats.percentile_ns(buckets, 0.5) < store_stats.percentile_ns(buckets, 0.99)
    assert store_stats.percentile_ns([0] * store_stats.LATENCY_BUCKETS, 0.5) is None


def test_a_percentile_never_exceeds_the_largest_duration():
    buckets = histogram(ns1000000=1)
    found = statistics.recent_latency(Latency(1, 1_000_000, 1_000_000, buckets), buckets)
    assert found.max_ms == 1.0
    assert found.p50_ms <= found.p99_ms <= found.p999_ms <= 1.0
    nothing = statistics.recent_latency(Latency(0, 0, 0, []), [])
    assert (nothing.max_ms, nothing.p50_ms) == (None, None)


# ---- the sampler -------------------------------------------------------------


def put(owner, messages: int) -> None:
    """What the writer's commit slot says after so many messages."""
    number = native.load_position(owner.control.slot_pass) + 1
    slot = owner.control.slots[number % 2]
    slot.put_messages, slot.put_bytes = messages, messages * 100
    native.store_position(owner.control.slot_pass, number)


def test_totals_are_read_though_the_writer_commits_a_pass_at_each_step_of_python(make_owner):
    """The supervisor reads them in its round: it must not wait for a pause of the writer. The C test is stress_control."""
    owner = make_owner()
    steps = itertools.count(1)

    def commit(frame, event, argument):
        step = next(steps)
        assert step < 1000, "the read does not end"
        put(owner, step)
        return commit

    sys.settrace(commit)
    try:
        messages, size_bytes = native.put_totals(owner.control)
    finally:
        sys.settrace(None)
    assert size_bytes == 100 * messages > 0


def test_a_second_gets_one_sample_however_often_the_round_comes(make_owner):
    owner, clock = make_owner(), Clock()
    service = StoreStatsService(owner.memory, clock)
    for step in range(100):
        put(owner, step)
        service.tick()
        clock.now_ns += S // 10
    found = store_stats.samples(owner.memory.counters)
    assert [one.at_ns - 1000 * S for one in found] == [n * S for n in range(10)]
    assert [one.put_messages for one in found] == list(range(0, 100, 10))
    assert statistics.rate(found, "put_messages", 10) == 10


def test_ten_minutes_are_kept_and_older_samples_go(make_owner):
    owner, clock = make_owner(), Clock()
    service = StoreStatsService(owner.memory, clock)
    for _ in range(2000):
        service.tick()
        clock.now_ns += S
    found = store_stats.samples(owner.memory.counters)
    assert found[-1].at_ns == clock.now_ns - S
    assert [after.at_ns - before.at_ns for before, after in itertools.pairwise(found)] == [S] * (len(found) - 1)
    assert len(found) > 600
    snapshots = store_stats.snapshots(owner.memory.counters)
    assert snapshots[-1].at_ns - snapshots[0].at_ns == 60 * S


def test_a_successor_continues_after_the_samples_of_the_dead_one(make_owner):
    owner, clock = make_owner(), Clock()
    StoreStatsService(owner.memory, clock).tick()
    put(owner, 50)
    clock.now_ns += S // 2
    successor = StoreStatsService(owner.memory, clock)
    successor.tick()  # the second is not over
    clock.now_ns += S // 2
    successor.tick()
    assert [one.put_messages for one in store_stats.samples(owner.memory.counters)] == [0, 50]


# ---- the look from outside ---------------------------------------------------


def test_a_look_shows_what_the_workers_counted(make_owner):
    owner, clock = make_owner(), Clock()
    service = StoreStatsService(owner.memory, clock)
    stats = owner.memory.counters
    service.tick()
    put(owner, 300)
    stats.put.entries, stats.put.passes, stats.put.entries_max = 200, 100, 7
    stats.put.refused[6] = 4
    add_sync(stats, 3_000_000)
    stats.dispatch.messages, stats.dispatch.entries, stats.dispatch.keys = 300, 301, 5
    stats.dispatch.out_of_order, stats.dispatch.lag_max_bytes = 1, 4096
    lib.ms_latency_add(ffi.addressof(stats.dispatch, "lag"), 2_000_000)
    clock.now_ns += 10 * S
    service.tick()
    owner.publish()
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        figures = statistics.read_statistics(seen, clock.now_ns + S)
        shown = statistics.document(figures)
    assert shown["put_message_times_total"] == 300 and shown["put_message_average_size_bytes"] == 100
    assert (shown["put_message_failed_times"], shown["put_message_failed_by_status"]) == (4, {"MESSAGE_ILLEGAL": 4})
    assert shown["put_tps"] == {"10s": 30, "60s": 30, "600s": 30}
    assert shown["sync_time_max_ms"] == 3 and shown["dispatch_lag_max_ms"] == 2
    assert (shown["dispatch_messages_total"], shown["out_of_order"], shown["dispatch_max_buffer_bytes"]) == (300, 1, 4096)
    assert list(shown["put_message_distribute_time"]) == list(statistics.DISTRIBUTE_NAMES)
    assert shown["sample_age_s"] == 1


def test_statistics_of_another_layout_are_not_read(make_owner):
    owner = make_owner()
    owner.memory.counters.layout_version = 99
    owner.publish()
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        with pytest.raises(EngineUnavailableError, match="another layout"):
            statistics.read_statistics(seen)


def test_looking_again_and_again_holds_nothing(make_owner):
    owner = make_owner()
    owner.publish()
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        statistics.read_statistics(seen)
        before = descriptors()
        for _ in range(50):
            statistics.read_statistics(seen)
        assert descriptors() == before
    assert shared_objects.STORE_STATS in owner.folder.names()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("open_it", [lambda memory: memory.counters, lambda memory: memory.blocked_reasons,
                                     lambda memory: not memory.recorder_of(native.WRITER).handle.shared],
                         ids=["counters", "blocked_reasons", "recorder"])
def test_statistics_that_cannot_be_opened_keep_no_process_from_its_work(make_owner, monkeypatch, open_it):
    """A supervisor ended for the statistics once, when their file answered EIO."""
    owner = make_owner()
    owner.memory.close_statistics()

    def fail(*arguments, **named):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pyengine.ipc.shared_objects.os.open", fail)
    assert open_it(owner.memory)
