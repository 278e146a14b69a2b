"""The reader of `spark.readStream.format("pyengine")`.

Spark keeps one in a Python process beside the driver. It stores each batch's offsets before the batch runs, and the same two offsets
always give the same rows: so a sink that can recognize a repeated batch is exactly-once.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from pyengine.errors import StoreBusyError, StoreRefusedError, UsageError
from pyengine.spark.file_access import QUEUES
from pyengine.spark.options import AUTO, ReadOptions, read_options
from pyengine.spark.partitions import LogRange, QueuePart, queue_chooser, without_light_queues
from pyengine.spark.plan import require_disks
from pyengine.spark.presence import QueueExtents, has_no_queues, require_end, require_entries, require_names
from pyengine.spark.remote_store import OpenStore, RemoteStore, open_for_reading
from pyengine.spark.schema import columns_of_schema
from pyengine.spark.stream_offsets import MARK, NAME, LogStream, Offset, QueueStream, StreamOffsets, is_of_log, without_mark
from pyengine.spark.task_reader import read_partition
from pyengine.spark.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    arrow_schema_of,
)

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

TIMEOUT_S = 30.0  # recovery of a log in the page cache takes seconds
POLL_INTERVAL_S = 0.2
_TRANSIENT = (StoreBusyError, StoreRefusedError, UsageError)  # raised for a store whose engine restarts


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream. It opens the store at the first request for an offset; the copy for the tasks is closed."""

    _store: OpenStore | None = None
    _stream: StreamOffsets | None = None
    _target: Offset | None = None
    _initial: Offset | None = None
    _seen: Offset | None = None  # the last end
    _waiting_since_s: float | None = None
    _last_batch_s: float | None = None
    _is_log_known = False

    def __init__(self, schema: StructType, given: dict[str, str]) -> None:
        self.options: ReadOptions = read_options(given, "stream")
        self.columns = columns_of_schema(schema, self.options)
        self.schema = schema

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def initialOffset(self) -> Offset:
        """Return where a new query begins; a restarted one continues from its checkpoint."""
        stream = self._opened()
        self._initial = stream.marked(stream.initial())
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch from the options."""
        options = self.options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:
        """Return the end of the next batch, or `start` if there are no messages. Spark 4.0 and 4.1 pass neither argument: then the
        batch starts at the last end.

        If an engine restarts, the files show less than before, or a segment is just being copied, the end is unknown: for TIMEOUT_S
        return `start`, then raise an error.
        """
        stream = self._opened(start)
        start = self._seen if start is None else start
        try:
            target = stream.available() if self._target is None else self._target
        except _TRANSIENT:
            if start is None or not self._may_wait():
                raise
            return start
        if start is None:
            self._seen = stream.marked(target)
            return self._seen
        self._require_log(stream, start)
        begin = without_mark(start)
        if not stream.is_beyond(begin, target):
            self._waiting_since_s = None
        elif self._target is not None:
            target = self._target = self._awaited(stream, begin)
        elif self._may_wait():
            return start
        if self._holds_back(stream, begin, target):
            return start
        everything = limit is None or isinstance(limit, ReadAllAvailable)
        most_messages = None if everything else getattr(limit, "max_rows", None)
        most_bytes = None if everything else self.options.max_bytes_per_trigger
        end = stream.bounded(begin, target, most_messages, most_bytes)
        if end == begin:
            return start
        self._last_batch_s = monotonic()
        self._seen = stream.marked(end, start)
        if start == self._initial and MARK in self._seen:
            self._seen[MARK]["begin"] = begin
        return self._seen

    def reportLatestOffset(self) -> Offset | None:
        """Return the current end for the query's progress; None while it is unknown, since an error would end the query."""
        with contextlib.suppress(*_TRANSIENT):
            return self._opened().available()
        return None

    def prepareForTriggerAvailableNow(self) -> None:
        """Ignore messages that arrive from now on."""
        self._target = self._awaited(self._opened())

    def partitions(self, start: Offset, end: Offset) -> Sequence[LogRange | QueuePart]:
        """Return the parts of one batch; DataLossError for deleted messages, unless that is allowed."""
        stream, self._seen = self._opened(start), end
        self._require_log(stream, start, end)
        if start != end:  # of the first batch Spark asks for the initial offset again
            start = end.get(MARK, {}).get("begin", start)
        return stream.parts(without_mark(start), without_mark(end))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one part, as LogReader.read. Starting times select none: they say where a new query begins."""
        assert isinstance(partition, LogRange | QueuePart)
        options = replace(self.options, starting_timestamp_ms=None, starting_timestamps=None)
        return read_partition(options, self.columns, partition, arrow_schema_of(self.schema))

    def stop(self) -> None:
        """Close the store at the query's end."""
        if self._store is not None:
            self._store.close()
        self._store = self._stream = None

    def _require_log(self, stream: StreamOffsets, *offsets: Offset) -> None:
        """UsageError if the log is another one than the checkpoint's; a log on another file system is compared once."""
        if isinstance(self._store, RemoteStore) and self._is_log_known:
            return
        for offset in offsets:
            stream.require_log(offset)
        self._is_log_known = True

    @staticmethod
    def _awaited(stream: StreamOffsets, begin: Offset | None = None) -> Offset:
        """Return the stream's end once it is known and the store shows what was read up to `begin`; what is known after TIMEOUT_S."""
        deadline_s = monotonic() + TIMEOUT_S
        while True:
            is_over = monotonic() >= deadline_s
            with contextlib.suppress(*(() if is_over else _TRANSIENT)):
                target = stream.available()
                if is_over or begin is None or not stream.is_beyond(begin, target):
                    return target
            sleep(POLL_INTERVAL_S)

    def _holds_back(self, stream: StreamOffsets, start: Offset, target: Offset) -> bool:
        """Return whether the batch must wait for more messages (minOffsetsPerTrigger); the first one and availableNow do not."""
        least = self.options.min_offsets_per_trigger
        if least is None or self._target is not None or self._last_batch_s is None:
            return False
        if (monotonic() - self._last_batch_s) * 1000 >= self.options.max_trigger_delay_ms:
            return False
        return not stream.has_waiting(start, target, least)

    def _may_wait(self) -> bool:
        now_s = monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return now_s - self._waiting_since_s < TIMEOUT_S

    def _opened(self, start: Offset | None = None) -> StreamOffsets:
        """Return the opened stream; UsageError if it has no offsets like `start`, of a checkpoint."""
        if start and is_of_log(start) == self.options.has_topics:
            kinds = ("the whole log", "topics")
            raise UsageError(f"the checkpoint is of a stream of {kinds[not is_of_log(start)]}, and this one reads "
                             f"{kinds[self.options.has_topics]}: give it the options of that stream, or a new checkpoint")
        if self._stream is None:
            self._store = open_for_reading(self.options)
            require_names(self.options, self._store, "stream")
            require_disks(self.options, self._store)
            require_end(self.options, self._store)
            of_topics = self.options.has_topics
            if of_topics and has_no_queues(self._store):
                raise UsageError(f"{self.options.where} has no queues ({QUEUES}), by which a stream of topics goes: copy them too, or read "
                                 "the whole log")
            if of_topics and not isinstance(self._store, RemoteStore):  # a copy's queues may be brought up to date after its log
                choose = queue_chooser(self.options, with_offsets=False)
                assert choose is not None, "topics are chosen"
                extents = QueueExtents(self.options, self._store, without_light_queues(choose))
                with contextlib.suppress(StoreBusyError, UsageError):  # the level is unknown now
                    require_entries(self.options, self._store, extents, max(0, self._store.dispatched_offset(self.options.read_level)))
            self._stream = (QueueStream if of_topics else LogStream)(self.options, self._store)
        elif self._store is not None and not isinstance(self._store, RemoteStore):
            self._store._require_place()  # tasks open the store by its path
        return self._stream


