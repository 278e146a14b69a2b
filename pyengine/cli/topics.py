"""`pyengine topics`, `groups` and `dlq`: a store's topics, consumer groups and dead letters.

    topics   list topics; create, update and delete entries of topics.json
    groups   list consumer groups, show their lag, let them be ordered, reset and delete their offsets
    dlq      list dead letters, show them, put them back
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import Place, Reply, place_option, store_command
from pyengine.client.consumer_groups import ConsumerGroups, GroupState
from pyengine.client.topics import PERMS, Topics
from pyengine.engine_config import keywords
from pyengine.errors import UsageError
from pyengine.storage.config import existing_store
from pyengine.storage.config_table import SubscriptionGroups
from pyengine.storage.consumer_offset import group_key

if TYPE_CHECKING:
    from pyengine.storage.config_table import TopicConfig


@click.command()
@click.argument("action", type=click.Choice(["list", "create", "update", "delete"]), default="list")
@store_command
@click.argument("topic", required=False)
@click.option("--queues", type=click.IntRange(min=1), default=None, help="Queues to read and to write; 8 for a new topic.")
@click.option("--read-queues", "read_queue_nums", type=click.IntRange(min=1), default=None, help="Queues to read.")
@click.option("--write-queues", "write_queue_nums", type=click.IntRange(min=1), default=None, help="Queues to write.")
@click.option("--perm", type=click.Choice(list(PERMS)), default=None, help="What clients may do; rw for a new topic.")
@click.option("--order/--no-order", default=None, help="Whether it is an ordered topic.")
@click.option("--sizes", is_flag=True, help="List also the bytes of the messages, the largest topic first.")
def topics(store: Path, settings: dict[str, str], action: str, topic: str | None, sizes: bool, **changes: Any) -> Reply:
    """List topics; create, update or delete one. They are in config/topics.json, or have messages.

    It needs no engine. `delete` removes the entry, not the messages.

    \b
    Examples:
      pyengine topics create STORE orders --queues 4
    """
    found = Topics(store, **keywords(settings))
    changes = {name: value for name, value in changes.items() if value is not None}
    if action == "list":
        if topic is not None or changes:
            raise UsageError("list takes no topic and no options but --sizes: give create, update or delete before the topic")
        return _list(found, sizes)
    if sizes:
        raise UsageError("--sizes needs the action list")
    if topic is None:
        raise UsageError(f"{action} needs a topic: pyengine topics {action} STORE TOPIC")
    return _change(found, action, topic, changes)


def _change(found: Topics, action: str, topic: str, changes: dict[str, Any]) -> Reply:
    _warn(found._configs.read().problem)
    made = None
    if action == "delete":
        if changes:
            raise UsageError("delete takes no options")
        found.delete(topic)
    elif action == "create":
        made = found.create(topic, **changes)
    else:
        if not changes:
            raise UsageError("update changes nothing: give --queues, --read-queues, --write-queues, --perm or --order")
        made = found.update(topic, **changes)
    what = f": {made.read_queue_nums} queues to read, {made.write_queue_nums} to write, {made.perm_text}" if made else ""
    return Reply({"topic": topic, "action": action} | (_topic_document(made) if made else {}),
                 f"{action}d {output.printable(topic)}{what}")


def _list(found: Topics, sizes: bool) -> Reply:
    states, table = found._list(sizes)
    _warn(table.problem)
    if sizes:
        states = sorted(states, key=lambda state: -(state.size_bytes or 0))
    rows = [{"topic": state.topic, "queues": list(state.queues), "messages": state.messages,
             **({"bytes": state.size_bytes} if sizes else {}), "configured": state.config is not None}
            | (_topic_document(state.config) if state.config else {}) for state in states]
    document = {"topics": rows, "data_version": {"counter": table.counter, "timestamp_ms": table.timestamp_ms}, "problem": table.problem}
    return Reply(document, lambda: output.write_rows(
        rows, f"topic queues messages {'bytes ' if sizes else ''}read_queue_nums write_queue_nums perm_text order"))


def _topic_document(config: TopicConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("read_queue_nums", "write_queue_nums", "perm", "perm_text", "order")}


def _warn(problem: str) -> None:
    if problem:
        print(f"warning: {problem}", file=sys.stderr)


GROUP_ACTIONS = ("list", "lag", "update", "reset", "forget")


@click.command()
@click.argument("action", type=click.Choice(GROUP_ACTIONS), default="list")
@store_command
@click.option("--group", default=None, help="Only this group.")
@click.option("--topic", default=None, help="Only this topic.")
@place_option("--to", help="For reset: where the group continues.")
@click.option("--queue-id", "queue_ids", type=click.IntRange(min=0), multiple=True,
              help="For reset: only this queue; may be repeated.")
@click.option("--order/--no-order", default=None, help="For update: whether RocketMQ 5's clients get each queue's messages in order.")
def groups(store: Path, action: str, settings: dict[str, str], group: str | None, topic: str | None, **change: Any) -> Reply:
    """List consumer groups, show their lag, or move offsets. It needs no engine.

    `lag` shows each queue, the process that owns it, and what clients have popped. `reset` moves the offset, also under living
    members; `forget` removes the offsets of a group without any. `update` also takes a group that is new.

    \b
    Examples:
      pyengine groups update STORE --group billing --order
      pyengine groups reset STORE --group billing --topic orders --to 2026-01-31T12:00:00Z
    """
    to, queue_ids, order = change["to"], change["queue_ids"], change["order"]
    found = ConsumerGroups(existing_store(store), **keywords(settings))
    for note in found.notes():
        output.note(note)
    if action in ("reset", "forget"):
        if group is None or topic is None or (to is None) == (action == "reset"):
            raise click.UsageError(f"{action} needs --group, --topic" + (" and --to" if action == "reset" else ", and no --to"))
        return _forget(found, topic, group) if to is None else _reset(found, topic, group, to, queue_ids)
    if to is not None or queue_ids:
        raise click.UsageError("--to and --queue-id need the action reset")
    if (order is not None) != (action == "update"):
        raise click.UsageError("update needs --group and --order or --no-order" if order is None else "--order needs the action update")
    if order is not None:
        return _set_ordered(store, topic, group, order)
    states = found.groups(topic=topic, group=group)
    of_topic = "" if topic is None else f" on {topic}"
    none = f"{'no group' if group is None else f'group {group}'} has committed {'an' if group is None else 'no'} offset{of_topic}"
    if not states and (group is not None or topic is not None):
        output.note(none)
    lacking = [state.note for state in states if state.note]
    for note in lacking:
        output.note(note)

    def show() -> None:
        if not states and group is None and topic is None:  # an empty list says it to a program
            output.note(none)
        if action == "lag":
            _write_lag(states)
        else:
            output.write_rows([_group_document(one, action) for one in states], "group topic members queues lag in_flight lost")

    return Reply({"groups": [_group_document(state, action) for state in states], "notes": [*found.notes(), *lacking]}, show)


def _reset(found: ConsumerGroups, topic: str, group: str, to: Place, queue_ids: tuple[int, ...]) -> Reply:
    offsets = found.reset(topic, group, to, queue_ids or None)
    return Reply({"topic": topic, "group": group, "offsets": offsets},
                 lambda: output.write_table(("queue", "next offset"), sorted(offsets.items())))


def _set_ordered(store: Path, topic: str | None, group: str | None, is_ordered: bool) -> Reply:
    if group is None or topic is not None:
        raise click.UsageError("update needs --group, and no --topic: a group is ordered in all of them")
    group_key("T", group)  # UsageError for a name that no group has
    SubscriptionGroups(store).set_ordered(group, is_ordered)
    return Reply({"group": group, "ordered": is_ordered}, f"{output.printable(group)} is {'' if is_ordered else 'not '}ordered")


def _forget(found: ConsumerGroups, topic: str, group: str) -> Reply:
    is_forgotten = found.forget(topic, group)
    return Reply({"topic": topic, "group": group, "forgotten": is_forgotten},
                 "forgotten" if is_forgotten else f"{output.printable(group)} has no offsets of {output.printable(topic)}")


def _group_document(state: GroupState, action: str) -> dict[str, object]:
    document: dict[str, object] = {
        "group": state.group, "topic": state.topic, "members": list(state.members), "lag": state.lag, "in_flight": state.in_flight,
        "lost": state.lost}
    if action == "list":
        return document | {"queues": len(state.queues)}
    return document | {"queues": [
        asdict(queue) | {"holder_pid": state.holders.get(queue.queue_id)} for queue in state.queues.values()]}


def _write_lag(states: list[GroupState]) -> None:
    for state in states:
        pops = state.in_flight > 0
        output.write_table(
            ("queue", "committed", "end", "lag", *(("in flight", "attempts", "invisible until") if pops else ()), "lost", "waiting since",
             "held by"),
            [(queue.queue_id, queue.committed, queue.max_offset, queue.lag,
              *((queue.in_flight, queue.attempts, output.time_text(queue.invisible_until_ms)) if pops else ()), queue.lost,
              output.time_text(queue.waiting_since_ms), str(state.holders.get(queue.queue_id, "-")))
             for queue in state.queues.values()],
            title=f"{output.printable(state.group)} on {output.printable(state.topic)}: lag {state.lag:,}")


ACTIONS = ("list", "show", "requeue")


@click.command()
@click.argument("action", type=click.Choice(ACTIONS), default="list")
@store_command
@click.option("--group", default=None, help="The consumer group.")
@click.option("--offset", "offsets", type=click.IntRange(min=0), multiple=True,
              help="For show: the first offset. For requeue: only this one; may be repeated.")
@click.option("--max-messages", type=click.IntRange(min=1), default=32, show_default=True, help="For show: at most this many.")
def dlq(store: Path, action: str, settings: dict[str, str], group: str | None, offsets: tuple[int, ...], max_messages: int) -> Reply:
    """List or show dead letters, or put them back. A group has returned each 16 times.

    `requeue` needs an engine. It puts back those that are `waiting`, or those at the offsets, which stay so.

    \b
    Examples:
      pyengine dlq requeue STORE --group billing --offset 17 --offset 18
    """
    from pyengine.client.retries import DeadLetters

    letters = DeadLetters(existing_store(store), **keywords(settings))
    if action == "list":
        if offsets:
            raise click.UsageError("--offset needs the action show or requeue")
        groups = [
            {"group": row.group, "messages": row.messages, "waiting": row.waiting, "first_offset": row.first, "next_offset": row.next,
             "end_offset": row.end, "oldest_ms": row.oldest_ms} for row in letters.queues() if group in (None, row.group)]
        return Reply({"groups": groups}, lambda: output.write_rows(groups, "group messages waiting next_offset oldest_ms"))
    if group is None:
        raise click.UsageError(f"{action} needs --group")
    if group not in {queue.group for queue in letters.queues()}:
        output.note(f"group {group} has no dead letters")
    if action == "show":
        if len(offsets) > 1:
            raise click.UsageError("show takes one --offset, at which it begins")
        messages = letters.messages(group, offsets[0] if offsets else None, max_messages)
        return Reply({"group": group, "messages": [output.message_document(one) for one in messages]},
                     lambda: output.write_message_table(messages))
    count = letters.requeue(group, offsets or None)
    return Reply({"group": group, "requeued": count}, f"{count} put back for {output.printable(group)}")
