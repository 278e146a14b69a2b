"""One producer process: puts until it is ended, and lists what was acknowledged.

    python -m crash.acked_producer STORE ACKED --name p0 --seed 7 [--rate 2000] [--delayed [LEVELS]]

After a put has returned PUT_OK, each of its messages is one JSON line in ACKED: topic, queue_id, queue_offset,
physical_offset, body_sha256. The answer of put_many has the physical offset of the first message only; the others have null.
With --delayed some messages are delayed, by level 1 up to LEVELS. Their lines have no offsets, because the place of their
delivery is not known yet; `level`, `waits_as` and `waits_at` are level, queue offset and physical offset in
SCHEDULE_TOPIC_XXXX. SIGTERM ends it in order; it may be killed at any moment. While no engine runs it tries to connect.

A body has its producer's name and its number, so that an audit finds doubled and reordered messages, and a hash of
itself, which shows that it is whole.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyengine
from pyengine.errors import EngineError, EngineUnavailableError
from pyengine.results import PutStatus

TOPICS = ("crash-a", "crash-b")
DELAYED_TOPIC = "crash-later"  # delivered at least once, some twice
QUEUES = 2
DIGEST_CHARACTERS = 16
AGAIN_S = 0.02
CANCELLED_SHARE = 0.3  # of delayed messages


def make_body(name: str, sequence: int, filler: bytes) -> bytes:
    """`name sequence digest filler`; the digest is of everything else."""
    head = f"{name} {sequence} ".encode()
    return head + hashlib.sha256(head + filler).hexdigest()[:DIGEST_CHARACTERS].encode() + b" " + filler


def read_body(body: bytes) -> tuple[str, int]:
    """Return the producer's name and the number; ValueError if the body is not as it was put."""
    name, sequence, digest, filler = body.split(b" ", 3)
    if hashlib.sha256(name + b" " + sequence + b" " + filler).hexdigest()[:DIGEST_CHARACTERS].encode() != digest:
        raise ValueError(f"body of {name.decode()} number {int(sequence)} does not match its own digest")
    return name.decode(), int(sequence)


