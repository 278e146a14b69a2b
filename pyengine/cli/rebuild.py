"""`pyengine rebuild`: queues and index again, from the log alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.cli.spark_session import master_option, spark_option, spark_session
from pyengine.config import load_config
from pyengine.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from pyengine.storage.recovery.rebuild import RebuildReport


@click.command()
@store_command
@click.option("--topic", default=None, help="Only this topic's queues, and not the index unless --index says so.")
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="Only this queue of the topic.")
@click.option("--queues", is_flag=True, help="Queues, and not the index unless --index is given too.")
@click.option("--index", is_flag=True, help="The index, and no queue unless --queues or --topic is given too.")
@spark_option
@master_option
def rebuild(
    store: Path, settings: dict[str, str], as_json: bool, topic: str | None, queue_id: int | None, queues: bool, index: bool,
    on_spark: bool, master: str | None,
) -> int:
    """Make queues and index again from the commit log alone.

    All of them, or those that the options name. A queue that is lost or wrong comes back as it was,
    light queues and extension included; what stood there is moved to STORE/quarantine. The log itself
    is not changed, but for what `recover` would do to a store that was not stopped in order. The
    store must not be running. Interrupted, it can be run again; so does the next start.

    A queue of which the log holds no message any more is left as it is.

    --spark makes all queues and the index in Spark's workers, the same bytes (docs/spark.md); a
    store of some GiB on one host is sooner done without.

    Exit codes: 0 made again, 3 refused (damage below what was durable; nothing was changed),
    4 and part of the log went to quarantine, 5 in use.

    \b
    Examples:
      pyengine rebuild STORE
      pyengine rebuild STORE --topic orders --queue-id 0
      pyengine rebuild STORE --index --json
    """
    existing_store(store)
    if on_spark or master is not None:
        if topic is not None or queues or index:
            raise UsageError("--spark makes all queues and the index: leave out --topic, --queue-id, --queues and --index")
        config = load_config(store, settings)
        with spark_session("pyengine rebuild", master) as spark, byte_bar("rebuild", None) as show:
            from pyengine.spark.store_rebuild import rebuild as rebuild_in_workers

            report = rebuild_in_workers(spark, store, config=config, progress=show)
        return output.print_report(report, as_json, print_report)
    from pyengine.ipc.crashed_engine_memory import rebuild_alone
    from pyengine.storage.recovery.rebuild import Selection

    selection = Selection(queues=queues or topic is not None or not index, index=index or not (queues or topic is not None),
                          topic=topic, queue_id=queue_id)
    config = load_config(store, settings)
    with byte_bar("rebuild", None) as show:
        report = rebuild_alone(store, config, selection, progress=show)
    return output.print_report(report, as_json, print_report)


def print_report(report: RebuildReport) -> None:
    """What was made again, for people."""
    if report.exit_code is not ExitCode.CORRUPTION:
        print(report.sentence)
    output.write_facts([("queues", len(report.queues)), ("index", report.index), ("log end", report.end_offset),
                        ("bytes dispatched", report.log_bytes), ("seconds", report.seconds)])
    for topic, queue_id in report.kept:
        print(f"kept: queue {queue_id} of {output.printable(topic)}, of which the log holds no message any more")
    for note in report.notes:
        print(f"note: {output.printable(note)}")
