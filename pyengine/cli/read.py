"""`pyengine get`, `query`, `message` and `offset-at`: messages by queue offset, key, id and time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import level_option, queue_id_option, raw_option, reading, sql_option, store_command, topic_option
from pyengine.errors import ExitCode, FormatError, UsageError
from pyengine.formats.constants import SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC
from pyengine.results import GetStatus

if TYPE_CHECKING:
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
def get(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_id: int, offset: int, max_messages: int,
    tags: str | None, sql: str | None, level: str | None, raw: bool,
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
        found = reader.get_message(topic, queue_id, offset, max_messages, tags=tags, level=level, sql=sql)
    if as_json:
        output.write_json({
            "status": found.status.name, "next_begin_offset": found.next_begin_offset, "min_offset": found.min_offset,
            "max_offset": found.max_offset, "messages": [output.message_document(one, raw) for one in found.messages]})
        return
    if found.messages:
        output.write_message_table(found.messages, raw)
    why = _WHY_NOTHING.get(found.status, "")
    print(f"{found.status.name}{': ' + why if why else ''}; queue {found.min_offset} to {found.max_offset}, "
          f"next {found.next_begin_offset}")


@click.command()
@store_command
@topic_option
@click.option("--key", required=True, help="One of the message's keys, or its unique key.")
@click.option("--begin", "begin_ms", type=click.IntRange(min=0), default=0, help="Stored at or after this time (ms).")
@click.option("--end", "end_ms", type=click.IntRange(min=0), default=None, help="Stored at or before this time (ms).")
@click.option("--max-messages", type=click.IntRange(min=1), default=64, show_default=True, help="At most this many.")
@raw_option
def query(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, key: str, begin_ms: int, end_ms: int | None,
    max_messages: int, raw: bool,
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
        output.write_json({"topic": topic, "key": key, "messages": [output.message_document(one, raw) for one in found]})
        return
    if found:
        output.write_message_table(found, raw)
    print(f"{len(found)} message{'' if len(found) == 1 else 's'} with key {output.printable(key)}")


@click.command()
@store_command
@click.argument("msg_id")
@click.option("--topic", default=None, help="Look for a client's id in this topic only; in all topics if not given.")
@raw_option
def message(store: Path, settings: dict[str, str], as_json: bool, msg_id: str, topic: str | None, raw: bool) -> int:
    """Show one message in full.

    MSG_ID is the id that a put answered with (32 or 56 hexadecimal characters), the id that a
    RocketMQ client shows (the property UNIQ_KEY, which the index finds), or the message's position
    in the commit log as a plain number. Of several messages with the same UNIQ_KEY (a retry, or the
    delayed and the delivered one) the oldest of an ordinary topic is shown. Exit code 1 if there is
    no message.

    \b
    Examples:
      pyengine message STORE 7F00000100002A9F0000000000000000
      pyengine message STORE AC11000100002A9F5C7A2D3B00010000 --topic orders
      pyengine message STORE 0
    """
    with reading(store, settings) as reader:
        found, others = _find_message(reader, msg_id, topic)
    if found is None:
        print(f"no message {output.printable(msg_id)} in {store}", file=sys.stderr)
        if as_json:
            output.write_json(None)
        return ExitCode.FAILED
    if others:
        print(f"note: {others} more message{'' if others == 1 else 's'} with this UNIQ_KEY: `pyengine query STORE --topic TOPIC "
              f"--key {output.printable(msg_id)}` shows them", file=sys.stderr)
    if as_json:
        output.write_json(output.message_document(found, raw))
    else:
        output.write_message(found, raw)
    return ExitCode.OK


def _find_message(reader: LiveStoreReader, msg_id: str, topic: str | None) -> tuple[Message | None, int]:
    """The message, and how many others have the same UNIQ_KEY; UsageError for a text that is no id of any kind."""
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
        raise UsageError(f"{wrong}, and no message has it as its UNIQ_KEY; or give a position in the log, a plain number") from wrong
    hits.sort(key=lambda one: (one.topic in (SCHEDULE_TOPIC, TRANSACTION_HALF_TOPIC), one.physical_offset))
    return (hits[0], len(hits) - 1) if hits else (None, 0)


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
