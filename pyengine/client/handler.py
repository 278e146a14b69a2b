"""`pyengine.run_consumer`: call a function with each message of a topic, until a signal or event ends it.

    def handle(message):
        send_invoice(message.body)

    pyengine.run_consumer("my-store", "orders", "billing", handle, concurrency=4)

A message is acknowledged when the handler returns and given back (Consumer.retry) when it raises. If it cannot be given
back now, because no engine runs or the disk is full, the handler gets it again after HANDLE_AGAIN_S, as in RocketMQ's
ConsumeMessageConcurrentlyService. A message that can never be given back is logged as an error and counts as done.
A kill loses no message: those that were not acknowledged are delivered again. One that was delivered twice and never finished may
be what killed its readers, so it runs alone (_Running): no other message is counted with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar, Unpack

from pyengine import arguments
from pyengine.client.consumer import ConsumeOptions, Consumer, Topics, consume
from pyengine.client.consumer_groups import ConsumerGroups
from pyengine.errors import BadMessageError, EngineError, UsageError
from pyengine.formats.delayed_message import DELIVER_AT_DAYS_MAX
from pyengine.formats.record import Message
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.session_client import CONNECT_TIMEOUT_S, Patience
from pyengine.results import PutError
from pyengine.storage.config import check_keywords

PULL_S = 0.5           # longest wait for messages before the request to end is checked
HANDLE_AGAIN_S = 5.0
ALONE_S = 10.0         # longest wait of a message that runs alone for the others, and of the others for it
_LOG = logging.getLogger("pyengine.client.handler")
_Call = TypeVar("_Call", bound="Future[None] | asyncio.Task[None]")


@dataclass(frozen=True, slots=True)
class _Delays:
    """When a failed message comes again: the delay level, None for RocketMQ's or for `backoff`."""

    level: int | None
    backoff: Callable[[int], float] | None

    @classmethod
    def of(cls, level: int | None, backoff: float | Sequence[float] | Callable[[int], float] | None) -> _Delays:
        """Check the arguments of run_consumer()."""
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

    def after(self, message: Message, error: Exception) -> tuple[int | None, dict[str, Any]]:
        """Return the delay level, and the keywords of Consumer.retry, for a message whose handler has raised this error."""
        if isinstance(error, BadMessageError):
            _LOG.error("%s of %s can never be handled, and becomes a dead letter: %s", message.msg_id, message.topic, error)
            return -1, {"reason": str(error)}
        _LOG.exception("the handler failed for %s, which is delivered again", message.msg_id)
        if self.backoff is None:
            return self.level, {}
        try:
            delay_s = arguments.number(self.backoff(message.reconsume_times), "what backoff returns")
            return None, {"delay_s": min(delay_s, DELIVER_AT_DAYS_MAX * 86_400)}
        except Exception:  # noqa: BLE001 - the program's own: the message must not be lost for it
            _LOG.exception("backoff failed for %s, which comes again after the usual delay", message.msg_id)
            return None, {}


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
    given: dict[str, Any] = {**options}
    _check(handler, concurrency, given, is_async=False)
    delays = _Delays.of(delay_level, backoff)
    stopping = threading.Event() if stop is None else stop
    if isinstance(stop, asyncio.Event) or not hasattr(stopping, "set"):
        raise arguments.wrong_type(stop, "stop", "a threading.Event; run_consumer_async takes an asyncio.Event")
    patience = Patience(arguments.number(given.pop("timeout_s", CONNECT_TIMEOUT_S), "timeout_s"))
    with _signals_to(stopping.set):
        while not stopping.is_set():
            try:
                consumer = consume(store, topic, group=group, auto_commit=False, timeout_s=0, **given)
            except EngineError as error:  # the store or its engine may start later
                stopping.wait(patience.pause_s(error))
                continue
            with consumer:
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
    given: dict[str, Any] = {**options}
    _check(handler, concurrency, given, is_async=True)
    delays = _Delays.of(delay_level, backoff)
    patience = Patience(arguments.number(given.pop("timeout_s", CONNECT_TIMEOUT_S), "timeout_s"))
    loop = arguments.event_loop()
    stopping = asyncio.Event() if stop is None else stop
    if not isinstance(stopping, asyncio.Event):  # whose wait() would stop the loop
        raise arguments.wrong_type(stop, "stop", "an asyncio.Event; run_consumer takes a threading.Event")
    with _signals_to(lambda: loop.call_soon_threadsafe(stopping.set)):
        stopped = asyncio.ensure_future(stopping.wait())
        try:
            while not stopping.is_set():
                try:
                    consumer = await loop.run_in_executor(
                        None, lambda: consume(store, topic, group=group, auto_commit=False, timeout_s=0, **given))
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
            handler(message)
        except Exception as error:  # noqa: BLE001 - the handler's own: the message is delivered again
            level, options = delays.after(message, error)
        else:
            consumer.ack(message)
            return
        try:
            consumer.retry(message, level, **options)
            return
        except EngineError as error:
            if _is_given_up(consumer, message, error):
                return
        if stopping.wait(HANDLE_AGAIN_S):
            return


class _Running(Generic[_Call]):
    """The handlers that run at once. A suspect, which may have killed its readers, runs alone.

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

    def begin(self, messages: Iterable[Message], call: Callable[[Message], _Call]) -> None:
        """Call the handler with these messages."""
        for message in messages:
            begun = call(message)
            self.calls[begun] = message
            if self._consumer._is_suspect(message):
                self._suspect = begun

    def _spare(self, calls: Iterable[_Call]) -> None:
        spared = [self.calls[call] for call in calls]
        if spared or self._has_spared:
            self._consumer._spare(spared)
            self._has_spared = bool(spared)

    def end(self) -> None:
        """Forget the handlers that have ended; raises the exception of one that failed."""
        for call in [call for call in self.calls if call.done()]:
            del self.calls[call]
            self._overdue.discard(call)
            if call is self._suspect:
                self._suspect = None
            call.result()


def _handle_in_threads(consumer: Consumer, handle: Callable[[Message], None], concurrency: int, stopping: threading.Event) -> None:
    with ThreadPoolExecutor(concurrency, thread_name_prefix="pyengine-handler") as pool:
        running: _Running[Future[None]] = _Running(consumer, concurrency)
        try:
            while not stopping.is_set():
                if room := running.room():
                    running.begin(consumer.pull(room, timeout_s=PULL_S), lambda message: pool.submit(handle, message))
                else:
                    wait(running.calls, PULL_S, FIRST_COMPLETED)
                running.end()
            while running.calls:
                wait(running.calls)
                running.end()
        except BaseException:
            stopping.set()  # wakes handlers' threads that wait before a next try
            raise


async def _handle_in_tasks(consumer: Consumer, handler: Callable[[Message], Awaitable[object]], concurrency: int,
                           delays: _Delays, stopped: asyncio.Future[Any]) -> None:
    running: _Running[asyncio.Task[None]] = _Running(consumer, concurrency)
    try:
        while not stopped.done():
            if room := running.room():
                running.begin(await consumer.pull_async(room, timeout_s=PULL_S), lambda message: asyncio.ensure_future(
                    _handle_async(consumer, handler, delays, stopped, message)))
            else:
                await asyncio.wait({*running.calls, stopped}, timeout=PULL_S, return_when=asyncio.FIRST_COMPLETED)
            running.end()
        while running.calls:
            await asyncio.wait(running.calls)
            running.end()
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
            await handler(message)
        except Exception as error:  # noqa: BLE001 - the handler's own: the message is delivered again
            level, options = delays.after(message, error)
        else:
            consumer.ack(message)
            return
        try:
            await consumer.retry_async(message, level, **options)
            return
        except EngineError as error:
            if _is_given_up(consumer, message, error):
                return
        await asyncio.wait({stopped}, timeout=HANDLE_AGAIN_S)
        if stopped.done():
            return


def _is_given_up(consumer: Consumer, message: Message, error: EngineError) -> bool:
    """Report a message that could not be given back. If it never can be, it counts as done: those after it must not wait for it."""
    if isinstance(error, PutError) and error.result.status.is_lasting:
        _LOG.error("%s of %s failed and can neither be delivered again nor be a dead letter of %s, so it counts as done; read it by "
                   "its id: %s", message.msg_id, message.topic, consumer.group, error)
        consumer.ack(message)
        return True
    _LOG.warning("%s cannot be given back and is handled again in %g s: %s", message.msg_id, HANDLE_AGAIN_S, error)
    return False


def _check(handler: object, concurrency: int, options: dict[str, Any], *, is_async: bool) -> None:
    if not callable(handler):
        raise TypeError(f"handler must be callable, not {type(handler).__name__}")
    is_coroutine = inspect.iscoroutinefunction(handler)
    if is_coroutine and not is_async:
        raise UsageError("the handler is a coroutine function: use run_consumer_async")
    if is_async and inspect.isfunction(handler) and not is_coroutine:
        raise UsageError("the handler is not a coroutine function: use run_consumer")
    if arguments.integer(concurrency, "concurrency") < 1:
        raise UsageError(f"concurrency is {concurrency}; give at least 1")
    others = {name: value for name, value in options.items() if name not in inspect.signature(consume).parameters}
    check_keywords(run_consumer_async if is_async else run_consumer, others, consume)
    if "auto_commit" in options:
        raise UsageError("run_consumer acknowledges each message itself: leave auto_commit out")


@contextlib.contextmanager
def _signals_to(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT inside the block; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, usual in before.items():
            signal.signal(number, usual)
        before.clear()

    def asked(number: int, frame: FrameType | None) -> None:
        restore()
        stop()

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.getsignal(number)
            signal.signal(number, asked)
        yield
    finally:
        restore()


# ---- for brokers of task libraries, whose queues are topics with a group of the same name ----


def give_up(consumer: Consumer, message: Message, reason: str = "") -> None:
    """Make a message a dead letter of the group; PutError or EngineUnavailableError if that is not possible now.

    If it can never be one, it counts as done, and the log says so.
    """
    try:
        consumer.retry(message, delay_level=-1, reason=reason)
    except PutError as error:
        if not error.result.status.is_lasting:
            raise
        _LOG.error("%s failed and can never be a dead letter of %s, so it counts as done; read it by its id: %s", message.msg_id,
                   consumer.group, error)
        if not consumer._options.auto_commit:
            consumer.ack(message)


def undone(store: str | os.PathLike[str], topic: str) -> int:
    """Return how many messages of the topic its group has not stored as done: all, if the group is new."""
    groups = ConsumerGroups(store).groups(topic=topic, group=topic)
    if groups:
        return sum(each.lag for each in groups)
    with open_store(store) as reader:
        return sum(reader.queue_end(topic, queue_id) for queue_id in reader.queue_ids(topic))


def skip_undone(store: str | os.PathLike[str], topic: str) -> None:
    """Let the topic's group, which may be new, begin after the messages that have arrived."""
    groups = ConsumerGroups(store)
    if groups.groups(topic=topic, group=topic):
        groups.reset(topic, topic, "last")
    else:
        consume(store, topic, group=topic, from_="last", auto_commit=False).close()
