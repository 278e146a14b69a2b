"""Decide what a recovery does, from what was found (look.py) and the bytes of the log. Reads only; apply.py carries it out.

    plan_log     where the log ends, by scan, commit slot and pool, and what happens to the bytes beyond
    plan_cut     how a queue is truncated to the log
    plan_index   which index files are deleted
    decide       these, where dispatch begins, and what is refused: the `RecoveryPlan`

Recovery does not delete a message that a producer or a reader may know: it goes to quarantine/ before the log
changes. Only bytes that provably none of them knows are cleared without a copy.

After a crash entries of records at or after the end of the log are dropped (truncateDirtyLogicFiles; docs/recovery.md,
"Queues"). RocketMQ does not dispatch again after a hole, and loses the entries after it.

Where dispatch begins is in docs/recovery.md, too. RocketMQ begins at the segment where an
abnormal recovery began to read, else at the record with the highest offset in any queue (DefaultMessageStore.start);
after a crash it deletes index files, and enters only the keys from there on (IndexService.load). That is right if queues
lose only their newest entries. Here dispatch begins earlier if entries or keys would be left out of records that the log
still has. If shared memory is valid, everything below its `reput_from` has been dispatched.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, StoreRefusedError
from pyengine.formats.constants import MESSAGE_BYTES_MIN
from pyengine.formats.index_file import IndexLayout
from pyengine.formats.record import BEGIN, I64, PHYSICAL_OFFSET_AT, CaseLabel
from pyengine.native.dispatch import TouchedQueue, touched_queues
from pyengine.native.scan import walk
from pyengine.storage.checkpoint import Cut, DurableWatermark, RecoveryPath, SharedState
from pyengine.storage.commit_log import (
    MISSING_SEGMENT,
    Log,
    LogRun,
    LogScan,
    Owner,
    RecoveryStart,
    find_end,
    find_recovery_start,
    first_after_orderly_stop,
    next_record,
    own_watermark,
    scan_before,
    scan_log,
    shown,
)
from pyengine.storage.durable_writes import start_writeback
from pyengine.storage.index_file import is_plausible
from pyengine.storage.later_format import refuse_later_record
from pyengine.storage.mapped_file import MappedFile, mapped, used_end
from pyengine.storage.recovery.look import Found, IndexState, QueueState, count_entries_beyond_log, measured_from, truncated
from pyengine.storage.recovery.quarantine import QuarantinedPiece
from pyengine.storage.recovery.report import CutQueue, Progress, RecoveryReport, RecoveryState

# -- the log -------------------------------------------------------------------------


class Tail(enum.StrEnum):
    """What is between the log's end and the end of its segment."""

    NOTHING = "nothing"          # zeros: the store was stopped in order, or killed between puts
    UNPUBLISHED = "unpublished"  # a pass after which the commit slot was not moved: no producer got an answer
    ROLL = "roll"                # RocketMQ closed the last segment and made no new one; its next put does it again
    TORN = "torn"                # one put that a crash interrupted: a head with this offset, and only zeros after it
    SPOILED = "spoiled"          # a complete record whose body or text has changed, in a log without a watermark
    UNKNOWN = "unknown"          # anything else: random bytes, stale records, records after a hole

    @property
    def may_be_message(self) -> bool:
        """Whether the bytes go to quarantine/ before they are cleared."""
        return self in (Tail.SPOILED, Tail.UNKNOWN)


