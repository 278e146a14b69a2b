"""`pyengine top`: a running engine at a glance, refreshed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, set_option, store_argument

RATES = ("put_messages", "put_bytes", "wrote", "committed", "flushed", "reput_from", "syncs")


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and look, with rates per second.")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0.05), default=1.0, show_default=True,
              help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(min=1), default=None, help="Stop after this many looks.")
def top(store: Path, settings: dict[str, str], as_json: bool, interval_s: float, count: int | None) -> None:
    """Watch an engine: rates, positions, workers, producers; Ctrl-C ends it.

    \b
    Examples:
      pyengine top STORE
      pyengine top STORE --interval 0.5 --count 10 --json
    """
    from pyengine.cli.engine_status import engine_status

    existing_store(store)
    before: tuple[float, dict[str, Any]] | None = None
    looks = 0
    while True:
        now = time.monotonic(), engine_status(store, settings)
        rates = _rates(before, now)
        if as_json:
            output.write_json({**now[1], "rates_per_s": rates})
        else:
            _draw(now[1], rates)
        sys.stdout.flush()
        before = now
        looks += 1
        if looks == count:
            return
        time.sleep(interval_s)


def _rates(before: tuple[float, dict[str, Any]] | None, now: tuple[float, dict[str, Any]]) -> dict[str, float]:
    """Growth per second of each counter between two looks; empty at the first, or across a restart."""
    if before is None or before[1].get("epoch") != now[1].get("epoch"):
        return {}
    seconds = now[0] - before[0]
    return {name: round((_counter(now[1], name) - _counter(before[1], name)) / seconds, 1) for name in RATES}


def _counter(document: dict[str, Any], name: str) -> int:
    return document["positions"].get(name, document.get(name, 0))


def _draw(document: dict[str, Any], rates: dict[str, float]) -> None:
    if sys.stdout.isatty():
        click.clear()
    output.write_facts([
        ("store", document["store"]),
        ("state", document["state"] + (f": {document['reason']}" if document["reason"] else "")),
        ("mode", f"{document['mode']}, {document['role']}"), ("producers", document["sessions"]),
        ("puts/s", rates.get("put_messages")), ("written/s", output.size_text(rates.get("put_bytes", 0.0))),
        ("syncs/s", rates.get("syncs"))])
    print()
    output.write_table(("position", "offset", "per second"), [
        (name, value, output.size_text(rates.get(name, 0.0))) for name, value in document["positions"].items()])
    if document["workers"]:
        print()
        output.write_table(("worker", "pid", "state", "restarts", "heartbeat ms ago"), [
            (one["kind"], str(one["pid"]), one["state"], one["restarts"], one["heartbeat_age_ms"])
            for one in document["workers"]])
    print()
