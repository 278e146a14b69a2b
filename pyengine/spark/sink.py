"""The writers of `df.write.format("pyengine")` and of `writeStream`: rows become messages of a running engine.

Each task puts through a session of its own, like any producer, so the tasks must run on the engine's host. Each message has
PROPERTY = `query:batch:task:sequence:fingerprint`, so a repeated task puts only what is missing (docs/design/09-sinks.md):

- Only one attempt of a task runs at a time; the next one waits until the engine has executed what a dead process had submitted.
- Before its first message a task puts the marker `begin query batch task`. Without a marker the log has no message of the task; with
  one, all of them are beyond it. When all tasks are done the driver puts `commit query batch`, whose PROPERTY has the number of rows
  and the sum of their fingerprints. A batch that is committed already must have the same rows, and none is put; its second commit is
  the word `durable`, which no look-up reads.
- Rows are compared by content, with multiplicity, in any order. If an earlier attempt has put a row that this one does not have,
  the task is refused before it puts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import tempfile
import time
import uuid
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow
from pyarrow import compute
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

import pyengine
from pyengine.errors import EngineError, EngineUnavailableError, StoreBusyError, UsageError, command, did_you_mean, disk_errors
from pyengine.formats.small_file import opened
from pyengine.results import PutError, PutResult, PutStatus, ReadLevel
from pyengine.spark.options import ReadOptions, destination, scheme_of
from pyengine.spark.partitions import LogRange
from pyengine.spark.schema import COLUMNS, HEADERS_TYPE, PROPERTY_PREFIX, find_column
from pyengine.spark.task_reader import read_partition
from pyengine.spark.versions import StreamArrowWriter, arrow_batches
from pyengine.storage.checkpoint import abort_file_exists
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.engine_id import read_boot_id
from pyengine.storage.ofd_lock import is_at, remove_unlocked, try_lock

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pyengine.client.producer import Producer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader

log = logging.getLogger(__name__)
PROPERTY = "PYENGINE_SINK"
MARKER_TOPIC = "PYENGINE_SPARK_SINK"
MARKER_QUEUES = 8
ENGINE_TIMEOUT_S = 60.0   # the longest wait for an engine that starts again or has no room
ATTEMPT_WAIT_S = 600.0    # the longest wait for another attempt of the same task
POLL_INTERVAL_S = 0.02
GROUP_ROWS, GROUP_BYTES = 1000, 512 << 10  # of one put
LEVEL = ReadLevel.COMMITTED
_MARKER_STEP = 64
_MARKER = re.compile(rb"(begin|commit) (\S+) (\d+)(?: (\d+))?")
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's local properties of a micro-batch
_TRANSIENT_STATUSES = (PutStatus.SERVICE_NOT_AVAILABLE, PutStatus.CREATE_MAPEDFILE_FAILED, PutStatus.OS_PAGECACHE_BUSY)
_Found = TypeVar("_Found")


# -- columns and options ------------------------------------------------------------


SINK_COLUMNS = {  # name -> the types that it may have, and what it does
    "topic": (("STRING",), "The topic; otherwise the option `topic`."),
    "value": (("BINARY", "STRING"), "The body, or `body`; null is an empty one. Required."),
    "partition": (("INT",), "The queue, or `queueId`. Null: a write queue of the topic, by the hash of the keys or in turn."),
    "key": (("BINARY", "STRING"), "The property KEYS, where `keys` is null."),
    "keys": (("STRING", "ARRAY<STRING>"), "The property KEYS: words, or several texts without nulls."),
    "tags": (("STRING",), "The property TAGS."),
    "headers": ((HEADERS_TYPE, "ARRAY<STRUCT<key: STRING, value: STRING>>"),
                "Properties: each name once, values in UTF-8 and not empty; none of RocketMQ's own names."),
    "delayLevel": (("INT",), "Delivered later ([delayed messages](delayed.md))."),
}
_ALIASES = {"body": "value", "queueid": "partition"}
SINK_OPTIONS = {
    "path": "The store's root directory on the engine's host, the argument of `save()` and `start()`.",
    "topic": "The topic of rows without one.",
    "writeId": "Batch writes: a name (letters, digits, `._-`). Writes of one name put the same rows once; without it each "
               "`save()` is new.",
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The parsed options of a write."""

    path: str
    topic: str | None = None
    write_id: str | None = None