class Extra(enum.StrEnum):
    """What a segment after the one that contains the log's end is; only STRANDED goes to quarantine/, the others are deleted."""

    SPARE = "spare"              # zeros: created ahead and never written to
    UNPUBLISHED = "unpublished"  # as above
    STRANDED = "stranded"        # records that cannot be reached from the log, because of damage before them


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The decision about the log.

    `drains` are (offset, bytes) to be written to the files, `stranded_pool` published pool bytes
    after the log's end. `extra` are the segments to be removed, oldest first.
    """

    files: Log
    scan: LogScan
    by_slot: bool  # the end is the commit slot's; otherwise that of the scan
    shared_state: str
    tail: Tail = Tail.NOTHING
    tail_bytes: int = 0  # up to the last non-zero one
    cut_bytes: int = 0
    drains: tuple[tuple[int, memoryview], ...] = ()
    stranded_pool: tuple[tuple[int, memoryview], ...] = ()
    extra: tuple[tuple[MappedFile, Extra], ...] = ()
    cut: Cut | None = None  # why the log ends there, if that was decided before

    @property
    def end_offset(self) -> int:
        return self.scan.end_offset

    @property
    def holder(self) -> MappedFile | None:
        """The segment that the log ends in."""
        index = self.files.index_of(self.end_offset)
        return None if index is None else self.files.segments[index]

    @property
    def drained_bytes(self) -> int:
        return sum(len(content) for _, content in self.drains)

    @property
    def changes_something(self) -> bool:
        return bool(self.drains or self.stranded_pool or self.extra or self.tail is not Tail.NOTHING)


def plan_log(
    log: Log, first: int, shared: SharedState | None, *, check_crc: bool, progress: Progress | None = None, cut: Cut | None = None,
    beyond: Sequence[MappedFile] = (),
) -> LogPlan:
    """Find the log's end, reading from segment `first` on, and decide what happens to the bytes beyond it.

    `beyond`: the segments after a `cut`, which are not in `log`.
    """
    plan, note = None, "none"
    if shared is not None:
        plan, note = _plan_with_shared_state(log, first, shared, check_crc, progress)
    if plan is None:
        scan = scan_log(log, first, check_crc=check_crc, limit=None if cut is None else cut.at, progress=progress)
        plan = LogPlan(log, scan, False, note, cut=cut)
        if shared is not None and not shared.mismatch:  # no file may have these bytes
            plan = replace(plan, stranded_pool=tuple(
                (start, buffer[start - base : end - base]) for base, buffer, start, end in _published(shared, scan.end_offset)))
    end, by_slot = plan.end_offset, plan.by_slot
    if plan.holder is not None:
        tail, used_bytes = judge_tail(plan.holder, end, plan.scan.reason, log.owner, by_slot=by_slot)
        plan = replace(plan, tail=tail, tail_bytes=used_bytes)
    extra, cut_bytes = [], plan.tail_bytes
    for segment in (*log.segments, *beyond):
        if segment.start_offset > end or segment in beyond:  # one that begins at the end itself remains, as in RocketMQ's truncation
            used_bytes = used_end(segment.path)
            extra.append((segment, Extra.SPARE if not used_bytes else Extra.UNPUBLISHED if by_slot else Extra.STRANDED))
            cut_bytes += used_bytes
    return replace(plan, extra=tuple(extra), cut_bytes=cut_bytes)


# -- the shared state ---------------------------------------------------------------


def _plan_with_shared_state(
    log: Log, first: int, shared: SharedState, check_crc: bool, progress: Progress | None
) -> tuple[LogPlan | None, str]:
    """Return a plan by the commit slot; or None and the reason why the slot is not used.

    The files must reach the position that shared memory has for them: the slot's, in
    pool mode `committed`. They end earlier after a power cut, or if they were replaced.
    """
    if shared.mismatch:
        return None, f"discarded: {shared.mismatch}"
    needed = shared.committed if shared.pool_buffers else shared.slot_end
    scan = scan_log(log, first, check_crc=check_crc, limit=needed, progress=progress)
    if scan.end_offset != needed:
        return None, f"discarded: the files end at {scan.end_offset}, before its position {needed}"
    plan = LogPlan(log, scan, True, "used")
    return (_with_pool(plan, shared) if shared.pool_buffers else plan), ""


def _with_pool(plan: LogPlan, shared: SharedState) -> LogPlan:
    """Extend the plan by the complete records between `committed` and the commit slot, which are in the pool's buffers."""
    drains: list[tuple[int, memoryview]] = []
    stranded_pool: list[tuple[int, memoryview]] = []
    scan = plan.scan
    for base, buffer, start, end in _published(shared, shared.committed):
        segment_end = base + len(buffer)
        if scan.end_offset != start:  # the records of the previous buffer do not reach this one
            stranded_pool.append((start, buffer[start - base : end - base]))
            continue
        result = walk(buffer, base, start, end, check_crc=True, strict=True, check_offset=True)
        reached, written = result.end_offset, result.end_offset
        if result.reason == CaseLabel.BLANK and end == segment_end:
            reached, written = segment_end, result.end_offset + BEGIN.size
        if written > start:
            drains.append((start, buffer[start - base : written - base]))
        if reached < end:
            stranded_pool.append((reached, buffer[reached - base : end - base]))
        scan = scan.extended_by(result, reached, result.reason)
    return replace(plan, scan=scan, drains=tuple(drains), stranded_pool=tuple(stranded_pool))


