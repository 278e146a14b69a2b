"""Two looks at an engine and what lies between them: rates and percentiles, for `pyengine top`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyengine.cli.engine_status import engine_status, live_status
from pyengine.ipc.statistics import Statistics
from pyengine.native import store_stats

RATES = ("put_messages", "put_bytes", "wrote", "committed", "flushed", "reput_from", "confirm", "syncs", "refused_puts")
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Look:
    """One look; what depends on the look before it is empty at the first, across a restart, and of a stopped store."""

    at_s: float
    document: dict[str, Any]
    figures: Statistics | None
    rates_per_s: dict[str, float] = field(default_factory=dict)
    topic_rates_per_s: dict[str, dict[str, float]] = field(default_factory=dict)
    latencies_ms: dict[str, dict[str, float | None]] = field(default_factory=dict)


class Watcher:
    """Looks at one store again and again."""

    def __init__(self, root: Path, settings: dict[str, str], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._settings = settings
        self._clock_s = clock_s
        self._before: Look | None = None

    def look(self) -> Look:
        """The store now."""
        live = live_status(self._root)
        if live is None:
            before = self._before
            # The files of a stopped store are read once, not at each look.
            stopped = before is not None and before.figures is None and before.document["state"] == "stopped"
            document = before.document if stopped else engine_status(self._root, self._settings)
            now = Look(self._clock_s(), document, None)
        else:
            now = between(self._before, Look(self._clock_s(), *live))
        self._before = now
        return now


def between(before: Look | None, now: Look) -> Look:
    """`now` with what happened since `before`."""
    if before is None or before.document.get("epoch") != now.document.get("epoch") or now.at_s <= before.at_s:
        return now
    seconds = now.at_s - before.at_s
    rates = {name: round((_counter(now.document, name) - _counter(before.document, name)) / seconds, 1) for name in RATES}
    if before.figures is None or now.figures is None:
        return Look(now.at_s, now.document, now.figures, rates)
    rates["dispatched"] = round((now.figures.dispatched - before.figures.dispatched) / seconds, 1)
    return Look(now.at_s, now.document, now.figures, rates, _topic_rates(before.figures, now.figures, seconds),
                _latencies(before.figures, now.figures))


def _counter(document: dict[str, Any], name: str) -> int:
    return document["positions"].get(name, document.get(name, 0))


def _topic_rates(before: Statistics, now: Statistics, seconds: float) -> dict[str, dict[str, float]]:
    """Topics that got something, the busiest first."""
    grown = {}
    for topic, count in now.topics.items():
        was = before.topics.get(topic)
        messages = count.messages - (was.messages if was else 0)
        size_bytes = count.size_bytes - (was.size_bytes if was else 0)
        if messages > 0:
            grown[topic] = {"messages": round(messages / seconds, 1), "bytes": round(size_bytes / seconds, 1)}
    return dict(sorted(grown.items(), key=lambda pair: (-pair[1]["messages"], pair[0])))


def _latencies(before: Statistics, now: Statistics) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for what, latency in now.histograms.items():
        was = before.histograms[what]
        grown = [max(0, count - old) for count, old in zip(latency.buckets, was.buckets, strict=True)]
        ns = {name: store_stats.percentile_ns(grown, share) for name, share in SHARES.items()}
        found[what] = {name: None if value is None else value / 1e6 for name, value in ns.items()}
    return found
