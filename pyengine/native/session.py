"""One producer's session: its object, its guard in the writer, and the producer's end (csrc/session, producer .cdef.h and others).

The producer's end publishes entries and waits for their answers.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyengine import arguments
from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import CData, ms_control, ms_entry, ms_producer, ms_session

RING_BYTES_MIN = 64 * 1024
RING_BYTES_MAX = 1 << 30


def check_ring_bytes(ring_bytes: int) -> None:
    """UsageError for what is no size of a ring."""
    if not RING_BYTES_MIN <= arguments.integer(ring_bytes, "ring_bytes") <= RING_BYTES_MAX or ring_bytes & (ring_bytes - 1):
        raise UsageError(f"ring_bytes = {ring_bytes}: give a power of two from {RING_BYTES_MIN} to {RING_BYTES_MAX}")


def session_bytes(ring_bytes: int) -> int:
    """Size of the object of a session with a ring of `ring_bytes` (a power of two)."""
    return lib.ms_session_bytes(ring_bytes)


def view(memory: Buffer) -> ms_session:
    """`struct ms_session *` over a writable mapping that the caller keeps alive."""
    return ffi.cast("struct ms_session *", ffi.from_buffer(memory))


def format_session(session: ms_session, ring_bytes: int, slot: int, generation: int, epoch: int) -> None:
    """Make zeroed memory a session; readers accept it from here on."""
    lib.ms_session_format(session, ring_bytes, slot, generation, epoch)


def check_session(session: ms_session, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError unless this is a session object of our layout."""
    raise_layout_error("the session object", lib.ms_session_check(session, mapped_bytes))


def install_guard(elsewhere: CData = ffi.NULL) -> None:
    """Take SIGBUS for this process: a fault inside a guarded session lays zeros over it, any other goes on as before.

    Those others are counted in `elsewhere`, a `uint64_t *` that outlives the process.
    """
    code = lib.ms_session_guard_install(elsewhere)
    if code:
        raise OSError(-code, os.strerror(-code))


def guard(slot: int, memory: CData, size_bytes: int) -> None:
    """Guard `slot`'s session, a cffi pointer to its mapping's first byte."""
    lib.ms_session_guard_add(slot, ffi.cast("void *", memory), size_bytes)


def unguard(slot: int) -> None:
    """Forget it, before it is unmapped."""
    lib.ms_session_guard_remove(slot)


def is_broken(slot: int) -> bool:
    """Whether the session's memory was taken away and private zeros are there now."""
    return bool(lib.ms_session_guard_broken(slot))


def count_producer(semaphore_id: int, by: int) -> None:
    """Count this process in (1) or out (-1); the kernel counts it out if it dies. OSError if that fails."""
    code = lib.ms_attach_count_add(semaphore_id, by)
    if code:
        raise OSError(-code, os.strerror(-code))


def producer_count(semaphore_id: int) -> int:
    """The number of living producers. OSError if there is no such semaphore."""
    value = lib.ms_attach_count_get(semaphore_id)
    if value < 0:
        raise OSError(-value, os.strerror(-value))
    return value


AGAIN: int = lib.MS_PRODUCER_AGAIN
CLOSED: int = lib.MS_PRODUCER_CLOSED
FROZEN: int = lib.MS_PRODUCER_FROZEN
BUSY: int = lib.MS_PRODUCER_BUSY
UNFINISHED: int = lib.MS_PRODUCER_UNFINISHED
NO_SLAVE: int = lib.MS_PRODUCER_NO_SLAVE
UNCONFIRMED: int = lib.MS_PRODUCER_UNCONFIRMED

NOT_SUBMITTED: int = lib.MS_STAGE_NOT_SUBMITTED
SUBMITTED: int = lib.MS_STAGE_SUBMITTED
ANSWERED: int = lib.MS_STAGE_ANSWERED

DURABLE: int = lib.MS_PUT_DURABLE
CONFIRMED: int = lib.MS_PUT_CONFIRMED

PUT: int = lib.MS_ENTRY_PUT
MANY: int = lib.MS_ENTRY_MANY
BATCH: int = lib.MS_ENTRY_BATCH
SIDE: int = lib.MS_ENTRY_SIDE
RAW: int = lib.MS_ENTRY_RAW
SIDE_BYTES_MAX: int = lib.MS_SIDE_BYTES_MAX
COMPLETIONS: int = lib.MS_COMPLETIONS

# sequence, physical_offset, end_offset, queue_offset, store_timestamp_ms, status, detail, count, size_bytes
ANSWER = struct.Struct("<QqqqqIIII")


