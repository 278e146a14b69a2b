"""`pyengine dump`: the structures of a store, field by field."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli.options import existing_store, json_option, set_option, store_argument
from pyengine.errors import UsageError


@click.command()
@store_argument
@click.argument("what", type=click.Choice(["checkpoint", "index", "queue", "control"]))
@set_option
@json_option
@click.option("--topic", default=None, help="queue: the topic.")
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="queue: the queue's number.")
@click.option("--offset", type=click.IntRange(min=0), default=None, help="queue: first entry; the oldest if not given.")
@click.option("--file", "file_name", default=None, help="index: this file only, by name.")
@click.option("--entries", is_flag=True, help="index: the entries too, not the headers alone.")
@click.option("--max", "most", type=click.IntRange(min=1), default=64, show_default=True,
              help="queue, index: at most this many entries.")
def dump(
    store: Path, what: str, settings: dict[str, str], as_json: bool, topic: str | None, queue_id: int | None,
    offset: int | None, file_name: str | None, entries: bool, most: int,
) -> None:
    """Print what stands in a store's files or shared memory, undecoded but named.

    \b
    checkpoint  its three store times
    queue       entries of one consume queue: position, size, tag code
    index       header of each index file; with --entries the chained entries too
    control     the control block in shared memory: field, offset, owner, value

    \b
    Examples:
      pyengine dump STORE checkpoint
      pyengine dump STORE queue --topic orders --queue-id 0 --offset 10 --max 5
      pyengine dump STORE index --entries --json
    """
    existing_store(store)
    if what == "queue" and (topic is None or queue_id is None):
        raise UsageError("dump STORE queue needs --topic and --queue-id")
    if what == "checkpoint":
        from pyengine.cli.dump_checkpoint import dump_checkpoint

        dump_checkpoint(store, as_json)
    elif what == "queue":
        from pyengine.cli.dump_queue import dump_queue

        dump_queue(store, settings, as_json, topic, queue_id, offset, most)
    elif what == "index":
        from pyengine.cli.dump_index import dump_index

        dump_index(store, settings, as_json, file_name, most if entries else 0)
    else:
        from pyengine.cli.dump_control import dump_control

        dump_control(store, as_json)
