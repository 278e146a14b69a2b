"""`pyengine ingest`: puts the lines of files into a running engine, one message for each line.

Each producer gets a contiguous share of the input as byte ranges of files. A line belongs to the range that has its first
byte: the producer of a range skips the line in which it starts and finishes the line in which it ends. So every line is
read exactly once.

One producer runs in the command's own process, several in processes of their own, which send what they have put through a pipe.
Such a process ends when its parent dies, since the pipe is then broken.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from pyengine.arguments import mapping
from pyengine.cli import output
from pyengine.cli.output import Reply, byte_bar, store_command, topic_option
from pyengine.engine_config import keywords
from pyengine.errors import DiskError, EngineError, ExitCode, UsageError, os_error_sentence
from pyengine.formats.constants import INTERNAL_PROPERTY_NAMES, PROPERTY_UNIQ_KEY, RESERVED_PROPERTY_NAMES
from pyengine.results import PutManyResult, PutResult, PutStatus
from pyengine.storage.config import existing_store
from pyengine.storage.file_system import open_output

if TYPE_CHECKING:
    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import Producer

STDIN = Path("-")
STOP_TIMEOUT_S = 20.0


@click.command()
@store_command
@topic_option
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True), metavar="FILE...")
@click.option("--queues", type=click.IntRange(min=1), default=1, show_default=True,
              help="Spread over queues 0 to N-1, batch by batch.")
@click.option("--producers", type=click.IntRange(min=1), default=1, show_default=True,
              help="Producer processes, each with a share of the input.")
@click.option("--format", type=click.Choice(["lines", "jsonl"]), default="lines", show_default=True,
              help="Whether a line is a body or a JSON object.")
@click.option("--tags", default=None, help="The tag of every message, with --format lines.")
@click.option("--glob", "pattern", default=None, help="Of folders, only such files, as in '*.py'.")
@click.option("--acked", type=click.Path(dir_okay=False), default=None, metavar="FILE",
              help="Append a JSON line for each acknowledged message, for `check --acked`.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Read the input this many times.")
def ingest(store: Path, settings: dict[str, str], files: tuple[Path, ...], producers: int, pattern: str | None, repeat: int,
           **options: Any) -> Reply:
    """Put each line of the files as a message. It prints count and rate.

    A folder stands for the files under it, - for standard input. Lines of one producer in one queue keep their order.

    --format jsonl: objects with `body` (text) or `body_base64`, and optionally queue_id, tags, keys,
    properties, flag, delay_level, unique_key; or messages as `tail --json` prints them.

    \b
    Examples:
      journalctl -o cat | pyengine ingest STORE --topic journal -
    """
    existing_store(store)
    if STDIN in files and (len(files) > 1 or producers > 1 or repeat > 1):
        raise UsageError("- (standard input) is read once, by one producer, and cannot be given with other files")
    whole = Job(str(store), settings, **options)
    if whole.format == "jsonl" and whole.tags is not None:
        raise UsageError("--tags needs --format lines: with jsonl each line has its own tags")
    if whole.acked is not None:
        with AckedList(whole.acked):  # a file that cannot be written is an error before the first batch
            pass
    jobs, total_bytes = _split_job(whole, [] if STDIN in files else find_files(files, pattern) * repeat, producers)
    started = time.monotonic()
    with byte_bar(f"ingest into {whole.topic}", total_bytes) as show:
        def report(now: Tally) -> None:
            show(now.read_bytes)

        tally = produce(jobs[0], report) if len(jobs) == 1 else run_jobs(jobs, report)
    return _answer(tally, time.monotonic() - started, len(jobs), whole.topic)


def _split_job(whole: Job, files: Sequence[Path], producers: int) -> tuple[list[Job], int | None]:
    """Split `whole` into a job for each producer that has work; return the jobs and the total bytes, None for standard input."""
    if not files:
        return [whole], None
    sized = [(str(path), size_of(path)) for path in files]
    shares = [share for share in share_out(sized, producers) if share]
    jobs = [replace(whole, first_queue=number * whole.queues // producers, ranges=share) for number, share in enumerate(shares)]
    return jobs, sum(size for _, size in sized)


def _answer(tally: Tally, seconds: float, producers: int, topic: str) -> Reply:
    rate = tally.messages / seconds if seconds else 0.0
    byte_rate = tally.body_bytes / seconds if seconds else 0.0
    document = {"topic": topic, **asdict(tally), "producers": producers, "seconds": round(seconds, 6),
                "messages_per_s": round(rate, 1), "body_bytes_per_s": round(byte_rate, 1)}
    unconfirmed = f"\n{tally.unconfirmed:,} of them are stored but not confirmed as durable" if tally.unconfirmed else ""
    return Reply(
        document, f"{tally.messages:,} messages, {output.size_text(tally.body_bytes)} in {seconds:.2f} s: {rate:,.0f} messages/s, "
                  f"{output.size_text(byte_rate)}/s, {producers} producer{'' if producers == 1 else 's'}{unconfirmed}",
        ExitCode.FAILED if tally.unconfirmed else ExitCode.OK)


def find_files(paths: Sequence[Path], pattern: str | None) -> list[Path]:
    """Return the named files; a folder stands for the regular files under it, in order of name.

    `pattern` (as in a shell) selects among the files of folders. UsageError for a path that does not exist, or a folder
    without such a file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*")
                            if file.is_file() and (pattern is None or fnmatch(file.name, pattern)))
            if not inside:
                raise UsageError(f"{path} contains no file{f' like {pattern}' if pattern else ''}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{path} does not exist")
    return found


