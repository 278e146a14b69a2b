"""Decide where the commit log must end, and truncate it there.

    plan_log    makes a `LogPlan` from scan, commit slot, pool and watermark; reads only
    LogChange   executes it: quarantine; segments after the end, newest first; drain; clear the tail; sync

Recovery does not delete a message that a producer or a reader may know: it goes to quarantine/ before the log
changes. Only bytes that provably none of them knows are cleared without a copy.

A cut truncates the log on purpose at a record boundary: of a slave whose master does not have the records after it.
Only a cut lowers the durable watermark below undamaged bytes, so `intend_cut` notes it in config/cut before anything
changes; from then on it will happen, since the next recovery of the store, or any later one, finishes it first
(`carry_out_cut`), and then matches queues and index to the log.
"""

from __future__ import annotations

import enum
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, DiskError
from pyengine.formats.constants import MESSAGE_BYTES_MIN
from pyengine.formats.paths import Root
from pyengine.formats.record import BEGIN, I64, PHYSICAL_OFFSET_AT, CaseLabel
from pyengine.native.failpoints import failpoint
from pyengine.native.scan import walk
from pyengine.storage.checkpoint import read_watermark, write_watermark
from pyengine.storage.commit_log import Log, LogScan, Owner, new_segment_folder, scan_log
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.durable_writes import create_file, free_end, rewrite, sync_file, sync_folder, write_at
from pyengine.storage.file_system import free_bytes
from pyengine.storage.mapped_file import MappedFile, clear_file_from, mapped, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.quarantine import Quarantine
from pyengine.storage.recovery.report import GrowingProgress, Progress, SharedState


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


# -- the plan ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The decision about the log.

    `drains` are (offset, bytes) to be written to the files, `undrained` pool bytes
    that are no complete records. `extra` are the segments to be removed, oldest first.
    """

    scan: LogScan
    end_offset: int
    by_slot: bool  # the end is the commit slot's; otherwise that of the scan
    shared_state: str
    tail: Tail = Tail.NOTHING
    tail_bytes: int = 0  # up to the last non-zero one
    cut_bytes: int = 0
    drains: tuple[tuple[int, memoryview], ...] = ()
    undrained: tuple[tuple[int, memoryview], ...] = ()
    extra: tuple[tuple[MappedFile, Extra], ...] = ()

    @property
    def drained_bytes(self) -> int:
        return sum(len(content) for _, content in self.drains)

    @property
    def changes_something(self) -> bool:
        return bool(self.drains or self.undrained or self.extra or self.tail is not Tail.NOTHING)


def plan_log(
    log: Log, first: int, shared: SharedState | None, *, check_crc: bool, progress: Progress | None = None
) -> LogPlan:
    """Find the log's end, reading from segment `first` on, and decide what happens to the bytes beyond it."""
    plan, note = None, "none"
    if shared is not None:
        plan, note = _plan_with_shared_state(log, first, shared, check_crc, progress)
    if plan is None:
        scan = scan_log(log, first, check_crc=check_crc, progress=progress)
        plan = LogPlan(scan, scan.end_offset, False, note)
    end, by_slot = plan.end_offset, plan.by_slot
    index = log.index_of(end)
    if index is not None:
        tail, used_bytes = judge_tail(log.segments[index], end, plan.scan.reason, log.owner, by_slot=by_slot)
        plan = replace(plan, tail=tail, tail_bytes=used_bytes)
    extra, cut_bytes = [], plan.tail_bytes
    for segment in log.segments:
        if segment.start_offset > end:  # one that begins at the end itself remains, as in RocketMQ's truncation
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
    plan = LogPlan(scan, needed, True, "used")
    return (_with_pool(log, plan, shared) if shared.pool_buffers else plan), ""


def _with_pool(log: Log, plan: LogPlan, shared: SharedState) -> LogPlan:
    """Extend the plan by the complete records between `committed` and the commit slot, which are in the pool's buffers."""
    drains: list[tuple[int, memoryview]] = []
    undrained: list[tuple[int, memoryview]] = []
    scan = plan.scan
    for base, buffer in sorted(shared.pool_buffers, key=lambda item: item[0]):
        segment_end = base + log.size_bytes
        start, end = max(shared.committed, base), min(shared.slot_end, segment_end)
        if start >= end:
            continue
        if scan.end_offset != start:  # the records of the previous buffer do not reach this one
            undrained.append((start, buffer[start - base : end - base]))
            continue
        result = walk(buffer, base, start, end, check_crc=True, strict=True, check_offset=True)
        reached, written = result.end_offset, result.end_offset
        if result.reason == CaseLabel.BLANK and end == segment_end:
            reached, written = segment_end, result.end_offset + BEGIN.size
        if written > start:
            drains.append((start, buffer[start - base : written - base]))
        if reached < end:
            undrained.append((reached, buffer[reached - base : end - base]))
        scan = scan.extended_by(result, reached, result.reason)
    return replace(plan, scan=scan, end_offset=scan.end_offset, drains=tuple(drains), undrained=tuple(undrained))


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


