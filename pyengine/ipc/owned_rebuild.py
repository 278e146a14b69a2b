"""A rebuild of queues and index by whoever then owns the store."""

from __future__ import annotations

from pathlib import Path

from pyengine.config import EngineConfig, keep_sizes
from pyengine.errors import StoreBusyError
from pyengine.ipc.crashed_engine_memory import left_memory
from pyengine.ipc.store_lock import Ownership, StoreLock
from pyengine.storage.engine_id import raise_epoch, renew_copied_id
from pyengine.storage.log_files import look_at_log
from pyengine.storage.recovery.rebuild import RebuildReport, RebuildWork, Selection, rebuild
from pyengine.storage.recovery.recover import RecoveryOptions
from pyengine.storage.recovery.report import Progress, RecoveryState


def rebuild_alone(
    root: Path, config: EngineConfig, selection: Selection | None = None, *, progress: Progress | None = None,
    work: RebuildWork | None = None,
) -> RebuildReport:
    """As storage.rebuild.rebuild, in a store that nobody has open. StoreBusyError while any process has it open."""
    with StoreLock(root, create=True) as lock:
        if lock.own() is Ownership.ADOPTED:
            raise StoreBusyError(f"{root} still has living workers: `pyengine stop {root}` ends them")
        renew_copied_id(root)
        look_at_log(root, config.mapped_file_size_commit_log_bytes)
        keep_sizes(root, config)  # once the files are away nothing else tells their sizes
        with left_memory(root) as left:
            left.require_dead()
            report = rebuild(root, config.geometry, selection, options=RecoveryOptions.of(config), shared=left.shared,
                             progress=progress, work=work)
            if report.state is RecoveryState.RECOVERED and left.discard():
                raise_epoch(root)
    return report