def share_out(files: Sequence[tuple[str, int]], producers: int) -> list[list[Range]]:
    """Split (path, size) pairs into a list of ranges for each producer, of almost equal size; leave out empty ones."""
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
    """Return a file's size; UsageError if it is not a regular file, which has no known end."""
    state = os.stat(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path} is not a regular file; give - to read standard input")
    return state.st_size


def run_jobs(jobs: Sequence[Job], report: Callable[[Tally], None]) -> Tally:
    """Run each job in a process of its own to the end; return the tally of all.

    If one fails, stop the others and raise its EngineError. No producer process remains afterwards, also after Ctrl-C.
    """
    try:
        os.chdir(os.getcwd())  # as multiprocessing has them do
    except OSError:  # it is removed, or this user may not enter it
        os.chdir("/")
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: dict[Connection, int] = {}
    tallies = [Tally() for _ in jobs]
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # also theirs: Ctrl-C is for this process, which then ends them
        given = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"  # the producers import nothing from the current directory
        try:
            for number, job in enumerate(jobs):
                pipe, theirs = context.Pipe(duplex=False)
                pipes[pipe] = number
                process = context.Process(target=_produce_alone, args=(job, theirs))
                process.start()
                processes.append(process)
                theirs.close()
        finally:
            os.environ.pop("PYTHONSAFEPATH")
            if given is not None:
                os.environ["PYTHONSAFEPATH"] = given
            signal.signal(signal.SIGINT, before)
        while pipes:
            ready = wait(pipes)
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                number = pipes[pipe]
                found = _received(pipe, processes[number], tallies[number])
                if found is None:
                    del pipes[pipe]
                else:
                    tallies[number] = found
                    report(_sum(tallies))
        return _sum(tallies)
    finally:
        try:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(STOP_TIMEOUT_S)
        finally:  # also after a second Ctrl-C
            for process in processes:
                process.kill()


def _received(pipe: Connection, process: SpawnProcess, tally: Tally) -> Tally | None:
    """Return the tally that a producer sends, None if it has finished, or raise its error."""
    try:
        found: Tally | EngineError | None = pipe.recv()
    except (EOFError, OSError):
        process.join()
        raise EngineError(f"a producer (pid {process.pid}) ended without an answer, exit code {process.exitcode}; "
                          f"at least {tally.messages:,} of its messages had been acknowledged") from None
    if isinstance(found, EngineError):
        raise found
    return found


