"""`pyengine get`: messages of one queue, by offset."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import messages, output
from pyengine.cli.options import level_option, queue_id_option, reading, store_command, topic_option
from pyengine.results import GetStatus

_WHY_NOTHING = {
    GetStatus.NO_MATCHED_MESSAGE: "no message with these tags from there on",
    GetStatus.MESSAGE_WAS_REMOVING: "the messages there have just been deleted",
    GetStatus.OFFSET_FOUND_NULL: "nothing stands at this offset",
    GetStatus.OFFSET_OVERFLOW_BADLY: "the offset is beyond the queue's end",
    GetStatus.OFFSET_OVERFLOW_ONE: "the offset is the queue's end: nothing has come yet",
    GetStatus.OFFSET_TOO_SMALL: "the messages at this offset have been deleted",
    GetStatus.NO_MATCHED_LOGIC_QUEUE: "there is no such queue",
    GetStatus.NO_MESSAGE_IN_QUEUE: "the queue holds no message",
}


@click.command()
@store_command
@topic_option
@queue_id_option
@click.option("--offset", type=click.IntRange(min=0), required=True, help="The queue offset of the first message.")
@click.option("--max-messages", type=click.IntRange(min=1), default=32, show_default=True, help="At most this many.")
@click.option("--tags", default=None, help="Only messages with one of these tags: 'A' or 'A || B'.")
@level_option
def get(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_id: int, offset: int, max_messages: int,
    tags: str | None, level: str | None,
) -> None:
    """Read messages of one queue from an offset on.

    Answers as RocketMQ's getMessage does: with a status, and with the offset to ask
    for next. One call stops at the end of a queue file, so it may give fewer messages
    than asked for.

    \b
    Examples:
      pyengine get STORE --topic orders --queue-id 0 --offset 0
      pyengine get STORE --topic orders --queue-id 0 --offset 100 --max-messages 8 --tags "paid || sent" --json
    """
    with reading(store, settings) as reader:
        found = reader.get_message(topic, queue_id, offset, max_messages, tags=tags, level=level)
    if as_json:
        output.write_json({
            "status": found.status.name, "next_begin_offset": found.next_begin_offset, "min_offset": found.min_offset,
            "max_offset": found.max_offset, "messages": [messages.message_document(one) for one in found.messages]})
        return
    if found.messages:
        messages.write_message_table(found.messages)
    why = _WHY_NOTHING.get(found.status, "")
    print(f"{found.status.name}{': ' + why if why else ''}; queue {found.min_offset} to {found.max_offset}, "
          f"next {found.next_begin_offset}")
