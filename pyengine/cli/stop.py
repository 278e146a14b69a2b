"""`pyengine stop`: stop an engine in order."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.config import load_config


@click.command()
@store_command
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              help="Longest wait, in seconds; the engine goes on stopping after that.")
def stop(store: Path, settings: dict[str, str], as_json: bool, timeout_s: float) -> None:
    """Stop the engine of a store: puts are refused, everything is flushed, `abort` is removed.

    The next start then needs no recovery, and a RocketMQ broker may open the store. An
    engine that does not run is not an error.

    \b
    Examples:
      pyengine stop STORE
      pyengine stop STORE --timeout 300
    """
    from pyengine.engine.embedded import stop_engine

    existing_store(store)
    if settings:  # a broken engine.toml alone must not keep an engine from being stopped
        load_config(store, settings)
    started_s = time.monotonic()
    was_running = stop_engine(store, timeout_s)
    seconds = time.monotonic() - started_s
    unclean = (store / "abort").exists()
    if as_json:
        output.write_json({"store": str(store), "state": "stopped", "was_running": was_running, "unclean": unclean,
                           "seconds": round(seconds, 3)})
    elif was_running:
        print(f"stopped in {seconds:.1f} s")
    else:
        print("was not running" + ("; it was not stopped in order before: the next start recovers it" if unclean else ""))
