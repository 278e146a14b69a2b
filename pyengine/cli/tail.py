"""`pyengine tail`: messages of a topic as they come."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import messages, output
from pyengine.cli.follow import Follower
from pyengine.cli.options import level_option, reading, set_option, store_argument, topic_option
from pyengine.errors import EngineError
from pyengine.storage.consumer_offset import ConsumerOffsets

if TYPE_CHECKING:
    from pyengine.formats.message import Message

COMMIT_INTERVAL_S = 1.0


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and message: a stream has no end.")
@topic_option
@click.option("--queue-id", "queue_ids", type=click.IntRange(min=0), multiple=True,
              help="Only this queue; may be repeated. All queues, also new ones, if not given.")
@click.option("--from", "start", default="end", show_default=True, metavar="begin|end|N",
              help="Where to start in each queue: its begin, its end, or an offset.")
@click.option("--group", default=None, help="Go on where this consumer group stopped, and remember how far it came.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or stop at the end.")
@click.option("--max-messages", type=click.IntRange(min=1), default=None, help="Stop after this many.")
@click.option("--tags", default=None, help="Only messages with one of these tags: 'A' or 'A || B'.")
@level_option
def tail(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_ids: tuple[int, ...], start: str,
    group: str | None, follow: bool, max_messages: int | None, tags: str | None, level: str | None,
) -> None:
    """Print the messages of a topic as they come; Ctrl-C ends it.

    Needs no engine, but without one nothing comes. Messages of one queue come in order;
    queues are read in turn. Without --group nothing is changed. With it the group's
    offsets stand in config/consumerOffset.json, as RocketMQ keeps them: a message may
    come twice after a crash, none is left out. --from is for queues new to the group.

    \b
    Examples:
      pyengine tail STORE --topic orders
      pyengine tail STORE --topic orders --from begin --no-follow --json
      pyengine tail STORE --topic orders --group billing --from begin
    """
    if start not in ("begin", "end") and not (start.isascii() and start.isdecimal()):
        raise click.BadParameter(f"{start}: give begin, end or an offset", param_hint="--from")
    with reading(store, settings) as reader:
        if not follow and topic not in reader.topics():
            raise EngineError(f"{store} has no topic {topic}")
        offsets = ConsumerOffsets(store) if group is not None else None
        follower = Follower(reader, topic, queue_ids, start=start, tags=tags, level=level,
                            committed=offsets.read(topic, group) if offsets and group else None)
        committer = _Committer(offsets, topic, group or "", follower)
        try:
            for message in follower.messages(follow=follow, max_messages=max_messages, idle=committer.idle):
                _print(message, as_json)
        finally:
            committer.commit()


class _Committer:
    """Remembers the group's offsets, at most once a COMMIT_INTERVAL_S and at the end, and only what was printed."""

    def __init__(self, offsets: ConsumerOffsets | None, topic: str, group: str, follower: Follower) -> None:
        self._offsets = offsets
        self._topic = topic
        self._group = group
        self._follower = follower
        self._remembered: dict[int, int] = {}
        self._due_s = 0.0

    def idle(self) -> None:
        sys.stdout.flush()
        if time.monotonic() >= self._due_s:
            self.commit()
            self._due_s = time.monotonic() + COMMIT_INTERVAL_S

    def commit(self) -> None:
        now = dict(self._follower.next_offsets)
        if self._offsets is not None and now != self._remembered:
            sys.stdout.flush()
            self._offsets.commit(self._topic, self._group, now)
            self._remembered = now


def _print(message: Message, as_json: bool) -> None:
    if as_json:
        output.write_json(messages.message_document(message))
        return
    marks = [output.time_text(message.store_timestamp_ms), f"queue {message.queue_id}", f"offset {message.queue_offset}"]
    marks += [f"tags {output.printable(message.tags)}"] if message.tags else []
    marks += [f"keys {output.printable(message.keys)}"] if message.keys else []
    print(" ".join(marks), "|", output.body_text(message.body))
