"""`pyengine start`: create or recover a store and run its engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from pyengine.cli import output
from pyengine.cli.options import store_command
from pyengine.cli.progress import byte_bar
from pyengine.cli.space import check_space, needed_space
from pyengine.config import load_config
from pyengine.errors import ExitCode, UsageError


@click.command()
@store_command
@click.option("--foreground", is_flag=True, help="Stay in the foreground, for systemd and containers; log on stderr.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=3600.0, show_default=True,
              help="Longest wait for readiness, in seconds.")
def start(store: Path, settings: dict[str, str], as_json: bool, foreground: bool, timeout_s: float) -> int:
    """Start the engine of a store, and return when it is ready.

    A store that does not exist is created; its file sizes are then fixed. One that was
    not stopped in order is recovered first. Living workers of a supervisor that was
    killed are taken over without recovery, as they run: settings that differ from theirs
    are refused. The engine's log is STORE/engine.log.

    Space: two segments are allocated ahead, an index file with the first key, and 64 KiB
    for each queue. For small stores make smaller files, as below.

    Exit codes: 0 running, 6 running but read-only (degraded), 3 refused for damage,
    5 already running, running with other settings, or open in a broker.

    \b
    Examples:
      pyengine start STORE
      pyengine start STORE --set flush_disk_type=SYNC_FLUSH
      pyengine start STORE --set mapped_file_size_commit_log_bytes=16MiB --set max_index_num=40000
    """
    from pyengine.engine.embedded import start_engine
    from pyengine.ipc.control_block import read_run_settings
    from pyengine.ipc.shared_objects import find_folder

    config = load_config(store, settings)
    check_space(store, config)
    if foreground:
        if as_json:
            raise UsageError("--foreground stays and prints a log, so there is no document: leave --json out")
        stay(store, settings)
    with byte_bar("recover", None) as show:
        ready = start_engine(store, settings, progress=show, timeout_s=timeout_s)
    if as_json:
        config = read_run_settings(find_folder(store))
        output.write_json({"store": str(store), "space": needed_space(config), **ready})
    else:
        print(f"{ready['state']} (pid {ready['pid']}, {ready['mode']}): {ready.get('recovery') or ready.get('reason') or ''}"
              f"{'living workers were taken over' if ready.get('adopted') else ''}")
        print(f"log: {store / 'engine.log'}")
    return ExitCode.OK if ready["state"] == "running" else ExitCode.DEGRADED


def stay(store: Path, settings: dict[str, str]) -> NoReturn:
    """Become the supervisor: this process stays, SIGTERM and Ctrl-C stop the engine in order."""
    from pyengine.engine.children import child_environment

    sys.stdout.flush()
    pairs = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    os.execve(sys.executable, [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(store.absolute()), *pairs],
              child_environment())