def read_sink_options(given: Mapping[str, str], *, is_stream: bool) -> SinkOptions:
    """Parse the options of one write; UsageError says which one is wrong and what is allowed."""
    names = {name.lower(): name for name in SINK_OPTIONS}
    values: dict[str, str] = {}
    for name, text in given.items():
        if name.lower() in names:
            values[names[name.lower()]] = str(text)
        elif not (is_stream and name.lower() == "checkpointlocation"):
            knows = f": the sink knows {', '.join(SINK_OPTIONS)}"
            raise UsageError(f"unknown option {name!r}{did_you_mean(name, SINK_OPTIONS) or knows}")
    if "path" not in values:
        raise UsageError('give the store\'s root directory: .save("/path/of/store"), .start("/path/of/store") or .option("path", ...)')
    if scheme_of(values["path"]) not in ("", "file"):
        raise UsageError(f"cannot write to {values['path']}: the sink puts into an engine that runs on this host, so the store is "
                         "a directory of this host")
    write_id = values.get("writeId")
    if write_id is not None:
        if is_stream:
            raise UsageError("option writeId is one of batch writes: a stream is known by its checkpoint")
        if not re.fullmatch(r"[\w.-]{1,100}", write_id, re.ASCII):
            raise UsageError(f"option writeId = {write_id!r}: give up to 100 letters, digits and ._-")
    return SinkOptions(destination(values["path"]), values.get("topic"), write_id)


def sink_columns(schema: StructType, options: SinkOptions) -> dict[str, int]:
    """Return the position in `schema` of each column of SINK_COLUMNS; ignore columns of a source, UsageError for others."""
    known = {name.lower(): name for name in SINK_COLUMNS}
    of_source = {column.name.lower() for column in COLUMNS}
    found: dict[str, int] = {}
    for place, of_schema in enumerate(schema.fields):
        lower = of_schema.name.lower()
        name = known.get(_ALIASES.get(lower, lower))
        if name is None:
            if lower in of_source or lower.startswith(PROPERTY_PREFIX):
                continue
            takes = f": the sink takes {', '.join(SINK_COLUMNS)}"
            raise UsageError(f"cannot write column {of_schema.name!r}{did_you_mean(lower, SINK_COLUMNS) or takes}")
        own, types = of_schema.dataType.simpleString().upper(), SINK_COLUMNS[name][0]
        if own not in [one.upper().replace(" ", "") for one in types]:
            raise UsageError(f"cannot write column {of_schema.name} of type {own}: cast it to {' or '.join(types)}")
        if name in found:
            raise UsageError(f"column {name} is given twice: {schema.fields[found[name]].name} and {of_schema.name}")
        found[name] = place
    if "value" not in found:
        raise UsageError("cannot write rows without a column value: name the body so")
    if "topic" not in found and options.topic is None:
        raise UsageError("cannot write rows without a topic: add a column topic, or set the option topic")
    return found


# -- the writers that Spark calls ----------------------------------------------------


@dataclass(frozen=True)
class SinkCommit(WriterCommitMessage):
    """The result of a task: its `rows`, the sum of their `fingerprints`, and how many this attempt has `put`, none if the batch was
    committed."""

    query: str
    batch: int
    rows: int
    fingerprints: int
    put: int
    is_committed: bool


class SinkTask(NamedTuple):
    """A part of a batch; it is the same for each attempt of a task."""

    query: str
    batch: int
    task: int

    @property
    def prefix(self) -> str:
        """The start of PROPERTY in each of its messages."""
        return f"{self.query}:{self.batch}:{self.task}:"