# -- execution --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The context of all steps of one recovery."""

    store: MessageStore
    options: EngineConfig
    progress: GrowingProgress
    quarantine: Quarantine
    notes: list[str]


class LogChange:
    """Executes the plan of the log. A crash may interrupt each step; the next recovery repeats it."""

    def __init__(self, work: Work, log: Log, plan: LogPlan, durable_end: int | None, *, has_failed_sync: bool) -> None:
        """`durable_end`: bytes after that offset may not be on the disk; None: all are, or will be after one sync.

        `has_failed_sync`: a sync has failed since the last boot, so that clean pages and names may not be on the disk either.
        """
        self._work, self._log, self._plan = work, log, plan
        self._durable_end, self._has_failed_sync = durable_end, has_failed_sync

    def remove_spares(self) -> None:
        """Remove segments of zeros after the end; on a disk without space for a segment also free the blocks of the zeros that follow it.

        The other steps need that space if the disk is full.
        """
        for segment, kind in reversed(self._plan.extra):
            if kind is Extra.SPARE:
                self._log.forget(segment.path)
                segment.path.unlink(missing_ok=True)
                sync_folder(segment.path.parent)
        holder = self._log.index_of(self._plan.end_offset)
        if holder is not None and not self._has_failed_sync:  # after a failed sync zeros may be in memory only
            last = self._log.segments[holder]
            if free_bytes(last.path.parent) < self._log.size_bytes:
                free_end(last.path, self._plan.end_offset - last.start_offset + self._plan.tail_bytes)

    def apply(self) -> None:
        """Quarantine, truncate, drain, clear and sync, in an order in which a crash loses no message."""
        end = self._plan.end_offset
        holder = self._log.index_of(end)
        _quarantine_bytes(self._log, self._plan, self._work.quarantine)
        for segment, kind in reversed(self._plan.extra):
            if kind is Extra.SPARE:
                continue
            self._log.forget(segment.path)
            if kind is Extra.STRANDED:
                _quarantine_segment(self._plan, segment, self._work.quarantine)
            else:
                segment.path.unlink(missing_ok=True)
                sync_folder(segment.path.parent)
            failpoint("recovery_segment_gone")
        for start, content in self._plan.drains:
            base = start - start % self._log.size_bytes
            write_at(self._segment_path(base), content, start - base)
            failpoint("recovery_drained")
        if self._plan.tail is not Tail.NOTHING and holder is not None:
            segment = self._log.segments[holder]
            clear_file_from(segment.path, end - segment.start_offset)
        failpoint("recovery_tail_cleared")
        self.sync()
        failpoint("recovery_log_done")

    def sync(self) -> None:
        """Make the log durable from where the reading began to its end.

        Bytes that a dead engine had not synced are rewritten in place first: its last sync may have failed
        unnoticed, and a reader's mapping keeps pages in memory that never reached the disk. After a failed sync the
        zeros after the end and the names are written again too.
        """
        end, size_bytes = self._plan.end_offset, self._log.size_bytes
        sure = end if self._durable_end is None else max(self._durable_end, self._plan.scan.scan_from)
        if sure < end:
            self._log.forget()  # so that it is read again from the disk
        if self._has_failed_sync:
            holder = self._log.index_of(end)
            if holder is not None:
                clear_file_from(self._log.segments[holder].path, end - self._log.segments[holder].start_offset, zeros_too=True)
            for folder in {*(segment.path.parent for segment in self._log.segments), self._work.store.config}:
                sync_folder(folder)
        for path, base in self._work.store.list_log():  # with those that the drain has made
            if base >= end or base + size_bytes <= self._plan.scan.scan_from:
                continue
            if base + size_bytes > sure and sure < end:
                rewrite(path, max(sure - base, 0), min(end - base, size_bytes))
            else:
                sync_file(path)
        if sure < end:
            self._verify_rewritten(sure, end)
        if self._log.owner is Owner.ROCKETMQ:
            self._sync_names()

    def _verify_rewritten(self, start: int, end: int) -> None:
        """Raise DiskError unless the rewritten bytes are still the log that was found."""
        written = replace(self._log, segments=self._work.store.list_log())
        found = scan_log(written, written.index_of(start) or 0, check_crc=self._work.options.check_crc_on_recover, limit=end)
        if found.end_offset != end:
            path = self._work.store.commit_log
            raise DiskError(f"the log in {path} was whole up to {end} and is not beyond {found.end_offset} ({found.reason}), now "
                            "that it was read from the disk: recover again", path=str(path))

    def _sync_names(self) -> None:
        """Sync the names of segments of another program: RocketMQ does not sync folders, and the watermark will cover these files."""
        folders = {self._work.store.root, *(segment.path.parent for segment in self._log.segments)}
        for top in (self._work.store.consume_queue, self._work.store.consume_queue_ext, self._work.store.index):
            folders.update(Path(folder) for folder, _, _ in os.walk(top))
        for folder in folders:
            sync_folder(folder)

    def _segment_path(self, base: int) -> Path:
        path = self._work.store.commit_log_segment(base)
        if not path.exists():
            path = new_segment_folder(self._work.store, base, self._log.size_bytes) / path.name
            os.close(create_file(path.parent, path.name, self._log.size_bytes, allocate="none"))
        return path


