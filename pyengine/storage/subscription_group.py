"""Which consumer groups there are meant to be: `config/subscriptionGroup.json` (SubscriptionGroupManager).

`{"dataVersion": {counter, timestamp}, "subscriptionGroupTable": {group: {...}}}`, the file that RocketMQ's broker keeps.
pyengine's own consumers need none of it. It matters to a broker that opens the store and to the gateway, which keeps it as
the broker does: a group that comes is entered, with the defaults. Several processes may change it, as topics.json.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyengine.errors import FormatError, StoreBusyError, UsageError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS, decode_config, encode_config
from pyengine.storage.durable_file import ConfigFile
from pyengine.storage.later_format import require_known_format
from pyengine.storage.read_level import StoreUse, store_use
from pyengine.storage.topic_config import exclusive

NAME = "subscriptionGroup.json"
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
        return {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()} | self.more


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The file as a whole; `said` is a sentence about a bad file."""

    groups: dict[str, SubscriptionGroup] = field(default_factory=dict)
    counter: int = 0
    timestamp_ms: int = 0
    said: str = ""


class SubscriptionGroups:
    """The file of one store. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self._file = ConfigFile(StorePaths(root).config / NAME, decode_groups)
        self.path = self._file.path

    def read(self) -> GroupTable:
        """What the file, or in its place `.bak`, says; a bad file is told in `said`, never raised."""
        table, said, _ = self._file.read()
        return replace(table or GroupTable(), said=said)

    def enter(self, group: SubscriptionGroup, *, groups_max: int | None = None) -> SubscriptionGroup:
        """The group as the file has it; entered, durable before this returns, where it has not.

        UsageError where the file has `groups_max` groups already.
        """
        with self._changed() as groups:
            if group.group not in groups and groups_max is not None and len(groups) >= groups_max:
                raise UsageError(f"{NAME} has {len(groups)} groups already")
            return groups.setdefault(group.group, group)

    def put(self, group: SubscriptionGroup) -> None:
        """Enter a group, or replace what the file says of it; durable before this returns."""
        with self._changed() as groups:
            groups[group.group] = group

    def delete(self, group: str) -> bool:
        """Take a group out of the file; whether it was there."""
        with self._changed() as groups:
            return groups.pop(group, None) is not None

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, SubscriptionGroup]]:
        """The groups, to be changed inside the block; then the new file is written, if anything changed."""
        with exclusive(self.path):
            use = store_use(self._root)
            if use is StoreUse.OTHER:
                raise StoreBusyError(f"{self._root} is open in another program, which keeps {NAME} itself")
            if use is StoreUse.CLOSED:
                require_known_format(self._root)
            table = self._file.read().value or GroupTable()
            groups = dict(table.groups)
            yield groups
            if groups != table.groups:
                version = {"counter": table.counter + 1, "timestamp": time.time_ns() // 1_000_000}
                rows = {name: group.fields() for name, group in sorted(groups.items())}
                self._file.write(encode_config({"dataVersion": version, "subscriptionGroupTable": rows}))


# ---- text -----------------------------------------------------------------------

_FIELDS = {  # SubscriptionGroup's names -> RocketMQ's, in its order
    "broker_id": "brokerId", "consume_broadcast_enable": "consumeBroadcastEnable", "consume_enable": "consumeEnable",
    "consume_from_min_enable": "consumeFromMinEnable", "group": "groupName",
    "notify_consumer_ids_changed_enable": "notifyConsumerIdsChangedEnable", "retry_max_times": "retryMaxTimes",
    "retry_queue_nums": "retryQueueNums", "which_broker_when_consume_slowly": "whichBrokerWhenConsumeSlowly",
}


def decode_groups(text: str) -> GroupTable:
    """The table in the text of the file; FormatError for one of another shape."""
    document: Any = decode_config(text)
    try:
        version = document.get("dataVersion") or {}
        groups = {name: group_of(name, fields) for name, fields in document["subscriptionGroupTable"].items()}
        return GroupTable(groups, int(version.get("counter", 0)), int(version.get("timestamp", 0)))
    except PARSE_ERRORS as error:
        raise FormatError(f"no table of groups: {error!r}") from error


def group_of(name: str, fields: dict[str, Any]) -> SubscriptionGroup:
    """A group by RocketMQ's names; PARSE_ERRORS for values of another kind."""
    values: dict[str, Any] = {}
    for ours, theirs in _FIELDS.items():
        if theirs in fields and ours != "group":
            values[ours] = bool(fields[theirs]) if theirs.endswith("Enable") else int(fields[theirs])
    more = {key: value for key, value in fields.items() if key not in _FIELDS.values()}
    return SubscriptionGroup(name, **values, more=more)
