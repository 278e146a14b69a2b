"""The tables of named rows in config/*.json (docs/formats.md section 12): files of RocketMQ's broker that several processes change.

Each change reads the file and writes a whole new one under a lock. While a broker has the store open the file is the
broker's, and changes are refused.

`topics.json` (TopicConfigManager): the configured topics. The engine does not need it: a put creates its topic and queue, and a reader
finds them. A broker that opens the store does, and tools that ask for the number of queues of a topic. A topic without an entry gets
one after a put, as with a broker's autoCreateTopicEnable: the checkpointer enters the topics of messages since its last round (`enter`),
and after a crash the start enters those of the records that recovery read. A topic that was deleted is entered again for later messages
only: "deletedTable", which a broker ignores, has the times.

`subscriptionGroup.json` (SubscriptionGroupManager): the configured groups. pyengine's own consumers do not need it. A broker that opens
the store does, and so does the gateway, which keeps it as the broker does: a new group is entered with the defaults.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pyengine.errors import DiskError, FormatError, UsageError
from pyengine.formats import constants
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config, path_stamp
from pyengine.storage.durable_file import ConfigFile, ReadConfig, exclusive
from pyengine.storage.later_format import require_writable

Row = TypeVar("Row", bound="TopicConfig | SubscriptionGroup")
_ABSENT = (None, "", "null", "NULL")  # fastjson leaves the field as it is
_BOOLEANS = {"true": True, "1": True, "y": True, "t": True, "false": False, "0": False, "n": False, "f": False}
DELETED_KEY = "deletedTable"
DELETED_MAX = 1000  # of more deleted topics the oldest are entered again if recovery reads their messages


def _boolean(value: Any) -> bool:
    """Read a boolean as fastjson does, which takes texts and numbers too; PARSE_ERRORS for another value."""
    return _BOOLEANS[value.lower()] if isinstance(value, str) else int(value) == 1


@dataclass(frozen=True, slots=True)
class RowFormat(Generic[Row]):
    """The format of a file's rows: its name, the key of its table, and `names`: a row's fields -> RocketMQ's names, in its order.

    `absent` are values of fields that the file does not have, where they are not those of a new row.
    """

    name: str
    key: str
    row: type[Row]
    names: Mapping[str, str]
    absent: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, Callable[[Any], Any]] = field(init=False)  # of those of these fields that have defaults

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", {
            each.name: _boolean if isinstance(each.default, bool) else type(each.default) for each in fields(self.row)
            if each.name in self.names and each.default is not MISSING})

    def row_of(self, name: str, found: Mapping[str, Any]) -> Row:
        """Make a row from fields with RocketMQ's names; PARSE_ERRORS for values of another kind."""
        values = {ours: kind(found[self.names[ours]]) for ours, kind in self.kinds.items() if found.get(self.names[ours]) not in _ABSENT}
        more = {key: value for key, value in found.items() if key not in self.names.values()}
        return self.row(name, **{**self.absent, **values, "more": more})

    def fields_of(self, row: Row) -> dict[str, Any]:
        """Return a row's fields by RocketMQ's names, in its order."""
        return {theirs: getattr(row, ours) for ours, theirs in self.names.items()} | row.more

    def decode(self, text: str) -> NamedRows[Row]:
        """Return the table in the text of the file; FormatError for a text of another shape."""
        document: Any = decode_config(text)
        try:
            version = document.get("dataVersion") or {}
            rows = {name: self.row_of(name, found) for name, found in document[self.key].items()}
            deleted = {name: int(time_ms) for name, time_ms in (document.get(DELETED_KEY) or {}).items()}
            return NamedRows(rows, int(version.get("counter", 0)), int(version.get("timestamp", 0)),
                             int(version.get("stateVersion", 0)), deleted=deleted, more_of_version=version,
                             more={name: value for name, value in document.items() if name not in (self.key, DELETED_KEY)})
        except PARSE_ERRORS as error:
            raise FormatError(f"no {self.key}: {error!r}") from error

    def encode(self, table: NamedRows[Row]) -> str:
        """Return the text of the file for a table: the inverse of decode()."""
        deleted = [(name, time_ms) for name, time_ms in table.deleted.items() if name not in table.rows][-DELETED_MAX:]
        return encode_config({
            **table.more,
            "dataVersion": {**table.more_of_version, **table.data_version},
            self.key: {name: self.fields_of(row) for name, row in sorted(table.rows.items())},
            **({DELETED_KEY: dict(deleted)} if deleted else {})})


