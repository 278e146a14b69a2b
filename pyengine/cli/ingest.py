"""`pyengine ingest`: real files into a running engine, a message per line.

Files are cut into byte ranges, one contiguous share of the input per producer. A line belongs to the
range in which its first byte is, so any cut is a good one: the producer of a range skips the line it
starts inside of and finishes the line it ends inside of. Every line is read once.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

import click

from pyengine.cli import output
from pyengine.cli.ingest_producer import AckedList, Job, Range, StopAtBatchEnd, Tally, produce
from pyengine.cli.options import existing_store, store_command, topic_option
from pyengine.cli.output import byte_bar
from pyengine.engine.children import child_environment
from pyengine.errors import EngineError, ExitCode, UsageError

STDIN = Path("-")
STOP_TIMEOUT_S = 20.0


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

    A folder means the files under it, - standard input (one producer). Lines
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
        raise UsageError("- (standard input) is read once, by one producer, and cannot be given with other files")
    if format_ == "jsonl" and tags is not None:
        raise UsageError("--tags is for lines; with jsonl each line says its own tags")
    if acked is not None:
        with AckedList(acked):  # refused now, not after the first batch
            pass
    whole = Job(str(store), topic, settings, queues, 0, format_, tags, [], None if acked is None else str(acked))
    jobs, total_bytes = _share_out(whole, [] if STDIN in files else find_files(files, pattern) * repeat, producers)
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


def _share_out(whole: Job, files: Sequence[Path], producers: int) -> tuple[list[Job], int | None]:
    """`whole` as one job for each producer that has something to do, and the bytes of all; no files are standard input."""
    if not files:
        return [whole], None
    sized = [(str(path), size_of(path)) for path in files]
    shares = [share for share in share_out(sized, producers) if share]
    jobs = [replace(whole, first_queue=number * whole.queues // producers, ranges=share) for number, share in enumerate(shares)]
    return jobs, sum(size for _, size in sized)


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


def find_files(paths: Sequence[Path], pattern: str | None) -> list[Path]:
    """The files that were named; a folder stands for the regular files under it, in order of name.

    `pattern` (as in a shell) picks among the files of folders. UsageError for a path
    that is not there or a folder without any such file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*")
                            if one.is_file() and (pattern is None or fnmatch(one.name, pattern)))
            if not inside:
                raise UsageError(f"{path} holds no file{f' like {pattern}' if pattern else ''}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{path} does not exist")
    return found


def share_out(files: Sequence[tuple[str, int]], producers: int) -> list[list[Range]]:
    """(path, size) pairs as one list of ranges per producer, equal in bytes to within a few; empty ones left out."""
    total = sum(size for _, size in files)
    bounds = [total * number // producers for number in range(producers + 1)]
    shares: list[list[Range]] = [[] for _ in range(producers)]
    base = 0
    for path, size in files:
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            start, end = max(low - base, 0), min(high - base, size)
            if start < end:
                shares[number].append(Range(path, start, end))
        base += size
    return shares


def size_of(path: Path) -> int:
    """A file's size; UsageError if it is no regular file (its end is not known)."""
    state = os.stat(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path} is no regular file; give - to read standard input")
    return state.st_size


def run_crew(jobs: Sequence[Job], report: Callable[[Tally], None]) -> Tally:
    """Run each job in a process of its own, to the end; the tally of all.

    If one fails the others are stopped, and its EngineError is raised here. However this
    is left (Ctrl-C too), no producer process remains.
    """
    crew: list[subprocess.Popen[bytes]] = []
    tallies = [Tally() for _ in jobs]
    done: set[int] = set()
    try:
        for job in jobs:
            crew.append(_start(job))
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(crew):
                selector.register(_stdout_of(process), selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    number = key.data
                    line = _stdout_of(crew[number]).readline()
                    if line:
                        tallies[number], finished = _read(line)
                        done |= {number} if finished else set()
                        report(_sum(tallies))
                        continue
                    selector.unregister(key.fileobj)
                    code = crew[number].wait()
                    if number not in done:
                        raise EngineError(
                            f"a producer (pid {crew[number].pid}) ended without an answer, exit code {code}; "
                            f"{tallies[number].messages:,} of its messages had been acknowledged")
        return _sum(tallies)
    finally:
        for process in crew:
            _stop(process)


def _start(job: Job) -> subprocess.Popen[bytes]:
    # In a group of its own: Ctrl-C in a terminal is for this process, which then ends the crew.
    process = subprocess.Popen([sys.executable, "-P", "-m", "pyengine.cli.ingest_producer"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=child_environment(), process_group=0)
    assert process.stdin is not None
    process.stdin.write(job.to_json().encode())
    process.stdin.close()
    return process


def _stdout_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _read(line: bytes) -> tuple[Tally, bool]:
    """(tally, whether the producer has finished) from one report; raises the error that it tells of."""
    document = json.loads(line)
    finished, error, code = document.pop("done", False), document.pop("error", None), document.pop("exit_code", 1)
    if error is not None:
        failure = EngineError(error)
        failure.exit_code = ExitCode(code)
        raise failure
    return Tally(**document), finished


def _sum(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _stdout_of(process).close()
