"""Recover a stopped store: `compare` makes the plan and reads only, `preview` tells it, `recover` carries it out.

The order of all steps (DefaultMessageStore.recover; docs/recovery.md):

    look      refuse a store that RocketMQ would refuse; change nothing
    reread    after a failed sync: drop cached pages, so that reads come from the disk
    cut       finish a cut of the log that was noted before (storage/recovery/log.py)
    compare   the end of the log, queues to truncate, index files to delete, where to dispatch from
    degraded? damage below pyengine's watermark: report it, change nothing
    spares    remove segments of zeros after the end: on a full disk that frees space
    marker    write config/recovery, durably
    log       quarantine; remove segments after the end, newest first; drain the pool; clear the tail; rewrite bytes
              that may not be on the disk, sync, and read them again
    queues    truncate queues to the log; delete index files that are damaged or were not synced
    dispatch  log -> queues and index, from where they end; sync
    finish    checkpoint, watermark, note of a failed sync, abort, marker
    offsets   lower those of consumer groups and delay levels that are beyond the end of a queue now

The caller owns the store (its lock), and no worker runs. A crash may interrupt every step;
the next run repeats it, with the same result. A store that was stopped in order and is
undamaged is not written to at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, EngineError, FlushError, NotAStoreError, StoreRefusedError, command
from pyengine.formats.constants import MESSAGE_BYTES_MIN
from pyengine.formats.small_file import Checkpoint
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import (
    REBUILD,
    RECOVERY,
    SYNC_FAILURE,
    DurableWatermark,
    RebuildMarker,
    RecoveryMarker,
    RecoveryPath,
    SyncFailure,
    WatermarkReading,
    note_sync_failure,
    read_rebuild_marker,
    read_sync_failure,
    read_watermark,
    remove_abort_file,
    write_checkpoint,
    write_marker,
    write_recovered_from,
    write_watermark,
)
from pyengine.storage.commit_log import (
    MISSING_SEGMENT,
    Log,
    Owner,
    RecoveryStart,
    find_end,
    find_recovery_start,
    first_after_orderly_stop,
    log_exists,
    own_watermark,
    scan_before,
    scan_log,
    shown,
)
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.durable_writes import start_writeback, sweep_unfinished
from pyengine.storage.index_file import list_index_files
from pyengine.storage.later_format import refuse_later_record
from pyengine.storage.mapped_file import drop_page_cache, mapped
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.derived import (
    DerivedPlan,
    QueueState,
    apply_derived,
    compare_derived,
    count_entries_beyond_log,
    keys_in_index,
    list_queues,
    misplaced_files,
    next_offsets_from_log,
    quarantine_orphans,
    queues_between,
    refuse_foreign_extensions,
    restore_queue_times,
    synced_index_time_ms,
)
from pyengine.storage.recovery.log import (
    Extra,
    LogChange,
    LogPlan,
    Tail,
    Work,
    carry_out_cut,
    plan_log,
    quarantine_log,
    read_cut,
)
from pyengine.storage.recovery.quarantine import Quarantine, move_to_quarantine
from pyengine.storage.recovery.report import (
    CutQueue,
    GrowingProgress,
    Progress,
    RecoveryReport,
    RecoveryState,
    SharedState,
)


def recover(
    store: MessageStore,
    *,
    progress: Progress | None = None,
    accept_loss: bool = False,
    shared: SharedState | None = None,
    options: EngineConfig | None = None,
) -> RecoveryReport:
    """Recover the store; everything up to the report's end offset is durable when this returns.

    Afterwards the store is like one that was stopped in order: no abort file, queues and index match
    the log, the checkpoint is right. Raises StoreRefusedError (a segment of wrong length, a
    foreign file), CorruptionError (a missing segment, or queue entries beyond the log's bytes, unless `accept_loss`),
    NotAStoreError, DiskFullError, DiskError, FlushError. Damage below pyengine's watermark raises no error: the report has
    state DEGRADED, and nothing was changed; with `accept_loss` the log is truncated there and the rest goes to quarantine.
    A failed sync is noted in config/sync-failure, and until the next boot recovery does not rely on earlier syncs.
    """
    started_s = time.monotonic()
    steps = GrowingProgress(progress)
    work = Work(store, options or EngineConfig(), steps, Quarantine(store), [])
    refuse_no_store(store)
    if shared is not None and shared.sync_failed:
        note_sync_failure(store, _look(store, shared, reread=False).durable_end, "", "its engine has seen a sync fail")
    known = _look(store, shared, reread=True)
    try:
        plan = _plan_after_unfinished(work, known, shared, accept_loss)
        report = plan.report() if plan.is_refused else _apply(work, plan)
    except FlushError as error:
        if note_sync_failure(store, known.durable_end, str(error.path), os.strerror(error.errno)):
            raise
        raise FlushError(f"{error}. That cannot be noted in {SYNC_FAILURE.path(store)}: restart the machine before you "
                         "recover, since the page cache may differ from the disk", errno=error.errno, path=error.path) from error
    return replace(report, is_dry_run=False, notes=(*report.notes, *work.notes), quarantined=tuple(work.quarantine.pieces),
                   seconds=time.monotonic() - started_s)


def preview(
    store: MessageStore, *, progress: Progress | None = None, accept_loss: bool = False, shared: SharedState | None = None,
    options: EngineConfig | None = None,
) -> RecoveryReport:
    """Return the report that `recover` with the same arguments would return now, or raise its errors. Changes nothing.

    The caller ensures that no process changes the store meanwhile. Two values may be higher in the real recovery, which
    learns them only during dispatch: `dispatched_bytes`, and the queues that lack entries in their middle. Offsets
    of groups are not read, and `queue_ends` is empty. EngineError if an interrupted cut or rebuild must be finished first.
    """
    started_s, steps = time.monotonic(), GrowingProgress(progress)
    refuse_no_store(store)
    plan = _foreseen(store, _look(store, shared, reread=True), shared, options or EngineConfig(), accept_loss, steps)
    if not plan.is_refused:
        steps.finish()
    return replace(plan.report(), seconds=time.monotonic() - started_s)


def _foreseen(
    store: MessageStore, known: _Known, shared: SharedState | None, options: EngineConfig, accept_loss: bool, progress: Progress | None,
) -> RecoveryPlan:
    """Return what `recover` would do now, or raise its refusals."""
    store.list_complete_log(accept_loss=accept_loss)
    cut = read_cut(store)
    if cut is not None or read_rebuild_marker(store) is not None:
        begun = f"cut the log at {cut.at} ({cut.reason})" if cut is not None else "rebuild queues or index"
        raise EngineError(f"a run on {store} that was to {begun} was interrupted: the next recovery finishes that first, and a "
                          "preview cannot; run `recover`, or restore the store")
    plan = compare(store, known, shared, options, accept_loss=accept_loss, progress=progress)
    plan.require_no_refusal()
    return plan


def would_refuse(store: MessageStore) -> bool:
    """Whether `recover` would now find a loss that it accepts only with `accept_loss`. Reads only."""
    try:
        return _foreseen(store, _look(store, None, reread=False), None, EngineConfig(), False, None).is_refused
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


# -- look ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """What notes and shared memory say, before the log is read. The log is durable below `durable_end` in any case.

    `has_failed_sync`: a sync has failed since the last boot, so clean pages may not be on the disk.
    """

    reading: WatermarkReading
    durable_end: int
    failure: SyncFailure | None
    has_failed_sync: bool


def _look(store: MessageStore, shared: SharedState | None, *, reread: bool) -> _Known:
    """Read the notes; `reread`: if a sync has failed since the last boot, drop cached pages, so that the disk is read."""
    reading, left = read_watermark(store), shared or SharedState(0, 0)
    watermark = reading.watermark
    durable_end = max(0 if watermark is None else watermark.flushed, 0 if left.mismatch else left.flushed)
    failure = read_sync_failure(store)
    known = _Known(reading, durable_end, failure, left.sync_failed or failure is not None and failure.is_of_this_boot)
    if known.has_failed_sync and reread:
        is_all_ours = watermark is not None and not watermark.verified_from
        # The files that the sync could not write may be any of the others.
        drop_page_cache(store, durable_end if is_all_ours else 0)
    return known


# -- decide -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a recovery does, decided before its first change. `report` tells it, `_apply` carries it out."""

    store: MessageStore
    options: EngineConfig
    known: _Known
    watermark: DurableWatermark | None  # for a copy that has an identity of its own by now, one that covers no bytes yet
    copied: DurableWatermark | None     # the original's watermark in a copied store
    accept_loss: bool
    files: Log
    start: RecoveryStart
    log: LogPlan
    derived: DerivedPlan
    was_cut: bool = False               # a cut that was noted before has just changed the log
    rebuilt: RebuildMarker | None = None  # pieces that were moved away, to be made again

    @property
    def durable_end(self) -> int:
        """The log is durable below this offset in any case."""
        return self.known.durable_end if self.copied is None or self.watermark is None else self.watermark.flushed

    @property
    def last_stored_ms(self) -> int:
        """The store time of the last message; -1 if there is none."""
        scan = self.log.scan
        last_ms, index = scan.last_store_timestamp_ms, self.files.index_of(scan.scan_from) or 0
        while last_ms < 0 and index > 0:  # the walk has read only blanks
            index -= 1
            last_ms = scan_log(self.files, index, limit=scan.scan_from).last_store_timestamp_ms
        return last_ms

    @property
    def next_read_from(self) -> int:
        """Where the next recovery, after an orderly stop, begins to read the log."""
        kept = [segment for segment in self.files.segments if segment.start_offset <= self.log.end_offset]
        return kept[first_after_orderly_stop(self.files, len(kept))].start_offset if kept else self.log.scan.scan_from

    @property
    def is_refused(self) -> bool:
        """Whether bytes are damaged that had been synced, and the loss is not accepted: nothing is changed.

        In a copy, a segment that was copied while it was written ends with zeros or inside a record, perhaps inside
        its head, where the bytes do not show that they are one. If records follow in that segment, they were copied later, or the
        damage is of a later time.
        """
        if self.accept_loss:
            return False
        if self.copied is None:
            return self.files.watermark is not None and self.log.end_offset < self.files.watermark
        holds_no_record = not self.log.tail.may_be_message or self.log.tail_bytes < MESSAGE_BYTES_MIN
        is_cut_short = holds_no_record and self.log.scan.reason != MISSING_SEGMENT
        return self.log.end_offset < self.copied.flushed and not is_cut_short

    @property
    def has_work(self) -> bool:
        """Whether there are changes in addition to syncs."""
        end, watermark = self.log.end_offset, self.watermark
        return (
            self.start.path is RecoveryPath.ABNORMAL
            or self.was_cut
            or self.log.changes_something
            or self.derived.changes_something
            or self.derived.dispatch_from < end
            or self.start.marker is not None
            or self.known.failure is not None
            or self.copied is not None
            or (watermark is not None and watermark.flushed != end)
            or self._checkpoint_is_ahead()
        )

    def _checkpoint_is_ahead(self) -> bool:
        """Whether the checkpoint has times later than the log's last message, or an index time without an index."""
        checkpoint = self.start.checkpoint
        if checkpoint.index_msg_timestamp_ms and not list_index_files(self.store):
            return True
        newest_ms = max(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms)
        return newest_ms > max(0, self.log.scan.last_store_timestamp_ms) and newest_ms > max(0, self.last_stored_ms)

    # -- refusals, before any change

    def require_no_refusal(self) -> None:
        """Raise what `recover` raises before any change; not for a plan that `is_refused`, whose report says it."""
        if self.options.enable_consume_queue_ext:
            refuse_foreign_extensions(self.store)
        self._refuse_later_record()
        if not self.is_refused:
            self.refuse_loss()
            self._refuse_misplaced()

    def refuse_loss(self) -> None:
        """Raise CorruptionError if queues or index have messages whose bytes are in no segment, unless that is accepted.

        It is for RocketMQ's stores, which have no watermark to tell the loss; RocketMQ's own recovery empties the queues.
        """
        if self.accept_loss or self.files.owner is Owner.PYENGINE or self.start.marker is not None:
            return
        was_emptied = self.start.path is RecoveryPath.NORMAL and self.log.tail in (Tail.NOTHING, Tail.ROLL) and all(
            kind is Extra.SPARE for _, kind in self.log.extra)
        known = lost_messages(self.store, self.files, self.derived.queues, self.log.end_offset, was_emptied=was_emptied)
        if known:
            raise CorruptionError(
                f"{self.store} has lost a part of its commit log: {known}. Nothing was changed; restore what is missing from a "
                "copy, carve out what is whole with `pyengine salvage STORE DEST`, or give up those messages with "
                "`pyengine recover STORE --accept-loss`")

    def _refuse_misplaced(self) -> None:
        """Raise StoreRefusedError if dispatch needs a folder and a file has its name."""
        misplaced = misplaced_files(self.store.consume_queue)
        end, multi_dispatch = self.log.end_offset, self.options.enable_multi_dispatch
        for queue in queues_between(self.files, self.derived.dispatch_from, end, multi_dispatch) if misplaced else ():
            folder = self.store.queue_folder(queue.topic, queue.queue_id)
            for path in misplaced & {folder.parent, folder}:
                raise StoreRefusedError(f"{path} is not a folder, and the log has messages for the queue {folder}; move it away")

    def _refuse_later_record(self) -> None:
        """Raise StoreRefusedError if the log continues with a record of RocketMQ 5."""
        holder = self.files.index_of(self.log.end_offset)
        if holder is not None:
            segment = self.files.segments[holder]
            with mapped(segment.path) as view:
                refuse_later_record(view, self.log.end_offset - segment.start_offset, self.log.end_offset)

    # -- what it does

    def log_change(self, work: Work) -> LogChange:
        """Return the change of the log."""
        # A failed sync may have gone unnoticed; not in a copy, which no engine has ever synced.
        may_have_failed = self.known.has_failed_sync or (
            self.files.owner is Owner.PYENGINE and self.start.path is RecoveryPath.ABNORMAL and self.copied is None)
        return LogChange(work, self.files, self.log, self.durable_end if may_have_failed else None,
                         has_failed_sync=self.known.has_failed_sync)

    def report(self, quarantine: Quarantine | None = None) -> RecoveryReport:
        """Return what a recovery would do; with its own `quarantine` the pieces are not foretold."""
        log, end, damage_offset, is_refused = self.log, self.log.end_offset, None, self.is_refused
        if quarantine is None:
            quarantine = Quarantine(self.store, dry_run=True)
            quarantine_log(self.files, log, quarantine)
            if not is_refused:
                quarantine_orphans(self.derived, quarantine)
        cuts, deleted, pieces = self.derived.cuts, self.derived.index.deleted, tuple(quarantine.pieces)
        stranded_bytes = sum(piece.size_bytes for piece in pieces)
        if is_refused:  # the log continues after the damage, and nothing of the plan is done
            damage_offset, end = end, find_end(self.store, self.files).end_offset
            log, cuts, deleted, pieces = replace(log, drains=(), extra=(), cut_bytes=0), (), (), ()
        scan, gone = log.scan, sum(cut.entries for cut in cuts)
        notes = [_REREAD] * self.known.has_failed_sync + [self.known.reading.damage] * bool(self.known.reading.damage)
        if gone:
            notes.append(f"{gone} queue entries named messages after the end of the log at {end}: they are not in it")
        return RecoveryReport(
            path=self.start.path,
            state=RecoveryState.DEGRADED if is_refused else RecoveryState.RECOVERED,
            min_offset=self.files.min_offset,
            end_offset=end,
            scan_from=scan.scan_from,
            stop_reason=str(scan.reason),
            records=scan.records,
            messages=scan.messages,
            kept_bytes=max(0, end - max(self.files.min_offset, 0)),
            cut_bytes=log.cut_bytes,
            drained_bytes=log.drained_bytes,
            dispatched_bytes=0 if is_refused else max(0, end - self.derived.dispatch_from),
            last_store_timestamp_ms=scan.last_store_timestamp_ms,
            damage_offset=damage_offset,
            watermark=self.files.watermark if self.copied is None else self.copied.flushed,
            is_copy=self.copied is not None,
            stranded_bytes=stranded_bytes,
            shared_state=log.shared_state,
            queue_ends={(queue.topic, queue.queue_id): queue.max_offset for queue in self.derived.queues} if is_refused else {},
            index_files_removed=len(deleted),
            queue_entries_removed=gone,
            removed_files=tuple(
                shown(segment.path, self.store.root) for segment, kind in log.extra if kind is not Extra.STRANDED),
            cut_queues=tuple(
                CutQueue(cut.after.topic, cut.after.queue_id, cut.entries, len(cut.deleted), cut.cleared is not None)
                for cut in cuts if cut.changes_something
            ),
            deleted_index_files=tuple((file.path.name, file.label) for file in deleted),
            quarantined=pieces,
            notes=tuple(notes),
            changed=not is_refused and self.has_work,
            is_dry_run=True,
        )


_REREAD = "a sync had failed: what may not have reached the disk was read from it and written again"


def compare(
    store: MessageStore, known: _Known, shared: SharedState | None, options: EngineConfig, *, accept_loss: bool = False,
    progress: Progress | None = None, changes_log: bool = False,
) -> RecoveryPlan:
    """Compare queues and index with the log, and both with what must be durable. Reads only.

    `changes_log`: the caller carries the plan out, so a copy must have an identity of its own before its watermark is given up.
    """
    segments, reading, copied = store.list_log(), known.reading, None
    watermark, identity = reading.watermark, reading.identity
    own = own_watermark(reading, segments[0].start_offset if segments else 0)
    if own is not None and reading.is_copied and identity is not None and not (identity.is_copy and changes_log):
        copied, watermark = watermark, replace(own, uuid=str(identity.uuid))
    log = Log.of(segments, store.segment_bytes, watermark).with_kept_mappings()
    queues = list_queues(store)
    with start_writeback(log.unsynced_paths):
        start = find_recovery_start(store, log, has_failed_sync=known.has_failed_sync)
        path, marker, check_crc = start.path, start.marker, options.check_crc_on_recover
        log_plan = plan_log(log, start.first, shared, check_crc=check_crc, progress=progress)
        # An earlier recovery, interrupted or complete (then `abort` is gone), has put keys that the undo in shared memory does not have.
        is_untouched = path is RecoveryPath.ABNORMAL and marker is None
        undo = shared if log_plan.by_slot and is_untouched and not known.has_failed_sync else None

        def decided(log_plan: LogPlan, undo: SharedState | None) -> RecoveryPlan:
            derived = compare_derived(store, log, log_plan, start, queues, undo, options)
            return RecoveryPlan(store, options, known, watermark, copied, accept_loss, log, start, log_plan, derived)

        plan = decided(log_plan, undo)
        # Read what is dispatched now, and what the next start would read: damage there is damage below the watermark.
        read_from = min(plan.derived.dispatch_from, plan.next_read_from)
        if log.owner is Owner.PYENGINE and read_from < log_plan.scan.scan_from:
            first = log.index_of(read_from) or 0
            extended = scan_before(log, log_plan.scan, first, check_crc=check_crc)
            if extended is None:
                return decided(plan_log(log, first, None, check_crc=check_crc), None)
            plan = replace(plan, log=replace(log_plan, scan=extended))
        if marker is not None:
            dispatch_from = max(log.min_offset, 0, min(plan.derived.dispatch_from, marker.dispatch_from))
            plan = replace(plan, derived=replace(plan.derived, dispatch_from=dispatch_from))
        return plan


# -- execute ------------------------------------------------------------------


def _plan_after_unfinished(work: Work, known: _Known, shared: SharedState | None, accept_loss: bool) -> RecoveryPlan:
    """Finish a cut and begin a rebuild that were noted before, then plan; raise the plan's refusals."""
    store = work.store
    store.list_complete_log(accept_loss=accept_loss)
    cut, rebuilt = read_cut(store), read_rebuild_marker(store)
    if cut is not None:
        work.notes.append(carry_out_cut(store, cut, work.quarantine))
        shared, known = None, replace(known, reading=read_watermark(store))
    if rebuilt is not None:
        move_to_quarantine(store, rebuilt)
    plan = compare(store, known, shared, work.options, accept_loss=accept_loss, progress=work.progress, changes_log=True)
    plan.require_no_refusal()
    return replace(plan, was_cut=cut is not None, rebuilt=rebuilt)


def _apply(work: Work, plan: RecoveryPlan) -> RecoveryReport:
    """Carry out the plan, then lower the offsets that are beyond the end of a queue now."""
    report, queues, dispatched_from = plan.report(work.quarantine), plan.derived.queues, None
    if report.changed:
        dispatched_from, queues = _carry_out(work, plan)
    else:
        plan.log_change(work).sync()
        sweep_unfinished(work.store)
    work.progress.finish()
    next_offsets = _next_offsets(work, plan, queues)
    ends = {(one.topic, one.queue_id): one.max_offset for one in queues}
    work.notes.extend(ConsumerOffsets(work.store).lower(ends))
    work.notes.extend(DelayOffsets(work.store).lower(ends))
    work.notes.extend(DelayCancels(work.store).lower(ends))
    failpoint("recovery_done")
    return replace(report, queue_ends={**ends, **next_offsets},
                   stranded_bytes=sum(piece.size_bytes for piece in work.quarantine.pieces),
                   dispatched_bytes=0 if dispatched_from is None else max(0, plan.log.end_offset - dispatched_from))


def _carry_out(work: Work, plan: RecoveryPlan) -> tuple[int, list[QueueState]]:
    """Change the store as planned; return where dispatch began, and the queues afterwards."""
    store, watermark = work.store, plan.watermark
    failpoint("recovery_planned")
    sweep_unfinished(store)
    change = plan.log_change(work)
    change.remove_spares()
    write_marker(store, RecoveryMarker(plan.start.path, plan.log.scan.scan_from, plan.derived.dispatch_from))
    failpoint("recovery_marked")
    if watermark is not None and plan.log.end_offset < watermark.flushed:
        write_watermark(store, watermark.moved_to(plan.log.end_offset))
        failpoint("recovery_loss_accepted")
    change.apply()
    dispatched_from, queues = apply_derived(work, plan.files, plan.log, plan.derived)
    _finish(work, plan)
    return dispatched_from, queues


def _finish(work: Work, plan: RecoveryPlan) -> None:
    """Note that all is done, the abort file and the markers last."""
    store, watermark, end = work.store, plan.watermark, plan.log.end_offset
    if plan.rebuilt is not None:
        restore_queue_times(store, plan.rebuilt)
    last_ms = max(0, plan.last_stored_ms)
    write_checkpoint(store, Checkpoint(last_ms, last_ms, synced_index_time_ms(store)))
    failpoint("recovery_checkpoint_written")
    if watermark is not None and (plan.copied is not None or watermark.flushed != end):
        write_watermark(store, watermark.moved_to(end))
        failpoint("recovery_watermark_written")
    if plan.files.owner is Owner.ROCKETMQ and plan.next_read_from < plan.log.scan.scan_from:
        write_recovered_from(store, plan.log.scan.scan_from)
    failpoint("recovery_kept_noted")
    if plan.known.failure is not None:
        SYNC_FAILURE.remove(store)
    remove_abort_file(store)
    failpoint("recovery_abort_removed")
    REBUILD.remove(store)
    RECOVERY.remove(store)
    failpoint("recovery_marker_removed")


def _next_offsets(work: Work, plan: RecoveryPlan, queues: list[QueueState]) -> dict[tuple[str, int], int]:
    """Call next_offsets_from_log(); not in RocketMQ's stores, where an entry's position is its offset, whatever the record has."""
    if plan.files.owner is not Owner.PYENGINE:
        return {}
    given = next_offsets_from_log(plan.files, queues, plan.log.scan.scan_from, plan.log.end_offset)
    for topic, queue_id in sorted(given):
        work.notes.append(f"queue {queue_id} of {topic} lacks entries, since its last message has a higher queue offset than "
                          f"its entry: run {command('rebuild', 'STORE', '--topic', topic, '--queue-id', queue_id)}")
    return given


def refuse_no_store(store: MessageStore) -> None:
    """Raise NotAStoreError for a folder that holds no store."""
    if not log_exists(store.root) and not store.checkpoint.exists() and not store.consume_queue.exists():
        raise NotAStoreError(f"{store} holds no store: there is no commitlog in it")


def lost_messages(store: MessageStore, log: Log, queues: Sequence[QueueState], end: int, *, was_emptied: bool) -> str:
    """Return a sentence about messages that queues and index have and the log has no bytes of; "" if there are none.

    `was_emptied`: only zeros are at the log's end, although the store was stopped in order; after a crash the
    last messages may never have reached the disk, but their segment has.
    """
    files_end = log.segments[-1].start_offset + log.size_bytes if log.segments else 0
    entries = count_entries_beyond_log(queues, end if was_emptied else files_end, files_end)
    keys = 0 if log.segments else keys_in_index(store)
    if not entries and not keys:
        return ""
    named = f"{entries} queue entries name" if entries else f"{keys} keys of the index name"
    return f"{named} messages after its end at {end}, where nothing is left"