@dataclass(frozen=True, slots=True)
class NamedRows(Generic[Row]):
    """The content of a file; `problem` is a sentence about a damaged file, `is_lost` whether no part of it could be used.

    `deleted` has the times (ms) of deletions, the newest last; `more` and `more_of_version` have fields of another version, which are
    kept.
    """

    rows: dict[str, Row]
    counter: int = 0
    timestamp_ms: int = 0
    state_version: int = 0
    problem: str = ""
    is_lost: bool = False
    deleted: dict[str, int] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    more_of_version: dict[str, Any] = field(default_factory=dict)

    @property
    def data_version(self) -> dict[str, int]:
        """RocketMQ's dataVersion: it differs after each change of the rows, whichever program makes it."""
        state = {"stateVersion": self.state_version} if self.state_version else {}
        return {"counter": self.counter, **state, "timestamp": self.timestamp_ms}


class ConfigTable(Generic[Row]):
    """The file of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str], row_format: RowFormat[Row]) -> None:
        self._root = Path(root)
        self._format = row_format
        self._file = ConfigFile(StorePaths(root).config / row_format.name, row_format.decode)
        self.path = self._file.path
        self._known: tuple[int, NamedRows[Row]] | None = None  # of an undamaged file: its stamp and content

    @property
    def _stamp(self) -> int:
        """Return a number that differs when the file has changed; 0 if there is no file."""
        return path_stamp(self.path)

    def read(self) -> NamedRows[Row]:
        """Return the rows by topic, of `.bak` if the file is damaged, which `problem` says then."""
        return self._rows(self._file.read)

    def _rows(self, read: Callable[[], ReadConfig[NamedRows[Row]]]) -> NamedRows[Row]:
        """Return the rows, which the caller may change; they are decoded once for each content of the file."""
        stamp, known = self._stamp, self._known
        if known is None or known[0] != stamp:
            found = read()
            if found.value is None:
                return NamedRows({}, problem=found.problem, is_lost=bool(found.problem))
            known = stamp, replace(found.value, problem=found.problem)
            self._known = None if found.problem else known
        return replace(known[1], rows=known[1].rows.copy(), deleted=known[1].deleted.copy())

    @contextlib.contextmanager
    def _changed(self) -> Iterator[NamedRows[Row]]:
        """Yield the table, whose rows the block may change; if it did, write the new file, durable when the block has ended.

        DiskError, with the file unchanged, if it could not be read or no part of it could be used.
        """
        with exclusive(self.path):
            require_writable(self._root, f"open in another program, which keeps {self.path.name} itself")
            table = self._rows(self._file.read_to_change)
            before = [(name, row, row.more) for name, row in table.rows.items()]
            yield table
            if [(name, row, row.more) for name, row in table.rows.items()] != before:
                now_ms = time.time_ns() // 1_000_000
                self._file.write(self._format.encode(replace(table, counter=table.counter + 1, timestamp_ms=now_ms)))


TOPICS_NAME = "topics.json"
PERM_INHERIT, PERM_WRITE, PERM_READ = 1, 2, 4
QUEUE_NUMS_ABSENT = 16  # RocketMQ's TopicConfig default for a number that the file does not have
QUEUE_NUMS_MAX = 65_536
QUEUE_NUMS_NEW = 8
GROUP_TOPIC_PREFIXES = ("%RETRY%", "%DLQ%")  # a broker creates these topics with one queue
DEFAULT_TOPIC = "TBW102"  # the topic whose queues and rights a new topic inherits
# A broker's own topics, which it configures itself: with a lesser entry of DEFAULT_TOPIC clients could not create topics any more.
BROKERS_TOPICS = frozenset((constants.SCHEDULE_TOPIC, DEFAULT_TOPIC, "BenchmarkTest", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"))
FORBIDDEN_TOPICS = (BROKERS_TOPICS - {DEFAULT_TOPIC, "BenchmarkTest"}  # to which no client can send, as in RocketMQ
                    | {constants.TRANSACTION_HALF_TOPIC, constants.TRANSACTION_OP_TOPIC, constants.TRANSACTION_DISCARD_TOPIC,
                       constants.TIMER_TOPIC})


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic's entry; `perm`: 4 read, 2 write."""

    topic: str
    read_queue_nums: int = QUEUE_NUMS_NEW
    write_queue_nums: int = QUEUE_NUMS_NEW
    perm: int = PERM_READ | PERM_WRITE
    order: bool = False
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    more: dict[str, Any] = field(default_factory=dict, compare=False)  # unknown fields, of a later version, which are kept

    @property
    def perm_text(self) -> str:
        """`RW-`, `R--`, `-W-`; X: inherited."""
        return "".join(letter if self.perm & bit else "-"
                       for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE), ("X", PERM_INHERIT)))

    def check(self) -> TopicConfig:
        """Return itself, or raise UsageError."""
        for name in ("read_queue_nums", "write_queue_nums"):
            if not 1 <= getattr(self, name) <= QUEUE_NUMS_MAX:
                raise UsageError(f"{name} is {getattr(self, name)}: give 1 to {QUEUE_NUMS_MAX}")
        if not 0 <= self.perm <= 15:
            raise UsageError(f"perm is {self.perm}: give the sum of 4 (read), 2 (write), 1 (inherit) and 8 (priority)")
        return self


