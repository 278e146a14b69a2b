"""`pyengine backup`, `restore` and `tables`: copy a store, restore it from a copy, export it into tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import NumberRange, Reply, byte_bar, store_command
from pyengine.engine_config import keywords
from pyengine.errors import UsageError
from pyengine.storage.config import existing_store

if TYPE_CHECKING:
    from pyengine.client.backup import BackupReport, RestoreReport
    from pyengine.client.tables import Format, TablesReport


@click.command()
@store_command
@click.argument("dest", metavar="DEST")
@click.option("--check", "read_back", is_flag=True, help="Read all of DEST back afterwards and verify its checksums.")
def backup(store: Path, settings: dict[str, str], dest: str, read_back: bool) -> Reply:
    """Back up a running or stopped store into DEST. DEST is a folder or a URI (s3://bucket/path).

    It has every message that was flushed before it began. A second backup into DEST copies what is new.

    Exit code 3: complete, but the store's own log is damaged.

    \b
    Example:
      pyengine backup STORE s3://bucket/orders --check --json
    """
    from pyengine.client.backup import backup_store

    with byte_bar("backup", None) as show:
        report = backup_store(store, dest, read_back=read_back, progress=show, **keywords(settings))
    return Reply.of(report, _print_backup)


def _print_backup(report: BackupReport) -> None:
    if not report.damage:
        print(report.sentence)
    facts: list[tuple[str, object]] = [
        ("log", f"{report.min_offset:,} to {report.end_offset:,}"), ("in the backup", output.size_text(report.bytes)),
        ("new", output.size_text(report.new_bytes)), ("of that shared with the store's blocks", output.size_text(report.cloned_bytes))]
    if report.rewritten_bytes:
        facts += [("of that other bytes than before", output.size_text(report.rewritten_bytes))]
    if report.checked_bytes:
        facts += [("read back", output.size_text(report.checked_bytes))]
    output.write_facts([*facts, ("seconds", report.seconds)])


@click.command()
@click.argument("dest", metavar="DEST")
@store_command
def restore(dest: str, store: Path, settings: dict[str, str]) -> Reply:
    """Restore the backup in DEST to STORE. STORE is absent or empty, and gets a new identity.

    It verifies each file, rebuilds queues and index, and checks the store.

    Exit code 3: the backup is damaged (nothing is restored), or the log was when it was backed up.

    \b
    Example:
      pyengine restore s3://bucket/orders STORE --json
    """
    from pyengine.client.backup import restore_store

    with byte_bar("restore", None) as show:
        report = restore_store(dest, store, progress=show, **keywords(settings))
    return Reply.of(report, _print_restore)


def _print_restore(report: RestoreReport) -> None:
    print(report.sentence)
    facts: list[tuple[str, object]] = [
        ("backup of", output.time_text(report.taken_ms)), ("log", f"{report.min_offset:,} to {report.end_offset:,}"),
        ("identity", report.uuid)]
    if report.rebuilt is not None:
        facts += [("queues made again", len(report.rebuilt.queues)), ("queues without messages", len(report.rebuilt.kept))]
    if report.check is not None:
        facts += [("messages", report.check.messages), ("findings", len(report.check.findings))]
    output.write_facts([*facts, ("seconds", report.seconds)])


@click.command()
@store_command
@click.argument("dest", metavar="DEST")
@click.option("--to", type=click.Choice(["delta", "iceberg"]), required=True, help="The table format.")
@click.option("--topic", "topics", default=None, metavar="PATTERN",
              help="Regular expression for whole names. Default: all but RocketMQ's internal topics.")
@click.option("--follow/--once", default=False, help="Continue until interrupted, or stop at the log's end (the default).")
@click.option("--interval", "interval_s", type=NumberRange(min=0, min_open=True), default=10.0, show_default=True,
              help="With --follow: seconds between two commits, at least.")
@click.option("--hold-hours", type=NumberRange(min=0, max=168), default=24.0, show_default=True,
              help="How long after its last commit the cleaner keeps the log.")
@click.option("--allow-loss", is_flag=True, help="Continue after messages deleted before they were read.")
@click.option("--allow-missing", is_flag=True, help="Accept a --topic that no topic matches yet.")
@click.option("--json-schema", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
              help="Columns from bodies that are JSON (docs/tables.md).")
def tables(store: Path, settings: dict[str, str], dest: str, to: Format, json_schema: Path | None, **options: Any) -> Reply:
    """Copy the log into tables in DEST. Each topic has one, partitioned by day, with each message once.

    The next run continues where the tables end; until then a hold keeps the log (docs/tables.md).

    Exit code 1: the tables of some topics could not be written.

    \b
    Examples:
      pyengine tables STORE --to iceberg /lake/orders --follow --topic 'orders.*'
    """
    from pyengine.client.tables import TopicsFailedError, write_tables

    existing_store(store)
    columns = None if json_schema is None else _json_columns(json_schema)
    with byte_bar("tables", None) as show:
        try:
            report = write_tables(store, dest, to, json=columns, progress=show, settings=settings, **options)
        except TopicsFailedError as failed:
            report = failed.report
    return Reply.of(report, _print_tables)


def _json_columns(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f'the schema {path} is no JSON object: give for example {{"amount": "double"}}')
    return found


def _print_tables(report: TablesReport) -> None:
    print(report.sentence)
    if report.missed_bytes:
        print(f"note: {report.missed_bytes:,} bytes of the log were deleted before they were read")
    if report.messages:
        output.write_table(("topic", "messages added"), sorted(report.messages.items()))
    if report.failed:
        output.write_table(("topic that failed", "why"), sorted(report.failed.items()))
    output.write_facts([("log up to", report.offset), ("seconds", report.seconds)])