# -- progress ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceMetrics:
    """What one micro-batch has read, and its lag when planned; None: unknown, as with Spark 4.0 and 4.1, or while an engine
    restarts.

    `lag_messages` is also unknown of a whole log.
    """

    batch_id: int
    timestamp: str
    """Its begin, ISO 8601, UTC."""
    rows: int
    bytes: int | None
    """Of its range, chosen or not."""
    lag_messages: int | None
    lag_bytes: int | None


def source_metrics(query: StreamingQuery, store: str | os.PathLike[str], *, source: int = 0, file_system: str = AUTO
                   ) -> list[SourceMetrics]:
    """Return rows, bytes and lag of the query's recent micro-batches, oldest first.

    `source`: which of the query's sources.
    """
    found = []
    with open_for_reading(read_options({"path": os.fspath(store), "fileSystem": file_system})) as reader:
        for progress in query.recentProgress:
            document = json.loads(progress.json)
            if source >= len(document["sources"]):
                raise UsageError(f"the query has {len(document['sources'])} sources, number {source} is none of them")
            its = document["sources"][source]
            start, end, latest = (_offset(its.get(name)) for name in ("startOffset", "endOffset", "latestOffset"))
            lags = (None, None) if end is None or latest is None else _between(reader, end, latest)
            read = None if start is None or end is None else _between(reader, start, end)[1]
            found.append(SourceMetrics(document["batchId"], document["timestamp"], its["numInputRows"], read, *lags))
    return found


def _offset(value: str | Offset | None) -> Offset | None:
    """Decode an offset of the progress: a document, or with Spark Connect the text of one."""
    document: Offset | None = json.loads(value) if isinstance(value, str) else value
    return None if document is None else without_mark(document)


def _between(store: OpenStore, start: Offset, end: Offset) -> tuple[int | None, int]:
    """Return (messages, bytes of the log) from one offset to another; messages are unknown for the whole log."""
    if is_of_log(end):
        return None, max(0, end[NAME] - start[NAME])
    messages = size_bytes = 0
    for topic, queues in end.items():
        before = start.get(topic, {})
        for name, last in queues.items():
            queue = store._queue(topic, int(name))
            first = before.get(name, 0 if queue is None else store.queue_range(topic, int(name))[0])
            messages += max(0, last - first)
            if queue is not None:
                size_bytes += queue.record_bytes(first, last)
    return messages, size_bytes