@dataclass(frozen=True)
class Sink:
    """Parameters of the puts, made in the driver for each batch and sent to its tasks."""

    options: SinkOptions
    columns: dict[str, int]
    schema: StructType
    boot_id: bytes = field(default_factory=read_boot_id)
    markers_from: int = 0  # a look-up reads no marker before this queue offset

    @classmethod
    def prepared(cls, given: Mapping[str, str], schema: StructType, *, is_stream: bool) -> Sink:
        """Make the sink, before a task runs; UsageError, or EngineUnavailableError if no engine runs here."""
        options = read_sink_options(given, is_stream=is_stream)
        columns = sink_columns(schema, options)
        restarts = is_stream and Path(options.path).is_dir() and abort_file_exists(options.path)
        try:
            (pyengine.connect(options.path, timeout_s=ENGINE_TIMEOUT_S) if restarts else pyengine.connect(options.path)).close()
        except EngineError as error:
            raise EngineUnavailableError(f"cannot write to {options.path}: the sink puts into a running engine, and only on its "
                                         f"host: {error}") from None
        return cls(options, columns, schema)


class BatchSink(DataSourceArrowWriter):
    """One `df.write`; its batch is 0. It runs in the driver, except for write()."""

    def __init__(self, schema: StructType, overwrite: bool, given: Mapping[str, str]) -> None:
        if overwrite:
            raise UsageError("a log is appended to: write with mode(\"append\"), not overwrite")
        self.sink = Sink.prepared(given, schema, is_stream=False)
        self.query = self.sink.options.write_id or str(uuid.uuid4())
        if self.sink.options.write_id is None:  # there can be no marker of this write yet
            with pyengine.open_store(self.sink.options.path) as store:
                last = store.queue_range(MARKER_TOPIC, marker_queue(self.query), LEVEL)[1]
            self.sink = replace(self.sink, markers_from=last)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> SinkCommit:
        """In a task: put those of its rows that are not stored yet."""
        context = TaskContext.get()
        assert context is not None
        return put_rows(self.sink, SinkTask(self.query, 0, context.partitionId()), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Put the commit marker, after all tasks are done."""
        put_commit(self.sink.options.path, self.query, 0, messages, self.sink.markers_from)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: messages in a log cannot be removed."""


class StreamSink(StreamArrowWriter):
    """One `writeStream`; Spark makes one for each batch, and another to commit it."""

    def __init__(self, schema: StructType, given: Mapping[str, str]) -> None:
        self.sink = Sink.prepared(given, schema, is_stream=True)

    def write(self, iterator: Iterator[Any]) -> SinkCommit:
        """In a task: put those of its rows that are not stored yet."""
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise UsageError("Spark does not tell the task its query and batch, without which a batch that runs again could put "
                             "messages twice: this version of Spark is not supported as a stream's sink")
        task = SinkTask(query, int(batch), context.partitionId())
        return put_rows(self.sink, task, arrow_batches(iterator, self.sink.schema))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Put the commit marker, after all tasks are done; a batch without tasks needs none."""
        for message in messages[:1]:
            assert isinstance(message, SinkCommit)
            put_commit(self.sink.options.path, message.query, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: messages stay, and a repeated batch puts only the missing ones."""


# -- a task --------------------------------------------------------------------------


class SinkRow(NamedTuple):
    """One row as a message. `queue_id` None: the row names none; `fingerprint` covers everything except the sequence."""

    topic: str
    queue_id: int | None
    body: bytes
    keys: str | None
    tags: str | None
    properties: dict[str, str]
    delay_level: int
    fingerprint: str


def put_rows(sink: Sink, task: SinkTask, batches: Iterable[pyarrow.RecordBatch]) -> SinkCommit:
    """Put the rows that no earlier attempt of this task has put; return when all are stored.

    UsageError for a row that cannot be a message, after which the rows before it may be stored, and for other rows than those of an
    earlier attempt, before any is put. EngineUnavailableError on another host, PutError if the engine accepts no message for
    ENGINE_TIMEOUT_S, StoreBusyError if another attempt of the task runs for ATTEMPT_WAIT_S.
    """
    if sink.boot_id != read_boot_id():
        raise EngineUnavailableError(f"this task runs on another host than the driver and the engine of {sink.options.path}: the sink "
                                     "puts on the engine's host only; run the executors there (local mode, or a cluster of "
                                     "that host)")
    with only_attempt(Path(sink.options.path), task), contextlib.closing(_Attempt(sink, task)) as attempt:
        return attempt.run(batches)


class _Attempt:
    """One attempt of a task, while no other one runs."""

    def __init__(self, sink: Sink, task: SinkTask) -> None:
        self._sink = sink
        self._task = task
        self._path = sink.options.path
        self._producer: Producer | None = None
        self._begin: int | None = None  # the physical offset of the task's first marker
        self._numbers: Iterator[int] = itertools.count()
        self._queues: dict[str, int] | None = None
        self._waiting: dict[tuple[str, int], list[tuple[str, SinkRow]]] = {}
        self._waiting_bytes: Counter[tuple[str, int]] = Counter()
        self._put = self._row_count = self._fingerprints = 0

    def run(self, batches: Iterable[pyarrow.RecordBatch]) -> SinkCommit:
        """Put what is missing."""
        def find() -> tuple[bool, int | None]:
            with _settled(self._path) as (store, _):
                return find_markers(store, self._task, self._sink.markers_from)

        is_committed, self._begin = _retry_until_running(find)
        if is_committed:  # put_commit() compares the rows of all tasks
            for row in itertools.chain.from_iterable(map(self._rows, batches)):
                self._note(row)
        elif stored := _retry_until_running(self._read_stored):
            self._put_missing(batches, stored)
        else:
            self._put_batches(batches)
        return SinkCommit(self._task.query, self._task.batch, self._row_count, self._fingerprints, self._put, is_committed)

    def close(self) -> None:
        """End the session; its submitted entries are executed before another attempt looks up messages."""
        if self._producer is not None:
            self._producer.close()
        self._producer = None

    def _read_stored(self) -> dict[int, str]:
        """Return sequence -> fingerprint of the task's messages in the log."""
        if self._begin is None:
            return {}
        with _settled(self._path) as (store, end):
            segment_bytes = store.geometry.mapped_file_size_commit_log_bytes
        found = {}
        for text in _property_texts(self._path, self._begin, end, segment_bytes, self._task.prefix):
            number, _, fingerprint = text[len(self._task.prefix):].partition(":")
            found[int(number)] = fingerprint
        return found

    # -- rows

    def _note(self, row: SinkRow) -> None:
        self._row_count += 1
        self._fingerprints += int.from_bytes(urlsafe_b64decode(row.fingerprint), "big")

    def _put_batches(self, batches: Iterable[pyarrow.RecordBatch]) -> None:
        for batch in batches:
            for row in self._rows(batch):
                self._note(row)
                self._add(row)
            self._flush()

    def _put_missing(self, batches: Iterable[pyarrow.RecordBatch], stored: dict[int, str]) -> None:
        """Put the rows that `stored` lacks, with multiplicity. All rows are compared first, so they are kept in a file."""
        to_find = Counter(stored.values())
        is_missing = bytearray()
        with tempfile.TemporaryFile(prefix="pyengine-sink-") as file:
            with contextlib.ExitStack() as stack:
                writer = None
                for batch in batches:
                    if writer is None:
                        writer = stack.enter_context(pyarrow.ipc.new_stream(file, batch.schema))
                    writer.write_batch(batch)
                    for row in self._rows(batch):
                        self._note(row)
                        is_there = to_find[row.fingerprint] > 0
                        to_find[row.fingerprint] -= is_there
                        is_missing.append(not is_there)
            if others := sum(to_find.values()):
                raise UsageError(
                    f"task {self._task.task} of batch {self._task.batch} of query {self._task.query} ran before with other rows: "
                    f"{others} of the {len(stored)} messages that it put then are no rows of it now. The query does not give "
                    "the same rows each time (limit without an order, rand, a source that has changed): nothing more was put; "
                    "write such rows to files or a table first, and from there to the sink")
            self._numbers = (number for number in itertools.count() if number not in stored)
            if is_missing:
                file.seek(0)
                missing = iter(is_missing)
                for batch in pyarrow.ipc.open_stream(file):
                    for row in self._rows(batch):
                        if next(missing):
                            self._add(row)
                    self._flush()

    def _rows(self, batch: pyarrow.RecordBatch) -> Iterator[SinkRow]:
        """Yield the rows of a batch as messages."""
        nothing = [None] * batch.num_rows
        columns = [batch.column(self._sink.columns[name]).to_pylist() if name in self._sink.columns else nothing for name in SINK_COLUMNS]
        for topic, value, partition, key, keys, tags, headers, delay_level in zip(*columns, strict=True):
            yield self._row(topic, value, partition, key if keys is None else keys, tags, headers, delay_level)

    def _row(self, topic: str | None, value: bytes | str | None, partition: int | None, keys: bytes | str | list[str] | None,
             tags: str | None, headers: list[Any] | None, delay_level: int | None) -> SinkRow:
        topic = self._sink.options.topic if topic is None else topic
        if topic is None:
            raise UsageError("cannot write a row whose topic is null: set the option topic for such rows")
        if topic == MARKER_TOPIC:
            raise UsageError(f"cannot write a row to {MARKER_TOPIC}, which has the sink's own markers: leave rows of that topic out")
        body = value.encode() if isinstance(value, str) else value or b""
        if isinstance(keys, bytes):
            keys = _text(keys, "a key")
        elif isinstance(keys, list):
            keys = " ".join(word for word in keys if word is not None)
        properties: dict[str, str] = {}
        for header in headers or ():
            name, text = (None, None) if header is None else (header["key"], header["value"])
            if name is None:
                raise UsageError("cannot write a row with a header without a name: leave such headers out")
            if text is None:
                raise UsageError(f"cannot write a row whose header {name!r} is null: a property has a value, so leave such headers out")
            if name == PROPERTY:  # of a message that was read: this one gets its own
                continue
            if name in properties:
                raise UsageError(f"cannot write a row whose headers have {name!r} twice: a property has one value")
            properties[name] = _text(text, f"header {name!r}") if isinstance(text, bytes) else text
        whole = (topic, partition, body, keys or None, tags or None, sorted(properties.items()), delay_level or 0)
        digest = hashlib.blake2b(repr(whole).encode("utf-8", "surrogatepass"), digest_size=12).digest()
        return SinkRow(topic, partition, body, keys or None, tags or None, properties, delay_level or 0, urlsafe_b64encode(digest).decode())

    def _queue_of(self, row: SinkRow, number: int) -> int:
        """Return the row's queue, or one of the topic's: by the keys, or in turn without keys."""
        if row.queue_id is not None:
            return row.queue_id
        if self._queues is None:
            self._queues = {name: topic.write_queue_nums for name, topic in TopicConfigs(self._path).read().rows.items()}
        count = self._queues.get(row.topic, 1)
        if count < 1:
            raise UsageError(f"cannot write row {number} of task {self._task.task}: topic {row.topic} has no write queue in "
                             "config/topics.json: give it some, or rows a column partition")
        return (zlib.crc32(row.keys.encode("utf-8", "replace")) if row.keys else number) % count

    # -- puts

    def _add(self, row: SinkRow) -> None:
        """Add a row to the next put of its queue."""
        number = next(self._numbers)
        name = f"{self._task.prefix}{number}:{row.fingerprint}"
        queue = row.topic, self._queue_of(row, number)
        if row.delay_level or len(row.body) > GROUP_BYTES:
            self._flush_queue(queue)
            self._put_group(*queue, [(name, row)])
            return
        group = self._waiting.setdefault(queue, [])
        group.append((name, row))
        self._waiting_bytes[queue] += len(row.body) + 1024
        if len(group) >= GROUP_ROWS or self._waiting_bytes[queue] >= GROUP_BYTES:
            self._flush_queue(queue)

    def _flush(self) -> None:
        for queue in list(self._waiting):
            self._flush_queue(queue)

    def _flush_queue(self, queue: tuple[str, int]) -> None:
        self._waiting_bytes[queue] = 0
        group = self._waiting.pop(queue, [])
        if group:
            self._put_group(*queue, group)

    def _put_group(self, topic: str, queue_id: int, group: list[tuple[str, SinkRow]]) -> None:
        """Put these rows; all are in the log when this returns. The commit's marker comes later and must be durable, so it covers
        messages that are stored but not durable yet."""
        if self._begin is None:
            text = f"begin {self._task.query} {self._task.batch} {self._task.task}"
            self._begin = put_marker(self._connected(), self._task.query, text).physical_offset
        deadline_s = time.monotonic() + ENGINE_TIMEOUT_S
        while group:
            result = self._put_once(topic, queue_id, group)
            if result.stored:
                self._put += len(group)
                return
            if result.indeterminate and time.monotonic() < deadline_s:
                self.close()  # once settled_end returns, no submitted entry is pending
                stored = _retry_until_running(self._read_stored)
                there = [name for name, _ in group if int(name.split(":")[3]) in stored]
                self._put += len(there)
                group = [(name, row) for name, row in group if name not in there]
            elif result.status in _TRANSIENT_STATUSES and time.monotonic() < deadline_s:
                time.sleep(POLL_INTERVAL_S)
            elif result.status in _TRANSIENT_STATUSES or result.indeterminate:
                raise PutError._of(result, f"the engine on {self._path} has taken no message for {ENGINE_TIMEOUT_S:g} s: {result.reason}")
            elif len(group) > 1:  # it may be one of them, or all together
                for one in group:
                    self._put_group(topic, queue_id, [one])
                return
            else:
                raise UsageError(f"cannot write row {group[0][0].split(':')[3]} of task {self._task.task} to {topic}/{queue_id}: "
                                 f"{result.status.name}: {result.reason}")

    def _put_once(self, topic: str, queue_id: int, group: list[tuple[str, SinkRow]]) -> PutResult:
        producer = self._connected()
        if len(group) == 1:
            name, row = group[0]
            return producer.put(topic, row.body, queue_id=queue_id, tags=row.tags, keys=row.keys,
                                properties={**row.properties, PROPERTY: name}, delay_level=row.delay_level)
        return producer.put_batch(topic, [pyengine.BatchMessage(row.body, row.tags, row.keys, {**row.properties, PROPERTY: name})
                                          for name, row in group], queue_id=queue_id)

    def _connected(self) -> Producer:
        if self._producer is None:
            self._producer = _connect(self._path)
            self._producer._is_copy = True
        return self._producer


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UsageError(f"cannot write a row with {what} that is not UTF-8: properties are text") from None


def _property_texts(path: str, start: int, end: int, segment_bytes: int, prefix: str) -> Iterator[str]:
    """Yield the values of PROPERTY that begin with `prefix`, of messages in [start, end) of the log."""
    column = find_column(PROPERTY_PREFIX + PROPERTY)
    options = ReadOptions(path, columns=(column.name,), fail_on_data_loss=False)
    schema = pyarrow.schema([pyarrow.field(column.name, pyarrow.string())])
    part = LogRange(start, end, end, end, segment_bytes)
    for batch in read_partition(options, [column], part, schema):
        texts = batch.column(0)
        yield from texts.filter(compute.starts_with(texts, prefix)).to_pylist()


# -- markers, and one attempt at a time ------------------------------------------------


def marker_queue(query: str) -> int:
    """Return the queue of MARKER_TOPIC for the query's markers."""
    return zlib.crc32(query.encode()) % MARKER_QUEUES


def put_marker(producer: Producer, query: str, text: str, properties: Mapping[str, str] | None = None) -> PutResult:
    """Put a marker of the query; a repeated one does no harm. PutError if the engine accepts none for ENGINE_TIMEOUT_S."""
    deadline_s = time.monotonic() + ENGINE_TIMEOUT_S
    while True:
        result = producer.put(MARKER_TOPIC, text.encode(), queue_id=marker_queue(query), properties=properties)
        if result.stored:
            return result
        if not (result.indeterminate or result.status in _TRANSIENT_STATUSES) or time.monotonic() >= deadline_s:
            return result.raise_for_status()
        time.sleep(POLL_INTERVAL_S)


def put_commit(path: str, query: str, batch: int, messages: Sequence[WriterCommitMessage | None], markers_from: int = 0) -> None:
    """Commit the batch: all of its messages are stored. PutError unless they are as durable as the flush mode promises.

    `messages` has one element for each task. UsageError if the batch was committed with other rows, of which nothing is put. Also if
    an earlier attempt of the batch had more tasks, since rows of both may be stored twice. That cannot be undone, so the batch is
    committed anyway, and the query continues when it is started again. A second commit marker would hide the markers of the next
    batch, if that has begun already.
    """
    def find_last_task() -> int:
        with _settled(path) as (store, _):
            last = -1
            for word, (of_batch, *task), _ in _markers_backwards(store, query, markers_from):
                if word == "commit":
                    if of_batch < batch - 1:
                        log.warning("the log of %s has no commit of the batches between %d and %d of query %s: they had no rows, or the "
                                    "store was restored from a backup that is older than the checkpoint, and lacks them",
                                    path, of_batch, batch, query)
                    break
                last = max(last, *task) if of_batch == batch else last
            return last

    def find_rows() -> str | None:
        with _settled(path) as (store, _):
            for word, (of_batch, *_), message in _markers_backwards(store, query, markers_from):
                if word == "commit" and of_batch <= batch:
                    return message.properties.get(PROPERTY) if of_batch == batch else None
        return None

    done = [message for message in messages if isinstance(message, SinkCommit)]
    row_count = sum(task.rows for task in done)
    rows = f"{row_count}:{sum(task.fingerprints for task in done):x}"
    was_committed = any(task.is_committed for task in done)
    if was_committed and rows != (before := _retry_until_running(find_rows)):
        told = f"with other rows ({before.partition(':')[0]} then, {row_count} now)" if before else "and the log has no note of its rows"
        raise UsageError(f"batch {batch} of query {query} was committed before, {told}: nothing is put, and rows may be missing. Give a "
                         "batch write of other rows another writeId. Of a stream, the checkpoint is older than the log: bring its newest "
                         "files back, or begin a new one at the first missing row (startingOffsets). If the query does not give the same "
                         "rows each time, write them to files or a table first")
    last_task = -1 if was_committed else _retry_until_running(find_last_task)
    with _connect(path) as producer:
        put_marker(producer, query, f"{'durable' if was_committed else 'commit'} {query} {batch}", {PROPERTY: rows}).raise_for_status()
    if last_task >= len(messages):
        raise UsageError(f"batch {batch} of query {query} has {len(messages)} task{'s' * (len(messages) != 1)} now, and an attempt before "
                         f"had task {last_task}: a row that has moved to another task may be there twice. Look for repeated "
                         "messages of this batch; started again, the query continues after it. Give it as many tasks each time (the "
                         "same cores and partitions), or write to files or a table first")


def find_markers(store: LiveStoreReader, task: SinkTask, first: int) -> tuple[bool, int | None]:
    """Return whether the task's batch was committed, and the physical offset of the task's first marker.

    It reads from the queue's end back to the query's last commit, or to queue offset `first`. All messages are dispatched then
    (settled_end)."""
    begin = None
    for word, numbers, message in _markers_backwards(store, task.query, first):
        if word == "commit":
            return numbers[0] >= task.batch, begin
        if numbers == (task.batch, task.task):
            begin = message.physical_offset
    return False, begin


def _markers_backwards(store: LiveStoreReader, query: str, first: int) -> Iterator[tuple[str, tuple[int, ...], Message]]:
    """Yield (word, batch and task, the message) of the query's markers, the newest first, without `durable`."""
    queue_id = marker_queue(query)
    low, at = store.queue_range(MARKER_TOPIC, queue_id, LEVEL)
    low, step = max(low, first), _MARKER_STEP
    while at > low:
        start = max(low, at - step)
        messages: list[Message] = []
        offset = start
        while offset < at:
            got = store.get_message(MARKER_TOPIC, queue_id, offset, at - offset, level=LEVEL)
            messages += [message for message in got.messages if message.queue_offset < at]
            if got.next_begin_offset <= offset:
                break  # the queue ends here: all of it was deleted
            offset = got.next_begin_offset  # after messages that were just deleted, or cannot be read
        for message in reversed(messages):
            found = _MARKER.fullmatch(message.body)
            if found is None or found[2] != query.encode() or (found[1] == b"begin") != (found[4] is not None):
                continue  # another query's, or no marker: any producer may put into this topic
            yield found[1].decode(), tuple(int(number) for number in found.groups()[2:] if number is not None), message
        at, step = start, min(2 * step, 4096)


@contextlib.contextmanager
def only_attempt(root: Path, task: SinkTask) -> Iterator[None]:
    """Exclude other attempts of a task inside the block, by a lock in the engine's memory folder that ends with its process.

    StoreBusyError after ATTEMPT_WAIT_S."""
    from pyengine.ipc.shared_objects import find_folder

    folder = find_folder(root)
    path = folder.sink_locks_path
    digest = hashlib.blake2b(f"{task.query} {task.task}".encode(), digest_size=8).digest()
    byte = int.from_bytes(digest, "big") >> 2
    deadline_s = time.monotonic() + ATTEMPT_WAIT_S
    try:
        while True:
            with disk_errors("open", path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with opened(descriptor):
                if os.geteuid() == 0:  # for tasks of the engine's user
                    owner = _retry_until_running(lambda: _folder_status(root, folder.path))
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
                while not try_lock(descriptor, byte, path):
                    if time.monotonic() >= deadline_s:
                        raise StoreBusyError(f"another attempt of task {task.task} of query {task.query} has been putting for "
                                             f"{ATTEMPT_WAIT_S:g} s: end its process; the task continues where it was when it runs again")
                    time.sleep(POLL_INTERVAL_S)
                if is_at(descriptor, path):  # otherwise the engine's end removed it before the lock was taken
                    yield
                    return
    finally:
        if not folder.path.exists():  # the engine has ended, and kept the file because it was locked
            remove_unlocked(path)


def _folder_status(root: Path, folder: Path) -> os.stat_result:
    """Return the status of the running engine's folder, which each start creates again."""
    try:
        return os.stat(folder)
    except FileNotFoundError:
        raise EngineUnavailableError(f"no engine is running on {root}: start it with {command('start', root)}") from None


@contextlib.contextmanager
def _settled(path: str) -> Iterator[tuple[LiveStoreReader, int]]:
    """Open the store once all puts of ended producers are executed; yield it, and the log's end then."""
    from pyengine.ipc.live_reader import settled_end

    end = settled_end(Path(path), ENGINE_TIMEOUT_S)
    with pyengine.open_store(path) as store:
        yield store, end


def _connect(path: str) -> Producer:
    """Connect to the engine, which may be restarting; other tasks may have all of its sessions."""
    return _retry_until_running(lambda: pyengine.connect(path, refusals="return", timeout_s=ENGINE_TIMEOUT_S))


def _retry_until_running(call: Callable[[], _Found]) -> _Found:
    """Return the result of `call`, which is repeated for ENGINE_TIMEOUT_S while the engine restarts."""
    deadline_s = time.monotonic() + ENGINE_TIMEOUT_S
    while True:
        try:
            return call()
        except (EngineUnavailableError, StoreBusyError):
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(POLL_INTERVAL_S)
