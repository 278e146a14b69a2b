"""`pyengine.run_consumer`: call a function with each message of a topic, until a signal or event ends it.

A message is acknowledged when the handler returns and given back (Consumer.retry) when it raises. If it cannot be given
back now, because no engine runs or the disk is full, the handler gets it again after HANDLE_AGAIN_S, as in RocketMQ's
ConsumeMessageConcurrentlyService.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import inspect
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar, Unpack

from pyengine import arguments
from pyengine.client.consumer import ConsumeOptions, Consumer, Topics, consume, topics_until
from pyengine.client.consumer_groups import ConsumerGroups, queue_lags, reaches
from pyengine.errors import BadMessageError, EngineError, UsageError
from pyengine.formats.delayed_message import DELIVER_AT_DAYS_MAX
from pyengine.formats.record import Message
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.session_client import CONNECT_TIMEOUT_S, Patience
from pyengine.results import PutError, PutNotDurableError
from pyengine.storage.config import check_keywords
from pyengine.storage.consumer_offset import ConsumerOffsets

PULL_S = 0.5           # longest wait for messages before the request to end is checked
HANDLE_AGAIN_S = 5.0
ALONE_S = 10.0         # longest wait of a message that runs alone for the others, and of the others for it
_LOG = logging.getLogger("pyengine.client.handler")
_Call = TypeVar("_Call", bound=Hashable)
_Future = TypeVar("_Future", bound="Future[None] | asyncio.Task[None]")


@dataclass(frozen=True, slots=True)
class _Delays:
    """When a failed message comes again: the delay level, None for RocketMQ's or for `backoff`."""

    level: int | None
    backoff: Callable[[int], float] | None

    @classmethod
    def of(cls, level: int | None, backoff: float | Sequence[float] | Callable[[int], float] | None) -> _Delays:
        if level is not None:
            arguments.integer(level, "delay_level")
        if backoff is None or callable(backoff):
            given = backoff
        else:
            steps = list(backoff) if isinstance(backoff, Sequence) and not isinstance(backoff, str) else [backoff]
            if not steps:
                raise UsageError("backoff is empty: give at least one number of seconds")
            waits_s = [arguments.number(step, "backoff") for step in steps]

            def given(times: int) -> float:
                return waits_s[min(times, len(waits_s) - 1)]

        if level is not None and given is not None:
            raise UsageError("delay_level and backoff exclude each other: give one")
        return cls(level, given)

    def after(self, message: Message, error: BaseException) -> tuple[int | None, dict[str, Any]]:
        """Return the delay level, and the keywords of Consumer.retry, for a message whose handler has raised this error."""
        if isinstance(error, BadMessageError):
            _LOG.error("%s of %s can never be handled, and becomes a dead letter: %s", message.msg_id, message.topic, error)
            return -1, {"reason": str(error)}
        _LOG.exception("the handler failed for %s, which is delivered again", message.msg_id)
        why = {"reason": "".join(traceback.format_exception_only(error)).strip()}  # str() of a program's error may fail
        if self.backoff is None:
            return self.level, why
        try:
            delay_s = arguments.number(self.backoff(message.reconsume_times), "what backoff returns")
            return None, {"delay_s": min(delay_s, DELIVER_AT_DAYS_MAX * 86_400), **why}
        except Exception:  # noqa: BLE001 - the program's own: the message must not be lost for it
            _LOG.exception("backoff failed for %s, which comes again after the usual delay", message.msg_id)
            return None, why


def run_consumer(
    store: str | os.PathLike[str], topic: Topics, group: str, handler: Callable[[Message], object], *, concurrency: int = 1,
    delay_level: int | None = None, backoff: float | Sequence[float] | Callable[[int], float] | None = None,
    stop: threading.Event | None = None,
    **options: Unpack[ConsumeOptions],
) -> None:
    """Call `handler` with each message of `topic` for `group` until SIGTERM, SIGINT, or `stop` is set.

    A message is done when the handler returns; if it raises, it comes again by `delay_level` (Consumer.retry), or after `backoff`
    seconds: a number, a sequence for the first, second ... retry, or a function of `message.reconsume_times`. Up to `concurrency`
    are handled at once, each in a thread; with 1, in this thread and in order. The end waits for running handlers; a second signal
    does not. Outside the main thread no signal is caught. An error of the store, or a handler's BaseException, ends the call.
    """
    given, patience = _checked(handler, concurrency, options, is_async=False, group=group)
    delays = _Delays.of(delay_level, backoff)
    stopping = threading.Event() if stop is None else stop
    if isinstance(stop, asyncio.Event) or not hasattr(stopping, "set"):
        raise arguments.wrong_type(stop, "stop", "a threading.Event; run_consumer_async takes an asyncio.Event")
    chosen = topics_until(stopping.is_set, topic)

    reading: list[Consumer] = []

    def stop_all() -> None:
        stopping.set()
        for consumer in reading:
            consumer._leave()

    def end() -> None:
        try:
            _thread.start_new_thread(stop_all, ())  # this one may be in wait(), with the event's lock
        except RuntimeError:  # no thread can be had
            stopping.set()

    with _signals_to(end):
        while not stopping.is_set():
            try:
                consumer = consume(store, chosen, group=group, auto_commit=False, timeout_s=0, **given)
            except EngineError as error:  # the store or its engine may start later
                stopping.wait(patience.pause_s(error))
                continue
            with consumer:
                consumer._settles_each.set()
                reading.append(consumer)
                handle = partial(_handle, consumer, handler, delays, stopping)
                if concurrency > 1:
                    _handle_in_threads(consumer, handle, concurrency, stopping)  # until it is stopping
                while not stopping.is_set():
                    for message in consumer.pull(1, timeout_s=PULL_S):
                        handle(message)


