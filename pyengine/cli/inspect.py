"""`pyengine inspect`: all that can be read from a store, as one document."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command


@click.command()
@store_command
def inspect(store: Path, settings: dict[str, str], as_json: bool) -> None:
    """Show everything that a store holds, as it is: positions, records, queues, queries.

    Strictly read-only: nothing is recovered, created or written, also beside a running
    engine or broker. Queues come through the consume queues and queries through the
    index, never from the log behind their back, so what is broken there shows here.
    With --json every record, queue entry, message and key query; else a summary.

    \b
    Examples:
      pyengine inspect STORE
      pyengine inspect STORE --json --set mappedFileSizeConsumeQueue=1000 > store.json
    """
    from pyengine.storage.inspect import inspect as inspect_store

    document = inspect_store(existing_store(store), settings)
    if as_json:
        output.write_json(document)
        return
    facts = document["facts"]
    output.write_facts([
        ("log begins at", facts["minPhy"]), ("log ends at", facts["maxPhy"]),
        ("records", len(document["records"])), ("messages in queues", len(document["messages"])),
        ("keys in the log", len(document["queries"])),
        ("found by key", sum(1 for query in document["queries"] if query["phys"]))])
    print()
    output.write_table(("topic", "queue", "min", "max", "entries"), [
        (queue["topic"], queue["queueId"], queue["min"], queue["max"], len(queue["entries"])) for queue in facts["queues"]])
