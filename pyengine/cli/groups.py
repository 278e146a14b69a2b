"""`pyengine groups`: the consumer groups of a store: list them, show their lag, reset and delete their offsets."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, json_option, moment, set_option, store_argument
from pyengine.client.consumer_groups import ConsumerGroups, GroupState

ACTIONS = ("list", "lag", "reset", "forget")
Place = Literal["first", "last"] | int | datetime


class _Place(click.ParamType):  # type: ignore[type-arg]  # no generic in click 8.1
    """first, last, an offset, or a time with a time zone."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        if value == "first" or value == "last":
            return "first" if value == "first" else "last"
        if value.isascii() and value.isdecimal():
            return int(value)
        try:
            return moment(value)
        except ValueError:
            self.fail(f"{value}: give first, last, an offset, a time like 2026-01-31T12:00:00Z, or @MS", param, ctx)


@click.command()
@store_argument
@click.argument("action", type=click.Choice(ACTIONS), default="list")
@set_option
@json_option
@click.option("--group", default=None, help="Only this group.")
@click.option("--topic", default=None, help="Only this topic.")
@click.option("--to", type=_Place(), default=None, metavar="first|last|OFFSET|TIME",
              help="For reset: where the group goes on. TIME is ISO 8601 (UTC if it names no zone) or @ and ms since 1970.")
@click.option("--queue-id", "queue_ids", type=click.IntRange(min=0), multiple=True,
              help="For reset: only this queue; may be repeated.")
def groups(
    store: Path, action: str, settings: dict[str, str], as_json: bool, group: str | None, topic: str | None,
    to: Place | None, queue_ids: tuple[int, ...],
) -> None:
    """List the consumer groups of a store, show their lag, or reset their offsets.

    Works on a running engine and without one. LIST is one line for a group and topic;
    LAG shows each queue, and which process holds it; RESET makes the group go on
    at another offset, also while it has living members: they follow within a second, and what
    they commit of what they read before counts no more. FORGET removes a group's offsets
    of a topic, if it has no living member.

    \b
    Examples:
      pyengine groups STORE
      pyengine groups STORE lag --group billing --json
      pyengine groups STORE reset --group billing --topic orders --to first
      pyengine groups STORE reset --group billing --topic orders --to 2026-01-31T12:00:00Z
    """
    found = ConsumerGroups(existing_store(store), **settings)
    for note in found.notes():
        print(f"note: {output.printable(note)}", file=sys.stderr)
    if action in ("reset", "forget"):
        if group is None or topic is None or (to is None) == (action == "reset"):
            raise click.UsageError(f"{action} needs --group, --topic" + (" and --to" if action == "reset" else ", and no --to"))
        if to is None:
            _forget(found, topic, group, as_json)
        else:
            _reset(found, topic, group, to, queue_ids, as_json)
        return
    if to is not None or queue_ids:
        raise click.UsageError("--to and --queue-id are for reset")
    states = found.groups(topic=topic, group=group)
    if as_json:
        output.write_json({"groups": [_document(state, action) for state in states], "notes": found.notes()})
    elif action == "lag":
        _write_lag(states)
    else:
        output.write_table(("group", "topic", "members", "queues", "lag", "lost"), [
            (state.group, state.topic, len(state.members), len(state.queues), state.lag, state.lost) for state in states])


def _reset(found: ConsumerGroups, topic: str, group: str, to: Place, queue_ids: tuple[int, ...], as_json: bool) -> None:
    offsets = found.reset(topic, group, to, queue_ids or None)
    if as_json:
        output.write_json({"topic": topic, "group": group, "offsets": offsets})
    else:
        output.write_table(("queue", "next offset"), sorted(offsets.items()))


def _forget(found: ConsumerGroups, topic: str, group: str, as_json: bool) -> None:
    is_forgotten = found.forget(topic, group)
    if as_json:
        output.write_json({"topic": topic, "group": group, "forgotten": is_forgotten})
    else:
        print("forgotten" if is_forgotten else f"{output.printable(group)} has no offsets of {output.printable(topic)}")


def _document(state: GroupState, action: str) -> dict[str, object]:
    document: dict[str, object] = {
        "group": state.group, "topic": state.topic, "members": list(state.members), "lag": state.lag, "lost": state.lost}
    if action == "list":
        return document | {"queues": len(state.queues)}
    return document | {"queues": [
        {"queue_id": queue.queue_id, "committed": queue.committed, "min_offset": queue.min_offset,
         "max_offset": queue.max_offset, "lag": queue.lag, "lost": queue.lost,
         "waiting_since_ms": queue.waiting_since_ms, "holder_pid": state.holders.get(queue.queue_id)}
        for queue in state.queues.values()]}


def _write_lag(states: list[GroupState]) -> None:
    for state in states:
        output.write_table(
            ("queue", "committed", "end", "lag", "lost", "waiting since", "held by"),
            [(queue.queue_id, queue.committed, queue.max_offset, queue.lag, queue.lost,
              output.time_text(queue.waiting_since_ms), state.holders.get(queue.queue_id))
             for queue in state.queues.values()],
            title=f"{output.printable(state.group)} on {output.printable(state.topic)}: {state.lag:,} behind")
