"""Pending puts: the threads that take the answers of puts whose callers do not wait in one native call.

A producer has at most two threads, started when they are first needed. `PendingPuts` takes
the answers of one session in the order of submission and resolves their Futures. A put
whose caller's timeout has passed stays pending: its Future is resolved when the engine answers
later, or when the session ends. An event loop is woken once for all awaited puts that are over by
then. `QueuedPuts` submits puts for which the ring was full where the caller must not wait: in an
event loop, in a callback.

A signal handler runs in the main thread between any two instructions, and an exception in it must
not break a producer. So the main thread waits and passes objects on by SimpleQueue, which is one call
in C; threading.Condition can stay locked forever if an exception interrupts its __enter__.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pyengine import arguments
from pyengine._front import PendingPut, use_futures
from pyengine.native import control as control_native
from pyengine.native import session as native
from pyengine.native.flush import monotonic_ns
from pyengine.native.session import AGAIN, Claim, ProducerSession, Sends
from pyengine.native.writer import REFUSALS
from pyengine.results import PutError, PutManyResult, PutResult, PutStatus

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Future as LoopFuture

POLL_INTERVAL_NS = 250_000_000
_SLICE_NS = 50_000_000
LOST = "submitted by the parent of this process: it may or may not be stored"
_inherited: list[object] = []  # of the parents of a forked child
_AWAIT_LOOKS = 3  # rounds of the event loop in which an awaited put looks for its answer, before a thread waits for it
PutOutcome: TypeAlias = PutResult | PutManyResult
Result = TypeVar("Result", bound=PutOutcome)


class PutFuture(PendingPut, Future[Result]):
    """A concurrent.futures.Future that can also be awaited: `result(timeout)`, `add_done_callback(f)`, `await`."""

    # Until it becomes an ordinary Future its code is csrc/front/pending.c.

    def __init__(self) -> None:
        Future.__init__(self)

    @property
    def _is_begun(self) -> bool:
        """Whether it is an ordinary Future already."""
        return "_condition" in self.__dict__

    def _begin(self) -> None:
        """Become an ordinary Future, which another thread resolves, before the program has it."""
        Future.__init__(self)
        self.set_running_or_notify_cancel()

    @property
    def is_answered(self) -> bool:
        """Whether the writer has answered; the put may still wait for the disk or for slaves."""
        return self._has_answer or self.__dict__.get("_answered", False)

    @is_answered.setter
    def is_answered(self, answered: bool) -> None:
        self.__dict__["_answered"] = answered

    if TYPE_CHECKING:
        def add_done_callback(self, fn: Callable[[PutFuture[Result]], object]) -> None:
            """Call `fn` with this future once the result is there, in the thread of answers."""

    def __getattr__(self, name: str) -> object:
        if name in _FUTURE_FIELDS:
            self._become_future()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"a PutFuture has no attribute {name!r}")

    def set_result(self, result: Result) -> None:
        """End with this result, or with its PutError."""
        if self._raises and not result.ok:
            self.set_exception(PutError._of(result))
        else:
            super().set_result(result)

    _error = staticmethod(PutError._of)

    @staticmethod
    def _settled(found: object) -> dict[str, object]:
        """Return the fields of a Future that has this result or error."""
        future: Future[object] = Future()
        if isinstance(found, PutError):
            future.set_exception(found)
        else:
            future.set_result(found)
        return vars(future) | {"_answered": True}

    def _lose(self, result: PutOutcome) -> None:
        """End with this result in a forked child: without callbacks, and without a lock that a thread of the parent may have."""
        fields = vars(self)
        if self.__dict__.get("_state") == "FINISHED":
            fields["_condition"] = threading.Condition()
        else:
            fields.update(self._settled(PutError._of(result) if self._raises and not result.ok else result))

    def __await__(self) -> Generator[Any, None, Result]:
        loop = arguments.event_loop()
        looks = _AWAIT_LOOKS
        while not self.done():
            if looks and not self.is_answered:
                looks -= 1
                yield  # one round of the loop, in which its other tasks put: about as long as an answer takes
                continue
            owner = self._owner
            if owner is None:  # a full Future, which tells of its result itself
                import asyncio  # here, since it takes 10 ms, and only a program that awaits needs it

                yield from asyncio.wrap_future(self, loop=loop)
            else:
                yield from owner.waiter(self, loop)
            break
        return self.result()


_FUTURE_FIELDS = frozenset(vars(Future()))
use_futures(PutFuture, Future)


class _LoopWaits:
    """The puts of one session that tasks of one event loop await: one wake-up of the loop for all that are over by then.

    All methods but wake() run in the loop's thread. `ask(self, future)` lets the answers' thread call wake() when
    this future is over, or nothing of the session will tell that it is.
    """

    def __init__(self, loop: AbstractEventLoop, ask: Callable[[_LoopWaits, PutFuture[Any]], None],
                 forget: Callable[[AbstractEventLoop], object]) -> None:
        self._loop = loop
        self._ask = ask
        self._forget = forget
        self._open: deque[tuple[PutFuture[Any], LoopFuture[None]]] = deque()  # in the order of submission

    def waiter(self, future: PutFuture[Any]) -> LoopFuture[None]:
        """Return a future of the loop that is done when `future` is."""
        waiter: LoopFuture[None] = self._loop.create_future()
        self._open.append((future, waiter))
        if len(self._open) == 1:
            self._ask(self, future)
        return waiter

    def wake(self) -> None:
        """Wake the loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # it is closed, and no task of it runs any more
            self._forget(self._loop)

    def _take(self) -> None:
        while self._open:
            future, waiter = self._open[0]
            if not (waiter.done() or future.done()):
                if future._owner is not None:
                    self._ask(self, future)
                    return
                future.add_done_callback(partial(self._tell, waiter))  # a full Future by now
            elif not waiter.done():
                waiter.set_result(None)
            self._open.popleft()
        self._forget(self._loop)

    def _tell(self, waiter: LoopFuture[None], _: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: LoopFuture[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class PutAnswer(SimpleQueue[object]):
    """In place of a Future, for a caller that waits at once."""

    is_answered = False  # the writer has answered, but the record may not be durable yet

    def set_result(self, result: object) -> None:
        self.put(result)

    set_exception = set_result

    def result(self, timeout_s: float) -> object:
        """Return the result; queue.Empty after the timeout."""
        found = self.get(timeout=max(0.0, timeout_s))
        if isinstance(found, BaseException):
            raise found
        return found


class PutCall:
    """In place of a Future, for a caller that wants one short call `then(result)` in the answers' thread."""

    __slots__ = ("is_answered", "set_result")

    def __init__(self, then: Callable[[Any], None]) -> None:
        self.is_answered = False
        self.set_result = then

    def set_exception(self, error: BaseException) -> None:
        """Pass an unexpected exception on as the result."""
        self.set_result(PutResult(PutStatus.UNKNOWN_ERROR, reason=repr(error), indeterminate=True))


class _OrderedThread:
    """Entries that one thread handles in order, until end(). A program may end without waiting for the thread."""

    _handle: Callable[..., None]  # of a subclass: handles the fields of one entry

    def __init__(self) -> None:
        self._entries: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._running = threading.Lock()  # held while entries are handled in order, by the thread or by end()
        self._starting = threading.Lock()
        self._is_started = False
        self._now: tuple[Any, ...] | None = None  # the entry that is handled
        self._ident = 0
        self._ended = False
        self._is_done = False

    def _put(self, entry: tuple[object, ...]) -> None:
        self._entries.put(entry)
        if self._ended:
            self._handle_rest()
        else:
            self.start()

    def start(self) -> None:
        """Start the thread if there is none, so that entries added from now on are handled."""
        if self._ident:
            return
        with self._starting:
            if not self._is_started:
                # If no thread can be started, the entry, which is submitted already, waits until the next one is added or
                # until end(). Thread.start() is not used, since an exception of a signal handler in it ends the new thread.
                # Here such an exception may come between the two lines: then a second thread is started, which ends at once.
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._run, ())
                    self._is_started = True

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return
        try:
            if self._is_done:
                return
            self._ident = threading.get_ident()
            while (entry := self._entries.get()) is not None:
                self._handle_one(entry)
                entry = None  # it may have the last reference to the producer
            self._finish_entries()
        finally:
            self._running.release()

    def _finish_entries(self) -> None:
        self._handle_rest()
        self._is_done = True
        self._done.put(None)

    def _handle_rest(self) -> None:
        """Handle the entries that were added while end() was called; afterwards none can be added."""
        with contextlib.suppress(Empty):
            while True:
                entry = self._entries.get_nowait()
                if entry is not None:
                    self._handle_one(entry)
        self._at_end()

    def _handle_one(self, entry: tuple[Any, ...]) -> None:
        self._now = entry
        try:
            self._handle(*entry)
        except BaseException as error:  # noqa: BLE001 - a callback's, which Future does not catch: the other entries follow
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
        finally:
            self._now = None

    def _at_end(self) -> None:
        """Clean up after the last entry. May be called more than once."""

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in this thread, that is in a callback of a future."""
        return self._ident == threading.get_ident()

    def end(self) -> None:
        """Let the thread end after the entries that were added. Does not wait for it."""
        self._ended = True
        self._entries.put(None)
        if not self._ident:  # there is no thread, and none is needed; or it has just begun, and ends soon
            with self._running:
                self._finish_entries()

    def join(self) -> None:
        """Wait, after end(), for the thread, unless the caller runs in it."""
        if not self.is_current_thread:
            self._done.get()
            self._done.put(None)


class PendingPuts(_OrderedThread):
    """The puts of one session that have no answer yet.

    `finish(session, code, answer, context, give_up_ns)` makes the result of one put from code 0,
    CLOSED or AGAIN (the session ends), the answer tuple (empty if there is none), the context that
    was given to add(), and the time to stop waiting for durability (0: as the context says). It
    runs in this object's thread, and so do callbacks of the futures. `end_session()` is called
    when no thread uses the session's memory any more. `is_replaced()` is called while no answer arrives.
    """

    def __init__(self, session: ProducerSession, finish: Callable[[ProducerSession, int, tuple[int, ...], Any, int], object],
                 end_session: Callable[[], None], is_replaced: Callable[[], bool]) -> None:
        super().__init__()
        self._session = session
        self._finish = finish
        self._end_session = end_session
        self._is_replaced = is_replaced
        self._is_lost = False
        self._give_up_ns = 0  # after end(): one short timeout for all remaining puts together
        self._open: deque[tuple[Claim, object, Callable[[Any], None]]] = deque()  # of add_open()
        self._round: tuple[Sends, Callable[..., tuple[object, Callable[[Any], None]]]] | None = None  # of take_sends()
        self._collecting = threading.Lock()  # held while their answers are read from the session's memory
        self._loops: dict[AbstractEventLoop, _LoopWaits] = {}  # those whose tasks await puts now

    def add(self, claim: Claim, context: object, answer: PutFuture[Any] | PutAnswer | PutCall,
            found: tuple[int, ...] | None = None) -> PutFuture[Any] | PutAnswer | PutCall:
        """Return `answer`, which will get the result of the claimed entry; `found` is the writer's answer if it is there already."""
        self._put((claim, context, answer, found))
        return answer

    def waiter(self, future: PutFuture[Any], loop: AbstractEventLoop) -> LoopFuture[None]:
        """Return a future of the running loop that is done when `future`, a put of this session, is over."""
        waits = self._loops.get(loop)
        if waits is None:
            waits = self._loops[loop] = _LoopWaits(loop, self._ask, lambda loop: self._loops.pop(loop, None))
        return waits.waiter(future)

    def _ask(self, waits: _LoopWaits, future: PutFuture[Any]) -> None:
        self._put((waits, None, future, None))

    def _wait_for_loop(self, waits: _LoopWaits, future: PutFuture[Any]) -> None:
        began_ns = monotonic_ns()
        while not (future._wait(_SLICE_NS) or self._give_up_ns):
            if monotonic_ns() - began_ns >= POLL_INTERVAL_NS and self._is_replaced():
                self._session.end_as_replaced()
        waits.wake()

    def add_open(self, claim: Claim, context: object, then: Callable[[Any], None]) -> None:
        """Add an entry whose answer collect() takes in the caller's thread, or, after its timeout or end(), this object's thread."""
        with self._collecting:
            if not self._ended:
                self._open.append((claim, context, then))
                return
        self.add(claim, context, PutCall(then))

    def collect(self, deadline_ns: int) -> None:
        """Call the functions of add_open() with the results that arrive before the deadline; the thread handles the others."""
        while True:
            with self._collecting:
                if not self._open:
                    return
                claim, context, then = self._open[0]
                code, found = self._session.wait_acked(claim.sequence, deadline_ns)
                if code == AGAIN:
                    self._hand_to_thread()  # before the lock is released: end(), which unmaps the session, must run after that
                    break
                self._open.popleft()
                try:
                    result, failed = self._finish(self._session, code, found, context, 0), None
                except BaseException as error:  # noqa: BLE001 - its caller must never be left waiting
                    result, failed = None, error
                claim.finish()
            if failed is not None:
                PutCall(then).set_exception(failed)
            else:
                then(result)
        self.start()

    def _hand_to_thread(self) -> None:
        while self._open:
            claim, context, then = self._open.popleft()
            self._entries.put((claim, context, PutCall(then), None))

    def take_sends(self, sends: Sends, data: bytearray, at: int, born_host: bytes,
                   rest: Callable[[int, str, int, int], tuple[object, Callable[[Any], None]]]) -> int:
        """Begin a round of sends; return the bytes that were taken. The caller holds the producer's lock and calls answer_sends() next.

        For a send without an answer by then, `rest(number, topic, queue id, bytes of the frame)` returns the context and the
        function that is called with its result.
        """
        with self._collecting:
            self._hand_over_round()  # of a round that an exception interrupted before its answers
            sends.begin()
            self._round = sends, rest
            return sends.take(self._session, data, at, born_host)

    def answer_sends(self, deadline_ns: int) -> bytes:
        """Return the frames for a round's clients that are answered before the deadline; this object's thread handles the others."""
        with self._collecting:
            if self._round is None:  # end() has taken it
                return b""
            answers = self._round[0].answer(self._session, deadline_ns)
            if self._hand_over_round():
                self.start()
            return answers

    def _hand_over_round(self) -> bool:
        """Give the unanswered sends of a round to the thread; return whether there were any."""
        if self._round is None:
            return False
        sends, rest = self._round
        left = sends.rest()
        for sequence, *what in left:
            context, then = rest(*what)
            self._entries.put((Claim(self._session, sequence), context, PutCall(then), None))
        self._round = None
        return bool(left)

    def result_here(self, claim: Claim, context: object, deadline_ns: int) -> object:
        """Return the result to a caller that runs in this thread and cannot wait for it; None if no answer arrives in time."""
        code, found = self._session.wait_acked(claim.sequence, deadline_ns)
        return None if code == AGAIN else self._finish(self._session, code, found, context, 0)

    def to_hand_over(self, sequence: int, context: object, future: PutFuture[Any],
                     found: tuple[int, ...] | None) -> tuple[Callable[[tuple[Any, ...]], None], tuple[Any, ...], dict[str, object]]:
        """Prepare add() for csrc/front, which does it without releasing the GIL: (function that adds, its argument, Future fields).

        csrc/front then gives the fields to `future`. A prepared add() that is not used has no effect.
        """
        self.start()
        fields: Future[object] = Future()
        fields.set_running_or_notify_cancel()
        return self._entries.put, (sequence, context, future, found), vars(fields) | {"_answered": found is not None}

    def _at_end(self) -> None:
        self._end_session()

    def forked(self) -> None:
        """In a forked child: end without the session, which is the parent's. The outcome of each put in it is not known here.

        That holds for what a call adds later in which a signal handler forked. The session's memory stays mapped for it.
        """
        _inherited.append((self._session, self._end_session))
        self._running, self._starting, self._collecting = threading.Lock(), threading.Lock(), threading.Lock()
        self._ident, self._is_started, self._is_done, self._ended, self._is_lost = 0, True, True, True, True
        self._finish = lambda session, code, found, context, give_up_ns: unknown_outcome(context, LOST)
        self._end_session = lambda: None
        self._loops.clear()
        entries: list[tuple[Any, ...] | None] = [self._now]
        with contextlib.suppress(Empty):
            while True:
                entries.append(self._entries.get_nowait())
        for _, context, answer, _ in filter(None, entries):
            if isinstance(answer, PutFuture) and context is not None:
                answer._lose(unknown_outcome(context, LOST))
            elif isinstance(answer, PutAnswer):
                answer.set_result(unknown_outcome(context, LOST))

    def _handle(self, claim: Claim | int | _LoopWaits, context: object, answer: PutFuture[Any] | PutAnswer | PutCall,
                given: tuple[int, ...] | None) -> None:
        if isinstance(claim, _LoopWaits):
            self._wait_for_loop(claim, cast(PutFuture[Any], answer))
            return
        if isinstance(claim, int):
            claim = Claim(self._session, claim)
        code, found = native.CLOSED if self._is_lost else 0, given or ()
        while not (given or self._is_lost):
            code, found = self._session.wait_acked(claim.sequence, self._give_up_ns or monotonic_ns() + POLL_INTERVAL_NS)
            if code != AGAIN or self._give_up_ns and monotonic_ns() >= self._give_up_ns:
                break
            if self._is_replaced():
                self._session.end_as_replaced()
        answer.is_answered = code == 0
        try:
            result = self._finish(self._session, code, found, context, self._give_up_ns)
        except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
            result = error
        claim.finish()  # before the callbacks, since they may put
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(cast(PutOutcome, result))

    def end(self) -> None:
        """Let the thread resolve the remaining puts (answered or indeterminate) and end the session. Does not wait for it."""
        self._give_up_ns = monotonic_ns() + POLL_INTERVAL_NS
        with self._collecting:
            self._hand_to_thread()
            self._hand_over_round()
            super().end()


class QueuedPuts(_OrderedThread):
    """Puts that wait, in order and in a thread of their own, until the ring has room."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[tuple[PutFuture[Any] | PutCall, PutContext]] = deque()  # for other threads to read

    def forked(self) -> None:
        """In a forked child: the outcome of the parent's puts is not known here."""
        for future, context in self.waiting:
            if isinstance(future, PutFuture):
                future._lose(unknown_outcome(context, LOST))

    def add(self, submit: Callable[[], object], future: PutFuture[Any] | PutCall, context: PutContext) -> PutFuture[Any] | PutCall:
        """Return `future`; the thread calls submit(), which waits for room and returns it, or a result if nothing was submitted."""
        self.waiting.append((future, context))
        self._put((submit, future))
        return future

    def _handle(self, submit: Callable[[], object], future: PutFuture[Any] | PutCall) -> None:
        try:
            found = submit()
        except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
            found = error
        self.waiting.popleft()
        if isinstance(found, BaseException):
            future.set_exception(found)
        elif found is not future:
            future.set_result(cast(PutOutcome, found))


# ---- from a put's code and answer to its result: functions without side effects ----


@dataclass(slots=True)
class PutContext:
    """What a producer keeps of a put until its answer arrives, to make the result."""

    kind: int
    topic: str
    queue_id: int
    store_host: bytes
    waits: int                      # what it waits for: native.producer.DURABLE, CONFIRMED, both or 0
    sizes: Sequence[int] = ()       # of a batch: the size of each record, for the message ids
    submitted_ns: int = 0           # on the monotonic clock
    side: Path | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the answer says all that the result says."""
        return self.kind == native.PUT and self.side is None


def outcome(session: native.ProducerSession, code: int, stage: int, answer: tuple[int, ...], context: PutContext,
            flush_timeout_s: float) -> PutOutcome:
    """Return the result of a put that reached `stage` and ended with `code` (native.producer)."""
    if code == native.BUSY:
        return busy_refusal(context, session)
    if stage == native.NOT_SUBMITTED:
        return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                       "the writer made no room in time; nothing was submitted (`pyengine status` tells how it is)")
    if stage == native.SUBMITTED:
        ended = ("no process of the engine is alive any more (`pyengine start` recovers the store)" if session.engine_died
                 else "its session closed before the answer" if code == native.CLOSED else "not answered in time")
        return unknown_outcome(context, f"submitted, but {ended}: it may or may not be stored")
    status, reason = PutStatus(answer[5]), REFUSALS.get(answer[6], "")
    if code:
        status = _STATUS_IF_LATE.get(code, PutStatus.FLUSH_DISK_TIMEOUT)
        reason = _why_unconfirmed(session, code, context, flush_timeout_s)
    return _result(context, status, answer, reason, code == native.CLOSED)


_STATUS_IF_LATE = {native.NO_SLAVE: PutStatus.SLAVE_NOT_AVAILABLE, native.UNCONFIRMED: PutStatus.FLUSH_SLAVE_TIMEOUT}


def _why_unconfirmed(session: native.ProducerSession, code: int, context: PutContext, flush_timeout_s: float) -> str:
    """Return why a stored message was not durable or confirmed in time."""
    control = session.control
    if code == native.FROZEN:
        return "stored, but it could not be made durable: " + control_native.reason(control)
    if code == native.CLOSED:
        kept = "durable" if context.waits & native.DURABLE else "confirmed"
        return f"stored, but the engine {'died' if session.engine_died else 'went away'} before it was {kept}"
    if code == native.UNCONFIRMED:
        return (f"stored, but not confirmed by slaves within {control.identity.slave_timeout_ms} ms (slave_timeout_ms); "
                "`pyengine status` shows how far they are")
    if code == native.NO_SLAVE:
        connected = control_native.load(control.replicator, "slaves_connected")
        needed = control.identity.min_in_sync_replicas
        if connected < needed:
            once = " (those at one address count once, unless ha_slaves_share_hosts)" if needed > 1 else ""
            return f"stored, but not replicated: {connected} of {needed} required slaves connected{once}"
        return ("stored, but slaves are farther behind than ha_slave_fallbehind_max_bytes: it was not waited for "
                "(`pyengine status` shows how far they are)")
    return f"stored, but not durable within {flush_timeout_s:g} s"


def _result(context: PutContext, status: PutStatus, answer: tuple[int, ...], reason: str, indeterminate: bool) -> PutOutcome:
    _, physical_offset, end_offset, queue_offset, store_timestamp_ms, _, _, count, size_bytes = answer
    stored = physical_offset >= 0
    if context.kind == native.MANY:
        return PutManyResult(status, count if stored else 0, queue_offset, physical_offset, end_offset,
                             store_timestamp_ms, context.topic, context.queue_id, reason, indeterminate)
    msg_id = ""
    if stored and context.sizes:
        starts = accumulate(context.sizes[:-1], initial=physical_offset)
        msg_id = ",".join((context.store_host + start.to_bytes(8, "big")).hex().upper() for start in starts)
    answer = (*answer[:5], int(status), answer[6], count if stored else 0, size_bytes)
    return PutResult._of_answer(answer, context.topic, context.queue_id, context.store_host, reason, indeterminate, msg_id)


def refusal(context: PutContext, status: PutStatus, reason: str, *, indeterminate: bool = False) -> PutOutcome:
    """Return the result of a put that was not submitted; `reason` says what to change."""
    kind = PutManyResult if context.kind == native.MANY else PutResult
    return kind(status, topic=context.topic, queue_id=context.queue_id, reason=reason, indeterminate=indeterminate)


def busy_refusal(context: PutContext, session: native.ProducerSession) -> PutOutcome:
    """Return the result of a put that was not submitted because the writer's pass lasts too long."""
    limit_ms = session.control.identity.os_page_cache_busy_timeout_ms
    return refusal(context, PutStatus.OS_PAGECACHE_BUSY,
                   f"the writer has been in one pass for more than {limit_ms} ms, memory or the disk is slow: put again later "
                   "(os_page_cache_busy_timeout_ms)")


def unknown_outcome(context: PutContext, reason: str) -> PutOutcome:
    """Return the indeterminate result of a put that was submitted and has no answer (docs/promises.md, 9)."""
    return refusal(context, PutStatus.UNKNOWN_ERROR, reason, indeterminate=True)
