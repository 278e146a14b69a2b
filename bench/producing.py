"""One producer process of a benchmark.

usage: producing.py STORE KIND SIZE SECONDS [COUNT] [MESSAGES]    KIND: put | many | async
Waits for a line on stdin, works for SECONDS, or until MESSAGES are put, prints one JSON line: messages, seconds,
CPU seconds of this process, latency quantiles in us (of put_async: of the call).
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections import deque

import pyengine


def main() -> None:
    store, kind, size, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    count = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    messages_max = int(sys.argv[6]) if len(sys.argv) > 6 else sys.maxsize
    body = os.urandom(size)
    queue_id = os.getpid() % 1024
    took_s = array("d")
    with pyengine.connect(store) as producer:
        for _ in range(50):
            producer.put("bench", body, queue_id=queue_id)
        print("ready", flush=True)
        sys.stdin.readline()
        began_cpu_s = time.process_time()
        began_s = time.perf_counter()
        puts = PUTS[kind](producer, body, count, queue_id, took_s)
        while (messages := next(puts)) < messages_max and time.perf_counter() < began_s + seconds:
            pass
        puts.close()
        seconds, cpu_seconds = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    took_s = sorted(took_s)
    pick = lambda share: took_s[min(len(took_s) - 1, int(share * len(took_s)))] * 1e6  # noqa: E731
    print(json.dumps({"messages": messages, "seconds": seconds, "cpu_seconds": cpu_seconds, "p50_us": pick(0.5), "p99_us": pick(0.99),
                      "p999_us": pick(0.999), "max_us": took_s[-1] * 1e6}))


def put_singly(producer, body, count, queue_id, took_s):
    """Yields the number of messages put, each 32."""
    clock = time.perf_counter
    now = clock()
    while True:
        for _ in range(32):
            before = now
            result = producer.put("bench", body, queue_id=queue_id)
            now = clock()
            took_s.append(now - before)
            require_ok(result)
        yield len(took_s)


def put_many(producer, body, count, queue_id, took_s):
    """Yields the number of messages put, after each batch."""
    clock, bodies = time.perf_counter, [body] * count
    while True:
        before = clock()
        result = producer.put_many("bench", bodies, queue_id=queue_id)
        took_s.append(clock() - before)
        require_ok(result)
        yield len(took_s) * count


def put_async(producer, body, count, queue_id, took_s):
    """Yields the number of messages put; at most `count` of them wait for their answers."""
    clock, pending = time.perf_counter, deque()
    try:
        while True:
            for _ in range(32):
                before = clock()
                pending.append(producer.put_async("bench", body, queue_id=queue_id))
                took_s.append(clock() - before)
                if len(pending) > count:
                    require_ok(pending.popleft().result(30))
            yield len(took_s)
    finally:
        for future in pending:
            require_ok(future.result(30))


def require_ok(result) -> None:
    if not result.ok:
        raise SystemExit(f"{result.status.name}: {result.reason}")


PUTS = {"put": put_singly, "many": put_many, "async": put_async}


if __name__ == "__main__":
    main()
