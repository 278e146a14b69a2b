"""`pyengine backup`, `restore` and `tables`: copy a store, restore it from a copy, export it into tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli.output import NumberRange, Reply, byte_bar, store_command
from pyengine.engine_config import keywords
from pyengine.errors import UsageError
from pyengine.storage.config import existing_store

if TYPE_CHECKING:
    from pyengine.client.tables import Format


@click.command()
@store_command
@click.argument("dest", metavar="DEST")
@click.option("--check", "read_back", is_flag=True, help="Read all of DEST back afterwards and verify its checksums.")
def backup(store: Path, settings: dict[str, str], dest: str, read_back: bool) -> Reply:
    """Back up a running or stopped store into DEST. DEST is a folder or a URI (s3://bucket/path).

    It has every message that was acknowledged before it began. A second backup into DEST copies what is new.

    Exit code 3: complete, but the store's own log is damaged.

    \b
    Example:
      pyengine backup STORE s3://bucket/orders --check --json
    """
    from pyengine.client.backup import backup_store

    with byte_bar("backup", None) as show:
        report = backup_store(store, dest, read_back=read_back, progress=show, **keywords(settings))
    return Reply.of(report, "min_offset end_offset bytes new_bytes cloned_bytes rewritten_bytes? checked_bytes? seconds")


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
    return Reply.of(report, "taken_ms min_offset end_offset uuid queues_without_messages? seconds",
                    more={"queues_without_messages": report.rebuilt and report.rebuilt.kept})


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
    return Reply.of(report, "offset missed_bytes? seconds", messages="topic messages_added", failed="topic why")


def _json_columns(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"the schema {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f'the schema {path} is no JSON object: give for example {{"amount": "double"}}')
    return found
