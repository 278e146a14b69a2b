"""`pyengine query`: messages by key, through the index."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import messages, output
from pyengine.cli.options import reading, store_command, topic_option


@click.command()
@store_command
@topic_option
@click.option("--key", required=True, help="One of the message's keys, or its unique key.")
@click.option("--begin", "begin_ms", type=click.IntRange(min=0), default=0, help="Stored at or after this time (ms).")
@click.option("--end", "end_ms", type=click.IntRange(min=0), default=None, help="Stored at or before this time (ms).")
@click.option("--max-messages", type=click.IntRange(min=1), default=64, show_default=True, help="At most this many.")
def query(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, key: str, begin_ms: int, end_ms: int | None,
    max_messages: int,
) -> None:
    """Find the messages that carry a key.

    The index holds hashes; the key's text is checked in each message, so only true
    hits are shown. Times are milliseconds since 1970.

    \b
    Example:
      pyengine query STORE --topic orders --key order-17
    """
    with reading(store, settings) as reader:
        found = reader.query_message(topic, key, begin_ms=begin_ms, end_ms=end_ms, max_messages=max_messages)
    if as_json:
        output.write_json({"topic": topic, "key": key, "messages": [messages.message_document(one) for one in found]})
        return
    if found:
        messages.write_message_table(found)
    print(f"{len(found)} message{'' if len(found) == 1 else 's'} with key {output.printable(key)}")
