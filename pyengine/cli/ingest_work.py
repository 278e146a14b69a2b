"""What one producer of `pyengine ingest` does: lines in, acknowledged batches out.

The same function runs in the command's own process (one producer) and in processes of
its own (`python -m pyengine.cli.ingest_producer`, several).
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from pyengine.cli.acked_list import AckedList
from pyengine.cli.ingest_plan import Range, read_blocks, split_lines
from pyengine.errors import EngineError, UsageError
from pyengine.results import PutManyResult, PutResult, PutStatus

if TYPE_CHECKING:
    from pyengine.client.producer import Producer

BLOCK_BYTES = 1 << 20  # of input read at once; bounds a batch too
BATCH_MESSAGES = 1024
IN_FLIGHT = 512

# Stored, but not with the durability that was asked for.
UNCONFIRMED = (PutStatus.FLUSH_DISK_TIMEOUT, PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE)
JSONL_FIELDS = ("body", "body_base64", "queue_id", "tags", "keys", "properties", "flag", "delay_level")


@dataclass(frozen=True)
class Job:
    """One producer's part of an ingest. No ranges means standard input."""

    store: str
    topic: str
    settings: dict[str, str]
    queues: int
    first_queue: int
    format: str
    tags: str | None
    ranges: list[Range] = field(default_factory=list)
    acked: str | None = None  # the file that lists what was acknowledged

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**values | {"ranges": [Range(*one) for one in values["ranges"]]})


@dataclass
class Tally:
    """What has been acknowledged so far; `read_bytes` is how much of the input that was."""

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

    EngineError, naming file and line, when a line cannot be a message or a put is
    refused; what was acknowledged until then is in the last report.
    """
    from pyengine import connect

    tally = Tally()
    with contextlib.ExitStack() as stack:
        acked = stack.enter_context(AckedList(job.acked)) if job.acked else None
        producer = stack.enter_context(connect(job.store, **job.settings))
        put = _put_lines if job.format == "lines" else _put_objects
        for name, first_line, lines in _inputs(job):
            put(producer, job, name, first_line, lines, tally, report, acked)
    return tally


def _inputs(job: Job) -> Iterator[tuple[str, int | None, Iterator[bytes]]]:
    """(name, number of the first line if known, blocks of whole lines) of each range."""
    if not job.ranges:
        yield "standard input", 1, _stdin_blocks(sys.stdin.buffer)
    for path, start, end in job.ranges:
        with open(path, "rb") as file:
            yield path, 1 if start == 0 else None, read_blocks(file, start, end, BLOCK_BYTES)


def _stdin_blocks(stream: BinaryIO) -> Iterator[bytes]:
    while lines := stream.readlines(BLOCK_BYTES):
        yield b"".join(lines)


def _put_lines(
    producer: Producer, job: Job, name: str, first_line: int | None, blocks: Iterator[bytes], tally: Tally,
    report: Callable[[Tally], None], acked: AckedList | None,
) -> None:
    """One put_many per batch; batches go round the queues, so each queue keeps the input's order."""
    number = first_line
    queue = job.first_queue
    for block in blocks:
        lines = split_lines(block)
        unread = len(block)
        for at in range(0, len(lines), BATCH_MESSAGES):
            bodies = lines[at : at + BATCH_MESSAGES]
            result = producer.put_many(job.topic, bodies, queue_id=queue % job.queues, tags=job.tags)
            _check(result, name, number, len(bodies))
            if acked is not None:
                acked.add(result, bodies)
            body_bytes = sum(map(len, bodies))
            read_bytes = min(unread, body_bytes + len(bodies))  # the last line of a file may lack its newline
            unread -= read_bytes
            tally.messages += len(bodies)
            tally.body_bytes += body_bytes
            tally.read_bytes += read_bytes
            tally.unconfirmed += len(bodies) if result.status in UNCONFIRMED else 0
            queue += 1
            number = number + len(bodies) if number is not None else None
            report(tally)


def _put_objects(
    producer: Producer, job: Job, name: str, first_line: int | None, blocks: Iterator[bytes], tally: Tally,
    report: Callable[[Tally], None], acked: AckedList | None,
) -> None:
    """One asynchronous put per line, at most IN_FLIGHT unanswered, answered in order."""
    waiting: deque[tuple[Any, int | None, int, bytes]] = deque()

    def settle(most: int) -> None:
        while len(waiting) > most:
            future, number, line_bytes, body = waiting.popleft()
            result = future.result()
            _check(result, name, number, 1)
            if acked is not None:
                acked.add(result, [body])
            tally.messages += 1
            tally.body_bytes += len(body)
            tally.read_bytes += line_bytes
            tally.unconfirmed += result.status in UNCONFIRMED

    number = first_line
    count = job.first_queue
    for block in blocks:
        unread = len(block)
        for line in split_lines(block):
            read_bytes = min(unread, len(line) + 1)  # the last line of a file may lack its newline
            unread -= read_bytes
            arguments = _object_arguments(line, name, number)
            arguments.setdefault("queue_id", count % job.queues)
            body = arguments.pop("body")
            waiting.append((producer.put_async(job.topic, body, **arguments), number, read_bytes, body))
            settle(IN_FLIGHT)
            count += 1
            number = number + 1 if number is not None else None
            if count % IN_FLIGHT == 0:
                report(tally)
    settle(0)
    report(tally)


def _object_arguments(line: bytes, name: str, number: int | None) -> dict[str, Any]:
    """The arguments of a put from one line of JSON; UsageError names the place and what is wrong."""
    where = _place(name, number)
    try:
        document = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: no JSON object: {error}") from error
    if not isinstance(document, dict) or ("body" in document) == ("body_base64" in document):
        raise UsageError(f"{where}: give an object with body (text) or body_base64")
    unknown = sorted(document.keys() - set(JSONL_FIELDS))
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(JSONL_FIELDS)}")
    encoded = document.pop("body_base64", None)
    try:
        document["body"] = document["body"].encode() if encoded is None else base64.b64decode(encoded, validate=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}: the body is no text, or body_base64 no base64: {error}") from error
    return document


def _check(result: PutManyResult | PutResult, name: str, number: int | None, count: int) -> None:
    if result.ok or result.status in UNCONFIRMED:
        return
    fate = "" if result.indeterminate else " are not stored"  # else the reason says it
    raise EngineError(f"{_place(name, number)}: the next {count} line(s){fate}: {result.status.name}: {result.reason}")


def _place(name: str, number: int | None) -> str:
    return f"{name}, line {number}" if number is not None else name