def _sum(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _produce_alone(job: Job, pipe: Connection) -> None:
    """Be the process of one job: send the tally at most every REPORT_INTERVAL_S, then None, or the error."""
    sent_s = 0.0

    def report(now: Tally) -> None:
        nonlocal sent_s
        if time.monotonic() - sent_s >= REPORT_INTERVAL_S:
            sent_s = time.monotonic()
            pipe.send(now)

    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            pipe.send(produce(job, report))
            pipe.send(None)
        except EngineError as error:
            pipe.send(error)
        except OSError as error:
            pipe.send(EngineError(os_error_sentence(error)))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(ExitCode.INTERRUPTED)


ROWS_AT_ONCE = 1024
BLOCK_BYTES = 1 << 20  # of input read at once, and so the largest batch
BATCH_MESSAGES = 1024
IN_FLIGHT = 512
# Stored, but without the requested durability.
UNCONFIRMED = (PutStatus.FLUSH_DISK_TIMEOUT, PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE)
JSONL_FIELDS = ("body", "body_base64", "queue_id", "tags", "keys", "properties", "flag", "delay_level", "unique_key")
REPORT_INTERVAL_S = 0.1


class Range(NamedTuple):
    """The lines of a file that begin in [start, end)."""

    path: str
    start: int
    end: int


def read_blocks(file: BinaryIO, start: int, end: int, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """Yield the lines that start in [start, end) as blocks of whole lines, of about `block_bytes`, with newlines.

    `file` is seekable and buffered. The last line of the file may lack its newline.
    """
    if start:
        file.seek(start - 1)
        file.readline()
    else:
        file.seek(0)
    position = file.tell()
    while position < end:
        block = file.read(min(block_bytes, end - position))
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()
        position += len(block)
        yield block


def read_stream(file: io.BufferedReader, block_bytes: int) -> Iterator[bytes]:
    """Yield what comes from `file`, when it comes, in blocks of whole lines, with newlines. The last line may lack its newline."""
    begun: list[bytes] = []
    while piece := file.read1(block_bytes):
        lines, newline, rest = piece.rpartition(b"\n")
        if newline:
            yield b"".join([*begun, lines, newline])
            begun.clear()
        begun.append(rest)
    if last := b"".join(begun):
        yield last


class AckedList:
    """Appends a line for each acknowledged message to the file at `path`, at each write() and at the end of its block.

    UsageError if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._descriptor = open_output(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except (OSError, DiskError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot write the list of acknowledged messages {path}: {reason}") from error
        self._path = path
        self._rows: list[bytes] = []

    def add(self, result: PutResult | PutManyResult, bodies: Sequence[bytes]) -> None:
        """Add the messages of one answer, if it is PUT_OK."""
        if not result.ok:
            return
        if isinstance(result, PutManyResult):
            first, offsets = result.first_queue_offset, [result.first_physical_offset, *[None] * (len(bodies) - 1)]
        else:
            first, offsets = result.queue_offset, [result.physical_offset]
        for number, (body, physical_offset) in enumerate(zip(bodies, offsets, strict=True)):
            row = {"topic": result.topic, "queue_id": result.queue_id, "queue_offset": first + number,
                   "physical_offset": physical_offset, "body_sha256": hashlib.sha256(body).hexdigest()}
            self._rows.append(json.dumps(row).encode() + b"\n")
        if len(self._rows) >= ROWS_AT_ONCE:
            self.write()

    def write(self) -> None:
        """Write what was added, in one write(2) if the kernel takes all."""
        rest, self._rows = b"".join(self._rows), []
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest):]
        except OSError as error:
            raise DiskError(f"cannot write the list of acknowledged messages {self._path}: {error.strerror}",
                            errno=error.errno or 0, path=str(self._path)) from error

    def __enter__(self) -> AckedList:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        finally:
            os.close(self._descriptor)


@dataclass(frozen=True)
class Job:
    """One producer's part of an ingest. Without ranges it reads standard input."""

    store: str
    settings: dict[str, str]
    topic: str
    queues: int
    format: str
    tags: str | None
    acked: str | None = None  # the file that lists acknowledged messages
    first_queue: int = 0
    ranges: list[Range] = field(default_factory=list)


@dataclass
class Tally:
    """What was acknowledged so far; `read_bytes` counts the bytes of those lines in the input."""

    messages: int = 0
    body_bytes: int = 0
    read_bytes: int = 0
    unconfirmed: int = 0

    def add(self, other: Tally) -> None:
        self.messages += other.messages
        self.body_bytes += other.body_bytes
        self.read_bytes += other.read_bytes
        self.unconfirmed += other.unconfirmed


def produce(job: Job, report: Callable[[Tally], None]) -> Tally:
    """Put every line of the job, and report the tally after each batch.

    If a line is not a message or a put is refused, raise EngineError with file and line. The last report counts what was
    acknowledged until then.
    """
    from pyengine import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S

    tally = Tally()
    with contextlib.ExitStack() as stack:
        acked = stack.enter_context(AckedList(job.acked)) if job.acked else None
        producer = stack.enter_context(connect(
            job.store, ring_bytes=None, timeout_s=CONNECT_TIMEOUT_S, refusals="return", **keywords(job.settings)))
        producer._is_copy = job.format == "jsonl"  # of `tail --json`
        _enter_topic(job)
        work = _Work(producer, job, tally, report, acked)
        for name, first_line, lines in _inputs(job):
            if job.format == "lines":
                work.put_lines(name, first_line, lines)
            else:
                work.put_objects(name, first_line, lines)
    return tally


def _enter_topic(job: Job) -> None:
    """Enter a new topic with the queues that the job uses; a name that no topic can have is refused with the first put."""
    from pyengine.client.outgoing import RefusedError, topic_bytes
    from pyengine.storage.config_table import TopicConfig, TopicConfigs

    if job.queues > 1:
        with contextlib.suppress(RefusedError):
            topic_bytes(job.topic)
            TopicConfigs(job.store).ensure(TopicConfig(job.topic, job.queues, job.queues))


def _inputs(job: Job) -> Iterator[tuple[str, int | None, Iterator[bytes]]]:
    """Yield (name, number of the first line if known, blocks of whole lines) of each range."""
    if not job.ranges:
        with contextlib.suppress(OSError):  # no pipe: a larger one fills while a put waits
            fcntl.fcntl(sys.stdin.buffer, fcntl.F_SETPIPE_SZ, BLOCK_BYTES)
        yield "standard input", 1, read_stream(sys.stdin.buffer, BLOCK_BYTES)  # type: ignore[arg-type]  # it is buffered
    for path, start, end in job.ranges:
        with open(path, "rb") as file:
            yield path, 1 if start == 0 else None, read_blocks(file, start, end, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class _Work:
    """Puts one job; counts, reports and lists what was acknowledged."""

    producer: Producer
    job: Job
    tally: Tally
    report: Callable[[Tally], None]
    acked: AckedList | None

    def put_lines(self, name: str, first_line: int | None, blocks: Iterator[bytes]) -> None:
        """Put each batch with put_many, into the queues in turn, so that each queue keeps the input's order."""
        job, number, queue = self.job, first_line, self.job.first_queue
        for block in blocks:
            lines = block.removesuffix(b"\n").split(b"\n")
            unread = len(block)
            for at in range(0, len(lines), BATCH_MESSAGES):
                bodies = lines[at : at + BATCH_MESSAGES]
                result = self.producer.put_many(job.topic, bodies, queue_id=queue % job.queues, tags=job.tags)
                body_bytes = sum(map(len, bodies))
                read_bytes = min(unread, body_bytes + len(bodies))  # the last line of a file may lack its newline
                unread -= read_bytes
                self._count(result, _location(name, number), bodies, read_bytes)
                queue += 1
                number = number + len(bodies) if number is not None else None
                self.report(self.tally)

    def put_objects(self, name: str, first_line: int | None, blocks: Iterator[bytes]) -> None:
        """Put each line with put_async, with at most IN_FLIGHT unanswered puts; take the answers in order."""
        waiting: deque[tuple[PutFuture[PutResult], int | None, int, bytes]] = deque()

        def settle(most: int) -> None:
            while waiting and (len(waiting) > most or waiting[0][0].done()):  # a refusal is told soon
                future, number, line_bytes, body = waiting.popleft()
                self._count(future.result(), _location(name, number), [body], line_bytes)

        number, count = first_line, self.job.first_queue
        for block in blocks:
            unread = len(block)
            for line in block.removesuffix(b"\n").split(b"\n"):
                read_bytes = min(unread, len(line) + 1)  # the last line of a file may lack its newline
                unread -= read_bytes
                try:
                    arguments = _object_arguments(line, _location(name, number))
                    arguments.setdefault("queue_id", count % self.job.queues)
                    body = arguments.pop("body")
                    future = self.producer.put_async(self.job.topic, body, **arguments)
                except TypeError as error:  # for example tags that are a number
                    raise UsageError(f"{_location(name, number)}: {error}") from error
                waiting.append((future, number, read_bytes, body))
                settle(IN_FLIGHT)
                count += 1
                number = number + 1 if number is not None else None
                if count % IN_FLIGHT == 0:
                    self.report(self.tally)
        settle(0)
        self.report(self.tally)

    def _count(self, result: PutManyResult | PutResult, location: str, bodies: Sequence[bytes], read_bytes: int) -> None:
        """Count what was acknowledged; for a refusal raise EngineError that names file and line."""
        is_unconfirmed = result.status in UNCONFIRMED
        if not result.ok and not is_unconfirmed:
            not_stored = "" if result.indeterminate else " are not stored"  # the reason of an indeterminate result says it
            raise EngineError(f"{location}: the next {len(bodies)} line(s){not_stored}: {result.status.name}: {result.reason}")
        if self.acked is not None:
            self.acked.add(result, bodies)
        self.tally.add(Tally(len(bodies), sum(map(len, bodies)), read_bytes, len(bodies) if is_unconfirmed else 0))


def _object_arguments(line: bytes, where: str) -> dict[str, Any]:
    """Return the arguments of a put from one line of JSON; UsageError names the line and what is wrong."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(document, dict) or ("body" in document) == ("body_base64" in document):
        raise UsageError(f"{where}: give an object with body (text) or body_base64")
    if "physical_offset" in document:  # a message of a store: the new one gets places, times and the broker's properties of its own
        if "compression" in document and document.get("body_bytes") == document.get("stored_body_bytes"):  # --raw, or a body_error
            why = document.get("body_error", "print it without --raw")
            raise UsageError(f"{where}: its body is still compressed by {document['compression']}: {why}")
        given = mapping(document.get("properties") or {}, "properties")
        document = {name: value for name, value in document.items() if name in JSONL_FIELDS} | {"properties": {
            name: text for name, text in given.items() if name not in RESERVED_PROPERTY_NAMES | INTERNAL_PROPERTY_NAMES}}
        if PROPERTY_UNIQ_KEY in given:  # a later put of the key with `once` finds this one
            document["unique_key"] = given[PROPERTY_UNIQ_KEY]
    unknown = sorted(document.keys() - set(JSONL_FIELDS))
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(JSONL_FIELDS)}")
    encoded = document.pop("body_base64", None)
    try:
        document["body"] = document["body"].encode() if encoded is None else base64.b64decode(encoded, validate=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: the body is not text, or body_base64 is not base64: {error}") from error
    return document


def _location(name: str, number: int | None) -> str:
    return f"{name}, line {number}" if number is not None else name