class TopicConfigs(ConfigTable[TopicConfig]):
    """The topics of one store, in config/topics.json. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, TOPICS_FORMAT)

    def create(self, config: TopicConfig) -> TopicConfig:
        """Enter a new topic, durably; UsageError if it has an entry."""
        with self._changed() as table:
            if config.topic in table.rows:
                raise UsageError(f"the topic {config.topic} is there already: update it")
            table.rows[config.topic] = config.check()
        return config

    def ensure(self, config: TopicConfig) -> TopicConfig:
        """Return the entry of this topic, or enter `config`, durably."""
        found = self.read().rows.get(config.topic)
        if found is None:
            with self._changed() as table:
                found = table.rows.setdefault(config.topic, config.check())
        return found

    def update(self, topic: str, **changes: Any) -> TopicConfig:
        """Change fields of a topic, by the names in TopicConfig; return the new entry."""
        with self._changed() as table:
            table.rows[topic] = changed = replace(_found(table.rows, topic), **changes).check()
        return changed

    def delete(self, topic: str) -> None:
        """Remove the entry; messages remain, and the next put enters the topic again."""
        with self._changed() as table:
            _found(table.rows, topic)
            del table.rows[topic]
            table.deleted.pop(topic, None)
            table.deleted[topic] = time.time_ns() // 1_000_000
        time.sleep(0.001)  # so that such a message has a later store time

    def _enter(self, queues: Iterable[tuple[str, int, int]], queue_nums: int = 1, own_topics: Container[str] = ()) -> set[str]:
        """Enter topics that have messages and no entry; return those that were deleted after their messages.

        `queues`: (topic, queue id, store time of the newest message in ms). A new entry has `queue_nums` queues to write, whichever
        queues its first messages are in, so that it does not matter when this is called. If an entry has too few read queues, so
        that a broker would not serve that one, the number is raised; an entry is not changed otherwise. Light queues, which have
        no entry, and a broker's own topics, which the broker enters (`own_topics` are those of its names), are left out. The file
        is written once, and only for a change. DiskError, with the file unchanged, also if it cannot be read.
        """
        wanted: dict[str, tuple[int, int]] = {}  # (number of queues, store time of the newest message)
        for topic, queue_id, time_ms in queues:
            if topic not in own_topics and _has_entry(topic):
                count, newest_ms = wanted.get(topic, (0, -1))
                wanted[topic] = max(count, min(queue_id + 1, QUEUE_NUMS_MAX)), max(newest_ms, time_ms)
        if not wanted:
            return set()
        table = self.read()
        if _lacking(table, wanted):
            with self._changed() as table:
                if table.is_lost:
                    raise DiskError(f"{table.problem}: new topics are not entered; repair the file or remove it", path=str(self.path))
                for topic in _lacking(table, wanted):
                    count, _ = wanted[topic]
                    if topic in table.rows:
                        table.rows[topic] = replace(table.rows[topic], read_queue_nums=count)
                        continue
                    to_write = count if topic.startswith(GROUP_TOPIC_PREFIXES) else queue_nums
                    table.rows[topic] = TopicConfig(topic, max(count, to_write), to_write)
        return wanted.keys() - table.rows.keys()


def _has_entry(topic: str) -> bool:
    """Whether a broker would enter a topic of this name when it gets a message."""
    return topic not in BROKERS_TOPICS and not topic.upper().startswith("RMQ_SYS_") and not topic.startswith(constants.LMQ_PREFIX)


def _lacking(table: NamedRows[TopicConfig], wanted: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the topics with a message after their deletion, and those whose entry has fewer read queues than have messages.

    The time of a deletion that lies in the future is of a clock that was wrong then; it does not count.
    """
    now_ms = time.time_ns() // 1_000_000

    def is_lacking(topic: str, count: int, newest_ms: int) -> bool:
        if topic in table.rows:
            return table.rows[topic].read_queue_nums < count
        return not newest_ms <= table.deleted.get(topic, -1) <= now_ms

    return [topic for topic, (count, newest_ms) in wanted.items() if is_lacking(topic, count, newest_ms)]


