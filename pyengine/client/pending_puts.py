"""Puts that are under way while their callers do something else, and what hands over their results.

Two threads at most for each producer, started when they are first needed. `PendingPuts` takes
the answers of one session in order of submission and resolves what waits for them. A put
that outlives its caller's timeout stays there: its Future is resolved when the engine answers
after all, or when the session is over. `LaterPuts` submits what found no room in the ring
where nothing may wait: in an event loop, in a callback.

Signal handlers run in the main thread between any two instructions, and what they raise must
break nothing. So the main thread waits and hands over by SimpleQueue, which is one call in C;
threading.Condition can stay locked for ever when its __enter__ is left by an exception.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pyengine._front import PendingPut, use_futures
from pyengine.native import control as control_native
from pyengine.native import session as native
from pyengine.native.flush import monotonic_ns
from pyengine.native.session import AGAIN, Claim, ProducerSession, Sends
from pyengine.native.writer import REFUSALS
from pyengine.results import PutManyResult, PutResult, PutStatus

LOOK_NS = 250_000_000


class PutFuture(PendingPut, Future[Any]):
    """A concurrent.futures.Future that can be awaited as well: `result(timeout)`, `add_done_callback(f)`, `await`.

    That of put_async takes its answer out of the session when it is asked. It becomes a Future like any other, which the
    answers' thread resolves, when more is wanted of it: a callback, an await, wait() for several.
    """

    # Its first life is csrc/front/pending.c.

    def __init__(self) -> None:
        Future.__init__(self)

    @property
    def is_answered(self) -> bool:
        """Whether the writer has answered; the wait for the disk or for slaves may go on."""
        return self._has_answer or self.__dict__.get("_answered", False)

    @is_answered.setter
    def is_answered(self, answered: bool) -> None:
        self.__dict__["_answered"] = answered

    def __getattr__(self, name: str) -> object:
        if name in _FUTURE_FIELDS:
            self._become_future()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"a PutFuture has no attribute {name!r}")

    @staticmethod
    def _settled(result: object) -> dict[str, object]:
        """The fields of a Future that has this result."""
        future: Future[object] = Future()
        future.set_result(result)
        return vars(future) | {"_answered": True}

    def __await__(self) -> Generator[object, None, object]:
        import asyncio  # 10 ms, for a program that awaits

        return asyncio.wrap_future(self).__await__()


_FUTURE_FIELDS = frozenset(vars(Future()))
use_futures(PutFuture, Future)


class PutAnswer(SimpleQueue[object]):
    """A Future's part for a caller that waits at once."""

    is_answered = False  # the writer has answered, durability is still to come

    def set_result(self, result: object) -> None:
        self.put(result)

    set_exception = set_result

    def result(self, timeout_s: float) -> object:
        """What was set; queue.Empty after the timeout."""
        found = self.get(timeout=max(0.0, timeout_s))
        if isinstance(found, BaseException):
            raise found
        return found


class PutCall:
    """A Future's part for a caller that wants one call: `then(result)` in the answers' thread, quickly."""

    __slots__ = ("is_answered", "set_result")

    def __init__(self, then: Callable[[Any], None]) -> None:
        self.is_answered = False
        self.set_result = then

    def set_exception(self, error: BaseException) -> None:
        """What must not happen, as a result."""
        self.set_result(PutResult(PutStatus.UNKNOWN_ERROR, reason=repr(error), indeterminate=True))


class _Line:
    """Entries that one thread handles in order, until end(). A program may end without waiting for it."""

    _handle: Callable[..., None]  # of a subclass: what is done with the fields of one entry

    def __init__(self) -> None:
        self._entries: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._running = threading.Lock()  # held while entries are handled in order, by the thread or by end()
        self._starting = threading.Lock()
        self._is_started = False
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
        """Have the thread: what is put from now on is handled."""
        if self._ident:
            return
        with self._starting:
            if not self._is_started:
                # Without a thread to be had an entry waits for the next one's try, or for end(): it is submitted. Not
                # Thread.start(): an exception raised in it by a signal handler lets the new thread die. Here it may come
                # between the two lines, and a second thread is started, which ends at once.
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
                entry = None  # it may hold the last reference to the producer
            self._finish_line()
        finally:
            self._running.release()

    def _finish_line(self) -> None:
        self._handle_rest()
        self._is_done = True
        self._done.put(None)

    def _handle_rest(self) -> None:
        """What was added while end() was called; then nothing more comes."""
        with contextlib.suppress(Empty):
            while True:
                entry = self._entries.get_nowait()
                if entry is not None:
                    self._handle_one(entry)
        self._at_end()

    def _handle_one(self, entry: tuple[Any, ...]) -> None:
        try:
            self._handle(*entry)
        except BaseException as error:  # noqa: BLE001 - a callback's, which Future lets through: the others go on
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))

    def _at_end(self) -> None:
        """After the last entry. May be called again."""

    @property
    def in_own_thread(self) -> bool:
        """Whether the caller runs in the thread: in a callback of a future."""
        return self._ident == threading.get_ident()

    def end(self) -> None:
        """Let the thread end after what was added. Does not wait for it."""
        self._ended = True
        self._entries.put(None)
        if not self._ident:  # no thread: it is not needed now. Or one that has just begun, which ends soon.
            with self._running:
                self._finish_line()

    def join(self) -> None:
        """After end(): wait for the thread, unless it is the caller's."""
        if not self.in_own_thread:
            self._done.get()
            self._done.put(None)


