"""Submission: put entries into the ring of a session.

It is called after the checks of outgoing.py. A put waits here for room in the ring and for a session; after the engine was
replaced, the next put opens a new session. Whoever made the put takes the answer from its future (pending_puts.py).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pyengine import arguments
from pyengine._front import Lock, SubmitterFront
from pyengine.client.outgoing import RefusedError
from pyengine.client.pending_puts import (
    NO_THREAD,
    POLL_INTERVAL_NS,
    PendingPuts,
    PutContext,
    PutFuture,
    PutOutcome,
    QueuedPuts,
    busy_refusal,
    refusal,
)
from pyengine.engine_config import EngineConfig
from pyengine.errors import EngineError
from pyengine.formats import constants
from pyengine.formats.record import HOST_V6_BYTES, encode_host
from pyengine.ipc.session_client import OpenSession
from pyengine.ipc.shared_objects import remove_object, side_name
from pyengine.ipc.store_lock import KIND_BYTE
from pyengine.native import control as control_native
from pyengine.native import session as native
from pyengine.native.flush import monotonic_ns
from pyengine.results import PutStatus
from pyengine.storage.durable_writes import open_given

TIMEOUT_S_MAX = 1e6
BORN_HOST = encode_host("127.0.0.1:0")
_ROOM_SLICE_NS = 10_000_000  # time for which a put that waits for room holds the lock
_ROOM_POLL_INTERVAL_S = 0.001
_CLOSED = "this producer is closed: make another one with pyengine.connect()"


@dataclass(slots=True)
class PutEntry:
    """The ring entry of one put, header and parts, and the context that is kept until its answer.

    It is for the engine of one session: `again` makes it for that of another one, or raises RefusedError.
    """

    header: Any  # struct ms_entry_header, by cffi
    topic: bytes
    properties: bytes
    context: PutContext
    payload: bytes = b""
    sessions: int = 0
    again: Callable[[], PutEntry] | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes that it needs in the ring."""
        return native.layout_bytes(self.topic, self.properties, len(self.payload))