def _published(shared: SharedState, begin: int) -> Iterator[tuple[int, memoryview, int, int]]:
    """Yield (base, buffer, start, end) of each pool buffer, oldest first, that has published bytes [start, end) from `begin` on."""
    for base, buffer in sorted(shared.pool_buffers, key=lambda item: item[0]):
        start, end = max(begin, base), min(shared.slot_end, base + len(buffer))
        if start < end:
            yield base, buffer, start, end


def judge_tail(segment: MappedFile, end_offset: int, reason: str, owner: Owner, *, by_slot: bool = False) -> tuple[Tail, int]:
    """Return what a segment has from `end_offset` on, and its bytes up to the last non-zero one; `reason`: why the walk stopped there.

    In a RocketMQ store it is unknown what was synced, so a spoiled record may be a message; above pyengine's watermark
    the record was not durable yet, and its writer died.
    """
    start = end_offset - segment.start_offset
    used_bytes = used_end(segment.path, start) - start
    if used_bytes == 0:
        return Tail.NOTHING, 0
    if by_slot:
        return Tail.UNPUBLISHED, used_bytes
    if reason == CaseLabel.BLANK:
        return Tail.ROLL, used_bytes
    if reason not in (CaseLabel.TORN, CaseLabel.BAD_CRC, CaseLabel.BAD_TEXT):
        return Tail.UNKNOWN, used_bytes
    with mapped(segment.path) as view:
        size_bytes, _ = BEGIN.unpack_from(view, start)
        names_this_offset = (
            start + PHYSICAL_OFFSET_AT + I64.size <= len(view)
            and I64.unpack_from(view, start + PHYSICAL_OFFSET_AT)[0] in (0, end_offset)
        )
    if not names_this_offset or size_bytes < max(MESSAGE_BYTES_MIN, used_bytes):
        return Tail.UNKNOWN, used_bytes
    # A complete record ends with its properties or, without properties, with its topic and two zeros.
    is_unfinished = size_bytes - used_bytes > 2
    return (Tail.TORN if is_unfinished or owner is Owner.PYENGINE else Tail.SPOILED), used_bytes


# -- queues and index ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueCut:
    """The truncation of one queue: files to delete, newest first, and the bytes of `cleared` from `clear_from` on."""

    after: QueueState    # the queue afterwards; without files if all are deleted
    deleted: tuple[MappedFile, ...] = ()
    cleared: MappedFile | None = None
    clear_from: int = 0  # byte in that file
    entries: int = 0     # entries of records that the log no longer has
    rebuild_from: int | None = None  # if entries after a hole are dropped: the physical offset to dispatch again from

    @property
    def changes_something(self) -> bool:
        return bool(self.deleted or self.cleared)


def plan_cut(queue: QueueState, log_end: int, *, keep_place: bool) -> QueueCut:
    """Return the truncation of `queue` for a log that ends at `log_end`. Reads only.

    `keep_place`: if no entry is left of a queue that did not begin at 0, its first
    file remains, empty, so that its queue offsets are not used again.
    """
    end, max_physical_offset, entries = queue.end, queue.max_physical_offset, 0
    reaches_beyond = queue.last_offset >= log_end
    if reaches_beyond:
        end, max_physical_offset, entries = truncated(queue, log_end)
    kept = tuple(file for file in queue.files if file.start_offset < end)
    if not kept and keep_place and queue.files[0].start_offset > 0:
        kept, end = queue.files[:1], queue.files[0].start_offset
    is_whole = not reaches_beyond and len(kept) == len(queue.files)
    after = queue if is_whole else replace(
        queue, files=kept, end=end if kept else 0, max_physical_offset=max_physical_offset)
    cut = QueueCut(after, deleted=tuple(reversed(queue.files[len(kept):])), entries=entries)
    is_lossy = any(used_end(file.path) for file in cut.deleted)
    if kept:
        clear_from = end - kept[-1].start_offset
        if used_end(kept[-1].path, clear_from) > clear_from:
            cut = replace(cut, cleared=kept[-1], clear_from=clear_from)
            is_lossy = True
    if is_lossy and not reaches_beyond:  # the queue has entries after its own end: a hole
        cut = replace(cut, rebuild_from=max(0, max_physical_offset))
    return cut


