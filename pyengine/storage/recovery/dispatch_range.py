"""Queues and index files made piece by piece, each piece by another process, to the bytes that one dispatch makes.

    entries  the records of one range of the log put their entries into queue files that exist already. Entry k
             stands at byte 20 k, so ranges may be done in any order and at the same time.
    keys     one index file takes its keys from the log, beginning with the record where the file before it was
             full. How many keys each range has must have been counted before. It is a new file at each call,
             beside the folder of the index: a task may be tried again, or twice at once.

That holds where the offsets of each queue follow each other without a gap or a double;
`put_entries` says when they do not. Everything written is synced before a function here returns.

Used by whoever rebuilds with many processes (pyengine.spark.store_rebuild); the store's
owner makes the queues' files before, and gives one of the filled index files its name.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pyengine.engine_config import Geometry
from pyengine.errors import InvariantError, disk_errors
from pyengine.formats.index_file import IndexHeader, IndexLayout
from pyengine.formats.paths import segment_name
from pyengine.formats.record import decode_record
from pyengine.native.dispatch import NEEDS_INDEX, NEEDS_QUEUE, RANGE_END, DispatchLoop, TouchedQueue, bounded
from pyengine.native.index_file import IndexFile, new_progress
from pyengine.native.scan import walk
from pyengine.native.store_check import count_keys
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.durable_writes import sync_file
from pyengine.storage.index_file import map_index_file
from pyengine.storage.mapped_file import MappedFile, mapped
from pyengine.storage.new_file import FILE_MODE

Queue = tuple[str, int]


class LogRange(NamedTuple):
    """Whole records, from `begin` to `end`, in one segment."""

    segment: MappedFile
    begin: int
    end: int


class KeyPlace(NamedTuple):
    """A key of the log: the record at `offset` has it, as the `number`-th of its own (from 1)."""

    offset: int
    number: int
    store_timestamp_ms: int


def put_entries(root: Path, geometry: Geometry, part: LogRange, queues: Sequence[TouchedQueue], *,
                message_delay_level: str, multi_dispatch: bool) -> bool:
    """Put the entries of one range; `queues`: what it holds of each queue.

    False when queue offsets do not follow each other: then the queues are not what one
    dispatch makes, and must be made again. Raises DiskError, FlushError.
    """
    begins = {(queue.topic, queue.queue_id): queue.min_queue_offset for queue in queues}
    with mapped(part.segment.path) as view, _RangeDispatcher(
        root, geometry, begins, message_delay_level=message_delay_level, multi_dispatch=multi_dispatch
    ) as dispatcher:
        reached = dispatcher.dispatch(view, part.segment.start_offset, part.begin, part.end)
        # Every entry found its own place, and each of them was put.
        return reached == part.end and dispatcher.out_of_order == 0 and dispatcher.entries == sum(q.count for q in queues)


class _RangeDispatcher(Dispatcher):
    """Takes the ends of queues from its caller, opens only files that exist, and syncs what it closes."""

    _may_make_files = False

    def __init__(self, root: Path, geometry: Geometry, begins: Mapping[Queue, int], **settings: object) -> None:
        super().__init__(root, geometry, message_index_enable=False, **settings)
        self._begins = begins

    def _add_queue(self, topic: bytes, queue_id: int, queue_offset: int) -> bool:
        queue = self._loop.queues[self._loop.queues.add(topic, queue_id)]
        queue.next_offset = self._begins[topic.decode("utf-8"), queue_id]
        return True

    def _close_file(self, number: int) -> None:
        queue = self._loop.queues[number]
        if queue.fd >= 0:
            folder = self._folder(self._loop.queues.topic(number), queue.queue_id)
            sync_file(folder / segment_name(queue.file_start))
        super()._close_file(number)


class FilledIndex(NamedTuple):
    """An index file that nobody reads yet, and how many keys were put into it."""

    path: Path
    keys: int


def put_keys(
    folder: Path, name: str, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> FilledIndex:
    """A new file in `folder` with the keys of `ranges` behind `after`, until it is full; it is to become the index file `name`.

    No two calls make the same file. `after`: the last key of the file before it, None for the
    first one. Raises DiskError (no such folder, too), DiskFullError, FlushError; then nothing is left.
    """
    path = folder / f"{name}.{uuid.uuid4().hex}"
    with disk_errors("make", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.ftruncate(descriptor, layout.size_bytes)
        finally:
            os.close(descriptor)
    try:
        return FilledIndex(path, _fill(path, int(name), layout, ranges, after, queue_file_bytes))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _fill(
    path: Path, number: int, layout: IndexLayout, ranges: Sequence[LogRange], after: KeyPlace | None, queue_file_bytes: int
) -> int:
    """How many keys the empty file took."""
    mapping, written_to = map_index_file(path, layout, to_write=True)
    try:
        file = IndexFile(mapping, number, layout, written_to)
        try:
            if after is not None:
                file.inherit(IndexHeader(end_timestamp_ms=after.store_timestamp_ms, end_physical_offset=after.offset))
            loop = DispatchLoop(queue_file_bytes, (), new_progress(), index_enabled=True, multi_dispatch=False)
            loop.use_index(file)
            if after is not None:
                loop.struct.indexed_offset, loop.struct.indexed_keys = after.offset, after.number
            for part in ranges:
                begin = part.begin if after is None else max(part.begin, after.offset)
                if begin < part.end and not _put_keys_of(loop, part, begin):
                    break
            keys = loop.struct.keys
            loop.use_index(None)
        finally:
            file.release()
    finally:
        mapping.close()
    sync_file(path)
    return keys


def _put_keys_of(loop: DispatchLoop, part: LogRange, begin: int) -> bool:
    """False when the file is full before all keys of the range are in it."""
    base = part.segment.start_offset
    with mapped(part.segment.path) as view, bounded(view, base, begin, part.end) as data:
        while True:
            reason = loop.run(data, base, begin, part.end)
            begin = loop.struct.reached
            if reason == NEEDS_QUEUE:  # entries are none of ours
                queues = loop.queues
                queues[queues.add(loop.wanted_topic(), loop.struct.wanted_queue_id)].refused = True
            elif reason == NEEDS_INDEX:
                return False
            elif reason == RANGE_END and begin == part.end:
                return True
            else:
                raise InvariantError(f"the log at {begin} is not what it was: {reason}")


def key_place(part: LogRange, number: int) -> KeyPlace:
    """Where the `number`-th key of a range is (from 1); InvariantError when it has fewer."""
    base, begin, end = part.segment.start_offset, part.begin, part.end
    passed = 0  # keys of the records before `begin`
    with mapped(part.segment.path) as view:

        def record_behind(offset: int) -> int:
            """Where the first record at or behind `offset` begins."""
            return walk(view, base, begin, offset, limit=part.end, check_crc=False).end_offset

        while begin < end:
            single = record_behind(begin + 1)
            middle = record_behind(max(begin + 1, (begin + end) // 2))
            if middle >= end:
                middle = single
            keys = count_keys(view, base, begin, middle)
            if passed + keys >= number:
                if middle == single:
                    return KeyPlace(begin, number - passed, decode_record(view, begin - base).store_timestamp_ms)
                end = middle
            elif middle > begin:
                begin, passed = middle, passed + keys
            else:
                break
    raise InvariantError(f"the log has no {number} keys in [{part.begin}, {part.end})")