class Submitter(SubmitterFront):
    """Submits the entries of one producer. Threads may share it.

    `open_session(limit_s)` is called with None now, and later with the remaining seconds of a put. `config` counts for a session
    without `settings`. `lock` and `_opening` are only locked by `with`: after any other call that locks, an exception of a signal
    handler may come before the block that unlocks.

    `front` is the session for csrc/front, None while there is none. `raises`: programs get PutError in place of results that are
    not PUT_OK.
    """

    __slots__ = ("_open_session", "_config", "_opening", "session", "closed_ns", "native", "max_message_bytes", "segment_bytes",
                 "timeout_s", "settings", "store_host", "_threads", "_queued", "_pending", "root", "_finalizer", "__weakref__")

    def __init__(self, open_session: Callable[[float | None], OpenSession], config: EngineConfig, raises: bool) -> None:
        self._open_session = open_session
        self._config = config
        self.raises = raises
        self._opening = threading.Lock()  # locked before `lock`
        self.session: OpenSession | None = None
        self.closed_ns = 0  # time of close(), on the monotonic clock; 0: open
        self._begin()
        self._attach(None)

    def _begin(self) -> None:
        """Begin without threads and without a session."""
        self._queued = QueuedPuts()
        self.queued_puts = self._queued.waiting
        self._threads: list[PendingPuts | QueuedPuts] = [self._queued]
        self._finalizer = weakref.finalize(self, _end_threads, self._threads)
        self._finalizer.atexit = False  # daemon threads and exit handlers may put until the process ends, which the supervisor notices

    # ---- session ----------------------------------------------------------------

    def _attach(self, limit_s: float | None) -> None:
        """Open a session and use it from now on. The caller does not hold the lock, since this may take as long as the limit."""
        session = self._open_session(limit_s)
        identity, settings = session.identity, session.settings or self._config
        store_host = encode_host(settings.store_host)
        end = native.ProducerSession(session.control, session.session, session.slot, session.generation)
        end.set_constants(BORN_HOST, store_host, host_flags(BORN_HOST, store_host))
        end.set_timeouts(identity.put_timeout_ms / 1000, identity.sync_flush_timeout_ms / 1000)
        if session.lock_descriptor >= 0:
            end.watch(session.lock_descriptor, KIND_BYTE)
        pending = PendingPuts(end, store_host, identity.sync_flush_timeout_ms / 1000, session.close, lambda: session.is_replaced)
        with self.lock:
            if self.closed_ns:
                pending.end()
                return
            self._pending = pending
            self._threads[1:] = [pending]
            self.root = session.root
            self.waits = ((native.DURABLE if identity.mode == control_native.MODE_SYNC else 0)
                           | (native.CONFIRMED if identity.role == control_native.SYNC_MASTER else 0))
            self.max_message_bytes, self.segment_bytes = identity.max_message_bytes, identity.segment_bytes
            self.timeout_s = identity.put_timeout_ms / 1000
            self.settings, self.store_host = settings, store_host
            self.native = end
            self.payload_bytes_max = end.entry_limit - 65536  # the rest is for header, topic and properties
            self.body_bytes_max = min(self.max_message_bytes, self.payload_bytes_max, self.segment_bytes // 2)  # of a body that surely fits
            self.session = session
            self.sessions += 1
            self.front = pending.front

    def _detach(self) -> None:
        """Stop using the session, which its answers' thread ends. The caller holds the lock."""
        if self.session is not None:
            self.session = self.front = None
            self._pending.end()

    @property
    def why_unusable(self) -> str:
        """Return why this process cannot put any more; "" if it can."""
        return _CLOSED if self.closed_ns else ""

    def _open_if_missing(self, deadline_ns: int) -> str:
        """Open a session if there is none with a living engine; return why that fails, "" if it does not.

        The caller does not hold the lock.
        """
        if self.session is not None:  # not within close(), which has the lock while callbacks put
            with self.lock:
                if self.session is not None and self.native.is_closed:
                    self._detach()
        if self.session is not None:
            return ""
        if self.closed_ns:
            return _CLOSED
        while self._opening.locked():
            if monotonic_ns() >= deadline_ns:
                return "another thread's put still opens a session with the engine; nothing was submitted"
            time.sleep(_ROOM_POLL_INTERVAL_S)
        with self._opening:
            if self.session is None and not self.closed_ns:
                try:
                    self._attach(max(0.0, (deadline_ns - monotonic_ns()) / 1e9))
                except EngineError as error:
                    return str(error)
        return ""

    def forked(self) -> None:
        """In a forked child: drop the session, which is the parent's, since a ring has one producer. The next put opens another."""
        self.lock = Lock()
        self._opening = threading.Lock()
        self.session = self.front = None
        self.native.pointer.finishing = 0  # a thread of the parent may have been in ms_producer_finish
        self._pending.forked()
        self._queued.forked()
        self._finalizer.detach()
        self._begin()
        self._threads.append(self._pending)  # until there is a session

    def close(self) -> None:
        """Wait for the answers of all puts, then close the session. A second call does nothing."""
        self.closed_ns = self.closed_ns or monotonic_ns()
        self._queued.end()
        self._queued.join()
        with self.lock:
            self._detach()
            self._pending.end()  # repeated, in case an exception interrupted an earlier call
        self._pending.join()

    def open_until(self, timeout_s: float | None) -> str:
        """Open a session if there is none with a living engine; return why that fails within a put's time, "" if it does not."""
        return self._open_if_missing(monotonic_ns() + int(self._limit_s(timeout_s) * 1e9))

    # ---- put and wait -----------------------------------------------------------

    def give(self, result: PutOutcome) -> PutOutcome:
        """Return a put's result to the program; raise PutError instead where it is not PUT_OK, unless the program wants results."""
        return result.raise_for_status() if self.raises else result

    def put_and_wait(self, entry: PutEntry | PutOutcome, timeout_s: float | None) -> PutOutcome:
        """Submit a put and return its result. Of a put that was refused already the entry is its result."""
        if not isinstance(entry, PutEntry):
            return entry
        future: PutFuture[Any] = PutFuture()
        limit_s = self._limit_s(timeout_s)
        deadline_ns = monotonic_ns() + int(limit_s * 1e9)
        found = self._until_submitted(entry, future, deadline_ns, limit_s)
        return future._await(deadline_ns) if found is True else cast(PutOutcome, found)

    # ---- called by csrc/front, which handles the common case in C -----------------

    def no_room(self, topic: str, queue_id: int) -> PutFuture[Any]:
        """Return the future of a put_async in C that found no room in the ring in time."""
        context = PutContext(native.PUT, topic, queue_id, self.store_host, 0)
        return self._resolved(refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, _no_room(self.timeout_s)))

    def may_wait(self) -> bool:
        """Whether put_async may wait for room: it may not in an event loop or in a callback of a future."""
        return not (arguments.running_loop() or self._pending.is_current_thread)

    def _limit_s(self, timeout_s: float | None) -> float:
        return min(self.timeout_s if timeout_s is None else arguments.number(timeout_s, "timeout_s"), TIMEOUT_S_MAX)

    # ---- submit -----------------------------------------------------------------

    def submit(self, entry: PutEntry | PutOutcome, timeout_s: float | None) -> PutFuture[Any]:
        """Submit a put and return its future; it waits for room and for a session. A refused put has its result at once.

        It never waits in an event loop or in a callback of a future: a put that cannot be submitted at once is submitted
        later there, by another thread.
        """
        if not isinstance(entry, PutEntry):
            return self._resolved(entry)
        future: PutFuture[Any] = PutFuture()
        future._raises = self.raises
        limit_s = self._limit_s(timeout_s)
        deadline_ns = monotonic_ns() + int(limit_s * 1e9)

        def submit() -> PutOutcome | bool:
            return self._until_submitted(entry, future, deadline_ns, limit_s)

        found: PutOutcome | bool = False
        if self.may_wait():
            found = submit()
        elif not (self._queued.waiting or self._opening.locked() or self.lock.locked()):
            with self.lock:
                found = self._is_current(entry) and not self.closed_ns and self._submit_now(entry, future, 0)
        if found is False:
            if self._pending.start() and self._queued.start():
                return self._queued.add(submit, future, entry.context)
            found = refusal(entry.context, PutStatus.SERVICE_NOT_AVAILABLE, f"it has to wait, but {NO_THREAD}; nothing was submitted")
        if found is not True:
            future.set_result(found)
        return future

    def _resolved(self, result: PutOutcome) -> PutFuture[Any]:
        future = PutFuture[Any]()
        future._raises = self.raises
        future.set_result(result)
        return future

    def serve_sends(self, sends: native.SendRounds, data: bytearray, at: int, born_host: bytes, timeout_ns: int,
                    ) -> tuple[int, bytes, list[tuple[PutFuture[Any], int, int, int]]]:
        """Store the plain sends of RocketMQ's protocol (csrc/sends.cdef.h) with which `data` begins at `at`; for an event loop.

        Return their bytes, the frames that answer those which are stored within the time, and (future, request number, queue id,
        frame size) of each of the others. If puts of this session wait for the disk or for slaves, it takes none.
        """
        if self._queued.waiting or self._opening.locked() or self.lock.locked():
            return 0, b"", []
        with self.lock:
            if self.session is None or self.closed_ns or self.waits:
                return 0, b"", []
            self._futures_of(sends)  # of a call that an exception interrupted
            taken = sends.take(self.native, data, at, born_host)
            answers = sends.answer(self.native, monotonic_ns() + timeout_ns) if taken else b""
            return taken, answers, self._futures_of(sends)

    def _futures_of(self, sends: native.SendRounds) -> list[tuple[PutFuture[Any], int, int, int]]:
        """Return (future, request number, queue, frame size) of each send without an answer, and forget it. The caller holds the lock."""
        found: list[tuple[PutFuture[Any], int, int, int]] = []
        for sequence, number, topic, queue_id, frame_bytes in sends.rest():
            future: PutFuture[Any] = PutFuture()
            context = PutContext(native.PUT, topic, queue_id, sends.store_host, 0)
            assert self.front is not None
            self.front.assign(future, sequence, native.PUT, topic, queue_id, 0, monotonic_ns(), context)
            found.append((future, number, queue_id, frame_bytes))
        sends.end()
        return found

    def _until_submitted(self, entry: PutEntry, future: PutFuture[Any], deadline_ns: int, limit_s: float) -> PutOutcome | bool:
        """Submit an entry and return True, also if that waits for room (the ring is full) or for a session.

        Returns a refusal when the deadline has passed, no session can be opened, or the producer is closed.
        """
        context = entry.context
        while True:
            reason = self._open_if_missing(deadline_ns)
            if reason:
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, reason)
            try:
                entry = entry if self._is_current(entry) or entry.again is None else entry.again()
            except RefusedError as refused:
                return refusal(context, refused.status, refused.reason)
            with self.lock:
                if not self._is_current(entry):
                    continue
                session = self.native
                found = self._submit_now(entry, future, deadline_ns)
                if found is not False:
                    return found
                if self.front is not None:
                    self.front.take_answers()  # of futures without a result() call, whose entries occupy the ring
            if monotonic_ns() >= min(deadline_ns, self.closed_ns + POLL_INTERVAL_NS if self.closed_ns else deadline_ns):
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, _no_room(limit_s))
            if session is self.native and self.session is not None:
                time.sleep(_ROOM_POLL_INTERVAL_S)

    def _is_current(self, entry: PutEntry) -> bool:
        return self.session is not None and entry.sessions == self.sessions

    def is_in(self, sessions: int) -> bool:
        """Whether the session of this number is still that of a living engine."""
        return self.session is not None and sessions == self.sessions and not self.native.is_closed

    def _submit_now(self, entry: PutEntry, future: PutFuture[Any], deadline_ns: int) -> PutOutcome | bool:
        """Submit an entry, which is `future`'s from then on: return True; a refusal; or False, and it may be tried again.

        The caller holds the lock.
        """
        session, context = self.native, entry.context
        deadline_ns = min(deadline_ns, monotonic_ns() + _ROOM_SLICE_NS)
        if entry.size_bytes <= session.entry_limit:
            code = session.submit(entry.header, entry.topic, entry.properties, entry.payload, deadline_ns)
        else:
            code = session.wait_for_room_beside(deadline_ns)
            if code == 0:
                try:
                    side = self._write_side(entry)
                except OSError as error:
                    return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                                   f"no room for the side object of a large put: {error.strerror}")
                small = native.new_header()
                small.kind = native.SIDE
                small.payload_bytes = entry.size_bytes
                small.count = entry.header.count
                code = session.submit_side(small, deadline_ns)
                if code:
                    remove_object(side)
                else:
                    context.side = side
        if code == native.BUSY:
            return busy_refusal(context, session)
        if code:
            return False
        is_plain = not context.sizes and context.side is None and context.store_host == self.store_host
        front = self._pending.front
        assert front is not None
        front.assign(future, session.sequence, context.kind, context.topic, context.queue_id, context.waits, monotonic_ns(),
                     None if is_plain else context)
        if future._is_watched or context.side is not None:
            self._pending.ask(future)
        return True

    def _write_side(self, entry: PutEntry) -> Path:
        """Write an entry that is larger than half the ring to a file of its own, a side object, which the writer reads."""
        sequence = entry.header.sequence = self.native.sequence + 1
        image = native.entry_bytes(entry.header, entry.topic, entry.properties, entry.payload)
        session = self.session
        assert session is not None
        path = session.folder.path / side_name(
            session.identity.epoch, self.native.slot, self.native.generation, sequence)
        remove_object(path)
        descriptor = open_given(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, len(image))
            with open(descriptor, "wb", closefd=False) as file:
                file.write(image)
        except BaseException:
            remove_object(path)
            raise
        finally:
            os.close(descriptor)
        return path


def _end_threads(threads: list[PendingPuts | QueuedPuts]) -> None:
    """End the threads and the session of a producer that was dropped, without waiting."""
    for thread in threads:
        thread.end()


def host_flags(born_host: bytes, store_host: bytes) -> int:
    """Return the flags of a record that say which of its hosts are of IPv6."""
    flags = constants.SYS_FLAG_BORN_HOST_V6 if len(born_host) == HOST_V6_BYTES else 0
    return flags | (constants.SYS_FLAG_STORE_HOST_V6 if len(store_host) == HOST_V6_BYTES else 0)


def _no_room(limit_s: float) -> str:
    return f"the writer made no room in {limit_s:g} s; nothing was submitted (`pyengine status` tells how it is)"

