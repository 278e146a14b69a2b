"""A taskiq broker whose tasks are messages of a pyengine store: `pyengine.taskiq.PyengineBroker`.

    broker = PyengineBroker("my-store")      # an engine runs there: `pyengine start my-store`

At least once: taskiq acknowledges a task when it has ended, and the acknowledgements are stored every `commit_interval_s`; what
runs twice after a kill is in docs/tasks.md. Needs taskiq, of the extra `taskiq`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from pyengine import arguments
from pyengine.client.consumer import Consumer, Sharing, consume
from pyengine.client.handler import SESSION_TIMEOUT_S, Running, stored_is_sent
from pyengine.client.outgoing import deliver_at_ms, seconds_ms
from pyengine.client.producer import Producer, connect
from pyengine.errors import UsageError, require_extra
from pyengine.formats.record import Message
from pyengine.storage.config_table import QUEUE_NUMS_NEW, TopicConfig, TopicConfigs

try:
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage
except ImportError:
    require_extra("taskiq", name="taskiq")
    raise

ROOM_S = 0.02  # how often a task that must not run beside others looks for their end
WAKE_S = 0.5  # taskiq's handler of SIGTERM does not wake the event loop, so something has to


class PyengineBroker(AsyncBroker):
    """Sends tasks as messages of `topic`, and runs those that the workers of `group` get.

    The workers share the topic's queues: `queues` is their number in a topic that is new. The label `delay` (seconds) and the
    label `deliver_at` (a datetime with a zone, or ms since 1970) run a task later, the later one if both are given.
    """

    def __init__(self, store: str | os.PathLike[str], *, topic: str = "taskiq", group: str = "taskiq", queues: int = QUEUE_NUMS_NEW,
                 commit_interval_s: float = 1.0, session_timeout_s: float = SESSION_TIMEOUT_S, sharing: Sharing = "queues") -> None:
        super().__init__()
        self._store = arguments.local_path(store).absolute()
        self._group = group
        self._config = TopicConfig(topic, queues, queues).check()
        self._options: dict[str, Any] = {
            "commit_interval_s": commit_interval_s, "session_timeout_s": session_timeout_s, "sharing": sharing}
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._listens = 0  # that have not ended: one that is left by `break` ends later

    async def startup(self) -> None:
        """Connect to the engine, for which this waits some seconds, and make the topic; then start taskiq's own parts."""
        if self._producer is None:
            self._producer = await arguments.in_thread(self._connect, Producer.close)
        await super().startup()

    def _connect(self) -> Producer:
        producer = connect(self._store)
        try:
            TopicConfigs(self._store).ensure(self._config)
        except BaseException:
            producer.close()
            raise
        return producer

    async def kick(self, message: BrokerMessage) -> None:
        """Store a task; taskiq raises SendTaskError from an error here, for example a PutError."""
        if self._producer is None:
            raise UsageError("the broker is not started: `await broker.startup()` first")
        with stored_is_sent():
            await self._producer.put_async(self._config.topic, message.message, keys=message.task_id, deliver_at=_due_ms(message.labels))

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks as they arrive. They can be acknowledged until shutdown(), which comes after the last running one."""
        if self._consumer is None:
            self._consumer = await arguments.in_thread(
                partial(consume, self._store, self._config.topic, group=self._group, auto_commit=False, **self._options), Consumer.close)
        consumer = self._consumer
        running: Running[int] = Running(consumer, sys.maxsize)
        waking: asyncio.TimerHandle

        def wake() -> None:
            nonlocal waking
            waking = asyncio.get_running_loop().call_later(WAKE_S, wake)

        def ack(message: Message) -> None:
            consumer.ack(message)
            running.end(message.physical_offset)

        wake()
        self._listens += 1
        try:
            await arguments.in_thread(consumer._stay)
            while True:
                if not running.room():
                    await asyncio.sleep(ROOM_S)
                    continue
                for message in await consumer.pull_async(1, timeout_s=WAKE_S):
                    running.begin(message.physical_offset, message)
                    yield AckableMessage(data=message.body, ack=partial(ack, message))
        finally:  # a worker waits for its tasks
            waking.cancel()
            self._listens -= 1
            if not self._listens:
                consumer._leave()

    async def shutdown(self) -> None:
        """Stop taskiq's own parts, store the acknowledgements, and disconnect. Tasks that are not acknowledged come again."""
        try:
            await super().shutdown()
        finally:
            consumer, self._consumer = self._consumer, None
            producer, self._producer = self._producer, None
            await arguments.in_thread(partial(_close, consumer, producer))


def _close(*parts: Consumer | Producer | None) -> None:
    for each in parts:
        if each is not None:
            each.close()


def _due_ms(labels: Mapping[str, object]) -> int | None:
    """Return when a task with these labels is due, in ms since 1970; None for at once. UsageError for labels that say no time."""
    times_ms = []
    if (delay := labels.get("delay")) is not None:
        try:
            times_ms.append(seconds_ms(max(float(str(delay)), 0), "the label delay"))
        except ValueError:
            raise UsageError(f"the label delay is {delay!r}: give a number of seconds") from None
    if (at := labels.get("deliver_at")) is not None:
        text = str(at)  # taskiq makes texts of labels
        try:
            when = int(text) if text.isdecimal() else datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(f"the label deliver_at is {text!r}: give a datetime with a time zone, or ms since 1970") from None
        at_ms = deliver_at_ms(when, "the label deliver_at")
        times_ms.append(at_ms if at_ms > time.time() * 1000 else 0)  # a store takes no time before 1970, nor one that looks like seconds
    return max(times_ms, default=None)
