"""The tables of named rows in config/*.json that RocketMQ's broker keeps and several of our processes change.

    {"dataVersion": {counter, timestamp}, KEY: {name: {...}}}

Each change is a read, a change and a whole new file under one lock. While a broker has the store open the file is its
own, and changes are refused.

`topics.json` (TopicConfigManager, docs/formats.md section 12), "topicConfigTable": which topics there are meant to be.
The engine needs none of it: a put makes its topic and queue, a reader finds them. It matters to programs that plan by
it: a broker that opens the store, and tools that ask how many queues a topic has.

A put to a topic without an entry gets it one, as a broker's autoCreateTopicEnable does: the checkpointer looks at the
queues that messages came to since its last round (`enter`), and after a crash the start does it for what was read then.

`subscriptionGroup.json` (SubscriptionGroupManager), "subscriptionGroupTable": which groups there are meant to be.
pyengine's own consumers need none of it. It matters to a broker that opens the store and to the gateway, which keeps
it as the broker does: a group that comes is entered, with the defaults.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyengine.errors import DiskError, FormatError, StoreBusyError, UsageError, disk_errors
from pyengine.formats.constants import LMQ_PREFIX, SCHEDULE_TOPIC
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.storage.durable_file import ConfigFile, ReadConfig
from pyengine.storage.durable_writes import make_folders
from pyengine.storage.later_format import require_known_format
from pyengine.storage.read_level import StoreUse, store_use

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[Row]):
    """How a file's rows are written. `row_of(name, fields)` raises one of PARSE_ERRORS for fields of another shape."""

    name: str  # of the file
    key: str
    row_of: Callable[[str, Any], Row]
    fields_of: Callable[[Row], dict[str, Any]]

    def decode(self, text: str) -> NamedRows[Row]:
        """The table in the text of the file; FormatError for one of another shape."""
        document: Any = decode_config(text)
        try:
            version = document.get("dataVersion") or {}
            rows = {name: self.row_of(name, fields) for name, fields in document[self.key].items()}
            return NamedRows(rows, int(version.get("counter", 0)), int(version.get("timestamp", 0)))
        except PARSE_ERRORS as error:
            raise FormatError(f"no {self.key}: {error!r}") from error

    def encode(self, table: NamedRows[Row]) -> str:
        """Its inverse."""
        return encode_config({
            "dataVersion": {"counter": table.counter, "timestamp": table.timestamp_ms},
            self.key: {name: self.fields_of(row) for name, row in sorted(table.rows.items())}})


@dataclass(frozen=True, slots=True)
class NamedRows(Generic[Row]):
    """The file as a whole; `said` is a sentence about a bad file, `is_lost` whether nothing of it could be used."""

    rows: dict[str, Row]
    counter: int = 0
    timestamp_ms: int = 0
    said: str = ""
    is_lost: bool = False


