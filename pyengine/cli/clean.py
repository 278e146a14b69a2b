"""`pyengine clean`: delete old messages now, at any hour."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.output import NumberRange, ShowBytes, byte_bar, store_command
from pyengine.errors import EngineError, command
from pyengine.ipc.store_lock import owning
from pyengine.storage.config import existing_store, load_config
from pyengine.storage.log_holds import lowest_log_hold

if TYPE_CHECKING:
    from pyengine.services.retention.clean_files import Request
    from pyengine.services.retention.clean_resource import Cleaned
    from pyengine.storage.config import EngineConfig


@click.command()
@store_command
@click.option("--older-than", "hours", type=NumberRange(min=0), metavar="HOURS",
              help="Delete segments of this age in hours instead of file_reserved_time_hours; 0 deletes all but the last.")
@click.option("--until-used", "percent", type=click.IntRange(min=1, max=99), metavar="PERCENT",
              help="Delete the oldest segments, of any age, until at most this percentage of the disk is used.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=600.0, show_default=True,
              help="Longest wait for a running engine, in seconds; it continues to clean after that.")
def clean(store: Path, settings: dict[str, str], as_json: bool, hours: float | None, percent: int | None,
          timeout_s: float) -> None:
    """Delete old segments of the log. The command also deletes the queue and index files that only they
    needed.

    The engine's cleaner does the same at the hours of delete_when and when the disk fills; this
    command does it at once and without a limit on the number of segments. It asks a running engine
    to do it, and works on a store that was stopped in order. It keeps the last segment and all
    messages that are not yet durable and in their queues. docs/cleaning.md has the rules.

    \b
    Examples:
      pyengine clean STORE
      pyengine clean STORE --older-than 12
      pyengine clean STORE --until-used 60 --json
    """
    from pyengine.services.retention.clean_files import Request

    existing_store(store)
    if hours is not None and percent is not None:
        raise click.UsageError("give --older-than or --until-used, not both")
    request = Request(None if hours is None else round(hours * 3_600_000), percent or 0)
    config = load_config(store, settings)
    with byte_bar("clean", None) as show:
        cleaned = _clean(store, config, request, timeout_s, show)
    hold = lowest_log_hold(store, time.time_ns() // 1_000_000)
    if hold is not None:
        click.echo(f"note: the log hold {hold.name} of {hold.owner} keeps the log from {hold.offset} on (`pyengine status`); to end "
                   f"it, delete {store / 'config/log-holds' / hold.name}", err=True)
    if as_json:
        output.write_json({
            "store": str(store), "segments": cleaned.segments, "bytes": cleaned.bytes, "queue_files": cleaned.queue_files,
            "index_files": cleaned.index_files, "min": cleaned.min_offset})
    else:
        print(f"deleted {cleaned.segments} segments ({output.size_text(cleaned.bytes)}), {cleaned.queue_files} queue files "
              f"and {cleaned.index_files} index files; the log begins at {cleaned.min_offset}")


def _clean(root: Path, config: EngineConfig, request: Request, timeout_s: float, show: ShowBytes) -> Cleaned:
    from pyengine.ipc.control_block import EngineMemory
    from pyengine.ipc.store_lock import living_kinds
    from pyengine.services.retention.clean_resource import request_cleaning

    if living_kinds(root):
        with EngineMemory.of(root, writable=True) as memory:
            return request_cleaning(memory, request, timeout_s, show)
    return clean_offline(root, config, request, show)


def clean_offline(root: Path, config: EngineConfig, request: Request, show: ShowBytes) -> Cleaned:
    """Clean a store; StoreBusyError if a process has it open, EngineError if it needs recovery."""
    from pyengine.results import ReadLevel
    from pyengine.services.retention.clean_resource import clean_stopped
    from pyengine.storage.checkpoint import abort_file_exists, read_marker, read_rebuild_marker
    from pyengine.storage.message_store import MessageStore
    from pyengine.storage.store_reader import open_store

    with owning(root):
        if abort_file_exists(root):
            raise EngineError(f"{root} was not stopped in order: run {command('recover', root)} first")
        if read_marker(root) is not None or read_rebuild_marker(root) is not None:
            raise EngineError(f"a recovery or a rebuild of {root} has begun and needs the log as it is: "
                              f"{command('recover', root)} finishes it")
        with open_store(root, watermark=None, **config.overrides()) as store:
            end = store.max_physical_offset(ReadLevel.COMMITTED)
        return clean_stopped(MessageStore(root, config.geometry), config, max(0, end), request, show)
