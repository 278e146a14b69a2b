"""`pyengine start`, `wait`, `stop` and `clean`: run the engine of a store, wait until it runs, stop it in order, delete old messages."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from pyengine.cli import output
from pyengine.cli.config import broker_conf_option, with_broker_conf
from pyengine.cli.output import (
    NumberRange,
    Reply,
    ShowBytes,
    byte_bar,
    json_option,
    set_option,
    store_argument,
    store_command,
)
from pyengine.engine_config import keywords
from pyengine.errors import EngineError, EngineUnavailableError, ExitCode, UsageError, command, passing
from pyengine.ipc.store_lock import owning
from pyengine.storage.config import existing_store, load_config, set_arguments
from pyengine.storage.log_holds import lowest_log_hold

if TYPE_CHECKING:
    from pyengine.services.clean_files import CleanRequest
    from pyengine.services.clean_resource import Cleaned
    from pyengine.storage.config import EngineConfig


@click.command()
@store_argument
@set_option
@json_option
@click.option("--foreground", is_flag=True, help="Stay in the foreground; log on stderr.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=3600.0, show_default=True,
              help="Longest wait, in seconds.")
@click.option("--take-over", is_flag=True,
              help="Replace the running supervisor: an upgrade without a stop.")
@broker_conf_option
def start(
    store: Path, settings: dict[str, str], as_json: bool, foreground: bool, timeout_s: float, take_over: bool,
    broker_conf: Path | None,
) -> int:
    """Start the engine of a store, and return when it is ready.

    It creates a STORE that does not exist (about 85 MB; file sizes are then fixed), and recovers one that was not stopped in
    order. Its log is STORE/engine.log.

    Exit codes: 0 running, 6 running but read-only (degraded), 3 refused for damage,
    5 already running, running with other settings, or open in a broker.

    \b
    Examples:
      pyengine start STORE --set flush_disk_type=SYNC_FLUSH
      pyengine start STORE --broker-conf conf/broker.conf
      pyengine start STORE --set mapped_file_size_commit_log_bytes=16MiB --set max_index_num=40000
    """
    from pyengine.cli.promote import as_user, launch_settings, require_restartable, take_over_steps
    from pyengine.engine.embedded import end_supervisor, start_engine, supervisor_pid
    from pyengine.ipc.control_block import EngineMemory, read_run_settings
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.storage.consumer_offset import ConsumerOffsets
    from pyengine.storage.message_store import NewStoreSpace

    if foreground and as_json:
        raise UsageError("--foreground prints the engine's log and has no JSON document: leave --json out")
    settings, notes = with_broker_conf(broker_conf, store, settings)
    for note in notes:
        output.note(note)
    config = load_config(store, settings)
    if take_over and supervisor_pid(store) is not None:
        with EngineMemory.of(store) as memory:
            running = launch_settings(store, memory)
        require_restartable(store, running, take_over_steps(store, running), "start", store, "--take-over")
        end_supervisor(store, config)
    if foreground:
        become_supervisor(store, settings)
    with byte_bar("recover", None) as show:
        ready = start_engine(store, settings, progress=show, timeout_s=timeout_s, on_wait=output.note)
    for note in ConsumerOffsets(store).notes():
        output.note(note)
    if (owner := store.stat().st_uid) not in (0, os.geteuid()):
        output.note(f"the store's user cannot use this engine: stop it, then start it as {as_user(owner, 'start', store)}")
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
def wait(store: Path, settings: dict[str, str], timeout_s: float) -> Reply:
    """Wait until the engine of a store takes puts. Another process may start it later.

    Exit code 1: not in time, or it cannot (degraded, a slave, fenced, another user's).

    \b
    Example:
      pyengine wait STORE && exec python my_service.py
    """
    from pyengine.cli.engine_status import why_fenced
    from pyengine.ipc.session_client import open_session, require_engine, until_ready
    from pyengine.native import control as native

    def attempt(left_s: float) -> None:
        require_engine(store)
        with open_session(store, timeout_s=left_s) as session:
            refused = native.load(session.memory.control.state, "refuse_puts")
        if refused & (native.REFUSE_SLAVE | native.REFUSE_FENCED):
            raise EngineError(f"{store}: {why_fenced(refused, store) or 'a slave takes no puts: put to its master'}")
        if refused:
            raise passing(EngineUnavailableError(f"the engine on {store} takes no puts now; {command('status', store)} says why"))

    started_s = time.monotonic()
    load_config(store, settings)
    until_ready(attempt, timeout_s)
    return Reply({"store": str(store), "seconds": round(time.monotonic() - started_s, 3)}, "running")


@click.command()
@store_command
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=60.0, show_default=True,
              help="Longest wait, in seconds.")
def stop(store: Path, settings: dict[str, str], timeout_s: float) -> Reply:
    """Stop the engine of a store. It refuses puts and flushes everything; the command succeeds also if none runs.

    The next start needs no recovery, and a RocketMQ broker may open the store.

    \b
    Example:
      pyengine stop STORE
    """
    from pyengine.engine.embedded import stop_engine
    from pyengine.ipc.control_block import EngineMemory
    from pyengine.ipc.shared_objects import KIND_NAMES
    from pyengine.native import control as native

    existing_store(store)
    if settings:  # otherwise not: a broken engine.toml must not prevent a stop
        load_config(store, settings)
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        blocked = None
        with contextlib.suppress(EngineError):  # none runs, or it starts or ends now
            blocked = stack.enter_context(EngineMemory.of(store)).open_blocked_reasons()
        was_running = stop_engine(store, timeout_s)
        for kind in (native.CHECKPOINTER, native.SCHEDULER, native.GATEWAY):
            if was_running and blocked is not None and (why := native.read_blocked_reason(blocked, kind)):
                output.note(f"the {KIND_NAMES[kind]} was blocked when it ended: {why}")
    seconds = time.monotonic() - started_s
    unclean = (store / "abort").exists()
    idle = "was not running" + ("; it was not stopped in order before: the next start recovers it" if unclean else "")
    return Reply(
        {"store": str(store), "state": "stopped", "was_running": was_running, "unclean": unclean, "seconds": round(seconds, 3)},
        f"stopped in {seconds:.1f} s" if was_running else idle)


@click.command()
@store_command
@click.option("--older-than", "hours", type=NumberRange(min=0), metavar="HOURS",
              help="Delete segments of this age, not file_reserved_time_hours; 0: all but the last.")
@click.option("--until-used", "percent", type=click.IntRange(min=1, max=99), metavar="PERCENT",
              help="Delete the oldest segments until no more of the disk is used.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=600.0, show_default=True,
              help="Longest wait for a running engine, in seconds.")
def clean(store: Path, settings: dict[str, str], hours: float | None, percent: int | None, timeout_s: float) -> Reply:
    """Delete old segments of the log. Queue and index files that only they needed go too.

    The cleaner does it by itself (docs/cleaning.md). The last segment, and what is not yet durable and in queues, remain.

    \b
    Examples:
      pyengine clean STORE --older-than 12
    """
    from pyengine.services.clean_files import CleanRequest

    existing_store(store)
    if hours is not None and percent is not None:
        raise click.UsageError("give --older-than or --until-used, not both")
    request = CleanRequest(None if hours is None else round(hours * 3_600_000), percent or 0)
    config = load_config(store, settings)
    with byte_bar("clean", None) as show:
        cleaned = _clean(store, config, request, timeout_s, show)
    hold = lowest_log_hold(store, time.time_ns() // 1_000_000)
    if hold is not None:
        output.note(f"the log hold {hold.name} of {hold.owner} keeps the log from {hold.offset} on (`pyengine status`); to end it, "
                    f"delete {store / 'config/log-holds' / hold.name}")
    document = {"store": str(store), "segments": cleaned.segments, "bytes": cleaned.bytes, "queue_files": cleaned.queue_files,
                "index_files": cleaned.index_files, "min": cleaned.min_offset}
    return Reply(
        document, f"deleted {cleaned.segments} segments ({output.size_text(cleaned.bytes)}), {cleaned.queue_files} queue files and "
                  f"{cleaned.index_files} index files; the log begins at {cleaned.min_offset}")


def _clean(root: Path, config: EngineConfig, request: CleanRequest, timeout_s: float, show: ShowBytes) -> Cleaned:
    from pyengine.ipc.control_block import EngineMemory
    from pyengine.ipc.store_lock import living_kinds
    from pyengine.services.clean_resource import request_cleaning

    if living_kinds(root):
        with EngineMemory.of(root, writable=True) as memory:
            return request_cleaning(memory, request, timeout_s, show)
    return clean_offline(root, config, request, show)


def clean_offline(root: Path, config: EngineConfig, request: CleanRequest, show: ShowBytes) -> Cleaned:
    """Clean a store; StoreBusyError if a process has it open, EngineError if it needs recovery or a folder of its log is missing."""
    from pyengine.results import ReadLevel
    from pyengine.services.clean_resource import clean_stopped
    from pyengine.storage.checkpoint import REBUILD, abort_file_exists, read_marker
    from pyengine.storage.message_store import MessageStore
    from pyengine.storage.store_reader import StoreReader

    with owning(root):
        if abort_file_exists(root):
            raise EngineError(f"{root} was not stopped in order: run {command('recover', root)} first")
        if read_marker(root) is not None or REBUILD.read(root).record is not None:
            raise EngineError(f"a recovery or a rebuild of {root} has begun and needs the log as it is: "
                              f"{command('recover', root)} finishes it")
        store = MessageStore(root, config.geometry)
        store.list_complete_log()
        with StoreReader(root, **keywords(config.overrides())) as reader:
            end = reader.max_physical_offset(ReadLevel.COMMITTED)
        return clean_stopped(store, config, max(0, end), request, show)
