"""What a store noted of replication in its last run means for the next start (config/replication.json).

A slave does not become a master by a setting that was forgotten: what it would take then
nobody has, and its next start as a slave would cut it. A master that ends before what its
slaves have confirmed has lost bytes (a power cut, an old copy put back): its slaves are
the better masters, so a SYNC_MASTER, whose puts promised more, does not start over it.

`confirm` never says more than is there: what counts as confirmed is settled, durable,
before anybody can put behind it.
"""

from __future__ import annotations

import contextlib
import os

from pyengine.config import EngineConfig
from pyengine.errors import CorruptionError, UsageError
from pyengine.formats.paths import StorePaths
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.native.failpoint import failpoint
from pyengine.storage.commit_log import LocalLog
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

SLAVE = "SLAVE"


def check_role(root: str | os.PathLike[str], config: EngineConfig) -> None:
    """UsageError where a slave is started as a master without having been promoted, or may be one for all that can be read."""
    if config.broker_role == SLAVE or not StorePaths(root).config.is_dir():  # a file there ends the start by itself
        return
    noted, said = ReplicationStateFile(root).read()
    if noted is not None and noted.role == SLAVE:
        why = f"{root} ran as a slave last, and is not started as {config.broker_role}: start it as a slave again"
    elif said:  # what stands in for the file may be older than the role
        why = (f"nobody can tell whether {root} ran as a slave last ({said}), so it is not started as {config.broker_role}: put the "
               "file back from a copy, start it as a slave")
    else:
        return
    raise UsageError(f"{why} (broker_role=SLAVE and ha_master_address=HOST:PORT, by --set or in config/engine.toml), or make it "
                     f"the master: pyengine promote {root}")


def settle_confirmed(root: str | os.PathLike[str], config: EngineConfig, end: int, remembered: int) -> tuple[int, tuple[str, ...]]:
    """How far the log [.., end) counts as confirmed, and sentences for the report.

    `remembered`: what the dead engine's memory says, which is newer than the note; 0 nothing.
    CorruptionError where a SYNC_MASTER has lost what was confirmed, unless ha_cut=any goes on without it.
    """
    file = ReplicationStateFile(root)
    noted = file.read().state
    confirm = max(noted.confirm if noted else 0, remembered)
    notes: tuple[str, ...] = ()
    if confirm > end:
        lost = f"slaves have confirmed this log up to {confirm}, but it ends at {end}: {confirm - end:,} bytes are lost here"
        if config.broker_role == SLAVE:
            lost = f"this slave had reported its log up to {confirm}, but it ends at {end}"
        elif config.broker_role == "SYNC_MASTER" and config.ha_cut != "any":
            raise CorruptionError(
                f"{lost}. A slave that is linked last has them: promote it (pyengine promote), and start this store as its slave. "
                "To go on without them, start with ha_cut=any; slaves that have them will not follow then")
        else:
            lost += "; slaves that have them do not follow this master (docs/replication.md)"
        notes = (lost,)
        confirm = end
    dispatch_at = "replicated" if config.dispatch_at == "replicated" and config.broker_role != SLAVE else "committed"
    if noted is not None and noted.confirm > end or dispatch_at != (noted.dispatch_at if noted else "committed"):
        master_end = noted.master_end if noted is not None and config.broker_role == SLAVE else 0
        file.write(ReplicationState(config.broker_role, confirm, dispatch_at, master_end))
        failpoint("confirmed_settled")
    return confirm, notes


def set_confirmed(memory: EngineMemory, root: str | os.PathLike[str], confirm: int, end: int) -> None:
    """`confirm` as it was settled, and dispatch no further where that bounds it; the rest is in queues unseen."""
    identity, control = memory.identity, memory.control
    if not identity.replicates:
        return
    native.store_position(control.confirm, confirm)
    failpoint("confirm_restored")
    if identity.role == native.SLAVE:
        noted = ReplicationStateFile(root).read().state
        native.store(control.replicator, "master_end", noted.master_end if noted else 0)
    if identity.dispatch_at and confirm < end:
        start = max(confirm, native.load_position(control.min_offset))
        with contextlib.closing(LocalLog(root, identity.segment_bytes)) as log:
            native.store_position(control.reput_from, log.record_boundary(start))
