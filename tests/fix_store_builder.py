"""Small stores written by the pure Python formats: the writing half of RocketMQ, as plainly as it can be said.

    builder = StoreBuilder(root)
    first = builder.put("T", b"hello", tags="a")
    with open_store(root) as store: ...

Files are written at once and stay open for changes by the test; nothing is synced.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from pyengine.engine_config import Geometry
from pyengine.formats import consume_queue, index_file
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.index_file import IndexEntry, IndexHeader
from pyengine.formats.paths import StorePaths, segment_name, segment_start
from pyengine.formats.record import Message, decode_record, encode_blank, encode_properties, index_key_hash, index_keys, tags_code
from record_bytes import encode_record

SMALL = Geometry(
    mapped_file_size_commit_log_bytes=4096,
    mapped_file_size_consume_queue_bytes=200,
    max_hash_slot_num=16,
    max_index_num=40,
    mapped_file_size_consume_queue_ext_bytes=512,
)
START_MS = 1_700_000_000_000


def queue_of(reader, topic: str, queue_id: int):
    """A reader's view of one consume queue; None for one that does not exist."""
    return reader._queue(topic, queue_id)


def _time_diff_seconds(store_timestamp_ms: int, begin_timestamp_ms: int) -> int:
    """The time field of an index entry: whole seconds since the header's begin, clamped; 0 while there is no begin."""
    if begin_timestamp_ms <= 0:
        return 0
    return min(max(0, store_timestamp_ms - begin_timestamp_ms) // 1000, 0x7FFFFFFF)


class StoreBuilder:
    """Appends records to the store at `root` and dispatches them at once."""

    def __init__(self, root: Path, geometry: Geometry = SMALL, *, first_offset: int = 0) -> None:
        self.paths = StorePaths(root)
        self.root = Path(root)
        self.geometry = geometry
        self.end = first_offset
        self.now_ms = START_MS
        self.queue_offsets: dict[tuple[str, int], int] = defaultdict(int)
        for folder in (self.paths.commit_log, self.paths.consume_queue, self.paths.index, self.paths.config):
            folder.mkdir(parents=True, exist_ok=True)
        (root / "lock").write_bytes(b"lock")
        (root / "checkpoint").write_bytes(bytes(4096))
        self.index_path = self.paths.index / "20260101000000000"
        self.index = IndexHeader()

    def put(
        self,
        topic: str,
        body: bytes = b"",
        *,
        queue_id: int = 0,
        tags: str | None = None,
        keys: str | None = None,
        dispatch: bool = True,
        **fields: object,
    ) -> Message:
        """Append one message; the store clock advances by a second each time."""
        properties = {"KEYS": keys, "TAGS": tags, **fields.pop("properties", {})}
        record = encode_record(
            topic=topic,
            body=body,
            queue_id=queue_id,
            queue_offset=self.queue_offsets[topic, queue_id],
            properties=encode_properties(properties),
            store_timestamp_ms=self.now_ms,
            physical_offset=0,
            **fields,
        )
        size = self.geometry.mapped_file_size_commit_log_bytes
        room = size - self.end % size
        if len(record) + 8 > room:
            self.write_log(encode_blank(room))
            self.end += room
        patched = bytearray(record)
        patched[28:36] = self.end.to_bytes(8, "big")
        self.write_log(bytes(patched))
        message = decode_record(patched)
        self.end += len(patched)
        self.now_ms += 1000
        if dispatch:
            self.dispatch(message)
        self.queue_offsets[topic, queue_id] += 1
        return message

    def dispatch(self, message: Message) -> None:
        """Write the queue entry and the index entries of a message."""
        self.write_entry(message.topic, message.queue_id, message.queue_offset,
                         message.physical_offset, message.size_bytes, tags_code(message.tags))
        for key in index_keys(message.properties):
            self.index_put(message, index_key_hash(message.topic, key))

    def write_log(self, data: bytes, at: int | None = None) -> None:
        """Write bytes at the log's end (or `at`) without moving it; makes the segment if it is not there."""
        at = self.end if at is None else at
        _write(self.paths.commit_log, at, data, self.geometry.mapped_file_size_commit_log_bytes)

    def write_entry(self, topic: str, queue_id: int, offset: int, *entry: int) -> None:
        """Write queue entry number `offset`; makes the file if it is not there."""
        _write(self.paths.queue_folder(topic, queue_id), offset * CQ_ENTRY_BYTES, consume_queue.ENTRY.pack(*entry),
               self.geometry.mapped_file_size_consume_queue_bytes)

    def fill_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """Let a queue start at `offset`, filler in front of it in the same file (pre-blank)."""
        per_file = self.geometry.mapped_file_size_consume_queue_bytes // CQ_ENTRY_BYTES
        for number in range(offset - offset % per_file, offset):
            self.write_entry(topic, queue_id, number, *consume_queue.FILLER)
        self.queue_offsets[topic, queue_id] = offset

    def queue_file(self, topic: str, queue_id: int, start: int = 0) -> Path:
        return self.paths.queue_folder(topic, queue_id) / segment_name(start)

    def segment(self, offset: int) -> Path:
        """The segment that holds a physical offset."""
        return self.paths.commit_log_segment(segment_start(offset, self.geometry.mapped_file_size_commit_log_bytes))

    def next_index_file(self) -> None:
        """Begin another index file; as after a full one, its header first has the end of the file before."""
        self.index_path = self.index_path.with_name(f"{int(self.index_path.name) + 1:017d}")
        end_ms, end = self.index.end_timestamp_ms, self.index.end_physical_offset
        self.index = IndexHeader(end_ms, end_ms, end, end, 0, 1)

    def index_put(self, message: Message, key_hash: int) -> None:
        layout, header = self.geometry.index_layout, self.index
        if not self.index_path.exists():
            self.index_path.write_bytes(bytes(layout.size_bytes))
        with open(self.index_path, "r+b") as file:
            data = bytearray(file.read())
            begin_ms = header.begin_timestamp_ms
            at = layout.slot_at(layout.slot_of(key_hash))
            previous = index_file.unpack_slot(data, at, header.index_count)
            number = header.index_count
            entry = IndexEntry(key_hash, message.physical_offset,
                               _time_diff_seconds(message.store_timestamp_ms, begin_ms), previous)
            data[layout.entry_at(number) : layout.entry_at(number) + 20] = index_file.ENTRY.pack(*entry)
            index_file.SLOT.pack_into(data, at, number)
            first = number == 1
            self.index = IndexHeader(
                message.store_timestamp_ms if first else begin_ms,
                message.store_timestamp_ms,
                message.physical_offset if first else header.begin_physical_offset,
                message.physical_offset,
                header.hash_slot_count + (previous == 0),
                number + 1,
            )
            data[:40] = index_file.HEADER.pack(*self.index)
            file.seek(0)
            file.write(data)


def _write(folder: Path, offset: int, data: bytes, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / segment_name(segment_start(offset, size))
    if not path.exists():
        with open(path, "wb") as file:
            file.truncate(size)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, offset % size)
    finally:
        os.close(descriptor)


@pytest.fixture
def builder(tmp_path: Path) -> StoreBuilder:
    """An empty store to put messages into."""
    return StoreBuilder(tmp_path / "store")
