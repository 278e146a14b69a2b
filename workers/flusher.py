"""Flusher: the only process that syncs the log and moves `flushed`.

Promise: everything below `flushed` survives a power cut; a put with SYNC_FLUSH is acknowledged once `flushed` is beyond
it. Time bound: in sync mode one fdatasync after the writer's wake-up, otherwise flush_interval_commit_log_ms. If it dies,
puts that wait for durability wait on, each until its deadline: the writer must first sync its own descriptors, which still
report an error that the kernel may have reported to the dead flusher only. A failed sync freezes the store.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.flush_commit_log import FlushRealTimeService, FlushService, GroupCommitService


def make_service(attached: worker.Worker) -> FlushService:
    if attached.memory.identity.mode != native.MODE_SYNC:
        return FlushRealTimeService(attached.context)
    service = GroupCommitService(attached.context)
    service.share_cpu()
    return service


main = worker.main(native.FLUSHER, "Makes the log durable: fdatasync, then moves `flushed`.", make_service)

if __name__ == "__main__":
    raise SystemExit(main())
