"""Submission: put entries into the ring of a session, and wait for the answers.

It is called after the checks of outgoing.py, and pending_puts.py takes the answers that are not waited for here. A put waits here
for room in the ring and for a session; after the engine was replaced, the next put opens a new session. One native call submits a
put and waits for its answer for a short time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, cast

from pyengine import arguments
from pyengine._front import Lock, SessionFront, SubmitterFront
from pyengine.client.pending_puts import (
    LOST,
    POLL_INTERVAL_NS,
    PendingPuts,
    PutAnswer,
    PutCall,
    PutContext,
    PutFuture,
    PutOutcome,
    QueuedPuts,
    busy_refusal,
    outcome,
    refusal,
    unknown_outcome,
)
from pyengine.errors import EngineError
from pyengine.ipc.shared_objects import remove_object, side_name
from pyengine.ipc.store_lock import KIND_BYTE
from pyengine.native import control as control_native
from pyengine.native import session as native
from pyengine.native.flush import monotonic_ns
from pyengine.results import PutResult, PutStatus

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Future as LoopFuture

    from pyengine.ipc.session_client import ProducerSession

TIMEOUT_S_MAX = 1e6
_GRACE_S = 0.5  # from a put's own deadline to its caller's: time for the answers' thread to find out what was late
_ROOM_SLICE_NS = 10_000_000  # time for which a put that waits for room holds the lock
_ROOM_POLL_INTERVAL_S = 0.001
_REPLACED_MAX = 2  # number of replaced sessions after which a put gives up
_CLOSED = "the producer is closed: connect again"


@dataclass(slots=True)
class PutEntry:
    """The ring entry of one put, header and parts, and the context that is kept until its answer."""

    header: Any  # struct ms_entry_header, by cffi
    topic: bytes
    properties: bytes
    context: PutContext
    payload: bytes = b""
    rest: bytes = b""  # of put_many: the lengths of the bodies, then the bodies

    @property
    def size_bytes(self) -> int:
        """The bytes that it needs in the ring."""
        return native.layout_bytes(self.topic, self.properties, len(self.payload) + len(self.rest))


class Submitter(SubmitterFront):
    """Submits the entries of one producer. Threads may share it.

    `open_session(limit_s)` is called with None now, and later with the remaining seconds of a put. `constants` are the
    born host, store host and host flags that all entries share. `lock` and `_opening` are only locked by `with`: after any other
    call that locks, an exception of a signal handler may come before the block that unlocks.

    `front` is the session for csrc/front, None while there is none. `raises`: programs get PutError in place of results that are
    not PUT_OK.
    """

    __slots__ = ("_open_session", "_constants", "_opening", "session", "closed_ns", "native", "max_message_bytes",
                 "timeout_s", "_flush_timeout_s", "_slave_timeout_s", "_threads", "_queued", "root", "_finalizer", "__weakref__")

    def __init__(self, open_session: Callable[[float | None], ProducerSession], constants: tuple[bytes, bytes, int],
                 raises: bool) -> None:
        self._open_session = open_session
        self._constants = constants
        self.raises = raises
        self._opening = threading.Lock()  # locked before `lock`
        self.session: ProducerSession | None = None
        self.closed_ns = 0  # time of close(), on the monotonic clock; 0: open
        self._begin()
        self._attach(None)

    def _begin(self) -> None:
        """Begin without threads and without a session."""
        self._queued = QueuedPuts()
        self.queued_puts = self._queued.waiting
        self._threads: dict[str, PendingPuts | QueuedPuts | SessionFront] = {"queued": self._queued}
        self._finalizer = weakref.finalize(self, _end_threads, self._threads)
        self._finalizer.atexit = False  # daemon threads and exit handlers may put until the process ends, which the supervisor notices

    # ---- session ----------------------------------------------------------------

    def _attach(self, limit_s: float | None) -> None:
        """Open a session and use it from now on. The caller does not hold the lock, since this may take as long as the limit."""
        session = self._open_session(limit_s)
        identity = session.identity
        end = native.ProducerSession(session.control, session.session, session.slot, session.generation)
        end.set_constants(*self._constants)
        end.set_timeouts(identity.put_timeout_ms / 1000, identity.sync_flush_timeout_ms / 1000)
        if session.lock_descriptor >= 0:
            end.watch(session.lock_descriptor, KIND_BYTE)
        pending = PendingPuts(end, partial(_finish, identity.sync_flush_timeout_ms / 1000), session.close,
                              lambda: session.is_replaced)
        with self.lock:
            if self.closed_ns:
                pending.end()
                return
            owner = _FrontOwner(end, pending, self._store_host, identity.sync_flush_timeout_ms / 1000)
            front = SessionFront(*end.front(), end, owner, PutResult, self._store_host)
            self._threads["front"] = front  # before the thread that gets its futures
            self._threads["pending"] = pending
            self.root = session.root
            self.waits = ((native.DURABLE if identity.mode == control_native.MODE_SYNC else 0)
                           | (native.CONFIRMED if identity.role == control_native.SYNC_MASTER else 0))
            self.max_message_bytes = identity.max_message_bytes
            self.timeout_s = identity.put_timeout_ms / 1000
            self._flush_timeout_s = identity.sync_flush_timeout_ms / 1000
            self._slave_timeout_s = identity.slave_timeout_ms / 1000
            self.native = end
            self.payload_bytes_max = end.entry_limit - 65536  # the rest is for header, topic and properties
            self.body_bytes_max = min(self.max_message_bytes, self.payload_bytes_max)
            self.session = session
            self.front = front

    @property
    def _pending(self) -> PendingPuts:
        pending = self._threads["pending"]
        assert isinstance(pending, PendingPuts)
        return pending

    def _detach(self) -> None:
        """Stop using the session, which its answers' thread ends. The caller holds the lock."""
        if self.session is not None:
            if self.front is not None:
                self.front.end()  # if it raises, the session remains for the next try
            self.session = self.front = None
            self._pending.end()

    @property
    def why_unusable(self) -> str:
        """Return why this process cannot put any more; "" if it can."""
        return _CLOSED if self.closed_ns else ""

    def _open_if_missing(self, deadline_ns: int) -> str:
        """Open a session if there is none; return why that fails, "" if it does not. The caller does not hold the lock."""
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
        self.session = None
        if self.front is not None:
            self.front.forget()
            self.front = None
        self.native.pointer.finishing = 0  # a thread of the parent may have been in ms_producer_finish
        of_parent = self._threads
        self._pending.forked()
        self._queued.forked()
        self._finalizer.detach()
        self._begin()
        self._threads.update(front=of_parent["front"], pending=of_parent["pending"])  # until there is a session, in this order

    def close(self) -> None:
        """Wait for the answers of all puts, then close the session. A second call does nothing."""
        self.closed_ns = self.closed_ns or monotonic_ns()
        self._queued.end()
        self._queued.join()
        with self.lock:
            self._detach()
            self._pending.end()  # repeated, in case an exception interrupted an earlier call
        self._pending.join()

    # ---- put and wait -----------------------------------------------------------

    def give(self, result: PutOutcome) -> PutOutcome:
        """Return a put's result to the program; raise PutError instead where it is not PUT_OK, unless the program wants results."""
        return result.raise_for_status() if self.raises else result

    def put_and_wait(self, entry: PutEntry | PutOutcome, timeout_s: float | None) -> PutOutcome:
        """Submit a put and return its result: by one native call if that is short, else from the answers' thread.

        Of a put that was refused already the entry is its result.
        """
        if not isinstance(entry, PutEntry):
            return entry
        limit_s = self._limit_s(timeout_s)
        context, size_bytes = entry.context, entry.size_bytes
        context.submitted_ns = monotonic_ns()
        deadline_ns = context.submitted_ns + int(limit_s * 1e9)

        def attempt(session: native.ProducerSession) -> object:
            if size_bytes > session.entry_limit:
                if self._pending.is_current_thread:
                    return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                                   "a put this large cannot be made in a callback of put_async: make it in another thread")
                return self._submit_now(session, entry, deadline_ns, PutAnswer())
            code = session.put_entry(entry.header, entry.topic, entry.properties, entry.payload, entry.rest, context.waits,
                                     deadline_ns)
            return self.settle(code, context)

        return self.wait(self._until_submitted(attempt, context, deadline_ns, limit_s), context, deadline_ns, limit_s)

    def settle(self, code: int, context: PutContext) -> object:
        """Return what a native call came to: a result, an object to wait() for, or None if nothing was submitted.

        After None the put may be tried again. The caller holds the lock.
        """
        session = self.native
        if code == native.UNFINISHED:
            claim = session.claim()
            if self._pending.is_current_thread:  # this thread would wait for itself forever
                return partial(self._pending.result_here, claim, context)
            return self._pending.add(claim, context, PutAnswer())
        if session.stage == native.NOT_SUBMITTED and code in (native.CLOSED, native.AGAIN):
            return None
        return outcome(session, code, session.stage, session.answer(), context, self._flush_timeout_s)

    def wait(self, found: object, context: PutContext, deadline_ns: int, limit_s: float) -> PutOutcome:
        """Wait for a result that settle() did not have: of a PutAnswer, or of a function that is called with the deadline."""
        if isinstance(found, partial):
            result = found(deadline_ns)
            return unknown_outcome(context, _not_answered(limit_s)) if result is None else result
        if not isinstance(found, PutAnswer):
            return cast(PutOutcome, found)
        for timeout_s in ((deadline_ns - monotonic_ns()) / 1e9, max(self._flush_timeout_s, self._slave_timeout_s) + _GRACE_S):
            with contextlib.suppress(Empty):
                return cast(PutOutcome, found.result(timeout_s))
            if not found.is_answered:
                break
        return unknown_outcome(context, _not_answered(limit_s))

    # ---- called by csrc/front, which handles the common case in C -----------------

    @property
    def _store_host(self) -> bytes:
        return self._constants[1]

    def settle_put(self, code: int, topic: str, queue_id: int, waits: int) -> object:
        """Like settle(), for a put in C that did not end with PUT_OK: give() its result, or None, or the argument of wait_settled().

        The caller holds the lock.
        """
        return self._settle_fast(code, native.PUT, topic, queue_id, waits)

    def settle_many(self, code: int, topic: str, queue_id: int, waits: int) -> object:
        """Like settle_put(), for put_many, and for PUT_OK too."""
        return self._settle_fast(code, native.MANY, topic, queue_id, waits)

    def _settle_fast(self, code: int, kind: int, topic: str, queue_id: int, waits: int) -> object:
        context = PutContext(kind, topic, queue_id, self._store_host, waits, submitted_ns=self.native.submitted_ns)
        found = self.settle(code, context)
        if found is None:
            return None
        return (found, context) if isinstance(found, PutAnswer | partial) else self.give(cast(PutOutcome, found))

    def wait_settled(self, settled: tuple[object, PutContext]) -> PutOutcome:
        """Wait for the result and give() it. The caller does not hold the lock."""
        found, context = settled
        return self.give(self.wait(found, context, monotonic_ns() + int(self.timeout_s * 1e9), self.timeout_s))

    def no_room(self, topic: str, queue_id: int) -> PutFuture[Any]:
        """Return the future of a put_async in C that found no room in the ring in time."""
        context = PutContext(native.PUT, topic, queue_id, self._store_host, 0)
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
        future = PutFuture.__new__(PutFuture)  # it becomes an ordinary Future only where another thread resolves it
        future._raises = self.raises
        found = self._submit(entry, timeout_s, future)
        return future if found is future else self._resolved(cast(PutOutcome, found))

    def _resolved(self, result: PutOutcome) -> PutFuture[Any]:
        future = PutFuture[Any]()
        future._raises = self.raises
        future.set_result(result)
        return future

    def submit_then(self, entry: PutEntry | PutOutcome, then: Callable[[Any], None]) -> None:
        """Submit a put without a Future, which is expensive to make; `then` is called with the result.

        In an event loop collect() calls it. The answers' thread calls it elsewhere, when collect() has given up, and when the
        put waits for a sync; for a refused put it is called now.
        """
        if not isinstance(entry, PutEntry):
            then(entry)
            return
        call = PutCall(then)
        found = self._submit(entry, None, call)
        if found is not call:
            call.set_result(found)

    def collect(self, timeout_ns: int) -> None:
        """Take the results of submit_then() that arrive within the time; the answers' thread takes the others."""
        pending = self._threads.get("pending")
        if isinstance(pending, PendingPuts):
            pending.collect(monotonic_ns() + timeout_ns)

    def take_sends(self, sends: native.Sends, data: bytearray, at: int, born_host: bytes, store_host: bytes,
                   rest: Callable[[int, int, int], Callable[[Any], None]]) -> int:
        """Submit the plain sends with which `data` begins at `at`, without waiting; the caller must call answer_sends() next.

        Returns the bytes that were taken: 0 if other puts must be submitted first, or if answers wait for disk or slaves.
        """
        if self._queued.waiting or self._opening.locked() or self.lock.locked():
            return 0

        def pending_send(number: int, topic: str, queue_id: int, frame_bytes: int) -> tuple[PutContext, Callable[[Any], None]]:
            return PutContext(native.PUT, topic, queue_id, store_host, 0), rest(number, queue_id, frame_bytes)

        with self.lock:
            if self.session is None or self.closed_ns or self.waits:
                return 0
            return self._pending.take_sends(sends, data, at, born_host, pending_send)

    def answer_sends(self, timeout_ns: int) -> bytes:
        """Return the frames for the clients whose sends are answered within the time; see take_sends()."""
        return self._pending.answer_sends(monotonic_ns() + timeout_ns)

    def _submit(self, entry: PutEntry, timeout_s: float | None, future: PutFuture[Any] | PutCall) -> object:
        """Submit a put; return `future`, or the result if it was not submitted."""
        limit_s = self._limit_s(timeout_s)
        entry.context.submitted_ns = monotonic_ns()
        deadline_ns = entry.context.submitted_ns + int(limit_s * 1e9)

        def attempt(session: native.ProducerSession) -> object:
            return self._submit_now(session, entry, deadline_ns, future)

        def submit() -> object:
            return self._until_submitted(attempt, entry.context, deadline_ns, limit_s)

        if not (arguments.running_loop() or self._pending.is_current_thread):
            found = submit()
        elif self._queued.waiting or self._opening.locked() or self.lock.locked():
            return self._queue(submit, future, entry.context)
        else:
            found = None
            with self.lock:
                if self.session is not None and not self.closed_ns:
                    found = self._submit_now(self.native, entry, 0, future, is_collected=True)
            if found is None:
                return self._queue(submit, future, entry.context)
        return found

    def _queue(self, submit: Callable[[], object], future: PutFuture[Any] | PutCall, context: PutContext) -> object:
        if isinstance(future, PutFuture):
            future._begin()
        return self._queued.add(submit, future, context)

    def _until_submitted(self, attempt: Callable[[native.ProducerSession], object], context: PutContext, deadline_ns: int,
                         limit_s: float) -> object:
        """Call `attempt` under the lock until it does not return None (the ring is full, or the session has ended).

        Returns a refusal when the deadline has passed, no session can be opened, or the producer is closed.
        """
        replaced = 0
        while True:
            reason = self._open_if_missing(deadline_ns)
            if reason:
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, reason)
            with self.lock:
                if self.session is None:
                    continue
                session = self.native
                found = attempt(session)
                if found is not None:
                    return found
                if self.front is not None:
                    self.front.take_answers()  # of futures without a result() call, whose entries occupy the ring
                if session.is_closed:
                    self._detach()
                    replaced += 1
            if replaced == _REPLACED_MAX:
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, "the engine was replaced twice: put again")
            if monotonic_ns() >= min(deadline_ns, self.closed_ns + POLL_INTERVAL_NS if self.closed_ns else deadline_ns):
                return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE, _no_room(limit_s))
            if session is self.native and self.session is not None:
                time.sleep(_ROOM_POLL_INTERVAL_S)

    def _submit_now(self, session: native.ProducerSession, entry: PutEntry, deadline_ns: int,
                    answer: PutFuture[Any] | PutAnswer | PutCall, *, is_collected: bool = False) -> object:
        """Submit an entry: return `answer`, which the answers' thread resolves; a refusal; or None if the ring is full.

        The caller holds the lock. `is_collected`: collect() will be called; False when another thread submits the entry later.
        """
        context = entry.context
        deadline_ns = min(deadline_ns, monotonic_ns() + _ROOM_SLICE_NS)
        if entry.size_bytes <= session.entry_limit:
            code = session.submit(entry.header, entry.topic, entry.properties, entry.payload, entry.rest, deadline_ns)
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
            return None
        if isinstance(answer, PutFuture) and not answer._is_begun:
            if context.is_plain and context.store_host == self._store_host and self.front is not None:
                self.front.assign(answer, context.topic, context.queue_id, context.waits, entry.header.submitted_ns)
                return answer
            answer._begin()
        if is_collected and isinstance(answer, PutCall) and not context.waits:
            self._pending.add_open(session.claim(), context, answer.set_result)
            return answer
        return self._pending.add(session.claim(), context, answer)

    def _write_side(self, entry: PutEntry) -> Path:
        """Write an entry that is larger than half the ring to a file of its own, a side object, which the writer reads."""
        sequence = entry.header.sequence = self.native.sequence + 1
        image = native.entry_bytes(entry.header, entry.topic, entry.properties, entry.payload, entry.rest)
        session = self.session
        assert session is not None
        path = session.folder.path / side_name(
            session.identity.epoch, self.native.slot, self.native.generation, sequence)
        remove_object(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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


class _FrontOwner:
    """The Python functions that a SessionFront calls. It has no reference to the producer, so that a future does not keep that alive."""

    def __init__(self, session: native.ProducerSession, pending: PendingPuts, store_host: bytes, flush_timeout_s: float) -> None:
        self._session = session
        self._pending = pending
        self._store_host = store_host
        self._flush_timeout_s = flush_timeout_s

    def outcome(self, code: int, answer: tuple[int, ...], topic: str, queue_id: int, waits: int) -> PutOutcome:
        """Return the result of an answer that is not a plain PUT_OK."""
        context = PutContext(native.PUT, topic, queue_id, self._store_host, waits)
        return outcome(self._session, code, native.ANSWERED, answer, context, self._flush_timeout_s)

    def hand_over(self, future: PutFuture[Any], sequence: int, answer: tuple[int, ...] | None, topic: str, queue_id: int, waits: int,
                  submitted_ns: int) -> tuple[Callable[[tuple[Any, ...]], None], tuple[Any, ...], dict[str, object]]:
        """Prepare that the answers' thread resolves the future, with the writer's answer if it is there; see to_hand_over()."""
        context = PutContext(native.PUT, topic, queue_id, self._store_host, waits, submitted_ns=submitted_ns)
        return self._pending.to_hand_over(sequence, context, future, answer)

    def waiter(self, future: PutFuture[Any], loop: AbstractEventLoop) -> LoopFuture[None]:
        """Return a future of the running loop that is done when `future` is; see PendingPuts.waiter()."""
        return self._pending.waiter(future, loop)

    def lost(self, topic: str, queue_id: int) -> PutOutcome:
        """Return the result of a put of the parent's session, which this forked child does not have."""
        context = PutContext(native.PUT, topic, queue_id, self._store_host, 0)
        return unknown_outcome(context, LOST)


def _end_threads(threads: dict[str, PendingPuts | QueuedPuts | SessionFront]) -> None:
    """End the threads and the session of a producer that was dropped, without waiting."""
    for thread in threads.values():
        thread.end()


def _finish(flush_timeout_s: float, session: native.ProducerSession, code: int, answer: tuple[int, ...], context: PutContext,
            give_up_ns: int) -> PutOutcome:
    """Return the result of one pending put; runs in the answers' thread."""
    if context.side is not None:
        remove_object(context.side)
    if code:
        return outcome(session, code, native.SUBMITTED, answer, context, flush_timeout_s)
    if context.waits and answer[5] == 0:
        flush_ns, slave_ns = session.deadlines_ns(context.submitted_ns, answer[4])
        give_up_ns = give_up_ns or max(flush_ns, slave_ns)
        code = session.wait_persisted(answer[2], context.waits, min(flush_ns, give_up_ns), min(slave_ns, give_up_ns))
    return outcome(session, code, native.ANSWERED, answer, context, flush_timeout_s)


def _no_room(limit_s: float) -> str:
    return f"the writer made no room in {limit_s:g} s; nothing was submitted (`pyengine status` tells how it is)"


def _not_answered(limit_s: float) -> str:
    return f"submitted, but not answered within {limit_s:g} s: it may or may not be stored"
