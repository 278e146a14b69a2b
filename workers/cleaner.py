"""Cleaner: deletes expired segments, queue and index files; judges the room on the disk.

Why: a log that only grows ends as a full disk. Promise: never the last segment, nothing
that is not committed, flushed, dispatched and noted as such, nothing a living reader holds
(for longer than it may), and a store that is whole at every moment. A full disk is a
status and a sentence, looked for by a thread of its own that no deletion blocks; puts are
taken again by themselves. Its death: nothing is deleted meanwhile, and a full disk keeps
its flag until the next one looks; a half deleted file is freed by the kernel.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.ipc.cleaning import Cleaning
from pyengine.native import control as native
from pyengine.services.retention.clean_resource import CleanResourceService, DiskSpaceProbe, DiskSpaceWatch
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import DiskUse, measure


class CleanerService(CleanResourceService):
    """The rounds, and beside them the probe."""

    def __init__(self, attached: worker.Worker) -> None:
        store = attached.context.store

        def uses() -> tuple[DiskUse, DiskUse]:
            return measure_log(store), measure(store.consume_queue)

        self._shared = Cleaning(attached.memory.folder)
        super().__init__(attached.context, self._shared.block, uses)
        self._probe = DiskSpaceProbe(attached.context, self._shared.block, uses)
        self._probe.look()  # before READY: a start on a full disk says so at once
        self._watch = DiskSpaceWatch(self._probe)
        self._watch.start()

    def take_settings(self, config: EngineConfig) -> None:
        super().take_settings(config)
        self._probe.take_settings(config)

    def close(self) -> None:
        self._watch.close()
        super().close()
        self._shared.close()


def make_service(attached: worker.Worker) -> CleanerService:
    return CleanerService(attached)


def main() -> int:
    """Run the cleaner with the arguments of this process; its exit code."""
    return worker.main(native.CLEANER, "Deletes old files and judges the room on the disk.", make_service)


if __name__ == "__main__":
    sys.exit(main())
