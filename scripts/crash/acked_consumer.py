"""One consumer process: reads in two groups until it is killed, and lists what it read and committed.

    python -m crash.acked_consumer STORE ACKED
    python -m crash.acked_consumer STORE ACKED --acks queues|messages --topic TOPIC

Group `flushed` reads at that level, group `any` at the store's own; each commits what it has pulled at once. JSON
lines in ACKED:

    {"reads": topic}                           it has begun
    {"group": g, "asks": {queue: offset}}      before a commit: the store has no later offset of the group
    {"group": g, "commits": {queue: offset}}   after commit() has returned: the store has this offset
    {"read_to": n}                             group `flushed` was given messages that end at byte n of the log

With --acks it is one of several members of the group of that name, all of which write the same ACKED: they acknowledge messages in
random order, and give some back. `sharing` is that name too. The lines are then

    {"got": [[queue, offset], ...]}      what a pull returned
    {"stored": [[queue, offset], ...]}   after commit(): that these are acknowledged is stored

It may be killed at any moment.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pyengine
from crash.acked_producer import TOPICS, AckedList
from pyengine.formats.record import Message

TOPIC = TOPICS[0]
FLUSHED, ANY = "flushed", "any"
LEVELS = {FLUSHED: "flushed", ANY: None}
PULL_S = 0.02
SHARING = ("queues", "messages")


def read_and_commit(consumer: pyengine.Consumer, group: str, messages: Sequence[Message], acked: AckedList) -> None:
    """Commit what was pulled, with a line before and after."""
    if group == FLUSHED:
        acked.write({"read_to": max(message.physical_offset + message.size_bytes for message in messages)})
    acked.write({"group": group, "asks": consumer.positions})
    acked.write({"group": group, "commits": consumer.commit()})


def acknowledge(store: Path, topic: str, sharing: str, acked: AckedList) -> None:
    """Take, acknowledge and give back messages of the group `sharing`, until a kill."""
    options = {"auto_commit": False, "commit_interval_s": 60, "max_deliveries": None}
    with pyengine.consume(store, topic, group=sharing, sharing=sharing, **options) as consumer:
        held: list[Message] = []
        while True:
            found = consumer.pull(random.randrange(1, 10), timeout_s=0.1)
            if found:
                acked.write({"got": [[each.queue_id, each.queue_offset] for each in found]})
            held += found
            random.shuffle(held)
            ended, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
            if random.random() < 0.1:
                consumer.requeue(held)
                held = []
            consumer.ack(ended)
            stored = consumer.commit([])  # of the queues that are still its own
            if ended := [each for each in ended if each.queue_id in stored]:
                acked.write({"stored": [[each.queue_id, each.queue_offset] for each in ended]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("acked", type=Path)
    parser.add_argument("--acks", choices=SHARING)
    parser.add_argument("--topic", default=TOPIC)
    arguments = parser.parse_args()
    acked = AckedList(arguments.acked)
    if arguments.acks is not None:
        acknowledge(arguments.store, arguments.topic, arguments.acks, acked)
    with ExitStack() as stack:
        consumers = {group: stack.enter_context(pyengine.consume(arguments.store, TOPIC, group=group, level=level, from_="first",
                                                                 auto_commit=False))
                     for group, level in LEVELS.items()}
        acked.write({"reads": TOPIC})
        while True:
            for group, consumer in consumers.items():
                messages = consumer.pull(timeout_s=PULL_S)
                if messages:
                    read_and_commit(consumer, group, messages, acked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
