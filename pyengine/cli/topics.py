"""`pyengine topics`: what topics a store has and is meant to have; enter and change them in topics.json."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, reading, store_command
from pyengine.errors import UsageError

if TYPE_CHECKING:
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.topic_config import TopicConfig

PERMS = {"rw": 6, "r": 4, "w": 2, "none": 0}


@click.command()
@store_command
@click.argument("action", type=click.Choice(["list", "create", "update", "delete"]), default="list")
@click.argument("topic", required=False)
@click.option("--queues", type=click.IntRange(min=1), default=None, help="Queues to read and to write; 8 for a new topic.")
@click.option("--read-queues", type=click.IntRange(min=1), default=None, help="Queues to read.")
@click.option("--write-queues", type=click.IntRange(min=1), default=None, help="Queues to write.")
@click.option("--perm", type=click.Choice(list(PERMS)), default=None, help="What clients may do; rw for a new topic.")
@click.option("--order/--no-order", default=None, help="Whether it is an ordered topic.")
@click.option("--sizes", is_flag=True, help="List what the messages take in the log too, the largest topic first.")
def topics(
    store: Path, settings: dict[str, str], as_json: bool, action: str, topic: str | None, queues: int | None,
    read_queues: int | None, write_queues: int | None, perm: str | None, order: bool | None, sizes: bool,
) -> None:
    """List a store's topics; create, update or delete one in config/topics.json.

    The list shows the topics that have messages and those that topics.json names. The
    engine itself needs no entry; the first message of a topic makes it one. The file is
    RocketMQ's, for brokers and tools that plan by it. Works with and without a running engine, not while a broker
    has the store open. `delete` takes the entry away, not the messages, and
    the next one makes it again. --sizes adds up the
    sizes that the queues name: the whole records of messages that can still be read.

    \b
    Examples:
      pyengine topics STORE
      pyengine topics STORE --sizes
      pyengine topics STORE create orders --queues 4
      pyengine topics STORE update orders --write-queues 8 --perm r
    """
    existing_store(store)
    changes: dict[str, Any] = {
        "read_queue_nums": read_queues or queues, "write_queue_nums": write_queues or queues,
        "perm": None if perm is None else PERMS[perm], "order": order}
    changes = {name: value for name, value in changes.items() if value is not None}
    if action == "list":
        if topic is not None or changes:
            raise UsageError("list takes no topic and no options but --sizes: give create, update or delete before the topic")
        _list(store, settings, as_json, sizes)
        return
    if sizes:
        raise UsageError("--sizes belongs to the list")
    if topic is None:
        raise UsageError(f"{action} what? name the topic: pyengine topics STORE {action} TOPIC")
    _change(store, action, topic, changes, as_json)


def _change(store: Path, action: str, topic: str, changes: dict[str, Any], as_json: bool) -> None:
    from pyengine.client.outgoing import PutRefusedError, topic_bytes
    from pyengine.storage.topic_config import TopicConfig, TopicConfigs

    configs = TopicConfigs(store)
    _tell(configs.read().said)
    if action == "delete":
        if changes:
            raise UsageError("delete takes no options")
        configs.delete(topic)
        made = None
    elif action == "create":
        try:
            topic_bytes(topic)
        except PutRefusedError as refused:
            raise UsageError(refused.reason) from None
        made = configs.create(TopicConfig(topic, **changes))
    else:
        if not changes:
            raise UsageError("update what? give --queues, --read-queues, --write-queues, --perm or --order")
        made = configs.update(topic, **changes)
    if as_json:
        output.write_json({"topic": topic, "action": action} | (_document(made) if made else {}))
    else:
        what = f": {made.read_queue_nums} queues to read, {made.write_queue_nums} to write, {made.perm_text}" if made else ""
        print(f"{action}d {output.printable(topic)}{what}")


def _list(store: Path, settings: dict[str, str], as_json: bool, sizes: bool) -> None:
    from pyengine.storage.topic_config import TopicConfigs

    table = TopicConfigs(store).read()
    _tell(table.said)
    rows: list[dict[str, Any]] = []
    with reading(store, settings) as reader:
        found = reader.topics()
        for topic in sorted(found.keys() | table.rows.keys()):
            ranges = {queue_id: reader.queue_range(topic, queue_id) for queue_id in found.get(topic, ())}
            config = table.rows.get(topic)
            size = {"bytes": sum(_record_bytes(reader, topic, queue_id, *span) for queue_id, span in ranges.items())} if sizes else {}
            rows.append({"topic": topic, "queues": found.get(topic, []), "messages": sum(end - first for first, end in ranges.values()),
                         **size, "configured": config is not None} | (_document(config) if config else {}))
    if sizes:
        rows.sort(key=lambda row: -row["bytes"])
    if as_json:
        output.write_json({"topics": rows, "data_version": {"counter": table.counter, "timestamp_ms": table.timestamp_ms},
                           "said": table.said})
        return
    output.write_table(
        ("topic", "queues", "messages", *(["bytes"] if sizes else []), "to read", "to write", "perm", "ordered"),
        [(row["topic"], len(row["queues"]), row["messages"], *([row["bytes"]] if sizes else []), row.get("read_queue_nums"),
          row.get("write_queue_nums"), row.get("perm_text"), row.get("order")) for row in rows])


def _record_bytes(reader: LiveStoreReader, topic: str, queue_id: int, first: int, end: int) -> int:
    queue = reader.queue(topic, queue_id)
    return 0 if queue is None else queue.record_bytes(first, end)


def _document(config: TopicConfig) -> dict[str, Any]:
    return {"read_queue_nums": config.read_queue_nums, "write_queue_nums": config.write_queue_nums, "perm": config.perm,
            "perm_text": config.perm_text, "order": config.order}


def _tell(said: str) -> None:
    if said:
        print(f"warning: {said}", file=sys.stderr)
