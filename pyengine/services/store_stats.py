"""StoreStatsService: once a second the totals, once in ten seconds the latency buckets, into shared memory.

RocketMQ samples in the broker's own process and prints; here whoever asks (`pyengine
status`, `top`, `metrics`) reads the samples and works out rates, so a look costs the
workers nothing. The supervisor runs this in its round; no thread, no wake-up of its own.
A successor goes on behind the samples of the dead one.
"""

from __future__ import annotations

from collections.abc import Callable

from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.statistics import totals
from pyengine.native import store_stats
from pyengine.native.flush import monotonic_ns

SAMPLE_NS = 1_000_000_000      # StoreStatsService.FREQUENCY_OF_SAMPLING
SNAPSHOT_NS = 10_000_000_000
EARLY_NS = 50_000_000          # a round comes a little early now and then: that is the second's sample all the same


class StoreStatsService:
    """The sampler of one engine."""

    def __init__(self, memory: EngineMemory, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self._memory = memory
        self._clock_ns = clock_ns
        self._stats = memory.counters
        before = store_stats.samples(self._stats)
        taken = store_stats.snapshots(self._stats)
        self._due_ns = before[-1].at_ns + SAMPLE_NS if before else 0
        self._snapshot_due_ns = taken[-1].at_ns + SNAPSHOT_NS if taken else 0

    def tick(self) -> None:
        """Take what is due; cheap when nothing is."""
        now_ns = self._clock_ns()
        if now_ns + EARLY_NS < self._due_ns:
            return
        self._due_ns = now_ns + SAMPLE_NS
        store_stats.take_sample(self._stats, totals(self._memory.control, self._stats, now_ns))
        if now_ns + EARLY_NS >= self._snapshot_due_ns:
            self._snapshot_due_ns = now_ns + SNAPSHOT_NS
            store_stats.take_snapshot(self._stats, now_ns)
