"""Recover a stopped store: the order of all steps (DefaultMessageStore.recover; docs/recovery.md).

    look      refuse a store that RocketMQ would refuse; change nothing
    reread    after a failed sync: drop cached pages, so that reads come from the disk
    cut       finish a cut of the log that was noted before (storage/recovery/log.py)
    decide    the end of the log, queues to truncate, index files to delete, where to dispatch from
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

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyengine.errors import CorruptionError, EngineError, ExitCode, FlushError, NotAStoreError, StoreRefusedError, command
from pyengine.formats.constants import MESSAGE_BYTES_MIN
from pyengine.formats.small_file import Checkpoint
from pyengine.native.failpoints import failpoint
from pyengine.storage.checkpoint import (
    DurableWatermark,
    RebuildMarker,
    RecoveryMarker,
    RecoveryPath,
    SyncFailure,
    WatermarkReading,
    forget_sync_failure,
    note_sync_failure,
    read_rebuild_marker,
    read_sync_failure,
    remove_abort_file,
    remove_marker,
    remove_rebuild_marker,
    sync_failure_path,
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
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.durable_writes import start_writeback, sweep_unfinished
from pyengine.storage.index_file import list_index_files
from pyengine.storage.later_format import refuse_later_record
from pyengine.storage.mapped_file import MappedFile, drop_page_cache, mapped
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.dispatch import (
    IndexPlan,
    LogDispatch,
    delete_index_files,
    dispatch_start,
    keys_in_index,
    plan_index,
    queues_between,
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
    read_cut,
)
from pyengine.storage.recovery.quarantine import Quarantine, move_to_quarantine
from pyengine.storage.recovery.queues import (
    QueueCut,
    QueueState,
    apply_cut,
    count_entries_beyond_log,
    list_queues,
    measured_from,
    misplaced_files,
    next_offsets_from_log,
    plan_cut,
    refuse_foreign_extensions,
    restore_queue_times,
)
from pyengine.storage.recovery.report import (
    CutQueue,
    GrowingProgress,
    OnStep,
    Progress,
    RecoveryOptions,
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
    options: RecoveryOptions | None = None,
    on_step: OnStep | None = None,
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
    recovery = _Recovery(store, options or RecoveryOptions(), progress, on_step)
    try:
        report = recovery.run(shared, accept_loss)
    except FlushError as error:
        if note_sync_failure(store, recovery.durable_end, str(error.path), os.strerror(error.errno)):
            raise
        raise FlushError(f"{error}. That cannot be noted in {sync_failure_path(store)}: restart the machine before you "
                         "recover, since the page cache may differ from the disk", errno=error.errno, path=error.path) from error
    return replace(report, seconds=time.monotonic() - started_s)


def would_refuse(store: MessageStore) -> bool:
    """Whether `recover` would now find a loss that it accepts only with `accept_loss`. Reads only."""
    with contextlib.suppress(CorruptionError):  # a damaged note, which has to be removed first
        if read_cut(store) is not None:
            return False
    reading = store.read_watermark()
    recovery = _Recovery(store, RecoveryOptions(), copied=reading.watermark if reading.is_copied else None)
    try:
        segments = store.list_complete_log()
        log = Log.of(segments, store.segment_bytes, own_watermark(reading, segments[0].start_offset if segments else 0))
        plan = recovery.decide(log, list_queues(store), None)
        recovery.refuse_loss(plan)
    except CorruptionError:
        return True
    return recovery.is_degraded(plan)


def copied_note(store: MessageStore, reading: WatermarkReading, options: RecoveryOptions | None = None) -> tuple[str, bool]:
    """Return (what `recover` says about a copied store, whether it refuses to go on); ("", False) for any other store. Reads only."""
    if not reading.is_copied:
        return "", False
    try:
        found = preview(store, options=options)
    except EngineError as error:
        return f"This is a copy, and its recovery would fail: {error}", True
    return found.copy_note, found.state is RecoveryState.DEGRADED


def preview(
    store: MessageStore, *, progress: Progress | None = None, accept_loss: bool = False, shared: SharedState | None = None,
    options: RecoveryOptions | None = None,
) -> RecoveryReport:
    """Return the report that `recover` with the same arguments would return now, or raise its errors. Changes nothing.

    The caller ensures that no process changes the store meanwhile. Two values may be higher in the real recovery, which
    learns them only during dispatch: `dispatched_bytes`, and the queues that lack entries in their middle. Offsets
    of groups are not read, and `queue_ends` is empty. EngineError if an interrupted cut or rebuild must be finished first.
    """
    started_s = time.monotonic()
    report = _Recovery(store, options or RecoveryOptions(), progress, is_dry_run=True).run(shared, accept_loss)
    return replace(report, seconds=time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was found, and all decisions, which are made before the first change."""

    files: Log
    queues: list[QueueState]
    start: RecoveryStart
    log: LogPlan
    cuts: tuple[QueueCut, ...]
    index: IndexPlan
    dispatch_from: int
    orphaned_folders: tuple[Path, ...]  # queues and index, if there is no log
    index_progress: bytes | None

    @property
    def last_stored_ms(self) -> int:
        """The store time of the last message; -1 if there is none."""
        scan = self.log.scan
        last_ms, index = scan.last_store_timestamp_ms, self.files.index_of(scan.scan_from) or 0
        while last_ms < 0 and index > 0:  # the walk has read only blanks
            index -= 1
            last_ms = scan_log(self.files, index, limit=scan.scan_from).last_store_timestamp_ms
        return last_ms