class DeletedIndex(NamedTuple):
    """An index file that is to be deleted; `label` says why (docs/recovery.md, "Index files")."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The decision about the index files; `deleted` newest first, so that a crash leaves no gap between files."""

    deleted: tuple[DeletedIndex, ...]
    enter_from: int | None  # physical offset from which keys are entered again; None: nowhere


def plan_index(
    files: Sequence[IndexState], layout: IndexLayout, synced_time_ms: int | None, log_min: int, log_end: int
) -> IndexPlan:
    """Compare every index file with the log [log_min, log_end), and decide which are deleted.

    `synced_time_ms`: after a crash, also of a recovery, the checkpoint's index time; files with a later end
    time are deleted. None after an orderly stop, or if the undo of the unfinished put was kept.
    """
    enter_from, deleted = log_min, list[DeletedIndex]()
    for path, size_bytes, header in files:
        if deleted:
            label = "orphaned"
        elif size_bytes != layout.size_bytes:
            label = "short"
        elif header is None or not is_plausible(header, layout):
            label = "senseless"
        elif synced_time_ms is not None and header.end_timestamp_ms > synced_time_ms:
            label = "unsynced"
        elif header.index_count > 1 and header.end_physical_offset >= log_end:
            label = "beyond"
        else:
            enter_from = max(header.end_physical_offset, log_min)
            continue
        deleted.insert(0, DeletedIndex(path, label))
    return IndexPlan(tuple(deleted), enter_from if deleted or synced_time_ms is not None else None)


# -- where dispatch begins -----------------------------------------------------------


def dispatch_start(
    plan: LogPlan, cuts: Sequence[QueueCut], index: IndexPlan, synced_below: int, *, reputter: SharedState | None, options: EngineConfig,
) -> int:
    """Return where dispatch begins (docs/recovery.md), the log's end if nothing is missing, for queues and index as the plans leave them.

    `synced_below`: after a crash the offset below which entries are on the disk. `reputter`: see RecoveryPlan.
    """
    log, log_min = plan.files, max(plan.files.min_offset, 0)
    farthest = max((cut.after.max_physical_offset for cut in cuts), default=-1)
    if farthest <= log_min:
        wanted = [log_min]
    elif reputter is not None and reputter.reput_from is not None:
        wanted = [reputter.reput_from]
    else:
        wanted = [farthest, synced_below]
    wanted += [cut.rebuild_from for cut in cuts if cut.rebuild_from is not None]
    if index.enter_from is not None and options.message_index_enable:
        wanted.append(index.enter_from)
    start = max(log_min, min(wanted))
    if start not in (plan.scan.scan_from, plan.end_offset):  # a record begins there, or the last one ends
        start = record_start(log, start)
    if plan.drains or index.enter_from is not None or any(queues_between(log, start, plan.end_offset, options.enable_multi_dispatch)):
        return start
    return plan.end_offset  # only blanks, prepared and rolled back messages


def record_start(log: Log, offset: int) -> int:
    """Return `offset` if a record begins there or the log ends there, else the start of its segment."""
    index = log.index_of(offset)
    if index is None:
        return max(offset, log.min_offset, 0)
    base = log.segments[index].start_offset
    if offset == base:
        return base
    with log.open(log.segments[index]) as segment:
        reached = segment.walk(base, offset, limit=base + log.size_bytes, check_crc=False, check_offset=False).end_offset
    return offset if reached == offset else base


