"""A writer and its producers over anonymous shared memory: no files, no supervisor."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyengine._native import ffi, lib
from pyengine.formats.record import encode_host
from pyengine.native import control as control_native
from pyengine.native import flush, session
from pyengine.native import session as producer_native
from pyengine.native import writer as writer_native
from pyengine.native.flush import monotonic_ns
from pyengine.native.waiting import Latch
from pyengine.native.writer import format_queue_table, queue_table_bytes, view_queue_table
from waiting import scaled_timeout_s

HOST = encode_host("127.0.0.1:10911")
RING_BYTES = 64 * 1024


def queue_entries(table: Any) -> Iterator[tuple[str, int, int]]:
    """(topic, queue id, next offset) of each queue in the table."""
    for number in range(table.slots):
        slot = table.slot[number]
        if slot.key_bytes:
            yield bytes(ffi.buffer(slot.topic, slot.key_bytes)).decode(), slot.queue_id, slot.next_offset


class WriterRig:
    """Control block, queue table, and a log of `segments` segments."""

    def __init__(self, segment_bytes: int = 4096, segments: int = 64, mode: int = control_native.MODE_MAPPED,
                 max_message_bytes: int = 4 << 20, replay_clock: bool = True) -> None:
        self.segment_bytes = segment_bytes
        self.log = mmap.mmap(-1, segment_bytes * segments)
        self.control_memory = mmap.mmap(-1, control_native.CONTROL_BYTES)
        self.table_memory = mmap.mmap(-1, queue_table_bytes(1024))
        self.control = control_native.view_control(self.control_memory)
        self.table = view_queue_table(self.table_memory)
        format_queue_table(self.table, 1024, 1)
        identity = self.control.identity
        identity.epoch = 1
        identity.segment_bytes = segment_bytes
        identity.max_message_bytes = max_message_bytes
        identity.mode = mode
        identity.replay_clock = replay_clock
        identity.pool_buffers = 5
        control_native.store(self.control.allocator, "reserved_end", 1 << 60)
        lib.ms_control_publish(self.control)
        control_native.store(self.control.state, "state", control_native.STATE_RUNNING)
        self.latch = Latch(self.control.latch[control_native.WRITER], "")
        self.folder: Path | None = None  # sync mode, or with gather_bytes_min: one file a segment
        self.open_flags = os.O_RDWR | os.O_CREAT
        self.zero_ahead_bytes = 0
        self.gather_bytes_min = 0
        self.fds: dict[int, int] = {}
        self.mapped: list[object] = []
        self.sessions: dict[int, tuple[mmap.mmap, object]] = {}
        self.writer: writer_native.Writer | None = None

    @property
    def has_files(self) -> bool:
        return self.gather_bytes_min > 0 or self.control.identity.mode == control_native.MODE_SYNC

    def segment(self, base: int) -> writer_native.Segment:
        if self.has_files:
            if base not in self.fds:
                path = self.folder / f"{base:020d}"
                path.touch()
                self.fds[base] = os.open(path, self.open_flags)
            if not self.gather_bytes_min:
                return writer_native.Segment(base, None, self.fds[base])
            os.ftruncate(self.fds[base], self.segment_bytes)
            memory = ffi.from_buffer(mmap.mmap(self.fds[base], self.segment_bytes))
            self.mapped.append(memory)
            return writer_native.Segment(base, ffi.cast("uint8_t *", memory), self.fds[base])
        return writer_native.Segment(base, ffi.cast("uint8_t *", ffi.from_buffer(self.log)) + base, -1)

    def open_session(self, slot: int = 0, generation: int = 1) -> producer_native.ProducerSession:
        """A producer of a new session; the writer attaches it at its next start or request."""
        memory = mmap.mmap(-1, session.session_bytes(RING_BYTES))
        view = session.view(memory)
        session.format_session(view, RING_BYTES, slot, generation, 1)
        table_row = self.control.sessions[slot]
        control_native.store(table_row, "generation", generation)
        control_native.store(table_row, "state", control_native.SESSION_OPEN)
        self.sessions[slot] = (memory, view)
        control_native.add(self.control.session_seq, "value")
        producer = producer_native.ProducerSession(self.control, view, slot, generation)
        producer.set_constants(HOST, HOST, 0)
        producer.set_timeouts(5, 5)
        return producer

    def start_writer(self, ahead: int = 4) -> writer_native.Writer:
        """A writer as workers/writer.py would start it, also behind a killed one."""
        if writer_native.roll_back(self.control, self.table):
            start, end = control_native.committed_slot(self.control)[0], self.control.writer.intent_end
            self.clear(start, end)
        writer_native.rolled_back(self.control)
        self.writer = writer = writer_native.Writer(
            self.control, self.table, {}, spin_us=0,
            zero_ahead_bytes=self.zero_ahead_bytes, gather_bytes_min=self.gather_bytes_min)
        writer.open()
        position = writer.position
        base = position - position % self.segment_bytes
        if position > base:
            writer.set_current(self.segment(base))
        for _ in range(ahead):
            writer.add_ahead(self.segment(writer.next_base))
        self.attach_sessions()
        return writer

    def clear(self, start: int, end: int) -> None:
        if not self.has_files:
            self.log[start:end] = bytes(end - start)
            return
        size = self.segment_bytes
        for base in range(start - start % size, end, size):
            first = max(start, base)
            flush.zero_range(self.segment(base).fd, first - base, min(end, base + size) - first)

    def load_files(self) -> None:
        """What is in files, to where tests look."""
        for path in self.folder.iterdir() if self.has_files else ():
            data, base = path.read_bytes(), int(path.name)
            self.log[base:base + len(data)] = data

    def attach_sessions(self) -> None:
        self.writer.pointer.session_seq_seen = control_native.load(self.control.session_seq, "value")
        for slot, (_, view) in self.sessions.items():
            if not self.writer.pointer.sessions[slot].session:
                generation = control_native.load(self.control.sessions[slot], "generation")
                self.writer.attach_session(slot, view, generation, RING_BYTES)

    def drain(self, deadline_s: float = 0.0) -> None:
        """Run the writer, doing what it asks for, until nothing is left to do (or for deadline_s)."""
        writer = self.writer
        until = monotonic_ns() + int(deadline_s * 1e9)
        while True:
            why = writer.run(max(until, monotonic_ns() + 200_000))
            if why == writer_native.RUN_SEGMENT or why == writer_native.RUN_ROLLED:
                writer.take_finished()
                while writer.ahead_count < max(4, writer.pointer.segments_needed):
                    writer.add_ahead(self.segment(writer.next_base))
            elif why == writer_native.RUN_SESSIONS:
                self.attach_sessions()
            elif why == writer_native.RUN_TIME:
                if monotonic_ns() >= until and not self.work_waits():
                    return
            else:
                raise AssertionError(f"unexpected request {why}")

    def work_waits(self) -> bool:
        return any(not self.writer.session_drained(slot) for slot in self.sessions)

    def wrote(self) -> int:
        return control_native.load_position(self.control.wrote)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


def header(kind: int, *, queue_id: int = 0, payload_bytes: int, topic: bytes, properties: bytes, count: int = 1,
           sys_flag: int = 0, clock_ms: int = 0, flag: int = 0):
    """An entry header with the rig's hosts."""
    head = producer_native.new_header()
    head.kind, head.queue_id, head.count = kind, queue_id, count
    head.sys_flag, head.clock_ms, head.flag = sys_flag, clock_ms, flag
    head.topic_bytes, head.properties_bytes, head.payload_bytes = len(topic), len(properties), payload_bytes
    head.born_timestamp_ms = 1_600_000_000_000
    producer_native.fill_hosts(head, HOST, HOST)
    return head


def submit(producer, kind: int, topic: bytes, properties: bytes, payload: bytes, *, timeout_s: float = 5,
           **fields) -> int:
    """Publish an entry; its sequence number."""
    head = header(kind, payload_bytes=len(payload), topic=topic, properties=properties, **fields)
    why = producer.submit(head, topic, properties, payload, monotonic_ns() + int(scaled_timeout_s(timeout_s) * 1e9))
    assert why == 0
    return producer.sequence


def answer_of(producer, sequence: int) -> tuple:
    answer = ffi.new("struct ms_completion *")
    assert lib.ms_producer_wait_acked(producer.pointer, sequence, monotonic_ns() + int(scaled_timeout_s(5) * 1e9), answer) == 0
    return producer_native.ANSWER.unpack(ffi.buffer(answer, producer_native.ANSWER.size))
