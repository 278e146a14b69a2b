"""`pyengine put`, `cancel`, `get`, `tail`, `query`, `message` and `offset-at`: write and read messages.

    put, cancel                      put one message into a running engine; cancel a delayed one
    get, query, message, offset-at   read messages by queue offset, key, id and time
    tail                             read messages of a topic as they arrive
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import (
    NumberRange,
    Place,
    Reply,
    level_option,
    moment,
    parsed,
    place_option,
    queue_id_option,
    raw_option,
    reading,
    set_option,
    sql_option,
    store_argument,
    store_command,
    time_option,
    topic_option,
)
from pyengine.client.consumer import consume
from pyengine.client.consumer_groups import AtOffset
from pyengine.client.outgoing import DelayedCancels, OutgoingMessage, RefusedError, check
from pyengine.engine_config import keywords
from pyengine.errors import EngineError, ExitCode, FormatError, command, did_you_mean
from pyengine.formats.constants import SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC
from pyengine.formats.delayed_message import DelayedId
from pyengine.results import GetResult, GetStatus, PutResult
from pyengine.storage.config import existing_store
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import cancelled_messages

if TYPE_CHECKING:
    from pyengine.client.consumer import Consumer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader

_WHY_NOTHING = {
    GetStatus.NO_MATCHED_MESSAGE: "no message that was asked for from there on",
    GetStatus.MESSAGE_WAS_REMOVING: "the messages there have just been deleted",
    GetStatus.OFFSET_FOUND_NULL: "there is no message at this offset",
    GetStatus.OFFSET_OVERFLOW_BADLY: "the offset is beyond the queue's end",
    GetStatus.OFFSET_OVERFLOW_ONE: "the offset is the queue's end: nothing has come yet",
    GetStatus.OFFSET_TOO_SMALL: "the messages at this offset have been deleted",
    GetStatus.NO_MATCHED_LOGIC_QUEUE: "there is no such queue",
    GetStatus.NO_MESSAGE_IN_QUEUE: "the queue holds no message",
}


def _note_absent_queue(reader: LiveStoreReader, topic: str, queue_id: int) -> None:
    if queue_id not in reader.queue_ids(topic):
        output.note(f"{reader.name} has no queue {queue_id} of the topic {topic}: {command('topics', reader.name)} lists them")


@click.command()
@store_command
@topic_option
@queue_id_option
@click.option("--offset", type=click.IntRange(min=0), required=True, help="The queue offset of the first message.")
@click.option("--max-messages", type=click.IntRange(min=1), default=32, show_default=True, help="At most this many.")
@click.option("--tags", default=None, help="Only messages with one of these tags: 'A' or 'A || B'.")
@sql_option
@level_option
@raw_option
def get(store: Path, settings: dict[str, str], raw: bool, **wanted: Any) -> Reply:
    """Read messages of one queue from an offset on. The answer has RocketMQ's status and the next offset.

    \b
    Example:
      pyengine get STORE --topic orders --queue-id 0 --offset 100 --max-messages 8 --tags "paid || sent" --json
    """
    with reading(store, settings) as reader:
        found = reader.get_message(**wanted)
        _note_absent_queue(reader, wanted["topic"], wanted["queue_id"])
    return Reply({"status": found.status.name, "next_begin_offset": found.next_begin_offset, "min_offset": found.min_offset,
                 "max_offset": found.max_offset, "messages": [output.message_document(one, raw) for one in found.messages]},
                 lambda: _print_found(found, raw))


def _print_found(found: GetResult, raw: bool) -> None:
    if found.messages:
        output.write_message_table(found.messages, raw)
    why = _WHY_NOTHING.get(found.status, "")
    print(f"{found.status.name}{': ' + why if why else ''}; queue {found.min_offset} to {found.max_offset}, "
          f"next {found.next_begin_offset}")


@click.command()
@store_command
@topic_option
@click.option("--key", required=True, help="One of the message's keys, or its unique key.")
@time_option("--begin", "begin_ms", default="0", help="Stored at or after this time.")
@time_option("--end", "end_ms", default=None, help="Stored at or before this time.")
@click.option("--max-messages", type=click.IntRange(min=1), default=64, show_default=True, help="At most this many.")
@raw_option
def query(store: Path, settings: dict[str, str], raw: bool, topic: str, key: str, **wanted: Any) -> Reply:
    """Find the messages with a key, without false hits. A TIME may also be milliseconds since 1970.

    \b
    Example:
      pyengine query STORE --topic orders --key order-17 --begin 2026-01-31
    """
    if wanted["end_ms"] is not None and wanted["begin_ms"] > wanted["end_ms"]:
        raise click.UsageError("--begin is after --end")
    with reading(store, settings) as reader:
        found = reader.query_message(topic, key, **wanted)
        if not reader.queue_ids(topic):
            output.note(f"{reader.name} has no topic {topic}: {command('topics', reader.name)} lists them")

    def show() -> None:
        if found:
            output.write_message_table(found, raw)
        print(f"{len(found)} message{'' if len(found) == 1 else 's'} with key {output.printable(key)}")

    return Reply({"topic": topic, "key": key, "messages": [output.message_document(one, raw) for one in found]}, show)


@click.command()
@store_command
@click.argument("msg_id")
@click.option("--topic", default=None, help="Search a client's id in this topic only. Default: all topics.")
@raw_option
def message(store: Path, settings: dict[str, str], msg_id: str, topic: str | None, raw: bool) -> Reply:
    """Show one message in full.

    MSG_ID is the id in a put's answer, a RocketMQ client's id (UNIQ_KEY), or the position in the log. Exit code 1: none.

    \b
    Examples:
      pyengine message STORE 7F00000100002A9F0000000000000000
    """
    with reading(store, settings) as reader:
        found, others = _find_message(reader, msg_id, topic)
        cancelled = found is not None and found.topic == SCHEDULE_TOPIC and DelayedId.of(found) in cancelled_messages(reader.root)
    if found is None:
        print(f"no message {output.printable(msg_id)} in {store}", file=sys.stderr)
        return Reply(None, "", ExitCode.FAILED)
    if others:
        output.note(f"{others} more message{'' if others == 1 else 's'} with this UNIQ_KEY: `pyengine query STORE --topic TOPIC "
                    f"--key {msg_id}` shows them")
    if cancelled:
        output.note("this delayed message is cancelled: it is never delivered")
    return Reply(output.message_document(found, raw) | ({"cancelled": True} if cancelled else {}),
                 lambda: output.write_message(found, raw))


def _find_message(reader: LiveStoreReader, msg_id: str, topic: str | None) -> tuple[Message | None, int]:
    """Return the message, and how many others have the same UNIQ_KEY; EngineError for a text that is neither that nor an id."""
    if len(msg_id) < 20 and msg_id.isascii() and msg_id.isdecimal():
        return reader.message_at(int(msg_id)), 0
    wrong: FormatError | None = None
    try:
        found = reader.message(msg_id) if topic is None else None
    except FormatError as error:
        found, wrong = None, error
    if found is not None:
        return found, 0
    topics = reader.topics() if topic is None else [topic]
    hits = [one for name in topics for one in reader.query_message(name, msg_id) if one.uniq_key == msg_id]
    if not hits and wrong is not None:
        raise EngineError(f"{wrong}, and no message has it as its UNIQ_KEY; or give a position in the log, a plain number") from wrong
    hits.sort(key=lambda one: (one.topic in (SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC), one.physical_offset))
    return (hits[0], len(hits) - 1) if hits else (None, 0)


@click.command("offset-at")
@store_command
@topic_option
@queue_id_option
@time_option("--timestamp", "timestamp_ms", required=True, help="The time; also milliseconds since 1970.")
def offset_at(store: Path, settings: dict[str, str], topic: str, queue_id: int, timestamp_ms: int) -> Reply:
    """Find the queue offset nearest to a store time. Of two equally near times it is the older.

    \b
    Example:
      pyengine offset-at STORE --topic orders --queue-id 0 --timestamp 2026-01-31T12:00:00Z
    """
    with reading(store, settings) as reader:
        offset = reader.offset_by_time(topic, queue_id, timestamp_ms)
        _note_absent_queue(reader, topic, queue_id)
    return Reply({"topic": topic, "queue_id": queue_id, "timestamp_ms": timestamp_ms, "queue_offset": offset}, str(offset))


def _properties(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str] | None:
    properties = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair}: give name=value", ctx, param)
        properties[name] = value
    return properties or None


@click.command()
@store_command
@topic_option
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="The queue's number. Default: the topic's queues in turn.")
@click.option("--sharding-key", default=None, metavar="KEY",
              help="Choose the queue by this key, whose messages stay in order.")
@click.option("--tags", default=None, help="The message's tag.")
@click.option("--keys", default=None, help="Keys for `pyengine query`, separated by blanks.")
@click.option("--property", "properties", multiple=True, metavar="NAME=VALUE", callback=_properties,
              help="A property; may be repeated.")
@click.option("--flag", type=int, default=0, show_default=True, help="A number that the application chooses.")
@click.option("--delay-level", type=click.IntRange(min=0), default=0, show_default=True,
              help="Deliver after this level of message_delay_level.")
@click.option("--deliver-at", metavar="TIME", help="Deliver at this time, up to 40 days ahead.",
              callback=parsed(moment, "a time like 2030-01-31T12:00:00Z, or @ and milliseconds since 1970"))
@click.option("--no-wait", is_flag=True, help="Do not wait for the disk in sync mode.")
@click.option("--timeout", "timeout_s", type=NumberRange(min=0, min_open=True), default=None,
              help="Longest wait for the engine, and for its answer. Default: 10, and put_timeout_ms.")
@click.argument("body")
def put(store: Path, settings: dict[str, str], no_wait: bool, timeout_s: float | None, body: str, **message: Any) -> Reply:
    """Put one message. BODY is its text; - reads it from standard input as it is. Exit code 0 only for PUT_OK.

    \b
    Examples:
      pyengine put STORE --topic orders --tags paid --keys "order-17 customer-4" "17 paid"
      pyengine put STORE --topic reminders --deliver-at 2026-12-24T18:00:00+01:00 "light the candles"
    """
    if message["queue_id"] is not None and message["sharding_key"] is not None:
        raise click.UsageError("give one of --queue-id and --sharding-key: each chooses the queue")
    data = None if body == "-" else body.encode("utf-8", "surrogateescape")
    result = _put(store, settings, timeout_s, not no_wait, OutgoingMessage(body=data or b"", **message), from_stdin=data is None)
    names = "msg_id queue_offset physical_offset topic queue_id size_bytes store_timestamp_ms reason indeterminate"
    document = {"status": result.status.name} | {name: getattr(result, name) for name in names.split()}
    if not result.ok:
        return Reply(document, "", ExitCode.FAILED, f"{result.status.name}: {output.printable(result.reason)}")
    waits = f"waits in {output.printable(result.topic)} " if result.topic != message["topic"] else ""
    return Reply(document, f"{result.status.name} {result.msg_id} {waits}queue {result.queue_id} offset {result.queue_offset}")


def _put(store: Path, settings: dict[str, str], timeout_s: float | None, wait: bool, message: OutgoingMessage, *,
         from_stdin: bool) -> PutResult:
    """Return the result of a put; what no engine accepts is refused before one is waited for.

    A body `from_stdin`, which may have no end, is read up to the first byte that is too much for the engine.
    """
    from pyengine.client.producer import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S, until_ready

    try:
        check(message)
    except RefusedError as refused:
        return PutResult(refused.status, topic=message.topic, queue_id=message.queue_id or 0, reason=refused.reason)
    wait_s = timeout_s or CONNECT_TIMEOUT_S
    until_ready(lambda left_s: existing_store(store), wait_s)
    with connect(store, ring_bytes=None, timeout_s=wait_s, refusals="return", **keywords(settings)) as producer:
        if from_stdin:
            message.body = sys.stdin.buffer.read(producer._puts.max_message_bytes + 1)
        return producer.put(**{each.name: getattr(message, each.name) for each in fields(message)}, wait=wait, timeout_s=timeout_s)


@click.command()
@store_command
@click.argument("msg_id")
def cancel(store: Path, settings: dict[str, str], msg_id: str) -> Reply:
    """Cancel a delayed message. MSG_ID is what its put printed.

    Exit code 1: it is due, delivered or deleted. It needs no engine.

    \b
    Examples:
      pyengine cancel STORE 7F00000100002A9F0000000000000000
    """
    with reading(store, settings) as reader, closing(DelayedCancels(reader)) as cancels:
        is_cancelled = cancels.cancel(msg_id)
    if is_cancelled:
        return Reply({"msg_id": msg_id, "cancelled": True}, "cancelled: it is never delivered")
    return Reply({"msg_id": msg_id, "cancelled": False}, "not cancelled: it is due, delivered or deleted", ExitCode.FAILED)


COMMIT_INTERVAL_S = 1.0
PULL_MESSAGES = 32


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and message.")
@topic_option
@click.option("--queue-id", "queue_ids", type=click.IntRange(min=0), multiple=True,
              help="Only this queue; may be repeated. Default: all queues, also new ones.")
@place_option("--from", "place",
              help="Where to start in each queue; last: new messages only. Default: last; with --group first, if the group is new.")
@click.option("--group", default=None, help="Join this consumer group.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or stop at the end.")
@click.option("--max-messages", type=click.IntRange(min=1), default=None, help="Stop after this many.")
@click.option("--tags", default=None, help="Only messages with one of these tags: 'A' or 'A || B'.")
@sql_option
@level_option
@raw_option
def tail(store: Path, settings: dict[str, str], as_json: bool, raw: bool, topic: str, group: str | None, follow: bool,
         **choice: Any) -> None:
    """Print the messages of a topic as they come; Ctrl-C ends it.

    With --group it is a member (docs/consumers.md), unless --queue-id names queues.

    \b
    Examples:
      pyengine tail STORE --topic orders --from first --no-follow --json
    """
    queue_ids, max_messages = choice.pop("queue_ids"), choice.pop("max_messages")
    given: Place | None = choice.pop("place")
    place: Place = given if given is not None else "last" if group is None else "first"
    start = AtOffset(place) if isinstance(place, int) else place
    with reading(store, settings) as reader:
        if not follow and topic not in reader.topics() and topic not in TopicConfigs(store).read().rows:
            raise EngineError(f"{store} has no topic {topic}{did_you_mean(topic, reader.topics())}")
    with consume(store, topic, group=group, from_=start, queues=queue_ids or None, auto_commit=False, **choice | settings) as consumer:
        _print_and_commit(consumer, follow, max_messages, lambda message: _print(message, as_json, raw))


def _print_and_commit(consumer: Consumer, follow: bool, max_messages: int | None, show: Callable[[Message], None]) -> None:
    """Show the messages; for a group commit their offsets every COMMIT_INTERVAL_S and at the end."""
    printed: dict[int, Message] = {}
    shown_notes: set[str] = set()

    def remember() -> None:
        sys.stdout.flush()
        if consumer.group is not None:
            consumer.commit(printed.values())
        printed.clear()
        for note in consumer.notes:
            if note not in shown_notes:
                shown_notes.add(note)
                output.note(note)

    left, due_s = sys.maxsize if max_messages is None else max_messages, 0.0
    try:
        while left > 0:
            output.pause()
            before = consumer.positions
            found = consumer.pull(min(left, PULL_MESSAGES), timeout_s=COMMIT_INTERVAL_S if follow else 0)
            for message in found:
                show(message)
                printed[message.queue_id] = message
            sys.stdout.flush()
            left -= len(found)
            if time.monotonic() >= due_s:
                remember()
                due_s = time.monotonic() + COMMIT_INTERVAL_S
            if not found and not follow and consumer.positions == before:  # and it has not only passed messages that do not match
                return
    finally:
        remember()


def _print(message: Message, as_json: bool, raw: bool) -> None:
    if as_json:
        output.write_json(output.message_document(message, raw))
        return
    marks = [output.time_text(message.store_timestamp_ms), f"queue {message.queue_id}", f"offset {message.queue_offset}"]
    marks += [f"tags {output.printable(message.tags)}"] if message.tags else []
    marks += [f"keys {output.printable(message.keys)}"] if message.keys else []
    print(" ".join(marks), "|", output.body_text(output.shown_body(message, raw)[0]))