def queues_between(log: Log, start: int, end: int, multi_dispatch: bool) -> Iterator[TouchedQueue]:
    """Yield the queues of the records in [start, end) that can be read; a queue may come several times."""
    for piece in log.runs(start, end, next_record):
        if isinstance(piece, LogRun):
            touched = touched_queues(piece.segment.view, piece.segment.base, piece.start, piece.end, multi_dispatch=multi_dispatch)
            yield from touched.queues
            piece.stopped(touched.reached, touched.reason)


# -- the whole plan ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a recovery does, decided before its first change. `report` tells it, apply.py carries it out."""

    found: Found
    options: EngineConfig
    accept_loss: bool
    watermark: DurableWatermark | None  # for a copy that has an identity of its own by now, one that covers no bytes yet
    copied: DurableWatermark | None     # the original's watermark in a copied store
    start: RecoveryStart
    log: LogPlan
    cuts: tuple[QueueCut, ...]
    index: IndexPlan
    dispatch_from: int
    reputter: SharedState | None        # valid shared memory if what its reputter dispatched counts, else None

    @property
    def files(self) -> Log:
        """The log's files."""
        return self.log.files

    @property
    def may_have_failed_sync(self) -> bool:
        """Whether a sync failed, perhaps unnoticed as its engine died; never in a copy, which no engine has synced."""
        return self.found.notes.has_failed_sync or (
            self.files.owner is Owner.PYENGINE and self.start.path is RecoveryPath.ABNORMAL and self.copied is None)

    @property
    def unsure_from(self) -> int:
        """Bytes of the log from here on may not be on the disk; its end if all are, or will be after one sync."""
        durable_end = self.found.notes.durable_end
        if self.copied is not None and self.watermark is not None:
            durable_end = self.watermark.flushed
        return max(durable_end, self.log.scan.scan_from) if self.may_have_failed_sync else self.log.end_offset

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
    def is_degraded(self) -> bool:
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
        end, watermark, notes = self.log.end_offset, self.watermark, self.found.notes
        return (
            self.start.path is RecoveryPath.ABNORMAL
            or notes.cut is not None
            or notes.rebuilding is not None
            or self.log.changes_something
            or bool(self.index.deleted or self.found.orphans)
            or any(cut.changes_something for cut in self.cuts)
            or self.dispatch_from < end
            or notes.left.marker is not None
            or notes.failure is not None
            or self.copied is not None
            or (watermark is not None and watermark.flushed != end)
            or self._checkpoint_is_ahead()
        )

    def _checkpoint_is_ahead(self) -> bool:
        """Whether the checkpoint has times later than the log's last message, or an index time without an index."""
        checkpoint = self.found.notes.left.checkpoint
        if checkpoint.index_msg_timestamp_ms and not self.found.index_files:
            return True
        newest_ms = max(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms, checkpoint.index_msg_timestamp_ms)
        return newest_ms > max(0, self.log.scan.last_store_timestamp_ms) and newest_ms > max(0, self.last_stored_ms)

    # -- refusals, before any change

    def raise_refusals(self) -> None:
        """Raise what `recover` raises before any change; not for a plan that `is_degraded`, whose report says it."""
        if (holder := self.log.holder) is not None:
            with mapped(holder.path) as view:
                refuse_later_record(view, self.log.end_offset - holder.start_offset, self.log.end_offset)
        if not self.is_degraded:
            self._refuse_loss()
            self._refuse_misplaced()

    def _refuse_loss(self) -> None:
        """Raise CorruptionError if queues or index have messages whose bytes are in no segment, unless that is accepted.

        It is for RocketMQ's stores, which have no watermark to tell the loss; RocketMQ's own recovery empties the queues.
        """
        notes = self.found.notes
        if self.accept_loss or self.files.owner is Owner.PYENGINE or notes.left.marker is not None or notes.rebuilding is not None:
            return
        was_emptied = self.start.path is RecoveryPath.NORMAL and self.log.tail in (Tail.NOTHING, Tail.ROLL) and all(
            kind is Extra.SPARE for _, kind in self.log.extra)
        lost = lost_messages(self.files, self.found.queues, self.found.index_files, self.log.end_offset, was_emptied=was_emptied)
        if lost:
            raise CorruptionError(
                f"{self.found.store} has lost a part of its commit log: {lost}. Nothing was changed; restore what is missing from a "
                "copy, carve out what is whole with `pyengine salvage STORE DEST`, or give up those messages with "
                "`pyengine recover STORE --accept-loss`")

    def _refuse_misplaced(self) -> None:
        """Raise StoreRefusedError if dispatch needs a folder and a file has its name."""
        end, multi_dispatch, misplaced = self.log.end_offset, self.options.enable_multi_dispatch, self.found.misplaced
        for queue in queues_between(self.files, self.dispatch_from, end, multi_dispatch) if misplaced else ():
            folder = self.found.store.queue_folder(queue.topic, queue.queue_id)
            for path in misplaced & {folder.parent, folder}:
                raise StoreRefusedError(f"{path} is not a folder, and the log has messages for the queue {folder}; move it away")

    def report(self, pieces: Sequence[QuarantinedPiece] = ()) -> RecoveryReport:
        """Return what a recovery would do; `pieces`: what it puts into quarantine, if that is known."""
        log, end, damage_offset, is_degraded = self.log, self.log.end_offset, None, self.is_degraded
        cuts, deleted, notes = self.cuts, self.index.deleted, self.found.notes
        stranded_bytes = sum(piece.size_bytes for piece in pieces)
        if is_degraded:  # the log continues after the damage, and nothing of the plan is done
            damage_offset, end = end, find_end(self.found.store, self.files).end_offset
            log, cuts, deleted, pieces = replace(log, drains=(), extra=(), cut_bytes=0), (), (), ()
        scan, gone = log.scan, sum(cut.entries for cut in cuts)
        said = [_REREAD] * notes.has_failed_sync + [notes.reading.damage] * bool(notes.reading.damage)
        if gone:
            said.append(f"{gone} queue entries named messages after the end of the log at {end}: they are not in it")
        return RecoveryReport(
            path=self.start.path,
            state=RecoveryState.DEGRADED if is_degraded else RecoveryState.RECOVERED,
            min_offset=self.files.min_offset,
            end_offset=end,
            scan_from=scan.scan_from,
            stop_reason=str(scan.reason),
            records=scan.records,
            messages=scan.messages,
            kept_bytes=max(0, end - max(self.files.min_offset, 0)),
            cut_bytes=log.cut_bytes,
            drained_bytes=log.drained_bytes,
            dispatched_bytes=0 if is_degraded else max(0, end - self.dispatch_from),
            last_store_timestamp_ms=scan.last_store_timestamp_ms,
            damage_offset=damage_offset,
            watermark=self.files.watermark if self.copied is None else self.copied.flushed,
            is_copy=self.copied is not None,
            stranded_bytes=stranded_bytes,
            shared_state=log.shared_state,
            queue_ends={(queue.topic, queue.queue_id): queue.max_offset for queue in self.found.queues} if is_degraded else {},
            index_files_removed=len(deleted),
            queue_entries_removed=gone,
            removed_files=tuple(
                shown(segment.path, self.found.store.root) for segment, kind in log.extra if kind is not Extra.STRANDED),
            cut_queues=tuple(
                CutQueue(cut.after.topic, cut.after.queue_id, cut.entries, len(cut.deleted), cut.cleared is not None)
                for cut in cuts if cut.changes_something
            ),
            deleted_index_files=tuple((file.path.name, file.label) for file in deleted),
            quarantined=tuple(pieces),
            notes=tuple(said),
            changed=not is_degraded and self.has_work,
            is_dry_run=True,
        )