async def run_consumer_async(
    store: str | os.PathLike[str], topic: Topics, group: str, handler: Callable[[Message], Awaitable[object]], *,
    concurrency: int = 1, delay_level: int | None = None, backoff: float | Sequence[float] | Callable[[int], float] | None = None,
    stop: asyncio.Event | None = None,
    **options: Unpack[ConsumeOptions],
) -> None:
    """Like run_consumer(), for asyncio. A cancelled call cancels the handlers."""
    given, patience = _checked(handler, concurrency, options, is_async=True, group=group)
    delays = _Delays.of(delay_level, backoff)
    loop = arguments.event_loop()
    stopping = asyncio.Event() if stop is None else stop
    if not isinstance(stopping, asyncio.Event):  # whose wait() would stop the loop
        raise arguments.wrong_type(stop, "stop", "an asyncio.Event; run_consumer takes a threading.Event")
    chosen = topics_until(stopping.is_set, topic)
    with _signals_to(lambda: loop.call_soon_threadsafe(stopping.set)):
        stopped = asyncio.ensure_future(stopping.wait())
        try:
            while not stopping.is_set():
                try:
                    consumer = await arguments.in_thread(
                        lambda: consume(store, chosen, group=group, auto_commit=False, timeout_s=0, **given), undo=Consumer.close)
                except EngineError as error:  # the store or its engine may start later
                    await asyncio.wait({stopped}, timeout=patience.pause_s(error))
                    continue
                async with consumer:
                    await _handle_in_tasks(consumer, handler, concurrency, delays, stopped)
        finally:
            stopped.cancel()


def _handle(consumer: Consumer, handler: Callable[[Message], object], delays: _Delays, stopping: threading.Event,
            message: Message) -> None:
    """Handle a message until it is done or given back, or until the call must end."""
    while True:
        try:
            result = handler(message)
        except Exception as error:  # noqa: BLE001 - the handler's own: the message is delivered again
            failure = delays.after(message, error)
        else:
            if result is not None and inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise UsageError("the handler returns an awaitable: use run_consumer_async")
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                raise UsageError("the handler returns a generator, which has not run: leave yield out")
            consumer.ack(message)
            return
        if _is_given_back(consumer, message, *failure) or stopping.wait(HANDLE_AGAIN_S):
            return


class Running(Generic[_Call]):
    """The handlers, or tasks of a library, that run at once. A suspect, which may have killed its readers, runs alone.

    So it waits for the handlers that run, and those after it wait for it, each up to ALONE_S: a handler that hangs stops no
    others. A handler that took longer runs beside the suspect and is spared: the kill counts for the suspect.
    """

    def __init__(self, consumer: Consumer, concurrency: int) -> None:
        self.calls: dict[_Call, Message] = {}
        self._consumer = consumer
        self._concurrency = concurrency
        self._overdue: set[_Call] = set()
        self._suspect: _Call | None = None
        self._since_s: float | None = None  # since when handlers are waited for
        self._has_spared = False
        consumer._settles_each.set()  # or a joining member would get the queue of a handler that runs, until the first one has ended

    def room(self) -> int:
        """Return how many messages may be asked for now; 0 if a running handler must end first."""
        room, is_expected = self._concurrency - len(self.calls), self._consumer._expects_suspects
        is_alone = is_expected or self._suspect is not None and self._suspect not in self._overdue
        hinders = self.calls.keys() - self._overdue if is_alone else set()
        if not hinders or room == 0:
            self._since_s = None
            if room:
                self._spare(self._overdue if is_expected else ())
            return room
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s < self._since_s + ALONE_S:
            return 0
        for call in hinders:
            _LOG.warning("the handler of %s takes longer than %g s: others run beside it, because one that hangs must not stop them",
                         self.calls[call].msg_id, ALONE_S)
        self._overdue |= hinders
        return self.room()

    def begin(self, call: _Call, message: Message) -> None:
        self.calls[call] = message
        if self._consumer._is_suspect(message):
            self._suspect = call

    def end(self, call: _Call) -> None:
        self.calls.pop(call, None)
        self._overdue.discard(call)
        if call == self._suspect:
            self._suspect = None

    def _spare(self, calls: Iterable[_Call]) -> None:
        spared = [self.calls[call] for call in calls]
        if spared or self._has_spared:
            self._consumer._spare(spared)
            self._has_spared = bool(spared)


