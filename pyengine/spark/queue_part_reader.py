"""The rows that consume-queue entries name: only their pages of the log are touched.

An entry is believed only if a whole record of its size stands there that names its own
offset, its queue and its number; nothing else than what a scan would find comes out. (A
queue may also name messages of other topics, which were put with INNER_MULTI_DISPATCH:
those are passed over.)
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy
import pyarrow as pa

from pyengine.errors import CorruptionError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import further_offset
from pyengine.formats.paths import segment_name
from pyengine.formats.record import decode_record
from pyengine.native.columns import ChooseQueue, ColumnScanner, RawBatch
from pyengine.spark.partitions import QueuePart, QueueSlice
from pyengine.spark.plan import REMEDY, DataLossError
from pyengine.spark.task_reader import TaskReader, sentence

_ENTRY = numpy.dtype([("offset", ">i8"), ("size", ">i4"), ("tags", ">i8")])
_READ_ENTRIES = 1 << 16
ADVICE = "access=scan reads the log itself"


class _Run(NamedTuple):
    """Entries of a queue, the first of which has this number, that name records of one segment."""

    segment: int
    number: int
    entries: bytes


class QueuePartReader(TaskReader):
    """Reads slices of queues, one after the other."""

    def batches(self, part: QueuePart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of all slices, each in its queue's order."""
        for one in part.slices:
            self._names_others = False
            scanner = self.scanner(self._chooser(one))
            for run in self._runs(one, part):
                for raw in self._gather(scanner, one, part, run):
                    yield self.to_batch(raw, schema)

    def _chooser(self, one: QueueSlice) -> ChooseQueue:
        times = {(topic, queue_id): (start_ms, end_ms) for topic, queue_id, start_ms, end_ms in self.selection.times}

        def choose(topic: str, queue_id: int) -> tuple[int, ...] | None:
            if (topic, queue_id) == (one.topic, one.queue_id):
                return one.first, one.end, *times.get((topic, queue_id), ())
            self._names_others = True
            return None

        return choose

    def _runs(self, one: QueueSlice, part: QueuePart) -> Iterator[_Run]:
        """The slice's entries, cut where another segment begins."""
        for number, data in self._entries(one, part.queue_file_bytes):
            offsets = numpy.frombuffer(data, _ENTRY)["offset"].astype(numpy.int64)
            segments = offsets - offsets % part.segment_bytes
            borders = [0, *(numpy.flatnonzero(numpy.diff(segments)) + 1).tolist(), len(offsets)]
            for begin, end in itertools.pairwise(borders):
                yield _Run(int(segments[begin]), number + begin, data[begin * CQ_ENTRY_BYTES : end * CQ_ENTRY_BYTES])

    def _entries(self, one: QueueSlice, file_bytes: int) -> Iterator[tuple[int, bytes]]:
        """(number of the first, entries) of the slice, some at a time, never across a file's end."""
        per_file = file_bytes // CQ_ENTRY_BYTES
        at = one.first
        while at < one.end:
            start = at - at % per_file
            count = min(one.end - at, start + per_file - at, _READ_ENTRIES)
            path = self.paths.queue_folder(one.topic, one.queue_id) / segment_name(start * CQ_ENTRY_BYTES)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if self.options.fail_on_data_loss:
                    raise DataLossError(f"{path} was deleted after the query was planned; {REMEDY}") from None
                at = start + per_file
                continue
            try:
                data = os.pread(descriptor, count * CQ_ENTRY_BYTES, (at - start) * CQ_ENTRY_BYTES)
            finally:
                os.close(descriptor)
            if len(data) != count * CQ_ENTRY_BYTES:
                raise CorruptionError(f"{path} is shorter here than its like: is this a replica that lags, or another store?")
            yield at, data
            at += count

    def _gather(self, scanner: ColumnScanner, one: QueueSlice, part: QueuePart, run: _Run) -> Iterator[RawBatch]:
        view = self.open_segment(run.segment, part.segment_bytes)
        if view is None:
            return
        limit = min(part.limit, run.segment + part.segment_bytes)
        rest, rows = memoryview(run.entries), 0
        while rest:
            for raw in scanner.gather(view, run.segment, rest, limit):
                if self.is_gone(run.segment):
                    return self.lost(run.segment)
                rows += raw.rows
                yield raw
            if scanner.reason == "range_end":
                break
            if self.is_gone(run.segment):
                return self.lost(run.segment)
            if self.options.on_corrupt == "fail":
                raise CorruptionError(f"queue {one.topic}/{one.queue_id} names a message at {scanner.position}, "
                                      f"but there it is {sentence(scanner.reason)}: {ADVICE}")
            at = CQ_ENTRY_BYTES * scanner.gathered
            self.skip(scanner.position, int(numpy.frombuffer(rest, _ENTRY, 1, at)["size"][0]), scanner.reason)
            rest = rest[at + CQ_ENTRY_BYTES :]
        chosen = self.selection
        is_filtered = bool(chosen.tags) or chosen.start_ms is not None or chosen.end_ms is not None
        if self._names_others or not is_filtered and rows != len(run.entries) // CQ_ENTRY_BYTES:
            self._examine(view, one, run)

    def _examine(self, view: mmap.mmap, one: QueueSlice, run: _Run) -> None:
        """Rows were left out: each entry must name the queue's own message, or one that was dispatched to it as well."""
        if self.options.on_corrupt == "skip":
            return
        for at, entry in enumerate(numpy.frombuffer(run.entries, _ENTRY)):
            message = decode_record(view, int(entry["offset"]) - run.segment)
            is_own = (message.topic, message.queue_id, message.queue_offset) == (one.topic, one.queue_id, run.number + at)
            if not is_own and further_offset(message, one.topic, one.queue_id) is None:
                raise CorruptionError(f"entry {run.number + at} of queue {one.topic}/{one.queue_id} names message "
                                      f"{message.queue_offset} of {message.topic}/{message.queue_id}: {ADVICE}")