class AckedList:
    """Appends acknowledged messages; one write(2) for each, so that only the last line can be torn."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def add(self, topic: str, queue_id: int, queue_offset: int | None, physical_offset: int | None, body: bytes,
            **more: int) -> None:
        row = {
            "topic": topic,
            "queue_id": queue_id,
            "queue_offset": queue_offset,
            "physical_offset": physical_offset,
            "body_sha256": hashlib.sha256(body).hexdigest(),
        }
        self.write(row | more)

    def write(self, line: dict) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class AckedProducer:
    """Puts of every kind against one connected producer."""

    def __init__(self, name: str, rng: random.Random, acked: AckedList, *, delayed: int = 0, cancels: bool = False) -> None:
        """`delayed`: the number of delay levels that are used, from level 1. `cancels`: some of those messages are cancelled at once."""
        self._name = name
        self._rng = rng
        self._acked = acked
        self._sequence = 0
        self._kinds = [self._one, self._short, self._many, self._batch, self._async] + [self._delayed] * (delayed > 0)
        self._levels = delayed
        self._cancels = cancels

    def bodies(self, count: int) -> list[bytes]:
        made = []
        for _ in range(count):
            filler = self._rng.randbytes(self._rng.choice((0, 1, 40, self._rng.randrange(600), self._rng.randrange(3000))))
            made.append(make_body(self._name, self._sequence, filler))
            self._sequence += 1
        return made

    def step(self, producer: pyengine.Producer) -> int:
        """Make one call of a random kind; return the number of messages."""
        topic, queue_id = self._rng.choice(TOPICS), self._rng.randrange(QUEUES)
        return self._rng.choice(self._kinds)(producer, topic, queue_id)

    def _one(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        (body,) = self.bodies(1)
        result = producer.put(topic, body, queue_id=queue_id, keys=f"{self._name}-{self._sequence}", tags=self._name)
        self._note(topic, queue_id, result, [body])
        return 1

    def _short(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        """Put without keys, which csrc/front does alone after the first put to a queue with these tags."""
        bodies = self.bodies(self._rng.randrange(1, 4))
        tags = self._rng.choice((None, self._name))
        for body in bodies:
            result = producer.put(topic, body, queue_id=queue_id, tags=tags)
            self._note(topic, queue_id, result, [body])
        return len(bodies)

    def _many(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        bodies = self.bodies(self._rng.randrange(1, 64))
        result = producer.put_many(topic, bodies, queue_id=queue_id)
        if result.status is PutStatus.PUT_OK:
            for number, body in enumerate(bodies):
                where = result.first_physical_offset if number == 0 else None
                self._acked.add(topic, queue_id, result.first_queue_offset + number, where, body)
        return len(bodies)

    def _batch(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        bodies = self.bodies(self._rng.randrange(1, 6))
        self._note(topic, queue_id, producer.put_batch(topic, bodies, queue_id=queue_id), bodies)
        return len(bodies)

    def _async(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        bodies = self.bodies(self._rng.randrange(1, 32))
        puts = [(producer.put_async(topic, body, queue_id=queue_id), body) for body in bodies]
        how = self._rng.choice(("in order", "last first", "together"))
        if how == "together":  # the answers' thread resolves them
            concurrent.futures.wait([future for future, _ in puts])
        for future, body in reversed(puts) if how == "last first" else puts:
            self._note(topic, queue_id, future.result(), [body])
        return len(bodies)

    def _delayed(self, producer: pyengine.Producer, topic: str, queue_id: int) -> int:
        (body,) = self.bodies(1)
        level = self._rng.randint(1, self._levels)
        result = producer.put(DELAYED_TOPIC, body, queue_id=queue_id, delay_level=level)
        if result.status is PutStatus.PUT_OK:
            if self._cancels and self._rng.random() < CANCELLED_SHARE:
                try:
                    is_cancelled = producer.cancel_delayed(result.msg_id)
                except EngineError:  # it may be cancelled or not
                    return 1
                if is_cancelled:
                    self._acked.add(DELAYED_TOPIC, queue_id, None, None, body, cancelled=1)
                    return 1
            self._acked.add(DELAYED_TOPIC, queue_id, None, None, body,
                            level=level, waits_as=result.queue_offset, waits_at=result.physical_offset)
        return 1

    def _note(self, topic: str, queue_id: int, result: pyengine.PutResult, bodies: list[bytes]) -> None:
        if result.status is PutStatus.PUT_OK:
            for number, (body, msg_id) in enumerate(zip(bodies, result.msg_id.split(","), strict=True)):
                self._acked.add(topic, queue_id, result.queue_offset + number, int(msg_id[-16:], 16), body)


def connections(store: Path, stopping: list[int]) -> Iterator[pyengine.Producer]:
    """Yield one connected producer after another, a new one each time the engine is back."""
    while not stopping:
        try:
            with pyengine.connect(store, timeout_s=1, refusals="return") as producer:
                yield producer
        except EngineUnavailableError as error:
            print(f"{error}; trying again", file=sys.stderr)
            time.sleep(AGAIN_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("acked", type=Path)
    parser.add_argument("--name", required=True, help="a name that no other producer of the store has or had")
    parser.add_argument("--seed", required=True)
    parser.add_argument("--delayed", type=int, nargs="?", const=1, default=0, metavar="LEVELS",
                        help="some messages with a delay level from 1 to this (1)")
    parser.add_argument("--cancels", action="store_true", help="cancel some of them")
    parser.add_argument("--rate", type=float, default=2000.0, help="messages per second, at most")
    arguments = parser.parse_args()

    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    maker = AckedProducer(arguments.name, random.Random(f"{arguments.seed}/{arguments.name}"), AckedList(arguments.acked),
                          delayed=arguments.delayed, cancels=arguments.cancels)
    for producer in connections(arguments.store, stopping):
        due_s = time.monotonic()
        while not stopping:
            due_s = max(due_s, time.monotonic() - 0.05) + maker.step(producer) / arguments.rate
            time.sleep(max(0.0, due_s - time.monotonic()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
