"""What tests see of a producer and of a consumer from inside; only here are these parts named."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pyengine
from pyengine import arguments


def submitter(producer):
    """A producer's Submitter: its session, its lock, its fast path in C."""
    return producer._puts


def awaiting_loops(producer):
    """The event loops whose tasks await puts of a producer now."""
    return producer._puts._pending._loops


def locks_of(producer, futures) -> list:
    """The locks of a producer, of its threads and of futures of its puts, but the one that the answers' thread has."""
    puts = producer._puts
    return [puts.lock, puts._opening, puts._pending._starting, puts._queued._starting, *(future._condition for future in futures)]


def housekeep(consumer) -> None:
    """Do now what a consumer's thread does: join, claim and release queues, commit what is due; raises its errors."""
    consumer._housekeep()


def housekeep_once(consumer) -> None:
    """The same as the thread does it, which tells the program of errors."""
    consumer._housekeep_once()


@contextlib.contextmanager
def before_it_looks(consumer):
    """In the block a consumer's own thread does nothing: the program asks for messages before that has seen what has changed."""
    with consumer._work:
        yield


def age_leaving(consumer, age_s: float) -> None:
    """Let a consumer's queues that are another member's share be that for so much longer."""
    for held in consumer._held.values():
        if held.releasing_since_s is not None:
            held.releasing_since_s -= age_s


def consumers_of(module, monkeypatch) -> list:
    """The consumers that a module makes from here on."""
    made = []

    @functools.wraps(pyengine.consume)
    def consume(*args, **options):
        made.append(pyengine.consume(*args, **options))
        return made[-1]

    monkeypatch.setattr(module, "consume", consume)
    return made


def on_next_untake(monkeypatch, call) -> None:
    """Call this once, when messages that no program has begun with are next taken back, as another thread may do."""
    take_back = pyengine.Consumer._take_back

    def call_first(*arguments):
        monkeypatch.setattr(pyengine.Consumer, "_take_back", take_back)
        call()
        take_back(*arguments)

    monkeypatch.setattr(pyengine.Consumer, "_take_back", call_first)


class Refusing(ThreadPoolExecutor):
    """An event loop's default executor whose threads are held, for ever perhaps, by a program's own calls."""

    def submit(self, *_, **__):
        raise AssertionError("this takes a thread that to_thread() and look-ups of names need")


def leave_cancelled(manager, use=lambda it: None) -> None:
    """Use a manager's `async with` block, whose end is cancelled, twice, before its thread has begun, and waits for that."""
    is_free, left, own_thread = threading.Event(), asyncio.Event(), arguments.own_thread

    async def block() -> None:
        async with manager as it:
            use(it)
            left.set()

    async def main() -> None:
        with mock.patch.object(arguments, "own_thread", lambda call: own_thread(lambda: is_free.wait() and call())):
            using = asyncio.create_task(block())
            await left.wait()
            try:
                for _ in range(2):
                    using.cancel()
                    for _ in range(10):  # turns of the loop
                        await asyncio.sleep(0)
                    assert not using.done()
            finally:
                is_free.set()
            await asyncio.wait({using})
            assert using.cancelled()

    asyncio.run(main())


def leave_unfinished(consumer) -> None:
    """End a consumer as a kill does: what is not stored of it is not done."""
    consumer._close(None)


def reader_of(consumer):
    """A consumer's reader of the store."""
    return consumer._reader


def session_of(consumer):
    """A consumer's membership of its group."""
    return consumer._session


def members_of(consumer):
    """The file of the members of a consumer's group."""
    return consumer._session._members


def epoch_of(consumer):
    """The number of the last recovery that a consumer has seen."""
    return consumer._epoch


def retries_of(consumer):
    """The consumer of the group's retries in a consumer; None while there are none."""
    return consumer._retried


def is_asleep(consumer) -> bool:
    """Whether a call waits in C for messages."""
    return bool(consumer._sleeper._struct.is_asleep)


def due_commit(consumer, due_s: float | None = None) -> None:
    """Let the next commit be due at a time of the monotonic clock, at once without one."""
    consumer._commit_due_s = due_s or 0.0
