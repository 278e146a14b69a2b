"""Recover a stopped store: find the log, `decide` what to do, which reads only, and carry that out.

The order of all steps is in docs/recovery.md (RocketMQ: DefaultMessageStore.recover); those of the log are in LogPlan.change, those of
queues and index in RecoveryPlan.change. The caller owns the store (its lock), and no worker runs. A crash may interrupt every step; the
next run repeats it, with the same result. A store that was stopped in order and is undamaged is not written to at all.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from pyengine.arguments import INT64_MAX
from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, DiskFullError, EngineError, FlushError
from pyengine.formats.small_file import Checkpoint
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import (
    CUT,
    REBUILD,
    RECOVERED,
    RECOVERY,
    SYNC_FAILURE,
    WATERMARK,
    RebuildMarker,
    SharedState,
    WatermarkReading,
    note_sync_failure,
    read_notes,
    remove_abort_file,
    write_checkpoint,
)
from pyengine.storage.commit_log import find_end, shown
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.durable_writes import start_writeback, sweep_unfinished
from pyengine.storage.message_store import MessageStore
from pyengine.storage.queue_ends import keep_queue_ends
from pyengine.storage.recovery.derived import RecoveryPlan, plan_derived
from pyengine.storage.recovery.log import Extra, FoundLog, find_log, plan_log
from pyengine.storage.recovery.quarantine import move_to_quarantine
from pyengine.storage.recovery.report import CutQueue, Progress, RecoveryReport, RecoveryState


def recover(
    store: MessageStore,
    *,
    progress: Progress | None = None,
    accept_loss: bool = False,
    shared: SharedState | None = None,
    options: EngineConfig | None = None,
    rebuilding: RebuildMarker | None = None,
    dry_run: bool = False,
) -> RecoveryReport:
    """Recover the store; everything up to the report's end offset is durable when this returns, unless its state is DEGRADED.

    Afterwards the store is like one that was stopped in order: no abort file, queues and index match
    the log, the checkpoint is right. Raises StoreRefusedError (a segment of wrong length, a
    foreign file), CorruptionError (a missing segment, or queue entries beyond the log's bytes, unless `accept_loss`),
    NotAStoreError, DiskFullError, DiskError, FlushError. Damage below pyengine's watermark raises no error: the report has
    state DEGRADED, and nothing was changed; with `accept_loss` the log is truncated there and the rest goes to quarantine.
    A failed sync is noted in config/sync-failure, and until the next boot recovery does not rely on earlier syncs.
    `rebuilding`: queues and index that it moves away and makes again; by default those of a rebuild that was interrupted.
    `dry_run` changes nothing, and returns the report of a run, or raises its errors. Two values may be higher in the real recovery, which
    learns them only during dispatch: `dispatched_bytes`, and the queues that lack entries in their middle. Offsets of groups are not
    read, and `queue_ends` is empty. EngineError if an interrupted cut or rebuild must be finished first.
    """
    started_s = time.monotonic()
    options = options or EngineConfig()
    store.require_exists()
    notes = read_notes(store, shared, rebuilding)
    if notes.rebuilding is not None:  # records with light queue offsets got them from a store with multi-dispatch, whatever is set now
        options = replace(options, enable_multi_dispatch=True, enable_consume_queue_ext=(
            options.enable_consume_queue_ext or store.consume_queue_ext.is_dir()))
    if shared is not None and shared.sync_failed and not dry_run:
        note_sync_failure(store, notes.durable_end, "", "its engine has seen a sync fail")
    try:
        found = find_log(store, notes, options, accept_loss=accept_loss)
        if dry_run and ((cut := notes.cut) is not None or notes.rebuilding is not None):
            begun = f"cut the log at {cut.at} ({cut.reason})" if cut is not None else "rebuild queues or index"
            raise EngineError(f"a run on {store} that was to {begun} was interrupted: the next recovery finishes that first, and a "
                              "preview cannot; run `recover`, or restore the store")
        plan = decide(found, progress)
        report = report_of(plan) if plan.log.is_degraded or dry_run else _carry_out(plan, progress)
    except FlushError as error:
        if note_sync_failure(store, notes.durable_end, str(error.path), os.strerror(error.errno)):
            raise
        raise FlushError(f"{error}. That cannot be noted in {SYNC_FAILURE.path(store)}: restart the machine before you "
                         "recover, since the page cache may differ from the disk", errno=error.errno, path=error.path) from error
    return replace(report, is_dry_run=dry_run, seconds=time.monotonic() - started_s)


def would_refuse(store: MessageStore) -> bool:
    """Whether `recover` would now find a loss that it accepts only with `accept_loss`. Reads only."""
    try:
        return recover(store, dry_run=True).state is RecoveryState.DEGRADED
    except EngineError as error:
        return type(error) is CorruptionError


def copied_note(store: MessageStore, reading: WatermarkReading, options: EngineConfig | None = None) -> tuple[str, bool]:
    """Return (what `recover` says about a copied store, whether it refuses to go on); ("", False) for any other store. Reads only."""
    if not reading.is_copied:
        return "", False
    try:
        found = recover(store, options=options, dry_run=True)
    except EngineError as error:
        return f"This is a copy, and its recovery would fail: {error}", True
    return found.copy_note, found.state is RecoveryState.DEGRADED


# -- decide ----------------------------------------------------------------------------


def decide(found: FoundLog, progress: Progress | None = None) -> RecoveryPlan:
    """Compare queues and index with the log, and both with what must be durable. Reads only; raises what `recover` refuses."""
    notes, log, marker, first = found.notes, found.log, found.notes.left.marker, found.start.first
    is_rebuild, is_ours = notes.rebuilding is not None, log.is_ours
    if is_rebuild and not is_ours and marker is None:  # no more is read than must be, or damage there would end the log
        first = max(0, len(log.segments) - 1)
    with start_writeback(log.unsynced_paths):
        plan = plan_derived(plan_log(found, first, progress))
        # Read what is dispatched now, and what the next start would read: damage there is damage below the watermark.
        read_from = min(plan.dispatch_from, plan.log.next_read_from, *[0] * is_rebuild)
        if is_ours and read_from < plan.log.scan.scan_from:
            first = log.index_of(max(read_from, log.min_offset)) or 0
            again = plan_log(found, first, progress)
            plan = replace(plan, log=again) if again.end_offset == plan.log.end_offset else plan_derived(again)
    if is_rebuild or marker is not None:
        noted = 0 if is_rebuild or marker is None else marker.dispatch_from
        plan = replace(plan, dispatch_from=max(log.min_offset, 0, min(plan.dispatch_from, noted)))
    plan.raise_refusals()
    return replace(plan, log=plan.log.with_pieces())


# -- report --------------------------------------------------------------------------

_REWRITTEN = "a sync had failed: what may not have reached the disk was written again"


def _has_work(plan: RecoveryPlan) -> bool:
    """Whether there are changes in addition to syncs."""
    found, notes, end, watermark = plan.log.found, plan.log.found.notes, plan.log.end_offset, plan.log.found.watermark
    return (
        found.is_abnormal
        or notes.cut is not None
        or notes.rebuilding is not None
        or plan.log.changes_something
        or bool(plan.deleted_index or plan.orphans)
        or any(cut.changes_something for cut in plan.cuts)
        or plan.dispatch_from < end
        or notes.left.marker is not None
        or notes.failure is not None
        or found.copied is not None
        or (watermark is not None and watermark.flushed != end)
        or _checkpoint_is_ahead(plan)
    )


def _checkpoint_is_ahead(plan: RecoveryPlan) -> bool:
    """Whether the checkpoint has times later than the log's last message, or an index time without an index."""
    checkpoint = plan.log.found.notes.left.checkpoint
    if checkpoint.index_msg_timestamp_ms and not plan.index_files:
        return True
    newest_ms = max(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms)
    return newest_ms > max(0, plan.log.scan.last_store_timestamp_ms) and newest_ms > max(0, plan.log.last_stored_ms)


def report_of(plan: RecoveryPlan) -> RecoveryReport:
    """Return what a recovery would do."""
    found, log, end, damage_offset, is_degraded = plan.log.found, plan.log, plan.log.end_offset, None, plan.log.is_degraded
    cuts, deleted, notes = plan.cuts, plan.deleted_index, found.notes
    pieces = tuple(piece.noted for piece in (*log.pieces, *plan.orphans))
    stranded_bytes = sum(piece.size_bytes for piece in pieces)
    if is_degraded:  # the log continues after the damage, and nothing of the plan is done
        damage_offset, end = end, find_end(found.store, found.log).end_offset
        log, cuts, deleted, pieces = replace(log, drains=(), extra=(), cut_bytes=0), (), (), ()
    scan, gone = log.scan, sum(cut.entries for cut in cuts)
    said = [_REWRITTEN] * notes.has_failed_sync + [notes.reading.damage] * bool(notes.reading.damage)
    if gone:
        said.append(f"{gone} queue entries named messages after the end of the log at {end}: they are not in it")
    return RecoveryReport(
        path=found.start.path,
        state=RecoveryState.DEGRADED if is_degraded else RecoveryState.RECOVERED,
        min_offset=found.log.min_offset,
        end_offset=end,
        scan_from=scan.scan_from,
        stop_reason=str(scan.reason),
        records=scan.records,
        messages=scan.messages,
        kept_bytes=max(0, end - max(found.log.min_offset, 0)),
        cut_bytes=log.cut_bytes,
        drained_bytes=sum(len(content) for _, content in log.drains),
        dispatched_bytes=0 if is_degraded else max(0, end - plan.dispatch_from),
        last_store_timestamp_ms=scan.last_store_timestamp_ms,
        damage_offset=damage_offset,
        watermark=found.log.watermark if found.copied is None else found.copied.flushed,
        is_copy=found.copied is not None,
        stranded_bytes=stranded_bytes,
        shared_state=log.shared_state,
        queue_ends={(queue.topic, queue.queue_id): queue.max_offset for queue in plan.queues} if is_degraded else {},
        index_files_removed=len(deleted),
        queue_entries_removed=gone,
        removed_files=tuple(
            shown(segment.path, found.store.root) for segment, kind in log.extra if kind is not Extra.STRANDED),
        cut_queues=tuple(
            CutQueue(cut.after.topic, cut.after.queue_id, cut.entries, len(cut.deleted), cut.cleared is not None)
            for cut in cuts if cut.changes_something
        ),
        deleted_index_files=tuple((path.name, label) for path, label in deleted),
        quarantined=pieces,
        notes=tuple(said),
        changed=not is_degraded and _has_work(plan),
    )


# -- carry out -----------------------------------------------------------------------


def _carry_out(plan: RecoveryPlan, progress: Progress | None) -> RecoveryReport:
    """Change the store as planned, keep the queues of which only a master has told, and lower the offsets beyond the end of a queue."""
    store, end, report, said = plan.log.found.store, plan.log.end_offset, report_of(plan), list[str]()
    pieces, queues, dispatched_from = list(report.quarantined), plan.queues, end
    if report.changed:
        _begin(plan)
        plan.log.change()
        dispatched_from, queues = plan.change(pieces, said, progress)
        _finish(plan, said)
    else:
        plan.log.sync()
        sweep_unfinished(store)
    further = plan.next_offsets(queues, said)
    ends, min_offset = {(one.topic, one.queue_id): one.max_offset for one in queues}, plan.log.log.min_offset
    has_messages = {(one.topic, one.queue_id): INT64_MAX for one in queues if one.last_offset >= min_offset}
    ends |= keep_queue_ends(store, min_offset, end, ends | has_messages)
    said.extend(ConsumerOffsets(store).lower(ends))
    said.extend(DelayOffsets(store).lower(ends))
    said.extend(DelayCancels(store).lower(ends))
    failpoint("recovery_done")
    return replace(report, queue_ends={**ends, **further}, notes=(*report.notes, *said), quarantined=tuple(pieces),
                   stranded_bytes=sum(piece.size_bytes for piece in pieces), dispatched_bytes=max(0, end - dispatched_from))


def _begin(plan: RecoveryPlan) -> None:
    """Note what begins, for the next recovery if this one does not finish, and move what a rebuild replaces."""
    found, end = plan.log.found, plan.log.end_offset
    store, notes, watermark = found.store, found.notes, found.watermark
    failpoint("recovery_planned")
    sweep_unfinished(store)
    plan.log.make_room()
    try:
        _mark(plan)
    except DiskFullError:  # the user's quota is full, or the file system cannot punch holes
        plan.log.remove_last_spares()
        _mark(plan)
    failpoint("recovery_marked")
    if watermark is not None and (end < watermark.flushed or notes.cut is not None):
        WATERMARK.write(store, watermark.moved_to(min(watermark.flushed, end)))
        failpoint("recovery_loss_accepted")
    if notes.rebuilding is not None:
        move_to_quarantine(store, notes.rebuilding)


def _mark(plan: RecoveryPlan) -> None:
    if (rebuilding := plan.log.found.notes.rebuilding) is not None:
        REBUILD.write(plan.log.found.store, rebuilding)
    plan.mark(plan.dispatch_from)


def _finish(plan: RecoveryPlan, said: list[str]) -> None:
    """Note that all is done, the abort file and the markers last."""
    found, log, end = plan.log.found, plan.log, plan.log.end_offset
    store, notes, watermark = found.store, found.notes, found.watermark
    index_ms, last_ms = plan.finish(), max(0, log.last_stored_ms)
    write_checkpoint(store, Checkpoint(last_ms, last_ms, index_ms))
    failpoint("recovery_checkpoint_written")
    if watermark is not None and (found.copied is not None or watermark.flushed != end):
        WATERMARK.write(store, watermark.moved_to(end, shared.ordered_from if (shared := notes.shared) and log.by_slot else None))
        failpoint("recovery_watermark_written")
    is_noted = notes.left.recovered_from == log.scan.scan_from
    if not found.log.is_ours and log.next_read_from < log.scan.scan_from and not is_noted:
        RECOVERED.write(store, log.scan.scan_from)
    failpoint("recovery_kept_noted")
    if notes.failure is not None or notes.has_failed_sync:
        SYNC_FAILURE.remove(store)
    if (cut := notes.cut) is not None:
        CUT.remove(store)
        failpoint("cut_done")
        said.append(f"the log was cut at {cut.at}, {cut.end - cut.at:,} bytes of it are in quarantine: {cut.reason}")
    remove_abort_file(store)
    failpoint("recovery_abort_removed")
    REBUILD.remove(store)
    RECOVERY.remove(store)
    failpoint("recovery_marker_removed")
