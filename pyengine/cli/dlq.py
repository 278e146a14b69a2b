"""`pyengine dlq`: the messages that consumer groups could not deal with: list them, show them, put them back."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, json_option, set_option, store_argument

ACTIONS = ("list", "show", "requeue")


@click.command()
@store_argument
@click.argument("action", type=click.Choice(ACTIONS), default="list")
@set_option
@json_option
@click.option("--group", default=None, help="The consumer group.")
@click.option("--offset", "offsets", type=click.IntRange(min=0), multiple=True,
              help="For show: begin here. For requeue: only this one; may be repeated.")
@click.option("--max-messages", type=click.IntRange(min=1), default=32, show_default=True, help="For show: at most this many.")
def dlq(
    store: Path, action: str, settings: dict[str, str], as_json: bool, group: str | None, offsets: tuple[int, ...],
    max_messages: int,
) -> None:
    """List the dead letters of a store, show those of a group, or put them back.

    A message becomes a dead letter when its group has given it back 16 times (max_reconsume_times). LIST is one line for
    a group: `waiting` are those that were not put back yet. REQUEUE puts all that wait back, or those at the offsets
    given; the group, and no other, gets them again. It needs a running engine.

    \b
    Examples:
      pyengine dlq STORE
      pyengine dlq STORE show --group billing
      pyengine dlq STORE requeue --group billing
      pyengine dlq STORE requeue --group billing --offset 17 --offset 18
    """
    from pyengine.client.retries import DeadLetters

    letters = DeadLetters(existing_store(store), **settings)
    if action == "list":
        if offsets:
            raise click.UsageError("--offset is for show and requeue")
        rows = [queue for queue in letters.queues() if group in (None, queue.group)]
        if as_json:
            output.write_json({"groups": [
                {"group": row.group, "messages": row.messages, "waiting": row.waiting, "first_offset": row.first,
                 "next_offset": row.next, "end_offset": row.end, "oldest_ms": row.oldest_ms} for row in rows]})
        else:
            output.write_table(("group", "messages", "waiting", "next offset", "oldest"), [
                (row.group, row.messages, row.waiting, row.next, output.time_text(row.oldest_ms)) for row in rows])
        return
    if group is None:
        raise click.UsageError(f"{action} needs --group")
    if action == "show":
        if len(offsets) > 1:
            raise click.UsageError("show begins at one --offset")
        messages = letters.messages(group, offsets[0] if offsets else None, max_messages)
        if as_json:
            output.write_json({"group": group, "messages": [
                output.message_document(one) for one in messages]})
        else:
            output.write_message_table(messages)
        return
    count = letters.requeue(group, offsets or None)
    if as_json:
        output.write_json({"group": group, "requeued": count})
    else:
        print(f"{count} put back for {output.printable(group)}")
