"""`pyengine start`, `wait` and `stop`: run the engine of a store, wait until it runs, and stop it in order."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from pyengine.cli import output
from pyengine.cli.config import broker_conf_option, with_broker_conf
from pyengine.cli.output import NumberRange, byte_bar, store_command
from pyengine.errors import ExitCode, UsageError
from pyengine.storage.config import existing_store, load_config, set_arguments


@click.command()
@store_command
@click.option("--foreground", is_flag=True, help="Stay in the foreground, for systemd and containers; log on stderr.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=3600.0, show_default=True,
              help="Longest wait for readiness, in seconds.")
@click.option("--take-over", is_flag=True,
              help="End the running supervisor and adopt its workers: an upgrade without a stop.")
@broker_conf_option
def start(
    store: Path, settings: dict[str, str], as_json: bool, foreground: bool, timeout_s: float, take_over: bool,
    broker_conf: Path | None,
) -> int:
    """Start the engine of a store, and return when it is ready.

    If STORE does not exist, the command creates it; its file sizes are then fixed. If the
    store was not stopped in order, the command recovers it first. If only the supervisor was
    killed, a new one adopts the living workers without recovery: it refuses settings that
    differ from theirs, and then restarts workers of another build of pyengine one by one. The
    engine's log is STORE/engine.log.

    Space: a new store takes up to 64 MiB for its log, 24 MiB for its index with the first key, and
    64 KiB for each queue. Its files have their full lengths, and get blocks as they fill. For small
    stores choose smaller files, as below. A disk with too little space for the first messages is refused.

    --broker-conf uses a RocketMQ broker's delay levels, retention, role, flush mode, sizes and store host for this
    run, and names on stderr what it does not use or what differs from the store (`config explain --broker-conf` lists all).

    Exit codes: 0 running, 6 running but read-only (degraded), 3 refused for damage,
    5 already running, running with other settings, or open in a broker.

    \b
    Examples:
      pyengine start STORE
      pyengine start STORE --set flush_disk_type=SYNC_FLUSH
      pyengine start STORE --broker-conf conf/broker.conf
      pyengine start STORE --take-over
      pyengine start STORE --set mapped_file_size_commit_log_bytes=16MiB --set max_index_num=40000
    """
    from pyengine.engine.embedded import end_supervisor, start_engine
    from pyengine.ipc.control_block import read_run_settings
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.storage.message_store import NewStoreSpace

    if foreground and as_json:
        raise UsageError("--foreground prints the engine's log and has no JSON document: leave --json out")
    settings, notes = with_broker_conf(broker_conf, store, settings)
    for note in notes:
        print(f"note: {output.printable(note)}", file=sys.stderr)
    config = load_config(store, settings)
    if take_over:
        end_supervisor(store, config)
    if foreground:
        become_supervisor(store, settings)
    with byte_bar("recover", None) as show:
        ready = start_engine(store, settings, progress=show, timeout_s=timeout_s)
    if as_json:
        config = read_run_settings(find_folder(store))
        output.write_json({"store": str(store), "space": NewStoreSpace.of(config)._asdict(), **ready})
    else:
        print(f"{ready['state']} (pid {ready['pid']}, {ready['mode']}): {ready.get('recovery') or ready.get('reason') or ''}"
              f"{'living workers were taken over' if ready.get('adopted') else ''}")
        print(f"log: {store / 'engine.log'}")
    return ExitCode.OK if ready["state"] == "running" else ExitCode.DEGRADED


def become_supervisor(store: Path, settings: dict[str, str]) -> NoReturn:
    """Become the supervisor in this process; SIGTERM and Ctrl-C stop the engine in order."""
    from pyengine.engine.kinds import child_environment

    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(store.absolute()), *set_arguments(settings)],
              child_environment())


@click.command()
@store_command
@click.option("--timeout", "timeout_s", type=NumberRange(min=0), default=60.0, show_default=True, help="Longest wait, in seconds.")
def wait(store: Path, settings: dict[str, str], as_json: bool, timeout_s: float) -> None:
    """Wait until the engine of a store takes puts.

    The store need not exist yet: another process or container may make and start it. Exit code
    1 if no engine takes puts in time, or if it is there and cannot take any (degraded, another user's).

    \b
    Examples:
      pyengine wait STORE && exec python my_service.py
      pyengine wait STORE --timeout 300
    """
    from pyengine.ipc.session_client import open_session, until_ready

    started_s = time.monotonic()
    load_config(store, settings)
    until_ready(lambda left_s: open_session(store, timeout_s=left_s).close(), timeout_s)
    output.print_answer({"store": str(store), "seconds": round(time.monotonic() - started_s, 3)}, as_json, lambda: print("running"))


@click.command()
@store_command
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=60.0, show_default=True,
              help="Longest wait, in seconds; after that the engine still continues to stop.")
def stop(store: Path, settings: dict[str, str], as_json: bool, timeout_s: float) -> None:
    """Stop the engine of a store. It refuses puts, flushes everything and removes `abort`.

    The next start then needs no recovery, and a RocketMQ broker may open the store. If no
    engine runs, the command succeeds.

    \b
    Examples:
      pyengine stop STORE
      pyengine stop STORE --timeout 300
    """
    from pyengine.engine.embedded import stop_engine

    existing_store(store)
    if settings:  # otherwise not: a broken engine.toml must not prevent a stop
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
