"""`pyengine top`: a running engine at a glance, refreshed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, set_option, store_argument

if TYPE_CHECKING:
    from pyengine.cli.top_look import Look

DrawLook = Callable[["Look"], None]


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
    from pyengine.cli.top_look import Watcher

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