def _found(topics: dict[str, TopicConfig], topic: str) -> TopicConfig:
    if topic not in topics:
        raise UsageError(f"{TOPICS_NAME} has no topic {topic}")
    return topics[topic]


TOPICS_FORMAT = RowFormat(TOPICS_NAME, "topicConfigTable", TopicConfig, {
    "order": "order", "perm": "perm", "read_queue_nums": "readQueueNums", "topic_filter_type": "topicFilterType",
    "topic": "topicName", "topic_sys_flag": "topicSysFlag", "write_queue_nums": "writeQueueNums",
}, absent={"read_queue_nums": QUEUE_NUMS_ABSENT, "write_queue_nums": QUEUE_NUMS_ABSENT})


GROUPS_NAME = "subscriptionGroup.json"
RETRY_MAX_TIMES = 16
CONSUME_ORDERLY = "consumeMessageOrderly"  # of RocketMQ 5, whose tools set it


@dataclass(frozen=True, slots=True)
class SubscriptionGroup:
    """One group: whether it may consume, the retries before a message becomes a dead letter, and the number of retry queues."""

    group: str
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_from_min_enable: bool = True
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: int = RETRY_MAX_TIMES
    retry_queue_nums: int = 1
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    more: dict[str, Any] = field(default_factory=dict, compare=False)  # unknown fields, of another version, which are kept

    @property
    def is_ordered(self) -> bool:
        """Whether its consumers of RocketMQ 5 get the messages of each queue one after the other; 4.9 does not know it."""
        return self.more.get(CONSUME_ORDERLY) is True


class SubscriptionGroups(ConfigTable[SubscriptionGroup]):
    """The file of one store, its rows by group. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, GROUPS_FORMAT)

    def enter(self, group: SubscriptionGroup, *, groups_max: int | None = None) -> SubscriptionGroup:
        """Return the entry of the group; if there is none, enter `group`, durable before this returns.

        UsageError if the file has `groups_max` groups already.
        """
        with self._changed() as table:
            if group.group not in table.rows and groups_max is not None and len(table.rows) >= groups_max:
                raise UsageError(f"{GROUPS_NAME} has {len(table.rows)} groups already")
            return table.rows.setdefault(group.group, group)

    def put(self, group: SubscriptionGroup) -> None:
        """Enter a group, or replace its entry; durable before this returns."""
        with self._changed() as table:
            table.rows[group.group] = group

    def set_ordered(self, group: str, is_ordered: bool) -> None:
        """Let a group be ordered, a new one too, or not; durable before this returns."""
        with self._changed() as table:
            known = table.rows.get(group, SubscriptionGroup(group))
            table.rows[group] = replace(known, more={**known.more, CONSUME_ORDERLY: is_ordered})

    def delete(self, group: str) -> bool:
        """Remove a group's entry; return whether there was one."""
        with self._changed() as table:
            return table.rows.pop(group, None) is not None


GROUPS_FORMAT = RowFormat(GROUPS_NAME, "subscriptionGroupTable", SubscriptionGroup, {
    "broker_id": "brokerId", "consume_broadcast_enable": "consumeBroadcastEnable", "consume_enable": "consumeEnable",
    "consume_from_min_enable": "consumeFromMinEnable", "group": "groupName",
    "notify_consumer_ids_changed_enable": "notifyConsumerIdsChangedEnable", "retry_max_times": "retryMaxTimes",
    "retry_queue_nums": "retryQueueNums", "which_broker_when_consume_slowly": "whichBrokerWhenConsumeSlowly",
})
