"""`pyengine check`: is everything there, whole, and found where it should be?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, master_option, spark_option, spark_session, store_command
from pyengine.cli.output import byte_bar
from pyengine.storage.config import load_config

if TYPE_CHECKING:
    from pyengine.storage.check.report import CheckReport


@click.command()
@store_command
@click.option("--acked", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, metavar="FILE",
              help="Acknowledged messages that must be there, as JSON lines: topic, queue_id, queue_offset, "
                   "physical_offset (or null), body_sha256; as `ingest --acked` writes it.")
@spark_option
@master_option
def check(store: Path, settings: dict[str, str], as_json: bool, acked: Path | None, on_spark: bool, master: str | None) -> int:
    """Check a whole store: log chain, CRCs, queues, index, config, checkpoint. Changes nothing.

    Beside a running engine everything that is dispatched is checked, beside a degraded one everything,
    beside a RocketMQ broker what its checkpoint calls flushed and is older than 3 s. Each finding has a
    grade, and says what to do: a notice needs nothing, what is repairable is still wholly in
    the log, a loss is a message that is gone, damaged or out of reach in this copy. An error
    (exit code 3) breaks a promise of the store; a warning is what recovery settles, or what
    RocketMQ leaves that way; an info is worth knowing.

    --spark finds the same, with the reading done in Spark's workers, on several processors or
    hosts (docs/spark.md); a store of some GiB on one host is checked sooner without.

    \b
    Examples:
      pyengine check STORE
      pyengine check STORE --acked acks.jsonl --json
      pyengine check STORE --spark --master 'local[4]'
    """
    existing_store(store)
    config = load_config(store, settings)
    if on_spark or master is not None:
        with spark_session("pyengine check", master) as spark, byte_bar("check", None) as show:
            from pyengine.spark.store_verify import verify

            report = verify(spark, store, config=config, acked=acked, progress=show)
    else:
        from pyengine.ipc.live_reader import check_now

        with byte_bar("check", None) as show:
            report = check_now(store, config, acked, show)
    if as_json:
        output.write_json(report.to_dict())
    else:
        print_report(report)
    return report.exit_code


def print_report(report: CheckReport) -> None:
    """Findings for people, worst first, and what was looked at."""
    if report.findings:
        output.write_table(("severity", "grade", "file", "offset", "what"), [
            (finding.severity.value, finding.grade.label, finding.file, finding.offset, finding.text)
            for finding in report.findings])
        print()
        for number, step in enumerate(report.advice, 1):
            print(f"to do{f' ({number})' if len(report.advice) > 1 else ''}: {output.printable(step)}")
    if report.left_out:
        print(f"{report.left_out:,} findings of the same kinds are not shown")
    print(report.sentence)
    output.write_facts([
        ("grade", report.grade.label), ("log", f"{report.min_offset:,} to {report.end_offset:,}"), ("messages", report.messages),
        ("queues", f"{report.queues:,} with {report.queue_entries:,} entries"),
        ("index", f"{report.index_files:,} files with {report.index_keys:,} keys"),
        *([("acknowledged", f"{report.acked:,} looked for, {report.acked_missing:,} missing")] if report.acked else []),
        ("read", f"{output.size_text(report.bytes)} in {report.seconds:.2f} s")])