class PendingPuts(_Line):
    """The puts of one session whose answers are still to come.

    `finish(session, code, answer, context, give_up_ns)` makes the result of one put: code 0,
    CLOSED or AGAIN (ending), the answer tuple (empty when there is none), whatever was
    given to add(), and when to stop waiting for durability (0: as the context says). It
    runs in this object's thread, and so do callbacks on the futures. `end_session()` is called
    once nothing looks at the session's memory any more. `is_replaced()` is asked while no answer comes.
    """

    def __init__(self, session: ProducerSession, finish: Callable[[ProducerSession, int, tuple[int, ...], Any, int], object],
                 end_session: Callable[[], None], is_replaced: Callable[[], bool]) -> None:
        super().__init__()
        self._session = session
        self._finish = finish
        self._end_session = end_session
        self._is_replaced = is_replaced
        self._give_up_ns = 0  # once ended: all that is left shares one short patience
        self._open: deque[tuple[Claim, object, Callable[[Any], None]]] = deque()  # of add_open()
        self._round: tuple[Sends, Callable[..., tuple[object, Callable[[Any], None]]]] | None = None  # of take_sends()
        self._collecting = threading.Lock()  # held while the session's memory is looked at for them

    def add(self, claim: Claim, context: object, answer: PutFuture | PutAnswer | PutCall,
            found: tuple[int, ...] | None = None) -> PutFuture | PutAnswer | PutCall:
        """`answer`, which gets the result of the entry that is claimed; the writer has answered it if `found` is given."""
        self._put((claim, context, answer, found))
        return answer

    def add_open(self, claim: Claim, context: object, then: Callable[[Any], None]) -> None:
        """An entry whose answer collect() takes, in the caller's thread; once that gives up, or at the end, this object's."""
        with self._collecting:
            if not self._ended:
                self._open.append((claim, context, then))
                return
        self.add(claim, context, PutCall(then))

    def collect(self, deadline_ns: int) -> None:
        """Call what was given to add_open() with the results, as far as the writer answers in time; the rest is the thread's."""
        while True:
            with self._collecting:
                if not self._open:
                    return
                claim, context, then = self._open[0]
                code, found = self._session.wait_acked(claim.sequence, deadline_ns)
                if code == AGAIN:
                    self._hand_to_thread()  # before the lock is free: end(), which unmaps the session, comes after them
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
        """Begin a round of sends; the bytes that were taken. The producer's lock is held, and answer_sends() comes next.

        `rest(number, topic, queue id, bytes of the frame)` gives the context of one that has no answer then, and what is to be
        called with its result.
        """
        with self._collecting:
            self._hand_over_round()  # where an exception came before its answers
            sends.begin()
            self._round = sends, rest
            return sends.take(self._session, data, at, born_host)

    def answer_sends(self, deadline_ns: int) -> bytes:
        """The answers to a round's clients, as far as the writer gives them in time; the rest is this object's thread's."""
        with self._collecting:
            if self._round is None:  # end() was faster
                return b""
            answers = self._round[0].answer(self._session, deadline_ns)
            if self._hand_over_round():
                self.start()
            return answers

    def _hand_over_round(self) -> bool:
        """Give the thread what is left of a round; whether there was any."""
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
        """The result without the thread, for a caller that runs in it; None when the writer does not answer in time."""
        code, found = self._session.wait_acked(claim.sequence, deadline_ns)
        return None if code == AGAIN else self._finish(self._session, code, found, context, 0)

    def to_hand_over(self, sequence: int, context: object, future: PutFuture,
                     found: tuple[int, ...] | None) -> tuple[Callable[[tuple[Any, ...]], None], tuple[Any, ...], dict[str, object]]:
        """add() in parts, for csrc/front, which does it while nothing else runs: the function that adds, its argument, and
        the fields of a Future, which `future` has then. Dropped, they leave nothing behind."""
        self.start()
        fields: Future[object] = Future()
        fields.set_running_or_notify_cancel()
        return self._entries.put, (sequence, context, future, found), vars(fields) | {"_answered": found is not None}

    def _at_end(self) -> None:
        self._end_session()

    def _handle(self, claim: Claim | int, context: object, answer: PutFuture | PutAnswer | PutCall, given: tuple[int, ...] | None) -> None:
        if isinstance(claim, int):
            claim = Claim(self._session, claim)
        code, found = 0, given or ()
        while not given:
            code, found = self._session.wait_acked(claim.sequence, self._give_up_ns or monotonic_ns() + LOOK_NS)
            if code != AGAIN or self._give_up_ns and monotonic_ns() >= self._give_up_ns:
                break
            if self._is_replaced():
                self._session.end_as_replaced()
        answer.is_answered = code == 0
        try:
            result = self._finish(self._session, code, found, context, self._give_up_ns)
        except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
            result = error
        claim.finish()  # before callbacks, which may put
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def end(self) -> None:
        """Resolve what is left (answered or indeterminate), end the session and the thread. Does not wait for them."""
        self._give_up_ns = monotonic_ns() + LOOK_NS
        with self._collecting:
            self._hand_to_thread()
            self._hand_over_round()
            super().end()


