"""One producer's session: its shared object, the writer's guard, the producer's side (csrc/session, producer .cdef.h).

The producer's side publishes entries and waits for their answers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyengine import arguments
from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.native.control import SharedStruct, raise_os_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import CData, ms_control, ms_entry, ms_producer, ms_session

_SHARED: SharedStruct[ms_session] = SharedStruct("the session object", "struct ms_session", lib.ms_session_check)
view, check_session = _SHARED.view, _SHARED.check
RING_BYTES_MIN = 64 * 1024
RING_BYTES_MAX = 1 << 30
session_bytes = lib.ms_session_bytes  # return the size of a session's shared object with a ring of `ring_bytes` (a power of two)
format_session = lib.ms_session_format  # make zeroed memory a session; from then on other processes accept it
unguard = lib.ms_session_guard_remove  # remove the guard of a session, before it is unmapped


def check_ring_bytes(ring_bytes: int) -> None:
    """Raise UsageError unless a ring can have this size."""
    if not RING_BYTES_MIN <= arguments.integer(ring_bytes, "ring_bytes") <= RING_BYTES_MAX or ring_bytes & (ring_bytes - 1):
        raise UsageError(f"ring_bytes = {ring_bytes}: give a power of two from {RING_BYTES_MIN} to {RING_BYTES_MAX}")


def install_guard(elsewhere: CData = ffi.NULL) -> None:
    """Handle SIGBUS: a fault inside a guarded session maps private zeros over it; other faults are handled as before.

    `elsewhere`, a `uint64_t *` that outlives the process, counts those other faults.
    """
    raise_os_error(lib.ms_session_guard_install(elsewhere))


def guard(slot: int, memory: CData, size_bytes: int) -> None:
    """Guard `slot`'s session, a cffi pointer to its mapping's first byte."""
    lib.ms_session_guard_add(slot, ffi.cast("void *", memory), size_bytes)


def is_broken(slot: int) -> bool:
    """Return whether the session's memory was taken away and replaced by private zeros."""
    return bool(lib.ms_session_guard_broken(slot))


def count_producer(semaphore_id: int, by: int) -> bool:
    """Count this process in (1) or out (-1); the kernel counts it out if it dies. False if that is not possible: the count is advisory."""
    return lib.ms_attach_count_add(semaphore_id, by) == 0


def producer_count(semaphore_id: int) -> int | None:
    """Return the number of living producers; None if there is no count or it belongs to another user."""
    count = lib.ms_attach_count_get(semaphore_id)
    return None if count < 0 else count


AGAIN: int = lib.MS_PRODUCER_AGAIN
CLOSED: int = lib.MS_PRODUCER_CLOSED
FROZEN: int = lib.MS_PRODUCER_FROZEN
BUSY: int = lib.MS_PRODUCER_BUSY
NO_SLAVE: int = lib.MS_PRODUCER_NO_SLAVE
UNCONFIRMED: int = lib.MS_PRODUCER_UNCONFIRMED

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


