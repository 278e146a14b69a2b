"""Checkpointer: syncs queues and index, writes `checkpoint` and `config/watermark`.

Promise: no value in either file exceeds what is durable. Time bound: the values lag by flush_interval_consume_queue_ms; the
watermark is written at most once a second.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.flush_consume_queue import FlushConsumeQueueService

main = worker.main(native.CHECKPOINTER, "Syncs queues and index, and writes the checkpoint.",
                   lambda attached: FlushConsumeQueueService(attached.context))

if __name__ == "__main__":
    raise SystemExit(main())
