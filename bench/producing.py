"""One producer process of a benchmark.

usage: producing.py STORE KIND SIZE SECONDS [COUNT]    KIND: put | many | latency
Waits for a line on stdin, works for SECONDS, prints one JSON line: messages, seconds,
latency quantiles in us.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array

import pyengine


def main() -> None:
    store, kind, size, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    count = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    body = os.urandom(size)
    bodies = [body] * count
    queue_id = os.getpid() % 1024
    latencies = array("d")
    with pyengine.connect(store) as producer:
        for _ in range(50):
            producer.put("bench", body, queue_id=queue_id)
        print("ready", flush=True)
        sys.stdin.readline()
        messages, clock = 0, time.perf_counter
        began = now = clock()
        until = began + seconds
        while now < until:
            for _ in range(32 if kind == "put" else 1):
                before = now
                if kind == "put":
                    result = producer.put("bench", body, queue_id=queue_id)
                else:
                    result = producer.put_many("bench", bodies, queue_id=queue_id)
                now = clock()
                latencies.append(now - before)
                if not result.ok:
                    raise SystemExit(f"{result.status.name}: {result.reason}")
            messages = len(latencies) * count
        took = now - began
    latencies = sorted(latencies)
    pick = lambda share: latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e6  # noqa: E731
    print(json.dumps({"messages": messages, "seconds": took, "p50_us": pick(0.5), "p99_us": pick(0.99),
                      "p999_us": pick(0.999), "max_us": latencies[-1] * 1e6}))


if __name__ == "__main__":
    main()
