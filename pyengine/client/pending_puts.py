"""Pending puts: the future of a put, and the threads that a producer has for them.

A put has one object from its submission on, a `PutFuture` in C (csrc/front/pending.c). Whoever asks takes the answer: the thread that
waits in put() or result(), an event loop that looks. A producer has at most two threads, started when they are first needed.
`PendingPuts` asks where nobody else does: for callbacks, in the order of submission, for event loops, and at the end of the session.
`QueuedPuts` submits puts for which the ring was full where the caller must not wait: in an event loop, in a callback.

A signal handler runs in the main thread between any two instructions, and an exception in it must
not break a producer. So the main thread passes objects on by SimpleQueue, which is one call
in C; threading.Condition can stay locked forever if an exception interrupts its __enter__.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from pyengine import arguments
from pyengine._front import PendingPut, SessionFront, use_futures
from pyengine.ipc.shared_objects import remove_object
from pyengine.native import control as control_native
from pyengine.native import session as native
from pyengine.native.flush import monotonic_ns
from pyengine.native.writer import REFUSALS
from pyengine.results import PutError, PutManyResult, PutResult, PutStatus

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from asyncio import Future as LoopFuture

POLL_INTERVAL_NS = 250_000_000
CLOSE_SILENCE_MAX_NS = 2_000_000_000
_SLICE_NS = 50_000_000
_LATE = "submitted, but not answered in time: it may or may not be stored"
LOST = "submitted by the parent of this process: it may or may not be stored"
NO_THREAD = "this process can have no more threads now (ulimit -u, pids.max, memory)"
_inherited: list[object] = []  # of the parents of a forked child
_LOOP_POLL_INTERVAL_S = 0.005
_AWAIT_LOOKS = 3  # rounds of the event loop in which an awaited put looks for its answer, before a thread waits for it
PutOutcome: TypeAlias = PutResult | PutManyResult
Result = TypeVar("Result", bound=PutOutcome)


class PutFuture(PendingPut, Future[Result]):
    """A concurrent.futures.Future that can also be awaited."""

    # Its code is csrc/front/pending.c. With a callback or wait() for several it has a Future's fields too, which the thread ends.

    def __init__(self) -> None:
        """Make one of a put that is not submitted yet."""

    @property
    def is_answered(self) -> bool:
        """Whether the writer has answered, though a disk or slave may not."""
        return self._has_answer

    def __repr__(self) -> str:
        return f"<PutFuture, {'done' if self.done() else 'waiting'}>"

    if TYPE_CHECKING:
        def add_done_callback(self, fn: Callable[[PutFuture[Result]], object]) -> None:
            """Call `fn` with this future once the result is there, in the thread of answers."""

    def __getattr__(self, name: str) -> object:
        if name in _FUTURE_FIELDS:
            self._watch()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"a PutFuture has no attribute {name!r}")

    def set_result(self, result: Result) -> None:
        """End a put that was not submitted with this result, or with its PutError."""
        self._resolve(result)
        self._tell()

    def _tell(self) -> None:
        """Tell those who wait by callbacks and wait() that the result is there."""
        if self._is_watched:
            with contextlib.suppress(InvalidStateError):
                super().set_result(cast(Result, self._given))

    _error = staticmethod(PutError._of)

    @staticmethod
    def _fields(is_done: bool) -> dict[str, object]:
        future: Future[object] = Future()
        future.set_running_or_notify_cancel()
        if is_done:
            future.set_result(None)
        return vars(future)

    def __await__(self) -> Generator[Any, None, Result]:
        loop = arguments.event_loop()
        looks = _AWAIT_LOOKS
        while not self.done():
            if looks and not self.is_answered:
                looks -= 1
                yield  # one round of the loop, in which its other tasks put: about as long as an answer takes
                continue
            waiter: LoopFuture[None] = loop.create_future()
            owner = self._owner
            waits = owner.loop_puts(loop) if owner is not None else LoopPuts(loop)
            waits.add(self, partial(_end_wait, waiter))
            yield from waiter
            break
        return self.result()


_FUTURE_FIELDS = frozenset(vars(Future()))
use_futures(PutFuture, Future)


def _end_wait(waiter: LoopFuture[None], _: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


class LoopPuts:
    """Puts whose results the thread of one event loop takes: it looks for them, or is woken once for all that are over by then.

    All methods but wake() run in the loop's thread.
    """

    def __init__(self, loop: AbstractEventLoop, forget: Callable[[], object] = lambda: None) -> None:
        """`forget()` is called when none is left, or the loop is closed."""
        self._loop = loop
        self._forget = forget
        self._open: deque[tuple[PutFuture[Any], Callable[[PutFuture[Any]], object]]] = deque()  # in the order of submission
        self._is_asking = False

    def add(self, future: PutFuture[Any], then: Callable[[PutFuture[Any]], object], *, is_taken: bool = False) -> None:
        """Let `then(future)` be called once it is over, after a wake-up, or by take(). `is_taken`: take() will be called."""
        self._open.append((future, then))
        if not (self._is_asking or is_taken):
            self._ask()

    def take(self, timeout_ns: int = 0) -> None:
        """Call the functions of the futures that are over, in order, and of those that are answered within the time."""
        deadline_ns = monotonic_ns() + timeout_ns
        try:
            while self._open:
                future, then = self._open[0]
                if not future._wait(0 if future._waits else max(0, deadline_ns - monotonic_ns())):
                    break
                self._open.popleft()
                then(future)
        finally:  # also after an exception of a signal handler
            if not self._is_asking:
                self._ask()

    def _ask(self) -> None:
        """Let the answers' thread wake the loop when the first future is over; without that thread the loop looks again soon."""
        while self._open:
            future, then = self._open[0]
            owner = future._owner
            if owner is not None:
                if owner.start():
                    owner.ask(future, self)
                else:
                    self._loop.call_later(_LOOP_POLL_INTERVAL_S, self._woken)
                self._is_asking = True  # last: an exception of a signal handler leaves it unset
                return
            with contextlib.suppress(RuntimeError):  # it has an owner by now, and no thread can be had
                future.add_done_callback(partial(self._tell, then))  # it waits for room in the ring, or is over
                self._open.popleft()
        self._forget()

    def _tell(self, then: Callable[[PutFuture[Any]], object], future: PutFuture[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # as below
            self._loop.call_soon_threadsafe(then, future)

    def wake(self) -> None:
        """Wake the loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._woken)
        except RuntimeError:  # it is closed, and no task of it runs any more
            self._forget()

    def _woken(self) -> None:
        self._is_asking = False
        self.take()


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
        if not self._ended:
            self.start()
        elif self._is_done:
            self._handle_rest()

    def start(self) -> bool:
        """Start the thread if there is none, and return whether that succeeds: entries are handled from then on.

        Otherwise those that are added wait for the next call, or for end().
        """
        if self._ident:
            return True
        with self._starting:
            if not self._is_started:
                # Thread.start() is not used, since an exception of a signal handler in it ends the new thread. Here such
                # an exception may come between the two lines: then a second thread is started, which ends at once.
                with contextlib.suppress(RuntimeError):
                    _thread.start_new_thread(self._run, ())
                    self._is_started = True
            return self._is_started

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
        self._before_end()
        self._handle_rest()
        self._at_end()
        self._is_done = True  # whoever adds an entry from now on handles it
        self._handle_rest()
        self._done.put(None)

    def _handle_rest(self) -> None:
        """Handle the entries that were added while end() was called."""
        with contextlib.suppress(Empty):
            while True:
                entry = self._entries.get_nowait()
                if entry is not None:
                    self._handle_one(entry)

    def _handle_one(self, entry: tuple[Any, ...]) -> None:
        self._now = entry
        try:
            self._handle(*entry)
        except BaseException as error:  # noqa: BLE001 - a callback's, which Future does not catch: the other entries follow
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
        finally:
            self._now = None

    def _before_end(self) -> None:
        """Let every entry end at once that is left. May be called more than once."""

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
    """The puts of one session: it ends the futures that nobody asks, in a thread, in the order in which it gets them.

    Callbacks of the futures run in this thread. csrc/front calls outcome(), look(), ready() and unknown(). It has no reference to the
    producer, so that a future does not keep that alive. `end_session()` is called when no thread uses the session's memory any
    more. `is_replaced()` is called while no answer arrives.
    """

    def __init__(self, session: native.ProducerSession, store_host: bytes, flush_timeout_s: float, end_session: Callable[[], None],
                 is_replaced: Callable[[], bool]) -> None:
        super().__init__()
        self._session = session
        self._store_host = store_host
        self._flush_timeout_s = flush_timeout_s
        self._end_session = end_session
        self._is_replaced = is_replaced
        self._loops: dict[AbstractEventLoop, LoopPuts] = {}  # those whose tasks await puts now
        self.front: SessionFront | None = SessionFront(*session.front(), session, self, PutResult, store_host)

    # ---- called by csrc/front -----------------------------------------------------

    def outcome(self, code: int, answer: tuple[int, ...] | None, kind: int, topic: str, queue_id: int, waits: int,
                context: PutContext | None) -> PutOutcome:
        """Return the result of a put that ended with `code` (native.session); `answer` None: the writer has not answered."""
        context = context or PutContext(kind, topic, queue_id, self._store_host, waits)
        if context.side is not None:
            remove_object(context.side)
        try:
            return outcome(self._session, code, answer, context, self._flush_timeout_s)
        except Exception as error:
            if threading.current_thread() is threading.main_thread():  # of a signal handler: who asks gets it, and may ask again
                raise
            return unknown_outcome(context, repr(error))

    def look(self) -> None:
        """Close the session if another start of the engine has recovered the store."""
        if self._is_replaced():
            self._session.end_as_replaced()

    def ready(self) -> Callable[[tuple[Any, ...]], None]:
        """Start the thread; return the function that gives it (future, None), which does not run Python. RuntimeError without one."""
        if not self.start():
            raise RuntimeError(NO_THREAD)
        return self._entries.put

    def unknown(self, kind: int, topic: str, queue_id: int, is_lost: int) -> PutOutcome:
        """Return the result of a put that is not answered in time, or is of the parent's session, which a forked child does not have."""
        return unknown_outcome(PutContext(kind, topic, queue_id, self._store_host, 0), LOST if is_lost else _LATE)

    # ---- the thread ---------------------------------------------------------------

    def ask(self, future: PutFuture[Any], puts: LoopPuts | None = None) -> None:
        """End this future also if the program does not keep it; then let puts.wake() be called."""
        self._put((future, puts))

    def loop_puts(self, loop: AbstractEventLoop) -> LoopPuts:
        """Return the awaited puts of the running loop."""
        found = self._loops.get(loop)
        if found is None:
            found = self._loops[loop] = LoopPuts(loop, partial(self._loops.pop, loop, None))
        return found

    def _handle(self, future: PutFuture[Any], puts: LoopPuts | None) -> None:
        while not future._wait(_SLICE_NS):
            pass
        if puts is None:
            future._tell()
        else:
            puts.wake()

    def _before_end(self) -> None:
        if self.front is not None:
            self.front.end()

    def _at_end(self) -> None:
        self.front = None  # which refers to this object
        self._end_session()

    def forked(self) -> None:
        """In a forked child: end without the session, which is the parent's. The outcome of each put in it is not known here.

        That holds for what a call adds later in which a signal handler forked. The session's memory stays mapped for it.
        """
        _inherited.append((self._session, self._end_session))
        if self.front is not None:
            self.front.forget()
        self._running, self._starting = threading.Lock(), threading.Lock()
        self._ident, self._is_started, self._is_done, self._ended = 0, True, True, True
        self._end_session = lambda: None
        self._loops.clear()
        entries: list[tuple[Any, ...] | None] = [self._now]
        with contextlib.suppress(Empty):
            while True:
                entries.append(self._entries.get_nowait())
        for future, _ in filter(None, entries):
            if future._is_watched:  # for wait(); a thread of the parent may have the lock
                vars(future).update(_condition=threading.Condition(), _state="FINISHED")

    def end(self) -> None:
        """Let the remaining puts end soon (answered or indeterminate), in the thread if there are any, and the session then."""
        if self.front is not None and not self.front.give_up_ns:
            # After the last answer: longer than a restart of the writer or a slow sync; a writer that stays dead is waited for once.
            self.front.patience_ns = CLOSE_SILENCE_MAX_NS
            self.front.give_up_ns = monotonic_ns() + CLOSE_SILENCE_MAX_NS
            if self.front.has_open:
                self.start()
        super().end()


class QueuedPuts(_OrderedThread):
    """Puts that wait, in order and in a thread of their own, until the ring has room."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[tuple[PutFuture[Any], PutContext]] = deque()  # for other threads to read

    def forked(self) -> None:
        """In a forked child: the outcome of the parent's puts is not known here."""
        for future, context in self.waiting:
            with contextlib.suppress(ValueError):  # it is submitted, and csrc/front knows that it is lost
                future._resolve(unknown_outcome(context, LOST))

    def add(self, submit: Callable[[], PutOutcome | bool], future: PutFuture[Any], context: PutContext) -> PutFuture[Any]:
        """Return `future`; the thread calls submit(), which waits for room, and returns True, or a result if nothing was submitted."""
        self.waiting.append((future, context))
        self._put((submit, future, context))
        return future

    def _handle(self, submit: Callable[[], PutOutcome | bool], future: PutFuture[Any], context: PutContext) -> None:
        try:
            found = submit()
        except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
            found = unknown_outcome(context, repr(error))
        self.waiting.popleft()
        if found is not True:
            future.set_result(cast(PutOutcome, found))


# ---- from a put's code and answer to its result: functions without side effects ----


@dataclass(slots=True)
class PutContext:
    """What a producer keeps of a put until its answer arrives, to make the result."""

    kind: int
    topic: str
    queue_id: int
    store_host: bytes
    waits: int                      # what it waits for: native.session.DURABLE, CONFIRMED, both or 0
    sizes: Sequence[int] = ()       # of a batch: the size of each record, for the message ids
    side: Path | None = None        # the side object of a large put


def outcome(session: native.ProducerSession, code: int, answer: tuple[int, ...] | None, context: PutContext,
            flush_timeout_s: float) -> PutOutcome:
    """Return the result of a submitted put that ended with `code` (native.session)."""
    if answer is None:
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