class _Recovery:
    def __init__(
        self, store: MessageStore, options: RecoveryOptions, progress: Progress | None = None,
        on_step: OnStep | None = None, copied: DurableWatermark | None = None, is_dry_run: bool = False,
    ) -> None:
        self._store = store
        self._options, self._is_dry_run = options, is_dry_run
        self._progress = GrowingProgress(progress)
        self._on_step = on_step or (lambda name: None)
        self._quarantine = Quarantine(store, dry_run=is_dry_run)
        self._notes: list[str] = []
        self._work = Work(self._store, options, self._progress, self._on_step, self._quarantine, self._notes)
        self._dispatched_from: int | None = None
        self._was_cut = False
        self._rebuilt: RebuildMarker | None = None
        self._copied = copied  # the original's watermark in a copied store
        self._failure: SyncFailure | None = None
        self._has_failed_sync = False  # a sync has failed since the last boot: clean pages may not be on the disk
        self.durable_end = 0      # the log is durable below this offset in any case

    def run(self, shared: SharedState | None, accept_loss: bool) -> RecoveryReport:
        refuse_no_store(self._store)
        reading = self._store.read_watermark()
        self._note_failed_sync(reading.watermark, shared)
        segments = self._store.list_complete_log(accept_loss=accept_loss)
        cut, self._rebuilt = read_cut(self._store), read_rebuild_marker(self._store)
        if self._is_dry_run and (cut is not None or self._rebuilt is not None):
            begun = f"cut the log at {cut.at} ({cut.reason})" if cut is not None else "rebuild queues or index"
            raise EngineError(f"a run on {self._store} that was to {begun} was interrupted: the next recovery finishes that first, and a "
                              "preview cannot; run `recover`, or restore the store")
        if cut is not None:
            self._notes.append(carry_out_cut(self._store, cut, self._quarantine, self._on_step))
            self._was_cut, shared = True, None
            segments, reading = self._store.list_log(), self._store.read_watermark()
        reading = self._valid_watermark(reading, segments)
        log = Log.of(segments, self._store.segment_bytes, reading.watermark).with_kept_mappings()
        if self._rebuilt is not None:
            self._on_step("move")
            move_to_quarantine(self._store, self._rebuilt)
        queues = list_queues(self._store)
        if self._options.enable_consume_queue_ext:
            refuse_foreign_extensions(self._store)
        with start_writeback(log.unsynced_paths):
            plan = self.decide(log, queues, shared)
        self._refuse_later_record(log, plan.log.end_offset)
        if reading.damage:
            self._notes.append(reading.damage)
        if self.is_degraded(plan) and not accept_loss:
            return self._report(plan, queues, RecoveryState.DEGRADED, changed=False)
        if not accept_loss:
            self.refuse_loss(plan)
        self._refuse_misplaced(plan)
        has_work = self._has_work(plan, reading.watermark)
        if self._is_dry_run:
            if has_work:
                LogChange(self._work, log, plan.log, None, has_failed_sync=self._has_failed_sync).preview()
                self._quarantine_orphans(plan)
                self._dispatched_from = plan.dispatch_from
            self._progress.finish()
            return self._report(plan, [], RecoveryState.RECOVERED, has_work)
        if has_work:
            queues = self._carry_out(plan, reading.watermark)
        else:
            self._log_change(plan).sync()
            sweep_unfinished(self._store)
        self._progress.finish()
        next_offsets = self._next_offsets(plan, queues)
        ends = {(one.topic, one.queue_id): one.max_offset for one in queues}
        self._notes += ConsumerOffsets(self._store).lower(ends, before_change=lambda: self._on_step("consumer offsets"))
        self._notes += DelayOffsets(self._store).lower(ends, before_change=lambda: self._on_step("delay offsets"))
        failpoint("recovery_done")
        report = self._report(plan, queues, RecoveryState.RECOVERED, has_work)
        return replace(report, queue_ends={**report.queue_ends, **next_offsets})

    # -- look ---------------------------------------------------------------------

    def _note_failed_sync(self, watermark: DurableWatermark | None, shared: SharedState | None) -> None:
        """If a sync has failed since the last boot, note that durably first, and drop cached pages, so that the disk is read."""
        left = SharedState(0, 0) if shared is None else shared
        self.durable_end = max(0 if watermark is None else watermark.flushed, 0 if left.mismatch else left.flushed)
        if left.sync_failed and not self._is_dry_run:
            note_sync_failure(self._store, self.durable_end, "", "its engine has seen a sync fail")
        self._failure = read_sync_failure(self._store)
        self._has_failed_sync = left.sync_failed or self._failure is not None and self._failure.is_of_this_boot
        if self._has_failed_sync:
            self._notes.append("a sync had failed: what may not have reached the disk was read from it and written again")
            is_all_ours = watermark is not None and not watermark.verified_from
            # The files that the sync could not write may be any of the others.
            drop_page_cache(self._store, self.durable_end if is_all_ours else 0)

    def _valid_watermark(self, reading: WatermarkReading, segments: Sequence[MappedFile]) -> WatermarkReading:
        """Return the watermark; for a copy that has an identity of its own by now, one that covers no bytes yet."""
        identity = reading.identity
        own = own_watermark(reading, segments[0].start_offset if segments else 0)
        is_renewed = identity is not None and (not identity.is_copy or self._is_dry_run)
        if own is None or not reading.is_copied or identity is None or not is_renewed:
            return reading
        self._copied = reading.watermark
        self.durable_end = own.flushed
        return replace(reading, watermark=replace(own, uuid=str(identity.uuid)))

    # -- decide -------------------------------------------------------------------

    def decide(self, log: Log, queues: list[QueueState], shared: SharedState | None) -> _Plan:
        check_crc = self._options.check_crc_on_recover
        start = find_recovery_start(self._store, log, has_failed_sync=self._has_failed_sync)
        path, marker = start.path, start.marker
        log_plan = plan_log(log, start.first, shared, check_crc=check_crc, progress=self._progress)
        # An earlier recovery, interrupted or complete (then `abort` is gone), has put keys that the undo in shared memory does not have.
        is_untouched = path is RecoveryPath.ABNORMAL and marker is None
        undo = shared if log_plan.by_slot and is_untouched and not self._has_failed_sync else None

        def decide_from(log_plan: LogPlan, undo: SharedState | None) -> _Plan:
            """Decide about queues, index and dispatch for the log of `log_plan`; `undo`: valid shared memory."""
            end, measured = log_plan.end_offset, queues
            if path is RecoveryPath.ABNORMAL:  # the checkpoint, by which scan_from was chosen, covers older records
                measured = [measured_from(queue, log_plan.scan.scan_from) for queue in queues]
            cuts = tuple(plan_cut(queue, end, keep_place=log.owner is Owner.PYENGINE) for queue in measured)
            reput_from = undo.reput_from if undo is not None and undo.index_progress is not None else None
            progress = undo.index_progress if undo is not None and reput_from is not None else None
            is_crash = path is RecoveryPath.ABNORMAL and progress is None
            index = plan_index(
                self._store, start.checkpoint.index_msg_timestamp_ms if is_crash else None, max(log.min_offset, 0), end)
            dispatch_from = dispatch_start(log, path, log_plan, cuts, index, reput_from=reput_from, options=self._options)
            orphaned = () if log.segments else tuple(
                folder for folder in (self._store.consume_queue, self._store.index)
                if folder.is_dir() and any(path.is_file() for path in folder.rglob("*")))
            return _Plan(log, queues, start, log_plan, cuts, index, dispatch_from, orphaned, progress)

        plan = decide_from(log_plan, undo)
        # Read what is dispatched now, and what the next start would read: damage there is damage below the watermark.
        read_from = min(plan.dispatch_from, _next_read_from(plan))
        if log.owner is Owner.PYENGINE and read_from < log_plan.scan.scan_from:
            first = log.index_of(read_from) or 0
            extended = scan_before(log, log_plan.scan, first, check_crc=check_crc)
            if extended is None:
                return decide_from(plan_log(log, first, None, check_crc=check_crc), None)
            plan = replace(plan, log=replace(log_plan, scan=extended))
        if marker is not None:
            plan = replace(plan, dispatch_from=max(log.min_offset, 0, min(plan.dispatch_from, marker.dispatch_from)))
        return plan

    def is_degraded(self, plan: _Plan) -> bool:
        """Whether bytes are damaged that had been synced.

        In a copy, a segment that was copied while it was written ends with zeros or inside a record, perhaps inside
        its head, where the bytes do not show that they are one. If records follow in that segment, they were copied later, or the
        damage is of a later time.
        """
        if self._copied is None:
            return plan.files.watermark is not None and plan.log.end_offset < plan.files.watermark
        holds_no_record = not plan.log.tail.may_be_message or plan.log.tail_bytes < MESSAGE_BYTES_MIN
        is_cut_short = holds_no_record and plan.log.scan.reason != MISSING_SEGMENT
        return plan.log.end_offset < self._copied.flushed and not is_cut_short

    def refuse_loss(self, plan: _Plan) -> None:
        """Raise CorruptionError, before any change, if queues or index have messages whose bytes are in no segment.

        It is for RocketMQ's stores, which have no watermark to tell the loss; RocketMQ's own recovery empties the queues.
        """
        if plan.files.owner is Owner.PYENGINE or plan.start.marker is not None:
            return
        was_emptied = plan.start.path is RecoveryPath.NORMAL and plan.log.tail in (Tail.NOTHING, Tail.ROLL) and all(
            kind is Extra.SPARE for _, kind in plan.log.extra)
        known = lost_messages(self._store, plan.files, plan.queues, plan.log.end_offset, was_emptied=was_emptied)
        if known:
            raise CorruptionError(
                f"{self._store} has lost a part of its commit log: {known}. Nothing was changed; restore what is missing from a "
                "copy, carve out what is whole with `pyengine salvage STORE DEST`, or give up those messages with "
                "`pyengine recover STORE --accept-loss`")

    def _refuse_misplaced(self, plan: _Plan) -> None:
        """Raise StoreRefusedError, before any change, if dispatch needs a folder and a file has its name."""
        misplaced = misplaced_files(self._store.consume_queue)
        end, multi_dispatch = plan.log.end_offset, self._options.enable_multi_dispatch
        for queue in queues_between(plan.files, plan.dispatch_from, end, multi_dispatch) if misplaced else ():
            folder = self._store.queue_folder(queue.topic, queue.queue_id)
            for path in misplaced & {folder.parent, folder}:
                raise StoreRefusedError(f"{path} is not a folder, and the log has messages for the queue {folder}; move it away")

    def _refuse_later_record(self, log: Log, end: int) -> None:
        """Raise StoreRefusedError, before any change, if the log continues with a record of RocketMQ 5."""
        holder = log.index_of(end)
        if holder is not None:
            segment = log.segments[holder]
            with mapped(segment.path) as view:
                refuse_later_record(view, end - segment.start_offset, end)

    def _has_work(self, plan: _Plan, watermark: DurableWatermark | None) -> bool:
        """Whether the plan has changes in addition to syncs."""
        end = plan.log.end_offset
        return (
            plan.start.path is RecoveryPath.ABNORMAL
            or self._was_cut
            or plan.log.changes_something
            or any(cut.changes_something for cut in plan.cuts)
            or bool(plan.index.deleted)
            or bool(plan.orphaned_folders)
            or plan.dispatch_from < end
            or plan.start.marker is not None
            or self._failure is not None
            or self._copied is not None
            or (watermark is not None and watermark.flushed != end)
            or self._checkpoint_is_ahead(plan)
        )

    def _checkpoint_is_ahead(self, plan: _Plan) -> bool:
        """Whether the checkpoint has times later than the log's last message, or an index time without an index."""
        checkpoint = plan.start.checkpoint
        if checkpoint.index_msg_timestamp_ms and not list_index_files(self._store):
            return True
        newest_ms = max(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms)
        return newest_ms > max(0, plan.log.scan.last_store_timestamp_ms) and newest_ms > max(0, plan.last_stored_ms)

    # -- execute ------------------------------------------------------------------

    def _log_change(self, plan: _Plan) -> LogChange:
        # A failed sync may have gone unnoticed; not in a copy, which no engine has ever synced.
        may_have_failed = self._has_failed_sync or (
            plan.files.owner is Owner.PYENGINE and plan.start.path is RecoveryPath.ABNORMAL and self._copied is None)
        return LogChange(self._work, plan.files, plan.log, self.durable_end if may_have_failed else None,
                         has_failed_sync=self._has_failed_sync)

    def _carry_out(self, plan: _Plan, watermark: DurableWatermark | None) -> list[QueueState]:
        """Change the store as planned; return the queues afterwards."""
        failpoint("recovery_planned")
        sweep_unfinished(self._store)
        change = self._log_change(plan)
        change.remove_spares()
        self._on_step("marker")
        write_marker(self._store, RecoveryMarker(plan.start.path, plan.log.scan.scan_from, plan.dispatch_from))
        failpoint("recovery_marked")
        if watermark is not None and plan.log.end_offset < watermark.flushed:
            self._on_step("accept-loss")
            write_watermark(self._store, watermark.moved_to(plan.log.end_offset))
            failpoint("recovery_loss_accepted")
        change.apply()
        self._quarantine_orphans(plan)
        cuts = [] if plan.orphaned_folders else [cut for cut in plan.cuts if cut.changes_something]
        for cut in cuts:
            self._on_step("cut queue")
            apply_cut(cut)
            failpoint("recovery_queue_cut")
        if plan.index.deleted and not plan.orphaned_folders:
            self._on_step("delete index")
            delete_index_files(plan.index.deleted)
            failpoint("recovery_index_deleted")
        unchanged = None if cuts or plan.orphaned_folders else plan.queues
        dispatch = LogDispatch(self._work, plan.files, plan.log, plan.index_progress)
        self._dispatched_from, queues = dispatch.run(plan.dispatch_from, unchanged)
        self._finish(plan, watermark)
        return queues

    def _quarantine_orphans(self, plan: _Plan) -> None:
        for folder in plan.orphaned_folders:
            self._on_step("quarantine orphans")
            self._quarantine.add_file(folder, 0, "the commit log that these belong to does not exist", kind="derived")

    def _finish(self, plan: _Plan, watermark: DurableWatermark | None) -> None:
        if self._rebuilt is not None:
            self._on_step("queue times")
            restore_queue_times(self._store, self._rebuilt)
        self._on_step("checkpoint")
        last_ms = max(0, plan.last_stored_ms)
        write_checkpoint(self._store, Checkpoint(last_ms, last_ms, synced_index_time_ms(self._store)))
        failpoint("recovery_checkpoint_written")
        if watermark is not None and (self._copied is not None or watermark.flushed != plan.log.end_offset):
            self._on_step("watermark")
            write_watermark(self._store, watermark.moved_to(plan.log.end_offset))
            failpoint("recovery_watermark_written")
        if plan.files.owner is Owner.ROCKETMQ and _next_read_from(plan) < plan.log.scan.scan_from:
            self._on_step("kept from")
            write_recovered_from(self._store, plan.log.scan.scan_from)
        failpoint("recovery_kept_noted")
        if self._failure is not None:
            self._on_step("sync failure")
            forget_sync_failure(self._store)
        self._on_step("abort")
        remove_abort_file(self._store)
        failpoint("recovery_abort_removed")
        self._on_step("remove marker")
        remove_rebuild_marker(self._store)
        remove_marker(self._store)
        failpoint("recovery_marker_removed")

    def _next_offsets(self, plan: _Plan, queues: list[QueueState]) -> dict[tuple[str, int], int]:
        """Call next_offsets_from_log(); not in RocketMQ's stores, where an entry's position is its offset, whatever the record has."""
        if plan.files.owner is not Owner.PYENGINE:
            return {}
        given = next_offsets_from_log(plan.files, queues, plan.log.scan.scan_from, plan.log.end_offset)
        for topic, queue_id in sorted(given):
            self._notes.append(f"queue {queue_id} of {topic} lacks entries, since its last message has a higher queue offset than "
                               f"its entry: run {command('rebuild', 'STORE', '--topic', topic, '--queue-id', queue_id)}")
        return given

    # -- report -------------------------------------------------------------------

    def _report(self, plan: _Plan, queues: list[QueueState], state: RecoveryState, changed: bool) -> RecoveryReport:
        log, end, damage_offset = plan.log, plan.log.end_offset, None
        stranded = self._quarantine
        if state is RecoveryState.DEGRADED:
            stranded = Quarantine(self._store, dry_run=True)
            LogChange(replace(self._work, quarantine=stranded), plan.files, log, None, has_failed_sync=False).preview()
        if state is RecoveryState.DEGRADED:  # the log continues after the damage, and nothing of the plan is done
            damage_offset, end = end, find_end(self._store, plan.files).end_offset
            log = replace(log, drains=(), extra=(), cut_bytes=0)
            plan = replace(plan, cuts=(), index=replace(plan.index, deleted=()))
        pieces, scan = tuple(self._quarantine.pieces), log.scan
        gone = sum(cut.entries for cut in plan.cuts)
        if gone:
            self._notes.append(f"{gone} queue entries named messages after the end of the log at {end}: they are not in it")
        return RecoveryReport(
            path=plan.start.path,
            state=state,
            exit_code=ExitCode.CORRUPTION if damage_offset is not None else ExitCode.REPAIRED if pieces else ExitCode.OK,
            min_offset=plan.files.min_offset,
            end_offset=end,
            scan_from=scan.scan_from,
            stop_reason=str(scan.reason),
            records=scan.records,
            messages=scan.messages,
            kept_bytes=max(0, end - max(plan.files.min_offset, 0)),
            cut_bytes=log.cut_bytes,
            drained_bytes=log.drained_bytes,
            dispatched_bytes=0 if self._dispatched_from is None else max(0, end - self._dispatched_from),
            last_store_timestamp_ms=scan.last_store_timestamp_ms,
            damage_offset=damage_offset,
            watermark=plan.files.watermark if self._copied is None else self._copied.flushed,
            is_copy=self._copied is not None,
            stranded_bytes=sum(piece.size_bytes for piece in stranded.pieces),
            shared_state=log.shared_state,
            queue_ends={(queue.topic, queue.queue_id): queue.max_offset for queue in queues},
            index_files_removed=len(plan.index.deleted),
            queue_entries_removed=gone,
            removed_files=tuple(
                shown(segment.path, self._store.root) for segment, kind in log.extra if kind is not Extra.STRANDED),
            cut_queues=tuple(
                CutQueue(cut.after.topic, cut.after.queue_id, cut.entries, len(cut.deleted), cut.cleared is not None)
                for cut in plan.cuts if cut.changes_something
            ),
            deleted_index_files=tuple((file.path.name, file.label) for file in plan.index.deleted),
            quarantined=pieces,
            notes=tuple(self._notes),
            changed=changed,
            is_dry_run=self._is_dry_run,
        )


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


def _next_read_from(plan: _Plan) -> int:
    """Return where the next recovery, after an orderly stop, begins to read the log of `plan`."""
    kept = [segment for segment in plan.files.segments if segment.start_offset <= plan.log.end_offset]
    return kept[first_after_orderly_stop(plan.files, len(kept))].start_offset if kept else plan.log.scan.scan_from
