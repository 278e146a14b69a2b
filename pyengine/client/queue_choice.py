"""Which of its topic's queues a put goes to that names none: the next one, or the one of its sharding key.

A topic has as many queues to write as config/topics.json says. One that is not there is entered, with
default_topic_queue_nums queues, as RocketMQ's broker does when a client first sends to it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pyengine.errors import DiskError, StoreBusyError
from pyengine.formats.properties import string_hash
from pyengine.storage.topic_config import TopicConfig, TopicConfigs

LOOK_S = 5.0  # a change of a topic's queues is seen so soon


class QueueChoice:
    """Chooses for one producer. Thread-safe: threads may at most look at the file at once."""

    def __init__(self, root: Path, default_queue_nums: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._topics = TopicConfigs(root)
        self._default_queue_nums = default_queue_nums
        self._clock = clock
        self._turns: dict[str, Iterator[int]] = {}
        self._known: dict[str, tuple[int, float]] = {}  # topic -> (queues to write, when to look again)

    def next_queue(self, topic: str) -> int:
        """The queues in turn, from a random one on: many short programs use all of them too."""
        queues = self._queue_nums(topic)
        turn = self._turns.get(topic)
        if turn is None:
            turn = self._turns.setdefault(topic, itertools.count(random.randrange(queues)))
        return next(turn) % queues

    def queue_of(self, topic: str, sharding_key: str) -> int:
        """The same queue for the same key, as long as the topic has as many. RocketMQ: SelectMessageQueueByHash."""
        return abs(string_hash(sharding_key)) % self._queue_nums(topic)

    def _queue_nums(self, topic: str) -> int:
        queues, until_s = self._known.get(topic, (0, 0.0))
        if not queues or self._clock() >= until_s:
            try:
                queues = self._topics.ensure(TopicConfig(topic, self._default_queue_nums, self._default_queue_nums)).write_queue_nums
            except (DiskError, StoreBusyError):  # it cannot be entered now: a put does not need the entry
                queues = queues or self._default_queue_nums
            self._known[topic] = max(1, queues), self._clock() + LOOK_S
        return max(1, queues)
