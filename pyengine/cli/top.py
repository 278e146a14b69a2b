"""`pyengine top`: a running engine at a glance, refreshed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.engine_status import engine_status, live_status
from pyengine.cli.options import existing_store, set_option, store_argument
from pyengine.ipc.statistics import Statistics
from pyengine.native import store_stats

DrawLook = Callable[["Look"], None]
RATES = ("put_messages", "put_bytes", "wrote", "committed", "flushed", "reput_from", "confirm", "syncs", "refused_puts")
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and look, with rates per second.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True,
              help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(min=1), default=None, help="Stop after this many looks.")
def top(store: Path, settings: dict[str, str], as_json: bool, interval_s: float, count: int | None) -> None:
    """Watch an engine: rates, latencies, positions, workers, topics; Ctrl-C ends it.

    Rates and percentiles are those between two looks. Reads shared memory only: the
    workers do not notice.

    \b
    Examples:
      pyengine top STORE
      pyengine top STORE --interval 0.5 --count 10 --json
    """
    watcher = Watcher(existing_store(store), settings)
    looks = 0
    with _drawing(as_json) as draw:
        while True:
            draw(watcher.look())
            looks += 1
            if looks == count:
                return
            time.sleep(interval_s)


@contextmanager
def _drawing(as_json: bool) -> Iterator[DrawLook]:
    """How looks are shown: JSON lines, a screen of its own on a terminal, else one after the other."""
    if as_json:
        yield _print_json
        return
    from pyengine.cli.top_screen import screen

    console = output.console()
    if not sys.stdout.isatty():
        def draw(look: Look) -> None:
            console.print(screen(look))
            sys.stdout.flush()

        yield draw
        return
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda look: live.update(screen(look), refresh=True)


def _print_json(look: Look) -> None:
    document: dict[str, Any] = {**look.document, "rates_per_s": look.rates_per_s, "between_looks": look.latencies_ms,
                                "topic_rates_per_s": look.topic_rates_per_s}
    output.write_json(document)
    sys.stdout.flush()


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
            if before is not None and before.figures is None and before.document["state"] == "stopped":
                document = before.document
            else:
                document = engine_status(self._root, self._settings)
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
    return int(document["positions"].get(name, document.get(name, 0)))


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