def _end_done(running: Running[_Future]) -> None:
    """Forget the handlers that have ended; raises the exception of one that failed."""
    for call in [call for call in running.calls if call.done()]:
        running.end(call)
        call.result()


class _HandlerThreads:
    """Threads that call the handler, begun when they are needed. No end of the program waits for one whose handler hangs."""

    def __init__(self, handle: Callable[[Message], None]) -> None:
        self._handle = handle
        self._calls: SimpleQueue[tuple[Future[None], Message] | None] = SimpleQueue()
        self._count = 0

    def call(self, message: Message, busy: int) -> Future[None]:
        """Let a thread handle a message, beside at most `busy` others."""
        called = Future[None]()
        self._calls.put((called, message))
        if self._count <= busy:
            threading.Thread(target=self._run, name=f"pyengine-handler_{self._count}", daemon=True).start()
            self._count += 1
        return called

    def end(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            called, message = call
            try:
                self._handle(message)
            except BaseException as error:  # noqa: BLE001 - ends run_consumer()
                called.set_exception(error)
            else:
                called.set_result(None)
            del call, called, message  # not kept until the next one comes


def _handle_in_threads(consumer: Consumer, handle: Callable[[Message], None], concurrency: int, stopping: threading.Event) -> None:
    threads = _HandlerThreads(handle)
    running: Running[Future[None]] = Running(consumer, concurrency)
    try:
        while not stopping.is_set():
            if room := running.room():
                for message in consumer.pull(room, timeout_s=PULL_S):
                    running.begin(threads.call(message, len(running.calls)), message)
            else:
                wait(running.calls, PULL_S, FIRST_COMPLETED)
            _end_done(running)
        consumer._leave()
        while running.calls:
            wait(running.calls)
            _end_done(running)
    except BaseException as error:
        stopping.set()  # wakes handlers' threads that wait before a next try
        consumer._leave()
        if not isinstance(error, KeyboardInterrupt):  # a second signal, which waits for no handler
            wait(running.calls)
        raise
    finally:
        threads.end()


async def _handle_in_tasks(consumer: Consumer, handler: Callable[[Message], Awaitable[object]], concurrency: int,
                           delays: _Delays, stopped: asyncio.Future[Any]) -> None:
    running: Running[asyncio.Task[None]] = Running(consumer, concurrency)
    try:
        while not stopped.done():
            if room := running.room():
                for message in await consumer.pull_async(room, timeout_s=PULL_S):
                    running.begin(asyncio.ensure_future(_handle_async(consumer, handler, delays, stopped, message)), message)
            else:
                await asyncio.wait({*running.calls, stopped}, timeout=PULL_S, return_when=asyncio.FIRST_COMPLETED)
            _end_done(running)
        consumer._leave()
        while running.calls:
            await asyncio.wait(running.calls)
            _end_done(running)
    finally:
        for task in running.calls:
            task.cancel()
        await asyncio.gather(*running.calls, return_exceptions=True)


async def _handle_async(
    consumer: Consumer, handler: Callable[[Message], Awaitable[object]], delays: _Delays,
    stopped: asyncio.Future[Any], message: Message,
) -> None:
    while True:
        try:
            result = handler(message)
            if is_awaitable := inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:  # the message is delivered again
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # otherwise it has awaited what others have cancelled
            failure = delays.after(message, error)
        else:
            if not is_awaitable:
                raise UsageError("the handler returns no awaitable: use run_consumer")
            consumer.ack(message)
            return
        if await arguments.in_thread(partial(_is_given_back, consumer, message, *failure)):
            return
        await asyncio.wait({stopped}, timeout=HANDLE_AGAIN_S)
        if stopped.done():
            return


def _is_given_back(consumer: Consumer, message: Message, level: int | None, options: dict[str, Any]) -> bool:
    """Give a message back; False if that is not possible now."""
    try:
        give_back(consumer, message, level, **options)
    except EngineError as error:
        _LOG.warning("%s cannot be given back and is handled again in %g s: %s", message.msg_id, HANDLE_AGAIN_S, error)
        return False
    return True


def give_back(consumer: Consumer, message: Message, level: int | None, **options: Any) -> None:
    """Give a message back, with level -1 as a dead letter; PutError or EngineUnavailableError if that is not possible now.

    If it never is, the message counts as done, and the log says so: those after it must not wait for it.
    """
    try:
        consumer.retry(message, level, **options)
    except PutError as error:
        if not error.result.status.is_lasting:
            raise
        _LOG.error("%s of %s failed and can neither be delivered again nor be a dead letter of %s, so it counts as done; read it by "
                   "its id: %s", message.msg_id, message.topic, consumer.group, error)
        if not consumer._options.auto_commit:
            consumer.ack(message)


def _checked(handler: object, concurrency: int, options: ConsumeOptions, *, is_async: bool, group: str) -> tuple[dict[str, Any], Patience]:
    """Return the options for consume(), and how long to wait for a store."""
    if not callable(handler):
        raise TypeError(f"handler must be callable, not {type(handler).__name__}")
    if not is_async and inspect.iscoroutinefunction(handler):
        raise UsageError("the handler is a coroutine function: use run_consumer_async")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise UsageError("the handler is a generator function, which a call does not run: leave yield out")
    arguments.text(group, "group")
    if arguments.integer(concurrency, "concurrency") < 1:
        raise UsageError(f"concurrency is {concurrency}; give at least 1")
    others = {name: value for name, value in options.items() if name not in inspect.signature(consume).parameters}
    check_keywords(run_consumer_async if is_async else run_consumer, others, consume)
    if "auto_commit" in options:
        raise UsageError("run_consumer acknowledges each message itself: leave auto_commit out")
    given: dict[str, Any] = {**options}
    return given, Patience(arguments.number(given.pop("timeout_s", CONNECT_TIMEOUT_S), "timeout_s"))


_stops: list[Callable[[], object]] = []  # of the calls in the main thread
_before: dict[int, Any] = {}             # the program's handlers of the signals, while there are calls and no signal has come
_passed: list[int] = []                  # signals that go to the program's handler after the last call


@contextlib.contextmanager
def _signals_to(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT inside the block; in the main thread only.

    The signal ends the other blocks too. After the last one it goes to the handler that the program had: a server ends as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stops.append(stop)
    try:
        if len(_stops) > 1 and not _before:  # the others end after a signal
            stop()
        for number in (signal.SIGTERM, signal.SIGINT) if len(_stops) == 1 else ():
            usual = signal.getsignal(number)
            _before[number] = _default(number) if usual is _asked else usual
            signal.signal(number, _asked)
        yield
    finally:
        _stops.remove(stop)
        if not _stops:
            _restore()
            while _passed:
                signal.raise_signal(_passed.pop())


def _default(number: int) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _restore() -> None:
    for number, usual in _before.items():
        if signal.getsignal(number) is _asked:
            signal.signal(number, usual)
    _before.clear()


def _asked(number: int, frame: FrameType | None) -> None:
    if not _stops:  # a library that had replaced this handler has put it back
        signal.signal(number, _default(number))
        signal.raise_signal(number)
        return
    usual = _before.get(number)
    _restore()
    # asyncio.run() would cancel the program at SIGINT, with the handlers that the end waits for; what loop.add_signal_handler() has is
    # called by the loop itself
    is_of_loop = (isinstance(usual, partial) and isinstance(getattr(usual.func, "__self__", None), asyncio.Runner)
                  or (getattr(usual, "__module__", None) or "").startswith(("asyncio.", "uvloop")))
    if callable(usual) and usual is not signal.default_int_handler and not is_of_loop:
        _passed.append(number)
    for stop in [*_stops]:
        stop()


# ---- for brokers of task libraries, whose queues are topics with a group of the same name ----

SESSION_TIMEOUT_S = 3600.0  # of a worker that is stopped: the queues of a killed one are free at once, that of a task that hangs is kept


@contextlib.contextmanager
def stored_is_sent() -> Iterator[None]:
    """Log that a task is stored less durably than asked: for an error its library would send it again."""
    try:
        yield
    except PutNotDurableError as error:
        _LOG.warning("a task counts as sent: %s", error)


def undone(store: str | os.PathLike[str], topic: str) -> int:
    """Return how many messages of the topic its group has not stored as done: all, if the group is new."""
    with open_store(store) as reader:
        reaches(reader, "last")
        return sum(queue.lag for queue in queue_lags(reader, topic, ConsumerOffsets(reader.root).read(topic, topic), "written").values())


def skip_undone(store: str | os.PathLike[str], topic: str) -> None:
    """Let the topic's group, which may be new, begin after the messages that have arrived."""
    groups = ConsumerGroups(store)
    if not groups.groups(topic=topic, group=topic):
        consume(store, topic, group=topic, from_="last", auto_commit=False).close()
    elif undone(store, topic):
        groups.reset(topic, topic, "last")
