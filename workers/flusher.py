"""Flusher: the only process that syncs the log and moves `flushed`.

Why: a put with SYNC_FLUSH is acknowledged when `flushed` has passed it. Promise: what is
below `flushed` survives a power cut. Time bound: sync mode, one fdatasync after the
writer's wake-up; otherwise flush_interval_commit_log_ms. Its death: puts that wait for
durability wait on (each by its own deadline) until the next one is up and the writer has
vouched for what the dead one may have been told. A failed sync: the store is frozen.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.flush_commit_log import FlushRealTimeService, FlushService, GroupCommitService


def make_service(attached: worker.Worker) -> FlushService:
    """Group commit in sync mode, timed flushing otherwise."""
    sync = attached.memory.identity.mode == native.MODE_SYNC
    if not sync:
        return FlushRealTimeService(attached.context)
    service = GroupCommitService(attached.context)
    service.share_cpu()
    return service


def main() -> int:
    """Run the flusher with the arguments of this process; its exit code."""
    return worker.main(native.FLUSHER, "Makes the log durable: fdatasync, then `flushed`.", make_service)


if __name__ == "__main__":
    sys.exit(main())
