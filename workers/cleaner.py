"""Cleaner: deletes expired segments, queue and index files; refuses puts while the disk is too full.

Promise: it does not delete the last segment, data that is not yet committed, flushed, dispatched and recorded in the
checkpoint, or a segment that a living reader holds (up to a time limit). The store is consistent at every moment.
If the cleaner dies, the state of the disk stays as published until the next one starts; the kernel frees a file that was
deleted in part.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.ipc.cleaning import Cleaning
from pyengine.native import control as native
from pyengine.services.clean_resource import CleanResourceService, DiskSpaceProbe
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import DiskUse, measure


class CleanerService(CleanResourceService):
    """Deletes in rounds, with a thread beside them that measures the disk."""

    def __init__(self, attached: worker.Worker) -> None:
        store = attached.context.store

        def uses() -> tuple[DiskUse, DiskUse]:
            return measure_log(store), measure(store.consume_queue)

        self._shared = Cleaning(attached.memory.folder)
        super().__init__(attached.context, self._shared, uses)
        self._probe = DiskSpaceProbe(attached.context, self._shared.block, uses)
        self._probe.check()  # before READY, so that a start on a full disk reports it at once
        self._probe.start()

    def take_settings(self, config: EngineConfig) -> None:
        super().take_settings(config)
        self._probe.take_settings(config)

    def close(self) -> None:
        self._probe.close()
        super().close()
        self._shared.close()


main = worker.main(native.CLEANER, "Deletes expired files and watches the free disk space.", CleanerService)

if __name__ == "__main__":
    raise SystemExit(main())
