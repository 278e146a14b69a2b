"""A writer reduced to what other workers see of it: bytes in place, then the commit slot, then positions, then wake-ups."""

from __future__ import annotations

import os

from fix_owner import Owner
from pyengine.formats.paths import StorePaths
from pyengine.formats.record import encode_blank
from pyengine.ipc import shared_objects
from pyengine.native import control as native
from record_bytes import encode_record

BLANK_BYTES = 8


class PlainWriter:
    """Appends whole records as the writer does, in the test's own process. Not crash-safe, not fast."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.control = owner.control
        self.identity = owner.memory.identity
        self.size = self.identity.segment_bytes
        self.end = native.load_position(self.control.wrote)
        self.clock_ms = 1_700_000_000_000
        self.queue_offsets: dict[tuple[str, int], int] = {}
        self.log = bytearray()          # every byte from `log_start` on, fillers as zeros
        self.log_start = self.end
        self.buffers: dict[int, object] = {}

    def vouch(self) -> None:
        """Sync the descriptors, as the writer does for a new flusher."""
        native.store(self.control.writer, "verified_flusher", native.load(self.control.flusher, "incarnation"))
        self.owner.memory.wake(native.FLUSHER)

    def put(self, body: bytes, topic: str = "T", queue_id: int = 0, properties: str = "") -> int:
        """Append one record, rolling when it does not fit; its physical offset."""
        key = topic, queue_id
        self.clock_ms += 1
        size = len(self.record(body, topic, queue_id, properties, 0))
        room = self.size - self.end % self.size
        if size + BLANK_BYTES > room:
            self.write(encode_blank(room), room)
        at = self.end
        record = self.record(body, topic, queue_id, properties, at)
        self.write(record, len(record))
        self.queue_offsets[key] = self.queue_offsets.get(key, 0) + 1
        self.publish()
        return at

    def record(self, body: bytes, topic: str, queue_id: int, properties: str, at: int) -> bytes:
        return encode_record(topic=topic, body=body, queue_id=queue_id, physical_offset=at, properties=properties,
                             queue_offset=self.queue_offsets.get((topic, queue_id), 0), store_timestamp_ms=self.clock_ms,
                             born_timestamp_ms=self.clock_ms)

    def write(self, data: bytes, length: int) -> None:
        base = self.end - self.end % self.size
        if self.identity.mode == native.MODE_POOL:
            buffer = self.buffer(base)
            buffer[self.end - base:self.end - base + len(data)] = data
        else:
            descriptor = os.open(StorePaths(self.owner.root).commit_log_segment(base), os.O_WRONLY)
            try:
                os.pwrite(descriptor, data, self.end - base)
            finally:
                os.close(descriptor)
        self.log += data.ljust(length, b"\0")
        self.end += length

    def buffer(self, base: int):
        pool = self.control.pool
        for number in range(self.identity.pool_buffers):
            if native.load(pool[number], "segment_base") == base:
                break
        else:
            number = next(number for number in range(self.identity.pool_buffers)
                          if native.compare_and_swap(pool[number], "segment_base", -1, base))
        if number not in self.buffers:
            self.buffers[number] = self.owner.folder.attach(shared_objects.pool_name(number))
        return self.buffers[number].memory

    def publish(self) -> None:
        """The commit slot, then the positions, then the wake-ups."""
        passed = native.load_position(self.control.slot_pass) + 1
        slot = self.control.slots[passed % 2]
        slot.wrote = self.end
        slot.store_timestamp_ms = self.clock_ms
        native.store(self.control.writer, "intent_end", self.end)
        native.store_position(self.control.slot_pass, passed)
        native.store_position(self.control.wrote, self.end)
        if self.identity.mode == native.MODE_POOL:
            self.owner.memory.wake(native.COMMITTER)
            return
        native.store_position(self.control.committed, self.end)
        self.owner.memory.wake(native.REPUTTER)
        if self.identity.mode == native.MODE_SYNC:
            self.owner.memory.wake(native.FLUSHER)

    def on_disk(self, end: int | None = None) -> bytes:
        """The log's bytes from `log_start` to `end` as the files hold them now."""
        end = self.end if end is None else end
        found = bytearray()
        at = self.log_start
        while at < end:
            base = at - at % self.size
            stop = min(end, base + self.size)
            with open(StorePaths(self.owner.root).commit_log_segment(base), "rb") as file:
                file.seek(at - base)
                found += file.read(stop - at)
            at = stop
        return bytes(found)

    def close(self) -> None:
        for shared in self.buffers.values():
            shared.close()
