"""Committer (pool mode): the only process that writes pool bytes into files and moves `committed`.

Promise: everything below `committed` is in the file's page cache, readable by all processes. Time bound: at once on an
idle store, about a millisecond under load. If it dies, puts continue into the pool's buffers; bytes there survive every
process, and the next committer or recovery writes them.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.flush_commit_log import CommitRealTimeService


def make_service(attached: worker.Worker) -> CommitRealTimeService:
    if attached.memory.identity.mode != native.MODE_POOL:
        raise worker.BootFailedError("this engine writes without a pool: there is nothing to commit")
    return CommitRealTimeService(attached.context)


main = worker.main(native.COMMITTER, "Writes pool buffers into the log's segments.", make_service)

if __name__ == "__main__":
    raise SystemExit(main())