class LaterPuts(_Line):
    """Puts that wait for room in the ring in a thread of their own, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[PutFuture | PutCall] = deque()  # to be looked at only

    def add(self, submit: Callable[[], object], future: PutFuture | PutCall) -> PutFuture | PutCall:
        """`future`; submit() waits for room, and returns it, or the result when nothing was submitted."""
        self.waiting.append(future)
        self._put((submit, future))
        return future

    def _handle(self, submit: Callable[[], object], future: PutFuture | PutCall) -> None:
        try:
            found = submit()
        except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
            found = error
        self.waiting.popleft()
        if isinstance(found, BaseException):
            future.set_exception(found)
        elif found is not future:
            future.set_result(found)


# ---- what a put's code and answer mean: nothing here waits, submits or keeps anything ----


@dataclass(slots=True)
class PutContext:
    """What a producer remembers of a put until its answer is there, to make a result of it."""

    kind: int
    topic: str
    queue_id: int
    store_host: bytes
    waits: int                      # for what: native.producer.DURABLE, CONFIRMED, both or 0
    sizes: Sequence[int] = ()       # batch: of each record, for the message ids
    submitted_ns: int = 0           # on the monotonic clock
    side: Path | None = None


PutOutcome = PutResult | PutManyResult


def outcome(session: native.ProducerSession, code: int, stage: int, answer: tuple[int, ...], context: PutContext,
            flush_timeout_s: float) -> PutOutcome:
    """The result of a put that came as far as `stage` and ended with `code` (native.producer)."""
    if code == native.BUSY:
        return busy_refusal(context, session)
    if stage == native.NOT_SUBMITTED:
        return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                       "the writer made no room in time; nothing was submitted (`pyengine status` tells how it is)")
    if stage == native.SUBMITTED:
        ended = ("no process of the engine is alive any more (`pyengine start` recovers the store)" if session.engine_died
                 else "the session ended before the answer" if code == native.CLOSED else "not answered in time")
        return unknown_fate(context, f"submitted, but {ended}: it may or may not be stored")
    status = PutStatus(answer[5])
    reason = REFUSALS.get(answer[6], "")
    indeterminate = False
    if code:
        status = _LATE.get(code, PutStatus.FLUSH_DISK_TIMEOUT)
        indeterminate = code == native.CLOSED
        reason = _why_late(session, code, context, flush_timeout_s)
    return _result(context, status, answer, reason, indeterminate)


_LATE = {native.NO_SLAVE: PutStatus.SLAVE_NOT_AVAILABLE, native.UNCONFIRMED: PutStatus.FLUSH_SLAVE_TIMEOUT}


def _why_late(session: native.ProducerSession, code: int, context: PutContext, flush_timeout_s: float) -> str:
    """What kept a stored message from being durable or confirmed."""
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
    return PutResult.of_answer(answer, context.topic, context.queue_id, context.store_host, reason, indeterminate, msg_id)


def refusal(context: PutContext, status: PutStatus, reason: str) -> PutOutcome:
    """Nothing was submitted, and `reason` says what to change."""
    if context.kind == native.MANY:
        return PutManyResult(status, topic=context.topic, queue_id=context.queue_id, reason=reason)
    return PutResult(status, topic=context.topic, queue_id=context.queue_id, reason=reason)


def busy_refusal(context: PutContext, session: native.ProducerSession) -> PutOutcome:
    """Nothing was submitted, because the writer's pass lasts too long."""
    limit_ms = session.control.identity.os_page_cache_busy_timeout_ms
    return refusal(context, PutStatus.OS_PAGECACHE_BUSY,
                   f"the writer has been in one pass for more than {limit_ms} ms, memory or the disk is slow: put again later "
                   "(os_page_cache_busy_timeout_ms)")


def unknown_fate(context: PutContext, reason: str) -> PutOutcome:
    """It was submitted, and its fate is not known (docs/promises.md, 9)."""
    if context.kind == native.MANY:
        return PutManyResult(PutStatus.UNKNOWN_ERROR, topic=context.topic, queue_id=context.queue_id, reason=reason,
                             indeterminate=True)
    return PutResult(PutStatus.UNKNOWN_ERROR, topic=context.topic, queue_id=context.queue_id, reason=reason, indeterminate=True)
