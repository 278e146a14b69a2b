"""A producer's transactions: messages that consumers see only after their producer has committed them.

They are RocketMQ's half messages, with their check-back (half_messages.py).
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, Unpack, cast

from pyengine import arguments
from pyengine.client.half_messages import HalfMessages, Outcome, PreparedCheck, real_queue
from pyengine.client.outgoing import Body, MessageOptions, OutgoingMessage, RawMessage
from pyengine.errors import EngineError, UsageError
from pyengine.formats.constants import (
    PROPERTY_CHECK_IMMUNITY_TIME,
    PROPERTY_PRODUCER_GROUP,
)
from pyengine.formats.record import Message
from pyengine.results import PutIndeterminateError, PutResult, PutStatus

Checker = Callable[[Message], Outcome | None]
"""Decides about an undecided transaction; None: ask again later."""
_OF_PARENT = "this transaction was begun before a fork: the parent ends it; begin one of its own in the child"
_LOG = logging.getLogger("pyengine.client.transactions")


class Transaction(arguments.AsyncBlock):
    """The messages of one transaction: a `with` or `async with` block, whose end commits them, or rolls them back after an exception."""

    def __init__(self, owner: GroupTransactions, group: str, check_after_s: int | None) -> None:
        self._owner = owner
        self._group = group
        self._check_after_s = check_after_s
        self._halves: list[Message] = []
        self._keys: set[str] = set()
        self._is_open: bool | None = None  # until the block begins
        self.results: list[PutResult] = []
        """After the block."""

    def __enter__(self) -> Self:
        self._halves, self._keys, self.results, self._is_open = [], set(), [], True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._owner.is_of_parent:
            if error is None:
                raise UsageError(_OF_PARENT)
            return
        try:
            self._end("commit" if error is None else "rollback")
        except EngineError as failed:
            if error is None:
                raise
            # The program's own exception says more; the checker is called later.
            _LOG.warning("a transaction of %s could not be rolled back: %s", self._group, failed)
        finally:
            self._owner.open_keys -= self._keys

    def put(self, topic: str, body: Body, *, unique_key: str | None = None, **options: Unpack[MessageOptions]) -> PutResult:
        """Store one message that consumers do not see before the commit; the result is the half message's.

        A `delay_level` begins with the commit.
        """
        if self._owner.is_of_parent:
            raise UsageError(_OF_PARENT)
        if not self._is_open:  # nothing would commit the message
            when = "has not begun" if self._is_open is None else "has ended"
            raise UsageError(f"the block of this transaction {when}: put() belongs inside of it")
        given: dict[str, Any] = {**options}
        arguments.known_keywords("put", given, ("topic", "body", "unique_key", *MessageOptions.__annotations__))
        timeout_s, unique_key = given.pop("timeout_s", None), unique_key or uuid.uuid4().hex.upper()
        message = OutgoingMessage(topic, body, unique_key=unique_key, **given)
        more = {PROPERTY_PRODUCER_GROUP: self._group}
        if self._check_after_s is not None:
            more[PROPERTY_CHECK_IMMUNITY_TIME] = str(self._check_after_s)
        producer = self._owner.producer
        raw = producer._checked(producer._transaction_raw, message, more, timeout_s)
        if not isinstance(raw, RawMessage):
            return cast(PutResult, raw.raise_for_status())
        self._keys.add(unique_key)
        self._owner.open_keys.add(unique_key)
        with producer._files():
            result, half = self._owner.halves.prepare(raw, timeout_s)
        if half is None:
            return result.raise_for_status()
        self._halves.append(half)
        return cast(PutResult, producer._puts.give(result))

    def _end(self, outcome: Outcome) -> None:
        """End all messages; after all were tried raises a signal handler's error, or the first. The check-back asks about those left."""
        self._is_open = False
        first_error: BaseException | None = None
        for half in self._halves:
            try:
                with self._owner.producer._files(partial(_closed, half)):
                    result = self._owner.halves.end(half, outcome)
                if outcome == "commit":
                    self.results.append(result)
                if not result.stored:
                    raise _undecided(result)
                self._owner.producer._puts.give(result)
            except BaseException as error:  # noqa: BLE001 - of a signal handler too: the others must not stay behind
                first_error = first_error if first_error and isinstance(error, EngineError) else error
        if first_error is not None:
            raise first_error


