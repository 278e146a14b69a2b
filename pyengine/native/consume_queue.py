"""The table of queues that entries are gathered for (csrc/consume_queue.cdef.h).

The memory is Python's and grows here, between calls: C never allocates. Which
files exist is decided by pyengine.storage.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.errors import InvariantError
from pyengine.native.flush import raise_disk_error

if TYPE_CHECKING:
    from pyengine._native import ms_ext_queue, ms_ext_set, ms_queue, ms_queue_set

CHUNKS = 4096  # queues that one batch can gather for before it writes: 5 MiB, taken as they are used
_new_raw = ffi.new_allocator(should_clear_after_alloc=False)
_QUEUES_FIRST = 64
_TOPIC_BYTES = 64  # room per queue; more is made when names are longer


class QueueSet:
    """Queues by topic and id, over a `struct ms_queue_set` that the caller keeps alive."""

    def __init__(self, struct: ms_queue_set, file_bytes: int) -> None:
        self._set = struct
        struct.file_bytes = file_bytes
        self._chunks = _new_raw("struct ms_queue_chunk[]", CHUNKS)
        struct.chunks = self._chunks
        struct.chunk_count = CHUNKS
        self._ext: ms_ext_set | None = None
        self._make_room(_QUEUES_FIRST, _QUEUES_FIRST * _TOPIC_BYTES)

    def use_ext(self, file_bytes: int) -> None:
        """From now on new entries name units of extensions whose files have `file_bytes` (csrc/consume_queue_ext.cdef.h)."""
        ext = self._ext = ffi.new("struct ms_ext_set *")
        self._ext_runs = ffi.new("struct ms_ext_run[]", CHUNKS)
        ext.runs = self._ext_runs
        ext.file_bytes = file_bytes
        self._ext_queues: ms_ext_queue | None = None
        self._make_ext_room(ext)
        self._set.ext = ext

    def ext(self, number: int) -> ms_ext_queue:
        """The `struct ms_ext_queue` of a number, after use_ext(); valid until the next add."""
        return self._set.ext.queues[number]

    def _make_ext_room(self, ext: ms_ext_set) -> None:
        fresh = ffi.new("struct ms_ext_queue[]", self._set.capacity)
        before = 0
        if self._ext_queues is not None:
            before = len(self._ext_queues)
            ffi.memmove(fresh, self._ext_queues, before * ffi.sizeof("struct ms_ext_queue"))
        for number in range(before, self._set.capacity):
            fresh[number].fd, fresh[number].end, fresh[number].allocated_bytes = -1, -1, -1
        self._ext_queues = ext.queues = fresh

    def __len__(self) -> int:
        return self._set.count

    def add(self, topic: bytes, queue_id: int) -> int:
        """The number of a new queue; it has no file yet and begins at queue offset 0."""
        number = lib.ms_queue_add(self._set, topic, len(topic), queue_id)
        while number == -errno.ENOSPC:
            grown = self._set.topics_capacity
            if self._set.topics_bytes + len(topic) > grown:
                grown = 2 * (grown + len(topic))
            self._make_room(2 * self._set.capacity if self._set.count == self._set.capacity else self._set.capacity, grown)
            number = lib.ms_queue_add(self._set, topic, len(topic), queue_id)
        return number

    def __getitem__(self, number: int) -> ms_queue:
        """The `struct ms_queue` of a number; valid until the next add."""
        return self._set.queues[number]

    def topic(self, number: int) -> bytes:
        queue = self._set.queues[number]
        return bytes(ffi.buffer(self._set.topics + queue.topic_at, queue.topic_bytes))

    def open_queues(self) -> Iterator[int]:
        """Numbers of the queues that hold a descriptor."""
        for number in range(self._set.count):
            if self._set.queues[number].fd >= 0:
                yield number

    def _make_room(self, queues: int, topics_bytes: int) -> None:
        old = self._set
        fresh_queues = ffi.new("struct ms_queue[]", queues)
        fresh_topics = ffi.new("uint8_t[]", topics_bytes)
        if old.count:
            ffi.memmove(fresh_queues, old.queues, old.count * ffi.sizeof("struct ms_queue"))
            ffi.memmove(fresh_topics, old.topics, old.topics_bytes)
        self._queues, self._topics = fresh_queues, fresh_topics
        self._buckets = ffi.new("int32_t[]", 2 * queues)
        old.queues, old.topics, old.buckets = fresh_queues, fresh_topics, self._buckets
        old.capacity, old.topics_capacity, old.bucket_mask = queues, topics_bytes, 2 * queues - 1
        lib.ms_queue_rehash(old)
        if self._ext is not None:
            self._make_ext_room(self._ext)


def fill(fd: int, length: int, path: str) -> None:
    """Put filler entries (section 8.3) into the first `length` bytes of a queue file."""
    code = lib.ms_queue_fill(fd, length)
    if code:
        raise_disk_error(code, "write", path)


def count_entries(fd: int, file_bytes: int, path: str) -> int:
    """Entries at the front of a queue file up to the zeros that end the data; filler counts."""
    count = lib.ms_queue_count_entries(fd, file_bytes)
    if count < 0:
        raise_disk_error(count, "read", path)
    return count


def check_layout(file_bytes: int) -> None:
    """InvariantError unless queue files of this size hold whole entries."""
    if file_bytes < lib.MS_QUEUE_ENTRY_BYTES or file_bytes % lib.MS_QUEUE_ENTRY_BYTES:
        raise InvariantError(f"queue files of {file_bytes} bytes do not hold whole entries")