def pack_many(bodies: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The payload of a MANY entry in two pieces: lengths padded to 8 bytes, bodies end to end.

    TypeError for bodies that are no bytes, also for buffers whose items are wider than one byte.
    """
    counts = array("I", map(len, bodies))
    joined = b"".join(bodies)
    if sum(counts) != len(joined):
        raise TypeError("a body's length is not its number of bytes")
    lengths = counts.tobytes()
    return (lengths + bytes(4) if len(lengths) & 7 else lengths), joined


class ProducerSession:
    """Pointers of one open session; the caller keeps the mappings. Not thread-safe but for the waits.

    `control` (read-only) and `session` are views over mappings; `semaphore` is the writer's latch
    semaphore (native.waiting.Latch.semaphore).
    """

    def __init__(self, control: ms_control, session: ms_session, semaphore: CData, slot: int, generation: int) -> None:
        self._producer = ffi.new("struct ms_producer *")
        producer = self._producer
        producer.control = control
        producer.session = session
        producer.writer_semaphore = semaphore
        producer.slot = slot
        producer.generation = generation
        lib.ms_producer_attach(producer)
        self.control = control
        self.slot = slot
        self.generation = generation
        self.entry_limit: int = lib.ms_producer_entry_limit(producer)
        self._answer = memoryview(ffi.buffer(ffi.addressof(producer, "answer"), ANSWER.size))

    def front(self) -> tuple[int, int]:
        """For pyengine._front: where this producer is, and the functions that put through it. Valid while this object is."""
        return int(ffi.cast("uintptr_t", self._producer)), int(ffi.cast("uintptr_t", lib.ms_producer_calls()))

    def answer(self) -> tuple[int, ...]:
        """The last put's answer, a tuple in the order of ANSWER."""
        return ANSWER.unpack(self._answer)

    @property
    def pointer(self) -> ms_producer:
        return self._producer

    @property
    def stage(self) -> int:
        """How far the last put came: NOT_SUBMITTED, SUBMITTED or ANSWERED."""
        return self._producer.stage

    @property
    def submitted_ns(self) -> int:
        """When the last put that is waited for began, on the monotonic clock."""
        return self._producer.submitted_ns

    @property
    def sequence(self) -> int:
        """Sequence number of the last submitted entry."""
        return self._producer.sequence

    def set_constants(self, born_host: bytes, store_host: bytes, sys_flag: int) -> None:
        """Hosts (4 or 16 address bytes and the port, as on disk) and sysFlag of the fast path."""
        fill_hosts(self._producer.header, born_host, store_host)
        self._producer.header.sys_flag = sys_flag

    def set_timeouts(self, timeout_s: float, flush_timeout_s: float) -> None:
        """How long a put waits for the writer's answer, and from there for durability."""
        self._producer.timeout_ns = int(timeout_s * 1e9)
        self._producer.flush_timeout_ns = int(flush_timeout_s * 1e9)

    def prefix(self, topic: bytes, properties: bytes, queue_id: int, flag: int) -> bytes:
        """What the entries of one topic, queue, flag and properties begin with; any session's put() takes it."""
        image = ffi.new("uint8_t[]", layout_bytes(topic, properties, 0))
        lib.ms_producer_prefix(self._producer, image, topic, len(topic), properties, len(properties), queue_id, flag)
        return bytes(ffi.buffer(image))

    def watch(self, lock_descriptor: int, first_byte: int) -> None:
        """From now on notice, within about a second, that no process holds a worker's byte of the store's lock."""
        self._producer.lock_byte = first_byte
        self._producer.lock_fd = lock_descriptor

    @property
    def is_closed(self) -> bool:
        """Whether nothing that is submitted would be answered: the session ended, or its engine."""
        return lib.ms_producer_is_closed(self._producer) != 0

    @property
    def engine_died(self) -> bool:
        """Whether a wait has found that no process of the engine lives."""
        return self._producer.engine_died == lib.MS_ENGINE_DIED

    def end_as_replaced(self) -> None:
        """Another start has recovered the store: nothing that is submitted here will be answered any more."""
        self._producer.engine_died = lib.MS_ENGINE_REPLACED

    def put_entry(self, header: ms_entry, topic: bytes, properties: bytes, first: bytes, second: bytes, how: int,
                  deadline_ns: int) -> int:
        """An entry of any kind, waited for: 0 or AGAIN, BUSY, CLOSED, FROZEN, NO_SLAVE, UNCONFIRMED. See stage and answer().
        `how`: DURABLE waits for `flushed`, CONFIRMED for `confirm`. It waits 50 ms at most: then UNFINISHED, and claim()
        gives the answer to come."""
        return lib.ms_producer_put_entry(
            self._producer, header, topic, properties, first, len(first), second, len(second), how, deadline_ns)

    def claim(self) -> Claim:
        """Be responsible for the answer to the entry just submitted."""
        return Claim(self)

    def submit(self, header: ms_entry, topic: bytes, properties: bytes, first: bytes, second: bytes, deadline_ns: int) -> int:
        """Publish an entry and return at once; 0 (then `sequence` is its number) or AGAIN, BUSY, CLOSED."""
        return lib.ms_producer_submit(
            self._producer, header, topic, properties, first, len(first), second, len(second), deadline_ns)

    def submit_raw(self, records: Buffer, physical_offset: int, deadline_ns: int) -> int:
        """Publish whole records that a master stamped, to be appended at `physical_offset`; a slave's replicator only.

        `records` is a buffer: one segment's at most, a blank only as the last. 0 (then `sequence` is
        the entry's number) or AGAIN, BUSY, CLOSED. ValueError when it does not fit into the ring.
        """
        with memoryview(records) as view:
            if layout_bytes(b"", b"", view.nbytes) > self.entry_limit:
                raise ValueError(f"{view.nbytes:,} bytes do not fit into an entry of this session")
            header = new_header()
            header.kind = RAW
            header.payload_bytes = view.nbytes
            header.prepared_transaction_offset = physical_offset
            with ffi.from_buffer("uint8_t[]", view) as data:
                return lib.ms_producer_submit(
                    self._producer, header, b"", b"", data, view.nbytes, ffi.NULL, 0, deadline_ns)

    def wait_for_room_beside(self, deadline_ns: int) -> int:
        """0 once submit_side() finds room, in the ring and for its answer; AGAIN, CLOSED."""
        return lib.ms_producer_wait_for_room(self._producer, 2 * layout_bytes(b"", b"", 0), deadline_ns)

    def submit_side(self, header: ms_entry, deadline_ns: int) -> int:
        """Publish that the next entry is in its side object of header.payload_bytes; 0 or AGAIN, BUSY, CLOSED."""
        return lib.ms_producer_submit(self._producer, header, b"", b"", ffi.NULL, 0, ffi.NULL, 0, deadline_ns)

    def wait_acked(self, sequence: int, deadline_ns: int) -> tuple[int, tuple[Any, ...]]:
        """(0, answer) once `sequence` is answered; (AGAIN or CLOSED, ()) otherwise. Any thread."""
        answer = ffi.new("struct ms_completion *")
        why = lib.ms_producer_wait_acked(self._producer, sequence, deadline_ns, answer)
        if why:
            return why, ()
        return 0, ANSWER.unpack(ffi.buffer(answer, ANSWER.size))

    def take_answer(self, sequence: int, deadline_ns: int) -> tuple[int, tuple[Any, ...]]:
        """wait_acked() for a caller with one entry under way, who claims nothing: the answer's place is free again."""
        why, answer = self.wait_acked(sequence, deadline_ns)
        if why == 0:
            lib.ms_producer_finish(self._producer, sequence)
        return why, answer

    def wait_kept(self, end_offset: int, how: int, flush_deadline_ns: int, slave_deadline_ns: int) -> int:
        """0 once everything below `end_offset` is durable (DURABLE) and confirmed (CONFIRMED). AGAIN: not durable in
        time; NO_SLAVE, UNCONFIRMED; FROZEN, CLOSED. Any thread."""
        return lib.ms_producer_wait_kept(self._producer, end_offset, how, flush_deadline_ns, slave_deadline_ns)

    def deadlines_ns(self, submitted_ns: int, store_timestamp_ms: int) -> tuple[int, int]:
        """Until when a put may wait for the disk and for slaves that the writer has answered, now or earlier."""
        stored_ns = lib.ms_producer_stored_ns(submitted_ns, store_timestamp_ms)
        return stored_ns + self._producer.flush_timeout_ns, stored_ns + self._producer.slave_timeout_ns


class Sends:
    """Rounds of sends of RocketMQ's clients that are stored without an object for each: csrc/sends.cdef.h. One thread's.

    What was taken in a round and is not answered is listed by `rest()`, and is its caller's to claim, before the next round.
    """

    ROUND_MAX: int = lib.MS_SENDS_MAX

    def __init__(self, store_host: bytes, store_host_flag: int, cluster: bytes, answer: Sequence[bytes], frame_bytes_max: int) -> None:
        """`answer`: the five pieces of an answer's header around message id, queue, queue offset and the request's number.
        UsageError where a part is too long to be kept here."""
        self._sends = ffi.new("struct ms_sends *")
        sends = self._sends
        too_long = [piece for piece in answer if len(piece) > lib.MS_SEND_PIECE_BYTES_MAX]
        if too_long or len(answer) != lib.MS_SEND_ANSWER_PIECES or len(cluster) > len(sends.cluster):
            raise UsageError(f"answers to sends cannot be made of {answer!r} and {cluster!r}: a part is too long")
        ffi.memmove(sends.head.store_host, store_host, len(store_host))
        sends.head.sys_flag = store_host_flag
        ffi.memmove(sends.cluster, cluster, len(cluster))
        sends.cluster_bytes = len(cluster)
        for number, piece in enumerate(answer):
            ffi.memmove(sends.piece[number], piece, len(piece))
            sends.piece_bytes[number] = len(piece)
        sends.frame_bytes_max = frame_bytes_max
        self._answers = memoryview(ffi.buffer(sends.answers))
        self.store_host = store_host
        self.topics: list[str] = []

    def clear_topics(self) -> None:
        """No send is taken until a topic is entered again."""
        self._sends.topic_count = 0
        self.topics = []

    def enter_topic(self, name: str, queues: int) -> None:
        """From now on take sends to the queues of this topic; where there is no place for it, to it alone."""
        data = name.encode()
        if len(data) > lib.MS_SEND_TOPIC_BYTES_MAX:
            return
        if self._sends.topic_count == lib.MS_SEND_TOPICS_MAX:
            self.clear_topics()
        number = self._sends.topic_count
        topic = self._sends.topics[number]
        ffi.memmove(topic.topic, data, len(data))
        topic.topic_bytes, topic.queues = len(data), queues
        self.topics.append(name)
        self._sends.topic_count = number + 1

    def begin(self) -> None:
        """A round of none."""
        self._sends.count = self._sends.answered = 0

    def take(self, session: ProducerSession, data: bytearray, at: int, born_host: bytes) -> int:
        """Submit the sends that `data` begins with at `at`, in whole frames; the bytes that were taken."""
        with ffi.from_buffer("uint8_t[]", data) as view:
            return lib.ms_sends_take(self._sends, session.pointer, view + at, len(data) - at, born_host, len(born_host))

    @property
    def count(self) -> int:
        """How many the round has."""
        return self._sends.count

    def answer(self, session: ProducerSession, deadline_ns: int) -> bytes:
        """Wait for the writer; the answers to those that are stored, as far as they come in time."""
        lib.ms_sends_answer(self._sends, session.pointer, deadline_ns)
        return bytes(self._answers[:self._sends.answer_bytes])

    def rest(self) -> list[tuple[int, int, str, int, int]]:
        """(sequence, the request's number, topic, queue, bytes of the frame) of each send that answer() did not answer."""
        sends, taken = self._sends, self._sends.taken
        return [(taken[i].sequence, taken[i].opaque, self.topics[taken[i].topic], taken[i].queue_id, taken[i].frame_bytes)
                for i in range(sends.answered, sends.count)]


class Claim:
    """The answer to one entry is still to be read; once this object is gone its place may be used again.

    Whatever exception comes between submission and answer, no place is lost: without a
    claim the next submission frees it, and with one the end of this object does.
    """

    __slots__ = ("_session", "_sequence")

    def __init__(self, session: ProducerSession, sequence: int = 0) -> None:
        """Of the entry just submitted; or of `sequence`, which another object has claimed and gives up."""
        self._session = session
        self._sequence = ffi.new("uint64_t *", sequence)
        if not sequence:
            lib.ms_producer_claim(session.pointer, self._sequence)  # into memory that has a finalizer already

    @property
    def sequence(self) -> int:
        """Number of the entry in its session."""
        return self._sequence[0]

    def finish(self) -> None:
        """The answer was read, or will not be."""
        lib.ms_producer_finish(self._session.pointer, self._sequence[0])

    def __del__(self) -> None:
        if hasattr(self, "_sequence"):
            self.finish()


def fill_hosts(header: ms_entry, born_host: bytes, store_host: bytes) -> None:
    """Put both hosts, in their on-disk form, into an entry header."""
    ffi.memmove(header.born_host, born_host, len(born_host))
    ffi.memmove(header.store_host, store_host, len(store_host))


def new_header() -> ms_entry:
    """An empty entry header."""
    return ffi.new("struct ms_entry *")


def layout_bytes(topic: bytes, properties: bytes, payload_bytes: int) -> int:
    """Bytes that an entry takes in the ring or in a side object."""
    return lib.ms_entry_layout_bytes(len(topic), len(properties), payload_bytes)


def entry_bytes(header: ms_entry, topic: bytes, properties: bytes, first: bytes, second: bytes) -> bytes:
    """An entry as a side object holds it; `header` has kind, sizes and the sequence."""
    size = layout_bytes(topic, properties, len(first) + len(second))
    image = ffi.new("uint8_t[]", size)
    lib.ms_entry_fill(image, header, topic, properties, first, len(first), second, len(second))
    return bytes(ffi.buffer(image))
