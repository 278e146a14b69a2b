"""Puts that were submitted and are waited for by a Future.

One thread per producer, started with the first such put, takes the answers in order of
submission and resolves the futures. A put that outlives a caller's patience stays here:
its Future is resolved when the engine answers after all, or when the session is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future

from pyengine.native.flush import monotonic_ns
from pyengine.native.producer import AGAIN, ProducerSession

LOOK_NS = 250_000_000


class PutFuture(Future):
    """A concurrent.futures.Future that can be awaited as well."""

    def __await__(self) -> Generator[object, None, object]:
        import asyncio  # 10 ms that only who awaits shall pay

        return asyncio.wrap_future(self).__await__()


class PendingPuts:
    """The puts of one session whose answers are still to come.

    `finish(session, code, answer, context, give_up_ns)` makes the result of one put: code 0,
    CLOSED or AGAIN (closing), the answer tuple (empty when there is none), whatever was
    given to add(), and when to stop waiting for durability (0: as the context says). It
    runs in this object's thread, and so do callbacks on the futures.
    """

    def __init__(self, session: ProducerSession,
                 finish: Callable[[ProducerSession, int, tuple, object, int], object]) -> None:
        self._session = session
        self._finish = finish
        self.waiting: deque[tuple[int, PutFuture, object]] = deque()  # to be looked at only; empty: nobody is before you
        self._changed = threading.Condition()
        self._closed = False
        self._give_up_ns = 0  # once closed: all that is left shares one short patience
        self._thread: threading.Thread | None = None

    def add(self, sequence: int, context: object) -> PutFuture:
        """A future for the entry just submitted; the caller holds the producer's lock."""
        future = PutFuture()
        future.set_running_or_notify_cancel()
        with self._changed:
            if not self.waiting:
                self._session.set_oldest_unread(sequence)
            self.waiting.append((sequence, future, context))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pyengine-answers", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.waiting and not self._closed:
                    self._changed.wait()
                if not self.waiting:
                    return
                sequence, future, context = self.waiting[0]
            deadline_ns = self._give_up_ns if self._closed else monotonic_ns() + LOOK_NS
            code, answer = self._session.wait_acked(sequence, deadline_ns)
            if code == AGAIN and not self._closed:
                continue
            try:
                result = self._finish(self._session, code, answer, context, self._give_up_ns)
            except BaseException as error:  # noqa: BLE001 - a future must never be left hanging
                self._drop(sequence)
                future.set_exception(error)
                continue
            self._drop(sequence)
            future.set_result(result)

    def _drop(self, sequence: int) -> None:
        with self._changed:
            self.waiting.popleft()
            self._session.set_oldest_unread(sequence + 1)

    @property
    def in_own_thread(self) -> bool:
        """Whether the caller runs in the answers' thread: in a callback of a future."""
        return self._thread is not None and self._thread is threading.current_thread()

    def close(self) -> None:
        """Resolve what is left (answered or indeterminate) and end the thread. Not from the answers' thread."""
        with self._changed:
            self._give_up_ns = monotonic_ns() + LOOK_NS
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread.ident is not None:  # Ctrl-C may come before it has started
            self._thread.join()
