"""`pyengine tail`: messages of a topic as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from pyengine.cli import output
from pyengine.cli.options import level_option, raw_option, reading, set_option, sql_option, store_argument, topic_option
from pyengine.client.consumer import consume
from pyengine.client.consumer_groups import AtOffset, Start
from pyengine.errors import EngineError
from pyengine.results import GetStatus

if TYPE_CHECKING:
    from pyengine.client.consumer import Consumer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader

LOOK_AGAIN_S = 0.5  # also how soon a new queue is seen
COMMIT_INTERVAL_S = 1.0
PULL_MESSAGES = 32
_SYNONYMS = {"begin": "first", "end": "last"}


class Follower:
    """Reads the queues of one topic in turn; messages of one queue come in order.

    `next_offsets` is what to ask for next, by queue. `start` is first, last or an offset; a
    queue that appears later is read from its first message.
    """

    def __init__(
        self, reader: LiveStoreReader, topic: str, queue_ids: tuple[int, ...] = (), *, start: str = "last",
        tags: str | None = None, sql: str | None = None, level: str | None = None,
    ) -> None:
        self._reader = reader
        self._topic = topic
        self._queue_ids = queue_ids
        self._start = start
        self._tags = tags
        self._sql = sql
        self._level = level
        self._first_look = True
        self.next_offsets: dict[int, int] = {}

    def messages(self, *, follow: bool, max_messages: int | None, idle: Callable[[], None]) -> Iterator[Message]:
        """Messages as they come, at most `max_messages`; without `follow` it ends where nothing more is.

        `idle` is called after each round over the queues, before it sleeps.
        """
        count = 0
        while True:
            seen = self._reader.arrivals()
            moved = False
            for queue_id in self._queue_ids or self._reader.topics().get(self._topic, []):
                before = self._next_offset(queue_id)
                found = self._reader.get_message(self._topic, queue_id, before, tags=self._tags, level=self._level, sql=self._sql)
                for message in found.placed(queue_id):
                    yield message
                    self.next_offsets[queue_id] = message.queue_offset + 1
                    count += 1
                    if count == max_messages:
                        return
                if found.status is not GetStatus.OFFSET_OVERFLOW_ONE:
                    self.next_offsets[queue_id] = found.next_begin_offset
                moved = moved or self.next_offsets[queue_id] != before
            self._first_look = False
            idle()
            if not moved:
                if not follow:
                    return
                self._reader.wait_for_arrival(LOOK_AGAIN_S, seen)

    def _next_offset(self, queue_id: int) -> int:
        if queue_id not in self.next_offsets:
            self.next_offsets[queue_id] = self._first_offset(queue_id)
        return self.next_offsets[queue_id]

    def _first_offset(self, queue_id: int) -> int:
        low, high = self._reader.queue_range(self._topic, queue_id)
        if self._start == "first" or not self._first_look:
            return low
        return high if self._start == "last" else int(self._start)


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and message: a stream has no end.")
@topic_option
@click.option("--queue-id", "queue_ids", type=click.IntRange(min=0), multiple=True,
              help="Only this queue; may be repeated. All queues, also new ones, if not given.")
@click.option("--from", "start", default="last", show_default=True, metavar="first|last|N",
              help="Where to start in each queue: at its first message, with what comes from now on (last), or at an offset.")
@click.option("--group", default=None, help="Be a member of this consumer group: go on where it stopped, and remember how "
                                            "far it came.")
@click.option("--follow/--no-follow", default=True, show_default=True, help="Wait for more, or stop at the end.")
@click.option("--max-messages", type=click.IntRange(min=1), default=None, help="Stop after this many.")
@click.option("--tags", default=None, help="Only messages with one of these tags: 'A' or 'A || B'.")
@sql_option
@level_option
@raw_option
def tail(
    store: Path, settings: dict[str, str], as_json: bool, topic: str, queue_ids: tuple[int, ...], start: str,
    group: str | None, follow: bool, max_messages: int | None, tags: str | None, sql: str | None, level: str | None, raw: bool,
) -> None:
    """Print the messages of a topic as they come; Ctrl-C ends it.

    Needs no engine, but without one nothing comes. Messages of one queue come in order;
    queues are read in turn. Without --group nothing is changed. With it this is one
    member of the group: all living members share the queues, and the group's offsets
    are in config/consumerOffset.json, as RocketMQ keeps them. A message may come twice
    after a crash, none is left out. --from is for a group that is new to the topic, and
    --queue-id takes just that queue, apart from the sharing (docs/consumers.md).

    \b
    Examples:
      pyengine tail STORE --topic orders
      pyengine tail STORE --topic orders --from first --no-follow --json
      pyengine tail STORE --topic orders --group billing --from first
    """
    start = _SYNONYMS.get(start, start)
    if start not in ("first", "last") and not (start.isascii() and start.isdecimal()):
        raise click.BadParameter(f"{start}: give first, last or an offset", param_hint="--from")
    with reading(store, settings) as reader:
        if not follow and topic not in reader.topics():
            raise EngineError(f"{store} has no topic {topic}")
        if group is None:
            follower = Follower(reader, topic, queue_ids, start=start, tags=tags, sql=sql, level=level)
            for message in follower.messages(follow=follow, max_messages=max_messages, idle=sys.stdout.flush):
                _print(message, as_json, raw)
            return
    from_: Start = "first" if start == "first" else "last" if start == "last" else AtOffset(int(start))
    with consume(store, topic, group=group, tags=tags, sql=sql, from_=from_,
                 queues=queue_ids or None, level=level, auto_commit=False, **cast(dict[str, Any], settings)) as consumer:
        _Printer(consumer, as_json, raw).run(follow, max_messages)


class _Printer:
    """Prints what a member of a group is given; remembers at most once a COMMIT_INTERVAL_S and at the end, and only
    what was printed."""

    def __init__(self, consumer: Consumer, as_json: bool, raw: bool) -> None:
        self._consumer = consumer
        self._as_json, self._raw = as_json, raw
        self._printed: dict[int, Message] = {}
        self._due_s = 0.0
        self._said: set[str] = set()

    def run(self, follow: bool, max_messages: int | None) -> None:
        left = sys.maxsize if max_messages is None else max_messages
        try:
            while left > 0:
                found = self._consumer.pull(min(left, PULL_MESSAGES), timeout_s=COMMIT_INTERVAL_S if follow else 0)
                for message in found:
                    _print(message, self._as_json, self._raw)
                    self._printed[message.queue_id] = message
                left -= len(found)
                if time.monotonic() >= self._due_s:
                    self._remember()
                    self._due_s = time.monotonic() + COMMIT_INTERVAL_S
                if not found and not follow:
                    return
        finally:
            self._remember()

    def _remember(self) -> None:
        sys.stdout.flush()
        printed = self._printed.copy()
        self._consumer.commit(printed.values())
        for queue_id, message in printed.items():
            if self._printed.get(queue_id) is message:
                del self._printed[queue_id]
        for note in self._consumer.notes:
            if note not in self._said:
                self._said.add(note)
                print(f"note: {note}", file=sys.stderr)


def _print(message: Message, as_json: bool, raw: bool) -> None:
    if as_json:
        output.write_json(output.message_document(message, raw))
        return
    marks = [output.time_text(message.store_timestamp_ms), f"queue {message.queue_id}", f"offset {message.queue_offset}"]
    marks += [f"tags {output.printable(message.tags)}"] if message.tags else []
    marks += [f"keys {output.printable(message.keys)}"] if message.keys else []
    print(" ".join(marks), "|", output.body_text(output.shown_body(message, raw)[0]))
