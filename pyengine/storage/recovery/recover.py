"""Recover a stopped store: `look` at it, `decide` what to do, which reads only, and carry that out; `preview` tells the plan.

    look      after a failed sync drop cached pages, so that reads come from the disk; refuse a store that RocketMQ would
              refuse (recovery/look.py)
    decide    the end of the log, or the cut that was noted before; queues to truncate, index files to delete, where to
              dispatch from; damage below pyengine's watermark is reported, and nothing is changed (recovery/plan.py)
    apply     quarantine, log, queues and index, checkpoint, markers, offsets (recovery/apply.py)

(DefaultMessageStore.recover; docs/recovery.md.) The caller owns the store (its lock), and no worker runs. A crash may
interrupt every step; the next run repeats it, with the same result. A store that was stopped in order and is
undamaged is not written to at all.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, EngineError, FlushError
from pyengine.storage.checkpoint import SYNC_FAILURE, RebuildMarker, SharedState, WatermarkReading, note_sync_failure, read_notes
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.apply import Repair, quarantine_orphans, remove_from_log
from pyengine.storage.recovery.look import look
from pyengine.storage.recovery.plan import RecoveryPlan, decide
from pyengine.storage.recovery.quarantine import Quarantine
from pyengine.storage.recovery.report import GrowingProgress, Progress, RecoveryReport, RecoveryState


def recover(
    store: MessageStore,
    *,
    progress: Progress | None = None,
    accept_loss: bool = False,
    shared: SharedState | None = None,
    options: EngineConfig | None = None,
    rebuilding: RebuildMarker | None = None,
) -> RecoveryReport:
    """Recover the store; everything up to the report's end offset is durable when this returns, unless its state is DEGRADED.

    Afterwards the store is like one that was stopped in order: no abort file, queues and index match
    the log, the checkpoint is right. Raises StoreRefusedError (a segment of wrong length, a
    foreign file), CorruptionError (a missing segment, or queue entries beyond the log's bytes, unless `accept_loss`),
    NotAStoreError, DiskFullError, DiskError, FlushError. Damage below pyengine's watermark raises no error: the report has
    state DEGRADED, and nothing was changed; with `accept_loss` the log is truncated there and the rest goes to quarantine.
    A failed sync is noted in config/sync-failure, and until the next boot recovery does not rely on earlier syncs.
    `rebuilding`: queues and index that it moves away and makes again; by default those of a rebuild that was interrupted.
    """
    started_s = time.monotonic()
    steps, options = GrowingProgress(progress), options or EngineConfig()
    store.require_exists()
    notes = read_notes(store, shared, rebuilding)
    if shared is not None and shared.sync_failed:
        note_sync_failure(store, notes.durable_end, "", "its engine has seen a sync fail")
    try:
        found = look(store, notes, options, accept_loss=accept_loss)
        plan = decide(found, options, accept_loss=accept_loss, progress=steps, is_run=True)
        plan.raise_refusals()
        report = _foretold(plan) if plan.is_degraded else Repair(plan, steps).run()
    except FlushError as error:
        if note_sync_failure(store, notes.durable_end, str(error.path), os.strerror(error.errno)):
            raise
        raise FlushError(f"{error}. That cannot be noted in {SYNC_FAILURE.path(store)}: restart the machine before you "
                         "recover, since the page cache may differ from the disk", errno=error.errno, path=error.path) from error
    return replace(report, is_dry_run=False, seconds=time.monotonic() - started_s)


def preview(
    store: MessageStore, *, progress: Progress | None = None, accept_loss: bool = False, shared: SharedState | None = None,
    options: EngineConfig | None = None, reread: bool = True,
) -> RecoveryReport:
    """Return the report that `recover` with the same arguments would return now, or raise its errors. Changes nothing.

    The caller ensures that no process changes the store meanwhile. Two values may be higher in the real recovery, which
    learns them only during dispatch: `dispatched_bytes`, and the queues that lack entries in their middle. Offsets
    of groups are not read, and `queue_ends` is empty. EngineError if an interrupted cut or rebuild must be finished first.
    Without `reread` it drops no cached page after a failed sync.
    """
    started_s, steps, options = time.monotonic(), GrowingProgress(progress), options or EngineConfig()
    store.require_exists()
    notes = read_notes(store, shared)
    found = look(store, notes, options, accept_loss=accept_loss, reread=reread)
    if (cut := notes.cut) is not None or notes.rebuilding is not None:
        begun = f"cut the log at {cut.at} ({cut.reason})" if cut is not None else "rebuild queues or index"
        raise EngineError(f"a run on {store} that was to {begun} was interrupted: the next recovery finishes that first, and a "
                          "preview cannot; run `recover`, or restore the store")
    plan = decide(found, options, accept_loss=accept_loss, progress=steps)
    plan.raise_refusals()
    if not plan.is_degraded:
        steps.finish()
    return replace(_foretold(plan), seconds=time.monotonic() - started_s)


def _foretold(plan: RecoveryPlan) -> RecoveryReport:
    """Return the plan's report, with the pieces that it puts into quarantine."""
    quarantine = Quarantine(plan.found.store, dry_run=True)
    remove_from_log(plan, quarantine)
    if not plan.is_degraded:
        quarantine_orphans(plan, quarantine)
    return plan.report(quarantine.pieces)


def would_refuse(store: MessageStore) -> bool:
    """Whether `recover` would now find a loss that it accepts only with `accept_loss`. Reads only."""
    try:
        return preview(store, reread=False).state is RecoveryState.DEGRADED
    except EngineError as error:
        return type(error) is CorruptionError


def copied_note(store: MessageStore, reading: WatermarkReading, options: EngineConfig | None = None) -> tuple[str, bool]:
    """Return (what `recover` says about a copied store, whether it refuses to go on); ("", False) for any other store. Reads only."""
    if not reading.is_copied:
        return "", False
    try:
        found = preview(store, options=options)
    except EngineError as error:
        return f"This is a copy, and its recovery would fail: {error}", True
    return found.copy_note, found.state is RecoveryState.DEGRADED