def pack_many(bodies: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Return the payload of a MANY entry: the lengths (uint32), padded to 8 bytes, then the bodies.

    TypeError for a body that is not bytes, or a buffer whose items are wider than one byte.
    """
    counts = array("I", map(len, bodies))
    lengths = counts.tobytes() + bytes(4 * (len(counts) & 1))
    payload = b"".join((lengths, *bodies))
    if len(lengths) + sum(counts) != len(payload):
        raise TypeError("a body's length is not its number of bytes")
    return payload


class ProducerSession:
    """The producer's side of one open session, whose mappings the caller keeps; only the waits are thread-safe.

    `control` (read-only) and `session` are views over mappings.
    """

    def __init__(self, control: ms_control, session: ms_session, slot: int, generation: int) -> None:
        self._producer = ffi.new("struct ms_producer *")
        producer = self._producer
        producer.control = control
        producer.session = session
        producer.slot = slot
        producer.generation = generation
        lib.ms_producer_attach(producer)
        self.control = control
        self.slot = slot
        self.generation = generation
        self.entry_limit: int = lib.ms_producer_entry_limit(producer)

    def front(self) -> tuple[int, int]:
        """Return the addresses of this producer and of its put functions, for pyengine._front; valid while this object lives."""
        return int(ffi.cast("uintptr_t", self._producer)), int(ffi.cast("uintptr_t", lib.ms_producer_calls()))

    @property
    def pointer(self) -> ms_producer:
        return self._producer

    @property
    def sequence(self) -> int:
        """Sequence number of the last submitted entry."""
        return self._producer.sequence

    def set_constants(self, born_host: bytes, store_host: bytes, sys_flag: int) -> None:
        """Set the hosts (4 or 16 address bytes and the port, as on disk) and the sysFlag of put()."""
        fill_hosts(self._producer.header, born_host, store_host)
        self._producer.header.sys_flag = sys_flag

    def set_timeouts(self, timeout_s: float, flush_timeout_s: float) -> None:
        """Set how long a put waits for the writer's answer, and then for durability."""
        self._producer.timeout_ns = int(timeout_s * 1e9)
        self._producer.flush_timeout_ns = int(flush_timeout_s * 1e9)

    def prefix(self, topic: bytes, properties: bytes, queue_id: int, flag: int) -> bytes:
        """Return the encoded beginning of entries with this topic, queue, flag and properties, for put() of any session."""
        header = ffi.new("struct ms_entry *", self._producer.header)
        header.queue_id, header.flag, header.topic_bytes, header.properties_bytes = queue_id, flag, len(topic), len(properties)
        return entry_bytes(header, topic, properties, b"")

    def watch(self, lock_descriptor: int, first_byte: int) -> None:
        """Detect, within about a second, that no process holds a worker's byte of the store's lock."""
        self._producer.lock_byte = first_byte
        self._producer.lock_fd = lock_descriptor

    @property
    def is_closed(self) -> bool:
        """Whether the session or its engine has ended, so that no submission would be answered."""
        return lib.ms_producer_is_closed(self._producer) != 0

    @property
    def engine_died(self) -> bool:
        """Whether a wait has detected that no process of the engine lives."""
        return self._producer.engine_died == lib.MS_ENGINE_DIED

    def end_as_replaced(self) -> None:
        """Close the session after another start has recovered the store: no submission will be answered any more."""
        self._producer.engine_died = lib.MS_ENGINE_REPLACED

    def submit(self, header: ms_entry, topic: bytes, properties: bytes, payload: bytes, deadline_ns: int) -> int:
        """Publish an entry without waiting for its answer; return 0 (`sequence` is its number), AGAIN, BUSY or CLOSED."""
        return lib.ms_producer_submit(self._producer, header, topic, properties, payload, len(payload), deadline_ns)

    def submit_raw(self, records: Buffer, physical_offset: int, deadline_ns: int) -> int:
        """Publish whole records of a master for `physical_offset`; only for a slave's replicator.

        All records in the buffer `records` are of one segment, and a blank is the last one. Return 0 (`sequence` is the
        entry's number), AGAIN, BUSY or CLOSED. ValueError if the records do not fit into the ring.
        """
        with memoryview(records) as view:
            if layout_bytes(b"", b"", view.nbytes) > self.entry_limit:
                raise ValueError(f"{view.nbytes:,} bytes do not fit into an entry of this session")
            header = new_header()
            header.kind = RAW
            header.payload_bytes = view.nbytes
            header.prepared_transaction_offset = physical_offset
            with ffi.from_buffer("uint8_t[]", view) as data:
                return lib.ms_producer_submit(self._producer, header, b"", b"", data, view.nbytes, deadline_ns)

    def wait_for_room_beside(self, deadline_ns: int) -> int:
        """Wait until the ring and the answers have room for submit_side(); return 0, AGAIN or CLOSED."""
        return lib.ms_producer_wait_for_room(self._producer, 2 * layout_bytes(b"", b"", 0), deadline_ns)

    def submit_side(self, header: ms_entry, deadline_ns: int) -> int:
        """Publish that the next entry is in its side object of header.payload_bytes; return 0, AGAIN, BUSY or CLOSED."""
        return lib.ms_producer_submit(self._producer, header, b"", b"", ffi.NULL, 0, deadline_ns)

    def take_answer(self, sequence: int, deadline_ns: int) -> tuple[int, tuple[Any, ...]]:
        """Wait for the answer to the one pending entry, and free its slot; return (0, answer), or AGAIN or CLOSED with ()."""
        answer = ffi.new("struct ms_completion *")
        code = lib.ms_producer_wait_acked(self._producer, sequence, deadline_ns, answer)
        if code:
            return code, ()
        lib.ms_producer_finish(self._producer, sequence)
        return 0, ANSWER.unpack(ffi.buffer(answer, ANSWER.size))

    def wait_flushed(self, end_offset: int, deadline_ns: int) -> int:
        """Wait until everything below `end_offset` is durable; return 0, AGAIN (not in time), FROZEN or CLOSED."""
        return lib.ms_producer_wait_persisted(self._producer, end_offset, DURABLE, deadline_ns, 0, deadline_ns)


class SendRounds:
    """Stores ordinary sends of RocketMQ clients in rounds, without a Python object for each (csrc/sends.cdef.h).

    One thread uses it. Before end() and the next round, the caller gives the sends of `rest()`, which were not answered, to futures.
    """

    ROUND_MAX: int = lib.MS_SENDS_MAX

    def __init__(self, store_host: bytes, store_host_flag: int, cluster: bytes, answer: Sequence[bytes], frame_bytes_max: int) -> None:
        """`answer`: the five pieces of an answer's header around message id, queue, queue offset and request number.
        UsageError if a part is too long for its buffer."""
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
        """Remove all topics: take() takes no send until enter_topic() is called again."""
        self._sends.topic_count = 0
        self.topics = []

    def enter_topic(self, name: str, queues: int) -> None:
        """Take sends to the queues of this topic from now on; a full table of topics is cleared first."""
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

    def take(self, session: ProducerSession, data: bytearray, at: int, born_host: bytes) -> int:
        """Submit the sends in the whole frames of `data` from `at` on; return the number of bytes taken."""
        with ffi.from_buffer("uint8_t[]", data) as view:
            return lib.ms_sends_take(self._sends, session.pointer, view + at, len(data) - at, born_host, len(born_host))

    @property
    def count(self) -> int:
        """The number of sends in the round."""
        return self._sends.count

    def answer(self, session: ProducerSession, deadline_ns: int) -> bytes:
        """Wait for the writer until `deadline_ns`; return the encoded answers to the sends that are stored by then."""
        lib.ms_sends_answer(self._sends, session.pointer, deadline_ns)
        return bytes(self._answers[:self._sends.answer_bytes])

    def end(self) -> None:
        """End the round: rest() is empty."""
        self._sends.answered = self._sends.count

    def rest(self) -> list[tuple[int, int, str, int, int]]:
        """Return (sequence, request number, topic, queue, frame size) of each send that answer() did not answer."""
        sends, taken = self._sends, self._sends.taken
        return [(taken[i].sequence, taken[i].opaque, self.topics[taken[i].topic], taken[i].queue_id, taken[i].frame_bytes)
                for i in range(sends.answered, sends.count)]


def fill_hosts(header: ms_entry, born_host: bytes, store_host: bytes) -> None:
    """Write both hosts, in their on-disk form, into an entry header."""
    ffi.memmove(header.born_host, born_host, len(born_host))
    ffi.memmove(header.store_host, store_host, len(store_host))


def new_header() -> ms_entry:
    """Return an empty entry header."""
    return ffi.new("struct ms_entry *")


def layout_bytes(topic: bytes, properties: bytes, payload_bytes: int) -> int:
    """Return the bytes that an entry takes in the ring or in a side object."""
    return lib.ms_entry_layout_bytes(len(topic), len(properties), payload_bytes)


def entry_bytes(header: ms_entry, topic: bytes, properties: bytes, payload: bytes) -> bytes:
    """Return an entry as a side object holds it; `header` has kind, sizes and the sequence."""
    image = ffi.new("uint8_t[]", layout_bytes(topic, properties, len(payload)))
    lib.ms_entry_fill(image, header, topic, properties, payload, len(payload))
    return bytes(ffi.buffer(image))
