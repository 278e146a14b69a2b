"""One producer of the quickstart: a process of its own that puts files, line by line, and says how far it is.

usage: producer.py STORE QUEUE < JOBS      JOBS: lines of JSON [topic, name, path]

On stdout, after each batch: {"read_bytes": N, "messages": N}; at the end {"counts": {...}}.
A put that was not answered with PUT_OK ends the run with exit code 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from counts import Count, Counts, to_plain  # noqa: E402

import pyengine  # noqa: E402

BATCH_MESSAGES = 256


def main(store: str, queue_id: int) -> int:
    counts: Counts = {}
    read_bytes = messages = 0
    with pyengine.connect(store) as producer:
        for job in sys.stdin:
            topic, name, path = json.loads(job)
            count = counts.setdefault(topic, Count())
            for bodies in batches(Path(path)):
                try:
                    producer.put_many(topic, bodies, queue_id=queue_id, keys=name)
                except pyengine.PutError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    return 1
                count.add(bodies)
                read_bytes += sum(map(len, bodies))
                messages += len(bodies)
                say(read_bytes=read_bytes, messages=messages)
    say(counts=to_plain(counts))
    return 0


def batches(path: Path):
    """The file's lines with their ends, BATCH_MESSAGES at a time."""
    with open(path, "rb") as file:
        batch = []
        for line in file:
            batch.append(line)
            if len(batch) == BATCH_MESSAGES:
                yield batch
                batch = []
    if batch:
        yield batch


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
