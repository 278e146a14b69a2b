"""`pyengine put`: one message into a running engine."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, moment, store_command, topic_option
from pyengine.errors import ExitCode


def _properties(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str] | None:
    properties = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair}: give name=value", ctx, param)
        properties[name] = value
    return properties or None


def _deliver_at(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    try:
        return None if value is None else moment(value)
    except ValueError:
        raise click.BadParameter(f"{value}: give a time like 2030-01-31T12:00:00Z, or @MS", ctx, param) from None


@click.command()
@store_command
@topic_option
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="The queue's number. Default: 0.")
@click.option("--spread", is_flag=True, help="Take one of the topic's queues by chance, as many as it has to write.")
@click.option("--sharding-key", default=None, metavar="KEY",
              help="Take the queue of this key: messages of one key stay in order.")
@click.option("--tags", default=None, help="The message's tag.")
@click.option("--keys", default=None, help="Keys to find it by, separated by blanks.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", callback=_properties,
              help="A property; may be repeated.")
@click.option("--flag", type=int, default=0, show_default=True, help="A number of the application's own.")
@click.option("--delay-level", type=click.IntRange(min=0), default=0, show_default=True,
              help="Deliver later, by level of message_delay_level; 0 at once.")
@click.option("--deliver-at", metavar="TIME", callback=_deliver_at,
              help="Deliver at this time, up to 40 days ahead: ISO 8601 (UTC if it names no zone), or @ and ms since 1970.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the disk in sync mode.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=None,
              help="Longest wait for the answer, in seconds.")
@click.argument("body")
def put(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_id: int | None, spread: bool,
    sharding_key: str | None, tags: str | None, keys: str | None,
    properties: dict[str, str] | None, flag: int, delay_level: int, deliver_at: datetime | None, no_wait: bool,
    timeout_s: float | None, body: str,
) -> int:
    """Put one message; BODY is its text, - reads it from standard input as it is.

    The engine must be running. Exit code 0 only for PUT_OK; any other status comes
    with a sentence that says what to change.

    \b
    Examples:
      pyengine put STORE --topic orders --tags paid --keys "order-17 customer-4" "17 paid"
      pyengine put STORE --topic orders --sharding-key customer-4 "17 sent"
      pyengine put STORE --topic photos - < photo.jpg
      pyengine put STORE --topic reminders --deliver-at 2026-12-24T18:00:00+01:00 "light the candles"
    """
    from pyengine import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S

    existing_store(store)
    if (queue_id is not None) + spread + (sharding_key is not None) > 1:
        raise click.UsageError("give one of --queue-id, --spread and --sharding-key: each chooses the queue")
    data = sys.stdin.buffer.read() if body == "-" else body.encode("utf-8", "surrogateescape")
    with connect(store, ring_bytes=None, timeout_s=CONNECT_TIMEOUT_S, **settings) as producer:
        result = producer.put(topic, data, queue_id=None if spread else queue_id or 0, sharding_key=sharding_key, tags=tags, keys=keys,
                              properties=properties, flag=flag, delay_level=delay_level, deliver_at=deliver_at, wait=not no_wait,
                              timeout_s=timeout_s)
    if as_json:
        output.write_json({
            "status": result.status.name, "msg_id": result.msg_id, "queue_offset": result.queue_offset,
            "physical_offset": result.physical_offset, "topic": result.topic, "queue_id": result.queue_id,
            "size_bytes": result.size_bytes, "store_timestamp_ms": result.store_timestamp_ms, "reason": result.reason,
            "indeterminate": result.indeterminate})
    elif result.ok:
        print(f"{result.status.name} {result.msg_id} queue {result.queue_id} offset {result.queue_offset}")
    if not result.ok:
        print(f"error: {result.status.name}: {output.printable(result.reason)}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK
