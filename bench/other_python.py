"""Puts into another log that Python has, by the protocol of producing.py.

usage: other_python.py sqlite|lmdb FOLDER BODY_BYTES PRODUCERS MESSAGES [sync]
Each message is a transaction of its own, as a put is: with `sync` on the disk, else in the page cache.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

Put = Callable[[bytes], None]


def sqlite_put(folder: Path, sync: bool) -> Put:
    """INSERT into a table of a database in WAL mode."""
    connection = sqlite3.connect(folder / "log.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'OFF'}")
    connection.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, body BLOB)")
    return lambda body: connection.execute("INSERT INTO log (body) VALUES (?)", (body,))  # type: ignore[return-value]


def lmdb_put(folder: Path, sync: bool) -> Put:
    """Append to a map by a counter, a write transaction each."""
    import lmdb

    environment = lmdb.open(str(folder), map_size=16 << 30, sync=sync, writemap=not sync)
    last = 0

    def put(body: bytes) -> None:
        nonlocal last
        last += 1
        with environment.begin(write=True) as transaction:
            transaction.put(last.to_bytes(8, "big"), body, append=True)

    return put


def main() -> None:
    name, folder, size, messages = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
    put = {"sqlite": sqlite_put, "lmdb": lmdb_put}[name](folder, "sync" in sys.argv[6:])
    body, took_s, clock = os.urandom(size), array("d"), time.perf_counter
    for _ in range(50):
        put(body)
    print("ready", flush=True)
    sys.stdin.readline()
    began_cpu_s = time.process_time()
    began_s = now_s = clock()
    for _ in range(messages):
        put(body)
        before_s, now_s = now_s, clock()
        took_s.append(now_s - before_s)
    cpu_seconds, took = time.process_time() - began_cpu_s, sorted(took_s)
    print(json.dumps({"messages": messages, "seconds": now_s - began_s, "cpu_seconds": cpu_seconds,
                      "p50_us": took[len(took) // 2] * 1e6, "p99_us": took[len(took) * 99 // 100] * 1e6, "max_us": took[-1] * 1e6}))


if __name__ == "__main__":
    main()