_REREAD = "a sync had failed: what may not have reached the disk was read from it and written again"


def decide(
    found: Found, options: EngineConfig, *, accept_loss: bool = False, progress: Progress | None = None, is_run: bool = False,
) -> RecoveryPlan:
    """Compare queues and index with the log, and both with what must be durable. Reads only.

    `is_run`: the caller carries the plan out, so a copy must have an identity of its own before its watermark is given up.
    """
    notes, reading, copied, left = found.notes, found.notes.reading, None, found.notes.left
    cut, is_rebuild, store = notes.cut, notes.rebuilding is not None, found.store
    segments = [segment for segment in found.segments if cut is None or segment.start_offset < cut.at]
    watermark, identity = reading.watermark, reading.identity
    own = own_watermark(reading, segments[0].start_offset if segments else 0)
    if own is not None and reading.is_copied and identity is not None and not (identity.is_copy and is_run):
        copied, watermark = watermark, replace(own, uuid=str(identity.uuid))
    log = Log.of(segments, store.segment_bytes, watermark).with_kept_mappings()
    start = find_recovery_start(left, log, has_failed_sync=notes.has_failed_sync)
    # An earlier recovery, interrupted or complete (then `abort` is gone), has put keys that the undo in shared memory does not have.
    is_abnormal = start.path is RecoveryPath.ABNORMAL
    is_untouched = is_abnormal and left.marker is None and not is_rebuild and not notes.has_failed_sync
    first, is_ours, check_crc = start.first, log.owner is Owner.PYENGINE, options.check_crc_on_recover

    def planned(first: int) -> RecoveryPlan:
        shared = notes.shared if cut is None else None
        plan = plan_log(log, first, shared, check_crc=check_crc, progress=progress, cut=cut, beyond=found.segments[len(segments):])
        reputter = shared if plan.by_slot and is_untouched else None
        if reputter is not None and None in (reputter.reput_from, reputter.index_progress):
            reputter = None
        scan_from, end, is_crash = plan.scan.scan_from, plan.end_offset, (is_abnormal or left.marker is not None) and reputter is None
        # After a crash the checkpoint, by which scan_from was chosen, covers older records.
        measured = [measured_from(queue, scan_from) for queue in found.queues] if is_abnormal else found.queues
        cuts = tuple(plan_cut(queue, end, keep_place=is_ours) for queue in measured)
        index = plan_index(found.index_files, store.geometry.index_layout,
                           left.checkpoint.index_msg_timestamp_ms if is_crash else None, max(log.min_offset, 0), end)
        if "index" in notes.pieces:
            index = IndexPlan((), None)
        dispatch_from = dispatch_start(plan, cuts, index, scan_from if is_abnormal else end, reputter=reputter, options=options)
        return RecoveryPlan(found, options, accept_loss, watermark, copied, start, plan, cuts, index, dispatch_from, reputter)

    if is_rebuild and not is_ours and left.marker is None:  # no more is read than must be, or damage there would end the log
        first = max(0, len(segments) - 1)
    with start_writeback(log.unsynced_paths):
        plan = planned(first)
        # Read what is dispatched now, and what the next start would read: damage there is damage below the watermark.
        read_from = min(plan.dispatch_from, plan.next_read_from, *[0] * is_rebuild)
        if is_ours and read_from < plan.log.scan.scan_from:
            first = log.index_of(max(read_from, log.min_offset)) or 0
            extended = scan_before(log, plan.log.scan, first, check_crc=check_crc)
            plan = planned(first) if extended is None else replace(plan, log=replace(plan.log, scan=extended))
    if is_rebuild or left.marker is not None:
        noted = 0 if is_rebuild or left.marker is None else left.marker.dispatch_from
        plan = replace(plan, dispatch_from=max(log.min_offset, 0, min(plan.dispatch_from, noted)))
    return plan


def lost_messages(
    log: Log, queues: Sequence[QueueState], index: Sequence[IndexState], end: int, *, was_emptied: bool
) -> str:
    """Return a sentence about messages that queues and index have and the log has no bytes of; "" if there are none.

    `was_emptied`: only zeros are at the log's end, although the store was stopped in order; after a crash the
    last messages may never have reached the disk, but their segment has.
    """
    files_end = log.segments[-1].start_offset + log.size_bytes if log.segments else 0
    entries = count_entries_beyond_log(queues, end if was_emptied else files_end, files_end)
    keys = 0 if log.segments else sum(file.keys for file in index)
    if not entries and not keys:
        return ""
    named = f"{entries} queue entries name" if entries else f"{keys} keys of the index name"
    return f"{named} messages after its end at {end}, where nothing is left"
