"""`pyengine offset-at`: the queue offset of a moment."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import queue_id_option, reading, store_command, topic_option


@click.command("offset-at")
@store_command
@topic_option
@queue_id_option
@click.option("--timestamp", "timestamp_ms", type=int, required=True, help="Milliseconds since 1970.")
def offset_at(store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_id: int, timestamp_ms: int) -> None:
    """Find the queue offset whose store time is nearest to a time.

    RocketMQ's rule: an exact match, else the nearer neighbour, the older one on a tie;
    a time before the first message gives the first, after the last the last.

    \b
    Example:
      pyengine offset-at STORE --topic orders --queue-id 0 --timestamp 1700000000000
    """
    with reading(store, settings) as reader:
        offset = reader.offset_by_time(topic, queue_id, timestamp_ms)
    if as_json:
        output.write_json({"topic": topic, "queue_id": queue_id, "timestamp_ms": timestamp_ms, "queue_offset": offset})
    else:
        print(offset)
