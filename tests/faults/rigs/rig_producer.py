"""A producer for outside fault rigs: one queue, in order, one `A <n>` line for each acknowledged message.

    python rig_producer.py STORE ACKS

`n` is the queue offset: every smaller one was acknowledged before or is covered by this promise, since
the log is durable as a prefix. Waits for the engine, and again whenever it goes away. Bodies carry
maker, number and digest (crash.acked_producer), so that rig_check.py can judge them without a list.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pyengine
from crash.acked_producer import AGAIN_S, connections, make_body
from pyengine.results import PutStatus

TOPIC = "rig"


def main(store: Path, acks: Path) -> None:
    name = f"{os.getpid()}-{time.time_ns()}"
    rng = random.Random(name)
    out = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    number = 0
    for producer in connections(store, []):
        while True:
            bodies = [make_body(name, number + i, rng.randbytes(rng.randrange(1200)))
                      for i in range(rng.choice((1, 1, 1, 5, 20)))]
            number += len(bodies)
            if len(bodies) == 1:
                result: pyengine.PutResult | pyengine.PutManyResult = producer.put(TOPIC, bodies[0], keys=f"k{number}")
                first = result.queue_offset
            else:
                result = producer.put_many(TOPIC, bodies)
                first = result.first_queue_offset
            if result.status is PutStatus.PUT_OK:
                for offset in range(first, first + len(bodies)):
                    os.write(out, b"A %d\n" % offset)
            else:
                time.sleep(AGAIN_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
