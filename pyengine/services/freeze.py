"""The first failed sync or log write: the store turns read-only in every process, for good (docs/promises.md, 2)."""

from __future__ import annotations

import os

from pyengine.errors import DiskError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native
from pyengine.storage.watermark import note_sync_failure


def freeze(memory: EngineMemory, root: str | os.PathLike[str], kind: int, error: DiskError) -> None:
    """Freeze the store, note the failure on the disk and wake every worker that must learn of it.

    Nothing is retried: the kernel has marked the pages clean that it could not write.
    """
    flushed = native.load_position(memory.control.flushed)
    cause = os.strerror(error.errno) if error.errno else str(error)
    name = os.path.basename(error.path) if error.path else "the store"
    native.freeze(memory.control, kind, error.errno,
                  f"the {KIND_NAMES[kind]} could not make {name} durable ({cause}); durable up to {flushed}, "
                  "read-only from now on: repair the disk, then stop, recover and start")
    note_sync_failure(root, flushed, name, cause)
    for other in (native.WRITER, native.SUPERVISOR, native.COMMITTER, native.REPUTTER, native.CHECKPOINTER):
        memory.wake(other)
