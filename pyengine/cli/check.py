"""`pyengine check` and `diff`: check a whole store; compare two stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.output import GivenPath, byte_bar, master_option, spark_option, spark_session, store_command
from pyengine.storage.config import existing_store, load_config

if TYPE_CHECKING:
    from pyengine.storage.check.diff import DiffReport
    from pyengine.storage.check.report import CheckReport


@click.command()
@store_command
@click.option("--acked", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, metavar="FILE",
              help="Acknowledged messages that the store must have, as JSON lines: topic, queue_id, queue_offset, "
                   "physical_offset (or null), body_sha256; `ingest --acked` writes such a file.")
@spark_option
@master_option
def check(store: Path, settings: dict[str, str], as_json: bool, acked: Path | None, on_spark: bool, master: str | None) -> int:
    """Check a whole store, and change nothing. The command reads log chain, CRCs, queues, index, config and
    checkpoint.

    While an engine runs, the command checks all dispatched data except the newest index file, which is
    being written; on a degraded engine everything; beside a RocketMQ broker what its checkpoint calls
    flushed and is older than 3 s. Each finding has a grade and a remedy: a notice needs no action;
    repairable data is still complete in the log; a loss is a message that is missing, damaged or
    unreachable in this copy. An error (exit code 3) breaks a promise of the store; a warning is
    what recovery repairs, or what RocketMQ leaves that way; an info needs no action.

    --spark gives the same result and reads in Spark's workers, on several processors or hosts
    (docs/spark.md). For a store of some GiB on one host the command is faster without it.

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
    output.print_answer(report.to_dict(), as_json, lambda: print_report(report))
    return report.exit_code


def print_report(report: CheckReport) -> None:
    """Print the findings, worst first, and what was checked."""
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


@click.command()
@store_command
@click.argument("other", type=GivenPath(path_type=Path), metavar="OTHER")
def diff(store: Path, settings: dict[str, str], as_json: bool, other: Path) -> int:
    """Compare a store with its slave or its copy. The command changes nothing.

    The command compares the logs record by record, over the range that both have, and the ends of
    the queues. A copy whose log ends earlier, or begins later after deletions, is reported as such
    and does not count as different. The report has the first offset that differs, records that only
    one store has, fields of records that differ, queues with different ends, and counts by topic.
    Engines may run on both stores: the command ignores later messages.

    Exit codes: 0 equal in the range that both have, 3 different, 1 no part of the log is in both.

    \b
    Examples:
      pyengine diff STORE OTHER
      pyengine diff STORE OTHER --json
    """
    existing_store(store)
    existing_store(other)
    from pyengine.ipc.live_reader import diff_now

    with byte_bar("diff", None) as show:
        report = diff_now(store, other, settings=settings, progress=show)
    output.print_answer(report.to_dict(), as_json, lambda: _print_diff(report))
    return report.exit_code


def _print_diff(report: DiffReport) -> None:
    """Print the differences, then counts by topic."""
    document = report.to_dict()
    if report.found.differences:
        output.write_table(("offset", "topic", "queue", "number", "what"), [
            (one.physical_offset, one.topic, one.queue_id, one.queue_offset, _difference_text(one.kind, one.fields, one.bad_crc))
            for one in report.found.differences], title="records")
    if document["left_out"]:
        print(f"{document['left_out']:,} more records that differ are not shown")
    if report.queues:
        output.write_table(("topic", "queue", "end in STORE", "end in OTHER"), [
            (one.topic, one.queue_id, one.store, one.other) for one in report.queues], title="queues")
    if report.found.topics:
        output.write_table(("topic", "messages in STORE", "in OTHER", "differ", "only in STORE", "only in OTHER"), [
            (topic, counts.store, counts.other, counts.differing, counts.only_in_store, counts.only_in_other)
            for topic, counts in sorted(report.found.topics.items())], title="topics")
    print(report.sentence)
    for note in report.notes:
        print(f"note: {output.printable(note)}")
    output.write_facts([
        *((name, f"{one.min_offset:,} to {one.end_offset:,}  {output.printable(one.path)}")
          for name, one in (("STORE", report.store), ("OTHER", report.other))),
        ("compared", f"{report.start:,} to {report.end:,}" if report.start < report.end else "nothing"),
        ("read", f"{output.size_text(2 * max(0, report.end - report.start))} in {report.seconds:.2f} s")])


def _difference_text(kind: str, fields: tuple[str, ...], bad_crc: tuple[str, ...]) -> str:
    """Return for example `only in STORE` or `body differs; the body does not fit its checksum in OTHER`."""
    text = f"{', '.join(fields)} {'differ' if len(fields) > 1 else 'differs'}" if kind == "differs" else kind.replace("_", " ")
    return text.replace("only in store", "only in STORE").replace("only in other", "only in OTHER") + "".join(
        f"; the body does not fit its checksum in {where.upper()}" for where in bad_crc)
