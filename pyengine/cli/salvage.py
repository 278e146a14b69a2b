"""`pyengine salvage`: carve what is valid out of a damaged store into a new one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.config import keep_sizes, load_config

if TYPE_CHECKING:
    from pyengine.storage.salvage.salvage import SalvageReport


@click.command()
@store_command
@click.argument("dest", type=click.Path(path_type=Path), metavar="DEST")
def salvage(store: Path, settings: dict[str, str], as_json: bool, dest: Path) -> int:
    """Make a new store at DEST from every whole record of a damaged one.

    The damaged store is not changed, and may be of a RocketMQ broker that will not start
    any more. Records keep their order and get new positions; queues, index and checkpoint
    are made anew. DEST must be absent or an empty folder. Where the store has no
    config/watermark (one of RocketMQ has none), nobody can tell whether messages are
    missing behind the last one that was found, and the report says so.

    Exit codes: 0 nothing is known to be missing, 4 something had to be left out.

    \b
    Examples:
      pyengine salvage STORE DEST
      pyengine salvage STORE DEST --set mappedFileSizeCommitLog=1GiB --json
    """
    from pyengine.storage.recovery.recover import RecoveryOptions
    from pyengine.storage.salvage.salvage import salvage as salvage_store

    existing_store(store)
    config = load_config(store, settings)
    options = RecoveryOptions.of(config)
    with byte_bar("salvage", None) as show:
        report = salvage_store(store, dest, config.geometry, options=options, progress=show)
    keep_sizes(dest, replace(config, store_path_commit_log="", read_only_commit_log_store_paths=""))  # its log is its own
    if as_json:
        output.write_json(report.to_dict())
    else:
        print_report(report, dest)
    return report.exit_code


def print_report(report: SalvageReport, dest: Path) -> None:
    """What came over and what did not, for people."""
    print(f"{report.records:,} records, {output.size_text(report.kept_bytes)}, are in {dest}")
    if report.skipped:
        output.write_table(("left out from", "to", "bytes", "why"), [
            (piece.start, piece.end, piece.end - piece.start, piece.reason) for piece in report.skipped])
    for start in report.missing_segments:
        print(f"the segment at {start:,} is missing")
    if report.moved_queues:
        output.write_table(("topic", "queue", "newest offsets moved up by"), [
            (topic, queue_id, by) for (topic, queue_id), by in sorted(report.moved_queues.items())])
    for note in report.notes:
        print(f"note: {output.printable(note)}")
