"""`pyengine tables`: each topic as a table of Delta Lake or Iceberg, filled once or for as long as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.output import byte_bar
from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine.client.tables import Format, TablesReport


@click.command()
@store_command
@click.argument("dest", metavar="DEST")
@click.option("--to", type=click.Choice(["delta", "iceberg"]), required=True, help="What the tables are.")
@click.option("--topic", "topics", default=None, metavar="PATTERN",
              help="Regular expression for whole names; all but RocketMQ's internal topics if not given.")
@click.option("--follow/--once", default=False, help="Go on until it is interrupted, or end with what is there now (the default).")
@click.option("--interval", "interval_s", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True,
              help="With --follow: seconds between two commits of a table, at least.")
@click.option("--hold-hours", type=click.FloatRange(min=0, max=168), default=24.0, show_default=True,
              help="How long after its last commit the log is kept from the cleaner; 0: only while it runs.")
@click.option("--allow-loss", is_flag=True, help="Go on where messages were deleted before they were read.")
def tables(store: Path, settings: dict[str, str], as_json: bool, dest: str, to: Format, topics: str | None, follow: bool,
           interval_s: float, hold_hours: float, allow_loss: bool) -> int:
    """Fill tables in the folder DEST from the log, one for each topic, partitioned by day; each message once.

    Works beside a running engine and on a stopped store, with what is durable. Killed anywhere, the next
    run goes on where the tables are. Until then the log is held (`log_holds` in `status`), so that
    what is not in the tables is not deleted. docs/tables.md has the columns and how they are read.

    \b
    Examples:
      pyengine tables STORE --to delta /lake/orders
      pyengine tables STORE --to iceberg /lake/orders --follow --topic 'orders.*'
    """
    from pyengine.client.tables import write_tables

    existing_store(store)
    if not dest or "://" in dest:
        raise UsageError(f"DEST {dest!r} is no folder of this host: tables are written to a local disk, where they can be made durable")
    with byte_bar("tables", None) as show:
        report = write_tables(store, Path(dest), to, topics=topics, follow=follow, interval_s=interval_s, hold_hours=hold_hours,
                              allow_loss=allow_loss, progress=show, settings=settings)
    return output.print_report(report, as_json, _print_tables)


def _print_tables(report: TablesReport) -> None:
    print(report.sentence)
    if report.missed_bytes:
        print(f"note: {report.missed_bytes:,} bytes of the log were deleted before they were read")
    if report.messages:
        output.write_table(("topic", "messages added"), sorted(report.messages.items()))
    output.write_facts([("log up to", report.offset), ("seconds", report.seconds)])
