"""One consumer process: reads in two groups until it is killed, and lists what it read and committed.

    python -m crash.acked_consumer STORE ACKED

Group `flushed` reads at that level, group `any` at the store's own; each commits what it has pulled at once. JSON
lines in ACKED:

    {"reads": topic}                           it has begun
    {"group": g, "asks": {queue: offset}}      before a commit: the store has no later offset of the group
    {"group": g, "commits": {queue: offset}}   after commit() has returned: the store has this offset
    {"read_to": n}                             group `flushed` was given messages that end at byte n of the log

It may be killed at any moment.
"""

from __future__ import annotations

import argparse
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


def read_and_commit(consumer: pyengine.Consumer, group: str, messages: Sequence[Message], acked: AckedList) -> None:
    """Commit what was pulled, with a line before and after."""
    if group == FLUSHED:
        acked.write({"read_to": max(message.physical_offset + message.size_bytes for message in messages)})
    acked.write({"group": group, "asks": consumer.positions})
    acked.write({"group": group, "commits": consumer.commit()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("acked", type=Path)
    arguments = parser.parse_args()
    acked = AckedList(arguments.acked)
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
