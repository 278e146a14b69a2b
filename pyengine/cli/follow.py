"""Follows the queues of a topic: what `pyengine tail` prints, in order, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pyengine.results import GetStatus

if TYPE_CHECKING:
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader

LOOK_AGAIN_S = 0.5  # also how soon a new queue is seen


class Follower:
    """Reads the queues of one topic in turn; messages of one queue come in order.

    `next_offsets` is what to ask for next, by queue. `start` is first, last or an offset; a
    queue that appears later is read from its first message.
    """

    def __init__(
        self, reader: LiveStoreReader, topic: str, queue_ids: tuple[int, ...] = (), *, start: str = "last",
        tags: str | None = None, level: str | None = None,
    ) -> None:
        self._reader = reader
        self._topic = topic
        self._queue_ids = queue_ids
        self._start = start
        self._tags = tags
        self._level = level
        self._first_look = True
        self.next_offsets: dict[int, int] = {}

    def messages(self, *, follow: bool, max_messages: int | None, idle: Callable[[], None]) -> Iterator[Message]:
        """Messages as they come, at most `max_messages`; without `follow` it ends where nothing more is.

        `idle` is called after each round over the queues, before it sleeps.
        """
        count = 0
        while True:
            seen = self._reader.arrivals()
            moved = False
            for queue_id in self._queue_ids or self._reader.topics().get(self._topic, []):
                before = self._next_offset(queue_id)
                found = self._reader.get_message(self._topic, queue_id, before, tags=self._tags, level=self._level)
                for message in found.placed(queue_id):
                    yield message
                    self.next_offsets[queue_id] = message.queue_offset + 1
                    count += 1
                    if count == max_messages:
                        return
                if found.status is not GetStatus.OFFSET_OVERFLOW_ONE:
                    self.next_offsets[queue_id] = found.next_begin_offset
                moved = moved or self.next_offsets[queue_id] != before
            self._first_look = False
            idle()
            if not moved:
                if not follow:
                    return
                self._reader.wait_for_arrival(LOOK_AGAIN_S, seen)

    def _next_offset(self, queue_id: int) -> int:
        if queue_id not in self.next_offsets:
            self.next_offsets[queue_id] = self._first_offset(queue_id)
        return self.next_offsets[queue_id]

    def _first_offset(self, queue_id: int) -> int:
        low, high = self._reader.queue_range(self._topic, queue_id)
        if self._start == "first" or not self._first_look:
            return low
        return high if self._start == "last" else int(self._start)
