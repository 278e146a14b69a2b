"""Which topics there are meant to be: `config/topics.json` (TopicConfigManager, docs/formats.md section 12).

`{"dataVersion": {counter, timestamp}, "topicConfigTable": {topic: {...}}}`, the file that
RocketMQ's broker keeps. The engine needs none of it: a put makes its topic and queue, a
reader finds them. It matters to programs that plan by it: a broker that opens the store, and
tools that ask how many queues a topic has.

A put to a topic without an entry gets it one, as a broker's autoCreateTopicEnable does: the checkpointer looks at the
queues that messages came to since its last round (`enter`), and after a crash the start does it for what was read then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyengine.errors import DiskError, UsageError
from pyengine.formats.constants import LMQ_PREFIX, SCHEDULE_TOPIC
from pyengine.storage.config_table import ConfigTable, RowFormat

NAME = "topics.json"
PERM_INHERIT, PERM_WRITE, PERM_READ, PERM_PRIORITY = 1, 2, 4, 8
QUEUE_NUMS_ABSENT = 16  # what TopicConfig has where the file does not say
QUEUE_NUMS_MAX = 65_536
QUEUE_NUMS_NEW = 8
GROUP_TOPIC_PREFIXES = ("%RETRY%", "%DLQ%")  # a broker makes these with one queue


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """One topic: how many queues readers and producers should use, and what they may do (perm: 4 read, 2 write)."""

    topic: str
    read_queue_nums: int = QUEUE_NUMS_NEW
    write_queue_nums: int = QUEUE_NUMS_NEW
    perm: int = PERM_READ | PERM_WRITE
    order: bool = False
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    more: dict[str, Any] = field(default_factory=dict, compare=False)  # what a later version wrote, kept as it is

    @property
    def perm_text(self) -> str:
        """RocketMQ's PermName: `RW-`, `R--`, `-W-`, with X for inherited."""
        return "".join(letter if self.perm & bit else "-"
                       for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE), ("X", PERM_INHERIT)))

    def check(self) -> TopicConfig:
        """Itself, or UsageError that says what is allowed."""
        for name in ("read_queue_nums", "write_queue_nums"):
            if not 1 <= getattr(self, name) <= QUEUE_NUMS_MAX:
                raise UsageError(f"{name} is {getattr(self, name)}: give 1 to {QUEUE_NUMS_MAX}")
        if not 0 <= self.perm <= 15:
            raise UsageError(f"perm is {self.perm}: give the sum of 4 (read), 2 (write), 1 (inherit) and 8 (priority)")
        return self


class TopicConfigs(ConfigTable[TopicConfig]):
    """The file of one store, its rows by topic. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, FORMAT)

    @property
    def stamp(self) -> int:
        """A number that differs when the file was changed; 0 without it."""
        try:
            found = os.stat(self.path)
        except OSError:
            return 0
        return hash((found.st_mtime_ns, found.st_ino, found.st_size))

    def create(self, config: TopicConfig) -> TopicConfig:
        """Enter a new topic, durable before this returns; UsageError when it is there already."""
        with self.changed() as table:
            if config.topic in table.rows:
                raise UsageError(f"the topic {config.topic} is there already: update it")
            table.rows[config.topic] = config.check()
        return config

    def ensure(self, config: TopicConfig) -> TopicConfig:
        """The entry of this topic; `config` is entered, durable before this returns, where there is none."""
        found = self.read().rows.get(config.topic)
        if found is None:
            try:
                return self.create(config)
            except UsageError:  # another process was faster
                found = self.read().rows.get(config.topic)
                if found is None:
                    raise
        return found

    def update(self, topic: str, **changes: Any) -> TopicConfig:
        """Change fields of a topic that is there, by TopicConfig's names; the new values."""
        with self.changed() as table:
            table.rows[topic] = changed = replace(_found(table.rows, topic), **changes).check()
        return changed

    def delete(self, topic: str) -> None:
        """Take the topic out of the file; its messages stay where they are."""
        with self.changed() as table:
            _found(table.rows, topic)
            del table.rows[topic]

    def enter(self, queues: Mapping[str, int], queue_nums: int = QUEUE_NUMS_NEW) -> list[str]:
        """Make entries for topics that have messages and no entry; those that were changed, sorted.

        `queues`: topic -> the highest queue that has one; `queue_nums`: how many a new entry names at least. Where an
        entry names too few queues to read, so that a broker would not serve that one, it is raised; nothing else of
        an entry is changed. Left out are light queues and a broker's own topics, which have no entry or get it from the
        broker. The file is written once, and only if it must be. DiskError, also when there is a file that cannot be
        read: it is left as it is.
        """
        wanted = {topic: min(queue_id + 1, QUEUE_NUMS_MAX) for topic, queue_id in queues.items() if _has_entry(topic)}
        if not wanted or not _lacking(self.read().rows, wanted):
            return []
        with self.changed() as table:
            if table.is_lost:
                raise DiskError(f"{table.said}: new topics are not entered; repair the file or remove it", path=str(self.path))
            topics = table.rows
            lacking = _lacking(topics, wanted)
            for topic in lacking:
                count = wanted[topic]
                if topic in topics:
                    topics[topic] = replace(topics[topic], read_queue_nums=count)
                    continue
                if not topic.startswith(GROUP_TOPIC_PREFIXES):
                    count = max(queue_nums, count)
                topics[topic] = TopicConfig(topic, count, count)
        return lacking


def _has_entry(topic: str) -> bool:
    """Whether a broker would enter a topic of this name when a message comes."""
    return topic != SCHEDULE_TOPIC and not topic.upper().startswith("RMQ_SYS_") and not topic.startswith(LMQ_PREFIX)


def _lacking(topics: Mapping[str, TopicConfig], wanted: Mapping[str, int]) -> list[str]:
    """The topics without an entry, or with one that names fewer queues to read than have messages."""
    return sorted(topic for topic, count in wanted.items() if topic not in topics or topics[topic].read_queue_nums < count)


def _found(topics: dict[str, TopicConfig], topic: str) -> TopicConfig:
    if topic not in topics:
        raise UsageError(f"{NAME} has no topic {topic}: create it")
    return topics[topic]


# ---- text -----------------------------------------------------------------------

_FIELDS = {  # TopicConfig's names -> RocketMQ's, in its order
    "order": "order", "perm": "perm", "read_queue_nums": "readQueueNums", "topic_filter_type": "topicFilterType",
    "topic": "topicName", "topic_sys_flag": "topicSysFlag", "write_queue_nums": "writeQueueNums",
}
_ABSENT = {"read_queue_nums": QUEUE_NUMS_ABSENT, "write_queue_nums": QUEUE_NUMS_ABSENT}


def _fields(config: TopicConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()} | config.more


def _config(name: str, fields: dict[str, Any]) -> TopicConfig:
    values = {ours: fields[theirs] for ours, theirs in _FIELDS.items() if fields.get(theirs) is not None}
    for ours in ("read_queue_nums", "write_queue_nums", "perm", "topic_sys_flag"):
        if ours in values:
            values[ours] = int(values[ours])
    more = {key: value for key, value in fields.items() if key not in _FIELDS.values()}
    return TopicConfig(**(_ABSENT | values | {"topic": name, "order": bool(values.get("order", False)), "more": more}))


FORMAT = RowFormat(NAME, "topicConfigTable", _config, _fields)
