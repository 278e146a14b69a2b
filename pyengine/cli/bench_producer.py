"""One producer process of `pyengine bench` and of bench/: waits for a line, puts, prints one JSON line of results.

usage: python -m pyengine.cli.bench_producer STORE KIND SIZE SECONDS [COUNT] [MESSAGES]    KIND: put | many | async
COUNT: messages of a batch, or the most put_async calls without an answer. It ends after SECONDS, or after MESSAGES.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass

import pyengine
from pyengine.client.pending_puts import PutFuture
from pyengine.client.producer import Producer
from pyengine.results import PutResult

TOPIC = "bench"
WARM_UP_PUTS = 50
Puts = Generator[int, None, None]  # yields the number of messages put so far


@dataclass(frozen=True, slots=True)
class Produced:
    """The results of one producer. Quantiles are of one call, for put_async without the wait for its answer."""

    messages: int
    seconds: float
    cpu_seconds: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float


def produce(store: str, kind: str, size_bytes: int, seconds: float, count: int, messages_max: int) -> Produced:
    """Connect, print "ready" on stdout, wait for a line on stdin, then put."""
    body = os.urandom(size_bytes)
    queue_id = os.getpid() % 1024
    took_s = array("d")
    with pyengine.connect(store) as producer:
        for _ in range(WARM_UP_PUTS):
            producer.put(TOPIC, body, queue_id=queue_id)
        print("ready", flush=True)
        sys.stdin.readline()
        began_cpu_s, began_s = time.process_time(), time.perf_counter()
        puts = PUTS[kind](producer, body, count, queue_id, took_s)
        while (messages := next(puts)) < messages_max and time.perf_counter() < began_s + seconds:
            pass
        puts.close()
        took, busy_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    ordered = sorted(took_s)
    p50_us, p99_us, p999_us = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6 for share in (0.5, 0.99, 0.999))
    return Produced(messages, took, busy_s, p50_us, p99_us, p999_us, ordered[-1] * 1e6)


def _put_singly(producer: Producer, body: bytes, count: int, queue_id: int, took_s: array[float]) -> Puts:
    clock = time.perf_counter
    while True:
        now = clock()
        for _ in range(32):
            before = now
            producer.put(TOPIC, body, queue_id=queue_id)
            now = clock()
            took_s.append(now - before)
        yield len(took_s)


def _put_many(producer: Producer, body: bytes, count: int, queue_id: int, took_s: array[float]) -> Puts:
    clock, bodies = time.perf_counter, [body] * count
    while True:
        before = clock()
        producer.put_many(TOPIC, bodies, queue_id=queue_id)
        took_s.append(clock() - before)
        yield len(took_s) * count


def _put_async(producer: Producer, body: bytes, count: int, queue_id: int, took_s: array[float]) -> Puts:
    clock, pending = time.perf_counter, deque[PutFuture[PutResult]]()
    try:
        while True:
            for _ in range(32):
                before = clock()
                pending.append(producer.put_async(TOPIC, body, queue_id=queue_id))
                took_s.append(clock() - before)
                if len(pending) > count:
                    pending.popleft().result(30)
            yield len(took_s)
    finally:
        for future in pending:
            future.result(30)


PUTS: dict[str, Callable[[Producer, bytes, int, int, array[float]], Puts]] = {
    "put": _put_singly, "many": _put_many, "async": _put_async}


def main(arguments: list[str]) -> None:
    """Run one producer with the arguments of the usage above."""
    store, kind, size, seconds = arguments[:4]
    count = int(arguments[4]) if len(arguments) > 4 else 1
    messages_max = int(arguments[5]) if len(arguments) > 5 else sys.maxsize
    print(json.dumps(asdict(produce(store, kind, int(size), float(seconds), count, messages_max))))


if __name__ == "__main__":
    main(sys.argv[1:])
