"""`pyengine ingest`: real files into a running engine, a message per line."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.acked_list import AckedList
from pyengine.cli.ingest_crew import run_crew
from pyengine.cli.ingest_plan import find_files, share_out, size_of
from pyengine.cli.ingest_work import Job, Tally, produce
from pyengine.cli.interrupt import StopAtBatchEnd
from pyengine.cli.options import existing_store, store_command, topic_option
from pyengine.cli.progress import byte_bar
from pyengine.errors import ExitCode, UsageError

STDIN = Path("-")


@click.command()
@store_command
@topic_option
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True), metavar="FILE...")
@click.option("--queues", type=click.IntRange(min=1), default=1, show_default=True,
              help="Spread over queues 0 to N-1, a batch of lines at a time.")
@click.option("--producers", type=click.IntRange(min=1), default=1, show_default=True,
              help="Put from this many processes, each with its share of the input.")
@click.option("--format", "format_", type=click.Choice(["lines", "jsonl"]), default="lines", show_default=True,
              help="A message is a line, or what a line of JSON says.")
@click.option("--tags", default=None, help="The tag of every message (lines).")
@click.option("--glob", "pattern", default=None, help="Of folders, only files like this, as in '*.py'.")
@click.option("--acked", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
              help="Append each acknowledged message to this list, for `check --acked`.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Read the input this many times.")
def ingest(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, files: tuple[Path, ...], queues: int,
    producers: int, format_: str, tags: str | None, pattern: str | None, acked: Path | None, repeat: int,
) -> int:
    """Put every line of FILE... as a message, and print count and rate.

    A folder stands for the files under it, - for standard input (one producer). Lines
    go out in batches, each acknowledged as one; the newline is not part of the message.
    Lines of one producer that went to one queue keep their order.

    --format jsonl: each line is an object with `body` (text) or `body_base64`, and, if
    wanted, queue_id, tags, keys, properties, flag, delay_level.

    --acked FILE: a line of JSON for each message that was acknowledged with PUT_OK; with it
    `pyengine check STORE --acked FILE` tells, whatever happened since, whether all of them are there.

    \b
    Examples:
      pyengine ingest STORE --topic logs /var/log/syslog
      pyengine ingest STORE --topic code --queues 4 --producers 2 --glob '*.py' /usr/lib/python3
      journalctl -o cat | pyengine ingest STORE --topic journal -
    """
    existing_store(store)
    if STDIN in files and (len(files) > 1 or producers > 1 or repeat > 1):
        raise UsageError("- (standard input) is read once, by one producer, and stands alone")
    if format_ == "jsonl" and tags is not None:
        raise UsageError("--tags is for lines; with jsonl each line says its own tags")
    if acked is not None:
        with AckedList(acked):  # refused now, not after the first batch
            pass
    jobs, total_bytes = _jobs(store, settings, topic, files, queues, producers, format_, tags, pattern, repeat, acked)
    started = time.monotonic()
    with byte_bar(f"ingest into {topic}", total_bytes) as show:
        tally = _produce_here(jobs[0], show) if len(jobs) == 1 else run_crew(jobs, lambda now: show(now.read_bytes))
    _print(tally, time.monotonic() - started, len(jobs), topic, as_json)
    return ExitCode.FAILED if tally.unconfirmed else ExitCode.OK


def _produce_here(job: Job, show: Callable[[int], None]) -> Tally:
    """One producer needs no process of its own."""
    with StopAtBatchEnd() as stop:
        def report(now: Tally) -> None:
            show(now.read_bytes)
            stop.check()

        return produce(job, report)


def _jobs(
    store: Path, settings: dict[str, str], topic: str, files: tuple[Path, ...], queues: int, producers: int,
    format_: str, tags: str | None, pattern: str | None, repeat: int, acked: Path | None,
) -> tuple[list[Job], int | None]:
    """One job for each producer that has something to do, and the bytes of all."""
    def job(number: int, ranges: list) -> Job:
        return Job(str(store), topic, settings, queues, number * queues // producers, format_, tags, ranges,
                   None if acked is None else str(acked))

    if STDIN in files:
        return [job(0, [])], None
    sized = [(str(path), size_of(path)) for path in find_files(files, pattern)] * repeat
    shares = [share for share in share_out(sized, producers) if share]
    return [job(number, share) for number, share in enumerate(shares)], sum(size for _, size in sized)


def _print(tally: Tally, seconds: float, producers: int, topic: str, as_json: bool) -> None:
    rate = tally.messages / seconds if seconds else 0.0
    byte_rate = tally.body_bytes / seconds if seconds else 0.0
    if as_json:
        output.write_json({
            "topic": topic, "messages": tally.messages, "body_bytes": tally.body_bytes, "read_bytes": tally.read_bytes,
            "unconfirmed": tally.unconfirmed, "producers": producers, "seconds": round(seconds, 6),
            "messages_per_s": round(rate, 1), "body_bytes_per_s": round(byte_rate, 1)})
        return
    print(f"{tally.messages:,} messages, {output.size_text(tally.body_bytes)} in {seconds:.2f} s: "
          f"{rate:,.0f} messages/s, {output.size_text(byte_rate)}/s, {producers} producer{'' if producers == 1 else 's'}")
    if tally.unconfirmed:
        print(f"{tally.unconfirmed:,} of them are stored but not confirmed as durable")