def quarantine_log(log: Log, plan: LogPlan, quarantine: Quarantine) -> None:
    """Put what leaves the log into quarantine, in the order of LogChange.apply; for a dry run, which only lists it."""
    _quarantine_bytes(log, plan, quarantine)
    for segment, kind in reversed(plan.extra):
        if kind is Extra.STRANDED:
            _quarantine_segment(plan, segment, quarantine)


def _quarantine_bytes(log: Log, plan: LogPlan, quarantine: Quarantine) -> None:
    """Copy the parts of files and of the pool that leave the log to quarantine."""
    end = plan.end_offset
    holder = log.index_of(end)
    for start, content in plan.undrained:
        quarantine.add_memory(start, content, "pool bytes that are no whole records")
    if plan.tail.may_be_message and holder is not None:
        segment = log.segments[holder]
        quarantine.add_bytes(segment.path, segment.start_offset, end, segment.start_offset + log.size_bytes,
                             f"after the end of the log at {end} ({plan.scan.reason})")


def _quarantine_segment(plan: LogPlan, segment: MappedFile, quarantine: Quarantine) -> None:
    quarantine.add_file(segment.path, segment.start_offset, f"{Extra.STRANDED}: the log ends at {plan.end_offset}")


@dataclass(frozen=True, slots=True)
class Cut:
    """The decision that the log [.., end) must end at `at`. `kept`: the copy of the bytes to clear is in quarantine/."""

    at: int
    end: int
    reason: str
    kept: bool = False


CUT: DurableRecord[Cut] = DurableRecord(
    "cut", asdict, lambda fields: Cut(int(fields["at"]), int(fields["end"]), str(fields["reason"]), bool(fields["kept"])), indent=1)


def intend_cut(root: Root, cut: Cut) -> None:
    """Note a cut, durable before this returns. The caller owns the store; `cut.at` is a record boundary above the log's start."""
    CUT.write(root, cut)


def read_cut(root: Root) -> Cut | None:
    """Return the unfinished cut, None if there is none. CorruptionError for a damaged note."""
    cut, damage = CUT.read(root)
    if damage:
        raise CorruptionError(f"{CUT.path(root)} is damaged: a cut of the log was in progress. Remove the file to keep what the log "
                              "holds now; a slave finds out again from its master what has to go")
    return cut


def carry_out_cut(store: MessageStore, cut: Cut, quarantine: Quarantine) -> str:
    """Execute the cut, continuing an interrupted one; return a sentence about it."""
    watermark, size_bytes = read_watermark(store).watermark, store.segment_bytes
    if watermark is not None and watermark.flushed > cut.at:
        write_watermark(store, watermark.moved_to(cut.at))
        failpoint("cut_watermark_lowered")
    segments = store.list_log()
    holder = next((each for each in segments if each.start_offset < cut.at < each.start_offset + size_bytes), None)
    if holder is not None and not cut.kept:
        quarantine.add_bytes(holder.path, holder.start_offset, cut.at, holder.start_offset + size_bytes, cut.reason)
        failpoint("cut_copied")
    if not cut.kept:
        intend_cut(store, replace(cut, kept=True))
        failpoint("cut_kept")
    for segment in reversed(segments):
        if segment.start_offset < cut.at:
            break
        if used_end(segment.path):
            quarantine.add_file(segment.path, segment.start_offset, cut.reason)
        else:
            segment.path.unlink()
            sync_folder(segment.path.parent)
        failpoint("cut_segment_gone")
    if holder is not None:
        clear_file_from(holder.path, cut.at - holder.start_offset)
        failpoint("cut_cleared")
    path = CUT.path(store)
    path.unlink()
    failpoint("cut_note_unlinked")
    sync_folder(path.parent)
    failpoint("cut_done")
    return f"the log was cut at {cut.at}, {cut.end - cut.at:,} bytes of it are in quarantine: {cut.reason}"
