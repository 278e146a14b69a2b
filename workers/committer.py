"""Committer (pool mode): the only process that moves pool bytes into files and moves `committed`.

Promise: what is below `committed` is in the file's page cache, readable by all processes.
Time bound: at once on an idle store, about a millisecond under load. Its death: puts go
on into the pool's buffers; bytes there outlive every process and are drained by its
successor or by recovery.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.flush_commit_log import CommitRealTimeService


def make_service(attached: worker.Worker) -> CommitRealTimeService:
    if attached.memory.identity.mode != native.MODE_POOL:
        raise worker.BootFailedError("this engine writes without a pool: there is nothing to commit")
    return CommitRealTimeService(attached.context)


def main() -> int:
    """Run the committer with the arguments of this process; its exit code."""
    return worker.main(native.COMMITTER, "Writes pool buffers into the log's files.", make_service)


if __name__ == "__main__":
    sys.exit(main())
