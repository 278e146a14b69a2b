"""The topics of a store: their entries in config/topics.json, and what the store has of each.

    topics = pyengine.Topics(path)
    topics.create("orders", queues=4)
    print([(each.topic, each.messages) for each in topics.list()])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from pyengine import arguments
from pyengine.client.outgoing import RefusedError, put_topic_bytes
from pyengine.engine_config import EngineSettings
from pyengine.errors import UsageError
from pyengine.ipc.live_reader import LiveStoreReader, open_store
from pyengine.storage.config import check_keywords, existing_store
from pyengine.storage.config_table import NamedRows, TopicConfig, TopicConfigs

PERMS = {"rw": 6, "r": 4, "w": 2, "none": 0}


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic: its entry, and the messages that can be read."""

    topic: str
    queues: tuple[int, ...]
    """The queues that have, or had, messages."""
    messages: int
    config: TopicConfig | None
    """Its entry in topics.json; None if it was deleted, or is not made yet."""
    size_bytes: int | None = None
    """Of its messages in the log, for list(sizes=True)."""


class Topics:
    """Lists and changes the topics of the store at `path`, with or without an engine; a topic's first message makes its entry.

    A change is durable when a method returns. StoreBusyError while a RocketMQ broker has the store open; DiskError.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> None:
        """Raises NotAStoreError and ConfigError."""
        check_keywords(Topics, settings)
        self._root = existing_store(Path(path).absolute())
        self._settings = settings
        self._configs = TopicConfigs(self._root)

    def __repr__(self) -> str:
        return f"Topics({str(self._root)!r})"

    def list(self, *, sizes: bool = False) -> Sequence[TopicState]:
        """Return the topics that have messages or an entry; with `sizes` also the bytes of their messages in the log."""
        return self._list(sizes)[0]

    def _list(self, sizes: bool) -> tuple[Sequence[TopicState], NamedRows[TopicConfig]]:
        table = self._configs.read()
        found = []
        with open_store(self._root, **self._settings) as reader:
            queues = reader.topics()
            for topic in sorted(queues.keys() | table.rows.keys()):
                ranges = {queue_id: reader.queue_range(topic, queue_id) for queue_id in queues.get(topic, ())}
                found.append(TopicState(
                    topic, tuple(ranges), sum(end - first for first, end in ranges.values()), table.rows.get(topic),
                    sum(_record_bytes(reader, topic, queue_id, *span) for queue_id, span in ranges.items()) if sizes else None))
        return found, table

    def create(self, topic: str, *, queues: int | None = None, read_queue_nums: int | None = None, write_queue_nums: int | None = None,
               perm: str | int | None = None, order: bool | None = None, exist_ok: bool = False) -> TopicConfig:
        """Enter a topic with `queues` (8), for clients to "rw", "r", "w" or "none"; UsageError if it exists, unless `exist_ok`."""
        try:
            put_topic_bytes(topic)
        except RefusedError as refused:
            raise UsageError(refused.reason) from None
        config = TopicConfig(topic, **_changes(queues, read_queue_nums, write_queue_nums, perm, order))
        return self._configs.ensure(config) if exist_ok else self._configs.create(config)

    def update(self, topic: str, *, queues: int | None = None, read_queue_nums: int | None = None, write_queue_nums: int | None = None,
               perm: str | int | None = None, order: bool | None = None) -> TopicConfig:
        """Change a topic's entry and return it; producers follow within 5 seconds. UsageError without one."""
        changes = _changes(queues, read_queue_nums, write_queue_nums, perm, order)
        if not changes:
            raise UsageError("update changes nothing: give queues, read_queue_nums, write_queue_nums, perm or order")
        return self._configs.update(arguments.text(topic, "topic"), **changes)

    def delete(self, topic: str) -> None:
        """Remove a topic's entry, so that clients of RocketMQ do not find it; its messages stay until retention (docs/topics.md)."""
        self._configs.delete(arguments.text(topic, "topic"))


def _record_bytes(reader: LiveStoreReader, topic: str, queue_id: int, first: int, end: int) -> int:
    queue = reader._queue(topic, queue_id)
    return 0 if queue is None else queue.record_bytes(first, end)


def _changes(queues: int | None, read_queue_nums: int | None, write_queue_nums: int | None, perm: str | int | None,
             order: bool | None) -> dict[str, Any]:
    """Return the fields of a TopicConfig that are given; TypeError or UsageError for a wrong one."""
    numbers = {"read_queue_nums": queues if read_queue_nums is None else read_queue_nums,
               "write_queue_nums": queues if write_queue_nums is None else write_queue_nums}
    changes: dict[str, Any] = {name: arguments.integer(value, name) for name, value in numbers.items() if value is not None}
    if isinstance(perm, str) and perm not in PERMS:
        raise UsageError(f"perm is {perm!r}: give {', '.join(PERMS)}")
    if perm is not None:
        changes["perm"] = PERMS[perm] if isinstance(perm, str) else arguments.integer(perm, "perm")
    if order is not None:
        changes["order"] = arguments.truth(order, "order")
    return changes