def _closed(half: Message, why: str) -> PutIndeterminateError:
    topic, queue_id = real_queue(half)
    return _undecided(PutResult(PutStatus.SERVICE_NOT_AVAILABLE, topic=topic, queue_id=queue_id, reason=why))


def _undecided(result: PutResult) -> PutIndeterminateError:
    """Return the error of a message whose end is refused, unlike its half message."""
    return PutIndeterminateError(f"{result.status.name}: {result.reason}; the message stays undecided, and the checker is asked about it "
                                 "later", result)


class GroupTransactions:
    """The transactions of one producer: the open ones, the checkers by group, and the thread that calls the checkers."""

    def __init__(self, producer: Any) -> None:
        """`producer`: a weak proxy of a Producer. A bound method of it would keep that alive, so puts look it up anew."""
        self.producer = producer
        self.halves = HalfMessages(producer._puts.root, lambda message, timeout_s: producer._put_raw(message, timeout_s),
                                   lambda: producer._puts.settings)
        self._check = PreparedCheck(self.halves)
        self._checkers: dict[str, Checker] = {}
        self.open_keys: set[str] = set()  # of the messages of open blocks, about which this process's own checker is not asked
        self._pid = os.getpid()
        self._is_closing = False
        self._wake: SimpleQueue[None] = SimpleQueue()  # which has no lock that a thread of the parent could have at a fork
        self._asking = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_of_parent(self) -> bool:
        """Whether this is a forked child of the process that has begun these transactions."""
        return os.getpid() != self._pid

    def transaction(self, group: str, checker: Checker | None, check_after_s: int | None) -> Transaction:
        if checker is not None:
            self._checkers[group] = checker
            if self._thread is None and not self._is_closing:
                thread = threading.Thread(target=self._loop, name="pyengine-transactions", daemon=True)
                if self._thread is None:  # no other thread was faster
                    self._thread = thread
                    thread.start()
        return Transaction(self, group, check_after_s)

    def check_now(self, again_after_ms: int = 0) -> int:
        """Run one round: call this producer's checkers for undecided messages; return the number of messages.

        It raises the first error after all were asked about, since each of them has one try less now.
        """
        with self._asking:
            if self._is_closing:  # the thread has waited for a call that a signal handler has interrupted to close
                return 0
            found = self._check.round(lambda half: half.properties.get(PROPERTY_PRODUCER_GROUP, "") in self._checkers, again_after_ms)
            asked = [half for half in found if half.uniq_key not in self.open_keys]
            first_error: EngineError | None = None
            for half in asked:
                try:
                    self._ask(half)
                except EngineError as error:
                    first_error = first_error or error
            if first_error is not None:
                raise first_error
            return len(asked)

    def _ask(self, half: Message) -> None:
        topic, queue_id = real_queue(half)
        group = half.properties.get(PROPERTY_PRODUCER_GROUP, "")
        try:
            outcome = self._checkers[group](replace(half, topic=topic, queue_id=queue_id))
        except Exception:  # noqa: BLE001 - the checker's own: the next round calls it again
            _LOG.exception("the checker of %s failed for %s, and is asked again", group, half.uniq_key)
            return
        if outcome is not None:
            self.halves.end(half, outcome)

    def _loop(self) -> None:
        while not self._is_closing:
            try:
                interval_ms = self.halves.config.transaction_check_interval_ms
                with self.producer._files():
                    self.check_now(interval_ms // 2)
            except ReferenceError:  # the producer was dropped
                return
            except Exception as error:  # noqa: BLE001 - the next round may succeed, and only this thread asks the checkers
                _LOG.warning("transactions could not be checked: %s", str(error) if isinstance(error, EngineError) else repr(error))
            with suppress(Empty):
                self._wake.get(timeout=interval_ms / 1000)

    def stop_asking(self) -> None:
        """End the thread, without waiting for it."""
        self._is_closing = True
        self._wake.put(None)

    def end_asking(self, waits: bool) -> None:
        """End the thread, and wait for it if `waits`."""
        self.stop_asking()
        if self._thread is not None and waits:
            self._thread.join()

    def close(self) -> None:
        self.stop_asking()
        self.halves.close()
