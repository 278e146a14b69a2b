"""The option `view`: consume queues as rows, one for each queue, for each entry, or for each queue and consumer group.

`queue` and `groups` count, and read the records of each queue's first and last entry; `entries` lists entries, and compares each with
the head of its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pyarrow

from pyengine.arguments import EVERY_OFFSET
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.spark.options import ReadOptions
from pyengine.spark.partitions import QueuePart, QueueSlice, queue_chooser
from pyengine.spark.plan import grouped, require_disks, require_no_gap
from pyengine.spark.presence import QueueExtents, require_end, require_entries, require_group, require_names
from pyengine.spark.remote_store import committed_offsets, open_for_reading
from pyengine.spark.task_reader import QueuePartReader

ENTRIES_PER_PART = 4 << 20
QUEUES_PER_PART = 5_000


def plan_view(options: ReadOptions) -> list[QueuePart]:
    """Return the read's partitions: every chosen queue up to the current end of the level."""
    choose = queue_chooser(options)
    with open_for_reading(options) as reader:
        require_names(options, reader, use="view")
        if options.group is not None:
            require_group(options, reader, options.group)
        extents = QueueExtents(options, reader, choose or (lambda topic, queue_id: EVERY_OFFSET))
        require_disks(options, reader)
        require_no_gap(options, reader)
        require_end(options, reader, extents)
        limit = max(0, reader.dispatched_offset(options.read_level))
        require_entries(options, reader, extents, limit)
        found = [QueueSlice(queue.topic, queue.queue_id, first, high, high - first) for queue, first, high, *_ in extents.bounds(limit)]
        sizes = reader.commit_log.size_bytes, reader.geometry.mapped_file_size_consume_queue_bytes
    if options.view == "entries":
        found = [one for one in found if one.first < one.end]
        entries = sum(one.log_bytes for one in found)  # an entry counts as a byte here
        groups = [*grouped(found, min(ENTRIES_PER_PART, -(-entries // options.min_partitions)))]
    else:
        step = max(1, min(QUEUES_PER_PART, -(-len(found) // options.min_partitions)))
        groups = [found[at : at + step] for at in range(0, len(found), step)]
    return [QueuePart(tuple(group), limit, *sizes) for group in groups]


def view_rows(options: ReadOptions, part: QueuePart, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of one partition in `schema`."""
    yield from (_list if options.view == "entries" else _count)(options, part, schema)


def _count(options: ReadOptions, part: QueuePart, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    reader, per_file = QueuePartReader(options, []), part.queue_file_bytes // CQ_ENTRY_BYTES
    committed = committed_offsets(options) if options.group or options.view == "groups" else {}
    rows: dict[str, list[Any]] = {name: [] for name in options.columns}
    for one in part.slices:
        topic, queue_id, first, end = one.topic, one.queue_id, one.first, one.end
        offsets = {number: int(run.entries["physicalOffset"][0]) for number in sorted({first, end - 1}) if first < end
                   for _, run, *_ in reader.checked(replace(one, first=number, end=number + 1), part)}
        values: dict[str, Any] = {
            "topic": topic, "partition": queue_id, "minOffset": first, "maxOffset": end, "messages": end - first,
            "firstPhysicalOffset": offsets.get(first), "lastPhysicalOffset": offsets.get(end - 1),
        }
        if "bytes" in rows:
            values["bytes"] = sum(int(entries["size"].sum(dtype="int64")) for _, entries in reader.entries(one, part.queue_file_bytes))
        else:  # the files between those of the first and the last entry
            for number in range(first - first % per_file + per_file, end - 1 - (end - 1) % per_file, per_file):
                reader.entry_bytes(one, number * CQ_ENTRY_BYTES, 0, CQ_ENTRY_BYTES)
        is_of_all = options.view == "groups" and options.group is None
        for group in sorted(name for of, name in committed if of == topic) if is_of_all else [options.group]:
            offset = committed.get((topic, group or ""), {}).get(queue_id)
            lag = None if group is None else max(0, end - max(first, offset or 0))
            for name, column in rows.items():
                column.append((values | {"group": group, "committedOffset": offset, "lag": lag})[name])
    if rows[options.columns[0]]:
        arrays = [pyarrow.array(rows[name], field.type) for name, field in zip(options.columns, schema, strict=True)]
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _list(options: ReadOptions, part: QueuePart, schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
    reader = QueuePartReader(options, [])
    for one in part.slices:
        for _, run, is_right, _ in reader.checked(one, part):
            entries, offsets = run.entries[is_right], numpy.flatnonzero(is_right) + run.number
            made: dict[str, Callable[[], Any]] = {
                "topic": lambda: pyarrow.repeat(pyarrow.scalar(one.topic, pyarrow.string()), len(entries)),
                "partition": lambda: numpy.full(len(entries), one.queue_id, numpy.int32),
                "offset": lambda: offsets,
                "physicalOffset": lambda: entries["physicalOffset"].astype(numpy.int64),
                "size": lambda: entries["size"].astype(numpy.int32),
                "tagsCode": lambda: entries["tagsCode"].astype(numpy.int64),
            }
            arrays = [pyarrow.array(made[name](), field.type) for name, field in zip(options.columns, schema, strict=True)]
            yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
