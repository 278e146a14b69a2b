"""Which consumer groups there are meant to be: `config/subscriptionGroup.json` (SubscriptionGroupManager).

`{"dataVersion": {counter, timestamp}, "subscriptionGroupTable": {group: {...}}}`, the file that RocketMQ's broker keeps.
pyengine's own consumers need none of it. It matters to a broker that opens the store and to the gateway, which keeps it as
the broker does: a group that comes is entered, with the defaults.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from pyengine.errors import UsageError
from pyengine.storage.config_table import ConfigTable, RowFormat

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


class SubscriptionGroups(ConfigTable[SubscriptionGroup]):
    """The file of one store, its rows by group. Holds nothing open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, FORMAT)

    def enter(self, group: SubscriptionGroup, *, groups_max: int | None = None) -> SubscriptionGroup:
        """The group as the file has it; entered, durable before this returns, where it has not.

        UsageError where the file has `groups_max` groups already.
        """
        with self.changed() as table:
            if group.group not in table.rows and groups_max is not None and len(table.rows) >= groups_max:
                raise UsageError(f"{NAME} has {len(table.rows)} groups already")
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

_FIELDS = {  # SubscriptionGroup's names -> RocketMQ's, in its order
    "broker_id": "brokerId", "consume_broadcast_enable": "consumeBroadcastEnable", "consume_enable": "consumeEnable",
    "consume_from_min_enable": "consumeFromMinEnable", "group": "groupName",
    "notify_consumer_ids_changed_enable": "notifyConsumerIdsChangedEnable", "retry_max_times": "retryMaxTimes",
    "retry_queue_nums": "retryQueueNums", "which_broker_when_consume_slowly": "whichBrokerWhenConsumeSlowly",
}


def group_of(name: str, fields: dict[str, Any]) -> SubscriptionGroup:
    """A group by RocketMQ's names; PARSE_ERRORS for values of another kind."""
    values: dict[str, Any] = {}
    for ours, theirs in _FIELDS.items():
        if theirs in fields and ours != "group":
            values[ours] = bool(fields[theirs]) if theirs.endswith("Enable") else int(fields[theirs])
    more = {key: value for key, value in fields.items() if key not in _FIELDS.values()}
    return SubscriptionGroup(name, **values, more=more)


FORMAT = RowFormat(NAME, "subscriptionGroupTable", group_of, SubscriptionGroup.fields)