class ConfigTable(Generic[Row]):
    """The file of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str], row_format: RowFormat[Row]) -> None:
        self._root = Path(root)
        self._format = row_format
        self._file = ConfigFile(StorePaths(root).config / row_format.name, row_format.decode)
        self.path = self._file.path

    def read(self) -> NamedRows[Row]:
        """What the file, or in its place `.bak`, says; a bad file is told in `said`. DiskError for want of a descriptor or of memory."""
        return self._rows(self._file.read())

    def _rows(self, found: ReadConfig[NamedRows[Row]]) -> NamedRows[Row]:
        if found.value is None:
            return NamedRows({}, said=found.said, is_lost=bool(found.said))
        return replace(found.value, said=found.said)

    @contextlib.contextmanager
    def changed(self) -> Iterator[NamedRows[Row]]:
        """The table, whose rows the block may change; then, if it did, the new file is written, durable before this returns.

        DiskError where nothing of the file could be used, or it could not be read: it is left as it is.
        """
        with exclusive(self.path):
            use = store_use(self._root)
            if use is StoreUse.OTHER:
                raise StoreBusyError(f"{self._root} is open in another program, which keeps {self.path.name} itself")
            if use is StoreUse.CLOSED:
                require_known_format(self._root)
            table = self._rows(self._file.read_to_change())
            before = dict(table.rows)
            yield table
            if table.rows != before:
                now_ms = time.time_ns() // 1_000_000
                self._file.write(self._format.encode(replace(table, counter=table.counter + 1, timestamp_ms=now_ms)))


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Be the one process that changes this config/*.json inside the block: a lock on `<name>.lock`, which dies with its process.

    StoreBusyError where another process holds it for LOCK_WAIT_S: a stopped one must not stop the checkpointer. No other user
    may open the file.
    """
    make_folders(path.parent)
    lock = path.with_name(path.name + ".lock")
    with disk_errors("open", lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
    try:
        with contextlib.suppress(OSError):  # an older version made it for all to read, which is enough to hold it
            os.fchmod(descriptor, LOCK_MODE)
        until_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise StoreBusyError(f"{path.name} is not changed: another process has held {lock} for {LOCK_WAIT_S:g} s") from None
            time.sleep(LOCK_STEP_S)
        yield
    finally:
        os.close(descriptor)


LOCK_MODE, LOCK_WAIT_S, LOCK_STEP_S = 0o600, 10.0, 0.01
TOPICS_NAME = "topics.json"
PERM_INHERIT, PERM_WRITE, PERM_READ, PERM_PRIORITY = 1, 2, 4, 8
QUEUE_NUMS_ABSENT = 16  # what TopicConfig has where the file does not say
QUEUE_NUMS_MAX = 65_536
QUEUE_NUMS_NEW = 8
GROUP_TOPIC_PREFIXES = ("%RETRY%", "%DLQ%")  # a broker makes these with one queue
DEFAULT_TOPIC = "TBW102"  # the topic whose queues and rights a new topic inherits
# A broker's own, with queues and rights of its own: an entry that says less of DEFAULT_TOPIC would end the making of topics by clients.
BROKERS_TOPICS = frozenset((SCHEDULE_TOPIC, DEFAULT_TOPIC, "BenchmarkTest", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"))


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
        super().__init__(root, TOPICS_FORMAT)

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
    return topic not in BROKERS_TOPICS and not topic.upper().startswith("RMQ_SYS_") and not topic.startswith(LMQ_PREFIX)


def _lacking(topics: Mapping[str, TopicConfig], wanted: Mapping[str, int]) -> list[str]:
    """The topics without an entry, or with one that names fewer queues to read than have messages."""
    return sorted(topic for topic, count in wanted.items() if topic not in topics or topics[topic].read_queue_nums < count)


def _found(topics: dict[str, TopicConfig], topic: str) -> TopicConfig:
    if topic not in topics:
        raise UsageError(f"{TOPICS_NAME} has no topic {topic}: create it")
    return topics[topic]


# ---- text -----------------------------------------------------------------------

_TOPIC_FIELDS = {  # TopicConfig's names -> RocketMQ's, in its order
    "order": "order", "perm": "perm", "read_queue_nums": "readQueueNums", "topic_filter_type": "topicFilterType",
    "topic": "topicName", "topic_sys_flag": "topicSysFlag", "write_queue_nums": "writeQueueNums",
}
_ABSENT = {"read_queue_nums": QUEUE_NUMS_ABSENT, "write_queue_nums": QUEUE_NUMS_ABSENT}


def _fields(config: TopicConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for ours, theirs in _TOPIC_FIELDS.items()} | config.more


def _config(name: str, fields: dict[str, Any]) -> TopicConfig:
    values = {ours: fields[theirs] for ours, theirs in _TOPIC_FIELDS.items() if fields.get(theirs) is not None}
    for ours in ("read_queue_nums", "write_queue_nums", "perm", "topic_sys_flag"):
        if ours in values:
            values[ours] = int(values[ours])
    more = {key: value for key, value in fields.items() if key not in _TOPIC_FIELDS.values()}
    return TopicConfig(**(_ABSENT | values | {"topic": name, "order": bool(values.get("order", False)), "more": more}))


TOPICS_FORMAT = RowFormat(TOPICS_NAME, "topicConfigTable", _config, _fields)


GROUPS_NAME = "subscriptionGroup.json"
RETRY_MAX_TIMES = 16


@dataclass(frozen=True, slots=True)
class SubscriptionGroup:
    """One group: may it consume, how often a message is tried again before it is a dead letter, over how many queues."""

    group: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_from_min_enable: bool = True
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: int = RETRY_MAX_TIMES
    retry_queue_nums: int = 1
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    more: dict[str, Any] = field(default_factory=dict, compare=False)  # what another version wrote, kept as it is

    def fields(self) -> dict[str, Any]:
        """By RocketMQ's names, in its order."""
        return {theirs: getattr(self, ours) for ours, theirs in _GROUP_FIELDS.items()} | self.more


class SubscriptionGroups(ConfigTable[SubscriptionGroup]):
    """The file of one store, its rows by group. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, GROUPS_FORMAT)

    def enter(self, group: SubscriptionGroup, *, groups_max: int | None = None) -> SubscriptionGroup:
        """The group as the file has it; entered, durable before this returns, where it has not.

        UsageError where the file has `groups_max` groups already.
        """
        with self.changed() as table:
            if group.group not in table.rows and groups_max is not None and len(table.rows) >= groups_max:
                raise UsageError(f"{GROUPS_NAME} has {len(table.rows)} groups already")
            return table.rows.setdefault(group.group, group)

    def put(self, group: SubscriptionGroup) -> None:
        """Enter a group, or replace what the file says of it; durable before this returns."""
        with self.changed() as table:
            table.rows[group.group] = group

    def delete(self, group: str) -> bool:
        """Take a group out of the file; whether it was there."""
        with self.changed() as table:
            return table.rows.pop(group, None) is not None


# ---- text -----------------------------------------------------------------------

_GROUP_FIELDS = {  # SubscriptionGroup's names -> RocketMQ's, in its order
    "broker_id": "brokerId", "consume_broadcast_enable": "consumeBroadcastEnable", "consume_enable": "consumeEnable",
    "consume_from_min_enable": "consumeFromMinEnable", "group": "groupName",
    "notify_consumer_ids_changed_enable": "notifyConsumerIdsChangedEnable", "retry_max_times": "retryMaxTimes",
    "retry_queue_nums": "retryQueueNums", "which_broker_when_consume_slowly": "whichBrokerWhenConsumeSlowly",
}


def group_of(name: str, fields: dict[str, Any]) -> SubscriptionGroup:
    """A group by RocketMQ's names; PARSE_ERRORS for values of another kind."""
    values: dict[str, Any] = {}
    for ours, theirs in _GROUP_FIELDS.items():
        if theirs in fields and ours != "group":
            values[ours] = bool(fields[theirs]) if theirs.endswith("Enable") else int(fields[theirs])
    more = {key: value for key, value in fields.items() if key not in _GROUP_FIELDS.values()}
    return SubscriptionGroup(name, **values, more=more)


GROUPS_FORMAT = RowFormat(GROUPS_NAME, "subscriptionGroupTable", group_of, SubscriptionGroup.fields)
